/* SPDX-License-Identifier: Apache-2.0 */
/* build_cache.c -- attention through caches: plain ones, or coded pages with plain tails. */
#include <inttypes.h>
#include <stdio.h>

#include "kernels/kv.h"
#include "kv/spec.h"
#include "model/build.h"
#include "op/ops.h"

static const char where[] = "kv cache";
static const char *const side_name[2] = { "keys", "values" };

/* ---- what a plan asks ---- */

bool lm_b_coded(const lm_build *b, int64_t layer)
{
    const lm_kv_side *s = b->kv && layer < b->kv->layers ? &b->kv->side[2 * layer] : NULL;
    if (lm_b_kept(b, layer))
        return !b->whole;
    return s && (s[LM_KV_K].format || s[LM_KV_V].format);
}

bool lm_b_tailed(const lm_build *b, int64_t layers)
{
    for (int64_t i = 0; b->kv && i < 2 * layers; i++)
        if (b->kv->side[i].format && b->kv->side[i].residual + b->kv->side[i].sinks > 0)
            return true;
    return false;
}

bool lm_b_rotates_late(const lm_build *b, int64_t layer)
{
    return b->mode == LM_MODE_GENERATE &&
           (lm_b_ranked(b, layer) ||
            (lm_b_coded(b, layer) && b->kv->side[2 * layer + LM_KV_K].pre_rope));
}

static lm_code check_side(const lm_build *b, int64_t layer, int side, lm_err *e)
{
    const lm_kv_side *s = &b->kv->side[2 * layer + side];
    if (!s->format && s->plain != b->precision.low)
        return lm_fail(e, LM_EUSAGE, where, "give auto, or compute in that type",
                       "%s of layer %" PRId64 " would be %s, but activations are %s",
                       side_name[side], layer, lm_dtype_name(s->plain),
                       lm_dtype_name(b->precision.low));
    if (s->pre_rope && b->kv->policy && !b->kv->policy->ranked)
        return lm_fail(e, LM_EUSAGE, where, "leave the policy out, or choose another method",
                       "%s of layer %" PRId64
                       ": a policy has no place for keys that are stored before their rotation",
                       side_name[side], layer);
    return LM_OK;
}

/* Tokens of which some were dropped no longer lie at their distances. */
static lm_code check_distances(const lm_config *c, const lm_build *b, int64_t layer, lm_err *e)
{
    if (!c->layer[layer].alibi || !b->kv->policy)
        return LM_OK;
    return lm_fail(e, LM_EUSAGE, where, "leave the policy out",
                   "scores of layer %" PRId64
                   " depend on the distance of tokens, of which a policy drops some",
                   layer);
}

/* Operators of coded caches and of policies read all tokens. */
static lm_code check_blocks(const lm_config *c, const lm_build *b, int64_t layer, lm_err *e)
{
    if (!c->layer[layer].blocks.size || !(lm_b_coded(b, layer) || b->kv->policy))
        return LM_OK;
    return lm_fail(e, LM_EUSAGE, where, "leave this layer's caches plain, and the policy out",
                   "layer %" PRId64
                   " has block-sparse attention, which reads plain caches of all tokens alone",
                   layer);
}

/* Codes of latents are read by heads that absorb the matrix behind them. */
static lm_code check_latent(const lm_config *c, const lm_build *b, int64_t layer, lm_err *e)
{
    if (c->layer[layer].attention != LM_ATTENTION_LATENT)
        return LM_OK;
    if (lm_b_kept(b, layer) &&
        (b->kv->policy->kind == LM_KV_H2O || b->kv->policy->kind == LM_KV_MERGE))
        return lm_fail(e, LM_EUSAGE, where, "choose streaming, snapkv or random",
                       "layer %" PRId64 " keeps latents, %s", layer,
                       b->kv->policy->kind == LM_KV_H2O
                           ? "of which new tokens add up no masses"
                           : "which are not merged: a latent is read by all heads");
    if (!lm_b_coded(b, layer) && !lm_b_kept(b, layer))
        return LM_OK;
    if (b->adapt)
        return lm_fail(e, LM_EUSAGE, where, "use auto, or merge the adapter into the model",
                       "layer %" PRId64
                       ": with an adapter keys and values are kept, not the latent that is coded",
                       layer);
    if (c->layer[layer].latent.kv_rank % 4)
        return lm_fail(e, LM_EUSAGE, where, "use auto",
                       "layer %" PRId64 ": latents of %" PRId64
                       " numbers, of which codes need a multiple of 4",
                       layer, c->layer[layer].latent.kv_rank);
    if (b->kv->side[2 * layer + LM_KV_K].pre_rope)
        return lm_fail(
            e, LM_EUSAGE, where, "choose another method",
            "layer %" PRId64 " keeps latents, whose keys are stored behind their rotation", layer);
    return LM_OK;
}

