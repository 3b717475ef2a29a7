#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""lm_hybrid beside transformers: block-sparse attention as Llama's with a mask for each head; speaks TAP.

The mask is written here from the definition of lm-hybrid(5), pair by pair.  transformers refuses the folder itself.

test_hybrid.py --golden writes tests/golden/models/hybrid-blocks.safetensors instead."""
import json
import os
import sys
import tempfile

import torch
from transformers import AutoConfig, LlamaConfig

import tap
from tap import check
from test_models import batch, compare, levels, make, ours, probe, run_theirs, save_golden, write_ids

SEQ, HEADS, WINDOW = 130, 4, 40
OBJECTS = [{"block_size": 16, "local_blocks": 2},
           {"block_size": 32, "local_blocks": 1, "global_blocks": 1},
           {"block_size": 16, "local_blocks": 1, "vert_stride": 3},
           {"block_size": 16, "local_blocks": 2, "global_blocks": 1, "vert_stride": 8},
           {"block_size": 16, "local_blocks": 1, "vert_stride": 4, "homo_head": True}]


def seen(o, h, i, j):
    p, r, stride = i // o["block_size"], j // o["block_size"], o.get("vert_stride", 0)
    step = 0 if o.get("homo_head") else max(1, stride // HEADS)
    return p - r < o["local_blocks"] or r < o.get("global_blocks", 0) or (stride > 0 and (r + 1 + h * step) % stride == 0)


def mask_of(kind, o, seq=SEQ):
    see = torch.ones(HEADS, seq, seq, dtype=torch.bool).tril()
    for h in range(HEADS):
        for i in range(seq):
            for j in range(i + 1):
                near = i - j < WINDOW if kind == "sliding_attention" else kind == "full_attention" or seen(o, h, i, j)
                see[h, i, j] = bool(near)
    return torch.zeros(1, HEADS, seq, seq).masked_fill(~see, torch.finfo(torch.float32).min)


def give_masks(model, masks):
    """Each layer's attention gets the mask of its kind."""
    for layer, mask in zip(model.model.layers, masks):
        def forward(*args, attend=layer.self_attn.forward, own=mask, **more):
            return attend(*args, **{**more, "attention_mask": own})
        layer.self_attn.forward = forward


def config_of(kinds, vocab, width):
    return LlamaConfig(vocab_size=vocab, hidden_size=width, intermediate_size=width + 8, num_hidden_layers=len(kinds),
                       num_attention_heads=HEADS, num_key_value_heads=2, max_position_embeddings=256, pad_token_id=None)


def about_of(config, kinds, o):
    return config.to_diff_dict() | {"model_type": "lm_hybrid", "architectures": ["LmHybridForCausalLM"], "layer_types": kinds,
                                    "sliding_window": WINDOW, "block_sparse_attention": o}


def write_golden():
    """Of some blocks, so that most pairs are not seen."""
    kinds, o, seq = ["block_sparse_attention", "sliding_attention"], OBJECTS[2], 70
    config = config_of(kinds, 29, 16)
    model = make(config, 12)
    give_masks(model, [mask_of(kind, o, seq) for kind in kinds])
    tokens, targets = batch(config, 1, 8, seq)
    save_golden("hybrid-blocks", model, about_of(config, kinds, o), tokens[0], targets[0], "test_hybrid.py")


def test_blocks(run, tmp, number, o, kinds):
    name, folder, ids = f"{'+'.join(kinds)} {number}", os.path.join(tmp, f"m{number}"), os.path.join(tmp, "ids.safetensors")
    config = config_of(kinds, 97, 32)
    model = make(config, 7 + number)
    model.save_pretrained(folder)
    json.dump(about_of(config, kinds, o), open(os.path.join(folder, "config.json"), "w"))
    give_masks(model, [mask_of(kind, o) for kind in kinds])
    tokens, targets = batch(config, 1, 3 + number, SEQ)
    write_ids(ids, tokens, targets)
    truth = run_theirs(model, tokens[0], targets[0])
    for level in levels():
        worst, at = compare(ours(run, tmp, folder, ids, "f32", level), truth, lambda k: 1e-5)
        check(worst < 1, f"{name} f32 {level}: {worst * 1e-5:.1e} at {at}")
    return folder


def main():
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False  # it selects instructions that raise SIGILL on some virtual machines
    if "--golden" in sys.argv:
        write_golden()
        return 0
    with tempfile.TemporaryDirectory() as tmp:
        run = probe(tmp)
        for number, o in enumerate(OBJECTS):
            kinds = ["block_sparse_attention", ["full_attention", "sliding_attention", "block_sparse_attention"][number % 3]]
            folder = test_blocks(run, tmp, number, o, kinds)
        try:
            AutoConfig.from_pretrained(folder)
            check(False, "transformers refuses lm_hybrid")
        except ValueError as e:
            check("lm_hybrid" in str(e), "transformers refuses lm_hybrid", e)
    return tap.finish()


if __name__ == "__main__":
    sys.exit(main())
