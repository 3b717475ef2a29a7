#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# History: the record of the commands that made an output, the same for every tool that writes one.
bats_require_minimum_version 1.5.0

setup_file() {
    cd "$BATS_FILE_TMPDIR"
    yes 'the quick brown fox jumps over the lazy dog, and so on.' | head -n 400 > text.txt
    train-tokenizer -q --vocab-size 300 -o tokenizer.json text.txt
    init-model -q llama-1m --tokenizer tokenizer.json --set hidden_size=32 --set intermediate_size=48 \
        --set num_hidden_layers=1 --set num_attention_heads=2 --set num_key_value_heads=2 -o m
    init-model -q m/config.json --tokenizer tokenizer.json --seed 2 -o n
    shard-data -q -t tokenizer.json text.txt -o data
}

setup() {
    cd "$BATS_TEST_TMPDIR"
    ln -s "$BATS_FILE_TMPDIR"/{m,n,data,text.txt,tokenizer.json} .
}

# pair OPTION ... -- COMMAND ...: the outputs one and two of the command, the second with more OPTIONs
pair() {
    local more=()
    while [ "$1" != -- ]; do more+=("$1"); shift; done
    shift
    "$@" -q -o one > /dev/null
    "$@" "${more[@]}" --output="$PWD/two" > /dev/null
}

# bare COMMAND ...: the output `bare` of the command without history, which must name no tool
bare() {
    "$@" -q --no-history -o bare > /dev/null
    run ! grep -raq 'history\|init-model\|lmutils.merge' bare
}

@test "history: init-model: another name and verbosity, the same bytes; none with --no-history" {
    pair -vf -j1 -- init-model m/config.json --seed 3 --tokenizer tokenizer.json
    diff -r one two
    bare init-model m/config.json
}

@test "history: merge-models: another name and verbosity, the same bytes; none with --no-history" {
    pair -fj 2 --json -- merge-models -m linear m:0.5 n:0.5
    diff -r one two
    bare merge-models -m linear m:0.5 n:0.5
    merge-models -q -m linear m:0.25 n:0.75 -o other
    run ! cmp one/model.safetensors other/model.safetensors
}

@test "history: convert-model: another name, the same bytes; none with --no-history" {
    pair -v -- convert-model m --dtype bf16
    diff -r one two
    bare convert-model m
    convert-model -q m --name x -o a.gguf
    convert-model -vfq m --name x -o b.gguf 2> talk
    cmp a.gguf b.gguf
    convert-model -q --no-history m --name x -o c.gguf
    run ! grep -aq 'lmutils.history' c.gguf
    run -2 convert-model m --to llama2c --no-history -o c.bin
}

@test "history: compress-ckpt --weights: another name, the same bytes; refused for lossless compression" {
    compress-ckpt -q m/ --weights bf16 -o a.lmz
    compress-ckpt m/ --weights bf16 -T2 -qfob.lmz
    cmp a.lmz b.lmz
    compress-ckpt -q m/ --weights bf16 --no-history -o c.lmz
    compress-ckpt -q -d c.lmz -o c
    run ! grep -raq 'history\|init-model' c
    run -2 compress-ckpt m/ --no-history -o d.lmz
    [[ "$output" == "compress-ckpt: --history: has no effect without lossy coding: "* ]]
}

@test "history: shard-data and clean-data: another name, the same bytes; none with --no-history" {
    pair -j 1 -- shard-data -t tokenizer.json text.txt
    diff -r one two
    bare shard-data -t tokenizer.json text.txt
    clean-data -q text.txt --report a.json -o a.txt
    clean-data -q text.txt --report=b.json --dropped c.txt -fob.txt
    cmp a.json b.json
    clean-data -q text.txt --no-history --report c.json -o /dev/null
    run ! grep -q history c.json
    run -2 clean-data text.txt --no-history -o /dev/null
}

