/* SPDX-License-Identifier: Apache-2.0 */
/* build.c -- the parts from which a decoder is built.
 *
 * A parameter of the graph is what one operator reads at once, which may be several tensors of a
 * checkpoint: query, key and value weights are one matrix, so that one product reads the activations
 * once.  Slices map its rows to those tensors, under their published names. */
#include "model/build.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "kernels/arrange.h"
#include "kernels/divergence.h"
#include "kernels/elementwise.h"
#include "kernels/embed.h"
#include "kernels/gaussian.h"
#include "kernels/head.h"
#include "kernels/linear.h"
#include "kernels/rope.h"
#include "op/ops.h"

bool lm_b_ok(const lm_builder *b)
{
    return !b->e->code;
}

static char *format(lm_builder *b, const char *fmt, va_list ap)
{
    char text[256], *copy = NULL;
    vsnprintf(text, sizeof text, fmt, ap);
    lm_arena_strdup(b->arena, &copy, text, strlen(text), b->e);
    return copy;
}

lm_vid lm_b_param(lm_builder *b, int ndim, const int64_t *dim, const char *fmt, ...)
{
    lm_model *m = b->m;
    lm_vid v = LM_NONE;
    lm_tensor shape = { .dtype = LM_DTYPE_F32, .ndim = ndim };
    va_list ap;
    if (!lm_b_ok(b))
        return LM_NONE;
    va_start(ap, fmt);
    char *name = format(b, fmt, ap);
    va_end(ap);
    memcpy(shape.dim, dim, (size_t)ndim * sizeof *dim);
    if (!lm_b_ok(b) || lm_graph_value(m->graph, LM_ROLE_PARAM, shape, name, &v, b->e) ||
        lm_grow(&m->param, &b->cap_params, (size_t)m->n_params + 1, sizeof *m->param, "parameters",
                b->e))
        return LM_NONE;
    /* Weight decay is for matrices: a decayed norm weight or bias would only shrink its layer's scale. */
    m->param[m->n_params++] =
        (lm_param){ .value = v, .count = lm_tensor_count(&shape), .decay = ndim > 1 };
    return v;
}

void lm_b_slice(lm_builder *b, int64_t rows, bool transposed, lm_init init, double std,
                const char *fmt, ...)
{
    lm_model *m = b->m;
    va_list ap;
    if (!lm_b_ok(b))
        return;
    va_start(ap, fmt);
    char *name = format(b, fmt, ap);
    va_end(ap);
    if (!lm_b_ok(b) || lm_grow(&m->slice, &b->cap_slices, (size_t)m->n_slices + 1, sizeof *m->slice,
                               "tensors", b->e))
        return;
    int p = m->n_params - 1;
    const lm_tensor *t = &m->graph->value[m->param[p].value].t;
    lm_slice *s = &m->slice[m->n_slices++];
    *s = (lm_slice){ .name = name,
                     .param = p,
                     .rows = rows,
                     .stack = 1,
                     .ndim = t->ndim,
                     .transposed = transposed && t->ndim == 2,
                     .init = init,
                     .std = std,
                     .of_adapter = b->adapting,
                     .trains = true };
    /* Rows of a parameter are in the order of its declared slices. */
    if (m->n_slices > 1 && s[-1].param == p)
        s->row = s[-1].row + s[-1].rows;
    memcpy(s->dim, t->dim, sizeof s->dim); /* dim: the shape in the checkpoint */
    s->dim[0] = s->transposed ? t->dim[1] : rows;
    if (s->transposed)
        s->dim[1] = rows;
}

void lm_b_stack(lm_builder *b, int64_t matrices)
{
    if (!lm_b_ok(b))
        return;
    lm_slice *s = &b->m->slice[b->m->n_slices - 1];
    const int64_t in = s->dim[0];
    s->stack = matrices;
    s->ndim = 3;
    s->dim[0] = matrices;
    s->dim[1] = in;
    s->dim[2] = s->rows / matrices;
}

lm_vid lm_b_bias(lm_builder *b, int64_t rows, int64_t width, const char *name, const char *hf)
{
    const int64_t n = rows ? rows : 1;
    lm_vid v = lm_b_param(b, 2, (int64_t[]){ n, width }, "%s", name);
    lm_b_slice(b, n, false, LM_INIT_ZEROS, 0, "%s", hf);
    if (!lm_b_ok(b))
        return LM_NONE;
    b->m->param[b->m->n_params - 1].decay = false;
    if (!rows) {
        lm_slice *s = &b->m->slice[b->m->n_slices - 1];
        s->ndim = 1;
        s->dim[0] = width;
    }
    return v;
}

