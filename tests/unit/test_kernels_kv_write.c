/* SPDX-License-Identifier: Apache-2.0 */
/* Writes into coded caches: rows that come in any cuts leave the bits of all rows encoded at once, in every format, and
 * the plain rows where attention looks for them. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "base/par.h"
#include "base/rng.h"
#include "kernels/kv.h"
#include "numeric/code_rows.h"

#include "kv_formats_case.h"

enum { QKV, USED, FRESH, FIRST, TABLE, SLOT, ROW, N_IN };
enum { KEYS, VALUES, KTAIL, VTAIL, N_OUT };
enum { CUTS = 700, MOST_HEADS = 2, MOST_D = 64 };

static lm_par *pool;

static void *take(size_t bytes)
{
    lm_err e = { 0 };
    void *p = NULL;
    assert_int_equal(lm_alloc_n(&p, bytes + 1, 1, "a test operand", &e), LM_OK);
    memset(p, 0, bytes);
    return p;
}

/* Two sequences that grow, and all of their rows. */
typedef struct {
    lm_kv_attr attr;
    lm_kv_format f[2];
    lm_dtype act;
    int64_t H, K, D, T, P, width; /* width: of a row of qkv */
    int64_t used[2], most;        /* most: rows of a sequence */
    char *rows[2];                /* [most, width] */
    lm_tensor in[N_IN], out[N_OUT];
    void *pages[2]; /* as they were */
} trial;

static lm_tensor made(lm_dtype d, int ndim, const int64_t *dim, const lm_kv_format *f)
{
    lm_tensor t = { .dtype = d, .ndim = ndim, .kv = f };
    memcpy(t.dim, dim, (size_t)ndim * sizeof *dim);
    t.data = take(lm_stored_bytes(&t));
    return t;
}

/* Pages of an earlier use: every token has codes, and outliers are full. */
static void make_dirty(trial *t, int side)
{
    lm_tensor *c = &t->out[KEYS + side];
    size_t bytes = c->kv ? lm_kv_page_bytes(c->kv, t->T, t->D) : 0;
    float x[128 * MOST_D];
    memset(c->data, 0x55, c->kv ? 0 : lm_stored_bytes(c));
    for (int64_t i = 0; i < t->T * t->D; i++)
        x[i] = (float)(i % 7) - 3.0f + (i % 5 ? 0.0f : 9.0f);
    for (int64_t p = 0; c->kv && p < c->dim[0] * t->K; p++)
        lm_kv_encode(c->kv, t->T, t->D, p % t->K, x, t->D, 0, t->T, NULL,
                     (char *)c->data + (size_t)p * bytes);
    t->pages[side] = take(lm_stored_bytes(c));
    memcpy(t->pages[side], c->data, lm_stored_bytes(c));
}

/* Number k, of row j; odd: rows of zeros, of ties, of tiny and huge numbers, and of numbers that are not finite. */
static double row_number(lm_rng r, int64_t k, int64_t j, bool odd)
{
    double x = lm_rng_normal(r, (uint64_t)k);
    switch (odd ? j % 9 : 0) {
    case 1:
        return 0;
    case 2:
        return (double)(k % 33 - 16) / 8;
    case 3:
        return x * 1e-9;
    case 4:
        return x * 1e-40;
    case 5:
        return x * 1e30;
    case 6:
        return k % 50 == 7 ? (double)NAN : x;
    case 7:
        return k % 50 == 9 ? -(double)INFINITY : k % 3 ? 0.25 : -0.0;
    case 8:
        return k % 2 ? 448 : (double)(k % 1000) * 0x1p-12;
    default:
        return x;
    }
}

