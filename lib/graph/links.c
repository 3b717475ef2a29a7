/* SPDX-License-Identifier: Apache-2.0 */
/* links.c -- the calls of a communicator for kernels, which cannot fail: the first failure is kept. */
#include "graph/links.h"

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
