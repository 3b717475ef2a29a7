#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Linear attention and retention of lm_hybrid beside transformers' Llama, whose attention is replaced by the definition of
lm-hybrid(5) over all pairs, in F64: loss, logits, every gradient, ten training steps; speaks TAP.

test_linear.py --golden writes tests/golden/models/hybrid-*.safetensors of its kinds instead.
Environment: LM_TEST_BUILD, a build folder with libcore.a."""
import json
import os
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import test_models as common
import tap
from tap import check

BASE = {"hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
LINEAR, FULL = "linear_attention", "full_attention"
# layer_types, the object linear_attention, further keys of the config
MODELS = {
    "linear": ([LINEAR, LINEAR], None, {}),
    "linear-decay": ([LINEAR, FULL, LINEAR], {"feature": "elu+1", "decay": True}, {"attention_bias": True,
                                                                                   "num_key_value_heads": 1}),
    "retention": ([LINEAR, LINEAR], {"feature": "identity", "decay": True}, {"head_dim": 12, "rms_norm_eps": 1e-2}),
    "retention-plain": ([FULL, LINEAR], {"feature": "identity"}, {"num_key_value_heads": 4, "rms_norm_eps": 1e-2}),
}
GOLDEN = {"hybrid-linear": "linear-decay", "hybrid-retention": "retention"}


def rotated(x, table):
    cos, sin = (t[:, None] for t in table)
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class Pairs(torch.nn.Module):
    """o_i = the sum over j <= i of w_ij v_j, with w_ij = f(q_i) f(k_j) g^(i - j), g = 1 - 2^(-5 - h) or 1: divided by the sum of
    w_ij (elu+1), or by the root of the width of a head, then normalised and weighed by SiLU of a gate (identity)."""

    def __init__(self, c, about):
        super().__init__()
        self.elu, self.decay = about.get("feature", "elu+1") == "elu+1", about.get("decay", False)
        self.heads, self.kv, self.width, self.eps = c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.rms_norm_eps
        def product(heads):
            return torch.nn.Linear(c.hidden_size, heads * c.head_dim, bias=c.attention_bias)
        self.q_proj, self.k_proj, self.v_proj = product(self.heads), product(self.kv), product(self.kv)
        self.o_proj = torch.nn.Linear(self.heads * c.head_dim, c.hidden_size, bias=c.attention_bias)
        if not self.elu:
            self.g_proj = torch.nn.Linear(c.hidden_size, self.heads * c.head_dim, bias=False)
            self.g_norm = torch.nn.Module()
            self.g_norm.weight = torch.nn.Parameter(torch.ones(c.head_dim))

    def split(self, x):
        return x.reshape(*x.shape[:2], -1, self.width).transpose(1, 2).double()

    def forward(self, hidden_states, position_embeddings=None, **more):
        q, k, v = (self.split(p(hidden_states)) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.elu:
            q, k = (torch.where(x > 0, x + 1, x.clamp(max=0).exp()) for x in (q, k))
        else:
            q, k = (rotated(x, [t.double() for t in position_embeddings]) for x in (q, k))
        T, group = q.shape[2], self.heads // self.kv
        away = (torch.arange(T)[:, None] - torch.arange(T)[None]).double()
        keep = 1 - 2.0 ** (-5 - torch.arange(self.kv).double()) if self.decay else torch.ones(self.kv).double()
        w = q @ k.repeat_interleave(group, 1).transpose(2, 3)
        w = w * keep.repeat_interleave(group)[:, None, None] ** away.clamp(min=0) * (away >= 0)
        w = w / (w.sum(-1, keepdim=True) if self.elu else self.width ** 0.5)
        o = w @ v.repeat_interleave(group, 1)
        if not self.elu:
            o = o * (o.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.g_norm.weight.double()
            o = o * torch.nn.functional.silu(self.split(self.g_proj(hidden_states)))
        o = o.transpose(1, 2).reshape(*hidden_states.shape[:2], -1)
        return self.o_proj(o.to(hidden_states.dtype)), None


def make(name, seed, **more):
    kinds, about, keys = MODELS[name]
    config = LlamaConfig(**{"vocab_size": 97, "num_hidden_layers": len(kinds), **BASE, **keys, **more})
    torch.manual_seed(seed)
    model = LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()
    for layer, kind in zip(model.model.layers, kinds):
        if kind == LINEAR:
            layer.self_attn = Pairs(config, about or {})
    with torch.no_grad():
        for at, p in model.named_parameters():
            p.copy_(torch.randn_like(p) * (0.3 if p.ndim == 1 else 0.6 / p.shape[-1] ** 0.5) + ("norm" in at))
    return model


def about_of(model, name):
    kinds, about, _ = MODELS[name]
    return model.config.to_diff_dict() | {"architectures": ["LmHybridForCausalLM"], "model_type": "lm_hybrid",
                                          "layer_types": kinds, "linear_attention": about}


def save(model, name, folder):
    common.save_file({k: v.contiguous() for k, v in model.state_dict().items()}, os.path.join(folder, "model.safetensors"))
    json.dump(about_of(model, name), open(os.path.join(folder, "config.json"), "w"))


def test_model(run, tmp, name):
    seed, ids = common.seed_of(name), os.path.join(tmp, "ids.safetensors")
    model, folder = make(name, seed), os.path.join(tmp, name)
    os.mkdir(folder)
    save(model, name, folder)
    tokens, targets = common.batch(model.config, 1, seed)
    common.write_ids(ids, tokens, targets)
    truth = common.run_theirs(model.double(), tokens[0], targets[0])
    for level in common.levels():
        worst, at = common.compare(common.ours(run, tmp, folder, ids, "f32", level), truth, lambda k: 1e-5)
        check(worst < 1, f"{name} f32 {level}: {worst * 1e-5:.1e} at {at}")
    tokens, targets = common.batch(model.config, 10, seed + 1)
    common.write_ids(ids, tokens, targets, [common.HYPER[k] for k in ("lr", "b1", "b2", "eps", "decay")])
    want, _ = common.train_theirs(make(name, seed).train(), tokens, targets, None)
    for level in ("ref", common.levels()[-1]):
        worst = common.far(common.ours(run, tmp, folder, ids, "f32", level, "train")["losses"].tolist(), want)
        check(worst < 1e-4 and want[-1] != want[0], f"{name} {level}: ten steps of AdamW, losses to {worst:.1e}")


def write_golden():
    for file, name in GOLDEN.items():
        model = make(name, common.seed_of(name), vocab_size=29, hidden_size=16, intermediate_size=20).double()
        tokens, targets = common.batch(model.config, 1, common.seed_of(name), 11)
        common.save_golden(file, model, about_of(model, name), tokens[0], targets[0], "test_linear.py")


def main():
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False  # it selects instructions that raise SIGILL on some virtual machines
    if "--golden" in sys.argv:
        write_golden()
        return 0
    with tempfile.TemporaryDirectory() as tmp:
        run = common.probe(tmp)
        for name in MODELS:
            test_model(run, tmp, name)
    return tap.finish()


if __name__ == "__main__":
    sys.exit(main())
