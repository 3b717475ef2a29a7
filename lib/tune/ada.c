/* SPDX-License-Identifier: Apache-2.0 */
/* ada.c -- see ada.h. */
#include "tune/ada.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "train/adalora.h"
#include "tune/folder_impl.h"
#include "tune/methods.h"

struct lm_ada {
    const lm_attach *attach;
    json_t *config;
    lm_ada_nodes nodes;
    int64_t total, tinit, tfinal, every, target;
    lm_update_beside beside;
    lm_ckpt_form form;
};

/* In the metadata of the tensors of a run: where all ranks are. */
static const char states_key[] = "lmutils.ranks";

bool lm_ada_is(const lm_attach *a)
{
    return lm_attach_method(a) == &lm_tune_adalora;
}

/* The step after which the ranks stay. */
static int64_t last_time(const lm_ada *a)
{
    return a->total - a->tfinal;
}

/* ---- beside the steps ---- */

/* Whether sensitivities change: not at the last distribution and later. */
static void numbers(void *ctx, int64_t t, double *out)
{
    *out = t + 1 < last_time(ctx);
}

static lm_code append_tensor(void *ctx, lm_update *u, const lm_update_tensor *t, lm_err *e)
{
    return lm_ada_append(&((const lm_ada *)ctx)->nodes, u, t, e);
}

/* ---- states in the store ---- */

static const lm_store_block *block_of(const lm_store *s, const char *state)
{
    const lm_store_block *k;
    for (int n = 0; (k = lm_store_find(s, LM_KEPT_OPT, n)); n++)
        if (!strcmp(k->state->name, state))
            return k;
    return NULL;
}

/* The tensor of module i of this kind. */
static int slice_of(const lm_ada *a, const lm_store *s, size_t i, char kind)
{
    char name[LM_TENSOR_NAME + 40];
    snprintf(name, sizeof name, "base_model.model.%s.lora_%c", lm_attach_module(a->attach, i)->name,
             kind);
    return lm_model_slice(s->model, name);
}

static const struct lm_state_part *part_of(const lm_store_block *k, int slice, int *at)
{
    for (int n = 0; k && n < k->state->n_parts; n++)
        if (k->state->part[n].tensor == slice) {
            *at = n;
            return &k->state->part[n];
        }
    return NULL;
}

static lm_code no_state(const char *state, lm_err *e)
{
    return lm_fail(e, LM_EBUG, state, NULL, "is not a state of the update");
}

/* The numbers of a state of module i, one a rank. */
static lm_code read_state(const lm_ada *a, const lm_store *s, const char *state, size_t i,
                          char kind, float *out, lm_err *e)
{
    const lm_store_block *k = block_of(s, state);
    int at;
    return part_of(k, slice_of(a, s, i, kind), &at) ? lm_store_get(s, k, at, out, e)
                                                    : no_state(state, e);
}

static lm_code write_kept(const lm_ada *a, lm_store *s, size_t i, const float *v, int64_t n,
                          lm_err *e)
{
    const lm_store_block *k = block_of(s, lm_ada_kept);
    int at;
    const struct lm_state_part *p = part_of(k, slice_of(a, s, i, 'E'), &at);
    return p ? s->backend->copy(s->backend, (float *)k->data + p->at, v, (size_t)n * sizeof *v,
                                s->backend->main, e)
             : no_state(lm_ada_kept, e);
}

/* ---- the distribution ---- */

static int64_t rank_of(const lm_ada *a, size_t i)
{
    return lm_tune_adalora_rank(lm_attach_module(a->attach, i));
}

static int64_t all_ranks(const lm_ada *a)
{
    int64_t n = 0;
    for (size_t i = 0; i < lm_attach_modules(a->attach); i++)
        n += rank_of(a, i);
    return n;
}

/* Ranks that are left after step `step`. */
static int64_t budget(const lm_ada *a, int64_t step)
{
    int64_t all = all_ranks(a), target = a->target * (int64_t)lm_attach_modules(a->attach);
    double left = 1 - (double)(step - a->tinit) / (double)(last_time(a) - a->tinit);
    return (int64_t)((double)(all - target) * pow(left, 3) + (double)target);
}

static bool is_due(const lm_ada *a, int64_t step)
{
    return step == last_time(a) || (step > a->tinit && step < last_time(a) && step % a->every == 0);
}

