/* SPDX-License-Identifier: Apache-2.0 */
/* lmz_salvage.c -- opens a damaged .lmz without its index.
 *
 * Records are read one after another; where a record is damaged, the next mark with a correct check
 * is searched.  Records name their file, part and offset, so the range lost between two intact ones
 * is known.  The record of a file's end repeats its name; the header of a .safetensors, if intact,
 * repeats the names of its tensors. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/hash.h"
#include "format/lmz_impl.h"
#include "format/safetensors_table.h"

enum { WINDOW = 1 << 20, MOST_LOST = 64 /* most consecutive files that are lost completely */ };

typedef struct {
    lm_lmz *z;
    uint8_t *window;
    uint64_t from; /* of the window in the file */
    size_t have;
    uint64_t at;
    bool unnamed; /* the current file is a placeholder: its beginning is lost */
    size_t taken; /* records */
} walker;

/* At least `need` bytes at `at`, or fewer at the end of the file. */
static lm_code window_at(walker *w, uint64_t at, size_t need, const uint8_t **p, size_t *have,
                         lm_err *e)
{
    uint64_t left = w->z->size - at;

    if (at < w->from || at - w->from > w->have ||
        (w->have - (at - w->from) < need && w->have - (at - w->from) < left)) {
        size_t n = left < WINDOW ? (size_t)left : WINDOW;
        lm_code rc = lmz_pread_all(w->z, at, w->window, n, e);
        if (rc)
            return rc;
        w->from = at;
        w->have = n;
    }
    *p = w->window + (at - w->from);
    *have = w->have - (size_t)(at - w->from);
    return LM_OK;
}

/* ---- Placeholders for lost records ---- */

static lm_code lost_file(walker *w, lm_err *e)
{
    lmz_table *t = &w->z->table;
    char name[32];
    int n = snprintf(name, sizeof name, "lost.%zu", t->files);
    lmz_file_rec r = { .file = (uint32_t)t->files, .name = { name, (size_t)n } };

    return lmz_table_file(t, &r, 0, w->z->where, LM_EFORMAT, e);
}

/* Make file `number` the current one, with placeholders for it and earlier ones if they are
 * lost. */
static bool reach_file(walker *w, uint32_t number, lm_err *e)
{
    lmz_table *t = &w->z->table;

    if (number + UINT64_C(1) < t->files || number > t->files + MOST_LOST)
        return false;
    while (t->files <= number) {
        if (t->files && w->unnamed) /* its end is lost too: it ends with its last known part */
            t->file[t->files - 1].pub->bytes = t->file[t->files - 1].covered;
        if (lost_file(w, e))
            return false;
        t->file[t->files - 1].pub->bytes = INT64_MAX; /* until its end record is read */
        w->unnamed = true;
    }
    return !t->file[t->files - 1].whole;
}

/* A part for a chunk whose part's record is lost: it begins with this chunk and grows. */
static lm_code lost_part(walker *w, const lmz_chunk_rec *r, lm_err *e)
{
    lmz_part_rec p = {
        .file = r->file, .part = r->part, .kind = r->kind, .offset = r->offset, .raw = r->raw
    };
    lm_code rc = lmz_table_part(&w->z->table, &p, 0, true, w->z->where, e);

    if (!rc)
        w->z->table.part[w->z->table.parts - 1].flags = r->flags;
    return rc;
}

static void grow_part(walker *w, const lmz_chunk_rec *r)
{
    lmz_table *t = &w->z->table;
    lmz_file *f = &t->file[t->files - 1];
    lmz_part *p = &t->part[t->parts - 1];

    if (p->at || p->number != r->part || p->file != r->file || p->pub.raw % LM_LMZ_CHUNK ||
        r->offset != p->pub.offset + p->pub.raw || r->raw > f->pub->bytes - r->offset)
        return;
    p->pub.raw += r->raw;
    p->pub.chunks = lmz_chunks_of(p->pub.raw);
    f->covered = p->pub.offset + p->pub.raw;
}

/* ---- Records ---- */

static bool take_chunk(walker *w, const lmz_chunk_rec *r, lm_err *e)
{
    lmz_table *t = &w->z->table;

    if (!reach_file(w, r->file, e))
        return false;
    lmz_file *f = &t->file[t->files - 1];
    const lmz_part *p = f->parts ? &t->part[t->parts - 1] : NULL;

    if (!p || r->part > p->number) {
        if (lost_part(w, r, e))
            return false;
    } else {
        grow_part(w, r);
    }
    return !lmz_table_chunk(t, r, w->at, true, w->z->where, e);
}

static bool take_file(walker *w, const lmz_file_rec *r, lm_err *e)
{
    lmz_table *t = &w->z->table;

    if (r->file < t->files || (r->file > t->files && !reach_file(w, r->file - 1, e)))
        return false;
    if (t->files && w->unnamed)
        t->file[t->files - 1].pub->bytes = t->file[t->files - 1].covered;
    w->unnamed = false;
    return !lmz_table_file(t, r, w->at, w->z->where, LM_EFORMAT, e);
}

