#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# --device cuda: names, modules, missing devices, and the same results as the CPU's.
bats_require_minimum_version 1.5.0

load cuda

setup_file() {
    examples train
}

setup() {
    use_module
    own_folder
}

T=(train -q --peak-tflops 0 --seq-len 16 --batch-size 2 --lr 3e-3 --warmup 2)
G=(generate -q m0 -p "The system" -n 4)

says() { # says TEXT: standard error is one line with TEXT, apart from messages of the emulation
    local lines
    lines=$(grep -v '^emulated GPU: ' <<< "$stderr")
    [ "$(wc -l <<< "$lines")" -eq 1 ] && grep -qF -- "$1" <<< "$lines" && return
    echo "standard error is: $stderr"
    return 1
}

# field FILE EVENT KEY -> the values of a key, a line each
field() {
    sed -nE "/^\{\"event\":\"$2\"/s/.*\"$3\":([^,}]*).*/\1/p" "$1"
}

# close_to FILE FILE TOLERANCE: two columns of numbers of the same length, relative differences below
close_to() {
    paste "$1" "$2" | awk -v t="$3" 'NF != 2 { exit 1 } { d = $1 / $2 - 1; if (d > t || d < -t) { print; exit 1 } }
        END { if (!NR) exit 1 }'
}

# ---- names ----

@test "cuda: devices have names" {
    for d in gpu cuda: cuda:x cuda:-1 cuda0 cuda:1:2 ''; do
        run -2 --separate-stderr "${G[@]}" --device "$d"
        says "--device: unknown device '$d': choose from cpu, cuda, cuda:0"
    done
    LM_DEVICE=gpu run -2 --separate-stderr "${G[@]}"
    says "LM_DEVICE: --device: unknown device 'gpu'"
    generate --device cuda:3 --print-config | grep -q '"device": "cuda:3"'
    generate --completion=bash | grep -q "\-\-device) words='cpu cuda'"
    "${G[@]}" --device cpu > a
    "${G[@]}" > b
    cmp a b
}

@test "cuda: the paths of kernels have names" {
    LM_CUDA=fast run -2 --separate-stderr "${G[@]}" --device cuda
    says "LM_CUDA: kernels of a CUDA device: unknown path 'fast': choose from plain, tensor, tf32"
}

# ---- modules ----

# A program in a folder without a module beside it.
alone() {
    mkdir -p alone/bin
    cp "$(command -v "$1")" alone/bin/
    PATH=$PWD/alone/bin:$PATH
}

@test "cuda: without the module" {
    alone generate
    LM_MODULES=/no/such/folder:$PWD run -1 --separate-stderr "${G[@]}" --device cuda:1
    says "cuda:1: there is no libcore-cuda.so in /no/such/folder, $PWD, "
    says "'make cuda' builds it"
    unset LM_MODULES
    alone train
    run -1 --separate-stderr train -q m0 data -o run --steps 1 --device cuda
    says "cuda: there is no libcore-cuda.so in "
    [ ! -e run/latest ]
}

@test "cuda: the module lies beside the program's folder, too" {
    emulated
    alone generate
    mkdir -p alone/lib
    ln -s "$LM_TEST_BUILD/emu" alone/lib/lmutils
    "${G[@]}" > a
    LM_MODULES=/no/such/folder "${G[@]}" --device cuda > b
    cmp a b
}

@test "cuda: an invalid module, and one of another version" {
    echo "no library" > libcore-cuda.so
    LM_MODULES=:$PWD run -1 --separate-stderr "${G[@]}" --device cuda
    says "cuda: cannot load the module: $PWD/libcore-cuda.so"
    mkdir -p folder/libcore-cuda.so
    LM_MODULES=$PWD/folder run -1 --separate-stderr "${G[@]}" --device cuda
    [[ $stderr == *": Is a directory" && $stderr != *"directory: Is"* ]]
    cut_at() { head -c "$1" "$LM_MODULES/libcore-cuda.so" > cut/libcore-cuda.so; }
    mkdir cut
    local whole
    whole=$(stat -Lc %s "$LM_MODULES/libcore-cuda.so")
    for n in $((whole - 1)) $((whole / 2)) 4096 64; do
        cut_at "$n"
        LM_MODULES=$PWD/cut run -1 --separate-stderr "${G[@]}" --device cuda
        says "$PWD/cut/libcore-cuda.so: is truncated: it has $n bytes, its table of sections ends at "
    done
    cut_at 63
    LM_MODULES=$PWD/cut run -1 --separate-stderr "${G[@]}" --device cuda
    says "cuda: cannot load the module: $PWD/cut/libcore-cuda.so: file too short"
    # bytes 4 and 5: a 32-bit object, a big-endian object
    for at in 4:1:ELFCLASS32 5:2:endian; do
        IFS=: read -r byte to words <<< "$at"
        cut_at 4096
        printf "\\$to" | dd of=cut/libcore-cuda.so bs=1 seek="$byte" conv=notrunc status=none
        LM_MODULES=$PWD/cut run -1 --separate-stderr "${G[@]}" --device cuda
        says "cuda: cannot load the module: $PWD/cut/libcore-cuda.so: "
        [[ $stderr == *"$words"* ]]
    done
    command -v cc > /dev/null || skip "no compiler"
    fake() { cc -w -shared -fPIC -o libcore-cuda.so -x c - && LM_MODULES=$PWD run -1 --separate-stderr "${G[@]}" --device cuda; }
    fake <<< 'int x;'
    says "is not a module of lmutils"
    fake <<< 'struct { const char *v; unsigned long n; void *open; } lm_module_cuda = { "0.0.0", 8 };'
    says "has version 0.0.0, this program "
    fake <<< 'struct { const char *v; unsigned long n; unsigned c; void *open; } lm_module_cuda =
        { "'"$(generate --version | sed -n '1s/.* //p')"'", 8 };'
    says "was built from different sources than this program"
}

