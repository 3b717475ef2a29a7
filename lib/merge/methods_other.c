/* SPDX-License-Identifier: Apache-2.0 */
/* methods_other.c -- SCE, nearswap: merges with their own rule for the elements that change. */
#include "merge/blocks.h"
#include "merge/entries.h"
#include "merge/select.h"

/* --- SCE ------------------------------------------------------------------------------------- */

typedef struct {
    const lm_merge_job *job;
    const lm_blend *loops;
    lm_merge_scratch left;
    void *cells;   /* n + SCE_EXTRA rows a worker: deltas, base, result, variance, zeros */
    double *parts; /* n sums of a chunk */
    double share[LM_MERGE_MOST_MODELS];
    bool chosen; /* only elements in top are merged */
    lm_merge_top top;
    lm_blend_terms terms;
} sce_task;

enum { SCE_EXTRA = 4 };

static void sce_lay_out(sce_task *t, const lm_merge_job *j, int threads)
{
    t->cells = lm_merge_take_cells(&t->left, j->n_models + SCE_EXTRA, threads);
    t->parts = lm_merge_take(&t->left, (size_t)j->n_models * (size_t)lm_merge_chunks(j->count),
                             sizeof(double));
}

static void deltas(const sce_task *t, int64_t at, int64_t n, void *rows, void *base)
{
    const lm_merge_job *j = t->job;
    t->loops->load(j->base->dtype, j->base->data, at, base, n);
    for (int i = 0; i < j->n_models; i++)
        t->loops->delta(j->model[i].dtype, j->model[i].data, at, base,
                        lm_merge_cell(t->loops, rows, i), n);
}

static void fill_variance(const void *ctx, int64_t at, int64_t n, void *out, void *cells)
{
    const sce_task *t = ctx;
    deltas(t, at, n, cells, lm_merge_cell(t->loops, cells, t->job->n_models));
    t->loops->variance(t->job->n_models, cells, LM_MERGE_STRIDE, out, n);
}

static size_t sce_work(const lm_merge_job *j, int threads)
{
    sce_task t = { .job = j, .loops = lm_merge_loops(j) };
    lm_merge_values v = { .job = j, .loops = t.loops, .rows = 1, .extra = j->n_models + 1 };
    sce_lay_out(&t, j, threads);
    if (j->param[LM_MERGE_SELECT_TOPK] < 1)
        lm_merge_select(&v, NULL, 1, threads, &t.left);
    return t.left.used;
}

/* Deltas of a block, zero where the variance did not select the element. */
static void chosen_deltas(const sce_task *t, int64_t at, int64_t n, void *cells)
{
    const lm_blend *b = t->loops;
    int k = t->job->n_models;
    void *variance = lm_merge_cell(b, cells, k + 2), *zeros = lm_merge_cell(b, cells, k + 3);
    deltas(t, at, n, cells, lm_merge_cell(b, cells, k));
    if (!t->chosen)
        return;
    b->variance(k, cells, LM_MERGE_STRIDE, variance, n);
    lm_merge_keep(b, variance, at, n, &t->top, NULL, 1);
    b->fill(zeros, 0, n);
    for (int i = 0; i < k; i++)
        b->choose(variance, zeros, lm_merge_cell(b, cells, i), n);
}

static void count_block(const lm_merge_walk *w, int64_t at, int64_t n, void *cells, double *sums)
{
    const sce_task *t = w->ctx;
    int64_t varied = 0;
    void *variance = lm_merge_cell(w->loops, cells, t->job->n_models + 2);
    fill_variance(t, at, n, variance, cells);
    w->loops->pick(variance, 1, 1, at, n, &varied, lm_merge_cell(w->loops, cells, 0));
    sums[0] += (double)varied;
}

static void square_block(const lm_merge_walk *w, int64_t at, int64_t n, void *cells, double *sums)
{
    const sce_task *t = w->ctx;
    chosen_deltas(t, at, n, cells);
    for (int i = 0; i < t->job->n_models; i++) {
        const void *d = lm_merge_cell(w->loops, cells, i);
        sums[i] += w->loops->dot(d, d, n);
    }
}

static void sce_block(const lm_merge_walk *w, int64_t at, int64_t n, void *cells, double *sums)
{
    const sce_task *t = w->ctx;
    int k = t->job->n_models;
    void *out = lm_merge_cell(w->loops, cells, k + 1);
    (void)sums;
    chosen_deltas(t, at, n, cells);
    w->loops->agree(&t->terms, cells, LM_MERGE_STRIDE, lm_merge_cell(w->loops, cells, k), out, n);
    w->loops->store(t->job->out_dtype, t->job->out, at, out, n);
}

