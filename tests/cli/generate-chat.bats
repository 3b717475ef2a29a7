#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# generate: messages made into prompts by chat templates, and talks.

bats_require_minimum_version 1.5.0

setup() {
    root=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    cd "$BATS_TEST_TMPDIR"
    sh "$root/tests/cli/examples/generate.sh"
    hi='{"messages": [{"role": "user", "content": "The system"}]}'
}

# The values of the string field $1 in lines of JSON.
field() {
    sed 's/.*"'"$1"'":"\([^"]*\)".*/\1/'
}

@test "chat: messages are the prompt that the template makes of them" {
    printf '%s\n' "$hi" | generate -q run/ -n 8 -T 0 --dtype f32 --chat-template chatml > a
    printf '{"prompt": "<|im_start|>user\\nThe system<|im_end|>\\n<|im_start|>assistant\\n"}\n' |
        generate -q run/ -n 8 -T 0 --dtype f32 --no-add-special > b
    [ "$(field text < a)" = "$(field text < b)" ]
    grep -q '^{"messages":\[{"role":"user","content":"The system"}\],"text":\|^{"messages": \[{"role": "user"' a
    run ! grep -q '"prompt":' a
}

@test "chat: the model's own template, its tokens, variables and tools" {
    cat > run/chat_template.jinja <<'END'
{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{{ more | default('-') }}
END
    printf '{"bos_token": "The", "eos_token": {"content": "<|endoftext|>"}}' > run/tokenizer_config.json
    same() { # RECORD PROMPT [OPTION ...]
        printf '%s\n' "$1" | generate -q run/ -n 6 -T 0 --dtype f32 "${@:3}" > a
        printf '{"prompt": "%s"}\n' "$2" | generate -q run/ -n 6 -T 0 --dtype f32 --no-add-special > b
        [ "$(field text < a)" = "$(field text < b)" ]
        [ "$(grep -o '"prompt_tokens":[0-9]*' a)" = "$(grep -o '"prompt_tokens":[0-9]*' b)" ]
    }
    same "$hi" 'Theuser: The system\n-'
    same "$hi" 'Theuser: The system\nA' --template-vars '{"more": "A"}'
    same "${hi%\}}, \"chat_template_kwargs\": {\"more\": \"B\"}}" 'Theuser: The system\nB' --template-vars '{"more": "A"}'
    same "${hi%\}}, \"tools\": [{\"a\": 1}]}" 'Theuser: The system\n{\"a\": 1}-'
    same '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "The sys"}], "continue_final_message": true}' \
        'Theuser: x\nassistant: The sys'
}

@test "chat: named templates of a folder; those of a stream on request" {
    mkdir run/additional_chat_templates
    printf 'plain' > run/chat_template.jinja
    printf 'more with tools' > run/additional_chat_templates/tool_use.jinja
    { echo "$hi" && echo "${hi%\}}, \"tools\": [{}]}"; } > in
    generate -q run/ -n 1 in > a
    generate -q run/ -n 1 --chat-template tool_use in > b
    [ "$(sed -n 1p a | grep -o '"prompt_tokens":[0-9]*')" != "$(sed -n 2p a | grep -o '"prompt_tokens":[0-9]*')" ]
    [ "$(sed -n 1p b | grep -o '"prompt_tokens":[0-9]*')" = "$(sed -n 2p a | grep -o '"prompt_tokens":[0-9]*')" ]
    tar -cf m.tar -C run config.json tokenizer_config.json tokenizer.json model.safetensors chat_template.jinja
    run -1 bash -c 'cat m.tar | generate -q - -n 1 in prompts.jsonl'
    [[ $output == *'read only on request'* ]]
    # shellcheck disable=SC2002 # a pipe is what is tested
    cat m.tar | generate -q - -n 1 prompts.jsonl > c
    # shellcheck disable=SC2002
    cat m.tar | generate -q - -n 1 --chat-template chatml in > c
}

@test "chat: what cannot be rendered is an error record, and the others are answered" {
    printf "{%% for m in messages %%}{%% if m.role != 'user' %%}{{ raise_exception('roles must alternate') }}{%% endif %%}{{ m.content }}{%% endfor %%}" > t.jinja
    {
        echo '{"messages": [{"role": "tool", "content": "x"}], "id": 1}'
        echo '{"messages": []}'
        echo '{"messages": [{"content": "x"}]}'
        echo '{"messages": {"role": "user"}}'
        echo "$hi"
    } > in
    run -1 --separate-stderr generate -q run/ -n 4 --chat-template t.jinja in
    [ "${#lines[@]}" -eq 5 ]
    [[ ${lines[0]} == *'"id": 1,"error":"the template refuses: roles must alternate"}' || ${lines[0]} == *'"id":1,"error":"the template refuses: roles must alternate"}' ]]
    [[ ${lines[1]} == *'one message at least'* ]]
    [[ ${lines[2]} == *'\"role\"'* ]]
    [[ ${lines[4]} == *'"finish_reason":"length"'* ]]
    [[ $stderr == *"in:1: t.jinja: line 1, column "*"roles must alternate"* ]]
    run -1 --separate-stderr generate -q run/ -n 4 <<< "$hi"
    [[ $output == *'the model has no chat template'* ]]
}

@test "chat: a template that does not end is one error" {
    echo '{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}' > t.jinja
    run -1 --separate-stderr generate -q run/ -n 4 --chat-template t.jinja <<< "$hi"
    [[ $stderr == *'the template does not end'* ]]
    [ "${#stderr_lines[@]}" -eq 1 ]
    echo '{% for a in x %}' > t.jinja
    run --separate-stderr generate -q run/ -n 4 --chat-template t.jinja <<< "$hi"
    [ "$status" -ne 0 ]
    [[ $stderr == *"t.jinja: line 1, column "* ]]
}

@test "chat: a talk answers each line, with what was said before" {
    printf 'The system\nreads\n' | generate -q run/ --chat --chat-template chatml -n 6 -T 0 --dtype f32 > talk
    printf '%s\n' "$hi" | generate -q run/ --chat-template chatml -n 6 -T 0 --dtype f32 > one
    said=$(field text < one)
    printf '{"messages": [{"role": "user", "content": "The system"}, {"role": "assistant", "content": "%s"}, {"role": "user", "content": "reads"}]}\n' "$said" |
        generate -q run/ --chat-template chatml -n 6 -T 0 --dtype f32 > two
    printf '%b\n%b\n' "$said" "$(field text < two)" > want
    cmp talk want
}

@test "chat: /reset forgets, /system changes the system's message, \\ continues a line" {
    printf 'The system\n/reset\nThe system\n' | generate -q run/ --chat --chat-template chatml -n 6 -T 0 > a
    printf 'The system\n' | generate -q run/ --chat --chat-template chatml -n 6 -T 0 > b
    cat b b | cmp a -
    printf 'x\n/system Be brief.\nThe system\n' | generate -q run/ --chat --chat-template chatml -n 6 -T 0 | tail -n +2 > a
    printf 'The system\n' | generate -q run/ --chat --chat-template chatml -n 6 -T 0 --system 'Be brief.' > c
    tail -c "$(wc -c < c)" a | cmp c -
    printf 'The\\\nsystem\n' | generate -q run/ --chat --chat-template chatml -n 6 -T 0 > d
    printf '{"messages": [{"role": "user", "content": "The\\nsystem"}]}\n' | generate -q run/ --chat-template chatml -n 6 -T 0 | field text > e
    printf '%b\n' "$(cat e)" | cmp d -
    printf '/what\n' | generate run/ --chat --chat-template chatml 2> err
    grep -q '/reset, /system TEXT and /adapter NAME' err
}

@test "chat: a text ends at the token that closes an answer" {
    sed -i 's/"eos_token_id": 0/"eos_token_id": null/' run/config.json
    sed -i 's/"eos_token": *"[^"]*"/"eos_token": null/' run/tokenizer_config.json
    printf '{%% for m in messages %%}{{ m.content }}<|endoftext|>{%% endfor %%}' > t.jinja
    printf '%s\n' "$hi" | generate -q run/ --chat-template t.jinja -n 900 --seed 4 -T 3 > a
    grep -q '"finish_reason":"stop"' a
    printf '%s\n' "$hi" | generate -q run/ --chat-template t.jinja -n 900 --seed 4 -T 3 --ignore-eos > a
    grep -q '"finish_reason":"length"' a
}

@test "chat: a full context is refused until /reset" {
    run -1 --separate-stderr generate run/ --chat --chat-template chatml --context 40 -n 4 -q <<< $'a long line of words that does not fit the context at all\nx'
    [[ $stderr == *'the context holds 40: write /reset'* ]]
}

@test "chat: a full device is an error; a reader that leaves and a signal end the talk at once, without words" {
    how=(-q run/ --chat --chat-template chatml -n 6 -T 0 --dtype f32)
    # shellcheck disable=SC2016
    run -1 bash -c 'generate "$@" > /dev/full <<< "The system"' _ "${how[@]}"
    [[ $output == "generate: standard output: cannot write: No space left on device" ]]
    mkfifo lines
    generate "${how[@]}" < lines > out 2> err 3>&- &
    p=$!
    exec 4> lines
    echo 'The system' >&4
    for _ in $(seq 600); do
        [ -s out ] && break
        sleep 0.02
    done
    kill -TERM $p # it waits for the next line
    code=0
    wait $p || code=$?
    exec 4>&-
    [ "$code" -eq 143 ]
    [ ! -s err ]
    { for _ in $(seq 50); do printf '/reset\nThe system\n' && sleep 0.05; done; } 2> err |
        { code=0 && generate "${how[@]}" -n 4 || code=$?; echo $code > status; } 2> err2 | head -c 1 > out
    [ "$(cat status)" -eq 141 ]
    [ ! -s err2 ]
}

@test "chat: options that do not fit together" {
    for o in '-p x' '--json' '--n 2' '--serve-batch 2' 'prompts.jsonl'; do
        # shellcheck disable=SC2086
        run -2 generate run/ --chat --chat-template chatml $o
        [[ $output == *'--chat'* ]]
    done
    run -2 generate run/ --system x
    run -2 generate run/ -p x --chat-template chatml
    run -2 generate run/ --chat --chat-template nosuch < /dev/null
    [[ $output == *'alpaca, chatml'* ]]
    run -2 generate run/ --chat --chat-template chatml --template-vars '[1]' < /dev/null
    [[ $output == *'--template-vars'* ]]
    run -2 generate run/ --chat < /dev/null
    [[ $output == *'has no chat template'* ]]
}