static lm_model_aside *add_aside(lm_builder *b, char *name)
{
    lm_model *m = b->m;
    if (!lm_b_ok(b) || lm_grow(&m->aside, &b->cap_aside, (size_t)m->n_aside + 1, sizeof *m->aside,
                               "tensors", b->e))
        return NULL;
    lm_model_aside *t = &m->aside[m->n_aside++];
    *t = (lm_model_aside){ .name = name, .slice = -1, .count = 1 };
    return t;
}

void lm_b_aside(lm_builder *b, lm_dtype dtype, int ndim, const int64_t *dim, const int64_t *number,
                const char *fmt, ...)
{
    va_list ap;
    if (!lm_b_ok(b))
        return;
    va_start(ap, fmt);
    lm_model_aside *t = add_aside(b, format(b, fmt, ap));
    va_end(ap);
    if (!t)
        return;
    t->dtype = dtype;
    t->ndim = ndim;
    t->number = number;
    for (int i = 0; i < ndim; i++)
        t->count *= t->dim[i] = dim[i];
}

void lm_b_again(lm_builder *b, const char *fmt, ...)
{
    va_list ap;
    if (!lm_b_ok(b))
        return;
    va_start(ap, fmt);
    lm_model_aside *t = add_aside(b, format(b, fmt, ap));
    va_end(ap);
    if (!t)
        return;
    t->of_base = !b->adapting;
    const lm_slice *s = &b->m->slice[b->m->n_slices - 1];
    t->slice = b->m->n_slices - 1;
    t->dtype = LM_DTYPE_F32;
    t->ndim = s->ndim;
    t->count = lm_slice_count(s);
    memcpy(t->dim, s->dim, sizeof t->dim);
}

lm_vid lm_b_append(lm_builder *b, const lm_op *op, const void *attr, const lm_vid *in)
{
    lm_vid out[LM_MAX_OUT] = { LM_NONE, LM_NONE, LM_NONE, LM_NONE };
    if (!lm_b_ok(b) || lm_graph_append(b->m->graph, op, attr, in, out, b->e))
        return LM_NONE;
    return out[0];
}

lm_vid lm_b_embed(lm_builder *b, lm_vid ids, lm_vid wte, lm_vid wpe)
{
    double scale = b->m->config.embed_scale;
    lm_embed_attr attr = { LM_ACC_FIRST, LM_ACC_FIRST, scale };
    lm_vid in[4] = { ids, wte, wpe >= 0 ? b->m->pos : LM_NONE, wpe };
    return lm_b_append(b, &lm_op_embed, &attr, in);
}

lm_vid lm_b_norm(lm_builder *b, lm_vid x, lm_vid w, lm_vid bias, lm_vid r, lm_vid *s)
{
    const lm_config *c = &b->m->config;
    lm_norm_attr attr = { c->norm, c->norm_eps, LM_ACC_FIRST, c->norm_plus_one };
    lm_vid in[4] = { x, w, bias, r }, out[3] = { LM_NONE, LM_NONE, LM_NONE };
    if (!lm_b_ok(b) || lm_graph_append(b->m->graph, &lm_op_norm, &attr, in, out, b->e))
        return LM_NONE;
    *s = out[2] >= 0 ? out[2] : x;
    return out[0];
}

lm_vid lm_b_add(lm_builder *b, lm_vid x, lm_vid y)
{
    return lm_b_append(b, &lm_op_add, NULL, (lm_vid[]){ x, y });
}

lm_vid lm_b_linear(lm_builder *b, lm_vid x, lm_vid w, lm_vid bias)
{
    lm_linear_attr attr = { LM_ACC_FIRST };
    lm_vid in[3] = { x, w, bias };
    return lm_b_append(b, &lm_op_linear, &attr, in);
}

