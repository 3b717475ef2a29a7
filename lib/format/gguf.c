/* SPDX-License-Identifier: Apache-2.0 */
/* gguf.c -- reads a GGUF file; every length, count and offset is checked against the file's
 * size. */
#include "format/gguf_impl.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/text.h"
#include "format/safetensors_table.h"

enum {
    LEAST_PAIR = 13,   /* bytes: key's length, kind, one byte of value */
    LEAST_TENSOR = 24, /* name's length, dimensions, type, offset */
    MOST_NESTING = 4,
    MOST_KEY = 65535,
    MOST_ALIGN = 1 << 20,
};

/* ---- A cursor over the bytes ---- */

typedef struct {
    const lm_gguf *g;
    size_t at;
    lm_err *e;
} cursor;

static lm_code broken(const cursor *c, const char *name, const char *what)
{
    char show[LM_ST_SHOWN];

    if (name)
        return lm_fail(c->e, LM_EFORMAT, c->g->where, NULL, "'%s': %s", lm_st_show(name, show),
                       what);
    return lm_fail(c->e, LM_EFORMAT, c->g->where, NULL, "%s", what);
}

static lm_code ends_early(const cursor *c, const char *name)
{
    return lm_fail(c->e, LM_EFORMAT, c->g->where, "fetch the file again",
                   "it ends at byte %zu, within %s%.80s", c->g->size, name ? "" : "its tables",
                   name ? name : "");
}

static size_t left(const cursor *c)
{
    return c->g->size - c->at;
}

static lm_code read_number(cursor *c, int bytes, const char *name, uint64_t *out)
{
    if (left(c) < (size_t)bytes)
        return ends_early(c, name);
    *out = lm_gguf_get(c->g->data + c->at, bytes);
    c->at += (size_t)bytes;
    return LM_OK;
}

static lm_code take_u32(cursor *c, const char *name, uint32_t *out)
{
    uint64_t v = 0;
    lm_code rc = read_number(c, 4, name, &v);

    *out = (uint32_t)v;
    return rc;
}

/* A copy of a string of at most `most` bytes without NUL. */
static lm_code take_name(cursor *c, size_t most, const char *what, char **out)
{
    uint64_t n = 0;
    lm_code rc = read_number(c, 8, NULL, &n);

    if (rc)
        return rc;
    if (n > left(c))
        return ends_early(c, what);
    if (!n || n > most || memchr(c->g->data + c->at, 0, n))
        return lm_fail(c->e, LM_EFORMAT, c->g->where, NULL,
                       "%s of %" PRIu64 " bytes at byte %zu is not a valid name (1 to %zu bytes, "
                       "no NUL)",
                       what, n, c->at, most);
    rc = lm_arena_strdup(c->g->arena, out, (const char *)c->g->data + c->at, n, c->e);
    c->at += n;
    return rc;
}

/* Skip `count` values of a kind. */
static lm_code skip(cursor *c, const char *key, uint32_t kind, uint64_t count, int depth)
{
    size_t bytes;
    uint64_t n = 0;

    if (kind >= LM_GGUF_KINDS)
        return lm_fail(c->e, LM_EFORMAT, c->g->where, NULL,
                       "'%.80s': a value of kind %" PRIu32 ", known are 0 to %d", key, kind,
                       LM_GGUF_KINDS - 1);
    if (lm_gguf_kind_bytes[kind]) {
        if (!lm_mul_ok(count, lm_gguf_kind_bytes[kind], &bytes) || bytes > left(c))
            return ends_early(c, key);
        c->at += bytes;
        return LM_OK;
    }
    if (count > left(c) / 8)
        return ends_early(c, key);
    for (uint64_t i = 0; i < count; i++) {
        uint32_t item = 0;
        if (kind == LM_GGUF_STRING) {
            if (read_number(c, 8, key, &n))
                return c->e->code;
            if (n > left(c))
                return ends_early(c, key);
            c->at += n;
            continue;
        }
        if (depth >= MOST_NESTING)
            return broken(c, key, "arrays are nested too deeply");
        if (take_u32(c, key, &item) || read_number(c, 8, key, &n) ||
            skip(c, key, item, n, depth + 1))
            return c->e->code;
    }
    return LM_OK;
}

