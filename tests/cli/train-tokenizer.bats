#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# train-tokenizer: merges, outputs, refusals.

bats_require_minimum_version 1.5.0

setup() {
    root=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    cd "$BATS_TEST_TMPDIR"
    sh "$root/tests/cli/examples/train-tokenizer.sh"
}

@test "train-tokenizer: the folder of the output is made" {
    run train-tokenizer --vocab-size 340 --pattern llama3 -o tok/tokenizer.json clean.jsonl
    [ "$status" -eq 0 ]
    [ "$(ls -A tok | tr '\n' ' ')" = "tokenizer.json tokenizer_config.json " ]
    grep -q '"eos_token": "<|endoftext|>"' tok/tokenizer_config.json
    grep -q '"Regex": "(?i:' tok/tokenizer.json
    [[ "$output" == *"340 tokens from 400 documents"* ]]
}

@test "train-tokenizer: a folder gets the tokenizer and its configuration" {
    train-tokenizer -q -V 300 -s '<s>' -s '</s>' -o new/folder/ clean.jsonl
    grep -q '"eos_token": "<s>"' new/folder/tokenizer_config.json
    grep -q '"</s>": 1' new/folder/tokenizer.json
    grep -q '"!": 2' new/folder/tokenizer.json
}

@test "train-tokenizer: a file gets its configuration beside it, and never over that of another tokenizer" {
    train-tokenizer -q -V 300 -s '<END>' -o tokenizer.json clean.jsonl
    grep -q '"eos_token": "<END>"' tokenizer_config.json
    shard-data -q --tokenizer tokenizer.json -o d clean.jsonl # reads <END> from it
    rm tokenizer.json
    cp tokenizer_config.json before
    run train-tokenizer -V 300 -o tokenizer.json clean.jsonl
    [ "$status" -eq 2 ]
    [[ "$output" == *"tokenizer_config.json: "*"exists"* ]]
    cmp tokenizer_config.json before
    [ ! -e tokenizer.json ]
    train-tokenizer -q -f -V 300 -o tokenizer.json clean.jsonl
    grep -q '"eos_token": "<|endoftext|>"' tokenizer_config.json
    # -f does not remove what was added since
    mkdir model
    cp tokenizer.json model
    printf '{"eos_token": "<END>", "chat_template": "{{ x }}"}' | tee model/tokenizer_config.json > mine
    for o in model model/tokenizer.json; do
        run train-tokenizer -f -V 300 -o $o clean.jsonl
        [ "$status" -eq 2 ]
        [[ "$output" == "train-tokenizer: model/tokenizer_config.json: holds 'chat_template', which does not belong to the new output and would be lost: "* ]]
        cmp model/tokenizer_config.json mine
        cmp model/tokenizer.json tokenizer.json
        [ "$(ls -A model | wc -l)" -eq 2 ]
    done
    mkdir other
    train-tokenizer -q -V 300 -s '<END>' -o other/own.json clean.jsonl
    shard-data -q --tokenizer other/own.json -o d2 clean.jsonl
    cmp other/tokenizer_config.json before
    run train-tokenizer -V 310 -s '<END>' -o other/second.json clean.jsonl
    [[ "$status" -eq 0 && "$output" != *tokenizer_config.json* ]]
    run train-tokenizer -f -V 310 -o other/second.json clean.jsonl
    [ "$status" -eq 0 ]
    [[ "$output" == *"other/tokenizer_config.json: belongs to another tokenizer, but is also read with other/second.json"* ]]
    cmp other/tokenizer_config.json before
    mkdir third
    mkfifo third/pipe
    timeout 20 cat third/pipe > /dev/null &
    train-tokenizer -q -V 300 clean.jsonl -f -o third/pipe
    wait $!
    [ "$(ls -A third)" = pipe ]
}

@test "train-tokenizer: no -o and no operand is a filter" {
    train-tokenizer -q -V 300 < clean.jsonl > a.json
    train-tokenizer -q -V 300 -o - clean.jsonl > b.json
    cmp a.json b.json
    [ "$(head -c 1 a.json)" = '{' ]
}

