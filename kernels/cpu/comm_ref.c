/* SPDX-License-Identifier: Apache-2.0 */
/* comm_ref.c -- the exchanges of kernels/comm.h on the host.
 *
 * Parts travel in one run of memory for each rank, packed in the scratch where they do not lie so already.  A value is seen as
 * [outer, len, inner] around its split dimension, so that a range of that dimension is one copy for each outer index. */
#include "kernels/comm.h"

#include <string.h>

#include "kernels/cpu/ref.h"
#include "kernels/cpu/tables.h"

static lm_links *links_of(const lm_call *c)
{
    const lm_exchange_attr *a = c->attr;
    return c->step && c->step->links ? c->step->links[a->axis] : NULL;
}

static size_t bytes_of(const lm_tensor *t)
{
    return (size_t)lm_tensor_count(t) * lm_dtype_size(t->dtype);
}

/* How the whole value lies around a dimension of `len` elements. */
typedef struct {
    const lm_portions *pieces;
    int ranks;
    int64_t outer, len;
    size_t inner; /* bytes */
} view;

/* t: the value, or a part of it along `dim`. */
static view view_of(const lm_exchange_attr *a, const lm_tensor *t, bool to)
{
    int64_t dim = to ? a->to_dim : a->dim;
    view v = { .pieces = to ? &a->to_pieces : &a->pieces,
               .ranks = (int)a->ranks,
               .outer = 1,
               .len = to ? a->to_len : a->len,
               .inner = lm_dtype_size(t->dtype) };
    for (int i = 0; i < t->ndim; i++)
        if (i < dim)
            v.outer *= t->dim[i];
        else if (i > dim)
            v.inner *= (size_t)t->dim[i];
    return v;
}

/* Copy the part of a rank from the whole value, or into it; returns its end. */
static char *move_part(const view *v, int rank, char *whole, char *part, bool out)
{
    for (int64_t o = 0; o < v->outer; o++) {
        lm_range r;
        for (int64_t k = 0; lm_portions_at(v->pieces, v->len, v->ranks, rank, k, &r); k++) {
            size_t n = (size_t)r.count * v->inner;
            char *at = whole + (size_t)(o * v->len + r.from) * v->inner;
            memcpy(out ? part : at, out ? at : part, n);
            part += n;
        }
    }
    return part;
}

/* True if the parts of all ranks lie one behind the other in the whole value. */
static bool in_order(const view *v)
{
    return v->outer == 1 && v->pieces->n == 0;
}

static size_t part_bytes(const view *v, int rank)
{
    return (size_t)(v->outer * lm_portions_count(v->pieces, v->len, v->ranks, rank)) * v->inner;
}

static size_t sizes_room(const lm_call *c)
{
    const lm_exchange_attr *a = c->attr;
    return ((size_t)a->ranks * 2 * sizeof(size_t) + 63) / 64 * 64;
}

static void copy(const lm_call *c)
{
    memcpy(c->out[0].data, c->in[0].data, bytes_of(&c->out[0]));
}

static void all_reduce(const lm_call *c)
{
    const lm_exchange_attr *a = c->attr;
    lm_links *l = links_of(c);
    if (l)
        l->all_reduce(l, c->in[0].data, c->out[0].data, (size_t)lm_tensor_count(&c->in[0]),
                      c->in[0].dtype, a->op);
    else if (c->out[0].data != c->in[0].data)
        copy(c);
}

/* Sizes of the parts, and behind them the parts, which are more than the whole value where ranks share some. */
static size_t parts_room(const lm_call *c, const lm_tensor *t)
{
    view v = view_of(c->attr, t, false);
    size_t sum = sizes_room(c);
    for (int r = 0; r < v.ranks; r++)
        sum += part_bytes(&v, r);
    return sum;
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
    memset(y->data, 0, bytes_of(y));
    move_part(v, l->rank, y->data, c->in[0].data, false);
    l->all_reduce(l, y->data, y->data, (size_t)lm_tensor_count(y), y->dtype, LM_EXCHANGE_SUM);
}

