/* SPDX-License-Identifier: Apache-2.0 */
/* methods_sphere.c -- merges that use angles: SLERP, NuSLERP, multi-SLERP, Karcher mean, model
 * stock.
 *
 * Each result lies in the span of the inputs (or of their deltas), so the matrix of inner products,
 * summed in double in one pass, is enough; all else is computed in coordinates: a vector is its
 * coefficients on the inputs, u . v = sum u_i G_ij v_j.  A second pass makes the weighted sum. */
#include <stdatomic.h>

#include "merge/blocks.h"
#include "merge/entries.h"

/* The n vectors of a job, with or without the base subtracted. */
typedef struct {
    const lm_merge_job *job;
    const lm_blend *loops;
    const lm_merge_operand *of[LM_MERGE_MOST_MODELS];
    const lm_merge_operand *base;
    int n;
    void *cells;         /* n + 2 rows per worker */
    double *parts;       /* of the sums of chunks */
    double *gram;        /* one matrix per worker */
    double *c;           /* n coefficients per worker */
    _Atomic int64_t odd; /* rows that deserve a warning */
    _Atomic int failed;
    /* Coefficients from inner products G [n, n]; scratch: 4 n numbers.  False: undefined. */
    bool (*solve)(const lm_merge_job *j, int n, const double *G, double *c, double *room,
                  bool *odd);
} angles;

static size_t lay_out(angles *a, lm_merge_scratch *s, int n, int threads, int64_t count)
{
    size_t m = (size_t)n;
    a->cells = lm_merge_take_cells(s, n + 2, threads);
    a->gram = lm_merge_take(s, m * (m + 5) * (size_t)threads, sizeof(double));
    a->parts = lm_merge_take(s, m * m * (size_t)lm_merge_chunks(count), sizeof(double));
    return s->used;
}

/* Inner products of n elements at `at`, added to the upper triangle of G. */
static void products(const angles *a, int64_t at, int64_t n, void *cells, double *G)
{
    const lm_blend *b = a->loops;
    void *base = lm_merge_cell(b, cells, a->n);
    if (a->base)
        b->load(a->base->dtype, a->base->data, at, base, n);
    for (int i = 0; i < a->n; i++) {
        const lm_merge_operand *o = a->of[i];
        void *x = lm_merge_cell(b, cells, i);
        if (a->base)
            b->delta(o->dtype, o->data, at, base, x, n);
        else
            b->load(o->dtype, o->data, at, x, n);
        for (int k = 0; k <= i; k++)
            G[k * a->n + i] += b->dot(lm_merge_cell(b, cells, k), x, n);
    }
}

static void mirror(int n, double *G)
{
    for (int i = 0; i < n; i++)
        for (int k = 0; k < i; k++)
            G[i * n + k] = G[k * n + i];
}

static void gram_block(const lm_merge_walk *w, int64_t at, int64_t n, void *cells, double *sums)
{
    products(w->ctx, at, n, cells, sums);
}

/* One set of coefficients for the whole tensor. */
static lm_code whole(angles *a, lm_err *e)
{
    const lm_merge_job *j = a->job;
    size_t n = (size_t)a->n;
    double *G = a->gram, *c = G + n * n, *room = c + n;
    lm_merge_walk w = { .job = j,
                        .loops = a->loops,
                        .ctx = a,
                        .block = gram_block,
                        .cells = a->cells,
                        .rows = a->n + 2,
                        .n_sums = a->n * a->n,
                        .parts = a->parts };
    lm_merge_sum s = { a->of, a->n, c, a->base };
    bool odd = false;
    lm_merge_go(&w, G);
    mirror(a->n, G);
    if (!a->solve(j, a->n, G, c, room, &odd))
        return lm_fail(e, LM_ENUMERIC, j->name, "change the weights, or merge linearly",
                       "the models cancel out: the direction between them is undefined");
    a->odd = odd;
    for (size_t i = 0; i < n; i++)
        if (!isfinite(c[i])) {
            lm_log(j->sink, LM_LOG_WARN,
                   "%s: an input holds NaN or infinity, so all of the merged tensor is NaN",
                   j->name);
            break;
        }
    lm_merge_sum_run(j, &s, a->cells);
    return LM_OK;
}

