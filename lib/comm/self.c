/* SPDX-License-Identifier: Apache-2.0 */
/* self.c -- the transport of a group of one rank: results are copies of operands, and no other rank can fail. */
#include <string.h>

#include "base/mem.h"
#include "comm/comm_impl.h"

typedef struct {
    lm_comm comm;
    lm_err why; /* code LM_OK: not failed */
} self;

static lm_code self_state(lm_comm *c, lm_err *e)
{
    const self *s = (const self *)c;

    if (s->why.code && !e->code)
        *e = s->why;
    return s->why.code;
}

static lm_code self_copy(lm_comm *c, const void *in, void *out, size_t bytes, lm_err *e)
{
    if (bytes && in != out)
        memcpy(out, in, bytes);
    return self_state(c, e);
}

static lm_code self_all_reduce(lm_comm *c, const void *in, void *out, size_t n, lm_dtype d,
                               lm_comm_op op, lm_err *e)
{
    (void)op;
    return self_copy(c, in, out, n * lm_dtype_size(d), e);
}

static lm_code self_reduce_scatter(lm_comm *c, const void *in, void *out, const size_t *count,
                                   lm_dtype d, lm_comm_op op, lm_err *e)
{
    (void)op;
    return self_copy(c, in, out, count[0] * lm_dtype_size(d), e);
}

static lm_code self_all_gather(lm_comm *c, const void *in, void *out, const size_t *bytes,
                               lm_err *e)
{
    return self_copy(c, in, out, bytes[0], e);
}

static lm_code self_all_to_all(lm_comm *c, const void *in, const size_t *give, void *out,
                               const size_t *take, lm_err *e)
{
    if (give[0] != take[0])
        return lm_fail(e, LM_EBUG, "all_to_all", NULL,
                       "rank 0 gives %zu bytes to rank 0, which takes %zu", give[0], take[0]);
    return self_copy(c, in, out, give[0], e);
}

static lm_code self_broadcast(lm_comm *c, void *data, size_t bytes, int root, lm_err *e)
{
    (void)data, (void)bytes, (void)root;
    return self_state(c, e);
}

/* comm.c refuses messages to oneself. */
static lm_code self_send(lm_comm *c, int to, const void *data, size_t bytes, lm_err *e)
{
    (void)to, (void)data, (void)bytes;
    return self_state(c, e);
}

static lm_code self_recv(lm_comm *c, int from, void *data, size_t bytes, lm_err *e)
{
    (void)from, (void)data, (void)bytes;
    return self_state(c, e);
}

static lm_code self_split(lm_comm *c, int color, int key, lm_comm **out, lm_err *e)
{
    (void)key;
    if (self_state(c, e))
        return e->code;
    return color < 0 ? LM_OK : lm_comm_self(out, e);
}

static void self_abort(lm_comm *c, const lm_err *why)
{
    self *s = (self *)c;

    if (!s->why.code)
        s->why = *why;
}

static bool self_reports(lm_comm *c)
{
    (void)c;
    return true;
}

static void self_free(lm_comm *c)
{
    lm_free(c);
}

static const lm_transport self_transport = {
    .name = "self",
    .barrier = self_state,
    .all_reduce = self_all_reduce,
    .reduce_scatter = self_reduce_scatter,
    .all_gather = self_all_gather,
    .all_to_all = self_all_to_all,
    .broadcast = self_broadcast,
    .send = self_send,
    .recv = self_recv,
    .split = self_split,
    .abort = self_abort,
    .look = self_state,
    .reports = self_reports,
    .free = self_free,
};

lm_code lm_comm_self(lm_comm **out, lm_err *e)
{
    self *s;

    if (lm_alloc_n(&s, 1, sizeof *s, "a rank", e))
        return e->code;
    s->comm = (lm_comm){ .transport = &self_transport, .size = 1 };
    *out = &s->comm;
    return LM_OK;
}
