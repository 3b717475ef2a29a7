/* SPDX-License-Identifier: Apache-2.0 */
/* GGUF's quantised blocks: the layouts restated number by number, the bytes that ggml writes for the
 * same numbers, and what must hold whatever the input. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "base/hash.h"
#include "base/mem.h"
#include "base/rng.h"
#include "numeric/dtype.h"
#include "numeric/ggml.h"

enum { ROWS = 400, N = ROWS * 256 };

/* Normal numbers of very different sizes, with rows of zeros, of one sign, constant, half empty. */
static float *numbers(void)
{
    lm_rng r = lm_rng_make(7, "ggml test", 0);
    lm_err e = { 0 };
    float *x;
    static const float size[] = { 1.0f, 0.02f, 1e-4f, 3.0f };

    assert_int_equal(lm_alloc_n(&x, N, sizeof *x, "numbers", &e), LM_OK);
    for (int64_t i = 0; i < N; i++) {
        int64_t row = i / 256;
        /* sums of uniform draws: exact arithmetic, so the same on every machine */
        float u = 0.0f;
        for (uint64_t k = 0; k < 4; k++)
            u += (float)(lm_rng_u32(r, (uint64_t)i * 4 + k) >> 16) / 65536.0f - 0.5f;
        x[i] = u * size[row % 4];
        if (row % 97 == 5)
            x[i] = 0.0f;
        if (row % 97 == 6)
            x[i] = fabsf(x[i]);
        if (row % 97 == 7)
            x[i] = 1.5f;
        if (row % 97 == 8 && i % 256 < 40)
            x[i] = 0.0f;
    }
    return x;
}

static double f16_at(const uint8_t *p)
{
    uint16_t h;
    memcpy(&h, p, 2);
    return (double)lm_f16_to_f32(h);
}

/* Number i of a block, straight from the layout. */
static double restated(const char *name, const uint8_t *b, int i)
{
    if (name[3] != 'k') { /* blocks of 32 */
        int nibble_at = name[1] == '4' ? 2 : 6;
        if (!strcmp(name, "q8_0"))
            return f16_at(b) * (double)(int8_t)b[2 + i];
        bool offset = name[3] == '1';
        nibble_at += offset ? 2 : 0;
        int q = i < 16 ? b[nibble_at + i] & 15 : b[nibble_at + i - 16] >> 4;
        if (name[1] == '5')
            q += (b[nibble_at - 4 + i / 8] >> i % 8 & 1) * 16;
        if (offset)
            return f16_at(b) * q + f16_at(b + 2);
        return f16_at(b) * (q - (name[1] == '5' ? 16 : 8));
    }
    if (name[1] == '6') {
        int half = i / 128, l = i % 32, quarter = i % 128 / 32;
        int low = b[half * 64 + l + quarter % 2 * 32];
        int q =
            (quarter < 2 ? low & 15 : low >> 4) + (b[128 + half * 32 + l] >> 2 * quarter & 3) * 16;
        return f16_at(b + 208) * (double)(int8_t)b[192 + i / 16] * (q - 32);
    }
    int j = i / 32, sc, mn, q;
    const uint8_t *s = b + 4, *low = b + (name[1] == '4' ? 16 : 48);
    if (j < 4) {
        sc = s[j] & 63;
        mn = s[j + 4] & 63;
    } else {
        sc = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
        mn = (s[j + 4] >> 4) | (s[j] >> 6) << 4;
    }
    q = low[i / 64 * 32 + i % 32];
    q = i % 64 < 32 ? q & 15 : q >> 4;
    if (name[1] == '5')
        q += (b[16 + i % 32] >> j & 1) * 16;
    return f16_at(b) * sc * q - f16_at(b + 2) * mn;
}

static void test_layout(void **state)
{
    (void)state;
    uint8_t block[256];
    float y[256];
    lm_rng r = lm_rng_make(3, "ggml blocks", 0);

    for (int t = 0; lm_ggml_at(t); t++) {
        const lm_ggml_type *g = lm_ggml_at(t);
        for (uint64_t round = 0; round < 50; round++) {
            for (size_t i = 0; i < g->bytes; i++) /* any bytes, but no exponent of all ones */
                block[i] = (uint8_t)lm_rng_u32(r, round * 1000 + i);
            size_t d = !strcmp(g->name, "q6_k") ? 209 : 1;
            block[d] &= 0xbf;
            block[3] &= 0xbf;
            g->decode(block, g->block, y);
            for (int i = 0; i < g->block; i++) {
                double want = restated(g->name, block, i);
                assert_true(fabs((double)y[i] - want) <= 1e-6 * fabs(want) + 1e-3);
            }
        }
    }
}

