# SPDX-License-Identifier: Apache-2.0
# Adapters beside models that are used, and the memory that is stated before an adapter is trained.

bats_require_minimum_version 1.5.0
load memory

setup_file() {
    cd "$BATS_FILE_TMPDIR" || exit 1
    seq 300 | awk '{ print "{\"text\": \"The river number " $1 " walks under the old bridge of stones.\"}" }' > text.jsonl
    seq 60 | awk '{ print "{\"messages\": [{\"role\": \"user\", \"content\": \"The river number " $1 "\"}, {\"role\": \"assistant\", \"content\": \"stones under the bridge\"}]}" }' > chat.jsonl
    train-tokenizer -q -V 320 -o tok/tokenizer.json text.jsonl
    cat > config.json <<END
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320, "hidden_size": 64,
 "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
 "hidden_act": "silu", "max_position_embeddings": 128, "initializer_range": 0.02, "rms_norm_eps": 1e-05,
 "rope_theta": 10000.0, "tie_word_embeddings": true, "eos_token_id": 0}
END
    init-model -q config.json --tokenizer tok/tokenizer.json -o m
    peft-tune -q m text.jsonl -o a --seq-len 64 --batch-size 4 --dtype f32 --lr 5e-3 --steps 20
    peft-tune -q m text.jsonl -o b --seq-len 64 --batch-size 4 --dtype f32 --lr 5e-3 --steps 10 --rank 4 --target q_proj,v_proj --seed 5
    merge-models -q --method passthrough m+a -o merged
}

setup() {
    cd "$BATS_FILE_TMPDIR" || exit 1
}

# Log-probabilities of the new tokens, one a line.
chances() { # generate's arguments
    generate -q "$@" -p 'The river number' -n 6 -T 0 --ignore-eos --dtype f32 --json --logprobs |
        sed 's/.*"logprobs":\[\([^]]*\)\].*/\1/' | tr ',' '\n'
}

# The loss of the texts.
loss() { # MODEL OPTION ...
    eval-model -q --json --seq-len 64 "$1" text.jsonl "${@:2}" | grep -o '"loss":[0-9.]*' | cut -d : -f 2
}

@test "adapter: generate with it says what the merged model says, and the base something else" {
    chances m --adapter a > with
    chances merged > one
    chances m > base
    [ "$(wc -l < with)" -eq 6 ]
    paste with one | awk '{ d = $1 - $2; if (d > 1e-4 || d < -1e-4) exit 1 }'
    run ! cmp -s with base
    chances m --adapter a --serve-batch 4 > served
    paste with served | awk '{ d = $1 - $2; if (d > 1e-4 || d < -1e-4) exit 1 }'
}

@test "adapter: several with names, chosen by prompts, answer as each alone, in order" {
    for i in 1 2; do
        echo '{"prompt": "The river number", "adapter": "one"}'
        echo '{"prompt": "The river number", "adapter": "two"}'
        echo '{"prompt": "The river number"}'
    done > ask.jsonl
    echo '{"prompt": "The river number", "adapter": "three"}' >> ask.jsonl
    how=(-n 6 -T 0 --ignore-eos --dtype f32 --logprobs)
    run -1 generate -q m --adapter one=a --adapter two=b "${how[@]}" -o got ask.jsonl
    [[ $output == *"adapter: there is no adapter 'three': give it by --adapter NAME=PATH"* ]]
    [ "$(wc -l < got)" -eq 7 ]
    for x in a b ""; do
        echo '{"prompt": "The river number"}' | generate -q m ${x:+--adapter "$x"} "${how[@]}"
    done | sed 's/.*\("token_ids".*\)/\1/' > want
    sed 's/.*\("token_ids".*\)/\1/' got | head -n 3 | cmp - want
    sed 's/.*\("token_ids".*\)/\1/' got | sed -n 4,6p | cmp - want
    [ "$(sort -u want | wc -l)" -eq 3 ]
    run -2 generate m --adapter one=a --adapter b -p x
    [[ $output == *"'b' has no name by which prompts choose it"* ]]
    run -2 generate m --adapter one=a -p x
    [[ $output == *"are chosen by the key"* ]]
    # the record's own choice goes before that of the option
    head -n 2 ask.jsonl > two.jsonl
    echo '{"prompt": "The river number", "adapter": ""}' >> two.jsonl
    echo '{"prompt": "The river number"}' >> two.jsonl
    for more in "" "--serve-batch 2"; do
        # shellcheck disable=SC2086
        generate -q m --adapter one=a --adapter two=b --use-adapter two "${how[@]}" $more two.jsonl | grep -o '"token_ids":[^]]*' > got
        sed 's/\].*//' want | sed -n '1p;2p;3p;2p' | cmp - got
    done
    run -2 generate m --adapter one=a --use-adapter two -p x
    [[ $output == "generate: --use-adapter: adapter: there is no adapter 'two': give it by --adapter NAME=PATH" ]]
    run -2 generate m --adapter a --use-adapter a -p x
    [[ $output == *"--use-adapter: chooses one of several adapters by its name: give --adapter NAME=PATH, too" ]]
}

