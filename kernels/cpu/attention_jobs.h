/* SPDX-License-Identifier: Apache-2.0 */
/* attention_jobs.h -- how the fast attention kernels cut their work: a job is (some of) the queries
 * of the heads that share one key/value head of one sequence.
 *
 * Every query block is computed alone, in an order that depends on shapes and masks only, so the
 * bits depend neither on the number of jobs nor on the threads that run them. */
#ifndef LM_KERNELS_CPU_ATTENTION_JOBS_H
#define LM_KERNELS_CPU_ATTENTION_JOBS_H

#include <string.h>

#include "kernels/cpu/attention_plan.h"
#include "kernels/cpu/tables.h"

typedef struct {
    const void *q, *k, *v; /* query 0 of head 0, key 0 and value 0 of the key/value head */
    void *o;               /* output row 0 of head 0 */
    float *lse;            /* head 0 of this sequence, or NULL */
    int64_t q_pitch, k_pitch, v_pitch, o_pitch; /* elements between rows */
    int64_t b, h0, h1, H, T, D, queries;
    int64_t part, parts; /* query blocks with number % parts == part are this job's */
    float scale, soft_cap;
    attn_mask mask;
    const attn_drop *drop;
} attn_job;

typedef void (*attn_job_fn)(const attn_job *job, void *scratch);

typedef struct {
    const lm_call *c;
    attn_job_fn fn;
    size_t scratch; /* bytes a worker, a multiple of 64 */
    int64_t parts;
    bool cached;
    attn_drop drop;
} attn_split;

static inline size_t attn_round64(size_t n)
{
    return (n + 63) / 64 * 64;
}

/* Scratch of `bytes` for each worker. */
static inline size_t attn_run_work(int threads, size_t bytes)
{
    return (size_t)threads * attn_round64(bytes);
}

static inline void *attn_at(const void *base, int64_t i, size_t size)
{
    return (char *)base + i * (int64_t)size;
}

/* The job of unit u: (b, kv head, part). */
static inline attn_job attn_job_of(const attn_split *s, int64_t u)
{
    const lm_attention_attr *a = s->c->attr;
    const lm_tensor *qkv = &s->c->in[0];
    size_t size = lm_dtype_size(qkv->dtype);
    int64_t H = a->heads, K = a->kv_heads, D = a->head_dim, T = a->seq;
    int64_t bk = u / s->parts, b = bk / K, kv = bk % K, pitch = (H + 2 * K) * D;
    attn_job j = { .b = b,
                   .h0 = kv * (H / K),
                   .h1 = (kv + 1) * (H / K),
                   .H = H,
                   .T = T,
                   .D = D,
                   .queries = T,
                   .part = u % s->parts,
                   .parts = s->parts,
                   .q_pitch = pitch,
                   .o_pitch = H * D,
                   .scale = (float)a->scale,
                   .soft_cap = (float)a->soft_cap,
                   .drop = &s->drop };
    j.q = attn_at(qkv->data, b * T * pitch, size);
    j.o = attn_at(s->c->out[0].data, b * T * H * D, size);
    if (s->cached) {
        int64_t S = s->c->out[1].dim[2], fresh = attn_i32(s->c, 2)[b];
        j.queries = fresh;
        j.mask = attn_cached_mask(a, attn_i32(s->c, 1)[b], fresh);
        j.k = attn_at(s->c->out[1].data, bk * S * D, size);
        j.v = attn_at(s->c->out[2].data, bk * S * D, size);
        j.k_pitch = j.v_pitch = D;
    } else {
        j.mask = attn_mask_of(a, attn_i32(s->c, 1), b);
        j.k = attn_at(j.q, (H + kv) * D, size);
        j.v = attn_at(j.q, (H + K + kv) * D, size);
        j.k_pitch = j.v_pitch = pitch;
        j.lse = (float *)s->c->out[1].data + b * H * T;
    }
    return j;
}

