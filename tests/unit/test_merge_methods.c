/* SPDX-License-Identifier: Apache-2.0 */
/* The merge methods against plain restatements of their equations in double. */
#include "tests/unit/merge_case.h"

/* --- the equations, restated ----------------------------------------------------------------- */

static double par_of(const merge_case *c, int i, lm_merge_param p, double none)
{
    double v = i < 0 ? c->job.param[p] : c->model[i].param[p];
    return isnan(v) ? none : v;
}

static double w_of(const merge_case *c, int i)
{
    return par_of(c, i, LM_MERGE_WEIGHT, par_of(c, -1, LM_MERGE_WEIGHT, 1));
}

/* Deltas in the method's arithmetic. */
static double delta(const merge_case *c, int i, int64_t k)
{
    return is_narrow(c) ? (double)((float)c->x[i][k] - (float)c->b[k]) : c->x[i][k] - c->b[k];
}

static void want_linear(const merge_case *c, bool base, double *out)
{
    double norm = 0;
    for (int i = 0; i < c->job.n_models; i++)
        norm += w_of(c, i);
    if (base || par_of(c, -1, LM_MERGE_NORMALIZE, 1) == 0)
        norm = 1;
    for (int64_t k = 0; k < c->job.count; k++) {
        out[k] = base ? c->b[k] : 0;
        for (int i = 0; i < c->job.n_models; i++)
            out[k] += w_of(c, i) / norm * (c->x[i][k] - (base ? c->b[k] : 0));
    }
}

static double dot(const double *a, const double *b, int64_t n, int64_t step)
{
    double s = 0;
    for (int64_t k = 0; k < n; k++)
        s += a[k * step] * b[k * step];
    return s;
}

static void arc(const double *a, const double *b, double *out, int64_t n, int64_t step, double t,
                bool nu)
{
    double na = sqrt(dot(a, a, n, step)), nb = sqrt(dot(b, b, n, step)), o;
    double cosine = dot(a, b, n, step) / (na * nb);
    bool straight = nu ? 1 - cosine * cosine < 1e-16 : fabs(cosine) > 0.9995;
    o = acos(fmax(-1, fmin(1, cosine)));
    for (int64_t k = 0; k < n; k++)
        out[k * step] =
            straight ? (1 - t) * a[k * step] + t * b[k * step]
                     : sin((1 - t) * o) / sin(o) * a[k * step] + sin(t * o) / sin(o) * b[k * step];
}

static double drawn(const merge_case *c, int i, int64_t k)
{
    lm_rng r = lm_rng_make(c->job.seed, "merge", lm_hash_str(c->job.name) ^ (uint64_t)i);
    return lm_rng_u32(r, (uint64_t)k) * 0x1p-32;
}

static void della_row(const merge_case *c, int i, const double *d, int64_t at, int64_t n, double *m)
{
    double density = par_of(c, i, LM_MERGE_DENSITY, 1), eps = par_of(c, i, LM_MERGE_EPSILON, 0.15);
    ranked *r = rank_all(d, n);
    for (int64_t k = 0; k < n; k++) {
        double up = n > 1 ? (double)(n - 1 - k) / (double)(n - 1) : 0.5;
        double p = density - eps + 2 * eps * up;
        bool kept = drawn(c, i, at + r[k].at) < p;
        m[r[k].at] = !kept ? 0 : c->job.param[LM_MERGE_RESCALE] == LM_RESCALE_EXPECTED ? 1 / p : 1;
    }
    lm_free(r);
}