@test "adapter: --use-adapter is for -p, and a talk changes it" {
    same() { # ADAPTER [OPTION ...]: with a name as without
        local path=$1
        shift
        chances m --adapter "$path" "$@" > v.alone
        chances m --adapter one="$path" --adapter two=a --use-adapter one "$@" > v.named
        cmp v.alone v.named
    }
    same b
    same b --serve-batch 4
    peft-tune -q m chat.jsonl -o soft --method prompt --set num_virtual_tokens=5 --seq-len 64 --batch-size 4 --dtype f32 \
        --lr 0.3 --steps 20 --chat-template chatml
    same soft
    same soft --serve-batch 4
    how=(-q --chat --chat-template chatml -n 40 -T 2 --dtype f32 --ignore-eos)
    talk() { echo 'The river number' | generate m "$@" "${how[@]}"; }
    talk --seed 7 > v.base
    talk --seed 7 --adapter soft > v.soft
    run ! cmp -s v.base v.soft
    { talk --seed 4 --adapter a && cat v.soft && talk --seed 10; } > v.want
    # each line of a talk has the seed after the one before
    printf '%s\n' 'The river number' /reset '/adapter two' 'The river number' /reset /adapter 'The river number' |
        generate m --adapter one=a --adapter two=soft --use-adapter one "${how[@]}" --seed 4 | cmp - v.want
    # as a record with messages says
    echo '{"messages": [{"role": "user", "content": "The river number"}]}' |
        generate -q m --adapter soft --chat-template chatml "${how[@]:4}" --seed 7 | sed 's/.*"text":"\(.*\)","tokens":.*/\1/' > v.one
    printf '%b\n' "$(cat v.one)" | cmp - v.soft
    run generate m --adapter one=a "${how[@]}" <<< '/adapter three'
    [ "$status" -eq 0 ]
    run --separate-stderr generate m --adapter one=a "${how[@]:1}" <<< '/adapter three'
    [[ $stderr == *"/adapter: there is no adapter 'three': give it by --adapter NAME=PATH"* ]]
}

# copy ADAPTER TO TENSOR BYTES: with its first element of this tensor replaced (escapes of printf)
copy_with() {
    local file=$2/adapter_model.safetensors n at
    mkdir -p "$2"
    cp -L "$1"/adapter_config.json "$1"/adapter_model.safetensors "$2"
    n=$(od -An -t u8 -N 8 "$file")
    at=$(head -c $((n + 8)) "$file" | tail -c +9 | sed "s/.*\"$3\":{[^}]*\"data_offsets\":\[\([0-9]*\),.*/\1/")
    printf "$4" | dd of="$file" bs=1 seek=$((8 + n + at)) conv=notrunc status=none
}

