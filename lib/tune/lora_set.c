/* SPDX-License-Identifier: Apache-2.0 */
/* lora_set.c -- a LoRA adapter in memory, and its folder. */
#include "tune/lora_set.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "tune/svd.h"

enum { USUAL_RANK = 16 };

static lm_code no_memory(lm_err *e)
{
    return lm_fail(e, LM_ELIMIT, "an adapter", NULL, "no memory");
}

lm_code lm_lora_set_new(const lm_tune_lora_opts *o, const char *task, lm_tune_lora_report *report,
                        lm_lora_set *s, lm_err *e)
{
    *s = (lm_lora_set){ .task = task,
                        .o = o,
                        .report = report,
                        .targets = json_array(),
                        .ranks = json_object(),
                        .saved = json_array(),
                        .params = json_array() };
    *report = (lm_tune_lora_report){ 0 };
    return s->targets && s->ranks && s->saved && s->params ? LM_OK : no_memory(e);
}

void lm_lora_set_fini(lm_lora_set *s)
{
    for (size_t i = 0; i < s->n; i++) {
        lm_free((void *)(uintptr_t)s->tensor[i].name);
        lm_free((void *)(uintptr_t)s->tensor[i].data);
    }
    lm_free(s->tensor);
    json_decref(s->targets);
    json_decref(s->ranks);
    json_decref(s->saved);
    json_decref(s->params);
    lm_free(s->level);
    *s = (lm_lora_set){ 0 };
}

lm_code lm_lora_set_tensor(lm_lora_set *s, const char *name, int ndim, const int64_t *dim,
                           const double *v, lm_err *e)
{
    lm_tune_saved t = { .dtype = s->o->type == LM_DTYPE_NONE ? LM_DTYPE_F32 : s->o->type,
                        .ndim = ndim };
    char *full = NULL, *data = NULL;
    int64_t n = 1;
    lm_code rc = lm_asprintf(&full, e, "base_model.model.%s", name);

    for (int i = 0; i < ndim; i++)
        n *= t.dim[i] = dim[i];
    rc = rc ? rc : lm_alloc_n(&data, (size_t)n, lm_dtype_size(t.dtype), "an adapter", e);
    rc = rc ? rc : lm_grow(&s->tensor, &s->cap, s->n + 1, sizeof *s->tensor, "an adapter", e);
    if (rc) {
        lm_free(full);
        lm_free(data);
        return rc;
    }
    lm_convert(LM_DTYPE_F64, v, t.dtype, data, n);
    t.name = full;
    t.data = data;
    s->tensor[s->n++] = t;
    return LM_OK;
}

lm_code lm_lora_set_saved(lm_lora_set *s, const char *module, lm_err *e)
{
    const char *dot = strrchr(module, '.'), *last = dot ? dot + 1 : module;
    const json_t *v;
    size_t i;

    s->report->whole++;
    json_array_foreach(s->saved, i, v)
    {
        if (!strcmp(json_string_value(v), last))
            return LM_OK;
    }
    return json_array_append_new(s->saved, json_string(last)) ? no_memory(e) : LM_OK;
}

lm_code lm_lora_set_note(lm_lora_set *s, const char *module, json_t *list, int64_t rank,
                         double lost, double all, lm_err *e)
{
    lm_tune_lora_report *r = s->report;
    double part = all > 0 ? sqrt(lost / all) : 0;

    if (json_array_append_new(list, json_string(module)) ||
        json_object_set_new(s->ranks, module, json_integer(rank)))
        return no_memory(e);
    r->least = !r->modules || rank < r->least ? rank : r->least;
    r->most = rank > r->most ? rank : r->most;
    r->modules++;
    s->lost += lost;
    s->all += all;
    r->lost = s->all > 0 ? sqrt(s->lost / s->all) : 0;
    if (part > r->worst) {
        r->worst = part;
        snprintf(r->where, sizeof r->where, "%s", module);
    }
    return LM_OK;
}

lm_code lm_lora_set_add(lm_lora_set *s, const lm_tune_module *m, int64_t rank, const double *left,
                        const double *right, double lost, double all, lm_err *e)
{
    char name[600];
    lm_code rc;

    snprintf(name, sizeof name, "%s.%s", m->name,
             m->embedding ? "lora_embedding_A" : "lora_A.weight");
    rc = lm_lora_set_tensor(s, name, 2, (const int64_t[]){ rank, m->in }, right, e);
    snprintf(name, sizeof name, "%s.%s", m->name,
             m->embedding ? "lora_embedding_B" : "lora_B.weight");
    rc = rc ? rc : lm_lora_set_tensor(s, name, 2, (const int64_t[]){ m->out, rank }, left, e);
    return rc ? rc : lm_lora_set_note(s, m->name, s->targets, rank, lost, all, e);
}