/* Multipliers of the deltas of model i: 0 where dropped. */
static void mask_of(const merge_case *c, const char *name, int i, const double *d, double *m)
{
    int64_t n = c->job.count, cols = c->job.ndim ? c->dim[c->job.ndim - 1] : 1;
    double density = par_of(c, i, LM_MERGE_DENSITY, 1), gamma = par_of(c, i, LM_MERGE_GAMMA, 0.01);
    int64_t keep = (int64_t)(density * (double)n), skip = 0;
    ranked *r = NULL;
    if (density >= 1) {
        for (int64_t k = 0; k < n; k++)
            m[k] = 1;
        return;
    }
    for (int64_t k = 0; k < n; k++)
        m[k] = 0;
    if (!strncmp(name, "dare", 4)) {
        for (int64_t k = 0; k < n; k++)
            m[k] = drawn(c, i, k) >= density                               ? 0
                   : c->job.param[LM_MERGE_RESCALE] == LM_RESCALE_EXPECTED ? 1 / density
                                                                           : 1;
    } else if (!strncmp(name, "della", 5)) {
        for (int64_t k = 0; k < n; k += cols)
            della_row(c, i, d + k, k, cols, m + k);
    } else {
        if (name[0] == 'b') {
            skip = (int64_t)(gamma * (double)n);
            skip = skip > n - keep ? n - keep : skip;
        } else if (!keep && density > 0) {
            keep = 1;
        }
        r = rank_all(d, n);
        for (int64_t k = skip; k < skip + keep; k++)
            m[r[k].at] = 1;
        lm_free(r);
    }
}

static void want_task(const merge_case *c, const char *name, bool vote, double *out)
{
    int64_t n = c->job.count;
    int models = c->job.n_models, by = (int)par_of(c, -1, LM_MERGE_SIGN_ELECTION, 0);
    double *d[MOST], *m = room((size_t)n, sizeof *m), all = 0;
    bool norm = c->job.param[LM_MERGE_NORMALIZE] != 0;
    for (int i = 0; i < models; i++) {
        double before = 0, after = 0;
        d[i] = room((size_t)n, sizeof(double));
        for (int64_t k = 0; k < n; k++)
            d[i][k] = delta(c, i, k);
        mask_of(c, name, i, d[i], m);
        for (int64_t k = 0; k < n; k++) {
            before += fabs(d[i][k]);
            d[i][k] *= m[k];
            after += fabs(d[i][k]);
        }
        if (c->job.param[LM_MERGE_RESCALE] == LM_RESCALE_L1 && before >= 1e-7 && after >= 1e-7)
            for (int64_t k = 0; k < n; k++)
                d[i][k] *= before / after;
        all += w_of(c, i);
    }
    for (int64_t k = 0; k < n; k++) {
        double s = 0, up = 0, under = 0;
        for (int i = 0; i < models; i++) {
            double v = w_of(c, i) * d[i][k];
            s += by == LM_ELECT_SUM ? d[i][k] : by == LM_ELECT_COUNT ? (v > 0) - (v < 0) : v;
        }
        for (int i = 0; i < models; i++) {
            double v = w_of(c, i) * d[i][k];
            bool in = !vote || (s >= 0 ? v > 0 : v < 0);
            up += in ? v : 0;
            under += in && vote ? w_of(c, i) : 0;
        }
        under = !norm ? 1 : vote ? (under == 0 ? 1 : under) : fabs(all) < 1e-8 ? 1 : all;
        out[k] = c->b[k] + par_of(c, -1, LM_MERGE_LAMBDA, 1) * up / under;
    }
    for (int i = 0; i < models; i++)
        lm_free(d[i]);
    lm_free(m);
}

/* --- each method against its equation -------------------------------------------------------- */

static const struct {
    int ndim;
    int64_t d0, d1;
} shapes[] = { { 0, 1, 1 },  { 1, 1, 0 },    { 1, 7, 0 },   { 1, 2049, 0 },
               { 2, 5, 13 }, { 2, 17, 300 }, { 2, 2, 2500 } };
enum { N_SHAPES = 7 };

#define FOR_CASES(c, n, out)                                                               \
    for (int sh_ = 0; sh_ < N_SHAPES; sh_++)                                               \
        for (int ty_ = 0; ty_ < N_TYPES; ty_++)                                            \
            for (merge_case *c = new_case(n, types[ty_], shapes[sh_].ndim, shapes[sh_].d0, \
                                          shapes[sh_].d1, sh_ * 10 + ty_);                 \
                 c; free_case(c), c = NULL)                                                \
                for (double *out = room((size_t)c->job.count, sizeof *out); out;           \
                     lm_free(out), out = NULL)

