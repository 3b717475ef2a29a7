/* SPDX-License-Identifier: Apache-2.0 */
/* lmz_write.c -- writes the bytes of files to an .lmz.
 *
 * The bytes of a file are divided into parts (those of a .safetensors at its tensors, once its
 * header is known) and these into chunks, which lmz_batch.h codes and writes.  The output depends
 * on the bytes alone, not on the sizes of the writes or on the threads. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <zstd.h>

#include "base/text.h"
#include "format/lmz_parts.h"

enum { INDEX_LEVEL = 9 };

/* The state of the current file; WINDOW: bytes are gathered to choose its next parts. */
typedef enum { NO_FILE, LENGTH, HEADER, WINDOW, DATA } state;

struct lm_lmz_writer {
    char *where;
    lmz_bases *bases;
    lmz_table table;
    lmz_batches out;
    lm_sink *sink;

    state state;
    uint64_t file_bytes, pushed;
    lm_buf head; /* length field and header, or a window, while they are gathered */
    uint64_t head_bytes;
    lm_st_table tensors; /* of the current file; empty: plain */
    lmz_parts parts;
    uint64_t cut; /* bytes of the file passed to jobs */
    uint32_t next_part;
    lmz_part_rec part;
    uint64_t part_at; /* bytes of the part passed to jobs */

    lm_code failed;
    lm_err failure;
};

/* ---- Cutting files into parts and chunks ---- */

/* The record of the next part of the current file. */
static void describe_part(lm_lmz_writer *w, const lmz_piece *piece)
{
    w->part = (lmz_part_rec){ .file = (uint32_t)(w->table.files - 1),
                              .part = w->next_part++,
                              .kind = piece->kind,
                              .offset = piece->offset,
                              .raw = piece->raw };
    w->part_at = 0;
    if (piece->tensor == SIZE_MAX)
        return;
    const lm_st_tensor *t = &w->tensors.tensor[piece->tensor];
    const char *found;

    w->part.flags = LMZ_PART_NAMED;
    w->part.dtype = (lmz_str){ t->dtype_name, strlen(t->dtype_name) };
    w->part.name = (lmz_str){ t->name, strlen(t->name) };
    if (w->bases && t->bytes &&
        lmz_bases_find(w->bases, w->table.file[w->table.files - 1].pub->name, t->name,
                       t->dtype_name, t->bytes, &found, &w->part.base_from)) {
        w->part.flags |= LMZ_PART_DELTA;
        w->part.base_file = (lmz_str){ found, strlen(found) };
    }
}

/* Begin parts until one needs bytes or all chosen ones have begun. */
static lm_code next_part(lm_lmz_writer *w, lm_err *e)
{
    lmz_piece piece;
    lm_code rc = LM_OK;

    while (!rc && w->part_at == w->part.raw && lmz_parts_next(&w->parts, &piece)) {
        describe_part(w, &piece);
        rc = lmz_table_part(&w->table, &w->part, 0, false, w->where, e);
        rc = rc ? rc : lmz_put_part(lmz_batches_records(&w->out), &w->part, e);
    }
    return rc;
}

static lm_code begin_chunk(lm_lmz_writer *w, lm_err *e)
{
    uint64_t left = w->part.raw - w->part_at;
    bool delta = w->part.flags & LMZ_PART_DELTA;
    lmz_chunk_rec r = { .file = w->part.file,
                        .part = w->part.part,
                        .offset = w->part.offset + w->part_at,
                        .kind = w->part.kind,
                        .flags = w->part.flags };

    r.raw = left < LM_LMZ_CHUNK ? (uint32_t)left : LM_LMZ_CHUNK;
    return lmz_job_begin(&w->out, &r, delta ? w->part.base_file.p : NULL,
                         w->part.base_from + w->part_at, e);
}

/* Pass on bytes of the parts.  A chunk is complete when part_at is at its end. */
static lm_code cut(lm_lmz_writer *w, const uint8_t *data, size_t bytes, lm_err *e)
{
    lm_code rc = LM_OK;

    while (bytes && !rc && !(rc = next_part(w, e))) {
        size_t in = w->part_at % LM_LMZ_CHUNK;
        lmz_job *j = lmz_batches_job(&w->out);

        if (!in && (rc = begin_chunk(w, e)))
            break;
        size_t n = j->rec.raw - in < bytes ? j->rec.raw - in : bytes;
        rc = lmz_job_add(j, in, data, n, e);
        w->part_at += n;
        w->cut += n;
        data += n;
        bytes -= n;
        if (!rc && in + n == j->rec.raw)
            rc = lmz_job_end(&w->out, e);
    }
    return rc;
}

