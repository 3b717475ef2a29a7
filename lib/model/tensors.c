/* SPDX-License-Identifier: Apache-2.0 */
/* tensors.c -- lists every tensor of a model: those that the descriptors of its layers require,
 * with the names of its architecture. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "model/arch.h"
#include "op/attention_blocks.h"

bool lm_part_biased(const lm_config *c, lm_part part, int64_t l)
{
    switch (part) {
    case LM_PART_Q:
        return c->layer[l].qkv_bias && lm_layer_has_heads(&c->layer[l]);
    case LM_PART_K:
    case LM_PART_V:
    case LM_PART_QKV:
    case LM_PART_Q_A:
    case LM_PART_KV_A:
        return c->layer[l].qkv_bias;
    case LM_PART_ATTN_OUT:
        return c->layer[l].out_bias;
    case LM_PART_ROUTER:
        return c->layer[l].moe.router_bias;
    case LM_PART_STACK_IN:
    case LM_PART_STACK_OUT:
        return c->layer[l].moe.biased;
    case LM_PART_GATE:
    case LM_PART_UP:
    case LM_PART_DOWN:
        return c->layer[l].mlp_bias;
    case LM_PART_HEAD_DENSE:
    case LM_PART_POOLER:
    case LM_PART_PAIR:
        return true;
    case LM_PART_EMBED_NORM:
    case LM_PART_HEAD_NORM:
    case LM_PART_OUTPUT_NORM:
    case LM_PART_ATTN_NORM:
    case LM_PART_ATTN_POST_NORM:
    case LM_PART_MLP_NORM:
    case LM_PART_MLP_POST_NORM:
    case LM_PART_CROSS_NORM:
        return c->norm == LM_NORM_LAYER;
    default:
        return false;
    }
}

static bool shape(int64_t dim[2], bool there, int64_t rows, int64_t cols)
{
    dim[0] = rows;
    dim[1] = cols;
    return there;
}

int64_t lm_part_count(const lm_config *c, lm_part part, int64_t l)
{
    return lm_part_is_expert(part) || lm_part_is_stack(part) ? c->layer[l].moe.experts : 1;
}

/* Parts of attention are there by the kind of the layer. */
static bool of_attention(lm_part part)
{
    return part >= LM_PART_Q && part <= LM_PART_ATTN_OUT;
}

static bool has_part(const lm_layer *y, lm_part part)
{
    bool of_delta = part >= LM_PART_DELTA_IN && part <= LM_PART_DELTA_OUT;
    return of_delta == (y->attention == LM_ATTENTION_DELTA);
}

static bool delta_shape(const lm_config *c, const lm_delta_sizes *d, lm_part part, int64_t dim[2])
{
    int64_t values = d->heads * d->value_dim, qkv = 2 * d->key_heads * d->key_dim + values;

    switch (part) {
    case LM_PART_DELTA_IN:
        return shape(dim, true, qkv + values, c->width);
    case LM_PART_DELTA_GATES:
        return shape(dim, true, 2 * d->heads, c->width);
    case LM_PART_DELTA_QKV:
        return shape(dim, true, qkv, c->width);
    case LM_PART_DELTA_Z:
        return shape(dim, true, values, c->width);
    case LM_PART_DELTA_B:
    case LM_PART_DELTA_A:
        return shape(dim, true, d->heads, c->width);
    case LM_PART_DELTA_CONV:
        return shape(dim, true, qkv, d->taps);
    case LM_PART_DELTA_LOG:
    case LM_PART_DELTA_DT:
        return shape(dim, true, d->heads, 0);
    case LM_PART_DELTA_NORM:
        return shape(dim, true, d->value_dim, 0);
    default:
        return shape(dim, true, c->width, values);
    }
}

/* Parts that layers with latent attention alone have. */
static bool latent_shape(const lm_config *c, lm_part part, const lm_layer *y, int64_t dim[2])
{
    const lm_latent *a = &y->latent;
    bool latent = y->attention == LM_ATTENTION_LATENT, low = latent && a->q_rank;
    switch (part) {
    case LM_PART_Q_A:
        return shape(dim, low, a->q_rank, c->width);
    case LM_PART_Q_A_NORM:
        return shape(dim, low, a->q_rank, 0);
    case LM_PART_Q_B:
        return shape(dim, low, y->heads * y->head_dim, a->q_rank);
    case LM_PART_KV_A:
        return shape(dim, latent, a->kv_rank + a->rope_dim, c->width);
    case LM_PART_KV_A_NORM:
        return shape(dim, latent, a->kv_rank, 0);
    case LM_PART_KV_B:
        return shape(dim, latent, y->heads * (a->nope_dim + a->value_dim), a->kv_rank);
    default:
        return false;
    }
}

