/* SPDX-License-Identifier: Apache-2.0 */
/* attention_jobs.h -- how the fast attention kernels cut their work: a job is (some of) the queries
 * of the heads that share one key/value head of one sequence.
 *
 * Every query block is computed alone, in an order that depends on shapes and masks only, so the
 * bits depend neither on the number of jobs nor on the threads that run them. */
#ifndef LM_KERNELS_CPU_ATTENTION_JOBS_H
#define LM_KERNELS_CPU_ATTENTION_JOBS_H

#include <math.h>
#include <string.h>

#include "kernels/cpu/attention_bias.h"
#include "kernels/cpu/attention_blocks.h"
#include "kernels/cpu/attention_pages.h"
#include "kernels/cpu/attention_sink.h"
#include "kernels/cpu/tables.h"

typedef struct attn_job attn_job;
struct attn_job {
    const void *q, *k, *v; /* query 0 of head 0, key 0 and value 0 of the key/value head; with pages
                              row 0 of the caches */
    /* Not NULL: puts keys and values from key `lo` on into the form that the kernel multiplies from, instead of k and
     * v. */
    void (*pack)(const attn_job *job, int64_t lo, void *keys, void *values);
    void *cache;               /* for it */
    void *o;                   /* output row 0 of head 0 */
    float *lse;                /* row 0 of head 0 of this sequence, or NULL */
    int64_t lse_head, lse_row; /* elements between heads and between rows of lse */
    const float *sinks;        /* of each head, or NULL */
    attn_biases bias;
    const attn_seqs *pages;                     /* NULL: keys and values are in one piece */
    int64_t q_pitch, k_pitch, v_pitch, o_pitch; /* elements between rows */
    int64_t b, kv, K, h0, h1, H, T, D, E, queries;
    int64_t part, parts; /* query blocks with number % parts == part are this job's */
    float scale, soft_cap;
    bool undivided;
    attn_mask mask;
    const attn_drop *drop;
};

typedef void (*attn_job_fn)(const attn_job *job, void *scratch);

