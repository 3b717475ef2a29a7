/* SPDX-License-Identifier: Apache-2.0 */
/* methods_ram.c -- Reinforced agent merging (arXiv:2601.13572): a delta of one model only is kept,
 * deltas of several models are averaged.
 *
 *   a_i = |d_i| > epsilon,  c = sum_i a_i
 *   ram         t0 + sum_i a_i d_i / max(c, 1)
 *   ramplus_tl  the same, with d_i times lambda_i where c = 1,
 *               lambda_i = 1 + r min(alpha, shared_i / unique_i)
 * shared_i and unique_i count the elements of the tensor where model i has a delta and c > 1, c = 1.
 * The paper counts over the whole model; over each tensor, as here, is mergekit's way. */
#include "merge/blocks.h"
#include "merge/entries.h"

enum { RAM_EXTRA = 2 }; /* rows beside the deltas: base, result */

typedef struct {
    const lm_merge_job *job;
    void *cells;
    double *parts; /* shared and unique of each model, of a chunk */
    double lambda[LM_MERGE_MOST_MODELS];
} ram_task;

static size_t ram_lay_out(ram_task *t, const lm_merge_job *j, int threads, bool counts)
{
    lm_merge_scratch s = { .at = j->work };
    t->job = j;
    t->cells = lm_merge_take_cells(&s, j->n_models + RAM_EXTRA, threads);
    if (counts)
        t->parts = lm_merge_take(&s, 2 * (size_t)j->n_models * (size_t)lm_merge_chunks(j->count),
                                 sizeof(double));
    return s.used;
}

static size_t ram_work(const lm_merge_job *j, int threads)
{
    ram_task t;
    lm_merge_job sized = *j;
    sized.work = NULL;
    return ram_lay_out(&t, &sized, threads, false);
}

static size_t ramplus_work(const lm_merge_job *j, int threads)
{
    ram_task t;
    lm_merge_job sized = *j;
    sized.work = NULL;
    return ram_lay_out(&t, &sized, threads, true);
}

static void ram_deltas(const ram_task *t, const lm_blend *b, int64_t at, int64_t n, void *cells)
{
    const lm_merge_job *j = t->job;
    void *base = lm_merge_cell(b, cells, j->n_models);
    b->load(j->base->dtype, j->base->data, at, base, n);
    for (int i = 0; i < j->n_models; i++)
        b->delta(j->model[i].dtype, j->model[i].data, at, base, lm_merge_cell(b, cells, i), n);
}

/* Loops for both reals.  A NaN is not below epsilon, so it counts and propagates to the result. */
#define RAM_LOOPS(real, absolute)                                                                 \
    static void merge_##real(const ram_task *t, const lm_blend *b, void *cells, int64_t n)        \
    {                                                                                             \
        int k = t->job->n_models;                                                                 \
        real eps = (real)t->job->param[LM_MERGE_RAM_EPSILON],                                     \
             *out = lm_merge_cell(b, cells, k + 1);                                               \
        const real *base = lm_merge_cell(b, cells, k);                                            \
        int count[LM_BLEND_BLOCK] = { 0 };                                                        \
        for (int i = 0; i < k; i++) {                                                             \
            const real *d = lm_merge_cell(b, cells, i);                                           \
            for (int64_t x = 0; x < n; x++)                                                       \
                count[x] += !(absolute(d[x]) <= eps);                                             \
        }                                                                                         \
        memset(out, 0, (size_t)n * sizeof *out);                                                  \
        for (int i = 0; i < k; i++) {                                                             \
            const real *d = lm_merge_cell(b, cells, i), lambda = (real)t->lambda[i];              \
            for (int64_t x = 0; x < n; x++)                                                       \
                if (!(absolute(d[x]) <= eps))                                                     \
                    out[x] += count[x] == 1 ? d[x] * lambda : d[x] / (real)count[x];              \
        }                                                                                         \
        for (int64_t x = 0; x < n; x++)                                                           \
            out[x] += base[x];                                                                    \
    }                                                                                             \
    static void count_##real(const ram_task *t, const lm_blend *b, void *cells, int64_t n,        \
                             double *sums)                                                        \
    {                                                                                             \
        int k = t->job->n_models;                                                                 \
        real eps = (real)t->job->param[LM_MERGE_RAM_EPSILON];                                     \
        for (int64_t x = 0; x < n; x++) {                                                         \
            int c = 0, who = 0;                                                                   \
            for (int i = 0; i < k; i++) {                                                         \
                const real *d = lm_merge_cell(b, cells, i);                                       \
                bool active = !(absolute(d[x]) <= eps);                                           \
                c += active;                                                                      \
                who = active ? i : who;                                                           \
            }                                                                                     \
            if (c == 1)                                                                           \
                sums[2 * who + 1]++;                                                              \
            for (int i = 0; c > 1 && i < k; i++)                                                  \
                sums[2 * i] += !(absolute(((const real *)lm_merge_cell(b, cells, i))[x]) <= eps); \
        }                                                                                         \
    }
