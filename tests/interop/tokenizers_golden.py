#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write tests/golden/tokenizers.json: small tokenizers and the ids and texts that the `tokenizers` library gives
for tricky strings; `make check` compares them without Python.  Recorded: versions and this script.

    tokenizers_golden.py > tests/golden/tokenizers.json"""
import json
import random
import sys

import tokenizers
from tokenizers import normalizers
from test_tokenizers import cases, fuzz_texts, gpt2, unigram, wordpiece

NAMES = ["llama3", "qwen-nfc", "llama2", "added", "metaspace-first-True", "split-merged_with_next-False"]
TRICKY = ["", " ", "  ", "\n", " \n\n x", "Hello, world!", "don't I'LL we've 'S '\u017f", "a  b   c\td\r\n\r\ne",
          "1234567 12,345.67 \u0663\u0664", "caf\u00e9 cafe\u0301 na\u00efve", "\u4f60\u597d\uff0c\u4e16\u754c",
          "\u0928\u092e\u0938\u094d\u0924\u0947", "\U0001f469\u200d\U0001f4bb \U0001f1e9\U0001f1ea", "\u00a0\u2003x\u3000 y",
          "trailing   ", "   leading", "<s>in</s> <|endoftext|> text", "x <l> y <r> z", "the wordword word",
          "\u2581\u2581a \u2581b", "\x00\x01\x7f", "\ufffd\ufeff", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
          "the the the. The THE tHe" * 9]


def vectors(t, rng):
    texts = TRICKY + [x for x in fuzz_texts(rng, 12, ["<l>", " <r> ", "<|x|>y"], True)][:12]
    out = []
    for x in texts:
        ids = t.encode(x, add_special_tokens=False).ids
        special = t.encode(x, add_special_tokens=True).ids
        v = {"text": x, "ids": ids}
        if special != ids:
            v["special"] = special
        if t.decode(special) != x:
            v["decoded"] = t.decode(special)
        out.append(v)
    size = t.get_vocab_size()
    for _ in range(4):
        ids = [rng.randrange(min(size, 300)) for _ in range(6)]
        out.append({"ids": ids, "decoded": t.decode(ids)})
    return out


def small(t):
    """The same tokenizer with its first merges only."""
    j = json.loads(t.to_str())
    m = j["model"]
    keep = m["merges"][:60]
    names = {x for pair in keep for x in (*pair, "".join(pair))}
    single = {k for k in m["vocab"] if len(k) == 1 or k.startswith("<")}
    order = sorted((names | single) & set(m["vocab"]), key=m["vocab"].get)
    m["vocab"] = {k: i for i, k in enumerate(order)}
    m["merges"] = keep
    top = len(order)
    for a in j["added_tokens"]:
        if a["content"] in m["vocab"]:
            a["id"] = m["vocab"][a["content"]]
        else:
            a["id"] = top
            top += 1
    return tokenizers.Tokenizer.from_str(json.dumps(j))


def subwords():
    """The models without merges."""
    text = "the theft of other things, then thin; word words wordy worded"
    yield "wordpiece", wordpiece(normalizers.BertNormalizer(), vocab=230)
    yield "wordpiece-cased", wordpiece(normalizers.BertNormalizer(lowercase=False), vocab=230, cleanup=False,
                                       max_input_chars_per_word=12)
    yield "unigram", unigram(normalizers.NFKC(), vocab=150, texts=text)
    yield "unigram-bytes", unigram(None, vocab=60, texts=text, fallback=True)


def main():
    table = cases()
    out = {"made_by": "tests/interop/tokenizers_golden.py", "tokenizers": tokenizers.__version__,
           "python": sys.version.split()[0], "cases": []}
    for name in NAMES:
        t = small(table[name]())
        out["cases"].append({"name": name, "tokenizer": json.loads(t.to_str()), "vectors": vectors(t, random.Random(7))})
    for name, t in subwords():
        out["cases"].append({"name": name, "tokenizer": json.loads(t.to_str()), "vectors": vectors(t, random.Random(7))})
    t = gpt2("")
    if t:
        out["gpt2"] = vectors(t, random.Random(8))
    json.dump(out, sys.stdout, ensure_ascii=False, separators=(",", ":"))
    print()


if __name__ == "__main__":
    main()
