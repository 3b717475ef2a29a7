#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# For the examples of align-model(1): the model m0/ of train(1), pairs, judged answers and problems.
# usage: align-model.sh, in the folder where the examples run, with the tools on PATH
set -eu

sh "$(dirname "$0")/train.sh"
for i in 1 2 3 4 5 6; do
    echo "{\"prompt\":\"$i and $i is \",\"chosen\":\"$((i + i))\",\"rejected\":\"$i\"}" >> pairs.jsonl
    echo "{\"prompt\":\"$i and $i is \",\"completion\":\"$((i + i % 2))\",\"label\":$([ $((i % 2)) = 0 ] && echo false || echo true)}" >> judged.jsonl
    echo "{\"question\":\"$i and $i is \",\"answer\":\"#### $((i + i))\"}" >> problems.jsonl
done
