#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# For the examples of peft-tune(1): the model m0/ of train(1), conversations, and problems with solutions.
# usage: peft-tune.sh, in the folder where the examples run, with the tools on PATH
set -eu

sh "$(dirname "$0")/train.sh"
for i in 1 2 3 4 5 6 7 8 9; do
    echo "{\"messages\":[{\"role\":\"user\",\"content\":\"The river $i?\"},{\"role\":\"assistant\",\"content\":\"The old stones $i.\"}]}"
done > chat.jsonl
for i in 1 2 3 4 5 6 7 8 9; do
    echo "{\"problem\":\"$i and $i is\",\"solution\":\" $((i + i))\"}"
done > facts.jsonl