@test "adapter: one with a NaN or an infinity is refused when it is read, beside others and alone" {
    tensor=base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight
    copy_with a nan $tensor '\x00\x00\xc0\x7f'
    copy_with a inf $tensor '\x00\x00\x80\xff'
    printf '{"prompt": "The river", "adapter": "%s"}\n' good bad > mixed.jsonl
    run -4 --separate-stderr generate --adapter good=a --adapter bad=nan -q m --serve-batch 2 -n 2 mixed.jsonl
    [ "$stderr" = "generate: nan/adapter_model.safetensors: tensor \"$tensor\" holds a NaN: use another checkpoint of the adapter, or train it again" ]
    run -4 --separate-stderr generate --adapter inf -q m -p "The river" -n 2
    [[ $stderr == *"$tensor\" holds an infinity: "* ]]
    run -4 --separate-stderr peft-tune -q m text.jsonl -o no --init-adapter nan
    [[ $stderr == "peft-tune: nan/adapter_model.safetensors: tensor \"$tensor\" holds a NaN: "* ]]
    [ ! -e no ]
    # 1e10 stays in the rows of its own prompt
    copy_with a huge $tensor '\xf9\x02\x15\x50'
    echo '{"prompt": "The river number", "adapter": "a"}' > one.jsonl
    generate -q m --adapter a=a --adapter huge=huge -n 4 -T 0 --ignore-eos --logprobs one.jsonl > alone
    sed 's/"a"/"huge"/' one.jsonl | cat - one.jsonl |
        generate -q m --adapter a=a --adapter huge=huge -n 4 -T 0 --ignore-eos --logprobs --serve-batch 2 > both
    tail -n 1 both | cmp - alone
    run cmp <(head -n 1 both | sed 's/huge/a/') alone
    [ "$status" -eq 1 ]
}

@test "adapter: what stands apart from the weights is not merged, and its kind is named" {
    for method in houlsby pfeiffer prompt; do
        peft-tune -q m text.jsonl -o "apart-$method" --method "$method" --seq-len 64 --batch-size 4 --steps 1
        run -2 --separate-stderr merge-models -q --method passthrough "m+apart-$method" -o no
        case $method in
        prompt) type=PROMPT_TUNING ;;
        *) type="$method (a bottleneck)" ;;
        esac
        [ "$stderr" = "merge-models: apart-$method: an adapter of type '$type' is not a change of weights: it cannot be merged: use it beside its base, with generate or eval-model" ]
    done
    [ ! -e no ]
}

@test "adapter: a batch of prompts of several adapters answers as each alone, and they share no pages" {
    long=$(seq 12 | awk '{ printf "The river number %d walks. ", $1 }')
    peft-tune -q m text.jsonl -o neck --method houlsby --seq-len 64 --batch-size 4 --dtype f32 --lr 5e-2 --steps 10
    peft-tune -q m text.jsonl -o pre --method prefix --set num_virtual_tokens=3 --seq-len 64 --batch-size 4 --dtype f32 \
        --lr 5e-2 --steps 10
    names=(a neck b pre) all=()
    for x in "${names[@]}"; do
        all+=(--adapter "$x=$x")
    done
    for i in 1 2; do
        for x in "${names[@]}" ""; do
            echo "{\"prompt\": \"$long\", \"adapter\": \"$x\"}"
        done
    done > mixed.jsonl
    how=(-n 6 -T 0 --ignore-eos --dtype f32 --logprobs --serve-batch 8)
    generate -q m "${all[@]}" "${how[@]}" mixed.jsonl | sed 's/.*"text"/"text"/' > got
    for x in "${names[@]}" ""; do
        echo "{\"prompt\": \"$long\"}" | generate -q m ${x:+--adapter "$x"} "${how[@]}"
    done | sed 's/.*"text"/"text"/' > want
    grep -q '"prompt_tokens":\(6[4-9]\|[7-9][0-9]\)' want # more than a page
    cat want want | cmp - got
    [ "$(sort -u want | wc -l)" -eq 5 ]
    # in BF16, too, where sums are rounded
    for x in a b ""; do
        echo "{\"prompt\": \"$long\"}" | generate -q m ${x:+--adapter "$x"} "${how[@]}" --dtype bf16
    done | sed 's/.*"text"/"text"/' > want
    for x in a b ""; do
        echo "{\"prompt\": \"$long\", \"adapter\": \"$x\"}"
    done | generate -q m "${all[@]}" "${how[@]}" --dtype bf16 | sed 's/.*"text"/"text"/' | cmp - want
    # beginnings of prompts are shared by those of one adapter
    generate m "${all[@]}" "${how[@]}" --json mixed.jsonl 2> /dev/null | tail -n 1 > kv
    grep -q '"hits":[1-9]' kv
}

