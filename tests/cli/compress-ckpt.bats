#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
bats_require_minimum_version 1.5.0
# compress-ckpt: files are restored, damage is located, lossy formats keep their bounds.

setup_file() {
    root=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    cd "$BATS_FILE_TMPDIR"
    sh "$root/tests/cli/examples/compress-ckpt.sh"
    compress-ckpt -q m0/ -o m0.lmz
    compress-ckpt -q run/step-000004 --base run/step-000002 -o delta.lmz
}

setup() {
    root=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    cp -a "$BATS_FILE_TMPDIR"/{m0,run,m0.lmz,delta.lmz,data} "$BATS_TEST_TMPDIR"
    cd "$BATS_TEST_TMPDIR"
    load ../inject/inject
}

# flip FILE OFFSET: invert one bit
flip() {
    local byte
    byte=$(od -An -tu1 -j "$2" -N 1 "$1")
    printf "$(printf '\\%03o' $((byte ^ 16)))" | dd of="$1" bs=1 seek="$2" conv=notrunc status=none
}

same() { # same A B: the same files, names and bytes
    diff -r "$1" "$2"
}

@test "compress-ckpt: a folder is compressed and restored, with names as in zstd" {
    cp -a m0 m
    run compress-ckpt m/
    [ "$status" -eq 0 ]
    [[ "$output" == "compress-ckpt: m.lmz: 4 files, "*"%)" ]]
    [ "$(stat -c %s m.lmz)" -lt "$(cat m/* | wc -c)" ]
    mv m was
    compress-ckpt -q -d m.lmz
    same was m
}

@test "compress-ckpt: levels trade size for time: 1 is read by version 1 of the format, 3 is smaller" {
    init-model -q llama-1m --set vocab_size=8192 --dtype bf16 -o b
    raw=$(stat -c %s b/model.safetensors)
    for level in 1 2 3 9 10; do
        compress-ckpt -q -$level b -o b$level.lmz
        compress-ckpt -q -d b$level.lmz -o back$level
        same b back$level
        version=$(od -An -tu2 -j 8 -N 2 b$level.lmz)
        [ "$version" -eq $((1 + (level > 2))) ]
    done
    share() { echo $(($(stat -c %s "$1") * 10000 / raw)); }
    [ "$(share b1.lmz)" -gt 6615 ] && [ "$(share b1.lmz)" -lt 6660 ]
    [ "$(share b3.lmz)" -lt 6595 ]
    [ "$(share b10.lmz)" -le "$(share b3.lmz)" ]
    compress-ckpt -lv b3.lmz | grep -q '0: raw 100.0 %  1: joint 3[12]'
    compress-ckpt -lv b1.lmz | grep -q '0: raw 100.0 %  1: exp 32'
    printf '\003' | dd of=b3.lmz bs=1 seek=8 conv=notrunc status=none
    run compress-ckpt -d b3.lmz -o new
    [ "$status" -eq 1 ]
    [[ "$output" == "compress-ckpt: b3.lmz: it is in version 3 of the format, this reads up to version 2: a newer compress-ckpt may read it" ]]
}

@test "compress-ckpt: a base on a pipe is refused: it must be a file or a folder" {
    mkfifo pipe
    tar -cf m0.tar m0
    for way in "m0 -o x.lmz" "-t delta.lmz" "-d delta.lmz -o x" "--rebase"; do
        for base in - pipe; do
            # shellcheck disable=SC2086
            case $way in
            --rebase) run timeout 20 compress-ckpt --rebase $base --base run/step-000002 delta.lmz -o x.lmz < m0.tar ;;
            *) run timeout 20 compress-ckpt $way --base $base < m0.tar ;;
            esac
            echo "$way, $base: $status: $output"
            [ "$status" -eq 2 ] && [ "${#lines[@]}" -eq 1 ]
            [[ "$output" == *"cannot be a base, which must be a file or a folder: write it to a file first, and name that" ]]
            [ ! -e x ] && [ ! -e x.lmz ]
        done
    done
}

