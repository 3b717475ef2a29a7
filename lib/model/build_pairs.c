/* SPDX-License-Identifier: Apache-2.0 */
/* build_pairs.c -- next-sentence prediction (BERT, arXiv:1810.04805, section 3.1): of the first row of each sequence the
 * pooler makes a row, and a product two logits: that the second text of the pair follows the first, and that it does not. */
#include "kernels/head.h"
#include "kernels/map.h"
#include "model/build.h"
#include "op/ops.h"

/* The first row of each sequence, [B,C]. */
static lm_vid first_rows(lm_builder *b, lm_vid x)
{
    const lm_build *how = &b->m->build;
    const int64_t width = b->m->config.width;
    if (how->batch > 1)
        x = lm_b_seen_as(b, x, how->batch, how->seq * width);
    return lm_b_part_of(b, x, 0, how->batch, width);
}

static lm_vid mean(lm_builder *b, lm_vid x)
{
    const lm_reduce_attr attr = { .kind = LM_REDUCE_SUM, .over = LM_OVER_ALL, .mean = true };
    return lm_b_append(b, &lm_op_reduce, &attr, &x);
}

lm_vid lm_b_first_rows(lm_builder *b, lm_vid x)
{
    lm_model *m = b->m;
    const lm_tensor labels = lm_shape1(LM_DTYPE_I32, m->build.batch);
    if (!lm_b_ok(b) ||
        lm_graph_value(m->graph, LM_ROLE_INPUT, labels, "follows", &m->follows, b->e))
        return LM_NONE;
    return first_rows(b, x);
}

void lm_b_pair_loss(lm_builder *b, lm_vid x, lm_vid w, lm_vid bias)
{
    lm_model *m = b->m;
    const lm_head_attr attr = { 2, 0, LM_ACC_FIRST, 0 };
    const lm_vid in[4] = { x, w, m->follows, bias };
    lm_vid out[5] = { LM_NONE, LM_NONE, LM_SKIP, LM_SKIP, LM_SKIP };
    if (!lm_b_ok(b) || lm_graph_append(m->graph, &lm_op_head_stats, &attr, in, out, b->e))
        return;
    m->aux = mean(b, out[0]);
    if (lm_b_ok(b))
        lm_graph_value(m->graph, LM_ROLE_INPUT, lm_shape1(lm_wide(m->build.precision.low), 1),
                       "daux", &m->daux, b->e);
}
