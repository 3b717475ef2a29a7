# SPDX-License-Identifier: Apache-2.0
# processes.bash -- for tests of processes that mpirun starts as ranks.
# shellcheck shell=bash

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

# needs_mpi: skips a test where processes cannot be ranks
needs_mpi() {
    command -v mpirun > /dev/null || skip "no Open MPI"
    [ -e "$(dirname "$(command -v train)")/../lib/lmutils/libcore-mpi.so" ] || skip "no module of Open MPI"
}

# ranks N COMMAND ...: one that hangs is killed before the time of a test is over
ranks() {
    local n=$1
    shift
    timeout -s KILL 200 mpirun --oversubscribe -n "$n" "$@" < /dev/null
}

# ours TEXT -> the lines of train in what mpirun printed
ours() {
    grep '^train: ' <<< "$1"
}

of_test() { # of_test -> the ranks that this test has started
    for p in $(pgrep -x train); do
        [ "$(readlink "/proc/$p/cwd")" != "$PWD" ] || echo "$p"
    done
}

none_left() {
    [ -z "$(of_test)" ]
}

rank_is() { # rank_is PROCESS N
    tr '\0' '\n' < "/proc/$1/environ" 2> /dev/null | grep -qx "OMPI_COMM_WORLD_RANK=$2"
}

# hit SIGNAL N -> the signal is sent to rank N
hit() {
    for p in $(of_test); do
        if rank_is "$p" "$2"; then
            kill "$1" "$p"
            return
        fi
    done
    return 1
}

# ends_within SECONDS: the job ends so soon, with a failure
ends_within() {
    local gone=0 began=$SECONDS
    wait $job || gone=$?
    cat log
    [ "$gone" -ne 0 ]
    wait_for none_left
    [ $((SECONDS - began)) -le "$1" ]
}