@test "compress-ckpt: the tar of a run, links and all, stands for its newest checkpoint" {
    compress-ckpt -q run -o want.lmz
    tar --sort=name -cf a.tar run
    tar --sort=name -C run -cf b.tar .
    rm run/latest # then the highest step is the newest
    rm run/config.json
    tar --sort=name -cf c.tar run
    for tar in a b c; do
        run compress-ckpt -f $tar.tar -o got.lmz
        [ "$status" -eq 0 ]
        [[ "${lines[0]}" == *"left out"* ]] # the other checkpoint
        cmp want.lmz got.lmz
        [ "$(inspect-model --no-list $tar.tar | grep parameters)" = "$(inspect-model --no-list run/step-000004 | grep parameters)" ]
        run compress-ckpt --rm -f $tar.tar -o got.lmz
        [ "$status" -eq 2 ] && [ -e $tar.tar ]
    done
    run sh -c 'cat a.tar | inspect-model -'
    [ "$status" -eq 2 ] && [ "${#lines[@]}" -eq 1 ]
    [[ "$output" == *"holds a run, whose newest checkpoint cannot be found in a stream: name the uncompressed tar as a file"* ]]
    ln -s step-000009 run/latest
    tar -cf lost.tar run
    run inspect-model lost.tar
    [ "$status" -eq 2 ]
    [[ "$output" == *"is a run whose newest checkpoint is step-000009, which is missing"* ]]
    ln -s /etc/passwd run/config.json
    tar -cf other.tar run
    run inspect-model other.tar
    [ "$status" -eq 1 ]
    [[ "$output" == *"its member 'config.json' is a link or a device: make the archive again with tar -h"* ]]
}

@test "compress-ckpt: a training state is restored completely" {
    compress-ckpt -q run/step-000004 -o s.lmz
    compress-ckpt -q -d s.lmz -o back
    same run/step-000004 back
}

@test "compress-ckpt: a single safetensors file is restored as a file" {
    cp run/step-000004/optimizer.safetensors x.safetensors
    compress-ckpt -q x.safetensors
    cp x.safetensors was
    rm x.safetensors
    compress-ckpt -q -d x.safetensors.lmz
    cmp was x.safetensors
    compress-ckpt -q -d -c x.safetensors.lmz | cmp - was
    compress-ckpt -q < was | compress-ckpt -q -d | cmp - was
}

@test "compress-ckpt: an invalid file called .safetensors is kept byte for byte" {
    mkdir odd
    printf 'no header at all' > odd/a.safetensors
    : > odd/empty.safetensors
    head -c 3000 m0/model.safetensors > odd/cut.safetensors
    head -c 100000 /dev/urandom > odd/noise.bin
    compress-ckpt -q odd
    compress-ckpt -q -d odd.lmz -o back
    same odd back
}

@test "compress-ckpt: tars in, tars out, on pipes" {
    tar -cf m.tar m0
    tar -cf - m0 | compress-ckpt -q - -o a.lmz
    gzip -k m.tar
    compress-ckpt -q m.tar.gz -o b.lmz
    compress-ckpt -q -d a.lmz -o a
    compress-ckpt -q -d b.lmz -o b
    same m0 a
    same m0 b
    compress-ckpt -q -d m0.lmz -o - | tar -tf - | grep -q 'model.safetensors$'
    compress-ckpt -q -d m0.lmz -o - | compress-ckpt -q - -o c.lmz
    compress-ckpt -q -d c.lmz -o c
    same m0 c
    compress-ckpt -q -c m0 > d.lmz
    cat d.lmz | compress-ckpt -q -d - -o d
    same m0 d
}

@test "compress-ckpt: inspect-model reads the .lmz from a file and from a pipe" {
    inspect-model --stats --json m0 | sed 's/"model":"[^"]*"//' > a
    inspect-model --stats --json m0.lmz | sed 's/"model":"[^"]*"//' > b
    compress-ckpt -q -d m0.lmz -o - | inspect-model --stats --json - | sed 's/"model":"[^"]*"//' > c
    cmp a b
    cmp a c
}

@test "compress-ckpt: the same bytes for any -j, levels differ" {
    for j in 1 2 5; do compress-ckpt -q -j $j m0 -o j$j.lmz; done
    cmp j1.lmz j2.lmz
    cmp j1.lmz j5.lmz
    compress-ckpt -q -T1 m0 -o t.lmz
    cmp j1.lmz t.lmz
    compress-ckpt -q -19 m0 -o l19.lmz
    compress-ckpt -q --level 19 m0 -o level19.lmz
    cmp l19.lmz level19.lmz
    compress-ckpt -kqf19 m0 -o level19.lmz
    cmp l19.lmz level19.lmz
    [ "$(stat -c %s l19.lmz)" -le "$(stat -c %s j1.lmz)" ]
    compress-ckpt -q -1 m0 -o l1.lmz
    compress-ckpt -q -d l19.lmz -o back
    same m0 back
    run compress-ckpt -20 m0 -o x.lmz
    [ "$status" -eq 2 ]
    run compress-ckpt -0 m0 -o x.lmz
    [ "$status" -eq 2 ]
}