bool lm_part_shape(const lm_config *c, lm_part part, int64_t l, int64_t dim[2])
{
    const lm_layer *y = part >= LM_PART_ATTN_NORM ? &c->layer[l] : NULL;
    int64_t q = y ? y->heads * y->head_dim : 0, kv = y ? y->kv_heads * y->head_dim : 0;
    bool heads = y && lm_layer_has_heads(y);
    bool retains =
        y && y->attention == LM_ATTENTION_LINEAR && y->linear.feature == LM_FEATURE_IDENTITY;

    if (y && of_attention(part) && !has_part(y, part))
        return false;
    switch (part) {
    case LM_PART_EMBED:
        return shape(dim, true, c->vocab, c->width);
    case LM_PART_POSITION:
        return shape(dim, lm_config_has_positions(c), c->max_positions, c->width);
    case LM_PART_OUTPUT:
        return shape(dim, !c->tied && !c->scores, c->vocab, c->width);
    case LM_PART_TYPES:
        return shape(dim, c->types > 0, c->types, c->width);
    case LM_PART_EMBED_NORM:
        return shape(dim, c->embed_norm, c->width, 0);
    case LM_PART_HEAD_DENSE:
        return shape(dim, c->head_transform, c->width, c->width);
    case LM_PART_HEAD_NORM:
        return shape(dim, c->head_transform, c->width, 0);
    case LM_PART_HEAD_BIAS:
        return shape(dim, c->head_transform, c->vocab, 0);
    case LM_PART_POOLER:
        return shape(dim, c->pairs, c->width, c->width);
    case LM_PART_PAIR:
        return shape(dim, c->pairs, 2, c->width);
    case LM_PART_OUTPUT_NORM:
        return shape(dim, !c->layer[c->layers - 1].norm_sum, c->width, 0);
    case LM_PART_ATTN_NORM:
    case LM_PART_MLP_NORM:
        return shape(dim, y->norm_before, c->width, 0);
    case LM_PART_ATTN_POST_NORM:
    case LM_PART_MLP_POST_NORM:
        return shape(dim, y->norm_after || y->norm_sum, c->width, 0);
    case LM_PART_Q:
        return shape(dim, heads || !y->latent.q_rank, y->out_gate ? 2 * q : q, c->width);
    case LM_PART_K:
    case LM_PART_V:
        return shape(dim, heads, kv, c->width);
    case LM_PART_QKV:
        return shape(dim, heads, q + 2 * kv, c->width);
    case LM_PART_Q_A:
    case LM_PART_Q_A_NORM:
    case LM_PART_Q_B:
    case LM_PART_KV_A:
    case LM_PART_KV_A_NORM:
    case LM_PART_KV_B:
        return latent_shape(c, part, y, dim);
    case LM_PART_Q_NORM:
        return shape(dim, y->qk_norm != LM_QK_PLAIN, y->qk_norm == LM_QK_NORM_ROW ? q : y->head_dim,
                     0);
    case LM_PART_K_NORM:
        return shape(dim, y->qk_norm != LM_QK_PLAIN,
                     y->qk_norm == LM_QK_NORM_ROW ? kv : y->head_dim, 0);
    case LM_PART_DELTA_IN:
    case LM_PART_DELTA_GATES:
    case LM_PART_DELTA_QKV:
    case LM_PART_DELTA_Z:
    case LM_PART_DELTA_B:
    case LM_PART_DELTA_A:
    case LM_PART_DELTA_CONV:
    case LM_PART_DELTA_LOG:
    case LM_PART_DELTA_DT:
    case LM_PART_DELTA_NORM:
    case LM_PART_DELTA_OUT:
        return delta_shape(c, &y->delta, part, dim);
    case LM_PART_LINEAR_GATE:
        return shape(dim, retains, q, c->width);
    case LM_PART_LINEAR_NORM:
        return shape(dim, retains, y->head_dim, 0);
    case LM_PART_ATTN_OUT:
        return shape(dim, true, c->width, y->heads * lm_layer_value_dim(y));
    case LM_PART_SINKS:
        return shape(dim, y->sinks, y->heads, 0);
    case LM_PART_GATE:
        return shape(dim, !y->moe.experts && lm_mlp_gated(y->mlp), y->ffn, c->width);
    case LM_PART_UP:
        return shape(dim, !y->moe.experts, y->ffn, c->width);
    case LM_PART_DOWN:
        return shape(dim, !y->moe.experts, c->width, y->ffn);
    case LM_PART_ROUTER:
        return shape(dim, y->moe.experts, y->moe.experts, c->width);
    case LM_PART_ROUTER_NOISE:
        return shape(dim, y->moe.noisy, y->moe.experts, c->width);
    case LM_PART_EXPERT_GATE:
    case LM_PART_EXPERT_UP:
        return shape(dim, y->moe.experts && !y->moe.stacked, y->moe.ffn, c->width);
    case LM_PART_EXPERT_DOWN:
        return shape(dim, y->moe.experts && !y->moe.stacked, c->width, y->moe.ffn);
    case LM_PART_STACK_IN:
        return shape(dim, y->moe.stacked, 2 * y->moe.ffn, c->width);
    case LM_PART_STACK_OUT:
        return shape(dim, y->moe.stacked, c->width, y->moe.ffn);
    case LM_PART_SHARED_GATE:
    case LM_PART_SHARED_UP:
        return shape(dim, y->moe.shared, y->moe.shared, c->width);
    case LM_PART_SHARED_DOWN:
        return shape(dim, y->moe.shared, c->width, y->moe.shared);
    case LM_PART_ROUTER_BIAS:
        return shape(dim, y->moe.score_bias, y->moe.experts, 0);
    case LM_PART_SHARED_SWITCH:
        return shape(dim, y->moe.shared_gate, 1, c->width);
    case LM_PART_AHEAD_TOKEN_NORM:
    case LM_PART_AHEAD_STATE_NORM:
    case LM_PART_AHEAD_NORM:
        return shape(dim, l >= c->layers, c->width, 0);
    case LM_PART_AHEAD_JOIN:
        return shape(dim, l >= c->layers, c->width, 2 * c->width);
    case LM_PART_AHEAD_EMBED:
    case LM_PART_AHEAD_HEAD:
        return shape(dim, l >= c->layers, c->vocab, c->width);
    case LM_PART_RELATIVE:
        return shape(dim, y->buckets && !l, y->buckets, y->heads);
    case LM_PART_CROSS_NORM:
        return shape(dim, y->cross, c->width, 0);
    case LM_PART_CROSS_Q:
        return shape(dim, y->cross, q, c->width);
    case LM_PART_CROSS_K:
    case LM_PART_CROSS_V:
        return shape(dim, y->cross, kv, c->width);
    case LM_PART_CROSS_OUT:
        return shape(dim, y->cross, c->width, q);
    }
    return false;
}

