#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Adapters that peft writes, merged by merge-models and by merge_and_unload; speaks TAP.

Environment: LM_TEST_BUILD, a build folder with bin/merge-models and bin/peft-tune."""
import os
import subprocess
import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, GPT2Config, GPT2LMHeadModel, GptOssConfig,
                          LlamaConfig, LlamaForCausalLM, MixtralConfig, Olmo2Config, Olmo3Config, Qwen3MoeConfig)
import tap
from tap import ROOT, check

TOOL = os.path.join(os.environ.get("LM_TEST_BUILD", os.path.join(ROOT, "build")), "bin", "merge-models")
PEFT_TUNE = os.path.join(os.path.dirname(TOOL), "peft-tune")


def llama(tied=False):
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                                        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied))


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32))


def other(config, **more):
    return AutoModelForCausalLM.from_config(config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, **more))


def experts(config, heads=2, **more):
    """A model of experts, with in != out in both of their parameters."""
    return AutoModelForCausalLM.from_config(config(
        vocab_size=32, hidden_size=12, intermediate_size=10, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=1, pad_token_id=0, bos_token_id=1, eos_token_id=2, **more))


def loaded(path):
    """Its weights as they are in memory."""
    return AutoModelForCausalLM.from_pretrained(path).state_dict()


def other_ranks(tmp, name):
    """The adapter of a case at its rank, and added to itself: PEFT loads both, and gets the same from them."""
    base, adapter, made = (os.path.join(tmp, name + end) for end in ("-base", "-adapter", "-made"))
    for way, operands in (("to-lora", [adapter]), ("cat", [adapter + ":0.25", adapter + ":0.75"])):
        mode = ["--to-lora", "--rank", "9"] if way == "to-lora" else ["--combine", way]
        done = subprocess.run([PEFT_TUNE, "-q", "-f", *mode, base, *operands, "-o", made], capture_output=True, text=True)
        if done.returncode:
            print("# " + done.stderr)
            check(False, f"{name}: {way}")
            continue
        a, b = (PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), p).merge_and_unload().state_dict()
                for p in (adapter, made))
        check(all(torch.allclose(a[k], b[k], rtol=0, atol=2e-6) for k in a), f"{name}: {way}, as PEFT reads it")


def extracted(tmp, name):
    """What was merged, taken out again, is what PEFT puts in."""
    base, out, made = (os.path.join(tmp, name + end) for end in ("-base", "-out", "-taken"))
    done = subprocess.run([PEFT_TUNE, "-q", "-f", "--unmerge", base, out, "--rank", "4", "-o", made],
                          capture_output=True, text=True)
    if done.returncode:
        print("# " + done.stderr)
        return check(False, f"{name}: unmerge")
    want = loaded(out)
    got = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), made).merge_and_unload().state_dict()
    return check(all(torch.allclose(want[k], got[k], rtol=0, atol=5e-6) for k in want), f"{name}: unmerge")


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
        case(tmp, "parameters", llama(), LoraConfig(r=4, lora_alpha=6, target_modules=[], rank_pattern={"up_proj.weight": 2},
                                                    target_parameters=["q_proj.weight", "up_proj.weight"]))
        wide = {"head_dim": 12, "sliding_window": 8}
        for name, model in (("olmo2", lambda: other(Olmo2Config)), ("olmo3", lambda: other(Olmo3Config, sliding_window=8)),
                            ("gemma2", lambda: other(Gemma2Config, **wide)),
                            ("gemma3", lambda: other(Gemma3TextConfig, **wide))):
            case(tmp, name, model(), LoraConfig(r=4, lora_alpha=6, target_modules="all-linear"))
            case(tmp, f"{name}-dora", model(), LoraConfig(
                r=2, lora_alpha=3, use_dora=True, target_modules=["q_proj", "o_proj", "down_proj"]))
            case(tmp, f"{name}-saved", model(), LoraConfig(
                r=2, target_modules=["k_proj"], modules_to_save=["embed_tokens", "norm"]))
        both = {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj"],
                "target_parameters": ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]}
        ranks = {"rank_pattern": {"experts.down_proj": 3}, "alpha_pattern": {"layers.1.mlp.experts.gate_up_proj": 7}}
        qwen = {"moe_intermediate_size": 10, "num_experts": 2, "num_experts_per_tok": 1, "head_dim": 6}
        few = {"num_local_experts": 2, "num_experts_per_tok": 1}
        for name, model in (("qwen3-moe", lambda: experts(Qwen3MoeConfig, **qwen)), ("mixtral", lambda: experts(MixtralConfig, **few)),
                            ("gpt-oss", lambda: experts(GptOssConfig, head_dim=6, **few))):
            case(tmp, name, model(), LoraConfig(**both))
            case(tmp, f"{name}-ranks", model(), LoraConfig(**both, **ranks, use_rslora=True))
            case(tmp, f"{name}-down", model(), LoraConfig(r=2, target_modules=[], target_parameters=["experts.down_proj"]))
            other_ranks(tmp, f"{name}-ranks")
            extracted(tmp, name)
    return tap.finish()


raise SystemExit(main())
