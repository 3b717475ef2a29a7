/* SPDX-License-Identifier: Apache-2.0 */
/* decoder.c -- builds the graph of a config: embedding, layers by their descriptors, final norm and
 * head.
 *
 * Parameters are declared where they are first read.  The order determines the offset of each in
 * the master copy, and with it the order in which the norm of the gradients is summed. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "kernels/arrange.h"
#include "model/arch.h"
#include "model/build.h"
#include "op/ops.h"

typedef struct {
    lm_vid w, b;
} pair;

/* Declare the tensor of `part` as the next rows of the latest parameter. */
static void slice(lm_builder *b, lm_part part, int64_t l, int64_t expert, bool bias,
                  const int64_t dim[2])
{
    const lm_config *c = &b->m->config;
    bool residual = part == LM_PART_ATTN_OUT || part == LM_PART_DOWN ||
                    part == LM_PART_EXPERT_DOWN || part == LM_PART_SHARED_DOWN ||
                    part == LM_PART_DELTA_OUT;
    double std = c->arch->std ? c->arch->std(c, part) : c->init_std;
    char name[LM_TENSOR_NAME];
    if (residual && c->arch->residual_init)
        std /= sqrt(2.0 * (double)c->layers);
    bool zeros = bias || lm_part_plus_one(c, part) || part == LM_PART_HEAD_BIAS ||
                 part == LM_PART_ROUTER_NOISE;
    lm_init init = zeros                                               ? LM_INIT_ZEROS
                   : lm_part_is_norm(part) || part == LM_PART_DELTA_DT ? LM_INIT_ONES
                   : part == LM_PART_DELTA_LOG                         ? LM_INIT_LOG_RATE
                                                                       : LM_INIT_NORMAL;
    lm_b_slice(b, dim[0], c->arch->conv1d && l >= 0, init, init == LM_INIT_NORMAL ? std : 0, "%s",
               lm_expert_hf_name(c->arch, part, lm_config_named_layer(c, l), expert, bias, name));
    if (part == LM_PART_DELTA_CONV && lm_b_ok(b)) { /* with a dimension of 1 in files */
        lm_slice *s = &b->m->slice[b->m->n_slices - 1];
        s->ndim = 3;
        s->dim[2] = s->dim[1];
        s->dim[1] = 1;
    }
}

/* A weight or bias whose rows are those of `parts`; `packed`: the name of several parts
 * together.  Of experts, those of one after those of another. */
