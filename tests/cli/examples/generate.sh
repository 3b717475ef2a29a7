#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The examples of generate(1) need the same files as those of eval-model(1).
# usage: generate.sh, in the folder where the examples run
set -eu

exec sh "$(dirname "$0")/eval-model.sh"
