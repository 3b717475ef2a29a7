/* SPDX-License-Identifier: Apache-2.0 */
/* Every code of every narrow float, both directions, against plain arithmetic without bit
 * operations. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "numeric/dtype.h"

typedef struct {
    lm_dtype type;
    int e, m;
    bool has_inf;
} shape;

static const shape shapes[] = {
    { LM_DTYPE_F16, 5, 10, true },
    { LM_DTYPE_BF16, 8, 7, true },
    { LM_DTYPE_F8E4M3, 4, 3, false },
    { LM_DTYPE_F8E5M2, 5, 2, true },
};
enum { N_SHAPES = sizeof(shapes) / sizeof(shapes[0]) };

/* The value of a code by its textbook formula; NaN where the format says so. */
static double value_of(shape s, uint32_t code)
{
    int bias = (1 << (s.e - 1)) - 1;
    double sign = code >> (s.e + s.m) ? -1 : 1;
    int e = (int)(code >> s.m) & ((1 << s.e) - 1);
    uint32_t mant = code & ((1u << s.m) - 1);
    if (s.has_inf && e == (1 << s.e) - 1)
        return mant ? NAN : sign * INFINITY;
    if (!s.has_inf && e == (1 << s.e) - 1 && mant == (1u << s.m) - 1)
        return NAN;
    if (!e)
        return sign * ldexp(mant, 1 - bias - s.m);
    return sign * ldexp(1 + ldexp(mant, -s.m), e - bias);
}

static uint32_t encode(shape s, double v)
{
    uint16_t out = 0;
    uint8_t out8 = 0;
    if (s.e + s.m == 15) {
        lm_set(s.type, &out, 0, v);
        return out;
    }
    lm_set(s.type, &out8, 0, v);
    return out8;
}

static double decode(shape s, uint32_t code)
{
    uint16_t c = (uint16_t)code;
    uint8_t c8 = (uint8_t)code;
    return s.e + s.m == 15 ? lm_get(s.type, &c, 0) : lm_get(s.type, &c8, 0);
}

static void every_code_decodes_and_returns(void **state)
{
    (void)state;
    for (int k = 0; k < N_SHAPES; k++) {
        shape s = shapes[k];
        for (uint32_t c = 0; c < 1u << (1 + s.e + s.m); c++) {
            double want = value_of(s, c), got = decode(s, c);
            if (isnan(want)) {
                assert_true(isnan(got));
                assert_true(isnan(decode(s, encode(s, got))));
                continue;
            }
            assert_true(got == want && !signbit(got) == !signbit(want));
            assert_int_equal(encode(s, want), c);
        }
    }
}

/* Between neighbours: just below, at and just above the middle.  The offsets are far below float's
 * precision, so a conversion that rounds twice fails here. */
static void every_midpoint_goes_to_even(void **state)
{
    (void)state;
    for (int k = 0; k < N_SHAPES; k++) {
        shape s = shapes[k];
        for (uint32_t c = 0; c + 1 < 1u << (s.e + s.m); c++) {
            double a = value_of(s, c), b = value_of(s, c + 1);
            if (isnan(a) || isnan(b) || isinf(b))
                break;
            double mid = (a + b) / 2;
            assert_int_equal(encode(s, mid), c & 1 ? c + 1 : c);
            assert_int_equal(encode(s, nextafter(mid, 0)), c);
            assert_int_equal(encode(s, nextafter(mid, INFINITY)), c + 1);
            assert_int_equal(encode(s, -mid), encode(s, mid) | 1u << (s.e + s.m));
        }
    }
}

static void overflow_boundaries(void **state)
{
    (void)state;
    assert_int_equal(lm_f32_to_f8e4m3(464, false), 0x7e);
    assert_int_equal(lm_f32_to_f8e4m3(464.1f, false), 0x7f);
    assert_int_equal(lm_f32_to_f8e4m3(464.1f, true), 0x7e);
    assert_int_equal(lm_f32_to_f8e4m3(-INFINITY, true), 0xfe);
    assert_int_equal(lm_f32_to_f8e4m3(INFINITY, false), 0x7f);
    assert_int_equal(lm_f32_to_f8e4m3(NAN, true) & 0x7f, 0x7f);
    assert_int_equal(lm_f32_to_f8e5m2(61439, false), 0x7b);
    assert_int_equal(lm_f32_to_f8e5m2(61440, false), 0x7c);
    assert_int_equal(lm_f32_to_f8e5m2(61440, true), 0x7b);
    assert_int_equal(lm_f32_to_f16(65519.99f), 0x7bff);
    assert_int_equal(lm_f32_to_f16(65520), 0x7c00);
    assert_int_equal(lm_f32_to_f16(-65520), 0xfc00);
    assert_int_equal(lm_f64_to_bf16(0x1.ffp127 - 0x1p80), 0x7f7f);
    assert_int_equal(lm_f64_to_bf16(0x1.ffp127), 0x7f80);
    assert_int_equal(lm_f32_to_f16(0x1p-25f), 0);
    assert_int_equal(lm_f64_to_f16(0x1.0000000001p-25), 1);
    assert_int_equal(lm_f64_to_f16(-0.0), 0x8000);
    assert_int_equal(lm_f64_to_f16(0x1p-1074), 0);
}