static inline void attn_run_units(void *ctx, int64_t begin, int64_t end, int worker)
{
    const attn_split *s = ctx;
    for (int64_t u = begin; u < end; u++) {
        attn_job j = attn_job_of(s, u);
        s->fn(&j, (char *)s->c->work + (size_t)worker * s->scratch);
    }
}

/* Cut finely enough that the threads end together; each part packs the keys again. */
static inline int64_t attn_parts(int64_t units, int64_t blocks, int threads)
{
    int64_t parts = 1;
    while (parts < blocks && threads > 1 && units * parts < 4 * threads &&
           units * parts % threads != 0)
        parts++;
    return parts;
}

static inline void attn_run_split(const lm_call *c, attn_job_fn fn, size_t scratch, bool cached)
{
    const lm_attention_attr *a = c->attr;
    attn_split s = { .c = c, .fn = fn, .scratch = attn_round64(scratch), .cached = cached };
    if (!cached)
        s.drop = attn_drop_of(c);
    int64_t units = a->batch * a->kv_heads;
    s.parts = attn_parts(units, (a->seq + 31) / 32, lm_par_threads(c->par));
    lm_par_for(c->par, units * s.parts, 1, attn_run_units, &s);
}

/* attention_cached with at most so many new rows reads the cache directly instead of packing it. */
enum { ATTN_FEW_ROWS = 4 };

static inline void attn_append_units(void *ctx, int64_t begin, int64_t end, int worker)
{
    (void)worker;
    const lm_call *c = ctx;
    const lm_attention_attr *a = c->attr;
    size_t size = lm_dtype_size(c->in[0].dtype);
    int64_t D = a->head_dim, K = a->kv_heads, S = c->out[1].dim[2];
    int64_t pitch = (a->heads + 2 * K) * D;
    for (int64_t bk = begin; bk < end; bk++) {
        int64_t b = bk / K, used = attn_i32(c, 1)[b], fresh = attn_i32(c, 2)[b];
        for (int64_t i = 0; i < fresh; i++) {
            int64_t to = (bk * S + used + i) * D;
            int64_t from = (b * a->seq + i) * pitch + (a->heads + bk % K) * D;
            memcpy(attn_at(c->out[1].data, to, size), attn_at(c->in[0].data, from, size),
                   (size_t)D * size);
            memcpy(attn_at(c->out[2].data, to, size), attn_at(c->in[0].data, from + K * D, size),
                   (size_t)D * size);
        }
        /* Rows that are not real give zeros; the first key/value head clears them for all. */
        int64_t width = a->heads * D;
        if (bk % K == 0 && fresh < a->seq)
            memset(attn_at(c->out[0].data, (b * a->seq + fresh) * width, size), 0,
                   (size_t)((a->seq - fresh) * width) * size);
    }
}

/* Put the fresh keys and values of attention_cached behind those that the cache holds. */
static inline void attn_append(const lm_call *c)
{
    const lm_attention_attr *a = c->attr;
    lm_par_for(c->par, a->batch * a->kv_heads, a->seq > 16 ? 1 : 64, attn_append_units,
               (void *)(uintptr_t)c);
}

/* The backward of one (sequence, key/value head): of keys [k0, k1) and queries [q0, q1).  Fused, it
 * makes both gradients of all of them in one sweep over the tiles.  With few heads and many threads
 * the gradients of keys and of queries are made by separate jobs over parts of the sequence; every
 * sum runs in the same order, so the bits are the same. */
typedef struct {
    const lm_call *c;
    const attn_drop *drop;
    int64_t b, kv, k0, k1, q0, q1;
    bool keys, queries; /* which gradients */
} attn_dx_job;

/* Where the rows of a job are in the operands. */
typedef struct {
    const lm_attention_attr *a;
    attn_mask mask;
    const void *qkv, *dout, *o; /* of the sequence */
    void *dqkv;
    const float *lse; /* [H][T] of the sequence */
    int64_t pitch, o_pitch, k_at, v_at;
} attn_dx_view;

