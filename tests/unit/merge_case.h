/* SPDX-License-Identifier: Apache-2.0 */
/* merge_case.h -- one tensor of several models, filled with counted random numbers, and a call of a
 * merge method on it; the result as raw bytes and as doubles. */
#ifndef LM_TESTS_MERGE_CASE_H
#define LM_TESTS_MERGE_CASE_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/hash.h"
#include "base/mem.h"
#include "base/rng.h"
#include "merge/method.h"

enum { MOST = 5 };

typedef struct {
    lm_merge_job job;
    lm_merge_operand model[MOST], base;
    int64_t dim[3];
    double *x[MOST], *b; /* the arrays as doubles */
    void *data[MOST + 1];
    double *got;
    char warned[256];
    lm_sink sink;
} merge_case;

static merge_case *talking; /* for the sink, which has no context argument */

static inline void hear(lm_sink *s, lm_log_level level, const char *text)
{
    (void)s;
    (void)level;
    snprintf(talking->warned, sizeof talking->warned, "%s", text);
}

static inline void *room(size_t n, size_t size)
{
    lm_err e = { 0 };
    void *p;
    assert_int_equal(lm_alloc_n(&p, n, size, "test", &e), LM_OK);
    return p;
}

/* Set array i (the base is MOST) from c->x or c->b, and round those to the stored numbers. */
static inline void put(merge_case *c, int i, lm_dtype t)
{
    lm_merge_operand *o = i == MOST ? &c->base : &c->model[i];
    double *x = i == MOST ? c->b : c->x[i];
    size_t size = lm_dtype_size(t);
    if (!c->data[i])
        c->data[i] = room((size_t)c->job.count + 2, 8);
    char *p = (char *)c->data[i] + 8;
    for (int64_t k = 0; k < c->job.count; k++) {
        double cell = 0;
        lm_set(t, &cell, 0, x[k]);
        x[k] = lm_get(t, &cell, 0);
        memcpy(p + (size_t)k * size, &cell, size);
    }
    o->data = p;
    o->dtype = t;
}

/* n models near their base: theta_i = theta + 0.3 normal. */
static inline merge_case *new_case(int n, lm_dtype t, int ndim, int64_t d0, int64_t d1, int seed)
{
    merge_case *c = room(1, sizeof *c);
    int64_t count = ndim == 0 ? 1 : ndim == 1 ? d0 : d0 * d1;
    lm_rng r = lm_rng_make((uint64_t)seed, "merge test", 0);
    c->dim[0] = d0;
    c->dim[1] = d1;
    c->sink.log = hear;
    c->job = (lm_merge_job){ .name = "layer.weight",
                             .ndim = ndim,
                             .dim = c->dim,
                             .count = count,
                             .model = c->model,
                             .n_models = n,
                             .base = &c->base,
                             .seed = 7,
                             .out_dtype = t,
                             .cpu = lm_cpu_detect(),
                             .sink = &c->sink };
    for (int p = 0; p < LM_MERGE_PARAMS; p++) {
        c->job.param[p] = c->base.param[p] = NAN;
        for (int i = 0; i < n; i++)
            c->model[i].param[p] = NAN;
    }
    c->b = room((size_t)count, sizeof(double));
    for (int64_t k = 0; k < count; k++)
        c->b[k] = lm_rng_normal(r, (uint64_t)k);
    put(c, MOST, t);
    for (int i = 0; i < n; i++) {
        r = lm_rng_make((uint64_t)seed, "merge test", (uint64_t)i + 1);
        c->x[i] = room((size_t)count, sizeof(double));
        for (int64_t k = 0; k < count; k++)
            c->x[i][k] = c->b[k] + 0.3 * lm_rng_normal(r, (uint64_t)k);
        put(c, i, t);
    }
    c->job.out = room((size_t)count + 1, 8);
    c->got = room((size_t)count, sizeof(double));
    return c;
}

static inline void free_case(merge_case *c)
{
    for (int i = 0; i <= MOST; i++)
        lm_free(c->data[i]);
    for (int i = 0; i < MOST; i++)
        lm_free(c->x[i]);
    lm_free(c->b);
    lm_free(c->got);
    lm_free(c->job.out);
    lm_free(c);
}

static inline const lm_merge_method *method(const char *name)
{
    lm_err e = { 0 };
    const lm_merge_method *m;
    assert_int_equal(lm_merge_method_find(name, &m, &e), LM_OK);
    return m;
}

