#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# generate --serve-batch: answers of continuous batching, whatever memory it has.

bats_require_minimum_version 1.5.0

load ../inject/inject

setup() {
    root=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    cd "$BATS_TEST_TMPDIR"
    sh "$root/tests/cli/examples/generate.sh"
    mkdir cache
    # 40 prompts, of 7 to some hundred tokens; every other one begins with the same text
    long=$(printf 'The system reads word %s. ' 1 2 3 4 5 6 7 8 9)
    for i in $(seq 40); do
        case $((i % 4)) in
        0) echo "{\"text\": \"$long and $i\", \"id\": $i}" ;;
        1) echo "{\"text\": \"line $i\", \"id\": $i}" ;;
        2) echo "{\"text\": \"$long$long and $i\", \"id\": $i}" ;;
        3) echo "{\"text\": \"line $i of a longer text that the system reads\", \"id\": $i}" ;;
        esac
    done > many.jsonl
}

@test "generate --serve-batch: the same answers for any number of texts, memory, tiers, -j and order" {
    for type in f32 bf16; do
        opts="-q run/ -n 150 --seed 3 --top-p 0.9 --logprobs --ignore-eos --dtype $type --context 512"
        generate $opts --serve-batch 40 < many.jsonl > whole
        [ "$(wc -l < whole)" -eq 40 ]
        generate $opts --serve-batch 3 -j 1 < many.jsonl > few
        cmp whole few
        generate $opts --serve-batch 40 --kv-memory 2M < many.jsonl > half
        cmp whole half
        generate $opts --serve-batch 40 --kv-memory 1M --kv-host 4M < many.jsonl > host
        cmp whole host
        generate $opts --serve-batch 40 --kv-memory 1M --kv-host 200k --kv-disk cache:8M < many.jsonl > disk
        cmp whole disk
        generate $opts --serve-batch 40 --kv-memory 1M --kv-disk cache/:8M -j 1 < many.jsonl > disk1
        cmp whole disk1
        generate $opts --serve-batch 16 --kv-memory 2M --as-they-come < many.jsonl > any
        run ! cmp -s whole any
        sed 's/.*"prompt_index":\([0-9]*\),.*/\1 &/; s/"prompt_index":[0-9]*,//' any | sort -n | cut -d' ' -f2- > sorted
        cmp whole sorted
        tac many.jsonl > backward
        generate $opts -T 0 --serve-batch 7 < backward | tac > b
        generate $opts -T 0 --serve-batch 7 < many.jsonl > a
        cmp a b
    done
}

@test "generate --as-they-come: short texts do not wait for a long one before them" {
    echo '{"text": "a"}' > long.jsonl
    text=$(printf 'The system reads word %s. ' 1 2 3 4 5 6 7 8 9)
    for i in $(seq 40); do echo "{\"text\": \"$text$text$text$text$text\"}"; done > short.jsonl
    n=$(head -n 1 short.jsonl | generate -q run/ -n 1 | grep -o '"prompt_tokens":[0-9]*' | cut -d: -f2)
    for batch in --serve-batch -b; do # the first text fills the context, the others have three tokens left
        cat long.jsonl short.jsonl |
            generate -q run/ -n 900 -T 0 --ignore-eos --context $((n + 2)) $batch 2 --as-they-come --json > out
        [ "$(grep -c '"prompt_index"' out)" -eq 41 ]
        [ "$(grep -n '"prompt_index":0[,}]' out | cut -d: -f1)" -gt 30 ] # 8 times the batch is 16
    done
}

@test "generate --serve-batch: the probabilities are those of the other way, within rounding" {
    generate -q run/ -n 20 -T 0 --dtype f32 --logprobs < many.jsonl > plain
    generate -q run/ -n 20 -T 0 --dtype f32 --logprobs --serve-batch 16 < many.jsonl > served
    sed 's/"logprobs".*//' plain > a
    sed 's/"logprobs".*//' served > b
    cmp a b
    # samples, too: rounding may change a text
    generate -q run/ -n 40 --seed 5 --top-p 0.9 --dtype f32 < many.jsonl > plain
    generate -q run/ -n 40 --seed 5 --top-p 0.9 --dtype f32 --serve-batch 16 < many.jsonl > served
    [ "$(comm -12 <(sort plain) <(sort served) | wc -l)" -ge 36 ]
}

