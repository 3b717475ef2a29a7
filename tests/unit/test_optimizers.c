/* SPDX-License-Identifier: Apache-2.0 */
/* Every optimiser against a separate definition in double, 20 steps on matrices, vectors and odd
 * shapes, as tensors of a model: an embedding, q, k and v in one parameter, a bias, a norm. */
#include "update_trial.h"

#include <math.h>

#include "base/par.h"
#include "base/rng.h"

enum { STEPS = 20, MOST = 64 * 48, STATES = 6 };

static lm_par *par;
static lm_backend *backend;

/* Data of a definition: a tensor, its clipped gradient at step t (from 1), and its own states, all
 * in double and zero at the start. */
typedef struct {
    const lm_optim_use *use;
    const lm_update_tensor *tensor;
    int64_t rows, cols, n; /* a vector: rows x 1 */
    bool matrix;
    double lr, t, decay; /* decay: weight_decay, or 0 */
    double p[MOST], g[MOST], s[STATES][MOST];
} moment;

static double hyper(const moment *m, const char *name)
{
    return m->use->hyper[lm_optim_hyper(m->use->optim, name)];
}

/* ---- elementwise ---- */

static void adam(moment *m)
{
    double b1 = hyper(m, "beta1"), b2 = hyper(m, "beta2"), eps = hyper(m, "eps");
    bool ams = !strcmp(m->use->optim->name, "amsgrad");
    for (int64_t i = 0; i < m->n; i++) {
        double g = m->g[i] + m->decay * m->p[i];
        m->s[0][i] = b1 * m->s[0][i] + (1 - b1) * g;
        m->s[1][i] = b2 * m->s[1][i] + (1 - b2) * g * g;
        m->s[2][i] = fmax(m->s[2][i], m->s[1][i]);
        double v = ams ? m->s[2][i] : m->s[1][i];
        m->p[i] -=
            m->lr * (m->s[0][i] / (1 - pow(b1, m->t))) / (sqrt(v / (1 - pow(b2, m->t))) + eps);
    }
}

/* With cautious decay; test_train_update has the plain one. */
static void adamw(moment *m)
{
    double b1 = hyper(m, "beta1"), b2 = hyper(m, "beta2");
    for (int64_t i = 0; i < m->n; i++) {
        m->s[0][i] = b1 * m->s[0][i] + (1 - b1) * m->g[i];
        m->s[1][i] = b2 * m->s[1][i] + (1 - b2) * m->g[i] * m->g[i];
        double decay = m->s[0][i] * m->p[i] >= 0 ? m->decay : 0;
        m->p[i] -= m->lr * decay * m->p[i] +
                   m->lr * (m->s[0][i] / (1 - pow(b1, m->t))) /
                       (sqrt(m->s[1][i] / (1 - pow(b2, m->t))) + hyper(m, "eps"));
    }
}

static void adagrad(moment *m)
{
    for (int64_t i = 0; i < m->n; i++) {
        double g = m->g[i] + m->decay * m->p[i];
        m->s[0][i] += g * g;
        m->p[i] -= m->lr / (1 + (m->t - 1) * hyper(m, "lr_decay")) * g /
                   (sqrt(m->s[0][i]) + hyper(m, "eps"));
    }
}

static void rmsprop(moment *m)
{
    double a = hyper(m, "alpha"), mu = hyper(m, "momentum");
    for (int64_t i = 0; i < m->n; i++) {
        double g = m->g[i] + m->decay * m->p[i];
        m->s[0][i] = a * m->s[0][i] + (1 - a) * g * g;
        m->s[1][i] = a * m->s[1][i] + (1 - a) * g;
        double v = m->s[0][i] - (hyper(m, "centered") > 0 ? m->s[1][i] * m->s[1][i] : 0);
        double d = g / (sqrt(fmax(v, 0)) + hyper(m, "eps"));
        m->s[2][i] = mu * m->s[2][i] + d;
        m->p[i] -= m->lr * m->s[2][i];
    }
}

static void lion(moment *m)
{
    double b1 = hyper(m, "beta1"), b2 = hyper(m, "beta2");
    for (int64_t i = 0; i < m->n; i++) {
        double c = b1 * m->s[0][i] + (1 - b1) * m->g[i];
        bool decays = hyper(m, "cautious") == 0 || c * m->p[i] >= 0;
        m->p[i] -= m->lr * (decays ? m->decay : 0) * m->p[i] + m->lr * ((c > 0) - (c < 0));
        m->s[0][i] = b2 * m->s[0][i] + (1 - b2) * m->g[i];
    }
}

static void momentum(moment *m)
{
    double mu = hyper(m, "momentum");
    for (int64_t i = 0; i < m->n; i++) {
        double d = m->g[i] + m->decay * m->p[i];
        m->s[0][i] = m->t > 1 ? mu * m->s[0][i] + d : d;
        bool ahead = !strcmp(m->use->optim->name, "nesterov");
        m->p[i] -= m->lr * (ahead ? d + mu * m->s[0][i] : m->s[0][i]);
    }
}

/* y in p; z, v; the largest rate and the sum of weights. */
static void schedule_free(moment *m)
{
    double b1 = hyper(m, "beta1"), b2 = hyper(m, "beta2"), warm = hyper(m, "warmup_steps");
    double rate = m->lr * (warm > 0 ? fmin(1, m->t / warm) : 1);
    if (m->t == 1)
        memcpy(m->s[0], m->p, sizeof m->p);
    m->s[2][0] = fmax(m->s[2][0], rate);
    double w = pow(m->t, hyper(m, "r")) * pow(m->s[2][0], hyper(m, "weight_lr_power"));
    double c = w / (m->s[3][0] += w);
    for (int64_t i = 0; i < m->n; i++) {
        double *y = &m->p[i], *z = &m->s[0][i], *v = &m->s[1][i];
        *v = b2 * *v + (1 - b2) * m->g[i] * m->g[i];
        double d = m->g[i] / (sqrt(*v / (1 - pow(b2, m->t))) + hyper(m, "eps")) + m->decay * *y;
        *y = *y + c * (*z - *y) + rate * (b1 * (1 - c) - 1) * d;
        *z -= rate * d;
    }
}

static void schedule_free_shown(moment *m)
{
    for (int64_t i = 0; i < m->n; i++)
        m->p[i] += (1 - 1 / hyper(m, "beta1")) * (m->s[0][i] - m->p[i]);
}

/* Lion with an average of the parameters, in s[5], which starts with those before the first
 * step. */
static void lion_averaged(moment *m)
{
    double d = fmin(m->use->ema, (1 + m->t) / (10 + m->t));
    if (m->t == 1)
        memcpy(m->s[5], m->p, sizeof m->p);
    lion(m);
    for (int64_t i = 0; i < m->n; i++)
        m->s[5][i] = d * m->s[5][i] + (1 - d) * m->p[i];
}

static void average_shown(moment *m)
{
    memcpy(m->p, m->s[5], sizeof m->p);
}

/* ---- one or two numbers a row, a column or a tensor ---- */

static double root_mean_square(const double *x, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += x[i] * x[i];
    return sqrt(sum / (double)n);
}

