/* SPDX-License-Identifier: Apache-2.0 */
/* safetensors_table.c -- the table of tensors behind reader, stream and plan, and the checks that
 * every header passes before one of its numbers is used. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "base/json.h"
#include "base/text.h"
#include "format/safetensors_table.h"
#include "numeric/format.h"

/* The reference library's list (safetensors 0.8, Dtype), in its order: files are sorted by it,
 * descending. */
static const char *const types[] = { "BOOL",        "F4",      "F6_E2M3", "F6_E3M2", "U8",
                                     "I8",          "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ",
                                     "F8_E5M2FNUZ", "I16",     "U16",     "F16",     "BF16",
                                     "I32",         "U32",     "F32",     "C64",     "F64",
                                     "I64",         "U64" };

int lm_st_type_rank(const char *dtype_name)
{
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (!strcmp(types[i], dtype_name))
            return (int)i;
    return -1;
}

const char *lm_st_show(const char *name, char buf[LM_ST_SHOWN])
{
    size_t n = 0;
    for (; n < 80 && name[n]; n++)
        buf[n] = (unsigned char)name[n] < 0x20 || name[n] == 0x7f ? '?' : name[n];
    if (name[n]) { /* do not cut a UTF-8 sequence in two */
        while (n && ((unsigned char)name[n] & 0xc0) == 0x80)
            n--;
        memcpy(buf + n, "...", 3);
        n += 3;
    }
    buf[n] = '\0';
    return buf;
}

const char *lm_st_show_shape(int ndim, const int64_t *dim, char buf[LM_ST_SHAPE])
{
    size_t n = 0;
    buf[0] = '\0';
    for (int i = 0; i < ndim && i < LM_ST_MAX_DIMS; i++)
        n += (size_t)snprintf(buf + n, LM_ST_SHAPE - n, i ? ",%" PRId64 : "%" PRId64, dim[i]);
    return buf;
}

void lm_st_table_fini(lm_st_table *t)
{
    lm_arena_free(t->arena);
    lm_free(t->tensor);
    lm_free(t->meta);
    lm_free(t->cell);
    *t = (lm_st_table){ 0 };
}

/* The cell that holds `name`, or the free cell for it.  The table must not be empty. */
static size_t cell_of(const lm_st_table *t, const char *name)
{
    size_t mask = t->n_cells - 1, i = lm_hash_str(name) & mask;
    while (t->cell[i] && strcmp(t->tensor[t->cell[i] - 1].name, name))
        i = (i + 1) & mask;
    return i;
}

const lm_st_tensor *lm_st_table_find(const lm_st_table *t, const char *name)
{
    if (!t->n_cells)
        return NULL;
    uint32_t at = t->cell[cell_of(t, name)];
    return at ? &t->tensor[at - 1] : NULL;
}

void lm_st_table_reindex(lm_st_table *t)
{
    if (t->n_cells)
        memset(t->cell, 0, t->n_cells * sizeof *t->cell);
    for (size_t i = 0; i < t->n; i++)
        t->cell[cell_of(t, t->tensor[i].name)] = (uint32_t)(i + 1);
}

static lm_code index_names(lm_st_table *t, size_t n_cells, lm_err *e)
{
    uint32_t *fresh = NULL;
    lm_code rc = lm_alloc_n(&fresh, n_cells, sizeof *fresh, "index of tensor names", e);
    if (rc)
        return rc;
    lm_free(t->cell);
    t->cell = fresh;
    t->n_cells = n_cells;
    lm_st_table_reindex(t);
    return LM_OK;
}

static lm_code own_arena(lm_st_table *t, lm_err *e)
{
    return t->arena ? LM_OK : lm_arena_new(&t->arena, 16384, e);
}

const char *lm_st_table_meta(const lm_st_table *t, const char *key)
{
    for (size_t i = 0; i < t->n_meta; i++)
        if (!strcmp(t->meta[2 * i], key))
            return t->meta[2 * i + 1];
    return NULL;
}

bool lm_st_table_meta_at(const lm_st_table *t, size_t i, const char **key, const char **value)
{
    if (i >= t->n_meta)
        return false;
    *key = t->meta[2 * i];
    *value = t->meta[2 * i + 1];
    return true;
}

