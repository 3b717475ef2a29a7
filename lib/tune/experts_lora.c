/* SPDX-License-Identifier: Apache-2.0 */
/* experts_lora.c -- LoRA of parameters of experts made of other things: of such an adapter at
 * another rank, of several, of the difference of two models. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "tune/lora_set.h"
#include "tune/svd.h"

enum { USUAL_RANK = 16 };

/* ---- In the set ---- */

lm_code lm_lora_set_stack(lm_lora_set *s, const lm_tune_stack *p, int64_t rank, const double *left,
                          const double *right, double lost, double all, lm_err *e)
{
    int64_t n = p->experts;
    double *b = NULL;
    lm_code rc = lm_alloc_n(&b, (size_t)(n * p->out * rank), sizeof *b, "an adapter", e);

    rc =
        rc ? rc
           : lm_grow(&s->level, &s->cap_levels, s->n_levels + 1, sizeof *s->level, "an adapter", e);
    if (!rc)
        s->level[s->n_levels++] = (lm_lora_level){ p->module, p->name, s->n };
    for (int64_t x = 0; !rc && x < n; x++)
        for (int64_t o = 0; o < p->out; o++)
            for (int64_t k = 0; k < rank; k++)
                b[(o * rank + k) * n + x] = left[(x * p->out + o) * rank + k];
    rc = rc ? rc : lm_lora_set_tensor(s, p->key, 2, (const int64_t[]){ n * rank, p->in }, right, e);
    rc = rc ? rc : lm_lora_set_tensor(s, p->key, 2, (const int64_t[]){ p->out, rank * n }, b, e);
    lm_free(b);
    return rc ? rc : lm_lora_set_note(s, p->key, s->params, rank, lost, all, e);
}

/* How many parameters of its module are wrapped after it. */
static int depth_of(const lm_lora_set *s, size_t i)
{
    const lm_lora_level *l = &s->level[i];
    int depth = 0, order = lm_tune_stack_order(l->name);

    for (size_t k = 0; k < s->n_levels; k++) {
        int other = lm_tune_stack_order(s->level[k].name);

        depth += k != i && !strcmp(s->level[k].module, l->module) &&
                 (other > order || (other == order && k > i));
    }
    return depth;
}

lm_code lm_lora_set_nest(lm_lora_set *s, lm_err *e)
{
    lm_code rc = LM_OK;

    for (size_t i = 0; !rc && i < s->n_levels; i++) {
        int depth = depth_of(s, i);

        for (int k = 0; !rc && k < 2; k++) {
            lm_buf name = { 0 };
            lm_tune_saved *t = &s->tensor[s->level[i].a + (size_t)k];
            char *text = NULL;

            rc = lm_buf_addf(&name, e, "base_model.model.%s", s->level[i].module);
            for (int j = 0; !rc && j < depth; j++)
                rc = lm_buf_add(&name, ".base_layer", 11, e);
            rc = rc ? rc : lm_asprintf(&text, e, "%s.lora_%c.weight", name.data, 'A' + k);
            lm_buf_fini(&name);
            if (!rc) {
                lm_free((void *)(uintptr_t)t->name);
                t->name = text;
            }
        }
    }
    return rc;
}

/* ---- By singular values ---- */

/* Singular values of all experts, and the rank that they need. */
static lm_code split_all(const lm_lora_set *s, const lm_tune_stack *p, lm_lora_change_fn change,
                         void *ctx, double *d, lm_tune_svd *svd, int64_t *rank, double *all,
                         lm_err *e)
{
    int64_t least = p->out < p->in ? p->out : p->in, most = s->o->rank ? s->o->rank : USUAL_RANK;
    double share = s->o->share > 0 && s->o->share < 1 ? s->o->share : 1;
    lm_code rc = LM_OK;

    most = most < least ? most : least;
    for (int64_t x = 0; !rc && x < p->experts; x++) {
        double squares = 0;
        int64_t need;

        rc = change(ctx, x, d, e);
        for (int64_t i = 0; !rc && i < p->out * p->in; i++)
            squares += d[i] * d[i];
        rc = rc ? rc : lm_tune_svd_most(d, p->out, p->in, most, s->o->seed, &svd[x], e);
        if (rc)
            return rc;
        need = lm_tune_svd_rank(&svd[x], most, share, squares);
        *rank = need > *rank ? need : *rank;
        *all += squares;
    }
    return rc;
}

