/* SPDX-License-Identifier: Apache-2.0 */
/* tokens.c -- see tokens.h: opening, checking and reading token datasets. */
#include "format/tokens.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "base/buf.h"
#include "base/mem.h"
#include "base/text.h"
#include "format/tokens_layout.h"

enum { BLOCK = 4096 }; /* ids processed at a time */

const char *lm_tokens_kind_name(lm_tokens_kind k)
{
    static const char *const names[] = { "auto", "megatron", "llmc", "nanogpt" };
    return names[k];
}

lm_tokens_kind lm_tokens_kind_find(const char *name)
{
    lm_tokens_kind k = LM_TOKENS_NANOGPT;
    while (k != LM_TOKENS_AUTO && strcmp(name, lm_tokens_kind_name(k)) != 0)
        k--;
    return k;
}

/* ---- reading ---- */

static void widen(const uint8_t *src, lm_id_type type, int64_t n, uint32_t *dst)
{
    switch (type) {
    case LM_ID_TYPE_U8:
        for (int64_t i = 0; i < n; i++)
            dst[i] = src[i];
        return;
    case LM_ID_TYPE_U16:
        for (int64_t i = 0; i < n; i++) {
            uint16_t v;
            memcpy(&v, src + 2 * i, 2);
            dst[i] = v;
        }
        return;
    case LM_ID_TYPE_U32:
        memcpy(dst, src, (size_t)n * 4);
        return;
    case LM_ID_TYPE_I8:
        for (int64_t i = 0; i < n; i++)
            dst[i] = (int8_t)src[i] < 0 ? UINT32_MAX : src[i];
        return;
    case LM_ID_TYPE_I16:
        for (int64_t i = 0; i < n; i++) {
            int16_t v;
            memcpy(&v, src + 2 * i, 2);
            dst[i] = v < 0 ? UINT32_MAX : (uint32_t)v;
        }
        return;
    case LM_ID_TYPE_I32:
        for (int64_t i = 0; i < n; i++) {
            int32_t v;
            memcpy(&v, src + 4 * i, 4);
            dst[i] = v < 0 ? UINT32_MAX : (uint32_t)v;
        }
        return;
    case LM_ID_TYPE_I64:
        for (int64_t i = 0; i < n; i++) {
            int64_t v;
            memcpy(&v, src + 8 * i, 8);
            dst[i] = v < 0 || v > UINT32_MAX ? UINT32_MAX : (uint32_t)v;
        }
        return;
    }
}

/* The range has been checked. */
static void read_ids(const lm_tokens *t, int64_t at, int64_t n, uint32_t *dst)
{
    size_t k = 0;
    if (t->n_parts > 1) { /* the last part that starts at or before `at` */
        size_t lo = 0, hi = t->n_parts;
        while (hi - lo > 1) {
            size_t mid = (lo + hi) / 2;
            if (t->parts[mid].start <= at)
                lo = mid;
            else
                hi = mid;
        }
        k = lo;
    }
    for (; n > 0; k++) {
        const lm_tokens_part *p = &t->parts[k];
        int64_t from = at - p->start, take = p->count - from < n ? p->count - from : n;
        widen(p->ids + (size_t)from * (size_t)t->id_bytes, t->type, take, dst);
        at += take;
        dst += take;
        n -= take;
    }
}

/* Drop pages after reading: they stay in the page cache, but would add up to the whole dataset in
 * this process's resident set over an epoch.  The kernel maps 64 KiB around each touch. */
static void forget_ids(const lm_tokens *t, int64_t at, int64_t n)
{
    const uintptr_t around = 65536;
    for (size_t k = 0; k < t->n_parts; k++) {
        const lm_tokens_part *p = &t->parts[k];
        int64_t from = at > p->start ? at - p->start : 0, to = at + n - p->start;
        if (to <= 0 || from >= p->count)
            continue;
        uintptr_t base = (uintptr_t)p->map.data;
        uintptr_t a = (uintptr_t)(p->ids + from * t->id_bytes) & ~(around - 1);
        uintptr_t b = (uintptr_t)(p->ids + (to < p->count ? to : p->count) * t->id_bytes);
        b = (b + around - 1) & ~(around - 1);
        a = a < base ? base : a;
        b = b > base + p->map.size ? base + p->map.size : b;
        madvise((void *)a, b - a, MADV_DONTNEED);
    }
}

