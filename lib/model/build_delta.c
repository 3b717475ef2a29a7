/* SPDX-License-Identifier: Apache-2.0 */
/* build_delta.c -- layers that mix tokens through a state (Gated DeltaNet, arXiv:2412.06464, as Qwen3-Next has it; linear
 * attention, arXiv:2006.16236, and retention, arXiv:2307.08621), and gates of attention. */
#include <math.h>

#include "kernels/conv.h"
#include "kernels/delta.h"
#include "kernels/gated_norm.h"
#include "kernels/gates.h"
#include "kernels/linear_attention.h"
#include "kv/spec.h"
#include "model/build.h"
#include "op/ops.h"

lm_vid lm_b_split_gate(lm_builder *b, int64_t layer, lm_vid x, lm_vid *gate)
{
    const lm_layer *y = &b->m->config.layer[layer];
    const lm_gate_split_attr attr = { y->heads, y->kv_heads, y->head_dim };
    lm_vid out[LM_MAX_OUT] = { LM_NONE, LM_NONE };
    *gate = LM_NONE;
    if (!lm_b_ok(b) || lm_graph_append(b->m->graph, &lm_op_gate_split, &attr, &x, out, b->e))
        return LM_NONE;
    *gate = out[1];
    return out[0];
}

lm_vid lm_b_gate(lm_builder *b, lm_vid o, lm_vid gate)
{
    return lm_b_weigh(b, o, gate);
}

/* ---- layers with a state ---- */

/* Rows of a step: sequences, and of each the rows; ragged: 0. */
static int64_t rows_of_step(const lm_build *o)
{
    return o->rows ? 0 : o->seq;
}

static int64_t states_of(const lm_build *o)
{
    return o->rows ? o->slots : o->batch;
}

/* Queries, keys and values behind the convolution; *z: gates. */
static lm_vid mix(lm_builder *b, int64_t layer, const lm_delta_parts *p, lm_vid *z)
{
    lm_model *m = b->m;
    const lm_delta_sizes *d = &m->config.layer[layer].delta;
    const int64_t keys = d->key_heads * d->key_dim, values = d->heads * d->value_dim;
    lm_conv_attr attr = { .batch = m->build.batch,
                          .seq = rows_of_step(&m->build),
                          .columns = 2 * keys + 2 * values,
                          .channels = 2 * keys + values,
                          .taps = d->taps,
                          .packed = true,
                          .heads = d->heads,
                          .key_heads = d->key_heads,
                          .key_dim = d->key_dim,
                          .value_dim = d->value_dim };
    lm_vid out[LM_MAX_OUT] = { LM_NONE, LM_NONE };
    if (p->apart) { /* as one key head that has all */
        attr.heads = attr.key_heads = 1;
        attr.key_dim = keys;
        attr.value_dim = values;
    }
    *z = LM_NONE;
    if (m->build.mode != LM_MODE_GENERATE) {
        lm_vid in[3] = { p->qkvz, p->conv, m->lo };
        if (!lm_b_ok(b) || lm_graph_append(m->graph, &lm_op_conv, &attr, in, out, b->e))
            return LM_NONE;
        *z = out[1];
        return out[0];
    }
    lm_tensor tail = lm_shape3(LM_DTYPE_F32, states_of(&m->build), d->taps - 1, attr.channels);
    lm_vid in[7] = { p->qkvz, p->conv, m->used, m->fresh, m->first, m->kind, m->slot };
    out[1] = lm_b_cache(b, layer, LM_CACHE_CONV_TAIL, "conv.tail", tail);
    out[2] = LM_NONE;
    if (!lm_b_ok(b) || lm_graph_append(m->graph, &lm_op_conv_cached, &attr, in, out, b->e))
        return LM_NONE;
    *z = out[2];
    return out[0];
}

