/* SPDX-License-Identifier: Apache-2.0 */
/* Codes with scales: the same bits on every level of the CPU, for blocks that random examples lack;
 * the dynamic map is that of the format with that name; stochastic rounding has the right mean. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <string.h>

#include "base/par.h"
#include "base/rng.h"
#include "kernels/codes.h"
#include "numeric/format.h"

enum { COUNT = 256 * 12 + 37, BLOCKS = 13 };

typedef struct {
    uint8_t code[COUNT];
    float scale[BLOCKS], zero[BLOCKS];
} coded;

static lm_tensor row_of(void *data, lm_dtype type, int64_t n)
{
    return (lm_tensor){ .data = data, .dtype = type, .ndim = 1, .dim = { n } };
}

static void run(const char *op, lm_cpu_level level, const lm_codes_attr *a, int64_t step, float *x,
                coded *k, const double *gate)
{
    static lm_par *par;
    lm_err e = { 0 };
    lm_step at = { .seed = 9, .step = step };
    lm_tensor none = { .data = NULL }, number = row_of(x, LM_DTYPE_F32, COUNT),
              code = row_of(k->code, LM_DTYPE_U8, lm_codes_bytes(a->format, COUNT)),
              scale = row_of(k->scale, LM_DTYPE_F32, BLOCKS),
              zero = row_of(k->zero, LM_DTYPE_F32, BLOCKS),
              open = row_of((void *)(uintptr_t)gate, LM_DTYPE_F64, 1);
    lm_tensor planes[3] = { code, scale, a->format == LM_CODES_DYNAMIC8 ? none : zero };
    lm_tensor numbers[2] = { gate ? open : none, number };
    bool encodes = !strcmp(op, "encode");
    const lm_kernel *kernel = lm_cpu_kernel(op, LM_DTYPE_F32, level);
    if (!par)
        assert_int_equal(lm_par_new(&par, 2, &e), LM_OK);
    assert_non_null(kernel);
    kernel->run(&(lm_call){ .attr = a,
                            .in = encodes ? numbers : planes,
                            .n_in = encodes ? 2 : 3,
                            .out = encodes ? planes : &numbers[1],
                            .n_out = encodes ? 3 : 1,
                            .par = par,
                            .step = &at });
}

/* Blocks of all kinds. */
static void draw(float *x)
{
    lm_rng r = lm_rng_make(1, "blocks", 0);
    for (int i = 0; i < COUNT; i++) {
        float v = (float)lm_rng_normal(r, (uint64_t)i);
        switch (i / 256) {
        case 0: /* as they are */
        case 12:
            break;
        case 1: /* second moments */
            v = v * v;
            break;
        case 2:
            v = 0;
            break;
        case 3: /* of many decades */
            v = v * (float)pow(10, -(i % 9));
            break;
        case 4:
            v = i % 7 ? v : -0.0f;
            break;
        case 5:
            v = v * v * v * v * 1e-20f;
            break;
        case 6:
            v = i % 256 == 77 ? NAN : v;
            break;
        case 7:
            v = i % 256 == 3 ? -INFINITY : v;
            break;
        case 8: /* far from 0 */
            v = v * 1e-3f + 5;
            break;
        case 9:
            v = -v * v;
            break;
        case 10:
            v = i % 2 ? 0.0f : -0.0f;
            break;
        default: /* near the largest of F32 */
            v = v * 5e37f;
        }
        x[i] = v;
    }
}

static void test_same_bits(void **state)
{
    static float x[COUNT], want_x[COUNT], y[COUNT];
    (void)state;
    draw(x);
    for (int f = 0; f < 3; f++)
        for (int chance = 0; chance <= (f > 0); chance++)
            for (int level = LM_CPU_REF + 1; level <= (int)lm_cpu_detect(); level++) {
                lm_codes_attr a = { (lm_codes_format)f, chance, 5 };
                coded want, got;
                memset(&want, 0x5a, sizeof want);
                memset(&got, 0x5a, sizeof got);
                run("encode", LM_CPU_REF, &a, 3, x, &want, NULL);
                run("encode", (lm_cpu_level)level, &a, 3, x, &got, NULL);
                assert_memory_equal(got.code, want.code, sizeof want.code);
                for (int b = 0; b < BLOCKS; b++) {
                    assert_true(isnan(want.scale[b]) == (b == 6 || b == 7));
                    if (!isnan(want.scale[b]))
                        assert_memory_equal(&got.scale[b], &want.scale[b], sizeof(float));
                    else
                        assert_true(isnan(got.scale[b]));
                }
                assert_memory_equal(got.zero, want.zero, sizeof want.zero);
                run("decode", LM_CPU_REF, &a, 3, want_x, &want, NULL);
                run("decode", (lm_cpu_level)level, &a, 3, y, &want, NULL);
                for (int i = 0; i < COUNT; i++)
                    assert_true(y[i] == want_x[i] || (isnan(y[i]) && isnan(want_x[i])));
            }
}

