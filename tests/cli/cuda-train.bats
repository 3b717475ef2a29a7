#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# train --device cuda: the CPU's losses, the same bits again, traces, plans, resumes on either side, and
# the files that remain when the device is too small or lost.
bats_require_minimum_version 1.5.0

load cuda

setup_file() {
    examples train
}

setup() {
    use_module
    own_folder
}

T=(train -q --peak-tflops 0 --seq-len 16 --batch-size 2 --lr 3e-3 --warmup 2)

# tensors FILE -> the data of a safetensors file, without the header and its history
tensors() {
    tail -c +$((9 + $(od -An -t u8 -N 8 "$1"))) "$1"
}

same_bits() { # same_bits RUN RUN
    cmp <(tensors "$1/latest/model.safetensors") <(tensors "$2/latest/model.safetensors")
    cmp "$1/latest/optimizer.safetensors" "$2/latest/optimizer.safetensors"
}

# field FILE EVENT KEY -> the values of a key, a line each
field() {
    sed -nE "/^\{\"event\":\"$2\"/s/.*\"$3\":([^,}]*).*/\1/p" "$1"
}

# close_to FILE FILE TOLERANCE: two columns of numbers of the same length, relative differences below
close_to() {
    paste "$1" "$2" | awk -v t="$3" 'NF != 2 { exit 1 } { d = $1 / $2 - 1; if (d > t || d < -t) { print; exit 1 } }
        END { if (!NR) exit 1 }'
}

# total KEY FILE -> a number of a plan
total() { sed -nE "s/.*\"$1\": ([0-9]+).*/\1/p" "$2"; }

# rows KEY FILE -> the sum of an object's numbers in a plan
rows() { sed -n "/\"$1\": {/,/}/p" "$2" | sed -nE 's/.*": ([0-9]+),?$/\1/p' | paste -sd+ | bc; }

@test "cuda-train: five steps, with validation, give the CPU's numbers" {
    for d in cpu cuda; do
        "${T[@]}" m0 data -o run-$d --steps 5 --gradient-accumulation-steps 2 --eval-every 2 --eval-batches 1 \
            --metrics $d.jsonl --device $d
        field $d.jsonl step loss > $d.loss
        field $d.jsonl step grad_norm > $d.norm
        field $d.jsonl step grad_p50 > $d.p50
        field $d.jsonl step update_ratio > $d.ratio
        field $d.jsonl eval loss > $d.eval
        field $d.jsonl step tokens > $d.tokens
    done
    [ "$(wc -l < cuda.loss)" -eq 5 ]
    [ "$(wc -l < cuda.eval)" -eq 3 ]
    close_to cuda.loss cpu.loss 1e-5
    close_to cuda.norm cpu.norm 1e-4
    close_to cuda.p50 cpu.p50 1e-3
    close_to cuda.ratio cpu.ratio 1e-2
    close_to cuda.eval cpu.eval 1e-5
    cmp cuda.tokens cpu.tokens
}

@test "cuda-train: sums of leaves are added on the device" {
    for n in 1 4; do
        for d in cpu cuda; do
            "${T[@]}" m0 data -o run-$d-$n --steps 3 --gradient-accumulation-steps 4 --leaves $n --metrics $d-$n.jsonl --device $d
            field $d-$n.jsonl step loss > $d.loss
            field $d-$n.jsonl step grad_norm > $d.norm
        done
        close_to cuda.loss cpu.loss 1e-5
        close_to cuda.norm cpu.norm 1e-4
    done
    run ! cmp -s run-cuda-1/latest/optimizer.safetensors run-cuda-4/latest/optimizer.safetensors
}

@test "cuda-train: ranks with a device each have the bits of one" {
    if real && [ "$(nvidia-smi -L | wc -l)" -lt 2 ]; then skip "this machine has one GPU"; fi
    export LM_EMU_DEVICES=2
    D=(--device cuda --deterministic --steps 4 --gradient-accumulation-steps 2 --leaves 2)
    "${T[@]}" m0 data -o one "${D[@]}"
    "${T[@]}" m0 data -o two "${D[@]}" --ranks 2 --metrics two.jsonl
    same_bits one two
    [ "$(field two.jsonl step comm_bytes_dp | head -1)" -gt 100000 ]
    [ -z "$(field two.jsonl step comm_exposed_share)" ]
    "${T[@]}" --resume two --steps 6 --device cuda --deterministic
    "${T[@]}" --resume one --steps 6 --device cuda --deterministic --ranks 2
    same_bits one two
    # no rank shares the device of another
    run --separate-stderr "${T[@]}" m0 data -o three "${D[@]}" --steps 1 --ranks 2 --device cuda:1
    [ "$status" -eq 1 ]
    [[ $stderr == "train: rank 1 of 2: cuda:2: this machine has 2 CUDA devices"* ]] || real
}