static void sums(void **state)
{
    (void)state;
    FOR_CASES(c, 3, want)
    {
        set_weights(c, 0.4, -0.1, 0.9);
        want_linear(c, false, want);
        merge(c, "linear");
        expect(c, want, "linear");
        c->job.param[LM_MERGE_NORMALIZE] = 0;
        want_linear(c, false, want);
        merge(c, "linear");
        expect(c, want, "linear, not normalized");
        want_linear(c, true, want);
        merge(c, "task_arithmetic");
        expect(c, want, "task_arithmetic");
        c->job.param[LM_MERGE_NORMALIZE] = NAN;
        merge(c, "dem");
        expect(c, want, "dem");
        c->job.param[LM_MERGE_NORMALIZE] = 1;
        c->job.param[LM_MERGE_LAMBDA] = 1.2; /* 1.2 = the sum of the weights */
        merge(c, "task_arithmetic");
        expect(c, want, "task_arithmetic, normalized, lambda");
    }
    FOR_CASES(c, 1, want)
    {
        c->model[0].param[LM_MERGE_SCALE] = -1.5;
        for (int64_t k = 0; k < c->job.count; k++)
            want[k] = -1.5 * c->x[0][k];
        merge(c, "passthrough");
        expect(c, want, "passthrough");
    }
}

static void fisher(void **state)
{
    (void)state;
    FOR_CASES(c, 3, want)
    {
        float *f = room((size_t)c->job.count, sizeof *f), one = 0.25f, two = 2, bad = -1;
        lm_err e = { 0 };
        for (int64_t k = 0; k < c->job.count; k++)
            f[k] = (float)fabs(c->x[1][k] - c->b[k]) * (k % 3 != 0);
        c->model[0].extra = f;
        c->model[0].extra_count = c->job.count;
        c->model[1].extra = &one;
        c->model[1].extra_count = 1;
        c->model[2].extra = &two;
        c->model[2].extra_count = 1;
        for (int i = 0; i < 3; i++)
            c->model[i].extra_dtype = LM_DTYPE_F32;
        c->model[2].param[LM_MERGE_WEIGHT] = 0.25;
        for (int64_t k = 0; k < c->job.count; k++) {
            double g[3] = { fmax((double)f[k], 1e-6), 0.25, 0.5 };
            want[k] =
                (g[0] * c->x[0][k] + g[1] * c->x[1][k] + g[2] * c->x[2][k]) / (g[0] + g[1] + g[2]);
        }
        merge(c, "fisher");
        expect(c, want, "fisher");
        assert_null(strstr(c->warned, "importances"));
        /* 0 in every model: the floor makes it a mean, with a warning; 0 in some models is usual */
        memset(f, 0, (size_t)c->job.count * sizeof *f);
        one = 0;
        merge(c, "fisher");
        assert_null(strstr(c->warned, "importances"));
        two = 0;
        for (int64_t k = 0; k < c->job.count; k++)
            want[k] = (c->x[0][k] + c->x[1][k] + 0.25 * c->x[2][k]) / 2.25;
        merge(c, "fisher");
        expect(c, want, "fisher without importances");
        assert_non_null(strstr(c->warned, "the importances of all models are 0"));
        two = 2;
        c->model[1].extra = &bad;
        assert_int_equal(try_merge(c, "fisher", &e), LM_EFORMAT);
        assert_non_null(strstr(e.what, "importance 0 of model 2 is -1"));
        bad = NAN;
        e = (lm_err){ 0 };
        assert_int_equal(try_merge(c, "fisher", &e), LM_ENUMERIC);
        c->model[1].extra = NULL;
        c->model[1].extra_count = 0;
        e = (lm_err){ 0 };
        assert_int_equal(try_merge(c, "fisher", &e), LM_EFORMAT);
        assert_non_null(strstr(e.what, "2 of 3 models have importances"));
        lm_free(f);
    }
}

