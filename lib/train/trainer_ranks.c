/* SPDX-License-Identifier: Apache-2.0 */
/* trainer_ranks.c -- ranks that share the micro-batches of a step, and the leaves of its sums.
 *
 * All ranks hold the same weights and states: they start with those of rank 0, add up the same gradients in the same order,
 * and their optimisers then compute the same bits.  So only sums travel: counts before the first backward, gradients and
 * losses behind the last one, and the flags of trainer_ask.  Ranks that share the update (trainer_share.c) compute each a part
 * of it, with the same bits. */
#include <inttypes.h>
#include <stddef.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "graph/links.h"
#include "train/trainer_impl.h"

bool lm_ranks_fit(int64_t ranks, int64_t accumulate, int64_t leaves)
{
    if (ranks < 1 || leaves < 1 || accumulate % leaves || leaves % ranks)
        return false;
    const int64_t own = leaves / ranks;
    return ranks == 1 || (own & (own - 1)) == 0;
}

bool lm_trainer_ranks_fit(const lm_trainer_opts *o, int64_t ranks, int64_t leaves)
{
    return lm_ranks_fit(ranks, o->objective ? leaves : o->accumulate, leaves);
}

const char *lm_trainer_host_axis(const lm_mesh *mesh)
{
    if (lm_mesh_along(mesh, LM_AXIS_CP) > 1 && mesh->context != LM_CONTEXT_HEADS)
        return lm_context_names[mesh->context];
    return lm_mesh_along(mesh, LM_AXIS_EP) > 1 ? lm_axis_names[LM_AXIS_EP] : NULL;
}

/* The ranks along an axis; *out is NULL if there is one. */
static lm_code split_along(lm_trainer *t, lm_axis axis, lm_comm **out, lm_err *e)
{
    const lm_mesh *mesh = &t->o.mesh;
    if (lm_mesh_along(mesh, axis) == 1)
        return LM_OK;
    return lm_comm_split(t->io.comm, lm_mesh_color(mesh, axis), mesh->rank[axis], out, e);
}

/* What is computed of an adapter's tensors after a step needs all of them. */
static lm_code check_adapter(const lm_trainer *t, const char *axis, lm_err *e)
{
    return t->io.after || t->o.beside
               ? lm_fail(e, LM_EUSAGE, axis, t->o.zero ? "use level 0" : "use dp",
                         "this method computes with all tensors of an adapter after each step")
               : LM_OK;
}

lm_code trainer_ranks_check(const lm_trainer *t, lm_err *e)
{
    const lm_trainer_opts *o = &t->o;
    const bool staged = lm_mesh_along(&o->mesh, LM_AXIS_PP) > 1;
    const char *axis = staged ? "pp" : lm_mesh_first_inner(&o->mesh);
    if (!axis && o->zero && t->ranks > 1)
        axis = "zero";
    if (!axis)
        return LM_OK;
    const char *hosted = o->zero ? "zero" : lm_trainer_host_axis(&o->mesh);
    if (!t->b->host_memory && hosted)
        return lm_fail(e, LM_EUSAGE, hosted, "use dp, tp and cp by heads, or the cpu",
                       "ranks share these on processors only, not on %s", t->b->name);
    if (!t->b->host_memory && staged && o->pipe && o->pipe->ways > 1)
        return lm_fail(e, LM_EUSAGE, "schedule", "use another one, or the cpu",
                       "copies of a stage are added up on processors only, not on %s", t->b->name);
    if (staged && !o->pipe)
        return lm_fail(e, LM_EBUG, axis, NULL, "has no stages");
    if (t->io.objective || (o->build.codes && (staged || lm_mesh_inner(&o->mesh) > 1)))
        return lm_fail(e, LM_EUSAGE, axis, o->zero ? "use level 0" : "use dp",
                       "ranks share the weights of whole models only");
    if (check_adapter(t, axis, e))
        return e->code;
    return t->io.checkpoint.lmz
               ? lm_fail(e, LM_EUSAGE, axis, "write folders, and compress them later",
                         "compressed checkpoints hold whole tensors of one rank")
               : LM_OK;
}