lm_code lm_lora_set_split_stack(lm_lora_set *s, const lm_tune_stack *p, lm_lora_change_fn change,
                                void *ctx, lm_err *e)
{
    double *d = NULL, *left = NULL, *right = NULL, all = 0, kept = 0;
    int64_t rank = 0, n = p->experts;
    lm_tune_svd *svd = NULL;
    lm_code rc = lm_alloc_n(&d, (size_t)(p->out * p->in), sizeof *d, "an adapter", e);

    rc = rc ? rc : lm_alloc_n(&svd, (size_t)n, sizeof *svd, "an adapter", e);
    rc = rc ? rc : split_all(s, p, change, ctx, d, svd, &rank, &all, e);
    rc = rc ? rc : lm_alloc_n(&left, (size_t)(n * p->out * rank), sizeof *left, "an adapter", e);
    rc = rc ? rc : lm_alloc_n(&right, (size_t)(n * p->in * rank), sizeof *right, "an adapter", e);
    for (int64_t x = 0; !rc && x < n; x++) {
        lm_tune_svd_factors(&svd[x], rank, 0.5, left + x * p->out * rank, right + x * rank * p->in);
        for (int64_t i = 0; i < rank && i < svd[x].n; i++)
            kept += svd[x].value[i] * svd[x].value[i];
    }
    rc = rc ? rc : lm_lora_set_stack(s, p, rank, left, right, all > kept ? all - kept : 0, all, e);
    for (int64_t x = 0; svd && x < n; x++)
        lm_tune_svd_fini(&svd[x]);
    lm_free(svd);
    lm_free(d);
    lm_free(left);
    lm_free(right);
    return rc;
}

/* ---- LoRA from adapters: another rank, a sum of several ---- */

typedef struct {
    const lm_tune_folder *f;
    const lm_tune_param *p;
    double on_left, on_right; /* factors of B and A */
    int64_t at;               /* its columns among those of all */
} term;

typedef struct {
    const lm_tune_stack *stack;
    term *term;
    int n;
    int64_t all; /* ranks together */
    double *left, *right;
} sum;

/* [out,all], [all,in] of an expert: the terms side by side, or added where their places are the
 * same. */
static lm_code factors_of(const sum *k, int64_t expert, double *left, double *right, lm_err *e)
{
    int64_t out = k->stack->out, in = k->stack->in;
    lm_code rc = LM_OK;

    memset(left, 0, (size_t)(out * k->all) * sizeof *left);
    memset(right, 0, (size_t)(in * k->all) * sizeof *right);
    for (int i = 0; !rc && i < k->n; i++) {
        const term *t = &k->term[i];
        int64_t r = t->p->rank;
        double *b = NULL, *a = NULL;

        rc = lm_alloc_n(&b, (size_t)(out * r), sizeof *b, "an adapter", e);
        rc = rc ? rc : lm_alloc_n(&a, (size_t)(in * r), sizeof *a, "an adapter", e);
        rc = rc ? rc : lm_tune_param_expert(lm_tune_folder_tensors(t->f), t->p, expert, b, a, e);
        for (int64_t o = 0; !rc && o < out; o++)
            for (int64_t c = 0; c < r; c++)
                left[o * k->all + t->at + c] += t->on_left * b[o * r + c];
        for (int64_t c = 0; !rc && c < r * in; c++)
            right[t->at * in + c] += t->on_right * a[c];
        lm_free(b);
        lm_free(a);
    }
    return rc;
}

/* A lm_lora_change_fn. */
static lm_code change_of(void *ctx, int64_t expert, double *d, lm_err *e)
{
    const sum *k = ctx;
    int64_t out = k->stack->out, in = k->stack->in;
    lm_code rc = factors_of(k, expert, k->left, k->right, e);

    memset(d, 0, (size_t)(out * in) * sizeof *d);
    for (int64_t o = 0; !rc && o < out; o++)
        for (int64_t c = 0; c < k->all; c++)
            for (int64_t j = 0; j < in; j++)
                d[o * in + j] += k->left[o * k->all + c] * k->right[c * in + j];
    return rc;
}

