#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Seconds of a step of LoRA on a base of GPT-2 124M's shape, here and by PEFT, in one run with the same base, records, batch
and number of threads; and of full fine-tuning here.  Then seconds of an epoch over answers as people tune on them: of PEFT in
batches padded to their longest record, as TRL's trainer makes them by default, here in the windows that peft-tune makes.
Speaks TAP: speeds are comments, since they depend on what else runs; that both programs computed the same is asserted.

The answers are those of GSM8K where ../shared/data has it, else words in lengths drawn like its (question and answer together
log-normal with median 140 tokens and deviation 0.36; 0.63 of them the answer).

On processors without products of BF16, where PyTorch takes minutes for a step in BF16, those steps are of one record of 64 tokens,
and the answers are fewer and in F32.

Environment: LM_TEST_BUILD, a build folder with bin/peft-tune and bin/train-tokenizer; LM_TEST_THREADS, threads [2]."""
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.filterwarnings("ignore")
import peft
import torch
import transformers
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel
import tap
from tap import ROOT, check, tool

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
THREADS = int(os.environ.get("LM_TEST_THREADS", "2"))
DATA = os.path.join(os.path.dirname(ROOT), "shared", "data")
BATCH, SEQ, STEPS, RATE = 4, 256, 4, 1e-4
with open("/proc/cpuinfo") as cpuinfo:
    FLAGS = cpuinfo.read()
HAS_BF16 = " avx512_bf16" in FLAGS or " amx_bf16" in FLAGS
ANSWERS, ANSWERS_BATCH = (64 if HAS_BF16 else 16), 8  # records of an epoch; of a batch of PEFT
ANSWERS_TYPE = "bf16" if HAS_BF16 else "f32"
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
WORDS = "river old bridge stones market silver window morning evening garden".split()


def shape_of(dtype):
    """Sequences of a batch and their tokens."""
    return (BATCH, SEQ) if HAS_BF16 or dtype == "f32" else (1, 64)


def records_of(tmp, batch):
    return os.path.join(tmp, f"text-{batch}.jsonl")


def give_base(folder, dtype, tokenizer):
    torch.manual_seed(0)
    base = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, embd_pdrop=0, resid_pdrop=0, attn_pdrop=0))
    base.to(dtype).save_pretrained(folder)
    os.link(tokenizer, os.path.join(folder, "tokenizer.json"))
    with open(os.path.join(folder, "tokenizer_config.json"), "w") as f:
        json.dump({"tokenizer_class": "PreTrainedTokenizerFast"}, f)


def prepare(tmp):
    """A tokenizer, a file of the records of a batch for each size of one, all longer than SEQ tokens, and the base in both types."""
    tokenizer = os.path.join(tmp, "tokenizer.json")
    for batch in (1, BATCH):
        with open(records_of(tmp, batch), "w") as f:
            for i in range(batch):
                f.write(json.dumps({"text": " ".join(WORDS[(i * k + k) % 10] for k in range(2 * SEQ))}) + "\n")
    tool("train-tokenizer", "-V", "300", "-o", tokenizer, records_of(tmp, BATCH))
    for name, dtype in TYPES.items():
        give_base(os.path.join(tmp, name), dtype, tokenizer)


def prepare_answers(tmp):
    """ANSWERS records, and a base in the folder "answers" with a tokenizer that fits them.  Returns the records' path and
    what they are."""
    records, draw = os.path.join(tmp, "answers.jsonl"), random.Random(1)
    tokenizer, gsm8k = os.path.join(tmp, "tokenizer.json"), os.path.join(DATA, "gsm8k", "train.jsonl")
    real = os.path.exists(gsm8k) and os.path.isdir(os.path.join(DATA, "gpt2-tokenizer"))
    if real:
        with open(gsm8k) as f:
            pairs = [(r["question"] + "\n", r["answer"]) for r in draw.sample([json.loads(line) for line in f], ANSWERS)]
        tokenizer = os.path.join(tmp, "gpt2.json")
        ByteLevelBPETokenizer(*(os.path.join(DATA, "gpt2-tokenizer", n) for n in ("vocab.json", "merges.txt"))).save(tokenizer)
    else:
        lengths = [round(math.exp(draw.gauss(math.log(140), 0.36))) for _ in range(ANSWERS)]
        pairs = [(" ".join(draw.choices(WORDS, k=round(0.37 * n))) + " ", " ".join(draw.choices(WORDS, k=round(0.63 * n))))
                 for n in lengths]
    with open(records, "w") as f:
        for prompt, completion in pairs:
            f.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")
    give_base(os.path.join(tmp, "answers"), TYPES[ANSWERS_TYPE], tokenizer)
    return records, "GSM8K" if real else "drawn words"


def start_of(base, kind, start):
    """PEFT's model, whose adapter is saved as the start of both programs, and its optimiser."""
    torch.set_num_threads(THREADS)
    torch.manual_seed(1)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear", fan_in_fan_out=True)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=kind), config).train()
    model.save_pretrained(start)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE, weight_decay=0)


def theirs(tmp, dtype, start):
    """Loss of the first step, and the median of the others' seconds."""
    base = os.path.join(tmp, dtype)
    batch, seq = shape_of(dtype)
    model, step = start_of(base, TYPES[dtype], start)
    tok = AutoTokenizer.from_pretrained(base)
    with open(records_of(tmp, batch)) as f:
        ids = torch.tensor([tok(json.loads(r)["text"], add_special_tokens=False).input_ids[:seq] for r in f])
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


