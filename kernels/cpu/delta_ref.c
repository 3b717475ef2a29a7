/* SPDX-License-Identifier: Apache-2.0 */
/* delta_ref.c -- the definition of the delta family (kernels/delta.h): the recurrence row by row, and its reverse. */
#include "kernels/delta.h"

#include <math.h>
#include <string.h>

#include "kernels/cpu/ref.h"
#include "kernels/cpu/state_rows.h"
#include "kernels/cpu/tables.h"
#include "numeric/kv_format.h"

/* One value head of one sequence. */
typedef struct {
    const lm_delta_attr *a;
    const lm_tensor *qkv, *g, *beta, *lo;
    int64_t b, h;
    int64_t row, used; /* the first row, and those before it, which the state has */
} head;

static int64_t row_of(const head *x, int64_t t)
{
    return x->row + t;
}

static bool begins(const head *x, int64_t t)
{
    return x->used + t == 0 || (x->lo && (int64_t)get(x->lo, row_of(x, t)) == t);
}

/* Where the query (part 0), key (1) or value (2) of row t begins. */
static int64_t place(const head *x, int64_t t, int part)
{
    const lm_delta_attr *a = x->a;
    int64_t keys = a->key_heads * a->key_dim, at = row_of(x, t) * width(x->qkv);
    if (part == 2)
        return at + 2 * keys + x->h * a->value_dim;
    return at + part * keys + x->h / (a->heads / a->key_heads) * a->key_dim;
}

/* The query or key of row t, divided by its length; returns the reciprocal of that. */
static double direction(const head *x, int64_t t, int part, double *out)
{
    int64_t at = place(x, t, part);
    double sum = x->a->eps;
    for (int64_t d = 0; d < x->a->key_dim; d++)
        sum += get(x->qkv, at + d) * get(x->qkv, at + d);
    for (int64_t d = 0; d < x->a->key_dim; d++)
        out[d] = get(x->qkv, at + d) / sqrt(sum);
    return 1 / sqrt(sum);
}

/* S before row t, decayed, becomes S after it; miss [E]: v - S^T k. */
static void step(const head *x, int64_t t, double *S, double *k, double *miss)
{
    int64_t D = x->a->key_dim, E = x->a->value_dim, at = place(x, t, 2);
    int64_t cell = row_of(x, t) * x->a->heads + x->h;
    double decay = begins(x, t) ? 0 : exp(get(x->g, cell));
    direction(x, t, 1, k);
    for (int64_t i = 0; i < D * E; i++)
        S[i] = begins(x, t) ? 0 : S[i] * decay;
    for (int64_t e = 0; e < E; e++) {
        miss[e] = get(x->qkv, at + e);
        for (int64_t d = 0; d < D; d++)
            miss[e] -= S[d * E + e] * k[d];
    }
    for (int64_t d = 0; d < D; d++)
        for (int64_t e = 0; e < E; e++)
            S[d * E + e] += get(x->beta, cell) * k[d] * miss[e];
}

/* Numbers of scratch of one head: a state of each row of a chunk and one before them, the gradient of one, and rows. */
static int64_t scratch(const lm_delta_attr *a)
{
    return (LM_DELTA_CHUNK + 2) * a->key_dim * a->value_dim + 4 * a->key_dim + 2 * a->value_dim;
}

static size_t work(const lm_call *c, int threads)
{
    (void)threads;
    return (size_t)scratch(c->attr) * sizeof(double);
}

/* The result of row t from S after it. */
static void read_state(const head *x, int64_t t, const double *S, double *q, lm_tensor *o)
{
    int64_t D = x->a->key_dim, E = x->a->value_dim;
    direction(x, t, 0, q);
    for (int64_t e = 0; e < E; e++) {
        double sum = 0;
        for (int64_t d = 0; d < D; d++)
            sum += S[d * E + e] * q[d];
        set(o, (row_of(x, t) * x->a->heads + x->h) * E + e, x->a->scale * sum);
    }
}

