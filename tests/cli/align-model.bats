#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# align-model: preferences from pairs and judged answers, resumes to the bit, reward models, adapters, refusals.
bats_require_minimum_version 1.5.0

setup_file() {
    root=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    export root
    cd "$BATS_FILE_TMPDIR"
    sh "$root/tests/cli/examples/train.sh"
    for i in 1 2 3 4 5 6 7 8; do
        printf '{"prompt":"The cat number %s met a dog. ","chosen":"It was good and kind %s","rejected":"It was bad to %s"}\n' $i $i $i
    done > pairs.jsonl
    for i in 1 2 3 4 5 6 7 8; do
        printf '{"prompt":"The bird number %s met a cow. ","completion":"It was %s %s","label":%s}\n' $i \
            $([[ $((i % 2)) == 0 ]] && echo good || echo bad) $i $([[ $((i % 2)) == 0 ]] && echo true || echo false)
    done > judged.jsonl
}

setup() {
    cd "$BATS_TEST_TMPDIR"
    ln -s "$BATS_FILE_TMPDIR/m0" "$BATS_FILE_TMPDIR/pairs.jsonl" "$BATS_FILE_TMPDIR/judged.jsonl" .
}

A=(align-model -q --batch-size 4 --lr 3e-3 --steps 6 --peak-tflops 0)

# tensors FILE -> the data of a safetensors file, without the header and its history
tensors() {
    tail -c +$((9 + $(od -An -t u8 -N 8 "$1"))) "$1"
}

# field FILE EVENT KEY -> the values of a key, a line each
field() {
    sed -nE "/^\{\"event\":\"$2\"/s|.*\"$3\":([^,}]*).*|\1|p" "$1"
}

rises() { # rises FILE EVENT KEY: the last value is above the first
    field "$1" "$2" "$3" | awk 'NR == 1 { a = $1 } { b = $1 } END { exit !(NR > 1 && b > a) }'
}

@test "pairs: margins rise from 0, the loss falls from log 2, and the run is a model" {
    "${A[@]}" m0 pairs.jsonl -o run --metrics m.jsonl
    [[ $(field m.jsonl step loss | head -1) == 0.6931* ]]
    rises m.jsonl step rewards/margins
    [[ $(field m.jsonl step rewards/accuracies | tail -1) == 1 ]]
    [[ -f run/reference.safetensors ]]
    generate -q run --max-new-tokens 2 --prompt "The cat" > /dev/null
}

@test "a resumed run has the bits of one that was not interrupted, with the same reference" {
    "${A[@]}" m0 pairs.jsonl -o a --save-every 2 --keep 0 --val pairs.jsonl --eval-every 3
    cp -r a b
    rm -r b/step-000004 b/step-000006 b/latest
    align-model -q --resume b
    cmp <(tensors a/latest/model.safetensors) <(tensors b/latest/model.safetensors)
    cmp a/latest/optimizer.safetensors b/latest/optimizer.safetensors
    align-model -q --resume a/step-000002 -o c
    cmp <(tensors a/latest/model.safetensors) <(tensors c/latest/model.safetensors)
    cmp a/reference.safetensors c/reference.safetensors
}

@test "threads and micro-batches do not change what is learned from pairs" {
    "${A[@]}" m0 pairs.jsonl -o one -j 1
    "${A[@]}" m0 pairs.jsonl -o two -j 2
    cmp <(tensors one/model.safetensors) <(tensors two/model.safetensors)
    "${A[@]}" m0 pairs.jsonl -o x --micro-batch-size 1 --metrics x.jsonl
    "${A[@]}" m0 pairs.jsonl -o y --micro-batch-size 4 --metrics y.jsonl
    paste <(field x.jsonl step loss) <(field y.jsonl step loss) | awk '($1 - $2) ^ 2 > 1e-8 { exit 1 }'
}

@test "judged answers: kto, also from pairs" {
    "${A[@]}" m0 judged.jsonl -o run --loss kto --metrics m.jsonl
    [[ $(field m.jsonl step loss | head -1) == 0.* ]]
    [[ $(field m.jsonl step kl | wc -l) == 6 ]]
    rises m.jsonl step rewards/chosen
    "${A[@]}" m0 pairs.jsonl -o both --loss kto
}

