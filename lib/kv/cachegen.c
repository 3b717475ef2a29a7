/* SPDX-License-Identifier: Apache-2.0 */
/* cachegen.c -- tables and chunks of a cache: its parts are learnt, coded and decoded side by side. */
#include "kv/cachegen.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kv/cachegen_impl.h"

enum { MAX_PARTS = 1 << 16 };

struct lm_cachegen {
    int64_t parts;
    cachegen_tables *part;
};

int lm_cachegen_bins(int level, bool values, int64_t layer, int64_t layers)
{
    static const int bins[5][LM_CACHEGEN_LEVELS] = {
        { 64, 32, 16, 8 }, { 64, 32, 16, 8 }, { 64, 16, 8, 4 }, { 64, 32, 16, 8 }, { 32, 16, 8, 4 },
    };
    int row = values ? 3 + (layer >= (layers + 15) / 16) : (int)(3 * layer / layers);
    return bins[row][level];
}

const char *lm_cachegen_show_levels(unsigned levels, char text[LM_CACHEGEN_SHOWN])
{
    size_t n = 0;
    *text = 0;
    for (int l = 0; l < LM_CACHEGEN_LEVELS; l++)
        if (levels >> l & 1)
            n += (size_t)snprintf(text + n, LM_CACHEGEN_SHOWN - n, "%s%d", n ? ", " : "", l);
    return text;
}

int64_t lm_cachegen_chunks(int64_t tokens)
{
    return tokens / LM_CACHEGEN_CHUNK + (tokens % LM_CACHEGEN_CHUNK > 0);
}

int64_t lm_cachegen_chunk_tokens(int64_t tokens, int64_t c)
{
    int64_t left = tokens - c * LM_CACHEGEN_CHUNK;
    return left < LM_CACHEGEN_CHUNK ? left : LM_CACHEGEN_CHUNK;
}

/* ---- Checks ---- */

static lm_code check_parts(const lm_cachegen_part *part, int64_t parts, lm_err *e)
{
    if (parts < 1 || parts > MAX_PARTS)
        return lm_fail(e, LM_EUSAGE, "", NULL, "%lld parts of a cache", (long long)parts);
    for (int64_t i = 0; i < parts; i++) {
        const lm_cachegen_part *p = &part[i];
        if (p->heads < 1 || p->width < 1 || p->heads > LM_CACHEGEN_CHANNELS ||
            p->width > LM_CACHEGEN_CHANNELS || cachegen_channels(p) > LM_CACHEGEN_CHANNELS)
            return lm_fail(e, LM_EUSAGE, "", NULL,
                           "part %lld has %lld heads of %lld numbers, together 1 to %d are coded",
                           (long long)i, (long long)p->heads, (long long)p->width,
                           LM_CACHEGEN_CHANNELS);
        if (p->bins < 4 || p->bins > LM_CACHEGEN_BINS || p->bins % 2)
            return lm_fail(e, LM_EUSAGE, "", NULL,
                           "part %lld has %d bins, even numbers 4 to %d are coded", (long long)i,
                           p->bins, LM_CACHEGEN_BINS);
    }
    return LM_OK;
}

static lm_code check_rows(const lm_cachegen_rows *rows, int64_t c, lm_err *e)
{
    if (rows->dtype != LM_DTYPE_F32 && rows->dtype != LM_DTYPE_F16 && rows->dtype != LM_DTYPE_BF16)
        return lm_fail(e, LM_EUSAGE, "", NULL, "a cache in %s: f32, f16 and bf16 are coded",
                       lm_dtype_name(rows->dtype));
    if (rows->tokens < 0 || rows->tokens > INT32_MAX || c < 0 ||
        (c && c >= lm_cachegen_chunks(rows->tokens)))
        return lm_fail(e, LM_EUSAGE, "", NULL, "chunk %lld of %lld tokens", (long long)c,
                       (long long)rows->tokens);
    return LM_OK;
}

