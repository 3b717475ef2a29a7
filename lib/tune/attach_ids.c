/* SPDX-License-Identifier: Apache-2.0 */
/* attach_ids.c -- indices of attached adapters: places of weights that train, or of shared
 * numbers. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "tune/attach_impl.h"

static int64_t count_of(const lm_tune_tensor *t)
{
    int64_t n = 1;
    for (int i = 0; i < t->ndim; i++)
        n *= t->dim[i];
    return n;
}

static void name_of(const attach_module *m, const lm_tune_tensor *t, char *out, size_t size)
{
    if (t->shared)
        snprintf(out, size, "base_model.%s", t->suffix);
    else
        snprintf(out, size, "base_model.model.%s.%s", m->module.name, t->suffix);
}

void lm_attach_declare_ids(lm_builder *b, const attach_module *m, const lm_tune_tensor *t, int k)
{
    char name[LM_TENSOR_NAME + LM_TUNE_SUFFIX + 32];
    name_of(m, t, name, sizeof name);
    if (!lm_b_ok(b))
        return;
    if (!m->ids[k])
        lm_fail(lm_b_err(b), LM_EBUG, name, NULL, "its indices are not known");
    else if (!t->absent)
        lm_b_aside(b, t->wide ? LM_DTYPE_I64 : LM_DTYPE_I32, t->ndim, t->dim, m->ids[k], "%s",
                   name);
}

lm_code lm_attach_make_ids(lm_attach *a, size_t i, int k, int64_t count, int64_t **out, lm_err *e)
{
    attach_module *m = &a->module[i];
    lm_free(m->ids[k]);
    m->ids[k] = NULL;
    if (lm_alloc_n(&m->ids[k], (size_t)count, sizeof *m->ids[k], "indices", e))
        return e->code;
    m->module.ids = (const int64_t *const *)m->ids;
    *out = m->ids[k];
    return LM_OK;
}

static lm_code read_one(lm_attach *a, size_t i, const lm_tune_tensor *t, int k, const lm_st *st,
                        lm_err *e)
{
    char name[LM_TENSOR_NAME + LM_TUNE_SUFFIX + 32];
    int64_t *out = NULL;
    name_of(&a->module[i], t, name, sizeof name);
    const lm_st_tensor *found = lm_st_find(st, name);
    if (!found)
        return lm_fail(e, LM_EFORMAT, lm_st_path(st), "copy all files of the adapter",
                       "module '%s' has no %s", a->module[i].module.name, t->suffix);
    if (found->dtype != LM_DTYPE_I32 && found->dtype != LM_DTYPE_I64)
        return lm_fail(e, LM_EFORMAT, lm_st_path(st), NULL, "tensor '%s' is %s, not I32 or I64",
                       name, found->dtype_name);
    if (found->ndim != t->ndim || memcmp(found->dim, t->dim, (size_t)t->ndim * sizeof *t->dim) != 0)
        return lm_fail(e, LM_EUSAGE, lm_st_path(st), "use the model on which it was trained",
                       "'%s' has %" PRId64 " indices in another shape than the base's %" PRId64,
                       name, found->count, count_of(t));
    if (lm_attach_make_ids(a, i, k, found->count, &out, e) ||
        lm_st_read(st, found, 0, out, (size_t)found->bytes, e))
        return e->code;
    /* The numbers of I32 stand in the first half: widened from the end on, no other is
     * overwritten. */
    for (int64_t n = found->dtype == LM_DTYPE_I32 ? found->count : 0; n-- > 0;) {
        int32_t low;
        memcpy(&low, (const char *)out + 4 * n, 4);
        out[n] = low;
    }
    return LM_OK;
}

/* Calls `work`, unless it is NULL, for each tensor of indices; returns their number. */
static lm_code each(lm_attach *a, const lm_st *st, size_t *seen, lm_err *e)
{
    lm_tune_tensor *t = NULL;
    lm_code rc =
        a->method ? lm_alloc_n(&t, LM_TUNE_TENSORS, sizeof *t, "tensors of a module", e) : LM_OK;
    *seen = 0;
    for (size_t i = 0; a->method && !rc && i < a->n_modules; i++) {
        int n = 0;
        rc = a->method->tensors(&a->module[i].module, t, &n, e);
        for (int k = 0; !rc && k < n; k++) {
            if (t[k].off || !t[k].ids)
                continue;
            ++*seen;
            rc = st && !t[k].absent ? read_one(a, i, &t[k], k, st, e) : LM_OK;
        }
    }
    lm_free(t);
    return rc;
}

bool lm_attach_has_ids(const lm_attach *a)
{
    lm_err unseen = { 0 };
    size_t n = 0;
    return !each((lm_attach *)(uintptr_t)a, NULL, &n, &unseen) && n > 0;
}

lm_code lm_attach_read_ids(lm_attach *a, const lm_st *st, lm_err *e)
{
    size_t n;
    return each(a, st, &n, e);
}