static lm_code read_pair(cursor *c, lm_gguf_value *v)
{
    char *key = NULL;
    uint32_t kind = 0;
    lm_code rc = take_name(c, MOST_KEY, "key", &key);

    if (rc || (rc = take_u32(c, key, &kind)))
        return rc;
    v->key = key;
    v->count = 1;
    if (kind == LM_GGUF_ARRAY) {
        v->array = true;
        if (take_u32(c, key, &kind) || read_number(c, 8, key, &v->count))
            return c->e->code;
    }
    size_t from = c->at;
    rc = skip(c, key, kind, v->count, 1);
    if (rc)
        return rc;
    v->kind = (lm_gguf_kind)kind;
    v->data = c->g->data + from;
    v->bytes = c->at - from;
    if (kind == LM_GGUF_BOOL)
        for (uint64_t i = 0; i < v->count; i++)
            if (v->data[i] > 1)
                return broken(c, key, "a boolean that is neither 0 nor 1");
    return LM_OK;
}

/* Size and shape; the offset is checked when the alignment is known. */
static lm_code read_tensor(cursor *c, lm_gguf_tensor *t)
{
    char *name = NULL;
    uint32_t ndim = 0;
    uint64_t dim = 0;
    lm_code rc = take_name(c, MOST_KEY, "name of a tensor", &name);

    if (rc || (rc = take_u32(c, name, &ndim)))
        return rc;
    t->name = name;
    if (ndim < 1 || ndim > LM_GGUF_MAX_DIMS)
        return lm_fail(c->e, LM_EFORMAT, c->g->where, NULL,
                       "tensor '%.80s' has %" PRIu32 " dimension%s, 1 to %d are allowed", name,
                       ndim, lm_plural(ndim), LM_GGUF_MAX_DIMS);
    t->ndim = (int)ndim;
    t->count = 1;
    for (int i = t->ndim - 1; i >= 0; i--) {
        if (read_number(c, 8, name, &dim))
            return c->e->code;
        if (dim < 1 || dim > INT64_MAX || !lm_mul_i64_ok(t->count, (int64_t)dim, &t->count))
            return broken(c, name, "a dimension is 0, or their product is too large");
        t->dim[i] = (int64_t)dim;
    }
    if (take_u32(c, name, &t->type) || read_number(c, 8, name, &t->offset))
        return c->e->code;
    const lm_format *f = lm_format_of_gguf(t->type);
    lm_tensor_size size;
    if (!f)
        return lm_fail(c->e, LM_EFORMAT, c->g->where, NULL,
                       "tensor '%.80s' has type %" PRIu32 ", which is unknown", name, t->type);
    if (t->dim[t->ndim - 1] % lm_format_group(f))
        return lm_fail(c->e, LM_EFORMAT, c->g->where, NULL,
                       "tensor '%.80s' has rows of %" PRId64 " numbers, %s needs a multiple of %d",
                       name, t->dim[t->ndim - 1], f->name, lm_format_group(f));
    if (lm_tensor_bytes(f, t->ndim, t->dim, &size, NULL))
        return broken(c, name, "too many bytes");
    t->bytes = size.all;
    return LM_OK;
}

/* ---- Tables ---- */

static int key_order(const void *a, const void *b)
{
    return strcmp((*(const lm_gguf_value *const *)a)->key, (*(const lm_gguf_value *const *)b)->key);
}

static int name_order(const void *a, const void *b)
{
    return strcmp((*(const lm_gguf_tensor *const *)a)->name,
                  (*(const lm_gguf_tensor *const *)b)->name);
}

static lm_code index_pairs(lm_gguf *g, cursor *c)
{
    lm_code rc = lm_alloc_n(&g->by_key, g->n_pairs, sizeof *g->by_key, "index of keys", c->e);

    if (rc || !g->n_pairs)
        return rc;
    for (size_t i = 0; i < g->n_pairs; i++)
        g->by_key[i] = &g->pair[i];
    qsort(g->by_key, g->n_pairs, sizeof *g->by_key, key_order);
    for (size_t i = 1; i < g->n_pairs; i++)
        if (!strcmp(g->by_key[i - 1]->key, g->by_key[i]->key))
            return broken(c, g->by_key[i]->key, "this key occurs twice");
    return LM_OK;
}

