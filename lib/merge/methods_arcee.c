/* SPDX-License-Identifier: Apache-2.0 */
/* methods_arcee.c -- Arcee fusion: a model's element replaces the base's where |delta| K reaches the
 * median of these scores and one and a half times their interquartile range, with K the
 * Kullback-Leibler divergence of the softmax of the model's row from that of the base's.
 *
 * The quartiles are those of the whole tensor, not of a sample. */
#include "merge/blocks.h"
#include "merge/entries.h"
#include "merge/select.h"

typedef struct {
    const lm_merge_job *job;
    const lm_blend *loops;
    lm_merge_scratch left;
    void *cells;      /* FUSE_ROWS a worker */
    double *distance; /* [rows]: the divergence of their softmax */
    double *powers;   /* [worker][2][kept_cols]: exp of a row of the base and of the model */
    uint64_t least;   /* smallest bits of a score that is merged */
} fusion;

enum { FUSE_ROWS = 3, SPAN = 512, MOST_KEPT = 16384 };

/* Powers of a row that are kept from one pass to the next; longer rows are computed twice. */
static int64_t kept_cols(const lm_merge_job *j)
{
    int64_t cols = lm_merge_cols(j);
    return cols <= MOST_KEPT ? cols : 0;
}

static void fuse_lay_out(fusion *f, const lm_merge_job *j, int threads)
{
    f->cells = lm_merge_take_cells(&f->left, FUSE_ROWS, threads);
    f->distance = lm_merge_take(&f->left, (size_t)lm_merge_rows(j), sizeof(double));
    f->powers = lm_merge_take(&f->left, 2 * (size_t)threads * (size_t)kept_cols(j), sizeof(double));
}

/* Elements k .. of a row of the base and of the model, as doubles. */
static int64_t pair_at(const fusion *f, int64_t row, int64_t k, double *base, double *x)
{
    const lm_merge_job *j = f->job;
    const lm_blend *wide = lm_blend_at(j->cpu, true);
    int64_t cols = lm_merge_cols(j), n = cols - k < SPAN ? cols - k : SPAN;
    wide->load(j->base->dtype, j->base->data, row * cols + k, base, n);
    wide->load(j->model[0].dtype, j->model[0].data, row * cols + k, x, n);
    return n;
}

/* exp(base - top_b) and exp(x - top_x) from element k of a row on. */
static int64_t powers_at(const fusion *f, int64_t row, int64_t k, const double top[2], double *b,
                         double *x)
{
    int64_t n = pair_at(f, row, k, b, x);
    for (int64_t i = 0; i < n; i++) {
        b[i] = exp(b[i] - top[0]);
        x[i] = exp(x[i] - top[1]);
    }
    return n;
}

/* sum p ln(p / q) with p, q the softmax of the model's and the base's row, each plus 1e-8.  Below 0
 * only by rounding.  powers: room for two rows of kept_cols. */
static double divergence(const fusion *f, int64_t row, double *powers)
{
    int64_t cols = lm_merge_cols(f->job), kept = kept_cols(f->job), n;
    double cell[2][SPAN], *b = cell[0], *x = cell[1];
    double top[2] = { -INFINITY, -INFINITY }, sum_b = 0, sum_x = 0, K = 0;
    for (int64_t k = 0; k < cols; k += n) {
        n = pair_at(f, row, k, b, x);
        for (int64_t i = 0; i < n; i++) {
            top[0] = b[i] > top[0] ? b[i] : top[0];
            top[1] = x[i] > top[1] ? x[i] : top[1];
        }
    }
    for (int64_t k = 0; k < cols; k += n) {
        b = kept ? powers + k : cell[0];
        x = kept ? powers + kept + k : cell[1];
        n = powers_at(f, row, k, top, b, x);
        for (int64_t i = 0; i < n; i++) {
            sum_b += b[i];
            sum_x += x[i];
        }
    }
    for (int64_t k = 0; k < cols; k += n) {
        b = kept ? powers + k : cell[0];
        x = kept ? powers + kept + k : cell[1];
        n = kept ? cols : powers_at(f, row, k, top, b, x);
        for (int64_t i = 0; i < n; i++) {
            double p = x[i] / sum_x + 1e-8, q = b[i] / sum_b + 1e-8;
            K += p * log(p / q);
        }
    }
    return K < 0 ? 0 : K;
}

static void divergences(void *ctx, int64_t begin, int64_t end, int worker)
{
    const fusion *f = ctx;
    double *powers = f->powers + 2 * (int64_t)worker * kept_cols(f->job);
    for (int64_t r = begin; r < end; r++)
        f->distance[r] = divergence(f, r, powers);
}

/* |theta_1 - theta_0| K, with theta_0 and theta_1 in cells 0 and 1. */
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

const lm_merge_method lm_merge_arcee_methods[] = {
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
