/* SPDX-License-Identifier: Apache-2.0 */
/* linear_attention_ref.c -- the definition of linear attention (kernels/linear_attention.h): the recurrence row by row; the
 * backward by pairs of a query and a key, o_t = scale sum_j p_tj v_j / (sum_j p_tj + eps) with p_tj = a^(t-j) phi(q_t)
 * phi(k_j). */
#include "kernels/linear_attention.h"

#include <string.h>

#include "kernels/cpu/ref.h"
#include "kernels/cpu/state_rows.h"
#include "kernels/cpu/tables.h"

/* One key head of one sequence. */
typedef struct {
    const lm_linear_attention_attr *a;
    const lm_tensor *qkv, *lo;
    int64_t j;
    int64_t row, used; /* the first row, and those before it, which the state has */
} head;

static int64_t group_of(const lm_linear_attention_attr *a)
{
    return a->heads / a->kv_heads;
}

static int64_t start_of(const head *x, int64_t t)
{
    return x->lo ? (int64_t)get(x->lo, x->row + t) : 0;
}

/* Where query head h, or the key or value of x, begins in row t. */
static int64_t query_at(const head *x, int64_t t, int64_t h)
{
    return (x->row + t) * width(x->qkv) + h * x->a->head_dim;
}

static int64_t key_at(const head *x, int64_t t)
{
    return query_at(x, t, x->a->heads + x->j);
}

static int64_t value_at(const head *x, int64_t t)
{
    return query_at(x, t, x->a->heads + x->a->kv_heads + x->j);
}

static void features(const head *x, int64_t at, double *out)
{
    for (int64_t d = 0; d < x->a->head_dim; d++) {
        double v = get(x->qkv, at + d);
        out[d] = x->a->feature == LM_FEATURE_IDENTITY ? v : v > 0 ? v + 1 : exp(v);
    }
}

/* The derivative of phi where its value is y. */
static double slope(const lm_linear_attention_attr *a, double y)
{
    return a->feature == LM_FEATURE_ELU && y < 1 ? y : 1;
}

static double dot(const double *x, const double *y, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += x[i] * y[i];
    return sum;
}

/* ---- forward ---- */

/* S, and z behind it, before row t become those after it; k [D]: scratch. */
static void step(const head *x, int64_t t, double *S, double *k)
{
    const int64_t D = x->a->head_dim, at = value_at(x, t);
    bool begins = x->used + t == 0 || (x->lo && start_of(x, t) == t);
    double a = exp(lm_linear_log_decay(x->a->decay, x->j));
    features(x, key_at(x, t), k);
    for (int64_t i = 0; i < x->a->state_rows * D; i++)
        S[i] = begins ? 0 : a * S[i];
    for (int64_t d = 0; d < D; d++)
        for (int64_t e = 0; e < D; e++)
            S[d * D + e] += k[d] * get(x->qkv, at + e);
    for (int64_t d = 0; x->a->feature == LM_FEATURE_ELU && d < D; d++)
        S[D * D + d] += k[d];
}

/* The results of row t from S after it. */
static void read_state(const head *x, int64_t t, const double *S, double *q, lm_tensor *o)
{
    const int64_t D = x->a->head_dim, group = group_of(x->a);
    for (int64_t h = x->j * group; h < (x->j + 1) * group; h++) {
        double by = x->a->scale;
        features(x, query_at(x, t, h), q);
        if (x->a->feature == LM_FEATURE_ELU)
            by /= dot(q, S + D * D, D) + x->a->eps;
        for (int64_t e = 0; e < D; e++) {
            double sum = 0;
            for (int64_t d = 0; d < D; d++)
                sum += q[d] * S[d * D + e];
            set(o, ((x->row + t) * x->a->heads + h) * D + e, by * sum);
        }
    }
}

static size_t forward_work(const lm_call *c, int threads)
{
    const lm_linear_attention_attr *a = c->attr;
    (void)threads;
    return (size_t)((a->state_rows + 1) * a->head_dim) * sizeof(double);
}

static void linear_attention(const lm_call *c)
{
    const lm_linear_attention_attr *a = c->attr;
    double *S = c->work, *row = S + a->state_rows * a->head_dim;
    for (int64_t i = 0; i < a->batch * a->kv_heads; i++) {
        head x = { a, &c->in[0], opt_in(c, 1), i % a->kv_heads, i / a->kv_heads * a->seq, 0 };
        for (int64_t t = 0; t < a->seq; t++) {
            step(&x, t, S, row);
            read_state(&x, t, S, row, &c->out[0]);
        }
    }
}

/* ---- backward ---- */

/* Rows of a head: features, and gradients of those of keys and of values. */
typedef struct {
    double *q, *k, *dk, *dv, *dq, *w; /* [T][D] four times, [D], [T] */
} rows;

static size_t backward_work(const lm_call *c, int threads)
{
    const lm_linear_attention_attr *a = c->attr;
    (void)threads;
    return (size_t)((4 * a->seq + 1) * a->head_dim + a->seq) * sizeof(double);
}

