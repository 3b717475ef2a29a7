#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""peft-tune of a T5 against PEFT: the same base, pairs and initial adapter, ten steps of AdamW in F32; losses agree to 1e-5 and
tensors to 1e-4, PEFT loads what the tool wrote and gives the same logits, and generate writes what PEFT's model does; speaks TAP.

Environment: LM_TEST_BUILD, a build folder with bin/peft-tune, bin/generate, bin/train-tokenizer and bin/init-model."""
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
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
import tap
from tap import BIN, check, tool

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
STEPS, RATE = 10, 3e-3
WORDS = "river old bridge stones market silver window morning evening garden".split()


def prepare(tmp):
    """Texts, a tokenizer, two versions of T5 and eight pairs."""
    texts, pairs, tok = (os.path.join(tmp, n) for n in ("text.jsonl", "pairs.jsonl", "tok.json"))
    with open(texts, "w") as f:
        for i in range(200):
            f.write(json.dumps({"text": " ".join(WORDS[(i * k + k) % 10] for k in range(12))}) + "\n")
    with open(pairs, "w") as f:
        for i in range(8):
            words = [WORDS[(i * 3 + k) % 10] for k in range(1 + i % 5)]
            f.write(json.dumps({"source": " ".join(words), "target": " ".join(words[::-1])}) + "\n")
    tool("train-tokenizer", "-m", "unigram", "-V", "80", "-s", "<pad>", "-s", "</s>", "-s", "<unk>", "-o", tok, texts)
    shape = {"d_model": 48, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 1, "num_heads": 4, "dropout_rate": 0}
    for name, more in (("gated", {}), ("relu", {"feed_forward_proj": "relu", "tie_word_embeddings": "true", "num_layers": 3, "num_decoder_layers": 3})):
        sets = [a for k, v in {**shape, **more}.items() for a in ("--set", f"{k}={v}")]
        tool("init-model", "t5-9m", "-t", tok, *sets, "-o", os.path.join(tmp, name))
    return pairs


def batch(base, pairs):
    """All pairs as one batch, with padding behind sources and targets."""
    tok = AutoTokenizer.from_pretrained(base)
    with open(pairs) as f:
        records = [json.loads(line) for line in f]
    ends = lambda ids: ids if ids and ids[-1] == tok.eos_token_id else ids + [tok.eos_token_id]
    side = lambda k: [ends(tok(r[k]).input_ids) for r in records]
    sources, targets = side("source"), side("target")
    fill = lambda rows, x: torch.tensor([r + [x] * (max(map(len, rows)) - len(r)) for r in rows])
    return {"input_ids": fill(sources, 0), "attention_mask": fill([[1] * len(s) for s in sources], 0),
            "labels": fill(targets, -100)}


def load(base):
    return AutoModelForSeq2SeqLM.from_pretrained(base, dtype=torch.float32).eval()


def theirs(base, config, data, start):
    """Losses of the steps, and the model afterwards; the adapter before the first step goes to `start`."""
    torch.manual_seed(1)
    model = peft.get_peft_model(load(base), config)
    model.eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p) * 0.02)
    model.save_pretrained(start)
    step = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE, weight_decay=0)
    losses = []
    for _ in range(STEPS):
        loss = model(**data).loss
        step.zero_grad()
        loss.backward()
        step.step()
        losses.append(loss.item())
    return losses, model


def greedy(model, ids, end):
    """Six tokens.  With a prefix by forward passes: PEFT 0.21's generate gives the prefix to transformers 5 by a name of caches
    that these no longer read."""
    if model.peft_config["default"].peft_type != "PREFIX_TUNING":
        return model.generate(input_ids=ids, max_new_tokens=6, do_sample=False, num_beams=1)[0]
    made = [model.config.decoder_start_token_id]
    while len(made) < 7 and made[-1] != end:
        with torch.no_grad():
            made.append(model(input_ids=ids, decoder_input_ids=torch.tensor([made])).logits[0, -1].argmax().item())
    return torch.tensor(made)


def generates(base, out, model, pairs):
    """Greedy words of generate with the adapter, and those of PEFT's model."""
    tok = AutoTokenizer.from_pretrained(base)
    with open(pairs) as f:
        prompts = [json.loads(line)["source"] for line in f]
    path = os.path.join(out, "prompts.jsonl")
    with open(path, "w") as f:
        f.writelines(json.dumps({"prompt": p}) + "\n" for p in prompts)
    got = subprocess.run([os.path.join(BIN, "generate"), "-q", base, path, "--adapter", out, "-n", "6", "--temperature", "0",
                          "--dtype", "f32"], check=True, capture_output=True, text=True).stdout
    got = [json.loads(line) for line in got.splitlines()]
    want = []
    for p in prompts:
        ids = tok(p).input_ids
        ids = ids if ids[-1] == tok.eos_token_id else ids + [tok.eos_token_id]
        want.append(tok.decode(greedy(model, torch.tensor([ids]), tok.eos_token_id), skip_special_tokens=True).strip())
    texts = [next(r[k] for k in ("completion", "text", "output") if k in r).strip() for r in got]
    return texts, want


