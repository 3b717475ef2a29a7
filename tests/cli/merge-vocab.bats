#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# merge-models: models whose tokenizers differ.

bats_require_minimum_version 1.5.0

# a/ and b/: the same architecture, tokenizers learned from different texts; a2/ has the tokenizer of a/.
setup_file() {
    cd "$BATS_FILE_TMPDIR"
    awk 'BEGIN { for (i = 0; i < 200; i++) printf "The system reads word%d and writes line %d of it.\n\n", i % 37, i }' > words.txt
    awk 'BEGIN { for (i = 0; i < 200; i++) printf "Numbers: %d plus %d makes %d exactly.\n\n", i % 17, i % 23, i % 17 + i % 23 }' > sums.txt
    train-tokenizer -q --vocab-size 300 --pattern llama3 -o tok-a/tokenizer.json words.txt
    train-tokenizer -q --vocab-size 310 --pattern llama3 --special '<|endoftext|>' --special '<|sum|>' -o tok-b/tokenizer.json sums.txt
    small="--set num_hidden_layers=1 --set hidden_size=32 --set intermediate_size=48"
    init-model -q llama-1m $small --tokenizer tok-a/tokenizer.json --seed 1 -o a/
    init-model -q llama-1m $small --tokenizer tok-a/tokenizer.json --seed 2 -o a2/
    init-model -q llama-1m $small --set tie_word_embeddings=false --tokenizer tok-b/tokenizer.json --seed 3 -o b/
    init-model -q llama-1m $small --tokenizer tok-b/tokenizer.json --seed 4 -o b2/
    shard-data -q --tokenizer tok-a --split blank -o data-a/ words.txt
    shard-data -q --tokenizer tok-b --split blank -o data-b/ sums.txt
}

setup() {
    cd "$BATS_FILE_TMPDIR"
    out=$BATS_TEST_TMPDIR
}

loss() { eval-model -q "$@" | grep -o '"loss":[-0-9.e+]*'; }
vocab() { grep -o '"vocab_size": *[0-9]*' "$1/config.json" | grep -o '[0-9]*$'; }
tokens() { grep -o '"vocab":{[^}]*}' "$1/tokenizer.json" | grep -c .; }

@test "merge-models: tokenizers that differ without a policy are an error, and nothing is written" {
    run merge-models -m linear a/ b2/ -o "$out/x"
    [ "$status" -eq 2 ]
    [ "${#lines[@]}" -eq 1 ]
    [[ "$output" == *"b2/: its tokenizer is not that of a/: of its tokens it has "*"that a/ lacks, lacks "*": choose the tokenizer"* ]]
    [ ! -e "$out/x" ]
    [ -z "$(ls -A "$out")" ]
    # the same tokenizer needs no policy
    merge-models -q -m linear a/ a2/ -o "$out/same"
    [ "$(vocab "$out/same")" -eq 300 ]
    cmp a/tokenizer.json "$out/same/tokenizer.json"
}

@test "merge-models: the same tokens with another pre-tokeniser: a warning" {
    cp -r a2 "$out/other"
    sed -i 's/"normalizer": *null/"normalizer": {"type": "NFC"}/' "$out/other/tokenizer.json"
    run merge-models -m linear a/ "$out/other" -o "$out/x"
    [ "$status" -eq 0 ]
    [[ "$output" == *"other: its tokenizer has the tokens of that of a/, but another "*": texts are split otherwise"* ]]
    cmp a/tokenizer.json "$out/x/tokenizer.json"
    # another form of the same file is equal
    tr -d '\n' < a2/tokenizer.json > "$out/flat"
    cp "$out/flat" "$out/other/tokenizer.json"
    run merge-models -q -m linear a/ "$out/other" -o "$out/y"
    [ -z "$output" ]
}

@test "merge-models --tokenizer base and MODEL: that model's ids, its rows bit for bit" {
    merge-models -q -m task_arithmetic -b a/ b2/:0 --tokenizer base -o "$out/base"
    [ "$(vocab "$out/base")" -eq 300 ]
    cmp a/tokenizer.json "$out/base/tokenizer.json"
    [ "$(loss "$out/base" data-a/train)" = "$(loss a/ data-a/train)" ]

    merge-models -q -m linear a/:0 b2/:1 --tokenizer b2/ -o "$out/b"
    [ "$(vocab "$out/b")" -eq "$(vocab b2)" ]
    cmp b2/tokenizer.json "$out/b/tokenizer.json"
    [ "$(loss "$out/b" data-b/train)" = "$(loss b2/ data-b/train)" ]
}

special() { tr -d ' \n' < "$1" | grep -o "\"$2\":\(\[[0-9,]*\]\|[a-z0-9]*\)" | cut -d: -f2; }

