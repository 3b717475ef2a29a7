# SPDX-License-Identifier: Apache-2.0
# ranks.bash -- for tests of ranks: what they must leave, whatever their number.
# shellcheck shell=bash

T=(train -q --peak-tflops 0 --seq-len 32 --batch-size 1 --lr 3e-3 --warmup 2 --steps 6)
# the steps of four ranks, for any number of them
FOUR=(--gradient-accumulation-steps 4 --leaves 4)
export T FOUR

# tensors FILE -> the data of a safetensors file, without the header and its history
tensors() {
    tail -c +$((9 + $(od -An -t u8 -N 8 "$1"))) "$1"
}

# same_bits RUN RUN: whatever their histories are
same_bits() {
    cmp <(tensors "$1/latest/model.safetensors") <(tensors "$2/latest/model.safetensors") &&
        cmp "$1/latest/optimizer.safetensors" "$2/latest/optimizer.safetensors"
}

# same_files RUN RUN
same_files() {
    cmp "$1/latest/model.safetensors" "$2/latest/model.safetensors" &&
        cmp "$1/latest/optimizer.safetensors" "$2/latest/optimizer.safetensors"
}

# numbers FILE -> the records of steps, experts and evaluations, without times
numbers() {
    grep -E '"event":"(step|experts|eval)"' "$1" |
        sed -E 's/"(seconds|tokens_per_second|comm_exposed_share|comm_bytes_[a-z]*|memory_bytes|mfu|mfu_attended|time)":[^,}]*,?//g'
}

# wait_for COMMAND ...: until it succeeds, two minutes at most
wait_for() {
    for ((i = 0; i < 6000; i++)); do
        "$@" && return
        sleep 0.02
    done
    echo "waited in vain for $*"
    return 1
}

# losses FILE -> of training and validation
losses() {
    grep -E '"event":"(step|eval)"' "$1" | grep -oE '"(loss|val_loss)":[0-9.]+' | cut -d: -f2
}

# close A B N: the losses of two files of records, to 1e-6 of them; there are N at least
close() {
    paste <(losses "$1") <(losses "$2") |
        awk -v least="$3" '{ d = $1 - $2; n++; if (NF != 2 || d > 1e-6 * $1 || -d > 1e-6 * $1) { print; bad = 1 } } END { exit bad || n < least }'
}
