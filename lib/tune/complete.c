/* SPDX-License-Identifier: Apache-2.0 */
/* complete.c -- see complete.h. */
#include "tune/complete.h"

#include <string.h>

#include "base/mem.h"
#include "tune/apply.h"

typedef struct {
    const lm_tune_folder *f;
    lm_model_source *base;
    lm_tune_saved *t; /* names and numbers are its own */
    size_t n, cap;
} set;

static bool is_missing(const lm_tune_part *p, int i)
{
    return !p->tensor[i].off && !p->tensor[i].ids && !p->file[i];
}

static bool lacks(const lm_tune_part *p)
{
    bool any = false;
    for (int i = 0; i < p->n; i++)
        any = any || is_missing(p, i);
    return any;
}

/* Both are taken, also after a failure. */
static lm_code add(set *s, char *name, lm_dtype dtype, int ndim, const int64_t *dim, void *data,
                   lm_err *e)
{
    if (lm_grow(&s->t, &s->cap, s->n + 1, sizeof *s->t, "an adapter", e)) {
        lm_free(name);
        lm_free(data);
        return e->code;
    }
    lm_tune_saved *t = &s->t[s->n++];
    *t = (lm_tune_saved){ .name = name, .dtype = dtype, .ndim = ndim, .data = data };
    memcpy(t->dim, dim, (size_t)ndim * sizeof *dim);
    return LM_OK;
}

static lm_code add_file(set *s, lm_err *e)
{
    const lm_st *st = lm_tune_folder_tensors(s->f);
    for (size_t k = 0; k < lm_st_count(st); k++) {
        const lm_st_tensor *t = lm_st_at(st, k);
        char *name = NULL;
        char *data = NULL;
        if (lm_alloc_n(&data, (size_t)t->bytes + 1, 1, "an adapter", e) ||
            lm_st_read(st, t, 0, data, (size_t)t->bytes, e) ||
            lm_asprintf(&name, e, "%s", t->name)) {
            lm_free(data);
            return e->code;
        }
        if (add(s, name, t->dtype, t->ndim, t->dim, data, e))
            return e->code;
    }
    return LM_OK;
}

static bool has(const set *s, const char *name)
{
    size_t k = 0;
    while (k < s->n && strcmp(s->t[k].name, name) != 0)
        k++;
    return k < s->n;
}

static lm_code add_made(set *s, const lm_tune_loaded *l, int i, lm_err *e)
{
    const lm_tune_tensor *t = &l->tensor[i];
    int64_t count = 1;
    char *name = NULL;
    float *data = NULL;
    if (lm_tune_tensor_name(&l->m, t, &name, e))
        return e->code;
    if (t->shared && has(s, name)) {
        lm_free(name);
        return LM_OK;
    }
    for (int k = 0; k < t->ndim; k++)
        count *= t->dim[k];
    if (lm_alloc_n(&data, (size_t)count, sizeof *data, "an adapter", e)) {
        lm_free(name);
        return e->code;
    }
    for (int64_t k = 0; k < count; k++)
        data[k] = (float)l->v[i][k];
    return add(s, name, LM_DTYPE_F32, t->ndim, t->dim, data, e);
}

static lm_code add_part(set *s, const lm_tune_part *p, lm_err *e)
{
    lm_tune_loaded l = { 0 };
    double *w = NULL;
    lm_code rc = lm_tune_load(s->f, p, &l, e);
    if (!rc && p->method->derive) {
        rc = lm_tune_base_weight(s->base, p->base, &w, e);
        rc = rc ? rc : p->method->derive(&l.m, w, l.v, l.given, e);
    }
    for (int i = 0; !rc && i < p->n; i++)
        if (is_missing(p, i))
            rc = add_made(s, &l, i, e);
    lm_free(w);
    lm_tune_loaded_fini(&l);
    return rc;
}

static lm_code make(set *s, lm_tune_completed *out, lm_err *e)
{
    lm_code rc = add_file(s, e);
    for (size_t k = 0; !rc && k < lm_tune_folder_parts(s->f); k++) {
        const lm_tune_part *p = lm_tune_folder_part(s->f, k);
        if (lacks(p))
            rc = add_part(s, p, e);
    }
    rc = rc ? rc : lm_tune_tensors_bytes(s->t, s->n, &out->bytes, e);
    return rc ? rc : lm_tune_tensors_open(&out->bytes, lm_tune_folder_path(s->f), &out->tensors, e);
}

lm_code lm_tune_complete(const lm_tune_folder *f, lm_model_source *base, lm_tune_completed *out,
                         lm_err *e)
{
    set s = { .f = f, .base = base };
    bool any = false;
    for (size_t k = 0; k < lm_tune_folder_parts(f); k++)
        any = any || lacks(lm_tune_folder_part(f, k));
    lm_code rc = any ? make(&s, out, e) : LM_OK;
    for (size_t k = 0; k < s.n; k++) {
        lm_free((void *)(uintptr_t)s.t[k].name);
        lm_free((void *)(uintptr_t)s.t[k].data);
    }
    lm_free(s.t);
    return rc;
}

void lm_tune_completed_fini(lm_tune_completed *c)
{
    if (c->tensors)
        lm_st_close(c->tensors);
    lm_buf_fini(&c->bytes);
    *c = (lm_tune_completed){ 0 };
}
