#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Models for the examples of merge-models(1): base/, its fine-tunes math/ and code/, a LoRA folder
# adapter/, mergekit.yaml, and held-out tokens in data-math/ and data-code/.
# usage: merge-models.sh, in the folder where the examples run
set -eu

small="--set num_hidden_layers=2 --set hidden_size=32 --set intermediate_size=48 --set vocab_size=96"
seed=1
for m in base math code; do
    # shellcheck disable=SC2086 # several options
    init-model -q llama-1m $small --seed $seed -o $m/
    seed=$((seed + 1))
done

cat > mergekit.yaml << 'YAML'
merge_method: passthrough
slices:
  - sources:
      - model: math
        layer_range: [0, 2]
  - sources:
      - model: code
        layer_range: [1, 2]
        parameters:
          scale: 0.5
YAML

# Rank 1 on one projection: A [1,32] and B [32,1], all numbers 0.5.
mkdir adapter
cat > adapter/adapter_config.json << 'JSON'
{"peft_type": "LORA", "r": 1, "lora_alpha": 2, "target_modules": ["q_proj"], "base_model_name_or_path": "base"}
JSON
module=base_model.model.model.layers.0.self_attn.q_proj
header="{\"$module.lora_A.weight\":{\"dtype\":\"F32\",\"shape\":[1,32],\"data_offsets\":[0,128]},"
header="$header\"$module.lora_B.weight\":{\"dtype\":\"F32\",\"shape\":[32,1],\"data_offsets\":[128,256]}}"
while [ $((${#header} % 8)) -ne 0 ]; do header="$header "; done
{
    # shellcheck disable=SC2059 # the format is made of escapes
    printf "$(printf '\\%03o\\%03o\\000\\000\\000\\000\\000\\000' $((${#header} % 256)) $((${#header} / 256)))"
    printf '%s' "$header"
    i=0
    while [ $i -lt 64 ]; do
        printf '\000\000\000\077'
        i=$((i + 1))
    done
} > adapter/adapter_model.safetensors

# 300 ids below 96, two bytes each.
k=3
for m in math code; do
    mkdir data-$m
    i=0
    while [ $i -lt 300 ]; do
        # shellcheck disable=SC2059
        printf "$(printf '\\%03o\\000' $((i * i * k % 89)))"
        i=$((i + 1))
    done > data-$m/val.bin
    k=7
done
