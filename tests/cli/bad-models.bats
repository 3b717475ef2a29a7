#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Models whose tensors or keys of config.json contradict each other: every tool that computes says so in one line, which names
# the tensor or the key, and leaves nothing.
bats_require_minimum_version 1.5.0

# preset NAME OUT KEY=VALUE ...
preset() {
    local set=() kv
    for kv in hidden_size=32 num_hidden_layers=2 num_attention_heads=4 "${@:3}"; do
        set+=(--set "$kv")
    done
    init-model -q "$1" -t tokenizer.json "${set[@]}" -o "$2"
}

setup_file() {
    cd "$BATS_FILE_TMPDIR" || return
    for i in {1..60}; do
        echo "{\"text\":\"the river ran by the old bridge $i and the stones lay in the water\"}"
    done > t.jsonl
    train-tokenizer -q -V 300 -o tokenizer.json t.jsonl
    shard-data -q --tokenizer tokenizer.json -o data t.jsonl
    local latent=(num_key_value_heads=4 kv_lora_rank=20 qk_nope_head_dim=12 qk_rope_head_dim=8 v_head_dim=10 intermediate_size=48
        n_routed_experts=8 num_experts_per_tok=2 moe_intermediate_size=24 first_k_dense_replace=1)
    preset mixtral-8x7b mixtral num_key_value_heads=2 intermediate_size=24 gate_add_noise=true
    preset qwen1.5-moe-14b qwen2 num_key_value_heads=2 num_experts=6 num_experts_per_tok=2 moe_intermediate_size=24 \
        shared_expert_intermediate_size=20
    preset qwen3-moe-13m qwen3 num_key_value_heads=2 head_dim=16 moe_intermediate_size=24
    preset qwen3-next-12m next num_key_value_heads=2 full_attention_interval=2 head_dim=16 linear_key_head_dim=8 \
        linear_value_head_dim=8 linear_num_key_heads=2 linear_num_value_heads=4 num_experts=4 moe_intermediate_size=24 \
        shared_expert_intermediate_size=24
    preset deepseek-v2-lite v2 "${latent[@]}"
    preset deepseek-v3-12m v3 "${latent[@]}" q_lora_rank=14
    preset gpt-oss-12m oss num_key_value_heads=2 head_dim=16 intermediate_size=24 sliding_window=8 num_local_experts=4
    echo '{"model_type":"dots1","hidden_size":32,"intermediate_size":48,"moe_intermediate_size":24,"num_hidden_layers":2,
        "num_attention_heads":4,"num_key_value_heads":2,"n_routed_experts":8,"n_shared_experts":1,"num_experts_per_tok":2,
        "n_group":4,"topk_group":2,"first_k_dense_replace":1,"sliding_window":null,"vocab_size":300}' > dots.json
    init-model -q dots.json -t tokenizer.json -o dots
}

