/* SPDX-License-Identifier: Apache-2.0 */
/* links.c -- the calls of a communicator for kernels, which cannot fail: the first failure is kept. */
#include "graph/links.h"

#include "base/mem.h"

static lm_comm_op comm_op(lm_exchange_op op)
{
    return op == LM_EXCHANGE_MAX ? LM_COMM_MAX : op == LM_EXCHANGE_MIN ? LM_COMM_MIN : LM_COMM_SUM;
}

static void all_reduce(lm_links *l, const void *in, void *out, size_t n, lm_dtype d,
                       lm_exchange_op op)
{
    if (!l->failure.code)
        lm_comm_all_reduce(l->ctx, in, out, n, d, comm_op(op), &l->failure);
}

static void reduce_scatter(lm_links *l, const void *in, void *out, const size_t *count, lm_dtype d,
                           lm_exchange_op op)
{
    if (!l->failure.code)
        lm_comm_reduce_scatter(l->ctx, in, out, count, d, comm_op(op), &l->failure);
}

static void all_gather(lm_links *l, const void *in, void *out, const size_t *bytes)
{
    if (!l->failure.code)
        lm_comm_all_gather(l->ctx, in, out, bytes, &l->failure);
}

static void all_to_all(lm_links *l, const void *in, const size_t *give, void *out,
                       const size_t *take)
{
    if (!l->failure.code)
        lm_comm_all_to_all(l->ctx, in, give, out, take, &l->failure);
}

static void send_to(lm_links *l, int to, const void *data, size_t bytes)
{
    if (!l->failure.code)
        lm_comm_send(l->ctx, to, data, bytes, &l->failure);
}

static void recv_from(lm_links *l, int from, void *data, size_t bytes)
{
    if (!l->failure.code)
        lm_comm_recv(l->ctx, from, data, bytes, &l->failure);
}

static void gather_begin(lm_links *l, const void *in, void *out, const size_t *bytes)
{
    if (!l->failure.code)
        lm_gatherer_begin(l->gatherer, in, out, bytes, &l->failure);
}

static void gather_end(lm_links *l)
{
    if (lm_gatherer_busy(l->gatherer) || !l->failure.code)
        lm_gatherer_end(l->gatherer, &l->failure);
}

static void gather_settle(lm_links *l)
{
    lm_gatherer_settle(l->gatherer);
}

void lm_links_gather(lm_links *l, lm_gatherer *g)
{
    l->gather_begin = g ? gather_begin : NULL;
    l->gather_end = g ? gather_end : NULL;
    l->gather_settle = g ? gather_settle : NULL;
    l->gatherer = g;
}

lm_links lm_comm_links(lm_comm *c)
{
    return (lm_links){ .rank = lm_comm_rank(c),
                       .size = lm_comm_size(c),
                       .all_reduce = all_reduce,
                       .reduce_scatter = reduce_scatter,
                       .all_gather = all_gather,
                       .all_to_all = all_to_all,
                       .send = send_to,
                       .recv = recv_from,
                       .ctx = c };
}

static lm_code on_host(lm_comm *c, lm_links **out, lm_err *e)
{
    if (!lm_alloc_n(out, 1, sizeof **out, "ranks", e))
        **out = lm_comm_links(c);
    return e->code;
}

/* Whether this or another rank has failed, on each of them; this one fails for its own reason, if it has one. */
static lm_code agree(lm_comm *c, const lm_err *mine, lm_err *e)
{
    int32_t bad = mine->code != LM_OK;
    if (lm_comm_all_reduce(c, &bad, &bad, 1, LM_DTYPE_I32, LM_COMM_MAX, e))
        return e->code;
    if (mine->code)
        *e = *mine;
    else if (bad)
        lm_fail(e, LM_EIO, "ranks", NULL, "another one cannot use its device with the others");
    return e->code;
}

/* All ranks have what they need before the first waits for the others, where nothing could call it back. */
static lm_code join(lm_backend *b, lm_comm *c, lm_stream *s, lm_links **out, lm_err *e)
{
    lm_group_id id = { 0 };
    lm_err why = { 0 };
    if (!b->group_join)
        lm_fail(&why, LM_EUSAGE, b->name, NULL, "does not exchange with other ranks");
    else if (!b->group_open(b, lm_comm_rank(c), lm_comm_size(c), s ? s : b->main, out, &why) &&
             lm_comm_rank(c) == 0)
        b->group_new(b, &id, &why);
    if (agree(c, &why, e) || lm_comm_broadcast(c, &id, sizeof id, 0, e))
        return e->code;
    b->group_join(b, *out, &id, &why);
    return agree(c, &why, e);
}

lm_code lm_links_new(lm_backend *b, lm_comm *c, lm_stream *s, lm_links **out, lm_err *e)
{
    *out = NULL;
    if (b->host_memory)
        return on_host(c, out, e);
    if (join(b, c, s, out, e) && *out) {
        b->group_leave(b, *out);
        *out = NULL;
    }
    return e->code;
}

void lm_links_free(lm_backend *b, lm_links *l)
{
    if (l && b->host_memory)
        lm_free(l);
    else if (l)
        b->group_leave(b, l);
}
