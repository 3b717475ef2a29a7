/* SPDX-License-Identifier: Apache-2.0 */
/* imatrix.c -- see imatrix.h. */
#include "format/imatrix.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/text.h"
#include "format/gguf.h"
#include "format/safetensors_table.h"

enum { MOST_NAME = 200, MOST_CALLS = 1 << 30 };

#define SUMS   ".in_sum2"
#define COUNTS ".counts"

typedef struct {
    char *name;
    float *sum, *mean; /* the mean is computed from the sum as F32, as a reader of the file does */
    size_t n;
    int64_t count;
} entry;

struct lm_imatrix {
    char *where; /* for messages */
    entry *v;    /* sorted by name after the last one */
    size_t n, cap;
    bool sorted;
    int64_t chunks, chunk;
    char *dataset;
};

/* ---- Life ---- */

static lm_code make(const char *where, lm_imatrix **out, lm_err *e)
{
    lm_code rc = lm_alloc_n(out, 1, sizeof **out, "an importance matrix", e);

    return rc ? rc : lm_strdup(&(*out)->where, where, e);
}

lm_code lm_imatrix_new(const char *dataset, int64_t chunk, lm_imatrix **out, lm_err *e)
{
    lm_code rc = make("importance matrix", out, e);

    if (!rc)
        rc = lm_strdup(&(*out)->dataset, dataset, e);
    if (rc) {
        lm_imatrix_free(*out);
        *out = NULL;
        return rc;
    }
    (*out)->chunk = chunk;
    return LM_OK;
}

void lm_imatrix_free(lm_imatrix *m)
{
    if (!m)
        return;
    for (size_t i = 0; i < m->n; i++) {
        lm_free(m->v[i].name);
        lm_free(m->v[i].sum);
        lm_free(m->v[i].mean);
    }
    lm_free(m->v);
    lm_free(m->where);
    lm_free(m->dataset);
    lm_free(m);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const entry *)a)->name, ((const entry *)b)->name);
}

static lm_code sort(lm_imatrix *m, lm_err *e)
{
    char show[LM_ST_SHOWN];

    if (m->n)
        qsort(m->v, m->n, sizeof *m->v, by_name);
    m->sorted = true;
    for (size_t i = 1; i < m->n; i++)
        if (!strcmp(m->v[i - 1].name, m->v[i].name))
            return lm_fail(e, LM_EFORMAT, m->where, NULL, "'%s' occurs twice",
                           lm_st_show(m->v[i].name, show));
    return LM_OK;
}

/* ---- Entries ---- */

/* Reserve an entry; it is counted only after its numbers are set. */
static lm_code begin(lm_imatrix *m, const char *name, size_t n, entry **out, lm_err *e)
{
    lm_code rc = lm_grow(&m->v, &m->cap, m->n + 1, sizeof *m->v, "an importance matrix", e);
    entry *x = rc ? NULL : &m->v[m->n];

    if (rc)
        return rc;
    *x = (entry){ .n = n };
    rc = lm_strdup(&x->name, name, e);
    if (!rc)
        rc = lm_alloc_n(&x->mean, n, sizeof *x->mean, "an importance matrix", e);
    if (!rc)
        rc = lm_alloc_n(&x->sum, n, sizeof *x->sum, "an importance matrix", e);
    m->n++;
    m->sorted = false;
    *out = x;
    return rc;
}

/* Sum i of an entry over `count` rows. */
static lm_code set_sum(const lm_imatrix *m, entry *x, size_t i, double sum, lm_err *e)
{
    double mean = x->count > 0 ? (double)(float)sum / (double)x->count : sum;
    char show[LM_ST_SHOWN];

    if (!(mean >= 0) || mean > 3e38)
        return lm_fail(e, LM_EFORMAT, m->where, "make it again",
                       "'%s': value %zu is %.9g, which cannot be a mean of squares",
                       lm_st_show(x->name, show), i, mean);
    x->sum[i] = (float)sum;
    x->mean[i] = (float)mean;
    return LM_OK;
}