/* ---- The walk ---- */

const char *lm_tensor_stem(const lm_arch *a, lm_part part, int64_t layer, char out[LM_TENSOR_NAME])
{
    const char *name = lm_arch_part(a, part)->hf;

    if (layer == LM_LAYER_AHEAD)
        snprintf(out, LM_TENSOR_NAME, "%s%s%s", a->ahead,
                 part >= LM_PART_AHEAD_EMBED ? "" : "layers.0.", name);
    else if (layer < 0)
        snprintf(out, LM_TENSOR_NAME, "%s", name);
    else
        snprintf(out, LM_TENSOR_NAME, "%s%" PRId64 ".%s", a->layers + strlen(a->root), layer, name);
    return out;
}

static const char *suffix_of(lm_part part, bool bias)
{
    if (lm_part_is_stack(part))
        return bias ? "_bias" : "";
    if (lm_part_is_bare(part))
        return "";
    return bias ? ".bias" : ".weight";
}

const char *lm_expert_hf_name(const lm_arch *a, lm_part part, int64_t layer, int64_t expert,
                              bool bias, char out[LM_TENSOR_NAME])
{
    char stem[LM_TENSOR_NAME], number[24] = "";
    const bool rootless =
        layer == LM_LAYER_AHEAD || (part >= LM_PART_OUTPUT && part < LM_PART_ATTN_NORM);
    const char *root = rootless ? "" : a->root;
    char *mark = strchr(lm_tensor_stem(a, part, layer, stem), '#') ? strchr(stem, '#') : NULL;

    if (mark) {
        snprintf(number, sizeof number, "%" PRId64, expert);
        *mark++ = 0;
    }
    snprintf(out, LM_TENSOR_NAME, "%s%.70s%s%.20s%s", root, stem, number, mark ? mark : "",
             suffix_of(part, bias));
    return out;
}

