#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# inspect-model: output, comparison, refusals.
bats_require_minimum_version 1.5.0

setup() {
    root=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    cd "$BATS_TEST_TMPDIR"
    sh "$root/tests/cli/examples/inspect-model.sh"
}

@test "inspect-model: a folder is summarised and listed" {
    run inspect-model m0/
    [ "$status" -eq 0 ]
    [[ "$output" == *"model      llama (LlamaForCausalLM)"* ]]
    [[ "$output" == *"parameters 3 "* ]]
    [[ "$output" == *"history    init-model llama-1m  (0.1.0)"* ]]
    [[ "${lines[-1]}" =~ ^F32\ +\[3\]\ +3\ +12\ B\ +model.norm.weight$ ]]
}

@test "inspect-model: --no-list leaves the tensors out" {
    run inspect-model --no-list m0/
    [ "$status" -eq 0 ]
    [[ "$output" != *model.norm.weight* ]]
}

@test "inspect-model: a run folder names its checkpoint, links or not" {
    run inspect-model run/
    [ "$status" -eq 0 ]
    [[ "$output" == *"checkpoint step-000300"* ]]
    rm run/latest run/config.json run/model.safetensors
    run inspect-model run/
    [ "$status" -eq 0 ]
    [[ "$output" == *"checkpoint step-000300"* ]]
}

@test "inspect-model: statistics in JSON are those of the data" {
    run inspect-model --stats --json m0/model.safetensors
    [ "$status" -eq 0 ]
    [[ "$output" == *'"min":0.5,"max":2,"mean":1.1666666666666667,"std":0.62360956446232'* ]]
}

@test "inspect-model: the same bytes for any -j" {
    for j in 1 2 5; do
        inspect-model --stats --json -j $j m0/ > "s$j"
        inspect-model --json -j $j m0/ run/ > "c$j"
    done
    cmp s1 s2 && cmp s1 s5 && cmp c1 c2 && cmp c1 c5
}

@test "inspect-model: --check exits with 3 when models differ, 0 when not" {
    run inspect-model --check m0/ run/
    [ "$status" -eq 3 ]
    [[ "$output" == *"0 of 1 tensor is the same; largest difference 1.5, largest relative 0.75"* ]]
    run inspect-model --check m0/ m0/model.safetensors
    [ "$status" -eq 0 ]
    [[ "$output" == *"1 of 1 tensor is the same"* ]]
    run inspect-model m0/ run/
    [ "$status" -eq 0 ]
}

@test "inspect-model: tolerances" {
    run inspect-model --check --atol 1.5 m0/ run/
    [ "$status" -eq 0 ]
    run inspect-model --check --atol 1.4 m0/ run/
    [ "$status" -eq 3 ]
    run inspect-model --check --rtol 3 m0/ run/
    [ "$status" -eq 0 ]
}

@test "inspect-model: a tensor that one model lacks is a difference" {
    run inspect-model --check m0/ w.safetensors
    [ "$status" -eq 3 ]
    [[ "$output" == *"only in A"*"model.norm.weight"* ]]
    [[ "$output" == *"only in B"*w* ]]
}

@test "inspect-model: values are compared across dtypes, unless --strict" {
    # 1 and 2 as BF16
    header='{"w":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}     '
    { printf '\070\0\0\0\0\0\0\0%s' "${header:0:56}"; printf '\200\077\000\100'; } > h.safetensors
    run inspect-model --check w.safetensors h.safetensors
    [ "$status" -eq 0 ]
    [[ "$output" == *"1 of 1 tensor is the same, 1 with another dtype"* ]]
    run inspect-model --check --strict w.safetensors h.safetensors
    [ "$status" -eq 3 ]
}

@test "inspect-model: --only selects by glob and refuses to select nothing" {
    run inspect-model --check --only 'no*such' m0/ run/
    [ "$status" -eq 2 ]
    run inspect-model --only 'x*' --only '*norm*' m0/
    [ "$status" -eq 0 ]
    [[ "$output" == *model.norm.weight* ]]
}

@test "inspect-model: a 5 GB file is read by its header only" {
    header='{"w":{"dtype":"F32","shape":[1250000000],"data_offsets":[0,5000000000]}}'
    { printf '\110\0\0\0\0\0\0\0%s' "$header"; } > big.safetensors
    truncate -s $((80 + 5000000000)) big.safetensors || skip "no sparse files here"
    run timeout 2 inspect-model big.safetensors
    [ "$status" -eq 0 ]
    [[ "$output" == *"parameters 1250000000 (1.25 G)"* || "$output" == *"parameters 1250000000 "* ]]
}

@test "inspect-model: every malformed file is one line and exit 1" {
    while IFS=$'\t' read -r file message; do
        run inspect-model "$root/tests/golden/bad/$file"
        echo "$file: $status: $output"
        [ "$status" -eq 1 ]
        [ "${#lines[@]}" -eq 1 ]
        [[ "$output" == "inspect-model: "*"$message"* ]]
    done < "$root/tests/golden/bad/safetensors.list"
}

@test "inspect-model: white space before the header is read, as the reference library does" {
    header=$' \n\t\r {"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    while [ $((${#header} % 8)) -ne 0 ]; do header="$header "; done
    { printf "\\$(printf %03o ${#header})\0\0\0\0\0\0\0%s" "$header"; tail -c 8 w.safetensors; } > ws
    cp ws ws.safetensors
    for model in ws.safetensors ws -; do # by its name, by its content, as a file on standard input
        run inspect-model --check "$model" w.safetensors < ws
        [ "$status" -eq 0 ]
    done
    cat ws | inspect-model --check - w.safetensors
    header=$' {"w":{"dtype":"F32","shape":[2000],"data_offsets":[0,8000]}}  '
    { printf "\\$(printf %03o ${#header})\0\0\0\0\0\0\0%s" "$header"; head -c 8000 /dev/zero; } > ws.safetensors
    compress-ckpt -q ws.safetensors
    compress-ckpt -l --json ws.safetensors.lmz | grep -q '"tensor":"w"'
    compress-ckpt -q -d ws.safetensors.lmz -o back.safetensors
    cmp ws.safetensors back.safetensors
}