static void slerp(void **state)
{
    (void)state;
    FOR_CASES(c, 1, want)
    {
        c->job.param[LM_MERGE_T] = 0.3;
        arc(c->b, c->x[0], want, c->job.count, 1, 0.3, false);
        merge(c, "slerp");
        expect(c, want, "slerp");
    }
}

static void nuslerp(void **state)
{
    (void)state;
    FOR_CASES(c, 2, want)
    {
        int64_t n = c->job.count, cols = c->job.ndim ? c->dim[c->job.ndim - 1] : 1;
        set_weights(c, 3, 1, 0);
        for (int based = 0; based < 2; based++)
            for (int way = 0; way < 3; way++) {
                double *v[2] = { room((size_t)n, 8), room((size_t)n, 8) };
                for (int64_t k = 0; k < n; k++)
                    for (int i = 0; i < 2; i++)
                        v[i][k] = c->x[i][k] - (based ? c->b[k] : 0);
                c->job.base = based ? &c->base : NULL;
                c->job.param[LM_MERGE_NUSLERP_FLATTEN] = way == 0;
                c->job.param[LM_MERGE_NUSLERP_ROW_WISE] = way == 2;
                if (way == 0 || c->job.ndim < 2)
                    arc(v[0], v[1], want, n, 1, 0.25, true);
                else if (way == 1)
                    for (int64_t r = 0; r < n; r += cols)
                        arc(v[0] + r, v[1] + r, want + r, cols, 1, 0.25, true);
                else
                    for (int64_t k = 0; k < cols; k++)
                        arc(v[0] + k, v[1] + k, want + k, n / cols, cols, 0.25, true);
                for (int64_t k = 0; based && k < n; k++)
                    want[k] += c->b[k];
                bool degenerate = c->job.ndim < 2 && n == 1; /* any angle will do */
                merge(c, "nuslerp");
                if (!degenerate && lm_dtype_size(c->base.dtype) > 1)
                    expect(c, want, "nuslerp");
                lm_free(v[0]);
                lm_free(v[1]);
            }
    }
}

/* Its tangent at the weighted mean is 0, so it is the mean's direction at the models' mean length
 * (and Karcher's mean is the point whose weighted logarithms add up to 0). */
static void multislerp_and_karcher(void **state)
{
    (void)state;
    FOR_CASES(c, 3, want)
    {
        int64_t n = c->job.count;
        double len[3], m = 0, scale = 0, pull[3] = { 0 }, size = 0;
        set_weights(c, 2, 1, 1);
        c->job.base = NULL;
        if (n < 7)
            continue;
        for (int i = 0; i < 3; i++)
            len[i] = sqrt(dot(c->x[i], c->x[i], n, 1));
        for (int64_t k = 0; k < n; k++)
            want[k] =
                0.5 * c->x[0][k] / len[0] + 0.25 * c->x[1][k] / len[1] + 0.25 * c->x[2][k] / len[2];
        m = sqrt(dot(want, want, n, 1));
        scale = 0.5 * len[0] + 0.25 * len[1] + 0.25 * len[2];
        for (int64_t k = 0; k < n; k++)
            want[k] *= scale / m;
        merge(c, "multislerp");
        for (int64_t k = 0; k < n; k++) /* eps = 1e-8 beside a length */
            assert_true(fabs(c->got[k] - want[k]) <
                        (half_place(c->job.out_dtype) + 1e-6) * fabs(want[k]) * 1.01 + 2e-3);
        for (int i = 0; i < 3; i++)
            c->model[i].param[LM_MERGE_WEIGHT] = NAN;
        if (c->job.out_dtype != LM_DTYPE_F64)
            continue;
        c->job.param[LM_MERGE_MAX_ITER] = 100;
        c->job.param[LM_MERGE_TOL] = 1e-7;
        merge(c, "karcher");
        size = sqrt(dot(c->got, c->got, n, 1));
        assert_true(fabs(size / ((len[0] + len[1] + len[2]) / 3) - 1) < 1e-12);
        for (int i = 0; i < 3; i++) { /* sum of logarithms, against each input */
            for (int q = 0; q < 3; q++) {
                double cosine = dot(c->got, c->x[q], n, 1) / size / len[q], o = acos(cosine);
                pull[i] += o / sin(o) *
                           (dot(c->x[i], c->x[q], n, 1) / len[q] / len[i] -
                            cosine * dot(c->got, c->x[i], n, 1) / size / len[i]);
            }
            assert_true(fabs(pull[i]) < 1e-6);
        }
        c->job.param[LM_MERGE_MAX_ITER] = c->job.param[LM_MERGE_TOL] = NAN;
    }
}

