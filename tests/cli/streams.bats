#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Models as streams: every tool reads and writes every form, in memory bounded by the largest tensor; inputs may
# be hostile, outputs are complete or absent.

bats_require_minimum_version 1.5.0

setup() {
    cd "$BATS_TEST_TMPDIR"
    export SOURCE_DATE_EPOCH=0
}

# init [OPTION ...]: a model of half a megabyte
init() {
    init-model -q llama-1m --set num_hidden_layers=1 --set hidden_size=64 --set vocab_size=1000 "$@"
}
export -f init

# one STATUS TEXT ... : the run failed with this status, in one line that contains all the texts
one() {
    local want=$1 text
    shift
    echo "$status: $output"
    [ "$status" -eq "$want" ]
    [ "${#lines[@]}" -eq 1 ]
    for text; do
        [[ "$output" == *"$text"* ]] || return 1
    done
}

# header TENSORS BYTES: the header of a safetensors file of F32 tensors with BYTES bytes each
header() {
    local h='{' i at=0
    for ((i = 0; i < $1; i++)); do
        h+="\"t$i\":{\"dtype\":\"F32\",\"shape\":[$(($2 / 4))],\"data_offsets\":[$at,$((at + $2))]},"
        at=$((at + $2))
    done
    h=${h%,}'}'
    while [ $((${#h} % 8)) -ne 0 ]; do h+=' '; done
    # shellcheck disable=SC2059
    printf "$(printf '\\%03o\\%03o\\000\\000\\000\\000\\000\\000' $((${#h} % 256)) $((${#h} / 256)))"
    printf '%s' "$h"
}

# peak COMMAND: MiB of memory in the last line of its messages with -v
peak() {
    sed -n 's/.*peak memory \([0-9]*\).*/\1/p'
}

@test "streams: init-model writes every form, with the same model" {
    init -o m/
    for form in tar tar.gz tar.zst tar.xz tar.bz2 tar.lz4 lmz safetensors; do
        init -o m.$form
        inspect-model -q --check m/ m.$form > /dev/null
        cat m.$form | inspect-model -q --check m/ - > /dev/null
    done
    init -o - > out.tar
    tar -xOf out.tar model.safetensors | inspect-model -q --check m/ - > /dev/null
    [ "$(tar -tf out.tar | tail -n 1)" = model.safetensors ]
    [ -z "$(find . -name '.*.tmp.*')" ]
}

@test "streams: tar's own archives are read, with and without a folder's name" {
    init --max-shard-size 100k -o m/
    tar -cf a.tar m
    tar -czf b.tar.gz -C m .
    (cd m && tar --format=pax -cf ../c.tar -- *)
    for tar in a.tar b.tar.gz c.tar; do
        inspect-model -q --check m/ $tar > /dev/null
        cat $tar | inspect-model -q --check - m/ > /dev/null
    done
}

@test "streams: eval-model and generate read the tokenizer from the stream" {
    sh "${LM_TEST_ROOT:-$BATS_TEST_DIRNAME/../..}/tests/cli/examples/generate.sh"
    generate -q run/ -p 'The ' -n 8 --temperature 0 > folder
    tar -cf run.tar run
    tar -cf front.tar -C run config.json tokenizer.json model.safetensors
    for tar in run.tar front.tar; do
        generate -q $tar -p 'The ' -n 8 --temperature 0 | cmp - folder
        cat $tar | generate -q - -p 'The ' -n 8 --temperature 0 | cmp - folder
    done
    eval-model -q run/ data/val | sed 's/.*"loss"/"loss"/; s/"seconds".*//' > loss
    cat front.tar | eval-model -q - data/val | sed 's/.*"loss"/"loss"/; s/"seconds".*//' | cmp - loss
    run bash -c "cat front.tar | eval-model -v - data/val 2>&1 | grep -c spooled"
    [ "$output" = 0 ] # small files first: nothing is spooled
    run bash -c "cat front.tar | train -q - data --steps 2 -o run2 && inspect-model -q run2"
    [ "$status" -eq 0 ]
    cmp run2/tokenizer.json run/tokenizer.json
}

@test "streams: standard input is one input only" {
    run inspect-model - -
    one 2 "standard input"
    run eval-model -
    one 2 "standard input" "the model is read from it"
    run generate -
    one 2 "standard input" "the model is read from it"
    run generate - - a.jsonl
    one 2 "standard input"
}

@test "streams: one pipe under two names is refused by every tool, for any use" {
    echo x > f
    while IFS='|' read -r first line; do
        run bash -c "cat f | $line"
        echo "$line"
        one 2 "$first: is the same stream as " "which can be read only once: name it once, or write it to a file first"
    done << 'EOF'
/dev/stdin|inspect-model - /dev/stdin
/dev/stdin|eval-model - /dev/stdin
/dev/stdin|eval-model - f --tokenizer /dev/stdin
standard input|eval-model f --tokenizer /dev/stdin
/dev/stdin|generate - --tokenizer /dev/stdin -p x
/dev/stdin|generate - /dev/stdin
standard input|generate f --tokenizer /dev/stdin
/dev/stdin|init-model - -t /dev/stdin -o bad
/dev/stdin|convert-model - -t /dev/stdin -o bad.gguf
/dev/stdin|convert-model - --imatrix /dev/stdin -o bad.gguf
/dev/stdin|compress-ckpt -t - /dev/stdin
/dev/stdin|compress-ckpt - --base /dev/stdin
/dev/stdin|train - f --val /dev/stdin -o bad
/dev/stdin|train-tokenizer - /dev/stdin -o bad.json
/dev/stdin|shard-data - -t /dev/stdin -o bad
/dev/stdin|shard-data -:2 /dev/stdin:1 -o bad
/dev/stdin|clean-data - --rules gopher --stop-words /dev/stdin
/dev/fd/0|plot-run - /dev/fd/0
/dev/fd/0|merge-models -m linear - f -o bad --search grid --val /dev/fd/0
EOF
    run bash -c "echo '{}' | plot-run --config - /dev/stdin"
    one 2 "/dev/stdin: is the same stream as standard input"
    run plot-run - - < f
    one 2 "standard input: is named for two inputs, and can be read only once"
    run train - f -o bad --val - < f
    one 2 "standard input: is named for two inputs, and can be read only once"
    [ ! -e bad ] && [ ! -e bad.json ] && [ ! -e bad.gguf ]
}

@test "streams: a config or a tokenizer from a stream has no files beside it and no file name" {
    echo words and words > words.txt
    train-tokenizer -q --vocab-size 258 -o alone/tok.json words.txt
    init-model -q llama-1m --set num_hidden_layers=1 --set hidden_size=64 --tokenizer alone/tok.json -o named
    while IFS='|' read -r text call; do
        run bash -c "echo junk | $call"
        one "${text%% *}" "standard input: ${text#* }"
    done << EOF
2 not valid JSON|clean-data --config -
1 is not a tokenizer|shard-data -t - words.txt -o bad
1 is not a tokenizer|generate named -p x --tokenizer -
EOF
    run bash -c "echo junk | plot-run -"
    [[ "$output" == *"standard input: no record with numbers in it"* ]]
    # the tokenizer_config.json of this folder belongs to another tokenizer
    echo junk > tokenizer_config.json
    shard-data -q -t - -o piped words.txt < alone/tok.json
    shard-data -q -t /dev/stdin -o again words.txt < <(cat alone/tok.json)
    cmp piped/train.bin again/train.bin
    init-model -q -o config < /dev/null <(cat named/config.json)
    inspect-model --check named config > /dev/null
    run init-model -o bad -t <(cat alone/tok.json) llama-1m
    one 2 "a tokenizer cannot be read from a pipe: write it to a file first"
    [ ! -e bad ]
}

@test "streams: an empty stream, a text, and a single file without its config are refused" {
    run inspect-model - < /dev/null
    one 1 "standard input: it is empty"
    run bash -c "echo hello | inspect-model -"
    one 2 "standard input: is not a model"
    init -o m.safetensors
    echo x > data
    run eval-model m.safetensors data
    one 2 "no config.json"
    run bash -c "cat m.safetensors | generate - -p a"
    one 2 "standard input" "no config.json"
}

@test "streams: memory is bounded by the largest tensor" {
    mkdir m
    echo '{"model_type": "llama"}' > m/config.json
    header 10 31457280 > m/model.safetensors
    truncate -s +314572800 m/model.safetensors || skip "no sparse files here"
    [ "$(cat m/model.safetensors | inspect-model -v - 2>&1 > /dev/null | peak)" -le 64 ]
    tar -cf - -C m config.json model.safetensors | inspect-model -v - 2> log > /dev/null
    [ "$(peak < log)" -le 64 ]
    tar -cf - -C m config.json model.safetensors | inspect-model -v --stats - 2> log > /dev/null
    [ "$(peak < log)" -le $((64 + 30)) ]
    run ! grep -q spooled log
    inspect-model -v --stats m/ 2> log > /dev/null
    [ "$(peak < log)" -le 64 ]
}

@test "streams: data that cannot be read in order are spooled to LM_TMPDIR, and removed" {
    init --max-shard-size 100k -o m/
    tar -cf s.tar m
    mkdir tmp
    cat s.tar | LM_TMPDIR=$PWD/tmp inspect-model -v - 2> log > /dev/null
    grep -q "standard input: spooled to $PWD/tmp" log
    [ -z "$(ls -A tmp)" ]
    run bash -c "cat s.tar | LM_TMPDIR=$PWD/none inspect-model -"
    one 1 "$PWD/none: cannot make a temporary file" "LM_TMPDIR"
}

@test "streams: an input is read to its end, so that its writer is not cut off" {
    init -o m.tar
    truncate -s +3M m.tar # more than any pipe buffers, after the end of the archive
    bash -c 'set -o pipefail; cat m.tar | inspect-model -q - > out'
    inspect-model -q m.tar | tail -n +2 | cmp - <(tail -n +2 out)
}

@test "streams: truncation is one line, whatever the form" {
    for form in tar tar.gz tar.zst tar.xz lmz safetensors; do
        init -o m.$form
        head -c 100000 m.$form > cut.$form
        run inspect-model --stats cut.$form
        one 1 "cut.$form"
        run bash -c "cat cut.$form | inspect-model -"
        one 1 "standard input"
    done
}

@test "streams: archives with names outside their folder are refused" {
    init -o m/
    echo secret > outside
    tar -cPf abs.tar "$PWD/outside"
    tar -cPf up.tar --transform='s,^,../,' outside
    cp -r m link && ln -s ../outside link/a.json && tar -cf link.tar link
    cp -r m dev && mkfifo dev/a && tar -cf dev.tar dev
    tar -cf twice.tar -C m . && tar -rf twice.tar -C m ./config.json
    while read -r name message; do
        run inspect-model "$name.tar"
        one 1 "$message"
        run bash -c "cat $name.tar | inspect-model -"
        one 1 "$message"
    done << 'END'
abs has an unsafe
up has an unsafe
link a link or a device
dev a link or a device
twice 'config.json' twice
END
}

@test "streams: archives as macOS, find and tar of ./m make them; more files than a model has" {
    init -o m/
    mkdir -p mac/m find/sub find/.git many
    cp m/* mac/m
    cp m/* find
    touch mac/._m mac/m/._config.json find/sub/x find/.git/x
    tar -cf mac.tar -C mac ./._m ./m
    tar -cf below.tar ./m
    tar -cf find.tar -C find ./sub/x ./.git/x ./config.json ./model.safetensors
    for tar in mac below find; do
        inspect-model -q --check m/ $tar.tar > /dev/null
        cat $tar.tar | inspect-model -q --check m/ - > /dev/null
    done
    (cd many && seq 1 17000 | xargs touch && cp ../m/* . && tar -cf ../many.tar .)
    for model in many many.tar; do
        run inspect-model $model
        one 1 "$model: it has more than 16384 files"
    done
    run bash -c "cat many.tar | inspect-model -"
    one 1 "standard input: it has more than 16384 files"
}

@test "streams: a file too large to be kept of a stream is not treated as absent" {
    init -o m/
    { echo '{'; head -c 70000000 /dev/zero | tr '\0' ' '; echo '}'; } > m/tokenizer.json
    tar -cf m.tar -C m config.json tokenizer.json model.safetensors
    run bash -c "cat m.tar | generate -q - -p a"
    one 1 "standard input: tokenizer.json: too large to be kept from a stream"
    inspect-model -q m.tar > /dev/null
    cat m.tar | inspect-model -q - > /dev/null
}

@test "streams: init-model reads a config and a tokenizer from every form" {
    sh "${LM_TEST_ROOT:-$BATS_TEST_DIRNAME/../..}/tests/cli/examples/generate.sh"
    tar -cf run.tar run
    compress-ckpt -q run -o run.lmz
    init-model -q run/config.json -t run -o want
    for model in run.tar run.lmz; do
        init-model -q $model -t $model -o got
        inspect-model -q --check want got > /dev/null
        cmp want/tokenizer.json got/tokenizer.json
        rm -r got
        cat $model | init-model -q run -t - -o got
        inspect-model -q --check want got > /dev/null
        cmp want/tokenizer.json got/tokenizer.json
        rm -r got
        cat $model | init-model -q - -t run -o got
        inspect-model -q --check want got > /dev/null
        rm -r got
    done
    run init-model - -t - -o got
    one 2 "standard input" "can be read only once"
    init -o m.safetensors
    run init-model m.safetensors -o got
    one 2 "m.safetensors" "no config.json"
    run init-model run -t m.safetensors -o got
    one 2 "m.safetensors" "no tokenizer"
    [ ! -e got ]
}

@test "streams: a full disk leaves no incomplete output, and existing files are kept" {
    for form in m/ m.tar m.tar.zst m.lmz m.safetensors; do
        init --seed 3 -o "$form"
        cp -r "${form%/}" kept
        run bash -c "trap '' XFSZ; ulimit -f 100; init-model -q -f llama-1m -o $form"
        one 1 "${form%/}" "File too large"
        diff -r "${form%/}" kept
        rm -r kept "${form%/}"
        run bash -c "trap '' XFSZ; ulimit -f 100; init -o $form"
        one 1 "File too large"
        [ -z "$(ls -A)" ]
    done
    run bash -c "init -o - > /dev/full"
    one 1 "standard output" "No space left on device"
    run init -o /dev/full
    one 1 "/dev/full" "No space left on device"
}

@test "streams: a spool that does not fit is one line too" {
    init --max-shard-size 100k -o m/
    tar -cf s.tar m
    rm -r m
    run bash -c "trap '' XFSZ; ulimit -f 100; cat s.tar | LM_TMPDIR=$PWD inspect-model -"
    one 1 "File too large"
    [ "$(ls -A)" = s.tar ]
}

@test "streams: the output is never one of the inputs" {
    init -o m.tar
    cp m.tar kept
    cp m.tar m
    run inspect-model -f -o m m
    one 2 "is both an input and the output"
    cmp m m.tar && rm m
    run bash -c "inspect-model - < m.tar >> m.tar"
    one 2 "standard output" "is both an input and the output"
    cmp m.tar kept
    mkdir -p all/m
    tar -xf m.tar -C all/m
    run init-model all/m -f -o all
    one 2 "all: it holds the input all/m"
    run init-model llama-1m -t all/m/. -f -o all/m
    one 2 "all/m"
    cmp <(tar -xOf m.tar model.safetensors) all/m/model.safetensors
}

@test "streams: standard output by its other names is written in place" {
    init -o m.tar
    for name in /dev/stdout /dev/fd/1 /proc/self/fd/1; do
        init -o $name > out.tar
        inspect-model -q --check m.tar out.tar > /dev/null
        init -o $name | inspect-model -q --check m.tar - > /dev/null
    done
}

@test "streams: a model cannot be written to a terminal" {
    command -v script > /dev/null || skip "no script(1) here"
    run script -qec "init-model -q llama-1m -o -" /dev/null
    [ "$status" -eq 2 ]
    [[ "$output" == *"a model cannot be written to a terminal"* ]]
    [ "${#output}" -lt 300 ]
    run script -qec "init-model -q llama-1m -o /dev/tty" /dev/null
    [ "$status" -eq 2 ]
    [[ "$output" == *"/dev/tty: a model cannot be written to a terminal"* ]]
}

@test "streams: a single .safetensors cannot have shards" {
    run init --max-shard-size 100k -o m.safetensors
    one 2 "shards do not go into one .safetensors"
    init --max-shard-size 100k -o m.tar
    [ "$(tar -tf m.tar | grep -c '^model-0000.*safetensors$')" -gt 1 ]
    [ "$(tar -tf m.tar | sed -n 2p)" = model.safetensors.index.json ]
}

@test "streams: truncation of a mapped input is one line, without temporaries" {
    mkfifo in
    compress-ckpt - -o out.lmz < in 2> err &
    pid=$!
    exec 9> in
    until compgen -G '.out.lmz.tmp.*' > /dev/null || [ "$((n += 1))" -gt 50 ]; do sleep 0.1; done
    kill -BUS "$pid" # the signal that the kernel sends in this case
    status=0
    wait "$pid" || status=$?
    exec 9>&-
    [ "$status" -eq 1 ]
    grep -q '^compress-ckpt: an input: was truncated' err
    [ -z "$(find . -name '*.tmp.*')" ]
}

# shrink J COMMAND ...: truncates the input m2/ while the command, which writes to standard output, waits for its
# reader.
shrink() {
    rm -rf m2 out && cp -r m m2
    [ -p out ] || mkfifo out
    "$@" > out 2> err &
    pid=$!
    exec 9< out
    read -r -u 9 -N 1 _ || true # it has begun to write, and has read only as much as the pipe and its buffers hold
    truncate -s 100000 m2/model.safetensors
    cat <&9 > /dev/null
    exec 9<&-
    status=0
    wait "$pid" || status=$?
    echo "$* -> $status: $(cat err)"
    [ "$status" -eq 1 ]
    [ "$(wc -l < err)" -eq 1 ]
    grep -q "^$1: $PWD/m2/model.safetensors: was truncated while it was read" err
    [ -z "$(find . "${TMPDIR:-/tmp}" -maxdepth 1 -user "$(id -u)" -name ".*.tmp.lm*-$pid-*")" ]
}

@test "streams: a mount point is refused for a model, and a dataset is written to it file by file" {
    mkdir volume
    mount -t tmpfs -o size=4m tmpfs volume 2> /dev/null || skip "mounting needs root"
    run init -o volume
    if [ "$status" -ne 2 ]; then umount volume && false; fi
    [[ "$output" == "init-model: volume: is a mount point and cannot be replaced: name a folder inside it" ]] || { umount volume && false; }
    echo '{"text":"the house by the river"}' > text.jsonl
    train-tokenizer -q -V 260 -o tok.json text.jsonl
    run shard-data -q -t tok.json -o volume text.jsonl
    ls volume > files
    umount volume
    [ "$status" -eq 0 ]
    [ "$(tr '\n' ' ' < files)" = "meta.json train.bin train.idx " ]
}

@test "streams: -f replaces the files of a model only" {
    init -o m
    compress-ckpt -q m -o m.lmz
    mkdir -p run/step-000004
    cp -r m/* run/step-000004 && touch run/step-000004/state.json && ln -s step-000004 run/latest
    for tool in "init-model llama-1m" "convert-model m" "merge-models -m linear m m" "compress-ckpt -d m.lmz"; do
        rm -rf out && cp -r m out
        $tool -q -f -o out # the files of a model are
        echo mine > out/notes.txt
        run $tool -q -f -o out
        one 2 "out: holds 'notes.txt', which does not belong to the new output"
        rm out/notes.txt && mkdir out/config.json.d out/.git
        run $tool -q -f -o out
        one 2 "out: holds '.git'"
        run $tool -q -f -o run
        one 2 "run: is the folder of a run, whose checkpoints (step-000004) would be lost"
        [ -s run/step-000004/model.safetensors ]
    done
    cp m.lmz run/step-000004.lmz # an unpacked checkpoint may be unpacked again
    compress-ckpt -q -d -f run/step-000004.lmz
    cmp m/model.safetensors run/step-000004/model.safetensors
}

@test "streams: an input that shrinks is named, at any number of threads" {
    init-model -q llama-5m -o m
    for j in 1 4; do
        shrink merge-models --method linear -j "$j" m2 m2 -o -
        shrink convert-model -j "$j" --to gguf --type q8_0 m2 -o -
        shrink convert-model -j "$j" m2 -o -
    done
}

@test "dumps to a reader that has exited: silent, and ended by SIGPIPE" {
    mkdir gone && cd gone
    root=${LM_TEST_ROOT:-$BATS_TEST_DIRNAME/../..}
    sh "$root/tests/cli/examples/merge-models.sh"
    mkdir plan && cp base/config.json plan
    for c in 'train plan --dump-graph' 'train plan --dry-run' 'train plan --dry-run --json' 'merge-models --list' \
        'merge-models -m dem -b base math code --print-plan' 'merge-models -m dem -b base math code --dry-run' \
        'init-model --list' 'inspect-model --stats base' 'inspect-model --json base'; do
        bash -c "{ sleep 0.1; $c 2> err; echo \$? > status; } | true"
        [ ! -s err ] || { echo "$c: $(cat err)"; false; }
        [ "$(cat status)" -eq 141 ] || { echo "$c: status $(cat status)"; false; }
    done
}

@test "files that are not models are named, with the tool that reads them" {
    mkdir odd && cd odd
    init -o m
    printf '{"text": "a b c d e f"}\n{"text": "g"}\n' > t.jsonl
    yes 'plain text of words' | head -n 9000 > t.txt
    printf '{"text":"a\\u0000b"}\n' > nul.jsonl
    cp m/config.json c.json
    printf '{"version":"1.0","added_tokens":[]}' > tok.json
    printf '{"event":"run"}\n' > run.jsonl
    printf 'GGUF\003\0\0\0' > g
    printf 'PK\003\004zip' > p
    mkdir data conf tok empty
    printf 'MMIDIDX\0\0\1\0\0' > data/train.idx && printf '\1\0\2\0' > data/train.bin
    cp m/config.json conf
    cp tok.json tok/tokenizer.json
    while IFS='|' read -r f what; do
        for c in generate\ -p\ a inspect-model 'merge-models -m linear -o out' 'train --dry-run'; do
            [[ $c != train* || $f == t.* || $f == data || $f == data/train.* ]] || continue
            [[ $c != generate* || $f != g ]] || continue # generate reads GGUF, and reports the damage
            run $c "$f" < /dev/null
            one "$status" "${c%% *}: $f: $what"
            [ "$status" -ne 0 ] && [ ! -e out ]
            [ -f "$f" ] && [ "$c" = inspect-model ] || continue
            run bash -c 'inspect-model - < <(cat "$1")' _ "$f" # a pipe has no name, but the same bytes
            [[ $f == data/* ]] || one 2 "inspect-model: standard input: $what"
        done
    done << 'END'
t.jsonl|is not a model: it is text in JSONL: name the model first; clean-data
nul.jsonl|is not a model: it is text in JSONL: name
t.txt|is not a model: it is plain text: name the model first; clean-data
c.json|is not a model: it is a config.json without weights: init-model
tok.json|is not a model: it is a tokenizer.json: name a model
run.jsonl|is not a model: it is the metrics of a run: plot-run
g|is not a model: it is a model of llama.cpp: convert-model
p|is not a model: it is a pickle of Python
data/train.bin|is not a model: it is a token dataset: name the model first
data/train.idx|is not a model: it is the index of a token dataset: name the model first
data/train|cannot open: No such file or directory: it is a token dataset: name the model first
data|it has no config.json: it is a token dataset: name the model first
conf|it has neither model.safetensors nor model.safetensors.index.json: it is a config.json without weights: init-model
tok|it has no config.json: it is a tokenizer without a model: init-model
empty|it has no config.json: give a model folder
none|cannot open: No such file or directory: give a model folder
END
}

@test "streams: - is called standard input by every tool, and token ids do not come from it" {
    mkdir std && cd std
    seq 2000 > t.txt
    train-tokenizer -q -V 300 -o tok/ t.txt
    init-model -q llama-1m --tokenizer tok -o m
    shard-data -q --tokenizer tok -o data t.txt
    while IFS='|' read -r want message c; do
        run $c < /dev/null
        one "$want" "${c%% *}: standard input: $message"
        [ ! -e out ]
    done << 'END'
1|no document in it: |shard-data --tokenizer m -o out -
1|nothing to evaluate: no document has two tokens: |eval-model m -
1|no question in it: |eval-model m --task multiple-choice -
2|not valid JSON|train --config -
1|not valid JSON|shard-data --tokenizer - -o out t.txt
1|no record with numbers in it: |plot-run -
2|token ids cannot be read from a stream: |train m - -o out
2|token ids cannot be read from a stream: |train m data --val - --eval-every 1 -o out
END
    mkfifo pipe
    run train m pipe -o out
    one 2 "train: pipe: token ids cannot be read from a stream: name a dataset on a disk"
}

@test "streams: /dev/stdout is standard output, whose file is never replaced" {
    mkdir so && cd so
    seq 500 > t.txt
    (
        echo before
        train-tokenizer -q -f -V 300 -o /dev/stdout t.txt
        echo after
    ) > log
    train-tokenizer -q -V 300 -o tok/ t.txt
    cmp log <(echo before; cat tok/tokenizer.json; echo after)
    init-model -q llama-1m --tokenizer tok -o m
    shard-data -q --tokenizer tok -o data t.txt
    for name in - /dev/stdout; do
        run --separate-stderr train -q m data -o $name --steps 1
        [ "$status" -eq 2 ] && [ ! -e ./- ]
        [[ "$stderr" == "train: --output: a run is a folder, not a stream: name the folder of the run with -o RUN" ]]
    done
    printf '{"event":"step","step":%d,"loss":2}\n' 1 2 3 > m.jsonl
    plot-run m.jsonl > plot
    plot-run -o - m.jsonl | cmp - plot
    init-model -q llama-1m --tokenizer tok -o /dev/stdout > m.tar
    inspect-model -q --check m m.tar > /dev/null
    for name in /dev/stdout /dev/fd/1; do
        (
            echo before
            train -q -f m data -o run --steps 1 --batch-size 1 --seq-len 8 --metrics $name
            echo after
        ) > log
        [ "$(head -n 1 log) $(tail -n 1 log)" = "before after" ]
        grep -q '"event":"end"' log
    done
}
