/* SPDX-License-Identifier: Apache-2.0 */
/* Byte planes and their entropy coder: every level gives the reference's bytes and decodes them.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "kernels/expcode.h"
#include "kernels/joint.h"
#include "kernels/planes.h"

static uint64_t word(uint64_t i)
{
    return lm_rng_u64(lm_rng_make(3, "planes", 0), i);
}

static const size_t counts[] = { 0, 1, 3, 31, 32, 33, 63, 64, 65, 127, 255, 1025, 5000 };
enum { N_COUNTS = sizeof counts / sizeof *counts, GUARD = 16 };

static uint8_t *bytes(size_t n, uint64_t seed)
{
    uint8_t *p = malloc(n + GUARD);
    for (size_t i = 0; i < n; i++)
        p[i] = (uint8_t)(word(i + (seed << 32)) >> 9);
    memset(p + n, 0x5a, GUARD);
    return p;
}

static void check_guard(const uint8_t *p, size_t n)
{
    for (int g = 0; g < GUARD; g++)
        assert_int_equal(p[n + (size_t)g], 0x5a);
}

static void check_form(lm_planes_form f, size_t n)
{
    size_t size = (size_t)f.size;
    uint8_t *x = bytes(n * size, 1), *b = bytes(n * size, 2), *back = bytes(n * size, 3);
    uint8_t *want[LM_PLANES_MAX] = { 0 }, *got[LM_PLANES_MAX] = { 0 };
    for (size_t k = 0; k < size; k++)
        want[k] = bytes(n, 4), got[k] = bytes(n, 5);
    lm_planes_ref.split(f, x, b, n, want);
    for (lm_cpu_level l = LM_CPU_REF; l <= lm_cpu_detect(); l++) {
        const lm_planes_kernels *k = lm_planes_at(l);
        k->split(f, x, f.delta ? b : NULL, n, got);
        for (size_t p = 0; p < size; p++) {
            if (n)
                assert_memory_equal(got[p], want[p], n);
            check_guard(got[p], n);
        }
        memset(back, 0, n * size);
        k->join(f, (const uint8_t *const *)got, f.delta ? b : NULL, n, back);
        if (n)
            assert_memory_equal(back, x, n * size);
        check_guard(back, n * size);
    }
    free(x), free(b), free(back);
    for (size_t k = 0; k < size; k++)
        free(want[k]), free(got[k]);
}

static void planes_of_every_form(void **state)
{
    (void)state;
    for (int size = 1; size <= 8; size *= 2)
        for (int field = 0; field < 2; field++)
            for (int d = LM_PLANES_NONE; d <= LM_PLANES_SUB; d++)
                for (int i = 0; i < N_COUNTS; i++)
                    check_form((lm_planes_form){ size, field, (lm_planes_delta)d }, counts[i]);
}

/* A map of any order: heads of m indexes from low on, ranks at random. */
static lm_joint_map random_map(int low, int m)
{
    lm_joint_map map = { .low = (uint8_t)low, .m = (uint8_t)m };
    for (int i = 0; i < 4 * m; i++) { /* Fisher and Yates */
        int k = (int)(word((uint64_t)(i + 128 * m)) % (uint64_t)(i + 1));
        map.rank[i] = map.rank[k];
        map.rank[k] = (uint8_t)i;
    }
    for (int k = 0; k < 4; k++)
        map.rank[4 * m + k] = (uint8_t)(60 + k);
    for (int i = 0; i < 4 * m; i++) {
        int e = i < 4 ? 0 : low + i / 4 - 1, head = 4 * e + i % 4;
        map.high[map.rank[i]] = (uint8_t)(head >> 3);
        map.below[map.rank[i]] = (uint8_t)(head << 5);
    }
    return map;
}

