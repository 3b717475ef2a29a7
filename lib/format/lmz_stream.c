/* SPDX-License-Identifier: Apache-2.0 */
/* lmz_stream.c -- an .lmz read forward: records in their order, chunks decoded ahead.
 *
 * Works on batches of events (a file begins, a chunk, a file ends, the end).  While the chunks of
 * one batch are decoded on the pool, one task reads the records of the next from the stream, and
 * another adds the previously decoded bytes to the digest of their file.  A batch thus passes three
 * rounds: read, decoded (and returned to the caller), digested. */
#include <inttypes.h>
#include <string.h>

#include "base/hash.h"
#include "base/text.h"
#include "format/lmz_impl.h"

enum { CHUNKS_A_THREAD = 3, EVENTS = 1024 };

typedef enum { BEGIN, CHUNK, END, LAST, FAULT } event_kind;

typedef struct {
    event_kind kind;
    uint32_t file;
    const lm_bundle_file *pub;
    uint8_t digest[16]; /* END: contents of the record */
    /* CHUNK */
    lmz_chunk_rec rec;
    const char *base_file, *tensor;
    uint64_t base_from, number; /* of the chunk in its part */
    size_t buffer;
    lm_code rc; /* of reading (FAULT) or decoding it */
    lm_err err;
} event;

typedef struct {
    uint8_t *coded, *raw;
} buffer;

typedef struct {
    event *events;
    buffer *buffers;
    size_t n, cap, chunks, done; /* done: returned to the caller */
} batch;

struct lmz_stream {
    lm_read_fn read;
    void *ctx;
    uint64_t at;       /* bytes read */
    uint64_t previous; /* position of the record just read */
    lm_hash128 records;
    batch batches[3]; /* being decoded (number `turn`), read, digested; they rotate */
    int turn;
    batch *serving; /* the batch decoded last */
    size_t chunks;  /* most in a batch */
    lmz_desk *desks;
    int threads;
    bool digested;  /* `last` of the previous batch */
    bool over;      /* the reading side reached the end or a fault */
    lm_err reading; /* a fault of the reading side, when memory is exhausted */
    lm_hash128 digest;
    bool in_file;  /* of the caller */
    size_t served; /* bytes of the first chunk that were read */
    lm_code rc;    /* returned again by later calls */
    lm_err err;
};

/* ---- Records ---- */

/* Exactly `bytes` bytes; *early is set when no byte is left (NULL: that is a fault too). */
static lm_code read_bytes(lm_lmz *z, void *dst, size_t bytes, bool *early, lm_err *e)
{
    lmz_stream *s = z->stream;
    uint8_t *to = dst;
    size_t left = bytes;

    while (left) {
        size_t got = 0;
        lm_code rc = s->read(s->ctx, to, left, &got, e);
        if (rc)
            return rc;
        if (!got && early && left == bytes) {
            *early = true;
            return LM_OK;
        }
        if (!got)
            return lm_fail(e, LM_EFORMAT, z->where, "it is truncated: fetch or write it again",
                           "it ends after %" PRIu64 " byte%s, in the middle", s->at,
                           lm_plural(s->at));
        to += got;
        left -= got;
        s->at += got;
    }
    return LM_OK;
}

static lm_code fail_record(lm_lmz *z, lm_err *e)
{
    const lmz_table *t = &z->table;
    const lmz_part *p = t->parts ? &t->part[t->parts - 1] : NULL;
    const char *file = t->files ? t->file[t->files - 1].pub->name : NULL;
    char show[LMZ_SHOWN];

    if (p && file != p->pub.file)
        p = NULL;
    return lm_fail(e, LM_EFORMAT, lmz_show(show, z->where, file, p ? &p->pub : NULL, UINT64_MAX),
                   LMZ_DAMAGED, "the record at byte %" PRIu64 " is damaged", z->stream->previous);
}