static void open_trial(trial *t, lm_rng r, int i)
{
    static const int64_t dims[] = { 4, 20, 32, 64 };
#define DRAW(k, n) ((int64_t)lm_rng_below(r, (uint64_t)k, (uint64_t)(n)))
    *t = (trial){ .act = DRAW(0, 2) ? LM_DTYPE_BF16 : LM_DTYPE_F32 };
    t->f[0] = formats[i % N_FORMATS];
    t->f[1] = formats[DRAW(1, N_FORMATS)];
    t->f[1].values = true;
    if (t->f[0].outliers && !t->f[0].lower) /* values alone have ranges of tokens */
        t->f[0] = formats[DRAW(15, 4)];
    t->attr.token_range = t->f[1].zero && !t->f[1].lower && (t->f[1].outliers || DRAW(16, 2));
    t->attr.outliers = t->attr.token_range ? (double)DRAW(17, 3) * 0.1 : 0;
    t->K = 1 + DRAW(2, MOST_HEADS);
    t->H = t->K * (1 + DRAW(3, 2));
    t->D = dims[DRAW(4, 4)];
    t->T = 16 << DRAW(5, 3);
    for (int s = 0; s < 2; s++) /* long groups, many outliers */
        if (!is_plain(&t->f[s]) && lm_kv_page_bytes(&t->f[s], t->T, t->D) == SIZE_MAX)
            t->T = t->D = 64;
    t->P = 1 + DRAW(6, 3);
    t->width = (t->H + 2 * t->K) * t->D;
    t->most = t->P * t->T;
    t->attr.attention = (lm_attention_attr){
        .batch = 2, .heads = t->H, .kv_heads = t->K, .head_dim = t->D, .causal = true
    };
    t->in[USED] = made(LM_DTYPE_I32, 1, (int64_t[]){ 2 }, NULL);
    t->in[FRESH] = made(LM_DTYPE_I32, 1, (int64_t[]){ 2 }, NULL);
    t->in[FIRST] = made(LM_DTYPE_I32, 1, (int64_t[]){ 3 }, NULL);
    t->in[TABLE] = made(LM_DTYPE_I32, 2, (int64_t[]){ 2, t->P }, NULL);
    for (int64_t p = 0; p < 2 * t->P; p++)
        ((int32_t *)t->in[TABLE].data)[p] = (int32_t)(2 * t->P - 1 - p);
    for (int s = 0; s < 2; s++) {
        bool steps = !is_plain(&t->f[s]) && lm_kv_step(&t->f[s], t->T) > 1;
        if (!is_plain(&t->f[s])) {
            t->attr.residual[s] = steps ? t->T * (1 + DRAW(7 + s * 4, 2))
                                        : DRAW(7 + s * 4, 2) * (1 + DRAW(8 + s * 4, 40));
            t->attr.sinks[s] = DRAW(9 + s * 4, 2) ? (steps ? t->T : 1 + DRAW(10 + s * 4, 20)) : 0;
        }
        int64_t R = t->attr.residual[s] + t->attr.sinks[s];
        if (!is_plain(&t->f[s]) && lm_kv_page_bytes(&t->f[s], t->T, t->D) == SIZE_MAX)
            fail_msg("%s: no pages of %lld tokens", t->f[s].name, (long long)t->T);
        t->out[KEYS + s] = made(t->act, 4, (int64_t[]){ 2 * t->P, t->K, t->T, t->D },
                                is_plain(&t->f[s]) ? NULL : &t->f[s]);
        make_dirty(t, s);
        if (R) {
            t->out[KTAIL + s] = made(t->act, 4, (int64_t[]){ 3, t->K, R, t->D }, NULL);
            if (!t->in[SLOT].data)
                t->in[SLOT] = made(LM_DTYPE_I32, 1, (int64_t[]){ 2 }, NULL);
            memcpy(t->in[SLOT].data, (int32_t[]){ 2, 0 }, 8);
        }
        t->rows[s] = take((size_t)(t->most * t->width) * lm_dtype_size(t->act));
        for (int64_t k = 0; k < t->most * t->width; k++)
            lm_set(t->act, t->rows[s], k,
                   row_number(lm_rng_make(9, "kv rows", (uint64_t)(2 * i + s)), k, k / t->width,
                              i % 3 == 2 && !t->f[0].second && !t->f[1].second));
    }
}

static void close_trial(trial *t)
{
    for (int i = 0; i < N_IN; i++)
        lm_free(i == QKV ? NULL : t->in[i].data);
    for (int i = 0; i < N_OUT; i++)
        lm_free(t->out[i].data);
    for (int s = 0; s < 2; s++) {
        lm_free(t->rows[s]);
        lm_free(t->pages[s]);
    }
}

