#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Latent attention (DeepSeek-V2 and V3) in every tool that computes.

bats_require_minimum_version 1.5.0

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

# OPTION ...: log-probabilities of a text by the river
logs() {
    generate -q run --dtype f32 -p "the river ran by the old bridge 7 and the stones" -n 12 -T 0 --ignore-eos --json --logprobs "$@" |
        grep -o '"logprobs":\[[-0-9.,e]*\]' | grep -o '[-0-9.e]*[0-9]' | tail -n 12
}

far() { # A B: the largest distance of their lines
    paste "$1" "$2" | awk '{ d = $1 - $2; d = d < 0 ? -d : d; m = d > m ? d : m } END { printf "%.9f\n", m }'
}

@test "latent attention: coded latents are near the plain ones, in the bytes of their codes, one by one and in batches" {
    small m q_lora_rank=14
    train -q m data -o run --steps 30 --batch-size 2 --seq-len 32 --lr 3e-3
    logs > plain
    # A token of a layer has 20 numbers of a latent, and 8 that are rotated, which stay F32.
    for kv in "int8 0.02 22+32" "int4:group=0,rotate=off 0.3 16+32" "int5 0.2 -" "fp8 0.1 20+32" \
        "fp8:scale=token,group=16 0.1 -" \
        "int8:residual=4,sinks=2 0.02 22+32" "kivi:bits=4 0.3 -"; do
        read -r method most bytes <<< "$kv"
        if [ "$bytes" != - ]; then # of two layers
            run generate -v run -p "the river" -n 2 --dtype f32 --kv "$method"
            [[ "$output" == *"--kv $method"*": $((2 * (bytes))) B a token"* ]] || { echo "$output"; false; }
        fi
        logs --kv "$method" > coded
        run ! cmp -s plain coded
        [ "$(far plain coded)" != nan ]
        awk -v d="$(far plain coded)" -v most="$most" 'BEGIN { exit !(d < most) }'

        generate -q run --kv "$method" --serve-batch 2 -p "the river" -p "the old bridge" -n 12 -T 0 > both
        generate -q run --kv "$method" -p "the river" -n 12 -T 0 > one
        generate -q run --kv "$method" -p "the old bridge" -n 12 -T 0 >> one
        cmp both one
    done
}