static void stock_span(const merge_case *c, int64_t at, int64_t n, double *want)
{
    double *d[3], t, sum = 0;
    for (int i = 0; i < 3; i++) {
        d[i] = room((size_t)n, 8);
        for (int64_t k = 0; k < n; k++)
            d[i][k] = c->x[i][at + k] - c->b[at + k];
    }
    for (int i = 0; i < 3; i++)
        for (int k = 0; k < i; k++)
            sum += dot(d[i], d[k], n, 1) /
                   fmax(1e-6, sqrt(dot(d[i], d[i], n, 1) * dot(d[k], d[k], n, 1))) / 3;
    t = 3 * sum / (1 + 2 * sum);
    t = fmax(0, fmin(1, t));
    for (int64_t k = 0; k < n; k++)
        want[at + k] =
            t * (c->x[0][at + k] + c->x[1][at + k] + c->x[2][at + k]) / 3 + (1 - t) * c->b[at + k];
    for (int i = 0; i < 3; i++)
        lm_free(d[i]);
}

static void model_stock(void **state)
{
    (void)state;
    FOR_CASES(c, 3, want)
    {
        int64_t n = c->job.count, cols = c->job.ndim ? c->dim[c->job.ndim - 1] : 1;
        for (int64_t k = 0; k < n; k++) /* a common direction */
            for (int i = 0; i < 3; i++)
                c->x[i][k] += 0.4 * (k % 5 < 3);
        for (int i = 0; i < 3; i++)
            put(c, i, c->base.dtype);
        c->job.param[LM_MERGE_CLAMP_T] = 1;
        stock_span(c, 0, n, want);
        merge(c, "model_stock");
        expect(c, want, "model_stock");
        c->job.param[LM_MERGE_FILTER_WISE] = 1;
        for (int64_t k = 0; k < n; k += cols)
            stock_span(c, k, cols, want);
        merge(c, "model_stock");
        expect(c, want, "model_stock by rows");
    }
}

static void pruned(void **state)
{
    static const char *const names[] = { "ties",         "dare_linear", "dare_ties",       "della",
                                         "della_linear", "breadcrumbs", "breadcrumbs_ties" };
    (void)state;
    FOR_CASES(c, 3, want)
    {
        set_weights(c, 0.5, 1, 0.25); /* exact in float too: votes are the same */
        c->model[0].param[LM_MERGE_DENSITY] = 0.4;
        c->model[1].param[LM_MERGE_DENSITY] = 0.7;
        for (int m = 0; m < 7; m++) {
            bool vote = strcmp(names[m] + strlen(names[m]) - 4, "ties") == 0 || m == 3;
            bool draws = names[m][0] == 'd';
            for (int by = 0; by < (vote ? 3 : 1); by++)
                for (int scaling = 0; scaling < (draws ? 3 : 2); scaling++) {
                    int norm = (by + scaling) % 2;
                    if (vote)
                        c->job.param[LM_MERGE_SIGN_ELECTION] = by;
                    c->job.param[LM_MERGE_RESCALE] = scaling;
                    c->job.param[LM_MERGE_NORMALIZE] = norm;
                    c->job.param[LM_MERGE_LAMBDA] = norm ? 0.75 : 1;
                    want_task(c, names[m], vote, want);
                    merge(c, names[m]);
                    expect(c, want, names[m]);
                    c->job.param[LM_MERGE_SIGN_ELECTION] = NAN;
                }
        }
    }
}

