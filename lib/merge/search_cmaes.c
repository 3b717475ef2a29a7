/* SPDX-License-Identifier: Apache-2.0 */
/* search_cmaes.c -- covariance matrix adaptation (N. Hansen, "The CMA Evolution Strategy: A
 * Tutorial", arXiv:1604.00772): figure 6 with the parameters of table 1.
 *
 * The equation numbers below are the tutorial's.  Points beyond the bounds are measured at the
 * nearest point within (appendix B.5) and get a penalty of alpha |x - x_in|^2, alpha is chosen in
 * each generation so that one step beyond costs as much as the range of the generation's
 * objectives. */
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "base/rng.h"
#include "base/text.h"
#include "merge/search_impl.h"

typedef struct {
    int n, lambda, mu;
    double *weight; /* [lambda], the last ones negative */
    double mu_eff, c_m, c_sigma, d_sigma, c_c, c_1, c_mu, norm; /* norm: E|N(0,I)| */
    double sigma;
    double *mean, *p_sigma, *p_c; /* [n] */
    double *c, *b, *d;            /* C [n,n], its eigenvectors in columns, roots of eigenvalues */
    double *y;                    /* [lambda, n]: the generation's steps, x = mean + sigma y */
    double *f, *beyond;           /* [lambda]: objective; squared distance from the bounds */
    int *order;                   /* [lambda] best first */
    double *tmp;                  /* [2 n] */
    int64_t generation;
    int next; /* index in the generation; -1: the start comes first */
    bool over;
    int flat; /* generations without any change */
} cmaes;

/* Table 1, for n dimensions and lambda points. */
static void set_parameters(cmaes *s)
{
    double n = s->n, pos = 0, pos2 = 0, neg = 0, neg2 = 0, plus = 0, minus = 0;
    for (int i = 0; i < s->lambda; i++) {
        double w = s->weight[i] = log((s->lambda + 1) / 2.0) - log(i + 1.0);
        *(i < s->mu ? &pos : &neg) += w;
        *(i < s->mu ? &pos2 : &neg2) += w * w;
        *(w >= 0 ? &plus : &minus) += fabs(w);
    }
    s->mu_eff = pos * pos / pos2;
    double mu_eff_neg = neg2 > 0 ? neg * neg / neg2 : 0;
    s->c_m = 1;
    s->c_sigma = (s->mu_eff + 2) / (n + s->mu_eff + 5);
    s->d_sigma = 1 + 2 * fmax(0, sqrt((s->mu_eff - 1) / (n + 1)) - 1) + s->c_sigma;
    s->c_c = (4 + s->mu_eff / n) / (n + 4 + 2 * s->mu_eff / n);
    s->c_1 = 2 / ((n + 1.3) * (n + 1.3) + s->mu_eff);
    s->c_mu = fmin(1 - s->c_1,
                   2 * (0.25 + s->mu_eff + 1 / s->mu_eff - 2) / ((n + 2) * (n + 2) + s->mu_eff));
    double most = fmin(fmin(1 + s->c_1 / s->c_mu, 1 + 2 * mu_eff_neg / (s->mu_eff + 2)),
                       (1 - s->c_1 - s->c_mu) / (n * s->c_mu)); /* (50)-(52) */
    for (int i = 0; i < s->lambda; i++)
        s->weight[i] *= s->weight[i] >= 0 ? 1 / plus : most / minus; /* (53) */
    s->norm = sqrt(n) * (1 - 1 / (4 * n) + 1 / (21 * n * n));
}

/* Eigenvalues and vectors of the symmetric a [n,n] by cyclic Jacobi rotations; a is overwritten,
 * its diagonal holds the eigenvalues, v [n,n] the vectors in columns. */
static void decompose(double *a, int n, double *v)
{
    for (int i = 0; i < n * n; i++)
        v[i] = i % (n + 1) == 0;
    for (int sweep = 0; sweep < 64; sweep++) {
        double off = 0, all = 0;
        for (int i = 0; i < n * n; i++)
            *(i % (n + 1) ? &off : &all) += a[i] * a[i];
        if (off <= 1e-30 * all)
            return;
        for (int p = 0; p < n; p++)
            for (int q = p + 1; q < n; q++) {
                double apq = a[p * n + q];
                if (apq == 0)
                    continue;
                double theta = (a[q * n + q] - a[p * n + p]) / (2 * apq);
                double t = copysign(1, theta) / (fabs(theta) + sqrt(theta * theta + 1));
                double co = 1 / sqrt(t * t + 1), si = t * co;
                for (int k = 0; k < n; k++) { /* columns, then rows */
                    double x = a[k * n + p], y = a[k * n + q];
                    a[k * n + p] = co * x - si * y;
                    a[k * n + q] = si * x + co * y;
                }
                for (int k = 0; k < n; k++) {
                    double x = a[p * n + k], y = a[q * n + k];
                    a[p * n + k] = co * x - si * y;
                    a[q * n + k] = si * x + co * y;
                    x = v[k * n + p], y = v[k * n + q];
                    v[k * n + p] = co * x - si * y;
                    v[k * n + q] = si * x + co * y;
                }
            }
    }
}