@test "every loss of pairs takes steps" {
    for loss in dpo robust:label_smoothing=0.1 hinge ipo exo_pair nca_pair bco_pair sppo_hard aot aot_unpaired apo_zero apo_down \
        discopop sigmoid_norm sft orpo cpo cpo_hinge cpo_ipo simpo cdpo 0.5*dpo+sft; do
        "${A[@]}" m0 pairs.jsonl -o run -f --loss "$loss" --steps 2 --lr 1e-4 --metrics m.jsonl
        field m.jsonl step loss | grep -cE '^-?[0-9.]+(e-?[0-9]+)?$' | grep -qx 2 || { echo "$loss"; cat m.jsonl; false; }
    done
}

@test "losses without reference keep none" {
    "${A[@]}" m0 pairs.jsonl -o run --loss simpo
    [[ ! -e run/reference.safetensors ]]
}

@test "a reward model: margins rise, its class is Hugging Face's, and only it is trained further as one" {
    "${A[@]}" m0 pairs.jsonl -o r --loss reward --metrics m.jsonl
    rises m.jsonl step margin
    grep -q '"LlamaForSequenceClassification"' r/config.json
    inspect-model r | grep -q 'score.weight'
    "${A[@]}" r pairs.jsonl -o r2 --loss reward --steps 1 --metrics m2.jsonl
    awk -v a="$(field m2.jsonl step margin)" 'BEGIN { exit !(a > 0.01) }'
    run -2 --separate-stderr "${A[@]}" r pairs.jsonl -o x
    [[ $stderr == "align-model: r: gives scores to texts: it is no language model: use --loss reward" ]]
    run --separate-stderr generate -q r --prompt "The"
    [[ $status != 0 && $stderr == *"its head gives a text 1 score"* ]]
}

@test "an adapter: a PEFT folder, its base unchanged, resumed to the bit" {
    "${A[@]}" m0 pairs.jsonl -o a --method lora --rank 4 --save-every 2 --keep 0 --metrics m.jsonl
    [[ $(field m.jsonl step loss | head -1) == 0.6931* ]]
    rises m.jsonl step rewards/margins
    grep -q '"LORA"' a/latest/adapter_config.json
    [[ -f a/latest/adapter_model.safetensors && ! -e a/latest/model.safetensors ]]
    cp -r a b
    rm -r b/step-000004 b/step-000006 b/latest
    align-model -q --resume b
    cmp <(tensors a/latest/adapter_model.safetensors) <(tensors b/latest/adapter_model.safetensors)
}

@test "a reward model as an adapter: its head is in the PEFT folder, resumed to the bit, and trained further" {
    "${A[@]}" m0 pairs.jsonl -o a --loss reward --method lora --rank 4 --save-every 2 --keep 0 --metrics m.jsonl
    rises m.jsonl step margin
    grep -q '"task_type": "SEQ_CLS"' a/latest/adapter_config.json
    head -c 8000 a/latest/adapter_model.safetensors | grep -aq '"base_model.model.score.weight"'
    cp -r a b
    rm -r b/step-000004 b/step-000006 b/latest
    align-model -q --resume b
    cmp <(tensors a/latest/adapter_model.safetensors) <(tensors b/latest/adapter_model.safetensors)
    "${A[@]}" m0 pairs.jsonl -o c --loss reward --method lora --init-adapter a/latest --steps 1 --metrics c.jsonl
    awk -v a="$(field m.jsonl step margin | tail -1)" -v b="$(field c.jsonl step margin)" 'BEGIN { exit !(b > 0.7 * a) }'
}

@test "--resume of something else than a run of align-model: the tool that goes on is named" {
    run -2 --separate-stderr align-model --resume m0
    [[ $stderr == *": start a run with align-model m0 DATA -o RUN" ]]
    "${A[@]}" m0 pairs.jsonl -o run --steps 1
    run -2 --separate-stderr align-model -q m0 pairs.jsonl -o run --steps 1
    [[ $stderr == *"go on from there with align-model --resume run,"* ]]
    for tool in train peft-tune; do
        run -2 --separate-stderr "$tool" --resume run
        [[ $stderr == "$tool: run: is a run of align-model: go on with align-model --resume run" ]]
    done
}