static bool take_end(walker *w, const lmz_end_rec *r, lm_err *e)
{
    lmz_table *t = &w->z->table;

    if (!reach_file(w, r->file, e))
        return false;
    lmz_file *f = &t->file[t->files - 1];
    if (w->unnamed) {
        if (r->bytes < f->covered ||
            lmz_table_rename(t, t->files - 1, r->name, r->bytes, w->z->where, e))
            return false;
        w->unnamed = false;
    }
    if (lmz_table_end(t, r, true, w->z->where, e))
        return false;
    f->end = w->at;
    return true;
}

/* Read an intact record at p; returns its bytes with its coded bytes, 0 if it cannot be here. */
static uint64_t take_record(walker *w, const uint8_t *p, size_t n)
{
    lm_err e = { 0 };
    uint64_t left = w->z->size - w->at;
    bool taken = false;
    union {
        lmz_file_rec file;
        lmz_part_rec part;
        lmz_chunk_rec chunk;
        lmz_end_rec end;
        lmz_index_rec index;
    } r;

    if (lmz_get_chunk(p, n, &r.chunk)) {
        if (r.chunk.coded > left - n)
            return 0;
        taken = take_chunk(w, &r.chunk, &e);
        n += r.chunk.coded;
    } else if (lmz_get_file(p, n, &r.file)) {
        taken = take_file(w, &r.file, &e);
    } else if (lmz_get_part(p, n, &r.part)) {
        taken = reach_file(w, r.part.file, &e) &&
                !lmz_table_part(&w->z->table, &r.part, w->at, true, w->z->where, &e);
    } else if (lmz_get_end(p, n, &r.end)) {
        taken = take_end(w, &r.end, &e);
    } else if (lmz_get_index(p, n, &r.index) && r.index.coded <= left - n) {
        return n + r.index.coded;
    }
    w->taken += taken;
    return taken ? n : 0;
}

/* The next mark after w->at, or the end of the file. */
static lm_code search(walker *w, lm_err *e)
{
    const uint8_t *p, *hit = NULL;
    size_t have;

    for (w->at++; w->at < w->z->size; w->at += have - 3) {
        lm_code rc = window_at(w, w->at, 4, &p, &have, e);
        if (rc)
            return rc;
        if (have < LMZ_AROUND)
            break;
        hit = memmem(p, have, (const char[]){ '\xf5', 'L', 'Z' }, 3);
        if (hit) {
            w->at += (uint64_t)(hit - p);
            return LM_OK;
        }
    }
    w->at = w->z->size;
    return LM_OK;
}

static lm_code walk(walker *w, lm_err *e)
{
    lm_lmz *z = w->z;
    lm_code rc = LM_OK;

    while (!rc && w->at < z->size) {
        const uint8_t *p;
        size_t have, n;
        uint64_t whole = 0;

        rc = window_at(w, w->at, LMZ_AROUND + LMZ_FIELDS, &p, &have, e);
        if (rc)
            return rc;
        n = have >= LMZ_HEAD ? lmz_record_size(p) : 0;
        if (n && n <= have && lmz_record_ok(p, n))
            whole = take_record(w, p, n);
        if (whole)
            w->at += whole;
        else
            rc = search(w, e);
    }
    if (!rc && !w->taken)
        return lm_fail(e, LM_EFORMAT, z->where, "check that it is an .lmz file",
                       "no record of an .lmz is found in it");
    if (w->unnamed)
        z->table.file[z->table.files - 1].pub->bytes = z->table.file[z->table.files - 1].covered;
    return rc;
}

/* ---- Names of tensors whose records are lost ---- */

/* The tensor whose data include this byte; NULL if no tensor does. */
static const lm_st_tensor *tensor_at(const lm_st_table *st, uint64_t at)
{
    size_t lo = 0, hi = st->n;

    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (st->tensor[mid].offset <= at)
            lo = mid + 1;
        else
            hi = mid;
    }
    while (lo && !st->tensor[lo - 1].bytes)
        lo--;
    return lo && at - st->tensor[lo - 1].offset < st->tensor[lo - 1].bytes ? &st->tensor[lo - 1]
                                                                           : NULL;
}

