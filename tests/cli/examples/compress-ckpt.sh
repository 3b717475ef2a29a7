#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# For the examples of compress-ckpt(1): the model m0/ and the runs run/ and run2/ with two checkpoints each.
# usage: compress-ckpt.sh, in the folder where the examples run, with the tools on PATH
set -eu

sh "$(dirname "$0")/train.sh"
train -q m0/ data/ -o run/ --steps 4 --save-every 2 --batch-size 2 --seq-len 32 --peak-tflops 0
cp -a run run2