/* ---- Parts side by side ---- */

typedef struct job job;
struct job {
    lm_cachegen *g;
    const lm_cachegen_rows *rows;
    const lm_rans_kernels *kernels;
    lm_code (*run)(job *j, cachegen_work *w, int64_t part, lm_err *e);
    int64_t first, n;    /* tokens of the chunk */
    const uint8_t **src; /* [parts]: streams to decode, */
    size_t *bytes;       /* their sizes, */
    lm_buf *out;         /* [parts]: and those that are written */
    cachegen_work *work; /* [threads] */
    lm_err *err;         /* [parts] */
};

static void run_parts(void *ctx, int64_t begin, int64_t end, int worker)
{
    job *j = ctx;
    for (int64_t i = begin; i < end; i++)
        if (j->run(j, &j->work[worker], i, &j->err[i]))
            lm_err_in(&j->err[i], "part %lld", (long long)i);
}

static void free_works(cachegen_work *w, int threads)
{
    for (int i = 0; w && i < threads; i++) {
        lm_free(w[i].x);
        lm_free(w[i].anchor);
        lm_free(w[i].code);
    }
    lm_free(w);
}

static lm_code make_works(const lm_cachegen *g, int threads, cachegen_work **out, lm_err *e)
{
    size_t most = 0;
    lm_code rc = lm_alloc_n(out, (size_t)threads, sizeof **out, "coding a cache", e);
    for (int64_t i = 0; i < g->parts; i++) {
        size_t channels = (size_t)cachegen_channels(&g->part[i].part);
        most = channels > most ? channels : most;
    }
    for (int i = 0; i < threads && !rc; i++) {
        cachegen_work *w = &(*out)[i];
        rc = lm_alloc_n(&w->x, most, sizeof *w->x, "coding a cache", e);
        rc = rc ? rc : lm_alloc_n(&w->anchor, most, sizeof *w->anchor, "coding a cache", e);
        rc = rc ? rc : lm_alloc_n(&w->code, most, LM_CACHEGEN_CHUNK, "coding a cache", e);
    }
    return rc;
}

/* j->run for each part; the first failure in their order. */
static lm_code run_job(job *j, lm_par *par, lm_err *e)
{
    int threads = lm_par_threads(par);
    lm_code rc = make_works(j->g, threads, &j->work, e);
    rc = rc ? rc : lm_alloc_n(&j->err, (size_t)j->g->parts, sizeof *j->err, "coding a cache", e);
    if (!rc)
        lm_par_for(par, j->g->parts, 1, run_parts, j);
    for (int64_t i = 0; i < j->g->parts && !rc; i++) {
        rc = j->err[i].code;
        if (rc)
            *e = j->err[i];
    }
    free_works(j->work, threads);
    lm_free(j->err);
    return rc;
}

/* ---- Tables ---- */

static lm_code code_chunk(cachegen_work *w, const lm_cachegen_part *p, const lm_cachegen_rows *rows,
                          const void *data, int64_t first, int64_t n, lm_err *e)
{
    int64_t token = cachegen_code_rows(w, p, rows, data, first, n);
    if (token < 0)
        return LM_OK;
    return lm_fail(e, LM_ENUMERIC, "", NULL, "token %lld: NaN, infinite or too large a number",
                   (long long)token);
}

static void count_codes(const cachegen_work *w, const lm_cachegen_part *p, int64_t n,
                        cachegen_counts *counts)
{
    int64_t channels = cachegen_channels(p), symbols = cachegen_symbols(p);
    for (int64_t t = 0; t < n; t++) {
        const uint8_t *code = w->code + t * channels;
        uint32_t *count = cachegen_is_anchor(t) ? counts->anchor : counts->difference;
        int64_t step = cachegen_is_anchor(t) ? CACHEGEN_ANCHORS : symbols;
        for (int64_t c = 0; c < channels; c++, count += step)
            count[code[c]]++;
    }
}