typedef struct {
    const lm_call *c;
    attn_job_fn fn;
    size_t scratch; /* bytes a worker, a multiple of 64 */
    int64_t parts;
    const attn_seqs *cached; /* NULL: keys and values are those of the rows */
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

/* The cached keys and values of a job, and the rows of its sequence. */
static inline void attn_cached_job(const attn_split *s, attn_job *j, size_t size)
{
    const lm_call *c = s->c;
    const attn_seqs *x = s->cached;
    int64_t row = attn_first(x, j->b), at = attn_cache_row(x, j->K, j->kv, j->b, 0, NULL);
    j->q = attn_at(c->in[0].data, row * j->q_pitch, size);
    j->o = attn_at(c->out[0].data, row * j->o_pitch, size);
    j->queries = x->fresh[j->b];
    j->mask = attn_cached_mask(c->attr, x->used[j->b], j->queries);
    j->pages = x->table ? x : NULL;
    j->k_pitch = j->D;
    j->v_pitch = x->values ? j->E : j->D;
    j->k = attn_at(c->out[1].data, j->pages ? 0 : at * j->k_pitch, size);
    j->v = attn_at(c->out[x->values ? 2 : 1].data, j->pages ? 0 : at * j->v_pitch, size);
    if (c->n_out > 3 && c->out[3].data)
        j->lse = (float *)c->out[3].data + row * j->H;
    j->lse_head = 1;
    j->lse_row = j->H;
    j->sinks = attn_f32(c, 6);
    j->bias = attn_biases_of(c, 7, c->attr);
}

/* The job of unit u: (b, kv head, part). */
static inline attn_job attn_job_of(const attn_split *s, int64_t u)
{
    const lm_attention_attr *a = s->c->attr;
    const lm_tensor *qkv = &s->c->in[0];
    size_t size = lm_dtype_size(qkv->dtype);
    int64_t H = a->heads, K = a->kv_heads, D = a->head_dim, E = lm_attention_value_dim(a);
    int64_t bk = u / s->parts, b = bk / K, kv = bk % K, T = a->seq;
    int64_t pitch = s->cached ? s->cached->pitch : lm_attention_row(a, true);
    attn_job j = { .b = s->cached ? attn_nth_prompt(s->cached, b) : b,
                   .kv = kv,
                   .K = K,
                   .h0 = kv * (H / K),
                   .h1 = (kv + 1) * (H / K),
                   .H = H,
                   .T = T,
                   .D = D,
                   .E = E,
                   .queries = T,
                   .part = u % s->parts,
                   .parts = s->parts,
                   .q_pitch = pitch,
                   .o_pitch = H * E,
                   .scale = (float)a->scale,
                   .soft_cap = (float)a->soft_cap,
                   .undivided = a->undivided,
                   .drop = &s->drop };
    if (s->cached) {
        attn_cached_job(s, &j, size);
        return j;
    }
    j.q = attn_at(qkv->data, b * T * pitch, size);
    j.o = attn_at(s->c->out[0].data, b * T * H * E, size);
    j.mask = attn_mask_of(a, attn_i32(s->c, 1), attn_i32(s->c, 2), b);
    j.k = attn_at(j.q, (H + kv) * D, size);
    j.v = attn_at(j.q, (H + K) * D + kv * E, size);
    j.k_pitch = j.v_pitch = pitch;
    j.lse = (float *)s->c->out[1].data + b * H * T;
    j.lse_head = T;
    j.lse_row = 1;
    j.sinks = attn_f32(s->c, 3);
    j.bias = attn_biases_of(s->c, 4, a);
    return j;
}

/* A piece of a job's cache, lines of `line` numbers, with successive keys (or values), from key j on: *n of them, at
 * most to `end`. */
static inline const void *attn_piece(const attn_job *j, const void *cache, int64_t line,
                                     size_t size, int64_t at, int64_t end, int64_t *n)
{
    int64_t row = attn_cache_row(j->pages, j->K, j->kv, j->b, at, n);
    *n = *n < end - at ? *n : end - at;
    return attn_at(cache, row * line, size);
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

/* `cached`: the sequences of attention_cached; NULL: attention. */
static inline void attn_run_split(const lm_call *c, attn_job_fn fn, size_t scratch,
                                  const attn_seqs *cached)
{
    const lm_attention_attr *a = c->attr;
    attn_split s = { .c = c, .fn = fn, .scratch = attn_round64(scratch), .cached = cached };
    int64_t units = a->batch * a->kv_heads, rows = a->seq;
    if (!cached)
        s.drop = attn_drop_of(c);
    if (cached && cached->ragged) {
        units = attn_prompts(cached) * a->kv_heads;
        rows = cached->rows;
    }
    s.parts = attn_parts(units, (rows + 31) / 32, lm_par_threads(c->par));
    lm_par_for(c->par, units * s.parts, 1, attn_run_units, &s);
}

/* ---- attention_cached: new keys and values ---- */

/* Rows [from, to) of o become zeros, and -inf of lse. */
static inline void attn_clear_rows(const lm_call *c, int64_t from, int64_t to)
{
    const lm_attention_attr *a = c->attr;
    size_t size = lm_dtype_size(c->in[0].dtype);
    int64_t width = a->heads * lm_attention_value_dim(a);
    float *lse = c->n_out > 3 ? c->out[3].data : NULL;
    if (from < to)
        memset(attn_at(c->out[0].data, from * width, size), 0,
               (size_t)((to - from) * width) * size);
    for (int64_t i = from * a->heads; lse && i < to * a->heads; i++)
        lse[i] = -INFINITY;
}

static inline void attn_append_units(void *ctx, int64_t begin, int64_t end, int worker)
{
    (void)worker;
    const lm_call *c = ctx;
    const lm_attention_attr *a = c->attr;
    attn_seqs s = attn_seqs_of(c);
    size_t size = lm_dtype_size(c->in[0].dtype);
    int64_t D = a->head_dim, E = lm_attention_value_dim(a), K = a->kv_heads;
    for (int64_t bk = begin; bk < end; bk++) {
        int64_t b = bk / K, used = s.used[b], fresh = s.fresh[b], row = attn_first(&s, b), run = 0;
        int64_t key = (a->heads + bk % K) * D, value = (a->heads + K) * D + bk % K * E;
        for (int64_t i = 0, to = 0; !a->reads && i < fresh; i++, run--, to++) {
            if (run == 0)
                to = attn_cache_row(&s, K, bk % K, b, used + i, &run);
            const void *from = attn_at(c->in[0].data, (row + i) * s.pitch, size);
            memcpy(attn_at(c->out[1].data, to * D, size), attn_at(from, key, size),
                   (size_t)D * size);
            if (s.values)
                memcpy(attn_at(c->out[2].data, to * E, size), attn_at(from, value, size),
                       (size_t)E * size);
        }
        /* Rows that are not real give zeros; the first key/value head clears them for all, and that of the last
         * sequence those of none. */
        if (bk % K == 0)
            attn_clear_rows(c, row + fresh, b + 1 < s.batch ? attn_first(&s, b + 1) : s.rows);
    }
}

/* Put the fresh keys and values of attention_cached behind those that the cache holds, unless it is only read, and clear
 * what rows that are not real give. */
static inline void attn_append(const lm_call *c)
{
    const lm_attention_attr *a = c->attr;
    lm_par_for(c->par, a->batch * a->kv_heads, c->in[0].dim[0] > 16 * a->batch ? 1 : 64,
               attn_append_units, (void *)(uintptr_t)c);
}

/* Which of its two kernels a call of attention_cached needs: for new tokens, for prompts. */
typedef struct {
    bool tokens, prompts;
} attn_kinds;

static inline attn_kinds attn_kinds_of(const attn_seqs *s)
{
    if (!s->ragged)
        return (attn_kinds){ s->seq <= ATTN_FEW_ROWS, s->seq > ATTN_FEW_ROWS };
    if (!s->kind) /* there are shapes alone */
        return (attn_kinds){ true, true };
    attn_kinds k = { .prompts = attn_prompts(s) > 0 };
    for (int64_t b = 0; b < s->batch; b++)
        k.tokens |= !attn_is_prompt(s, b) && s->fresh[b] > 0;
    return k;
}

/* Scratch that serves both in turn. */
static inline size_t attn_more(size_t a, size_t b)
{
    return a > b ? a : b;
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
    attn_biases bias;
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
    int64_t H = a->heads, K = a->kv_heads, D = a->head_dim, E = lm_attention_value_dim(a);
    int64_t T = a->seq, pitch = lm_attention_row(a, true);
    return (attn_dx_view){ .a = a,
                           .mask = attn_mask_of(a, attn_i32(c, 4), attn_i32(c, 5), job->b),
                           .bias = attn_biases_of(c, 6, a),
                           .qkv = attn_at(c->in[1].data, job->b * T * pitch, size),
                           .dqkv = attn_at(c->out[0].data, job->b * T * pitch, size),
                           .dout = attn_at(c->in[0].data, job->b * T * H * E, size),
                           .o = attn_at(c->in[2].data, job->b * T * H * E, size),
                           .lse = (const float *)c->in[3].data + job->b * H * T,
                           .pitch = pitch,
                           .o_pitch = H * E,
                           .k_at = (H + job->kv) * D,
                           .v_at = (H + K) * D + job->kv * E };
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

/* attention_cached for new tokens; the keys are in the cache already (attention_decode_simd.c). */
void lm_attention_decode_avx2(const lm_call *c), lm_attention_decode_avx512(const lm_call *c);
size_t lm_attention_decode_work_avx2(const lm_call *c, int threads),
    lm_attention_decode_work_avx512(const lm_call *c, int threads);

/* Jobs with `pack`, whose kernel wants
 *   vectors  keys [n/64][D][64], values [n][D rounded up to 2 vectors], floats, n = number of keys rounded up to 64
 *   AMX      column tiles and pair tiles (attention_amx.h), [n/16][D/32] and [n/32][D/32][2]
 * with zeros in rows of values behind the last key.  Keys and values before the multiple of 64 at or below `lo` are
 * not read.  Bytes of scratch for so many keys; 0: tiles do not serve this head size. */
size_t lm_attention_packed_bytes_avx2(const lm_attention_attr *a, int64_t keys),
    lm_attention_packed_bytes_avx512(const lm_attention_attr *a, int64_t keys),
    lm_attention_packed_bytes_amx(const lm_attention_attr *a, int64_t keys);
void lm_attention_packed_avx2(lm_dtype act, const attn_job *job, void *scratch),
    lm_attention_packed_avx512(lm_dtype act, const attn_job *job, void *scratch),
    lm_attention_packed_amx(const attn_job *job, void *scratch);

/* The kernel of an operator for head sizes that tiles do not serve: that of AVX-512, or of pairs where keys and values differ
 * in size. */
static inline const lm_kernel *attn_fallback(const char *op, const lm_attention_attr *a)
{
    const lm_kernel *k = lm_attention_value_dim(a) == a->head_dim ? lm_attention_avx512_kernels
                                                                  : lm_attention_bf16_kernels;
    while (strcmp(k->op, op) || k->act != LM_DTYPE_BF16)
        k++;
    return k;
}

#endif
