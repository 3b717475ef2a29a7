/* SPDX-License-Identifier: Apache-2.0 */
/* test_merge_cmaes.c -- CMA-ES step by step against a second implementation of its equations
 * (arXiv:1604.00772, figure 6 and table 1) for three dimensions.
 *
 * A search shows its points only.  Those of one generation are mean + sigma A z with known z, so
 * that A A^T is the covariance; eigenvectors, whose signs and order are free, are not compared. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <string.h>

#include "base/rng.h"
#include "merge/search.h"

enum { N = 3, LAMBDA = 8, MU = LAMBDA / 2, GENERATIONS = 14 };
typedef double matrix[N][N];

/* ---- three by three ---- */

static void invert(matrix a, matrix out)
{
    double det = 0;
    for (int i = 0; i < N; i++)
        for (int k = 0; k < N; k++)
            out[k][i] = a[(i + 1) % N][(k + 1) % N] * a[(i + 2) % N][(k + 2) % N] -
                        a[(i + 1) % N][(k + 2) % N] * a[(i + 2) % N][(k + 1) % N];
    for (int k = 0; k < N; k++)
        det += a[0][k] * out[k][0];
    for (int i = 0; i < N * N; i++)
        out[i / N][i % N] /= det;
}

/* out = C^(-1/2), by the iteration of Denman and Beavers. */
static void inverse_root(matrix c, matrix out)
{
    matrix y, z = { { 1, 0, 0 }, { 0, 1, 0 }, { 0, 0, 1 } }, yi, zi;
    memcpy(y, c, sizeof y);
    for (int round = 0; round < 40; round++) {
        invert(y, yi);
        invert(z, zi);
        for (int i = 0; i < N * N; i++) {
            y[i / N][i % N] = (y[i / N][i % N] + zi[i / N][i % N]) / 2;
            z[i / N][i % N] = (z[i / N][i % N] + yi[i / N][i % N]) / 2;
        }
    }
    memcpy(out, z, sizeof z);
}

static double length(const double *x)
{
    return sqrt(x[0] * x[0] + x[1] * x[1] + x[2] * x[2]);
}

static void times(matrix a, const double *x, double *out)
{
    for (int i = 0; i < N; i++)
        out[i] = a[i][0] * x[0] + a[i][1] * x[1] + a[i][2] * x[2];
}

/* ---- the equations ---- */

typedef struct {
    double w[LAMBDA], mu_eff, c_sigma, d_sigma, c_c, c_1, c_mu, chi;
    double m[N], sigma, p_sigma[N], p_c[N];
    matrix c;
    int generation, stalls; /* stalls: generations with h_sigma = 0 */
} reference;

static void begin(reference *r, const double *start, double sigma)
{
    double raw[LAMBDA], up = 0, up2 = 0, down = 0, down2 = 0;
    memset(r, 0, sizeof *r);
    for (int i = 0; i < LAMBDA; i++) {
        raw[i] = log((LAMBDA + 1) / 2.0) - log(i + 1.0);
        if (i < MU)
            up += raw[i], up2 += raw[i] * raw[i];
        else
            down += raw[i], down2 += raw[i] * raw[i];
    }
    r->mu_eff = up * up / up2;
    r->c_c = (4 + r->mu_eff / N) / (N + 4 + 2 * r->mu_eff / N);
    r->c_1 = 2 / (pow(N + 1.3, 2) + r->mu_eff);
    r->c_mu = fmin(1 - r->c_1, 2 * (0.25 + r->mu_eff + 1 / r->mu_eff - 2) /
                                   (pow(N + 2, 2) + 2 * r->mu_eff / 2));
    double limit[] = { 1 + r->c_1 / r->c_mu, 1 + 2 * (down * down / down2) / (r->mu_eff + 2),
                       (1 - r->c_1 - r->c_mu) / (N * r->c_mu) };
    double least = fmin(limit[0], fmin(limit[1], limit[2]));
    for (int i = 0; i < LAMBDA; i++) /* half of them are positive: (lambda + 1) / 2 is not whole */
        r->w[i] = i < MU ? raw[i] / up : least * raw[i] / -down;
    r->c_sigma = (r->mu_eff + 2) / (N + r->mu_eff + 5);
    r->d_sigma = 1 + 2 * fmax(0, sqrt((r->mu_eff - 1) / (N + 1)) - 1) + r->c_sigma;
    r->chi = sqrt(N) * (1 - 1 / (4.0 * N) + 1 / (21.0 * N * N));
    r->sigma = sigma;
    memcpy(r->m, start, sizeof r->m);
    for (int i = 0; i < N; i++)
        r->c[i][i] = 1;
}

