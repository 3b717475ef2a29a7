#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# peft-tune by ranks that share a frozen base: adapters with the results of one rank, resumes, refusals.
bats_require_minimum_version 1.5.0
load ranks.bash

setup_file() {
    root=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    export root
    cd "$BATS_FILE_TMPDIR"
    sh "$root/tests/cli/examples/train.sh"
    small=(--set hidden_size=32 --set num_hidden_layers=4 --set num_attention_heads=4 --set num_key_value_heads=2)
    init-model -q llama-5m -t tok/tokenizer.json "${small[@]}" --set intermediate_size=48 -o llama
    init-model -q qwen3-moe-13m -t tok/tokenizer.json "${small[@]}" --set head_dim=16 --set moe_intermediate_size=24 -o mixture
    # matrices of several blocks of 65,536 numbers, of which ranks can have parts
    init-model -q llama-5m -t tok/tokenizer.json --set hidden_size=128 --set num_hidden_layers=2 --set num_attention_heads=4 \
        --set num_key_value_heads=2 --set intermediate_size=1024 --dtype bf16 -o wide
    printf '{"prompt": "What is %s?", "completion": "It is %s."}\n' one two three four five six seven eight > qa.jsonl
}

setup() {
    cd "$BATS_TEST_TMPDIR"
    command -v mpirun >/dev/null || skip "mpirun is not installed"
    for f in llama mixture wide qa.jsonl; do ln -s "$BATS_FILE_TMPDIR/$f" .; done
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    P=(peft-tune -q llama qa.jsonl --peak-tflops 0 --seq-len 64 --batch-size 1 --no-packing --lr 1e-2 --dtype f32 "${FOUR[@]}" --lr-schedule constant)
}

ranks() {
    timeout -s KILL 100 mpirun -n "$1" --oversubscribe "${@:2}" -j 1
}

# same_numbers RUN RUN WHAT
same_numbers() {
    for f in "$1"/latest/*.safetensors; do
        cmp <(tensors "$f") <(tensors "$2/latest/${f##*/}") || { echo "$3: $f"; return 1; }
    done
}

