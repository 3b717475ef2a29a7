#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Conventions of all tools, checked for every tool in the build folder.
bats_require_minimum_version 1.5.0

setup() {
    BIN=${LM_TEST_BUILD:-$BATS_TEST_DIRNAME/../../build}/bin
    cd "$BATS_TEST_TMPDIR"
}

@test "there are tools" {
    ls "$BIN"/*
}

@test "--help: status 0, at most 60 lines of 80 columns, nothing on standard error" {
    for t in "$BIN"/*; do
        run --separate-stderr "$t" --help
        [ "$status" -eq 0 ] || { echo "$t: status $status"; false; }
        [ -z "$stderr" ] || { echo "$t: $stderr"; false; }
        [ "${#lines[@]}" -le 60 ] || { echo "$t: ${#lines[@]} lines"; false; }
        [ "$(printf '%s\n' "$output" | wc -l)" -le 60 ] || { echo "$t: too many lines"; false; }
        for l in "${lines[@]}"; do
            [ "${#l}" -le 80 ] || { echo "$t: ${#l} columns: $l"; false; }
        done
        [[ ${lines[0]} == "Usage: ${t##*/} "* ]] || { echo "$t: ${lines[0]}"; false; }
        [[ $output == *"See ${t##*/}(1)." ]] || { echo "$t: no 'See NAME(1).' at the end"; false; }
        run "$t" -h
        [ "$status" -eq 0 ]
    done
}

@test "--version: two lines, the first with name and version" {
    for t in "$BIN"/*; do
        run --separate-stderr "$t" --version
        [ "$status" -eq 0 ]
        [ "${#lines[@]}" -eq 2 ] || { echo "$t: ${#lines[@]} lines"; false; }
        [[ ${lines[0]} =~ ^${t##*/}\ \(lmutils\)\ [0-9]+\.[0-9]+\.[0-9]+$ ]] || { echo "${lines[0]}"; false; }
        [[ ${lines[1]} == *cpu=* ]]
    done
}

@test "an unknown option: status 2, one line, the nearest name" {
    for t in "$BIN"/*; do
        run --separate-stderr "$t" --hepl
        [ "$status" -eq 2 ] || { echo "$t: status $status"; false; }
        [ -z "$output" ]
        [ "${#stderr_lines[@]}" -eq 1 ]
        [[ $stderr == "${t##*/}: --hepl: unknown option: did you mean --help?" ]] || { echo "$stderr"; false; }
        run "$t" --no-such-option-anywhere
        [ "$status" -eq 2 ]
        run "$t" -%
        [ "$status" -eq 2 ]
    done
}

@test "an empty value is refused, except for text" {
    for t in "$BIN"/*; do
        while read -r option; do
            run --separate-stderr "$t" "--$option" '' x y
            [ "$status" -eq 2 ] || { echo "$t --$option: status $status: $stderr"; false; }
            [ "${#stderr_lines[@]}" -eq 1 ]
            [[ $stderr == *": --$option: the value is empty: give one, or leave the option out" ]] || { echo "$stderr"; false; }
        done < <("$t" --help | sed -nE 's/^  (-., |    )--([a-z-]+) (PATH|FILE|LIST|MODEL|SHARD|DATA|RUN|DEST|KEY|GLOB|CODEC|V)( .*)?$/\2/p')
    done
    run "$BIN/train" --config <(echo '{"val": ""}') x y
    [ "$status" -eq 2 ]
    [[ $output == *": --val: the value is empty"* ]]
}

@test "long options are not abbreviated, and flags take no value" {
    for t in "$BIN"/*; do
        run "$t" --hel
        [ "$status" -eq 2 ]
        run --separate-stderr "$t" --print-config=yes
        [ "$status" -eq 2 ]
        [[ $stderr == *"takes no value"* ]]
        run --separate-stderr "$t" --config
        [ "$status" -eq 2 ]
        [[ $stderr == *"a value is missing"* ]]
    done
}

@test "a full standard output: status 1 and a message" {
    for t in "$BIN"/*; do
        for o in --help --version --print-config --completion=bash; do
            status=0
            "$t" $o > /dev/full 2> err || status=$?
            [ "$status" -eq 1 ] || { echo "$t $o: status $status"; false; }
            [ "$(cat err)" = "${t##*/}: standard output: cannot write: No space left on device: free space on the disk" ]
        done
    done
}

@test "a full standard output, written in large pieces: the reason is kept" {
    for o in --list-optimizers '--list-optimizers --json'; do
        status=0
        # shellcheck disable=SC2086
        train $o > /dev/full 2> err || status=$?
        [ "$status" -eq 1 ]
        [ "$(cat err)" = "train: standard output: cannot write: No space left on device: free space on the disk" ]
    done
}

