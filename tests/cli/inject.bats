#!/usr/bin/env bats
# One call after the other fails: what was there stays, nothing half-written is left.
bats_require_minimum_version 1.5.0
load ../inject/inject

setup() {
    PATH=${LM_TEST_BUILD:-$BATS_TEST_DIRNAME/../../build}/bin:$PATH
    export LM_TEST_BUILD=${LM_TEST_BUILD:-$BATS_TEST_DIRNAME/../../build}
    mkdir "$BATS_TEST_TMPDIR/work"
    cd "$BATS_TEST_TMPDIR/work"
    for i in 1 2 3 4 5 6 7 8; do
        echo "{\"event\":\"step\",\"step\":$i,\"loss\":$((9 - i)).5}"
    done > run.jsonl
    plot-run run.jsonl -o good.svg
    echo old > loss.svg
}

# After success the whole new picture is there; after a failure the old one, or the new one when only
# what comes after the renaming failed.
old_or_new() {
    [ "$1" -ne 0 ] && [ "$(cat loss.svg)" = old ] && return
    cmp good.svg loss.svg && echo old > loss.svg
}

@test "a picture and failing writes" {
    inject_each write 50 old_or_new plot-run run.jsonl -f -o loss.svg
}

@test "a picture and failing fsync" {
    inject_each fsync 50 old_or_new plot-run run.jsonl -f -o loss.svg
}

@test "a picture and failing rename" {
    inject_each rename 50 old_or_new plot-run run.jsonl -f -o loss.svg
}
