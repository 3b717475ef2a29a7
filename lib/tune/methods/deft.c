/* SPDX-License-Identifier: Apache-2.0 */
/* deft.c -- projection out of a subspace, and a low-rank matrix into it: W' = W - P relu(P)^T W +
 * s P R; para: without the last part. P [out,r], R [r,in], s = alpha / r, 1 without alpha.  With
 * decomposition_method qr both P and relu(P) are Q of P = Q U, as LAPACK's reflections give it.
 * Source: huggingface/peft tuners/deft. */
#include <math.h>

#include "base/mem.h"
#include "tune/methods.h"

static const lm_hyper hyper[] = {
    { "r", 8, 1, 1e6, "dimensions of the subspace", LM_WHOLE },
    { "alpha", 0, -1e9, 1e9, "scale of the new part: alpha / r; 0: 1", NULL },
    { "para", 0, 0, 1, "projection alone", "false true" },
    { "decomposition_method", 0, 0, 1, "basis of the subspace", "relu qr" },
    { "init_scale", 1, 0, 1e9, "scale of a random R", NULL },
    { "deft_dropout", 0, 0, 1, "share of inputs dropped in training", NULL },
    { 0 },
};
enum { R, ALPHA, PARA, ORTHONORMAL };
enum { P, NEW };

static int64_t rank_of(const lm_tune_module *m)
{
    int64_t r = (int64_t)m->hyper[R];

    return r < m->out ? r : m->out;
}

static double scale_of(const lm_tune_module *m)
{
    return m->hyper[ALPHA] != 0 ? m->hyper[ALPHA] / (double)rank_of(m) : 1;
}

static lm_code tensors(const lm_tune_module *m, lm_tune_tensor *out, int *n, lm_err *e)
{
    int64_t r = rank_of(m);

    (void)e;
    *n = 0;
    lm_tune_tensor_add(out, n, "deft_P", m->out, r, LM_TUNE_BASE, 0);
    lm_tune_tensor_add(out, n, "deft_R", r, m->in, LM_TUNE_BASE, 0)->off = m->hyper[PARA] > 0;
    return LM_OK;
}

/* Ones in rows [from, to) of a column of `rows`. */
static lm_vid ones(lm_rule *r, int64_t rows, int64_t from, int64_t to)
{
    double *t = NULL;

    if (!lm_r_ok(r) || lm_arena_alloc(r->arena, &t, (size_t)rows, sizeof *t, r->e))
        return LM_NONE;
    for (int64_t i = 0; i < rows; i++)
        t[i] = i >= from && i < to;
    return lm_r_const(r, LM_DIMS(rows, 1), t);
}

/* x - 2 v v^T x / v^T v */
static lm_vid reflect(lm_rule *r, lm_vid x, lm_vid v)
{
    return LM_R_MAP(r, "y = x - 2 * c / q", LM_IS("x", x),
                    LM_IS("c", lm_r_matmul(r, v, false, lm_r_matmul(r, v, true, x, false), false)),
                    LM_IS("q", lm_r_sum(r, v, true, true)));
}

/* The vector whose reflection takes column i of x below row i to a multiple of a unit vector, of
 * the sign opposite to that of x[i,i]. */
static lm_vid reflector(lm_rule *r, lm_vid x, int64_t i)
{
    int64_t rows = lm_r_dim(r, x, 0);
    lm_vid corner = ones(r, rows, i, i + 1), column = lm_r_part(r, x, 0, rows, i, 1);
    lm_vid below = LM_R_MAP(r, "y = c * m", LM_IS("c", column), LM_IS("m", ones(r, rows, i, rows)));

    return LM_R_MAP(r, "y = c + where(a < 0, 0 - sqrt(q), sqrt(q)) * k", LM_IS("c", below),
                    LM_IS("a", lm_r_part(r, x, i, 1, i, 1)),
                    LM_IS("q", lm_r_sum(r, below, true, true)), LM_IS("k", corner));
}

/* Q [out,r] of p = Q U: the product of reflections on the first r unit vectors.  The last column
 * of a square p needs none. */
