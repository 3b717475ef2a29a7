#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare merged vocabularies with mergekit's: tokens, ids, and the embedding of each token seen by each model.
Speaks TAP, skips where mergekit is not installed.

Environment: LM_TEST_BUILD, a build folder with bin/.

Three models have tokenizers learned from different texts.  A linear merge with one weight of one shows the rows that
this model has in the merged vocabulary; mergekit's own functions say what they should be."""
import importlib.util
import os
import subprocess
import sys
import tempfile
import types
import tap
from tap import BIN, check

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
try:
    import torch
    import transformers
    from safetensors.torch import load_file

    if not importlib.util.find_spec("immutables"):  # mergekit requires an immutable dictionary; nothing changes it here
        sys.modules["immutables"] = types.ModuleType("immutables")
        sys.modules["immutables"].Map = dict
    from mergekit.common import ModelReference
    from mergekit.tokenizer.build import build_tokenizer
    from mergekit.tokenizer.config import ModelTokenEmbedding, TokenEmbeddingConfig, ZeroEmbedding
    from mergekit.tokenizer.embed import PermutedVocabulary
except ImportError as e:
    print(f"1..0 # SKIP mergekit cannot be imported: {e}")
    sys.exit(0)
transformers.logging.set_verbosity_error()

TABLE = "model.embed_tokens.weight"


def tool(name, *args):
    r = subprocess.run([os.path.join(BIN, name), "-q", *map(str, args)], capture_output=True, text=True)
    if r.returncode:
        raise RuntimeError(f"{name}: {r.stderr.strip()}")


def make(tmp):
    texts = {"a": "The system reads word{0} and writes line {1} of it.\n\n", "b": "Numbers: {0} plus {1} makes more, exactly.\n\n",
             "c": "The system adds numbers: {0} plus {1}, all of it exactly.\n\n"}
    for i, (m, text) in enumerate(texts.items()):
        with open(f"{tmp}/{m}.txt", "w") as f:
            f.writelines(text.format(k % 37, k % 23) for k in range(200))
        special = ["--special", "<|endoftext|>"] + (["--special", "<|sum|>"] if m != "a" else [])
        tool("train-tokenizer", "--vocab-size", 290 + 6 * i, "--pattern", "llama3", *special, "-o", f"{tmp}/{m}-tok/tokenizer.json",
             f"{tmp}/{m}.txt")
        tool("init-model", "llama-1m", "--set", "num_hidden_layers=1", "--set", "hidden_size=32", "--set", "intermediate_size=48",
             "--tokenizer", f"{tmp}/{m}-tok/tokenizer.json", "--seed", i, "-o", f"{tmp}/{m}")
    return [f"{tmp}/{m}" for m in texts]


def theirs(models, base, source, tokens, pad):
    """Their vocabulary, and a table for each model."""
    refs = [ModelReference.parse(m) for m in models]
    base = base and ModelReference.parse(base)
    source = source if source in ("union", "base") else ModelReference.parse(source)
    info = build_tokenizer(base, refs, source, False, list(tokens))
    task = types.SimpleNamespace(tokens=tokens, pad_to_multiple_of=pad, base_model=base, vocabulary_axis=0)
    for name in ("assign_embedding_sources", "compute_default_embedding"):
        setattr(task, name, types.MethodType(getattr(PermutedVocabulary, name), task))
    tables = {r: load_file(m + "/model.safetensors")[TABLE] for r, m in zip(refs, models)}
    return info.tokenizer.get_vocab(), list(PermutedVocabulary.execute(task, info, tables).values())


def ours(tmp, models, base, k, source, rules, pad):
    """Our vocabulary, and the table of model k."""
    yaml = ["merge_method: linear", "models:"]
    yaml += [f"  - {{model: {m}, parameters: {{weight: {int(i == k)}}}}}" for i, m in enumerate(models)]
    yaml += [f"base_model: {base}"] if base else []
    yaml += ["tokenizer:", f"  source: {source}"] + ([f"  pad_to_multiple_of: {pad}"] if pad else [])
    yaml += ["  tokens:"] + ["    " + r for r in rules] if rules else []
    with open(tmp + "/m.yaml", "w") as f:
        f.write("\n".join(yaml) + "\n")
    tool("merge-models", "--config", tmp + "/m.yaml", "-f", "-o", tmp + "/out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp + "/out")
    return transformers.AutoTokenizer.from_pretrained(tmp + "/out").get_vocab(), model.get_input_embeddings().weight.detach()


def compare(tmp, name, models, source, base=None, tokens={}, rules=(), pad=None):
    vocab, tables = theirs(models, base, source, tokens, pad)
    for k, table in enumerate(tables):
        mine, rows = ours(tmp, models, base, k, source, rules, pad)
        wrong = sorted(t for t in vocab if t in mine and not torch.allclose(rows[mine[t]], table[vocab[t]], rtol=1e-6, atol=1e-8))
        padding = torch.allclose(rows[len(mine):], table[len(vocab):], rtol=1e-5, atol=1e-7)
        check(set(mine) == set(vocab) and not wrong and rows.shape == table.shape and padding, f"{name}, as model {k + 1} sees it",
              f"only ours: {sorted(set(mine) - set(vocab))[:5]}", f"only theirs: {sorted(set(vocab) - set(mine))[:5]}",
              f"{len(wrong)} rows: {wrong[:5]}", f"{list(rows.shape)} against {list(table.shape)}")
    if source != "union":
        check(mine == vocab, f"{name}: ids")
    else:
        lead = transformers.AutoTokenizer.from_pretrained(base or models[0]).get_vocab()
        check(all(mine[t] == i for t, i in lead.items()), f"{name}: the first model's ids")


def main():
    with tempfile.TemporaryDirectory() as tmp:
        models = make(tmp)
        a, b, c = models
        compare(tmp, "union", models, "union")
        compare(tmp, "union with a base, padded", models, "union", base=b, pad=64)
        compare(tmp, "base", models, "base", base=b)
        compare(tmp, "the third model's", models, c)
        made = ModelTokenEmbedding(kind="model_token", model=ModelReference.parse(b), token="<|sum|>")
        by_id = ModelTokenEmbedding(kind="model_token", model=ModelReference.parse(c), token_id=40)
        tokens = {"<|new|>": TokenEmbeddingConfig(source=made), "<|by-id|>": TokenEmbeddingConfig(source=by_id),
                  "<|zero|>": TokenEmbeddingConfig(source=ZeroEmbedding(kind="zero")),
                  "<|sum|>": TokenEmbeddingConfig(source=ModelReference.parse(c)),
                  "<|endoftext|>": TokenEmbeddingConfig(source=ModelReference.parse(b), force=True)}
        rules = [f'"<|new|>": {{source: {{kind: model_token, model: {b}, token: "<|sum|>"}}}}',
                 f'"<|by-id|>": {{source: {{kind: model_token, model: {c}, token_id: 40}}}}', '"<|zero|>": {source: {kind: zero}}',
                 f'"<|sum|>": {{source: {c}}}', f'"<|endoftext|>": {{source: {b}, force: true}}']
        compare(tmp, "rules", models, "union", tokens=tokens, rules=rules)
    sys.exit(tap.finish())


main()
