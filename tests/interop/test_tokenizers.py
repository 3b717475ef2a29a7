#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare our tokenizer with the `tokenizers` library: ids and decoded text, over a fuzzed corpus that
covers every Unicode category, for the GPT-2 vocabulary, for tokenizers trained by train-tokenizer in each
pattern, and for tokenizer.json files that exercise every part that is read.

    test_tokenizers.py [--build DIR] [--rounds N] [--seed N] [--only NAME]

DIR is a build folder with libcore.a and bin/train-tokenizer (LM_TEST_BUILD, else build).  Speaks TAP.
Exit 0: all equal; 1: differences, the first of each kind shown."""
import argparse
import functools
import io
import json
import math
import os
import random
import struct
import subprocess
import sys
import tempfile
import unicodedata

from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers,
                        processors, trainers)

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
DATA = os.path.join(ROOT, "..", "shared", "data")
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
CL100K = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
          r"|\s*[\r\n]|\s+(?!\S)|\s+")


class Ours:
    """The driver process on one tokenizer file."""

    def __init__(self, driver, path):
        self.p = subprocess.Popen([driver, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def read(self, n):
        data = self.p.stdout.read(n)
        if len(data) != n:
            raise SystemExit("the driver ended early")
        return data

    def encode(self, text, special):
        raw = text.encode()
        self.p.stdin.write((b"s" if special else b"e") + struct.pack("<I", len(raw)) + raw)
        self.p.stdin.flush()
        n = struct.unpack("<I", self.read(4))[0]
        return list(struct.unpack(f"<{n}I", self.read(4 * n)))

    def pair(self, a, b, special):
        raw = a.encode() + b"\0" + b.encode()
        self.p.stdin.write((b"q" if special else b"p") + struct.pack("<I", len(raw)) + raw)
        self.p.stdin.flush()
        n = struct.unpack("<I", self.read(4))[0]
        both = struct.unpack(f"<{2 * n}I", self.read(8 * n))
        return list(both[:n]), list(both[n:])

    def decode(self, ids, stream):
        self.p.stdin.write((b"D" if stream else b"d") + struct.pack(f"<I{len(ids)}I", len(ids), *ids))
        self.p.stdin.flush()
        n = struct.unpack("<I", self.read(4))[0]
        return self.read(n).decode()

    def close(self):
        self.p.stdin.close()
        self.p.wait()


# These parts of `tokenizers` use tables of older Unicode versions: compared on old characters only.
OLD_TABLES = {"nfkc", "nfkd", "nfd", "qwen-nfc", "strip-lower", "bert-normalizer", "bert-pre", "unigram-albert",
              "unigram-nmt", "unigram-t5"}
# WordPiece here comes after BertNormalizer and BertPreTokenizer, whose tables are old.
OLD_PREFIX = ("wordpiece", "trained-wordpiece", "trained-unigram")


@functools.cache
def characters_by_category(old):
    table = {}
    for c in range(0x110000):
        k = unicodedata.category(chr(c))
        if k in ("Cs", "Cn") or (old and unicodedata.ucd_3_2_0.category(chr(c)) != k):
            continue
        table.setdefault(k, []).append(chr(c))
    return table


def fuzz_texts(rng, rounds, extra, old):
    """Strings at the boundary cases of the patterns."""
    cats = characters_by_category(old)
    names = sorted(cats)
    bits = ["'s", "'S", "'re", "'LL", "'\u017f", "'", "''", " ", "  ", "   ", "\n", "\r\n", "\r", "\t", "\n\n ",
            " \n", "\u00a0", "\u2003", "\u3000", "\u0085", "\u200b", "\u180e", "1", "12", "123", "1234567", "\u0663",
            "\u00bd", "\u2167", "!", "...", "?!\n", " .", "-", "_", "word", " word", "Word", "\u00e9", "e\u0301",
            "\u1e9b\u0323", "\uac00", "\u1100\u1161\u11a8", "\U0001f469\u200d\U0001f4bb", "\u4f60\u597d",
            "\u0928\u092e\u0938\u094d\u0924\u0947", "\u0130", "\ufb01", "\ufdfa", "\x00", "\x1c", "\x1f", "\ufffd",
            "\u2581", "<0x41>", "<s>", "</s>", "<|endoftext|>", "<|endoftext", "don't", "I'll", "http://a.b/c?d=1"]
    bits += extra
    for r in range(rounds):
        mode = r % 4
        n = rng.randint(1, 24)
        if mode == 0:
            yield "".join(rng.choice(bits) for _ in range(n))
        elif mode == 1:
            yield "".join(rng.choice(cats[rng.choice(names)]) for _ in range(n))
        elif mode == 2:
            yield "".join(rng.choice(bits) if rng.random() < 0.5 else rng.choice(cats[rng.choice(names)])
                          for _ in range(n))
        else:
            yield " ".join("".join(rng.choice("etaoinshrdluETA") for _ in range(rng.randint(1, 9)))
                           for _ in range(n))
    for k in names:  # every category at least once, with spaces and letters around it
        for c in rng.sample(cats[k], min(len(cats[k]), 40)):
            yield f"a{c}b {c} {c}{c}\n{c}1"


def real_texts():
    path = os.path.join(DATA, "tinyshakespeare.txt")
    if not os.path.exists(path):
        return ["The quick brown fox jumps over the lazy dog. " * 50]
    text = open(path, encoding="utf-8").read()
    return [text[:200000]] + [text[i:i + 3000] for i in range(300000, 400000, 3000)]


def gpt2(where):
    path = os.path.join(DATA, "gpt2-tokenizer")
    if not os.path.isdir(path):
        return None
    t = Tokenizer(models.BPE.from_file(os.path.join(path, "vocab.json"), os.path.join(path, "merges.txt")))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens(["<|endoftext|>"])
    return t


def train(pre, decoder, normalizer=None, alphabet=True, vocab=2000, **bpe):
    t = Tokenizer(models.BPE(**bpe))
    t.pre_tokenizer, t.decoder = pre, decoder
    if normalizer:
        t.normalizer = normalizer
    specials = ["<unk>", "<s>", "</s>", "<|endoftext|>"]
    if bpe.get("byte_fallback"):
        specials += [f"<0x{i:02X}>" for i in range(256)]
    t.train_from_iterator([real_texts()[0][:40000]], trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=specials, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if alphabet else []))
    return t


SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def fields(data):
    """The fields of a protobuf message: (number, value)."""
    at = 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
        else:
            n = {1: 8, 5: 4}.get(key & 7) or varint()
            yield key >> 3, data[at:at + n]
            at += n


def charsmap():
    """SentencePiece's compiled map "nmt_nfkc", which T5 has."""
    import sentencepiece
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(["a b c"] * 9), model_writer=model, vocab_size=8,
                                             minloglevel=2, hard_vocab_limit=False)
    spec = dict(fields(model.getvalue()))[3]
    return bytes(dict(fields(spec))[2])


