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

static lm_code wrong_tensor(const reader *d, const char *name, const char *what, lm_err *e)
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
    return strcmp(hex, want) ? wrong_tensor(d, t->name, "its checksum is wrong", e) : LM_OK;
}

static lm_code read_ids(const reader *d, const lm_st_tensor *t, lm_err *e)
{
    const int32_t *ids = d->c->ids;
    lm_code rc = read_bytes(d, t, d->c->ids, e);
    for (int64_t i = 0; i < d->f->about.tokens && !rc; i++)
        if (ids[i] < 0 || ids[i] >= d->r->vocab)
            rc = wrong_tensor(d, t->name, "an id is not in the vocabulary", e);
    if (!rc && d->f->about.has_next && d->f->about.next >= d->r->vocab)
        rc = wrong_tensor(d, "next", "an id is not in the vocabulary", e);
    return rc;
}

/* n positions of each head. */
static lm_code read_positions(const reader *d, const lm_st_tensor *t, int32_t *p, int64_t heads,
                              int64_t n, lm_err *e)
{
    lm_code rc = read_bytes(d, t, p, e);
    for (int64_t i = 0; i < heads * n && !rc; i++)
        if (p[i] < 0 || p[i] >= d->r->context || (i % n && p[i] <= p[i - 1]))
            rc = wrong_tensor(d, t->name, "positions do not rise below the end of the context", e);
    return rc;
}

/* The places of a layer's rows in a cache, for each head. */
static lm_code read_order(const reader *d, const lm_st_tensor *t, int32_t *order, int64_t heads,
                          int64_t n, lm_err *e)
{
    bool *seen;
    lm_code rc = read_bytes(d, t, order, e);
    rc = rc ? rc : lm_alloc_n(&seen, (size_t)n, sizeof *seen, "rows of a cache", e);
    if (rc)
        return rc;
    for (int64_t h = 0; h < heads && !rc; h++, order += n) {
        memset(seen, 0, (size_t)n * sizeof *seen);
        for (int64_t i = 0; i < n && !rc; i++)
            if (order[i] < 0 || order[i] >= n || seen[order[i]])
                rc = wrong_tensor(d, t->name, "it is not a permutation of the rows", e);
            else
                seen[order[i]] = true;
    }
    lm_free(seen);
    return rc;
}

static lm_code read_masses(const reader *d, const lm_st_tensor *t, float *mass, lm_err *e)
{
    lm_code rc = read_bytes(d, t, mass, e);
    if (!rc && !kv_all_finite(LM_DTYPE_F32, mass, (size_t)t->count))
        rc = wrong_tensor(d, t->name, "it has NaN or infinite numbers", e);
    return rc;
}

/* A state, or the rows of its convolution. */
static lm_code read_state(const reader *d, const lm_st_tensor *t, const kv_tensor *what, lm_err *e)
{
    const int64_t layer = what->part / 2;
    void *dst = what->kind == KV_STATE ? (void *)d->c->state[layer] : d->c->conv[layer];
    lm_code rc = read_bytes(d, t, dst, e);
    if (!rc && !kv_all_finite(t->dtype, dst, (size_t)t->count))
        rc = wrong_tensor(d, t->name, "it has NaN or infinite numbers", e);
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
        rc = wrong_tensor(d, t->name, "it has NaN or infinite numbers", e);
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
    if (what.kind == KV_ORDER)
        return read_order(d, t, d->c->order[layer], a->kv_heads[layer], a->rows[layer], e);
    if (what.kind == KV_MASS)
        return read_masses(d, t, d->c->mass[layer], e);
    if (what.kind == KV_STATE || what.kind == KV_CONV)
        return read_state(d, t, &what, e);
    return read_section(d, t, &what, e);
}

/* The sections of a part against each other. */
static lm_code check_part(const reader *d, int64_t part, lm_err *e)
{
    const lm_kv_shape s = lm_kv_about_shape(&d->f->about, part);
    const lm_kv_part *p = &d->c->part[part];
    const char *bad = lm_kv_part_wrong(&s, p);
    char name[KV_NAME];
    kv_tensor what = kv_section_of(&d->f->about, part, LM_KV_PLAIN);
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
    return bad ? wrong_tensor(d, name, bad, e) : LM_OK;
}

