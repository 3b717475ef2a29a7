#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Layers of linear attention and of retention (lm_hybrid), in every tool that computes.

bats_require_minimum_version 1.5.0

setup() {
    cd "$BATS_TEST_TMPDIR" || return
    for i in {1..60}; do
        echo "{\"text\":\"the river ran by the old bridge $i and the stones lay in the water\"}"
    done > t.jsonl
    train-tokenizer -q -V 300 -o tokenizer.json t.jsonl
    shard-data -q --tokenizer tokenizer.json -o data t.jsonl
    args=(--batch-size 2 --seq-len 96 --lr 3e-3 --lr-schedule constant)
}

# make KIND KIND OBJECT ARGUMENT...: a model of two layers with OBJECT as linear_attention
make() {
    init-model -q -f hybrid-5m -t tokenizer.json --set num_hidden_layers=2 --set hidden_size=64 --set intermediate_size=96 \
        --set num_key_value_heads=2 --set max_position_embeddings=512 --set "layer_types=[\"$1\",\"$2\"]" \
        --set "linear_attention=$3" "${@:4}"
}

loss() {
    eval-model -q "$@" t.jsonl --seq-len 96 --json | sed -E 's/.*"loss":([0-9.]+).*/\1/'
}

linear=linear_attention
full=full_attention
retention='{"feature":"identity","decay":true}'

# trains OBJECT: it learns, resumes to the bit, and gives the same with recomputation, one thread, and almost in BF16
trains() {
    make $linear $linear "$1" -o m
    train -q m data -o r8 --steps 8 --save-every 4 "${args[@]}"
    train -q m data -o r4 --steps 4 --save-every 4 "${args[@]}"
    train -q --resume r4 --steps 8
    inspect-model --check r8 r4 > /dev/null
    train -q m data -o again --steps 8 --recompute full -j 1 "${args[@]}"
    inspect-model --check r8 again > /dev/null
    awk -v a="$(loss m)" -v b="$(loss r8)" 'BEGIN { exit !(b < a - 0.3) }'
    awk -v a="$(loss r8)" -v b="$(loss r8 --dtype bf16)" 'BEGIN { d = a - b; exit !(d < 0.02 && d > -0.02) }'
}

@test "linear attention: trains, resumes to the bit, in BF16 too, with recomputation and any number of threads" {
    trains '{}'
}

@test "linear attention: retention trains likewise" {
    trains "$retention"
}

@test "linear attention: greedy texts are those of one by one in batches, in pages and beside coded keys and values" {
    for object in null "$retention"; do
        make $linear $full "$object" -o m
        train -q -f m data -o run --steps 30 "${args[@]}"
        generate -q run -p "the river" -n 12 --temperature 0 > a
        generate -q run -p "the old bridge 1 and the stones" -n 12 --temperature 0 > b
        cat a b > want
        generate -q run --serve-batch 2 -p "the river" -p "the old bridge 1 and the stones" -n 12 --temperature 0 > both
        cmp want both
        generate -q run -b 2 -p "the river" -p "the old bridge 1 and the stones" -n 12 --temperature 0 > beside
        cmp want beside
        generate -q run --kv int8 -p "the river" -n 12 --temperature 0 > coded
        cmp a coded
    done
}

@test "linear attention: models that have nothing in pages are served in batches" {
    make $linear $linear '{}' -o m
    train -q m data -o run --steps 30 "${args[@]}"
    generate -q run -p "the river" -n 12 --temperature 0 > want
    generate -q run -p "the old bridge 1 and the stones" -n 12 --temperature 0 >> want
    for more in "" "--kv auto" "--kv-host 1M" "--kv-disk .:1M" "--kv-memory 1M"; do
        # shellcheck disable=SC2086
        generate -q run --serve-batch 2 -p "the river" -p "the old bridge 1 and the stones" -n 12 --temperature 0 $more > both
        cmp want both
    done
}

@test "linear attention: adapters train, are merged, and generate as the merged model" {
    make $linear $full "$retention" -o m
    train -q m data -o run --steps 20 "${args[@]}"
    peft-tune -q run t.jsonl -o adapter --steps 10 --seq-len 32 --lr 3e-3 --target g_proj,q_proj,k_proj,v_proj,o_proj
    grep -q g_proj adapter/adapter_config.json
    merge-models -q --method passthrough run+adapter -o merged
    awk -v a="$(loss run --adapter adapter)" -v b="$(loss merged)" 'BEGIN { d = a - b; exit !(d < 1e-5 && d > -1e-5) }'
    generate -q run --dtype f32 --adapter adapter -p "the river" -n 8 --temperature 0 > a
    generate -q merged --dtype f32 -p "the river" -n 8 --temperature 0 > b
    cmp a b
}

ids() { grep -o '"token_ids":\[[0-9,]*\]' "$1" | grep -o '[0-9,]*' | tr ',' '\n'; }

