/* SPDX-License-Identifier: Apache-2.0 */
/* conv_simd.c -- short convolutions on vectors: a block of channels of a sequence at a time, as F32 in scratch, in which
 * rows follow each other. */
#include "kernels/conv.h"

#include "kernels/cpu/simd.h"
#include "kernels/cpu/tables.h"

enum { WIDE = 4 * VF_LANES /* channels of a block */ };

/* Scratch of a worker: W - 1 rows of zeros and then the sequence's rows of x; rows of slopes; taps. */
typedef struct {
    float w[LM_CONV_MOST][WIDE];
    float *x, *ds; /* [W - 1 + T][WIDE], [T][WIDE] */
} conv_scratch;

typedef struct {
    const lm_call *call;
    const lm_conv_attr *a;
    int x; /* operand x, behind which are w and lo */
} conv_job;

/* A block: up to WIDE channels of a run. */
typedef struct {
    lm_conv_run run;
    int64_t at, n;
} conv_block;

static int64_t blocks_of(const lm_conv_attr *a)
{
    int64_t all = 0;
    for (int64_t i = 0; i < lm_conv_runs(a); i++)
        all += (lm_conv_run_at(a, i).n + WIDE - 1) / WIDE;
    return all;
}

static conv_block block_at(const lm_conv_attr *a, int64_t block)
{
    for (int64_t i = 0;; i++) {
        lm_conv_run run = lm_conv_run_at(a, i);
        int64_t blocks = (run.n + WIDE - 1) / WIDE, at = block * WIDE;
        if (block < blocks)
            return (conv_block){ run, at, run.n - at < WIDE ? run.n - at : WIDE };
        block -= blocks;
    }
}

static size_t scratch_bytes(const lm_conv_attr *a)
{
    return (sizeof(conv_scratch) + (size_t)((2 * a->seq + a->taps) * WIDE) * sizeof(float) + 63) /
           64 * 64;
}

static conv_scratch *scratch_of(const conv_job *j, int worker)
{
    conv_scratch *s = (void *)((char *)j->call->work + (size_t)worker * scratch_bytes(j->a));
    s->x = (float *)(s + 1);
    s->ds = s->x + (j->a->taps - 1 + j->a->seq) * WIDE;
    return s;
}

/* The first tap that reads a row of the document of row t. */
static inline int64_t first_tap(const conv_job *j, int64_t b, int64_t t)
{
    const int32_t *lo = opt_data(j->call->in, j->call->n_in, j->x + 2);
    int64_t first = (lo ? lo[b * j->a->seq + t] : 0) - (t - j->a->taps + 1);
    return first > 0 ? first : 0;
}

LM_INLINE void load(lm_dtype t, const conv_job *j, conv_scratch *s, const conv_block *k, int64_t b)
{
    const lm_conv_attr *a = j->a;
    const float *w = j->call->in[j->x + 1].data;
    memset(s->w, 0, sizeof s->w);
    for (int64_t q = 0; q < a->taps; q++)
        for (int64_t i = 0; i < k->n; i++)
            s->w[q][i] = w[(k->run.channel + k->at + i) * a->taps + q];
    memset(s->x, 0, (size_t)((a->taps - 1) * WIDE) * sizeof(float));
    for (int64_t row = 0; row < a->seq; row++) {
        int64_t from = (b * a->seq + row) * a->columns + k->run.column + k->at;
        float *to = s->x + (a->taps - 1 + row) * WIDE;
        VF_FOR(i, n, k->n,
               { vf_store(to + i, vf_get_any(t, j->call->in[j->x].data, from + i, n)); });
    }
}

/* The sum of the taps at lanes i of row t, before SiLU. */
LM_INLINE vf sum_at(const conv_job *j, const conv_scratch *s, int64_t first, int64_t t, int64_t i)
{
    vf sum = vf_zero();
    for (int64_t q = first; q < j->a->taps; q++)
        sum = vf_fma(vf_load(s->w[q] + i), vf_load(s->x + (t + q) * WIDE + i), sum);
    return sum;
}