/* A coded tensor to d->room, and to what is kept. */
static lm_code read_coded(reader *d, const lm_st_tensor *t, lm_err *e)
{
    kv_tensor what = kv_tensor_of(t->name);
    kv_kept *k = kv_kept_of(d->f, &what);
    lm_code rc = lm_grow(&d->room, &d->cap, (size_t)t->bytes + 1, 1, "a coded cache", e);
    rc = rc ? rc : read_bytes(d, t, d->room, e);
    if (rc || !k || k->data)
        return rc;
    rc = lm_alloc_n(&k->data, (size_t)t->bytes + 1, 1, "a coded cache", e);
    if (!rc)
        memcpy(k->data, d->room, (size_t)t->bytes), k->bytes = (size_t)t->bytes;
    return rc;
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
        return wrong_tensor(d, t->name, "it precedes the tables of its level", e);
    if (rc) /* it has its place */
        return rc;
    rc = lm_cachegen_decode(d->tables[level], d->room, (size_t)t->bytes, &d->rows, chunk, d->cpu,
                            d->par, e);
    if (rc == LM_EFORMAT)
        lm_err_in(e, "%s: %s", d->f->where, t->name);
    return rc;
}

/* ---- How fast chunks come ---- */

typedef struct {
    lm_kv_offer o;
    uint64_t *bytes;
    int64_t *rows;
    lm_kv_transfer *done; /* what precedes chunks, and chunks */
    int64_t n;
    double mark; /* lm_now() at the end of the last one */
} pace;

static void close_pace(pace *p)
{
    lm_free(p->bytes);
    lm_free(p->rows);
    lm_free(p->done);
}

/* What each chunk is offered in; on a stream with all its levels, which pass, in the place of `level`. */
static lm_code open_pace(const reader *d, int level, pace *p, lm_err *e)
{
    const lm_kv_reading *r = d->r;
    int64_t chunks = lm_cachegen_chunks(d->rows.tokens);
    unsigned levels = r->level < 0 ? d->f->levels : 1u << r->level;
    size_t n = (size_t)chunks * LM_CACHEGEN_LEVELS;
    *p = (pace){ .mark = lm_now() };
    if (lm_alloc_n(&p->bytes, n, sizeof *p->bytes, "chunks of a cache", e) ||
        lm_alloc_n(&p->rows, (size_t)chunks, sizeof *p->rows, "chunks of a cache", e) ||
        lm_alloc_n(&p->done, (size_t)chunks + 1, sizeof *p->done, "chunks of a cache", e))
        return e->code;
    for (size_t i = 0; i < n; i++) {
        int64_t c = (int64_t)(i / LM_CACHEGEN_LEVELS);
        int l = (int)(i % LM_CACHEGEN_LEVELS);
        uint64_t bytes = d->f->levels >> l & 1 ? lm_kv_file_chunk_bytes(d->f, c, l) : 0;
        if (d->f->stream)
            p->bytes[c * LM_CACHEGEN_LEVELS + level] += bytes;
        else if (levels >> l & 1)
            p->bytes[i] = bytes;
        p->rows[c] = lm_cachegen_chunk_tokens(d->rows.tokens, c);
    }
    bool none = r->level >= 0 || !(r->deadline > 0);
    p->o = (lm_kv_offer){ .chunks = chunks,
                          .levels = LM_CACHEGEN_LEVELS,
                          .bytes = p->bytes,
                          .rows = p->rows,
                          .compute = r->compute && r->level < 0,
                          .row_seconds = r->row_seconds,
                          .rows_behind = r->rows_behind,
                          .deadline = none ? INFINITY : r->deadline };
    return LM_OK;
}

/* `bytes` have come since the last transfer. */
static void count_transfer(pace *p, double bytes)
{
    double now = lm_now();
    p->done[p->n++] = (lm_kv_transfer){ bytes, now - p->mark };
    p->mark = now;
}