@test "linear attention: a text goes on behind its cache in a file, as without a break; damaged files are refused" {
    for object in null "$retention"; do
        for other in $full $linear; do
            make $linear $other "$object" -o m
            train -q -f m data -o run --steps 30 "${args[@]}"
            G=(generate -q run -T 0 --ignore-eos --json --logprobs)
            "${G[@]}" -p "the river ran" -n 12 > whole
            "${G[@]}" -p "the river ran" -n 5 --save-cache a.kv -f > begin
            "${G[@]}" --load-cache a.kv -p '' -n 7 > end
            [ "$(ids whole)" = "$(ids begin; ids end)" ] && [ "$(ids whole | wc -l)" -eq 12 ]
            "${G[@]}" -p "the river ran by" -n 8 > whole
            "${G[@]}" --save-cache b.kv -p "the river ran" -n 0 -f
            "${G[@]}" --load-cache b.kv -p ' by' -n 8 > end
            [ "$(ids whole)" = "$(ids end)" ]
            quantize-kv -q --verify b.kv
            quantize-kv -q -l b.kv | grep -q '^layers.0.state'
        done
    done
    make $linear $full null -o m
    generate -q m --save-cache plain.kv -p "the river ran" -n 0
    quantize-kv -q -m int8 plain.kv -o coded.kv
    generate -q m --load-cache coded.kv -p ' by' -n 2 -T 0 > /dev/null
    head=$(od -An -tu8 -N8 plain.kv | tr -d ' ')
    head -c $((8 + head)) plain.kv | tail -c "$head" > header
    at=$(jq '."layers.0.state".data_offsets[0]' header)
    cp plain.kv bad.kv
    printf '\0\0\300\177' | dd of=bad.kv bs=1 seek=$((8 + head + at)) conv=notrunc status=none
    run -1 generate -q m --load-cache bad.kv -p ' by' -n 2
    [[ "$output" == *"layers.0.state"* ]]
    make $linear $full "$retention" -o other
    run -1 generate -q other --load-cache plain.kv -p ' by' -n 2
    [[ "$output" == *"it is the cache of another model"* ]]
}

@test "linear attention: what cannot be done, and wrong configs, are one line" {
    check() { # PART COMMAND...
        run "${@:2}"
        [ "$status" -ne 0 ]
        [ "${#lines[@]}" -eq 1 ] || { echo "$output"; false; }
        [[ "$output" == *"$1"* ]] || { echo "$output"; false; }
    }
    make $linear $full '{}' -o m
    for kv in h2o:keep=0.5 snapkv streaming:window=16 random:keep=0.5 kvmerge:keep=0.5 snapkv:capacity=8,window=4+int8; do
        check "layer 0 has linear attention, beside which no tokens are dropped" generate m -p "the river" -n 2 --kv $kv
    done
    check "layer 0 of the model has linear attention, whose states have no codes" \
        generate m -p "the river" -n 2 --states int8
    check "generate: --kv: there is nothing to code in 'layers.0': name other layers" \
        generate m -p "the river" -n 2 --kv 'layers.0=int8;k=int8,v=int4'
    make $linear $linear '{}' -o pure
    for kv in int8 k=int8,v=int4 f16 snapkv:capacity=8; do
        check "generate: --kv: there is nothing to code in any layer of the model: leave it out" \
            generate pure -p "the river" -n 2 --kv $kv
    done
    check "generate: --kv-down: there is nothing to code in any layer" \
        generate pure -p "the river" -n 2 --serve-batch 2 --kv-host 1M --kv-down int8
    check "layers of the base keep states" peft-tune m t.jsonl -o prefix --method prefix --steps 1 --seq-len 32
    check "layer 0 of the model has linear attention, whose states have no codes" quantize-kv --calibrate --method fp8 -o c --seq-len 16 m t.jsonl
    check '"linear_attention": is not an object' make $linear $full 7 -o bad
    check '"linear_attention": is not an object' make $linear $full '[]' -o bad
    check 'unknown key "decays"' make $linear $full '{"decays":true}' -o bad
    check '"feature": "relu" is not known' make $linear $full '{"feature":"relu"}' -o bad
    check "'feature'" make $linear $full '{"feature":1}' -o bad
    check "'decay'" make $linear $full '{"decay":0.5}' -o bad
    check 'linear_attention has no key "decays"' init-model -q hybrid-5m --set linear_attention.decays=true -o bad
    # Weights of pairs, which attention dropout would drop, are not there.
    check '"attention_dropout" is 0.1, but layer 0 has linear attention' make $linear $full '{}' --set attention_dropout=0.1 -o bad
    run -2 train m data -o bad --steps 1 --batch-size 1 --seq-len 16 --dropout 0.1
    [[ "$output" == *"the rate of dropout that is asked for is 0.1, but layer 0 has linear attention"* ]]
    [ ! -e bad ]
}

@test "linear attention: keys of its object are set one by one" {
    make $linear $full '{"feature":"identity"}' --set linear_attention.decay=true -o m
    jq -e '.linear_attention == {"feature":"identity","decay":true}' m/config.json
}