@test "adapter: eval-model measures it as the merged model" {
    loss() { eval-model -q "$@" text.jsonl --seq-len 64 --json | sed 's/.*"loss":\([0-9.]*\).*/\1/'; }
    loss m --adapter a > with
    loss merged > one
    loss m > base
    paste with one base | awk '{ exit !($1 - $2 < 1e-4 && $2 - $1 < 1e-4 && $1 < $3 - 0.5) }'
}

@test "adapter: eval-model measures virtual tokens" {
    loss() { eval-model -q m "$@" one.jsonl --json | sed 's/.*"loss":\([0-9.]*\),.*"tokens":\([0-9]*\).*/\1 \2/'; }
    sed -n 7p text.jsonl > one.jsonl
    for method in prompt prefix; do
        peft-tune -q m text.jsonl -o "$method" --method "$method" --set num_virtual_tokens=5 --seq-len 64 --batch-size 4 \
            --dtype f32 --lr 5e-2 --steps 10
        eval-model -q m --adapter "$method" --seq-len 64 one.jsonl > whole
        grep -q '"virtual_tokens":5' whole
    done
    [ "$(loss --seq-len 64 | cut -d ' ' -f 2)" -eq "$(loss --adapter prefix --seq-len 64 | cut -d ' ' -f 2)" ]
    [ "$(($(loss --seq-len 64 | cut -d ' ' -f 2) + 1))" -eq "$(loss --adapter prompt --seq-len 64 | cut -d ' ' -f 2)" ]
    # windows with room for all or few of the tokens, and one with none
    for method in prompt prefix; do
        loss --adapter "$method" --seq-len 64 > v.a
        loss --adapter "$method" --seq-len 64 --batch-size 1 --stride 3 > v.b
        paste v.a v.b | awk '{ exit !($1 - $3 < 1e-4 && $3 - $1 < 1e-4 && $2 == $4) }'
        loss --seq-len 64 > v.base
        paste v.a v.base | awk '{ exit !($1 < $3) }'
        loss --adapter "$method" --seq-len 9 --stride 2 > v.c
        paste v.a v.c | awk '{ exit !($2 == $4 && $1 != $3) }'
    done
    run -2 eval-model m --adapter prompt --seq-len 5 one.jsonl
    [[ $output == "eval-model: prompt: has 5 virtual tokens, which leave no room in windows of 5: raise --seq-len" ]]
    run -2 eval-model m --adapter prompt --seq-len 16 --stride 12 one.jsonl
    [[ $output == *"--stride: 12 is more than --seq-len without virtual tokens, 11"* ]]
}