static void lamb(moment *m)
{
    static double way[MOST];
    double b1 = hyper(m, "beta1"), b2 = hyper(m, "beta2"), size = 0, own = 0, trust = 1;
    bool corrects = hyper(m, "bias_correction") > 0;
    for (int64_t i = 0; i < m->n; i++) {
        m->s[0][i] = b1 * m->s[0][i] + (1 - b1) * m->g[i];
        m->s[1][i] = b2 * m->s[1][i] + (1 - b2) * m->g[i] * m->g[i];
        double c1 = corrects ? 1 - pow(b1, m->t) : 1, c2 = corrects ? 1 - pow(b2, m->t) : 1;
        way[i] = m->s[0][i] / c1 / (sqrt(m->s[1][i] / c2) + hyper(m, "eps")) + m->decay * m->p[i];
        size += way[i] * way[i];
        own += m->p[i] * m->p[i];
    }
    if (m->matrix && size > 0 && own > 0)
        trust = fmax(0.01, fmin(10, sqrt(own) / sqrt(size)));
    for (int64_t i = 0; i < m->n; i++)
        m->p[i] -= m->lr * trust * way[i];
}

/* s[row], s[column]: averages of x over columns and over rows; d = from / sqrt(their product). */
static void factored(moment *m, double beta, double *row, double *column, const double *x,
                     const double *from, double *d)
{
    double mean = 0;
    for (int64_t i = 0; i < m->rows; i++) {
        double sum = 0;
        for (int64_t j = 0; j < m->cols; j++)
            sum += x[i * m->cols + j] / (double)m->cols;
        row[i] = beta * row[i] + (1 - beta) * sum;
        mean += row[i] / (double)m->rows;
    }
    for (int64_t j = 0; j < m->cols; j++) {
        double sum = 0;
        for (int64_t i = 0; i < m->rows; i++)
            sum += x[i * m->cols + j] / (double)m->rows;
        column[j] = beta * column[j] + (1 - beta) * sum;
    }
    for (int64_t i = 0; i < m->n; i++)
        d[i] = from[i] / sqrt(row[i / m->cols] / mean) / sqrt(column[i % m->cols]);
}

static void adafactor(moment *m)
{
    static double square[MOST], d[MOST];
    double b = 1 - pow(m->t, hyper(m, "decay_rate")), rate = m->lr, b1 = hyper(m, "beta1");
    if (hyper(m, "relative_step") > 0)
        rate *= fmin(hyper(m, "warmup_init") > 0 ? 1e-6 * m->t : 1e-2, 1 / sqrt(m->t));
    if (hyper(m, "scale_parameter") > 0)
        rate *= fmax(hyper(m, "eps2"), root_mean_square(m->p, m->n));
    for (int64_t i = 0; i < m->n; i++)
        square[i] = m->g[i] * m->g[i] + hyper(m, "eps1");
    if (m->matrix)
        factored(m, b, m->s[0], m->s[1], square, m->g, d);
    for (int64_t i = 0; i < m->n && !m->matrix; i++) {
        m->s[2][i] = b * m->s[2][i] + (1 - b) * square[i];
        d[i] = m->g[i] / sqrt(m->s[2][i]);
    }
    double most = fmax(1, root_mean_square(d, m->n) / hyper(m, "clip_threshold"));
    for (int64_t i = 0; i < m->n; i++) {
        double way = rate * d[i] / most;
        m->s[3][i] = b1 * m->s[3][i] + (1 - b1) * way;
        m->p[i] -= m->decay * rate * m->p[i] + (b1 > 0 ? m->s[3][i] : way);
    }
}

static void sm3(moment *m)
{
    static double v[MOST];
    double mu = hyper(m, "momentum");
    for (int64_t i = 0; i < m->n; i++) {
        double g = m->g[i] + m->decay * m->p[i], *row = &m->s[0][i / m->cols];
        v[i] = g * g + (m->matrix ? fmin(*row, m->s[1][i % m->cols]) : m->s[0][i]);
        m->s[2][i] = mu * m->s[2][i] + (1 - mu) * g / sqrt(v[i] + 1e-30);
        m->p[i] -= m->lr * m->s[2][i];
    }
    memset(m->s[0], 0, sizeof m->s[0]);
    memset(m->s[1], 0, sizeof m->s[1]);
    for (int64_t i = 0; i < m->n; i++) {
        m->s[0][i / m->cols] = fmax(m->s[0][i / m->cols], v[i]);
        m->s[1][i % m->cols] = fmax(m->s[1][i % m->cols], v[i]);
    }
}

static void came(moment *m)
{
    static double square[MOST], d[MOST], way[MOST];
    double b1 = hyper(m, "beta1"), b2 = hyper(m, "beta2");
    for (int64_t i = 0; i < m->n; i++)
        square[i] = m->g[i] * m->g[i] + hyper(m, "eps1");
    if (m->matrix)
        factored(m, b2, m->s[0], m->s[1], square, m->g, d);
    for (int64_t i = 0; i < m->n && !m->matrix; i++) {
        m->s[0][i] = b2 * m->s[0][i] + (1 - b2) * square[i];
        d[i] = m->g[i] / sqrt(m->s[0][i]);
    }
    double most = fmax(1, root_mean_square(d, m->n) / hyper(m, "clip_threshold"));
    for (int64_t i = 0; i < m->n; i++) {
        m->s[2][i] = b1 * m->s[2][i] + (1 - b1) * d[i] / most;
        square[i] = pow(d[i] / most - m->s[2][i], 2) + hyper(m, "eps2");
        way[i] = m->s[2][i];
    }
    if (m->matrix)
        factored(m, hyper(m, "beta3"), m->s[3], m->s[4], square, m->s[2], way);
    for (int64_t i = 0; i < m->n; i++)
        m->p[i] -= m->lr * (m->decay * m->p[i] + way[i]);
}

static void adam_mini(moment *m)
{
    double b1 = hyper(m, "beta1"), b2 = hyper(m, "beta2");
    lm_part part = m->tensor->part;
    int64_t block = m->cols; /* elements */
    if (!m->matrix)
        block = m->tensor->bias ? 1 : m->n;
    else if (part == LM_PART_Q || part == LM_PART_K || part == LM_PART_QKV)
        block = m->tensor->head_dim * m->cols;
    for (int64_t b = 0; b < m->n / block; b++) {
        double mean = 0;
        for (int64_t i = b * block; i < (b + 1) * block; i++)
            mean += m->g[i] * m->g[i] / (double)block;
        m->s[1][b] = b2 * m->s[1][b] + (1 - b2) * mean;
        for (int64_t i = b * block; i < (b + 1) * block; i++) {
            m->s[0][i] = b1 * m->s[0][i] + (1 - b1) * m->g[i];
            m->p[i] -= m->lr * m->decay * m->p[i] +
                       m->lr * (m->s[0][i] / (1 - pow(b1, m->t))) /
                           (sqrt(m->s[1][b] / (1 - pow(b2, m->t))) + hyper(m, "eps"));
        }
    }
}

/* ---- whole matrices ---- */

/* The AdamW of rules for hidden matrices, for other tensors. */
static void adamw_of_others(moment *m, double rate)
{
    double b1 = hyper(m, "adam_beta1"), b2 = hyper(m, "adam_beta2");
    for (int64_t i = 0; i < m->n; i++) {
        m->s[0][i] = b1 * m->s[0][i] + (1 - b1) * m->g[i];
        m->s[1][i] = b2 * m->s[1][i] + (1 - b2) * m->g[i] * m->g[i];
        m->p[i] -= rate * m->lr * m->decay * m->p[i];
        m->p[i] -= rate * m->lr * (m->s[0][i] / (1 - pow(b1, m->t))) /
                   (sqrt(m->s[1][i] / (1 - pow(b2, m->t))) + hyper(m, "adam_eps"));
    }
}

static bool is_hidden(const moment *m)
{
    return m->matrix && m->tensor->layer >= 0;
}