/* Check that they are the positions, in order, of those pairs that are members of the set. */
static void check_places(const lm_joint_places *p, size_t some, const uint8_t set[2][16],
                         const uint8_t *pair, size_t pairs)
{
    size_t at = 0;
    for (size_t k = 0; k < some; k++) {
        assert_true(p[k].bits != 0);
        for (uint32_t bits = p[k].bits; bits; bits &= bits - 1, at++) {
            size_t i = p[k].from + (size_t)__builtin_ctz(bits);
            for (; at < i; at++)
                assert_false(set[pair[at] >> 7][pair[at] & 15] >> (pair[at] >> 4 & 7) & 1);
            assert_true(at == i && i < pairs);
            assert_true(set[pair[at] >> 7][pair[at] & 15] >> (pair[at] >> 4 & 7) & 1);
        }
    }
    for (; at < pairs; at++)
        assert_false(set[pair[at] >> 7][pair[at] & 15] >> (pair[at] >> 4 & 7) & 1);
}

static void check_joint(size_t n, int low, int m, bool wide)
{
    const lm_joint_map map = random_map(low, m);
    const size_t size[2] = { (n + 1) / 2, n };
    lm_joint_places *found = malloc(LM_JOINT_ROOM(n) * sizeof *found);
    uint8_t *x = bytes(2 * n, 6), *back = bytes(2 * n, 7), set[2][16];
    const uint8_t rare[2][16] = { [1] = { 0x80 } };
    uint8_t *want[2] = { bytes(size[0], 4), bytes(n, 4) },
            *got[2] = { bytes(size[0], 5), bytes(n, 5) };
    for (size_t i = 0; i < n && !wide; i++) { /* exponents that have an index */
        unsigned index = (unsigned)(word(i) % (unsigned)m);
        unsigned e = index ? (unsigned)low + index - 1 : 0;
        x[2 * i] = (uint8_t)((x[2 * i] & 0x7f) | e << 7);
        x[2 * i + 1] = (uint8_t)((x[2 * i + 1] & 0x80) | e >> 1);
    }
    for (int i = 0; i < 32; i++)
        set[i / 16][i % 16] =
            (uint8_t)(word(900 + (uint64_t)i) & word(90 + (uint64_t)i) & word((uint64_t)i));
    lm_joint_ref.split(&map, x, n, want[0], want[1]);
    for (lm_cpu_level l = LM_CPU_REF; l <= lm_cpu_detect(); l++) {
        const lm_joint_kernels *k = lm_joint_at(l);
        k->split(&map, x, n, got[0], got[1]);
        for (int p = 0; p < 2 && n; p++) {
            assert_memory_equal(got[p], want[p], size[p]);
            check_guard(got[p], size[p]);
        }
        size_t some = k->join(&map, got[0], got[1], n, back, found);
        check_places(found, some, rare, got[0], size[0]);
        for (size_t i = 0; i < n; i++) {
            bool escape = (got[0][i / 2] >> i % 2 * 4 & 15) == LM_JOINT_ESCAPE;
            assert_true(wide || !escape);
            if (!escape)
                assert_memory_equal(back + 2 * i, x + 2 * i, 2);
            else /* all but the exponent */
                assert_true((got[1][i] & 0x7f) == (x[2 * i] & 0x7f) &&
                            got[1][i] >> 7 == x[2 * i + 1] >> 7);
        }
        check_guard(back, 2 * n);
        some = k->find(set, got[0], n, found);
        check_places(found, some, set, got[0], size[0]);
    }
    free(x), free(back), free(found);
    for (int p = 0; p < 2; p++)
        free(want[p]), free(got[p]);
}

static void joint_pairs_and_rests(void **state)
{
    static const struct {
        int low, m;
    } maps[] = { { 1, 1 }, { 1, 15 }, { 70, 2 }, { 99, 11 }, { 120, 12 }, { LM_JOINT_LOW, 15 } };
    (void)state;
    for (int i = 0; i < N_COUNTS; i++)
        for (size_t k = 0; k < sizeof maps / sizeof *maps; k++)
            for (int wide = 0; wide < 2; wide++)
                check_joint(counts[i], maps[k].low, maps[k].m, wide);
    /* 1, -1.99, 0, NaN, 0: 4 i + k = 4, 7, 0, 10, 0 of a map with the indexes 0 and 1 (of 2^0) */
    const uint16_t x[5] = { 0x3f80, 0xbfff, 0x0000, 0x7fc0, 0x0000 };
    lm_joint_map map = { .low = 127, .m = 2, .rank = { 3, 5, 6, 7, 4, 2, 1, 0, 60, 61, 62, 63 } };
    uint8_t pair[3], rest[5];
    lm_joint_ref.split(&map, x, 5, pair, rest);
    assert_memory_equal(pair, ((uint8_t[]){ 0x01, 0xf0, 0x00 }), 3);
    assert_memory_equal(rest, ((uint8_t[]){ 0x00, 0x9f, 0x60, 0x40, 0x60 }), 5);
    const uint8_t set[2][16] = { { [0] = 2 }, { [0] = 0x80 } }; /* 16 and 240 */
    lm_joint_places found[2];
    assert_int_equal(lm_joint_ref.find(set, pair, 5, found), 1);
    assert_true(found[0].from == 0 && found[0].bits == 2);
}