/* The next whole record. */
static lm_code take_record(lm_lmz *z, lm_buf *b, lm_err *e)
{
    lmz_stream *s = z->stream;
    lm_code rc = lm_buf_room(b, LMZ_AROUND + LMZ_FIELDS, e);
    uint8_t *p = (uint8_t *)b->data;
    size_t n;

    s->previous = s->at;
    rc = rc ? rc : read_bytes(z, p, LMZ_HEAD, NULL, e);
    if (rc)
        return rc;
    n = lmz_record_size(p);
    if (!n)
        return fail_record(z, e);
    rc = read_bytes(z, p + LMZ_HEAD, n - LMZ_HEAD, NULL, e);
    if (!rc && !lmz_record_ok(p, n))
        rc = fail_record(z, e);
    b->len = n;
    if (!rc && lmz_record_type(p) != 'Z')
        lm_hash128_add(&s->records, p + n - 8, 8);
    return rc;
}

/* ---- The reading side ---- */

static lm_code read_chunk(lm_lmz *z, batch *b, event *v, const lm_buf *record, lm_err *e)
{
    const lmz_table *t = &z->table;
    buffer *to = &b->buffers[b->chunks];
    lm_code rc = LM_OK;

    if (!lmz_get_chunk((const uint8_t *)record->data, record->len, &v->rec))
        return fail_record(z, e);
    rc = lmz_table_chunk(&z->table, &v->rec, z->stream->previous, false, z->where, e);
    if (!rc && !to->coded)
        rc = lm_realloc_n(&to->coded, lm_lmz_chunk_bound(LM_LMZ_CHUNK), 1, "a coded chunk", e);
    if (!rc && !to->raw)
        rc = lm_realloc_n(&to->raw, LM_LMZ_CHUNK, 1, "a chunk", e);
    rc = rc ? rc : read_bytes(z, to->coded, v->rec.coded, NULL, e);
    if (rc)
        return rc;
    const lmz_part *p = &t->part[t->parts - 1];
    v->kind = CHUNK;
    v->buffer = b->chunks++;
    v->tensor = p->pub.tensor;
    v->base_file = p->base_file;
    v->base_from = p->base_from + (v->rec.offset - p->pub.offset);
    v->number = (v->rec.offset - p->pub.offset) / LM_LMZ_CHUNK;
    return LM_OK;
}

/* Index and footer must match the records that were read. */
static lm_code read_last(lm_lmz *z, lm_buf *record, lm_err *e)
{
    lmz_stream *s = z->stream;
    uint64_t index_at = s->previous, left;
    lmz_index_rec index;
    lmz_footer f;
    uint8_t digest[16], content[16], *coded = NULL;
    bool early = false;

    if (!lmz_get_index((const uint8_t *)record->data, record->len, &index))
        return fail_record(z, e);
    left = index.coded;
    /* it cannot be longer than the records that it lists */
    if (left > s->at + 65536 || left > LMZ_INDEX_MOST)
        return fail_record(z, e);
    lm_code rc = lm_realloc_n(&coded, (size_t)left, 1, "the index of an .lmz", e);
    rc = rc ? rc : read_bytes(z, coded, (size_t)left, NULL, e);
    if (!rc && lm_hash64(coded, (size_t)left, 0) != index.coded_check)
        rc = lm_fail(e, LM_EFORMAT, z->where, LMZ_DAMAGED, "its index is damaged");
    lm_free(coded);
    rc = rc ? rc : take_record(z, record, e);
    if (rc)
        return rc;
    lm_hash128_end(&s->records, digest);
    rc = lmz_table_digest(&z->table, content, e);
    if (rc)
        return rc;
    if (!lmz_get_footer((const uint8_t *)record->data, record->len, &f) || f.index_at != index_at ||
        f.index_bytes != s->previous - index_at || f.bytes != s->at || f.files != z->table.files ||
        f.raw != z->table.raw || memcmp(f.records, digest, 16) || memcmp(f.content, content, 16))
        return lm_fail(e, LM_EFORMAT, z->where, LMZ_DAMAGED,
                       "its footer does not match its records");
    rc = read_bytes(z, content, 1, &early, e);
    if (!rc && !early)
        rc = lm_fail(e, LM_EFORMAT, z->where, NULL, "bytes follow its footer");
    z->info.raw = f.raw;
    z->info.coded = f.bytes;
    lm_hash128_hex(f.content, z->info.digest);
    return rc;
}

