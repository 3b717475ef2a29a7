#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Detection of token ids, and models, data and tokenizers that do not belong together.
bats_require_minimum_version 1.5.0

setup_file() {
    root=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    export root
    cd "$BATS_FILE_TMPDIR"
    sh "$root/tests/cli/examples/train.sh"
    # another tokenizer of as many ids
    tr 'etaoin' 'niotea' < clean.jsonl | sed 's/.*: "\(.*\)"}/{"text": "\1"}/' > mixed.jsonl
    awk 'BEGIN { for (i = 0; i < 500; i++) printf "{\"text\": \"w%dx%d\"}\n", i, i * i }' >> mixed.jsonl
    train-tokenizer -q -V 366 -o other/tokenizer.json mixed.jsonl
    shard-data -q -t other/ --val-fraction 0.05 -o data2/ mixed.jsonl
}

setup() {
    cd "$BATS_TEST_TMPDIR"
    cp -r "$BATS_FILE_TMPDIR"/* .
}

# fails STATUS PART COMMAND ARGUMENT ...: that exit status, and one line with PART on standard error.
fails() {
    local want=$1 part=$2
    shift 2
    run --separate-stderr "$@"
    [ "$status" -eq "$want" ] || { echo "status $status: $stderr"; false; }
    [ "${#stderr_lines[@]}" -eq 1 ] || { echo "$stderr"; false; }
    [[ $stderr == *"$part"* ]] || { echo "$stderr"; false; }
}

T=(train -q --peak-tflops 0 --seq-len 32 --batch-size 2 --steps 2 m0)

@test "data: text is not read as token ids, whatever its name" {
    sed 's/.*: "\(.*\)"}/\1/' clean.jsonl > t.txt
    cp t.txt t.bin
    gzip -k t.txt
    for f in t.txt t.bin; do
        fails 1 "$f: it is text, not token ids" "${T[@]}" $f -o run
        fails 1 "$f: it is text, not token ids" shard-data -q -o x $f
    done
    fails 1 "t.txt.gz: it is compressed (gzip), not token ids" "${T[@]}" t.txt.gz -o run
    fails 1 "t.txt.gz: it is compressed (gzip), not token ids" shard-data -q -o x t.txt.gz
    cp data/train.idx index.bin
    fails 1 "index.bin: it is the index of a token dataset, not token ids" shard-data -q -o x index.bin
    cp m0/model.safetensors model.bin
    fails 1 "model.bin: it is safetensors, not token ids" "${T[@]}" model.bin -o run
    printf 'PK\003\004 and more' > pytorch_model.bin
    fails 1 "it is a ZIP archive or a PyTorch checkpoint, not token ids" shard-data -q -o x pytorch_model.bin
    shard-data -q --format llmc -o l data/train # and ids are not read as text
    fails 1 "l/train.bin: it is a token shard of llm.c, not text" clean-data l/train.bin
    fails 2 "text needs a tokenizer" shard-data -q --input-format text -o x t.txt
    fails 2 "--tokenizer is for text" shard-data -q -t tok --input-format nanogpt -o x t.txt
    [ ! -e run ] && [ ! -e x ]
}

@test "data: bare ids are called .bin, or their format is named" {
    mkdir bare
    cp data/train.bin bare/ids.bin
    cp data/train.bin bare/ids.u16
    "${T[@]}" bare/ids.bin -o a
    fails 1 "ids.u16: not a token dataset" "${T[@]}" bare/ids.u16 -o b
    "${T[@]}" --format nanogpt bare/ids.u16 -o b
    cmp <(tail -c 1000 a/model.safetensors) <(tail -c 1000 b/model.safetensors)
    eval-model -q --format nanogpt m0 bare/ids.u16 > e.json
    grep -q '"task":"perplexity"' e.json
    shard-data -q --input-format nanogpt --no-eos -o c bare/ids.u16
    cmp c/train.bin data/train.bin
    fails 2 "multiple-choice does not read shards" eval-model -t multiple-choice --format llmc m0 bare/ids.bin
}

@test "data: meta.json states the format and shows missing files" {
    shard-data -q --format nanogpt -o n data/train
    touch n/train.idx # of another dataset
    "${T[@]}" n -o a
    rm n/train.idx data/train.idx
    fails 1 "train.idx is missing: by meta.json it is a Megatron dataset" "${T[@]}" data -o b
    fails 1 "train.idx is missing" eval-model m0 data/train.bin
    truncate -s -8 n/train.bin
    fails 1 "meta.json beside them has" "${T[@]}" n -o b
    rm n/meta.json
    "${T[@]}" n -o b
    # a meta.json of another program is ignored, a damaged one is an error
    echo '{"format": 7}' > n/meta.json
    "${T[@]}" n -f -o b
    echo '{"format": "zip", "vocab_size": 400, "train": {"tokens": 3}}' > n/meta.json
    fails 1 "format 'zip' is not one of megatron, llmc and nanogpt" "${T[@]}" n -f -o b
    echo '{"format": ' > n/meta.json
    fails 1 "n/meta.json" "${T[@]}" n -f -o b
}

@test "data: missing last shards are detected" {
    shard-data -q --format llmc --shard-tokens 1k --eos-id 0 -o s data/train
    last=$(ls s | tail -1)
    "${T[@]}" s -o a
    mv "s/$last" .
    fails 1 "s/train: its files hold" "${T[@]}" s -o b
}

@test "data: validation shards are found when they are numbered" {
    shard-data -q -t tok --val-fraction 0.2 --format llmc --shard-tokens 1k -o s clean.jsonl
    [ -e s/val_000000.bin ] && [ ! -e s/val.bin ]
    "${T[@]}" s -o a --eval-every 1 --metrics m.jsonl
    grep -q '"event":"eval"' m.jsonl
    mkdir l # as llm.c's own training shards: from 1 on
    cp s/train_000000.bin l/train_000001.bin
    cp s/val_000000.bin l/val_000001.bin
    "${T[@]}" l -o b --eval-every 1 --metrics m2.jsonl
    grep -q '"event":"eval"' m2.jsonl
}

@test "data: llm.c's own names, fineweb_train_000001.bin and fineweb_val_000000.bin, are a pair" {
    shard-data -q -t tok --val-fraction 0.2 --format llmc --shard-tokens 1k -o s clean.jsonl
    mkdir l
    cp s/train_000000.bin l/fineweb_train_000001.bin
    cp s/train_000001.bin l/fineweb_train_000002.bin
    cp s/val_000000.bin l/fineweb_val_000000.bin
    cp s/val_000000.bin l/hellaswag_val.bin
    "${T[@]}" l -o a --eval-every 1 --metrics m.jsonl
    grep -q '"event":"eval"' m.jsonl
    "${T[@]}" l/fineweb_train --val l/fineweb_val -o b --eval-every 1 --metrics n.jsonl
    cmp <(inspect-model --stats a | tail -n 5) <(inspect-model --stats b | tail -n 5)
    fails 2 "l: it is a folder: name its dataset 'fineweb_train' or 'fineweb_val'" eval-model m0 l
    cp s/train_000000.bin l/tiny_shakespeare_train.bin
    fails 2 "l: holds the datasets of several names, such as fineweb_train: name one of them" "${T[@]}" l -o c
    fails 2 "l: holds the datasets of several names" eval-model m0 l
    cp s/train_000000.bin l/train.bin # the name that shard-data uses has precedence
    "${T[@]}" l -o d
    [ ! -e c ]
}

@test "data: ambiguous and missing datasets: the message names the existing ones" {
    shard-data -q --format nanogpt --shard-tokens 1k -o s data/train
    cp s/train_000000.bin s/train.bin
    rm s/meta.json
    fails 2 "ambiguous: both train.bin and the shards train_nnnnnn.bin exist" "${T[@]}" s -o a
    "${T[@]}" s/train.bin -o a
    mkdir l
    mv s/train_000000.bin l/web_000000.bin
    fails 1 "neither train.bin nor train_000000.bin exists: No such file or directory: name an existing dataset, such as web_000000.bin" \
        "${T[@]}" l -o b
}

@test "data: a folder of text is validated on, a folder of datasets is not text" {
    mkdir texts
    head -20 clean.jsonl > texts/a.jsonl
    eval-model -q m0 texts > a.json
    eval-model -q m0 'texts/*.jsonl' > b.json
    [ "$(grep -o '"loss":[0-9.]*' a.json)" = "$(grep -o '"loss":[0-9.]*' b.json)" ]
    merge-models -q m0:0.5 m0:0.5 -m linear --search grid --grid 1,2 --val texts -o merged > log
    grep -q '"event":"best"' log
    fails 2 "data: it is a folder: name its dataset 'train' or 'val'" eval-model m0 data
}

@test "data: validation on the training data is reported" {
    "${T[@]/-q/-v}" data -o a --eval-every 1 --val data/train 2> err
    grep -q "data/train: the validation data are the training data" err
    "${T[@]/-q/-v}" data -o b --eval-every 1 2> err
    run ! grep -q "are the training data" err
}

@test "data: another tokenizer of as many ids is refused, with both names; --no-check-tokenizer goes on" {
    part="data2/train: it was made with another tokenizer (366 ids) than that of m0 (366 ids)"
    fails 2 "$part" "${T[@]}" data2 -o a
    fails 2 "$part" eval-model m0 data2/train
    fails 2 "$part" eval-model m0 data2/train --tokenizer tok
    echo text > t.txt
    fails 2 "other: it has other tokens than the tokenizer of m0" eval-model m0 t.txt --tokenizer other
    fails 2 "other: it has other tokens than the tokenizer of m0" generate m0 -p The --tokenizer other
    fails 2 "data2/val: it was made with another tokenizer" "${T[@]}" data --val data2/val --eval-every 1 -o a
    fails 2 "data2/train: it was made with another tokenizer (366 ids) than data/train" \
        shard-data -q -o x data/train data2/train
    fails 2 "data2/val: it was made with another tokenizer (366 ids) than that of the merged model" \
        merge-models m0:0.5 m0:0.5 -m linear --search grid --grid 1,2 --val data2/val -o merged
    [ ! -e a ] && [ ! -e x ] && [ ! -e merged ]
    "${T[@]}" --no-check-tokenizer data2 -o a
    eval-model -q --no-check-tokenizer m0 data2/train > e.json
    eval-model -q --no-check-tokenizer m0 clean.jsonl --tokenizer other > e.json
    generate -q --no-check-tokenizer m0 -p The -n 2 --tokenizer other > g.txt
    shard-data -q --no-check-tokenizer -o x data/train data2/train
    grep -q '"tokenizer": null' x/meta.json
    merge-models -q m0:0.5 m0:0.5 -m linear --search grid --grid 1,2 --val data2/val --no-check-tokenizer -o merged
}

@test "data: a tokenizer without the model's own: the sizes must be near" {
    rm m0/tokenizer.json
    train-tokenizer -q -V 300 -o small/tokenizer.json clean.jsonl
    fails 2 "small: it has only 300 ids, the vocabulary of m0 is 366" generate m0 -p The --tokenizer small
    generate -q m0 -p The -n 2 --tokenizer other > g.txt
    # and train and val of two tokenizers, with no tokenizer to compare them with
    fails 2 "than data/train (366 ids)" "${T[@]}" data --val data2/val --eval-every 1 -o a
}

@test "data: the digest is that of the tokens, and is copied from shards to shards" {
    shard-data -q -o again data/train
    diff <(grep -A 3 '"tokenizer": {' data/meta.json) <(grep -A 3 '"tokenizer": {' again/meta.json)
    grep -q '"ids": 366' again/meta.json
    # additional tokens, another form of the file: the same tokenizer for these data
    sed 's/"added_tokens": \[/"added_tokens": [{"id": 366, "content": "<|user|>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true},/' \
        m0/tokenizer.json | tr -d '\n' > t.json
    grep -q user t.json
    mv t.json m0/tokenizer.json
    "${T[@]}" data -o a
}
