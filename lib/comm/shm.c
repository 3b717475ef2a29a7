/* SPDX-License-Identifier: Apache-2.0 */
/* shm.c -- the calls of ranks that share memory.
 *
 * Every call is an exchange: a number of steps that is the same on all ranks.  In each step a rank fills its buffer, and empties
 * those of the others.  See shm.h. */
#include "comm/shm.h"

#include <string.h>

#include "base/mem.h"
#include "comm/shm_impl.h"

typedef struct exchange exchange;

/* Piece k of what a rank gives, into its buffer; and of what it takes, out of the others'. */
typedef void give_fn(exchange *x, size_t k, char *buffer);
typedef void get_fn(exchange *x, size_t k);

struct exchange {
    shm_member *m;
    shm_call call;
    lm_dtype type;
    lm_comm_op op;
    uint64_t n, most; /* of the card */
    bool equal;       /* all ranks give the same n */
    size_t steps;
    give_fn *give; /* NULL: nothing */
    get_fn *get;
    uint32_t first; /* step of piece 0 */

    const char *in;
    char *out;
    const size_t *count, *take; /* elements or bytes of parts */
    size_t size, piece;         /* bytes of an element; elements or bytes of a piece for one rank */
    int root;
};

static shm_member *member_of(lm_comm *c)
{
    return (shm_member *)c;
}

static size_t sum_before(const size_t *n, int rank)
{
    size_t sum = 0;

    for (int r = 0; r < rank; r++)
        sum += n[r];
    return sum;
}

static size_t largest(const size_t *n, int size)
{
    size_t most = 0;

    for (int r = 0; r < size; r++)
        most = n[r] > most ? n[r] : most;
    return most;
}

static size_t steps_of(size_t n, size_t piece)
{
    return n ? (n + piece - 1) / piece : 1;
}

/* How much of a part of n lies in piece k. */
static size_t in_piece(const exchange *x, size_t n, size_t k)
{
    size_t at = k * x->piece;

    return at >= n ? 0 : n - at < x->piece ? n - at : x->piece;
}

/* The buffer of rank r for piece k. */
static char *buffer_of(const exchange *x, int r, size_t k)
{
    return (char *)(shm_slot(x->m->own, r, x->first + (uint32_t)k) + 1);
}

/* ---- failures of this rank ---- */

static void shm_abort(lm_comm *c, const lm_err *why)
{
    shm_member *m = member_of(c);
    const shm_head *h = m->world->head;
    lm_err named = *why, ignored = { 0 };

    lm_err_in(&named, "rank %d of %d on %s", shm_rank_at(m->own, c->rank)->name, h->ranks, h->host);
    shm_fail(m, &named, &ignored);
}

/* As every rank sees it, too. */
static lm_code fail_here(shm_member *m, const lm_err *why, lm_err *e)
{
    shm_abort(&m->comm, why);
    return shm_state(m, e);
}

/* ---- the steps of an exchange ---- */

static lm_code await_others(exchange *x, uint32_t step, lm_err *e)
{
    lm_code rc = LM_OK;

    for (int r = 0; r < x->m->comm.size && !rc; r++)
        if (r != x->m->comm.rank)
            rc = shm_wait(x->m, &shm_rank_at(x->m->own, r)->put, step + 1, r, x->call, e);
    return rc;
}

/* All ranks make this call, with the same size. */
static lm_code check_cards(exchange *x, uint32_t step, lm_err *e)
{
    const shm_member *m = x->m;
    const shm_card *mine = shm_slot(m->own, m->comm.rank, step);

    for (int r = 0; r < m->comm.size; r++) {
        const shm_card *other = shm_slot(m->own, r, step);
        lm_err why = { 0 };

        x->most = other->most > x->most ? other->most : x->most;
        if (other->call == mine->call && other->of == mine->of &&
            (!x->equal || other->n == mine->n))
            continue;
        lm_fail(&why, LM_EBUG, shm_call_name((int)x->call), NULL,
                "ranks differ: %s of %zu here, %s of %zu on rank %d of the group",
                shm_call_name((int)mine->call), (size_t)mine->n, shm_call_name((int)other->call),
                (size_t)other->n, r);
        return fail_here(x->m, &why, e);
    }
    return LM_OK;
}

