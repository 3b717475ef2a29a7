#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# train: ranks that share the micro-batches of a step have the bits of one; resumes with other numbers of them; refusals.
bats_require_minimum_version 1.5.0
load ranks.bash

setup_file() {
    root=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    export root
    cd "$BATS_FILE_TMPDIR"
    sh "$root/tests/cli/examples/train.sh"
    init-model -q qwen3-moe-13m -t tok/tokenizer.json --set hidden_size=32 --set num_hidden_layers=2 \
        --set num_attention_heads=4 --set num_key_value_heads=2 --set head_dim=16 --set moe_intermediate_size=24 -o mixture
}

setup() {
    cd "$BATS_TEST_TMPDIR"
    ln -s "$BATS_FILE_TMPDIR/data" "$BATS_FILE_TMPDIR/m0" "$BATS_FILE_TMPDIR/mixture" .
}

@test "train: two and four ranks have the files and records of one" {
    rest='embed*|lm_head|*norm*=adamw'
    for o in "--optimizer adamw --dropout 0.1" "--optimizer muon;$rest" "--optimizer adafactor --max-grad-norm 0.1" \
        "--dtype bf16 --no-document-mask" "--optimizer adamw:ema=0.9 --clip-value 0.01"; do
        rm -rf one two four ./*.jsonl
        # shellcheck disable=SC2086
        "${T[@]}" m0 data -o one "${FOUR[@]}" $o --eval-every 2 --metrics one.jsonl
        # shellcheck disable=SC2086
        "${T[@]}" m0 data -o two "${FOUR[@]}" $o --eval-every 2 --metrics two.jsonl --ranks 2 -j 2
        # shellcheck disable=SC2086
        "${T[@]}" m0 data -o four "${FOUR[@]}" $o --eval-every 2 --metrics four.jsonl --ranks 4 --mesh dp=4
        for r in two four; do
            same_files one $r || { echo "$o: $r"; false; }
            diff <(numbers one.jsonl) <(numbers $r.jsonl) || { echo "$o: $r"; false; }
        done
        [ "$(numbers one.jsonl | wc -l)" -ge 9 ]
    done
    grep -q '"event":"step".*"comm_exposed_share":0[.]' four.jsonl
    run ! grep -q comm_exposed_share one.jsonl
    grep -q '"ranks":4,"leaves":4' four.jsonl
}

@test "train: ranks of a mixture of experts have the loads, losses and files of one" {
    M=("${T[@]}" mixture data "${FOUR[@]}" --moe-aux-loss-coeff 0.02 --moe-z-loss-coeff 0.01 --moe-router-noise 0.1)
    "${M[@]}" -o one --metrics one.jsonl
    "${M[@]}" -o two --metrics two.jsonl --ranks 2
    "${M[@]}" -o four --metrics four.jsonl --ranks 4
    for r in two four; do
        same_files one $r
        diff <(numbers one.jsonl) <(numbers $r.jsonl)
    done
    grep -q '"event":"experts"' one.jsonl
}

@test "train: ranks have the bits of one with modules that predict tokens further on, biases of routers, masks and spans" {
    set=()
    for kv in hidden_size=32 intermediate_size=48 num_hidden_layers=2 num_attention_heads=4 num_key_value_heads=4 \
        q_lora_rank=14 kv_lora_rank=20 qk_nope_head_dim=12 qk_rope_head_dim=8 v_head_dim=10 n_routed_experts=8 \
        num_experts_per_tok=2 moe_intermediate_size=16 first_k_dense_replace=1 tie_word_embeddings=false \
        num_nextn_predict_layers=2; do
        set+=(--set "$kv")
    done
    tok=$BATS_FILE_TMPDIR/tok/tokenizer.json
    init-model -q deepseek-v3-12m -t "$tok" "${set[@]}" -o ahead
    train-tokenizer -q -m wordpiece -V 64 -o words/tokenizer.json "$BATS_FILE_TMPDIR/clean.jsonl"
    init-model -q bert-4m -t words --set hidden_size=32 --set intermediate_size=64 --set num_hidden_layers=2 -o masks
    shard-data -q --tokenizer words --add-special --val-fraction 0.1 -o masked "$BATS_FILE_TMPDIR/clean.jsonl"
    sentinels=(-s '<pad>' -s '</s>' -s '<unk>')
    for i in {0..19}; do
        sentinels+=(-s "<extra_id_$i>")
    done
    train-tokenizer -q -m unigram -V 120 "${sentinels[@]}" -o pieces/tokenizer.json "$BATS_FILE_TMPDIR/clean.jsonl"
    shard-data -q --tokenizer pieces --val-fraction 0.3 -o cut "$BATS_FILE_TMPDIR/clean.jsonl"
    init-model -q t5-9m -t pieces --set d_model=32 --set d_kv=8 --set d_ff=48 --set num_layers=2 \
        --set num_decoder_layers=1 --set num_heads=2 --set dropout_rate=0.1 -o spans
    for m in "ahead data" "masks masked" "spans cut"; do
        rm -rf one four
        # shellcheck disable=SC2086
        "${T[@]}" $m -o one "${FOUR[@]}" --eval-every 3 --eval-batches 0 --metrics one.jsonl -f
        # shellcheck disable=SC2086
        "${T[@]}" $m -o four "${FOUR[@]}" --eval-every 3 --eval-batches 0 --metrics four.jsonl -f --ranks 4
        same_files one four || { echo "$m"; false; }
        diff <(numbers one.jsonl) <(numbers four.jsonl) || { echo "$m"; false; }
    done
    "${T[@]}" ahead data -o one -f --metrics one.jsonl
    grep -q '"mtp_losses"' one.jsonl
    grep -q '"bias_max"' one.jsonl
}

@test "train: micro-batches and leaves are as many as ranks, unless they are given" {
    "${T[@]}" m0 data -o one "${FOUR[@]}"
    for r in "--ranks 4" "--mesh dp=4" "--ranks 4 --mesh dp=4"; do
        # shellcheck disable=SC2086
        "${T[@]}" m0 data -o four -f $r
        same_files four one # with the history: the command of one rank that makes the same
        head -c 20000 four/latest/model.safetensors | grep -a -q -e '--gradient-accumulation-steps.*4.*--leaves.*4'
    done
    "${T[@]}" m0 data -o plain
    run ! grep -a -q -e '--leaves' plain/latest/model.safetensors
    grep -q '"gradient-accumulation-steps": *4' four/latest/state.json
    grep -q '"leaves": *4' four/latest/state.json
    "${T[@]}" m0 data -o other --gradient-accumulation-steps 4 # one leaf
    run ! cmp -s other/latest/optimizer.safetensors one/latest/optimizer.safetensors
}

@test "train: a run resumes on any number of ranks, to the bit" {
    "${T[@]}" m0 data -o whole "${FOUR[@]}" --dropout 0.1 --keep 0 --save-every 2 --ranks 4
    for n in 2 4; do
        for ranks in 1 2 4; do
            rm -rf again
            train -q --resume whole/step-00000$n -o again --ranks $ranks
            same_bits whole again || { echo "from $n with $ranks"; false; }
        done
    done
    rm -rf again
    train -q --resume whole/step-000002 -o again # the number of ranks is not kept
    same_bits whole again
    run --separate-stderr train --resume whole/step-000002 -o no --ranks 3
    [ "$status" -eq 2 ]
    [ "$stderr" = "train: --ranks: 3 ranks do not divide the 4 leaves of the sums of a step: give --ranks 2, or give --leaves for sums in another order" ]
    train -q --resume whole/step-000002 -o other --ranks 3 --leaves 3 --gradient-accumulation-steps 3
    [ "$(readlink other/latest)" = step-000006 ]
}

@test "train: SIGTERM with ranks writes a checkpoint, from which one rank goes on with the same bits" {
    C=("${T[@]}" m0 data "${FOUR[@]}" --lr-schedule constant)
    "${C[@]}" -o run --steps 1M --ranks 2 --metrics m.jsonl &
    pid=$!
    wait_for grep -qs '"event":"step","step":5,' m.jsonl
    kill -TERM $pid
    status=0
    wait $pid || status=$?
    [ "$status" -eq 143 ]
    [ -z "$(find . -name '.*.tmp.*')" ]
    step=$(grep '"event":"step"' m.jsonl | tail -1 | sed -E 's/.*"step":([0-9]+),.*/\1/')
    [ "$(readlink run/latest)" = "$(printf 'step-%06d' "$step")" ]
    train -q --resume run --steps $((step + 2))
    "${C[@]}" -o whole --steps $((step + 2))
    same_bits whole run
}

