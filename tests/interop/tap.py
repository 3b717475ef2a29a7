# SPDX-License-Identifier: Apache-2.0
"""What the tests of this folder share: the places of the project, the lines of TAP, and their drivers in C."""
import os
import subprocess

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
BUILD = os.environ.get("LM_TEST_BUILD", os.path.join(ROOT, "build"))
BIN = os.path.join(BUILD, "bin")
LIBS = "-lz -lzstd -lxxhash -ljansson -lpcre2-8 -lutf8proc -lcairo -lyaml -lm -lpthread".split()
count = failed = 0


def check(ok, name, *detail):
    """A line of TAP; the details of one that fails follow it."""
    global count, failed
    count += 1
    failed += not ok
    print(f"{'ok' if ok else 'not ok'} {count} - {name}", flush=True)
    for d in detail if not ok else ():
        print("# " + str(d), flush=True)
    return ok


def finish():
    """The plan of TAP; the exit status."""
    print(f"1..{count}")
    return int(failed > 0)


def tool(name, *args):
    """Run a tool quietly; it must succeed."""
    return subprocess.run([os.path.join(BIN, name), "-q", *args], check=True)


def driver(source, tmp):
    """Build a driver of this folder on the library; its path."""
    path = os.path.join(tmp, "driver")
    subprocess.run(["cc", "-std=c17", "-O1", "-D_GNU_SOURCE", "-I" + ROOT, "-I" + os.path.join(ROOT, "lib"), "-o", path,
                    os.path.join(HERE, source), os.path.join(BUILD, "libcore.a"), "-Wl,--as-needed"] + LIBS, check=True)
    return path
