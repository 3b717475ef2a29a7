/* SPDX-License-Identifier: Apache-2.0 */
/* The entropy coder of key-value caches: every level gives the reference's bytes and decodes them, the
 * code length is that of the tables, and damaged streams are refused within their bounds. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cmocka.h>

#include "base/rng.h"
#include "kernels/rans.h"

enum { GUARD = 16, SLOTS = 1 << LM_RANS_BITS };

/* Two sets with a table for each column of each, made from the counts of the symbols. */
typedef struct {
    lm_rans_shape shape;
    int symbols[2];
    uint8_t *kind, *symbol;
    uint16_t *start[2];
    uint32_t *at[2], *count[2];
} matrix;

static uint64_t word(uint64_t i)
{
    return lm_rng_u64(lm_rng_make(5, "rans", 0), i);
}

static matrix make(int64_t rows, int64_t cols, int first, int second, uint64_t seed)
{
    matrix m = { .shape = { .rows = rows, .cols = cols }, .symbols = { first, second } };
    lm_rng g = lm_rng_make(seed, "symbols", 0);
    m.kind = malloc((size_t)rows + 1);
    m.symbol = malloc((size_t)(rows * cols) + 1);
    for (int k = 0; k < 2; k++) {
        int width = lm_rans_width(m.symbols[k]);
        m.start[k] = calloc((size_t)(cols * width) + 1, 2);
        m.at[k] = calloc((size_t)cols + 1, 4);
        m.count[k] = calloc((size_t)cols * 256 + 1, 4);
        for (int64_t c = 0; c < cols; c++)
            m.at[k][c] = (uint32_t)(c * width);
        m.shape.set[k] = (lm_rans_set){ width, m.start[k], m.at[k] };
    }
    m.shape.kind = m.kind;
    for (int64_t i = 0; i < rows * cols; i++) {
        int k = m.kind[i / cols] = i / cols % 10 != 0, n = m.symbols[k];
        double spread = n * (i % cols % 5) / 16.0,
               v = n / 2 + spread * lm_rng_normal(g, (uint64_t)i);
        m.symbol[i] = (uint8_t)(v < 0 ? 0 : v >= n ? n - 1 : v);
        m.count[k][i % cols * 256 + m.symbol[i]]++;
    }
    for (int k = 0; k < 2; k++)
        for (int64_t c = 0; c < cols; c++)
            lm_rans_fit(m.count[k] + c * 256, m.symbols[k], m.start[k] + m.at[k][c]);
    return m;
}

static void drop(matrix *m)
{
    free(m->kind), free(m->symbol);
    for (int k = 0; k < 2; k++)
        free(m->start[k]), free(m->at[k]), free(m->count[k]);
}

