/* SPDX-License-Identifier: Apache-2.0 */
/* head_ref.c -- the definition of the head family (kernels/head.h). */
#include "kernels/head.h"

#include <math.h>
#include <string.h>

#include "kernels/cpu/ref.h"
#include "kernels/cpu/tables.h"
#include "numeric/code_rows.h"

static int64_t chunk_of(const lm_call *c)
{
    const lm_head_attr *a = c->attr;
    int64_t n_rows = rows_of(&c->in[0]), quarter = (n_rows + 3) / 4;
    int64_t chunk = quarter > 512 ? quarter : 512;
    if (a->chunk_rows > 0 && a->chunk_rows < chunk)
        chunk = a->chunk_rows;
    return chunk < n_rows ? chunk : n_rows;
}

/* In double: rows of logits of a chunk, their dx, and a row of w in codes with scratch for decoding. */
static size_t head_work(const lm_call *c, int threads)
{
    const lm_head_attr *a = c->attr;
    size_t n_cols = (size_t)width(&c->in[1]);
    (void)threads;
    return ((size_t)chunk_of(c) * ((size_t)a->vocab + n_cols) + (c->in[1].codes ? 2 * n_cols : 0)) *
           sizeof(double);
}

/* Row v of w: its numbers in scratch, where it is in codes, or w from *at on. */
static lm_tensor row_of(const lm_call *c, int64_t v, double *scratch, int64_t *at)
{
    const lm_tensor *w = &c->in[1];
    int64_t n_cols = width(w);
    lm_tensor row = { .data = scratch, .dtype = w->dtype };
    *at = w->codes ? 0 : v * n_cols;
    if (!w->codes)
        return *w;
    lm_code_rows_numbers(w->codes, v, 1, n_cols, w->dtype, NULL, scratch, scratch + n_cols);
    return row;
}

/* What a form of the head reads and writes beside x, w and target; NULL: it does not. */
typedef struct {
    const lm_tensor *lse_in, *scale, *entropy_in, *dentropy, *bias;
    lm_tensor *loss, *lse, *logit, *entropy, *collision, *dx, *dw, *dbias;
} head;

static void put(lm_tensor *t, int64_t n, double v)
{
    if (t)
        set(t, n, v);
}

/* Of logits, whose exp(z - top) add up to sum. */
static double entropy_of(const double *z, int64_t vocab, double top, double sum)
{
    double below = 0;
    for (int64_t v = 0; v < vocab; v++)
        below += isinf(z[v]) ? 0 : exp(z[v] - top) * (z[v] - top);
    return log(sum) - below / sum;
}

static double collision_of(const double *z, int64_t vocab, double top, double sum)
{
    double squares = 0;
    for (int64_t v = 0; v < vocab; v++)
        squares += exp(2 * (z[v] - top));
    return 2 * log(sum) - log(squares);
}

/* logits of row n -> its numbers, and the gradient of the logits in place. */
static void finish_row(const lm_call *c, const head *h, int64_t n, int64_t vocab, double *z)
{
    int64_t target = (int64_t)get(&c->in[2], n);
    double cap = ((const lm_head_attr *)c->attr)->soft_cap;
    double top = -INFINITY, sum = 0, scale = h->scale ? get(h->scale, n) : 0;
    for (int64_t v = 0; v < vocab; v++)
        top = isnan(z[v]) || z[v] > top ? z[v] : top;
    for (int64_t v = 0; v < vocab; v++)
        sum += exp(z[v] - top);
    double picked = target >= 0 && target < vocab ? z[target] : 0;
    put(h->loss, n, target < 0 ? 0 : top + log(sum) - picked);
    put(h->lse, n, target < 0 ? 0 : top + log(sum));
    put(h->logit, n, picked);
    put(h->entropy, n, target < 0 ? 0 : entropy_of(z, vocab, top, sum));
    put(h->collision, n, target < 0 ? 0 : collision_of(z, vocab, top, sum));
    for (int64_t v = 0; v < vocab; v++) {
        double p = h->lse_in ? exp(z[v] - get(h->lse_in, n)) : exp(z[v] - top) / sum;
        double t = cap > 0 ? z[v] / cap : 0, d = scale * (p - (v == target ? 1 : 0));
        if (h->dentropy && p > 0)
            d -= get(h->dentropy, n) * p * (z[v] - get(h->lse_in, n) + get(h->entropy_in, n));
        z[v] = target < 0 ? 0 : rounded(c->in[0].dtype, d * (1 - t * t));
    }
}