static void nearswap(void **state)
{
    (void)state;
    FOR_CASES(c, 1, want)
    {
        c->job.param[LM_MERGE_T] = 0.1;
        for (int64_t k = 0; k < c->job.count; k++) {
            double w = fmax(0, fmin(1, 0.1 / fmax(fabs(c->b[k] - c->x[0][k]), 1e-6)));
            want[k] = w * c->x[0][k] + (1 - w) * c->b[k];
        }
        merge(c, "nearswap");
        expect(c, want, "nearswap");
    }
}

static void want_sce(const merge_case *c, double topk, double *want)
{
    int64_t n = c->job.count, varied = 0;
    double *var = room((size_t)n, 8), energy[3] = { 0 }, all = 0;
    bool *in = room((size_t)n, 1);
    for (int64_t k = 0; k < n; k++) {
        double mean = (c->x[0][k] + c->x[1][k] + c->x[2][k]) / 3;
        for (int i = 0; i < 3; i++)
            var[k] += (c->x[i][k] - mean) * (c->x[i][k] - mean) / 3;
        varied += var[k] > 0;
    }
    ranked *r = rank_all(var, n);
    for (int64_t k = 0; k < n; k++)
        in[r[k].at] = topk >= 1 || k < (int64_t)((double)varied * topk);
    for (int i = 0; i < 3; i++) {
        for (int64_t k = 0; k < n; k++)
            energy[i] += in[k] ? delta(c, i, k) * delta(c, i, k) / (double)n : 0;
        all += energy[i];
    }
    for (int64_t k = 0; k < n; k++) {
        double s = 0, up = 0, under = 0;
        for (int i = 0; in[k] && i < 3; i++)
            s += delta(c, i, k);
        for (int i = 0; in[k] && i < 3; i++)
            if (s >= 0 ? delta(c, i, k) > 0 : delta(c, i, k) < 0) {
                double a = all < 1e-6 ? 1.0 / 3 : energy[i] / all;
                up += a * delta(c, i, k);
                under += a;
            }
        want[k] = c->b[k] + up / fmax(under, 1e-6);
    }
    lm_free(r);
    lm_free(in);
    lm_free(var);
}

static void sce(void **state)
{
    (void)state;
    FOR_CASES(c, 3, want)
    {
        want_sce(c, 1, want);
        merge(c, "sce");
        expect(c, want, "sce");
        if (c->job.out_dtype != LM_DTYPE_F64 && c->job.out_dtype != LM_DTYPE_F32)
            continue; /* a variance in float ranks near ones otherwise */
        c->job.param[LM_MERGE_SELECT_TOPK] = 0.3;
        want_sce(c, 0.3, want);
        merge(c, "sce");
        expect(c, want, "sce, select_topk");
        c->job.param[LM_MERGE_SELECT_TOPK] = NAN;
    }
}

static void want_ram(const merge_case *c, double eps, double r, double alpha, double *want)
{
    int n = c->job.n_models;
    double shared[MOST] = { 0 }, unique[MOST] = { 0 };
    for (int plus = 0; plus < 2; plus++)
        for (int64_t k = 0; k < c->job.count; k++) {
            double sum = 0;
            int active = 0;
            for (int i = 0; i < n; i++)
                active += fabs(delta(c, i, k)) > eps;
            for (int i = 0; i < n; i++) {
                double rho = unique[i] > 0 ? fmin(shared[i] / unique[i], alpha) : 0;
                if (!(fabs(delta(c, i, k)) > eps))
                    continue;
                if (!plus)
                    *(active == 1 ? &unique[i] : &shared[i]) += 1;
                sum += active == 1 ? delta(c, i, k) * (1 + r * rho) : delta(c, i, k) / active;
            }
            want[k] = c->b[k] + sum;
        }
}

