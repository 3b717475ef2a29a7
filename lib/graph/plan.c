/* SPDX-License-Identifier: Apache-2.0 */
/* plan.c -- where each activation and each kernel's scratch lies in one arena.
 *
 * An item lives from the node that writes it to the last node that reads it.  Outputs that an
 * operator may write in place over a dying input share its item.  Items are placed in falling order
 * of size, each into the lowest gap that fits best among those that are alive with it. */
#include <stdlib.h>
#include <string.h>

#include "graph/exec.h"
#include "numeric/format.h"

typedef struct {
    size_t bytes, offset;
    int64_t first, last; /* nodes */
    int64_t id;          /* tie-break: the plan must not depend on the sort */
} item;

typedef struct {
    const lm_graph *g;
    lm_backend *b;
    const int32_t *slot; /* lm_plan.slot; NULL: none */
    double room;         /* lm_plan.room */
    int64_t *item_of;    /* by value, -1 */
    item *item;
    size_t n_items;
} planner;

static size_t align_up(size_t n)
{
    return n > SIZE_MAX - 127 ? n : (n + 127) / 128 * 128; /* 128: no two items share a line pair */
}

static size_t value_bytes(const lm_graph *g, lm_vid v, double room)
{
    const lm_tensor t = lm_value_in_room(g, v, room);
    return align_up(lm_plain_bytes(t.dtype, lm_tensor_count(&t)));
}

/* Node k has v as an operand, and executors read there how many rows it has. */
static void see_use(const lm_graph *g, lm_vid v, size_t k, int64_t *last)
{
    if (v < 0)
        return;
    last[v] = (int64_t)k;
    if (g->value[v].rows >= 0)
        last[g->value[v].rows] = (int64_t)k;
}

static void find_lives(planner *p, int64_t *last, const lm_vid *keep, int n_keep)
{
    const lm_graph *g = p->g;
    for (size_t v = 0; v < g->n_values; v++)
        last[v] = -1;
    for (size_t k = 0; k < g->n_nodes; k++) {
        const lm_node *n = &g->node[k];
        for (int i = 0; i < n->n_in; i++)
            see_use(g, n->in[i], k, last);
        for (int i = 0; i < n->n_out; i++)
            see_use(g, n->out[i], k, last);
    }
    for (int i = 0; i < n_keep; i++)
        last[keep[i]] = (int64_t)g->n_nodes;
}

/* The item of a dying input that output o of node k may reuse, or -1. */
static int64_t take_over(const planner *p, const int64_t *last, size_t k, int o)
{
    const lm_node *n = &p->g->node[k];
    const size_t bytes = value_bytes(p->g, n->out[o], p->room);
    for (int i = 0; i < n->n_in; i++) {
        lm_vid v = n->in[i];
        if (!(n->op->in[i].is & n->op->out[o].is & LM_OVER) || v < 0 || p->item_of[v] < 0 ||
            last[v] != (int64_t)k)
            continue;
        bool twice = false; /* another output has it, or the value is two operands of the node */
        for (int j = 0; j < n->n_out; j++)
            twice |= j != o && n->out[j] >= 0 && p->item_of[n->out[j]] == p->item_of[v];
        for (int j = 0; j < n->n_in; j++)
            twice |= j != i && n->in[j] == v;
        if (!twice && p->item[p->item_of[v]].last == (int64_t)k &&
            p->item[p->item_of[v]].bytes >= bytes)
            return p->item_of[v];
    }
    return -1;
}

static void make_items(planner *p, const int64_t *last)
{
    const lm_graph *g = p->g;
    for (size_t v = 0; v < g->n_values; v++)
        p->item_of[v] = -1;
    for (size_t k = 0; k < g->n_nodes; k++)
        for (int o = 0; o < g->node[k].n_out; o++) {
            lm_vid v = g->node[k].out[o];
            if (v < 0 || g->value[v].role != LM_ROLE_ACT || p->item_of[v] >= 0 ||
                (p->slot && p->slot[v]))
                continue;
            int64_t old = take_over(p, last, k, o);
            if (old >= 0) {
                p->item[old].last = last[v];
                p->item_of[v] = old;
                continue;
            }
            p->item_of[v] = (int64_t)p->n_items;
            p->item[p->n_items] = (item){ .bytes = value_bytes(g, v, p->room),
                                          .first = (int64_t)k,
                                          .last = last[v],
                                          .id = (int64_t)p->n_items };
            p->n_items++;
        }
}

static int by_size(const void *a, const void *b)
{
    const item *x = *(const item *const *)a, *y = *(const item *const *)b;
    if (x->bytes != y->bytes)
        return x->bytes < y->bytes ? 1 : -1;
    return x->id < y->id ? -1 : x->id > y->id;
}

/* The items placed so far, in rising order of offset.  Times and places are apart: most items are
 * passed over for their times alone, so that a scan reads half of the memory. */