static void run_head(const lm_call *c, const head *h)
{
    const lm_head_attr *a = c->attr;
    const lm_tensor *x = &c->in[0];
    lm_tensor *dx = h->dx, *dw = h->dw;
    int64_t n_rows = rows_of(x), n_cols = width(x), vocab = a->vocab, chunk = chunk_of(c);
    double *z = c->work, *sum = z + chunk * vocab, *coded = sum + chunk * n_cols;
    for (int64_t i = 0; dw && overwrites(c, a->acc) && i < lm_tensor_count(dw); i++)
        set(dw, i, 0);
    for (int64_t i = 0; h->dbias && overwrites(c, a->acc) && i < lm_tensor_count(h->dbias); i++)
        set(h->dbias, i, 0);
    for (int64_t first = 0; first < n_rows; first += chunk) {
        int64_t m = n_rows - first < chunk ? n_rows - first : chunk;
        for (int64_t v = 0; v < vocab; v++) {
            int64_t at;
            lm_tensor row = row_of(c, v, coded, &at);
            for (int64_t n = 0; n < m; n++) {
                double dot = h->bias ? get(h->bias, v) : 0;
                for (int64_t i = 0; i < n_cols; i++)
                    dot += get(x, (first + n) * n_cols + i) * get(&row, at + i);
                z[n * vocab + v] = a->soft_cap > 0 ? a->soft_cap * tanh(dot / a->soft_cap) : dot;
            }
        }
        for (int64_t n = 0; n < m; n++)
            finish_row(c, h, first + n, vocab, z + n * vocab);
        memset(sum, 0, (size_t)(m * n_cols) * sizeof *sum);
        for (int64_t v = 0; dx && v < vocab; v++) {
            int64_t at;
            lm_tensor row = row_of(c, v, coded, &at);
            for (int64_t i = 0; i < m * n_cols; i++)
                sum[i] += z[i / n_cols * vocab + v] * get(&row, at + i % n_cols);
        }
        for (int64_t i = 0; dx && i < m * n_cols; i++)
            set(dx, first * n_cols + i, sum[i]);
        for (int64_t v = 0; dw && v < vocab; v++) {
            for (int64_t i = 0; i < n_cols; i++) {
                double dot = 0;
                for (int64_t n = 0; n < m; n++)
                    dot += z[n * vocab + v] * get(x, (first + n) * n_cols + i);
                set(dw, v * n_cols + i, get(dw, v * n_cols + i) + dot);
            }
        }
        for (int64_t v = 0; h->dbias && v < vocab; v++) {
            double all = 0;
            for (int64_t n = 0; n < m; n++)
                all += z[n * vocab + v];
            set(h->dbias, v, get(h->dbias, v) + all);
        }
    }
}

static void head_stats(const lm_call *c)
{
    run_head(c, &(head){ .bias = opt_in(c, 3),
                         .loss = &c->out[0],
                         .lse = opt_out(c, 1),
                         .logit = opt_out(c, 2),
                         .entropy = opt_out(c, 3),
                         .collision = opt_out(c, 4) });
}

static void head_grad(const lm_call *c)
{
    run_head(c, &(head){ .lse_in = &c->in[3],
                         .scale = &c->in[4],
                         .entropy_in = opt_in(c, 5),
                         .dentropy = opt_in(c, 6),
                         .bias = opt_in(c, 7),
                         .dx = opt_out(c, 0),
                         .dw = opt_out(c, 1),
                         .dbias = opt_out(c, 2) });
}

static void head_loss(const lm_call *c)
{
    run_head(c, &(head){ .scale = &c->in[3],
                         .bias = opt_in(c, 4),
                         .loss = &c->out[0],
                         .dx = opt_out(c, 1),
                         .dw = opt_out(c, 2),
                         .dbias = opt_out(c, 3) });
}

const lm_kernel lm_head_ref_kernels[] = {
    { "head_stats", LM_DTYPE_NONE, LM_CPU_REF, head_stats, head_work },
    { "head_grad", LM_DTYPE_NONE, LM_CPU_REF, head_grad, head_work },
    { "head_loss", LM_DTYPE_NONE, LM_CPU_REF, head_loss, head_work },
    { NULL, LM_DTYPE_NONE, LM_CPU_REF, NULL, NULL },
};
