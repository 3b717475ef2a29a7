#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# train and peft-tune: processes that mpirun has started are ranks: the files of one rank, agreement, faults.
bats_require_minimum_version 1.5.0
load ranks.bash
load processes.bash

setup_file() {
    root=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    export root
    cd "$BATS_FILE_TMPDIR"
    sh "$root/tests/cli/examples/train.sh"
}

setup() {
    needs_mpi
    cd "$BATS_TEST_TMPDIR"
    ln -s "$BATS_FILE_TMPDIR/data" "$BATS_FILE_TMPDIR/m0" .
}

@test "processes: two and four have the files and records of one rank, and say everything once" {
    "${T[@]}" m0 data -o one "${FOUR[@]}" --dropout 0.1 --eval-every 2 --metrics one.jsonl
    for n in 2 4; do
        run -0 ranks $n "${T[@]:0:1}" "${T[@]:2}" m0 data -o "p$n" "${FOUR[@]}" --dropout 0.1 --eval-every 2 \
            --metrics "p$n.jsonl" --mesh dp=$n
        echo "$output"
        [ "$(ours "$output" | grep -c 'saved\|6 steps\|step 6')" -ge 1 ]
        [ "$(ours "$output" | sort | uniq -d | wc -l)" -eq 0 ]
        same_files one "p$n"
        diff <(numbers one.jsonl) <(numbers "p$n.jsonl")
    done
    grep -q '"event":"step".*"comm_exposed_share":0[.]' p4.jsonl
    grep -q '"ranks":4,"leaves":4' p4.jsonl
}

@test "processes: a run of two goes on with four, with threads, and with one" {
    "${T[@]}" m0 data -o whole "${FOUR[@]}"
    ranks 2 "${T[@]}" m0 data -o cut "${FOUR[@]}" --keep 0 --save-every 2
    cp -r cut again
    rm -rf again/step-00000[46] again/latest
    for how in "ranks 4 train" "ranks 2 train" "train --ranks 2" train; do
        rm -rf on
        cp -r again on
        # shellcheck disable=SC2086
        $how -q --resume on
        same_bits on whole || { echo "$how"; false; }
    done
}

@test "processes: plans and lists are printed once, and nothing is written" {
    ranks 2 train m0 data --mesh dp=2 --seq-len 32 --dry-run --json > plan.json
    python3 -c 'import json; assert json.load(open("plan.json"))["ranks"] == 2'
    diff <(ranks 2 train --list-optimizers --json) <(train --list-optimizers --json)
    diff <(ranks 2 train --help) <(train --help)
    [ "$(ls)" = "$(printf 'data\nm0\nplan.json')" ]
}

@test "processes: what they cannot share is refused once, before anything is written" {
    for bad in "--mesh dp=3" "--mesh pp=4" "--ranks 2" "--gradient-accumulation-steps 3 --leaves 3" "--lr nan" \
        "--device cuda" "--val nowhere --eval-every 1"; do
        # shellcheck disable=SC2086
        run ranks 2 "${T[@]}" m0 data -o new $bad
        echo "$bad: $output"
        [ "$status" -ne 0 ]
        [ "$(ours "$output" | wc -l)" -eq 1 ]
        [ ! -e new ]
    done
    run ranks 2 "${T[@]}" - data -o new
    [[ $(ours "$output") == *"standard input cannot be read by each of 2 ranks"* ]]
    run ranks 2 "${T[@]}" m0 data -o new --mesh dp=4
    [[ $(ours "$output") == *"--mesh: it has 4 ranks, and there are 2: give --mesh dp=2"* ]]
    run ranks 2 "${T[@]}" m0 data -o new --ranks 2
    [[ $(ours "$output") == *"--ranks: makes threads of one process, and 2 processes are ranks already: leave it out"* ]]
    run ranks 2 "${T[@]}" m0 data -o new --gradient-accumulation-steps 3 --leaves 3
    [[ $(ours "$output") == *": ranks: 2 ranks do not divide the 3 leaves of the sums of a step: start 1 process" ]]
    run ranks 2 "${T[@]}" m0 data -o new --gradient-accumulation-steps 5
    [[ $(ours "$output") == *"do not divide the 5 micro-batches of a step: give 4, or start 1 process" ]]
    run ranks 2 "${T[@]}" m0 data -o new --dry-run --measure
    [[ $(ours "$output") == *"--measure: "* ]]
    ranks 2 "${T[@]}" m0 data -o run
    run ranks 2 "${T[@]}" m0 data -o run
    [[ $(ours "$output") == *"run"*"-f"* ]]
    [ "$(ours "$output" | wc -l)" -eq 1 ]
}

