/* SPDX-License-Identifier: Apache-2.0 */
/* build_encoder.c -- an encoder in front of the decoder, and the decoder's attention to it (T5, arXiv:1910.10683).
 *
 * The encoder is a stack like the decoder's, with a config of its own.  While it is built, the model's config, rows and inputs
 * are those of the encoder.  Its states become keys and values in each layer of the decoder; a graph that generates
 * reads these as caches, lm_model.memory, which a graph with build.encode has made.
 *
 * Elsewhere attention of a decoder's rows to those of its source is attention within one sequence that has both, and has
 * gradients: the rows of the source, whose queries see nothing, in front of the decoder's, whose queries see the source. */
#include <stdio.h>

#include "base/mem.h"
#include "kernels/arrange.h"
#include "kernels/distance.h"
#include "kernels/kv.h"
#include "kv/spec.h"
#include "model/build.h"
#include "op/formula.h"
#include "op/ops.h"

static bool any_coded(const lm_config *c, const lm_build *b)
{
    bool any = false;
    for (int64_t l = 0; l < c->layers; l++)
        any |= lm_b_coded(b, l);
    return any;
}

lm_code lm_b_check_encoder(const lm_config *c, const lm_build *b, lm_err *e)
{
    const char *what = b->kept                   ? "policies of caches"
                       : b->rows                 ? "pages of several texts"
                       : b->teacher || b->states ? "teachers"
                       : b->value || c->scores   ? "scores"
                       : b->documents            ? "several documents in a window"
                                                 : NULL;
    if (what && lm_config_check_alone(c, "model", what, e))
        return e->code;
    return LM_OK;
}

/* Of a graph that encodes a source into pages: where they are, and how many rows are written. */
static lm_code make_page_inputs(lm_model *m, lm_err *e)
{
    const lm_build *b = &m->build;
    lm_graph *g = m->graph;
    const lm_tensor one = lm_shape1(LM_DTYPE_I32, b->batch);
    const int64_t page = b->kv->page;
    return lm_graph_value(g, LM_ROLE_INPUT,
                          lm_shape2(LM_DTYPE_I32, b->batch, (b->source + page - 1) / page), "table",
                          &m->table, e) ||
                   lm_graph_value(g, LM_ROLE_INPUT, one, "used", &m->used, e) ||
                   lm_graph_value(g, LM_ROLE_INPUT, one, "fresh", &m->fresh, e) ||
                   (lm_b_tailed(b, m->config.layers) &&
                    lm_graph_value(g, LM_ROLE_INPUT, one, "slot", &m->slot, e))
               ? e->code
               : LM_OK;
}

lm_code lm_b_source_inputs(lm_model *m, lm_err *e)
{
    const lm_build *b = &m->build;
    const int64_t n = b->batch * b->source, all = b->batch * (b->source + b->seq);
    lm_graph *g = m->graph;
    if (b->mode == LM_MODE_GENERATE &&
        lm_graph_value(g, LM_ROLE_INPUT, lm_shape1(LM_DTYPE_I32, b->batch), "source_used",
                       &m->source_used, e))
        return e->code;
    if (b->encode && any_coded(&m->config, b) && make_page_inputs(m, e))
        return e->code;
    return lm_graph_value(g, LM_ROLE_INPUT, lm_shape1(LM_DTYPE_I32, n), "source", &m->source, e) ||
                   lm_graph_value(g, LM_ROLE_INPUT, lm_shape1(LM_DTYPE_I32, n), "source_hi",
                                  &m->source_hi, e) ||
                   lm_graph_value(g, LM_ROLE_INPUT, lm_shape1(LM_DTYPE_I32, all), "cross_hi",
                                  &m->cross_hi, e)
               ? e->code
               : LM_OK;
}

/* ---- the encoder ---- */

