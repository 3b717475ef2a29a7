#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# train: checkpoints and resumes to the bit, signals, records, refusals, and the files that remain after failures.
bats_require_minimum_version 1.5.0
load memory

setup_file() {
    root=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    export root
    cd "$BATS_FILE_TMPDIR"
    sh "$root/tests/cli/examples/train.sh"
}

setup() {
    load ../inject/inject
    cd "$BATS_TEST_TMPDIR"
    ln -s "$BATS_FILE_TMPDIR/data" "$BATS_FILE_TMPDIR/m0" .
}

# A training of 8 steps, in about a tenth of a second.
T=(train -q --peak-tflops 0 --seq-len 32 --batch-size 2 --lr 3e-3 --warmup 2 --steps 8)

# tensors FILE -> the data of a safetensors file, without the header and its history
tensors() {
    tail -c +$((9 + $(od -An -t u8 -N 8 "$1"))) "$1"
}

# numbers RUN -> state.json without time, options and history
numbers() {
    grep -E '^  "(optimizer|step|tokens|sample|best_loss|bad_evals|evaluated)"' "$1/latest/state.json"
}

same_bits() { # same_bits RUN RUN
    cmp <(tensors "$1/latest/model.safetensors") <(tensors "$2/latest/model.safetensors")
    cmp "$1/latest/optimizer.safetensors" "$2/latest/optimizer.safetensors"
    diff <(numbers "$1") <(numbers "$2")
}

# field FILE EVENT KEY -> the values of a key, a line each
field() {
    sed -nE "/^\{\"event\":\"$2\"/s/.*\"$3\":([^,}]*).*/\1/p" "$1"
}

wait_for() { # wait_for COMMAND ...: until it succeeds, two minutes at most
    for ((i = 0; i < 6000; i++)); do
        "$@" && return
        sleep 0.02
    done
    echo "waited in vain for $*"
    return 1
}

no_temporaries() {
    [ -z "$(find . -name '.*.tmp.*')" ]
}

@test "train: the run folder is a model, its checkpoints are whole" {
    "${T[@]}" m0 data -o run --save-every 3
    [ "$(ls run)" = "$(printf '%s\n' config.json latest model.safetensors step-00000{3,6,8} tokenizer.json tokenizer_config.json)" ]
    [ "$(readlink run/latest)" = step-000008 ]
    [ "$(ls run/latest/)" = "$(printf '%s\n' config.json model.safetensors optimizer.safetensors state.json tokenizer.json tokenizer_config.json)" ]
    cmp run/tokenizer.json m0/tokenizer.json
    inspect-model -q run > /dev/null
    grep -q '"torch_dtype": "float32"' run/config.json
    no_temporaries
}

@test "train: the model's other files are copied to checkpoints" {
    cp -rL m0 m1
    echo '{"temperature": 0.7}' > m1/generation_config.json
    "${T[@]}" m1 data -o run
    train -q --resume run --steps 12 --keep 1 --save-every 1
    for f in generation_config.json tokenizer.json; do
        [ "$(tr -d ' \n' < run/$f)" = "$(tr -d ' \n' < m1/$f)" ]
    done
}

@test "train: the loss falls" {
    "${T[@]}" m0 data -o run --steps 60 --batch-size 4 --metrics m.jsonl
    field m.jsonl step loss | awk 'NR == 1 { a = $1 } { b = $1 } END { exit !(a > 5.5 && b < 3.5) }'
}

@test "train: resume gives the same bits, from any checkpoint, for every optimiser and precision" {
    for o in "--optimizer adamw" "--optimizer sgd --nesterov" "--dtype bf16 --dropout 0.1" \
        "--gradient-accumulation-steps 2 --eval-every 2"; do
        rm -rf whole cut again
        # shellcheck disable=SC2086
        "${T[@]}" m0 data -o whole --keep 0 --save-every 1 $o
        for n in 1 4 7; do
            rm -rf again
            train -q --resume whole/step-00000$n -o again
            same_bits whole again || { echo "$o: from $n"; false; }
        done
    done
}

@test "train: a resume uses every tensor of the checkpoint, each once, or names the first that it would leave" {
    for o in adamw "adamw:ema=0.9" muon; do
        rm -rf run
        "${T[@]}" m0 data -o run --optimizer "$o"
        cp -r run whole
        name=$(head -c 4000 run/latest/optimizer.safetensors | grep -ao 'exp_avg[.][^"]*\|momentum_buffer[.][^"]*' | head -n 1)
        "$BATS_TEST_DIRNAME/edit-tensors" run/latest/optimizer.safetensors "$name" again "$name.more"
        run -1 train -q --resume run --steps 8
        [[ $output == "train: "*"optimizer.safetensors: tensor \"$name.more\" does not belong to a state of this run: "* ]]
        rm -rf run
        mv whole run
        "$BATS_TEST_DIRNAME/edit-tensors" run/latest/model.safetensors model.norm.weight again model.norm.more
        run -2 train -q --resume run --steps 8
        [[ $output == "train: "*"model.safetensors: tensor \"model.norm.more\" does not belong to a "*" model"* ]]
    done
}

@test "train: plain SGD has no states and can be resumed" {
    "${T[@]}" m0 data -o whole --optimizer sgd --momentum 0 --save-every 5
    [ ! -e whole/latest/optimizer.safetensors ]
    train -q --resume whole/step-000005 -o again
    cmp <(tensors whole/model.safetensors) <(tensors again/model.safetensors)
}

@test "train: kill -9 at any moment, then --resume: the same bits" {
    "${T[@]}" m0 data -o whole --steps 40
    for n in 1 6 15; do
        rm -rf run
        "${T[@]}" m0 data -o run --steps 40 --save-every 1 --keep 2 &
        pid=$!
        reached() { [ "$(find run -maxdepth 1 -name 'step-*' 2> /dev/null | sed 's/.*-0*//' | sort -n | tail -1)0" -ge $((10 * n)) ]; }
        wait_for reached
        kill -9 $pid || true # it may have ended already
        wait $pid || true
        inspect-model -q run > /dev/null
        train -q --resume run
        same_bits whole run || { echo "killed after $n"; false; }
        no_temporaries
    done
}

@test "train: after a kill between checkpoint and link, a run is resumed from that checkpoint" {
    "${T[@]}" m0 data -o run --save-every 4
    ln -sfn step-000004 run/latest
    train -q --resume run --steps 9 --metrics m.jsonl
    [ "$(field m.jsonl step step)" = 9 ]
    ln -sfn step-000004 run/latest
    train -q --resume run # nothing to do but that
    [ "$(readlink run/latest)" = step-000009 ]
}

@test "train: SIGINT and SIGTERM finish the step, write a checkpoint and end by the signal" {
    "${T[@]}" m0 data -o whole --lr-schedule constant --steps 1
    for s in INT TERM; do
        rm -rf run m.jsonl
        env --default-signal=INT "${T[@]}" m0 data -o run --steps 1M --lr-schedule constant --metrics m.jsonl &
        pid=$!
        wait_for grep -qs '"event":"step","step":5,' m.jsonl
        kill -$s $pid
        status=0
        wait $pid || status=$?
        [ "$s$status" = INT130 ] || [ "$s$status" = TERM143 ]
        last=$(field m.jsonl step step | tail -1)
        [ "$(readlink run/latest)" = "$(printf 'step-%06d' "$last")" ]
        [ "$(field m.jsonl end status)" = '"stopped"' ]
        # resumed, it equals the run that was never stopped
        train -q --resume run --steps $((last + 2))
        "${T[@]}" m0 data -o "whole$s" --steps $((last + 2)) --lr-schedule constant
        same_bits "whole$s" run
    done
}