@test "merge-models --tokenizer: special tokens are those that the tokenizer's model has" {
    cp -r b2 "$out/s"
    sum=$(grep -o '"<|sum|>": *[0-9]*' b2/tokenizer.json | head -n 1 | grep -o '[0-9]*$')
    sed -i "s/\"eos_token_id\": *[a-z0-9]*/\"eos_token_id\": $sum/" "$out/s/config.json"
    echo "{\"eos_token_id\": [0, $sum]}" > "$out/s/generation_config.json"
    [ "$(special "$out/s/config.json" eos_token_id)" -eq "$sum" ]
    # the config is that of the first model, but its <|sum|> is not in the tokenizer of a/
    merge-models -q -m linear "$out/s:0" a/:1 --tokenizer a/ -o "$out/to-a"
    [ "$(special "$out/to-a/config.json" eos_token_id)" = "$(special a/config.json eos_token_id)" ]
    [ "$(special "$out/to-a/generation_config.json" eos_token_id)" = "$(special a/config.json eos_token_id)" ]
    # a union keeps the special tokens of the first model
    merge-models -q -m task_arithmetic -b "$out/s" a/ --tokenizer union -o "$out/u"
    [ "$(special "$out/u/config.json" eos_token_id)" -eq "$sum" ]
    [ "$(special "$out/u/generation_config.json" eos_token_id)" = "[0,$sum]" ]
}

@test "merge-models --tokenizer union: all tokens, padded, and a model that loads" {
    merge-models -q -m linear a/ b2/ --tokenizer union --pad-to-multiple-of 64 -o "$out/u"
    n=$(vocab "$out/u")
    [ $((n % 64)) -eq 0 ]
    [ "$n" -gt 310 ]
    grep -q '<|sum|>' "$out/u/tokenizer.json"
    # the ids of the first model are kept: its shards stay valid
    loss "$out/u" data-a/train
    loss "$out/u" sums.txt
    inspect-model "$out/u" > "$out/i"
    generate "$out/u" -p 'Numbers: 1 plus' -n 4 --temperature 0 > "$out/g"
    # the same with the tokenizer of a YAML file
    cat > "$out/m.yaml" <<END
merge_method: linear
models:
  - {model: $PWD/a/, parameters: {weight: 1}}
  - {model: $PWD/b2/, parameters: {weight: 1}}
tokenizer: {source: union, pad_to_multiple_of: 64}
END
    merge-models -q --config "$out/m.yaml" -o "$out/y"
    cmp "$out/u/tokenizer.json" "$out/y/tokenizer.json"
    cmp <(tail -c 30000 "$out/u/model.safetensors") <(tail -c 30000 "$out/y/model.safetensors")
}

@test "merge-models --tokenizer: vocab_size, special tokens and types inside text_config" {
    for m in a b2; do
        cp -r $m "$out/$m"
        printf '{"model_type":"duo","dtype":"bfloat16","torch_dtype":"bfloat16","text_config":%s}\n' \
            "$(sed 's/"torch_dtype": "float32"/"dtype": "bfloat16"/' $m/config.json)" > "$out/$m/config.json"
    done
    sum=$(grep -o '"<|sum|>": *[0-9]*' b2/tokenizer.json | head -n 1 | grep -o '[0-9]*$')
    sed -i "s/\"eos_token_id\": *[a-z0-9]*/\"eos_token_id\": $sum/" "$out/b2/config.json"
    for way in base union; do
        merge-models -q -m task_arithmetic -b "$out/a" "$out/b2" --tokenizer $way -o "$out/$way"
        tr -d ' \n' < "$out/$way/config.json" > "$out/c"
        rows=$(inspect-model "$out/$way" | sed -n 's/.*\[\([0-9]*\), 32\].* model.embed_tokens.weight$/\1/p')
        grep -q "\"text_config\":{.*\"vocab_size\":$rows[,}]" "$out/c"
        [ "$(grep -o '"vocab_size"' "$out/c" | wc -l)" -eq 1 ]
        grep -q '^{"model_type":"duo","dtype":"float32","torch_dtype":"float32","text_config":{.*"dtype":"float32"' "$out/c"
        run ! grep -q bfloat16 "$out/c"
    done
    [ "$rows" -gt 300 ]
    # the special tokens of another model's tokenizer, in its part of the config
    merge-models -q -m linear "$out/a:0" "$out/b2:1" --tokenizer "$out/b2" -o "$out/own"
    [ "$(vocab "$out/own")" -eq "$(vocab b2)" ]
    [ "$(special "$out/own/config.json" eos_token_id)" -eq "$sum" ]
    # without a change of the tokenizer: the rows of the tensors
    sed -i 's/"vocab_size": 300/"vocab_size": 290/' "$out/a/config.json"
    merge-models -q -m passthrough "$out/a" -o "$out/rows"
    [ "$(vocab "$out/rows")" -eq 300 ]
}