static lm_code append_meta(lm_st_table *t, const char *key, const char *value, lm_err *e)
{
    char *k, *v;
    lm_code rc = own_arena(t, e);
    if (!rc)
        rc = lm_grow(&t->meta, &t->meta_cap, 2 * t->n_meta + 2, sizeof *t->meta, "metadata", e);
    if (!rc)
        rc = lm_arena_strdup(t->arena, &k, key, strlen(key), e);
    if (!rc)
        rc = lm_arena_strdup(t->arena, &v, value, strlen(value), e);
    if (rc)
        return rc;
    t->meta[2 * t->n_meta] = k;
    t->meta[2 * t->n_meta + 1] = v;
    t->n_meta++;
    return LM_OK;
}

lm_code lm_st_table_set_meta(lm_st_table *t, const char *key, const char *value, lm_err *e)
{
    for (size_t i = 0; i < t->n_meta; i++)
        if (!strcmp(t->meta[2 * i], key)) {
            char *v;
            lm_code rc = lm_arena_strdup(t->arena, &v, value, strlen(value), e);
            if (!rc)
                t->meta[2 * i + 1] = v;
            return rc;
        }
    return append_meta(t, key, value, e);
}

/* The format that corresponds to a type of the list. */
static const lm_format *format_of(const char *type)
{
    const lm_format *f = lm_format_of_dtype(lm_dtype_parse(type));

    if (!f)
        lm_format_find(type, NULL, &f, NULL);
    return f;
}

/* Fill dtype, count and bytes from dtype_name and dim. */
static lm_code measure(lm_st_tensor *t, const char *where, lm_code code, lm_err *e)
{
    char show[LM_ST_SHOWN], show2[LM_ST_SHOWN];
    int type = lm_st_type_rank(t->dtype_name);
    lm_tensor_size size;

    if (type < 0)
        return lm_fail(e, code, where, NULL, "tensor '%s' has the unknown dtype '%s'",
                       lm_st_show(t->name, show), lm_st_show(t->dtype_name, show2));
    const lm_format *f = format_of(types[type]);
    t->dtype = f->element;
    t->dtype_name = types[type];
    t->count = 1;
    for (int i = 0; i < t->ndim; i++) {
        if (t->dim[i] < 0)
            return lm_fail(e, code, where, NULL, "tensor '%s': dimension %d is %" PRId64,
                           lm_st_show(t->name, show), i, t->dim[i]);
        if (!lm_mul_i64_ok(t->count, t->dim[i], &t->count))
            return lm_fail(e, code, where, NULL,
                           "tensor '%s': its shape has more than 2^63 elements",
                           lm_st_show(t->name, show));
    }
    if (lm_tensor_bytes(f, 1, &t->count, &size, NULL) || size.all > INT64_MAX / 8)
        return lm_fail(e, code, where, NULL, "tensor '%s': its shape has more than 2^63 bits",
                       lm_st_show(t->name, show));
    if (t->count % 8 * f->plane[0].bits % 8)
        return lm_fail(e, code, where, NULL,
                       "tensor '%s': %" PRId64 " elements of %s do not fill whole bytes",
                       lm_st_show(t->name, show), t->count, t->dtype_name);
    t->bytes = size.all;
    return LM_OK;
}

lm_code lm_st_table_add(lm_st_table *t, const lm_st_tensor *given, const char *where, lm_code code,
                        lm_err *e)
{
    lm_st_tensor x = *given;
    char show[LM_ST_SHOWN], *name;
    lm_code rc = measure(&x, where, code, e);

    if (rc)
        return rc;
    if (t->n >= UINT32_MAX / 4)
        return lm_fail(e, LM_ELIMIT, where, NULL, "more than %zu tensors", t->n);
    if (2 * (t->n + 1) > t->n_cells && (rc = index_names(t, t->n_cells ? 2 * t->n_cells : 64, e)))
        return rc;
    size_t at = cell_of(t, x.name);
    if (t->cell[at])
        return lm_fail(e, code, where, NULL, "the name '%s' is used twice",
                       lm_st_show(x.name, show));
    rc = own_arena(t, e);
    if (!rc)
        rc = lm_grow(&t->tensor, &t->cap, t->n + 1, sizeof *t->tensor, "table of tensors", e);
    if (!rc)
        rc = lm_arena_strdup(t->arena, &name, x.name, strlen(x.name), e);
    if (rc)
        return rc;
    x.name = name;
    t->tensor[t->n++] = x;
    t->cell[at] = (uint32_t)t->n;
    return LM_OK;
}

/* ---- From JSON ---- */

