#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# generate --kv with a policy: caches that keep some tokens of a text.

bats_require_minimum_version 1.5.0

setup() {
    root=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    cd "$BATS_TEST_TMPDIR"
    sh "$root/tests/cli/examples/generate.sh"
    for i in $(seq 1 9); do
        printf '{"text": "%s"}\n' "$(head -c $((i * 60)) corpus.txt | tr -cd 'a-zA-Z .')"
    done > long.jsonl
}

@test "generate --kv POLICY: with room for all tokens, answers are those of plain caches" {
    generate -q run/ -n 30 -T 0 --dtype f32 --logprobs < long.jsonl > plain
    for kv in snapkv:capacity=900 streaming:window=900,positions=text kvmerge:threshold=1,keep=0.9 \
        snapkv:capacity=700,budget=pyramid; do
        generate -q run/ -n 30 -T 0 --dtype f32 --logprobs --kv "$kv" < long.jsonl > kept
        cmp plain kept
    done
}

@test "generate --kv POLICY: answers are the same for any batch, -j and number of samples" {
    for kv in h2o:keep=0.3 snapkv:capacity=40,window=8+int8:group=16 streaming:window=20 random:keep=0.3 kvmerge:threshold=0; do
        generate -q run/ -n 40 --seed 3 --kv "$kv" --dtype f32 -b 1 -j 1 < long.jsonl > a
        generate -q run/ -n 40 --seed 3 --kv "$kv" --dtype f32 -b 5 -j 2 < long.jsonl > b
        cmp a b
        generate -q run/ -n 40 --seed 3 --kv "$kv" --dtype f32 -b 1 --n 3 < long.jsonl > c
        generate -q run/ -n 40 --seed 3 --kv "$kv" --dtype f32 -b 4 --n 3 < long.jsonl > d
        cmp c d
    done
    generate -q run/ -n 40 --seed 3 --dtype f32 < long.jsonl > plain
    generate -q run/ -n 40 --seed 3 --dtype f32 --kv streaming:window=20 < long.jsonl > kept
    run ! cmp -s plain kept
}

@test "generate --kv streaming: texts beyond the positions of the model, in constant memory" {
    max=$(sed 's/.*"max_position_embeddings": *\([0-9]*\).*/\1/;t;d' run/config.json)
    text=$(for i in 1 2 3 4 5 6 7 8 9; do cat corpus.txt; done | tr -cd 'a-zA-Z .' | head -c $((6 * max)))
    run -2 generate -q run/ -p "$text" -n $((2 * max)) --kv streaming:window=40,positions=text
    for b in 1 3; do
        printf '{"text": "%s"}\n' "$text" "The system" "A $text" |
            generate -v run/ -n $((max + 50)) -b $b --ignore-eos --context $((9 * max)) --dtype f32 --kv streaming:window=40 > long.$b 2> said.$b
    done
    cmp long.1 long.3
    [ "$(grep -o '"prompt_tokens":[0-9]*' long.1 | head -n 1 | cut -d: -f2)" -gt "$max" ]
    grep -c "\"tokens\":$((max + 50))," long.1 | grep -qx 3
    grep -q 'room for 45 tokens of a text' said.1
    set -- -q run/ -T 0 --ignore-eos --json --logprobs --kv streaming:window=40
    generate "$@" -p 'The system' -n $((max + 30)) > whole
    generate "$@" -p 'The system' -n $((max + 20)) --save-cache long.kv > begin
    generate "$@" -p '' -n 10 --load-cache long.kv > end
    last() { grep -o '"logprobs":\[[-0-9.,e]*\]' "$1" | grep -o '[-0-9.,e]*' | tail -n 1 | tr ',' '\n' | tail -n 10; }
    [ "$(last whole)" = "$(last end)" ]
    generate -q run/ -p "$text" -n 3 --kv streaming:window=40+int8 > text
    [ -s text ]
    run -2 generate -q run/ -p a -n $((2 * max)) --kv streaming:window=$max
    [[ $output == "generate: --kv: streaming:window=$max: "*" tokens stay, and the model has $max positions: choose a smaller window" ]]
}