# ---- kernels ----

@test "cuda: products that cuBLASLt does not support are reported" {
    emulated
    init-model -q llama-1m --tokenizer m0 -s num_hidden_layers=1 -s hidden_size=36 -s num_attention_heads=2 \
        -s num_key_value_heads=1 -s head_dim=18 -s intermediate_size=44 -o odd
    local tokens=(generate odd -p "The system" -n 4 --device cuda)
    LM_CUDA=tensor run -0 --separate-stderr "${tokens[@]}"
    ! grep -q 'plain kernels made' <<< "$stderr" || return 1
    LM_EMU_PICKY=1 LM_CUDA=tensor run -0 --separate-stderr "${tokens[@]}"
    grep -q '^generate: device cuda:0: cuBLASLt served .* others, which plain kernels made, and .* only without the function or sums behind them$' <<< "$stderr"
}

@test "cuda: the plain default warns of idle tensor cores, with the factor and the variable" {
    emulated
    local tokens=(generate m0 -p "The system" -n 1 --device cuda)
    run -0 --separate-stderr "${tokens[@]}"
    says_of_default="generate: device cuda:0: plain kernels, the default, leave its tensor cores idle: LM_CUDA=tensor makes"
    grep -q "^$says_of_default products of bf16 several times as fast, LM_CUDA=tf32 also those of f32, rounded, several times; LM_CUDA=plain keeps" <<< "$stderr"
    LM_EMU_CARD="NVIDIA GB200" run -0 --separate-stderr "${tokens[@]}"
    grep -q "^$says_of_default products of bf16 up to 31.2 times as fast, .* up to 15.6 times;" <<< "$stderr"
    for path in plain tensor tf32; do
        LM_CUDA=$path run -0 --separate-stderr "${tokens[@]}"
        run ! grep idle <<< "$stderr"
    done
    run -0 --separate-stderr generate m0 -p "The system" -n 1 --device cpu
    run ! grep idle <<< "$stderr"
}

# ---- devices ----

@test "cuda: no device, and too high a number" {
    emulated
    LM_EMU_DEVICES=0 run -1 --separate-stderr "${G[@]}" --device cuda
    says "cuda:0: no usable GPU: no CUDA-capable device is detected"
    LM_EMU_DEVICES=1 run -1 --separate-stderr "${G[@]}" --device cuda:1
    says "cuda:1: this machine has one CUDA device: cuda:0"
    LM_EMU_DEVICES=3 run -1 --separate-stderr "${G[@]}" --device cuda:7
    says "cuda:7: this machine has 3 CUDA devices: cuda:0 to cuda:2"
}

@test "cuda: the module for GPUs where there is no GPU" {
    [ -f "$LM_TEST_BUILD/lib/lmutils/libcore-cuda.so" ] || skip "not built: no nvcc"
    export LM_MODULES=$LM_TEST_BUILD/lib/lmutils
    if generate -q m0 -p x -n 1 --device cuda > /dev/null 2>&1; then skip "there is a GPU"; fi
    run -1 --separate-stderr "${T[@]}" m0 data -o run --steps 1 --device cuda
    says "cuda:0: no usable GPU: "
    says "(driver "
    [ ! -e run/latest ]
}

