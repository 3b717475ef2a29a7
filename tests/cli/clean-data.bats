#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# clean-data: kept and dropped documents, counts, refusals.
bats_require_minimum_version 1.5.0

setup() {
    root=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    cd "$BATS_TEST_TMPDIR"
    sh "$root/tests/cli/examples/clean-data.sh"
}

# fails STATUS PART ARGUMENT ...: that exit status, nothing but one line with PART on standard error.
fails() {
    local want=$1 part=$2
    shift 2
    run --separate-stderr clean-data "$@"
    [ "$status" -eq "$want" ] || { echo "status $status: $stderr"; false; }
    [ -z "$output" ] || { echo "output: $output"; false; }
    [ "${#stderr_lines[@]}" -eq 1 ] || { echo "$stderr"; false; }
    [[ $stderr == "clean-data: "*"$part"* ]] || { echo "$stderr"; false; }
}

@test "clean-data: rules and near duplicates: the first of a cluster is kept, in order" {
    run --separate-stderr clean-data --rules gopher,c4,fineweb --dedup minhash raw.jsonl.zst
    [ "$status" -eq 0 ]
    [ "${#lines[@]}" -eq 8 ]
    for i in 1 2 3 4 5 6 7 8; do
        [[ ${lines[i - 1]} == "{\"id\": $i, "* ]]
    done
    [[ $stderr == *"kept 8 of 11 documents"*"gopher-min-words 1, duplicate 1, near-duplicate 1" ]]
}

@test "clean-data: the same bytes for any -j, from a file or a pipe" {
    for i in $(seq 200); do sed "s/\"id\": /&$i/; s/The /The $i /" raw.jsonl; done > big.jsonl
    clean-data -q -j 1 -r all -d minhash big.jsonl > j1
    clean-data -q -j 2 -r all -d minhash big.jsonl > j2
    clean-data -q -j 7 -r all -d minhash < big.jsonl > j7
    gzip -c big.jsonl | clean-data -q -r all -d minhash - > jz
    [ -s j1 ]
    cmp j1 j2
    cmp j1 j7
    cmp j1 jz
}

@test "clean-data: without rules nothing is dropped, and lines are written back byte for byte" {
    printf '%s\n' '{"n":123456789012345678901234567890, "text" : "a\/\u00e9" ,"x":[1e999,{}]}' '' \
        '{"text":"","y":null}' > odd.jsonl
    clean-data -q odd.jsonl > out.jsonl
    grep -v '^$' odd.jsonl | cmp - out.jsonl
}

@test "clean-data: c4 rewrites the text and leaves the other fields" {
    printf '%s\n' '{"a":1.0,"text":"One good line is here.\nno end of a sentence here\nIt is the second line.","z":"\u0041"}' > l.jsonl
    run clean-data -q -r c4 --c4-min-sentences 2 l.jsonl
    [ "$output" = '{"a":1.0,"text":"One good line is here.\nIt is the second line.","z":"\u0041"}' ]
    run clean-data -q -r c4 --c4-min-sentences 2 --no-c4-terminal-punct l.jsonl
    [ "$output" = "$(cat l.jsonl)" ]
    run clean-data -q -r c4 l.jsonl
    [ "$status" -eq 0 ]
    [ -z "$output" ]
}

@test "clean-data: the thresholds are options" {
    printf '{"text":"one two three four five"}\n' > five.jsonl
    run clean-data -q -r gopher --gopher-min-words 5 five.jsonl
    [ "${#lines[@]}" -eq 1 ]
    run clean-data -q -r gopher --gopher-min-words 6 five.jsonl
    [ -z "$output" ]
    run clean-data -q -r gopher -l en --gopher-min-words 5 --gopher-stop-words 1 five.jsonl
    [ -z "$output" ]
    fails 2 "6 numbers from 0 to 1" -r gopher --gopher-dup-ngrams 0.1,0.2 five.jsonl
    fails 2 "3 numbers from 0 to 1" -r gopher --gopher-top-ngrams 0.1,0.2,0.3,0.4 five.jsonl
}

