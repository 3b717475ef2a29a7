#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# generate: prompts as input, texts as output.

bats_require_minimum_version 1.5.0

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

@test "generate: greedy tokens are the most probable ones of a whole forward pass" {
    generate -q run/ -p 'The system reads' -n 8 -T 0 --json --logprobs --dtype f32 > a
    grep -q '"tokens":8,"finish_reason":"length"' a
    # the sum of the log-probabilities is eval-model's loss of the whole text minus that of the prompt
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
    run ! cmp -s o1 other
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
    run ! grep -qF -- "$stop" cut
    n=$(($(wc -c < cut) - 1))
    cmp -n $n whole cut
    [ "$(head -c $((n + 2)) whole | tail -c 2)" = "$stop" ]
    generate -q run/ -p 'The' -n 30 --seed 2 --json --stop "$stop" | grep -q '"finish_reason":"stop"'
}

@test "generate: the end-of-text token ends it" {
    # every token ends the text: there is no other token except with --ignore-eos
    id=$(generate -q run/ -p 'The' -n 1 -T 0 --json --logprobs | grep -o '"token_ids":\[[0-9]*' | grep -o '[0-9]*$')
    sed -i "s/\"eos_token_id\": [0-9]*/\"eos_token_id\": $id/" run/config.json
    generate -q run/ -p 'The' -n 9 -T 0 --json | grep -q '"tokens":1,"finish_reason":"stop"'
    generate -q run/ -p 'The' -n 9 -T 0 --json --ignore-eos | grep -q '"tokens":9,"finish_reason":"length"'
}

@test "generate: a full context ends the text with a warning" {
    run generate run/ -p 'The system' -n 50 --context 12 --json --ignore-eos
    [ "$status" -eq 0 ]
    [[ "$output" == *'"finish_reason":"context"'* ]]
    [[ "$output" == *"1 of 1 text ended because the context of 12 is full"* ]]
    run generate run/ -p 'The system reads word1 and writes line 1 of the text.' -n 5 --context 4
    [ "$status" -eq 2 ]
    [[ "$output" == *"tokens, the context holds 4: shorten it, or raise --context"* ]]
    run generate run/ -p x --context 5000
    [ "$status" -eq 2 ]
    [[ "$output" == *"the model was made for 1024 positions"* ]]
}

@test "generate: a bad line is answered by an error in its place, the status is 1" {
    { echo '{"id": 1, "prompt": "a"}'; echo '{"id": 2, "prompt": 5}'; echo '{"question": "b", "id": 3}'; echo '{"prompt": '
      echo '[1]'; printf '{"prompt": "\xff"}\n'; echo '{"id": 7, "prompt": "c"}'; } > p.jsonl
    long=$(printf 'word %.0s' $(seq 400))
    echo "{\"id\": 8, \"prompt\": \"$long\"}" >> p.jsonl
    for b in 1 3; do
        run --separate-stderr generate -q run/ -n 3 --context 100 -b $b p.jsonl
        [ "$status" -eq 1 ]
        [ "${#lines[@]}" -eq 8 ]
        [[ "${lines[0]}" == '{"prompt":"a","id": 1,"text":'*'"finish_reason"'* ]]
        [[ "${lines[1]}" == '{"id": 2,"prompt": 5,"error":"column 21: the field is not a string'* ]]
        [[ "${lines[2]}" == '{"question": "b","id": 3,"error":'*'neither'*"it has 'question'"* ]]
        [[ "${lines[3]}" == '{"source":"p.jsonl","line":4,"error":'* ]]
        [[ "${lines[4]}" == '{"source":"p.jsonl","line":5,"error":'* ]]
        [[ "${lines[5]}" == '{"source":"p.jsonl","line":6,"error":"invalid UTF-8 at byte 12'* ]]
        [[ "${lines[6]}" == '{"prompt":"c","id": 7,"text":'* ]]
        [[ "${lines[7]}" == '{"prompt":"word '*'"id": 8,"error":"the prompt has '*'the context holds 100'* ]]
        [ "${#stderr_lines[@]}" -eq 6 ]
        [[ "${stderr_lines[0]}" == "generate: p.jsonl:2: column 21: "* ]]
    done
}