/* One generation, x best first. */
static void step(reference *r, double x[LAMBDA][N])
{
    double y[LAMBDA][N], mean[N] = { 0 }, white[N], w[LAMBDA], sum = 0;
    matrix root, next;
    inverse_root(r->c, root);
    for (int k = 0; k < LAMBDA; k++)
        for (int i = 0; i < N; i++) {
            y[k][i] = (x[k][i] - r->m[i]) / r->sigma;
            mean[i] += k < MU ? r->w[k] * y[k][i] : 0;
        }
    times(root, mean, white);
    for (int i = 0; i < N; i++)
        r->p_sigma[i] = (1 - r->c_sigma) * r->p_sigma[i] +
                        sqrt(r->c_sigma * (2 - r->c_sigma) * r->mu_eff) * white[i];
    r->generation++;
    bool h = length(r->p_sigma) / sqrt(1 - pow(1 - r->c_sigma, 2.0 * r->generation)) <
             (1.4 + 2.0 / (N + 1)) * r->chi;
    r->stalls += !h;
    for (int i = 0; i < N; i++)
        r->p_c[i] =
            (1 - r->c_c) * r->p_c[i] + (h ? sqrt(r->c_c * (2 - r->c_c) * r->mu_eff) * mean[i] : 0);
    for (int k = 0; k < LAMBDA; k++) {
        times(root, y[k], white);
        w[k] = r->w[k] * (r->w[k] < 0 ? N / (length(white) * length(white)) : 1);
        sum += r->w[k];
    }
    double keep = 1 + (h ? 0 : r->c_1 * r->c_c * (2 - r->c_c)) - r->c_1 - r->c_mu * sum;
    for (int i = 0; i < N; i++)
        for (int j = 0; j < N; j++) {
            next[i][j] = keep * r->c[i][j] + r->c_1 * r->p_c[i] * r->p_c[j];
            for (int k = 0; k < LAMBDA; k++)
                next[i][j] += r->c_mu * w[k] * y[k][i] * y[k][j];
        }
    memcpy(r->c, next, sizeof next);
    for (int i = 0; i < N; i++)
        r->m[i] += r->sigma * mean[i];
    r->sigma *= exp(r->c_sigma / r->d_sigma * (length(r->p_sigma) / r->chi - 1));
}

/* ---- comparison ---- */

/* sigma^2 C out of a generation: A from x - m = A z by least squares, then A A^T. */
static void measured(const reference *r, double x[LAMBDA][N], double z[LAMBDA][N], matrix out)
{
    matrix zz = { { 0 } }, xz = { { 0 } }, inverse, a = { { 0 } };
    for (int k = 0; k < LAMBDA; k++)
        for (int i = 0; i < N; i++)
            for (int j = 0; j < N; j++) {
                zz[i][j] += z[k][i] * z[k][j];
                xz[i][j] += (x[k][i] - r->m[i]) * z[k][j];
            }
    invert(zz, inverse);
    for (int i = 0; i < N; i++)
        for (int j = 0; j < N; j++)
            for (int k = 0; k < N; k++)
                a[i][j] += xz[i][k] * inverse[k][j];
    for (int i = 0; i < N; i++)
        for (int j = 0; j < N; j++)
            out[i][j] = a[i][0] * a[j][0] + a[i][1] * a[j][1] + a[i][2] * a[j][2];
}