static void run_head(const lm_call *c, const head *x)
{
    int64_t D = x->a->key_dim, E = x->a->value_dim;
    double *S = c->work, *k = S + D * E, *q = k + D, *miss = q + D;
    lm_tensor *o = &c->out[0], *states = opt_out(c, 1);
    memset(S, 0, (size_t)(D * E) * sizeof *S);
    for (int64_t t = 0; t < x->a->seq; t++) {
        if (states && t % LM_DELTA_CHUNK == 0)
            for (int64_t i = 0; i < D * E; i++)
                set(states,
                    ((x->b * x->a->chunks + t / LM_DELTA_CHUNK) * x->a->heads + x->h) * D * E + i,
                    S[i]);
        step(x, t, S, k, miss);
        read_state(x, t, S, q, o);
    }
}

static void delta(const lm_call *c)
{
    const lm_delta_attr *a = c->attr;
    for (int64_t i = 0; i < a->batch * a->heads; i++)
        run_head(c, &(head){ a, &c->in[0], &c->in[1], &c->in[2], opt_in(c, 3), i / a->heads,
                             i % a->heads, i / a->heads * a->seq, 0 });
}

/* dx += r (dy - y <y,dy>): the gradient of y = x r, r the reciprocal of the length. */
static void add_direction(const head *x, lm_tensor *dqkv, int64_t at, const double *y,
                          const double *dy, double r)
{
    double along = 0;
    for (int64_t d = 0; d < x->a->key_dim; d++)
        along += y[d] * dy[d];
    for (int64_t d = 0; d < x->a->key_dim; d++)
        set(dqkv, at + d, get(dqkv, at + d) + r * (dy[d] - y[d] * along));
}

/* Row t in reverse: S after it, before: S before it, dS the gradient of S after it, which becomes that of before. */
static void back(const lm_call *c, const head *x, int64_t t, const double *S, const double *before,
                 double *dS, double *row)
{
    int64_t D = x->a->key_dim, E = x->a->value_dim, heads = x->a->heads;
    int64_t cell = row_of(x, t) * heads + x->h, at = place(x, t, 2);
    double decay = begins(x, t) ? 0 : exp(get(x->g, cell)), beta = get(x->beta, cell);
    double *k = row, *q = k + D, *dk = q + D, *dq = dk + D, *miss = dq + D, *du = miss + E;
    double scale = x->a->scale, dbeta = 0, dg = 0;
    double rk = direction(x, t, 1, k), rq = direction(x, t, 0, q);
    lm_tensor *dqkv = &c->out[0];
    for (int64_t d = 0; d < D; d++) {
        dq[d] = dk[d] = 0;
        for (int64_t e = 0; e < E; e++) {
            double dout = get(&c->in[0], cell * E + e);
            dS[d * E + e] += scale * q[d] * dout;
            dq[d] += scale * S[d * E + e] * dout;
        }
    }
    for (int64_t e = 0; e < E; e++) {
        double sum = 0;
        miss[e] = get(x->qkv, at + e);
        for (int64_t d = 0; d < D; d++) {
            miss[e] -= decay * before[d * E + e] * k[d];
            sum += dS[d * E + e] * k[d];
        }
        dbeta += sum * miss[e];
        du[e] = beta * sum;
        set(dqkv, at + e, du[e]);
    }
    for (int64_t d = 0; d < D; d++)
        for (int64_t e = 0; e < E; e++) {
            dk[d] += beta * dS[d * E + e] * miss[e] - decay * before[d * E + e] * du[e];
            double inner = dS[d * E + e] - k[d] * du[e];
            dg += inner * decay * before[d * E + e];
            dS[d * E + e] = decay * inner;
        }
    add_direction(x, dqkv, place(x, t, 0), q, dq, rq);
    add_direction(x, dqkv, place(x, t, 1), k, dk, rk);
    set(&c->out[1], cell, dg);
    set(&c->out[2], cell, dbeta);
}