static lm_code index_tensors(lm_gguf *g, cursor *c)
{
    lm_code rc =
        lm_alloc_n(&g->by_name, g->n_tensors, sizeof *g->by_name, "index of tensors", c->e);

    if (rc || !g->n_tensors)
        return rc;
    for (size_t i = 0; i < g->n_tensors; i++)
        g->by_name[i] = &g->tensor[i];
    qsort(g->by_name, g->n_tensors, sizeof *g->by_name, name_order);
    for (size_t i = 1; i < g->n_tensors; i++)
        if (!strcmp(g->by_name[i - 1]->name, g->by_name[i]->name))
            return broken(c, g->by_name[i]->name, "this tensor occurs twice");
    return LM_OK;
}

/* Tensors follow one another, each at the next multiple of the alignment. */
static lm_code place_tensors(lm_gguf *g, cursor *c)
{
    int64_t align;
    uint64_t at = 0, room;
    lm_code rc =
        lm_gguf_i64_or(g, "general.alignment", LM_GGUF_ALIGN, 8, MOST_ALIGN, &align, NULL, c->e);

    if (rc)
        return rc;
    if (align & (align - 1))
        return broken(c, "general.alignment", "not a power of two");
    g->start = (c->at + (size_t)align - 1) / (size_t)align * (size_t)align;
    room = g->start < g->size ? g->size - g->start : 0;
    for (size_t i = 0; i < g->n_tensors; i++) {
        const lm_gguf_tensor *t = &g->tensor[i];
        if (t->offset != at)
            return lm_fail(c->e, LM_EFORMAT, g->where, NULL,
                           "tensor '%.80s' begins at %" PRIu64 ", but after the previous one "
                           "it must begin at %" PRIu64,
                           t->name, t->offset, at);
        if (t->offset > room || t->bytes > room - t->offset)
            return lm_fail(c->e, LM_EFORMAT, g->where, "fetch the file again",
                           "it ends at byte %zu, within tensor '%.80s' of %" PRIu64 " bytes",
                           g->size, t->name, t->bytes);
        at = (t->offset + t->bytes + (uint64_t)align - 1) / (uint64_t)align * (uint64_t)align;
    }
    return LM_OK;
}

static lm_code read_counts(lm_gguf *g, cursor *c)
{
    uint64_t n_tensors = 0, n_pairs = 0;

    if (g->size < 4 || memcmp(g->data, "GGUF", 4))
        return lm_fail(c->e, LM_EFORMAT, g->where,
                       "give a file that begins with the bytes GGUF, or fetch it again",
                       "this is not a GGUF file");
    c->at = 4;
    if (take_u32(c, NULL, &g->version))
        return c->e->code;
    if (g->version < 2 || g->version > 3)
        return lm_fail(c->e, LM_EFORMAT, g->where,
                       g->version && !(g->version & 0xffff) ? "big-endian files are not read"
                                                            : "versions 2 and 3 are supported",
                       "GGUF version %" PRIu32, g->version);
    if (read_number(c, 8, NULL, &n_tensors) || read_number(c, 8, NULL, &n_pairs))
        return c->e->code;
    if (n_pairs > left(c) / LEAST_PAIR || n_tensors > left(c) / LEAST_TENSOR)
        return lm_fail(c->e, LM_EFORMAT, g->where, "fetch the file again",
                       "it declares %" PRIu64 " pair%s and %" PRIu64
                       " tensor%s, more than its %zu byte%s can hold",
                       n_pairs, lm_plural(n_pairs), n_tensors, lm_plural(n_tensors), g->size,
                       lm_plural(g->size));
    g->n_pairs = n_pairs;
    g->n_tensors = n_tensors;
    return LM_OK;
}