def run(tmp, base, records, *how):
    """What a run of peft-tune says of its steps."""
    metrics = os.path.join(tmp, "metrics.jsonl")
    tool("peft-tune", os.path.join(tmp, base), records, "-o", os.path.join(tmp, "out"), "-f", "-j", str(THREADS), "--lr-schedule",
         "constant", "--metrics", metrics, *how)
    with open(metrics) as f:
        return [r for r in map(json.loads, f) if r.get("event") == "step"]


def ours(tmp, dtype, *how):
    batch, seq = shape_of(dtype)
    steps = run(tmp, dtype, records_of(tmp, batch), "--dtype", dtype, "--steps", str(STEPS), "--batch-size", str(batch),
                "--seq-len", str(seq),
                "--no-packing", "--truncation", "start", "--lr", str(RATE), *how)
    ends = [r["seconds"] for r in steps]
    return steps[0]["loss"], statistics.median(b - a for a, b in zip(ends, ends[1:]))


def batches(base, records):
    """Padded batches of PEFT: ids, attention mask, labels, which are -100 on prompts and padding."""
    tok, made = AutoTokenizer.from_pretrained(base), []
    with open(records) as f:
        rows = [json.loads(r) for r in f]
    ends = [i for t, i in tok.get_vocab().items() if t == "<|endoftext|>"]
    parts = [(tok(r["prompt"], add_special_tokens=False).input_ids,
              tok(r["completion"], add_special_tokens=False).input_ids + ends) for r in rows]
    for i in range(0, len(parts), ANSWERS_BATCH):
        some = parts[i : i + ANSWERS_BATCH]
        longest = max(len(p) + len(c) for p, c in some)
        fill = [longest - len(p) - len(c) for p, c in some]
        made.append(dict(input_ids=torch.tensor([p + c + [0] * n for (p, c), n in zip(some, fill)]),
                         attention_mask=torch.tensor([[1] * (longest - n) + [0] * n for n in fill]),
                         labels=torch.tensor([[-100] * len(p) + c + [-100] * n for (p, c), n in zip(some, fill)])))
    return made


def answers(tmp):
    """Of PEFT and of peft-tune: the mean loss of a trained token in an epoch, its seconds, and how many tokens it trains; and what
    the records are.  Two epochs at a rate of nothing, of which the second counts."""
    records, what = prepare_answers(tmp)
    base, start = os.path.join(tmp, "answers"), os.path.join(tmp, "start-answers")
    model, step = start_of(base, TYPES[ANSWERS_TYPE], start)
    made, total, tokens, began = batches(base, records), 0.0, 0, 0.0
    for group in step.param_groups:
        group["lr"] = 0.0
    for epoch in range(2):
        total, tokens, began = 0.0, 0, time.monotonic()
        for batch in made:
            loss = model(**batch).loss
            step.zero_grad()
            loss.backward()
            step.step()
            n = int((batch["labels"][:, 1:] >= 0).sum())
            total, tokens = total + loss.item() * n, tokens + n
    peft_seconds = time.monotonic() - began
    steps = run(tmp, "answers", records, "--dtype", ANSWERS_TYPE, "--epochs", "2", "--batch-size", "1", "--seq-len", "1024", "--lr",
                "1e-12", "--init-adapter", start)
    second = steps[len(steps) // 2 :]
    counts = [b["tokens"] - a["tokens"] for a, b in zip(steps[len(steps) // 2 - 1 :], second)]
    here = sum(r["loss"] * n for r, n in zip(second, counts)) / sum(counts)
    return (total / tokens, peft_seconds, tokens), (here, second[-1]["seconds"] - steps[len(steps) // 2 - 1]["seconds"],
                                                    sum(counts)), what


def same_lengths(tmp):
    prepare(tmp)
    print(f"# 124M, {THREADS} threads, rank 16 on all linear layers; seconds a step")
    for dtype, most in (("bf16", 2e-2), ("f32", 1e-4)):
        start = os.path.join(tmp, "start-" + dtype)
        a, peft_seconds = theirs(tmp, dtype, start)
        b, seconds = ours(tmp, dtype, "--init-adapter", start)
        _, full = ours(tmp, dtype, "--method", "full")
        batch, seq = shape_of(dtype)
        print(f"# {dtype}, {batch} x {seq} tokens: LoRA {seconds:.3f} here, {peft_seconds:.3f} by PEFT: {peft_seconds / seconds:.2f} times as fast")
        print(f"# {dtype}: full fine-tuning {full:.3f} here: a step of LoRA is {seconds / full:.2f} of it")
        check(abs(a - b) < most, f"{dtype}: the first loss is PEFT's ({b:.6f}, {a:.6f})")


def answers_in_windows(tmp):
    (a, peft_seconds, n), (b, seconds, m), what = answers(tmp)
    print(f"# {ANSWERS_TYPE}, {ANSWERS} records ({what}): an epoch of LoRA {seconds:.1f} s here, {peft_seconds:.1f} by PEFT in padded batches of "
          f"{ANSWERS_BATCH}: {peft_seconds / seconds:.2f} times as fast")
    check(n == m and abs(a - b) < 2e-2, f"{ANSWERS_TYPE}: the epoch trains PEFT's tokens ({m}, {n}), and their loss is PEFT's "
          f"({b:.6f}, {a:.6f})")


CASES = [same_lengths, answers_in_windows]


def main():
    """Arguments: parts of the names of the cases to run; none: all."""
    for case in CASES:
        if any(a in case.__name__ for a in sys.argv[1:] or [""]):
            with tempfile.TemporaryDirectory() as tmp:
                case(tmp)
    return tap.finish()


if __name__ == "__main__":
    sys.exit(main())