/* Keys with norms behind them likewise: a code of few bits would lose the digits of the norms. */
static lm_code check_norms(const lm_config *c, const lm_build *b, int64_t layer, lm_err *e)
{
    if (c->layer[layer].weigh == LM_WEIGH_SOFTMAX || !(lm_b_coded(b, layer) || lm_b_kept(b, layer)))
        return LM_OK;
    return lm_fail(e, LM_EUSAGE, where, "use auto, or leave it out",
                   "layer %" PRId64
                   " has Gaussian attention, whose keys have no coded form and no policy",
                   layer);
}

static bool has_kernel(const lm_build *b, const char *op)
{
    return !b->backend || b->backend->kernel(b->backend, op, b->precision.low);
}

/* A state is rows of heads, each of which is coded by itself. */
static lm_code check_states(const lm_config *c, const lm_build *b, lm_err *e)
{
    static const char states[] = "states";
    bool coded = false;
    for (int64_t l = 0; l < c->layers; l++) {
        const lm_kv_side *s = &b->state_codes->side[2 * l + LM_KV_K];
        const lm_delta_sizes *d = &c->layer[l].delta;
        lm_kv_sections at;
        if (c->layer[l].attention != LM_ATTENTION_DELTA)
            continue;
        if (!s->format && s->plain != LM_DTYPE_F32)
            return lm_fail(e, LM_EUSAGE, states, "give auto, or a method that codes",
                           "of layer %" PRId64 " would be %s: what is not coded is f32", l,
                           lm_dtype_name(s->plain));
        if (!s->format)
            continue;
        if (s->residual || s->sinks || s->rotate || s->pre_rope || s->outliers >= 0 ||
            s->format->outliers || s->format->lower || s->format->head ||
            lm_kv_step(s->format, d->key_dim) > 1)
            return lm_fail(e, LM_EUSAGE, states,
                           "choose int8, fp8, or another one that codes rows, with rotate=off",
                           "%s does not code each row by itself", s->format->name);
        if (d->value_dim % 16 || lm_kv_page(s->format, d->key_dim, d->value_dim, &at, NULL))
            return lm_fail(e, LM_EUSAGE, states, "leave them f32",
                           "of %" PRId64 " rows of %" PRId64
                           " numbers have no coded form: 16, 32 or 64 N rows of 16 N numbers have",
                           d->key_dim, d->value_dim);
        coded = true;
    }
    if (coded && b->backend && !b->backend->host_memory)
        return lm_fail(e, LM_EUSAGE, states, "leave them f32, or use the CPU",
                       "%s has no kernels for coded states", b->backend->name);
    return LM_OK;
}

lm_code lm_b_check_cache(const lm_config *c, const lm_build *b, lm_err *e)
{
    bool coded = false;
    if (b->state_codes && check_states(c, b, e))
        return e->code;
    if (!b->kv)
        return LM_OK;
    if (b->kv->layers != c->layers)
        return lm_fail(e, LM_EBUG, where, NULL, "is for %" PRId64 " layers, not %" PRId64,
                       b->kv->layers, c->layers);
    if (b->kv->policy && !b->kept)
        return lm_fail(e, LM_EUSAGE, where, "leave the policy out",
                       "tokens are dropped from caches of one text alone");
    for (int64_t l = 0; l < c->layers; l++) {
        if (b->kv->policy && c->layer[l].attention == LM_ATTENTION_LINEAR)
            return lm_fail(
                e, LM_EUSAGE, where, "leave the policy out",
                "layer %" PRId64 " has linear attention, beside which no tokens are dropped", l);
        if (lm_layer_has_state(&c->layer[l]))
            continue;
        if (check_side(b, l, LM_KV_K, e) || check_side(b, l, LM_KV_V, e) ||
            check_latent(c, b, l, e) || check_norms(c, b, l, e) || check_distances(c, b, l, e) ||
            check_blocks(c, b, l, e))
            return e->code;
        coded |= lm_b_coded(b, l);
    }
    if (coded && b->rows && b->page != b->kv->page)
        return lm_fail(e, LM_EBUG, where, NULL, "has pages of %" PRId64 " tokens, not %" PRId64,
                       b->kv->page, b->page);
    if (coded && !has_kernel(b, "kv_attention"))
        return lm_fail(e, LM_EUSAGE, where, "use plain caches, or another device",
                       "%s has no kernels for coded caches", b->backend->name);
    if (b->kv->policy && !(has_kernel(b, "kv_mass") && has_kernel(b, "kv_gather")))
        return lm_fail(e, LM_EUSAGE, where, "leave the policy out, or use another device",
                       "%s has no kernels for policies", b->backend->name);
    return LM_OK;
}

