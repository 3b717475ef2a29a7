#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare our models with transformers: logits, loss, every gradient, ten training steps, folders; speaks TAP.

test_models.py --golden [NAME ...] writes tests/golden/models/*.safetensors instead.
Environment: LM_TEST_BUILD, a build folder with libcore.a."""
import json
import os
import struct
import subprocess
import sys
import tempfile
import zlib

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (AutoModelForCausalLM, AutoModelForMaskedLM, BertConfig, BertForPreTraining, BloomConfig, DeepseekV2Config, DeepseekV3Config, Dots1Config,
                          Gemma2Config, Gemma3TextConfig, GPT2Config, GptOssConfig, LlamaConfig, MistralConfig, MixtralConfig, Olmo2Config, Olmo3Config,
                          Qwen2Config, Qwen2MoeConfig, Qwen3Config, Qwen3MoeConfig, Qwen3NextConfig, Qwen3_5TextConfig)
import tap
from tap import BUILD, HERE, ROOT, check

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
LIBS = "-lz -lzstd -lxxhash -ljansson -lpcre2-8 -lutf8proc -lcairo -lm -lpthread".split()
BATCH, SEQ = 2, 24


def probe(tmp):
    path = os.path.join(tmp, "probe")
    subprocess.run(["cc", "-std=c17", "-O1", "-D_GNU_SOURCE", "-I" + ROOT, "-I" + os.path.join(ROOT, "lib"), "-o",
                    path, os.path.join(HERE, "model_probe.c"), os.path.join(BUILD, "libcore.a")] + LIBS, check=True)
    return path


def rope(kind, **more):
    return {"rope_type": kind, "rope_theta": 10000.0, **more}


def configs(vocab=97, wide=2):
    """Name -> config.  `wide` scales the widths; small ones serve the golden vectors."""
    no_drop = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
    gpt2 = {"vocab_size": vocab, "n_embd": 16 * wide, "n_layer": 2, "n_head": 4, "n_positions": 32,
            "bos_token_id": 0, "eos_token_id": 0, **no_drop}
    encoder = {"vocab_size": vocab, "hidden_size": 16 * wide, "intermediate_size": 20 * wide, "num_hidden_layers": 2,
               "num_attention_heads": 4, "max_position_embeddings": 40, "pad_token_id": None, "hidden_dropout_prob": 0.0,
               "attention_probs_dropout_prob": 0.0}
    bloom = {"vocab_size": vocab, "hidden_size": 24 * wide, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0,
             "pad_token_id": None, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    yield "bloom", BloomConfig(**bloom)
    yield "bloom-heads", BloomConfig(**{**bloom, "n_head": 6, "n_layer": 3}, tie_word_embeddings=False, layer_norm_epsilon=1e-6)
    yield "bert", BertConfig(**encoder)
    yield "bert-types", BertConfig(**{**encoder, "num_hidden_layers": 3}, type_vocab_size=4, hidden_act="gelu_new",
                                   layer_norm_eps=1e-6)
    yield "bert-pairs", BertConfig(**encoder, architectures=["BertForPreTraining"])
    base = {"vocab_size": vocab, "hidden_size": 16 * wide, "intermediate_size": 20 * wide, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
            "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}

    def llama(**more):
        return LlamaConfig(**{**base, **more})

    yield "gpt2", GPT2Config(**gpt2)
    yield "gpt2-scaled", GPT2Config(**gpt2, scale_attn_by_inverse_layer_idx=True, n_inner=24 * wide,
                                    activation_function="gelu")
    yield "gpt2-untied", GPT2Config(**gpt2, tie_word_embeddings=False, scale_attn_weights=False)
    yield "llama", llama(rms_norm_eps=1e-5)
    yield "llama-tied", llama(tie_word_embeddings=True, num_key_value_heads=4)
    yield "llama-bias", llama(attention_bias=True, mlp_bias=True, num_key_value_heads=1)
    yield "llama-head-dim", llama(head_dim=8 * wide)
    yield "llama-linear", llama(rope_parameters=rope("linear", factor=4.0))
    yield "llama-dynamic", llama(max_position_embeddings=16, rope_parameters=rope("dynamic", factor=2.0))
    yield "llama-dynamic-short", llama(max_position_embeddings=64, rope_parameters=rope("dynamic", factor=2.0))
    yield "llama-llama3", llama(rope_parameters=rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                                     original_max_position_embeddings=16))
    yield "llama-yarn", llama(rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=16))
    yield "llama-yarn-more", llama(head_dim=32, rope_parameters=rope(
        "yarn", factor=8.0, original_max_position_embeddings=16, mscale=0.9, mscale_all_dim=0.6, truncate=False,
        beta_fast=4.0, beta_slow=1.0))
    yield "llama-yarn-factor", llama(rope_parameters=rope("yarn", factor=4.0, attention_factor=1.3,
                                                          original_max_position_embeddings=32))
    yield "mistral", MistralConfig(**{**base, "sliding_window": 7})
    yield "mistral-full", MistralConfig(**{**base, "sliding_window": None, "head_dim": 4 * wide})
    yield "qwen2", Qwen2Config(**{**base, "use_sliding_window": False})
    yield "qwen2-window", Qwen2Config(**{**base, "use_sliding_window": True, "sliding_window": 5,
                                         "max_window_layers": 1, "tie_word_embeddings": True})
    yield "qwen3", Qwen3Config(**{**base, "head_dim": 8 * wide, "tie_word_embeddings": True})
    yield "qwen3-bias", Qwen3Config(**{**base, "head_dim": 6 * wide, "attention_bias": True, "sliding_window": 6,
                                       "use_sliding_window": True, "max_window_layers": 1})
    olmo = {k: v for k, v in base.items() if k != "num_key_value_heads"}
    yield "olmo2", Olmo2Config(**olmo)
    yield "olmo2-tied", Olmo2Config(**base, tie_word_embeddings=True, rms_norm_eps=1e-6)
    gemma = {**base, "head_dim": 6 * wide, "query_pre_attn_scalar": 6 * wide, "sliding_window": 6}
    yield "gemma2", Gemma2Config(**gemma, attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
    yield "gemma2-plain", Gemma2Config(**{**gemma, "query_pre_attn_scalar": 20, "attention_bias": True,
                                          "tie_word_embeddings": False}, attn_logit_softcapping=None,
                                       final_logit_softcapping=None, layer_types=["full_attention", "sliding_attention"])
    yield "gemma3", Gemma3TextConfig(**gemma, layer_types=["sliding_attention", "full_attention"])
    yield "gemma3-scaled", Gemma3TextConfig(**{**gemma, "query_pre_attn_scalar": 20, "num_hidden_layers": 3}, layer_types=[
        "full_attention", "sliding_attention", "sliding_attention"], rope_parameters={
        "full_attention": rope("linear", factor=8.0) | {"rope_theta": 1e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}, final_logit_softcapping=4.0,
        attn_logit_softcapping=2.0)  # which has no effect there
    wide_base = {"rope_theta": 500000.0}  # to which Olmo3Config sets a table of no base, whatever that of the other
    yield "olmo3", Olmo3Config(**base, sliding_window=5, layer_types=["sliding_attention", "full_attention"], rope_parameters={
        "full_attention": rope("yarn", factor=4.0, original_max_position_embeddings=16) | wide_base,
        "sliding_attention": rope("default") | wide_base})
    yield "olmo3-pattern", Olmo3Config(**{**base, "num_hidden_layers": 4}, sliding_window=5, rope_parameters={
        "full_attention": rope("yarn", factor=4.0, original_max_position_embeddings=16),
        "sliding_attention": rope("default")})
    yield "mixtral", MixtralConfig(**base, num_local_experts=5, num_experts_per_tok=2)
    yield "mixtral-window", MixtralConfig(**base, num_local_experts=3, num_experts_per_tok=2, sliding_window=6)
    moe = {**base, "num_experts": 6, "moe_intermediate_size": 12 * wide}
    yield "qwen2-moe", Qwen2MoeConfig(**moe, num_experts_per_tok=3, shared_expert_intermediate_size=14 * wide)
    yield "qwen2-moe-some", Qwen2MoeConfig(**{**moe, "num_hidden_layers": 4}, num_experts_per_tok=2, norm_topk_prob=True,
                                           shared_expert_intermediate_size=20, decoder_sparse_step=2, mlp_only_layers=[3],
                                           use_sliding_window=True, sliding_window=6, max_window_layers=3, qkv_bias=False)
    yield "qwen3-moe", Qwen3MoeConfig(**moe, num_experts_per_tok=2, norm_topk_prob=True, head_dim=8 * wide)
    yield "qwen3-moe-all", Qwen3MoeConfig(**moe, num_experts_per_tok=6, use_sliding_window=True, sliding_window=7)
    scored = {**base, "n_routed_experts": 8, "moe_intermediate_size": 12 * wide, "sliding_window": None}
    yield "dots1", Dots1Config(**scored, n_shared_experts=2, num_experts_per_tok=3, norm_topk_prob=True,
                               routed_scaling_factor=2.5, n_group=4, topk_group=2)
    yield "dots1-plain", Dots1Config(**{**scored, "num_hidden_layers": 3, "sliding_window": 6}, n_shared_experts=1,
                                     num_experts_per_tok=2, first_k_dense_replace=1, max_window_layers=2)
    latent = {**base, "num_key_value_heads": 4, "kv_lora_rank": 10 * wide, "qk_nope_head_dim": 6 * wide,
              "qk_rope_head_dim": 4 * wide, "v_head_dim": 5 * wide, "n_routed_experts": 8,
              "moe_intermediate_size": 12 * wide, "first_k_dense_replace": 1}
    both = rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.707, mscale_all_dim=0.707)
    yield "deepseek-v2", DeepseekV2Config(**latent, q_lora_rank=None, num_experts_per_tok=3, n_shared_experts=2,
                                          rope_parameters=both, rms_norm_eps=1e-5)
    yield "deepseek-v2-groups", DeepseekV2Config(**latent, q_lora_rank=7 * wide, num_experts_per_tok=2, n_shared_experts=1,
                                                 topk_method="group_limited_greedy", n_group=4, topk_group=2,
                                                 routed_scaling_factor=4.0, attention_bias=True)
    yield "deepseek-v3", DeepseekV3Config(**latent, num_nextn_predict_layers=0, q_lora_rank=7 * wide, num_experts_per_tok=3, n_group=4, topk_group=2,
                                          rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=16,
                                                               mscale=0.8, mscale_all_dim=1.0))
    yield "deepseek-v3-halves", DeepseekV3Config(**{**latent, "num_hidden_layers": 3, "v_head_dim": 10 * wide},
                                                 num_nextn_predict_layers=0, q_lora_rank=None,
                                                 num_experts_per_tok=2, n_shared_experts=2, n_group=1, topk_group=1,
                                                 rope_interleave=False, norm_topk_prob=False, attention_bias=True,
                                                 rms_norm_eps=1e-5)
    yield "deepseek-v3-ahead", DeepseekV3Config(**latent, q_lora_rank=7 * wide, num_experts_per_tok=3, n_group=4, topk_group=2,
                                                num_nextn_predict_layers=2)
    yield "deepseek-v3-tied", DeepseekV3Config(**{**latent, "tie_word_embeddings": True}, q_lora_rank=None,
                                               num_experts_per_tok=2, n_group=1, topk_group=1, num_nextn_predict_layers=1)
    yield "mixtral-balance", MixtralConfig(**base, num_local_experts=5, num_experts_per_tok=2, output_router_logits=True,
                                           router_aux_loss_coef=0.3)
    yield "qwen2-moe-balance", Qwen2MoeConfig(**{**moe, "num_hidden_layers": 3}, num_experts_per_tok=3, mlp_only_layers=[1],
                                              shared_expert_intermediate_size=20, output_router_logits=True,
                                              router_aux_loss_coef=0.7)
    yield "qwen3-moe-balance", Qwen3MoeConfig(**moe, num_experts_per_tok=2, norm_topk_prob=True, output_router_logits=True,
                                              router_aux_loss_coef=1.0)
    near, far = "sliding_attention", "full_attention"  # orders of layers that GGUF holds as a list, or as a number
    yield "gemma3-order", Gemma3TextConfig(**{**gemma, "num_hidden_layers": 3}, layer_types=[near, far, far])
    yield "gemma2-near", Gemma2Config(**gemma, attn_logit_softcapping=2.0, final_logit_softcapping=3.0,
                                      layer_types=[near, near])
    state = {**moe, "num_experts": 4, "head_dim": 8 * wide, "linear_key_head_dim": 6 * wide, "linear_value_head_dim": 4 * wide,
             "linear_num_key_heads": 2, "linear_num_value_heads": 4, "shared_expert_intermediate_size": 10 * wide}
    yield "qwen3-next", Qwen3NextConfig(**{**state, "num_hidden_layers": 1 + wide}, num_experts_per_tok=2,
                                        full_attention_interval=1 + wide)
    yield "qwen3-next-some", Qwen3NextConfig(
        **{**state, "num_hidden_layers": 4, "linear_num_key_heads": 4}, num_experts_per_tok=2, norm_topk_prob=False,
        attention_bias=True, tie_word_embeddings=True, linear_conv_kernel_dim=3, decoder_sparse_step=2, mlp_only_layers=[3],
        rope_parameters={**rope("default"), "partial_rotary_factor": 0.5},
        layer_types=["full_attention", "linear_attention", "full_attention", "linear_attention"])
    dense = {k: v for k, v in state.items() if "expert" not in k and k != "moe_intermediate_size"}
    yield "qwen3_5", Qwen3_5TextConfig(**{**dense, "num_hidden_layers": 3}, full_attention_interval=3)
    oss = {**base, "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8 * wide, "sliding_window": 6}
    yield "gpt-oss", GptOssConfig(**oss, rope_parameters=rope("yarn", factor=4.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
                                                              original_max_position_embeddings=16))
    yield "gpt-oss-bounds", GptOssConfig(**{**oss, "num_hidden_layers": 3, "num_key_value_heads": 4}, swiglu_limit=1.0,
                                         attention_bias=False, layer_types=["full_attention", "sliding_attention", "full_attention"],
                                         rope_parameters=rope("default"))


def add_modules(model):
    """Modules for the tokens further on, which transformers does not have, as published folders name them."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm
    c = model.config
    for k in range(getattr(c, "num_nextn_predict_layers", 0)):
        layer = DeepseekV3DecoderLayer(c, c.num_hidden_layers + k)
        layer.enorm, layer.hnorm = (DeepseekV3RMSNorm(c.hidden_size, c.rms_norm_eps) for _ in range(2))
        layer.eh_proj = torch.nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)
        layer.shared_head = torch.nn.Module()
        layer.shared_head.norm = DeepseekV3RMSNorm(c.hidden_size, c.rms_norm_eps)
        model.model.layers.append(layer)  # the model's own forward pass ends before it
    return model


WEIGHT = 0.3  # lambda


def losses_ahead(model, tokens, targets, h):
    """Of each module, divided by the number of the model's targets (arXiv:2412.19437, section 2.2, eq. 21 to 25).  h: what the
    model's head reads.  Module k reads in row i the token of row i + k and predicts the target of that row."""
    c, T = model.config, tokens.shape[1]
    valid, out = (targets >= 0).sum(), []
    where = torch.arange(T)[None]
    mask = torch.full((T, T), torch.finfo(h.dtype).min, dtype=h.dtype).triu(1)[None, None].expand(len(tokens), 1, T, T)
    for k in range(1, getattr(c, "num_nextn_predict_layers", 0) + 1):
        layer = model.model.layers[c.num_hidden_layers + k - 1]
        ids, wanted = torch.zeros_like(tokens), torch.full_like(targets, -1)
        ids[:, :-k], wanted[:, :-k] = tokens[:, k:], targets[:, k:]
        x = layer.eh_proj(torch.cat([layer.enorm(model.model.embed_tokens(ids)), layer.hnorm(h)], -1))
        x = layer(x, attention_mask=mask, position_ids=where, position_embeddings=model.model.rotary_emb(x, where))
        h = layer.shared_head.norm(x)
        logits = model.lm_head(h).float().reshape(-1, c.vocab_size)
        loss = torch.nn.functional.cross_entropy(logits, wanted.masked_fill(wanted < 0, -100).reshape(-1), reduction="sum")
        out.append(loss / valid)
    return out


def has_pairs(config):
    return config.model_type == "bert" and config.architectures == ["BertForPreTraining"]


class WithPairs(BertForPreTraining):
    """Made from a config as the automatic classes are."""
    @classmethod
    def from_config(cls, config, **how):
        return cls._from_config(config, **how)


WithPairs.__name__ = "BertForPreTraining"  # which it writes to its folders


def class_of(config):
    if has_pairs(config):
        return WithPairs
    return AutoModelForMaskedLM if config.model_type == "bert" else AutoModelForCausalLM


def make(config, seed):
    """A model whose every tensor is random: norms of 1 and biases of 0 would hide mistakes."""
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    model = add_modules(class_of(config).from_config(config, attn_implementation="eager")).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            centred = config.model_type.startswith("gemma") or config.model_type in (
                "qwen3_next", "qwen3_5_text") and ".linear_attn." not in name
            one = ("norm" in name.lower() or "ln_" in name) and not centred
            p.copy_(torch.randn_like(p) * (0.3 if p.ndim == 1 else 0.6 / p.shape[-1] ** 0.5) + one)
        for name, b in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                b.copy_(torch.randn_like(b) * 0.1)
    return model


def batch(config, steps, seed, seq=SEQ):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, config.vocab_size, (steps, BATCH, seq + 1), generator=g)
    tokens, targets = ids[..., :-1].contiguous(), ids[..., 1:].clone()
    targets[torch.rand(targets.shape, generator=g) < 0.2] = -1
    return tokens, targets.contiguous()


def loss_of(model, tokens, targets):
    more = {}
    if model.config.model_type == "bert" and not getattr(model, "one_type", False):
        # the second half of a sequence is another type, as in model_run.h
        more = {"token_type_ids": (torch.arange(tokens.shape[-1]) >= tokens.shape[-1] // 2).long().expand_as(tokens)}
    ahead = getattr(model.config, "num_nextn_predict_layers", 0)
    out = model(input_ids=tokens, output_hidden_states=bool(ahead), **more)
    pairs = has_pairs(model.config)
    logits = out.prediction_logits if pairs else out.logits
    flat = logits.float().reshape(-1, logits.shape[-1])
    labels = targets.masked_fill(targets < 0, -100).reshape(-1)
    loss = torch.nn.functional.cross_entropy(flat, labels)
    if pairs:  # every second text of the batch does not follow, as in model_run.h
        loss = loss + torch.nn.functional.cross_entropy(out.seq_relationship_logits.float(), torch.arange(len(tokens)) % 2)
    if getattr(model.config, "output_router_logits", False):  # transformers adds it only to a loss of its own
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
        c = model.config
        experts = getattr(c, "num_experts", None) or c.num_local_experts
        loss = loss + c.router_aux_loss_coef * load_balancing_loss_func(out.router_logits, experts, c.num_experts_per_tok)
    for further in losses_ahead(model, tokens, targets, out.hidden_states[-1]) if ahead else []:
        loss = loss + WEIGHT / ahead * further
    return loss, logits


def seed_of(name):
    """Of the name, so that other configs do not change it; SEED=N draws other models."""
    return zlib.crc32(name.encode()) % 1000 + int(os.environ.get("SEED", 0))


def clear_seed(config, seed, seq=SEQ):
    """A seed with whose model every router prefers its choices by more than what BF16 rounds, or by the most of 300 seeds, so
    that all send alike."""
    k, best = getattr(config, "num_experts_per_tok", 0), (0, seed)
    for again in range(300 if k else 0):
        model, gaps = make(config, seed + 1000 * again), []

        def look(module, args, out):
            z = torch.nn.functional.linear(args[0].reshape(-1, config.hidden_size), module.weight, getattr(module, "bias", None))
            if hasattr(module, "e_score_correction_bias"):  # groups are chosen, then experts, by sigmoids, whose slope is less
                z = 4 * (z.sigmoid() + module.e_score_correction_bias)
                groups, kept = z.reshape(len(z), config.n_group, -1), config.topk_group
                value = groups.topk(2, -1).values.sum(-1)
                order = value.sort(-1, descending=True)
                if kept < config.n_group:
                    gaps.append((order.values[:, kept - 1] - order.values[:, kept]).min().item())
                z = groups.gather(1, order.indices[:, :kept, None].expand(-1, -1, groups.shape[-1])).reshape(len(z), -1)
            elif getattr(module, "topk_method", None) == "group_limited_greedy":
                groups, kept = z.reshape(len(z), config.n_group, -1), config.topk_group
                order = groups.max(-1).values.sort(-1, descending=True)
                gaps.append((order.values[:, kept - 1] - order.values[:, kept]).min().item())
                z = groups.gather(1, order.indices[:, :kept, None].expand(-1, -1, groups.shape[-1])).reshape(len(z), -1)
            z = z.sort(-1, descending=True).values
            gaps.append((z[:, k - 1] - z[:, k]).min().item() if k < z.shape[1] else 1)
        for n, module in model.named_modules():
            if n.endswith((".mlp.gate", ".mlp.router")):
                module.register_forward_hook(look)
        with torch.no_grad():
            loss_of(model, *(x[0] for x in batch(config, 1, seed + 1000 * again, seq)))
        best = max(best, (min(gaps), seed + 1000 * again))
        if best[0] > 0.03:
            break
    return best[1]


def by_our_names(config, name, p):
    """transformers holds the experts of a layer as two tensors, and Mixtral's under names that no file has."""
    mixtral = config.model_type == "mixtral"
    if mixtral:
        name = name.replace(".mlp.", ".block_sparse_moe.")
    stem, _, last = name.rpartition(".")
    if last not in ("gate_up_proj", "down_proj") or config.model_type == "gpt_oss":
        return {name: p}
    parts = zip(("w1", "w3") if mixtral else ("gate_proj", "up_proj"), p.chunk(2, 1)) if last == "gate_up_proj" else [
        ("w2" if mixtral else "down_proj", p)]
    return {f"{stem}.{e}.{part}.weight": t[e] for part, t in parts for e in range(p.shape[0])}


def run_theirs(model, tokens, targets):
    """loss, logits (of an encoder log-probabilities) and gradients by our names."""
    model.zero_grad()
    loss, logits = loss_of(model, tokens, targets)
    if model.config.model_type == "bert":
        logits = logits.log_softmax(-1)
    loss.backward()
    out = {"loss": loss.detach().float().reshape(1), "logits": logits.detach().float()}
    for name, p in model.named_parameters():
        for ours_name, grad in by_our_names(model.config, name, p.grad.detach().float()).items():
            out["grad." + ours_name] = grad
    return {k: v.contiguous().clone() for k, v in out.items()}


def with_keys(tensors):
    """Without rotation a bias of keys adds one number to all scores of a row: its gradient is 0 but for roundings, so it is
    compared together with that of queries, as GPT-2's is."""
    out = dict(tensors)
    for k in tensors:
        if k.startswith("grad.") and k.endswith(".self.key.bias"):
            out[k] = torch.cat([tensors[k], tensors[k.replace(".key.", ".query.")]])
    return out


def error(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()


def compare(ours, theirs, limit):
    """The worst relative error and its tensor; infinite when the names differ."""
    ours, theirs = with_keys(ours), with_keys(theirs)
    if ours.keys() != theirs.keys():
        return float("inf"), " ".join(sorted(ours.keys() ^ theirs.keys()))
    return max((error(ours[k], theirs[k]) / limit(k), k) for k in theirs)


def levels():
    flags = open("/proc/cpuinfo").read()
    return ["ref"] + [n for n, f in (("avx2", "avx2"), ("avx512", "avx512bw"), ("amx", "amx_bf16")) if f in flags]


def ours(run, tmp, folder, ids, dtype, level, what="run"):
    out = os.path.join(tmp, "out.safetensors")
    subprocess.run([run, what, folder, ids, out, dtype, level], check=True)
    return load_file(out)


def write_ids(path, tokens, targets, adamw=None):
    more = {} if adamw is None else {"adamw": torch.tensor(adamw, dtype=torch.float32)}
    save_file({"tokens": tokens, "targets": targets, **more}, path)


# Gradients through states lose digits by cancellation, in transformers too: over eight seeds our definition, which adds in
# double, was up to 5e-5 away from its F32.
F32_LIMIT = {"qwen3_next": 1e-4, "qwen3_5_text": 1e-4}


def low_errors(run, tmp, name, config, seed):
    """Rounding errors of BF16 by tensor: theirs, and ours by level."""
    folder, ids = os.path.join(tmp, name + "-low"), os.path.join(tmp, "ids.safetensors")
    tokens, targets = batch(config, 1, seed)
    write_ids(ids, tokens, targets)
    low = make(config, seed).to(torch.bfloat16)
    exact = make(config, seed)
    exact.load_state_dict({k: v.float() for k, v in low.state_dict().items()})
    exact.save_pretrained(folder)
    truth = run_theirs(exact, tokens[0], targets[0])
    theirs = run_theirs(low, tokens[0], targets[0])
    out = {"theirs": with_keys(theirs)}
    for level in ("ref", levels()[-1]):
        out[level] = with_keys(ours(run, tmp, folder, ids, "bf16", level))
    truth = with_keys(truth)
    return {of: {k: error(got[k], truth[k]) for k in truth} for of, got in out.items()}


def test_gradients(run, tmp, name, config, seed):
    first = clear_seed(config, seed)
    model = make(config, first)
    folder, ids = os.path.join(tmp, name), os.path.join(tmp, "ids.safetensors")
    model.save_pretrained(folder)
    tokens, targets = batch(config, 1, first)
    write_ids(ids, tokens, targets)
    truth = run_theirs(model, tokens[0], targets[0])
    limit = F32_LIMIT.get(config.model_type, 1e-5)
    for level in levels():
        worst, at = compare(ours(run, tmp, folder, ids, "f32", level), truth, lambda k: limit)
        check(worst < 1, f"{name} f32 {level}: {worst * limit:.1e} at {at}")
    # BF16: the rounding errors of both sides, against F32 on the same rounded weights.  A model is a single draw of noise,
    # and a token may change its expert: medians of three.  Errors are largest for gradients that remain after cancellation
    # (biases of keys): hence the factors.  Over many seeds ours are no larger than theirs, except for q and k of windowed
    # layers (1.3 times, that bias 1.6).
    draws = [low_errors(run, tmp, name, config, clear_seed(config, seed + i)) for i in range(3)]

    def median(of, k):
        return sorted(d[of][k] for d in draws)[1]
    for level in ("ref", levels()[-1]):
        worst, at = max((median(level, k) / ((4 if k.endswith(("k_proj.bias", ".key.bias")) else 2.5) * median("theirs", k) + 4e-3), k)
                        for k in draws[0]["theirs"])
        check(worst < 1, f"{name} bf16 {level}: {worst:.2f} of the limit at {at}")
    return model, folder


def test_folder(run, tmp, name, model, folder):
    """transformers loads our folders completely."""
    again = os.path.join(tmp, name + "-again")
    model.save_pretrained(folder)
    subprocess.run([run, "copy", folder, again], check=True)
    if getattr(model.config, "num_nextn_predict_layers", 0):
        test_modules(run, tmp, name, model, folder, again)
        return
    back, info = class_of(model.config).from_pretrained(again, output_loading_info=True, dtype=torch.float32)
    same = all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), back.state_dict().values()))
    clean = not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    check(same and clean and model.state_dict().keys() == back.state_dict().keys(), f"{name}: our folder loads there")
    if model.config.model_type == "qwen3_next":  # layers that predict tokens further on are passed over, as there
        more, path = os.path.join(tmp, name + "-more"), os.path.join(folder, "model.safetensors")
        save_file({**load_file(path), "mtp.fc.weight": torch.ones(2, 3)}, path, {"format": "pt"})
        subprocess.run([run, "copy", folder, more], check=True)
        a, b = (load_file(os.path.join(f, "model.safetensors")) for f in (again, more))
        check(a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a), f"{name}: its further layers are passed over")
    if not hasattr(model.config, "num_experts_per_tok") or model.config.model_type == "gpt_oss":
        return
    fused, copy = os.path.join(tmp, name + "-fused"), os.path.join(tmp, name + "-copy")
    model.save_pretrained(fused, save_original_format=False)  # as it holds them: all experts of a layer in one tensor
    subprocess.run([run, "copy", fused, copy], check=True)
    a, b = (load_file(os.path.join(f, "model.safetensors")) for f in (again, copy))
    is_fused = any(k.endswith(".gate_up_proj") for k in load_file(os.path.join(fused, "model.safetensors")))
    check(is_fused and a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a), f"{name}: its fused tensors load")


def test_modules(run, tmp, name, model, folder, again):
    """Modules come back as published, with copies of the embedding and the head, which have to be that."""
    a, b = (load_file(os.path.join(f, "model.safetensors")) for f in (folder, again))
    c, copies = model.config, {}
    for k in range(c.num_nextn_predict_layers):
        at = f"model.layers.{c.num_hidden_layers + k}."
        copies[at + "embed_tokens.weight"] = a["model.embed_tokens.weight"]
        copies[at + "shared_head.head.weight"] = a["model.embed_tokens.weight" if c.tie_word_embeddings else "lm_head.weight"]
    want = a | copies
    check(b.keys() == want.keys() and all(torch.equal(b[k], want[k]) for k in want), f"{name}: modules are kept as published")
    once = os.path.join(tmp, name + "-once")
    subprocess.run([run, "copy", again, once], check=True)
    check(open(os.path.join(again, "model.safetensors"), "rb").read() == open(os.path.join(once, "model.safetensors"), "rb").read(),
          f"{name}: and again, to the byte")
    path = os.path.join(once, "model.safetensors")
    save_file({**b, at + "shared_head.head.weight": b[at + "shared_head.head.weight"] + 1}, path, {"format": "pt"})
    end = subprocess.run([run, "copy", once, os.path.join(tmp, name + "-other")], capture_output=True, text=True)
    check(end.returncode and "is not the copy" in end.stderr, f"{name}: another head of a module is refused")


def in_blocks(w, size):
    """Codes of FP8 with a scale for each block of size x size, and the numbers that they stand for."""
    rows, cols = (-(-n // size) for n in w.shape)
    whole = torch.zeros(rows * size, cols * size)
    whole[:w.shape[0], :w.shape[1]] = w
    blocks = whole.reshape(rows, size, cols, size)
    scale = (blocks.abs().amax((1, 3)) / 448).clamp_min(1e-12)
    codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    numbers = codes.float() * scale[:, None, :, None]

    def back(x):
        return x.reshape(rows * size, cols * size)[:w.shape[0], :w.shape[1]].contiguous()
    return back(codes), scale, back(numbers)


def test_published(tmp, name, model):
    """A folder as DeepSeek-V3 is published: FP8 in blocks, and a layer that predicts further tokens, which nothing reads."""
    folder, plain = os.path.join(tmp, name + "-fp8"), os.path.join(tmp, name + "-plain")
    model.save_pretrained(folder)
    path, out, want = os.path.join(folder, "model.safetensors"), {}, {}
    for k, w in load_file(path).items():
        want[k] = out[k] = w
        if k.endswith("_proj.weight") or k.endswith("_with_mqa.weight"):
            out[k], out[k + "_scale_inv"], want[k] = in_blocks(w, 8)
    further = f"model.layers.{model.config.num_hidden_layers}."
    more = {further + "eh_proj.weight": torch.ones(3, 5), further + "enorm.weight": torch.ones(3)}
    out, want = out | more, want | more
    save_file(out, path, metadata={"format": "pt"})
    config = json.load(open(os.path.join(folder, "config.json")))
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                                     "weight_block_size": [8, 8]}
    json.dump(config, open(os.path.join(folder, "config.json"), "w"))
    subprocess.run([os.path.join(BUILD, "bin", "convert-model"), "-q", folder, "-o", plain], check=True)
    got = load_file(os.path.join(plain, "model.safetensors"))
    same = got.keys() == want.keys() and all(torch.equal(got[k], want[k]) for k in want)
    kept = "quantization_config" in json.load(open(os.path.join(plain, "config.json")))
    AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    check(same and not kept, f"{name}: weights of FP8 in blocks are read as published")


def test_blocks(tmp):
    """Weights of FP8 in blocks of 128 x 128 with every form of scales, beside the definition: number [i,j] is code [i,j] times
    scale [i/128, j/128], in F32; as BF16 it is that rounded."""
    base = {"vocab_size": 97, "hidden_size": 384, "intermediate_size": 200, "num_hidden_layers": 2, "num_attention_heads": 4,
            "pad_token_id": None}
    dense = make(LlamaConfig(**base, num_key_value_heads=2), 11)
    mixture = make(DeepseekV3Config(**base, num_key_value_heads=4, q_lora_rank=48, kv_lora_rank=40, qk_nope_head_dim=32,
                                    qk_rope_head_dim=16, v_head_dim=24, n_routed_experts=8, moe_intermediate_size=150, n_group=1,
                                    topk_group=1, num_experts_per_tok=3, first_k_dense_replace=1, num_nextn_predict_layers=0), 11)
    data = os.path.join(tmp, "blocks-data")
    os.mkdir(data)
    write_shard(os.path.join(data, "train"), torch.randint(0, 97, (400,), generator=torch.Generator().manual_seed(5)).tolist())
    g = torch.Generator().manual_seed(12)
    for form, model in (("F32", dense), ("BF16", dense), ("F8_E8M0", dense), ("U8", dense), ("F32", mixture)):
        name = f"{model.config.model_type}, scales in {form}"
        folder = os.path.join(tmp, f"blocks-{form}-{model.config.model_type}")
        model.save_pretrained(folder)
        path, out, want = os.path.join(folder, "model.safetensors"), {}, {}
        for k, w in load_file(path).items():
            want[k] = out[k] = w
            if not k.endswith("_proj.weight"):
                continue
            tall, wide = (-(-n // 128) for n in w.shape)
            power = torch.randint(113, 118, (tall, wide), generator=g)
            scale = torch.ldexp(torch.ones(tall, wide), power - 127)
            if form in ("F32", "BF16"):  # no powers of two
                scale = (scale * (1 + torch.rand(tall, wide, generator=g))).to(getattr(torch, "float32" if form == "F32" else "bfloat16"))
            codes = torch.randint(0, 255, w.shape, generator=g).to(torch.uint8)
            codes[(codes & 127) == 127] = 0  # NaN
            codes = codes.view(torch.float8_e4m3fn)
            out[k] = codes
            out[k + "_scale_inv"] = scale if form in ("F32", "BF16") else (
                power.to(torch.uint8).view(torch.float8_e8m0fnu) if form == "F8_E8M0" else power.to(torch.uint8))
            whole = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)[:w.shape[0], :w.shape[1]]
            want[k] = codes.float() * whole
        save_file(out, path, metadata={"format": "pt"})
        about = json.load(open(os.path.join(folder, "config.json")))
        about["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                                        "weight_block_size": [128, 128], **({"scale_fmt": "ue8m0"} if "8" in form else {})}
        json.dump(about, open(os.path.join(folder, "config.json"), "w"))
        same = True
        for dtype in ("f32", "bf16"):
            plain = f"{folder}-{dtype}"
            subprocess.run([os.path.join(BUILD, "bin", "convert-model"), "-q", folder, "--dtype", dtype, "-o", plain], check=True)
            got = load_file(os.path.join(plain, "model.safetensors"))
            to = torch.float32 if dtype == "f32" else torch.bfloat16
            same &= got.keys() == want.keys() and all(torch.equal(got[k], want[k].to(to)) for k in want if k.endswith("_proj.weight"))
        check(same, f"FP8 in blocks of 128 x 128, {name}: F32 and BF16 numbers to the bit")
        same = True
        for dtype in ("f32", "bf16"):
            said = [subprocess.run([os.path.join(BUILD, "bin", "eval-model"), "-v", "--json", "--dtype", dtype, "--seq-len", "32", f,
                                    os.path.join(data, "train")], check=True, capture_output=True, text=True)
                    for f in (folder, folder + "-f32")]
            losses = [json.loads(s.stdout)["loss"] for s in said]
            same &= losses[0] == losses[1] and losses[0] > 0 and "fp8_e4m3_128" in said[0].stderr
        check(same, f"FP8 in blocks of 128 x 128, {name}: results from codes are those of numbers")


def write_shard(path, ids):
    """A Megatron dataset of one document, or of a list of them (megatron/core/datasets/indexed_dataset.py)."""
    texts = ids if isinstance(ids[0], list) else [ids]
    with open(path + ".bin", "wb") as f:
        for t in texts:
            f.write(struct.pack(f"<{len(t)}H", *t))
    n, at = len(texts), [2 * sum(map(len, texts[:i])) for i in range(len(texts))]
    with open(path + ".idx", "wb") as f:
        f.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, n, n + 1))
        f.write(struct.pack(f"<{n}i", *map(len, texts)) + struct.pack(f"<{n}q", *at) + struct.pack(f"<{n + 1}q", *range(n + 1)))


HYPER = {"lr": 3e-3, "b1": 0.9, "b2": 0.95, "eps": 1e-8, "decay": 0.1, "clip": 1.0}


def train_theirs(model, tokens, targets, clip):
    rest = [p for n, p in model.named_parameters() if p.ndim == 1 or n.endswith("_bias")]  # of experts, too
    groups = [{"params": [p for p in model.parameters() if all(p is not q for q in rest)], "weight_decay": HYPER["decay"]},
              {"params": rest, "weight_decay": 0.0}]
    opt = torch.optim.AdamW(groups, lr=HYPER["lr"], betas=(HYPER["b1"], HYPER["b2"]), eps=HYPER["eps"])
    losses, norms = [], []
    for s in range(tokens.shape[0]):
        opt.zero_grad()
        loss, _ = loss_of(model, tokens[s], targets[s])
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or 1e30).item())
        opt.step()
        losses.append(loss.item())
    return losses, norms


def far(got, want):
    return max(abs(a - b) / abs(b) for a, b in zip(got, want)) if len(got) == len(want) else float("inf")


def test_steps(run, tmp, name, config):
    """Ten steps on ten batches: graph, gradients and optimiser, without the training loop."""
    model = make(config, 5).train()
    folder, ids = os.path.join(tmp, name + "-steps"), os.path.join(tmp, "steps.safetensors")
    model.save_pretrained(folder)
    tokens, targets = batch(config, 10, 6)
    write_ids(ids, tokens, targets, [HYPER[k] for k in ("lr", "b1", "b2", "eps", "decay")])
    want, _ = train_theirs(model, tokens, targets, None)
    for level in ("ref", levels()[-1]):
        worst = far(ours(run, tmp, folder, ids, "f32", level, "train")["losses"].tolist(), want)
        check(worst < 1e-4 and want[-1] != want[0], f"{name} {level}: ten steps of AdamW, losses to {worst:.1e}")


def test_tool(tmp, name, config):
    """The same by train(1): every step uses the whole data set, so the order of its windows does not matter."""
    model = make(config, 5).train()
    folder, data = os.path.join(tmp, name + "-train"), os.path.join(tmp, name + "-data")
    model.save_pretrained(folder)
    os.mkdir(data)
    ids = torch.randint(0, config.vocab_size, (BATCH * SEQ + 1,), generator=torch.Generator().manual_seed(4))
    write_shard(os.path.join(data, "train"), ids.tolist())
    tokens, targets = ids[:-1].reshape(1, BATCH, SEQ).expand(10, -1, -1), ids[1:].reshape(1, BATCH, SEQ).expand(10, -1, -1)
    want, norms = train_theirs(model, tokens, targets, HYPER["clip"])
    for size, more in ((BATCH, 1), (1, BATCH)):
        out, metrics = os.path.join(tmp, f"{name}-run{size}"), os.path.join(tmp, f"{name}-{size}.jsonl")
        subprocess.run([os.path.join(BUILD, "bin", "train"), "-q", folder, data, "-o", out, "--metrics", metrics,
                        "--steps", "10", "--seq-len", str(SEQ), "--batch-size", str(size),
                        "--gradient-accumulation-steps", str(more), "--lr-schedule", "constant", "--peak-tflops", "0", *(["--moe-router-bias-update-rate", "0"] if name == "deepseek-v3" else []),
                        "--lr", str(HYPER["lr"]), "--beta1", str(HYPER["b1"]), "--beta2", str(HYPER["b2"]),
                        "--eps", str(HYPER["eps"]), "--weight-decay", str(HYPER["decay"]),
                        "--max-grad-norm", str(HYPER["clip"])], check=True)
        records = [json.loads(line) for line in open(metrics)]
        got = [r["loss"] for r in records if "grad_norm" in r]
        worst, norm = far(got, want), far([r["grad_norm"] for r in records if "grad_norm" in r], norms)
        check(worst < 1e-4 and norm < 1e-3, f"{name}: ten steps of train, {more} micro-batches: losses to {worst:.1e}, "
              f"gradient norms to {norm:.1e}")
    back = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    # The gradient of the bias of GPT-2's and BLOOM's keys is only rounding, which AdamW scales up to the size of any other.
    worst = max(error(b, a) for (k, a), b in zip(model.state_dict().items(), back.state_dict().values())
                if not k.endswith(("c_attn.bias", "query_key_value.bias")))
    check(worst < 1e-4, f"{name}: the trained run loads there, weights to {worst:.1e}")


def test_masked(run, tmp, name, config):
    """Ten steps of train --objective mlm on the masks that it draws, which the rule of its unit test makes."""
    from tokenizers import Tokenizer, models
    model = make(config, 5).train()
    model.one_type = True
    folder, data, masks = (os.path.join(tmp, f"{name}-{n}") for n in ("masked", "ids", "masks.safetensors"))
    model.save_pretrained(folder)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = special + [f"w{i}" for i in range(len(special), config.vocab_size)]
    tok = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tok.add_special_tokens(special)
    tok.save(os.path.join(folder, "tokenizer.json"))
    os.mkdir(data)
    ids = torch.randint(0, config.vocab_size, (2 * BATCH * SEQ + 3,), generator=torch.Generator().manual_seed(4))
    write_shard(os.path.join(data, "train"), ids.tolist())
    subprocess.run([run, "masks", folder, os.path.join(data, "train"), masks, "10", str(BATCH), str(SEQ)], check=True)
    tokens, targets = (load_file(masks)[k] for k in ("tokens", "targets"))
    seen = torch.where(targets >= 0, targets, tokens).reshape(5, -1, SEQ)  # of five epochs all windows once
    whole = {tuple(w) for w in ids[:2 * BATCH * SEQ].reshape(-1, SEQ).tolist()}
    check(all({tuple(w) for w in e.tolist()} == whole for e in seen) and (targets[targets >= 0] >= len(special)).all()
          and not torch.equal(targets[0] >= 0, targets[2] >= 0), f"{name}: masks stand in the places of the data's tokens")
    want, norms = train_theirs(model, tokens, targets, HYPER["clip"])
    for size, more in ((BATCH, 1), (1, BATCH)):
        out, metrics = os.path.join(tmp, f"{name}-mlm{size}"), os.path.join(tmp, f"{name}-mlm{size}.jsonl")
        subprocess.run([os.path.join(BUILD, "bin", "train"), "-q", folder, data, "-o", out, "--metrics", metrics, "--objective",
                        "mlm", "--steps", "10", "--seq-len", str(SEQ), "--batch-size", str(size),
                        "--gradient-accumulation-steps", str(more), "--lr-schedule", "constant", "--peak-tflops", "0",
                        "--lr", str(HYPER["lr"]), "--beta1", str(HYPER["b1"]), "--beta2", str(HYPER["b2"]),
                        "--eps", str(HYPER["eps"]), "--weight-decay", str(HYPER["decay"]),
                        "--max-grad-norm", str(HYPER["clip"])], check=True)
        records = [r for r in map(json.loads, open(metrics)) if "grad_norm" in r]
        worst, norm = far([r["loss"] for r in records], want), far([r["grad_norm"] for r in records], norms)
        counted = [r["tokens"] for r in records] == (targets >= 0).sum((1, 2)).cumsum(0).tolist()
        check(worst < 1e-4 and norm < 1e-3 and counted, f"{name}: ten steps of train --objective mlm, {more} micro-batches: "
              f"losses to {worst:.1e}, gradient norms to {norm:.1e}")
    back = class_of(config).from_pretrained(out, dtype=torch.float32)
    # the gradient of a bias of keys is only rounding, which AdamW scales up
    worst = max(error(b, a) for (k, a), b in zip(model.state_dict().items(), back.state_dict().values())
                if not k.endswith("key.bias"))
    check(worst < 1e-4, f"{name}: the trained run loads there, weights to {worst:.1e}")


def test_pairs(run, tmp, name, config):
    """Ten steps of train --objective mlm:next_sentence=on on the pairs that it draws, with the loss of transformers' class."""
    from tokenizers import Tokenizer, models, processors
    model = make(config, 5).train()
    folder, data, drawn = (os.path.join(tmp, f"{name}-{n}") for n in ("paired", "ids", "drawn.safetensors"))
    model.save_pretrained(folder)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    cls, sep = special.index("[CLS]"), special.index("[SEP]")
    words = special + [f"w{i}" for i in range(len(special), config.vocab_size)]
    tok = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tok.add_special_tokens(special)
    tok.post_processor = processors.BertProcessing(("[SEP]", sep), ("[CLS]", cls))
    tok.save(os.path.join(folder, "tokenizer.json"))
    os.mkdir(data)
    g = torch.Generator().manual_seed(4)
    texts = [torch.randint(len(special), config.vocab_size, (n,), generator=g).tolist() for n in (30, 40, 1, 33, 50, 2, 61, 45)]
    write_shard(os.path.join(data, "train"), [[cls] + t + [sep] for t in texts])
    subprocess.run([run, "pairs", folder, os.path.join(data, "train"), drawn, "10", str(BATCH), str(SEQ)], check=True)
    tokens, targets, types, ends, follows = (load_file(drawn)[k] for k in ("tokens", "targets", "types", "ends", "follows"))
    follows = follows[..., 0]
    # what the windows are, by the rule of nsp.h
    within, right = " ".join(map(str, sum(([-1] + t for t in texts), [-1]))) + " ", True
    seen = torch.where(targets >= 0, targets, tokens)
    for row, kinds, end, label in zip(seen.reshape(-1, SEQ).tolist(), types.reshape(-1, SEQ).tolist(),
                                      ends.reshape(-1, SEQ)[:, 0].tolist(), follows.reshape(-1).tolist()):
        a, b = row.index(sep), end - 1
        first, second = (" ".join(map(str, x)) + " " for x in (row[1:a], row[a + 1:b]))
        right &= row[0] == cls and row[b] == sep and row[end:] == [0] * (SEQ - end) and len(first) > 1 and len(second) > 1
        right &= kinds == [0] * (a + 1) + [1] * (end - a - 1) + [0] * (SEQ - end)
        right &= first in within and second in within and (label == 1 or first + second in within)
    check(right and 3 < follows.sum() < 17, f"{name}: pairs are of the data's documents, and every second one follows")
    masks = (torch.arange(SEQ) < ends[..., :1]).long()
    rest = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": HYPER["decay"]},
              {"params": rest, "weight_decay": 0.0}]
    opt = torch.optim.AdamW(groups, lr=HYPER["lr"], betas=(HYPER["b1"], HYPER["b2"]), eps=HYPER["eps"])
    want, norms = [], []
    for s in range(10):
        opt.zero_grad()
        out = model(tokens[s], attention_mask=masks[s], token_type_ids=types[s], next_sentence_label=follows[s],
                    labels=targets[s].masked_fill(targets[s] < 0, -100))
        out.loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), HYPER["clip"]).item())
        opt.step()
        want.append(out.loss.item())
    for size, more in ((BATCH, 1), (1, BATCH)):
        out, metrics = os.path.join(tmp, f"{name}-nsp{size}"), os.path.join(tmp, f"{name}-nsp{size}.jsonl")
        subprocess.run([os.path.join(BUILD, "bin", "train"), "-q", folder, data, "-o", out, "--metrics", metrics, "--objective",
                        "mlm:next_sentence=on", "--steps", "10", "--seq-len", str(SEQ), "--batch-size", str(size),
                        "--gradient-accumulation-steps", str(more), "--lr-schedule", "constant", "--peak-tflops", "0",
                        "--lr", str(HYPER["lr"]), "--beta1", str(HYPER["b1"]), "--beta2", str(HYPER["b2"]),
                        "--eps", str(HYPER["eps"]), "--weight-decay", str(HYPER["decay"]), "--dtype", "f32",
                        "--max-grad-norm", str(HYPER["clip"])], check=True)
        records = [r for r in map(json.loads, open(metrics)) if "grad_norm" in r]
        worst = far([r["loss"] + r["next_sentence_loss"] for r in records], want)
        norm = far([r["grad_norm"] for r in records], norms)
        check(worst < 1e-4 and norm < 1e-3, f"{name}: ten steps of train on pairs, {more} micro-batches: losses to {worst:.1e}, "
              f"gradient norms to {norm:.1e}")
    back, info = class_of(config).from_pretrained(out, output_loading_info=True, dtype=torch.float32)
    # the gradient of a bias of keys is only rounding, which AdamW scales up
    worst = max(error(b, a) for (k, a), b in zip(model.state_dict().items(), back.state_dict().values())
                if not k.endswith("key.bias"))
    clean = not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    check(worst < 1e-4 and clean, f"{name}: the trained run loads there, weights to {worst:.1e}")
    # a model for masked tokens alone, as published folders are called, gets the head of its files
    path = os.path.join(folder, "config.json")
    about = json.load(open(path))
    json.dump(about | {"architectures": ["BertForMaskedLM"]}, open(path, "w"))
    subprocess.run([os.path.join(BUILD, "bin", "train"), "-q", "-f", folder, data, "-o", out, "--objective", "mlm:next_sentence=on",
                    "--steps", "1", "--seq-len", str(SEQ), "--batch-size", "2", "--lr", "0", "--weight-decay", "0"], check=True)
    a, b = (load_file(os.path.join(f, "model.safetensors")) for f in (folder, os.path.join(out, "latest")))
    check(all(torch.equal(a[k], b[k]) for k in a if "seq_relationship" in k or "pooler" in k)
          and json.load(open(os.path.join(out, "latest", "config.json")))["architectures"] == ["BertForPreTraining"],
          f"{name}: a head beside that of masked tokens is found, and the class is set")


def pack_experts(state, seed):
    """The experts of a gpt-oss in MXFP4 as they are published, and what transformers makes of them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors
    g, packed, plain = torch.Generator().manual_seed(seed), {}, {}
    for k, v in state.items():
        if not k.endswith(("gate_up_proj", "down_proj")):
            packed[k] = plain[k] = v
            continue
        experts, wide, out = v.shape
        packed[k + "_blocks"] = torch.randint(0, 256, (experts, out, wide // 32, 16), generator=g, dtype=torch.uint8)
        packed[k + "_scales"] = torch.randint(121, 124, (experts, out, wide // 32), generator=g, dtype=torch.uint8)
        plain[k] = convert_moe_packed_tensors(packed[k + "_blocks"], packed[k + "_scales"]).contiguous()
    return packed, plain


def test_mxfp4(run, tmp):
    """Folders as they are published: the numbers, and results from codes, which are those of the numbers."""
    config = GptOssConfig(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                          num_key_value_heads=2, head_dim=16, num_local_experts=5, num_experts_per_tok=2, sliding_window=6,
                          rope_parameters=rope("default"), pad_token_id=None)
    model = make(config, 3).to(torch.bfloat16)
    folders = [os.path.join(tmp, n) for n in ("oss-packed", "oss-plain", "oss-copy")]
    states = pack_experts({k: v.contiguous() for k, v in model.state_dict().items()}, 4)
    for folder, state in zip(folders, states):
        model.config.save_pretrained(folder)
        save_file(state, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    about = json.load(open(os.path.join(folders[0], "config.json")))
    about["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    json.dump(about, open(os.path.join(folders[0], "config.json"), "w"))
    subprocess.run([run, "copy", folders[0], folders[2]], check=True)
    copy = load_file(os.path.join(folders[2], "model.safetensors"))
    same = copy.keys() == states[1].keys() and all(torch.equal(copy[k].to(v.dtype), v) for k, v in states[1].items())
    plain = "quantization_config" not in json.load(open(os.path.join(folders[2], "config.json")))
    check(same and plain, "gpt-oss: experts in MXFP4 are read to the bit, and written as numbers")
    data = os.path.join(tmp, "oss-data")
    os.mkdir(data)
    write_shard(os.path.join(data, "train"), torch.randint(0, 97, (400,), generator=torch.Generator().manual_seed(5)).tolist())
    for dtype in ("bf16", "f32"):
        said = [subprocess.run([os.path.join(BUILD, "bin", "eval-model"), "-v", "--json", "--dtype", dtype, "--seq-len", "32", f,
                                os.path.join(data, "train")], check=True, capture_output=True, text=True) for f in folders[:2]]
        losses = [json.loads(s.stdout) for s in said]
        for x in losses:
            [x.pop(k, None) for k in ("seconds", "tokens_per_second", "model")]
        check(losses[0] == losses[1] and "mxfp4" in said[0].stderr, f"gpt-oss: {dtype} results from codes are those of numbers")


GOLDEN = {"gpt2", "gpt2-untied", "llama", "llama-llama3", "llama-yarn", "llama-linear", "mistral", "qwen2-window",
          "qwen3-bias", "olmo2", "olmo3", "gemma2", "gemma3", "mixtral", "qwen2-moe", "qwen3-moe", "qwen3-next", "qwen3_5",
          "gpt-oss", "deepseek-v2", "deepseek-v3", "deepseek-v3-ahead", "bert", "bert-pairs", "bloom", "bloom-heads"}


def save_golden(name, model, about, tokens, targets, script):
    """about: the config.json."""
    out = run_theirs(model, tokens, targets)
    for of, p in model.named_parameters():
        out |= {k: v.contiguous().clone() for k, v in by_our_names(model.config, of, p.detach().float()).items()}
    out |= {k: b.clone() for k, b in model.named_buffers() if k.endswith("e_score_correction_bias")}
    out |= {"tokens": tokens, "targets": targets}
    meta = {"config": json.dumps(about, sort_keys=True), "script": f"tests/interop/{script} --golden",
            "transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}
    path = os.path.join(ROOT, "tests/golden/models", name + ".safetensors")
    save_file(out, path, metadata=meta)
    os.chmod(path, 0o644)


def write_golden(only):
    for name, config in configs(vocab=29, wide=1):
        if name not in GOLDEN or (only and name not in only):
            continue
        seed = clear_seed(config, seed_of(name), 11)
        tokens, targets = batch(config, 1, seed, 11)
        about = config.to_diff_dict() | {"model_type": config.model_type}
        save_golden(name, make(config, seed), about, tokens[0], targets[0], "test_models.py")


def main():
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False  # it selects instructions that raise SIGILL on some virtual machines
    only = [a for a in sys.argv[1:] if not a.startswith("-")]
    if "--golden" in sys.argv:
        write_golden(only)
        return 0
    with tempfile.TemporaryDirectory() as tmp:
        run = probe(tmp)
        for name, config in configs():
            if only and name not in only:
                continue
            model, folder = test_gradients(run, tmp, name, config, seed_of(name))
            test_folder(run, tmp, name, model, folder)
            if name == "deepseek-v3":
                test_published(tmp, name, model)
            if name in ("gpt2", "llama", "qwen3", "olmo2", "olmo3", "gemma2", "gemma3", "mixtral", "qwen2-moe", "qwen3-moe",
                        "qwen3-next", "qwen3_5", "gpt-oss", "deepseek-v2", "deepseek-v3", "bloom"):
                test_steps(run, tmp, name, config)
                if name != "qwen3_5":  # half a bit of its weights moves transformers' own losses on one batch by 9e-5 in ten steps
                    test_tool(tmp, name, config)
            if name == "bert-pairs":
                test_pairs(run, tmp, name, config)
            if name == "bert":
                test_steps(run, tmp, name, config)
                test_masked(run, tmp, name, config)
        if not only or "blocks" in only:
            test_blocks(tmp)
        if not only or "mxfp4" in only:
            test_mxfp4(run, tmp)
    return tap.finish()


if __name__ == "__main__":
    sys.exit(main())
