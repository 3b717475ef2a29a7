/* SPDX-License-Identifier: Apache-2.0 */
/* plan_tensors.c -- the list of the result's tensors: the tensors of the models, with their
 * parameters. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/safetensors_table.h"
#include "merge/plan_impl.h"
#include "merge/plan_names.h"
#include "numeric/format.h"

/* ---- Finding ---- */

const lm_st_tensor *lm_plan_tied_to(const lm_merge_model *m)
{
    bool tied = lm_plan_says_tied(m); /* which reads all names */

    for (size_t i = 0; tied && i < lm_model_source_count(m->source); i++)
        if (lm_name_is_embedding(lm_model_source_at(m->source, i)->name))
            return lm_model_source_at(m->source, i);
    return NULL;
}

/* The tensor of this name; for a tied head, the embedding of the base. */
const lm_st_tensor *lm_plan_find(const lm_merge_model *m, const char *name)
{
    const lm_st_tensor *t = m->lora ? lm_lora_own(m->lora, name) : NULL;

    if (!t)
        t = lm_model_source_find(m->source, name);
    return t || !lm_name_is_head(name) ? t : lm_plan_tied_to(m);
}

lm_code lm_plan_name_in(lm_merge_plan *p, const lm_plan_want *w, int64_t layer, const char **out,
                        lm_err *e)
{
    char *name = NULL;
    lm_code rc;

    *out = w->out;
    if (!w->prefix || layer < 0)
        return LM_OK;
    rc = lm_asprintf(&name, e, "%s%lld%s", w->prefix, (long long)layer, w->suffix);
    if (!rc) {
        char *copy = NULL;

        rc = lm_arena_strdup(p->arena, &copy, name, strlen(name), e);
        *out = copy;
    }
    lm_free(name);
    return rc;
}

lm_code lm_plan_missing(const lm_merge_plan *p, int lacks, int has, const char *name, lm_err *e)
{
    bool expert = strstr(name, ".experts.") != NULL;
    char show[LM_ST_SHOWN];

    /* Experts may be separate, fused, or fused with gate and up interleaved. */
    return lm_fail(
        e, LM_EUSAGE, p->model[lacks].name,
        expert ? "save both with the same version of transformers: their layouts of experts differ"
               : "merge models that have the same tensors",
        "it has no tensor '%s', which %.80s has", lm_st_show(name, show), p->model[has].name);
}

int lm_plan_leader(const lm_merge_plan *p, const lm_merge_slice *s)
{
    const lm_merge_recipe *r = p->recipe;

    return r->module[s->module].sliced || r->base < 0 ? s->source[0].input : r->base;
}

/* The tensor of source s of the slice; *as: its name there. */
static lm_code make_ref(lm_merge_plan *p, const lm_plan_want *w, int input,
                        const lm_merge_source *s, lm_merge_ref *ref, const char **as, lm_err *e)
{
    const lm_merge_model *m = &p->model[input];
    const char *name;
    int64_t layer = w->layer >= 0 && s && s->from >= 0 ? s->from + w->layer : -1;
    lm_code rc = lm_plan_name_in(p, w, layer, &name, e);

    if (rc)
        return rc;
    *as = name;
    ref->input = input;
    ref->tensor = lm_plan_find(m, name);
    for (int i = 0; i < LM_MERGE_PARAMS; i++)
        ref->param[i] = NAN;
    if (!ref->tensor)
        return lm_arch_is_buffer(NULL, name)
                   ? LM_OK
                   : lm_plan_missing(p, input, lm_plan_leader(p, w->slice), name, e);
    if (strcmp(ref->tensor->name, name) != 0) /* its bytes are needed twice */
        rc = lm_model_source_spool(m->source, e);
    if (m->fisher)
        ref->extra = lm_st_find(m->fisher, name);
    if (m->gram)
        ref->extra = lm_st_find(m->gram, name);
    return rc;
}