/* ---- caches ---- */

lm_vid lm_b_cache(lm_builder *b, int64_t layer, lm_cache_kind kind, const char *word,
                  lm_tensor shape)
{
    lm_model *m = b->m;
    lm_cache_state made = { .value = LM_NONE,
                            .kind = kind,
                            .layer = layer,
                            .paged = kind == LM_CACHE_KEYS || kind == LM_CACHE_VALUES };
    char name[64];
    snprintf(name, sizeof name, "layers.%d.%s", (int)layer, word);
    if (!lm_b_ok(b) ||
        lm_grow(&m->cache, &b->cap_caches, (size_t)m->n_caches + 1, sizeof *m->cache, "caches",
                b->e) ||
        lm_graph_value(m->graph, LM_ROLE_STATE, shape, name, &made.value, b->e))
        return LM_NONE;
    m->cache[m->n_caches++] = made;
    return made.value;
}

static lm_vid plain_attention(lm_builder *b, int64_t layer, lm_vid qkv, lm_vid sinks, lm_vid bias,
                              const lm_attention_attr *attr)
{
    lm_model *m = b->m;
    lm_tensor shape = { .dtype = LM_DTYPE_F32,
                        .ndim = 4,
                        .dim = { attr->batch, attr->kv_heads, m->build.cache, attr->head_dim } };
    if (m->build.rows) {
        shape.dim[0] = m->build.pages;
        shape.dim[2] = m->build.page;
    }
    lm_vid keys = lm_b_cache(b, layer, LM_CACHE_KEYS, "keys", shape);
    lm_vid values = LM_SKIP; /* those of latents are part of their keys */
    if (!lm_b_absorbs(b, layer)) {
        shape.dim[3] = attr->value_dim ? attr->value_dim : attr->head_dim;
        values = lm_b_cache(b, layer, LM_CACHE_VALUES, "values", shape);
    }
    lm_vid table = m->build.rows ? m->table : LM_NONE;
    lm_vid in[] = { qkv, m->used, m->fresh, m->first, m->kind, table, sinks, bias };
    bool weighs = m->kept && m->kept[layer].mass >= 0;
    lm_vid out[4] = { LM_NONE, keys, values, weighs ? LM_NONE : LM_SKIP };
    if (!lm_b_ok(b) || lm_graph_append(m->graph, &lm_op_attention_cached, attr, in, out, b->e))
        return LM_NONE;
    lm_kv_mass_attr mass = { .attention = *attr, .latent = lm_b_absorbs(b, layer) };
    mass.attention.value_dim = 0;
    if (weighs && lm_b_add_masses(b, layer, &mass, qkv, out[3], keys, LM_NONE) < 0)
        return LM_NONE;
    return out[0];
}

/* Pages and tails of a layer. */
typedef struct {
    lm_vid pages[2], tail[2]; /* of keys, of values; LM_NONE: no tail */
} coded_cache;

static void make_coded(lm_builder *b, int64_t layer, const lm_kv_attr *a, coded_cache *out)
{
    static const lm_cache_kind pages_of[2] = { LM_CACHE_KEYS, LM_CACHE_VALUES };
    static const lm_cache_kind tail_of[2] = { LM_CACHE_KEY_TAIL, LM_CACHE_VALUE_TAIL };
    static const char *const tail_name[2] = { "keys.tail", "values.tail" };
    const lm_build *o = &b->m->build;
    const lm_attention_attr *x = &a->attention;
    bool kept = lm_b_kept(o, layer);
    int64_t own =
        x->batch * (kept ? lm_b_kept_pages(o, layer) : (o->cache + o->kv->page - 1) / o->kv->page);
    for (int side = 0; side < 2; side++) {
        lm_tensor pages = {
            .dtype = LM_DTYPE_F32,
            .ndim = 4,
            .dim = { o->rows ? o->pages : own, x->kv_heads, o->kv->page, lm_kv_side_dim(a, side) },
            .kv = o->kv->side[2 * layer + side].format,
        };
        lm_tensor tail = { .dtype = LM_DTYPE_F32,
                           .ndim = 4,
                           .dim = { o->rows ? o->slots : x->batch, x->kv_heads,
                                    a->residual[side] + a->sinks[side], lm_kv_side_dim(a, side) } };
        out->pages[side] = lm_b_cache(b, layer, pages_of[side], side_name[side], pages);
        out->tail[side] =
            tail.dim[2] ? lm_b_cache(b, layer, tail_of[side], tail_name[side], tail) : LM_NONE;
    }
}

