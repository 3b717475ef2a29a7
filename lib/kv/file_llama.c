/* SPDX-License-Identifier: Apache-2.0 */
/* file_llama.c -- reads llama.cpp's state of a sequence, byte by byte within the file's length. */
#include "kv/file_llama.h"

#include <stdio.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/text.h"
#include "kv/file_impl.h"
#include "numeric/format.h"

enum { MAGIC = 0x67677371, VERSIONS = 4, STREAMS = 1024 };

struct lm_kv_llama {
    char *where;
    lm_map map;
    size_t ids, meta, data; /* offsets: tokens, cells, the numbers */
    int64_t n_ids, cells;
    uint64_t behind; /* streams behind the one with cells, which have none */
};

/* A place in the file; the first failure counts. */
typedef struct {
    const lm_kv_llama *f;
    size_t at;
    lm_err *e;
    lm_code rc;
} cursor;

static lm_code wrong_state(const lm_kv_llama *f, const char *what, lm_err *e)
{
    return lm_fail(e, LM_EFORMAT, f->where, "save the state again, of one sequence", "%s", what);
}

/* n objects of `size` bytes, and behind them; NULL if the file ends before. */
static const uint8_t *take(cursor *c, uint64_t n, size_t size)
{
    const uint8_t *p = c->f->map.data + c->at;
    if (c->rc)
        return NULL;
    if (size && n > (c->f->map.size - c->at) / size) {
        c->rc = wrong_state(c->f, "it ends early", c->e);
        return NULL;
    }
    c->at += (size_t)n * size;
    return p;
}

static uint64_t read_number(cursor *c, int bytes)
{
    const uint8_t *p = take(c, 1, (size_t)bytes);
    uint64_t v = 0;
    for (int i = 0; p && i < bytes; i++)
        v |= (uint64_t)p[i] << 8 * i;
    return v;
}

static int32_t number_at(const lm_kv_llama *f, size_t at)
{
    int32_t v;
    memcpy(&v, f->map.data + at, sizeof v);
    return v;
}

/* ---- Opening ---- */

bool lm_kv_llama_is(const char *path)
{
    uint32_t magic = 0;
    FILE *f = fopen(path, "rbe");
    bool is = f && fread(&magic, sizeof magic, 1, f) == 1 && magic == MAGIC;
    if (f)
        fclose(f);
    return is;
}

static void read_head(lm_kv_llama *f, cursor *c)
{
    uint64_t magic = read_number(c, 4), version = read_number(c, 4);
    if (!c->rc && (magic != MAGIC || version < 1 || version > VERSIONS))
        c->rc = lm_fail(c->e, LM_EFORMAT, f->where, "write it as a state of one sequence",
                        "it is not the state of a sequence of versions 1 to 4");
    f->n_ids = (int64_t)read_number(c, 4);
    f->ids = c->at;
    take(c, (uint64_t)f->n_ids, 4);
}

/* The only stream with cells. */
static void find_stream(lm_kv_llama *f, cursor *c)
{
    uint64_t streams = read_number(c, 4);
    if (!c->rc && streams > STREAMS)
        c->rc = wrong_state(f, "it has no number of streams", c->e);
    for (uint64_t i = 0; i < streams && !c->rc; i++) {
        uint64_t cells = read_number(c, 4);
        if (!cells || c->rc)
            continue;
        f->cells = (int64_t)cells;
        f->meta = c->at;
        take(c, cells, 12);
        f->data = c->at;
        f->behind = streams - i - 1;
        return;
    }
    if (!c->rc)
        c->rc = wrong_state(f, "it has no tokens", c->e);
}

static lm_code check_state(lm_kv_llama *f, lm_err *e)
{
    cursor c = { .f = f, .e = e };
    read_head(f, &c);
    find_stream(f, &c);
    for (int64_t i = 0; i < f->cells && !c.rc; i++)
        if (number_at(f, f->meta + 12 * (size_t)i + 4) != 1)
            c.rc = wrong_state(f, "a cell is of several sequences, or has more than a position", e);
    if (!c.rc && (f->n_ids < f->cells || f->n_ids > f->cells + 1))
        c.rc = lm_fail(e, LM_EFORMAT, f->where, "save the state again, of one sequence",
                       "it has %lld tokens, and %lld of them stored", (long long)f->n_ids,
                       (long long)f->cells);
    return c.rc;
}

