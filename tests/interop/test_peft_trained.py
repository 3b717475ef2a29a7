#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Adapters of every method of peft-tune that PEFT has, trained for three steps on a small model: PEFT loads the folder, and
its logits are those of the model into which merge-models merged it, loaded by transformers; speaks TAP.

Prompts and prefixes cannot be merged, and full and bitfit make no adapter that PEFT knows: test_peft_tune.py and unit tests
have these.

Environment: LM_TEST_BUILD, a build folder with bin/peft-tune, bin/merge-models, bin/eval-model, bin/train-tokenizer and
bin/init-model.
Arguments: names of methods; all by default."""
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
from transformers import AutoModelForCausalLM
import tap
from tap import BIN, check

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
WORDS = "river old bridge stones market silver window morning evening garden".split()
VIRTUAL = {"PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING"}
# What a model of width 64 needs instead of the defaults; tokens: which rows train; fourierft: its scale of 300 makes updates so
# large that F32 does not resolve the logits to the bound.
KEYS = {"adamss": ["r=12"], "adalora": ["tinit=1", "tfinal=1"], "c3a": ["block_size=16"], "fourierft": ["scaling=10"],
        "road": ["group_size=16"], "shira": ["r=4"], "tokens": ["token_indices=[3,5,260]"], "vblora": ["vector_length=16"],
        "waveft": ["n_frequency=100"]}
# change biases, which of these two models Qwen has
BIASED = {"beft": ["--target", "q_proj,v_proj"], "adamss": ["--target", "q_proj,v_proj,down_proj"], "adamss beside biases": []}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SAVED = {"frod": "FrodConfig"}  # begin with a folder that PEFT made
SKIP = {"loftq": "PEFT computes the quantised base anew on a GPU alone: adapter.bats has it"}
# Files of PEFT that lack what a seed or the base gives: PEFT's numbers, merged and attached.
MADE = {"adamss of PEFT": ("AdamssConfig", dict(r=12, num_subspaces=3, subspace_rank=2)),
        "adamss beside biases": ("AdamssConfig", dict(r=12, num_subspaces=3, subspace_rank=2)),
        "vera without projections": ("VeraConfig", dict(r=6, save_projection=False)),
        "osf of PEFT": ("OSFConfig", dict(effective_rank=4))}
FAR = 1e-5  # of the largest logit


def tool(name, *args):
    done = subprocess.run([os.path.join(BIN, name), "-q", *args], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    return done.stdout


def prepare(tmp):
    """Two bases and records."""
    texts, records = (os.path.join(tmp, n) for n in ("text.jsonl", "qa.jsonl"))
    with open(texts, "w") as f:
        for i in range(200):
            f.write(json.dumps({"text": " ".join(WORDS[(i * k + k) % 10] for k in range(12))}) + "\n")
    with open(records, "w") as f:
        for i in range(8):
            f.write(json.dumps({"prompt": f"{WORDS[i]} and {WORDS[i + 1]}:", "completion": f" {WORDS[9 - i]}"}) + "\n")
    tool("train-tokenizer", "-V", "300", "-o", os.path.join(tmp, "tok.json"), texts)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": True}
    for kind in ("llama", "qwen2"):
        with open(os.path.join(tmp, kind + ".json"), "w") as f:
            json.dump({"model_type": kind, **shape}, f)
        tool("init-model", os.path.join(tmp, kind + ".json"), "-t", os.path.join(tmp, "tok.json"), "-o", os.path.join(tmp, kind))
    model = load(os.path.join(tmp, "qwen2"))
    torch.manual_seed(2)
    for name, t in model.named_parameters():
        if name.endswith(".bias"):
            t.data = 0.1 * torch.randn_like(t)
    model.save_pretrained(os.path.join(tmp, "qwen2"))
    return records


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def loss(base, text, *more):
    return json.loads(tool("eval-model", base, text, "--dtype", "f32", "--json", *more).splitlines()[-1])["loss"]


def compare(base, out, merged, method):
    ids = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain, want = load(base)(ids).logits, load(merged)(ids).logits
        got = peft.PeftModel.from_pretrained(load(base), out).eval()(ids).logits
    far, moved = ((x - want).abs().max().item() / want.abs().max().item() for x in (got, plain))
    check(far < FAR < moved / 10, f"{method}: PEFT's logits are those of the merged model ({far:.1e}; the base's differ by {moved:.1e})")


def made(tmp, method):
    """A folder of PEFT with random numbers: PEFT's logits are the merged model's, and so is the loss where it is attached."""
    base, out, merged, text = (os.path.join(tmp, n) for n in ("qwen2" if method in BIASED else "llama", method,
                                                              method + "-merged", "text.jsonl"))
    kind, keys = MADE[method]
    torch.manual_seed(0)
    model = peft.get_peft_model(load(base), getattr(peft, kind)(target_modules=LINEAR, **keys))
    for t in model.parameters():
        if t.requires_grad:
            t.data += 0.1 * torch.randn_like(t)
    model.save_pretrained(out)
    tool("merge-models", "--method", "passthrough", f"{base}+{out}", "--dtype", "f32", "-o", merged)
    a, b, plain = loss(base, text, "--adapter", out), loss(merged, text), loss(base, text)
    check(abs(a - b) < 1e-5 < abs(a - plain) / 10, f"{method}: attached as merged ({a:.7f}, {b:.7f}; the base: {plain:.7f})")
    compare(base, out, merged, method)


def case(tmp, records, method):
    base, out, merged = (os.path.join(tmp, n) for n in ("qwen2" if method in BIASED else "llama", method, method + "-merged"))
    more = [x for k in KEYS.get(method, []) for x in ("--set", k)] + BIASED.get(method, [])
    if method in SAVED:
        config = getattr(peft, SAVED[method])(target_modules=LINEAR)
        peft.get_peft_model(load(base), config).save_pretrained(out + "-begun")
        more += ["--init-adapter", out + "-begun"]
    tool("peft-tune", base, records, "-o", out, "--method", method, *more, "--steps", "3", "--batch-size", "8", "--seq-len", "48",
         "--lr", "1e-2", "--lr-schedule", "constant", "--dtype", "f32", "--peak-tflops", "0")
    tool("merge-models", "--method", "passthrough", f"{base}+{out}", "--dtype", "f32", "-o", merged)
    compare(base, out, merged, method)


def main():
    methods = {m["name"]: m.get("peft_type") for m in json.loads(tool("peft-tune", "--list-methods", "--json"))}
    todo = [n for n, kind in methods.items() if hasattr(peft.PeftType, kind or "-") and kind not in VIRTUAL]
    with tempfile.TemporaryDirectory() as tmp:
        records = prepare(tmp)
        for name in sys.argv[1:] or todo + [n for n in MADE if n not in todo]:
            if name in SKIP:
                check(True, f"{name} # SKIP {SKIP[name]}")
                continue
            try:
                if name in MADE:
                    made(tmp, name)
                else:
                    case(tmp, records, name)
            except Exception as e:
                check(False, f"{name}: {type(e).__name__}: {str(e)[:300]}")
    check(bool(sys.argv[1:]) or len(todo) >= 40, f"{len(todo)} methods of at least 40")
    return tap.finish()


if __name__ == "__main__":
    sys.exit(main())
