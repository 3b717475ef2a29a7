#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# generate --kv: keys and values in fewer bits.

bats_require_minimum_version 1.5.0

setup() {
    root=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    cd "$BATS_TEST_TMPDIR"
    sh "$root/tests/cli/examples/generate.sh"
}

# refused PATTERN OPTION ...: one line that fits the pattern, status 2, nothing on standard output
refused() {
    local pattern=$1
    shift
    run --separate-stderr generate run/ -p 'The system' -n 4 "$@"
    [ "$status" -eq 2 ] || { echo "$*: status $status: $stderr"; return 1; }
    [ -z "$output" ]
    [ "$(wc -l <<< "$stderr")" -eq 1 ]
    # shellcheck disable=SC2053
    [[ $stderr == $pattern ]] || { echo "$*: $stderr"; return 1; }
}

@test "generate --kv: auto is the plain cache, and other methods change logits by what they keep" {
    generate -q run/ -p 'The system reads' -n 40 -T 0 --json --logprobs > plain
    generate -q run/ -p 'The system reads' -n 40 -T 0 --json --logprobs --kv auto > auto
    generate -q run/ -p 'The system reads' -n 40 -T 0 --json --logprobs --kv int8 > int8
    generate -q run/ -p 'The system reads' -n 40 -T 0 --json --logprobs --kv int2:residual=0 > int2
    cmp plain auto
    run ! cmp -s plain int8
    python3 - <<'END'
import json
def read(name):
    return json.load(open(name))
p = read("plain")
for name, most in (("int8", 0.05), ("int2", 3)):
    q = read(name)
    n = next((i for i, (a, b) in enumerate(zip(p["token_ids"], q["token_ids"])) if a != b), len(p["token_ids"]))
    d = max(abs(a - b) for a, b in zip(p["logprobs"][:n], q["logprobs"][:n]))
    assert n > 2 and 0 < d < most, (name, n, d)
END
}

@test "generate --kv: answers are the same for any batch and -j" {
    for i in $(seq 6 20); do echo "{\"text\": \"line $i of the system\"}"; done >> prompts.jsonl
    for kv in int4 kivi:residual=32 k=int8,v=auto k4v2; do
        generate -q run/ -n 50 --seed 3 --kv "$kv" --dtype f32 --logprobs -b 1 -j 1 < prompts.jsonl > a
        generate -q run/ -n 50 --seed 3 --kv "$kv" --dtype f32 --logprobs -b 7 -j 2 < prompts.jsonl > b
        cmp a b
        # one prompt is copied to the slots of its samples
        generate -q run/ -n 20 --n 3 --seed 3 --kv "$kv" --dtype f32 --logprobs -b 1 < prompts.jsonl > c
        generate -q run/ -n 20 --n 3 --seed 3 --kv "$kv" --dtype f32 --logprobs -b 4 < prompts.jsonl > d
        cmp c d
        [ "$(wc -l < c)" -eq "$((3 * $(wc -l < a)))" ]
    done
}

@test "generate --kv: policies keep some tokens, and answers are the same for any batch" {
    for i in $(seq 6 20); do echo "{\"text\": \"line $i of the system, which is read word by word\"}"; done >> prompts.jsonl
    for kv in h2o:keep=0.5 snapkv:capacity=8,window=4+int8 streaming:sinks=2,window=6+int4; do
        generate -q run/ -n 30 --n 2 --seed 3 --kv "$kv" --dtype f32 --logprobs -b 1 -j 1 < prompts.jsonl > a
        generate -q run/ -n 30 --n 2 --seed 3 --kv "$kv" --dtype f32 --logprobs -b 7 -j 2 < prompts.jsonl > b
        cmp a b
    done
}

@test "generate --kv: -v says what is stored" {
    run --separate-stderr generate -v run/ -p 'The system' -n 4 --kv 'K4V2'
    [[ $stderr == *$'\n'"generate: --kv kvarn: "*" a token, "*" bits a number; pages of 128 tokens; "*" of plain tokens a text"$'\n'* ]]
    run --separate-stderr generate -v run/ -p 'The system' -n 4 --kv 'layers.0=int8:group=16,rotate=off;*=auto'
    [[ $stderr == *$'\n'"generate: --kv layers.0=int8:group=16: "* ]]
}

@test "generate --kv --serve-batch --json: the report has the specification" {
    generate -q run/ -n 8 --kv INT4:group=32 --serve-batch 4 --json < prompts.jsonl > out
    tail -n 1 out | grep -q '^{"kv":{"spec":"int4","bytes_per_token":192'
}

@test "generate --kv: what cannot be is refused in one line, before the work" {
    refused "generate: --kv: there is no method 'int99': did you mean int8? (--list-kv shows all)" --kv int99
    refused "generate: --kv: there is no method 'streeming': did you mean streaming? (--list-kv shows all)" --kv streeming
    refused "generate: --kv: there is no method 'k4v5': did you mean k4v4? (--list-kv shows all)" --kv k4v5
    refused "generate: --kv: there is no method 'cachegem': --list-kv shows all" --kv cachegem
    refused "generate: --kv: int8 has no 'foo': its keys are: *" --kv int8:foo=1
    refused "generate: --kv: there is no layer 9: *" --kv layers.9=int8
    refused "generate: --kv: keys of layer 0 would be f32, but activations are bf16: *" --dtype bf16 --kv f32
    refused "generate: --kv: keys of layer 0: q8_0: heads of 16 numbers are not blocks of 32: *" --kv q8_0
    for kv in auto:bits=3 kvquant fp8:scale=head 'layers.0=int8;kvquant:bits=3'; do
        refused "generate: --kv: *reads a calibration, and there is no run/kv-calibration.safetensors: make it with quantize-kv --calibrate --method all -o FILE MODEL DATA, or set file=FILE" --kv $kv
    done
    run --separate-stderr generate run/ -p x -n 2 --kv int4:first=9
    [[ $stderr == "generate: --kv int4:first=9: all 2 layers are left alone, so that nothing is coded"$'\n'* ]]
    run --separate-stderr generate no-model -p x --kv kvquant:file=none.safetensors
    [ "$status" -eq 1 ]
    [[ $stderr == "generate: none.safetensors: cannot open: "* ]]
    run --separate-stderr generate
    [ "$status" -eq 2 ]
    [[ $stderr == "generate: operands: 0 given, 1 needed: usage: generate [OPTION ...] MODEL [FILE ...]" ]]
}