/* z [r,c] = x y, of [r,k] and [k,c]. */
static void times(const double *x, const double *y, int64_t r, int64_t k, int64_t c, double *z)
{
    for (int64_t i = 0; i < r; i++)
        for (int64_t j = 0; j < c; j++) {
            double sum = 0;
            for (int64_t q = 0; q < k; q++)
                sum += x[i * k + q] * y[q * c + j];
            z[i * c + j] = sum;
        }
}

static void transpose(const double *x, int64_t r, int64_t c, double *y)
{
    for (int64_t i = 0; i < r; i++)
        for (int64_t j = 0; j < c; j++)
            y[j * r + i] = x[i * c + j];
}

static double norm_of(const double *x, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += x[i] * x[i];
    return sqrt(sum);
}

/* x becomes orthonormal, as rows of a wide matrix. */
static void orthogonal(double *x, int64_t r, int64_t c, int steps, bool polar)
{
    static const double express[5][3] = {
        { 8.156554524902461, -22.48329292557795, 15.878769915207462 },
        { 4.0429299351667245, -2.808917465908704, 0.5000178451051299 },
        { 3.8916678022926563, -2.772484153217685, 0.5060648178503389 },
        { 3.285753657755658, -2.3681294933425394, 0.46449024233003117 },
        { 2.3465413258596377, -1.7097828382687081, 0.42323551169305323 }
    };
    static double a[MOST], square[MOST], turned[MOST], next[MOST];
    double norm = norm_of(x, r * c) * (polar ? 1.02 : 1) + 1e-7;
    if (r > c) {
        transpose(x, r, c, next);
        orthogonal(next, c, r, steps, polar);
        transpose(next, c, r, x);
        return;
    }
    for (int64_t i = 0; i < r * c; i++)
        x[i] /= norm;
    for (int k = 0; k < steps; k++) {
        const double *q = polar ? express[k < 4 ? k : 4] : (double[]){ 3.4445, -4.7750, 2.0315 };
        static double poly[MOST], px[MOST];
        transpose(x, r, c, turned);
        times(x, turned, r, c, r, a);
        times(a, a, r, r, r, square);
        for (int64_t i = 0; i < r * r; i++)
            poly[i] = q[1] * a[i] + q[2] * square[i];
        times(poly, x, r, r, c, px);
        for (int64_t i = 0; i < r * c; i++)
            x[i] = q[0] * x[i] + px[i];
    }
}

static void muon_piece(moment *m, int64_t at, int64_t rows, int64_t cols)
{
    static double x[MOST];
    double mu = hyper(m, "momentum"), r = (double)rows, c = (double)cols;
    bool nor = !strcmp(m->use->optim->name, "normuon");
    double size = sqrt(fmax(1, r / c));
    if (!nor && hyper(m, "scaling") > 0)
        size = 0.2 * sqrt(fmax(r, c));
    for (int64_t i = 0; i < rows * cols; i++) {
        double g = m->g[at + i], *buf = &m->s[0][at + i];
        *buf = mu * *buf + (1 - mu) * g;
        x[i] = nor || hyper(m, "nesterov") > 0 ? (1 - mu) * g + mu * *buf : *buf;
    }
    orthogonal(x, rows, cols, (int)hyper(m, "ns_steps"), hyper(m, "ns") > 0);
    if (nor) {
        double before = norm_of(x, rows * cols);
        bool tall = rows >= cols;
        for (int64_t k = 0; k < (tall ? rows : cols); k++) {
            double mean = 0, *v = &m->s[1][(tall ? at / cols : at / rows / cols * cols) + k];
            for (int64_t i = 0; i < (tall ? cols : rows); i++)
                mean +=
                    pow(x[tall ? k * cols + i : i * cols + k], 2) / (double)(tall ? cols : rows);
            *v = hyper(m, "beta2") * *v + (1 - hyper(m, "beta2")) * mean;
            for (int64_t i = 0; i < (tall ? cols : rows); i++)
                x[tall ? k * cols + i : i * cols + k] /= sqrt(*v);
        }
        size *= before / norm_of(x, rows * cols);
    }
    for (int64_t i = 0; i < rows * cols; i++) {
        double *p = &m->p[at + i];
        bool decays = hyper(m, "cautious") == 0 || x[i] * *p >= 0;
        *p -= m->lr * (decays ? m->decay : 0) * *p + m->lr * size * x[i];
    }
}

static void muon(moment *m)
{
    bool moonlight = !strcmp(m->use->optim->name, "muon") && hyper(m, "scaling") > 0;
    int pieces = m->tensor->part == LM_PART_QKV ? 3 : 1;
    if (!is_hidden(m)) {
        adamw_of_others(m, moonlight ? 1 : 0.015);
        return;
    }
    for (int k = 0; k < pieces; k++)
        muon_piece(m, k * m->n / pieces, m->rows / pieces, m->cols);
}

/* Eigenvectors of a symmetric matrix by rotations (Jacobi), as columns, the largest eigenvalue
 * first, the largest entry of each positive.  x is lost. */
static void eigenvectors(double *x, int64_t n, double *q)
{
    static double sorted[MOST];
    int64_t order[64];
    for (int64_t i = 0; i < n * n; i++)
        q[i] = i % (n + 1) == 0;
    for (int round = 0; round < 60; round++)
        for (int64_t a = 0; a < n; a++)
            for (int64_t b = a + 1; b < n; b++) {
                if (fabs(x[a * n + b]) < 1e-300)
                    continue;
                double theta = (x[b * n + b] - x[a * n + a]) / (2 * x[a * n + b]);
                double t = (theta < 0 ? -1 : 1) / (fabs(theta) + sqrt(theta * theta + 1));
                double c = 1 / sqrt(t * t + 1), s = t * c;
                for (int64_t k = 0; k < n; k++) {
                    double u = x[k * n + a], v = x[k * n + b];
                    x[k * n + a] = c * u - s * v;
                    x[k * n + b] = s * u + c * v;
                }
                for (int64_t k = 0; k < n; k++) {
                    double u = x[a * n + k], v = x[b * n + k];
                    x[a * n + k] = c * u - s * v;
                    x[b * n + k] = s * u + c * v;
                    u = q[k * n + a], v = q[k * n + b];
                    q[k * n + a] = c * u - s * v;
                    q[k * n + b] = s * u + c * v;
                }
            }
    for (int64_t k = 0; k < n; k++) {
        int64_t j = k;
        for (; j > 0 && x[order[j - 1] * (n + 1)] < x[k * (n + 1)]; j--)
            order[j] = order[j - 1];
        order[j] = k;
    }
    for (int64_t j = 0; j < n; j++) {
        double top = 0;
        for (int64_t i = 0; i < n; i++)
            top = fabs(q[i * n + order[j]]) > fabs(top) ? q[i * n + order[j]] : top;
        for (int64_t i = 0; i < n; i++)
            sorted[i * n + j] = q[i * n + order[j]] * (top < 0 ? -1 : 1);
    }
    memcpy(q, sorted, (size_t)(n * n) * sizeof *q);
}

/* The columns of x [n,k] become orthonormal (Gram and Schmidt, twice for their rounding). */
static void orthonormalise(double *x, int64_t n, int64_t k)
{
    for (int64_t j = 0; j < k; j++) {
        for (int64_t b = 0; b < 2 * j; b++) {
            double dot = 0;
            for (int64_t i = 0; i < n; i++)
                dot += x[i * k + j] * x[i * k + b % j];
            for (int64_t i = 0; i < n; i++)
                x[i * k + j] -= dot * x[i * k + b % j];
        }
        double norm = 0;
        for (int64_t i = 0; i < n; i++)
            norm += x[i * k + j] * x[i * k + j];
        for (int64_t i = 0; i < n; i++)
            x[i * k + j] /= sqrt(norm);
    }
}