@test "train: SIGUSR1 writes a checkpoint and goes on" {
    "${T[@]}" m0 data -o run --steps 1M --metrics m.jsonl &
    pid=$!
    wait_for grep -qs '"event":"step","step":3,' m.jsonl
    kill -USR1 $pid
    wait_for grep -q '"event":"checkpoint"' m.jsonl
    at=$(field m.jsonl checkpoint step)
    [ -s "run/$(printf 'step-%06d' "$at")/state.json" ]
    later() { [ "$(field m.jsonl step step | tail -1)" -gt "$at" ]; }
    wait_for later
    kill -TERM $pid
    wait $pid || true
}

@test "train: --recompute: the same bits in less memory" {
    "${T[@]}" m0 data -o kept --dtype bf16
    "${T[@]}" m0 data -o again --dtype bf16 --recompute full
    same_bits kept again
    # a run may go on either way
    "${T[@]}" m0 data -o half --dtype bf16 --recompute full --save-every 4
    train -q --resume half/step-000004 --recompute none -f -o rest
    same_bits kept rest
    bytes() { train llama-5m --dry-run --json "$@" | sed -nE 's/.*"activations and scratch": ([0-9]*).*/\1/p'; }
    [ "$(bytes --recompute full)" -lt $(($(bytes) / 2)) ]
}

@test "train: the same bits for any -j" {
    for j in 1 2 3; do "${T[@]}" m0 data -o run$j -j $j --dtype bf16; done
    same_bits run1 run2
    same_bits run1 run3
    for j in 1 3; do "${T[@]}" m0 data -o again$j -j $j --clip-value 1e-3; done
    same_bits again1 again3
}

@test "train: micro-batches give the loss of the whole batch, for any numbers of predicted tokens" {
    train -q --peak-tflops 0 m0 data -o a --seq-len 24 --steps 6 --batch-size 8 --metrics a.jsonl
    train -q --peak-tflops 0 m0 data -o b --seq-len 24 --steps 6 --batch-size 2 --gradient-accumulation-steps 4 \
        --metrics b.jsonl
    [ "$(field a.jsonl step tokens)" = "$(field b.jsonl step tokens)" ]
    # the windows must differ in the number of predicted tokens, or this test is void
    [ "$(field a.jsonl step tokens | tail -1)" -ne $((6 * 8 * 24)) ]
    paste <(field a.jsonl step loss) <(field b.jsonl step loss) <(field a.jsonl step grad_norm) <(field b.jsonl step grad_norm) |
        awk '{ d = ($1 - $2) / $1; n = ($3 - $4) / $3; if (d * d > 4e-12 || n * n > 1e-10) bad = 1; print } END { exit bad }'
}

@test "train: metrics: every record, with numbers that continue after a resume" {
    "${T[@]}" m0 data -o run --eval-every 4 --save-every 4 --metrics m.jsonl --tensorboard events.out.tfevents.x
    [ "$(sed -E 's/^\{"event":"([a-z]*)".*/\1/' m.jsonl | sort | uniq -c | tr -s ' \n' ' ')" = \
        " 2 checkpoint 1 end 2 eval 1 run 8 step " ]
    head -1 m.jsonl | grep -q '"event":"run","tool":"train",.*"device":"cpu","kernels":.*"dtype":"f32","parameters":97472'
    tail -1 m.jsonl | grep -q '"event":"end","status":"done","step":8,.*"peak_memory_bytes":[0-9]'
    for k in tokens seconds loss lr grad_norm grad_p50 grad_p90 grad_p99 grad_max update_ratio tokens_per_second memory_bytes; do
        [ "$(field m.jsonl step $k | grep -c '[0-9]')" -eq 8 ] || { echo "$k"; false; }
    done
    [ "$(field m.jsonl eval bits_per_byte | grep -c '[0-9]')" -eq 2 ]
    field m.jsonl checkpoint path | grep -qx '"run/step-000008"'
    (cd / && train -q --resume "$OLDPWD/run" --steps 12) # paths do not depend on the folder
    [ "$(field m.jsonl step step | tr '\n' ' ')" = "1 2 3 4 5 6 7 8 9 10 11 12 " ]
    [ "$(grep -c '"event":"run"' m.jsonl)" -eq 2 ]
    field m.jsonl step tokens | sort -n -c -u
    field m.jsonl step seconds | sort -g -c -u
    plot-run -q m.jsonl -o loss.svg
    grep -q '<svg' loss.svg
    grep -aq 'train/loss' events.out.tfevents.x
    grep -aq 'eval/loss' events.out.tfevents.x
}

@test "train: the last step has a record, whatever --log-every is" {
    "${T[@]}" m0 data -o run --log-every 3 --metrics m.jsonl --tensorboard events
    [ "$(field m.jsonl step step | tr '\n' ' ')" = "3 6 8 " ]
    [ "$(field m.jsonl step grad_p50 | wc -l)" -eq 3 ]
    # also a step that ends the run early: without samples of gradients, which were not drawn
    "${T[@]}" m0 data -o early --steps 100 --log-every 100 --eval-every 2 --early-stop 3 --early-stop-delta 100 --metrics e.jsonl
    [ "$(field e.jsonl step step)" = 8 ]
    [ "$(field e.jsonl step loss | wc -l)" -eq 1 ]
    [ -z "$(field e.jsonl step grad_p50)" ]
    [ "$(field e.jsonl end step)" = 8 ]
}

@test "train: a log that is not a terminal has a line every 10 seconds" {
    # the clock runs 1,000 times as fast: 10 s are 10 ms
    fast_clock 1000 train --peak-tflops 0 --seq-len 32 --batch-size 2 m0 data -o run --steps 200 2> log
    grep -qE '^train: step [0-9]+ of 200: loss [0-9.]+, [0-9]+ tokens/s, [0-9:]+ left$' log
    [ "$(grep -c ' left$' log)" -ge 2 ]
    [ "$(grep -c ' left$' log)" -lt 150 ]
    for o in -q --no-progress; do
        fast_clock 1000 train $o --peak-tflops 0 --seq-len 32 --batch-size 2 m0 data -o "run$o" --steps 200 2> log
        run ! grep ' left$' log
    done
    # with -v each step has its line
    fast_clock 1000 train -v --peak-tflops 0 --seq-len 32 --batch-size 2 m0 data -o runv --steps 200 2> log
    run ! grep ' left$' log
    [ "$(grep -c 'step .*: loss' log)" -ge 200 ]
}

@test "train: mfu by the usual formula, and by the keys that attention reads" {
    for d in document-mask no-document-mask; do
        "${T[@]}" m0 data -o run-$d --$d --peak-tflops 0.01 --metrics $d.jsonl --json > $d.json
        [ "$(field $d.jsonl step mfu_attended | wc -l)" -eq 8 ]
        paste <(field $d.jsonl step mfu) <(field $d.jsonl step mfu_attended) > $d
        sed -nE 's/.*"mfu":([^,]*),"mfu_attended":([^,]*),.*/\1 \2/p' $d.json >> $d
    done
    # 97,472 - 80 * 64 parameters in products; causal attention sees 33 / 64 of 32 x 32 pairs
    awk '{ print; if (!($2 < $1 && $2 > 0.7 * $1)) exit 1 } END { exit NR != 9 }' no-document-mask
    paste document-mask no-document-mask | awk '{ print; if (!($2 / $1 < $4 / $3 * 0.9999)) exit 1 }'
}

