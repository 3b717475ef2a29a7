/* SPDX-License-Identifier: Apache-2.0 */
/* kv_keep_case.h -- masses of cached tokens (kernels/kv_keep.h) for tests of a backend: over any cuts of a prompt, pages and
 * codes, against the plain definition (kv/store.h), which knows no codes. */
#ifndef LM_TESTS_KV_KEEP_CASE_H
#define LM_TESTS_KV_KEEP_CASE_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "base/par.h"
#include "base/rng.h"
#include "kernels/kv_keep.h"
#include "kv/store.h"
#include "numeric/code_rows.h"

enum { H = 6, K = 2, D = 64, N = 150, WIDTH = (H + 2 * K) * D, PAGE = 16, PAGES = 10 };
enum { ROOM = PAGE * PAGES };

static const lm_kv_format int8_keys = { .name = "int8", .bits = 8, .scale = LM_DTYPE_F16 };
static const lm_kv_format int8_values = {
    .name = "int8", .values = true, .bits = 8, .scale = LM_DTYPE_F16
};

static lm_par *pool;
/* Runs kv_mass; NULL: the host does. */
static void (*mass_runner)(lm_call *c, lm_dtype act);

static inline void *take(size_t bytes)
{
    lm_err e = { 0 };
    void *p = NULL;
    assert_int_equal(lm_alloc_n(&p, bytes + 64, 1, "a test operand", &e), LM_OK);
    memset(p, 0, bytes);
    return p;
}

/* How a prompt goes into a cache, and which of its queries count. */
typedef struct {
    lm_dtype act;
    int64_t window, cut, from;
    bool paged, coded;
    double soft_cap;
    lm_cpu_level level;
} way;

/* A sequence in a cache, and its masses. */
typedef struct {
    const way *w;
    lm_attention_attr a;
    lm_tensor rows, keys, values, table; /* rows: all of the prompt */
    float mass[3 * K * ROOM];            /* of the slot 2 */
    float lse[N * H], o[N * H * D];
} prompt;

static inline lm_tensor tensor(lm_dtype d, int ndim, const int64_t *dim, void *data)
{
    lm_tensor t = { .dtype = d, .ndim = ndim, .data = data };
    memcpy(t.dim, dim, (size_t)ndim * sizeof *dim);
    if (!data)
        t.data = take(lm_stored_bytes(&t));
    return t;
}

static inline lm_tensor integers(int64_t n, int32_t *data)
{
    return tensor(LM_DTYPE_I32, 1, &n, data);
}

static inline void run(const char *op, const prompt *p, const void *attr, lm_tensor *in, int n_in,
                       lm_tensor *out, int n_out)
{
    const lm_kernel *k = lm_cpu_kernel(op, p->w->act, p->w->level);
    lm_step step = { 0 };
    lm_call c = {
        .attr = attr, .in = in, .n_in = n_in, .out = out, .n_out = n_out, .par = pool, .step = &step
    };
    if (mass_runner && !strcmp(op, "kv_mass")) {
        mass_runner(&c, p->w->act);
        return;
    }
    size_t bytes = k->work ? k->work(&c, lm_par_threads(pool)) : 0;
    c.work = take(bytes);
    k->run(&c);
    lm_free(c.work);
}

static inline void open_prompt(prompt *p, const way *w)
{
    int64_t coded[] = { PAGES, K, PAGE, D }, whole[] = { 1, K, ROOM, D };
    const int64_t *dim = w->paged ? coded : whole;
    lm_rng r = lm_rng_make(3, "masses", 0);
    *p = (prompt){ .w = w };
    p->a = (lm_attention_attr){ .batch = 1,
                                .heads = H,
                                .kv_heads = K,
                                .head_dim = D,
                                .window = w->window,
                                .causal = true,
                                .scale = 0.2,
                                .soft_cap = w->soft_cap };
    p->rows = tensor(w->act, 2, (int64_t[]){ N, WIDTH }, NULL);
    for (int64_t i = 0; i < N * WIDTH; i++)
        lm_set(w->act, p->rows.data, i, lm_rng_normal(r, (uint64_t)i));
    p->keys = p->values = (lm_tensor){ .dtype = w->act, .ndim = 4 };
    memcpy(p->keys.dim, dim, sizeof coded);
    memcpy(p->values.dim, dim, sizeof coded);
    p->keys.kv = w->coded ? &int8_keys : NULL;
    p->values.kv = w->coded ? &int8_values : NULL;
    p->keys.data = take(lm_stored_bytes(&p->keys));
    p->values.data = take(lm_stored_bytes(&p->values));
    if (w->paged) {
        p->table = tensor(LM_DTYPE_I32, 2, (int64_t[]){ 1, PAGES }, NULL);
        for (int32_t i = 0; i < PAGES; i++)
            ((int32_t *)p->table.data)[i] = (i * 7 + 3) % PAGES;
    }
}

static inline void close_prompt(prompt *p)
{
    lm_free(p->rows.data);
    lm_free(p->keys.data);
    lm_free(p->values.data);
    lm_free(p->table.data);
}

static inline void attend(prompt *p, lm_tensor qkv, lm_tensor used, lm_tensor fresh, lm_tensor lse)
{
    int64_t n = qkv.dim[0];
    lm_tensor o = tensor(p->w->act, 2, (int64_t[]){ n, H * D }, p->o);
    lm_attention_attr a = p->a;
    a.seq = n;
    if (!p->w->coded) {
        run("attention_cached", p, &a, (lm_tensor[]){ qkv, used, fresh, { 0 }, { 0 }, p->table }, 6,
            (lm_tensor[]){ o, p->keys, p->values, lse }, 4);
        return;
    }
    lm_kv_attr coded = { .attention = a };
    run("kv_attention", p, &coded,
        (lm_tensor[]){
            qkv, used, fresh, { 0 }, { 0 }, p->table, p->keys, p->values, { 0 }, { 0 }, { 0 } },
        11, (lm_tensor[]){ o, lse }, 2);
}

