#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# train --mesh pp=N: ranks share the layers of a model; the bits of one rank, files that any mesh resumes, refusals.
bats_require_minimum_version 1.5.0
load ranks.bash

setup_file() {
    root=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    export root
    cd "$BATS_FILE_TMPDIR"
    sh "$root/tests/cli/examples/train.sh"
    small=(--set hidden_size=32 --set num_hidden_layers=4 --set num_attention_heads=4 --set num_key_value_heads=2)
    init-model -q llama-5m -t tok/tokenizer.json "${small[@]}" --set intermediate_size=48 -o llama
    init-model -q qwen3-moe-13m -t tok/tokenizer.json "${small[@]}" --set head_dim=16 --set moe_intermediate_size=24 -o mixture
    init-model -q deepseek-v3-12m -t tok/tokenizer.json -o deepseek
}

setup() {
    cd "$BATS_TEST_TMPDIR"
    for f in data llama mixture deepseek; do ln -s "$BATS_FILE_TMPDIR/$f" .; done
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
}

# losses FILE -> of training and validation
losses() {
    grep -E '"event":"(step|eval)"' "$1" | grep -oE '"(loss|val_loss|grad_norm)":[0-9.]+'
}

@test "train: ranks along pp have the bits of one" {
    for m in llama mixture; do
        o=(--gradient-accumulation-steps 8 --leaves 4 --tied-apart --eval-every 2)
        rm -rf one two four twin ./*.jsonl
        "${T[@]}" $m data -o one "${o[@]}" --metrics one.jsonl
        "${T[@]}" $m data -o two "${o[@]}" --metrics two.jsonl --mesh pp=2 --schedule zb-v
        "${T[@]}" $m data -o four "${o[@]}" --metrics four.jsonl --mesh dp=2,pp=2 --stages 1,3
        "${T[@]}" $m data -o twin "${o[@]}" --metrics twin.jsonl --mesh pp=2 --schedule dualpipe
        same_bits one two
        same_bits one four
        same_bits one twin
        [ "$(losses one.jsonl | wc -l)" -ge 9 ]
        diff <(losses one.jsonl) <(losses two.jsonl)
        diff <(losses one.jsonl) <(losses twin.jsonl)
        diff <(losses one.jsonl) <(losses four.jsonl)
    done
    grep -q '"ranks":4,"ranks_pp":2,"stages":2,"leaves":4' four.jsonl
    grep -Eq '"event":"step".*"pipeline_bubble":0[.].*"comm_bytes_dp":[1-9].*"comm_bytes_pp":[1-9]' four.jsonl
}

# sampled FILE -> percentiles of gradients, of each step
sampled() {
    grep '"event":"step"' "$1" | grep -oE '"grad_(p50|p90|p99|max)":[^,]*'
}

@test "train: samples of gradients and biases of routers are those of all stages" {
    tiny=(--set hidden_size=16 --set num_hidden_layers=2 --set num_attention_heads=2 --set num_key_value_heads=1)
    init-model -q llama-5m -t "$BATS_FILE_TMPDIR/tok/tokenizer.json" "${tiny[@]}" --set intermediate_size=24 -o m
    o=(train -q --peak-tflops 0 --seq-len 32 --batch-size 1 --lr 3e-3 --steps 2 --gradient-accumulation-steps 4 --leaves 2)
    "${o[@]}" m data -o one --tied-apart --log-every 1 --metrics one.jsonl
    [ "$(sampled one.jsonl | wc -l)" -eq 8 ]
    for s in 1f1b dualpipe; do
        "${o[@]}" m data -o two --mesh pp=2 --schedule $s --log-every 1 --metrics two.jsonl -f
        same_bits one two
        diff <(sampled one.jsonl) <(sampled two.jsonl)
        jq -s -e '[.[] | select(.event == "step") | .update_ratio] | .[0] / .[2] - 1 | fabs < 1e-5' one.jsonl two.jsonl
    done
    tiny=(--set hidden_size=32 --set intermediate_size=48 --set num_hidden_layers=2 --set num_attention_heads=4)
    tiny+=(--set num_key_value_heads=4 --set n_routed_experts=8 --set num_experts_per_tok=2 --set moe_intermediate_size=16)
    tiny+=(--set first_k_dense_replace=1 --set tie_word_embeddings=false --set num_nextn_predict_layers=1)
    init-model -q deepseek-v3-12m -t "$BATS_FILE_TMPDIR/tok/tokenizer.json" "${tiny[@]}" -o routed
    o+=(--moe-router-bias-update-rate 0.25 --log-every 1)
    "${o[@]}" routed data -o one --tied-apart --metrics one.jsonl -f
    "${o[@]}" routed data -o two --mesh pp=2 --metrics two.jsonl -f
    biases='select(.event == "experts") | [.step, .layer, .bias_min, .bias_max]'
    [ "$(jq -c "$biases" one.jsonl | grep -vc null)" -ge 4 ]
    diff <(jq -c "$biases" one.jsonl) <(jq -c "$biases" two.jsonl)
}

@test "train: kinds of layers along pp, modules that predict further on, BF16" {
    for p in deepseek-v3-12m qwen3-next-12m gpt-oss-12m gemma3-5m; do
        rm -rf m one two
        apart=(--set tie_word_embeddings=false)
        [ $p != gemma3-5m ] || apart=()
        init-model -q $p -t "$BATS_FILE_TMPDIR/tok/tokenizer.json" "${apart[@]}" -o m
        o=(train -q --peak-tflops 0 m data --seq-len 32 --batch-size 1 --steps 2 --dtype bf16 --gradient-accumulation-steps 4 --leaves 1)
        "${o[@]}" -o one --tied-apart -f
        "${o[@]}" -o two --mesh pp=2 --schedule zb-h1 -f
        same_bits one two || { echo $p; false; }
    done
}

@test "train: processes along pp, a schedule from a file" {
    command -v mpirun >/dev/null || skip "mpirun is not installed"
    plot-run --schedule zb-h1 --mesh pp=2 --micro-batches 4 -o rows.csv
    o=(--gradient-accumulation-steps 4 --leaves 1)
    "${T[@]}" llama data -o one "${o[@]}" --tied-apart
    mpirun -n 2 --oversubscribe "${T[@]}" llama data -o two "${o[@]}" --mesh pp=2 --schedule rows.csv -j 1
    same_bits one two
    mpirun -n 4 --oversubscribe "${T[@]}" llama data -o four --gradient-accumulation-steps 4 --leaves 1 --mesh pp=4 -j 1
    same_bits one four
}

@test "train: a run along pp goes on with its bits on any other mesh" {
    o=(--gradient-accumulation-steps 4 --lr-schedule constant)
    "${T[@]}" llama data -o whole "${o[@]}" --mesh pp=2
    "${T[@]}" llama data -o run "${o[@]}" --mesh pp=2 --steps 2
    train -q --resume run --steps 4
    train -q --resume run --steps 6 --mesh pp=4 --schedule gpipe
    same_bits whole run
}

@test "train --dry-run: slots, and the bytes that the metrics then count" {
    o=(llama data -o run --gradient-accumulation-steps 4 --mesh pp=2)
    "${T[@]}" "${o[@]}" --dry-run | grep -Eq '^micro-batches in flight +[0-9.]+ [KM]iB'
    for s in 1f1b dualpipe; do
        planned=$("${T[@]}" "${o[@]}" --schedule $s --dry-run --json | sed -nE 's/.*"comm_bytes_pp": ([0-9]+).*/\1/p' | head -n 1)
        rm -rf run m.jsonl time.json
        "${T[@]}" "${o[@]}" --schedule $s --steps 1 --metrics m.jsonl --trace time.json
        grep -q '"name": "other stages"' time.json
        counted=$(sed -nE 's/.*"event":"step".*"comm_bytes_pp":([0-9]+).*/\1/p' m.jsonl)
        [ $((counted - planned)) -ge 0 ] && [ $((counted - planned)) -lt 4096 ] || { echo "$s: $planned $counted"; false; }
    done
    grep -q '"name": "gradients of copies"' time.json
    # of all ranks: copies of both stages
    weights() {
        train llama data -o run -f --seq-len 32 --batch-size 1 --dry-run --json --gradient-accumulation-steps 4 "$@" |
            sed -nE 's/.*"weights \(f32 master\)": ([0-9]+).*/\1/p' | head -n 1
    }
    [ "$(weights --mesh pp=2 --schedule dualpipe)" -eq $((2 * $(weights))) ]
    [ "$(weights --mesh pp=2)" -lt $((2 * $(weights))) ]
}

