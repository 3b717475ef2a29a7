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

# predicted MODEL ...: what bench_cuda_predict says on the emulated device
predicted() { "$LM_TEST_BUILD/bench/bench_cuda_predict" "$LM_TEST_BUILD/emu" "${bench%/*/*}/share/models" "$@"; }

@test "bench-cuda: least times by cost rules, of operators apart and joined" {
    predicted gpt2-124m > table
    cat table
    head -n 1 table | grep -q ' an H200 by its data sheet; nothing was measured$'
    [ "$(grep -c '^gpt2-124m: ' table)" -eq 3 ]
    # operator, then calls GFLOP GB ms twice: 12 layers of 4 products and the head, 6 FLOP a parameter and token
    grep -qE '^attention +12 ' table
    [ "$(awk '$1 == "linear" || $1 == "linear_act" { n += $2 } $1 == "sum" { print n; exit }' table)" -eq 48 ]
    awk '$1 == "sum" { f = 65536 * 6 * 124.4e6 * 1e-9; x = $3 / f; if (x < 1 || x > 1.1) exit 1; n++ } n == 1 { exit }' table
    awk '$1 == "sum" { if ($6 > $2 || $9 > $5 || $5 <= 0) exit 1; n++ } END { exit n != 3 }' table
    # a step of decoding reads every weight once, in BF16: 124 million less the positions
    awk '$1 == "sum" && ++n == 2 { exit !($4 > 0.24 && $4 < 0.31) }' table
    # and of its rotary table the rows of these positions
    predicted llama-1b | awk '$1 == "rope" && ++n == 2 { if ($2 != 16 || $4 > 0.001) exit 1 } END { exit n != 3 }'
    run -2 --separate-stderr predicted gpt5
    [ "$stderr" = "bench-cuda: gpt5: unknown model: choose from gpt2-124m gpt2-1.5b llama-1b llama-8b" ]
}