/* a_i = mean(D_i^2) / sum_j mean(D_j^2) */
static void sce_shares(sce_task *t, lm_merge_walk *w)
{
    int k = t->job->n_models;
    double sum = 0;
    w->block = square_block;
    w->n_sums = k;
    lm_merge_go(w, t->share);
    for (int i = 0; i < k; i++)
        sum += t->share[i] /= (double)t->job->count;
    for (int i = 0; i < k; i++)
        t->share[i] = sum < 1e-6 ? 1.0 / k : t->share[i] / sum;
    if (!isfinite(sum))
        lm_log(t->job->sink, LM_LOG_WARN,
               "%s: an input holds NaN or infinity, so all of the merged tensor is NaN",
               t->job->name);
}

static lm_code sce(const lm_merge_job *j, lm_err *e)
{
    sce_task t = { .job = j, .loops = lm_merge_loops(j), .left.at = j->work };
    lm_merge_walk w = { .job = j,
                        .loops = t.loops,
                        .ctx = &t,
                        .block = count_block,
                        .n_sums = 1,
                        .rows = j->n_models + SCE_EXTRA };
    (void)e;
    if (!j->count || (j->n_models == 1 && j->param[LM_MERGE_SELECT_TOPK] >= 1)) {
        lm_merge_copy(j, &j->model[0]);
        return LM_OK;
    }
    sce_lay_out(&t, j, lm_par_threads(j->par));
    w.cells = t.cells;
    w.parts = t.parts;
    if (j->param[LM_MERGE_SELECT_TOPK] < 1) {
        lm_merge_values v = { .job = j,
                              .loops = t.loops,
                              .fill = fill_variance,
                              .ctx = &t,
                              .rows = 1,
                              .extra = j->n_models + 1 };
        double varied;
        lm_merge_go(&w, &varied);
        t.chosen = true;
        t.top.k = (int64_t)(varied * j->param[LM_MERGE_SELECT_TOPK]);
        if (!t.top.k)
            lm_log(j->sink, LM_LOG_WARN,
                   "%s: select_topk %g of %.0f elements that vary selects none", j->name,
                   j->param[LM_MERGE_SELECT_TOPK], varied);
        lm_merge_select(&v, &t.top, 1, lm_par_threads(j->par), &t.left);
    }
    sce_shares(&t, &w);
    t.terms = (lm_blend_terms){ .k = j->n_models,
                                .w = t.share,
                                .vote = LM_BLEND_BY_SUM,
                                .normalize = true,
                                .floor = 1e-6,
                                .lambda = 1 };
    w.block = sce_block;
    lm_merge_go(&w, NULL);
    return LM_OK;
}

/* --- nearswap -------------------------------------------------------------------------------- */

enum { NEAR_ROWS = 3 };

static size_t nearswap_work(const lm_merge_job *j, int threads)
{
    lm_merge_scratch s = { 0 };
    (void)j;
    lm_merge_take_cells(&s, NEAR_ROWS, threads);
    return s.used;
}

static void near_block(const lm_merge_walk *w, int64_t at, int64_t n, void *cells, double *sums)
{
    const lm_merge_job *j = w->job;
    const lm_blend *b = w->loops;
    void *base = lm_merge_cell(b, cells, 0), *x = lm_merge_cell(b, cells, 1);
    void *out = lm_merge_cell(b, cells, 2);
    (void)sums;
    b->load(j->base->dtype, j->base->data, at, base, n);
    b->load(j->model[0].dtype, j->model[0].data, at, x, n);
    b->near(j->param[LM_MERGE_T], base, x, out, n);
    b->store(j->out_dtype, j->out, at, out, n);
}

static lm_code nearswap(const lm_merge_job *j, lm_err *e)
{
    lm_merge_walk w = { .job = j,
                        .loops = lm_merge_loops(j),
                        .block = near_block,
                        .cells = j->work,
                        .rows = NEAR_ROWS };
    (void)e;
    lm_merge_go(&w, NULL);
    return LM_OK;
}

#define B LM_MERGE_BIT
const lm_merge_method lm_merge_other_methods[] = {
    { .name = "sce",
      .about = "deltas by their energy, where the models differ most and agree on the sign",
      .source = "arXiv:2408.07990",
      .base_required = true,
      .base_allowed = true,
      .min_models = 1,
      .takes = B(LM_MERGE_SELECT_TOPK),
      .defaults = B(LM_MERGE_SELECT_TOPK),
      .def = { [LM_MERGE_SELECT_TOPK] = 1 },
      .work = sce_work,
      .run = sce },
    { .name = "nearswap",
      .about = "the model where it is near the base, the base where it is far: t / |difference|",
      .source = "mergekit",
      .base_required = true,
      .base_allowed = true,
      .min_models = 1,
      .max_models = 1,
      .takes = B(LM_MERGE_T),
      .required = B(LM_MERGE_T),
      .work = nearswap_work,
      .run = nearswap },
    { .name = NULL },
};
