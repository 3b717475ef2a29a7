#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Damaged and endless text: an error with status 1; or skipped with --skip-bad.
bats_require_minimum_version 1.5.0

setup() {
    cd "$BATS_TEST_TMPDIR"
    for i in 1 2 3; do
        printf '{"text":"document %s"}\n{"text":"more of %s"}\n' $i $i > d$i
        gzip -c d$i > g$i
    done
    cat g1 g2 g3 > all.gz
    second=$(stat -c %s g1)
}

# fails PART ARGUMENT ...: status 1, no output, and one line with PART on standard error.
fails() {
    local part=$1
    shift
    run --separate-stderr timeout 60 clean-data "$@"
    [ "$status" -eq 1 ] || { echo "status $status: $stderr"; false; }
    [ "${#stderr_lines[@]}" -eq 1 ] || { echo "$stderr"; false; }
    [[ $stderr == "clean-data: "*"$part"* ]] || { echo "$stderr"; false; }
}

# damage FILE PLACE: two bytes of it become XX
damage() {
    printf XX | dd of="$1" bs=1 seek="$2" conv=notrunc status=none
}

@test "damage: a gzip member in the middle, in its header, its data or its checksum" {
    [ "$(clean-data -q all.gz | wc -l)" -eq 6 ]
    for at in 0 20 $(($(stat -c %s g2) - 7)); do
        cp all.gz bad.gz
        damage bad.gz $((second + at))
        fails "bad.gz: damaged or truncated gzip: member 2, which begins at byte $second" bad.gz
        fails "standard input: damaged or truncated gzip: member 2" - < bad.gz
        run --separate-stderr clean-data --skip-bad bad.gz
        [ "$status" -eq 0 ]
        [[ $output == "$(cat d1)"* ]]
        [[ $output == *"$(cat d3)" ]]
        [[ $stderr == *"skipped "*" 1 damaged part; the first: bad.gz: damaged or truncated gzip: member 2"* ]]
    done
    head -c -3 all.gz > cut.gz
    fails "cut.gz: damaged or truncated gzip: member 3" cut.gz
    cp all.gz tail.gz
    echo more >> tail.gz
    fails "tail.gz: damaged or truncated gzip: member 4" tail.gz
    cp all.gz padded.gz
    truncate -s +700 padded.gz
    [ "$(clean-data -q padded.gz | wc -l)" -eq 6 ]
}

@test "damage: a header in the middle of other compressed files is not their end" {
    for f in bzip2 lz4 xz zstd; do
        command -v $f > /dev/null || continue
        for i in 1 2 3; do $f -c < d$i > p$i; done
        cat p1 p2 p3 > all.$f
        [ "$(clean-data -q all.$f | wc -l)" -eq 6 ]
        damage all.$f "$(stat -c %s p1)"
        fails "all.$f: damaged" all.$f
        run --separate-stderr clean-data --skip-bad all.$f d3
        [ "$status" -eq 0 ]
        [[ $output == *"$(cat d3)" ]]
        [[ $stderr == *"1 damaged part;"* ]]
    done
}

@test "damage: in archives, and gzip around them" {
    damage g2 "$(($(stat -c %s g2) - 7))"
    tar -cf a.tar g1 g2 g3
    fails "a.tar:g2: damaged or truncated gzip: member 1, which begins at byte 0: incorrect data check: fetch" a.tar
    [ "$(clean-data -q --skip-bad a.tar | grep -c 'document [13]')" -eq 2 ]
    tar -cf b.tar d1 d2
    gzip b.tar
    damage b.tar.gz $(($(stat -c %s b.tar.gz) - 7))
    fails "b.tar.gz: damaged or truncated gzip: member 1" b.tar.gz
    run --separate-stderr inspect-model b.tar.gz # a model's tar, too
    [ "$status" -eq 1 ]
    [[ $stderr == *"damaged or truncated gzip"* ]] || { echo "$stderr"; false; }
}

@test "damage: a first member of gzip, and members of an archive that are not text" {
    damage g1 3
    cat g1 g2 > both # no name says that it is JSONL
    run --separate-stderr clean-data --skip-bad both
    [ "$status" -eq 0 ]
    [ "$output" = "$(cat d2)" ]
    printf '\211PNG' > p.png
    tar -cf a.tar d2 p.png d3
    fails "a.tar:p.png: it is a picture, not text" a.tar
    run --separate-stderr clean-data --skip-bad a.tar
    [ "$output" = "$(cat d2 d3)" ]
    [[ $stderr == *"0 bad records and 1 damaged part; the first: a.tar:p.png: it is a picture"* ]]
}

@test "damage: a missing requirement of an archive is reported once" {
    command -v zip > /dev/null || skip "no zip"
    zip -q -P word e.zip d1
    fails "e.zip:d1: it is encrypted and needs a passphrase: decrypt it first" e.zip
    [ "$(grep -o passphrase <<< "$stderr" | wc -l)" -eq 1 ]
}

@test "damage: lines that are not records" {
    { cat d1; echo '{"text":"half'; echo '{"other":1}'; cat d3; } > bad.jsonl
    fails "bad.jsonl:3: column 9" bad.jsonl
    run --separate-stderr clean-data --skip-bad --dropped dropped.jsonl --report r.json bad.jsonl
    [ "$status" -eq 0 ]
    [ "$output" = "$(cat d1 d3)" ]
    [[ $stderr == *"skipped 2 bad records and 0 damaged parts; the first: bad.jsonl:3: column 9"* ]]
    [ "$(grep -c '"rule":"bad-record"' dropped.jsonl)" -eq 2 ]
    grep -q '"bad_records":2,"bad_parts":0,' r.json
    train-tokenizer --skip-bad -V 260 -o t.json bad.jsonl 2> err
    grep -q '2 bad records' err
    run ! train-tokenizer -V 260 -o u.json bad.jsonl
    shard-data --skip-bad -t t.json -o s bad.jsonl 2> err
    grep -q '2 bad records' err
    grep -q '"documents": 4,' s/meta.json
    run ! shard-data -t t.json -o v bad.jsonl
}

@test "damage: a text without end stops at --max-document" {
    fails "more than 1048576 bytes follow" --max-document 1M /dev/zero
    fails "exceeds the limit of 1048576 bytes" --max-document 1M --input-format text - < <(tr '\0' x < /dev/zero 2> /dev/null)
    fails "exceeds the limit" --max-document 1M - < <(yes '' 2> /dev/null)
    fails "bytes of blank lines before" --max-document 1M --input-format jsonl - < <(yes '' 2> /dev/null)
    fails "bytes of blank lines before" --max-document 1M --split blank --input-format text - < <(yes '' 2> /dev/null)
    fails "bytes of blank lines before" --max-document 1M --separator x --input-format text - < <(yes x 2> /dev/null)
    fails "exceeds the limit" --max-document 1M --input-format jsonl - < <(yes 2> /dev/null | tr -d '\n')
}

@test "models and metrics from an endless input end with a reason" {
    for t in "inspect-model /dev/zero" "compress-ckpt -o x.lmz /dev/zero" "merge-models -m linear -o x /dev/zero" \
        "convert-model -o x /dev/zero" "plot-run /dev/zero"; do
        # shellcheck disable=SC2086
        run timeout 60 $t
        [ "$status" -eq 1 ] || { echo "$t: $status $output"; false; }
        [[ "$output" == *"/dev/zero: "*"1 GiB"* ]] || { echo "$t: $output"; false; }
        [ "${#lines[@]}" -eq 1 ]
        [ ! -e x ] && [ ! -e x.lmz ]
    done
}
