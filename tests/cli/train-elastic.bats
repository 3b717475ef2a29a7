#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# train --elastic: with fewer ranks a run goes on, with the nearest mesh.
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
    for p in $(of_test); do
        kill -9 "$p" || true
    done
}

LONG=(train --peak-tflops 0 --seq-len 32 --batch-size 1 --lr 1e-3 --lr-schedule constant)

own_rank_is() { # own_rank_is PROCESS N: a rank that train has started itself
    tr '\0' '\n' < "/proc/$1/environ" 2> /dev/null | grep -qx "LM_RANK=$2"
}

# lose N: kill -9 of rank N, of those that run now
lose() {
    for p in $(of_test); do
        if own_rank_is "$p" "$1"; then
            kill -9 "$p"
            return
        fi
    done
    return 1
}

newest() { # newest RUN -> the step of its newest checkpoint
    local name
    name=$(readlink "$1/latest")
    echo $((10#${name#step-}))
}

beyond() { # beyond RUN STEP: it has a later checkpoint
    [ "$(newest "$1")" -gt "$2" ]
}

@test "elastic: with any process killed the others go on, to the bit, until one is left" {
    "${LONG[@]}" m0 data -o run --ranks 4 --elastic --mesh dp=4 --steps 1M --save-every 5 --metrics m.jsonl 2> log &
    job=$!
    wait_for [ -e run/latest/state.json ]
    for victim in 2 0 1; do
        lose $victim
        wait_for grep -q "^train: --elastic: rank $victim of [0-9]*: ended by signal 9 (Killed); .* from run/step-" log
        at=$(newest run) # the lost ranks made records of a few steps behind it
        wait_for beyond run $((at + 10))
    done
    cat log
    kill -TERM $job
    wait $job || true
    wait_for none_left
    grep -q '^train: --elastic: 3 ranks for the mesh dp=4: goes on with dp=2; 1 of 3 rests$' log
    grep -q '^train: --elastic: 2 ranks for the mesh dp=4: goes on with dp=2$' log
    grep -q '^train: --elastic: 1 rank for the mesh dp=4: goes on with dp=1$' log
    [ "$(grep -c 'one goes on\|1 rank goes on from run/step-' log)" -eq 1 ]
    "${LONG[@]}" -q m0 data -o whole --ranks 4 --steps "$(newest run)" --metrics whole.jsonl
    same_bits run whole
    diff <(numbers m.jsonl | sort -u) <(numbers whole.jsonl | sort -u)
    # and with all of them again
    train -q --resume run --ranks 4 --elastic --steps $(($(newest run) + 3))
    "${LONG[@]}" -q m0 data -o again --ranks 4 --steps "$(newest run)"
    same_bits run again
}

@test "elastic: lost before the first checkpoint, they begin again; from memory they go on" {
    "${LONG[@]}" -q m0 data -o old --steps 2
    "${LONG[@]}" m0 data -o old -f --ranks 2 --elastic --steps 1M --save-every 1M --metrics m.jsonl 2> log &
    job=$!
    wait_for [ "$(of_test | wc -w)" -ge 1 ]
    wait_for own_rank_of 1
    lose 1
    wait_for grep -q '1 rank begins again$' log
    wait_for grep -q 'goes on with dp=1$' log
    sleep 1
    kill -TERM $job
    wait $job || true
    wait_for none_left
    cat log
    grep -q '"event":"step","step":1,' m.jsonl
    "${LONG[@]}" m0 data -o run --ranks 2 --elastic --steps 1M --save-every 1M --save-to memory:every=2 2> log &
    job=$!
    wait_for [ -e run/tiers.json ]
    memory=$(python3 -c 'import json; print(json.load(open("run/tiers.json"))["tiers"][0]["folder"])')
    wait_for [ -e "$memory/latest" ]
    lose 1
    wait_for grep -q '1 rank goes on from /dev/shm/' log
    wait_for beyond "$memory" $(($(newest "$memory") + 4))
    kill -TERM $job
    wait $job || true
    wait_for none_left
    [ ! -e "$memory" ]
    "${LONG[@]}" -q m0 data -o whole --ranks 2 --steps "$(newest run)"
    same_bits run whole
}

own_rank_of() {
    for p in $(of_test); do
        ! own_rank_is "$p" "$1" || return 0
    done
    return 1
}

@test "elastic: a resume takes the nearest mesh that the model and the sums of a step can have" {
    "${LONG[@]}" -q m0 data -o run --mesh dp=2,tp=2 --elastic --ranks 4 --steps 2 2> log
    [ ! -s log ]
    goes() { # goes RANKS TEXT
        rm -rf copy
        cp -r run copy
        train --resume copy --steps 3 --ranks "$1" 2> log
        cat log
        grep -q "^train: --elastic: $1 rank.* for the mesh dp=2,tp=2: goes on with $2\$" log
    }
    goes 3 "dp=1,tp=2; 1 of 3 rests"
    goes 2 "dp=1,tp=2"
    goes 1 "dp=1"
    "${LONG[@]}" -q m0 data -o pipe --mesh dp=2,pp=2 --elastic --ranks 4 --steps 2
    train --resume pipe --steps 3 --ranks 3 2> log
    cat log
    grep -q "goes on with dp=1,pp=2; 1 of 3 rests" log
    # the mesh stays that of the run
    train --resume pipe --steps 4 2> log
    run ! grep -q -e --elastic log
    needs_mpi
    rm -rf copy
    cp -r run copy
    ranks 3 train --resume copy --steps 3 2> log
    cat log
    [ "$(grep -c "goes on with dp=1,tp=2; 1 of 3 rests" log)" -eq 1 ]
}

@test "elastic: ranks that share weights go on when one is lost, and resume at fewer and at another level" {
    o=(m0 data --gradient-accumulation-steps 4 --leaves 4 --save-every 5)
    "${LONG[@]}" "${o[@]}" -o run --ranks 4 --elastic --mesh dp=4 --zero 3 --zero-prefetch 2 --steps 1M 2> log &
    job=$!
    wait_for [ -e run/latest/state.json ]
    lose 1
    wait_for grep -q '^train: --elastic: rank 1 of 4: ended by signal 9 (Killed); ' log
    at=$(newest run)
    wait_for beyond run "$at"
    kill -TERM $job
    wait $job || true
    wait_for none_left
    "${LONG[@]}" -q "${o[@]}" -o whole --steps "$(newest run)"
    same_bits run whole
    # with fewer ranks, at a level that gathers nothing ahead
    train -q --resume run --ranks 2 --zero 1 --steps $(($(newest run) + 3))
    train -q --resume whole --steps "$(newest run)"
    same_bits run whole
    run --separate-stderr -2 train -q --resume run --ranks 2 --zero 1 --zero-prefetch 2 --steps 1M
    [[ $stderr == "train: --zero-prefetch: serves ranks that share weights: leave it out, or give --zero 3" ]]
}

@test "elastic: an error ends the run, and nothing outlives the first process" {
    run -2 "${LONG[@]}" m0 data -o run --ranks 2 --elastic --steps 2 --optimizer adamw:nothing=1
    [ "$(wc -l <<< "$output")" -eq 1 ]
    [ ! -e run ]
    run -2 "${LONG[@]}" m0 data --ranks 2 --elastic
    [ "$output" = "train: --output: is missing: name the folder of the run with -o RUN" ]
    "${LONG[@]}" m0 data -o run --ranks 2 --elastic --steps 1M --save-every 5 2> log &
    job=$!
    wait_for [ -e run/latest/state.json ]
    kill -9 $job
    wait $job || true
    wait_for none_left
    train -q --resume run --steps $(($(newest run) + 1))
}