/* A copy of len bytes whose end is the end of readable memory. */
static uint8_t *at_end(const uint8_t *p, size_t len, void **map, size_t *all)
{
    size_t room = (len + 4095) / 4096 * 4096 + 4096;
    uint8_t *m =
        mmap(NULL, room + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(m, MAP_FAILED);
    assert_int_equal(mprotect(m + room, 4096, PROT_NONE), 0);
    memcpy(m + room - len, p, len);
    *map = m, *all = room + 4096;
    return m + room - len;
}

/* Decode at every level: the same answer from each; true if the stream is taken. */
static bool decode(const matrix *m, const uint8_t *src, size_t len)
{
    size_t n = (size_t)(m->shape.rows * m->shape.cols), all;
    uint8_t *out = malloc(n + GUARD), *first = malloc(n + 1);
    void *map;
    const uint8_t *p = at_end(src, len, &map, &all);
    bool good = false;
    for (lm_cpu_level l = LM_CPU_REF; l <= lm_cpu_detect(); l++) {
        memset(out, 0x5a, n + GUARD);
        bool g = lm_rans_at(l)->get(&m->shape, p, len, out);
        for (int i = 0; i < GUARD; i++)
            assert_int_equal(out[n + (size_t)i], 0x5a);
        if (l == LM_CPU_REF)
            good = g, memcpy(first, out, n);
        assert_int_equal(g, good);
        if (g)
            assert_memory_equal(out, first, n);
    }
    bool same = good && !memcmp(first, m->symbol, n);
    munmap(map, all);
    free(out), free(first);
    return same;
}

/* The stream at every level; the same bytes from each. */
static uint8_t *encode(const matrix *m, size_t *len)
{
    size_t room = lm_rans_room(m->shape.rows, m->shape.cols);
    uint8_t *out = malloc(room), *first = NULL;
    for (lm_cpu_level l = LM_CPU_REF; l <= lm_cpu_detect(); l++) {
        size_t n = lm_rans_at(l)->put(&m->shape, m->symbol, out);
        assert_in_range(n, 4 * LM_RANS_STATES, room);
        if (!first)
            first = malloc(*len = n), memcpy(first, out + room - n, n);
        assert_int_equal(n, *len);
        assert_memory_equal(out + room - n, first, n);
    }
    free(out);
    return first;
}

static double bits_of(const matrix *m)
{
    double bits = 0;
    for (int k = 0; k < 2; k++)
        for (int64_t c = 0; c < m->shape.cols; c++)
            bits += lm_rans_bits(m->count[k] + c * 256, m->symbols[k], m->start[k] + m->at[k][c]);
    return bits;
}

static void test_shapes(void **state)
{
    static const int64_t rows[] = { 0, 1, 2, 9, 11, 40 },
                         cols[] = { 1, 3, 7, 8, 9, 20, 31, 64, 100 };
    static const int symbols[][2] = { { 255, 3 }, { 255, 15 }, { 1, 16 },  { 2, 31 },
                                      { 32, 63 }, { 64, 200 }, { 17, 255 } };
    (void)state;
    for (size_t r = 0; r < sizeof rows / sizeof *rows; r++)
        for (size_t c = 0; c < sizeof cols / sizeof *cols; c++)
            for (size_t s = 0; s < sizeof symbols / sizeof *symbols; s++) {
                matrix m =
                    make(rows[r], cols[c], symbols[s][0], symbols[s][1], r + 10 * c + 100 * s);
                size_t len;
                uint8_t *p = encode(&m, &len);
                if (!decode(&m, p, len))
                    fail_msg("%d rows, %d columns, %d symbols", (int)rows[r], (int)cols[c],
                             symbols[s][1]);
                free(p), drop(&m);
            }
}

/* Within 0.1 % of the tables' length and 0.1 % of the entropy, beside the states. */
static void test_code_length(void **state)
{
    (void)state;
    for (int n = 3; n <= 255; n = 4 * n + 3) {
        matrix m = make(1000, 64, 255, n, (uint64_t)n);
        size_t len;
        uint8_t *p = encode(&m, &len);
        double bits = bits_of(&m), entropy = 0;
        for (int k = 0; k < 2; k++)
            for (int c = 0; c < 64; c++) {
                const uint32_t *count = m.count[k] + c * 256;
                double all = k ? 900 : 100;
                for (int s = 0; s < m.symbols[k]; s++)
                    entropy -= count[s] ? count[s] * log2(count[s] / all) : 0;
            }
        assert_true(bits >= entropy * (1 - 1e-12) && bits <= entropy * 1.001);
        assert_true(8.0 * (double)len <= bits * 1.001 + 8 * 4 * LM_RANS_STATES);
        assert_true(8.0 * (double)len >= bits);
        free(p), drop(&m);
    }
}

static void test_tables(void **state)
{
    uint32_t count[LM_RANS_SYMBOLS];
    uint16_t start[256];
    (void)state;
    for (uint64_t i = 0; i < 2000; i++) {
        int n = 1 + (int)(word(i) % LM_RANS_SYMBOLS), width = lm_rans_width(n);
        for (int s = 0; s < n; s++) {
            uint64_t w = word(i << 20 | (uint64_t)s << 8);
            count[s] = w % 3 ? 0 : (uint32_t)(w >> 8 & 0xffffffff) >> (w >> 40 & 31);
        }
        if (i % 7 == 0)
            memset(count, 0, sizeof count);
        if (i % 7 == 1)
            count[0] = UINT32_MAX;
        memset(start, 0xff, sizeof start);
        lm_rans_fit(count, n, start);
        assert_true(lm_rans_table_ok(start, n));
        assert_int_equal(start[n], SLOTS);
        bool any = false;
        for (int s = 0; s < n; s++)
            any = any || count[s];
        for (int s = 0; s < n && any; s++)
            assert_int_equal(start[s + 1] > start[s], count[s] > 0);
        assert_int_equal(width < 256 ? start[width] : 0xffff, 0xffff);
    }
    lm_rans_fit((uint32_t[]){ 3, 0, 1 }, 3, start);
    assert_int_equal(start[1], 12288);
    assert_int_equal(start[2], 12288);
    assert_true(lm_rans_table_ok(start, 3));
    start[0] = 1;
    assert_false(lm_rans_table_ok(start, 3));
    start[0] = 0, start[2] = 12000;
    assert_false(lm_rans_table_ok(start, 3));
    start[2] = 12288, start[9] = 16383;
    assert_false(lm_rans_table_ok(start, 3));
    assert_true(isinf(lm_rans_bits((uint32_t[]){ 1, 1, 1 }, 3, (uint16_t[]){ 0, 9, 9, SLOTS })));
}

/* A symbol that the table lacks cannot be written. */
static void test_absent(void **state)
{
    (void)state;
    for (int64_t at = 0; at < 20; at += 19) {
        matrix m = make(1, 20, 5, 5, 1);
        uint8_t out[256];
        lm_rans_fit((uint32_t[]){ 1, 1, 1, 0, 1 }, 5, m.start[0]);
        memset(m.at[0], 0, 20 * sizeof *m.at[0]);
        memset(m.symbol, 1, 20);
        for (lm_cpu_level l = LM_CPU_REF; l <= lm_cpu_detect(); l++) {
            m.symbol[at] = 3;
            assert_int_equal(lm_rans_at(l)->put(&m.shape, m.symbol, out), 0);
            m.symbol[at] = 1;
            assert_int_not_equal(lm_rans_at(l)->put(&m.shape, m.symbol, out), 0);
        }
        drop(&m);
    }
}

/* Cut, extended, with flipped bits, random: the levels agree, and no stream of other bytes is taken
 * for this matrix. */
static void test_damage(void **state)
{
    (void)state;
    for (int shape = 0; shape < 4; shape++) {
        matrix m =
            make(12, (int[]){ 3, 20, 64, 33 }[shape], 255, (int[]){ 7, 15, 31, 63 }[shape], 9);
        size_t len, bits = 0;
        uint8_t *p = encode(&m, &len), *q = calloc(len + 64, 1);
        for (size_t cut = 0; cut < len; cut++)
            assert_false(decode(&m, p, cut));
        memcpy(q, p, len);
        for (size_t more = 1; more < 20; more++)
            assert_false(decode(&m, q, len + more));
        for (size_t i = 0; i < 8 * len; i += 1 + word(bits++) % 5) {
            q[i / 8] ^= (uint8_t)(1 << i % 8);
            assert_false(decode(&m, q, len));
            q[i / 8] ^= (uint8_t)(1 << i % 8);
        }
        for (uint64_t i = 0; i < 500; i++) {
            size_t n = word(i) % (len + 64);
            for (size_t b = 0; b < n; b++)
                q[b] = (uint8_t)(word(i << 20 | b) >> 11);
            assert_false(decode(&m, q, n));
        }
        free(p), free(q), drop(&m);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shapes), cmocka_unit_test(test_code_length),
        cmocka_unit_test(test_tables), cmocka_unit_test(test_absent),
        cmocka_unit_test(test_damage),
    };
    return cmocka_run_group_tests_name("kernels_rans", tests, NULL, NULL);
}
