#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# eval-model --mesh tp=N: processes that mpirun has started share the weights: the result of one, once; refusals, faults.
bats_require_minimum_version 1.5.0
load processes.bash

setup_file() {
    root=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    export root
    cd "$BATS_FILE_TMPDIR"
    sh "$root/tests/cli/examples/train.sh"
    for p in llama-5m gpt2-5m qwen3-next-12m; do init-model -q $p -t tok/tokenizer.json -o $p; done
}

setup() {
    needs_mpi
    cd "$BATS_FILE_TMPDIR"
}

loss() { grep -o '"loss":[0-9.]*' | cut -d: -f2; }

@test "eval-model: processes that share weights have the loss of one, and say it once" {
    for m in llama-5m gpt2-5m qwen3-next-12m; do
        for type in f32 bf16; do
            o=(eval-model $m data/val --seq-len 64 --batch-size 4 --dtype $type)
            one=$("${o[@]}" | loss)
            ranks 2 "${o[@]}" --mesh tp=2 >two
            [ "$(grep -c . two)" -eq 1 ]
            awk -v a="$one" -v b="$(loss <two)" -v far=$([ $type = f32 ] && echo 1e-6 || echo 1e-3) \
                'BEGIN { d = a - b; exit !(d <= far * a && -d <= far * a) }' || { echo "$m $type $one"; cat two; false; }
        done
    done
    ranks 4 "${o[@]/qwen3-next-12m/llama-5m}" --mesh tp=4 -o four.json -f
    grep -q '"loss"' four.json
}

@test "eval-model: processes have one verdict, and its status" {
    run --separate-stderr ranks 2 eval-model llama-5m data/val --seq-len 64 --mesh tp=2 --max-loss 1
    [ "$status" -eq 3 ]
    [ "$(grep -c '"loss"' <<<"$output")" -eq 1 ]
}

@test "eval-model: what processes cannot share is refused once" {
    refused() { # refused N WORDS ARGUMENT ...
        run ranks "$1" eval-model "${@:3}"
        [ "$status" -ne 0 ]
        [ "$(grep -c '^eval-model: ' <<<"$output")" -eq 1 ]
        [[ $output == *"eval-model: $2"* ]] || { echo "$output"; false; }
    }
    refused 2 "--mesh: 2 processes, of which each would do the whole work: give the number of the processes as tp=N" \
        llama-5m data/val
    refused 3 "--mesh: tp=3 does not divide 4 heads: choose tp=2 or tp=4" llama-5m data/val --mesh tp=3
    refused 2 "--mesh: processes share the weights (tp) only: give --mesh tp=N" llama-5m data/val --mesh dp=2
    refused 2 "--adapter: processes share the weights of whole models only" llama-5m data/val --mesh tp=2 --adapter none
    run --separate-stderr -2 eval-model llama-5m data/val --mesh tp=2
    [ "$stderr" = "eval-model: --mesh: it has 2 ranks, and this is one process: start the processes with mpirun -n" ]
}

@test "eval-model: one process that cannot read the model ends all" {
    cat >other <<'P'
#!/bin/sh
[ "$OMPI_COMM_WORLD_RANK" != 1 ] || cd /
exec "$@"
P
    chmod +x other
    run ranks 2 ./other eval-model llama-5m data/val --mesh tp=2
    [ "$status" -ne 0 ]
    [ "$(grep -c '^eval-model: ' <<<"$output")" -eq 1 ]
    [[ $output == *"rank 1 of 2 on "* ]] || { echo "$output"; false; }
}
