#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# T5 in every tool: spans cut out of text, prompts that an encoder reads, and what such models do not have.
bats_require_minimum_version 1.5.0

setup() {
    cd "$BATS_TEST_TMPDIR" || return
    for i in {1..80}; do
        echo "{\"text\":\"the river ran by the old bridge $i and the stones lay in the water\"}"
    done > t.jsonl
    sentinels=()
    for i in {0..19}; do
        sentinels+=(-s "<extra_id_$i>")
    done
    train-tokenizer -q -m unigram -V 120 -s '<pad>' -s '</s>' -s '<unk>' "${sentinels[@]}" -o tokenizer.json t.jsonl
    shard-data -q --tokenizer tokenizer.json --val-fraction 0.2 -o data t.jsonl
    init-model -q t5-9m -t tokenizer.json --set d_model=32 --set d_kv=8 --set d_ff=48 --set num_layers=2 \
        --set num_decoder_layers=1 --set num_heads=2 --set dropout_rate=0.1 -o m
}

loss() {
    eval-model -q "$@" --seq-len 32 --json | sed -E 's/.*"loss":([0-9.]+).*/\1/'
}

@test "T5: trains on spans, resumes to the bit, evaluates as its validation, generates alike in any batch" {
    args=(--batch-size 4 --seq-len 32 --lr 1e-2 --lr-schedule constant --save-every 10)
    train -q m data -o r20 --steps 20 "${args[@]}" --objective span:density=0.15 --eval-every 20 --eval-batches 0 --metrics log
    train -q m data -o r10 --steps 10 "${args[@]}"
    train -q --resume r10 --steps 20
    inspect-model --check r20 r10 > /dev/null
    pp=(--gradient-accumulation-steps 2 --leaves 1)
    train -q m data -o one --steps 2 "${args[@]}" "${pp[@]}" --tied-apart
    train -q m data -o two --steps 2 "${args[@]}" "${pp[@]}" --mesh pp=3
    inspect-model --check one two > /dev/null
    awk -v a="$(loss m data/val)" -v b="$(loss r20 data/val)" 'BEGIN { exit !(b < a - 0.3) }'
    grep -q "\"event\":\"eval\".*\"loss\":$(loss r20 data/val)" log
    eval-model -q r20 t.jsonl --seq-len 32 --json > report
    grep -q '"task":"span"' report
    [ "$(cat report log | grep -c bits_per_byte)" -eq 0 ]
    printf '{"prompt":"the river <extra_id_0> the old"}\n{"prompt":"stones"}\n{"prompt":"the water"}\n' > p.jsonl
    generate -q r20 p.jsonl -n 8 --dtype f32 --temperature 0 -b 3 > a
    generate -q r20 p.jsonl -n 8 --dtype f32 --temperature 0 -b 1 | cmp - a
    generate -q r20 p.jsonl -n 8 --dtype f32 --n 3 --seed 4 -b 2 > c
    [ "$(wc -l < c)" -eq 9 ]
    [ "$(generate -q r20 -p 'the river' -n 4 --temperature 0 --echo | cut -c1-9)" = "the river" ]
}

@test "T5: distances that no text has take no memory" {
    cp -r m far
    sed -Ei 's/("relative_attention_max_distance": )[0-9]+/\11073741824/' far/config.json
    grep -q 1073741824 far/config.json
    run bash -c 'ulimit -v 2000000; eval-model -q -j 1 far data/val --seq-len 32 --json'
    [ "$status" -eq 0 ]
    [[ "$output" == *'"loss":'* ]]
}

@test "T5: converts, compresses, merges, and tells its memory" {
    convert-model -q m -o low --dtype bf16
    compress-ckpt -q m -o m.lmz
    inspect-model --check m m.lmz > /dev/null
    merge-models -q --method linear m m -o merged
    inspect-model m | grep -q 'model *t5'
    train --dry-run m --seq-len 32 2>&1 | grep -q 'total'
    awk -v a="$(loss m data/val)" -v b="$(loss merged data/val)" 'BEGIN { d = a - b; exit !(d < 1e-4 && d > -1e-4) }'
}

