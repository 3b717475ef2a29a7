/* SPDX-License-Identifier: Apache-2.0 */
/* lmz_read.c -- any bytes of an opened .lmz: chunks found, read, decoded, checked. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/hash.h"
#include "base/text.h"
#include "format/lmz_impl.h"

/* ---- Desks ---- */

lm_code lmz_desk_init(lmz_desk *d, lm_err *e)
{
    size_t room = LMZ_CHUNK_RECORD + lm_lmz_chunk_bound(LM_LMZ_CHUNK);
    lm_code rc = d->coder ? LM_OK : lm_lmz_coder_new(0, lm_cpu_detect(), &d->coder, e);

    if (!rc && !d->record)
        rc = lm_realloc_n(&d->record, room, 1, "a coded chunk", e);
    return rc;
}

void lmz_desk_fini(lmz_desk *d)
{
    lm_lmz_coder_free(d->coder);
    lm_free(d->record);
    lm_free(d->raw);
    lm_free(d->base);
    *d = (lmz_desk){ 0 };
}

/* The free desk that holds the chunk, otherwise the one released longest ago. */
static lmz_desk *choose(lm_lmz *z, uint64_t chunk)
{
    lmz_desk *best = NULL;

    for (int i = 0; i < z->n_desks; i++) {
        lmz_desk *d = &z->desks[i];
        if (d->taken)
            continue;
        if (d->held == chunk + 1)
            return d;
        if (!best || d->used < best->used)
            best = d;
    }
    return best;
}

lm_code lmz_desk_take(const lm_lmz *zc, uint64_t chunk, lmz_desk **out, lm_err *e)
{
    lm_lmz *z = (lm_lmz *)(uintptr_t)zc; /* desks are a cache, so readers remain const */
    lmz_desk *d;

    pthread_mutex_lock(&z->lock);
    while (!(d = choose(z, chunk)))
        pthread_cond_wait(&z->free_desk, &z->lock);
    d->taken = true;
    pthread_mutex_unlock(&z->lock);
    lm_code rc = lmz_desk_init(d, e);
    if (rc)
        lmz_desk_give(z, d);
    else
        *out = d;
    return rc;
}

void lmz_desk_give(const lm_lmz *zc, lmz_desk *d)
{
    lm_lmz *z = (lm_lmz *)(uintptr_t)zc;

    pthread_mutex_lock(&z->lock);
    d->taken = false;
    d->used = ++z->clock;
    pthread_cond_signal(&z->free_desk);
    pthread_mutex_unlock(&z->lock);
}

/* ---- One chunk ---- */

lm_code lmz_decode(lmz_desk *d, const lm_bundle *base, const lmz_chunk_rec *r,
                   const char *base_file, uint64_t base_from, const uint8_t *coded, uint8_t *dst,
                   lm_err *e)
{
    const uint8_t *from = NULL;
    lm_err why = { 0 };
    lm_code rc = LM_OK;

    if (base_file && !base)
        return lm_fail(e, LM_EUSAGE, "", "give its base",
                       "it is a delta against a base that is not open");
    if (base_file && !d->base)
        rc = lm_realloc_n(&d->base, LM_LMZ_CHUNK, 1, "a chunk of the base", e);
    if (!rc && base_file)
        rc = lmz_base_bytes(base, base_file, base_from, r->raw, d->base, &from, e);
    if (!rc)
        rc = lm_lmz_decode(d->coder, r->kind, coded, r->coded, from, dst, r->raw, &why);
    if (from)
        lmz_base_forget(base, base_file, base_from, r->raw);
    if (why.code)
        return lm_fail(e, rc, "", NULL, "%s", why.what);
    if (!rc && lm_hash64(dst, r->raw, 0) != r->raw_check)
        rc = lm_fail(e, LM_EFORMAT, "", LMZ_DAMAGED,
                     "its bytes do not have the checksum %016" PRIx64, r->raw_check);
    return rc;
}

/* Check that the record just read is that of chunk c. */
static bool record_fits(const lmz_part *p, const lmz_chunk *c, const lmz_chunk_rec *r)
{
    return r->file == p->file && r->part == p->number && r->offset == c->offset &&
           r->raw == lmz_chunk_raw(p, c->offset) && r->coded == c->coded &&
           r->kind == p->pub.kind && r->flags == p->flags;
}