@test "adapter: what cannot be attached is refused" {
    sed 's/"hidden_size": 64/"hidden_size": 32/' config.json > small.json
    init-model -q small.json --tokenizer tok/tokenizer.json -o small
    run -2 generate small --adapter a -p x
    [ "$(wc -l <<< "$output")" -eq 1 ]
    [[ $output == "generate: a: "*lora_B.weight*"use the model on which it was trained" ]]
    for start in "pissa --set use_dora=true"; do # beside the base it is of full rank
        # shellcheck disable=SC2086
        peft-tune -q m text.jsonl -f -o full-rank --method $start --seq-len 64 --batch-size 4 --dtype f32 --steps 2
        for t in "generate m -p x" "eval-model m text.jsonl"; do
            # shellcheck disable=SC2086
            run -2 $t --adapter full-rank
            [[ $output == *": full-rank: init_lora_weights '${start%% *}' changes the weights of the base: merge it by merge-models MODEL+ADAPTER, or convert it to a plain LoRA" ]]
        done
    done
    run -2 generate m --adapter a -p x --save-cache c
    [[ $output == "generate: --adapter: caches in files are those of the model alone: leave out --save-cache and --load-cache"* ]]
    run generate m --adapter nowhere -p x
    [ "$status" -ne 0 ]
    [[ $output == *nowhere* ]]
    run -2 generate m --adapter m -p x
    [[ $output == "generate: m: it is a whole model, not an adapter: name it in place of the model" ]]
    mkdir -p nothing && run -2 generate m --adapter nothing -p x
    [[ $output == *adapter_config.json* ]]
}

@test "adapter: those that began with a part of the base are attached, merged and converted alike" {
    for start in pissa olora loftq; do # which took their first B A out of the base
        peft-tune -q m text.jsonl -o "$start" --method "$start" --seq-len 64 --batch-size 4 --dtype f32 --steps 2
        merge-models -q --method passthrough "m+$start" -o "merged-$start"
        peft-tune -q --to-lora --rank 64 m "$start" -o "plain-$start"
        cp -r "$start" "naive-$start" # applied to the base as it is
        sed -i 's/"init_lora_weights": *"[a-z]*"/"init_lora_weights": true/' "naive-$start/adapter_config.json"
        run -0 loss "merged-$start"
        merged=$output
        run -0 loss m --adapter "plain-$start"
        awk -v a="$merged" -v b="$output" 'BEGIN { d = a - b; exit !(a > 0 && d < 1e-4 && d > -1e-4) }'
        run -0 loss m --adapter "naive-$start"
        awk -v a="$merged" -v b="$output" 'BEGIN { d = a - b; exit !(d > 1e-4 || d < -1e-4) }'
        run -0 loss m --adapter "$start"
        awk -v a="$merged" -v b="$output" 'BEGIN { d = a - b; exit !(d < 1e-5 && d > -1e-5) }'
    done
}

@test "adapter: one that names weights, not modules, is attached and merged as it would be by modules" {
    cp -r b weights
    echo '{"peft_type": "LORA", "r": 7, "lora_alpha": 8, "target_modules": [], "rank_pattern": {"_proj.weight": 3, "[qv]_proj.weight": 4},
        "target_parameters": ["self_attn.q_proj.weight", "v_proj.weight"]}' > weights/adapter_config.json
    [ "$(loss m --adapter weights)" = "$(loss m --adapter b)" ]
    merge-models -q -f --method passthrough m+weights -o merged-weights
    merge-models -q -f --method passthrough m+b -o merged-b
    cmp merged-weights/model.safetensors merged-b/model.safetensors || [ "$(loss merged-weights)" = "$(loss merged-b)" ]
}

