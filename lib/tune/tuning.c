/* SPDX-License-Identifier: Apache-2.0 */
/* tuning.c -- an adapter that trains: attached to its base, with the numbers that it starts
 * with. */
#include "tune/tuning.h"

#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "model/arch.h"
#include "tune/ada.h"
#include "tune/folder_impl.h"
#include "tune/svd.h"

/* ---- the configuration and the base ---- */

/* The last part of the name of a module, which begins in it. */
static const char *last_part(const lm_tune_base *m)
{
    const char *dot = strrchr(m->name, '.');
    return dot ? dot + 1 : m->name;
}

/* "all-linear" in some layers as a list of names: PEFT reads layers_to_transform only beside a
 * list. */
static lm_code list_linear(const lm_tune_bases *b, json_t *config, lm_err *e)
{
    const char *all = json_string_value(json_object_get(config, "target_modules"));
    json_t *list, *v;
    if (!all || strcmp(all, "all-linear") != 0 ||
        !json_array_size(json_object_get(config, "layers_to_transform")))
        return LM_OK;
    list = json_array();
    for (size_t i = 0; i < b->n; i++) {
        size_t k;
        bool seen = b->at[i].kind != LM_TUNE_LINEAR_LAYER || b->at[i].head || b->at[i].routed;
        json_array_foreach(list, k, v) seen =
            seen || !strcmp(json_string_value(v), last_part(&b->at[i]));
        if (!seen)
            json_array_append_new(list, json_string(last_part(&b->at[i])));
    }
    return json_object_set_new(config, "target_modules", list)
               ? lm_fail(e, LM_ELIMIT, "adapter_config.json", NULL, "no memory")
               : LM_OK;
}

lm_code lm_tuning_new(json_t *config, const char *where, bool asked, const lm_model_source *base,
                      const lm_config *c, lm_tuning *out, lm_err *e)
{
    const char *type = json_string_value(json_object_get(config, "peft_type"));
    const lm_tune_method *method = type ? lm_tune_method_of(type) : NULL;
    *out = (lm_tuning){ .config = config };
    lm_code rc = lm_tune_bases_read(base, false, &out->bases, e);
    rc = rc ? rc : list_linear(&out->bases, config, e);
    rc = rc ? rc : lm_tune_check_names(&out->bases, method, config, asked, e);
    rc = rc ? rc : lm_tune_config_text(config, &out->text, e);
    rc = rc ? rc : lm_attach_new(&out->bases, c, config, where, &out->attach, e);
    if (rc)
        lm_tuning_fini(out);
    return rc;
}

static lm_code open_parts(lm_bundle *b, const char *path, lm_st **tensors, json_t **config,
                          lm_err *e)
{
    enum { MOST = 16 << 20 };
    lm_buf text = { 0 };
    if (lm_bundle_spool(b, e))
        return e->code;
    if (!lm_bundle_find(b, lm_tune_config_file) || !lm_bundle_find(b, lm_tune_weights_file))
        return lm_tune_no_adapter(b, path, e);
    lm_code rc = lm_bundle_load(b, lm_tune_config_file, MOST, &text, e);
    rc = rc ? rc
            : lm_json_parse(text.data ? text.data : "", text.len, lm_tune_config_file, config, e);
    if (!rc && !json_is_object(*config))
        rc = lm_fail(e, LM_EFORMAT, lm_tune_config_file, NULL, "it is not a JSON object");
    lm_buf_fini(&text);
    if (rc)
        lm_err_in(e, "%s", path);
    return rc ? rc : lm_bundle_st(b, lm_tune_weights_file, tensors, e);
}

lm_code lm_tuning_open(const char *path, const lm_bundle_opts *o, lm_bundle **files,
                       lm_st **tensors, json_t **config, lm_err *e)
{
    *files = NULL;
    *tensors = NULL;
    *config = NULL;
    lm_code rc = lm_bundle_open(path, o, files, e);
    rc = rc ? rc : open_parts(*files, path, tensors, config, e);
    if (!rc)
        return LM_OK;
    json_decref(*config);
    lm_st_close(*tensors);
    lm_bundle_close(*files);
    *config = NULL;
    *tensors = NULL;
    *files = NULL;
    return rc;
}