typedef struct {
    struct {
        int64_t first, last; /* nodes */
    } * time;
    struct {
        size_t begin, end; /* bytes */
    } * at;
    size_t n;
} placing;

/* Place one item among those already placed. */
static void place(placing *p, item *it)
{
    size_t best = SIZE_MAX, best_gap = SIZE_MAX, end = 0;
    for (size_t i = 0; i < p->n && (best == SIZE_MAX || best_gap > it->bytes); i++) {
        if (p->time[i].last < it->first || p->time[i].first > it->last)
            continue;
        size_t gap = p->at[i].begin > end ? p->at[i].begin - end : 0;
        if (gap >= it->bytes && gap && gap < best_gap) {
            best_gap = gap;
            best = end;
        }
        if (p->at[i].end > end)
            end = p->at[i].end;
    }
    it->offset = best != SIZE_MAX ? best : end;
    size_t k = 0; /* the first item behind this one */
    for (size_t above = p->n; k < above;) {
        size_t middle = k + (above - k) / 2;
        if (p->at[middle].begin > it->offset)
            above = middle;
        else
            k = middle + 1;
    }
    memmove(&p->time[k + 1], &p->time[k], (p->n - k) * sizeof *p->time);
    memmove(&p->at[k + 1], &p->at[k], (p->n - k) * sizeof *p->at);
    p->time[k].first = it->first;
    p->time[k].last = it->last;
    p->at[k].begin = it->offset;
    p->at[k].end = it->offset + it->bytes;
    p->n++;
}

static lm_code find_kernels(planner *p, lm_plan *out, size_t *work, lm_err *e)
{
    static const lm_step first; /* scratch does not depend on the step */
    lm_tensor in[LM_MAX_IN], o[LM_MAX_OUT];
    for (size_t k = 0; k < p->g->n_nodes; k++) {
        const lm_node *n = &p->g->node[k];
        lm_call c = lm_node_call_in_room(p->g, n, p->room, in, o);
        c.stream = p->b->main;
        c.step = &first;
        lm_dtype act = lm_node_act(p->g, n);
        const lm_kernel *kernel = p->b->kernel(p->b, n->op->name, act);
        if (!kernel)
            return lm_fail(e, LM_EUSAGE, n->op->name,
                           "choose another device, or leave out what needs this operator",
                           "%s has no kernel of it for %s", p->b->name, lm_dtype_name(act));
        out->kernel[k] = kernel;
        size_t bytes = kernel->work ? kernel->work(&c, p->b->threads) : 0;
        if (bytes == SIZE_MAX)
            return lm_fail(e, LM_EUSAGE, n->op->name, "choose another device",
                           "the %s kernel for %s does not serve these sizes", p->b->name,
                           lm_dtype_name(act));
        work[k] = align_up(bytes);
        if (work[k] > out->work_peak)
            out->work_peak = work[k];
    }
    return LM_OK;
}

/* live: space for one number per node. */
static void find_lower_bound(const planner *p, size_t *live, lm_plan *out)
{
    size_t n = p->g->n_nodes, sum = 0;
    /* First the change at each node, then sums; the differences may wrap. */
    for (size_t i = 0; i < p->n_items; i++) {
        live[p->item[i].first] += p->item[i].bytes;
        if (p->item[i].last + 1 < (int64_t)n)
            live[p->item[i].last + 1] -= p->item[i].bytes;
    }
    for (size_t k = 0; k < n; k++) {
        sum += live[k];
        if (sum > out->lower_bound)
            out->lower_bound = sum;
    }
}

static lm_code plan_with(planner *p, int64_t *last, size_t *work, size_t *live, item **order,
                         placing *placed, const lm_vid *keep, int n_keep, lm_plan *out, lm_err *e)
{
    if (find_kernels(p, out, work, e))
        return e->code;
    find_lives(p, last, keep, n_keep);
    make_items(p, last);
    size_t values = p->n_items;
    for (size_t k = 0; k < p->g->n_nodes; k++)
        if (work[k]) {
            p->item[p->n_items] = (item){
                .bytes = work[k], .first = (int64_t)k, .last = (int64_t)k, .id = (int64_t)p->n_items
            };
            p->n_items++;
        }
    for (size_t i = 0; i < p->n_items; i++)
        order[i] = &p->item[i];
    qsort(order, p->n_items, sizeof *order, by_size);
    for (size_t i = 0; i < p->n_items; i++) {
        place(placed, order[i]);
        if (order[i]->offset + order[i]->bytes > out->bytes)
            out->bytes = order[i]->offset + order[i]->bytes;
    }
    find_lower_bound(p, live, out);
    for (size_t v = 0; v < p->g->n_values; v++)
        out->offset[v] = p->item_of[v] >= 0 ? p->item[p->item_of[v]].offset : SIZE_MAX;
    for (size_t k = 0, i = values; k < p->g->n_nodes; k++)
        out->work_offset[k] = work[k] ? p->item[i++].offset : SIZE_MAX;
    return LM_OK;
}

