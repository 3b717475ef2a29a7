/* SPDX-License-Identifier: Apache-2.0 */
/* Byte planes and their entropy coder: every level gives the reference's bytes, and they come back.
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

static void check_joint(size_t n, uint8_t low, bool wide)
{
    size_t rest = lm_joint_rest(n);
    uint8_t *x = bytes(2 * n, 6), *back = bytes(2 * n, 7);
    uint8_t *want[2] = { bytes(n, 4), bytes(rest, 4) }, *got[2] = { bytes(n, 5), bytes(rest, 5) };
    for (size_t i = 0; i < n && !wide; i++) /* exponents 0 and low .. low + 61 */
        if (x[2 * i] >> 7 | (x[2 * i + 1] & 0x7f) << 1) {
            unsigned e = low + word(i) % LM_JOINT_EXPONENTS;
            x[2 * i] = (uint8_t)((x[2 * i] & 0x7f) | e << 7);
            x[2 * i + 1] = (uint8_t)((x[2 * i + 1] & 0x80) | e >> 1);
        }
    bool escaped = lm_joint_ref.split(x, n, low, want[0], want[1]);
    assert_true(wide || !escaped);
    for (lm_cpu_level l = LM_CPU_REF; l <= lm_cpu_detect(); l++) {
        const lm_joint_kernels *k = lm_joint_at(l);
        assert_int_equal(k->split(x, n, low, got[0], got[1]), escaped);
        for (int p = 0; p < 2 && n; p++)
            assert_memory_equal(got[p], want[p], p ? rest : n);
        check_guard(got[0], n);
        check_guard(got[1], rest);
        assert_int_equal(k->join(got[0], got[1], n, low, back), escaped);
        for (size_t i = 0; i < n; i++)
            if (got[0][i] < LM_JOINT_ESCAPE)
                assert_memory_equal(back + 2 * i, x + 2 * i, 2);
            else
                assert_int_equal((back[2 * i] ^ x[2 * i]) & 0x7f, 0);
        check_guard(back, 2 * n);
        for (size_t i = 0; i <= n; i += 1 + i / 3)
            assert_int_equal(k->escape(got[0], i, n), lm_joint_ref.escape(want[0], i, n));
    }
    free(x), free(back);
    for (int p = 0; p < 2; p++)
        free(want[p]), free(got[p]);
}

static void joint_symbols_and_rests(void **state)
{
    static const uint8_t lows[] = { 1, 70, LM_JOINT_LOW };
    (void)state;
    for (int i = 0; i < N_COUNTS; i++)
        for (int k = 0; k < 3; k++)
            for (int wide = 0; wide < 2; wide++)
                check_joint(counts[i], lows[k], wide);
    const uint16_t x[4] = { 0x3f80, 0xbfff, 0x0000, 0x7fc0 }; /* 1, -1.99, 0, NaN */
    uint8_t symbol[4], rest[3];
    assert_true(lm_joint_ref.split(x, 4, 127, symbol, rest));
    assert_memory_equal(symbol, ((uint8_t[]){ 4, 7, 0, 0xfe }), 4);
    assert_memory_equal(rest, ((uint8_t[]){ 0xc0, 0x0f, 0 }), 3);
}

/* By hand: 1.0 in BF16 is 3f80 = sign 0, exponent 7f, mantissa 0; -1.0 differs in the sign. */
static void fields_lie_where_they_should(void **state)
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