/* While the host waits for the device: the others may have failed, or one may not have come. */
static lm_code watch(void *ctx, double waited, lm_err *e)
{
    lm_trainer *t = ctx;
    if (lm_comm_look(t->io.comm, e) || t->patience <= 0 || waited <= t->patience)
        return e->code;
    return lm_fail(e, LM_EIO, t->b->name, "see what the others do",
                   "rank %d of %d has waited %g s for exchanges of step %" PRId64,
                   lm_comm_rank(t->io.comm), lm_comm_size(t->io.comm), waited, t->s.step + 1);
}

static lm_code make_sums(lm_trainer *t, lm_err *e)
{
    if (!t->io.comm)
        return LM_OK;
    t->b->watch = watch;
    t->b->watch_ctx = t;
    return t->along[LM_AXIS_DP] &&
                   (t->b->stream_new(t->b, &t->summing, e) ||
                    lm_links_new(t->b, t->along[LM_AXIS_DP], t->summing, &t->sums, e))
               ? e->code
               : LM_OK;
}

static void see_gather(void *ctx, double began, double ended, double waiting)
{
    trainer_trace_exchange(ctx, TRACE_AHEAD, "weights", began, ended, waiting);
}

/* Beside the thread that adds up gradients. */
static lm_code make_gatherer(lm_trainer *t, lm_err *e)
{
    const lm_mesh *mesh = &t->o.mesh;
    if (t->o.zero < 3 || !t->along[LM_AXIS_DP] || !t->b->host_memory)
        return LM_OK;
    if (lm_comm_split(t->io.comm, lm_mesh_color(mesh, LM_AXIS_DP), mesh->rank[LM_AXIS_DP],
                      &t->gathering, e) ||
        lm_gatherer_new(t->gathering, &t->gatherer, e))
        return e->code;
    lm_gatherer_watch(t->gatherer, see_gather, t);
    lm_links_gather(t->link[LM_AXIS_DP], t->gatherer);
    return LM_OK;
}

static lm_code find_ranks(lm_trainer *t, lm_err *e)
{
    lm_mesh *mesh = &t->o.mesh;
    const int64_t all = lm_mesh_ranks(mesh);
    const int there = t->io.comm ? lm_comm_size(t->io.comm) : 1;
    if (there != all)
        return lm_fail(e, LM_EBUG, "ranks", NULL, "%d of %" PRId64, there, all);
    if (lm_trainer_place(&t->o, t->io.config, t->io.comm ? lm_comm_rank(t->io.comm) : 0, e))
        return e->code;
    t->rank = mesh->rank[LM_AXIS_DP];
    t->ranks = mesh->size[LM_AXIS_DP];
    t->leads = !t->io.comm || lm_comm_rank(t->io.comm) == 0;
    t->is_shared = lm_mesh_inner(mesh) > 1 || lm_mesh_along(mesh, LM_AXIS_PP) > 1 ||
                   (t->o.zero && t->ranks > 1);
    for (int i = 0; i < LM_AXES; i++) {
        if (split_along(t, (lm_axis)i, &t->along[i], e))
            return e->code;
        if (t->along[i] && (i != LM_AXIS_DP || t->o.zero) &&
            lm_links_new(t->b, t->along[i], NULL, &t->link[i], e))
            return e->code;
    }
    if (t->is_shared)
        t->b->links = t->link;
    if (t->along[LM_AXIS_CP] && mesh->context != LM_CONTEXT_HEADS) {
        if (lm_ring_new(t->along[LM_AXIS_CP], &t->ring, e))
            return e->code;
        lm_ring_join(t->ring, t->link[LM_AXIS_CP]);
    }
    if (make_sums(t, e) || make_gatherer(t, e))
        return e->code;
    return lm_alloc_n(&t->parts_of_ranks, (size_t)t->ranks, sizeof *t->parts_of_ranks,
                      "parts of ranks", e);
}

