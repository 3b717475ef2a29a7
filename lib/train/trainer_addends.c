/* SPDX-License-Identifier: Apache-2.0 */
/* trainer_addends.c -- gradients that are sums of two: of a tied embedding and head, which the first and the last stage of a
 * pipeline have.
 *
 * Each is summed over the micro-batches of a leaf by itself, and then both are added: an order that does not depend on stages
 * and schedules, and that one rank with all layers can have, too (lm_build.apart). */
#include <string.h>

#include "base/mem.h"
#include "train/trainer_impl.h"

static const lm_addends *addends_of(const lm_trainer *t)
{
    return &t->program->train->addends;
}

/* The gradient of a parameter in the block, and its elements. */
static float *in_block(const lm_trainer *t, lm_vid grad, int64_t *count)
{
    const lm_model *m = t->program->train;
    int i = 0;
    while (m->grad[i] != grad)
        i++;
    *count = m->param[i].count;
    return (float *)lm_store_flat(t->s.store, LM_KEPT_GRAD, 0) + m->param[i].offset;
}

/* True if a later stage of this rank has its addend in the block. */
static bool has_later(const lm_addends *l, size_t i)
{
    return i % 2 == 1 && l->of[i - 1].own >= 0;
}

static float *addend_at(const lm_trainer *t, size_t i, int64_t *count)
{
    float *at = in_block(t, addends_of(t)->of[i].grad, count);
    return t->apart[i] ? t->apart[i] : at;
}

/* More stages would need all sums in one order. */
static lm_code check_pairs(const lm_addends *l, lm_err *e)
{
    bool pairs = l->n % 2 == 0;
    for (size_t i = 0; pairs && i < l->n; i += 2)
        pairs = l->of[i].grad == l->of[i + 1].grad &&
                (i + 2 == l->n || l->of[i + 2].grad != l->of[i].grad);
    return pairs ? LM_OK
                 : lm_fail(e, LM_EUSAGE, "pp", "use fewer stages, or dp or tp",
                           "more than two stages add to one gradient");
}

lm_code trainer_addends_new(lm_trainer *t, lm_err *e)
{
    const lm_addends *l = addends_of(t);
    if (!l->n)
        return LM_OK;
    if (t->o.pipe && t->io.adapt)
        return lm_fail(e, LM_EUSAGE, "pp", "use dp",
                       "this adapter has a tensor that several stages share");
    if (!t->b->host_memory)
        return lm_fail(e, LM_EUSAGE, t->b->name, "use the cpu, or ranks along other axes",
                       "does not add up the gradients of a tied embedding of two stages");
    if (check_pairs(l, e) || lm_alloc_n(&t->apart, l->n, sizeof *t->apart, "gradients", e))
        return e->code;
    for (size_t i = 0; i < l->n; i++) {
        const lm_addend *x = &l->of[i], *other = &l->of[i ^ 1];
        const bool own = x->own >= 0;
        int64_t count;
        if (!own && other->own < 0)
            continue;
        float *at = in_block(t, x->grad, &count);
        if ((own ? has_later(l, i) : true) &&
            lm_alloc_n(&t->apart[i], (size_t)count, sizeof **t->apart,
                       "gradients of a tied embedding", e))
            return e->code;
        if (own)
            lm_exec_bind(t->program->exec, x->own, t->apart[i] ? t->apart[i] : at);
    }
    return LM_OK;
}

void trainer_addends_fini(lm_trainer *t)
{
    for (size_t i = 0; t->apart && i < addends_of(t)->n; i++)
        lm_free(t->apart[i]);
    lm_free(t->apart);
    t->apart = NULL;
}

/* The last stage's nodes replace what was there; those of others add to it, as on one rank they add to the last one's. */
void trainer_addends_clear(lm_trainer *t)
{
    const lm_addends *l = addends_of(t);
    int64_t count;
    for (size_t i = 0; i < l->n; i++)
        if (l->of[i].own >= 0 && l->of[i].own != l->of[i].grad) {
            float *at = addend_at(t, i, &count);
            memset(at, 0, (size_t)count * sizeof *at);
        }
}