/* Put the next n[b] rows of each sequence into the caches; row 0 and the last one belong to no sequence. */
static void write_rows(trial *t, const lm_kernel *k, const int64_t n[2])
{
    size_t row = (size_t)t->width * lm_dtype_size(t->act);
    int32_t *used = t->in[USED].data, *fresh = t->in[FRESH].data, *first = t->in[FIRST].data;
    lm_call c = { .attr = &t->attr, .in = t->in, .n_in = N_IN, .out = t->out, .n_out = N_OUT };
    t->in[QKV] = made(t->act, 2, (int64_t[]){ n[0] + n[1] + 2, t->width }, NULL);
    memset(t->in[QKV].data, 0xff, lm_stored_bytes(&t->in[QKV]));
    first[0] = 1;
    for (int b = 0; b < 2; b++) {
        used[b] = (int32_t)t->used[b];
        fresh[b] = (int32_t)n[b];
        first[b + 1] = first[b] + fresh[b];
        memcpy((char *)t->in[QKV].data + (size_t)first[b] * row,
               t->rows[b] + (size_t)t->used[b] * row, (size_t)n[b] * row);
        t->used[b] += n[b];
    }
    size_t bytes = k->work ? k->work(&c, 2) : 0;
    c.work = take(bytes);
    memset(c.work, 0xff, bytes);
    c.par = pool;
    k->run(&c);
    lm_free(c.work);
    lm_free(t->in[QKV].data);
}

/* Number d of token j of a head. */
static double number(const trial *t, int b, int side, int64_t kv, int64_t j, int64_t d)
{
    return lm_get(t->act, t->rows[b], j * t->width + (t->H + side * t->K + kv) * t->D + d);
}

/* The range of the values of token j, of all heads. */
static void range_of(const trial *t, int b, int64_t j, float range[2])
{
    float x[2 * MOST_HEADS * MOST_D];
    for (int64_t i = 0; i < t->K * t->D; i++)
        x[i] = (float)number(t, b, 1, i / t->D, j, i % t->D);
    lm_kv_token_range(t->attr.outliers, x, t->K * t->D, range, x + t->K * t->D);
}

/* Rows of a plain side's pages. */
static void expect_rows(trial *t, int side)
{
    for (int b = 0; b < 2; b++)
        for (int64_t i = 0; i < t->used[b] * t->K * t->D; i++) {
            int64_t d = i % t->D, kv = i / t->D % t->K, j = i / t->D / t->K;
            int64_t page = ((int32_t *)t->in[TABLE].data)[b * t->P + j / t->T];
            lm_set(t->act, t->pages[side], ((page * t->K + kv) * t->T + j % t->T) * t->D + d,
                   number(t, b, side, kv, j, d));
        }
}

/* The pages as one call of the encoder for each leaves them. */
static void expect_pages(trial *t, int side)
{
    const lm_kv_format *f = &t->f[side];
    size_t bytes = lm_kv_page_bytes(f, t->T, t->D);
    lm_kv_sections at;
    float x[128 * MOST_D];
    lm_kv_page(f, t->T, t->D, &at, NULL);
    for (int b = 0; b < 2; b++)
        for (int64_t p = 0; p < t->P; p++) {
            int64_t end = lm_kv_coded(f, t->T, t->attr.residual[side], t->used[b]);
            int64_t sinks = t->attr.sinks[side], from = p * t->T > sinks ? p * t->T : sinks;
            int64_t to = end < (p + 1) * t->T ? end : (p + 1) * t->T;
            int64_t page = ((int32_t *)t->in[TABLE].data)[b * t->P + p] * t->K;
            float range[2 * 128];
            for (int64_t j = from; t->attr.token_range && side && j < to; j++)
                range_of(t, b, j, range + 2 * (j - from));
            for (int64_t kv = 0; kv < t->K && from < to; kv++) {
                char *want = (char *)t->pages[side] + (size_t)(page + kv) * bytes;
                for (int64_t j = from; j < to; j++)
                    for (int64_t d = 0; d < t->D; d++)
                        x[(j - from) * t->D + d] = (float)number(t, b, side, kv, j, d);
                if (f->outliers)
                    memset(want + at.outliers, 0, 2);
                lm_kv_encode(f, t->T, t->D, kv, x, t->D, from - p * t->T, to - from,
                             t->attr.token_range && side ? range : NULL, want);
            }
        }
}