/* Gradients of row i of query head h: those of p_ij are (do_i v_j - <do_i,o_i> / scale) scale / denominator. */
static void back_row(const lm_call *c, const head *x, const rows *y, int64_t i, int64_t h)
{
    const lm_linear_attention_attr *a = x->a;
    const int64_t D = a->head_dim, from = start_of(x, i);
    const int64_t at = ((x->row + i) * a->heads + h) * D;
    double ld = lm_linear_log_decay(a->decay, x->j), by = a->scale, along = 0, sum = a->eps;
    for (int64_t j = from; j <= i; j++) {
        y->w[j] = exp((double)(i - j) * ld);
        sum += y->w[j] * dot(y->q + i * D, y->k + j * D, D);
    }
    memset(y->dq, 0, (size_t)D * sizeof *y->dq);
    if (a->feature == LM_FEATURE_ELU) {
        by /= sum;
        for (int64_t e = 0; e < D; e++)
            along += get(&c->in[0], at + e) * get(&c->in[2], at + e) / sum;
    }
    for (int64_t j = from; j <= i; j++) {
        double p = y->w[j] * dot(y->q + i * D, y->k + j * D, D), dp = -along;
        for (int64_t e = 0; e < D; e++) {
            double dout = by * get(&c->in[0], at + e);
            dp += dout * get(x->qkv, value_at(x, j) + e);
            y->dv[j * D + e] += p * dout;
        }
        for (int64_t d = 0; d < D; d++) {
            y->dq[d] += dp * y->w[j] * y->k[j * D + d];
            y->dk[j * D + d] += dp * y->w[j] * y->q[i * D + d];
        }
    }
    for (int64_t d = 0; d < D; d++)
        set(&c->out[0], query_at(x, i, h) + d, y->dq[d] * slope(a, y->q[i * D + d]));
}

static void back_head(const lm_call *c, const head *x, const rows *y)
{
    const int64_t D = x->a->head_dim, T = x->a->seq, group = group_of(x->a);
    memset(y->dk, 0, (size_t)(2 * T * D) * sizeof *y->dk); /* and dv */
    for (int64_t t = 0; t < T; t++)
        features(x, key_at(x, t), y->k + t * D);
    for (int64_t h = x->j * group; h < (x->j + 1) * group; h++) {
        for (int64_t t = 0; t < T; t++)
            features(x, query_at(x, t, h), y->q + t * D);
        for (int64_t t = 0; t < T; t++)
            back_row(c, x, y, t, h);
    }
    for (int64_t t = 0; t < T; t++)
        for (int64_t d = 0; d < D; d++) {
            set(&c->out[0], key_at(x, t) + d, y->dk[t * D + d] * slope(x->a, y->k[t * D + d]));
            set(&c->out[0], value_at(x, t) + d, y->dv[t * D + d]);
        }
}

static void linear_attention_dx(const lm_call *c)
{
    const lm_linear_attention_attr *a = c->attr;
    const int64_t size = a->seq * a->head_dim;
    rows y = { .q = c->work };
    y.k = y.q + size;
    y.dk = y.k + size;
    y.dv = y.dk + size;
    y.dq = y.dv + size;
    y.w = y.dq + a->head_dim;
    for (int64_t i = 0; i < a->batch * a->kv_heads; i++)
        back_head(
            c, &(head){ a, &c->in[1], opt_in(c, 3), i % a->kv_heads, i / a->kv_heads * a->seq, 0 },
            &y);
}

/* ---- linear_attention_cached ---- */

static void run_cached(const lm_call *c, const state_rows *s, const head *x)
{
    const lm_linear_attention_attr *a = x->a;
    const int64_t size = a->state_rows * a->head_dim, group = group_of(a) * a->head_dim;
    const int64_t at = (s->slot * a->kv_heads + x->j) * size;
    double *S = c->work, *row = S + size;
    for (int64_t i = 0; s->fresh && i < size; i++)
        S[i] = s->used ? get(&c->out[1], at + i) : 0;
    for (int64_t t = 0; t < s->fresh; t++) {
        step(x, t, S, row);
        read_state(x, t, S, row, &c->out[0]);
    }
    for (int64_t i = 0; s->fresh && i < size; i++)
        set(&c->out[1], at + i, S[i]);
    for (int64_t t = s->fresh; t < s->n; t++)
        for (int64_t e = 0; e < group; e++)
            set(&c->out[0], (x->row + t) * a->heads * a->head_dim + x->j * group + e, 0);
}

static void linear_attention_cached(const lm_call *c)
{
    const lm_linear_attention_attr *a = c->attr;
    for (int64_t b = 0; b <= a->batch; b++) {
        state_rows s = state_rows_of(c, 1, a->seq, b);
        for (int64_t j = 0; j < a->kv_heads; j++)
            run_cached(c, &s, &(head){ a, &c->in[0], NULL, j, s.row, s.used });
    }
}

const lm_kernel lm_linear_attention_ref_kernels[] = {
    { "linear_attention", LM_DTYPE_NONE, LM_CPU_REF, linear_attention, forward_work },
    { "linear_attention_dx", LM_DTYPE_NONE, LM_CPU_REF, linear_attention_dx, backward_work },
    { "linear_attention_cached", LM_DTYPE_NONE, LM_CPU_REF, linear_attention_cached, forward_work },
    { NULL, LM_DTYPE_NONE, LM_CPU_REF, NULL, NULL },
};