/* The n ids from position `at` on. */
static lm_code check_ids(const lm_tokens *t, int64_t at, int64_t n, const uint32_t *ids,
                         int64_t vocab, lm_err *e)
{
    for (int64_t i = 0; i < n; i++) {
        if ((int64_t)ids[i] < vocab)
            continue;
        if (ids[i] == UINT32_MAX)
            return lm_fail(e, LM_EFORMAT, t->path, "shard the text again",
                           "the id at position %lld is negative or beyond 32 bits",
                           (long long)(at + i));
        return lm_fail(e, LM_EFORMAT, t->path,
                       "use the tokenizer and the model that belong together",
                       "id %u at position %lld does not fit a vocabulary of %lld", ids[i],
                       (long long)(at + i), (long long)vocab);
    }
    return LM_OK;
}

lm_code lm_tokens_read(const lm_tokens *t, int64_t at, int64_t n, int64_t vocab, uint32_t *dst,
                       lm_err *e)
{
    if (at < 0 || n < 0 || at > t->count || n > t->count - at)
        return lm_fail(e, LM_EUSAGE, t->path, NULL,
                       "%lld id%s from position %lld on are requested, it holds %lld", (long long)n,
                       lm_plural(n), (long long)at, (long long)t->count);
    read_ids(t, at, n, dst);
    if (n >= 64) /* below: the next call may need the same page */
        forget_ids(t, at, n);
    return check_ids(t, at, n, dst, vocab, e);
}

bool lm_tokens_masked(const lm_tokens *t)
{
    return t->mask.data != NULL;
}

lm_code lm_tokens_read_mask(const lm_tokens *t, int64_t at, int64_t n, uint8_t *dst, lm_err *e)
{
    if (at < 0 || n < 0 || at > t->count || n > t->count - at)
        return lm_fail(e, LM_EUSAGE, t->path, NULL,
                       "%lld loss mark%s from position %lld on are requested, it holds %lld",
                       (long long)n, lm_plural((uint64_t)n), (long long)at, (long long)t->count);
    if (!t->mask.data) {
        memset(dst, 1, (size_t)n);
        return LM_OK;
    }
    memcpy(dst, (const uint8_t *)t->mask.data + at, (size_t)n);
    for (int64_t i = 0; i < n; i++)
        if (dst[i] > 1)
            return lm_fail(e, LM_EFORMAT, t->path, "shard the data again",
                           "the loss mark of id %lld is %u, expected 0 or 1", (long long)(at + i),
                           dst[i]);
    return LM_OK;
}

/* ---- documents ---- */

/* llm.c documents begin with the end-of-text id, nanoGPT documents end with it. */
static bool starts_here(const lm_tokens *t, int64_t at, const uint32_t *ids, int64_t i)
{
    if (at == 0)
        return true;
    return t->kind == LM_TOKENS_LLMC ? ids[i] == t->eot : i > 0 && ids[i - 1] == t->eot;
}

typedef struct {
    const lm_tokens *t;
    int64_t *counts; /* by chunk: number of starts, then offset of the first */
    int64_t *starts; /* NULL in the counting pass */
} find_job;

enum { CHUNK = 1 << 20 };

static void find_starts(void *ctx, int64_t begin, int64_t end, int worker)
{
    find_job *job = ctx;
    uint32_t buf[BLOCK + 1];
    (void)worker;
    for (int64_t c = begin; c < end; c++) {
        int64_t at = c * CHUNK, stop = at + CHUNK < job->t->count ? at + CHUNK : job->t->count;
        int64_t found = 0;
        while (at < stop) {
            int64_t n = stop - at < BLOCK ? stop - at : BLOCK, before = at > 0;
            read_ids(job->t, at - before, n + before, buf);
            for (int64_t i = 0; i < n; i++) {
                if (!starts_here(job->t, at + i, buf, i + before))
                    continue;
                if (job->starts)
                    job->starts[job->counts[c] + found] = at + i;
                found++;
            }
            at += n;
        }
        forget_ids(job->t, c * CHUNK, stop - c * CHUNK);
        if (!job->starts)
            job->counts[c] = found;
    }
}