/* Importance of all ranks, module by module. */
static lm_code read_importance(const lm_ada *a, const lm_store *s, float *out, lm_err *e)
{
    float *part = NULL;
    lm_code rc = lm_alloc_n(&part, (size_t)all_ranks(a) + 1, sizeof *part, "importance", e);
    for (size_t i = 0; !rc && i < lm_attach_modules(a->attach); i++) {
        int64_t r = rank_of(a, i);
        rc = read_state(a, s, lm_ada_importance, i, 'A', out, e);
        rc = rc ? rc : read_state(a, s, lm_ada_importance, i, 'B', part, e);
        for (int64_t k = 0; !rc && k < r; k++)
            out[k] += part[k];
        rc = rc ? rc : read_state(a, s, lm_ada_importance, i, 'E', part, e);
        for (int64_t k = 0; !rc && k < r; k++)
            out[k] = part[k] + out[k];
        out += r;
    }
    lm_free(part);
    return rc;
}

static int by_size(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Take the ranks of module i whose importance is at most `least`. */
static lm_code take(const lm_ada *a, lm_store *s, size_t i, const float *score, float least,
                    bool for_good, lm_err *e)
{
    int64_t r = rank_of(a, i);
    int slice = slice_of(a, s, i, 'E');
    const lm_store_block *param = lm_store_find(s, LM_KEPT_PARAM, 0);
    float *v = NULL, *mark;
    if (lm_alloc_n(&v, (size_t)(2 * r), sizeof *v, "ranks", e))
        return e->code;
    mark = v + r;
    lm_code rc = lm_store_get(s, param, slice, v, e);
    for (int64_t k = 0; !rc && k < r; k++) {
        bool out = score[k] <= least;
        mark[k] = !out ? LM_ADA_KEPT : for_good ? LM_ADA_TAKEN_FOR_GOOD : LM_ADA_TAKEN;
        v[k] = out ? 0 : v[k];
    }
    rc = rc ? rc : lm_store_put(s, slice, LM_DTYPE_F32, v, e);
    rc = rc ? rc : write_kept(a, s, i, mark, r, e);
    rc = rc ? rc : s->backend->sync(s->backend, s->backend->main, e);
    lm_free(v);
    return rc;
}

static lm_code distribute(const lm_ada *a, lm_store *s, int64_t step, lm_err *e)
{
    int64_t all = all_ranks(a), out = all - budget(a, step), at = 0;
    float *score = NULL, *sorted;
    if (out < 1)
        return LM_OK;
    if (lm_alloc_n(&score, (size_t)(2 * all), sizeof *score, "importance", e))
        return e->code;
    sorted = score + all;
    lm_code rc = read_importance(a, s, score, e);
    if (!rc) {
        memcpy(sorted, score, (size_t)all * sizeof *score);
        qsort(sorted, (size_t)all, sizeof *sorted, by_size);
    }
    for (size_t i = 0; !rc && i < lm_attach_modules(a->attach); i++) {
        rc = take(a, s, i, score + at, sorted[out - 1], step == last_time(a), e);
        at += rank_of(a, i);
    }
    if (!rc)
        lm_store_derive(s);
    lm_free(score);
    return rc;
}

static lm_code add_penalty(const lm_ada *a, const lm_store *s, double *loss, lm_err *e)
{
    double sum = 0;
    float one;
    for (size_t i = 0; i < lm_attach_modules(a->attach); i++)
        for (int k = 0; k < 2; k++) {
            if (read_state(a, s, lm_ada_orthogonality, i, k ? 'B' : 'A', &one, e))
                return e->code;
            sum += (double)one;
        }
    *loss += a->nodes.weight * sum / a->nodes.matrices;
    return LM_OK;
}

lm_code lm_ada_after(lm_ada *a, lm_store *s, int64_t updates, double *loss, lm_err *e)
{
    if (a->nodes.weight > 0 && add_penalty(a, s, loss, e))
        return e->code;
    return !a->nodes.settled && is_due(a, updates) ? distribute(a, s, updates, e) : LM_OK;
}

/* ---- files ---- */

/* Which ranks of module i are left: is[k]; their number.  -1: a failure. */
static int64_t ranks_left(const lm_ada *a, const lm_store *s, size_t i, bool *is, lm_err *e)
{
    int64_t r = rank_of(a, i), n = 0;
    float *mark = NULL;
    if (lm_alloc_n(&mark, (size_t)r, sizeof *mark, "ranks", e) ||
        read_state(a, s, lm_ada_kept, i, 'E', mark, e))
        n = -1;
    for (int64_t k = 0; n >= 0 && k < r; k++) {
        is[k] = mark[k] >= 0;
        n += is[k];
    }
    lm_free(mark);
    return n;
}

/* The number of the module to which a tensor of the adapter belongs; -1: none. */
static int module_of(const lm_ada *a, const char *name)
{
    const size_t front = sizeof "base_model.model." - 1;
    if (!lm_ada_kind(name) || strlen(name) < front + 7)
        return -1;
    for (size_t i = 0; i < lm_attach_modules(a->attach); i++) {
        const char *module = lm_attach_module(a->attach, i)->name;
        size_t n = strlen(name) - front - 7;
        if (strlen(module) == n && !strncmp(name + front, module, n))
            return (int)i;
    }
    return -1;
}

/* Whether ranks were distributed. */
static lm_code has_pattern(const lm_ada *a, const lm_store *s, bool *out, lm_err *e)
{
    float *mark = NULL;
    lm_code rc = lm_alloc_n(&mark, (size_t)all_ranks(a) + 1, sizeof *mark, "ranks", e);
    rc = rc ? rc : read_state(a, s, lm_ada_kept, 0, 'E', mark, e);
    *out = !rc && mark[0] != 0;
    lm_free(mark);
    return rc;
}

static json_t *list_of(const bool *is, int64_t n)
{
    json_t *list = json_array();
    for (int64_t k = 0; k < n; k++)
        json_array_append_new(list, json_boolean(is[k]));
    return list;
}

static lm_code put_pattern(const lm_ada *a, const lm_store *s, json_t *config, lm_err *e)
{
    json_t *all = json_object();
    bool *is = NULL;
    char key[LM_TENSOR_NAME + 16];
    lm_code rc = lm_alloc_n(&is, (size_t)all_ranks(a) + 1, sizeof *is, "ranks", e);
    for (size_t i = 0; !rc && i < lm_attach_modules(a->attach); i++) {
        snprintf(key, sizeof key, "%s.lora_E", lm_attach_module(a->attach, i)->name);
        rc = ranks_left(a, s, i, is, e) < 0 ? e->code : LM_OK;
        if (!rc && json_object_set_new(all, key, list_of(is, rank_of(a, i))))
            rc = lm_fail(e, LM_ELIMIT, lm_tune_config_file, NULL, "no memory");
    }
    if (!rc)
        rc = json_object_set(config, "rank_pattern", all)
                 ? lm_fail(e, LM_ELIMIT, lm_tune_config_file, NULL, "no memory")
                 : LM_OK;
    json_decref(all);
    lm_free(is);
    return rc;
}

static lm_code make_config(void *ctx, const lm_store *s, lm_buf *out, lm_err *e)
{
    const lm_ada *a = ctx;
    json_t *config = json_copy(a->config);
    bool any = false;
    lm_code rc = config ? has_pattern(a, s, &any, e)
                        : lm_fail(e, LM_ELIMIT, lm_tune_config_file, NULL, "no memory");
    if (!rc && any)
        rc = put_pattern(a, s, config, e);
    rc = rc ? rc : lm_tune_config_text(config, out, e);
    json_decref(config);
    return rc;
}

/* Which ranks of the tensor a file has, and their number; all of another tensor's rows: -1.  is:
 * room for all. */
static lm_code left_of(const lm_ada *a, const lm_store *s, const lm_slice *t, bool *is,
                       int64_t *left, lm_err *e)
{
    int module = t->of_adapter ? module_of(a, t->name) : -1;
    *left = module < 0 ? -1 : ranks_left(a, s, (size_t)module, is, e);
    return e->code;
}

static lm_code make_plan(void *ctx, const lm_store *s, lm_st_plan *plan, lm_err *e)
{
    const lm_ada *a = ctx;
    const lm_model *m = s->model;
    char saved[512];
    bool *is = NULL;
    lm_code rc = lm_alloc_n(&is, (size_t)all_ranks(a) + 1, sizeof *is, "ranks", e);
    rc = rc ? rc : lm_st_plan_meta(plan, states_key, "optimizer.safetensors", e);
    for (int i = 0; !rc && i < m->n_slices; i++) {
        const lm_slice *t = &m->slice[i];
        int64_t dim[LM_MAX_DIMS], left;
        if (!lm_slice_is(t, LM_TENSORS_ADAPTER) || (rc = left_of(a, s, t, is, &left, e)) || !left)
            continue; /* a module without ranks has no tensors */
        memcpy(dim, t->dim, sizeof dim);
        if (left > 0)
            dim[lm_ada_kind(t->name) == 'B'] = left;
        rc = lm_st_plan_add(plan, lm_model_saved(m, i, saved), LM_DTYPE_F32, t->ndim, dim, e);
    }
    lm_free(is);
    return rc;
}

/* Numbers [rows,cols], without the columns (or rows) of ranks that are gone, in place; their
 * count. */
static int64_t pick(float *v, int64_t rows, int64_t cols, bool of_columns, const bool *is)
{
    int64_t n = 0;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++)
            if (is[of_columns ? j : i])
                v[n++] = v[i * cols + j];
    return n;
}

