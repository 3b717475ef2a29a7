#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare adapters in training with PEFT's: gradients, ten steps of AdamW in F32, and what they leave; speaks TAP.

Environment: LM_TEST_BUILD, a build folder with libcore.a."""
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.filterwarnings("ignore")
import peft
import torch
from peft.tuners.c3a.utils import BlockCircularConvolution
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GptOssConfig, LlamaConfig, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig
import tap
from tap import BUILD, HERE, ROOT, check

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
LIBS = "-lz -lzstd -lxxhash -ljansson -lpcre2-8 -lutf8proc -lcairo -lm -lpthread".split()
STEPS, BATCH, SEQ, VOCAB = 10, 2, 12, 61
ADAMW = (1e-3, 0.9, 0.999, 1e-8)


def probe(tmp):
    path = os.path.join(tmp, "probe")
    subprocess.run(["cc", "-std=c17", "-O1", "-D_GNU_SOURCE", "-I" + ROOT, "-I" + os.path.join(ROOT, "lib"), "-o",
                    path, os.path.join(HERE, "adapter_probe.c"), os.path.join(BUILD, "libcore.a")] + LIBS, check=True)
    return path


MIXTURES = {"qwen3-moe": (Qwen3MoeConfig, dict(moe_intermediate_size=20, num_experts=5, num_experts_per_tok=2, head_dim=12,
                                               norm_topk_prob=True)),
            "qwen2-moe": (Qwen2MoeConfig, dict(moe_intermediate_size=20, num_experts=3, num_experts_per_tok=2,
                                               shared_expert_intermediate_size=24)),
            "mixtral": (MixtralConfig, dict(num_local_experts=4, num_experts_per_tok=2)),
            "gpt-oss": (GptOssConfig, dict(num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=6))}


def base_of(kind):
    torch.manual_seed(3)
    if kind == "gpt2":
        config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=0,
                            eos_token_id=0, embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0)
    elif kind in MIXTURES:
        which, more = MIXTURES[kind]
        config = which(vocab_size=VOCAB, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
                       num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=0, **more)
    else:
        config = LlamaConfig(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
                             bos_token_id=0, eos_token_id=0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn_like(p) * (0.2 if p.ndim == 1 else 0.6 / p.shape[-1] ** 0.5) + ("norm" in name or "ln_" in name))
    return model


def circular_backward(ctx, dy):
    """The derivative of C3A's product.  That of PEFT 0.21 with respect to x is wrong: gradcheck refuses it."""
    x, w = ctx.saved_tensors
    dy = torch.fft.fft(dy.reshape(*dy.shape[:-1], w.shape[0], -1))
    dx = torch.fft.ifft(torch.einsum("...mb,mnb->...nb", dy, torch.fft.fft(w))).real
    dw = torch.fft.fft(torch.einsum("...mb,...nb->mnb", dy, torch.fft.ifft(x))).real
    return dx.reshape(*dx.shape[:-2], -1), dw


BlockCircularConvolution.backward = staticmethod(circular_backward)
LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
GPT2 = ["c_attn", "c_proj", "c_fc"]