@test "cuda-train: ranks share the weights, each on its device, and checkpoints that are whole" {
    if real && [ "$(nvidia-smi -L | wc -l)" -lt 4 ]; then skip "this machine has fewer than four GPUs"; fi
    export LM_EMU_DEVICES=4
    for d in "cuda --mesh dp=2,tp=2" cpu; do
        "${T[@]}" m0 data -o "${d%% *}" --steps 3 --gradient-accumulation-steps 2 --leaves 2 --metrics "${d%% *}.jsonl" --device $d
        "${T[@]}" --resume "${d%% *}" --steps 5 --metrics "${d%% *}5.jsonl"
        cat "${d%% *}.jsonl" "${d%% *}5.jsonl" > all
        field all step loss > "${d%% *}.loss"
    done
    [ "$(wc -l < cuda.loss)" -eq 5 ]
    close_to cuda.loss cpu.loss 1e-5
    run ! --separate-stderr "${T[@]}" m0 data -o muon --steps 1 --device cuda --mesh tp=2 --optimizer muon
    [ "$status" -eq 2 ]
    [[ $stderr == *"it steps tensors as a whole, of which ranks on cuda"*" have parts: choose one of single elements"* ]] || { echo "$stderr"; false; }
}

@test "cuda-train: records name the device and its memory" {
    "${T[@]}" m0 data -o run --steps 2 --metrics m.jsonl --device cuda --peak-tflops 10 --json > out.json
    head -1 m.jsonl | grep -qE '"device":"cuda:0","kernels":"plain[^"]*","hardware":"[^"]*sm_[0-9]+[^"]*driver'
    [ "$(field m.jsonl step mfu | wc -l)" -eq 2 ]
    planned=$(field m.jsonl end device_memory_planned_bytes)
    [ "$planned" -gt 1000000 ]
    # a driver hands out blocks, which so small a run may find half empty
    real || [ "$(field m.jsonl end device_memory_bytes)" -ge "$planned" ]
    # operators are timed only on request
    [ -z "$(field m.jsonl end seconds_forward)" ]
    [ -n "$(field m.jsonl end seconds_steps)" ]
    grep -qE '"device_memory_planned_bytes":[0-9]+,"device_memory_bytes":[0-9]+,"peak_memory_bytes":' out.json
    run --separate-stderr train -v m0 data -o run2 --steps 1 --seq-len 16 --batch-size 2 --peak-tflops 10 --device cuda --stats
    [ "$status" -eq 0 ]
    grep -qE 'cuda:0 \(.*sm_.*\), kernels plain.*: .* TFLOP/s, .* % of the peak' <<< "$stderr"
    grep -qE 'of the device \(.* planned\)' <<< "$stderr"
    grep -qE 'forward +linear .*GFLOP/s' <<< "$stderr"
}

@test "cuda-train: the peak of several devices is their number times that of one" {
    if real && [ "$(nvidia-smi -L | wc -l)" -lt 2 ]; then skip "this machine has one GPU"; fi
    export LM_EMU_DEVICES=2 LM_EMU_CARD="NVIDIA GB200"
    for n in 1 2; do
        train -q m0 data -o run-$n --seq-len 16 --batch-size 2 --steps 1 --gradient-accumulation-steps 2 --leaves 2 \
            --device cuda --ranks $n --metrics run-$n.jsonl
        field run-$n.jsonl run peak_flops > peak-$n
    done
    # a card that is not in the table has no peak
    real || [ -s peak-1 ]
    jq -n --slurpfile one peak-1 --slurpfile two peak-2 -e '$two == [$one[] * 2]'
}

@test "cuda-train: --deterministic twice gives the same bits, whatever the threads" {
    "${T[@]}" m0 data -o a --steps 4 --dtype bf16 --deterministic --device cuda
    "${T[@]}" m0 data -o b --steps 4 --dtype bf16 --deterministic --device cuda -j 1
    same_bits a b
    "${T[@]}" m0 data -o again --steps 4 --dtype bf16 --deterministic --device cuda --recompute full
    same_bits a again
    grep -q '"deterministic": true' <(train --resume a --print-config --deterministic)
    if ! real; then
        LM_EMU_ORDER=backward "${T[@]}" m0 data -o c --steps 4 --dtype bf16 --deterministic --device cuda
        same_bits a c
    fi
}