/* Gradients of these sums, of all rows; dy is operand 0. */
LM_INLINE void slopes(lm_dtype t, const conv_job *j, conv_scratch *s, const conv_block *k,
                      int64_t b)
{
    const lm_conv_attr *a = j->a;
    for (int64_t row = 0; row < a->seq; row++) {
        int64_t from = (b * a->seq + row) * a->channels + k->run.channel + k->at;
        int64_t first = first_tap(j, b, row);
        VF_FOR(i, n, k->n, {
            vf sum = sum_at(j, s, first, row, i), p = vf_sigmoid(sum);
            vf dy = vf_get_any(t, j->call->in[0].data, from + i, n);
            vf_store(s->ds + row * WIDE + i, dy * p * vf_fma(sum, vf_set(1) - p, vf_set(1)));
        });
    }
}

/* Numbers that pass by: rows [., from_width] to rows [., to_width]; from NULL: zeros. */
static void copy_rows(const conv_job *j, int64_t b, int64_t n, const char *from, int64_t from_width,
                      char *to, int64_t to_width, size_t size)
{
    for (int64_t row = b * j->a->seq; row < (b + 1) * j->a->seq; row++) {
        char *at = to + (size_t)(row * to_width) * size;
        if (from)
            memcpy(at, from + (size_t)(row * from_width) * size, (size_t)n * size);
        else
            memset(at, 0, (size_t)n * size);
    }
}

/* ---- forward ---- */

LM_INLINE void run_block(lm_dtype t, const conv_job *j, conv_scratch *s, const conv_block *k,
                         int64_t b)
{
    const lm_conv_attr *a = j->a;
    size_t size = lm_dtype_size(t);
    char *z = opt_data(j->call->out, j->call->n_out, 1);
    int64_t column = k->run.column + k->at;
    if (k->run.channel < 0) {
        if (z)
            copy_rows(j, b, k->n, (const char *)j->call->in[0].data + (size_t)column * size,
                      a->columns, z + (size_t)(k->run.z + k->at) * size, a->heads * a->value_dim,
                      size);
        return;
    }
    load(t, j, s, k, b);
    for (int64_t row = 0; row < a->seq; row++) {
        int64_t to = (b * a->seq + row) * a->channels + k->run.channel + k->at;
        int64_t first = first_tap(j, b, row);
        VF_FOR(i, n, k->n, {
            vf sum = sum_at(j, s, first, row, i);
            vf_put_any(t, j->call->out[0].data, to + i, sum * vf_sigmoid(sum), n);
        });
    }
}

/* ---- backward ---- */

LM_INLINE void dx_block(lm_dtype t, const conv_job *j, conv_scratch *s, const conv_block *k,
                        int64_t b)
{
    const lm_conv_attr *a = j->a;
    size_t size = lm_dtype_size(t);
    const char *dz = opt_data(j->call->in, j->call->n_in, 4);
    int64_t column = k->run.column + k->at, W = a->taps;
    if (k->run.channel < 0) {
        copy_rows(j, b, k->n, dz ? dz + (size_t)(k->run.z + k->at) * size : NULL,
                  a->heads * a->value_dim, (char *)j->call->out[0].data + (size_t)column * size,
                  a->columns, size);
        return;
    }
    load(t, j, s, k, b);
    slopes(t, j, s, k, b);
    for (int64_t row = 0; row < a->seq; row++) {
        int64_t to = (b * a->seq + row) * a->columns + column, last = row;
        while (last + 1 < a->seq && last + 1 < row + W &&
               first_tap(j, b, last + 1) <= row - last + W - 2)
            last++; /* rows of the document that read this one */
        VF_FOR(i, n, k->n, {
            vf sum = vf_zero();
            for (int64_t q = row; q <= last; q++)
                sum = vf_fma(vf_load(s->w[W - 1 - (q - row)] + i), vf_load(s->ds + q * WIDE + i),
                             sum);
            vf_put_any(t, j->call->out[0].data, to + i, sum, n);
        });
    }
}

