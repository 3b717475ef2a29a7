#!/usr/bin/env bats
# scripts/bench-cuda: the whole of it on the emulated device at toy sizes, and what it says without one.
bats_require_minimum_version 1.5.0

setup() {
    cd "$BATS_TEST_TMPDIR"
    bench=${LM_TEST_ROOT:-$BATS_TEST_DIRNAME/../..}/scripts/bench-cuda
    [ -x "$LM_TEST_BUILD/bench/bench_cuda" ] || skip "not built"
}

@test "bench-cuda: every part has its rows, in the table and as JSONL" {
    TMPDIR=$PWD "$bench" -b "$LM_TEST_BUILD" --emulated -o rows.jsonl > table
    cat table
    grep -q '^# emulated device, .*: the figures mean nothing$' table
    for op in linear linear_dx linear_dw attention attention_dx attention_cached norm norm_dx norm_dw rope swiglu \
        swiglu_dx gelu gelu_dx add cast embed embed_dw head_loss adamw sumsq; do
        grep -qE "^kernel +$op .* plain " table
        grep -qE '"kernel","name":"'$op'",.*"path":"plain","n":[0-9]+,"seconds":[0-9.e-]+,' rows.jsonl
    done
    for op in linear linear_dx linear_dw attention attention_dx head_loss; do
        grep -qE "^kernel +$op .* bf16 +tensor .* of (cuBLASLt|copy), " table
    done
    grep -qE '^kernel +linear .* f32 +tf32 ' table
    [ "$(grep -c '"part":"ceiling"' rows.jsonl)" -ge 8 ]
    [ "$(grep -c '^decode .* tokens/s ' table)" -eq 4 ]
    grep -qE '^train +gpt2-124m .* tensor .* tokens/s .*memory .*, planned ' table
    grep -qE '^train +gpt2-124m .* plain ' table
    grep -qE '"name":"llama-1b".*"path":"tensor","n":2,.*"memory":[0-9]+,"memory_planned":[0-9]+}' rows.jsonl
    run ! grep -E '^#.* (failed|left out|stopped)' <(grep -vE '^# (PyTorch|llm\.c) left out: ' table)
    run ! grep -E ' 0 (GB|TFLOP|tokens)/s' table
    [ "$(ls)" = "$(printf 'rows.jsonl\ntable')" ]
}

@test "bench-cuda: what it cannot do, in one line" {
    LM_EMU_DEVICES=0 run -1 "$bench" -b "$LM_TEST_BUILD" --emulated
    [ "${#lines[@]}" -eq 1 ]
    [[ $output == "bench-cuda: cuda:0: no usable GPU: "* ]]
    run -2 "$bench" --fast
    [ "$output" = "bench-cuda: --fast: unknown argument" ]
    run -2 "$bench" --parts kernels,decoding
    [ "$output" = "bench-cuda: --parts: unknown 'decoding': choose from kernels decode train peers" ]
}
