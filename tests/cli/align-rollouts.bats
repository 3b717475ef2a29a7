#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# align-model with rewards: completions that the model samples, commands that judge them, stops and resumes.

bats_require_minimum_version 1.5.0

setup() {
    cd "$BATS_TEST_TMPDIR"
    printf '%s\n' '{"text":"1+1=2"}' '{"text":"2+2=4"}' > text.jsonl
    train-tokenizer -q -V 257 -o tok.json text.jsonl
    echo '{"model_type":"llama","hidden_size":32,"intermediate_size":48,"num_hidden_layers":2,
        "num_attention_heads":2,"num_key_value_heads":1,"max_position_embeddings":64,"tie_word_embeddings":true}' > c.json
    init-model -q -t tok.json -o m c.json
    for i in 1 2 3 4 5 6 7 8; do echo "{\"prompt\":\"$i+$i=\",\"answer\":$((i + i))}"; done > p.jsonl
    how=(--loss dapo --reward 'regex:[0-9a-f]' --batch-size 8 --group 6 --max-new-tokens 4 --lr 1e-2 --no-history)
}

value() { grep -o "\"$1\":[-0-9.e+]*" | cut -d: -f2; }

@test "align-model: rewards rise, and metrics and completions are there" {
    align-model -q m p.jsonl -o run "${how[@]}" --steps 25 --val p.jsonl --eval-every 25 --metrics a.jsonl
    first=$(grep '"step":1,' a.jsonl | value reward)
    last=$(grep '"event":"eval"' a.jsonl | value reward)
    awk -v a="$first" -v b="$last" 'BEGIN { exit !(a < 0.6 && b > 0.8) }'
    for key in reward_std rewards/regex/mean frac_reward_zero_std completions/mean_length completions/clipped_ratio \
        sampling/importance_sampling_ratio/mean clip_ratio/region_mean entropy; do
        grep '"step":1,' a.jsonl | grep -qF "\"$key\":"
    done
    [ "$(grep -c '"event":"completion","step":1,' run/completions.jsonl)" -eq 6 ]
    grep -q '"prompt":".+.=","completion":' run/completions.jsonl
}

@test "align-model: the mean reward stands beside the loss, which says little of a policy" {
    run --separate-stderr align-model -v m p.jsonl -o run "${how[@]}" --steps 2 --json --metrics a.jsonl
    reward=$(grep '"step":2,' a.jsonl | value reward)
    shown=$(printf '%.4f' "$reward")
    [ "$shown" != 0.0000 ]
    [[ $stderr == *"step 2: reward $shown, loss "* ]]
    [[ $stderr == *"done: step 2, reward $shown, loss "* ]]
    [[ $output == *"\"reward\":$reward,"* ]]
    # no signal: every completion has the same reward, and the loss is 0
    run --separate-stderr align-model m p.jsonl -o none "${how[@]}" --loss grpo --reward-weights 0 --steps 1
    [[ $stderr == *"done: step 1, reward 0.0000, loss 0.0000, "* ]]
}

@test "align-model: without rewards the loss is the entropy times its weight, which rises or falls" {
    for weight in 0.5 -0.5; do # the pattern is in no completion
        align-model -q m p.jsonl -o "run$weight" "${how[@]}" --reward-weights 0 --steps 5 --entropy-coef "$weight" --metrics a.jsonl -f
        paste <(grep '"event":"step"' a.jsonl | value loss) <(grep '"event":"step"' a.jsonl | value entropy) |
            awk -v w="$weight" '{ off = $1 + w * $2; if (off * off > 1e-10) exit 1 }
                NR == 1 { first = $2 } { last = $2 } END { exit !(NR == 5 && (last - first) * w > 0) }'
    done
    refused=0
    align-model -q m p.jsonl -o none "${how[@]}" --loss rloo --entropy-coef 1 --steps 1 2> err || refused=$?
    [ "$refused" -eq 2 ]
    grep -q "rloo has no 'entropy_coef'" err
}

@test "align-model, generate: ids beyond the tokenizer's, of a padded vocabulary, have no text and stop nothing" {
    sed 's/"hidden_size"/"vocab_size":700,"hidden_size"/' c.json > wide.json
    init-model -q -o wide wide.json
    cp m/tokenizer*.json wide/
    align-model -q wide p.jsonl -o run --loss grpo --reward length:target=2 --batch-size 8 --group 4 --max-new-tokens 8 --steps 2
    generate -q wide -p '1+1=' -n 24 --json --seed 3 > a
    generate -q wide -p '1+1=' -n 24 --json --seed 3 --logprobs > ids
    [ "$(grep -o '"token_ids":\[[^]]*' ids | grep -oc '[3-6][0-9][0-9]')" -ge 1 ] # some are beyond 257
    [ "$(value tokens < a)" -eq 24 ]
    echo '{"prompt": "1+1="}' | generate -q wide -n 24 --serve-batch 2 --seed 3 | sed 's/.*"text"/"text"/; s/,"first.*//' > b
    diff <(grep -o '"text":"[^"]*"' a) <(grep -o '"text":"[^"]*"' b)
}

