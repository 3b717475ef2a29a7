#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# align-model whose rewards fail: each failure is one line, and leaves a run that can be resumed, or none.

bats_require_minimum_version 1.5.0

setup() {
    cd "$BATS_TEST_TMPDIR"
    printf '%s\n' '{"text":"1+1=2"}' '{"text":"2+2=4"}' > text.jsonl
    train-tokenizer -q -V 257 -o tok.json text.jsonl
    echo '{"model_type":"llama","hidden_size":32,"intermediate_size":48,"num_hidden_layers":2,
        "num_attention_heads":2,"num_key_value_heads":1,"max_position_embeddings":64,"tie_word_embeddings":true}' > c.json
    init-model -q -t tok.json -o m c.json
    for i in 1 2 3 4 5 6 7 8; do echo "{\"prompt\":\"$i+$i=\",\"answer\":$((i + i))}"; done > p.jsonl
    good='case $x in *"completion\":\""[a-m]*) echo 1;; *) echo 0;; esac'
    how=(--loss grpo --batch-size 8 --group 6 --max-new-tokens 4 --lr 1e-2 --steps 4 --no-history --reward-timeout 3 -q
        --log-completions 8)
}

# judge COUNT COMMAND: a reward command that is good for so many completions, and then does this
judge() {
    echo "i=0; while read x; do i=\$((i+1)); if [ \$i -gt $1 ]; then $2; else $good; fi; done"
}

# fails TEXT COUNT COMMAND: its run ends with status 1 and one line
fails() {
    run timeout 60 align-model m p.jsonl -o run "${how[@]}" --reward-command "$(judge "$2" "$3")"
    echo "$3: $output"
    [ "$status" -eq 1 ]
    [ "${#lines[@]}" -eq 1 ]
    [[ $output == "align-model: reward command: "*"$1"* ]]
}

each_failure() { # COUNT FUNCTION
    bad=(nan "'nan'" inf "'inf'" '"\"0\""' "'\"0\"'" '"{}"' "'{}'" 'x{' "'x{'")
    for ((k = 0; k < ${#bad[@]}; k += 2)); do
        fails "${bad[k + 1]}" "$1" "echo ${bad[k]}"
        "$2"
    done
    fails 'ended with status 7 after' "$1" 'exit 7'
    "$2"
    fails 'ended with status 0 after' "$1" 'exit 0' # too few answers
    "$2"
    fails 'was ended by signal 9 after' "$1" 'kill -9 $$'
    "$2"
    fails 'with --reward-timeout' "$1" 'sleep 60'
    [[ $output == *"gave no answer for 3 s, after"* ]]
    "$2"
    fails 'more answers than it was asked for' "$1" 'echo 1; echo 1'
    "$2"
    fails 'closed its output after' "$1" 'exec >&-; sleep 60'
    "$2"
    fails "magnitude" "$1" 'echo 1e308'
    "$2"
    fails "magnitude" "$1" 'echo "{\"reward\":-1e300}"'
    "$2"
}

left_nothing() { [ ! -e run ]; }

@test "align-model: rewards that fail before the first step leave no folder" {
    each_failure 3 left_nothing
}

# The steps before it are kept, though no checkpoint was due.
resumes() {
    [ -d run/step-000002 ]
    [ "$(grep -c '"event":"completion"' run/completions.jsonl)" -eq 96 ]
    align-model -q --resume run --reward-command "while read x; do $good; done"
    cmp whole/step-000004/model.safetensors run/step-000004/model.safetensors
    cmp whole/completions.jsonl run/completions.jsonl
    rm -r run
}

@test "align-model: rewards that fail later leave the steps before, which are resumed to the same bits" {
    align-model m p.jsonl -o whole "${how[@]}" --reward-command "while read x; do $good; done"
    each_failure 100 resumes
}

@test "align-model: rewards that fail in an evaluation leave the step before it" {
    how+=(--val p.jsonl --eval-every 2 --lr-schedule constant)
    for more in "" "--optimizer schedule-free"; do # whose evaluations exchange the weights
        align-model m p.jsonl -o whole "${how[@]}" $more --reward-command "while read x; do $good; done"
        run align-model m p.jsonl -o run "${how[@]}" $more --reward-command "$(judge 100 'exit 7')"
        [ "$status" -eq 1 ]
        [[ $output == *"ended with status 7 after 4 of 8"* ]]
        align-model -q --resume run --reward-command "while read x; do $good; done"
        cmp whole/step-000004/model.safetensors run/step-000004/model.safetensors
        rm -r run whole
    done
}

@test "align-model: a run that is killed before its first checkpoint begins again with the same command" {
    align-model m p.jsonl -o whole "${how[@]}" --reward-command "while read x; do $good; done"
    how+=(-o run --reward-command "while read x; do $good; done; touch ended")
    align-model m p.jsonl "${how[@]}" --reward-command "$(judge 100 'touch there; sleep 30')" --reward-timeout 100 3>&- &
    for _ in $(seq 3000); do [ -e there ] && break; sleep 0.02; done
    kill -9 $!
    wait $! || true
    [ -s run/completions.jsonl ]
    run align-model --resume run
    [ "$status" -eq 2 ]
    [[ $output == *"run: holds no checkpoint to resume from: its run ended before the first one: begin it again"* ]]
    align-model m p.jsonl "${how[@]}"
    cmp whole/step-000004/model.safetensors run/step-000004/model.safetensors
    [ "$(grep -c '"event":"completion"' run/completions.jsonl)" -eq 192 ]
}

@test "align-model: a killed run repeats no record when it is resumed" {
    how+=(--loss reject --best 2 --save-every 2 --steps 6 --log-completions 8)
    align-model m p.jsonl -o whole "${how[@]}" --write-samples whole.jsonl --reward-command "while read x; do $good; done"
    align-model m p.jsonl -o run "${how[@]}" --write-samples run.jsonl --reward-timeout 100 \
        --reward-command "$(judge 150 'touch there; sleep 30')" 3>&- &
    for _ in $(seq 3000); do [ -e there ] && break; sleep 0.02; done
    kill -9 $!
    wait $! || true
    [ -d run/step-000002 ]
    [ ! -d run/step-000004 ]
    grep -q '"step":3,' run/completions.jsonl # behind the checkpoint
    printf '{"event":"completion","st' >> run/completions.jsonl
    align-model -q --resume run --reward-command "while read x; do $good; done"
    cmp whole/completions.jsonl run/completions.jsonl
    cmp whole.jsonl run.jsonl
}

@test "align-model: --force keeps the old completions until the new run has a checkpoint" {
    align-model m p.jsonl -o run "${how[@]}" --loss reject --write-samples s.jsonl --reward-command "while read x; do $good; done"
    cp run/completions.jsonl old.jsonl
    cp s.jsonl old-s.jsonl
    run align-model m p.jsonl -o run "${how[@]}" --loss reject --write-samples s.jsonl --force \
        --reward-command "$(judge 3 'exit 7')"
    [ "$status" -eq 1 ]
    cmp run/completions.jsonl old.jsonl
    cmp s.jsonl old-s.jsonl
    align-model m p.jsonl -o run "${how[@]}" --loss reject --write-samples s.jsonl --force --steps 1 \
        --reward-command "while read x; do $good; done"
    [ "$(grep -c '"event":"completion"' run/completions.jsonl)" -eq 48 ]
    run ! grep -q '"step":2' s.jsonl
}
