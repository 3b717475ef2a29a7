#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Models for the examples of inspect-model(1): m0/, the run folder run/ that began with it, and w.safetensors.
# usage: inspect-model.sh, in the folder where the examples run
set -eu

# safetensors NAME COUNT DATA [META]: one F32 vector on standard output; DATA in printf's escapes
safetensors() {
    header="{${4:+\"__metadata__\":$4,}\"$1\":{\"dtype\":\"F32\",\"shape\":[$2],\"data_offsets\":[0,$(($2 * 4))]}}"
    while [ $((${#header} % 8)) -ne 0 ]; do header="$header "; done
    # shellcheck disable=SC2059 # the format is made of escapes
    printf "$(printf '\\%03o\\%03o\\000\\000\\000\\000\\000\\000' $((${#header} % 256)) $((${#header} / 256)))"
    printf '%s' "$header"
    # shellcheck disable=SC2059
    printf "$3"
}

one='\000\000\200\077' two='\000\000\000\100' half='\000\000\000\077'
mkdir m0 run run/step-000300
echo '{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}' > m0/config.json
cp m0/config.json run/step-000300/
echo '{}' > run/step-000300/state.json
history='[{\"tool\":\"init-model\",\"version\":\"0.1.0\",\"argv\":[\"init-model\",\"llama-1m\"],\"inputs\":[]}]'
safetensors model.norm.weight 3 "$one$two$half" "{\"format\":\"pt\",\"lmutils.history\":\"$history\"}" \
    > m0/model.safetensors
safetensors model.norm.weight 3 "$one$two$two" '{"format":"pt"}' > run/step-000300/model.safetensors
ln -s step-000300 run/latest
ln -s latest/config.json run/config.json
ln -s latest/model.safetensors run/model.safetensors
safetensors w 2 "$one$two" > w.safetensors