lm_code lm_st_header_length(const uint8_t field[8], const char *where, uint64_t *out, lm_err *e)
{
    uint64_t n = 0;
    for (int i = 7; i >= 0; i--)
        n = n << 8 | field[i];
    if (n > LM_ST_MAX_HEADER)
        return lm_fail(e, LM_EFORMAT, where, "check that it is a safetensors file",
                       "its first 8 bytes announce a header of %" PRIu64
                       " bytes, more than the limit of %d",
                       n, LM_ST_MAX_HEADER);
    if (n < 2)
        return lm_fail(e, LM_EFORMAT, where, "check that it is a safetensors file",
                       "its first 8 bytes announce a header of %" PRIu64 " bytes, too short", n);
    *out = n;
    return LM_OK;
}

/* A string without U+0000, which would end it in C; otherwise NULL. */
static const char *plain_string(const json_t *v)
{
    const char *s = json_string_value(v);
    return s && strlen(s) == json_string_length(v) ? s : NULL;
}

static lm_code read_meta(lm_st_table *t, const json_t *obj, const char *where, lm_err *e)
{
    const char *key;
    json_t *value;

    if (!json_is_object(obj))
        return lm_fail(e, LM_EFORMAT, where, NULL, "__metadata__ is not an object");
    json_object_foreach((json_t *)(uintptr_t)obj, key, value)
    {
        char show[LM_ST_SHOWN];
        const char *text = plain_string(value);
        if (!text)
            return lm_fail(e, LM_EFORMAT, where, NULL, "__metadata__ key '%s' is not a string",
                           lm_st_show(key, show));
        lm_code rc = append_meta(t, key, text, e);
        if (rc)
            return rc;
    }
    return LM_OK;
}

lm_code lm_st_table_read_meta(lm_st_table *t, const char *text, size_t len, const char *where,
                              lm_err *e)
{
    json_t *root = NULL;
    lm_code rc = lm_json_parse(text, len, where, &root, e);

    if (!rc)
        rc = read_meta(t, root, where, e);
    json_decref(root);
    return rc;
}

/* Read one entry of the header to *x, and the end of its bytes to *end. */
static lm_code read_entry(const char *name, const json_t *obj, lm_st_tensor *x, uint64_t *end,
                          const char *where, lm_err *e)
{
    char show[LM_ST_SHOWN];
    const json_t *shape = json_object_get(obj, "shape"),
                 *off = json_object_get(obj, "data_offsets");
    const char *dtype = plain_string(json_object_get(obj, "dtype"));

    *x = (lm_st_tensor){ .name = name, .dtype_name = dtype };
    if (!json_is_object(obj))
        return lm_fail(e, LM_EFORMAT, where, NULL, "tensor '%s' is not described by an object",
                       lm_st_show(name, show));
    if (!dtype || !json_is_array(shape) || !json_is_array(off))
        return lm_fail(e, LM_EFORMAT, where, NULL, "tensor '%s' has an invalid '%s'",
                       lm_st_show(name, show),
                       !dtype                  ? "dtype"
                       : !json_is_array(shape) ? "shape"
                                               : "data_offsets");
    if (json_array_size(shape) > LM_ST_MAX_DIMS)
        return lm_fail(e, LM_ELIMIT, where, NULL,
                       "tensor '%s' has %zu dimension%s, at most %d here", lm_st_show(name, show),
                       json_array_size(shape), lm_plural(json_array_size(shape)), LM_ST_MAX_DIMS);
    x->ndim = (int)json_array_size(shape);
    for (int i = 0; i < x->ndim; i++) {
        const json_t *d = json_array_get(shape, (size_t)i);
        if (!json_is_integer(d) || json_integer_value(d) < 0)
            return lm_fail(e, LM_EFORMAT, where, NULL,
                           "tensor '%s': dimension %d is not a number of elements",
                           lm_st_show(name, show), i);
        x->dim[i] = json_integer_value(d);
    }
    const json_t *a = json_array_get(off, 0), *b = json_array_get(off, 1);
    if (json_array_size(off) != 2 || !json_is_integer(a) || !json_is_integer(b) ||
        json_integer_value(a) < 0 || json_integer_value(b) < json_integer_value(a))
        return lm_fail(e, LM_EFORMAT, where, NULL,
                       "tensor '%s': data_offsets are not two increasing numbers",
                       lm_st_show(name, show));
    x->offset = (uint64_t)json_integer_value(a);
    *end = (uint64_t)json_integer_value(b);
    return LM_OK;
}

