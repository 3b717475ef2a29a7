#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# quantize-kv: calibrations and reports through a model, refusals.
bats_require_minimum_version 1.5.0

setup() {
    root=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    cd "$BATS_TEST_TMPDIR"
    sh "$root/tests/cli/examples/quantize-kv.sh"
}

calibrate() { quantize-kv -q --calibrate --method "$1" --seq-len 64 --windows 2 -f -o "$2" run/ data/val; }
report() { quantize-kv -q --evaluate --seq-len 128 --windows 2 --records 1 --steps 0 --repeats 0 "$@" run/ data/val; }
tensors() { inspect-model --json "$1" | grep -o '"name":"[^"]*"' | cut -d'"' -f4; }

@test "quantize-kv: a calibration has ranges, levels, scales and errors of each layer, and binds" {
    calibrate "kvquant:bits=3,outliers=0.02 auto" k.safetensors
    head -c 4000 k.safetensors > head
    grep -q '"format":"kv-calibration"' head
    grep -q '"candidates":"bf16;int8;int4;int2;q8_0;q4_0;fp8"' head
    grep -q '"outliers":"0.02"' head
    grep -qE '"weights":"[0-9a-f]{32}"' head
    for t in k.lower k.upper k.table v.table k.scale v.scale k.errors v.errors; do grep -q "layers.1.$t" head; done
    calibrate kvquant:bits=3,outliers=0.02,auto again.safetensors
    cmp k.safetensors again.safetensors
    report --methods "auto:bits=6,file=k.safetensors fp8:scale=layer,file=k.safetensors" --json > a
    [ "$(grep -o '"kl":[0-9]' a | wc -l)" -eq 3 ]
}

@test "quantize-kv: --method of a calibration: only what is named, together the same numbers; all" {
    kinds() { inspect-model --json "$1" | grep -o 'layers.1.[kv].[a-z]*' | cut -d. -f3,4 | sort -u | tr '\n' ' '; }
    calibrate kvquant a
    [ "$(kinds a)" = "k.lower k.scale k.table k.upper v.outliers v.scale v.table " ]
    calibrate auto b
    [ "$(kinds b)" = "k.errors v.errors " ]
    calibrate fp8:scale=head c
    [ "$(kinds c)" = "k.scale v.scale " ]
    calibrate "auto fp8:scale=head kvquant" d
    calibrate all:scale=head e
    cmp d e
    [ "$(kinds e)" = "k.errors k.lower k.scale k.table k.upper v.errors v.outliers v.scale v.table " ]
    quantize-kv -q --calibrate --method kvquant --candidates "int8;int4" --seq-len 64 --windows 2 -f -o f run/ data/val
    head -c 400 f | grep -q '"candidates":"int8;int4"'
    report --methods "auto:bits=6,file=b fp8:scale=layer,file=c fp8:scale=head,file=c kvquant:file=e auto:bits=6,file=e" --json > out
    [ "$(grep -o '"kl":[0-9]' out | wc -l)" -eq 6 ]
    of() { tr '{' '\n' < out | grep "\"method\":\"$1" | grep -o '"kl":[^,]*'; }
    [ "$(of auto:bits=6,file=b)" = "$(of auto:bits=6,file=e)" ]
    quantize-kv -v --calibrate --method all --seq-len 64 --windows 2 -f -o g run/ data/val 2> err
    grep -qE 'quantize-kv: calibration: weights [0-9.]+ [KM]iB, a window [0-9.]+ [KM]iB, ranges of all windows [0-9.]+ KiB' err
}

@test "quantize-kv: --evaluate calibrates methods that name no file" {
    report --methods "auto:bits=6 fp8:scale=layer fp8_e4m3:scale=head kvquant:bits=3,sinks=2 auto" --json > a
    [ "$(grep -o '"kl":[0-9]' a | wc -l)" -eq 6 ]
    grep -q '"method":"auto:bits=6","spec":"[^"]*int' a
    run ! grep -q '"error"' a
}

