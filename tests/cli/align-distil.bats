#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# align-model --loss gkd: a student learns the distributions of a teacher, on given answers and on its own.
bats_require_minimum_version 1.5.0

shape() { # shape WIDTH TIED VOCAB
    echo "{\"model_type\":\"llama\",\"hidden_size\":$1,\"intermediate_size\":64,\"num_hidden_layers\":2,\"vocab_size\":$3,
        \"num_attention_heads\":2,\"num_key_value_heads\":1,\"max_position_embeddings\":256,\"tie_word_embeddings\":$2,
        \"initializer_range\":0.2}"
}

setup_file() {
    cd "$BATS_FILE_TMPDIR"
    printf '%s\n' '{"text":"bba bba"}' > text.jsonl
    train-tokenizer -q -V 258 -o tok.json text.jsonl
    shape 32 true 258 > small.json
    shape 64 false 258 > big.json
    init-model -q -t tok.json -o m small.json
    init-model -q -t tok.json --seed 5 -o teacher big.json
    for i in 1 2 3 4 5 6 7 8; do echo "{\"prompt\":\"$i+$i=\",\"completion\":\"$((i + i)) and $i\"}"; done > p.jsonl
}

setup() {
    cd "$BATS_TEST_TMPDIR"
    ln -s "$BATS_FILE_TMPDIR"/{m,teacher,p.jsonl,big.json,small.json,tok.json} .
    A=(align-model -q m p.jsonl --loss gkd --batch-size 4 --max-new-tokens 6 --lr 1e-2 --no-history)
}

value() { grep '"event":"'"$2"'"' "$1" | grep -o "\"$3\":[-0-9.e+]*" | cut -d: -f2; }

@test "align-model: a student comes near its teacher, on given answers and its own, whole or with an adapter" {
    "${A[@]}" -o a --teacher teacher --steps 40 --val p.jsonl --eval-every 20 --metrics a.jsonl
    [ "$(value a.jsonl eval loss | wc -l)" -eq 2 ]
    { value a.jsonl step loss | head -1; value a.jsonl eval loss; } | awk '{ x[NR] = $1 } END { exit !(x[3] < 0.6 * x[1]) }'
    value a.jsonl step on_policy | sort -u | tr '\n' ' ' | grep -qx '0 1 '
    value a.jsonl step completions/mean_length | head -1 | awk '{ exit !($1 >= 1 && $1 <= 6) }'
    "${A[@]}" -o b --teacher teacher --steps 20 --lambda 0 --beta 0 --method lora --rank 8 --metrics b.jsonl
    value b.jsonl step on_policy | sort -u | grep -qx 0
    value b.jsonl step loss | awk 'NR == 1 { a = $1 } { b = $1 } END { exit !(NR == 20 && b < a) }'
    "${A[@]}" -o c --teacher teacher --steps 4 --loss gkd:beta=1,lambda=1 --distill-temperature 2 --metrics c.jsonl
    value c.jsonl step on_policy | sort -u | grep -qx 1
}

@test "align-model: a model that is its own teacher has nothing to learn; a coded teacher is near the whole one" {
    cp -r m same
    "${A[@]}" -o a --teacher same --steps 1 --lambda 0 --metrics a.jsonl
    value a.jsonl step loss | awk '{ exit !($1 ^ 2 < 1e-12) }'
    convert-model -q teacher --type q8_0 -o coded.gguf
    for t in teacher coded.gguf; do
        "${A[@]}" -o "run-$t/" --teacher $t --steps 1 --lambda 0 --metrics $t.jsonl
    done
    paste <(value teacher.jsonl step loss) <(value coded.gguf.jsonl step loss) |
        awk '{ exit !(($1 - $2) ^ 2 < 1e-3 * $1 ^ 2 && $1 != $2) }'
    "${A[@]}" -o low --teacher teacher --steps 1 --lambda 0 --dtype bf16 --metrics low.jsonl
    paste <(value teacher.jsonl step loss) <(value low.jsonl step loss) | awk '{ exit !(($1 - $2) ^ 2 < 1e-3 * $1 ^ 2) }'
}