lm_kv_attr lm_b_kv_attr(const lm_build *b, int64_t layer, const lm_attention_attr *attr)
{
    lm_kv_attr a = { .attention = *attr };
    for (int i = 0; i < 2; i++) {
        const lm_kv_side *side = &b->kv->side[2 * layer + i];
        a.residual[i] = side->format ? side->residual : 0;
        a.sinks[i] = side->format ? side->sinks : 0;
    }
    const lm_kv_side *values = &b->kv->side[2 * layer + LM_KV_V];
    a.token_range = values->format && values->outliers >= 0;
    a.outliers = a.token_range ? values->outliers : 0;
    return a;
}

/* Heads of x, rotated as the sides of a layer are stored. */
static lm_vid rotate(lm_builder *b, const lm_head_rotate_attr *a, lm_vid x)
{
    return a->q || a->k || a->v ? lm_b_append(b, &lm_op_head_rotate, a, &x) : x;
}

/* New rows are read as they are, then stored, from before their rotation by positions if it comes late; heads that
 * were rotated when they were stored are rotated back behind the sum, and queries are rotated as keys are. */
static lm_vid coded_attention(lm_builder *b, int64_t layer, lm_vid qkv, lm_vid sinks, lm_vid bias,
                              const lm_attention_attr *attr)
{
    lm_model *m = b->m;
    const lm_kv_side *side = &m->build.kv->side[2 * layer];
    const bool latent = lm_b_absorbs(b, layer);
    lm_kv_attr a = lm_b_kv_attr(&m->build, layer, attr);
    const bool keys = side[LM_KV_K].rotate, values = side[LM_KV_V].rotate;
    lm_head_rotate_attr into = {
        attr->heads, attr->kv_heads, attr->head_dim, keys, keys, values, 0
    };
    lm_head_rotate_attr back = { attr->heads, 0, attr->head_dim, values, false, false, 0 };
    const bool kept = lm_b_kept(&m->build, layer), weighs = kept && m->kept[layer].mass >= 0;
    const lm_vid used = kept ? m->kept[layer].used : m->used;
    const lm_vid table = kept ? m->kept[layer].table : m->table;
    coded_cache c;
    lm_vid o[2] = { LM_NONE, weighs ? LM_NONE : LM_SKIP };
    if (latent) { /* the row of a token beside its queries; sums are of what was rotated */
        a.latent = true;
        into = (lm_head_rotate_attr){
            .heads = attr->heads + 1, .head_dim = attr->head_dim, .q = keys, .part = attr->value_dim
        };
        back =
            (lm_head_rotate_attr){ .heads = attr->heads, .head_dim = attr->value_dim, .q = keys };
    }
    make_coded(b, layer, &a, &c);
    lm_vid slot = c.tail[0] >= 0 || c.tail[1] >= 0 ? m->slot : LM_NONE;
    const lm_vid rows = rotate(b, &into, qkv);
    const bool late = lm_b_rotates_late(&m->build, layer);
    const lm_vid rope = late ? m->rope[m->config.layer[layer].rope] : LM_NONE;
    const lm_vid ranks = lm_b_ranked(&m->build, layer) ? m->ranks : LM_NONE;
    qkv = late ? lm_b_rope(b, layer, rows) : rows;
    lm_vid in[] = { qkv,  used,      m->fresh,  m->first, m->kind, table, c.pages[0], c.pages[1],
                    slot, c.tail[0], c.tail[1], rope,     ranks,   sinks, bias };
    lm_vid write[] = {
        rows, used, m->fresh, m->first, table, slot, kept ? m->kept[layer].row : LM_NONE
    };
    lm_vid stored[] = { c.pages[0], c.pages[1], c.tail[0] >= 0 ? c.tail[0] : LM_SKIP,
                        c.tail[1] >= 0 ? c.tail[1] : LM_SKIP };
    const lm_kv_mass_attr mass = { *attr, a.residual[LM_KV_K], a.sinks[LM_KV_K], false };
    if (!lm_b_ok(b) || lm_graph_append(m->graph, &lm_op_kv_attention, &a, in, o, b->e) ||
        (weighs && lm_b_add_masses(b, layer, &mass, qkv, o[1], c.pages[0], c.tail[0]) < 0) ||
        lm_graph_append(m->graph, &lm_op_kv_write, &a, write, stored, b->e))
        return LM_NONE;
    return rotate(b, &back, o[0]);
}

