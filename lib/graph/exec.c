/* SPDX-License-Identifier: Apache-2.0 */
/* exec.c -- a graph as a flat array of kernel calls. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "graph/exec_impl.h"
#include "kernels/comm.h"

static bool is_live(const lm_exec *x, const lm_node *n)
{
    bool live = false;
    for (int i = 0; i < n->n_in + n->n_out; i++) {
        const lm_vid v = i < n->n_in ? n->in[i] : n->out[i - n->n_in];
        live |= v >= 0 && x->g->value[v].rows >= 0;
    }
    return live && x->b->host_memory;
}

void lm_exec_lay_call(lm_exec *x, size_t k)
{
    step_call *s = &x->calls[k];
    s->call = lm_node_call_in_room(x->g, &x->g->node[k], x->plan->room,
                                   (lm_tensor *)(uintptr_t)s->call.in, s->call.out);
    s->call.par = x->b->par;
    s->call.stream = x->b->main;
    s->call.work = x->plan->work_offset[k] == SIZE_MAX ? NULL : x->block + x->plan->work_offset[k];
    s->run = x->plan->kernel[k]->run;
}

void lm_exec_lay_values(lm_exec *x)
{
    for (size_t v = 0; v < x->g->n_values; v++)
        if (x->plan->offset[v] != SIZE_MAX && !(x->plan->slot && x->plan->slot[v]))
            x->data[v] = x->block + x->plan->offset[v];
    x->ready = false;
}

static lm_code make_call(lm_exec *x, size_t k, lm_err *e)
{
    const lm_node *n = &x->g->node[k];
    step_call *s = &x->calls[k];
    lm_tensor *in = NULL, *out = NULL;
    lm_cost cost = { 0 };
    if (lm_arena_alloc(x->arena, &in, (size_t)n->n_in, sizeof *in, e) ||
        lm_arena_alloc(x->arena, &out, (size_t)n->n_out, sizeof *out, e))
        return e->code;
    const lm_call mean = lm_node_call_in_room(x->g, n, 1, in, out);
    n->op->cost(&mean, &cost);
    s->flops = cost.flops;
    s->bytes = cost.bytes;
    s->call = mean;
    s->live = is_live(x, n);
    s->begin = -1;
    lm_exec_lay_call(x, k);
    return LM_OK;
}

lm_code lm_exec_new(const lm_graph *g, lm_backend *b, const lm_vid *keep, int n_keep, lm_exec **out,
                    lm_err *e)
{
    return lm_exec_new_sharing(g, b, keep, n_keep, NULL, out, e);
}

/* x->plan is set. */
static lm_code make_ready(lm_exec *x, lm_exec *with, lm_err *e)
{
    const lm_graph *g = x->g;
    lm_backend *b = x->b;
    size_t bytes = x->plan->bytes;
    if (lm_arena_new(&x->arena, 1 << 16, e) ||
        lm_alloc_n(&x->calls, g->n_nodes, sizeof *x->calls, "an executor", e) ||
        lm_alloc_n(&x->data, g->n_values, sizeof *x->data, "an executor", e) ||
        lm_alloc_n(&x->times, g->n_nodes, sizeof *x->times, "an executor", e) ||
        lm_alloc_n(&x->at, g->n_nodes + 1, sizeof *x->at, "an executor", e) ||
        lm_exec_timing(x, b->host_memory, e))
        return e->code;
    if (with && with->block_bytes >= bytes) {
        x->block = with->block;
        x->with = with;
    } else if (bytes && b->alloc(b, bytes, "activations", (void **)&x->block, e)) {
        return e->code;
    }
    x->block_bytes = bytes;
    lm_exec_lay_values(x);
    for (size_t k = 0; k < g->n_nodes; k++)
        if (make_call(x, k, e))
            return e->code;
    return LM_OK;
}

static lm_code new_exec(const lm_graph *g, lm_backend *b, lm_exec **out, lm_err *e)
{
    lm_exec *x = NULL;
    *out = NULL;
    if (lm_alloc_n(&x, 1, sizeof *x, "an executor", e))
        return e->code;
    x->g = g;
    x->b = b;
    x->plan = &x->own;
    *out = x;
    return LM_OK;
}

