#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# train: optimisers by name, groups of tensors with optimisers of their own, resumes to the bit for each.
bats_require_minimum_version 1.5.0

setup_file() {
    root=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    export root
    cd "$BATS_FILE_TMPDIR"
    sh "$root/tests/cli/examples/train.sh"
}

setup() {
    cd "$BATS_TEST_TMPDIR"
    ln -s "$BATS_FILE_TMPDIR/data" "$BATS_FILE_TMPDIR/m0" .
}

T=(train -q --peak-tflops 0 --seq-len 32 --batch-size 2 --lr 3e-3 --warmup 2 --steps 8)

# of optimisers that serve hidden matrices alone
rest='embed*|wte|wpe|lm_head|*norm*|ln_*|*.ln_*|*bias=adamw'

tensors() {
    tail -c +$((9 + $(od -An -t u8 -N 8 "$1"))) "$1"
}

same_bits() { # same_bits RUN RUN
    cmp <(tensors "$1/latest/model.safetensors") <(tensors "$2/latest/model.safetensors")
    [ -e "$1/latest/optimizer.safetensors" ] || [ ! -e "$2/latest/optimizer.safetensors" ]
    [ ! -e "$1/latest/optimizer.safetensors" ] || cmp "$1/latest/optimizer.safetensors" "$2/latest/optimizer.safetensors"
}

states() { inspect-model "$1/latest/optimizer.safetensors" --json | grep -o '"name": *"[^"]*"' | sed 's/.*"name": *"//; s/"$//'; }

@test "train: every optimiser of the list resumes to the bit" {
    train --list-optimizers | grep -oE '^[a-z0-9-]+' > names
    grep -qx adamw names
    grep -qx sgd names
    # with states that tensors of this size do not have by themselves
    printf '%s\n' adamw8bit:min-8bit-size=1 galore:rank=4,update-proj-gap=2 ldadam:rank=4 \
        q-galore:rank=4,update-proj-gap=2,queue-size=1,min-8bit-size=100 >> names
    while read -r o; do
        rm -rf whole again
        train m0 --dry-run --optimizer "$o" > /dev/null 2>&1 || o="$o;$rest"
        "${T[@]}" m0 data -o whole --keep 0 --save-every 3 --optimizer "$o" || { echo "$o"; false; }
        for n in 3 6; do
            rm -rf again
            train -q --resume whole/step-00000$n -o again
            same_bits whole again || { echo "$o: from $n"; false; }
        done
    done < names
}

@test "train: the list of optimisers, as a table and as JSON" {
    run train --list-optimizers
    [ "$status" -eq 0 ]
    [[ $output == *$'\n'"  weight_decay "* ]]
    grep -qE '^  nesterov +look ahead .* off on \[on\]$' <<< "$output" # of Muon
    run train m0 data -o no --optimizer muon:ns_steps=2.5
    [ "$status" -eq 2 ]
    [[ $output == *"ns_steps of muon is a whole number from 1 to 20, not '2.5'"* ]]
    train --list-optimizers --json | python3 -c '
import json, sys
o = json.load(sys.stdin)
assert o["adamw"]["hyper"]["beta1"] == {"value": 0.9, "least": 0, "most": 0.9999999, "help": "first moment"}, o
assert o["sgd"]["hyper"]["nesterov"]["words"] == "off on"' || false
}

@test "train: groups have optimisers, states and rates of their own" {
    g='adamw;*norm*=sgd:lr=0.03;embed_tokens|lm_head=sgd:momentum=0'
    "${T[@]}" m0 data -o run --keep 0 --save-every 3 --optimizer "$g"
    states run > names
    grep -q '^exp_avg.model.layers.0.mlp.up_proj.weight$' names
    grep -q '^momentum_buffer.model.norm.weight$' names
    [ "$(grep -c 'exp_avg.*norm' names)" -eq 0 ]
    [ "$(grep -c 'embed_tokens' names)" -eq 0 ]
    grep -qF "\"optimizer\": \"$g\"" run/latest/state.json
    train -q --resume run/step-000003 -o again
    same_bits run again
    # values may change on the way, and do something
    train -q --resume run/step-000003 -o other --optimizer 'adamw;*norm*=sgd:lr=0.3;embed_tokens|lm_head=sgd:momentum=0'
    run -1 cmp <(tensors run/model.safetensors) <(tensors other/model.safetensors)
}