lm_code lm_imatrix_add(lm_imatrix *m, const char *name, const double *sums, size_t n, int64_t count,
                       lm_err *e)
{
    entry *x = NULL;
    lm_code rc = begin(m, name, n, &x, e);

    if (!rc)
        x->count = count;
    for (size_t i = 0; !rc && i < n; i++)
        rc = set_sum(m, x, i, sums[i], e);
    return rc;
}

void lm_imatrix_set_chunks(lm_imatrix *m, int64_t chunks)
{
    m->chunks = chunks;
}

size_t lm_imatrix_count(const lm_imatrix *m)
{
    return m->n;
}

const float *lm_imatrix_find(const lm_imatrix *m, const char *name, size_t *n)
{
    for (size_t lo = 0, hi = m->n; m->sorted && lo < hi;) {
        size_t mid = lo + (hi - lo) / 2;
        int way = strcmp(name, m->v[mid].name);
        if (!way) {
            *n = m->v[mid].n;
            return m->v[mid].mean;
        }
        if (way < 0)
            hi = mid;
        else
            lo = mid + 1;
    }
    for (size_t i = 0; !m->sorted && i < m->n; i++)
        if (!strcmp(name, m->v[i].name)) {
            *n = m->v[i].n;
            return m->v[i].mean;
        }
    return NULL;
}

int64_t lm_imatrix_chunks(const lm_imatrix *m)
{
    return m->chunks;
}

const char *lm_imatrix_dataset(const lm_imatrix *m)
{
    return m->dataset;
}

/* ---- The legacy format ---- */

typedef struct {
    const uint8_t *p;
    size_t left;
} bytes;

static bool take_i32(bytes *b, int32_t *v)
{
    if (b->left < 4)
        return false;
    memcpy(v, b->p, 4); /* little-endian, as all supported machines are */
    b->p += 4;
    b->left -= 4;
    return true;
}

static bool take_name(bytes *b, char name[MOST_NAME + 1])
{
    int32_t n;

    if (!take_i32(b, &n) || n < 1 || n > MOST_NAME || (size_t)n > b->left ||
        memchr(b->p, 0, (size_t)n))
        return false;
    memcpy(name, b->p, (size_t)n);
    name[n] = 0;
    b->p += n;
    b->left -= (size_t)n;
    return true;
}

/* True if the bytes begin like the legacy format: a number of entries, and the name of a tensor. */
static bool begins_legacy(bytes b)
{
    char name[MOST_NAME + 1];
    int32_t entries, calls, values;

    if (!take_i32(&b, &entries) || entries < 1 || entries > 1 << 20 || !take_name(&b, name) ||
        !take_i32(&b, &calls) || !take_i32(&b, &values))
        return false;
    for (const char *c = name; *c; c++)
        if (*c <= ' ' || *c > '~')
            return false;
    return lm_text_ends(name, ".weight") && calls >= 0 && values > 0;
}

static lm_code read_entry(lm_imatrix *m, bytes *b, lm_err *e)
{
    char name[MOST_NAME + 1], show[LM_ST_SHOWN];
    int32_t calls, values;
    entry *x = NULL;
    float f;

    if (!take_name(b, name))
        return lm_fail(e, LM_EFORMAT, m->where, "make it again", "entry %zu has an invalid name",
                       m->n + 1);
    if (!take_i32(b, &calls) || !take_i32(b, &values) || calls < 0 || values < 1 ||
        (size_t)values > b->left / sizeof f)
        return lm_fail(e, LM_EFORMAT, m->where, "make it again", "it ends within '%s'",
                       lm_st_show(name, show));
    lm_code rc = begin(m, name, (size_t)values, &x, e);
    if (!rc)
        x->count = calls;
    for (size_t i = 0; !rc && i < x->n; i++) {
        memcpy(&f, b->p, sizeof f);
        b->p += sizeof f;
        b->left -= sizeof f;
        rc = set_sum(m, x, i, (double)f, e);
    }
    return rc;
}

static lm_code read_legacy(lm_imatrix *m, bytes b, lm_err *e)
{
    int32_t entries = 0, chunks = 0;
    char dataset[MOST_NAME + 1];
    lm_code rc = LM_OK;

    take_i32(&b, &entries);
    for (int32_t i = 0; !rc && i < entries; i++)
        rc = read_entry(m, &b, e);
    if (!rc && take_i32(&b, &chunks) && chunks > 0)
        m->chunks = chunks;
    if (!rc && take_name(&b, dataset))
        rc = lm_strdup(&m->dataset, dataset, e);
    return rc;
}