/* One record; v->kind remains FAULT when it is not an event. */
static lm_code read_record(lm_lmz *z, batch *b, event *v, lm_buf *record, bool *is_event, lm_err *e)
{
    lmz_table *t = &z->table;
    bool open = t->files && !t->file[t->files - 1].whole;
    union {
        lmz_file_rec file;
        lmz_part_rec part;
        lmz_end_rec end;
    } r;
    lm_code rc = take_record(z, record, e);

    if (rc)
        return rc;
    const uint8_t *p = (const uint8_t *)record->data;
    size_t n = record->len;
    *is_event = true;
    if (!open && lmz_get_file(p, n, &r.file) && r.file.file == t->files) {
        rc = lmz_table_file(t, &r.file, z->stream->previous, z->where, LM_EFORMAT, e);
        v->kind = BEGIN;
    } else if (open && lmz_get_part(p, n, &r.part)) {
        *is_event = false;
        return lmz_table_part(t, &r.part, z->stream->previous, false, z->where, e);
    } else if (open && lmz_record_type(p) == 'C') {
        rc = read_chunk(z, b, v, record, e);
    } else if (open && lmz_get_end(p, n, &r.end)) {
        rc = lmz_table_end(t, &r.end, false, z->where, e);
        memcpy(v->digest, r.end.digest, 16);
        v->kind = END;
    } else if (!open && lmz_record_type(p) == 'I') {
        rc = read_last(z, record, e);
        v->kind = LAST;
    } else {
        return fail_record(z, e);
    }
    if (!rc && v->kind != LAST) {
        v->file = (uint32_t)(t->files - 1);
        v->pub = t->file[t->files - 1].pub;
    }
    return rc;
}

static void read_batch(lm_lmz *z, batch *b)
{
    lmz_stream *s = z->stream;
    lm_buf record = { 0 };

    b->n = b->chunks = b->done = 0;
    while (!s->over && b->n < EVENTS && b->chunks < s->chunks) {
        lm_err e = { 0 };
        bool is_event = true;

        if (lm_grow(&b->events, &b->cap, b->n + 1, sizeof *b->events, "reading an .lmz", &e)) {
            s->reading = e; /* no memory for an event that reports it */
            s->over = true;
            break;
        }
        event *v = &b->events[b->n];
        *v = (event){ .kind = FAULT };
        v->rc = read_record(z, b, v, &record, &is_event, &v->err);
        if (v->rc)
            v->kind = FAULT;
        s->over = v->rc || v->kind == LAST;
        b->n += is_event || v->rc;
    }
    lm_buf_fini(&record);
}

/* ---- Rounds ---- */

static void decode_event(lm_lmz *z, batch *b, event *v, int who)
{
    buffer *at = &b->buffers[v->buffer];
    lm_lmz_part p = { .tensor = v->tensor };
    lm_err why = { 0 };
    lmz_desk *d = &z->stream->desks[who];

    v->rc = lmz_desk_init(d, &why);
    if (!v->rc && lm_hash64(at->coded, v->rec.coded, 0) != v->rec.coded_check)
        v->rc = lm_fail(&why, LM_EFORMAT, "", NULL, "its coded bytes are damaged");
    if (!v->rc)
        v->rc =
            lmz_decode(d, z->base, &v->rec, v->base_file, v->base_from, at->coded, at->raw, &why);
    if (v->rc)
        lmz_fail_in(z, v->pub->name, &p, v->number, &why, &v->err);
}