@test "merge-models --tokenizer union: the chat template is kept, unless another is requested" {
    cp -r a "$out/a" && cp -r b2 "$out/b"
    printf '{{ one }}' > "$out/a/chat_template.jinja"
    printf '{{ two }}' > "$out/b/chat_template.jinja"
    merge-models -q -m linear "$out/a" "$out/b" --tokenizer union -o "$out/u"
    cmp "$out/a/chat_template.jinja" "$out/u/chat_template.jinja"
    merge-models -q -m linear "$out/a:0" "$out/b:1" --tokenizer "$out/b" -o "$out/v"
    cmp "$out/b/chat_template.jinja" "$out/v/chat_template.jinja"
    printf 'merge_method: linear\nmodels: [{model: %s, parameters: {weight: 1}}, {model: %s, parameters: {weight: 1}}]\n' "$out/a" "$out/b" > "$out/y"
    printf 'tokenizer_source: union\nchat_template: chatml\n' >> "$out/y"
    merge-models -q --config "$out/y" -o "$out/w"
    [ ! -e "$out/w/chat_template.jinja" ]
    grep -q im_start "$out/w/tokenizer_config.json"
}

@test "merge-models: tokenizers that cannot be read are compared by their bytes" {
    for m in one two; do
        mkdir "$out/$m" && cp a/config.json a/model.safetensors "$out/$m/"
        echo same > "$out/$m/sentencepiece.bpe.model"
    done
    merge-models -q -m linear "$out/one" "$out/two" -o "$out/x"
    cmp "$out/one/sentencepiece.bpe.model" "$out/x/sentencepiece.bpe.model"
    echo other > "$out/two/sentencepiece.bpe.model"
    for policy in "" "--tokenizer union"; do
        run merge-models -m linear "$out/one" "$out/two" $policy -o "$out/y"
        [ "$status" -eq 2 ]
        [[ "$output" == *"two: its sentencepiece.bpe.model is not that of $out/one"*"cannot be read: save both with a tokenizer.json"* ]]
        [ ! -e "$out/y" ]
    done
    # one without a tokenizer beside two that differ: those two are compared
    rm "$out/one/sentencepiece.bpe.model"
    run merge-models -m linear "$out/one" a/ b2/ -o "$out/y"
    [ "$status" -eq 2 ]
    [[ "$output" == *"b2/: its tokenizer is not that of a/"* ]]
    run merge-models -m linear "$out/one" a/ b2/ --tokenizer a/ -o "$out/y"
    [ "$status" -eq 2 ]
    [[ "$output" == *"one: has no tokenizer, which remapping its embedding needs"* ]]
}

@test "merge-models: embeddings of tokens by rules" {
    cat > "$out/m.yaml" <<END
merge_method: task_arithmetic
base_model: $PWD/a/
models:
  - {model: $PWD/b2/, parameters: {weight: 0}}
tokenizer:
  source: base
  tokens:
    <|sum|>: {source: {kind: model_token, model: $PWD/b2/, token: <|endoftext|>}}
    <|zero|>: {source: {kind: zero}}
END
    merge-models -q --config "$out/m.yaml" -o "$out/y"
    [ "$(vocab "$out/y")" -eq 302 ]
    grep -q '<|zero|>' "$out/y/tokenizer.json"
    loss "$out/y" words.txt
    sed -i 's/token: <|endoftext|>/token: nothing-like-it/' "$out/m.yaml"
    run merge-models --config "$out/m.yaml" -o "$out/z"
    [ "$status" -eq 2 ]
    [[ "$output" == *"no token \"nothing-like-it\""* ]]
    [ ! -e "$out/z" ]
}

@test "merge-models: a tied and a separate head are permuted, too" {
    merge-models -q -m linear b/:1 a/:0 --tokenizer b/ -o "$out/m"
    [ "$(loss "$out/m" data-b/train)" = "$(loss b/ data-b/train)" ]
    # the tied one first: the result still has a head
    merge-models -q -m linear a/:0 b/:1 --tokenizer b/ -o "$out/n"
    [ "$(loss "$out/n" data-b/train)" = "$(loss b/ data-b/train)" ]
    grep -q '"tie_word_embeddings": false' "$out/n/config.json"
}

@test "merge-models: a tied model on a stream gives its embedding twice" {
    small="--set num_hidden_layers=1 --set hidden_size=32 --set intermediate_size=48 --set vocab_size=96"
    init-model -q llama-1m $small --set tie_word_embeddings=true --seed 1 -o "$out/t"
    init-model -q llama-1m $small --set tie_word_embeddings=false --seed 2 -o "$out/u"
    merge-models -q -m linear "$out/t:0.4" "$out/u:0.6" -o "$out/want"
    tar -C "$out/t" -cf - config.json model.safetensors | merge-models -q -m linear -:0.4 "$out/u:0.6" -o "$out/got"
    inspect-model --check "$out/want" "$out/got"
    merge-models -q -m linear "$out/u:0.6" "$out/t:0.4" -o "$out/want2"
    tar -C "$out/t" -cf - config.json model.safetensors | merge-models -q -m linear "$out/u:0.6" -:0.4 -o "$out/got2"
    inspect-model --check "$out/want2" "$out/got2"
    inspect-model --check "$out/want" "$out/want2"
}