/* Run the method in the steps of the engine: defaults, check, guarded scratch, run. */
static inline lm_code try_merge(merge_case *c, const char *name, lm_err *e)
{
    const lm_merge_method *m = method(name);
    lm_merge_job j = c->job;
    lm_code rc;
    size_t bytes, size = lm_dtype_size(j.out_dtype);
    if (!m->base_allowed)
        j.base = NULL;
    lm_merge_defaults(m, j.param);
    rc = lm_merge_check(m, &j, e);
    if (rc)
        return rc;
    bytes = m->work ? m->work(&j, lm_par_threads(j.par)) : 0;
    j.work = room(bytes + 64, 1);
    memset(j.work, 0xa5, bytes + 64);
    c->warned[0] = 0;
    talking = c;
    rc = m->run(&j, e);
    for (int i = 0; i < 64; i++)
        assert_int_equal(((unsigned char *)j.work)[bytes + (size_t)i], 0xa5);
    for (int64_t k = 0; k < j.count; k++) {
        double cell;
        memcpy(&cell, (char *)j.out + (size_t)k * size, size);
        c->got[k] = lm_get(j.out_dtype, &cell, 0);
    }
    lm_free(j.work);
    return rc;
}

static inline void merge(merge_case *c, const char *name)
{
    lm_err e = { 0 };
    if (try_merge(c, name, &e))
        fail_msg("%s: %s: %s", name, e.where, e.what);
}

static inline bool is_narrow(const merge_case *c)
{
    bool narrow = lm_dtype_size(c->base.dtype) <= 2;
    for (int i = 0; i < c->job.n_models; i++)
        narrow &= lm_dtype_size(c->model[i].dtype) <= 2;
    return narrow;
}

/* Half a unit in the last place of the type, relative: the largest error of one rounding. */
static inline double half_place(lm_dtype t)
{
    return t == LM_DTYPE_F64      ? 0x1p-53
           : t == LM_DTYPE_F32    ? 0x1p-24
           : t == LM_DTYPE_F16    ? 0x1p-11
           : t == LM_DTYPE_BF16   ? 0x1p-8
           : t == LM_DTYPE_F8E4M3 ? 0x1p-4
                                  : 0x1p-3;
}

/* got = want, up to one rounding and the noise of the arithmetic. */
static inline void expect(const merge_case *c, const double *want, const char *what)
{
    double place = half_place(c->job.out_dtype);
    double noise = is_narrow(c) ? 4e-6 : 1e-13;
    double least = c->job.out_dtype == LM_DTYPE_F8E4M3 ? 0x1p-9 : 1e-8 * place;
    for (int64_t k = 0; k < c->job.count; k++) {
        double room_for = (place + noise) * (1 + 1e-9) * fabs(want[k]) + noise + least;
        if (!(fabs(c->got[k] - want[k]) <= room_for))
            fail_msg("%s: element %lld of %lld (%s): got %.17g, want %.17g", what, (long long)k,
                     (long long)c->job.count, lm_dtype_name(c->job.out_dtype), c->got[k], want[k]);
    }
}

enum { N_TYPES = 5 };
static const lm_dtype types[] = { LM_DTYPE_BF16, LM_DTYPE_F32, LM_DTYPE_F64, LM_DTYPE_F16,
                                  LM_DTYPE_F8E4M3 };

typedef struct {
    double size;
    int64_t at;
} ranked;

static inline int by_size(const void *a,
                          const void *b) /* the largest first, then the lowest index */
{
    const ranked *p = a, *q = b;
    return p->size != q->size ? (p->size < q->size) - (p->size > q->size)
                              : (p->at > q->at) - (p->at < q->at);
}

static inline ranked *rank_all(const double *d, int64_t n)
{
    ranked *r = room((size_t)n, sizeof *r);
    for (int64_t k = 0; k < n; k++)
        r[k] = (ranked){ fabs(d[k]), k };
    qsort(r, (size_t)n, sizeof *r, by_size);
    return r;
}

static inline void set_weights(merge_case *c, double a, double b, double d)
{
    double w[] = { a, b, d };
    for (int i = 0; i < c->job.n_models; i++)
        c->model[i].param[LM_MERGE_WEIGHT] = w[i];
}

#endif