/* Add the bytes of a batch to the digests of its files; a mismatch becomes a fault of the file's
 * end. */
static lm_code digest_batch(lm_lmz *z, batch *b, lm_err *e)
{
    lmz_stream *s = z->stream;
    lm_code rc = LM_OK;

    for (size_t i = 0; i < b->n && !rc; i++) {
        event *v = &b->events[i];
        uint8_t digest[16];

        if (v->kind == BEGIN)
            lm_hash128_init(&s->digest);
        if (v->kind == CHUNK)
            lm_hash128_add(&s->digest, b->buffers[v->buffer].raw, v->rec.raw);
        if (v->kind != END)
            continue;
        lm_hash128_end(&s->digest, digest);
        if (memcmp(digest, v->digest, 16))
            rc = lmz_fail_at(z, v->pub->name, NULL, UINT64_MAX, LM_EFORMAT,
                             "its bytes do not have the recorded digest", e);
    }
    b->n = 0;
    return rc;
}

typedef struct {
    lm_lmz *z;
    batch *read, *decode, *digest;
    lm_code rc;
    lm_err err;
} round;

static void work(void *ctx, int64_t begin, int64_t end, int who)
{
    round *r = ctx;

    for (int64_t i = begin; i < end; i++) {
        if (i == 0)
            read_batch(r->z, r->read);
        else if (i == 1)
            r->rc = digest_batch(r->z, r->digest, &r->err);
        else if (r->decode->events[i - 2].kind == CHUNK)
            decode_event(r->z, r->decode, &r->decode->events[i - 2], who);
    }
}

/* Decode the next batch for the caller, while the previous one is digested and the following one is
 * read. */
static lm_code turn(lm_lmz *z, lm_err *e)
{
    lmz_stream *s = z->stream;
    round r = { .z = z,
                .read = &s->batches[(s->turn + 1) % 3],
                .decode = &s->batches[s->turn],
                .digest = &s->batches[(s->turn + 2) % 3] };

    lm_par_for(z->par, (int64_t)r.decode->n + 2, 1, work, &r);
    s->turn = (s->turn + 1) % 3;
    s->serving = r.decode;
    if (!r.rc && s->reading.code) {
        r.rc = s->reading.code;
        r.err = s->reading;
    }
    if (r.rc)
        *e = r.err;
    return r.rc;
}

/* ---- The caller's side ---- */

static lm_code remember(lmz_stream *s, lm_code rc, const lm_err *e)
{
    if (rc && !s->rc) {
        s->rc = rc;
        s->err = *e;
    }
    return rc;
}

/* The next event for the caller, or its failure. */
static lm_code next_event(lm_lmz *z, event **v, lm_err *e)
{
    lmz_stream *s = z->stream;

    while (!s->rc && (!s->serving || s->serving->done == s->serving->n))
        remember(s, turn(z, e), e);
    if (!s->rc) {
        *v = &s->serving->events[s->serving->done];
        remember(s, (*v)->rc, &(*v)->err);
    }
    if (s->rc)
        *e = s->err;
    return s->rc;
}

lm_code lmz_stream_next(lm_lmz *z, const lm_bundle_file **f, lm_err *e)
{
    lmz_stream *s = z->stream;
    event *v;
    lm_code rc;

    *f = NULL;
    s->served = 0;
    s->in_file = false;
    while (!(rc = next_event(z, &v, e)) && v->kind != LAST) {
        s->serving->done++;
        if (v->kind == BEGIN) {
            s->in_file = true;
            *f = v->pub;
            return LM_OK;
        }
    }
    if (!rc && s->serving->n && !s->digested) { /* for the files that ended in the last batch */
        s->digested = true;
        rc = remember(s, digest_batch(z, s->serving, e), e);
        s->serving->n = s->serving->done + 1;
    }
    return rc;
}