/* The terms as one: by singular values, or as they are. */
static lm_code add_sum(lm_lora_set *s, sum *k, bool split, lm_err *e)
{
    const lm_tune_stack *p = k->stack;
    int64_t experts = split ? 1 : p->experts;
    int64_t left = p->out * k->all, right = p->in * k->all;
    lm_code rc = lm_alloc_n(&k->left, (size_t)(experts * left), sizeof *k->left, "an adapter", e);

    rc = rc ? rc
            : lm_alloc_n(&k->right, (size_t)(experts * right), sizeof *k->right, "an adapter", e);
    for (int64_t x = 0; !rc && !split && x < experts; x++)
        rc = factors_of(k, x, k->left + x * left, k->right + x * right, e);
    if (!rc)
        rc = split ? lm_lora_set_split_stack(s, p, change_of, k, e)
                   : lm_lora_set_stack(s, p, k->all, k->left, k->right, 0, 1, e);
    lm_free(k->left);
    lm_free(k->right);
    return rc;
}

lm_code lm_tune_params_convert(const lm_tune_folder *f, lm_lora_set *s, lm_err *e)
{
    bool share = s->o->share > 0 && s->o->share < 1;
    lm_code rc = LM_OK;

    for (size_t i = 0; !rc && i < lm_tune_folder_params(f); i++) {
        const lm_tune_param *p = lm_tune_folder_param(f, i);
        term one = { .f = f, .p = p, .on_left = p->scale, .on_right = 1 };
        sum k = { .stack = &p->stack, .term = &one, .n = 1, .all = p->rank };

        rc = add_sum(s, &k, share || (s->o->rank && s->o->rank < p->rank), e);
    }
    return rc;
}

static const lm_tune_param *param_of(const lm_tune_folder *f, const char *key)
{
    for (size_t i = 0; i < lm_tune_folder_params(f); i++)
        if (!strcmp(lm_tune_folder_param(f, i)->stack.key, key))
            return lm_tune_folder_param(f, i);
    return NULL;
}

/* As combine.c does it with modules. */
static lm_code combine_one(lm_tune_folder *const *f, const double *weight, int n,
                           lm_tune_combination how, const lm_tune_param *first, term *room,
                           lm_lora_set *s, lm_err *e)
{
    bool linear = how == LM_TUNE_COMBINE_LINEAR;
    sum k = { .stack = &first->stack, .term = room };

    for (int i = 0; i < n; i++) {
        const lm_tune_param *p = param_of(f[i], first->stack.key);
        double root;

        if (!p)
            continue;
        if (linear && p->rank != first->rank)
            return lm_fail(e, LM_EUSAGE, first->stack.key, "use cat or svd",
                           "its ranks are %lld and %lld, whose factors do not add up",
                           (long long)first->rank, (long long)p->rank);
        root = sqrt(fabs(weight[i] * p->scale));
        room[k.n++] = (term){ .f = f[i],
                              .p = p,
                              .on_left = !linear         ? weight[i] * p->scale
                                         : weight[i] < 0 ? -root
                                                         : root,
                              .on_right = linear ? root : 1,
                              .at = linear ? 0 : k.all };
        k.all = linear ? p->rank : k.all + p->rank;
    }
    return add_sum(s, &k, how == LM_TUNE_COMBINE_SVD, e);
}

lm_code lm_tune_params_combine(lm_tune_folder *const *f, const double *weight, int n,
                               lm_tune_combination how, lm_lora_set *s, lm_err *e)
{
    term *room = NULL;
    lm_code rc = lm_alloc_n(&room, (size_t)n, sizeof *room, "an adapter", e);

    for (int i = 0; !rc && i < n; i++)
        for (size_t k = 0; !rc && k < lm_tune_folder_params(f[i]); k++) {
            const lm_tune_param *p = lm_tune_folder_param(f[i], k);
            bool seen = false;

            for (int j = 0; j < i && !seen; j++)
                seen = param_of(f[j], p->stack.key) != NULL;
            if (!seen)
                rc = combine_one(f, weight, n, how, p, room, s, e);
        }
    lm_free(room);
    return rc;
}

