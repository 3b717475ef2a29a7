/* SPDX-License-Identifier: Apache-2.0 */
/* comm.c -- the calls of a communicator: their arguments are checked here, once for all transports. */
#include "comm/comm.h"

#include <errno.h>

#include "base/clock.h"
#include "base/mem.h"
#include "comm/comm_impl.h"

int lm_comm_rank(const lm_comm *c)
{
    return c->rank;
}

int lm_comm_size(const lm_comm *c)
{
    return c->size;
}

static lm_code check_rank(const lm_comm *c, int rank, const char *call, lm_err *e)
{
    if (rank < 0 || rank >= c->size)
        return lm_fail(e, LM_EBUG, call, NULL, "rank %d of %d", rank, c->size);
    return LM_OK;
}

static lm_code check_type(lm_dtype d, const char *call, lm_err *e)
{
    switch (d) {
    case LM_DTYPE_F64:
    case LM_DTYPE_F32:
    case LM_DTYPE_F16:
    case LM_DTYPE_BF16:
    case LM_DTYPE_I64:
    case LM_DTYPE_I32:
        return LM_OK;
    default:
        return lm_fail(e, LM_EBUG, call, NULL, "elements of this type are not combined");
    }
}

/* The result of a call that began then and gives so many bytes. */
static lm_code took(lm_comm *c, double began, size_t bytes, lm_code rc)
{
    c->use.seconds += lm_now() - began;
    c->use.bytes += (double)bytes;
    return rc;
}

static size_t sum_of(const lm_comm *c, const size_t *n)
{
    size_t sum = 0;
    for (int r = 0; r < c->size; r++)
        sum += n[r];
    return sum;
}

lm_comm_use lm_comm_used(const lm_comm *c)
{
    return c->use;
}

lm_code lm_comm_barrier(lm_comm *c, lm_err *e)
{
    const double began = lm_now();
    return took(c, began, 0, c->transport->barrier(c, e));
}

lm_code lm_comm_all_reduce(lm_comm *c, const void *in, void *out, size_t n, lm_dtype d,
                           lm_comm_op op, lm_err *e)
{
    const double began = lm_now();
    if (check_type(d, "all_reduce", e))
        return e->code;
    return took(c, began, n * lm_dtype_size(d), c->transport->all_reduce(c, in, out, n, d, op, e));
}

lm_code lm_comm_reduce_scatter(lm_comm *c, const void *in, void *out, const size_t *count,
                               lm_dtype d, lm_comm_op op, lm_err *e)
{
    const double began = lm_now();
    if (check_type(d, "reduce_scatter", e))
        return e->code;
    return took(c, began, sum_of(c, count) * lm_dtype_size(d),
                c->transport->reduce_scatter(c, in, out, count, d, op, e));
}

lm_code lm_comm_all_gather(lm_comm *c, const void *in, void *out, const size_t *bytes, lm_err *e)
{
    const double began = lm_now();
    return took(c, began, bytes[c->rank], c->transport->all_gather(c, in, out, bytes, e));
}

lm_code lm_comm_gather_each(lm_comm *c, const void *mine, size_t bytes, void **all, lm_err *e)
{
    const size_t n = (size_t)c->size;
    char *got = NULL;
    size_t *each = NULL;

    *all = NULL;
    if (!lm_alloc_n(&got, n, bytes, "ranks", e) &&
        !lm_alloc_n(&each, n, sizeof *each, "ranks", e)) {
        for (size_t r = 0; r < n; r++)
            each[r] = bytes;
        lm_comm_all_gather(c, mine, got, each, e);
    }
    lm_free(each);
    if (e->code)
        lm_free(got);
    else
        *all = got;
    return e->code;
}

lm_code lm_comm_all_to_all(lm_comm *c, const void *in, const size_t *give, void *out,
                           const size_t *take, lm_err *e)
{
    const double began = lm_now();
    return took(c, began, sum_of(c, give), c->transport->all_to_all(c, in, give, out, take, e));
}

lm_code lm_comm_broadcast(lm_comm *c, void *data, size_t bytes, int root, lm_err *e)
{
    const double began = lm_now();
    if (check_rank(c, root, "broadcast", e))
        return e->code;
    return took(c, began, root == c->rank ? bytes : 0,
                c->transport->broadcast(c, data, bytes, root, e));
}

/* A rank cannot wait for itself. */
static lm_code check_other(const lm_comm *c, int rank, const char *call, lm_err *e)
{
    if (check_rank(c, rank, call, e))
        return e->code;
    return rank == c->rank ? lm_fail(e, LM_EBUG, call, NULL, "rank %d to itself", rank) : LM_OK;
}

lm_code lm_comm_send(lm_comm *c, int to, const void *data, size_t bytes, lm_err *e)
{
    const double began = lm_now();
    if (check_other(c, to, "send", e))
        return e->code;
    return took(c, began, bytes, c->transport->send(c, to, data, bytes, e));
}

lm_code lm_comm_recv(lm_comm *c, int from, void *data, size_t bytes, lm_err *e)
{
    const double began = lm_now();
    if (check_other(c, from, "recv", e))
        return e->code;
    return took(c, began, 0, c->transport->recv(c, from, data, bytes, e));
}

lm_code lm_comm_split(lm_comm *c, int color, int key, lm_comm **out, lm_err *e)
{
    *out = NULL;
    if (c->transport->split(c, color, key, out, e))
        return e->code;
    if (*out)
        (*out)->patience = c->patience;
    return LM_OK;
}

void lm_comm_patience(lm_comm *c, double seconds)
{
    c->patience = seconds;
}

bool lm_comm_wait_is_over(lm_comm_wait *w, double patience)
{
    const double now = lm_now(), step = w->last > 0 ? now - w->last : 0;

    w->last = now;
    w->sum += step < 1 ? step : 1;
    return patience > 0 && w->sum > patience;
}

void lm_comm_abort(lm_comm *c, const lm_err *why)
{
    lm_err unnamed = { 0 };

    /* Waiting ends with an error that has a code. */
    if (!why->code) {
        errno = 0;
        lm_fail(&unnamed, LM_EBUG, "abort", NULL, "a rank has failed without a reason");
        why = &unnamed;
    }
    c->transport->abort(c, why);
}

lm_code lm_comm_look(lm_comm *c, lm_err *e)
{
    return c->transport->look(c, e);
}

const char *lm_comm_transport(const lm_comm *c)
{
    return c->transport->name;
}

bool lm_comm_reports(lm_comm *c)
{
    return c->transport->reports(c);
}

void lm_comm_free(lm_comm *c)
{
    if (c)
        c->transport->free(c);
}
