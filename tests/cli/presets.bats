#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Presets to train: each architecture has one, which trains and answers.

setup() {
    cd "$BATS_TEST_TMPDIR" || return
}

texts() { # ARGUMENT ... of train-tokenizer
    for i in {1..60}; do
        echo "{\"text\":\"the river ran by the old bridge $i and the stones lay in the water\"}"
    done > t.jsonl
    train-tokenizer -q "$@" -V 300 -o tokenizer.json t.jsonl
    shard-data -q --tokenizer tokenizer.json -o data t.jsonl
}

# miniatures: those below 20 M parameters, as "NAME ARCHITECTURE"
miniatures() {
    init-model --list --json |
        sed -E 's/.*"preset":"([^"]*)","model_type":"([^"]*)","parameters":([0-9]+),.*/\1 \2 \3/' | awk '$3 < 2e7 { print $1, $2 }'
}

# trains NAME ARGUMENT ...: the loss falls
trains() {
    init-model -q "$1" -t tokenizer.json -o m
    train -q m data -o run --steps 4 --batch-size 2 --lr 2e-3 --lr-schedule constant --dtype f32 --log-every 1 --metrics log "${@:2}"
    sed -nE 's/.*"event":"step".*"loss":([0-9.]+).*/\1/p' log | awk -v name="$1" 'NR == 1 { a = $1 } { b = $1; n++ }
        END { if (n != 4 || b >= a - 0.2) { print name ": loss from " a " to " b " in " n " steps"; exit 1 } }'
}

@test "presets: each architecture has one to train" {
    miniatures | cut -d' ' -f2 | sort -u > small
    init-model --list --json | sed -E 's/.*"model_type":"([^"]*)".*/\1/' | sort -u > all
    diff all small
}

@test "presets: those of decoders train and generate" {
    texts
    for name in $(miniatures | grep -Ev ' (bert|t5)$' | cut -d' ' -f1); do
        trains "$name" --seq-len 32
        generate -q run -p "the river" -n 6 --temperature 0 --dtype f32 > out
        [ -s out ]
        rm -r m run log out
    done
}

@test "presets: those of encoders train, and the one with a decoder generates" {
    texts -m wordpiece
    trains bert-4m --seq-len 32
    rm -r m run log data tokenizer*.json
    texts -m unigram -s '<pad>' -s '</s>' -s '<unk>' -s '<extra_id_0>' -s '<extra_id_1>' -s '<extra_id_2>'
    trains t5-9m --seq-len 32
    generate -q run -p "the river" -n 6 --temperature 0 --dtype f32 > out
    [ -s out ]
}
