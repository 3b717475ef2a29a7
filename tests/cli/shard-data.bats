#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# shard-data: shuffle, split, mixture, the formats and their conversion, refusals.
bats_require_minimum_version 1.5.0

setup() {
    root=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    cd "$BATS_TEST_TMPDIR"
    sh "$root/tests/cli/examples/shard-data.sh"
    T="-q -t tok/tokenizer.json"
}

# fails STATUS PART ARGUMENT ...: that exit status, and one line with PART on standard error.
fails() {
    local want=$1 part=$2
    shift 2
    run --separate-stderr shard-data "$@"
    [ "$status" -eq "$want" ] || { echo "status $status: $stderr"; false; }
    [ "${#stderr_lines[@]}" -eq 1 ] || { echo "$stderr"; false; }
    [[ $stderr == "shard-data: "*"$part"* ]] || { echo "$stderr"; false; }
}

# documents FILE [SKIP]: one document a line, from u16 ids that end with id 0.
documents() {
    od -An -v -tu2 -w2 -j "${2:-0}" "$1" | awk '{ printf "%s ", $1 } $1 == 0 { print "" }'
}

# sum KEY FILE: a number in meta.json, one line for each occurrence.
numbers() {
    sed -nE "s/^ *\"$1\": ([0-9]+),?$/\\1/p" "$2"
}

@test "shard-data: train and val, every document once" {
    shard-data $T --val-fraction 0.1 -o data/ clean.jsonl
    shard-data $T --no-shuffle -o all/ clean.jsonl
    [ "$(cd data && ls -A | xargs)" = "meta.json train.bin train.idx val.bin val.idx" ]
    cat <(documents data/train.bin) <(documents data/val.bin) | sort > a
    documents all/train.bin | sort > b
    cmp a b
    [ "$(wc -l < b)" -eq 400 ]
    n=$(documents data/val.bin | wc -l)
    [ "$n" -ge 20 ] && [ "$n" -le 60 ]
    [ "$(numbers documents data/meta.json | sed -n 1,2p | xargs)" = "$((400 - n)) $n" ]
    # shuffled: not the input order
    run ! cmp -s <(documents data/train.bin) <(documents all/train.bin | grep -Fxf <(documents data/train.bin))
}

@test "shard-data: the same bytes for any -j and the same seed, others for another" {
    for j in 1 2 5; do shard-data $T -j $j --val-fraction 0.2 -o "j$j" clean.jsonl; done
    for f in train.bin train.idx val.bin val.idx; do
        cmp j1/$f j2/$f
        cmp j1/$f j5/$f
    done
    shard-data $T --seed 7 --val-fraction 0.2 -o s7 clean.jsonl
    run ! cmp -s j1/train.bin s7/train.bin
    cmp <(documents j1/val.bin | sort) <(documents s7/val.bin | sort)
}

@test "shard-data: a document stays in its split when data are added or more is held out" {
    shard-data $T --no-shuffle --val-fraction 0.1 -o a clean.jsonl
    head -100 clean.jsonl > part.jsonl
    shard-data $T --no-shuffle --val-fraction 0.1 -o b part.jsonl
    shard-data $T --no-shuffle --val-fraction 0.3 -o c clean.jsonl
    [ -s b/val.bin ]
    [ "$(documents b/val.bin | grep -vcFxf <(documents a/val.bin))" -eq 0 ]
    [ "$(documents a/val.bin | grep -vcFxf <(documents c/val.bin))" -eq 0 ]
}

@test "shard-data: --split contiguous holds out the end of each document, counted in characters" {
    # 90 characters of two bytes, 10 of one; a tokenizer without merges gives an id a byte
    { for i in $(seq 90); do printf '\303\251'; done && printf 'xxxxxxxxxx'; } > one.txt
    train-tokenizer -q -V 257 -o bytes/tokenizer.json one.txt
    shard-data -q -t bytes/ --split contiguous --val-fraction 0.1 --no-eos -o c one.txt
    [ "$(numbers tokens c/meta.json | sed -n 1,2p | xargs)" = "180 10" ]
    grep -q '"contiguous": true' c/meta.json
    [ "$(od -An -tu2 -w2 -v c/val.bin | sort -u | wc -l)" -eq 1 ]
    # every document of JSONL has its end held out; an end-of-text id follows each part
    printf '{"text":"aaaab"}\n{"text":"ccccd"}\n{"text":""}\n' > three.jsonl
    shard-data -q -t bytes/ --split contiguous --val-fraction 0.2 --no-shuffle -o j three.jsonl
    [ "$(documents j/train.bin | wc -w)" -eq 11 ]
    [ "$(documents j/val.bin | wc -w)" -eq 4 ]
    [ "$(documents j/train.bin | wc -l) $(documents j/val.bin | wc -l)" = "3 2" ]
    # token datasets by their ids, the end-of-text id apart; each part begins with it for llm.c
    shard-data -q --split contiguous --val-fraction 0.5 --eos-id 0 --no-shuffle --format llmc -o k j/train
    [ "$(od -An -tu2 -v -j1024 k/train.bin | xargs)" = "$(documents j/train.bin | awk 'NF > 1 { print 0, $1, $2 } NF == 1 { print 0 }' | xargs)" ]
    [ "$(od -An -tu2 -v -j1024 k/val.bin | xargs)" = "$(documents j/train.bin | awk 'NF > 1 { print 0, $3, $4 }' | xargs)" ]
    fails 2 "no part is held out" -t bytes/ --split contiguous -o x one.txt
    [ ! -e x ]
}