/* By hand: 1.0 in BF16 is 3f80 = sign 0, exponent 7f, mantissa 0; -1.0 differs in the sign. */
static void fields_have_the_right_layout(void **state)
{
    (void)state;
    const uint16_t x[2] = { 0x3f80, 0xbf81 }, b[2] = { 0x3f81, 0xbf80 };
    uint8_t low[2], high[2], *plane[LM_PLANES_MAX] = { low, high };
    lm_planes_form f = { 2, true, LM_PLANES_NONE };
    lm_planes_ref.split(f, x, NULL, 2, plane);
    assert_int_equal(high[0], 0x7f);
    assert_int_equal(high[1], 0x7f);
    assert_int_equal(low[0], 0x00);
    assert_int_equal(low[1], 0x03);
    f.delta = LM_PLANES_SUB; /* both one step down: zig(-1) = 1 */
    lm_planes_ref.split(f, x, b, 2, plane);
    assert_int_equal(low[0] | high[0] << 8, 1);
    assert_int_equal(low[1] | high[1] << 8, 1);
}

/* Symbols with weights 2^-1, 2^-2, ...: `spread` of them, from `first` on. */
static void skewed(uint8_t *p, size_t n, int first, int spread, uint64_t seed)
{
    for (size_t i = 0; i < n; i++) {
        uint64_t w = word(i + (seed << 32));
        int k = __builtin_ctzll(w | (uint64_t)1 << (spread - 1));
        p[i] = (uint8_t)(first + k);
    }
}

static void check_code(const uint8_t *p, size_t n)
{
    static lm_exp_work w;
    const lm_exp_kernels *ref = lm_exp_at(LM_CPU_REF);
    memset(&w, 0xff, sizeof w);
    size_t plan = lm_exp_plan(ref, &w, p, n), room = 2 * n + 300, len;
    uint8_t *want = malloc(room), *got = malloc(room), *back = malloc(n + 1);
    assert_true(plan > 0);
    len = lm_exp_write(ref, &w, p, n, want, room);
    assert_true(len > 0 && len <= room - 1);
    assert_int_equal(lm_exp_write(ref, &w, p, n, got, len - 1), 0);
    for (lm_cpu_level l = LM_CPU_REF; l <= lm_cpu_detect(); l++) {
        const lm_exp_kernels *k = lm_exp_at(l);
        memset(&w, 0xff, sizeof w);
        got[len] = back[n] = 0x5a;
        assert_int_equal(lm_exp_plan(k, &w, p, n), plan);
        assert_int_equal(lm_exp_write(k, &w, p, n, got, len), len);
        assert_memory_equal(got, want, len);
        assert_int_equal(got[len], 0x5a);
        memset(back, 0, n);
        assert_true(lm_exp_read(k, &w, LM_EXP_SPAN, want, len, back, n));
        assert_memory_equal(back, p, n);
        assert_int_equal(back[n], 0x5a);
        assert_false(lm_exp_read(k, &w, LM_EXP_SPAN, want, len - 1, back, n));
    }
    assert_true(n >= LM_EXP_SAMPLE || (len >= plan && len <= plan + LM_EXP_STREAMS));
    free(want), free(got), free(back);
}