/* One side of SOAP; v [r,c] has its columns (or rows) put in the new order. */
static void next_basis(const double *gg, double *q, int64_t n, double *v, int64_t r, int64_t c,
                       bool rows)
{
    static double xq[MOST], next[MOST], old[MOST];
    double value[64];
    int64_t order[64];
    times(gg, q, n, n, n, xq);
    for (int64_t k = 0; k < n; k++) {
        value[k] = 0;
        for (int64_t i = 0; i < n; i++)
            value[k] += q[i * n + k] * xq[i * n + k];
        int64_t j = k;
        for (; j > 0 && value[order[j - 1]] < value[k]; j--)
            order[j] = order[j - 1];
        order[j] = k;
    }
    for (int64_t i = 0; i < n * n; i++)
        next[i] = xq[i / n * n + order[i % n]];
    orthonormalise(next, n, n);
    memcpy(q, next, (size_t)(n * n) * sizeof *q);
    memcpy(old, v, (size_t)(r * c) * sizeof *v);
    for (int64_t i = 0; i < r * c; i++)
        v[i] = rows ? old[order[i / c] * c + i % c] : old[i / c * c + order[i % c]];
}

/* y = Ql' x Qr, or (back) Ql x Qr'; a side without basis is not rotated. */
static void rotate(const double *x, const double *ql, const double *qr, int64_t r, int64_t c,
                   bool back, double *y)
{
    static double turned[MOST], half[MOST];
    memcpy(half, x, (size_t)(r * c) * sizeof *x);
    if (ql && !back)
        transpose(ql, r, r, turned);
    if (ql)
        times(back ? ql : turned, x, r, r, c, half);
    if (qr && back)
        transpose(qr, c, c, turned);
    if (qr)
        times(half, back ? turned : qr, r, c, c, y);
    else
        memcpy(y, half, (size_t)(r * c) * sizeof *x);
}

/* States of piece k: m, v in s[0], s[1]; L, Ql, R, Qr in s[2] to s[5]. */
static void soap_piece(moment *m, int64_t k, int64_t r, int64_t c)
{
    static double of_g[MOST], of_m[MOST], way[MOST], turned[MOST], square[MOST];
    double b1 = hyper(m, "beta1"), b2 = hyper(m, "beta2"), sb = hyper(m, "shampoo_beta");
    const double *g = m->g + k * r * c;
    double *p = m->p + k * r * c, *avg = m->s[0] + k * r * c, *v = m->s[1] + k * r * c;
    double *gg[2] = { m->s[2] + k * r * r, m->s[4] + k * c * c };
    double *q[2] = { m->s[3] + k * r * r, m->s[5] + k * c * c };
    bool has[2] = { r <= hyper(m, "max_precond_dim"), c <= hyper(m, "max_precond_dim") };
    bool is_muon = !strcmp(m->use->optim->name, "soap-muon");
    int64_t t = (int64_t)m->t - 1;
    if (t > 0) {
        for (int64_t i = 0; i < r * c; i++)
            avg[i] = b1 * avg[i] + (1 - b1) * g[i];
        rotate(g, has[0] ? q[0] : NULL, has[1] ? q[1] : NULL, r, c, false, of_g);
        rotate(avg, has[0] ? q[0] : NULL, has[1] ? q[1] : NULL, r, c, false, of_m);
        for (int64_t i = 0; i < r * c; i++) {
            v[i] = b2 * v[i] + (1 - b2) * of_g[i] * of_g[i];
            of_m[i] /= sqrt(v[i]) + hyper(m, "eps");
        }
        rotate(of_m, has[0] ? q[0] : NULL, has[1] ? q[1] : NULL, r, c, true, way);
        double size = sqrt(1 - pow(b2, (double)t)) / (1 - pow(b1, (double)t));
        if (is_muon) {
            orthogonal(way, r, c, (int)hyper(m, "ns_steps"), hyper(m, "ns") > 0);
            size = sqrt(fmax(1, (double)r / (double)c));
        }
        for (int64_t i = 0; i < r * c; i++) {
            double before = p[i];
            p[i] -= m->lr * size * way[i];
            p[i] -= m->lr * m->decay * (is_muon ? before : p[i]);
        }
    }
    transpose(g, r, c, turned);
    for (int side = 0; side < 2; side++) {
        int64_t n = side ? c : r;
        if (!has[side])
            continue;
        times(side ? turned : g, side ? g : turned, n, side ? r : c, n, square);
        for (int64_t i = 0; i < n * n; i++)
            gg[side][i] = sb * gg[side][i] + (1 - sb) * square[i];
        memcpy(square, gg[side], (size_t)(n * n) * sizeof *square);
        if (t == 0)
            eigenvectors(square, n, q[side]);
        else if (t % (int64_t)hyper(m, "precondition_frequency") == 0)
            next_basis(gg[side], q[side], n, v, r, c, side == 0);
    }
}

static void soap(moment *m)
{
    int pieces = m->tensor->part == LM_PART_QKV ? 3 : 1;
    if (!is_hidden(m)) {
        adamw_of_others(m, !strcmp(m->use->optim->name, "soap") ? 1 : 0.015);
        return;
    }
    for (int k = 0; k < pieces; k++)
        soap_piece(m, k, m->rows / pieces, m->cols);
}

/* ---- states in codes ---- */

/* The dynamic map of 8 bits; *n entries. */
static void dynamic_map(bool with_sign, double *value)
{
    int n = 0;
    for (int d = 0; d < 7; d++)
        for (int k = 0, cells = with_sign ? 1 << d : 2 << d; k < cells; k++) {
            double v = pow(10, d - 6) * (0.1 + 0.9 * (k + 0.5) / cells);
            value[n++] = v;
            if (with_sign)
                value[n++] = d ? -v : -1;
        }
    value[n++] = 0;
    value[n++] = 1;
    assert_int_equal(n, 256);
}

/* x after encoding and decoding: blocks of 256, scaled by their largest magnitude; in blocks
 * without negative numbers, positive numbers stay positive. */
static void dynamic8(double *x, int64_t n)
{
    double map[256];
    for (int64_t b = 0; b < n; b += 256) {
        int64_t end = b + 256 < n ? b + 256 : n;
        double most = 0, least = 0;
        for (int64_t i = b; i < end; i++) {
            most = fmax(most, fabs(x[i]));
            least = fmin(least, x[i]);
        }
        dynamic_map(least < 0, map);
        for (int64_t i = b; i < end && most > 0; i++) {
            double best = 2, v = x[i] / most;
            for (int k = 0; k < 256; k++)
                if (fabs(map[k] - v) < fabs(best - v) && !(least == 0 && v > 0 && map[k] == 0))
                    best = map[k];
            x[i] = best * most;
        }
    }
}

/* The direction of Adam for the n numbers of g, with moments in s[0], s[1]. */
static void adam_way(moment *m, const double *g, int64_t n, bool eps_outside, double *way)
{
    double b1 = hyper(m, "beta1"), b2 = hyper(m, "beta2"), eps = hyper(m, "eps");
    double bc1 = 1 - pow(b1, m->t), bc2 = 1 - pow(b2, m->t);
    for (int64_t i = 0; i < n; i++) {
        m->s[0][i] = b1 * m->s[0][i] + (1 - b1) * g[i];
        m->s[1][i] = b2 * m->s[1][i] + (1 - b2) * g[i] * g[i];
        double root = sqrt(m->s[1][i]);
        way[i] = eps_outside ? sqrt(bc2) / bc1 * m->s[0][i] / (root + eps)
                             : m->s[0][i] / bc1 / (root / sqrt(bc2) + eps);
    }
}