static void all_gather(const lm_call *c)
{
    view v = view_of(c->attr, &c->out[0], false);
    lm_links *l = links_of(c);
    size_t *bytes = c->work;
    char *parts = in_order(&v) ? c->out[0].data : (char *)c->work + sizes_room(c);
    if (!l) {
        copy(c);
        return;
    }
    if (((const lm_exchange_attr *)c->attr)->sum) {
        gather_sums(c, &v, l);
        return;
    }
    for (int r = 0; r < v.ranks; r++)
        bytes[r] = part_bytes(&v, r);
    l->all_gather(l, c->in[0].data, parts, bytes);
    for (int r = 0; r < v.ranks && parts != c->out[0].data; r++)
        parts = move_part(&v, r, c->out[0].data, parts, false);
}

static size_t scatter_work(const lm_call *c, int threads)
{
    (void)threads;
    return parts_room(c, &c->in[0]);
}

static void reduce_scatter(const lm_call *c)
{
    const lm_exchange_attr *a = c->attr;
    view v = view_of(a, &c->in[0], false);
    lm_links *l = links_of(c);
    size_t *count = c->work, size = lm_dtype_size(c->in[0].dtype);
    char *parts = (char *)c->work + sizes_room(c), *at = parts;
    if (!l) {
        copy(c);
        return;
    }
    for (int r = 0; r < v.ranks; r++) {
        count[r] = part_bytes(&v, r) / size;
        if (!in_order(&v))
            at = move_part(&v, r, c->in[0].data, at, true);
    }
    l->reduce_scatter(l, in_order(&v) ? c->in[0].data : parts, c->out[0].data, count,
                      c->in[0].dtype, a->op);
}

static size_t shared_work(const lm_call *c, int threads)
{
    view v = view_of(c->attr, &c->in[0], false);
    (void)threads;
    return (size_t)(v.outer * v.len) * v.inner;
}

static void sum_shared(const lm_call *c)
{
    view v = view_of(c->attr, &c->in[0], false);
    lm_links *l = links_of(c);
    size_t bytes = shared_work(c, 1);
    if (!l) {
        copy(c);
        return;
    }
    memset(c->work, 0, bytes);
    move_part(&v, l->rank, c->work, c->in[0].data, false);
    l->all_reduce(l, c->work, c->work, bytes / lm_dtype_size(c->in[0].dtype), c->in[0].dtype,
                  LM_EXCHANGE_SUM);
    move_part(&v, l->rank, c->work, c->out[0].data, true);
}

static void take_part(const lm_call *c)
{
    const lm_exchange_attr *a = c->attr;
    view v = view_of(a, &c->in[0], false);
    move_part(&v, (int)a->rank, c->in[0].data, c->out[0].data, true);
}

static void once(const lm_call *c)
{
    const lm_exchange_attr *a = c->attr;
    if (a->rank == 0)
        copy(c);
    else
        memset(c->out[0].data, 0, bytes_of(&c->out[0]));
}

/* ---- a value that one rank has whole ---- */

/* Bytes from each rank or to it: of this rank's part with the owner, and on the owner of all parts. */
static void owner_sizes(const lm_exchange_attr *a, const view *v, size_t *whole, size_t *part)
{
    for (int r = 0; r < v->ranks; r++) {
        whole[r] = a->rank == a->owner ? part_bytes(v, r) : 0;
        part[r] = r == a->owner ? part_bytes(v, (int)a->rank) : 0;
    }
}

static size_t collect_work(const lm_call *c, int threads)
{
    (void)threads;
    return parts_room(c, &c->in[0]);
}

static void collect(const lm_call *c)
{
    const lm_exchange_attr *a = c->attr;
    const view v = view_of(a, &c->in[0], false);
    lm_links *l = links_of(c);
    lm_tensor *y = opt_out(c, 0);
    size_t *take = c->work, *give = take + v.ranks;
    char *parts = (char *)c->work + sizes_room(c);
    if (!l) {
        copy(c);
        return;
    }
    owner_sizes(a, &v, take, give);
    l->all_to_all(l, c->in[0].data, give, parts, take);
    for (int r = 0; r < v.ranks && y; r++)
        parts = move_part(&v, r, y->data, parts, false);
}