/* Divide the gathered bytes. */
static lm_code cut_gathered(lm_lmz_writer *w, lm_err *e)
{
    lm_buf head = w->head;
    lm_code rc;

    w->state = DATA;
    w->head = (lm_buf){ 0 };
    rc = cut(w, (const uint8_t *)head.data, head.len, e);
    rc = rc ? rc : lmz_batches_keep(&w->out, e);
    lm_buf_fini(&head);
    return rc;
}

/* The header is complete: if it is valid, its tensors become the parts. */
static lm_code begin_data(lm_lmz_writer *w, lm_err *e)
{
    lm_err ignored = { 0 };
    size_t len = w->head.len;
    lm_code rc;

    w->head_bytes = len;
    if (len <= 8 || lm_st_table_parse(&w->tensors, w->head.data + 8, len - 8, w->file_bytes - len,
                                      w->where, &ignored)) {
        const char *name = w->table.file[w->table.files - 1].pub->name;
        lm_st_table_fini(&w->tensors);
        if (lm_text_ends(name, ".safetensors"))
            lm_log(w->sink, LM_LOG_WARN,
                   "%s: is not a complete .safetensors: stored as plain bytes", name);
    }
    for (size_t i = 0; i < w->tensors.n; i++)
        if (strlen(w->tensors.tensor[i].name) > LMZ_NAME) {
            lm_st_table_fini(&w->tensors);
            break;
        }
    rc = lmz_parts_begin(&w->parts, &w->tensors, len, w->file_bytes, w->bases != NULL, e);
    w->state = WINDOW;
    return rc || w->parts.measure ? rc : cut_gathered(w, e);
}

/* Gather up to `want` bytes; moves *data on. */
static lm_code gather_head(lm_lmz_writer *w, uint64_t want, const uint8_t **data, size_t *bytes,
                           lm_err *e)
{
    uint64_t miss = want - w->head.len;
    size_t n = *bytes < miss ? *bytes : (size_t)miss;
    lm_code rc = lm_buf_add(&w->head, *data, n, e);

    *data += n;
    *bytes -= n;
    return rc;
}

/* Bytes behind the header: windows while parts must be chosen, and chosen parts. */
static lm_code push_data(lm_lmz_writer *w, const uint8_t *data, size_t bytes, lm_err *e)
{
    lm_code rc = LM_OK;

    while (bytes && !rc) {
        if (w->state == WINDOW) {
            size_t want = lmz_parts_window(&w->parts);
            rc = gather_head(w, want, &data, &bytes, e);
            if (rc || w->head.len < want)
                return rc;
            rc = lmz_parts_choose(&w->parts, &w->out, (const uint8_t *)w->head.data, e);
            rc = rc ? rc : cut_gathered(w, e);
        } else {
            uint64_t chosen = w->parts.measure ? w->parts.end - w->cut : bytes;
            size_t n = chosen < bytes ? (size_t)chosen : bytes;
            rc = cut(w, data, n, e);
            data += n;
            bytes -= n;
        }
        if (w->parts.measure && w->cut == w->parts.end)
            w->state = WINDOW;
    }
    return rc ? rc : lmz_batches_keep(&w->out, e);
}

static lm_code push(lm_lmz_writer *w, const uint8_t *data, size_t bytes, lm_err *e)
{
    lm_err ignored = { 0 };
    lm_code rc = LM_OK;

    if (w->state == LENGTH) {
        rc = gather_head(w, 8, &data, &bytes, e);
        if (rc || w->head.len < 8)
            return rc;
        uint64_t n = 0;
        bool fits = !lm_st_header_length((const uint8_t *)w->head.data, w->where, &n, &ignored) &&
                    n <= w->file_bytes - 8;
        w->head_bytes = fits ? 8 + n : 0;
        w->state = HEADER;
        if (!fits && (rc = begin_data(w, e)))
            return rc;
    }
    if (w->state == HEADER) {
        rc = gather_head(w, w->head_bytes, &data, &bytes, e);
        if (rc || w->head.len < w->head_bytes || (rc = begin_data(w, e)))
            return rc;
    }
    return push_data(w, data, bytes, e);
}

static lm_code fail_writer(lm_lmz_writer *w, lm_code rc, lm_err *e)
{
    if (rc && !w->failed) {
        w->failed = rc;
        w->failure = *e;
    }
    return rc;
}