static lm_vid param(lm_builder *b, const lm_part *parts, int n, const char *packed, int64_t l,
                    bool bias)
{
    const lm_config *c = &b->m->config;
    const char *suffix = bias ? ".bias" : ".weight";
    int64_t dim[2], rows = 0, times = lm_part_count(c, parts[0], l);
    char hf[LM_TENSOR_NAME];
    lm_vid p;
    for (int i = 0; i < n; i++) {
        lm_part_shape(c, parts[i], l, dim);
        rows += dim[0] * times;
    }
    /* Without suffix if there is only a weight: the RMS norms, and tables outside the layers. */
    if ((lm_part_is_norm(parts[0]) || l < 0) && !lm_part_biased(c, parts[0], l))
        suffix = "";
    if (n > 1)
        snprintf(hf, sizeof hf, "%slayers.%" PRId64 ".%s", b->whole ? "encoder." : "", l, packed);
    else
        lm_tensor_stem(c->arch, parts[0], lm_config_named_layer(c, l), hf);
    p = lm_b_param(b, bias || !dim[1] ? 1 : 2, (int64_t[]){ rows, dim[1] }, "%s%s", hf, suffix);
    if (lm_b_ok(b)) /* latent attention multiplies by parts of it (kernels/latent.h) */
        b->m->param[b->m->n_params - 1].plain = parts[0] == LM_PART_KV_B;
    for (int64_t i = 0; i < n * times; i++) {
        lm_part_shape(c, parts[i % n], l, dim);
        slice(b, parts[i % n], l, i / n, bias, dim);
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

/* The modules of a place: the parts, one below another. */
static lm_adapt_linear place_of(lm_builder *b, const lm_part *parts, int n, int64_t l)
{
    const lm_config *c = &b->m->config;
    lm_adapt_linear place = { LM_NONE, LM_NONE, LM_NONE, .n_modules = n };
    int64_t row = 0, dim[2];
    for (int i = 0; i < n; i++) {
        lm_adapt_module *m = &place.module[i];
        lm_part_shape(c, parts[i], l, dim);
        *m = (lm_adapt_module){ .part = parts[i],
                                .layer = l,
                                .row = row,
                                .rows = dim[0],
                                .in = dim[1],
                                .turned = c->arch->conv1d && l >= 0 };
        lm_tensor_hf_name(c->arch, parts[i], lm_config_named_layer(c, l), false, m->name);
        m->name[strlen(m->name) - strlen(".weight")] = 0;
        row += dim[0];
    }
    return place;
}

/* The linear layers of `parts` on x, side by side. */
static lm_vid product(lm_builder *b, const lm_part *parts, int n, const char *packed, int64_t l,
                      lm_vid x)
{
    lm_adapt_linear place = place_of(b, parts, n, l);
    if (lm_b_apart(b, &place)) {
        lm_join_attr attr = { .rows = false };
        lm_vid y[LM_JOIN_PARTS];
        for (int i = 0; i < LM_JOIN_PARTS; i++)
            y[i] = i < n ? product(b, &parts[i], 1, NULL, l, x) : LM_NONE;
        return lm_b_append(b, &lm_op_join, &attr, y);
    }
    pair p = params(b, parts, n, packed, l);
    place.x = x;
    place.w = p.w;
    place.bias = p.b;
    return lm_b_product(b, &place);
}

static lm_vid product1(lm_builder *b, lm_part part, int64_t l, lm_vid x)
{
    return product(b, &part, 1, NULL, l, x);
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

/* The result of a branch that is added to the residual stream *x; LM_NONE if it was added here.  `part`: the norm behind
 * it, of attention to an encoder, which lacks one, CROSS_NORM. */
static lm_vid leave(lm_builder *b, lm_part part, int64_t l, lm_vid *x, lm_vid h)
{
    lm_vid same;
    if (b->m->config.layer[l].norm_after)
        h = norm(b, part, l, h, LM_NONE, &same);
    const lm_adapt_branch place = { .encoder = b->whole != NULL,
                                    .layer = l,
                                    .mlp = part == LM_PART_MLP_POST_NORM,
                                    .cross = part == LM_PART_CROSS_NORM,
                                    .stream = *x,
                                    .h = drop(b, h, b->m->config.drop_resid) };
    h = lm_b_adapt_branch(b, &place);
    if (!b->m->config.layer[l].norm_sum)
        return h;
    *x = norm(b, part, l, *x, h, &same);
    return LM_NONE;
}

/* A layer with a state: its products, and what is between them. */
static lm_vid delta(lm_builder *b, int64_t l, lm_vid h)
{
    static const lm_part in[2] = { LM_PART_DELTA_QKV, LM_PART_DELTA_Z },
                         gates[2] = { LM_PART_DELTA_B, LM_PART_DELTA_A };
    lm_delta_parts p = { .apart = !lm_arch_part(b->m->config.arch, LM_PART_DELTA_IN) };
    p.qkvz = p.apart ? product(b, in, 2, "qkvz", l, h) : product1(b, LM_PART_DELTA_IN, l, h);
    p.ba = p.apart ? product(b, gates, 2, "ba", l, h) : product1(b, LM_PART_DELTA_GATES, l, h);
    p.conv = one(b, LM_PART_DELTA_CONV, l).w;
    p.a_log = one(b, LM_PART_DELTA_LOG, l).w;
    p.dt = one(b, LM_PART_DELTA_DT, l).w;
    p.norm = one(b, LM_PART_DELTA_NORM, l).w;
    return product1(b, LM_PART_DELTA_OUT, l, lm_b_delta(b, l, &p));
}

/* Attention on latents: queries through a low rank or not, and one latent of a token for keys and values. */
static lm_vid latent(lm_builder *b, int64_t l, lm_vid h)
{
    static const lm_part up = LM_PART_KV_B;
    const lm_latent *a = &b->m->config.layer[l].latent;
    lm_vid q = h, o;
    if (a->q_rank) {
        q = product1(b, LM_PART_Q_A, l, h);
        q = lm_b_low_norm(b, q, one(b, LM_PART_Q_A_NORM, l).w);
    }
    q = product1(b, a->q_rank ? LM_PART_Q_B : LM_PART_Q, l, q);
    lm_vid kv = product1(b, LM_PART_KV_A, l, h);
    lm_vid c = lm_b_low_norm(b, lm_b_latents(b, l, kv), one(b, LM_PART_KV_A_NORM, l).w);
    lm_vid k = lm_b_latent_keys(b, l, kv);
    if (lm_b_absorbs(b, l))
        o = lm_b_absorbed_attention(b, l, q, c, k, param(b, &up, 1, NULL, l, false));
    else
        o = lm_b_latent_attention(b, l, q, product1(b, up, l, c), k);
    return product1(b, LM_PART_ATTN_OUT, l, o);
}

/* Of retention, what weighs the results of heads and how they are normalised is their own. */
static lm_vid linear(lm_builder *b, int64_t l, lm_vid h, lm_vid qkv)
{
    const bool retains = b->m->config.layer[l].linear.feature == LM_FEATURE_IDENTITY;
    lm_vid gate = retains ? product1(b, LM_PART_LINEAR_GATE, l, h) : LM_NONE;
    lm_vid norm = retains ? one(b, LM_PART_LINEAR_NORM, l).w : LM_NONE;
    return product1(b, LM_PART_ATTN_OUT, l, lm_b_linear_attention(b, l, qkv, gate, norm));
}

static lm_vid attention(lm_builder *b, int64_t l, lm_vid h)
{
    static const lm_part apart[3] = { LM_PART_Q, LM_PART_K, LM_PART_V };
    const lm_config *c = &b->m->config;
    bool joined = lm_arch_part(c->arch, LM_PART_QKV);
    const lm_vid x = h;
    lm_vid gate = LM_NONE;
    if (c->layer[l].attention == LM_ATTENTION_DELTA)
        return delta(b, l, h);
    if (c->layer[l].attention == LM_ATTENTION_LATENT)
        return latent(b, l, h);
    h = joined ? product1(b, LM_PART_QKV, l, h) : product(b, apart, 3, "qkv", l, h);
    if (c->layer[l].qkv_by_head)
        h = lm_b_part_qkv(b, l, h);
    if (c->layer[l].out_gate)
        h = lm_b_split_gate(b, l, h, &gate);
    if (c->layer[l].qk_norm != LM_QK_PLAIN) {
        lm_vid wq = one(b, LM_PART_Q_NORM, l).w;
        h = lm_b_head_norm(b, l, h, wq, one(b, LM_PART_K_NORM, l).w);
    }
    if (c->layer[l].attention == LM_ATTENTION_LINEAR)
        return linear(b, l, x, h);
    lm_vid sinks = c->layer[l].sinks ? one(b, LM_PART_SINKS, l).w : LM_NONE;
    h = lm_b_attention(b, l, h, sinks);
    return product1(b, LM_PART_ATTN_OUT, l, gate >= 0 ? lm_b_gate(b, h, gate) : h);
}

static lm_vid mlp(lm_builder *b, int64_t l, lm_vid h)
{
    static const lm_part both[2] = { LM_PART_GATE, LM_PART_UP };
    const lm_config *c = &b->m->config;
    lm_mlp kind = c->layer[l].mlp;
    h = lm_mlp_gated(kind) ? product(b, both, 2, "gate_up", l, h) : product1(b, LM_PART_UP, l, h);
    h = lm_b_mlp(b, kind, h);
    return product1(b, LM_PART_DOWN, l, c->drop_mlp > 0 ? lm_b_dropout(b, h, c->drop_mlp) : h);
}

/* The expert that all tokens go through. */
static lm_vid shared_expert(lm_builder *b, int64_t l, lm_vid h)
{
    static const lm_part both[2] = { LM_PART_SHARED_GATE, LM_PART_SHARED_UP };
    const lm_layer *y = &b->m->config.layer[l];
    lm_vid x = lm_b_mlp(b, y->mlp, product(b, both, 2, "shared_gate_up", l, h));
    x = product1(b, LM_PART_SHARED_DOWN, l, x);
    return y->moe.shared_gate ? lm_b_weigh(b, x, product1(b, LM_PART_SHARED_SWITCH, l, h)) : x;
}

static lm_vid router_bias(lm_builder *b, int64_t l)
{
    const lm_config *c = &b->m->config;
    const int64_t experts = c->layer[l].moe.experts;
    char name[LM_TENSOR_NAME];
    const lm_vid v = lm_b_param(b, 1, &experts, "layers.%" PRId64 ".%s", l, "router_bias");
    lm_b_slice(b, experts, false, LM_INIT_ZEROS, 0, "%s",
               lm_tensor_hf_name(c->arch, LM_PART_ROUTER_BIAS, l, false, name));
    if (lm_b_ok(b))
        b->m->slice[b->m->n_slices - 1].by_load = true;
    return v;
}

/* The bias of a part, as a parameter [rows,width]; rows 0: of a vector. */
static lm_vid added_bias(lm_builder *b, lm_part part, int64_t l, int64_t rows, int64_t width)
{
    char name[LM_TENSOR_NAME + 8], stem[LM_TENSOR_NAME], hf[LM_TENSOR_NAME];
    const lm_arch *a = b->m->config.arch;
    snprintf(name, sizeof name, "%s.bias", lm_tensor_stem(a, part, l, stem));
    return lm_b_bias(b, rows, width, name, lm_tensor_hf_name(a, part, l, true, hf));
}

/* A product with the matrices of experts that the file has in one tensor, and their biases. */
static lm_vid stacked_product(lm_builder *b, const lm_routed *r, lm_part part, int64_t l, lm_vid x)
{
    const lm_config *c = &b->m->config;
    const int64_t n = lm_part_count(c, part, l);
    char name[LM_TENSOR_NAME];
    int64_t dim[2];
    double std = c->init_std;
    lm_part_shape(c, part, l, dim);
    lm_vid w = lm_b_param(b, 2, (int64_t[]){ n * dim[0], dim[1] }, "%s",
                          lm_tensor_stem(c->arch, part, l, name));
    lm_b_slice(b, n * dim[0], true, LM_INIT_NORMAL, std, "%s",
               lm_tensor_hf_name(c->arch, part, l, false, name));
    lm_b_stack(b, n);
    x = lm_b_adapt_grouped(b, r, l, part == LM_PART_STACK_OUT, x, w);
    return lm_part_biased(c, part, l)
               ? lm_b_grouped_bias(b, r, x, added_bias(b, part, l, n, dim[0]))
               : x;
}

static lm_vid stacked_experts(lm_builder *b, const lm_routed *r, int64_t l, lm_vid x)
{
    x = lm_b_clamped(b, l, stacked_product(b, r, LM_PART_STACK_IN, l, x));
    return stacked_product(b, r, LM_PART_STACK_OUT, l, x);
}

/* A mixture: each token goes through the experts that its router chooses. */
static lm_vid experts(lm_builder *b, int64_t l, lm_vid h)
{
    static const lm_part both[2] = { LM_PART_EXPERT_GATE, LM_PART_EXPERT_UP },
                         down[1] = { LM_PART_EXPERT_DOWN };
    const lm_layer *y = &b->m->config.layer[l];
    lm_router router = { .added = LM_NONE, .bias = LM_NONE, .noise = LM_NONE };
    router.w = param(b, (lm_part[]){ LM_PART_ROUTER }, 1, NULL, l, false);
    if (y->moe.noisy) /* a parameter of all modes, which training alone reads */
        router.noise = param(b, (lm_part[]){ LM_PART_ROUTER_NOISE }, 1, NULL, l, false);
    if (y->moe.router_bias)
        router.added = added_bias(b, LM_PART_ROUTER, l, 0, y->moe.experts);
    if (y->moe.score_bias)
        router.bias = router_bias(b, l);
    lm_routed r = lm_b_route(b, l, h, &router);
    lm_b_watch_route(b, l, &r);
    lm_vid x = lm_b_to_experts(b, &r, h);
    if (y->moe.stacked)
        return lm_b_from_experts(b, &r, stacked_experts(b, &r, l, x));
    x = lm_b_adapt_grouped(b, &r, l, false, x, param(b, both, 2, "experts.gate_up", l, false));
    x = lm_b_mlp(b, y->mlp, x);
    x = lm_b_adapt_grouped(b, &r, l, true, x, param(b, down, 1, NULL, l, false));
    x = lm_b_from_experts(b, &r, x);
    return y->moe.shared ? lm_b_add(b, x, shared_expert(b, l, h)) : x;
}

/* Attention to what the encoder made. */
static lm_vid cross(lm_builder *b, int64_t l, lm_vid h)
{
    static const lm_part both[2] = { LM_PART_CROSS_K, LM_PART_CROSS_V };
    lm_vid q = product1(b, LM_PART_CROSS_Q, l, h);
    lm_vid kv = product(b, both, 2, "cross_kv", l, b->encoded);
    return product1(b, LM_PART_CROSS_OUT, l, lm_b_cross_attention(b, l, q, kv));
}

/* The layer's branches on the residual stream *x, to which `branch` has not been added yet; returns the last one. */
static lm_vid layer(lm_builder *b, int64_t l, lm_vid *x, lm_vid branch)
{
    b->m->graph->layer = (int)(lm_b_first_layer(b) + l);
    lm_vid h = enter(b, LM_PART_ATTN_NORM, l, x, branch);
    branch = leave(b, LM_PART_ATTN_POST_NORM, l, x, attention(b, l, h));
    if (b->m->config.layer[l].cross) {
        h = enter(b, LM_PART_CROSS_NORM, l, x, branch);
        branch = leave(b, LM_PART_CROSS_NORM, l, x, cross(b, l, h));
    }
    h = enter(b, LM_PART_MLP_NORM, l, x, branch);
    h = b->m->config.layer[l].moe.experts ? experts(b, l, h) : mlp(b, l, h);
    return leave(b, LM_PART_MLP_POST_NORM, l, x, h);
}

/* ---- Modules that predict tokens further on ---- */

/* What the head reads of module l, behind states h, of rows whose next known tokens are `ids`.  Published weights have
 * the token's half in front, and read states behind the norm of the head before. */
static lm_vid module(lm_builder *b, int64_t l, lm_vid embed, lm_vid ids, lm_vid h)
{
    lm_vid same, x;
    b->m->graph->layer = (int)l;
    x = norm(b, LM_PART_AHEAD_TOKEN_NORM, l, lm_b_embed(b, ids, embed, LM_NONE), LM_NONE, &same);
    x = lm_b_join(b, x, norm(b, LM_PART_AHEAD_STATE_NORM, l, h, LM_NONE, &same));
    x = product1(b, LM_PART_AHEAD_JOIN, l, x);
    lm_vid branch = layer(b, l, &x, LM_NONE);
    return norm(b, LM_PART_AHEAD_NORM, l, x, branch, &same);
}

/* The parameters of module l alone. */
static void declare(lm_builder *b, int64_t l)
{
    int64_t dim[2];
    for (const lm_tensor_name *row = b->m->config.arch->tensors; row->part; row++) {
        if (row->part < LM_PART_ATTN_NORM || lm_part_is_copy(row->part) ||
            !lm_part_shape(&b->m->config, row->part, l, dim))
            continue;
        if (row->part == LM_PART_ROUTER_BIAS)
            router_bias(b, l);
        else
            one(b, row->part, l);
    }
}

/* All of them, behind states h of the model. */
static void modules(lm_builder *b, lm_vid embed, lm_vid head, lm_vid h)
{
    lm_model *m = b->m;
    const int layer_behind = m->graph->layer;
    for (int64_t k = 0; lm_b_has_ahead(m, k); k++) {
        const int first = m->n_slices;
        if (m->build.ahead == LM_AHEAD_KEPT)
            declare(b, m->config.layers + k);
        else
            h = module(b, m->config.layers + k, embed, m->ahead_tokens[k], h);
        for (int i = first; m->build.ahead == LM_AHEAD_KEPT && i < m->n_slices; i++)
            m->slice[i].kept = true;
        if (m->build.mode == LM_MODE_TRAIN && m->build.ahead == LM_AHEAD_RUNS)
            lm_b_ahead_loss(b, k, h, head);
        if (m->build.mode == LM_MODE_GENERATE && lm_b_has_ahead(m, k + 1))
            m->ahead_states[k] = h;
    }
    m->graph->layer = layer_behind;
}

/* ---- Pairs of texts ---- */

/* The head of pairs on final states h, or its parameters alone.  A checkpoint may lack it. */
static void pairs(lm_builder *b, lm_vid h)
{
    lm_model *m = b->m;
    const int first = m->n_slices;
    const bool kept = m->build.pairs == LM_PAIRS_KEPT;
    if (!m->config.pairs || m->build.pairs == LM_PAIRS_NONE)
        return;
    if (!kept)
        h = lm_b_tanh(b, product1(b, LM_PART_POOLER, -1, lm_b_first_rows(b, h)));
    else
        one(b, LM_PART_POOLER, -1);
    pair p = one(b, LM_PART_PAIR, -1);
    for (int i = first; i < m->n_slices; i++) {
        m->slice[i].may_lack = true;
        m->slice[i].kept = kept;
    }
    if (!kept)
        lm_b_pair_loss(b, h, p.w, p.b);
}

/* ---- The whole ---- */

/* The layers of a stack on x, and the norm behind them. */
static lm_vid stack(lm_builder *b, lm_vid x)
{
    const lm_config *c = &b->m->config;
    lm_vid branch = LM_NONE;

    if (c->layer[0].buckets)
        b->relative = lm_b_relative(b, one(b, LM_PART_RELATIVE, 0).w);
    for (int64_t l = 0; l < c->layers; l++)
        branch = layer(b, l, &x, branch);
    b->m->graph->layer = (int)(lm_b_first_layer(b) + c->layers);
    if (!c->layer[c->layers - 1].norm_sum)
        x = norm(b, LM_PART_OUTPUT_NORM, -1, x, branch, &branch);
    return c->drop_mlp > 0 ? lm_b_dropout(b, x, c->drop_mlp) : x;
}

/* The rows of the tokens of the stack that is built now. */
static lm_vid embed_tokens(lm_builder *b, lm_vid embed, lm_vid positions)
{
    lm_adapt_embed place = { .encoder = b->whole != NULL,
                             .tokens = b->m->tokens,
                             .table = embed,
                             .x = lm_b_embed(b, b->m->tokens, embed, positions),
                             .scale = b->m->config.embed_scale };
    if (!place.encoder) /* the table of names of an encoder has its layers alone */
        place.module = place_of(b, (lm_part[]){ LM_PART_EMBED }, 1, -1).module[0];
    return lm_b_adapt_embed(b, &place);
}

/* The states of the encoder. */
static lm_vid encode(lm_builder *b, lm_vid embed)
{
    lm_b_side side;
    lm_b_enter_encoder(b, &side);
    lm_vid x = embed_tokens(b, embed, LM_NONE);
    x = stack(b, drop(b, x, b->m->config.drop_embed));
    lm_b_leave_encoder(b, &side);
    return x;
}

static lm_vid trunk(lm_builder *b, lm_vid embed)
{
    const lm_config *c = &b->m->config;
    lm_vid positions = lm_config_has_positions(c) ? one(b, LM_PART_POSITION, -1).w : LM_NONE;
    lm_vid x = embed_tokens(b, embed, positions);
    lm_vid types = c->types ? lm_b_embed(b, b->m->types, one(b, LM_PART_TYPES, -1).w, LM_NONE)
                            : LM_NONE,
           sum;
    if (c->embed_norm)
        x = norm(b, LM_PART_EMBED_NORM, -1, x, types, &sum);
    else if (c->types)
        x = lm_b_add(b, x, types);
    x = drop(b, x, c->drop_embed);
    if (c->encoder)
        b->encoded = encode(b, embed);
    x = stack(b, x);
    return c->out_scale > 0 ? lm_b_scale(b, x, c->out_scale) : x;
}

void lm_build_decoder(lm_builder *b)
{
    const lm_config *c = &b->m->config;
    const bool drafts = b->m->build.ahead == LM_AHEAD_DRAFTS;
    lm_vid embed = one(b, LM_PART_EMBED, -1).w;
    lm_b_ahead_copies(b, LM_PART_AHEAD_EMBED);
    if (c->tied)
        lm_b_ahead_copies(b, LM_PART_AHEAD_HEAD);
    lm_vid h = drafts ? module(b, c->layers + b->m->build.module, embed, b->m->tokens, b->m->prior)
                      : trunk(b, embed);
    b->m->graph->layer = (int)lm_config_all_layers(c);
    if (c->scores) {
        lm_b_route_losses(b);
        lm_b_scores(b, h);
        return;
    }
    if (b->m->build.value)
        lm_b_value(b, h);
    pairs(b, h);
    lm_adapt_linear head = place_of(b, (lm_part[]){ LM_PART_OUTPUT }, 1, -1);
    if (c->head_transform) {
        lm_vid same;
        h = lm_b_mlp(b, c->layer[0].mlp, product1(b, LM_PART_HEAD_DENSE, -1, h));
        h = norm(b, LM_PART_HEAD_NORM, -1, h, LM_NONE, &same);
        head.bias = one(b, LM_PART_HEAD_BIAS, -1).w;
    }
    head.x = h;
    head.w = c->tied ? embed : one(b, LM_PART_OUTPUT, -1).w;
    if (!c->tied)
        lm_b_ahead_copies(b, LM_PART_AHEAD_HEAD);
    if (!drafts)
        modules(b, embed, head.w, h);
    lm_b_route_losses(b);
    lm_b_head(b, &head);
}