/* The delta rule on these, with decays and corrections. */
static lm_vid recall(lm_builder *b, int64_t layer, lm_vid qkv, const lm_vid gates[2])
{
    lm_model *m = b->m;
    const lm_delta_sizes *d = &m->config.layer[layer].delta;
    lm_delta_attr attr = { .batch = m->build.batch,
                           .seq = rows_of_step(&m->build),
                           .heads = d->heads,
                           .key_heads = d->key_heads,
                           .key_dim = d->key_dim,
                           .value_dim = d->value_dim,
                           .scale = 1 / sqrt((double)d->key_dim),
                           .eps = 1e-6 };
    lm_vid out[LM_MAX_OUT] = { LM_NONE, LM_NONE };
    if (m->build.mode != LM_MODE_GENERATE) {
        lm_vid in[4] = { qkv, gates[0], gates[1], m->lo };
        attr.chunks = lm_delta_chunks(attr.seq);
        out[1] = m->build.mode == LM_MODE_TRAIN ? LM_NONE : LM_SKIP;
        if (!lm_b_ok(b) || lm_graph_append(m->graph, &lm_op_delta, &attr, in, out, b->e))
            return LM_NONE;
        return out[0];
    }
    lm_tensor state = { .dtype = LM_DTYPE_F32,
                        .ndim = 4,
                        .dim = { states_of(&m->build), d->heads, d->key_dim, d->value_dim },
                        .kv = m->build.state_codes
                                  ? m->build.state_codes->side[2 * layer + LM_KV_K].format
                                  : NULL };
    lm_vid in[8] = { qkv, gates[0], gates[1], m->used, m->fresh, m->first, m->kind, m->slot };
    out[1] = lm_b_cache(b, layer, LM_CACHE_STATE, "state", state);
    if (!lm_b_ok(b) || lm_graph_append(m->graph, &lm_op_delta_cached, &attr, in, out, b->e))
        return LM_NONE;
    return out[0];
}

lm_vid lm_b_delta(lm_builder *b, int64_t layer, const lm_delta_parts *p)
{
    lm_model *m = b->m;
    const lm_delta_sizes *d = &m->config.layer[layer].delta;
    const lm_delta_gates_attr gates = { d->heads, p->apart ? 1 : d->key_heads, LM_ACC_FIRST };
    const lm_gated_norm_attr norm = { d->heads, d->value_dim, m->config.norm_eps, LM_ACC_FIRST };
    lm_vid z, of[3] = { p->ba, p->a_log, p->dt }, g[LM_MAX_OUT] = { LM_NONE, LM_NONE };
    lm_vid qkv = mix(b, layer, p, &z);
    if (!lm_b_ok(b) || lm_graph_append(m->graph, &lm_op_delta_gates, &gates, of, g, b->e))
        return LM_NONE;
    lm_vid in[3] = { recall(b, layer, qkv, g), z, p->norm };
    return lm_b_append(b, &lm_op_gated_norm, &norm, in);
}

/* ---- linear attention ---- */

/* Heads of rows whose queries and keys are rotated, or not. */
static lm_vid attend(lm_builder *b, int64_t layer, lm_vid qkv)
{
    lm_model *m = b->m;
    const lm_layer *y = &m->config.layer[layer];
    const bool identity = y->linear.feature == LM_FEATURE_IDENTITY;
    lm_linear_attention_attr attr = { .batch = m->build.batch,
                                      .seq = rows_of_step(&m->build),
                                      .heads = y->heads,
                                      .kv_heads = y->kv_heads,
                                      .head_dim = y->head_dim,
                                      .state_rows =
                                          lm_linear_state_rows(y->linear.feature, y->head_dim),
                                      .feature = y->linear.feature,
                                      .decay = y->linear.decay,
                                      .scale = identity ? y->scale : 1,
                                      .eps = 1e-6 };
    lm_vid out[LM_MAX_OUT] = { LM_NONE, LM_NONE };
    if (m->build.mode != LM_MODE_GENERATE) {
        lm_vid in[2] = { qkv, m->lo };
        return lm_b_append(b, &lm_op_linear_attention, &attr, in);
    }
    lm_tensor state = { .dtype = LM_DTYPE_F32,
                        .ndim = 4,
                        .dim = { states_of(&m->build), y->kv_heads, attr.state_rows,
                                 y->head_dim } };
    lm_vid in[6] = { qkv, m->used, m->fresh, m->first, m->kind, m->slot };
    out[1] = lm_b_cache(b, layer, LM_CACHE_STATE, "state", state);
    if (!lm_b_ok(b) ||
        lm_graph_append(m->graph, &lm_op_linear_attention_cached, &attr, in, out, b->e))
        return LM_NONE;
    return out[0];
}

lm_vid lm_b_linear_attention(lm_builder *b, int64_t layer, lm_vid qkv, lm_vid gate, lm_vid norm)
{
    const lm_config *c = &b->m->config;
    const lm_layer *y = &c->layer[layer];
    const lm_gated_norm_attr attr = { y->heads, y->head_dim, c->norm_eps, LM_ACC_FIRST };
    lm_vid o = attend(b, layer, lm_b_rope(b, layer, qkv));
    lm_vid in[3] = { o, gate, norm };
    return norm == LM_NONE ? o : lm_b_append(b, &lm_op_gated_norm, &attr, in);
}
