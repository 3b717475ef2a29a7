#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# train --save-to: checkpoints at several places, of which the newest resumes.
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
    cd "$BATS_TEST_TMPDIR"
    ln -s "$BATS_FILE_TMPDIR/data" "$BATS_FILE_TMPDIR/m0" .
}

teardown() {
    forget_memory
}

# memory_of RUN -> the folder in shared memory of a run that was killed
memory_of() {
    local path
    path=$(realpath "$1")
    for f in /dev/shm/lmutils-"$(id -u)"/*/tier.json; do
        ! grep -qF "\"$path\"" "$f" || dirname "$f"
    done
}

forget_memory() {
    for r in */tiers.json; do
        [ ! -e "$r" ] || rm -rf "$(memory_of "${r%/*}")"
    done
}

checkpoints() { # checkpoints FOLDER -> their names
    (cd "$1" && echo step-*)
}

# killed RUN OPTIONS ...: a run that is killed when it has a checkpoint in memory
killed() {
    local r=$1
    shift
    "${LONG[@]}" m0 data -o "$r" --steps 1M --save-every 1M "$@" > log 2>&1 &
    job=$!
    wait_for [ -e "$r/tiers.json" ]
    wait_for [ -e "$(memory_of "$r")/latest" ]
    kill -9 $job
    wait $job || true
}

LONG=("${T[@]:0:4}" --seq-len 32 --batch-size 1 --lr 1e-3 --lr-schedule constant)

@test "tiers: each place has its own interval and number, and what is in memory goes with a run that ends well" {
    "${T[@]}" m0 data -o run --steps 12 --save-every 6 --save-to fast:every=2,keep=2 \
        --save-to memory:every=1 --metrics m.jsonl
    [ "$(checkpoints run)" = "step-000006 step-000012" ]
    [ "$(checkpoints fast)" = "step-000010 step-000012" ]
    [ "$(readlink fast/latest)" = step-000012 ]
    cmp run/step-000012/model.safetensors fast/step-000012/model.safetensors
    cmp run/step-000012/optimizer.safetensors fast/step-000012/optimizer.safetensors
    [ -z "$(memory_of run)" ]
    [ "$(grep -c '"event":"checkpoint".*/dev/shm/' m.jsonl)" -eq 12 ]
    [ "$(grep -c '"event":"checkpoint".*/fast/' m.jsonl)" -eq 6 ]
    "${T[@]}" m0 data -o plain --steps 12
    same_bits run plain
}

@test "tiers: a resume takes the newest of all places, also where the run is moved to another folder of work" {
    "${T[@]}" --lr-schedule constant m0 data -o run --steps 12 --save-every 100 --save-to fast:every=4,keep=2
    "${T[@]}" --lr-schedule constant m0 data -o plain --steps 16
    rm -r run/step-000012
    ln -sfn step-000000 run/latest
    mkdir elsewhere
    cd elsewhere
    train -q --resume ../run --steps 16 --dry-run --json > plan.json
    train -q --resume ../run --steps 16 --metrics m.jsonl
    grep -q '"event":"step","step":13,' m.jsonl
    run ! grep -q '"event":"step","step":12,' m.jsonl
    cd ..
    same_bits run plain
    [ "$(checkpoints run)" = step-000016 ]
    [ "$(checkpoints fast)" = "step-000012 step-000016" ]
    [ ! -e elsewhere/fast ]
    # a place stands for its run
    train -q --resume fast --steps 18
    [ "$(readlink run/latest)" = step-000018 ]
    run -2 train -q --resume fast/step-000012 --steps 20
    [[ $output == *"run has gone further (step-000018)"* ]] || [[ $output == *"run has gone further (step-000016)"* ]]
    # a place that is gone is left out
    rm -r fast run/step-000018
    ln -sfn step-000016 run/latest
    train -q --resume run --steps 20
    [ "$(checkpoints run)" = "step-000016 step-000020" ]
}

@test "tiers: another run is not replaced without force, and with force never resumes" {
    "${T[@]}" m0 data -o one --steps 4 --save-to fast:every=2
    run -2 "${T[@]}" m0 data -o two --steps 4 --save-to fast:every=2
    [[ $output == *"fast: holds checkpoints of the run in "*"/one: "* ]]
    [ ! -e two ]
    "${T[@]}" m0 data -o two --steps 2 --save-to fast:every=2 -f
    [ "$(checkpoints fast)" = step-000002 ]
    # what the first run had there is not of it any longer
    train -q --resume one --steps 6 --save-to other
    [ "$(readlink one/latest)" = step-000006 ]
    run -2 "${T[@]}" m0 data -o two --steps 4 --save-to two:every=2 -f
    [[ $output == *"is the folder of the run itself"* ]]
}

@test "tiers: what cannot be meant is refused" {
    refused() { # refused TEXT OPTIONS ...
        local text=$1
        shift
        run -2 "${T[@]}" m0 data -o run "$@"
        [[ $output == "train: --save-to"*"$text"* ]]
        [ "$(wc -l <<< "$output")" -eq 1 ]
        [ ! -e run ]
    }
    refused "every=soon is neither: give steps (every=100) or a time" --save-to fast:every=soon
    refused "every=0 is neither" --save-to fast:every=0
    refused 'has no key "size"' --save-to fast:every=2,size=3
    refused "would fill it with all checkpoints" --save-to memory:every=2,keep=0
    refused "is given twice" --save-to memory --save-to memory:every=2
    refused "is given twice" --save-to a --save-to a:keep=2
    run -2 "${T[@]}" m0 data -o run --save-to a --save-to ./a
    [[ $output == *"/./a: is given twice"* ]]
    refused "names no folder" --save-to :every=2
    train m0 data --dry-run --json > without.json
    train m0 data --dry-run --json --save-to memory:every=2,keep=2 > with.json
    python3 -c '
import json
a, b = (json.load(open(f + ".json")) for f in ("without", "with"))
n = b["memory"]["checkpoints in memory"]
assert n == 3 * b["checkpoint_bytes"]
assert b["memory_total"] == a["memory_total"] + n'
    unshare -m true || skip "no mount namespaces"
    run -1 unshare -m sh -c 'mount -t tmpfs -o size=2m none /dev/shm && exec "$@"' sh \
        "${T[@]}" m0 data -o run --save-to memory:every=1,keep=2
    [[ $output == *"of shared memory, "*" are free: keep fewer there"* ]]
    [ ! -e run/step-000001 ]
}

@test "tiers: memory outlives processes that are killed" {
    for how in one threads; do
        rm -rf run
        n=(--save-to memory:every=3)
        [ $how = one ] || n+=(--ranks 2)
        killed run --gradient-accumulation-steps 2 --leaves 2 "${n[@]}"
        last=$(readlink "$(memory_of run)/latest")
        steps=$((10#${last#step-} + 4))
        [ -z "$(ls run | grep step-)" ]
        train -q --resume run --steps $steps
        [ "$(readlink run/latest)" = "$(printf step-%06d $steps)" ]
        rm -rf whole
        "${LONG[@]}" --gradient-accumulation-steps 2 --leaves 2 m0 data -o whole --steps $steps
        same_bits run whole
        [ -z "$(memory_of run)" ]
    done
    # memory of runs that are gone is given back by the next one that uses it
    killed gone --save-to memory:every=1
    left=$(memory_of gone)
    rm -r gone
    [ -e "$left/latest" ]
    "${T[@]}" m0 data -o next --steps 2 --save-to memory:every=1
    [ ! -e "$left" ]
}

# begins_after RUN STEP: a resumed training that goes on behind this step
begins_after() {
    train -q --resume "$1" --steps $(($2 + 2)) --metrics m.jsonl
    [ "$(grep -o '"event":"step","step":[0-9]*' m.jsonl | head -n 1)" = "\"event\":\"step\",\"step\":$(($2 + 1))" ]
    rm m.jsonl
}

newest_of() { # newest_of FOLDER -> its step; a killed run may have a newer one than `latest` names
    local all=("$1"/step-*)
    echo $((10#${all[-1]##*/step-}))
}

@test "tiers: memory goes with a run that is moved, not with a copy, and is given back when the run is removed" {
    killed run --save-to memory:every=3
    memory=$(memory_of run) step=$(newest_of "$(memory_of run)")
    mv run moved
    begins_after moved "$step"
    [ ! -e "$memory" ]
    rm -r moved

    killed run --save-every 2 --save-to memory:every=5
    memory=$(memory_of run) step=$(newest_of "$(memory_of run)")
    cp -a run copy
    begins_after copy "$(newest_of copy)"
    begins_after run "$(($(newest_of run) > step ? $(newest_of run) : step))"
    [ ! -e "$memory" ]

    # the same command after `rm -r run`
    rm -r run
    killed run --save-to memory:every=3
    rm -r run
    "${T[@]}" m0 data -o run --steps 2 --save-to memory:every=1
    [ -z "$(memory_of run)" ]
}

@test "tiers: with other places a resumed run keeps its former ones until it has a newer checkpoint" {
    killed run --save-to memory:every=3
    memory=$(memory_of run) step=$(newest_of "$(memory_of run)")
    "${LONG[@]}" --resume run --steps 1M --save-to other > log 2>&1 &
    job=$!
    wait_for grep -q other run/tiers.json
    kill -9 $job
    wait $job || true
    [ -e "$memory/latest" ]
    begins_after run "$step"
    [ ! -e "$memory" ]
    # a run that has checkpoints only there is not replaced without force
    killed young --save-to memory:every=3
    memory=$(memory_of young)
    run -2 "${T[@]}" m0 data -o young --steps 2
    [[ $output == "train: young: holds a run already ($memory/step-"*"): go on from there with train --resume young, "* ]]
    [ "$(wc -l <<< "$output")" -eq 1 ]
    "${T[@]}" m0 data -o young --steps 2 -f
    [ ! -e "$memory" ]
    # of what is refused nothing is left
    run -1 "${T[@]}" m0 data -o new --save-to okay --save-to /proc/none
    [ ! -e new ]
    [ ! -e okay ]
}

@test "tiers: with any one process killed, memory resumes to the bit, with any mesh" {
    needs_mpi
    for victim in 0 1; do
        rm -rf run
        mesh=tp=2
        [ $victim = 0 ] || mesh=dp=2
        ranks 2 "${LONG[@]}" "${FOUR[@]}" m0 data -o run --steps 1M --save-every 1M --mesh $mesh \
            --save-to memory:every=3 --save-to fast:every=7,keep=1 > log 2>&1 &
        job=$!
        wait_for [ -e run/tiers.json ]
        wait_for [ -e "$(memory_of run)/latest" ]
        wait_for [ -e fast/latest ]
        hit -9 $victim
        ends_within 10
        [ "$(grep -c "^train: .*: rank $victim of 2 on .* has ended" log)" -eq 1 ]
        [ -z "$(ls run | grep step-)" ]
        last=$(for f in "$(memory_of run)" fast; do readlink "$f/latest"; done | sort | tail -n 1)
        steps=$((10#${last#step-} + 2))
        if [ $mesh = dp=2 ]; then
            train -q --resume run --steps $steps --ranks 2
            "${LONG[@]}" "${FOUR[@]}" m0 data -o whole --steps $steps
            same_bits run whole
        else
            train -q --resume run --steps $steps --metrics m.jsonl
            grep -q "\"event\":\"step\",\"step\":$((steps - 1))," m.jsonl
            run ! grep -q "\"event\":\"step\",\"step\":$((steps - 2))," m.jsonl
        fi
        [ -z "$(memory_of run)" ]
        rm -rf fast
    done
}