@test "peft-tune: ranks along pp have the adapters of one" {
    # trained everywhere, with magnitudes, from the base's own numbers, before the first layer, behind the last one
    for how in "lora" "dora --schedule zb-h1" "pissa" "p-tuning" "lora --layers 3" "full --train *norm*" "houlsby"; do
        rm -rf one two ./*.jsonl
        ln -s "$BATS_FILE_TMPDIR/qa.jsonl" .
        # shellcheck disable=SC2086 # words
        "${P[@]}" -o one --steps 2 --method ${how%--schedule*} --metrics one.jsonl
        # shellcheck disable=SC2086
        ranks 2 "${P[@]}" -o two --steps 2 --method $how --metrics two.jsonl --mesh pp=2
        same_numbers one two "$how"
        diff <(losses one.jsonl) <(losses two.jsonl)
    done
}

@test "peft-tune: ranks along tp, ep and cp have the adapters of one up to rounding" {
    ranks_as_one() { # MESH RANKS MODEL ARGUMENT ...
        local mesh=$1 n=$2 m=$3
        shift 3
        o=("$m" qa.jsonl --peak-tflops 0 --seq-len 64 --batch-size 2 --no-packing --lr 1e-2 --dtype f32 --steps 3 --gradient-accumulation-steps 2 --leaves 1)
        rm -rf one many one.jsonl many.jsonl
        peft-tune -q "${o[@]}" "$@" -o one --metrics one.jsonl
        ranks "$n" peft-tune -q "${o[@]}" "$@" -o many --metrics many.jsonl --mesh "$mesh"
        close one.jsonl many.jsonl 3 || { echo "$mesh $*"; return 1; }
        [ "$(tensors one/adapter_model.safetensors | wc -c)" -eq "$(tensors many/adapter_model.safetensors | wc -c)" ]
    }
    # heads of keys and values for some of the ranks, some modules of a packed product, magnitudes, tensors that stay whole
    ranks_as_one tp=4 4 llama --method lora --target all-linear
    ranks_as_one tp=2 2 llama --method lora --target q_proj,v_proj
    ranks_as_one tp=2 2 llama --method dora
    ranks_as_one tp=2 2 llama --method oft
    ranks_as_one tp=2,pp=2 4 llama --method lora
    ranks_as_one cp=2 2 llama --method lora
    ranks_as_one ep=2 2 mixture --method lora --target experts.gate_up_proj,experts.down_proj,o_proj
}

@test "peft-tune: a frozen base in BF16, in panels of each rank's part, is that of one rank" {
    o=(wide qa.jsonl --peak-tflops 0 --seq-len 64 --batch-size 1 --no-packing --lr 1e-2 --dtype bf16 --steps 2 "${FOUR[@]}")
    peft-tune -q "${o[@]}" -o one --metrics one.jsonl
    ranks 2 peft-tune -q "${o[@]}" -o two --metrics two.jsonl --mesh pp=2
    same_numbers one two pp=2
    ranks 2 peft-tune -q "${o[@]}" -o parts --metrics parts.jsonl --mesh tp=2
    paste <(losses one.jsonl) <(losses parts.jsonl) |
        awk '{ d = $1 - $2; if (d > 1e-3 * $1 || -d > 1e-3 * $1) { print; exit 1 } }'
}

@test "peft-tune: factors of low-rank paths are split as their weights" {
    ranks 2 peft-tune -q llama qa.jsonl --dump-graph --target all-linear --method lora --seq-len 64 --mesh tp=2 > graph
    # rows are gathered before products and shared out behind them; columns, which each rank has some of, are not
    run ! grep -E 'all_gather .*dim=1' graph
    run ! grep -E '(forward|dinput) +L[0-3] +all_reduce' graph
    grep -q 'lora_up' graph
}

@test "peft-tune: a run along pp goes on with its bits on any other mesh" {
    "${P[@]}" -o one --steps 3
    ranks 2 "${P[@]}" -o two --steps 1 --mesh pp=2
    ranks 4 peft-tune -q --resume two --steps 2 --mesh dp=2,pp=2
    peft-tune -q --resume two --steps 3
    same_numbers one two resumed
}

# as_one RUN HOW RANKS ARGUMENT ...: the method has the bits of RUN
as_one() {
    local one=$1 how=$2 n=$3
    shift 3
    rm -rf many many.jsonl
    # shellcheck disable=SC2086 # words
    ranks "$n" "${P[@]}" -o many --steps 2 --method $how --metrics many.jsonl "$@"
    same_numbers "$one" many "$how $*"
    diff <(losses "$one.jsonl") <(losses many.jsonl)
}

@test "peft-tune: ranks along dp share states, gradients and weights of what trains, beside a frozen base" {
    # a base in numbers, in codes, rows that an encoder makes of what is shared, an average, whole matrices, the base's own
    for how in "lora" "qlora" "p-tuning" "lora --optimizer adamw:ema=0.9" "dora --optimizer muon" "full --train *norm*"; do
        rm -rf one one.jsonl
        # shellcheck disable=SC2086 # words
        "${P[@]}" -o one --steps 2 --method $how --metrics one.jsonl
        for level in 1 2 3; do as_one one "$how" 2 --mesh dp=2 --zero $level; done
    done
    # parts of matrices, frozen ones in panels beside them; stages, of which one has each frozen tensor
    P=("${P[@]/#llama/wide}")
    for how in "lora --rank 512 --target all-linear --dtype bf16" "full --train *mlp* --dtype bf16"; do
        rm -rf one one.jsonl
        # shellcheck disable=SC2086
        "${P[@]}" -o one --steps 2 --method $how --metrics one.jsonl
        as_one one "$how" 4 --mesh dp=4 --zero 3
    done
    rm -rf one one.jsonl
    "${P[@]}" -o one --steps 2 --method full --train '*down_proj*' --metrics one.jsonl
    as_one one "full --train *down_proj*" 4 --mesh dp=2,pp=2 --zero 3
}

@test "peft-tune: a run whose ranks share what trains goes on with its bits on any mesh and level" {
    "${P[@]}" -o one --steps 3
    ranks 4 "${P[@]}" -o four --steps 1 --mesh dp=4 --zero 3
    ranks 2 peft-tune -q --resume four --steps 2 --mesh dp=2 --zero 1
    peft-tune -q --resume four --steps 3
    same_numbers one four resumed
}

@test "peft-tune: frozen weights in panels are in the files of a part that trains" {
    for type in f32 bf16; do
        "${P[@]/#llama/wide}" -o $type --steps 1 --method full --train '*norm*' --lr 0 --dtype $type
    done
    cmp <(tensors f32/model.safetensors) <(tensors bf16/model.safetensors)
}

@test "peft-tune: what ranks along pp do not share is refused by name" {
    # refuse LINE ARGUMENT ...
    refuse() {
        local line=$1
        shift
        ranks 2 "${P[@]}" -o run --steps 1 --mesh pp=2 "$@" 2> said && return 1
        grep -Fq "peft-tune: $line" said || { cat said; false; }
        [ ! -e run ]
    }
    refuse "--mesh: ranks that share a base keep it in numbers, and it would be in codes: share the batch (dp)" --method qlora
    refuse "pp: this method computes with all tensors of an adapter after each step: use dp" --method adalora
    refuse "--zero: this method computes with all tensors of an adapter after each step: give --zero 0" --method adalora \
        --mesh dp=2 --zero 1
    refuse "pp: this adapter has a tensor that several stages share: use dp" --method prefix
}