@test "compress-ckpt: -t of an intact file, with -v and -q" {
    run compress-ckpt -t m0.lmz delta.lmz
    [ "$status" -eq 0 ]
    [ "${lines[0]}" = "compress-ckpt: m0.lmz: no fault" ]
    [ "${lines[1]}" = "compress-ckpt: delta.lmz: no fault" ]
    run compress-ckpt -q -t m0.lmz
    [ "$status" -eq 0 ]
    [ -z "$output" ]
    run compress-ckpt -t --json m0.lmz
    [[ "$output" == *'{"path":"m0.lmz","faults":[],"ok":true}'* ]]
    cat m0.lmz | compress-ckpt -q -t -
    run sh -c 'cat m0.lmz | compress-ckpt -t'
    [ "$output" = "compress-ckpt: standard input: no fault" ]
}

@test "compress-ckpt: flipped bits anywhere are detected; in a tensor with its name" {
    local size at
    size=$(stat -c %s m0.lmz)
    for at in 0 9 $(seq 37 $((size / 16)) $((size - 1))) $((size - 1)); do
        cp m0.lmz f.lmz
        flip f.lmz "$at"
        run compress-ckpt -q -t f.lmz
        echo "$at of $size: $status: $output"
        [ "$status" -eq 3 ]
        [ -n "$output" ]
        run sh -c 'cat f.lmz | compress-ckpt -q -t -'
        [ "$status" -eq 3 ]
    done
    cp m0.lmz f.lmz
    flip f.lmz $((size / 2))
    run compress-ckpt -t --json f.lmz
    [ "$status" -eq 3 ]
    [[ "$output" == *'"file":"model.safetensors","tensor":"model.'*'"chunk":'*'"ok":false'* ]]
    run compress-ckpt -d f.lmz -o back
    [ "$status" -eq 1 ]
    [[ "$output" == *model.safetensors* ]]
    [ ! -e back ]
}

@test "compress-ckpt: truncation is detected at any length" {
    local size
    size=$(stat -c %s m0.lmz)
    for n in 0 1 8 20 100 $((size / 3)) $((size / 2)) $((size - 40)) $((size - 1)); do
        head -c "$n" m0.lmz > f.lmz
        run compress-ckpt -q -t f.lmz
        echo "$n of $size: $status: $output"
        [ "$status" -eq 3 ]
        run sh -c 'cat f.lmz | compress-ckpt -q -d - -o back'
        [ "$status" -ne 0 ]
        [ ! -e back ]
    done
}

@test "compress-ckpt: --salvage extracts intact data and lists the losses" {
    local size
    size=$(stat -c %s m0.lmz)
    cp m0.lmz f.lmz
    flip f.lmz $((size / 2))
    run compress-ckpt -d --salvage f.lmz -o back
    [ "$status" -eq 3 ]
    [[ "$output" == *"f.lmz: model.safetensors: model."*": lost"* ]]
    cmp m0/config.json back/config.json
    cmp m0/tokenizer.json back/tokenizer.json
    run inspect-model --check m0 back
    [[ "$output" == *"only in A"* ]]
    [ "$(inspect-model back | wc -l)" -gt 10 ]
    head -c $((size * 3 / 4)) m0.lmz > f.lmz
    run compress-ckpt -d --salvage f.lmz -o cut
    [ "$status" -eq 3 ]
    [ -s cut/config.json ]
    run compress-ckpt -d --salvage m0.lmz -o all
    [ "$status" -eq 0 ]
    same m0 all
    head -c 10 m0.lmz > f.lmz
    run compress-ckpt -d --salvage f.lmz -o none
    [ "$status" -eq 1 ]
    [ ! -e none ]
}

@test "compress-ckpt: --salvage without the base extracts data that do not need it" {
    mv run/step-000002 away
    run compress-ckpt -d --salvage delta.lmz -o back
    [ "$status" -eq 3 ]
    [[ "$output" == *"delta.lmz: model.safetensors: model.norm.weight"*": lost"* ]]
    cmp run/step-000004/state.json back/state.json
    run compress-ckpt -d --salvage delta.lmz --base away -o all
    [ "$status" -eq 0 ]
    same run/step-000004 all
}

@test "compress-ckpt: --salvage of coded tensors: both halves or none, expanded" {
    init-model -q llama-1m --set hidden_size=512 --set num_hidden_layers=1 -o large # tensors that are parts
    compress-ckpt -q large --weights dynamic8 -o w.lmz
    compress-ckpt -q -d w.lmz -o w
    flip w.lmz $(($(stat -c %s w.lmz) / 2))
    run compress-ckpt -d --salvage w.lmz -o back
    [ "$status" -eq 3 ]
    run inspect-model --check w back
    [[ "$output" == *"only in A"* && "$output" != *.codes* ]]
    [[ "$output" =~ ([0-9]+)" of "([0-9]+)" tensors are the same" && ${BASH_REMATCH[1]} -ge $((BASH_REMATCH[2] - 1)) ]]
}

