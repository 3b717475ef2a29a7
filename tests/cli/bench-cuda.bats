#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# scripts/bench-cuda: the whole script on the emulated device at toy sizes, and its errors without a device.
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
        swiglu_dx gelu gelu_dx add cast embed embed_dw head_loss adamw sumsq linear_act linear_act_dx norm_dx_dw \
        norm_linear attention_step sample fp8_gemm fp8_quantize; do
        grep -qE "^kernel +$op .* plain " table
        grep -qE '"kernel","name":"'$op'",.*"path":"plain","n":[0-9]+,"seconds":[0-9.e-]+,' rows.jsonl
    done
    for op in linear_act linear_act_dx norm_dx_dw norm_linear attention_step; do # each beside its parts
        grep -qE "^kernel +$op .*; parts [0-9.]+ ms, [0-9.]+ times" table
        run ! grep -E "^kernel +$op [^;]*$" table
    done
    [ "$(grep -cE '^kernel +norm_linear .* tensor ' table)" -eq 6 ]
    [ "$(grep -cE '^kernel +sample +(1|64) x 512, (greedy|top-p) ' table)" -eq 4 ]
    [ "$(grep -cE '^kernel +fp8_gemm .* (tensor|1x128|128x128) +f8e[45]m[23] +(plain|tensor) ' table)" -eq 12 ]
    for op in linear linear_dx linear_dw attention attention_dx head_loss; do
        grep -qE "^kernel +$op .* bf16 +tensor .* of (cuBLASLt|copy), " table
    done
    grep -qE '^kernel +linear .* f32 +tf32 ' table
    [ "$(grep -c '"part":"ceiling"' rows.jsonl)" -ge 8 ]
    # one layer: embedding, norm and qkv, rotation and attention, o, norm and SwiGLU, down, norm and head;
    # the choice, and three copies
    [ "$(grep -cE '^decode .* tokens/s .*; 11 launches; aim 70 %: (met|missed)$' table)" -eq 4 ]
    grep -qE '^train +gpt2-124m .* tensor .* tokens/s .*memory .*, planned ' table
    grep -qE '^train +gpt2-124m .* plain ' table
    grep -qE '"name":"llama-1b".*"path":"tensor","n":2,.*"memory":[0-9]+,"memory_planned":[0-9]+,"arena":[0-9]+,"arena_least":[0-9]+}' rows.jsonl
    grep -qE '^train +gpt2-124m +2x1 x 16, saving .* 3 checkpoints, [-+][0-9.]+ % over [0-9.]+ ms without; (the host waited [0-9.]+ s|one took longer .*); aim 2 %: ' table
    # --table prints the same table from the rows
    "$bench" --table rows.jsonl > again
    diff table again
    rm again
    run ! grep -E '^#.* (failed|left out|stopped)' <(grep -vE '^# (PyTorch|llm\.c) left out: ' table)
    run ! grep -E ' 0 (GB|TFLOP|tokens)/s' table
    [ "$(ls)" = "$(printf 'rows.jsonl\ntable')" ]
}

@test "bench-cuda: misuse is one line" {
    LM_EMU_DEVICES=0 run -1 "$bench" -b "$LM_TEST_BUILD" --emulated
    [ "${#lines[@]}" -eq 1 ]
    [[ $output == "bench-cuda: cuda:0: no usable GPU: "* ]]
    run -2 "$bench" --fast
    [ "$output" = "bench-cuda: --fast: unknown argument" ]
    run -2 "$bench" --parts kernels,decoding
    [ "$output" = "bench-cuda: --parts: unknown 'decoding': choose from kernels decode train peers" ]
}