@test "processes: one that differs from the others is named" {
    cp -r "$BATS_FILE_TMPDIR/data" data2
    python3 - << 'P'
b = bytearray(open("data2/train.bin", "rb").read())
b[0] ^= 1
open("data2/train.bin", "wb").write(b)
P
    cat > other << 'P'
#!/bin/sh
if [ "$OMPI_COMM_WORLD_RANK" = 1 ]; then eval exec $OTHER; fi
exec "$@"
P
    chmod +x other
    check() { # check WORDS: the one line has them
        run ranks 3 ./other "${T[@]}" m0 data -o new "${FOUR[@]/4/3}"
        echo "$output"
        [ "$status" -ne 0 ]
        [ "$(ours "$output" | wc -l)" -eq 1 ]
        [[ $(ours "$output") == *"$1"* ]]
        [ ! -e new ]
    }
    OTHER="${T[*]} m0 data -o new ${FOUR[*]/4/3} --weight-decay 0.5" \
        check "options: rank 1 of 3 on $(hostname) has --weight-decay 0.5; rank 0 has "
    OTHER="${T[*]} m0 data -o new ${FOUR[*]/4/3} --dry-run" check "work: rank 1 of 3 on "
    OTHER="${T[*]} m0 data2 -o new ${FOUR[*]/4/3}" check "options: rank 1 of 3 on "
    OTHER="env LM_CPU=ref ${T[*]} m0 data -o new ${FOUR[*]/4/3}" check "kernels: rank 1 of 3 on "
    OTHER="sh -c 'cd data2/..; mkdir -p sub; cd sub; ln -sfn ../data2 data; ln -sfn ../m0 m0; exec ${T[*]} m0 data -o ../new ${FOUR[*]/4/3}'" \
        check "data: rank 1 of 3 on "
}

# a long run, which is interrupted
LONG=("${T[@]:0:4}" --seq-len 32 --batch-size 1 --lr 1e-3 --lr-schedule constant "${FOUR[@]}" --keep 0)

