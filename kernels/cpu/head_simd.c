/* SPDX-License-Identifier: Apache-2.0 */
/* head_simd.c -- vocabulary head and cross-entropy.  For each chunk of rows: logits = x w^T + bias (F32),
 * softmax, loss and the gradient of the logits in place over them, rounded to act, then dw (+)=
 * dlogits^T x and dx = dlogits w.
 *
 * Rows without a target (prompts, padding, tokens that no mask covers) are left out where w does not train, and where less
 * than half of the rows have one: the others are copied together before the products, and their dx to its places after
 * them.
 *
 * dw is read and written once per chunk (154 MB for 50257 x 768) and the logits once per pass, so
 * chunks are as large as the contract allows where dw is wanted; one row of logits fits the
 * second-level cache, so of the three passes over a row only the first waits for memory. */
#include "kernels/head.h"

#include <math.h>

#include "kernels/cpu/simd.h"
#include "kernels/cpu/tables.h"
#include "kernels/linear.h"

enum {
    WHOLE_ROWS =
        16, /* chunks of rows that were copied together are filled up to a multiple of these */
    LOGITS_BYTES = 1 << 27, /* of a chunk without dw */
    DX_ROWS = 8192, /* of w in one product of dx, where w is not packed once for all chunks */
};

typedef struct {
    const int32_t *at; /* of a row of z: its place in the arrays below; -1: it has no target */
    const int32_t *target;
    const float *lse_in, *scale;        /* of the gradient; lse_in NULL: of the row's own sum */
    const float *entropy_in, *dentropy; /* likewise; NULL: the entropy has none */
    float *loss, *lse, *logit, *entropy, *collision; /* NULL: not wanted */
    float *z;                                        /* rows of logits, `pitch` floats apart */
    int64_t pitch, vocab;
    bool grad;
    float cap; /* soft cap of the logits; 0: none */
} softmax_job;

/* The forms of the head differ in the places of their operands; -1: none. */
typedef struct {
    int lse_in, scale, entropy_in, dentropy, bias;
    int loss, lse, logit, entropy, collision, dx, dw, dbias;
} head_form;
static const head_form stats_form = { -1, -1, -1, -1, 3, 0, 1, 2, 3, 4, -1, -1, -1 };
static const head_form grad_form = { 3, 4, 5, 6, 7, -1, -1, -1, -1, -1, 0, 1, 2 };
static const head_form loss_form = { -1, 3, -1, -1, 4, 0, -1, -1, -1, -1, 1, 2, 3 };

static float *output(const lm_call *c, int i)
{
    return i < 0 ? NULL : opt_data(c->out, c->n_out, i);
}

/* Row pitch in floats: whole lines, and an odd number of them so that a column does not fall on few
 * sets. */
static int64_t pitch_of(int64_t vocab)
{
    return ((vocab + 15) / 16 | 1) * 16;
}

/* The address of a row; NULL while scratch is being planned. */
static void *row_at(const lm_tensor *t, int64_t row)
{
    return t->data ? (char *)t->data + row * last_dim(t) * (int64_t)lm_dtype_size(t->dtype) : NULL;
}

static bool wants(const lm_call *c, int output)
{
    return output >= 0 && c->n_out > output && c->out[output].ndim;
}

/* The most rows of logits at a time.  Larger chunks save passes over dw; without it, logits of a
 * large vocabulary would take more memory than the layers. */
static int64_t most_rows(const lm_call *c, const head_form *f)
{
    const lm_head_attr *a = c->attr;
    int64_t quarter = (row_count(&c->in[0]) + 3) / 4, most = quarter > 512 ? quarter : 512;
    if (wants(c, f->dw))
        return most;
    int64_t fit = LOGITS_BYTES / (pitch_of(a->vocab) * (int64_t)sizeof(float));
    fit = fit < 128 ? 128 : fit;
    return fit < 512 ? fit : 512;
}

static int64_t chunk_of(const lm_call *c, const head_form *f)
{
    const lm_head_attr *a = c->attr;
    int64_t n_rows = row_count(&c->in[0]), chunk = most_rows(c, f);
    if (a->chunk_rows > 0 && a->chunk_rows < chunk)
        chunk = a->chunk_rows;
    if (chunk >= n_rows)
        return n_rows;
    int64_t parts = (n_rows + chunk - 1) / chunk; /* equal chunks, whole tiles of 16 rows */
    int64_t even = ((n_rows + parts - 1) / parts + 15) / 16 * 16;
    return even < chunk ? even : chunk;
}