lm_code lmz_try_chunk(const lm_lmz *z, lmz_desk *d, const lmz_chunk *c, uint8_t *dst, bool coded,
                      lm_err *why)
{
    const lmz_part *p = &z->table.part[c->part];
    lmz_chunk_rec r;
    lm_code rc = lmz_pread_all(z, c->at, d->record, LMZ_CHUNK_RECORD + c->coded, why);

    if (rc)
        return rc;
    if (!lmz_get_chunk(d->record, LMZ_CHUNK_RECORD, &r) || !record_fits(p, c, &r))
        return lm_fail(why, LM_EFORMAT, "", NULL, "its record is damaged");
    if (coded && lm_hash64(d->record + LMZ_CHUNK_RECORD, c->coded, 0) != r.coded_check)
        return lm_fail(why, LM_EFORMAT, "", NULL, "its coded bytes are damaged");
    return lmz_decode(d, z->base, &r, p->base_file, p->base_from + (c->offset - p->pub.offset),
                      d->record + LMZ_CHUNK_RECORD, dst, why);
}

/* Read and decode chunk c to dst, which has lmz_chunk_raw bytes; errors name the chunk. */
static lm_code load_chunk(const lm_lmz *z, lmz_desk *d, const lmz_chunk *c, uint8_t *dst, lm_err *e)
{
    const lm_lmz_part *p = &z->table.part[c->part].pub;
    lm_err why = { 0 };
    lm_code rc = lmz_try_chunk(z, d, c, dst, false, &why);

    return rc ? lmz_fail_in(z, p->file, p, (c->offset - p->offset) / LM_LMZ_CHUNK, &why, e) : LM_OK;
}

/* ---- A range ---- */

typedef struct {
    const lm_lmz *z;
    size_t file;
    uint64_t from, end;   /* in the file */
    size_t first;         /* chunk of the table that holds `from` */
    uint8_t *dst;         /* of byte `from` */
    pthread_mutex_t lock; /* of the failure */
    uint64_t fault;       /* the first chunk that failed */
    lm_code rc;
    lm_err err;
} range;

/* Decode chunk i of the table, or its part inside the range. */
static lm_code copy_chunk(range *r, size_t i, lm_err *e)
{
    const lm_lmz *z = r->z;
    const lmz_chunk *c = &z->table.chunk[i];
    size_t raw = lmz_chunk_raw(&z->table.part[c->part], c->offset);
    uint64_t from = c->offset > r->from ? c->offset : r->from;
    uint64_t end = c->offset + raw < r->end ? c->offset + raw : r->end;
    lmz_desk *d;
    lm_code rc = lmz_desk_take(z, i, &d, e);

    if (rc)
        return rc;
    if (d->held == i + 1) {
        memcpy(r->dst + (from - r->from), d->raw + (from - c->offset), end - from);
    } else if (end - from == raw) {
        rc = load_chunk(z, d, c, r->dst + (from - r->from), e);
    } else {
        d->held = 0;
        if (!d->raw)
            rc = lm_realloc_n(&d->raw, LM_LMZ_CHUNK, 1, "a decoded chunk", e);
        rc = rc ? rc : load_chunk(z, d, c, d->raw, e);
        if (!rc) {
            d->held = i + 1;
            memcpy(r->dst + (from - r->from), d->raw + (from - c->offset), end - from);
        }
    }
    lmz_desk_give(z, d);
    return rc;
}

static void copy_chunks(void *ctx, int64_t begin, int64_t end, int who)
{
    range *r = ctx;

    (void)who;
    for (int64_t i = begin; i < end; i++) {
        lm_err e = { 0 };
        lm_code rc = copy_chunk(r, r->first + (size_t)i, &e);

        if (!rc)
            continue;
        pthread_mutex_lock(&r->lock);
        if (!r->rc || (uint64_t)i < r->fault) { /* the same failure for any number of threads */
            r->fault = (uint64_t)i;
            r->rc = rc;
            r->err = e;
        }
        pthread_mutex_unlock(&r->lock);
    }
}

/* Check that no chunk between byte `from` and `end` is lost. */
static lm_code find_chunks(range *r, size_t *n, lm_err *e)
{
    const lmz_table *t = &r->z->table;
    const lmz_file *f = &t->file[r->file];
    uint64_t at = r->from;

    *n = 0;
    while (at < r->end) {
        const lmz_part *p = lmz_table_part_at(t, r->file, at);
        uint64_t number = p ? (at - p->pub.offset) / LM_LMZ_CHUNK : UINT64_MAX;
        const lmz_chunk *c =
            p ? lmz_table_chunk_at(t, r->file, p->pub.offset + number * LM_LMZ_CHUNK) : NULL;

        if (!c)
            return lmz_fail_at(r->z, f->pub->name, p ? &p->pub : NULL, number, LM_EFORMAT,
                               "it is lost", e);
        if (!*n)
            r->first = (size_t)(c - t->chunk);
        ++*n;
        at = c->offset + lmz_chunk_raw(p, c->offset);
    }
    return LM_OK;
}

