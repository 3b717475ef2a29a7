#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Data for the examples of clean-data(1): raw.jsonl with good, short, repeated and nearly repeated documents,
# the same compressed, and a folder of notes.
# usage: clean-data.sh, in the folder where the examples run
set -eu

story() { # story SEED SENTENCES -> made-up words in English sentences, the same for the same seed
    awk -v x="$1" -v n="$2" '
    function word() {
        w = ""
        for (j = 0; j < 2 + x % 2; j++) { x = (x * 16807) % 2147483647; w = w s[x % k + 1] }
        return w
    }
    BEGIN {
        k = split("ba ri to ken lo mar sil ven da fo gur hel in jo pel qua ras tin ul wex", s, " ")
        x = x * 7919 + 17
        for (i = 0; i < n; i++)
            printf "%sThe %s of %s and %s have %s with %s in the %s.", i ? " " : "",
                word(), word(), word(), word(), word(), word()
    }'
}

{
    for i in 1 2 3 4 5 6 7 8; do
        printf '{"id": %d, "text": "%s"}\n' $i "$(story $i 30)"
    done
    printf '{"id": 9, "text": "too short"}\n'
    printf '{"id": 10, "text": "%s"}\n' "$(story 3 30)"
    printf '{"id": 11, "text": "%s One more sentence is here."}\n' "$(story 4 30)"
} > raw.jsonl
if command -v zstd > /dev/null; then
    zstd -q raw.jsonl
else
    cp raw.jsonl raw.jsonl.zst # what a file is follows from its content, not from its name
fi
mkdir notes
story 20 20 > notes/a.txt
story 21 20 > notes/b.txt
