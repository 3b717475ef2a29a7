/* SPDX-License-Identifier: Apache-2.0 */
/* methods_gram.c -- RegMean (arXiv:2212.09849): the linear layer whose outputs on every model's
 * inputs are closest to that model's outputs.
 *
 *   W = (sum G_i)^-1 sum G_i W_i,   G = alpha X'X + (1 - alpha) diag(X'X),   W [in, out]
 *
 * The layers of Hugging Face are [out, in]: a row o of the result is sum_i (row o of W_i) G_i times
 * the inverse, so the rows are solved in panels, one panel per thread.  The sum of the G is
 * factored once, in double. */
#include "merge/blocks.h"
#include "merge/entries.h"
#include "merge/finite.h"
#include "numeric/lapack.h"

enum { PANEL = 96, SLICE = 64 };

typedef struct {
    const lm_merge_job *job;
    const lm_lapack *lapack;
    int64_t in, out;
    double alpha;
    double *sum;   /* [in, in], then its factor */
    double *panel; /* per worker: weights [PANEL, in], products [PANEL, in], slice [SLICE, in] */
} regmean_task;

static bool usable(const lm_merge_job *j)
{
    int64_t in = j->ndim == 2 ? j->dim[!j->transposed] : 0, square;
    bool all = in > 0 && in < INT32_MAX;
    if (__builtin_mul_overflow(in, in, &square))
        return false;
    for (int i = 0; i < j->n_models; i++)
        all &= j->model[i].extra_count == square;
    return all;
}

static size_t per_worker(const regmean_task *t)
{
    return (size_t)(2 * PANEL + SLICE) * (size_t)t->in;
}

static size_t lay_out(regmean_task *t, const lm_merge_job *j, int threads)
{
    lm_merge_scratch s = { .at = j->work };
    t->job = j;
    t->in = j->dim[!j->transposed];
    t->out = j->dim[j->transposed];
    t->alpha = j->param[LM_MERGE_ALPHA];
    t->sum = lm_merge_take(&s, (size_t)t->in * (size_t)t->in, sizeof(double));
    t->panel = lm_merge_take(&s, per_worker(t) * (size_t)threads, sizeof(double));
    return s.used;
}

static size_t regmean_work(const lm_merge_job *j, int threads)
{
    regmean_task t;
    lm_merge_job sized = *j;
    sized.work = NULL;
    return usable(j) ? lay_out(&t, &sized, threads) : lm_merge_sum_work(threads);
}

/* Rows k .. k + n - 1 of G_i, regularised. */
static void gram_rows(const regmean_task *t, int i, int64_t k, int64_t n, double *to)
{
    const lm_merge_operand *o = &t->job->model[i];
    const lm_blend *b = lm_blend_at(t->job->cpu, true);
    for (int64_t r = 0; r < n; r++) {
        double *row = to + r * t->in, diagonal;
        for (int64_t c = 0; c < t->in; c += LM_BLEND_BLOCK)
            b->load(o->extra_dtype, o->extra, (k + r) * t->in + c, row + c,
                    t->in - c < LM_BLEND_BLOCK ? t->in - c : LM_BLEND_BLOCK);
        diagonal = row[k + r];
        for (int64_t c = 0; c < t->in; c++)
            row[c] *= t->alpha;
        row[k + r] = diagonal;
    }
}

static void add_rows(void *ctx, int64_t begin, int64_t end, int worker)
{
    const regmean_task *t = ctx;
    double *slice = t->panel + (size_t)worker * per_worker(t);
    for (int i = 0; i < t->job->n_models; i++) {
        gram_rows(t, i, begin, end - begin, slice);
        for (int64_t k = 0; k < (end - begin) * t->in; k++) {
            double *to = &t->sum[begin * t->in + k];
            *to = i ? *to + slice[k] : slice[k];
        }
    }
}