# The disk has room again after the failure.
@test "after a failed write nothing more is written, and the reason is kept" {
    if ldd "$BIN/train" | grep -q libasan; then
        skip "fault injection and AddressSanitizer both want to be malloc"
    fi
    for o in --help --list-optimizers '--list-optimizers --json'; do
        status=0
        # shellcheck disable=SC2086
        LM_INJECT=write:1 LD_PRELOAD=$BIN/../tests/inject/inject.so train $o > out 2> err || status=$?
        [ "$status" -eq 1 ]
        [ ! -s out ]
        [ "$(cat err)" = "train: standard output: cannot write: No space left on device: free space on the disk" ]
    done
}

@test "a reader that has exited: --help, --version, --print-config and completions are silent" {
    for t in "$BIN"/*; do
        for o in --help --version --print-config --completion=zsh; do
            for ignored in '' 'trap "" PIPE;'; do
                bash -c "{ sleep 0.03; $ignored exec '$t' $o 2> err; } | true"
                [ ! -s err ] || { echo "$t $o: $(cat err)"; false; }
            done
        done
    done
}

@test "--print-config is a valid --config and gives the same again" {
    for t in "$BIN"/*; do
        "$t" --print-config > a.json
        "$t" --config a.json --print-config > b.json
        cmp a.json b.json || { echo "$t"; false; }
    done
}

@test "an invalid config: status 2 and the position" {
    for t in "$BIN"/*; do
        echo '{"progres": true}' > bad.json
        run --separate-stderr "$t" --config bad.json
        [ "$status" -eq 2 ]
        [[ $stderr == *"bad.json: progres: no option of this name: did you mean 'progress'?" ]] || { echo "$stderr"; false; }
        echo '{"progress": "yes"}' > bad.json
        run --separate-stderr "$t" --config bad.json
        [ "$status" -eq 2 ]
        [[ $stderr == *"true or false is needed"* ]]
        echo '{"progress": tru}' > bad.json
        run --separate-stderr "$t" --config bad.json
        [ "$status" -eq 2 ]
        [[ $stderr == *"line 1 column"* ]]
        run --separate-stderr "$t" --config none.json
        [ "$status" -eq 1 ]
        [[ $stderr == *"none.json: cannot open: No such file or directory"* ]]
    done
}

@test "--print-config keeps the spelling of numbers" {
    for n in 3.7 0.1 1e-05; do
        echo "{\"threads\": $n}" > n.json
        run convert-model --config n.json x -o y
        [ "$status" -eq 2 ]
        [[ "$output" == *"'$n'"* ]]
    done
    echo '{"lr": 3.7}' > n.json
    train --config n.json --print-config | grep -q '"lr": 3.7,*$'
    echo '{"threads": 2.0}' > n.json
    train --config n.json --print-config | grep -q '"threads": 2,*$'
}

@test "the command line overrides --config, which overrides the environment" {
    for t in "$BIN"/*; do
        "$t" --print-config | grep -q '"threads"' || continue
        echo '{"threads": 3}' > c.json
        LM_THREADS=2 "$t" --print-config | grep -q '"threads": 2'
        LM_THREADS=2 "$t" --config c.json --print-config | grep -q '"threads": 3'
        LM_THREADS=2 "$t" --config c.json -j 4 --print-config | grep -q '"threads": 4'
        LM_THREADS=2 "$t" --config c.json -j4 --print-config | grep -q '"threads": 4'
        LM_THREADS=2 "$t" --threads=1k --config c.json --print-config | grep -q '"threads": 1000'
        run "$t" -j 2000
        [ "$status" -eq 2 ]
        LM_THREADS=many run "$t" --print-config
        [ "$status" -eq 2 ]
        [[ $output == *LM_THREADS* ]]
    done
}

@test "the last of --x and --no-x wins" {
    for t in "$BIN"/*; do
        "$t" --no-progress --print-config | grep -q '"progress": false'
        "$t" --no-progress --progress --print-config | grep -q '"progress": true'
    done
}

@test "verbosity: a closing line by default; -q: warnings, errors, nothing" {
    awk 'BEGIN { for (i = 0; i < 50; i++) print "one two three four" i }' > t.txt
    t() { "$BIN/train-tokenizer" -f -V 9999 -o t.json "$@" 2>&1; } # warns that nothing is left to merge
    [ "$(t t.txt | wc -l)" -eq 2 ]
    [ "$(LM_LOG=notice t t.txt)" = "$(t t.txt)" ]
    [[ "$(LM_LOG=warn t t.txt)" == "train-tokenizer: only "* ]]
    [ "$(LM_LOG=warn t t.txt | wc -l)" -eq 1 ]
    [ "$(t -v t.txt | wc -l)" -gt 2 ]
    for quiet in -q -qv\ -q '-v -q -q'; do
        [ -z "$(t $quiet t.txt)" ] || { echo "$quiet"; false; }
        run t $quiet none.txt
        [ "$status" -eq 1 ]
        [ "${#lines[@]}" -eq 1 ] || { echo "$quiet: $output"; false; }
    done
    LM_LOG=error run t none.txt
    [ "${#lines[@]}" -eq 1 ]
    [ "$(t -q -v t.txt)" = "$(t t.txt)" ]
    run t -qq none.txt
    [ "$status" -eq 1 ]
    [ -z "$output" ]
    LM_LOG=2 run t t.txt
    [ "$status" -eq 2 ]
    [[ $output == *"choose from none, error, warn, notice, info, debug"* ]]
}

@test "invalid values of environment variables: status 2" {
    for t in "$BIN"/*; do
        LM_CPU=abacus run "$t" --print-config
        [ "$status" -eq 2 ]
        LM_LOG=loud run "$t" --print-config
        [ "$status" -eq 2 ]
    done
}

@test "--json, --seed, -j and -q: every tool has them, or lmutils(7) lists it as an exception" {
    page=${LM_TEST_ROOT:-$BATS_TEST_DIRNAME/../..}/man/man7/lmutils.7
    for t in "$BIN"/*; do
        n=${t##*/}
        for o in json seed threads; do
            fl="-$o"
            [ $o != threads ] || fl=j
            if grep -q "^\.It $n Ta Fl $fl Ta none: " "$page"; then
                why=$(sed -n "s/^\.It $n Ta Fl $fl Ta none: //p" "$page")
                run --separate-stderr "$t" "--$o"
                [ "$status" -eq 2 ]
                [ "$stderr" = "$n: --$o: unknown option: leave it out: $why" ] || { echo "$stderr"; false; }
            else
                "$t" --print-config | grep -q "^  \"$o\": " || { echo "$n has no --$o, and lmutils(7) does not say so"; false; }
            fi
        done
        grep -q "^\.It $n Ta Fl j " "$page" || "$t" -j 1 -qq --print-config > /dev/null
        "$t" -q --quiet --print-config > /dev/null
    done
    run "$BIN/plot-run" -j 2
    [[ $output == *"one thread is enough"* ]]
}

