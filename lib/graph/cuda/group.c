/* SPDX-License-Identifier: Apache-2.0 */
/* group.c -- groups of devices: the exchanges of kernels/comm.h by NCCL, on one stream.
 *
 * Sums whose bits must be those of lib/comm are an exchange of all with all, and a tree of the parts that have come
 * (kernels/cuda/comm.h): as many bytes travel as in a ring.  So are maxima and minima, because those of NCCL may lose a NaN, and
 * sums of parts of different lengths, which NCCL does not have.  A long sum goes through the scratch in pieces. */
#include "base/mem.h"
#include "graph/cuda/cuda.h"

#ifdef LM_NCCL
#include <errno.h>
#include <string.h>

#include "graph/cuda/nccl.h"
#include "kernels/cuda/comm.h"

/* Bytes of parts that are combined at once, and of a part below which each rank takes all parts and combines them itself. */
enum { SCRATCH = 16 << 20, SMALL = 64 << 10 };

/* Bytes of the scratch of a group: a small part of each rank has room, however many ranks there are. */
static size_t scratch_bytes(int ranks)
{
    const size_t small = (size_t)ranks * SMALL;

    return small > SCRATCH ? small : SCRATCH;
}

struct cuda_group {
    lm_links l; /* first: kernels get this */
    cuda_backend *c;
    cuda_stream *s;
    const lm_nccl *n;
    ncclComm_t comm;
    char *scratch;
    cuda_group *next;
};

static cuda_group *group_of(lm_links *l)
{
    return (cuda_group *)l;
}

/* ---- failures: the first stays, and nothing is put on the stream behind it ---- */

static lm_code refused(const cuda_backend *c, const lm_nccl *n, ncclResult_t r, const char *doing,
                       lm_err *e)
{
    const char *more = n->ncclGetLastError(NULL);

    errno = 0;
    return lm_fail(e, LM_EIO, c->name, "NCCL_DEBUG=INFO in the environment makes NCCL say more",
                   "%s by NCCL: %s%s%.160s", doing, n->ncclGetErrorString(r),
                   more && *more ? ": " : "", more ? more : "");
}

/* Whether nothing has failed so far; an answer of NCCL. */
static bool did(cuda_group *g, ncclResult_t r, const char *doing)
{
    if (r != ncclSuccess && !g->l.failure.code)
        refused(g->c, g->n, r, doing, &g->l.failure);
    return !g->l.failure.code;
}

static bool begins(cuda_group *g)
{
    return !g->l.failure.code && !cuda_enter(g->c, &g->l.failure);
}

static void copy(cuda_group *g, void *to, const void *from, size_t bytes)
{
    if (bytes && to != from && !g->l.failure.code)
        cuda_did(g->c, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, g->s->s.handle),
                 "copying", &g->l.failure);
}

/* ---- messages, between ncclGroupStart and ncclGroupEnd ---- */

static void start(cuda_group *g)
{
    did(g, g->n->ncclGroupStart(), "exchanging");
}

/* Also after a failure: what has been started is ended. */
static void end(cuda_group *g)
{
    did(g, g->n->ncclGroupEnd(), "exchanging");
}

static void give(cuda_group *g, int to, const void *data, size_t bytes)
{
    if (bytes && !g->l.failure.code)
        did(g, g->n->ncclSend(data, bytes, ncclUint8, to, g->comm, g->s->s.handle), "sending");
}

static void take(cuda_group *g, int from, void *data, size_t bytes)
{
    if (bytes && !g->l.failure.code)
        did(g, g->n->ncclRecv(data, bytes, ncclUint8, from, g->comm, g->s->s.handle), "receiving");
}

static void send_to(lm_links *l, int to, const void *data, size_t bytes)
{
    if (begins(group_of(l)))
        give(group_of(l), to, data, bytes);
}

static void recv_from(lm_links *l, int from, void *data, size_t bytes)
{
    if (begins(group_of(l)))
        take(group_of(l), from, data, bytes);
}

static void all_to_all(lm_links *l, const void *in, const size_t *gives, void *out,
                       const size_t *takes)
{
    cuda_group *g = group_of(l);
    const char *from = in, *mine = NULL;
    char *to = out, *own = NULL;

    if (!begins(g))
        return;
    start(g);
    for (int r = 0; r < l->size; from += gives[r], to += takes[r], r++)
        if (r == l->rank) {
            mine = from;
            own = to;
        } else {
            give(g, r, from, gives[r]);
            take(g, r, to, takes[r]);
        }
    end(g);
    copy(g, own, mine, gives[l->rank]);
}

/* ---- gathering ---- */

static bool are_equal(const size_t *n, int ranks)
{
    for (int r = 1; r < ranks; r++)
        if (n[r] != n[0])
            return false;
    return true;
}

