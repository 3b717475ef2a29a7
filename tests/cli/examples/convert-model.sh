#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Models for the examples of convert-model(1): model/, a Llama, and gpt2/.
# usage: convert-model.sh, in the folder where the examples run
set -eu

awk 'BEGIN { for (i = 0; i < 400; i++) printf "The system reads word%d and writes line %d of the text.\n\n", i % 37, i }' > corpus.txt
train-tokenizer -q --vocab-size 400 --pattern llama3 -o llama.json corpus.txt
train-tokenizer -q --vocab-size 400 --pattern gpt2 -o gpt2.json corpus.txt
init-model -q llama-1m --set num_hidden_layers=2 --set hidden_size=64 --tokenizer llama.json --dtype bf16 -o model/
init-model -q gpt2-124m --set n_layer=2 --set n_embd=64 --set n_head=2 --set n_positions=64 --tokenizer gpt2.json -o gpt2/
