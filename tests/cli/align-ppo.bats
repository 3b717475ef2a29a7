#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# align-model: PPO with its value head, rejection sampling with its samples, prompts that are replaced.
bats_require_minimum_version 1.5.0

setup() {
    cd "$BATS_TEST_TMPDIR"
    printf '%s\n' '{"text":"1+1=2"}' '{"text":"2+2=4"}' > text.jsonl
    train-tokenizer -q -V 257 -o tok.json text.jsonl
    echo '{"model_type":"llama","hidden_size":32,"intermediate_size":48,"num_hidden_layers":2,
        "num_attention_heads":2,"num_key_value_heads":1,"max_position_embeddings":64,"tie_word_embeddings":true}' > c.json
    init-model -q -t tok.json -o m c.json
    for i in 1 2 3 4 5 6 7 8; do echo "{\"prompt\":\"$i+$i=\",\"answer\":$((i + i))}"; done > p.jsonl
    how=(-q --reward 'regex:[0-9a-f]' --batch-size 8 --group 6 --max-new-tokens 4 --lr 1e-2 --no-history)
}

value() { grep -o "\"$1\":[-0-9.e+]*" | cut -d: -f2; }

@test "align-model: ppo raises the reward, and the values learn the returns" {
    align-model m p.jsonl -o run --loss ppo "${how[@]}" --steps 60 --metrics a.jsonl
    first=$(grep '"step":1,' a.jsonl | value reward)
    last=$(grep '"step":60,' a.jsonl | value reward)
    awk -v a="$first" -v b="$last" 'BEGIN { exit !(a < 0.6 && b > 0.8) }'
    awk -v v="$(grep '"step":60,' a.jsonl | value val/mean)" -v r="$(grep '"step":60,' a.jsonl | value val/returns)" \
        'BEGIN { exit !((v - r) ^ 2 < 0.09) }'
    for key in objective/kl objective/kl_coef objective/non_score_reward val/explained_variance val/clipfrac_avg \
        loss/policy_avg loss/value_avg policy/approxkl_avg clip_ratio/region_mean entropy; do
        grep '"step":1,' a.jsonl | grep -qF "\"$key\":"
    done
    generate -q run --max-new-tokens 2 --prompt 1+1= > /dev/null
    run -0 --separate-stderr inspect-model run
    [[ $output != *v_head* ]]
}

@test "align-model: ppo is resumed to the same bits, with its value head and the weight of the divergence" {
    for method in full lora; do
        align-model m p.jsonl -o whole --loss ppo -f "${how[@]}" --method $method --updates 2 --batch-size 4 --steps 12 \
            --save-every 1 --keep 0 --kl 0.1 --kl-target 0.5 --kl-horizon 100
        rm -rf part
        cp -r whole part
        rm -r part/step-000006 part/step-000007 part/step-000008 part/step-000009 part/step-00001? part/latest
        align-model -q --resume part
        cmp whole/step-000012/optimizer.safetensors part/step-000012/optimizer.safetensors
        grep -q head.v_head.summary.weight part/step-000012/optimizer.safetensors
        cmp whole/step-000012/*model.safetensors part/step-000012/*model.safetensors
        # between rollouts, only the weight is kept
        [[ $(cat part/step-000008/objective.json) == '{"kl_coef":'*'}' ]]
    done
}

@test "align-model: rejection sampling raises the reward, and its samples are records for peft-tune" {
    align-model m p.jsonl -o run --loss reject "${how[@]}" --steps 25 --best 2 --min-reward 1 --metrics a.jsonl \
        --write-samples s.jsonl
    first=$(grep '"step":1,' a.jsonl | value reward)
    last=$(grep '"step":25,' a.jsonl | value reward)
    awk -v a="$first" -v b="$last" 'BEGIN { exit !(a < 0.6 && b > 0.8) }'
    [ "$(grep -c '"reward":1,' s.jsonl)" -eq "$(wc -l < s.jsonl)" ]
    grep -q '^{"prompt":".+.=","completion":".*","reward":1,"step":25}$' s.jsonl
    peft-tune -q m s.jsonl -o tuned --steps 1
    run -2 --separate-stderr align-model m p.jsonl -o run2 --loss reject "${how[@]}" --steps 1 --write-samples s.jsonl
    [[ $stderr == *s.jsonl* && ! -e run2 ]]
}

@test "align-model: samples of a resumed run are those of a whole one; messages stay messages" {
    echo '{{ messages[0].content }}' > plain.jinja
    for i in 1 2 3 4; do
        echo "{\"prompt\":[{\"role\":\"user\",\"content\":\"$i\"}],\"completion\":[{\"role\":\"assistant\",\"content\":\"x\"}]}"
    done > chat.jsonl
    align-model m chat.jsonl -o run --loss reject "${how[@]}" --chat-template plain.jinja --batch-size 2 --steps 4 \
        --save-every 1 --keep 0 --write-samples s.jsonl
    cp s.jsonl whole.jsonl
    rm -r run/step-000003 run/step-000004 run/latest
    align-model -q --resume run
    cmp s.jsonl whole.jsonl
    [ "$(wc -l < s.jsonl)" -eq 8 ]
    grep -q '^{"prompt":\[{"role":"user","content":"[1-4]"}\],"completion":\[{"role":"assistant","content":"' s.jsonl
}

@test "align-model: prompts whose rewards are all equal are replaced, and counted" {
    how=(-q --reward 'regex:[0-3]' --batch-size 8 --group 4 --max-new-tokens 4 --lr 1e-3 --steps 1 --no-history --loss dapo)
    align-model m p.jsonl -o a "${how[@]}" --metrics a.jsonl
    align-model m p.jsonl -o b "${how[@]}" --metrics b.jsonl --resample 8
    before=$(value frac_reward_zero_std < a.jsonl)
    after=$(value frac_reward_zero_std < b.jsonl)
    awk -v a="$before" -v b="$after" 'BEGIN { exit !(b < a) }'
    [ "$(value resampled/first_reward < b.jsonl)" = "$(value reward < a.jsonl)" ]
    awk -v d="$(value resampled/groups < b.jsonl)" -v r="$(value resampled/replaced < b.jsonl)" \
        'BEGIN { exit !(r > 0 && d >= r) }'
}

refuses() { # TEXT OPTION ...
    local text=$1
    shift
    run -2 --separate-stderr align-model -q m p.jsonl -o no --reward gsm8k --max-new-tokens 4 "$@"
    [[ $stderr == *"$text"* ]] || { echo "$stderr"; false; }
    [ "${#stderr_lines[@]}" -eq 1 ]
    [ ! -e no ]
}

@test "align-model: options that a loss does not read are refused in one line" {
    refuses "--advantage: ppo does not read it: leave it out" --loss ppo --advantage rloo
    refuses "--best: dapo does not read it" --loss dapo --best 2
    refuses "--kl: reject does not read it" --loss reject --kl 0.1
    refuses "--discount: grpo does not read it" --loss grpo --discount 0.9
    refuses "8 of 4 completions of a prompt cannot be kept" --loss reject --group 4 --best 8
    refuses "--kl-target: the KL of grpo is in the loss" --loss grpo --kl-target 1
    refuses "--kl-target: the rewards of rloo have no KL" --loss rloo --kl-target 1
    refuses "ppo and reject do not go together with another loss" --loss ppo+grpo
    refuses "3 tries with groups of 1" --loss ppo --resample 3
}