static lm_code learn_part(job *j, cachegen_work *w, int64_t i, lm_err *e)
{
    cachegen_tables *t = &j->g->part[i];
    size_t channels = (size_t)cachegen_channels(&t->part);
    cachegen_counts counts = { 0 };
    lm_code rc = lm_alloc_n(&counts.anchor, channels * CACHEGEN_ANCHORS, sizeof *counts.anchor,
                            "counts of a cache", e);
    rc = rc ? rc
            : lm_alloc_n(&counts.difference, channels * (size_t)cachegen_symbols(&t->part),
                         sizeof *counts.difference, "counts of a cache", e);
    for (int64_t c = 0; c < lm_cachegen_chunks(j->rows->tokens) && !rc; c++) {
        int64_t n = lm_cachegen_chunk_tokens(j->rows->tokens, c);
        rc = code_chunk(w, &t->part, j->rows, j->rows->data[i], c * LM_CACHEGEN_CHUNK, n, e);
        if (!rc)
            count_codes(w, &t->part, n, &counts);
    }
    rc = rc ? rc : cachegen_fit(t, &counts, e);
    lm_free(counts.anchor);
    lm_free(counts.difference);
    return rc;
}

static lm_code make(const lm_cachegen_part *part, int64_t parts, lm_cachegen **out, lm_err *e)
{
    lm_code rc = check_parts(part, parts, e);
    *out = NULL;
    rc = rc ? rc : lm_alloc_n(out, 1, sizeof **out, "tables of a cache", e);
    rc =
        rc ? rc
           : lm_alloc_n(&(*out)->part, (size_t)parts, sizeof *(*out)->part, "tables of a cache", e);
    for (int64_t i = 0; i < parts && !rc; i++)
        (*out)->part[i].part = part[i];
    if (!rc)
        (*out)->parts = parts;
    return rc;
}

lm_code lm_cachegen_learn(const lm_cachegen_part *part, int64_t parts, const lm_cachegen_rows *rows,
                          lm_par *par, lm_cachegen **out, lm_err *e)
{
    lm_code rc = make(part, parts, out, e);
    rc = rc ? rc : check_rows(rows, 0, e);
    rc = rc ? rc : run_job(&(job){ .g = *out, .rows = rows, .run = learn_part }, par, e);
    if (rc) {
        lm_cachegen_free(*out);
        *out = NULL;
    }
    return rc;
}

void lm_cachegen_free(lm_cachegen *g)
{
    for (int64_t i = 0; g && i < g->parts; i++)
        cachegen_tables_fini(&g->part[i]);
    if (g)
        lm_free(g->part);
    lm_free(g);
}

/* ---- Lists of pieces: u32 first, u32 sizes, then the pieces ---- */

static void set32(char *p, uint32_t v)
{
    for (int i = 0; i < 4; i++)
        p[i] = (char)(v >> 8 * i);
}

