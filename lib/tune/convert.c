/* SPDX-License-Identifier: Apache-2.0 */
/* convert.c -- adapters of any method as LoRA. */
#include "tune/convert.h"

#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "model/arch.h"
#include "tune/apply.h"
#include "tune/lora_set.h"

/* Exact factors, if the method has them and they are not of more than the rank; *done otherwise
 * stays false. */
static lm_code add_exact(lm_lora_set *s, const lm_tune_loaded *l, bool *done, lm_err *e)
{
    const lm_tune_method *t = l->method;
    double *left = NULL, *right = NULL;
    int64_t rank = 0;
    lm_code rc = t->low_rank ? t->low_rank(&l->m, l->v, &rank, NULL, NULL, e) : LM_OK;

    if (rc || !rank || rank > (s->o->rank ? s->o->rank : rank) ||
        (s->o->share > 0 && s->o->share < 1))
        return rc;
    rc = lm_alloc_n(&left, (size_t)(l->m.out * rank), sizeof *left, "an adapter", e);
    rc = rc ? rc : lm_alloc_n(&right, (size_t)(l->m.in * rank), sizeof *right, "an adapter", e);
    rc = rc ? rc : t->low_rank(&l->m, l->v, &rank, left, right, e);
    rc = rc ? rc : lm_lora_set_add(s, &l->m, rank, left, right, 0, 1, e);
    *done = !rc;
    lm_free(left);
    lm_free(right);
    return rc;
}

static lm_code convert_part(lm_lora_set *s, const lm_tune_folder *f, const lm_tune_part *p,
                            lm_model_source *base, lm_err *e)
{
    double *w = NULL, *d = NULL, *b = NULL;
    int64_t n = p->module.out * p->module.in;
    bool done = false;
    lm_tune_loaded l;
    lm_code rc = lm_tune_load(f, p, &l, e);

    rc = rc ? rc : add_exact(s, &l, &done, e);
    if (rc || done) {
        lm_tune_loaded_fini(&l);
        return rc;
    }
    rc = lm_tune_base_weight(base, p->base, &w, e);
    if (!rc && p->base->bias && (p->method->is & LM_TUNE_MIXES)) {
        const lm_st_tensor *t = lm_model_source_find(base, p->base->bias);

        rc = lm_alloc_n(&b, (size_t)t->count, sizeof *b, "a bias", e);
        rc = rc ? rc : lm_model_source_load(base, t, LM_DTYPE_F64, b, e);
        l.m.bias = b;
    }
    rc = rc ? rc : lm_alloc_n(&d, (size_t)n, sizeof *d, "an adapter", e);
    rc = rc ? rc : lm_tune_weight(&l, w, d, s->o->par, e);
    for (int64_t i = 0; !rc && i < n; i++)
        d[i] -= w[i];
    rc = rc ? rc : lm_lora_set_split(s, &p->module, d, e);
    lm_free(w);
    lm_free(d);
    lm_free(b);
    lm_tune_loaded_fini(&l);
    return rc;
}

/* True if the base has no head of its own: its embedding is the head. */
static bool is_tied(const lm_model_source *base)
{
    char head[LM_TENSOR_NAME];

    return !lm_model_source_find(base,
                                 lm_arch_head(lm_arch_of(lm_model_source_config(base)), head));
}

/* What LoRA has no form for. */
static lm_code check_method(const lm_tune_folder *f, const lm_model_source *base, lm_err *e)
{
    const lm_tune_method *t = lm_tune_folder_method(f);

    if (!strcmp(t->name, "tokens") && is_tied(base))
        return lm_fail(
            e, LM_EUSAGE, lm_tune_folder_path(f), "merge it into its base",
            "it trains rows of the embedding and of the head that is tied to it, and LoRA "
            "changes one of them");

    if (!t->weight || (t->is & LM_TUNE_VECTORS))
        return lm_fail(e, LM_EUSAGE, lm_tune_folder_path(f), "merge it into its base",
                       "%s changes no matrices, which LoRA would", t->name);
    if (lm_tune_folder_refuse_rows(f, "merge it into its base", e))
        return e->code;
    for (size_t i = 0; t->bias && strcmp(t->peft_type, "LORA") && i < lm_tune_folder_parts(f); i++)
        if (lm_tune_folder_part(f, i)->module.has_bias)
            return lm_fail(e, LM_EUSAGE, lm_tune_folder_path(f), "merge it into its base",
                           "%s changes the bias of '%.100s', for which LoRA has no place", t->name,
                           lm_tune_folder_part(f, i)->module.name);
    return LM_OK;
}

/* modules_to_save as they are. */
static lm_code keep_wholes(lm_lora_set *s, const lm_tune_folder *f, lm_err *e)
{
    lm_code rc = LM_OK;

    for (size_t i = 0; !rc && i < lm_tune_folder_wholes(f); i++) {
        const lm_tune_whole *w = lm_tune_folder_whole(f, i);
        const char *dot = strrchr(w->name, '.');
        double *v = NULL;
        char module[600];

        rc = lm_alloc_n(&v, (size_t)w->file->count, sizeof *v, "an adapter", e);
        rc = rc ? rc : lm_st_load(lm_tune_folder_tensors(f), w->file, LM_DTYPE_F64, v, e);
        rc = rc ? rc : lm_lora_set_tensor(s, w->name, w->file->ndim, w->file->dim, v, e);
        snprintf(module, sizeof module, "%.*s", dot ? (int)(dot - w->name) : 599, w->name);
        rc = rc ? rc : lm_lora_set_saved(s, module, e);
        lm_free(v);
    }
    return rc;
}