static void test_dynamic_is_the_format(void **state)
{
    static float x[COUNT], y[COUNT], want_y[COUNT];
    lm_codes_attr a = { .format = LM_CODES_DYNAMIC8 };
    const lm_format *f;
    coded want, got;
    lm_err e = { 0 };
    (void)state;
    draw(x);
    assert_int_equal(lm_format_find("dynamic8", NULL, &f, &e), LM_OK);
    f->encode(f, x, 1, COUNT, COUNT, (void *[]){ want.code, want.scale }, NULL);
    f->decode(f, (const void *[]){ want.code, want.scale }, 1, COUNT, want_y, COUNT);
    run("encode", lm_cpu_detect(), &a, 0, x, &got, NULL);
    run("decode", lm_cpu_detect(), &a, 0, y, &got, NULL);
    assert_memory_equal(got.code, want.code, COUNT);
    for (int i = 0; i < COUNT; i++) {
        assert_true(y[i] == want_y[i] || (isnan(y[i]) && isnan(want_y[i])));
        if (i / 256 == 1)
            assert_true(y[i] > 0); /* no second moment becomes 0 */
    }
}

static void test_affine_bounds(void **state)
{
    static float x[COUNT], y[COUNT];
    (void)state;
    draw(x);
    for (int f = LM_CODES_AFFINE8; f <= LM_CODES_AFFINE4; f++)
        for (int chance = 0; chance < 2; chance++) {
            lm_codes_attr a = { (lm_codes_format)f, chance, 5 };
            coded k;
            run("encode", lm_cpu_detect(), &a, 0, x, &k, NULL);
            run("decode", lm_cpu_detect(), &a, 0, y, &k, NULL);
            for (int i = 0; i < COUNT;
                 i++) /* the ends of a range are moved by its zero's rounding */
                if (i / 256 == 0 || i / 256 == 2 || i / 256 == 4)
                    assert_true(fabsf(x[i] - y[i]) <= k.scale[i / 256] * 1.0001f);
        }
}

static void test_chance(void **state)
{
    static float x[COUNT], y[COUNT], sum[COUNT];
    const lm_codes_attr a = { LM_CODES_AFFINE8, true, 5 };
    coded k, other;
    (void)state;
    draw(x);
    memset(sum, 0, sizeof sum);
    for (int t = 0; t < 400; t++) {
        run("encode", lm_cpu_detect(), &a, t, x, &k, NULL);
        run("decode", lm_cpu_detect(), &a, t, y, &k, NULL);
        for (int i = 0; i < 256; i++)
            sum[i] += y[i] - x[i];
    }
    for (int i = 0; i < 256; i++) /* four deviations of the mean of 400, except at the ends */
        if (fabsf(x[i]) < 2)
            assert_true(fabsf(sum[i] / 400) < k.scale[0] * 0.5f / 20 * 4);
    run("encode", lm_cpu_detect(), &(lm_codes_attr){ LM_CODES_AFFINE8, true, 6 }, 399, x, &other,
        NULL);
    assert_memory_not_equal(k.code, other.code, 256); /* another stream */
}

static void test_gate(void **state)
{
    static float x[COUNT];
    lm_codes_attr a = { .format = LM_CODES_AFFINE4 };
    coded k, before;
    double gate = NAN;
    (void)state;
    draw(x);
    for (int level = LM_CPU_REF; level <= (int)lm_cpu_detect(); level++) {
        memset(&k, 0x5a, sizeof k);
        before = k;
        gate = NAN;
        run("encode", (lm_cpu_level)level, &a, 0, x, &k, &gate);
        assert_memory_equal(&k, &before, sizeof k);
        gate = 1;
        run("encode", (lm_cpu_level)level, &a, 0, x, &k, &gate);
        assert_memory_not_equal(&k, &before, sizeof k);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits),     cmocka_unit_test(test_dynamic_is_the_format),
        cmocka_unit_test(test_affine_bounds), cmocka_unit_test(test_chance),
        cmocka_unit_test(test_gate),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
