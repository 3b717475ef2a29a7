/* methods_other.c -- SCE, nearswap, Arcee fusion: merges with a rule of their own for which
 * elements move. */
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
    bool chosen; /* only what is in top is merged */
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
    t->loops->variance(t->job->n_models, cells, LM_BLEND_BLOCK, out, n);
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

/* Deltas of a block, zero where the variance did not make the choice. */
static void chosen_deltas(const sce_task *t, int64_t at, int64_t n, void *cells)
{
    const lm_blend *b = t->loops;
    int k = t->job->n_models;
    void *variance = lm_merge_cell(b, cells, k + 2), *zeros = lm_merge_cell(b, cells, k + 3);
    deltas(t, at, n, cells, lm_merge_cell(b, cells, k));
    if (!t->chosen)
        return;
    b->variance(k, cells, LM_BLEND_BLOCK, variance, n);
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
    w->loops->agree(&t->terms, cells, LM_BLEND_BLOCK, lm_merge_cell(w->loops, cells, k), out, n);
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
            lm_log(j->sink, LM_LOG_WARN, "%s: select_topk %g of %.0f elements that vary is none",
                   j->name, j->param[LM_MERGE_SELECT_TOPK], varied);
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

/* --- Arcee fusion ---------------------------------------------------------------------------- */

typedef struct {
    const lm_merge_job *job;
    const lm_blend *loops;
    lm_merge_scratch left;
    void *cells;      /* FUSE_ROWS a worker */
    double *distance; /* [rows]: the divergence of their softmax */
    uint64_t least;   /* bits of the score that an element must have */
} fusion;

enum { FUSE_ROWS = 3 };

static void fuse_lay_out(fusion *f, const lm_merge_job *j, int threads)
{
    f->cells = lm_merge_take_cells(&f->left, FUSE_ROWS, threads);
    f->distance = lm_merge_take(&f->left, (size_t)lm_merge_rows(j), sizeof(double));
}

/* Elements k .. of a row of the base and of the model, as doubles. */
static int64_t pair_at(const fusion *f, int64_t row, int64_t k, double *base, double *x)
{
    const lm_merge_job *j = f->job;
    const lm_blend *wide = lm_blend_at(j->cpu, true);
    int64_t cols = lm_merge_cols(j), n = cols - k < 512 ? cols - k : 512;
    wide->load(j->base->dtype, j->base->data, row * cols + k, base, n);
    wide->load(j->model[0].dtype, j->model[0].data, row * cols + k, x, n);
    return n;
}

/* sum p ln(p / q) with p, q the softmax of the model's and the base's row, each plus 1e-8.  Never
 * below 0 but for rounding. */
static double divergence(const fusion *f, int64_t row)
{
    int64_t cols = lm_merge_cols(f->job), n;
    double b[512], x[512], top_b = -INFINITY, top_x = -INFINITY, sum_b = 0, sum_x = 0, K = 0;
    for (int64_t k = 0; k < cols; k += n) {
        n = pair_at(f, row, k, b, x);
        for (int64_t i = 0; i < n; i++) {
            top_b = b[i] > top_b ? b[i] : top_b;
            top_x = x[i] > top_x ? x[i] : top_x;
        }
    }
    for (int64_t k = 0; k < cols; k += n) {
        n = pair_at(f, row, k, b, x);
        for (int64_t i = 0; i < n; i++) {
            sum_b += exp(b[i] - top_b);
            sum_x += exp(x[i] - top_x);
        }
    }
    for (int64_t k = 0; k < cols; k += n) {
        n = pair_at(f, row, k, b, x);
        for (int64_t i = 0; i < n; i++) {
            double p = exp(x[i] - top_x) / sum_x + 1e-8, q = exp(b[i] - top_b) / sum_b + 1e-8;
            K += p * log(p / q);
        }
    }
    return K < 0 ? 0 : K;
}

static void divergences(void *ctx, int64_t begin, int64_t end, int worker)
{
    const fusion *f = ctx;
    (void)worker;
    for (int64_t r = begin; r < end; r++)
        f->distance[r] = divergence(f, r);
}

/* |theta_1 - theta_0| K, with the two in cells 0 and 1. */
static void fill_scores(const void *ctx, int64_t at, int64_t n, void *out, void *cells)
{
    const fusion *f = ctx;
    const lm_merge_job *j = f->job;
    const lm_blend *b = f->loops;
    int64_t cols = lm_merge_cols(j);
    b->load(j->base->dtype, j->base->data, at, cells, n);
    b->delta(j->model[0].dtype, j->model[0].data, at, cells, out, n);
    for (int64_t i = 0; i < n;) {
        int64_t row = (at + i) / cols, len = (row + 1) * cols - at - i;
        len = len < n - i ? len : n - i;
        b->scale((char *)out + (size_t)i * b->real, f->distance[row], len);
        i += len;
    }
}

static double from_bits(const lm_blend *b, uint64_t bits)
{
    uint32_t low = (uint32_t)bits;
    return lm_get(b->real == 8 ? LM_DTYPE_F64 : LM_DTYPE_F32,
                  b->real == 8 ? (const void *)&bits : (const void *)&low, 0);
}

/* The bits of the least real that is >= v. */
static uint64_t bits_at_least(const lm_blend *b, double v)
{
    uint64_t bits;
    float f = (float)v;
    if (b->real == 8) {
        b->bits(&v, &bits, 1);
        return bits;
    }
    b->bits(&f, &bits, 1);
    return bits + ((double)f < v);
}

/* median + 1.5 (third quartile - first), of the scores in order at floor(q (n - 1)). */
static void find_threshold(fusion *f)
{
    const lm_merge_job *j = f->job;
    lm_merge_values v = {
        .job = j, .loops = f->loops, .fill = fill_scores, .ctx = f, .rows = 1, .extra = 1
    };
    lm_merge_top top[3] = { 0 };
    double at[3];
    for (int i = 0; i < 3; i++)
        top[i].k = j->count - (int64_t)(0.25 * (i + 1) * (double)(j->count - 1));
    lm_merge_select(&v, top, 3, lm_par_threads(j->par), &f->left);
    for (int i = 0; i < 3; i++)
        at[i] = from_bits(f->loops, top[i].bits);
    f->least = bits_at_least(f->loops, at[1] + 1.5 * (at[2] - at[0]));
}

static void fuse_block(const lm_merge_walk *w, int64_t at, int64_t n, void *cells, double *sums)
{
    const fusion *f = w->ctx;
    const lm_merge_job *j = w->job;
    const lm_blend *b = w->loops;
    void *base = lm_merge_cell(b, cells, 0), *x = lm_merge_cell(b, cells, 1);
    void *score = lm_merge_cell(b, cells, 2);
    (void)sums;
    b->load(j->model[0].dtype, j->model[0].data, at, x, n);
    if (f->least) {
        fill_scores(f, at, n, score, base);
        b->keep_bits(score, f->least, UINT64_MAX, 1, n);
        b->choose(score, base, x, n);
    }
    b->store(j->out_dtype, j->out, at, x, n);
}

static size_t arcee_work(const lm_merge_job *j, int threads)
{
    fusion f = { .job = j, .loops = lm_merge_loops(j) };
    lm_merge_values v = { .job = j, .loops = f.loops, .rows = 1, .extra = 1 };
    fuse_lay_out(&f, j, threads);
    lm_merge_select(&v, NULL, 3, threads, &f.left);
    return f.left.used;
}

static lm_code arcee_fusion(const lm_merge_job *j, lm_err *e)
{
    fusion f = { .job = j, .loops = lm_merge_loops(j), .left.at = j->work };
    lm_merge_walk w = {
        .job = j, .loops = f.loops, .ctx = &f, .block = fuse_block, .rows = FUSE_ROWS
    };
    int64_t cols = lm_merge_cols(j);
    (void)e;
    if (!j->count)
        return LM_OK;
    fuse_lay_out(&f, j, lm_par_threads(j->par));
    w.cells = f.cells;
    lm_par_for(j->par, lm_merge_rows(j), cols < 4096 ? 4096 / cols : 1, divergences, &f);
    find_threshold(&f);
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
      .takes = B(LM_MERGE_SELECT_TOPK) | B(LM_MERGE_INT8_MASK),
      .defaults = B(LM_MERGE_SELECT_TOPK) | B(LM_MERGE_INT8_MASK),
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
    { .name = "arcee_fusion",
      .about = "the model's elements where its change matters most, the base's elsewhere",
      .source = "mergekit",
      .base_required = true,
      .base_allowed = true,
      .min_models = 1,
      .max_models = 1,
      .work = arcee_work,
      .run = arcee_fusion },
    { .name = NULL },
};