@test "clean-data: the report adds up, and every drop is named" {
    clean-data -q -r all -d minhash --report r.json --dropped d.jsonl -o k.jsonl raw.jsonl
    grep -q '"documents":11,"kept":8,' r.json
    grep -q '"duplicates":1,"near_duplicates":1,' r.json
    grep -q '"gopher-min-words":1,' r.json
    grep -q '"history":\[{"tool":"clean-data",' r.json
    [ "$(wc -l < d.jsonl)" -eq 3 ]
    [ "$(sed -n 1p d.jsonl)" = '{"rule":"gopher-min-words","source":"raw.jsonl","line":9,"document":{"id": 9, "text": "too short"}}' ]
    grep -q '^{"rule":"near-duplicate","source":"raw.jsonl","line":11,' d.jsonl
    clean-data -q d.jsonl --field rule > /dev/null # it is JSONL itself
}

@test "clean-data: text, archives and what is inside them" {
    printf 'one\n\ntwo\n' > t.txt
    run clean-data -q --split blank t.txt
    [ "$output" = $'{"text": "one"}\n{"text": "two"}' ]
    printf 'one<|x|>two "q"' > t.txt
    run clean-data -q --separator '<|x|>' t.txt
    [ "$output" = $'{"text": "one"}\n{"text": "two \\"q\\""}' ]
    mkdir a
    printf '{"text":"in a tar"}\n' | gzip > a/x.jsonl.gz
    printf 'plain' > a/y.txt
    tar -cf a.tar a/x.jsonl.gz a/y.txt
    xz -k a.tar
    run clean-data -q a.tar.xz
    [ "$output" = $'{"text":"in a tar"}\n{"text": "plain"}' ]
}

@test "clean-data: bad input: one line that names it, status 1" {
    head -c 1000 raw.jsonl | gzip > cut.gz
    head -c 300 cut.gz > cut.jsonl.gz
    fails 1 "cut.jsonl.gz: damaged or truncated" cut.jsonl.gz
    if command -v zstd > /dev/null; then
        head -c 1000 raw.jsonl.zst > cut.jsonl.zst
        fails 1 "cut.jsonl.zst: damaged or truncated" cut.jsonl.zst
    fi
    printf '{"text":"a"}\n{"text":"b"\n' > bad.jsonl
    run --separate-stderr clean-data bad.jsonl -o out.jsonl
    [ "$status" -eq 1 ]
    [[ $stderr == "clean-data: bad.jsonl:2: column 12: expected ',' or '}'"* ]]
    [ ! -e out.jsonl ]
    [ -z "$(ls -A | grep tmp)" ]
    printf '{"body":"a"}\n' > field.jsonl
    fails 1 "field.jsonl:1: no field 'text'; it has 'body': name the text's with --field" field.jsonl
    : > empty.jsonl
    fails 1 "empty.jsonl: no document in it" empty.jsonl
    fails 1 "nosuch.jsonl: cannot open: No such file" nosuch.jsonl
    printf '{"text":"a\377"}\n' > u.jsonl
    fails 1 "u.jsonl: invalid UTF-8 at byte 10 (0xff)" u.jsonl
    run clean-data -q --utf8 replace u.jsonl
    [ "$output" = $'{"text":"a\xef\xbf\xbd"}' ]
    run --separate-stderr clean-data --utf8 skip u.jsonl raw.jsonl
    [ "$status" -eq 0 ]
    [[ $stderr == *"invalid-utf8 1"* ]]
}

