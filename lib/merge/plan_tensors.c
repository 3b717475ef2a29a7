/* SPDX-License-Identifier: Apache-2.0 */
/* plan_tensors.c -- the list of the result's tensors: which tensor of which model, with what
 * parameters. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/safetensors_table.h"
#include "merge/plan_impl.h"

/* What is needed for one tensor of the result. */
typedef struct {
    const lm_merge_slice *slice;
    const char *out;    /* its name */
    int64_t layer, of;  /* of the slice, for gradients; layer -1: outside */
    const char *suffix; /* behind the layer's number */
    const char *prefix; /* before it; NULL: outside of the layers, the same name everywhere */
} wanted;

/* ---- Names ---- */

/* The first part of the name that is a number: its place and value; -1: there is none. */
static int64_t layer_of(const char *name, size_t *begin, size_t *end)
{
    for (size_t i = 0; name[i]; i++) {
        size_t n = strspn(name + i, "0123456789");

        if ((!i || name[i - 1] == '.') && n && n < 7 && (name[i + n] == '.' || !name[i + n])) {
            *begin = i;
            *end = i + n;
            return strtoll(name + i, NULL, 10);
        }
    }
    return -1;
}

static bool ends_with(const char *s, const char *end)
{
    size_t n = strlen(s), k = strlen(end);

    return n >= k && !strcmp(s + n - k, end) && (n == k || s[n - k - 1] == '.');
}

/* Buffers that every program computes anew. */
static bool is_buffer(const char *name)
{
    static const char *const known[] = { "rotary_emb.inv_freq", "attn.bias", "attn.masked_bias" };

    for (int i = 0; i < 3; i++)
        if (ends_with(name, known[i]))
            return true;
    return false;
}

static bool is_head(const char *name)
{
    return ends_with(name, "lm_head.weight");
}

static bool is_embedding(const char *name)
{
    return ends_with(name, "embed_tokens.weight") || ends_with(name, "wte.weight");
}

/* Outside of the layers, behind them. */
static bool is_last(const char *name)
{
    return strstr(name, "lm_head") || strstr(name, "norm") || strstr(name, "ln_f") ||
           strstr(name, "score");
}

bool lm_plan_ties(const json_t *c)
{
    const json_t *v = json_object_get(c, "tie_word_embeddings");
    const char *type = json_string_value(json_object_get(c, "model_type"));

    /* absent means true in the configurations of GPT-2, false in those of the others here */
    return v ? json_is_true(v) : type && !strcmp(type, "gpt2");
}

static bool is_tied(const lm_merge_model *m)
{
    return lm_plan_ties(lm_model_source_config(m->source));
}

/* GPT-2's linear layers lie transposed. */
static bool is_conv1d(const lm_merge_model *m, const char *name)
{
    const char *type =
        json_string_value(json_object_get(lm_model_source_config(m->source), "model_type"));

    return type && !strcmp(type, "gpt2") &&
           (ends_with(name, "c_attn.weight") || ends_with(name, "c_proj.weight") ||
            ends_with(name, "c_fc.weight"));
}

/* ---- Finding ---- */

/* The tensor of this name; of a tied head, the embedding. */
static const lm_st_tensor *find(const lm_merge_model *m, const char *name)
{
    const lm_st_tensor *t = lm_model_source_find(m->source, name);

    if (t || !is_head(name) || !is_tied(m))
        return t;
    for (size_t i = 0; i < lm_model_source_count(m->source); i++) {
        t = lm_model_source_at(m->source, i);
        if (is_embedding(t->name))
            return t;
    }
    return NULL;
}

