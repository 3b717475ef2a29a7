#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# train --zero: ranks along dp share the states of the optimiser; bits of one rank, files that any mesh resumes, memory, refusals.
bats_require_minimum_version 1.5.0
load ranks.bash

setup_file() {
    root=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    export root
    cd "$BATS_FILE_TMPDIR"
    sh "$root/tests/cli/examples/train.sh"
    # matrices of several blocks of 65,536 numbers, which ranks can have parts of
    init-model -q gpt2-5m -t tok/tokenizer.json --set n_embd=128 --set n_layer=2 --set n_head=4 --set n_inner=1024 -o gpt2
    init-model -q llama-5m -t tok/tokenizer.json --set hidden_size=128 --set num_hidden_layers=2 --set num_attention_heads=4 \
        --set num_key_value_heads=2 --set intermediate_size=1024 -o llama
}

setup() {
    cd "$BATS_TEST_TMPDIR"
    for f in data llama gpt2; do ln -s "$BATS_FILE_TMPDIR/$f" .; done
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    # GPT-2's files have matrices turned; records of every step, with samples of what ranks share
    Z=("${T[@]}" gpt2 data "${FOUR[@]}" --no-history --dtype bf16 --steps 4 --val data/val --eval-every 2 --log-every 1)
}

@test "train: ranks that share states have the bits of one, and any mesh resumes them" {
    o=(--optimizer adamw:ema=0.9 --save-every 2)
    "${Z[@]}" "${o[@]}" -o one --metrics one.jsonl
    "${Z[@]}" "${o[@]}" -o four --mesh dp=4 --zero 1 --metrics four.jsonl
    same_files one four
    diff <(numbers one.jsonl) <(numbers four.jsonl)
    train -q --resume four/step-000002 -o two --mesh dp=2 --zero 1
    train -q --resume four/step-000002 -o alone
    train -q --resume one/step-000002 -o shared --mesh dp=4 --zero 1
    for run in two alone shared; do same_files one $run; done
    # gradients, too: of one micro-batch for each rank, and of two
    "${Z[@]}" "${o[@]}" -o gradients --mesh dp=4 --zero 2 --metrics gradients.jsonl
    same_files one gradients
    diff <(numbers one.jsonl) <(numbers gradients.jsonl)
    "${Z[@]}" -o pairs --leaves 2
    "${Z[@]}" -o pairs-2 --leaves 2 --mesh dp=2 --zero 2
    same_files pairs pairs-2
}

@test "train: ranks that share weights, too, have the bits of one, and any mesh and level resumes them" {
    o=(--optimizer adamw:ema=0.9 --save-every 2 --val data/val)
    "${Z[@]}" "${o[@]}" -o one --metrics one.jsonl
    "${Z[@]}" "${o[@]}" -o four --mesh dp=4 --zero 3 --metrics four.jsonl
    same_files one four
    diff <(numbers one.jsonl) <(numbers four.jsonl)
    train -q --resume four/step-000002 -o two --mesh dp=2 --zero 3 --zero-prefetch 0
    train -q --resume four/step-000002 -o alone
    train -q --resume one/step-000002 -o shared --mesh dp=4 --zero 3 --zero-prefetch 5 --recompute full
    for run in two alone shared; do same_files one $run; done
}

@test "train: rules of whole matrices, turned ones and others" {
    for m in gpt2 llama; do
        o=("${T[@]}" $m data "${FOUR[@]}" --no-history --steps 2 --optimizer 'muon;norm=adamw8bit:min-8bit-size=1')
        "${o[@]}" -o one-$m
        "${o[@]}" -o two-$m --mesh dp=2 --zero 1
        "${o[@]}" -o all-$m --mesh dp=2 --zero 3
        same_files one-$m two-$m
        same_files one-$m all-$m
    done
}

@test "train: processes share states, beside stages and parts of layers" {
    ranks() { timeout -s KILL 120 mpirun --oversubscribe -n "$1" "${Z[@]}" -j 1 "${@:2}"; }
    "${Z[@]}" -o one --tied-apart
    ranks 2 -o two --zero 1 --tied-apart
    same_bits one two
    ranks 4 -o four --mesh dp=2,pp=2 --zero 1
    same_bits one four
    ranks 4 -o staged --mesh dp=2,pp=2 --zero 2
    same_bits one staged
    ranks 4 -o each --mesh dp=4 --zero 2
    "${Z[@]}" -o alone
    same_bits alone each
    "${Z[@]}" -o tp --mesh dp=2,tp=2
    "${Z[@]}" -o both --mesh dp=2,tp=2 --zero 1
    same_bits tp both
    ranks 4 -o weights --mesh dp=2,tp=2 --zero 3
    same_bits tp weights
    ranks 4 -o stages --mesh dp=2,pp=2 --zero 3
    same_bits one stages
    "${Z[@]}" -o cp --mesh dp=2,cp=2
    "${Z[@]}" -o windows --mesh dp=2,cp=2 --zero 3
    same_bits cp windows
}