void lm_b_enter_encoder(lm_builder *b, lm_b_side *side)
{
    lm_model *m = b->m;
    *side = (lm_b_side){ m->config, m->build.mode, m->build.seq, m->tokens, m->lo, m->hi };
    b->whole = &side->config;
    m->config = *side->config.encoder;
    m->build.seq = m->build.source;
    if (m->build.mode == LM_MODE_GENERATE) /* it has no caches */
        m->build.mode = LM_MODE_EVAL;
    m->tokens = m->source;
    m->lo = LM_NONE;
    m->hi = m->source_hi;
}

void lm_b_leave_encoder(lm_builder *b, const lm_b_side *side)
{
    lm_model *m = b->m;
    b->whole = NULL;
    m->config = side->config;
    m->build.mode = side->mode;
    m->build.seq = side->seq;
    m->tokens = side->tokens;
    m->lo = side->lo;
    m->hi = side->hi;
}

int64_t lm_b_first_layer(const lm_builder *b)
{
    const lm_config *c = &b->m->config;
    return b->whole || !c->encoder ? 0 : c->encoder->layers;
}

/* ---- biases by distance ---- */

int64_t lm_b_farthest(const lm_builder *b)
{
    const lm_build *how = &b->m->build;
    const int64_t rows = how->mode == LM_MODE_GENERATE ? how->cache : how->seq,
                  far = b->m->config.layer[0].far;
    return far < rows ? far : rows - 1;
}

/* Columns of distances from -far on: to 0, or to far where keys behind a query are seen too. */
lm_vid lm_b_relative(lm_builder *b, lm_vid table)
{
    const lm_layer *y = &b->m->config.layer[0];
    const lm_distance_buckets buckets = { y->buckets, y->far, y->bidirectional };
    const int64_t far = lm_b_farthest(b), n = far + 1 + (y->bidirectional ? far : 0);
    const lm_distance_bias_attr attr = { LM_ACC_FIRST };
    int32_t *bucket = NULL;
    lm_vid ids = LM_NONE;
    if (!lm_b_ok(b) || lm_arena_alloc(b->arena, &bucket, (size_t)n, sizeof *bucket, b->e) ||
        lm_graph_value(b->m->graph, LM_ROLE_CONST, lm_shape1(LM_DTYPE_I32, n),
                       b->whole ? "encoder.buckets" : "buckets", &ids, b->e))
        return LM_NONE;
    for (int64_t i = 0; i < n; i++)
        bucket[i] = lm_distance_bucket(&buckets, i - far);
    lm_b_const(b, ids, NULL, bucket, n);
    return lm_b_append(b, &lm_op_distance_bias, &attr, (lm_vid[]){ table, ids });
}

/* ---- attention to it ---- */

lm_vid lm_b_seen_as(lm_builder *b, lm_vid x, int64_t rows, int64_t cols)
{
    const lm_permute_attr attr = {
        .dim = { rows * cols }, .perm = { 0 }, .ndim = 1, .to_ndim = 2, .to = { rows, cols }
    };
    return lm_b_append(b, &lm_op_permute, &attr, &x);
}

lm_vid lm_b_part_of(lm_builder *b, lm_vid x, int64_t col, int64_t rows, int64_t cols)
{
    const lm_window_attr attr = { .row = 0, .col = col, .rows = rows, .cols = cols };
    return lm_b_append(b, &lm_op_window, &attr, &x);
}

/* Rows of the source and of the decoder as sequences of both. */
static lm_vid join_rows(lm_builder *b, lm_vid source, lm_vid own, int64_t width)
{
    const lm_build *how = &b->m->build;
    const lm_join_attr attr = { .rows = how->batch == 1 };
    lm_vid in[LM_JOIN_PARTS] = { source, own };
    for (int i = 2; i < LM_JOIN_PARTS; i++)
        in[i] = LM_NONE;
    if (attr.rows)
        return lm_b_append(b, &lm_op_join, &attr, in);
    in[0] = lm_b_seen_as(b, source, how->batch, how->source * width);
    in[1] = lm_b_seen_as(b, own, how->batch, how->seq * width);
    lm_vid x = lm_b_append(b, &lm_op_join, &attr, in);
    return lm_b_seen_as(b, x, how->batch * (how->source + how->seq), width);
}

