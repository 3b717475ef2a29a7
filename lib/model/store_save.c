/* SPDX-License-Identifier: Apache-2.0 */
/* store_save.c -- writes tensors of a store. */
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "kernels/panels.h"
#include "model/store_impl.h"
#include "numeric/format.h"

/* A matrix in panels, in the shape of files. */
static void unpack(const uint16_t *from, const store_piece *p, uint16_t *to)
{
    for (int64_t r = 0; r < p->rows; r++)
        for (int64_t c = 0; c < p->cols; c++)
            to[p->turned ? c * p->rows + r : r * p->cols + c] = from[lm_panel_at(r, c, p->cols)];
}

/* This rank's rows of a tensor in place, or to *tmp where they are transposed or come from panels, from host memory. */
static lm_code in_file_shape(const lm_store *s, const lm_store_block *k, int i, uint8_t **tmp,
                             size_t *room, const void **data, lm_err *e)
{
    const store_piece all = store_piece_of(s, k, i), p = store_own_rows(&all, store_element(k));
    const bool panels = lm_store_in_panels(s, k, i);
    *data = store_at(k, &p);
    if (!(p.turned || panels) || !p.rows || store_is_none(&p))
        return LM_OK;
    if (lm_grow(tmp, room, store_bytes(k, &p), 1, "a tensor", e))
        return e->code;
    if (panels)
        unpack(*data, &p, (uint16_t *)(void *)*tmp);
    else
        store_turn(NULL, &p, true, *data, store_element(k), *tmp);
    *data = *tmp;
    return LM_OK;
}

int lm_store_tensors(const lm_store *s, const lm_store_block *k)
{
    return k->state ? k->state->n_parts : s->model->n_slices;
}

bool lm_store_has(const lm_store *s, const lm_store_block *k, int i)
{
    if (k->state)
        return true;
    return k->role == LM_KEPT_PARAM || k->role == LM_KEPT_FROZEN
               ? store_own(s, i) == k
               : s->model->param[s->model->slice[i].param].trains;
}

bool lm_store_in_panels(const lm_store *s, const lm_store_block *k, int i)
{
    return k->format->element == LM_DTYPE_BF16 && k->role != LM_KEPT_GRAD &&
           k->role != LM_KEPT_OPT && store_panels(s->model, s->model->slice[i].param);
}

int64_t lm_store_count(const lm_store *s, const lm_store_block *k, int i)
{
    const store_piece p = store_piece_of(s, k, i);
    return store_is_none(&p) ? 0 : p.own.rows * p.cols;
}

lm_code lm_store_get(const lm_store *s, const lm_store_block *k, int i, void *dst, lm_err *e)
{
    const store_piece all = store_piece_of(s, k, i), p = store_own_rows(&all, store_element(k));
    size_t bytes = store_bytes(k, &p);
    lm_backend *b = s->backend;
    const void *from = store_at(k, &p);
    uint8_t *tmp = NULL;
    lm_code rc = LM_OK;
    if (!p.rows || store_is_none(&p))
        return LM_OK;
    if (lm_store_in_panels(s, k, i)) { /* in memory of the host: no device has panels */
        unpack(from, &p, dst);
        return LM_OK;
    }
    if (k->space == LM_SPACE_DEVICE) {
        if (p.turned && lm_alloc_n(&tmp, bytes, 1, "a tensor", e))
            return e->code;
        void *to = tmp ? tmp : dst;
        rc = b->copy(b, to, from, bytes, b->main, e) || b->sync(b, b->main, e) ? e->code : LM_OK;
        from = to;
    }
    if (!rc && p.turned)
        store_turn(NULL, &p, true, from, store_element(k), dst);
    else if (!rc && from != dst)
        memcpy(dst, from, bytes);
    lm_free(tmp);
    return rc;
}