lm_code lm_lora_set_split(lm_lora_set *s, const lm_tune_module *m, const double *d, lm_err *e)
{
    int64_t least = m->out < m->in ? m->out : m->in, most = s->o->rank ? s->o->rank : USUAL_RANK;
    double all = 0, kept = 0, *left = NULL, *right = NULL;
    lm_tune_svd svd = { 0 };
    int64_t rank;
    lm_code rc;

    most = most < least ? most : least;
    for (int64_t i = 0; i < m->out * m->in; i++)
        all += d[i] * d[i];
    rc = lm_tune_svd_most(d, m->out, m->in, most, s->o->seed, &svd, e);
    if (rc)
        return rc;
    rank = lm_tune_svd_rank(&svd, most, s->o->share > 0 && s->o->share < 1 ? s->o->share : 1, all);
    for (int64_t i = 0; i < rank; i++)
        kept += svd.value[i] * svd.value[i];
    rc = lm_alloc_n(&left, (size_t)(m->out * rank), sizeof *left, "an adapter", e);
    rc = rc ? rc : lm_alloc_n(&right, (size_t)(m->in * rank), sizeof *right, "an adapter", e);
    if (!rc) {
        lm_tune_svd_factors(&svd, rank, 0.5, left, right);
        rc = lm_lora_set_add(s, m, rank, left, right, all > kept ? all - kept : 0, all, e);
    }
    lm_free(left);
    lm_free(right);
    lm_tune_svd_fini(&svd);
    return rc;
}

static int by_value(const void *x, const void *y)
{
    int64_t a = *(const int64_t *)x, b = *(const int64_t *)y;

    return a < b ? -1 : a > b;
}

/* The rank that most modules have. */
static lm_code usual_rank(const lm_lora_set *s, int64_t *out, lm_err *e)
{
    size_t n = 0, most = 0, same = 0;
    int64_t *rank = NULL;
    const char *key;
    json_t *v;
    lm_code rc = lm_alloc_n(&rank, json_object_size(s->ranks), sizeof *rank, "an adapter", e);

    *out = 1;
    if (rc)
        return rc;
    json_object_foreach(s->ranks, key, v) rank[n++] = json_integer_value(v);
    if (n)
        qsort(rank, n, sizeof *rank, by_value);
    for (size_t i = 0; i < n; i++) {
        same = i && rank[i] == rank[i - 1] ? same + 1 : 1;
        if (same > most) {
            most = same;
            *out = rank[i];
        }
    }
    lm_free(rank);
    return LM_OK;
}

/* Modules whose rank is another one. */
static json_t *other_ranks(const lm_lora_set *s, int64_t usual)
{
    json_t *o = json_object(), *v;
    const char *key;

    json_object_foreach(s->ranks, key, v) if (json_integer_value(v) != usual)
        json_object_set(o, key, v);
    return o;
}

lm_code lm_lora_set_config(const lm_lora_set *s, const char *base, json_t **out, lm_err *e)
{
    int64_t usual;
    json_t *c = *out = NULL;
    lm_code rc = usual_rank(s, &usual, e);

    rc = rc ? rc : lm_tune_config_new(lm_tune_method_of("LORA"), base, s->task, &c, e);

    if (!rc && !s->report->modules)
        rc = lm_fail(e, LM_EUSAGE, "adapter",
                     "give a model or an adapter that differs from the base", "no module changes");
    if (!rc &&
        (json_object_set_new(c, "r", json_integer(usual)) ||
         json_object_set_new(c, "lora_alpha", json_integer(usual)) ||
         json_object_set_new(c, "rank_pattern", other_ranks(s, usual)) ||
         json_object_set_new(c, "alpha_pattern", other_ranks(s, usual)) ||
         json_object_set_new(c, "lora_bias", json_boolean(s->bias)) ||
         json_object_set(c, "target_modules", s->targets) ||
         (json_array_size(s->params) && json_object_set(c, "target_parameters", s->params)) ||
         (json_array_size(s->saved) && json_object_set(c, "modules_to_save", s->saved))))
        rc = no_memory(e);
    if (rc)
        json_decref(c);
    else
        *out = c;
    return rc;
}

lm_code lm_lora_set_write(const lm_lora_set *s, const char *base, lm_bundle_out *out, lm_err *e)
{
    json_t *c = NULL;
    lm_code rc = lm_lora_set_config(s, base, &c, e);

    rc = rc ? rc : lm_tune_folder_write(out, c, s->tensor, s->n, e);
    json_decref(c);
    return rc;
}
