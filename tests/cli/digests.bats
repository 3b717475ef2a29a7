#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# digests: losses, checkpoints, evaluations and decoded tokens of small models are, to the bit, those of
# tests/digests/table, on every path of the CPU, for any number of threads, and on the emulated GPU.
#
# A change that must alter bits regenerates the table (tests/digests/make-table) and says so in its message; any other
# change must not alter the table.  The bits follow from IEEE arithmetic (-ffp-contract=off) and from functions of libm (pow, cos,
# exp, log, ...), of which only the rounding to float enters; gcc 12, clang 14, -O1 and -O2, and glibc 2.36 with and
# without FMA give the same.
bats_require_minimum_version 1.5.0

load cuda

setup() {
    root=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    cd "$BATS_TEST_TMPDIR"
}

# compare PATH COLUMN THREADS
compare() {
    "$root/tests/digests/run-cases" "$1" "$3" > got
    awk -v c="$2" '!/^#/ && $c != "-" { print $1, $2, $c }' "$root/tests/digests/table" > want
    [ "$(wc -l < want)" -gt 500 ]
    diff want got > differences && return
    printf 'the first of %d lines that differ from tests/digests/table (case, tensor, digest):\n' \
        "$(grep -c '^<' differences)"
    head -n 8 differences
    return 1
}

# A level that this processor lacks is skipped.
level() {
    LM_CPU=$1 init-model -q --dry-run llama-1m -o x > /dev/null 2> refusal || true
    if grep -q "this processor supports" refusal; then skip "$(cat refusal)"; fi
    compare "$@"
}

@test "digests: the definitions in plain C" { level ref 3 2; }
@test "digests: AVX2" { level avx2 5 1; }
@test "digests: AVX-512" { level avx512 6 3; }
@test "digests: AVX-512 with products of BF16" { level avx512bf16 7 3; }
@test "digests: AMX" { level amx 8 2; }

@test "digests: the CUDA kernels on the emulated GPU" {
    use_module
    emulated
    compare cuda 4 2
}