@test "generate: a prompt whose logits are not numbers is answered by an error, the others as without it; status 4" {
    init-model -q llama-1m --set num_hidden_layers=2 --set hidden_size=64 --set tie_word_embeddings=false \
        --tokenizer tok/tokenizer.json -o bad/
    # a NaN in the row of Z
    file=bad/model.safetensors
    n=$(od -An -t u8 -N 8 $file)
    at=$(head -c $((n + 8)) $file | grep -ao '"model.embed_tokens.weight":{[^}]*' | sed 's/.*"data_offsets":\[\([0-9]*\),.*/\1/')
    id=$(grep -o '"Z": *[0-9]*' bad/tokenizer.json | grep -o '[0-9]*$')
    printf '\x00\x00\xc0\x7f' | dd of=$file bs=1 seek=$((8 + n + at + 64 * 4 * id)) conv=notrunc status=none
    for i in 1 2 3 4 5 6; do echo "{\"id\": $i, \"prompt\": \"The system reads word$i\"}"; done > p.jsonl
    sed '3s/ word3/ wordZ and the text again and again/; 5s/word5/Z/' p.jsonl > q.jsonl # the next in its slot is shorter
    how=(-q -n 5 -T 0 --ignore-eos --dtype f32)
    generate "${how[@]}" bad/ p.jsonl | sed '3d;5d' > want
    for b in '-b 1' '-b 4' '--serve-batch 1 --kv-memory 1M' '--serve-batch 4 --kv-memory 1M'; do
        run --separate-stderr generate "${how[@]}" $b bad/ q.jsonl
        [ "$status" -eq 4 ]
        [[ "${lines[2]}" == '{"prompt":"The system reads wordZ'*'","id": 3,"error":"logits: not a number behind token '*'inspect-model --stats'* ]]
        [[ "${lines[4]}" == '{"prompt":"The system reads Z","id": 5,"error":"logits: '* ]]
        printf '%s\n' "$output" | sed '3d;5d' | cmp - want
        [ "${#stderr_lines[@]}" -eq 2 ]
        [[ "${stderr_lines[1]}" == "generate: bad/: logits: not a number behind token "*" of text 5: "* ]]
    done
    run -4 --separate-stderr generate "${how[@]}" bad/ -p 'a Z' -p The --n 2 --json
    [[ "${lines[1]}" == '{"prompt":"a Z","sample":1,"error":"logits: '* ]]
    [[ "${lines[2]}" == '{"prompt":"The","text":"'* ]]
    run -4 generate "${how[@]}" bad/ -p 'a Z' --save-cache Z.kv
    [ ! -e Z.kv ]
}

@test "generate: fields of a record are copied unchanged, except those of the answer" {
    echo '{"id": 12345678901234567890, "x": 0.10, "text": "a", "meta": {"k": ["\u00e9", null]}, "tokens": "mine", "error": 1}' > p.jsonl
    generate -q run/ -n 2 -T 0 --ignore-eos p.jsonl > o
    grep -qF '{"prompt":"a","id": 12345678901234567890,"x": 0.10,"meta": {"k": ["\u00e9", null]},"text":' o
    grep -q '"tokens":2,' o
    run ! grep -q 'mine\|error' o
    echo '{"text": "not this", "prompt": "a\tb"}' | generate -q run/ -n 1 | grep -q '^{"prompt":"a\\tb","text":"'
}

@test "generate: --n answers a prompt several times, the same for any batch" {
    for i in 1 2 3 4 5; do echo "{\"prompt\": \"line $i\", \"id\": $i}"; done > p.jsonl
    generate -q run/ -n 7 --seed 3 --dtype f32 p.jsonl > alone
    for b in 1 2 8 64; do
        generate -q run/ -n 7 --n 3 --seed 3 --dtype f32 -b $b p.jsonl > o$b
        [ "$(wc -l < o$b)" -eq 15 ]
    done
    cmp o1 o2 && cmp o1 o8 && cmp o1 o64
    [ "$(sed 's/.*"id": \([0-9]\).*"sample":\([0-9]\).*/\1\2/' o1 | tr '\n' ' ')" = "10 11 12 20 21 22 30 31 32 40 41 42 50 51 52 " ]
    # the first equals a single answer, the others differ
    grep '"sample":0' o1 | sed 's/,"sample":0//' | cmp - alone
    [ "$(grep '"id": 1' o1 | sed 's/.*"text"//; s/"sample".*//' | sort -u | wc -l)" -eq 3 ]
    [ "$(generate -q run/ -p x --n 3 -n 4 --ignore-eos --no-echo | wc -l)" -ge 3 ]
    run generate run/ -p x --n 0
    [ "$status" -eq 2 ]
}