static int by_offset(const void *pa, const void *pb)
{
    const lm_st_tensor *a = pa, *b = pb;
    if (a->offset != b->offset)
        return a->offset < b->offset ? -1 : 1;
    if (a->bytes != b->bytes) /* empty tensors first, or they would look like overlaps */
        return a->bytes < b->bytes ? -1 : 1;
    return strcmp(a->name, b->name);
}

/* The tensors, sorted, must cover [0, data_bytes) exactly. */
static lm_code check_cover(lm_st_table *t, uint64_t data_bytes, const char *where, lm_err *e)
{
    char show[LM_ST_SHOWN], show2[LM_ST_SHOWN];
    uint64_t end = 0;

    for (size_t i = 0; i < t->n; i++) {
        const lm_st_tensor *x = &t->tensor[i];
        if (x->offset < end)
            return lm_fail(e, LM_EFORMAT, where, NULL, "tensors '%s' and '%s' overlap",
                           lm_st_show(t->tensor[i - 1].name, show), lm_st_show(x->name, show2));
        if (x->offset > end)
            return lm_fail(e, LM_EFORMAT, where, NULL,
                           "%" PRIu64 " bytes before tensor '%s' belong to no tensor",
                           x->offset - end, lm_st_show(x->name, show));
        end = x->offset + x->bytes; /* both below 2^63 */
    }
    if (data_bytes != UINT64_MAX && end > data_bytes)
        return lm_fail(e, LM_EFORMAT, where, "it is truncated: fetch or write it again",
                       "header says %" PRIu64 " byte%s of data, file has %" PRIu64, end,
                       lm_plural(end), data_bytes);
    if (data_bytes != UINT64_MAX && end < data_bytes)
        return lm_fail(e, LM_EFORMAT, where, NULL,
                       "%" PRIu64 " bytes after the last tensor belong to no tensor",
                       data_bytes - end);
    t->data_bytes = end;
    return LM_OK;
}

static lm_code fill_table(lm_st_table *t, const json_t *root, const char *where, lm_err *e)
{
    const char *name;
    json_t *value;
    char show[LM_ST_SHOWN];
    lm_code rc = LM_OK;

    json_object_foreach((json_t *)(uintptr_t)root, name, value)
    {
        lm_st_tensor x;
        uint64_t end = 0;
        if (!strcmp(name, "__metadata__")) {
            if ((rc = read_meta(t, value, where, e)))
                return rc;
            continue;
        }
        if ((rc = read_entry(name, value, &x, &end, where, e)) ||
            (rc = lm_st_table_add(t, &x, where, LM_EFORMAT, e)))
            return rc;
        const lm_st_tensor *added = &t->tensor[t->n - 1];
        if (end - added->offset != added->bytes)
            return lm_fail(
                e, LM_EFORMAT, where, NULL,
                "tensor '%s': dtype and shape need %" PRIu64 " byte%s, data_offsets give %" PRIu64,
                lm_st_show(name, show), added->bytes, lm_plural(added->bytes), end - added->offset);
    }
    return rc;
}

/* Sort by the order of the data; most headers are sorted already. */
static void sort_table(lm_st_table *t)
{
    for (size_t i = 1; i < t->n; i++) {
        if (by_offset(&t->tensor[i - 1], &t->tensor[i]) > 0) {
            qsort(t->tensor, t->n, sizeof *t->tensor, by_offset);
            lm_st_table_reindex(t);
            return;
        }
    }
}

static lm_code read_tree(lm_st_table *t, const char *text, size_t len, const char *where, lm_err *e)
{
    json_t *root = NULL;
    lm_code rc = lm_json_parse(text, len, where, &root, e);

    if (!rc)
        rc = fill_table(t, root, where, e);
    json_decref(root);
    return rc;
}

lm_code lm_st_table_parse(lm_st_table *t, const char *text, size_t len, uint64_t data_bytes,
                          const char *where, lm_err *e)
{
    size_t at = 0;
    lm_code rc = LM_OK;

    while (at < len && memchr(" \t\n\r", text[at], 4)) /* JSON's white space */
        at++;
    if (at == len || text[at] != '{')
        return lm_fail(e, LM_EFORMAT, where, "check that it is a safetensors file",
                       "its header does not begin with '{'");
    if (!lm_st_table_scan(t, text, len))
        rc = read_tree(t, text, len, where, e);
    if (rc)
        return rc;
    sort_table(t);
    return check_cover(t, data_bytes, where, e);
}