static lm_code read_tables(lm_gguf *g, lm_err *e)
{
    cursor c = { g, 0, e };
    lm_code rc = read_counts(g, &c);

    if (!rc)
        rc = lm_alloc_n(&g->pair, g->n_pairs, sizeof *g->pair, "pairs of a GGUF file", e);
    if (!rc)
        rc = lm_alloc_n(&g->tensor, g->n_tensors, sizeof *g->tensor, "tensors of a GGUF file", e);
    for (size_t i = 0; !rc && i < g->n_pairs; i++)
        rc = read_pair(&c, &g->pair[i]);
    if (!rc)
        rc = index_pairs(g, &c);
    for (size_t i = 0; !rc && i < g->n_tensors; i++)
        rc = read_tensor(&c, &g->tensor[i]);
    if (!rc)
        rc = index_tensors(g, &c);
    return rc ? rc : place_tensors(g, &c);
}

static lm_code start(const char *where, lm_gguf **out, lm_err *e)
{
    lm_gguf *g = NULL;
    lm_code rc = lm_alloc_n(&g, 1, sizeof *g, "a GGUF file", e);

    *out = NULL;
    if (rc)
        return rc;
    if ((rc = lm_strdup(&g->where, where, e)) || (rc = lm_arena_new(&g->arena, 1 << 16, e))) {
        lm_gguf_close(g);
        return rc;
    }
    *out = g;
    return LM_OK;
}

static lm_code finish(lm_gguf **out, lm_err *e)
{
    lm_code rc = read_tables(*out, e);

    if (rc) {
        lm_gguf_close(*out);
        *out = NULL;
    }
    return rc;
}

lm_code lm_gguf_parse(const void *data, size_t size, const char *where, lm_gguf **out, lm_err *e)
{
    lm_code rc = start(where, out, e);

    if (rc)
        return rc;
    (*out)->data = data;
    (*out)->size = size;
    return finish(out, e);
}

lm_code lm_gguf_open_map(lm_map *map, const char *where, lm_gguf **out, lm_err *e)
{
    lm_code rc = start(where, out, e);

    if (rc) {
        lm_map_close(map);
        return rc;
    }
    (*out)->map = *map;
    (*out)->data = map->data;
    (*out)->size = map->size;
    return finish(out, e);
}

void lm_gguf_close(lm_gguf *g)
{
    if (!g)
        return;
    if (g->map.data)
        lm_map_close(&g->map);
    lm_arena_free(g->arena);
    lm_free(g->by_key);
    lm_free(g->by_name);
    lm_free(g->pair);
    lm_free(g->tensor);
    lm_free(g->where);
    lm_free(g);
}

/* ---- Look-ups ---- */

const char *lm_gguf_path(const lm_gguf *g)
{
    return g->where;
}

size_t lm_gguf_pairs(const lm_gguf *g)
{
    return g->n_pairs;
}

const lm_gguf_value *lm_gguf_pair(const lm_gguf *g, size_t i)
{
    return &g->pair[i];
}

const lm_gguf_value *lm_gguf_value_of(const lm_gguf *g, const char *key)
{
    const lm_gguf_value want = { .key = key }, *p = &want, **found;

    if (!g->n_pairs)
        return NULL;
    found = bsearch(&p, g->by_key, g->n_pairs, sizeof *g->by_key, key_order);
    return found ? *found : NULL;
}

size_t lm_gguf_count(const lm_gguf *g)
{
    return g->n_tensors;
}

const lm_gguf_tensor *lm_gguf_at(const lm_gguf *g, size_t i)
{
    return &g->tensor[i];
}

const lm_gguf_tensor *lm_gguf_find(const lm_gguf *g, const char *name)
{
    const lm_gguf_tensor want = { .name = name }, *p = &want, **found;

    if (!g->n_tensors)
        return NULL;
    found = bsearch(&p, g->by_name, g->n_tensors, sizeof *g->by_name, name_order);
    return found ? *found : NULL;
}

const uint8_t *lm_gguf_data(const lm_gguf *g, const lm_gguf_tensor *t)
{
    return g->data + g->start + t->offset;
}

void lm_gguf_forget(const lm_gguf *g, const lm_gguf_tensor *t)
{
    uintptr_t from = ((uintptr_t)lm_gguf_data(g, t) + 4095) / 4096 * 4096;
    uintptr_t to = ((uintptr_t)lm_gguf_data(g, t) + t->bytes) / 4096 * 4096;

    if (g->map.data && to > from)
        madvise((void *)from, to - from, MADV_DONTNEED);
}
