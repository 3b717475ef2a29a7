/* SPDX-License-Identifier: Apache-2.0 */
/* comm.c -- the exchanges of kernels/comm.h on a device.
 *
 * A value is seen as [outer, len, inner] around the dimension that is split or sent by: a range of that dimension is a rectangle,
 * which one copy moves between its place in the value and the run of memory in which it travels.  Sizes of parts follow from the
 * attributes, so that the host knows them while it enqueues. */
#include "kernels/cuda/comm.h"

#include <string.h>

enum { MOST = 1024 }; /* ranks along an axis */

static lm_links *links_of(const lm_call *c)
{
    const lm_exchange_attr *a = c->attr;
    return c->step && c->step->links ? c->step->links[a->axis] : NULL;
}

static size_t bytes_of(const lm_tensor *t)
{
    return (size_t)lm_tensor_count(t) * lm_dtype_size(t->dtype);
}

static void copy_bytes(const lm_call *c, void *to, const void *from, size_t bytes)
{
    if (bytes && to != from)
        cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, c->stream->handle);
}

static void copy(const lm_call *c)
{
    copy_bytes(c, c->out[0].data, c->in[0].data, bytes_of(&c->out[0]));
}

/* Indices [from, from + count) of a dimension of `len`, for all outer ones: to or from a run, in which a row of them begins every
 * `pitch` bytes. */
typedef struct {
    int64_t outer, len;
    size_t inner; /* bytes */
} view;

static void move(const lm_call *c, const view *v, char *value, int64_t from, int64_t count,
                 char *run, size_t pitch, bool out)
{
    const size_t width = (size_t)count * v->inner, whole = (size_t)v->len * v->inner;
    char *at = value + (size_t)from * v->inner;
    if (!width || !v->outer)
        return;
    cudaMemcpy2DAsync(out ? run : at, out ? pitch : whole, out ? at : run, out ? whole : pitch,
                      width, (size_t)v->outer, cudaMemcpyDeviceToDevice, c->stream->handle);
}

/* t, around dimension `dim`, of which it has `len`. */
static view view_of(const lm_tensor *t, int64_t dim, int64_t len)
{
    view v = { .outer = 1, .len = len, .inner = lm_dtype_size(t->dtype) };
    for (int i = 0; i < t->ndim; i++)
        if (i < dim)
            v.outer *= t->dim[i];
        else if (i > dim)
            v.inner *= (size_t)t->dim[i];
    return v;
}

/* ---- parts of a whole value ---- */

static view whole_view(const lm_exchange_attr *a, const lm_tensor *t)
{
    return view_of(t, a->dim, a->len);
}

static size_t part_bytes(const lm_exchange_attr *a, const view *v, int rank)
{
    return (size_t)(v->outer * lm_portions_count(&a->pieces, a->len, (int)a->ranks, rank)) *
           v->inner;
}

/* The part of a rank from the whole value, or into it. */
static void move_part(const lm_call *c, const view *v, int rank, void *whole, void *part, bool out)
{
    const lm_exchange_attr *a = c->attr;
    const size_t pitch = v->outer ? part_bytes(a, v, rank) / (size_t)v->outer : 0;
    char *run = part;
    lm_range r;
    for (int64_t k = 0; lm_portions_at(&a->pieces, a->len, (int)a->ranks, rank, k, &r); k++) {
        move(c, v, whole, r.from, r.count, run, pitch, out);
        run += (size_t)r.count * v->inner;
    }
}

static bool in_order(const lm_exchange_attr *a, const view *v)
{
    return v->outer == 1 && a->pieces.n == 0;
}

/* Of all ranks, one behind another; more than the whole value where ranks share some. */
static size_t parts_room(const lm_call *c, const lm_tensor *t)
{
    const lm_exchange_attr *a = c->attr;
    const view v = whole_view(a, t);
    size_t sum = 0;
    if (a->ranks > MOST)
        return SIZE_MAX;
    for (int r = 0; r < (int)a->ranks; r++)
        sum += part_bytes(a, &v, r);
    return sum;
}

static void all_reduce(const lm_call *c)
{
    const lm_exchange_attr *a = c->attr;
    lm_links *l = links_of(c);
    if (l)
        l->all_reduce(l, c->in[0].data, c->out[0].data, (size_t)lm_tensor_count(&c->in[0]),
                      c->in[0].dtype, a->op);
    else
        copy(c);
}

static size_t gather_work(const lm_call *c, int threads)
{
    (void)threads;
    return parts_room(c, &c->out[0]);
}

/* Zeros but for this rank's part, summed up. */
static void gather_sums(const lm_call *c, const view *v, lm_links *l)
{
    lm_tensor *y = &c->out[0];
    cudaMemsetAsync(y->data, 0, bytes_of(y), c->stream->handle);
    move_part(c, v, l->rank, y->data, c->in[0].data, false);
    l->all_reduce(l, y->data, y->data, (size_t)lm_tensor_count(y), y->dtype, LM_EXCHANGE_SUM);
}