/* The decoder's rows of these. */
static lm_vid own_rows(lm_builder *b, lm_vid x, int64_t width)
{
    const lm_build *how = &b->m->build;
    const lm_window_attr attr = { .row = how->source, .rows = how->seq, .cols = width };
    if (how->batch == 1)
        return lm_b_append(b, &lm_op_window, &attr, &x);
    x = lm_b_seen_as(b, x, how->batch, (how->source + how->seq) * width);
    x = lm_b_part_of(b, x, how->source * width, how->batch, how->seq * width);
    return lm_b_seen_as(b, x, how->batch * how->seq, width);
}

/* ---- what decoders read of a source ---- */

static bool make_memory(lm_builder *b)
{
    lm_model *m = b->m;
    const int64_t n = LM_MEMORY * m->config.layers;
    if (m->memory || !lm_b_ok(b) ||
        lm_alloc_n(&m->memory, (size_t)n, sizeof *m->memory, "a memory", b->e))
        return lm_b_ok(b);
    for (int64_t i = 0; i < n; i++)
        m->memory[i] = LM_NONE;
    return true;
}

/* A part of a memory that stays between runs. */
static void make_state(lm_builder *b, int64_t layer, int part, lm_tensor shape)
{
    static const char *const word[LM_MEMORY] = { "source_keys", "source_values", "source_keys.tail",
                                                 "source_values.tail" };
    char name[64];
    snprintf(name, sizeof name, "layers.%d.%s", (int)layer, word[part]);
    if (make_memory(b))
        lm_graph_value(b->m->graph, LM_ROLE_STATE, shape, name,
                       &b->m->memory[LM_MEMORY * layer + part], b->e);
}

/* The same in codes: pages, and tails of what is not coded. */
static void make_coded(lm_builder *b, int64_t layer, const lm_kv_attr *a)
{
    const lm_build *how = &b->m->build;
    const int64_t B = how->batch, K = a->attention.kv_heads, T = how->kv->page,
                  D = a->attention.head_dim;
    for (int side = 0; side < 2; side++) {
        const int64_t rows = a->residual[side] + a->sinks[side];
        make_state(b, layer, side,
                   (lm_tensor){ .dtype = LM_DTYPE_F32,
                                .ndim = 4,
                                .dim = { B * ((how->source + T - 1) / T), K, T, D },
                                .kv = how->kv->side[2 * layer + side].format });
        if (rows)
            make_state(b, layer, 2 + side,
                       (lm_tensor){ .dtype = LM_DTYPE_F32, .ndim = 4, .dim = { B, K, rows, D } });
    }
}

/* Leave keys and values, head by head. */
static void leave_plain(lm_builder *b, int64_t layer, lm_vid kv)
{
    const lm_build *how = &b->m->build;
    const lm_layer *y = &b->m->config.layer[layer];
    const int64_t B = how->batch, S = how->source, K = y->kv_heads, D = y->head_dim;
    const lm_permute_attr by_head = {
        .dim = { B, S, K, D }, .perm = { 0, 2, 1, 3 }, .ndim = 4, .to_ndim = 4, .to = { B, K, S, D }
    };
    for (int side = 0; make_memory(b) && side < 2; side++) {
        const lm_vid x = lm_b_part_of(b, kv, side * K * D, B * S, K * D);
        b->m->memory[LM_MEMORY * layer + side] = lm_b_append(b, &lm_op_permute, &by_head, &x);
    }
}

/* Heads as the sides of a layer are stored: those of rows that are written, and those of queries. */
static lm_vid rotate(lm_builder *b, const lm_head_rotate_attr *a, lm_vid x)
{
    return a->q || a->k || a->v ? lm_b_append(b, &lm_op_head_rotate, a, &x) : x;
}