@test "clean-data: misuse: status 2, nothing written" {
    echo old > out.jsonl
    fails 2 "out.jsonl" -o out.jsonl raw.jsonl
    [ "$(cat out.jsonl)" = old ]
    clean-data -q -f -o out.jsonl raw.jsonl
    cmp out.jsonl raw.jsonl
    fails 2 "is both an input" -f -o raw.jsonl raw.jsonl
    ln -s raw.jsonl also
    fails 2 "is both an input" -f -o also raw.jsonl
    fails 2 "is both an input" -f --dropped raw.jsonl -o new raw.jsonl
    fails 2 "two outputs have this name" -f --dropped new -o new raw.jsonl
    [ ! -e new ]
    fails 2 "did you mean gopher?" -r gofer raw.jsonl
    fails 2 "100 bands of 100 values" -d minhash --bands 100 --rows 100 raw.jsonl
}

@test "clean-data: a language chooses stop words and the length of words" {
    words() { # words WORD ...: a document of fifty words without a repeated pair
        local i
        printf '{"text":"'
        for i in $(seq 50); do printf '%s%s ' "abc" "$i"; done
        printf '%s"}\n' "$*"
    }
    { words der und; words the and; words le et; words; } > four.jsonl
    run clean-data -q -r gopher four.jsonl # neutral: all four
    [ "${#lines[@]}" -eq 4 ]
    for l in de:der en:the fr:le; do
        run clean-data -q -r gopher --language "${l%:*}" four.jsonl
        [ "${#lines[@]}" -eq 1 ]
        [[ "$output" == *" ${l#*:} "* ]]
    done
    printf 'LE\nEt\n' > own.txt
    run clean-data -q -r gopher --language de --stop-words own.txt four.jsonl
    [ "${#lines[@]}" -eq 1 ]
    [[ "$output" == *" le et"* ]]
    clean-data -q -r gopher -l en --report r.json four.jsonl > /dev/null
    grep -q '"language":"en"' r.json
    # words of two letters: too short for English, not for a text without language
    printf '{"text":"%s"}\n' "$(for i in a b c d e f g; do for j in a b c d e f g h; do printf '%s ' $i$j; done; done) the and" > short.jsonl
    run clean-data -q -r gopher short.jsonl
    [ "${#lines[@]}" -eq 1 ]
    run clean-data -q -r gopher -l en short.jsonl
    [ -z "$output" ]
    run clean-data -q -r gopher -l en --gopher-min-word-len 2 short.jsonl
    [ "${#lines[@]}" -eq 1 ]
    run clean-data -q -r gopher --gopher-min-word-len 3 short.jsonl
    [ -z "$output" ]
    clean-data -r gopher --print-config > c.json # options not given are not marked as given
    run clean-data -q --config c.json short.jsonl
    [ "${#lines[@]}" -eq 1 ]
}

@test "clean-data: Chinese text passes the rules, its characters are words" {
    LC_ALL=C awk 'BEGIN { x = 1; printf "{\"text\":\"\344\272\206\347\232\204"
        for (i = 0; i < 12; i++) {
            for (j = 0; j < 20; j++) { x = (x * 16807) % 2147483647; k = x % 5000; c = 19968 + k
                printf "%c%c%c", 224 + int(c / 4096), 128 + int(c / 64) % 64, 128 + c % 64 }
            printf "\343\200\202"
        }
        printf "\"}\n" }' > zh.jsonl
    LC_ALL=C grep -q "$(printf '\343\200\202')" zh.jsonl
    run clean-data -q -r all zh.jsonl
    [ "${#lines[@]}" -eq 1 ]
    run clean-data -q -r all -l zh zh.jsonl
    [ "${#lines[@]}" -eq 1 ]
    run clean-data -q -r gopher -l zh --gopher-min-words 243 zh.jsonl # 240 and two characters
    [ -z "$output" ]
}

