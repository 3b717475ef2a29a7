/* SPDX-License-Identifier: Apache-2.0 */
/* tokens_pool.c -- see tokens_pool.h. */
#include "format/tokens_pool.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/file.h"
#include "base/mem.h"
#include "base/rng.h"
#include "base/stop.h"
#include "base/text.h"

enum { BLOCK = 4096 };

/* An unlinked file: appended to, then mapped. */
typedef struct {
    FILE *file;
    const uint8_t *data;
    size_t size;
} spool;

typedef struct {
    int64_t first, docs, tokens; /* first: its first document */
    int64_t take;                /* documents in the selection */
} source;

struct lm_tokens_pool {
    char *dir;
    int n_sources, last;
    int64_t vocab, docs, tokens;
    int id_bytes;
    uint32_t id_mask; /* without the loss mark, if ids have one */
    spool ids, ends;  /* ends: u64, where each document ends, in ids */
    source *source;
};

static lm_code open_spool(spool *s, const char *dir, lm_err *e)
{
    int fd = lm_file_unnamed(dir);
    lm_code rc = LM_OK;
    if (fd < 0 || !(s->file = fdopen(fd, "w+"))) {
        rc = lm_fail(e, LM_EIO, dir, "choose another output folder",
                     "cannot create a temporary file");
        if (fd >= 0)
            close(fd);
    }
    return rc;
}

static lm_code write_spool(lm_tokens_pool *p, spool *s, const void *data, size_t n, lm_err *e)
{
    if (fwrite(data, 1, n, s->file) == n)
        return LM_OK;
    return lm_fail(e, LM_EIO, p->dir, "free space on the disk", "cannot write a temporary file");
}

static lm_code map_spool(lm_tokens_pool *p, spool *s, size_t size, lm_err *e)
{
    if (fflush(s->file))
        return lm_fail(e, LM_EIO, p->dir, "free space on the disk",
                       "cannot write a temporary file");
    if (s->data || !size)
        return LM_OK;
    void *m = mmap(NULL, size, PROT_READ, MAP_SHARED, fileno(s->file), 0);
    if (m == MAP_FAILED)
        return lm_fail(e, LM_EIO, p->dir, NULL, "cannot map %zu byte%s of a temporary file", size,
                       lm_plural(size));
    s->data = m;
    s->size = size;
    return LM_OK;
}

static void close_spool(spool *s)
{
    if (s->data)
        munmap((void *)s->data, s->size);
    if (s->file)
        fclose(s->file);
}

lm_code lm_tokens_pool_new(const char *dir, int sources, int64_t vocab, bool marked,
                           lm_tokens_pool **out, lm_err *e)
{
    lm_tokens_pool *p;
    lm_code rc = lm_alloc_n(&p, 1, sizeof *p, "a token pool", e);
    if (rc)
        return rc;
    p->n_sources = sources;
    p->vocab = vocab;
    p->id_mask = marked ? LM_TOKENS_ID : UINT32_MAX;
    p->id_bytes = vocab <= 65536 && !marked ? 2 : 4;
    rc = lm_strdup(&p->dir, dir, e);
    if (!rc)
        rc = lm_alloc_n(&p->source, (size_t)sources, sizeof *p->source, "sources", e);
    if (!rc)
        rc = open_spool(&p->ids, dir, e);
    if (!rc)
        rc = open_spool(&p->ends, dir, e);
    if (rc) {
        lm_tokens_pool_free(p);
        return rc;
    }
    *out = p;
    return LM_OK;
}

void lm_tokens_pool_free(lm_tokens_pool *p)
{
    if (!p)
        return;
    close_spool(&p->ids);
    close_spool(&p->ends);
    lm_free(p->source);
    lm_free(p->dir);
    lm_free(p);
}

lm_code lm_tokens_pool_add(lm_tokens_pool *p, int src, const uint32_t *ids, int64_t n, lm_err *e)
{
    uint16_t narrow[BLOCK];
    if (src < p->last || src >= p->n_sources)
        return lm_fail(e, LM_EBUG, "token pool", NULL, "source %d after %d", src, p->last);
    for (int64_t at = 0; at < n; at += BLOCK) {
        int64_t k = n - at < BLOCK ? n - at : BLOCK;
        for (int64_t i = 0; i < k; i++) {
            if ((int64_t)(ids[at + i] & p->id_mask) >= p->vocab)
                return lm_fail(e, LM_EFORMAT, "token ids",
                               "use the tokenizer that the ids were made with",
                               "id %u does not fit a vocabulary of %lld", ids[at + i] & p->id_mask,
                               (long long)p->vocab);
            narrow[i] = (uint16_t)ids[at + i];
        }
        lm_code rc = p->id_bytes == 2 ? write_spool(p, &p->ids, narrow, 2 * (size_t)k, e)
                                      : write_spool(p, &p->ids, ids + at, 4 * (size_t)k, e);
        if (rc)
            return rc;
    }
    source *s = &p->source[src];
    if (!s->docs)
        s->first = p->docs;
    s->docs++;
    s->tokens += n;
    p->docs++;
    p->tokens += n;
    p->last = src;
    uint64_t end = (uint64_t)p->tokens;
    return write_spool(p, &p->ends, &end, 8, e);
}

int64_t lm_tokens_pool_docs(const lm_tokens_pool *p, int src)
{
    return src < 0 ? p->docs : p->source[src].docs;
}

int64_t lm_tokens_pool_tokens(const lm_tokens_pool *p, int src)
{
    return src < 0 ? p->tokens : p->source[src].tokens;
}

/* ---- choosing ---- */

static int64_t doc_begin(const lm_tokens_pool *p, int64_t d)
{
    return d ? (int64_t)((const uint64_t *)p->ends.data)[d - 1] : 0;
}

