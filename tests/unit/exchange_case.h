/* SPDX-License-Identifier: Apache-2.0 */
/* exchange_case.h -- the exchanges between all placements of a value along one axis, on any backend. */
#ifndef LM_TESTS_EXCHANGE_CASE_H
#define LM_TESTS_EXCHANGE_CASE_H

#include "base/mem.h"
#include "graph/backend.h"
#include "graph/links.h"
#include "graph/shard.h"

enum { ROWS = 12, COLS = 10, ROOM = 64 * ROWS * COLS };

static const lm_placement placements[] = {
    { .share = LM_REPLICATED },
    { .share = LM_PARTIAL },
    { .share = LM_SPLIT, .at = 0 },
    { .share = LM_SPLIT, .at = 1 },
    { .share = LM_SPLIT, .at = 0, .pieces = { .n = 2, .run = { { 1, 6, 1 }, { 1, 6, 1 } } } },
    { .share = LM_SPLIT, .at = 1, .pieces = { .n = 1, .run = { { 2, 5, 1 } } } },
    /* of which several ranks hold some: copies, and addends */
    { .share = LM_SPLIT, .at = 1, .pieces = { .n = 2, .run = { { 1, 5, 1 }, { 1, 5, 5 } } } },
    { .share = LM_SPLIT,
      .at = 1,
      .pieces = { .n = 2, .run = { { 1, 5, 1 }, { 1, 5, 5 } } },
      .sum = true },
};
enum { N_PLACEMENTS = sizeof placements / sizeof *placements };

static inline float number(int64_t i)
{
    return (float)(i * 7 % 31 - 9);
}

/* What a rank has; addends: of rank r a multiple of the number, and on rank 0 what is left; of what ranks
 * share, likewise. */
static inline int64_t fill(const lm_placement *p, int ranks, int rank, float *out)
{
    int64_t n = 0;
    for (int64_t i = 0; i < (int64_t)ROWS * COLS; i++) {
        int64_t at = p->at == 0 ? i / COLS : i % COLS, len = p->at == 0 ? ROWS : COLS;
        bool mine = p->share != LM_SPLIT;
        lm_range r;
        for (int64_t k = 0; !mine && lm_portions_at(&p->pieces, len, ranks, rank, k, &r); k++)
            mine = at >= r.from && at < r.from + r.count;
        float x = number(i), left = (float)(1 - ranks * (ranks - 1) / 2);
        const bool addend = p->share == LM_PARTIAL || (p->sum && ranks > 1 && at >= COLS / 2);
        if (mine)
            out[n++] = addend ? x * (rank ? (float)rank : left) : x;
    }
    return n;
}

/* A rank's memory on its backend: operand, result and scratch, ROOM floats each. */
typedef struct {
    lm_backend *b;
    lm_links *links;
    float *x, *y, *work;
} exchange_rank;

static inline lm_code exchange_open(lm_backend *b, lm_links *l, exchange_rank *r, lm_err *e)
{
    const size_t bytes = ROOM * sizeof(float);
    *r = (exchange_rank){ .b = b, .links = l };
    return b->alloc(b, bytes, "a test", (void **)&r->x, e) ||
                   b->alloc(b, bytes, "a test", (void **)&r->y, e) ||
                   b->alloc(b, bytes, "a test", (void **)&r->work, e)
               ? e->code
               : LM_OK;
}

static inline void exchange_close(exchange_rank *r)
{
    float *all[] = { r->x, r->y, r->work };
    for (int i = 0; i < 3; i++)
        if (all[i])
            r->b->free(r->b, all[i], ROOM * sizeof(float));
}

/* The node's kernel, from `x` to `y` on the host. */
static inline lm_code exchange_run(const exchange_rank *r, const lm_graph *g, const float *x,
                                   float *y, lm_err *e)
{
    lm_backend *b = r->b;
    lm_links *by_axis[LM_AXES] = { [LM_AXIS_CP] = r->links };
    const lm_step step = { .links = by_axis };
    lm_tensor in[LM_MAX_IN], out[LM_MAX_OUT];
    lm_call call = lm_node_call(g, &g->node[0], in, out);
    const lm_kernel *k = b->kernel(b, g->node[0].op->name, LM_DTYPE_F32);
    in[0].data = r->x;
    out[0].data = r->y;
    call.step = &step;
    call.work = r->work;
    call.stream = b->main;
    if (k->work && k->work(&call, 1) > ROOM * sizeof(float))
        return lm_fail(e, LM_EBUG, "exchange", NULL, "wants more scratch than the test has");
    if (b->copy(b, r->x, x, (size_t)lm_tensor_count(&in[0]) * sizeof *x, NULL, e))
        return e->code;
    k->run(&call);
    if (r->links->failure.code)
        *e = r->links->failure;
    return e->code || b->copy(b, y, r->y, (size_t)lm_tensor_count(&out[0]) * sizeof *y, NULL, e) ||
                   b->sync(b, NULL, e)
               ? e->code
               : LM_OK;
}

/* Whether the exchange from one placement to another gives each rank what it should have. */
static inline lm_code exchange_pair(const exchange_rank *r, const lm_placement *from,
                                    const lm_placement *placed, lm_err *e)
{
    lm_mesh mesh = lm_mesh_alone;
    lm_tensor whole = lm_shape2(LM_DTYPE_F32, ROWS, COLS);
    float x[ROWS * COLS], y[ROWS * COLS], want[ROWS * COLS];
    lm_graph *g = NULL;
    lm_vid v, to;
    const int ranks = mesh.size[LM_AXIS_CP] = r->links->size;
    const int rank = mesh.rank[LM_AXIS_CP] = r->links->rank;
    if (lm_graph_new(&g, e))
        return e->code;
    lm_tensor part = lm_placement_part(from, LM_AXIS_CP, &mesh, &whole);
    fill(from, ranks, rank, x);
    const int64_t n = fill(placed, ranks, rank, want);
    if (!lm_graph_value(g, LM_ROLE_INPUT, part, NULL, &v, e) &&
        !lm_exchange_append(g, LM_AXIS_CP, &mesh, v, &whole, from, placed, &to, e) &&
        n != lm_tensor_count(&g->value[to].t))
        lm_fail(e, LM_EBUG, "exchange", NULL, "has another number of elements");
    if (!e->code)
        exchange_run(r, g, x, y, e);
    /* addends are others, but their sum is the value: see the pass */
    for (int64_t i = 0; !e->code && i < n; i++)
        if (y[i] != (placed->share != LM_PARTIAL ? want[i] : rank ? 0 : number(i)))
            lm_fail(e, LM_EBUG, "exchange", NULL, "element %d is %g", (int)i, (double)y[i]);
    lm_graph_free(g);
    return e->code;
}

/* All of them; *made: their number. */
static inline lm_code exchange_all(const exchange_rank *r, int *made, lm_err *e)
{
    const lm_tensor whole = lm_shape2(LM_DTYPE_F32, ROWS, COLS);
    for (int i = 0; i < N_PLACEMENTS; i++)
        for (int j = 0; j < N_PLACEMENTS; j++) {
            if (!lm_exchange_of(&placements[i], &placements[j], &whole, r->links->size))
                continue;
            *made += r->links->rank == 0;
            if (exchange_pair(r, &placements[i], &placements[j], e)) {
                lm_err_in(e, "placement %d to %d", i, j);
                return e->code;
            }
        }
    return LM_OK;
}

#endif