static lm_vid orthonormal(lm_rule *r, lm_vid p)
{
    int64_t rows = lm_r_dim(r, p, 0), n = lm_r_dim(r, p, 1), steps = n < rows ? n : rows - 1;
    lm_vid *v = NULL, q;
    double *t = NULL;

    if (!lm_r_ok(r) || lm_arena_alloc(r->arena, &t, (size_t)(rows * n), sizeof *t, r->e) ||
        lm_arena_alloc(r->arena, &v, (size_t)n, sizeof *v, r->e))
        return LM_NONE;
    for (int64_t i = 0; i < n; i++)
        t[i * n + i] = 1;
    q = lm_r_const(r, LM_DIMS(rows, n), t);
    for (int64_t i = 0; i < steps; i++) {
        v[i] = reflector(r, p, i);
        p = i + 1 < steps ? reflect(r, p, v[i]) : p;
    }
    for (int64_t i = steps - 1; i >= 0; i--)
        q = reflect(r, q, v[i]);
    return q;
}

static lm_vid weight(lm_rule *r, const lm_tune_module *m, lm_vid w, const lm_vid *p)
{
    bool qr = m->hyper[ORTHONORMAL] > 0;
    lm_vid base = qr ? orthonormal(r, p[P]) : p[P];
    lm_vid right = qr ? base : LM_R_MAP(r, "y = max(p, 0)", LM_IS("p", base));
    lm_vid old = lm_r_matmul(r, right, true, w, false);
    lm_vid change = m->hyper[PARA] > 0 ? lm_r_scale(r, -1, old)
                                       : LM_R_MAP(r, "y = s * n - o", LM_IS("n", p[NEW]),
                                                  LM_IS("o", old), LM_CONSTANT("s", scale_of(m)));

    return lm_r_add(r, w, 1, lm_r_matmul(r, base, false, change, false));
}

/* x - 2 v v^T x / v^T v of x [rows,n] */
static void reflect_numbers(double *x, const double *v, int64_t rows, int64_t n)
{
    double all = 0;

    for (int64_t k = 0; k < rows; k++)
        all += v[k] * v[k];
    for (int64_t j = 0; all > 0 && j < n; j++) {
        double dot = 0;

        for (int64_t k = 0; k < rows; k++)
            dot += v[k] * x[k * n + j];
        for (int64_t k = 0; k < rows; k++)
            x[k * n + j] -= 2 * dot / all * v[k];
    }
}

/* Q of p [rows,n] in its place, as `orthonormal` makes it. */
static lm_code make_orthonormal(double *p, int64_t rows, int64_t n, lm_err *e)
{
    int64_t steps = n < rows ? n : rows - 1;
    double *v = NULL;
    lm_code rc = lm_alloc_n(&v, (size_t)(n * rows), sizeof *v, "a basis", e);

    for (int64_t i = 0; !rc && i < steps; i++) {
        double *u = v + i * rows, all = 0;

        for (int64_t k = i; k < rows; k++) {
            u[k] = p[k * n + i];
            all += u[k] * u[k];
        }
        u[i] += u[i] < 0 ? -sqrt(all) : sqrt(all);
        reflect_numbers(p, u, rows, n);
    }
    if (!rc)
        for (int64_t i = 0; i < rows * n; i++)
            p[i] = i / n == i % n;
    for (int64_t i = steps - 1; !rc && i >= 0; i--)
        reflect_numbers(p, v + i * rows, rows, n);
    lm_free(v);
    return rc;
}

/* R starts as what the projection removes, so that W' = W. */
static lm_code start(const lm_tune_module *m, double *w, bool *changed, double *const *v,
                     lm_rng rng, lm_err *e)
{
    int64_t r = rank_of(m), n = m->out * r;
    double *right = NULL;
    bool qr = m->hyper[ORTHONORMAL] > 0;
    lm_code rc = lm_alloc_n(&right, (size_t)n, sizeof *right, "a basis", e);

    (void)changed;
    for (int64_t i = 0; !rc && i < n; i++) {
        v[P][i] = 0.02 * lm_rng_normal(rng, (uint64_t)i);
        right[i] = qr || v[P][i] > 0 ? v[P][i] : 0;
    }
    if (!rc && qr)
        rc = make_orthonormal(right, m->out, r, e);
    for (int64_t i = 0; !rc && v[NEW] && i < r * m->in; i++)
        v[NEW][i] = 0;
    for (int64_t o = 0; !rc && v[NEW] && o < m->out; o++)
        for (int64_t k = 0; k < r; k++)
            for (int64_t j = 0; right[o * r + k] != 0 && j < m->in; j++)
                v[NEW][k * m->in + j] += right[o * r + k] * w[o * m->in + j] / scale_of(m);
    lm_free(right);
    return rc;
}

const lm_tune_method lm_tune_deft = {
    .peft_type = "DEFT",
    .name = "deft",
    .about = "projection out of a subspace",
    .prefix = "deft_",
    .hyper = hyper,
    .tensors = tensors,
    .weight = weight,
    .start = start,
};