/* ---- Parameters ---- */

/* Filters match `name`: a model's own name of the tensor for parameters of models, that of the
 * result for the others. */
static double value_of(const lm_merge_plan *p, const lm_plan_want *w, const lm_merge_source *s,
                       const char *name, int i)
{
    const lm_merge_recipe *r = p->recipe;
    const lm_merge_settings *level[] = { s ? &s->set : NULL, &w->slice->set,
                                         &r->module[w->slice->module].set, &r->set };
    double u = w->layer < 0 ? 0 : w->of > 1 ? (double)w->layer / (double)(w->of - 1) : 1;

    for (int k = 0; k < 4; k++) {
        double v =
            level[k] ? lm_merge_value_at(&level[k]->param[i], (lm_merge_param)i, name, u) : NAN;

        if (!isnan(v))
            return v;
    }
    return lm_merge_recipe_default(p->recipe, (lm_merge_param)i);
}

static lm_code set_params(const lm_merge_plan *p, const lm_plan_want *w, const lm_merge_source *s,
                          const char *name, double param[LM_MERGE_PARAMS], lm_err *e)
{
    const lm_merge_method *m = p->recipe->method;

    for (int i = 0; i < LM_MERGE_PARAMS; i++) {
        char show[LM_ST_SHOWN];

        param[i] = NAN;
        if (!(m->takes >> i & 1) || lm_merge_params[i].per_model != (s != NULL))
            continue;
        param[i] = value_of(p, w, s, name, i);
        if (isnan(param[i]) && m->required >> i & 1)
            return lm_fail(e, LM_EUSAGE, s ? p->model[s->input].name : "merge method",
                           "end the list with a value without a filter",
                           "no value of %s for tensor '%s'", lm_merge_params[i].name,
                           lm_st_show(name, show));
    }
    return LM_OK;
}

/* ---- One tensor ---- */

enum { SHOWN = LM_ST_SHAPE + 32 };

static void show_kind(const lm_st_tensor *t, char buf[SHOWN])
{
    char shape[LM_ST_SHAPE];
    snprintf(buf, SHOWN, "%.24s [%s]", t->dtype_name, lm_st_show_shape(t->ndim, t->dim, shape));
}

/* Check for the same shape and kind of numbers; tables may differ in rows if a vocabulary maps
 * them. */
static lm_code check_alike(const lm_merge_plan *p, const lm_merge_ref *a, const lm_merge_ref *b,
                           bool table, lm_err *e)
{
    const lm_st_tensor *x = lm_plan_effective(&p->model[a->input], a->tensor);
    const lm_st_tensor *y = lm_plan_effective(&p->model[b->input], b->tensor);
    bool same = x->ndim == y->ndim, numbers = lm_dtype_is_float(x->dtype);
    char sx[SHOWN], sy[SHOWN], show[LM_ST_SHOWN];

    for (int i = table; same && i < x->ndim; i++)
        same = x->dim[i] == y->dim[i];
    if (same && numbers == lm_dtype_is_float(y->dtype) &&
        (numbers || !strcmp(x->dtype_name, y->dtype_name)))
        return LM_OK;
    show_kind(x, sx);
    show_kind(y, sy);
    return lm_fail(e, LM_EUSAGE, p->model[b->input].name,
                   !same && lm_vocab_is_table(y->name) ? "choose a tokenizer policy" : NULL,
                   "tensor '%s' is %s, but %s in %.80s", lm_st_show(y->name, show), sy, sx,
                   p->model[a->input].name);
}