static void compare(const reference *r, double x[LAMBDA][N], double z[LAMBDA][N])
{
    matrix got;
    double scale = r->sigma * r->sigma, off = 0, all = 0;
    measured(r, x, z, got);
    for (int i = 0; i < N; i++)
        for (int j = 0; j < N; j++) {
            off += pow(got[i][j] - scale * r->c[i][j], 2);
            all += pow(scale * r->c[i][j], 2);
        }
    if (!(off <= 1e-18 * all))
        print_error("generation %d: covariance is off by %g\n", r->generation, sqrt(off / all));
    assert_true(off <= 1e-18 * all);
}

/* Best first; the objectives all differ. */
static void sort(double x[LAMBDA][N], const double *f, double out[LAMBDA][N])
{
    for (int k = 0; k < LAMBDA; k++) {
        int rank = 0;
        for (int j = 0; j < LAMBDA; j++)
            rank += f[j] < f[k];
        memcpy(out[rank], x[k], sizeof out[rank]);
    }
}

/* A slope makes the steps grow until h_sigma stalls the path; a bowl bends the covariance. */
static double objective(const double *w, bool slope)
{
    double bowl = 9 * w[0] * w[0] + pow(w[1] - 0.3 * w[0], 2) + 0.2 * fabs(w[2]);
    return slope ? w[0] + 0.5 * w[1] + 1e-3 * bowl : bowl;
}

static int follow(bool slope, uint64_t seed)
{
    const double start[N] = { 0.5, -0.25, 1 };
    const lm_search_opts o = { .kind = LM_SEARCH_CMAES,
                               .n = N,
                               .popsize = LAMBDA,
                               .start = start,
                               .sigma = 0.1,
                               .lo = -1e6,
                               .hi = 1e6,
                               .max = 10000,
                               .tol = 1e-300,
                               .seed = seed };
    lm_rng rng = lm_rng_make(seed, "merge search", 1);
    double x[LAMBDA][N], z[LAMBDA][N], f[LAMBDA], best[LAMBDA][N], w[N];
    const char *kind;
    lm_search *s = NULL;
    lm_err e = { 0 };
    reference r;
    begin(&r, start, o.sigma);
    assert_int_equal(lm_search_new(&o, &s, &e), 0);
    assert_true(lm_search_ask(s, w, &kind));
    assert_memory_equal(w, start, sizeof w);
    lm_search_tell(s, objective(w, slope));
    for (int g = 0; g < GENERATIONS; g++) {
        for (int k = 0; k < LAMBDA; k++) {
            for (int i = 0; i < N; i++)
                z[k][i] = lm_rng_normal(rng, (uint64_t)((g * LAMBDA + k) * N + i));
            assert_true(lm_search_ask(s, x[k], &kind));
            f[k] = objective(x[k], slope);
            lm_search_tell(s, f[k]);
        }
        compare(&r, x, z);
        sort(x, f, best);
        step(&r, best);
    }
    lm_search_free(s);
    return r.stalls;
}

static void test_equations(void **state)
{
    int stalls = 0;
    (void)state;
    for (uint64_t seed = 1; seed <= 4; seed++) {
        follow(false, seed);
        stalls += follow(true, seed);
    }
    assert_true(stalls > 0 && stalls < 4 * GENERATIONS);
}

static void test_popsize(void **state)
{
    lm_search *s = NULL;
    lm_err e = { 0 };
    (void)state;
    lm_search_opts o = { .kind = LM_SEARCH_CMAES, .n = N, .popsize = 3 };
    assert_int_equal(lm_search_new(&o, &s, &e), LM_EUSAGE);
    assert_non_null(strstr(e.what, "4 to 4096"));
    assert_null(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_equations),
        cmocka_unit_test(test_popsize),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
