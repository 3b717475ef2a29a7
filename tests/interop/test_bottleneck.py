#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Bottleneck adapters of peft-tune against AdapterHub's library `adapters`: the same base, records and initial adapter, ten steps
of AdamW in F32; losses agree to 1e-5 and tensors to 1e-4, and the library loads what the tool wrote; speaks TAP.

Environment: LM_TEST_BUILD, a build folder with bin/peft-tune, bin/train-tokenizer and bin/init-model."""
import json
import os
import shutil
import sys
import tempfile
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.filterwarnings("ignore")
try:
    import adapters
except ImportError:
    print("1..0 # SKIP the library adapters is not installed")
    sys.exit(0)
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
import tap
from tap import check, tool

transformers.logging.set_verbosity_error()
STEPS, RATE = 10, 1e-3
WORDS = "river old bridge stones market silver window morning evening garden".split()
SHAPES = {"llama": {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
                    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
                    "tie_word_embeddings": True},
          "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128,
                   "embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}}


def prepare(tmp):
    """A tokenizer, two bases and eight records."""
    texts, records = os.path.join(tmp, "text.jsonl"), os.path.join(tmp, "qa.jsonl")
    with open(texts, "w") as f:
        for i in range(200):
            f.write(json.dumps({"text": " ".join(WORDS[(i * k + k) % 10] for k in range(12))}) + "\n")
    with open(records, "w") as f:
        for i in range(8):
            f.write(json.dumps({"text": " ".join(WORDS[(i + k * k) % 10] for k in range(4 + i % 3))}) + "\n")
    tool("train-tokenizer", "-V", "300", "-o", os.path.join(tmp, "tok.json"), texts)
    for kind, shape in SHAPES.items():
        with open(os.path.join(tmp, kind + ".json"), "w") as f:
            json.dump(shape, f)
        tool("init-model", os.path.join(tmp, kind + ".json"), "-t", os.path.join(tmp, "tok.json"), "-o",
             os.path.join(tmp, kind))
    return records


def batch(base, records):
    """All records as one batch: every token but the first is predicted, and the end of the text."""
    tok = AutoTokenizer.from_pretrained(base)
    with open(records) as f:
        rows = [tok(json.loads(r)["text"], add_special_tokens=False).input_ids + [tok.eos_token_id] for r in f]
    most = max(map(len, rows))
    fill = lambda v, x: v + [x] * (most - len(v))
    return {"input_ids": torch.tensor([fill(i, 0) for i in rows]),
            "labels": torch.tensor([fill(i, -100) for i in rows]),
            "attention_mask": torch.tensor([fill([1] * len(i), 0) for i in rows])}


def save(model, name, folder):
    """The library's folder, with the name of the tensors' file that adapters have here."""
    model.save_adapter(folder, name, with_head=False, use_safetensors=True)
    shutil.move(os.path.join(folder, "adapter.safetensors"), os.path.join(folder, "adapter_model.safetensors"))


def case(tmp, kind, method, config, records):
    base, start, out, end, metrics = (os.path.join(tmp, n) for n in
                                      (kind, f"{kind}-{method}-0", f"{kind}-{method}", f"{kind}-{method}-1", "m.jsonl"))
    data = batch(base, records)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(base, torch_dtype=torch.float32)
    adapters.init(model)
    model.add_adapter("adapter", config=config)
    model.train_adapter("adapter")
    model.eval()
    trained = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for p in trained:
            p.add_(torch.randn_like(p) * 0.02)
    save(model, "adapter", start)
    step = torch.optim.AdamW(trained, lr=RATE, weight_decay=0)
    losses = []
    for _ in range(STEPS):
        loss = model(**data).loss
        step.zero_grad()
        loss.backward()
        step.step()
        losses.append(loss.item())
    save(model, "adapter", end)
    tool("peft-tune", base, records, "-o", out, "--init-adapter", start, "--method", method, "--steps", str(STEPS),
         "--batch-size", "8", "--no-packing", "--seq-len", "96", "--lr", str(RATE), "--lr-schedule", "constant",
         "--max-grad-norm", "0", "--dtype", "f32", "--metrics", metrics, "-f")
    with open(metrics) as f:
        ours = [r["loss"] for r in map(json.loads, f) if r.get("event") == "step"]
    far = max(abs(a - b) for a, b in zip(ours, losses))
    check(len(ours) == STEPS and far < 1e-5 and losses[-1] < losses[0], f"{kind} {method}: losses of {STEPS} steps ({far:.1e})")
    a, b = (load_file(os.path.join(d, "adapter_model.safetensors")) for d in (out, end))
    far = max(((a[k].float() - b[k].float()).norm() / b[k].float().norm()).item() for k in b if k in a)
    check(set(a) == set(b) and far < 1e-4, f"{kind} {method}: tensors ({far:.1e})")
    copy = out + "-copy"
    os.makedirs(copy)
    shutil.copy(os.path.join(out, "adapter_config.json"), copy)
    shutil.copy(os.path.join(out, "adapter_model.safetensors"), os.path.join(copy, "adapter.safetensors"))
    again = AutoModelForCausalLM.from_pretrained(base, torch_dtype=torch.float32)
    adapters.init(again)
    again.set_active_adapters(again.load_adapter(copy, with_head=False, use_safetensors=True))
    with torch.no_grad():
        far = (again.eval()(**data).logits - model(**data).logits).abs().max().item()
    check(far < 1e-4, f"{kind} {method}: the library loads the folder ({far:.1e})")


def main():
    with tempfile.TemporaryDirectory() as tmp:
        records = prepare(tmp)
        for kind in SHAPES:
            for method, config in (("houlsby", adapters.DoubleSeqBnConfig()), ("pfeiffer", adapters.SeqBnConfig())):
                try:
                    case(tmp, kind, method, config, records)
                except Exception as e:
                    check(False, f"{kind} {method}: {type(e).__name__}: {str(e)[:200]}")
    return tap.finish()


if __name__ == "__main__":
    sys.exit(main())
