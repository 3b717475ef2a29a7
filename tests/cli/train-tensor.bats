#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# train --mesh tp=N: ranks share the weights of each layer; losses of one rank, files that any mesh resumes, refusals.
bats_require_minimum_version 1.5.0
load ranks.bash

setup_file() {
    root=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    export root
    cd "$BATS_FILE_TMPDIR"
    sh "$root/tests/cli/examples/train.sh"
    small=(--set hidden_size=32 --set num_hidden_layers=2 --set num_attention_heads=4 --set num_key_value_heads=2)
    init-model -q llama-5m -t tok/tokenizer.json "${small[@]}" --set intermediate_size=48 -o llama
    init-model -q qwen3-moe-13m -t tok/tokenizer.json "${small[@]}" --set head_dim=16 --set moe_intermediate_size=24 -o mixture
    init-model -q gpt2-5m -t tok/tokenizer.json --set n_embd=32 --set n_layer=2 --set n_head=4 -o gpt2
    init-model -q bloom-12m -t tok/tokenizer.json --set hidden_size=32 --set n_layer=2 --set n_head=4 -o bloom
}

setup() {
    cd "$BATS_TEST_TMPDIR"
    for f in data llama mixture gpt2 bloom; do ln -s "$BATS_FILE_TMPDIR/$f" .; done
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
}

