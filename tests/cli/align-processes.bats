#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# align-model: ranks that are threads or processes have the weights, records and completions of one; faults, refusals.
bats_require_minimum_version 1.5.0
load ranks.bash
load processes.bash

setup_file() {
    cd "$BATS_FILE_TMPDIR"
    printf '%s\n' '{"text":"1+1=2"}' '{"text":"2+2=4"}' > text.jsonl
    train-tokenizer -q -V 257 -o tok.json text.jsonl
    echo '{"model_type":"llama","hidden_size":32,"intermediate_size":48,"num_hidden_layers":2,
        "num_attention_heads":2,"num_key_value_heads":1,"max_position_embeddings":64,"tie_word_embeddings":true}' > c.json
    init-model -q -t tok.json -o m c.json
    for i in 1 2 3 4 5 6 7 8 9; do
        echo "{\"prompt\":\"$i+$i=\",\"answer\":$((i + i))}" >> p.jsonl
        echo "{\"prompt\":\"$i+$i=\",\"chosen\":\"$((i + i))\",\"rejected\":\"no idea $i\"}" >> d.jsonl
        echo "{\"prompt\":\"$i+$i=\",\"completion\":\"$((i + i))\",\"label\":true}" >> k.jsonl
    done
}

setup() {
    cd "$BATS_TEST_TMPDIR"
    ln -s "$BATS_FILE_TMPDIR"/* .
    on=(--lr 1e-2 --no-history --micro-batch-size 1 -q)
    on_pairs=(d.jsonl --loss dpo --batch-size 5 --steps 3 "${on[@]}")
    judge='while read -r x; do case $x in *"completion\":\""[a-m]*) echo 1;; *) echo 0;; esac; done'
    on_rewards=(p.jsonl --loss grpo --kl 0.1 --updates 2 --batch-size 3 --group 4 --max-new-tokens 4 --steps 4 "${on[@]}"
        --log-completions 9)
}

# same_records FILE FILE: of steps and evaluations, without times
same_records() {
    cmp <(numbers "$1" | sed -E 's/"rollout\/[a-z_]*":[^,}]*,?//g') <(numbers "$2" | sed -E 's/"rollout\/[a-z_]*":[^,}]*,?//g')
}

@test "align-model: processes share given answers, with the bits and records of one" {
    needs_mpi
    align-model m "${on_pairs[@]}" -o one --leaves 2 --val d.jsonl --eval-every 2 --metrics one.jsonl
    ranks 2 align-model m "${on_pairs[@]}" -o two --mesh dp=2 --val d.jsonl --eval-every 2 --metrics two.jsonl
    same_bits one two
    same_records one.jsonl two.jsonl
    cmp one/reference.safetensors two/reference.safetensors
    [ "$(grep -c '"event":"step"' two.jsonl)" -eq 3 ]
    # an adapter, of which threads of one process cannot have one each
    align-model m "${on_pairs[@]}" -o a1 --leaves 2 --method lora --rank 4
    ranks 2 align-model m "${on_pairs[@]}" -o a2 --method lora --rank 4
    cmp <(tensors a1/latest/adapter_model.safetensors) <(tensors a2/latest/adapter_model.safetensors)
}

@test "align-model: processes share completions and what judges them" {
    needs_mpi
    align-model m "${on_rewards[@]}" --reward-command "$judge" -o one --leaves 2 --val p.jsonl --eval-every 4 --metrics one.jsonl
    ranks 2 align-model m "${on_rewards[@]}" --reward-command "$judge; touch judged.\$OMPI_COMM_WORLD_RANK" -o two \
        --val p.jsonl --eval-every 4 --metrics two.jsonl
    same_bits one two
    same_records one.jsonl two.jsonl
    cmp one/completions.jsonl two/completions.jsonl
    [ "$(grep -c '"event":"completion"' two/completions.jsonl)" -eq 48 ]
    [ -e judged.0 ] && [ -e judged.1 ]
    # a teacher
    align-model m k.jsonl --loss gkd --teacher m --lambda 0.5 --batch-size 4 --max-new-tokens 4 --steps 3 "${on[@]}" -o g1 --leaves 2
    ranks 2 align-model m k.jsonl --loss gkd --teacher m --lambda 0.5 --batch-size 4 --max-new-tokens 4 --steps 3 "${on[@]}" -o g2
    same_bits g1 g2
}

@test "align-model: a run goes on with another number of ranks, also within a rollout" {
    how=("${on_rewards[@]}" --reward 'regex:[a-f]' --leaves 4 --lr-schedule constant)
    align-model m "${how[@]}" -o one
    align-model m "${how[@]}" -o many --ranks 2 --steps 1
    align-model -q --resume many --ranks 4 --steps 3
    align-model -q --resume many --steps 4
    same_bits one many
    cmp one/completions.jsonl many/completions.jsonl
}

@test "align-model: a reward command that fails in one process ends all, with one line" {
    needs_mpi
    run ranks 2 align-model m "${on_rewards[@]}" -o two --reward-command "[ \$OMPI_COMM_WORLD_RANK = 0 ] || exit 3; $judge"
    [ "$status" -eq 1 ]
    [ "$(grep -c '^align-model: ' <<< "$output")" -eq 1 ]
    [[ $output == *"align-model: rank 1 of 2 on "*": reward command: "*" ended with status 3 after 0 of "* ]]
    [ ! -e two ]
}

@test "align-model: the steps before a reward command that fails are kept, of processes and of threads" {
    needs_mpi
    how=("${on_rewards[@]}" --lr-schedule constant)
    align-model m "${how[@]}" -o one --reward-command "$judge" --leaves 2
    # the second rollout: each rank judges 12 completions of the first
    late="i=0; while read -r x; do i=\$((i+1)); [ \$i -le 14 ] || exit 7; ${judge#*do }"
    run ranks 2 align-model m "${how[@]}" -o two --reward-command "case \$OMPI_COMM_WORLD_RANK in 0) $judge;; *) $late;; esac"
    echo "$output"
    [ "$status" -eq 1 ]
    [ "$(grep -c '^align-model: ' <<< "$output")" -eq 1 ]
    [[ $output == *"align-model: rank 1 of 2 on "*": reward command: "*" ended with status 7 after "* ]]
    run -1 align-model m "${how[@]}" -o threads --ranks 2 --reward-command "$late"
    echo "$output"
    [[ $output == "align-model: rank "[01]" of 2: reward command: "*" ended with status 7 after "* ]]
    for run in two threads; do
        [ "$(readlink "$run/latest")" = step-000002 ]
        align-model -q --resume "$run" --reward-command "$judge"
        same_bits one "$run"
        cmp one/completions.jsonl "$run/completions.jsonl"
    done
}

@test "align-model: ranks that cannot be are refused before anything is read" {
    refused() { # refused TEXT OPTION ...
        local text=$1
        shift
        run -2 align-model m "${on_pairs[@]}" -o none "$@"
        echo "$output"
        [ "${#lines[@]}" -eq 1 ]
        [[ $output == *"$text"* ]]
        [ ! -e none ]
    }
    refused "--ranks: ranks that are threads cannot share the base of an adapter: start processes" --ranks 2 --method lora
    refused "--mesh: ranks that are threads cannot share a teacher: start processes" --mesh dp=2 --loss gkd --teacher m
    refused "--mesh: ranks share the batch (dp) only, not tp" --mesh tp=2
    refused "2 ranks do not divide the 3 leaves" --ranks 2 --leaves 3
    refused "each of 2 ranks would add up 3 leaves, no power of two" --ranks 2 --leaves 6
    # the plan is that of all ranks
    rollouts() { align-model --json --dry-run m "${on_rewards[@]}" --reward gsm8k "$@" | sed -nE 's/.*"rollouts": ?([0-9]+).*/\1/p'; }
    [ "$(rollouts -j 2 --ranks 2)" -eq $((2 * $(rollouts -j 1))) ]
}
