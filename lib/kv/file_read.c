/* SPDX-License-Identifier: Apache-2.0 */
/* file_read.c -- reads the tensors of kv-cache(5), each checked before it counts. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/hash.h"
#include "base/mem.h"
#include "kv/file_impl.h"

typedef struct {
    lm_kv_file *f;
    const lm_kv_reading *r;
    const lm_kv_content *c;
    lm_cachegen_rows rows; /* of a cache in chunks */
    lm_cpu_level cpu;
    lm_par *par;
    uint8_t *room; /* a coded tensor */
    size_t cap;
    lm_cachegen_part *part;
    lm_cachegen *tables[LM_CACHEGEN_LEVELS];
} reader;

/* ---- A tensor ---- */

static lm_code wrong(const reader *d, const char *name, const char *what, lm_err *e)
{
    lm_fail(e, LM_EFORMAT, name, "fetch or write it again", "%s", what);
    lm_err_in(e, "%s", d->f->where);
    return LM_EFORMAT;
}

/* All bytes of t to dst, checked; t is the current tensor of a stream. */
static lm_code read_bytes(const reader *d, const lm_st_tensor *t, void *dst, lm_err *e)
{
    const char *want = json_string_value(json_object_get(d->f->hashes, t->name));
    char hex[17];
    lm_code rc = d->f->st ? lm_st_read(d->f->st, t, 0, dst, (size_t)t->bytes, e)
                          : lm_st_stream_read(d->f->stream, dst, (size_t)t->bytes, e);
    if (rc)
        return rc;
    snprintf(hex, sizeof hex, "%016" PRIx64, lm_hash64(dst, (size_t)t->bytes, 0));
    return strcmp(hex, want) ? wrong(d, t->name, "its checksum is wrong", e) : LM_OK;
}

static lm_code read_ids(const reader *d, const lm_st_tensor *t, lm_err *e)
{
    const int32_t *ids = d->c->ids;
    lm_code rc = read_bytes(d, t, d->c->ids, e);
    for (int64_t i = 0; i < d->f->about.tokens && !rc; i++)
        if (ids[i] < 0 || ids[i] >= d->r->vocab)
            rc = wrong(d, t->name, "an id is not in the vocabulary", e);
    if (!rc && d->f->about.has_next && d->f->about.next >= d->r->vocab)
        rc = wrong(d, "next", "an id is not in the vocabulary", e);
    return rc;
}

/* n positions of each head. */
static lm_code read_positions(const reader *d, const lm_st_tensor *t, int32_t *p, int64_t heads,
                              int64_t n, lm_err *e)
{
    lm_code rc = read_bytes(d, t, p, e);
    for (int64_t i = 0; i < heads * n && !rc; i++)
        if (p[i] < 0 || p[i] >= d->r->context || (i % n && p[i] <= p[i - 1]))
            rc = wrong(d, t->name, "positions do not rise below the end of the context", e);
    return rc;
}

static lm_code read_section(const reader *d, const lm_st_tensor *t, const kv_tensor *what,
                            lm_err *e)
{
    const lm_kv_shape s = lm_kv_about_shape(&d->f->about, what->part);
    void *dst = d->c->part[what->part].data[what->section];
    lm_kv_section_size z;
    lm_code rc = lm_kv_section_size_of(&s, what->section, &z, e);
    rc = rc ? rc : read_bytes(d, t, dst, e);
    if (!rc && lm_kv_section_is_float(what->section) &&
        !kv_all_finite(z.dtype, dst, (size_t)t->count))
        rc = wrong(d, t->name, "it has NaN or infinite numbers", e);
    return rc;
}

/* A tensor that is not of a chunk. */
static lm_code read_whole(const reader *d, const lm_st_tensor *t, lm_err *e)
{
    const lm_kv_about *a = &d->f->about;
    kv_tensor what = kv_tensor_of(t->name);
    int64_t layer = what.part / 2;
    if (what.kind == KV_IDS)
        return read_ids(d, t, e);
    if (what.kind == KV_POSITIONS)
        return read_positions(d, t, d->c->positions, 1, a->tokens, e);
    if (what.kind == KV_AT)
        return read_positions(d, t, d->c->at[layer], a->kv_heads[layer], a->rows[layer], e);
    return read_section(d, t, &what, e);
}

/* The sections of a part against each other. */
static lm_code check_part(const reader *d, int64_t part, lm_err *e)
{
    const lm_kv_shape s = lm_kv_about_shape(&d->f->about, part);
    const lm_kv_part *p = &d->c->part[part];
    const char *bad = lm_kv_part_wrong(&s, p);
    char name[KV_NAME];
    kv_tensor what = { .kind = KV_ROWS, .part = part };
    kv_tensor_name(&what, name);
    for (int i = LM_KV_SP_INDEX; i <= LM_KV_SP_VALUE && p->data[i] && !bad; i++) {
        char section[KV_NAME];
        what.section = (lm_kv_section)i;
        kv_tensor_name(&what, section);
        const lm_st_tensor *t =
            d->f->st ? lm_st_find(d->f->st, section) : lm_st_stream_find(d->f->stream, section);
        if (t->dim[0] != lm_kv_part_outliers(&s, p))
            bad = "it has another number of outliers than its heads";
    }
    return bad ? wrong(d, name, bad, e) : LM_OK;
}