@test "cuda: the first lines name the device, its driver and the kernels" {
    run --separate-stderr generate -v m0 -p x -n 1 --device cuda
    [ "$status" -eq 0 ]
    grep -qE 'device cuda:0: .*, sm_[0-9]+, [0-9]+ SMs, [0-9.]+ GiB, driver [0-9.]+, runtime [0-9.]+; kernels plain' <<< "$stderr"
    run --separate-stderr generate -v m0 -p x -n 1
    grep -qE 'device cpu: .*; kernels [a-z0-9]+, [0-9]+ threads?' <<< "$stderr"
}

# ---- results ----

@test "cuda: training gives the CPU's losses" {
    for d in cpu cuda; do
        "${T[@]}" m0 data -o run-$d --steps 5 --metrics $d.jsonl --device $d
        field $d.jsonl step loss > $d.loss
        field $d.jsonl step grad_norm > $d.norm
    done
    [ "$(wc -l < cuda.loss)" -eq 5 ]
    close_to cuda.loss cpu.loss 1e-4
    close_to cuda.norm cpu.norm 1e-3
    eval-model -q run-cuda data/val > a
    eval-model -q run-cuda data/val --device cuda > b
    grep -o '"loss":[0-9.]*' a | cut -d: -f2 > a.loss
    grep -o '"loss":[0-9.]*' b | cut -d: -f2 > b.loss
    close_to a.loss b.loss 1e-4
}

@test "cuda: bf16 stays near f32" {
    for dtype in f32 bf16; do
        "${T[@]}" m0 data -o run-$dtype --steps 3 --dtype $dtype --metrics $dtype.jsonl --device cuda
        field $dtype.jsonl step loss > $dtype.loss
    done
    close_to f32.loss bf16.loss 1e-2
}

@test "cuda: a run continues on another device" {
    "${T[@]}" m0 data -o a --steps 6 --metrics a.jsonl --device cuda
    "${T[@]}" m0 data -o b --steps 3 --device cuda
    train -q --resume b --steps 6 --device cpu --metrics b.jsonl
    field a.jsonl step loss | tail -n 3 > a.loss
    field b.jsonl step loss > b.loss
    close_to a.loss b.loss 1e-3
}

@test "cuda: the same text as on the CPU" {
    for p in "The system" "A word" "x"; do
        generate -q m0 -p "$p" -n 8 --dtype f32 --temperature 0 > a
        generate -q m0 -p "$p" -n 8 --dtype f32 --temperature 0 --device cuda > b
        cmp a b
    done
}

# ---- failures ----

@test "cuda: a device lost in training leaves the last checkpoint" {
    emulated
    "${T[@]}" m0 data -o whole --steps 6 --save-every 2 --device cuda
    for n in 1 100 250 400; do
        rm -rf run
        LM_EMU_FAIL=$n run --separate-stderr "${T[@]}" m0 data -o run --steps 6 --save-every 2 --device cuda
        [ "$status" -eq 1 ]
        says "cuda:0: "
        [ -z "$(find . -name '.*.tmp.*')" ]
        [ ! -e run/latest ] || inspect-model -q run > /dev/null
    done
    [ -e run/latest ]
    train -q --resume run --steps 6 --device cuda
    cmp <(tail -c 4096 run/latest/model.safetensors) <(tail -c 4096 whole/latest/model.safetensors)
}

@test "cuda: more than the device's memory" {
    emulated
    LM_EMU_MEMORY=1M run -1 --separate-stderr "${T[@]}" m0 data -o run --steps 1 --device cuda
    says "cuda:0: the run needs 1."
    [[ $stderr =~ " MiB, 10"[0-9]{2}" KiB are free: " ]] # a stream needs some memory
    LM_EMU_MEMORY=3M run -1 --separate-stderr "${T[@]}" m0 data -o run --steps 1 --device cuda --batch-size 64
    says "cuda:0: the run needs "
    [[ $stderr =~ --batch-size\ ([0-9]+) ]]
    [ ! -e run ]
    LM_EMU_MEMORY=3M "${T[@]}" m0 data -o run --steps 1 --device cuda --batch-size "${BASH_REMATCH[1]}"
    LM_EMU_MEMORY=4M run -1 --separate-stderr eval-model -q m0 data/val --seq-len 64 --batch-size 256 --device cuda
    says "cuda:0: weights take "
    says ", activations of 256 windows of 64 tokens "
    [[ $stderr =~ a\ batch\ of\ ([0-9]+)\ windows\ fits ]]
    LM_EMU_MEMORY=4M eval-model -q m0 data/val --seq-len 64 --batch-size "${BASH_REMATCH[1]}" --device cuda > answer
    LM_EMU_MEMORY=100K run -1 --separate-stderr "${G[@]}" --device cuda
    says "cuda:0: weights take "
    says " of 100 KiB are free: "
}