static lm_code name_in(lm_merge_plan *p, const wanted *w, int64_t layer, const char **out,
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

static lm_code missing(const lm_merge_plan *p, int lacks, int has, const char *name, lm_err *e)
{
    char show[LM_ST_SHOWN];

    return lm_fail(e, LM_EUSAGE, p->model[lacks].name, "merge models that have the same tensors",
                   "it has no tensor '%s', which %.80s has", lm_st_show(name, show),
                   p->model[has].name);
}

/* The input whose tensors make the list. */
static int leader(const lm_merge_plan *p, const lm_merge_slice *s)
{
    return p->recipe->sliced ? s->source[0].input : p->lead;
}

/* Where source s of the slice has the tensor; *as: its name there. */
static lm_code make_ref(lm_merge_plan *p, const wanted *w, int input, const lm_merge_source *s,
                        lm_merge_ref *ref, const char **as, lm_err *e)
{
    const lm_merge_model *m = &p->model[input];
    const char *name;
    int64_t layer = w->layer >= 0 && s && s->from >= 0 ? s->from + w->layer : -1;
    lm_code rc = name_in(p, w, layer, &name, e);

    if (rc)
        return rc;
    *as = name;
    ref->input = input;
    ref->tensor = find(m, name);
    for (int i = 0; i < LM_MERGE_PARAMS; i++)
        ref->param[i] = NAN;
    if (!ref->tensor)
        return is_buffer(name) ? LM_OK : missing(p, input, leader(p, w->slice), name, e);
    if (strcmp(ref->tensor->name, name) != 0) /* its bytes are needed twice */
        rc = lm_model_source_spool(m->source, e);
    if (m->fisher)
        ref->extra = lm_st_find(m->fisher, name);
    if (m->gram)
        ref->extra = lm_st_find(m->gram, name);
    return rc;
}

/* ---- Parameters ---- */

/* `name` is what filters look at: a model's own name of the tensor for parameters of models, that of
 * the result for the others. */
static double value_of(const lm_merge_plan *p, const wanted *w, const lm_merge_source *s,
                       const char *name, int i)
{
    const lm_merge_settings *level[3] = { s ? &s->set : NULL, &w->slice->set, &p->recipe->set };
    double u = w->layer < 0 ? 0 : w->of > 1 ? (double)w->layer / (double)(w->of - 1) : 1;

    for (int k = 0; k < 3; k++) {
        double v =
            level[k] ? lm_merge_value_at(&level[k]->param[i], (lm_merge_param)i, name, u) : NAN;

        if (!isnan(v))
            return v;
    }
    return lm_merge_recipe_default(p->recipe, (lm_merge_param)i);
}

static lm_code set_params(const lm_merge_plan *p, const wanted *w, const lm_merge_source *s,
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
            return lm_fail(e, LM_EUSAGE, s ? p->model[s->input].name : "--method",
                           "end the list with a value without a filter",
                           "no value of %s for tensor '%s'", lm_merge_params[i].name,
                           lm_st_show(name, show));
    }
    return LM_OK;
}

/* ---- One tensor ---- */

static void show_shape(const lm_st_tensor *t, char buf[120])
{
    int n = snprintf(buf, 120, "%s [", t->dtype_name);

    for (int i = 0; i < t->ndim && n < 100; i++)
        n += snprintf(buf + n, 120 - (size_t)n, "%s%lld", i ? "," : "", (long long)t->dim[i]);
    snprintf(buf + n, 120 - (size_t)n, "]");
}

/* The same shape and kind of numbers; tables may differ in rows where a vocabulary maps them. */
static lm_code check_alike(const lm_merge_plan *p, const lm_merge_ref *a, const lm_merge_ref *b,
                           bool table, lm_err *e)
{
    const lm_st_tensor *x = lm_plan_effective(&p->model[a->input], a->tensor);
    const lm_st_tensor *y = lm_plan_effective(&p->model[b->input], b->tensor);
    bool same = x->ndim == y->ndim, numbers = lm_dtype_is_float(x->dtype);
    char sx[120], sy[120], show[LM_ST_SHOWN];

    for (int i = table; same && i < x->ndim; i++)
        same = x->dim[i] == y->dim[i];
    if (same && numbers == lm_dtype_is_float(y->dtype) &&
        (numbers || !strcmp(x->dtype_name, y->dtype_name)))
        return LM_OK;
    show_shape(x, sx);
    show_shape(y, sy);
    return lm_fail(e, LM_EUSAGE, p->model[b->input].name,
                   !same && lm_vocab_is_table(y->name)
                       ? "choose what to do about the vocabulary with --tokenizer"
                       : NULL,
                   "tensor '%s' is %s, but %s in %.80s", lm_st_show(y->name, show), sy, sx,
                   p->model[a->input].name);
}