static lm_code write_one(const lm_ada *a, const lm_store *s, int i, lm_folder *f, lm_err *e)
{
    const lm_slice *t = &s->model->slice[i];
    const lm_store_block *param = lm_store_find(s, LM_KEPT_PARAM, 0);
    int64_t n = lm_slice_count(t), left;
    bool *is = NULL;
    float *v = NULL;
    lm_code rc = lm_alloc_n(&is, (size_t)all_ranks(a) + 1, sizeof *is, "ranks", e);
    rc = rc ? rc : lm_alloc_n(&v, (size_t)n, sizeof *v, "a tensor", e);
    rc = rc ? rc : left_of(a, s, t, is, &left, e);
    rc = rc ? rc : lm_store_get(s, param, i, v, e);
    if (!rc && left >= 0)
        n = pick(v, t->dim[0], t->dim[1], lm_ada_kind(t->name) == 'B', is);
    rc = rc ? rc : lm_folder_write_as(f, LM_DTYPE_F32, v, n, e);
    lm_free(is);
    lm_free(v);
    return rc;
}

static lm_code write_tensors(void *ctx, const lm_store *s, lm_folder *f, lm_err *e)
{
    const lm_model *m = s->model;
    char saved[512];
    lm_code rc = LM_OK;
    for (const lm_st_tensor *t; !rc && (t = lm_folder_next(f));) {
        int i = 0;
        while (i < m->n_slices && (!lm_slice_is(&m->slice[i], LM_TENSORS_ADAPTER) ||
                                   strcmp(lm_model_saved(m, i, saved), t->name) != 0))
            i++;
        rc = i < m->n_slices ? write_one(ctx, s, i, f, e)
                             : lm_fail(e, LM_EBUG, t->name, NULL, "is not a tensor of the model");
    }
    return rc;
}

