/* SPDX-License-Identifier: Apache-2.0 */
/* ring.c -- see ring.h. */
#include "graph/ring.h"

#include "base/clock.h"
#include "base/mem.h"
#include "comm/lane.h"

enum { NEXT, BEFORE };

/* What is being received. */
typedef struct {
    const void *in;
    uint64_t number; /* in the lane */
} arrival;

struct lm_ring {
    lm_comm *comm[2]; /* with the next rank, with the one before */
    lm_lane *lane[2];
    arrival *coming;
    size_t n, cap;
    lm_comm_use use;
};

static void pass(lm_links *l, const void *out, void *in, size_t bytes)
{
    lm_ring *r = l->ring;
    uint64_t sent, number = 0;
    if (l->failure.code ||
        lm_grow(&r->coming, &r->cap, r->n + 1, sizeof *r->coming, "a ring", &l->failure) ||
        (out && lm_lane_give(r->lane[NEXT], out, bytes, &sent, &l->failure)) ||
        (in && lm_lane_take(r->lane[BEFORE], in, bytes, &number, &l->failure)))
        return;
    if (in)
        r->coming[r->n++] = (arrival){ in, number };
    r->use.bytes += out ? (double)bytes : 0;
}

static void arrive(lm_links *l, const void *in)
{
    lm_ring *r = l->ring;
    size_t i = 0;
    while (i < r->n && r->coming[i].in != in)
        i++;
    if (l->failure.code || i == r->n)
        return;
    const double began = lm_now();
    lm_lane_wait(r->lane[BEFORE], r->coming[i].number, &l->failure);
    r->use.seconds += lm_now() - began;
    r->coming[i] = r->coming[--r->n];
}

void lm_ring_join(lm_ring *r, lm_links *l)
{
    l->ring = r;
    l->pass = pass;
    l->arrive = arrive;
}

/* The group of rank `from` and the next one. */
static lm_code open_edge(lm_ring *r, lm_comm *c, int from, lm_err *e)
{
    const int rank = lm_comm_rank(c), to = (from + 1) % lm_comm_size(c);
    const int side = rank == from ? NEXT : BEFORE;
    lm_comm *edge = NULL;
    if (lm_comm_split(c, rank == from || rank == to ? 0 : -1, rank == from ? 0 : 1, &edge, e))
        return e->code;
    if (!edge)
        return LM_OK;
    r->comm[side] = edge;
    return lm_lane_new(edge, side == NEXT ? 1 : 0, side == NEXT, &r->lane[side], e);
}

lm_code lm_ring_new(lm_comm *c, lm_ring **out, lm_err *e)
{
    lm_ring *r = NULL;
    *out = NULL;
    if (lm_alloc_n(&r, 1, sizeof *r, "a ring", e))
        return e->code;
    for (int k = 0; k < lm_comm_size(c) && !e->code; k++)
        open_edge(r, c, k, e);
    if (e->code)
        lm_ring_free(r);
    else
        *out = r;
    return e->code;
}

void lm_ring_free(lm_ring *r)
{
    if (!r)
        return;
    for (int side = NEXT; side <= BEFORE; side++) {
        lm_lane_free(r->lane[side]);
        lm_comm_free(r->comm[side]);
    }
    lm_free(r->coming);
    lm_free(r);
}

lm_comm_use lm_ring_used(const lm_ring *r)
{
    return r->use;
}

void lm_ring_patience(lm_ring *r, double seconds)
{
    for (int side = NEXT; side <= BEFORE; side++)
        lm_comm_patience(r->comm[side], seconds);
}
