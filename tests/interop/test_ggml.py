#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare the quantised blocks of GGUF with the Python package gguf, and with ggml itself where
LM_TEST_GGML names a shared library of it; speaks TAP.

Environment: LM_TEST_BUILD, a build folder with libcore.a."""
import ctypes
import os
import subprocess
import tempfile

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
import tap
from tap import check, driver

TYPES = "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS".split()
READ = "MXFP4 NVFP4 Q1_0 Q2_0".split()  # some are newer than the package


def run(program, data, *args):
    return np.frombuffer(subprocess.run([program, *args], input=data.tobytes(), stdout=subprocess.PIPE,
                                        check=True).stdout, dtype=np.uint8)


def numbers():
    rng = np.random.default_rng(5)
    x = rng.standard_normal((300, 256)).astype(np.float32)
    x *= np.float32([1, 0.02, 1e-4, 3])[np.arange(300) % 4][:, None]
    x[7] = 0
    x[8] = np.abs(x[8])
    x[9] = 1.5
    x[10, :40] = 0
    x[11, rng.random(256) > 0.05] = 0
    return x


def importance():
    rng = np.random.default_rng(6)
    w = (3 * rng.random(256) ** 4).astype(np.float32)
    w[5] = w[64:96] = 0
    return w


def of_ggml(lib, kind, x, w, size):
    """ggml's own blocks for the rows of x, with importance w or None."""
    out = np.zeros(size, dtype=np.uint8)
    lib.ggml_quantize_chunk.restype = ctypes.c_size_t
    lib.ggml_quantize_chunk(ctypes.c_int(int(kind)), x.ctypes.data_as(ctypes.c_void_p),
                            out.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(0), ctypes.c_int64(x.shape[0]),
                            ctypes.c_int64(x.shape[1]), None if w is None else w.ctypes.data_as(ctypes.c_void_p))
    return out


def read_only(prog, name):
    """Random bytes, except for scales that are NaN or infinite."""
    kind = GGMLQuantizationType[name]
    block = {"MXFP4": 17, "NVFP4": 36}.get(name, 18)
    data = np.random.default_rng(7).integers(0, 256, (200, block), dtype=np.uint8)
    if name == "NVFP4":
        data[:, :4] &= 0x3f
    elif name == "MXFP4":
        data[:, 0] = 100 + data[:, 0] % 50
    else:
        data[:, 1] &= 0xbf
    back = run(prog, data, "-d", name).view(np.float32)
    check(np.allclose(back, dequantize(data, kind).ravel(), rtol=1e-6, atol=0), f"{name}: the package decodes it as we do")


def main():
    x = numbers()
    w = importance()
    peer = os.environ.get("LM_TEST_GGML")
    lib = ctypes.CDLL(peer, mode=os.RTLD_LAZY) if peer else None
    with tempfile.TemporaryDirectory() as tmp:
        prog, weights = driver("ggml_driver.c", tmp), os.path.join(tmp, "weights")
        w.tofile(weights)
        for name in TYPES:
            kind = GGMLQuantizationType[name]
            ours = run(prog, x, name)
            blocks = ours.reshape(x.shape[0], -1)
            theirs = dequantize(blocks, kind)
            back = run(prog, ours, "-d", name).view(np.float32).reshape(x.shape)
            check(np.allclose(back, theirs, rtol=1e-6, atol=0), f"{name}: the package decodes our blocks as we do")
            if name.endswith("K") or name.startswith("IQ"):
                print(f"# {name}: the package has no encoder")
            else:
                check(np.array_equal(blocks, quantize(x, kind)), f"{name}: the bytes of the package's encoder")
            if lib:
                check(np.array_equal(of_ggml(lib, kind, x, None, ours.size), ours), f"{name}: the bytes of ggml")
                check(np.array_equal(of_ggml(lib, kind, x, w, ours.size), run(prog, x, "-w", weights, name)),
                      f"{name}: the bytes of ggml with importance")
        for name in READ:
            try:
                read_only(prog, name)
            except (KeyError, NotImplementedError):
                print(f"# {name}: not known to the package")
    return tap.finish()


if __name__ == "__main__":
    raise SystemExit(main())