@test "T5: GGUF and back, to the byte; what llama.cpp has no words for is refused or named" {
    convert-model -q m -o m.gguf
    convert-model -q m.gguf -o back
    for f in config.json tokenizer.json; do
        cmp m/$f back/$f
    done
    inspect-model --check m back > /dev/null
    convert-model -q m -o bare.gguf --no-originals
    convert-model -q bare.gguf -o made --dtype f32
    [ "$(loss m data/val)" = "$(loss made data/val)" ]
    init-model -q t5-9m -t tokenizer.json --set d_model=32 --set d_kv=8 --set d_ff=48 --set num_layers=1 --set num_heads=2 \
        --set feed_forward_proj=relu --set tie_word_embeddings=true -o tied
    convert-model tied -o tied.gguf --no-originals 2> said
    [ "$(grep -c 'does not scale what a tied head reads' said)" -eq 1 ]
    convert-model -q tied.gguf -o tied-made --dtype f32
    [ "$(loss tied data/val)" = "$(loss tied-made data/val)" ]
    convert-model -q m -o small.gguf --type q4_k_m
    generate -q small.gguf -p 'the river' -n 4 > /dev/null
    init-model -q t5-9m -t tokenizer.json --set relative_attention_max_distance=64 -o far
    run -2 --separate-stderr convert-model far -o x.gguf
    [[ $stderr == *"GGUF's t5 has no relative_attention_max_distance but 128" ]]
    init-model -q t5-9m -t tokenizer.json --set feed_forward_proj=gated-silu -o silu
    run -2 --separate-stderr convert-model silu -o x.gguf
    [[ $stderr == *"GGUF's t5 has no feed_forward_proj but relu and gated-gelu" ]]
    [ ! -e x.gguf ]
}

@test "T5: a new 1.1 model of transformers has its embedding as a head, which is not scaled" {
    head() {
        inspect-model --list --json "$1" | grep -c lm_head
    }
    init-model -q t5-9m -t tokenizer.json --set d_model=32 --set d_kv=8 --set d_ff=48 --set num_layers=2 --set num_heads=2 \
        --set tie_word_embeddings=true -o tied
    run ! grep -q scale_decoder_outputs tied/config.json
    a=$(loss tied data/val)
    sed -i 's/"tie_word_embeddings": true/&, "scale_decoder_outputs": false/' tied/config.json
    b=$(loss tied data/val)
    [ "$a" != "$b" ]
    inspect-model --verify tied > /dev/null
    convert-model -q tied -o copy --dtype bf16
    compress-ckpt -q tied -o tied.lmz
    merge-models -q --method linear tied tied -o merged
    train -q tied data -o trained --steps 1 --seq-len 32
    train -q --resume trained --steps 2
    for m in tied copy tied.lmz merged; do
        awk -v a="$(loss "$m" data/val)" -v b="$b" 'BEGIN { d = a - b; exit !(d < 1e-2 && d > -1e-2) }'
    done
    for m in tied copy tied.lmz merged trained; do
        run head "$m"
        [ "$output" -eq 0 ]
    done
    generate -q tied -p 'the river' -n 4 --temperature 0 > /dev/null
    sed -i 's/"tie_word_embeddings": true/"tie_word_embeddings": false/' tied/config.json
    run eval-model -q tied data/val --seq-len 32
    [ "$status" -eq 2 ]
    [ "$output" = 'eval-model: tied: tensor "lm_head.weight" is missing' ]
}

# Sources of one to six words, and these in reverse order.
pairs() {
    local w=(the river ran by old bridge and stones lay in water) i k s t
    for i in {0..47}; do
        s='' t=''
        for ((k = 0; k <= i % 6; k++)); do
            s+=" ${w[(i * 5 + k * 3) % 11]}" t="${w[(i * 5 + k * 3) % 11]} $t"
        done
        echo "{\"source\":\"turn:$s\",\"target\":\"${t% }\"}"
    done > p.jsonl
}

# losses FILE -> of the steps
losses() {
    sed -En 's/.*"event":"step".*"loss":([0-9.]+),.*/\1/p' "$1"
}

