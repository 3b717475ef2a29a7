/* SPDX-License-Identifier: Apache-2.0 */
/* build_latent.c -- latent attention: expanded where whole texts are read, absorbed where a
 * cache is. */
#include "kernels/arrange.h"
#include "kernels/latent.h"
#include "model/build.h"
#include "op/ops.h"

/* Both programs that the models come from have this here, whatever rms_norm_eps is
 * (transformers, modeling_deepseek_v3.py). */
static const double low_eps = 1e-6;

lm_vid lm_b_low_norm(lm_builder *b, lm_vid x, lm_vid w)
{
    const lm_norm_attr attr = { LM_NORM_RMS, low_eps, LM_ACC_FIRST, false };
    return lm_b_append(b, &lm_op_norm, &attr, (lm_vid[]){ x, w, LM_NONE, LM_NONE });
}

static lm_vid columns(lm_builder *b, lm_vid x, int64_t first, int64_t count)
{
    if (!lm_b_ok(b))
        return LM_NONE;
    const lm_window_attr attr = { 0, first, b->m->graph->value[x].t.dim[0], count };
    return lm_b_append(b, &lm_op_window, &attr, &x);
}

lm_vid lm_b_latents(lm_builder *b, int64_t layer, lm_vid kv)
{
    return columns(b, kv, 0, b->m->config.layer[layer].latent.kv_rank);
}

lm_vid lm_b_latent_keys(lm_builder *b, int64_t layer, lm_vid kv)
{
    const lm_latent *a = &b->m->config.layer[layer].latent;
    return columns(b, kv, a->kv_rank, a->rope_dim);
}

static lm_latent_attr sizes(const lm_builder *b, int64_t layer)
{
    const lm_layer *y = &b->m->config.layer[layer];
    return (lm_latent_attr){ .heads = y->heads,
                             .content_dim = y->latent.nope_dim,
                             .rotary_dim = y->latent.rope_dim,
                             .value_dim = y->latent.value_dim,
                             .latent_dim = y->latent.kv_rank,
                             .pairs = y->latent.pairs };
}

bool lm_b_absorbs(const lm_builder *b, int64_t layer)
{
    const lm_model *m = b->m;
    return m->config.layer[layer].attention == LM_ATTENTION_LATENT &&
           m->build.mode == LM_MODE_GENERATE && !m->build.adapt;
}

lm_vid lm_b_latent_attention(lm_builder *b, int64_t layer, lm_vid q, lm_vid up, lm_vid k)
{
    lm_model *m = b->m;
    lm_latent_attr rows = sizes(b, layer);
    lm_attention_attr attr = lm_b_attention_attr(m, layer);
    const lm_vid rope = m->rope[m->config.layer[layer].rope];
    rows.latent_dim = 0;
    attr.value_dim = rows.value_dim;
    lm_vid qkv = lm_b_append(b, &lm_op_latent_rows, &rows, (lm_vid[]){ q, up, k, m->pos, rope });
    if (m->build.mode == LM_MODE_GENERATE)
        return lm_b_cached_attention(b, layer, qkv, LM_NONE, LM_NONE, &attr);
    if (m->build.mode == LM_MODE_TRAIN && m->build.dropout)
        attr.dropout = m->config.drop_attn;
    return lm_b_append(b, &lm_op_attention, &attr,
                       (lm_vid[]){ qkv, m->lo, LM_NONE, LM_NONE, LM_NONE });
}

/* One key for all heads: the latent and the rotated part; its first numbers are the value. */
lm_vid lm_b_absorbed_attention(lm_builder *b, int64_t layer, lm_vid q, lm_vid c, lm_vid k, lm_vid w)
{
    lm_model *m = b->m;
    const lm_latent_attr rows = sizes(b, layer);
    lm_attention_attr attr = lm_b_attention_attr(m, layer);
    const lm_vid rope = m->rope[m->config.layer[layer].rope];
    attr.kv_heads = 1;
    attr.head_dim = rows.latent_dim + rows.rotary_dim;
    attr.value_dim = rows.latent_dim;
    lm_vid qkv =
        lm_b_append(b, &lm_op_latent_queries, &rows, (lm_vid[]){ q, c, k, w, m->pos, rope });
    lm_vid z = lm_b_cached_attention(b, layer, qkv, LM_NONE, LM_NONE, &attr);
    return lm_b_append(b, &lm_op_latent_values, &rows, (lm_vid[]){ z, w });
}