@test "train: unlikely options give warnings" {
    run --separate-stderr train --peak-tflops 0 --batch-size 2 --seq-len 32 m0 data -o run --steps 2 --warmup 4
    [ "$status" -eq 0 ]
    [[ ${stderr_lines[0]} == "train: --warmup 4 is above the 2 steps of the schedule: the learning rate ends at 0.00015, not at its peak of 0.0003" ]]
    run --separate-stderr train --peak-tflops 0 --batch-size 2 --seq-len 32 m0 data -o wsd --steps 4 --warmup 2 --lr-schedule wsd --decay-steps 3
    [[ ${stderr_lines[0]} == "train: --warmup 2 and --decay-steps 3 are above the 4 steps"* ]]
    most=$(sed -nE 's/.*"max_position_embeddings": ([0-9]+).*/\1/p' m0/config.json)
    run --separate-stderr train m0 --dry-run --seq-len $((most + 1))
    [ "$status" -eq 0 ]
    [[ $stderr == "train: --seq-len $((most + 1)) is above the $most positions of the model: "* ]]
    run --separate-stderr train m0 --dry-run --seq-len "$most" --warmup 1000
    [ -z "$stderr" ]
}

@test "train: metrics alone on standard output; a reader that exits does not stop the run" {
    "${T[@]}" m0 data -o run --metrics - > m.jsonl
    [ "$(grep -c '^{"event":' m.jsonl)" -eq "$(wc -l < m.jsonl)" ]
    "${T[@]}" m0 data -o run2 --steps 40 --metrics - | head -1 > /dev/null
    [ "${PIPESTATUS[0]}" -eq 0 ]
    [ "$(readlink run2/latest)" = step-000040 ]
    "${T[@]}" m0 data -o run3 --metrics fd:7 7> seven
    grep -q '"event":"end"' seven
    train -q --resume run3 --steps 9 # descriptor 7 may be another file now
    [ "$(grep -c '"event":"run"' seven)" -eq 1 ]
}

@test "train: --json: one object with the outcome" {
    "${T[@]}" m0 data -o run --json > out.json
    [ "$(wc -l < out.json)" -eq 1 ]
    grep -qE '^\{"status":"done","step":8,"tokens":[0-9]+,"loss":[0-9.]+,"val_loss":null,.*"peak_memory_bytes":[0-9]+\}$' out.json
    # a run without remaining steps succeeds
    run --separate-stderr train --resume run --json
    [ "$status" -eq 0 ]
    [[ $stderr == *"run is at step 8 already: nothing to do"* ]]
    [[ $output == '{"status":"done","step":8,'* ]]
}

@test "train: an existing run is refused, -f replaces it and nothing else" {
    "${T[@]}" m0 data -o run
    echo mine > run/notes.txt
    mkdir run/step-by-step
    run "${T[@]}" m0 data -o run --steps 3
    [ "$status" -eq 2 ]
    [[ $output == "train: run: holds a run already (step-000008): go on from there with train --resume run, choose another folder, or replace the run with -f" ]]
    [ "$(readlink run/latest)" = step-000008 ]
    "${T[@]}" m0 data -o run --steps 3 -f
    [ "$(ls run)" = "$(printf '%s\n' config.json latest model.safetensors notes.txt step-000003 step-by-step tokenizer.json tokenizer_config.json)" ]
    [ "$(cat run/notes.txt)" = mine ]
}

@test "train: -f keeps the old run until the new one has its first checkpoint" {
    "${T[@]}" m0 data -o run --save-every 4 --metrics m.jsonl
    cp -r run old
    chmod 640 m.jsonl
    cp m.jsonl old.jsonl
    "${T[@]}" m0 data -o run -f --steps 100000 --metrics m.jsonl &
    pid=$!
    wait_for eval '[ "$(grep -cs "\"event\":\"run\"" m.jsonl)" -eq 2 ] && tail -n 1 m.jsonl | grep -q "\"event\":\"step\""'
    kill -9 $pid
    wait $pid || true
    [ "$(ls run)" = "$(ls old)" ]
    same_bits run old
    head -c "$(wc -c < old.jsonl)" m.jsonl | cmp - old.jsonl # and its metrics
    # the first checkpoint replaces both
    ln -s m.jsonl link.jsonl
    cp -r run other
    "${T[@]}" m0 data -o other -f --seed 5 --save-every 4 --metrics link.jsonl
    [ -L link.jsonl ]
    [ "$(stat -c %a m.jsonl)" = 640 ]
    [ "$(grep -c '"event":"run"' m.jsonl)" -eq 1 ]
    grep -q '"seed":5' m.jsonl
    [ "$(field m.jsonl step step | tr '\n' ' ')" = "1 2 3 4 5 6 7 8 " ]
    [ "$(grep -c '"event":"checkpoint"' m.jsonl)" -eq 2 ]
    tail -n 1 m.jsonl | grep -q '"event":"end","status":"done"'
    rm -r other
    train -q --resume run --steps 9 # continues the old run
    [ "$(readlink run/latest)" = step-000009 ]
    # a checkpoint with the name of an old one
    "${T[@]}" m0 data -o run -f --seed 5 --save-every 4
    [ "$(cd run && echo step-*)" = "step-000004 step-000008" ]
    run ! cmp -s <(tensors run/latest/model.safetensors) <(tensors old/latest/model.safetensors)
    [ ! -e run/.replaced ]
}

@test "train: a kill while the new run replaces the old one leaves one of them" {
    "${T[@]}" m0 data -o run --save-every 4
    "${T[@]}" m0 data -o new --seed 5 --steps 3
    cp -r new/step-000003 run/
    printf '%s\n' step-000004 step-000008 > run/.replaced
    cp -r run before # the list exists, `latest` names the old run
    train -q --resume before --steps 9
    [ "$(cd before && echo step-*)" = "step-000004 step-000008 step-000009" ]
    [ ! -e before/.replaced ]
    ln -sfn step-000003 run/latest # the old checkpoints are not removed yet
    ln -s step-000008 run/best
    train -q --resume run --steps 4
    [ "$(cd run && echo step-*)" = "step-000003 step-000004" ]
    [ ! -e run/.replaced ] && [ ! -L run/best ]
    train -q --resume new --steps 4
    same_bits run new
}

# After a kill the folder can be resumed as the old run or as the new one.
goes_on() {
    train -q --resume run --steps 9 || return
    cmp -s <(tensors run/latest/model.safetensors) <(tensors old/latest/model.safetensors) && [ "$1" -ne 0 ] ||
        cmp <(tensors run/latest/model.safetensors) <(tensors new/latest/model.safetensors) || return
    no_temporaries && [ ! -e run/.replaced ] || return
    rm -rf run && cp -a was run
}

@test "train: -f, killed at any rename or removal of a link or list, leaves the old run or the new one" {
    "${T[@]}" m0 data -o was --save-every 4
    cp -a was old && train -q --resume old --steps 9
    for steps in 3 4; do # 4: under the name of an old checkpoint
        rm -rf new run
        "${T[@]}" m0 data -o new --seed 5 --steps $steps && train -q --resume new --steps 9
        cp -a was run
        for kind in rename unlink; do
            kill_each $kind 30 goes_on "${T[@]}" m0 data -o run -f --seed 5 --steps $steps
        done
    done
}

@test "train: an active run is refused before its checkpoints are read, which may be removed at any time" {
    "${T[@]}" m0 data -o run --save-every 4
    exec 8> run/.train.lock
    flock 8
    for step in run/step-000008 run/step-000004; do # the newest checkpoint is removed, then all are
        rm $step/config.json $step/state.json
        for again in "run" "run/step-000004" "run/latest -o run"; do
            # shellcheck disable=SC2086
            run train -q --resume $again
            [ "$status" -eq 2 ]
            [[ $output == "train: "*": is in use by another process: wait until it ends, or choose another folder" ]]
        done
    done
    flock -u 8
    run train -q --resume run
    [[ $output == "train: run: holds no checkpoint to resume from"* ]]
}