lm_code lm_tuning_complete(lm_tuning *t, const char *path, const lm_bundle_opts *o,
                           lm_model_source *base, lm_err *e)
{
    if (!lm_attach_method(t->attach) || !lm_tune_folder_is(path, o))
        return LM_OK;
    if (lm_tune_folder_open(path, o, &t->saved, e) || lm_tune_folder_bind(t->saved, &t->bases, e) ||
        lm_tune_complete(t->saved, base, &t->completed, e))
        return e->code;
    if (t->completed.tensors)
        t->first = t->completed.tensors;
    return LM_OK;
}

void lm_tuning_fini(lm_tuning *t)
{
    lm_tune_completed_fini(&t->completed);
    lm_tune_folder_close(t->saved);
    lm_ada_free(t->ada);
    lm_attach_free(t->attach);
    lm_tune_bases_fini(&t->bases);
    lm_buf_fini(&t->text);
    json_decref(t->config);
    *t = (lm_tuning){ 0 };
}

void lm_tuning_build(lm_tuning *t, lm_build *b)
{
    b->adapt = lm_attach_adapt(t->attach);
    b->trainable = lm_attach_trains;
    b->ctx = t->attach;
}

/* ---- the first numbers ---- */

/* What start() needs of one module: W [out,in] in double, and the tensors' numbers. */
typedef struct {
    lm_tuning *t;
    lm_store *s;
    const lm_tune_module *m;
    lm_tune_module biased; /* the same with its bias; m may be it */
    double *bias;
    lm_tune_tensor tensor[LM_TUNE_TENSORS];
    double *v[LM_TUNE_TENSORS];
    int n;
} first;

static int64_t numbers_of(const lm_tune_tensor *t)
{
    int64_t n = 1;
    for (int i = 0; i < t->ndim; i++)
        n *= t->dim[i];
    return n;
}

/* The slice of the model with that name; -1: none. */
static int slice_of(const lm_model *m, const char *name)
{
    for (int i = 0; i < m->n_slices; i++)
        if (!strcmp(lm_arch_rootless(m->slice[i].name), lm_arch_rootless(name)))
            return i;
    return -1;
}

static void turn(const double *in, int64_t rows, int64_t cols, double *out)
{
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++)
            out[j * rows + i] = in[i * cols + j];
}

/* The base's weight of the module, [out,in]. */
static lm_code load_weight(const first *f, double **out, lm_err *e)
{
    const lm_tune_base *b = lm_tune_base_find(&f->t->bases, f->m->name, strlen(f->m->name));
    const lm_st_tensor *st = b ? lm_model_source_find(f->t->base, b->weight) : NULL;
    size_t n = (size_t)(f->m->out * f->m->in);
    double *file = NULL;
    if (!st)
        return lm_fail(e, LM_EBUG, f->m->name, NULL, "the base has no such weight");
    if (lm_alloc_n(out, n, sizeof **out, "a weight", e) ||
        lm_alloc_n(&file, f->m->turned ? n : 1, sizeof *file, "a weight", e) ||
        lm_model_source_load(f->t->base, st, LM_DTYPE_F64, f->m->turned ? file : *out, e)) {
        lm_free(file);
        return e->code;
    }
    if (f->m->turned)
        turn(file, f->m->in, f->m->out, *out);
    lm_free(file);
    return LM_OK;
}

/* The bias of a module whose method reads it. */
static lm_code load_bias(first *f, const lm_tune_method *method, lm_err *e)
{
    const lm_tune_base *b = lm_tune_base_find(&f->t->bases, f->m->name, strlen(f->m->name));
    const lm_st_tensor *st = b && b->bias && (method->is & LM_TUNE_MIXES)
                                 ? lm_model_source_find(f->t->base, b->bias)
                                 : NULL;
    if (!st)
        return LM_OK;
    if (lm_alloc_n(&f->bias, (size_t)st->count, sizeof *f->bias, "a bias", e) ||
        lm_model_source_load(f->t->base, st, LM_DTYPE_F64, f->bias, e))
        return e->code;
    f->biased = *f->m;
    f->biased.bias = f->bias;
    f->m = &f->biased;
    return LM_OK;
}

