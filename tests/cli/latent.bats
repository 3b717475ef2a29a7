#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Latent attention (DeepSeek-V2 and V3) in every tool that computes.

setup() {
    cd "$BATS_TEST_TMPDIR" || return
    for i in {1..60}; do
        echo "{\"text\":\"the river ran by the old bridge $i and the stones lay in the water\"}"
    done > t.jsonl
    train-tokenizer -q -V 300 -o tokenizer.json t.jsonl
    shard-data -q --tokenizer tokenizer.json -o data t.jsonl
}

small() { # OUT [KEY=VALUE ...]: of DeepSeek-V3, or of the preset in $from
    local out=$1 set=()
    shift
    for kv in hidden_size=32 intermediate_size=48 num_hidden_layers=2 num_attention_heads=4 num_key_value_heads=4 \
        kv_lora_rank=20 qk_nope_head_dim=12 qk_rope_head_dim=8 v_head_dim=10 n_routed_experts=8 num_experts_per_tok=2 \
        moe_intermediate_size=16 first_k_dense_replace=1 "$@"; do
        set+=(--set "$kv")
    done
    init-model -q -f "${from:-deepseek-v3-12m}" -t tokenizer.json "${set[@]}" -o "$out"
}

loss() {
    eval-model -q "$@" t.jsonl --seq-len 32 --json | sed -E 's/.*"loss":([0-9.]+).*/\1/'
}

@test "latent attention: V2 and V3 train, and resume to the bit" {
    small v3 q_lora_rank=14
    from=deepseek-v2-lite small v2
    from=deepseek-v2-lite small groups q_lora_rank=14 topk_method=group_limited_greedy n_group=4 topk_group=2
    for m in v3 v2 groups; do
        args=(--batch-size 2 --seq-len 32 --lr 3e-3 --lr-schedule constant --save-every 4)
        train -q "$m" data -o "$m-8" --steps 8 "${args[@]}"
        train -q "$m" data -o "$m-4" --steps 4 "${args[@]}"
        train -q --resume "$m-4" --steps 8
        inspect-model --check "$m-8" "$m-4" > /dev/null
        awk -v a="$(loss "$m")" -v b="$(loss "$m-8")" 'BEGIN { exit !(b < a - 0.3) }'
        train -q "$m" data -o "$m-again" --steps 8 "${args[@]}" --recompute full
        inspect-model --check "$m-8" "$m-again" > /dev/null
    done
}

@test "latent attention: greedy texts from the cache of latents are those of one by one, and of an adapter merged" {
    small m q_lora_rank=14
    train -q m data -o run --steps 30 --batch-size 2 --seq-len 32 --lr 3e-3
    generate -q run -p "the river" -n 12 --temperature 0 > a
    generate -q run -p "the old bridge" -n 12 --temperature 0 > b
    generate -q run --serve-batch 2 -p "the river" -p "the old bridge" -n 12 --temperature 0 > both
    cat a b | cmp - both
    # An adapter on all projections: merged, and beside the base, where keys and values of heads are kept instead.
    peft-tune -q run t.jsonl -o adapter --steps 20 --seq-len 32 --lr 3e-3 --target q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj
    merge-models -q --method passthrough run+adapter -o merged
    awk -v a="$(loss run --adapter adapter)" -v b="$(loss merged)" 'BEGIN { d = a - b; exit !(d < 1e-5 && d > -1e-5) }'
    generate -q merged -p "the river" -n 12 --temperature 0 > whole
    generate -q run --adapter adapter -p "the river" -n 12 --temperature 0 | cmp - whole
}

@test "latent attention: what caches of latents cannot do is refused" {
    small m q_lora_rank=14
    run generate -q m -p "the river" -n 4 --kv int8
    [ "$status" -eq 2 ]
    [[ "$output" == *"layer 0 keeps latents, which have no coded form and no policy"* ]]
    run generate -q m -p "the river" -n 4 --save-cache c
    [ "$status" -eq 2 ]
    [[ "$output" == *"keeps a latent of each token, not keys and values"* ]]
    run peft-tune -q m t.jsonl -o p --steps 2 --seq-len 32 --method prefix
    [ "$status" -eq 2 ]
    [[ "$output" == *"keeps a latent of each token, not keys and values"* ]]
}