static void ram(void **state)
{
    (void)state;
    FOR_CASES(c, 3, want)
    {
        want_ram(c, 1e-5, 0, 0, want);
        merge(c, "ram");
        expect(c, want, "ram");
        c->job.param[LM_MERGE_RAM_EPSILON] = 0.21;
        want_ram(c, 0.21, 0, 0, want);
        merge(c, "ram");
        expect(c, want, "ram, epsilon");
        want_ram(c, 0.21, 0.1, 0.2, want);
        merge(c, "ramplus_tl");
        expect(c, want, "ramplus_tl");
        c->job.param[LM_MERGE_RAM_R] = 2;
        c->job.param[LM_MERGE_RAM_ALPHA] = 9;
        want_ram(c, 0.21, 2, 9, want);
        merge(c, "ramplus_tl");
        expect(c, want, "ramplus_tl, r and alpha");
    }
}

static void arcee(void **state)
{
    (void)state;
    FOR_CASES(c, 1, want)
    {
        int64_t n = c->job.count, cols = c->job.ndim ? c->dim[c->job.ndim - 1] : 1;
        double *score = room((size_t)n, 8), at[3];
        for (int64_t r = 0; r < n; r += cols) {
            double sb = 0, sx = 0, K = 0;
            for (int64_t k = r; k < r + cols; k++) {
                sb += exp(c->b[k]);
                sx += exp(c->x[0][k]);
            }
            for (int64_t k = r; k < r + cols; k++) {
                double p = exp(c->x[0][k]) / sx + 1e-8, q = exp(c->b[k]) / sb + 1e-8;
                K += p * log(p / q);
            }
            for (int64_t k = r; k < r + cols; k++)
                score[k] = fabs(delta(c, 0, k)) * K;
        }
        ranked *order = rank_all(score, n);
        for (int i = 0; i < 3; i++)
            at[i] = order[n - 1 - (int64_t)(0.25 * (i + 1) * (double)(n - 1))].size;
        merge(c, "arcee_fusion");
        for (int64_t k = 0; k < n && cols > 1; k++) {
            double t = at[1] + 1.5 * (at[2] - at[0]);
            if (fabs(score[k] - t) > 1e-5 * t) { /* nearer, the arithmetic decides */
                assert_true(c->got[k] == (score[k] >= t ? c->x[0][k] : c->b[k]));
                want[0] += score[k] >= t;
            }
        }
        if (n > 1000)
            assert_true(want[0] > 0 && want[0] < (double)n / 2);
        lm_free(order);
        lm_free(score);
    }
}

/* Solve A x = b, [n, n], by elimination; b is replaced. */
static void eliminate(double *A, double *b, int n)
{
    for (int p = 0; p < n; p++)
        for (int r = 0; r < n; r++) {
            double f = r == p ? 0 : A[r * n + p] / A[p * n + p];
            for (int k = p; k < n; k++)
                A[r * n + k] -= f * A[p * n + k];
            b[r] -= f * b[p];
        }
    for (int r = 0; r < n; r++)
        b[r] /= A[r * n + r];
}

