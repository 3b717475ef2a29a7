/* SPDX-License-Identifier: Apache-2.0 */
/* methods_task.c -- merges of pruned deltas: TIES, DARE, DELLA, breadcrumbs.
 *
 * theta + lambda Delta / divisor; Delta the sum of w_i prune(theta_i - theta), with or without an
 * election of signs.  Deltas are computed again, block by block, each time they are needed: for the
 * thresholds, for the L1 norms, for the sum. */
#include "merge/blocks.h"
#include "merge/entries.h"
#include "merge/prune.h"

typedef struct {
    const lm_merge_job *job;
    const lm_blend *loops;
    lm_prune_part part[LM_MERGE_MOST_MODELS]; /* those of weight other than 0 */
    double w[LM_MERGE_MOST_MODELS];
    int n;
    lm_prune how;
    bool vote, pruned;
    lm_blend_terms terms;
    /* scratch */
    lm_merge_scratch left;
    void *cells;           /* n + EXTRA rows per worker: deltas, base, result, draws */
    double *sums, *parts;  /* L1 norms before and after, of each model; of each group */
    void *row;             /* RANKED: [worker][n + 1][cols] reals: multipliers, deltas */
    lm_blend_entry *order; /* [worker][2 cols] */
} task;

enum { EXTRA = 3 };

/* Complete rows processed together where ranks are needed. */
static int64_t rows_of_group(const lm_merge_job *j)
{
    int64_t cols = lm_merge_cols(j);
    return cols && cols < LM_MERGE_CHUNK ? LM_MERGE_CHUNK / cols : 1;
}

static int64_t groups(const lm_merge_job *j, bool ranked)
{
    int64_t g = rows_of_group(j);
    return ranked ? (lm_merge_rows(j) + g - 1) / g : lm_merge_chunks(j->count);
}

static void lay_out(task *t, const lm_merge_job *j, int n, int threads)
{
    bool ranked = t->how == LM_PRUNE_RANKED;
    size_t m = (size_t)n, cols = ranked ? (size_t)lm_merge_cols(j) : 0, w = (size_t)threads;
    t->cells = lm_merge_take_cells(&t->left, n + EXTRA, threads);
    t->sums = lm_merge_take(&t->left, 2 * m, sizeof(double));
    t->parts = lm_merge_take(&t->left, 2 * m * (size_t)groups(j, ranked), sizeof(double));
    t->row = lm_merge_take(&t->left, w * (m + 1) * cols, lm_merge_wide(j) ? 8 : 4);
    t->order = lm_merge_take(&t->left, 2 * w * cols, sizeof *t->order);
}

static void fill_deltas(const void *ctx, int64_t at, int64_t n, void *out, void *cells)
{
    const task *t = ctx;
    const lm_merge_operand *base = t->job->base;
    t->loops->load(base->dtype, base->data, at, cells, n);
    for (int i = 0; i < t->n; i++) {
        const lm_merge_operand *o = t->part[i].of;
        t->loops->delta(o->dtype, o->data, at, cells, lm_merge_cell(t->loops, out, i), n);
    }
}

static size_t work_for(const lm_merge_job *j, int threads, lm_prune how)
{
    task t = { .how = how };
    lm_merge_values v = { .job = j, .loops = lm_merge_loops(j), .rows = j->n_models, .extra = 1 };
    lay_out(&t, j, j->n_models, threads);
    if (how == LM_PRUNE_SMALL || how == LM_PRUNE_BOTH_ENDS)
        lm_merge_select(&v, NULL, j->n_models * (how == LM_PRUNE_SMALL ? 1 : 2), threads, &t.left);
    return t.left.used;
}

/* Compute all thresholds in one pass. */
static void thresholds(task *t)
{
    lm_merge_values v = {
        .job = t->job, .loops = t->loops, .fill = fill_deltas, .ctx = t, .rows = t->n, .extra = 1
    };
    lm_merge_top top[2 * LM_MERGE_MOST_MODELS];
    int n = 0;
    for (int i = 0; i < t->n; i++) {
        top[n] = t->part[i].top;
        top[n++].row = i;
        if (t->how == LM_PRUNE_BOTH_ENDS) {
            top[n] = t->part[i].out;
            top[n++].row = i;
        }
    }
    lm_merge_select(&v, top, n, lm_par_threads(t->job->par), &t->left);
    for (int i = n = 0; i < t->n; i++) {
        t->part[i].top = top[n++];
        if (t->how == LM_PRUNE_BOTH_ENDS)
            t->part[i].out = top[n++];
    }
}

