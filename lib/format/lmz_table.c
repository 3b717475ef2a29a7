/* SPDX-License-Identifier: Apache-2.0 */
/* lmz_table.c -- the table of an .lmz: building it with all checks, and look-ups in it. */
#include "format/lmz_table.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "format/folder.h"
#include "format/safetensors_table.h"

#define DAMAGED "it is damaged: salvage its intact parts"

void lmz_table_fini(lmz_table *t)
{
    lm_arena_free(t->arena);
    lm_free(t->file);
    lm_free(t->part);
    lm_free(t->chunk);
    lm_free(t->cell);
    *t = (lmz_table){ 0 };
}

const char *lmz_show(char buf[LMZ_SHOWN], const char *where, const char *file,
                     const lm_lmz_part *part, uint64_t chunk)
{
    char name[LM_ST_SHOWN], number[32] = "";

    if (chunk != UINT64_MAX)
        snprintf(number, sizeof number, "chunk %" PRIu64, chunk);
    if (part && part->tensor)
        snprintf(buf, LMZ_SHOWN, "%s: %s: tensor '%s'%s%s", where, file,
                 lm_st_show(part->tensor, name), number[0] ? ", " : "", number);
    else
        snprintf(buf, LMZ_SHOWN, "%s%s%s%s%s", where, file ? ": " : "", file ? file : "",
                 number[0] ? ": " : "", number);
    return buf;
}

/* ---- Names of files ---- */

/* The cell that holds the name, or the free cell for it.  The table must not be empty. */
static size_t cell_of(const lmz_table *t, const char *name, size_t len)
{
    size_t mask = t->cells - 1, i = lm_hash64(name, len, 0) & mask;

    for (; t->cell[i]; i = (i + 1) & mask) {
        const char *there = t->file[t->cell[i] - 1].pub->name;
        if (strlen(there) == len && !memcmp(there, name, len))
            break;
    }
    return i;
}

/* Number of the file of that name; SIZE_MAX: no file has it. */
static size_t find_file(const lmz_table *t, const char *name, size_t len)
{
    uint32_t at = t->cells ? t->cell[cell_of(t, name, len)] : 0;
    return at ? at - 1 : SIZE_MAX;
}

static lm_code hash_names(lmz_table *t, size_t n, lm_err *e)
{
    uint32_t *fresh = NULL;
    lm_code rc = lm_alloc_n(&fresh, n, sizeof *fresh, "index of file names", e);

    if (rc)
        return rc;
    lm_free(t->cell);
    t->cell = fresh;
    t->cells = n;
    for (size_t i = 0; i < t->files; i++) {
        const char *name = t->file[i].pub->name;
        t->cell[cell_of(t, name, strlen(name))] = (uint32_t)(i + 1);
    }
    return LM_OK;
}

static lm_code check_file_name(const lmz_table *t, lmz_str name, const char *where, lm_code code,
                               lm_err *e)
{
    char copy[256], show[LM_ST_SHOWN];

    if (name.n >= sizeof copy)
        return lm_fail(e, code, where, NULL, "a file name of %zu bytes, at most 255 are allowed",
                       name.n);
    memcpy(copy, name.p, name.n);
    copy[name.n] = '\0';
    if (strlen(copy) != name.n || !lm_name_ok(copy))
        return lm_fail(e, code, where, NULL, "'%s' is not a plain file name",
                       lm_st_show(copy, show));
    if (find_file(t, copy, name.n) != SIZE_MAX)
        return lm_fail(e, code, where, NULL, "the file '%s' occurs twice", lm_st_show(copy, show));
    return LM_OK;
}

/* ---- Building ---- */