static void back_head(const lm_call *c, const head *x)
{
    int64_t D = x->a->key_dim, E = x->a->value_dim, size = D * E;
    double *S = c->work, *dS = S + (LM_DELTA_CHUNK + 1) * size, *row = dS + size;
    memset(dS, 0, (size_t)size * sizeof *dS);
    for (int64_t m = x->a->chunks - 1; m >= 0; m--) {
        int64_t from = m * LM_DELTA_CHUNK, n = x->a->seq - from;
        n = n < LM_DELTA_CHUNK ? n : LM_DELTA_CHUNK;
        for (int64_t i = 0; i < size; i++)
            S[i] = get(&c->in[4], ((x->b * x->a->chunks + m) * x->a->heads + x->h) * size + i);
        for (int64_t t = 0; t < n; t++) {
            memcpy(S + (t + 1) * size, S + t * size, (size_t)size * sizeof *S);
            step(x, from + t, S + (t + 1) * size, row, row + 4 * D);
        }
        for (int64_t t = n - 1; t >= 0; t--)
            back(c, x, from + t, S + (t + 1) * size, S + t * size, dS, row);
    }
}

static void delta_dx(const lm_call *c)
{
    const lm_delta_attr *a = c->attr;
    lm_tensor *dqkv = &c->out[0];
    for (int64_t i = 0; i < lm_tensor_count(dqkv); i++)
        set(dqkv, i, 0);
    for (int64_t i = 0; i < a->batch * a->heads; i++)
        back_head(c, &(head){ a, &c->in[1], &c->in[2], &c->in[3], opt_in(c, 5), i / a->heads,
                              i % a->heads, i / a->heads * a->seq, 0 });
}

/* ---- delta_cached ---- */

static void run_cached(const lm_call *c, const state_rows *s, const head *x)
{
    int64_t D = x->a->key_dim, E = x->a->value_dim, at = (s->slot * x->a->heads + x->h) * D * E;
    double *S = c->work, *k = S + D * E, *q = k + D, *miss = q + D;
    const lm_kv_format *f = c->out[1].kv;
    char *kept = NULL;
    float *own = (float *)(void *)(miss + E); /* of codes */
    if (f)
        kept = (char *)c->out[1].data +
               (size_t)(s->slot * x->a->heads + x->h) * lm_kv_page_bytes(f, D, E);
    if (f && s->fresh && s->used)
        lm_kv_decode(f, D, E, x->h, kept, 0, D, own, E);
    for (int64_t i = 0; s->fresh && i < D * E; i++)
        S[i] = !s->used ? 0 : f ? (double)own[i] : get(&c->out[1], at + i);
    for (int64_t t = 0; t < s->fresh; t++) {
        step(x, t, S, k, miss);
        read_state(x, t, S, q, &c->out[0]);
    }
    for (int64_t i = 0; s->fresh && i < D * E && !f; i++)
        set(&c->out[1], at + i, S[i]);
    for (int64_t i = 0; s->fresh && i < D * E && f; i++)
        own[i] = (float)S[i];
    if (f && s->fresh)
        lm_kv_encode(f, D, E, x->h, own, E, 0, D, NULL, kept);
    for (int64_t t = s->fresh; t < s->n; t++)
        for (int64_t e = 0; e < E; e++)
            set(&c->out[0], (row_of(x, t) * x->a->heads + x->h) * E + e, 0);
}

static void delta_cached(const lm_call *c)
{
    const lm_delta_attr *a = c->attr;
    for (int64_t b = 0; b <= a->batch; b++) {
        state_rows s = state_rows_of(c, 3, a->seq, b);
        for (int64_t h = 0; h < a->heads; h++)
            run_cached(c, &s,
                       &(head){ a, &c->in[0], &c->in[1], &c->in[2], NULL, b, h, s.row, s.used });
    }
}

const lm_kernel lm_delta_ref_kernels[] = {
    { "delta", LM_DTYPE_NONE, LM_CPU_REF, delta, work },
    { "delta_dx", LM_DTYPE_NONE, LM_CPU_REF, delta_dx, work },
    { "delta_cached", LM_DTYPE_NONE, LM_CPU_REF, delta_cached, work },
    { NULL, LM_DTYPE_NONE, LM_CPU_REF, NULL, NULL },
};
