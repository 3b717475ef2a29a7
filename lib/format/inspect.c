/* SPDX-License-Identifier: Apache-2.0 */
/* inspect.c -- statistics and differences of tensors, over fixed spans. */
#include "format/inspect.h"

#include <fnmatch.h>
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "base/stop.h"
#include "format/safetensors_table.h"

enum { CHUNK = 4096, SPAN = 32 * CHUNK }; /* elements: one conversion; one partial result */

bool lm_name_among(const char *name, const char *const *globs, int n)
{
    for (int i = 0; i < n; i++)
        if (!fnmatch(globs[i], name, 0))
            return true;
    return n == 0;
}

/* Elements [i, i+n) of t as doubles; n <= CHUNK. */
static lm_code get_chunk(const lm_model_source *m, const lm_st_tensor *t, int64_t i, int64_t n,
                         double *to, lm_err *e)
{
    _Alignas(64) uint8_t raw[CHUNK * 8];
    size_t size = lm_dtype_size(t->dtype);
    lm_code rc = lm_model_source_read(m, t, (uint64_t)i * size, raw, (size_t)n * size, e);

    if (!rc)
        lm_convert(t->dtype, raw, LM_DTYPE_F64, to, n);
    return rc;
}

/* The failure of the lowest span in a parallel loop, so that the message too does not depend on the
 * number of threads. */
typedef struct {
    lm_code rc;
    lm_err err;
} failure;

/* ---- Statistics ---- */

typedef struct {
    int64_t n, zeros, nans, infs; /* n: finite elements */
    double min, max, mean, m2;    /* m2: sum of squared distances from the mean */
    failure failed;
} part;

/* Chan, Golub, LeVeque (1979): the moments of two sets from those of each. */
static void merge(part *to, const part *from)
{
    to->zeros += from->zeros;
    to->nans += from->nans;
    to->infs += from->infs;
    if (!from->n)
        return;
    double n = (double)(to->n + from->n), d = from->mean - to->mean;
    if (!to->n) {
        to->mean = from->mean;
        to->m2 = from->m2;
    } else {
        to->m2 += from->m2 + d * d * ((double)to->n * (double)from->n / n);
        to->mean += d * ((double)from->n / n);
    }
    to->n += from->n;
    to->min = fmin(to->min, from->min);
    to->max = fmax(to->max, from->max);
}

/* Remove and count numbers that are not finite; returns the number left. */
static int64_t keep_finite(double *x, int64_t n, part *p)
{
    int64_t kept = 0;

    for (int64_t i = 0; i < n; i++) {
        p->nans += isnan(x[i]) != 0;
        p->infs += isinf(x[i]) != 0;
        if (isfinite(x[i]))
            x[kept++] = x[i];
    }
    return kept;
}

/* Eight lanes: a fixed order of additions that the compiler can vectorise. */
static double sum_of(const double *x, int64_t n, double centre, bool squares)
{
    double lane[8] = { 0 }, total = 0;
    int64_t i = 0;

    if (squares)
        for (; i + 8 <= n; i += 8)
            for (int l = 0; l < 8; l++)
                lane[l] += (x[i + l] - centre) * (x[i + l] - centre);
    else
        for (; i + 8 <= n; i += 8)
            for (int l = 0; l < 8; l++)
                lane[l] += x[i + l];
    for (; i < n; i++)
        total += squares ? (x[i] - centre) * (x[i] - centre) : x[i];
    for (int l = 0; l < 8; l++)
        total += lane[l];
    return total;
}