/* Each way through stages has a part of the micro-batches, as each rank along dp has. */
static int ways_of(const lm_trainer *t)
{
    return t->o.pipe ? t->o.pipe->ways : 1;
}

lm_code trainer_ranks_set(lm_trainer *t, lm_err *e)
{
    lm_trainer_opts *o = &t->o;
    if (find_ranks(t, e))
        return e->code;
    o->leaves = o->leaves > 0 ? o->leaves : t->ranks * ways_of(t);
    if (trainer_ranks_check(t, e))
        return e->code;
    if (!lm_trainer_ranks_fit(o, t->ranks * ways_of(t), o->leaves))
        return lm_fail(e, LM_EUSAGE, "ranks", NULL,
                       "%d do not fit steps of %" PRId64 " micro-batches in %" PRId64 " leaves",
                       t->ranks, o->accumulate, o->leaves);
    t->micros = o->accumulate / t->ranks;
    t->first = t->micros * t->rank;
    return LM_OK;
}

/* ---- communication ---- */

/* `rc`: of calls since `began`. */
static lm_code waited(lm_trainer *t, const char *what, double began, lm_code rc)
{
    if (t->tracing)
        lm_trace_span(t->trace, TRACE_COMM, what, began, lm_now());
    return rc;
}

rank_use trainer_ranks_used(const lm_trainer *t)
{
    rank_use sum = { .seconds = t->io.comm ? lm_comm_used(t->io.comm).seconds : 0 };
    for (int i = 0; i < LM_AXES; i++)
        if (t->along[i]) {
            const lm_comm_use use = lm_comm_used(t->along[i]);
            sum.seconds += use.seconds;
            sum.bytes[i] = use.bytes;
        }
    if (t->ring) {
        const lm_comm_use use = lm_ring_used(t->ring);
        sum.seconds += use.seconds;
        sum.bytes[LM_AXIS_CP] += use.bytes;
    }
    trainer_pipe_use(t, &sum);
    sum.bytes[LM_AXIS_DP] += t->summed;
    sum.seconds -= trainer_ahead_hidden(t);
    if (t->gatherer) {
        const lm_comm_use use = lm_comm_used(t->gathering);
        sum.seconds += use.seconds - lm_gatherer_hidden(t->gatherer);
        sum.bytes[LM_AXIS_DP] += use.bytes;
    }
    return sum;
}

lm_code trainer_ranks_meet(lm_trainer *t, lm_err *e)
{
    return t->io.comm ? lm_comm_barrier(t->io.comm, e) : LM_OK;
}

static lm_code reduce(lm_trainer *t, lm_comm *c, const char *what, void *x, size_t n, lm_dtype type,
                      lm_comm_op op, lm_err *e)
{
    const double began = lm_now();
    return c ? waited(t, what, began, lm_comm_all_reduce(c, x, x, n, type, op, e)) : LM_OK;
}

lm_code trainer_ranks_count(lm_trainer *t, double *n, size_t count, lm_err *e)
{
    return reduce(t, t->along[LM_AXIS_DP], "counts", n, count, LM_DTYPE_F64, LM_COMM_SUM, e);
}

lm_code trainer_ranks_total(lm_trainer *t, double *n, lm_err *e)
{
    return reduce(t, t->io.comm, "bytes", n, 1, LM_DTYPE_F64, LM_COMM_SUM, e);
}

lm_code trainer_ranks_agree(lm_trainer *t, int32_t *flag, size_t count, lm_err *e)
{
    return reduce(t, t->io.comm, "flags", flag, count, LM_DTYPE_I32, LM_COMM_MAX, e);
}

