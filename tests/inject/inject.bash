# SPDX-License-Identifier: Apache-2.0
# inject.bash -- for CLI tests: run a command repeatedly, each time with another failing call.
# shellcheck shell=bash
#
#   load ../inject/inject
#   inject_each write 50 my_check train-tokenizer -f -o out.json corpus.jsonl
#
# For n = 1, 2, ... the n-th call of the kind (malloc, write, fsync, rename, mmap) fails, until the
# command makes fewer than n of them, or n reaches the limit; KIND/STEP: for n = 1, 1 + STEP, ...  Each time
# it must exit (not by a signal) with one line on standard error and status 1, or handle the failure
# (status 0); it must leave no temporary
# file; and the check, a function that gets the status as $1, must succeed ("true" for no check).

# fast_clock FACTOR COMMAND ...: run a command whose monotonic clock runs FACTOR times as fast
fast_clock() {
    local factor=$1 shim=${LM_TEST_BUILD:-build}/tests/inject/inject.so
    shift
    if ldd "$(command -v "$1")" | grep -q libasan; then
        skip "fault injection and AddressSanitizer both want to be malloc"
    fi
    LM_INJECT_CLOCK=$factor LD_PRELOAD=$shim "$@"
}

inject_each() {
    local kind=${1%/*} step=1 limit=$2 check=$3 n status fired=0
    local shim=${LM_TEST_BUILD:-build}/tests/inject/inject.so
    [[ $1 != */* ]] || step=${1#*/}
    shift 3
    if ldd "$(command -v "$1")" | grep -q libasan; then
        skip "fault injection and AddressSanitizer both want to be malloc"
    fi
    for ((n = 1; n <= limit; n += step)); do
        rm -f "$BATS_TEST_TMPDIR/inject.log"
        status=0
        LM_INJECT=$kind:$n LM_INJECT_LOG=$BATS_TEST_TMPDIR/inject.log LD_PRELOAD=$shim \
            "$@" > "$BATS_TEST_TMPDIR/inject.out" 2> "$BATS_TEST_TMPDIR/inject.err" || status=$?
        [[ -s $BATS_TEST_TMPDIR/inject.log ]] || break
        fired=$((fired + 1))
        if [[ $status -ne 0 && $status -ne 1 ]]; then
            echo "$kind $n: status $status: $(cat "$BATS_TEST_TMPDIR/inject.err")"
            return 1
        fi
        if [[ $status -eq 1 && $(wc -l < "$BATS_TEST_TMPDIR/inject.err") -ne 1 ]]; then
            echo "$kind $n: failed without one line: $(cat "$BATS_TEST_TMPDIR/inject.err")"
            return 1
        fi
        if find "$BATS_TEST_TMPDIR" -name '.*.tmp.*' | grep .; then
            echo "$kind $n: a temporary is left"
            return 1
        fi
        "$check" "$status" || {
            echo "$kind $n: the check does not agree after status $status"
            return 1
        }
    done
    if [[ $fired -eq 0 ]]; then
        echo "$kind: the command made no such call"
        return 1
    fi
}

# kill_each KIND LIMIT CHECK COMMAND ...: the same, but the process is killed at the n-th call, and the check
# inspects the remaining files.
kill_each() {
    local kind=$1 limit=$2 check=$3 n status
    local shim=${LM_TEST_BUILD:-build}/tests/inject/inject.so
    shift 3
    if ldd "$(command -v "$1")" | grep -q libasan; then
        skip "fault injection and AddressSanitizer both want to be malloc"
    fi
    for ((n = 1; n <= limit; n++)); do
        status=0
        LM_INJECT=$kind:$n LM_INJECT_KILL=1 LD_PRELOAD=$shim "$@" > /dev/null 2> "$BATS_TEST_TMPDIR/inject.err" ||
            status=$?
        if [[ $status -ne 0 && $status -ne 137 ]]; then
            echo "$kind $n: status $status: $(cat "$BATS_TEST_TMPDIR/inject.err")"
            return 1
        fi
        "$check" "$status" || {
            echo "$kind $n: the check does not agree after status $status"
            return 1
        }
        [[ $status -eq 137 ]] || return 0
    done
    echo "$kind: more than $limit calls"
    return 1
}
