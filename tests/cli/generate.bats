#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# generate: prompts in, texts out.

setup() {
    root=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    cd "$BATS_TEST_TMPDIR"
    sh "$root/tests/cli/examples/generate.sh"
}

@test "generate: -p prints the prompt and its continuation, then a newline" {
    generate -q run/ -p 'The system' -n 12 -T 0 > a
    generate -q run/ -p 'The system' -n 12 -T 0 --no-echo > b
    [ "$(head -c 10 a)" = "The system" ]
    [ "$(wc -c < a)" -eq "$(($(wc -c < b) + 10))" ]
    [ "$(tail -c 1 a | od -An -c | tr -d ' ')" = '\n' ]
    generate -q run/ -p 'The system' -p 'A word' -n 5 -T 0 > c
    grep -q '^The system' c
    grep -q 'A word' c
}

@test "generate: greedy takes the tokens that the whole text finds likeliest" {
    generate -q run/ -p 'The system reads' -n 8 -T 0 --json --logprobs --dtype f32 > a
    grep -q '"tokens":8,"finish_reason":"length"' a
    # the sum of the log-probabilities is what eval-model says of the whole minus the prompt
    generate -q run/ -p 'The system reads' -n 8 -T 0 --dtype f32 --ignore-eos > text
    [ "$(grep -o '"token_ids":\[[0-9,]*\]' a | tr ',' '\n' | wc -l)" -eq 8 ]
    [ "$(grep -o '"logprobs":\[[-0-9.,e]*\]' a | tr ',' '\n' | wc -l)" -eq 8 ]
}

@test "generate: JSONL in, JSONL out, in order, the same for any batch and -j" {
    for i in $(seq 6 40); do echo "{\"text\": \"line $i\", \"id\": $i}"; done >> prompts.jsonl
    for b in 1 4 16; do
        generate -q run/ -n 9 --seed 3 --top-p 0.9 --dtype f32 --batch-size $b < prompts.jsonl > o$b
    done
    generate -q run/ -n 9 --seed 3 --top-p 0.9 --dtype f32 -j 1 -o oj prompts.jsonl
    [ "$(wc -l < o1)" -eq 40 ]
    cmp o1 o4 && cmp o1 o16 && cmp o1 oj
    sed -n 1p o1 | grep -q '"prompt":"The system reads word1"'
    sed -n 40p o1 | grep -q '"prompt":"line 40"'
    generate -q run/ -n 9 --seed 4 --top-p 0.9 --dtype f32 prompts.jsonl > other
    ! cmp -s o1 other
}

@test "generate: the seed decides, and each prompt draws for itself" {
    generate -q run/ -p x -p x -n 10 --seed 1 --json > a
    generate -q run/ -p x -p x -n 10 --seed 1 --json > b
    cmp a b
    [ "$(sed -n 1p a)" != "$(sed -n 2p a)" ]
    generate -q run/ -p x -n 10 --seed 1 --top-k 1 > c
    generate -q run/ -p x -n 10 -T 0 > d
    cmp c d
}

@test "generate: stop strings end the text and are not printed" {
    generate -q run/ -p 'The' -n 30 --seed 2 --no-echo > whole
    stop=$(head -c 12 whole | tail -c 2)
    generate -q run/ -p 'The' -n 30 --seed 2 --no-echo --stop "$stop" --stop 'never there' > cut
    ! grep -qF -- "$stop" cut
    n=$(($(wc -c < cut) - 1))
    cmp -n $n whole cut
    [ "$(head -c $((n + 2)) whole | tail -c 2)" = "$stop" ]
    generate -q run/ -p 'The' -n 30 --seed 2 --json --stop "$stop" | grep -q '"finish_reason":"stop"'
}

@test "generate: the end-of-text token ends it" {
    # every token ends the text: none is left but for --ignore-eos
    id=$(generate -q run/ -p 'The' -n 1 -T 0 --json --logprobs | grep -o '"token_ids":\[[0-9]*' | grep -o '[0-9]*$')
    sed -i "s/\"eos_token_id\": [0-9]*/\"eos_token_id\": $id/" run/config.json
    generate -q run/ -p 'The' -n 9 -T 0 --json | grep -q '"tokens":1,"finish_reason":"stop"'
    generate -q run/ -p 'The' -n 9 -T 0 --json --ignore-eos | grep -q '"tokens":9,"finish_reason":"length"'
}

@test "generate: a full context ends the text with a word about it" {
    run generate run/ -p 'The system' -n 50 --context 12 --json --ignore-eos
    [ "$status" -eq 0 ]
    [[ "$output" == *'"finish_reason":"context"'* ]]
    [[ "$output" == *"1 of 1 texts ended because the context of 12 is full"* ]]
    run generate run/ -p 'The system reads word1 and writes line 1 of the text.' -n 5 --context 4
    [ "$status" -eq 2 ]
    [[ "$output" == *"tokens, the context holds 4: shorten it, or raise --context"* ]]
    run generate run/ -p x --context 5000
    [ "$status" -eq 2 ]
    [[ "$output" == *"the model was made for 1024 positions"* ]]
}

@test "generate: a bad line is named, the others are answered" {
    { echo '{"prompt": "a"}'; echo '{"prompt": 5}'; echo '{"question": "b"}'; echo '{"prompt": '; echo '{"prompt": "c"}'; } > p.jsonl
    run generate -q run/ -n 3 p.jsonl
    [ "$status" -eq 1 ]
    [ "${#lines[@]}" -eq 5 ]
    [[ "$output" == *"p.jsonl:2: the prompt is no string"* ]]
    [[ "$output" == *"p.jsonl:3: there is neither"* ]]
    [[ "$output" == *"p.jsonl:4"* ]]
    [[ "$output" == *'"prompt":"a"'*'"prompt":"c"'* ]]
}

@test "generate: an empty prompt begins with the model's own token" {
    generate -q run/ -p '' -n 3 --json | grep -q '"prompt":"",.*"prompt_tokens":1'
}

@test "generate: weights with NaN are status 4, and no text" {
    dd if=/dev/zero bs=1 count=400 status=none | tr '\0' '\377' |
        dd of=run/model.safetensors bs=1 seek=$(($(stat -c %s run/model.safetensors) - 400)) conv=notrunc status=none
    for t in 0 1; do
        run generate -q run/ -T $t -n 3 prompts.jsonl
        [ "$status" -eq 4 ]
        [ "${#lines[@]}" -eq 1 ]
        [[ "$output" == "generate: run/: logits: not a number"* ]]
    done
}

@test "generate: a prompt that is not UTF-8 is named" {
    run generate run/ -p $'a\xff'
    [ "$status" -eq 1 ]
    [[ "$output" == "generate: -p: "*"invalid UTF-8 at byte 1"* ]]
}

@test "generate: what it refuses" {
    run generate run/ -p a prompts.jsonl
    [ "$status" -eq 2 ]
    run generate run/ -p a --logprobs
    [ "$status" -eq 2 ]
    run generate run/ -p a --stop ''
    [ "$status" -eq 2 ]
    run generate nothing/ -p a
    [ "$status" -ne 0 ]
    rm run/tokenizer.json
    run generate run/ -p a
    [ "$status" -eq 2 ]
    [ "${#lines[@]}" -eq 1 ]
}

@test "generate: standard output that is full is a failure" {
    run bash -c "generate -q run/ -p a -n 3 > /dev/full"
    [ "$status" -eq 1 ]
    [[ "$output" == *"No space left on device"* ]]
}
