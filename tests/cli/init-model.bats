#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# init-model: presets, configs, tokenizers, refusals.

setup() {
    root=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    cd "$BATS_TEST_TMPDIR"
}

small=(--set num_hidden_layers=2 --set hidden_size=64 --set intermediate_size=96)

@test "init-model: presets have the sizes of their names" {
    while read -r name parameters; do
        run init-model "$name" --dry-run --json
        [ "$status" -eq 0 ]
        [[ "$output" == *"\"parameters\":$parameters,"* ]]
    done << 'END'
llama-1m 1180800
llama-5m 5065472
llama-60m 58073600
llama-1b 1235814400
llama-8b 8030261248
gpt2-124m 124439808
gpt2-355m 354823168
gpt2-774m 774030080
gpt2-1.5b 1557611200
gpt2-5m 5260032
mistral-7b 7241732096
mistral-5m 5065472
qwen2-0.5b 494032768
qwen2-5m 5069312
qwen3-0.6b 596049920
qwen3-5m 5066112
olmo2-1b 1484916736
olmo2-5m 5068032
olmo3-7b 7298011136
olmo3-5m 5068032
gemma2-2b 2614341888
gemma2-5m 5068032
gemma3-270m 268098176
gemma3-1b 999885952
gemma3-5m 5068672
mixtral-8x7b 46702792704
mixtral-8x22b 140620634112
mixtral-13m 12858112
qwen1.5-moe-14b 14315784192
qwen2-moe-57b 57408658944
qwen2-moe-13m 13160192
qwen3-moe-30b 30532122624
qwen3-moe-235b 235093634560
qwen3-coder-480b 480154875392
qwen3-moe-13m 13186432
qwen3-next-80b 79674391296
qwen3-next-12m 11859472
qwen3.5-0.8b 752393024
qwen3.5-2b 1881825088
qwen3.5-4b 4205751296
qwen3.5-9b 8953803264
qwen3.5-27b 26895998464
qwen3.5-5m 5090368
gpt-oss-20b 20914757184
gpt-oss-120b 116829156672
gpt-oss-12m 11578672
deepseek-v2-lite 15706484224
deepseek-v2 235741434880
deepseek-v2-12m 11968192
deepseek-v3 671026419200
deepseek-v3-12m 11968224
dots1-142b 142774381696
dots1-12m 12643744
bert-base 109514298
bert-large 335174458
bert-4m 4410112
bloom-560m 559214592
bloom-1b1 1065314304
bloom-1b7 1722408960
bloom-3b 3002557440
bloom-7b1 7069016064
bloom-176b 176247271424
bloom-12m 12221184
hybrid-5m 5065472
block-sparse-5m 5065472
gaussian-5m 5065472
gaussian-norm-5m 5065472
linear-5m 5065472
retention-5m 5393472
END
    run init-model --list
    [ "$status" -eq 0 ]
    [ "${#lines[@]}" -eq 77 ]
}

@test "init-model: a padding id of a preset that the tokenizer does not have is left out" {
    "$root/tests/digests/make-inputs"
    init-model -q olmo2-1b -t tokenizer.json --set hidden_size=64 --set num_hidden_layers=1 --set num_attention_heads=2 \
        --set num_key_value_heads=2 --set intermediate_size=8 -o m
    grep -q '"pad_token_id": null' m/config.json
    grep -q '"eos_token_id": 256' m/config.json
}

@test "init-model: the folder has the tensors of the config, and a history" {
    init-model -q llama-1m "${small[@]}" -o m
    run inspect-model m
    [ "$status" -eq 0 ]
    [[ "$output" == *"llama (LlamaForCausalLM)"* ]]
    [[ "$output" == *"tensors    20"* ]]
    [[ "$output" == *"history    init-model "*"llama-1m"* ]]
    grep -q '"hidden_size": 64' m/config.json
    grep -q '"torch_dtype": "float32"' m/config.json
}

@test "init-model: statistics of the weights" {
    init-model -q gpt2-124m --set n_layer=8 --set n_embd=64 --set n_head=4 -o m
    std() { inspect-model --stats --json --only "$1" m | grep -o '"std":[0-9.e-]*' | head -n 1 | cut -d: -f2; }
    awk -v a="$(std '*wte.weight')" -v b="$(std '*h.3.mlp.c_proj.weight')" -v c="$(std '*ln_1.bias')" \
        'BEGIN { exit !(a > 0.0199 && a < 0.0201 && b > 0.0049 && b < 0.0051 && c == 0) }'
}

