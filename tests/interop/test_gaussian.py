#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare Gaussian attention of lm_hybrid with transformers' Llama, whose attention is replaced by the definition over all pairs:
loss, logits, every gradient; speaks TAP.

test_gaussian.py --golden writes tests/golden/models/hybrid-gaussian.safetensors instead.
Environment: LM_TEST_BUILD, a build folder with libcore.a."""
import json
import os
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
import test_models as common
import tap
from tap import check

BASE = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
# layer_types, gaussian_window, further keys of the config
MODELS = {
    "gaussian": (["gaussian_attention"] * 2, None, {}),
    "gaussian-norm": (["gaussian_norm_attention"] * 2, None, {"head_dim": 12}),
    "gaussian-mixed": (["full_attention", "gaussian_attention", "gaussian_norm_attention"], 7,
                       {"num_hidden_layers": 3, "attention_bias": True, "num_key_value_heads": 1}),
}


def attend(module, q, k, v, attention_mask, **kw):
    """O = P V, P_ij = exp(-|q_i - k_j|^2 / (2 sqrt D)) of the keys that are seen, or its rows divided by their sums."""
    kind, window = module.config.kinds[module.layer_idx], module.config.gaussian_window
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    T, D = q.shape[2], q.shape[3]
    away = torch.arange(T)[:, None] - torch.arange(T)[None]
    seen = away >= 0 if kind == "full_attention" or not window else (away >= 0) & (away < window)
    if kind == "full_attention":
        p = (q @ k.transpose(2, 3) / D ** 0.5).masked_fill(~seen, float("-inf")).softmax(-1)
    else:
        far = (q[:, :, :, None].float() - k[:, :, None].float()).square().sum(-1)
        p = torch.exp(-far / (2 * D ** 0.5)) * seen
    if kind == "gaussian_norm_attention":
        p = p / p.sum(-1, keepdim=True)
    return (p.to(v.dtype) @ v).transpose(1, 2), p


AttentionInterface.register("pairs", attend)


def make(kinds, window, more, seed):
    config = LlamaConfig(**{**BASE, **more})
    config.kinds, config.gaussian_window = kinds, window
    torch.manual_seed(seed)
    model = LlamaForCausalLM._from_config(config, attn_implementation="pairs").eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn_like(p) * (0.3 if p.ndim == 1 else 0.6 / p.shape[-1] ** 0.5) + ("norm" in name))
    return model


def about_of(model, kinds, window):
    config = model.config.to_diff_dict()
    config.pop("kinds", None)
    return config | {"architectures": ["LmHybridForCausalLM"], "model_type": "lm_hybrid", "layer_types": kinds,
                     "gaussian_window": window}


def save(model, folder, kinds, window):
    model.save_pretrained(folder)
    json.dump(about_of(model, kinds, window), open(os.path.join(folder, "config.json"), "w"))


def write_golden():
    kinds, window, more = MODELS["gaussian-mixed"]
    seed = common.seed_of("gaussian-mixed")
    model = make(kinds, window, more | {"vocab_size": 29, "hidden_size": 16, "intermediate_size": 20}, seed)
    tokens, targets = common.batch(model.config, 1, seed, 11)
    common.save_golden("hybrid-gaussian", model, about_of(model, kinds, window), tokens[0], targets[0], "test_gaussian.py")


def main():
    if "--golden" in sys.argv:
        write_golden()
        return 0
    with tempfile.TemporaryDirectory() as tmp:
        run = common.probe(tmp)
        for name, (kinds, window, more) in MODELS.items():
            seed = common.seed_of(name)
            model = make(kinds, window, more, seed)
            folder, ids = os.path.join(tmp, name), os.path.join(tmp, "ids.safetensors")
            save(model, folder, kinds, window)
            tokens, targets = common.batch(model.config, 1, seed)
            common.write_ids(ids, tokens, targets)
            truth = common.run_theirs(model, tokens[0], targets[0])
            for level in common.levels():
                worst, at = common.compare(common.ours(run, tmp, folder, ids, "f32", level), truth, lambda k: 1e-5)
                check(worst < 1, f"{name} f32 {level}: {worst * 1e-5:.1e} at {at}")
            low = make(kinds, window, more, seed).to(torch.bfloat16)
            exact = make(kinds, window, more, seed)
            exact.load_state_dict({k: v.float() for k, v in low.state_dict().items()})
            save(exact, folder, kinds, window)
            truth = common.run_theirs(exact, tokens[0], targets[0])
            theirs = common.run_theirs(low, tokens[0], targets[0])
            for level in ("ref", common.levels()[-1]):
                got = common.ours(run, tmp, folder, ids, "bf16", level)
                worst, at = max((common.error(got[k], truth[k]) / (2.5 * common.error(theirs[k], truth[k]) + 8e-3), k) for k in truth)
                check(worst < 1, f"{name} bf16 {level}: {worst:.2f} of the limit at {at}")
    return tap.finish()


if __name__ == "__main__":
    sys.exit(main())
