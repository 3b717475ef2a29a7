#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Files of the reference library through compress-ckpt and back, and its lossy forms beside torch's; writes TAP.

Environment: LM_TEST_BUILD, a build folder with bin/compress-ckpt."""
import json
import os
import subprocess
import tempfile

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
import tap
from tap import BUILD, check

TOOL = os.path.join(BUILD, "bin", "compress-ckpt")
DTYPES = """bool uint8 int8 float8_e5m2 float8_e4m3fn float8_e8m0fnu float8_e4m3fnuz float8_e5m2fnuz int16 uint16
float16 bfloat16 int32 uint32 float32 complex64 float64 int64 uint64 float4_e2m1fn_x2""".split()


def run(*args):
    return subprocess.run([TOOL, "-q", *args], check=True, capture_output=True).stdout


def dynamic_map(signed):
    """The 256 numbers of arXiv:2110.02861 and its implementation, with -1 in the signed map."""
    out = [0.0, 1.0]
    for d in range(7):
        cells = 2 ** d if signed else 2 ** (d + 1)
        edges = torch.linspace(0.1, 1, cells + 1, dtype=torch.float64)
        means = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (d - 6)
        out += means.tolist()
        if signed:
            out += (-means).tolist() if d else [-1.0]
    return torch.tensor(sorted(out), dtype=torch.float64)


def nearest_error(x):
    """For each element the error of the nearest entry of its block's map, and the block's largest number."""
    pad = torch.nn.functional.pad(x.flatten().double(), (0, -x.numel() % 256)).view(-1, 256)
    best, most = [], []
    for block in pad:
        s = block.abs().max()
        m = dynamic_map(bool((block < 0).any())) * s
        best.append((block[:, None] - m[None, :]).abs().min(1).values)
        most.append(s.expand(256))
    n = x.numel()
    return torch.cat(best)[:n], torch.cat(most)[:n]


def main():
    torch.manual_seed(3)
    with tempfile.TemporaryDirectory() as tmp:
        path, lmz, back = (os.path.join(tmp, n) for n in ("all.safetensors", "all.lmz", "back.safetensors"))
        raw = torch.randint(0, 256, (50000,), dtype=torch.uint8)
        every = {d: (raw % 2 if d == "bool" else raw)[:4096].clone().view(getattr(torch, d)) for d in DTYPES if hasattr(torch, d)}
        save_file(every, path, metadata={"format": "pt", "note": "é \" \\"})
        run(path, "-o", lmz)
        run("-d", lmz, "-o", back)
        with open(path, "rb") as a, open(back, "rb") as b:
            check(a.read() == b.read(), "every dtype comes back byte for byte")

        x = {"w": torch.randn(300, 70) * 0.05, "norm": torch.ones(70) + torch.randn(70) * 0.01}
        save_file(x, path, metadata={"format": "pt"})
        for codec, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp8_e4m3", torch.float8_e4m3fn),
                             ("fp8_e5m2", torch.float8_e5m2)):
            run("-f", path, "--weights", codec, "-o", lmz)
            run("-f", "-d", lmz, "-o", back)
            y = load_file(back)
            check(y["w"].dtype == dtype and torch.equal(y["w"].view(torch.uint8), x["w"].to(dtype).view(torch.uint8)),
                  f"--weights {codec} rounds as torch does")
            whole = codec.startswith("fp8")
            check(torch.equal(y["norm"], x["norm"] if whole else x["norm"].to(dtype)), f"norms with {codec}")

        m, v = torch.randn(90, 100) ** 3 * 1e-3, (torch.randn(90, 100) ** 4) * 1e-8
        path = os.path.join(tmp, "optimizer.safetensors")
        save_file({"exp_avg.w": m, "exp_avg_sq.w": v}, path)
        report = json.loads(run("-f", path, "--optimizer-states", "int8", "-o", lmz, "--json"))
        run("-f", "-d", lmz, "-o", back)
        y = load_file(back)
        for name, t in (("exp_avg.w", m), ("exp_avg_sq.w", v)):
            err = (y[name].double() - t.double()).abs().flatten()
            best, most = nearest_error(t)
            check(bool((err <= best + most * 4e-7).all()), f"{name}: the nearest entry of the dynamic map")
            line = next(r for r in report["lossy"] if r["tensor"] == name)
            rel = err.norm() / t.double().norm()
            check(abs(line["max_abs"] - err.max()) <= 1e-12 * line["max_abs"] and abs(line["rel_l2"] - rel) <= 1e-9
                  and err.max() <= line["bound"], f"{name}: the report's numbers")
        check(bool((y["exp_avg_sq.w"][v > 0] > 0).all()), "second moments stay positive")
        with safe_open(back, "pt") as f:
            check("lmutils.coded" not in (f.metadata() or {}), "the expanded file describes no codes")
    return tap.finish()


if __name__ == "__main__":
    raise SystemExit(main())