lm_code lm_lmz_write(void *writer, const void *data, size_t bytes, lm_err *e)
{
    lm_lmz_writer *w = writer;

    if (w->failed) {
        *e = w->failure;
        return w->failed;
    }
    if (w->state == NO_FILE || bytes > w->file_bytes - w->pushed)
        return lm_fail(e, LM_EBUG, w->where, NULL,
                       "%zu byte%s more than the %" PRIu64 " announced of a file", bytes,
                       lm_plural(bytes), w->file_bytes);
    w->pushed += bytes;
    return bytes ? fail_writer(w, push(w, data, bytes, e), e) : LM_OK;
}

/* ---- Files ---- */

static lm_code end_file(lm_lmz_writer *w, lm_err *e)
{
    lmz_file *f = &w->table.file[w->table.files - 1];
    lm_code rc;

    if (w->pushed != w->file_bytes)
        return lm_fail(e, LM_EBUG, w->where, NULL,
                       "%" PRIu64 " of the %" PRIu64 " bytes of '%s' were written", w->pushed,
                       w->file_bytes, f->pub->name);
    rc = next_part(w, e);                        /* empty tensors at the end */
    rc = rc ? rc : lmz_batches_turn(&w->out, e); /* sets the digest */
    if (rc)
        return rc;
    f->whole = true;
    lm_hash128_end(&w->out.digest, f->digest);
    lmz_end_rec r = lmz_end_record(&w->table, w->table.files - 1);
    lm_st_table_fini(&w->tensors);
    w->state = NO_FILE;
    return lmz_put_end(lmz_batches_records(&w->out), &r, e);
}

static lm_code begin_file(lm_lmz_writer *w, const char *name, uint64_t bytes, lm_err *e)
{
    size_t n = strlen(name);
    bool st = lm_text_ends(name, ".safetensors");
    lmz_file_rec r = { .file = (uint32_t)w->table.files,
                       .type = st ? LMZ_FILE_SAFETENSORS : LMZ_FILE_PLAIN,
                       .bytes = bytes,
                       .name = { name, n } };
    lm_code rc = w->state == NO_FILE ? LM_OK : end_file(w, e);

    rc = rc ? rc : lmz_table_file(&w->table, &r, 0, w->where, LM_EUSAGE, e);
    rc = rc ? rc : lmz_put_file(lmz_batches_records(&w->out), &r, e);
    if (rc)
        return rc;
    lm_hash128_init(&w->out.digest);
    w->file_bytes = bytes;
    w->pushed = 0;
    w->cut = 0;
    w->next_part = 0;
    w->part = (lmz_part_rec){ 0 };
    w->part_at = 0;
    w->state = LENGTH;
    return st && bytes >= 8 ? LM_OK : begin_data(w, e);
}

lm_code lm_lmz_begin(lm_lmz_writer *w, const char *name, uint64_t bytes, lm_err *e)
{
    if (w->failed) {
        *e = w->failure;
        return w->failed;
    }
    return fail_writer(w, begin_file(w, name, bytes, e), e);
}

/* ---- The archive ---- */

/* Fill in the header of a delta from its base. */
static lm_code know_base(lm_lmz_writer *w, const lm_lmz_opts *o, lmz_header *h, lm_err *e)
{
    const lm_lmz *z = lm_bundle_lmz(o->base);
    char hex[33];
    lm_code rc;

    h->delta = true;
    h->chain = (z ? lm_lmz_about(z)->chain : 0) + 1;
    h->base_name = (lmz_str){ o->base_name, o->base_name ? strlen(o->base_name) : 0 };
    if (!h->base_name.n || h->base_name.n > LMZ_BASE_NAME)
        return lm_fail(e, LM_EUSAGE, w->where, NULL,
                       "the path of its base has %zu byte%s, not 1 to %d", h->base_name.n,
                       lm_plural(h->base_name.n), LMZ_BASE_NAME);
    if (!lm_bundle_random(o->base))
        return lm_fail(e, LM_EUSAGE, lm_bundle_path(o->base), "store it in a file or folder first",
                       "a base needs random access, this one is a stream");
    if (h->chain > LM_LMZ_MAX_CHAIN)
        return lm_fail(e, LM_EUSAGE, lm_bundle_path(o->base),
                       "write a whole file, or rebase it first",
                       "it is step %d of a chain of deltas, and %d are the limit", h->chain - 1,
                       LM_LMZ_MAX_CHAIN);
    rc = lm_bundle_digest(o->base, hex, NULL, e);
    rc = rc ? rc : lmz_bases_new(o->base, &w->bases, e);
    for (int i = 0; i < 16 && !rc; i++) {
        unsigned byte;
        sscanf(hex + 2 * i, "%2x", &byte);
        h->base_digest[i] = (uint8_t)byte;
    }
    return rc;
}