@test "a file with a chat template is found again by a resume from another folder" {
    sed 's/"prompt":"\([^"]*\)"/"prompt":[{"role":"user","content":"\1"}]/; s/"\(chosen\|rejected\)":"\([^"]*\)"/"\1":[{"role":"assistant","content":"\2"}]/g' \
        pairs.jsonl > talks.jsonl
    printf '{%% for m in messages %%}{{ m.content }}{%% endfor %%}' > own.jinja
    "${A[@]}" m0 talks.jsonl -o run --chat-template own.jinja --steps 1
    mkdir elsewhere
    (cd elsewhere && align-model -q --resume ../run --steps 2)
}

refused() { # STATUS OPERAND ...: one line, on standard error
    run --separate-stderr "${A[@]}" "${@:2}"
    [[ $status == "$1" && -z $output && ${#stderr_lines[@]} == 1 ]] || { echo "$*: $output $stderr"; false; }
}

@test "refusals: one line each, nothing written" {
    refused 2 m0 pairs.jsonl -o x --loss dpoo
    [[ $stderr == "align-model: --loss: unknown loss 'dpoo': did you mean 'dpo'?" ]]
    refused 2 m0 pairs.jsonl -o x --simpo-gamma 1
    [[ $stderr == *"dpo has no 'simpo_gamma'"* ]]
    refused 1 m0 judged.jsonl -o x
    [[ $stderr == *"judged.jsonl:1"*"give prompt, chosen and rejected" ]]
    printf '{"prompt":"a","chosen":"b","rejected":"b"}\n' > same.jsonl
    refused 1 m0 same.jsonl -o x
    [[ $stderr == *"same.jsonl"*"1"* ]]
    refused 2 m0 pairs.jsonl -o x --rank 4
    [[ $stderr == *"--rank: method 'full' has no adapter: give --method lora too" ]]
    refused 2 m0 pairs.jsonl -o x --method lora --target q_proj,v_prj
    [[ $stderr == "align-model: --target: no module of m0 matches 'v_prj': did you mean 'v_proj'? it has "* ]]
    refused 2 m0 pairs.jsonl -o x --method lora --target q_proj --set layers_to_transform=77
    [[ $stderr == "align-model: --set layers_to_transform: m0 has no layer 77: its layers are 0 to "* ]]
    refused 2 m0 pairs.jsonl -o x --max-length 64 --seq-len 20
    [[ $stderr == *"--seq-len"* || $stderr == *"tokens"* ]]
    refused 2 m0 pairs.jsonl -o x --method lora --exclude v_prj
    [[ $stderr == *"--exclude: "*"v_prj"* ]] || { echo "$stderr"; false; }
    refused 2 m0 pairs.jsonl -o x --layers 0
    [[ $stderr == *"--layers: method 'full' has no adapter: give --method lora too" ]]
    : > none.jsonl
    refused 2 m0 none.jsonl -o x
    [[ ! -e x ]]
}

@test "a reference of other answers is refused" {
    "${A[@]}" m0 pairs.jsonl -o a --save-every 2 --keep 0
    head -4 pairs.jsonl > four.jsonl
    run -2 --separate-stderr align-model -q --resume a four.jsonl --steps 8
    [[ $stderr == *"reference.safetensors: is of other answers ('train')"* ]]
}

@test "pairs beside another reference than the model before the first step: whole, and as base with an adapter" {
    "${A[@]}" m0 pairs.jsonl -o tuned --method lora
    merge-models -q --method passthrough m0+tuned --dtype f32 -o merged
    "${A[@]}" m0 pairs.jsonl -o own --save-every 3 --keep 0 --metrics own.jsonl
    "${A[@]}" m0 pairs.jsonl -o same --reference m0
    cmp own/reference.safetensors same/reference.safetensors
    "${A[@]}" m0 pairs.jsonl -o a --reference merged --save-every 3 --keep 0 --metrics a.jsonl
    "${A[@]}" m0 pairs.jsonl -o b --reference m0+tuned --metrics b.jsonl
    [[ $(field a.jsonl step loss | head -1) != 0.6931* ]]
    paste <(field a.jsonl step loss) <(field b.jsonl step loss) |
        awk '{ off = $1 - $2; if (off * off > 1e-8) exit 1 } END { exit NR != 6 }'
    # an adapter that trains on the frozen weights that the reference is
    "${A[@]}" m0 pairs.jsonl -o c --method lora --init-adapter tuned --reference m0 --metrics c.jsonl
    [[ $(field c.jsonl step loss | head -1) != 0.6931* ]]
    # a resumed run needs the reference no longer; one that is named must be the run's
    cp -r a d
    rm -r d/step-000006 d/latest
    mv merged elsewhere
    align-model -q --resume d
    cmp <(tensors a/latest/model.safetensors) <(tensors d/latest/model.safetensors)
    align-model -q --resume d --reference elsewhere --steps 7
    run -2 --separate-stderr align-model -q --resume d --reference m0 --steps 8
    [[ $stderr == *"d/reference.safetensors: is of another model: "* ]] || { echo "$stderr"; false; }
    run -1 --separate-stderr "${A[@]}" m0 pairs.jsonl -o none --reference merged
    [[ $stderr == "align-model: merged: cannot open: No such file or directory: "* && ! -e none ]] || { echo "$stderr"; false; }
    run -1 --separate-stderr "${A[@]}" m0 pairs.jsonl -o none --reference m0+merged
    [[ $stderr == "align-model: merged: cannot open: "* && ! -e none ]] || { echo "$stderr"; false; }
    run -2 --separate-stderr "${A[@]}" m0 pairs.jsonl -o none --reference - < /dev/null
    [[ $stderr == "align-model: standard input: "*"read again"* && $stderr != *"No such"* && ! -e none ]] ||
        { echo "$stderr"; false; }
}

@test "a kept reference is of the adapter's scale, too" {
    "${A[@]}" m0 pairs.jsonl -o tuned --method lora
    "${A[@]}" m0 pairs.jsonl -o a --reference m0+tuned
    cp -rL tuned/latest other
    align-model -q --resume a --reference m0+other --steps 7
    # not of names, nor of what is dropped in training
    sed -i 's/"lora_dropout": [0-9.]*/"lora_dropout": 0.5/; s|"base_model_name_or_path": [^,]*|"base_model_name_or_path": "a/b"|;
        s/"task_type": [^,]*/"task_type": null/' other/adapter_config.json
    run cmp -s tuned/latest/adapter_config.json other/adapter_config.json
    [ "$status" -eq 1 ]
    align-model -q --resume a --reference m0+other --steps 8
    sed -i 's/"lora_alpha": [0-9]*/"lora_alpha": 3/' other/adapter_config.json
    run -2 --separate-stderr align-model -q --resume a --reference m0+other --steps 9
    [[ $stderr == *"a/reference.safetensors: is of another model: "* ]] || { echo "$stderr"; false; }
}

@test "a kept reference stays that of a bottleneck adapter whose own dropout changes" {
    peft-tune -q m0 "$BATS_FILE_TMPDIR/clean.jsonl" -o tuned --method houlsby --steps 1 --batch-size 2 --seq-len 64
    "${A[@]}" m0 pairs.jsonl -o a --reference m0+tuned
    cp -rL tuned/latest other
    sed -i 's/"config": {/&\n"dropout": 0.0,/' other/adapter_config.json
    run cmp -s tuned/latest/adapter_config.json other/adapter_config.json
    [ "$status" -eq 1 ]
    align-model -q --resume a --reference m0+other --steps 7
    sed -i 's/"scaling": [0-9.]*/"scaling": 3.0/' other/adapter_config.json
    run -2 --separate-stderr align-model -q --resume a --reference m0+other --steps 8
    [[ $stderr == *"a/reference.safetensors: is of another model: "* ]] || { echo "$stderr"; false; }
}

@test "a reference of another model is refused, of a whole model and of an adapter" {
    "${A[@]}" m0 pairs.jsonl -o a --save-every 2 --keep 0
    init-model -q --seed 7 "$BATS_FILE_TMPDIR/config.json" --tokenizer "$BATS_FILE_TMPDIR/tok/tokenizer.json" -o other
    "${A[@]}" other pairs.jsonl -o b --save-every 2 --keep 0
    cp b/reference.safetensors a/reference.safetensors
    run -2 --separate-stderr align-model -q --resume a --steps 8
    [[ $stderr == *"a/reference.safetensors: is of another model: resume with the model of the run, or begin another" ]] || { echo "$stderr"; false; }
    cp -rL m0 base
    "${A[@]}" base pairs.jsonl -o c --method lora --save-every 2 --keep 0
    rm -r base
    cp -r other base
    run -2 --separate-stderr align-model -q --resume c --steps 8
    [[ $stderr == *"c/reference.safetensors: is of another model: resume with the model of the run, or begin another" ]] || { echo "$stderr"; false; }
    rm -r base
    cp -rL m0 base
    echo more > base/notes.txt # beside the weights
    align-model -q --resume c --steps 8
}

@test "reward models reward completions, whole or as a base with an adapter" {
    "${A[@]}" m0 pairs.jsonl -o r --loss reward
    "${A[@]}" m0 pairs.jsonl -o ra --loss reward --method lora --rank 4 --lr 1e-2
    B=(align-model -q m0 pairs.jsonl --loss grpo --batch-size 4 --group 4 --max-new-tokens 6 --lr 3e-3 --peak-tflops 0)
    for judge in r m0+ra/latest; do
        rm -rf run
        "${B[@]}" -o run --reward-model $judge --steps 12 --metrics "${judge%%/*}.jsonl" --save-every 6 --keep 0 \
            --val pairs.jsonl --eval-every 6
        field "${judge%%/*}.jsonl" step rewards/model/mean | awk 'NR <= 3 { a += $1 } NR >= 10 { b += $1 } END { exit !(b > a) }'
        [[ $(field "${judge%%/*}.jsonl" eval reward | wc -l) == 2 ]]
    done
    cp -r run again
    rm -r again/step-000012 again/latest
    align-model -q --resume again
    cmp <(tensors run/step-000012/model.safetensors) <(tensors again/step-000012/model.safetensors)
    rm -r again # which named the models by other paths than this folder's
    cp -r run again
    rm -r again/step-000012 again/latest
    mkdir elsewhere
    (cd elsewhere && align-model -q --resume ../again)
    cmp <(tensors run/step-000012/model.safetensors) <(tensors again/step-000012/model.safetensors)
    align-model m0 pairs.jsonl --dry-run --loss grpo --reward-model r --max-new-tokens 6 > plan
    grep -q '^reward model' plan
    run -2 --separate-stderr "${B[@]}" -o x --reward-model m0
    [[ $stderr == "align-model: m0: gives no scores to texts: it is no reward model: train one with the loss reward" ]] || { echo "$stderr"; false; }
    "${A[@]}" m0 pairs.jsonl -o lm --method lora --rank 4 --steps 1
    run -2 --separate-stderr "${B[@]}" -o x --reward-model m0+lm/latest
    [[ $stderr == *"lm/latest: gives no scores to texts"* ]] || { echo "$stderr"; false; }
    [[ ! -e x ]]
}

# refuses_alone TEXT OPTION ...: status 2, one line, which names the option and says so much, and no run
refuses_alone() {
    local text=$1
    shift
    run -2 "${A[@]}" m0 pairs.jsonl -o x "$@"
    [[ ${#lines[@]} == 1 && $output == "align-model: ${!#%%=*}: $text" && ! -e x ]] || { echo "$*: $output"; false; }
}

@test "options of sampled completions are refused beside given answers, and those of given answers beside sampled ones" {
    for option in --kl=0.1 --kl-target=1 --kl-horizon=5 --group=3 --max-new-tokens=4 --temperature=1 --top-k=2 \
        --top-p=0.5 --min-p=0.1 --stop=x --resample=1 --missing-eos-penalty=1 --reward-clip=1 --updates=1 --iterations=1 \
        --mask-truncated --reward-weights=1 --reward-timeout=3 --max-prompt-length=9 --log-completions=2 \
        --rollout-sequences=3 --rollout-memory=1G; do
        refuses_alone "serves sampled completions only, and dpo learns from given answers: leave it out, or give --reward" "$option"
        refuses_alone "serves sampled completions only, and kto learns from given answers: leave it out" --loss kto "$option"
    done
    for option in --advantage=rloo --scale-rewards=none --normalize-advantages --normalize-each --best=1 --min-reward=1 \
        --write-samples=f --whiten-rewards --discount=1 --gae-lambda=1 --correct=none --correct-most=2 --correct-least=1; do
        refuses_alone "serves sampled completions only, and dpo learns from given answers: leave it out" "$option"
    done
    for option in --max-length=64 --truncation=end; do
        refuses_alone "serves given answers only, and grpo learns from completions: use --max-new-tokens and --max-prompt-length" \
            --loss grpo --reward length:target=2 "$option"
    done
    run -2 "${A[@]}" m0 pairs.jsonl -o x --loss grpo --reward length --reference m0
    [[ $output == "align-model: --reference: grpo without --kl compares completions with no other model: leave it out, or give --kl X" ]] ||
        { echo "$output"; false; }
    refuses_alone "simpo compares given answers with no other model: leave it out" --loss simpo --reference=m0
    # the student of a teacher samples
    "${A[@]}" m0 --dry-run --loss gkd --teacher m0 --temperature 1 --max-new-tokens 4 --max-prompt-length 9 > plan
    refuses_alone "serves sampled completions only, and gkd learns from given answers: leave it out" --loss gkd --teacher m0 \
        --max-prompt-length=9
}

@test "a resumed run has its options of completions, and they are not refused" {
    "${A[@]}" m0 pairs.jsonl -o run --loss grpo --reward length:target=2 --group 2 --max-new-tokens 4 --temperature 0.9 --steps 2 \
        --save-every 1 --keep 0
    align-model -q --resume run/step-000001 -o again
    cmp <(tensors run/step-000002/model.safetensors) <(tensors again/step-000002/model.safetensors)
    "${A[@]}" m0 pairs.jsonl -o given --max-length 40 --truncation end --steps 1
    align-model -q --resume given --steps 2
}

@test "one rule of references beside adapters: off if it is new, as it begins with --init-adapter" {
    "${A[@]}" m0 pairs.jsonl -o a --method lora --rank 4 --lr 3e-2
    G=("${A[@]}" m0 pairs.jsonl --loss grpo --kl 0.1 --reward length:target=2 --group 2 --max-new-tokens 6)
    for how in "lora" "lora --init-adapter a/latest" "qlora --init-adapter a/latest" "lora --init-adapter a/latest --dtype bf16"; do
        # shellcheck disable=SC2086
        "${G[@]}" -o g -f --method $how --steps 2 --metrics g.jsonl
        [[ $(field g.jsonl step kl | head -1) == 0 && $(field g.jsonl step kl | tail -1) != 0 ]] || { echo "$how"; false; }
    done
    "${A[@]}" m0 pairs.jsonl -o d --init-adapter a/latest --steps 1 --metrics d.jsonl # whose method is the adapter's
    awk -v x="$(field d.jsonl step rewards/margins)" 'BEGIN { exit !(x ^ 2 < 1e-12) }'
    # another reference may be named: without the adapter, or with it
    "${G[@]}" -o g -f --method lora --init-adapter a/latest --reference m0 --steps 1 --metrics off.jsonl
    "${G[@]}" -o g -f --method lora --reference m0+a/latest --steps 1 --metrics on.jsonl
    "${G[@]}" -o g -f --reference m0+a/latest --steps 1 --metrics whole.jsonl
    for x in off on whole; do
        awk -v kl="$(field $x.jsonl step kl)" 'BEGIN { exit !(kl > 1e-3) }'
    done
    [[ $(field on.jsonl step kl) == $(field whole.jsonl step kl) ]]
    # the plan has the adapter alone, and a resumed run in another folder the same reference
    "${G[@]}" --method lora --init-adapter a/latest --dry-run > plan
    [[ $(sed -n 's/^reference  *//p' plan) == *" KiB" ]]
    "${G[@]}" -o w --init-adapter a/latest --steps 4 --save-every 2 --keep 0
    mkdir elsewhere
    (cd elsewhere && align-model -q --resume ../w/step-000002 -o h)
    cmp <(tensors w/latest/adapter_model.safetensors) <(tensors elsewhere/h/latest/adapter_model.safetensors)
}

@test "an adapter of some layers, without some modules" {
    "${A[@]}" m0 pairs.jsonl -o a --method lora --rank 4 --steps 1 --layers 0 --exclude v_proj,mlp.up_proj
    head -c 8000 a/latest/adapter_model.safetensors | grep -aoE 'layers\.[0-9]+\.[a-z_.]+\.lora_A' | sort > names
    grep -q 'layers.0.self_attn.q_proj' names
    [[ $(grep -cE 'layers.[1-9]|v_proj|up_proj' names) == 0 ]]
}