static void measure_chunk(double *x, int64_t n, part *to)
{
    part p = { .min = INFINITY, .max = -INFINITY };
    double lo[8], hi[8];
    int64_t i = 0;

    /* x - x is 0 when finite and NaN when not: one cheap test for the usual case. */
    double probe = 0;
    for (int64_t k = 0; k < n; k++)
        probe += x[k] - x[k];
    if (probe != 0)
        n = keep_finite(x, n, &p);
    for (int l = 0; l < 8; l++) {
        lo[l] = INFINITY;
        hi[l] = -INFINITY;
    }
    for (; i + 8 <= n; i += 8)
        for (int l = 0; l < 8; l++) {
            lo[l] = x[i + l] < lo[l] ? x[i + l] : lo[l];
            hi[l] = x[i + l] > hi[l] ? x[i + l] : hi[l];
        }
    for (; i < n; i++) {
        p.min = fmin(p.min, x[i]);
        p.max = fmax(p.max, x[i]);
    }
    for (int l = 0; l < 8; l++) {
        p.min = fmin(p.min, lo[l]);
        p.max = fmax(p.max, hi[l]);
    }
    for (int64_t k = 0; k < n; k++)
        p.zeros += x[k] == 0;
    p.n = n;
    p.mean = n ? sum_of(x, n, 0, false) / (double)n : 0;
    p.m2 = sum_of(x, n, p.mean, true);
    merge(to, &p);
}

typedef struct {
    const lm_model_source *m;
    const lm_st_tensor *t;
    part *span;
} stats_job;

static void stats_spans(void *ctx, int64_t begin, int64_t end, int worker)
{
    stats_job *job = ctx;
    double x[CHUNK];
    (void)worker;

    for (int64_t s = begin; s < end; s++) {
        part *p = &job->span[s];
        int64_t stop = (s + 1) * SPAN < job->t->count ? (s + 1) * SPAN : job->t->count;
        p->min = INFINITY;
        p->max = -INFINITY;
        for (int64_t i = s * SPAN; i < stop && !p->failed.rc && !lm_stopping(); i += CHUNK) {
            int64_t n = stop - i < CHUNK ? stop - i : CHUNK;
            p->failed.rc = get_chunk(job->m, job->t, i, n, x, &p->failed.err);
            if (!p->failed.rc)
                measure_chunk(x, n, p);
        }
    }
}

lm_code lm_tensor_stats_of(const lm_model_source *m, const lm_st_tensor *t, lm_par *par,
                           lm_tensor_stats *out, lm_err *e)
{
    stats_job job = { m, t, NULL };
    part all = { .min = INFINITY, .max = -INFINITY };
    int64_t spans = t->count / SPAN + (t->count % SPAN != 0);
    char show[LM_ST_SHOWN];
    lm_code rc;

    if (t->dtype == LM_DTYPE_NONE)
        return lm_fail(e, LM_EUSAGE, lm_model_source_path(m), NULL,
                       "tensor '%s' has dtype %s, which has no values here",
                       lm_st_show(t->name, show), t->dtype_name);
    rc = lm_alloc_n(&job.span, (size_t)spans, sizeof *job.span, "statistics", e);
    if (rc)
        return rc;
    lm_par_for(par, spans, 1, stats_spans, &job);
    for (int64_t s = 0; s < spans && !rc; s++) {
        rc = job.span[s].failed.rc;
        if (rc && !e->code)
            *e = job.span[s].failed.err;
        merge(&all, &job.span[s]);
    }
    lm_free(job.span);
    *out = (lm_tensor_stats){ t->count, all.zeros, all.nans, all.infs, NAN, NAN, NAN, NAN };
    if (all.n) {
        out->min = all.min;
        out->max = all.max;
        out->mean = all.mean;
        out->std = sqrt(all.m2 / (double)all.n);
    }
    return rc;
}

/* ---- Differences ---- */

typedef struct {
    int64_t differing;
    double max_abs, max_rel, d2, a2;
    failure failed;
} gap;

typedef struct {
    const lm_model_source *ma, *mb;
    const lm_st_tensor *a, *b;
    double atol, rtol;
    gap *span;
} diff_job;

static void compare_chunk(const double *a, const double *b, int64_t n, const diff_job *job, gap *g)
{
    for (int64_t i = 0; i < n; i++) {
        double d = fabs(a[i] - b[i]), top = fmax(fabs(a[i]), fabs(b[i]));
        g->a2 += isfinite(a[i]) ? a[i] * a[i] : 0;
        if (a[i] == b[i] || (isnan(a[i]) && isnan(b[i])))
            continue;
        if (!isfinite(d)) { /* one is NaN or infinite and the other differs */
            g->differing++;
            g->max_abs = g->max_rel = g->d2 = INFINITY;
            continue;
        }
        g->differing += d > job->atol + job->rtol * fabs(a[i]);
        g->max_abs = fmax(g->max_abs, d);
        g->max_rel = fmax(g->max_rel, d / top);
        g->d2 += d * d;
    }
}

