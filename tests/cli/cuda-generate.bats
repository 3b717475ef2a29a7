#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# generate, eval-model and merge-models --search with --device cuda: the results of the CPU.

load cuda

setup_file() {
    examples generate
    init-model -q gpt2-124m --set n_layer=2 --set n_embd=48 --set n_head=3 --set n_positions=256 --tokenizer tok/tokenizer.json -o gpt/
}

setup() {
    use_module
    cd "$BATS_FILE_TMPDIR"
    out=$BATS_TEST_TMPDIR
}

@test "generate --device cuda: the texts of the cpu, greedy and drawn, in both kinds of model" {
    head -n 5 prompts.jsonl > "$out/p.jsonl"
    printf '{"prompt": "%s"}\n' "$(head -n 20 corpus.txt | tr '\n' ' ')" >> "$out/p.jsonl" # more than a chunk
    for m in run gpt; do
        for how in '-T 0' '--seed 3 --top-p 0.9' '--seed 4 --top-k 20 --repetition-penalty 1.2'; do
            # shellcheck disable=SC2086 # options
            set -- $how --dtype f32 -n 7 --batch-size 3
            generate -q $m/ "$@" "$out/p.jsonl" > "$out/a"
            generate -q $m/ "$@" --device cuda "$out/p.jsonl" > "$out/b"
            [ "$(wc -l < "$out/b")" -eq 6 ]
            cmp "$out/a" "$out/b"
        done
    done
}

@test "generate --device cuda: log-probabilities; messages name the device and its faster type" {
    generate -q run/ -p 'The system' -n 6 -T 0 --json --logprobs --dtype f32 > "$out/a"
    generate -q run/ -p 'The system' -n 6 -T 0 --json --logprobs --dtype f32 --device cuda > "$out/b"
    ids() { grep -o '"token_ids":\[[0-9,]*\]' "$1"; }
    probs() { grep -o '"logprobs":\[[-0-9.,e]*\]' "$1" | grep -oE -- '-?[0-9][-0-9.e]*'; }
    [ "$(ids "$out/a")" = "$(ids "$out/b")" ]
    paste <(probs "$out/a") <(probs "$out/b") | awk '{ d = $1 - $2; if (d > 1e-4 || d < -1e-4) exit 1 } END { exit NR != 6 }'
    run generate -v run/ -p 'The system' -n 3 --device cuda
    [ "$status" -eq 0 ]
    [[ "$output" == *"bf16 on cuda:0"* ]]
}

@test "generate --device cuda --kv: the texts of the cpu, behind a prompt of several pieces" {
    printf '{"prompt": "%s"}\n{"prompt": "The system"}\n' "$(head -c 1700 corpus.txt | tr '\n' ' ')" > "$out/p.jsonl"
    for kv in int8 k=auto,v=int4 kivi:residual=32 k4v2 turboquant:kbits=3; do
        set -- -q run/ -n 12 -T 0 --dtype f32 --kv "$kv" "$out/p.jsonl"
        generate "$@" > "$out/a"
        generate "$@" --device cuda > "$out/b"
        [ "$(wc -l < "$out/b")" -eq 2 ]
        cmp "$out/a" "$out/b"
    done
}

@test "generate --device cuda --kv, LM_CUDA=tensor: products of integers give the log-probabilities of the cpu" {
    emulated # cuBLASLt must be installed elsewhere
    prompt=$(head -c 1700 corpus.txt | tr '\n' ' ')
    for kv in int8 kivi:residual=32 k4v2; do
        set -- -q run/ -n 6 -T 0 --dtype bf16 --json --logprobs --kv "$kv" -p "$prompt"
        generate "$@" > "$out/a"
        LM_CUDA=tensor generate "$@" --device cuda > "$out/b"
        # as far as the tokens are the same, which BF16 may change
        for f in a b; do
            paste <(grep -o '"token_ids":\[[0-9,]*\]' "$out/$f" | grep -oE '[0-9]+') \
                <(grep -o '"logprobs":\[[-0-9.,e]*\]' "$out/$f" | grep -oE -- '-?[0-9][-0-9.e]*') > "$out/$f.txt"
        done
        paste "$out/a.txt" "$out/b.txt" |
            awk '$1 != $3 { exit } { d = $2 - $4; if (d > 0.1 || d < -0.1) bad = 1; n++ } END { exit bad || n < 2 }'
    done
}

