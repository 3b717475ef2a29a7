/* SPDX-License-Identifier: Apache-2.0 */
/* store_draw.c -- fresh weights, for a store or directly for a model folder. */
#include <math.h>

#include "base/hash.h"
#include "base/mem.h"
#include "base/rng.h"
#include "base/stop.h"
#include "model/store_impl.h"

/* Numbers are counted in the file's order, so that they depend on the published layout, not on
 * ours. */
typedef struct {
    lm_rng rng;
    const lm_slice *s;
    int64_t from; /* the first element drawn, */
    /* 0: in the file's order; otherwise in the block's order, if that is transposed */
    int64_t width, rows; /* of the whole matrix; rows of one of the stack */
    lm_dtype format;
    uint8_t *dst;
} draw_job;

static int64_t index_of(const draw_job *j, int64_t i)
{
    if (!j->width)
        return i;
    const int64_t rows = j->rows, row = i / j->width;
    return row / rows * rows * j->width + i % j->width * rows + row % rows;
}

static double number_at(const draw_job *j, int64_t i)
{
    uint64_t at = (uint64_t)index_of(j, i);
    switch (j->s->init) {
    case LM_INIT_NORMAL:
        return j->s->std * lm_rng_normal(j->rng, at);
    case LM_INIT_UNIFORM:
        return j->s->std * (2 * lm_rng_uniform(j->rng, at) - 1);
    case LM_INIT_LOG_RATE:
        return log(0.01 + 15.99 * lm_rng_uniform(j->rng, at));
    case LM_INIT_FULL:
        return j->s->std;
    case LM_INIT_ONES:
        return 1;
    case LM_INIT_ZEROS:
        return 0;
    }
    return 0;
}

static void draw_range(void *ctx, int64_t begin, int64_t end, int worker)
{
    enum { PIECE = 1024 };
    const draw_job *j = ctx;
    float piece[PIECE];
    (void)worker;
    for (int64_t at = begin, n; at < end; at += n) {
        n = end - at < PIECE ? end - at : PIECE;
        for (int64_t i = 0; i < n; i++)
            piece[i] = (float)number_at(j, j->from + at + i);
        lm_convert(LM_DTYPE_F32, piece, j->format, j->dst + (size_t)at * lm_dtype_size(j->format),
                   n);
    }
}

static draw_job job_of(const lm_model *m, int i, uint64_t seed)
{
    const lm_slice *s = &m->slice[i];
    return (draw_job){ .rng = lm_rng_make(seed, "init", lm_hash_str(s->name)),
                       .s = s,
                       .format = LM_DTYPE_F32 };
}

enum { GRAIN = 1 << 14 };

/* Fresh numbers that are kept as codes. */
static lm_code draw_codes(lm_store *s, int i, uint64_t seed, lm_err *e)
{
    int64_t count = lm_slice_count(&s->model->slice[i]);
    float *x = NULL;
    if (lm_alloc_n(&x, (size_t)count, sizeof *x, "fresh weights", e))
        return e->code;
    lm_slice_draw(s->model, i, seed, s->par, 0, count, x);
    lm_code rc = lm_store_put(s, i, LM_DTYPE_F32, x, e);
    lm_free(x);
    return rc;
}

/* True if fresh numbers of the tensor are asked for: those of an adapter are what it declared. */
static bool is_drawn(const lm_slice *s, lm_tensors which)
{
    return which == LM_TENSORS_NEW       ? s->may_lack
           : which == LM_TENSORS_ADAPTER ? s->of_adapter
                                         : lm_slice_is(s, which) || s->of_training;
}

lm_code lm_store_draw(lm_store *s, lm_tensors which, uint64_t seed, lm_err *e)
{
    const lm_model *m = s->model;
    lm_code rc = LM_OK;
    for (int i = 0; !rc && i < m->n_slices; i++) {
        const lm_slice *t = &m->slice[i];
        const lm_store_block *k = store_own(s, i);
        if (!is_drawn(t, which))
            continue;
        if (store_codes(m, t->param)) {
            rc = draw_codes(s, i, seed, e);
            continue;
        }
        draw_job j = job_of(m, i, seed);
        const store_piece p = store_piece_of(s, k, i), whole = store_whole(&p);
        j.dst = store_open(s, k, &p, e);
        if (!j.dst) {
            rc = e->code;
            break;
        }
        j.rows = whole.rows / whole.stack;
        j.width = t->transposed ? whole.cols : 0;
        j.format = k->format->element;
        lm_par_for(s->par, lm_slice_count(t), GRAIN, draw_range, &j);
        rc = store_close(s, k, &p, j.dst, e);
        rc = rc ? rc : store_into_panels(s, k, i, e);
    }
    store_end(s);
    return rc;
}

void lm_slice_draw(const lm_model *m, int i, uint64_t seed, lm_par *par, int64_t from,
                   int64_t count, float *dst)
{
    draw_job j = job_of(m, i, seed);
    j.from = from;
    j.dst = (uint8_t *)dst;
    lm_par_for(par, count, GRAIN, draw_range, &j);
}

lm_code lm_model_draw(const lm_model *m, uint64_t seed, lm_par *par, lm_folder *f, lm_sink *sink,
                      lm_err *e)
{
    enum { CHUNK = 1 << 22 }; /* elements: 16 MiB */
    float *buf = NULL;
    double done = 0, total = 0;
    lm_code rc = lm_alloc_n(&buf, CHUNK, sizeof *buf, "fresh weights", e);
    for (int i = 0; i < m->n_params; i++)
        total += (double)m->param[i].count;
    for (const lm_st_tensor *t; !rc && !lm_stopping() && (t = lm_folder_next(f));) {
        const lm_model_aside *again = lm_model_aside_find(m, t->name);
        int i = again ? again->slice : lm_model_slice(m, t->name);
        int64_t count = t->count; /* t is invalid after the last chunk */
        if (i < 0)
            rc = lm_fail(e, LM_EBUG, t->name, NULL, "is planned but is not a tensor of the model");
        for (int64_t at = 0; !rc && at < count && !lm_stopping(); at += CHUNK) {
            int64_t n = count - at < CHUNK ? count - at : CHUNK;
            lm_slice_draw(m, i, seed, par, at, n, buf);
            rc = lm_folder_write_as(f, LM_DTYPE_F32, buf, n, e);
            lm_progress(sink, "initialise", done += (double)n, total, "parameters", NULL);
        }
    }
    lm_free(buf);
    return rc;
}