lm_vid lm_b_head_norm(lm_builder *b, int64_t layer, lm_vid qkv, lm_vid wq, lm_vid wk)
{
    const lm_config *c = &b->m->config;
    const lm_layer *y = &c->layer[layer];
    lm_qk_norm_attr row = { y->heads, y->kv_heads, y->head_dim, c->norm_eps, LM_ACC_FIRST };
    lm_head_norm_attr head = { y->heads,    y->kv_heads,  y->head_dim,
                               c->norm_eps, LM_ACC_FIRST, c->norm_plus_one };
    lm_vid in[3] = { qkv, wq, wk };
    return y->qk_norm == LM_QK_NORM_ROW ? lm_b_append(b, &lm_op_qk_norm, &row, in)
                                        : lm_b_append(b, &lm_op_head_norm, &head, in);
}

lm_vid lm_b_rope(lm_builder *b, int64_t layer, lm_vid qkv)
{
    const lm_config *c = &b->m->config;
    const lm_layer *y = &c->layer[layer];
    if (y->rope < 0) /* learned positions, which the embedding added */
        return qkv;
    lm_rope_attr attr = { y->heads, y->kv_heads, y->head_dim, c->rope[y->rope].dim, false };
    lm_vid in[3] = { qkv, b->m->pos, b->m->rope[y->rope] };
    return lm_b_append(b, &lm_op_rope, &attr, in);
}

lm_attention_attr lm_b_attention_attr(const lm_model *m, int64_t layer)
{
    const lm_layer *y = &m->config.layer[layer];
    return (lm_attention_attr){ .batch = m->build.batch,
                                .seq = m->build.rows ? 0 : m->build.seq,
                                .heads = y->heads,
                                .kv_heads = y->kv_heads,
                                .head_dim = y->head_dim,
                                .window = y->window,
                                .causal = !y->bidirectional,
                                .scale = y->scale,
                                .site = layer,
                                .soft_cap = y->soft_cap,
                                .blocks = y->blocks };
}

lm_vid lm_b_part_qkv(lm_builder *b, int64_t layer, lm_vid x)
{
    const lm_layer *y = &b->m->config.layer[layer];
    if (!lm_b_ok(b))
        return LM_NONE;
    const lm_tensor *t = &b->m->graph->value[x].t;
    lm_permute_attr attr = { .dim = { t->dim[0], y->heads, 3, y->head_dim },
                             .perm = { 0, 2, 1, 3 },
                             .ndim = 4,
                             .to_ndim = 2,
                             .to = { t->dim[0], t->dim[1] } };
    return lm_b_append(b, &lm_op_permute, &attr, &x);
}

/* A column for each distance that this graph can meet: one table for all layers. */
lm_vid lm_b_distances(lm_builder *b, int64_t layer, int64_t *zero)
{
    lm_model *m = b->m;
    const int64_t heads = m->config.layer[layer].heads,
                  n = m->build.mode == LM_MODE_GENERATE ? m->build.cache : m->build.seq;
    *zero = 0;
    if (!m->config.layer[layer].alibi)
        return LM_NONE;
    *zero = n - 1;
    if (lm_b_ok(b) && m->alibi == LM_NONE)
        lm_graph_value(m->graph, LM_ROLE_CONST, lm_shape2(LM_DTYPE_F32, heads, n), "alibi",
                       &m->alibi, b->e);
    return m->alibi;
}

/* The rows that attention of a layer reads; *a: of the layer, becomes that of these rows. */
static lm_vid gaussian_rows(lm_builder *b, int64_t layer, lm_vid qkv, lm_attention_attr *a)
{
    const lm_layer *y = &b->m->config.layer[layer];
    const lm_gaussian_attr attr = { y->heads, y->kv_heads, y->head_dim,
                                    y->weigh == LM_WEIGH_GAUSSIAN };
    if (y->weigh == LM_WEIGH_SOFTMAX)
        return qkv;
    a->head_dim = lm_layer_key_dim(y);
    a->value_dim = y->head_dim;
    a->undivided = attr.queries;
    return lm_b_append(b, &lm_op_gaussian_rows, &attr, &qkv);
}