static size_t deal_work(const lm_call *c, int threads)
{
    (void)threads;
    return parts_room(c, &c->out[0]);
}

static void deal(const lm_call *c)
{
    const lm_exchange_attr *a = c->attr;
    const view v = view_of(a, &c->out[0], false);
    lm_links *l = links_of(c);
    const lm_tensor *x = opt_in(c, 0);
    size_t *give = c->work, *take = give + v.ranks;
    char *parts = (char *)c->work + sizes_room(c), *at = parts;
    if (!l) {
        copy(c);
        return;
    }
    owner_sizes(a, &v, give, take);
    for (int r = 0; r < v.ranks && x; r++)
        at = move_part(&v, r, x->data, at, true);
    l->all_to_all(l, parts, give, c->out[0].data, take);
}

static void part_ids(const lm_call *c)
{
    const lm_part_ids_attr *a = c->attr;
    const int32_t *id = c->in[0].data;
    int32_t *to = c->out[0].data;
    lm_tensor *real = opt_out(c, 1);
    for (int64_t i = 0; i < c->in[0].dim[0]; i++) {
        bool here = id[i] >= a->first && id[i] - a->first < a->count;
        if (real)
            set(real, i, id[i] >= 0);
        to[i] = id[i] < 0 ? id[i] : (int32_t)(here ? id[i] - a->first : a->count);
    }
}

/* ---- all to all: numbers go, in their order, to the rank that holds their index of the other dimension ---- */

/* The indices of a dimension that a rank holds, in order. */
static void find_held(const lm_portions *p, int64_t len, int ranks, int rank, int64_t *index)
{
    int64_t n = 0;
    lm_range r;
    for (int64_t k = 0; lm_portions_at(p, len, ranks, rank, k, &r); k++)
        for (int64_t i = 0; i < r.count; i++)
            index[n++] = r.from + i;
}

/* The rank that holds each index. */
static void find_owners(const lm_portions *p, int64_t len, int ranks, int32_t *owner)
{
    lm_range r;
    for (int rank = 0; rank < ranks; rank++)
        for (int64_t k = 0; lm_portions_at(p, len, ranks, rank, k, &r); k++)
            for (int64_t i = 0; i < r.count; i++)
                owner[r.from + i] = rank;
}

/* A part of the value, seen along the dimension by which its numbers are sent: a run of indices goes to one rank. */
typedef struct {
    int64_t outer, len;
    size_t inner;          /* bytes */
    int32_t *to, *run_end; /* by index: its rank, and the index behind its run */
} lanes;

/* t: split along `own`, of which it has index[]; `owner`: by index of the whole dimension `other`. */
static void find_lanes(const lm_tensor *t, int64_t own, const int64_t *index, int64_t other,
                       const int32_t *owner, lanes *l)
{
    l->outer = 1;
    l->len = t->dim[other];
    l->inner = lm_dtype_size(t->dtype);
    for (int i = 0; i < t->ndim; i++)
        if (i < other)
            l->outer *= t->dim[i];
        else if (i > other)
            l->inner *= (size_t)t->dim[i];
    for (int64_t i = l->len - 1; i >= 0; i--) {
        l->to[i] = owner[own == other ? index[i] : i];
        l->run_end[i] =
            i + 1 < l->len && l->to[i] == l->to[i + 1] ? l->run_end[i + 1] : (int32_t)(i + 1);
    }
}

/* Bytes of each rank. */
static void count_lanes(const lanes *l, int ranks, size_t *bytes)
{
    memset(bytes, 0, (size_t)ranks * sizeof *bytes);
    for (int64_t i = 0; i < l->len; i = l->run_end[i])
        bytes[l->to[i]] += (size_t)l->outer * (size_t)(l->run_end[i] - i) * l->inner;
}

