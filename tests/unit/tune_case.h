/* SPDX-License-Identifier: Apache-2.0 */
/* tune_case.h -- one module with the tensors of a method, whose rule runs on small matrices.  Include it behind cmocka's
 * headers. */
#ifndef LM_TESTS_TUNE_CASE_H
#define LM_TESTS_TUNE_CASE_H

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/rng.h"
#include "tune/apply.h"
#include "tune/methods.h"

enum { OUT = 16, IN = 24 };

/* A module with the numbers of its tensors, and a base. */
typedef struct {
    lm_tune_loaded l;
    lm_tune_tensor tensor[LM_TUNE_TENSORS];
    double hyper[64], w[OUT * IN];
    json_t *config;
    double *room[LM_TUNE_TENSORS];
    int64_t *ids[LM_TUNE_TENSORS];
} trial;

static inline int64_t count_of(const lm_tune_tensor *t)
{
    int64_t n = 1;
    for (int i = 0; i < t->ndim; i++)
        n *= t->dim[i];
    return n;
}

static inline double normal(uint64_t seed, int64_t i)
{
    return lm_rng_normal(lm_rng_make(seed, "trial", 0), (uint64_t)i);
}

/* A module of any size, and its tensors as they begin; W may change. */
static inline void begin_at(trial *t, const lm_tune_method *m, const char *config, const char *name,
                            int64_t rows, int64_t cols, bool has_bias)
{
    lm_err e = { 0 };
    bool changed = false;

    memset(t, 0, sizeof *t);
    t->config = json_loads(config, 0, NULL);
    assert_non_null(t->config);
    t->l.method = m;
    t->l.tensor = t->tensor;
    if (lm_tune_read_hyper(m, t->config, name, "config", t->hyper, &e))
        fail_msg("%s: %s", e.where, e.what);
    t->l.m = (lm_tune_module){ .name = name,
                               .out = rows,
                               .in = m->is & LM_TUNE_VECTORS ? 0 : cols,
                               .hyper = t->hyper,
                               .config = t->config,
                               .has_bias = has_bias,
                               .most_out = rows,
                               .most_in = cols,
                               .places = 1 };
    if (m->tensors(&t->l.m, t->tensor, &t->l.n, &e))
        fail_msg("%s: %s", e.where, e.what);
    for (int64_t i = 0; i < rows * cols; i++)
        t->w[i] = normal(1, i);
    for (int i = 0; i < t->l.n; i++) {
        const lm_tune_tensor *x = &t->tensor[i];

        if (x->off)
            continue;
        t->l.v[i] = t->room[i] = calloc((size_t)count_of(x), sizeof(double));
        t->l.given[i] = true;
        for (int64_t k = 0; k < count_of(x); k++)
            t->room[i][k] = x->init == LM_TUNE_ONES   ? 1
                            : x->init == LM_TUNE_FULL ? x->scale
                            : x->init == LM_TUNE_UNIFORM
                                ? x->scale * tanh(normal(2 + (uint64_t)i, k))
                            : x->init == LM_TUNE_NORMAL ? x->scale * normal(2 + (uint64_t)i, k)
                                                        : 0;
    }
    if (m->start && m->start(&t->l.m, t->w, &changed, t->l.v, lm_rng_make(3, "start", 0), &e))
        fail_msg("%s: %s", e.where, e.what);
    for (int i = 0; i < t->l.n; i++)
        if (t->room[i] && t->tensor[i].ids) {
            t->ids[i] = calloc((size_t)count_of(&t->tensor[i]), sizeof(int64_t));
            for (int64_t k = 0; k < count_of(&t->tensor[i]); k++)
                t->ids[i][k] = (int64_t)t->room[i][k];
            t->l.ids[i] = t->ids[i];
        }
}

static inline void begin(trial *t, const lm_tune_method *m, const char *config)
{
    begin_at(t, m, config, "model.layers.0.mlp.down_proj", OUT, IN, false);
}

/* Numbers at random in every tensor that has no indices. */
static inline void fill(trial *t)
{
    for (int i = 0; i < t->l.n; i++)
        for (int64_t k = 0; t->room[i] && !t->tensor[i].ids && k < count_of(&t->tensor[i]); k++)
            t->room[i][k] = normal(100 + (uint64_t)i, k);
}

static inline void end(trial *t)
{
    for (int i = 0; i < LM_TUNE_TENSORS; i++) {
        free(t->room[i]);
        free(t->ids[i]);
    }
    json_decref(t->config);
}

/* Set tensor i, which has that many numbers. */
#define SET(t, i, ...)                                                                 \
    do {                                                                               \
        const double numbers[] = { __VA_ARGS__ };                                      \
        assert_int_equal(count_of(&(t)->tensor[i]), sizeof numbers / sizeof *numbers); \
        memcpy((t)->room[i], numbers, sizeof numbers);                                 \
    } while (0)

/* The rule gives W + s D: n numbers of each. */
static inline void gives(trial *t, double s, const double *d, int64_t n)
{
    lm_err e = { 0 };
    double out[OUT * IN];

    assert_int_equal(n, t->l.m.out * t->l.m.in);
    if (lm_tune_weight(&t->l, t->w, out, NULL, &e))
        fail_msg("%s: %s", e.where, e.what);
    for (int64_t i = 0; i < n; i++)
        if (fabs(out[i] - t->w[i] - s * d[i]) > 1e-12)
            fail_msg("number %d is %.15g, not %.15g", (int)i, out[i], t->w[i] + s * d[i]);
}

#endif