static void all_gather(const lm_call *c)
{
    const lm_exchange_attr *a = c->attr;
    const view v = whole_view(a, &c->out[0]);
    lm_links *l = links_of(c);
    size_t bytes[MOST];
    char *parts = in_order(a, &v) ? c->out[0].data : c->work;
    if (!l) {
        copy(c);
        return;
    }
    if (a->sum) {
        gather_sums(c, &v, l);
        return;
    }
    for (int r = 0; r < (int)a->ranks; r++)
        bytes[r] = part_bytes(a, &v, r);
    l->all_gather(l, c->in[0].data, parts, bytes);
    for (int r = 0; r < (int)a->ranks && !in_order(a, &v); parts += bytes[r], r++)
        move_part(c, &v, r, c->out[0].data, parts, false);
}

static size_t scatter_work(const lm_call *c, int threads)
{
    (void)threads;
    return parts_room(c, &c->in[0]);
}

static void reduce_scatter(const lm_call *c)
{
    const lm_exchange_attr *a = c->attr;
    const view v = whole_view(a, &c->in[0]);
    lm_links *l = links_of(c);
    size_t count[MOST], size = lm_dtype_size(c->in[0].dtype);
    char *parts = c->work;
    if (!l) {
        copy(c);
        return;
    }
    for (int r = 0; r < (int)a->ranks; r++) {
        const size_t bytes = part_bytes(a, &v, r);
        count[r] = bytes / size;
        if (!in_order(a, &v))
            move_part(c, &v, r, c->in[0].data, parts, true);
        parts += bytes;
    }
    l->reduce_scatter(l, in_order(a, &v) ? c->in[0].data : c->work, c->out[0].data, count,
                      c->in[0].dtype, a->op);
}

static size_t shared_work(const lm_call *c, int threads)
{
    const view v = whole_view(c->attr, &c->in[0]);
    (void)threads;
    return (size_t)(v.outer * v.len) * v.inner;
}

static void sum_shared(const lm_call *c)
{
    const view v = whole_view(c->attr, &c->in[0]);
    lm_links *l = links_of(c);
    const size_t bytes = shared_work(c, 1);
    if (!l) {
        copy(c);
        return;
    }
    cudaMemsetAsync(c->work, 0, bytes, c->stream->handle);
    move_part(c, &v, l->rank, c->work, c->in[0].data, false);
    l->all_reduce(l, c->work, c->work, bytes / lm_dtype_size(c->in[0].dtype), c->in[0].dtype,
                  LM_EXCHANGE_SUM);
    move_part(c, &v, l->rank, c->work, c->out[0].data, true);
}

static void take_part(const lm_call *c)
{
    const lm_exchange_attr *a = c->attr;
    const view v = whole_view(a, &c->in[0]);
    move_part(c, &v, (int)a->rank, c->in[0].data, c->out[0].data, true);
}

static void once(const lm_call *c)
{
    const lm_exchange_attr *a = c->attr;
    if (a->rank == 0)
        copy(c);
    else
        cudaMemsetAsync(c->out[0].data, 0, bytes_of(&c->out[0]), c->stream->handle);
}

static void part_ids(const lm_call *c)
{
    const lm_part_ids_attr *a = c->attr;
    float *real = c->n_out > 1 ? c->out[1].data : NULL;
    lm_cuda_part_ids(c->in[0].data, c->in[0].dim[0], a->first, a->count, c->out[0].data, real,
                     c->stream);
}

/* ---- all to all: numbers go, in their order, to the rank that holds their index of the other dimension ---- */

/* A part of the value, split along `own`, seen along the dimension by which its numbers are sent. */
typedef struct {
    const lm_portions *own, *other;
    int64_t own_len, other_len;
    bool same; /* dimension */
    int ranks, rank;
    view v;
} lanes;

static lanes lanes_of(const lm_exchange_attr *a, const lm_tensor *t, bool to)
{
    const int64_t dim = to ? a->dim : a->to_dim;
    lanes l = { .own = to ? &a->to_pieces : &a->pieces,
                .other = to ? &a->pieces : &a->to_pieces,
                .own_len = to ? a->to_len : a->len,
                .other_len = to ? a->len : a->to_len,
                .same = a->dim == a->to_dim,
                .ranks = (int)a->ranks,
                .rank = (int)a->rank };
    l.v = view_of(t, dim, t->dim[dim]);
    return l;
}

