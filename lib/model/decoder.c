/* SPDX-License-Identifier: Apache-2.0 */
/* decoder.c -- builds the graph of a config: embedding, layers by their descriptors, final norm and
 * head.
 *
 * Parameters are declared where they are first read.  The order determines the offset of each in
 * the master copy, and with it the order in which the norm of the gradients is summed. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "model/arch.h"
#include "model/build.h"

typedef struct {
    lm_vid w, b;
} pair;

/* Declare the tensor of `part` as the next rows of the latest parameter. */
static void slice(lm_builder *b, lm_part part, int64_t l, bool bias, const int64_t dim[2])
{
    const lm_config *c = &b->m->config;
    bool residual = part == LM_PART_ATTN_OUT || part == LM_PART_DOWN;
    double std = c->init_std;
    char name[LM_TENSOR_NAME];
    if (residual && c->arch->residual_init)
        std /= sqrt(2.0 * (double)c->layers);
    lm_init init = bias                     ? LM_INIT_ZEROS
                   : !lm_part_is_norm(part) ? LM_INIT_NORMAL
                   : c->norm_plus_one       ? LM_INIT_ZEROS
                                            : LM_INIT_ONES;
    lm_b_slice(b, dim[0], c->arch->conv1d && l >= 0, init, init == LM_INIT_NORMAL ? std : 0, "%s",
               lm_tensor_hf_name(c->arch, part, l, bias, name));
}

/* A weight or bias whose rows are those of `parts`; `packed`: the name of several parts
 * together. */
static lm_vid param(lm_builder *b, const lm_part *parts, int n, const char *packed, int64_t l,
                    bool bias)
{
    const lm_config *c = &b->m->config;
    const char *suffix = bias ? ".bias" : ".weight";
    int64_t dim[2], rows = 0;
    char hf[LM_TENSOR_NAME];
    lm_vid p;
    for (int i = 0; i < n; i++) {
        lm_part_shape(c, parts[i], l, dim);
        rows += dim[0];
    }
    /* Without suffix if there is only a weight: the RMS norms, and tables outside the layers. */
    if (lm_part_is_norm(parts[0]) ? !lm_part_biased(c, parts[0], l) : l < 0)
        suffix = "";
    if (n > 1)
        snprintf(hf, sizeof hf, "layers.%" PRId64 ".%s", l, packed);
    else
        lm_tensor_stem(c->arch, parts[0], l, hf);
    p = lm_b_param(b, bias || !dim[1] ? 1 : 2, (int64_t[]){ rows, dim[1] }, "%s%s", hf, suffix);
    for (int i = 0; i < n; i++) {
        lm_part_shape(c, parts[i], l, dim);
        slice(b, parts[i], l, bias, dim);
    }
    return p;
}

static pair params(lm_builder *b, const lm_part *parts, int n, const char *packed, int64_t l)
{
    pair p = { .b = LM_NONE };
    p.w = param(b, parts, n, packed, l, false);
    if (lm_part_biased(&b->m->config, parts[0], l))
        p.b = param(b, parts, n, packed, l, true);
    return p;
}

static pair one(lm_builder *b, lm_part part, int64_t l)
{
    return params(b, &part, 1, NULL, l);
}

static lm_vid norm(lm_builder *b, lm_part part, int64_t l, lm_vid x, lm_vid r, lm_vid *sum)
{
    pair p = one(b, part, l);
    return lm_b_norm(b, x, p.w, p.b, r, sum);
}

static lm_vid drop(lm_builder *b, lm_vid x, double rate)
{
    return b->m->config.arch->branch_dropout ? lm_b_dropout(b, x, rate) : x;
}

/* ---- Branches ---- */

/* The input of a branch: the residual stream *x with the previous branch added, after the norm if
 * the layer has one before its branches. */
static lm_vid enter(lm_builder *b, lm_part part, int64_t l, lm_vid *x, lm_vid branch)
{
    if (b->m->config.layer[l].norm_before)
        return norm(b, part, l, *x, branch, x);
    if (branch != LM_NONE)
        *x = lm_b_add(b, *x, branch);
    return *x;
}

/* The result of a branch that is added to the residual stream. */
static lm_vid leave(lm_builder *b, lm_part part, int64_t l, lm_vid h)
{
    lm_vid same;
    if (b->m->config.layer[l].norm_after)
        h = norm(b, part, l, h, LM_NONE, &same);
    return drop(b, h, b->m->config.drop_resid);
}

static lm_vid attention(lm_builder *b, int64_t l, lm_vid h)
{
    static const lm_part apart[3] = { LM_PART_Q, LM_PART_K, LM_PART_V };
    const lm_config *c = &b->m->config;
    bool joined = lm_arch_part(c->arch, LM_PART_QKV);
    pair qkv = joined ? one(b, LM_PART_QKV, l) : params(b, apart, 3, "qkv", l);
    h = lm_b_linear(b, h, qkv.w, qkv.b);
    if (c->layer[l].qk_norm != LM_QK_PLAIN) {
        lm_vid wq = one(b, LM_PART_Q_NORM, l).w;
        h = lm_b_head_norm(b, l, h, wq, one(b, LM_PART_K_NORM, l).w);
    }
    h = lm_b_attention(b, l, h);
    pair out = one(b, LM_PART_ATTN_OUT, l);
    return lm_b_linear(b, h, out.w, out.b);
}

static lm_vid mlp(lm_builder *b, int64_t l, lm_vid h)
{
    static const lm_part both[2] = { LM_PART_GATE, LM_PART_UP };
    lm_mlp kind = b->m->config.layer[l].mlp;
    pair up = lm_mlp_gated(kind) ? params(b, both, 2, "gate_up", l) : one(b, LM_PART_UP, l);
    h = lm_b_mlp(b, kind, lm_b_linear(b, h, up.w, up.b));
    pair down = one(b, LM_PART_DOWN, l);
    return lm_b_linear(b, h, down.w, down.b);
}

void lm_build_decoder(lm_builder *b)
{
    const lm_config *c = &b->m->config;
    lm_vid embed = one(b, LM_PART_EMBED, -1).w;
    lm_vid positions = c->ropes ? LM_NONE : one(b, LM_PART_POSITION, -1).w;
    lm_vid x = drop(b, lm_b_embed(b, embed, positions), c->drop_embed), branch = LM_NONE;

    for (int64_t l = 0; l < c->layers; l++) {
        b->m->graph->layer = (int)l;
        lm_vid h = enter(b, LM_PART_ATTN_NORM, l, &x, branch);
        branch = leave(b, LM_PART_ATTN_POST_NORM, l, attention(b, l, h));
        h = enter(b, LM_PART_MLP_NORM, l, &x, branch);
        branch = leave(b, LM_PART_MLP_POST_NORM, l, mlp(b, l, h));
    }
    b->m->graph->layer = (int)c->layers;
    lm_vid h = norm(b, LM_PART_OUTPUT_NORM, -1, x, branch, &x);
    lm_b_head(b, h, c->tied ? embed : one(b, LM_PART_OUTPUT, -1).w);
}