def configs(kind):
    """Name -> PEFT's configuration."""
    if kind in MIXTURES:  # parameters of all experts, with ranks that differ from their number
        both = dict(task_type="CAUSAL_LM", r=3, lora_alpha=5,
                    target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
        yield "experts", peft.LoraConfig(**both, target_modules=["q_proj"])
        yield "experts, ranks", peft.LoraConfig(**both, target_modules=[], rank_pattern={"experts.down_proj": 2}, use_rslora=True,
                                                alpha_pattern={"layers.1.mlp.experts.gate_up_proj": 7})
        yield "experts, down", peft.LoraConfig(**{**both, "target_parameters": ["experts.down_proj"]}, target_modules=[])
        yield "experts, gate and up", peft.LoraConfig(**{**both, "target_parameters": ["experts.gate_up_proj"]},
                                                      target_modules=["o_proj"])
        return
    every = LLAMA if kind == "llama" else GPT2
    turned = {"fan_in_fan_out": True} if kind == "gpt2" else {}
    lora = dict(task_type="CAUSAL_LM", r=4, lora_alpha=6, target_modules=every, **turned)
    some = dict(task_type="CAUSAL_LM", target_modules=every)
    yield "lora", peft.LoraConfig(**lora)
    yield "rslora, ranks", peft.LoraConfig(**lora, use_rslora=True, rank_pattern={"c_attn": 3, "v_proj": 2, "down_proj": 5},
                                           alpha_pattern={"c_fc": 3, "k_proj": 11})
    yield "dora", peft.LoraConfig(**lora, use_dora=True)
    yield "lora, some", peft.LoraConfig(**{**lora, "target_modules": ["q_proj", "v_proj"] if kind == "llama" else ["c_attn"]})
    yield "lora, biases", peft.LoraConfig(**lora, bias="all")
    yield "lora, its biases", peft.LoraConfig(**lora, bias="lora_only")
    yield "lora, norms", peft.LoraConfig(**lora, modules_to_save=["ln_f" if kind == "gpt2" else "norm"])
    yield "lora, embedding", peft.LoraConfig(**{**lora, "target_modules": ["wte" if kind == "gpt2" else "embed_tokens"] + every})
    yield "ia3", peft.IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "v_proj", "down_proj"] if kind == "llama"
                                else ["c_attn", "mlp.c_proj"],
                                feedforward_modules=["down_proj"] if kind == "llama" else ["mlp.c_proj"], **turned)
    yield "adalora", peft.AdaLoraConfig(task_type="CAUSAL_LM", target_modules=every, init_r=4, target_r=2, lora_alpha=6,
                                        total_step=1000, tinit=100, tfinal=100, **turned)
    if kind == "llama":  # these do not change Conv1D there, or need layers that are square
        headed = {"target_modules": every + ["lm_head"]}
        yield "lora, head", peft.LoraConfig(**{**lora, **headed})
        yield "lora, head alone", peft.LoraConfig(**{**lora, "target_modules": ["lm_head"]})
        yield "dora, head", peft.LoraConfig(**{**lora, **headed}, use_dora=True)
        yield "loha, head", peft.LoHaConfig(**{**some, **headed}, r=3, alpha=5)
        yield "loha", peft.LoHaConfig(**some, r=3, alpha=5)
        yield "lokr", peft.LoKrConfig(**some, r=3, alpha=5)
        yield "oft", peft.OFTConfig(**some, r=0, oft_block_size=4, use_cayley_neumann=False)
        yield "boft", peft.BOFTConfig(**some, boft_block_size=4)
        yield "hra", peft.HRAConfig(**some, r=4)
        yield "vera", peft.VeraConfig(**some, r=6)
        yield "road", peft.RoadConfig(**some, variant="road_2", group_size=8)
        yield "delora", peft.DeloraConfig(**some, r=4)
        yield "miss", peft.MissConfig(**some, r=4)
        # PEFT's scaling of 150 makes the changes of this small base 6 times its weights, and saturates its attention: in float64,
        # half a unit of F32 in W' alone then moves gradients by 2e-5, and sums of 30 terms in F32 by 2e-4.  60: by 2e-6 in all.
        yield "fourierft", peft.FourierFTConfig(**some, n_frequency=30, scaling=60)
        yield "pvera, its mean", peft.PveraConfig(**some, r=6)  # noise differs: test_tune_attach has it
        yield "randlora", peft.RandLoraConfig(**some, r=6, randlora_alpha=20)
        yield "vblora", peft.VBLoRAConfig(**some, r=3, num_vectors=10, vector_length=16)
        yield "unilora", peft.UniLoraConfig(**some, r=3, theta_d_length=40, save_indices=True)
        yield "tinylora", peft.TinyLoraConfig(**some, r=2, u=8)
        yield "gralora", peft.GraloraConfig(**some, r=4, alpha=6, hybrid_r=2)
        yield "hira", peft.HiraConfig(**some, r=4)
        yield "c3a", peft.C3AConfig(**some, block_size=8)
        yield "waveft", peft.WaveFTConfig(**some, n_frequency=30)
        yield "shira", peft.ShiraConfig(**some, r=2)
        yield "supertuning", peft.SupertuningConfig(**some, sparsity=0.9)
        yield "supertuning, lora", peft.SupertuningConfig(**some, sparsity=0.9, r=3)
        yield "deft", peft.DeftConfig(**some, r=4)
        yield "deft, qr", peft.DeftConfig(**some, r=4, decomposition_method="qr")
        yield "glora", peft.GloraConfig(**some, r=4)
        yield "peanut", peft.PeanutConfig(**some, r=4, depth=1)
        yield "beft", peft.BeftConfig(task_type="CAUSAL_LM", target_modules=["v_proj"])
        yield "frod", peft.FrodConfig(**some, progressbar=False)
        yield "adamss", peft.AdamssConfig(**some, r=12, num_subspaces=3, subspace_rank=2)
        yield "osf", peft.OSFConfig(**some, effective_rank=4)
        yield "tokens", peft.TrainableTokensConfig(task_type="CAUSAL_LM", token_indices=[3, 5, 17])
        yield "layer norms", peft.LNTuningConfig(task_type="CAUSAL_LM", target_modules=["input_layernorm", "norm"])
    yield "prompt", peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    yield "p-tuning", peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=20)
    yield "p-tuning, LSTM", peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=10, encoder_hidden_size=20,
                                                     encoder_reparameterization_type="LSTM")
    yield "prefix", peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    yield "prefix, projected", peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, prefix_projection=True,
                                                       encoder_hidden_size=20)


