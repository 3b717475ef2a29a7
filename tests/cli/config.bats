#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# --print-config and --config, of every tool and every option in its table.
bats_require_minimum_version 1.5.0

setup() {
    BIN=${LM_TEST_BUILD:-$BATS_TEST_DIRNAME/../../build}/bin
    ROOT=${LM_TEST_ROOT:-$BATS_TEST_DIRNAME/../..}
    cd "$BATS_TEST_TMPDIR"
}

# Of the table on standard input, each option with a legal value that is not the built-in one, as it
# is written on a command line, one a line.  default.json: the options as built in.
assignments() {
    awk -F '\t' '
        NR == FNR { if (match($0, /^  "[^"]*": /)) { key = substr($0, 4, RLENGTH - 6); value[key] = $0; sub(/^[^:]*: /, "", value[key]); sub(/,$/, "", value[key]) }; next }
        $1 == "config" || $1 == "plan" || $1 == "print-config" || $2 == "action" || $2 == "also" || $2 == "instead" { next }
        $2 == "flag" { print "--" (value[$1] == "true" ? "no-" : "") $1; next }
        $2 == "count" || $2 == "level" || $2 == "bytes" {
            v = $3 + 1 > $4 ? $4 : $3 + 1
            if (v == value[$1]) v = v + 1 > $4 ? $3 : v + 1
            printf "--%s=%d\n", $1, v; next
        }
        $2 == "real" || $2 == "time" {
            v = $3 + 0.3125 * ($4 - $3 > 1e3 ? 1e3 : $4 - $3)
            printf "--%s=%.9g\n", $1, v; next
        }
        $2 == "choice" { n = split($5, c, " "); print "--" $1 "=" (value[$1] == "\"" c[n] "\"" ? c[1] : c[n]); next }
        $2 == "device" { print "--" $1 "=cuda:3"; next }
        { print "--" $1 "=a \"b\" \\ ü,=" }
        $2 == "list" { print "--" $1 "=b" }
        $2 !~ /^(text|list)$/ { print "unknown kind " $2 > "/dev/stderr"; exit 1 }
    ' default.json -
}

@test "every option of every tool: --print-config prints it, --config reads it, byte for byte" {
    for t in "$BIN"/*; do
        "$t" --print-config > default.json
        "$t" --completion=table | assignments > all
        [ -s all ]
        mapfile -t options < all
        for o in "${options[@]}"; do
            "$t" "$o" --print-config > a.json || { echo "$t $o"; false; }
            "$t" --config a.json --print-config > b.json || { echo "$t $o: its own config is refused"; false; }
            cmp a.json b.json || { echo "$t $o"; diff a.json b.json; false; }
            ! diff -q a.json default.json > same || { echo "$t $o: is not in the config"; false; }
        done
        "$t" "${options[@]}" --print-config > a.json
        "$t" --config a.json --print-config > b.json
        cmp a.json b.json || { echo "$t with all options"; false; }
        # the keys are those of the table
        grep -oE '^  "[a-z0-9-]+"' a.json | tr -d ' "' | grep -v '^given$' | sort > keys
        "$t" --completion=table | awk -F '\t' '$2 !~ /^(action|also|instead)$/ { print $1 }' |
            grep -vE '^(config|plan|print-config)$' | sort | diff keys - || { echo "$t"; false; }
    done
}

@test "a given default value stays given; an option not given stays not given" {
    "$BIN/train" --steps 1000 --print-config > a.json
    grep -A 1 '"given": \[' a.json | grep -q '"steps"'
    "$BIN/train" --config a.json --print-config | cmp - a.json
    "$BIN/train" --print-config | grep -q '"given": \[\]'
}

@test "a printed config can be edited: changed values count as given" {
    "$BIN/train" --print-config | sed 's/"steps": 1000/"steps": 7/' > a.json
    "$BIN/train" --config a.json --print-config > b.json
    grep -q '"steps": 7' b.json
    grep -A 1 '"given": \[' b.json | grep -q '"steps"'
}

@test "the config overrides the environment also for options not given" {
    "$BIN/train" --print-config > a.json
    LM_THREADS=3 "$BIN/train" --config a.json --print-config | cmp - a.json
}

@test "values that JSON cannot represent are refused" {
    run --separate-stderr "$BIN/clean-data" --separator $'\xff' --print-config
    [ "$status" -eq 2 ]
    [ -z "$output" ]
    [[ $stderr == "clean-data: --separator: is not UTF-8, which JSON needs: "* ]]
}

@test "'given' of a config: names of options" {
    for bad in '{"given": "steps"}' '{"given": [1]}' '{"given": ["stepz"]}'; do
        echo "$bad" > bad.json
        run --separate-stderr "$BIN/train" --config bad.json --print-config
        [ "$status" -eq 2 ]
        [[ $stderr == "train: bad.json: "* ]]
    done
}

@test "a JSON config with a number that would be rounded, or a string that would be cut, is refused" {
    for bad in '{"lr": 1e-400}' '{"lr": "0x1p-3"}' '{"lr": "inf"}' '{"lr": -1e-330}' '{"tensorboard": "a\u0000b"}' \
        '{"tensorboard": "1e-400", "lr": 1e-99999}'; do
        echo "$bad" > bad.json
        run --separate-stderr "$BIN/train" --config bad.json --print-config
        [ "$status" -eq 2 ] || { echo "$bad"; false; }
        [ "${#stderr_lines[@]}" -eq 1 ]
    done
    echo '{"tensorboard": "1e-400 \" 0x10 \\", "lr": 1e-3}' > good.json
    "$BIN/train" --config good.json --print-config | grep -q '"lr": 0.001'
}

@test "hexadecimal, infinite, undefined and vanishing numbers are refused by every option that takes a number" {
    for t in "$BIN"/*; do
        "$t" --completion=table | awk -F '\t' '$2 ~ /^(count|level|bytes|real|time)$/ { print $1 }' > numbers
        cat numbers >> all-numbers
        mapfile -t names < numbers
        all=(0X1P2 -inf infinity nan 1e999 '') # for the first option; all options share one reader of numbers
        for n in "${names[@]}"; do
            for v in 0x1 inf 1e-400 "${all[@]}"; do
                run --separate-stderr "$t" "--$n=$v" --print-config
                [ "$status" -eq 2 ] || { echo "$t --$n=$v: status $status"; false; }
                [[ $stderr == "${t##*/}: --$n: '$v' is not a "* ]] || { echo "$stderr"; false; }
            done
            all=()
        done
    done
    [ "$(wc -l < all-numbers)" -gt 100 ]
}

# again TOOL OPTION ... -- OPERAND ...: run it, then once more from its own config; the outputs are in 1/ and 2/.
again() {
    local tool=$BIN/$1 options=()
    shift
    while [ "$1" != -- ]; do
        options+=("$1")
        shift
    done
    shift
    rm -rf 1 2
    mkdir 1 2
    (cd 1 && "$tool" "${options[@]}" --print-config > ../config.json)
    (cd 1 && "$tool" "${options[@]}" "$@" > stdout) || { echo "$tool"; false; }
    (cd 2 && "$tool" --config ../config.json "$@" > stdout) || { echo "$tool: its own config is refused"; false; }
}

# Compares the tensors only, because the history in the file has the command line.
same_model() { "$BIN/inspect-model" --check --strict 1/"$1" 2/"$1" > /dev/null; }

@test "a printed config reproduces the call: tools that read text" {
    export PATH=$BIN:$PATH
    sh "$ROOT/tests/cli/examples/eval-model.sh"
    again clean-data --rules gopher --dedup exact --split blank --language en --gopher-stop-words 1 --report r.json -- ../corpus.txt
    cmp 1/stdout 2/stdout
    again train-tokenizer -q --vocab-size 300 --pattern llama3 --special '<x>' -o t.json -- ../corpus.txt
    cmp 1/t.json 2/t.json
    again shard-data -q --tokenizer ../tok/tokenizer.json --split blank --val-fraction 0.2 --seed 3 -o d/ -- ../corpus.txt
    cmp 1/d/train.bin 2/d/train.bin
    cmp 1/d/val.idx 2/d/val.idx
}

@test "a printed config reproduces the call: tools that make and read models" {
    export PATH=$BIN:$PATH
    sh "$ROOT/tests/cli/examples/eval-model.sh"
    again init-model -q --set num_hidden_layers=1 --set hidden_size=64 --seed 5 --tokenizer ../tok/tokenizer.json -o m/ -- llama-1m
    same_model m
    again eval-model --stride 7 --seq-len 32 --max-loss 100 -- ../run ../held-out.txt
    cmp <(sed 's/"seconds.*"seq_len/"seq_len/' 1/stdout) <(sed 's/"seconds.*"seq_len/"seq_len/' 2/stdout)
    again generate -q -p 'The system' -p 'A word' -n 9 --temperature 1 --seed 4 -- ../run
    cmp 1/stdout 2/stdout
    again train -q --steps 2 --lr 1e-3 --batch-size 2 --seq-len 32 --peak-tflops 0 -o r/ -- ../run ../data
    same_model r
    again inspect-model --stats --only '*norm*' -- ../run
    cmp 1/stdout 2/stdout
    for type in f32 q8_0; do
        again convert-model -q --type $type -o m.gguf -- ../run
        "$BIN/convert-model" -q 1/m.gguf -o 1/back
        "$BIN/convert-model" -q 2/m.gguf -o 2/back
        same_model back
    done
    again convert-model -q --dtype f16 --max-shard-size 200K -o m/ -- ../run
    same_model m
    again compress-ckpt -q -7 -o m.lmz -- ../run
    cmp 1/m.lmz 2/m.lmz
}

@test "a printed config reproduces the call: merges by options, search and YAML" {
    export PATH=$BIN:$PATH
    sh "$ROOT/tests/cli/examples/merge-models.sh"
    mv mergekit.yaml m.yaml && sed 's/model: /&..\//' m.yaml > mergekit.yaml
    again merge-models -q --method dare_ties --density 0.5 --weight 0.3 --no-normalize --base ../base --seed 7 -o m/ -- ../math ../code
    same_model m
    again merge-models -q --method linear -o m/ -- ../math:0.2 ../code:0.8
    same_model m
    again merge-models -q --config ../mergekit.yaml -o m/ --
    same_model m
    again merge-models -q --method dem --base ../base --search grid --grid 0,1 --val ../data-math/val --val ../data-code/val -o m/ -- ../math ../code
    same_model m
    cmp <(sed 's/"seconds":[^,}]*//' 1/stdout) <(sed 's/"seconds":[^,}]*//' 2/stdout)
}

@test "a config may name a YAML file only for the tool that reads one" {
    echo '{"config": "none.yaml"}' > c.json
    run --separate-stderr "$BIN/merge-models" --config c.json
    [ "$status" -eq 2 ]
    [[ $stderr == "merge-models: c.json: config: "* ]]
    run --separate-stderr "$BIN/train" --config c.json
    [ "$status" -eq 2 ]
    [[ $stderr == "train: c.json: config: no option of this name"* ]]
}

@test "numbers in lists, operands and --set follow the same rules" {
    export PATH=$BIN:$PATH
    sh "$ROOT/tests/cli/examples/merge-models.sh"
    echo text > a.txt
    for v in 0x1 inf nan 1e-400; do
        run merge-models -m dem -b base math --weight "0.1,$v" -o bad
        [ "$status" -eq 2 ]
        [[ $output == *"weight: '$v' is not a number"* ]]
        run merge-models -m dem -b base "math:weight=$v" -o bad
        [ "$status" -eq 2 ]
        run merge-models -m dem -b base math --search grid --grid "0,$v" --val data-math/val -o bad
        [ "$status" -eq 2 ]
        run clean-data -r gopher --gopher-top-ngrams "0.2,$v,0.1" a.txt
        [ "$status" -eq 2 ]
        run init-model llama-1m --set "rope_theta=$v" -o bad
        [ "$status" -eq 2 ] || { echo "$v: $output"; false; }
        run shard-data --tokenizer base -w "$v" -o bad a.txt
        [ "$status" -eq 2 ]
        run train base data-math -o bad --save-every "${v}s"
        [ "$status" -eq 2 ]
        printf 'merge_method: linear\nmodels:\n  - model: math\n    parameters: {weight: %s}\n' "$v" > bad.yaml
        run merge-models --config bad.yaml -o bad
        [ "$status" -ne 0 ]
        [ ! -e bad ]
    done
    # a number longer than any buffer is read completely
    run clean-data -r gopher --gopher-top-ngrams "0.2,0.10000000000000000000000000000000000000000x,0.1" a.txt
    [ "$status" -eq 2 ]
}