static lm_code check_extra(const lm_merge_plan *p, const lm_merge_ref *r, const lm_merge_tensor *t,
                           lm_err *e)
{
    const lm_st_tensor *x = r->extra;
    int64_t cols = t->ndim ? t->dim[t->transposed ? 0 : t->ndim - 1] : 1;
    char sx[SHOWN], show[LM_ST_SHOWN];
    bool good;

    if (!x)
        return LM_OK;
    if (p->recipe->method->extra == LM_EXTRA_FISHER)
        good = x->dtype == LM_DTYPE_F32 && (x->count == 1 || x->count == t->count);
    else
        good = (x->dtype == LM_DTYPE_F32 || x->dtype == LM_DTYPE_F64) && x->ndim == 2 &&
               x->dim[0] == cols && x->dim[1] == cols;
    if (good)
        return LM_OK;
    show_kind(x, sx);
    return lm_fail(e, LM_EUSAGE, p->model[r->input].name,
                   p->recipe->method->extra == LM_EXTRA_FISHER
                       ? "give F32, one value or one for each element"
                       : "give F32 or F64, [inputs, inputs]",
                   "side data of '%s' is %s", lm_st_show(t->name, show), sx);
}

/* A tensor has side data of all models or of none; without, it is averaged. */
static lm_code check_extras(const lm_merge_plan *p, const lm_merge_tensor *t, lm_err *e)
{
    const lm_merge_ref *has = NULL, *lacks = NULL;
    char show[LM_ST_SHOWN];
    lm_code rc = LM_OK;

    for (int k = 0; !rc && k < t->n_models; k++) {
        *(t->model[k].extra ? &has : &lacks) = &t->model[k];
        rc = check_extra(p, &t->model[k], t, e);
    }
    if (rc || !has || !lacks)
        return rc;
    return lm_fail(e, LM_EUSAGE, p->model[lacks->input].name,
                   "give it for every model, or for none",
                   "its side data has no tensor '%s', that of %.80s has", lm_st_show(t->name, show),
                   p->model[has->input].name);
}

/* All refs of a tensor: base, then models. */
static lm_code gather(lm_merge_plan *p, const lm_plan_want *w, lm_merge_tensor *t, lm_err *e)
{
    const lm_merge_slice *s = w->slice;
    int base = p->recipe->method->base_allowed ? lm_plan_base_of(p, s) : -1;
    lm_merge_ref *ref = NULL;
    const char *name = NULL;
    lm_code rc = lm_arena_alloc(p->arena, &ref, (size_t)s->n + 1, sizeof *ref, e);
    bool found = false;

    for (int k = 0; !rc && base >= 0 && k < s->n && !found; k++) {
        if ((found = s->source[k].input == base))
            rc = make_ref(p, w, base, &s->source[k], ref, &name, e);
    }
    if (!rc && base >= 0 && !found)
        rc = make_ref(p, w, base, &s->source[0], ref, &name, e);
    if (!rc && base >= 0 && ref->tensor)
        t->base = ref;
    t->model = ref + 1;
    for (int k = 0; !rc && k < s->n; k++) {
        lm_merge_ref *m = &t->model[t->n_models];

        if (s->source[k].input == base)
            continue;
        rc = make_ref(p, w, s->source[k].input, &s->source[k], m, &name, e);
        if (!rc && m->tensor)
            rc = set_params(p, w, &s->source[k], name, m->param, e);
        t->n_models += !rc && m->tensor;
    }
    return rc ? rc : set_params(p, w, NULL, w->out, t->param, e);
}

enum { PIECE = 1 << 20 };

/* True if the bytes of two tensors of the same size are equal. */
static lm_code compare_bytes(lm_merge_plan *p, const lm_merge_ref *a, const lm_merge_ref *b,
                             char *room, bool *same, lm_err *e)
{
    lm_model_source *x = p->model[a->input].source, *y = p->model[b->input].source;
    lm_code rc = lm_model_source_spool(x, e);

    *same = a->tensor == b->tensor;
    if (*same || rc || (rc = lm_model_source_spool(y, e)))
        return rc;
    *same = true;
    for (uint64_t at = 0; !rc && *same && at < a->tensor->bytes; at += PIECE) {
        size_t n = a->tensor->bytes - at < PIECE ? (size_t)(a->tensor->bytes - at) : PIECE;

        rc = lm_model_source_read(x, a->tensor, at, room, n, e);
        if (!rc)
            rc = lm_model_source_read(y, b->tensor, at, room + PIECE, n, e);
        *same = !rc && !memcmp(room, room + PIECE, n);
    }
    return rc;
}

