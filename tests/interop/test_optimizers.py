#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare the optimisers of train(1) with those of PyTorch, transformers, pytorch-optimizer and bitsandbytes: losses and
weights after eight steps on one batch, from one model; speaks TAP.

Environment: LM_TEST_BUILD, a build folder with the tools."""
import json
import os
import subprocess
import sys
import tempfile

import test_models as base
import torch
from bitsandbytes.optim import AdamW8bit
from pytorch_optimizer import SOAP, Lamb, NorMuon
from transformers import AutoModelForCausalLM
from transformers.optimization import Adafactor
import tap

STEPS, LR = 8, 3e-3
TORCH = torch.optim


def in_layers(name, p):
    return p.ndim == 2 and ".layers." in name


def muon(model):
    """Hidden matrices by Muon, the others by AdamW at 0.015 times the rate."""
    hidden = [p for n, p in model.named_parameters() if in_layers(n, p)]
    others = [p for n, p in model.named_parameters() if not in_layers(n, p)]
    return [TORCH.Muon(hidden, lr=LR, weight_decay=0.0, adjust_lr_fn="original"),
            TORCH.AdamW(others, lr=LR * 0.015, betas=(0.9, 0.95), weight_decay=0.0)]


def split(model, takes, first, **others):
    """One optimiser for the tensors that `takes` selects, AdamW for the others."""
    mine = [p for n, p in model.named_parameters() if takes(n, p)]
    rest = [p for n, p in model.named_parameters() if not takes(n, p)]
    return [first(mine), TORCH.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0, **others)]


def soap(model):
    return split(model, in_layers, lambda p: SOAP(p, lr=LR, weight_decay=0.01, precondition_frequency=3, shampoo_beta=0.95),
                 lr=LR)


def normuon(model):
    """Matrices with at least as many rows as columns: for others the second moment here is that of columns, there of rows."""
    def takes(name, p):
        return in_layers(name, p) and p.shape[0] >= p.shape[1]
    return split(model, takes, lambda p: NorMuon([{"params": p, "use_muon": True}], lr=LR), lr=LR * 0.015)


def lamb(model):
    """Matrices: pytorch-optimizer scales the steps of vectors, too.  It has no correction of both biases."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    return [Lamb(matrices, lr=LR, weight_decay=0.01, weight_decouple=False, adam_debias=True), TORCH.Adam(vectors, lr=LR)]


def adamw8bit(model):
    """The states of embeddings are F32."""
    def takes(name, _):
        return not any(word in name for word in ("embed", "wte", "wpe"))
    return split(model, takes, lambda p: AdamW8bit(p, lr=LR, betas=(0.9, 0.95), weight_decay=0.0, min_8bit_size=1), lr=LR)


# What `normuon` leaves to AdamW.
WIDE = "*down_proj|*k_proj|*v_proj=adamw:weight_decay=0,lr=4.5e-5"
OF_LLAMA = muon, soap, normuon

