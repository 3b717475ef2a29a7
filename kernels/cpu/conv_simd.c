/* SPDX-License-Identifier: Apache-2.0 */
/* conv_simd.c -- short convolutions on vectors: a block of channels of a sequence at a time, tile after tile of its rows as
 * F32 in scratch, in which rows follow each other. */
#include "kernels/conv.h"

#include "kernels/cpu/simd.h"
#include "kernels/cpu/state_rows.h"
#include "kernels/cpu/tables.h"

enum {
    WIDE = 4 * VF_LANES, /* channels of a block */
    ROWS = 64,           /* of a tile */
    HALO = LM_CONV_MOST - 1,
};

/* Scratch of a worker, for a tile: its rows of x and those that its taps and slopes read, of which the first is x_from of the
 * sequence, zeros where the sequence has none; slopes of its rows and of those behind them; taps. */
typedef struct {
    float w[LM_CONV_MOST][WIDE];
    float x[ROWS + 2 * HALO][WIDE], ds[ROWS + HALO][WIDE];
    int64_t x_from, ds_from;
} conv_scratch;

typedef struct {
    const lm_call *call;
    const lm_conv_attr *a;
    int x;          /* operand x, behind which are w and lo */
    int64_t pieces; /* sequences of a block */
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

static conv_scratch *scratch_of(const conv_job *j, int worker)
{
    return (conv_scratch *)j->call->work + worker;
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* The first tap that reads a row of the document of row t. */
static inline int64_t first_tap(const conv_job *j, int64_t b, int64_t t)
{
    const int32_t *lo = opt_data(j->call->in, j->call->n_in, j->x + 2);
    int64_t first = (lo ? lo[b * j->a->seq + t] : 0) - (t - j->a->taps + 1);
    return first > 0 ? first : 0;
}

static void load_taps(const conv_job *j, conv_scratch *s, const conv_block *k)
{
    const float *w = j->call->in[j->x + 1].data;
    memset(s->w, 0, sizeof s->w);
    for (int64_t q = 0; q < j->a->taps; q++)
        for (int64_t i = 0; i < k->n; i++)
            s->w[q][i] = w[(k->run.channel + k->at + i) * j->a->taps + q];
}

/* Rows [from, to) of the sequence whose first row is `first`; those before it are zeros. */
LM_INLINE void load(lm_dtype t, const conv_job *j, conv_scratch *s, const conv_block *k,
                    int64_t first, int64_t from, int64_t to)
{
    const lm_conv_attr *a = j->a;
    s->x_from = from;
    for (int64_t row = from; row < to; row++) {
        float *x = s->x[row - from];
        int64_t at = (first + row) * a->columns + k->run.column + k->at;
        if (row < 0)
            memset(x, 0, sizeof s->x[0]);
        else
            VF_FOR(i, n, k->n,
                   { vf_store(x + i, vf_get_any(t, j->call->in[j->x].data, at + i, n)); });
    }
}

/* The sum of the taps at lanes i of row t, before SiLU. */
LM_INLINE vf sum_at(const conv_job *j, const conv_scratch *s, int64_t first, int64_t t, int64_t i)
{
    vf sum = vf_zero();
    const float *x = s->x[t - (j->a->taps - 1) - s->x_from];
    for (int64_t q = first; q < j->a->taps; q++)
        sum = vf_fma(vf_load(s->w[q] + i), vf_load(x + q * WIDE + i), sum);
    return sum;
}

/* Gradients of these sums, of rows [from, to); dy is operand 0. */
LM_INLINE void slopes(lm_dtype t, const conv_job *j, conv_scratch *s, const conv_block *k,
                      int64_t b, int64_t from, int64_t to)
{
    const lm_conv_attr *a = j->a;
    s->ds_from = from;
    for (int64_t row = from; row < to; row++) {
        int64_t at = (b * a->seq + row) * a->channels + k->run.channel + k->at;
        int64_t first = first_tap(j, b, row);
        float *ds = s->ds[row - from];
        VF_FOR(i, n, k->n, {
            vf sum = sum_at(j, s, first, row, i), p = vf_sigmoid(sum);
            vf dy = vf_get_any(t, j->call->in[0].data, at + i, n);
            vf_store(ds + i, dy * p * vf_fma(sum, vf_set(1) - p, vf_set(1)));
        });
    }
}

/* Numbers that pass by: rows [begin, end) of [., from_width] to those of [., to_width]; from NULL: zeros. */
static void copy_rows(int64_t begin, int64_t end, int64_t n, const char *from, int64_t from_width,
                      char *to, int64_t to_width, size_t size)
{
    for (int64_t row = begin; row < end; row++) {
        char *at = to + (size_t)(row * to_width) * size;
        if (from)
            memcpy(at, from + (size_t)(row * from_width) * size, (size_t)n * size);
        else
            memset(at, 0, (size_t)n * size);
    }
}

/* ---- forward ---- */

/* z of rows [begin, end), of call output `out`. */
static void pass_by(const conv_job *j, const conv_block *k, int out, int64_t begin, int64_t end)
{
    const lm_conv_attr *a = j->a;
    size_t size = lm_dtype_size(j->call->in[0].dtype);
    char *z = opt_data(j->call->out, j->call->n_out, out);
    int64_t column = k->run.column + k->at;
    if (z)
        copy_rows(begin, end, k->n, (const char *)j->call->in[0].data + (size_t)column * size,
                  a->columns, z + (size_t)(k->run.z + k->at) * size, a->heads * a->value_dim, size);
}

/* Row `row` of y, which is row t of a sequence. */
LM_INLINE void put_row(lm_dtype t, const conv_job *j, const conv_scratch *s, const conv_block *k,
                       int64_t first, int64_t at, int64_t row)
{
    int64_t to = row * j->a->channels + k->run.channel + k->at;
    VF_FOR(i, n, k->n, {
        vf sum = sum_at(j, s, first, at, i);
        vf_put_any(t, j->call->out[0].data, to + i, sum * vf_sigmoid(sum), n);
    });
}

LM_INLINE void run_block(lm_dtype t, const conv_job *j, conv_scratch *s, const conv_block *k,
                         int64_t b)
{
    const int64_t T = j->a->seq, W = j->a->taps;
    if (k->run.channel < 0) {
        pass_by(j, k, 1, b * T, (b + 1) * T);
        return;
    }
    load_taps(j, s, k);
    for (int64_t t0 = 0; t0 < T; t0 += ROWS) {
        int64_t end = least(t0 + ROWS, T);
        load(t, j, s, k, b * T, t0 - (W - 1), end);
        for (int64_t row = t0; row < end; row++)
            put_row(t, j, s, k, first_tap(j, b, row), row, b * T + row);
    }
}

/* ---- backward ---- */

LM_INLINE void dx_row(lm_dtype t, const conv_job *j, const conv_scratch *s, const conv_block *k,
                      int64_t b, int64_t row)
{
    const int64_t T = j->a->seq, W = j->a->taps;
    int64_t to = (b * T + row) * j->a->columns + k->run.column + k->at, last = row;
    while (last + 1 < T && last + 1 < row + W && first_tap(j, b, last + 1) <= row - last + W - 2)
        last++; /* rows of the document that read this one */
    VF_FOR(i, n, k->n, {
        vf sum = vf_zero();
        for (int64_t q = row; q <= last; q++)
            sum = vf_fma(vf_load(s->w[W - 1 - (q - row)] + i), vf_load(s->ds[q - s->ds_from] + i),
                         sum);
        vf_put_any(t, j->call->out[0].data, to + i, sum, n);
    });
}

LM_INLINE void dx_block(lm_dtype t, const conv_job *j, conv_scratch *s, const conv_block *k,
                        int64_t b)
{
    const lm_conv_attr *a = j->a;
    const int64_t T = a->seq, W = a->taps;
    size_t size = lm_dtype_size(t);
    const char *dz = opt_data(j->call->in, j->call->n_in, 4);
    if (k->run.channel < 0) {
        copy_rows(b * T, (b + 1) * T, k->n, dz ? dz + (size_t)(k->run.z + k->at) * size : NULL,
                  a->heads * a->value_dim,
                  (char *)j->call->out[0].data + (size_t)(k->run.column + k->at) * size, a->columns,
                  size);
        return;
    }
    load_taps(j, s, k);
    for (int64_t t0 = 0; t0 < T; t0 += ROWS) {
        int64_t end = least(t0 + ROWS, T), read = least(end + W - 1, T);
        load(t, j, s, k, b * T, t0 - (W - 1), read);
        slopes(t, j, s, k, b, t0, read);
        for (int64_t row = t0; row < end; row++)
            dx_row(t, j, s, k, b, row);
    }
}

/* Add rows [t0, end) of sequence b to the sums of the taps. */
LM_INLINE void dw_tile(lm_dtype t, const conv_job *j, conv_scratch *s, const conv_block *k,
                       int64_t b, int64_t t0, int64_t end, float sum[LM_CONV_MOST][WIDE])
{
    const lm_conv_attr *a = j->a;
    load(t, j, s, k, b * a->seq, t0 - (a->taps - 1), end);
    slopes(t, j, s, k, b, t0, end);
    for (int64_t row = t0; row < end; row++)
        for (int64_t q = first_tap(j, b, row); q < a->taps; q++)
            VF_FOR(i, n, k->n, {
                vf x = vf_load(s->x[row - t0 + q] + i);
                vf_store(sum[q] + i, vf_fma(vf_load(s->ds[row - t0] + i), x, vf_load(sum[q] + i)));
                (void)n;
            });
}

LM_INLINE void dw_block(lm_dtype t, const conv_job *j, conv_scratch *s, const conv_block *k)
{
    const lm_conv_attr *a = j->a;
    float *dw = j->call->out[0].data, sum[LM_CONV_MOST][WIDE];
    bool fresh = overwrites(j->call, a->acc);
    memset(sum, 0, sizeof sum);
    load_taps(j, s, k);
    for (int64_t b = 0; b < a->batch; b++)
        for (int64_t t0 = 0; t0 < a->seq; t0 += ROWS)
            dw_tile(t, j, s, k, b, t0, least(t0 + ROWS, a->seq), sum);
    for (int64_t i = 0; i < k->n; i++)
        for (int64_t q = 0; q < a->taps; q++) {
            float *to = dw + (k->run.channel + k->at + i) * a->taps + q;
            *to = fresh ? sum[q][i] : *to + sum[q][i];
        }
}

/* ---- conv_cached ---- */

/* Rows of a tail, [W-1][Y], of channels from `at` on: number i of row p, counted back from the sequence's first. */
LM_INLINE void *tail_row(const conv_job *j, const state_rows *r, const conv_block *k, int64_t p,
                         size_t size)
{
    int64_t row = (r->slot + 1) * (j->a->taps - 1) + p;
    return (char *)j->call->out[1].data +
           (size_t)(row * j->a->channels + k->run.channel + k->at) * size;
}

/* Rows before the first one that the step has. */
LM_INLINE void load_tail(lm_dtype t, const conv_job *j, conv_scratch *s, const conv_block *k,
                         const state_rows *r)
{
    for (int64_t p = 1 - j->a->taps; p < 0; p++) {
        if (r->used + p < 0)
            continue;
        const void *from = tail_row(j, r, k, p, lm_dtype_size(t));
        float *to = s->x[p - s->x_from];
        VF_FOR(i, n, k->n, { vf_store(to + i, vf_get_any(t, from, i, n)); });
    }
}

/* The newest rows of a sequence become its tail; older ones are in it already, or zeros. */
LM_INLINE void keep_tail(lm_dtype t, const conv_job *j, const conv_block *k, const state_rows *r)
{
    const lm_conv_attr *a = j->a;
    size_t size = lm_dtype_size(t);
    for (int64_t p = 1 - a->taps; r->fresh && p < 0; p++) {
        int64_t from = r->fresh + p;
        void *to = tail_row(j, r, k, p, size);
        if (from >= 0)
            memcpy(to,
                   (const char *)j->call->in[0].data +
                       (size_t)((r->row + from) * a->columns + k->run.column + k->at) * size,
                   (size_t)k->n * size);
        else if (r->used + from >= 0)
            memcpy(to, tail_row(j, r, k, from, size), (size_t)k->n * size);
        else
            memset(to, 0, (size_t)k->n * size);
    }
}

LM_INLINE void cached_block(lm_dtype t, const conv_job *j, conv_scratch *s, const conv_block *k,
                            int64_t b)
{
    const lm_conv_attr *a = j->a;
    const state_rows r = state_rows_of(j->call, 2, a->seq, b);
    size_t size = lm_dtype_size(t);
    if (k->run.channel < 0) {
        pass_by(j, k, 2, r.row, r.row + r.n);
        return;
    }
    if (r.fresh)
        load_taps(j, s, k);
    for (int64_t t0 = 0; t0 < r.fresh; t0 += ROWS) {
        int64_t end = least(t0 + ROWS, r.fresh);
        load(t, j, s, k, r.row, t0 - (a->taps - 1), end);
        if (!t0)
            load_tail(t, j, s, k, &r);
        for (int64_t row = t0; row < end; row++)
            put_row(t, j, s, k, 0, row, r.row + row);
    }
    copy_rows(r.row + r.fresh, r.row + r.n, k->n, NULL, 0,
              (char *)j->call->out[0].data + (size_t)(k->run.channel + k->at) * size, a->channels,
              size);
    keep_tail(t, j, k, &r);
}

#define BLOCKS(name)                                                                              \
    LM_INLINE void name##s(lm_dtype t, const conv_job *j, int64_t begin, int64_t end, int worker) \
    {                                                                                             \
        conv_scratch *s = scratch_of(j, worker);                                                  \
        for (int64_t it = begin; it < end; it++) {                                                \
            conv_block k = block_at(j->a, it / j->pieces);                                        \
            name(t, j, s, &k, it % j->pieces);                                                    \
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
BLOCKS(cached_block)

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
    const lm_conv_attr *a = c->attr;
    conv_job j = { c, a, 0, a->batch };
    lm_par_for(c->par, blocks_of(a) * a->batch, 1, VF_PICK(run_blocks, c->in[0].dtype), &j);
}

static void conv_dx(const lm_call *c)
{
    const lm_conv_attr *a = c->attr;
    conv_job j = { c, a, 1, a->batch };
    lm_par_for(c->par, blocks_of(a) * a->batch, 1, VF_PICK(dx_blocks, c->in[0].dtype), &j);
}

static void conv_dw(const lm_call *c)
{
    conv_job j = { c, c->attr, 1, 1 };
    lm_par_for(c->par, blocks_of(j.a), 1, VF_PICK(dw_blocks, c->in[0].dtype), &j);
}

static void conv_cached(const lm_call *c)
{
    const lm_conv_attr *a = c->attr;
    conv_job j = { c, a, 0, a->batch + 1 };
    lm_par_for(c->par, blocks_of(a) * j.pieces, 1, VF_PICK(cached_blocks, c->in[0].dtype), &j);
}

static size_t conv_work(const lm_call *c, int threads)
{
    (void)c;
    return (size_t)threads * sizeof(conv_scratch);
}

const lm_kernel LM_TABLE_NAME(conv, LM_SIMD)[] = {
    VF_KERNEL("conv", conv, conv_work),
    VF_KERNEL("conv_dx", conv_dx, conv_work),
    VF_KERNEL("conv_dw", conv_dw, conv_work),
    VF_KERNEL("conv_cached", conv_cached, conv_work),
    VF_KERNEL_END,
};