@test "T5: adapters of pairs train, merge to what they are beside the model, resume to the bit, and have PEFT's names" {
    pairs
    P=(peft-tune -q m p.jsonl --seq-len 24 --batch-size 4 --lr 1e-2 --lr-schedule constant --dtype f32)
    for method in lora dora ia3 oft ln_tuning qlora full; do
        "${P[@]}" -o $method --method $method --steps 12 --metrics $method.log
        losses $method.log | awk 'NR == 1 { a = $1 } { b = $1 } END { exit !(NR == 12 && b < a - 0.05) }' || { echo $method; false; }
        [ $method != full ] || continue
        grep -q '"task_type": "SEQ_2_SEQ_LM"' $method/adapter_config.json
        [ $method != qlora ] || continue
        merge-models -q --method linear m+$method -o merged-$method
        awk -v a="$(loss m data/val --adapter $method --dtype f32)" -v b="$(loss merged-$method data/val --dtype f32)" \
            -v c="$(loss m data/val --dtype f32)" 'BEGIN { d = a - b; e = a - c; exit !(d < 1e-5 && d > -1e-5 && (e > 1e-3 || e < -1e-3)) }'
        generate -q m --adapter $method -p 'turn: the river' -n 8 --temperature 0 --dtype f32 > x
        generate -q merged-$method -p 'turn: the river' -n 8 --temperature 0 --dtype f32 | cmp - x
    done
    inspect-model --list --json lora/adapter_model.safetensors > names
    for module in encoder.block.1.layer.0.SelfAttention.q decoder.block.0.layer.1.EncDecAttention.v decoder.block.0.layer.2.DenseReluDense.wi_1; do
        grep -qF "base_model.model.$module.lora_A.weight" names
    done
    run ! grep -q relative_attention_bias names
    "${P[@]}" -o cut --steps 6
    peft-tune -q --resume cut --steps 12
    inspect-model --check cut/adapter_model.safetensors lora/adapter_model.safetensors > /dev/null
}

@test "T5: virtual tokens and bottlenecks train, resume to the bit, evaluate as their validation, and answer alike in any batch" {
    pairs
    sed 's/"source"/"prompt"/; s/,"target".*/}/' p.jsonl | head -5 > q.jsonl
    number() {
        sed -E 's/.*"loss":([0-9.]+).*/\1/' | cut -c1-7
    }
    P=(peft-tune -q m p.jsonl --batch-size 4 --lr 1e-1 --lr-schedule constant --dtype f32)
    base=$(eval-model -q m p.jsonl --task pairs --dtype f32 --json | number)
    for method in prompt p-tuning prefix houlsby pfeiffer; do
        more=()
        case $method in
        prompt | p-tuning | prefix) more=(--set num_virtual_tokens=3) ;;
        houlsby) more=(--set cross_adapter=true) ;;
        esac
        "${P[@]}" -o $method --method $method "${more[@]}" --steps 12 --metrics $method.log --val p.jsonl --eval-every 12
        loss=$(eval-model -q m p.jsonl --task pairs --dtype f32 --adapter $method --json | number)
        echo "$method: $base, $loss"
        awk -v a="$base" -v b="$loss" 'BEGIN { exit !(b < a - 0.01) }'
        grep -q '"event":"eval".*"loss":'"$loss" $method.log
        for b in 1 3; do
            generate -q m q.jsonl --adapter $method -n 6 --temperature 0 --dtype f32 -b $b > $b
        done
        cmp 1 3
        "${P[@]}" -o cut --method $method "${more[@]}" --steps 6 -f
        peft-tune -q --resume cut --steps 12
        inspect-model --check cut/adapter_model.safetensors $method/adapter_model.safetensors > /dev/null
    done
    grep -q '"num_transformer_submodules": 2' prompt/adapter_config.json
    run -2 eval-model -q m data/val --adapter prompt --seq-len 32
    [ "$output" = "eval-model: prompt: has virtual tokens, which windows with gaps do not have: give pairs with --task pairs" ]
    run -2 peft-tune -q m p.jsonl -o a --steps 1 --method prefix --set num_virtual_tokens=8 --target-len 8
    [[ "$output" == *"virtual tokens: 8 leave no room in a target of 8 tokens: use longer sequences, or fewer of them" ]]
    run -2 peft-tune -q m p.jsonl -o a --steps 1 --method prefix --set num_transformer_submodules=1
    [[ "$output" == *"num_transformer_submodules is 1, and prefixes of a model with an encoder have 2: set it to 2" ]]
}

