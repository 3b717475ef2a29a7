#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Mixtures of experts in every tool that computes.

setup() {
    cd "$BATS_TEST_TMPDIR" || return
    for i in {1..60}; do
        echo "{\"text\":\"the river ran by the old bridge $i and the stones lay in the water\"}"
    done > t.jsonl
    train-tokenizer -q -V 300 -o tokenizer.json t.jsonl
    shard-data -q --tokenizer tokenizer.json -o data t.jsonl
}

small() { # PRESET OUT [KEY=VALUE ...]
    local preset=$1 out=$2 set=()
    shift 2
    for kv in hidden_size=32 num_hidden_layers=2 num_attention_heads=4 num_key_value_heads=2 "$@"; do
        set+=(--set "$kv")
    done
    init-model -q -f "$preset" -t tokenizer.json "${set[@]}" -o "$out"
}

loss() {
    eval-model -q "$@" t.jsonl --seq-len 32 --json | sed -E 's/.*"loss":([0-9.]+).*/\1/'
}

@test "mixtures: each architecture trains, and resumes to the bit" {
    small mixtral-8x7b mixtral intermediate_size=24
    small qwen1.5-moe-14b qwen2 num_experts=6 num_experts_per_tok=2 moe_intermediate_size=16 shared_expert_intermediate_size=20
    small qwen3-moe-13m qwen3 head_dim=16 moe_intermediate_size=24
    for m in mixtral qwen2 qwen3; do
        args=(--batch-size 2 --seq-len 32 --lr 3e-3 --lr-schedule constant --save-every 4)
        train -q "$m" data -o "$m-8" --steps 8 "${args[@]}"
        train -q "$m" data -o "$m-4" --steps 4 "${args[@]}"
        train -q --resume "$m-4" --steps 8
        inspect-model --check "$m-8" "$m-4" > /dev/null
        awk -v a="$(loss "$m")" -v b="$(loss "$m-8")" 'BEGIN { exit !(b < a - 0.3) }'
    done
}

@test "mixtures: the same loss in BF16 within its rounding, with recomputation, and for any number of threads" {
    small qwen3-moe-13m m head_dim=16 moe_intermediate_size=24
    train -q m data -o run --steps 30 --batch-size 2 --seq-len 32 --lr 3e-3
    one=$(loss run)
    [ "$(loss run -j 1)" = "$one" ]
    awk -v a="$one" -v b="$(loss run --dtype bf16)" 'BEGIN { d = a - b; exit !(d < 0.02 && d > -0.02) }'
    train -q m data -o full --steps 30 --batch-size 2 --seq-len 32 --lr 3e-3 --recompute full
    inspect-model --check run full > /dev/null
}

@test "mixtures: greedy texts are those of one by one, and of an adapter merged" {
    small qwen1.5-moe-14b m num_experts=6 num_experts_per_tok=2 moe_intermediate_size=16 shared_expert_intermediate_size=20
    train -q m data -o run --steps 30 --batch-size 2 --seq-len 32 --lr 3e-3
    generate -q run -p "the river" -n 8 --temperature 0 > a
    generate -q run -p "the old bridge" -n 8 --temperature 0 > b
    generate -q run --serve-batch 2 -p "the river" -p "the old bridge" -n 8 --temperature 0 > both
    cat a b | cmp - both
    peft-tune -q run t.jsonl -o adapter --steps 20 --seq-len 32 --lr 3e-3
    merge-models -q --method passthrough run+adapter -o merged
    awk -v a="$(loss run --adapter adapter)" -v b="$(loss merged)" 'BEGIN { d = a - b; exit !(d < 1e-5 && d > -1e-5) }'
    awk -v a="$(loss run)" -v b="$(loss merged)" 'BEGIN { exit !(b < a) }'
}