lm_code lmz_table_file(lmz_table *t, const lmz_file_rec *r, uint64_t at, const char *where,
                       lm_code code, lm_err *e)
{
    lm_bundle_file *pub;
    char *name;
    uint64_t raw = 0;
    lm_code rc = check_file_name(t, r->name, where, code, e);

    if (!rc && (t->files >= UINT32_MAX / 4 || r->bytes > INT64_MAX ||
                __builtin_add_overflow(t->raw, r->bytes, &raw) || raw > INT64_MAX))
        rc = lm_fail(e, code, where, NULL, "its files are more than 2^63 bytes");
    if (!rc && !t->arena)
        rc = lm_arena_new(&t->arena, 4096, e);
    if (!rc && 2 * (t->files + 1) > t->cells)
        rc = hash_names(t, t->cells ? 2 * t->cells : 16, e);
    if (!rc)
        rc = lm_grow(&t->file, &t->files_cap, t->files + 1, sizeof *t->file, "files of an .lmz", e);
    if (!rc)
        rc = lm_arena_alloc(t->arena, &pub, 1, sizeof *pub, e);
    if (!rc)
        rc = lm_arena_strdup(t->arena, &name, r->name.p, r->name.n, e);
    if (rc)
        return rc;
    *pub = (lm_bundle_file){ name, r->bytes };
    t->cell[cell_of(t, name, r->name.n)] = (uint32_t)(t->files + 1);
    t->file[t->files++] = (lmz_file){
        .pub = pub, .type = r->type, .at = at, .first_part = t->parts, .first_chunk = t->chunks
    };
    t->raw = raw;
    return LM_OK;
}

lm_code lmz_table_rename(lmz_table *t, size_t f, lmz_str name, uint64_t bytes, const char *where,
                         lm_err *e)
{
    char *copy;
    lm_code rc = check_file_name(t, name, where, LM_EFORMAT, e);

    rc = rc ? rc : lm_arena_strdup(t->arena, &copy, name.p, name.n, e);
    if (rc)
        return rc;
    t->file[f].pub->name = copy;
    t->file[f].pub->bytes = bytes;
    for (size_t i = 0; i < t->file[f].parts; i++)
        t->part[t->file[f].first_part + i].pub.file = copy;
    return hash_names(t, t->cells, e);
}

/* Check a part's own fields, without the earlier records. */
static bool part_ok(const lmz_part_rec *r)
{
    bool named = r->flags & LMZ_PART_NAMED, delta = r->flags & LMZ_PART_DELTA;
    char base[256];

    if (r->kind >= LM_LMZ_KINDS || r->flags > (LMZ_PART_NAMED | LMZ_PART_DELTA) ||
        r->raw % lm_lmz_kind_size(r->kind) || r->name.n > LMZ_NAME || r->dtype.n > LMZ_DTYPE ||
        named != (r->dtype.n > 0) || (!named && r->name.n) || delta != (r->base_file.n > 0) ||
        r->base_file.n >= sizeof base || r->base_from > INT64_MAX || (!delta && r->base_from))
        return false;
    memcpy(base, r->base_file.p ? r->base_file.p : "", r->base_file.n);
    base[r->base_file.n] = '\0';
    return !delta || lm_name_ok(base);
}

static lm_code copy_str(lmz_table *t, const char **out, lmz_str s, lm_err *e)
{
    char *copy;
    lm_code rc = lm_arena_strdup(t->arena, &copy, s.p ? s.p : "", s.n, e);

    *out = rc ? NULL : copy;
    return rc;
}

