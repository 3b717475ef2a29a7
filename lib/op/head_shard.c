/* SPDX-License-Identifier: Apache-2.0 */
/* head_shard.c -- the vocabulary head when its words are split over ranks (Megatron-LM, arXiv:1909.08053, section 3).
 *
 * Each rank makes the logits of its words.  Of each row ranks exchange three numbers: the largest of their logarithms of the
 * sum of exp(logit), the sum of these relative to it, and the logit of the target, which one rank has.  Gradients need
 * nothing more: with the logarithm of the whole sum each rank makes those of its words, and addends of those of x. */
#include "kernels/comm.h"

#include "kernels/head.h"
#include "op/formula.h"
#include "op/head_shard.h"
#include "op/ops.h"

bool lm_head_splits(const lm_call *c, char letter)
{
    const lm_head_attr *a = c->attr;
    /* Padding lies behind the last word: which rank has it depends on the number of ranks. */
    return letter != 'V' || a->vocab == c->in[1].dim[0];
}

bool lm_head_stats_splits(const lm_call *c, char letter)
{
    return letter != 'V' ||
           (lm_absent(&c->out[3]) && lm_absent(&c->out[4]) && lm_head_splits(c, letter));
}

static lm_code reduce(lm_shard_call *s, lm_vid v, lm_exchange_op op, lm_vid *out, lm_err *e)
{
    lm_exchange_attr a = { .axis = s->axis, .ranks = s->ranks, .rank = s->rank, .op = op };
    *out = LM_NONE;
    if (lm_graph_value(s->graph, LM_ROLE_ACT, s->graph->value[v].t, NULL, out, e))
        return e->code;
    return lm_graph_append(s->graph, &lm_op_all_reduce, &a, &v, out, e);
}

/* to = the formula of these names; `to` exists. */
static lm_code write(lm_shard_call *s, const char *text, const lm_formula_name *name, int n,
                     lm_err *e)
{
    lm_formula_scope scope = { .name = name, .n_names = n, .numbers = LM_NONE, .gate = LM_NONE };
    return lm_formula_append(s->graph, text, &scope, e);
}

lm_code lm_head_stats_shard(lm_shard_call *s, lm_err *e)
{
    lm_graph *g = s->graph;
    lm_vid loss = s->out[0], lse = s->out[1], logit = s->out[2], real, top, sum, picked;
    lm_vid own[5] = { LM_NONE, LM_NONE, LM_NONE, LM_SKIP, LM_SKIP };
    if (s->letters != LM_LETTER('V'))
        return lm_shard_append(s, e);
    const lm_dtype type = g->value[loss].t.dtype;
    ((lm_head_attr *)s->attr)->vocab = s->range.count;
    if (lm_shard_ids(s, 2, &real, e) || lm_graph_append(g, s->op, s->attr, s->in, own, e) ||
        reduce(s, own[1], LM_EXCHANGE_MAX, &top, e))
        return e->code;
    lm_vid share = LM_NONE, all = LM_NONE;
    const lm_formula_name relative[] = { LM_IS("own", own[1]), LM_IS("top", top),
                                         LM_MAKES_AS("share", &share, type) };
    if (write(s, "share = exp(own - top)", relative, 3, e) ||
        reduce(s, share, LM_EXCHANGE_SUM, &sum, e) ||
        reduce(s, own[2], LM_EXCHANGE_SUM, &picked, e))
        return e->code;
    const lm_formula_name whole[] = { LM_IS("top", top), LM_IS("sum", sum), LM_IS("real", real),
                                      LM_MAKES_AS("all", &all, type) };
    if (write(s, "all = real*(top + log(sum))", whole, 4, e))
        return e->code;
    lm_vid made = LM_NONE;
    const lm_formula_name apart[] = { LM_IS("all", all), LM_IS("picked", picked),
                                      LM_MAKES_AS("made", &made, type) };
    if (write(s, "made = all - picked", apart, 3, e) ||
        lm_graph_append(g, &lm_op_stop, NULL, &made, &loss, e) ||
        (lse >= 0 && lm_graph_append(g, &lm_op_stop, NULL, &all, &lse, e)) ||
        (logit >= 0 && lm_graph_append(g, &lm_op_stop, NULL, &picked, &logit, e)))
        return e->code;
    return LM_OK;
}

lm_code lm_head_grad_shard(lm_shard_call *s, lm_err *e)
{
    if (s->letters == LM_LETTER('V')) {
        ((lm_head_attr *)s->attr)->vocab = s->range.count;
        if (lm_shard_ids(s, 2, NULL, e))
            return e->code;
    }
    return lm_shard_append(s, e);
}