def wordpiece(normalizer, vocab=1500, pre=None, post=None, cleanup=True, **model):
    t = Tokenizer(models.WordPiece(unk_token="[UNK]", **model))
    prefix = model.get("continuing_subword_prefix", "##")
    t.normalizer, t.pre_tokenizer = normalizer, pre or pre_tokenizers.BertPreTokenizer()
    t.decoder = decoders.WordPiece(prefix=prefix, cleanup=cleanup)
    t.train_from_iterator([real_texts()[0][:60000] + ODD], trainers.WordPieceTrainer(
        vocab_size=vocab, special_tokens=SPECIALS, show_progress=False, continuing_subword_prefix=prefix))
    t.post_processor = post or processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    return t


# characters that a vocabulary of English lacks, so that not every one of them is unknown
ODD = " \u4f60\u597d\u4e16\u754c \u00e9t\u00e9 \u00fcber na\u00efve \U0001f469\u200d\U0001f4bb \u0663 do not don't ' . , ? ! "


def unigram(normalizer, pre=None, decoder=None, vocab=1200, fallback=False, texts=None):
    """A Unigram model with made-up scores: many of them equal, so that ties are met."""
    rng = random.Random(5)
    text = (texts or real_texts()[0][:30000]) + ODD
    words = {}
    for w in text.split():
        w = "\u2581" + w
        for n in range(1, 9):
            for i in range(len(w) - n + 1):
                words[w[i:i + n]] = words.get(w[i:i + n], 0) + 1
    best = sorted(words, key=lambda w: (-words[w] * len(w), w))[:vocab]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    if fallback:
        pieces += [(f"<0x{i:02X}>", 0.0) for i in range(256)]
    pieces += [(w, -float(rng.choice([2, 3, 4, 4.5, 5, 7.25, 10 + rng.random()]))) for w in best]
    t = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=fallback))
    if normalizer:
        t.normalizer = normalizer
    t.pre_tokenizer = pre if pre is not None else pre_tokenizers.Metaspace()
    t.decoder = decoder or decoders.Metaspace()
    t.post_processor = processors.TemplateProcessing(single="$A </s>", pair="$A </s> $B </s>",
                                                     special_tokens=[("</s>", 1)])
    t.add_special_tokens(["<pad>", "</s>", "<unk>", "<extra_id_1>", "<extra_id_0>"])
    return t