@test "cuda-train: a stopped and resumed run has the bits of an uninterrupted one" {
    "${T[@]}" m0 data -o whole --steps 6 --save-every 3 --deterministic --device cuda
    "${T[@]}" m0 data -o half --steps 3 --deterministic --device cuda --lr-schedule constant
    train -q --resume whole/step-000003 -o again --device cuda
    same_bits whole again
    [ "$(grep '"sample"' whole/latest/state.json)" = "$(grep '"sample"' again/latest/state.json)" ]
    # the next batches were drawn already, but not trained on
    grep -q '"sample": 6,' half/latest/state.json
}

@test "cuda-train: from the device to the CPU and back" {
    "${T[@]}" m0 data -o a --steps 6 --save-every 2 --keep 0 --device cuda --metrics a.jsonl
    train -q --resume a/step-000002 -o b --steps 6 --device cpu --metrics b.jsonl
    train -q --resume b/step-000004 -o c --steps 6 --device cuda --metrics c.jsonl
    field a.jsonl step loss | tail -n 4 > a.loss
    field b.jsonl step loss > b.loss
    close_to a.loss b.loss 1e-4
    field b.jsonl step loss | tail -n 2 > b.last
    field c.jsonl step loss > c.loss
    close_to b.last c.loss 1e-4
}

@test "cuda-train: checkpoints as .lmz hold the same" {
    "${T[@]}" m0 data -o a --steps 3 --device cuda --deterministic
    "${T[@]}" m0 data -o b --steps 3 --device cuda --deterministic --checkpoint-format lmz
    compress-ckpt -q -d b/step-000003.lmz -o c
    cmp <(tensors a/latest/model.safetensors) <(tensors c/model.safetensors)
    cmp a/latest/optimizer.safetensors c/optimizer.safetensors
}

# of a trace: the operators in their order, and all other named events
operators() { awk -F'"' '/"name":/ { n = $4 } /"cat":/ { print n }' "$1"; }
others() { awk -F'"' '/"cat":/ { n = "" } /"name":/ { if (n != "") print n; n = $4 } END { print n }' "$1"; }

@test "cuda-train: a trace of one step has every operator, on either device" {
    for d in cpu cuda; do
        train m0 --dump-graph --seq-len 16 --batch-size 2 --device $d > both
        grep -v ' update ' both > graph
        # after the step: sums over the weights' blocks and their total, for a checkpoint
        grep ' update ' both | head -n -2 > update
        nodes=$(wc -l < graph) more=$(wc -l < update)
        [ "$more" -ge 5 ]
        "${T[@]}" m0 data -o run-$d --steps 4 --save-every 3 --gradient-accumulation-steps 2 --device $d --trace $d.json
        [ "$(grep -c '"micro_batch": 0' $d.json)" -eq "$nodes" ]
        [ "$(grep -c '"micro_batch": 1' $d.json)" -eq "$nodes" ]
        diff <(operators $d.json) <(cat graph graph update | awk '{ print $4 }')
        for key in flops_per_second bytes_per_second layer phase; do
            [ "$(grep -c "\"$key\"" $d.json)" -eq $((2 * nodes + more)) ]
        done
        for name in 'gradient norm' adamw draw begin write; do
            grep -q "\"name\": \"$name\"" $d.json
        done
    done
    # operators may be joined on one of them; the rest is the same
    diff <(others cpu.json) <(others cuda.json) | grep -v draw | grep '^[<>]' && return 1
    # an existing trace is not overwritten
    run -2 --separate-stderr "${T[@]}" m0 data -o run --steps 1 --trace cpu.json
    [ ! -e run/latest ]
    grep -q 'cpu.json: ' <<< "$stderr"
    [ -z "$(find . -name '.*.tmp.*')" ]
}

@test "cuda-train: the last step is traced when there are fewer than three" {
    "${T[@]}" m0 data -o run --steps 2 --device cuda --trace t.json
    grep -q '"phase": "forward"' t.json
    train --resume run --steps 2 --trace u.json 2> log
    grep -q 'u.json: no step was taken that could be traced' log
    [ ! -e u.json ]
}

