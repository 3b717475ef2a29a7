#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# train --mesh ep=N: ranks share the windows of a micro-batch and the experts of mixtures; losses of one rank, files that any mesh
# resumes, refusals.
bats_require_minimum_version 1.5.0
load ranks.bash

setup_file() {
    root=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    export root
    cd "$BATS_FILE_TMPDIR"
    sh "$root/tests/cli/examples/train.sh"
    small=(--set hidden_size=32 --set num_hidden_layers=2 --set num_attention_heads=4 --set num_key_value_heads=2)
    init-model -q qwen3-moe-13m -t tok/tokenizer.json "${small[@]}" --set head_dim=16 --set moe_intermediate_size=24 -o mixture
    init-model -q llama-5m -t tok/tokenizer.json "${small[@]}" --set intermediate_size=48 -o llama
}

setup() {
    cd "$BATS_TEST_TMPDIR"
    for f in data mixture llama; do ln -s "$BATS_FILE_TMPDIR/$f" .; done
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    SGD=(train -q --peak-tflops 0 mixture data --seq-len 32 --batch-size 2 --lr 0.05 --optimizer sgd:momentum=0.9)
}

@test "train: ranks along ep have the losses of one after 20 steps" {
    "${SGD[@]}" -o one --metrics one.jsonl --steps 20 --eval-every 10
    "${SGD[@]}" -o two --metrics two.jsonl --steps 20 --eval-every 10 --mesh ep=2
    close one.jsonl two.jsonl 22
    grep -q '"ranks":2,"ranks_ep":2' two.jsonl
    grep -Eq '"event":"step".*"comm_bytes_ep":[1-9]' two.jsonl
    # the fullest rank, as it is and as it could be
    run ! grep rank_max_over_mean one.jsonl
    python3 - two.jsonl <<'END'
import json, sys

def copied(load):
    """the fuller of two ranks over the mean, with one slot more on each: copies of hot experts, then packing"""
    of = list(range(len(load)))
    for _ in range(2):
        of.append(max(range(len(load)), key=lambda k: load[k] / of.count(k)))
    parts = sorted((load[k] / of.count(k) for k in of), reverse=True)
    ranks = [[], []]
    for p in parts:
        min((r for r in ranks if len(r) < len(of) // 2), key=sum).append(p)
    return max(map(sum, ranks)) * 2 / sum(load)

n = 0
for line in open(sys.argv[1]):
    r = json.loads(line)
    if r['event'] != 'experts':
        continue
    half = len(r['load']) // 2
    full = max(sum(r['load'][:half]), sum(r['load'][half:])) * 2 / sum(r['load'])
    assert abs(r['rank_max_over_mean'] - full) < 1e-5, r
    assert 1 <= r['dealt_max_over_mean'] <= r['rank_max_over_mean'] + 1e-6, r
    assert abs(r['copied_max_over_mean'] - copied(r['load'])) < 1e-5, r
    n += 1
assert n == 40, n
END
    # loads are those of all rows
    diff <(grep '"event":"experts"' one.jsonl | head -2 | grep -o '"load":.*') <(grep '"event":"experts"' two.jsonl | head -2 | grep -o '"load":.*')
}

@test "train: every mixture along ep" {
    for p in mixtral-13m deepseek-v3-12m gpt-oss-12m qwen3-next-12m; do
        rm -rf m one two
        init-model -q $p -t "$BATS_FILE_TMPDIR/tok/tokenizer.json" -o m
        o=(train -q --peak-tflops 0 m data --seq-len 32 --batch-size 2 --steps 3 --optimizer sgd --lr 0.01)
        "${o[@]}" -o one --metrics one.jsonl -f
        "${o[@]}" -o two --metrics two.jsonl -f --mesh ep=2
        close one.jsonl two.jsonl 3 || { echo $p; false; }
    done
}

@test "train: along ep a rank has memory for the rows of its experts" {
    said() { # said MODEL ARGUMENT ...: bytes of the activations of all ranks
        train "$1" "$BATS_FILE_TMPDIR/data" --seq-len 256 --batch-size 4 --steps 2 --dry-run --json "${@:2}" |
            jq '.memory["activations and scratch"]'
    }
    for p in mixtral-13m deepseek-v2-12m deepseek-v3-12m gpt-oss-12m qwen3-next-12m qwen2-moe-13m; do
        rm -rf m
        init-model -q $p -t "$BATS_FILE_TMPDIR/tok/tokenizer.json" -o m
        for more in "" "--recompute full"; do
            # shellcheck disable=SC2086
            one=$(said m $more) four=$(said m $more --mesh ep=4) all=$(said m $more --mesh ep=4 --expert-room 1e6)
            [ "$four" -le $((one * 5 / 4)) ] && [ "$all" -gt $((one * 3 / 2)) ] || { echo "$p $more: $one $four $all"; false; }
        done
    done
    # what a capacity lets through is the most
    [ "$(said m --mesh ep=4 --moe-expert-capacity-factor 1)" -eq "$(said m --mesh ep=4 --moe-expert-capacity-factor 1 --expert-room 1e6)" ]
    [ "$(said m --mesh ep=4 --moe-expert-capacity-factor 1)" -lt "$(said m --mesh ep=4)" ]
    run --separate-stderr -2 train -q m data -o no --steps 2 --expert-room 2
    [[ $stderr == "train: --expert-room: serves ranks that share experts: "* ]] || { echo "$stderr"; false; }
    run --separate-stderr -2 train -q m data -o no --steps 2 --mesh pp=2,ep=2 --expert-room 2
    [[ $stderr == "train: --expert-room: has no effect along pp, "* ]] || { echo "$stderr"; false; }
}

@test "train: optimisers of matrices along ep, whole files, and any mesh afterwards" {
    for o in muon:bf16=off lamb adafactor adamw8bit:min_8bit_size=256; do
        rm -rf one two four ./*.jsonl
        a=(train -q --peak-tflops 0 mixture data --seq-len 32 --batch-size 2 --lr 1e-4 --steps 4 --save-every 2 --leaves 2
            --gradient-accumulation-steps 2 --optimizer "$o")
        "${a[@]}" -o one --metrics one.jsonl
        "${a[@]}" -o two --metrics two.jsonl --mesh ep=2
        "${a[@]}" -o four --metrics four.jsonl --mesh dp=2,ep=2 --zero 1
        close one.jsonl two.jsonl 4 && close one.jsonl four.jsonl 4 || { echo "$o"; false; }
        for mesh in ep=2 tp=2,ep=2 dp=1; do
            rm -rf more more.jsonl
            cp -r two more
            rm -rf more/step-000004
            train -q --resume more --mesh $mesh --metrics more.jsonl
            paste <(losses one.jsonl | tail -2) <(losses more.jsonl | tail -2) |
                awk '{ d = $1 - $2; if (NF != 2 || d > 1e-6 * $1 || -d > 1e-6 * $1) { print; exit 1 } }' || { echo "$o $mesh"; false; }
        done
    done
}

@test "train: memory along ep that grows, and the same bits" {
    while read -r more; do
        rm -rf small all
        # shellcheck disable=SC2086
        "${SGD[@]}" --steps 4 --eval-every 2 $more -o small --expert-room 0.05
        # shellcheck disable=SC2086
        "${SGD[@]}" --steps 4 --eval-every 2 $more -o all --expert-room 1e6
        same_bits small all || { echo "$more"; false; }
    done <<'END'
--mesh ep=2 --dtype bf16
--mesh ep=2 --recompute full
--mesh ep=2 --moe-aux-loss-type layer --moe-aux-loss-coeff 0.1 --moe-expert-capacity-factor 1.5
--mesh dp=2,ep=2 --zero 3 --zero-prefetch 2 --grad-accum-steps 2 --leaves 2
END
}

@test "train: routing with capacities, losses and biases along ep" {
    o=("${SGD[@]}" --steps 4)
    for more in "--moe-expert-capacity-factor 1" "--moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity" \
        "--moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01"; do
        rm -rf one two ./*.jsonl
        # shellcheck disable=SC2086
        "${o[@]}" $more -o one --metrics one.jsonl
        # shellcheck disable=SC2086
        "${o[@]}" $more -o two --metrics two.jsonl --mesh ep=2
        close one.jsonl two.jsonl 4 || { echo "$more"; false; }
    done
}

@test "train: ep beside dp and tp, for threads and for processes" {
    "${SGD[@]}" -o one --metrics one.jsonl --steps 4 --grad-accum-steps 2 --leaves 2
    for mesh in dp=2,ep=2 tp=2,ep=2; do
        rm -rf four four.jsonl
        "${SGD[@]}" -o four --metrics four.jsonl --steps 4 --grad-accum-steps 2 --leaves 2 --mesh $mesh
        close one.jsonl four.jsonl 4 || { echo $mesh; false; }
    done
    command -v mpirun >/dev/null || skip "mpirun is not installed"
    mpirun -n 4 --oversubscribe "${SGD[@]}" -o processes --steps 4 --grad-accum-steps 2 --leaves 2 --mesh tp=2,ep=2
    same_bits four processes
}

@test "train: a run along ep that stopped goes on with its bits, and on any other mesh" {
    "${SGD[@]}" -o whole --steps 6 --mesh ep=2 --metrics whole.jsonl --grad-accum-steps 2 --leaves 2
    "${SGD[@]}" -o part --steps 6 --mesh ep=2 --save-every 3 --grad-accum-steps 2 --leaves 2
    rm -rf part/step-000006
    for mesh in ep=2 dp=2,ep=2 tp=2 dp=1; do
        rm -rf more
        cp -r part more
        train -q --resume more --mesh $mesh --metrics more.jsonl
        paste <(losses whole.jsonl | tail -3) <(losses more.jsonl | tail -3) |
            awk '{ d = $1 - $2; if (d > 1e-6 * $1 || -d > 1e-6 * $1) { print; exit 1 } }' || { echo $mesh; false; }
        [ $mesh != ep=2 ] || same_bits whole more
    done
    # files are whole, whatever wrote them
    "${SGD[@]}" -o two --mesh ep=2 --steps 1 --lr 0
    "${SGD[@]}" -o one --steps 1 --lr 0
    cmp one/latest/model.safetensors two/latest/model.safetensors
}

@test "train: plans along ep, and what cannot be" {
    o=(mixture data --seq-len 32 --batch-size 2 --steps 2 --optimizer sgd --mesh ep=2)
    train -q --peak-tflops 0 "${o[@]}" -o run --metrics m.jsonl
    train "${o[@]}" --dry-run --json > plan.json
    said() { grep -o "\"comm_bytes_ep\": *[0-9]*" "$1" | tail -1 | tr -d -c 0-9; }
    # the bytes of rows that return depend on what experts they are of
    [ "$(said m.jsonl)" -ge $(($(said plan.json) * 9 / 10)) ]
    [ "$(said m.jsonl)" -le $(($(said plan.json) * 11 / 10)) ]
    refused() { # refused PATTERN ARGUMENT ...
        run --separate-stderr -2 train -q "${@:2}" -o no --seq-len 32 --steps 2
        [[ $stderr == *"$1"* ]] || { echo "$stderr"; false; }
        [ "${#stderr_lines[@]}" -eq 1 ]
        [ ! -e no ]
    }
    refused "train: --mesh: ep=2 shares experts, of which this model has 0: choose dp=2" llama data --mesh ep=2
    refused "train: --mesh: ep=3 does not divide 2 windows of a micro-batch: choose ep=2" mixture data --mesh ep=3 --batch-size 2
    refused "--sequence-parallel: splits the rows along tp" mixture data --mesh tp=2,ep=2 --batch-size 2 --sequence-parallel
}

@test "train: a router along ep that is not finite is named" {
    cp -rL mixture bad
    "$root/tests/cli/edit-tensors" bad/model.safetensors model.layers.1.mlp.gate.weight nan 7
    run --separate-stderr -4 train -q --peak-tflops 0 bad data --seq-len 32 --batch-size 2 --steps 2 -o no --mesh ep=2
    [[ $stderr == *"model.layers.1.mlp.gate.weight"* ]] || { echo "$stderr"; false; }
}

@test "train: a state of one number is written once, by a rank that has its tensor" {
    sums() { # the numbers of tensors: schedule-free's sums of weights
        python3 - "$1/latest/optimizer.safetensors" <<'END'
import json, struct, sys
raw = open(sys.argv[1], 'rb').read()
n = struct.unpack('<Q', raw[:8])[0]
for name, t in sorted(json.loads(raw[8:8 + n]).items()):
    if name.startswith('weight_sum.'):
        print(name, struct.unpack('<f', raw[8 + n + t['data_offsets'][0]:8 + n + t['data_offsets'][1]])[0])
END
    }
    o=(--seq-len 16 --batch-size 4 --gradient-accumulation-steps 4 --steps 2 --optimizer schedule-free)
    for m in mixture llama; do
        train -q --peak-tflops 0 $m data "${o[@]}" -o one -f
        [ "$(sums one | grep -vc " 0.0$")" -gt 16 ] || { sums one; false; }
        while read -r of mesh; do
            [ "$of" = $m ] || [ "$of" = both ] || continue
            # shellcheck disable=SC2086
            train -q --peak-tflops 0 $m data "${o[@]}" -o ranks -f --mesh $mesh
            diff <(sums one) <(sums ranks) || { echo "$m $mesh"; false; }
        done <<'END'
both pp=2,tp=2
mixture dp=2,ep=2 --zero 1 --leaves 2
mixture dp=2,ep=2,tp=2 --zero 2 --leaves 2
mixture pp=2,ep=2
both dp=2,tp=2,pp=2 --leaves 2
llama dp=2,tp=2,pp=2 --zero 1 --leaves 2
END
    done
}