const char *lm_tensor_hf_name(const lm_arch *a, lm_part part, int64_t layer, bool bias,
                              char out[LM_TENSOR_NAME])
{
    return lm_expert_hf_name(a, part, layer, 0, bias, out);
}

bool lm_part_in_gguf(const lm_arch *a, lm_part part)
{
    const lm_tensor_name *row = lm_arch_part(a, part);
    return row && *row->gguf;
}

const char *lm_tensor_gguf_name(const lm_arch *a, lm_part part, int64_t layer, bool bias,
                                char out[LM_TENSOR_NAME])
{
    const char *name = lm_arch_part(a, part)->gguf;
    const bool added = bias || part == LM_PART_DELTA_DT || part == LM_PART_ROUTER_BIAS;
    const char *suffix = added ? ".bias" : ".weight";

    if (!*name) { /* llama.cpp has no such tensor */
        *out = 0;
        return out;
    }
    if (part == LM_PART_DELTA_LOG) /* as llama.cpp has it */
        suffix = "";

    if (layer < 0)
        snprintf(out, LM_TENSOR_NAME, "%s%s", name, suffix);
    else
        snprintf(out, LM_TENSOR_NAME, "%sblk.%" PRId64 ".%s%s", a->gguf_stack ? a->gguf_stack : "",
                 layer, name, suffix);
    return out;
}

static void set_names(const lm_config *c, const lm_tensor_name *row, lm_model_tensor *t)
{
    lm_expert_hf_name(c->arch, row->part, lm_config_named_layer(c, t->layer), t->expert, t->bias,
                      t->hf);
    lm_tensor_gguf_name(c->arch, row->part, t->layer, t->bias, t->gguf);
}

/* The order of value heads, where a key head has several. */
static void set_tiles(const lm_config *c, int64_t layer, lm_model_tensor *t)
{
    const bool rows = t->part >= LM_PART_DELTA_QKV && t->part <= LM_PART_DELTA_DT;
    if (!c->arch->gguf_tiled || layer < 0 || !(rows || t->part == LM_PART_DELTA_OUT))
        return;
    const lm_delta_sizes *d = &c->layer[layer].delta;
    if (d->heads == d->key_heads)
        return;
    t->order = rows ? LM_ORDER_TILED : LM_ORDER_TILED_COLS;
    t->heads = d->heads;
    t->groups = d->key_heads;
    if (t->part == LM_PART_DELTA_QKV || t->part == LM_PART_DELTA_CONV)
        t->lead = 2 * d->key_heads * d->key_dim;
}

static lm_model_tensor weight_of(const lm_config *c, const lm_tensor_name *row, int64_t layer,
                                 const int64_t dim[2])
{
    const lm_arch *a = c->arch;
    bool q = row->part == LM_PART_Q, pairs = a->gguf_pairs && (q || row->part == LM_PART_K);
    bool turned = a->conv1d && layer >= 0 && dim[1];
    bool by_head = row->part == LM_PART_QKV && c->layer[layer].qkv_by_head;
    lm_model_tensor t = { .ndim = dim[1] ? 2 : 1,
                          .dim = { dim[turned], dim[!turned] },
                          .order = pairs     ? LM_ORDER_ROPE
                                   : by_head ? LM_ORDER_QKV
                                   : turned  ? LM_ORDER_CONV1D
                                             : LM_ORDER_SAME,
                          .part = row->part,
                          .layer = layer,
                          .plus_one = lm_part_plus_one(c, row->part),
                          .exponent = row->part == LM_PART_DELTA_LOG };

    if (row->part == LM_PART_DELTA_CONV) {
        t.ndim = 3;
        t.dim[1] = 1;
        t.dim[2] = dim[1];
    }

    set_tiles(c, layer, &t);
    if (pairs)
        t.heads = q ? c->layer[layer].heads : c->layer[layer].kv_heads;
    if (by_head)
        t.heads = c->layer[layer].heads;
    return t;
}

/* One tensor with the matrices of all experts, each turned. */
static void set_stack(lm_model_tensor *t, int64_t experts, const int64_t dim[2])
{
    t->ndim = 3;
    t->dim[0] = t->experts = experts;
    t->dim[1] = dim[1];
    t->dim[2] = dim[0];
}