@test "train: early stopping, its best checkpoint and the list of them do not depend on the ranks" {
    E=("${T[@]}" m0 data "${FOUR[@]}" --lr 0.1 --lr-schedule constant --steps 40 --eval-every 1 --keep 0)
    for n in 1 2 4; do
        "${E[@]}" -o whole$n --early-stop 2 --ranks $n --metrics $n.jsonl
        "${E[@]}" -o run$n --save-every 1 --steps 2 --ranks $n # the best one of a resumed run is known to all of them
        train -q --resume run$n --steps 40 --ranks $n --early-stop 2
        for r in whole run; do
            [ "$(readlink $r$n/best)" = "$(readlink ${r}1/best)" ]
            [ "$(cd $r$n && echo step-*)" = "$(cd ${r}1 && echo step-*)" ]
        done
        diff <(numbers 1.jsonl) <(numbers $n.jsonl)
    done
    [ "$(readlink whole1/latest)" != step-000040 ]
    [ "$(readlink whole1/latest)" != "$(readlink whole1/best)" ]
}

@test "train: a checkpoint of four ranks that fails ends the run with one line; whole ones stay" {
    load ../inject/inject
    t=("${T[@]}" m0 data "${FOUR[@]}" --save-every 2 --ranks 4 -f)
    "${t[@]}" -o whole --keep 0
    whole_or_none() { # also: status 0 is that of a whole run
        for c in run/step-*; do
            [ -e "$c" ] || continue
            cmp "$c/optimizer.safetensors" "whole/${c##*/}/optimizer.safetensors" || return 1
            [ -s "$c/state.json" ] || return 1
        done
        [ "$1" -ne 0 ] || [ "$(readlink run/latest)" = step-000006 ]
    }
    inject_each rename 8 whole_or_none "${t[@]}" -o run
    inject_each fsync 16 whole_or_none "${t[@]}" -o run
    inject_each write/3 80 whole_or_none "${t[@]}" -o run
}