/* Copy the numbers of a part to the runs of the ranks, one behind another, or from them. */
static void move_lanes(const lanes *l, int ranks, const size_t *bytes, size_t *at, char *data,
                       char *runs, bool out)
{
    at[0] = 0;
    for (int r = 1; r < ranks; r++)
        at[r] = at[r - 1] + bytes[r - 1];
    for (int64_t o = 0; o < l->outer; o++, data += (size_t)l->len * l->inner)
        for (int64_t i = 0; i < l->len; i = l->run_end[i]) {
            const size_t n = (size_t)(l->run_end[i] - i) * l->inner;
            char *here = data + (size_t)i * l->inner, *there = runs + at[l->to[i]];
            memcpy(out ? there : here, out ? here : there, n);
            at[l->to[i]] += n;
        }
}

/* Along one dimension, in other pieces: sizes and places of the ranks' runs, an index and an owner for each element by both, the
 * lanes of one, and the numbers in both directions. */
static size_t along_work(const lm_call *c)
{
    const lm_exchange_attr *a = c->attr;
    return sizes_room(c) + (size_t)a->ranks * sizeof(size_t) +
           (size_t)(a->len + a->to_len) * (sizeof(int64_t) + 3 * sizeof(int32_t)) +
           bytes_of(&c->in[0]) + bytes_of(&c->out[0]);
}

static void move_along(const lm_call *c, lm_links *l)
{
    const lm_exchange_attr *a = c->attr;
    int ranks = (int)a->ranks, rank = (int)a->rank;
    size_t *give = c->work, *take = give + ranks, *at = take + ranks;
    int64_t *from_index = (int64_t *)(at + ranks), *to_index = from_index + a->len;
    int32_t *from_owner = (int32_t *)(to_index + a->to_len), *to_owner = from_owner + a->len;
    lanes lane = { .to = to_owner + a->to_len };
    lane.run_end = lane.to + a->len + a->to_len;
    char *sent = (char *)(lane.run_end + a->len + a->to_len), *got = sent + bytes_of(&c->in[0]);
    find_held(&a->pieces, a->len, ranks, rank, from_index);
    find_held(&a->to_pieces, a->to_len, ranks, rank, to_index);
    find_owners(&a->pieces, a->len, ranks, from_owner);
    find_owners(&a->to_pieces, a->to_len, ranks, to_owner);
    find_lanes(&c->in[0], a->dim, from_index, a->to_dim, to_owner, &lane);
    count_lanes(&lane, ranks, give);
    move_lanes(&lane, ranks, give, at, c->in[0].data, sent, true);
    find_lanes(&c->out[0], a->to_dim, to_index, a->dim, from_owner, &lane);
    count_lanes(&lane, ranks, take);
    l->all_to_all(l, sent, give, got, take);
    move_lanes(&lane, ranks, take, at, c->out[0].data, got, false);
}

/* Between two dimensions: of x each rank gets its part along the other one, and of y each gives its part along its own.  Bytes of
 * all ranks. */
static size_t parts_bytes(const view *v, size_t *bytes)
{
    size_t sum = 0;
    for (int r = 0; r < v->ranks; r++) {
        const size_t one = part_bytes(v, r);
        if (bytes)
            bytes[r] = one;
        sum += one;
    }
    return sum;
}

/* Add a part to the whole value, of numbers of type d. */
static void add_part(const view *v, int rank, lm_dtype d, char *whole, const char *part)
{
    const size_t each = lm_dtype_size(d);
    for (int64_t o = 0; o < v->outer; o++) {
        lm_range r;
        for (int64_t k = 0; lm_portions_at(v->pieces, v->len, v->ranks, rank, k, &r); k++) {
            const int64_t n = r.count * (int64_t)(v->inner / each);
            char *to = whole + (size_t)(o * v->len + r.from) * v->inner;
            for (int64_t i = 0; i < n; i++)
                lm_set(d, to, i, lm_get(d, to, i) + lm_get(d, part, i));
            part += (size_t)n * each;
        }
    }
}

static size_t to_all_work(const lm_call *c, int threads)
{
    const lm_exchange_attr *a = c->attr;
    const view x = view_of(a, &c->in[0], true), y = view_of(a, &c->out[0], false);
    (void)threads;
    return a->dim == a->to_dim ? along_work(c)
                               : sizes_room(c) + parts_bytes(&x, NULL) + parts_bytes(&y, NULL);
}