@test "init-model: the same weights for any -j and shard size, others for another seed" {
    init-model -q llama-1m "${small[@]}" --seed 3 -j 1 -o a
    init-model -q llama-1m "${small[@]}" --seed 3 -j 5 -o b
    cmp a/model.safetensors b/model.safetensors || true # the history differs
    init-model -q llama-1m "${small[@]}" --seed 3 --max-shard-size 200K -o c
    init-model -q llama-1m "${small[@]}" --seed 4 -o d
    [ -e c/model.safetensors.index.json ]
    inspect-model --check a b
    inspect-model --check a c
    run inspect-model --check a d
    [ "$status" -eq 3 ]
}

@test "init-model: bf16 weights are the f32 ones rounded" {
    init-model -q llama-1m "${small[@]}" -o a
    init-model -q llama-1m "${small[@]}" --dtype bf16 -o b
    inspect-model --check --rtol 0.004 a b
    [ "$(stat -c %s b/model.safetensors)" -lt "$(($(stat -c %s a/model.safetensors) * 6 / 10))" ]
    grep -q '"torch_dtype": "bfloat16"' b/config.json
}

@test "init-model: vocabulary and special ids come from the tokenizer, which is copied" {
    sh "$root/tests/cli/examples/init-model.sh"
    init-model -q llama-1m "${small[@]}" -t tok/tokenizer.json -o a
    grep -q '"vocab_size": 400' a/config.json
    grep -q '"eos_token_id": 0' a/config.json
    cmp tok/tokenizer.json a/tokenizer.json
    init-model -q llama-1m "${small[@]}" -t tok --pad-vocab-to 64 -o b
    grep -q '"vocab_size": 448' b/config.json
    cmp tok/tokenizer.json b/tokenizer.json
    run init-model llama-1m --set vocab_size=300 -t tok -o c
    [ "$status" -eq 2 ]
    [[ "$output" == *"vocab_size 300 is less than the tokenizer's 400"* ]]
    [ ! -e c ]
}

@test "init-model: a config.json and a folder are presets too" {
    init-model -q llama-1m "${small[@]}" -o a
    init-model -q a/config.json -o b
    init-model -q a -o c
    inspect-model --check a b
    inspect-model --check a c
}

@test "init-model: what it refuses" {
    refuses() { # STATUS TEXT ARGUMENT ...
        local want=$1 text=$2
        shift 2
        run init-model "$@" -o x
        [ "$status" -eq "$want" ]
        [[ "$output" == *"$text"* ]]
        [ "${#lines[@]}" -eq 1 ]
        [ ! -e x ]
    }
    refuses 2 "did you mean llama-5m?" lama-5m
    refuses 2 'did you mean n_layer?' gpt2-124m --set n_layers=3
    refuses 2 'a llama config has no key "n_layer"' llama-1m --set n_layer=3
    refuses 2 "is not an assignment" llama-1m --set hidden_size
    refuses 2 "llama-1m with --set: 'hidden_size' is a string" llama-1m --set hidden_size=many
    refuses 2 "does not divide" llama-1m --set num_key_value_heads=3
    echo '{"model_type": "mamba"}' > config.json
    refuses 2 'unknown model_type "mamba"' ./config.json
    echo '[' > config.json
    refuses 1 "config.json" ./config.json
    run init-model llama-1m
    [ "$status" -eq 2 ]
    mkdir x && touch x/mine
    run init-model llama-1m -o x
    [ "$status" -eq 2 ]
    [[ "$output" == *"exists already"* ]]
}

@test "init-model: --dry-run of eight billion parameters needs little memory" {
    bash -c 'ulimit -v 400000; init-model --version' > version 2>&1 || skip "a limit of memory cannot be set here"
    run bash -c 'ulimit -v 400000; init-model llama-8b --dtype bf16 --dry-run'
    [ "$status" -eq 0 ]
    [[ "$output" == *"16060522496"* ]]
}