# steps RUN -> the step of its newest checkpoint
steps() {
    local newest
    newest=$(readlink "$1/latest")
    echo $((10#${newest##*-}))
}

@test "processes: a killed one ends all, is named, and the newest checkpoint resumes to the bit" {
    for victim in 0 1; do
        rm -rf cut whole
        ranks 2 "${LONG[@]}" m0 data -o cut --steps 1M --save-every 5 > log 2>&1 &
        job=$!
        wait_for [ -e cut/latest/state.json ]
        hit -9 $victim
        ends_within 10
        [ "$(grep -c "^train: .*: rank $victim of 2 on .* has ended" log)" -eq 1 ]
        n=$(($(steps cut) + 4))
        "${LONG[@]}" m0 data -o whole --steps $n
        train -q --resume cut --steps $n
        same_bits cut whole
    done
}

@test "processes: a killed one that shares weights ends all, is named, and the newest checkpoint resumes to the bit" {
    for victim in 0 1; do
        rm -rf cut whole
        ranks 2 "${LONG[@]}" m0 data -o cut --steps 1M --save-every 5 --mesh tp=2 > log 2>&1 &
        job=$!
        wait_for [ -e cut/latest/state.json ]
        hit -9 $victim
        ends_within 10
        [ "$(grep -c "^train: .*: rank $victim of 2 on .* has ended" log)" -eq 1 ]
        n=$(($(steps cut) + 4))
        "${LONG[@]}" m0 data -o whole --steps $n --mesh tp=2
        train -q --resume cut --steps $n --mesh tp=2
        same_bits cut whole
    done
}

@test "processes: one that cannot write its part ends all, is named with the file, and whole checkpoints stay" {
    shim=${LM_TEST_BUILD:-build}/tests/inject/inject.so
    if ldd "$(command -v train)" | grep -q libasan; then
        skip "fault injection and AddressSanitizer both want to be malloc"
    fi
    cat > other << 'P'
#!/bin/sh
[ "$OMPI_COMM_WORLD_RANK" != 1 ] || export LM_INJECT=$FAIL LD_PRELOAD="$SHIM"
exec "$@"
P
    chmod +x other
    whole_ones() {
        [ -z "$(find . -name '.*.tmp.*')" ]
        for c in run/step-*; do
            [ ! -e "$c" ] || cmp "$c/optimizer.safetensors" "whole/${c##*/}/optimizer.safetensors"
        done
    }
    export SHIM=$shim LM_INJECT_LOG=$PWD/log
    "${T[@]}" m0 data -o whole "${FOUR[@]}" --keep 0 --save-every 2
    for FAIL in pwrite:{1,3,6} fsync:{1,2,4}; do
        export FAIL
        rm -rf run log
        run ranks 2 ./other "${T[@]}" m0 data -o run "${FOUR[@]}" --keep 0 --save-every 2
        echo "$FAIL: $output"
        if [ "$status" -ne 0 ]; then
            [ "$(ours "$output" | wc -l)" -eq 1 ]
            [[ $(ours "$output") =~ "rank 1 of 2 on "[^:]*": run/step-00000"[246]/[a-z]*.safetensors": cannot " ]]
            parts=1
        fi
        whole_ones
    done
    [ "$parts" = 1 ]
    export LM_INJECT_KILL=1 # the process ends there instead
    for FAIL in pwrite:{2,7} fsync:3; do
        export FAIL
        rm -rf run
        run ! ranks 2 ./other "${T[@]}" m0 data -o run "${FOUR[@]}" --keep 0 --save-every 2
        echo "$FAIL: $output"
        whole_ones
        [ $FAIL = pwrite:2 ] || [ "$(readlink run/latest)" = step-000002 ]
    done
}

@test "processes: one that hangs ends all, and is named" {
    ranks 2 "${LONG[@]}" m0 data -o cut --steps 1M --save-every 50 --keep 2 > log 2>&1 &
    job=$!
    wait_for [ -e cut/latest/state.json ]
    hit -STOP 1
    ends_within 100
    grep -Eq '^train: .*: rank 1 of 2 on .* has not come in [0-9.]+ s [(]process [0-9]+, stopped' log
}

@test "processes: a signal writes a checkpoint, and the run goes on" {
    ranks 2 "${LONG[@]}" m0 data -o cut --steps 1M --save-every 1M --metrics m.jsonl > log 2>&1 &
    job=$!
    wait_for grep -q '"step":5,' m.jsonl
    hit -TERM 1 # one is enough
    wait $job || true
    wait_for none_left
    cat log
    n=$(($(steps cut) + 3))
    "${LONG[@]}" m0 data -o whole --steps $n
    train -q --resume cut --steps $n
    same_bits cut whole
}

@test "processes: adapters have the files of one rank, and resume" {
    printf '{"prompt": "What is %s?", "completion": "It is %s."}\n' one two three four five six seven eight > qa.jsonl
    P=(peft-tune -q --peak-tflops 0 --seq-len 64 --batch-size 1 --no-packing --steps 6 --lr 1e-2 --dtype f32)
    for method in lora adalora prompt pissa qlora full; do
        rm -rf one two three
        set=()
        [ $method != adalora ] || set=(--set tinit=1 --set tfinal=1 --set deltaT=1)
        "${P[@]}" m0 qa.jsonl -o one "${FOUR[@]}" --method $method "${set[@]}"
        ranks 2 "${P[@]}" m0 qa.jsonl -o two "${FOUR[@]}" --method $method "${set[@]}" --mesh dp=2 --save-every 2 --keep 0
        for f in one/latest/*.safetensors; do
            cmp <(tensors "$f") <(tensors "two/latest/${f##*/}") || { echo "$method $f"; false; }
        done
        rm -rf two/step-00000[46] two/latest
        ranks 4 peft-tune -q --resume two
        for f in one/latest/*.safetensors; do
            cmp <(tensors "$f") <(tensors "two/latest/${f##*/}") || { echo "$method $f, resumed"; false; }
        done
    done
    run -2 "${P[@]}" m0 qa.jsonl -o new --mesh dp=2
    [[ $output == "peft-tune: --mesh: it has 2 ranks, and this is one process: start the processes with mpirun -n" ]]
}

@test "processes: a check of the links between them" {
    ranks 2 train --check-links -j 1 >said || [ $? -eq 3 ]
    grep -q '^2 ranks on 1 machine, transport shm$' said
    grep -Eq '^links inside machines: latency [0-9.e+-]+ to [0-9.e+-]+ us, bandwidth ' said
    run ranks 3 train --check-links -j 64
    [ "$status" -eq 3 ]
    [[ $output == *"3 ranks of 64 threads each share "*"--bind-to core"* ]]
    ranks 3 train --check-links --json -j 1 >said || [ $? -eq 3 ]
    [ "$(grep -o '"latency"' said | wc -l)" -eq 3 ]
    grep -q '"trouble":\[' said
    ranks 2 bash -c 'ulimit -n 66 && exec train --check-links -j 1' > said || [ $? -eq 3 ]
    [ "$(grep -Ec '^rank [01] \(.*\) may have 66 files open, fewer than 68: raise it: ulimit -n$' said)" -eq 2 ]
    run -2 train --check-links m0
    [ "$output" = "train: m0: --check-links has no operands: leave it out" ]
    run -2 train --check-links --steps 3
    [ "$output" = "train: --steps: belongs to a run, and --check-links starts none: leave it out" ]
    run -2 train --check-links
    [ "$output" = "train: --check-links: one process has no links: start several with mpirun -n" ]
}