static void regmean(void **state)
{
    enum { IN = 13, OUT = 101, ROWS = 40 };
    (void)state;
    for (int turned = 0; turned < 2; turned++)
        for (int ty = 0; ty < 4; ty++) {
            merge_case *c = new_case(3, types[ty], 2, turned ? IN : OUT, turned ? OUT : IN, ty);
            float G[3][IN * IN] = { 0 };
            double *want = room(IN * OUT, 8), A[IN * IN], b[IN];
            for (int i = 0; i < 3; i++) {
                lm_rng r = lm_rng_make(3, "inputs", (uint64_t)i);
                for (int s = 0; s < ROWS; s++)
                    for (int p = 0; p < IN; p++)
                        for (int q = 0; q < IN; q++)
                            G[i][p * IN + q] += (float)lm_rng_normal(r, (uint64_t)(s * IN + p)) *
                                                (float)lm_rng_normal(r, (uint64_t)(s * IN + q));
                c->model[i].extra = G[i];
                c->model[i].extra_dtype = LM_DTYPE_F32;
                c->model[i].extra_count = IN * IN;
            }
            c->job.transposed = turned;
            for (int o = 0; o < OUT; o++) {
                memset(A, 0, sizeof A);
                memset(b, 0, sizeof b);
                for (int i = 0; i < 3; i++)
                    for (int p = 0; p < IN; p++)
                        for (int q = 0; q < IN; q++) {
                            double g = (double)G[i][p * IN + q] * (p == q ? 1 : 0.9);
                            A[p * IN + q] += g;
                            b[p] += g * c->x[i][turned ? q * OUT + o : o * IN + q];
                        }
                eliminate(A, b, IN);
                for (int p = 0; p < IN; p++)
                    want[turned ? p * OUT + o : o * IN + p] = b[p];
            }
            merge(c, "regmean");
            expect(c, want, "regmean");
            lm_err e = { 0 };
            float good = G[1][5];
            G[1][5] = NAN;
            assert_int_equal(try_merge(c, "regmean", &e), LM_ENUMERIC);
            assert_string_equal(e.what, "element [0,5] of the Gram matrix of model 2 is nan");
            G[1][5] = good + 100;
            e = (lm_err){ 0 };
            assert_int_equal(try_merge(c, "regmean", &e), LM_EFORMAT);
            assert_non_null(
                strstr(e.what, "row 0 of the matrix of model 2 cannot be that of a Gram"));
            G[1][5] = good;
            G[2][3 * IN + 3] = -G[2][3 * IN + 3];
            e = (lm_err){ 0 };
            assert_int_equal(try_merge(c, "regmean", &e), LM_EFORMAT);
            assert_non_null(strstr(e.what, "row 3 of the matrix of model 3"));
            e = (lm_err){ 0 };
            for (int i = 0; i < 3; i++)
                memset(G[i], 0, sizeof G[i]);
            assert_int_equal(try_merge(c, "regmean", &e), LM_ENUMERIC);
            assert_non_null(strstr(e.where, "layer.weight"));
            c->model[1].extra_count = IN;
            e = (lm_err){ 0 };
            assert_int_equal(try_merge(c, "regmean", &e), LM_EFORMAT);
            for (int i = 0; i < 3; i++)
                c->model[i].extra_count = 0;
            for (int k = 0; k < IN * OUT; k++)
                want[k] = (c->x[0][k] + c->x[1][k] + c->x[2][k]) / 3;
            merge(c, "regmean");
            expect(c, want, "regmean without matrices");
            lm_free(want);
            free_case(c);
        }
}

static void mixed_types(void **state)
{
    (void)state;
    merge_case *c = new_case(3, LM_DTYPE_BF16, 1, 5001, 0, 5);
    double *want = room(5001, 8);
    put(c, 1, LM_DTYPE_F16);
    put(c, 2, LM_DTYPE_F8E5M2);
    set_weights(c, 0.5, 0.25, 1);
    for (int wide = 0; wide < 3; wide++) {
        if (wide)
            put(c, 0, wide == 1 ? LM_DTYPE_F32 : LM_DTYPE_F64);
        c->job.out_dtype = wide == 1 ? LM_DTYPE_F16 : LM_DTYPE_F32;
        c->job.param[LM_MERGE_RESCALE] = c->job.param[LM_MERGE_NORMALIZE] = 0;
        c->model[0].param[LM_MERGE_DENSITY] = 0.3;
        want_task(c, "ties", true, want);
        merge(c, "ties");
        expect(c, want, "ties of mixed types");
        c->job.param[LM_MERGE_RESCALE] = c->job.param[LM_MERGE_NORMALIZE] = NAN;
        c->model[0].param[LM_MERGE_DENSITY] = NAN;
        want_linear(c, true, want);
        merge(c, "dem");
        expect(c, want, "dem of mixed types");
    }
    lm_free(want);
    free_case(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sums),
        cmocka_unit_test(fisher),
        cmocka_unit_test(slerp),
        cmocka_unit_test(nuslerp),
        cmocka_unit_test(multislerp_and_karcher),
        cmocka_unit_test(model_stock),
        cmocka_unit_test(pruned),
        cmocka_unit_test(nearswap),
        cmocka_unit_test(sce),
        cmocka_unit_test(ram),
        cmocka_unit_test(arcee),
        cmocka_unit_test(regmean),
        cmocka_unit_test(mixed_types),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