LM_INLINE void dw_block(lm_dtype t, const conv_job *j, conv_scratch *s, const conv_block *k)
{
    const lm_conv_attr *a = j->a;
    float *dw = j->call->out[0].data, sum[LM_CONV_MOST][WIDE];
    bool fresh = overwrites(j->call, a->acc);
    memset(sum, 0, sizeof sum);
    for (int64_t b = 0; b < a->batch; b++) {
        load(t, j, s, k, b);
        slopes(t, j, s, k, b);
        for (int64_t row = 0; row < a->seq; row++)
            for (int64_t q = first_tap(j, b, row); q < a->taps; q++)
                VF_FOR(i, n, k->n, {
                    vf x = vf_load(s->x + (row + q) * WIDE + i);
                    vf_store(sum[q] + i,
                             vf_fma(vf_load(s->ds + row * WIDE + i), x, vf_load(sum[q] + i)));
                    (void)n;
                });
    }
    for (int64_t i = 0; i < k->n; i++)
        for (int64_t q = 0; q < a->taps; q++) {
            float *to = dw + (k->run.channel + k->at + i) * a->taps + q;
            *to = fresh ? sum[q][i] : *to + sum[q][i];
        }
}

#define BLOCKS(name)                                                                              \
    LM_INLINE void name##s(lm_dtype t, const conv_job *j, int64_t begin, int64_t end, int worker) \
    {                                                                                             \
        conv_scratch *s = scratch_of(j, worker);                                                  \
        for (int64_t it = begin; it < end; it++) {                                                \
            conv_block k = block_at(j->a, it / j->a->batch);                                      \
            name(t, j, s, &k, it % j->a->batch);                                                  \
        }                                                                                         \
    }                                                                                             \
    static void name##s_f32(void *ctx, int64_t begin, int64_t end, int worker)                    \
    {                                                                                             \
        name##s(LM_DTYPE_F32, ctx, begin, end, worker);                                           \
    }                                                                                             \
    static void name##s_bf16(void *ctx, int64_t begin, int64_t end, int worker)                   \
    {                                                                                             \
        name##s(LM_DTYPE_BF16, ctx, begin, end, worker);                                          \
    }

BLOCKS(run_block)
BLOCKS(dx_block)

LM_INLINE void dw_blocks(lm_dtype t, const conv_job *j, int64_t begin, int64_t end, int worker)
{
    for (int64_t it = begin; it < end; it++) {
        conv_block k = block_at(j->a, it);
        if (k.run.channel >= 0)
            dw_block(t, j, scratch_of(j, worker), &k);
    }
}

static void dw_blocks_f32(void *ctx, int64_t begin, int64_t end, int worker)
{
    dw_blocks(LM_DTYPE_F32, ctx, begin, end, worker);
}

static void dw_blocks_bf16(void *ctx, int64_t begin, int64_t end, int worker)
{
    dw_blocks(LM_DTYPE_BF16, ctx, begin, end, worker);
}

static void conv(const lm_call *c)
{
    conv_job j = { c, c->attr, 0 };
    lm_par_for(c->par, blocks_of(j.a) * j.a->batch, 1, VF_PICK(run_blocks, c->in[0].dtype), &j);
}

static void conv_dx(const lm_call *c)
{
    conv_job j = { c, c->attr, 1 };
    lm_par_for(c->par, blocks_of(j.a) * j.a->batch, 1, VF_PICK(dx_blocks, c->in[0].dtype), &j);
}

static void conv_dw(const lm_call *c)
{
    conv_job j = { c, c->attr, 1 };
    lm_par_for(c->par, blocks_of(j.a), 1, VF_PICK(dw_blocks, c->in[0].dtype), &j);
}

static size_t conv_work(const lm_call *c, int threads)
{
    return (size_t)threads * scratch_bytes(c->attr);
}

const lm_kernel LM_TABLE_NAME(conv, LM_SIMD)[] = {
    VF_KERNEL("conv", conv, conv_work),
    VF_KERNEL("conv_dx", conv_dx, conv_work),
    VF_KERNEL("conv_dw", conv_dw, conv_work),
    VF_KERNEL_END,
};