@test "shard-data: Tiny Shakespeare splits into the numbers of ids that nanoGPT prints" {
    data=$root/../shared/data
    [ -f "$data/tinyshakespeare.txt" ] && [ -d "$data/gpt2-tokenizer" ] || skip "no ../shared/data"
    shard-data -q -t "$data/gpt2-tokenizer" --split contiguous --val-fraction 0.1 --no-eos --format nanogpt \
        -o nano "$data/tinyshakespeare.txt"
    [ "$(numbers tokens nano/meta.json | sed -n 1,2p | xargs)" = "301966 36059" ]
}

@test "shard-data: ids are those of the tokenizer, followed by the end-of-text id" {
    printf '{"text":"the river"}\n' > one.jsonl
    shard-data $T -o d one.jsonl
    shard-data $T --no-eos -o n one.jsonl
    [ "$(documents d/train.bin | awk '{ print $NF }')" = 0 ]
    [ "$(stat -c %s n/train.bin)" -eq $(($(stat -c %s d/train.bin) - 2)) ]
    cmp n/train.bin <(head -c -2 d/train.bin)
}

@test "shard-data: weights: shares of the ids, nothing used twice" {
    shard-data $T --split blank -o w clean.jsonl:0.75 notes.txt:0.25
    run numbers documents_taken w/meta.json
    [ "$output" = $'400\n134' ]
    shard-data $T --split blank -o v -w 3 -w 1 clean.jsonl notes.txt
    cmp w/train.bin v/train.bin
    [ "$(documents w/train.bin | sort | uniq -d | wc -l)" -eq 0 ]
    shard-data $T --split blank -n 12k -o e clean.jsonl:1 notes.txt:0
    [ "$(documents e/train.bin | sort | uniq -c | awk '$1 < 2 || $1 > 3' | wc -l)" -eq 0 ]
    fails 2 "at most 4 passes" $T -n 1M -o x clean.jsonl
    fails 2 "1 weight for 2 inputs" $T -o x clean.jsonl:0.5 notes.txt
    [ ! -e x ]
}

@test "shard-data: through every format and back: the same documents" {
    shard-data $T --no-shuffle -o m clean.jsonl
    shard-data -q --no-shuffle --format llmc --eos-id 0 -o l m/train
    shard-data -q --no-shuffle --format nanogpt --eos-id 0 -o n l/train.bin
    shard-data -q --no-shuffle --format llmc --eos-id 0 --shard-tokens 1k -o s n/train
    shard-data -q --no-shuffle --vocab-size 400 --eos-id 0 -o b s/train
    cmp m/train.bin b/train.bin
    cmp m/train.idx b/train.idx
    cmp m/train.bin n/train.bin
    [ "$(ls s | head -2 | xargs)" = "meta.json train_000000.bin" ]
    [ "$(od -An -tu4 -N12 l/train.bin | xargs)" = "20240520 1 6000" ]
    [ "$(od -An -tu2 -j1024 -N2 l/train.bin | xargs)" = 0 ]
    [ "$(od -An -tu4 -j8 -N4 s/train_000001.bin | xargs)" = 1000 ]
    shard-data $T --no-shuffle --format llmc -o t clean.jsonl
    cmp t/train.bin l/train.bin
}

@test "shard-data: bad input: one line that names it, and no folder is left" {
    : > empty.jsonl
    fails 1 "empty.jsonl: no document in it" $T -o x empty.jsonl
    printf '{"text":"a"}\n{"text"}\n' > bad.jsonl
    fails 1 "bad.jsonl:2: column 8" $T -o x bad.jsonl
    gzip -c clean.jsonl | head -c 2000 > cut.gz
    fails 1 "cut.gz: damaged or truncated" $T -o x cut.gz
    fails 1 "nosuch.jsonl: cannot open" $T -o x nosuch.jsonl
    fails 1 "nosuch" -q -t nosuch -o x clean.jsonl
    [ ! -e x ]
    shard-data $T -o d clean.jsonl
    truncate -s -2 d/train.bin
    fails 1 "the .bin has" -q -o x d/train
    fails 1 "neither" -q -o x d/val
    truncate -s +2 d/train.bin
    fails 1 "does not fit a vocabulary of 10" -q --vocab-size 10 -o x d/train
    [ ! -e x ]
}