@test "bench-cuda: aims beside the figures" {
    local of='"part":"train","dtype":"bf16"' copy='"of":"copy, 4000 GB/s"' product='"of":"cuBLASLt, 600 TFLOP/s"'
    cat > rows.jsonl <<EOF
{"part":"kernel","name":"norm","shape":"rms 8192 x 4096","path":"plain","seconds":1e-4,"share":0.86,$copy}
{"part":"kernel","name":"add","shape":"8192 x 4096","path":"plain","seconds":1e-4,"share":0.84,$copy}
{"part":"kernel","name":"sample","shape":"1 x 128256, greedy","path":"plain","seconds":1e-5,"share":0.3,$copy}
{"part":"kernel","name":"attention","shape":"B=1 H=32/8 T=8192 D=128","path":"tensor","seconds":1e-3,"rate":460,"unit":"TFLOP/s","share":0.76,$product}
{"part":"kernel","name":"attention","shape":"B=8 H=32/8 T=1024 D=128","path":"tensor","seconds":1e-3,"rate":460,"unit":"TFLOP/s","share":0.76,$product}
{"part":"kernel","name":"attention_dx","shape":"B=1 H=32/8 T=8192 D=128","path":"tensor","seconds":1e-3,"rate":270,"unit":"TFLOP/s","share":0.66,$product}
{"part":"kernel","name":"linear_act","shape":"8 x 8 -> 8","path":"tensor","seconds":1e-3,"rate":500,"unit":"TFLOP/s","share":0.8,$product,"parts":0.0015}
{"part":"decode","name":"llama-1b","shape":"B=1 behind 128","path":"plain","seconds":1e-3,"share":0.7,$copy,"launches":83}
{$of,"name":"gpt2-1.5b","path":"tensor","n":7,"seconds":1,"rate":2000,"share":0.55,"of":"peak","memory":1002,"memory_planned":1000,"arena":1040,"arena_least":1000}
{$of,"name":"gpt2-1.5b","path":"plain","n":7,"seconds":9,"rate":200,"share":0.05,"of":"peak","memory":1020,"memory_planned":1000,"arena":1029,"arena_least":1000}
{$of,"name":"gpt2-1.5b","path":"PyTorch 2.9","n":7,"seconds":1.6,"rate":1600,"memory":3}
{$of,"name":"gpt2-1.5b","path":"llm.c","n":7,"seconds":0.5,"rate":2001}
{$of,"name":"llama-8b, 8 layers","path":"PyTorch 2.9","n":7,"seconds":1.6,"rate":1600,"memory":3}
{$of,"name":"gpt2-124m","shape":"a","path":"tensor","n":50,"seconds":0.101,"without":0.1,"checkpoints":3,"waited":0.02}
{$of,"name":"gpt2-124m","shape":"b","path":"tensor","n":50,"seconds":0.101,"without":0.1,"checkpoints":3,"waited":0.1}
{$of,"name":"gpt2-124m","shape":"c","path":"tensor","n":50,"seconds":0.1,"without":0.1,"checkpoints":3}
EOF
    "$bench" --table rows.jsonl > table
    cat table
    line() { grep -qE "$1" table; }
    line '^kernel +norm .* 86.0 %  of copy, 4000 GB/s; aim 85 %: met$'
    line '^kernel +add .*; aim 85 %: missed$'
    line '^kernel +sample .* GB/s$' # too short to tell
    line '^kernel +attention .* T=8192 .*; aim 75 % and 350 TFLOP/s: met$'
    line '^kernel +attention .* T=1024 .* of cuBLASLt, 600 TFLOP/s$'
    line '^kernel +attention_dx .*; aim 65 % and 280 TFLOP/s: missed$'
    line '^kernel +linear_act .*; parts 1.5000 ms, 1.50 times$'
    line '^decode .*; 83 launches; aim 70 %: met$'
    line '^train +gpt2-1.5b .* tensor .*planned 0.00 \(\+0.2 %\); aim 1 %: met; arena .*\(\+4.0 %\); aim 3 %: missed; aim 60 %: missed; aim at least 50 %: met$'
    line '^train +gpt2-1.5b .* plain .*\(\+2.0 %\); aim 1 %: missed; arena .*\(\+2.9 %\); aim 3 %: met$'
    line '^train +gpt2-1.5b .* PyTorch 2.9 .*; ours 1.25 times; aim ahead: met$'
    line '^train +gpt2-1.5b .* llm.c .* ours 1.00 times; aim ahead: missed$'
    line '^train +llama-8b, 8 layers .* memory 0.00 GB$'
    line '^train +gpt2-124m +a .* 3 checkpoints, \+1.4 % over 100.0000 ms without; the host waited 0.020 s; aim 2 %: met$'
    line '^train +gpt2-124m +b .* \+3.0 % .* waited 0.100 s; aim 2 %: missed$'
    line '^train +gpt2-124m +c .* one took longer than the steps to the next; aim 2 %: missed$'
    [ "$(tail -n 1 table)" = '# 8 of 16 aims met' ]
    run -1 "$bench" --table nothing
    [ "$output" = "bench-cuda: nothing: no rows to read" ]
    : > empty
    for file in empty .; do
        run -1 "$bench" --table $file
        [ "$output" = "bench-cuda: $file: no rows to read" ]
    done
    head -c -9 rows.jsonl > short
    run -1 "$bench" --table short
    [ "$output" = "bench-cuda: short: line 16 is no row of bench-cuda: take a file that -o wrote" ]
    run -1 bash -c '"$1" --table rows.jsonl > /dev/full' _ "$bench"
    [ "$output" = "bench-cuda: the table cannot be written to standard output" ]
}

# predicted MODEL ...: output of bench_cuda_predict on the emulated device
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