/* Copy outputs begin .. end - 1 of a model to rows [n, in], and back. */
static void load_panel(const regmean_task *t, int i, int64_t begin, int64_t n, double *w)
{
    const lm_merge_operand *o = &t->job->model[i];
    const lm_blend *b = lm_blend_at(t->job->cpu, true);
    double cell[PANEL];
    if (!t->job->transposed) {
        for (int64_t at = 0; at < n * t->in; at += LM_BLEND_BLOCK)
            b->load(o->dtype, o->data, begin * t->in + at, w + at,
                    n * t->in - at < LM_BLEND_BLOCK ? n * t->in - at : LM_BLEND_BLOCK);
        return;
    }
    for (int64_t k = 0; k < t->in; k++) {
        b->load(o->dtype, o->data, k * t->out + begin, cell, n);
        for (int64_t r = 0; r < n; r++)
            w[r * t->in + k] = cell[r];
    }
}

static void store_panel(const regmean_task *t, int64_t begin, int64_t n, const double *w)
{
    const lm_merge_job *j = t->job;
    const lm_blend *b = lm_blend_at(j->cpu, true);
    double cell[PANEL];
    if (!j->transposed) {
        for (int64_t at = 0; at < n * t->in; at += LM_BLEND_BLOCK)
            b->store(j->out_dtype, j->out, begin * t->in + at, w + at,
                     n * t->in - at < LM_BLEND_BLOCK ? n * t->in - at : LM_BLEND_BLOCK);
        return;
    }
    for (int64_t k = 0; k < t->in; k++) {
        for (int64_t r = 0; r < n; r++)
            cell[r] = w[r * t->in + k];
        b->store(j->out_dtype, j->out, k * t->out + begin, cell, n);
    }
}

/* LAPACK reads row-major [n, in] as n columns of length `in`. */
static void solve_panel(void *ctx, int64_t begin, int64_t end, int worker)
{
    const regmean_task *t = ctx;
    int in = (int)t->in, n = (int)(end - begin);
    double *w = t->panel + (size_t)worker * per_worker(t), *p = w + PANEL * t->in;
    double *slice = p + PANEL * t->in;
    memset(p, 0, (size_t)(end - begin) * (size_t)t->in * sizeof *p);
    for (int i = 0; i < t->job->n_models; i++) {
        load_panel(t, i, begin, end - begin, w);
        for (int64_t k = 0; k < t->in; k += SLICE) {
            int64_t rows = t->in - k < SLICE ? t->in - k : SLICE;
            gram_rows(t, i, k, rows, slice);
            t->lapack->dgemm(LM_BLAS_ROWS, LM_BLAS_PLAIN, LM_BLAS_PLAIN, n, in, (int)rows, 1, w + k,
                             in, slice, in, 1, p, in);
        }
    }
    t->lapack->dpotrs(LM_LAPACK_COLUMNS, 'L', in, n, t->sum, in, p, in);
    store_panel(t, begin, end - begin, p);
}

/* ---- Checks of a Gram matrix ---- */

typedef struct {
    const lm_merge_operand *of;
    /* the first row that differs from its column, or has a negative sum of squares */
    int64_t in, row;
} symmetry;

static double gram_at(const symmetry *s, int64_t i, int64_t k)
{
    return lm_get(s->of->extra_dtype, s->of->extra, i * s->in + k);
}

/* Sums in another order differ in the last bits; larger differences are errors. */
static bool is_row(const symmetry *s, int64_t i)
{
    double own = gram_at(s, i, i);
    if (own < 0)
        return false;
    for (int64_t k = i + 1; k < s->in; k++) {
        double size = own + fabs(gram_at(s, k, k));
        if (fabs(gram_at(s, i, k) - gram_at(s, k, i)) > 1e-3 * size)
            return false;
    }
    return true;
}