@test "T5: eval-model measures pairs, whatever the batch and the padding, as the validation of their training" {
    pairs
    of() {
        eval-model -q m "$@" --task pairs --json
    }
    number() {
        sed -E 's/.*"'"$2"'":([0-9.]+).*/\1/' <<< "$1"
    }
    all=$(of p.jsonl)
    [ "$(number "$all" documents)" -eq 48 ]
    for b in 1 5; do
        [ "$(number "$(of p.jsonl -b $b)" loss)" = "$(number "$all" loss)" ]
    done
    grep -E '"target":"[a-z]+( [a-z]+)?"' p.jsonl > short.jsonl
    grep -vE '"target":"[a-z]+( [a-z]+)?"' p.jsonl > long.jsonl
    short=$(of short.jsonl) long=$(of long.jsonl)
    [ "$(number "$short" seq_len)" -lt "$(number "$long" seq_len)" ]
    awk -v a="$(number "$all" loss)" -v b="$(number "$short" loss)" -v c="$(number "$long" loss)" -v n="$(number "$short" tokens)" \
        -v m="$(number "$long" tokens)" 'BEGIN { d = a * (n + m) - b * n - c * m; exit !(d < 1e-3 && d > -1e-3 && b != c) }'
    peft-tune -q m p.jsonl -o a --steps 1 --lr 1e-2 --dtype f32 --val p.jsonl --eval-every 1 --metrics log
    grep -q '"event":"eval".*"loss":'"$(number "$(of p.jsonl --adapter a)" loss | cut -c1-7)" log
    cut=$(eval-model m p.jsonl --task pairs --seq-len 6 --json 2> said)
    [ "$(number "$cut" tokens)" -lt "$(number "$all" tokens)" ]
    grep -q 'pairs are longer than --seq-len, and are cut' said
    run -2 eval-model -q m p.jsonl --task pairs --stride 3
    [ "$output" = "eval-model: windows: --stride does not apply to pairs, each of which has its window: leave it out" ]
    init-model -q llama-1m -t tokenizer.json --set hidden_size=32 --set intermediate_size=48 --set num_hidden_layers=1 \
        --set num_attention_heads=2 --set num_key_value_heads=2 -o l
    run -2 eval-model -q l p.jsonl --task pairs
    [ "$output" = "eval-model: l: a llama model has no encoder, which would read the sources: leave --task out" ]
}

@test "T5: pairs on two ranks have the files of one, and a plan its memory" {
    load ranks
    command -v mpirun > /dev/null || skip "no Open MPI"
    [ -e "$(dirname "$(command -v peft-tune)")/../lib/lmutils/libcore-mpi.so" ] || skip "no module of Open MPI"
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    pairs
    P=(peft-tune -q m p.jsonl --batch-size 2 --steps 4 --lr 1e-2 --leaves 2 --gradient-accumulation-steps 4 --val p.jsonl --eval-every 2)
    "${P[@]}" -o one --metrics one.log
    timeout -s KILL 100 mpirun --oversubscribe -n 2 "${P[@]}" -o two --mesh dp=2 --metrics two.log
    cmp <(tensors one/adapter_model.safetensors) <(tensors two/adapter_model.safetensors)
    [ "$(numbers one.log)" = "$(numbers two.log)" ]
    [ "$(numbers one.log | grep -c '"event":"eval"')" -eq 2 ]
    "${P[@]}" --dry-run | grep -q 'tokens a step 240'
}

@test "T5: records that are not pairs, and options that pairs do not have, are refused in a line" {
    pairs
    said() {
        local want=$1
        shift
        run -2 peft-tune -q m "$@" -o x --steps 1
        [[ "$output" == *"$want"* ]] && [ "$(wc -l <<< "$output")" -eq 1 ] && [ ! -e x ]
    }
    said 'records of kind text have no target beside a source' t.jsonl
    said '--packing: an encoder reads one source at a time: leave it out' p.jsonl --packing
    said '--loss-on: of a source and a target the target trains, and nothing else: leave it out' p.jsonl --loss-on all
    echo '{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"},{"role":"user","content":"c"},{"role":"assistant","content":"d"}]}' > chat.jsonl
    said 'other messages than one and its answer, need a chat template' chat.jsonl
    peft-tune -q m chat.jsonl -o chat --steps 1 --chat-template chatml
    peft-tune m p.jsonl -o short --steps 1 --seq-len 6 --target-len 4 2>&1 | grep -q 'sources have up to 6, targets up to 4; .* cut by'
    init-model -q llama-1m -t tokenizer.json --set hidden_size=32 --set intermediate_size=48 --set num_hidden_layers=1 \
        --set num_attention_heads=2 --set num_key_value_heads=2 -o l
    run -2 peft-tune -q l p.jsonl -o x --steps 1 --target-len 4
    [ "$output" = "peft-tune: --target-len: serves models with an encoder; l has none: give --seq-len alone" ]
}

