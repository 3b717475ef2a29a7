/* SPDX-License-Identifier: Apache-2.0 */
/* lmz_index.c -- the table of an .lmz as the bytes of its index, and back.
 *
 *  1. number of files u32
 *  2. for each file: type u8, length of its name u8, bytes u64, XXH3-128 16, number of parts u32,
 *     name; and for each of its parts: kind u8, flags u8, length of dtype u8 and of name u16, raw
 *     bytes u64, if a delta length of the base's file name u16 and offset there u64; dtype, name,
 *     base's file name
 *  3. coded bytes u32 of each chunk of each part
 * An entry is never longer than its record, so an index larger than the records before it is invalid, and its memory is
 * bounded by the size of the file. */
#include <inttypes.h>
#include <string.h>

#include "format/lmz_table.h"

#define BAD_INDEX "it is damaged: salvage its intact parts"

static lm_code put_part(const lmz_part *p, lm_buf *out, lm_err *e)
{
    lmz_part_rec r = lmz_part_record(p);
    uint8_t f[23];
    size_t n = 13;

    f[0] = (uint8_t)r.kind;
    f[1] = (uint8_t)r.flags;
    f[2] = (uint8_t)r.dtype.n;
    lmz_store(f + 3, r.name.n, 2);
    lmz_store(f + 5, r.raw, 8);
    if (r.flags & LMZ_PART_DELTA) {
        lmz_store(f + 13, r.base_file.n, 2);
        lmz_store(f + 15, r.base_from, 8);
        n = 23;
    }
    lm_code rc = lm_buf_add(out, f, n, e);
    rc = rc ? rc : lm_buf_add(out, r.dtype.p, r.dtype.n, e);
    rc = rc ? rc : lm_buf_add(out, r.name.p, r.name.n, e);
    return rc ? rc : lm_buf_add(out, r.base_file.p, r.base_file.n, e);
}

static lm_code put_file(const lmz_table *t, const lmz_file *f, lm_buf *out, lm_err *e)
{
    uint8_t b[30];
    size_t n = strlen(f->pub->name);

    b[0] = (uint8_t)f->type;
    b[1] = (uint8_t)n;
    lmz_store(b + 2, f->pub->bytes, 8);
    memcpy(b + 10, f->digest, 16);
    lmz_store(b + 26, f->parts, 4);
    lm_code rc = lm_buf_add(out, b, sizeof b, e);
    rc = rc ? rc : lm_buf_add(out, f->pub->name, n, e);
    for (size_t i = 0; i < f->parts && !rc; i++)
        rc = put_part(&t->part[f->first_part + i], out, e);
    return rc;
}

lm_code lmz_table_to_index(const lmz_table *t, lm_buf *out, lm_err *e)
{
    lm_code rc = lmz_add(out, t->files, 4, e);

    for (size_t i = 0; i < t->files && !rc; i++)
        rc = put_file(t, &t->file[i], out, e);
    for (size_t i = 0; i < t->chunks && !rc; i++)
        rc = lmz_add(out, t->chunk[i].coded, 4, e);
    return rc;
}