/* ---- GGUF ---- */

static float at(const lm_gguf *g, const lm_gguf_tensor *t, int64_t i)
{
    float f;

    memcpy(&f, lm_gguf_data(g, t) + (size_t)i * sizeof f, sizeof f);
    return f;
}

static lm_code read_pair(lm_imatrix *m, const lm_gguf *g, const lm_gguf_tensor *sums, lm_err *e)
{
    size_t n = strlen(sums->name) - strlen(SUMS);
    char name[MOST_NAME + 1], other[MOST_NAME + sizeof COUNTS], show[LM_ST_SHOWN];
    entry *x = NULL;

    if (n > MOST_NAME)
        return lm_fail(e, LM_EFORMAT, m->where, NULL, "a name of %zu bytes", n);
    snprintf(name, sizeof name, "%.*s", (int)n, sums->name);
    snprintf(other, sizeof other, "%s" COUNTS, name);
    const lm_gguf_tensor *counts = lm_gguf_find(g, other);
    if (!counts || counts->type != LM_GGUF_TYPE_F32 || sums->type != LM_GGUF_TYPE_F32)
        return lm_fail(e, LM_EFORMAT, m->where, NULL, "'%s' has no sums and counts in F32",
                       lm_st_show(name, show));
    if (counts->count != 1)
        return lm_fail(e, LM_EUSAGE, m->where, NULL,
                       "'%s' is of %" PRId64 " experts; only dense models are supported",
                       lm_st_show(name, show), counts->count);
    double count = (double)at(g, counts, 0);
    if (!(count >= 0 && count < MOST_CALLS))
        return lm_fail(e, LM_EFORMAT, m->where, NULL, "'%s': a count of %.9g",
                       lm_st_show(name, show), count);
    lm_code rc = begin(m, name, (size_t)sums->count, &x, e);
    if (!rc)
        x->count = (int64_t)llround(count);
    for (int64_t i = 0; !rc && i < sums->count; i++)
        rc = set_sum(m, x, (size_t)i, x->count ? (double)at(g, sums, i) : 1.0, e);
    return rc;
}

static lm_code read_gguf(lm_imatrix *m, bytes b, lm_err *e)
{
    lm_gguf *g = NULL;
    lm_gguf_text text;
    lm_code rc = lm_gguf_parse(b.p, b.left, m->where, &g, e);

    if (rc)
        return rc;
    const lm_gguf_value *data = lm_gguf_value_of(g, "imatrix.datasets");
    lm_gguf_iter it = { .v = data };
    for (size_t i = 0; !rc && i < lm_gguf_count(g); i++)
        if (lm_text_ends(lm_gguf_at(g, i)->name, SUMS))
            rc = read_pair(m, g, lm_gguf_at(g, i), e);
    if (!rc && !m->n)
        rc = lm_fail(e, LM_EFORMAT, m->where, "make one with llama-imatrix, or name a text",
                     "this GGUF file is not an importance matrix");
    if (!rc)
        rc = lm_gguf_i64_or(g, "imatrix.chunk_count", 0, 0, INT64_C(1) << 40, &m->chunks, NULL, e);
    if (!rc)
        rc = lm_gguf_i64_or(g, "imatrix.chunk_size", 0, 0, INT64_C(1) << 40, &m->chunk, NULL, e);
    if (!rc && data && data->array && lm_gguf_next_str(&it, &text) && text.len < 4096) {
        rc = lm_alloc_n(&m->dataset, text.len + 1, 1, "a name", e);
        if (!rc)
            memcpy(m->dataset, text.text, text.len);
    }
    lm_gguf_close(g);
    return rc;
}

static bool is_gguf(bytes b)
{
    return b.left >= 4 && !memcmp(b.p, "GGUF", 4);
}

bool lm_imatrix_is(const char *path)
{
    lm_err e = { 0 };
    lm_map map;

    if (!lm_path_exists(path) || lm_path_is_dir(path) || lm_map_open(path, &map, &e))
        return false;
    bytes b = { map.data, map.size };
    bool is = is_gguf(b) || begins_legacy(b);
    lm_map_close(&map);
    return is;
}