lm_code lm_kv_llama_open(const char *path, lm_kv_llama **out, lm_err *e)
{
    lm_kv_llama *f;
    *out = NULL;
    if (lm_alloc_n(&f, 1, sizeof *f, "a cache", e))
        return e->code;
    f->map.fd = -1;
    if (lm_strdup(&f->where, path, e) || lm_map_open(path, &f->map, e) || check_state(f, e)) {
        lm_kv_llama_close(f);
        return e->code;
    }
    *out = f;
    return LM_OK;
}

void lm_kv_llama_close(lm_kv_llama *f)
{
    if (!f)
        return;
    if (f->map.data)
        lm_map_close(&f->map);
    lm_free(f->where);
    lm_free(f);
}

int64_t lm_kv_llama_tokens(const lm_kv_llama *f)
{
    return f->cells;
}

bool lm_kv_llama_has_next(const lm_kv_llama *f)
{
    return f->n_ids > f->cells;
}

/* ---- Numbers ---- */

typedef struct {
    const lm_kv_llama *f;
    lm_kv_image *m;
    bool pairs;
    float *row; /* of a token */
} reading;

static lm_code read_type(cursor *c, lm_dtype *out)
{
    const lm_format *f = lm_format_of_gguf((uint32_t)read_number(c, 4));
    *out = f ? f->element : LM_DTYPE_NONE;
    if (!c->rc && *out != LM_DTYPE_F32 && *out != LM_DTYPE_F16 && *out != LM_DTYPE_BF16)
        c->rc = lm_fail(c->e, LM_EFORMAT, c->f->where, "write it with a cache of f16",
                        "its cache has blocks of %s, which may be rotated",
                        f ? lm_format_show(f) : "an unknown type");
    return c->rc;
}

/* The row of a token to its place in the image. */
static void put_row(const reading *r, int64_t part, int64_t token)
{
    const lm_kv_about *a = &r->m->about;
    int64_t K = a->kv_heads[part / 2], D = a->head_dim[part / 2], n = a->tokens;
    char *to = r->m->content.part[part].data[LM_KV_PLAIN];
    float head[LM_CACHEGEN_CHANNELS / 16];
    for (int64_t h = 0; h < K; h++) {
        const float *x = r->row + h * D;
        bool turn = r->pairs && part % 2 == 0 && D <= LM_CACHEGEN_CHANNELS / 16;
        for (int64_t d = 0; d < D && turn; d++)
            head[d % 2 * (D / 2) + d / 2] = x[d];
        lm_convert(LM_DTYPE_F32, turn ? head : x, a->act,
                   to + (size_t)((h * n + token) * D) * lm_dtype_size(a->act), D);
    }
}

static lm_code check_width(const reading *r, cursor *c, int64_t part, uint64_t width)
{
    const lm_kv_about *a = &r->m->about;
    int64_t want = a->kv_heads[part / 2] * a->head_dim[part / 2];
    if (!c->rc && width != (uint64_t)want)
        c->rc = lm_fail(c->e, LM_EFORMAT, r->f->where, "give the model that wrote it",
                        "layer %lld has rows of %llu numbers, that of the model has %lld",
                        (long long)(part / 2), (unsigned long long)width, (long long)want);
    return c->rc;
}

static int64_t position(const lm_kv_llama *f, int64_t cell)
{
    return number_at(f, f->meta + 12 * (size_t)cell);
}

/* Rows by cell. */
static lm_code read_rows(const reading *r, cursor *c, int64_t part)
{
    lm_dtype type;
    if (read_type(c, &type))
        return c->rc;
    uint64_t bytes = read_number(c, 8);
    if (!c->rc && bytes % lm_dtype_size(type))
        c->rc = wrong_state(r->f, "its rows are not whole numbers", c->e);
    if (check_width(r, c, part, bytes / lm_dtype_size(type)))
        return c->rc;
    for (int64_t i = 0; i < r->f->cells; i++) {
        const uint8_t *p = take(c, 1, (size_t)bytes);
        if (!p)
            return c->rc;
        lm_convert(type, p, LM_DTYPE_F32, r->row, (int64_t)(bytes / lm_dtype_size(type)));
        put_row(r, part, position(r->f, i));
    }
    return c->rc;
}

/* Values of all cells, for one number of a row after another. */
static lm_code read_columns(const reading *r, cursor *c, int64_t part)
{
    const lm_kv_about *a = &r->m->about;
    lm_dtype type;
    if (read_type(c, &type))
        return c->rc;
    uint64_t size = read_number(c, 4), width = read_number(c, 4);
    if (!c->rc && size != lm_dtype_size(type))
        c->rc = wrong_state(r->f, "the size of its numbers is not that of their type", c->e);
    if (check_width(r, c, part, width))
        return c->rc;
    const uint8_t *p = take(c, width * (uint64_t)r->f->cells, (size_t)size);
    for (int64_t i = 0; i < r->f->cells && p; i++) {
        for (int64_t d = 0; d < a->kv_heads[part / 2] * a->head_dim[part / 2]; d++)
            lm_convert(type, p + (size_t)(d * r->f->cells + i) * size, LM_DTYPE_F32, r->row + d, 1);
        put_row(r, part, position(r->f, i));
    }
    return c->rc;
}