/* The bit trick of the inline f32 -> bf16 and the general rounding must agree. */
static void bf16_two_ways(void **state)
{
    (void)state;
    uint64_t x = 88172645463325252u;
    for (int i = 0; i < 2000000; i++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        uint32_t u = (uint32_t)(x >> 16);
        float f;
        memcpy(&f, &u, 4);
        uint16_t a = lm_f32_to_bf16(f), b = lm_f64_to_bf16(f);
        if (isnan(f))
            assert_true(isnan(lm_bf16_to_f32(a)) && isnan(lm_bf16_to_f32(b)));
        else
            assert_int_equal(a, b);
    }
    /* the value that rounds up twice through float but down once */
    double d = 1 + 0x1p-8 - 0x1p-40;
    assert_int_equal(lm_f64_to_bf16(d), 0x3f80);
    assert_int_equal(lm_f64_to_bf16(1 + 0x1p-8 + 0x1p-40), 0x3f81);
}

/* A number at fraction f between two codes is rounded up for a share f of all draws; exact numbers
 * are unchanged.
 */
static void stochastic_rounding_of_every_format(void **state)
{
    (void)state;
    for (int k = 0; k < N_SHAPES; k++) {
        shape s = shapes[k];
        uint32_t step = s.e + s.m == 15 ? 997 : 1;
        for (uint32_t c = 0; c + 1 < 1u << (s.e + s.m); c += step) {
            double a = value_of(s, c), b = value_of(s, c + 1);
            if (isnan(b) || isinf(b))
                break;
            int up = 0;
            for (uint32_t r = 0; r < 64; r++) {
                uint16_t code = lm_f64_round_sr(s.type, -(a + (b - a) * 0.625), r << 26, false);
                assert_true(code == (c | 1u << (s.e + s.m)) ||
                            code == ((c + 1) | 1u << (s.e + s.m)));
                up += (code & 1) != (c & 1);
            }
            assert_int_equal(up, 40);
            assert_int_equal(lm_f64_round_sr(s.type, b, 0xffffffffu, false), c + 1);
        }
        double least = value_of(s, 1);
        assert_int_equal(lm_f64_round_sr(s.type, least * 0x1p-20, 0xffffffffu, false), 1);
        assert_int_equal(lm_f64_round_sr(s.type, least * 0x1p-20, 0xff000000u, false), 0);
        assert_int_equal(lm_f64_round_sr(s.type, 1e-300, 0xffffffffu, false), 0);
    }
    assert_int_equal(lm_f64_round_sr(LM_DTYPE_F8E4M3, 460, 0xffffffffu, false), 0x7e);
    assert_int_equal(lm_f64_round_sr(LM_DTYPE_F8E4M3, 481, 0, false), 0x7f);
    assert_int_equal(lm_f64_round_sr(LM_DTYPE_F8E5M2, INFINITY, 0, true), 0x7b);
}

static void integers_clamp(void **state)
{
    (void)state;
    int8_t i8;
    uint16_t u16;
    int64_t i64;
    uint64_t u64;
    lm_set(LM_DTYPE_I8, &i8, 0, 200.0);
    assert_int_equal(i8, 127);
    lm_set(LM_DTYPE_I8, &i8, 0, -1e300);
    assert_int_equal(i8, -128);
    lm_set(LM_DTYPE_I8, &i8, 0, 2.5);
    assert_int_equal(i8, 2);
    lm_set(LM_DTYPE_U16, &u16, 0, -3);
    assert_int_equal(u16, 0);
    lm_set(LM_DTYPE_I64, &i64, 0, 1e30);
    assert_true(i64 == INT64_MAX);
    lm_set(LM_DTYPE_U64, &u64, 0, NAN);
    assert_true(u64 == 0);
    const int64_t big[2] = { INT64_MAX - 1, -5 };
    uint64_t w[2];
    lm_convert(LM_DTYPE_I64, big, LM_DTYPE_U64, w, 2);
    assert_true(w[0] == INT64_MAX - 1 && w[1] == 0);
}

