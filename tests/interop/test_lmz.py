#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A second reader of .lmz, written from lmz(5) alone, reads files of compress-ckpt; writes TAP.

Environment: LM_TEST_BUILD, a build folder with bin/compress-ckpt.  Frames of zstd and the hashes come
from libzstd and libxxhash; everything else is here."""
import ctypes
import ctypes.util
import json
import os
import random
import struct
import subprocess
import tempfile
import tap
from tap import BUILD, check

TOOL = os.path.join(BUILD, "bin", "compress-ckpt")
FULL = 1048576
SIZE = [1, 1, 2, 4, 8, 2, 2, 4, 8, 1, 1]  # of an element, by kind
FIELD = [k >= 5 for k in range(11)]
NAMED, DELTA = 1, 2
KIND = {"U16": 2, "I16": 2, "U32": 3, "I32": 3, "U64": 4, "I64": 4, "BF16": 5, "F16": 6, "F32": 7, "C64": 7, "F64": 8,
        "F8_E4M3": 9, "F8_E5M2": 10}


# ---- the two libraries ----

class Hash128(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]


def library(name):
    return ctypes.CDLL(ctypes.util.find_library(name) or f"lib{name}.so")


xx, zs = library("xxhash"), library("zstd")
xx.XXH3_64bits.restype = ctypes.c_uint64
xx.XXH3_64bits.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
xx.XXH3_128bits.restype = Hash128
xx.XXH3_128bits.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
zs.ZSTD_decompress.restype = ctypes.c_size_t
zs.ZSTD_decompress.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]


def hash64(b):
    return xx.XXH3_64bits(bytes(b), len(b))


def hash128(b):
    h = xx.XXH3_128bits(bytes(b), len(b))
    return struct.pack(">QQ", h.high, h.low)


def unzstd(frame, n):
    room = ctypes.create_string_buffer(n + 1)
    assert zs.ZSTD_decompress(room, n, bytes(frame), len(frame)) == n, "a zstd frame"
    return room.raw[:n]


# ---- chunks ----

def huffman_table(lengths):
    """(length, code) of each symbol, as the lowest bits of a byte have it: the first bit read is bit 0."""
    assert max(lengths.values()) <= 11, "a code that is too long"
    assert sum(2 ** (11 - k) for k in lengths.values()) == 2 ** 11, "a code that is not complete"
    table, code, before = {}, 0, 0
    for k, symbol in sorted((k, s) for s, k in lengths.items()):
        code = (code + 1) << (k - before) if before else 0
        before = k
        table[k, code] = symbol
    return table


def huffman_stream(data, n, table):
    out, bit = bytearray(), 0
    while len(out) < n:
        code = length = 0
        while (length, code) not in table:
            code = code << 1 | data[bit >> 3] >> (bit & 7) & 1
            length += 1
            bit += 1
        out.append(table[length, code])
    assert (bit + 7) // 8 == len(data), "bytes behind a stream"
    return bytes(out)


def nibbles(src, n):
    assert n % 2 == 0 or src[n // 2] >> 4 == 0, "a half left over"
    return [x >> s & 15 for x in src[:(n + 1) // 2] for s in (0, 4)][:n]


def exponents(src, n, rows=False):
    if rows:
        symbols, at, size = [16 * r + i for r, k in enumerate(nibbles(src, 16)) for i in range(k)], 8, 2
    else:
        assert src[0] < src[1]
        symbols, at, size = list(range(src[0], src[1] + 1)), 2, 3
    table = huffman_table({s: k for s, k in zip(symbols, nibbles(src[at:], len(symbols))) if k})
    at, streams = at + (len(symbols) + 1) // 2, 1
    sizes = []
    if n >= 4096:
        streams = 8
        sizes = [int.from_bytes(src[at + size * i:at + size * i + size], "little") for i in range(7)]
        at += 7 * size
    q = -(-n // streams)
    out = b""
    for i in range(streams):
        end = at + sizes[i] if i < len(sizes) else len(src)
        out += huffman_stream(src[at:end], min(q, n - i * q), table)
        at = end
    return out


def joint(src, n):
    """BF16: exponents coded with the leading bits of their mantissas, a byte of each element as it is."""
    low, m, coded = src[1], src[2], int.from_bytes(src[3:6], "little")
    assert 1 <= low <= 242 and 1 <= m <= 15
    groups, at = nibbles(src[6:], 4 * m), 6 + 2 * m
    members = [[i for i in range(4 * m) if groups[i] == g] for g in range(m)]
    assert all(len(x) == 4 for x in members)
    rest, code, spare = src[at:at + n], src[at + n:at + n + coded], iter(src[at + n + coded:])
    out, pairs = bytearray(), exponents(code, (n + 1) // 2, True)
    for i in range(0, n, 2):
        pair = pairs[i // 2]
        assert pair == 240 or max(pair & 15, pair >> 4) < m
        pair = next(spare) if pair == 240 else pair
        for r, group in zip(rest[i:i + 2], (pair & 15, pair >> 4)):
            place = r >> 5 & 3
            if group == 15:
                e, k = next(spare), place
            else:
                index, k = divmod(members[group][place], 4)
                e = low + index - 1 if index else 0
            out += (r & 31 | k << 5 | e << 7 | r >> 7 << 15).to_bytes(2, "little")
        assert i + 1 < n or pair >> 4 == 0
    assert next(spare, None) is None
    return bytes(out), "4:"


def decode_chunk(kind, src, raw, base):
    if src[0] == 4:
        assert kind == 5
        return joint(src, raw // 2)
    if src[0] == 0x80:
        assert len(src) == raw + 1
        return src[1:], "stored"
    size, field, head = SIZE[kind], FIELD[kind], src[0]
    n, at, planes, how = raw // size, 1 + 4 * size, [], []
    for k in range(size):
        coding = src[1 + 4 * k]
        length = int.from_bytes(src[2 + 4 * k:5 + 4 * k], "little")
        body = src[at:at + length]
        at += length
        planes.append([lambda: bytes(body) * n, lambda: body, lambda: exponents(body, n),
                       lambda: unzstd(body, n)][coding]())
        how.append(str(coding))
    assert at == len(src) and all(len(p) == n for p in planes)
    top, mask = 1 << (8 * size - 1), (1 << 8 * size) - 1
    out = bytearray()

    def fold(x):
        return (x ^ mask if x & top else x | top) if field else x

    for i in range(n):
        x = sum(p[i] << 8 * k for k, p in enumerate(planes))
        if head == 2:
            x = x >> 1 ^ (mask if x & 1 else 0)
            x = (x + fold(int.from_bytes(base[i * size:i * size + size], "little"))) & mask
            if field:
                x = x ^ top if x & top else x ^ mask
        else:
            if field and size > 1:
                x = x >> 1 | (x & 1) << (8 * size - 1)
            if head == 1:
                x ^= int.from_bytes(base[i * size:i * size + size], "little")
        out += x.to_bytes(size, "little")
    return bytes(out), f"{head}:{''.join(how)}"


# ---- the file ----

class Reader:
    """All of an .lmz, read forward; `base` is {name: bytes} for a difference."""

    def __init__(self, data, base=None):
        self.data, self.base, self.at = data, base, 0
        self.files, self.parts, self.coded, self.how, self.digests = {}, [], [], set(), {}
        self.seen = b""
        self.read_header()
        while True:
            kind, fields, start = self.record()
            getattr(self, "read_" + kind)(fields, start)
            if kind == "Z":
                break
        assert self.at == len(data), "bytes behind the footer"

    def take(self, n):
        self.at += n
        assert self.at <= len(self.data), "truncated"
        return self.data[self.at - n:self.at]

    def read_header(self):
        h = self.take(40)
        magic, version, delta, chain, full, digest, n, zero = struct.unpack("<8sHBBI16sII", h)
        assert magic == bytes.fromhex("894C4D5A0D0A1A0A") and version in (1, 2) and full == FULL and zero == 0
        self.version = version
        assert bool(delta) == (chain > 0) == (n > 0) == any(digest)
        self.delta, self.chain, self.base_digest = delta, chain, digest
        name = self.take(n)
        self.base_name = name.decode()
        sum_ = self.take(8)
        assert struct.unpack("<Q", sum_)[0] == hash64(h + name), "check of the header"
        self.first, self.checks = self.at, sum_

    def record(self):
        start = self.at
        head = self.take(8)
        kind, n = chr(head[3]), struct.unpack("<I", head[4:])[0]
        assert head[:3] == b"\xf5LZ" and kind in "FPCEIZ"
        fields, sum_ = self.take(n), self.take(8)
        assert struct.unpack("<Q", sum_)[0] == hash64(head + fields), "check of a record"
        if kind != "Z":
            self.checks += sum_
        return kind, fields, start

    def read_F(self, f, start):
        number, kind, zeros, size = struct.unpack("<IB3sQ", f[:16])
        assert number == len(self.files) and zeros == bytes(3)
        self.name, self.size, self.file_type = f[16:].decode(), size, kind
        assert self.name not in self.files and kind == self.name.endswith(".safetensors")
        self.files[self.name] = bytearray()
        self.file_parts = []

    def read_P(self, f, start):
        fields = struct.unpack("<IIBBBBHHQQQ", f[:40])
        number, part, kind, flags, d, zero, n, b, offset, raw, base_from = fields
        assert number == len(self.files) - 1 and part == len(self.file_parts) and zero == 0
        assert offset == len(self.files[self.name])
        text = f[40:].decode()
        assert len(f) == 40 + d + n + b
        self.part = dict(kind=kind, flags=flags, dtype=text[:d], name=text[d:d + n], base=text[d + n:], raw=raw,
                         offset=offset, base_from=base_from)
        assert bool(flags & DELTA) == bool(b) and bool(flags & NAMED) == bool(d)
        assert not d or kind == KIND.get(self.part["dtype"], 1)
        self.file_parts.append(self.part)
        self.parts.append(self.part)

    def read_C(self, f, start):
        fields = struct.unpack("<IIQIIBBHQQ", f)
        number, part, offset, raw, coded, kind, flags, zero, raw_sum, coded_sum = fields
        p, out = self.part, self.files[self.name]
        assert (number, part, zero) == (len(self.files) - 1, len(self.file_parts) - 1, 0)
        assert offset == len(out) and kind == p["kind"] and flags == p["flags"] and coded <= raw + 33
        assert raw == min(FULL, p["offset"] + p["raw"] - offset)
        body = self.take(coded)
        base = None
        if flags & DELTA:
            at = p["base_from"] + offset - p["offset"]
            base = self.base[p["base"]][at:at + raw]
        assert hash64(body) == coded_sum, "check of coded bytes"
        back, how = decode_chunk(kind, body, raw, base)
        assert len(back) == raw and hash64(back) == raw_sum, "check of raw bytes"
        self.coded.append(coded)
        self.how.add(how)
        out += back

    def read_E(self, f, start):
        number, zero, size, digest = struct.unpack("<IIQ16s", f[:32])
        out = self.files[self.name]
        assert number == len(self.files) - 1 and zero == 0 and size == self.size == len(out)
        assert f[32:].decode() == self.name and digest == hash128(out)
        self.digests[self.name] = digest
        self.seen += struct.pack("<BBQ16sI", self.file_type, len(f) - 32, size, digest, len(self.file_parts)) + f[32:]
        for p in self.file_parts:
            self.seen += struct.pack("<BBBHQ", p["kind"], p["flags"], len(p["dtype"]), len(p["name"]), p["raw"])
            if p["flags"] & DELTA:
                self.seen += struct.pack("<HQ", len(p["base"]), p["base_from"])
            self.seen += (p["dtype"] + p["name"] + p["base"]).encode()

    def read_I(self, f, start):
        raw, coded, sum_ = struct.unpack("<QQQ", f)
        frame = self.take(coded)
        assert hash64(frame) == sum_, "check of the index"
        index = struct.pack("<I", len(self.files)) + self.seen + b"".join(struct.pack("<I", c) for c in self.coded)
        assert unzstd(frame, raw) == index, "the index"
        self.index = start, self.at - start

    def read_Z(self, f, start):
        fields = struct.unpack("<QQQQII16s16s", f)
        at, size, raw, total, files, zero, content, records = fields
        assert (at, size) == self.index and total == self.at and files == len(self.files) and zero == 0
        assert raw == sum(map(len, self.files.values())) and self.at - start == 88
        listed = b"".join(n.encode() + b"\0" + self.digests[n] for n in sorted(self.digests, key=str.encode))
        assert content == hash128(listed), "digest of the content"
        assert records == hash128(self.checks), "digest of the records"
        self.digest = content


# ---- files of compress-ckpt, read here ----

def weights(rng, dtype, n):
    if dtype == "F32":
        return b"".join(struct.pack("<f", rng.gauss(0, 0.02)) for _ in range(n))
    if dtype == "BF16":
        return b"".join(struct.pack("<f", rng.gauss(0, 0.02))[2:] for _ in range(n))
    if dtype == "F16":
        return b"".join(struct.pack("<e", rng.gauss(0, 0.02)) for _ in range(n))
    if dtype == "F64":
        return b"".join(struct.pack("<d", rng.gauss(0, 0.02)) for _ in range(n))
    if dtype == "I64":
        return b"".join(struct.pack("<q", i * 3 - n) for i in range(n))
    return bytes(min(255, int(abs(rng.gauss(60, 6)))) for _ in range(n))


def model(rng, counts):
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for i, (dtype, n) in enumerate(counts):
        raw = weights(rng, dtype, n)
        header[f"layer.{i}.weight"] = {"dtype": dtype, "shape": [n], "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def moved_on(rng, st):
    """The same with small steps in some elements of its tensors."""
    n = struct.unpack("<Q", st[:8])[0]
    out = bytearray(st)
    for at in range(8 + n, len(out) - 8, 8):
        if rng.random() < 0.3:
            out[at] = (out[at] + rng.choice((1, 255))) & 255
    return bytes(out)


def write(folder, files):
    os.makedirs(folder)
    for name, data in files.items():
        with open(os.path.join(folder, name), "wb") as f:
            f.write(data)


def pack(*args):
    subprocess.run([TOOL, "-q", *args], check=True)


def main():
    rng = random.Random(1)
    dtypes = ["BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2", "U8", "I64"]
    large = [("BF16", FULL // 2 + 40001)]
    first = {"config.json": b'{"model_type": "llama"}\n', "empty.txt": b"", "noise.bin": rng.randbytes(5000),
             "tokenizer.json": b"".join(b'"token%d": %d,\n' % (i, i) for i in range(3000)),
             "odd.safetensors": b"no tensors here",
             "model.safetensors": model(rng, [(d, 4000 + 997 * i) for i, d in enumerate(dtypes)] + large +
                                        [("F32", 0), ("U8", 100)])}
    second = dict(first, **{"model.safetensors": moved_on(rng, first["model.safetensors"])})
    with tempfile.TemporaryDirectory() as tmp:
        os.chdir(tmp)
        write("first", first)
        write("second", second)
        for level in ("-1", "-3", "-19"):
            pack(level, "first", "-o", f"first{level}.lmz")
            with open(f"first{level}.lmz", "rb") as f:
                r = Reader(f.read())
            check(r.version == 1 + (level != "-1") and ("4:" in r.how) == (level != "-1"),
                  f"{level}: version {r.version} of the format")
            check(r.files == first and not r.delta, f"{level}: every file comes out ({' '.join(sorted(r.how))})")
        whole = r
        with open("first-3.lmz", "rb") as f:
            good = bytearray(f.read())
        for at in (3, 60, len(good) // 2, len(good) - 200, len(good) - 5):
            bad = bytearray(good)
            bad[at] ^= 4
            try:
                Reader(bad)
                found = False
            except (AssertionError, KeyError, IndexError, UnicodeDecodeError):
                found = True
            check(found, f"a flipped bit in byte {at} of {len(good)} is found")
        pack("second", "--base", "first-3.lmz", "-o", "second.lmz")
        with open("second.lmz", "rb") as f:
            r = Reader(f.read(), first)
        check(r.files == second, f"a difference: every file comes out ({' '.join(sorted(r.how))})")
        check(r.chain == 1 and r.base_name == "first-3.lmz" and r.base_digest == whole.digest,
              "a difference names its base, by path and digest")
        check(any(h[0] in "12" and h[1] == ":" for h in r.how), "and is one")
        check(r.digest != whole.digest, "other content, another digest")
    return tap.finish()


if __name__ == "__main__":
    raise SystemExit(main())