@test "generate --serve-batch --kv: coded caches, for any memory; the answers of one prompt at a time" {
    for case in '400k int8' '300k k=int8,v=int4' '1800k layers.0=auto;*=kivi'; do
        kv=${case#* } memory=${case%% *}
        opts="-q run/ -n 60 -T 0 --ignore-eos --dtype f32 --context 512 --kv $kv"
        generate $opts --serve-batch 40 < many.jsonl > whole
        [ "$(wc -l < whole)" -eq 40 ]
        generate $opts --serve-batch 5 -j 1 --kv-memory $memory < many.jsonl > few
        cmp whole few
        generate $opts --serve-batch 12 --kv-memory $memory --kv-host 200k --kv-disk cache:8M < many.jsonl > disk
        cmp whole disk
        generate $opts < many.jsonl > plain # rounding may change a text
        [ "$(comm -12 <(sort whole) <(sort plain) | wc -l)" -ge 36 ]
    done
    generate -q run/ -n 60 --ignore-eos --context 512 --serve-batch 40 --dtype bf16 --kv int4 --json < many.jsonl | tail -n 1 > int4
    generate -q run/ -n 60 --ignore-eos --context 512 --serve-batch 40 --dtype bf16 --json < many.jsonl | tail -n 1 > bf16
    bytes() { grep -o '"bytes_per_token":[0-9]*' "$1" | cut -d: -f2; }
    [ "$(bytes int4)" -le $(($(bytes bf16) / 2)) ]
    # beginnings of 256 tokens and more are shared, with plain tokens, too
    same=$(printf 'The system reads word %s of a text. ' $(seq 60))
    for i in $(seq 12); do echo "{\"text\": \"$same and $i\"}"; done > same.jsonl
    opts="-q run/ -n 20 -T 0 --ignore-eos --dtype bf16 --context 1024 --kv kivi --serve-batch 6 --logprobs --json"
    answers() { grep -v '^{"kv"' "$1" | sed 's/"first_token_seconds":[0-9.e-]*//'; }
    generate $opts < same.jsonl > shared
    tail -n 1 shared | grep -q '"hit_rate":0.[5-9]'
    generate $opts --kv-memory 210k < same.jsonl > alone # no memory for other states
    tail -n 1 alone | grep -q '"hit_rate":0,'
    cmp <(answers shared) <(answers alone)
    # less memory than the plain tokens of 40 texts take: some wait
    opts="run/ -n 30 -T 0 --ignore-eos --dtype bf16 --context 512 --kv kivi"
    generate $opts -q --serve-batch 40 < many.jsonl > whole
    for more in '' '--kv-host 200k'; do
        generate $opts --serve-batch 40 --kv-memory 700k $more < many.jsonl > waits 2> log
        cmp whole waits
        [ "$(grep -c '^generate: --kv-memory: the memory holds [1-9][0-9]* of 40 texts at a time, each with 64.0 KiB of plain tokens; the others wait$' log)" -eq 1 ]
    done
    run -2 generate run/ -n 60 --serve-batch 40 --dtype bf16 --kv-memory 70k --kv kivi many.jsonl
    [ "${#lines[@]}" -eq 1 ]
    [[ "$output" == "generate: --kv-memory: 70.0 KiB hold 0 tokens, and a text of 64 needs "*", in pages of "*" and 64.0 KiB of plain tokens: give more, or a shorter context" ]]
    run -2 generate run/ -p a --serve-batch 2 --kv snapkv:capacity=64
    [ "${#lines[@]}" -eq 1 ]
    [[ "$output" == "generate: --kv: tokens cannot be dropped from pages that texts share: leave the policy, or --serve-batch, out" ]]
}

@test "generate --serve-batch --kv-down: what goes to host and disk is coded, and takes less room" {
    opts="-q run/ -n 60 -T 0 --ignore-eos --dtype f32 --context 512 --serve-batch 40 --kv-memory 600k"
    generate $opts --kv-host 4M --json < many.jsonl > plain
    generate $opts --kv-host 4M --json --kv-down int8 < many.jsonl > coded
    [ "$(wc -l < coded)" -eq 41 ]
    value() { tail -n 1 "$2" | grep -oE "\"$1\":[0-9]+" | head -n 1 | cut -d: -f2; }
    [ "$(value saved_bytes plain)" -eq 0 ]
    [ "$(value up coded)" -gt 0 ]
    [ "$(value saved_bytes coded)" -gt "$(value bytes coded)" ] # 8 bits and scales of 32
    texts() { head -n 40 "$1" | sed 's/"first_token_seconds".*//' | sort; }
    [ "$(comm -12 <(texts plain) <(texts coded) | wc -l)" -ge 20 ] # rounding may change a text
    for spec in int8 none; do # the same host has room for more pages
        [ $spec = none ] && down= || down="--kv-down $spec"
        generate run/ -n 1 --serve-batch 4 --kv-host 1M $down -v < many.jsonl 2> log > /dev/null
        grep -oE '[0-9]+ of the host' log | cut -d' ' -f1 > host.$spec
    done
    [ "$(cat host.int8)" -gt "$(($(cat host.none) * 3 / 2))" ]
    # coded in the same way already
    generate $opts --kv-host 4M --kv int8 < many.jsonl > a
    generate $opts --kv-host 4M --kv int8 --kv-down int8 < many.jsonl > b
    cmp a b
    refused() { # TEXT OPTION ...
        local text=$1
        shift
        run -2 generate run/ --serve-batch 4 "$@" many.jsonl
        [ "${#lines[@]}" -eq 1 ]
        [[ "$output" == *"$text"* ]]
    }
    refused " of memory are free: give at most as much" --serve-batch 4 --kv-memory 900T
    refused "--kv-down: has no effect without a further place for pages: give --kv-host or --kv-disk, too" --kv-down int8
    refused "--kv-down: kivi: pages that move are coded by methods that code each token by itself" --kv-host 1M --kv-down kivi
    refused "--kv-down: int4: codes nothing that is not stored so already: leave it out" --kv-host 1M --kv int8 --kv-down int4
    refused "--kv-down: there is no method 'int7'" --kv-host 1M --kv-down int7
}

@test "generate --serve-batch: samples share their prompt, for any memory" {
    opts="-q run/ -n 60 --n 5 --seed 3 --context 512 --ignore-eos"
    generate $opts --serve-batch 32 < many.jsonl > whole
    [ "$(wc -l < whole)" -eq 200 ]
    generate $opts --serve-batch 4 --kv-memory 600k --kv-disk cache:2M < many.jsonl > small
    cmp whole small
    generate $opts --n 1 --serve-batch 32 < many.jsonl | sed 's/}$//' > first
    grep '"sample":0' whole | sed 's/,"sample":0}$//' > zero
    cmp first zero
}

@test "generate --serve-batch: --json reports caches, and the time to each first token" {
    generate -q run/ -n 150 --ignore-eos --dtype bf16 --context 512 --serve-batch 40 --kv-memory 1M --kv-host 4M --json < many.jsonl > out
    [ "$(wc -l < out)" -eq 41 ]
    [ "$(grep -c '"first_token_seconds":[0-9]' out)" -eq 40 ]
    tail -n 1 out | grep -qE '^\{"kv":\{"bytes_per_token":512(\.0)?,"pages":32,"hits":[1-9][0-9]*,"hit_rate":0\.[0-9]+,"moves":\{"down":[0-9]+,"up":[0-9]+,"out":0,"in":0,"bytes":[0-9]+,"saved_bytes":0\},"stalls_seconds":[0-9.e-]+,"copies":\{"pages":0,"seconds":0(\.0)?\},"waits":[1-9][0-9]*,"recomputed":[0-9]+,"peak_bytes":[1-9][0-9]+\}\}$'
    generate run/ -n 5 --serve-batch 40 -v < many.jsonl 2> log > /dev/null
    grep -qE ' of the disk; bookkeeping: 3[0-9]{2} bytes for each in use$' log
    grep -q 'caches: .* at most, .* pages found, .* computed again' log
}

@test "generate --serve-batch: --metrics shows the work, in records that plot-run draws" {
    opts="run/ -q -n 150 --ignore-eos --dtype bf16 --context 512 --serve-batch 40 --kv-memory 1M --kv-host 4M -o out.jsonl -f"
    generate $opts --metrics run.jsonl many.jsonl
    head -n 1 run.jsonl | grep -q '^{"event":"run","tool":"generate",.*"texts":40,"page_tokens":64,"page_bytes":32768}$'
    grep '"event":"step"' run.jsonl | tail -n 1 | grep -qE '"tokens":6000,.*"tokens_per_second":[1-9].*"running":0,"waiting":0,.*"hit_rate":0\.[0-9]+,"moves":[1-9][0-9]*,"moved_bytes":[1-9].*"stalls_seconds":[0-9].*"recomputed":[0-9]+}$'
    tail -n 1 run.jsonl | grep -q '^{"event":"end","status":"done","step":[1-9]'
    plot-run run.jsonl -k rows_per_step -o rows.svg
    grep -q '<svg' rows.svg
    run -2 generate run/ -q --serve-batch 4 --metrics run.jsonl many.jsonl -o other.jsonl
    [[ "$output" == *"run.jsonl: exists already"* ]]
    [ ! -e other.jsonl ]
    generate $opts --metrics run.jsonl many.jsonl
    [ "$(grep -c '"event":"run"' run.jsonl)" -eq 1 ]
    run -2 generate run/ -q --serve-batch 4 --metrics - many.jsonl
    [[ "$output" == "generate: --metrics: the answers are written to standard output: name a file, or give -o" ]]
    generate $opts --metrics - many.jsonl | grep -c '"event"' > lines
    [ "$(cat lines)" -ge 3 ]
    generate $opts --metrics >(head -n 1 > first) many.jsonl # a reader that ends
    [ "$(wc -l < out.jsonl)" -eq 40 ]
}

@test "generate --serve-batch: -p prints texts, in order" {
    generate -q run/ -p 'The system' -p 'A word' -n 12 -T 0 > a
    generate -q run/ -p 'The system' -p 'A word' -n 12 -T 0 --serve-batch 2 > b
    cmp a b
    generate -q run/ -p 'The system' -p 'A word' -n 12 -T 0 --as-they-come --json > c
    grep -q '"prompt":"A word".*"prompt_index":1' c
}

@test "generate --serve-batch: what does not fit is answered by an error, in its place" {
    run -1 --separate-stderr bash -c "generate run/ -n 5 --dtype bf16 --serve-batch 4 --kv-memory 64k --as-they-come < many.jsonl > out"
    [ "$(wc -l < out)" -eq 40 ]
    [ "$(grep -c '"error":"the prompt has [0-9]* tokens, the context holds 128: shorten it, or raise --kv-memory"' out)" -eq 10 ]
    grep -q '"id": 2,"prompt_index":1,"error"' out
    run -2 generate run/ -p 'The system' -n 300 --dtype bf16 --serve-batch 4 --kv-memory 64k
    [ "${#lines[@]}" -eq 1 ]
    [[ "$output" == "generate: --kv-memory: 64.0 KiB hold 128 tokens, and a text of 3"*" needs "*" KiB, in pages of 32.0 KiB: give more, or a shorter context" ]]
}

@test "generate --serve-batch: what it refuses" {
    one() { # STATUS TEXT OPTION ...
        local status_wanted=$1 text=$2
        shift 2
        run generate run/ --dtype bf16 "$@" many.jsonl
        [ "$status" -eq "$status_wanted" ]
        [ "${#lines[@]}" -eq 1 ]
        [[ "$output" == *"$text"* ]]
    }
    one 2 "--kv-memory: has no effect without it: give --serve-batch N, too" --kv-memory 1M
    one 2 "--kv-host: has no effect" --kv-host 1M
    one 2 "--kv-disk: has no effect" --kv-disk cache:1M
    one 2 "--metrics: has no effect without it: give --serve-batch N, too" --metrics x.jsonl
    one 2 "cannot be combined with --serve-batch" --serve-batch 4 -b 4
    one 2 '"cache" is not DIR:SIZE: give a folder and a size such as cache/:40G' --serve-batch 4 --kv-disk cache
    one 2 '":1M" is not DIR:SIZE' --serve-batch 4 --kv-disk :1M
    one 2 '"cache:x" is not DIR:SIZE' --serve-batch 4 --kv-disk cache:x
    one 2 "--kv-disk: nowhere is not a folder: make it, or name another" --serve-batch 4 --kv-disk nowhere:1M
    one 2 "--kv-disk: many.jsonl is not a folder" --serve-batch 4 --kv-disk many.jsonl:1M
    one 2 "--kv-disk: 800 TiB, but cache has " --serve-batch 4 --kv-disk cache:800T
    one 2 " free: give at most as much, or name another folder" --serve-batch 4 --kv-disk cache:800T
    one 2 "--kv-host: 800 TiB, but " --serve-batch 4 --kv-host 800T
    one 2 " of memory are free: give at most as much" --serve-batch 4 --kv-host 800T
    one 2 "--kv-memory: 20.0 KiB hold 0 tokens" --serve-batch 4 --kv-memory 20k
    one 2 "--kv-memory: 50.0 KiB hold 64 tokens, and a text of 200 needs 128 KiB" --serve-batch 4 --kv-memory 50k --context 200
    one 2 "generate: --kv-host: 20.0 KiB hold no page of 32.0 KiB" --serve-batch 4 --kv-host 20k
    one 2 "generate: --kv-disk: 20.0 KiB hold no page of 32.0 KiB" --serve-batch 4 --kv-disk cache:20k
    run -2 generate run/ -p a --as-they-come
    [[ "$output" == "generate: --as-they-come: plain text has no numbers of prompts: add --json" ]]
}

same_answers() {
    [ "$1" -ne 0 ] || cmp whole out.jsonl
}

@test "generate --serve-batch: a disk that fills costs one warning, no answer" {
    opts="run/ -n 150 --seed 3 --ignore-eos --context 512 --serve-batch 40 --kv-memory 600k --kv-disk cache:8M"
    generate -q $opts -o whole many.jsonl
    inject_each write 12 same_answers generate $opts -q -f -o out.jsonl many.jsonl
    # the same with its message
    LM_INJECT=write:3 LD_PRELOAD=${LM_TEST_BUILD:-build}/tests/inject/inject.so \
        generate $opts -f -o out.jsonl many.jsonl 2> log
    cmp whole out.jsonl
    [ "$(grep -c 'the disk is no longer used' log)" -eq 1 ]
    grep -q 'generate: --kv-disk: cache: .*No space left on device' log
}

@test "generate --serve-batch: a kill leaves no file in the folder of the disk" {
    generate -q run/ -n 900 --ignore-eos --context 1024 --n 200 --serve-batch 40 --kv-memory 1M --kv-disk cache:64M \
        -o out.jsonl many.jsonl &
    pid=$!
    for _ in $(seq 100); do # until the file has pages
        [ "$(stat -L -c '%h %b' /proc/$pid/fd/* 2> /dev/null | grep -c '^0 [1-9]')" -eq 0 ] || break
        sleep 0.05
    done
    [ -d /proc/$pid ]
    kill -9 $pid
    wait $pid || true
    [ -z "$(ls -A cache)" ]
}
