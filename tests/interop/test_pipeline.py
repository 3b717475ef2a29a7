#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare pipeline schedules with PyTorch's: its generators give the same rows where the schedule is defined to the step, and it
accepts ours as valid; plot-run reads its rows.  Speaks TAP.

Environment: LM_TEST_BUILD, a build folder with bin/plot-run."""
import csv
import json
import os
import subprocess
import sys
import tempfile

from torch.distributed.pipelining import schedules
import tap
from tap import BIN, check


class Stage:
    """What PyTorch's schedules ask of a stage when they are only generated."""
    submod = None

    def __init__(self, index, count, ranks):
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, count, ranks, index % ranks
        self.is_first, self.is_last, self.has_backward, self.group = index == 0, index == count - 1, True, None

    def __getattr__(self, name):
        return None


def plot(*args):
    return subprocess.run([os.path.join(BIN, "plot-run"), "--schedule", *args], check=True, capture_output=True, text=True).stdout


def ours(name, ranks, micros):
    text = plot(name, "--mesh", f"pp={ranks}", "--micro-batches", str(micros), "--format", "csv")
    return {r: [schedules._Action.from_str(c) for c in row] for r, row in enumerate(csv.reader(text.splitlines()))}


def theirs(kind, chunks, ranks, micros):
    made = kind([Stage(i * ranks, ranks * chunks, ranks) for i in range(chunks)], micros, loss_fn=lambda *_: None)
    return {r: [a for a in row if a is not None] for r, row in made.pipeline_order.items()}


def flat(row):
    return [b for a in row for b in (a.sub_actions or [a])]


def valid(rows, ranks, stages, micros):
    """PyTorch's own check; it takes no pairs."""
    try:
        schedules._validate_schedule({r: flat(row) for r, row in rows.items()}, ranks, stages, micros)
    except Exception as e:
        return str(e)
    return None


def main():
    cases = [("interleaved:2", schedules.ScheduleInterleaved1F1B, 2), ("breadth-first:2", schedules.ScheduleLoopedBFS, 2),
             ("dualpipev", schedules.ScheduleDualPipeV, 2), ("zb-v", schedules.ScheduleZBVZeroBubble, 2)]
    with tempfile.TemporaryDirectory() as tmp:
        for name, kind, chunks in cases:
            for ranks, micros in ((2, 4), (4, 8), (4, 12)):
                here, there = ours(name, ranks, micros), theirs(kind, chunks, ranks, micros)
                what = f"{name}, {ranks} ranks, {micros} micro-batches"
                why = valid(here, ranks, ranks * chunks, micros)
                check(why is None, f"{what}: PyTorch accepts the rows", why)
                if name in ("interleaved:2", "dualpipev"):
                    check(here == there, f"{what}: the rows are PyTorch's",
                          *[f"{r}: {here[r]}\n# {r}: {there[r]}" for r in here if here[r] != there[r]])
                path = os.path.join(tmp, "rows.csv")
                with open(path, "w", newline="") as f:
                    csv.writer(f).writerows([row for _, row in sorted(there.items())])
                a = json.loads(plot(path, "--json"))
                b = json.loads(plot(name, "--mesh", f"pp={ranks}", "--micro-batches", str(micros), "--json"))
                check(b["makespan_ms"] <= a["makespan_ms"] + 1e-9, f"{what}: PyTorch's rows are read, and ours are not slower",
                      a["makespan_ms"], b["makespan_ms"])
        for name, stages in (("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("zb-h2", 1)):
            why = valid(ours(name, 4, 8), 4, 4, 8)
            check(why is None, f"{name}: PyTorch accepts the rows", why)
    return tap.finish()


if __name__ == "__main__":
    sys.exit(main())