lm_vid lm_b_attention(lm_builder *b, int64_t layer, lm_vid qkv, lm_vid sinks)
{
    lm_model *m = b->m;
    lm_attention_attr attr = lm_b_attention_attr(m, layer);
    lm_vid bias = lm_b_distances(b, layer, &attr.bias_zero);
    if (!lm_b_rotates_late(&m->build, layer))
        qkv = lm_b_rope(b, layer, qkv);
    const lm_adapt_heads place = { .encoder = b->whole != NULL,
                                   .layer = layer,
                                   .tokens = m->tokens,
                                   .qkv = qkv,
                                   .late = lm_b_rotates_late(&m->build, layer) };
    qkv = lm_b_adapt_heads(b, &place);
    if (m->config.layer[layer].buckets) {
        bias = b->relative;
        attr.bias_zero = lm_b_farthest(b);
    }
    qkv = gaussian_rows(b, layer, qkv, &attr);
    if (m->build.mode == LM_MODE_GENERATE)
        return lm_b_cached_attention(b, layer, qkv, sinks, bias, &attr);
    if (m->build.mode == LM_MODE_TRAIN && m->build.dropout)
        attr.dropout = m->config.drop_attn;
    attr.site = lm_b_first_layer(b) + layer;
    lm_vid in[5] = { qkv, m->lo, attr.causal ? LM_NONE : m->hi, sinks, bias };
    return lm_b_append(b, &lm_op_attention, &attr, in);
}

lm_vid lm_b_dropout(lm_builder *b, lm_vid x, double p)
{
    lm_dropout_attr attr = { .p = p, .site = b->site++ };
    if (p <= 0 || b->m->build.mode != LM_MODE_TRAIN || !b->m->build.dropout)
        return x;
    return lm_b_append(b, &lm_op_dropout, &attr, &x);
}

lm_vid lm_b_mlp(lm_builder *b, lm_mlp mlp, lm_vid x)
{
    lm_gelu_attr exact = { mlp == LM_MLP_GELU_EXACT };
    if (mlp == LM_MLP_RELU)
        return lm_b_relu(b, x);
    if (lm_mlp_gated(mlp))
        return lm_b_append(b, mlp == LM_MLP_GEGLU ? &lm_op_geglu : &lm_op_swiglu, NULL, &x);
    return lm_b_append(b, &lm_op_gelu, &exact, &x);
}

/* Logits in F32 for any type of the model. */
static void logits(lm_builder *b, const lm_adapt_linear *place, lm_vid w)
{
    lm_model *m = b->m;
    const bool all = m->build.all_rows;
    lm_tensor shape =
        lm_shape2(LM_DTYPE_F32, m->build.batch * (all ? m->build.seq : 1), m->config.vocab);
    lm_soft_cap_attr cap = { m->config.logit_cap };
    lm_adapt_linear at = *place;
    lm_vid in[2] = { at.x, m->rows }, x, wide = LM_NONE, capped = LM_NONE;
    if (!all && (m->build.rows || m->build.seq > 1)) /* otherwise row i is that of sequence i */
        at.x = lm_b_append(b, &lm_op_rows, NULL, in);
    x = lm_b_linear(b, at.x, w, at.bias);
    if (!lm_b_ok(b) || lm_graph_value(m->graph, LM_ROLE_ACT, shape, "logits", &wide, b->e) ||
        lm_graph_append(m->graph, &lm_op_cast, NULL, &x, &wide, b->e))
        return;
    wide = lm_b_adapt_logits(b, &at, wide);
    m->logits = wide;
    if (cap.cap <= 0)
        return;
    if (lm_graph_value(m->graph, LM_ROLE_ACT, shape, "capped logits", &capped, b->e) ||
        lm_graph_append(m->graph, &lm_op_soft_cap, &cap, &wide, &capped, b->e))
        return;
    m->logits = capped;
}

/* The loss of a student. */
static void diverge(lm_builder *b, lm_vid x, lm_vid w)
{
    lm_model *m = b->m;
    const lm_model_teacher *t = m->build.teacher;
    const lm_config *c = &t->model->config;
    const int64_t n = m->build.batch * m->build.seq,
                  words = t->model->graph->value[t->model->head].t.dim[0];
    const lm_divergence_attr attr = { .vocab = m->config.vocab,
                                      .acc = LM_ACC_FIRST,
                                      .beta = t->beta,
                                      .temperature = t->temperature,
                                      .soft_cap = m->config.logit_cap,
                                      .teacher_cap = c->logit_cap };
    if (!lm_b_ok(b) ||
        lm_graph_value(m->graph, LM_ROLE_INPUT, lm_shape2(LM_DTYPE_F32, n, c->width),
                       "teacher states", &m->taught_states, b->e) ||
        lm_graph_value(m->graph, LM_ROLE_CONST, lm_shape2(LM_DTYPE_F32, words, c->width),
                       "teacher head", &m->taught_head, b->e))
        return;
    const lm_vid in[5] = { x, w, m->taught_states, m->taught_head, m->targets };
    m->loss = lm_b_append(b, &lm_op_divergence, &attr, in);
}