setup() {
    cd "$BATS_TEST_TMPDIR" || return
    ln -s "$BATS_FILE_TMPDIR"/* .
}

# copied MODEL: as bad/
copied() {
    rm -rf bad
    cp -rL "$1" bad
}

# edit ARGUMENT ...: of the tensors of bad/
edit() {
    "$BATS_TEST_DIRNAME/edit-tensors" bad/model.safetensors "$@"
}

# refused STATUS TEXT COMMAND ...: in one line
refused() {
    run "${@:3}"
    echo "${*:3}: $status: $output"
    [ "$status" -eq "$1" ]
    [ "${#lines[@]}" -eq 1 ]
    [[ $output == "$3: "*"$2"* ]]
    [ ! -e out ]
}

# refuse_all TEXT: by the tools that compute with bad/
refuse_all() {
    refused 2 "$1" eval-model -q bad t.jsonl --seq-len 32
    refused 2 "$1" train -q bad data -o out --steps 1 --seq-len 32
    refused 2 "$1" generate -q bad -p "the river" -n 2
}

# shape MODEL TENSOR HAS REQUIRED ACTION: the model with the tensor changed
shape() {
    copied "$1"
    edit "$2" "$5"
    refuse_all "tensor \"$2\" has shape [$3], config.json requires [$4]"
    refused 2 "tensor '$2' has the shape [$3], the config requires [$4]" convert-model -q bad --to gguf -o out
    run -3 inspect-model --verify bad
    [[ $output == *"$2: its shape is not the [$4] of config.json"* ]]
}

# missing MODEL TENSOR
missing() {
    copied "$1"
    edit "$2" gone
    refuse_all "tensor \"$2\" is missing"
    refused 2 "tensor '$2' is missing" convert-model -q bad --to gguf -o out
    run -3 inspect-model --verify bad
    [[ $output == *"$2: is missing"* ]]
}

@test "bad models: biases of routers and experts of another length, and without one" {
    bias=model.layers.1.mlp.gate.e_score_correction_bias
    for m in v3 dots; do
        shape $m $bias 7 8 short
        shape $m $bias 9 8 long
    done
    missing v3 $bias
    shape oss model.layers.0.mlp.router.bias 3 4 short
    shape oss model.layers.1.mlp.experts.gate_up_proj_bias 5,48 4,48 long
}

@test "bad models: sinks of another number of heads" {
    shape oss model.layers.1.self_attn.sinks 3 4 short
    copied oss
    jq '.num_attention_heads = 2 | .num_key_value_heads = 1 | .head_dim = 32' oss/config.json > bad/config.json
    refuse_all 'tensor "model.layers.0.self_attn.sinks" has shape [4], config.json requires [2]'
}

@test "bad models: experts in another order than that of the architecture" {
    shape oss model.layers.1.mlp.experts.gate_up_proj 4,48,32 4,32,48 turn
    shape oss model.layers.0.mlp.experts.down_proj 4,32,24 4,24,32 turn
    shape mixtral model.layers.0.block_sparse_moe.experts.3.w2.weight 24,32 32,24 turn
    for m in qwen2 qwen3 next v2 v3 dots; do
        shape $m model.layers.1.mlp.experts.3.up_proj.weight 32,24 24,32 turn
    done
}

@test "bad models: fused experts: in the order of gpt-oss, too few, missing, and beside others" {
    all=model.layers.1.mlp.experts
    loss() { eval-model -q "$1" t.jsonl --seq-len 32 --json | jq .loss; }
    for m in qwen2 qwen3 next v2 v3 dots; do
        copied $m
        edit $all fuse
        [ "$(loss bad)" = "$(loss $m)" ]
        n=$(jq '.num_experts // .n_routed_experts' $m/config.json)
        edit $all.gate_up_proj turn
        refuse_all "tensor \"$all.gate_up_proj\" has shape [$n,32,48], config.json requires [$n,48,32]"
        edit $all.gate_up_proj turn
        edit $all.gate_up_proj short
        refuse_all "tensor \"$all.gate_up_proj\" has shape [$((n - 1)),48,32], config.json requires [$n,48,32]"
        edit $all.gate_up_proj gone
        refuse_all "tensor \"$all.0.gate_proj.weight\" is missing"
        copied $m
        edit $all fuse
        edit $all.2.down_proj.weight as $all.2.up_proj.weight
        refuse_all "tensor \"$all.2.up_proj.weight\""
    done
    # Fused experts of another architecture.
    copied oss
    edit model.layers.1.mlp.experts.gate_up_proj as model.layers.1.mlp.experts.0.gate_up_proj
    refuse_all 'tensor "model.layers.1.mlp.experts.0.gate_up_proj" does not belong to a gpt_oss model'
}

@test "bad models: experts that are missing in shards, in their index, or in both" {
    tensor=model.layers.1.mlp.experts.5.up_proj.weight
    index=model.safetensors.index.json
    convert-model -q qwen3 --max-shard-size 60K -o shards
    shard=$(jq -r ".weight_map.\"$tensor\"" shards/$index)
    edit_shard() { "$BATS_TEST_DIRNAME/edit-tensors" "bad/$shard" "$@"; }
    every() { # TEXT: also of tools that only copy
        refuse_all "$1"
        refused 2 "$1" inspect-model bad
        refused 2 "$1" convert-model -q bad -o out
    }
    copied shards
    rm "bad/$shard"
    every "bad/$shard: shard 4 of 4 named by $index is missing: fetch it again"
    copied shards
    edit_shard $tensor gone
    every "bad/$index: tensor '$tensor' should be in $shard, but is missing there"
    copied shards
    jq "del(.weight_map.\"$tensor\")" shards/$index > bad/$index
    every "bad/$index: tensor '$tensor' is in $shard, but not in the index"
    edit_shard $tensor gone
    refuse_all "bad: tensor \"$tensor\" is missing"
    for m in mixtral:block_sparse_moe.experts.7.w1 qwen2:mlp.shared_expert.up_proj next:mlp.shared_expert_gate \
        v2:mlp.experts.0.down_proj v3:mlp.shared_experts.gate_proj dots:mlp.experts.7.gate_proj; do
        missing "${m%%:*}" "model.layers.1.${m#*:}.weight"
    done
    missing oss model.layers.1.mlp.experts.down_proj
}

@test "bad models: more or fewer experts than the config has" {
    copied qwen3
    edit model.layers.0.mlp.experts.7.up_proj.weight as model.layers.0.mlp.experts.8.up_proj.weight
    refuse_all 'tensor "model.layers.0.mlp.experts.8.up_proj.weight" does not belong to a qwen3_moe model'
    for n in 7 9; do
        copied qwen3
        jq ".num_experts = $n" qwen3/config.json > bad/config.json
        refuse_all 'tensor "model.layers.'
    done
}

# keys MODEL CHANGE TEXT: the model whose config.json jq changes
keys() {
    copied "$1"
    jq "$2" "$1/config.json" > bad/config.json
    refuse_all "$3"
    refused 2 "${3//\"tensor/}" convert-model -q bad --to gguf -o out
}

@test "bad models: more experts of a token than there are" {
    keys mixtral '.num_experts_per_tok = 9' '"num_experts_per_tok" is 9, but "num_local_experts" is 8'
    keys qwen2 '.num_experts_per_tok = 7' '"num_experts_per_tok" is 7, but "num_experts" is 6'
    keys qwen3 '.num_experts_per_tok = 9' '"num_experts_per_tok" is 9, but "num_experts" is 8'
    keys next '.num_experts_per_tok = 5' '"num_experts_per_tok" is 5, but "num_experts" is 4'
    keys oss '.num_experts_per_tok = 5' '"num_experts_per_tok" is 5, but "num_local_experts" is 4'
    for m in v2 v3 dots; do
        keys $m '.num_experts_per_tok = 9' num_experts_per_tok
        keys $m '.num_experts_per_tok = 0' num_experts_per_tok
    done
}

@test "bad models: groups that do not divide the experts, and too few experts in them" {
    for m in v3 dots; do
        keys $m '.n_group = 3' '"n_group" is 3, but "n_routed_experts" is 8'
        keys $m '.n_group = 8' '"n_group" is 8, but "n_routed_experts" is 8' # a group's value is that of its two best
        keys $m '.n_group = 9' n_group
        keys $m '.n_group = 2 | .topk_group = 3' '"topk_group" is 3, but "n_group" is 2'
        keys $m '.n_group = 4 | .topk_group = 1 | .num_experts_per_tok = 3' \
            '"num_experts_per_tok" is 3, but "topk_group" groups have 2 experts'
    done
    keys v2 '.topk_method = "group_limited_greedy" | .n_group = 3' '"n_group" is 3, but "n_routed_experts" is 8'
    keys v2 '.topk_method = "group_limited_greedy" | .n_group = 2 | .topk_group = 3' '"topk_group" is 3, but "n_group" is 2'
}

@test "bad models: keys that contradict each other" {
    keys oss '.num_experts = 5' '"num_local_experts" is 4, but "num_experts" is 5'
    keys oss '.experts_per_token = 3' '"experts_per_token": is not num_experts_per_tok'
    keys oss '.sliding_window = null | .layer_types = ["sliding_attention", "full_attention"]' \
        '"layer_types": requires sliding attention, but there is no window'
    keys oss '.layer_types = ["full_attention"]' '"layer_types": is not a list with one entry for each layer'
    keys qwen3 '.num_local_experts = 4' '"num_experts" is 8, but "num_local_experts" is 4'
    keys qwen3 '.mlp_only_layers = [2]' '"mlp_only_layers": names a layer that does not exist'
    keys next '.linear_num_key_heads = 3' "linear_num_key_heads 3 does not divide linear_num_value_heads 4"
    keys next '.layer_types = ["linear_attention", "sliding_attention"]' '"layer_types": holds an unknown type of layer'
    keys v3 '.scoring_func = "softmax"' '"scoring_func" is "softmax", but the model has "sigmoid"'
    keys v3 '.topk_method = "greedy"' '"topk_method" is "greedy", but the model has "noaux_tc"'
    keys v2 '.scoring_func = "sigmoid"' '"scoring_func" is "sigmoid", but the model has "softmax"'
    keys v3 '.head_dim = 16' '"head_dim" is 16, but other keys make it 8'
}

# apart MODEL CHANGE TENSOR: a config.json that is whole, but that of other tensors
apart() {
    copied "$1"
    jq "$2" "$1/config.json" > bad/config.json
    refuse_all "$3"
    run -3 inspect-model --verify bad
    [[ $output == *"$3"* ]]
}

@test "bad models: sizes and parts that the tensors contradict" {
    apart qwen2 '.shared_expert_intermediate_size = 24' model.layers.0.mlp.shared_expert.
    apart qwen3 '.moe_intermediate_size = 20' model.layers.0.mlp.experts.
    apart v3 '.first_k_dense_replace = 0' model.layers.0.mlp.
    apart v3 '.n_shared_experts = 2' model.layers.1.mlp.shared_experts.
    apart next '.full_attention_interval = 1' model.layers.0.
    apart oss '.attention_bias = false' model.layers.0.self_attn.
}

@test "bad models: a NaN in a router ends training with status 4, and names layer and expert" {
    for m in mixtral:block_sparse_moe.gate qwen2:mlp.gate qwen3:mlp.gate next:mlp.gate v2:mlp.gate v3:mlp.gate dots:mlp.gate \
        oss:mlp.router; do
        name=model.layers.1.${m#*:}.weight
        copied "${m%%:*}"
        edit "$name" nan $((3 * 32 + 5))
        text="bad: tensor \"$name\" holds a NaN of expert 3 in the router of layer 1: "
        refused 4 "$text" train -q bad data -o out --steps 1 --seq-len 32
        refused 4 "$text" peft-tune -q bad t.jsonl -o out --steps 1 --seq-len 32
    done
    copied mixtral
    edit model.layers.1.block_sparse_moe.gate.weight_noise.weight nan $((2 * 32))
    refused 4 'gate.weight_noise.weight" holds a NaN of expert 2 in the router of layer 1: ' \
        train -q bad data -o out --steps 1 --seq-len 32
    copied oss
    edit model.layers.0.mlp.router.bias nan 1
    refused 4 'router.bias" holds a NaN of expert 1 in the router of layer 0: ' train -q bad data -o out --steps 1 --seq-len 32
    for m in v3 dots; do
        copied $m
        edit model.layers.1.mlp.gate.e_score_correction_bias nan 6
        refused 4 'tensor "model.layers.1.mlp.gate.e_score_correction_bias" holds a NaN of expert 6: ' \
            train -q bad data -o out --steps 1 --seq-len 32
    done
}

@test "bad models: a NaN that arises in the training of a router names layer and expert" {
    # Weights of 3e38: finite, but sums of products with them, which are the logits, are not.
    for m in qwen3:mlp.gate v3:mlp.gate oss:mlp.router; do
        name=model.layers.1.${m#*:}.weight
        for row in "2:expert 2" ":all experts"; do
            copied "${m%%:*}"
            edit "$name" fill 3e38 ${row%%:*}
            refused 4 ", first for ${row#*:} in the router of layer 1: " \
                train -q bad data -o out --steps 1 --seq-len 32 --batch-size 2 --dtype f32
        done
    done
}