@test "merge-models: an adapter whose own tokenizer has other tokens: a warning" {
    mkdir "$out/lora"
    printf '{"peft_type": "LORA", "r": 1, "lora_alpha": 1}' > "$out/lora/adapter_config.json"
    header='{"base_model.model.model.norm.modules_to_save.weight":{"dtype":"F32","shape":[32],"data_offsets":[0,128]}}'
    while [ $((${#header} % 8)) -ne 0 ]; do header="$header "; done
    {
        printf "\\x$(printf %x ${#header})\\0\\0\\0\\0\\0\\0\\0%s" "$header"
        head -c 128 /dev/zero
    } > "$out/lora/adapter_model.safetensors"
    cp a/tokenizer.json "$out/lora/"
    run merge-models -m passthrough "a/+$out/lora" -o "$out/x"
    [ "$status" -eq 0 ]
    [ -z "$output" ]
    cp b2/tokenizer.json "$out/lora/"
    run merge-models -m passthrough "a/+$out/lora" -o "$out/y"
    [ "$status" -eq 0 ]
    [[ "$output" == *"the adapter's tokenizer has other tokens than its base, whose tokenizer is used"* ]]
    cmp a/tokenizer.json "$out/y/tokenizer.json"
}

# A tokenizer as vocab.json and merges.txt, the first published form of GPT-2's.
split() {
    python3 - "$1" <<'END'
import json, os, sys
path = sys.argv[1] + "/tokenizer.json"
model = json.load(open(path))["model"]
json.dump(model["vocab"], open(sys.argv[1] + "/vocab.json", "w"))
merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
open(sys.argv[1] + "/merges.txt", "w").write("#version: 0.2\n" + "\n".join(merges) + "\n")
os.remove(path)
END
}

@test "merge-models: vocab.json and merges.txt are a tokenizer" {
    command -v python3 > /dev/null || skip "python3 takes the tokenizer apart"
    train-tokenizer -q --vocab-size 290 --pattern gpt2 -o "$out/t1/tokenizer.json" words.txt
    train-tokenizer -q --vocab-size 300 --pattern gpt2 -o "$out/t2/tokenizer.json" sums.txt
    small="--set n_layer=1 --set n_embd=32 --set n_head=2 --set n_positions=64"
    init-model -q gpt2-124m $small --tokenizer "$out/t1/tokenizer.json" --seed 1 -o "$out/g1/"
    init-model -q gpt2-124m $small --tokenizer "$out/t2/tokenizer.json" --seed 2 -o "$out/g2/"
    split "$out/g1"
    split "$out/g2"
    run merge-models -m linear "$out/g1" "$out/g2" -o "$out/x"
    [ "$status" -eq 2 ]
    [[ "$output" == *"its tokenizer is not that of"* ]]
    merge-models -q -m linear "$out/g1:0" "$out/g2:1" --tokenizer "$out/g2" -o "$out/second"
    cmp "$out/g2/vocab.json" "$out/second/vocab.json"
    [ "$(loss "$out/second" sums.txt)" = "$(loss "$out/g2" sums.txt)" ]
    merge-models -q -m linear "$out/g1" "$out/g2" --tokenizer union -o "$out/u"
    [ "$(vocab "$out/u")" -gt "$(vocab "$out/g2")" ]
    [ ! -e "$out/u/vocab.json" ]
    loss "$out/u" sums.txt
    # a search validates text with it
    merge-models -q -m linear "$out/g1" "$out/g1" --val words.txt --val-tokens 50 --search simplex --max-candidates 2 -o "$out/s" > "$out/c"
    grep -q '"tokens":50' "$out/c"
}

@test "merge-models: impossible policies" {
    run merge-models -m linear a/ b2/ --tokenizer base -o "$out/x"
    [ "$status" -eq 2 ]
    [[ "$output" == *"there is none"* ]]
    run merge-models -m linear a/ b2/ --tokenizer other/ -o "$out/x"
    [ "$status" -eq 2 ]
    [[ "$output" == *'"other/" is not one of the models'* ]]
    cp -r b2 "$out/bare"
    rm "$out/bare/tokenizer.json"
    run merge-models -m linear a/ "$out/bare" --tokenizer union -o "$out/x"
    [ "$status" -eq 2 ]
    [[ "$output" == *"no tokenizer"* ]]
    [ ! -e "$out/x" ]
}