# put FILE KEY BYTE: the lowest byte of the number under KEY in the GGUF file
put() {
    local at
    at=$(grep -abo "$2" "$1" | head -n 1 | cut -d: -f1)
    printf '%b' "\\x$(printf %x "$3")" | dd of="$1" bs=1 seek=$((at + ${#2} + 4)) conv=notrunc status=none
}

@test "mixtures: GGUF and back, exact; from the metadata alone and in blocks, the same losses" {
    small mixtral-8x7b mixtral intermediate_size=64
    small qwen1.5-moe-14b qwen2 num_experts=6 num_experts_per_tok=2 moe_intermediate_size=32 shared_expert_intermediate_size=64
    small qwen3-moe-13m qwen3 head_dim=16 moe_intermediate_size=32
    for m in mixtral qwen2 qwen3; do
        want=$(loss "$m")
        convert-model -q "$m" -o "$m.gguf"
        convert-model -q "$m.gguf" -o "$m-back"
        inspect-model --check "$m" "$m-back" > /dev/null
        cmp "$m/config.json" "$m-back/config.json"
        [ "$(loss "$m.gguf")" = "$want" ]
        convert-model -q "$m.gguf" -o "$m-bare.gguf" --no-originals
        convert-model -q "$m-bare.gguf" -o "$m-made"
        [ "$(loss "$m-made")" = "$want" ]
        tar -cf - -C "$m" . | convert-model -q - -o "$m-piped.gguf"
        [ "$(loss "$m-piped.gguf")" = "$want" ]
        run convert-model "$m" -o "$m-q8.gguf" --type q8_0
        [ "$output" = "" ]
        awk -v a="$want" -v b="$(loss "$m-q8.gguf")" 'BEGIN { d = a - b; exit !(a != b && d < 1e-2 && d > -1e-2) }'
    done
}

@test "mixtures: GGUF files that contradict themselves" {
    small qwen3-moe-13m m head_dim=16 moe_intermediate_size=32
    convert-model -q m -o m.gguf --no-originals
    cp m.gguf more.gguf
    put more.gguf qwen3moe.expert_count 9
    run convert-model more.gguf -o out
    [ "$status" -eq 1 ]
    [[ "$output" == *"tensor 'blk.0.ffn_gate_inp.weight' does not have the shape that the metadata require"* ]]
    cp m.gguf used.gguf
    put used.gguf qwen3moe.expert_used_count 9
    run convert-model used.gguf -o out
    [ "$status" -eq 1 ]
    [[ "$output" == *"'qwen3moe.expert_used_count' is 9, but 'qwen3moe.expert_count' is 8"* ]]
    cp m.gguf width.gguf
    put width.gguf qwen3moe.expert_feed_forward_length 31
    run convert-model width.gguf -o out
    [ "$status" -eq 1 ]
    [[ "$output" == *"tensor 'blk.0.ffn_"*"_exps.weight' does not have the shape"* ]]
    sed 's/blk\.1\.ffn_up_exps/blk.1.ffn_up_exqs/' m.gguf > gone.gguf
    run convert-model gone.gguf -o out
    [ "$status" -eq 1 ]
    [[ "$output" == *"tensor 'blk.1.ffn_up_exps.weight' is missing"* ]]
    [ ! -e out ]
}

@test "mixtures: what GGUF has no words for" {
    small qwen3-moe-13m m head_dim=16 moe_intermediate_size=32 norm_topk_prob=false
    run convert-model m -o m.gguf
    [ "$status" -eq 2 ]
    [[ "$output" == *"GGUF's qwen3moe has no weights of a token's experts as they are (norm_topk_prob false)"* ]]
    small qwen3-moe-13m some head_dim=16 moe_intermediate_size=32 decoder_sparse_step=2
    run convert-model some -o m.gguf
    [ "$status" -eq 2 ]
    [[ "$output" == *"has no layers of different sizes"* ]]
    [ ! -e m.gguf ]
}

@test "mixtures: what is refused" {
    small qwen3-moe-13m m head_dim=16 moe_intermediate_size=24
    for target in gate_proj gate; do
        run peft-tune m t.jsonl -o a --steps 1 --seq-len 32 --target "$target"
        [ "$status" -eq 2 ]
        [[ "$output" == *"belongs to the experts of a mixture"* ]]
        [ ! -e a ]
    done
    sed -i 's/"num_experts_per_tok": 2/"num_experts_per_tok": 9/' m/config.json
    run eval-model m t.jsonl
    [ "$status" -eq 1 ]
    [[ "$output" == *'"num_experts_per_tok" is 9, but "num_experts" is 8'* ]]
}

@test "mixtures: an expert that is missing is named" {
    small qwen3-moe-13m m head_dim=16 moe_intermediate_size=24
    sed -i 's/experts\.7\.up_proj/experts.8.up_proj/' m/model.safetensors
    run eval-model m t.jsonl
    [ "$status" -eq 1 ]
    [[ "$output" == *"experts."*".up_proj.weight"* ]]
}
