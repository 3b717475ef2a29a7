#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# tokenizer.model, SentencePiece's file: every tool that reads a tokenizer reads it.

setup_file() {
    root=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    cd "$BATS_FILE_TMPDIR"
    cp "$root"/tests/golden/sentencepiece/*.model .
    for _ in $(seq 40); do
        echo "the river runs by the house and the other houses"
        echo "they were there, and there they are"
    done > text.txt
    mkdir tok
    cp llama.model tok/tokenizer.model
    init-model -q llama-1m --tokenizer tok -o m
    init-model -q llama-1m --tokenizer llama.model -o made
}

setup() {
    cd "$BATS_FILE_TMPDIR"
    out=$BATS_TEST_TMPDIR
}

@test "tokenizer.model: in a folder it is kept, a single file becomes tokenizer.json" {
    cmp m/tokenizer.model llama.model
    [ ! -e m/tokenizer.json ]
    grep -q '"byte_fallback":true' made/tokenizer.json
    grep -q '"bos_token": "<s>"' made/tokenizer_config.json
    grep -q '"bos_token_id": 1' m/config.json
    grep -q '"eos_token_id": 2' m/config.json
}

@test "tokenizer.model: the same shards as from the tokenizer.json made of it" {
    shard-data -q --tokenizer tok -o "$out/a" text.txt
    shard-data -q --tokenizer llama.model -o "$out/b" text.txt
    shard-data -q --tokenizer made -o "$out/c" text.txt
    cmp "$out/a/train.bin" "$out/b/train.bin"
    cmp "$out/a/train.bin" "$out/c/train.bin"
}

@test "tokenizer.model: generate, eval-model and train read it, in a folder and in a stream" {
    generate -q m -p 'the river' -n 4 --seed 1 > "$out/a"
    generate -q made -p 'the river' -n 4 --seed 1 | cmp - "$out/a"
    tar -cf - -C m . | generate -q - -p 'the river' -n 4 --seed 1 | cmp - "$out/a"
    eval-model -q m text.txt --seq-len 64 | grep -q bits_per_byte
    shard-data -q --tokenizer m -o "$out/d" text.txt
    train -q m "$out/d" -o "$out/run" --steps 1 --batch-size 2 --seq-len 16
    cmp "$out/run/latest/tokenizer.model" llama.model
}

@test "tokenizer.model: added tokens are read from each place that lists them" {
    n=$(grep -o '"vocab_size": [0-9]*' m/config.json | grep -o '[0-9]*')
    printf '{"<|turn|>": %d}' "$n" > tok/added_tokens.json
    init-model -q llama-1m --tokenizer tok -o "$out/a"
    grep -q "\"vocab_size\": $((n + 1))" "$out/a/config.json"
    rm tok/added_tokens.json
    printf '{"<|turn|>": %d}' "$n" > "$out/a/added_tokens.json"
    echo 'the river<|turn|>they' > "$out/t.txt"
    shard-data -q --tokenizer "$out/a" -o "$out/s" "$out/t.txt"
    tar -cf "$out/a.tar" -C "$out/a" .
    init-model -q llama-1m --tokenizer "$out/a.tar" -o "$out/b"
    grep -q "\"vocab_size\": $((n + 1))" "$out/b/config.json"
    convert-model -q "$out/a" -o "$out/a.gguf" --no-originals
    grep -aq '<|turn|>' "$out/a.gguf"
    convert-model -q "$out/a.gguf" -o "$out/back"
    shard-data -q --tokenizer "$out/back" -o "$out/s2" "$out/t.txt"
    cmp "$out/s/train.bin" "$out/s2/train.bin"
    printf '{"<|turn|>": 300}' > "$out/a/added_tokens.json"
    run shard-data -q --tokenizer "$out/a" -o "$out/s3" "$out/t.txt"
    [ "$status" -eq 1 ]
    [[ "$output" == *"added token 300 is '<|turn|>', the model's piece '"* ]]
}

@test "tokenizer.model: into GGUF with its own scores, and back" {
    convert-model -q m -o "$out/m.gguf"
    convert-model -q "$out/m.gguf" -o "$out/back"
    cmp "$out/back/tokenizer.model" llama.model
    [ ! -e "$out/back/tokenizer.json" ]
    convert-model -q m -o "$out/n.gguf" --no-originals
    grep -aq tokenizer.ggml.scores "$out/n.gguf"
    convert-model -q "$out/n.gguf" -o "$out/new"
    shard-data -q --tokenizer "$out/new" -o "$out/a" text.txt
    shard-data -q --tokenizer tok -o "$out/b" text.txt
    cmp "$out/a/train.bin" "$out/b/train.bin"
    tar -cf "$out/m.tar" -C m .
    convert-model -q "$out/m.tar" -o "$out/t.gguf" --no-originals
    [ "$(grep -ac tokenizer.ggml.scores "$out/t.gguf")" -eq 1 ]
}

@test "tokenizer.model: properties that GGUF cannot represent" {
    cp -r m "$out/strip"
    cp strip.model "$out/strip/tokenizer.model"
    run convert-model "$out/strip" -o "$out/s.gguf" --no-originals
    [ "$status" -eq 0 ]
    [[ "$output" == *"strip: tokenizer.model: llama.cpp will not normalise the text as this tokenizer does"* ]]
    run convert-model m -o "$out/plain.gguf" --no-originals
    [[ "$output" != *normalise* ]]
    init-model -q llama-1m --tokenizer no-fallback.model -o "$out/made"
    rm "$out"/made/tokenizer*
    cp no-fallback.model "$out/made/tokenizer.model"
    run convert-model "$out/made" -o "$out/x.gguf"
    [ "$status" -eq 2 ]
    [[ "$output" == *"tokenizer.model: without byte fallback, which llama.cpp needs: give --tokenizer none" ]]
    convert-model -q "$out/made" --tokenizer none -o "$out/x.gguf"
}

@test "tokenizer.model: two that differ are not merged silently" {
    cp -r m "$out/other"
    cp strip.model "$out/other/tokenizer.model"
    run merge-models --method linear m:0.5 "$out/other:0.5" -o "$out/mm"
    [ "$status" -eq 2 ]
    [[ "$output" == *"its tokenizer is not that of"* ]]
    merge-models -q --method linear m:0.5 m:0.5 -o "$out/mm"
    cmp "$out/mm/tokenizer.model" llama.model
}

@test "tokenizer.model: an invalid file is named" {
    cp -r m "$out/bad"
    printf 'IQ== 0\nIg== 1\n' > "$out/bad/tokenizer.model"
    for what in "shard-data -q -o $out/s --tokenizer $out/bad text.txt" "eval-model $out/bad text.txt" \
        "convert-model $out/bad -o $out/b.gguf" "generate $out/bad -p x"; do
        run $what
        [ "$status" -eq 1 ]
        [[ "$output" == *"tokenizer.model: a list of tokens and ranks in tiktoken's format"* ]]
    done
    head -c 3000 llama.model > "$out/bad/tokenizer.model"
    run shard-data -q -o "$out/s" --tokenizer "$out/bad" text.txt
    [ "$status" -eq 1 ]
    [[ "$output" == *"bad/tokenizer.model: no SentencePiece model: a field is longer than the rest of the file at byte "* ]]
}