/* exp(d) for d <= 0.  Below -64 it is 0: such a term is lost in the sum of a row a billion times
 * over, and the products made from it would be denormal, which costs a hundred times a normal one.
 */
LM_INLINE vf exp_below(vf d)
{
    vf least = vf_set(-64);
    return vf_if_lt(d, least, vf_zero(), vf_exp(vf_max(least, d)));
}

/* Largest logit and sum of exp(logit - top); NaN anywhere makes the sum NaN. */
LM_INLINE float exp_row(float *z, int64_t vocab, float *top)
{
    vf t0 = vf_set(-INFINITY), t1 = t0;
    int64_t i = 0;
    for (; i + 2 * VF_LANES <= vocab; i += 2 * VF_LANES) {
        t0 = vf_max(vf_load(z + i), t0);
        t1 = vf_max(vf_load(z + i + VF_LANES), t1);
    }
    *top = vf_top(vf_max(t0, t1));
    for (; i < vocab; i++)
        *top = z[i] > *top ? z[i] : *top;
    vf m = vf_set(*top), s0 = vf_zero(), s1 = s0;
    for (i = 0; i + 2 * VF_LANES <= vocab; i += 2 * VF_LANES) {
        vf e0 = exp_below(vf_load(z + i) - m), e1 = exp_below(vf_load(z + i + VF_LANES) - m);
        vf_store(z + i, e0);
        vf_store(z + i + VF_LANES, e1);
        s0 += e0;
        s1 += e1;
    }
    int64_t from = i;
    VF_FOR(k, n, vocab - from, {
        vf e = exp_below(vf_get_any(LM_DTYPE_F32, z, from + k, n) - m);
        if (n < VF_LANES)
            e = vf_keep_n(e, n, vf_zero());
        vf_put_any(LM_DTYPE_F32, z, from + k, e, n);
        s0 += e;
    });
    return vf_sum(s0 + s1);
}

/* Of exponentials e = exp(logit - top) that add up to sum: log(sum) - (sum of e log e) / sum. */
static double entropy_row(const float *e, int64_t vocab, float sum)
{
    vf below = vf_zero(), zero = vf_zero();
    VF_FOR(i, n, vocab, {
        vf v = vf_get_any(LM_DTYPE_F32, e, i, n);
        below += vf_if_lt(zero, v, v * vf_log(vf_max(vf_set(1e-30f), v)), zero);
    });
    return log((double)sum) - (double)vf_sum(below) / (double)sum;
}

/* The same of the logits themselves. */
static double entropy_below(const float *z, int64_t vocab, float top, float sum)
{
    vf below = vf_zero(), m = vf_set(top), least = vf_set(-64);
    VF_FOR(i, n, vocab, {
        vf d = vf_get_any(LM_DTYPE_F32, z, i, n) - m, b = exp_below(d) * vf_max(least, d);
        below += n < VF_LANES ? vf_keep_n(b, n, vf_zero()) : b;
    });
    return log((double)sum) - (double)vf_sum(below) / (double)sum;
}

/* 2 log(sum) - log(sum of squares) of exponentials, k of which are 1: these apart, so that little is lost where the
 * distribution is almost certain. */
static double collision_of(vf ones, vf rest, vf squares)
{
    double k = (double)vf_sum(ones);
    return log(k) + 2 * log1p((double)vf_sum(rest) / k) - log1p((double)vf_sum(squares) / k);
}

/* -log of the sum of squares of exponentials exp(logit - top), divided by that of their own squared. */
static double collision_row(const float *e, int64_t vocab)
{
    vf ones = vf_zero(), rest = ones, squares = ones, zero = ones, one = vf_set(1);
    VF_FOR(i, n, vocab, {
        vf v = vf_get_any(LM_DTYPE_F32, e, i, n), q = v * v;
        ones += vf_if_lt(v, one, zero, one);
        rest += vf_if_lt(v, one, v, zero);
        squares += vf_if_lt(v, one, q, zero);
    });
    return collision_of(ones, rest, squares);
}

