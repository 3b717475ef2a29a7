#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare our reading of SentencePiece's tokenizer.model with `sentencepiece` itself (ids, and text from
ids), and the tokenizer.json that init-model makes of it with `tokenizers`.

    test_sentencepiece.py [--build DIR] [--rounds N] [--seed N] [--only NAME]
    test_sentencepiece.py --golden tests/golden/sentencepiece

DIR is a build folder with libcore.a and bin/init-model (LM_TEST_BUILD, else build).  Speaks TAP.  Exit 0:
all equal; 1: differences, the first of each kind shown.  --golden trains small models and writes them with
the ids and texts that `sentencepiece` gives; `make check` compares them without Python."""
import argparse
import io
import json
import os
import random
import subprocess
import sys
import tempfile

import sentencepiece as spm
from tokenizers import Tokenizer

from test_tokenizers import HERE, ROOT, Ours, real_texts, show

LLAMA = dict(normalization_rule_name="identity", byte_fallback=True, remove_extra_whitespaces=False,
             split_digits=True, allow_whitespace_only_pieces=True)
CASES = {
    "llama": LLAMA,
    "no-fallback": dict(LLAMA, byte_fallback=False),
    "no-prefix": dict(LLAMA, add_dummy_prefix=False),
    "strip": dict(LLAMA, remove_extra_whitespaces=True),
    "strip-no-prefix": dict(LLAMA, remove_extra_whitespaces=True, add_dummy_prefix=False),
    "user-no-prefix": dict(LLAMA, add_dummy_prefix=False,
                           user_defined_symbols=["<sep>", "\n\n", "  ", "\u2581\u2581\u2581", "<sep>\u2581"]),
    "user": dict(LLAMA, user_defined_symbols=["<sep>", "<mask>"]),
    "user-strip": dict(LLAMA, remove_extra_whitespaces=True, user_defined_symbols=["<sep>", "<mask>"]),
    "nmt-nfkc": dict(byte_fallback=True),
    "nfkc-user": dict(normalization_rule_name="nfkc", user_defined_symbols=["<sep>", "<mask>"]),
    "nfkc-cf": dict(LLAMA, normalization_rule_name="nfkc_cf"),
    "control": dict(LLAMA, control_symbols=["<start>", "<end>"], pad_id=3),
    "no-bos": dict(LLAMA, bos_id=-1, eos_id=1),
    "unigram": dict(model_type="unigram", bos_id=-1, eos_id=1, pad_id=0, unk_id=2),
    "unigram-llama": dict(LLAMA, model_type="unigram"),
    "unigram-inner": dict(LLAMA, model_type="unigram", split_by_whitespace=False),
    "unigram-no-prefix": dict(LLAMA, model_type="unigram", add_dummy_prefix=False, byte_fallback=False),
    "unigram-user": dict(LLAMA, model_type="unigram", user_defined_symbols=["<sep>", "<mask>"]),
    "unigram-strip": dict(model_type="unigram", normalization_rule_name="identity"),
    "other-order": dict(LLAMA, unk_id=3, bos_id=0, eos_id=2, pad_id=1),
}


# Cases in which `tokenizers` applies a compiled map differently from `sentencepiece`: we follow `tokenizers`.
QUIRKS = ["x\r\ny", "xA\u030a", "xA\u0300\u0301y", "x\u1112\u1161\u11ab", "xA\u0300\u0301\u0302y", "x\u0928\u094d\u0926\u093c"]


def train(options, texts, vocab=700):
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=model, vocab_size=vocab, minloglevel=2,
                                   hard_vocab_limit=False, **{"model_type": "bpe"} | options)
    return model.getvalue()


def random_texts(rng, n, prefix, mapped):
    bits = ["the", " of", "ing", " ", "  ", "   ", "\n", "\n\n", "\t", "aaaa", "aaa", "ll", "1234", "3.14", "!", "...",
            "\u00e9", "e\u0301", "\u4f60\u597d", "\U0001f600", "\u2581", "Word", "\u00a0", "\u200b", "<sep>", "<0x0A>", "\r\n",
            "\ufb01", "\uff21", "\u2460", "\u3000", "\u00bd", "\u0928\u092e", "\ud55c\uad6d", "A\u030a", "\x01", "\u00ad",
            "\U0001f469\u200d\U0001f4bb"]
    for _ in range(n):
        text = "".join(rng.choice(bits) for _ in range(rng.randrange(1, 20)))
        # Cases that a tokenizer.json cannot represent: see sentencepiece.h.
        while prefix and text.startswith((" ", "\u2581", "<sep>", "\u00a0", "\u3000", "\u200b", "\n", "\r", "\t")):
            text = text[1:]
        if mapped:  # see charsmap.h
            text = text.replace("\r\n", "\n").replace("A\u030a", "a\u030a")
        if text:
            yield text


def compare(number, name, options, data, driver, where, opt):
    path = os.path.join(where, name + ".model")
    with open(path, "wb") as f:
        f.write(data)
    theirs = spm.SentencePieceProcessor(model_proto=data)
    ours, bad, n = Ours(driver, path), 0, 0
    folder = os.path.join(where, name + "-model")
    subprocess.run([os.path.join(opt.build, "bin", "init-model"), "-q", "-f", "llama-1m", "--tokenizer", path, "-o",
                    folder], check=True)
    fast = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
    rng = random.Random(opt.seed)
    user = options.get("user_defined_symbols") and options.get("add_dummy_prefix", True)
    mapped = options.get("normalization_rule_name") != "identity"
    literal = options.get("model_type") == "unigram" and options.get("byte_fallback")  # see sentencepiece.h
    for text in list(random_texts(rng, opt.rounds, user, mapped)) + [x.strip() for x in real_texts()[:4]]:
        if literal:
            text = text.replace("<0x0A>", "<0x0G>")
        want, got, json_ids = theirs.encode(text), ours.encode(text, False), fast.encode(text, add_special_tokens=False).ids
        special = ours.encode(text, True)
        if options.get("model_type") == "unigram" and len(text) > 200:
            want = json_ids  # f32 sums of long texts decide otherwise in sentencepiece
        n += 1
        t5 = options.get("model_type") == "unigram" and theirs.bos_id() < 0
        whole = got + [theirs.eos_id()] if t5 else ([theirs.bos_id()] if theirs.bos_id() >= 0 else []) + got
        if want != got or got != json_ids or special != whole:
            bad += 1
            if bad <= 5:
                show(f"{name}: {text!r}\n  theirs {want}\n  ours   {got}\n  json   {json_ids}\n  special {special}")
        elif theirs.unk_id() not in want and theirs.decode(want) != ours.decode(want, False):
            bad += 1
            if bad <= 5:
                show(f"{name}: decode {want}\n  theirs {theirs.decode(want)!r}\n  ours   {ours.decode(want, False)!r}")
    for text in QUIRKS if mapped else ():
        n += 1
        if ours.encode(text, False) != fast.encode(text, add_special_tokens=False).ids:
            bad += 1
            show(f"{name}: {text!r}: not as in tokenizers")
    ours.close()
    print(f"{'not ok' if bad else 'ok'} {number} - {name}: {n} texts, {bad} differences", flush=True)
    return bad


def golden(folder):
    os.makedirs(folder, exist_ok=True)
    lines = ["the river runs by the house and the other houses", "one word, two words; and then some more words!",
             "numbers 12 345 6789 are cut into digits", "   indented text   with runs of   spaces",
             "they were there, and there they are", "na\u00efve caf\u00e9s and r\u00e9sum\u00e9s"] * 3
    texts = ["", " ", "   ", "the river", "  the  words ", "a\nb\n\nc", "caf\u00e9 \u4f60 \U0001f600", "1234.5", "<sep>there<sep> they",
             "other<sep>   words", "\u2581x\u2581", "zzz qq \u00df", "<s> and </s>", "\t \r\n", "the the the there then they"]
    out = {"sentencepiece": spm.__version__}
    for name in ("llama", "no-fallback", "strip", "user-no-prefix", "unigram-no-prefix", "unigram-strip"):
        options = dict(CASES[name])
        if name == "user-no-prefix":
            options["user_defined_symbols"] = ["<sep>", "\u2581\u2581\u2581"]
        data = train(options, lines, 330 if options.get("byte_fallback") else 80)
        with open(os.path.join(folder, name + ".model"), "wb") as f:
            f.write(data)
        model = spm.SentencePieceProcessor(model_proto=data)
        rows = []
        for x in texts:
            if "<s>" in x:  # found in the text by us, cut into characters by sentencepiece
                continue
            ids = model.encode(x)
            rows.append({"text": x, "ids": ids})
            if model.unk_id() not in ids and model.decode(ids) != x:
                rows[-1]["decoded"] = model.decode(ids)
        out[name] = rows
    with open(os.path.join(folder, "ids.json"), "w", encoding="utf-8") as f:
        json.dump(out, f, indent=1)
        f.write("\n")
    return 0


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--build", default=os.environ.get("LM_TEST_BUILD", os.path.join(ROOT, "build")))
    ap.add_argument("--rounds", type=int, default=1000)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--only", type=lambda s: s.split(","), help="names, with commas")
    ap.add_argument("--golden", metavar="DIR")
    opt = ap.parse_args()
    bad = 0
    if opt.golden:
        return golden(opt.golden)
    with tempfile.TemporaryDirectory() as where:
        driver = os.path.join(where, "driver")
        subprocess.run(["cc", "-std=c17", "-O2", "-D_GNU_SOURCE", "-I" + os.path.join(ROOT, "lib"), "-o", driver,
                        os.path.join(HERE, "tokenizers_driver.c"), os.path.join(opt.build, "libcore.a"),
                        "-lz", "-lzstd", "-lxxhash", "-ljansson", "-lpcre2-8", "-lutf8proc", "-lm",
                        "-lpthread"], check=True)
        lines = [x for text in real_texts() for x in text.split("\n") if x.strip()][:4000]
        names = [x for x in CASES if not opt.only or x in opt.only]
        print(f"1..{len(names)}")
        for number, name in enumerate(names, 1):
            bad += compare(number, name, CASES[name], train(CASES[name], lines), driver, where, opt)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
