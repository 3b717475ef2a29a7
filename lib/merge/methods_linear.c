/* SPDX-License-Identifier: Apache-2.0 */
/* methods_linear.c -- merges by weighted sums of elements: linear, DEM, task arithmetic,
 * passthrough, Fisher. */
#include "base/text.h"
#include "merge/blocks.h"
#include "merge/entries.h"
#include "merge/finite.h"

static size_t sum_work(const lm_merge_job *j, int threads)
{
    (void)j;
    return lm_merge_sum_work(threads);
}

/* Parameter p of every model; a global value replaces missing ones. */
static double weights(const lm_merge_job *j, double *w)
{
    double sum = 0;
    for (int i = 0; i < j->n_models; i++)
        sum += w[i] = lm_merge_of(j, i, LM_MERGE_WEIGHT, j->param[LM_MERGE_WEIGHT]);
    return sum;
}

static void run_sum(const lm_merge_job *j, const double *c)
{
    const lm_merge_operand *of[LM_MERGE_MOST_MODELS];
    lm_merge_sum s = { of, j->n_models, c, j->base };
    lm_merge_list(j, of);
    lm_merge_sum_run(j, &s, j->work);
}

static lm_code linear_check(const lm_merge_job *j, lm_err *e)
{
    double c[LM_MERGE_MOST_MODELS];
    weights(j, c);
    return lm_merge_true(j, LM_MERGE_NORMALIZE) && lm_merge_cancels(c, j->n_models)
               ? lm_fail(e, LM_EUSAGE, j->name, "change one, or do not normalize",
                         "the weights add up to 0")
               : LM_OK;
}

static lm_code linear(const lm_merge_job *j, lm_err *e)
{
    double c[LM_MERGE_MOST_MODELS], sum = weights(j, c);
    if (linear_check(j, e))
        return e->code;
    for (int i = 0; lm_merge_true(j, LM_MERGE_NORMALIZE) && i < j->n_models; i++)
        c[i] /= sum;
    run_sum(j, c);
    return LM_OK;
}

static lm_code dem(const lm_merge_job *j, lm_err *e)
{
    double c[LM_MERGE_MOST_MODELS];
    (void)e;
    weights(j, c);
    run_sum(j, c);
    return LM_OK;
}

static lm_code task_arithmetic(const lm_merge_job *j, lm_err *e)
{
    double c[LM_MERGE_MOST_MODELS], sum = weights(j, c), by = j->param[LM_MERGE_LAMBDA];
    (void)e;
    if (lm_merge_true(j, LM_MERGE_NORMALIZE) && fabs(sum) >= 1e-8)
        by /= sum;
    for (int i = 0; i < j->n_models; i++)
        c[i] *= by;
    run_sum(j, c);
    return LM_OK;
}

static lm_code passthrough(const lm_merge_job *j, lm_err *e)
{
    double c = lm_merge_of(j, 0, LM_MERGE_SCALE, 1);
    (void)e;
    run_sum(j, &c);
    return LM_OK;
}

enum { FISHER_ROWS = 4 };

static size_t fisher_work(const lm_merge_job *j, int threads)
{
    lm_merge_scratch s = { 0 };
    (void)j;
    lm_merge_take_cells(&s, FISHER_ROWS, threads);
    return s.used;
}

/* Numerator and denominator in adjacent rows; a tensor without importances has 1 for every
 * model. */
static void fisher_block(const lm_merge_walk *w, int64_t at, int64_t n, void *cells, double *sums)
{
    const lm_merge_job *j = w->job;
    const lm_blend *b = w->loops;
    void *over = lm_merge_cell(b, cells, 0), *under = lm_merge_cell(b, cells, 1);
    void *f = lm_merge_cell(b, cells, 2), *x = lm_merge_cell(b, cells, 3);
    double least = j->param[LM_MERGE_FISHER_FLOOR];
    (void)sums;
    memset(over, 0, (size_t)n * b->real);
    memset(under, 0, (size_t)n * b->real);
    for (int i = 0; i < j->n_models; i++) {
        const lm_merge_operand *o = &j->model[i];
        double weight = lm_merge_of(j, i, LM_MERGE_WEIGHT, j->param[LM_MERGE_WEIGHT]);
        if (weight == 0)
            continue;
        b->start(o->dtype, o->data, at, 1, x, n);
        if (o->extra && o->extra_count == j->count) {
            b->load(o->extra_dtype, o->extra, at, f, n);
            b->at_least(f, least, n);
        } else {
            double one = o->extra ? lm_get(o->extra_dtype, o->extra, 0) : 1;
            b->fill(f, one < least ? least : one, n);
        }
        b->scale(f, weight, n);
        b->axpy(f, 1, under, n);
        b->mul(f, x, n);
        b->axpy(x, 1, over, n);
    }
    b->div(under, over, n);
    b->store(j->out_dtype, j->out, at, over, n);
}

/* Check a mean of squared gradients: finite, and not below 0. */
static lm_code check_importance(const lm_merge_job *j, int i, lm_err *e)
{
    const lm_merge_operand *o = &j->model[i];
    int64_t bad;
    double v;
    if (o->extra_count && o->extra_count != 1 && o->extra_count != j->count)
        return lm_fail(e, LM_EFORMAT, j->name, "give one value, or one for each element",
                       "model %d has %lld value%s of importance for %lld element%s", i + 1,
                       (long long)o->extra_count, lm_plural(o->extra_count), (long long)j->count,
                       lm_plural(j->count));
    bad = lm_merge_first_bad(o->extra_dtype, o->extra, o->extra_count, true, j->par);
    if (bad < 0)
        return LM_OK;
    v = lm_get(o->extra_dtype, o->extra, bad);
    return lm_fail(e, isfinite(v) ? LM_EFORMAT : LM_ENUMERIC, j->name,
                   "compute it again: it must be a mean of squared gradients",
                   "importance %lld of model %d is %g", (long long)bad, i + 1, v);
}