lm_code lmz_table_part(lmz_table *t, const lmz_part_rec *r, uint64_t at, bool gaps,
                       const char *where, lm_err *e)
{
    char show[LMZ_SHOWN];
    lmz_file *f = t->files ? &t->file[t->files - 1] : NULL;
    lmz_part p = { .file = r->file, .number = r->part, .flags = r->flags, .at = at };
    lm_code rc;

    if (!f || r->file != t->files - 1 || f->parts >= UINT32_MAX ||
        (gaps ? r->offset < f->covered || (f->parts && r->part <= t->part[t->parts - 1].number)
              : r->offset != f->covered || r->part != f->parts) ||
        r->offset > f->pub->bytes || r->raw > f->pub->bytes - r->offset || !part_ok(r))
        return lm_fail(e, LM_EFORMAT, lmz_show(show, where, f ? f->pub->name : NULL, NULL, -1),
                       DAMAGED, "part %" PRIu32 " of file %" PRIu32 " has invalid fields", r->part,
                       r->file);
    rc = lm_grow(&t->part, &t->parts_cap, t->parts + 1, sizeof *t->part, "parts of an .lmz", e);
    if (!rc && (r->flags & LMZ_PART_NAMED))
        rc = copy_str(t, &p.pub.tensor, r->name, e);
    if (!rc && (r->flags & LMZ_PART_NAMED))
        rc = copy_str(t, &p.pub.dtype, r->dtype, e);
    if (!rc && (r->flags & LMZ_PART_DELTA))
        rc = copy_str(t, &p.base_file, r->base_file, e);
    if (rc)
        return rc;
    p.base_from = r->base_from;
    p.pub.file = f->pub->name;
    p.pub.offset = r->offset;
    p.pub.raw = r->raw;
    p.pub.first = f->chunks;
    p.pub.chunks = lmz_chunks_of(r->raw);
    p.pub.kind = r->kind;
    p.pub.delta = r->flags & LMZ_PART_DELTA;
    t->part[t->parts++] = p;
    f->parts++;
    f->covered = r->offset + r->raw;
    return LM_OK;
}

uint64_t lmz_chunks_of(uint64_t raw)
{
    return raw / LM_LMZ_CHUNK + (raw % LM_LMZ_CHUNK != 0);
}

size_t lmz_chunk_raw(const lmz_part *p, uint64_t offset)
{
    uint64_t left = p->pub.offset + p->pub.raw - offset;
    return left < LM_LMZ_CHUNK ? (size_t)left : LM_LMZ_CHUNK;
}

/* The offset at which the next chunk of the part must begin, if no chunk is lost. */
static uint64_t next_offset(const lmz_table *t, const lmz_part *p)
{
    const lmz_chunk *last = t->chunks ? &t->chunk[t->chunks - 1] : NULL;

    return last && &t->part[last->part] == p ? last->offset + lmz_chunk_raw(p, last->offset)
                                             : p->pub.offset;
}

lm_code lmz_table_chunk(lmz_table *t, const lmz_chunk_rec *r, uint64_t at, bool gaps,
                        const char *where, lm_err *e)
{
    char show[LMZ_SHOWN];
    lmz_file *f = t->files ? &t->file[t->files - 1] : NULL;
    lmz_part *p = f && f->parts ? &t->part[t->parts - 1] : NULL;
    uint64_t next = p ? next_offset(t, p) : 0;

    if (!p || r->file != t->files - 1 || r->part != p->number ||
        (gaps ? r->offset < next || (r->offset - p->pub.offset) % LM_LMZ_CHUNK
              : r->offset != next) ||
        r->offset >= p->pub.offset + p->pub.raw || r->raw != lmz_chunk_raw(p, r->offset) ||
        r->kind != p->pub.kind || r->flags != p->flags)
        return lm_fail(e, LM_EFORMAT, lmz_show(show, where, f ? f->pub->name : NULL, NULL, -1),
                       DAMAGED,
                       "the chunk for byte %" PRIu64 " of file %" PRIu32 " is not the expected one",
                       r->offset, r->file);
    lm_code rc =
        lm_grow(&t->chunk, &t->chunks_cap, t->chunks + 1, sizeof *t->chunk, "chunks of an .lmz", e);
    if (rc)
        return rc;
    t->chunk[t->chunks++] = (lmz_chunk){ at, r->offset, (uint32_t)(t->parts - 1), r->coded };
    p->pub.coded += r->coded;
    f->chunks++;
    return LM_OK;
}

