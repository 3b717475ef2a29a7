#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Metrics files for the examples of plot-run(1): a finished run and a shorter one of the same kind.
# usage: plot-run.sh, in the folder where the examples run
set -eu

make_run() { # steps, slowness -> lines of a run whose loss falls from 8.3 towards 3.2
    awk -v steps="$1" -v slow="$2" 'BEGIN {
        print "{\"event\":\"run\",\"tool\":\"train\",\"version\":\"0.1.0\",\"argv\":[\"train\"],\"seed\":1}"
        for (i = 1; i <= steps; i++) {
            wiggle = ((i * 7919) % 97) / 97 - 0.5
            loss = 3.2 + 5.1 * exp(-i / slow) + 0.3 * wiggle
            lr = i < 30 ? 0.003 * i / 30 : 0.003 * (steps - i) / (steps - 30)
            printf "{\"event\":\"step\",\"step\":%d,\"tokens\":%d,\"seconds\":%.3f,\"loss\":%.6g,\"lr\":%.6g,\"grad_norm\":%.6g}\n",
                i, i * 4096, i * 0.2, loss, lr, 1 + wiggle
            if (i % 50 == 0)
                printf "{\"event\":\"eval\",\"step\":%d,\"tokens\":%d,\"seconds\":%.3f,\"loss\":%.6g}\n",
                    i, i * 4096, i * 0.2, 3.3 + 5.1 * exp(-i / slow)
        }
        printf "{\"event\":\"end\",\"status\":\"done\",\"step\":%d}\n", steps
    }'
}

make_run 300 60 > run.jsonl
make_run 200 90 > slow.jsonl
