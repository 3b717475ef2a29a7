#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Seconds of a step of LoRA on a base of GPT-2 124M's shape, here and by PEFT, in one run with the same base, records, batch
and number of threads; and of full fine-tuning here.  Speaks TAP: speeds are comments, since they depend on what else runs; that
both programs computed the same is asserted.

Environment: LM_TEST_BUILD, a build folder with bin/peft-tune and bin/train-tokenizer; LM_TEST_THREADS, threads [2]."""
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.filterwarnings("ignore")
import peft
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BIN = os.path.join(os.environ.get("LM_TEST_BUILD", os.path.join(ROOT, "build")), "bin")
THREADS = int(os.environ.get("LM_TEST_THREADS", "2"))
BATCH, SEQ, STEPS, RATE = 4, 256, 4, 1e-4
WORDS = "river old bridge stones market silver window morning evening garden".split()
count = failed = 0


def check(ok, name):
    global count, failed
    count += 1
    failed += not ok
    print(f"{'ok' if ok else 'not ok'} {count} - {name}", flush=True)


def tool(name, *args):
    subprocess.run([os.path.join(BIN, name), "-q", *args], check=True)


def prepare(tmp):
    """A tokenizer, BATCH records longer than SEQ tokens, the base in both types, and a start for both programs."""
    records = os.path.join(tmp, "text.jsonl")
    with open(records, "w") as f:
        for i in range(BATCH):
            f.write(json.dumps({"text": " ".join(WORDS[(i * k + k) % 10] for k in range(2 * SEQ))}) + "\n")
    tool("train-tokenizer", "-V", "300", "-o", os.path.join(tmp, "tokenizer.json"), records)
    torch.manual_seed(0)
    base = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, embd_pdrop=0, resid_pdrop=0, attn_pdrop=0))
    for name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
        base.to(dtype).save_pretrained(os.path.join(tmp, name))
        os.link(os.path.join(tmp, "tokenizer.json"), os.path.join(tmp, name, "tokenizer.json"))
        with open(os.path.join(tmp, name, "tokenizer_config.json"), "w") as f:
            json.dump({"tokenizer_class": "PreTrainedTokenizerFast"}, f)
    return records


def theirs(tmp, dtype, records, start):
    """Loss of the first step, and the median of the others' seconds."""
    torch.set_num_threads(THREADS)
    torch.manual_seed(1)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear", fan_in_fan_out=True)
    base = os.path.join(tmp, dtype)
    kind = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=kind), config).train()
    model.save_pretrained(start)
    tok = AutoTokenizer.from_pretrained(base)
    with open(records) as f:
        ids = torch.tensor([tok(json.loads(r)["text"], add_special_tokens=False).input_ids[:SEQ] for r in f])
    step = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE, weight_decay=0)
    first, seconds = None, []
    for _ in range(STEPS):
        began = time.monotonic()
        loss = model(input_ids=ids, labels=ids).loss
        step.zero_grad()
        loss.backward()
        step.step()
        seconds.append(time.monotonic() - began)
        first = loss.item() if first is None else first
    return first, statistics.median(seconds[1:])


def ours(tmp, dtype, records, *how):
    metrics = os.path.join(tmp, "metrics.jsonl")
    tool("peft-tune", os.path.join(tmp, dtype), records, "-o", os.path.join(tmp, "out"), "-f", "-j", str(THREADS), "--dtype",
         dtype, "--steps", str(STEPS), "--batch-size", str(BATCH), "--seq-len", str(SEQ), "--no-packing", "--truncate", "start",
         "--lr", str(RATE), "--lr-schedule", "constant", "--metrics", metrics, *how)
    with open(metrics) as f:
        steps = [r for r in map(json.loads, f) if r.get("event") == "step"]
    ends = [r["seconds"] for r in steps]
    return steps[0]["loss"], statistics.median(b - a for a, b in zip(ends, ends[1:]))


def main():
    with tempfile.TemporaryDirectory() as tmp:
        records = prepare(tmp)
        print(f"# 124M, {BATCH} x {SEQ} tokens a step, {THREADS} threads, rank 16 on all linear layers; seconds a step")
        for dtype, most in (("bf16", 2e-2), ("f32", 1e-4)):
            start = os.path.join(tmp, "start-" + dtype)
            a, peft_seconds = theirs(tmp, dtype, records, start)
            b, seconds = ours(tmp, dtype, records, "--init-adapter", start)
            _, full = ours(tmp, dtype, records, "--method", "full")
            print(f"# {dtype}: LoRA {seconds:.3f} here, {peft_seconds:.3f} by PEFT: {peft_seconds / seconds:.2f} times as fast")
            print(f"# {dtype}: full fine-tuning {full:.3f} here: a step of LoRA is {seconds / full:.2f} of it")
            check(abs(a - b) < most, f"{dtype}: the first loss is PEFT's ({b:.6f}, {a:.6f})")
    print(f"1..{count}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