static lm_code check_extra(const lm_merge_plan *p, const lm_merge_ref *r, const lm_merge_tensor *t,
                           lm_err *e)
{
    const lm_st_tensor *x = r->extra;
    int64_t cols = t->ndim ? t->dim[t->transposed ? 0 : t->ndim - 1] : 1;
    char sx[120], show[LM_ST_SHOWN];
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
    show_shape(x, sx);
    return lm_fail(e, LM_EUSAGE, p->model[r->input].name,
                   p->recipe->method->extra == LM_EXTRA_FISHER
                       ? "give F32, one value or one for each element"
                       : "give F32 or F64, [inputs, inputs]",
                   "side data of '%s' is %s", lm_st_show(t->name, show), sx);
}

/* Side data of a tensor is that of all models, or of none: then the tensor is averaged. */
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
static lm_code gather(lm_merge_plan *p, const wanted *w, lm_merge_tensor *t, lm_err *e)
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

/* One tensor carried over: the base's, else the first model's. */
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
    }
}

/* The method can do it. */
static lm_code check_job(const lm_merge_plan *p, const lm_merge_tensor *t, lm_err *e)
{
    lm_merge_operand *model = NULL, base;
    lm_merge_job job;
    lm_code rc = lm_alloc_n(&model, (size_t)t->n_models, sizeof *model, "operands", e);

    if (!rc) {
        lm_plan_job(p, t, model, &base, &job);
        rc = lm_merge_check(p->recipe->method, &job, e);
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
    t->transposed = x->ndim == 2 && is_conv1d(m, t->name);
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
    t->bytes =
        lm_dtype_is_float(x->dtype) ? (uint64_t)t->count * lm_dtype_size(t->dtype) : x->bytes;
    if (!lm_dtype_is_float(x->dtype))
        carry(t, first);
    else if (passes && t->dtype == x->dtype && !t->table && (isnan(scale) || scale == 1) &&
             !(m->lora && lm_lora_effect_on(m->lora, first->tensor) == LM_LORA_ADDED))
        carry(t, first);
    return t->copy ? LM_OK : check_job(p, t, e);
}

static lm_code add(lm_merge_plan *p, const wanted *w, size_t *cap, lm_err *e)
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
    if (!rc && is_buffer(t->name) && (t->base || t->n_models))
        carry(t, t->base ? t->base : &t->model[0]);
    if (!rc)
        rc = finish(p, t, e);
    if (!rc)
        p->n++;
    return rc;
}

/* ---- All tensors ---- */

/* What another model has and the first has not; `layer` -1: whatever its layer. */
static lm_code check_others(const lm_merge_plan *p, int first, int other, int64_t from, int64_t to,
                            int64_t first_from, lm_err *e)
{
    const lm_merge_model *a = &p->model[first], *b = &p->model[other];

    for (size_t i = 0; i < lm_model_source_count(b->source); i++) {
        const char *name = lm_model_source_at(b->source, i)->name;
        size_t begin, end;
        int64_t layer = layer_of(name, &begin, &end);
        char *mine = NULL;
        bool there;
        lm_code rc;

        if (is_buffer(name) || (is_head(name) && is_tied(a))) /* add_head sees to it */
            continue;
        if (layer < 0 || from < 0) {
            there = lm_model_source_find(a->source, name) != NULL; /* an alias is no place for it */
        } else {
            if (layer < from || layer >= to)
                continue;
            rc = lm_asprintf(&mine, e, "%.*s%lld%s", (int)begin, name,
                             (long long)(layer - from + first_from), name + end);
            if (rc)
                return rc;
            there = lm_model_source_find(a->source, mine) != NULL;
            lm_free(mine);
        }
        if (!there)
            return missing(p, first, other, name, e);
    }
    return LM_OK;
}