/* Numbers of tokens that stay: attention appends the new ones, which are then put where the policy wants them.  Layers with
 * biases by distance have no policy (check_distances). */
static lm_vid kept_attention(lm_builder *b, int64_t layer, lm_vid qkv, lm_vid sinks,
                             const lm_attention_attr *attr)
{
    lm_model *m = b->m;
    const lm_kept_layer *k = &m->kept[layer];
    const lm_kv_attr a = { .attention = *attr };
    const lm_kv_mass_attr mass = { .attention = *attr };
    coded_cache c;
    make_coded(b, layer, &a, &c);
    lm_vid in[] = { qkv, k->used, m->fresh, LM_NONE, LM_NONE, k->table, sinks, LM_NONE };
    lm_vid out[] = { LM_NONE, c.pages[0], c.pages[1], k->mass >= 0 ? LM_NONE : LM_SKIP };
    lm_vid write[] = { qkv, k->used, m->fresh, LM_NONE, k->table, LM_NONE, k->row };
    lm_vid stored[] = { c.pages[0], c.pages[1], LM_SKIP, LM_SKIP };
    if (!lm_b_ok(b) || lm_graph_append(m->graph, &lm_op_attention_cached, attr, in, out, b->e) ||
        (k->mass >= 0 && lm_b_add_masses(b, layer, &mass, qkv, out[3], c.pages[0], LM_NONE) < 0) ||
        (k->row >= 0 && lm_graph_append(m->graph, &lm_op_kv_write, &a, write, stored, b->e)))
        return LM_NONE;
    return out[0];
}

/* A prompt whose tokens will be read at other positions: numbers in one page, keys from before their rotation, and token
 * j at position j. */
static lm_vid ranked_attention(lm_builder *b, int64_t layer, lm_vid rows, lm_vid sinks,
                               const lm_attention_attr *attr)
{
    lm_model *m = b->m;
    const lm_kv_attr a = { .attention = *attr };
    const lm_vid table = m->kept[layer].table, rope = m->rope[m->config.layer[layer].rope];
    lm_tensor page = { .dtype = LM_DTYPE_F32,
                       .ndim = 4,
                       .dim = { attr->batch, attr->kv_heads, (m->build.cache + 63) / 64 * 64,
                                attr->head_dim } };
    lm_vid keys = lm_b_cache(b, layer, LM_CACHE_KEYS, "keys", page);
    lm_vid values = lm_b_cache(b, layer, LM_CACHE_VALUES, "values", page);
    lm_vid in[] = { lm_b_rope(b, layer, rows),
                    m->used,
                    m->fresh,
                    LM_NONE,
                    LM_NONE,
                    table,
                    keys,
                    values,
                    LM_NONE,
                    LM_NONE,
                    LM_NONE,
                    rope,
                    LM_NONE,
                    sinks,
                    LM_NONE };
    lm_vid write[] = { rows, m->used, m->fresh, LM_NONE, table, LM_NONE, LM_NONE };
    lm_vid out[] = { LM_NONE, LM_SKIP }, stored[] = { keys, values, LM_SKIP, LM_SKIP };
    if (!lm_b_ok(b) || lm_graph_append(m->graph, &lm_op_kv_attention, &a, in, out, b->e) ||
        lm_graph_append(m->graph, &lm_op_kv_write, &a, write, stored, b->e))
        return LM_NONE;
    return out[0];
}

lm_vid lm_b_cached_attention(lm_builder *b, int64_t layer, lm_vid qkv, lm_vid sinks, lm_vid bias,
                             const lm_attention_attr *attr)
{
    const lm_build *o = &b->m->build;
    const lm_kv_side *side = o->kv ? &o->kv->side[2 * layer] : NULL;
    if (lm_b_ranked(o, layer))
        return o->whole ? ranked_attention(b, layer, qkv, sinks, attr)
                        : coded_attention(b, layer, qkv, sinks, bias, attr);
    if (lm_b_kept(o, layer) && !o->whole && !side[LM_KV_K].format && !side[LM_KV_V].format &&
        !lm_b_absorbs(b, layer))
        return kept_attention(b, layer, qkv, sinks, attr);
    return lm_b_coded(&b->m->build, layer) ? coded_attention(b, layer, qkv, sinks, bias, attr)
                                           : plain_attention(b, layer, qkv, sinks, bias, attr);
}
