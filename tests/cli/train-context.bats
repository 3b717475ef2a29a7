#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# train --mesh cp=N: ranks share the positions of each window; losses of one rank, files that any mesh resumes, refusals.
bats_require_minimum_version 1.5.0
load ranks.bash

setup_file() {
    root=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    export root
    cd "$BATS_FILE_TMPDIR"
    sh "$root/tests/cli/examples/train.sh"
    small=(--set hidden_size=32 --set num_hidden_layers=2 --set num_attention_heads=4 --set num_key_value_heads=4)
    init-model -q llama-5m -t tok/tokenizer.json "${small[@]}" --set intermediate_size=48 -o llama
    init-model -q llama-5m -t tok/tokenizer.json "${small[@]}" --set num_key_value_heads=1 --set intermediate_size=48 -o few
}

setup() {
    cd "$BATS_TEST_TMPDIR"
    for f in data llama few; do ln -s "$BATS_FILE_TMPDIR/$f" .; done
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    SGD=(train -q --peak-tflops 0 llama data --seq-len 32 --batch-size 1 --lr 0.05 --optimizer sgd:momentum=0.9)
}

@test "train: ranks along cp have the losses of one after 20 steps" {
    for n in 1 3; do # windows of a micro-batch, which ranks do not divide
        rm -rf one two ./*.jsonl
        "${SGD[@]}" -o one --metrics one.jsonl --steps 20 --eval-every 10 --batch-size $n
        "${SGD[@]}" -o two --metrics two.jsonl --steps 20 --eval-every 10 --batch-size $n --mesh cp=2
        close one.jsonl two.jsonl 22
    done
    grep -q '"ranks":2,"ranks_cp":2' two.jsonl
    grep -Eq '"event":"step".*"comm_bytes_cp":[1-9]' two.jsonl
}

@test "train: every kind of layer along cp" {
    for p in gpt2-5m bloom-12m deepseek-v3-12m gpt-oss-12m qwen3-next-12m qwen3-moe-13m hybrid-5m retention-5m gemma3-5m olmo2-5m gaussian-5m; do
        rm -rf m one two ./*.jsonl
        init-model -q $p -t "$BATS_FILE_TMPDIR/tok/tokenizer.json" -o m
        o=(train -q --peak-tflops 0 m data --seq-len 32 --batch-size 1 --steps 2 --optimizer sgd --lr 0.01 --dropout 0.1)
        [ $p = gpt2-5m ] || o=("${o[@]:0:${#o[@]}-2}")
        "${o[@]}" -o one --metrics one.jsonl
        "${o[@]}" -o two --metrics two.jsonl --mesh cp=2
        close one.jsonl two.jsonl 2 || { echo $p; false; }
        rm -rf two ring.jsonl
        "${o[@]}" -o two --metrics ring.jsonl --mesh cp=4 --cp ring
        close one.jsonl ring.jsonl 2 || { echo $p around a ring; false; }
        rm -rf two ring.jsonl
        "${o[@]}" -o two --metrics ring.jsonl --mesh cp=2 --cp zigzag
        close one.jsonl ring.jsonl 2 || { echo $p from both ends; false; }
    done
}

@test "train: blocks around a ring have the losses of one rank after 20 steps" {
    "${SGD[@]}" -o one --metrics one.jsonl --steps 20 --eval-every 10 --batch-size 3
    "${SGD[@]}" -o two --metrics two.jsonl --steps 20 --eval-every 10 --batch-size 3 --mesh cp=4 --cp ring
    close one.jsonl two.jsonl 22
    rm -rf two two.jsonl
    "${SGD[@]}" -o two --metrics two.jsonl --steps 20 --eval-every 10 --batch-size 3 --mesh cp=4 --cp zigzag
    close one.jsonl two.jsonl 22
    o=("${SGD[@]}" --steps 4 --grad-accum-steps 2 --leaves 2)
    "${o[@]}" -o short --metrics short.jsonl
    for mesh in dp=2,cp=2 pp=2,cp=2 tp=2,cp=2; do
        rm -rf four four.jsonl
        "${o[@]}" -o four --metrics four.jsonl --mesh $mesh --cp ring
        close short.jsonl four.jsonl 4 || { echo "$mesh"; false; }
        rm -rf four four.jsonl
        "${o[@]}" -o four --metrics four.jsonl --mesh $mesh --cp zigzag
        close short.jsonl four.jsonl 4 || { echo "$mesh from both ends"; false; }
    done
    command -v mpirun >/dev/null || skip "mpirun is not installed"
    mpirun -n 4 --oversubscribe "${o[@]}" -o processes --mesh tp=2,cp=2 --cp zigzag
    same_bits four processes
}

@test "train: cp beside dp and tp, for threads and for processes" {
    o=("${SGD[@]}" --steps 4 --grad-accum-steps 2 --leaves 2)
    "${o[@]}" -o one --metrics one.jsonl
    for mesh in dp=2,cp=2 pp=2,cp=2 tp=2,cp=2; do
        rm -rf four four.jsonl
        "${o[@]}" -o four --metrics four.jsonl --mesh $mesh
        close one.jsonl four.jsonl 4 || { echo "$mesh"; false; }
    done
    "${o[@]}" -o two --mesh cp=2
    "${o[@]}" -o dp --mesh dp=2,cp=2
    same_bits two dp
    command -v mpirun >/dev/null || skip "mpirun is not installed"
    mpirun -n 4 --oversubscribe "${o[@]}" -o processes --mesh tp=2,cp=2
    same_bits four processes
}

@test "train: a run along cp that stopped goes on with its bits, and on any other mesh" {
    o=("${SGD[@]}" --steps 6 --grad-accum-steps 2 --leaves 2 --mesh cp=2)
    "${o[@]}" -o whole --metrics whole.jsonl
    "${o[@]}" -o part --save-every 3
    rm -rf part/step-000006
    for mesh in cp=2 cp=4 "cp=4 --cp ring" dp=2,cp=2 tp=2 dp=1; do
        rm -rf more more.jsonl
        cp -r part more
        # shellcheck disable=SC2086 # a mesh and its option
        train -q --resume more --mesh $mesh --metrics more.jsonl
        paste <(losses whole.jsonl | tail -3) <(losses more.jsonl | tail -3) |
            awk '{ d = $1 - $2; if (d > 1e-6 * $1 || -d > 1e-6 * $1) { print; exit 1 } }' || { echo "$mesh"; false; }
        [ "$mesh" != cp=2 ] || same_bits whole more
    done
}

@test "train: plans along cp, and what cannot be" {
    o=(llama data --seq-len 32 --batch-size 1 --steps 2 --mesh cp=2)
    train -q --peak-tflops 0 "${o[@]}" -o run --metrics m.jsonl
    train "${o[@]}" --dry-run --json > plan.json
    said() { grep -o "\"comm_bytes_cp\": *[0-9]*" "$1" | head -1 | tr -d -c 0-9; }
    [ "$(said m.jsonl)" -eq "$(said plan.json)" ]
    train -q --peak-tflops 0 "${o[@]}" --cp ring -o ring --metrics ring.jsonl
    train "${o[@]}" --cp ring --dry-run --json > ring.json
    [ "$(said ring.jsonl)" -eq "$(said ring.json)" ]
    # one head of keys, which all ranks have
    o[0]=few
    train -q --peak-tflops 0 "${o[@]}" -o few-run --metrics few.jsonl
    train "${o[@]}" --dry-run --json > few.json
    [ "$(said few.jsonl)" -eq "$(said few.json)" ]
    train "${o[@]}" --dump-graph > list
    run ! grep -E 'all_gather.*\[32,' list
    # work of causal attention: more on the last of ranks, or as much on each
    kinds() { train --dry-run llama-5m --seq-len 1024 --batch-size 1 --mesh cp=2 --json "$@" | jq '.each_rank | length'; }
    [ "$(kinds --cp ring)" -eq 2 ]
    [ "$(kinds --cp zigzag)" -eq 1 ]
    # activations of long windows are shared out
    local preset=llama-5m
    room() { train --dry-run "$preset" --seq-len 1024 --batch-size 1 --json "$@" | grep -o '"activations and scratch": [0-9]*' | head -1 | tr -d -c 0-9; }
    [ $(($(room --mesh cp=2) * 10)) -lt $(($(room) * 13)) ]
    preset=gpt2-5m # with dropout between its layers
    [ $(($(room --mesh cp=2 --dropout 0.1) * 10)) -lt $(($(room --dropout 0.1) * 13)) ]
    refused() { # refused PATTERN ARGUMENT ...
        run --separate-stderr -2 "${SGD[@]}" "${@:2}" -o no --steps 2
        [[ $stderr == *"$1"* ]] || { echo "$stderr"; false; }
        [ "${#stderr_lines[@]}" -eq 1 ]
        [ ! -e no ]
    }
    refused "train: --mesh: cp=3 does not divide 4 heads: choose cp=2 or cp=4" --mesh cp=3
    refused "train: --mesh: cp=3 does not divide 4 heads: choose cp=1, or give --cp ring" --mesh cp=3 --seq-len 33
    refused "train: --mesh: cp=3 does not divide 32 positions of a window: choose cp=2 or cp=4" --mesh cp=3 --cp ring
    refused "train: --mesh: cp=4 does not divide 36 positions of a window in two halves: choose cp=3 or cp=6" --mesh cp=4 --cp zigzag --seq-len 36
    refused "train: --cp: is of ranks that share positions: give --mesh cp=N" --cp ring
    refused "train: --mesh: cp=2 does not divide 31 positions of a window: choose cp=1" --mesh cp=2 --seq-len 31
    refused "train: --mesh: cp=4 does not divide 2 heads of a rank along tp: choose cp=2" --mesh tp=2,cp=4
}