static lm_code check_slice(const lm_merge_plan *p, const lm_merge_slice *s, lm_err *e)
{
    lm_code rc = LM_OK;

    for (int k = 0; !rc && k < s->n; k++) {
        const lm_merge_model *m = &p->model[s->source[k].input];

        if (s->source[k].to > m->layers && s->source[k].from >= 0)
            rc =
                lm_fail(e, LM_EUSAGE, m->name, NULL, "layers up to %lld are asked for, it has %lld",
                        (long long)s->source[k].to, (long long)m->layers);
        if (!rc && s->source[k].input != s->source[0].input)
            rc = check_others(p, s->source[0].input, s->source[k].input, s->source[k].from,
                              s->source[k].to, s->source[0].from, e);
    }
    return rc;
}

/* Tensors of the model `first` of a slice that are outside of the layers, before or behind them. */
static lm_code outside(lm_merge_plan *p, const lm_merge_slice *s, bool last, size_t *cap, lm_err *e)
{
    const lm_merge_model *m = &p->model[s->source[0].input];
    size_t begin, end;
    lm_code rc = LM_OK;

    for (size_t i = 0; !rc && i < lm_model_source_count(m->source); i++) {
        const char *name = lm_model_source_at(m->source, i)->name;
        wanted w = { .slice = s, .out = name, .layer = -1 };

        if (layer_of(name, &begin, &end) < 0 && is_last(name) == last)
            rc = add(p, &w, cap, e);
    }
    return rc;
}

/* Layer `o` of the slice, number `number` of the result. */
static lm_code layer(lm_merge_plan *p, const lm_merge_slice *s, int64_t o, int64_t number,
                     size_t *cap, lm_err *e)
{
    const lm_merge_model *m = &p->model[s->source[0].input];
    lm_code rc = LM_OK;

    for (size_t i = 0; !rc && i < lm_model_source_count(m->source); i++) {
        const char *name = lm_model_source_at(m->source, i)->name;
        wanted w = { .slice = s, .layer = o, .of = s->source[0].to - s->source[0].from };
        size_t begin, end;
        char *prefix = NULL;

        if (layer_of(name, &begin, &end) != s->source[0].from + o)
            continue;
        rc = lm_arena_strdup(p->arena, &prefix, name, begin, e);
        w.prefix = prefix;
        w.suffix = name + end;
        if (!rc)
            rc = name_in(p, &w, number, &w.out, e);
        if (!rc)
            rc = add(p, &w, cap, e);
    }
    return rc;
}

/* ---- The head ---- */

/* The head that the model stores; NULL: none. */
static const char *head_of(const lm_merge_model *m)
{
    for (size_t i = 0; i < lm_model_source_count(m->source); i++)
        if (is_head(lm_model_source_at(m->source, i)->name))
            return lm_model_source_at(m->source, i)->name;
    return NULL;
}

static bool in_slice(const lm_merge_plan *p, const lm_merge_slice *s, int input)
{
    bool found = p->recipe->method->base_allowed && lm_plan_base_of(p, s) == input;

    for (int k = 0; !found && k < s->n; k++)
        found = s->source[k].input == input;
    return found;
}

/* Slice s makes the head, `first` the embedding.  *name: of a head that a model of s does not tie, or
 * of one that is the embedding of other models than those of the result; NULL: tied, or there is none. */
static void find_head(const lm_merge_plan *p, const lm_merge_slice *first, const lm_merge_slice *s,
                      const char **name)
{
    bool moved = false, tied = false;

    *name = NULL;
    for (int i = 0; i < p->recipe->n_inputs; i++) {
        const lm_merge_model *m = &p->model[i];
        bool here = in_slice(p, s, i);

        moved = moved || here != in_slice(p, first, i);
        tied = tied || (here && is_tied(m));
        if (here && !is_tied(m) && !*name)
            *name = head_of(m);
    }
    if (!*name && moved && tied)
        *name = "lm_head.weight";
}