/* One file and its parts; positions come later. */
static lm_code take_file(lmz_table *t, lmz_cursor *c, const char *where, lm_err *e)
{
    lmz_file_rec r = { .file = (uint32_t)t->files };
    uint64_t type = lmz_take(c, 1);
    size_t name = lmz_take(c, 1);

    r.type = (lmz_file_type)type;
    r.bytes = lmz_take(c, 8);
    const uint8_t *digest = lmz_take_bytes(c, 16);
    uint32_t parts = (uint32_t)lmz_take(c, 4);
    r.name = lmz_take_str(c, name);
    if (c->bad || type > LMZ_FILE_SAFETENSORS)
        return lm_fail(e, LM_EFORMAT, where, BAD_INDEX, "file %zu of its index has invalid fields",
                       t->files);
    lm_code rc = lmz_table_file(t, &r, 0, where, LM_EFORMAT, e);
    if (!rc)
        memcpy(t->file[r.file].digest, digest, 16);
    for (uint32_t i = 0; i < parts && !rc; i++) {
        lmz_part_rec p = { .file = r.file, .part = i, .offset = t->file[r.file].covered };
        p.kind = (lm_lmz_kind)lmz_take(c, 1);
        p.flags = (unsigned)lmz_take(c, 1);
        p.dtype.n = lmz_take(c, 1);
        p.name.n = lmz_take(c, 2);
        p.raw = lmz_take(c, 8);
        if (p.flags & LMZ_PART_DELTA) {
            p.base_file.n = lmz_take(c, 2);
            p.base_from = lmz_take(c, 8);
        }
        p.dtype = lmz_take_str(c, p.dtype.n);
        p.name = lmz_take_str(c, p.name.n);
        p.base_file = lmz_take_str(c, p.base_file.n);
        rc = c->bad ? lm_fail(e, LM_EFORMAT, where, BAD_INDEX, "its index ends early")
                    : lmz_table_part(t, &p, 0, false, where, e);
    }
    if (!rc && t->file[r.file].covered != r.bytes)
        rc = lm_fail(e, LM_EFORMAT, where, BAD_INDEX,
                     "its index has %" PRIu64 " of the %" PRIu64 " bytes of a file",
                     t->file[r.file].covered, r.bytes);
    return rc;
}

/* Read the chunks of one part; *at is the position of its record, then of the next one. */
static lm_code take_chunks(lmz_table *t, lmz_part *p, lmz_cursor *c, uint64_t *at)
{
    lmz_file *f = &t->file[p->file];
    lmz_part_rec r = lmz_part_record(p);

    p->at = *at;
    p->pub.first = f->chunks;
    *at += lmz_part_size(&r);
    for (uint64_t offset = 0; offset < p->pub.raw; offset += LM_LMZ_CHUNK) {
        uint32_t coded = (uint32_t)lmz_take(c, 4);
        size_t raw = lmz_chunk_raw(p, p->pub.offset + offset);

        if (coded > lm_lmz_chunk_bound(raw))
            return LM_EFORMAT;
        t->chunk[t->chunks++] =
            (lmz_chunk){ *at, p->pub.offset + offset, (uint32_t)(p - t->part), coded };
        f->chunks++;
        p->pub.coded += coded;
        *at += LMZ_CHUNK_RECORD + coded;
    }
    return LM_OK;
}

/* The number of chunks of the parts; UINT64_MAX if more than `most`. */
static uint64_t count_chunks(const lmz_table *t, uint64_t most)
{
    uint64_t n = 0;

    for (size_t i = 0; i < t->parts; i++) {
        n += t->part[i].pub.chunks; /* each below 2^43, and n not far above most */
        if (n > most)
            return UINT64_MAX;
    }
    return n;
}

lm_code lmz_table_from_index(lmz_table *t, const void *index, size_t bytes, uint64_t first,
                             uint64_t last, const char *where, lm_err *e)
{
    lmz_cursor c = { index, bytes, false };
    uint64_t files = lmz_take(&c, 4), at = first;
    lm_code rc = LM_OK;

    for (uint64_t i = 0; i < files && !rc; i++)
        rc = take_file(t, &c, where, e);
    if (rc)
        return rc;
    uint64_t n = count_chunks(t, c.left / 4);
    if (c.bad || n != c.left / 4 || c.left % 4)
        return lm_fail(e, LM_EFORMAT, where, BAD_INDEX,
                       "its index does not have the chunks of its parts");
    rc = lm_grow(&t->chunk, &t->chunks_cap, (size_t)n, sizeof *t->chunk, "chunks of an .lmz", e);
    for (size_t i = 0; i < t->files && !rc; i++) {
        lmz_file *f = &t->file[i];
        size_t name = strlen(f->pub->name);

        f->at = at;
        f->whole = true;
        f->first_chunk = t->chunks;
        at += lmz_file_size(name);
        for (size_t k = 0; k < f->parts && !rc; k++)
            rc = take_chunks(t, &t->part[f->first_part + k], &c, &at);
        f->end = at;
        at += lmz_end_size(name);
    }
    if (rc == LM_EFORMAT || (!rc && at != last))
        return lm_fail(e, LM_EFORMAT, where, BAD_INDEX, "its index does not fit its records");
    return rc;
}