/* Range number k of the indices here that another rank holds by the other layout; false: there are fewer. */
static bool lane_at(const lanes *l, int to, int64_t k, lm_range *out)
{
    lm_range mine, theirs;
    int64_t at = 0;
    if (!l->same)
        return lm_portions_at(l->other, l->other_len, l->ranks, to, k, out);
    for (int64_t i = 0; lm_portions_at(l->own, l->own_len, l->ranks, l->rank, i, &mine); i++) {
        for (int64_t j = 0; lm_portions_at(l->other, l->other_len, l->ranks, to, j, &theirs); j++) {
            const int64_t from = mine.from > theirs.from ? mine.from : theirs.from;
            const int64_t end_mine = mine.from + mine.count,
                          end_theirs = theirs.from + theirs.count;
            const int64_t end = end_mine < end_theirs ? end_mine : end_theirs;
            if (from >= end || k-- > 0)
                continue;
            *out = (lm_range){ at + from - mine.from, end - from };
            return true;
        }
        at += mine.count;
    }
    return false;
}

/* Bytes of each rank; their sum. */
static size_t count_lanes(const lanes *l, size_t *bytes)
{
    size_t sum = 0;
    lm_range r;
    for (int to = 0; to < l->ranks; to++) {
        bytes[to] = 0;
        for (int64_t k = 0; lane_at(l, to, k, &r); k++)
            bytes[to] += (size_t)(l->v.outer * r.count) * l->v.inner;
        sum += bytes[to];
    }
    return sum;
}

static void move_lanes(const lm_call *c, const lanes *l, const size_t *bytes, char *data,
                       char *runs, bool out)
{
    lm_range r;
    for (int to = 0; to < l->ranks; runs += bytes[to], to++) {
        const size_t pitch = l->v.outer ? bytes[to] / (size_t)l->v.outer : 0;
        char *run = runs;
        for (int64_t k = 0; lane_at(l, to, k, &r); k++) {
            move(c, &l->v, data, r.from, r.count, run, pitch, out);
            run += (size_t)r.count * l->v.inner;
        }
    }
}

/* Zeros but for what this rank has of the whole value, summed up; and the part of that along the other dimension. */
static void sum_between(const lm_call *c, lm_links *l)
{
    const lm_exchange_attr *a = c->attr;
    lm_exchange_attr turned = *a;
    lm_call other = *c;
    const size_t bytes = shared_work(c, 1);
    view v = whole_view(a, &c->in[0]);
    cudaMemsetAsync(c->work, 0, bytes, c->stream->handle);
    move_part(c, &v, l->rank, c->work, c->in[0].data, false);
    l->all_reduce(l, c->work, c->work, bytes / lm_dtype_size(c->in[0].dtype), c->in[0].dtype,
                  LM_EXCHANGE_SUM);
    turned.dim = a->to_dim;
    turned.len = a->to_len;
    turned.pieces = a->to_pieces;
    other.attr = &turned;
    v = whole_view(&turned, &c->out[0]);
    move_part(&other, &v, l->rank, c->work, c->out[0].data, true);
}

/* Where what has come begins, behind what is sent. */
static size_t sent_room(const lanes *from, size_t *give)
{
    return (count_lanes(from, give) + 63) / 64 * 64;
}

static size_t to_all_work(const lm_call *c, int threads)
{
    const lm_exchange_attr *a = c->attr;
    size_t bytes[MOST];
    (void)threads;
    if (a->ranks > MOST)
        return SIZE_MAX;
    if (a->sum)
        return shared_work(c, 1);
    const lanes from = lanes_of(a, &c->in[0], false), to = lanes_of(a, &c->out[0], true);
    return sent_room(&from, bytes) + count_lanes(&to, bytes);
}

static void all_to_all(const lm_call *c)
{
    const lm_exchange_attr *a = c->attr;
    lm_links *l = links_of(c);
    size_t give[MOST], take[MOST];
    if (!l) {
        copy(c);
        return;
    }
    if (a->sum) {
        sum_between(c, l);
        return;
    }
    const lanes from = lanes_of(a, &c->in[0], false), to = lanes_of(a, &c->out[0], true);
    char *sent = c->work, *got = sent + sent_room(&from, give);
    count_lanes(&to, take);
    move_lanes(c, &from, give, c->in[0].data, sent, true);
    l->all_to_all(l, sent, give, got, take);
    move_lanes(c, &to, take, c->out[0].data, got, false);
}

#define EXCHANGE(op, run, work)                     \
    {                                               \
        op, LM_DTYPE_NONE, LM_CUDA_PLAIN, run, work \
    }
const lm_kernel lm_comm_cuda_kernels[] = {
    EXCHANGE("all_reduce", all_reduce, NULL),
    EXCHANGE("reduce_scatter", reduce_scatter, scatter_work),
    EXCHANGE("all_gather", all_gather, gather_work),
    EXCHANGE("all_to_all", all_to_all, to_all_work),
    EXCHANGE("sum_shared", sum_shared, shared_work),
    EXCHANGE("part", take_part, NULL),
    EXCHANGE("once", once, NULL),
    EXCHANGE("part_ids", part_ids, NULL),
    { NULL, LM_DTYPE_NONE, LM_CUDA_PLAIN, NULL, NULL },
};
