/* SPDX-License-Identifier: Apache-2.0 */
/* gpt2.c -- GPT-2 (Radford et al. 2019; tensor names and defaults of Hugging Face's
 * modeling_gpt2.py): learned positions, LayerNorm before each branch, biases everywhere, GELU, tied
 * head.
 *
 * Linear weights lie in the file as Conv1D [in, out]. Residual projections start at std / sqrt(2
 * L). */
#include <math.h>

#include "kernels/elementwise.h"
#include "model/build.h"
#include "op/ops.h"

typedef struct {
    lm_vid w, b;
} pair;

static pair conv1d(lm_builder *b, int64_t layer, const char *name, int64_t in, int64_t out,
                   double std)
{
    pair p;
    p.w = lm_b_param(b, 2, (int64_t[]){ out, in }, "h.%d.%s.weight", (int)layer, name);
    lm_b_slice(b, out, true, LM_INIT_NORMAL, std, "transformer.h.%d.%s.weight", (int)layer, name);
    p.b = lm_b_param(b, 1, &out, "h.%d.%s.bias", (int)layer, name);
    lm_b_slice(b, out, false, LM_INIT_ZEROS, 0, "transformer.h.%d.%s.bias", (int)layer, name);
    return p;
}

static pair layer_norm(lm_builder *b, int64_t layer, const char *name, int64_t width)
{
    char prefix[64];
    pair p;
    if (layer >= 0)
        snprintf(prefix, sizeof prefix, "h.%d.%s", (int)layer, name);
    else
        snprintf(prefix, sizeof prefix, "%s", name);
    p.w = lm_b_param(b, 1, &width, "%s.weight", prefix);
    lm_b_slice(b, width, false, LM_INIT_ONES, 0, "transformer.%s.weight", prefix);
    p.b = lm_b_param(b, 1, &width, "%s.bias", prefix);
    lm_b_slice(b, width, false, LM_INIT_ZEROS, 0, "transformer.%s.bias", prefix);
    return p;
}

void lm_build_gpt2(lm_builder *b)
{
    const lm_config *c = &b->m->config;
    lm_gelu_attr gelu = { c->gelu_exact };
    double std = c->init_std, residual_std = std / sqrt(2.0 * (double)c->layers);
    int64_t width = c->width;

    lm_vid wte = lm_b_param(b, 2, (int64_t[]){ c->vocab, width }, "wte");
    lm_b_slice(b, c->vocab, false, LM_INIT_NORMAL, std, "transformer.wte.weight");
    lm_vid wpe = lm_b_param(b, 2, (int64_t[]){ c->max_positions, width }, "wpe");
    lm_b_slice(b, c->max_positions, false, LM_INIT_NORMAL, std, "transformer.wpe.weight");

    lm_vid x = lm_b_dropout(b, lm_b_embed(b, wte, wpe), c->drop_embed), branch = LM_NONE;
    for (int64_t l = 0; l < c->layers; l++) {
        double scale = c->scale_attention ? 1.0 / sqrt((double)c->head_dim) : 1.0;
        b->m->graph->layer = (int)l;
        pair ln1 = layer_norm(b, l, "ln_1", width);
        pair qkv = conv1d(b, l, "attn.c_attn", width, 3 * width, std);
        pair out = conv1d(b, l, "attn.c_proj", width, width, residual_std);
        pair ln2 = layer_norm(b, l, "ln_2", width);
        pair up = conv1d(b, l, "mlp.c_fc", width, c->ffn, std);
        pair down = conv1d(b, l, "mlp.c_proj", c->ffn, width, residual_std);

        lm_vid h = lm_b_norm(b, LM_NORM_LAYER, x, ln1.w, ln1.b, branch, &x);
        h = lm_b_linear(b, h, qkv.w, qkv.b);
        h = lm_b_attention(b, h, l, c->scale_by_layer ? scale / (double)(l + 1) : scale);
        branch = lm_b_dropout(b, lm_b_linear(b, h, out.w, out.b), c->drop_resid);

        h = lm_b_norm(b, LM_NORM_LAYER, x, ln2.w, ln2.b, branch, &x);
        h = lm_b_unary(b, &lm_op_gelu, &gelu, lm_b_linear(b, h, up.w, up.b));
        branch = lm_b_dropout(b, lm_b_linear(b, h, down.w, down.b), c->drop_resid);
    }
    b->m->graph->layer = (int)c->layers;
    pair ln_f = layer_norm(b, -1, "ln_f", width);
    lm_vid head = wte;
    if (!c->tied) {
        head = lm_b_param(b, 2, (int64_t[]){ c->vocab, width }, "lm_head");
        lm_b_slice(b, c->vocab, false, LM_INIT_NORMAL, std, "lm_head.weight");
    }
    lm_b_head(b, lm_b_norm(b, LM_NORM_LAYER, x, ln_f.w, ln_f.b, branch, &x), head);
}