@test "align-model: a reward command that dies ends the run, which is resumed to the same bits" {
    judge='case $x in *"completion\":\""[a-m]*) echo 1;; *) echo 0;; esac'
    how=(--loss grpo --batch-size 8 --group 6 --max-new-tokens 4 --lr 1e-2 --steps 4 --save-every 1 --no-history -q)
    align-model m p.jsonl -o whole "${how[@]}" --reward-command "while read x; do $judge; done"
    run align-model m p.jsonl -o part "${how[@]}" \
        --reward-command "i=0; while read x; do i=\$((i+1)); [ \$i -gt 100 ] && exit 7; $judge; done"
    [ "$status" -eq 1 ]
    [ "${#lines[@]}" -eq 1 ]
    [[ $output == *"reward command: '"*"ended with status 7 after 4 of 48 answers: it must write a line"* ]]
    [ -d part/step-000002 ]
    align-model -q --resume part --reward-command "while read x; do $judge; done"
    cmp whole/step-000004/model.safetensors part/step-000004/model.safetensors
}

@test "align-model: generations of several steps are killed and resumed to the same bits" {
    how+=(--updates 2 --iterations 2 --batch-size 4 --steps 12 --kl 0.01 -q --save-every 1)
    align-model m p.jsonl -o whole "${how[@]}"
    align-model m p.jsonl -o part "${how[@]}" &
    for _ in $(seq 3000); do [ -d part/step-000003 ] && break; sleep 0.02; done
    kill -9 $!
    wait $! || true
    align-model -q --resume part
    cmp whole/step-000012/model.safetensors part/step-000012/model.safetensors
}

@test "align-model: pairs of completions, several rewards with weights" {
    align-model m p.jsonl -o run -q --loss dpo --reward "regex:[a-m]" --reward length:target=1 --reward-weights 1,0.5 \
        --batch-size 8 --group 4 --max-new-tokens 4 --steps 3 --lr 1e-3 --metrics a.jsonl
    grep '"step":3,' a.jsonl | grep -qF '"rewards/length/mean":'
    grep '"step":3,' a.jsonl | grep -qF '"rewards/accuracies":'
}

# judged TEXT COMMAND: the run ends with status 1 and one line, and nothing of it is left
judged() {
    run timeout 60 align-model -q m p.jsonl -o no "${how[@]:0:2}" --batch-size 8 --group 4 --max-new-tokens 4 --steps 1 \
        --no-history --reward-timeout 5 --reward-command "$2"
    echo "$2: $output"
    [ "$status" -eq 1 ]
    [ "${#lines[@]}" -eq 1 ]
    [[ $output == "align-model: reward command: "*"$1"* ]]
    [ ! -e no ]
}

@test "align-model: what a reward command answers is checked" {
    judged "'nan'" 'while read x; do echo nan; done'
    judged "'-inf'" 'while read x; do echo -inf; done'
    judged "'1 2'" 'while read x; do echo 1 2; done'
    judged "''" 'while read x; do echo; done'
    judged '{"reward":true}' 'while read x; do echo "{\"reward\":true}"; done'
    judged '1e999' 'while read x; do echo "{\"reward\":1e999}"; done'
    judged "'?[31m?'" 'while read x; do printf "\033[31m\007\n"; done'
    judged "was asked for: it must write one line" 'while read x; do echo 1; echo 1; done'
    judged "was asked for: it must write one line" 'yes 1'
    judged "answer 1 of" 'read x; yes | tr -d "\n"'
    judged "closed its output after 0 of 32" 'exec >&-; sleep 100'
    judged "ended by signal 9 after 1 of 32" 'read x; echo 1; kill -9 $$'
    judged "no answer for 5 s, after 3 of 32: let it write out each line at once, or allow more time with --reward-timeout" 'for i in 1 2 3; do read x; echo 1; done; sleep 100'
    align-model -q m p.jsonl -o no "${how[@]:0:2}" --batch-size 8 --group 4 --max-new-tokens 4 --steps 1 --no-history \
        --reward-command 'while read x; do echo null; done'
    [ -e no/latest ]
}

# judge N ACTION: a command that answers N times, and then does something else
judge() {
    echo "i=0; while read x; do i=\$((i+1)); [ \$i -gt $1 ] && { $2; }; case \$x in *'completion\":\"'[a-m]*) echo 1;; *) echo 0;; esac; done"
}