/* ---- LoRA from the difference of two models ---- */

typedef struct {
    const lm_model_source *base, *tuned;
    const lm_st_tensor *t, *u; /* in each */
    const lm_tune_stack *stack;
    void *raw;
    double *from, *to;
} difference;

static lm_code read_expert(const lm_model_source *m, const lm_st_tensor *t, const difference *x,
                           int64_t expert, double *out, lm_err *e)
{
    int64_t n = x->stack->out * x->stack->in;
    size_t bytes = (size_t)n * lm_dtype_size(t->dtype);
    lm_code rc = lm_model_source_read(m, t, (uint64_t)expert * bytes, x->raw, bytes, e);

    if (!rc)
        lm_convert(t->dtype, x->raw, LM_DTYPE_F64, out, n);
    return rc;
}

/* A lm_lora_change_fn. */
static lm_code differ(void *ctx, int64_t expert, double *d, lm_err *e)
{
    const difference *x = ctx;
    int64_t out = x->stack->out, in = x->stack->in;
    lm_code rc = read_expert(x->base, x->t, x, expert, x->from, e);

    rc = rc ? rc : read_expert(x->tuned, x->u, x, expert, x->to, e);
    for (int64_t o = 0; !rc && o < out; o++)
        for (int64_t j = 0; j < in; j++) {
            int64_t at = x->stack->turned ? j * out + o : o * in + j;

            d[o * in + j] = x->to[at] - x->from[at];
        }
    return rc;
}

static lm_code extract(difference *x, lm_lora_set *s, lm_err *e)
{
    const lm_tune_stack *p = x->stack;
    int64_t n = p->out * p->in;
    double *d = NULL;
    bool any = false;
    lm_code rc = lm_alloc_n(&d, (size_t)n, sizeof *d, "an adapter", e);

    rc = rc ? rc : lm_alloc_n(&x->from, (size_t)n, sizeof *d, "an adapter", e);
    rc = rc ? rc : lm_alloc_n(&x->to, (size_t)n, sizeof *d, "an adapter", e);
    rc = rc ? rc : lm_alloc_n(&x->raw, (size_t)n, sizeof *d, "an adapter", e);
    for (int64_t i = 0; !rc && i < p->experts && !any; i++) {
        rc = differ(x, i, d, e);
        for (int64_t k = 0; !rc && k < n && !any; k++)
            any = d[k] != 0;
    }
    if (!rc && any)
        rc = lm_lora_set_split_stack(s, p, differ, x, e);
    lm_free(d);
    lm_free(x->from);
    lm_free(x->to);
    lm_free(x->raw);
    return rc;
}

lm_code lm_tune_params_extract(const lm_tune_bases *bases, lm_model_source *tuned, lm_arena *arena,
                               lm_lora_set *s, lm_err *e)
{
    lm_code rc = LM_OK;

    for (size_t i = 0; !rc && i < lm_model_source_count(bases->source); i++) {
        const lm_st_tensor *t = lm_model_source_at(bases->source, i);
        const char *dot = strrchr(t->name, '.');
        lm_tune_stack p;
        difference x = { .base = bases->source, .tuned = tuned, .t = t, .stack = &p };
        char module[600];
        bool found = false;

        if (!lm_tune_stack_is(t))
            continue;
        snprintf(module, sizeof module, "%.*s", (int)(dot - t->name < 599 ? dot - t->name : 599),
                 t->name);
        rc = lm_tune_stack_find(bases, module, dot + 1, arena, &p, &found, e);
        if (rc || !found)
            continue;
        x.u = lm_model_source_find(tuned, t->name);
        if (!x.u || x.u->ndim != 3 || x.u->dim[0] != t->dim[0] || x.u->dim[1] != t->dim[1] ||
            x.u->dim[2] != t->dim[2] || !lm_dtype_is_float(x.u->dtype))
            return lm_fail(
                e, LM_EUSAGE, lm_model_source_path(tuned),
                "give a model that was tuned from the base",
                x.u ? "'%s' has another shape than in the base" : "it has no tensor '%s'", t->name);
        rc = extract(&x, s, e);
    }
    return rc;
}