static void look_at_rows(void *ctx, int64_t begin, int64_t end, int worker)
{
    symmetry *s = ctx;
    (void)worker;
    for (int64_t i = begin; i < end; i++) {
        int64_t first = __atomic_load_n(&s->row, __ATOMIC_RELAXED);
        if (first <= i)
            return;
        if (is_row(s, i))
            continue;
        while (i < first && !__atomic_compare_exchange_n(&s->row, &first, i, false,
                                                         __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            ;
        return;
    }
}

static lm_code check_gram(const regmean_task *t, int i, lm_err *e)
{
    const lm_merge_job *j = t->job;
    const lm_merge_operand *o = &j->model[i];
    symmetry s = { o, t->in, t->in };
    int64_t bad = lm_merge_first_bad(o->extra_dtype, o->extra, o->extra_count, false, j->par);
    if (bad >= 0)
        return lm_fail(e, LM_ENUMERIC, j->name, "compute it again",
                       "element [%lld,%lld] of the Gram matrix of model %d is %g",
                       (long long)(bad / t->in), (long long)(bad % t->in), i + 1,
                       lm_get(o->extra_dtype, o->extra, bad));
    lm_par_for(j->par, t->in, 16, look_at_rows, &s);
    if (s.row < t->in)
        return lm_fail(e, LM_EFORMAT, j->name, "give X'X of the layer's inputs X",
                       "row %lld of the matrix of model %d cannot be that of a Gram matrix",
                       (long long)s.row, i + 1);
    return LM_OK;
}

static lm_code factor(const regmean_task *t, lm_err *e)
{
    int in = (int)t->in, info;
    double largest = 0, least = INFINITY;
    for (int64_t k = 0; k < t->in; k++)
        largest = fmax(largest, t->sum[k * t->in + k]);
    info = t->lapack->dpotrf(LM_LAPACK_COLUMNS, 'L', in, t->sum, in);
    for (int64_t k = 0; k < t->in && !info; k++)
        least = fmin(least, t->sum[k * t->in + k] * t->sum[k * t->in + k]);
    if (info || !(least > 1e-14 * largest))
        return lm_fail(
            e, LM_ENUMERIC, t->job->name, "compute the matrices from more data, or a smaller alpha",
            "the Gram matrices of %d inputs add up to a singular one (alpha %g)", in, t->alpha);
    return LM_OK;
}

static lm_code average(const lm_merge_job *j)
{
    const lm_merge_operand *of[LM_MERGE_MOST_MODELS];
    double c[LM_MERGE_MOST_MODELS];
    lm_merge_sum s = { of, j->n_models, c, NULL };
    lm_merge_list(j, of);
    for (int i = 0; i < j->n_models; i++)
        c[i] = 1.0 / j->n_models;
    lm_merge_sum_run(j, &s, j->work);
    return LM_OK;
}

static lm_code regmean(const lm_merge_job *j, lm_err *e)
{
    regmean_task t;
    int given = 0;
    int64_t in = j->ndim == 2 ? j->dim[!j->transposed] : 0;
    for (int i = 0; i < j->n_models; i++)
        given += j->model[i].extra_count > 0;
    if (given && (given < j->n_models || !usable(j)))
        return lm_fail(e, LM_EFORMAT, j->name, "give every model's, [inputs, inputs]",
                       "%d of %d models have a Gram matrix, or one is not of %lld x %lld", given,
                       j->n_models, (long long)in, (long long)in);
    if (!given || j->n_models == 1)
        return average(j);
    lay_out(&t, j, lm_par_threads(j->par));
    if (lm_lapack_load(&t.lapack, e))
        return e->code;
    for (int i = 0; i < j->n_models; i++)
        if (check_gram(&t, i, e))
            return e->code;
    lm_par_for(j->par, t.in, SLICE, add_rows, &t);
    if (factor(&t, e))
        return e->code;
    lm_par_for(j->par, t.out, PANEL, solve_panel, &t);
    return LM_OK;
}

const lm_merge_method lm_merge_gram_methods[] = {
    { .name = "regmean",
      .about = "least squares on each model's inputs: (sum G_i)^-1 sum G_i W_i",
      .source = "arXiv:2212.09849",
      .min_models = 1,
      .takes = LM_MERGE_BIT(LM_MERGE_ALPHA),
      .defaults = LM_MERGE_BIT(LM_MERGE_ALPHA),
      .def = { [LM_MERGE_ALPHA] = 0.9 },
      .extra = LM_EXTRA_GRAM,
      .work = regmean_work,
      .run = regmean },
    { .name = NULL },
};
