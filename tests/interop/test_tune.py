#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Adapters of every method that peft can merge: merged by merge-models and by merge_and_unload; converted to LoRA, extracted and
combined here, loaded by peft.  Speaks TAP.

Environment: LM_TEST_BUILD, a build folder with bin/merge-models and libcore.a."""
import importlib.util
import os
import subprocess
import sys
import tempfile
import warnings

warnings.filterwarnings("ignore")
import numpy
import peft
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
import tap
from tap import BUILD, check, driver

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
TOOL = os.path.join(BUILD, "bin", "merge-models")
L = ["q_proj", "k_proj", "down_proj"]
SQUARE = ["q_proj", "o_proj"]

# name: configuration class, model, keys
CASES = {
    "lora": ("LoraConfig", "llama", dict(target_modules=L, r=4, lora_alpha=6)),
    "rslora": ("LoraConfig", "llama", dict(target_modules=L, r=4, use_rslora=True)),
    "dora": ("LoraConfig", "llama", dict(target_modules=L, r=4, use_dora=True)),
    "lora patterns": ("LoraConfig", "llama", dict(target_modules=L, r=4, rank_pattern={"layers.1.self_attn.k_proj": 2},
                                                  alpha_pattern={"down_proj": 3})),
    "lora on an embedding": ("LoraConfig", "llama", dict(target_modules=["embed_tokens", "q_proj"], r=4)),
    "lora with a saved head": ("LoraConfig", "llama", dict(target_modules=["q_proj"], r=4, modules_to_save=["lm_head"])),
    "lora with tokens": ("LoraConfig", "llama", dict(target_modules=["q_proj"], r=4, trainable_token_indices=[3, 5, 17])),
    "lora by pissa": ("LoraConfig", "llama", dict(target_modules=["q_proj"], r=4, init_lora_weights="pissa")),
    "lora gpt2": ("LoraConfig", "gpt2", dict(target_modules=["c_attn", "c_proj"], r=4)),
    "adalora ranks": ("AdaLoraConfig", "llama", dict(target_modules=L, init_r=3, target_r=2, total_step=10, rank_pattern={
        f"model.layers.{i}.{m}.lora_E": [i == 0, m != "mlp.down_proj", i == 0 and m == "self_attn.q_proj"]
        for i in range(2) for m in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj")})),
    "adalora": ("AdaLoraConfig", "llama", dict(target_modules=L, init_r=6, target_r=4, total_step=10)),
    "loha": ("LoHaConfig", "llama", dict(target_modules=L, r=4, alpha=6)),
    "lokr": ("LoKrConfig", "llama", dict(target_modules=L, r=4, alpha=6)),
    "lokr both": ("LoKrConfig", "llama", dict(target_modules=L, r=2, alpha=3, decompose_both=True, decompose_factor=4)),
    "vera": ("VeraConfig", "llama", dict(target_modules=SQUARE, r=8)),
    "vera drawn": ("VeraConfig", "llama", dict(target_modules=SQUARE, r=8, save_projection=False)),
    "pvera": ("PveraConfig", "llama", dict(target_modules=SQUARE, r=8)),
    "randlora": ("RandLoraConfig", "llama", dict(target_modules=L, r=8)),
    "vblora": ("VBLoRAConfig", "llama", dict(target_modules=["q_proj", "k_proj"], r=4, num_vectors=20, vector_length=12)),
    "vblora chosen": ("VBLoRAConfig", "llama", dict(target_modules=["q_proj", "k_proj"], r=4, num_vectors=20,
                                                    vector_length=12, save_only_topk_weights=True)),
    "unilora": ("UniLoraConfig", "llama", dict(target_modules=L, r=4, theta_d_length=64, save_indices=True)),
    "tinylora": ("TinyLoraConfig", "llama", dict(target_modules=L, r=2, u=8)),
    "tinylora tied": ("TinyLoraConfig", "llama", dict(target_modules=L, r=2, u=8, weight_tying=0.5)),
    "gralora": ("GraloraConfig", "llama", dict(target_modules=L, r=8, gralora_k=2, hybrid_r=2)),
    "hira": ("HiraConfig", "llama", dict(target_modules=L, r=4)),
    "delora": ("DeloraConfig", "llama", dict(target_modules=L, r=4)),
    "miss": ("MissConfig", "llama", dict(target_modules=L, r=10)),
    "miss bat": ("MissConfig", "llama", dict(target_modules=SQUARE, r=8, init_weights="bat")),
    "miss mini": ("MissConfig", "llama", dict(target_modules=L, r=8, init_weights="mini", mini_r=4)),
    "c3a": ("C3AConfig", "llama", dict(target_modules=L, block_size=8)),
    "fourierft": ("FourierFTConfig", "llama", dict(target_modules=L, n_frequency=40)),
    "waveft": ("WaveFTConfig", "llama", dict(target_modules=L, n_frequency=40)),
    "shira": ("ShiraConfig", "llama", dict(target_modules=L, r=4)),
    "supertuning": ("SupertuningConfig", "llama", dict(target_modules=L, sparsity=0.9)),
    "supertuning lora": ("SupertuningConfig", "llama", dict(target_modules=L, sparsity=0.9, r=4)),
    "ia3": ("IA3Config", "llama", dict(target_modules=["k_proj", "v_proj", "down_proj"],
                                       feedforward_modules=["down_proj"])),
    "ia3 gpt2": ("IA3Config", "gpt2", dict(target_modules=["c_attn", "mlp.c_proj"],
                                           feedforward_modules=["mlp.c_proj"])),
    "road_1": ("RoadConfig", "llama", dict(target_modules=L, variant="road_1", group_size=8)),
    "road_2": ("RoadConfig", "llama", dict(target_modules=L, variant="road_2", group_size=8)),
    "road_4": ("RoadConfig", "llama", dict(target_modules=L, variant="road_4", group_size=8)),
    "oft": ("OFTConfig", "llama", dict(target_modules=L, oft_block_size=8, r=0)),
    "oft exact": ("OFTConfig", "llama", dict(target_modules=L, oft_block_size=8, r=0, use_cayley_neumann=False)),
    "oft shared": ("OFTConfig", "llama", dict(target_modules=L, oft_block_size=8, r=0, block_share=True,
                                              num_cayley_neumann_terms=4)),
    "oft small": ("OFTConfig", "llama", dict(target_modules=L, oft_block_size=8, r=0, coft=True, eps=0.05)),
    "boft": ("BOFTConfig", "llama", dict(target_modules=L, boft_block_size=4)),
    "hra": ("HRAConfig", "llama", dict(target_modules=L, r=4)),
    "hra orthonormal": ("HRAConfig", "llama", dict(target_modules=L, r=4, apply_GS=True)),
    "psoft": ("PsoftConfig", "llama", dict(target_modules=L, r=4)),
    "deft": ("DeftConfig", "llama", dict(target_modules=L, r=4)),
    "deft qr": ("DeftConfig", "llama", dict(target_modules=L, r=4, decomposition_method="qr", alpha=6)),
    "deft qr para": ("DeftConfig", "llama", dict(target_modules=L, r=4, decomposition_method="qr", para=True)),
    "frod": ("FrodConfig", "llama", dict(target_modules=L)),
    "glora": ("GloraConfig", "llama", dict(target_modules=L, r=4)),
    "glora vectors": ("GloraConfig", "llama", dict(target_modules=L, r=4, config_A_B="vector", config_C="lora",
                                                   config_D_E="constant")),
    "peanut": ("PeanutConfig", "llama", dict(target_modules=L, r=4, depth=1)),
    "osf": ("OSFConfig", "llama", dict(target_modules=L)),
    "adamss": ("AdamssConfig", "llama", dict(target_modules=L, r=12, num_subspaces=3, subspace_rank=2)),
    "adamss dynamic": ("AdamssConfig", "llama", dict(target_modules=["k_proj", "up_proj"], r=8, subspace_rank=3,
                                                     use_dynamic_rank=True, random_seed=5)),
    "beft": ("BeftConfig", "llama", dict(target_modules=["v_proj"])),
    "ln_tuning": ("LNTuningConfig", "llama", dict(target_modules=["input_layernorm", "norm"])),
    "ln_tuning gpt2": ("LNTuningConfig", "gpt2", dict(target_modules=["ln_1", "ln_f"])),
    "tokens tied": ("TrainableTokensConfig", "tied", dict(token_indices=[3, 5, 17], target_modules=["embed_tokens"])),
    "tokens": ("TrainableTokensConfig", "llama", dict(token_indices=[3, 5, 17], target_modules=["embed_tokens"])),
}


def model(kind):
    torch.manual_seed(1)
    if kind == "gpt2":
        m = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=48, n_layer=2, n_head=4, n_positions=32, n_inner=64,
                                       tie_word_embeddings=False))
    else:
        m = LlamaForCausalLM(LlamaConfig(vocab_size=96, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
                                         num_attention_heads=4, num_key_value_heads=2, head_dim=12,
                                         attention_bias=True, tie_word_embeddings=kind == "tied"))
    for p in m.parameters():
        p.data = torch.randn_like(p) * 0.2
    return m.eval()


def run(*args):
    done = subprocess.run([str(a) for a in args], capture_output=True, text=True)
    if done.returncode:
        print("# " + done.stderr.strip())
    return None if done.returncode else done.stdout


def distance(got, want):
    """The largest relative distance of two dictionaries of tensors."""
    name = lambda k: k if k in got else k.removeprefix("transformer.")
    return max(float((got[name(k)].double() - want[k].double()).norm() / want[k].double().norm().clamp(min=1e-30))
               for k in want if k != "lm_head.weight" or name(k) in got)  # a tied one is in no file


def merged(tmp, base, adapter):
    out = tempfile.mkdtemp(dir=tmp)
    done = run(TOOL, "-qf", "-m", "passthrough", f"{base}+{adapter}", "-o", out)
    return None if done is None else load_file(os.path.join(out, "model.safetensors"))


def make(tmp, name, cls, kind, keys):
    """An adapter with random numbers; its folder, and the base with it merged by peft."""
    folder = os.path.join(tmp, name.replace(" ", "-"))
    torch.manual_seed(7)
    tuned = peft.get_peft_model(model(kind), getattr(peft, cls)(task_type="CAUSAL_LM", **keys))
    torch.manual_seed(11)
    for p in tuned.parameters():
        if p.requires_grad:
            p.data = p.data + torch.randn_like(p) * 0.1
    if cls == "AdaLoraConfig" and keys.get("rank_pattern"):
        tuned.base_model.rankallocator.mask_using_rank_pattern(tuned.base_model.model, keys["rank_pattern"])
    tuned.eval()(torch.zeros(1, 4, dtype=torch.long))
    tuned.save_pretrained(folder)
    plain = {k: v.clone() for k, v in model(kind).state_dict().items()}
    want = tuned.merge_and_unload().state_dict()
    return folder, {k: v.clone() for k, v in want.items()}, any(not torch.equal(plain[k], want[k]) for k in want)


def by_peft(base, adapter):
    m = AutoModelForCausalLM.from_pretrained(base)
    return peft.PeftModel.from_pretrained(m, adapter).merge_and_unload().state_dict()


def conversions(tmp, base, tool, made):
    llama = base["llama"]
    for name in ("loha", "dora", "oft exact", "c3a", "adalora"):
        folder, want = made[name]
        out = os.path.join(tmp, name.replace(" ", "-") + "-lora")
        done = run(tool, "to-lora", llama, folder, out, 64, 0)
        check(done is not None and distance(by_peft(llama, out), want) < 2e-6, f"{name} as lora of full rank, in peft")
    folder, want = made["loha"]
    out = os.path.join(tmp, "share")
    done = run(tool, "to-lora", llama, folder, out, 64, 0.9)
    lost = float(done.split()[4]) if done else 1
    check(done is not None and 0.1 < lost <= 0.1 ** 0.5 and distance(by_peft(llama, out), want) < 0.5,
          "a share of the variance")
    folder, want = made["lora"]
    tuned = os.path.join(tmp, "tuned")
    run(TOOL, "-qf", "-m", "passthrough", f"{llama}+{folder}", "-o", tuned)
    out = os.path.join(tmp, "extracted")
    done = run(tool, "extract", llama, tuned, out, 4, 0)
    check(done is not None and done.split()[0] == "6" and distance(by_peft(llama, out), want) < 2e-6,
          "lora extracted from two models")
    other = made["other"][0]
    for how in ("linear", "cat", "svd"):
        out = os.path.join(tmp, how)
        done = run(tool, "combine", how, llama, out, folder, 0.7, other, 0.4)
        m = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(llama), folder, adapter_name="a")
        m.load_adapter(other, adapter_name="b")
        m.add_weighted_adapter(["a", "b"], [0.7, 0.4], "c", combination_type=how, **({"svd_rank": 8} if how == "svd" else {}))
        m.set_adapter("c")
        want = m.merge_and_unload(adapter_names=["c"]).state_dict()
        check(done is not None and distance(by_peft(llama, out), want) < 2e-6, f"two adapters as one: {how}")


def starts(tmp, base, tool):
    name, r = "model.layers.1.self_attn.k_proj", 4
    for kind in ("pissa", "olora"):
        m = peft.get_peft_model(model("llama"), peft.LoraConfig(target_modules=["k_proj"], r=r, lora_alpha=8, init_lora_weights=kind))
        layer = m.get_submodule("base_model.model." + name)
        a, b = layer.lora_A["default"].weight.detach(), layer.lora_B["default"].weight.detach()
        w = layer.base_layer.weight.detach()
        out = os.path.join(tmp, kind)
        if run(tool, "start", kind, base["llama"], name, out) is None:
            check(False, kind)
            continue
        v = numpy.fromfile(out)
        na, nb = a.numel(), b.numel()
        got = [torch.tensor(x).reshape(y.shape) for x, y in ((v[:na], a), (v[na:na + nb], b), (v[na + nb:], w))]
        sign = (got[0] * a).sum(1).sign()  # of a pair of singular vectors: the library's choice
        got[0], got[1] = got[0] * sign[:, None], got[1] * sign
        check(all(float((x - y).norm() / y.norm()) < 2e-5 for x, y in zip(got, (a, b, w))), f"start by {kind}")


def main():
    torch.set_num_threads(1)
    chosen = sys.argv[1:]
    made = {}
    with tempfile.TemporaryDirectory() as tmp:
        base = {k: os.path.join(tmp, k) for k in ("llama", "gpt2", "tied")}
        for k in base:
            model(k).save_pretrained(base[k])
        for name, (cls, kind, keys) in CASES.items():
            if chosen and name not in chosen:
                continue
            if cls == "AdamssConfig" and not importlib.util.find_spec("sklearn"):
                continue
            folder, want, changed = make(tmp, name, cls, kind, keys)
            got = merged(tmp, base[kind], folder)
            made[name] = folder, want
            if name == "psoft":  # its singular vectors are not in peft's file
                check(got is None, "psoft, whose singular vectors are not in the file, is refused")
                continue
            far, near = distance(got, want) if got else 1, 1e-5 if name == "osf" else 2e-6  # peft: an SVD in F32
            check(changed and far < near, name + ("" if far < near else f": {far:.2g}"))
        if not chosen:
            made["other"] = make(tmp, "other", "LoraConfig", "llama", dict(target_modules=L, r=4, lora_alpha=3))
            tool = driver("tune_driver.c", tmp)
            conversions(tmp, base, tool, made)
            starts(tmp, base, tool)
    sys.exit(tap.finish())


main()