@test "generate --device cuda --kv: policies keep the tokens that the cpu keeps" {
    printf '{"prompt": "%s"}\n{"prompt": "The system"}\n' "$(head -c 1700 corpus.txt | tr '\n' ' ')" > "$out/p.jsonl"
    for kv in snapkv:capacity=64+int8 h2o:keep=0.5 streaming:window=60 kvmerge:keep=0.5+int8; do
        set -- -q run/ -n 12 -T 0 --dtype f32 --kv "$kv" "$out/p.jsonl"
        generate "$@" > "$out/a"
        generate "$@" --device cuda > "$out/b"
        [ "$(wc -l < "$out/b")" -eq 2 ]
        cmp "$out/a" "$out/b"
    done
}

@test "generate --device cuda: saved caches go on, with a policy, in codes, and computed by a deadline" {
    text=$(head -c 1700 corpus.txt | tr '\n' ' ')
    ids() { grep -o '"token_ids":\[[0-9,]*\]' "$1" | grep -o '[0-9,]*' | tr ',' '\n'; }
    logs() { grep -o '"logprobs":\[[-0-9.,e]*\]' "$1" | grep -o '[-0-9.,e]*' | tail -n 1 | tr ',' '\n'; }
    for kv in auto kivi:residual=32 h2o:keep=0.3 h2o:keep=0.3+int8:group=16 streaming:window=50 snapkv:capacity=60,window=8; do
        set -- -q run/ -T 0 --ignore-eos --json --logprobs --dtype f32 --device cuda --kv "$kv"
        generate "$@" -n 16 -p "$text" > "$out/whole"
        generate "$@" -n 9 -p "$text" --save-cache "$out/a.kv" -f > "$out/begin"
        generate "$@" -n 7 -p '' --load-cache "$out/a.kv" > "$out/end"
        [ "$(ids "$out/whole")" = "$(ids "$out/begin"; ids "$out/end")" ]
        [ "$(logs "$out/whole")" = "$(logs "$out/begin"; logs "$out/end")" ]
    done
    set -- -T 0 --json --logprobs --dtype f32 --device cuda
    generate -q run/ "$@" -n 0 -p "$text" --save-cache "$out/b.kv" > /dev/null
    generate -q run/ "$@" -n 7 -p ' one' --load-cache "$out/b.kv" > "$out/whole"
    quantize-kv -q "$out/b.kv" -m cachegen --level 0 --level 2 -o "$out/l.kv"
    run -0 --separate-stderr generate -v run/ "$@" -n 7 -p ' one' --load-cache "$out/l.kv" --deadline 1h
    [[ "$stderr" == *"levels of its chunks: - -"* ]]
    [ "$output" = "$(cat "$out/whole")" ]
}