@test "train: a key is the option" {
    "${T[@]}" m0 data -o a --optimizer adamw:beta1=0.8,weight-decay=0
    "${T[@]}" m0 data -o b --beta1 0.8 --weight-decay 0
    "${T[@]}" m0 data -o c --beta1 0.7 --weight-decay 0 --optimizer adamw:beta1=0.8
    cmp <(tensors a/model.safetensors) <(tensors b/model.safetensors)
    cmp <(tensors a/model.safetensors) <(tensors c/model.safetensors)
    "${T[@]}" m0 data -o d --optimizer sgd:nesterov=on,momentum=0.5
    "${T[@]}" m0 data -o e --optimizer sgd --nesterov --momentum 0.5
    cmp <(tensors d/model.safetensors) <(tensors e/model.safetensors)
}

@test "train: an average is what is evaluated and saved; training does not notice it" {
    for d in f32 bf16; do
        rm -rf plain mean again
        "${T[@]}" m0 data -o plain --dtype $d --metrics plain.jsonl
        "${T[@]}" m0 data -o mean --dtype $d --optimizer adamw:ema=0.5 --save-every 3 --keep 0 --eval-every 2 --metrics mean.jsonl
        loss() { sed -nE '/"event":"step"/s/.*"loss":([^,]*),.*/\1/p' "$1"; }
        diff <(loss plain.jsonl) <(loss mean.jsonl)
        run -1 cmp <(tensors plain/model.safetensors) <(tensors mean/model.safetensors)
        train -q --resume mean/step-000003 -o again
        same_bits mean again
        states mean | grep -q '^param.model.norm.weight$'
        # what the run says of its last weights is what eval-model says of the file
        eval-model mean data/val --seq-len 32 --dtype $d --json | grep -q '"loss"'
        rm -f plain.jsonl mean.jsonl
    done
}

@test "train: what --optimizer does not know is refused in one line" {
    while IFS='>' read -r o what; do
        run "${T[@]}" m0 data -o run --optimizer "$o"
        [ "$status" -eq 2 ]
        [[ $output == "train: "*"$what"* ]] || { echo "$o: $output"; false; }
        [ "${#lines[@]}" -eq 1 ]
        [ ! -e run ]
    done <<- 'END'
		lion-tamer>there is no optimiser 'lion-tamer': choose one of: adamw
		adamw:beta9=1>adamw has no 'beta9': its keys are: lr ema beta1
		adamw:beta1>'beta1' of adamw has no value: write key=value
		adamw:beta1=2>beta1 of adamw is a number from 0 to 1, not '2'
		adamw:beta1=x>beta1 of adamw is a number
		sgd:nesterov=maybe>nesterov of sgd is one of: off on; not 'maybe'
		sgd:nesterov=on,momentum=0>needs momentum and no dampening
		adamw;*norm*>'*norm*' names no tensors or no optimiser
		adamw;*nrom*=sgd>no tensor that trains is left for '*nrom*'
		adamw:lr=-1>lr of adamw is a number from 0 to 1000
	END
}

@test "train: a run goes on with its optimisers" {
    "${T[@]}" m0 data -o run --optimizer 'adamw;*norm*=sgd'
    for o in adamw sgd 'adamw;*norm*=adamw' 'adamw;norm=sgd'; do
        run train --resume run --optimizer "$o" --steps 9
        [ "$status" -eq 2 ]
        [[ $output == *"the run was trained with adamw;*norm*=sgd, not $o: resume with the same optimiser" ]]
    done
}

@test "train: options of earlier runs are taken up" {
    "${T[@]}" m0 data -o run --optimizer sgd --save-every 4 --keep 0
    # as they were saved when every option had a default of its own
    sed -i 's/"beta1":null/"beta1":0.9/; s/"momentum":null/"momentum":0.9/; s/"weight-decay":null/"weight-decay":0.1/' run/step-000004/state.json
    grep -q '"beta1":0.9' run/step-000004/state.json
    train -q --resume run/step-000004 -o again
    same_bits run again
}