static uint32_t get32(const uint8_t *p)
{
    return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static lm_code add_piece_size(lm_buf *out, size_t list, int64_t i, size_t bytes, lm_err *e)
{
    if (bytes > UINT32_MAX)
        return lm_fail(e, LM_ELIMIT, "", NULL, "part %lld takes %zu bytes, 4 GiB are possible",
                       (long long)i, bytes);
    set32(out->data + list + 4 + 4 * (size_t)i, (uint32_t)bytes);
    return LM_OK;
}

static lm_code begin_pieces(lm_buf *out, uint32_t head, int64_t pieces, size_t *list, lm_err *e)
{
    size_t bytes = 4 + 4 * (size_t)pieces;
    lm_code rc = lm_buf_room(out, bytes, e);
    if (rc)
        return rc;
    *list = out->len;
    memset(out->data + out->len, 0, bytes + 1);
    set32(out->data + out->len, head);
    out->len += bytes;
    return LM_OK;
}

/* The pieces must fill the bytes. */
static bool pieces_fit(const uint8_t *p, size_t len, int64_t pieces, uint32_t *head)
{
    size_t left = len, list = 4 + 4 * (size_t)pieces;
    if (len < list)
        return false;
    *head = get32(p);
    left -= list;
    for (int64_t i = 0; i < pieces; i++) {
        size_t n = get32(p + 4 + 4 * i);
        if (n > left)
            return false;
        left -= n;
    }
    return !left;
}

lm_code lm_cachegen_write(const lm_cachegen *g, lm_buf *out, lm_err *e)
{
    size_t list;
    lm_code rc = begin_pieces(out, (uint32_t)g->parts, g->parts, &list, e);
    for (int64_t i = 0; i < g->parts && !rc; i++) {
        size_t before = out->len;
        rc = cachegen_tables_write(&g->part[i], out, e);
        rc = rc ? rc : add_piece_size(out, list, i, out->len - before, e);
    }
    return rc;
}

lm_code lm_cachegen_read(const lm_cachegen_part *part, int64_t parts, const void *bytes, size_t len,
                         lm_cachegen **out, lm_err *e)
{
    const uint8_t *list = bytes, *p = NULL;
    uint32_t head = 0;
    lm_code rc = make(part, parts, out, e);
    if (!rc && (!pieces_fit(list, len, parts, &head) || head != parts))
        rc = lm_fail(e, LM_EFORMAT, "", "fetch or write it again",
                     "damaged tables: they are not those of %lld parts", (long long)parts);
    if (!rc)
        p = list + 4 + 4 * parts;
    for (int64_t i = 0; i < parts && !rc; i++) {
        size_t n = get32(list + 4 + 4 * i);
        rc = cachegen_tables_read(&(*out)->part[i], p, n, e);
        if (rc)
            lm_err_in(e, "part %lld", (long long)i);
        p += n;
    }
    if (rc) {
        lm_cachegen_free(*out);
        *out = NULL;
    }
    return rc;
}

/* ---- Chunks ---- */

static lm_rans_shape shape_of(const cachegen_tables *t, const cachegen_work *w, int64_t n)
{
    lm_rans_shape f = { .rows = n, .cols = cachegen_channels(&t->part), .kind = w->kind };
    for (int set = 0; set < 2; set++)
        f.set[set] = (lm_rans_set){ lm_rans_width(cachegen_table_symbols(t, set)), t->start[set],
                                    t->at[set] };
    return f;
}

static lm_code encode_part(job *j, cachegen_work *w, int64_t i, lm_err *e)
{
    const cachegen_tables *t = &j->g->part[i];
    lm_buf *out = &j->out[i];
    lm_code rc = code_chunk(w, &t->part, j->rows, j->rows->data[i], j->first, j->n, e);
    if (rc)
        return rc;
    lm_rans_shape f = shape_of(t, w, j->n);
    size_t room = lm_rans_room(f.rows, f.cols), scales = 2 * (size_t)j->n, n;
    rc = lm_buf_room(out, scales + room, e);
    if (rc)
        return rc;
    uint8_t *p = (uint8_t *)out->data + out->len;
    for (int64_t r = 0; r < j->n; r++, p += 2)
        p[0] = (uint8_t)w->scale[r], p[1] = (uint8_t)(w->scale[r] >> 8);
    cachegen_to_symbols(t, w->code, j->n);
    n = j->kernels->put(&f, w->code, p);
    if (!n)
        return lm_fail(e, LM_EUSAGE, "", NULL, "the tables were made for other rows");
    memmove(p, p + room - n, n);
    out->len += scales + n;
    return LM_OK;
}

static lm_code join_parts(const job *j, lm_buf *out, lm_err *e)
{
    size_t list;
    lm_code rc = begin_pieces(out, (uint32_t)j->n, j->g->parts, &list, e);
    for (int64_t i = 0; i < j->g->parts && !rc; i++) {
        rc = lm_buf_add(out, j->out[i].data, j->out[i].len, e);
        rc = rc ? rc : add_piece_size(out, list, i, j->out[i].len, e);
    }
    return rc;
}

lm_code lm_cachegen_encode(const lm_cachegen *g, const lm_cachegen_rows *rows, int64_t c,
                           lm_cpu_level cpu, lm_par *par, lm_buf *out, lm_err *e)
{
    job j = { .g = (lm_cachegen *)g, .rows = rows, .kernels = lm_rans_at(cpu), .run = encode_part };
    lm_code rc = check_rows(rows, c, e);
    j.first = c * LM_CACHEGEN_CHUNK;
    j.n = lm_cachegen_chunk_tokens(rows->tokens, c);
    rc = rc ? rc : lm_alloc_n(&j.out, (size_t)g->parts, sizeof *j.out, "coding a cache", e);
    rc = rc ? rc : run_job(&j, par, e);
    rc = rc ? rc : join_parts(&j, out, e);
    for (int64_t i = 0; j.out && i < g->parts; i++)
        lm_buf_fini(&j.out[i]);
    lm_free(j.out);
    return rc;
}

static lm_code decode_part(job *j, cachegen_work *w, int64_t i, lm_err *e)
{
    const cachegen_tables *t = &j->g->part[i];
    const uint8_t *p = j->src[i];
    size_t scales = 2 * (size_t)j->n;
    bool good = j->bytes[i] >= scales;
    for (int64_t r = 0; r < j->n && good; r++, p += 2) {
        w->scale[r] = (uint16_t)(p[0] | p[1] << 8);
        w->kind[r] = !cachegen_is_anchor(r);
        good = w->scale[r] < 0x7f80; /* a finite number, not below 0 */
    }
    lm_rans_shape f = shape_of(t, w, j->n);
    if (!good || !j->kernels->get(&f, p, j->bytes[i] - scales, w->code))
        return lm_fail(e, LM_EFORMAT, "", "fetch or write it again", "a damaged chunk");
    cachegen_from_symbols(t, w->code, j->n);
    cachegen_decode_rows(w, &t->part, j->rows, j->rows->data[i], j->first, j->n);
    return LM_OK;
}

lm_code lm_cachegen_decode(const lm_cachegen *g, const void *bytes, size_t len,
                           const lm_cachegen_rows *rows, int64_t c, lm_cpu_level cpu, lm_par *par,
                           lm_err *e)
{
    const uint8_t *list = bytes, *p = NULL;
    job j = { .g = (lm_cachegen *)g, .rows = rows, .kernels = lm_rans_at(cpu), .run = decode_part };
    uint32_t head = 0;
    lm_code rc = check_rows(rows, c, e);
    j.first = c * LM_CACHEGEN_CHUNK;
    j.n = lm_cachegen_chunk_tokens(rows->tokens, c);
    if (!rc && (!pieces_fit(list, len, g->parts, &head) || head != j.n))
        rc = lm_fail(e, LM_EFORMAT, "", "fetch or write it again",
                     "a damaged chunk: it has not %lld tokens of %lld parts", (long long)j.n,
                     (long long)g->parts);
    if (!rc)
        p = list + 4 + 4 * g->parts;
    rc = rc ? rc : lm_alloc_n(&j.src, (size_t)g->parts, sizeof *j.src, "decoding a cache", e);
    rc = rc ? rc : lm_alloc_n(&j.bytes, (size_t)g->parts, sizeof *j.bytes, "decoding a cache", e);
    for (int64_t i = 0; i < g->parts && !rc; i++) {
        j.src[i] = p;
        j.bytes[i] = get32(list + 4 + 4 * i);
        p += j.bytes[i];
    }
    rc = rc ? rc : run_job(&j, par, e);
    lm_free(j.src);
    lm_free(j.bytes);
    return rc;
}