static lm_code put(const first *f, int slice, const double *v, int64_t n, lm_err *e)
{
    float *low = NULL;
    if (lm_alloc_n(&low, (size_t)n, sizeof *low, "a tensor", e))
        return e->code;
    for (int64_t i = 0; i < n; i++)
        low[i] = (float)v[i];
    lm_code rc = lm_store_put(f->s, slice, LM_DTYPE_F32, low, e);
    lm_free(low);
    return rc;
}

static lm_code put_weight(const first *f, double *w, lm_err *e)
{
    const lm_tune_base *b = lm_tune_base_find(&f->t->bases, f->m->name, strlen(f->m->name));
    size_t n = (size_t)(f->m->out * f->m->in);
    double *file = NULL;
    int slice = slice_of(f->s->model, b->weight);
    if (slice < 0)
        return lm_fail(e, LM_EBUG, b->weight, NULL, "is not a tensor of the model");
    if (!f->m->turned)
        return put(f, slice, w, (int64_t)n, e);
    if (lm_alloc_n(&file, n, sizeof *file, "a weight", e))
        return e->code;
    turn(w, f->m->out, f->m->in, file);
    lm_code rc = put(f, slice, file, (int64_t)n, e);
    lm_free(file);
    return rc;
}

static lm_code put_tensors(const first *f, lm_err *e)
{
    char *name = NULL;
    lm_code rc = LM_OK;
    for (int i = 0; i < f->n && !rc; i++) {
        if (!f->v[i])
            continue;
        rc = lm_tune_tensor_name(f->m, &f->tensor[i], &name, e);
        int slice = rc ? -1 : slice_of(f->s->model, name);
        if (!rc && slice >= 0)
            rc = put(f, slice, f->v[i], numbers_of(&f->tensor[i]), e);
        lm_free(name);
        name = NULL;
    }
    return rc;
}

/* Room for the tensors of a module that start from the base, in double, and its weight. */
static lm_code load_module(first *f, const lm_tune_method *method, double **w, lm_err *e)
{
    lm_code rc = load_bias(f, method, e);
    for (int i = 0; i < f->n && !rc; i++)
        if (!f->tensor[i].off && f->tensor[i].init == LM_TUNE_BASE && f->tensor[i].dim[0] > 0)
            rc = lm_alloc_n(&f->v[i], (size_t)numbers_of(&f->tensor[i]), sizeof *f->v[i],
                            "a tensor", e);
    return rc ? rc : load_weight(f, w, e);
}

static lm_code run_start(first *f, const lm_tune_method *method, double **w, bool *changed,
                         lm_err *e)
{
    lm_code rc = load_module(f, method, w, e);
    return rc ? rc
              : method->start(f->m, *w, changed, f->v,
                              lm_rng_make(f->t->seed, "adapter", (uint64_t)f->m->place), e);
}

static void end_start(first *f, double *w)
{
    for (int i = 0; i < f->n; i++)
        lm_free(f->v[i]);
    lm_free(f->bias);
    lm_free(w);
}

/* Whether tensors of the module start from the base, beside indices, which are known. */
static lm_code from_base(first *f, const lm_tune_method *method, bool *any, lm_err *e)
{
    lm_code rc = method->tensors(f->m, f->tensor, &f->n, e);
    *any = false;
    for (int i = 0; i < f->n && !rc; i++)
        *any =
            *any || (!f->tensor[i].off && f->tensor[i].init == LM_TUNE_BASE && !f->tensor[i].ids);
    return rc;
}

static lm_code start_module(first *f, const lm_tune_method *method, lm_err *e)
{
    double *w = NULL;
    bool changed = false, any;
    lm_code rc = from_base(f, method, &any, e);
    if (rc || !any)
        return rc;
    rc = run_start(f, method, &w, &changed, e);
    rc = rc ? rc : put_tensors(f, e);
    if (!rc && changed)
        rc = put_weight(f, w, e);
    end_start(f, w);
    return rc;
}

