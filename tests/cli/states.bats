#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Models most of whose layers keep a state in place of keys and values (Qwen3-Next), in every tool that computes.

bats_require_minimum_version 1.5.0

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

ids() { grep -o '"token_ids":\[[0-9,]*\]' "$1" | grep -o '[0-9,]*' | tr ',' '\n'; }

@test "states: a text goes on behind its cache in a file, as without a break" {
    small m
    train -q m data -o run --steps 30 "${args[@]}"
    G=(generate -q run -T 0 --ignore-eos --json --logprobs) # which prints the ids
    for kv in auto int8; do
        "${G[@]}" --kv $kv -p "the river ran" -n 12 > whole
        "${G[@]}" --kv $kv -p "the river ran" -n 5 --save-cache a.kv -f > begin
        "${G[@]}" --load-cache a.kv -p '' -n 7 > end
        [ "$(ids whole)" = "$(ids begin; ids end)" ] && [ "$(ids whole | wc -l)" -eq 12 ]
        "${G[@]}" --kv $kv -p "the river ran by" -n 8 > whole
        generate -q run --kv $kv --save-cache b.kv -p "the river ran" -n 0 -f
        "${G[@]}" --load-cache b.kv -p ' by' -n 8 > end
        [ "$(ids whole)" = "$(ids end)" ]
        quantize-kv -q --verify b.kv
    done
    run generate -q run --load-cache b.kv -p '' -n 2
    [ "$status" -eq 2 ]
    [[ "$output" == *"it ends with a prompt, and its newest rows cannot be computed again: give a prompt to append"* ]]
    generate -q run --save-cache plain.kv -p "the river ran" -n 0
    quantize-kv -q -m int4 plain.kv -o coded.kv
    quantize-kv -q -l coded.kv > list
    grep -q '^layers.0.state' list
    grep -q '^layers.1.k' list
    generate -q run --load-cache coded.kv -p ' by' -n 8 -T 0 > /dev/null
    run quantize-kv -m cachegen plain.kv -o c.kv
    [ "$status" -eq 2 ]
    [[ "$output" == *"levels are of keys and values, not of states"* ]]
    # A number of the state that is none.
    head=$(od -An -tu8 -N8 plain.kv | tr -d ' ')
    head -c $((8 + head)) plain.kv | tail -c "$head" > header
    at=$(jq '."layers.0.state".data_offsets[0]' header)
    cp plain.kv bad.kv
    printf '\0\0\300\177' | dd of=bad.kv bs=1 seek=$((8 + head + at)) conv=notrunc status=none
    run generate -q run --load-cache bad.kv -p ' by' -n 2
    [ "$status" -eq 1 ]
    [[ "$output" == *"layers.0.state"* ]]
    small other linear_value_head_dim=16
    run generate -q other --load-cache plain.kv -p x -n 1
    [ "$status" -eq 1 ]
    [[ "$output" == *"it is the cache of another model: layers and heads differ"* ]]
}

@test "states: policies drop tokens of the other layers" {
    small m
    train -q m data -o run --steps 30 "${args[@]}"
    text="the river ran by the old bridge 7 and the stones lay"
    generate -q run -p "$text" -n 12 -T 0 --ignore-eos --json --logprobs > whole
    for p in streaming:window=500,positions=text snapkv:capacity=500 h2o:keep=1 kvmerge:keep=1; do
        generate -q run --kv $p -p "$text" -n 12 -T 0 --ignore-eos --json --logprobs > kept
        [ "$(ids whole)" = "$(ids kept)" ] && [ "$(ids whole | wc -l)" -eq 12 ]
    done
    for p in streaming:sinks=2,window=8 h2o:keep=0.3+int8 snapkv:capacity=8,window=4 kvmerge:keep=0.5; do
        generate -q run --kv $p -p "$text" -n 12 -T 0 --ignore-eos > kept
    done
    run generate -q run --kv snapkv:capacity=8,window=4 -p "$text" -n 2 --save-cache c.kv
    [ "$status" -eq 2 ]
    [[ "$output" == *"files have no place for dropped tokens beside states of layers: leave the policy out"* ]]
}

