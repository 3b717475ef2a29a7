#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Seconds of a training step, and of a decoded token, of the miniature of each newer architecture: here, and by transformers, in
one run with the same folder, batch, type and number of threads.  Speaks TAP: speeds are comments, since they depend on what else
runs; that both programs compute the same loss is asserted.

Training: BATCH sequences of SEQ random tokens, forward, backward and AdamW in BF16 (here with a master copy in F32, there none,
which is the faster).  transformers multiplies the experts in each way that it has, of which the fastest counts.
Decoding: one greedy text; seconds of a token are the difference of a long and a short one.

Arguments: names of presets; none: all.  Environment: LM_TEST_BUILD, a build folder with bin/train, bin/generate ...;
LM_TEST_THREADS, threads [2]; LM_TEST_DTYPE, bf16 or f32 [bf16]."""
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
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM
import tap
from tap import BIN, check, tool

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
THREADS = int(os.environ.get("LM_TEST_THREADS", "2"))
DTYPE = os.environ.get("LM_TEST_DTYPE", "bf16")
TYPE = {"bf16": torch.bfloat16, "f32": torch.float32}[DTYPE]
BATCH, SEQ, STEPS = 4, 256, 5
SHORT, LONG, TIMES = 16, 144, 3  # new tokens
PRESETS = ["llama-5m", "qwen3-moe-13m", "gpt-oss-12m", "deepseek-v3-12m", "qwen3-next-12m", "bloom-12m", "bert-4m", "t5-9m"]
WAYS = ("grouped_mm", "batched_mm", "eager")
WORDS = "river old bridge stones market silver window morning evening garden".split()


def said(name, *args):
    """The JSON that a tool prints."""
    out = subprocess.run([os.path.join(BIN, name), "-q", "--json", *args], check=True, capture_output=True, text=True).stdout
    return json.loads(out)


def has_experts(folder):
    with open(os.path.join(folder, "config.json")) as f:
        return any("experts" in k for k in json.load(f))


def open_model(folder, way=None):
    config = AutoConfig.from_pretrained(folder)
    if way:
        config._experts_implementation = way
    kind = (AutoModelForMaskedLM if config.model_type == "bert" else
            AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM)
    return kind.from_pretrained(folder, config=config, dtype=TYPE)


def their_step(model):
    """Seconds of a training step."""
    model.train()
    step = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, 300, (BATCH, SEQ))
    seconds = []
    for _ in range(STEPS):
        began = time.monotonic()
        loss = model(input_ids=ids, labels=ids).loss
        step.zero_grad()
        loss.backward()
        step.step()
        seconds.append(time.monotonic() - began)
    return statistics.median(seconds[1:])


def their_token(model, ids):
    """Seconds of a decoded token."""
    def decode(n):
        began = time.monotonic()
        with torch.no_grad():
            model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), min_new_tokens=n, max_new_tokens=n,
                           do_sample=False)
        return time.monotonic() - began

    model.eval()
    decode(SHORT)
    return difference(decode)


def difference(decode):
    return statistics.median(decode(LONG) - decode(SHORT) for _ in range(TIMES)) / (LONG - SHORT)


def our_token(folder, text):
    def decode(n):
        began = time.monotonic()
        subprocess.run([os.path.join(BIN, "generate"), folder, "-q", "-p", text, "-n", str(n), "--temperature", "0", "--ignore-eos",
                        "--dtype", DTYPE, "-j", str(THREADS)], check=True, capture_output=True)
        return time.monotonic() - began

    return difference(decode)


def fastest(folder, what):
    """Of the ways that transformers has: its seconds and its name."""
    tried = []
    for way in WAYS if has_experts(folder) else (None,):
        try:
            tried.append((what(open_model(folder, way)), way or "plain"))
        except (RuntimeError, ValueError, NotImplementedError, TypeError) as e:
            print(f"# {way}: {str(e).splitlines()[0][:100]}")
    return min(tried)


def line(name, what, ours, theirs, way):
    unit, scale = ("ms", 1e3)
    print(f"# {name}: {what} {ours * scale:.2f} {unit} here, {theirs * scale:.2f} by transformers ({way}): "
          f"{theirs / ours:.2f} times as fast", flush=True)


def losses(name, folder, records):
    """Both programs read the same folder as the same model."""
    from tokenizers import Tokenizer
    tok = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
    with open(records) as f:
        ids = torch.tensor([tok.encode(f.read()).ids])
    config = AutoConfig.from_pretrained(folder)
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    ours = said("eval-model", folder, records, "--seq-len", "128", "--dtype", "f32")["loss"]
    logits = model(ids).logits[0, :-1].log_softmax(-1)
    theirs = -logits.gather(1, ids[0, 1:, None]).mean().item()
    check(abs(ours - theirs) < 1e-4 * theirs, f"{name}: the same loss ({ours:.6f}, {theirs:.6f})")


def compare(tmp, name):
    folder, records = os.path.join(tmp, name), os.path.join(tmp, "text.txt")
    text, tokenizer = " ".join(WORDS[i * i % 10] for i in range(60)), os.path.join(tmp, "tokenizer.json")
    causal = name not in ("bert-4m", "t5-9m")
    tool("init-model", name, "-o", folder)
    os.link(tokenizer, os.path.join(folder, "tokenizer.json"))
    ours = said("train", "--dry-run", "--measure", folder, "--batch-size", str(BATCH), "--seq-len", str(SEQ), "--dtype", DTYPE,
                "-j", str(THREADS))["seconds_per_step"]
    theirs, way = fastest(folder, their_step)
    line(name, "training step", ours, theirs, way)
    if not causal:
        return
    losses(name, folder, records)
    from tokenizers import Tokenizer
    ids = torch.tensor([Tokenizer.from_file(tokenizer).encode(text).ids])
    theirs, way = fastest(folder, lambda m: their_token(m, ids))
    line(name, "decoded token", our_token(folder, text), theirs, way)


def main():
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as tmp:
        with open(os.path.join(tmp, "text.txt"), "w") as f:
            f.write(" ".join(WORDS[i * i % 10] for i in range(100)))
        tool("train-tokenizer", "-V", "300", "-o", os.path.join(tmp, "tokenizer.json"), os.path.join(tmp, "text.txt"))
        for name in sys.argv[1:] or PRESETS:
            compare(tmp, name)
    return tap.finish()


if __name__ == "__main__":
    sys.exit(main())