@test "train: biases of routers, which no gradient changes, are written once beside stages" {
    init-model -q deepseek-v3-12m -t "$BATS_FILE_TMPDIR/tok/tokenizer.json" --set num_nextn_predict_layers=0 \
        --set tie_word_embeddings=false --set hidden_size=64 --set num_hidden_layers=4 -o mixture
    o=("${T[@]}" mixture data "${FOUR[@]}" --no-history --steps 2 --leaves 2)
    "${o[@]}" -o one
    "${o[@]}" -o four --ranks 4 --mesh dp=2,pp=2 --zero 1
    same_files one four
}

@test "train: the plan has the memory that ranks save, and what they exchange" {
    o=(train llama data --dtype bf16 --batch-size 1 --seq-len 32 --steps 2 "${FOUR[@]}" --mesh dp=4)
    "${o[@]}" --dry-run --json > 0.json
    "${o[@]}" --dry-run --json --zero 1 > 1.json
    said() { grep -o "\"$2\": *[0-9]*" "$1" | tail -1 | tr -d -c 0-9; }
    row() { grep -o "\"$2\": *[0-9]*" "$1" | head -1 | sed 's/.*: *//'; }
    [ "$(row 1.json 'optimiser states')" -lt $(($(row 0.json 'optimiser states') * 26 / 100)) ]
    [ "$(row 1.json 'weights (f32 master)')" -lt $(($(row 0.json 'weights (f32 master)') * 28 / 100)) ]
    "${o[@]}" --dry-run --json --zero 2 > 2.json
    [ "$(row 1.json 'gradients (f32)')" -eq "$(row 0.json 'gradients (f32)')" ]
    [ "$(row 2.json 'gradients (f32)')" -lt $(($(row 0.json 'gradients (f32)') * 8 / 10)) ]
    # of two micro-batches they are whole
    "${o[@]}" --dry-run --json --zero 2 --gradient-accumulation-steps 8 > more.json
    [ "$(row more.json 'gradients (f32)')" -eq "$(row 0.json 'gradients (f32)')" ]
    # each rank has its part of the weights, and room for two layers of them among the activations, or for one
    "${o[@]}" --dry-run --json --zero 3 > 3.json
    for r in 'weights (f32 master)' 'weights (bf16)' 'optimiser states'; do
        [ "$(row 3.json "$r")" -lt $(($(row 0.json "$r") * 26 / 100)) ]
    done
    "${o[@]}" --dry-run --json --zero 3 --zero-prefetch 0 > 30.json
    [ "$(row 30.json 'activations and scratch')" -lt "$(row 3.json 'activations and scratch')" ]
    "${o[@]}" -q --peak-tflops 0 --zero 3 --log-every 2 -o weights --metrics w.jsonl
    got=$(said w.jsonl comm_bytes_dp)
    plan=$(said 3.json comm_bytes_dp)
    [ "$got" -ge "$plan" ]
    [ "$got" -le $((plan + 3 * 4 * 16384 + 2048)) ]
    "${o[@]}" -q --peak-tflops 0 --zero 1 --log-every 2 -o run --metrics m.jsonl
    # beside the plan: counts, flags, and samples of parameters and gradients
    got=$(said m.jsonl comm_bytes_dp)
    plan=$(said 1.json comm_bytes_dp)
    [ "$got" -ge "$plan" ]
    [ "$got" -le $((plan + 3 * 4 * 16384 + 2048)) ]
}

@test "train: what ranks cannot share is refused" {
    run --separate-stderr -2 "${Z[@]}" -o no --mesh dp=2 --zero 1 --checkpoint-format lmz
    [[ $stderr == "train: --zero: compressed checkpoints hold whole tensors of one rank: write folders, and "* ]]
    run --separate-stderr -2 "${Z[@]}" -o no --mesh dp=2 --zero 4
    [[ $stderr == "train: --zero: 4 is out of range: choose from 0 to 3" ]]
    run --separate-stderr -2 "${Z[@]}" -o no --mesh dp=2 --zero 2 --zero-prefetch 2
    [[ $stderr == "train: --zero-prefetch: serves ranks that share weights: leave it out, or give --zero 3" ]]
    [ ! -e no ]
}

@test "train: a loss that is not finite ends ranks that share states" {
    run --separate-stderr -4 "${T[@]}" gpt2 data "${FOUR[@]}" --steps 30 --lr 1000 --max-grad-norm 0 --optimizer sgd \
        -o run --mesh dp=2 --zero 1
    [[ $stderr == *" is not a number"* || $stderr == *" is infinite"* ]]
}