@test "generate --kv POLICY: a saved cache goes on as the run that was not interrupted" {
    text=$(head -c 500 corpus.txt)
    ids() { grep -o '"token_ids":\[[0-9,]*\]' "$1" | grep -o '[0-9,]*' | tr ',' '\n'; }
    logs() { grep -o '"logprobs":\[[-0-9.,e]*\]' "$1" | grep -o '[-0-9.,e]*' | tail -n 1 | tr ',' '\n'; }
    for kv in h2o:keep=0.3+int8:group=16 streaming:window=30 kvmerge:threshold=0.5 snapkv:capacity=48,window=8; do
        set -- -q run/ -T 0 --ignore-eos --json --logprobs --kv $kv
        generate "$@" -n 30 -p "$text" > whole
        generate "$@" -n 18 -p "$text" --save-cache kept.kv -f > begin
        quantize-kv --verify kept.kv
        generate "$@" -n 12 -p '' --load-cache kept.kv > end
        [ "$(ids whole)" = "$(ids begin; ids end)" ]
        [ "$(logs whole)" = "$(logs begin; logs end)" ]
        generate "$@" -n 5 -p '' --load-cache kept.kv --save-cache again.kv -f > middle
        quantize-kv --verify again.kv
        generate "$@" -n 7 -p '' --load-cache again.kv > end
        [ "$(ids whole)" = "$(ids begin; ids middle; ids end)" ]
        [ "$(logs whole)" = "$(logs begin; logs middle; logs end)" ]
        generate "$@" -n 4 -p ' and' --load-cache kept.kv --n 3 -b 3 > more
        [ "$(wc -l < more)" -eq 3 ]
    done
    generate -q run/ -T 0 -n 12 -p '' --load-cache kept.kv --json --logprobs --ignore-eos > without
    [ "$(ids whole)" = "$(ids begin; ids without)" ]
    generate -q run/ -T 0 -n 3 -p '' --load-cache kept.kv --kv int8 > coded
    [ -s coded ]
    generate -q run/ -p "$text" -n 0 --save-cache kept.kv -f --kv h2o:keep=0.3
    quantize-kv -q kept.kv -m int8 -o coded.kv
    generate -q run/ -n 4 -p ' one' --load-cache coded.kv > more
    [ -s more ]
    run -2 generate -q run/ -n 4 -p ' one' --load-cache coded.kv --kv h2o:keep=0.3
    [[ $output == *"coded.kv were dropped, and it does not name the policy: leave the policy out" ]]
}

@test "generate --kv POLICY: a long context takes the memory of one text; -v tells it" {
    caches() { # of 8 texts in a context of 1,024, in KiB
        generate -v run/ --dtype bf16 -n 16 --context 1024 -b 8 "$@" < long.jsonl 2>&1 > answers |
            sed -n 's/.*, caches \([0-9.]*\) \([KM]\)iB.*/\1 \2/p' | awk '{ print $1 * ($2 == "M" ? 1024 : 1) }'
    }
    one=512 # KiB: 1,024 tokens of 2 layers, keys and values, 64 numbers of 2 bytes
    [ "$(caches)" = $((8 * one)) ]
    [ "$(caches --kv snapkv:capacity=48,window=8)" = $((one + 8 * one / 16)) ]
    [ "$(caches --kv streaming:window=59)" = $((one + 8 * one / 16)) ]
    [ "$(caches --kv kvmerge)" = $((one + 8 * one)) ]
    run --separate-stderr generate -v run/ --dtype bf16 -n 16 -p 'The system' --context 512 --kv snapkv:capacity=48,window=8
    [[ $stderr =~ 'memory beside the weights: caches 32.0 KiB, that of prompts 256 KiB, activations '[0-9.]+' '[KM]'iB, policy '[0-9.]+' KiB' ]]
    [[ $stderr == *$'\n'"generate: --kv: room for 64 tokens of a text; prompts share a cache of 256 KiB"$'\n'* ]]
}

@test "generate --kv POLICY: what cannot be is refused in one line" {
    refused() {
        local pattern=$1
        shift
        run --separate-stderr generate run/ -p 'The system' -n 4 "$@"
        [ "$status" -eq 2 ] || { echo "$*: status $status: $stderr"; return 1; }
        [ "$(wc -l <<< "$stderr")" -eq 1 ]
        # shellcheck disable=SC2053
        [[ $stderr == $pattern ]] || { echo "$*: $stderr"; return 1; }
    }
    refused "generate: --kv: h2o replaces single tokens, and kivi:*codes groups of them: *" --kv h2o+kivi:group=16,residual=16
    refused "generate: --kv: snapkv:capacity=8: a capacity of 8 has no room beside a window of 32: *" --kv snapkv:capacity=8
    refused "generate: --kv: streaming replaces single tokens, and int8:*keeps some plain beside its codes: *" --kv streaming+int8:group=16,residual=16
    generate -q run/ -p 'The system' -n 4 --save-cache y.kv > /dev/null
    refused "generate: --kv: a policy cannot drop tokens of a saved cache: leave it or --load-cache out" --kv snapkv:capacity=40 --load-cache y.kv
    generate -q run/ -p 'The system' -n 4 --save-cache x.kv --kv streaming:window=4 > /dev/null
    refused "generate: --kv: tokens of x.kv were dropped with 'streaming:window=4', not 'streaming:window=5': *" --kv streaming:window=5 --load-cache x.kv
    refused "generate: x.kv: its tokens have positions inside the cache, of 'streaming:window=4': add --kv *" --load-cache x.kv
    refused "generate: --kv: tokens cannot be dropped from pages that texts share: leave the policy, or --serve-batch, out" --kv h2o --serve-batch 4
}