@test "align-model: commands that fail in a later step, and in the first one of a resumed run, leave a run to resume" {
    how=(m p.jsonl --loss reject --best 2 --batch-size 4 --group 4 --max-new-tokens 4 --lr 1e-2 --steps 5 --save-every 2
        --no-history -q --reward-timeout 1)
    align-model "${how[@]}" -o whole --write-samples whole.jsonl --reward-command "$(judge 1000 :)"
    for act in 'exit 7' 'exit 0' 'sleep 100' 'echo 1; echo 1' 'echo nan'; do # 16 answers a step: in the fourth
        run align-model "${how[@]}" -o part --write-samples part.jsonl --reward-command "$(judge 50 "$act")"
        echo "$act: $output"
        [ "$status" -eq 1 ]
        [ "${#lines[@]}" -eq 1 ]
        [ -d part/step-000002 ]
        run align-model --resume part -q --reward-command "$(judge 5 "$act")"
        echo "$act, resumed: $output"
        [ "$status" -eq 1 ]
        [ "${#lines[@]}" -eq 1 ]
        align-model --resume part -q --reward-command "$(judge 1000 :)"
        cmp whole/step-000005/model.safetensors part/step-000005/model.safetensors
        cmp whole.jsonl part.jsonl # no sample occurs twice
        diff <(grep '"event":"completion"' whole/completions.jsonl) <(grep '"event":"completion"' part/completions.jsonl)
        [ "$(grep -c '"event":"completion"' part/completions.jsonl)" -eq 20 ] # of one prompt of each step
        rm -r part part.jsonl
    done
}

refuses() { # STATUS TEXT OPTION ...
    local want=$1 text=$2
    shift 2
    run align-model m p.jsonl -o no "$@"
    [ "$status" -eq "$want" ]
    [[ $output == *"$text"* ]] || { echo "$output"; false; }
    [ "${#lines[@]}" -eq 1 ]
    [ ! -e no ]
}

@test "align-model: what rewards and rollouts cannot do is refused in one line" {
    refuses 2 "--reward: grpo learns from rewards, and no reward is given" --loss grpo
    refuses 2 "--reward: there is no 'gsm8': did you mean 'gsm8k'? there are gsm8k exact " --loss grpo --reward gsm8
    refuses 2 "--group: 1 completion a prompt has nothing to be compared with" --loss grpo --reward gsm8k --group 1
    refuses 2 "--reward-weights: '1,2' are not the weights of 1 rewards" --loss grpo --reward gsm8k --reward-weights 1,2
    refuses 2 "--reward: kto is not for sampled completions" --loss kto --reward gsm8k
    refuses 2 "cost of length is a number from 0" --loss grpo --reward length:cost=x
    refuses 2 "64" --loss grpo --reward gsm8k --max-new-tokens 100
    refuses 2 "--correct: dpo does not read it" --loss dpo --reward gsm8k --correct none
    align-model -q m <(sed 's/"answer":.*/"chosen":"a","rejected":"b"}/' p.jsonl) -o judge --loss reward --steps 1 --batch-size 2 --no-history
    refuses 2 "judge: gives scores to texts: it is no reference: use a language model" --loss grpo --reward gsm8k \
        --max-new-tokens 4 --kl 0.1 --reference judge
    sed 's/"a": 65/"?": 65/; s/"b": 66/"a": 66/; s/"?": 65/"b": 65/' tok.json > other.json
    init-model -q -t other.json -o other c.json
    refuses 2 "other: its tokens are not those of the model: use a reference with the same tokenizer" --loss grpo \
        --reward gsm8k --max-new-tokens 4 --kl 0.1 --reference other
    refuses 2 "--kl: rewards that are normalised one by one" --loss rloo --reward gsm8k --normalize-each --kl 0.1
}

@test "align-model: the memory of rollouts is in the plan" {
    align-model m p.jsonl --dry-run --loss grpo --beta 0.04 --reward gsm8k --max-new-tokens 8 > plan
    grep -q rollouts plan
    grep -q ^reference plan
    align-model --list-rewards | grep -q overlong
}