@test "train: stages and schedules that cannot be" {
    # refuse LINE ARGUMENT ...
    refuse() {
        local line=$1
        shift
        run -2 --separate-stderr "${T[@]}" llama data -o run "$@"
        # shellcheck disable=SC2154 # run sets it
        [ "$stderr" = "train: $line" ] || { echo "$stderr"; false; }
        [ ! -e run ]
    }
    refuse "stages: 5 stages, and the model has 4 layers: use pp=4 or less" --mesh pp=5
    refuse "schedule: 3 micro-batches do not divide by 2 ranks: interleaved takes 2 or 4" --mesh pp=2 \
        --schedule interleaved:2 --gradient-accumulation-steps 3
    refuse "--schedule: dualpipe has two ways for micro-batches, each with leaves of its own: 1 leaf of 4 micro-batches cannot be theirs: give --leaves 2" \
        --mesh pp=2 --schedule dualpipe --gradient-accumulation-steps 4 --leaves 1
    refuse "stages: '1,2' has 3 layers, and the model has 4" --mesh pp=2 --stages 1,2
    refuse "--schedule: is of ranks that share layers: give --mesh pp=N" --schedule gpipe
    refuse "--stages: is of ranks that share layers: give --mesh pp=N" --stages 2,2 --mesh dp=2
    refuse "--tied-apart: first and last stage add up their gradients by themselves: leave --no-tied-apart out" --mesh pp=2 --no-tied-apart
    rm llama
    ln -s deepseek llama
    refuse "stages: the last one would have the tied embedding for head and modules that predict further on: use dp or tp, or leave the modules as they are" --mesh pp=2
}
