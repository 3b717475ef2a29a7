#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Models most of whose layers keep a state in place of keys and values (Qwen3-Next), in every tool that computes.

setup() {
    cd "$BATS_TEST_TMPDIR" || return
    for i in {1..60}; do
        echo "{\"text\":\"the river ran by the old bridge $i and the stones lay in the water\"}"
    done > t.jsonl
    train-tokenizer -q -V 300 -o tokenizer.json t.jsonl
    shard-data -q --tokenizer tokenizer.json -o data t.jsonl
    args=(--batch-size 2 --seq-len 32 --lr 3e-3)
}

small() { # OUT [KEY=VALUE ...]
    local out=$1 set=()
    shift
    for kv in hidden_size=32 num_hidden_layers=2 full_attention_interval=2 num_attention_heads=2 num_key_value_heads=1 \
        head_dim=16 linear_key_head_dim=8 linear_value_head_dim=8 linear_num_key_heads=2 linear_num_value_heads=4 \
        num_experts=4 moe_intermediate_size=16 shared_expert_intermediate_size=24 tie_word_embeddings=false "$@"; do
        set+=(--set "$kv")
    done
    init-model -q -f qwen3-next-12m -t tokenizer.json "${set[@]}" -o "$out"
}

loss() {
    eval-model -q "$@" t.jsonl --seq-len 32 --json | sed -E 's/.*"loss":([0-9.]+).*/\1/'
}

@test "states: a model trains, resumes to the bit, in BF16 too, with recomputation and any number of threads" {
    small m
    train -q m data -o r8 --steps 8 --lr-schedule constant --save-every 4 "${args[@]}"
    train -q m data -o r4 --steps 4 --lr-schedule constant --save-every 4 "${args[@]}"
    train -q --resume r4 --steps 8
    inspect-model --check r8 r4 > /dev/null
    train -q m data -o full --steps 8 --lr-schedule constant --recompute full -j 1 "${args[@]}"
    inspect-model --check r8 full > /dev/null
    awk -v a="$(loss m)" -v b="$(loss r8)" 'BEGIN { exit !(b < a - 0.3) }'
    awk -v a="$(loss r8)" -v b="$(loss r8 --dtype bf16)" 'BEGIN { d = a - b; exit !(d < 0.02 && d > -0.02) }'
}

@test "states: greedy texts are those of one by one in batches, with shared beginnings, and with coded keys and values" {
    small m
    train -q m data -o run --steps 30 "${args[@]}"
    generate -q run -p "the river" -n 12 --temperature 0 > a
    generate -q run -p "the old bridge" -n 12 --temperature 0 > b
    cat a b > want
    generate -q run --serve-batch 2 -p "the river" -p "the old bridge" -n 12 --temperature 0 > both
    cmp want both
    generate -q run -b 2 -p "the river" -p "the old bridge" -n 12 --temperature 0 > beside
    cmp want beside
    generate -q run --kv int8 -p "the river" -n 12 --temperature 0 > coded
    cmp a coded
}

@test "states: adapters of all products train, are merged, and generate as the merged model" {
    small m
    train -q m data -o run --steps 20 "${args[@]}"
    peft-tune -q run t.jsonl -o adapter --steps 10 --seq-len 32 --lr 3e-3 \
        --target in_proj_qkvz,in_proj_ba,out_proj,q_proj,k_proj,v_proj,o_proj
    grep -q in_proj_qkvz adapter/adapter_config.json
    merge-models -q --method passthrough run+adapter -o merged
    awk -v a="$(loss run --adapter adapter)" -v b="$(loss merged)" 'BEGIN { d = a - b; exit !(d < 1e-5 && d > -1e-5) }'
    generate -q run --adapter adapter -p "the river" -n 8 --temperature 0 > a
    generate -q merged -p "the river" -n 8 --temperature 0 > b
    cmp a b
}

@test "states: merged, compressed and converted models are those that they were" {
    small a
    small b initializer_range=0.03
    merge-models -q -m linear a:0.25 a:0.75 -o same
    inspect-model --check a same > /dev/null
    merge-models -q -m slerp --base b --t 0.5 a -o between
    inspect-model between > /dev/null
    compress-ckpt -q a -o a.lmz
    compress-ckpt -q -d a.lmz -o back
    inspect-model --check a back > /dev/null
    convert-model -q a -o a.gguf
    awk -v a="$(loss a)" -v b="$(loss a.gguf)" 'BEGIN { d = a - b; exit !(d < 1e-5 && d > -1e-5) }'
    convert-model -q a.gguf -o a-back
    awk -v a="$(loss a)" -v b="$(loss a-back)" 'BEGIN { d = a - b; exit !(d < 1e-5 && d > -1e-5) }'
    cmp a/config.json a-back/config.json
    convert-model -q a.gguf -o a-bare.gguf --no-originals || convert-model -q a -o a-bare.gguf --no-originals
    convert-model -q a-bare.gguf -o a-made
    awk -v a="$(loss a)" -v b="$(loss a-made)" 'BEGIN { d = a - b; exit !(d < 1e-5 && d > -1e-5) }'
    convert-model -q a -o a-q8.gguf --type q8_0
    generate -q a-q8.gguf -p "the river" -n 2 --temperature 0 > /dev/null
}

@test "states: what cannot be done is one line" {
    small m
    small dense mlp_only_layers='[0]'
    run convert-model dense -o dense.gguf
    [ "$status" -eq 2 ]
    [[ "$output" == *"GGUF's qwen3next has no layers without experts"* ]]
    run generate m -p "the river" -n 2 --save-cache c
    [ "$status" -eq 2 ]
    [ "$output" = "generate: --save-cache: the model keeps states of layers, for which files have no place: give the text again" ]
    run generate m -p "the river" -n 2 --kv h2o:keep=0.5
    [ "$status" -eq 2 ]
    [[ "$output" == *"layers that keep a state of all"* ]]
    run peft-tune m t.jsonl -o prefix --method prefix --steps 1 --seq-len 32
    [ "$status" -eq 2 ]
    [[ "$output" == *"layers of the base keep states"* ]]
    run init-model -q qwen3-next-12m --set linear_num_key_heads=3 --dry-run
    [ "$status" -eq 2 ]
    [[ "$output" == *"linear_num_key_heads 3 does not divide linear_num_value_heads 8"* ]]
}