/* A model that ties its head does not list it: where the result needs it, it comes last. */
static lm_code add_head(lm_merge_plan *p, const lm_merge_slice *s, size_t *cap, lm_err *e)
{
    const lm_merge_model *m = &p->model[leader(p, s)];
    wanted w = { .slice = s, .layer = -1 };

    find_head(p, &p->recipe->slice[0], s, &w.out);
    p->untied = w.out != NULL;
    return w.out && is_tied(m) && !head_of(m) ? add(p, &w, cap, e) : LM_OK;
}

/* ---- All tensors, in order ---- */

static lm_code stacked(lm_merge_plan *p, size_t *cap, lm_err *e)
{
    const lm_merge_recipe *r = p->recipe;
    int64_t number = 0;
    lm_code rc = LM_OK;

    for (int s = 0; !rc && s < r->n_slices; s++)
        rc = check_slice(p, &r->slice[s], e);
    if (!rc)
        rc = outside(p, &r->slice[0], false, cap, e);
    for (int s = 0; !rc && s < r->n_slices; s++)
        for (int64_t o = 0; !rc && o < r->slice[s].source[0].to - r->slice[s].source[0].from; o++)
            rc = layer(p, &r->slice[s], o, number++, cap, e);
    if (!rc)
        rc = outside(p, &r->slice[r->n_slices - 1], true, cap, e);
    return rc ? rc : add_head(p, &r->slice[r->n_slices - 1], cap, e);
}

static lm_code plain(lm_merge_plan *p, size_t *cap, lm_err *e)
{
    const lm_merge_recipe *r = p->recipe;
    const lm_merge_model *lead = &p->model[p->lead];
    int64_t layers = lead->layers;
    size_t begin, end;
    lm_code rc = LM_OK;

    for (int i = 0; !rc && i < r->n_inputs; i++)
        if (i != p->lead && lm_plan_used(p, i))
            rc = check_others(p, p->lead, i, -1, -1, -1, e);
    for (size_t i = 0; !layers && i < lm_model_source_count(lead->source); i++) {
        int64_t l = layer_of(lm_model_source_at(lead->source, i)->name, &begin, &end);

        layers = l >= layers ? l + 1 : layers;
    }
    for (size_t i = 0; !rc && i < lm_model_source_count(lead->source); i++) {
        wanted w = { .slice = &r->slice[0], .of = layers };

        w.out = lm_model_source_at(lead->source, i)->name;
        w.layer = layer_of(w.out, &begin, &end);
        rc = add(p, &w, cap, e);
    }
    return rc ? rc : add_head(p, &r->slice[0], cap, e);
}

/* Every tensor of a file of side data is one of its model: another name would be passed over. */
static lm_code check_names(const lm_merge_model *m, const lm_st *side, lm_err *e)
{
    for (size_t i = 0; side && i < lm_st_count(side); i++) {
        const char *name = lm_st_at(side, i)->name;
        char show[LM_ST_SHOWN];

        if (!find(m, name))
            return lm_fail(e, LM_EUSAGE, lm_st_path(side), "name its tensors as the model does",
                           "%.80s has no tensor '%s'", m->name, lm_st_show(name, show));
    }
    return LM_OK;
}

lm_code lm_plan_tensors(lm_merge_plan *p, lm_err *e)
{
    size_t cap = 0;
    lm_code rc = LM_OK;

    for (int i = 0; !rc && i < p->recipe->n_inputs; i++) {
        rc = check_names(&p->model[i], p->model[i].fisher, e);
        rc = rc ? rc : check_names(&p->model[i], p->model[i].gram, e);
    }
    if (!rc)
        rc = p->recipe->sliced ? stacked(p, &cap, e) : plain(p, &cap, e);

    if (!rc && !p->n)
        rc = lm_fail(e, LM_EUSAGE, p->model[p->lead].name, NULL, "it has no tensors");
    return rc;
}