/* What lora's `start` takes out of the weights, or rounds. */
bool lm_tuning_keeps_base(const lm_tuning *t)
{
    const char *kind = json_string_value(json_object_get(t->config, "init_lora_weights"));
    return !kind || !strcmp(kind, "gaussian") || !strcmp(kind, "orthogonal");
}

/* Whether singular values of the weights are found: of lora, for some of its kinds. */
static bool divides(const lm_tuning *t, bool *copies)
{
    const lm_tune_method *method = lm_attach_method(t->attach);
    const char *kind = json_string_value(json_object_get(t->config, "init_lora_weights"));
    *copies = kind && !strcmp(kind, "loftq");
    return (method->is & LM_TUNE_DIVIDES) || *copies || (kind && !strncmp(kind, "pissa", 5));
}

/* What load_module takes for tensors. */
static double base_bytes(const first *f)
{
    double sum = 0;
    for (int i = 0; i < f->n; i++)
        if (!f->tensor[i].off && f->tensor[i].init == LM_TUNE_BASE && f->tensor[i].dim[0] > 0)
            sum += (double)numbers_of(&f->tensor[i]) * sizeof **f->v;
    return sum;
}

double lm_tuning_room(const lm_tuning *t, double *keeps)
{
    static const double library = 8.0 * (1 << 20); /* measured, with its buffers */
    const lm_tune_method *method = lm_attach_method(t->attach);
    double most = 0;
    bool copies;
    *keeps = 0;
    if (!method || !method->start || (t->first && (method->is & LM_TUNE_SAVED)))
        return 0;
    bool parts = divides(t, &copies);
    for (size_t i = 0; i < lm_attach_modules(t->attach); i++) {
        first f = { .m = lm_attach_module(t->attach, i) };
        lm_err unseen = { 0 };
        bool any;
        if (from_base(&f, method, &any, &unseen) || !any)
            continue;
        double matrix = (double)f.m->out * (double)f.m->in * sizeof(double);
        double work = parts ? lm_tune_svd_room(f.m->out, f.m->in) : matrix;
        work = matrix * (1 + copies) + work + base_bytes(&f);
        most = work > most ? work : most;
    }
    *keeps = parts ? library : 0;
    return most;
}

/* Numbers of the indices of module i: of those that `derive` makes, or of those that `start`
 * does. */
static lm_code make_ids(first *f, size_t i, bool derived, lm_err *e)
{
    static const bool given[LM_TUNE_TENSORS];
    const lm_tune_method *method = lm_attach_method(f->t->attach);
    double *w = NULL;
    bool changed = false;
    int64_t *out;
    lm_code rc = method->tensors(f->m, f->tensor, &f->n, e);
    rc = rc ? rc : derived ? load_module(f, method, &w, e) : run_start(f, method, &w, &changed, e);
    if (!rc && derived)
        rc = method->derive(f->m, w, f->v, given, e);
    for (int k = 0; !rc && k < f->n; k++) {
        int64_t count = numbers_of(&f->tensor[k]);
        if (f->tensor[k].off || !f->tensor[k].ids || f->tensor[k].absent != derived)
            continue;
        rc = lm_attach_make_ids(f->t->attach, i, k, count, &out, e);
        for (int64_t n = 0; !rc && n < count; n++)
            out[n] = (int64_t)f->v[k][n];
    }
    end_start(f, w);
    return rc;
}

/* True if the method's indices follow from the base, and are in no file. */
static bool derives_ids(const lm_tuning *t, bool *derived, lm_err *e)
{
    first *f = NULL;
    *derived = false;
    if (lm_alloc_n(&f, 1, sizeof *f, "tensors of a module", e))
        return false;
    f->m = lm_attach_module(t->attach, 0);
    bool ok = !lm_attach_method(t->attach)->tensors(f->m, f->tensor, &f->n, e);
    for (int k = 0; ok && k < f->n; k++)
        *derived = *derived || (f->tensor[k].ids && f->tensor[k].absent);
    lm_free(f);
    return ok;
}