@test "clean-data: options that need others are refused without them" {
    fails 2 "--gopher-min-words: belongs to the set 'gopher', which is not chosen: add the set" -r c4 --gopher-min-words 5 raw.jsonl
    fails 2 "--c4-policy: belongs to the set 'c4'" --no-c4-policy raw.jsonl
    fails 2 "--fineweb-newlines: belongs to the set 'fineweb'" -r gopher --fineweb-newlines 1 raw.jsonl
    fails 2 "--gopher-dup-ngrams: belongs to the set" --gopher-dup-ngrams 0,0,0,0,0,0 raw.jsonl
    fails 2 "--language: belongs to the set 'gopher'" -r fineweb --language de raw.jsonl
    fails 2 "--stop-words: belongs to the set 'gopher'" --stop-words raw.jsonl raw.jsonl
    fails 2 "--bands: belongs to MinHash, which is not chosen: add --dedup minhash" -d exact --bands 3 raw.jsonl
    fails 2 "--gopher-stop-words: no stop words are set: name a --language" -r gopher --gopher-stop-words 2 raw.jsonl
    fails 2 "9 different ones are more than the 8 that are set" -r gopher -l en --gopher-stop-words 9 raw.jsonl
    fails 2 "--rules: the value is empty: give one, or leave the option out" -r '' raw.jsonl
    fails 2 "--rules: unknown set of rules ''" -r gopher, raw.jsonl
    fails 2 "--rules: 'none' cannot be combined with a set" -r none,gopher raw.jsonl
    fails 2 "did you mean" -r gopher -l dee raw.jsonl
    : > empty.txt
    fails 1 "empty.txt: no stop word in it" -r gopher --stop-words empty.txt raw.jsonl
    fails 1 "nosuch: cannot open" -r gopher --stop-words nosuch raw.jsonl
}

@test "clean-data: the report as JSON goes to standard output when the documents do not" {
    run --separate-stderr clean-data -q --json -o out.jsonl raw.jsonl
    [ "$status" -eq 0 ]
    [[ $output == '{"documents":11,"kept":11,'* ]]
    [ -z "$stderr" ]
    cmp out.jsonl raw.jsonl
}

@test "clean-data: the report as JSON goes to standard error, beside the documents" {
    run --separate-stderr clean-data -q --json raw.jsonl
    [ "$output" = "$(cat raw.jsonl)" ]
    [[ $stderr == '{"documents":'* ]]
    [ "${#stderr_lines[@]}" -eq 1 ]
}

@test "clean-data: a reader that exits ends it silently, in every thread" {
    for i in $(seq 200); do cat raw.jsonl; done > big.jsonl
    for j in 1 2 5; do
        { clean-data -j $j big.jsonl 2> err || echo $? > status; } | head -n 1 > /dev/null
        [ "$(cat status)" -eq 141 ] || { cat status err; false; }
        [ ! -s err ]
    done
}

@test "clean-data: signals leave no files, also a second one" {
    mkfifo text
    for signals in INT TERM HUP "INT TERM" "TERM INT"; do
        # shells ignore SIGINT for jobs in the background
        env --default-signal=INT clean-data -o out.jsonl --dropped dropped.jsonl text 2> err &
        pid=$!
        exec 7<> text
        cat raw.jsonl >&7
        for ((i = 0; i < 500; i++)); do
            [ "$(ls -A | grep -c '\.tmp\.')" -lt 2 ] || break
            sleep 0.01
        done
        for s in $signals; do kill -$s $pid || true; done 2> /dev/null # it may have ended already
        status=0
        wait $pid || status=$?
        exec 7>&-
        [ "$status" -gt 128 ] || { echo "$signals: status $status"; cat err; false; }
        [ -z "$(ls -A | grep -E 'tmp|out|dropped')" ] || { ls -A; false; }
    done
}

@test "clean-data: a full disk: one line, status 1" {
    [ -w /dev/full ] || skip "no /dev/full"
    run --separate-stderr bash -c 'clean-data raw.jsonl > /dev/full'
    [ "$status" -eq 1 ]
    [ "${#stderr_lines[@]}" -eq 1 ] || { echo "$stderr"; false; }
    [[ $stderr == "clean-data: standard output: cannot write: No space left on device"* ]]
}