def case(tmp, kind, name, method, config, pairs):
    base, start, out, metrics = (os.path.join(tmp, n) for n in (kind, f"{kind}-{name}-0", f"{kind}-{name}", "m.jsonl"))
    data = batch(base, pairs)
    losses, model = theirs(base, config, data, start)
    tool("peft-tune", base, pairs, "-o", out, "--init-adapter", start, "--method", method, "--steps", str(STEPS),
         "--batch-size", "8", "--lr", str(RATE), "--lr-schedule", "constant", "--max-grad-norm", "0", "--dtype", "f32",
         "--metrics", metrics, "-f")
    with open(metrics) as f:
        ours = [r["loss"] for r in map(json.loads, f) if r.get("event") == "step"]
    far = max(abs(a - b) for a, b in zip(ours, losses))
    check(len(ours) == STEPS and far < 1e-5 and losses[-1] < losses[0], f"{kind} {name}: losses of {STEPS} steps ({far:.1e})")
    end = os.path.join(tmp, "end")
    model.save_pretrained(end)
    a, b = (load_file(os.path.join(d, "adapter_model.safetensors")) for d in (out, end))
    far = max(((a[k].float() - b[k].float()).norm() / b[k].float().norm()).item() for k in b if k in a)
    check(set(a) == set(b) and far < 1e-4, f"{kind} {name}: tensors ({far:.1e})")
    with torch.no_grad():
        again = peft.PeftModel.from_pretrained(load(base), out).eval()
        far = (again(**data).logits - model(**data).logits).abs().max().item()
    check(far < 1e-4, f"{kind} {name}: PEFT loads the folder ({far:.1e})")
    got, want = generates(base, out, again, pairs)
    some = any(want) or kind == "relu"  # whose first token is the end
    check(got == want and some, f"{kind} {name}: generate writes what PEFT's model does", got, want)