@test "compress-ckpt: tensors that save less than their records take are joined, also in the list, and salvaged without their neighbours" {
    init-model -q llama-1m --dtype bf16 -o b
    tail -c 300000 b/model.safetensors > weights
    compress-ckpt -q b -o b.lmz
    tail -c 600000 b.lmz | head -c 300000 > noise # mantissas
    header='{' at=0
    for i in {0..59}; do
        header+="\"n$i\":{\"dtype\":\"BF16\",\"shape\":[2048],\"data_offsets\":[$at,$((at + 4096))]},"
        at=$((at + 4096))
        from=noise
        [ $((i % 10)) -ne 5 ] || from=weights
        dd if=$from bs=4096 skip=$i count=1 status=none
    done > numbers
    header="${header%,}}"
    while [ $((${#header} % 8)) -ne 0 ]; do header+=" "; done
    { printf "\\$(printf %03o $((${#header} % 256)))\\$(printf %03o $((${#header} / 256)))\0\0\0\0\0\0%s" "$header"; cat numbers; } > x.safetensors
    compress-ckpt -q x.safetensors -o x.lmz
    [ "$(stat -c %s x.lmz)" -lt "$(stat -c %s x.safetensors)" ]
    compress-ckpt -q -d x.lmz -o y.safetensors
    cmp x.safetensors y.safetensors
    compress-ckpt -d x.lmz --tensor n6 -o n6.safetensors
    cmp <(tail -c 4096 n6.safetensors) <(dd if=noise bs=4096 skip=6 count=1 status=none)
    compress-ckpt -lv x.lmz > list
    [ "$(grep -c '^BF16 .* n[0-9]*5$' list)" -eq 6 ]
    [ "$(grep -c 'x.safetensors (tensors, joined)$' list)" -eq 7 ]
    [ "$(grep -c 'x.safetensors (header)$' list)" -eq 1 ]
    flip x.lmz $(($(stat -c %s x.lmz) / 2)) # in n26 to n34
    run compress-ckpt -d --salvage x.lmz -o z.safetensors
    [ "$status" -eq 3 ]
    [[ "$output" == *"x.lmz: x.safetensors: "*lost* ]]
    run inspect-model --check x.safetensors z.safetensors
    [[ "$output" == *"51 of 60 tensors are the same"* ]]
}

@test "compress-ckpt: weights alone, with a message about the rest" {
    run compress-ckpt -d m0.lmz -o w.safetensors
    [ "$status" -eq 0 ]
    [[ "$output" == *"other files are left out"* ]]
    cmp w.safetensors m0/model.safetensors
}

@test "compress-ckpt: -l is a table, of planes with -v, or JSON" {
    run compress-ckpt -l m0.lmz
    [ "$status" -eq 0 ]
    [[ "$output" == *"digest     "* ]]
    [[ "$output" =~ F32\ +[0-9.]+\ KiB\ +[0-9.]+\ KiB\ +[0-9.]+\ %\ +[0-9]+ ]]
    [[ "$output" =~ F32\ .*\ model.norm.weight ]]
    run compress-ckpt -q -l -vv m0.lmz
    [[ "$output" == *" 0: raw 100.0 %"* ]]
    compress-ckpt -l --json m0.lmz > t.json
    grep -q '"base":null' t.json
    grep -q '"tensor":"model.norm.weight","dtype":"F32"' t.json
    run grep -q planes t.json
    [ "$status" -eq 1 ]
    compress-ckpt -v -l --json m0.lmz 2> /dev/null | grep -q '"planes":\[{"coding":'
}

@test "compress-ckpt: --tensor extracts tensors, in the given order" {
    compress-ckpt -q -d m0.lmz --tensor model.norm.weight -o a.safetensors
    run inspect-model a.safetensors
    [[ "$output" == *"parameters 64 "* ]]
    run inspect-model --check --only model.norm.weight m0 a.safetensors
    [[ "$output" == *"0.0"* || "$output" == *"1 of 1 tensor is the same"* ]]
    compress-ckpt -q -d m0.lmz --tensor model.norm.weight --tensor model.embed_tokens.weight > b.safetensors
    head -c 1000 b.safetensors | grep -q 'model.norm.weight.*model.embed_tokens.weight'
    cat m0.lmz | compress-ckpt -q -d - --tensor model.norm.weight | cmp - a.safetensors
    run compress-ckpt -d m0.lmz --tensor nowhere -o c.safetensors
    [ "$status" -eq 2 ]
    [[ "$output" == *"nowhere: "*"no tensor of this name"* ]]
    run compress-ckpt -d m0.lmz --tensor model.norm.weigth -o c.safetensors
    [[ "$output" == *"did you mean model.norm.weight?"* ]]
    run compress-ckpt -d m0.lmz --tensor final_norm --tensor final_norm -o c.safetensors
    [ "$status" -eq 2 ]
    [ ! -e c.safetensors ]
}

@test "compress-ckpt: a difference is smaller, and needs its base" {
    compress-ckpt -q run/step-000004 -o whole.lmz
    [ "$(stat -c %s delta.lmz)" -lt "$(stat -c %s whole.lmz)" ]
    compress-ckpt -q -d delta.lmz -o back
    same run/step-000004 back
    run compress-ckpt -l delta.lmz
    [[ "$output" == *"base       run/step-000002 (digest "*", 1 step to a whole one)"* ]]
    mkdir away
    mv run/step-000002 away
    run compress-ckpt -d delta.lmz -o back2
    [ "$status" -eq 2 ]
    [[ "$output" == *step-000002* ]]
    [ ! -e back2 ]
    run compress-ckpt -t delta.lmz
    [ "$status" -eq 2 ]
    compress-ckpt -l -q delta.lmz > /dev/null
    compress-ckpt -q -d delta.lmz --base away/step-000002 -o back2
    same run/step-000004 back2
    run compress-ckpt -d delta.lmz --base m0 -o back3
    [ "$status" -eq 2 ]
    [[ "$output" == *"it is a delta against content "*", 'm0' is "* ]]
    [ ! -e back3 ]
}

@test "compress-ckpt: the base is found from another folder, and through a link" {
    mkdir -p deep/er
    compress-ckpt -q run/step-000004 --base run/step-000002 -o deep/er/d.lmz
    run compress-ckpt -l deep/er/d.lmz
    [[ "$output" == *"base       ../../run/step-000002 "* ]]
    cd /
    compress-ckpt -q -d "$BATS_TEST_TMPDIR/deep/er/d.lmz" -o "$BATS_TEST_TMPDIR/back"
    same "$BATS_TEST_TMPDIR/run/step-000004" "$BATS_TEST_TMPDIR/back"
}

@test "compress-ckpt: chains, their limit, no cycles" {
    cp -a run/step-000004 s
    compress-ckpt -q s -o c0.lmz
    for i in 1 2 3 4 5 6 7 8; do
        printf '%s' "$i" >> s/state.json
        compress-ckpt -q s --base c$((i - 1)).lmz -o c$i.lmz
    done
    compress-ckpt -q -d c8.lmz -o back
    same s back
    run compress-ckpt s --base c8.lmz -o c9.lmz
    [ "$status" -eq 2 ]
    [[ "$output" == *8* ]]
    [ ! -e c9.lmz ]
    run compress-ckpt --rebase c3.lmz c1.lmz
    [ "$status" -eq 2 ]
    [[ "$output" == *"delta against c1.lmz"* ]]
    run compress-ckpt --rebase c3.lmz c3.lmz
    [ "$status" -eq 2 ]
    compress-ckpt -q --rebase none c4.lmz
    compress-ckpt -q -t c8.lmz
    run compress-ckpt -l c4.lmz
    [[ "$output" != *base* ]]
}

@test "compress-ckpt: --rebase removes the base, or changes it" {
    compress-ckpt -q --rebase none delta.lmz -o whole.lmz
    rm -r run/step-000002
    compress-ckpt -q -d whole.lmz -o back
    same run/step-000004 back
    compress-ckpt -q --rebase m0 whole.lmz
    compress-ckpt -l whole.lmz | grep -q 'base       m0 '
    compress-ckpt -q -d whole.lmz -o back2
    same run/step-000004 back2
    run compress-ckpt --rebase none m0/model.safetensors
    [ "$status" -ne 0 ]
    run compress-ckpt --rebase nowhere whole.lmz
    [ "$status" -eq 1 ]
    compress-ckpt -q -t whole.lmz
}

@test "compress-ckpt: entries of a tar that are not plain files are reported as those of a folder are" {
    cp -rL m0 m
    mkdir -p m/sub/deep m/empty m/.git
    touch m/sub/a m/sub/deep/b m/.git/config m/.gitattributes
    run compress-ckpt -f m -o f.lmz
    [[ "$output" == *"m: '.git' and 3 others are left out: an .lmz holds plain files"* ]]
    tar --sort=name -cf m.tar m
    tar --sort=name -C m -czf dot.tgz .
    for tar in m.tar dot.tgz; do # random access, and a stream
        run compress-ckpt -f $tar -o t.lmz
        [ "$status" -eq 0 ]
        [[ "$output" == *"$tar: '.git' and 3 others are left out: an .lmz holds plain files"* ]]
        cmp f.lmz t.lmz
        run compress-ckpt --rm -f $tar -o x.lmz
        [ "$status" -eq 2 ]
        [[ "$output" == *"holds '.git', which an .lmz does not carry"* ]]
        [ -e $tar ] && [ ! -e x.lmz ]
    done
    rm -r m/.git m/.gitattributes m/empty
    tar -C m -cf - . | compress-ckpt -f - -o t.lmz 2> talk
    grep -q "standard input: 'sub' is left out" talk
    rm -r m/sub
    tar -cf m.tar m
    run compress-ckpt --rm m.tar -o t2.lmz
    [ "$status" -eq 0 ] && [[ "$output" != *left* ]]
    [ ! -e m.tar ]
}

@test "compress-ckpt: --rm removes only verified inputs" {
    cp -a m0 m
    compress-ckpt -q --rm m
    [ ! -e m ]
    compress-ckpt -q -d --rm m.lmz
    [ ! -e m.lmz ]
    same m0 m
    mkdir m/sub
    run compress-ckpt --rm m
    [ "$status" -eq 2 ]
    [[ "$output" == *"'sub'"* ]]
    [ -d m ] && [ ! -e m.lmz ]
    run compress-ckpt m
    [ "$status" -eq 0 ]
    [[ "$output" == *"'sub' is left out"* ]]
    mkdir m/sub2 m/.sub3
    run compress-ckpt -f m
    [[ "$output" == *"'.sub3' and 2 others are left out"* ]]
    ln -s m0 link
    run compress-ckpt --rm link
    [ "$status" -eq 2 ]
    [[ "$output" == *"link: is a link"* ]]
    [ -L link ] && [ -d m0 ]
    run compress-ckpt --rm run -o r.lmz
    [ "$status" -eq 2 ]
    [ -d run ]
    run compress-ckpt --rm --weights bf16 m0 -o w.lmz
    [ "$status" -eq 2 ]
    run compress-ckpt --rm m0 -c
    [ "$status" -eq 2 ]
    run compress-ckpt --rm -k m0
    [ "$status" -eq 2 ]
    cp run/step-000004/optimizer.safetensors o.safetensors
    compress-ckpt -q --no-keep o.safetensors
    [ ! -e o.safetensors ]
    compress-ckpt -q -d --rm o.safetensors.lmz -o p.safetensors
    cmp p.safetensors run/step-000004/optimizer.safetensors
}

@test "compress-ckpt: lossy states are restored in F32 and training continues" {
    compress-ckpt run/step-000004 --optimizer-states int8 -o s.lmz --json > loss.json
    grep -q '"tensor":"exp_avg_sq.model.embed_tokens.weight","codec":"dynamic8"' loss.json
    compress-ckpt -q -d s.lmz -o run/step-000006
    cmp run/step-000004/model.safetensors run/step-000006/model.safetensors
    cmp run/step-000004/state.json run/step-000006/state.json
    run cmp -s run/step-000004/optimizer.safetensors run/step-000006/optimizer.safetensors
    [ "$status" -eq 1 ]
    [ "$(stat -c %s run/step-000004/optimizer.safetensors)" -lt \
        $(($(stat -c %s run/step-000006/optimizer.safetensors) + 1000)) ]
    sed 's/"step": 4/"step": 6/' run/step-000004/state.json > run/step-000006/state.json
    run train -q --resume run --steps 8 --json
    [ "$status" -eq 0 ]
    compress-ckpt -q run/step-000004 --optimizer-states bf16 -o b.lmz
    compress-ckpt -q -d b.lmz -o back
    run inspect-model --check --rtol 0.00390625 run/step-000004/optimizer.safetensors back/optimizer.safetensors
    [ "$status" -eq 0 ]
    run inspect-model --check --rtol 0.001 run/step-000004/optimizer.safetensors back/optimizer.safetensors
    [ "$status" -eq 3 ]
}

@test "compress-ckpt: lossy weights are an ordinary model of that dtype" {
    run compress-ckpt m0 --weights bf16 -o w.lmz
    [ "$status" -eq 0 ]
    [[ "$output" =~ bf16\ +max\ .*\ rel\ .*\ bound\ .*model.embed_tokens.weight ]]
    [[ "$output" == *"%), with loss"* ]]
    compress-ckpt -q -d w.lmz -o w
    run inspect-model w
    [[ "$output" == *BF16* && "$output" != *F32* ]]
    [[ "$output" == *"history"*"compress-ckpt"* ]]
    run inspect-model --check --rtol 0.00390625 m0 w
    [ "$status" -eq 0 ]
    run compress-ckpt m0 --weights fp8_e4m3 -o w8.lmz
    [ "$status" -eq 0 ]
    run inspect-model w8.lmz
    [[ "$output" == *F8_E4M3* && "$output" == *F32*model.norm.weight* ]]
    run compress-ckpt m0 --optimizer-states int8 -o none.lmz
    [ "$status" -eq 0 ]
    [[ "${lines[0]}" == *"m0: has no tensor that --optimizer-states would make smaller" ]]
    for format in nf3 q4_0 i8 fp64; do # unknown, interleaved, of integers, too wide
        run compress-ckpt m0 --weights $format -o x.lmz
        [ "$status" -eq 2 ]
        [[ "$output" == *"there are fp32, fp16, bf16, fp8_e4m3, fp8_e5m2, dynamic8, nf4, nf4_dq" ]]
        [ ! -e x.lmz ]
    done
}

@test "compress-ckpt: lossy weights of a model in several files: the index has the new size" {
    init-model -q m0/config.json --tokenizer m0/tokenizer.json --max-shard-size 100K -o s
    index=model.safetensors.index.json
    total() { # total FOLDER: the size in the index, and the real size
        grep -o '"total_size": *[0-9]*' "$1/$index" | grep -o '[0-9]*$'
        inspect-model --json "$1" | grep -o '"bytes":[0-9]*' | head -1 | cut -d: -f2
    }
    check() { # check FOLDER: both are equal
        [ "$(total "$1" | uniq | wc -l)" -eq 1 ] || { total "$1"; false; }
    }
    check s
    for codec in bf16 fp8_e4m3 dynamic8; do
        compress-ckpt -q s --weights $codec -o w.lmz > loss
        compress-ckpt -q -d w.lmz -o $codec
        check $codec
        rm w.lmz
    done
    [ "$(total bf16 | head -1)" -lt "$(total s | head -1)" ]
    cmp s/$index dynamic8/$index
    # on a pipe, the index first, in the middle, and last
    tar -cf - s/$index s/config.json s/model-* | compress-ckpt -q --weights bf16 - -o w.lmz
    compress-ckpt -q -d w.lmz -o first
    check first
    cmp bf16/$index first/$index
    tar -cf - s/config.json s/model-00002* s/$index s/model-0000[^2]* | compress-ckpt -q --weights bf16 -f - -o w.lmz
    compress-ckpt -q -d w.lmz -o middle
    cmp bf16/$index middle/$index
    tar -cf - s | compress-ckpt -q --weights bf16 -f - -o w.lmz
    compress-ckpt -q -d w.lmz -o any
    cmp bf16/$index any/$index
}

@test "compress-ckpt: weights coded in blocks are restored in their own dtype" {
    compress-ckpt -q m0 --weights dynamic8 -o w.lmz
    run inspect-model w.lmz
    [[ "$output" == *model.embed_tokens.weight.codes* ]]
    compress-ckpt -q -d w.lmz -o w
    run inspect-model w
    [[ "$output" != *.codes* && "$output" == *F32*model.embed_tokens.weight* ]]
    compress-ckpt -q -d w.lmz --tensor model.embed_tokens.weight -o e.safetensors
    run inspect-model --check --only model.embed_tokens.weight w e.safetensors
    [[ "$output" == *"1 of 1 tensor is the same"* ]]
    run compress-ckpt w.lmz --weights bf16 -o again.lmz
    [ "$status" -eq 2 ]
    [[ "$output" == *"already coded"* ]]
}

@test "compress-ckpt: a number that a format cannot hold is status 4, without output" {
    header='{"w":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}}'
    while [ $((${#header} % 8)) -ne 0 ]; do header="$header "; done
    { printf "\\$(printf %03o ${#header})\0\0\0\0\0\0\0"; printf '%s' "$header"; printf '\0\0\200\077\0\0\200\111'; } > w.safetensors
    run compress-ckpt w.safetensors --weights fp16
    [ "$status" -eq 4 ]
    [[ "$output" == *"w.safetensors: w: element 1 is 1048576, which fp16 cannot hold"* ]]
    [ ! -e w.safetensors.lmz ]
    [ -z "$(ls -A | grep tmp)" ]
    compress-ckpt -q w.safetensors --weights bf16
}

@test "compress-ckpt: a run stands for its newest checkpoint" {
    compress-ckpt -q run -o r.lmz
    compress-ckpt -q -d r.lmz -o back
    same run/step-000004 back
}

@test "compress-ckpt: existing outputs, -f, same files, inside the input" {
    run compress-ckpt m0
    [ "$status" -eq 2 ]
    [[ "$output" == "compress-ckpt: m0.lmz: "* ]]
    compress-ckpt -q -f m0
    run compress-ckpt -d m0.lmz
    [ "$status" -eq 2 ]
    compress-ckpt -q -d -f m0.lmz
    run compress-ckpt -f m0.lmz -o m0.lmz
    [ "$status" -eq 2 ]
    [[ "$output" == *"is both an input"* ]]
    ln m0.lmz link.lmz
    run compress-ckpt -f m0.lmz -o link.lmz
    [ "$status" -eq 2 ]
    run compress-ckpt m0 -o m0/x.lmz
    [ "$status" -eq 2 ]
    [ ! -e m0/x.lmz ]
    run compress-ckpt -f run/step-000004 --base delta.lmz -o delta.lmz
    [ "$status" -eq 2 ]
    compress-ckpt -q -t delta.lmz
}

@test "compress-ckpt: several inputs: the bad one is reported, the others are compressed" {
    cp -a m0 a
    cp -a m0 b
    run compress-ckpt a nowhere b
    [ "$status" -eq 1 ]
    [[ "$output" == *"nowhere: cannot open: No such file or directory"* ]]
    [ -e a.lmz ] && [ -e b.lmz ]
}

@test "compress-ckpt: a full disk is exit 1 and one line" {
    run sh -c 'compress-ckpt -q -c m0 > /dev/full'
    [ "$status" -eq 1 ]
    [ "${#lines[@]}" -eq 1 ]
    [[ "$output" == *"No space left on device"* ]]
    run sh -c 'compress-ckpt -q -d m0.lmz -c > /dev/full'
    [ "$status" -eq 1 ]
    [[ "$output" == *"No space left on device"* ]]
    run compress-ckpt -q m0 -o /dev/full
    [ "$status" -eq 1 ]
}

@test "compress-ckpt: contradictory options are misuse" {
    for words in "-d -t m0.lmz" "-d -5 m0.lmz" "--tensor x m0" "--salvage m0" "-l -o x m0.lmz" "-c -o x m0" \
        "-o x m0 run" "-c m0 run" "--rebase none m0.lmz -c" "--rebase m0 -o - m0.lmz" "-d --tensor x m0.lmz delta.lmz" "-l m0" "-t run" "-d --json m0.lmz" "--json -c m0" "-d --weights bf16 m0.lmz" "-l -" "--rebase none -" \
        "-d m0" "--rm -t m0.lmz" "-d --salvage -" "--optimizer-states int4 m0" "m0.lmz" "." "-l --base m0 m0.lmz"; do
        # shellcheck disable=SC2086
        run compress-ckpt $words
        echo "$words: $status: $output"
        [ "$status" -eq 2 ]
        [ "${#lines[@]}" -eq 1 ]
    done
}

old_or_new() { # out.lmz is unchanged, or complete
    compress-ckpt -q -t out.lmz
}

folder_is_whole() {
    diff -r m0 out
}

@test "compress-ckpt: whatever call fails, the output is the old file or complete" {
    cp m0.lmz out.lmz
    cp -a m0 out
    for kind in malloc write fsync rename mmap; do
        inject_each $kind 12 old_or_new compress-ckpt -q -j 1 -f run/step-000004 -o out.lmz
        inject_each $kind 12 folder_is_whole compress-ckpt -q -j 1 -f -d m0.lmz -o out
    done
    inject_each write 10 old_or_new compress-ckpt -q -j 1 --rebase none out.lmz
}

@test "compress-ckpt: a truncated .safetensors is kept byte for byte, with a warning" {
    head -c 20000 m0/model.safetensors > cut.safetensors
    compress-ckpt cut.safetensors -o cut.lmz 2> err
    grep -q 'cut.safetensors: is not a complete .safetensors' err
    compress-ckpt -q -d cut.lmz -o back.safetensors 2> /dev/null || compress-ckpt -q -d cut.lmz -o back/
    cmp cut.safetensors back.safetensors || cmp cut.safetensors back/cut.safetensors
    compress-ckpt m0/ -o whole.lmz 2> err
    run ! grep -q 'no whole' err
}