/* C = B D^2 B^T; false when C is no longer a usable covariance. */
static bool take_roots(cmaes *s)
{
    double least = INFINITY, most = 0;
    int n = s->n;
    double *a = s->y; /* scratch between generations, at least [n,n] */
    memcpy(a, s->c, (size_t)(n * n) * sizeof *a);
    decompose(a, n, s->b);
    for (int i = 0; i < n; i++) {
        double v = a[i * (n + 1)];
        least = fmin(least, v);
        most = fmax(most, v);
        s->d[i] = sqrt(fmax(v, 0));
    }
    return least > 0 && isfinite(most) && most < 1e14 * least;
}

/* out = B diag(D)^power B^T x for power -1; B diag(D) x for power 1. */
static void rotate(const cmaes *s, const double *x, int power, double *out)
{
    int n = s->n;
    double *t = s->tmp + n;
    for (int i = 0; i < n; i++) {
        t[i] = power > 0 ? x[i] * s->d[i] : 0;
        if (power < 0) {
            for (int k = 0; k < n; k++)
                t[i] += s->b[k * n + i] * x[k];
            t[i] /= s->d[i];
        }
    }
    for (int i = 0; i < n; i++) {
        out[i] = 0;
        for (int k = 0; k < n; k++)
            out[i] += s->b[i * n + k] * t[k];
    }
}

static double square(const double *x, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += x[i] * x[i];
    return sum;
}

static lm_code begin(lm_search *search, lm_err *e)
{
    const lm_search_opts *o = &search->o;
    cmaes *s = NULL;
    int n = o->n, lambda = o->popsize > 0 ? o->popsize : 4 + (int)(3 * log(n));
    if (lambda < 4 || lambda > 4096)
        return lm_fail(e, LM_EUSAGE, "popsize", NULL, "%d point%s, 4 to 4096 are allowed", lambda,
                       lm_plural(lambda));
    if (!search->o.max)
        search->o.max = 100;
    int64_t steps = (int64_t)lambda * n > (int64_t)n * n ? (int64_t)lambda * n : (int64_t)n * n;
    int64_t numbers = steps + 2 * (int64_t)n * n + 6 * n + 3 * lambda;
    if (lm_alloc_n(&s, 1, sizeof *s, "a search", e))
        return e->code;
    search->state = s;
    if (lm_alloc_n(&s->mean, (size_t)numbers, sizeof *s->mean, "a search", e) ||
        lm_alloc_n(&s->order, (size_t)lambda, sizeof *s->order, "a search", e))
        return e->code;
    s->n = n;
    s->lambda = lambda;
    s->mu = lambda / 2;
    s->p_sigma = s->mean + n;
    s->p_c = s->p_sigma + n;
    s->d = s->p_c + n;
    s->tmp = s->d + n;
    s->c = s->tmp + 2 * n;
    s->b = s->c + n * n;
    s->weight = s->b + n * n;
    s->f = s->weight + lambda;
    s->beyond = s->f + lambda;
    s->y = s->beyond + lambda;
    for (int i = 0; i < n; i++) {
        s->mean[i] = o->start[i];
        s->c[i * (n + 1)] = s->b[i * (n + 1)] = s->d[i] = 1;
    }
    s->sigma = o->sigma;
    s->next = -1;
    set_parameters(s);
    return LM_OK;
}

static bool ask(lm_search *search, double *w, const char **kind)
{
    cmaes *s = search->state;
    int n = s->n;
    if (s->over)
        return false;
    *kind = s->next < 0 ? "start" : "generation";
    if (s->next < 0) {
        memcpy(w, s->mean, (size_t)n * sizeof *w);
        return true;
    }
    lm_rng r = lm_rng_make(search->o.seed, "merge search", 1);
    int64_t draw = (s->generation * s->lambda + s->next) * n;
    double *y = s->y + (int64_t)s->next * n, *z = s->tmp;
    for (int i = 0; i < n; i++)
        z[i] = lm_rng_normal(r, (uint64_t)(draw + i));
    rotate(s, z, 1, y); /* (39) */
    s->beyond[s->next] = 0;
    for (int i = 0; i < n; i++) {
        double x = s->mean[i] + s->sigma * y[i]; /* (40) */
        w[i] = fmin(fmax(x, search->o.lo), search->o.hi);
        s->beyond[s->next] += (x - w[i]) * (x - w[i]);
    }
    return true;
}