static void *multipliers(const task *t, int worker, int i)
{
    int64_t cols = lm_merge_cols(t->job);
    return (char *)t->row +
           ((size_t)worker * ((size_t)t->n + 1) + (size_t)i) * (size_t)cols * t->loops->real;
}

/* The pruned deltas of a block, and their L1 norms if `sums` is given; row_at is the beginning of
 * the row of multipliers. */
static void pruned_block(const task *t, int64_t at, int64_t n, int64_t row_at, void *cells,
                         int worker, double *sums)
{
    const lm_blend *b = t->loops;
    void *draw = lm_merge_cell(b, cells, t->n + 2);
    fill_deltas(t, at, n, cells, lm_merge_cell(b, cells, t->n));
    for (int i = 0; i < t->n; i++) {
        void *d = lm_merge_cell(b, cells, i);
        const char *keep = t->how == LM_PRUNE_RANKED ? multipliers(t, worker, i) : NULL;
        if (sums)
            sums[2 * i] += b->sum_abs(d, n);
        lm_prune_block(b, &t->part[i], d, at, n,
                       keep ? keep + (size_t)(at - row_at) * b->real : NULL, draw);
        if (sums)
            sums[2 * i + 1] += b->sum_abs(d, n);
    }
}

static void merged_block(const task *t, int64_t at, int64_t n, void *cells)
{
    const lm_blend *b = t->loops;
    void *base = lm_merge_cell(b, cells, t->n), *out = lm_merge_cell(b, cells, t->n + 1);
    if (t->vote) {
        b->agree(&t->terms, cells, LM_MERGE_STRIDE, base, out, n);
    } else {
        b->fill(out, 0, n);
        for (int i = 0; i < t->n; i++)
            b->axpy(lm_merge_cell(b, cells, i), t->w[i], out, n);
        b->axpy(base, 1, out, n);
    }
    b->store(t->job->out_dtype, t->job->out, at, out, n);
}

typedef struct {
    const task *task;
    double *parts; /* not NULL: norms only */
} span_job;

static void span(const span_job *s, int64_t begin, int64_t end, int64_t row_at, int worker,
                 double *sums)
{
    void *cells = lm_merge_cells_of(s->task->cells, s->task->n + EXTRA, worker);
    for (int64_t at = begin; at < end; at += LM_BLEND_BLOCK) {
        int64_t n = end - at < LM_BLEND_BLOCK ? end - at : LM_BLEND_BLOCK;
        pruned_block(s->task, at, n, row_at, cells, worker, sums);
        if (!sums)
            merged_block(s->task, at, n, cells);
    }
}

static double *part_sums(const span_job *s, int64_t group)
{
    double *sums = s->parts ? s->parts + group * 2 * s->task->n : NULL;
    for (int i = 0; sums && i < 2 * s->task->n; i++)
        sums[i] = 0;
    return sums;
}

static void flat_chunk(void *ctx, int64_t begin, int64_t end, int worker)
{
    const span_job *s = ctx;
    span(s, begin, end, 0, worker, part_sums(s, begin / LM_MERGE_CHUNK));
}

static void row_group(void *ctx, int64_t begin, int64_t end, int worker)
{
    const span_job *s = ctx;
    const task *t = s->task;
    const lm_blend *b = t->loops;
    const lm_merge_operand *base = t->job->base;
    int64_t cols = lm_merge_cols(t->job), step = LM_BLEND_BLOCK;
    double *sums = part_sums(s, begin / rows_of_group(t->job));
    void *cell = lm_merge_cells_of(t->cells, t->n + EXTRA, worker);
    char *d = multipliers(t, worker, t->n);
    for (int64_t r = begin; r < end; r++) {
        for (int i = 0; i < t->n; i++) {
            const lm_merge_operand *o = t->part[i].of;
            for (int64_t k = 0; k < cols; k += step) {
                int64_t n = cols - k < step ? cols - k : step;
                b->load(base->dtype, base->data, r * cols + k, cell, n);
                b->delta(o->dtype, o->data, r * cols + k, cell, d + (size_t)k * b->real, n);
            }
            if (t->part[i].how == LM_PRUNE_RANKED)
                lm_prune_row(b, &t->part[i], d, r * cols, cols, multipliers(t, worker, i),
                             t->order + (int64_t)worker * 2 * cols);
        }
        span(s, r * cols, (r + 1) * cols, r * cols, worker, sums);
    }
}