/* Tensors other than floating point are copied, so they must be equal in all models: codes of
 * quantised weights differ. */
static lm_code check_same(lm_merge_plan *p, const lm_merge_tensor *t, const lm_merge_ref *first,
                          lm_err *e)
{
    char *room = NULL, show[LM_ST_SHOWN];
    bool same = true;
    lm_code rc = LM_OK;

    for (int k = 0; !rc && same && k < t->n_models; k++) {
        const lm_merge_ref *other = &t->model[k];

        if (other == first)
            continue;
        if (!room)
            rc = lm_alloc_n(&room, 2 * PIECE, 1, "tensors to compare", e);
        if (!rc)
            rc = compare_bytes(p, first, other, room, &same, e);
        if (!rc && !same)
            rc = lm_fail(e, LM_EUSAGE, p->model[other->input].name,
                         "merge the models before quantising",
                         "tensor '%s' is %s, and not that of %.80s", lm_st_show(t->name, show),
                         other->tensor->dtype_name, p->model[first->input].name);
    }
    lm_free(room);
    return rc;
}

/* Copy a tensor: the base's, otherwise the first model's. */
static void carry(lm_merge_tensor *t, const lm_merge_ref *from)
{
    t->model[0] = *from;
    t->n_models = 1;
    t->base = NULL;
    t->copy = true;
}

void lm_plan_job(const lm_merge_plan *p, const lm_merge_tensor *t, lm_merge_operand *model,
                 lm_merge_operand *base, lm_merge_job *out)
{
    *out = (lm_merge_job){ .name = t->name,
                           .ndim = t->ndim,
                           .dim = t->dim,
                           .count = t->count,
                           .model = model,
                           .n_models = t->n_models,
                           .base = t->base ? base : NULL,
                           .seed = p->recipe->seed,
                           .transposed = t->transposed,
                           .out_dtype = t->dtype };
    memcpy(out->param, t->param, sizeof t->param);
    for (int k = t->base ? -1 : 0; k < t->n_models; k++) {
        const lm_merge_ref *ref = k < 0 ? t->base : &t->model[k];
        lm_merge_operand *o = k < 0 ? base : &model[k];

        memset(o, 0, sizeof *o);
        memcpy(o->param, ref->param, sizeof o->param);
        o->dtype = lm_plan_effective(&p->model[ref->input], ref->tensor)->dtype;
        o->extra_count = ref->extra ? ref->extra->count : 0;
        o->extra_dtype = ref->extra ? ref->extra->dtype : LM_DTYPE_NONE;
    }
}

/* Memory of the tensor beside its operands and the result. */
static uint64_t side_bytes(const lm_merge_plan *p, const lm_merge_tensor *t,
                           const lm_merge_job *job)
{
    const lm_merge_method *m = p->recipe->method;
    uint64_t n = m->extra == LM_EXTRA_GRAM ? m->work(job, p->threads) : 0;

    for (int k = t->base ? -1 : 0; k < t->n_models; k++) {
        const lm_merge_ref *ref = k < 0 ? t->base : &t->model[k];
        const lm_lora *lora = p->model[ref->input].lora;

        n += ref->extra ? ref->extra->bytes : 0;
        n += lora ? lm_lora_bytes(lora, ref->tensor) : 0;
    }
    return n;
}