@test "adapter: that of LoftQ brings the weights beside which it trained, whatever the base is stored in" {
    peft-tune -q -f m text.jsonl -o q4 --method loftq --seq-len 64 --batch-size 4 --dtype f32 --lr 5e-3 --steps 5
    grep -q '"loftq_bits": 4' q4/adapter_config.json # PEFT asks for it
    convert-model -q -f m -o m.gguf --type q8_0
    convert-model -q -f m.gguf -o decoded
    merge-models -q -f --method passthrough decoded+q4 -o merged-q4
    paste <(loss m.gguf --adapter q4 --dtype f32) <(loss merged-q4 --dtype f32) | awk '{ d = $1 - $2; exit !($1 > 0 && d < 1e-5 && d > -1e-5) }'
    chances m.gguf --adapter q4 > with
    chances merged-q4 > one
    paste with one | awk '{ d = $1 - $2; if (d > 1e-4 || d < -1e-4) exit 1 }'
    # in a batch beside others it keeps its weights, and the others theirs
    for x in four one; do
        echo '{"prompt": "The river number", "adapter": "'$x'"}'
    done > ask.jsonl
    how=(-n 6 -T 0 --ignore-eos --dtype f32 --logprobs)
    generate -q m.gguf --adapter four=q4 --adapter one=a "${how[@]}" --serve-batch 2 -f -o got ask.jsonl
    for x in q4 a; do
        echo '{"prompt": "The river number"}' | generate -q m.gguf --adapter "$x" "${how[@]}"
    done | grep -o '"token_ids":[^]]*' > want
    grep -o '"token_ids":[^]]*' got | cmp - want
}

@test "adapter: the head of its own is adapted: trained, attached and merged alike" {
    sed 's/"tie_word_embeddings": true/"tie_word_embeddings": false/' config.json > untied.json
    init-model -q untied.json --tokenizer tok/tokenizer.json -o u
    tune=(peft-tune -q -f u text.jsonl --seq-len 64 --batch-size 4 --dtype f32 --lr 5e-3 --steps 10)
    for how in "--target lm_head" "--target q_proj,lm_head --method dora" "--target lm_head --method loha"; do
        # shellcheck disable=SC2086
        "${tune[@]}" -o head $how
        merge-models -q -f --method passthrough u+head -o merged-head
        chances u --adapter head > with
        chances merged-head > one
        [ "$(wc -l < with)" -eq 6 ]
        paste with one | awk '{ d = $1 - $2; if (d > 1e-4 || d < -1e-4) exit 1 }'
        chances u > base
        run ! cmp -s with base
        paste <(loss u --adapter head) <(loss merged-head) | awk '{ d = $1 - $2; exit !(d < 1e-4 && d > -1e-4) }'
        paste <(loss u --adapter head) <(loss u) | awk '{ exit !($1 < $2 - 0.01) }'
    done
    chances u --adapter head --serve-batch 4 > served
    paste with served | awk '{ d = $1 - $2; if (d > 1e-4 || d < -1e-4) exit 1 }'
    run -2 "${tune[@]}" -o none --target lm_head --set lora_dropout=0.1
    [[ $output == *"lora_dropout: lora trains the head without dropout: set it to 0"* ]]
    run -2 "${tune[@]}" -o none --target lm_head --method beft
    [[ $output == *"beft has no form on the head 'lm_head': take it from the targets"* ]]
}

@test "adapter: an embedding that the head is tied to is adapted alone, also in the merged model" {
    peft-tune -q -f m text.jsonl -o in --seq-len 64 --batch-size 4 --dtype f32 --lr 5e-2 --steps 5 --target embed_tokens,q_proj
    merge-models -q -f --method passthrough m+in -o merged-in
    paste <(loss m --adapter in) <(loss merged-in) <(loss m) |
        awk '{ d = $1 - $2; exit !(d < 1e-5 && d > -1e-5 && ($1 - $3 > 0.01 || $3 - $1 > 0.01)) }'
    grep -q '"tie_word_embeddings": false' merged-in/config.json
    chances m --adapter in > with
    chances merged-in > one
    paste with one | awk '{ d = $1 - $2; if (d > 1e-4 || d < -1e-4) exit 1 }'
    tar cf m.tar -C m . # a stream has each tensor once
    for base in m.tar -; do
        merge-models -q -f --method passthrough "$base+in" -o merged-stream < m.tar
        [ "$(loss merged-stream)" = "$(loss merged-in)" ]
    done
    # rows of tokens train in both, and so they stay
    peft-tune -q -f m text.jsonl -o rows --seq-len 64 --batch-size 4 --dtype f32 --lr 5e-2 --steps 5 --method tokens --set 'token_indices=[3,270]'
    merge-models -q -f --method passthrough m+rows -o merged-rows
    grep -q '"tie_word_embeddings": true' merged-rows/config.json
    run -2 peft-tune --to-lora m rows -o no
    [[ $output == *": rows: it trains rows of the embedding and of the head that is tied to it, and LoRA changes one of them: merge it into its base" ]]
    [ ! -e no ]
}

