/* SPDX-License-Identifier: Apache-2.0 */
/* safetensors_plan.c -- the contents of a file, before its first byte is written. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/text.h"
#include "format/safetensors_table.h"

struct lm_st_plan {
    lm_st_table table;
};

lm_code lm_st_plan_new(lm_st_plan **out, lm_err *e)
{
    return lm_alloc_n(out, 1, sizeof **out, "plan of a safetensors file", e);
}

void lm_st_plan_free(lm_st_plan *p)
{
    if (!p)
        return;
    lm_st_table_fini(&p->table);
    lm_free(p);
}

lm_code lm_st_plan_add_like(lm_st_plan *p, const lm_st_tensor *t, lm_err *e)
{
    static const char where[] = "safetensors";
    lm_st_tensor x = *t;
    char show[LM_ST_SHOWN];
    size_t len = strlen(t->name);

    if (!len || !strcmp(t->name, "__metadata__") || lm_utf8_valid(t->name, len) != len)
        return lm_fail(e, LM_EUSAGE, where, NULL, "'%s' cannot be the name of a tensor",
                       lm_st_show(t->name, show));
    if (t->ndim < 0 || t->ndim > LM_ST_MAX_DIMS)
        return lm_fail(e, LM_EUSAGE, where, NULL, "tensor '%s' has %d dimension%s, at most %d here",
                       lm_st_show(t->name, show), t->ndim, lm_plural(t->ndim), LM_ST_MAX_DIMS);
    x.offset = p->table.data_bytes;
    lm_code rc = lm_st_table_add(&p->table, &x, where, LM_EUSAGE, e);
    if (rc)
        return rc;
    x.bytes = p->table.tensor[p->table.n - 1].bytes;
    if (p->table.data_bytes > INT64_MAX - x.bytes) {
        return lm_fail(e, LM_EUSAGE, where, NULL, "the tensors have more than 2^63 bytes");
    }
    p->table.data_bytes += x.bytes;
    return LM_OK;
}

lm_code lm_st_plan_add(lm_st_plan *p, const char *name, lm_dtype dtype, int ndim,
                       const int64_t *dim, lm_err *e)
{
    lm_st_tensor t = { .name = name, .ndim = ndim };

    t.dtype_name = dtype == LM_DTYPE_NONE ? "none" : lm_dtype_st_name(dtype);
    for (int i = 0; i < ndim && i < LM_ST_MAX_DIMS; i++)
        t.dim[i] = dim[i];
    return lm_st_plan_add_like(p, &t, e);
}

lm_code lm_st_plan_meta(lm_st_plan *p, const char *key, const char *value, lm_err *e)
{
    char show[LM_ST_SHOWN];

    if (lm_utf8_valid(key, strlen(key)) != strlen(key) ||
        lm_utf8_valid(value, strlen(value)) != strlen(value))
        return lm_fail(e, LM_EUSAGE, "safetensors", NULL, "metadata '%s' is not UTF-8",
                       lm_st_show(key, show));
    return lm_st_table_set_meta(&p->table, key, value, e);
}

static int by_type_then_name(const void *pa, const void *pb)
{
    const lm_st_tensor *a = pa, *b = pb;
    int ra = lm_st_type_rank(a->dtype_name), rb = lm_st_type_rank(b->dtype_name);
    return ra != rb ? (ra > rb ? -1 : 1) : strcmp(a->name, b->name);
}

void lm_st_plan_sort(lm_st_plan *p)
{
    lm_st_table *t = &p->table;
    uint64_t at = 0;

    if (!t->n)
        return;
    qsort(t->tensor, t->n, sizeof *t->tensor, by_type_then_name);
    for (size_t i = 0; i < t->n; i++) {
        t->tensor[i].offset = at;
        at += t->tensor[i].bytes;
    }
    lm_st_table_reindex(t);
}

size_t lm_st_plan_count(const lm_st_plan *p)
{
    return p->table.n;
}

const lm_st_tensor *lm_st_plan_at(const lm_st_plan *p, size_t i)
{
    return &p->table.tensor[i];
}

uint64_t lm_st_plan_data_bytes(const lm_st_plan *p)
{
    return p->table.data_bytes;
}

bool lm_st_plan_meta_at(const lm_st_plan *p, size_t i, const char **key, const char **value)
{
    return lm_st_table_meta_at(&p->table, i, key, value);
}

/* The JSON text alone. */
static lm_code put_json(const lm_st_table *t, lm_buf *out, lm_err *e)
{
    lm_jw w;

    lm_jw_begin(&w, out, 0, e);
    lm_jw_obj(&w, NULL);
    if (t->n_meta) {
        lm_jw_obj(&w, "__metadata__");
        for (size_t i = 0; i < t->n_meta; i++)
            lm_jw_str(&w, t->meta[2 * i], t->meta[2 * i + 1]);
        lm_jw_close_obj(&w);
    }
    for (size_t i = 0; i < t->n; i++) {
        const lm_st_tensor *x = &t->tensor[i];
        lm_jw_obj(&w, x->name);
        lm_jw_str(&w, "dtype", x->dtype_name);
        lm_jw_arr(&w, "shape");
        for (int d = 0; d < x->ndim; d++)
            lm_jw_int(&w, NULL, x->dim[d]);
        lm_jw_close_arr(&w);
        lm_jw_arr(&w, "data_offsets");
        lm_jw_int(&w, NULL, (int64_t)x->offset);
        lm_jw_int(&w, NULL, (int64_t)(x->offset + x->bytes));
        lm_jw_close_arr(&w);
        lm_jw_close_obj(&w);
    }
    lm_jw_close_obj(&w);
    return lm_jw_end(&w);
}

lm_code lm_st_plan_header(const lm_st_plan *p, lm_buf *out, lm_err *e)
{
    lm_buf text = { 0 };
    uint8_t field[8];
    lm_code rc = put_json(&p->table, &text, e);

    while (!rc && text.len && text.data[text.len - 1] == '\n')
        text.len--;
    if (!rc)
        rc = lm_buf_add(&text, "       ", (8 - text.len % 8) % 8, e);
    if (!rc && text.len > LM_ST_MAX_HEADER)
        rc = lm_fail(e, LM_ELIMIT, "safetensors", NULL, "a header of %zu bytes, at most %d allowed",
                     text.len, LM_ST_MAX_HEADER);
    for (int i = 0; i < 8; i++)
        field[i] = (uint8_t)((uint64_t)text.len >> 8 * i);
    if (!rc)
        rc = lm_buf_add(out, field, 8, e);
    if (!rc)
        rc = lm_buf_add(out, text.data, text.len, e);
    lm_buf_fini(&text);
    return rc;
}

lm_code lm_st_plan_file_bytes(const lm_st_plan *p, uint64_t *out, lm_err *e)
{
    lm_buf header = { 0 };
    lm_code rc = lm_st_plan_header(p, &header, e);

    if (!rc && __builtin_add_overflow((uint64_t)header.len, lm_st_plan_data_bytes(p), out))
        rc = lm_fail(e, LM_EUSAGE, "plan of tensors", NULL, "more than 2^64 bytes");
    lm_buf_fini(&header);
    return rc;
}