/* Check that the method can be applied. */
static lm_code check_job(lm_merge_plan *p, const lm_merge_tensor *t, lm_err *e)
{
    lm_merge_operand *model = NULL, base;
    lm_merge_job job;
    lm_code rc = lm_alloc_n(&model, (size_t)t->n_models, sizeof *model, "operands", e);

    if (!rc) {
        lm_plan_job(p, t, model, &base, &job);
        rc = lm_merge_check(p->recipe->method, &job, e);
        if (!rc && side_bytes(p, t, &job) > p->side)
            p->side = side_bytes(p, t, &job);
    }
    lm_free(model);
    return rc;
}

static lm_code finish(lm_merge_plan *p, lm_merge_tensor *t, lm_err *e)
{
    const lm_merge_recipe *r = p->recipe;
    const lm_merge_ref *first = t->base ? t->base : &t->model[0];
    const lm_merge_model *m = &p->model[first->input];
    const lm_st_tensor *x = lm_plan_effective(m, first->tensor);
    lm_dtype want = r->out_dtype != LM_DTYPE_NONE ? r->out_dtype : r->dtype;
    bool passes = !strcmp(r->method->name, "passthrough");
    double scale = t->n_models ? t->model[0].param[LM_MERGE_SCALE] : NAN;
    lm_code rc = LM_OK;

    t->table = p->vocab && !lm_vocab_same(p->vocab) && lm_vocab_is_table(t->name);
    t->ndim = x->ndim;
    memcpy(t->dim, x->dim, sizeof t->dim);
    t->transposed = x->ndim == 2 && lm_arch_turns(lm_plan_arch(m), t->name);
    t->count = x->count;
    for (int k = 0; !rc && k < t->n_models; k++)
        if (&t->model[k] != first)
            rc = check_alike(p, first, &t->model[k], t->table, e);
    if (!rc)
        rc = check_extras(p, t, e);
    if (rc)
        return rc;
    if (t->table && x->ndim) {
        t->dim[0] = lm_vocab_rows(p->vocab);
        t->count = x->dim[0] ? x->count / x->dim[0] : 0;
        if (!lm_mul_i64_ok(t->count, t->dim[0], &t->count))
            return lm_fail(e, LM_ELIMIT, t->name, NULL, "too many elements");
    }
    if (t->copy) { /* a buffer */
        t->dtype = x->dtype;
        t->dtype_name = x->dtype_name;
        t->bytes = x->bytes;
        return LM_OK;
    }
    t->dtype = lm_dtype_is_float(x->dtype) && want != LM_DTYPE_NONE ? want : x->dtype;
    t->dtype_name = lm_dtype_is_float(x->dtype) ? lm_dtype_st_name(t->dtype) : x->dtype_name;
    t->bytes = lm_dtype_is_float(x->dtype) ? lm_plain_bytes(t->dtype, t->count) : x->bytes;
    if (!lm_dtype_is_float(x->dtype)) {
        rc = check_same(p, t, first, e);
        carry(t, first);
    } else if (passes && t->dtype == x->dtype && !t->table && (isnan(scale) || scale == 1) &&
               !(m->lora && lm_lora_effect_on(m->lora, first->tensor) == LM_LORA_ADDED)) {
        carry(t, first);
    }
    return t->copy ? rc : check_job(p, t, e);
}

lm_code lm_plan_add(lm_merge_plan *p, const lm_plan_want *w, size_t *cap, lm_err *e)
{
    lm_merge_tensor *t;
    lm_code rc =
        lm_grow(&p->tensor, cap, (size_t)p->n + 1, sizeof *p->tensor, "plan of tensors", e);

    if (rc)
        return rc;
    t = &p->tensor[p->n];
    memset(t, 0, sizeof *t);
    t->name = w->out;
    rc = gather(p, w, t, e);
    if (!rc && !t->base && !t->n_models)
        return LM_OK; /* a buffer that none has */
    if (!rc && lm_arch_is_buffer(NULL, t->name) && (t->base || t->n_models))
        carry(t, t->base ? t->base : &t->model[0]);
    if (!rc)
        rc = finish(p, t, e);
    if (!rc)
        p->n++;
    return rc;
}