@test "align-model: distillation is resumed to the bit, and does not depend on threads or windows" {
    "${A[@]}" -o a --teacher teacher --steps 8 --save-every 2 --keep 0
    cp -r a b
    rm -r b/step-00000[468] b/latest
    mkdir elsewhere
    (cd elsewhere && align-model -q --resume ../b ../p.jsonl)
    cmp a/step-000008/model.safetensors b/step-000008/model.safetensors
    cmp a/step-000008/optimizer.safetensors b/step-000008/optimizer.safetensors
    "${A[@]}" -o c --teacher teacher --steps 8 -j 1
    cmp a/step-000008/model.safetensors c/step-000008/model.safetensors
    for w in 1 3; do
        "${A[@]}" -o w$w --teacher teacher --steps 4 --lambda 0 --lr 1e-3 --micro-batch-size $w --metrics $w.jsonl
    done
    paste <(value 1.jsonl step loss) <(value 3.jsonl step loss) | awk '($1 - $2) ^ 2 > 1e-9 { exit 1 }'
}

@test "align-model: messages distil the assistant's last turn; the plan has the teacher" {
    echo '{"messages":[{"role":"user","content":"1"},{"role":"assistant","content":"2"},{"role":"user","content":"3"},
        {"role":"assistant","content":"4"}]}' | tr -d '\n' > chat.jsonl
    "${A[@]/p.jsonl/chat.jsonl}" -o a --teacher teacher --steps 2 --batch-size 1 --chat-template chatml
    align-model m p.jsonl --dry-run --loss gkd --teacher teacher > plan
    grep -q '^teacher ' plan
    grep -q '^rollouts ' plan
    align-model m --dry-run --loss gkd:lambda=0 --teacher teacher > plan
    grep -q '^teacher ' plan
    run ! grep -q '^rollouts ' plan
}

refuses() { # TEXT OPTION ...
    local text=$1
    shift
    run -2 --separate-stderr "${A[@]}" -o no "$@"
    [[ $stderr == *"$text"* ]] || { echo "$stderr"; false; }
    [ "${#stderr_lines[@]}" -eq 1 ]
    [ ! -e no ]
}

@test "align-model: what a teacher cannot do is refused in one line" {
    refuses "--teacher: gkd learns from a teacher, and no teacher is given: name a model: --teacher MODEL"
    refuses "--teacher: dpo learns from no teacher: give --loss gkd too" --loss dpo --teacher teacher
    refuses "gkd is not added to other losses" --loss gkd+gkd --teacher teacher
    refuses "lambda" --teacher teacher --lambda 2
    refuses "--reward: gkd is not for sampled completions" --teacher teacher --reward gsm8k
    shape 32 true 300 > other.json
    init-model -q -o other other.json
    refuses "its vocabulary has 300 tokens, that of the model 258: use a teacher with the same tokenizer" --teacher other
    printf '%s\n' '{"text":"aab aab"}' > text.jsonl
    train-tokenizer -q -V 258 -o aab.json text.jsonl
    init-model -q -t aab.json -o other2 small.json
    refuses "its tokens are not those of the model: use a teacher with the same tokenizer" --teacher other2
    run -1 --separate-stderr "${A[@]}" -o no --teacher nothing
    [[ $stderr == "align-model: nothing: cannot be read: "*"name a model" ]] || { echo "$stderr"; false; }
    echo '{"prompt":"1"}' > bare.jsonl
    run -1 --separate-stderr "${A[@]/p.jsonl/bare.jsonl}" -o no --teacher teacher
    [[ $stderr == *"bare.jsonl:1"*"give prompt and completion, or messages" ]] || { echo "$stderr"; false; }
    [ ! -e no ]
}