@test "train-tokenizer: the same bytes for any -j and any order of documents" {
    for j in 1 2 7; do train-tokenizer -q -V 500 -j $j clean.jsonl > "t$j"; done
    sort -r clean.jsonl | train-tokenizer -q -V 500 > t0
    cmp t1 t2
    cmp t1 t7
    cmp t1 t0
}

@test "train-tokenizer: merges are the most frequent pairs, ties by the smallest ids" {
    # ab 3 times; bc and cd twice each: b < c decides
    printf 'ab ab ab bc bc cd cd' | train-tokenizer -q -V 260 -p '\w+| ' > t.json
    run sh -c "tr -d ' \n' < t.json | grep -o '\"merges\":.*'"
    [ "$output" = '"merges":[["a","b"],["b","c"],["c","d"]]}}' ]
}

@test "train-tokenizer: specials in the text are not learned from" {
    printf '<x><x><x><x>ab ab' | train-tokenizer -q -V 258 -s '<x>' > t.json
    run sh -c "tr -d ' \n' < t.json | grep -o '\"merges\":.*'"
    [ "$output" = '"merges":[["a","b"]]}}' ]
}

@test "train-tokenizer: the patterns of GPT-4 and GPT-4o under each of their names" {
    train-tokenizer -q -V 300 -p gpt4 clean.jsonl > a.json
    train-tokenizer -q -V 300 -p cl100k_base clean.jsonl | cmp - a.json
    grep -qF '|\\s+\\z|' a.json
    train-tokenizer -q -V 300 -p gpt-4o clean.jsonl > b.json
    train-tokenizer -q -V 300 -p o200k clean.jsonl | cmp - b.json
    grep -qF '[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*' b.json
    # aB is two words for GPT-4o only
    printf 'xaB xaB' | train-tokenizer -qq -V 300 -p gpt4 | grep -q '"aB": '
    printf 'xaB xaB' | train-tokenizer -qq -V 300 -p o200k > split.json
    run ! grep -q '"aB": ' split.json
}

@test "train-tokenizer: limits of frequency and length" {
    printf 'abcdabcd abcdabcd xy' | train-tokenizer -q -V 400 --max-token-bytes 3 > t.json
    run grep -cE '^      "[A-Za-z]{4,}": [0-9]' t.json
    [ "$output" -eq 0 ]
    printf 'ab ab ab cd cd' | train-tokenizer -qq -V 400 --min-frequency 3 > t.json
    grep -q '"ab": ' t.json
    run ! grep -q '"cd": ' t.json
}

@test "train-tokenizer: a text that is too small gives a warning and status 0" {
    run sh -c "printf 'ab' | train-tokenizer -V 1000 > t.json"
    [ "$status" -eq 0 ]
    [[ "${lines[0]}" == "train-tokenizer: only 258 of 1000 tokens: no pair is left to merge" ]]
}

@test "train-tokenizer: an existing output is refused without -f" {
    echo keep > t.json
    run train-tokenizer -V 300 -o t.json clean.jsonl
    [ "$status" -eq 2 ]
    [ "$(cat t.json)" = keep ]
    train-tokenizer -q -f -V 300 -o t.json clean.jsonl
    grep -q merges t.json
    cp clean.jsonl before
    run train-tokenizer -f -V 300 -o clean.jsonl clean.jsonl
    [ "$status" -eq 2 ]
    cmp clean.jsonl before
}

@test "train-tokenizer: misuse: status 2" {
    run train-tokenizer -V 256 clean.jsonl
    [ "$status" -eq 2 ]
    [[ "$output" == *"--vocab-size: 256 is not in 257"* ]]
    run train-tokenizer -p 'a(' clean.jsonl
    [ "$status" -eq 2 ]
    [[ "$output" == *"--pattern: bad pattern near its byte 2"* ]]
    run train-tokenizer -p lama3 clean.jsonl
    [ "$status" -eq 2 ]
    [[ "$output" == "train-tokenizer: --pattern: no pattern is named 'lama3': did you mean llama3?" ]]
    run train-tokenizer -p wordpiece -o t.json clean.jsonl
    [ "$status" -eq 2 ]
    [[ "$output" == *"no pattern is named 'wordpiece': give gpt2, llama3"* ]]
    [ ! -e t.json ]
    run train-tokenizer -s x -s x clean.jsonl
    [ "$status" -eq 2 ]
    [[ "$output" == *'"x" is given twice'* ]]
    run train-tokenizer -o new/t.json missing.jsonl
    [ "$status" -ne 0 ]
    [ ! -e new/t.json ]
}