static void adamw8bit(moment *m)
{
    static double way[MOST];
    adam_way(m, m->g, m->n, false, way);
    for (int64_t i = 0; i < m->n; i++)
        m->p[i] -= m->lr * (m->decay * m->p[i] + way[i]);
    if (m->tensor->part != LM_PART_EMBED && m->n >= hyper(m, "min_8bit_size")) {
        dynamic8(m->s[0], m->n);
        dynamic8(m->s[1], m->n);
    }
}

/* ---- few singular vectors ---- */

/* The first k left singular vectors of x [r,c] as columns of q [r,k]. */
static void left_vectors(const double *x, int64_t r, int64_t c, int64_t k, double *q)
{
    static double turned[MOST], square[MOST], all[MOST];
    transpose(x, r, c, turned);
    times(x, turned, r, c, r, square);
    eigenvectors(square, r, all);
    for (int64_t i = 0; i < r * k; i++)
        q[i] = all[i / k * r + i % k];
}

static bool has_low_rank(const moment *m)
{
    return is_hidden(m) && fmin((double)m->rows, (double)m->cols) > hyper(m, "rank");
}

/* q [shorter side, rank] of the gradient becomes the basis in s[2]; it is used as columns of the
 * shorter side. */
static void galore(moment *m)
{
    static double way[MOST], low[MOST], g[MOST], q[MOST], turned[MOST];
    int64_t rank = (int64_t)hyper(m, "rank"), t = (int64_t)m->t - 1;
    bool right = m->rows >= m->cols;
    int64_t r = right ? m->cols : m->rows, c = right ? m->rows : m->cols;
    if (!has_low_rank(m)) {
        adam_way(m, m->g, m->n, true, way);
    } else {
        int64_t gap = (int64_t)hyper(m, "update_proj_gap");
        int64_t offset = hyper(m, "stagger") > 0 ? m->tensor->index % gap : 0;
        if (right)
            transpose(m->g, m->rows, m->cols, g);
        else
            memcpy(g, m->g, sizeof g);
        if (t == 0 || t % gap == offset) {
            left_vectors(g, r, c, rank, q);
            if (right) /* states have it as rows */
                transpose(q, r, rank, m->s[2]);
            else
                memcpy(m->s[2], q, sizeof q);
        }
        if (right)
            memcpy(q, m->s[2], sizeof q), transpose(q, rank, r, turned),
                memcpy(q, turned, sizeof q);
        else
            memcpy(q, m->s[2], sizeof q);
        transpose(q, r, rank, turned);
        times(turned, g, rank, r, c, low);
        adam_way(m, low, rank * c, true, low);
        times(q, low, r, rank, c, g);
        if (right)
            transpose(g, r, c, way);
        else
            memcpy(way, g, sizeof way);
    }
    double size = has_low_rank(m) ? hyper(m, "galore_scale") : 1;
    for (int64_t i = 0; i < m->n; i++) {
        m->p[i] -= m->lr * size * way[i];
        m->p[i] -= m->lr * m->decay * m->p[i];
    }
}

/* x after encoding to affine codes and decoding: blocks of 256 with a scale and a zero point.
 * stream: random stream of the step for stochastic rounding; -1: rounding to nearest. */
static void affine(double *x, int64_t n, double most, int64_t stream, int64_t step)
{
    lm_rng r = lm_rng_make(0, "codes", (uint64_t)stream);
    uint64_t first = lm_rng_first(&r, (uint64_t)step, (uint64_t)((n + 255) / 256 * 256));
    for (int64_t b = 0; b < n; b += 256) {
        int64_t end = b + 256 < n ? b + 256 : n;
        double least = INFINITY, largest = -INFINITY;
        for (int64_t i = b; i < end; i++) {
            least = fmin(least, x[i]);
            largest = fmax(largest, x[i]);
        }
        double scale = fmax(largest - least, 1e-5) / most;
        double zero = fmin(fmax(-nearbyint(least / scale), 0), most);
        for (int64_t i = b; i < end; i++) {
            double v = x[i] / scale, u = (lm_rng_u32(r, first + (uint64_t)i) >> 8) * 0x1p-24;
            v = stream < 0 ? nearbyint(v) : floor(v) + (u < v - floor(v));
            x[i] = scale * (fmin(fmax(v + zero, 0), most) - zero);
        }
    }
}

/* s[2]: the first vector, and from 1024 on the basis in memory order; s[3]: cosines; s[4]: the gap;
 * s[5]: the number of bases so far. */
static void next_q(moment *m, const double *g, int64_t r, int64_t c, int64_t rank, bool right)
{
    static double q[MOST], first[MOST];
    double *stored = m->s[2] + 1024, *past = m->s[2], *queue = m->s[3], *count = m->s[5];
    int64_t size = (int64_t)hyper(m, "queue_size");
    double ab = 0, sum = 0;
    left_vectors(g, r, c, rank, q);
    for (int64_t i = 0; i < r; i++) {
        first[i] = q[i * rank];
        ab += first[i] * past[i];
    }
    if (*count > 0) {
        memmove(queue, queue + 1, (size_t)(size - 1) * sizeof *queue);
        queue[size - 1] = ab / (norm_of(first, r) * norm_of(past, r));
        for (int64_t i = 0; i < size; i++)
            sum += queue[i];
        if (*count >= (double)size && sum / (double)size >= hyper(m, "cos_threshold"))
            m->s[4][0] *= hyper(m, "gamma_proj");
    }
    *count += 1;
    memcpy(past, first, (size_t)r * sizeof *past);
    if (right)
        transpose(q, r, rank, stored);
    else
        memcpy(stored, q, (size_t)(r * rank) * sizeof *q);
    affine(stored, r * rank, hyper(m, "proj_bits") == 4 ? 15 : 255, -1, 0);
}

static void q_galore(moment *m)
{
    static double way[MOST], low[MOST], g[MOST], q[MOST], turned[MOST];
    int64_t rank = (int64_t)hyper(m, "rank"), t = (int64_t)m->t - 1;
    bool right = m->rows >= m->cols;
    int64_t r = right ? m->cols : m->rows, c = right ? m->rows : m->cols, n = m->n;
    memcpy(low, m->g, sizeof low);
    if (has_low_rank(m)) {
        n = rank * c;
        memcpy(g, m->g, sizeof g);
        if (right)
            transpose(m->g, m->rows, m->cols, g);
        if (t == 0)
            m->s[4][0] = hyper(m, "update_proj_gap");
        if (t % (int64_t)m->s[4][0] == 0)
            next_q(m, g, r, c, rank, right);
        memcpy(q, m->s[2] + 1024, (size_t)(r * rank) * sizeof *q);
        if (right)
            transpose(m->s[2] + 1024, rank, r, q);
        transpose(q, r, rank, turned);
        times(turned, g, rank, r, c, low);
        if (right) { /* as the states lie */
            transpose(low, rank, c, turned);
            memcpy(low, turned, sizeof low);
        }
    }
    adam_way(m, low, n, false, way);
    if (m->tensor->part != LM_PART_EMBED && (double)n >= hyper(m, "min_8bit_size")) {
        dynamic8(m->s[0], n);
        dynamic8(m->s[1], n);
    }
    if (has_low_rank(m)) {
        memcpy(low, way, sizeof low);
        if (right)
            transpose(way, c, rank, low);
        times(q, low, r, rank, c, way);
        if (right) {
            transpose(way, r, c, g);
            memcpy(way, g, sizeof way);
        }
    }
    for (int64_t i = 0; i < m->n; i++) {
        double size = has_low_rank(m) ? hyper(m, "galore_scale") : 1;
        double p = m->p[i] - m->lr * size * way[i];
        m->p[i] = has_low_rank(m) ? p - m->lr * m->decay * p : p - m->lr * m->decay * m->p[i];
    }
    if (is_hidden(m) && hyper(m, "weight_quant") > 0)
        affine(m->p, m->n, 255, hyper(m, "stochastic_round") > 0 ? m->tensor->index : -1, t);
}

