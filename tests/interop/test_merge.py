#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare the merge methods with mergekit's own functions; speaks TAP, skips where mergekit is not installed.

Environment: LM_TEST_BUILD, a build folder with libcore.a.

Tensors are float64, so that both sides may be held together closely, and once bfloat16.  Masks are drawn: there
torch.bernoulli is replaced by a comparison of the same probabilities with our random words."""
import subprocess
import sys
import tempfile
import tap
from tap import check, driver

try:
    import numpy as np
    import torch
    from mergekit.merge_methods import registry
    from mergekit.merge_methods.base import TensorGroup
    from safetensors.torch import save_file
except ImportError as e:
    print(f"ok 1 - merge methods beside mergekit's # skip mergekit cannot be imported: {e}")
    sys.exit(0)



def ours(run, tmp, method, base, models, shared, each):
    tensors = {f"m{i}": m for i, m in enumerate(models)}
    if base is not None:
        tensors["base"] = base
    save_file(tensors, tmp + "/in")
    args = [f"{k}={float(v)}" for k, v in shared.items()]
    args += [f"{i}:{k}={float(v)}" for k, vs in each.items() for i, v in enumerate(vs)]
    r = subprocess.run([run, "merge", method, tmp + "/in", tmp + "/out"] + args, capture_output=True, text=True)
    if r.returncode:
        return r.stderr.strip()
    with open(tmp + "/out", "rb") as f:
        return torch.frombuffer(bytearray(f.read()), dtype=models[0].dtype).reshape(models[0].shape)


def theirs(method, base, models, shared, each):
    tensors = models if base is None else [base] + models
    group = TensorGroup.from_tensors(tensors, base_index=None if base is None else 0, name="m0")
    first = 0 if base is None else 1
    parameters = dict(shared)
    for k, vs in each.items():
        parameters[k] = {i + first: v for i, v in enumerate(vs)}
    return registry.get(method)([group], parameters=parameters)[0]


class Draws:
    """torch.bernoulli with the words that the library draws for model 0, 1, ..."""

    def __init__(self, run, tmp):
        self.run, self.tmp, self.model, self.real = run, tmp, 0, torch.bernoulli

    def __call__(self, p):
        subprocess.run([self.run, "draws", "m0", str(self.model), "0", str(p.numel()), self.tmp + "/draws"], check=True)
        self.model += 1
        words = np.fromfile(self.tmp + "/draws", dtype=np.uint32).astype(np.float64)
        return (torch.from_numpy(words).reshape(p.shape) < p.double() * 2.0**32).to(p.dtype)

    def __enter__(self):
        torch.bernoulli = self

    def __exit__(self, *_):
        torch.bernoulli = self.real


W3 = {"weight": [0.5, 1.0, 0.25]}
PRUNE = {"weight": [0.5, 1.0, 0.25], "density": [0.4, 0.6, 1.0]}
L1 = 1  # our name for mergekit's rescale: true
CASES = [  # method, models, with base, shared, of each model
    ("linear", 3, False, {}, W3),
    ("linear", 3, False, {"normalize": False}, W3),
    ("task_arithmetic", 3, True, {"lambda": 0.7}, W3),
    ("task_arithmetic", 3, True, {"normalize": True}, W3),
    ("slerp", 1, True, {"t": 0.3}, {}),
    ("slerp", 1, True, {"t": 1.2}, {}),
    ("nuslerp", 2, False, {}, {"weight": [0.7, 0.2]}),
    ("nuslerp", 2, True, {}, {"weight": [0.7, 0.2]}),
    ("nuslerp", 2, True, {"nuslerp_flatten": False}, {"weight": [0.7, 0.2]}),
    ("nuslerp", 2, False, {"nuslerp_flatten": False, "nuslerp_row_wise": True}, {"weight": [0.7, 0.2]}),
    ("nuslerp", 2, True, {"nuslerp_flatten": False, "nuslerp_row_wise": True}, {"weight": [0.7, 0.2]}),
    ("multislerp", 3, False, {}, W3),
    ("multislerp", 3, True, {"normalize_weights": False}, W3),
    ("karcher", 3, False, {}, {}),
    ("karcher", 5, False, {"max_iter": 3}, {}),
    ("model_stock", 3, True, {}, {}),
    ("model_stock", 4, True, {"filter_wise": True}, {}),
    ("nearswap", 1, True, {"t": 0.05}, {}),
    ("arcee_fusion", 1, True, {}, {}),
    ("sce", 3, True, {}, {}),
    ("sce", 3, True, {"select_topk": 0.35}, {}),
    ("ties", 3, True, {}, PRUNE),
    ("ties", 3, True, {"normalize": False, "rescale": L1, "lambda": 1.3}, PRUNE),
    ("ties", 3, True, {}, {"weight": [0.5, -1.0, 0.25], "density": [0.01, 0.5, 1.0]}),
    ("breadcrumbs", 3, True, {}, {**PRUNE, "gamma": [0.01, 0.3, 0.1]}),
    ("breadcrumbs", 3, True, {"rescale": L1}, {**PRUNE, "gamma": [0.5, 0.9, 0.1]}),
    ("breadcrumbs_ties", 3, True, {"normalize": True}, {**PRUNE, "gamma": [0.01, 0.3, 0.1]}),
    ("dare_linear", 3, True, {"rescale": L1}, PRUNE),
    ("dare_ties", 3, True, {"rescale": 0}, PRUNE),
    ("dare_ties", 3, True, {"rescale": L1, "normalize": True}, PRUNE),
    ("della", 3, True, {"rescale": L1}, {**PRUNE, "epsilon": [0.1, 0.2, 0.15]}),
    ("della_linear", 3, True, {"rescale": 0}, PRUNE),
    ("ram", 3, True, {"epsilon": 0.2}, {}),
    ("ram", 1, True, {}, {}),
    ("ramplus_tl", 3, True, {"epsilon": 0.2}, {}),
    ("ramplus_tl", 4, True, {"epsilon": 0.5, "r": 0.7, "alpha": 0.9}, {}),
    ("passthrough", 1, False, {}, {"scale": [0.3]}),
]


def compare(run, tmp, case, shape, dtype):
    method, n, based, shared, each = case
    torch.manual_seed(len(shape))
    base = torch.randn(shape, dtype=torch.float64)
    models = [(base + 0.3 * torch.randn(shape, dtype=torch.float64)).to(dtype) for _ in range(n)]
    base = base.to(dtype) if based else None
    got = ours(run, tmp, method, base, models, shared, each)
    # mergekit draws masks of float64 tensors in float32: compare with its probabilities
    with Draws(run, tmp):
        flags = {k: bool(v) if k == "rescale" else v for k, v in shared.items()}
        want = theirs(method, base, models, flags, each)
    name = f"{method} {shared} {tuple(shape)} {str(dtype)[6:]}"
    if isinstance(got, str):
        check(False, name, got)
        return
    off = (got.double() - want.double()).abs()
    # mergekit computes della, dare and the factors of ramplus_tl in float32, and rounds bfloat16 at each step
    single = method[0] == "d" or method == "ramplus_tl"
    room = 2e-6 if dtype == torch.float64 and single else 1e-10 if dtype == torch.float64 else 4e-2
    bad = int((off > room).sum())
    allowed = 0 if dtype == torch.float64 else max(1, got.numel() // 20)  # elections and thresholds of rounded deltas
    check(bad <= allowed, name, f"{bad} of {got.numel()} elements differ, by {off.max()} at most")


def main():
    with tempfile.TemporaryDirectory() as tmp:
        run = driver("merge_driver.c", tmp)
        for case in CASES:
            for shape in [(37, 53), (61,)]:
                compare(run, tmp, case, shape, torch.float64)
            if case[0] not in ("dare_linear", "dare_ties", "della", "della_linear", "arcee_fusion"):
                compare(run, tmp, case, (19, 40), torch.bfloat16)
    sys.exit(tap.finish())


if __name__ == "__main__":
    main()