@test "train: -f does not remove a checkpoint that contains other files" {
    "${T[@]}" m0 data -o run
    echo mine > run/step-000008/notes.txt
    run "${T[@]}" m0 data -o run -f
    [ "$status" -eq 2 ]
    [[ $output == "train: run/step-000008: holds 'notes.txt', "* ]]
    [ -s run/latest/state.json ]
}

@test "train: an active run is refused, with its process" {
    "${T[@]}" m0 data -o run --steps 100000 --save-every 2 --keep 0 & # keeps what the dry run reads
    pid=$!
    wait_for test -e run/latest/state.json
    for again in "m0 data -o run -f" "--resume run"; do
        # shellcheck disable=SC2086
        run train -q $again
        [ "$status" -eq 2 ]
        [ "${#lines[@]}" -eq 1 ]
        [[ $output == "train: run: is in use by process $pid on $(uname -n) since 20"*": wait until it ends, or choose another folder" ]]
    done
    run train --resume run --dry-run # reads only
    [ "$status" -eq 0 ]
    kill -9 $pid
    wait $pid || true
    [ -e run/.train.lock ] # the file alone does not block a run
    step=$(readlink run/latest)
    train -q --resume run --steps $((10#${step#step-} + 2))
    [ "$(readlink run/latest)" != "$step" ]
    [ ! -e run/.train.lock ]
}

@test "train: a folder that is not a run is not changed, with or without -f" {
    mkdir -p other/step-000008
    echo '{}' > other/config.json
    echo x > other/step-000008/thesis.tex
    for f in "" -f; do
        # shellcheck disable=SC2086
        run "${T[@]}" m0 data -o other $f
        [ "$status" -eq 2 ]
        [[ $output == *"has a name that the run needs"* ]]
        rm -f other/config.json
    done
    [ "$(find other -type f)" = other/step-000008/thesis.tex ]
    run "${T[@]}" m0 data -o m0/ -f
    [ "$status" -eq 2 ]
    [[ $output == *"is the folder that m0 comes from"* ]]
    "${T[@]}" m0 data -o run
    run "${T[@]}" run/step-000008 data -o run -f
    [ "$status" -eq 2 ]
    [ -s run/step-000008/state.json ]
    run "${T[@]}" m0 data -o data/train.bin -f
    [ "$status" -eq 2 ]
    [[ $output == *"is a file, not a folder"* ]]
}

@test "train: resuming an earlier checkpoint is reported" {
    "${T[@]}" m0 data -o run --save-every 2 --keep 0
    run train --resume run/step-000004
    [ "$status" -eq 2 ]
    [[ $output == *"the run has gone further (step-000008): go on from there with train --resume "*"/run, begin another run at step-000004 with -o, or give up the later checkpoints with -f" ]]
    cp -r run copy
    train -q --resume run/step-000004/ -f --lr 1e-3
    [ "$(readlink run/latest)" = step-000008 ]
    run ! cmp -s <(tensors run/model.safetensors) <(tensors copy/model.safetensors)
    cmp run/step-000004/model.safetensors copy/step-000004/model.safetensors
}

@test "train: options of the run apply on resume, those given now override them" {
    "${T[@]}" m0 data -o run --lr-schedule constant --metrics m.jsonl --keep 7
    train -q --resume run --steps 9
    train -q --resume run --steps 10 --lr 0.25 --warmup 0
    [ "$(field m.jsonl step lr | tail -3 | tr '\n' ' ')" = "0.003 0.003 0.25 " ]
    grep -q '"keep":7' run/latest/state.json
    cp -r "$BATS_FILE_TMPDIR/data" moved
    train -q --resume run moved --steps 11
    grep -q "\"data\":\"$PWD/moved\"" run/latest/state.json
    run train --resume run --optimizer sgd --steps 12
    [ "$status" -eq 2 ]
    [[ $output == *"trained with adamw, not sgd"* ]]
    run train --resume run data more
    [ "$status" -eq 2 ]
}

@test "train: --resume with more --steps: the learning rate, and --resume-schedule" {
    "${T[@]}" m0 data -o run --metrics m.jsonl
    [ "$(field m.jsonl step lr | tail -1 | cut -c 1-8)" = 0.000480 ]
    for how in keep extend rewarm; do
        cp -r run $how
        cp m.jsonl $how.jsonl
        run --separate-stderr train --resume $how --steps 16 --resume-schedule $how --metrics $how.jsonl
        [ "$status" -eq 0 ]
        [[ ${stderr_lines[0]} == "train: the cosine schedule "*": the learning rate was 0.000481, is "*" at step 9 and "*" at step 16 (--resume-schedule $how; the others are "*")" ]]
        field $how.jsonl step lr | tail -8 | tr '\n' ' ' > $how.lr
    done
    # keep: at the floor; extend: the rates of a run of 16 steps; rewarm: up from there to the peak and down again
    [ "$(tr ' ' '\n' < keep.lr | sort -u | grep -c .)" -eq 1 ]
    grep -q '^0.0003' keep.lr
    "${T[@]}" m0 data -o whole --steps 16 --metrics whole.jsonl
    [ "$(field whole.jsonl step lr | tail -8 | tr '\n' ' ')" = "$(cat extend.lr)" ]
    awk '{ print; exit !($1 > 0.0017 && $1 < 0.0018 && $2 == 0.003 && $3 == 0.003 && $4 < $3 && $8 < 0.0006) }' rewarm.lr
    # the default is extend, which is reported
    cp -r run plain
    run --separate-stderr train --resume plain --steps 16 --metrics plain.jsonl
    [[ $stderr == *"(--resume-schedule extend; "* ]]
    [ "$(field plain.jsonl step lr | tr '\n' ' ')" = "$(cat extend.lr)" ]
    same_bits plain extend
    # a schedule that was laid out anew is that of the run from then on: stopped and resumed, the same bits
    for how in keep rewarm; do
        cp -r run cut-$how
        train -q --resume cut-$how --steps 16 --resume-schedule $how --save-every 3 --keep 0 --metrics x-$how.jsonl
        run --separate-stderr train --resume cut-$how/step-000012 -f --metrics y-$how.jsonl
        [[ $stderr != *schedule* ]]
        same_bits $how cut-$how
        [ "$(field y-$how.jsonl step lr | tr '\n' ' ')" = "$(cut -d ' ' -f 5- $how.lr)" ]
    done
    # no message if the rate does not change
    "${T[@]}" m0 data -o flat --lr-schedule constant
    run --separate-stderr train --resume flat --steps 9
    [[ $stderr != *"learning rate"* ]]
    # a message for a given rate, too
    run --separate-stderr train --resume flat --steps 12 --lr 1e-3 --warmup 0
    [[ ${stderr_lines[0]} == "train: the constant schedule is laid out anew up to step 12: the learning rate was 0.003, is 0.001 at step 10 and 0.001 at step 12 ("* ]]
    # for a single step the rate is reported once
    run --separate-stderr train --resume flat --steps 13 --lr 3e-3
    [[ ${stderr_lines[0]} == *": the learning rate was 0.001, is 0.003 at step 13 (--resume-schedule extend; "* ]]
    run "${T[@]}" m0 data -o none --resume-schedule keep
    [ "$status" -eq 2 ]
    [[ $output == "train: --resume-schedule: serves --resume only: leave it out" ]]
}

@test "train: --print-config is a --config that makes the same run" {
    "${T[@]}" --clip-value 0.01 --optimizer sgd --no-document-mask --print-config > c.json
    "${T[@]}" --clip-value 0.01 --optimizer sgd --no-document-mask m0 data -o a
    train --config c.json m0 data -o b
    same_bits a b
    [ "$(train --config c.json --print-config)" = "$(cat c.json)" ]
}

@test "train: --save-every takes steps and times, --keep bounds the checkpoints" {
    "${T[@]}" m0 data -o run --save-every 1 --keep 2
    [ "$(echo run/step-*)" = "run/step-000007 run/step-000008" ]
    # a checkpoint with a foreign file is not removed
    echo mine > run/step-000007/notes.txt
    train -q --resume run --steps 12
    [ "$(echo run/step-*)" = "run/step-000007 run/step-000011 run/step-000012" ]
    [ "$(cat run/step-000007/notes.txt)" = mine ]
    "${T[@]}" m0 data -o timed --steps 300 --save-every 0.1s --keep 0
    [ "$(find timed -name 'step-*' | wc -l)" -gt 1 ]
    "${T[@]}" m0 data -o hour --save-every 1h --keep 0
    [ "$(echo hour/step-*)" = hour/step-000008 ]
    "${T[@]}" m0 data -o end --save-every 0 --keep 0
    [ "$(echo end/step-*)" = end/step-000008 ]
    for bad in ten 10x -1 0s; do
        run "${T[@]}" m0 data -o bad "--save-every=$bad"
        [ "$status" -eq 2 ]
        [[ $output == "train: --save-every: '$bad' is neither: give steps (100) or a time (90s, 10m, 2h)" ]]
        [ ! -e bad ]
    done
}

@test "train: a checkpoint every 30 minutes by default, none but the last with --save-every 0" {
    # the clock runs 30,000 times as fast: half an hour is 60 ms, about ten steps
    fast_clock 30000 "${T[@]}" m0 data -o run --steps 400 --keep 0 --metrics m.jsonl
    n=$(field m.jsonl checkpoint step | wc -l)
    [ "$n" -ge 3 ]
    [ "$n" -lt 200 ]
    grep -q '"save-every":null' run/latest/state.json
    fast_clock 30000 "${T[@]}" m0 data -o none --steps 400 --keep 0 --save-every 0
    [ "$(echo none/step-*)" = none/step-000400 ]
}

# lowest FILE -> the step of the lowest loss among the eval records
lowest() {
    paste <(field "$1" eval loss) <(field "$1" eval step) | sort -g | head -1 | cut -f 2
}

@test "train: the best model by validation is kept as best, beside latest" {
    # the loss first falls and then, at a rate that is far too high, rises
    "${T[@]}" m0 data -o run --steps 12 --keep 1 --eval-every 2 --metrics m.jsonl --json > j.json
    cp -r run first
    train -q --resume run --steps 20 --lr 0.3 --warmup 0 --lr-schedule constant --max-grad-norm 0 --json > j.json
    best=$(lowest m.jsonl)
    [ "$best" -lt 20 ]
    [ "$(readlink run/best)" = "$(printf 'step-%06d' "$best")" ]
    [ "$(echo run/step-*)" = "run/$(readlink run/best) run/step-000020" ]
    grep -q "\"best_val_loss\":$(field m.jsonl eval loss | sort -g | head -1 | cut -c 1-10).*\"best_step\":$best," j.json
    inspect-model -q run/best > /dev/null
    # a better checkpoint gets the name, the previous one is removed
    train -q --resume first --steps 24 --metrics m2.jsonl
    best=$(lowest m2.jsonl)
    [ "$best" -gt 12 ]
    [ "$(readlink first/best)" = "$(printf 'step-%06d' "$best")" ]
    [ ! -e first/step-000012 ]
    # a new run in its place does not inherit its best
    "${T[@]}" m0 data -o run -f
    [ ! -L run/best ]
    "${T[@]}" m0 data -o run -f --eval-every 8
    [ "$(readlink run/best)" = step-000008 ]
    "${T[@]}" m0 data -o run -f # its only checkpoint has the name of the old best
    [ ! -L run/best ]
    "${T[@]}" m0 data -o none
    [ ! -L none/best ]
}

@test "train: kill -9 at any moment: best names the lowest of the evaluations" {
    E=(--steps 40 --keep 1 --eval-every 2 --eval-batches 2)
    "${T[@]}" m0 data -o whole "${E[@]}"
    for n in 3 11 22; do
        rm -rf run
        "${T[@]}" m0 data -o run "${E[@]}" &
        pid=$!
        reached() { [ "$(readlink run/latest 2> /dev/null | sed 's/.*-0*//')0" -ge $((10 * n)) ]; }
        wait_for reached
        kill -9 $pid || true
        wait $pid || true
        [ ! -L run/best ] || [ -s run/best/state.json ]
        # as after a kill between the checkpoint and its link
        rm -f run/best
        train -q --resume run
        [ "$(readlink run/best)" = "$(readlink whole/best)" ]
        cmp <(tensors run/best/model.safetensors) <(tensors whole/best/model.safetensors)
    done
    # resuming from before the best restores the earlier best
    "${T[@]}" m0 data -o back "${E[@]}" --keep 0
    [ "$(readlink back/best)" = "$(readlink whole/best)" ]
    train -q --resume back/step-000004 -f --steps 4
    [ "$(readlink back/best)" = "$(ls back | grep '^step' | tail -1)" ]
    # another run has its own best
    train -q --resume whole/latest -o other --steps 44
    [ ! -L other/best ] || [ -s other/best/state.json ]
}

@test "train: early stopping ends the run after evaluations without improvement" {
    "${T[@]}" m0 data -o run --steps 100 --eval-every 2 --early-stop 3 --early-stop-delta 100 --metrics m.jsonl
    # the first counts as an improvement, the next three do not
    [ "$(readlink run/latest)" = step-000008 ]
    [ "$(field m.jsonl end status)" = '"converged"' ]
    [ "$(field m.jsonl eval step | tr '\n' ' ')" = "2 4 6 8 " ]
    run "${T[@]}" m0 data -o other --early-stop 3
    [ "$status" -eq 2 ]
    [[ $output == *"--early-stop: nothing is evaluated during the run: give --eval-every too" ]]
}

@test "train: validation does not affect training: the same bits with and without" {
    "${T[@]}" m0 data -o a
    "${T[@]}" m0 data -o b --eval-every 2 --eval-batches 1
    cmp <(tensors a/model.safetensors) <(tensors b/model.safetensors)
}

@test "train: --dry-run needs config.json alone and writes nothing" {
    mkdir plan
    cp m0/config.json plan
    run --separate-stderr train plan --dry-run --batch-size 4 --seq-len 64
    [ "$status" -eq 0 ]
    [[ $output == *"weights (f32 master)"*"optimiser states"*"activations and scratch"*"total"*"parameters 97472, tokens a step 256,"* ]]
    train plan --dry-run --json --dtype bf16 > p.json
    # the rows add up to the total
    sed -n '/"memory": {/,/}/p' p.json | sed -nE 's/.*": ([0-9]+),?$/\1/p' |
        awk -v t="$(sed -nE 's/.*"memory_total": ([0-9]+).*/\1/p' p.json)" '{ s += $1 } END { exit !(s == t && t > 0) }'
    [ "$(ls plan)" = config.json ]
    # memory of one micro-batch, however many a step has
    cmp <(train plan --dry-run --json | grep batches) <(train plan --dry-run --json --gradient-accumulation-steps 1000 | grep batches)
    run train plan --dry-run --gradient-accumulation-steps 65536
    [ "$status" -eq 2 ]
    train plan --dump-graph > graph
    grep -q 'attention (qkv .* heads=4 ' graph
    grep -q 'norm_dw (dy .* acc=first -> dw %' graph
}

@test "train: --dry-run takes presets and config.json, and ends with a verdict" {
    run --separate-stderr train llama-1m --dry-run
    [ "$status" -eq 0 ]
    [[ ${lines[-2]} == "a checkpoint takes 13.5 MiB on disk, at most 4 at once" ]]
    [[ ${lines[-1]} =~ ^"fits here: "[0-9.]+" "[MG]iB" of "[0-9.]+" "[GT]iB" that are free"$ ]]
    [ "$(echo [!s]*)" = "data m0" ] # except bats' own separate-stderr-*
    train m0/config.json --dry-run | tail -1 | grep -q '^fits here'
    # a run that fits only with shorter sequences, and one that does not fit at all
    run --separate-stderr train llama-1m --dry-run --seq-len 100M --batch-size 1 --dtype bf16
    [ "$status" -eq 0 ]
    [[ ${lines[-1]} =~ ^"does not fit here: needs "[0-9.]+" "[A-Z]iB", "[0-9.]+" "[A-Z]iB" are free: no smaller --batch-size would do: --seq-len "[0-9]+" --batch-size 1 would need "[0-9.]+" "[A-Z]iB$ ]]
    sed -E 's/("hidden_size"|"intermediate_size"): [0-9]+/\1: 262144/; s/("num_hidden_layers"): [0-9]+/\1: 100/' \
        m0/config.json > giant.json
    run --separate-stderr train giant.json --dry-run --json
    [[ $output == *'"fits": false,'*'"cure": "no smaller --batch-size, nor --dtype bf16, nor a shorter --seq-len would do: use a smaller model"'* ]]
    run train llama-9m --dry-run
    [ "$status" -eq 2 ]
    [[ $output == "train: llama-9m: is neither a preset nor a config.json: did you mean llama-1m?" ]]
    run train llama-1m data -o run
    [ "$status" -eq 2 ]
    [[ $output == "train: llama-1m: is a preset, not a model: make a model of it first with init-model, or ask what it takes with --dry-run" ]]
    [ ! -e run ]
}

@test "train: --dry-run --measure runs a few steps and reports the time of all" {
    fast_clock 100 train m0 --dry-run --measure --seq-len 32 --batch-size 2 --steps 3600 > out 2> err
    [ ! -s err ]
    rm err
    mapfile -t lines < out
    rm out
    [[ ${lines[-2]} =~ ^"measured: "[0-9.e-]+" s a step, "[0-9]+" tokens/s; 3600 steps take "[0-9.e-]+" hours, without evaluations and checkpoints"$ ]]
    [[ ${lines[-1]} == "fits here: "* ]]
    # hours are consistent with seconds per step
    fast_clock 100 train m0 data --dry-run --measure --json --seq-len 32 --batch-size 2 --steps 3600 > m.json
    paste <(sed -nE 's/.*"seconds_per_step": ([^,]*),/\1/p' m.json) <(sed -nE 's/.*"hours": (.*)/\1/p' m.json) |
        awk '{ print; d = $1 / $2 - 1; exit !(NF == 2 && $1 > 0 && d * d < 1e-12) }'
    [ "$(echo [!s]*)" = "data m.json m0" ]
    # a run that does not fit is not measured
    train llama-1m --dry-run --measure --seq-len 100M --batch-size 1 > no 2> /dev/null
    grep -qx 'not measured: it does not fit' no
    # for a resumed run: the remaining steps
    train -q m0 data -o begun --steps 2 --seq-len 32 --batch-size 2 2> /dev/null
    fast_clock 100 train --resume begun --steps 3602 --dry-run --measure | grep -q 's; 3600 steps that are left take '
    train --resume begun --dry-run > done
    grep -q '^no step is left: no checkpoint (of [0-9.]* MiB) would be written$' done
    run ! grep -q 'at once' done
    train --resume begun --steps 3 --dry-run | grep -q 'on disk, at most 1 at once$'
    run train m0 data -o run --measure
    [ "$status" -eq 2 ]
    [[ $output == "train: --measure: serves --dry-run only: give --dry-run too" ]]
    for o in '' --measure; do # unreadable data are an error
        run train m0 nothing --dry-run $o
        [ "$status" -eq 1 ]
        [[ $output == "train: nothing: "* ]]
    done
}

@test "train: too little memory: the batch that would fit is named" {
    n=$((1 << 23))
    run -1 --separate-stderr train -q m0 data -o run --steps 1 --seq-len 32 --batch-size $n
    [ "$(wc -l <<< "$stderr")" -eq 1 ]
    [[ $stderr == "train: memory: the run needs "*" are free: --batch-size "*" --gradient-accumulation-steps "*" would need "* ]]
    read -r b a <<< "$(sed -E 's/.*--batch-size ([0-9]+) --gradient-accumulation-steps ([0-9]+) .*/\1 \2/' <<< "$stderr")"
    [ $((a * b)) -eq "$n" ]
    [ ! -e run ]
}

@test "train: divergence: status 4, one line, the last checkpoint is kept" {
    "${T[@]}" m0 data -o run
    run --separate-stderr train --resume run --steps 60 --optimizer adamw --lr 1000 --warmup 0 --max-grad-norm 0 --save-every 1 --lr-schedule constant --weight-decay 10 --keep 1 --metrics m.jsonl
    [ "$status" -eq 4 ]
    [ "${#stderr_lines[@]}" -eq 2 ]
    [[ ${stderr_lines[0]} == "train: the constant schedule is laid out anew up to step 60: "* ]]
    stderr=${stderr_lines[1]}
    [[ $stderr =~ ^"train: step "[0-9]+": the ".*" is "(not a number|infinite).*": lower --lr or --max-grad-norm and resume from "run/step-[0-9]+$ ]]
    [ -s "${stderr##* }/state.json" ]
    [ "${stderr##* }" = "run/$(readlink run/latest)" ]
    [ "$(field m.jsonl end status)" = '"nan"' ]
    no_temporaries
    # the same if only the last update diverges
    step=${stderr#train: step }
    step=${step%%:*}
    "${T[@]}" m0 data -o last
    run train --resume last --steps "$step" --lr 1000 --warmup 0 --max-grad-norm 0 --lr-schedule constant --weight-decay 10
    [ "$status" -eq 4 ]
    [[ ${lines[-1]} == "train: step $step: the norm of the weights is "*", and tensor \"model."*".weight\" holds an infinity: lower --lr or --max-grad-norm and resume from last/step-000008" ]]
    [ "$(echo last/step-*)" = last/step-000008 ]
}

# One step of plain SGD at rate 1: the weights move by the gradient.
S=(train -q --peak-tflops 0 --seq-len 32 --steps 1 --optimizer sgd --momentum 0 --lr 1 --lr-schedule constant)

moved() { # moved RUN [GLOB] -> the largest movement of a weight from m0
    inspect-model --check m0 "$1" --json ${2:+--only "$2"} | sed -nE 's/.*"differing":[^t]*"max_abs":([^,]*),.*/\1/p' | head -1
}

@test "train: clipping by value and by norm limit a step" {
    "${S[@]}" m0 data -o free --weight-decay 0 --max-grad-norm 0 --metrics m.jsonl
    "${S[@]}" m0 data -o value --weight-decay 0 --max-grad-norm 0 --clip-value 1e-4
    "${S[@]}" m0 data -o norm --weight-decay 0 --max-grad-norm 0.5
    echo "$(moved free) $(moved value) $(moved norm) $(field m.jsonl step grad_norm)" |
        awk '{ print; exit !($1 > 1e-3 && $2 > 0.99e-4 && $2 < 1.01e-4 && $3 / $1 > 0.499 / $4 && $3 / $1 < 0.501 / $4) }'
}

@test "train: weight decay is for matrices only" {
    "${S[@]}" m0 data -o run --weight-decay 0.25 --lr 0.4 --max-grad-norm 1e-12
    inspect-model -q --check --only '*norm*' m0 run > /dev/null
    inspect-model --check --json --only '*proj*' m0 run > j || [ $? -eq 3 ]
    # every element of a matrix lost a tenth
    sed -nE 's/.*"max_rel":([0-9.e-]+),"tensors".*/\1/p' j | awk '{ print; exit !($1 > 0.0999 && $1 < 0.1001) }'
}

@test "train: a weight that is not a number: status 4, no checkpoint" {
    cp -rL m0 bad
    printf '\0\0\300\177' | dd of=bad/model.safetensors bs=1 seek=$(($(stat -c %s bad/model.safetensors) - 4)) conv=notrunc status=none
    run "${T[@]}" bad data -o run
    [ "$status" -eq 4 ]
    [[ $output == "train: bad: tensor \"model.norm.weight\" holds a NaN: begin with another copy of the model" ]]
    [ ! -e run/latest ]
}

# spoil FILE: its last number becomes NaN
spoil() {
    printf '\0\0\300\177' | dd of="$1" bs=1 seek=$(($(stat -c %s "$1") - 4)) conv=notrunc status=none
}

@test "train: numbers that are not finite in a checkpoint: the tensor, and the last checkpoint without them" {
    "${T[@]}" m0 data -o run --save-every 2 --keep 0
    spoil run/step-000008/model.safetensors
    run train -q --resume run --steps 12
    [ "$status" -eq 4 ]
    [[ $output == "train: run/step-000008: tensor \"model.norm.weight\" holds a NaN: resume from run/step-000006, the last clean checkpoint" ]]
    # states that are not finite are refused when they are read; such a checkpoint is not suggested
    rm -r run/step-000008
    spoil run/step-000006/optimizer.safetensors
    run train -q --resume run --steps 12
    [ "$status" -eq 4 ]
    [[ $output == "train: run/step-000006/optimizer.safetensors: tensor \"exp_avg"*".model."*"\" holds a NaN: resume from run/step-000004, the last clean checkpoint" ]]
    train -q --resume run/step-000004 -f
    [ "$(readlink run/latest)" = step-000008 ]
    for n in 2 4 6 8; do [ ! -d run/step-00000$n ] || spoil run/step-00000$n/model.safetensors; done
    run train -q --resume run --steps 12
    [ "$status" -eq 4 ]
    [[ $output == *"start again: no earlier checkpoint is clean" ]]
}

@test "train: data that cannot be trained on: one line, a status, and no run folder" {
    run "${T[@]}" m0 nothing -o run
    [ "$status" -eq 1 ]
    [ "${#lines[@]}" -eq 1 ]
    [[ $output == "train: nothing"* ]]
    run "${T[@]}" m0 data -o run --seq-len 100000
    [ "$status" -eq 2 ]
    mkdir short
    printf '\1\0\2\0\3\0' > short/train.bin
    run "${T[@]}" m0 short -o run
    [ "$status" -eq 2 ]
    [[ $output == *"3 tokens, but a sequence needs 33: use shorter sequences or more text" ]]
    : > short/train.bin
    run "${T[@]}" m0 short -o run
    [ "$status" -ne 0 ]
    [ "${#lines[@]}" -eq 1 ]
    awk 'BEGIN { for (i = 0; i < 400; i++) printf "\377\177" }' > short/train.bin
    run "${T[@]}" m0 short -o run
    [ "$status" -eq 1 ]
    [[ $output == *"32767"* ]]
    run "${T[@]}" m0 data -o run --eval-every 2 --val nowhere
    [ "$status" -eq 1 ]
    [ ! -e run ]
    run "${T[@]}" m0 data -o run --val nowhere
    [ "$status" -eq 2 ]
    [[ $output == *"--val: nothing is evaluated during the run: give --eval-every too" ]]
    mkdir noval
    cp data/train.* noval
    run "${T[@]}" m0 noval -o run --eval-every 2
    [ "$status" -eq 2 ]
    [[ $output == *"no validation data in noval: give --val SHARD" ]]
    truncate -s -1000 noval/train.bin
    run "${T[@]}" m0 noval -o run
    [ "$status" -eq 1 ]
    [ ! -e run ]
}

@test "train: a model that contradicts itself: one line, a status, and no run folder" {
    cp -rL m0 bad
    sed 's/"hidden_size": 64/"hidden_size": 128/' m0/config.json > bad/config.json
    run "${T[@]}" bad data -o run
    [ "$status" -eq 2 ]
    [ "${#lines[@]}" -eq 1 ]
    [[ $output == *"tensor"*"shape"* ]]
    sed 's/"num_attention_heads": 4/"num_attention_heads": 5/' m0/config.json > bad/config.json
    run "${T[@]}" bad data -o run
    [ "$status" -ne 0 ]
    [ "${#lines[@]}" -eq 1 ]
    rm bad/config.json
    run "${T[@]}" bad data -o run
    [ "$status" -ne 0 ]
    [[ $output == *"config.json"* ]]
    cp m0/config.json bad
    truncate -s 1000 bad/model.safetensors
    run "${T[@]}" bad data -o run
    [ "$status" -eq 1 ]
    [ "${#lines[@]}" -eq 1 ]
    [ ! -e run ]
    run "${T[@]}" m0 data -o run --nesterov --momentum 0 --optimizer sgd
    [ "$status" -eq 2 ]
    run "${T[@]}" m0 data
    [ "$status" -eq 2 ]
    run "${T[@]}" m0
    [ "$status" -eq 2 ]
    run "${T[@]}"
    [ "$status" -eq 2 ]
    run "${T[@]}" --resume m0
    [ "$status" -eq 2 ]
    [[ $output == *"holds no checkpoint to resume from: it is a model without the state of a training: start a run with train m0 DATA -o RUN" ]]
    run "${T[@]}" --resume nowhere
    [ "$status" -eq 1 ]
    run "${T[@]}" m0 data -o run --lr 1e30
    [ "$status" -eq 2 ]
    [ ! -e run ]
}

@test "train: --resume of something else than a checkpoint: the message describes it and the remedy" {
    no() { run -"$1" train --resume "$2"; [[ $output == "train: $2: $3" ]] || { echo "$output"; false; }; }
    mkdir empty other killed
    touch other/notes.txt notes.txt
    mkdir killed/.step-000003.tmp.99999
    no 2 empty "holds no checkpoint to resume from: it is empty: start a run with train MODEL DATA -o RUN"
    no 2 other "holds no checkpoint to resume from: it is not the folder of a run: start a run with train MODEL DATA -o RUN"
    no 2 data "holds no checkpoint to resume from: it holds token shards: start a run with train MODEL data -o RUN"
    no 2 killed "holds no checkpoint to resume from: it holds only what a killed run had not finished writing: start a run with train MODEL DATA -o RUN"
    no 2 notes.txt "is not a checkpoint: neither a folder nor an .lmz: name the folder of a run, or one of its checkpoints"
    no 1 nowhere "cannot open: No such file or directory: name the folder of a run, or one of its checkpoints"
    "${T[@]}" m0 data -o run --save-every 2 --keep 0
    no 2 run/step-000005 "is not a checkpoint: run holds ..., step-000004, step-000006, step-000008: name one of these, or the run for its newest"
    rm run/step-*/state.json
    no 2 run "holds no checkpoint to resume from: step-000008 has no state.json: train from the model in it"
    mv run/step-000008 lone
    "${T[@]}" m0 data -o again
    cp again/latest/state.json lone
    no 2 lone "is a checkpoint outside a run: name the folder of the new run with -o"
}

@test "train: a checkpoint that was damaged is refused" {
    "${T[@]}" m0 data -o run
    for f in model.safetensors optimizer.safetensors state.json; do
        rm -rf bad
        cp -r run bad
        truncate -s -10 "bad/latest/$f"
        run train --resume bad --steps 12
        [ "$status" -eq 1 ]
        [ "${#lines[@]}" -eq 1 ]
        [[ $output == *"$f"* ]]
        [ "$(echo bad/step-*)" = bad/step-000008 ]
        rm "bad/step-000008/$f"
        run train --resume bad --steps 12
        [ "$status" -ne 0 ]
        [ "${#lines[@]}" -eq 1 ]
    done
    for key in step best_step evaluated; do # a step that no name of a checkpoint can hold
        rm -rf bad
        cp -r run bad
        sed -i -E "s/^(  \"$key\": )[-0-9]+/\11000000000000000000/" bad/step-000008/state.json
        run -1 train --resume bad --steps 12
        [[ $output == *"state.json: '$key' is 1000000000000000000, "* ]]
    done
}

mounted() { # mounted OPTIONS FOLDER, or skip
    mkdir -p "$2"
    mount -t tmpfs -o "$1" tmpfs "$2" 2> /dev/null || skip "mounting a small file system needs root"
    mounts+=("$2")
}

teardown() {
    for m in "${mounts[@]}"; do umount -l "$m"; done
}

@test "train: too little room on disk for the checkpoints: a warning with both numbers before the first step" {
    mounts=()
    mounted size=3500k small # a checkpoint has 97,472 * 12 bytes
    run --separate-stderr train --peak-tflops 0 --seq-len 32 --batch-size 2 --steps 8 m0 data -o small/run --save-every 2 --keep 0
    [ "$status" -eq 1 ]
    [[ ${stderr_lines[0]} == "train: small/run: up to 4 checkpoints of 1.12 MiB at once need 4.46 MiB more, 3."*" MiB are free on disk: make room, lower --keep, or take --checkpoint-format lmz" ]]
    rm -r small/run
    # one checkpoint and the one being written fit; pruning makes room on resume, too
    run --separate-stderr train --peak-tflops 0 --seq-len 32 --batch-size 2 --steps 8 m0 data -o small/run --save-every 2 --keep 1
    [ "$status" -eq 0 ]
    [[ $stderr != *"are free"* ]]
    run --separate-stderr train --resume small/run --steps 12
    [ "$status" -eq 0 ]
    [[ $stderr != *"are free"* ]]
    run --separate-stderr train --resume small/run --steps 20 --keep 3
    [[ $stderr == *"up to 4 checkpoints of 1.12 MiB at once need 3.35 MiB more, "* ]]
}

@test "train: a full disk: status 1, one line, earlier checkpoints are complete, no incomplete files" {
    mounts=()
    mounted size=3500k small # room for two checkpoints, not for three
    run "${T[@]}" m0 data -o small/run --save-every 2 --keep 0
    [ "$status" -eq 1 ]
    [ "${#lines[@]}" -eq 1 ]
    [[ $output == *"No space left on device"* ]]
    (cd small && no_temporaries)
    last=$(readlink small/run/latest)
    [ "$(find small/run -name state.json | wc -l)" -eq "$(find small/run -name 'step-*' | wc -l)" ]
    train -q --resume small/run -o run
    "${T[@]}" m0 data -o whole
    same_bits whole run
    echo "# the disk was full after $last"
}

@test "train: a run folder that cannot be written: status 1 before the first step" {
    mounts=()
    mounted size=1m,ro fixed
    run "${T[@]}" m0 data -o fixed --metrics m.jsonl
    [ "$status" -eq 1 ]
    [[ $output == "train: fixed: cannot write into the folder: Read-only file system" ]]
    [ ! -e m.jsonl ]
    run "${T[@]}" m0 data -o fixed/run
    [ "$status" -eq 1 ]
    run "${T[@]}" m0 data -o run --metrics nodir/m.jsonl
    [ "$status" -eq 1 ]
    [ ! -e run ]
}

# Whatever failed: all existing checkpoints are complete and right, and the run opens at one, if there is any.
whole_or_none() {
    local c
    for c in run/step-*; do
        [ -e "$c" ] || continue
        cmp <(tensors "$c/model.safetensors") <(tensors "whole/${c##*/}/model.safetensors") || return 1
        cmp "$c/optimizer.safetensors" "whole/${c##*/}/optimizer.safetensors" || return 1
        [ -s "$c/state.json" ] || return 1
    done
    [ "$1" -ne 0 ] || [ "$(readlink run/latest)" = step-000004 ]
}

@test "train: each failing write, fsync and rename leaves complete checkpoints" {
    t=("${T[@]}" -j 1 --steps 4 --save-every 2)
    "${t[@]}" m0 data -o whole
    inject_each write 60 whole_or_none "${t[@]}" m0 data -o run -f
    inject_each fsync 20 whole_or_none "${t[@]}" m0 data -o run -f
    inject_each rename 20 whole_or_none "${t[@]}" m0 data -o run -f
}

@test "train: the memory that is used is within 5 % of the plan" {
    plain_memory train
    [ "$(awk '/MemAvailable/ { print int($2 / 1024) }' /proc/meminfo)" -gt 2500 ] || skip "less than 2.5 GB of memory free"
    LM_SHARE=$root/share init-model -q gpt2-124m --set n_layer=2 -o big # 53.6 M parameters
    for d in f32 bf16; do
        o=(--batch-size 1 --seq-len 64 --dtype $d --eval-every 2)
        plan=$(train big --dry-run --json "${o[@]}" | sed -nE 's/.*"memory_total": ([0-9]+).*/\1/p')
        used=$(train -q big data -o run --peak-tflops 0 --steps 2 "${o[@]}" --json | sed -nE 's/.*"peak_memory_bytes":([0-9]+).*/\1/p')
        rm -rf run
        echo "# $d: planned $plan, used $used"
        [ $((used * 100)) -lt $((plan * 105)) ]
        [ $((used * 100)) -gt $((plan * 95)) ]
    done
}

@test "train: tokens that were read do not count as memory of the process" {
    plain_memory train
    mkdir long
    head -c 64M /dev/zero | tr '\0' '\1' > long/train.bin
    used=$("${T[@]}" m0 long -o run --json | sed -nE 's/.*"peak_memory_bytes":([0-9]+).*/\1/p')
    echo "# $used"
    [ "$used" -lt $((48 << 20)) ]
}

@test "train: an option that the optimiser or the schedule does not read is refused" {
    for o in "--momentum 0.5" "--nesterov" "--optimizer sgd --beta1 0.5" "--decay-steps 3" "--lr-schedule wsd --cycles 2"; do
        # shellcheck disable=SC2086
        run train m0 data -o idle --steps 1 $o
        [ "$status" -eq 2 ]
        [[ ${lines[0]} == "train: --"*": serves --"* ]]
        [ "${#lines[@]}" -eq 1 ]
        [ ! -e idle ]
    done
}