lm_code lmz_table_end(lmz_table *t, const lmz_end_rec *r, bool gaps, const char *where, lm_err *e)
{
    char show[LMZ_SHOWN];
    lmz_file *f = t->files ? &t->file[t->files - 1] : NULL;
    const lmz_part *p = f && f->parts ? &t->part[t->parts - 1] : NULL;

    if (!f || f->whole || r->file != t->files - 1 || r->bytes != f->pub->bytes ||
        r->name.n != strlen(f->pub->name) || memcmp(r->name.p, f->pub->name, r->name.n) ||
        (!gaps &&
         (f->covered != f->pub->bytes || (p && next_offset(t, p) != p->pub.offset + p->pub.raw))))
        return lm_fail(e, LM_EFORMAT, lmz_show(show, where, f ? f->pub->name : NULL, NULL, -1),
                       DAMAGED, "the end of file %" PRIu32 " has an unexpected position", r->file);
    f->whole = true;
    memcpy(f->digest, r->digest, 16);
    return LM_OK;
}

/* ---- Looking up ---- */

const lmz_chunk *lmz_table_chunk_at(const lmz_table *t, size_t f, uint64_t offset)
{
    size_t lo = t->file[f].first_chunk, end = lo + t->file[f].chunks, hi = end;

    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (t->chunk[mid].offset < offset)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo < end && t->chunk[lo].offset == offset ? &t->chunk[lo] : NULL;
}

const lmz_part *lmz_table_part_at(const lmz_table *t, size_t f, uint64_t at)
{
    size_t first = t->file[f].first_part, lo = first, hi = lo + t->file[f].parts;

    while (lo < hi) { /* the last part that begins at or before `at`: empty ones precede it */
        size_t mid = lo + (hi - lo) / 2;
        if (t->part[mid].pub.offset <= at)
            lo = mid + 1;
        else
            hi = mid;
    }
    if (lo == first)
        return NULL;
    const lmz_part *p = &t->part[lo - 1];
    return at - p->pub.offset < p->pub.raw ? p : NULL;
}

static lmz_str str_of(const char *s)
{
    return (lmz_str){ s ? s : "", s ? strlen(s) : 0 };
}

lmz_file_rec lmz_file_record(const lmz_table *t, size_t f)
{
    const lmz_file *x = &t->file[f];
    return (lmz_file_rec){ (uint32_t)f, x->type, x->pub->bytes, str_of(x->pub->name) };
}

lmz_part_rec lmz_part_record(const lmz_part *p)
{
    return (lmz_part_rec){ .file = p->file,
                           .part = p->number,
                           .kind = p->pub.kind,
                           .flags = p->flags,
                           .offset = p->pub.offset,
                           .raw = p->pub.raw,
                           .dtype = str_of(p->pub.dtype),
                           .name = str_of(p->pub.tensor),
                           .base_file = str_of(p->base_file),
                           .base_from = p->base_from };
}

lmz_end_rec lmz_end_record(const lmz_table *t, size_t f)
{
    const lmz_file *x = &t->file[f];
    lmz_end_rec r = { .file = (uint32_t)f, .bytes = x->pub->bytes, .name = str_of(x->pub->name) };

    memcpy(r.digest, x->digest, 16);
    return r;
}

/* ---- The digest of the content ---- */

static int by_name(const void *a, const void *b)
{
    return strcmp(((const lmz_named_digest *)a)->name, ((const lmz_named_digest *)b)->name);
}

void lmz_content_digest(lmz_named_digest *d, size_t n, uint8_t out[16])
{
    lm_hash128 h;

    lm_hash128_init(&h);
    if (n)
        qsort(d, n, sizeof *d, by_name);
    for (size_t i = 0; i < n; i++) {
        lm_hash128_add(&h, d[i].name, strlen(d[i].name) + 1);
        lm_hash128_add(&h, d[i].digest, 16);
    }
    lm_hash128_end(&h, out);
}

lm_code lmz_table_digest(const lmz_table *t, uint8_t out[16], lm_err *e)
{
    lmz_named_digest *d = NULL;
    lm_code rc = lm_alloc_n(&d, t->files, sizeof *d, "digests of files", e);

    if (rc)
        return rc;
    for (size_t i = 0; i < t->files; i++) {
        d[i].name = t->file[i].pub->name;
        memcpy(d[i].digest, t->file[i].digest, 16);
    }
    lmz_content_digest(d, t->files, out);
    lm_free(d);
    return LM_OK;
}