/* Nothing follows the rows but the streams that have no cells. */
static lm_code check_end(const lm_kv_llama *f, cursor *c)
{
    for (uint64_t i = 0; i < f->behind && !c->rc; i++)
        if (read_number(c, 4) && !c->rc)
            c->rc = wrong_state(f, "it has tokens in several streams", c->e);
    if (!c->rc && c->at != f->map.size)
        c->rc = lm_fail(c->e, LM_EFORMAT, f->where, "save the state again, of one sequence",
                        "it has %zu byte%s behind its rows", f->map.size - c->at,
                        lm_plural(f->map.size - c->at));
    return c->rc;
}

static lm_code read_parts(const reading *r, lm_err *e)
{
    const lm_kv_about *a = &r->m->about;
    cursor c = { .f = r->f, .at = r->f->data, .e = e };
    uint64_t turned = read_number(&c, 4), layers = read_number(&c, 4);
    if (!c.rc && (turned > 1 || layers != (uint64_t)a->layers))
        c.rc = lm_fail(e, LM_EFORMAT, r->f->where, "give the model that wrote it",
                       "it has %llu layers, the model %lld", (unsigned long long)layers,
                       (long long)a->layers);
    for (int64_t i = 0; i < a->layers && !c.rc; i++)
        read_rows(r, &c, 2 * i);
    for (int64_t i = 0; i < a->layers && !c.rc; i++)
        turned ? read_columns(r, &c, 2 * i + 1) : read_rows(r, &c, 2 * i + 1);
    if (!c.rc)
        check_end(r->f, &c);
    for (int64_t i = 0; i < 2 * a->layers && !c.rc; i++)
        if (!kv_all_finite(a->act, r->m->content.part[i].data[LM_KV_PLAIN],
                           lm_kv_about_bytes(a, i) / lm_dtype_size(a->act)))
            c.rc = wrong_state(r->f, "it has NaN or infinite numbers", e);
    return c.rc;
}

/* ---- Tokens ---- */

/* Ids of the vocabulary, and each position from 0 on once. */
static lm_code read_tokens(const reading *r, int64_t vocab, lm_err *e)
{
    const lm_kv_llama *f = r->f;
    lm_kv_content *t = &r->m->content;
    for (int64_t i = 0; i < f->n_ids; i++) {
        int32_t id = number_at(f, f->ids + 4 * (size_t)i);
        if (id < 0 || id >= vocab)
            return wrong_state(f, "an id is not in the vocabulary", e);
        if (i < f->cells)
            t->ids[i] = id;
        else
            r->m->about.next = id;
    }
    for (int64_t i = 0; i < f->cells; i++)
        t->positions[i] = -1;
    for (int64_t i = 0; i < f->cells; i++) {
        int64_t p = position(f, i);
        if (p < 0 || p >= f->cells || t->positions[p] >= 0)
            return wrong_state(f, "its positions are not 0, 1, 2, ...", e);
        t->positions[p] = (int32_t)p;
    }
    return LM_OK;
}

lm_code lm_kv_llama_read(const lm_kv_llama *f, const lm_kv_about *a, bool pairs, int64_t vocab,
                         lm_kv_image **out, lm_err *e)
{
    lm_kv_about own = *a;
    reading r = { .f = f, .pairs = pairs };
    int64_t width = 0;
    *out = NULL;
    own.tokens = f->cells;
    own.has_next = lm_kv_llama_has_next(f);
    for (int64_t i = 0; i < a->layers; i++)
        if (a->kv_heads[i] * a->head_dim[i] > width)
            width = a->kv_heads[i] * a->head_dim[i];
    lm_code rc = lm_kv_image_new(&own, &r.m, e);
    rc = rc ? rc : lm_alloc_n(&r.row, (size_t)width, sizeof *r.row, "a token", e);
    rc = rc ? rc : read_tokens(&r, vocab, e);
    rc = rc ? rc : read_parts(&r, e);
    lm_free(r.row);
    if (rc)
        lm_kv_image_free(r.m);
    else
        *out = r.m;
    return rc;
}
