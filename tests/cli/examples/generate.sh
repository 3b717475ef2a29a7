#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# What the examples of generate(1) need is what those of eval-model(1) need.
# usage: generate.sh, in the folder where the examples run
set -eu

exec sh "$(dirname "$0")/eval-model.sh"
