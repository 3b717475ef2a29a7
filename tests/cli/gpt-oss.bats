#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# gpt-oss in every tool that computes: sinks, windows, experts with biases.

setup() {
    cd "$BATS_TEST_TMPDIR" || return
    for i in {1..60}; do
        echo "{\"text\":\"the river ran by the old bridge $i and the stones lay in the water\"}"
    done > t.jsonl
    train-tokenizer -q -V 300 -o tokenizer.json t.jsonl
    shard-data -q --tokenizer tokenizer.json -o data t.jsonl
    init-model -q gpt-oss-12m -t tokenizer.json --set hidden_size=32 --set intermediate_size=24 --set num_hidden_layers=2 \
        --set head_dim=16 --set sliding_window=8 --set num_local_experts=4 -o m
}

loss() {
    eval-model -q "$@" t.jsonl --seq-len 32 --json | sed -E 's/.*"loss":([0-9.]+).*/\1/'
}

@test "gpt-oss: trains, resumes to the bit, generates alike from pages, takes adapters on its experts, which merge" {
    args=(--batch-size 2 --seq-len 32 --lr 3e-3 --lr-schedule constant --save-every 10)
    train -q m data -o r20 --steps 20 "${args[@]}"
    train -q m data -o r10 --steps 10 "${args[@]}"
    train -q --resume r10 --steps 20
    inspect-model --check r20 r10 > /dev/null
    awk -v a="$(loss m)" -v b="$(loss r20)" 'BEGIN { exit !(b < a - 0.3) }'
    generate -q r20 -p "the river" -n 8 --temperature 0 > a
    generate -q r20 -p "the old bridge" -n 8 --temperature 0 > b
    generate -q r20 --serve-batch 2 -p "the river" -p "the old bridge" -n 8 --temperature 0 > both
    cat a b | cmp - both
    peft-tune -q r20 t.jsonl -o adapter --steps 20 --seq-len 32 --lr 3e-3 --rank 3 \
        --target experts.gate_up_proj,experts.down_proj
    merge-models -q --method passthrough r20+adapter -o merged
    awk -v a="$(loss r20 --adapter adapter)" -v b="$(loss merged)" -v c="$(loss r20)" \
        'BEGIN { d = a - b; exit !(d < 1e-5 && d > -1e-5 && a < c) }'
}

@test "gpt-oss: sinks of another number of heads, and k above the experts, are refused with their names" {
    sed -E 's/("num_attention_heads": )4/\12/; s/("num_key_value_heads": )2/\11/; s/("head_dim": )16/\132/' m/config.json > c
    cp c m/config.json
    run eval-model -q m t.jsonl --seq-len 32
    [ "$status" -eq 2 ]
    [[ "$output" == *'tensor "model.layers.0.self_attn.sinks" has shape [4], config.json requires [2]'* ]]
    run init-model gpt-oss-12m -t tokenizer.json --set num_experts_per_tok=9 -o n
    [ "$status" -ne 0 ]
    [[ "$output" == *'"num_experts_per_tok" is 9, but "num_local_experts" is 8'* ]]
}

broken() { # TENSOR OFFSET: bad is m with a NaN at that number of the tensor
    rm -rf bad && cp -rL m bad
    begin=$(od -An -tu8 -N8 bad/model.safetensors | tr -d ' ')
    at=$(head -c $((begin + 8)) bad/model.safetensors | tail -c "$begin" | jq ".\"$1\".data_offsets[0]")
    printf '\0\0\300\177' | dd of=bad/model.safetensors bs=1 seek=$((begin + 8 + at + 4 * $2)) conv=notrunc status=none
}

@test "gpt-oss: NaN in the bias of a router names layer and expert, and a sink that is NaN is no sink of 0" {
    broken model.layers.1.mlp.router.bias 2
    run train -q bad data -o run --steps 2 --seq-len 32
    [ "$status" -eq 4 ]
    [[ "$output" == *'"model.layers.1.mlp.router.bias" holds a NaN of expert 2 in the router of layer 1'* ]]
    broken model.layers.1.self_attn.sinks 3
    run eval-model -q bad t.jsonl --seq-len 32
    [ "$status" -eq 4 ]
    for kv in auto int8; do
        run generate -q bad -p "the river" -n 4 --temperature 0 --kv $kv
        [ "$status" -eq 4 ]
    done
}

@test "gpt-oss: a single expert has biases of two dimensions, as transformers writes them" {
    init-model -q gpt-oss-12m -t tokenizer.json --set hidden_size=32 --set intermediate_size=24 --set num_hidden_layers=1 \
        --set head_dim=16 --set num_local_experts=1 --set num_experts_per_tok=1 -o one
    inspect-model one | grep -q '\[1, 32\].* model.layers.0.mlp.experts.down_proj_bias'
    inspect-model one | grep -q '\[1, 48\].* model.layers.0.mlp.experts.gate_up_proj_bias'
    inspect-model one | grep -q '\[1\].* model.layers.0.mlp.router.bias'
    train -q one data -o run --steps 1 --seq-len 32 --batch-size 2
}

@test "gpt-oss: to GGUF and back, from its metadata alone, and in blocks" {
    convert-model -q m -o m.gguf
    convert-model -q m.gguf -o back
    inspect-model --check m back > /dev/null
    cmp m/config.json back/config.json
    convert-model -q m -o bare.gguf --no-originals
    convert-model -q bare.gguf -o made
    for other in m.gguf made; do
        awk -v a="$(loss m)" -v b="$(loss $other)" 'BEGIN { d = a - b; exit !(d < 1e-6 && d > -1e-6) }'
    done
    convert-model -q m -o q8.gguf --type q8_0
    generate -q q8.gguf -p "the river" -n 2 --temperature 0 > /dev/null
    cp -rL m other && jq '.swiglu_limit = 5' m/config.json > other/config.json
    run convert-model -q other -o x.gguf
    [ "$status" -eq 2 ]
    [ "$output" = "convert-model: other: GGUF's gpt-oss has no SwiGLU but with a limit of 7 and a slope of 1.702" ]
    jq '.rope_scaling = {rope_type: "yarn", factor: 4, original_max_position_embeddings: 64, truncate: true}' m/config.json > other/config.json
    run convert-model other -o rounded.gguf
    [ "$status" -eq 0 ]
    [[ "$output" == *"other: GGUF's gpt-oss does not round the bounds of yarn's ramp (\"truncate\": true is lost)"* ]]
    head -c $(($(stat -c %s m.gguf) - 40)) m.gguf > cut.gguf
    run convert-model -q cut.gguf -o x
    [ "$status" -eq 1 ]
    [ ! -e x ]
}
