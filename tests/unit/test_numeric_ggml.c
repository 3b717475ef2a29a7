/* SPDX-License-Identifier: Apache-2.0 */
/* GGUF's quantised blocks: a second decoder element by element, the bytes that ggml writes for the
 * same numbers, and properties for any input. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "base/hash.h"
#include "base/mem.h"
#include "base/rng.h"
#include "numeric/format.h"

enum { ROWS = 400, N = ROWS * 256, ROW = 512 };

/* The i-th of the interleaved formats that can be decoded. */
static const lm_format *blocks_at(int i)
{
    for (int k = 0; lm_format_at(k); k++)
        if (lm_format_interleaved(lm_format_at(k)) && lm_format_at(k)->decode && !i--)
            return lm_format_at(k);
    return NULL;
}

static size_t bytes_of(const lm_format *f, int64_t numbers)
{
    lm_tensor_size size;
    lm_err e = { 0 };

    assert_int_equal(lm_tensor_bytes(f, 1, &numbers, &size, &e), LM_OK);
    return size.all;
}

static void encode(const lm_format *f, const float *x, const float *w, int64_t n, void *p)
{
    const lm_encode_mode mode = { .importance = w };

    f->encode(f, x, 1, n, n, &p, &mode);
}

static void decode(const lm_format *f, const void *p, int64_t n, float *y)
{
    f->decode(f, &p, 1, n, y, n);
}

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

static double e2m1(int code)
{
    static const double size[8] = { 0, 0.5, 1, 1.5, 2, 3, 4, 6 };
    return code > 7 ? -size[code - 8] : size[code];
}

static double e4m3(uint8_t s)
{
    int exponent = s >> 3 & 15, fraction = s & 7;
    if (s == 0x7f)
        return 0;
    return exponent ? ldexp(1 + fraction / 8.0, exponent - 7) : ldexp(fraction, -9);
}