/* The same of the logits themselves. */
static double collision_below(const float *z, int64_t vocab, float top)
{
    vf ones = vf_zero(), rest = ones, squares = ones, zero = ones, one = vf_set(1), m = vf_set(top);
    VF_FOR(i, n, vocab, {
        vf v = exp_below(vf_get_any(LM_DTYPE_F32, z, i, n) - m);
        if (n < VF_LANES)
            v = vf_keep_n(v, n, zero);
        vf q = v * v;
        ones += vf_if_lt(v, one, zero, one);
        rest += vf_if_lt(v, one, v, zero);
        squares += vf_if_lt(v, one, q, zero);
    });
    return collision_of(ones, rest, squares);
}

LM_INLINE void put_number(float *to, int64_t row, double v)
{
    if (to)
        to[row] = (float)v;
}

/* What a gradient of the entropy adds to that of the logit whose log-probability is d. */
static float entropy_slope(const softmax_job *j, int64_t at, float d)
{
    return j->dentropy && d > -64 ? -j->dentropy[at] * expf(d) * (d + j->entropy_in[at]) : 0;
}

/* The logit of the target, 0 where another part of the vocabulary has it. */
static inline float pick(const softmax_job *j, const float *z, int64_t target)
{
    return target < j->vocab ? z[target] : 0;
}

LM_INLINE void put_target(lm_dtype t, const softmax_job *j, float *z, int64_t target, float x)
{
    if (target < j->vocab)
        lm_set(t, z, target, x);
}

/* The gradient of a row whose sum is known: as below, except for the roundings. */
LM_INLINE void gradient_row(lm_dtype t, const softmax_job *j, float *z, int64_t at)
{
    float lse = j->lse_in[at], scale = j->scale[at];
    int64_t target = j->target[at];
    float picked = pick(j, z, target);
    float at_target = scale * expm1f(picked - lse) + entropy_slope(j, at, picked - lse);
    vf s = vf_set(scale), m = vf_set(lse);
    if (j->dentropy) {
        vf by = vf_set(j->dentropy[at]), all = vf_set(j->entropy_in[at]), least = vf_set(-64);
        VF_FOR(i, n, j->vocab, {
            vf d = vf_get_any(LM_DTYPE_F32, z, i, n) - m;
            vf_put_any(t, z, i, exp_below(d) * (s - by * (vf_max(least, d) + all)), n);
        });
        put_target(t, j, z, target, at_target);
        return;
    }
    VF_FOR(i, n, j->vocab, {
        vf d = vf_get_any(LM_DTYPE_F32, z, i, n) - m;
        vf_put_any(t, z, i, exp_below(d) * s, n);
    });
    put_target(t, j, z, target, at_target);
}

/* The row's logits capped in place; returns the largest. */
LM_INLINE float cap_row(float *z, int64_t vocab, float cap)
{
    vf c = vf_set(cap), over = vf_set(1 / cap), best = vf_set(-INFINITY);
    VF_FOR(i, n, vocab, {
        vf v = c * vf_tanh(vf_get_any(LM_DTYPE_F32, z, i, n) * over);
        vf_put_any(LM_DTYPE_F32, z, i, v, n);
        best = vf_max(n < VF_LANES ? vf_keep_n(v, n, best) : v, best);
    });
    return vf_top(best);
}

/* softmax_row with a soft cap: the capped logits stay, as their slopes are made of them. */
LM_INLINE void capped_row(lm_dtype t, const softmax_job *j, float *z, int64_t at)
{
    float top = cap_row(z, j->vocab, j->cap), over = 1 / j->cap;
    int64_t target = j->target[at];
    float picked = pick(j, z, target), at_target = 0, factor = 1, by = 0, entropy = 0, more = 0;
    if (j->lse_in) {
        top = j->lse_in[at];
        at_target = expm1f(picked - top);
        more = entropy_slope(j, at, picked - top);
        by = j->dentropy ? j->dentropy[at] : 0;
        entropy = j->dentropy ? j->entropy_in[at] : 0;
    } else {
        vf all = vf_zero(), m = vf_set(top);
        VF_FOR(i, n, j->vocab, {
            vf e = exp_below(vf_get_any(LM_DTYPE_F32, z, i, n) - m);
            all += n < VF_LANES ? vf_keep_n(e, n, vf_zero()) : e;
        });
        float sum = vf_sum(all);
        double lse = (double)top + log((double)sum);
        put_number(j->loss, at, lse - (double)picked);
        put_number(j->lse, at, lse);
        put_number(j->logit, at, (double)picked);
        if (j->entropy)
            put_number(j->entropy, at, entropy_below(z, j->vocab, top, sum));
        if (j->collision)
            put_number(j->collision, at, collision_below(z, j->vocab, top));
        if (!j->grad)
            return;
        at_target = (expf(picked - top) - sum) / sum;
        factor = 1 / sum;
    }
    if (!j->grad)
        return;
    float slope_at = 1 - picked * over * picked * over;
    at_target = at_target * (j->scale[at] * slope_at) + more * slope_at;
    vf s = vf_set(j->scale[at] * factor - by * entropy), m = vf_set(top), c = vf_set(by),
       least = vf_set(-64);
    VF_FOR(i, n, j->vocab, { /* logits are bounded, and so is d */
                             vf v = vf_get_any(LM_DTYPE_F32, z, i, n), u = v * vf_set(over);
                             vf d = v - m, slope = vf_fnma(u, u, vf_set(1));
                             vf_put_any(t, z, i, exp_below(d) * (s - c * vf_max(least, d)) * slope,
                                        n);
    });
    put_target(t, j, z, target, at_target);
}