/* Outliers behind the counted ones are any. */
static void clear_unused(const trial *t, int side, void *pages)
{
    const lm_kv_format *f = &t->f[side];
    lm_kv_sections at;
    if (!f->outliers)
        return;
    lm_kv_page(f, t->T, t->D, &at, NULL);
    size_t bytes = at.all;
    for (int64_t p = 0; p < 2 * t->P * t->K; p++) {
        uint16_t *o = (uint16_t *)(void *)((char *)pages + (size_t)p * bytes + at.outliers);
        for (int64_t i = *o; i < f->outliers; i++)
            o[1 + i] = o[1 + f->outliers + i] = 0;
    }
}

/* The plain tokens lie where kernels/kv.h says. */
static void check_tail(const trial *t, int b, int side)
{
    int64_t sinks = t->attr.sinks[side], residual = t->attr.residual[side], R = sinks + residual;
    const lm_tensor *tail = &t->out[KTAIL + side];
    for (int64_t j = 0; R && j < t->used[b]; j++) {
        if (j >= sinks && j < lm_kv_coded(&t->f[side], t->T, residual, t->used[b]))
            continue;
        int64_t row = j < sinks ? j : sinks + j % residual;
        for (int64_t kv = 0; kv < t->K; kv++)
            for (int64_t d = 0; d < t->D; d++) {
                int64_t slot = ((int32_t *)t->in[SLOT].data)[b];
                double got = lm_get(t->act, tail->data, ((slot * t->K + kv) * R + row) * t->D + d);
                double want = number(t, b, side, kv, j, d);
                if (got != want && !(isnan(got) && isnan(want)))
                    fail_msg("%s: token %lld of %lld is not in the tail", t->f[side].name,
                             (long long)j, (long long)t->used[b]);
            }
    }
}

static void check(trial *t, int i)
{
    for (int s = 0; s < 2; s++) {
        size_t bytes = lm_stored_bytes(&t->out[KEYS + s]);
        if (is_plain(&t->f[s]))
            expect_rows(t, s);
        else
            expect_pages(t, s);
        clear_unused(t, s, t->pages[s]);
        clear_unused(t, s, t->out[KEYS + s].data);
        if (memcmp(t->pages[s], t->out[KEYS + s].data, bytes))
            fail_msg("cut %d: %s of %s: other bits than all rows at once", i, s ? "values" : "keys",
                     t->f[s].name);
        check_tail(t, 0, s);
        check_tail(t, 1, s);
    }
}

static void test_cuts(void **state)
{
    const lm_kernel *k;
    (void)state;
    for (int level = 0; (k = lm_cpu_kernel_at(level)); level++)
        for (int i = 0; i < CUTS && !strcmp(k->op, "kv_write"); i++) {
            lm_rng r = lm_rng_make(4, "kv cuts", (uint64_t)i);
            trial t;
            open_trial(&t, r, i);
            if (k->level > (int)lm_cpu_detect() || (k->act != t.act && k->act != LM_DTYPE_NONE)) {
                close_trial(&t);
                continue;
            }
            for (uint64_t cut = 0; cut < 40; cut++) { /* new tokens, parts of prompts, nothing */
                int64_t n[2];
                for (uint64_t b = 0; b < 2; b++) {
                    static const uint64_t sizes[] = { 2, 2, 9, 40, 200 };
                    uint64_t size = sizes[lm_rng_below(r, 100 + cut * 4 + b * 2, 5)];
                    n[b] = (int64_t)lm_rng_below(r, 101 + cut * 4 + b * 2, size);
                    n[b] = n[b] < t.most - t.used[b] ? n[b] : t.most - t.used[b];
                }
                write_rows(&t, k, n);
            }
            check(&t, i);
            close_trial(&t);
        }
}

/* ---- rows in the place of others ---- */

/* Formats whose tokens can be replaced. */
static bool is_single(const lm_kv_format *f)
{
    return f->bits == 0 || (lm_kv_step(f, 16) == 1 && !f->outliers);
}

/* Put row n of sequence b into the expected pages as token `at` of head kv. */
static void expect_row(trial *t, int b, int side, int64_t kv, int64_t n, int64_t at)
{
    int64_t page = ((int32_t *)t->in[TABLE].data)[b * t->P + at / t->T] * t->K + kv;
    float x[MOST_D], range[2];
    for (int64_t d = 0; d < t->D; d++) {
        x[d] = (float)number(t, b, side, kv, n, d);
        if (is_plain(&t->f[side]))
            lm_set(t->act, t->pages[side], (page * t->T + at % t->T) * t->D + d, (double)x[d]);
    }
    if (is_plain(&t->f[side]))
        return;
    range_of(t, b, n, range);
    lm_kv_encode(&t->f[side], t->T, t->D, kv, x, t->D, at % t->T, 1,
                 t->attr.token_range && side ? range : NULL,
                 (char *)t->pages[side] + (size_t)page * lm_kv_page_bytes(&t->f[side], t->T, t->D));
}

