#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Text for the examples of train-tokenizer(1): clean.jsonl and notes.txt, made of a small stock of words.
# usage: train-tokenizer.sh, in the folder where the examples run
set -eu

sentences() { # how many -> that many lines of English, the same each time
    awk -v n="$1" 'BEGIN {
        k = split("the river house old young garden walks under bridge 1984 12 stones water light carries " \
                  "slowly morning don'\''t we'\''ll remember town market silver window opens before evening", w, " ")
        for (i = 1; i <= n; i++) {
            s = "The"
            for (j = 0; j < 9; j++) s = s " " w[(i * 7 + j * j * 5 + i * j * 3) % k + 1]
            print s (i % 3 ? "." : "!")
        }
    }'
}

sentences 400 > notes.txt
sed 's/.*/{"text": "&"}/' notes.txt > clean.jsonl