/* The same for the types whose names do not follow a pattern. */
static double restated_other(const char *name, const uint8_t *b, int i)
{
    static const int values[16] = { -127, -104, -83, -65, -49, -35, -22, -10,
                                    1,    13,   25,  38,  53,  69,  89,  113 };
    int low16 = i % 32 < 16, at16 = i / 32 * 16 + i % 16;

    if (!strcmp(name, "iq4_nl"))
        return f16_at(b) * values[low16 ? b[2 + at16] & 15 : b[2 + at16] >> 4];
    if (!strcmp(name, "iq4_xs")) {
        int j = i / 32, high = b[2] | b[3] << 8, half = b[4 + j / 2];
        int sc = (j % 2 ? half >> 4 : half & 15) + (high >> 2 * j & 3) * 16 - 32;
        return f16_at(b) * sc * values[low16 ? b[8 + at16] & 15 : b[8 + at16] >> 4];
    }
    if (!strcmp(name, "mxfp4"))
        return ldexp(e2m1(i < 16 ? b[1 + i] & 15 : b[1 + i - 16] >> 4), b[0] - 127);
    if (!strcmp(name, "nvfp4")) {
        int byte = b[4 + i / 16 * 8 + i % 8];
        return e4m3(b[i / 16]) * e2m1(i % 16 < 8 ? byte & 15 : byte >> 4);
    }
    if (!strcmp(name, "fp8_e4m3_128")) { /* not ggml's */
        float scale;
        memcpy(&scale, b, sizeof scale);
        return (double)scale * (b[4 + i] & 128 ? -e4m3(b[4 + i] & 127) : e4m3(b[4 + i]));
    }
    if (!strcmp(name, "q1_0"))
        return b[2 + i / 8] >> i % 8 & 1 ? f16_at(b) : -f16_at(b);
    if (!strcmp(name, "q2_0"))
        return f16_at(b) * ((b[2 + i / 4] >> i % 4 * 2 & 3) - 1);
    int pair = b[(name[1] == '2' ? 16 : 32) + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
    if (!strcmp(name, "q2_k"))
        return f16_at(b + 80) * (b[i / 16] & 15) * pair - f16_at(b + 82) * (b[i / 16] >> 4);
    assert_string_equal(name, "q3_k");
    int j = i / 16, low = j < 8 ? b[96 + j] & 15 : b[96 + j - 8] >> 4;
    int sc = low + (b[104 + j % 4] >> j / 4 * 2 & 3) * 16 - 32;
    return f16_at(b + 108) * sc * (pair + (b[i % 32] >> i / 32 & 1) * 4 - 4);
}

/* Number i of a block, straight from the layout. */
static double restated(const char *name, const uint8_t *b, int i)
{
    if (name[0] != 'q' || name[1] < '4')
        return restated_other(name, b, i);
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
    /* where the exponents of F16 scales are: their highest bits must not all be set */
    static const struct {
        const char *name;
        int at[2];
    } scales[] = { { "q6_k", { 209, 209 } }, { "q2_k", { 81, 83 } }, { "q3_k", { 109, 109 } },
                   { "mxfp4", { 0, 0 } },    { "nvfp4", { 0, 1 } },  { "fp8_e4m3_128", { 3, 3 } } };
    uint8_t block[256];
    float y[256];
    lm_rng r = lm_rng_make(3, "ggml blocks", 0);

    for (int t = 0; blocks_at(t); t++) {
        const lm_format *g = blocks_at(t);
        for (uint64_t round = 0; round < 50; round++) {
            for (size_t i = 0; i < bytes_of(g, lm_format_group(g));
                 i++) /* any bytes, but no exponent of all ones */
                block[i] = (uint8_t)lm_rng_u32(r, round * 1000 + i);
            int at[2] = { 1, 3 };
            for (size_t k = 0; k < sizeof scales / sizeof *scales; k++)
                if (!strcmp(scales[k].name, g->name))
                    memcpy(at, scales[k].at, sizeof at);
            for (int k = 0; k < 2; k++)
                block[at[k]] &= 0xbf;
            for (int k = 0; k < 4 && !strcmp(g->name, "nvfp4"); k++)
                block[k] &= 0x7f;
            for (int k = 4; k < 132 && !strcmp(g->name, "fp8_e4m3_128"); k++)
                block[k] &= 0xfe; /* nor NaN */
            decode(g, block, lm_format_group(g), y);
            for (int i = 0; i < lm_format_group(g); i++) {
                double want = restated(g->name, block, i);
                assert_true(fabs((double)y[i] - want) <= 1e-6 * fabs(want) + 1e-3);
            }
        }
    }
}

/* Numbers from 0 to 3, many of them near 0, some of them 0: one for each of ROW columns. */
static void importance(float *w)
{
    lm_rng r = lm_rng_make(8, "ggml importance", 0);

    for (int64_t i = 0; i < ROW; i++) {
        float u = (float)(lm_rng_u32(r, (uint64_t)i) >> 16) / 65536.0f;
        w[i] = i % 61 == 5 || i / 32 == 3 ? 0.0f : u * u * u * u * 3.0f;
    }
}

/* XXH3-64 of the bytes that ggml's own functions (ggml_quantize_chunk; ggml of August 2026,
 * compiled without contraction of products and sums) write for numbers(), without importance matrix
 * and, in rows of ROW, with importance(). */
static const struct {
    const char *name;
    uint64_t bytes, weighted;
} golden[] = {
    { "q4_0", 0xd3376b96342a6e6c, 0x114da3db9a81236f },
    { "q4_1", 0x3066af983c68238f, 0xea9f76c08f569649 },
    { "q5_0", 0xa10b5e72d395d76b, 0x89bb0bb7257bbdbc },
    { "q5_1", 0xc0759ccf6df71c53, 0x763d6bc89ce23e7d },
    { "q8_0", 0x441c4638ef936805, 0x441c4638ef936805 },
    { "q2_k", 0x0e5a32d8a09dd592, 0x7efb1a457c5c6cc7 },
    { "q3_k", 0x0b980e5d986fe76e, 0x514f32198430043b },
    { "q4_k", 0xe01520aea87e24ee, 0xe1de5b45cfad7a64 },
    { "q5_k", 0x6833734477b65127, 0xea7abeeef08b22db },
    { "q6_k", 0x66575e653f17e6b0, 0x6444c788fb4c5ee3 },
    { "iq4_nl", 0x02d92299d3417a1b, 0x1d5e402960824c57 },
    { "iq4_xs", 0x87a728751e4d8b81, 0xd86ab5dbd3c27d59 },
};

static void check_hash(const char *name, const char *how, const void *p, size_t n, uint64_t want)
{
    if (lm_hash64(p, n, 0) != want)
        fail_msg("%s %s: 0x%016llx", name, how, (unsigned long long)lm_hash64(p, n, 0));
}

static void test_bytes_of_ggml(void **state)
{
    (void)state;
    float *x = numbers(), *y, w[ROW];
    lm_err e = { 0 };

    importance(w);
    assert_int_equal(lm_alloc_n(&y, N, sizeof *y, "numbers", &e), LM_OK);
    for (size_t t = 0; t < sizeof golden / sizeof golden[0]; t++) {
        const lm_format *g;
        uint8_t *p;
        double error = 0.0, square = 0.0;
        assert_int_equal(lm_format_find(golden[t].name, NULL, &g, &e), LM_OK);
        size_t row = bytes_of(g, ROW), bytes = bytes_of(g, N);
        assert_int_equal(lm_alloc_n(&p, bytes, 1, "blocks", &e), LM_OK);
        encode(g, x, NULL, N, p);
        decode(g, p, N, y);
        for (int i = 0; i < N; i++) {
            error += pow((double)y[i] - (double)x[i], 2);
            square += pow((double)x[i], 2);
        }
        assert_true(sqrt(error / square) < g->err_rms);
        check_hash(g->name, "plain", p, bytes, golden[t].bytes);
        for (size_t i = 0; i < N / ROW; i++)
            encode(g, x + i * ROW, w, ROW, p + i * row);
        check_hash(g->name, "weighted", p, bytes, golden[t].weighted);
        lm_free(p);
    }
    lm_free(x);
    lm_free(y);
}

/* Importance reduces the error that is weighted by it. */
static void test_importance_helps(void **state)
{
    (void)state;
    float *x = numbers(), w[ROW], y[ROW];
    uint8_t p[2 * ROW];

    importance(w);
    for (int t = 0; blocks_at(t); t++) {
        const lm_format *g = blocks_at(t);
        double error[2] = { 0 };
        for (int way = 0; way < 2 && lm_format_weighs(g); way++)
            for (size_t r = 0; r < N / ROW; r++) {
                encode(g, x + r * ROW, way ? w : NULL, ROW, p);
                decode(g, p, ROW, y);
                for (size_t i = 0; i < ROW; i++)
                    error[way] += (double)w[i] * pow((double)(y[i] - x[r * ROW + i]), 2);
            }
        if (lm_format_weighs(g) && !(error[1] < 0.98 * error[0]))
            fail_msg("%s: %g, without importance %g", g->name, error[1], error[0]);
    }
    lm_free(x);
}

/* A block alone and a block among others give the same bytes (pairs are searched together). */
static void test_blocks_are_independent(void **state)
{
    (void)state;
    float *x = numbers();
    uint8_t one[5 * 256], many[5 * 256];

    for (int t = 0; blocks_at(t); t++) {
        const lm_format *g = blocks_at(t);
        if (!g->encode)
            continue;
        int n = lm_format_group(g);
        encode(g, x, NULL, 5 * n, many);
        for (int b = 0; b < 5; b++)
            encode(g, x + b * n, NULL, n, one + bytes_of(g, b * n));
        assert_memory_equal(one, many, bytes_of(g, 5 * n));
    }
    lm_free(x);
}

static void test_not_a_number(void **state)
{
    (void)state;
    float x[256], y[256];
    uint8_t block[256];

    for (int t = 0; blocks_at(t); t++) {
        const lm_format *g = blocks_at(t);
        if (!g->encode)
            continue;
        for (int i = 0; i < 256; i++)
            x[i] = i % 7 == 0 ? NAN : i % 7 == 1 ? INFINITY : i % 7 == 2 ? -3e38f : 1e-42f;
        encode(g, x, NULL, lm_format_group(g), block);
        decode(g, block, lm_format_group(g), y);
        for (int i = 0; i < lm_format_group(g); i++)
            assert_true(isfinite(y[i]));
        memset(x, 0, sizeof x);
        encode(g, x, NULL, lm_format_group(g), block);
        decode(g, block, lm_format_group(g), y);
        for (int i = 0; i < lm_format_group(g); i++)
            assert_true(y[i] == 0.0f);
    }
}

/* Listed names are names of formats that are accepted. */
static void test_find(void **state)
{
    (void)state;
    const lm_format *g;
    lm_err e = { 0 };

    assert_int_equal(lm_format_find("Q4_K", lm_format_interleaved, &g, &e), LM_OK);
    assert_int_equal(g->gguf, 12);
    assert_int_equal(lm_format_find("bf16", lm_format_interleaved, &g, &e), LM_EUSAGE);
    assert_null(g);
    assert_non_null(strstr(e.what, "q4_k"));
    assert_null(strstr(e.what, "fp16"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layout),           cmocka_unit_test(test_bytes_of_ggml),
        cmocka_unit_test(test_importance_helps), cmocka_unit_test(test_blocks_are_independent),
        cmocka_unit_test(test_not_a_number),     cmocka_unit_test(test_find),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