static void replace_rows(trial *t, const lm_kernel *k, lm_rng r, const int64_t n[2])
{
    int64_t from[2] = { t->used[0], t->used[1] }, row = 1;
    t->in[ROW] = made(LM_DTYPE_I32, 2, (int64_t[]){ n[0] + n[1] + 2, t->K }, NULL);
    int32_t *to = t->in[ROW].data;
    memset(to, 0xff, lm_stored_bytes(&t->in[ROW]));
    for (int b = 0; b < 2; b++)
        for (int64_t i = 0; i < n[b]; i++, row++)
            for (int64_t kv = 0; kv < t->K; kv++) {
                int64_t at = row * t->K + kv;
                to[at] = (int32_t)lm_rng_below(r, 1000 + (uint64_t)at, (uint64_t)t->most);
                expect_row(t, b, 0, kv, from[b] + i, to[at]);
                expect_row(t, b, 1, kv, from[b] + i, to[at]);
            }
    write_rows(t, k, n);
    for (int s = 0; s < 2; s++)
        if (memcmp(t->pages[s], t->out[KEYS + s].data, lm_stored_bytes(&t->out[KEYS + s])))
            fail_msg("%s: other bits than the rows that were replaced", t->f[s].name);
    lm_free(t->in[ROW].data);
    t->in[ROW] = (lm_tensor){ 0 };
}

static void drop_tails(trial *t)
{
    for (int s = 0; s < 2; s++) {
        t->attr.residual[s] = t->attr.sinks[s] = 0;
        lm_free(t->out[KTAIL + s].data);
        t->out[KTAIL + s] = (lm_tensor){ 0 };
    }
    lm_free(t->in[SLOT].data);
    t->in[SLOT] = (lm_tensor){ 0 };
}

static void test_rows(void **state)
{
    const lm_kernel *k;
    int runs_of_all = 0;
    (void)state;
    for (int level = 0; (k = lm_cpu_kernel_at(level)); level++)
        for (int i = 0; i < CUTS / 4 && !strcmp(k->op, "kv_write"); i++) {
            lm_rng r = lm_rng_make(5, "kv rows to replace", (uint64_t)i);
            trial t;
            open_trial(&t, r, i);
            bool runs = k->level <= (int)lm_cpu_detect() &&
                        (k->act == t.act || k->act == LM_DTYPE_NONE) && is_single(&t.f[0]) &&
                        is_single(&t.f[1]);
            drop_tails(&t);
            runs_of_all += runs;
            for (int64_t cut = 0; runs && cut < 3; cut++) {
                int64_t n[2] = { 1 + cut * 4, cut };
                if (t.used[0] + n[0] <= t.most && t.used[1] + n[1] <= t.most)
                    replace_rows(&t, k, lm_rng_make(6, "rows", (uint64_t)(i * 3 + cut)), n);
            }
            close_trial(&t);
        }
    assert_true(runs_of_all > 100);
}

/* KIVI: keys wait until `residual` are there and leave together; values leave one by one. */
static void test_counts(void **state)
{
    const lm_kv_format keys = { .bits = 2, .axis = LM_KV_CHANNEL, .group = 32 },
                       values = { .bits = 2, .group = 32 };
    int64_t plain[2] = { 0, 0 };
    (void)state;
    for (int64_t used = 1; used < 1000; used++) {
        plain[0] = plain[0] + 1 == 128 ? 0 : plain[0] + 1;
        plain[1] += plain[1] < 128;
        assert_int_equal(lm_kv_coded(&keys, 64, 128, used), used - plain[0]);
        assert_int_equal(lm_kv_coded(&values, 64, 128, used), used - plain[1]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cuts),
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_counts),
    };
    lm_err e = { 0 };
    fill_ranges();
    if (lm_par_new(&pool, 2, &e))
        return 1;
    int rc = cmocka_run_group_tests_name("kernels_kv_write", tests, NULL, NULL);
    lm_par_free(pool);
    return rc;
}