static void go(const task *t, double *parts)
{
    const lm_merge_job *j = t->job;
    span_job s = { t, parts };
    if (t->how == LM_PRUNE_RANKED && t->pruned)
        lm_par_for(j->par, lm_merge_rows(j), rows_of_group(j), row_group, &s);
    else
        lm_par_for(j->par, j->count, LM_MERGE_CHUNK, flat_chunk, &s);
}

/* Scale the rest of each delta to the L1 norm of the whole. */
static void match_norms(task *t)
{
    int64_t g = groups(t->job, t->how == LM_PRUNE_RANKED);
    bool odd = false;
    go(t, t->parts);
    for (int i = 0; i < t->n; i++) {
        double before = 0, after = 0;
        for (int64_t k = 0; k < g; k++) {
            before += t->parts[k * 2 * t->n + 2 * i];
            after += t->parts[k * 2 * t->n + 2 * i + 1];
        }
        if (t->part[i].how != LM_PRUNE_NONE && !(before < 1e-7) && !(after < 1e-7))
            t->part[i].scale = before / after;
        odd |= !isfinite(t->part[i].scale);
    }
    if (odd)
        lm_log(t->job->sink, LM_LOG_WARN,
               "%s: an input holds NaN or infinity, so the kept part of its delta becomes NaN",
               t->job->name);
}

static lm_code plan(task *t, lm_err *e)
{
    const lm_merge_job *j = t->job;
    double sum = 0, lambda = j->param[LM_MERGE_LAMBDA];
    for (int i = 0; i < j->n_models; i++) {
        double w = lm_merge_of(j, i, LM_MERGE_WEIGHT, j->param[LM_MERGE_WEIGHT]);
        sum += w;
        if (w == 0)
            continue;
        if (lm_prune_plan(j, i, t->how, &t->part[t->n], e))
            return e->code;
        t->pruned |= t->part[t->n].how != LM_PRUNE_NONE;
        t->w[t->n++] = w;
    }
    t->terms = (lm_blend_terms){ .k = t->n,
                                 .w = t->w,
                                 .lambda = lambda,
                                 .normalize = lm_merge_true(j, LM_MERGE_NORMALIZE),
                                 .vote = (lm_blend_vote)j->param[LM_MERGE_SIGN_ELECTION] };
    if (t->vote)
        return LM_OK;
    if (t->terms.normalize && fabs(sum) >= 1e-8)
        lambda /= sum;
    for (int i = 0; i < t->n; i++)
        t->w[i] *= lambda;
    return LM_OK;
}

static lm_code run(const lm_merge_job *j, lm_prune how, bool vote, lm_err *e)
{
    task t = { .job = j, .loops = lm_merge_loops(j), .how = how, .vote = vote };
    double one;
    if (plan(&t, e))
        return e->code;
    one = !vote ? t.w[0] : t.terms.lambda * (t.terms.normalize ? 1 : t.w[0]);
    if (!t.n || (t.n == 1 && !t.pruned && one == 1)) {
        lm_merge_copy(j, t.n ? t.part[0].of : j->base);
        return LM_OK;
    }
    t.left.at = j->work;
    lay_out(&t, j, t.n, lm_par_threads(j->par));
    if (t.pruned && (how == LM_PRUNE_SMALL || how == LM_PRUNE_BOTH_ENDS))
        thresholds(&t);
    if (t.pruned && j->param[LM_MERGE_RESCALE] == LM_RESCALE_L1)
        match_norms(&t);
    go(&t, NULL);
    return LM_OK;
}

/* Check densities and the parameters related to them. */
static lm_code check_for(const lm_merge_job *j, lm_prune how, lm_err *e)
{
    lm_merge_job silent = *j;
    lm_prune_part part;
    lm_code rc = LM_OK;
    silent.sink = NULL;
    for (int i = 0; i < j->n_models && !rc; i++)
        if (lm_merge_of(j, i, LM_MERGE_WEIGHT, j->param[LM_MERGE_WEIGHT]) != 0)
            rc = lm_prune_plan(&silent, i, how, &part, e);
    return rc;
}