static lm_code give_up(lm_exec **out, lm_code rc)
{
    lm_exec_free(*out);
    *out = NULL;
    return rc;
}

lm_code lm_exec_new_sharing(const lm_graph *g, lm_backend *b, const lm_vid *keep, int n_keep,
                            lm_exec *with, lm_exec **out, lm_err *e)
{
    if (new_exec(g, b, out, e))
        return e->code;
    lm_code rc = lm_plan_make(g, b, keep, n_keep, &(*out)->own, e);
    return rc ? give_up(out, rc) : make_ready(*out, with, e) ? give_up(out, e->code) : LM_OK;
}

lm_code lm_exec_new_planned(const lm_graph *g, lm_backend *b, const lm_plan *plan, lm_exec *with,
                            lm_exec **out, lm_err *e)
{
    if (new_exec(g, b, out, e))
        return e->code;
    (*out)->plan = plan;
    return make_ready(*out, with, e) ? give_up(out, e->code) : LM_OK;
}

size_t lm_exec_bytes(const lm_exec *x)
{
    return x->with ? 0 : x->block_bytes;
}

void lm_exec_free(lm_exec *x)
{
    if (!x)
        return;
    if (x->block && !x->with)
        x->b->free(x->b, x->block, x->block_bytes);
    lm_plan_fini(&x->own);
    lm_arena_free(x->arena);
    lm_free(x->calls);
    lm_free(x->data);
    lm_free(x->times);
    lm_free(x->at);
    x->b->marks_free(x->b, x->marks);
    lm_free(x);
}

void lm_exec_bind(lm_exec *x, lm_vid v, void *data)
{
    x->data[v] = data;
    x->ready = false;
}

void *lm_exec_data(const lm_exec *x, lm_vid v)
{
    if (v < 0)
        return NULL;
    const lm_value *view = &x->g->value[v];
    if (view->of < 0)
        return x->data[v];
    char *whole = x->data[view->of];
    return whole ? whole + (size_t)view->at * lm_dtype_size(view->t.dtype) : NULL;
}

lm_code lm_exec_set_operands(lm_exec *x, lm_err *e)
{
    for (size_t k = 0; k < x->g->n_nodes; k++) {
        const lm_node *n = &x->g->node[k];
        step_call *s = &x->calls[k];
        for (int i = 0; i < n->n_in + n->n_out; i++) {
            bool input = i < n->n_in;
            lm_vid v = input ? n->in[i] : n->out[i - n->n_in];
            lm_tensor *t = input ? (lm_tensor *)&s->call.in[i] : &s->call.out[i - n->n_in];
            t->data = lm_exec_data(x, v);
            if (v >= 0 && !t->data)
                return lm_fail(e, LM_EBUG, x->g->value[v].name ? x->g->value[v].name : "a value",
                               NULL, "has no memory bound to it");
        }
    }
    x->ready = true;
    return LM_OK;
}

/* Operands carry pointers: those in the slot get new ones. */
static void move_operands(lm_exec *x, int slot)
{
    for (size_t k = 0; k < x->g->n_nodes; k++) {
        const lm_node *n = &x->g->node[k];
        step_call *s = &x->calls[k];
        for (int i = 0; i < n->n_in + n->n_out; i++) {
            const bool input = i < n->n_in;
            const lm_vid v = input ? n->in[i] : n->out[i - n->n_in];
            if (v >= 0 && x->plan->slot[v] == 1 + slot)
                *(input ? (void **)(uintptr_t)&s->call.in[i].data
                        : &s->call.out[i - n->n_in].data) = x->data[v];
        }
    }
}

void lm_exec_slot(lm_exec *x, int slot, void *base)
{
    for (size_t v = 0; v < x->g->n_values; v++)
        if (x->plan->slot[v] == 1 + slot)
            x->data[v] = (char *)base + x->plan->offset[v];
    if (x->ready)
        move_operands(x, slot);
}

lm_code lm_exec_timing(lm_exec *x, bool on, lm_err *e)
{
    if (on && !x->marks)
        return x->b->marks_new(x->b, (int)x->g->n_nodes + 1, &x->marks, e);
    if (!on) {
        x->b->marks_free(x->b, x->marks);
        x->marks = NULL;
    }
    return LM_OK;
}