/* Logits of a row -> its numbers, and scale (softmax - onehot) in place as `t`. */
LM_INLINE void softmax_row(lm_dtype t, const softmax_job *j, int64_t row)
{
    float *z = j->z + row * j->pitch;
    int64_t at = j->at[row];
    if (at < 0) {
        if (j->grad)
            memset(z, 0, (size_t)j->vocab * lm_dtype_size(t));
        return;
    }
    int64_t target = j->target[at];
    if (j->cap > 0) {
        capped_row(t, j, z, at);
        return;
    }
    if (j->lse_in) {
        gradient_row(t, j, z, at);
        return;
    }
    float top, picked = pick(j, z, target), sum = exp_row(z, j->vocab, &top);
    double lse = (double)top + log((double)sum);
    put_number(j->loss, at, lse - (double)picked);
    put_number(j->lse, at, lse);
    put_number(j->logit, at, (double)picked);
    if (j->entropy)
        put_number(j->entropy, at, entropy_row(z, j->vocab, sum));
    if (j->collision)
        put_number(j->collision, at, collision_row(z, j->vocab));
    if (!j->grad)
        return;
    /* onehot inside the float: e/sum - 1, so that a confident row keeps its small gradient */
    float at_target = j->scale[at] * ((pick(j, z, target) - sum) / sum);
    vf factor = vf_set(j->scale[at] / sum);
    VF_FOR(i, n, j->vocab, { /* in place: BF16 element i is never ahead of float i */
                             vf e = vf_get_any(LM_DTYPE_F32, z, i, n);
                             vf_put_any(t, z, i, e * factor, n);
    });
    put_target(t, j, z, target, at_target);
}

LM_INLINE void softmax_rows(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    for (int64_t row = begin; row < end; row++)
        softmax_row(t, ctx, row);
}
VF_TYPED(softmax_rows)

