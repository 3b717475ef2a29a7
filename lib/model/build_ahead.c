/* SPDX-License-Identifier: Apache-2.0 */
/* build_ahead.c -- modules that predict tokens further on (DeepSeek-V3, arXiv:2412.19437, section 2.2): their inputs,
 * losses, and the copies that files hold of what they share with the model. */
#include <inttypes.h>
#include <stdio.h>

#include "kernels/arrange.h"
#include "kernels/head.h"
#include "model/arch.h"
#include "model/build.h"
#include "op/ops.h"

bool lm_b_has_ahead(const lm_model *m, int64_t k)
{
    const bool train = m->build.mode == LM_MODE_TRAIN;
    const bool all = train || m->build.ahead == LM_AHEAD_KEPT;
    return m->build.ahead != LM_AHEAD_NONE && !m->config.scores && k < m->config.ahead &&
           (all || k <= m->build.module);
}

int64_t lm_model_losses_ahead(const lm_model *m)
{
    return m->build.mode == LM_MODE_TRAIN && m->build.ahead == LM_AHEAD_RUNS ? m->config.ahead : 0;
}

int lm_model_read(const lm_model *m, lm_vid out[LM_MODEL_READ])
{
    int n = 0;
    out[n++] = m->logits;
    if (m->states >= 0)
        out[n++] = m->states;
    for (int k = 0; k < LM_MOST_AHEAD; k++)
        if (m->ahead_states[k] >= 0)
            out[n++] = m->ahead_states[k];
    return n;
}

static lm_code make_rows(lm_model *m, const char *name, int64_t k, lm_vid *out, lm_err *e)
{
    char text[48];
    snprintf(text, sizeof text, "%s %" PRId64 " ahead", name, k + 1);
    return lm_graph_value(m->graph, LM_ROLE_INPUT,
                          lm_shape1(LM_DTYPE_I32, m->build.batch * m->build.seq), text, out, e);
}

lm_code lm_b_make_ahead(lm_model *m, lm_err *e)
{
    const bool train = m->build.mode == LM_MODE_TRAIN;
    const int64_t n = m->build.batch * m->build.seq;
    const lm_tensor scale = lm_shape1(lm_wide(m->build.precision.low), n);
    /* As all inputs of operators it gets its type with them, low. */
    const lm_tensor states = lm_shape2(LM_DTYPE_F32, n, m->config.width);
    if (m->build.ahead == LM_AHEAD_DRAFTS)
        return lm_graph_value(m->graph, LM_ROLE_INPUT, states, "prior states", &m->prior, e);
    if (m->build.ahead != LM_AHEAD_RUNS)
        return LM_OK;
    for (int64_t k = 0; lm_b_has_ahead(m, k); k++)
        if (make_rows(m, "tokens", k, &m->ahead_tokens[k], e) ||
            (train && make_rows(m, "targets", k, &m->ahead_targets[k], e)))
            return e->code;
    return train ? lm_graph_value(m->graph, LM_ROLE_INPUT, scale, "dahead", &m->dahead, e) : LM_OK;
}

lm_vid lm_b_join(lm_builder *b, lm_vid x, lm_vid y)
{
    const lm_join_attr attr = { .rows = false };
    lm_vid in[LM_JOIN_PARTS] = { x, y };
    for (int i = 2; i < LM_JOIN_PARTS; i++)
        in[i] = LM_NONE;
    return lm_b_append(b, &lm_op_join, &attr, in);
}

void lm_b_ahead_loss(lm_builder *b, int64_t k, lm_vid x, lm_vid w)
{
    lm_model *m = b->m;
    const lm_head_attr attr = { m->config.vocab, 0, LM_ACC_FIRST, m->config.logit_cap };
    const lm_vid in[3] = { x, w, m->ahead_targets[k] };
    lm_vid out[5] = { LM_NONE, LM_NONE, LM_SKIP, LM_SKIP, LM_SKIP };
    if (lm_b_ok(b) && !lm_graph_append(m->graph, &lm_op_head_stats, &attr, in, out, b->e))
        m->ahead_loss[k] = out[0];
}

void lm_b_ahead_copies(lm_builder *b, lm_part part)
{
    const lm_config *c = &b->m->config;
    char name[LM_TENSOR_NAME];
    for (int64_t k = 0; !c->arch->ahead && lm_b_has_ahead(b->m, k); k++)
        lm_b_again(b, "%s", lm_tensor_hf_name(c->arch, part, c->layers + k, false, name));
}
