#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# For the examples of train(1): the tokens in data/, the model m0/ of half a million parameters, and the text
# clean.jsonl that they come from.
# usage: train.sh, in the folder where the examples run, with the tools on PATH
set -eu

sh "$(dirname "$0")/train-tokenizer.sh"
train-tokenizer -q -V 400 -o tok/tokenizer.json clean.jsonl
shard-data -q --tokenizer tok/tokenizer.json --val-fraction 0.05 -o data/ clean.jsonl
cat > config.json <<END
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 384, "hidden_size": 64,
 "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
 "hidden_act": "silu", "max_position_embeddings": 256, "initializer_range": 0.02, "rms_norm_eps": 1e-05,
 "rope_theta": 10000.0, "tie_word_embeddings": true, "eos_token_id": 0}
END
init-model -q config.json --tokenizer tok/tokenizer.json -o m0/