@test "--json: lists and decompression report as JSON, too" {
    cd "$BATS_TEST_TMPDIR"
    init-model --list --json > presets
    grep -q '^{"preset":"gpt2-124m","model_type":"gpt2","parameters":124439808,.*,"vocab_size":50257}$' presets
    [ "$(wc -l < presets)" -eq "$(init-model --list | wc -l)" ]
    merge-models --list --json > methods
    grep -q '^{"method":"slerp",.*,"base":"required","parameters":\["t"\]}$' methods
    init-model -q llama-1m --set vocab_size=64 --set num_hidden_layers=1 -o m
    compress-ckpt -q m -o m.lmz
    [[ "$(compress-ckpt -q -d --json m.lmz -o back)" == '{"input":"m.lmz","output":"back","files":2,"bytes":'*',"lost":0}' ]]
    for how in '-c m' '-d -c m.lmz' '-d --tensor lm_head.weight m.lmz'; do
        run --separate-stderr compress-ckpt --json $how
        [ "$status" -eq 2 ]
        [ -z "$output" ]
        [ "$stderr" = "compress-ckpt: --json: the product goes to standard output, too: name a file with -o" ]
    done
}

@test "--json of a merge: a model given twice is one input with both weights" {
    cd "$BATS_TEST_TMPDIR"
    init-model -q llama-1m --set vocab_size=64 --set num_hidden_layers=1 -o m
    merge-models --json -m linear m:1 m:3 --no-normalize -o n > report
    [ "$(grep -o '"effective_weight":[^,}]*' report)" = '"effective_weight":4' ]
}

@test "completion: an unknown shell is refused, bash accepts its file" {
    for t in "$BIN"/*; do
        run "$t" --completion=tcsh
        [ "$status" -eq 2 ]
        "$t" --completion=bash | bash -n
        "$t" --completion=bash | grep -q -- --help
    done
}

@test "start-up time is reported" {
    for t in "$BIN"/*; do
        start=$(date +%s%N)
        for i in 1 2 3 4 5 6 7 8 9 10; do "$t" --help > /dev/null; done
        end=$(date +%s%N)
        echo "# ${t##*/} --help: $(((end - start) / 10000)) us" >&3
    done
}