lm_code lm_tokens_index(lm_tokens *t, lm_par *p, lm_err *e)
{
    if (t->kind == LM_TOKENS_MEGATRON || t->starts || t->count == 0)
        return LM_OK;
    if (t->eot < 0) {
        t->docs = 1;
        return LM_OK;
    }
    int64_t chunks = (t->count + CHUNK - 1) / CHUNK, sum = 0;
    find_job job = { .t = t };
    lm_code rc = lm_alloc_n(&job.counts, (size_t)chunks, sizeof *job.counts, "a document index", e);
    if (rc)
        return rc;
    lm_par_for(p, chunks, 1, find_starts, &job);
    for (int64_t c = 0; c < chunks; c++) {
        int64_t n = job.counts[c];
        job.counts[c] = sum;
        sum += n;
    }
    rc = lm_alloc_n(&job.starts, (size_t)sum, sizeof *job.starts, "a document index", e);
    if (!rc) {
        lm_par_for(p, chunks, 1, find_starts, &job);
        t->starts = job.starts;
        t->docs = sum;
    }
    lm_free(job.counts);
    return rc;
}

int64_t lm_tokens_docs(const lm_tokens *t)
{
    return t->docs;
}

int64_t lm_tokens_doc_start(const lm_tokens *t, int64_t d)
{
    if (d >= t->docs)
        return t->count;
    if (t->kind != LM_TOKENS_MEGATRON)
        return t->starts ? t->starts[d] : 0;
    int64_t s = lm_idx_i64(t->doc_seqs, d);
    return s >= t->sequences ? t->count : lm_idx_i64(t->offsets, s) / t->id_bytes;
}

int64_t lm_tokens_doc_of(const lm_tokens *t, int64_t at)
{
    int64_t lo = 0, hi = t->docs;
    while (hi - lo > 1) { /* the last one that starts at or before `at`: empty ones precede it */
        int64_t mid = lo + (hi - lo) / 2;
        if (lm_tokens_doc_start(t, mid) <= at)
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}

/* ---- the largest id ---- */

typedef struct {
    const lm_tokens *t;
    _Atomic uint32_t max;
} max_job;

static void find_max(void *ctx, int64_t begin, int64_t end, int worker)
{
    max_job *job = ctx;
    uint32_t buf[BLOCK], max = 0;
    (void)worker;
    for (int64_t at = begin; at < end; at += BLOCK) {
        int64_t n = end - at < BLOCK ? end - at : BLOCK;
        read_ids(job->t, at, n, buf);
        for (int64_t i = 0; i < n; i++)
            max = buf[i] > max ? buf[i] : max;
    }
    forget_ids(job->t, begin, end - begin);
    uint32_t seen = atomic_load(&job->max);
    while (max > seen && !atomic_compare_exchange_weak(&job->max, &seen, max))
        ;
}

uint32_t lm_tokens_max(lm_tokens *t, lm_par *p)
{
    if (!t->max_known) {
        max_job job = { .t = t };
        lm_par_for(p, t->count, CHUNK, find_max, &job);
        t->max = atomic_load(&job.max);
        t->max_known = true;
    }
    return t->max;
}

lm_code lm_tokens_check(lm_tokens *t, int64_t vocab, lm_par *p, lm_err *e)
{
    uint32_t buf[BLOCK];
    if (t->count == 0 || (int64_t)lm_tokens_max(t, p) < vocab)
        return LM_OK;
    for (int64_t at = 0; at < t->count; at += BLOCK) {
        int64_t n = t->count - at < BLOCK ? t->count - at : BLOCK;
        read_ids(t, at, n, buf);
        if (check_ids(t, at, n, buf, vocab, e))
            return e->code;
    }
    return LM_OK;
}

/* ---- properties ---- */

const char *lm_tokens_path(const lm_tokens *t)
{
    return t->path;
}

lm_tokens_kind lm_tokens_format(const lm_tokens *t)
{
    return t->kind;
}

int64_t lm_tokens_vocab(const lm_tokens *t)
{
    return t->meta.vocab;
}

lm_tokens_tokenizer lm_tokens_made_with(const lm_tokens *t)
{
    return t->meta.tokenizer;
}

bool lm_tokens_same(const lm_tokens *a, const lm_tokens *b)
{
    struct stat x, y;
    return a->n_parts && b->n_parts && !fstat(a->parts[0].map.fd, &x) &&
           !fstat(b->parts[0].map.fd, &y) && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

int64_t lm_tokens_eot(const lm_tokens *t)
{
    return t->eot;
}

int64_t lm_tokens_count(const lm_tokens *t)
{
    return t->count;
}