RAM_LOOPS(float, fabsf)
RAM_LOOPS(double, fabs)

static void ram_block(const lm_merge_walk *w, int64_t at, int64_t n, void *cells, double *sums)
{
    const ram_task *t = w->ctx;
    const lm_merge_job *j = w->job;
    (void)sums;
    ram_deltas(t, w->loops, at, n, cells);
    (w->loops->real == sizeof(float) ? merge_float : merge_double)(t, w->loops, cells, n);
    w->loops->store(j->out_dtype, j->out, at, lm_merge_cell(w->loops, cells, j->n_models + 1), n);
}

static void ram_count(const lm_merge_walk *w, int64_t at, int64_t n, void *cells, double *sums)
{
    const ram_task *t = w->ctx;
    ram_deltas(t, w->loops, at, n, cells);
    (w->loops->real == sizeof(float) ? count_float : count_double)(t, w->loops, cells, n, sums);
}

static void find_lambdas(ram_task *t)
{
    const lm_merge_job *j = t->job;
    double sums[2 * LM_MERGE_MOST_MODELS], alpha = j->param[LM_MERGE_RAM_ALPHA];
    lm_merge_walk w = { .job = j,
                        .loops = lm_merge_loops(j),
                        .ctx = t,
                        .block = ram_count,
                        .cells = t->cells,
                        .rows = j->n_models + RAM_EXTRA,
                        .n_sums = 2 * j->n_models,
                        .parts = t->parts };
    lm_merge_go(&w, sums);
    for (int i = 0; i < j->n_models; i++) {
        double shared = sums[2 * i], unique = sums[2 * i + 1];
        /* without unique elements the factor is not used */
        double rho = unique > 0 ? shared / unique : 0;
        t->lambda[i] = 1 + j->param[LM_MERGE_RAM_R] * (rho < alpha ? rho : alpha);
    }
}

static lm_code run_ram(const lm_merge_job *j, bool plus)
{
    ram_task t;
    lm_merge_walk w = { .job = j,
                        .loops = lm_merge_loops(j),
                        .ctx = &t,
                        .block = ram_block,
                        .rows = j->n_models + RAM_EXTRA };
    ram_lay_out(&t, j, lm_par_threads(j->par), plus);
    w.cells = t.cells;
    for (int i = 0; i < j->n_models; i++)
        t.lambda[i] = 1;
    if (plus)
        find_lambdas(&t);
    lm_merge_go(&w, NULL);
    return LM_OK;
}

static lm_code ram(const lm_merge_job *j, lm_err *e)
{
    (void)e;
    return run_ram(j, false);
}

static lm_code ramplus(const lm_merge_job *j, lm_err *e)
{
    (void)e;
    return run_ram(j, true);
}

#define B LM_MERGE_BIT
const lm_merge_method lm_merge_ram_methods[] = {
    { .name = "ram",
      .about = "deltas that one model alone has whole, those of several averaged",
      .source = "arXiv:2601.13572",
      .base_required = true,
      .base_allowed = true,
      .min_models = 1,
      .takes = B(LM_MERGE_RAM_EPSILON),
      .defaults = B(LM_MERGE_RAM_EPSILON),
      .def = { [LM_MERGE_RAM_EPSILON] = 1e-5 },
      .pieces = true,
      .work = ram_work,
      .run = ram },
    { .name = "ramplus_tl",
      .about = "ram, with the deltas of one model alone raised where it shares many",
      .source = "arXiv:2601.13572",
      .base_required = true,
      .base_allowed = true,
      .min_models = 1,
      .takes = B(LM_MERGE_RAM_EPSILON) | B(LM_MERGE_RAM_R) | B(LM_MERGE_RAM_ALPHA),
      .defaults = B(LM_MERGE_RAM_EPSILON) | B(LM_MERGE_RAM_R) | B(LM_MERGE_RAM_ALPHA),
      .def = { [LM_MERGE_RAM_EPSILON] = 1e-5, [LM_MERGE_RAM_R] = 0.1, [LM_MERGE_RAM_ALPHA] = 0.2 },
      .work = ramplus_work,
      .run = ramplus },
    { .name = NULL },
};
