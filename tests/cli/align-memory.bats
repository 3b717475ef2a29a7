#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# align-model: the memory that a plan states is that of the run, for each way to train.
#
# The model is wide and its texts are short, so that weights, caches and activations are the most of a process, and the
# code of the tool is little.  Completions have no end, so that each has as many tokens as the plan counts.

bats_require_minimum_version 1.5.0
load memory

setup_file() {
    cd "$BATS_FILE_TMPDIR"
    for i in 1 2 3 4 5 6 7 8; do
        echo "{\"prompt\":\"The cat number $i met a dog. \",\"chosen\":\"It was good and kind $i\",\"rejected\":\"It was bad to $i\"}"
    done > pairs.jsonl
    sed -n 's/"prompt"/"text"/p' pairs.jsonl > text.jsonl
    train-tokenizer -q -V 300 -o tok.json text.jsonl
    echo '{"model_type":"llama","hidden_size":512,"intermediate_size":1536,"num_hidden_layers":4,"num_attention_heads":8,
        "num_key_value_heads":8,"max_position_embeddings":128,"tie_word_embeddings":true}' > c.json
    init-model -q -t tok.json -s eos_token_id=null -o m c.json
    init-model -q -t tok.json -s eos_token_id=null -s num_hidden_layers=6 -s intermediate_size=2048 -o large c.json
    align-model -q m pairs.jsonl -o judge --loss reward --steps 1 --batch-size 1 --no-history
}

# keeps NAME OPTION ...: the peak of a run of a step is within 5 % of what its plan states
keeps() {
    local name=$1 stated used
    shift
    cd "$BATS_FILE_TMPDIR"
    rm -rf run
    align-model -q m pairs.jsonl -o run "$@" --steps 1 --no-history --dry-run --json > plan
    align-model -q m pairs.jsonl -o run "$@" --steps 1 --no-history --peak-tflops 0 --json > ran
    rm -rf run
    stated=$(grep -o '"memory_total": *[0-9]*' plan | grep -o '[0-9]*$')
    used=$(grep -o '"peak_memory_bytes": *[0-9]*' ran | grep -o '[0-9]*$')
    awk -v n="$name" -v s="$stated" -v u="$used" 'BEGIN {
        printf "%s: stated %.1f MiB, used %.1f MiB\n", n, s / 2^20, u / 2^20
        exit !(u < 1.05 * s && s < 1.05 * u)
    }'
}

sampled=(--batch-size 2 --group 4 --micro-batch-size 8 --max-new-tokens 40 --reward length:target=5)

@test "align-model: memory of given answers is kept to within 5 %" {
    plain_memory align-model
    keeps dpo --loss dpo --batch-size 4
    keeps "dpo, layers computed again" --loss dpo --batch-size 4 --recompute full
    keeps "dpo with lora" --loss dpo --batch-size 4 --method lora
    keeps "dpo beside another model" --loss dpo --batch-size 4 --reference large
    keeps "dpo with lora beside another model" --loss dpo --batch-size 4 --method lora --reference large
    keeps reward --loss reward --batch-size 4
    keeps "dpo in bf16, with evaluations" --loss dpo --batch-size 4 --dtype bf16 --val pairs.jsonl --eval-every 1
}

@test "align-model: memory of sampled completions is kept to within 5 %" {
    plain_memory align-model
    keeps grpo --loss grpo "${sampled[@]}"
    keeps "grpo with lora" --loss grpo "${sampled[@]}" --method lora
    keeps "grpo with lora and a reference that it shares" --loss grpo "${sampled[@]}" --method lora --kl 0.1
    keeps "dpo of completions, with a reference" --loss dpo "${sampled[@]}" --method lora --micro-batch-size 4 --reference large
    keeps "grpo with evaluations" --loss grpo "${sampled[@]}" --method lora --val pairs.jsonl --eval-every 1
    keeps rloo --loss rloo "${sampled[@]}" --method lora --kl 0.05
    keeps "best of several" --loss reject "${sampled[@]}" --method lora --best 2 --write-samples kept.jsonl --force
}

@test "align-model: memory of values and of other models is kept to within 5 %" {
    plain_memory align-model
    keeps ppo --loss ppo "${sampled[@]}" --group 2
    keeps "a reward model" --loss grpo --reward-model judge "${sampled[@]:0:8}" --method lora
    keeps "a reference in codes that it shares, layers computed again" --loss grpo "${sampled[@]}" --method qlora --kl 0.1
    keeps "a teacher" --loss gkd --teacher large --batch-size 4 --lambda 0 --method lora
    keeps "a teacher of completions" --loss gkd --teacher large --batch-size 4 --lambda 1 --max-new-tokens 40 --method lora
}
