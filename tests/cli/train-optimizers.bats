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

# of optimisers for hidden matrices
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
    # with keys that give tensors of this size all states
    printf '%s\n' adamw8bit:min-8bit-size=1 galore:rank=4,update-proj-gap=2 ldadam:rank=4 \
        q-galore:rank=4,update-proj-gap=2,queue-size=1,min-8bit-size=100 >> names
    while read -r o; do
        rm -rf whole again
        train m0 --dry-run --optimizer "$o" > /dev/null 2>&1 || o="$o;$rest"
        "${T[@]}" m0 data -o whole --keep 0 --save-every 3 --optimizer "$o" || { echo "$o"; false; }
        [ ! -e whole/latest/optimizer.safetensors ] || states whole | sed 's/[.].*//' >> states
        for n in 3 6; do
            rm -rf again
            train -q --resume whole/step-00000$n -o again
            same_bits whole again || { echo "$o: from $n"; false; }
        done
    done < names
    # lm-run(5) documents all states
    for s in $(sort -u states); do
        grep -qE "^\.It Va (.*, )?$s( |$)" "$root/man/man5/lm-run.5" || { echo "$s"; false; }
    done
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
assert o["sgd"]["hyper"]["nesterov"] == {"value": "off", "words": ["off", "on"], "help": o["sgd"]["hyper"]["nesterov"]["help"]}, o
assert o["muon"]["hyper"]["nesterov"]["value"] == "on"
assert o["adamw"]["lr"] == 3e-4 and o["muon"]["lr"] == 0.02' || false
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
    # values may change on resuming, and have an effect
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

@test "train: the average is evaluated and saved; it does not affect training" {
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
        # the run's last validation loss is eval-model's loss of the file
        eval-model mean data/val --seq-len 32 --dtype $d --json | grep -q '"loss"'
        rm -f plain.jsonl mean.jsonl
    done
}

@test "train: unknown names in --optimizer are refused in one line" {
    while IFS='>' read -r o what; do
        run "${T[@]}" m0 data -o run --optimizer "$o"
        [ "$status" -eq 2 ]
        [[ $output == "train: "*"$what"* ]] || { echo "$o: $output"; false; }
        [ "${#lines[@]}" -eq 1 ]
        [ ! -e run ]
    done <<- 'END'
		lion-tamer>there is no optimiser 'lion-tamer': choose one of: adamw
		kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkk>there is no optimiser 'kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkk': choose one of: adamw
		adamw:kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkk=1>adamw has no 'kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkk': its keys are: lr ema beta1
		adamw:beta9=1>adamw has no 'beta9': its keys are: lr ema beta1
		adamw:beta1>'beta1' of adamw has no value: write key=value
		adamw:beta1=2>beta1 of adamw is a number from 0 to 0.9999999, not '2'
		adamw:beta1=x>beta1 of adamw is a number
		sgd:nesterov=maybe>nesterov of sgd is one of: off on; not 'maybe'
		sgd:nesterov=on,momentum=0>--optimizer: nesterov of sgd needs momentum and no dampening
		adamw;norm=q-galore:proj_bits=5>--optimizer: proj_bits of q-galore is 4 or 8
		adamw;*norm*>'*norm*' names no tensors or no optimiser
		adamw;*nrom*=sgd>no trainable tensor is left for '*nrom*'
		adamw:beta1=0.8,beta1=0.9>beta1 of adamw is given twice: keep one of them
		adamw;norm=sgd:lr=1,ema=0.9,lr=1>lr of sgd is given twice
		adamw:lr=-1>lr of adamw is a number from 0 to 1000
		adafactor:relative_step=on,lr=1>lr of adafactor follows from its keys: leave it out
	END
}