@test "T5: coded caches generate alike in any batch, and 8 bits nearly what plain ones do" {
    pairs
    init-model -q t5-9m -t tokenizer.json --set d_model=64 --set d_kv=32 --set d_ff=96 --set num_layers=1 --set num_heads=2 -o wide
    peft-tune -q wide p.jsonl -o w --method full --steps 60 --lr 1e-2
    sed 's/"source"/"prompt"/; s/,"target".*/}/' p.jsonl > q.jsonl
    G=(generate -q w q.jsonl -n 8 --dtype f32 --temperature 0)
    for k in int8 int4 kivi:bits=4,group=16,residual=32 k=auto,v=int8; do
        "${G[@]}" -b 3 --kv $k > a
        "${G[@]}" -b 1 --kv $k | cmp - a
        [ "$(wc -l < a)" -eq 48 ]
    done
    "${G[@]}" > plain
    "${G[@]}" --kv int8 > coded
    [ "$(diff plain coded | grep -c '^>')" -le 6 ]
}

@test "T5: processes share coded caches, with the numbers of one" {
    command -v mpirun > /dev/null || skip "no Open MPI"
    [ -e "$(dirname "$(command -v generate)")/../lib/lmutils/libcore-mpi.so" ] || skip "no module of Open MPI"
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    init-model -q t5-9m -t tokenizer.json --set d_model=64 --set d_kv=32 --set d_ff=96 --set num_layers=1 --set num_heads=2 -o wide
    G=(generate -q wide -p 'the river' -p 'old bridge lay' -n 6 --dtype f32 --temperature 0 --json --logprobs --kv k=int8,v=auto)
    timeout -s KILL 100 mpirun --oversubscribe -n 2 "${G[@]}" --mesh tp=2 > two
    paste <("${G[@]}" | grep -oE '"logprobs":.*' | grep -oE -- '-[0-9.]+') <(grep -oE '"logprobs":.*' two | grep -oE -- '-[0-9.]+') |
        awk '{ d = $1 - $2; n++; bad += d > 2e-3 || d < -2e-3 } END { exit !(n == 12 && !bad) }'
}

@test "T5: what a model with an encoder cannot have is refused in a line" {
    pairs
    refused() {
        run "$@"
        [ "$status" -ne 0 ]
        [[ "$output" == *"a t5 model has an encoder and a decoder"* ]]
        [ "$(wc -l <<< "$output")" -eq 1 ]
    }
    refused generate -q m -p a --kv streaming
    refused generate -q m -p a --kv snapkv
    refused generate -q m -p a --serve-batch 2
    refused generate -q m -p a --save-cache c
    refused peft-tune -q m p.jsonl -o a --steps 1 --target shared
    refused quantize-kv -q --calibrate --method fp8 m data/val --seq-len 32 -o c
    refused quantize-kv -q --evaluate --methods int4 m data/val --seq-len 32
    refused train -q m data -o x --steps 1 --objective clm
    refused eval-model -q m t.jsonl --task multiple-choice --seq-len 32
}

# adapter OUT MODULE IN KEY ... : a LoRA of rank 1 of the module, 32 numbers wide inside, of ones
adapter() {
    local shape='"dtype":"F32","shape":' head
    mkdir "$1"
    echo "{\"peft_type\":\"LORA\",\"task_type\":\"SEQ_2_SEQ_LM\",\"r\":1,\"lora_alpha\":1,\"target_modules\":[\"${2##*.}\"]}" \
        > "$1/adapter_config.json"
    head="{\"base_model.model.$2.lora_A.weight\":{$shape[1,32],\"data_offsets\":[0,128]},"
    head+="\"base_model.model.$2.lora_B.weight\":{$shape[16,1],\"data_offsets\":[128,192]}}"
    perl -e 'print pack("Q<", length $ARGV[0]), $ARGV[0], pack("f<*", (1) x 48)' "$head" > "$1/adapter_model.safetensors"
}