def batches():
    g = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCAB, (STEPS, BATCH, SEQ + 1), generator=g)
    tokens, targets = ids[..., :-1].contiguous(), ids[..., 1:].clone()
    targets[torch.rand(targets.shape, generator=g) < 0.2] = -1
    return tokens, targets


def virtual(model):
    return getattr(model.peft_config["default"], "num_virtual_tokens", 0) or 0


def our_name(name, model):
    """A parameter of PEFT's model as adapter files name it."""
    name = name.replace("prompt_encoder.default.", "base_model.prompt_encoder.").replace(".modules_to_save.default", "")
    if virtual(model) and name.endswith("embedding.weight"):
        config = model.peft_config["default"]
        if config.peft_type == "PROMPT_TUNING" or (config.peft_type == "PREFIX_TUNING" and not config.prefix_projection):
            return "prompt_embeddings"
    name = re.sub(r"\.default\b", "", name)
    shared = re.search(r"\.(vblora_vector_bank|unilora_theta_d|tinylora_v\.\d+)$", name)
    if shared:
        return "base_model." + shared[1]
    return name.replace("lora_magnitude_vector.weight", "lora_magnitude_vector")


def trained(model):
    return {our_name(n, model): p for n, p in model.named_parameters() if p.requires_grad}


def randomise(model):
    g = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, p in trained(model).items():
            p.add_(torch.randn(p.shape, generator=g) * 0.1)


def run_theirs(model, tokens, targets):
    params, out = trained(model), {}
    optimiser = torch.optim.AdamW(params.values(), lr=ADAMW[0], betas=ADAMW[1:3], eps=ADAMW[3], weight_decay=0.0)
    losses = []
    for s in range(STEPS):
        optimiser.zero_grad()
        logits = model(input_ids=tokens[s], attention_mask=torch.ones_like(tokens[s])).logits[:, -SEQ:]
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB), targets[s].masked_fill(targets[s] < 0, -100).reshape(-1))
        loss.backward()
        losses.append(loss.item())
        if s == 0:
            out |= {"grad." + n: p.grad.clone() for n, p in params.items()}
        optimiser.step()
    out |= {n: p.detach().clone() for n, p in params.items()}
    if virtual(model) and "prompt_embeddings" not in out:
        out["rows"] = model.get_prompt_embedding_to_save("default").detach().clone()
    return torch.tensor(losses), out