typedef struct {
    float *to;
    const float *from;
} sum_job;

static void sum_range(void *ctx, int64_t begin, int64_t end, int worker)
{
    const sum_job *j = ctx;
    (void)worker;
    for (int64_t i = begin; i < end; i++)
        j->to[i] += j->from[i];
}

static void add(lm_trainer *t, float *to, const float *from, int64_t n)
{
    sum_job j = { to, from };
    lm_par_for(t->b->par, n, 1 << 16, sum_range, &j);
}

/* Those of two ranks: either gets the other's. */
static lm_code swap(lm_trainer *t, int peer, bool first, float *mine, float *others, size_t bytes,
                    lm_err *e)
{
    lm_comm *c = t->along[LM_AXIS_PP];
    return (first && lm_comm_send(c, peer, mine, bytes, e)) ||
                   lm_comm_recv(c, peer, others, bytes, e) ||
                   (!first && lm_comm_send(c, peer, mine, bytes, e))
               ? e->code
               : LM_OK;
}

/* The way in which this rank has a stage; 0 also of one rank with all layers. */
static int way_of(const lm_trainer *t, int stage)
{
    const lm_train_pipe *is = t->o.pipe;
    return is && is->ways == 2 && is->rank[1][stage] == t->o.mesh.rank[LM_AXIS_PP];
}

/* The rank that has stage `other` in the way in which this one has `own`. */
static int rank_of_other(const lm_trainer *t, int own, int other)
{
    return t->o.pipe->rank[way_of(t, own)][other];
}

enum { PIECE = 1 << 16 }; /* elements */

/* What two ranks have changes places, in pieces. */
static lm_code exchange(lm_trainer *t, int peer, float *x, int64_t count, lm_err *e)
{
    const bool first = t->o.mesh.rank[LM_AXIS_PP] < peer;
    float *piece = NULL;
    if (lm_alloc_n(&piece, PIECE, sizeof *piece, "gradients of a tied embedding", e))
        return e->code;
    for (int64_t at = 0; at < count && !e->code; at += PIECE) {
        const size_t bytes = (size_t)(count - at < PIECE ? count - at : PIECE) * sizeof *x;
        if (!swap(t, peer, first, x + at, piece, bytes, e))
            memcpy(x + at, piece, bytes);
    }
    lm_free(piece);
    return e->code;
}

/* The addends i and i + 1, of which this rank has one or both: both ranks end with their sum.  With two ways, those of one
 * that has both are of different ones, as are its twin's: each gives the one that the other lacks. */
static lm_code join(lm_trainer *t, size_t i, lm_err *e)
{
    const lm_addend *a = &addends_of(t)->of[i], *b = a + 1;
    const bool first = a->own >= 0;
    int64_t count;
    if (!first && b->own < 0)
        return LM_OK;
    float *mine = addend_at(t, first ? i : i + 1, &count);
    if (first && b->own >= 0) {
        float *beside = addend_at(t, i + 1, &count);
        if (way_of(t, a->stage) != way_of(t, b->stage) &&
            exchange(t, rank_of_other(t, a->stage, b->stage), beside, count, e))
            return e->code;
        add(t, mine, beside, count);
        return LM_OK;
    }
    float *others = t->apart[first ? i + 1 : i];
    if (swap(t, rank_of_other(t, first ? a->stage : b->stage, first ? b->stage : a->stage), first,
             mine, others, (size_t)count * sizeof *mine, e))
        return e->code;
    add(t, mine, others, count);
    return LM_OK;
}

lm_code trainer_addends_join(lm_trainer *t, lm_err *e)
{
    for (size_t i = 0; i < addends_of(t)->n; i += 2)
        if (join(t, i, e))
            return e->code;
    return LM_OK;
}
