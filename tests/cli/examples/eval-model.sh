#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# A small model run/, token shards data/, text and questions for the examples of eval-model(1) and generate(1).
# usage: eval-model.sh, in the folder where the examples run
set -eu

mkdir -p tok
awk 'BEGIN { for (i = 0; i < 400; i++) printf "The system reads word%d and writes line %d of the text.\n\n", i % 37, i }' > corpus.txt
awk 'BEGIN { for (i = 0; i < 30; i++) printf "A word of the system is line %d, which the text reads again.\n", i }' > held-out.txt
train-tokenizer -q --vocab-size 400 --pattern llama3 -o tok/tokenizer.json corpus.txt
shard-data -q --tokenizer tok/tokenizer.json --split blank --val-fraction 0.1 -o data/ corpus.txt
init-model -q llama-1m --set num_hidden_layers=2 --set hidden_size=64 --tokenizer tok/tokenizer.json -o run/
for i in 0 1 2 3 4 5; do
    echo "{\"ind\": $i, \"ctx\": \"The system reads\", \"endings\": [\"word$i\", \"the text again and again\", \"line\", \"of\"], \"label\": $((i % 4))}"
done > choices.jsonl
for i in 1 2 3 4 5; do echo "{\"prompt\": \"The system reads word$i\"}"; done > prompts.jsonl