static void set_patience(lm_trainer *t, double seconds)
{
    if (t->io.comm)
        lm_comm_patience(t->io.comm, seconds);
    for (int i = 0; i < LM_AXES; i++)
        if (t->along[i])
            lm_comm_patience(t->along[i], seconds);
    if (t->ring)
        lm_ring_patience(t->ring, seconds);
    if (t->gathering)
        lm_comm_patience(t->gathering, seconds);
    trainer_pipe_patience(t, seconds);
}

void trainer_ranks_pause(lm_trainer *t)
{
    if (!t->leads)
        set_patience(t, 0);
}

/* As in a step, the others may take several times as long, and disks longer. */
void trainer_ranks_pause_all(lm_trainer *t, double seconds)
{
    trainer_ranks_pause(t);
    if (t->leads && t->patience > 0 && t->patience < 60 + 10 * seconds)
        lm_comm_patience(t->io.comm, 60 + 10 * seconds);
}

void trainer_ranks_patient(lm_trainer *t, bool on)
{
    set_patience(t, on ? 0 : t->patience);
}

lm_code trainer_ranks_go_on(lm_trainer *t, lm_err *e)
{
    if (trainer_ranks_meet(t, e))
        return e->code;
    set_patience(t, t->patience);
    return LM_OK;
}

void trainer_ranks_pace(lm_trainer *t, double seconds)
{
    if (!t->io.comm || !strcmp(lm_comm_transport(t->io.comm), "threads"))
        return; /* a thread does not vanish, and one that waits for a slow reader of metrics has not failed */
    t->patience = 30 + 10 * seconds;
    set_patience(t, t->patience);
}

void trainer_ranks_abort(lm_trainer *t, const lm_err *why)
{
    if (t->io.comm)
        lm_comm_abort(t->io.comm, why);
}

/* rows: losses of this rank's batch; those of valid targets to `out`. */
static int64_t pick_valid(const lm_batch *b, const float *rows, float *out)
{
    int64_t n = 0;
    for (int64_t i = 0; rows && i < b->batch * b->seq; i++)
        if (b->targets[i] >= 0)
            out[n++] = rows[i];
    return n;
}

/* Rank by rank through one buffer. */
lm_code trainer_ranks_evaluated(lm_trainer *t, const float *rows, lm_eval_sum *sum, lm_err *e)
{
    lm_comm *c = t->along[LM_AXIS_DP];
    for (int r = 0; t->losses && r < t->ranks; r++) {
        int64_t n = r == t->rank ? pick_valid(&t->eval.batch, rows, t->losses) : 0;
        if (lm_comm_broadcast(c, &n, sizeof n, r, e) ||
            (n && lm_comm_broadcast(c, t->losses, (size_t)n * sizeof *t->losses, r, e)))
            return e->code;
        for (int64_t i = 0; i < n; i++)
            sum->nll += t->losses[i];
        sum->tokens += n;
    }
    return LM_OK;
}

/* ---- loading ---- */

/* Through memory of the host, piece by piece. */
static lm_code receive_device(lm_trainer *t, char *data, size_t bytes, lm_err *e)
{
    enum { PIECE = 16 << 20 };
    lm_backend *b = t->b;
    void *piece = NULL;
    if (b->host_alloc(b, PIECE, "weights of the first rank", &piece, e))
        return e->code;
    for (size_t at = 0; at < bytes && !e->code; at += PIECE) {
        const size_t n = bytes - at < PIECE ? bytes - at : PIECE;
        if ((t->leads && (b->copy(b, piece, data + at, n, NULL, e) || b->sync(b, b->main, e))) ||
            lm_comm_broadcast(t->io.comm, piece, n, 0, e) || t->leads)
            continue;
        if (!b->copy(b, data + at, piece, n, NULL, e))
            b->sync(b, b->main, e);
    }
    b->host_free(b, piece, PIECE);
    return e->code;
}

