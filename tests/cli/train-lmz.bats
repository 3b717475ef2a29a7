#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# train --checkpoint-format lmz: the same checkpoints in one file each, to the bit, whatever happens.
bats_require_minimum_version 1.5.0

setup_file() {
    root=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    export root
    cd "$BATS_FILE_TMPDIR"
    sh "$root/tests/cli/examples/train.sh"
}

setup() {
    load ../inject/inject
    cd "$BATS_TEST_TMPDIR"
    ln -s "$BATS_FILE_TMPDIR/data" "$BATS_FILE_TMPDIR/m0" .
}

T=(train -q --peak-tflops 0 --seq-len 32 --batch-size 2 --lr 3e-3 --warmup 2 --steps 8)
Z=(--checkpoint-format lmz)

# unpacked RUN -> folder of its newest checkpoint, decompressed
unpacked() {
    rm -rf "$1.unpacked"
    compress-ckpt -q -d "$1/latest" -o "$1.unpacked"
}

# tensors FILE -> the data of a safetensors file, without the header and its history
tensors() {
    tail -c +$((9 + $(od -An -t u8 -N 8 "$1"))) "$1"
}

wait_for() { # wait_for COMMAND ...: until it succeeds, two minutes at most
    for ((i = 0; i < 6000; i++)); do
        "$@" && return
        sleep 0.02
    done
    echo "waited in vain for $*"
    return 1
}

same_bits() { # same_bits FOLDER FOLDER: of two checkpoints
    cmp <(tensors "$1/model.safetensors") <(tensors "$2/model.safetensors")
    cmp "$1/optimizer.safetensors" "$2/optimizer.safetensors"
    cmp "$1/tokenizer.json" "$2/tokenizer.json"
    diff <(grep -E '^  "(optimizer|step|tokens|sample|best_loss)"' "$1/state.json") \
        <(grep -E '^  "(optimizer|step|tokens|sample|best_loss)"' "$2/state.json")
}

@test "train lmz: a run of .lmz files is a model, with the contents of a run of folders" {
    "${T[@]}" m0 data -o whole
    "${T[@]}" m0 data -o run "${Z[@]}" --save-every 3
    [ "$(ls run | tr '\n' ' ')" = "latest step-000003.lmz step-000006.lmz step-000008.lmz " ]
    [ "$(readlink run/latest)" = step-000008.lmz ]
    [ "$(stat -c %s run/step-000008.lmz)" -lt "$(cat whole/step-000008/* | wc -c)" ]
    compress-ckpt -q -t run/*.lmz
    unpacked run
    compress-ckpt -q -d run -o newest
    diff -r run.unpacked newest
    compress-ckpt -q -t run
    compress-ckpt -l run | grep -q '^run/step-000008.lmz'
    run compress-ckpt -d --rm run -o gone
    [ "$status" -eq 2 ]
    [ -e run/step-000008.lmz ]
    same_bits whole/latest run.unpacked
    run inspect-model --check whole run
    [ "$status" -eq 0 ]
    [[ "$output" == *"tensors are the same"* ]]
}

@test "train lmz: resume gives the same bits, from any checkpoint, in either format" {
    "${T[@]}" m0 data -o whole --save-every 5
    "${T[@]}" m0 data -o run "${Z[@]}" --save-every 5
    train -q --resume run/step-000005.lmz -o again
    [ -e again/step-000008.lmz ] # the option is kept
    unpacked again
    same_bits whole/latest again.unpacked
    train -q --resume run/step-000005.lmz -o folders --checkpoint-format safetensors
    same_bits whole/latest folders/latest
    train -q --resume whole/step-000005 -o files "${Z[@]}"
    unpacked files
    same_bits whole/latest files.unpacked
    train -q --resume run --steps 9
    train -q --resume whole --steps 9
    [ "$(readlink run/latest)" = step-000009.lmz ]
    unpacked run
    same_bits whole/latest run.unpacked
}

@test "train lmz: kill -9 at any moment, then --resume: the same bits" {
    "${T[@]}" m0 data -o whole --steps 40
    for n in 1 6 15; do
        rm -rf run
        "${T[@]}" m0 data -o run --steps 40 --save-every 1 --keep 2 "${Z[@]}" &
        pid=$!
        reached() { [ "$(find run -maxdepth 1 -name 'step-*' 2> /dev/null | sed 's/.lmz//; s/.*-0*//' | sort -n | tail -1)0" -ge $((10 * n)) ]; }
        wait_for reached
        kill -9 $pid || true # it may have ended already
        wait $pid || true
        inspect-model -q run > /dev/null
        train -q --resume run
        unpacked run
        same_bits whole/latest run.unpacked || { echo "killed after $n"; false; }
        [ -z "$(find run -name '.*' -name '*tmp*')" ]
        [ "$(ls run | wc -l)" -eq 3 ] # two checkpoints and latest
    done
}