@test "adapter: one with rows of tokens is not combined, as factors have no place for them" {
    peft-tune -q -f m text.jsonl -o beside --seq-len 64 --batch-size 4 --dtype f32 --steps 2 --set 'trainable_token_indices=[3,270]'
    for way in cat linear svd; do
        run -2 peft-tune --combine $way m a beside -o no
        [[ $output == *": beside: it trains rows of 'model.embed_tokens', for which factors have no place: "* ]]
        [ ! -e no ]
    done
    run -2 peft-tune --to-lora m beside -o no
    [[ $output == *": beside: it trains rows of 'model.embed_tokens', for which factors have no place: "* ]]
}

@test "adapter: the tar of a run is one, links and all in a file, and with tar -h in a stream" {
    tar -cf links.tar a
    tar -chf files.tar a
    run -0 chances m --adapter a
    want=$output
    for tar in links.tar files.tar; do
        run -0 chances m --adapter $tar
        [ "$output" = "$want" ]
    done
    run -0 chances m --adapter - < <(cat files.tar)
    [ "$output" = "$want" ]
    run -0 chances m --adapter - < <(gzip -c files.tar)
    [ "$output" = "$want" ]
}

@test "adapter: memory is stated by part and kept to within 5 %" {
    plain_memory peft-tune
    init-model -q config.json --tokenizer tok/tokenizer.json -s hidden_size=512 -s intermediate_size=1536 \
        -s num_hidden_layers=6 -o wide
    keeps() { # MODEL LENGTH METHOD [OPTION ...]
        local how=("$1" text.jsonl -o "$3-out" --method "${@:3}" --seq-len "$2" --batch-size 8 --dtype f32 --steps 3) planned used
        peft-tune -q "${how[@]}" --dry-run --json > plan
        peft-tune -q "${how[@]}" --json > done
        planned=$(grep -o '"memory_total": *[0-9]*' plan | grep -o '[0-9]*$')
        used=$(grep -o '"peak_memory_bytes": *[0-9]*' done | grep -o '[0-9]*$')
        awk -v p="$planned" -v u="$used" 'BEGIN { printf "planned %.1f MiB, used %.1f MiB\n", p / 2^20, u / 2^20; exit !(u < 1.05 * p && u > 0.95 * p) }'
    }
    keeps wide 128 fourierft --set n_frequency=300
    grep -q '"constants"' plan
    keeps wide 64 waveft
    keeps wide 64 shira
    grep -q '"indices of the adapter (host)"' plan
    # the start, which finds singular values of one large matrix, takes more than the steps
    init-model -q config.json --tokenizer tok/tokenizer.json -s hidden_size=1024 -s intermediate_size=4096 \
        -s num_hidden_layers=1 -o large
    for method in pissa loftq; do
        keeps large 16 $method --target up_proj
        grep -q '"start of the adapter"' plan
    done
    keeps large 16 osf --target up_proj
    keeps wide 128 lora
    keeps wide 128 qlora
    grep -q '"frozen (nf4_dq)"' plan
    peft-tune wide text.jsonl --rank 1000000 --seq-len 64 --batch-size 4 --dry-run > plan
    grep -q 'does not fit here: .* would do: lower the --rank of the adapter, or use a smaller model$' plan
}

@test "adapter: eval-model takes one" {
    run -2 eval-model m text.jsonl --adapter a --adapter b
    [ "$output" = "eval-model: --adapter: one adapter is measured, and here are several: merge them first, or measure one after the other" ]
}