static void each_row(void *ctx, int64_t begin, int64_t end, int worker)
{
    angles *a = ctx;
    size_t n = (size_t)a->n;
    int64_t cols = lm_merge_cols(a->job), step = LM_BLEND_BLOCK;
    double *G = a->gram + (size_t)worker * n * (n + 5), *c = G + n * n, *room = c + n;
    void *cells = lm_merge_cells_of(a->cells, a->n + 2, worker);
    lm_merge_sum s = { a->of, a->n, c, a->base };
    for (int64_t r = begin; r < end; r++) {
        bool odd = false;
        memset(G, 0, n * n * sizeof *G);
        for (int64_t k = 0; k < cols; k += step)
            products(a, r * cols + k, cols - k < step ? cols - k : step, cells, G);
        mirror(a->n, G);
        if (!a->solve(a->job, a->n, G, c, room, &odd)) {
            atomic_store(&a->failed, 1);
            return;
        }
        if (odd)
            atomic_fetch_add(&a->odd, 1);
        for (int64_t k = 0; k < cols; k += step)
            lm_merge_sum_block(a->job, a->loops, &s, r * cols + k,
                               cols - k < step ? cols - k : step, cells);
    }
}

static lm_code by_rows(angles *a, lm_err *e)
{
    int64_t cols = lm_merge_cols(a->job), grain = cols ? LM_MERGE_CHUNK / cols : 1;
    lm_par_for(a->job->par, lm_merge_rows(a->job), grain ? grain : 1, each_row, a);
    if (atomic_load(&a->failed))
        return lm_fail(e, LM_ENUMERIC, a->job->name, "change the weights, or merge linearly",
                       "a row of the models cancels out: the direction between them is undefined");
    return LM_OK;
}

/* Of input i. */
static double length(const double *G, int n, int i)
{
    return sqrt(G[i * n + i]);
}

static double clamp(double v, double lo, double hi)
{
    return v < lo ? lo : v > hi ? hi : v;
}

/* (1 - t) : t along the arc of angle `o`; straight where the angle is undefined. */
static void arc(double t, double o, bool straight, double *c)
{
    c[0] = straight ? 1 - t : sin((1 - t) * o) / sin(o);
    c[1] = straight ? t : sin(t * o) / sin(o);
}

static bool solve_slerp(const lm_merge_job *j, int n, const double *G, double *c, double *room,
                        bool *odd)
{
    double a = length(G, n, 0), b = length(G, n, 1);
    double cosine = G[1] / ((a > 1e-8 ? a : 1) * (b > 1e-8 ? b : 1));
    (void)room;
    (void)odd;
    arc(j->param[LM_MERGE_T], acos(cosine), fabs(cosine) > 0.9995, c);
    return true;
}

static bool solve_nuslerp(const lm_merge_job *j, int n, const double *G, double *c, double *room,
                          bool *odd)
{
    double a = length(G, n, 0), b = length(G, n, 1), t;
    double cosine = G[1] / ((a < 1e-7 ? 1e-7 : a) * (b < 1e-7 ? 1e-7 : b));
    double w0 = lm_merge_of(j, 0, LM_MERGE_WEIGHT, j->param[LM_MERGE_WEIGHT]);
    double w1 = lm_merge_of(j, 1, LM_MERGE_WEIGHT, j->param[LM_MERGE_WEIGHT]);
    (void)room;
    (void)odd;
    t = fabs(w0 + w1) < 1e-6 ? 0.5 : w1 / (w0 + w1);
    cosine = clamp(cosine, -1, 1);
    arc(t, acos(cosine), 1 - cosine * cosine <= 1e-16, c);
    return true;
}

/* x . G . y */
static double inner(int n, const double *G, const double *x, const double *y)
{
    double sum = 0;
    for (int i = 0; i < n; i++)
        for (int k = 0; k < n; k++)
            sum += x[i] * G[i * n + k] * y[k];
    return sum;
}

static double norm_of(int n, const double *G, const double *x)
{
    double s = inner(n, G, x, x);
    return s < 0 ? 0 : sqrt(s);
}

/* Inner product of coordinates x with input i. */
static double along(int n, const double *G, const double *x, int i)
{
    double sum = 0;
    for (int k = 0; k < n; k++)
        sum += x[k] * G[k * n + i];
    return sum;
}

