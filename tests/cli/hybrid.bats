#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# lm_hybrid: layers with an attention of their own, in every tool that computes.

setup() {
    cd "$BATS_TEST_TMPDIR" || return
    for i in {1..60}; do
        echo "{\"text\":\"the river ran by the old bridge $i and the stones lay in the water\"}"
    done > t.jsonl
    train-tokenizer -q -V 300 -o tokenizer.json t.jsonl
    small=(-t tokenizer.json --set num_hidden_layers=2 --set hidden_size=64 --set intermediate_size=96
        --set max_position_embeddings=512)
}

# make KIND KIND ARGUMENT...: a model of two layers
make() {
    init-model -q hybrid-5m "${small[@]}" --set "layer_types=[\"$1\",\"$2\"]" "${@:3}"
}

loss() {
    eval-model -q "$@" t.jsonl --seq-len 128 --json | sed -E 's/.*"loss":([0-9.]+).*/\1/'
}

@test "hybrid: layers of full attention are Llama's, and those with a window Mistral's" {
    make full_attention full_attention -o full
    init-model -q llama-5m "${small[@]}" -o llama
    [ "$(loss full)" = "$(loss llama)" ]
    make sliding_attention sliding_attention --set sliding_window=7 -o near
    init-model -q mistral-7b "${small[@]}" --set num_attention_heads=4 --set num_key_value_heads=4 --set head_dim=16 \
        --set sliding_window=7 --set tie_word_embeddings=true --set rope_theta=10000 -o mistral
    [ "$(loss near)" = "$(loss mistral)" ]
    [ "$(loss near)" != "$(loss full)" ]
}

@test "hybrid: trains, resumes to the bit, and generates alike from pages and in one piece" {
    make sliding_attention full_attention --set sliding_window=7 -o m
    shard-data -q --tokenizer tokenizer.json -o data t.jsonl
    args=(--batch-size 4 --seq-len 128 --lr 1e-2 --lr-schedule constant --save-every 10)
    train -q m data -o r20 --steps 20 "${args[@]}"
    train -q m data -o r10 --steps 10 "${args[@]}"
    train -q --resume r10 --steps 20
    inspect-model --check r20 r10 > /dev/null
    awk -v a="$(loss m)" -v b="$(loss r20)" 'BEGIN { exit !(b < a - 1) }'
    generate -q r20 -p "the river" -n 12 --temperature 0 > a
    generate -q r20 -p "the old bridge" -n 12 --temperature 0 > b
    generate -q r20 --serve-batch 2 -p "the river" -p "the old bridge" -n 12 --temperature 0 > both
    cat a b | cmp - both
}

@test "hybrid: wrong types of layers are refused in one line" {
    check() {
        run init-model -q hybrid-5m "${small[@]}" "${@:2}" -o bad
        [ "$status" -ne 0 ]
        [ "${#lines[@]}" -eq 1 ]
        [[ "$output" == *"$1"* ]] || { echo "$output"; false; }
    }
    check '"layer_types": is not a list with one entry for each layer' --set layer_types=null
    check '"layer_types": is not a list with one entry for each layer' --set 'layer_types=["full_attention"]'
    check '"layer_types": is not a list with one entry for each layer' --set layer_types=full_attention
    check 'layer 1 has the unknown type "soft": full_attention' --set 'layer_types=["full_attention","soft"]'
    check 'layer 0 has the unknown type ""' --set 'layer_types=[1,"full_attention"]'
    check '"sliding_window": is not given, but a layer is of the type sliding_attention' \
        --set 'layer_types=["full_attention","sliding_attention"]' --set sliding_window=null
    check 'sliding_window' --set 'layer_types=["full_attention","sliding_attention"]' --set sliding_window=0
    # What kinds have that no layer is of.
    for wrong in 'linear_attention={"feature":"relu"}' linear_attention=7 block_sparse_attention=64 gaussian_window=near \
        sliding_window=0; do
        check "${wrong%%=*}" --set 'layer_types=["full_attention","full_attention"]' --set "$wrong"
    done
    [ ! -e bad ]
}

@test "hybrid: has no GGUF" {
    make full_attention full_attention -o m
    run convert-model m -o m.gguf
    [ "$status" -ne 0 ]
    [ "${#lines[@]}" -eq 1 ]
    [[ "$output" == *lm_hybrid* ]]
    [ ! -e m.gguf ]
}

@test "hybrid: methods of adapters that change a few modules change those that they change in a Llama" {
    make sliding_attention full_attention --set sliding_window=7 -o m
    peft-tune -q m t.jsonl -o a --method ia3 --steps 2 --batch-size 2 --seq-len 64
    grep -aq 'layers.1.self_attn.v_proj' a/adapter_model.safetensors
    grep -aq 'layers.1.mlp.down_proj' a/adapter_model.safetensors
    run ! grep -aq 'layers.1.self_attn.q_proj' a/adapter_model.safetensors
}

