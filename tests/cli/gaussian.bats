#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Layers with a Gaussian kernel in place of softmax (lm_hybrid), in every tool that computes.

setup() {
    cd "$BATS_TEST_TMPDIR" || return
    for i in {1..60}; do
        echo "{\"text\":\"the river ran by the old bridge $i and the stones lay in the water\"}"
    done > t.jsonl
    train-tokenizer -q -V 300 -o tokenizer.json t.jsonl
    small=(-t tokenizer.json --set num_hidden_layers=2 --set hidden_size=64 --set intermediate_size=96 --set head_dim=16
        --set num_key_value_heads=2 --set max_position_embeddings=512)
}

# make KIND KIND ARGUMENT...: a model of two layers
make() {
    init-model -q hybrid-5m "${small[@]}" --set "layer_types=[\"$1\",\"$2\"]" "${@:3}"
}

loss() {
    eval-model -q "$@" t.jsonl --seq-len 64 --json | sed -E 's/.*"loss":([0-9.]+).*/\1/'
}

@test "gaussian: both kinds train, resume to the bit and with recomputation, and differ from softmax and each other" {
    shard-data -q --tokenizer tokenizer.json -o data t.jsonl
    args=(--batch-size 4 --seq-len 64 --lr 3e-3 --lr-schedule constant --save-every 10)
    for kind in gaussian_attention gaussian_norm_attention; do
        make $kind $kind -o "$kind"
        train -q "$kind" data -o r20 -f --steps 20 "${args[@]}"
        train -q "$kind" data -o r10 -f --steps 10 "${args[@]}"
        train -q --resume r10 --steps 20
        inspect-model --check r20 r10 > /dev/null
        train -q "$kind" data -o again -f --steps 20 "${args[@]}" --recompute full
        inspect-model --check r20 again > /dev/null
        awk -v a="$(loss "$kind")" -v b="$(loss r20)" 'BEGIN { exit !(b < a - 1) }'
        train -q "$kind" data -o low -f --steps 20 "${args[@]}" --dtype bf16
        awk -v a="$(loss r20)" -v b="$(loss low)" 'BEGIN { d = a - b; exit !(d < 0.2 && d > -0.2) }'
    done
    make full_attention full_attention -o full
    [ "$(printf '%s\n' "$(loss full)" "$(loss gaussian_attention)" "$(loss gaussian_norm_attention)" | sort -u | wc -l)" -eq 3 ]
}

@test "gaussian: greedy texts are those of one token after another without a cache, from pages and in one piece" {
    make gaussian_attention gaussian_norm_attention --set gaussian_window=9 -o m
    shard-data -q --tokenizer tokenizer.json -o data t.jsonl
    train -q m data -o run --steps 30 --batch-size 4 --seq-len 64 --lr 3e-3
    generate -q run -p "the river" -n 12 --temperature 0 > a
    generate -q run -p "the old bridge" -n 12 --temperature 0 > b
    generate -q run --serve-batch 2 -p "the river" -p "the old bridge" -n 12 --temperature 0 > both
    cat a b | cmp - both
    generate -q run -b 2 -p "the river" -p "the old bridge" -n 12 --temperature 0 | cmp - both
    generate -q run --dtype bf16 -p "the river" -n 4 --temperature 0 > /dev/null
    text="the river" # a run for each token: all of the text is a prompt
    for i in {1..6}; do
        text=$(generate -q run --echo -p "$text" -n 1 --temperature 0)
    done
    [ "$text" = "$(generate -q run --echo -p "the river" -n 6 --temperature 0)" ]
}

@test "gaussian: a window far beyond the text is none, and a small one is not" {
    make gaussian_attention gaussian_attention -o m
    a=$(loss m)
    for w in 300 5; do
        cp -rL m w
        jq ".gaussian_window = $w" m/config.json > w/config.json
        [ "$([ "$(loss w)" = "$a" ] && echo same)" = "$([ $w -eq 300 ] && echo same)" ]
        rm -r w
    done
}

@test "gaussian: what their caches cannot do is refused in one line before anything runs" {
    make full_attention gaussian_attention -o m
    refused() { # TEXT ARGUMENT...
        run "${@:2}"
        [ "$status" -eq 2 ]
        [ "${#lines[@]}" -eq 1 ] || { echo "$output"; false; }
        [[ "$output" == *"$1"* ]] || { echo "$output"; false; }
    }
    for kv in int8 k=int8,v=int4 kivi:bits=4,residual=64 streaming:window=16 snapkv h2o:keep=0.5 random:keep=0.5 kvmerge:keep=0.5; do
        refused "layer 1 has Gaussian attention, whose keys have no coded form and no policy" \
            generate -q m -p "the river" -n 4 --kv $kv
    done
    generate -q m -p "the river" -n 4 --kv 'layers.0=int8' > /dev/null
    refused "layer 1 of the model has Gaussian attention, whose keys are kept with norms" \
        generate -q m -p "the river" -n 4 --save-cache c
    [[ "$output" == generate:* ]] # without a text
    refused "layer 1 of the model has Gaussian attention, whose keys are kept with norms" \
        quantize-kv --calibrate --method fp8 -o c --seq-len 16 m t.jsonl
    [ ! -e c ]
}

@test "gaussian: wrong windows are refused in one line" {
    check() {
        run init-model -q hybrid-5m "${small[@]}" --set 'layer_types=["gaussian_attention","full_attention"]' "${@:2}" -o bad
        [ "$status" -ne 0 ]
        [ "${#lines[@]}" -eq 1 ] || { echo "$output"; false; }
        [[ "$output" == *"$1"* ]] || { echo "$output"; false; }
    }
    check "'gaussian_window'" --set gaussian_window=0
    check "'gaussian_window'" --set gaussian_window=-3
    check "'gaussian_window'" --set 'gaussian_window="near"'
    check "'gaussian_window'" --set gaussian_window=1.5
    [ ! -e bad ]
}

@test "gaussian: adapters, prefixes, merging and compression" {
    make gaussian_attention gaussian_norm_attention -o m
    for method in lora prefix; do
        peft-tune -q m t.jsonl -o "$method" --steps 4 --batch-size 2 --seq-len 64 --method "$method"
        generate -q m --adapter "$method" -p "the river" -n 6 --temperature 0 > a
        generate -q m --adapter "$method" --serve-batch 2 -p "the river" -n 6 --temperature 0 | cmp - a
    done
    merge-models -q --method passthrough m+lora -o merged
    awk -v a="$(loss m --adapter lora)" -v b="$(loss merged)" 'BEGIN { d = a - b; exit !(d < 1e-5 && d > -1e-5) }'
    compress-ckpt -q m -o m.lmz
    inspect-model --check m m.lmz > /dev/null
}