@test "cuda-train: a plan lists memory of device and host separately" {
    mkdir plan
    cp m0/config.json plan
    train plan --dry-run --json --batch-size 4 --seq-len 16 --device cuda > p.json
    [ "$(rows device_memory p.json)" -eq "$(total device_memory_total p.json)" ]
    [ "$(rows memory p.json)" -eq "$(total memory_total p.json)" ]
    grep -q '"checkpoint snapshot (host)": ' <(sed -n '/"memory": {/,/}/p' p.json)
    grep -q '"optimiser states": ' <(sed -n '/"device_memory": {/,/}/p' p.json)
    train plan --dry-run --batch-size 4 --seq-len 16 --device cuda > table
    grep -q 'total of the device' table
    grep -q 'total of the host' table
    [ "$(ls plan)" = config.json ]
}

@test "cuda-train: the arena of the benchmark models is within 3 % of the lower bound" {
    mkdir plan
    for m in gpt2-124m gpt2-1.5b llama-1b llama-8b; do
        cp "$root/share/models/$m.json" plan/config.json
        for path in plain tensor; do
            for b in 1 16; do
                LM_CUDA=$path train plan --dry-run --json --dtype bf16 --batch-size $b --seq-len 1024 --device cuda > p.json
                paste <(total 'activations and scratch' p.json) <(total activation_lower_bound p.json) |
                    awk -v what="$m $path $b" '{ print what, $1, $2; exit !($2 > 1e8 && $1 >= $2 && $1 <= 1.03 * $2) }'
            done
        done
    done
}

@test "cuda-train: too little memory: planned and free bytes, and a change that fits" {
    emulated
    O=(m0 data -o run --steps 2 --seq-len 64 --batch-size 8 --device cuda)
    for b in 8 4 2 1; do
        train "${O[@]}" --dry-run --json --batch-size $b --gradient-accumulation-steps $((8 / b)) > $b.json
    done
    little=$(( ($(total device_memory_total 2.json) + $(total device_memory_total 4.json)) / 2 ))
    LM_EMU_MEMORY=$little run -1 --separate-stderr train -q "${O[@]}"
    [ "$(wc -l <<< "$stderr")" -eq 1 ]
    [[ $stderr == "train: cuda:0: the run needs "*" are free: --batch-size 2 --gradient-accumulation-steps 4 would need "* ]]
    [ ! -e run/latest ]
    # with that change the run fits
    LM_EMU_MEMORY=$little train -q --peak-tflops 0 "${O[@]}" --batch-size 2 --gradient-accumulation-steps 4
    least=$(total device_memory_total 1.json)
    # kernels need some memory that the plan does not include
    LM_EMU_MEMORY=$((least * 101 / 100)) run -1 --separate-stderr train -q "${O[@]}" -f --batch-size 1 \
        --gradient-accumulation-steps 8
    [[ $stderr == "train: cuda:0: the run needs "*" and room for kernels, "*" are free: "* ]]
    LM_EMU_MEMORY=$((least / 2)) run -1 --separate-stderr train -q "${O[@]}" -f
    [[ $stderr == *"no smaller --batch-size, nor --dtype bf16, nor a shorter --seq-len would do: use a smaller model" ]]
    LM_EMU_MEMORY=$((least / 2)) run -1 --separate-stderr train -q "${O[@]}" -f --dtype bf16
    [[ $stderr == *"no smaller --batch-size nor a shorter --seq-len would do: use a smaller model" ]]
}

@test "cuda-train: a lost device: one line, the last checkpoint, no incomplete files" {
    emulated
    for n in 1 120 300 420; do
        rm -rf run
        LM_EMU_FAIL=$n run --separate-stderr "${T[@]}" m0 data -o run --steps 6 --save-every 2 --device cuda --metrics m-$n.jsonl
        [ "$status" -eq 1 ]
        [ "$(grep -c '^train: cuda:0: ' <<< "$stderr")" -eq 1 ]
        [ "$(grep -vc '^emulated GPU: ' <<< "$stderr")" -eq 1 ]
        tail -1 m-$n.jsonl | grep -q '"event":"end","status":"failed"' || [ "$n" = 1 ]
        [ -z "$(find . -name '.*.tmp.*')" ]
    done
    inspect-model -q run > /dev/null
    "${T[@]}" m0 data -o whole --steps 6 --save-every 2 --device cuda
    train -q --resume run --steps 6 --device cuda
    same_bits run whole
}

@test "cuda-train: divergence: status 4, and the earlier weights are kept" {
    "${T[@]}" m0 data -o run --steps 2 --device cuda
    run --separate-stderr train -q --device cuda --resume run --steps 60 --lr 1000 --warmup 0 --max-grad-norm 0 \
        --save-every 1 --lr-schedule constant --weight-decay 10 --keep 1 --metrics m.jsonl
    [ "$status" -eq 4 ]
    [ "$(wc -l <<< "$stderr")" -eq 1 ]
    grep -q 'resume from run/step-' <<< "$stderr"
    tail -1 m.jsonl | grep -q '"status":"nan"'
    eval-model -q run data/val > /dev/null
}