@test "train: ranks along tp have the losses of one" {
    for m in llama gpt2 mixture bloom; do
        o=("${FOUR[@]}" --eval-every 2)
        [ $m != gpt2 ] || o+=(--dropout 0.1)
        rm -rf one two four ./*.jsonl
        "${T[@]}" $m data -o one "${o[@]}" --metrics one.jsonl
        "${T[@]}" $m data -o two "${o[@]}" --metrics two.jsonl --mesh tp=2
        "${T[@]}" $m data -o four "${o[@]}" --metrics four.jsonl --mesh dp=2,tp=2 --no-sequence-parallel
        close one.jsonl two.jsonl 9 || { echo $m; false; }
        close one.jsonl four.jsonl 9 || { echo $m; false; }
    done
    grep -q '"ranks":4,"ranks_tp":2' four.jsonl
    grep -Eq '"event":"step".*"comm_exposed_share":0[.].*"comm_bytes_dp":[1-9].*"comm_bytes_tp":[1-9]' four.jsonl
}

@test "train: after 20 steps, too" {
    o=(train -q --peak-tflops 0 llama data --seq-len 32 --batch-size 2 --steps 20 --optimizer sgd:momentum=0.9 --lr 0.1 --eval-every 10)
    "${o[@]}" -o one --metrics one.jsonl
    "${o[@]}" -o two --metrics two.jsonl --mesh tp=2
    close one.jsonl two.jsonl 22
}

@test "train: every kind of layer along tp" {
    for p in deepseek-v3-12m gpt-oss-12m qwen3-next-12m hybrid-5m retention-5m gemma3-5m olmo2-5m; do
        rm -rf m one two
        init-model -q $p -t "$BATS_FILE_TMPDIR/tok/tokenizer.json" -o m
        o=(train -q --peak-tflops 0 m data --seq-len 32 --batch-size 2 --steps 3 --optimizer sgd --lr 0.01)
        "${o[@]}" -o one --metrics one.jsonl -f
        "${o[@]}" -o two --metrics two.jsonl -f --mesh tp=2
        close one.jsonl two.jsonl 3 || { echo $p; false; }
    done
}

@test "train: along dp the bits stay beside tp, for threads and for processes" {
    "${T[@]}" llama data -o two "${FOUR[@]}" --mesh tp=2
    "${T[@]}" llama data -o four "${FOUR[@]}" --mesh tp=2,dp=2
    same_files two four
    command -v mpirun >/dev/null || skip "mpirun is not installed"
    mpirun -n 4 --oversubscribe "${T[@]}" llama data -o processes "${FOUR[@]}" --mesh tp=2
    same_bits two processes
    mpirun -n 2 --oversubscribe "${T[@]}" llama data -o pair "${FOUR[@]}" --mesh tp=2
    same_bits two pair
}

@test "train: a run along tp that stopped goes on with its bits, and on any other mesh" {
    "${T[@]}" gpt2 data -o whole "${FOUR[@]}" --mesh tp=2 --metrics whole.jsonl --eval-every 2
    "${T[@]}" gpt2 data -o part "${FOUR[@]}" --mesh tp=2 --metrics part.jsonl --eval-every 2 --save-every 3
    rm -rf part/step-000006
    for mesh in tp=2 tp=4 dp=2,tp=2 dp=4 dp=1; do
        rm -rf more
        cp -r part more
        train -q --resume more --steps 6 --mesh $mesh --metrics more.jsonl
        paste <(losses whole.jsonl | tail -3) <(losses more.jsonl | tail -3) |
            awk '{ d = $1 - $2; if (d > 1e-6 * $1 || -d > 1e-6 * $1) { print; exit 1 } }' || { echo $mesh; false; }
        [ $mesh != tp=2 ] || same_bits whole more
    done
}

@test "train: a model's files are whole, whatever wrote them" {
    "${T[@]}" gpt2 data -o two "${FOUR[@]}" --mesh tp=2 --steps 1 --lr 0
    "${T[@]}" gpt2 data -o one "${FOUR[@]}" --steps 1 --lr 0
    cmp one/latest/model.safetensors two/latest/model.safetensors
}

@test "train: memory of a plan is shared out along tp" {
    one=$(train --dry-run llama-60m --json | grep -o '"memory_total": [0-9]*' | head -1 | cut -d: -f2 | tr -d " ")
    two=$(train --dry-run llama-60m --mesh tp=2 --json | grep -o '"memory_total": [0-9]*' | head -1 | cut -d: -f2 | tr -d " ")
    dp=$(train --dry-run llama-60m --mesh dp=2 --json | grep -o '"memory_total": [0-9]*' | head -1 | cut -d: -f2 | tr -d " ")
    # two ranks together: hardly more than one, where copies would take twice as much
    [ $((two * 10)) -lt $((one * 13)) ]
    [ $((dp * 10)) -gt $((one * 16)) ]
    # the plan has the bytes of exchanges that the metrics then count
    said() { grep -o "\"comm_bytes_$2\": *[0-9]*" "$1" | $3 -n 1 | tr -d -c 0-9; }
    for optimizer in adamw lamb; do
        rm -rf run m.jsonl
        o=(llama data --seq-len 32 --batch-size 1 --steps 2 "${FOUR[@]}" --mesh dp=2,tp=2 --optimizer "$optimizer")
        train -q --peak-tflops 0 "${o[@]}" -o run --metrics m.jsonl
        train "${o[@]}" --dry-run --json > plan.json
        [ $optimizer = adamw ] || grep -q '"tensors of owners (whole)": *[1-9]' plan.json
        # those of rank 0: what goes to owners and comes from them is not alike on all
        [ "$(said m.jsonl tp tail)" -eq "$(said plan.json tp head)" ]
        [ "$(said m.jsonl dp tail)" -ge "$(said plan.json dp head)" ]
        [ "$(said m.jsonl dp tail)" -le $(($(said plan.json dp head) + 2048)) ]
    done
    # and the files are the same
    diff <(train --dry-run gpt2-5m --json | grep checkpoint_bytes) <(train --dry-run gpt2-5m --mesh tp=4 --json | grep checkpoint_bytes)
}

@test "train: queries, keys and values in one tensor, of which a matrix optimiser steps each" {
    for mesh in dp=1 tp=2; do
        train -q --peak-tflops 0 gpt2 data --dropout 0 --seq-len 32 --batch-size 2 --lr 1e-4 --optimizer muon:bf16=off --steps 4 -o $mesh \
            --metrics $mesh.jsonl --mesh $mesh
    done
    close dp=1.jsonl tp=2.jsonl 4
}

@test "train: meshes, optimisers and checkpoints that tp cannot have" {
    refused() { # refused PATTERN ARGUMENT ...
        run --separate-stderr -2 "${T[@]}" llama data -o no "${@:2}"
        [[ $stderr == *"$1"* ]] || { echo "$stderr"; false; }
        [ "${#stderr_lines[@]}" -eq 1 ]
        [ ! -e no ]
    }
    refused "train: --mesh: tp=3 does not divide 4 heads: choose tp=2 or tp=4" --mesh tp=3
    refused "train: --mesh: tp=8 does not divide 4 heads: choose tp=4" --mesh tp=8
    refused "as a whole, and each rank along tp has a part of it: choose an optimiser of single elements (adamw, lion), or no ZeRO" \
        --mesh dp=2,tp=2 --zero 1 --optimizer muon
    refused "tp: compressed checkpoints hold whole tensors of one rank: write folders, and compress them later" --mesh tp=2 --checkpoint-format lmz
    refused "it has 4 ranks, and --ranks 3: give --mesh dp=3" --mesh dp=2,tp=2 --ranks 3
}

@test "train: a weight that is not finite is named, whichever rank has it" {
    name=model.layers.1.mlp.down_proj.weight # of 32 rows, whose first 24 columns rank 0 has
    for at in 7 41; do
        rm -rf bad
        cp -rL llama bad
        "$root/tests/cli/edit-tensors" bad/model.safetensors $name nan $at
        run --separate-stderr -4 "${T[@]}" bad data -o no --mesh tp=2
        [[ $stderr == *"bad: tensor \"$name\" holds a NaN: "* ]] || { echo "$stderr"; false; }
    done
}

@test "train: a rank along tp that fails ends all" {
    run --separate-stderr -4 "${T[@]}" llama data -o no --mesh tp=2 --lr 1000 --max-grad-norm 0 --steps 30 --optimizer sgd
    [[ $stderr == *"rank "*" of 2: step "* ]] || { echo "$stderr"; false; }
    [ "$(grep -c . <<<"$stderr")" -eq 1 ]
}