static bool is_due(const lm_exec *x, size_t k, const bool *due)
{
    return !due || due[x->g->node[k].when];
}

static lm_code take_times(lm_exec *x, size_t first, size_t last, const bool *due, int marks,
                          lm_err *e)
{
    if (x->b->marks_read(x->b, x->marks, marks + 1, x->at, e))
        return e->code;
    const double *at = x->at;
    for (size_t k = first; k < last; k++) {
        step_call *s = &x->calls[k];
        if (!is_due(x, k, due))
            continue;
        s->begin = at[0];
        s->end = at[1];
        s->seconds += s->end - s->begin;
        s->calls++;
        at++;
    }
    return LM_OK;
}

/* The first failure of an exchange, which kernels cannot report. */
static lm_code exchange_failure(const lm_step *step, lm_err *e)
{
    for (int i = 0; step->links && i < LM_AXES; i++)
        if (step->links[i] && step->links[i]->failure.code) {
            *e = step->links[i]->failure;
            return e->code;
        }
    return LM_OK;
}

lm_code lm_exec_run_part(lm_exec *x, size_t first, size_t last, const bool *due,
                         const lm_step *step, lm_err *e)
{
    lm_backend *b = x->b;
    lm_step now = *step;
    int marks = 0;
    now.links = step->links ? step->links : b->links;
    lm_exec_follow(x);
    if ((!x->ready && lm_exec_set_operands(x, e)) || b->step(b, &now, b->main, e))
        return e->code;
    for (size_t k = first; k < last; k++) {
        step_call *s = &x->calls[k];
        s->begin = -1;
        if (!is_due(x, k, due))
            continue;
        if (x->marks)
            b->mark(b, x->marks, marks++, b->main);
        if (s->live && lm_exec_set_rows(x, k, &now, e))
            return e->code;
        b->range(b, x->g->node[k].op->name);
        s->call.step = &now;
        s->run(&s->call);
        b->range(b, NULL);
    }
    if (exchange_failure(&now, e) || !x->marks)
        return e->code;
    b->mark(b, x->marks, marks, b->main);
    return take_times(x, first, last, due, marks, e);
}

lm_code lm_exec_run(lm_exec *x, const lm_step *step, lm_err *e)
{
    return lm_exec_run_part(x, 0, x->g->n_nodes, NULL, step, e);
}

bool lm_exec_span_at(const lm_exec *x, size_t k, lm_exec_span *out)
{
    if (k >= x->g->n_nodes || x->calls[k].begin < 0 || !x->marks)
        return false;
    *out = (lm_exec_span){ .node = &x->g->node[k],
                           .begin = x->calls[k].begin,
                           .end = x->calls[k].end,
                           .flops = x->calls[k].flops,
                           .bytes = x->calls[k].bytes };
    return true;
}

static int by_seconds(const void *a, const void *b)
{
    const lm_exec_time *x = a, *y = b;
    return x->seconds > y->seconds ? -1 : x->seconds < y->seconds;
}

size_t lm_exec_times(lm_exec *x, const lm_exec_time **out)
{
    x->n_times = 0;
    for (size_t k = 0; k < x->g->n_nodes; k++) {
        const lm_node *n = &x->g->node[k];
        size_t i = 0;
        while (i < x->n_times && (x->times[i].phase != n->phase || x->times[i].op != n->op->name))
            i++;
        if (i == x->n_times)
            x->times[x->n_times++] = (lm_exec_time){ .op = n->op->name, .phase = n->phase };
        x->times[i].seconds += x->calls[k].seconds;
        x->times[i].flops += x->calls[k].flops * (double)x->calls[k].calls;
        x->times[i].calls += x->calls[k].calls;
    }
    qsort(x->times, x->n_times, sizeof *x->times, by_seconds);
    *out = x->times;
    return x->n_times;
}

void lm_exec_times_reset(lm_exec *x)
{
    for (size_t k = 0; k < x->g->n_nodes; k++) {
        x->calls[k].seconds = 0;
        x->calls[k].calls = 0;
    }
}
