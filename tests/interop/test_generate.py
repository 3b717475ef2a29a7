#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare generate and eval-model with transformers on folders that transformers wrote, and init-model's folders the
other way; speaks TAP.

Environment: LM_TEST_BUILD, a build folder with bin/."""
import json
import os
import subprocess
import sys
import tempfile

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (AutoModelForCausalLM, BloomConfig, DeepseekV2Config, DeepseekV3Config, Gemma2Config, Gemma3TextConfig,
                          GPT2Config, GptOssConfig, LlamaConfig, MistralConfig, Olmo2Config, Olmo3Config, Qwen2Config, Qwen3Config,
                          Qwen3NextConfig, Qwen3_5TextConfig)
import tap
from tap import BUILD, ROOT, check

TEXT = open(os.path.join(ROOT, "README.md"), encoding="utf-8").read()
NEW = 40


def tool(name, *args):
    r = subprocess.run([os.path.join(BUILD, "bin", name), *args], capture_output=True, text=True)
    if r.returncode:
        print("# " + r.stderr)
    return r.stdout


def tokenizer(tmp):
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=500, show_progress=False, special_tokens=["<|endoftext|>"],
                                                      initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    t.save(os.path.join(tmp, "tokenizer.json"))
    return t


def configs():
    llama = dict(vocab_size=500, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.15, bos_token_id=0, eos_token_id=0)
    yield "gpt2", GPT2Config(vocab_size=500, n_embd=64, n_layer=3, n_head=4, n_positions=256, initializer_range=0.15,
                             bos_token_id=0, eos_token_id=0)
    yield "bloom", BloomConfig(vocab_size=500, hidden_size=72, n_layer=3, n_head=6, initializer_range=0.15, bos_token_id=0,
                               eos_token_id=0)
    yield "llama", LlamaConfig(**llama)
    yield "llama3 rope", LlamaConfig(**llama, tie_word_embeddings=True, rope_scaling={
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64})
    yield "mistral", MistralConfig(**llama, sliding_window=16)
    yield "qwen2", Qwen2Config(**llama)
    yield "qwen3", Qwen3Config(**llama, head_dim=32)
    yield "olmo2", Olmo2Config(**{**llama, "num_key_value_heads": 4})
    yield "olmo3", Olmo3Config(**{**llama, "num_key_value_heads": 4, "num_hidden_layers": 4}, sliding_window=16)
    gemma = {**llama, "head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32}
    yield "gemma2", Gemma2Config(**gemma, attn_logit_softcapping=5.0, final_logit_softcapping=6.0)
    yield "gemma3", Gemma3TextConfig(**gemma, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    latent = {**llama, "num_key_value_heads": 4, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
              "v_head_dim": 12, "n_routed_experts": 8, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
    yield "deepseek-v2", DeepseekV2Config(**latent, q_lora_rank=None, num_experts_per_tok=3, rope_parameters={
        **yarn, "mscale": 0.707, "mscale_all_dim": 0.707})
    yield "deepseek-v3", DeepseekV3Config(**latent, q_lora_rank=20, num_experts_per_tok=2, n_group=4, topk_group=2,
                                          rope_parameters={**yarn, "mscale": 1.0, "mscale_all_dim": 1.0})
    yield "gpt-oss", GptOssConfig(**llama, head_dim=16, sliding_window=16, num_local_experts=6, num_experts_per_tok=2,
                                  rope_parameters={**yarn, "truncate": False})
    state = {**llama, "head_dim": 32, "linear_key_head_dim": 24, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
             "linear_num_value_heads": 4, "full_attention_interval": 3}
    yield "qwen3-next", Qwen3NextConfig(**state, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24,
                                        shared_expert_intermediate_size=40)
    yield "qwen3.5", Qwen3_5TextConfig(**state)


def greedy(model, ids):
    ids = list(ids)
    probs = []
    with torch.no_grad():
        for _ in range(NEW):
            p = model(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)
            ids.append(int(p.argmax()))
            probs.append(float(p[ids[-1]]))
    return ids[-NEW:], probs


def perplexity(model, ids):
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]])).logits[0].double().log_softmax(-1)
    return -float(logits[range(len(ids) - 1), ids[1:]].mean())


def compare(name, model, tok, folder):
    prompts = [TEXT[:n] for n in (3, 60, 400)]
    jsonl = os.path.join(folder, "prompts.jsonl")
    with open(jsonl, "w", encoding="utf-8") as f:
        f.writelines(json.dumps({"prompt": p}) + "\n" for p in prompts)
    out = tool("generate", folder, jsonl, "--temperature", "0", "-n", str(NEW), "--dtype", "f32", "--logprobs",
               "--ignore-eos", "--context", "256", "-q").splitlines()
    for line, p in zip(out, prompts):
        ids, probs = greedy(model, tok.encode(p).ids)
        got = json.loads(line)
        check(got["token_ids"] == ids, f"{name}: greedy tokens behind {len(p)} characters", got["token_ids"], ids)
        worst = max(abs(a - b) for a, b in zip(got["logprobs"], probs))
        check(worst < 1e-4, f"{name}: their log-probabilities", worst)
        check(got["text"] == tok.decode(ids, skip_special_tokens=True), f"{name}: their text")
    check(len(out) == len(prompts), f"{name}: an answer for each prompt")
    text = os.path.join(folder, "text.txt")
    with open(text, "w", encoding="utf-8") as f:
        f.write(TEXT[:500])
    got = json.loads(tool("eval-model", folder, text, "--seq-len", "256", "-q"))
    want = perplexity(model, tok.encode(TEXT[:500]).ids)
    check(abs(got["loss"] - want) < 1e-5 * want, f"{name}: loss of a text", got["loss"], want)


def fresh(tmp, tok):
    """transformers loads init-model's folders without missing or unused tensors, and computes the same."""
    for preset in ("llama-1m", "gpt2-124m", "mistral-7b", "qwen2-0.5b", "qwen3-0.6b", "olmo2-1b", "olmo3-7b",
                   "gemma2-2b", "gemma3-270m", "mixtral-8x7b", "qwen1.5-moe-14b", "qwen3-moe-30b"):
        folder = os.path.join(tmp, preset)
        small = (["n_layer=2", "n_embd=64", "n_head=4"] if "gpt2" in preset else
                 ["num_hidden_layers=2", "hidden_size=64", "intermediate_size=96", "num_attention_heads=4",
                  f"num_key_value_heads={4 if 'olmo' in preset else 2}"])
        if preset in ("mistral-7b", "qwen3-0.6b", "gemma2-2b", "gemma3-270m", "qwen3-moe-30b"):
            small.append("head_dim=16")
        if "moe" in preset:
            small += ["num_experts=10", "moe_intermediate_size=24"]
        if "1.5-moe" in preset:
            small.append("shared_expert_intermediate_size=32")
        tool("init-model", preset, *[x for s in small for x in ("--set", s)], "--set", "initializer_range=0.15",
             "-t", os.path.join(tmp, "tokenizer.json"), "-o", folder, "-q")
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
        check(not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), f"{preset}: loads", info)
        compare(preset, model.eval(), tok, folder)


def main():
    torch.manual_seed(3)
    only = sys.argv[1:]
    with tempfile.TemporaryDirectory() as tmp:
        tok = tokenizer(tmp)
        for name, config in configs():
            if only and name not in only:
                continue
            folder = os.path.join(tmp, name)
            config._experts_implementation = "eager"
            model = AutoModelForCausalLM.from_config(config).eval()
            for n, p in model.named_parameters():  # biases and norms too: zeros would hide mistakes
                if p.dim() == 1:
                    p.data += 0.1 * torch.randn_like(p)
            model.save_pretrained(folder)
            tok.save(os.path.join(folder, "tokenizer.json"))
            compare(name, model, tok, folder)
        if not only or "fresh" in only:
            fresh(tmp, tok)
    return tap.finish()


if __name__ == "__main__":
    sys.exit(main())