static void write_step(exchange *x, size_t k)
{
    shm_rank *me = shm_rank_at(x->m->own, x->m->comm.rank);
    uint32_t step = x->first + (uint32_t)k;
    shm_card *card = shm_slot(x->m->own, x->m->comm.rank, step);

    *card = (shm_card){
        .call = x->call, .of = (uint32_t)x->type << 8 | (uint32_t)x->op, .n = x->n, .most = x->most
    };
    if (x->give)
        x->give(x, k, (char *)(card + 1));
    shm_set(&me->put, step + 1);
}

static lm_code read_step(exchange *x, size_t k, lm_err *e)
{
    uint32_t step = x->first + (uint32_t)k;

    if (await_others(x, step, e) || (k == 0 && check_cards(x, step, e)))
        return e->code;
    if (x->get)
        x->get(x, k);
    return LM_OK;
}

static lm_code run_steps(exchange *x, lm_err *e)
{
    lm_code rc = shm_state(x->m, e);
    shm_rank *me = shm_rank_at(x->m->own, x->m->comm.rank);

    x->first = x->m->step;
    atomic_store(&me->call, (int)x->call);
    for (size_t k = 0; k <= x->steps && !rc; k++) {
        if (k < x->steps)
            write_step(x, k);
        if (k > 0)
            rc = read_step(x, k - 1, e);
    }
    x->m->step += (uint32_t)x->steps;
    atomic_store(&me->call, SHM_NO_CALL);
    return rc;
}

static lm_code shm_barrier(lm_comm *c, lm_err *e)
{
    exchange x = { .m = member_of(c), .call = SHM_BARRIER, .steps = 1 };

    return run_steps(&x, e);
}

/* ---- reductions ---- */

/* Where, in rank r's buffer, the piece for rank `to` lies. */
static size_t place(const exchange *x, int r, int to)
{
    return (size_t)(to < r ? to : to - 1) * x->piece * x->size;
}

/* Pieces of one part each for all other ranks, of whole cache lines. */
static size_t piece_for_each(const shm_member *m, size_t size)
{
    size_t others = (size_t)m->comm.size - 1, bytes = m->own->head->piece / (others ? others : 1);

    return bytes / 64 * 64 / size;
}

static void give_parts(exchange *x, size_t k, char *buffer)
{
    int me = x->m->comm.rank;
    size_t at = 0;

    for (int r = 0; r < x->m->comm.size; at += x->count[r++])
        if (r != me)
            memcpy(buffer + place(x, me, r), x->in + (at + k * x->piece) * x->size,
                   in_piece(x, x->count[r], k) * x->size);
}

/* Piece k of this rank's part, out of the buffers of a step. */
static void reduce_piece(exchange *x, size_t step, size_t k, bool past, char *out)
{
    int me = x->m->comm.rank;
    const void *part[LM_SHM_RANKS];
    size_t n = in_piece(x, x->count[me], k);

    if (!n)
        return;
    for (int r = 0; r < x->m->comm.size; r++)
        part[r] = buffer_of(x, r, step) + (r == me ? 0 : place(x, r, me));
    part[me] = x->in + (sum_before(x->count, me) + k * x->piece) * x->size;
    (past ? lm_comm_tree_past : lm_comm_tree)(part, x->m->comm.size, 0, n, x->type, x->op,
                                              out + k * x->piece * x->size);
}

static void reduce_part(exchange *x, size_t k)
{
    reduce_piece(x, k, k, x->count[x->m->comm.rank] * x->size >= LM_COMM_BIG, x->out);
}