lm_code lm_model_plan(const lm_model *m, lm_tensors which, lm_dtype dtype, lm_st_plan *plan,
                      lm_err *e)
{
    char saved[512];
    for (int i = 0; i < m->n_slices; i++) {
        const lm_slice *s = &m->slice[i];
        const char *name = which == LM_TENSORS_ADAPTER ? lm_model_saved(m, i, saved) : s->name;
        if (lm_slice_is(s, which) && lm_st_plan_add(plan, name, dtype, s->ndim, s->dim, e))
            return e->code;
    }
    for (int i = 0; i < m->n_aside; i++) {
        const lm_model_aside *t = &m->aside[i];
        const bool base = which == LM_TENSORS_ALL || which == LM_TENSORS_BASE;
        if ((t->of_base ? base : which == LM_TENSORS_ADAPTER) &&
            lm_st_plan_add(plan, t->name, t->of_base ? dtype : t->dtype, t->ndim, t->dim, e))
            return e->code;
    }
    return LM_OK;
}

/* A tensor as files have it; *tmp: memory for one that is transposed, reused. */
static lm_code own_in_file_shape(const lm_store *s, int i, uint8_t **tmp, size_t *room,
                                 const void **data, lm_err *e)
{
    const lm_store_block *k = store_own(s, i);
    if (!k || !store_element(k))
        return lm_fail(e, LM_EBUG, s->model->slice[i].name, NULL, "is kept in codes");
    return in_file_shape(s, k, i, tmp, room, data, e);
}

/* The tensor that has this name in a model's file, or in an adapter's; -1: none.  *at: the start of the search, as both
 * lists have mostly one order. */
static int named_slice(const lm_model *m, const char *name, int *at)
{
    char saved[512];
    int named = lm_model_slice(m, name);
    for (int n = 0; named < 0 && n < m->n_slices; n++) {
        int i = (*at + n) % m->n_slices;
        if (lm_slice_is(&m->slice[i], LM_TENSORS_ADAPTER) &&
            !strcmp(name, lm_model_saved(m, i, saved)))
            named = i;
    }
    *at = named + 1;
    return named;
}

/* Whole numbers in the type of the file; tmp as above. */
static lm_code write_aside(const lm_model_aside *t, lm_folder *f, uint8_t **tmp, size_t *room,
                           lm_err *e)
{
    size_t n = (size_t)t->count, bytes = n * lm_dtype_size(t->dtype);
    if (lm_grow(tmp, room, bytes, 1, "a tensor", e))
        return e->code;
    for (size_t k = 0; k < n; k++) {
        int32_t low = (int32_t)t->number[k];
        if (t->dtype == LM_DTYPE_I32)
            memcpy(*tmp + 4 * k, &low, 4);
        else
            memcpy(*tmp + 8 * k, &t->number[k], 8);
    }
    return lm_folder_write(f, *tmp, bytes, e);
}

/* Where the numbers of a part go: the weights of a folder, or another file. */
typedef struct {
    lm_folder *f; /* NULL: w */
    lm_st_writer *w;
    lm_dtype element;
    const uint8_t *data;
} part_writer;

static lm_code put_run(void *ctx, int64_t local, int64_t at, int64_t count, lm_err *e)
{
    const part_writer *o = ctx;
    const void *from = o->data + (size_t)local * lm_dtype_size(o->element);
    return o->f ? lm_folder_write_own(o->f, o->element, from, count, at, e)
                : lm_st_write_own(o->w, o->element, from, count, at, e);
}

/* Own rows, and the whole tensor that they are put in. */
typedef struct {
    const float *from;
    float *to;
} placing;

static lm_code place_run(void *ctx, int64_t local, int64_t at, int64_t count, lm_err *e)
{
    const placing *o = ctx;
    (void)e;
    memcpy(o->to + at, o->from + local, (size_t)count * sizeof *o->to);
    return LM_OK;
}

/* Zeros where others have rows, and sums of whole numbers: each number keeps its bits. */
lm_code lm_store_get_whole(const lm_store *s, const lm_store_block *k, int i, float *dst, lm_err *e)
{
    const size_t count = (size_t)lm_slice_count(&s->model->slice[i]);
    placing o = { .to = dst };
    float *own = NULL;
    if (!s->owners)
        return lm_store_get(s, k, i, dst, e);
    if (lm_alloc_n(&own, count + 1, sizeof *own, "a tensor", e))
        return e->code;
    o.from = own;
    memset(dst, 0, count * sizeof *dst);
    lm_code rc =
        lm_store_get(s, k, i, own, e) || store_each_run(s, k, i, place_run, &o, e) ||
                lm_comm_all_reduce(s->owners, dst, dst, count, LM_DTYPE_I32, LM_COMM_SUM, e)
            ? e->code
            : LM_OK;
    lm_free(own);
    return rc;
}