/* Write rows [B*S,(H+2K)D], whose queries are not read, into pages. */
static void leave_coded(lm_builder *b, int64_t layer, lm_vid qkv, const lm_attention_attr *attr)
{
    lm_model *m = b->m;
    const lm_kv_side *side = &m->build.kv->side[2 * layer];
    lm_kv_attr a = lm_b_kv_attr(&m->build, layer, attr);
    a.attention.seq = m->build.source;
    make_coded(b, layer, &a);
    const lm_head_rotate_attr into = { .heads = attr->heads,
                                       .kv_heads = attr->kv_heads,
                                       .head_dim = attr->head_dim,
                                       .k = side[LM_KV_K].rotate,
                                       .v = side[LM_KV_V].rotate };
    qkv = rotate(b, &into, qkv);
    if (!lm_b_ok(b))
        return;
    const lm_vid *memory = &m->memory[LM_MEMORY * layer];
    const bool tailed = memory[2] >= 0 || memory[3] >= 0;
    const lm_vid in[] = { qkv,    m->used, m->fresh, LM_NONE, m->table, tailed ? m->slot : LM_NONE,
                          LM_NONE };
    lm_vid out[LM_MEMORY];
    for (int i = 0; i < LM_MEMORY; i++)
        out[i] = memory[i] >= 0 ? memory[i] : LM_SKIP;
    lm_graph_append(m->graph, &lm_op_kv_write, &a, in, out, b->e);
}

/* Rows q [B*T,HD] read codes. */
static lm_vid read_coded(lm_builder *b, int64_t layer, lm_vid q, const lm_attention_attr *attr)
{
    lm_model *m = b->m;
    const lm_kv_side *side = &m->build.kv->side[2 * layer];
    const lm_kv_attr a = lm_b_kv_attr(&m->build, layer, attr);
    const lm_head_rotate_attr into = { .heads = attr->heads,
                                       .head_dim = attr->head_dim,
                                       .q = side[LM_KV_K].rotate },
                              back = { .heads = attr->heads,
                                       .head_dim = attr->head_dim,
                                       .q = side[LM_KV_V].rotate };
    make_coded(b, layer, &a);
    q = rotate(b, &into, q);
    if (!lm_b_ok(b))
        return LM_NONE;
    const lm_vid *memory = &m->memory[LM_MEMORY * layer];
    const bool tailed = memory[2] >= 0 || memory[3] >= 0;
    const lm_vid in[] = { q,         m->source_used, m->fresh,
                          LM_NONE,   LM_NONE,        m->table,
                          memory[0], memory[1],      tailed ? m->slot : LM_NONE,
                          memory[2], memory[3],      LM_NONE,
                          LM_NONE,   LM_NONE,        LM_NONE };
    lm_vid out[2] = { LM_NONE, LM_SKIP };
    return lm_graph_append(m->graph, &lm_op_kv_attention, &a, in, out, b->e)
               ? LM_NONE
               : rotate(b, &back, out[0]);
}

/* The same of what was left as it is. */
static lm_vid read_plain(lm_builder *b, int64_t layer, lm_vid q, const lm_attention_attr *attr)
{
    lm_model *m = b->m;
    const lm_tensor side = { .dtype = LM_DTYPE_F32,
                             .ndim = 4,
                             .dim = { m->build.batch, attr->kv_heads, m->build.source,
                                      attr->head_dim } };
    for (int i = 0; i < 2; i++)
        make_state(b, layer, i, side);
    if (!lm_b_ok(b))
        return LM_NONE;
    const lm_vid *memory = &m->memory[LM_MEMORY * layer];
    const lm_vid in[] = {
        q, m->source_used, m->fresh, LM_NONE, LM_NONE, LM_NONE, LM_NONE, LM_NONE
    };
    lm_vid out[4] = { LM_NONE, memory[0], memory[1], LM_SKIP };
    if (lm_graph_append(m->graph, &lm_op_attention_cached, attr, in, out, b->e))
        return LM_NONE;
    return out[0];
}

