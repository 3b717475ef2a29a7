#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The model and the data of eval-model(1)'s examples, and the cache of a text, doc.kv, for those of quantize-kv(1).
# usage: quantize-kv.sh, in the folder where the examples run
set -eu

sh "$(dirname "$0")/eval-model.sh"
generate -q run/ --save-cache doc.kv -p "$(head -c 2000 corpus.txt)" -n 0 --context 1024
