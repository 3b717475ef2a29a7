#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Data for the examples of shard-data(1): clean.jsonl, notes.txt and a small tokenizer in tok/.
# usage: shard-data.sh, in the folder where the examples run
set -eu

sentences() { # sentences N SEED -> N lines of English
    awk -v n="$1" -v x="$2" 'BEGIN {
        k = split("the river house old young garden walks under bridge stones water light carries slowly " \
                  "morning remember town market silver window opens before evening", w, " ")
        for (i = 1; i <= n; i++) {
            s = "The"
            for (j = 0; j < 12; j++) { x = (x * 16807) % 2147483647; s = s " " w[x % k + 1] }
            print s "."
        }
    }'
}

sentences 400 11 | sed 's/.*/{"text": "&"}/' > clean.jsonl
sentences 300 12 | sed G > notes.txt
train-tokenizer -q --vocab-size 400 -o tok/tokenizer.json clean.jsonl