@test "train-tokenizer: bad input is one line, without output" {
    : > empty
    run train-tokenizer -o t.json empty
    [ "$status" -ne 0 ]
    [ "${#lines[@]}" -eq 1 ]
    printf 'abc\377def' > bad.txt
    run train-tokenizer -o t.json bad.txt
    [ "$status" -eq 1 ]
    [ "${#lines[@]}" -eq 1 ]
    [[ "$output" == *"UTF-8"* ]]
    [ -z "$(ls -A | grep -E '^t\.json|tmp')" ]
    run sh -c 'train-tokenizer -q -V 300 clean.jsonl > /dev/full'
    [ "$status" -eq 1 ]
}

@test "train-tokenizer: --json describes the result; it is refused with the tokenizer on standard output" {
    echo 'one two two three three three' > few.txt
    train-tokenizer -q --json -V 300 few.txt -o t.json > out
    grep -qE '^\{"output":"t.json","vocab_size":[0-9]+,"merges":[0-9]+,"documents":1,"bytes":30,"words":[0-9]+,"unique_words":[0-9]+,"seconds":[0-9.e-]+\}$' out ||
        { cat out; false; }
    run train-tokenizer --json -V 300 few.txt
    [ "$status" -eq 2 ]
    [[ $output == *"--json: standard output holds the tokenizer"* ]]
}

@test "train-tokenizer: WordPiece and Unigram do not depend on threads, and are read" {
    for m in wordpiece unigram; do
        run train-tokenizer -m $m -V 80 -j 1 -o $m/ clean.jsonl
        [ "$status" -eq 0 ]
        [[ "$output" == *"80 tokens from 400 documents"* ]]
        tac clean.jsonl > back.jsonl
        train-tokenizer -q -m $m -V 80 -j 3 back.jsonl > again.json
        cmp $m/tokenizer.json again.json
        shard-data -q --tokenizer $m -o $m-data clean.jsonl
    done
    grep -q '"cls_token": "\[CLS\]"' wordpiece/tokenizer_config.json
    grep -q '"eos_token": "</s>"' unigram/tokenizer_config.json
    grep -q '"lowercase": *true' wordpiece/tokenizer.json
    train-tokenizer -q -m wordpiece --cased --limit-alphabet 20 -V 100 clean.jsonl > cased.json
    grep -q '"lowercase": *false' cased.json
}

@test "train-tokenizer: options of another model, and vocabularies that are too small, are refused" {
    for o in "wordpiece --pattern gpt2" "unigram --min-frequency 2" "bpe --cased" "unigram --limit-alphabet 9"; do
        run train-tokenizer -m $o -o x.json clean.jsonl
        [ "$status" -eq 2 ]
        [[ "$output" == *"--model ${o%% *} has no use for it"* ]]
    done
    run train-tokenizer -m wordpiece -V 30 -o x.json clean.jsonl
    [ "$status" -eq 2 ]
    [[ "$output" == *"30 tokens cannot hold the characters of the text"* ]]
    run train-tokenizer -m unigram -V 10 -o x.json clean.jsonl
    [ "$status" -eq 2 ]
    [[ "$output" == *"10 tokens cannot hold 3 special ones and "*" characters"* ]]
    run train-tokenizer -m unigram -s '<pad>' -V 400 -o x.json clean.jsonl
    [ "$status" -eq 2 ]
    [[ "$output" == *"Unigram needs a token for unknown characters"* ]]
    [ ! -e x.json ]
}

@test "train-tokenizer: what needs BPE says so of WordPiece and Unigram" {
    for m in wordpiece unigram; do
        train-tokenizer -q -m $m -V 80 -o $m/ clean.jsonl
        init-model -q llama-1m --tokenizer $m/ -o model-$m
    done
    run merge-models -m linear model-wordpiece model-unigram --tokenizer union -o y
    [ "$status" -eq 2 ]
    [[ "$output" == *"its tokenizer has a WordPiece model, and tokenizers are united with BPE alone"* ]]
    [ ! -e y ]
}