#define PRUNED(name, how, vote)                                   \
    static lm_code name(const lm_merge_job *j, lm_err *e)         \
    {                                                             \
        return run(j, how, vote, e);                              \
    }                                                             \
    static lm_code name##_check(const lm_merge_job *j, lm_err *e) \
    {                                                             \
        return check_for(j, how, e);                              \
    }                                                             \
    static size_t name##_work(const lm_merge_job *j, int n)       \
    {                                                             \
        return work_for(j, n, how);                               \
    }
PRUNED(ties, LM_PRUNE_SMALL, true)
PRUNED(dare_linear, LM_PRUNE_DRAWN, false)
PRUNED(dare_ties, LM_PRUNE_DRAWN, true)
PRUNED(breadcrumbs, LM_PRUNE_BOTH_ENDS, false)
PRUNED(breadcrumbs_ties, LM_PRUNE_BOTH_ENDS, true)
PRUNED(della_linear, LM_PRUNE_RANKED, false)
PRUNED(della, LM_PRUNE_RANKED, true)

#define B LM_MERGE_BIT
#define TAKES                                                                                 \
    (B(LM_MERGE_WEIGHT) | B(LM_MERGE_DENSITY) | B(LM_MERGE_NORMALIZE) | B(LM_MERGE_RESCALE) | \
     B(LM_MERGE_LAMBDA))
#define ENTRY(fn, says, from, more, norm, scaling, ...)                                          \
    {                                                                                            \
        .name = #fn, .about = says, .source = from, .base_required = true, .base_allowed = true, \
        .min_models = 1, .takes = TAKES | (more), .required = B(LM_MERGE_WEIGHT),                \
        .defaults = (TAKES | (more)) & ~B(LM_MERGE_WEIGHT),                                      \
        .def = { [LM_MERGE_DENSITY] = 1,                                                         \
                 [LM_MERGE_NORMALIZE] = norm,                                                    \
                 [LM_MERGE_RESCALE] = scaling,                                                   \
                 [LM_MERGE_LAMBDA] = 1,                                                          \
                 __VA_ARGS__ },                                                                  \
        .check = fn##_check, .work = fn##_work, .run = fn                                        \
    }
#define GAMMA   [LM_MERGE_GAMMA] = 0.01
#define EPSILON [LM_MERGE_EPSILON] = 0.15
const lm_merge_method lm_merge_task_methods[] = {
    ENTRY(ties, "the largest deltas, where they agree on the sign", "arXiv:2306.01708",
          B(LM_MERGE_SIGN_ELECTION), 1, LM_RESCALE_NONE, ),
    ENTRY(dare_linear, "deltas dropped at random, summed", "arXiv:2311.03099", 0, 0,
          LM_RESCALE_EXPECTED, ),
    ENTRY(dare_ties, "deltas dropped at random, where they agree on the sign", "arXiv:2311.03099",
          B(LM_MERGE_SIGN_ELECTION), 0, LM_RESCALE_EXPECTED, ),
    ENTRY(della, "deltas dropped at random, small ones more often, where they agree on the sign",
          "arXiv:2406.11617", B(LM_MERGE_EPSILON) | B(LM_MERGE_SIGN_ELECTION), 1,
          LM_RESCALE_EXPECTED, EPSILON),
    ENTRY(della_linear, "deltas dropped at random, small ones more often, summed",
          "arXiv:2406.11617", B(LM_MERGE_EPSILON), 0, LM_RESCALE_EXPECTED, EPSILON),
    ENTRY(breadcrumbs, "deltas without the largest and the smallest, summed", "arXiv:2312.06795",
          B(LM_MERGE_GAMMA), 0, LM_RESCALE_NONE, GAMMA),
    ENTRY(breadcrumbs_ties,
          "deltas without the largest and the smallest, where they agree on the sign",
          "arXiv:2312.06795", B(LM_MERGE_GAMMA) | B(LM_MERGE_SIGN_ELECTION), 0, LM_RESCALE_NONE,
          GAMMA),
    { .name = NULL },
};