lm_code lmz_stream_read(lm_lmz *z, void *dst, size_t cap, size_t *got, lm_err *e)
{
    lmz_stream *s = z->stream;
    event *v;

    *got = 0;
    while (s->in_file && *got < cap) {
        if (*got && s->serving->done == s->serving->n)
            break; /* return available bytes before waiting */
        lm_code rc = next_event(z, &v, e);
        if (rc && *got) {
            *e = (lm_err){ 0 }; /* returned by the next call */
            break;
        }
        if (rc)
            return rc;
        if (v->kind != CHUNK)
            break;
        size_t left = v->rec.raw - s->served, n = left < cap - *got ? left : cap - *got;
        memcpy((uint8_t *)dst + *got, s->serving->buffers[v->buffer].raw + s->served, n);
        *got += n;
        s->served += n;
        if (n == left) {
            s->served = 0;
            s->serving->done++;
        }
    }
    return LM_OK;
}

/* ---- Opening ---- */

static lm_code read_header(lm_lmz *z, lm_err *e)
{
    uint8_t p[LMZ_HEADER + LMZ_BASE_NAME];
    lm_code rc = read_bytes(z, p, LMZ_HEADER, NULL, e);
    size_t n;

    if (rc)
        return rc;
    if ((rc = lmz_check_version(z->where, p, e)))
        return rc;
    n = lmz_header_size(p);
    if (!n)
        return lm_fail(e, LM_EFORMAT, z->where, LMZ_DAMAGED, "its header is damaged");
    rc = read_bytes(z, p + LMZ_HEADER, n - LMZ_HEADER, NULL, e);
    rc = rc ? rc : lmz_keep_header(z, p, n, e);
    if (!rc)
        lm_hash128_add(&z->stream->records, p + n - 8, 8);
    return rc;
}

static lm_code make_stream(lm_lmz *z, lm_read_fn read, void *ctx, lm_err *e)
{
    lmz_stream *s;
    lm_code rc = lm_alloc_n(&z->stream, 1, sizeof *z->stream, "reading an .lmz", e);

    if (rc)
        return rc;
    s = z->stream;
    s->read = read;
    s->ctx = ctx;
    s->threads = lm_par_threads(z->par);
    s->chunks = s->threads == 1 ? 1 : CHUNKS_A_THREAD * (size_t)s->threads;
    lm_hash128_init(&s->records);
    rc = lm_alloc_n(&s->desks, (size_t)s->threads, sizeof *s->desks, "decoders", e);
    for (int i = 0; i < 3 && !rc; i++) {
        batch *b = &s->batches[i];
        rc = lm_alloc_n(&b->buffers, s->chunks, sizeof *b->buffers, "chunks", e);
    }
    return rc;
}

lm_code lm_lmz_stream_open(lm_read_fn read, void *ctx, const char *where, const lm_bundle_opts *o,
                           lm_lmz **out, lm_err *e)
{
    lm_lmz *z = NULL;
    lm_code rc = lmz_new(where, o, &z, e);

    *out = NULL;
    rc = rc ? rc : make_stream(z, read, ctx, e);
    rc = rc ? rc : read_header(z, e);
    if (!rc && z->header.delta)
        rc = lmz_base_open(NULL, where, &z->header, o, &z->base, e);
    if (rc)
        lm_lmz_free(z);
    else
        *out = z;
    return rc;
}

void lmz_stream_free(lmz_stream *s)
{
    if (!s)
        return;
    for (int i = 0; i < 3; i++) {
        batch *b = &s->batches[i];
        for (size_t k = 0; b->buffers && k < s->chunks; k++) {
            lm_free(b->buffers[k].coded);
            lm_free(b->buffers[k].raw);
        }
        lm_free(b->buffers);
        lm_free(b->events);
    }
    for (int i = 0; s->desks && i < s->threads; i++)
        lmz_desk_fini(&s->desks[i]);
    lm_free(s->desks);
    lm_free(s);
}