static lm_code shm_reduce_scatter(lm_comm *c, const void *in, void *out, const size_t *count,
                                  lm_dtype d, lm_comm_op op, lm_err *e)
{
    shm_member *m = member_of(c);
    size_t size = lm_dtype_size(d);
    exchange x = { .m = m,
                   .call = SHM_REDUCE_SCATTER,
                   .type = d,
                   .op = op,
                   .n = sum_before(count, c->size),
                   .equal = true,
                   .give = give_parts,
                   .get = reduce_part,
                   .in = in,
                   .out = out,
                   .count = count,
                   .size = size,
                   .piece = piece_for_each(m, size) };

    x.steps = steps_of(largest(count, c->size), x.piece);
    return run_steps(&x, e);
}

/* What fits into a buffer is combined by every rank for itself. */
static void give_all(exchange *x, size_t k, char *buffer)
{
    (void)k;
    if (x->n)
        memcpy(buffer, x->in, x->n * x->size);
}

static void reduce_all(exchange *x, size_t k)
{
    const void *part[LM_SHM_RANKS];

    for (int r = 0; r < x->m->comm.size; r++)
        part[r] = buffer_of(x, r, k);
    lm_comm_tree(part, x->m->comm.size, 0, x->n, x->type, x->op, x->out);
}

/* More is reduced in parts, each of which is then gathered while it is in the cache: even steps carry operands, odd ones the
 * results of the even step before the last, because a step is written before the last one is read. */
static void give_operand_or_result(exchange *x, size_t step, char *buffer)
{
    int me = x->m->comm.rank;
    size_t k = (step - 3) / 2, n;

    if (step % 2 == 0)
        give_parts(x, step / 2, buffer);
    else if (step >= 3 && (n = in_piece(x, x->count[me], k)))
        memcpy(buffer, x->out + (sum_before(x->count, me) + k * x->piece) * x->size, n * x->size);
}

static void get_operand_or_result(exchange *x, size_t step)
{
    int me = x->m->comm.rank, size = x->m->comm.size;
    size_t k = (step - 3) / 2;

    if (step % 2 == 0)
        reduce_piece(x, step, step / 2, false, x->out + sum_before(x->count, me) * x->size);
    for (int i = 1; i < size && step % 2 && step >= 3; i++) {
        int r = (me + i) % size; /* ranks begin at different ones */
        size_t n = in_piece(x, x->count[r], k);

        if (n)
            shm_copy_out(x->out + (sum_before(x->count, r) + k * x->piece) * x->size,
                         buffer_of(x, r, step), n * x->size, x->n * x->size);
    }
}

static lm_code shm_all_reduce(lm_comm *c, const void *in, void *out, size_t n, lm_dtype d,
                              lm_comm_op op, lm_err *e)
{
    enum { SMALL = 32 << 10 };
    shm_member *m = member_of(c);
    size_t count[LM_SHM_RANKS], ranks = (size_t)c->size;
    exchange x = { .m = m,
                   .call = SHM_ALL_REDUCE,
                   .type = d,
                   .op = op,
                   .n = n,
                   .equal = true,
                   .steps = 1,
                   .give = give_all,
                   .get = reduce_all,
                   .in = in,
                   .out = out,
                   .count = count,
                   .size = lm_dtype_size(d) };

    if (n * x.size <= SMALL && n * x.size <= m->own->head->piece)
        return run_steps(&x, e);
    for (size_t r = 0; r < ranks; r++)
        count[r] = n / ranks + (r < n % ranks);
    x.piece = piece_for_each(m, x.size);
    x.steps = 2 * steps_of(largest(count, c->size), x.piece) + 2;
    x.give = give_operand_or_result;
    x.get = get_operand_or_result;
    return run_steps(&x, e);
}

/* ---- movements ---- */

static void give_own(exchange *x, size_t k, char *buffer)
{
    int me = x->m->comm.rank;
    size_t n = in_piece(x, x->count[me], k);
    char *own = x->out + sum_before(x->count, me) + k * x->piece;

    if (!n)
        return;
    memcpy(buffer, x->in + k * x->piece, n);
    if (x->in + k * x->piece != own)
        shm_copy_out(own, buffer, n, x->n);
}