static bool solve_multislerp(const lm_merge_job *j, int n, const double *G, double *c, double *room,
                             bool *odd)
{
    double eps = j->param[LM_MERGE_EPS], sum = 0, scale = 0, largest = 0, size, turn;
    double *w = room, *m = room + n, *T = room + 2 * n;
    (void)odd;
    for (int i = 0; i < n; i++)
        sum += w[i] = lm_merge_of(j, i, LM_MERGE_WEIGHT, j->param[LM_MERGE_WEIGHT]);
    if (lm_merge_true(j, LM_MERGE_NORMALIZE_WEIGHTS) && lm_merge_cancels(w, n))
        return false;
    for (int i = 0; i < n; i++) {
        w[i] /= lm_merge_true(j, LM_MERGE_NORMALIZE_WEIGHTS) ? sum : 1;
        scale += w[i] * length(G, n, i);
        m[i] = w[i] / (length(G, n, i) + eps);
        c[i] = w[i];
        largest = fmax(largest, G[i * n + i]);
    }
    size = norm_of(n, G, m);
    if (largest == 0) { /* tensors that no model has changed */
        memset(c, 0, (size_t)n * sizeof *c);
        return true;
    }
    if (size < eps)
        return n == 2; /* the weighted sum with the coefficients in c */
    for (int i = 0; i < n; i++) {
        m[i] /= size;
        T[i] = 0;
    }
    for (int i = 0; i < n; i++) {
        double unit = w[i] / (length(G, n, i) + eps), dot = along(n, G, m, i) * unit;
        T[i] += unit;
        for (int k = 0; k < n; k++)
            T[k] -= dot * m[k];
    }
    turn = norm_of(n, G, T) + eps;
    for (int i = 0; i < n; i++)
        c[i] = scale * (m[i] * cos(turn) + T[i] * (sin(turn) / turn));
    return true;
}

/* One step of the mean: the tangent T at u; returns its length. */
static double karcher_tangent(int n, const double *G, const double *u, const double *unit,
                              double share, double tol, double *T)
{
    memset(T, 0, (size_t)n * sizeof *T);
    for (int i = 0; i < n; i++) {
        double cosine, o;
        if (unit[i] == 0)
            continue;
        cosine = clamp(along(n, G, u, i) * unit[i], -1, 1);
        o = acos(cosine);
        if (o < tol)
            continue;
        o = share * o / sin(o);
        T[i] += o * unit[i];
        for (int k = 0; k < n; k++)
            T[k] -= o * cosine * u[k];
    }
    return norm_of(n, G, T);
}

static void to_length_one(int n, const double *G, double *u, double least)
{
    double size = norm_of(n, G, u);
    for (int i = 0; i < n && size > least; i++)
        u[i] /= size;
}

static bool solve_karcher(const lm_merge_job *j, int n, const double *G, double *c, double *room,
                          bool *odd)
{
    double tol = j->param[LM_MERGE_TOL], scale = 0, t;
    double *unit = room, *T = room + n;
    int kept = 0, first = -1;
    (void)odd;
    for (int i = 0; i < n; i++) {
        double size = length(G, n, i);
        scale += size / n;
        unit[i] = size <= tol ? 0 : 1 / size;
        kept += unit[i] != 0;
        first = first < 0 && unit[i] != 0 ? i : first;
    }
    for (int i = 0; i < n; i++)
        c[i] = kept ? unit[i] / kept : 0;
    if (kept && norm_of(n, G, c) < tol)
        for (int i = 0; i < n; i++)
            c[i] = i == first ? unit[i] : 0;
    to_length_one(n, G, c, 0);
    for (int step = 0; kept && step < (int)j->param[LM_MERGE_MAX_ITER]; step++) {
        t = karcher_tangent(n, G, c, unit, 1.0 / kept, tol, T);
        if (!(t >= tol))
            break;
        for (int i = 0; i < n; i++)
            c[i] = cos(t) * c[i] + sin(t) * T[i] / t;
        to_length_one(n, G, c, tol);
    }
    for (int i = 0; i < n; i++)
        c[i] *= scale;
    return true;
}

static bool solve_stock(const lm_merge_job *j, int n, const double *G, double *c, double *room,
                        bool *odd)
{
    double sum = 0, t, under;
    (void)room;
    for (int i = 0; i < n; i++)
        for (int k = i + 1; k < n; k++) {
            double size = length(G, n, i) * length(G, n, k);
            sum += clamp(G[i * n + k] / (size < 1e-6 ? 1e-6 : size), -1, 1);
        }
    sum /= (double)n * (n - 1) / 2;
    *odd = sum < 0;
    under = 1 + (n - 1) * sum;
    /* no finite ratio: the result is the base, as in mergekit */
    t = under < 1e-6 ? 0 : n * sum / under;
    if (lm_merge_true(j, LM_MERGE_CLAMP_T))
        t = clamp(t, 0, 1);
    for (int i = 0; i < n; i++)
        c[i] = t / n;
    return true;
}

