#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Each call fails in turn in the tools that tune, and in those that read adapters: what was there is kept, a run has whole
# checkpoints or none, and no incomplete file remains.
bats_require_minimum_version 1.5.0
load ../inject/inject

setup_file() {
    export SOURCE_DATE_EPOCH=0
    cd "$BATS_FILE_TMPDIR"
    seq 30 | awk '{ print "{\"text\": \"The river number " $1 " walks under the old bridge.\"}" }' > text.jsonl
    seq 4 | awk '{ print "{\"prompt\": \"river " $1 "\", \"completion\": \" bridge\"}" }' > qa.jsonl
    seq 4 | awk '{ print "{\"prompt\": \"river " $1 "\", \"chosen\": \" bridge\", \"rejected\": \" old\"}" }' > pairs.jsonl
    seq 4 | awk '{ print "{\"messages\": [{\"role\": \"user\", \"content\": \"river " $1 "\"}, {\"role\": \"assistant\", \"content\": \"old\"}]}" }' > chat.jsonl
    train-tokenizer -q -V 270 -o tok/tokenizer.json text.jsonl
    cat > config.json <<END
{"model_type": "llama", "vocab_size": 270, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
 "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "tie_word_embeddings": true, "eos_token_id": 0}
END
    init-model -q config.json --tokenizer tok/tokenizer.json -o m
    T=(-q -j 1 --batch-size 2 --seq-len 32 --dtype f32 --lr 1e-3 --steps 2 --save-every 1 --keep 0)
    peft-tune "${T[@]}" m qa.jsonl -o a --rank 2
    peft-tune "${T[@]}" m qa.jsonl -o b --rank 2 --seed 3 --target q_proj,v_proj
    peft-tune "${T[@]}" m qa.jsonl -o h --method loha --set r=2
    peft-tune -q -j 1 --combine cat m b b -o older
    merge-models -q --method passthrough m+a -o tuned
}

setup() {
    export SOURCE_DATE_EPOCH=0
    cd "$BATS_TEST_TMPDIR"
    ln -s "$BATS_FILE_TMPDIR"/* .
    T=(-q -j 1 --batch-size 2 --seq-len 32 --dtype f32 --lr 1e-3 --steps 2 --save-every 1 --keep 0)
}

# every KIND ...: with a command in $run_it that writes $to; the old one stays, or the new one is whole
old_or_new() {
    [ "$1" -ne 0 ] && diff -r "$to" old > /dev/null && return
    diff -r "$to" new && rm -r "$to" && cp -r old "$to"
}

each_file() { # OLD COMMAND ...: OLD exists; the same with -f writes $to
    local old=$1 kind
    shift
    "$@"
    mv "$to" new
    cp -rL "$old" old
    cp -r old "$to"
    for kind in write fsync rename; do
        inject_each $kind 60 old_or_new "$@"
    done
}

@test "peft-tune --unmerge, --to-lora, --combine and failing writes, fsync, rename; memory" {
    # memory without singular values, because LAPACK ends the process when it has none
    to=out
    each_file older peft-tune -q -j 1 -f --combine cat m a b -o out
    inject_each malloc/41 9999 old_or_new peft-tune -q -j 1 -f --combine cat m a b -o out
    rm -r old new out
    each_file older peft-tune -q -j 1 -f --unmerge m tuned --rank 2 -o out
    rm -r old new out
    each_file older peft-tune -q -j 1 -f --to-lora m h --rank 4 -o out
}

@test "merge-models with an adapter and failing writes, fsync, rename, memory" {
    to=out
    each_file m merge-models -q -j 1 -f --method passthrough m+a -o out
    inject_each malloc/41 9999 old_or_new merge-models -q -j 1 -f --method passthrough m+a -o out
}

@test "generate --adapter and failing writes, fsync, rename, memory" {
    to=out
    each_file text.jsonl generate -q -j 1 -f m --adapter a -T 0 -p river -n 3 -o out
    inject_each malloc/41 9999 old_or_new generate -q -j 1 -f m --adapter a -T 0 -p river -n 3 -o out
}

@test "shard-data --chat and failing writes, fsync, rename, memory" {
    to=data
    shard-data -q -j 1 --chat --chat-template chatml --seed 3 -t tok -o first chat.jsonl
    how=(shard-data -q -j 1 -f --chat --chat-template chatml -t tok -o data chat.jsonl)
    each_file first "${how[@]}"
    inject_each malloc/41 9999 old_or_new "${how[@]}"
}

# The numbers of a file of tensors, without its header.
numbers() { tail -c +$((9 + $(od -An -t u8 -N 8 "$1"))) "$1"; }

# Whatever failed: every checkpoint has the files and the numbers of a run in which nothing failed; `latest` names one;
# without a checkpoint there is no log of its completions.
whole_or_none() {
    local c f
    for c in run/step-*; do
        [ -e "$c" ] || continue
        [ "$(ls "$c")" = "$(ls "whole/${c##*/}")" ] || return
        for f in adapter_model model optimizer; do
            [ ! -e "$c/$f.safetensors" ] || cmp <(numbers "$c/$f.safetensors") <(numbers "whole/${c##*/}/$f.safetensors") || return
        done
    done
    [ ! -L run/latest ] || [ -e run/latest/state.json ] || return
    compgen -G 'run/step-*' > /dev/null || [ ! -e run/completions.jsonl ] || return
    [ "$1" -ne 0 ] || [ "$(readlink run/latest)" = step-000002 ] || return
    rm -rf run
}

each_run() { # COMMAND ...: which writes `run`
    local kind
    "$@"
    mv run whole
    for kind in write fsync rename; do
        inject_each $kind 60 whole_or_none "$@"
    done
    inject_each malloc/97 9999 whole_or_none "$@"
}

@test "peft-tune: a run and failing writes, fsync, rename, memory" {
    each_run peft-tune "${T[@]}" m qa.jsonl --rank 2 -f -o run
}

@test "align-model: a run of pairs and failing writes, fsync, rename, memory" {
    each_run align-model "${T[@]}" m pairs.jsonl --peak-tflops 0 -f -o run
}

@test "align-model: a run with a command that judges and failing writes, fsync, rename, memory" {
    each_run align-model "${T[@]}" m qa.jsonl --loss grpo --group 2 --max-new-tokens 3 --peak-tflops 0 -f -o run \
        --reward-command 'while read x; do case $x in *"completion\":\""[a-m]*) echo 1;; *) echo 0;; esac; done'
}

@test "align-model: a run of completions and failing fsync" {
    how=(align-model "${T[@]}" m qa.jsonl --loss grpo --group 2 --max-new-tokens 3 --peak-tflops 0 -f -o run --reward length:target=2)
    "${how[@]}"
    mv run whole
    inject_each fsync 60 whole_or_none "${how[@]}"
}
