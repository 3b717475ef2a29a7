#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""peft-tune against PEFT: the same base, records and initial adapter, ten steps of AdamW in F32; losses agree to 1e-5 and
tensors to 1e-4, PEFT loads what the tool wrote, and eval-model finds PEFT's loss of whole texts; speaks TAP.

Environment: LM_TEST_BUILD, a build folder with bin/peft-tune, bin/eval-model, bin/train-tokenizer and bin/init-model."""
import json
import os
import subprocess
import sys
import tempfile
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.filterwarnings("ignore")
import peft
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
import tap
from tap import BIN, check, tool

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
STEPS, RATE = 10, 1e-3
WORDS = "river old bridge stones market silver window morning evening garden".split()


def prepare(tmp):
    """Texts, a tokenizer, two bases and eight records."""
    texts, records = os.path.join(tmp, "text.jsonl"), os.path.join(tmp, "qa.jsonl")
    with open(texts, "w") as f:
        for i in range(200):
            f.write(json.dumps({"text": " ".join(WORDS[(i * k + k) % 10] for k in range(12))}) + "\n")
    with open(records, "w") as f:
        for i in range(8):
            f.write(json.dumps({"prompt": f"{WORDS[i]} and {WORDS[i + 1]}:",
                                "completion": f" {WORDS[9 - i]} {WORDS[(3 * i) % 10]}" * (1 + i % 3)}) + "\n")
    tool("train-tokenizer", "-V", "300", "-o", os.path.join(tmp, "tok.json"), texts)
    shapes = {"llama": {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
                        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
                        "tie_word_embeddings": True},
              "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128,
                       "embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}}
    for kind, shape in shapes.items():
        with open(os.path.join(tmp, kind + ".json"), "w") as f:
            json.dump(shape, f)
        tool("init-model", os.path.join(tmp, kind + ".json"), "-t", os.path.join(tmp, "tok.json"), "-o",
             os.path.join(tmp, kind))
    return records


def batch(base, records):
    """All records as one batch: the completion and the end of the text train."""
    tok = AutoTokenizer.from_pretrained(base)
    rows = []
    with open(records) as f:
        for r in map(json.loads, f):
            n = len(tok(r["prompt"], add_special_tokens=False).input_ids)
            ids = tok(r["prompt"] + r["completion"], add_special_tokens=False).input_ids + [tok.eos_token_id]
            rows.append((ids, [-100] * n + ids[n:]))
    most = max(len(i) for i, _ in rows)
    fill = lambda v, x: v + [x] * (most - len(v))
    return {"input_ids": torch.tensor([fill(i, 0) for i, _ in rows]),
            "labels": torch.tensor([fill(l, -100) for _, l in rows]),
            "attention_mask": torch.tensor([fill([1] * len(i), 0) for i, _ in rows])}


def theirs(base, config, data, start):
    """Losses of the steps, and the tensors afterwards; the adapter before the first step goes to `start`."""
    torch.manual_seed(1)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    model.eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p) * 0.02)
    model.save_pretrained(start)
    step = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE, weight_decay=0)
    losses = []
    for i in range(STEPS):
        loss = model(**data).loss
        step.zero_grad()
        loss.backward()
        step.step()
        losses.append(loss.item())
        if config.peft_type == peft.PeftType.ADALORA:
            model.base_model.update_and_allocate(i + 1)
    return losses, model


def losses_of_texts(tmp, base, adapter, model):
    """The mean loss of some texts by eval-model and by PEFT, which adds the labels of virtual tokens."""
    path, tok = os.path.join(tmp, "held.jsonl"), AutoTokenizer.from_pretrained(base)
    texts = [" ".join(WORDS[(i * k + 3) % 10] for k in range(4 + 3 * i)) for i in range(6)]
    with open(path, "w") as f:
        f.writelines(json.dumps({"text": t}) + "\n" for t in texts)
    out = subprocess.run([os.path.join(BIN, "eval-model"), "-q", base, path, "--adapter", adapter, "--seq-len", "96"],
                         check=True, capture_output=True, text=True)
    first = model.peft_config["default"].peft_type in ("PROMPT_TUNING", "P_TUNING")
    total = count = 0
    with torch.no_grad():
        for t in texts:
            ids = tok(t, return_tensors="pt").input_ids
            n = ids.shape[1] - (not first)
            total, count = total + n * model(input_ids=ids, labels=ids).loss.item(), count + n
    report = json.loads(out.stdout)
    return report["loss"] if report["tokens"] == count else float("nan"), total / count


def case(tmp, kind, name, method, config, records):
    base, start, out, metrics = (os.path.join(tmp, n) for n in (kind, f"{kind}-{name}-0", f"{kind}-{name}", "m.jsonl"))
    data = batch(base, records)
    losses, model = theirs(base, config, data, start)
    tool("peft-tune", base, records, "-o", out, "--init-adapter", start, "--method", method, "--steps", str(STEPS),
         "--batch-size", "8", "--no-packing", "--seq-len", "96", "--lr", str(RATE), "--lr-schedule", "constant",
         "--max-grad-norm", "0", "--dtype", "f32", "--metrics", metrics, "-f")
    with open(metrics) as f:
        ours = [r["loss"] for r in map(json.loads, f) if r.get("event") == "step"]
    far = max(abs(a - b) for a, b in zip(ours, losses))
    check(len(ours) == STEPS and far < 1e-5 and losses[-1] < losses[0], f"{kind} {name}: losses of {STEPS} steps ({far:.1e})")
    end = os.path.join(tmp, "end")
    model.save_pretrained(end)
    a, b = (load_file(os.path.join(d, "adapter_model.safetensors")) for d in (out, end))
    for k in list(b):  # PEFT also saves weights below adapters, and copies of saved modules
        if any(part in k for part in (".base_layer.weight", ".original_module.", ".modules_to_save.")):
            del b[k]
    far = max(((a[k].float() - b[k].float()).norm() / b[k].float().norm()).item() for k in b if k in a)
    most = 1e-3 if name == "biases" else 1e-4  # keys have a bias without gradient but rounding, of which AdamW makes steps
    more = {k for k in a if k.endswith(".osf_U_high")}  # directions of the base, which PEFT computes again
    check(set(a) - more == set(b) and far < most, f"{kind} {name}: tensors ({far:.1e})")
    with torch.no_grad():
        again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), out,
                                               is_trainable=method == "adalora")
        far = (again.eval()(**data).logits - model(**data).logits).abs().max().item()
    check(far < 1e-4, f"{kind} {name}: PEFT loads the folder ({far:.1e})")
    if method == "adalora":  # PEFT's loss has the penalty there, too
        again.peft_config["default"].orth_reg_weight = 0
    got, want = losses_of_texts(tmp, base, out, again)
    check(abs(got - want) < 1e-5 * want, f"{kind} {name}: eval-model's loss of texts ({got:.6f}, {want:.6f})")


def other_base(tmp, records):
    """An adapter that brings another embedding than the base's cannot be trained on: it would be saved without it."""
    base, start, out = (os.path.join(tmp, n) for n in ("llama", "llama-embedding-0", "llama-other"))
    if not os.path.exists(start):
        return
    file = os.path.join(start, "adapter_model.safetensors")
    tensors = load_file(file)
    tensors["base_model.model.model.embed_tokens.base_layer.weight"][3] += 1
    save_file(tensors, file, {"format": "pt"})
    done = subprocess.run([os.path.join(BIN, "peft-tune"), base, records, "-o", out, "--init-adapter", start, "--method", "lora",
                           "--steps", "1"], capture_output=True, text=True)
    check(done.returncode == 2 and "is not the weight of the base" in done.stderr and not os.path.exists(out),
          "an adapter with another embedding is refused")