static bool all_zero(const lm_merge_operand *o)
{
    int64_t i = 0;
    while (i < o->extra_count && lm_get(o->extra_dtype, o->extra, i) == 0)
        i++;
    return i == o->extra_count;
}

/* As in the authors' program, the floor then determines the weights. */
static void warn_zero(const lm_merge_job *j)
{
    for (int i = 0; i < j->n_models; i++)
        if (lm_merge_of(j, i, LM_MERGE_WEIGHT, j->param[LM_MERGE_WEIGHT]) != 0 &&
            !all_zero(&j->model[i]))
            return;
    lm_log(j->sink, LM_LOG_WARN,
           "%s: the importances of all models are 0: every element has fisher_floor, %g, and the "
           "result is the mean by the weights",
           j->name, j->param[LM_MERGE_FISHER_FLOOR]);
}

static lm_code fisher_check(const lm_merge_job *j, lm_err *e)
{
    double c[LM_MERGE_MOST_MODELS];
    bool all = true;
    weights(j, c);
    for (int i = 0; i < j->n_models; i++)
        all &= c[i] == 0;
    return all ? lm_fail(e, LM_EUSAGE, j->name, "change one", "all weights are 0") : LM_OK;
}

static lm_code fisher(const lm_merge_job *j, lm_err *e)
{
    lm_merge_walk w = { .job = j,
                        .loops = lm_merge_loops(j),
                        .block = fisher_block,
                        .cells = j->work,
                        .rows = FISHER_ROWS };
    int used = 0, last = 0, given = 0;
    for (int i = 0; i < j->n_models; i++) {
        if (check_importance(j, i, e))
            return e->code;
        given += j->model[i].extra_count > 0;
        if (lm_merge_of(j, i, LM_MERGE_WEIGHT, j->param[LM_MERGE_WEIGHT]) != 0) {
            used++;
            last = i;
        }
    }
    if (fisher_check(j, e))
        return e->code;
    if (given && given < j->n_models)
        return lm_fail(e, LM_EFORMAT, j->name, "give those of every model",
                       "%d of %d models have importances", given, j->n_models);
    if (used == 1) {
        lm_merge_copy(j, &j->model[last]);
        return LM_OK;
    }
    if (given)
        warn_zero(j);
    lm_merge_go(&w, NULL);
    return LM_OK;
}

#define B LM_MERGE_BIT
const lm_merge_method lm_merge_linear_methods[] = {
    { .name = "linear",
      .about = "weighted mean: sum(w_i theta_i) / sum(w_i)",
      .source = "arXiv:2203.05482",
      .min_models = 1,
      .takes = B(LM_MERGE_WEIGHT) | B(LM_MERGE_NORMALIZE),
      .required = B(LM_MERGE_WEIGHT),
      .defaults = B(LM_MERGE_NORMALIZE),
      .def = { [LM_MERGE_NORMALIZE] = 1 },
      .pieces = true,
      .check = linear_check,
      .work = sum_work,
      .run = linear },
    { .name = "dem",
      .about = "distribution edited model: theta + sum w_i (theta_i - theta)",
      .source = "arXiv:2406.15570",
      .base_required = true,
      .base_allowed = true,
      .min_models = 1,
      .takes = B(LM_MERGE_WEIGHT),
      .required = B(LM_MERGE_WEIGHT),
      .pieces = true,
      .work = sum_work,
      .run = dem },
    { .name = "task_arithmetic",
      .about = "theta + lambda sum w_i (theta_i - theta)",
      .source = "arXiv:2212.04089",
      .base_required = true,
      .base_allowed = true,
      .min_models = 1,
      .takes = B(LM_MERGE_WEIGHT) | B(LM_MERGE_NORMALIZE) | B(LM_MERGE_LAMBDA),
      .required = B(LM_MERGE_WEIGHT),
      .defaults = B(LM_MERGE_NORMALIZE) | B(LM_MERGE_LAMBDA),
      .def = { [LM_MERGE_LAMBDA] = 1 },
      .pieces = true,
      .work = sum_work,
      .run = task_arithmetic },
    { .name = "passthrough",
      .about = "the tensor itself, times scale: layers stacked from several models",
      .source = "mergekit",
      .min_models = 1,
      .max_models = 1,
      .takes = B(LM_MERGE_SCALE),
      .pieces = true,
      .work = sum_work,
      .run = passthrough },
    { .name = "fisher",
      .about = "mean weighted by importance: sum(w_i F_i theta_i) / sum(w_i F_i)",
      .source = "arXiv:2111.09832",
      .min_models = 1,
      .takes = B(LM_MERGE_WEIGHT) | B(LM_MERGE_FISHER_FLOOR),
      .defaults = B(LM_MERGE_WEIGHT) | B(LM_MERGE_FISHER_FLOOR),
      .def = { [LM_MERGE_WEIGHT] = 1, [LM_MERGE_FISHER_FLOOR] = 1e-6 },
      .extra = LM_EXTRA_FISHER,
      .check = fisher_check,
      .work = fisher_work,
      .run = fisher },
    { .name = NULL },
};