static lm_code to_set(const lm_tune_folder *f, lm_model_source *base, lm_lora_set *s, lm_err *e)
{
    lm_code rc = check_method(f, base, e);

    for (size_t i = 0; !rc && i < lm_tune_folder_parts(f); i++)
        rc = convert_part(s, f, lm_tune_folder_part(f, i), base, e);
    rc = rc ? rc : lm_tune_params_convert(f, s, e);
    rc = rc ? rc : lm_lora_set_nest(s, e);
    return rc ? rc : keep_wholes(s, f, e);
}

static const char *base_name(const lm_tune_folder *f, const lm_tune_lora_opts *o)
{
    return o->base ? o->base
                   : json_string_value(
                         json_object_get(lm_tune_folder_config(f), "base_model_name_or_path"));
}

lm_code lm_tune_to_lora(const lm_tune_folder *f, lm_model_source *base, const lm_tune_lora_opts *o,
                        lm_bundle_out *out, lm_tune_lora_report *report, lm_err *e)
{
    lm_lora_set s;
    lm_code rc = lm_lora_set_new(o, lm_tune_folder_task(f), report, &s, e);

    rc = rc ? rc : to_set(f, base, &s, e);
    rc = rc ? rc : lm_lora_set_write(&s, base_name(f, o), out, e);
    lm_lora_set_fini(&s);
    return rc;
}

/* ---- LoRA that stays in memory ---- */

lm_code lm_tune_to_plain(const lm_tune_folder *f, lm_model_source *base, const lm_tune_lora_opts *o,
                         lm_tune_plain *out, lm_tune_lora_report *report, lm_err *e)
{
    lm_lora_set s;
    lm_code rc = lm_lora_set_new(o, lm_tune_folder_task(f), report, &s, e);

    *out = (lm_tune_plain){ 0 };
    rc = rc ? rc : to_set(f, base, &s, e);
    rc = rc ? rc : lm_lora_set_config(&s, base_name(f, o), &out->config, e);
    rc = rc ? rc : lm_tune_tensors_bytes(s.tensor, s.n, &out->file, e);
    lm_lora_set_fini(&s);
    rc = rc ? rc : lm_tune_tensors_open(&out->file, lm_tune_folder_path(f), &out->tensors, e);
    if (rc)
        lm_tune_plain_fini(out);
    return rc;
}

void lm_tune_plain_fini(lm_tune_plain *l)
{
    if (l->tensors)
        lm_st_close(l->tensors);
    json_decref(l->config);
    lm_buf_fini(&l->file);
    *l = (lm_tune_plain){ 0 };
}

/* ---- The difference of two models ---- */

static const lm_st_tensor *of_tuned(lm_model_source *tuned, const lm_st_tensor *t, lm_err *e)
{
    const lm_st_tensor *u = lm_model_source_find(tuned, t->name);
    bool same = u && u->ndim == t->ndim;

    for (int i = 0; same && i < t->ndim; i++)
        same = u->dim[i] == t->dim[i];
    if (!same)
        lm_fail(e, LM_EUSAGE, lm_model_source_path(tuned),
                "give a model that was tuned from the base",
                u ? "'%s' has another shape than in the base" : "it has no tensor '%s'", t->name);
    return same ? u : NULL;
}

/* The numbers of a tensor in the tuned model, and what they are more than in the base; *any:
 * something differs. */
static lm_code difference(lm_model_source *base, lm_model_source *tuned, const char *name,
                          double **now, double **d, bool *any, const lm_st_tensor **shape,
                          lm_err *e)
{
    const lm_st_tensor *t = lm_model_source_find(base, name), *u = of_tuned(tuned, t, e);
    lm_code rc = u ? LM_OK : e->code;

    *any = false;
    *shape = t;
    rc = rc ? rc : lm_alloc_n(now, (size_t)t->count, sizeof **now, "a weight", e);
    rc = rc ? rc : lm_alloc_n(d, (size_t)t->count, sizeof **d, "a weight", e);
    rc = rc ? rc : lm_model_source_load(tuned, u, LM_DTYPE_F64, *now, e);
    rc = rc ? rc : lm_model_source_load(base, t, LM_DTYPE_F64, *d, e);
    for (int64_t i = 0; !rc && i < t->count; i++) {
        (*d)[i] = (*now)[i] - (*d)[i];
        *any = *any || (*d)[i] != 0;
    }
    return rc;
}