@test "train lmz: best is an .lmz too, and is kept" {
    "${T[@]}" m0 data -o run "${Z[@]}" --eval-every 2 --keep 1
    [ "$(readlink run/best)" = step-000008.lmz ]
    train -q --resume run --steps 14 --lr 0.3 --warmup 0 --lr-schedule constant --max-grad-norm 0
    [ "$(ls run | tr '\n' ' ')" = "best latest step-000008.lmz step-000014.lmz " ]
    rm run/best # as after a kill before the link is made
    train -q --resume run --steps 16
    [ "$(readlink run/best)" = step-000008.lmz ]
    inspect-model -q run/best > /dev/null
    # links follow a checkpoint that is decompressed or compressed in place
    compress-ckpt -q -d --rm run/step-000008.lmz -o run/step-000008
    [ "$(readlink run/best)" = step-000008 ]
    compress-ckpt -q --rm run/step-000008
    compress-ckpt -q -d --rm run/step-000016.lmz -o run/step-000016
    [ "$(ls run | tr '\n' ' ')" = "best config.json latest model.safetensors step-000008.lmz step-000016 tokenizer.json tokenizer_config.json " ]
    [ "$(readlink run/best) $(readlink run/latest)" = "step-000008.lmz step-000016" ]
    inspect-model -q run/best > /dev/null
}

@test "train lmz: formats change within a run, --keep counts both" {
    "${T[@]}" m0 data -o run --steps 2 --save-every 1 --keep 2
    [ -L run/config.json ]
    train -q --resume run --steps 4 --save-every 1 "${Z[@]}"
    [ "$(ls run | tr '\n' ' ')" = "latest step-000003.lmz step-000004.lmz " ]
    train -q --resume run --steps 5 --checkpoint-format safetensors
    [ "$(readlink run/latest)" = step-000005 ]
    [ -L run/config.json ]
    inspect-model -q run > /dev/null
}

@test "train lmz: resuming an earlier checkpoint, -f, and an existing run" {
    "${T[@]}" m0 data -o run --save-every 4 "${Z[@]}"
    run "${T[@]}" m0 data -o run "${Z[@]}"
    [ "$status" -eq 2 ]
    [[ "$output" == *"holds a run already (step-000008.lmz)"* ]]
    run train -q --resume run/step-000004.lmz
    [ "$status" -eq 2 ]
    [[ "$output" == *"the run has gone further (step-000008.lmz)"* ]]
    train -q --resume run/step-000004.lmz -f --steps 5
    [ "$(ls run | tr '\n' ' ')" = "latest step-000004.lmz step-000005.lmz " ]
    "${T[@]}" -f m0 data -o run --steps 1 "${Z[@]}"
    [ "$(ls run | tr '\n' ' ')" = "latest step-000001.lmz " ]
}

@test "train lmz: a damaged checkpoint is refused, its part named" {
    "${T[@]}" m0 data -o run "${Z[@]}"
    size=$(stat -c %s run/step-000008.lmz)
    printf '\377\377\377\377' | dd of=run/step-000008.lmz bs=1 seek=$((size / 2)) conv=notrunc status=none
    run train -q --resume run --steps 9
    [ "$status" -eq 1 ]
    [[ "$output" == *step-000008.lmz* ]]
    [ "${#lines[@]}" -eq 1 ]
}