@test "generate --kv: with a calibration" {
    quantize-kv -q --calibrate --method "kvquant:bits=3,outliers=0.01 auto" --seq-len 64 --windows 4 run/ data/val -o kvq.safetensors
    for kv in kvquant: auto:bits=5, fp8:scale=layer,; do
        run --separate-stderr generate -v run/ -p 'The system' -n 20 --kv "${kv}file=kvq.safetensors"
        [ "$status" -eq 0 ] || { echo "$kv: $stderr"; false; }
        [[ $stderr == *"generate: --kv "*" a token, "* ]]
    done
    [[ $output == "The system"* ]]
    # that of the model's folder is the default, and no part of the text
    cp -RL run own
    quantize-kv -q --calibrate --method "kvquant:bits=3 auto fp8:scale=head" --seq-len 64 --windows 4 own/ data/val -o own/kv-calibration.safetensors
    for kv in kvquant:bits=3 auto:bits=5 fp8:scale=layer fp8:scale=head; do
        generate -q own/ -p 'The system' -n 20 -T 0 --kv $kv > a
        generate -q own/ -p 'The system' -n 20 -T 0 --kv $kv,file=own/kv-calibration.safetensors > b
        [ -s a ]
        cmp a b
    done
    # of a training run: in its folder first, then in that of its model
    mkdir train
    cp -R own train/step-000003
    echo '{}' > train/step-000003/state.json
    ln -s step-000003 train/latest
    mv train/step-000003/kv-calibration.safetensors train/
    generate -q train/ -p 'The system' -n 20 -T 0 --kv fp8:scale=head > c
    cmp a c
    mv train/kv-calibration.safetensors train/step-000003/
    generate -q train/ -p 'The system' -n 20 -T 0 --kv fp8:scale=head > c
    cmp a c
    rm train/step-000003/kv-calibration.safetensors
    run -2 generate -q train/ -p 'The system' -n 20 -T 0 --kv fp8:scale=head
    [[ $output == *"there is no train/kv-calibration.safetensors: "* ]]
    run --separate-stderr generate -v own/ -p 'The system' -n 2 --kv kvquant:bits=3
    [[ $stderr == *"generate: --kv kvquant:bits=3: "* ]]
    run -2 generate own/ -p 'The system' -n 2 --kv kvquant:bits=2
    [[ $output == *"has levels of 3 bits: measure one of as many bits" ]]
    init-model -q llama-1m --set num_hidden_layers=2 --set hidden_size=64 --set num_attention_heads=4 \
        --set num_key_value_heads=4 --tokenizer tok/tokenizer.json --seed 9 -o other/
    run --separate-stderr generate other/ -p 'The system' -n 4 --kv kvquant:file=kvq.safetensors
    [ "$status" -eq 2 ]
    [[ $stderr == "generate: kvq.safetensors: it was measured with other weights: use the calibration of this model" ]]
    cp own/kv-calibration.safetensors other/
    run -2 generate other/ -p 'The system' -n 4 --kv auto:bits=5
    [[ $output == "generate: other/kv-calibration.safetensors: it was measured with other weights: "* ]]
    cp -RL run changed
    sed -i 's/"rope_theta": *[0-9.]*/"rope_theta": 77.0/' changed/config.json
    run --separate-stderr generate changed/ -p 'The system' -n 4 --kv kvquant:file=kvq.safetensors
    [ "$status" -eq 2 ]
    [[ $stderr == "generate: kvq.safetensors: it was measured with other settings of the model's config.json: "* ]]
}

@test "generate --list-kv: the methods, as a table and as JSON; each is in the manual" {
    generate --list-kv > list
    grep -qE '^  residual +newest tokens kept plain +0 to 4096 \[32\]$' list # of int2
    grep -qE '^k4v2 += kvarn$' list
    generate --list-kv --json | python3 -c '
import json, sys
o = json.load(sys.stdin)
assert o["methods"]["kivi"]["hyper"]["residual"]["value"] == 128, o
assert o["names"]["fp8"] == "fp8_e4m3"
table = {}
for line in open("list"):
    if line.startswith("  "):
        table[name].append(line.split()[0])
    else:
        name = line.split()[0]
        table[name] = []
for group in o["methods"], o["policies"]:
    for name, m in group.items():
        assert table[name] == list(m["hyper"]) + ["file"] * m["file"], (name, table[name])'
    sed -n '/^\.Sh KEYS AND VALUES/,/^\.Sh BATCHES/p' "$root/man/man1/generate.1" > page
    generate --list-kv --json | python3 -c '
import json, sys
o = json.load(sys.stdin)
print("\n".join([*o["methods"], *o["policies"]]))' > names
    [ "$(wc -l < names)" -gt 20 ]
    while read -r n; do
        grep -qE "^\.It ([a-z0-9_ ,]*[ ,])?$n( |$)" page || { echo "$n"; false; }
    done < names
}