static void check_limit(int limit, const uint8_t *p, size_t n)
{
    static lm_exp_work w;
    const lm_exp_kernels *ref = lm_exp_at(LM_CPU_REF);
    memset(&w, 0xff, sizeof w);
    size_t plan = lm_exp_plan(ref, &w, limit, p, n), room = 2 * n + 300, len;
    uint8_t *want = malloc(room), *got = malloc(room), *back = malloc(n + 1);
    assert_true(plan > 0);
    len = lm_exp_write(ref, &w, p, n, want, room);
    assert_true(len > 0 && len <= room - 1);
    assert_int_equal(lm_exp_write(ref, &w, p, n, got, len - 1), 0);
    for (lm_cpu_level l = LM_CPU_REF; l <= lm_cpu_detect(); l++) {
        const lm_exp_kernels *k = lm_exp_at(l);
        memset(&w, 0xff, sizeof w);
        got[len] = back[n] = 0x5a;
        assert_int_equal(lm_exp_plan(k, &w, limit, p, n), plan);
        assert_int_equal(lm_exp_write(k, &w, p, n, got, len), len);
        assert_memory_equal(got, want, len);
        assert_int_equal(got[len], 0x5a);
        memset(back, 0, n);
        assert_true(lm_exp_read(k, &w, limit, want, len, back, n));
        assert_memory_equal(back, p, n);
        assert_int_equal(back[n], 0x5a);
        assert_false(lm_exp_read(k, &w, limit, want, len - 1, back, n));
    }
    assert_true(n >= LM_EXP_SAMPLE || (len >= plan && len <= plan + LM_EXP_STREAMS));
    free(want), free(got), free(back);
}

static void check_code(const uint8_t *p, size_t n)
{
    check_limit(LM_EXP_BITS, p, n);
    check_limit(LM_EXP_LONG, p, n);
}

static void codes_come_back(void **state)
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

/* Counts that grow like Fibonacci numbers want codes longer than 11 bits; the bound holds and costs
 * less than 1 %. */
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
    size_t len = lm_exp_plan(lm_exp_at(LM_CPU_REF), &w, LM_EXP_BITS, p, n), unbounded = 0;
    for (size_t a = 1, b = 1, s = 0; s < 26; s++) {
        assert_in_range(w.length[3 * s], 1, LM_EXP_BITS);
        unbounded += a * (s ? 26 - s : 25);
        size_t next = a + b;
        a = b, b = next;
    }
    assert_true(len < 60 + unbounded / 8 + unbounded / 800);
    assert_true(lm_exp_plan(lm_exp_at(LM_CPU_REF), &w, LM_EXP_LONG, p, n) < len);
    assert_int_equal(w.length[0], LM_EXP_LONG);
    free(p);
}

static void one_symbol_is_not_coded(void **state)
{
    (void)state;
    static lm_exp_work w;
    uint8_t p[100] = { 0 };
    assert_int_equal(lm_exp_plan(lm_exp_at(lm_cpu_detect()), &w, LM_EXP_BITS, p, 100), 0);
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
        assert_true(lm_exp_read(k, &w, LM_EXP_BITS, good, sizeof good, out, 4));
        assert_memory_equal(out, "\5\6\5\6", 4);
        assert_false(lm_exp_read(k, &w, LM_EXP_BITS, gap, sizeof gap, out, 4));
        assert_false(lm_exp_read(k, &w, LM_EXP_BITS, over, sizeof over, out, 4));
        assert_false(lm_exp_read(k, &w, LM_EXP_BITS, far, sizeof far, out, 4));
        assert_false(lm_exp_read(k, &w, LM_EXP_BITS, order, sizeof order, out, 4));
        assert_false(lm_exp_read(k, &w, LM_EXP_BITS, tail, sizeof tail, out, 4));
        assert_true(lm_exp_read(k, &w, LM_EXP_LONG, twelve, sizeof twelve, out, 4));
        assert_memory_equal(out, "\5\6\5\6", 4);
        assert_false(lm_exp_read(k, &w, LM_EXP_BITS, twelve, sizeof twelve, out, 4));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(planes_of_every_form),
        cmocka_unit_test(joint_symbols_and_rests),
        cmocka_unit_test(fields_lie_where_they_should),
        cmocka_unit_test(codes_come_back),
        cmocka_unit_test(lengths_are_bounded),
        cmocka_unit_test(one_symbol_is_not_coded),
        cmocka_unit_test(codes_that_do_not_fill_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