@test "train: each of four ranks writes its part of a checkpoint" {
    for form in safetensors lmz; do
        strace -f -qq -e trace=pwrite64 -e signal=none -o log "${T[@]}" m0 data -o "$form" "${FOUR[@]}" --ranks 4 \
            --checkpoint-format $form || skip "no strace"
        awk '$NF > 50000 && !seen[$1]++ { n++ } END { print n + 0 }' log > $form.n # threads
    done
    [ "$(cat safetensors.n)" -eq 4 ]
    [ "$(cat lmz.n)" -eq 0 ]
}

@test "train: too little memory for four ranks: the number that fits is named" {
    plan() { train m0 --dry-run --json -j 1 --seq-len 32 "$@"; }
    number() { sed -nE "s/^ *\"$1\": ([0-9]+),?/\1/p" p.json | head -n 1; }
    plan --batch-size 100000 > p.json
    n=$(($(number memory_free) * 35 / 100 * 1000 / ($(number memory_total) / 100)))
    plan --batch-size $n --ranks 4 > p.json
    grep -q '"cure": "--ranks 2 would need ' p.json || { cat p.json; false; }
}

@test "train: what ranks cannot do is refused in one line, before anything is read" {
    no() { # no TEXT OPTION ...
        local text=$1
        shift
        run --separate-stderr train nothing nothing -o no "$@"
        [ "$status" -eq 2 ]
        [ "$stderr" = "train: $text" ] || { echo "$stderr"; false; }
        [ ! -e no ]
    }
    no "--gradient-accumulation-steps: 4 ranks do not divide the 6 micro-batches of a step: give 4, or give --ranks 3" \
        --ranks 4 --gradient-accumulation-steps 6
    no "--leaves: 4 leaves do not divide the 6 micro-batches of a step: give --leaves 3" \
        --leaves 4 --gradient-accumulation-steps 6
    no "ranks: 2 ranks do not divide the 1 leaf of the sums of a step: give --mesh dp=1,pp=2" \
        --mesh dp=2,pp=2 --gradient-accumulation-steps 4 --leaves 1
    no "--ranks: each of 2 ranks would add up 3 leaves, no power of two: the order of the sums would change: give --ranks 1" \
        --ranks 2 --leaves 6 --gradient-accumulation-steps 6
    "${T[@]}" m0 data --dry-run --measure --mesh dp=300 --gradient-accumulation-steps 300 > plan
    grep -q '^not measured: this machine cannot run a step of so many ranks$' plan
    no "--mesh: 257 ranks are more than the 256 that one process has: start the processes with mpirun -n, or plan them with --dry-run" --mesh dp=257
    no "--mesh: it has 4 ranks, and --ranks 2: give --mesh dp=2" --ranks 2 --mesh dp=4
    no "--mesh: ranks share by ep on processors, not on cuda: share by dp, tp, pp and cp (ulysses), or give --device cpu" \
        --mesh dp=2,ep=2 --gradient-accumulation-steps 2 --device cuda
    no "--mesh: it has 2 ranks, and --ranks 4: give --mesh dp=4" --ranks 4 --mesh dp=2
    no "--mesh: 'xp=2' is not the size of an axis: write AXIS=N[,...]: axes dp pp cp tp ep, each once" --ranks 2 --mesh xp=2
    no "--mesh: 'dp=0' is not the size of an axis: write AXIS=N[,...]: axes dp pp cp tp ep, each once" --ranks 2 --mesh pp=1,dp=0
    run --separate-stderr align-model m0 data -o no --loss dpo --ranks 2 --device cuda
    [ "$status" -eq 2 ]
    [[ $stderr == "align-model: --ranks: several ranks compute on processors, not on cuda: "* ]]
    no "--zero: ranks share states on processors, not on cuda: give 0, or --device cpu" \
        --ranks 2 --zero 1 --device cuda
    run train m0 data -o no --ranks 257
    [ "$status" -eq 2 ]
}