/* m, v in s[0], s[1] as [rank,c]; the basis in s[2] as [r,rank]; the error in s[3] as the tensor
 * is. */
static void ldadam(moment *m)
{
    static double a[MOST], b[MOST], q[MOST], qt[MOST], y[MOST], low[MOST], change[MOST], m2[MOST],
        moved[MOST], held[MOST], spread[MOST], way[MOST];
    double b1 = hyper(m, "beta1"), b2 = hyper(m, "beta2"), eps = hyper(m, "eps");
    double rho = hyper(m, "rho"), done = m->t - 1;
    double past1 = 1 - pow(b1, done), past2 = 1 - pow(b2, done);
    int64_t k = (int64_t)hyper(m, "rank");
    bool right = m->rows > m->cols, feeds = hyper(m, "error_feedback") > 0;
    int64_t r = right ? m->cols : m->rows, c = right ? m->rows : m->cols;
    if (!has_low_rank(m)) {
        adam_way(m, m->g, m->n, false, way);
        for (int64_t i = 0; i < m->n; i++)
            m->p[i] -= m->lr * (m->decay * m->p[i] + way[i]);
        return;
    }
    for (int64_t i = 0; i < m->n; i++)
        b[i] = m->g[i] + (feeds ? m->s[3][i] : 0);
    if (right)
        transpose(b, m->rows, m->cols, a);
    else
        memcpy(a, b, sizeof a);
    double *p = m->s[2], *avg = m->s[0], *v = m->s[1];
    times(p, avg, r, k, c, moved);
    if (done == 0) {
        left_vectors(a, r, c, k, q);
    } else {
        for (int64_t i = 0; i < m->n; i++)
            b[i] = rho * moved[i] / past1 + (1 - rho) * a[i];
        transpose(b, r, c, held);
        times(held, p, c, r, k, y);
        times(b, y, r, c, k, q);
        orthonormalise(q, r, k);
    }
    transpose(q, r, k, qt);
    times(qt, a, k, r, c, low);
    times(qt, p, k, r, k, change);
    times(change, avg, k, k, c, m2);
    times(q, low, r, k, c, held);
    times(q, m2, r, k, c, y);
    for (int64_t i = 0; i < m->n; i++)
        held[i] = a[i] - held[i] + b1 / (1 - b1) * (moved[i] - y[i]);
    if (right)
        transpose(held, r, c, m->s[3]);
    else
        memcpy(m->s[3], held, sizeof held);
    if (done > 0) {
        for (int64_t i = 0; i < k * c; i++)
            spread[i] = v[i] / past2 - avg[i] * avg[i] / (past1 * past1);
        for (int64_t i = 0; i < k * k; i++)
            change[i] *= change[i];
        times(change, spread, k, k, c, v);
        for (int64_t i = 0; i < k * c; i++) {
            v[i] = fabs(past2 * (v[i] + m2[i] * m2[i] / (past1 * past1)));
            avg[i] = m2[i];
        }
    }
    for (int64_t i = 0; i < k * c; i++) {
        avg[i] = b1 * avg[i] + (1 - b1) * low[i];
        v[i] = b2 * v[i] + (1 - b2) * low[i] * low[i];
        low[i] = avg[i] / (1 - pow(b1, m->t)) / (sqrt(v[i] / (1 - pow(b2, m->t))) + eps);
    }
    times(q, low, r, k, c, y);
    memcpy(p, q, sizeof q);
    for (int64_t i = 0; i < m->n; i++)
        m->p[i] -= m->lr * (m->decay * m->p[i] + y[right ? i % m->cols * c + i / m->cols : i]);
}

/* ---- the table ---- */

typedef struct {
    const char *name, *hyper; /* "beta1=0.8 eps=1e-6": other values than those of the table */
    void (*step)(moment *m);
    struct {
        const char *name;
        int s;
    } state[STATES];         /* compared with the definition's states */
    double tolerance;        /* relative to the change of the parameters; 0: 1e-5 */
    void (*show)(moment *m); /* p becomes what is evaluated; NULL: p itself */
} row;

