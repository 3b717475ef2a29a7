#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# What inspect-model and --dry-run state of each architecture: its sizes, what is active of experts, and the memory of a run.
bats_require_minimum_version 1.5.0

load memory

setup_file() {
    cd "$BATS_FILE_TMPDIR" || return
    for i in {1..60}; do
        echo "{\"text\":\"the river ran by the old bridge $i and the stones lay in the water\"}"
    done > t.jsonl
    for i in {1..8}; do
        echo '{"prompt":"the river","chosen":" ran by the bridge","rejected":" and the stones"}'
    done > pairs.jsonl
    train-tokenizer -q -V 300 -o tokenizer.json t.jsonl
    shard-data -q --tokenizer tokenizer.json -o data t.jsonl
}

setup() {
    cd "$BATS_TEST_TMPDIR" || return
    ln -s "$BATS_FILE_TMPDIR"/* .
}

# miniatures: names of the presets below 20 M parameters
miniatures() {
    init-model --list --json | jq -r 'select(.parameters < 2e7) | .preset'
}

# holds FILE FILTER: jq's filter is true of the file
holds() {
    jq -e "$2" "$1" > /dev/null || { echo "$name: $2 is not true of"; cat "$1"; return 1; }
}

@test "plans: presets: train --dry-run states the parameters, and the bytes of weights, gradients and states" {
    for name in $(miniatures); do
        init-model "$name" --dry-run --json -o x > about
        n=$(jq '.parameters + (.mtp_parameters // 0)' about)
        # Files of a module for the tokens further on hold copies of the embedding and the head.
        holds about ".bytes >= 4 * $n and .bytes < 5 * $n"
        train "$name" --dry-run --json --dtype f32 --seq-len 64 --batch-size 2 > plan
        holds plan ".parameters == $n and .fits and .flops_per_token > 6 * .matmul_parameters"
        [[ $name == t5* ]] || holds plan '.tokens_per_step == 128' # those of T5 are in front of the spans that it fills
        # Parameters are aligned; what has no gradient is frozen.
        holds plan "[.memory | .[\"weights (f32 master)\"] // (.[\"trained (f32 master)\"] + .[\"frozen (f32)\"])] |
            .[0] >= 4 * $n and .[0] < 4.1 * $n"
        holds plan ".memory[\"gradients (f32)\"] > 3.9 * $n and .memory[\"optimiser states\"] == 2 * .memory[\"gradients (f32)\"]"
        holds plan "([.memory[]] | add) == .memory_total"
        # Products are counted by parameters and pairs of tokens, in the graph one by one.
        holds plan "([.graph_flops_per_micro_batch[]] | add) / .flops_per_step | . > 0.97 and . < 1.08"
        train "$name" --dry-run --json --dtype bf16 --seq-len 64 --batch-size 2 --recompute full > less
        holds less '.graph_flops_per_micro_batch.recompute > 0'
        [ "$(jq .parameters less)" = "$n" ]
    done
    [ "$(find . -maxdepth 1 -newer about | wc -l)" -le 4 ] # no output
}

@test "plans: ranks: the list of each is built; together they have the memory of all" {
    for mesh in dp=2,tp=2 dp=2,pp=2,tp=2 cp=2,pp=2; do
        train llama-1m --dry-run --json --mesh $mesh --seq-len 64 --batch-size 2 > plan
        holds plan '([.each_rank[].ranks] | add) == .ranks'
        for row in "weights (f32 master)" "gradients (f32)" "optimiser states"; do
            holds plan "([.each_rank[] | .ranks * .memory[\"$row\"]] | add) / .memory[\"$row\"] | . > 0.999999 and . < 1.000001"
        done
        holds plan '.comm_bytes_dp == .each_rank[0].comm_bytes_dp'
    done
    holds plan '.lists == 4 and ([.each_rank[].pp] == [0, 1]) and .bubble > 0.2 and .bubble < 0.5'
    train gpt2-5m --dry-run --json --mesh tp=2,pp=2 > plan # biases that are added once, and odd numbers of words
    holds plan '[.each_rank[] | [.pp, .tp]] | unique | length == 3'
    train llama-1m --dry-run --mesh pp=2,tp=2 > table
    grep -qE '^  pp=1 +2 ranks: .* each, and each gives .* in a step$' table
    grep -qE '^ranks along pp wait [0-9.]+ % of a step if all FLOPs take equal time$' table
}

@test "plans: --plan: a plan that was printed is the run's own; options override it" {
    init-model -q llama-1m -t tokenizer.json -o m
    o=(m data --steps 2 --metrics -)
    shape=(--mesh dp=2,pp=2 --schedule zb-h1 --zero 1 --seq-len 16 --batch-size 1 --gradient-accumulation-steps 8 --dtype bf16)
    train m data --dry-run --json "${shape[@]}" > plan.json
    holds plan.json '.plan | with_entries(select(.value != null)) == {mesh: "dp=2,pp=2", schedule: "zb-h1", zero: 1, "seq-len": 16, "batch-size": 1, leaves: 2,
        "gradient-accumulation-steps": 8, dtype: "bf16", "tied-apart": true, "sequence-parallel": true}'
    train m data --dry-run --json --plan plan.json | jq 'del(.memory_free)' > again
    diff <(jq 'del(.memory_free)' plan.json) again
    train -q "${o[@]}" "${shape[@]}" -o by-options | jq '.loss' > one
    train -q "${o[@]}" --plan plan.json -o by-plan | jq '.loss' > two
    [ "$(grep -c '[0-9]' one)" -ge 2 ]
    diff one two
    echo '{"zero": 0, "lr": 7}' > config.json
    train m data --dry-run --json --config config.json --plan plan.json | holds /dev/stdin '.plan.zero == 1'
    train m data --dry-run --json --plan plan.json --zero 0 | holds /dev/stdin '.plan.zero == 0'
    train --plan plan.json --print-config | # its options, which are then the config's own
        holds /dev/stdin '(has("plan") | not) and .mesh == "dp=2,pp=2" and (.given | index("zero"))'
    train m data --dry-run --json --ranks 2 | holds /dev/stdin '.plan.mesh == "dp=2"'
}

@test "plans: --plan: what is no plan is refused by its file and key" {
    init-model -q llama-1m -t tokenizer.json -o m
    refused() { # refused TEXT MESSAGE
        echo "$1" > plan.json
        run -2 train m data -o run --plan plan.json
        [ "$output" = "train: plan.json: $2" ] || { echo "$output"; false; }
        [ ! -e run ]
    }
    refused '{"plan": {"lr": 3}}' "plan: lr: is not part of a plan: give it on the command line or in --config"
    refused '{"plan": {"plan": "x"}}' "plan: plan: no option of this name"
    refused '{"plan": {"zero": 4}}' "plan: --zero: 4 is out of range: choose from 0 to 3"
    refused '{"plan": {"zer": 1}}' "plan: zer: no option of this name: did you mean 'zero'?"
    refused '{"plan": {"mesh": 4}}' "plan: mesh: a string without U+0000 is needed"
    for text in '{}' '[]' '{"plan": []}' '{"plan": {}}'; do
        refused "$text" 'is not a plan: an object with options under "plan" is needed: train --dry-run --json writes one; see plan(5)'
    done
    run -1 train m data -o run --plan nothing.json
    [ "$output" = "train: nothing.json: cannot open: No such file or directory" ]
}

@test "plans: the 4096 ranks of a cluster are planned in little memory" {
    large() { train llama-405b --dry-run --mesh dp=32,tp=8,pp=16 --batch-size 1 --seq-len 8192 --dtype bf16 --gradient-accumulation-steps 1024 "$@"; }
    (ulimit -v 2000000; large --json > plan)
    holds plan '.ranks == 4096 and .lists == 128 and ([.each_rank[].ranks] | add) == 4096 and .parameters == 405853388800'
    holds plan '(has("fits") or has("memory_free")) | not' # this machine has one of them
    holds plan '(15 / (32 + 15)) as $even | .bubble > 0.99 * $even and .bubble < 1.03 * $even'
    large > table
    grep -q '^4096 ranks are more than one machine has: nothing was compared$' table
}

# built NAME: m is a model of the preset with the small vocabulary, about what inspect-model says of it
built() {
    init-model -q -f "$1" -t tokenizer.json -o m
    inspect-model --json m > about
}

@test "plans: inspect-model: architecture, parameters, bytes, and how many are active in a token" {
    for name in $(miniatures); do
        built "$name"
        inspect-model --verify m > verified
        jq -s '.[0] + {config: .[1]}' about m/config.json > both
        holds both '.model_type == .config.model_type and .architecture == .config.architectures[0]'
        holds both '.bytes == 4 * .parameters and ([.tensors[].parameters] | add) == .parameters and .dtypes.F32.bytes == .bytes'
        # Each layer of experts leaves all but those of a token out; a token reads one row of an embedding that is no head.
        holds both '.config as $c | ($c.num_local_experts // $c.num_experts // $c.n_routed_experts // 0) as $n |
            ($n == 0) == (.active_parameters == null)'
        inspect-model m > text
        if jq -e .active_parameters about > /dev/null; then
            jq -e '.active_parameters < 0.7 * .parameters' about
            grep -q '^  active  .* in a token$' text
        else
            run ! grep -q '^  active' text
        fi
        grep -q "^  model      $(jq -r '"\(.model_type) (\(.architecture))"' about)$" text
        rm -r m
    done
}

@test "plans: inspect-model: active parameters of mixtures are counted by hand" {
    small=(-t tokenizer.json --set hidden_size=32 --set num_hidden_layers=3 --set num_attention_heads=4)
    active() { # PRESET IDLE KEY=VALUE ...: the parameters but so many
        local set=() kv
        for kv in "${@:3}"; do set+=(--set "$kv"); done
        name=$1
        init-model -q -f "$1" "${small[@]}" "${set[@]}" -o m
        inspect-model --json m > about
        holds about ".active_parameters == .parameters - (.mtp_stored // 0) - $2"
    }
    active mixtral-13m $((3 * 5 * 3 * 32 * 20)) num_key_value_heads=2 intermediate_size=20 num_local_experts=8 num_experts_per_tok=3
    active qwen2-moe-13m $((3 * 4 * 3 * 32 * 20)) num_key_value_heads=2 num_experts=6 num_experts_per_tok=2 \
        moe_intermediate_size=20
    active qwen3-moe-13m $((2 * 6 * 3 * 32 * 20)) num_key_value_heads=2 num_experts=8 num_experts_per_tok=2 \
        moe_intermediate_size=20 mlp_only_layers='[1]'
    active gpt-oss-12m $((3 * 3 * (3 * 32 * 20 + 2 * 20 + 32))) num_key_value_heads=2 intermediate_size=20 num_local_experts=4 \
        num_experts_per_tok=1
    active dots1-12m $((2 * 5 * 3 * 32 * 20)) num_key_value_heads=2 n_routed_experts=8 num_experts_per_tok=3 n_group=1 \
        topk_group=1 moe_intermediate_size=20 first_k_dense_replace=1
    active deepseek-v3-12m $((2 * 6 * 3 * 32 * 20)) num_key_value_heads=4 n_routed_experts=8 num_experts_per_tok=2 \
        moe_intermediate_size=20 first_k_dense_replace=1
}

@test "plans: peft-tune, align-model and merge-models --dry-run, and what they refuse" {
    for name in $(miniatures); do
        built "$name"
        merge-models -m linear m m --dry-run --json -o x > merged
        holds merged ".parameters == $(jq .parameters about) and .tensor_count == $(jq .tensor_count about)"
        if [[ $name == bert* || $name == t5* ]]; then
            for tool in "peft-tune m t.jsonl" "align-model m pairs.jsonl --loss dpo"; do
                # shellcheck disable=SC2086
                run -2 $tool --dry-run -o x
                [ "${#lines[@]}" -eq 1 ]
            done
            continue
        fi
        peft-tune -q m t.jsonl --dry-run --json --seq-len 32 --dtype f32 -o x > tuned
        holds tuned '.fits and .memory["frozen (f32)"] > 4 * .memory["trained (f32 master)"] and ([.memory[]] | add) == .memory_total'
        align-model -q m pairs.jsonl --loss dpo --dry-run --json --seq-len 32 --dtype f32 -o x > aligned
        holds aligned ".fits and .parameters == $(jq '.parameters - ((.mtp_stored // 0) - (.mtp_parameters // 0))' about)"
        holds aligned '([.memory[]] | add) == .memory_total'
    done
    [ ! -e x ]
}

@test "plans: the memory that training uses is that of the plan" {
    plain_memory train
    low=0
    for name in $(miniatures | grep -Ev '^(bert|t5|llama-1m)'); do
        built "$name"
        low=$((1 - low))
        args=(--batch-size 2 --seq-len 32 --dtype "$([ $low -eq 1 ] && echo f32 || echo bf16)" --eval-every 2 --val data/train)
        train m --dry-run --json "${args[@]}" > plan
        train -q m data -o run -f --peak-tflops 0 --steps 2 --no-history "${args[@]}" --json > ran
        # Of the program itself the plan counts up to 8 MiB that runs so small do not have.
        jq -s --arg name "$name ${args[*]}" -e '(.[0].memory_total) as $p | (.[1].peak_memory_bytes) as $u |
            if $u < 1.05 * $p and $u > 0.95 * $p - 8 * 1048576 then true else "\($name): planned \($p), used \($u)" | error end' plan ran
        rm -r m run
    done
}