def split_bytes(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior, invert),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def cases():
    """Name -> function giving a Tokenizer."""
    meta = "\u2581"
    bl = decoders.ByteLevel
    N = normalizers

    def llama2():
        t = train(pre_tokenizers.Metaspace(), decoders.Fuse(), alphabet=False, unk_token="<unk>",
                  byte_fallback=True, fuse_unk=True)
        t.pre_tokenizer = None
        t.normalizer = N.Sequence([N.Prepend(meta), N.Replace(" ", meta)])
        t.decoder = decoders.Sequence([decoders.Replace(meta, " "), decoders.ByteFallback(), decoders.Fuse(),
                                       decoders.Strip(" ", 1, 0)])
        t.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B",
                                                         special_tokens=[("<s>", 1)])
        return t

    def with_added():
        t = train(split_bytes(LLAMA3), bl())
        t.add_tokens([AddedToken("word", single_word=True), AddedToken("<l>", lstrip=True),
                      AddedToken("<r>", rstrip=True), AddedToken("<lr>", lstrip=True, rstrip=True),
                      AddedToken("Etat", normalized=True), AddedToken("  ", normalized=False),
                      AddedToken("\u00e9t\u00e9", normalized=True), AddedToken("the", normalized=False)])
        t.add_special_tokens([AddedToken("<|x|>", special=True), AddedToken("<|x|>y", special=True)])
        t.normalizer = N.Lowercase()
        t.post_processor = processors.Sequence([
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])])
        return t

    def unk(fuse):
        t = train(pre_tokenizers.Whitespace(), decoders.BPEDecoder(), alphabet=False, unk_token="<unk>",
                  fuse_unk=fuse)
        t.decoder = decoders.BPEDecoder(suffix="</w>")
        return t

    def ignoring():
        t = train(split_bytes(LLAMA3), bl())
        t.model.ignore_merges = True
        return t

    def roberta():
        t = train(pre_tokenizers.ByteLevel(add_prefix_space=True), bl())
        t.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 1))
        return t

    table = {
        "llama3": lambda: train(split_bytes(LLAMA3), bl()),
        "qwen-nfc": lambda: train(split_bytes(QWEN), bl(), N.NFC()),
        "cl100k": lambda: train(split_bytes(CL100K), bl()),
        "ignore-merges": ignoring,
        "llama2": llama2,
        "added": with_added,
        "unk": lambda: unk(False),
        "fuse-unk": lambda: unk(True),
        "roberta": roberta,
        "bytes-only": lambda: train(pre_tokenizers.ByteLevel(False, use_regex=False), bl(), vocab=600),
        "byte-normalizer": lambda: train(pre_tokenizers.WhitespaceSplit(), bl(), N.ByteLevel()),
        "strip-lower": lambda: train(split_bytes(LLAMA3), bl(),
                                     N.Sequence([N.Strip(), N.NFD(), N.StripAccents(), N.Lowercase()])),
        "nfkc": lambda: train(split_bytes(LLAMA3), bl(), N.NFKC()),
        "nfkd": lambda: train(split_bytes(LLAMA3), bl(), N.NFKD()),
        "nfd": lambda: train(split_bytes(LLAMA3), bl(), N.NFD()),
        "bert-normalizer": lambda: train(split_bytes(LLAMA3), bl(), N.BertNormalizer()),
        "replace-regex": lambda: train(split_bytes(LLAMA3), bl(),
                                       N.Sequence([N.Replace(Regex(r"\s{2,}"), " "), N.Replace("a", "")])),
        "digits": lambda: train(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                         pre_tokenizers.ByteLevel(False)]), bl()),
        "digit-runs": lambda: train(pre_tokenizers.Sequence([pre_tokenizers.Digits(),
                                                             pre_tokenizers.Punctuation("contiguous"),
                                                             pre_tokenizers.ByteLevel(False)]), bl()),
        "bert-pre": lambda: train(pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer(),
                                                           pre_tokenizers.ByteLevel(True)]), bl()),
        "delimiter": lambda: train(pre_tokenizers.Sequence([pre_tokenizers.CharDelimiterSplit("e"),
                                                            pre_tokenizers.ByteLevel(False)]), bl()),
        "lookahead": lambda: train(split_bytes(r"(?=[A-Z])"), bl()),
    }
    def word_added():
        t = wordpiece(N.BertNormalizer())
        t.add_tokens([AddedToken("word", single_word=True), AddedToken("<l>", lstrip=True),
                      AddedToken("<r>", rstrip=True), AddedToken("\u00c9t\u00e9"), AddedToken("the", normalized=False)])
        t.add_special_tokens([AddedToken("<|x|>"), AddedToken("<|x|>y")])
        return t

    def no_unk():
        t = wordpiece(N.BertNormalizer(), vocab=400)
        t.decoder = None
        return t

    W, P = wordpiece, pre_tokenizers
    table |= {
        "wordpiece": lambda: W(N.BertNormalizer()),
        "wordpiece-cased": lambda: W(N.BertNormalizer(lowercase=False)),
        "wordpiece-accents": lambda: W(N.BertNormalizer(strip_accents=False)),
        "wordpiece-strip": lambda: W(N.BertNormalizer(lowercase=False, strip_accents=True)),
        "wordpiece-plain": lambda: W(N.BertNormalizer(False, False, False, False), cleanup=False,
                                     max_input_chars_per_word=7),
        "wordpiece-prefix": lambda: W(N.Lowercase(), continuing_subword_prefix="\u00e9_", pre=P.WhitespaceSplit()),
        "wordpiece-bare": lambda: W(N.Lowercase(), continuing_subword_prefix="", pre=P.Whitespace()),
        "wordpiece-bert-post": lambda: W(N.BertNormalizer(), post=processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))),
        "wordpiece-added": word_added,
        "wordpiece-no-decoder": no_unk,
        "unigram": lambda: unigram(None),
        "unigram-t5": lambda: unigram(N.Sequence([N.Precompiled(charsmap()), N.Strip(False, True), N.Replace(Regex(" {2,}"), "\u2581")])),
        "unigram-albert": lambda: unigram(
            N.Sequence([N.Replace("``", '"'), N.Replace("''", '"'), N.NFKD(), N.StripAccents(), N.Lowercase()]),
            P.Sequence([P.WhitespaceSplit(), P.Metaspace()])),
        "unigram-nmt": lambda: unigram(N.Sequence([N.Nmt(), N.NFKC(), N.Replace(Regex(" {2,}"), " ")])),
        "unigram-bytes": lambda: unigram(None, fallback=True, decoder=decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])),
        "unigram-whole": lambda: unigram(N.Replace(" ", "\u2581"), P.Sequence([])),
        "unigram-never": lambda: unigram(None, P.Metaspace(prepend_scheme="never", split=False),
                                         decoders.Metaspace(prepend_scheme="never")),
        "unigram-first": lambda: unigram(None, P.Metaspace(prepend_scheme="first"),
                                         decoders.Metaspace(prepend_scheme="first")),
    }
    for scheme in ("always", "first", "never"):
        for split in (True, False):
            table[f"metaspace-{scheme}-{split}"] = lambda scheme=scheme, split=split: train(
                pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split),
                decoders.Metaspace(prepend_scheme=scheme), alphabet=False, vocab=500)
    for behavior in ("removed", "isolated", "merged_with_previous", "merged_with_next", "contiguous"):
        for invert in (False, True):
            table[f"split-{behavior}-{invert}"] = lambda b=behavior, i=invert: train(
                split_bytes(r"[aeiou]|\d+", b, i), bl(), vocab=600)
    return table