static void codes_are_restored(void **state)
{
    (void)state;
    static const size_t lengths[] = { 2, 3, 100, 4095, 4096, 4097, 5003, 40000, 65536, 100001 };
    uint8_t *p = malloc(100001);
    for (int i = 0; i < 10; i++) {
        for (int spread = 2; spread <= 64; spread += spread < 4 ? 1 : 30) {
            skewed(p, lengths[i], spread > 40 ? 190 : 110, spread, (uint64_t)i);
            p[0] = 0, p[lengths[i] - 1] = 255;
            check_code(p, lengths[i]);
        }
        for (size_t k = 0; k < lengths[i]; k++) /* all symbols alike, in long runs, in one stream */
            p[k] = (uint8_t)word(k);
        p[1] = (uint8_t)(p[0] + 1);
        check_code(p, lengths[i]);
        for (size_t k = 0; k < lengths[i]; k++)
            p[k] = (uint8_t)(k * 7 / lengths[i]);
        p[1] = 9;
        check_code(p, lengths[i]);
    }
    free(p);
}

/* Counts that grow like Fibonacci numbers need codes longer than 11 bits; the limit is kept and
 * costs less than 1 %. */
static void lengths_are_bounded(void **state)
{
    (void)state;
    static lm_exp_work w;
    uint8_t *p = malloc(1 << 20);
    size_t n = 0;
    for (size_t a = 1, b = 1, s = 0; s < 26; s++) {
        for (size_t k = 0; k < a; k++)
            p[n++] = (uint8_t)(3 * s);
        size_t next = a + b;
        a = b, b = next;
    }
    check_code(p, n);
    size_t len = lm_exp_plan(lm_exp_at(LM_CPU_REF), &w, p, n), unbounded = 0;
    for (size_t a = 1, b = 1, s = 0; s < 26; s++) {
        assert_in_range(w.length[3 * s], 1, LM_EXP_BITS);
        unbounded += a * (s ? 26 - s : 25);
        size_t next = a + b;
        a = b, b = next;
    }
    assert_true(len < 60 + unbounded / 8 + unbounded / 800);
    free(p);
}

static void one_symbol_is_not_coded(void **state)
{
    (void)state;
    static lm_exp_work w;
    uint8_t p[100] = { 0 };
    assert_int_equal(lm_exp_plan(lm_exp_at(lm_cpu_detect()), &w, p, 100), 0);
}

static void codes_that_do_not_fill_are_refused(void **state)
{
    (void)state;
    static lm_exp_work w;
    uint8_t out[8];
    const uint8_t good[] = { 5, 6, 0x11, 0x0a }, gap[] = { 5, 6, 0x21, 0x0a },
                  over[] = { 5, 7, 0x11, 0x01, 0x0a }, far[] = { 5, 6, 0xc1, 0x0a },
                  order[] = { 6, 5, 0x11, 0x0a }, tail[] = { 5, 6, 0x11, 0x1a },
                  twelve[] = { 5, 17, 0x21, 0x43, 0x65, 0x87, 0xa9, 0xcb, 0x0c, 0x12 };
    for (lm_cpu_level l = LM_CPU_REF; l <= lm_cpu_detect(); l++) {
        const lm_exp_kernels *k = lm_exp_at(l);
        assert_true(lm_exp_read(k, &w, LM_EXP_SPAN, good, sizeof good, out, 4));
        assert_memory_equal(out, "\5\6\5\6", 4);
        assert_false(lm_exp_read(k, &w, LM_EXP_SPAN, gap, sizeof gap, out, 4));
        assert_false(lm_exp_read(k, &w, LM_EXP_SPAN, over, sizeof over, out, 4));
        assert_false(lm_exp_read(k, &w, LM_EXP_SPAN, far, sizeof far, out, 4));
        assert_false(lm_exp_read(k, &w, LM_EXP_SPAN, order, sizeof order, out, 4));
        assert_false(lm_exp_read(k, &w, LM_EXP_SPAN, tail, sizeof tail, out, 4));
        assert_false(lm_exp_read(k, &w, LM_EXP_SPAN, twelve, sizeof twelve, out, 4));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(planes_of_every_form),
        cmocka_unit_test(joint_pairs_and_rests),
        cmocka_unit_test(fields_have_the_right_layout),
        cmocka_unit_test(codes_are_restored),
        cmocka_unit_test(lengths_are_bounded),
        cmocka_unit_test(one_symbol_is_not_coded),
        cmocka_unit_test(codes_that_do_not_fill_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