/* Of a tensor of which ranks have parts: true for the first that has one, where all that do have the same number beside it. */
static bool is_first_part(const lm_slice *t, const lm_mesh *mesh)
{
    return t->rows > 0 && (t->cut.on || mesh->rank[t->cut.axis] == 0);
}

/* Whether this rank writes what it has of a tensor, or of a state of it: of the ranks that have the same, one does.  Those along
 * dp may share it. */
static bool writes(const lm_store *s, const store_piece *p)
{
    const lm_slice *t = &s->model->slice[p->tensor];
    const lm_mesh *mesh = s->model->build.mesh;
    const bool shared = s->own && t->trains; /* with those along dp */
    bool first = true;
    for (int i = 0; mesh && i < LM_INNER_AXES; i++)
        first &= mesh->rank[lm_inner_axes[i]] == 0;
    if (p->owned)
        return !store_is_none(p) && (shared ? t->cut.counts : t->cut.writes);
    if (t->cut.ranks)
        return (shared ? t->cut.counts : t->cut.writes) && (p->cut || is_first_part(t, mesh));
    return shared ? first : t->cut.writes;
}

/* True for a piece of which ranks have parts, each of which it writes, or which only some of them have. */
static bool is_parted(const lm_store *s, const store_piece *p)
{
    const lm_slice *t = &s->model->slice[p->tensor];
    return p->cut || t->cut.ranks || (s->own && t->trains);
}

/* Number i of a block, of which this rank has a part: all of it, or nothing if another rank writes the same. */
static lm_code write_part(const lm_store *s, const lm_store_block *k, int i, part_writer *o,
                          lm_err *e)
{
    const store_piece p = store_piece_of(s, k, i);
    if (writes(s, &p) && store_each_run(s, k, i, put_run, o, e))
        return e->code;
    if (o->f)
        return lm_folder_end_own(o->f, e);
    lm_st_end_own(o->w);
    return LM_OK;
}

/* The numbers of tensor i, of `count` in the file. */
static lm_code write_slice(const lm_store *s, lm_folder *f, int i, int64_t count, uint8_t **tmp,
                           size_t *room, lm_err *e)
{
    const void *data;
    if (own_in_file_shape(s, i, tmp, room, &data, e))
        return e->code;
    const lm_store_block *k = store_own(s, i);
    const store_piece p = store_piece_of(s, k, i);
    part_writer o = { .f = f, .element = k->format->element, .data = data };
    return is_parted(s, &p) ? write_part(s, k, i, &o, e)
                            : lm_folder_write_as(f, o.element, data, count, e);
}

lm_code lm_store_write(const lm_store *s, lm_folder *f, lm_err *e)
{
    uint8_t *tmp = NULL;
    size_t room = 0;
    lm_code rc = LM_OK;
    bool passed;
    int at = 0;
    for (const lm_st_tensor *t; !rc && (t = lm_folder_next(f));) {
        const lm_model_aside *aside = lm_model_aside_find(s->model, t->name);
        int i = aside ? aside->slice : named_slice(s->model, t->name, &at);
        if (!aside && i < 0) {
            rc = lm_fail(e, LM_EBUG, t->name, NULL, "is planned but is not a tensor of the model");
            break;
        }
        if (i < 0 || !(s->model->slice[i].cut.ranks ||
                       (s->own && s->model->slice[i].trains))) { /* dealt to the ranks */
            rc = lm_folder_pass(f, &passed, e);
            if (rc || passed)
                continue;
        }
        rc = i < 0 ? write_aside(aside, f, &tmp, &room, e)
                   : write_slice(s, f, i, t->count, &tmp, &room, e);
    }
    lm_free(tmp);
    return rc;
}

