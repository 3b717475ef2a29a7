/* SPDX-License-Identifier: Apache-2.0 */
/* exec_rows.c -- rows whose number is in the data: kernels get those that are there, and where these are more than the plan
 * has room for, the executor goes on with another plan.  What an arena holds between two nodes is moved once; as the room
 * grows by a fourth at least, that happens a few times in a run. */
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "graph/exec_impl.h"
#include "kernels/comm.h"

enum { MOST_GROWTH = 4 }; /* the room grows by a fourth, or to what is needed and 1/16 of that */

/* Rows that a value has in this run; -1: those of its shape. */
static int64_t rows_of(const lm_exec *x, lm_vid v)
{
    const lm_vid from = v >= 0 ? x->g->value[v].rows : LM_NONE;
    if (from < 0)
        return -1;
    const int32_t *at = lm_exec_data(x, from);
    return at[x->g->value[from].t.dim[0] - 1];
}

/* ---- another plan ---- */

static void take_block(lm_exec *x, char *block)
{
    x->block = block;
    lm_exec_lay_values(x);
    for (size_t k = 0; k < x->g->n_nodes; k++)
        lm_exec_lay_call(x, k);
}

void lm_exec_follow(lm_exec *x)
{
    if (x->with && x->block != x->with->block)
        take_block(x, x->with->block);
}

static void need(const lm_graph *g, lm_vid v, bool *needed)
{
    if (v < 0)
        return;
    needed[v] = true;
    if (g->value[v].rows >= 0)
        needed[g->value[v].rows] = true;
}

/* True where a node before k writes v, and k or a later one, or the caller, reads it, or how many rows there are. */
static void find_needed(const lm_exec *x, size_t k, bool *made, bool *needed)
{
    const lm_graph *g = x->g;
    for (size_t i = 0; i < k; i++)
        for (int o = 0; o < g->node[i].n_out; o++)
            if (g->node[i].out[o] >= 0)
                made[g->node[i].out[o]] = true;
    for (size_t i = k; i < g->n_nodes; i++)
        for (int o = 0; o < g->node[i].n_in; o++)
            need(g, g->node[i].in[o], needed);
    for (int i = 0; i < x->plan->n_keep; i++)
        need(g, x->plan->keep[i], needed);
    for (size_t v = 0; v < g->n_values; v++)
        needed[v] &= made[v];
}

static void move_values(const lm_exec *x, const lm_plan *to, const bool *needed, char *block)
{
    for (size_t v = 0; v < x->g->n_values; v++) {
        const lm_tensor t = lm_value_in_room(x->g, (lm_vid)v, x->plan->room);
        if (needed[v] && x->plan->offset[v] != SIZE_MAX)
            memcpy(block + to->offset[v], x->block + x->plan->offset[v],
                   (size_t)lm_tensor_count(&t) * lm_dtype_size(t.dtype));
    }
}

/* Gathers in flight write into the block: wait until they have ended before it moves. */
static void settle(const lm_step *now)
{
    for (int i = 0; now->links && i < LM_AXES; i++)
        if (now->links[i] && now->links[i]->gather_settle)
            now->links[i]->gather_settle(now->links[i]);
}

/* Before node k runs. */
static lm_code grow(lm_exec *x, size_t k, const lm_step *now, double room, lm_err *e)
{
    lm_plan next = { 0 };
    char *block = NULL;
    bool *made = NULL, *needed = NULL;
    size_t bytes = 0;
    if (!lm_alloc_n(&made, x->g->n_values, sizeof *made, "a memory plan", e) &&
        !lm_alloc_n(&needed, x->g->n_values, sizeof *needed, "a memory plan", e) &&
        !lm_plan_make_roomier(x->g, x->b, x->plan, room, &next, e)) {
        bytes = next.bytes > x->block_bytes ? next.bytes : x->block_bytes; /* others run in it */
        x->b->alloc(x->b, bytes, "activations", (void **)&block, e);
    }
    if (!e->code) {
        find_needed(x, k, made, needed);
        settle(now);
        move_values(x, &next, needed, block);
        if (!x->with)
            x->b->free(x->b, x->block, x->block_bytes);
        lm_plan_fini(&x->own);
        x->own = next;
        x->plan = &x->own;
        x->with = NULL;
        x->block_bytes = bytes;
        take_block(x, block);
        lm_exec_set_operands(x, e);
    } else {
        lm_plan_fini(&next);
    }
    lm_free(made);
    lm_free(needed);
    return e->code;
}

/* Rows that node k makes must have room. */
static lm_code ensure_room(lm_exec *x, size_t k, const lm_step *now, lm_err *e)
{
    const lm_node *n = &x->g->node[k];
    if (!n->op->rows || !(x->plan->room > 0))
        return LM_OK;
    const int64_t rows = rows_of(x, n->out[0]);
    const lm_tensor t = lm_value_in_room(x->g, n->out[0], x->plan->room);
    if (rows <= t.dim[0])
        return LM_OK;
    const double needed = (double)rows / (double)x->g->value[n->out[0]].mean;
    return grow(x, k, now, fmax(x->plan->room * (1 + 1.0 / MOST_GROWTH), needed * (1 + 1.0 / 16)),
                e);
}

/* ---- calls ---- */

/* Operands with the rows that there are, one at least, or with all that there is room for. */
static void set_rows(lm_exec *x, size_t k, bool all)
{
    const lm_node *n = &x->g->node[k];
    step_call *s = &x->calls[k];
    for (int i = 0; i < n->n_in + n->n_out; i++) {
        const lm_vid v = i < n->n_in ? n->in[i] : n->out[i - n->n_in];
        const int64_t rows = rows_of(x, v);
        lm_tensor *t =
            i < n->n_in ? (lm_tensor *)(uintptr_t)&s->call.in[i] : &s->call.out[i - n->n_in];
        if (rows >= 0)
            t->dim[0] = all ? lm_value_in_room(x->g, v, x->plan->room).dim[0] : rows > 1 ? rows : 1;
    }
}

/* Whether the scratch of the plan is enough, which kernels may need more of for fewer rows. */
static bool fits(const lm_exec *x, size_t k)
{
    const lm_kernel *kernel = x->plan->kernel[k];
    const size_t bytes = kernel->work ? kernel->work(&x->calls[k].call, x->b->threads) : 0;
    return bytes <= x->plan->work_bytes[k];
}

lm_code lm_exec_set_rows(lm_exec *x, size_t k, const lm_step *now, lm_err *e)
{
    if (ensure_room(x, k, now, e))
        return e->code;
    x->calls[k].call.step = now; /* for what the kernel says of its scratch */
    set_rows(x, k, false);
    if (!fits(x, k))
        set_rows(x, k, true);
    return LM_OK;
}