lm_code lm_tuning_ids(lm_tuning *t, const lm_st *saved, lm_err *e)
{
    bool derived;
    if (!lm_attach_has_ids(t->attach))
        return LM_OK;
    if (!derives_ids(t, &derived, e))
        return e->code;
    if (saved && !derived)
        return lm_attach_read_ids(t->attach, saved, e);
    if (!lm_attach_method(t->attach)->start)
        return lm_fail(e, LM_EUSAGE, lm_attach_method(t->attach)->name,
                       "begin with a saved adapter, or leave out the key that stores indices",
                       "a new adapter has no indices");
    for (size_t i = 0; i < lm_attach_modules(t->attach); i++) {
        first f = { .t = t, .m = lm_attach_module(t->attach, i) };
        if (make_ids(&f, i, derived, e))
            return e->code;
        lm_mem_trim();
    }
    return LM_OK;
}

/* The number v in `type`, as a base that was loaded in it has it. */
static double rounded(lm_dtype type, double v)
{
    double cell = 0;
    lm_convert(LM_DTYPE_F64, &v, type, &cell, 1);
    lm_convert(type, &cell, LM_DTYPE_F64, &v, 1);
    return v;
}

/* Whether the file's tensor, a weight of the base below an adapter, is that of the base: what is
 * trained is saved without it. */
static lm_code check_below(const lm_tuning *t, const lm_st_tensor *below, lm_err *e)
{
    static const char mark[] = ".base_layer.weight", prefix[] = "base_model.model.";
    size_t len = strlen(below->name), ends = sizeof mark + sizeof prefix - 2;
    bool named = len > ends && !strncmp(below->name, prefix, sizeof prefix - 1);
    const lm_tune_base *b =
        named ? lm_tune_base_find(&t->bases, below->name + sizeof prefix - 1, len - ends) : NULL;
    const lm_st_tensor *own = b ? lm_model_source_find(t->base, b->weight) : NULL;
    double *x = NULL, *y = NULL;
    bool same = own && own->count == below->count;
    lm_code rc = LM_OK;
    if (same) {
        rc = lm_alloc_n(&x, (size_t)own->count, sizeof *x, "a weight", e);
        rc = rc ? rc : lm_alloc_n(&y, (size_t)own->count, sizeof *y, "a weight", e);
        rc = rc ? rc : lm_st_load(t->first, below, LM_DTYPE_F64, x, e);
        rc = rc ? rc : lm_model_source_load(t->base, own, LM_DTYPE_F64, y, e);
    }
    for (int64_t i = 0; !rc && same && i < own->count; i++)
        same = x[i] == y[i] || x[i] == rounded(below->dtype, y[i]);
    lm_free(x);
    lm_free(y);
    if (rc || same)
        return rc;
    return lm_fail(e, LM_EUSAGE, lm_st_path(t->first), "merge it into its base first",
                   "\"%s\" is not the weight of the base", below->name);
}

static lm_code check_all_below(const lm_tuning *t, lm_err *e)
{
    lm_code rc = LM_OK;
    for (size_t i = 0; !rc && i < lm_st_count(t->first); i++) {
        const lm_st_tensor *st = lm_st_at(t->first, i);
        if (lm_text_ends(st->name, ".base_layer.weight"))
            rc = check_below(t, st, e);
    }
    return rc;
}

/* Rows of the embedding begin with those of the base. */
static lm_code start_rows(const lm_tuning *t, lm_store *s, const lm_attach_rows *rows, lm_err *e)
{
    const lm_st_tensor *st = lm_model_source_find(t->base, rows->weight);
    size_t n = json_array_size(rows->list), width = (size_t)rows->width;
    int slice = slice_of(s->model, rows->name);
    float *table = NULL, *v = NULL;
    if (!st || slice < 0)
        return lm_fail(e, LM_EBUG, rows->weight, NULL, "is not in the base, or in the model");
    lm_code rc = lm_alloc_n(&table, (size_t)rows->vocab * width, sizeof *table, "a table", e);
    rc = rc ? rc : lm_alloc_n(&v, n * width, sizeof *v, "rows of a table", e);
    rc = rc ? rc : lm_model_source_load(t->base, st, LM_DTYPE_F32, table, e);
    for (size_t i = 0; !rc && i < n; i++)
        memcpy(v + i * width,
               table + (size_t)json_integer_value(json_array_get(rows->list, i)) * width,
               width * sizeof *v);
    rc = rc ? rc : lm_store_put(s, slice, LM_DTYPE_F32, v, e);
    lm_free(table);
    lm_free(v);
    return rc;
}