@test "generate --device cuda --serve-batch: the texts of the cpu, for any memory, host and disk" {
    mkdir -p "$out/cache"
    for i in $(seq 12); do printf '{"prompt": "%s"}\n' "$(head -n $((i % 5 + 1)) corpus.txt | tr '\n' ' ')"; done > "$out/p.jsonl"
    set -- -q run/ -n 50 -T 0 --ignore-eos --dtype f32 --context 512 --serve-batch 12
    generate "$@" "$out/p.jsonl" > "$out/a"
    generate "$@" --device cuda "$out/p.jsonl" > "$out/b"
    [ "$(wc -l < "$out/b")" -eq 12 ]
    cmp "$out/a" "$out/b"
    for tier in '"up" --kv-host 2M' "\"in\" --kv-disk $out/cache:2M"; do
        # shellcheck disable=SC2086 # an option and its value
        generate "$@" --device cuda --kv-memory 700k ${tier#* } "$out/p.jsonl" --json > "$out/c"
        tail -n 1 "$out/c" | grep -q "${tier%% *}:[1-9]"
        sed -e '$d' -e 's/,"first_token_seconds":[0-9.e-]*//' "$out/c" > "$out/d"
        cmp "$out/a" "$out/d"
    done
}

@test "eval-model --device cuda: the loss of the cpu" {
    loss() { grep -o '"loss":[-0-9.e+]*' "$1" | cut -d: -f2; }
    for m in run gpt; do
        eval-model -q $m/ held-out.txt --seq-len 40 > "$out/a"
        eval-model -q $m/ held-out.txt --seq-len 40 --device cuda > "$out/b"
        grep -q '"device":"cpu"' "$out/a"
        grep -q '"device":"cuda:0"' "$out/b"
        awk -v a="$(loss "$out/a")" -v b="$(loss "$out/b")" 'BEGIN { d = a - b; exit !(a > 0 && d < 1e-5 && d > -1e-5) }'
    done
}

@test "merge-models --search --device cuda: the candidates of the cpu; --device is the search's" {
    init-model -q llama-1m --set num_hidden_layers=2 --set hidden_size=64 --tokenizer tok/tokenizer.json --seed 2 -o "$out/two/"
    for d in cpu cuda; do
        merge-models -q --method linear run/ "$out/two/" --search grid --grid 0.2,0.8 --val held-out.txt --val-tokens 60 \
            --seq-len 40 --device $d -o "$out/$d/" > "$out/$d.jsonl"
    done
    [ "$(grep -c candidate\" "$out/cuda.jsonl")" -ge 2 ]
    numbers() { grep -o '"objective":[-0-9.e+]*' "$1" | cut -d: -f2; }
    paste <(numbers "$out/cpu.jsonl") <(numbers "$out/cuda.jsonl") | awk '{ d = $1 - $2; if (d > 1e-5 || d < -1e-5) exit 1 } END { exit NR < 3 }'
    cmp "$out/cpu/model.safetensors" "$out/cuda/model.safetensors" ||
        cmp <(tail -c 100000 "$out/cpu/model.safetensors") <(tail -c 100000 "$out/cuda/model.safetensors")
    run merge-models --method linear run/ "$out/two/" --device cuda -o "$out/none/"
    [ "$status" -eq 2 ]
    [[ "$output" == *"--device"*"--search"* ]]
}

@test "generate --device cuda: a format that no kernel reads is decoded when loaded, as -v says" {
    convert-model -q --type f16 -o "$out/m.gguf" run
    generate -q "$out/m.gguf" -p 'The system' -n 6 -T 0 --dtype f32 > "$out/a"
    generate -v "$out/m.gguf" -p 'The system' -n 6 -T 0 --dtype f32 --device cuda > "$out/b" 2> "$out/err"
    cmp "$out/a" "$out/b"
    grep -q 'weights: f32 .*; decoded when loaded: f16' "$out/err"
}

@test "generate --device cuda: weights with NaN are status 4, and no text" {
    mkdir "$out/bad"
    cp run/* "$out/bad/"
    dd if=/dev/zero bs=1 count=400 status=none | tr '\0' '\377' |
        dd of="$out/bad/model.safetensors" bs=1 seek=$(($(stat -c %s run/model.safetensors) - 400)) conv=notrunc status=none
    run -4 --separate-stderr generate -q "$out/bad/" -n 3 --device cuda prompts.jsonl
    [[ "$stderr" == "generate: $out/bad/: logits: not a number"* ]]
    run ! grep -q '"text"' <<< "$output"
}

@test "generate --device cuda: if the context does not fit, the message names one that does" {
    [ "${LM_TEST_CUDA-}" != real ] || skip "a GPU has room"
    export LM_EMU_MEMORY=8M
    run generate -q run/ -p 'The system' -n 3 --context 1024 --batch-size 1 --dtype f32 --device cuda
    [ "$status" -eq 0 ]
    run generate -q run/ -n 3 --context 1024 --batch-size 64 --dtype f32 --device cuda prompts.jsonl
    [ "$status" -eq 1 ]
    [[ "$output" == "generate: cuda:0: weights take "*"caches of 64 times 1024 tokens "*" of 8.00 MiB are free: --context "* ]]
    fits=${output##*--context }
    generate -q run/ -n 3 --context "${fits%% *}" --batch-size 64 --dtype f32 --device cuda prompts.jsonl > "$out/a"
    [ "$(wc -l < "$out/a")" -eq 5 ]
}

@test "generate --device cuda: a GGUF file and FP8 weights give the results of decoded copies" {
    convert-model -q --type q8_0 -o "$out/m.gguf" run
    compress-ckpt -q --weights fp8_e4m3 -o "$out/m.lmz" run > /dev/null
    for m in m.gguf m.lmz; do
        convert-model -q -f --to hf --dtype f32 -o "$out/numbers" "$out/$m"
        for dtype in f32 bf16; do
            generate -q -p 'The system' -n 8 -T 0 --dtype $dtype --device cuda "$out/$m" > "$out/a"
            generate -q -p 'The system' -n 8 -T 0 --dtype $dtype --device cuda "$out/numbers" > "$out/b"
            cmp "$out/a" "$out/b"
        done
    done
}