/* The k-th document of source s, in its own order; beyond the last it starts again. */
static int64_t nth_of(const lm_tokens_pool *p, const lm_tokens_mix *mix, int s, int64_t k)
{
    const source *src = &p->source[s];
    int64_t epoch = k / src->docs, i = k % src->docs;
    if (mix->shuffle) {
        uint64_t sub = ((uint64_t)s << 32) | (uint64_t)epoch;
        i = (int64_t)lm_rng_permute(lm_rng_make(mix->seed, "shard-source", sub), (uint64_t)i,
                                    (uint64_t)src->docs);
    }
    return src->first + i;
}

/* The number of ids that can be written without reading a source more than once. */
static double natural_total(const lm_tokens_pool *p, const double *share)
{
    double total = INFINITY;
    for (int s = 0; s < p->n_sources; s++)
        if (share[s] > 0 && (double)p->source[s].tokens / share[s] < total)
            total = (double)p->source[s].tokens / share[s];
    return total;
}

static lm_code choose_from(lm_tokens_pool *p, const lm_tokens_mix *mix, int s, int64_t quota,
                           lm_err *e)
{
    source *src = &p->source[s];
    double most = mix->max_epochs > 0 ? mix->max_epochs : 1;
    src->take = 0;
    if (quota == 0)
        return LM_OK;
    if ((double)quota > most * (double)src->tokens)
        return lm_fail(
            e, LM_EUSAGE, "mixture", "choose fewer tokens or allow more passes",
            "source %d has %lld id%s, %lld are required from it, at most %g passes are allowed",
            s + 1, (long long)src->tokens, lm_plural(src->tokens), (long long)quota, most);
    for (int64_t got = 0; got < quota; src->take++) {
        int64_t d = nth_of(p, mix, s, src->take);
        got += doc_begin(p, d + 1) - doc_begin(p, d);
    }
    return LM_OK;
}

static lm_code choose(lm_tokens_pool *p, const lm_tokens_mix *mix, lm_err *e)
{
    double sum = 0, *share;
    if (!mix->weight && !mix->tokens) {
        for (int s = 0; s < p->n_sources; s++)
            p->source[s].take = p->source[s].docs;
        return LM_OK;
    }
    lm_code rc = lm_alloc_n(&share, (size_t)p->n_sources, sizeof *share, "weights", e);
    if (rc)
        return rc;
    for (int s = 0; s < p->n_sources; s++) {
        share[s] = mix->weight ? mix->weight[s] : (double)p->source[s].tokens;
        sum += share[s];
        if (!(share[s] >= 0) || (share[s] > 0 && !p->source[s].tokens))
            rc = lm_fail(e, LM_EUSAGE, "mixture", "give weights to sources with text",
                         "source %d has weight %g and %lld id%s", s + 1, share[s],
                         (long long)p->source[s].tokens, lm_plural(p->source[s].tokens));
    }
    if (!rc && !(sum > 0))
        rc = lm_fail(e, LM_EUSAGE, "mixture", "give one of them more", "all weights are 0");
    for (int s = 0; s < p->n_sources && !rc; s++)
        share[s] /= sum;
    double total = rc ? 0 : mix->tokens ? (double)mix->tokens : natural_total(p, share);
    for (int s = 0; s < p->n_sources && !rc; s++)
        rc = choose_from(p, mix, s, llround(total * share[s]), e);
    lm_free(share);
    return rc;
}

/* ---- writing ---- */

static lm_code write_doc(const lm_tokens_pool *p, int64_t d, uint32_t **buf, size_t *cap,
                         lm_tokens_writer *w, lm_err *e)
{
    int64_t from = doc_begin(p, d), n = doc_begin(p, d + 1) - from;
    lm_code rc = lm_grow(buf, cap, (size_t)n + 1, sizeof **buf, "ids of a document", e);
    if (rc)
        return rc;
    if (p->id_bytes == 4) {
        if (n)
            memcpy(*buf, p->ids.data + 4 * from, 4 * (size_t)n);
    } else {
        const uint16_t *src = (const uint16_t *)p->ids.data + from;
        for (int64_t i = 0; i < n; i++)
            (*buf)[i] = src[i];
    }
    rc = lm_tokens_put(w, *buf, n, e);
    return rc ? rc : lm_tokens_end_doc(w, e);
}

lm_code lm_tokens_pool_write(lm_tokens_pool *p, const lm_tokens_mix *mix, lm_tokens_writer *w,
                             int64_t *taken, lm_sink *sink, lm_err *e)
{
    uint32_t *buf = NULL;
    size_t cap = 0;
    int64_t n = 0;
    lm_rng order = lm_rng_make(mix->seed, "shard-shuffle", 0);
    lm_code rc = map_spool(p, &p->ids, (size_t)p->tokens * (size_t)p->id_bytes, e);
    if (!rc)
        rc = map_spool(p, &p->ends, (size_t)p->docs * 8, e);
    if (!rc)
        rc = choose(p, mix, e);
    for (int s = 0; s < p->n_sources && !rc; s++) {
        n += p->source[s].take;
        if (taken)
            taken[s] = p->source[s].take;
    }
    for (int64_t i = 0; i < n && !rc && !lm_stopping(); i++) {
        int64_t k = mix->shuffle ? (int64_t)lm_rng_permute(order, (uint64_t)i, (uint64_t)n) : i;
        int s = 0;
        while (k >= p->source[s].take)
            k -= p->source[s++].take;
        rc = write_doc(p, nth_of(p, mix, s, k), &buf, &cap, w, e);
        if (i % 256 == 0)
            lm_progress(sink, "writing", (double)i, (double)n, "documents", NULL);
    }
    lm_free(buf);
    return rc;
}