/* Part p, whose record is lost, may be a tensor of the header st; its data begin at `data`. */
static void name_part(lmz_table *t, lmz_part *p, const lm_st_table *st, uint64_t data)
{
    const lmz_file *f = &t->file[p->file];
    const lmz_part *last = &t->part[f->first_part + f->parts - 1];
    uint64_t before = p[-1].pub.offset + p[-1].pub.raw; /* part 0 is the header */
    uint64_t after = p == last ? f->pub->bytes : p[1].pub.offset;
    const lm_st_tensor *x;
    char *name;
    lm_err e = { 0 };

    if (p->at || !(p->flags & LMZ_PART_NAMED) || p->pub.offset < data)
        return;
    x = tensor_at(st, p->pub.offset - data);
    if (!x || data + x->offset < before || data + x->offset + x->bytes > after ||
        p->pub.offset + p->pub.raw > data + x->offset + x->bytes ||
        (p->pub.offset - data - x->offset) % LM_LMZ_CHUNK || /* earlier chunks may be lost too */
        lm_arena_strdup(t->arena, &name, x->name, strlen(x->name), &e))
        return;
    p->pub.tensor = name;
    p->pub.dtype = x->dtype_name;
    p->pub.offset = data + x->offset;
    p->pub.raw = x->bytes;
    p->pub.chunks = lmz_chunks_of(x->bytes);
}

/* Read the header of file f, if it is intact, for the names of its parts. */
static void name_parts(lm_lmz *z, size_t f)
{
    lmz_table *t = &z->table;
    const lmz_part *head = t->file[f].parts ? &t->part[t->file[f].first_part] : NULL;
    lm_st_table st = { 0 };
    char *text = NULL;
    lm_err e = { 0 };

    if (!head || head->number || head->pub.raw <= 8 || head->pub.raw > LM_ST_MAX_HEADER ||
        head->pub.offset || lm_realloc_n(&text, head->pub.raw, 1, "a header", &e))
        return;
    if (!lm_lmz_pread(z, f, 0, text, head->pub.raw, &e) &&
        !lm_st_table_parse(&st, text + 8, head->pub.raw - 8, UINT64_MAX, z->where, &e))
        for (size_t i = 1; i < t->file[f].parts; i++)
            name_part(t, &t->part[t->file[f].first_part + i], &st, head->pub.raw);
    lm_st_table_fini(&st);
    lm_free(text);
}

/* ---- Opening ---- */

/* Read the header, if it is intact; returns the position of the first record. */
static lm_code try_header(lm_lmz *z, uint64_t *first, lm_err *e)
{
    uint8_t p[LMZ_HEADER + LMZ_BASE_NAME];
    lmz_header h;
    size_t n = 0;
    lm_code rc = LM_OK;

    *first = 0;
    if (z->size >= LMZ_HEADER)
        rc = lmz_pread_all(z, 0, p, LMZ_HEADER, e);
    if (!rc && z->size >= LMZ_HEADER)
        n = lmz_header_size(p);
    if (rc || !n || n > z->size)
        return rc;
    rc = lmz_pread_all(z, LMZ_HEADER, p + LMZ_HEADER, n - LMZ_HEADER, e);
    if (rc || !lmz_get_header(p, n, &h))
        return rc;
    *first = n;
    return lmz_keep_header(z, p, n, e);
}

/* Without the base, the tensors that need it are lost. */
static void try_base(lm_lmz *z, const char *path, const lm_bundle_opts *o)
{
    lm_err e = { 0 };

    if (z->header.delta)
        (void)!lmz_base_open(path, path, &z->header, o, &z->base, &e);
    else if (!z->head.len && o && o->base) { /* the header is lost: use the caller's base */
        lm_bundle_opts deeper = *o;
        deeper.base = NULL;
        if (lm_bundle_open(o->base, &deeper, &z->base, &e) || !lm_bundle_random(z->base)) {
            lm_bundle_close(z->base);
            z->base = NULL;
        }
    }
}

static lm_code open_damaged(const char *path, const lm_bundle_opts *o, lm_lmz **out, lm_err *e)
{
    lm_lmz *z = NULL;
    walker w = { 0 };
    lm_code rc = lmz_new(path, o, &z, e);

    rc = rc ? rc : lmz_open_fd(z, path, e);
    rc = rc ? rc : lm_realloc_n(&w.window, WINDOW, 1, "searching an .lmz", e);
    rc = rc ? rc : try_header(z, &w.at, e);
    w.z = z;
    rc = rc ? rc : walk(&w, e);
    lm_free(w.window);
    if (rc) {
        lm_lmz_free(z);
        return rc;
    }
    z->damaged = true;
    z->info.coded = z->size;
    for (size_t i = 0; i < z->table.files; i++)
        z->info.raw += z->table.file[i].pub->bytes;
    try_base(z, path, o);
    for (size_t i = 0; i < z->table.files; i++)
        name_parts(z, i);
    *out = z;
    return LM_OK;
}

lm_code lm_lmz_salvage(const char *path, const lm_bundle_opts *o, lm_lmz **out, lm_err *e)
{
    lm_err damage = { 0 };
    lm_code rc = lm_lmz_open_index(path, o, out, &damage);

    if (!rc) {
        try_base(*out, path, o);
        return LM_OK;
    }
    if (rc != LM_EFORMAT) {
        *e = damage;
        return rc;
    }
    return open_damaged(path, o, out, e);
}