static void get_parts(exchange *x, size_t k)
{
    int me = x->m->comm.rank, size = x->m->comm.size;

    for (int i = 1; i < size; i++) {
        int r = (me + i) % size; /* ranks begin at different ones */
        size_t n = in_piece(x, x->count[r], k);

        if (n)
            shm_copy_out(x->out + sum_before(x->count, r) + k * x->piece, buffer_of(x, r, k), n,
                         x->n);
    }
}

static lm_code gather_parts(lm_comm *c, shm_call call, const void *in, void *out,
                            const size_t *bytes, lm_err *e)
{
    shm_member *m = member_of(c);
    exchange x = { .m = m,
                   .call = call,
                   .n = sum_before(bytes, c->size),
                   .equal = true,
                   .give = give_own,
                   .get = get_parts,
                   .in = in,
                   .out = out,
                   .count = bytes,
                   .piece = m->own->head->piece };

    x.steps = steps_of(largest(bytes, c->size), x.piece);
    return run_steps(&x, e);
}

static lm_code shm_all_gather(lm_comm *c, const void *in, void *out, const size_t *bytes, lm_err *e)
{
    return gather_parts(c, SHM_ALL_GATHER, in, out, bytes, e);
}

static void give_root(exchange *x, size_t k, char *buffer)
{
    size_t n = in_piece(x, x->n, k);

    if (x->m->comm.rank == x->root && n)
        memcpy(buffer, x->out + k * x->piece, n);
}

static void get_root(exchange *x, size_t k)
{
    size_t n = in_piece(x, x->n, k);

    if (x->m->comm.rank != x->root && n)
        shm_copy_out(x->out + k * x->piece, buffer_of(x, x->root, k), n, x->n);
}

static lm_code shm_broadcast(lm_comm *c, void *data, size_t bytes, int root, lm_err *e)
{
    shm_member *m = member_of(c);
    exchange x = { .m = m,
                   .call = SHM_BROADCAST,
                   .n = bytes,
                   .equal = true,
                   .give = give_root,
                   .get = get_root,
                   .out = data,
                   .piece = m->own->head->piece,
                   .root = root };

    x.steps = steps_of(bytes, x.piece);
    return run_steps(&x, e);
}

/* ---- all_to_all ---- */

/* First, the numbers of bytes; the largest of all, on the cards, is that of the steps to come. */
static void give_sizes(exchange *x, size_t k, char *buffer)
{
    (void)k;
    for (int r = 0; r < x->m->comm.size; r++) {
        uint64_t n = x->count[r];

        memcpy(buffer + (size_t)r * sizeof n, &n, sizeof n);
    }
}

static lm_code agree_sizes(exchange *x, lm_err *e)
{
    exchange sizes = *x;
    shm_member *m = x->m;

    sizes.steps = 1;
    sizes.give = give_sizes;
    sizes.get = NULL;
    if (run_steps(&sizes, e))
        return e->code;
    x->most = sizes.most;
    /* The buffers stay as they are until this rank has filled its next one. */
    for (int r = 0; r < m->comm.size; r++) {
        lm_err why = { 0 };
        uint64_t give;

        memcpy(&give, buffer_of(&sizes, r, 0) + (size_t)m->comm.rank * sizeof give, sizeof give);
        if (give == x->take[r])
            continue;
        lm_fail(&why, LM_EBUG, "all_to_all", NULL,
                "rank %d gives %zu bytes to rank %d, which takes %zu", r, (size_t)give,
                m->comm.rank, x->take[r]);
        return fail_here(m, &why, e);
    }
    return LM_OK;
}

static void take_parts(exchange *x, size_t k)
{
    int me = x->m->comm.rank, size = x->m->comm.size;

    for (int i = 1; i < size; i++) {
        int r = (me + i) % size;
        size_t n = in_piece(x, x->take[r], k);

        if (n)
            memcpy(x->out + sum_before(x->take, r) + k * x->piece,
                   buffer_of(x, r, k) + place(x, r, me), n);
    }
}

