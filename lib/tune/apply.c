/* SPDX-License-Identifier: Apache-2.0 */
/* apply.c -- rules on small graphs in double. */
#include "tune/apply.h"

#include <math.h>
#include <string.h>

#include "graph/exec.h"
#include "graph/passes.h"

/* ---- The tensors of a module ---- */

static int64_t count_of(const lm_tune_tensor *t)
{
    int64_t n = 1;

    for (int i = 0; i < t->ndim; i++)
        n *= t->dim[i];
    return n;
}

/* An index that a file gives, read as a double; -1, which is none, where a double does not hold it
 * exactly. */
static int64_t index_of(double v)
{
    return fabs(v) < 0x1p53 ? (int64_t)v : -1;
}

lm_code lm_tune_load(const lm_tune_folder *f, const lm_tune_part *p, lm_tune_loaded *out, lm_err *e)
{
    size_t all = 0, whole = 0, at = 0, at_whole = 0;
    lm_code rc;

    *out = (lm_tune_loaded){ .method = p->method, .m = p->module, .tensor = p->tensor, .n = p->n };
    for (int i = 0; i < p->n; i++) {
        all += p->tensor[i].off ? 0 : (size_t)count_of(&p->tensor[i]);
        whole += !p->tensor[i].off && p->tensor[i].ids ? (size_t)count_of(&p->tensor[i]) : 0;
    }
    rc = lm_alloc_n(&out->block, all, sizeof *out->block, "adapter", e);
    rc = rc ? rc : lm_alloc_n(&out->whole, whole, sizeof *out->whole, "adapter", e);
    for (int i = 0; !rc && i < p->n; i++) {
        int64_t n = count_of(&p->tensor[i]);

        if (p->tensor[i].off)
            continue;
        out->v[i] = out->block + at;
        out->given[i] = p->file[i] != NULL;
        at += (size_t)n;
        rc = lm_tune_folder_load(f, p, i, out->v[i], e);
        if (rc || !p->tensor[i].ids)
            continue;
        out->ids[i] = out->whole + at_whole;
        for (int64_t k = 0; k < n; k++)
            out->whole[at_whole++] = index_of(out->v[i][k]);
    }
    if (rc)
        lm_tune_loaded_fini(out);
    return rc;
}

void lm_tune_loaded_fini(lm_tune_loaded *l)
{
    lm_free(l->block);
    lm_free(l->whole);
    *l = (lm_tune_loaded){ 0 };
}

lm_code lm_tune_base_weight(lm_model_source *base, const lm_tune_base *b, double **out, lm_err *e)
{
    const lm_st_tensor *t = lm_model_source_find(base, b->weight);
    bool turned = b->turned || b->kind == LM_TUNE_EMBEDDING;
    double *v = NULL, *w = NULL;
    lm_code rc = lm_alloc_n(&v, (size_t)t->count, sizeof *v, "a weight", e);

    rc = rc ? rc : lm_model_source_load(base, t, LM_DTYPE_F64, v, e);
    if (!rc && turned) {
        rc = lm_alloc_n(&w, (size_t)t->count, sizeof *w, "a weight", e);
        for (int64_t i = 0; !rc && i < b->in; i++)
            for (int64_t j = 0; j < b->out; j++)
                w[j * b->in + i] = v[i * b->out + j];
        lm_free(v);
        v = w;
    }
    if (rc) {
        lm_free(v);
        v = NULL;
    }
    *out = v;
    return rc;
}

/* ---- One rule ---- */

typedef struct {
    lm_graph *g;
    lm_arena *arena;
    lm_rule r;
    lm_backend *b;
    lm_exec *x;
    lm_vid value[LM_TUNE_TENSORS], w, bias;
    void *consts; /* memory of constants, by the order of rule.made */
    char **at;
} trial;

static lm_vid declare(trial *t, int ndim, const int64_t *dim, const char *name, lm_err *e)
{
    lm_tensor shape = { .dtype = LM_DTYPE_F32, .ndim = ndim };
    lm_vid v = LM_NONE;

    memcpy(shape.dim, dim, (size_t)ndim * sizeof *dim);
    return lm_graph_value(t->g, LM_ROLE_INPUT, shape, name, &v, e) ? LM_NONE : v;
}