/* ---- life ---- */

static double value_of(const json_t *config, const char *key)
{
    const json_t *v = json_object_get(config, key);
    int i = lm_hyper_find(lm_tune_adalora.hyper, key);
    return json_is_number(v) ? json_number_value(v) : lm_tune_adalora.hyper[i].value;
}

static lm_code check(const lm_ada *a, lm_err *e)
{
    if (!a->nodes.settled && a->tinit >= last_time(a))
        return lm_fail(e, LM_EUSAGE, "tinit and tfinal", "make them smaller, or train longer",
                       "%lld and %lld leave none of %lld steps to distribute ranks in",
                       (long long)a->tinit, (long long)a->tfinal, (long long)a->total);
    if (!(a->nodes.beta1 > 0 && a->nodes.beta1 < 1 && a->nodes.beta2 > 0 && a->nodes.beta2 < 1))
        return lm_fail(e, LM_EUSAGE, "beta1 and beta2", "write numbers like 0.85",
                       "%g and %g are not between 0 and 1", a->nodes.beta1, a->nodes.beta2);
    return LM_OK;
}

static bool has_ranks(const json_t *config)
{
    return json_object_size(json_object_get(config, "rank_pattern")) > 0;
}

void lm_ada_resume(json_t *config, const lm_st *saved)
{
    if (lm_st_meta(saved, states_key))
        json_object_del(config, "rank_pattern");
}

lm_code lm_ada_new(const lm_attach *attach, json_t *config, int64_t steps, lm_ada **out, lm_err *e)
{
    const json_t *total = json_object_get(config, "total_step");
    lm_ada *a = NULL;
    *out = NULL;
    if (!json_is_integer(total) && json_object_set_new(config, "total_step", json_integer(steps)))
        return lm_fail(e, LM_ELIMIT, lm_tune_config_file, NULL, "no memory");
    if (lm_alloc_n(&a, 1, sizeof *a, "the schedule of AdaLoRA", e))
        return e->code;
    *a = (lm_ada){
        .attach = attach,
        .config = config,
        .nodes = { .beta1 = value_of(config, "beta1"),
                   .beta2 = value_of(config, "beta2"),
                   .weight = value_of(config, "orth_reg_weight"),
                   .matrices = 2 * (double)lm_attach_modules(attach),
                   .settled = has_ranks(config) },
        .total = json_integer_value(json_object_get(config, "total_step")),
        .tinit = (int64_t)value_of(config, "tinit"),
        .tfinal = (int64_t)value_of(config, "tfinal"),
        .every = (int64_t)value_of(config, "deltaT"),
        .target = (int64_t)value_of(config, "target_r"),
        .beside = { .ctx = a,
                    .n_numbers = 1,
                    .numbers = numbers,
                    .tensor = append_tensor,
                    .twice = !has_ranks(config) },
        .form = { .ctx = a, .config = make_config, .plan = make_plan, .write = write_tensors },
    };
    if (check(a, e)) {
        lm_free(a);
        return e->code;
    }
    *out = a;
    return LM_OK;
}

void lm_ada_free(lm_ada *a)
{
    lm_free(a);
}

const lm_update_beside *lm_ada_beside(const lm_ada *a)
{
    return &a->beside;
}

const lm_ckpt_form *lm_ada_form(const lm_ada *a)
{
    return a->nodes.settled ? NULL : &a->form;
}