@test "shard-data: misuse: status 2, nothing changed" {
    shard-data $T -o d clean.jsonl
    cp -r d before
    fails 2 "train.bin: exists already" $T -o d notes.txt
    fails 2 "train.bin: exists already" $T --format nanogpt -o d notes.txt
    diff -r d before
    fails 2 "an output folder is needed" $T clean.jsonl
    mkdir bare && cp d/train.* bare/ # without meta.json, which names the id
    fails 2 "need an id between documents" -q --format llmc -o x bare/train
    fails 2 "16-bit ids" -q --format nanogpt --eos-id 70000 -o x bare/train
    fails 2 "no token 'nope'" $T --eos-token nope -o x clean.jsonl
    [ ! -e x ]
    fails 2 "clean.jsonl: exists and is not a folder" $T -f -o clean.jsonl notes.txt
    fails 2 "d/train is both an input" -f -o d d/train
    fails 2 "d/train.bin is both an input" -f -o ./d/ d/train.bin
    diff -r d before
    shard-data $T -f --format nanogpt -o d clean.jsonl
    [ "$(cd d && ls -A | xargs)" = "meta.json train.bin" ]
}

@test "shard-data: -f removes no shards of another program" {
    shard-data $T -o d clean.jsonl
    mkdir own
    cp d/train.bin own/train.bin # as nanoGPT's prepare.py leaves them
    cp d/train.bin own/val.bin
    cp -r own before
    fails 2 "holds 'val.bin', which shard-data did not write" $T -f -o own clean.jsonl
    touch own/prepare.py
    fails 2 "holds 'val.bin', which shard-data did not write" $T -f -o own clean.jsonl
    fails 2 "holds 'train.bin', which shard-data did not write" $T -f --format llmc --shard-tokens 100 -o own clean.jsonl
    rm own/prepare.py
    diff -r own before
    shard-data $T -f --val-fraction 0.3 -o own clean.jsonl # both are overwritten
    [ "$(cd own && ls -A | xargs)" = "meta.json train.bin train.idx val.bin val.idx" ]
    mkdir other
    echo '{"notes": 1}' > other/meta.json
    fails 2 "holds 'meta.json', which shard-data did not write" $T -f -o other clean.jsonl
}

@test "shard-data: options that would do nothing, and ids that do not fit, are refused" {
    shard-data $T -o d clean.jsonl
    for o in "--field x" "--split blank" "--separator x" "--utf8 skip" "--max-document 1k" --skip-bad; do
        fails 2 "it applies to text only, not to token datasets" -q $o -o x d/train
    done
    fails 1 "clean.jsonl: not valid JSON, " -q -t clean.jsonl -o x clean.jsonl
    echo 'to be or not to be' > text
    fails 1 "text: is not a tokenizer: it is plain text: name a tokenizer.json" -q -t text -o x clean.jsonl
    fails 1 "d/train.idx: is not a tokenizer: it is the index of a token dataset: " -q -t d/train.idx -o x clean.jsonl
    fails 1 "d/train.bin: is not a tokenizer: it does not begin as JSON does: " -q -t d/train.bin -o x clean.jsonl
    fails 2 "there is no --tokenizer" -q --add-special -o x d/train
    fails 2 "give --eos-id" -q --eos-token x -o x d/train
    fails 2 "without it no input is used twice" $T --max-epochs 9 -o x clean.jsonl
    fails 2 "a Megatron dataset is one file" $T --shard-tokens 100 -o x clean.jsonl
    fails 2 "--split blank cuts at other places" $T --split blank --separator x -o x clean.jsonl
    fails 2 "--eos-id: 99999 is not below the vocabulary of 355" $T --eos-id 99999 -o x clean.jsonl
    fails 2 "--eos-id: 5 is given, but d/train has 0 between its documents" -q --eos-id 5 -o x d/train
    [ ! -e x ]
    shard-data $T --print-config > c.json # every option as it is by default
    shard-data $T --config c.json -o e clean.jsonl
}

@test "shard-data: --json writes meta.json to standard output" {
    run --separate-stderr shard-data $T --json -o d clean.jsonl
    [[ $output == '{"format":"megatron","vocab_size":'*',"eos_token_id":0,"tokenizer":{"ids":'*'},"train":{"documents":400,'* ]]
    [ "$(wc -l <<< "$output")" -eq 1 ]
}