static lm_code see_one(const lm_config *c, const lm_tensor_name *row, int64_t layer, int64_t expert,
                       const int64_t dim[2], lm_code (*see)(void *, const lm_model_tensor *),
                       void *ctx)
{
    lm_model_tensor t = weight_of(c, row, layer, dim);
    t.expert = expert;
    t.experts = lm_part_is_expert(row->part) ? lm_part_count(c, row->part, layer) : 0;
    set_names(c, row, &t);
    if (lm_part_is_stack(row->part))
        set_stack(&t, lm_part_count(c, row->part, layer), dim);
    lm_code rc = see(ctx, &t);
    if (rc || !lm_part_biased(c, row->part, layer))
        return rc;
    t.bias = true;
    t.ndim = 1;
    t.dim[0] = dim[0];
    t.dim[1] = 0;
    if (lm_part_is_stack(row->part)) {
        t.ndim = 2;
        t.dim[0] = t.experts;
        t.dim[1] = dim[0];
    }
    t.order = t.order == LM_ORDER_CONV1D ? LM_ORDER_SAME : t.order;
    set_names(c, row, &t);
    return see(ctx, &t);
}

static lm_code see_part(const lm_config *c, const lm_tensor_name *row, int64_t layer,
                        lm_code (*see)(void *, const lm_model_tensor *), void *ctx)
{
    int64_t dim[2];
    lm_code rc = LM_OK;
    if (!lm_part_shape(c, row->part, layer, dim))
        return LM_OK;
    for (int64_t e = 0;
         !rc && e < (lm_part_is_stack(row->part) ? 1 : lm_part_count(c, row->part, layer)); e++)
        rc = see_one(c, row, layer, e, dim, see, ctx);
    return rc;
}

/* The tensors of layers [from, to). */
static lm_code see_layers(const lm_config *c, int64_t from, int64_t to,
                          lm_code (*see)(void *, const lm_model_tensor *), void *ctx)
{
    lm_code rc = LM_OK;
    for (int64_t l = from; l < to; l++)
        for (const lm_tensor_name *row = c->arch->tensors; !rc && row->part; row++)
            if (row->part >= LM_PART_ATTN_NORM && !lm_part_is_copy(row->part))
                rc = see_part(c, row, l, see, ctx);
    return rc;
}

/* The layers of a config, and what is behind them. */
static lm_code see_stack(const lm_config *c, lm_code (*see)(void *, const lm_model_tensor *),
                         void *ctx)
{
    const lm_tensor_name *row = c->arch->tensors;
    lm_code rc = see_layers(c, 0, c->layers, see, ctx);

    while (row->part && row->part < LM_PART_OUTPUT_NORM)
        row++;
    while (row->part >= LM_PART_ATTN_NORM)
        row++;
    for (; !rc && row->part; row++)
        rc = see_part(c, row, -1, see, ctx);
    return rc;
}

lm_code lm_model_tensors_walk(const lm_config *c, lm_code (*see)(void *, const lm_model_tensor *),
                              void *ctx)
{
    const lm_tensor_name *row = c->arch->tensors;
    lm_code rc = LM_OK;

    for (; !rc && row->part && row->part < LM_PART_OUTPUT_NORM; row++)
        rc = see_part(c, row, -1, see, ctx);
    if (!rc && c->encoder)
        rc = see_stack(c->encoder, see, ctx);
    return rc ? rc : see_stack(c, see, ctx);
}

lm_code lm_ahead_tensors_walk(const lm_config *c, lm_code (*see)(void *, const lm_model_tensor *),
                              void *ctx)
{
    return see_layers(c, c->layers, lm_config_depth(c), see, ctx);
}

/* ---- Counts ---- */

typedef struct {
    int64_t all, active, matmul;
} counts;

static void count_part(const lm_config *c, lm_part part, int64_t layer, counts *n)
{
    int64_t dim[2];

    if (!lm_part_shape(c, part, layer, dim))
        return;
    int64_t weight = dim[0] * (dim[1] ? dim[1] : 1), of = lm_part_count(c, part, layer);
    int64_t one = weight + (lm_part_biased(c, part, layer) ? dim[0] : 0);
    bool some = lm_part_is_expert(part) || lm_part_is_stack(part);
    int64_t met = some ? c->layer[layer].moe.chosen : 1;
    n->all += one * of;
    n->active += one * met;
    n->matmul += dim[1] && (layer >= 0 || part == LM_PART_HEAD_DENSE) && part != LM_PART_RELATIVE
                     ? weight * met
                     : 0;
}