@test "latent attention: a bias of a router that is not a number is named" {
    small m q_lora_rank=14
    cp -rL m bad
    begin=$(od -An -tu8 -N8 bad/model.safetensors | tr -d ' ')
    head -c $((begin + 8)) bad/model.safetensors | tail -c "$begin" > header
    at=$(jq '."model.layers.1.mlp.gate.e_score_correction_bias".data_offsets[0]' header)
    printf '\0\0\300\177' | dd of=bad/model.safetensors bs=1 seek=$((begin + 8 + at + 4 * 5)) conv=notrunc status=none
    for tool in "train -q bad data -o run --steps 2 --seq-len 32" "eval-model -q bad t.jsonl --seq-len 32" \
        "generate -q bad -p river -n 2"; do
        # shellcheck disable=SC2086
        run $tool
        [ "$status" -eq 4 ]
        [[ "$output" == *'"model.layers.1.mlp.gate.e_score_correction_bias" holds a NaN of expert 5'* ]]
    done
}

@test "latent attention: keys that contradict each other" {
    small m q_lora_rank=14
    refused() { # KEY VALUE TEXT
        cp -rL m bad && jq ".$1 = $2" m/config.json > c && cp c bad/config.json
        run train -q bad data -o run --steps 1 --seq-len 32
        rm -r bad
        [ "$status" -eq 1 ]
        [[ "$output" == *"$3"* ]] || { echo "$output"; false; }
    }
    refused scoring_func '"softmax"' '"scoring_func" is "softmax", but the model has "sigmoid"'
    refused num_key_value_heads 2 '"num_key_value_heads" is 2, but other keys make it 4'
    refused qk_head_dim 32 '"qk_head_dim" is 32, but other keys make it 20'
    refused v_head_dim 21 'v_head_dim'
    refused kv_lora_rank 24 'kv_a_layernorm.weight'
    refused n_shared_experts null 'mlp.shared_experts.down_proj.weight" does not belong'
}

@test "latent attention: to GGUF and back, from its metadata alone, and in blocks" {
    small m num_nextn_predict_layers=0 q_lora_rank=14 rms_norm_eps=1e-6 'rope_scaling={"type":"yarn","factor":4,"original_max_position_embeddings":64,"mscale":0.7,"mscale_all_dim":0.7}'
    from=deepseek-v2-lite small v2 rope_scaling=null
    for m in m v2; do
        convert-model -q $m -o $m.gguf
        convert-model -q $m.gguf -o $m-back
        inspect-model --check $m $m-back > /dev/null
        cmp $m/config.json $m-back/config.json
        awk -v a="$(loss $m)" -v b="$(loss $m.gguf)" 'BEGIN { d = a - b; exit !(d < 1e-6 && d > -1e-6) }'
        convert-model -q $m -o bare.gguf -f --no-originals
        convert-model -q bare.gguf -o $m-made
        awk -v a="$(loss $m)" -v b="$(loss $m-made)" 'BEGIN { d = a - b; exit !(d < 1e-6 && d > -1e-6) }'
        convert-model -q $m -o - --type q8_0 | cat > $m-q8.gguf
        generate -q $m-q8.gguf -p "the river" -n 2 --temperature 0 > /dev/null
    done
    [ "$(jq .model_type v2-made/config.json)" = '"deepseek_v2"' ]
    # A file whose metadata count fewer layers than it has.
    key=deepseek2.block_count
    at=$(grep -obUa -m1 $key bare.gguf | head -n 1 | cut -d: -f1)
    printf '\001' | dd of=bare.gguf bs=1 seek=$((at + ${#key} + 4)) conv=notrunc status=none
    for tool in "convert-model bare.gguf -o fewer" "eval-model bare.gguf t.jsonl"; do
        run $tool
        [[ "$status" -ne 0 && "$output" == *"bare.gguf: tensor 'blk.1."*"' is unknown to the architecture "* ]]
    done
    [ ! -e fewer ]
    # What llama.cpp computes otherwise is refused or said.
    small bias q_lora_rank=14 attention_bias=true
    small halves q_lora_rank=14 rope_interleave=false
    small far q_lora_rank=14 'rope_scaling={"type":"yarn","factor":4,"original_max_position_embeddings":64,"mscale":0.7,"mscale_all_dim":1}'
    for m in bias halves far; do
        run convert-model -q $m -o x.gguf
        [ "$status" -eq 2 ]
        [[ "$output" == "convert-model: $m: GGUF's deepseek2 has no "* ]]
        [ ! -e x.gguf ]
    done
    from=deepseek-v2-lite small groups topk_method=group_limited_greedy n_group=4 topk_group=2 rope_scaling=null
    run convert-model groups -o groups.gguf
    [[ "$status" -eq 0 && "$output" == *"chooses groups of experts by their two best, not by their best"* ]]
}
