#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# train: processes that mpirun has started are ranks: the files of one rank, agreement, faults.
bats_require_minimum_version 1.5.0

setup_file() {
    root=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    export root
    cd "$BATS_FILE_TMPDIR"
    sh "$root/tests/cli/examples/train.sh"
}

setup() {
    command -v mpirun > /dev/null || skip "no Open MPI"
    [ -e "$(dirname "$(command -v train)")/../lib/lmutils/libcore-mpi.so" ] || skip "no module of Open MPI"
    cd "$BATS_TEST_TMPDIR"
    ln -s "$BATS_FILE_TMPDIR/data" "$BATS_FILE_TMPDIR/m0" .
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
}

T=(train -q --peak-tflops 0 --seq-len 32 --batch-size 1 --lr 3e-3 --warmup 2 --steps 6)
FOUR=(--gradient-accumulation-steps 4 --leaves 4)

# ranks N COMMAND ...
ranks() {
    local n=$1
    shift
    mpirun --oversubscribe -n "$n" "$@" < /dev/null
}

same_files() { # same_files RUN RUN
    for f in model.safetensors optimizer.safetensors; do
        cmp "$1/latest/$f" "$2/latest/$f" || return 1
    done
}

# numbers FILE -> the records of steps and evaluations, without times
numbers() {
    grep -E '"event":"(step|eval)"' "$1" |
        sed -E 's/"(seconds|tokens_per_second|comm_exposed_share|memory_bytes|mfu|mfu_attended|time)":[^,}]*,?//g'
}

# ours TEXT -> the lines of train in what mpirun printed
ours() {
    grep '^train: ' <<< "$1"
}

wait_for() { # wait_for COMMAND ...: until it succeeds, two minutes at most
    for ((i = 0; i < 6000; i++)); do
        "$@" && return
        sleep 0.02
    done
    echo "waited in vain for $*"
    return 1
}

of_run() { # of_run RUN -> its processes
    pgrep -f "^train .* -o $1( |\$)"
}

none_of() { # none_of RUN
    ! of_run "$1"
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
        cmp on/latest/optimizer.safetensors whole/latest/optimizer.safetensors || { echo "$how"; false; }
    done
}

@test "processes: plans and lists are printed once, and nothing is written" {
    ranks 2 train m0 data --mesh dp=2 --seq-len 32 --dry-run --json > plan.json
    python3 -c 'import json; assert json.load(open("plan.json"))["ranks"] == 2'
    diff <(ranks 2 train --list-optimizers --json) <(train --list-optimizers --json)
    [ "$(ls)" = "$(printf 'data\nm0\nplan.json')" ]
}

@test "processes: what they cannot share is refused once, before anything is written" {
    for bad in "--mesh dp=3" "--mesh tp=2" "--ranks 2" "--gradient-accumulation-steps 3 --leaves 3" "--lr nan" \
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
    mkdir taken
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
    OTHER="${T[*]} m0 data2 -o new ${FOUR[*]/4/3}" check "options: rank 1 of 3 on "
    OTHER="env LM_CPU=ref ${T[*]} m0 data -o new ${FOUR[*]/4/3}" check "kernels: rank 1 of 3 on "
    OTHER="sh -c 'cd data2/..; mkdir -p sub; cd sub; ln -sfn ../data2 data; ln -sfn ../m0 m0; exec ${T[*]} m0 data -o ../new ${FOUR[*]/4/3}'" \
        check "data: rank 1 of 3 on "
}

@test "processes: a killed one ends all, is named, and the newest checkpoint resumes to the bit" {
    "${T[@]}" m0 data -o whole "${FOUR[@]}" --steps 40
    for victim in 0 1; do
        rm -rf cut
        ranks 2 "${T[@]}" m0 data -o cut "${FOUR[@]}" --steps 40 --save-every 5 > log 2>&1 &
        job=$!
        wait_for [ -e cut/step-000010/state.json ]
        for p in $(of_run cut); do
            if tr '\0' '\n' < "/proc/$p/environ" | grep -q "^OMPI_COMM_WORLD_RANK=$victim\$"; then
                began=$SECONDS
                kill -9 "$p"
            fi
        done
        gone=0
        wait $job || gone=$?
        cat log
        [ "$gone" -ne 0 ]
        wait_for none_of cut
        [ $((SECONDS - began)) -le 10 ]
        [ "$(grep -c "^train: .*: rank $victim of 2 on .* has ended" log)" -eq 1 ]
        train -q --resume cut
        same_files cut whole || cmp cut/latest/optimizer.safetensors whole/latest/optimizer.safetensors
    done
}

@test "processes: one that hangs ends all, and is named" {
    ranks 2 "${T[@]}" m0 data -o cut "${FOUR[@]}" --steps 400000 --save-every 500 --keep 2 > log 2>&1 &
    job=$!
    wait_for [ -e cut/latest/state.json ]
    for p in $(of_run cut); do
        if tr '\0' '\n' < "/proc/$p/environ" | grep -q '^OMPI_COMM_WORLD_RANK=1$'; then kill -STOP "$p"; fi
    done
    began=$SECONDS
    gone=0
    wait $job || gone=$?
    cat log
    [ "$gone" -ne 0 ]
    wait_for none_of cut
    [ $((SECONDS - began)) -le 60 ]
    grep -q '^train: .*: rank 1 of 2 on .* has not come in 3.* stopped' log
}

@test "processes: a signal to mpirun writes a checkpoint, and the run goes on" {
    "${T[@]}" m0 data -o whole "${FOUR[@]}" --steps 40
    ranks 2 "${T[@]}" m0 data -o cut "${FOUR[@]}" --steps 40 --save-every 1000 > log 2>&1 &
    job=$!
    wait_for of_run cut > /dev/null
    sleep 1
    for p in $(of_run cut); do kill -TERM "$p"; done
    wait $job || true
    cat log
    [ -e cut/latest/state.json ]
    train -q --resume cut
    cmp cut/latest/optimizer.safetensors whole/latest/optimizer.safetensors
}