@test "train: a rank that fails is named, once; nothing half written stays" {
    cp -rL m0 bad
    truncate -s -8 bad/model.safetensors
    run --separate-stderr "${T[@]}" bad data -o no --ranks 2
    [ "$status" -eq 1 ]
    [ "$(wc -l <<< "$stderr")" -eq 1 ]
    [ ! -e no ]
    cp -rL data torn
    size=$(stat -c %s torn/train.bin) # ids that no model has, in the second half
    printf '\377%.0s' $(seq $((size / 4))) | dd of=torn/train.bin bs=1 seek=$((size / 2)) conv=notrunc status=none
    run --separate-stderr "${T[@]}" m0 torn -o torn-run --ranks 4 --steps 100
    [ "$status" -eq 1 ]
    [[ $stderr =~ ^"train: rank "[0-3]" of 4: torn/train: "[^$'\n']*$ ]] || { echo "$stderr"; false; }
    [ -z "$(find torn-run -name 'step-*' 2> /dev/null)" ]
    run --separate-stderr "${T[@]}" m0 data -o run --ranks 4 --optimizer sgd --lr 1000 --max-grad-norm 0 --steps 200 --warmup 0
    [ "$status" -eq 4 ]
    [[ $stderr == "train: rank 0 of 4: step "*" is "* ]] || { echo "$stderr"; false; }
    [ "$(wc -l <<< "$stderr")" -eq 1 ]
    [ -z "$(find . -name '.*.tmp.*')" ]
}

@test "train: plans count the memory of all ranks and of leaves" {
    bytes() { sed -nE "s/^ *\"$2\": ([0-9]+),?/\1/p" "$1" | head -n 1; }
    train m0 -j 1 --dry-run --json --batch-size 1 --seq-len 32 > one.json
    train m0 -j 1 --dry-run --json --batch-size 1 --seq-len 32 --ranks 4 > four.json
    train m0 -j 1 --dry-run --json --batch-size 1 --seq-len 32 --leaves 4 --gradient-accumulation-steps 4 > leaves.json
    [ "$(bytes four.json ranks)" -eq 4 ]
    for k in 'gradients \(f32\)' 'optimiser states' 'activations and scratch'; do
        [ "$(bytes four.json "$k")" -eq $((4 * $(bytes one.json "$k"))) ]
    done
    [ "$(bytes four.json program)" -eq "$(bytes one.json program)" ]
    [ "$(bytes leaves.json 'gradients of leaves')" -eq $((2 * $(bytes one.json 'gradients \(f32\)'))) ]
    [ "$(bytes leaves.json tokens_per_step)" -eq 128 ]
    train m0 --dry-run --ranks 2 | grep -q '^total of 2 ranks '
    train m0 data --dry-run --measure --json --batch-size 1 --seq-len 32 --ranks 2 > measured.json
    grep -q '"measured_steps"' measured.json
}

@test "train: the trace of all ranks has rows for communication, exposed and hidden, and one clock" {
    "${T[@]}" m0 data -o run --ranks 2 --trace t.json
    python3 - << 'P'
import json
events = json.load(open("t.json"))["traceEvents"]
names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
assert names == {1: "rank 0", 2: "rank 1"}, names
rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
spans = [e for e in events if e["ph"] == "X"]
for rank in (1, 2):
    own = [e for e in spans if e["pid"] == rank]
    count = lambda row: sum(rows[rank, e["tid"]] == row for e in own)
    assert count("forward") > 10 and count("dweight") > 5 and count("optimizer") >= 2
    assert count("communication") + count("communication, hidden") > 2
    assert any(e["name"] == "gradients" for e in own)
    assert all(0 <= e["ts"] < 60e6 for e in own)
# a sum of both ends on neither before the other has begun it
ends = {r: max(e["ts"] + e["dur"] for e in spans if e["pid"] == r) for r in (1, 2)}
begins = {r: min(e["ts"] for e in spans if e["pid"] == r) for r in (1, 2)}
assert begins[1] < ends[2] and begins[2] < ends[1]
P
    "${T[@]}" m0 data -o gathered --ranks 2 --zero 3 --trace w.json
    python3 - << 'P'
import json
events = json.load(open("w.json"))["traceEvents"]
rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
spans = [e for e in events if e["ph"] == "X" and e["name"] == "weights"]
row = lambda name: [e for e in spans if rows[e["pid"], e["tid"]] == name]
# forward and backward of two layers, embedding and head, on two ranks
assert len(spans) >= 2 * 2 * 4 and len(row("weights, hidden")) >= 4
assert len(row("communication")) + len(row("weights, hidden")) == len(spans)
P
    "${T[@]}" m0 data -o one --trace one.json
    run ! grep -q '"communication"' one.json
}
