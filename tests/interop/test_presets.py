#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Presets as transformers reads them: each has as many parameters there as init-model counts; speaks TAP.

Environment: LM_TEST_BUILD, a build folder with bin."""
import json
import os
import subprocess
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM
import tap
from tap import BIN, ROOT, check

transformers.logging.set_verbosity_error()
PRESETS = os.path.join(ROOT, "share", "models")
CLASSES = {"bert": AutoModelForMaskedLM, "t5": AutoModelForSeq2SeqLM}
OURS = "lm_hybrid"  # an architecture that transformers does not have


def theirs(name):
    """Parameters of the model without memory for them, and biases of routers, which are buffers there; a tied matrix counts
    once.  None: transformers has no such model."""
    with open(os.path.join(PRESETS, name + ".json")) as f:
        tree = json.load(f)
    kind = tree.pop("model_type")
    if kind == OURS:
        return None
    config = AutoConfig.for_model(kind, **tree)
    with torch.device("meta"):
        model = CLASSES.get(kind, AutoModelForCausalLM).from_config(config)
    n = sum(p.numel() for p in model.parameters())
    n += sum(b.numel() for name, b in model.named_buffers() if name.endswith("e_score_correction_bias"))
    if kind == "t5" and not config.scale_decoder_outputs:  # it has a head of its own, which is tied until one is loaded
        n += config.vocab_size * config.d_model
    return n


def main():
    listed = subprocess.run([os.path.join(BIN, "init-model"), "--list", "--json"], check=True, stdout=subprocess.PIPE, text=True)
    for line in listed.stdout.splitlines():
        preset = json.loads(line)
        n = theirs(preset["preset"])
        if n is not None:
            check(n == preset["parameters"], f"{preset['preset']} has the parameters of transformers' model",
                  f"{n} in transformers, {preset['parameters']} here")
    return tap.finish()


if __name__ == "__main__":
    sys.exit(main())
