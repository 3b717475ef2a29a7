#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare our safetensors with the reference library, and our folders with transformers; speaks TAP.

Environment: LM_TEST_BUILD, a build folder with libcore.a and bin/inspect-model."""
import json
import os
import subprocess
import sys
import tempfile

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
import tap
from tap import BUILD, ROOT, check, driver

LIBS = "-lz -lzstd -lxxhash -ljansson -lpcre2-8 -lutf8proc -lcairo -lm -lpthread".split()
DTYPES = """bool uint8 int8 float8_e5m2 float8_e4m3fn float8_e8m0fnu float8_e4m3fnuz float8_e5m2fnuz int16 uint16
float16 bfloat16 int32 uint32 float32 complex64 float64 int64 uint64 float4_e2m1fn_x2""".split()


def same_bytes(a, b):
    with open(a, "rb") as x, open(b, "rb") as y:
        return x.read() == y.read()


def bits(t):
    return t.contiguous().flatten().view(torch.uint8) if t.numel() else t.flatten()


def same_tensors(a, b):
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and torch.equal(bits(a[k]), bits(b[k])) for k in a)


def samples():
    torch.manual_seed(1)
    names = {}
    for d in DTYPES:
        if hasattr(torch, d):
            raw = torch.randint(0, 2 if d == "bool" else 256, (3 * 16,), dtype=torch.uint8)
            names["z." + d] = raw.view(getattr(torch, d))
            names["a." + d] = raw[:16].clone().view(getattr(torch, d))
    yield "all dtypes", names, {"format": "pt"}
    yield "no metadata", {"w": torch.randn(3, 5)}, None
    yield "no tensors", {}, {"k": "v"}
    yield "empty and scalar", {"e": torch.zeros(0, 3), "s": torch.tensor(1.5), "f": torch.zeros(2, 0)}, None
    yield "names", {'q"\\/\x07\u00e9\u2028\n\b\f\x1f<\U0001f600 ': torch.zeros(2), "": torch.zeros(1)}, {"k\n": "\u00e9\""}
    yield "many", {f"layers.{i}.w": torch.randn(i % 7, 3).to([torch.float32, torch.bfloat16][i % 2])
                   for i in range(500)}, {"format": "pt"}


def test_files(run, tmp):
    a, b, c = (os.path.join(tmp, x) for x in ("a.safetensors", "b.safetensors", "c.safetensors"))
    for name, tensors, meta in samples():
        tensors.pop("", None)  # we require a name
        save_file(tensors, a, metadata=meta)
        subprocess.run([run, "resave", a, b], check=True)
        check(same_bytes(a, b), f"{name}: saved again, the same bytes")
        with open(a, "rb") as f:
            subprocess.run([run, "stream", c], stdin=f, check=True)
        check(same_bytes(a, c), f"{name}: through a pipe, the same bytes")
        check(same_tensors(tensors, load_file(b)), f"{name}: the library reads what we wrote")
    floats = {f"t{i}": torch.randn(1000) * 10 ** i for i in range(-8, 6)}
    save_file(floats, a)
    for d, ours in (("bfloat16", "bf16"), ("float16", "f16"), ("float64", "f64"), ("float32", "f32")):
        subprocess.run([run, "as", ours, a, b], check=True)
        check(same_tensors({k: v.to(getattr(torch, d)) for k, v in floats.items()}, load_file(b)), f"f32 to {ours}")


def test_refused(tmp):
    """We refuse what the library refuses; the list has the cases in which we are stricter."""
    bad = os.path.join(ROOT, "tests/golden/bad")
    # The library accepts these: we support eight dimensions and no NUL.
    stricter = {"metadata-nul", "nul-in-name", "nine-dims"}
    for line in open(os.path.join(bad, "safetensors.list")):
        name = line.split(".")[0]
        try:
            with safe_open(os.path.join(bad, name + ".safetensors"), "pt") as f:
                f.keys()
            theirs = True
        except Exception:
            theirs = False
        ours = subprocess.run([os.path.join(BUILD, "bin/inspect-model"), "-qq", os.path.join(bad, name + ".safetensors")],
                              stdout=subprocess.DEVNULL).returncode == 0
        check(not ours and (not theirs or name in stricter), f"{name}: refused" + (" (the library reads it)" if theirs else ""))


def test_folders(run, tmp):
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
    torch.manual_seed(2)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                                         num_attention_heads=4, num_key_value_heads=2))
    want = {k: v.clone() for k, v in model.state_dict().items()}
    for limit in ("5GB", "40KB"):
        theirs = os.path.join(tmp, "hf-" + limit)
        model.save_pretrained(theirs, max_shard_size=limit)
        sharded = os.path.exists(os.path.join(theirs, "model.safetensors.index.json"))
        check(sharded == (limit != "5GB"), f"transformers writes shards of {limit}")
        out = subprocess.run([os.path.join(BUILD, "bin/inspect-model"), "--json", theirs], stdout=subprocess.PIPE,
                             check=True).stdout
        r = json.loads(out)
        check({t["name"] for t in r["tensors"]} == set(want), f"{limit}: we read all names")
        for ours_limit in (10**9, 50000, 1):
            ours = os.path.join(tmp, f"lm-{limit}-{ours_limit}")
            subprocess.run([run, "folder", theirs, ours, str(ours_limit)], check=True)
            again = AutoModelForCausalLM.from_pretrained(ours)
            check(same_tensors(want, dict(again.state_dict())), f"{limit} to {ours_limit}: transformers loads our folder")
            check(json.load(open(ours + "/config.json")) == json.load(open(theirs + "/config.json")),
                  f"{limit} to {ours_limit}: config.json says the same")
            same = subprocess.run([os.path.join(BUILD, "bin/inspect-model"), "--check", theirs, ours],
                                  stdout=subprocess.DEVNULL).returncode
            check(same == 0, f"{limit} to {ours_limit}: --check finds no difference")
        if limit == "5GB":
            check(same_bytes(theirs + "/config.json", os.path.join(tmp, "lm-5GB-1000000000/config.json")),
                  "config.json has the same bytes")
            check(same_bytes(theirs + "/model.safetensors", os.path.join(tmp, "lm-5GB-1000000000/model.safetensors")),
                  "model.safetensors has the same bytes")


def test_run_folder(run, tmp):
    """A run folder is a model folder for transformers, before and after its next checkpoint."""
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
    out = os.path.join(tmp, "run")
    os.mkdir(out)
    for step in ("step-000100", "step-000200"):
        torch.manual_seed(int(step[5:]))
        model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2))
        model.save_pretrained(os.path.join(tmp, step), max_shard_size="20KB" if step == "step-000200" else "5GB")
        subprocess.run([run, "folder", os.path.join(tmp, step), os.path.join(out, step),
                        "20000" if step == "step-000200" else "0"], check=True)
        subprocess.run([run, "publish", out, step], check=True)
        again = AutoModelForCausalLM.from_pretrained(out)
        check(same_tensors(dict(model.state_dict()), dict(again.state_dict())), f"run folder at {step}")
        subprocess.run([run, "folder", out, os.path.join(tmp, "copy-" + step), "0"], check=True)
        same = subprocess.run([os.path.join(BUILD, "bin/inspect-model"), "--check", out, os.path.join(tmp, "copy-" + step)],
                              stdout=subprocess.DEVNULL).returncode
        check(same == 0, f"run folder at {step}: read here")


with tempfile.TemporaryDirectory() as folder:
    exe = driver("safetensors_driver.c", folder)
    test_files(exe, folder)
    test_refused(folder)
    test_folders(exe, folder)
    test_run_folder(exe, folder)
sys.exit(tap.finish())