def encoders(tmp, records):
    """Of an encoder PEFT reads the rows that it makes: prompt_embeddings."""
    base, mlp = os.path.join(tmp, "llama"), ["--method", "p-tuning"]
    for name, how in (("MLP", mlp), ("LSTM", [*mlp, "--set", "encoder_reparameterization_type=LSTM"]),
                      ("prefix", ["--method", "prefix", "--set", "prefix_projection=true"])):
        out = os.path.join(tmp, "encoder-" + name)
        tool("peft-tune", base, records, "-o", out, *how, "--set", "num_virtual_tokens=5", "--set", "encoder_hidden_size=24",
             "--steps", "5", "--batch-size", "8", "--seq-len", "96", "--lr", "1e-2", "--dtype", "f32")
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        got, want = losses_of_texts(tmp, base, out, peft.PeftModel.from_pretrained(model, out).eval())
        check(abs(got - want) < 1e-5 * want, f"encoder {name}: eval-model's loss of texts ({got:.6f}, {want:.6f})")


def adamss_begins(tmp, records):
    """A new adapter: V is PEFT's but for signs; A_k, for which PEFT draws a projection, holds as much of its cluster."""
    base, out = os.path.join(tmp, "llama"), os.path.join(tmp, "adamss-new")
    names = ["q_proj", "v_proj", "down_proj"]
    tool("peft-tune", base, records, "-o", out, "--method", "adamss", "--target", ",".join(names), "--set", "r=12", "--set",
         "num_subspaces=3", "--set", "subspace_rank=2", "--steps", "1", "--seq-len", "96", "--lr", "1e-9", "--dtype", "f32")
    config = peft.AdamssConfig(r=12, num_subspaces=3, subspace_rank=2, task_type="CAUSAL_LM", target_modules=names)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    got, worst, least = load_file(os.path.join(out, "adapter_model.safetensors")), 0, 1
    for name, m in model.named_modules():
        if not hasattr(m, "adamss_newB"):
            continue
        v, w = got[f"{name}.adamss_newB"], m.base_layer.weight.detach()
        want = m.adamss_newB["default"]
        worst = max(worst, (v * (v * want).sum(1).sign()[:, None] - want).abs().max().item())
        for k in range(3):
            rows, a = m.seg_result["default"][k], got[f"{name}.adamss_A.{k}"]
            u = torch.nn.functional.normalize(w @ v.T, dim=0)[rows]
            own, theirs = (((u @ x.T) ** 2).sum() for x in (a, m.adamss_A["default"][k].detach() * (v * want).sum(1).sign()))
            worst = max(worst, (a @ a.T - torch.eye(len(a))).abs().max().item())
            least = min(least, (own / theirs).item())
    check(worst < 1e-4 and least > 1 - 1e-4, f"a new adamss: vectors ({worst:.1e}), share of clusters ({least:.4f})")


