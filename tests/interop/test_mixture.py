#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts made from dense models, beside transformers: upcycled ones compute what the dense model does, and gates
of prompts are the hidden states and embeddings that mergekit-moe takes; speaks TAP.

Environment: LM_TEST_BUILD, a build folder with bin/."""
import os
import shutil
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

import tap
from tap import check, tool
from test_models import make

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
BASE = dict(vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=0)
KINDS = {"llama": (LlamaConfig, {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}),
         "mistral": (MistralConfig, {"sliding_window": 5}),
         "qwen2": (Qwen2Config, {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
         "qwen3": (Qwen3Config, {"head_dim": 16})}
PROMPTS = [(["the river ran by", "stones lay in the water"], []), (["the old bridge"], ["water", "by the"]), (["zzz"], [])]


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def upcycled(tmp, name, folder):
    ids, out = torch.arange(5, 25)[None], os.path.join(tmp, name + "-up")
    with torch.no_grad():
        want = load(folder)(ids).logits
    for more in ([], ["--experts-per-token", "4"]):
        tool("init-model", "-f", "--upcycle", folder, "--experts", "6", *more, "-o", out)
        with torch.no_grad():
            got = load(out)(ids).logits
        gap = ((got - want).norm() / want.norm()).item()
        check(gap < 1e-6, f"{name}: upcycled {' '.join(more)}: logits to {gap:.1e}")


def gates(tmp, name, base, others):
    recipe, out = os.path.join(tmp, name + ".yaml"), os.path.join(tmp, name + "-moe")
    model = load(base)
    tok = transformers.PreTrainedTokenizerFast(tokenizer_file=os.path.join(base, "tokenizer.json"))
    shared = name == "qwen2"

    def ids(p):
        return torch.tensor([[BASE["bos_token_id"]] + tok(p, add_special_tokens=False)["input_ids"]])

    def hidden(ps, mean):
        states = [torch.stack(model(ids(p), output_hidden_states=True).hidden_states[:-1])[:, 0] for p in ps]
        return sum(s.mean(1) if mean else s[:, -1] for s in states) / len(ps)

    def embedded(ps):
        e = model.get_input_embeddings().weight
        return torch.nn.functional.normalize(sum(e[ids(p)[0]].sum(0) for p in ps), dim=0).repeat(3, 1)

    for mode in ("hidden", "hidden_avg", "cheap_embed"):
        rows = [f"base_model: {base}", f"gate_mode: {mode}", "experts:"]
        for k, (source, (yes, no)) in enumerate(zip(others, PROMPTS)):
            if shared and k == 2:
                rows.append("shared_experts:")
            rows += [f"  - source_model: {source}", f"    positive_prompts: {yes}", f"    negative_prompts: {no}",
                     f"    residual_scale: {0.5 if k else 1}"]
        with open(recipe, "w") as f:
            f.write("\n".join(rows) + "\n")
        tool("merge-models", "-f", "--config", recipe, "-o", out)
        w, worst = load_file(os.path.join(out, "model.safetensors")), 0
        of = embedded if mode == "cheap_embed" else lambda ps: hidden(ps, mode == "hidden_avg")
        with torch.no_grad():
            for k, (yes, no) in enumerate(PROMPTS):
                v = torch.nn.functional.normalize(of(yes) - of(no) if no else of(yes), dim=-1)
                for l in range(3):
                    at = shared and k == 2
                    key = f"model.layers.{l}." + ("mlp.shared_expert_gate" if at else "block_sparse_moe.gate"
                                                  if name in ("llama", "mistral") else "mlp.gate") + ".weight"
                    worst = max(worst, (w[key][0 if at else k] - v[l]).norm().item())
        check(worst < 1e-5, f"{name}: {mode}: rows of the routers to {worst:.1e}")
    source = load_file(os.path.join(others[1], "model.safetensors"))["model.layers.2.mlp.down_proj.weight"]
    key = "block_sparse_moe.experts.1.w2" if name in ("llama", "mistral") else "mlp.experts.1.down_proj"
    check(torch.equal(w[f"model.layers.2.{key}.weight"], source * 0.5), f"{name}: residual_scale")
    check(torch.isfinite(load(out)(torch.arange(5, 25)[None]).logits).all().item(), f"{name}: transformers runs it")


def main():
    with tempfile.TemporaryDirectory() as tmp:
        corpus, words = os.path.join(tmp, "t.txt"), os.path.join(tmp, "tokenizer.json")
        with open(corpus, "w") as f:
            f.write("".join(f"the river ran by the old bridge {i} and stones lay in the water\n" for i in range(60)))
        tool("train-tokenizer", "-V", "300", "-o", words, corpus)
        for name, (kind, more) in KINDS.items():
            folders = []
            for seed in range(3):
                folders.append(os.path.join(tmp, f"{name}-{seed}"))
                make(kind(**BASE, **more), seed + 1).save_pretrained(folders[-1])
                for name_of in ("tokenizer.json", "tokenizer_config.json"):
                    shutil.copy(os.path.join(tmp, name_of), folders[-1])
            upcycled(tmp, name, folders[0])
            gates(tmp, name, folders[0], folders)
    return tap.finish()


if __name__ == "__main__":
    sys.exit(main())