static inline attn_dx_view attn_dx_view_of(const attn_dx_job *job)
{
    const lm_call *c = job->c;
    const lm_attention_attr *a = c->attr;
    size_t size = lm_dtype_size(c->in[1].dtype);
    int64_t H = a->heads, K = a->kv_heads, D = a->head_dim, T = a->seq, pitch = (H + 2 * K) * D;
    return (attn_dx_view){ .a = a,
                           .mask = attn_mask_of(a, attn_i32(c, 4), job->b),
                           .qkv = attn_at(c->in[1].data, job->b * T * pitch, size),
                           .dqkv = attn_at(c->out[0].data, job->b * T * pitch, size),
                           .dout = attn_at(c->in[0].data, job->b * T * H * D, size),
                           .o = attn_at(c->in[2].data, job->b * T * H * D, size),
                           .lse = (const float *)c->in[3].data + job->b * H * T,
                           .pitch = pitch,
                           .o_pitch = H * D,
                           .k_at = (H + job->kv) * D,
                           .v_at = (H + K + job->kv) * D };
}

typedef void (*attn_dx_fn)(const attn_dx_job *job, void *scratch);

typedef struct {
    const lm_call *c;
    attn_dx_fn fn;
    size_t scratch;
    int64_t parts, size; /* of the sequence */
    bool keys, queries;
    attn_drop drop;
} attn_dx_split;

enum { ATTN_DX_GRID = 192 }; /* a multiple of every block size */

static inline void attn_dx_units(void *ctx, int64_t begin, int64_t end, int worker)
{
    const attn_dx_split *s = ctx;
    const lm_attention_attr *a = s->c->attr;
    for (int64_t u = begin; u < end; u++) {
        int64_t bk = u / s->parts, from = u % s->parts * s->size, to = from + s->size;
        to = to < a->seq ? to : a->seq;
        attn_dx_job j = { .c = s->c,
                          .drop = &s->drop,
                          .b = bk / a->kv_heads,
                          .kv = bk % a->kv_heads,
                          .k1 = a->seq,
                          .q1 = a->seq,
                          .keys = s->keys,
                          .queries = s->queries };
        if (s->keys && !s->queries) {
            j.k0 = from;
            j.k1 = to;
        } else if (!s->keys) {
            j.q0 = from;
            j.q1 = to;
        }
        s->fn(&j, (char *)s->c->work + (size_t)worker * s->scratch);
    }
}

static inline void attn_dx_run(const lm_call *c, attn_dx_fn fn, size_t scratch)
{
    const lm_attention_attr *a = c->attr;
    int threads = lm_par_threads(c->par);
    int64_t units = a->batch * a->kv_heads, grids = (a->seq + ATTN_DX_GRID - 1) / ATTN_DX_GRID;
    attn_dx_split s = { .c = c,
                        .fn = fn,
                        .scratch = attn_round64(scratch),
                        .parts = 1,
                        .size = a->seq,
                        .keys = true,
                        .queries = true,
                        .drop = attn_drop_of(c) };
    if (threads == 1 || units % threads == 0 || units >= 4 * threads || grids < 2) {
        lm_par_for(c->par, units, 1, attn_dx_units, &s);
        return;
    }
    int64_t want = (4 * threads + units - 1) / units, parts = want < grids ? want : grids;
    s.size = (grids + parts - 1) / parts * ATTN_DX_GRID;
    s.parts = (a->seq + s.size - 1) / s.size;
    s.queries = false;
    lm_par_for(c->par, units * s.parts, 1, attn_dx_units, &s);
    s.queries = true;
    s.keys = false;
    lm_par_for(c->par, units * s.parts, 1, attn_dx_units, &s);
}

/* The AVX-512 kernel of an operator, for head sizes that tiles do not serve. */
static inline const lm_kernel *attn_fallback(const char *op)
{
    const lm_kernel *k = lm_attention_avx512_kernels;
    while (strcmp(k->op, op) || k->act != LM_DTYPE_BF16)
        k++;
    return k;
}

#endif
