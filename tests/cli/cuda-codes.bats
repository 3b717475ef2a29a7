#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Weights that stay in their codes with --device cuda: results of a decoded copy, and codes in the memory of the device.

bats_require_minimum_version 1.5.0
load cuda

setup_file() {
    examples generate # run/ with a tokenizer
}

setup() {
    use_module
    cd "$BATS_TEST_TMPDIR"
    tokens=$BATS_FILE_TMPDIR/run
    head -c 700 "$root/README.md" > text.txt
}

loss() { # MODEL DTYPE
    eval-model -q --json --dtype "$2" -b 2 --seq-len 64 --device cuda "$1" text.txt | sed -E 's/.*"loss":([0-9.]+).*/\1/'
}

# The losses and the texts of a decoded copy; FORMAT is in the memory of the device, and takes less of it.
same() { # CODES FORMAT
    convert-model -q -f --to hf --dtype f32 -o numbers "$1"
    for LM_CUDA in plain tensor; do
        export LM_CUDA
        [ $LM_CUDA = plain ] && dtype=f32 most=1e-6 || dtype=bf16 most=1e-3
        awk -v a="$(loss "$1" $dtype)" -v b="$(loss numbers $dtype)" -v most=$most \
            'BEGIN { e = (a - b) / b; exit !(e < most && e > -most) }'
    done
    generate -v --dtype f32 -n 6 -T 0 --ignore-eos -p 'The system' --device cuda "$1" > a 2> err
    generate -q --dtype f32 -n 6 -T 0 --ignore-eos -p 'The system' --device cuda numbers > b
    cmp a b
    grep -q "weights: .*$2 " err
    run ! grep -q "decoded when loaded: .*$2" err
}

@test "gpt-oss as published: experts in MXFP4" {
    init-model -q gpt-oss-12m -t "$tokens" --set hidden_size=64 --set intermediate_size=32 --set num_hidden_layers=2 \
        --set head_dim=16 --set sliding_window=8 --set num_local_experts=4 -o m
    "$root/tests/cli/publish-codes" m mxfp4
    same m mxfp4
}

@test "DeepSeek as published: FP8 with scales of blocks of 128 x 128" {
    init-model -q deepseek-v3-12m -t "$tokens" --set hidden_size=128 --set intermediate_size=128 --set num_hidden_layers=2 --set num_attention_heads=2 --set num_key_value_heads=2 \
        --set moe_intermediate_size=128 --set n_routed_experts=4 --set n_group=2 --set topk_group=1 \
        --set num_nextn_predict_layers=0 -o m
    "$root/tests/cli/publish-codes" m fp8
    same m fp8_e4m3_128
}

@test "GGUF files: embeddings, heads and layers in several types" {
    init-model -q llama-5m -t "$tokens" --set hidden_size=256 --set intermediate_size=256 --set num_hidden_layers=1 -o m
    for type in q8_0 q4_k_m; do
        convert-model -q -f --type $type -o m.gguf m
        same m.gguf "${type%_m}"
    done
}
