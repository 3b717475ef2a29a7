#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The model and the data of eval-model(1)'s examples, for those of quantize-kv(1).
# usage: quantize-kv.sh, in the folder where the examples run
set -eu

sh "$(dirname "$0")/eval-model.sh"