def without_keys(name, t):
    """A bias of keys changes no probability: its gradient is noise, which AdamW makes as large as any."""
    return torch.cat([t[:t.numel() // 3], t[t.numel() // 3 * 2:]]) if name.endswith("c_attn.base_layer.bias") else t


def error(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-12)).item()


def files_of(model, tmp):
    """The adapter's configuration and tensors as our files have them."""
    folder = os.path.join(tmp, "adapter")
    model.save_pretrained(folder, save_embedding_layers=False)
    config = json.load(open(os.path.join(folder, "adapter_config.json")))
    config["inference_mode"] = False
    json.dump(config, open(os.path.join(tmp, "config.json"), "w"))
    if virtual(model):  # with the encoder, which the file does not hold
        tensors = {n: p.detach().clone().contiguous() for n, p in trained(model).items()}
        tensors.setdefault("prompt_embeddings", torch.zeros_like(model.get_prompt_embedding_to_save("default")))
    else:
        return folder
    save_file(tensors, os.path.join(tmp, "adapter.safetensors"))
    return os.path.join(tmp, "adapter.safetensors")


def test(run, tmp, kind, name, config):
    base = os.path.join(tmp, kind)
    model = base_of(kind)
    if not os.path.isdir(base):
        model.save_pretrained(base)
    model = peft.get_peft_model(model, config)
    randomise(model)
    adapter = files_of(model, tmp)
    if name.startswith("pvera"):
        model.eval()
    tokens, targets = batches()
    p = virtual(model)
    front = torch.arange(VOCAB, VOCAB + p).expand(STEPS, BATCH, p)
    save_file({"tokens": torch.cat([front, tokens], -1).contiguous(),
               "targets": torch.cat([torch.full_like(front, -1), targets], -1).contiguous(),
               "adamw": torch.tensor(ADAMW)}, os.path.join(tmp, "batch.safetensors"))
    losses, theirs = run_theirs(model, tokens, targets)
    for level in ("ref", "best"):
        out = os.path.join(tmp, "out.safetensors")
        flags = open("/proc/cpuinfo").read()
        best = "avx512" if "avx512bw" in flags else "avx2"
        got = subprocess.run([run, base, os.path.join(tmp, "config.json"), adapter,
                              os.path.join(tmp, "batch.safetensors"), out, "ref" if level == "ref" else best],
                             capture_output=True, text=True)
        if got.returncode:
            check(False, f"{kind} {name} {level}: {got.stderr.strip()}")
            continue
        ours = load_file(out)
        apart = (ours.pop("losses").double() - losses.double()).abs().max().item()
        if ours.keys() != theirs.keys():
            check(False, f"{kind} {name} {level}: other tensors: {sorted(ours.keys() ^ theirs.keys())[:4]}")
            continue
        worst, at = max((error(without_keys(k, ours[k]), without_keys(k, theirs[k])), k) for k in theirs)
        check(apart < 1e-5 and worst < 1e-4, f"{kind} {name} {level}: losses {apart:.1e}, tensors {worst:.1e} at {at}")


def main():
    with tempfile.TemporaryDirectory() as tmp:
        run = probe(tmp)
        only = sys.argv[1:]
        for kind in ("llama", "gpt2", *MIXTURES):
            for name, config in configs(kind):
                if only and name not in only:
                    continue
                try:
                    test(run, tmp, kind, name, config)
                except Exception as e:
                    check(False, f"{kind} {name}: {type(e).__name__}: {str(e)[:300]}")
    return tap.finish()


if __name__ == "__main__":
    sys.exit(main())