static void start(angles *a, const lm_merge_job *j, bool base_is_first)
{
    lm_merge_scratch s = { .at = j->work };
    a->job = j;
    a->loops = lm_merge_loops(j);
    a->n = 0;
    if (base_is_first)
        a->of[a->n++] = j->base;
    else
        a->base = j->base;
    lm_merge_list(j, a->of + a->n);
    a->n += j->n_models;
    lay_out(a, &s, a->n, lm_par_threads(j->par), j->count);
}

static size_t work(const lm_merge_job *j, int threads)
{
    lm_merge_scratch s = { 0 };
    angles a;
    return lay_out(&a, &s, j->n_models + 1, threads, j->count);
}

static lm_code slerp(const lm_merge_job *j, lm_err *e)
{
    angles a = { .solve = solve_slerp };
    start(&a, j, true);
    return whole(&a, e);
}

/* Compute the rows of the transposed matrix, a strip of columns at a time. */
enum { STRIP = 256 };

static void column_products(const angles *a, int64_t col, int64_t n, void *cells, double *G)
{
    const lm_blend *b = a->loops;
    int64_t rows = a->job->dim[0], cols = a->job->count / rows;
    lm_dtype real = b->real == 8 ? LM_DTYPE_F64 : LM_DTYPE_F32;
    void *x[2] = { lm_merge_cell(b, cells, 0), lm_merge_cell(b, cells, 1) };
    void *base = lm_merge_cell(b, cells, 2);
    memset(G, 0, 3 * STRIP * sizeof *G);
    for (int64_t r = 0; r < rows; r++) {
        int64_t at = r * cols + col;
        if (a->base)
            b->load(a->base->dtype, a->base->data, at, base, n);
        for (int m = 0; m < 2; m++) {
            if (a->base)
                b->delta(a->of[m]->dtype, a->of[m]->data, at, base, x[m], n);
            else
                b->load(a->of[m]->dtype, a->of[m]->data, at, x[m], n);
        }
        for (int64_t i = 0; i < n; i++) {
            double p = lm_get(real, x[0], i), q = lm_get(real, x[1], i);
            G[i] += p * p;
            G[STRIP + i] += p * q;
            G[2 * STRIP + i] += q * q;
        }
    }
}

static void each_strip(void *ctx, int64_t begin, int64_t end, int worker)
{
    angles *a = ctx;
    const lm_merge_job *j = a->job;
    const lm_blend *b = a->loops;
    int64_t rows = j->dim[0], cols = j->count / rows, n = end - begin;
    double G[3 * STRIP], by[2 * STRIP], room[8];
    void *cells = lm_merge_cells_of(a->cells, a->n + 2, worker);
    void *x = lm_merge_cell(b, cells, 0), *acc = lm_merge_cell(b, cells, 1);
    void *base = lm_merge_cell(b, cells, 2), *c = lm_merge_cell(b, cells, 3);
    lm_dtype real = b->real == 8 ? LM_DTYPE_F64 : LM_DTYPE_F32;
    bool odd;
    column_products(a, begin, n, cells, G);
    for (int64_t i = 0; i < n; i++) {
        double g[4] = { G[i], G[STRIP + i], G[STRIP + i], G[2 * STRIP + i] }, pair[2];
        a->solve(j, 2, g, pair, room, &odd);
        by[i] = pair[0];
        by[STRIP + i] = pair[1];
    }
    for (int64_t r = 0; r < rows; r++) {
        int64_t at = r * cols + begin;
        if (a->base)
            b->load(a->base->dtype, a->base->data, at, base, n);
        b->fill(acc, 0, n);
        for (int m = 0; m < 2; m++) {
            if (a->base)
                b->delta(a->of[m]->dtype, a->of[m]->data, at, base, x, n);
            else
                b->load(a->of[m]->dtype, a->of[m]->data, at, x, n);
            for (int64_t i = 0; i < n; i++)
                lm_set(real, c, i, by[m * STRIP + i]);
            b->mul(c, x, n);
            b->axpy(x, 1, acc, n);
        }
        if (a->base)
            b->axpy(base, 1, acc, n);
        b->store(j->out_dtype, j->out, at, acc, n);
    }
}

static lm_code nuslerp(const lm_merge_job *j, lm_err *e)
{
    angles a = { .solve = solve_nuslerp };
    start(&a, j, false);
    if (j->ndim < 2 || lm_merge_true(j, LM_MERGE_NUSLERP_FLATTEN))
        return whole(&a, e);
    if (!lm_merge_true(j, LM_MERGE_NUSLERP_ROW_WISE))
        return by_rows(&a, e);
    if (j->count)
        lm_par_for(j->par, j->count / j->dim[0], STRIP, each_strip, &a);
    return LM_OK;
}