/* A coded tensor to d->room. */
static lm_code read_coded(reader *d, const lm_st_tensor *t, lm_err *e)
{
    lm_code rc = lm_grow(&d->room, &d->cap, (size_t)t->bytes + 1, 1, "a coded cache", e);
    return rc ? rc : read_bytes(d, t, d->room, e);
}

static lm_code read_tables(reader *d, const lm_st_tensor *t, int level, lm_err *e)
{
    int64_t parts = kv_parts(&d->f->about);
    lm_code rc = read_coded(d, t, e);
    if (rc)
        return rc;
    kv_level_parts(&d->f->about, level, d->part);
    rc = lm_cachegen_read(d->part, parts, d->room, (size_t)t->bytes, &d->tables[level], e);
    if (rc)
        lm_err_in(e, "%s: %s", d->f->where, t->name);
    return rc;
}

static lm_code read_chunk(reader *d, const lm_st_tensor *t, int64_t chunk, int level, lm_err *e)
{
    lm_code rc = read_coded(d, t, e);
    if (!rc && !d->tables[level])
        return wrong(d, t->name, "it precedes the tables of its level", e);
    rc = rc ? rc
            : lm_cachegen_decode(d->tables[level], d->room, (size_t)t->bytes, &d->rows, chunk,
                                 d->cpu, d->par, e);
    if (rc == LM_EFORMAT && d->tables[level])
        lm_err_in(e, "%s: %s", d->f->where, t->name);
    return rc;
}

/* ---- A stream: all levels pass ---- */

static int best_level(unsigned levels)
{
    int l = 0;
    while (levels && !(levels >> l & 1))
        l++;
    return l;
}

static void choose(const lm_kv_reading *r, int64_t chunk, int how)
{
    if (r->chosen)
        r->chosen[chunk] = how;
}

static lm_code read_stream(reader *d, int level, lm_err *e)
{
    const lm_st_tensor *t;
    lm_code rc;
    while (!(rc = lm_st_stream_next(d->f->stream, &t, e)) && t) {
        kv_tensor what = kv_tensor_of(t->name);
        if (what.kind != KV_TABLES && what.kind != KV_CHUNK)
            rc = read_whole(d, t, e);
        else if (what.level == level && what.kind == KV_TABLES)
            rc = read_tables(d, t, level, e);
        else if (what.level == level)
            rc = read_chunk(d, t, what.chunk, level, e);
        if (rc)
            return rc;
        if (what.kind == KV_CHUNK && what.level == level)
            choose(d->r, what.chunk, level);
    }
    return rc;
}

/* ---- A file: only what is chosen is read ---- */

static const lm_st_tensor *named(const reader *d, kv_tensor what)
{
    char name[KV_NAME];
    kv_tensor_name(&what, name);
    return lm_st_find(d->f->st, name);
}

static lm_code load_chunk(reader *d, int64_t chunk, int level, lm_kv_transfer *done, lm_err *e)
{
    const lm_st_tensor *t = named(d, (kv_tensor){ .kind = KV_TABLES, .level = level });
    double begin = lm_now();
    lm_code rc = LM_OK;
    done->bytes = 0;
    if (!d->tables[level]) {
        rc = read_tables(d, t, level, e);
        done->bytes += (double)t->bytes;
    }
    t = named(d, (kv_tensor){ .kind = KV_CHUNK, .chunk = chunk, .level = level });
    rc = rc ? rc : read_chunk(d, t, chunk, level, e);
    done->bytes += (double)t->bytes;
    done->seconds = lm_now() - begin;
    return rc;
}

/* What each chunk is offered in. */
static lm_code make_offer(const reader *d, lm_kv_offer *o, uint64_t **bytes, int64_t **rows,
                          lm_err *e)
{
    const lm_kv_reading *r = d->r;
    int64_t chunks = lm_cachegen_chunks(d->rows.tokens);
    unsigned levels = r->level < 0 ? d->f->levels : 1u << r->level;
    size_t n = (size_t)chunks * LM_CACHEGEN_LEVELS;
    lm_code rc = lm_alloc_n(bytes, n, sizeof **bytes, "chunks of a cache", e);
    rc = rc ? rc : lm_alloc_n(rows, (size_t)chunks, sizeof **rows, "chunks of a cache", e);
    for (size_t i = 0; i < n && !rc; i++) {
        int64_t c = (int64_t)(i / LM_CACHEGEN_LEVELS);
        int l = (int)(i % LM_CACHEGEN_LEVELS);
        (*bytes)[i] = levels >> l & 1 ? lm_kv_file_chunk_bytes(d->f, c, l) : 0;
        (*rows)[c] = lm_cachegen_chunk_tokens(d->rows.tokens, c);
    }
    bool none = r->level >= 0 || !(r->deadline > 0);
    *o = (lm_kv_offer){ .chunks = chunks,
                        .levels = LM_CACHEGEN_LEVELS,
                        .bytes = *bytes,
                        .rows = *rows,
                        .compute = r->compute && r->level < 0,
                        .row_seconds = r->row_seconds,
                        .rows_behind = r->rows_behind,
                        .deadline = none ? INFINITY : r->deadline };
    return rc;
}

