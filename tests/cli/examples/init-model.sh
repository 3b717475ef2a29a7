#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# A tokenizer for the examples of init-model(1): tok/tokenizer.json.
# usage: init-model.sh, in the folder where the examples run
set -eu

mkdir -p tok
awk 'BEGIN { for (i = 0; i < 400; i++) printf "The system reads word%d and writes line %d of the text.\n", i % 37, i }' > corpus.txt
train-tokenizer -q --vocab-size 400 --pattern llama3 -o tok/tokenizer.json corpus.txt