lm_vid lm_b_cross_attention(lm_builder *b, int64_t layer, lm_vid q, lm_vid kv)
{
    lm_model *m = b->m;
    const lm_layer *y = &m->config.layer[layer];
    const lm_build *how = &m->build;
    const int64_t queries = y->heads * y->head_dim, rest = 2 * y->kv_heads * y->head_dim;
    lm_attention_attr attr = lm_b_attention_attr(m, layer);
    attr.causal = false;
    if (how->mode == LM_MODE_GENERATE) {
        attr.reads = true;
        return lm_b_coded(how, layer) ? read_coded(b, layer, q, &attr)
                                      : read_plain(b, layer, q, &attr);
    }
    const lm_vid padded = lm_b_part_of(b, kv, -queries, how->batch * how->source, queries + rest);
    if (how->encode && lm_b_coded(how, layer))
        leave_coded(b, layer, padded, &attr);
    else if (how->encode)
        leave_plain(b, layer, kv);
    attr.seq = how->source + how->seq;
    attr.site = lm_config_all_layers(&m->config) + layer;
    if (how->mode == LM_MODE_TRAIN && how->dropout)
        attr.dropout = m->config.drop_attn;
    q = lm_b_part_of(b, q, 0, how->batch * how->seq, queries + rest);
    lm_vid in[5] = { join_rows(b, padded, q, queries + rest), LM_NONE, m->cross_hi, LM_NONE,
                     LM_NONE };
    return own_rows(b, lm_b_append(b, &lm_op_attention, &attr, in), queries);
}

/* ---- small ---- */

static lm_vid by_formula(lm_builder *b, const char *text, lm_vid x, double factor)
{
    lm_vid y = LM_NONE;
    const lm_formula_name names[] = { LM_IS("x", x), LM_MAKES("y", &y), LM_CONSTANT("c", factor) };
    const lm_formula_scope scope = {
        .name = names, .n_names = 3, .numbers = LM_NONE, .gate = LM_NONE
    };
    if (!lm_b_ok(b) || lm_formula_append(b->m->graph, text, &scope, b->e))
        return LM_NONE;
    return y;
}

lm_vid lm_b_scale(lm_builder *b, lm_vid x, double factor)
{
    return by_formula(b, "y = c * x", x, factor);
}

lm_vid lm_b_relu(lm_builder *b, lm_vid x)
{
    return by_formula(b, "y = max(x, c)", x, 0);
}

lm_vid lm_b_tanh(lm_builder *b, lm_vid x)
{
    return by_formula(b, "y = c * tanh(x)", x, 1);
}

/* ---- what is not run ---- */

static bool is_wanted(const lm_model *m, const lm_node *n, const bool *read)
{
    for (int i = 0; i < n->n_out; i++)
        if (n->out[i] >= 0 && (read[n->out[i]] || m->graph->value[n->out[i]].role != LM_ROLE_ACT))
            return true;
    return false;
}

lm_code lm_b_cut_encoder(lm_model *m, lm_err *e)
{
    lm_graph *g = m->graph;
    bool *read = NULL;
    if (lm_alloc_n(&read, g->n_values, sizeof *read, "a pass", e))
        return e->code;
    for (int64_t i = 0; m->build.encode && i < LM_MEMORY * m->config.layers; i++)
        if (m->memory[i] >= 0)
            read[m->memory[i]] = true;
    if (m->logits >= 0)
        read[m->logits] = true;
    for (size_t k = g->n_nodes; k-- > 0;) {
        lm_node *n = &g->node[k];
        if (!is_wanted(m, n, read)) {
            n->op = NULL;
            continue;
        }
        for (int i = 0; i < n->n_in; i++)
            if (n->in[i] >= 0)
                read[n->in[i]] = true;
    }
    size_t kept = 0;
    for (size_t k = 0; k < g->n_nodes; k++)
        if (g->node[k].op)
            g->node[kept++] = g->node[k];
    g->n_nodes = kept;
    lm_free(read);
    return LM_OK;
}