static lm_code read_chunks(reader *d, lm_err *e)
{
    lm_kv_offer o = { 0 };
    lm_kv_transfer *done = NULL;
    uint64_t *bytes = NULL;
    int64_t *rows = NULL, n = 0;
    lm_code rc = make_offer(d, &o, &bytes, &rows, e);
    rc = rc ? rc : lm_alloc_n(&done, (size_t)o.chunks, sizeof *done, "chunks of a cache", e);
    for (int64_t c = 0; c < o.chunks && !rc; c++) {
        int how = lm_kv_stream_choose(&o, c, lm_now() - d->r->begin, done, n);
        rc = how == LM_KV_COMPUTE ? d->r->compute(d->r->ctx, c * LM_CACHEGEN_CHUNK, o.rows[c], e)
                                  : load_chunk(d, c, how, &done[n++], e);
        choose(d->r, c, how);
    }
    lm_free(bytes);
    lm_free(rows);
    lm_free(done);
    return rc;
}

static lm_code read_file(reader *d, lm_err *e)
{
    const lm_st *st = d->f->st;
    lm_code rc = LM_OK;
    for (size_t i = 0; i < lm_st_count(st) && !rc; i++) {
        const lm_st_tensor *t = lm_st_at(st, i);
        kv_tensor_kind kind = kv_tensor_of(t->name).kind;
        if (kind != KV_TABLES && kind != KV_CHUNK)
            rc = read_whole(d, t, e);
    }
    return rc || !d->f->levels ? rc : read_chunks(d, e);
}

/* ---- All ---- */

static lm_code check_level(const lm_kv_file *f, const lm_kv_reading *r, lm_err *e)
{
    char list[4 * LM_CACHEGEN_LEVELS] = "";
    if (r->level < 0 || (r->level < LM_CACHEGEN_LEVELS && f->levels >> r->level & 1))
        return LM_OK;
    if (!f->levels)
        return lm_fail(e, LM_EUSAGE, f->where, "leave the level out",
                       "level %d is requested, but it is not coded in levels", r->level);
    for (int l = 0; l < LM_CACHEGEN_LEVELS; l++)
        if (f->levels >> l & 1)
            snprintf(list + strlen(list), sizeof list - strlen(list), "%s%d", *list ? ", " : "", l);
    return lm_fail(e, LM_EUSAGE, f->where, NULL, "level %d is requested, it has %s", r->level,
                   list);
}

/* What chunks are decoded to. */
static lm_code make_rows(reader *d, lm_err *e)
{
    int64_t parts = kv_parts(&d->f->about);
    void **data;
    if (lm_alloc_n(&d->part, (size_t)parts, sizeof *d->part, "parts of a cache", e) ||
        lm_alloc_n(&data, (size_t)parts, sizeof *data, "parts of a cache", e))
        return e->code;
    for (int64_t i = 0; i < parts; i++)
        data[i] = d->c->part[i].data[LM_KV_PLAIN];
    d->rows = (lm_cachegen_rows){ d->f->about.act, d->f->about.tokens, data };
    return LM_OK;
}

lm_code lm_kv_file_read(lm_kv_file *f, const lm_kv_reading *r, const lm_kv_content *c,
                        lm_cpu_level cpu, lm_par *par, lm_err *e)
{
    reader d = { .f = f, .r = r, .c = c, .cpu = cpu, .par = par };
    lm_code rc = check_level(f, r, e);
    if (!rc && f->passed)
        rc = lm_fail(e, LM_EUSAGE, f->where, NULL, "the stream was read already");
    rc = rc ? rc : make_rows(&d, e);
    if (!rc && f->stream) {
        f->passed = true;
        rc = read_stream(&d, r->level < 0 ? best_level(f->levels) : r->level, e);
    } else if (!rc) {
        rc = read_file(&d, e);
    }
    for (int64_t i = 0; i < kv_parts(&f->about) && !rc; i++)
        rc = check_part(&d, i, e);
    for (int l = 0; l < LM_CACHEGEN_LEVELS; l++)
        lm_cachegen_free(d.tables[l]);
    lm_free((void *)(uintptr_t)d.rows.data);
    lm_free(d.part);
    lm_free(d.room);
    return rc;
}