/* Behind each other: all live until their slot is another's. */
static lm_code place_in_slots(const lm_graph *g, const int32_t *slot, int n_slots, lm_plan *out,
                              lm_err *e)
{
    if (!slot)
        return LM_OK;
    if (lm_alloc_n(&out->slot, g->n_values, sizeof *out->slot, "the memory plan", e) ||
        lm_alloc_n(&out->slot_bytes, (size_t)n_slots, sizeof *out->slot_bytes, "the memory plan",
                   e))
        return e->code;
    out->n_slots = n_slots;
    for (size_t v = 0; v < g->n_values; v++) {
        out->slot[v] = slot[v];
        if (!slot[v])
            continue;
        out->offset[v] = out->slot_bytes[slot[v] - 1];
        out->slot_bytes[slot[v] - 1] += value_bytes(g, (lm_vid)v, 0);
    }
    return LM_OK;
}

static lm_code copy_kept(const lm_vid *keep, int n, lm_plan *out, lm_err *e)
{
    if (lm_alloc_n(&out->keep, (size_t)n + 1, sizeof *out->keep, "the memory plan", e))
        return e->code;
    if (n)
        memcpy(out->keep, keep, (size_t)n * sizeof *keep);
    out->n_keep = n;
    return LM_OK;
}

static lm_code make(const lm_graph *g, lm_backend *b, const lm_vid *keep, int n_keep,
                    const int32_t *slot, int n_slots, double room, lm_plan *out, lm_err *e)
{
    planner p = { .g = g, .b = b, .slot = slot, .room = room };
    size_t most = g->n_values + g->n_nodes, *live = NULL;
    int64_t *last = NULL;
    item **order = NULL;
    placing placed = { .n = 0 };
    const char *why = "the memory plan";
    lm_code rc;

    memset(out, 0, sizeof *out);
    out->room = room;
    if ((rc = copy_kept(keep, n_keep, out, e)) ||
        (rc = lm_alloc_n(&out->offset, g->n_values, sizeof *out->offset, why, e)) ||
        (rc = lm_alloc_n(&out->work_offset, g->n_nodes, sizeof *out->work_offset, why, e)) ||
        (rc = lm_alloc_n(&out->work_bytes, g->n_nodes, sizeof *out->work_bytes, why, e)) ||
        (rc = lm_alloc_n(&out->kernel, g->n_nodes, sizeof *out->kernel, why, e)) ||
        (rc = lm_alloc_n(&p.item_of, g->n_values, sizeof *p.item_of, why, e)) ||
        (rc = lm_alloc_n(&p.item, most, sizeof *p.item, why, e)) ||
        (rc = lm_alloc_n(&live, g->n_nodes, sizeof *live, why, e)) ||
        (rc = lm_alloc_n(&last, g->n_values, sizeof *last, why, e)) ||
        (rc = lm_alloc_n(&order, most, sizeof *order, why, e)) ||
        (rc = lm_alloc_n(&placed.time, most, sizeof *placed.time, why, e)) ||
        (rc = lm_alloc_n(&placed.at, most, sizeof *placed.at, why, e)))
        goto done;
    rc = plan_with(&p, last, out->work_bytes, live, order, &placed, keep, n_keep, out, e);
    if (!rc)
        rc = place_in_slots(g, slot, n_slots, out, e);
done:
    if (rc)
        lm_plan_fini(out);
    lm_free(p.item_of);
    lm_free(p.item);
    lm_free(live);
    lm_free(last);
    lm_free(order);
    lm_free(placed.time);
    lm_free(placed.at);
    return rc;
}

/* Executors read numbers of rows in memory of the host, and move what lies in their own arena. */
static double room_of(const lm_graph *g, const lm_backend *b, const int32_t *slot)
{
    return b->host_memory && !slot ? g->room : 0;
}

lm_code lm_plan_make(const lm_graph *g, lm_backend *b, const lm_vid *keep, int n_keep, lm_plan *out,
                     lm_err *e)
{
    return make(g, b, keep, n_keep, NULL, 0, room_of(g, b, NULL), out, e);
}

lm_code lm_plan_make_slots(const lm_graph *g, lm_backend *b, const int32_t *slot, int n_slots,
                           lm_plan *out, lm_err *e)
{
    return make(g, b, NULL, 0, slot, n_slots, room_of(g, b, slot), out, e);
}

lm_code lm_plan_make_roomier(const lm_graph *g, lm_backend *b, const lm_plan *like, double room,
                             lm_plan *out, lm_err *e)
{
    return make(g, b, like->keep, like->n_keep, NULL, 0, room, out, e);
}

void lm_plan_fini(lm_plan *p)
{
    lm_free(p->offset);
    lm_free(p->slot);
    lm_free(p->slot_bytes);
    lm_free(p->work_offset);
    lm_free(p->work_bytes);
    lm_free(p->kernel);
    lm_free(p->keep);
    memset(p, 0, sizeof *p);
}