@test "cuda-train: SIGTERM: a checkpoint of the step that was done" {
    "${T[@]}" m0 data -o run --steps 100000 --log-every 1 --metrics m.jsonl --device cuda &
    pid=$!
    for ((i = 0; i < 3000; i++)); do
        [ "$(field m.jsonl step step 2> /dev/null | wc -l)" -ge 2 ] && break
        sleep 0.02
    done
    kill -TERM $pid
    status=0
    wait $pid || status=$?
    [ "$status" -eq 143 ]
    [ "$(tail -1 m.jsonl | grep -o '"status":"[a-z]*"')" = '"status":"stopped"' ]
    [ "run/$(readlink run/latest)" = "$(field m.jsonl checkpoint path | tail -1 | tr -d '"')" ]
    [ "$(field m.jsonl step step | tail -1)" -eq "$(readlink run/latest | sed 's/step-0*//')" ]
}

@test "cuda-train: --dry-run --measure: the device's memory and time" {
    O=(m0 --dry-run --measure --seq-len 16 --batch-size 2 --steps 3600 --device cuda)
    LM_CUDA=plain run -0 --separate-stderr train "${O[@]}"
    [[ ${lines[-2]} == "measured: "*" tokens/s; 3600 steps take "*" hours, without evaluations and checkpoints" ]]
    [[ ${lines[-1]} == "fits here: "*" of the device that are free" ]]
    real && return
    LM_EMU_MEMORY=400000 run -0 --separate-stderr train -q "${O[@]}" --json
    [[ $output == *'"fits": false,'*'"cure": "no smaller '* ]]
    [[ $output != *hours* ]]
}

@test "train --device cuda: optimisers of formulas, products, codes and bases of matrices" {
    for o in adafactor muon:bf16=off adam-mini adamw8bit:min-8bit-size=1 'lion:cautious=on;*norm*=sm3' \
        soap:precondition-frequency=2 soap-muon:bf16=off,precondition-frequency=2 galore:rank=4,update-proj-gap=2 \
        ldadam:rank=4 q-galore:rank=4,update-proj-gap=2,stochastic-round=off; do
        "${T[@]}" m0 data -o cpu -f --steps 4 --optimizer "$o" --metrics c.jsonl
        "${T[@]}" m0 data -o gpu -f --steps 4 --optimizer "$o" --metrics g.jsonl --device cuda --deterministic
        # Eigenvectors of the null space of the gradients are arbitrary, and SOAP also steps along them.
        tolerance=1e-5
        [[ $o != soap* ]] || tolerance=5e-3
        close_to <(field c.jsonl step loss) <(field g.jsonl step loss) $tolerance
        "${T[@]}" m0 data -o again -f --steps 4 --optimizer "$o" --device cuda --deterministic
        same_bits gpu again
    done
}

@test "cuda-train: a mixture whose routers' biases follow the loads: the CPU's loads, and a resumed run's bits" {
    echo '{"model_type":"dots1","hidden_size":32,"intermediate_size":48,"moe_intermediate_size":16,"num_hidden_layers":3,
        "num_attention_heads":4,"num_key_value_heads":2,"n_routed_experts":8,"n_shared_experts":1,"num_experts_per_tok":2,
        "n_group":4,"topk_group":2,"first_k_dense_replace":1,"norm_topk_prob":true,"sliding_window":null}' > config.json
    init-model -q -f config.json --tokenizer m0/tokenizer.json -o mixture
    M=("${T[@]}" mixture data --steps 6 --gradient-accumulation-steps 2 --moe-z-loss-coeff 0.01 --moe-aux-loss-coeff 0.02)
    for d in cpu cuda; do
        "${M[@]}" -o mixture-$d --save-every 4 --keep 0 --metrics m-$d.jsonl --device $d
        field m-$d.jsonl step moe_aux_loss > aux-$d
        sed -n 's/.*"event":"experts".*"bias_max":\([^,]*\),"load":\(.*\)}$/\1 \2/p' m-$d.jsonl > loads-$d
    done
    [ "$(wc -l < loads-cuda)" -eq 12 ]
    cmp loads-cpu loads-cuda
    close_to aux-cuda aux-cpu 1e-5
    train -q --resume mixture-cuda/step-000004 -o mixture-again --device cuda
    same_bits mixture-cuda mixture-again
}