@test "inspect-model: an index with a wrong total_size is only a warning" {
    mv m0/model.safetensors m0/model-00001-of-00001.safetensors
    index() { # index TOTAL
        echo "{\"metadata\": {\"total_size\": $1}," \
            '"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}' \
            > m0/model.safetensors.index.json
    }
    for right in 12 12.0; do
        index $right
        run --separate-stderr inspect-model m0
        [ "$status" -eq 0 ] && [ -z "$stderr" ]
    done
    for wrong in 13 '"12"' -12 12.5; do
        index "$wrong"
        run --separate-stderr inspect-model m0
        [ "$status" -eq 0 ]
        [ "$stderr" = "inspect-model: m0/model.safetensors.index.json: metadata.total_size is $wrong, the tensors have 12 bytes: ignored" ]
        [[ "$output" == *"parameters 3 "* ]]
    done
}

@test "inspect-model: names in a file cannot send control codes to the terminal" {
    header='{"a\u001b[31m\u009b":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
    while [ $((${#header} % 8)) -ne 0 ]; do header="$header "; done
    printf "\\$(printf %03o ${#header})\0\0\0\0\0\0\0" > esc.safetensors
    printf '%s' "$header" >> esc.safetensors
    run inspect-model esc.safetensors
    [ "$status" -eq 0 ]
    [[ "$output" == *'a?[31m?' ]]
}

@test "inspect-model: files that are not models are refused with the reason" {
    mkdir empty
    run inspect-model empty
    [ "$status" -eq 2 ]
    [[ "$output" == "inspect-model: empty: it has no config.json: "* ]]
    run inspect-model nowhere
    [ "$status" -eq 1 ]
    [[ "$output" == "inspect-model: nowhere: cannot open: No such file or directory"* ]]
    rm m0/model.safetensors
    run inspect-model m0
    [ "$status" -eq 2 ]
}

@test "inspect-model: a missing shard is one line that names it" {
    rm m0/model.safetensors
    echo '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}' > m0/model.safetensors.index.json
    run inspect-model m0
    [ "$status" -eq 2 ]
    [ "$output" = "inspect-model: m0/model-00001-of-00002.safetensors: shard 1 of 1 named by model.safetensors.index.json is missing: fetch it again" ]
}

@test "inspect-model: -o writes a file, refuses an existing one, -f overwrites" {
    inspect-model -o report.json --json m0/
    run inspect-model -o report.json m0/
    [ "$status" -eq 2 ]
    grep -q '^{"model":"m0/"' report.json
    inspect-model -f -o report.json m0/
    grep -q '^m0/$' report.json
}

@test "inspect-model: --verify exits with 3 for a fault, of folders, archives and streams" {
    init-model -q llama-1m --set hidden_size=64 --set intermediate_size=96 --set num_hidden_layers=1 -o v
    run inspect-model --verify v
    [ "$status" -eq 0 ]
    [[ "$output" == *"note   config.json: torch_dtype: has no effect on the computation"* ]]
    cp w.safetensors v/model-00002-of-00002.safetensors
    tar -cf v.tar v
    for model in v v.tar -; do
        run inspect-model --verify "$model" < v.tar
        [ "$status" -eq 3 ]
        [[ "${lines[1]}" == "  fault  model-00002-of-00002.safetensors: is read by no loader: model.safetensors comes first" ]]
    done
    mkdir -p tok && cp "$root/tests/golden/sentencepiece/llama.model" tok/tokenizer.model
    init-model -q llama-1m --tokenizer tok -o sp
    inspect-model --verify sp
    head -c 2000 tok/tokenizer.model > sp/tokenizer.model
    tar -cf sp.tar sp
    for model in sp -; do
        run inspect-model --verify "$model" < sp.tar
        [ "$status" -eq 3 ]
        [[ "$output" == *"  fault  tokenizer.model: is damaged"* ]]
    done
    run inspect-model --verify --json w.safetensors
    [ "$status" -eq 0 ]
    [ "$output" = '{"model":"w.safetensors","tensor_count":1,"faults":[],"notes":[{"file":null,"name":null,"what":"no config.json: the use of its tensors is not checked"}],"ok":true}' ]
    for wrong in "v v" "--stats v" "--only x v" "--no-list v"; do
        # shellcheck disable=SC2086
        run inspect-model --verify $wrong
        [ "$status" -eq 2 ]
    done
}

@test "inspect-model: a full disk is exit 1" {
    run sh -c 'inspect-model m0/ > /dev/full'
    [ "$status" -eq 1 ]
    [ "$output" = "inspect-model: standard output: cannot write: No space left on device: free space on the disk" ]
}

@test "inspect-model: wrong use is exit 2" {
    run inspect-model
    [ "$status" -eq 2 ]
    run inspect-model --check m0/
    [ "$status" -eq 2 ]
    run inspect-model m0 m0 m0
    [ "$status" -eq 2 ]
    run inspect-model --stats m0 m0
    [ "$status" -eq 2 ]
    cp w.safetensors same
    run inspect-model -f -o same same
    [ "$status" -eq 2 ]
    [[ "$output" == *"is both an input"* ]]
    run inspect-model --atol -1 m0 m0
    [ "$status" -eq 2 ]
}