/* ---- states ---- */

typedef lm_code state_work(const lm_store *s, const lm_store_block *k, const char *prefix, int i,
                           void *ctx, lm_err *e);

/* Everything of optimizer.safetensors, in its order. */
static lm_code each_state(const lm_store *s, state_work *work, void *ctx, lm_err *e)
{
    const lm_store_block *k, *own = lm_store_find(s, s->shown ? LM_KEPT_GRAD : LM_KEPT_PARAM, 0),
                             *shown = lm_store_find(s, LM_KEPT_PARAM, 0);
    for (int n = 0; (k = lm_store_find(s, LM_KEPT_OPT, n)); n++)
        for (int i = 0; i < lm_store_tensors(s, k); i++)
            if (work(s, k, k->state->name, i, ctx, e))
                return e->code;
    for (int i = 0; (s->shown || s->twice) && i < s->model->n_slices; i++)
        if (s->model->slice[i].trains && work(s, own, STORE_OWN_NAME, i, ctx, e))
            return e->code;
    for (int i = 0; i < s->model->n_slices; i++)
        if (s->model->slice[i].of_training && work(s, shown, STORE_HEAD_NAME, i, ctx, e))
            return e->code;
    return LM_OK;
}

bool lm_store_has_states(const lm_store *s)
{
    bool any = s->shown || s->twice || lm_store_find(s, LM_KEPT_OPT, 0);
    for (int i = 0; !any && i < s->model->n_slices; i++)
        any = s->model->slice[i].of_training;
    return any;
}

static lm_code plan_state(const lm_store *s, const lm_store_block *k, const char *prefix, int i,
                          void *ctx, lm_err *e)
{
    int64_t dim[LM_MAX_DIMS];
    char name[512];
    const store_piece p = store_piece_of(s, k, i);
    const lm_slice *t = &s->model->slice[p.tensor];
    int ndim = store_file_shape(s, k, i, dim);
    snprintf(name, sizeof name, "%s.%s", prefix, t->name);
    if (t->cut.ranks > 1 && !p.owned && !p.cut && p.rows * p.cols > 1)
        return lm_fail(e, LM_EUSAGE, "optimizer", "choose one like adamw",
                       "\"%.200s\" is not shaped like its tensor, of which ranks have parts", name);
    return lm_st_plan_add(ctx, name, k->format->element, ndim, dim, e);
}

lm_code lm_store_plan_states(const lm_store *s, lm_st_plan *plan, lm_err *e)
{
    return each_state(s, plan_state, plan, e);
}

typedef struct {
    lm_st_writer *w;
    uint8_t *tmp;
    size_t room;
} state_writer;

static lm_code put_state(const lm_store *s, const lm_store_block *k, const char *prefix, int i,
                         void *ctx, lm_err *e)
{
    state_writer *w = ctx;
    const store_piece p = store_piece_of(s, k, i);
    const bool cut = is_parted(s, &p);
    const void *data;
    (void)prefix;
    if (!cut && lm_st_pass(w->w))
        return LM_OK;
    if (in_file_shape(s, k, i, &w->tmp, &w->room, &data, e))
        return e->code;
    part_writer o = { .w = w->w, .element = k->format->element, .data = data };
    return cut ? write_part(s, k, i, &o, e)
               : lm_st_write(w->w, data, (size_t)lm_st_next(w->w)->bytes, e);
}

lm_code lm_store_write_states(const lm_store *s, lm_folder *f, lm_err *e)
{
    lm_st_plan *plan = NULL;
    state_writer w = { 0 };
    lm_code rc = lm_st_plan_new(&plan, e);
    if (!rc)
        rc = lm_store_plan_states(s, plan, e);
    if (!rc)
        rc = lm_folder_st_create(f, "optimizer.safetensors", plan, &w.w, e);
    if (!rc)
        rc = each_state(s, put_state, &w, e);
    if (!rc)
        rc = lm_st_commit(w.w, e);
    else
        lm_st_drop(w.w);
    lm_free(w.tmp);
    lm_st_plan_free(plan);
    return rc;
}