static void names_and_sizes(void **state)
{
    (void)state;
    for (int d = 0; d < LM_DTYPE_COUNT; d++) {
        assert_int_equal(lm_dtype_parse(lm_dtype_name((lm_dtype)d)), d);
        assert_int_equal(lm_dtype_parse(lm_dtype_st_name((lm_dtype)d)), d);
        assert_true(lm_dtype_size((lm_dtype)d) >= 1);
    }
    assert_int_equal(lm_dtype_parse("torch.bfloat16"), LM_DTYPE_BF16);
    assert_int_equal(lm_dtype_parse("float32"), LM_DTYPE_F32);
    assert_int_equal(lm_dtype_parse("complex64"), LM_DTYPE_NONE);
    assert_int_equal(lm_dtype_parse(NULL), LM_DTYPE_NONE);
    assert_int_equal(lm_dtype_size(LM_DTYPE_NONE), 0);
}

static void convert_arrays(void **state)
{
    (void)state;
    float x[37], y[37];
    uint16_t h[37];
    for (int i = 0; i < 37; i++)
        x[i] = (float)i * 0.25f - 3;
    lm_convert(LM_DTYPE_F32, x, LM_DTYPE_BF16, h, 37);
    lm_convert(LM_DTYPE_BF16, h, LM_DTYPE_F32, y, 37);
    assert_memory_equal(x, y, sizeof x); /* all of them fit 8 bits */
    lm_convert(LM_DTYPE_F32, x, LM_DTYPE_F16, h, 37);
    lm_convert(LM_DTYPE_F16, h, LM_DTYPE_F32, y, 37);
    assert_memory_equal(x, y, sizeof x);
    lm_convert(LM_DTYPE_F32, x, LM_DTYPE_F32, y, 0);
}

/* Arrays are converted by separate loops: the same as lm_set and lm_get for single elements, for
 * every code and for floats of every exponent, with the neighbours of each rounding boundary of F16
 * and FP8. */
static void arrays_are_scalars(void **state)
{
    (void)state;
    static const lm_dtype types[] = { LM_DTYPE_F16, LM_DTYPE_BF16, LM_DTYPE_F8E4M3,
                                      LM_DTYPE_F8E5M2 };
    enum { N = 65536 };
    static uint16_t codes[N], want[N];
    static float x[N];
    for (int t = 0; t < 4; t++) {
        size_t size = lm_dtype_size(types[t]);
        int n = size == 1 ? 256 : N;
        for (int i = 0; i < n; i++)
            size == 1 ? (((uint8_t *)codes)[i] = (uint8_t)i) : (codes[i] = (uint16_t)i);
        lm_convert(types[t], codes, LM_DTYPE_F32, x, n);
        for (int i = 0; i < n; i++) {
            float one = (float)lm_get(types[t], codes, i);
            assert_true(isnan(x[i]) ? isnan(one) : memcmp(&one, &x[i], 4) == 0);
        }
        for (uint32_t low = 0; low < 9; low++) {
            static const uint32_t lows[] = { 0,      1,      0xfff,  0x1000, 0x1001,
                                             0x7fff, 0x8000, 0x8001, 0xffff };
            for (uint32_t i = 0; i < N; i++) {
                uint32_t u = i << 16 | lows[low];
                memcpy(&x[i], &u, 4);
            }
            lm_convert(LM_DTYPE_F32, x, types[t], codes, N);
            for (int i = 0; i < N; i++)
                if (types[t] == LM_DTYPE_F16)
                    want[i] = lm_f32_to_f16(x[i]);
                else if (types[t] == LM_DTYPE_BF16)
                    want[i] = lm_f32_to_bf16(x[i]);
                else if (types[t] == LM_DTYPE_F8E4M3)
                    ((uint8_t *)want)[i] = lm_f32_to_f8e4m3(x[i], false);
                else
                    ((uint8_t *)want)[i] = lm_f32_to_f8e5m2(x[i], false);
            assert_memory_equal(codes, want, N * size);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_code_decodes_and_returns),
        cmocka_unit_test(every_midpoint_goes_to_even),
        cmocka_unit_test(overflow_boundaries),
        cmocka_unit_test(bf16_two_ways),
        cmocka_unit_test(stochastic_rounding_of_every_format),
        cmocka_unit_test(integers_clamp),
        cmocka_unit_test(names_and_sizes),
        cmocka_unit_test(convert_arrays),
        cmocka_unit_test(arrays_are_scalars),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