@test "T5: an adapter of a product of the encoder or the decoder does what it does merged" {
    for stack in encoder decoder; do
        adapter "$stack" "$stack.block.0.layer.0.SelfAttention.v"
        sed -i 's/\["v"\]/"'"$stack"'.block.0.layer.0.SelfAttention.v"/' "$stack/adapter_config.json"
        merge-models -q --method linear "m+$stack" -o "merged-$stack"
        a=$(loss m data/val --adapter "$stack" --dtype f32) b=$(loss "merged-$stack" data/val --dtype f32)
        awk -v a="$a" -v b="$b" -v c="$(loss m data/val --dtype f32)" \
            'BEGIN { d = a - b; e = a - c; exit !(d < 1e-5 && d > -1e-5 && (e > 1e-4 || e < -1e-4)) }'
        generate -q m --adapter "$stack" -p 'the river' -n 8 --temperature 0 --dtype f32 > x
        generate -q "merged-$stack" -p 'the river' -n 8 --temperature 0 --dtype f32 | cmp - x
    done
}

@test "T5: spans without room, without sentinels, of models without an encoder; configs that contradict themselves" {
    run train -q m data -o x --steps 1 --seq-len 2
    [ "$status" -eq 2 ]
    [[ "$output" == *"2 tokens have no room for a span"* ]]
    run train -q m data -o x --steps 1 --seq-len 64 --objective span:density=0.4,mean=1
    [ "$status" -eq 2 ]
    [[ "$output" == *"the tokenizer has no <extra_id_"* ]]
    init-model -q llama-1m -t tokenizer.json --set hidden_size=32 --set intermediate_size=48 --set num_hidden_layers=1 \
        --set num_attention_heads=2 --set num_key_value_heads=2 -o l
    cp -r m bare && rm bare/tokenizer*
    for c in "train -q bare data -o x --steps 1 --seq-len 32" "eval-model -q bare data/val --seq-len 32"; do
        run $c
        [ "$status" -eq 2 ]
        [ "$output" = "${c%% *}: bare: has no tokenizer, which names the sentinels: copy its tokenizer into the folder" ]
    done
    run train -q l data -o x --steps 1 --seq-len 32 --objective span
    [ "$status" -eq 2 ]
    [[ "$output" == *"a llama model has no encoder"* ]]
    init-model -q bert-base -t tokenizer.json --set hidden_size=32 --set intermediate_size=48 --set num_hidden_layers=1 \
        --set num_attention_heads=2 -o bert
    run train -q bert data -o x --steps 1 --seq-len 32 --objective span
    [ "$status" -eq 2 ]
    [[ "$output" == *"a bert model has no encoder"* ]]
    cp -r m endless
    sed -Ei 's/"eos_token_id": [0-9]+/"eos_token_id": null/' endless/config.json
    run eval-model -q endless data/val --seq-len 32
    [ "$status" -ne 0 ]
    [[ "$output" == *"the model has no end token"* ]]
    cp -r m beginless
    sed -Ei 's/"decoder_start_token_id": [0-9]+/"decoder_start_token_id": null/; s/("pad_token_id": )[0-9]+/\11000000000/' \
        beginless/config.json
    grep -q 1000000000 beginless/config.json
    run eval-model -q beginless data/val --seq-len 32
    [ "$status" -ne 0 ]
    [[ "$output" == *"'pad_token_id' is 1000000000"* ]]
    [ "$(wc -l <<< "$output")" -eq 1 ]
    run init-model t5-9m -t tokenizer.json --set relative_attention_num_buckets=6 -o x
    [ "$status" -ne 0 ]
    [[ "$output" == *'"relative_attention_num_buckets": is not a multiple of 4'* ]]
    run init-model t5-9m -t tokenizer.json --set relative_attention_max_distance=16 -o x
    [ "$status" -ne 0 ]
    [[ "$output" == *'"relative_attention_max_distance": 16 is not above half of the 32 buckets'* ]]
    run init-model t5-9m -t tokenizer.json --set feed_forward_proj=gated-tanh -o x
    [ "$status" -ne 0 ]
    [[ "$output" == *'"feed_forward_proj": only relu'* ]]
    sed -E 's/("d_kv": )8/\116/' m/config.json > c
    cp c m/config.json
    run eval-model -q m data/val --seq-len 32
    [ "$status" -eq 2 ]
    [[ "$output" == *'SelfAttention'*'has shape'* ]]
}