static void move_between(const lm_call *c, lm_links *l)
{
    const lm_exchange_attr *a = c->attr;
    const view x = view_of(a, &c->in[0], true), y = view_of(a, &c->out[0], false);
    size_t *give = c->work, *take = give + a->ranks;
    char *sent = (char *)c->work + sizes_room(c), *got = sent + parts_bytes(&x, give), *at = sent;
    parts_bytes(&y, take);
    for (int r = 0; r < a->ranks; r++)
        at = move_part(&x, r, c->in[0].data, at, true);
    l->all_to_all(l, sent, give, got, take);
    if (a->sum)
        memset(c->out[0].data, 0, bytes_of(&c->out[0]));
    for (int r = 0; r < a->ranks; got += take[r++])
        if (a->sum)
            add_part(&y, r, c->out[0].dtype, c->out[0].data, got);
        else
            move_part(&y, r, c->out[0].data, got, false);
}

static void all_to_all(const lm_call *c)
{
    const lm_exchange_attr *a = c->attr;
    lm_links *l = links_of(c);
    if (!l)
        copy(c);
    else if (a->dim == a->to_dim)
        move_along(c, l);
    else
        move_between(c, l);
}

/* ---- what a block that ranks share has of a value ---- */

static lm_links *gather_links(const lm_call *c)
{
    const lm_gather_attr *a = c->attr;
    return a->part && c->step && c->step->links ? c->step->links[a->axis] : NULL;
}

static size_t gather_begin_work(const lm_call *c, int threads)
{
    const lm_gather_attr *a = c->attr;
    (void)threads;
    return (size_t)a->ranks * sizeof(size_t);
}

static void gather_begin(const lm_call *c)
{
    const lm_gather_attr *a = c->attr;
    const size_t size = lm_dtype_size(c->in[0].dtype);
    lm_links *l = gather_links(c);
    size_t *bytes = c->work, before = 0;
    if (!l) {
        copy(c);
        return;
    }
    for (int64_t r = 0; r < a->ranks; r++) {
        bytes[r] = (size_t)a->part[r] * size;
        before += r < a->rank ? bytes[r] : 0;
    }
    (l->gather_begin ? l->gather_begin : l->all_gather)(l, (const char *)c->in[0].data + before,
                                                        c->out[0].data, bytes);
}

static void gather_end(const lm_call *c)
{
    lm_links *l = gather_links(c);
    if (l && l->gather_end)
        l->gather_end(l);
    if (c->out[0].data != c->in[0].data)
        copy(c);
}

const lm_kernel lm_comm_ref_kernels[] = {
    { "all_reduce", LM_DTYPE_NONE, LM_CPU_REF, all_reduce, NULL },
    { "reduce_scatter", LM_DTYPE_NONE, LM_CPU_REF, reduce_scatter, scatter_work },
    { "all_gather", LM_DTYPE_NONE, LM_CPU_REF, all_gather, gather_work },
    { "gather_begin", LM_DTYPE_NONE, LM_CPU_REF, gather_begin, gather_begin_work },
    { "gather_end", LM_DTYPE_NONE, LM_CPU_REF, gather_end, NULL },
    { "all_to_all", LM_DTYPE_NONE, LM_CPU_REF, all_to_all, to_all_work },
    { "sum_shared", LM_DTYPE_NONE, LM_CPU_REF, sum_shared, shared_work },
    { "part", LM_DTYPE_NONE, LM_CPU_REF, take_part, NULL },
    { "once", LM_DTYPE_NONE, LM_CPU_REF, once, NULL },
    { "collect", LM_DTYPE_NONE, LM_CPU_REF, collect, collect_work },
    { "deal", LM_DTYPE_NONE, LM_CPU_REF, deal, deal_work },
    { "part_ids", LM_DTYPE_NONE, LM_CPU_REF, part_ids, NULL },
    { NULL, LM_DTYPE_NONE, LM_CPU_REF, NULL, NULL },
};
