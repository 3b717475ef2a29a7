#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# convert-model: round trips, pipes, refusals.

bats_require_minimum_version 1.5.0

setup_file() {
    root=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    cd "$BATS_FILE_TMPDIR"
    sh "$root/tests/cli/examples/convert-model.sh"
}

setup() {
    cd "$BATS_TEST_TMPDIR"
    cp -r "$BATS_FILE_TMPDIR/model" "$BATS_FILE_TMPDIR/gpt2" .
}

same() { # same A B: tensors, config.json and tokenizer.json
    inspect-model --check --strict "$1" "$2" > /dev/null
    cmp "$1/config.json" "$2/config.json"
    cmp "$1/tokenizer.json" "$2/tokenizer.json"
}

put() { # put FILE OFFSET ESCAPES: overwrite bytes
    # shellcheck disable=SC2059
    printf "$3" | dd of="$1" bs=1 seek="$2" conv=notrunc status=none
}

le() { # le NUMBER BYTES: as escapes for printf, little-endian
    local n=$1 i
    for ((i = 0; i < $2; i++)); do
        printf '\\%03o' $((n & 255))
        n=$((n >> 8))
    done
}

edit() { # edit FILE KEY ESCAPES: overwrite the scalar value of a key of a GGUF file
    local at
    at=$(grep -abo -m 1 "$2" "$1" | head -n 1 | cut -d: -f1)
    put "$1" $((at + ${#2} + 4)) "$3"
}

add_tensor() { # add_tensor FOLDER NAME DTYPE SHAPE ESCAPES: to its model.safetensors, at the end
    local f=$1/model.safetensors n head size
    n=$(od -An -tu8 -N 8 "$f" | tr -d ' ')
    size=$(($(wc -c < "$f") - 8 - n))
    tail -c +9 "$f" | head -c "$n" > head.json
    # shellcheck disable=SC2059
    printf "$5" > more.bin
    head="{\"$2\":{\"dtype\":\"$3\",\"shape\":[$4],\"data_offsets\":[$size,$((size + $(wc -c < more.bin)))]},"
    printf '%s' "$head$(sed 's/^{//;s/ *$//' head.json)" > head.new
    # shellcheck disable=SC2059
    { printf "$(le "$(wc -c < head.new)" 8)" && cat head.new && tail -c "$size" "$f" && cat more.bin; } > new.st
    mv new.st "$f"
}

@test "convert-model: to GGUF and back is exact" {
    for m in model gpt2; do
        convert-model $m -o $m.gguf
        convert-model $m.gguf -o back-$m
        same $m back-$m
    done
}

@test "convert-model: tensors converted to F32 are converted back to their original type" {
    convert-model model -o m.gguf --type f32
    convert-model m.gguf -o back
    same model back
}

@test "convert-model: without the originals, tensors and tokenizer are the same" {
    convert-model model -o m.gguf --no-originals
    convert-model m.gguf -o back --dtype bf16
    inspect-model --check --strict model back > /dev/null
    grep -q '"LlamaForCausalLM"' back/config.json
    grep -q '"torch_dtype": "bfloat16"' back/config.json
    [ "$(tr -d ' \n' < back/tokenizer.json | grep -o '"merges".*' | cksum)" = \
      "$(tr -d ' \n' < model/tokenizer.json | grep -o '"merges".*' | cksum)" ]
}

@test "convert-model: the pattern of GPT-4o has a name in GGUF, that of GPT-4 the nearest" {
    for p in o200k:gpt-4o gpt4:smaug-bpe; do
        printf 'some iPod text, some MORE text' |
            train-tokenizer -qq -f -V 260 -p "${p%:*}" -o model/tokenizer.json
        run convert-model -f model -o m.gguf --no-originals
        [ "$status" -eq 0 ]
        grep -aq "${p#*:}" m.gguf
        [[ "$p" == o200k* || "$output" == *"cut white space at the end of a text differently"* ]]
        [[ "$p" == gpt4* || "$output" != *otherwise* ]]
    done
    convert-model -q m.gguf -o back
    grep -q pre_tokenizer back/tokenizer.json
}

@test "convert-model: the same bytes for any -j" {
    for t in q8_0 q4_k_m; do
        for j in 1 3; do
            SOURCE_DATE_EPOCH=0 convert-model model -j $j -o - --type $t --name x > $t.$j
        done
        # the history has the command line in it: compare what follows the tables
        cmp <(tail -c 20000 $t.1) <(tail -c 20000 $t.3)
        [ "$(wc -c < $t.1)" -eq "$(wc -c < $t.3)" ]
    done
}

@test "convert-model: sizes of blocks; rows of 64 get a fallback type" {
    convert-model model -o q8.gguf --type q8_0 --no-originals
    convert-model model -o q4.gguf --type q4_k --no-originals
    convert-model model -o f16.gguf --type f16 --no-originals
    [ "$(wc -c < q4.gguf)" -lt "$(wc -c < q8.gguf)" ]
    [ "$(wc -c < q8.gguf)" -lt "$(wc -c < f16.gguf)" ]
    convert-model q8.gguf -o back
    inspect-model --check --atol 0.01 model back
    grep -q '"torch_dtype": "bfloat16"' back/config.json
}

@test "convert-model: pipes as input and output" {
    tar -cf - -C model . | convert-model - -o a.gguf
    convert-model - -o - < a.gguf > b.tar
    mkdir b && tar -xf b.tar -C b
    same model b
    convert-model b.tar -o - | convert-model - -o c
    same model c
}

@test "convert-model: a tar whose weights come before its config.json" {
    tar -cf late.tar -C model model.safetensors tokenizer.json config.json
    convert-model - -o late.gguf < late.tar
    # shellcheck disable=SC2002
    cat late.tar | convert-model - -o piped.gguf
    convert-model late.gguf -o back
    same model back
    convert-model piped.gguf -o back2
    same model back2
}

@test "convert-model: rows that fit no block are reported" {
    run convert-model model -o m.gguf --type q6_k
    [ "$status" -eq 0 ]
    [[ "$output" == *"rows of 64 numbers do not fit q6_k, q8_0 instead"* ]]
    [ "${#lines[@]}" -eq 1 ]
    run convert-model model -o n.gguf --type q8_0
    [ "$output" = "" ]
}

@test "convert-model: an invalid tokenizer is named, not the model" {
    echo junk > junk.json
    echo '{"x":1}' > other.json
    sed 's/"type": *"BPE"/"type":"Odd"/' model/tokenizer.json > odd.json
    run ! cmp -s odd.json model/tokenizer.json
    mkdir dir && cp junk.json dir/tokenizer.json
    for to in out.gguf out; do
        for t in "junk.json|junk.json: not valid JSON" "other.json|other.json: is not a tokenizer: " "dir|dir/tokenizer.json: not valid JSON"; do
            run convert-model model -t "${t%|*}" -o $to
            echo "$output"
            [ "$status" -eq 1 ]
            [[ "$output" == "convert-model: ${t#*|}"* ]]
        done
        run convert-model model -t - -o $to < junk.json
        [[ "$output" == "convert-model: standard input: not valid JSON"* ]]
        [ ! -e $to ]
    done
    run convert-model model -t odd.json -o out.gguf
    [ "$status" -eq 1 ]
    [[ "$output" == "convert-model: odd.json: "* ]]
}

@test "convert-model: the name in a GGUF is kept; otherwise it is the last part of the path without the suffix" {
    name_of() { perl -0777 -ne '/general\.name(.{200})/s and print unpack("x4 Q</a", $1)' "$1"; }
    is_named() { convert-model -qf "$1" -o named.gguf && [ "$(name_of named.gguf)" = "$2" ]; }
    mkdir -p some
    convert-model -q model -o some/a.gguf --name 'My Model 1.gguf'
    is_named some/a.gguf 'My Model 1.gguf'
    cp -r model some/v1.2
    is_named some/v1.2// v1.2
    tar -cf some/b.tar -C model .
    tar -czf some/c.d.tar.gz -C model .
    compress-ckpt -q model -o some/e.lmz
    is_named some/b.tar b
    is_named some/c.d.tar.gz c.d
    is_named some/e.lmz e
    (cd model && convert-model -qf . -o ../named.gguf)
    [ "$(name_of named.gguf)" = llama ]
    long=$(printf 'x%.0s' {1..200})
    mkdir -p "$long/$long"
    cp -r model "$long/$long/m"
    is_named "$long/$long/m" m
}

@test "convert-model: GGUF to GGUF quantises the tensors of the input" {
    convert-model model -o m.gguf
    convert-model m.gguf -o q.gguf --type q8_0
    convert-model model -o p.gguf --type q8_0
    cmp <(tail -c 30000 q.gguf) <(tail -c 30000 p.gguf)
}

@test "convert-model: llm.c and back" {
    convert-model gpt2 -o g.bin
    [ "$(od -An -tu4 -N 32 g.bin | tr -s ' \n' ' ')" = " 20240326 3 64 400 2 2 64 512 " ]
    convert-model g.bin --tokenizer gpt2 -o back
    inspect-model --check --strict gpt2 back > /dev/null
    cmp gpt2/tokenizer.json back/tokenizer.json
    convert-model gpt2 -o h.bin --dtype bf16
    [ "$(od -An -tu4 -j 4 -N 4 h.bin | tr -d ' ')" = 5 ]
    convert-model h.bin -o low
    inspect-model --check --rtol 0.004 gpt2 low > /dev/null
}

@test "convert-model: llama2.c and back" {
    convert-model model -o m.bin
    convert-model m.bin -o back --dtype bf16
    inspect-model --check --strict model back > /dev/null
    run convert-model gpt2 -o x.bin --to llama2c
    [ "$status" -eq 2 ]
    [[ "$output" == *"llama2.c has no model but Llama"* ]]
    [ ! -e x.bin ]
}

@test "convert-model: shards, tar and .lmz as outputs" {
    convert-model model -o m.gguf
    convert-model m.gguf -o parts --max-shard-size 40K
    [ -e parts/model.safetensors.index.json ]
    inspect-model --check --strict model parts > /dev/null
    convert-model m.gguf -o m.tar.zst
    convert-model m.tar.zst -o back
    same model back
}

@test "convert-model: models that GGUF cannot represent are refused, nothing is written" {
    sed -i 's/"activation_function": "gelu_new"/"activation_function": "gelu"/' gpt2/config.json
    run convert-model gpt2 -o x.gguf
    [ "$status" -eq 2 ]
    [[ "$output" == *"GGUF's gpt2 has no exact GELU"* ]]
    [ ! -e x.gguf ]
}

@test "convert-model: a damaged GGUF is one line that names what is wrong" {
    convert-model model -o m.gguf
    head -c $(($(wc -c < m.gguf) - 100)) m.gguf > short.gguf
    run convert-model short.gguf -o x
    [ "$status" -eq 1 ]
    [ "${#lines[@]}" -eq 1 ]
    [[ "$output" == *"within tensor"* ]]
    head -c 100 m.gguf > head.gguf
    run convert-model head.gguf -o x
    [ "$status" -eq 1 ]
    [[ "$output" == *"more than its 100 bytes can hold"* ]]
    cp m.gguf much.gguf
    put much.gguf 8 '\377\377\377\377\377\377\377\177'
    run convert-model much.gguf -o x
    [ "$status" -eq 1 ]
    [[ "$output" == *"promises 9223372036854775807"* || "$output" == *"9223372036854775807 tensors"* ]]
    cp m.gguf v9.gguf
    put v9.gguf 4 '\011'
    run convert-model v9.gguf -o x
    [ "$status" -eq 1 ]
    [[ "$output" == *"GGUF version 9"* ]]
    [ ! -e x ]
}

@test "convert-model: names in a file cannot send control codes to the terminal" {
    convert-model model -o m.gguf
    sed 's/blk\.1\.attn_q\.weight/blk.1.\x1b[31m\n.weight/' m.gguf > x.gguf
    sed -i 's/general\.file_type/general\x1b\nile_type/;s/BF16 model\.norm\.weight/BF16 model\x1b\norm.weight/' x.gguf
    run convert-model x.gguf -o x
    [ "$status" -eq 2 ]
    [ "${#lines[@]}" -eq 1 ]
    [[ "$output" != *$'\e'* ]]
}

@test "convert-model: a file without its magic number is recognised by its name" {
    convert-model model -o m.gguf
    put m.gguf 3 X
    run convert-model m.gguf -o x
    [ "$status" -eq 1 ]
    [[ "$output" == *"m.gguf: this is not a GGUF file: give a file that begins with the bytes GGUF"* ]]
    : > none.gguf
    run convert-model none.gguf -o x
    [[ "$output" == *"none.gguf: this is not a GGUF file: give"* ]]
    convert-model model -o m.bin
    head -c 5000 m.bin > short.bin
    run convert-model short.bin -o x
    [ "$status" -eq 1 ]
    [[ "$output" == *"short.bin: it ends at byte 5000, within 'token_embd.weight'"* ]]
    [ ! -e x ]
}

@test "convert-model: wrong headers of llm.c and llama2.c" {
    convert-model model -o m.bin
    convert-model gpt2 -o g.bin
    for v in '\377\377\377\377' '\377\377\377\177' '\0\0\0\0'; do
        for at in 8 12 16 20 24 28; do
            cp g.bin x.bin
            put x.bin $at "$v"
            run convert-model x.bin -o x
            [ "$status" -eq 1 ]
            [ "${#lines[@]}" -eq 1 ]
        done
        for at in 0 4 8 12 16 20 24; do
            cp m.bin x.bin
            put x.bin $at "$v"
            run convert-model --from llama2c x.bin -o x
            [ "$status" -eq 1 ]
            [ "${#lines[@]}" -eq 1 ]
        done
    done
    [ ! -e x ]
}

@test "convert-model: a tensor that is missing or unknown is named" {
    convert-model model -o m.gguf
    sed 's/blk\.1\.attn_q\.weight/blk.1.attn_Q.weight/' m.gguf > other.gguf
    run convert-model other.gguf -o x
    [ "$status" -eq 2 ]
    [[ "$output" == *"tensor 'blk.1.attn_q.weight' is missing"* ]]
    sed -i 's/"num_hidden_layers": 2/"num_hidden_layers": 1/' model/config.json
    run convert-model model -o x.gguf
    [ "$status" -eq 2 ]
    [[ "$output" == *"layers.1."*"is unknown to llama"* ]]
    sed -i 's/"num_hidden_layers": 1/"num_hidden_layers": 2/;s/"intermediate_size": [0-9]*/"intermediate_size": 96/' model/config.json
    run convert-model model -o x.gguf
    [ "$status" -eq 2 ]
    [[ "$output" == *"has the shape ["*"], the config requires ["*"96"*"]" ]]
}

@test "convert-model: a list of tensors that was tampered with is refused" {
    convert-model model -o m.gguf
    sed 's/BF16 model\.norm\.weight/BF16 model.norm.Weight/' m.gguf > a.gguf
    run convert-model a.gguf -o x
    [ "$status" -eq 1 ]
    [[ "$output" == *"names 'model.norm.Weight', which is not a tensor of it"* ]]
    sed 's/BF16 model\.norm\.weight/BF61 model.norm.weight/' m.gguf > a.gguf
    run convert-model a.gguf -o x
    [ "$status" -eq 1 ]
    [[ "$output" == *"has an entry of type BF61"* ]]
    sed 's/layers\.1\.mlp\.up_proj\.weight/layers.0.mlp.up_proj.weight/' m.gguf > a.gguf
    run convert-model a.gguf -o x
    [ "$status" -eq 1 ]
    [ ! -e x ]
}

@test "convert-model: an unknown pre-tokeniser is refused, replaced with -t, or omitted" {
    convert-model model -o m.gguf --no-originals
    sed 's/smaug-bpe/smaug-xyz/' m.gguf > other.gguf
    run convert-model other.gguf -o x
    [ "$status" -eq 2 ]
    [[ "$output" == *"its pre-tokeniser smaug-xyz is unknown"*"--tokenizer"* ]]
    convert-model other.gguf -o y --tokenizer model
    cmp y/tokenizer.json model/tokenizer.json
    convert-model other.gguf -o z --tokenizer none
    [ ! -e z/tokenizer.json ]
}

@test "convert-model: misuse" {
    run convert-model model
    [ "$status" -eq 2 ]
    run convert-model model -o x --type q8_0
    [ "$status" -eq 2 ]
    [[ "$output" == *"--type: it has no effect on an output of format hf"* ]]
    run convert-model model -o x.gguf --type q9
    [ "$status" -eq 2 ]
    run convert-model nosuch -o x.gguf
    [ "$status" -eq 1 ]
    convert-model model -o m.gguf
    run convert-model m.gguf -o m.gguf -f
    [ "$status" -eq 2 ]
    run convert-model model -o model/model.safetensors -f
    [ "$status" -eq 2 ]
    [[ "$output" == *"it is a part of the input model"* ]]
    ln m.gguf hard.gguf
    run convert-model hard.gguf -o m.gguf -f
    [ "$status" -eq 2 ]
    run bash -c 'convert-model - -o m.gguf -f < m.gguf'
    [ "$status" -eq 2 ]
    run convert-model model -o m.gguf
    [ "$status" -eq 2 ]
    [[ "$output" == *exists* ]]
}

@test "convert-model: a full disk leaves nothing behind" {
    run bash -c 'convert-model model -o - > /dev/full'
    [ "$status" -eq 1 ]
    [[ "$output" == *"No space left on device"* ]]
    ls -A > before
    run convert-model model -o nodir/x.gguf
    [ "$status" -ne 0 ]
    ls -A | diff - before
}

@test "convert-model: a folder with buffers goes to GGUF and back without them" {
    cp -r gpt2 plain
    add_tensor gpt2 transformer.h.0.attn.bias U8 1,1,2,2 '\1\0\1\1'
    add_tensor gpt2 transformer.h.1.attn.masked_bias F32 '' '\0\0\0\0'
    run convert-model -v gpt2 -o g.gguf
    [ "$status" -eq 0 ]
    [[ "$output" == *"'transformer.h.0.attn.bias' and 1 more: left out"* || \
        "$output" == *"'transformer.h.1.attn.masked_bias' and 1 more: left out"* ]]
    convert-model g.gguf -o back
    same plain back
    # files of older versions list the buffers
    sed 's/F32 transformer\.h\.1\.attn\.c_proj\.bias/U8 transformer.h.100000000.attn.bias/' g.gguf > old.gguf
    run convert-model old.gguf -o x
    [[ "$output" == *"names 27 tensors, the file has 28"* ]]
}

@test "convert-model: edited metadata override the config.json kept with them" {
    convert-model model -o m.gguf
    edit m.gguf llama.context_length "$(le 64 4)"
    edit m.gguf llama.rope.freq_base '\0\0\200\100' # 4.0
    edit m.gguf tokenizer.ggml.eos_token_id "$(le 5 4)"
    run convert-model m.gguf -o back
    [ "$status" -eq 0 ]
    [[ "$output" == *"its metadata were edited ('llama.context_length' is 64, not 1024, and 2 more): they override"* ]]
    [ "${#lines[@]}" -eq 1 ]
    grep -q '"max_position_embeddings": 64' back/config.json
    grep -q '"rope_theta": 4.0' back/config.json
    grep -q '"eos_token_id": 5' back/config.json
    inspect-model --check --strict model back > /dev/null
    run convert-model back -o again.gguf
    convert-model again.gguf -o third
    cmp back/config.json third/config.json
    # keys that GGUF lacks are unchanged
    [ "$(grep -c . back/config.json)" -eq "$(grep -c . model/config.json)" ]
    # tokens have no place in the kept files: a second message
    at=$(grep -abo -m 1 tokenizer.ggml.token_type m.gguf | head -n 1 | cut -d: -f1)
    put m.gguf $((at + 25 + 16)) '\6'
    run convert-model -f m.gguf -o back
    [ "$status" -eq 0 ]
    [[ "$output" == *"'tokenizer.ggml.token_type' was edited: the files kept in it do not get this change"* ]]
    cmp back/tokenizer.json model/tokenizer.json
}

@test "convert-model: edited end tokens do not drop the others of the list" {
    sed 's/"eos_token_id": [0-9]*/"eos_token_id": [1, 2, 3, 4]/' model/config.json > c && mv c model/config.json
    echo '{"eos_token_id": [1, 2, 6]}' > model/generation_config.json
    convert-model -q -t none -f model -o m.gguf
    cp m.gguf second.gguf
    edit m.gguf tokenizer.ggml.eos_token_id "$(le 5 4)"
    convert-model -q m.gguf -o first
    edit second.gguf tokenizer.ggml.eot_token_id "$(le 7 4)"
    run convert-model second.gguf -o second
    [[ "$output" == *"its metadata were edited ('tokenizer.ggml.eot_token_id' is 7, not 2): they override"* ]]
    [[ "$(tr -d ' \n' < first/config.json)" == *'"eos_token_id":[5,2,3,4]'* ]]
    [[ "$(tr -d ' \n' < second/config.json)" == *'"eos_token_id":[1,7,3,4]'* ]]
    [[ "$(tr -d ' \n' < second/generation_config.json)" == *'"eos_token_id":[1,7,3,6]'* ]]
}

@test "convert-model: partly rotated heads are refused" {
    convert-model model -o m.gguf --no-originals
    edit m.gguf llama.rope.dimension_count "$(le 4 4)"
    run convert-model m.gguf -o back
    [ "$status" -eq 2 ]
    [[ "$output" == *"'llama.rope.dimension_count' is 4"* || "$output" == *"'llama.attention.value_length'"* ]]
}

@test "convert-model: quantising quantised blocks is reported" {
    convert-model model -o q8.gguf --type Q8_0
    run convert-model q8.gguf -o q4.gguf --type q4_0
    [ "$status" -eq 0 ]
    [[ "$output" == *"'token_embd.weight' and "*" more: quantised twice, q8_0 decoded to BF16, then to q4_0"* ]]
    run convert-model q8.gguf -o f16.gguf --type F16
    [ "$output" = "" ]
}

@test "convert-model: types in any case" {
    SOURCE_DATE_EPOCH=0 convert-model model -o a.gguf --type Q4_K_M 2> /dev/null
    SOURCE_DATE_EPOCH=0 convert-model model -o b.gguf --type q4_k_m 2> /dev/null
    cmp <(tail -c 20000 a.gguf) <(tail -c 20000 b.gguf)
    run convert-model model -o c.gguf --type Q4_K_X
    [ "$status" -eq 2 ]
}

@test "convert-model: numbers that would become infinite: status 4, the tensor is named, nothing is written" {
    # a first weight of 2^100 as BF16
    n=$(od -An -tu8 -N 8 model/model.safetensors | tr -d ' ')
    put model/model.safetensors $((8 + n)) '\200\161'
    run convert-model model -o x.gguf --type f16
    [ "$status" -eq 4 ]
    [[ "$output" == *"weight: element 0 is 1.2676506e+30, which f16 cannot hold: choose a type of wider range"* ]]
    [ "${#lines[@]}" -eq 1 ]
    run convert-model model -o x --dtype f16
    [ "$status" -eq 4 ]
    run convert-model model -o x.gguf --type q4_0
    [ "$status" -eq 4 ]
    [[ "$output" == *"which q4_0 cannot hold"* ]]
    [ ! -e x ] && [ ! -e x.gguf ]
    convert-model model -o x.gguf --type bf16
    put model/model.safetensors $((8 + n)) '\300\177' # NaN stays one, but not in blocks
    convert-model model -o y.gguf --type f16
    run convert-model model -o z.gguf --type q8_0
    [ "$status" -eq 4 ]
    [[ "$output" == *" is nan, which q8_0 cannot hold: inspect-model --stats shows which weights are not finite" ]]
    run convert-model y.gguf -o z.gguf --type q8_0
    [ "$status" -eq 4 ]
    [[ "$output" == *" is nan, which q8_0 cannot hold: convert-model makes a model folder of it, whose weights inspect-model --stats checks" ]]
}

@test "convert-model: Q2_K to IQ4_XS both ways" {
    init-model -q llama-1m --set num_hidden_layers=1 --set hidden_size=256 --set intermediate_size=256 --dtype bf16 -o wide
    for t in q2_k_s q2_k q3_k_s q3_k_m q3_k_l iq4_xs iq4_nl; do
        convert-model wide -o $t.gguf --type $t
        convert-model $t.gguf -o back-$t
        inspect-model --check --atol 0.06 wide back-$t > /dev/null
        convert-model wide -o $t-pure.gguf --type $t --pure
        [ "$(wc -c < $t-pure.gguf)" -le "$(wc -c < $t.gguf)" ]
    done
    [ "$(wc -c < q2_k.gguf)" -lt "$(wc -c < q3_k_m.gguf)" ]
    [ "$(wc -c < q3_k_s.gguf)" -lt "$(wc -c < q3_k_l.gguf)" ]
}

@test "convert-model: an importance matrix is made from the model's own tokens only" {
    train-tokenizer -q -V 300 "$BATS_FILE_TMPDIR/corpus.txt" -o mine.json
    head -c 3000 "$BATS_FILE_TMPDIR/corpus.txt" > part.txt
    train-tokenizer -q -V 300 -s '<|other|>' -s '<|endoftext|>' part.txt -o other.json
    init-model -q llama-1m --set num_hidden_layers=1 -t mine.json -o mine
    shard-data -q -t mine.json -o own part.txt
    shard-data -q -t other.json -o foreign part.txt
    run -2 convert-model mine -o x.gguf --type q4_0 --imatrix foreign/train
    echo "$output"
    [[ "$output" == "convert-model: foreign/train: it was made with another tokenizer (300 ids) than that of mine (300 ids)"* ]]
    [ ! -e x.gguf ]
    convert-model -q mine -o x.gguf --type q4_0 --imatrix foreign/train --no-check-tokenizer
    convert-model -q mine -o y.gguf --type q4_0 --imatrix own/train
    mkdir texts && mv part.txt texts # a folder of texts, as eval-model takes it
    convert-model -q mine -o z.gguf --type q4_0 --imatrix texts
    run -2 convert-model mine -o w.gguf --type q4_0 --no-check-tokenizer
    [[ "$output" == *"--check-tokenizer: no importance matrix is computed"* ]]
}

@test "convert-model: a computed importance matrix equals the saved one" {
    convert-model model -o a.gguf --type iq4_nl --imatrix "$BATS_FILE_TMPDIR/corpus.txt" --save-imatrix im.gguf
    convert-model model -o b.gguf --type iq4_nl --imatrix im.gguf -j 1
    convert-model model -o c.gguf --type iq4_nl
    cmp <(tail -c 60000 a.gguf) <(tail -c 60000 b.gguf)
    run cmp <(tail -c 60000 a.gguf) <(tail -c 60000 c.gguf)
    [ "$status" -eq 1 ]
    grep -q quantize.imatrix.chunks_count a.gguf
    grep -q 'blk.1.ffn_down.weight.in_sum2' im.gguf
    # from GGUF, from a pipe, of few chunks
    convert-model model -o m.gguf
    convert-model m.gguf -o d.gguf --type q4_0 --imatrix "$BATS_FILE_TMPDIR/corpus.txt" --imatrix-chunks 1
    tar -cf - -C model . | convert-model - -o e.gguf --type q4_0 --imatrix "$BATS_FILE_TMPDIR/corpus.txt" --imatrix-chunks 1
    cmp <(tail -c 60000 d.gguf) <(tail -c 60000 e.gguf)
}

@test "convert-model: importance without effect, or of another model" {
    run convert-model model -o x.gguf --type q8_0 --imatrix "$BATS_FILE_TMPDIR/corpus.txt"
    [ "$status" -eq 2 ]
    [[ "$output" == *"q8_0 does not use an importance matrix"* ]]
    run convert-model model -o x.gguf --type q4_0 --pure
    [ "$status" -eq 2 ]
    [[ "$output" == *"--pure: q4_0 is not a mixture"* ]]
    run convert-model model -o x.gguf --type q4_0 --save-imatrix im.gguf
    [ "$status" -eq 2 ]
    run convert-model model -o x --imatrix "$BATS_FILE_TMPDIR/corpus.txt"
    [ "$status" -eq 2 ]
    convert-model model -o a.gguf --type q4_0 --imatrix "$BATS_FILE_TMPDIR/corpus.txt" --save-imatrix im.gguf
    run convert-model model -o x.gguf --type q4_0 --imatrix im.gguf --imatrix-chunks 3
    [ "$status" -eq 2 ]
    init-model -q llama-1m --set num_hidden_layers=1 --set hidden_size=96 --tokenizer model/tokenizer.json -o other
    run convert-model other -o x.gguf --type q4_0 --imatrix im.gguf
    [ "$status" -eq 2 ]
    [[ "$output" == *"has 64 columns in the importance matrix, 96 in the model"* ]]
    sed 's/blk\.1\.ffn_up\.weight\./blk.1.ffn_UP.weight./g' im.gguf > part.gguf
    run convert-model model -o p.gguf --type q4_0 --imatrix part.gguf
    [ "$status" -eq 0 ]
    [[ "$output" == *"'blk.1.ffn_up.weight': not in the importance matrix"* ]]
    [[ "$output" != *"that the model lacks"* ]]
    init-model -q llama-1m --set num_hidden_layers=1 --set hidden_size=64 --tokenizer model/tokenizer.json -o other -f
    run convert-model other -o p.gguf -f --type q4_0 --imatrix im.gguf
    [ "$status" -eq 0 ]
    [[ "$output" =~ "the importance matrix has "[0-9]+" tensors that the model lacks: it was made for another model" ]]
    run convert-model im.gguf -o x
    [ "$status" -eq 2 ]
    [[ "$output" == *"it is an importance matrix, not a model: give it to --imatrix"* ]]
    run convert-model model -o x.gguf --type q4_0 --imatrix a.gguf
    [ "$status" -eq 1 ]
    [[ "$output" == *"this GGUF file is not an importance matrix"* ]]
    [ ! -e x.gguf ] && [ ! -e x ]
}

@test "convert-model: a folder as transformers 5 writes it" {
    sed -i 's/"torch_dtype"/"dtype"/; s/"rope_theta": .*/"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},/
        /"rope_scaling"/d' model/config.json
    convert-model model -o m.gguf
    convert-model m.gguf -o back
    same model back
    convert-model model -o low --dtype f16
    grep -q '"dtype": "float16"' low/config.json
    edit m.gguf llama.rope.freq_base '\0\0\200\100' # 4.0
    convert-model m.gguf -o edited 2> /dev/null
    tr -d ' \n' < edited/config.json | grep -q '"rope_parameters":{"rope_theta":4.0,"rope_type":"default"}'
    run grep -c rope_theta edited/config.json
    [ "$output" = 1 ]
}

@test "convert-model: mixtures of experts are refused as such; other tools treat them as tensors" {
    f32='\0\0\200\77\0\0\0\100\0\0\100\100\0\0\200\100' # 1 2 3 4
    add_tensor model model.layers.0.mlp.experts.gate_up_proj F32 2,2,1 "$f32"
    run convert-model model -o x.gguf
    [ "$status" -eq 2 ]
    [[ "$output" == *"tensor 'model.layers.0.mlp.experts.gate_up_proj' is unknown to llama"* ]]
    sed -i 's/"model_type": "llama"/"model_type": "dbrx", "num_experts": 2/' model/config.json
    run convert-model model -o x.gguf
    [ "$status" -eq 2 ]
    [[ "$output" == *'model_type "dbrx" is a mixture of 2 experts of a kind that is not known'* ]]
    inspect-model model | grep -q 'F32 *\[2, 2, 1\]'
    compress-ckpt -q model -o m.lmz
    inspect-model --check --strict model m.lmz > /dev/null
    cp -r model other
    merge-models -q --method linear model other -o merged
    inspect-model --check merged model > /dev/null
    sed -i 's/experts\.gate_up_proj/experts.gate_pu_proj/' other/model.safetensors
    run merge-models --method linear model other -o mixed
    [ "$status" -eq 2 ]
    [[ "$output" == *"their layouts of experts differ"* ]]
}

@test "convert-model: --json describes the output; it is refused with the model on standard output" {
    convert-model -q --json model -o m.gguf > out
    grep -qE '^\{"input":"model","from":"hf","output":"m.gguf","to":"gguf","tensors":[0-9]+,"seconds":[0-9.e-]+\}$' out
    [ "$(wc -l < out)" -eq 1 ]
    run convert-model --json model -o -
    [ "$status" -eq 2 ]
    [[ $output == *"--json: standard output holds the model: write the model to a file"* ]]
}

# After a failure the old file, or the complete new one if the failure came after the rename.
gguf_old_or_new() {
    [ "$1" -ne 0 ] && grep -qx old out.gguf || cmp good.gguf out.gguf || return
    echo old > out.gguf
    rm -f im.gguf
}

@test "convert-model: a compressed GGUF is refused with the remedy, and .gguf is listed among the inputs" {
    convert-model model -o m.gguf
    gzip -k m.gguf
    for t in "convert-model m.gguf.gz -o bad" "inspect-model m.gguf.gz" "generate m.gguf.gz -p x"; do
        # shellcheck disable=SC2086
        run $t
        echo "$output"
        [ "$status" -eq 2 ]
        [ "$output" = "${t%% *}: m.gguf.gz: is not a model: it is a model of llama.cpp, compressed: decompress it to m.gguf first; convert-model makes a model folder of it" ]
    done
    run convert-model - -o bad < m.gguf.gz
    [ "$status" -eq 2 ]
    [[ "$output" == *"a tar, an .lmz or a .gguf" ]]
    run convert-model nothing -o bad
    [[ "$output" == *"a tar, an .lmz or a .gguf" ]]
    [ ! -e bad ]
}

@test "convert-model: one call after the other fails" {
    load ../inject/inject
    export SOURCE_DATE_EPOCH=0 LM_TEST_BUILD=${LM_TEST_BUILD:-$BATS_TEST_DIRNAME/../../build}
    mkdir work && mv model work && cd work
    head -n 40 "$BATS_FILE_TMPDIR/corpus.txt" > c.txt
    run_it=(convert-model -q -j 1 -f model -o out.gguf --type iq4_nl --imatrix c.txt --save-imatrix im.gguf)
    "${run_it[@]}"
    mv out.gguf good.gguf
    rm im.gguf
    echo old > out.gguf
    for kind in write fsync rename; do
        inject_each $kind 12 gguf_old_or_new "${run_it[@]}"
    done
    inject_each malloc 150 gguf_old_or_new "${run_it[@]}"
}

@test "convert-model: OLMo 2 and 3, Gemma 2 and Gemma 3 are restored from GGUF" {
    "${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}/tests/digests/make-inputs"
    small=(-t tokenizer.json --set hidden_size=32 --set intermediate_size=48 --set num_hidden_layers=3
        --set num_attention_heads=4 --set num_key_value_heads=2)
    for preset in olmo2-1b olmo3-7b gemma2-2b gemma3-270m; do
        gemma=()
        if [[ $preset == gemma* ]]; then gemma=(--set head_dim=16 --set query_pre_attn_scalar=16); fi
        init-model -q "$preset" "${small[@]}" "${gemma[@]}" -o "$preset"
        for originals in --originals --no-originals; do
            convert-model -q -f "$preset" -o x.gguf "$originals"
            rm -rf back
            convert-model -q x.gguf -o back
            inspect-model --check --strict "$preset" back > /dev/null
        done
        grep -qa "blk.2.post_ffw_norm.weight" x.gguf
    done
    # both bases edited, in either spelling of the tables
    for rope in 'sliding_window=512' 'rope_parameters={"full_attention":{"rope_type":"default","rope_theta":1e6},
            "sliding_attention":{"rope_type":"default","rope_theta":1e4}}'; do
        rm -rf g back
        init-model -q gemma3-270m "${small[@]}" --set head_dim=16 --set query_pre_attn_scalar=16 --set "$rope" -o g
        convert-model -q -f g -o g.gguf
        edit g.gguf gemma3.rope.freq_base '\0\0\200\100'     # 4.0
        edit g.gguf gemma3.rope.freq_base_swa '\0\0\0\100' # 2.0
        convert-model -q g.gguf -o back
        tr -d ' \n' < back/config.json > flat
        if [[ $rope == rope* ]]; then
            grep -q '"full_attention":{"rope_type":"default","rope_theta":4.0}' flat
            grep -q '"sliding_attention":{"rope_type":"default","rope_theta":2.0}' flat
        else
            grep -q '"rope_theta":4.0' flat
            grep -q '"rope_local_base_freq":2.0' flat
        fi
    done
    # without a window llama.cpp's gemma3 attends to all keys, while that of a config.json is 4096
    init-model -q gemma3-270m "${small[@]}" --set head_dim=16 --set query_pre_attn_scalar=16 -o near
    convert-model -q --no-originals near -o near.gguf
    sed 's/gemma3\.attention\.sliding_window/xxxxxx.attention.sliding_window/' near.gguf > far.gguf
    convert-model -q far.gguf -o far
    tr -d ' \n' < far/config.json > flat
    grep -q '"layer_types":\["full_attention","full_attention","full_attention"\]' flat
    init-model -q gemma2-2b "${small[@]}" --set head_dim=16 --set query_pre_attn_scalar=16 \
        --set tie_word_embeddings=false -o head
    run convert-model head -o head.gguf
    [[ "$output" == *"llama.cpp's gemma2 has no head beside the embedding and refuses this file"* ]]
    # layers of any order: a number, or a list where no number fits; each with a window is also pattern 0
    for types in '"full_attention","sliding_attention","sliding_attention"' \
        '"sliding_attention","full_attention","full_attention"' \
        '"sliding_attention","sliding_attention","sliding_attention"'; do
        for preset in olmo3-7b gemma2-2b gemma3-270m; do
            gemma=()
            if [[ $preset == gemma* ]]; then gemma=(--set head_dim=16 --set query_pre_attn_scalar=16); fi
            rm -rf order back
            init-model -q "$preset" "${small[@]}" "${gemma[@]}" \
                --set attention_bias=true --set "layer_types=[$types]" -o order
            convert-model -q -f --no-originals order -o y.gguf
            convert-model -q y.gguf -o back
            tr -d ' \n' < back/config.json > flat
            grep -qF '"attention_bias":true' flat
            if [[ $preset == gemma2* || $types == *full* ]]; then
                grep -qF "\"layer_types\":[$types]" flat
            else
                run ! grep -q layer_types flat # the first five layers of Gemma 3 have a window, three of OLMo 3
            fi
            inspect-model --check --strict order back > /dev/null
            if [[ $preset == gemma2* && $types != *full* ]]; then
                edit y.gguf gemma2.attention.sliding_window_pattern '\0\0\0\0'
                rm -rf back
                convert-model -q y.gguf -o back
                tr -d ' \n' < back/config.json | grep -qF "\"layer_types\":[$types]"
            fi
        done
    done
    # edited beside the kept config.json: the pattern, the base that both tables of OLMo 3 have, a width
    init-model -q -f olmo3-7b "${small[@]}" -o kept --set sliding_window=7 --set rope_scaling=null \
        --set 'layer_types=["sliding_attention","full_attention","sliding_attention"]' \
        --set 'rope_parameters={"full_attention":{"rope_type":"default","rope_theta":1e6},
            "sliding_attention":{"rope_type":"default","rope_theta":1e6}}'
    convert-model -q -f kept -o kept.gguf
    cp kept.gguf width.gguf
    edit kept.gguf olmo2.attention.sliding_window_pattern '\3'
    edit kept.gguf olmo2.rope.freq_base '\0\0\200\100' # 4.0
    rm -rf back
    run convert-model kept.gguf -o back
    [[ "$output" == *"('olmo2.attention.sliding_window_pattern' is 3, not 2, and 1 more): they override"* ]]
    tr -d ' \n' < back/config.json > flat
    grep -qF '"layer_types":["sliding_attention","sliding_attention","full_attention"]' flat
    grep -qF '"full_attention":{"rope_type":"default","rope_theta":4.0}' flat
    grep -qF '"sliding_attention":{"rope_type":"default","rope_theta":4.0}' flat
    edit width.gguf olmo2.rope.dimension_count '\4'
    rm -rf back
    run convert-model width.gguf -o back
    [ "$status" -eq 2 ]
    [[ "$output" == *"'olmo2.rope.dimension_count' is 4, the heads are 8 wide"* ]]
    init-model -q olmo2-1b "${small[@]}" --set tie_word_embeddings=true -o tied
    run convert-model tied -o y.gguf -f
    [[ "$output" == *"llama.cpp's olmo2 requires a head beside the embedding and refuses this file"* ]]
    init-model -q olmo2-1b "${small[@]}" --set head_dim=16 -o narrow
    run convert-model narrow -o y.gguf -f
    [[ "$output" == *"llama.cpp's olmo2 requires heads that are together as wide as the model and refuses this file"* ]]
    # a scale that llama.cpp does not use
    init-model -q gemma3-270m "${small[@]}" --set head_dim=16 --set query_pre_attn_scalar=24 -o scale
    run convert-model -q scale -o y.gguf
    [ "$status" -eq 2 ]
    [[ "$output" == *"GGUF's gemma3 has no scaling of attention other than 1/sqrt(d)"* ]]
}