lm_code lm_lmz_create_on(lm_write_fn write, void *ctx, const char *where, const lm_lmz_opts *o,
                         lm_lmz_writer **out, lm_err *e)
{
    static const lm_lmz_opts usual;
    lm_lmz_writer *w = NULL;
    lmz_header h = { 0 };
    lm_buf head = { 0 };
    lm_code rc = lm_alloc_n(&w, 1, sizeof *w, "an .lmz writer", e);

    *out = NULL;
    if (rc)
        return rc;
    o = o ? o : &usual;
    w->out.write = write;
    w->out.ctx = ctx;
    w->out.par = o->par;
    w->sink = o->sink;
    w->out.base = o->base;
    w->out.table = &w->table;
    rc = lm_strdup(&w->where, where, e);
    rc = rc ? rc : lmz_batches_init(&w->out, o->level, e);
    if (!rc && o->base)
        rc = know_base(w, o, &h, e);
    /* Below this level all chunks can be decoded by readers of version 1. */
    h.version = o->level && o->level < LM_LMZ_JOINT_LEVEL ? 1 : LMZ_VERSION;
    rc = rc ? rc : lmz_put_header(&head, &h, e);
    if (!rc) {
        lm_hash128_add(&w->out.records, head.data + head.len - 8, 8);
        rc = lmz_batches_emit(&w->out, head.data, head.len, e);
    }
    lm_buf_fini(&head);
    if (rc)
        lm_lmz_drop(w);
    else
        *out = w;
    return rc;
}

static lm_code put_index(lm_lmz_writer *w, lm_buf *out, lm_err *e)
{
    lm_buf index = { 0 }, coded = { 0 };
    lm_code rc = lmz_table_to_index(&w->table, &index, e);
    size_t bound = ZSTD_compressBound(index.len), n = 0;

    rc = rc ? rc : lm_buf_room(&coded, bound, e);
    if (!rc) {
        n = ZSTD_compress(coded.data, bound, index.data, index.len, INDEX_LEVEL);
        if (ZSTD_isError(n))
            rc = lm_fail(e, LM_ELIMIT, w->where, NULL, "its index cannot be compressed: %s",
                         ZSTD_getErrorName(n));
    }
    lmz_index_rec r = { index.len, n, rc ? 0 : lm_hash64(coded.data, n, 0) };
    rc = rc ? rc : lmz_put_index(out, &r, e);
    if (!rc)
        lm_hash128_add(&w->out.records, out->data + out->len - 8, 8);
    rc = rc ? rc : lm_buf_add(out, coded.data, n, e);
    lm_buf_fini(&index);
    lm_buf_fini(&coded);
    return rc;
}

static lm_code finish(lm_lmz_writer *w, lm_err *e)
{
    lm_buf out = { 0 };
    lmz_footer f = { .raw = w->table.raw, .files = (uint32_t)w->table.files };
    lm_code rc = w->state == NO_FILE ? LM_OK : end_file(w, e);

    rc = rc ? rc : lmz_batches_flush(&w->out, e);
    f.index_at = w->out.at;
    rc = rc ? rc : put_index(w, &out, e);
    f.index_bytes = out.len;
    f.bytes = w->out.at + out.len + LMZ_FOOTER;
    lm_hash128_end(&w->out.records, f.records);
    rc = rc ? rc : lmz_table_digest(&w->table, f.content, e);
    rc = rc ? rc : lmz_put_footer(&out, &f, e);
    rc = rc ? rc : lmz_batches_emit(&w->out, out.data, out.len, e);
    lm_buf_fini(&out);
    return rc;
}

lm_code lm_lmz_close(lm_lmz_writer *w, lm_err *e)
{
    lm_code rc = w->failed;

    if (rc)
        *e = w->failure;
    else
        rc = finish(w, e);
    lm_lmz_drop(w);
    return rc;
}

void lm_lmz_drop(lm_lmz_writer *w)
{
    if (!w)
        return;
    lmz_batches_fini(&w->out);
    lmz_bases_free(w->bases);
    lmz_parts_fini(&w->parts);
    lm_st_table_fini(&w->tensors);
    lm_buf_fini(&w->head);
    lmz_table_fini(&w->table);
    lm_free(w->where);
    lm_free(w);
}