def bert_folder(where, name, normalizer, config):
    """BERT's older folder, and the tokenizer that it stands for."""
    t = wordpiece(normalizer)
    folder = os.path.join(where, name)
    os.mkdir(folder)
    t.model.save(folder)
    with open(os.path.join(folder, "tokenizer_config.json"), "w", encoding="utf-8") as f:
        json.dump({"tokenizer_class": "BertTokenizer"} | config, f)
    return name, t, folder


def our_trainer(build, name, where):
    """A tokenizer from train-tokenizer; the trainer of `tokenizers` must learn the same."""
    source = os.path.join(where, "train.txt")
    if not os.path.exists(source):
        with open(source, "w", encoding="utf-8", newline="") as f:
            f.write("\n\n".join(real_texts()))
    out = os.path.join(where, "trained.json")
    subprocess.run([os.path.join(build, "bin", "train-tokenizer"), "-q", "--vocab-size", "3000", "--pattern",
                    name, "-f", "-o", out, source], check=True)
    ours = Tokenizer.from_file(out)
    theirs = Tokenizer(models.BPE())
    theirs.pre_tokenizer = ours.pre_tokenizer
    with open(source, encoding="utf-8", newline="") as f:
        theirs.train_from_iterator([f.read()], trainers.BpeTrainer(
            vocab_size=3000, special_tokens=["<|endoftext|>"], show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    a, b = json.loads(ours.to_str())["model"], json.loads(theirs.to_str())["model"]
    if a["vocab"] != b["vocab"] or a["merges"] != b["merges"]:
        show(f"train-tokenizer -p {name}: the trainer of tokenizers learns something else")
        os.rename(out, out + ".bad")  # the comparison then fails
    final = os.path.join(where, f"trained-{len(os.listdir(where))}.json")
    os.rename(out, final)
    return final


def our_subwords(build, model, where):
    """A WordPiece or Unigram tokenizer from train-tokenizer, beside what the trainers of `tokenizers` learn of
    the same text: the same tokens, or texts of as few bits."""
    out = os.path.join(where, f"trained-{model}.json")
    source = os.path.join(where, "train.txt")
    with open(source, "w", encoding="utf-8", newline="") as f:
        f.write("\n\n".join(real_texts()))
    few = ["--min-frequency", "20"] if model == "wordpiece" else []
    subprocess.run([os.path.join(build, "bin", "train-tokenizer"), "-q", "-m", model, "--vocab-size", "4000", *few, "-f",
                    "-o", out, source], check=True)
    ours = Tokenizer.from_file(out)
    text, bad = "\n\n".join(real_texts()), False
    special = SPECIALS if model == "wordpiece" else ["<pad>", "</s>", "<unk>"]
    sizes, differ = [], []
    for _ in range(3):  # the trainers depend on the order of a hash table, whose seed is random
        theirs = Tokenizer(models.WordPiece(unk_token="[UNK]") if model == "wordpiece" else models.Unigram())
        theirs.normalizer, theirs.pre_tokenizer = ours.normalizer, ours.pre_tokenizer
        kind = {"special_tokens": special, "vocab_size": 4000, "show_progress": False}
        theirs.train_from_iterator([text], trainers.WordPieceTrainer(min_frequency=20, limit_alphabet=1000, **kind)
                                   if model == "wordpiece" else trainers.UnigramTrainer(unk_token="<unk>", **kind))
        differ.append(len(set(ours.get_vocab()) ^ set(theirs.get_vocab())))
        sizes.append(bits_per_byte(theirs) if model == "unigram" else 0)
    if model == "wordpiece":
        bad = min(differ) > 0.01 * ours.get_vocab_size()
        show(f"train-tokenizer -m wordpiece: {differ} tokens differ of {ours.get_vocab_size()}")
    else:
        bad = bits_per_byte(ours) > 1.01 * min(sizes)
        show(f"train-tokenizer -m unigram: {bits_per_byte(ours):.4f} bits/byte of held-out text, tokenizers {min(sizes):.4f}")
    if bad:
        os.rename(out, out + ".bad")  # the comparison then fails
    return out


def bits_per_byte(t):
    """Of a text that was not trained on, by the scores of a Unigram model."""
    path = os.path.join(DATA, "wikitext-2", "test.txt")
    text = open(path, encoding="utf-8").read()[:200000] if os.path.exists(path) else real_texts()[0][::-1]
    scores = [x[1] for x in json.loads(t.to_str())["model"]["vocab"]]
    return -sum(scores[i] for i in t.encode(text, add_special_tokens=False).ids) / math.log(2) / len(text.encode())


def show(text):
    print("# " + text.replace("\n", "\n# "))


def compare(number, name, theirs, driver, path, rng, rounds):
    ours, bad, n = Ours(driver, path), 0, 0
    extra = ["<l>", "<r>", "<lr>", "Etat", "the", "<|x|>", "<|x|>y", "\u00e9t\u00e9", " <l> ", "\n<r>\n"]
    size = theirs.get_vocab_size()
    for text in list(fuzz_texts(rng, rounds, extra, name in OLD_TABLES or name.startswith(OLD_PREFIX))) + real_texts() + [""]:
        for special in (False, True):
            want = theirs.encode(text, add_special_tokens=special).ids
            got = ours.encode(text, special)
            n += 1
            if want != got:
                bad += 1
                if bad <= 5:
                    show(f"{name}: {text!r}\n  theirs {want}\n  ours   {got}")
        if len(text) > 5000:
            continue
        if theirs.decode(want) != ours.decode(want, False):
            bad += 1
            if bad <= 5:
                show(f"{name}: decode {want}\n  theirs {theirs.decode(want)!r}\n  ours   {ours.decode(want, False)!r}")
    two = list(fuzz_texts(rng, 40, extra, True))[:80] + [""]
    for a, b in zip(two, two[::-1]):
        a, b = a.replace("\0", ""), b.replace("\0", "")
        for special in (False, True):
            want = theirs.encode(a, b, add_special_tokens=special)
            got = ours.pair(a, b, special)
            n += 1
            if (want.ids, want.type_ids) != got:
                bad += 1
                if bad <= 5:
                    show(f"{name}: pair {a!r}, {b!r}\n  theirs {want.ids} {want.type_ids}\n  ours   {got}")
    for _ in range(rounds // 2):  # arbitrary ids, many of them broken UTF-8
        ids = [rng.randrange(size) if rng.random() < 0.5 else rng.randrange(min(size, 300))
               for _ in range(rng.randint(1, 20))]
        want, got, stream = theirs.decode(ids), ours.decode(ids, False), ours.decode(ids, True)
        n += 1
        if name == "unigram-bytes" and "\ufffd" in want:
            stream = got  # a stream shows a byte that is a character before it knows that its run is not UTF-8
        if want != got or stream != got:
            bad += 1
            if bad <= 5:
                show(f"{name}: decode {ids}\n  theirs {want!r}\n  ours   {got!r}\n  stream {stream!r}")
    ours.close()
    print(f"{'not ok' if bad else 'ok'} {number} - {name}: {n} comparisons, {bad} differences", flush=True)
    return bad


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--build", default=os.environ.get("LM_TEST_BUILD", os.path.join(ROOT, "build")))
    ap.add_argument("--driver", help="the compiled tokenizers_driver (default: compile it)")
    ap.add_argument("--rounds", type=int, default=300)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--only", type=lambda s: s.split(","), help="names, with commas")
    opt = ap.parse_args()
    bad = 0
    with tempfile.TemporaryDirectory() as where:
        driver = opt.driver
        if not driver:
            driver = os.path.join(where, "driver")
            subprocess.run(["cc", "-std=c17", "-O2", "-D_GNU_SOURCE", "-I" + os.path.join(ROOT, "lib"), "-o", driver,
                            os.path.join(HERE, "tokenizers_driver.c"), os.path.join(opt.build, "libcore.a"),
                            "-lz", "-lzstd", "-lxxhash", "-ljansson", "-lpcre2-8", "-lutf8proc", "-lm",
                            "-lpthread"], check=True)
        todo, skipped = [], []
        t = gpt2(where)
        if t:
            path = os.path.join(where, "gpt2.json")
            t.save(path)
            todo += [("gpt2", t, path), ("gpt2-pair", t, os.path.join(DATA, "gpt2-tokenizer"))]
        else:
            skipped.append("gpt2: no ../shared/data/gpt2-tokenizer")
        for name, make in cases().items():
            if opt.only and name not in opt.only:
                continue
            path = os.path.join(where, name + ".json")
            make().save(path)
            todo.append((name, Tokenizer.from_file(path), path))
        for name in ("gpt2", "llama3", "qwen", "cl100k", "o200k", r"\p{L}+|\p{N}|[^\p{L}\p{N}]+"):
            label = "trained-" + (name if name.isalnum() else "own-pattern")
            if not opt.only or label in opt.only:
                path = our_trainer(opt.build, name, where)
                todo.append((label, Tokenizer.from_file(path), path))
        for name in ("wordpiece", "unigram"):
            if not opt.only or "trained-" + name in opt.only:
                path = our_subwords(opt.build, name, where)
                todo.append(("trained-" + name, Tokenizer.from_file(path), path))
        N = normalizers.BertNormalizer
        todo.append(bert_folder(where, "wordpiece-vocab.txt", N(), {}))
        todo.append(bert_folder(where, "wordpiece-vocab.txt-cased", N(True, False, False, False),
                                {"do_lower_case": False, "tokenize_chinese_chars": False, "strip_accents": False}))
        todo = [x for x in todo if not opt.only or x[0] in opt.only]
        print(f"1..{len(todo) + len(skipped)}")
        for number, (name, t, path) in enumerate(todo, 1):
            bad += compare(number, name, t, driver, path, random.Random(opt.seed), opt.rounds)
        for number, why in enumerate(skipped, len(todo) + 1):
            print(f"ok {number} - # SKIP {why}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