static lm_code receive_blocks(lm_trainer *t, lm_kept role, lm_err *e)
{
    const lm_store_block *k;
    for (int i = 0; (k = lm_store_find(t->s.store, role, i)); i++)
        if (t->b->host_memory ? lm_comm_broadcast(t->io.comm, k->data, k->bytes, 0, e)
                              : receive_device(t, k->data, k->bytes, e))
            return e->code;
    return LM_OK;
}

/* The numbers of a state without what belongs to this rank. */
static lm_code receive_numbers(lm_trainer *t, lm_err *e)
{
    lm_train_state own = t->s, *s = &t->s;
    lm_code rc = lm_comm_broadcast(t->io.comm, s, sizeof *s, 0, e);
    s->model = own.model;
    s->optimizer = own.optimizer;
    s->backend = own.backend;
    s->store = own.store;
    s->objective = own.objective;
    s->resumed = own.resumed;
    return rc;
}

/* The states of a fresh run follow from the weights; beside an adapter, weights that are read in the file are in no block. */
static lm_code receive_whole(lm_trainer *t, lm_err *e)
{
    return receive_blocks(t, LM_KEPT_PARAM, e) || receive_blocks(t, LM_KEPT_FROZEN, e) ||
                   (t->io.resume && (receive_blocks(t, LM_KEPT_OPT, e) || receive_numbers(t, e)))
               ? e->code
               : LM_OK;
}

/* Each rank takes its part of what rank 0 reads, while it reads. */
static lm_code load_parts(lm_trainer *t, lm_code (*load)(lm_trainer *, lm_err *), lm_err *e)
{
    lm_store *s = t->s.store;
    if (!t->leads)
        return lm_store_receive(s, t->io.comm, e) || (t->io.resume && receive_numbers(t, e))
                   ? e->code
                   : LM_OK;
    return lm_store_share(s, t->io.comm, e) || load(t, e) || lm_store_share(s, NULL, e) ||
                   (t->io.resume && receive_numbers(t, e))
               ? e->code
               : LM_OK;
}

lm_code trainer_ranks_load(lm_trainer *t, lm_code (*load)(lm_trainer *, lm_err *), lm_err *e)
{
    t->s.store->owners = trainer_shares(t) ? t->along[LM_AXIS_DP] : NULL;
    if (t->is_shared)
        return load_parts(t, load, e);
    return ((t->leads || t->io.weights) && load(t, e)) || (t->io.comm && receive_whole(t, e))
               ? e->code
               : LM_OK;
}

lm_code trainer_ranks_kept(lm_trainer *t, lm_err *e)
{
    lm_comm *c = t->io.comm;
    return c && (lm_comm_broadcast(c, &t->saved, sizeof t->saved, 0, e) ||
                 lm_comm_broadcast(c, &t->s.best_step, sizeof t->s.best_step, 0, e) ||
                 lm_comm_broadcast(c, &t->s.best_val, sizeof t->s.best_val, 0, e))
               ? e->code
               : LM_OK;
}

/* ---- sums ---- */

static lm_code make_leaves(lm_trainer *t, lm_err *e)
{
    const int64_t own = t->o.leaves / t->ranks / ways_of(t);
    if (own <= 1)
        return LM_OK;
    const lm_leaf_block block[LM_LEAF_BLOCKS] = {
        { "gradients of leaves", LM_DTYPE_F32, lm_store_find(t->s.store, LM_KEPT_GRAD, 0)->count,
          lm_store_flat(t->s.store, LM_KEPT_GRAD, 0) },
        { "losses of leaves", LM_DTYPE_F64, TRAINER_SUMS, t->numbers.dev },
        { "loads of leaves", LM_DTYPE_F32, (int64_t)(t->routed.bytes / sizeof(float)),
          t->routed.dev },
    };
    return lm_leaves_new(t->b, block, own, &t->leaves, e);
}

