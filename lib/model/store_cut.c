/* SPDX-License-Identifier: Apache-2.0 */
/* store_cut.c -- where the part of a tensor that one rank has (lm_cut) lies in the whole one, as files have it. */
#include "model/store_impl.h"

int store_file_shape(const lm_store *s, const lm_store_block *k, int i, int64_t dim[LM_MAX_DIMS])
{
    const store_piece p = store_piece_of(s, k, i);
    const lm_cut *cut = &s->model->slice[p.tensor].cut;
    if (!k->state) {
        const lm_slice *t = &s->model->slice[i];
        memcpy(dim, t->dim, sizeof t->dim);
        return t->ndim;
    }
    const struct lm_state_part *part = &k->state->part[i];
    memcpy(dim, part->shape.dim, sizeof part->shape.dim);
    if (p.cut == cut && cut->ranks > 1)
        dim[cut->dim] = cut->whole;
    if (part->turned) {
        const int64_t first = dim[0];
        dim[0] = dim[1];
        dim[1] = first;
    }
    return part->shape.ndim;
}

/* Blocks of [rows, cols] elements behind each other in files, of which the part has some of the rows or of the columns. */
typedef struct {
    int64_t blocks, rows, cols; /* of the part */
    bool by_rows;
} file_view;

/* stacked: files have matrices of the tensor below each other, each turned. */
static file_view view_of(const store_piece *p, const lm_cut *cut, bool stacked)
{
    if (!p->turned || (stacked && cut->dim == 0)) /* rows, or whole matrices */
        return (file_view){ 1, p->rows, p->cols, cut->dim == 0 };
    return (file_view){ p->stack, p->cols, p->rows / p->stack, cut->dim == 1 };
}

/* Of a stack of turned matrices rows cannot be chosen in files, but whole matrices. */
static lm_code check_stack(const lm_slice *t, const store_piece *p, lm_err *e)
{
    const lm_cut *cut = &t->cut;
    const int64_t per = p->rows / p->stack;
    lm_range r;
    for (int64_t k = 0; lm_cut_at(cut, k, &r); k++)
        if (t->dim[0] * per != cut->whole || r.from % per || r.count % per)
            return lm_fail(e, LM_EBUG, t->name, NULL, "a part of a stack that files turn");
    return LM_OK;
}

/* The runs of one block: each range of rows is one, of columns each row has one. */
static lm_code block_runs(const file_view *v, const lm_cut *cut, int64_t block, store_run_fn *fn,
                          void *ctx, lm_err *e)
{
    const int64_t lines = v->by_rows ? 1 : v->rows, width = v->by_rows ? v->cols : 1,
                  own = v->by_rows ? v->rows : v->cols;
    lm_range r;
    for (int64_t line = block * lines; line < (block + 1) * lines; line++) {
        int64_t local = line * own;
        for (int64_t k = 0; lm_cut_at(cut, k, &r); k++) {
            if (r.count &&
                fn(ctx, local * width, (line * cut->whole + r.from) * width, r.count * width, e))
                return e->code;
            local += r.count;
        }
    }
    return LM_OK;
}

/* Runs of a piece, of which some rows are this rank's. */
typedef struct {
    const store_piece *p;
    store_run_fn *fn;
    void *ctx;
} own_runs;

/* In the order of files rows are columns of a turned matrix: each line of it has some. */
static lm_code own_run(void *ctx, int64_t local, int64_t at, int64_t count, lm_err *e)
{
    const own_runs *o = ctx;
    const store_piece *p = o->p;
    const int64_t unit = p->turned ? 1 : p->cols, line = p->turned ? p->rows : p->rows * p->cols,
                  first = p->own.row * unit, own = p->own.rows * unit;
    for (int64_t i = 0, n; i < count; i += n) {
        const int64_t in = (local + i) % line, lines = (local + i) / line,
                      left = line - in < count - i ? line - in : count - i,
                      from = in > first ? in : first,
                      end = in + left < first + own ? in + left : first + own;
        n = left;
        if (from < end &&
            o->fn(o->ctx, lines * own + from - first, at + i + from - in, end - from, e))
            return e->code;
    }
    return LM_OK;
}

static lm_code each_run(const lm_store *s, const lm_store_block *k, const store_piece *p,
                        store_run_fn *fn, void *ctx, lm_err *e)
{
    const lm_slice *t = &s->model->slice[p->tensor];
    const bool stacked = !k->state && p->turned && t->ndim == 3;
    if (!p->cut || p->cut->ranks == 1)
        return fn(ctx, 0, 0, p->rows * p->cols, e);
    if (stacked && t->cut.dim == 0 && check_stack(t, p, e))
        return e->code;
    const file_view v = view_of(p, &t->cut, stacked);
    for (int64_t b = 0; b < v.blocks; b++)
        if (block_runs(&v, &t->cut, b, fn, ctx, e))
            return e->code;
    return LM_OK;
}

lm_code store_each_run(const lm_store *s, const lm_store_block *k, int i, store_run_fn *fn,
                       void *ctx, lm_err *e)
{
    const store_piece p = store_piece_of(s, k, i);
    own_runs own = { &p, fn, ctx };
    if (!p.own.rows)
        return LM_OK;
    return store_is_own(&p) ? each_run(s, k, &p, fn, ctx, e) : each_run(s, k, &p, own_run, &own, e);
}