@test "train lmz: checkpoints made by compress-ckpt are resumed, differences too" {
    "${T[@]}" m0 data -o run --save-every 4
    "${T[@]}" m0 data -o whole --steps 9
    train -q --resume run --steps 9 -o nine
    compress-ckpt -q --rm run/step-000004
    compress-ckpt -q --rm run/step-000008 --base run/step-000004.lmz
    inspect-model -q run > /dev/null
    train -q --resume run --steps 9
    same_bits nine/latest run/latest
    compress-ckpt -q run/step-000009 --optimizer-states bf16 -o run/step-000010.lmz
    compress-ckpt -q run/step-000009 --optimizer-states int8 -o eight.lmz
    mkdir lossy
    cp run/step-000010.lmz lossy/step-000009.lmz
    train -q --resume lossy --steps 10
    mkdir coded
    cp eight.lmz coded/step-000009.lmz
    compress-ckpt -q -d eight.lmz -o eight
    train -q --resume eight -o on --steps 10
    [ "$(readlink on/latest)" = step-000010 ]
    compress-ckpt -q run/step-000009 -o whole9.lmz
    train -q --resume whole9.lmz -o on9 --steps 10
    train -q --resume run/step-000009 --steps 10 -o ten
    same_bits ten/latest on9/latest
    run train -q --resume whole9.lmz --steps 10
    [ "$status" -eq 2 ]
    [[ "$output" == *"is a checkpoint outside a run"* ]]
    run train -q --resume m0 -o no
    [ "$status" -eq 2 ]
    run train -q --resume coded --steps 10
    [ "$status" -eq 1 ]
    [[ "$output" == *"compress-ckpt -d"* ]]
}

@test "train lmz: old checkpoints are removed, except bases of differences in the run" {
    "${T[@]}" m0 data -o run --steps 4 --save-every 2
    compress-ckpt -q run/step-000004 -o mine.lmz
    compress-ckpt -q --rm run/step-000004 --base run/step-000002
    train -q --resume run --steps 5 --save-every 1 --keep 2
    [ "$(cd run && echo step-*)" = "step-000002 step-000004.lmz step-000005" ]
    compress-ckpt -q -t run/step-000004.lmz
    compress-ckpt -q --rebase run/step-000005 mine.lmz
    compress-ckpt -q run/step-000002 --base mine.lmz -o run/best.lmz
    train -q --resume run --steps 8 --save-every 1 --keep 2
    [ "$(cd run && echo step-*)" = "step-000005 step-000007 step-000008" ]
    compress-ckpt -q -t run/best.lmz
    rm run/best.lmz
    train -q --resume run --steps 9
    [ "$(cd run && echo step-*)" = "step-000008 step-000009" ]
}

@test "train lmz: -f does not discard a base of a difference in the run" {
    "${T[@]}" m0 data -o run --steps 4 --save-every 2
    compress-ckpt -q --rm run/step-000002 --base run/step-000004
    run train --resume run/step-000002.lmz -f --steps 3
    [ "$status" -eq 2 ]
    [[ "$output" == *"step-000004 would be removed"*"--rebase none"* ]]
    [ "${#lines[@]}" -eq 1 ]
    [ -d run/step-000004 ]
    compress-ckpt -q --rebase none run/step-000002.lmz
    train -q --resume run/step-000002.lmz -f --steps 3
    [ "$(cd run && echo step-*)" = "step-000002.lmz step-000003" ]
}

@test "train lmz: the memory plan counts the coder" {
    run "${T[@]}" m0 data -o run --dry-run "${Z[@]}"
    [[ "$output" == *"checkpoint coder"* ]]
    run "${T[@]}" m0 data -o run --dry-run
    [[ "$output" != *"checkpoint coder"* ]]
}

# Whatever failed: all existing checkpoints are complete, and after success the last one exists.
whole_files() {
    local c
    for c in run/step-*; do
        [ ! -e "$c" ] || compress-ckpt -q -t "$c" || return 1
    done
    [ "$1" -ne 0 ] || [ "$(readlink run/latest)" = step-000004.lmz ]
}

@test "train lmz: each failing write, fsync and rename leaves complete checkpoints" {
    t=("${T[@]}" -j 1 --steps 4 --save-every 2 "${Z[@]}")
    inject_each write 40 whole_files "${t[@]}" m0 data -o run -f
    inject_each fsync 10 whole_files "${t[@]}" m0 data -o run -f
    inject_each rename 10 whole_files "${t[@]}" m0 data -o run -f
}