lm_code lm_tuning_start(void *ctx, lm_store *s, lm_err *e)
{
    lm_tuning *t = ctx;
    const lm_tune_method *method = lm_attach_method(t->attach);
    lm_mem_trim(); /* of what the building of graphs has released */
    if (lm_store_draw(s, LM_TENSORS_ADAPTER, t->seed, e))
        return e->code;
    lm_attach_rows rows;
    bool any = lm_attach_tokens(t->attach, &rows);
    if (any && start_rows(t, s, &rows, e))
        return e->code;
    /* what cannot begin here has all tensors of the saved adapter */
    bool starts = method && method->start && !(t->first && (method->is & LM_TUNE_SAVED));
    for (size_t i = 0; starts && i < lm_attach_modules(t->attach); i++) {
        if (any && lm_attach_module(t->attach, i)->embedding)
            continue;
        first f = { .t = t, .s = s, .m = lm_attach_module(t->attach, i) };
        if (start_module(&f, method, e))
            return e->code;
        lm_mem_trim();
    }
    if (!t->first || check_all_below(t, e))
        return e->code;
    return lm_store_load_adapter(s, t->first, e);
}

lm_code lm_tuning_fold(void *ctx, lm_store *s, lm_err *e)
{
    return lm_attach_fold(((lm_tuning *)ctx)->attach, s, e);
}

/* ---- beside the optimiser ---- */

void lm_tuning_resume(json_t *config, const lm_st *saved)
{
    lm_ada_resume(config, saved);
}

static lm_code after(void *ctx, lm_store *s, int64_t updates, double *loss, lm_err *e)
{
    return lm_ada_after(((lm_tuning *)ctx)->ada, s, updates, loss, e);
}

lm_code lm_tuning_schedule(lm_tuning *t, lm_session *s, lm_err *e)
{
    if (!t->attach || !lm_ada_is(t->attach))
        return LM_OK;
    if (lm_ada_new(t->attach, t->config, s->o.steps, &t->ada, e))
        return e->code;
    s->o.beside = lm_ada_beside(t->ada);
    s->adapter.form = lm_ada_form(t->ada);
    s->adapter.after = after;
    return LM_OK;
}

/* ---- for people ---- */

static const char *last_name(const char *module)
{
    const char *dot = strrchr(module, '.');
    return dot ? dot + 1 : module;
}

lm_code lm_tuning_line(const lm_tuning *t, lm_buf *out, lm_err *e)
{
    const char *type = json_string_value(json_object_get(t->config, "peft_type"));
    size_t n = lm_attach_modules(t->attach);
    int64_t rows = lm_attach_virtual(t->attach);
    int shown = 0;
    lm_code rc = lm_buf_addf(out, e, "%s", type ? type : "bottleneck adapters");
    if (!rc && rows)
        rc = lm_buf_addf(out, e, " of %lld virtual tokens", (long long)rows);
    if (!rc && n)
        rc = lm_buf_addf(out, e, " on %zu module%s:", n, lm_plural(n));
    for (size_t i = 0; !rc && i < n; i++) {
        const char *name = last_name(lm_attach_module(t->attach, i)->name);
        bool seen = false;
        for (size_t k = 0; k < i && !seen; k++)
            seen = !strcmp(last_name(lm_attach_module(t->attach, k)->name), name);
        if (!seen)
            rc = lm_buf_addf(out, e, "%s %s", shown++ ? "," : "", name);
    }
    return rc;
}