static void all_gather(lm_links *l, const void *in, void *out, const size_t *bytes)
{
    cuda_group *g = group_of(l);
    char *to = out, *own = out;

    if (!begins(g))
        return;
    if (are_equal(bytes, l->size)) {
        if (bytes[0])
            did(g, g->n->ncclAllGather(in, out, bytes[0], ncclUint8, g->comm, g->s->s.handle),
                "gathering");
        return;
    }
    start(g);
    for (int r = 0; r < l->size; to += bytes[r], r++)
        if (r == l->rank) {
            own = to;
        } else {
            give(g, r, in, bytes[l->rank]);
            take(g, r, to, bytes[r]);
        }
    end(g);
    copy(g, own, in, bytes[l->rank]);
}

/* ---- sums ---- */

static ncclDataType_t type_of(lm_dtype d)
{
    switch (d) {
    case LM_DTYPE_F64:
        return ncclFloat64;
    case LM_DTYPE_F16:
        return ncclFloat16;
    case LM_DTYPE_BF16:
        return ncclBfloat16;
    case LM_DTYPE_I64:
        return ncclInt64;
    case LM_DTYPE_I32:
        return ncclInt32;
    default:
        return ncclFloat32;
    }
}

static bool is_ordered(const cuda_group *g, lm_exchange_op op)
{
    return g->c->deterministic || op != LM_EXCHANGE_SUM;
}

/* What of a part of n elements is in the piece that begins at `at`. */
static size_t in_piece(size_t n, size_t at, size_t piece)
{
    return n <= at ? 0 : n - at < piece ? n - at : piece;
}

/* Elements [at, at + piece) of the part of each rank, which lie one behind the other in `in` and have count[r] elements (count
 * NULL: `every`): those of this rank's from all ranks, combined in out. */
static void combine(cuda_group *g, const char *in, char *out, const size_t *count, size_t every,
                    size_t at, size_t piece, lm_dtype d, lm_exchange_op op)
{
    const size_t size = lm_dtype_size(d);
    const int me = g->l.rank;
    const size_t own = in_piece(count ? count[me] : every, at, piece);
    const char *from = in, *mine = in;

    start(g);
    for (int r = 0; r < g->l.size; r++) {
        const size_t n = count ? count[r] : every;
        if (r == me) {
            mine = from;
        } else {
            give(g, r, from + at * size, in_piece(n, at, piece) * size);
            take(g, r, g->scratch + (size_t)r * piece * size, own * size);
        }
        from += n * size;
    }
    end(g);
    if (own)
        copy(g, g->scratch + (size_t)me * piece * size, mine + at * size, own * size);
    if (!g->l.failure.code)
        lm_cuda_tree(g->scratch, piece, g->l.size, own, d, op, out, &g->s->s);
}

static void ordered_scatter(cuda_group *g, const char *in, char *out, const size_t *count,
                            lm_dtype d, lm_exchange_op op)
{
    const size_t size = lm_dtype_size(d),
                 piece = scratch_bytes(g->l.size) / size / (size_t)g->l.size;
    size_t most = 0;

    for (int r = 0; r < g->l.size; r++)
        most = count[r] > most ? count[r] : most;
    for (size_t at = 0; at < most && !g->l.failure.code; at += piece)
        combine(g, in, out + at * size, count, 0, at, piece, d, op);
}

static void reduce_scatter(lm_links *l, const void *in, void *out, const size_t *count, lm_dtype d,
                           lm_exchange_op op)
{
    cuda_group *g = group_of(l);

    if (!begins(g))
        return;
    if (is_ordered(g, op) || !are_equal(count, l->size))
        ordered_scatter(g, in, out, count, d, op);
    else if (count[0])
        did(g,
            g->n->ncclReduceScatter(in, out, count[0], type_of(d), ncclSum, g->comm,
                                    g->s->s.handle),
            "adding up");
}

/* Few elements, of SMALL bytes at most: all parts to all. */
static void combine_all(cuda_group *g, const void *in, void *out, size_t n, lm_dtype d,
                        lm_exchange_op op)
{
    if (did(g,
            g->n->ncclAllGather(in, g->scratch, n * lm_dtype_size(d), ncclUint8, g->comm,
                                g->s->s.handle),
            "gathering"))
        lm_cuda_tree(g->scratch, n, g->l.size, n, d, op, out, &g->s->s);
}

/* Each rank combines a part of them, and gives it to all; `combine_all` has the last elements, and those of which ranks, more
 * than elements, would have no part. */
static void ordered_sum(cuda_group *g, const char *in, char *out, size_t n, lm_dtype d,
                        lm_exchange_op op)
{
    const size_t size = lm_dtype_size(d), ranks = (size_t)g->l.size;
    const size_t most = scratch_bytes(g->l.size) / size / ranks;

    while (n && !g->l.failure.code) {
        const size_t part = n / ranks < most ? n / ranks : most;
        if (n * size <= SMALL || !part) {
            const size_t few = n * size < SMALL ? n : SMALL / size;
            combine_all(g, in, out, few, d, op);
            in += few * size;
            out += few * size;
            n -= few;
            continue;
        }
        char *own = out + (size_t)g->l.rank * part * size;
        combine(g, in, own, NULL, part, 0, part, d, op);
        if (!g->l.failure.code)
            did(g, g->n->ncclAllGather(own, out, part * size, ncclUint8, g->comm, g->s->s.handle),
                "gathering");
        in += part * ranks * size;
        out += part * ranks * size;
        n -= part * ranks;
    }
}