static lm_code multislerp(const lm_merge_job *j, lm_err *e)
{
    angles a = { .solve = solve_multislerp };
    if (j->n_models == 1) {
        lm_merge_copy(j, &j->model[0]);
        return LM_OK;
    }
    start(&a, j, false);
    return whole(&a, e);
}

static lm_code karcher(const lm_merge_job *j, lm_err *e)
{
    angles a = { .solve = solve_karcher };
    if (j->n_models == 1) {
        lm_merge_copy(j, &j->model[0]);
        return LM_OK;
    }
    start(&a, j, false);
    return whole(&a, e);
}

static lm_code model_stock(const lm_merge_job *j, lm_err *e)
{
    angles a = { .solve = solve_stock };
    bool rows = lm_merge_true(j, LM_MERGE_FILTER_WISE);
    lm_code rc;
    start(&a, j, false);
    rc = rows ? by_rows(&a, e) : whole(&a, e);
    if (!rc && a.odd)
        lm_log(j->sink, LM_LOG_WARN,
               "%s: the deltas point away from each other (mean cosine below 0%s), so model stock "
               "%s",
               j->name, rows ? " in some rows" : "",
               lm_merge_true(j, LM_MERGE_CLAMP_T) ? "keeps the base"
                                                  : "moves against them (clamp_t holds it)");
    return rc;
}

#define B LM_MERGE_BIT
const lm_merge_method lm_merge_sphere_methods[] = {
    { .name = "slerp",
      .about = "along the arc from the base to the model, by t of its angle",
      .source = "Shoemake, SIGGRAPH 1985",
      .base_required = true,
      .base_allowed = true,
      .min_models = 1,
      .max_models = 1,
      .takes = B(LM_MERGE_T),
      .required = B(LM_MERGE_T),
      .work = work,
      .run = slerp },
    { .name = "nuslerp",
      .about = "along the arc between two models or their deltas, whole or by rows or columns",
      .source = "mergekit",
      .base_allowed = true,
      .min_models = 2,
      .max_models = 2,
      .takes = B(LM_MERGE_WEIGHT) | B(LM_MERGE_NUSLERP_FLATTEN) | B(LM_MERGE_NUSLERP_ROW_WISE),
      .required = B(LM_MERGE_WEIGHT),
      .defaults = B(LM_MERGE_NUSLERP_FLATTEN) | B(LM_MERGE_NUSLERP_ROW_WISE),
      .def = { [LM_MERGE_NUSLERP_FLATTEN] = 1 },
      .work = work,
      .run = nuslerp },
    { .name = "multislerp",
      .about = "mean on the sphere of several models or deltas, in the tangent space at their mean",
      .source = "https://goddard.blog/posts/multislerp-wow-what-a-cool-idea",
      .base_allowed = true,
      .min_models = 1,
      .takes = B(LM_MERGE_WEIGHT) | B(LM_MERGE_NORMALIZE_WEIGHTS) | B(LM_MERGE_EPS),
      .required = B(LM_MERGE_WEIGHT),
      .defaults = B(LM_MERGE_NORMALIZE_WEIGHTS) | B(LM_MERGE_EPS),
      .def = { [LM_MERGE_NORMALIZE_WEIGHTS] = 1, [LM_MERGE_EPS] = 1e-8 },
      .work = work,
      .run = multislerp },
    { .name = "karcher",
      .about = "the point of the sphere with the least squared angles to the models",
      .source = "arXiv:2603.04972",
      .min_models = 1,
      .takes = B(LM_MERGE_MAX_ITER) | B(LM_MERGE_TOL),
      .defaults = B(LM_MERGE_MAX_ITER) | B(LM_MERGE_TOL),
      .def = { [LM_MERGE_MAX_ITER] = 10, [LM_MERGE_TOL] = 1e-5 },
      .work = work,
      .run = karcher },
    { .name = "model_stock",
      .about = "towards the models' mean, as far as the angles between their deltas say",
      .source = "arXiv:2403.19522",
      .base_required = true,
      .base_allowed = true,
      .min_models = 2,
      .takes = B(LM_MERGE_FILTER_WISE) | B(LM_MERGE_CLAMP_T),
      .defaults = B(LM_MERGE_FILTER_WISE) | B(LM_MERGE_CLAMP_T),
      .work = work,
      .run = model_stock },
    { .name = NULL },
};
