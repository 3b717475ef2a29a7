#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Adapters that peft writes, merged by merge-models and by merge_and_unload; speaks TAP.

Environment: LM_TEST_BUILD, a build folder with bin/merge-models."""
import os
import subprocess
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import (AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig,
                          LlamaForCausalLM, Olmo2Config, Olmo3Config)

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TOOL = os.path.join(os.environ.get("LM_TEST_BUILD", os.path.join(ROOT, "build")), "bin", "merge-models")
count = 0
failed = 0


def check(ok, name):
    global count, failed
    count += 1
    failed += not ok
    print(f"{'ok' if ok else 'not ok'} {count} - {name}")


def llama(tied=False):
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                                        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied))


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32))


def other(config, **more):
    return AutoModelForCausalLM.from_config(config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, **more))


def case(tmp, name, model, config):
    base, adapter, out = (os.path.join(tmp, name + end) for end in ("-base", "-adapter", "-out"))
    model.save_pretrained(base)
    tuned = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    for p in tuned.parameters():
        if p.requires_grad:
            torch.nn.init.normal_(p, std=0.3)
    tuned.save_pretrained(adapter)
    done = subprocess.run([TOOL, "-q", "-m", "passthrough", f"{base}+{adapter}", "-o", out],
                          capture_output=True, text=True)
    if done.returncode:
        print("# " + done.stderr)
        return check(False, name)
    want = tuned.merge_and_unload().state_dict()
    got = AutoModelForCausalLM.from_pretrained(out).state_dict()
    plain = AutoModelForCausalLM.from_pretrained(base).state_dict()
    close = want.keys() == got.keys() and all(torch.allclose(want[k], got[k], rtol=0, atol=2e-6) for k in want)
    changed = any(not torch.equal(plain[k], got[k]) for k in got)
    return check(close and changed, f"{name}: as merge_and_unload")


def main():
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as tmp:
        case(tmp, "lora", llama(), LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"]))
        case(tmp, "patterns", llama(), LoraConfig(
            r=4, lora_alpha=6, use_rslora=True, target_modules=["q_proj", "up_proj"],
            rank_pattern={"layers.1.self_attn.q_proj": 2, r".*\.0\..*up_proj": 3}, alpha_pattern={"up_proj": 5}))
        case(tmp, "gpt2", gpt2(), LoraConfig(r=4, lora_alpha=8, fan_in_fan_out=True,
                                             target_modules=["c_attn", "c_fc", "mlp.c_proj"]))
        case(tmp, "embedding", llama(), LoraConfig(r=2, lora_alpha=3, target_modules=["embed_tokens", "k_proj"]))
        case(tmp, "dora", llama(), LoraConfig(r=4, lora_alpha=6, use_dora=True,
                                              target_modules=["q_proj", "down_proj", "embed_tokens"]))
        case(tmp, "dora-gpt2", gpt2(), LoraConfig(r=4, lora_alpha=8, use_dora=True, fan_in_fan_out=True,
                                                  target_modules=["c_attn", "mlp.c_proj"]))
        for saved in (["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"]):
            for ensure in (False, True):
                case(tmp, f"tied-{'-'.join(saved)}-{ensure}", llama(tied=True), LoraConfig(
                    r=2, target_modules=["q_proj"], modules_to_save=saved, ensure_weight_tying=ensure))
        case(tmp, "saved", llama(), LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))
        wide = {"head_dim": 12, "sliding_window": 8}
        for name, model in (("olmo2", lambda: other(Olmo2Config)), ("olmo3", lambda: other(Olmo3Config, sliding_window=8)),
                            ("gemma2", lambda: other(Gemma2Config, **wide)),
                            ("gemma3", lambda: other(Gemma3TextConfig, **wide))):
            case(tmp, name, model(), LoraConfig(r=4, lora_alpha=6, target_modules="all-linear"))
            case(tmp, f"{name}-dora", model(), LoraConfig(
                r=2, lora_alpha=3, use_dora=True, target_modules=["q_proj", "o_proj", "down_proj"]))
            case(tmp, f"{name}-saved", model(), LoraConfig(
                r=2, target_modules=["k_proj"], modules_to_save=["embed_tokens", "norm"]))
    print(f"1..{count}")
    return failed != 0


raise SystemExit(main())