/* Rank the generation: objective and penalty, ties by number. */
static void rank(cmaes *s)
{
    double least = INFINITY, most = -INFINITY, trace = 0;
    for (int i = 0; i < s->lambda; i++)
        if (isfinite(s->f[i])) {
            least = fmin(least, s->f[i]);
            most = fmax(most, s->f[i]);
        }
    for (int i = 0; i < s->n; i++)
        trace += s->c[i * (s->n + 1)];
    double spread = most > least ? most - least : 1;
    double alpha = spread / (s->sigma * s->sigma * trace / s->n);
    s->flat = most > least ? 0 : s->flat + 1;
    for (int i = 0; i < s->lambda; i++) {
        double f = s->f[i] += alpha * s->beyond[i];
        int k = i;
        for (; k > 0 && s->f[s->order[k - 1]] > f; k--)
            s->order[k] = s->order[k - 1];
        s->order[k] = i;
    }
}

/* (43)-(47): the paths, the step size and the covariance, from the mean step `step`. */
static void adapt(cmaes *s, const double *step)
{
    int n = s->n;
    double *white = s->tmp, keep = 1 - s->c_sigma, sum_w = 0;
    rotate(s, step, -1, white);
    for (int i = 0; i < n; i++)
        s->p_sigma[i] =
            keep * s->p_sigma[i] + sqrt(s->c_sigma * (2 - s->c_sigma) * s->mu_eff) * white[i];
    double length = sqrt(square(s->p_sigma, n));
    double grown = sqrt(1 - pow(keep, 2.0 * (double)(s->generation + 1)));
    double h = length / grown < (1.4 + 2.0 / (n + 1)) * s->norm;
    for (int i = 0; i < n; i++)
        s->p_c[i] =
            (1 - s->c_c) * s->p_c[i] + h * sqrt(s->c_c * (2 - s->c_c) * s->mu_eff) * step[i];
    double delta = (1 - h) * s->c_c * (2 - s->c_c);
    for (int k = 0; k < s->lambda; k++)
        sum_w += s->weight[k];
    double old = 1 + s->c_1 * delta - s->c_1 - s->c_mu * sum_w;
    for (int i = 0; i < n * n; i++)
        s->c[i] = old * s->c[i] + s->c_1 * s->p_c[i / n] * s->p_c[i % n];
    for (int k = 0; k < s->lambda; k++) {
        const double *y = s->y + (int64_t)s->order[k] * n;
        double w = s->c_mu * s->weight[k];
        if (w < 0) { /* (46): the length of a bad step does not count */
            rotate(s, y, -1, white);
            w *= n / (square(white, n) + 1e-300);
        }
        for (int i = 0; i < n * n; i++)
            s->c[i] += w * y[i / n] * y[i % n];
    }
    s->sigma *= exp(s->c_sigma / s->d_sigma * (length / s->norm - 1));
}

/* Every step is below the tolerance, nothing changes any longer, or the covariance is no longer
 * valid. */
static bool is_over(const lm_search *search, const cmaes *s)
{
    double widest = 0;
    for (int i = 0; i < s->n; i++)
        widest = fmax(widest, s->c[i * (s->n + 1)]);
    widest = s->sigma * sqrt(widest);
    return widest < search->o.tol || s->flat > 10 + (30 * s->n + s->lambda - 1) / s->lambda ||
           !isfinite(widest);
}

static void tell(lm_search *search, double objective)
{
    cmaes *s = search->state;
    double step[LM_SEARCH_MAX_DIM] = { 0 };
    if (s->next >= 0)
        s->f[s->next] = objective;
    if (++s->next < s->lambda)
        return;
    rank(s);
    for (int k = 0; k < s->mu; k++)
        for (int i = 0; i < s->n; i++)
            step[i] += s->weight[k] * s->y[(int64_t)s->order[k] * s->n + i]; /* (41) */
    double sigma = s->sigma;
    adapt(s, step);
    for (int i = 0; i < s->n; i++)
        s->mean[i] += s->c_m * sigma * step[i]; /* (42) */
    s->generation++;
    s->next = 0;
    s->over = is_over(search, s) || !take_roots(s);
}

static void end(void *state)
{
    cmaes *s = state;
    if (!s)
        return;
    lm_free(s->mean);
    lm_free(s->order);
    lm_free(s);
}

const lm_search_ops lm_search_cmaes_ops = { begin, ask, tell, end };
