#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write the malformed safetensors files of this folder and safetensors.list, which has for each a part of
the expected error message.  Needs only Python; run it in this folder."""
import json
import struct

cases = []


def case(name, message, header, data=b"", length=None, raw=None):
    if isinstance(header, dict):
        header = json.dumps(header, separators=(",", ":"))
    if isinstance(header, str):
        header = header.encode("utf-8", "surrogateescape")
    body = struct.pack("<Q", len(header) if length is None else length) + header + data
    with open(name + ".safetensors", "wb") as f:
        f.write(body if raw is None else raw)
    cases.append((name, message))


def t(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


four = b"\0" * 4
case("empty", "fewer than the 8", "", raw=b"")
case("seven-bytes", "fewer than the 8", "", raw=b"\x10" * 7)
case("zero-header", "header of 0 bytes", "", raw=b"\0" * 8)
case("giant-header", "more than the limit", "{}", length=100000001)
case("huge-header", "more than the limit", "{}", length=2**64 - 1)
case("header-past-end", "header says it has", "{}", length=1000)
case("not-json", "column", "{nonsense}")
case("not-an-object", "does not begin with '{'", "[1,2]")
case("form-feed-first", "does not begin with '{'", "\f{}")
case("only-spaces", "does not begin with '{'", "    ")
case("trailing-text", "column", "{}{}")
case("invalid-utf8", "unable to decode byte", b'{"\xff":{}}')
case("duplicate-name", "duplicate",
     '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
     four * 2)
case("overlap", "overlap", {"a": t("F32", [2], 0, 8), "b": t("F32", [2], 4, 12)}, four * 3)
case("same-bytes", "overlap", {"a": t("F32", [1], 0, 4), "b": t("F32", [1], 0, 4)}, four)
case("hole", "belong to no tensor", {"a": t("F32", [1], 0, 4), "b": t("F32", [1], 8, 12)}, four * 3)
case("hole-first", "belong to no tensor", {"a": t("F32", [1], 4, 8)}, four * 2)
case("out-of-range", "header says 8 bytes of data, file has 4", {"a": t("F32", [2], 0, 8)}, four)
case("far-out-of-range", "belong to no tensor", {"a": t("F32", [1], 2**62, 2**62 + 4)}, four)
case("trailing-bytes", "after the last tensor", {"a": t("F32", [1], 0, 4)}, four * 2)
case("data-without-tensors", "after the last tensor", {}, four)
case("backwards", "two increasing numbers", {"a": t("F32", [1], 4, 0)}, four)
case("negative-offset", "two increasing numbers", {"a": t("F32", [1], -4, 0)}, four)
case("three-offsets", "two increasing numbers",
     {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}, four)
case("real-offset", "two increasing numbers",
     '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4.0]}}', four)
case("offset-over-64-bits", "column",
     '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,18446744073709551620]}}', four)
case("size-mismatch", "need 8 bytes, data_offsets give 4", {"a": t("F32", [2], 0, 4)}, four)
case("wrong-dtype-size", "need 8 bytes, data_offsets give 4", {"a": t("F64", [1], 0, 4)}, four)
case("shape-overflow", "more than 2^63 elements", {"a": t("F32", [2**32, 2**32], 0, 4)}, four)
case("bits-overflow", "more than 2^63 bits", {"a": t("F32", [2**61], 0, 4)}, four)
case("negative-dim", "is not a number of elements", {"a": t("F32", [-1], 0, 4)}, four)
case("string-dim", "is not a number of elements", {"a": t("F32", ["1"], 0, 4)}, four)
case("nine-dims", "9 dimensions", {"a": t("F32", [1] * 9, 0, 4)}, four)
case("unknown-dtype", "unknown dtype 'F31'", {"a": t("F31", [1], 0, 4)}, four)
case("half-bytes", "do not fill whole bytes", {"a": t("F4", [1], 0, 1)}, b"\0")
case("no-dtype", "an invalid 'dtype'", {"a": {"shape": [1], "data_offsets": [0, 4]}}, four)
case("no-shape", "an invalid 'shape'", {"a": {"dtype": "F32", "data_offsets": [0, 4]}}, four)
case("no-offsets", "an invalid 'data_offsets'", {"a": {"dtype": "F32", "shape": [1]}}, four)
case("entry-is-number", "not described by an object", {"a": 1})
case("metadata-not-object", "__metadata__ is not an object", {"__metadata__": 1})
case("nul-in-dtype", "an invalid 'dtype'", {"a": t("F32\0", [1], 0, 4)}, four)
case("nul-in-name", "column", {"a\0b": t("F32", [1], 0, 4)}, four)
case("metadata-nul", "key 'a' is not a string", {"__metadata__": {"a": "b\0c"}})
case("metadata-number", "key 'a' is not a string", {"__metadata__": {"a": 1}})
case("control-bytes", "unknown dtype '?[31m'", {"\x1b]0;x\x07": t("\x1b[31m", [1], 0, 4)}, four)
case("deep", "deeper", "{" + '"a":' + "[" * 3000 + "]" * 3000 + "}")

with open("safetensors.list", "w") as f:
    for name, message in cases:
        f.write(f"{name}.safetensors\t{message}\n")