/* XXH3-64 of the bytes that ggml's own functions (ggml_quantize_chunk, no importance matrix; ggml of
 * August 2026, compiled without contraction of products and sums) write for numbers(). */
static const struct {
    const char *name;
    uint64_t bytes;
    double error; /* root of the mean square, relative; bound with a tenth of room */
} golden[] = {
    { "q4_0", 0xd3376b96342a6e6c, 0.1 },  { "q4_1", 0x3066af983c68238f, 0.1 },
    { "q5_0", 0xa10b5e72d395d76b, 0.05 }, { "q5_1", 0xc0759ccf6df71c53, 0.05 },
    { "q8_0", 0x441c4638ef936805, 0.01 }, { "q4_k", 0xe01520aea87e24ee, 0.09 },
    { "q5_k", 0x6833734477b65127, 0.05 }, { "q6_k", 0x66575e653f17e6b0, 0.03 },
};

static void test_bytes_of_ggml(void **state)
{
    (void)state;
    float *x = numbers(), *y;
    lm_err e = { 0 };

    assert_int_equal(lm_alloc_n(&y, N, sizeof *y, "numbers", &e), LM_OK);
    for (size_t t = 0; t < sizeof golden / sizeof golden[0]; t++) {
        const lm_ggml_type *g;
        uint8_t *p;
        double error = 0.0, square = 0.0;
        assert_int_equal(lm_ggml_find(golden[t].name, &g, &e), LM_OK);
        size_t bytes = N / (size_t)g->block * g->bytes;
        assert_int_equal(lm_alloc_n(&p, bytes, 1, "blocks", &e), LM_OK);
        g->encode(x, N, p);
        g->decode(p, N, y);
        for (int i = 0; i < N; i++) {
            error += pow((double)y[i] - (double)x[i], 2);
            square += pow((double)x[i], 2);
        }
        assert_true(sqrt(error / square) < golden[t].error);
        if (lm_hash64(p, bytes, 0) != golden[t].bytes)
            fail_msg("%s: 0x%016llx", g->name, (unsigned long long)lm_hash64(p, bytes, 0));
        lm_free(p);
    }
    lm_free(x);
    lm_free(y);
}

/* A block alone and a block among others give the same bytes (pairs are searched together). */
static void test_blocks_are_independent(void **state)
{
    (void)state;
    float *x = numbers();
    uint8_t one[5 * 256], many[5 * 256];

    for (int t = 0; lm_ggml_at(t); t++) {
        const lm_ggml_type *g = lm_ggml_at(t);
        g->encode(x, 5 * g->block, many);
        for (int b = 0; b < 5; b++)
            g->encode(x + b * g->block, g->block, one + (size_t)b * g->bytes);
        assert_memory_equal(one, many, 5 * g->bytes);
    }
    lm_free(x);
}

static void test_what_is_no_number(void **state)
{
    (void)state;
    float x[256], y[256];
    uint8_t block[256];

    for (int t = 0; lm_ggml_at(t); t++) {
        const lm_ggml_type *g = lm_ggml_at(t);
        for (int i = 0; i < 256; i++)
            x[i] = i % 7 == 0 ? NAN : i % 7 == 1 ? INFINITY : i % 7 == 2 ? -3e38f : 1e-42f;
        g->encode(x, g->block, block);
        g->decode(block, g->block, y);
        for (int i = 0; i < g->block; i++)
            assert_true(isfinite(y[i]));
        memset(x, 0, sizeof x);
        g->encode(x, g->block, block);
        g->decode(block, g->block, y);
        for (int i = 0; i < g->block; i++)
            assert_true(y[i] == 0.0f);
    }
}

static void test_find(void **state)
{
    (void)state;
    const lm_ggml_type *g;
    lm_err e = { 0 };

    for (int t = 0; lm_ggml_at(t); t++)
        assert_ptr_equal(lm_ggml_of(lm_ggml_at(t)->ggml_type), lm_ggml_at(t));
    assert_int_equal(lm_ggml_find("Q4_K", &g, &e), LM_OK);
    assert_int_equal(g->ggml_type, 12);
    assert_null(lm_ggml_of(10));
    assert_int_equal(lm_ggml_find("q9", &g, &e), LM_EUSAGE);
    assert_non_null(strstr(e.todo, "q4_k"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layout),
        cmocka_unit_test(test_bytes_of_ggml),
        cmocka_unit_test(test_blocks_are_independent),
        cmocka_unit_test(test_what_is_no_number),
        cmocka_unit_test(test_find),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