@test "latent attention: policies that have room for all tokens give the text without one, others drop some" {
    small m q_lora_rank=14
    train -q m data -o run --steps 30 --batch-size 2 --seq-len 32 --lr 3e-3
    for method in "" +int8 +int4; do
        plain=${method:++}; plain=${method#+}
        logs --kv "${plain:-auto}" > plain
        for p in streaming:window=500 snapkv:capacity=500; do
            logs --kv "$p$method" > kept
            awk -v d="$(far plain kept)" 'BEGIN { exit !(d < 1e-6) }' # sums in another order
        done
        for p in streaming:sinks=2,window=8 snapkv:capacity=8,window=4 random:keep=0.4; do
            logs --kv "$p$method" > kept
            run ! cmp -s plain kept
            awk -v d="$(far plain kept)" 'BEGIN { exit !(d < 9) }'
        done
    done
    # An answer goes on with the tokens that stayed.
    for p in snapkv:capacity=8,window=4 streaming:sinks=2,window=8+int8; do
        say=(-q run --kv "$p" -T 0 --ignore-eos --json)
        generate "${say[@]}" -p "the river ran by the old bridge 7 and the stones" -n 12 > whole
        generate "${say[@]}" -p "the river ran by the old bridge 7 and the stones" -n 5 --save-cache a.kv -f > begin
        generate "${say[@]}" --load-cache a.kv -p '' -n 7 > end
        [ "$(ids whole)" = "$(ids begin; ids end)" ]
    done
}

ids() { grep -o '"token_ids":\[[0-9,]*\]' "$1" | grep -o '[0-9,]*' | tr ',' '\n'; }

@test "latent attention: a text goes on behind its cache in a file, plain and coded, as without a break" {
    small m q_lora_rank=14
    train -q m data -o run --steps 30 --batch-size 2 --seq-len 32 --lr 3e-3
    long=$(printf 'the river ran by the old bridge and the stones lay in the water %.0s' 1 2 3 4 5 6)
    for kv in auto int8 int4 kivi:bits=4; do
        generate -q run --kv $kv -p "the river ran" -n 12 -T 0 --ignore-eos --json > whole
        generate -q run --kv $kv -p "the river ran" -n 5 -T 0 --ignore-eos --json --save-cache a.kv -f > begin
        generate -q run --load-cache a.kv -p '' -n 7 -T 0 --ignore-eos --json > end
        [ "$(ids whole)" = "$(ids begin; ids end)" ]
        quantize-kv -q --verify a.kv
        generate -q run --kv $kv --save-cache b.kv -p "$long" -n 0 -f
        [ "$kv" = kivi:bits=4 ] && continue # keeps newest tokens plain
        generate -q run --load-cache b.kv -p ' the old' -n 8 -T 0 --json --logprobs > loaded
        generate -q run --kv $kv -p "$long the old" -n 8 -T 0 --json --logprobs > whole
        [ "$(grep -o '"token_ids".*' whole)" = "$(grep -o '"token_ids".*' loaded)" ]
    done
    # A plain file coded is the file of a coded run, and back.
    generate -q run --dtype f32 --save-cache plain.kv -p "$long" -n 0 -f
    quantize-kv -q -l plain.kv > list
    grep -q '^layers.1.latent' list
    grep -q '^layers.1.rotary' list
    for kv in int8 int4 fp8; do
        quantize-kv -q -m $kv plain.kv -o coded.kv -f
        quantize-kv -q -l --json coded.kv > list
        jq -r '.parts[0].side + .parts[0].form + .parts[1].side + .parts[1].form' list > forms
        [ "$(cat forms)" = "latent${kv/fp8/fp8_e4m3}rotaryf32" ]
        generate -q run --dtype f32 --load-cache coded.kv -p ' the' -n 4 -T 0 > /dev/null
        quantize-kv -q -d coded.kv -o back.kv -f
        quantize-kv -q -m $kv back.kv -o again.kv -f
        cmp <(quantize-kv -q -l coded.kv | tail -n +2) <(quantize-kv -q -l again.kv | tail -n +2)
        [ "$(stat -c %s coded.kv)" -lt "$(stat -c %s plain.kv)" ]
    done
    # Another model, and damage.
    small other q_lora_rank=14 qk_rope_head_dim=4
    run generate -q other --load-cache plain.kv -p x -n 1
    [ "$status" -eq 1 ]
    [[ "$output" == *"it is the cache of another model: layers and heads differ"* ]]
    LC_ALL=C sed 's/"latent":"\[8,8\]"/"latent":"[9,8]"/' plain.kv > bad.kv
    run quantize-kv -l bad.kv
    [ "$status" -eq 1 ]
    [[ "$output" == *"the checksum of its header is wrong"* ]]
    run quantize-kv -m cachegen plain.kv -o c.kv
    [ "$status" -eq 2 ]
    [[ "$output" == *"levels are of keys and values, not of latents"* ]]
}

@test "latent attention: what caches of latents cannot do is refused" {
    small m q_lora_rank=14
    run generate -q m -p "the river" -n 4 --kv h2o:keep=0.5
    [ "$status" -eq 2 ]
    [[ "$output" == *"layer 0 keeps latents, of which new tokens add up no masses: choose streaming, snapkv or random"* ]]
    run generate -q m -p "the river" -n 4 --kv kvmerge:keep=0.5
    [ "$status" -eq 2 ]
    [[ "$output" == *"layer 0 keeps latents, which are not merged"* ]]
    run generate -q m -p "the river" -n 4 --kv streaming:positions=cache
    [ "$status" -eq 2 ]
    [[ "$output" == *"latents are stored with keys that are rotated by the positions of the text: choose positions=text"* ]]
    run generate -q m -p "the river" -n 4 --kv k=int8,v=int4
    [ "$status" -eq 2 ]
    [[ "$output" == *"layer 0 keeps latents, which are keys and values at once: give one method, without k= and v="* ]]
    small odd q_lora_rank=14 kv_lora_rank=18
    run generate -q odd -p "the river" -n 4 --kv int8
    [ "$status" -eq 2 ]
    [[ "$output" == *"latents of 18 numbers, of which codes need a multiple of 4"* ]]
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
        [ "$status" -eq 2 ]
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