static size_t round_line(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

static const float *input(const lm_call *c, int i)
{
    return i < 0 || i >= c->n_in || !c->in[i].ndim ? NULL : c->in[i].data;
}

/* logits [m,V] = x w^T (+ bias) of m rows x. */
static lm_gemm logits_of(const lm_call *c, const head_form *f, const void *rows, int64_t m)
{
    const lm_head_attr *a = c->attr;
    const lm_tensor *x = &c->in[0], *w = &c->in[1];
    int64_t n_cols = last_dim(x);
    return (lm_gemm){ .m = m,
                      .n = a->vocab,
                      .k = n_cols,
                      .ab = x->dtype,
                      .cd = LM_DTYPE_F32,
                      .tb = true,
                      .a = rows,
                      .lda = n_cols,
                      .b = w->codes ? NULL : w->data,
                      .b_codes = w->codes,
                      .ldb = n_cols,
                      .c = c->work,
                      .ldc = pitch_of(a->vocab),
                      .bias = input(c, f->bias) };
}

/* dx [m,C] (+)= dlogits w over rows [v, v + rows) of w, to `to` of type `type`. */
static lm_gemm dx_of(const lm_call *c, int64_t m, int64_t v, int64_t rows, void *to, lm_dtype type)
{
    const lm_head_attr *a = c->attr;
    const lm_tensor *w = &c->in[1];
    lm_dtype t = c->in[0].dtype;
    int64_t n_cols = last_dim(w);
    return (lm_gemm){ .m = m,
                      .n = n_cols,
                      .k = rows,
                      .ab = t,
                      .cd = type,
                      .accumulate = v > 0,
                      .a = c->work ? (char *)c->work + v * (int64_t)lm_dtype_size(t) : NULL,
                      .lda = pitch_of(a->vocab) * (t == LM_DTYPE_BF16 ? 2 : 1),
                      .b = w->codes ? NULL : row_at(w, v),
                      .b_codes = w->codes,
                      .b_from = v,
                      .ldb = n_cols,
                      .c = to,
                      .ldc = n_cols };
}

/* dw [V,C] (+)= dlogits^T x of m rows x; `more`: chunks before these have been added. */
static lm_gemm dw_of(const lm_call *c, const head_form *f, const void *rows, int64_t m, bool more)
{
    const lm_head_attr *a = c->attr;
    const lm_tensor *x = &c->in[0];
    int64_t n_cols = last_dim(x);
    return (lm_gemm){ .m = a->vocab,
                      .n = n_cols,
                      .k = m,
                      .ab = x->dtype,
                      .cd = LM_DTYPE_F32,
                      .ta = true,
                      .accumulate = more || !c->step || !overwrites(c, a->acc),
                      .a = c->work,
                      .lda = pitch_of(a->vocab) * (x->dtype == LM_DTYPE_BF16 ? 2 : 1),
                      .b = rows,
                      .ldb = n_cols,
                      .c = output(c, f->dw),
                      .ldc = n_cols,
                      .a_sum = output(c, f->dbias),
                      .a_sum_add = more || !c->step || !overwrites(c, a->acc) };
}

/* Scratch: logits of a chunk, then w packed for dx, then dx of a chunk as sums of several products, then the rows of a
 * chunk that were copied together, in their place their dx, then the places they came from, then that of the products. */
typedef struct {
    int64_t chunk, dx_rows;                    /* dx_rows: of w in one product of dx */
    size_t logits, packed, sums, rows, places; /* bytes */
} layout;

/* All of these depend on shapes alone, and so do the bits of dx: sums of w's rows in order, in F32 across products. */
static layout layout_of(const lm_call *c, const head_form *f)
{
    const lm_head_attr *a = c->attr;
    layout l = { .chunk = chunk_of(c, f), .dx_rows = a->vocab };
    l.logits = (size_t)(l.chunk * pitch_of(a->vocab)) * sizeof(float);
    l.rows = round_line((size_t)(l.chunk * last_dim(&c->in[0])) * lm_dtype_size(c->in[0].dtype));
    l.places = round_line((size_t)l.chunk * sizeof(int32_t));
    if (!wants(c, f->dx))
        return l;
    lm_gemm whole = dx_of(c, l.chunk, 0, a->vocab, NULL, c->in[0].dtype);
    size_t packed = lm_gemm_pack_size(&whole, LM_SIMD_LEVEL);
    if (packed > l.logits && a->vocab > DX_ROWS) {
        l.dx_rows = DX_ROWS;
        l.sums = c->in[0].dtype == LM_DTYPE_F32
                     ? 0
                     : round_line((size_t)(l.chunk * last_dim(&c->in[0])) * sizeof(float));
    }
    if (packed <= l.logits && !c->in[1].codes)
        l.packed = round_line(packed);
    return l;
}

/* Scratch of the products over m rows. */
static size_t products_work(const lm_call *c, const head_form *f, const layout *l, int64_t m,
                            int threads)
{
    lm_gemm all[] = { logits_of(c, f, NULL, m), dx_of(c, m, 0, l->dx_rows, NULL, c->in[0].dtype),
                      dw_of(c, f, NULL, m, false) };
    size_t most = 0;
    all[1].b_packed = l->packed ? &all : NULL; /* any address: only its presence counts here */
    for (int i = 0; i < 3; i++) {
        size_t need = i == 0 || wants(c, i == 1 ? f->dx : f->dw)
                          ? lm_gemm_work(&all[i], LM_SIMD_LEVEL, threads)
                          : 0;
        most = need > most ? need : most;
    }
    return most;
}

static size_t work_of(const lm_call *c, const head_form *f, int threads)
{
    layout l = layout_of(c, f);
    int64_t last = row_count(&c->in[0]) % l.chunk;
    size_t most = products_work(c, f, &l, l.chunk, threads);
    size_t rest = last ? products_work(c, f, &l, last, threads) : 0; /* may need more */
    most = rest > most ? rest : most;
    for (int64_t m = WHOLE_ROWS; l.rows && m < l.chunk; m += WHOLE_ROWS) {
        size_t need = products_work(c, f, &l, m, threads);
        most = need > most ? need : most;
    }
    return l.logits + l.packed + l.sums + l.rows + l.places + most;
}

static char *places_of(const lm_call *c, const layout *l)
{
    return (char *)c->work + l->logits + l->packed + l->sums + l->rows;
}

static void run_product(const lm_call *c, const layout *l, lm_gemm g)
{
    g.work = places_of(c, l) + l->places;
    lm_gemm_run(&g, LM_SIMD_LEVEL, c->par);
}

typedef struct {
    const float *from;
    void *to;
    int64_t cols;
} rounding;

static void round_rows(void *ctx, int64_t begin, int64_t end, int worker)
{
    const rounding *r = ctx;
    (void)worker;
    for (int64_t i = begin * r->cols; i < end * r->cols;) {
        int64_t left = end * r->cols - i, n = left < VF_LANES ? left : VF_LANES;
        vf_put_any(LM_DTYPE_BF16, r->to, i, vf_get_any(LM_DTYPE_F32, r->from, i, n), n);
        i += n;
    }
}

static void run_dx(const lm_call *c, const layout *l, int64_t m, void *dx)
{
    const lm_head_attr *a = c->attr;
    lm_dtype t = c->in[0].dtype;
    char *after = (char *)c->work + l->logits;
    void *sums = l->sums ? after + l->packed : dx;
    for (int64_t v = 0; v < a->vocab; v += l->dx_rows) {
        int64_t rows = a->vocab - v < l->dx_rows ? a->vocab - v : l->dx_rows;
        lm_gemm g = dx_of(c, m, v, rows, sums, l->sums ? LM_DTYPE_F32 : t);
        g.b_packed = l->packed ? after : NULL;
        run_product(c, l, g);
    }
    if (l->sums) {
        rounding r = { sums, dx, last_dim(&c->in[0]) };
        lm_par_for(c->par, m, 16, round_rows, &r);
    }
}

/* Rows of x that go through the products together. */
typedef struct {
    int64_t first, end; /* of x's rows; those that have no target are not among the m */
    int64_t kept,
        m; /* rows with targets; rows of the products, the last m - kept of which are zeros */
    const void *x; /* [m,C] */
    int32_t *at;   /* [m] */
    bool copied;
} head_chunk;

/* The next chunk from row `first` on, whose ignored rows get zeros as their results. */
static head_chunk take(const lm_call *c, const head_form *f, const layout *l, int64_t first,
                       bool all)
{
    const int32_t *target = c->in[2].data;
    const int numbers[] = { f->loss, f->lse, f->logit, f->entropy, f->collision };
    head_chunk r = { .first = first, .end = first, .at = (int32_t *)places_of(c, l) };
    int64_t n_rows = row_count(&c->in[0]);
    size_t bytes = (size_t)last_dim(&c->in[0]) * lm_dtype_size(c->in[0].dtype);
    for (; r.end < n_rows && (all ? r.end - first : r.kept) < l->chunk; r.end++) {
        if (target[r.end] >= 0) {
            r.at[all ? r.end - first : r.kept] = (int32_t)r.end;
            r.kept++;
            continue;
        }
        if (all)
            r.at[r.end - first] = -1;
        for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
            put_number(output(c, numbers[i]), r.end, 0);
        if (output(c, f->dx))
            memset(row_at(&c->out[f->dx], r.end), 0, bytes);
    }
    r.m = r.end - first;
    r.x = row_at(&c->in[0], first);
    if (all)
        return r;
    bool planned = r.kept == l->chunk ||
                   r.kept == n_rows % l->chunk; /* the scratch is for these, or whole tiles */
    r.copied = r.kept < r.end - first || !planned;
    if (!r.copied)
        return r;
    char *rows = places_of(c, l) - l->rows;
    r.m = (r.kept + WHOLE_ROWS - 1) / WHOLE_ROWS * WHOLE_ROWS;
    r.m = r.m < l->chunk ? r.m : l->chunk;
    r.x = rows;
    for (int64_t i = 0; i < r.kept; i++)
        memcpy(rows + (size_t)i * bytes, row_at(&c->in[0], r.at[i]), bytes);
    memset(rows + (size_t)r.kept * bytes, 0, (size_t)(r.m - r.kept) * bytes);
    for (int64_t i = r.kept; i < r.m; i++)
        r.at[i] = -1;
    return r;
}

static void give_dx(const lm_call *c, const head_form *f, const layout *l, const head_chunk *r)
{
    lm_tensor *dx = &c->out[f->dx];
    size_t bytes = (size_t)last_dim(dx) * lm_dtype_size(dx->dtype);
    char *rows = places_of(c, l) - l->rows;
    run_dx(c, l, r->m, r->copied ? rows : row_at(dx, r->first));
    for (int64_t i = 0; r->copied && i < r->kept; i++)
        memcpy(row_at(dx, r->at[i]), rows + (size_t)i * bytes, bytes);
}

/* True if all rows go through the products: with dw, whose sums of pairs have other bits otherwise, unless most would be
 * in vain. */
static bool takes_all(const lm_call *c, const head_form *f)
{
    const int32_t *target = c->in[2].data;
    int64_t n_rows = row_count(&c->in[0]), kept = 0;
    for (int64_t i = 0; i < n_rows; i++)
        kept += target[i] >= 0;
    return wants(c, f->dw) && 2 * kept >= n_rows;
}

static void run_head(const lm_call *c, const head_form *f)
{
    const lm_head_attr *a = c->attr;
    const lm_tensor *w = &c->in[1];
    lm_dtype t = c->in[0].dtype;
    const layout l = layout_of(c, f);
    int64_t n_rows = row_count(&c->in[0]), vocab = a->vocab;
    bool added = false, all = takes_all(c, f);
    if (l.packed) {
        lm_gemm whole = dx_of(c, l.chunk, 0, vocab, NULL, t);
        lm_gemm_pack(&whole, LM_SIMD_LEVEL, c->par, (char *)c->work + l.logits);
    }
    softmax_job j = { .target = c->in[2].data,
                      .lse_in = input(c, f->lse_in),
                      .scale = input(c, f->scale),
                      .entropy_in = input(c, f->entropy_in),
                      .dentropy = input(c, f->dentropy),
                      .loss = output(c, f->loss),
                      .lse = output(c, f->lse),
                      .logit = output(c, f->logit),
                      .entropy = output(c, f->entropy),
                      .collision = output(c, f->collision),
                      .z = c->work,
                      .pitch = pitch_of(vocab),
                      .vocab = vocab,
                      .grad = output(c, f->dx) || output(c, f->dw),
                      .cap = (float)a->soft_cap };
    for (int64_t first = 0; first < n_rows;) {
        head_chunk r = take(c, f, &l, first, all);
        first = r.end;
        if (!r.kept)
            continue;
        run_product(c, &l, logits_of(c, f, r.x, r.m));
        j.at = r.at;
        lm_par_for(c->par, r.m, 4, VF_PICK(softmax_rows, t), &j);
        if (output(c, f->dw))
            run_product(c, &l, dw_of(c, f, r.x, r.m, added));
        added = true;
        if (output(c, f->dx))
            give_dx(c, f, &l, &r);
    }
    int64_t done = added ? vocab : 0; /* rows of dw that a product wrote */
    if (output(c, f->dw) && done < row_count(w) && overwrites(c, a->acc))
        memset(output(c, f->dw) + done * last_dim(w), 0,
               (size_t)((row_count(w) - done) * last_dim(w)) * sizeof(float));
    if (output(c, f->dbias) && done < row_count(w) && overwrites(c, a->acc))
        memset(output(c, f->dbias) + done, 0, (size_t)(row_count(w) - done) * sizeof(float));
}

static size_t stats_work(const lm_call *c, int threads)
{
    return work_of(c, &stats_form, threads);
}

static size_t grad_work(const lm_call *c, int threads)
{
    return work_of(c, &grad_form, threads);
}

static size_t loss_work(const lm_call *c, int threads)
{
    return work_of(c, &loss_form, threads);
}

static void head_stats(const lm_call *c)
{
    run_head(c, &stats_form);
}

static void head_grad(const lm_call *c)
{
    run_head(c, &grad_form);
}

static void head_loss(const lm_call *c)
{
    run_head(c, &loss_form);
}

const lm_kernel LM_TABLE_NAME(head, LM_SIMD)[] = {
    VF_KERNEL("head_stats", head_stats, stats_work),
    VF_KERNEL("head_grad", head_grad, grad_work),
    VF_KERNEL("head_loss", head_loss, loss_work),
    VF_KERNEL_END,
};