lm_code lm_lmz_pread(const lm_lmz *z, size_t file, uint64_t from, void *dst, size_t bytes,
                     lm_err *e)
{
    range r = { .z = z, .file = file, .from = from, .end = from + bytes, .dst = dst };
    const lm_bundle_file *f = z->table.file[file].pub;
    size_t n = 0;

    if (from > f->bytes || bytes > f->bytes - from)
        return lm_fail(e, LM_EUSAGE, z->where, NULL,
                       "%zu byte%s from %" PRIu64 " requested from '%s', which has %" PRIu64, bytes,
                       lm_plural(bytes), from, f->name, f->bytes);
    lm_code rc = find_chunks(&r, &n, e);
    if (rc)
        return rc;
    if (n == 1) /* without waiting for a pool */
        return copy_chunk(&r, r.first, e);
    pthread_mutex_init(&r.lock, NULL);
    lm_par_for(z->par, (int64_t)n, 1, copy_chunks, &r);
    pthread_mutex_destroy(&r.lock);
    if (r.rc)
        *e = r.err;
    return r.rc;
}

/* ---- Forward ---- */

lm_code lm_lmz_next(lm_lmz *z, const lm_bundle_file **f, lm_err *e)
{
    if (z->stream)
        return lmz_stream_next(z, f, e);
    *f = z->next_file < z->table.files ? z->table.file[z->next_file++].pub : NULL;
    z->forward_at = 0;
    return LM_OK;
}

static size_t up_to_chunk(const lm_lmz *z, size_t file, uint64_t from, size_t n)
{
    const lmz_part *p = lmz_table_part_at(&z->table, file, from);
    uint64_t at = p ? from - p->pub.offset : 0;
    uint64_t end = at - at % LM_LMZ_CHUNK + LM_LMZ_CHUNK; /* of the chunk, in the part */

    if (!p)
        return n;
    end = end < p->pub.raw ? end : p->pub.raw;
    return end - at < n ? (size_t)(end - at) : n;
}

lm_code lm_lmz_read(void *lmz, void *dst, size_t cap, size_t *got, lm_err *e)
{
    lm_lmz *z = lmz;

    if (z->stream)
        return lmz_stream_read(z, dst, cap, got, e);
    *got = 0;
    if (!z->next_file)
        return LM_OK;
    uint64_t left = z->table.file[z->next_file - 1].pub->bytes - z->forward_at;
    size_t n = left < cap ? (size_t)left : cap;
    if (lm_par_threads(z->par) ==
        1) /* up to the end of the chunk, which remains in the cache of the desk */
        n = up_to_chunk(z, z->next_file - 1, z->forward_at, n);
    lm_code rc = lm_lmz_pread(z, z->next_file - 1, z->forward_at, dst, n, e);
    if (!rc) {
        z->forward_at += n;
        *got = n;
    }
    return rc;
}

/* ---- Codings of parts ---- */

static void add_look(lm_lmz_chunk_info *sum, const lm_lmz_chunk_info *one)
{
    for (int i = 0; i < one->n; i++) {
        if (i >= sum->n) {
            sum->plane[i] = one->plane[i];
            continue;
        }
        if (strcmp(sum->plane[i].coding, one->plane[i].coding))
            sum->plane[i].coding = "mixed";
        sum->plane[i].raw += one->plane[i].raw;
        sum->plane[i].coded += one->plane[i].coded;
    }
    sum->n = one->n > sum->n ? one->n : sum->n;
    if (one->delta != LM_LMZ_PLAIN)
        sum->delta = one->delta;
}

lm_code lm_lmz_part_planes(const lm_lmz *z, size_t part, lm_lmz_chunk_info *sum, lm_err *e)
{
    const lmz_part *p = &z->table.part[part];
    const lmz_file *f = &z->table.file[p->file];
    lmz_desk *d;
    lm_code rc = lmz_desk_take(z, UINT64_MAX - 1, &d, e);

    *sum = (lm_lmz_chunk_info){ 0 };
    if (rc)
        return rc;
    for (size_t i = p->pub.first; i < f->chunks && !rc; i++) {
        const lmz_chunk *c = &z->table.chunk[f->first_chunk + i];
        lm_lmz_chunk_info one;
        lm_err why = { 0 };

        if (c->part != part)
            break;
        rc = lmz_pread_all(z, c->at, d->record, LMZ_CHUNK_RECORD + c->coded, e);
        if (rc)
            break;
        rc = lm_lmz_chunk_look(p->pub.kind, d->record + LMZ_CHUNK_RECORD, c->coded,
                               lmz_chunk_raw(p, c->offset), &one, &why);
        if (rc)
            lmz_fail_in(z, p->pub.file, &p->pub, (c->offset - p->pub.offset) / LM_LMZ_CHUNK, &why,
                        e);
        else
            add_look(sum, &one);
    }
    lmz_desk_give(z, d);
    return rc;
}
