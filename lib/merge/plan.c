/* SPDX-License-Identifier: Apache-2.0 */
/* plan.c -- makes a plan from its parts. */
#include "merge/plan.h"

#include <string.h>

#include "merge/plan_impl.h"

static void add_up(lm_merge_plan *p)
{
    for (int64_t i = 0; i < p->n; i++) {
        const lm_merge_tensor *t = &p->tensor[i];

        p->write += t->bytes;
        if (t->bytes > p->largest)
            p->largest = t->bytes;
        for (int k = t->base ? -1 : 0; k < t->n_models; k++) {
            const lm_st_tensor *x = k < 0 ? t->base->tensor : t->model[k].tensor;

            p->read += x->bytes;
            if (x->bytes > p->largest)
                p->largest = x->bytes;
        }
    }
}

static lm_code make(lm_merge_plan *p, const lm_merge_plan_opts *o, lm_err *e)
{
    lm_code rc = lm_plan_open(p, o, e);

    if (!rc)
        rc = lm_plan_vocab(p, o, e);
    if (!rc)
        rc = lm_plan_tensors(p, e);
    if (!rc)
        rc = lm_plan_config(p, o->sink, e);
    if (!rc)
        add_up(p);
    return rc;
}

lm_code lm_merge_plan_new(const lm_merge_recipe *r, const lm_merge_plan_opts *o,
                          lm_merge_plan **out, lm_err *e)
{
    static const lm_merge_plan_opts usual;
    lm_arena *a = NULL;
    lm_merge_plan *p = NULL;
    lm_code rc = lm_arena_new(&a, 1 << 20, e);

    *out = NULL;
    if (!rc)
        rc = lm_arena_alloc(a, &p, 1, sizeof *p, e);
    if (rc) {
        lm_arena_free(a);
        return rc;
    }
    p->arena = a;
    p->recipe = r;
    p->threads = lm_par_threads(o && o->bundle ? o->bundle->par : NULL);
    p->lead = r->base >= 0 ? r->base : r->slice[0].source[0].input;
    rc = lm_arena_alloc(a, &p->model, (size_t)r->n_inputs, sizeof *p->model, e);
    if (!rc)
        rc = lm_arena_alloc(a, &p->path, (size_t)r->n_inputs, sizeof *p->path, e);
    if (!rc)
        rc = make(p, o ? o : &usual, e);
    if (rc) {
        lm_merge_plan_free(p);
        return rc;
    }
    *out = p;
    return LM_OK;
}

void lm_merge_plan_free(lm_merge_plan *p)
{
    if (!p)
        return;
    lm_vocab_free(p->vocab);
    lm_plan_close(p);
    lm_free(p->tensor);
    json_decref(p->config);
    json_decref(p->generation_config);
    lm_arena_free(p->arena);
}

uint64_t lm_merge_plan_bound(const lm_merge_plan *p)
{
    return 2 * p->largest * (uint64_t)p->recipe->n_inputs + p->side + (64u << 20);
}