def cases(kind):
    names = {"gpt2": ["c_attn", "c_fc"]}.get(kind, ["q_proj", "v_proj", "down_proj"])
    to = dict(task_type="CAUSAL_LM", target_modules=names, fan_in_fan_out=kind == "gpt2")
    plain = dict(task_type="CAUSAL_LM", target_modules=names)
    yield "lora", "lora", peft.LoraConfig(r=4, lora_alpha=8, **to)
    yield "rslora", "rslora", peft.LoraConfig(r=4, lora_alpha=8, use_rslora=True, **to)
    yield "dora", "dora", peft.LoraConfig(r=4, lora_alpha=8, use_dora=True, **to)
    yield "saved", "lora", peft.LoraConfig(r=4, modules_to_save=["ln_f" if kind == "gpt2" else "norm"], **to)
    yield "prompt", "prompt", peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    yield "prefix", "prefix", peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    if kind == "gpt2":
        yield "biases", "lora", peft.LoraConfig(r=4, bias="all", modules_to_save=["ln_f"], **to)
    table = {"llama": "embed_tokens", "gpt2": "wte"}[kind]
    yield "tokens", "tokens", peft.TrainableTokensConfig(task_type="CAUSAL_LM", token_indices=[260, 5, 299], target_modules=[table])
    yield "loratokens", "lora", peft.LoraConfig(r=4, lora_alpha=8, trainable_token_indices={table: [260, 299]}, **to)
    if kind == "llama":
        yield "doradrop", "dora", peft.LoraConfig(r=4, lora_alpha=8, use_dora=True, lora_dropout=1e-9, **plain)
        ranks = dict(init_r=6, target_r=2, lora_alpha=8, total_step=STEPS, orth_reg_weight=0.1, **plain)
        yield "adalora", "adalora", peft.AdaLoraConfig(tinit=1, tfinal=3, deltaT=1, **ranks)
        yield "adalora2", "adalora", peft.AdaLoraConfig(tinit=2, tfinal=2, deltaT=3, beta1=0.7, beta2=0.9, **ranks)
        yield "embedding", "lora", peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["embed_tokens", "q_proj"])
        yield "deft-qr", "deft", peft.DeftConfig(r=4, decomposition_method="qr", **plain)
        yield "ia3", "ia3", peft.IA3Config(feedforward_modules=["down_proj"], **plain)
        yield "loha", "loha", peft.LoHaConfig(r=4, alpha=8, **plain)
        yield "lokr", "lokr", peft.LoKrConfig(r=4, alpha=8, **plain)
        yield "oft", "oft", peft.OFTConfig(oft_block_size=8, **plain)
        yield "boft", "boft", peft.BOFTConfig(boft_block_size=8, boft_n_butterfly_factor=1, **plain)
        yield "hra", "hra", peft.HRAConfig(r=4, **plain)
        yield "shira", "shira", peft.ShiraConfig(r=2, random_seed=3, **plain)
        yield "supertuning", "supertuning", peft.SupertuningConfig(sparsity=0.9, r=2, lora_alpha=3, **plain)
        yield "unilora", "unilora", peft.UniLoraConfig(r=2, theta_d_length=60, save_indices=True, **plain)
        yield "deft", "deft", peft.DeftConfig(r=4, **plain)
        yield "vera", "vera", peft.VeraConfig(r=6, **plain)
        yield "pvera", "pvera", peft.PveraConfig(r=6, **plain)
        yield "randlora", "randlora", peft.RandLoraConfig(r=4, randlora_alpha=4, **plain)
        yield "vblora", "vblora", peft.VBLoRAConfig(r=2, num_vectors=12, vector_length=8, topk=2, **plain)
        yield "tinylora", "tinylora", peft.TinyLoraConfig(r=2, u=8, **plain)
        yield "gralora", "gralora", peft.GraloraConfig(r=4, gralora_k=2, **plain)
        yield "hira", "hira", peft.HiraConfig(r=4, **plain)
        yield "delora", "delora", peft.DeloraConfig(r=4, **plain)
        yield "miss", "miss", peft.MissConfig(r=4, **plain)
        # one module: PEFT's gradient of its input is not that of its own product (peft 0.21.2), which no other adapter may read
        yield "c3a", "c3a", peft.C3AConfig(block_size=8, task_type="CAUSAL_LM", target_modules=r"model\.layers\.0\.self_attn\.q_proj")
        yield "fourierft", "fourierft", peft.FourierFTConfig(n_frequency=40, scaling=10, **plain)
        yield "waveft", "waveft", peft.WaveFTConfig(n_frequency=40, scaling=5, **plain)
        yield "road", "road", peft.RoadConfig(variant="road_1", group_size=8, **plain)
        yield "glora", "glora", peft.GloraConfig(r=4, **plain)
        yield "peanut", "peanut", peft.PeanutConfig(r=4, **plain)
        yield "beft", "beft", peft.BeftConfig(**plain)
        yield "adamss", "adamss", peft.AdamssConfig(r=12, num_subspaces=3, subspace_rank=2, **plain)
        yield "adamss-ranks", "adamss", peft.AdamssConfig(r=10, num_subspaces=2, subspace_rank=5, use_dynamic_rank=True,
                                                          svd_threshold=0.8, random_seed=5, **plain)
        yield "osf", "osf", peft.OSFConfig(effective_rank=20, **plain)
        yield "frod", "frod", peft.FrodConfig(**plain)
        yield "ln", "ln_tuning", peft.LNTuningConfig(task_type="CAUSAL_LM", target_modules=["input_layernorm"])


def main():
    only = sys.argv[1:]
    with tempfile.TemporaryDirectory() as tmp:
        records = prepare(tmp)
        for kind in ("llama", "gpt2"):
            for name, method, config in cases(kind):
                if only and name not in only:
                    continue
                try:
                    case(tmp, kind, name, method, config, records)
                except Exception as e:
                    check(False, f"{kind} {name}: {type(e).__name__}: {str(e)[:200]}")
        other_base(tmp, records)
        if not only or "adamss" in only:
            adamss_begins(tmp, records)
        if not only or "encoders" in only:
            encoders(tmp, records)
    return tap.finish()


if __name__ == "__main__":
    sys.exit(main())