static void all_reduce(lm_links *l, const void *in, void *out, size_t n, lm_dtype d,
                       lm_exchange_op op)
{
    cuda_group *g = group_of(l);

    if (!n || !begins(g))
        return;
    if (is_ordered(g, op))
        ordered_sum(g, in, out, n, d, op);
    else
        did(g, g->n->ncclAllReduce(in, out, n, type_of(d), ncclSum, g->comm, g->s->s.handle),
            "adding up");
}

/* ---- groups ---- */

static lm_code group_new(lm_backend *b, lm_group_id *id, lm_err *e)
{
    const lm_nccl *n;
    ncclUniqueId made;
    ncclResult_t r;

    _Static_assert(sizeof made == sizeof *id, "an id of NCCL is one of a group");
    if (lm_nccl_open(&n, e) || cuda_enter(cuda_of(b), e))
        return e->code;
    if ((r = n->ncclGetUniqueId(&made)))
        return refused(cuda_of(b), n, r, "making a group", e);
    memcpy(id, &made, sizeof *id);
    return LM_OK;
}

static void group_leave(lm_backend *b, lm_links *l)
{
    cuda_group *g = group_of(l), **at = &g->c->groups;

    while (*at && *at != g)
        at = &(*at)->next;
    if (*at)
        *at = g->next;
    cuda_quiet(cudaSetDevice(g->c->index));
    if (g->comm && g->c->ended.code)
        g->n->ncclCommAbort(g->comm);
    else if (g->comm)
        g->n->ncclCommDestroy(g->comm);
    b->free(b, g->scratch, scratch_bytes(g->l.size));
    lm_free(g);
}

static lm_code group_open(lm_backend *b, int rank, int size, lm_stream *s, lm_links **out,
                          lm_err *e)
{
    cuda_group *g = NULL;
    void *scratch;

    *out = NULL;
    if (cuda_enter(cuda_of(b), e) || lm_alloc_n(&g, 1, sizeof *g, "ranks", e))
        return e->code;
    g->l = (lm_links){ .rank = rank,
                       .size = size,
                       .all_reduce = all_reduce,
                       .reduce_scatter = reduce_scatter,
                       .all_gather = all_gather,
                       .all_to_all = all_to_all,
                       .send = send_to,
                       .recv = recv_from };
    g->c = cuda_of(b);
    g->s = cuda_stream_of(b, s);
    if (lm_nccl_open(&g->n, e) ||
        b->alloc(b, scratch_bytes(size), "exchanges between devices", &scratch, e)) {
        lm_free(g);
        return e->code;
    }
    g->scratch = scratch;
    g->next = g->c->groups;
    g->c->groups = g;
    *out = &g->l;
    return LM_OK;
}

static lm_code group_join(lm_backend *b, lm_links *l, const lm_group_id *id, lm_err *e)
{
    cuda_group *g = group_of(l);
    ncclUniqueId of;
    ncclResult_t r;

    memcpy(&of, id, sizeof of);
    if (cuda_enter(cuda_of(b), e))
        return e->code;
    r = g->n->ncclCommInitRank(&g->comm, l->size, of, l->rank);
    if (!r)
        return LM_OK;
    g->comm = NULL;
    return refused(g->c, g->n, r, "joining a group", e);
}

lm_code cuda_groups_look(cuda_backend *c, lm_err *e)
{
    ncclResult_t r = ncclSuccess;

    for (cuda_group *g = c->groups; g; g = g->next) {
        if (g->l.failure.code) {
            *e = g->l.failure;
            return e->code;
        }
        if (!g->comm)
            continue; /* it has not joined, or has ended */
        if (g->n->ncclCommGetAsyncError(g->comm, &r) || (r && r != ncclInProgress))
            return refused(c, g->n, r ? r : ncclInternalError, "exchanging", e);
    }
    return LM_OK;
}

void cuda_groups_end(cuda_backend *c)
{
    for (cuda_group *g = c->groups; g; g = g->next) {
        if (g->comm)
            g->n->ncclCommAbort(g->comm);
        g->comm = NULL;
    }
}

void cuda_fill_groups(lm_backend *b)
{
    b->group_new = group_new;
    b->group_open = group_open;
    b->group_join = group_join;
    b->group_leave = group_leave;
}
#else
/* Built without the header of NCCL. */
void cuda_fill_groups(lm_backend *b)
{
    (void)b;
}

lm_code cuda_groups_look(cuda_backend *c, lm_err *e)
{
    (void)c, (void)e;
    return LM_OK;
}

void cuda_groups_end(cuda_backend *c)
{
    (void)c;
}
#endif
