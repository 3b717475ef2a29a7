#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# generate --mesh tp=N: processes that mpirun has started share weights and caches: the answers of one, once; refusals, stops.
bats_require_minimum_version 1.5.0
load processes.bash

models=(llama-5m deepseek-v3-12m qwen3-next-12m t5-9m)

setup_file() {
    root=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    export root
    cd "$BATS_FILE_TMPDIR"
    sh "$root/tests/cli/examples/train.sh"
    for p in "${models[@]}"; do init-model -q "$p" -t tok/tokenizer.json -o "$p"; done
    printf '{"prompt":"The system"}\n{"prompt":"A","n":3}\n{"no":"prompt"}\n{"prompt":"In the end, "}\n' >prompts.jsonl
}

setup() {
    needs_mpi
    cd "$BATS_FILE_TMPDIR"
}

# The ids alone, and the log-probabilities, one a line.
ids() { grep -o '"token_ids":[^]]*' "$1"; }
probabilities() { grep -o '"logprobs":[^]]*' "$1" | cut -d[ -f2 | tr ',' '\n'; }

same() { # same FILE FILE
    [ "$(ids "$1")" = "$(ids "$2")" ]
    [ "$(ids "$1" | wc -l)" -gt 0 ]
    paste <(probabilities "$1") <(probabilities "$2") |
        awk '{ d = $1 - $2; n++; if (d > 2e-5 || d < -2e-5) bad = 1 } END { exit bad || n < 8 }'
}

@test "generate: processes that share a model choose the tokens of one, and write them once" {
    for m in "${models[@]}"; do
        o=(generate "$m" -p The -p Systems -n 12 --dtype f32 --ignore-eos --json --logprobs)
        "${o[@]}" >one
        ranks 2 "${o[@]}" --mesh tp=2 >two
        same one two || { echo "$m"; cat one two; false; }
    done
    ranks 4 generate llama-5m -p The -p Systems -n 12 --dtype f32 --ignore-eos --json --logprobs --mesh tp=4 -o four -f
    generate llama-5m -p The -p Systems -n 12 --dtype f32 --ignore-eos --json --logprobs >one
    same one four
}

@test "generate: coded caches, coded states and drafts of processes that share a model" {
    quantize-kv -q --calibrate --seq-len 64 --method all -o llama-5m/kv-calibration.safetensors llama-5m data/val
    while read -r m more; do
        o=(generate "$m" -p The -p Systems -n 40 --temperature 0 --dtype f32 --ignore-eos --json --logprobs $more)
        "${o[@]}" >one
        ranks 2 "${o[@]}" --mesh tp=2 >two
        [ "$(ids one)" = "$(ids two)" ] || { echo "$m $more"; cat one two; false; }
    done <<'END'
llama-5m --kv kivi
llama-5m --kv kvquant
llama-5m --kv k=int4:residual=32,v=fp8
deepseek-v3-12m --kv turboquant
deepseek-v3-12m --draft mtp
qwen3-next-12m --states int8
END
}

@test "generate: a bad prompt among others does not end the processes" {
    o=(generate llama-5m prompts.jsonl -n 4 --dtype f32 --ignore-eos --logprobs)
    run --separate-stderr -1 "${o[@]}"
    printf '%s\n' "$output" >one
    run --separate-stderr ranks 2 "${o[@]}" --mesh tp=2
    [ "$status" -eq 1 ]
    printf '%s\n' "$output" >two
    [ "$(grep -c . two)" -eq "$(grep -c . one)" ]
    grep -q '"error"' two
    [ "$(grep -c '^generate: prompts.jsonl' <<<"$stderr")" -eq 1 ]
    same one two
}

@test "generate: one process that is stopped stops the others, at the same token" {
    for i in $(seq 4000); do echo '{"prompt":"The"}'; done >many.jsonl
    mpirun --oversubscribe -n 2 generate llama-5m many.jsonl -n 60 --ignore-eos --mesh tp=2 </dev/null >stopped.jsonl 2>said 3>&- &
    launcher=$!
    for i in $(seq 300); do [ -s stopped.jsonl ] && break; sleep 0.1; done
    kill -TERM "$(pgrep -P "$launcher" -x generate | tail -1)"
    status=0
    wait "$launcher" || status=$?
    [ "$status" -ne 0 ]
    [ "$(grep -c . stopped.jsonl)" -lt 4000 ]
    grep '^generate: prompt .* tokens.s; new' said || { cat said; false; } # of the first rank, which was not stopped itself
}

@test "generate: what processes cannot share is refused once" {
    refused() { # refused N WORDS ARGUMENT ...
        run ranks "$1" generate "${@:3}"
        [ "$status" -ne 0 ]
        [ "$(grep -c '^generate: ' <<<"$output")" -eq 1 ]
        [[ $output == *"generate: $2"* ]] || { echo "$output"; false; }
    }
    refused 2 "--mesh: 2 processes, of which each would do the whole work" llama-5m -p The
    refused 3 "--mesh: tp=3 does not divide 4 heads: choose tp=2 or tp=4" llama-5m -p The --mesh tp=3
    refused 2 "--kv: processes that share a model keep all tokens" llama-5m -p The --mesh tp=2 --kv streaming
    refused 2 "--serve-batch: processes that share a model do not have it" llama-5m -p The --mesh tp=2 --serve-batch 2
    refused 2 "standard input: processes cannot share it" llama-5m --mesh tp=2
    run --separate-stderr -2 generate llama-5m -p The --mesh tp=2
    [ "$stderr" = "generate: --mesh: it has 2 ranks, and this is one process: start the processes with mpirun -n" ]
}
