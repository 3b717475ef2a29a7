#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# For the examples of peft-tune(1): the model m0/ of train(1), conversations, a T5 t5/, and problems with solutions.
# usage: peft-tune.sh, in the folder where the examples run, with the tools on PATH
set -eu

sh "$(dirname "$0")/train.sh"
for i in 1 2 3 4 5 6 7 8 9; do
    echo "{\"messages\":[{\"role\":\"user\",\"content\":\"The river $i?\"},{\"role\":\"assistant\",\"content\":\"The old stones $i.\"}]}"
done > chat.jsonl
for i in 1 2 3 4 5 6 7 8 9; do
    echo "{\"problem\":\"$i and $i is\",\"solution\":\" $((i + i))\"}"
done > facts.jsonl
for i in 1 2 3 4 5 6 7 8 9; do
    echo "{\"text\":\"translate: the river $i, der Fluss $i\"}"
done > t5.jsonl
train-tokenizer -q -m unigram -V 60 -s '<pad>' -s '</s>' -s '<unk>' -o t5.json t5.jsonl
init-model -q t5-9m -t t5.json --set d_model=32 --set d_kv=8 --set d_ff=48 --set num_layers=1 --set num_heads=2 -o t5