static lm_code shm_all_to_all(lm_comm *c, const void *in, const size_t *give, void *out,
                              const size_t *take, lm_err *e)
{
    shm_member *m = member_of(c);
    exchange x = { .m = m,
                   .call = SHM_ALL_TO_ALL,
                   .most = largest(give, c->size),
                   .give = give_parts,
                   .get = take_parts,
                   .in = in,
                   .out = out,
                   .count = give,
                   .take = take,
                   .size = 1,
                   .piece = piece_for_each(m, 1) };
    size_t own = give[c->rank];

    if (agree_sizes(&x, e))
        return e->code;
    if (own)
        memcpy((char *)out + sum_before(take, c->rank),
               (const char *)in + sum_before(give, c->rank), own);
    x.steps = steps_of(x.most, x.piece);
    return run_steps(&x, e);
}

/* ---- messages ---- */

static lm_code shm_send(lm_comm *c, int to, const void *data, size_t bytes, lm_err *e)
{
    shm_member *m = member_of(c);
    shm_pair *p = shm_pair_at(m->own, c->rank, to);
    size_t ring = m->own->head->ring, at = 0;
    uint32_t k = atomic_load(&p->put.value);
    shm_rank *me = shm_rank_at(m->own, c->rank);
    lm_code rc = shm_state(m, e);

    atomic_store(&me->call, SHM_SEND);
    for (bool more = true; more && !rc; more = at < bytes, k++) {
        size_t n = bytes - at < ring ? bytes - at : ring;
        shm_card *card = shm_ring(m->own, c->rank, to, k);

        rc = shm_wait(m, &p->took, k - (SHM_RING - 1), to, SHM_SEND, e);
        if (rc)
            break;
        card->n = bytes;
        if (n)
            memcpy(card + 1, (const char *)data + at, n);
        at += n;
        shm_set(&p->put, k + 1);
    }
    rc = rc ? rc : shm_wait(m, &p->took, k, to, SHM_SEND, e);
    atomic_store(&me->call, SHM_NO_CALL);
    return rc;
}

static lm_code shm_recv(lm_comm *c, int from, void *data, size_t bytes, lm_err *e)
{
    shm_member *m = member_of(c);
    shm_pair *p = shm_pair_at(m->own, from, c->rank);
    size_t ring = m->own->head->ring, at = 0;
    uint32_t k = atomic_load(&p->took.value);
    shm_rank *me = shm_rank_at(m->own, c->rank);
    lm_code rc = shm_state(m, e);

    atomic_store(&me->call, SHM_RECV);
    for (bool more = true; more && !rc; more = at < bytes, k++) {
        size_t n = bytes - at < ring ? bytes - at : ring;
        const shm_card *card = shm_ring(m->own, from, c->rank, k);
        lm_err why = { 0 };

        rc = shm_wait(m, &p->put, k + 1, from, SHM_RECV, e);
        if (rc)
            break;
        if (card->n != bytes) {
            lm_fail(&why, LM_EBUG, "recv", NULL,
                    "rank %d sends %zu bytes to rank %d, which takes %zu", from, (size_t)card->n,
                    c->rank, bytes);
            rc = fail_here(m, &why, e);
            break;
        }
        if (n)
            shm_copy_out((char *)data + at, card + 1, n, bytes);
        at += n;
        shm_set(&p->took, k + 1);
    }
    atomic_store(&me->call, SHM_NO_CALL);
    return rc;
}

/* ---- groups ---- */

/* What a rank says of a split: first its wish, then the segment that it has made for its color. */
typedef struct {
    int color, key, name;
    lm_shm_name segment;
} wish;