@test "history: train: another name, the same model; none with --no-history" {
    T=(train -q m data --steps 1 --batch-size 1 --seq-len 16 --deterministic)
    "${T[@]}" -o one
    "${T[@]}" --metrics log.jsonl --tensorboard ev --output two
    cmp one/latest/model.safetensors two/latest/model.safetensors
    "${T[@]}" --no-history -o bare
    run ! grep -aq 'init-model\|lmutils.history' bare/latest/model.safetensors
    run ! grep -q '"inputs"' bare/latest/state.json
    train -q --resume bare --steps 2
    run ! grep -aq 'lmutils.history' bare/latest/model.safetensors
}

@test "history: options are recorded by their long names, in a fixed order" {
    merge-models -qfmlinear m:0.5 n:0.5 -o one
    merge-models --json --merge_method=linear m:0.5 -qo two n:0.5
    inspect-model one | grep -qF 'merge-models --method linear m:0.5 n:0.5  ('
    diff -r one two
    init-model -q --set hidden_act=silu --seed 1k m/config.json --dtype float32 -o one -f
    inspect-model one | grep -qF 'init-model --set hidden_act=silu --dtype f32 --seed 1000 m/config.json'
}

@test "history: a printed config reproduces the same bytes" {
    again() { # again OPERANDS -- TOOL OPTION ...
        local operands=()
        while [ "$1" != -- ]; do operands+=("$1"); shift; done
        shift
        "$@" "${operands[@]}" -q -f -o one > /dev/null
        "$@" --print-config > c.json
        "$1" --config c.json -q -f -o two "${operands[@]}" > /dev/null
        diff -r one two
        rm -r one two
    }
    again m/config.json -- init-model --seed 3 --tokenizer tokenizer.json
    again m n -- merge-models -m linear --weight 0.25
    again m n -- merge-models -m dare_ties -b m --density 0.5 --no-normalize --seed 9
    printf 'merge_method: linear\nmodels:\n  - model: m\n    parameters: {weight: 1}\n' > r.yaml
    again -- merge-models --config r.yaml --dtype bf16
    again m -- convert-model --to hf --dtype bf16
    again m -- convert-model --to gguf --type q8_0 --name x
    again m -- compress-ckpt --weights bf16
    again text.txt -- shard-data -t tokenizer.json --val-fraction 0.1 --seed 2
    again text.txt -- train-tokenizer -V 280 --special '<x>'
    # speeds and times depend on the clock
    train -q m data -o t1 --steps 2 --batch-size 2 --seq-len 16 --lr 2e-3 --peak-tflops 0 -j 1
    train --steps 2 --batch-size 2 --seq-len 16 --lr 2e-3 --peak-tflops 0 -j 1 --print-config > c.json
    train -q --config c.json m data -o t2
    cmp t1/latest/model.safetensors t2/latest/model.safetensors
}

@test "history: merge-models --digest covers every byte, the same for folder, tar, .lmz and stream" {
    digest() { merge-models -m linear --json -f -o out "$@" | grep -o '"xxh3_[a-z]*":"[0-9a-f]*"' | head -n 1; }
    tar -cf m.tar -C m .
    compress-ckpt -q m/ -o m.lmz
    whole=$(digest --digest m:0.5 n:0.5)
    [[ "$whole" == '"xxh3_tensors":'* ]]
    [ "$(digest --digest m.tar:0.5 n:0.5)" = "$whole" ]
    [ "$(digest --digest m.lmz:0.5 n:0.5)" = "$whole" ]
    [ "$(cat m.tar | digest --digest -:0.5 n:0.5)" = "$whole" ]
    inspect-model --json out | grep -qF "$whole"
    # one bit outside the bytes that a sample reads
    sample=$(digest m:0.5 n:0.5)
    [[ "$sample" == '"xxh3_sample":'* ]]
    cp -rL m bit
    at=$((8 + $(od -An -tu8 -N 8 bit/model.safetensors) + 8192)) # of the first tensor, 300 x 32 F32
    byte=$(od -An -tu1 -j $at -N 1 bit/model.safetensors)
    # shellcheck disable=SC2059
    printf "$(printf '\\%03o' $((byte ^ 1)))" | dd of=bit/model.safetensors bs=1 seek=$at conv=notrunc status=none
    [ "$(digest bit:0.5 n:0.5)" = "$sample" ]
    [ "$(digest --digest bit:0.5 n:0.5)" != "$whole" ]
}