@test "train: a resumed run keeps its optimisers" {
    "${T[@]}" m0 data -o run --optimizer 'adamw;*norm*=sgd'
    for o in adamw sgd 'adamw;*norm*=adamw' 'adamw;norm=sgd'; do
        run train --resume run --optimizer "$o" --steps 9
        [ "$status" -eq 2 ]
        [[ $output == *"the run was trained with adamw;*norm*=sgd, not $o: resume with the same optimiser" ]]
    done
    # a colon in a pattern does not begin keys
    "${T[@]}" m0 data -o run -f --optimizer 'adamw;*[[:alpha:]]norm=sgd'
    for o in 'adamw;*[[:alpha:]]norm=adamw' 'adamw;*[[:digit:]]*=sgd'; do
        run -2 train --resume run --optimizer "$o" --steps 9
        [[ $output == *", not $o: resume with the same optimiser" ]]
    done
    # names have no case
    train -q --resume run --optimizer 'AdamW:eps=1e-7;*[[:alpha:]]NORM=SGD:momentum=0.5;' --steps 9
}

@test "train: options of runs of older versions are read" {
    "${T[@]}" m0 data -o run --optimizer sgd --save-every 4 --keep 0
    # as saved by versions in which every option had its own default
    sed -i 's/"beta1":null/"beta1":0.9/; s/"momentum":null/"momentum":0.9/; s/"weight-decay":null/"weight-decay":0.1/' run/step-000004/state.json
    grep -q '"beta1":0.9' run/step-000004/state.json
    train -q --resume run/step-000004 -o again
    same_bits run again
}

@test "train: two groups may have states of the same name with different types" {
    g='galore:rank=4;*mlp*=q-galore:rank=4'
    "${T[@]}" m0 data -o run --keep 0 --save-every 3 --optimizer "$g"
    inspect-model run/latest/optimizer.safetensors --json > shown
    grep -q 'ortho_matrix.model.layers.0.mlp.up_proj.weight' shown
    grep -q 'ortho_matrix.model.layers.0.self_attn.q_proj.weight' shown
    train -q --resume run/step-000003 -o again
    same_bits run again
}

