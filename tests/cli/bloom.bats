#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# BLOOM in every tool that computes: biases by distance, six heads.

setup() {
    cd "$BATS_TEST_TMPDIR" || return
    for i in {1..60}; do
        echo "{\"text\":\"the river ran by the old bridge $i and the stones lay in the water\"}"
    done > t.jsonl
    train-tokenizer -q -V 300 -o tokenizer.json t.jsonl
    init-model -q bloom-12m -t tokenizer.json --set hidden_size=48 --set n_layer=2 --set n_head=6 -o m
}

loss() {
    eval-model -q "$@" t.jsonl --seq-len 32 --json | sed -E 's/.*"loss":([0-9.]+).*/\1/'
}

@test "bloom: trains, resumes to the bit, generates alike from pages and coded caches, goes through GGUF and back" {
    shard-data -q --tokenizer tokenizer.json -o data t.jsonl
    args=(--batch-size 4 --seq-len 32 --lr 1e-2 --lr-schedule constant --save-every 20)
    train -q m data -o r40 --steps 40 "${args[@]}"
    train -q m data -o r20 --steps 20 "${args[@]}"
    train -q --resume r20 --steps 40
    inspect-model --check r40 r20 > /dev/null
    awk -v a="$(loss m)" -v b="$(loss r40)" 'BEGIN { exit !(b < a - 1) }'
    generate -q r40 -p "the river" -n 12 --temperature 0 > a
    generate -q r40 -p "the old bridge" -n 12 --temperature 0 > b
    generate -q r40 --serve-batch 2 -p "the river" -p "the old bridge" -n 12 --temperature 0 > both
    cat a b | cmp - both
    generate -q r40 -p "the river" -n 12 --temperature 0 --kv int8 | cmp - a
    convert-model -q r40 -o r.gguf
    convert-model -q r.gguf -o back
    inspect-model --check r40 back > /dev/null
    [ "$(loss back)" = "$(loss r40)" ]
}

@test "bloom: policies that drop tokens, residuals from behind the norms, and head counts that do not fit are refused" {
    run generate m -p "the river" -n 4 --kv snapkv
    [ "$status" -eq 2 ]
    [[ "$output" == *"scores of layer 0 depend on the distance of tokens, of which a policy drops some"* ]]
    run init-model bloom-12m -t tokenizer.json --set apply_residual_connection_post_layernorm=true -o n
    [ "$status" -ne 0 ]
    [[ "$output" == *'"apply_residual_connection_post_layernorm"'* ]]
    run init-model bloom-12m -t tokenizer.json --set n_head=7 -o n
    [ "$status" -ne 0 ]
    [[ "$output" == *'n_head 7 does not divide hidden_size 384'* ]]
}

@test "bloom: sizes under two names that differ are refused with both; null is absent" {
    run init-model bloom-12m -t tokenizer.json --set n_embed=64 -o n
    [ "$status" -ne 0 ]
    [[ "$output" == *'"n_embed" is 64, but "hidden_size" is 384'* ]]
    run init-model bloom-12m -t tokenizer.json --set num_attention_heads=3 -o n
    [ "$status" -ne 0 ]
    [[ "$output" == *'"num_attention_heads" is 3, but "n_head" is '* ]]
    cp -rL m other
    jq '.n_embed = .hidden_size | .hidden_size = null | .num_hidden_layers = .n_layer' m/config.json > other/config.json
    [ "$(loss other)" = "$(loss m)" ]
}

@test "bloom: a context beyond the positions of its training is taken with a warning, but not by default" {
    sed -i -E 's/("seq_length": )[0-9]+/\116/' m/config.json
    generate -q m -p "the river" -n 40 --temperature 0 --ignore-eos --json > short
    run generate m -p "the river" -n 40 --temperature 0 --ignore-eos --context 64 --json
    [ "$status" -eq 0 ]
    [[ "$output" == *"--context: the model was trained on texts of 16 tokens at most, and extrapolates to 64"* ]]
    [[ "$output" == *'"tokens":40'* ]]
    [[ "$(cat short)" != *'"tokens":40'* ]]
    eval-model -q m t.jsonl --seq-len 40 --json > /dev/null
}
