/* SPDX-License-Identifier: Apache-2.0 */
/* store_save.c -- tensors on their way out of a store. */
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "model/store_impl.h"
#include "numeric/format.h"

/* A tensor where it lies, or transposed into *tmp, of host memory. */
static lm_code in_file_shape(const lm_store *s, const lm_store_block *k, int i, uint8_t **tmp,
                             size_t *room, const void **data, lm_err *e)
{
    const lm_slice *t = &s->model->slice[i];
    size_t size = lm_dtype_size(k->format);
    *data = store_at(s, k, t);
    if (!t->transposed)
        return LM_OK;
    if (lm_grow(tmp, room, (size_t)lm_slice_count(t) * size, 1, "a tensor", e))
        return e->code;
    store_transpose(NULL, *data, t->rows, store_width(s->model, t), size, *tmp);
    *data = *tmp;
    return LM_OK;
}

lm_code lm_store_get(const lm_store *s, const lm_store_block *k, int i, void *dst, lm_err *e)
{
    const lm_slice *t = &s->model->slice[i];
    size_t size = lm_dtype_size(k->format), bytes = lm_plain_bytes(k->format, lm_slice_count(t));
    lm_backend *b = s->backend;
    const void *from = store_at(s, k, t);
    uint8_t *tmp = NULL;
    lm_code rc = LM_OK;
    if (k->space == LM_SPACE_DEVICE) {
        if (t->transposed && lm_alloc_n(&tmp, bytes, 1, "a tensor", e))
            return e->code;
        void *to = tmp ? tmp : dst;
        rc = b->copy(b, to, from, bytes, b->main, e) || b->sync(b, b->main, e) ? e->code : LM_OK;
        from = to;
    }
    if (!rc && t->transposed)
        store_transpose(NULL, from, t->rows, store_width(s->model, t), size, dst);
    else if (!rc && from != dst)
        memcpy(dst, from, bytes);
    lm_free(tmp);
    return rc;
}

lm_code lm_model_plan(const lm_model *m, lm_dtype dtype, lm_st_plan *plan, lm_err *e)
{
    for (int i = 0; i < m->n_slices; i++)
        if (lm_st_plan_add(plan, m->slice[i].name, dtype, m->slice[i].ndim, m->slice[i].dim, e))
            return e->code;
    return LM_OK;
}

lm_code lm_store_write(const lm_store *s, lm_folder *f, lm_err *e)
{
    uint8_t *tmp = NULL;
    size_t room = 0;
    lm_code rc = LM_OK;
    for (const lm_st_tensor *t; !rc && (t = lm_folder_next(f));) {
        const void *data;
        int i = lm_model_slice(s->model, t->name);
        if (i < 0) {
            rc = lm_fail(e, LM_EBUG, t->name, NULL, "is planned but no tensor of the model");
            break;
        }
        const lm_store_block *k = store_own(s, &s->model->slice[i]);
        rc = in_file_shape(s, k, i, &tmp, &room, &data, e);
        if (!rc)
            rc = lm_folder_write_as(f, k->format, data, t->count, e);
    }
    lm_free(tmp);
    return rc;
}

static bool has_state(const lm_store *s, int i)
{
    return s->model->param[s->model->slice[i].param].trains;
}

static lm_code plan_states(const lm_store *s, lm_st_plan *plan, lm_err *e)
{
    const lm_model *m = s->model;
    const lm_store_block *k;
    char name[512];
    for (int n = 0; (k = lm_store_find(s, LM_KEPT_OPT, n)); n++)
        for (int i = 0; i < m->n_slices; i++) {
            snprintf(name, sizeof name, "%s.%s", k->state, m->slice[i].name);
            if (has_state(s, i) &&
                lm_st_plan_add(plan, name, k->format, m->slice[i].ndim, m->slice[i].dim, e))
                return e->code;
        }
    return LM_OK;
}

static lm_code put_states(const lm_store *s, lm_st_writer *w, lm_err *e)
{
    const lm_store_block *k;
    uint8_t *tmp = NULL;
    size_t room = 0;
    lm_code rc = LM_OK;
    for (int n = 0; !rc && (k = lm_store_find(s, LM_KEPT_OPT, n)); n++)
        for (int i = 0; !rc && i < s->model->n_slices; i++) {
            const void *data;
            if (!has_state(s, i))
                continue;
            rc = in_file_shape(s, k, i, &tmp, &room, &data, e);
            if (!rc)
                rc = lm_st_write(w, data, (size_t)lm_st_next(w)->bytes, e);
        }
    lm_free(tmp);
    return rc;
}

lm_code lm_store_write_states(const lm_store *s, lm_folder *f, lm_err *e)
{
    lm_st_plan *plan = NULL;
    lm_st_writer *w = NULL;
    lm_code rc = lm_st_plan_new(&plan, e);
    if (!rc)
        rc = plan_states(s, plan, e);
    if (!rc)
        rc = lm_folder_st_create(f, "optimizer.safetensors", plan, &w, e);
    if (!rc)
        rc = put_states(s, w, e);
    if (!rc)
        rc = lm_st_commit(w, e);
    else
        lm_st_drop(w);
    lm_st_plan_free(plan);
    return rc;
}