@test "quantize-kv: a calibration of another model is a row that says so" {
    calibrate kvquant:bits=2 k.safetensors
    init-model -q llama-1m --set num_hidden_layers=2 --set hidden_size=64 --seed 9 --tokenizer tok/tokenizer.json -f -o run/
    run -3 --separate-stderr report --methods "int8 fp8:scale=layer,file=k.safetensors"
    [[ $output == *"fp8:scale=layer,file=k.safetensors  k.safetensors: "* ]]
    [[ $output == *$'\nint8 '* ]]
}

@test "quantize-kv: FP8 scales of the checkpoint are taken" {
    python3 - << 'EOF' || skip "no python3"
import json, struct
f = open('run/model.safetensors', 'rb').read()
n = struct.unpack('<Q', f[:8])[0]
h, data = json.loads(f[8:8 + n]), f[8 + n:]
for name, x in (('k', 0.5), ('v', 0.25)):
    h['model.layers.1.self_attn.%s_scale' % name] = {'dtype': 'F32', 'shape': [], 'data_offsets': [len(data), len(data) + 4]}
    data += struct.pack('<f', x)
j = json.dumps(h).encode()
j += b' ' * (-len(j) % 8)
open('run/model.safetensors', 'wb').write(struct.pack('<Q', len(j)) + j + data)
EOF
    calibrate kvquant k.safetensors
    calibrate kvquant:scale=head h.safetensors
    inspect-model -q run/ > /dev/null
    python3 - << 'EOF'
import json, struct
def read(path, name):
    f = open(path, 'rb').read()
    n = struct.unpack('<Q', f[:8])[0]
    t = json.loads(f[8:8 + n])[name]
    a, b = t['data_offsets']
    return list(struct.unpack('<%df' % ((b - a) // 4), f[8 + n + a:8 + n + b]))
assert read('k.safetensors', 'layers.1.k.scale') == [0.5]
assert read('k.safetensors', 'layers.1.v.scale') == [0.25]
assert read('k.safetensors', 'layers.0.k.scale')[0] not in (0.5, 0.25)
assert set(read('h.safetensors', 'layers.1.v.scale')) == {0.25}
EOF
}

@test "quantize-kv: a table of methods, the plain cache first; order and company change nothing" {
    report --methods int8,int4:group=16,k=int8,v=int4 --json > a || true
    report --methods "int8,int4:group=16 k=int8,v=int4" --json > b
    report --methods "k=int8,v=int4 int8" --json > c
    [ "$(grep -o '"method":"[^"]*"' b | tr '\n' ' ')" = '"method":"plain" "method":"int8" "method":"int4:group=16" "method":"k=int8,v=int4" ' ]
    of() { tr '{' '\n' < "$2" | grep "\"method\":\"$1\"" | grep -o '"kl":[^,]*\|"top1":[^,]*' | tr '\n' ' '; }
    [ "$(of int8 b)" = "$(of int8 c)" ]
    [ "$(of k=int8,v=int4 b)" = "$(of k=int8,v=int4 c)" ]
    [ "$(of plain b)" = '"kl":0 "top1":1 ' ]
    [ "$(of int8 b)" != "$(of int4:group=16 b)" ]
    report --methods int8 --table > t
    [ "$(head -n 1 t | tr -s ' ' | cut -d' ' -f1-3)" = "method bits bytes/token" ]
    [ "$(sed -n '2p' t | cut -d' ' -f1)" = plain ]
    sed -n '4,$p' t > layers
    [ "$(sed -n '2p' layers)" = "error of attention by layer" ]
    [ "$(sed -n '3p' layers | tr -s ' ')" = "method 0 1" ]
    grep -qE '^int8 +0\.[0-9]+ +0\.[0-9]+$' layers
    [ "$(wc -l < layers)" -eq 4 ]
    quantize-kv -q --evaluate --seq-len 128 --windows 1 --records 1 --lengths 64,100 --depths 2 --repeats 1 --steps 0 \
        --methods int8 run/ data/val > t
    grep -qE '^ +64 +100 tokens$' t
    [ "$(grep -c '^100 %' t)" -eq 2 ]
}

@test "quantize-kv: passkeys have a map and a picture; times are measured" {
    quantize-kv -q --evaluate --seq-len 128 --windows 1 --records 1 --lengths 64,100 --depths 3 --repeats 2 --steps 3 \
        --methods int8 --json -o map.svg run/ data/val > a
    grep -q '"passkey_lengths":\[64,100\],"passkey_depths":3,"passkeys_each":2' a
    [ "$(grep -oE '"passkey_map":\[\[[0-9.]+,[0-9.]+\],\[[0-9.]+,[0-9.]+\],\[[0-9.]+,[0-9.]+\]\]' a | wc -l)" -eq 2 ]
    run ! grep -q '"tokens_per_second":null' a
    grep -qE '"key_outliers":\[[1-9][0-9.]*,[1-9][0-9.]*\]' a
    grep -q '<svg' map.svg
    grep -q '50 %' map.svg
}

@test "quantize-kv: methods that drop tokens: bytes of those that stay, the plain perplexity of the same tokens, questions in prompts" {
    quantize-kv -q --evaluate --seq-len 128 --windows 2 --records 1 --steps 0 --repeats 1 --depths 1 --lengths 100 \
        --methods "int4:sinks=64,residual=64 streaming:sinks=4,window=60" --json run/ data/val > a
    of() { tr '{' '\n' < a | grep "\"method\":\"$1" | grep -oE "\"$2\":[^,]*" | cut -d: -f2; }
    plain=$(of plain bytes_per_token)
    [ "$(of int4 bytes_per_token)" = "$plain" ] && [ "$(of int4 bytes_per_coded_token)" -lt "$((plain / 2))" ]
    [ "$(of streaming bytes_per_token)" -eq "$((plain / 2))" ] && [ "$(of streaming bytes_per_coded_token)" = "$plain" ]
    [ "$(of int4 perplexity_reference)" = "$(of plain perplexity)" ]
    [ "$(of streaming perplexity_reference)" != "$(of plain perplexity)" ]
    [ "$(of int4 passkeys_observed)" = null ] && [[ $(of streaming passkeys) == 0* && $(of streaming passkeys_observed) == 0* ]]
}

@test "quantize-kv: windows are parts of one document, of text and of shards" {
    text() { head -c "$2" corpus.txt | tail -c "$1" | tr -c 'a-z' ' '; }
    long1=$(text 1400 1400) long2=$(text 900 5000) short=$(text 60 3000)
    printf '{"text":"%s"}\n' "$short" "$long1" "$short" "$long2" > mixed.jsonl
    printf '{"text":"%s"}\n' "$long1" "$long2" > long.jsonl
    shard-data -q --tokenizer tok/ --val-fraction 0 --no-shuffle -f -o shards mixed.jsonl
    measure() { quantize-kv -q --evaluate --seq-len 64 --windows 200 --steps 0 --repeats 0 --methods int4 --json "${@:3}" run/ "$2" | sed 's/"data":"[^"]*",//' > "$1"; }
    measure a mixed.jsonl
    measure b long.jsonl
    cmp a b
    measure c mixed.jsonl --no-documents
    measure d long.jsonl --no-documents
    run ! cmp -s c d
    measure e shards/train
    of() { grep -o "\"$1\":[0-9.]*" "$2" | head -n 1 | cut -d: -f2; }
    [ "$(of windows a)" -ge 6 ] && [ "$(of windows c)" -gt "$(of windows a)" ]
    [ "$(of windows e)" -ge "$(of windows a)" ] && [ "$(of windows e)" -lt "$(of windows c)" ]
    quantize-kv -q --calibrate --method kvquant --candidates none --seq-len 64 --windows 200 -o a.kv run/ mixed.jsonl
    quantize-kv -q --calibrate --method kvquant --candidates none --seq-len 64 --windows 200 -o b.kv run/ long.jsonl
    cmp a.kv b.kv
    run --separate-stderr quantize-kv --evaluate --seq-len 128 --windows 1 --steps 0 --repeats 0 --methods int8 run/ data/val
    [ "$status" -eq 0 ]
    [[ $stderr == *"data/val: no document has 128 tokens, the longest "*": windows run across documents"* ]]
}

@test "quantize-kv: methods that cannot run are rows, status 3" {
    run -3 --separate-stderr report --methods "int8 layers.9=int4 kvquant:bits=2,sinks=2"
    [[ $output == *$'\nlayers.9=int4 '*"has 2"* ]]
    [[ $output == *$'\nint8 '* ]]
    [ "$(wc -l <<< "${output%%$'\n\n'*}")" -eq 5 ]
}

@test "quantize-kv: refusals" {
    refuse() { # PATTERN OPTION ...: one line, status 2
        local pattern=$1
        shift
        run -2 --separate-stderr quantize-kv -q "$@"
        # shellcheck disable=SC2053
        [[ $stderr == "quantize-kv: "$pattern ]] || { echo "$*: $stderr"; return 1; }
        [ "$(wc -l <<< "$stderr")" -eq 1 ]
    }
    refuse "command line: nothing to do: *" run/ data/val
    refuse "--calibrate, --evaluate: *" --calibrate --evaluate --method kvquant -o k run/ data/val
    refuse "-o: it is missing: *" --calibrate --method kvquant run/ data/val
    refuse "--method: it is missing: *" --calibrate -o k run/ data/val
    refuse "*'int4' is not a method with a calibration: *" --calibrate --method int4 -o k run/ data/val
    refuse "*bits of kvquant is a whole number from 1 to 5, not '9'*" --calibrate --method kvquant:bits=9 -o k run/ data/val
    refuse "*kvquant has no 'size': *" --calibrate --method kvquant:size=9 -o k run/ data/val
    refuse "--method: auto has no 'bits': *" --calibrate --method auto:bits=3 -o k run/ data/val
    refuse "--method: 'int4' is not a method with a calibration: give kvquant:bits=3, auto, fp8 or all" --calibrate --method "auto int4" -o k run/ data/val
    refuse "--method: no method is named: *" --calibrate --method " " -o k run/ data/val
    refuse "--candidates: auto needs candidates to choose from: *" --calibrate --method all --candidates none -o k run/ data/val
    refuse "--methods: it has no effect on --calibrate: *" --calibrate --method kvquant --methods int4 --seq-len 64 -o k run/ data/val
    refuse "--candidates: it has no effect on --evaluate: *" --evaluate --candidates int4 --methods int4 --seq-len 64 run/ data/val
    refuse "--table: --json prints no table: *" --evaluate --table --json --methods int4 --seq-len 64 run/ data/val
    refuse "--methods: no method is named: *" --evaluate --methods " " --seq-len 64 run/ data/val
    refuse "*there is no method 'int9': *" --evaluate --methods int8,int9 run/ data/val
    refuse "*kvquant has no 'size': *" --evaluate --methods kvquant:bits=3,size=2 run/ data/val
    refuse "--lengths: 'x': *" --evaluate --seq-len 128 --lengths 12,x run/ data/val
    refuse "data/val: no document has 128 tokens, *" --evaluate --seq-len 128 --documents --methods int8 run/ data/val
    refuse "--documents: it has no effect on cache files: *" --documents doc.kv -l
    refuse "passkeys: 20 tokens are too few *" --evaluate --seq-len 128 --lengths 20 run/ data/val
    refuse "--seq-len: 5000, but the model was made for * position*: *" --evaluate --seq-len 5000 --methods int8 run/ data/val
    refuse "--seq-len: 5000, but the model was made for *" --calibrate --method fp8 --seq-len 5000 -o k run/ data/val
    refuse "--candidates: the candidate 'h2o' is not one method: give *" --calibrate --method auto --candidates 'int4;h2o' -o k none/ data/val
    refuse "map.pdf: the name does not determine the format of the picture: *" --evaluate -o map.pdf none/ data/val
    refuse "map.svg: there are no passkeys to draw: *" --evaluate --seq-len 128 --repeats 0 --steps 0 --methods int8 -o map.svg run/ data/val
    [ ! -e k ] && [ ! -e map.svg ]
    run -1 --separate-stderr quantize-kv --evaluate none/ data/val
    [[ $stderr == "quantize-kv: none/: cannot open: "* ]]
    run -1 --separate-stderr quantize-kv --evaluate run/ data/none
    [[ $stderr == "quantize-kv: data/none: no token dataset: "* ]]
}