def begun(tmp, kind, pairs):
    """A new adapter with no more than a method: the usual modules, and PEFT's class for such models."""
    base, out = os.path.join(tmp, kind), os.path.join(tmp, kind + "-new")
    tool("peft-tune", base, pairs, "-o", out, "--method", "ia3", "--steps", "3", "--dtype", "f32")
    model = peft.PeftModel.from_pretrained(load(base), out)
    names = {n.rsplit(".", 1)[-1] for n, m in model.named_modules() if hasattr(m, "ia3_l")}
    check(isinstance(model, peft.PeftModelForSeq2SeqLM) and names == {"k", "v", "wo"}, f"{kind}: a new IA3 ({names})")
    tool("peft-tune", base, pairs, "-o", out, "--method", "lora", "--steps", "3", "--dtype", "f32", "-f")
    model = peft.PeftModel.from_pretrained(load(base), out)
    linear = {n for n, m in load(base).named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    names = {n.removeprefix("base_model.model.") for n, m in model.named_modules() if hasattr(m, "lora_A")}
    check(names == linear, f"{kind}: a new LoRA is on all linear layers ({len(names)}, {len(linear)})")


def loss_of(base, pairs, *more):
    return json.loads(subprocess.run([os.path.join(BIN, "eval-model"), "-q", "--json", base, pairs, "--task", "pairs", "--dtype",
                                      "f32", *more], check=True, capture_output=True, text=True).stdout)["loss"]


def encoders(tmp, kind, pairs):
    """Of an encoder of rows PEFT reads the rows that it makes."""
    base, data = os.path.join(tmp, kind), batch(os.path.join(tmp, kind), pairs)
    for name, how in (("MLP", ["p-tuning"]), ("LSTM", ["p-tuning", "--set", "encoder_reparameterization_type=LSTM"]),
                      ("projected", ["prefix", "--set", "prefix_projection=true"])):
        out = os.path.join(tmp, f"{kind}-{name}")
        tool("peft-tune", base, pairs, "-o", out, "--method", *how, "--set", "num_virtual_tokens=3", "--set",
             "encoder_hidden_size=12", "--steps", "5", "--batch-size", "8", "--lr", "1e-2", "--dtype", "f32")
        got, plain = loss_of(base, pairs, "--adapter", out), loss_of(base, pairs)
        with torch.no_grad():
            want = peft.PeftModel.from_pretrained(load(base), out).eval()(**data).loss.item()
        check(abs(got - want) < 1e-5 * want < abs(got - plain), f"{kind} {name}: eval-model's loss ({got:.6f}, {want:.6f})")


def bottlenecks(tmp, kind, pairs):
    """AdapterHub's bottlenecks behind the branches of both stacks, written here as they are published (its library wants older
    transformers): the loss of what the tool trained is that of the model with them."""
    base, data = os.path.join(tmp, kind), batch(os.path.join(tmp, kind), pairs)
    act = {"swish": torch.nn.functional.silu, "relu": torch.relu}
    for method, more in (("houlsby", ["--set", "cross_adapter=true"]), ("pfeiffer", ["--set", "reduction_factor=4"])):
        out = os.path.join(tmp, f"{kind}-{method}")
        tool("peft-tune", base, pairs, "-o", out, "--method", method, *more, "--steps", "5", "--batch-size", "8", "--lr", "1e-2",
             "--dtype", "f32")
        with open(os.path.join(out, "adapter_config.json")) as f:
            how = json.load(f)["config"]
        left, model = load_file(os.path.join(out, "adapter_model.safetensors")), load(base)

        def put(layer, name):
            part = lambda p: left.pop(f"{name}.adapters.adapter.{p}")
            down, up = ((part(p + ".weight"), part(p + ".bias")) for p in ("adapter_down.0", "adapter_up"))
            stream = []
            layer.register_forward_pre_hook(lambda m, a, k: stream.append(a[0] if a else k["hidden_states"]), with_kwargs=True)

            def change(m, args, h):
                r = stream.pop()
                x = act[how["non_linearity"]]((h + r if how["original_ln_before"] else h) @ down[0].T + down[1])
                return h + how["scaling"] * (x @ up[0].T + up[1])
            layer.dropout.register_forward_hook(change)
        for stack in ("encoder", "decoder"):
            for i, block in enumerate(getattr(model, stack).block):
                for k, layer in enumerate(block.layer):
                    if k == len(block.layer) - 1 or (k == 0 and how["mh_adapter"]) or (k == 1 and how["cross_adapter"]):
                        put(layer, f"{stack}.block.{i}.layer.{k}")
        got = loss_of(base, pairs, "--adapter", out)
        with torch.no_grad():
            want = model(**data).loss.item()
        check(not left and abs(got - want) < 1e-5 * want < abs(got - loss_of(base, pairs)),
              f"{kind} {method}: eval-model's loss ({got:.6f}, {want:.6f})", sorted(left))


def cases(kind):
    ffn = ["wi_0", "wi_1", "wo"] if kind == "gated" else ["wi", "wo"]
    to = dict(task_type="SEQ_2_SEQ_LM", target_modules=["q", "k", "v", "o", *ffn])
    yield "usual", "lora", peft.LoraConfig(task_type="SEQ_2_SEQ_LM", r=4, lora_alpha=8)
    yield "lora", "lora", peft.LoraConfig(r=4, lora_alpha=8, **to)
    if kind == "relu":  # whose layers have pairs of the table in another order
        yield "prefix", "prefix", peft.PrefixTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=3, token_dim=32)
        return
    yield "dora", "dora", peft.LoraConfig(r=4, lora_alpha=8, use_dora=True, **to)
    yield "saved", "lora", peft.LoraConfig(r=4, modules_to_save=["final_layer_norm", "lm_head"], **to)
    yield "ia3", "ia3", peft.IA3Config(feedforward_modules=["wo"], **to)
    yield "loha", "loha", peft.LoHaConfig(r=4, alpha=8, **to)
    yield "lokr", "lokr", peft.LoKrConfig(r=4, alpha=8, **to)
    yield "oft", "oft", peft.OFTConfig(oft_block_size=8, **to)
    yield "hra", "hra", peft.HRAConfig(r=4, **to)
    yield "vera", "vera", peft.VeraConfig(r=6, **to)
    yield "randlora", "randlora", peft.RandLoraConfig(r=4, randlora_alpha=4, **to)
    yield from virtual()
    yield "norms", "ln_tuning", peft.LNTuningConfig(task_type="SEQ_2_SEQ_LM", target_modules=["layer_norm", "final_layer_norm"])


def virtual():
    """Prompts in front of the source, with a table for each stack or for one, and prefixes of the decoder."""
    some = dict(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=3)
    yield "prompt", "prompt", peft.PromptTuningConfig(**some)
    yield "prompt-1", "prompt", peft.PromptTuningConfig(num_transformer_submodules=1, **some)
    yield "prefix", "prefix", peft.PrefixTuningConfig(token_dim=32, num_attention_heads=4, **some)


def main():
    with tempfile.TemporaryDirectory() as tmp:
        pairs = prepare(tmp)
        for kind in ("gated", "relu"):
            begun(tmp, kind, pairs)
            encoders(tmp, kind, pairs)
            bottlenecks(tmp, kind, pairs)
            for name, method, config in cases(kind):
                case(tmp, kind, name, method, config, pairs)
    return tap.finish()


if __name__ == "__main__":
    sys.exit(main())