static void *const_at(void *ctx, lm_vid v)
{
    trial *t = ctx;

    for (size_t i = 0; i < t->r.n_made; i++)
        if (t->r.made[i].value == v)
            return t->at[i];
    return NULL;
}

/* Memory for the rule's constants, of 8 bytes each at most. */
static lm_code fill_consts(trial *t, lm_err *e)
{
    size_t all = 0;
    lm_code rc;

    for (size_t i = 0; i < t->r.n_made; i++)
        all += ((size_t)t->r.made[i].count * 8 + 63) / 64 * 64;
    rc = lm_alloc_n(&t->consts, all + 64, 1, "constants of an adapter", e);
    rc = rc ? rc : lm_alloc_n(&t->at, t->r.n_made + 1, sizeof *t->at, "constants of an adapter", e);
    all = 0;
    for (size_t i = 0; !rc && i < t->r.n_made; i++) {
        t->at[i] = (char *)t->consts + all;
        all += ((size_t)t->r.made[i].count * 8 + 63) / 64 * 64;
        lm_exec_bind(t->x, t->r.made[i].value, t->at[i]);
    }
    if (!rc)
        lm_rule_fill(&t->r, const_at, t);
    return rc;
}

static void end(trial *t)
{
    lm_exec_free(t->x);
    if (t->b)
        lm_backend_close(t->b);
    lm_rule_fini(&t->r);
    lm_graph_free(t->g);
    lm_arena_free(t->arena);
    lm_free(t->consts);
    lm_free(t->at);
}

/* A node's value of F64 is what is declared, or what an operator made. */
static lm_code run(trial *t, const lm_tune_loaded *l, lm_vid result, const double *w,
                   const double *b, double *out, int64_t n, lm_par *par, lm_err *e)
{
    const lm_precision exact = { .low = LM_DTYPE_F64 };
    const lm_step step = { 0 };
    lm_code rc = lm_pass_precision(t->g, &exact, e);

    rc = rc ? rc : lm_backend_cpu(lm_cpu_detect(), par, &t->b, e);
    rc = rc ? rc : lm_exec_new(t->g, t->b, &result, 1, &t->x, e);
    if (rc)
        return rc;
    for (int i = 0; i < l->n; i++)
        if (t->value[i] >= 0)
            lm_exec_bind(t->x, t->value[i], l->v[i]);
    if (t->w >= 0)
        lm_exec_bind(t->x, t->w, (void *)(uintptr_t)w);
    if (t->bias >= 0)
        lm_exec_bind(t->x, t->bias, (void *)(uintptr_t)b);
    rc = fill_consts(t, e);
    rc = rc ? rc : lm_exec_run(t->x, &step, e);
    if (rc)
        return rc;
    const void *made = lm_exec_data(t->x, result);
    if (made != out)
        memmove(out, made, (size_t)n * sizeof *out);
    return LM_OK;
}

static lm_code begin(trial *t, const lm_tune_loaded *l, const double *w, const double *b, lm_err *e)
{
    const lm_tune_module *m = &l->m;
    lm_code rc = lm_graph_new(&t->g, e);

    rc = rc ? rc : lm_arena_new(&t->arena, 1 << 16, e);
    if (rc)
        return rc;
    t->r = (lm_rule){ .g = t->g, .arena = t->arena, .e = e };
    t->w = t->bias = LM_NONE;
    if (w)
        t->w =
            declare(t, 2, (const int64_t[]){ m->in ? m->out : 1, m->in ? m->in : m->out }, "w", e);
    if (b)
        t->bias = declare(t, 2, (const int64_t[]){ 1, m->out }, "b", e);
    for (int i = 0; i < l->n; i++) {
        t->value[i] = LM_NONE;
        if (l->v[i] && !l->tensor[i].ids)
            t->value[i] = declare(t, l->tensor[i].ndim, l->tensor[i].dim, l->tensor[i].suffix, e);
    }
    return e->code;
}