/* Different 64-bit integers beyond 2^53 may convert to the same double. */
static lm_code compare_wide(const diff_job *job, int64_t i, int64_t n, gap *g)
{
    uint64_t a[CHUNK], b[CHUNK];
    lm_code rc =
        lm_model_source_read(job->ma, job->a, (uint64_t)i * 8, a, (size_t)n * 8, &g->failed.err);

    if (!rc)
        rc = lm_model_source_read(job->mb, job->b, (uint64_t)i * 8, b, (size_t)n * 8,
                                  &g->failed.err);
    for (int64_t k = 0; !rc && k < n; k++) {
        bool u = job->a->dtype == LM_DTYPE_U64;
        double x = u ? (double)a[k] : (double)(int64_t)a[k];
        bool up = u ? a[k] > b[k] : (int64_t)a[k] > (int64_t)b[k];
        double d = (double)(up ? a[k] - b[k] : b[k] - a[k]);
        double y = u ? (double)b[k] : (double)(int64_t)b[k];
        g->a2 += x * x;
        if (d == 0)
            continue;
        g->differing += d > job->atol + job->rtol * fabs(x);
        g->max_abs = fmax(g->max_abs, d);
        g->max_rel = fmax(g->max_rel, d / fmax(fabs(x), fabs(y)));
        g->d2 += d * d;
    }
    return rc;
}

static lm_code compare_at(const diff_job *job, int64_t i, int64_t n, gap *g)
{
    double x[CHUNK], y[CHUNK];
    bool wide = job->a->dtype == job->b->dtype &&
                (job->a->dtype == LM_DTYPE_I64 || job->a->dtype == LM_DTYPE_U64);
    lm_code rc;

    if (wide)
        return compare_wide(job, i, n, g);
    rc = get_chunk(job->ma, job->a, i, n, x, &g->failed.err);
    if (!rc)
        rc = get_chunk(job->mb, job->b, i, n, y, &g->failed.err);
    if (!rc)
        compare_chunk(x, y, n, job, g);
    return rc;
}

static void diff_spans(void *ctx, int64_t begin, int64_t end, int worker)
{
    diff_job *job = ctx;
    (void)worker;

    for (int64_t s = begin; s < end; s++) {
        gap *g = &job->span[s];
        int64_t stop = (s + 1) * SPAN < job->a->count ? (s + 1) * SPAN : job->a->count;
        for (int64_t i = s * SPAN; i < stop && !g->failed.rc && !lm_stopping(); i += CHUNK)
            g->failed.rc = compare_at(job, i, stop - i < CHUNK ? stop - i : CHUNK, g);
    }
}

static lm_code measure_pair(diff_job *job, lm_par *par, lm_tensor_diff *out, lm_err *e)
{
    int64_t spans = job->a->count / SPAN + (job->a->count % SPAN != 0);
    double d2 = 0, a2 = 0;
    lm_code rc = lm_alloc_n(&job->span, (size_t)spans, sizeof *job->span, "comparison", e);

    if (rc)
        return rc;
    lm_par_for(par, spans, 1, diff_spans, job);
    for (int64_t s = 0; s < spans && !rc; s++) {
        const gap *g = &job->span[s];
        rc = g->failed.rc;
        if (rc && !e->code)
            *e = g->failed.err;
        out->differing += g->differing;
        out->max_abs = fmax(out->max_abs, g->max_abs);
        out->max_rel = fmax(out->max_rel, g->max_rel);
        d2 += g->d2;
        a2 += g->a2;
    }
    lm_free(job->span);
    out->rel_l2 = d2 == 0 ? 0 : a2 == 0 ? INFINITY : sqrt(d2 / a2);
    out->measured = true;
    return rc;
}