static void choose(const lm_kv_reading *r, int64_t chunk, int how)
{
    if (r->chosen)
        r->chosen[chunk] = how;
}

static lm_code compute_chunk(const reader *d, pace *p, int64_t chunk, lm_err *e)
{
    double begin = lm_now();
    int64_t rows = p->o.rows[chunk];
    lm_code rc = d->r->compute(d->r->ctx, chunk * LM_CACHEGEN_CHUNK, rows, e);
    p->mark = lm_now();
    p->o.row_seconds = (p->mark - begin) / (double)rows;
    choose(d->r, chunk, LM_KV_COMPUTE);
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

/* True if the rest of the stream would come too late, and computing it takes less time. */
static bool is_late(const reader *d, const pace *p, int64_t chunk, int level)
{
    double rate = lm_kv_stream_rate(p->done, p->n);
    double wait = lm_kv_stream_seconds(&p->o, chunk, level, rate);
    return p->o.compute && wait > p->o.deadline - (lm_now() - d->r->begin) &&
           lm_kv_stream_seconds(&p->o, chunk, LM_KV_COMPUTE, rate) < wait;
}

static lm_code compute_rest(const reader *d, pace *p, int64_t chunk, lm_err *e)
{
    lm_code rc = LM_OK;
    for (; chunk < p->o.chunks && !rc; chunk++)
        rc = compute_chunk(d, p, chunk, e);
    return rc;
}

/* All but the chunks of other levels; ids, positions and the chunks before one may come behind it, and then it cannot be
 * computed. */
static lm_code read_passing(reader *d, int level, pace *p, lm_err *e)
{
    const lm_st_tensor *t;
    double bytes = 0;
    int64_t next = 0;
    int texts = 0;
    lm_code rc;
    while (!(rc = lm_st_stream_next(d->f->stream, &t, e)) && t) {
        kv_tensor what = kv_tensor_of(t->name);
        bool chunk = what.kind == KV_CHUNK && what.level == level;
        if (chunk && !next && !p->n)
            count_transfer(p, bytes);
        if (chunk && texts == 2 && what.chunk == next && is_late(d, p, next, level))
            return compute_rest(d, p, next, e);
        if (what.kind != KV_TABLES && what.kind != KV_CHUNK)
            rc = read_whole(d, t, e);
        else if (what.level == level && what.kind == KV_TABLES)
            rc = read_tables(d, t, level, e);
        else if (chunk)
            rc = read_chunk(d, t, what.chunk, level, e);
        else if (kv_kept_of(d->f, &what))
            rc = read_coded(d, t, e);
        if (rc)
            return rc;
        texts += what.kind == KV_IDS || what.kind == KV_POSITIONS;
        bytes += (double)t->bytes;
        if (chunk) {
            choose(d->r, what.chunk, level);
            count_transfer(p, (double)p->bytes[what.chunk * LM_CACHEGEN_LEVELS + level]);
            next += what.chunk == next;
        }
    }
    return rc;
}

static lm_code read_stream(reader *d, int level, lm_err *e)
{
    pace p = { 0 };
    lm_code rc = open_pace(d, level, &p, e);
    rc = rc ? rc : read_passing(d, level, &p, e);
    close_pace(&p);
    return rc;
}

/* ---- A file: only what is chosen is read ---- */

static const lm_st_tensor *named(const reader *d, kv_tensor what)
{
    char name[KV_NAME];
    kv_tensor_name(&what, name);
    return lm_st_find(d->f->st, name);
}

static lm_code load_chunk(reader *d, pace *p, int64_t chunk, int level, lm_err *e)
{
    const lm_st_tensor *t = named(d, (kv_tensor){ .kind = KV_TABLES, .level = level });
    lm_code rc = LM_OK;
    double bytes = 0;
    p->mark = lm_now();
    if (!d->tables[level]) {
        rc = read_tables(d, t, level, e);
        bytes += (double)t->bytes;
    }
    t = named(d, (kv_tensor){ .kind = KV_CHUNK, .chunk = chunk, .level = level });
    rc = rc ? rc : read_chunk(d, t, chunk, level, e);
    count_transfer(p, bytes + (double)t->bytes);
    choose(d->r, chunk, level);
    return rc;
}

static lm_code read_chunks(reader *d, pace *p, lm_err *e)
{
    lm_code rc = LM_OK;
    for (int64_t c = 0; c < p->o.chunks && !rc; c++) {
        int how = lm_kv_stream_choose(&p->o, c, lm_now() - d->r->begin, p->done, p->n);
        rc = how == LM_KV_COMPUTE ? compute_chunk(d, p, c, e) : load_chunk(d, p, c, how, e);
    }
    return rc;
}

/* What is kept and was not decoded. */
static lm_code read_kept(reader *d, lm_err *e)
{
    lm_code rc = LM_OK;
    for (size_t i = 0; i < lm_st_count(d->f->st) && !rc; i++) {
        const lm_st_tensor *t = lm_st_at(d->f->st, i);
        kv_tensor what = kv_tensor_of(t->name);
        bool coded = what.kind == KV_TABLES || what.kind == KV_CHUNK;
        const kv_kept *k = coded ? kv_kept_of(d->f, &what) : NULL;
        if (k && !k->data)
            rc = read_coded(d, t, e);
    }
    return rc;
}

static lm_code read_file(reader *d, lm_err *e)
{
    const lm_st *st = d->f->st;
    pace p = { 0 };
    double bytes = 0;
    lm_code rc = d->f->levels ? open_pace(d, 0, &p, e) : LM_OK;
    for (size_t i = 0; i < lm_st_count(st) && !rc; i++) {
        const lm_st_tensor *t = lm_st_at(st, i);
        kv_tensor_kind kind = kv_tensor_of(t->name).kind;
        if (kind == KV_TABLES || kind == KV_CHUNK)
            continue;
        rc = read_whole(d, t, e);
        bytes += (double)t->bytes;
    }
    if (!rc && d->f->levels) {
        count_transfer(&p, bytes);
        rc = read_chunks(d, &p, e);
        rc = rc ? rc : read_kept(d, e);
    }
    close_pace(&p);
    return rc;
}

/* ---- All ---- */

static lm_code check_level(const lm_kv_file *f, const lm_kv_reading *r, lm_err *e)
{
    char list[LM_CACHEGEN_SHOWN];
    if (r->level < 0 || (r->level < LM_CACHEGEN_LEVELS && f->levels >> r->level & 1))
        return LM_OK;
    if (!f->levels)
        return lm_fail(e, LM_EUSAGE, f->where, "leave the level out",
                       "level %d is requested, but it is not coded in levels", r->level);
    return lm_fail(e, LM_EUSAGE, f->where, "choose one that it has",
                   "level %d is requested, it has %s", r->level,
                   lm_cachegen_show_levels(f->levels, list));
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

/* Room for the levels that are to be kept. */
static lm_code make_kept(lm_kv_file *f, unsigned keep, lm_err *e)
{
    size_t n = (size_t)lm_cachegen_chunks(f->about.tokens) + 1;
    lm_code rc = LM_OK;
    for (int l = 0; l < LM_CACHEGEN_LEVELS && !rc; l++)
        if ((f->levels & keep) >> l & 1 && !f->kept[l])
            rc = lm_alloc_n(&f->kept[l], n, sizeof *f->kept[l], "levels of a cache", e);
    return rc;
}

lm_code lm_kv_file_read(lm_kv_file *f, const lm_kv_reading *r, const lm_kv_content *c,
                        lm_cpu_level cpu, lm_par *par, lm_err *e)
{
    reader d = { .f = f, .r = r, .c = c, .cpu = cpu, .par = par };
    lm_code rc = check_level(f, r, e);
    if (!rc && f->passed)
        rc = lm_fail(e, LM_EUSAGE, f->where, NULL, "the stream was read already");
    rc = rc ? rc : make_kept(f, r->keep, e);
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
