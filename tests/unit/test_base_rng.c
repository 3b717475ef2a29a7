/* SPDX-License-Identifier: Apache-2.0 */
/* test_base_rng.c -- Philox against the known answers of Random123 (kat_vectors, philox4x32 10),
 * and the distributions derived from it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "base/rng.h"

static void check(uint64_t lo, uint64_t hi, uint64_t key, const uint32_t want[4])
{
    lm_u32x4 got = lm_philox(lo, hi, key);

    for (int i = 0; i < 4; i++)
        assert_int_equal(got.v[i], want[i]);
}

static void known_answers(void **state)
{
    (void)state;
    check(0, 0, 0, (const uint32_t[]){ 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8 });
    check(UINT64_MAX, UINT64_MAX, UINT64_MAX,
          (const uint32_t[]){ 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd });
    check(0x85a308d3243f6a88, 0x0370734413198a2e, 0x299f31d0a4093822,
          (const uint32_t[]){ 0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1 });
}

static void streams_differ(void **state)
{
    lm_rng a = lm_rng_make(1, "init", 0), b = lm_rng_make(1, "dropout", 0);
    lm_rng c = lm_rng_make(1, "init", 1), d = lm_rng_make(2, "init", 0);

    (void)state;
    assert_true(lm_rng_u64(a, 0) == lm_rng_u64(lm_rng_make(1, "init", 0), 0));
    assert_true(lm_rng_u64(a, 0) != lm_rng_u64(b, 0));
    assert_true(lm_rng_u64(a, 0) != lm_rng_u64(c, 0));
    assert_true(lm_rng_u64(a, 0) != lm_rng_u64(d, 0));
    assert_true(lm_rng_u64(a, 0) != lm_rng_u64(a, 1));
    /* u32 and u64 read the same words */
    assert_true(lm_rng_u64(a, 3) == (lm_rng_u32(a, 6) | (uint64_t)lm_rng_u32(a, 7) << 32));
}

/* Mean and variance of 200,000 draws; the bounds are ten standard deviations. */
static void moments(void **state)
{
    enum { N = 200000 };
    lm_rng r = lm_rng_make(42, "test", 0);
    double u1 = 0, u2 = 0, n1 = 0, n2 = 0, n4 = 0, pair = 0;

    (void)state;
    for (uint64_t i = 0; i < N; i++) {
        double u = lm_rng_uniform(r, i), z = lm_rng_normal(r, i);

        assert_true(u >= 0 && u < 1);
        u1 += u;
        u2 += u * u;
        n1 += z;
        n2 += z * z;
        n4 += z * z * z * z;
        pair += i % 2 ? z * lm_rng_normal(r, i - 1) : 0;
    }
    assert_true(fabs(u1 / N - 0.5) < 10 * sqrt(1.0 / 12 / N));
    assert_true(fabs(u2 / N - 1.0 / 3) < 10 * sqrt(4.0 / 45 / N));
    assert_true(fabs(n1 / N) < 10 * sqrt(1.0 / N));
    assert_true(fabs(n2 / N - 1) < 10 * sqrt(2.0 / N));
    assert_true(fabs(n4 / N - 3) < 10 * sqrt(96.0 / N));
    assert_true(fabs(pair / N) < 10 * sqrt(0.5 / N));
}

static void below(void **state)
{
    lm_rng r = lm_rng_make(7, "below", 0);
    int seen[10] = { 0 };

    (void)state;
    for (uint64_t i = 0; i < 10000; i++) {
        uint64_t v = lm_rng_below(r, i, 10);

        assert_true(v < 10);
        seen[v]++;
        assert_true(lm_rng_below(r, i, 1) == 0);
        assert_true(lm_rng_below(r, i, UINT64_MAX) < UINT64_MAX);
    }
    for (int i = 0; i < 10; i++)
        assert_in_range(seen[i], 800, 1200);
}

static void permute_is_a_bijection(void **state)
{
    static const uint64_t sizes[] = {
        1, 2, 3, 4, 5, 7, 8, 9, 31, 64, 100, 1000, 4097, 65536, 100003
    };

    (void)state;
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        uint64_t n = sizes[s], fixed = 0;
        lm_rng r = lm_rng_make(3, "shuffle", n);
        unsigned char *hit = calloc(n, 1);

        for (uint64_t i = 0; i < n; i++) {
            uint64_t v = lm_rng_permute(r, i, n);

            assert_true(v < n);
            assert_false(hit[v]);
            hit[v] = 1;
            fixed += v == i;
        }
        free(hit);
        if (n >= 1000) /* one fixed point is expected, whatever the size */
            assert_true(fixed < 12);
    }
    assert_true(lm_rng_permute(lm_rng_make(3, "shuffle", 0), UINT64_MAX - 1, UINT64_MAX) <
                UINT64_MAX);
}

static void permute_depends_on_seed(void **state)
{
    int same = 0;

    (void)state;
    for (uint64_t i = 0; i < 1000; i++)
        same += lm_rng_permute(lm_rng_make(1, "s", 0), i, 1000) ==
                lm_rng_permute(lm_rng_make(2, "s", 0), i, 1000);
    assert_true(same < 12);
}

/* SplitMix64 with state 0 begins with mix(0x9e3779b97f4a7c15) = 0xe220a8397b1dcdaf: a known answer
 * of the finaliser for a number that the packing of step and micro-batch can produce. */
static void keys_of_micro_batches(void **state)
{
    (void)state;
    uint64_t x = UINT64_C(0x9e3779b97f4a7c15);
    assert_true(lm_rng_key(0, x >> 24, x & 0xffffff) == UINT64_C(0xe220a8397b1dcdaf));
    assert_true(lm_rng_key(5, 0, 0) == 5);
    assert_true((lm_rng_key(5, 7, 3) ^ lm_rng_key(0, 7, 3)) == 5);
    for (uint64_t i = 1; i < 1000; i++) {
        assert_true(lm_rng_key(5, i, 0) != lm_rng_key(5, 0, i));
        assert_true(lm_rng_key(5, i << 16, 0) != lm_rng_key(5, 0, 0));
    }
}

static void hashes(void **state)
{
    (void)state;
    /* the XXH3 specification's value for the empty input and seed 0 */
    assert_true(lm_hash64("", 0, 0) == 0x2d06800538d394c2);
    assert_true(lm_hash_str("abc") == lm_hash64("abc", 3, 0));
    assert_true(lm_hash64("abc", 3, 0) != lm_hash64("abc", 3, 1));
    static char bytes[1000];
    lm_hash128 h;
    for (int i = 0; i < 1000; i++)
        bytes[i] = (char)(i * 7);
    lm_hash128_init(&h);
    for (int i = 0; i < 1000; i += 100) /* drawn in pieces, the numbers are the same */
        lm_hash128_add(&h, bytes + i, 100);
    assert_true(lm_hash128_end64(&h) == lm_hash64(bytes, 1000, 0));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_answers),
        cmocka_unit_test(streams_differ),
        cmocka_unit_test(moments),
        cmocka_unit_test(below),
        cmocka_unit_test(permute_is_a_bijection),
        cmocka_unit_test(permute_depends_on_seed),
        cmocka_unit_test(keys_of_micro_batches),
        cmocka_unit_test(hashes),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