lm_code lm_imatrix_parse(const void *data, size_t size, const char *where, lm_imatrix **out,
                         lm_err *e)
{
    bytes b = { data, size };
    lm_code rc = make(where, out, e);

    if (!rc && is_gguf(b))
        rc = read_gguf(*out, b, e);
    else if (!rc && begins_legacy(b))
        rc = read_legacy(*out, b, e);
    else if (!rc)
        rc = lm_fail(e, LM_EFORMAT, where, NULL, "this is not an importance matrix");
    if (!rc)
        rc = sort(*out, e);
    if (rc) {
        lm_imatrix_free(*out);
        *out = NULL;
    }
    return rc;
}

lm_code lm_imatrix_open(const char *path, lm_imatrix **out, lm_err *e)
{
    lm_map map;
    lm_code rc = lm_map_open(path, &map, e);

    *out = NULL;
    if (rc)
        return rc;
    rc = lm_imatrix_parse(map.data, map.size, path, out, e);
    lm_map_close(&map);
    return rc;
}

/* ---- Writing ---- */

static lm_code write_out(void *ctx, const void *data, size_t n, lm_err *e)
{
    return lm_write_all(lm_out_fd(ctx), data, n, lm_out_path(ctx), e);
}

static void plan(lm_gguf_plan *p, const lm_imatrix *m, const entry *const *order)
{
    const lm_gguf_text dataset = { m->dataset ? m->dataset : "",
                                   m->dataset ? strlen(m->dataset) : 0 };
    const int64_t one[2] = { 1, 1 };
    char name[MOST_NAME + 16];

    lm_gguf_put_str(p, "general.type", "imatrix", 7);
    lm_gguf_put_strs(p, "imatrix.datasets", &dataset, 1);
    lm_gguf_put_u32(p, "imatrix.chunk_count", (uint32_t)m->chunks);
    lm_gguf_put_u32(p, "imatrix.chunk_size", (uint32_t)m->chunk);
    for (size_t i = 0; i < m->n; i++) {
        const int64_t dim[2] = { 1, (int64_t)order[i]->n };
        snprintf(name, sizeof name, "%s" SUMS, order[i]->name);
        lm_gguf_put_tensor(p, name, LM_GGUF_TYPE_F32, 2, dim);
        snprintf(name, sizeof name, "%s" COUNTS, order[i]->name);
        lm_gguf_put_tensor(p, name, LM_GGUF_TYPE_F32, 2, one);
    }
}

static lm_code write_entry(lm_gguf_writer *w, const entry *x, lm_err *e)
{
    float count = (float)x->count;
    lm_code rc = lm_gguf_write(w, x->sum, x->n * sizeof *x->sum, e);

    return rc ? rc : lm_gguf_write(w, &count, sizeof count, e);
}

static int by_name_of(const void *a, const void *b)
{
    return by_name(*(const entry *const *)a, *(const entry *const *)b);
}

lm_code lm_imatrix_write(const lm_imatrix *m, const char *path, bool force, lm_err *e)
{
    const entry **order = NULL;
    lm_gguf_plan *p = NULL;
    lm_gguf_writer *w = NULL;
    lm_out *out = NULL;
    lm_code rc = lm_alloc_n(&order, m->n + 1, sizeof *order, "an importance matrix", e);

    for (size_t i = 0; !rc && i < m->n; i++)
        order[i] = &m->v[i];
    if (!rc)
        qsort(order, m->n, sizeof *order, by_name_of);
    if (!rc)
        rc = lm_gguf_plan_new(&p, e);
    if (!rc)
        plan(p, m, order);
    if (!rc)
        rc = lm_out_open(path, force, &out, e);
    if (!rc)
        rc = lm_gguf_create_on(write_out, out, p, &w, e);
    for (size_t i = 0; !rc && i < m->n; i++)
        rc = write_entry(w, order[i], e);
    if (!rc) {
        rc = lm_gguf_finish(w, e);
        w = NULL;
    }
    lm_gguf_drop(w);
    lm_gguf_plan_free(p);
    lm_free(order);
    if (!rc)
        return lm_out_commit(out, e);
    lm_out_drop(out);
    return rc;
}
