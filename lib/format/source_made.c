/* SPDX-License-Identifier: Apache-2.0 */
/* source_made.c -- a model source of parts (source_made.h). */
#include "format/source_made.h"

#include <string.h>

#include "base/mem.h"
#include "format/folder_impl.h"

static lm_code copy_files(lm_model_source *m, const lm_folder_files *small, lm_err *e)
{
    for (size_t i = 0; i < small->n; i++) {
        const struct lm_folder_file *f = &small->v[i];
        if (lm_source_put(m, f->name, f->data.len ? f->data.data : "", f->data.len, e))
            return e->code;
    }
    return LM_OK;
}

/* The names of the plan's tensors in the table of names. */
static lm_code index_plan(lm_model_source *m, lm_err *e)
{
    size_t n = lm_st_plan_count(m->plan);

    m->n_cells = 64;
    while (m->n_cells < 2 * n)
        m->n_cells *= 2;
    if (lm_alloc_n(&m->cell, m->n_cells, sizeof *m->cell, "index of tensor names", e))
        return e->code;
    for (size_t i = 0; i < n; i++)
        *lm_source_cell(m, lm_st_plan_at(m->plan, i)->name) = lm_st_plan_at(m->plan, i);
    return LM_OK;
}

lm_code lm_model_source_make(const lm_source_parts *p, lm_model_source **out, lm_err *e)
{
    lm_model_source *m = NULL;

    *out = NULL;
    if (lm_alloc_n(&m, 1, sizeof *m, "model", e))
        return e->code;
    pthread_rwlock_init(&m->lock, NULL);
    m->plan = p->plan;
    if (lm_strdup(&m->path, p->path, e) || lm_bundle_none(p->path, &m->b, e) ||
        copy_files(m, p->small, e) || index_plan(m, e)) {
        lm_model_source_close(m);
        return e->code;
    }
    m->config = json_incref((json_t *)(uintptr_t)p->config);
    m->by = p->by;
    m->ctx = p->ctx;
    *out = m;
    return LM_OK;
}

lm_code lm_model_source_make_over(lm_model_source **src, const json_t *config,
                                  const lm_st_plan *plan, const lm_source_maker *by, void *ctx,
                                  lm_err *e)
{
    lm_folder_files files = { 0 };
    lm_model_source *made = NULL;
    const lm_source_parts parts = { .path = lm_model_source_path(*src),
                                    .config = config,
                                    .small = &files,
                                    .plan = plan,
                                    .by = by,
                                    .ctx = ctx };
    lm_code rc = lm_source_take_small(*src, &files, e);

    if (!rc)
        rc = lm_model_source_make(&parts, &made, e);
    lm_folder_files_fini(&files);
    if (!rc) {
        made->below = *src;
        *src = made;
    }
    return rc;
}