@test "generate: every id of a list of end tokens ends a text, of both files" {
    ids=$(generate -q run/ -p 'The' -n 6 --seed 5 --json --logprobs --ignore-eos | grep -o '"token_ids":\[[0-9,]*' | grep -o '[0-9,]*$')
    first=${ids%%,*}
    later=$(echo "$ids" | tr , '\n' | grep -vx "$first" | head -n 1)
    at=$(echo "$ids" | tr , '\n' | grep -nx "$later" | head -n 1 | cut -d: -f1)
    sed -i "s/\"eos_token_id\": [0-9]*/\"eos_token_id\": [0, 1000000, $later]/" run/config.json
    [ "$first" -eq 0 ] || generate -q run/ -p 'The' -n 9 --seed 5 --json | grep -q "\"tokens\":$at,\"finish_reason\":\"stop\""
    echo "{\"eos_token_id\": [$first]}" > run/generation_config.json
    generate -q run/ -p 'The' -n 9 --seed 5 --json | grep -q '"tokens":1,"finish_reason":"stop"'
    echo '{"eos_token_id": "x"}' > run/generation_config.json
    run generate -q run/ -p 'The' -n 9
    [ "$status" -eq 2 ]
    [[ "$output" == *'"eos_token_id": is not a token id'* ]]
}

@test "generate: generation_config.json gives the defaults, options override it" {
    generate -q run/ -p 'The' -n 9 --seed 5 --temperature 0.3 --top-k 7 --top-p 0.8 --repetition-penalty 1.3 > expect
    generate -q run/ -p 'The' -n 9 --seed 5 > plain
    generate -q run/ -p 'The' -n 9 -T 0 > greedy
    echo '{"temperature": 0.3, "top_k": 7, "top_p": 0.8, "repetition_penalty": 1.3, "max_new_tokens": 9, "do_sample": true, "num_beams": 4, "length_penalty": 1.0}' \
        > run/generation_config.json
    run --separate-stderr generate run/ -p 'The' --seed 5 -v
    [ "$output" = "$(cat expect)" ]
    [[ "$stderr" == *"--top-k 7 comes from generation_config.json"* ]]
    [[ "$stderr" == *'generation_config.json: "num_beams" has no effect here'* ]]
    [[ "$stderr" != *length_penalty* ]]
    generate -q run/ -p 'The' -n 9 --seed 5 --no-generation-config | cmp - plain
    generate -q run/ -p 'The' --seed 5 -T 1 --top-k 0 --top-p 1 --repetition-penalty 1 | cmp - plain
    # a printed configuration does not fix values that the model determines
    generate run/ -p 'The' --seed 5 --print-config > c.json
    generate -q run/ --config c.json | cmp - expect
    echo '{"temperature": 0.3, "do_sample": false, "max_new_tokens": 9}' > run/generation_config.json
    generate -q run/ -p 'The' | cmp - greedy
    echo '{"top_p": 3}' > run/generation_config.json
    run generate -q run/ -p 'The'
    [ "$status" -eq 2 ]
    [[ "$output" == *'"top_p": is not a number from 0 to 1'* ]]
}

@test "generate: an empty prompt begins with the model's own token" {
    generate -q run/ -p '' -n 3 --json | grep -q '"prompt":"",.*"prompt_tokens":1'
}

@test "generate: weights with NaN are status 4, and no text" {
    dd if=/dev/zero bs=1 count=400 status=none | tr '\0' '\377' |
        dd of=run/model.safetensors bs=1 seek=$(($(stat -c %s run/model.safetensors) - 400)) conv=notrunc status=none
    for t in 0 1; do
        run -4 --separate-stderr generate -q run/ -T $t -n 3 prompts.jsonl
        [ "$(grep -c '"error":"logits: ' <<< "$output")" -eq 5 ]
        run ! grep -q '"text"' <<< "$output"
        run -4 --separate-stderr generate -q run/ -T $t -n 3 -p a
        [ -z "$output" ]
        [[ "$stderr" == "generate: run/: logits: not a number"*": inspect-model --stats shows which"* ]]
    done
    convert-model -q run/ -o run.gguf # inspect-model reads no GGUF
    run -4 --separate-stderr generate -q run.gguf -n 3 prompts.jsonl
    [[ "$stderr" == "generate: run.gguf: logits: not a number"*": convert-model makes a model folder of it, whose"* ]]
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