/* What follows from the base; indices among it also as such. */
static lm_code derive(const lm_tune_loaded *l, const lm_tune_module *m, double *w, lm_err *e)
{
    lm_code rc = l->method->derive(m, w, l->v, l->given, e);

    for (int i = 0; !rc && i < l->n; i++)
        for (int64_t k = 0; l->ids[i] && !l->given[i] && k < count_of(&l->tensor[i]); k++)
            ((int64_t *)(uintptr_t)l->ids[i])[k] = (int64_t)l->v[i][k];
    return rc;
}

lm_code lm_tune_weight(const lm_tune_loaded *l, const double *w, double *out, lm_par *par,
                       lm_err *e)
{
    int64_t n = l->m.out * (l->m.in ? l->m.in : 1);
    lm_tune_module m = l->m;
    trial t = { 0 };
    lm_code rc = LM_OK;
    lm_vid result;

    m.ids = l->ids;
    if (!l->method->weight) {
        if (out != w)
            memcpy(out, w, (size_t)n * sizeof *out);
        return LM_OK;
    }
    if (l->method->derive) {
        if (out != w)
            memcpy(out, w, (size_t)n * sizeof *out);
        w = out; /* which derive may change */
        rc = derive(l, &m, out, e);
    }
    rc = rc ? rc : begin(&t, l, w, NULL, e);
    if (!rc) {
        result = l->method->weight(&t.r, &m, t.w, t.value);
        rc = e->code ? e->code : run(&t, l, result, w, NULL, out, n, par, e);
    }
    if (rc && strcmp(e->where, m.name) != 0)
        lm_err_in(e, "%s", m.name);
    end(&t);
    return rc;
}

lm_code lm_tune_bias(const lm_tune_loaded *l, const double *w, const double *b, double *out,
                     bool *any, lm_par *par, lm_err *e)
{
    lm_tune_module m = l->m;
    trial t = { 0 };
    double *copy = NULL; /* of w, which derive may change */
    lm_code rc = LM_OK;
    lm_vid result = LM_NONE;

    m.ids = l->ids;
    *any = b != NULL;
    if (!l->method->bias) {
        if (b)
            memmove(out, b, (size_t)m.out * sizeof *out);
        return LM_OK;
    }
    if (l->method->derive && w) {
        m.bias = b;
        rc = lm_alloc_n(&copy, (size_t)(m.out * m.in), sizeof *copy, "a weight", e);
        if (!rc) {
            memcpy(copy, w, (size_t)(m.out * m.in) * sizeof *copy);
            rc = derive(l, &m, copy, e);
        }
    }
    rc = rc ? rc : begin(&t, l, w, b, e);
    if (!rc) {
        result = l->method->bias(&t.r, &m, t.w, t.bias, t.value);
        rc = e->code;
    }
    *any = result >= 0;
    if (!rc && *any)
        rc = run(&t, l, result, w, b, out, m.out, par, e);
    if (rc && strcmp(e->where, m.name) != 0)
        lm_err_in(e, "%s", m.name);
    lm_free(copy);
    end(&t);
    return rc;
}

/* W, W' and two more of its size is what most rules hold at once. */
uint64_t lm_tune_apply_bytes(const lm_tune_module *m)
{
    return 4 * 8 * (uint64_t)m->out * (uint64_t)(m->in ? m->in : 1);
}

/* ---- Rounding ---- */

/* An inexact result gets an odd last bit. */
static float round_odd(double d)
{
    float f = (float)d;
    uint32_t u;

    if (isnan(d) || (double)f == d)
        return f;
    memcpy(&u, &f, 4);
    u = u & 1 ? u : fabs((double)f) < fabs(d) ? u + 1 : u - 1; /* its neighbour on d's side */
    memcpy(&f, &u, 4);
    return f;
}

void lm_tune_round(const double *v, lm_dtype into, void *out, int64_t n)
{
    float *f = out;

    if (into == LM_DTYPE_F64) {
        memcpy(out, v, (size_t)n * sizeof *v);
        return;
    }
    for (int64_t i = 0; i < n; i++)
        f[i] = into == LM_DTYPE_F32 ? (float)v[i] : round_odd(v[i]);
}