/* Rows [at, at + n) through attention, then their masses, then into coded pages. */
static inline void run_rows(prompt *p, int64_t at, int64_t n)
{
    int32_t used = (int32_t)at, fresh = (int32_t)n, from = (int32_t)p->w->from, slot = 2;
    size_t size = lm_dtype_size(p->w->act);
    lm_tensor qkv = tensor(p->w->act, 2, (int64_t[]){ n, WIDTH },
                           (char *)p->rows.data + (size_t)(at * WIDTH) * size);
    lm_tensor lse = tensor(LM_DTYPE_F32, 2, (int64_t[]){ n, H }, p->lse);
    lm_tensor mass = tensor(LM_DTYPE_F32, 3, (int64_t[]){ 3, K, ROOM }, p->mass);
    lm_tensor counts[] = { integers(1, &used), integers(1, &fresh), integers(1, &from),
                           integers(1, &slot) };
    lm_kv_mass_attr a = { .attention = p->a };
    lm_kv_attr coded = { .attention = p->a };
    a.attention.seq = coded.attention.seq = n;
    attend(p, qkv, counts[0], counts[1], lse);
    run("kv_mass", p, &a,
        (lm_tensor[]){
            qkv, lse, counts[0], counts[1], counts[2], { 0 }, p->table, p->keys, counts[3], { 0 } },
        10, &mass, 1);
    if (p->w->coded)
        run("kv_write", p, &coded,
            (lm_tensor[]){ qkv, counts[0], counts[1], { 0 }, p->table, { 0 } }, 6,
            (lm_tensor[]){ p->keys, p->values, { 0 }, { 0 } }, 4);
}

static inline void run_prompt(prompt *p)
{
    for (int64_t at = 0; at < N; at += p->w->cut)
        run_rows(p, at, N - at < p->w->cut ? N - at : p->w->cut);
}

static const way defined_ways[] = {
    { .act = LM_DTYPE_F32, .cut = N },
    { .act = LM_DTYPE_F32, .cut = 32, .from = N - 7 },
    { .act = LM_DTYPE_F32, .cut = 7, .from = 20, .window = 37, .paged = true },
    { .act = LM_DTYPE_F32, .cut = 1, .paged = true, .soft_cap = 2 },
    { .act = LM_DTYPE_BF16, .cut = 64, .from = N - 32 },
};
enum { DEFINED = sizeof defined_ways / sizeof *defined_ways };

/* Masses against the definition; masses of other slots stay. */
static inline void check_defined(way w)
{
    static float q[N * H * D], k[N * K * D], want[K * N];
    static prompt p;
    lm_err e = { 0 };
    double diff = 0, norm = 0;
    open_prompt(&p, &w);
    run_prompt(&p);
    for (int64_t t = 0; t < N; t++) {
        for (int64_t x = 0; x < H * D; x++)
            q[t * H * D + x] = (float)lm_get(w.act, p.rows.data, t * WIDTH + x);
        for (int64_t x = 0; x < K * D; x++)
            k[t * K * D + x] = (float)lm_get(w.act, p.rows.data, t * WIDTH + H * D + x);
    }
    lm_kv_attention a = { H, K, D, w.window, p.a.scale, w.soft_cap };
    assert_int_equal(lm_kv_masses(&a, N, w.from, q, k, want, &e), LM_OK);
    for (int64_t h = 0; h < K; h++)
        for (int64_t j = 0; j < N; j++) {
            double x = (double)p.mass[(2 * K + h) * ROOM + j] - (double)want[h * N + j];
            diff += x * x;
            norm += (double)want[h * N + j] * (double)want[h * N + j];
        }
    if (sqrt(diff / norm) > (w.act == LM_DTYPE_BF16 ? 1e-2 : 5e-6))
        fail_msg("cut %lld, level %d: %g", (long long)w.cut, (int)w.level, sqrt(diff / norm));
    for (int64_t j = 0; j < 2 * K * ROOM; j++)
        assert_true(p.mass[j] == 0);
    close_prompt(&p);
}

static const way coded_ways[] = {
    { .act = LM_DTYPE_F32, .cut = 32, .paged = true, .coded = true, .soft_cap = 2 },
    { .act = LM_DTYPE_F32, .cut = 1, .paged = true, .coded = true, .from = 90 },
    { .act = LM_DTYPE_BF16, .cut = 48, .paged = true, .coded = true, .window = 50 },
    { .act = LM_DTYPE_F32, .cut = 40, .soft_cap = 2 },
};
enum { CODED = sizeof coded_ways / sizeof *coded_ways };

/* Every row gives a probability of 1 in all, whatever it reads. */
static inline void check_sums(way w)
{
    static prompt p;
    open_prompt(&p, &w);
    run_prompt(&p);
    for (int64_t h = 0; h < K; h++) {
        double sum = 0, rows = (double)(N - w.from) * H / K;
        for (int64_t j = 0; j < N; j++)
            sum += (double)p.mass[(2 * K + h) * ROOM + j];
        if (fabs(sum / rows - 1) > (w.act == LM_DTYPE_BF16 ? 1e-2 : 2e-6))
            fail_msg("cut %lld, level %d: %g of %g", (long long)w.cut, (int)w.level, sum, rows);
    }
    close_prompt(&p);
}

#endif