void lm_b_head(lm_builder *b, const lm_adapt_linear *place)
{
    lm_model *m = b->m;
    lm_vid x = place->x, w = lm_b_adapt_head(b, place);
    if (m->build.mode == LM_MODE_GENERATE) {
        if (m->build.ahead == LM_AHEAD_RUNS || m->build.ahead == LM_AHEAD_DRAFTS)
            m->states = x;
        logits(b, place, w);
        return;
    }
    if (m->build.states) {
        m->states = x;
        m->head = w;
        return;
    }
    if (m->build.teacher && place->bias != LM_NONE) {
        lm_fail(b->e, LM_EUSAGE, "student", "use a causal language model",
                "its head has a bias, which the comparison with a teacher does not know");
        return;
    }
    if (m->build.teacher) {
        diverge(b, x, w);
        return;
    }
    lm_head_attr attr = { m->config.vocab, 0, LM_ACC_FIRST, m->config.logit_cap };
    lm_vid lse = m->build.mode == LM_MODE_TRAIN ? LM_NONE : LM_SKIP; /* of the gradient */
    lm_vid in[4] = { x, w, m->targets, place->bias };
    bool collides = m->build.entropy == LM_ENTROPY_COLLISION;
    lm_vid out[5] = { LM_NONE, lse, LM_SKIP, m->build.entropy && !collides ? LM_NONE : LM_SKIP,
                      collides ? LM_NONE : LM_SKIP };
    if (lm_b_ok(b) && !lm_graph_append(m->graph, &lm_op_head_stats, &attr, in, out, b->e)) {
        m->loss = out[0];
        m->entropy = out[collides ? 4 : 3];
    }
}

void lm_b_scores(lm_builder *b, lm_vid x)
{
    lm_model *m = b->m;
    int64_t n = m->build.batch * m->build.seq, width = m->config.width;
    lm_vid wide = LM_NONE;
    lm_vid w = lm_b_param(b, 2, (int64_t[]){ m->config.scores, width }, "score");
    /* OpenRLHF's deviation, openrlhf/models/model.py */
    lm_b_slice(b, m->config.scores, false, LM_INIT_NORMAL, 1 / (double)(width + 1), "score.weight");
    if (!lm_b_ok(b))
        return;
    m->slice[m->n_slices - 1].may_lack = true;
    x = lm_b_linear(b, x, w, LM_NONE);
    if (!lm_b_ok(b) ||
        lm_graph_value(m->graph, LM_ROLE_ACT, lm_shape2(LM_DTYPE_F32, n, m->config.scores),
                       "scores", &wide, b->e) ||
        lm_graph_append(m->graph, &lm_op_cast, NULL, &x, &wide, b->e))
        return;
    m->loss = wide;
}

/* A tensor of the training alone. */
static void of_training(lm_builder *b)
{
    if (!lm_b_ok(b))
        return;
    lm_slice *s = &b->m->slice[b->m->n_slices - 1];
    s->of_training = s->may_lack = true;
}

void lm_b_value(lm_builder *b, lm_vid x)
{
    lm_model *m = b->m;
    int64_t n = m->build.batch * m->build.seq, width = m->config.width;
    lm_vid wide = LM_NONE;
    lm_vid w = lm_b_param(b, 2, (int64_t[]){ 1, width }, "value head");
    lm_b_slice(b, 1, false, LM_INIT_NORMAL, 1 / (double)(width + 1), "v_head.summary.weight");
    of_training(b);
    lm_vid bias = lm_b_param(b, 1, (int64_t[]){ 1 }, "value head bias");
    lm_b_slice(b, 1, false, LM_INIT_ZEROS, 0, "v_head.summary.bias");
    of_training(b);
    if (m->build.mode == LM_MODE_GENERATE)
        return;
    x = lm_b_linear(b, x, w, bias);
    if (!lm_b_ok(b) ||
        lm_graph_value(m->graph, LM_ROLE_ACT, lm_shape2(lm_wide(m->build.precision.low), n, 1),
                       "values", &wide, b->e) ||
        lm_graph_append(m->graph, &lm_op_cast, NULL, &x, &wide, b->e))
        return;
    m->value = wide;
}