# put FILE TENSOR DTYPE: replaces the tensor by numbers or codes of another dtype
put() {
    python3 - "$@" << 'END'
import json, struct, sys
path, name, dtype = sys.argv[1:]
size = {"U8": 1, "I8": 1, "F32": 4, "I32": 4}
with open(path, "rb") as f:
    n = struct.unpack("<Q", f.read(8))[0]
    head, data = json.loads(f.read(n)), f.read()
out, blob = {}, b""
for k, t in sorted(((k, t) for k, t in head.items() if k != "__metadata__"), key=lambda x: x[1]["data_offsets"]):
    a, b = t["data_offsets"]
    part = data[a:b] if k != name else bytes((b - a) // size[t["dtype"]] * size[dtype])
    out[k] = {"dtype": dtype if k == name else t["dtype"], "shape": t["shape"], "data_offsets": [len(blob), len(blob) + len(part)]}
    blob += part
text = json.dumps(out).encode()
text += b" " * (-len(text) % 8)
open(path, "wb").write(struct.pack("<Q", len(text)) + text + blob)
END
}

@test "train: states of another dtype are refused" {
    "${T[@]}" m0 data -o run --optimizer adamw8bit:min-8bit-size=1
    for what in state1:I8 state1:F32 absmax1:I32 exp_avg:I32; do
        rm -rf b
        cp -r run b
        t=model.layers.0.mlp.up_proj.weight
        [ "${what%:*}" != exp_avg ] || t=model.embed_tokens.weight
        put b/latest/optimizer.safetensors "${what%:*}.$t" "${what#*:}"
        run train -q --resume b --steps 9
        [ "$status" -eq 1 ] || { echo "$what: $output"; false; }
        [[ $output == *"tensor \"${what%:*}.$t\" has dtype ${what#*:}, which is not that of its state" ]]
    done
}

@test "train: a value that changes the states is refused on resuming" {
    "${T[@]}" m0 data -o run --optimizer galore:rank=4
    run train -q --resume run --steps 9 --optimizer galore:rank=5
    [ "$status" -eq 1 ]
    [[ $output == *"is missing or of another shape: resume with the values of its run" ]]
}

@test "train: a run resumed without its average continues from the weights" {
    for o in adamw sgd:momentum=0; do
        rm -rf plain mean again
        "${T[@]}" m0 data -o plain --optimizer $o
        "${T[@]}" m0 data -o mean --optimizer "${o/:/:ema=0.5,}$([[ $o == *:* ]] || echo :ema=0.5)" --save-every 3 --keep 0
        run -1 cmp <(tensors plain/model.safetensors) <(tensors mean/model.safetensors)
        train -q --resume mean/step-000003 -o again --optimizer $o
        cmp <(tensors plain/model.safetensors) <(tensors again/model.safetensors)
    done
}

@test "train: records have the rate of the first optimiser" {
    "${T[@]}" m0 data -o run --lr-schedule constant --warmup 0 --metrics m.jsonl --optimizer 'muon:lr=0.25;*norm*=adamw:lr=0.5'
    [ "$(grep -c '"event":"step".*"lr":0.25,' m.jsonl)" -eq 8 ]
}

@test "train: an averaging optimiser with a decaying rate: a warning" {
    S=(train --no-progress "${T[@]:2}" m0 data --optimizer 'adamw;*norm*=schedule-free')
    run "${S[@]}" -o run
    [ "$status" -eq 0 ]
    [[ $output == *"schedule-free averages its steps in place of a rate that falls: give --lr-schedule constant"* ]]
    run "${S[@]}" -o other --lr-schedule constant
    [[ $output != *"averages its steps"* ]]
}

@test "train: a decay that removes what is learnt: a warning" {
    warns() {
        rm -rf run
        train --no-progress "${T[@]:2}" m0 data -o run "$@" > out 2>&1 || { cat out; false; }
        grep -oE 'the weight decay of [a-z]+ shrinks matrices by [0-9.]+ % a step' out | sed 's/.*of \(.*\) shrinks.*by/\1/' || true
    }
    [ "$(warns --lr 0.1 --optimizer sgd)" = 'sgd 10 % a step' ]
    [ "$(warns --lr 0.1 --optimizer sgd --momentum 0)" = 'sgd 1 % a step' ]
    [ "$(warns --optimizer 'adamw;*norm*=momentum:lr=0.1,weight_decay=0.5')" = 'momentum 50 % a step' ]
    for o in momentum nesterov sgd:weight_decay=0 sgd:lr=0.001 adamw; do
        [ -z "$(warns --lr 0.1 --optimizer $o)" ]
    done
}

# some/: data whose first 600 documents, of one token each, have no targets
late_targets() {
    { yes '{"text": "a"}' | head -n 600; head -n 40 "$BATS_FILE_TMPDIR/clean.jsonl"; } > some.jsonl
    shard-data -q --no-eos --no-shuffle --tokenizer "$BATS_FILE_TMPDIR/tok/tokenizer.json" -o some some.jsonl
}

@test "train: bases are made at the first step that has tokens" {
    late_targets
    for o in soap:Q_0 galore:rank=4:ortho_matrix ldadam:rank=4:ortho_matrix q-galore:rank=4:past_ortho_vector; do
        rm -rf run m.jsonl
        train -q --seed 3 --peak-tflops 0 --seq-len 32 --batch-size 1 --steps 4 m0 some -o run --metrics m.jsonl --optimizer "${o%:*}"
        grep -q '"event":"step","step":1,"tokens":0,' m.jsonl
        python3 - run/latest/optimizer.safetensors "${o##*:}" << 'END'
import json, struct, sys
with open(sys.argv[1], "rb") as f:
    n = struct.unpack("<Q", f.read(8))[0]
    head, data = json.loads(f.read(n)), f.read()
found = [data[slice(*t["data_offsets"])] for k, t in head.items() if k.startswith(sys.argv[2] + ".")]
assert found and all(any(x) for x in found), sys.argv[2]
END
        train -q --resume run -o again --steps 5
        rm -rf again
    done
}

@test "train: bias corrections do not count steps without tokens" {
    late_targets
    S=(train -q --seed 3 --peak-tflops 0 --seq-len 32 --batch-size 1 m0 some --lr-schedule constant --lr 1e-3)
    "${S[@]}" -o run --keep 0 --save-every 1 --steps 6 --metrics m.jsonl
    first=$(sed -nE '/"event":"step"/s/.*"step":([0-9]+),"tokens":([0-9]+),.*/\1 \2/p' m.jsonl | awk '$2 { print $1; exit }')
    [ "$first" -gt 1 ]
    grep -q '"updates": *1,' "run/step-00000$first/state.json"
    # the first step of AdamW is the rate, or nothing
    python3 - m0/model.safetensors "run/step-00000$first/model.safetensors" << 'END'
import array, json, struct, sys
def norm(path):
    with open(path, "rb") as f:
        n = struct.unpack("<Q", f.read(8))[0]
        head, data = json.loads(f.read(n)), f.read()
    return array.array("f", data[slice(*head["model.norm.weight"]["data_offsets"])])
moved = max(abs(a - b) for a, b in zip(norm(sys.argv[1]), norm(sys.argv[2])))
assert 0.99e-3 < moved < 1.01e-3, moved
END
    # a resumed run counts on
    train -q --resume "run/step-00000$first" -o again
    same_bits run again
}

@test "train: without --lr the rate is that of the first optimiser" {
    S=(train -q --peak-tflops 0 --seq-len 32 --batch-size 2 m0 data --steps 2 --lr-schedule constant --metrics m.jsonl -f -o run)
    for o in adamw:0.0003 muon:0.02 'sgd;*norm*=adamw:0.1' lion:1e-4; do
        "${S[@]}" --optimizer "${o%:*}"
        [ "$(sed -nE '/"event":"step"/s/.*"lr":([^,]*),.*/\1/p' m.jsonl | sort -u | awk '{ print $1 + 0 }')" = "$(awk "BEGIN { print ${o##*:} + 0 }")" ]
    done
    grep -q '"lr": *null' run/latest/state.json
    "${S[@]}" --optimizer muon --lr 0.5
    grep -q '"event":"step".*"lr":0.5,' m.jsonl
    train -q --resume run --steps 3 --metrics m.jsonl
    grep -q '"event":"step","step":3,.*"lr":0.5,' m.jsonl
}

@test "train: without --lr each group has the rate of its own optimiser, after a resume, too" {
    S=(train -q --peak-tflops 0 --seq-len 32 --batch-size 2 m0 data --steps 4 --warmup 2 --save-every 2 --keep 0)
    "${S[@]}" -o own --optimizer 'sgd;*norm*=adamw;embed_tokens=lion:lr=1e-3'
    "${S[@]}" -o named --lr 0.1 --optimizer 'sgd;*norm*=adamw:lr=3e-4;embed_tokens=lion:lr=1e-3'
    cmp <(tensors own/model.safetensors) <(tensors named/model.safetensors)
    train -q --resume own/step-000002 -o again
    same_bits own again
    # --lr serves all groups without a rate
    "${S[@]}" -o one --lr 0.1 --optimizer 'sgd;*norm*=adamw;embed_tokens=lion:lr=1e-3'
    run -1 cmp <(tensors own/model.safetensors) <(tensors one/model.safetensors)
    # checkpoints in which the default of --lr is a number
    sed -i 's/"lr": *null/"lr":0.1/' own/step-000002/state.json
    rm -rf again
    train -q --resume own/step-000002 -o again
    run -1 cmp <(tensors own/model.safetensors) <(tensors again/model.safetensors)
    # another rate is explained beside the default that it replaces
    train --no-progress --resume named/step-000004 -o later --steps 8 --lr 0.2 2> given
    sed -i 's/"lr": *0.1/"lr":null/' named/step-000004/state.json
    rm -rf later
    train --no-progress --resume named/step-000004 -o later --steps 8 --lr 0.2 2> default
    grep -o 'the learning rate was [0-9.e-]*' given > a
    grep -o 'the learning rate was [0-9.e-]*' default > b
    cmp a b
}

@test "train: words name the parts of any model, and patterns have no case" {
    init-model -q -t "$BATS_FILE_TMPDIR/tok" -o gpt2 -s n_embd=64 -s n_layer=1 -s n_head=2 -s n_positions=128 gpt2-124m
    for m in m0 gpt2; do
        rm -rf run
        "${T[@]}" $m data -o run --optimizer 'sgd:momentum=0;embed|head|Norm|bias=adamw'
        states run | grep '^exp_avg[.]' | sort > $m.states
    done
    [ "$(grep -c norm m0.states)" -eq "$(wc -l < <(grep -v embed m0.states))" ]
    grep -q 'exp_avg.model.embed_tokens.weight' m0.states
    for n in wte.weight wpe.weight h.0.ln_1.weight h.0.ln_1.bias ln_f.weight h.0.attn.c_attn.bias h.0.mlp.c_fc.bias; do
        grep -qE "^exp_avg[.](transformer[.])?$n$" gpt2.states || { echo $n; cat gpt2.states; false; }
    done
    run -1 grep -E 'c_(attn|fc|proj).weight' gpt2.states
    rm -rf run
    "${T[@]}" m0 data -o run --optimizer 'sgd:momentum=0;*INPUT_layernorm*=adamw'
    states run | grep -q '^exp_avg.*input_layernorm'
    # tied: there is no head of its own
    run "${T[@]}" gpt2 data -o no --optimizer 'adamw;head=sgd'
    [ "$status" -eq 2 ]
    [[ $output == *"no trainable tensor is left for 'head'"* ]]
}

@test "train: adamw8bit keeps F32 for tables of tokens and positions, whatever their size" {
    init-model -q -t "$BATS_FILE_TMPDIR/tok" -o gpt2 -s n_embd=64 -s n_layer=1 -s n_head=2 -s n_positions=128 gpt2-124m
    "${T[@]}" gpt2 data -o run --optimizer adamw8bit
    states run > names
    for n in wte wpe; do
        grep -qE "^exp_avg[.].*$n.weight$" names
        [ "$(grep -cE "^state1[.].*$n.weight$" names)" -eq 0 ]
    done
    grep -qE '^state1[.].*c_fc.weight$' names
}

@test "train: the rate of AdamW beside matrix optimisers" {
    for o in "muon 0.015" "normuon 0.015" "soap-muon 0.015" "soap 1" "muon:scaling=moonlight 1"; do
        rm -rf a b
        read -r name rate <<< "$o"
        [[ $name == *:* ]] && key=,adam_rate || key=:adam_rate
        "${T[@]}" m0 data -o a --optimizer "$name"
        "${T[@]}" m0 data -o b --optimizer "$name$key=$rate"
        same_bits a b || { echo "$o"; false; }
        rm -rf b
        "${T[@]}" m0 data -o b --optimizer "$name$key=0.5"
        run -1 cmp <(tensors a/latest/model.safetensors) <(tensors b/latest/model.safetensors)
    done
}

@test "train: adafactor's own rates do not depend on --lr" {
    for lr in 3e-4 0.1; do
        "${T[@]}" --lr $lr m0 data -o "run-$lr" --optimizer adafactor:relative_step=on
    done
    cmp <(tensors run-3e-4/model.safetensors) <(tensors run-0.1/model.safetensors)
    run -1 cmp <(tensors m0/model.safetensors) <(tensors run-0.1/model.safetensors)
}

@test "train: weights among the states stay exact where compress-ckpt rounds states" {
    for o in adamw:ema=0.9 schedule-free; do
        rm -rf run packed
        "${T[@]}" m0 data -o run --optimizer $o
        for f in int8 bf16; do
            compress-ckpt -q -f run/latest --optimizer-states $f -o s.lmz
            rm -rf packed
            compress-ckpt -q -d s.lmz -o packed
            python3 - run/latest/optimizer.safetensors packed/optimizer.safetensors << 'END'
import json, struct, sys
def read(path):
    with open(path, "rb") as f:
        n = struct.unpack("<Q", f.read(8))[0]
        head, data = json.loads(f.read(n)), f.read()
    return {k: data[slice(*t["data_offsets"])] for k, t in head.items() if k != "__metadata__"}
a, b = map(read, sys.argv[1:])
for k in a:
    if k.split(".")[0] in ("param", "ema", "z", "lr_max", "weight_sum"):
        assert a[k] == b[k], k
k = "exp_avg_sq.model.embed_tokens.weight"
assert a[k] != b[k] and len(a[k]) == len(b[k])
END
        done
    done
}
