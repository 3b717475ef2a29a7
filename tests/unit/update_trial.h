/* SPDX-License-Identifier: Apache-2.0 */
/* update_trial.h -- the update of a few tensors without a model: blocks in host memory, gradients
 * set by the test, single steps. */
#ifndef LM_TESTS_UPDATE_TRIAL_H
#define LM_TESTS_UPDATE_TRIAL_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "train/update.h"

enum { TRIAL_TENSORS = 16, TRIAL_STATES = 16 };

typedef struct {
    lm_backend *b;
    lm_update *u;
    lm_exec *x;
    lm_update_tensor t[TRIAL_TENSORS];
    int n;
    float *param, *grad;
    uint16_t *low;
    void *state[TRIAL_STATES];
    double numbers[64], loss, sumsq, weights;
    int64_t step;
} update_trial;

static inline void trial_must(lm_code rc, const lm_err *e)
{
    if (rc)
        fail_msg("%s: %s", e->where, e->what);
}

/* Add a tensor [rows, cols], or [rows] if cols is 0; the caller sets its other fields. */
static inline lm_update_tensor *trial_add(update_trial *r, const char *name, int64_t rows,
                                          int64_t cols)
{
    lm_update_tensor *t = &r->t[r->n], *last = t - 1;
    *t = (lm_update_tensor){
        .name = name,
        .shape = { .dtype = LM_DTYPE_F32, .ndim = cols ? 2 : 1, .dim = { rows, cols } },
        .decay = cols > 0,
        .layer = -1,
        .index = r->n
    };
    if (r->n++)
        t->offset = (last->offset + lm_tensor_count(&last->shape) + LM_BLOCK_ALIGN - 1) /
                    LM_BLOCK_ALIGN * LM_BLOCK_ALIGN;
    return t;
}

static inline int64_t trial_block(const update_trial *r)
{
    const lm_update_tensor *last = &r->t[r->n - 1];
    return (last->offset + lm_tensor_count(&last->shape) + LM_BLOCK_ALIGN - 1) / LM_BLOCK_ALIGN *
           LM_BLOCK_ALIGN;
}

static inline void *trial_room(lm_backend *b, size_t bytes)
{
    lm_err e = { 0 };
    void *p = NULL;
    trial_must(b->alloc(b, bytes, "a test's block", &p, &e), &e);
    return p;
}

/* Call it after the tensors were added; the backend must use host memory. */
static inline void trial_open(update_trial *r, lm_backend *b, const lm_optim_use *use, int n_use,
                              double clip_norm, double clip_value, bool low)
{
    lm_update_opts o = { .use = use,
                         .n_use = n_use,
                         .clip_norm = clip_norm,
                         .clip_value = clip_value,
                         .block = trial_block(r),
                         .trained = trial_block(r),
                         .low = low };
    const lm_store_state *state;
    const lm_vid *value;
    lm_err e = { 0 };
    size_t n = (size_t)o.block;
    r->b = b;
    trial_must(lm_update_build(&o, r->t, r->n, &r->u, &e), &e);
    trial_must(lm_exec_new(lm_update_graph(r->u), b, NULL, 0, &r->x, &e), &e);
    const lm_update_values *v = lm_update_value(r->u);
    r->param = trial_room(b, n * sizeof *r->param);
    r->grad = trial_room(b, n * sizeof *r->grad);
    r->low = low ? trial_room(b, n * sizeof *r->low) : NULL;
    lm_exec_bind(r->x, v->param, r->param);
    lm_exec_bind(r->x, v->grad, r->grad);
    if (low)
        lm_exec_bind(r->x, v->low, r->low);
    lm_exec_bind(r->x, v->numbers, r->numbers);
    lm_exec_bind(r->x, v->loss, &r->loss);
    lm_exec_bind(r->x, v->sumsq, &r->sumsq);
    lm_exec_bind(r->x, v->weights, &r->weights);
    const lm_update_constant *c;
    for (int i = lm_update_constants(r->u, &c); i-- > 0;)
        lm_exec_bind(r->x, c[i].value, c[i].number);
    int n_states = lm_update_states(r->u, &state, &value);
    assert_true(n_states <= TRIAL_STATES && lm_update_n_numbers(r->u) <= 64);
    for (int k = 0; k < n_states; k++) {
        r->state[k] = trial_room(b, (size_t)state[k].count * lm_dtype_size(state[k].format));
        lm_exec_bind(r->x, value[k], r->state[k]);
    }
}

static inline void trial_run(update_trial *r, lm_update_part part)
{
    lm_step step = { .step = r->step };
    size_t first, last;
    lm_err e = { 0 };
    lm_update_part_at(r->u, part, &first, &last);
    trial_must(lm_exec_run_part(r->x, first, last, lm_update_due(r->u, r->step), &step, &e), &e);
}

/* One step with the gradients in r->grad. */
static inline void trial_step(update_trial *r, double lr)
{
    if (r->step == 0)
        trial_run(r, LM_UPDATE_START);
    lm_update_numbers_at(r->u, lr, r->step, r->numbers);
    trial_run(r, LM_UPDATE_NORM);
    trial_run(r, LM_UPDATE_STEP);
    r->step++;
}

static inline float *trial_param(const update_trial *r, int i)
{
    return r->param + r->t[i].offset;
}

static inline float *trial_grad(const update_trial *r, int i)
{
    return r->grad + r->t[i].offset;
}

/* The state called `name` of tensor i; NULL if it has none.  *t: its shape and dtype; may be
 * NULL. */
static inline void *trial_state(const update_trial *r, const char *name, int i, lm_tensor *t)
{
    const lm_store_state *s;
    const lm_vid *value;
    int n = lm_update_states(r->u, &s, &value);
    for (int k = 0; k < n; k++)
        for (int p = 0; !strcmp(s[k].name, name) && p < s[k].n_parts; p++)
            if (s[k].part[p].tensor == r->t[i].index) {
                if (t)
                    *t = s[k].part[p].shape;
                return (char *)r->state[k] + (size_t)s[k].part[p].at * lm_dtype_size(s[k].format);
            }
    return NULL;
}

static inline void trial_close(update_trial *r)
{
    const lm_store_state *s;
    const lm_vid *value;
    size_t n = (size_t)trial_block(r);
    int n_states = lm_update_states(r->u, &s, &value);
    for (int k = 0; k < n_states; k++)
        r->b->free(r->b, r->state[k], (size_t)s[k].count * lm_dtype_size(s[k].format));
    r->b->free(r->b, r->param, n * sizeof *r->param);
    r->b->free(r->b, r->grad, n * sizeof *r->grad);
    if (r->low)
        r->b->free(r->b, r->low, n * sizeof *r->low);
    lm_exec_free(r->x);
    lm_update_free(r->u);
    memset(r, 0, sizeof *r);
}

#endif