/* Ranks of this color by key, then rank. */
static int sort_color(const wish *all, int size, int color, int order[])
{
    int n = 0;

    for (int r = 0; r < size; r++) {
        int at = n;

        if (all[r].color != color)
            continue;
        for (; at > 0 && all[order[at - 1]].key > all[r].key; at--)
            order[at] = order[at - 1];
        order[at] = r;
        n++;
    }
    return n;
}

static lm_code gather_wishes(lm_comm *c, const wish *mine, wish *all, lm_err *e)
{
    size_t bytes[LM_SHM_RANKS];

    for (int r = 0; r < c->size; r++)
        bytes[r] = sizeof *all;
    return gather_parts(c, SHM_SPLIT, mine, all, bytes, e);
}

/* A member may end before it joins. */
static void name_members(const shm_member *m, const int *order, int n, lm_shm *segment)
{
    for (int i = 0; i < n; i++) {
        const shm_rank *from = shm_rank_at(m->own, order[i]);
        shm_rank *to = shm_rank_at(segment, i);

        to->pid = from->pid;
        to->start = from->start;
        to->name = from->name;
        atomic_store(&to->known, 1);
    }
}

/* The first rank of a color makes the segment, and holds it until all have found it.  A rank that cannot find it fails the
 * world, so the others do not wait in vain. */
static lm_code make_group(shm_member *m, wish *mine, wish *all, lm_shm **segment, int *rank,
                          lm_err *e)
{
    const shm_head *h = m->own->head;
    int order[LM_SHM_RANKS], n = sort_color(all, m->comm.size, mine->color, order);
    lm_err why = { 0 };

    for (*rank = 0; *rank < n && order[*rank] != m->comm.rank;)
        ++*rank;
    if (mine->color >= 0 && *rank == 0) {
        if (lm_shm_new(n, m->world->head->timeout, h->piece, segment, e))
            return fail_here(m, e, e);
        name_members(m, order, n, *segment);
        mine->segment = lm_shm_name_of(*segment);
    }
    if (gather_wishes(&m->comm, mine, all, e))
        return e->code;
    if (mine->color >= 0 && *rank > 0 && lm_shm_find(&all[order[0]].segment, segment, &why))
        return shm_check_peer(m, order[0], SHM_SPLIT, e) ? e->code : fail_here(m, &why, e);
    return shm_barrier(&m->comm, e);
}

static lm_code shm_split(lm_comm *c, int color, int key, lm_comm **out, lm_err *e)
{
    shm_member *m = member_of(c);
    wish mine = { .color = color < 0 ? -1 : color,
                  .key = key,
                  .name = shm_rank_at(m->own, c->rank)->name },
         *all = NULL;
    lm_shm *segment = NULL;
    int rank = 0;

    if (lm_alloc_n(&all, (size_t)c->size, sizeof *all, "a group of ranks", e))
        return e->code;
    if (!gather_wishes(c, &mine, all, e) && !make_group(m, &mine, all, &segment, &rank, e) &&
        segment && shm_join(segment, m->world, rank, mine.name, out, e))
        fail_here(m, e, e);
    lm_shm_drop(segment);
    lm_free(all);
    return e->code;
}

static bool shm_reports(lm_comm *c)
{
    return !atomic_exchange(&member_of(c)->world->head->reported, 1);
}

static void shm_free(lm_comm *c)
{
    shm_member *m = member_of(c);
    lm_shm *own = m->own, *world = m->world;

    lm_free(m);
    lm_shm_drop(own);
    if (world != own)
        lm_shm_drop(world);
}

const lm_transport shm_transport = {
    .name = "shm",
    .barrier = shm_barrier,
    .all_reduce = shm_all_reduce,
    .reduce_scatter = shm_reduce_scatter,
    .all_gather = shm_all_gather,
    .all_to_all = shm_all_to_all,
    .broadcast = shm_broadcast,
    .send = shm_send,
    .recv = shm_recv,
    .split = shm_split,
    .abort = shm_abort,
    .look = shm_look,
    .reports = shm_reports,
    .free = shm_free,
};