lm_code trainer_ranks_ready(lm_trainer *t, lm_err *e)
{
    const size_t rows = (size_t)(t->o.batch * t->o.seq);
    if (t->along[LM_AXIS_DP] && t->val_feed &&
        lm_alloc_n(&t->losses, rows, sizeof *t->losses, "losses of validation", e))
        return e->code;
    return trainer_addends_new(t, e) || make_leaves(t, e) || trainer_pipe_new(t, e) ||
                   trainer_ahead_new(t, e)
               ? e->code
               : LM_OK;
}

void trainer_ranks_leave(lm_trainer *t)
{
    if (t->is_shared)
        t->b->links = NULL;
    lm_ring_free(t->ring);
    t->ring = NULL;
    t->b->watch = NULL;
    lm_links_free(t->b, t->sums);
    t->b->stream_free(t->b, t->summing);
    t->sums = NULL;
    t->summing = NULL;
    lm_gatherer_free(t->gatherer);
    lm_comm_free(t->gathering);
    t->gatherer = NULL;
    t->gathering = NULL;
    for (int i = 0; i < LM_AXES; i++) {
        lm_links_free(t->b, t->link[i]);
        t->link[i] = NULL;
        lm_comm_free(t->along[i]);
        t->along[i] = NULL;
    }
}

void trainer_ranks_fini(lm_trainer *t)
{
    trainer_ahead_fini(t); /* its thread uses the groups */
    lm_free(t->losses);
    lm_free(t->parts_of_ranks);
    lm_leaves_free(t->leaves);
    trainer_pipe_fini(t);
    trainer_addends_fini(t);
    trainer_ranks_leave(t);
}

/* Over the ranks: on a device behind the work of the main stream, which then goes on. */
static lm_code add_ranks(lm_trainer *t, lm_err *e)
{
    lm_links *l = t->sums;
    double *n = t->numbers.dev, began = lm_now();
    float *routed = t->routed.dev;
    if (t->b->follow(t->b, t->summing, t->b->main, e) || trainer_share_reduce(t, e))
        return e->code;
    l->all_reduce(l, n, n, TRAINER_SUMS, LM_DTYPE_F64, LM_EXCHANGE_SUM);
    if (t->routed.bytes)
        l->all_reduce(l, routed, routed, t->routed.bytes / sizeof *routed, LM_DTYPE_F32,
                      LM_EXCHANGE_SUM);
    if (l->failure.code)
        *e = l->failure;
    else
        t->b->follow(t->b, t->b->main, t->summing, e);
    return t->b->host_memory ? waited(t, "gradients", began, e->code) : e->code;
}

lm_code trainer_ranks_leaf(lm_trainer *t, int64_t leaf, const lm_step *step, lm_err *e)
{
    return t->leaves ? lm_leaves_add(t->leaves, leaf, step, e) : LM_OK;
}

lm_code trainer_ranks_sum(lm_trainer *t, lm_err *e)
{
    return t->along[LM_AXIS_DP] ? add_ranks(t, e) : LM_OK;
}

lm_code trainer_ranks_add(lm_trainer *t, int64_t i, const lm_step *step, lm_err *e)
{
    const int64_t leaf = t->o.accumulate / t->o.leaves;
    if ((i + 1) % leaf == 0 && trainer_ranks_leaf(t, i / leaf, step, e))
        return e->code;
    return i + 1 == t->micros ? trainer_ranks_sum(t, e) : LM_OK;
}

lm_code trainer_ranks_clear(lm_trainer *t, lm_err *e)
{
    lm_backend *b = t->b;
    const lm_store_block *g = lm_store_find(t->s.store, LM_KEPT_GRAD, 0);
    return b->zero(b, lm_store_flat(t->s.store, LM_KEPT_GRAD, 0), g->bytes, b->main, e) ||
                   b->zero(b, t->numbers.dev, TRAINER_SUMS * sizeof(double), b->main, e) ||
                   (t->routed.bytes && b->zero(b, t->routed.dev, t->routed.bytes, b->main, e))
               ? e->code
               : LM_OK;
}