@test "block-sparse: blocks that cover everything are full attention, others are not; decoding and packing agree" {
    kind=block_sparse_attention
    for i in {1..9}; do # texts of several blocks, which are counted in each
        printf '{"text":"'
        for j in {1..12}; do
            printf 'the river %d ran by the old bridge %d and the stones lay in the water. ' "$((i * j))" "$j"
        done
        echo '"}'
    done > long.jsonl
    mv long.jsonl t.jsonl
    make full_attention full_attention -o full
    object='block_sparse_attention={"block_size":16,"local_blocks":8}'
    make $kind $kind --set "$object" -o all
    [ "$(loss all)" = "$(loss full)" ]
    object='block_sparse_attention={"block_size":16,"local_blocks":1,"global_blocks":1,"vert_stride":3}'
    make $kind $kind --set "$object" -o m
    [ "$(loss m)" != "$(loss full)" ]

    shard-data -q --tokenizer tokenizer.json -o data t.jsonl
    args=(--batch-size 4 --seq-len 128 --lr 1e-2 --lr-schedule constant --save-every 10)
    train -q m data -o r20 --steps 20 "${args[@]}"
    train -q m data -o r10 --steps 10 "${args[@]}"
    train -q --resume r10 --steps 20
    inspect-model --check r20 r10 > /dev/null
    awk -v a="$(loss m)" -v b="$(loss r20)" 'BEGIN { exit !(b < a - 1) }'
    generate -q r20 -p "the river" -n 90 --temperature 0 --ignore-eos > a
    generate -q r20 -p "the old bridge" -n 90 --temperature 0 --ignore-eos > b
    generate -q r20 --serve-batch 2 -p "the river" -p "the old bridge" -n 90 --temperature 0 --ignore-eos > both
    cat a b | cmp - both
}

@test "block-sparse: coded caches and policies are refused before anything runs; other layers are coded" {
    make block_sparse_attention full_attention --set 'block_sparse_attention={"block_size":16,"local_blocks":2}' -o m
    for kv in int8 k=int8,v=int4 kivi:bits=4,residual=64 layers.0=int8 snapkv streaming:window=16 h2o:keep=0.5 random:keep=0.5 \
        kvmerge:keep=0.5 snapkv:capacity=8,window=4+int8; do
        for how in "" "--serve-batch 2"; do
            [[ -n $how && $kv =~ ^(snapkv|streaming|h2o|random|kvmerge) ]] && continue # refused with any model
            # shellcheck disable=SC2086
            run generate m -p "the river" -n 4 --kv "$kv" $how
            [ "$status" -eq 2 ]
            [ "${#lines[@]}" -eq 1 ]
            [[ "$output" == *"layer 0 has block-sparse attention, which reads plain caches of all tokens alone"* ]]
        done
    done
    generate -q m -p "the river" -n 4 --kv 'layers.1=int8' > /dev/null
    # Plain ones have files.
    text="the river ran by the old bridge 7 and the stones lay in the water by the old bridge"
    generate -q m -p "$text" -n 6 -T 0 --ignore-eos --dtype f32 > whole
    generate -q m -p "$text" -n 0 --dtype f32 --save-cache c.kv
    generate -q m --load-cache c.kv -p ' the' -n 6 -T 0 --ignore-eos --dtype f32 > /dev/null
    generate -q m -p "$text" -n 2 -T 0 --ignore-eos --dtype f32 --save-cache d.kv > begin
    generate -q m --load-cache d.kv -p '' -n 4 -T 0 --ignore-eos --dtype f32 > end
    [ "$(cat whole)" = "$(cat begin)$(cat end)" ]
}

@test "block-sparse: wrong keys are refused in one line" {
    check() {
        run init-model -q block-sparse-5m -t tokenizer.json --set "$2" -o bad
        [ "$status" -ne 0 ]
        [ "${#lines[@]}" -eq 1 ]
        [[ "$output" == *"$1"* ]] || { echo "$output"; false; }
    }
    check '"block_sparse_attention": is not given' block_sparse_attention=null
    check '"block_sparse_attention": is not an object' block_sparse_attention=64
    check 'block_size' block_sparse_attention.block_size=0
    check '"block_size": 24 is not a multiple of 16' block_sparse_attention.block_size=24
    check 'block_size' block_sparse_attention.block_size=1e30
    check 'block_size' block_sparse_attention.block_size=null
    check 'local_blocks' block_sparse_attention.local_blocks=0
    check 'global_blocks' block_sparse_attention.global_blocks=-1
    check 'vert_stride' block_sparse_attention.vert_stride=1.5
    check 'vert_stride' block_sparse_attention.vert_stride=99999999999
    check 'homo_head' block_sparse_attention.homo_head=1
    check 'block_size' block_sparse_attention.block_size='"16"'
    check 'unknown key "blocksize"' 'block_sparse_attention={"blocksize":16,"local_blocks":1}'
    [ ! -e bad ]
}