# Options of train, the reference optimisers, and the allowed differences of losses and weights.
CASES = [
    ("adam:weight_decay=0", lambda m: [TORCH.Adam(m.parameters(), lr=LR)], 1e-4),
    ("amsgrad:beta2=0.9,weight_decay=0", lambda m: [TORCH.Adam(m.parameters(), lr=LR, betas=(0.9, 0.9), amsgrad=True)], 1e-4),
    ("adagrad:lr_decay=0.1,weight_decay=0", lambda m: [TORCH.Adagrad(m.parameters(), lr=LR, lr_decay=0.1)], 1e-4),
    ("rmsprop:weight_decay=0", lambda m: [TORCH.RMSprop(m.parameters(), lr=LR)], 1e-4),
    ("rmsprop:centered=on,momentum=0.5,eps=1e-4,weight_decay=0",
     lambda m: [TORCH.RMSprop(m.parameters(), lr=LR, centered=True, momentum=0.5, eps=1e-4)], 1e-3),
    ("nesterov:weight_decay=0", lambda m: [TORCH.SGD(m.parameters(), lr=LR, momentum=0.9, nesterov=True)], 1e-4),
    ("adafactor", lambda m: [Adafactor(m.parameters(), lr=LR, relative_step=False, scale_parameter=True)], 1e-4),
    ("adafactor:beta1=0.9,scale_parameter=off",
     lambda m: [Adafactor(m.parameters(), lr=LR, relative_step=False, scale_parameter=False, beta1=0.9)], 1e-4),
    ("muon:weight_decay=0", muon, 2e-3),
    ("lamb:bias_correction=off;norm|bias=adam:weight_decay=0", lamb, 1e-3),
    ("adamw8bit:weight_decay=0,min_8bit_size=1", adamw8bit, 2e-3),
    # 1e-3 is also the difference between two instruction sets: SOAP makes steps in the null space of the gradients
    ("soap:weight_decay=0.01,precondition_frequency=3", soap, 5e-3),
    ("normuon:weight_decay=0,cautious=off,ns=quintic,bf16=off;" + WIDE, normuon, 2e-3),
]


def theirs(model, make, tokens, targets):
    optimizers, losses = make(model), []
    for _ in range(STEPS):
        model.zero_grad()
        loss, _ = base.loss_of(model, tokens, targets)
        loss.backward()
        for o in optimizers:
            o.step()
        losses.append(loss.item())
    return losses


def test_case(tmp, name, config, data, ids, spec, make, tolerance):
    model = base.make(config, 5).train()
    folder, out, metrics = (os.path.join(tmp, f) for f in ("model", "run", "metrics.jsonl"))
    model.save_pretrained(folder)
    shape = base.BATCH, base.SEQ
    want = theirs(model, make, ids[:-1].reshape(shape), ids[1:].reshape(shape))
    subprocess.run([os.path.join(base.BUILD, "bin", "train"), "-q", "-f", folder, data, "-o", out, "--metrics", metrics,
                    "--steps", str(STEPS), "--seq-len", str(base.SEQ), "--batch-size", str(base.BATCH), "--lr", str(LR),
                    "--lr-schedule", "constant", "--peak-tflops", "0", "--max-grad-norm", "0", "--optimizer", spec], check=True)
    got = [r["loss"] for r in (json.loads(line) for line in open(metrics)) if "grad_norm" in r]
    back = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    start = base.make(config, 5).state_dict()
    # relative to the change of the weights; the gradient of the bias of GPT-2's keys is only rounding
    way = sum((p - start[n]).norm() ** 2 for n, p in model.state_dict().items() if not n.endswith("c_attn.bias")) ** 0.5
    off = sum((p - q).norm() ** 2 for (n, p), q in zip(model.state_dict().items(), back.state_dict().values())
              if not n.endswith("c_attn.bias")) ** 0.5
    loss, weights = base.far(got, want), (off / way).item()
    base.check(loss < tolerance and weights < 100 * tolerance and want[-1] < want[0],
               f"{name}: {spec}: losses to {loss:.1e}, weights to {weights:.1e} of their way")


def main():
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False
    for name, config in base.configs():
        if name not in ("gpt2", "llama"):
            continue
        ids = torch.randint(0, config.vocab_size, (base.BATCH * base.SEQ + 1,), generator=torch.Generator().manual_seed(4))
        for spec, make, tolerance in CASES:
            if make in OF_LLAMA and name == "gpt2":
                continue  # q, k and v are one matrix in transformers, and three here
            with tempfile.TemporaryDirectory() as tmp:
                data = os.path.join(tmp, "data")
                os.mkdir(data)
                base.write_shard(os.path.join(data, "train"), ids.tolist())
                test_case(tmp, name, config, data, ids, spec, make, tolerance)
    return tap.finish()


if __name__ == "__main__":
    sys.exit(main())