@test "align-model: beside an adapter the reference is the model with it off, without a copy, to the bit" {
    how+=(-q --method lora --rank 4 --kl 0.1 --steps 4 --metrics)
    cp -r m copy
    choose() { # choose BASE -> more
        more=()
        case $1 in
        nf4) more=(--base-format nf4) ;;
        bf16) more=(--dtype bf16) ;;
        norms) more=(--modules-to-save norm) ;; # tensors of the model that train too
        esac
    }
    for base in full nf4 bf16 norms; do
        choose $base
        align-model m p.jsonl -o shared-$base "${how[@]}" s-$base.jsonl "${more[@]}"
        value kl < s-$base.jsonl | head -1 | awk '{ exit !($1 ^ 2 < 1e-12) }'
    done
    for base in full bf16 norms; do
        choose $base
        align-model m p.jsonl -o apart-$base "${how[@]}" a-$base.jsonl --reference copy "${more[@]}"
        cmp shared-$base/step-000004/adapter_model.safetensors apart-$base/step-000004/adapter_model.safetensors
        diff <(value kl < s-$base.jsonl) <(value kl < a-$base.jsonl)
    done
    value kl < s-full.jsonl | tail -1 | awk '{ exit !($1 > 0) }'
    how=(--loss grpo --beta 0.1 --reward gsm8k --max-new-tokens 8 --method lora)
    align-model m p.jsonl --dry-run "${how[@]}" > plan
    run ! grep -q '^reference' plan
    align-model m p.jsonl --dry-run "${how[@]}" --reference copy > plan
    grep -q ^reference plan
    align-model m p.jsonl --dry-run "${how[@]}" --set init_lora_weights=pissa > plan # the frozen weights change
    grep -q ^reference plan
}

@test "align-model: dr_grpo divides by --max-new-tokens, where no length is given" {
    for loss in dr_grpo dr_grpo:max_completion_length=4 dr_grpo:max_completion_length=8; do
        align-model m p.jsonl -o run "${how[@]}" --loss $loss --steps 1 -f -q --metrics a.jsonl
        grep '"step":1,' a.jsonl | value grad_norm >> norms
    done
    awk '{ g[NR] = $1 } END { exit !(NR == 3 && g[1] > 0 && g[1] == g[2] && (g[1] / g[3] - 2) ^ 2 < 1e-6) }' norms
}

@test "align-model: a run whose rewards teach nothing says so once, one that learns does not" {
    how=(m p.jsonl --batch-size 8 --group 4 --max-new-tokens 4 --steps 2 --no-history -f)
    said="align-model: rewards: in no step was one of a prompt's completions better than another: nothing was learnt from them: look at completions.jsonl in run"
    says() { # COUNT OPTION ...
        local want=$1
        shift
        run align-model "${how[@]}" -o run "$@"
        echo "$*: $output"
        [ "$status" -eq 0 ]
        [ "$(grep -cxF "$said" <<< "$output")" -eq "$want" ]
    }
    for loss in grpo rloo dpo reject; do
        says 1 --loss $loss --reward-command 'while read x; do echo null; done'
    done
    for loss in grpo dpo; do
        says 1 --loss $loss --reward-command 'while read x; do echo 0.7; done'
        says 0 --loss $loss --reward 'regex:[a-m]'
    done
    says 0 --loss reject --reward-command 'while read x; do echo 0.7; done' # whose completions are kept
}

@test "align-model: completions beyond the positions of the model are refused, and the options are named" {
    refuses() {
        run align-model "$@"
        echo "$output"
        [ "$status" -eq 2 ]
        [ "${#lines[@]}" -eq 1 ]
    }
    refuses m p.jsonl -o no --loss grpo --reward gsm8k
    [[ $output == "align-model: --max-new-tokens: prompts of up to "*" tokens and 256 more pass the 64 positions of the model: give a smaller one, or leave long prompts out: --max-prompt-length" ]]
    sed 's/"prompt":"\([^"]*\)","answer":\("*[0-9]*\)/"prompt":"\1","completion":"\2/; s/}$/"}/' p.jsonl > given.jsonl
    refuses m given.jsonl -o no --loss gkd --teacher m
    [[ $output == "align-model: --max-new-tokens: "*" and 128 more pass the 64 positions of the model: give a smaller one, or cut the data: --max-length" ]]
    [ ! -e no ]
    align-model m --dry-run --loss grpo --reward gsm8k --max-new-tokens 32 > plan # of prompts that fit
    grep -q '^rollouts' plan
}

@test "align-model: lists of losses and rewards, also as JSON" {
    align-model --list-losses --json > losses
    [ "$(wc -l < losses)" -eq 1 ]
    [[ $(< losses) == '[{"name":"dpo","about":'*'"learns_from":"pairs"'*'"keys":{"beta":{"value":0.1,'*'{"name":"gspo","loss":"grpo:mean=sequences,'*']' ]]
    align-model --list-rewards --json > rewards
    [[ $(< rewards) == '[{"name":"gsm8k",'*'{"name":"repetition",'*'"ngram":{"value":3,'*']' ]]
    align-model --list-losses | grep -q '^dpo  '
    run align-model m p.jsonl -o no --loss xyzzyxyzzy
    [ "$output" = "align-model: --loss: unknown loss 'xyzzyxyzzy': --list-losses shows all" ]
}