static const row rows[] = {
    { "adam", "weight_decay=0.1", adam, { { "exp_avg", 0 }, { "exp_avg_sq", 1 } }, 0, NULL },
    { "amsgrad", "beta2=0.6", adam, { { "exp_avg", 0 }, { "max_exp_avg_sq", 2 } }, 0, NULL },
    { "adagrad", "lr_decay=0.1 weight_decay=0.1", adagrad, { { "sum", 0 } }, 0, NULL },
    { "rmsprop", "", rmsprop, { { "square_avg", 0 } }, 0, NULL },
    { "rmsprop",
      "centered=1 momentum=0.9 weight_decay=0.1",
      rmsprop,
      { { "square_avg", 0 }, { "grad_avg", 1 }, { "momentum_buffer", 2 } },
      2e-5,
      NULL },
    { "lion", "", lion, { { "exp_avg", 0 } }, 0, NULL },
    { "adamw", "cautious=1", adamw, { { "exp_avg", 0 }, { "exp_avg_sq", 1 } }, 0, NULL },
    { "lion", "cautious=1", lion, { { "exp_avg", 0 } }, 0, NULL },
    { "lion", "ema=0.6", lion_averaged, { { "exp_avg", 0 }, { "ema", 5 } }, 0, average_shown },
    { "schedule-free",
      "beta1=0.8",
      schedule_free,
      { { "z", 0 }, { "exp_avg_sq", 1 }, { "lr_max", 2 }, { "weight_sum", 3 } },
      0,
      schedule_free_shown },
    { "schedule-free",
      "warmup_steps=6 r=1 weight_lr_power=1 weight_decay=0.1",
      schedule_free,
      { { "z", 0 } },
      0,
      schedule_free_shown },
    { "momentum", "weight_decay=0.1", momentum, { { "momentum_buffer", 0 } }, 0, NULL },
    { "nesterov", "weight_decay=0.1", momentum, { { "momentum_buffer", 0 } }, 0, NULL },
    { "lamb", "", lamb, { { "exp_avg", 0 }, { "exp_avg_sq", 1 } }, 0, NULL },
    { "lamb", "bias_correction=0 eps=0.1", lamb, { { "exp_avg", 0 } }, 0, NULL },
    { "lamb", "bias_correction=0 eps=1 weight_decay=0", lamb, { { "exp_avg", 0 } }, 0, NULL },
    { "adafactor",
      "",
      adafactor,
      { { "exp_avg_sq_row", 0 }, { "exp_avg_sq_col", 1 }, { "exp_avg_sq", 2 } },
      0,
      NULL },
    { "adafactor",
      "beta1=0.9 weight_decay=0.1 clip_threshold=0.5 scale_parameter=0",
      adafactor,
      { { "exp_avg", 3 } },
      0,
      NULL },
    { "adafactor",
      "relative_step=1 warmup_init=1",
      adafactor,
      { { "exp_avg_sq", 2 } },
      1e-4,
      NULL },
    { "sm3",
      "",
      sm3,
      { { "accumulator_0", 0 }, { "accumulator_1", 1 }, { "momentum_buffer", 2 } },
      0,
      NULL },
    { "sm3", "momentum=0 weight_decay=0.1", sm3, { { "accumulator_0", 0 } }, 0, NULL },
    { "came",
      "",
      came,
      { { "exp_avg_sq_row", 0 },
        { "exp_avg_sq_col", 1 },
        { "exp_avg", 2 },
        { "exp_avg_res_row", 3 },
        { "exp_avg_res_col", 4 } },
      1e-4,
      NULL },
    { "adam-mini", "", adam_mini, { { "exp_avg", 0 }, { "exp_avg_sq", 1 } }, 0, NULL },
    { "muon",
      "bf16=0",
      muon,
      { { "momentum_buffer", 0 }, { "exp_avg", 0 }, { "exp_avg_sq", 1 } },
      1e-4,
      NULL },
    { "muon",
      "bf16=0 ns=1 scaling=1 nesterov=0 cautious=1 ns_steps=6",
      muon,
      { { "momentum_buffer", 0 } },
      1e-3,
      NULL },
    { "muon", "", muon, { { "momentum_buffer", 0 } }, 0.05, NULL },
    { "soap",
      "max_precond_dim=12 precondition_frequency=4",
      soap,
      { { "exp_avg", 0 },
        { "exp_avg_sq", 1 },
        { "GG_0", 2 },
        { "Q_0", 3 },
        { "GG_1", 4 },
        { "Q_1", 5 } },
      1e-3,
      NULL },
    { "soap-muon",
      "max_precond_dim=12 precondition_frequency=4 bf16=0",
      soap,
      { { "exp_avg", 0 }, { "Q_0", 3 } },
      1e-2,
      NULL },
    { "normuon",
      "bf16=0",
      muon,
      { { "momentum_buffer", 0 }, { "second_momentum_buffer", 1 } },
      1e-3,
      NULL },
    { .name = "adamw8bit", .hyper = "min_8bit_size=300", .step = adamw8bit, .tolerance = 1e-3 },
    { .name = "galore",
      .hyper = "rank=4 update_proj_gap=7",
      .step = galore,
      .state = { { "ortho_matrix", 2 } },
      .tolerance = 1e-4 },
    { .name = "galore",
      .hyper = "rank=8 update_proj_gap=5 stagger=1 weight_decay=0.1 galore_scale=1",
      .step = galore,
      .state = { { "ortho_matrix", 2 } },
      .tolerance = 1e-4 },
    { .name = "q-galore",
      .hyper = "rank=4 update_proj_gap=2 queue_size=2 cos_threshold=-1 weight_quant=0 "
               "min_8bit_size=100 weight_decay=0.1",
      .step = q_galore,
      .state = { { "past_ortho_vector", 2 },
                 { "queue", 3 },
                 { "update_proj_gap", 4 },
                 { "svd_count", 5 } },
      .tolerance = 2e-3 },
    { .name = "q-galore",
      .hyper = "rank=6 update_proj_gap=4 queue_size=3 proj_bits=8 weight_quant=0",
      .step = q_galore,
      .state = { { "past_ortho_vector", 2 }, { "queue", 3 }, { "update_proj_gap", 4 } },
      .tolerance = 2e-3 },
    { .name = "q-galore",
      .hyper = "rank=4 update_proj_gap=5 stochastic_round=0",
      .step = q_galore,
      .tolerance = 0.01 },
    { .name = "q-galore",
      .hyper = "rank=4 update_proj_gap=5",
      .step = q_galore,
      .tolerance = 0.01 },
    { .name = "ldadam",
      .hyper = "rank=4 weight_decay=0.1",
      .step = ldadam,
      .state = { { "ortho_matrix", 2 }, { "error", 3 } },
      .tolerance = 1e-3 },
    { .name = "ldadam",
      .hyper = "rank=6 error_feedback=0 rho=0.5 beta1=0.95 beta2=0.3",
      .step = ldadam,
      .state = { { "ortho_matrix", 2 } },
      .tolerance = 1e-3 },
};

/* ---- steps ---- */

static lm_optim_use use_of(const row *r)
{
    lm_optim_use u = lm_optim_default(lm_optim_find(r->name));
    for (const char *at = r->hyper; *at; at += strcspn(at, " "), at += *at == ' ') {
        char name[32];
        double x;
        assert_int_equal(sscanf(at, "%31[^=]=%lf", name, &x), 2);
        if (!strcmp(name, "ema"))
            u.ema = x;
        else
            u.hyper[lm_optim_hyper(u.optim, name)] = x;
    }
    return u;
}

static void add_tensors(update_trial *r)
{
    static const struct {
        const char *name;
        int64_t rows, cols;
        lm_part part;
        int64_t heads;
        bool bias;
    } t[] = { { "model.embed_tokens.weight", 7, 5, LM_PART_EMBED, 0, false },
              { "q_proj.weight", 24, 16, LM_PART_Q, 4, false }, /* end to end: pieces of one */
              { "k_proj.weight", 12, 16, LM_PART_K, 2, false },
              { "v_proj.weight", 12, 16, LM_PART_V, 2, false },
              { "up_proj.weight", 64, 48, LM_PART_UP, 0, false },
              { "down_proj.weight", 16, 40, LM_PART_DOWN, 0, false },
              { "c_attn.weight", 48, 10, LM_PART_QKV, 12, false },
              { "o_proj.weight", 12, 12, LM_PART_ATTN_OUT, 0, false },
              { "q_proj.bias", 33, 0, LM_PART_Q, 3, true },
              { "input_layernorm.weight", 24, 0, LM_PART_ATTN_NORM, 0, false },
              { "lm_head.weight", 9, 16, LM_PART_OUTPUT, 0, false } };
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        lm_update_tensor *x = trial_add(r, t[i].name, t[i].rows, t[i].cols);
        x->part = t[i].part;
        x->layer = i && i < 10 ? 0 : -1;
        x->heads = t[i].heads;
        x->head_dim = t[i].heads ? t[i].rows / t[i].heads : 0;
        x->bias = t[i].bias;
    }
}

static void draw(float *x, int64_t n, const char *what, int t)
{
    for (int64_t i = 0; i < n; i++)
        x[i] = (float)lm_rng_normal(lm_rng_make(7, what, (uint64_t)t), (uint64_t)i);
}

static void begin_moment(moment *m, const update_trial *r, int i, const lm_optim_use *use)
{
    const lm_update_tensor *t = &r->t[i];
    memset(m, 0, sizeof *m);
    m->use = use;
    m->tensor = t;
    m->matrix = t->shape.ndim == 2;
    m->rows = t->shape.dim[0];
    m->cols = m->matrix ? t->shape.dim[1] : 1;
    m->n = m->rows * m->cols;
    assert_true(m->n <= MOST);
    int d = lm_optim_hyper(use->optim, "weight_decay");
    m->decay = d >= 0 && t->decay ? use->hyper[d] : 0;
    for (int64_t k = 0; k < m->n; k++)
        m->p[k] = trial_param(r, i)[k];
}

/* The distance of `got` from `want`, relative to that of `want` from `from`, to which a hundredth
 * of `want` is added, because F32 rounds small changes. */
static double error_of(const float *got, const double *want, const float *from, int64_t n)
{
    double diff = 0, way = 1e-20;
    for (int64_t i = 0; i < n; i++) {
        double w = want[i] - (from ? from[i] : 0);
        diff += (got[i] - want[i]) * (got[i] - want[i]);
        way += w * w + 1e-4 * want[i] * want[i];
    }
    return sqrt(diff / way);
}

