/* SPDX-License-Identifier: Apache-2.0 */
/* llama.c -- the Llama family: Llama 2/3 (arXiv:2302.13971, 2407.21783), Mistral
 * (arXiv:2310.06825), Qwen2 (arXiv:2407.10671) and Qwen3 (arXiv:2505.09388); tensor names of
 * Hugging Face.
 *
 * RMSNorm before each branch, rotary positions, grouped-query attention, SwiGLU.  They differ in
 * biases (Qwen2: q, k, v), per-head norms of q and k before the rotation (Qwen3) and sliding
 * windows (Mistral, Qwen). */
#include <math.h>

#include "model/build.h"
#include "op/ops.h"

static lm_vid rms_weight(lm_builder *b, int64_t n, const char *name)
{
    lm_vid w = lm_b_param(b, 1, &n, "%s", name);
    lm_b_slice(b, n, false, LM_INIT_ONES, 0, "model.%s.weight", name);
    return w;
}

/* q, k and v as one weight (suffix "weight") or one bias (suffix "bias", cols 0). */
static lm_vid qkv_param(lm_builder *b, int64_t l, int64_t cols, const char *suffix)
{
    const lm_config *c = &b->m->config;
    static const char *const parts[3] = { "q", "k", "v" };
    int64_t q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
    lm_init init = cols ? LM_INIT_NORMAL : LM_INIT_ZEROS;
    lm_vid p = lm_b_param(b, cols ? 2 : 1, (int64_t[]){ q + 2 * kv, cols }, "layers.%d.qkv.%s",
                          (int)l, suffix);
    for (int i = 0; i < 3; i++)
        lm_b_slice(b, i ? kv : q, false, init, c->init_std, "model.layers.%d.self_attn.%s_proj.%s",
                   (int)l, parts[i], suffix);
    return p;
}

static lm_vid gate_up_param(lm_builder *b, int64_t l, int64_t cols, const char *suffix)
{
    const lm_config *c = &b->m->config;
    lm_init init = cols ? LM_INIT_NORMAL : LM_INIT_ZEROS;
    lm_vid p = lm_b_param(b, cols ? 2 : 1, (int64_t[]){ 2 * c->ffn, cols }, "layers.%d.gate_up.%s",
                          (int)l, suffix);
    lm_b_slice(b, c->ffn, false, init, c->init_std, "model.layers.%d.mlp.gate_proj.%s", (int)l,
               suffix);
    lm_b_slice(b, c->ffn, false, init, c->init_std, "model.layers.%d.mlp.up_proj.%s", (int)l,
               suffix);
    return p;
}

/* A projection back to the residual stream. */
static lm_vid out_param(lm_builder *b, int64_t l, int64_t cols, const char *name,
                        const char *suffix)
{
    const lm_config *c = &b->m->config;
    lm_vid p = lm_b_param(b, cols ? 2 : 1, (int64_t[]){ c->width, cols }, "layers.%d.%s.%s", (int)l,
                          name, suffix);
    lm_b_slice(b, c->width, false, cols ? LM_INIT_NORMAL : LM_INIT_ZEROS, c->init_std,
               "model.layers.%d.%s.%s", (int)l, name, suffix);
    return p;
}

static lm_vid attention_branch(lm_builder *b, int64_t l, lm_vid h)
{
    const lm_config *c = &b->m->config;
    char name[64];
    lm_vid w = qkv_param(b, l, c->width, "weight");
    lm_vid bias = c->qkv_bias ? qkv_param(b, l, 0, "bias") : LM_NONE;
    lm_vid qkv = lm_b_linear(b, h, w, bias);
    if (c->qk_norm) {
        snprintf(name, sizeof name, "layers.%d.self_attn.q_norm", (int)l);
        lm_vid wq = rms_weight(b, c->head_dim, name);
        snprintf(name, sizeof name, "layers.%d.self_attn.k_norm", (int)l);
        qkv = lm_b_head_norm(b, qkv, wq, rms_weight(b, c->head_dim, name));
    }
    qkv = lm_b_rope(b, qkv);
    lm_vid o = lm_b_attention(b, qkv, l, 1.0 / sqrt((double)c->head_dim));
    lm_vid wo = out_param(b, l, c->heads * c->head_dim, "self_attn.o_proj", "weight");
    return lm_b_linear(b, o, wo,
                       c->out_bias ? out_param(b, l, 0, "self_attn.o_proj", "bias") : LM_NONE);
}

static lm_vid mlp_branch(lm_builder *b, int64_t l, lm_vid h)
{
    const lm_config *c = &b->m->config;
    lm_vid w = gate_up_param(b, l, c->width, "weight");
    lm_vid bias = c->mlp_bias ? gate_up_param(b, l, 0, "bias") : LM_NONE;
    h = lm_b_unary(b, &lm_op_swiglu, NULL, lm_b_linear(b, h, w, bias));
    lm_vid wd = out_param(b, l, c->ffn, "mlp.down_proj", "weight");
    return lm_b_linear(b, h, wd,
                       c->mlp_bias ? out_param(b, l, 0, "mlp.down_proj", "bias") : LM_NONE);
}

void lm_build_llama(lm_builder *b)
{
    const lm_config *c = &b->m->config;
    char name[64];
    lm_vid embed = lm_b_param(b, 2, (int64_t[]){ c->vocab, c->width }, "embed_tokens");
    lm_b_slice(b, c->vocab, false, LM_INIT_NORMAL, c->init_std, "model.embed_tokens.weight");

    lm_vid x = lm_b_embed(b, embed, LM_NONE), branch = LM_NONE;
    for (int64_t l = 0; l < c->layers; l++) {
        b->m->graph->layer = (int)l;
        snprintf(name, sizeof name, "layers.%d.input_layernorm", (int)l);
        lm_vid h = lm_b_norm(b, LM_NORM_RMS, x, rms_weight(b, c->width, name), LM_NONE, branch, &x);
        branch = attention_branch(b, l, h);
        snprintf(name, sizeof name, "layers.%d.post_attention_layernorm", (int)l);
        h = lm_b_norm(b, LM_NORM_RMS, x, rms_weight(b, c->width, name), LM_NONE, branch, &x);
        branch = mlp_branch(b, l, h);
    }
    b->m->graph->layer = (int)c->layers;
    lm_vid h = lm_b_norm(b, LM_NORM_RMS, x, rms_weight(b, c->width, "norm"), LM_NONE, branch, &x);
    lm_vid head = embed;
    if (!c->tied) {
        head = lm_b_param(b, 2, (int64_t[]){ c->vocab, c->width }, "lm_head");
        lm_b_slice(b, c->vocab, false, LM_INIT_NORMAL, c->init_std, "lm_head.weight");
    }
    lm_b_head(b, h, head);
}