/* Tensors of a type without values are equal when their bytes are. */
static lm_code same_bytes(const diff_job *job, bool *same, lm_err *e)
{
    uint8_t x[CHUNK], y[CHUNK];
    lm_code rc = LM_OK;

    *same = !strcmp(job->a->dtype_name, job->b->dtype_name) && job->a->bytes == job->b->bytes;
    for (uint64_t i = 0; *same && i < job->a->bytes && !rc; i += CHUNK) {
        size_t n = job->a->bytes - i < CHUNK ? (size_t)(job->a->bytes - i) : CHUNK;
        rc = lm_model_source_read(job->ma, job->a, i, x, n, e);
        if (!rc)
            rc = lm_model_source_read(job->mb, job->b, i, y, n, e);
        *same = !rc && !memcmp(x, y, n);
    }
    return rc;
}

static bool same_shape(const lm_st_tensor *a, const lm_st_tensor *b)
{
    for (int i = 0; i < a->ndim && a->ndim == b->ndim; i++)
        if (a->dim[i] != b->dim[i])
            return false;
    return a->ndim == b->ndim;
}

static lm_code compare_pair(diff_job *job, const lm_compare_opts *opts, lm_par *par,
                            lm_model_diff *all, lm_tensor_diff *p, lm_err *e)
{
    bool dtypes = strcmp(job->a->dtype_name, job->b->dtype_name) == 0;
    lm_code rc = LM_OK;

    all->dtypes += !dtypes;
    if (!same_shape(job->a, job->b)) {
        all->shapes++;
        return LM_OK;
    }
    if (job->a->dtype == LM_DTYPE_NONE || job->b->dtype == LM_DTYPE_NONE) {
        rc = same_bytes(job, &p->same, e);
    } else {
        rc = measure_pair(job, par, p, e);
        p->same = p->differing == 0;
    }
    if (opts->strict && !dtypes)
        p->same = false;
    all->differing += !p->same;
    all->max_abs = fmax(all->max_abs, p->max_abs);
    all->max_rel = fmax(all->max_rel, p->max_rel);
    return rc;
}

static uint64_t work_of(const lm_model_source *a, const lm_compare_opts *opts)
{
    uint64_t total = 0;
    for (size_t i = 0; i < lm_model_source_count(a); i++)
        if (lm_name_among(lm_model_source_at(a, i)->name, opts->only, opts->n_only))
            total += lm_model_source_at(a, i)->bytes;
    return total;
}

lm_code lm_model_compare(const lm_model_source *a, const lm_model_source *b,
                         const lm_compare_opts *opts, lm_par *par, lm_sink *sink,
                         lm_model_diff *out, lm_err *e)
{
    size_t na = lm_model_source_count(a), nb = lm_model_source_count(b);
    uint64_t done = 0, total = work_of(a, opts);
    lm_code rc;

    *out = (lm_model_diff){ 0 };
    rc = lm_alloc_n(&out->pair, na + nb, sizeof *out->pair, "comparison", e);
    for (size_t i = 0; i < na && !rc && !lm_stopping(); i++) {
        const lm_st_tensor *t = lm_model_source_at(a, i);
        if (!lm_name_among(t->name, opts->only, opts->n_only))
            continue;
        lm_tensor_diff *p = &out->pair[out->n++];
        p->a = t;
        p->b = lm_model_source_find(b, t->name);
        diff_job job = { a, b, p->a, p->b, opts->atol, opts->rtol, NULL };
        if (p->b)
            rc = compare_pair(&job, opts, par, out, p, e);
        else
            out->only_a++;
        done += t->bytes;
        lm_progress(sink, "compare", (double)done, (double)total, "bytes", NULL);
    }
    for (size_t i = 0; i < nb && !rc; i++) {
        const lm_st_tensor *t = lm_model_source_at(b, i);
        if (lm_model_source_find(a, t->name) || !lm_name_among(t->name, opts->only, opts->n_only))
            continue;
        out->pair[out->n++].b = t;
        out->only_b++;
    }
    if (!rc && !out->n && opts->n_only && !lm_stopping())
        rc =
            lm_fail(e, LM_EUSAGE, opts->only[0], NULL, "no tensor of either model has such a name");
    out->same = !out->only_a && !out->only_b && !out->shapes && !out->differing;
    return rc;
}

void lm_model_diff_fini(lm_model_diff *d)
{
    lm_free(d->pair);
    *d = (lm_model_diff){ 0 };
}