static void compare(const row *w, const update_trial *r, int i, const moment *m, const float *start)
{
    double allowed = w->tolerance > 0 ? w->tolerance : 1e-5;
    double d = error_of(trial_param(r, i), m->p, start, m->n);
    lm_tensor shape;
    if (!(d <= allowed))
        fail_msg("%s (%s), %s after step %d: error %.3g, allowed %.3g", w->name, w->hyper,
                 r->t[i].name, (int)r->step, d, allowed);
    for (int k = 0; k < STATES && w->state[k].name; k++) {
        const float *s = trial_state(r, w->state[k].name, i, &shape);
        if (!s)
            continue; /* tensors of other kinds have other states */
        d = error_of(s, m->s[w->state[k].s], NULL, lm_tensor_count(&shape));
        if (!(d <= allowed))
            fail_msg("%s (%s), %s of %s after step %d: error %.3g, allowed %.3g", w->name, w->hyper,
                     w->state[k].name, r->t[i].name, (int)r->step, d, allowed);
    }
    for (int64_t k = 0; k < m->n; k++)
        assert_int_equal(r->low[r->t[i].offset + k], lm_f32_to_bf16(trial_param(r, i)[k]));
}

static void follow(const row *w, double norm, double bound)
{
    static moment m[TRIAL_TENSORS];
    static float start[TRIAL_TENSORS][MOST];
    lm_optim_use use = use_of(w);
    update_trial r = { 0 };
    add_tensors(&r);
    trial_open(&r, backend, &use, 1, norm, bound, true);
    for (int i = 0; i < r.n; i++) {
        draw(trial_param(&r, i), lm_tensor_count(&r.t[i].shape), r.t[i].name, 0);
        begin_moment(&m[i], &r, i, &use);
        memcpy(start[i], trial_param(&r, i), (size_t)m[i].n * sizeof(float));
    }
    for (int t = 1; t <= STEPS; t++) {
        for (int i = 0; i < r.n; i++)
            draw(trial_grad(&r, i), m[i].n, r.t[i].name, t);
        double lr = 0.02 / (1 + t / 10.0);
        double sumsq = 0;
        for (int i = 0; i < r.n; i++)
            for (int64_t k = 0; k < m[i].n; k++)
                sumsq += (double)trial_grad(&r, i)[k] * trial_grad(&r, i)[k];
        double scale = norm > 0 ? fmin(1, norm / (sqrt(sumsq) + 1e-6)) : 1;
        for (int i = 0; i < r.n; i++) {
            m[i].lr = lr;
            m[i].t = t;
            for (int64_t k = 0; k < m[i].n; k++) {
                double g = trial_grad(&r, i)[k] * scale;
                m[i].g[k] = bound > 0 ? fmax(-bound, fmin(bound, g)) : g;
            }
        }
        trial_step(&r, lr);
        for (int i = 0; i < r.n; i++) {
            w->step(&m[i]);
            compare(w, &r, i, &m[i], start[i]);
        }
    }
    if (w->show) {
        trial_run(&r, LM_UPDATE_SHOW);
        for (int i = 0; i < r.n; i++) {
            w->show(&m[i]);
            compare(w, &r, i, &m[i], start[i]);
        }
    }
    trial_close(&r);
}

static void test_definitions(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        follow(&rows[i], 0, 0);
        follow(&rows[i], 40, 0.9);
    }
}

/* AdamW and SGD have theirs in test_train_update. */
static void test_none_left_out(void **state)
{
    const lm_optim *o;
    (void)state;
    for (int k = 0; (o = lm_optim_at(k)); k++) {
        bool met = !strcmp(o->name, "adamw") || !strcmp(o->name, "sgd");
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
            met |= !strcmp(rows[i].name, o->name);
        if (!met)
            fail_msg("%s has no definition here", o->name);
    }
}

/* Rules with one formula per tensor are merged over blocks: matrices with decay, then vectors. */
static void test_runs(void **state)
{
    static const char *const flat[] = { "adam", "amsgrad", "adagrad", "rmsprop", "lion" };
    (void)state;
    for (size_t i = 0; i < sizeof flat / sizeof *flat; i++) {
        update_trial r = { 0 };
        lm_optim_use use = lm_optim_default(lm_optim_find(flat[i]));
        use.hyper[lm_optim_hyper(use.optim, "weight_decay")] = 0.1;
        int n = 0;
        add_tensors(&r);
        trial_open(&r, backend, &use, 1, 1, 0, true);
        const lm_graph *g = lm_update_graph(r.u);
        for (size_t k = 0; k < g->n_nodes; k++)
            n += !strcmp(g->node[k].op->name, "map");
        assert_int_equal(n, 3); /* the head comes after the vectors */
        trial_close(&r);
    }
}

/* 8-bit states of a large tensor are decoded in pieces, with the bits of separate tensors. */
static void test_pieces(void **state)
{
    enum { COLUMNS = 256, FIRST = 1024, MORE = 130 };
    lm_optim_use use = lm_optim_default(lm_optim_find("adamw8bit"));
    update_trial whole = { 0 }, parts = { 0 };
    (void)state;
    trial_add(&whole, "a", FIRST + MORE, COLUMNS);
    trial_add(&parts, "a", FIRST, COLUMNS);
    trial_add(&parts, "b", MORE, COLUMNS);
    trial_open(&whole, backend, &use, 1, 1, 0, true);
    trial_open(&parts, backend, &use, 1, 1, 0, true);
    draw(whole.param, (FIRST + MORE) * COLUMNS, "a", 0);
    memcpy(parts.param, whole.param, (FIRST + MORE) * COLUMNS * sizeof(float));
    for (int t = 0; t < 3; t++) {
        draw(whole.grad, (FIRST + MORE) * COLUMNS, "a", t + 1);
        memcpy(parts.grad, whole.grad, (FIRST + MORE) * COLUMNS * sizeof(float));
        trial_step(&whole, 0.01);
        trial_step(&parts, 0.01);
    }
    assert_memory_equal(whole.param, parts.param, (FIRST + MORE) * COLUMNS * sizeof(float));
    assert_memory_equal(whole.low, parts.low, (FIRST + MORE) * COLUMNS * sizeof(uint16_t));
    assert_memory_equal(trial_state(&whole, "state2", 0, NULL),
                        trial_state(&parts, "state2", 0, NULL), FIRST * COLUMNS);
    assert_memory_equal((char *)trial_state(&whole, "state1", 0, NULL) + FIRST * COLUMNS,
                        trial_state(&parts, "state1", 1, NULL), MORE * COLUMNS);
    const lm_graph *g = lm_update_graph(whole.u);
    int encodes = 0;
    for (size_t k = 0; k < g->n_nodes; k++)
        encodes += !strcmp(g->node[k].op->name, "encode");
    assert_int_equal(encodes, 4); /* two pieces */
    trial_close(&whole);
    trial_close(&parts);
}

static int begin(void **state)
{
    lm_err e = { 0 };
    (void)state;
    return lm_par_new(&par, 2, &e) || lm_backend_cpu(lm_cpu_detect(), par, &backend, &e);
}

static int end(void **state)
{
    (void)state;
    lm_backend_close(backend);
    lm_par_free(par);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_definitions),
        cmocka_unit_test(test_none_left_out),
        cmocka_unit_test(test_runs),
        cmocka_unit_test(test_pieces),
    };
    return cmocka_run_group_tests_name("optimizers", tests, begin, end);
}