/* A tensor that LoRA has no factors for, whole where it differs. */
static lm_code extract_whole(lm_lora_set *s, lm_model_source *base, lm_model_source *tuned,
                             const lm_tune_base *b, const char *tensor, const char *end, lm_err *e)
{
    double *now = NULL, *d = NULL;
    const lm_st_tensor *t = NULL;
    bool any = false;
    char name[600];
    lm_code rc = difference(base, tuned, tensor, &now, &d, &any, &t, e);

    if (!rc && any) {
        snprintf(name, sizeof name, "%s.%s", b->name, end);
        rc = lm_lora_set_tensor(s, name, t->ndim, t->dim, now, e);
        rc = rc ? rc : lm_lora_set_saved(s, b->name, e);
    }
    lm_free(now);
    lm_free(d);
    return rc;
}

static lm_code extract_bias(lm_lora_set *s, lm_model_source *base, lm_model_source *tuned,
                            const lm_tune_base *b, lm_err *e)
{
    double *now = NULL, *d = NULL;
    const lm_st_tensor *t = NULL;
    bool any = false;
    char name[600];
    lm_code rc = difference(base, tuned, b->bias, &now, &d, &any, &t, e);

    if (!rc && any) {
        snprintf(name, sizeof name, "%s.lora_B.bias", b->name);
        rc = lm_lora_set_tensor(s, name, 1, t->dim, d, e);
        s->bias = true;
    }
    lm_free(now);
    lm_free(d);
    return rc;
}

static lm_code extract_linear(lm_lora_set *s, lm_model_source *base, lm_model_source *tuned,
                              const lm_tune_base *b, lm_err *e)
{
    lm_tune_module m = { .name = b->name, .out = b->out, .in = b->in, .turned = b->turned };
    double *now = NULL, *d = NULL;
    const lm_st_tensor *t = NULL;
    bool any = false;
    lm_code rc = difference(base, tuned, b->weight, &now, &d, &any, &t, e);

    if (!rc && any && b->turned)
        for (int64_t i = 0; i < b->in; i++)
            for (int64_t j = 0; j < b->out; j++)
                now[j * b->in + i] = d[i * b->out + j];
    if (!rc && any)
        rc = lm_lora_set_split(s, &m, b->turned ? now : d, e);
    if (!rc && any && b->bias)
        rc = extract_bias(s, base, tuned, b, e);
    else if (!rc && b->bias)
        rc = extract_whole(s, base, tuned, b, b->bias, "bias", e);
    lm_free(now);
    lm_free(d);
    return rc;
}

/* Tensors that no module has: A_log, biases of experts. */
static lm_code check_others(lm_model_source *base, lm_model_source *tuned,
                            const lm_tune_bases *bases, lm_err *e)
{
    json_t *seen = json_object();
    lm_code rc = seen ? LM_OK : lm_fail(e, LM_ELIMIT, "an adapter", NULL, "no memory");

    for (size_t i = 0; !rc && i < bases->n; i++) {
        json_object_set_new(seen, bases->at[i].weight, json_true());
        if (bases->at[i].bias)
            json_object_set_new(seen, bases->at[i].bias, json_true());
    }
    for (size_t i = 0; !rc && i < lm_model_source_count(base); i++) {
        const lm_st_tensor *t = lm_model_source_at(base, i);
        double *now = NULL, *d = NULL;
        bool any = false;

        if (lm_tune_stack_is(t) || !lm_dtype_is_float(t->dtype) || json_object_get(seen, t->name))
            continue;
        rc = difference(base, tuned, t->name, &now, &d, &any, &t, e);
        lm_free(now);
        lm_free(d);
        if (!rc && any)
            rc = lm_fail(e, LM_EUSAGE, lm_model_source_path(tuned), "use the model as it is",
                         "'%.150s' differs from the base, for which a LoRA has no place", t->name);
    }
    json_decref(seen);
    return rc;
}

lm_code lm_tune_extract(lm_model_source *base, lm_model_source *tuned, const lm_tune_bases *bases,
                        const lm_tune_lora_opts *o, lm_bundle_out *out, lm_tune_lora_report *report,
                        lm_err *e)
{
    lm_arena *arena = NULL;
    lm_lora_set s;
    lm_code rc = lm_lora_set_new(o, lm_tune_task(lm_arch_of(bases->config)), report, &s, e);

    rc = rc ? rc : lm_arena_new(&arena, 1 << 16, e);
    rc = rc ? rc : check_others(base, tuned, bases, e);
    for (size_t i = 0; !rc && i < bases->n; i++) {
        const lm_tune_base *b = &bases->at[i];

        if (b->kind == LM_TUNE_LINEAR_LAYER && !b->head) {
            rc = extract_linear(&s, base, tuned, b, e);
            continue;
        }
        rc = extract_whole(&s, base, tuned, b, b->weight, "weight", e);
        if (!rc && b->bias)
            rc = extract_whole(&s, base, tuned, b, b->bias, "bias", e);
    }
    rc = rc ? rc : lm_tune_params_extract(bases, tuned, arena, &s, e);
    rc = rc ? rc : lm_lora_set_nest(&s, e);
    rc = rc ? rc : lm_lora_set_write(&s, o->base ? o->base : lm_model_source_path(base), out, e);
    lm_lora_set_fini(&s);
    lm_arena_free(arena);
    return rc;
}