static void count_stack(const lm_config *c, counts *n)
{
    for (const lm_tensor_name *row = c->arch->tensors; row->part; row++)
        if (row->part < LM_PART_ATTN_NORM)
            count_part(c, row->part, -1, n);
        else
            for (int64_t l = 0; l < c->layers; l++)
                count_part(c, row->part, l, n);
}

static counts counts_of(const lm_config *c)
{
    counts n = { .matmul = c->vocab * c->width };

    if (c->encoder)
        count_stack(c->encoder, &n);
    count_stack(c, &n);
    return n;
}

int64_t lm_config_ahead_params(const lm_config *c)
{
    counts n = { 0 };
    for (const lm_tensor_name *row = c->arch->tensors; row->part; row++)
        for (int64_t l = c->layers; l < lm_config_depth(c); l++)
            if (row->part >= LM_PART_ATTN_NORM && !lm_part_is_copy(row->part))
                count_part(c, row->part, l, &n);
    return n.all;
}

int64_t lm_config_params(const lm_config *c)
{
    return counts_of(c).all;
}

int64_t lm_config_active_params(const lm_config *c)
{
    return counts_of(c).active;
}

int64_t lm_config_matmul_params(const lm_config *c)
{
    return counts_of(c).matmul;
}

/* The part of the pairs of a text of `seq` tokens that blocks leave. */
static double seen_share(const lm_layer *y, int64_t seq)
{
    if (seq < 1)
        return 1;
    return lm_attention_block_pairs(&y->blocks, y->heads, seq) /
           ((double)seq * (double)(seq + 1) / 2);
}

static bool same_blocks(const lm_layer *x, const lm_layer *y)
{
    const lm_attention_blocks *a = &x->blocks, *b = &y->blocks;
    return x->heads == y->heads && a->size == b->size && a->local == b->local &&
           a->global == b->global && a->stride == b->stride && a->homogeneous == b->homogeneous;
}

/* Pairs of a layer by its window. */
static double pairs_of(int64_t window, int n, const int64_t known[LM_MOST_WINDOWS], double pairs,
                       const double near[LM_MOST_WINDOWS])
{
    for (int i = 0; window > 0 && i < n; i++)
        if (known[i] == window || i == n - 1)
            return near[i];
    return pairs;
}

/* seq: of a text, the mean. */
static double pair_flops(const lm_config *c, double tokens, double pairs,
                         const double near[LM_MOST_WINDOWS], int64_t seq)
{
    int64_t known[LM_MOST_WINDOWS];
    const int n = lm_config_windows(c, known);
    double all = 0, share = 1;
    const lm_layer *counted = NULL; /* a layer of that share */
    for (int64_t l = 0; l < c->layers; l++) {
        const lm_layer *y = &c->layer[l];
        if (y->blocks.size && !(counted && same_blocks(counted, y))) {
            share = seen_share(y, seq);
            counted = y;
        }
        if (y->attention ==
            LM_ATTENTION_DELTA) /* three products of a key or query with the state */
            all += 1.5 * (double)(y->delta.heads * y->delta.key_dim * y->delta.value_dim) * tokens;
        else if (y->attention == LM_ATTENTION_LINEAR) /* one of a query, and one of a key */
            all += 0.5 * (double)((y->heads + y->kv_heads) * y->head_dim * y->head_dim) * tokens;
        else
            all += (double)(y->heads * (lm_layer_key_dim(y) + lm_layer_value_dim(y))) / 2 *
                   pairs_of(y->window, n, known, pairs * (y->blocks.size ? share : 1), near);
    }
    return 6.0 * (double)lm_config_matmul_params(c) * tokens + 12.0 * all;
}

double lm_config_train_flops(const lm_config *c, int64_t seq)
{
    const double near[LM_MOST_WINDOWS] = { (double)seq, (double)seq };
    return pair_flops(c, 1, (double)seq, near, seq);
}

double lm_config_pair_flops(const lm_config *c, double tokens, double pairs,
                            const double near[LM_MOST_WINDOWS])
{
    return pair_flops(c, tokens, pairs, near, tokens > 0 ? (int64_t)(2 * pairs / tokens) : 0);
}