@test "states: stored as codes they are near those of F32, alone, in batches and behind a file" {
    small m linear_key_head_dim=16 linear_value_head_dim=16
    train -q m data -o run --steps 30 "${args[@]}"
    text="the river ran by the old bridge 7 and the stones lay"
    logs() {
        generate -q run -p "$text" -n 12 -T 0 --ignore-eos --json --logprobs "$@" |
            grep -o '"logprobs":\[[-0-9.,e]*\]' | grep -o '[-0-9.e]*[0-9]' | tail -n 12
    }
    logs > plain
    for s in int8 fp8:scale=token int6:rotate=off; do
        logs --states $s > coded
        run ! cmp -s plain coded
        paste plain coded | awk '{ d = $1 - $2; if (d > 0.05 || d < -0.05) exit 1 }'
    done
    generate -q run --states int8 --kv int8 -p "the river" -n 12 -T 0 > one
    generate -q run --states int8 --kv int8 -p "the old bridge" -n 12 -T 0 >> one
    generate -q run --states int8 --kv int8 --serve-batch 2 -p "the river" -p "the old bridge" -n 12 -T 0 | cmp - one
    generate -q run --states int8 -p "$text" -n 5 -T 0 --ignore-eos --save-cache a.kv
    generate -q run --states int8 --load-cache a.kv -p '' -n 7 -T 0 --ignore-eos > more
    # A file has decoded states, which are coded again: near the text that was not interrupted, without its bits.
    logs --states int8 | tail -n 7 > whole
    text='' logs --states int8 --load-cache a.kv | tail -n 12 | head -n 7 > behind
    [ "$(wc -l < behind)" -eq 7 ]
    paste whole behind | awk '{ d = $1 - $2; if (d > 0.05 || d < -0.05) exit 1 }'
    run generate -v run --states int8 -p "the river" -n 2
    [[ "$output" == *"--states int8: "*" a text, f32 "* ]]
    refused() { # SPEC TEXT
        run generate -q run --states "$1" -p x -n 2
        [ "$status" -eq 2 ]
        [[ "$output" == *"$2"* ]] || { echo "$output"; false; }
    }
    refused int4 "does not code each row by itself: choose int8, fp8, or another one that codes rows, with rotate=off"
    refused snapkv "a state has no tokens to drop"
    refused k=int8 "a state has no keys and values"
    refused bf16 "would be bf16: what is not coded is f32"
    refused fp8:scale=layer "calibrations are of keys and values"
    small odd
    run generate -q odd --states int8 -p x -n 2
    [ "$status" -eq 2 ]
    [[ "$output" == *"of 8 rows of 8 numbers have no coded form"* ]]
    init-model -q llama-1m -t tokenizer.json -o none
    run generate -q none --states int8 -p x -n 2
    [ "$status" -eq 2 ]
    [[ "$output" == *"--states: no layer of a "*" model has a state: leave it out"* ]]
    quantize-kv -q --evaluate run data/train --methods auto --states int8 --windows 2 --seq-len 32 --steps 0 --repeats 0 \
        --json > report
    jq -e '.methods[1].kl > 0 and .methods[1].kl < 0.01 and .methods[0].kl == 0' report
}

@test "states: what cannot be done is one line" {
    small m
    small dense mlp_only_layers='[0]'
    run convert-model dense -o dense.gguf
    [ "$status" -eq 2 ]
    [[ "$output" == *"GGUF's qwen3next has no layers without experts"* ]]
    run peft-tune m t.jsonl -o prefix --method prefix --steps 1 --seq-len 32
    [ "$status" -eq 2 ]
    [[ "$output" == *"layers of the base keep states"* ]]
    run init-model -q qwen3-next-12m --set linear_num_key_heads=3 --dry-run
    [ "$status" -eq 2 ]
    [[ "$output" == *"linear_num_key_heads 3 does not divide linear_num_value_heads 8"* ]]
}
