/* SPDX-License-Identifier: Apache-2.0 */
/* blocks.c -- see blocks.h. */
#include "merge/blocks.h"

#include <math.h>

static bool is_wide(const lm_merge_operand *o)
{
    return o && lm_dtype_size(o->dtype) > 2;
}

bool lm_merge_wide(const lm_merge_job *j)
{
    bool wide = is_wide(j->base);
    for (int i = 0; i < j->n_models; i++)
        wide |= is_wide(&j->model[i]);
    return wide;
}

int64_t lm_merge_cols(const lm_merge_job *j)
{
    return j->ndim ? j->dim[j->ndim - 1] : 1;
}

int64_t lm_merge_rows(const lm_merge_job *j)
{
    int64_t cols = lm_merge_cols(j);
    return cols ? j->count / cols : 0;
}

void *lm_merge_take(lm_merge_scratch *s, size_t n, size_t size)
{
    void *p = s->at ? s->at + s->used : NULL;
    s->used += (n * size + 63) / 64 * 64;
    return p;
}

void *lm_merge_take_cells(lm_merge_scratch *s, int rows, int threads)
{
    return lm_merge_take(s, (size_t)rows * (size_t)threads, LM_MERGE_STRIDE * sizeof(double));
}

static void walk_chunk(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_merge_walk *w = ctx;
    void *cells = lm_merge_cells_of(w->cells, w->rows, worker);
    double *sums = w->parts ? w->parts + begin / LM_MERGE_CHUNK * w->n_sums : NULL;
    for (int s = 0; sums && s < w->n_sums; s++)
        sums[s] = 0;
    for (int64_t at = begin; at < end; at += LM_BLEND_BLOCK)
        w->block(w, at, end - at < LM_BLEND_BLOCK ? end - at : LM_BLEND_BLOCK, cells, sums);
}

void lm_merge_go(const lm_merge_walk *w, double *sums)
{
    int64_t chunks = lm_merge_chunks(w->job->count);
    lm_par_for(w->job->par, w->job->count, LM_MERGE_CHUNK, walk_chunk, (void *)(uintptr_t)w);
    for (int s = 0; sums && s < w->n_sums; s++) {
        sums[s] = 0;
        for (int64_t c = 0; c < chunks; c++)
            sums[s] += w->parts[c * w->n_sums + s];
    }
}

typedef struct {
    const lm_merge_job *job;
    const lm_merge_operand *from;
} copy;

static void copy_chunk(void *ctx, int64_t begin, int64_t end, int worker)
{
    const copy *c = ctx;
    lm_dtype from = c->from->dtype, to = c->job->out_dtype;
    size_t size = lm_dtype_size(from);
    double cell[256];
    (void)worker;
    if (from == to) {
        memcpy((char *)c->job->out + (size_t)begin * size,
               (const char *)c->from->data + (size_t)begin * size, (size_t)(end - begin) * size);
        return;
    }
    const lm_blend *b = lm_blend_at(c->job->cpu, size > 2);
    for (int64_t at = begin; at < end; at += 256) {
        int64_t n = end - at < 256 ? end - at : 256;
        b->load(from, c->from->data, at, cell, n);
        b->store(to, c->job->out, at, cell, n);
    }
}

void lm_merge_copy(const lm_merge_job *j, const lm_merge_operand *from)
{
    copy c = { j, from };
    lm_par_for(j->par, j->count, LM_MERGE_CHUNK, copy_chunk, &c);
}

void lm_merge_list(const lm_merge_job *j, const lm_merge_operand **of)
{
    for (int i = 0; i < j->n_models; i++)
        of[i] = &j->model[i];
}

bool lm_merge_cancels(const double *w, int n)
{
    double sum = 0, size = 0;
    for (int i = 0; i < n; i++) {
        sum += w[i];
        size += fabs(w[i]);
    }
    return fabs(sum) <= 1e-12 * size;
}

enum { SUM_ROWS = 2 };

size_t lm_merge_sum_work(int threads)
{
    lm_merge_scratch s = { 0 };
    lm_merge_take_cells(&s, SUM_ROWS, threads);
    return s.used;
}

void lm_merge_sum_block(const lm_merge_job *j, const lm_blend *b, const lm_merge_sum *s, int64_t at,
                        int64_t n, void *cells)
{
    void *acc = lm_merge_cell(b, cells, 0), *base = lm_merge_cell(b, cells, 1);
    bool begun = false;
    if (s->base) {
        b->load(s->base->dtype, s->base->data, at, base, n);
        memset(acc, 0, (size_t)n * b->real);
    }
    for (int i = 0; i < s->n; i++) {
        const lm_merge_operand *x = s->of[i];
        if (s->c[i] == 0)
            continue;
        if (s->base) {
            b->add_delta(x->dtype, x->data, at, base, s->c[i], acc, n);
        } else if (begun) {
            b->add(x->dtype, x->data, at, s->c[i], acc, n);
        } else {
            b->start(x->dtype, x->data, at, s->c[i], acc, n);
        }
        begun = true;
    }
    if (s->base)
        b->axpy(base, 1, acc, n);
    else if (!begun)
        memset(acc, 0, (size_t)n * b->real);
    b->store(j->out_dtype, j->out, at, acc, n);
}

static void sum_block(const lm_merge_walk *w, int64_t at, int64_t n, void *cells, double *sums)
{
    (void)sums;
    lm_merge_sum_block(w->job, w->loops, w->ctx, at, n, cells);
}

void lm_merge_sum_run(const lm_merge_job *j, const lm_merge_sum *s, void *work)
{
    lm_merge_walk w = { .job = j,
                        .loops = lm_merge_loops(j),
                        .ctx = s,
                        .block = sum_block,
                        .cells = work,
                        .rows = SUM_ROWS };
    int used = 0, last = 0;
    for (int i = 0; i < s->n; i++)
        if (s->c[i] != 0) {
            used++;
            last = i;
        }
    if (used == 1 && s->c[last] == 1)
        lm_merge_copy(j, s->of[last]);
    else if (!used && s->base)
        lm_merge_copy(j, s->base);
    else
        lm_merge_go(&w, NULL);
}
