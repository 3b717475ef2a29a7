/* SPDX-License-Identifier: Apache-2.0 */
/* model.c -- builds the graph of a config, ready for the memory plan. */
#include "model/model.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "base/hash.h"
#include "base/mem.h"
#include "base/text.h"
#include "kv/spec.h"
#include "model/arch.h"
#include "model/build.h"
#include "op/fuse.h"
#include "op/ops.h"

static lm_code check_build(const lm_config *c, const lm_build *b, lm_err *e)
{
    int64_t positions = b->mode == LM_MODE_GENERATE ? b->cache : b->seq, rows;
    lm_dtype low = b->precision.low;
    if (low != LM_DTYPE_F32 && low != LM_DTYPE_BF16 && low != LM_DTYPE_F64)
        return lm_fail(e, LM_EUSAGE, "precision", "choose f32 or bf16",
                       "models do not compute in %s", lm_dtype_name(low));
    if (b->batch < 1 || !lm_mul_i64_ok(b->batch, b->rows ? 1 : b->seq, &rows) || rows < 1 ||
        rows > INT32_MAX || b->rows > INT32_MAX)
        return lm_fail(e, LM_EUSAGE, "batch", "make the batch or the sequences smaller",
                       "%" PRId64 " sequence%s of %" PRId64 " tokens cannot be numbered", b->batch,
                       lm_plural(b->batch), b->seq);
    if (lm_config_has_positions(c) && positions > c->max_positions)
        return lm_fail(e, LM_EUSAGE, "sequence length", "use a shorter one",
                       "%" PRId64 " position%s, but the model has learned %" PRId64, positions,
                       lm_plural(positions), c->max_positions);
    if (b->mode == LM_MODE_GENERATE &&
        lm_config_check_causal(c, "model", "use a causal language model", e))
        return e->code;
    if (c->scores > 1 || (c->scores && b->mode == LM_MODE_GENERATE))
        return lm_fail(e, LM_EUSAGE, "model", "use a language model",
                       "its head gives a text %" PRId64 " score%s, not the next token", c->scores,
                       lm_plural((uint64_t)c->scores));
    if (c->encoder && lm_b_check_encoder(c, b, e))
        return e->code;
    return b->mode == LM_MODE_GENERATE ? lm_b_check_cache(c, b, e) : LM_OK;
}

/* With ragged rows, which are those of a sequence, and what they are. */
static lm_code make_row_inputs(lm_model *m, lm_err *e)
{
    lm_graph *g = m->graph;
    int64_t n = m->build.batch;
    return lm_graph_value(g, LM_ROLE_INPUT, lm_shape1(LM_DTYPE_I32, n + 1), "first", &m->first,
                          e) ||
                   lm_graph_value(g, LM_ROLE_INPUT, lm_shape1(LM_DTYPE_I32, n), "kind", &m->kind, e)
               ? e->code
               : LM_OK;
}

/* The pages and tails of a sequence. */
static lm_code make_page_inputs(lm_model *m, lm_err *e)
{
    lm_graph *g = m->graph;
    const lm_build *b = &m->build;
    bool coded = false;
    for (int64_t l = 0; l < m->config.layers; l++)
        coded |= lm_b_coded(b, l) && !lm_b_kept(b, l);
    if (b->kept && lm_b_make_kept(m, e))
        return e->code;
    if (!b->rows && !coded)
        return LM_OK;
    int64_t page = b->rows ? b->page : b->kv->page, width = (b->cache + page - 1) / page;
    if (lm_graph_value(g, LM_ROLE_INPUT, lm_shape2(LM_DTYPE_I32, b->batch, width), "table",
                       &m->table, e))
        return e->code;
    if ((!lm_b_tailed(b, m->config.layers) && !lm_config_has_states(&m->config)) || b->kept)
        return LM_OK;
    return lm_graph_value(g, LM_ROLE_INPUT, lm_shape1(LM_DTYPE_I32, b->batch), "slot", &m->slot, e);
}

static lm_code make_inputs(lm_model *m, lm_err *e)
{
    lm_graph *g = m->graph;
    int64_t n = m->build.rows ? m->build.rows : m->build.batch * m->build.seq;
    lm_tensor ids = lm_shape1(LM_DTYPE_I32, n), per_seq = lm_shape1(LM_DTYPE_I32, m->build.batch);
    bool generate = m->build.mode == LM_MODE_GENERATE;

    if (lm_graph_value(g, LM_ROLE_INPUT, ids, "tokens", &m->tokens, e) ||
        lm_graph_value(g, LM_ROLE_INPUT, ids, "positions", &m->pos, e) ||
        (m->config.types && lm_graph_value(g, LM_ROLE_INPUT, ids, "types", &m->types, e)) ||
        (m->build.chosen && lm_graph_value(g, LM_ROLE_INPUT, ids, "chosen", &m->chosen, e)) ||
        (m->config.encoder && lm_b_source_inputs(m, e)))
        return e->code;
    m->rope_rows = m->config.ropes ? generate ? m->build.cache : m->build.seq : 0;
    for (int i = 0; i < m->config.ropes; i++) {
        lm_tensor table = lm_shape2(LM_DTYPE_F32, m->rope_rows, m->config.rope[i].dim);
        if (lm_graph_value(g, LM_ROLE_CONST, table, i ? "rope.1" : "rope", &m->rope[i], e))
            return e->code;
    }
    if ((m->build.rows && make_row_inputs(m, e)) || (generate && make_page_inputs(m, e)))
        return e->code;
    if (generate)
        return lm_graph_value(g, LM_ROLE_INPUT, per_seq, "used", &m->used, e) ||
                       lm_graph_value(g, LM_ROLE_INPUT, per_seq, "fresh", &m->fresh, e) ||
                       lm_graph_value(g, LM_ROLE_INPUT, per_seq, "rows", &m->rows, e)
                   ? e->code
                   : LM_OK;
    if (m->build.documents && lm_graph_value(g, LM_ROLE_INPUT, ids, "lo", &m->lo, e))
        return e->code;
    if (m->build.documents && lm_config_bidirectional(&m->config) &&
        lm_graph_value(g, LM_ROLE_INPUT, ids, "hi", &m->hi, e))
        return e->code;
    if (lm_graph_value(g, LM_ROLE_INPUT, ids, "targets", &m->targets, e) ||
        m->build.mode != LM_MODE_TRAIN)
        return e->code;
    lm_dtype wide = lm_wide(m->build.precision.low);
    lm_tensor scale = m->config.scores ? lm_shape2(wide, n, m->config.scores) : lm_shape1(wide, n);
    if (m->build.value &&
        lm_graph_value(g, LM_ROLE_INPUT, lm_shape2(wide, n, 1), "dvalue", &m->dvalue, e))
        return e->code;
    if (m->build.entropy == LM_ENTROPY_TRAINS &&
        lm_graph_value(g, LM_ROLE_INPUT, lm_shape1(wide, n), "dentropy", &m->dentropy, e))
        return e->code;
    return lm_graph_value(g, LM_ROLE_INPUT, scale, "scale", &m->scale, e);
}

/* ---- names ---- */

static const char *bare(const lm_model *m, const char *name)
{
    const lm_arch *a = m->config.arch;
    size_t n = a && a->rootless ? strlen(a->root) : 0;
    return n && !strncmp(name, a->root, n) ? name + n : name;
}

/* The cell of `name`, or the free cell for it. */
static size_t cell_of(const lm_model *m, const char *name)
{
    size_t mask = m->n_index - 1, i = lm_hash_str(name) & mask;
    while (m->index[i] && strcmp(bare(m, m->slice[m->index[i] - 1].name), name))
        i = (i + 1) & mask;
    return i;
}

static lm_code make_index(lm_model *m, lm_err *e)
{
    m->n_index = 64;
    while (m->n_index < 2 * (size_t)m->n_slices)
        m->n_index *= 2;
    if (lm_alloc_n(&m->index, m->n_index, sizeof *m->index, "an index of tensor names", e))
        return e->code;
    for (int i = 0; i < m->n_slices; i++) {
        size_t at = cell_of(m, bare(m, m->slice[i].name));
        if (m->index[at])
            return lm_fail(e, LM_EBUG, m->slice[i].name, NULL, "is named twice");
        m->index[at] = (uint32_t)i + 1;
    }
    return LM_OK;
}

/* ---- passes ---- */

/* The norm of the gradients and the update cover whole parameters. */
static lm_code mark_trained(lm_model *m, lm_err *e)
{
    for (int i = 0; i < m->n_slices; i++) {
        lm_slice *s = &m->slice[i];
        bool *trains = &m->param[s->param].trains;
        if (!s->of_adapter && !s->of_training && m->build.trainable)
            s->trains = m->build.trainable(m->build.ctx, s->name);
        s->trains &= !s->by_load && !s->kept;
        if (s->row && s->trains != *trains)
            return lm_fail(e, LM_EBUG, s->name, NULL, "trains apart from its parameter");
        *trains = s->trains;
    }
    return LM_OK;
}

static bool is_trainable(void *ctx, lm_vid v)
{
    const lm_model *m = ctx;
    for (int i = 0; i < m->n_params; i++)
        if (m->param[i].value == v)
            return m->param[i].trains;
    return true;
}

/* Trainable parameters first, among them matrices first, so that gradients, states and weight decay
 * each cover one run of the block. */
static lm_code lay_out(lm_model *m, lm_err *e)
{
    m->block = 0;
    for (int pass = 0; pass < 3; pass++) {
        for (int i = 0; i < m->n_params; i++) {
            lm_param *p = &m->param[i];
            if (pass != (!p->trains ? 2 : p->decay ? 0 : 1))
                continue;
            p->offset = m->block;
            if (__builtin_add_overflow(
                    m->block, (p->count + LM_BLOCK_ALIGN - 1) / LM_BLOCK_ALIGN * LM_BLOCK_ALIGN,
                    &m->block))
                return lm_fail(e, LM_ELIMIT, "model", NULL, "the parameters cannot be counted");
        }
        if (pass == 0)
            m->decay_end = m->block;
        if (pass == 1 && m->build.stages && !m->block) /* nothing trains here: zeros do */
            m->block = LM_BLOCK_ALIGN;
        if (pass == 1)
            m->train_end = m->block;
    }
    return LM_OK;
}

/* What trains beside an adapter may have names of its own in its file. */
static void name_saved(lm_builder *b)
{
    const lm_adapt *a = b->m->build.adapt;
    for (int i = 0; a && a->saved && i < b->m->n_slices; i++) {
        lm_slice *s = &b->m->slice[i];
        if (s->trains && !s->of_adapter && !s->of_training)
            s->saved = a->saved(a->ctx, b, s->name);
    }
}

lm_code lm_b_place(lm_builder *b)
{
    if (make_index(b->m, b->e) || mark_trained(b->m, b->e) || lay_out(b->m, b->e))
        return b->e->code;
    name_saved(b);
    return b->e->code;
}

static lm_code make_backward(lm_model *m, lm_err *e)
{
    lm_vid *grads = NULL;
    size_t n = m->graph->n_values;
    lm_vid more[3 + LM_MOST_AHEAD], seed[3 + LM_MOST_AHEAD];
    lm_backward b = { .root = m->loss, .seed = m->scale, .more = more, .more_seed = seed };
    if (m->value >= 0) {
        more[b.n_more] = m->value;
        seed[b.n_more++] = m->dvalue;
    }
    if (m->dentropy >= 0) {
        more[b.n_more] = m->entropy;
        seed[b.n_more++] = m->dentropy;
    }
    if (m->aux >= 0) {
        more[b.n_more] = m->aux;
        seed[b.n_more++] = m->daux;
    }
    for (int64_t k = 0; k < lm_model_losses_ahead(m); k++) {
        more[b.n_more] = m->ahead_loss[k];
        seed[b.n_more++] = m->dahead;
    }
    b.trainable = is_trainable;
    b.ctx = m;
    if (lm_alloc_n(&grads, n, sizeof *grads, "gradients", e))
        return e->code;
    b.grads = grads;
    lm_code rc = lm_pass_backward(m->graph, &b, e);
    if (!rc)
        rc = lm_alloc_n(&m->grad, (size_t)m->n_params, sizeof *m->grad, "gradients", e);
    for (int i = 0; !rc && i < m->n_params; i++)
        m->grad[i] = grads[m->param[i].value];
    lm_free(grads);
    return rc;
}

/* The log of the sum of each row's exponentials, which the loss's gradient reads. */
static lm_vid lse_of(const lm_model *m)
{
    for (size_t k = 0; k < m->graph->n_nodes; k++)
        if (m->graph->node[k].op == &lm_op_head_stats)
            return m->graph->node[k].out[1];
    return LM_NONE;
}

int lm_model_rows(const lm_model *m, lm_vid out[LM_MODEL_ROWS])
{
    const lm_vid all[LM_MODEL_ROWS] = { m->loss, m->entropy, m->value };
    int n = 0;
    for (int i = 0; i < LM_MODEL_ROWS; i++)
        if (all[i] >= 0)
            out[n++] = all[i];
    return n;
}

/* What other stages read is made. */
static lm_code join_in_stages(lm_model *m, lm_err *e)
{
    const size_t n = m->graph->n_values;
    lm_vid *keep = NULL;
    int n_keep = 0;
    if (lm_alloc_n(&keep, n + LM_MOST_AHEAD + 1, sizeof *keep, "stages", e))
        return e->code;
    for (size_t v = 0; v < n; v++)
        if (lm_stage_sends(m->stages, (lm_vid)v))
            keep[n_keep++] = (lm_vid)v;
    if (m->loss >= 0)
        keep[n_keep++] = m->loss;
    for (int k = 0; k < LM_MOST_AHEAD; k++)
        if (m->ahead_loss[k] >= 0)
            keep[n_keep++] = m->ahead_loss[k];
    lm_fuse(m->graph, m->build.backend, keep, n_keep, e);
    lm_free(keep);
    return e->code;
}

lm_code lm_model_memory_made(const lm_model *m, lm_vid **out, int *n, lm_err *e)
{
    const int64_t all = LM_MEMORY * m->config.layers;
    *n = 0;
    if (lm_alloc_n(out, (size_t)all, sizeof **out, "a memory", e))
        return e->code;
    for (int64_t i = 0; i < all; i++)
        if (m->memory[i] >= 0 && m->graph->value[m->memory[i]].role == LM_ROLE_ACT)
            (*out)[(*n)++] = m->memory[i];
    return LM_OK;
}

static lm_code join_encoder(lm_model *m, lm_err *e)
{
    lm_vid *made;
    int n;
    if (lm_model_memory_made(m, &made, &n, e))
        return e->code;
    lm_code rc = lm_fuse(m->graph, m->build.backend, made, n, e);
    lm_free(made);
    return rc;
}

static lm_code join_operators(lm_model *m, lm_err *e)
{
    if (m->build.encode)
        return join_encoder(m, e);
    if (m->stages)
        return join_in_stages(m, e);
    lm_vid keep[LM_MODEL_ROWS + 1 + LM_MOST_AHEAD] = { m->states };
    int n = m->build.states                     ? 1
            : m->build.mode == LM_MODE_GENERATE ? lm_model_read(m, keep)
                                                : lm_model_rows(m, keep);
    for (int64_t k = 0; k < lm_model_losses_ahead(m); k++)
        keep[n++] = m->ahead_loss[k];
    if (m->build.mode == LM_MODE_TRAIN && m->build.halves && lse_of(m) >= 0)
        keep[n++] = lse_of(m);
    return lm_fuse(m->graph, m->build.backend, keep, n, e);
}

/* A teacher's head is read as its own store keeps it. */
static lm_code take_head(lm_model *m, lm_err *e)
{
    const lm_model *t = m->build.teacher->model;
    const lm_value *own = &t->graph->value[t->head];
    lm_value *v = &m->graph->value[m->taught_head];
    if (own->t.dtype != v->t.dtype || own->t.panels)
        return lm_fail(e, LM_EBUG, "teacher", NULL,
                       "its head is not as the student's loss reads it");
    v->t.codes = own->t.codes;
    v->space = own->space;
    return LM_OK;
}

static size_t first_backward(const lm_model *m)
{
    size_t k = 0;
    while (k < m->graph->n_nodes && m->graph->node[k].phase == LM_PHASE_FORWARD)
        k++;
    return k;
}

/* Which parameters are kept as codes, by what reads them: before operators are joined, so that a joined form whose kernels
 * read no codes does not get them. */
static lm_code keep_codes(lm_model *m, lm_err *e)
{
    return m->build.like ? lm_model_keep_like(m, m->build.like, e) : lm_model_keep_codes(m, e);
}

/* The same of panels, among the operators that run. */
static void keep_panels(lm_model *m)
{
    if (m->build.like)
        return;
    if ((m->build.mode != LM_MODE_GENERATE && !m->build.encode) || m->build.panels)
        lm_model_keep_panels(m);
}

/* What one rank of a mesh has. */
static lm_code take_share(lm_model *m, lm_err *e)
{
    lm_b_holders *of = NULL;
    if (!lm_b_find_holders(m, &of, e) && !lm_b_take_part(m, e) && !lm_b_take_stages(m, of, e))
        lay_out(m, e);
    lm_free(of);
    return e->code;
}

/* Rows of a rank's experts have the memory that they need. */
static lm_code find_rows(lm_model *m, lm_err *e)
{
    const double room = m->build.expert_room > 0 ? m->build.expert_room : LM_EXPERT_ROOM;
    return m->build.mesh && lm_mesh_along(m->build.mesh, LM_AXIS_EP) > 1
               ? lm_graph_find_rows(m->graph, room, e)
               : LM_OK;
}

static lm_code build(lm_model *m, lm_err *e)
{
    static _Atomic uint64_t built;
    lm_builder b = { .m = m, .arena = m->graph->arena, .e = e };
    b.number = atomic_fetch_add(&built, 1) + 1;
    if (make_inputs(m, e) || lm_b_make_ahead(m, e))
        return e->code;
    lm_build_decoder(&b);
    if (!lm_b_ok(&b) || lm_b_place(&b) || lm_pass_precision(m->graph, &m->build.precision, e))
        return e->code;
    if (m->head >= 0 && !m->config.tied) /* no node chose its type */
        m->graph->value[m->head].t.dtype = m->build.precision.low;
    if (m->build.mode == LM_MODE_TRAIN && make_backward(m, e))
        return e->code;
    if (m->build.mesh && take_share(m, e))
        return e->code;
    if (m->build.apart && !m->build.stages && lm_pass_apart(m->graph, &m->addends, e))
        return e->code;
    if (keep_codes(m, e) || (m->build.backend && join_operators(m, e)))
        return e->code;
    if (m->build.mode == LM_MODE_TRAIN && m->build.recompute &&
        lm_pass_recompute(m->graph, lm_config_all_layers(&m->config), e))
        return e->code;
    m->backward = first_backward(m);
    if (m->taught_head >= 0 && take_head(m, e))
        return e->code;
    keep_panels(m);
    return (m->memory && lm_b_cut_encoder(m, e)) || find_rows(m, e) ? e->code : LM_OK;
}

int lm_b_values(lm_model *m, lm_vid *out[LM_B_VALUES])
{
    lm_vid *const one[] = {
        &m->tokens,      &m->targets,  &m->pos,   &m->lo,          &m->scale,    &m->used,
        &m->fresh,       &m->rows,     &m->loss,  &m->logits,      &m->first,    &m->kind,
        &m->table,       &m->slot,     &m->from,  &m->ranks,       &m->head,     &m->taught_states,
        &m->taught_head, &m->chosen,   &m->value, &m->dvalue,      &m->dentropy, &m->aux,
        &m->daux,        &m->dahead,   &m->prior, &m->hi,          &m->types,    &m->source,
        &m->source_hi,   &m->cross_hi, &m->alibi, &m->source_used, &m->follows,  &m->entropy,
        &m->states
    };
    int n = sizeof one / sizeof *one;
    _Static_assert(sizeof one / sizeof *one + LM_MOST_ROPES + 4 * LM_MOST_AHEAD == LM_B_VALUES,
                   "a value is missing in the list");
    memcpy(out, one, sizeof one);
    for (int k = 0; k < LM_MOST_ROPES; k++)
        out[n++] = &m->rope[k];
    for (int k = 0; k < LM_MOST_AHEAD; k++) {
        lm_vid *const ahead[] = { &m->ahead_tokens[k], &m->ahead_targets[k], &m->ahead_loss[k],
                                  &m->ahead_states[k] };
        for (int i = 0; i < 4; i++)
            out[n++] = ahead[i];
    }
    return n;
}

lm_code lm_model_build(const lm_config *c, const lm_build *b, lm_model **out, lm_err *e)
{
    lm_model *m = NULL;
    *out = NULL;
    if (check_build(c, b, e) || lm_alloc_n(&m, 1, sizeof *m, "a model", e))
        return e->code;
    m->config = *c;
    m->build = *b;
    m->build.source = c->encoder && !b->source ? b->seq : b->source;
    lm_vid *one[LM_B_VALUES];
    for (int i = lm_b_values(m, one) - 1; i >= 0; i--)
        *one[i] = LM_NONE;
    if (lm_graph_new(&m->graph, e)) {
        lm_model_free(m);
        return e->code;
    }
    m->graph->space = b->backend && !b->backend->host_memory ? LM_SPACE_DEVICE : LM_SPACE_HOST;
    if (build(m, e)) {
        lm_model_free(m);
        return e->code;
    }
    *out = m;
    return LM_OK;
}

void lm_model_free(lm_model *m)
{
    if (!m)
        return;
    lm_graph_free(m->graph);
    for (int i = 0; i < LM_INNER_AXES; i++)
        lm_graph_free(m->whole[i]);
    lm_stage_list_free(m->stages);
    lm_free(m->addends.of);
    lm_free(m->param);
    lm_free(m->slice);
    lm_free(m->index);
    lm_free(m->cache);
    lm_free(m->kept);
    lm_free(m->constant);
    lm_free(m->aside);
    lm_free(m->grad);
    lm_free(m->routed);
    lm_free(m->memory);
    lm_free(m);
}

const lm_model_aside *lm_model_aside_find(const lm_model *m, const char *name)
{
    for (int i = 0; i < m->n_aside; i++)
        if (!strcmp(m->aside[i].name, name))
            return &m->aside[i];
    return NULL;
}

int lm_model_cache(const lm_model *m, int64_t layer, lm_cache_kind kind)
{
    for (int i = 0; i < m->n_caches; i++)
        if (m->cache[i].layer == layer && m->cache[i].kind == kind)
            return i;
    return -1;
}

int lm_model_slice(const lm_model *m, const char *name)
{
    char now[LM_TENSOR_NAME];
    return (int)m->index[cell_of(m, bare(m, lm_arch_present_name(m->config.arch, name, now)))] - 1;
}

const char *lm_model_saved(const lm_model *m, int i, char out[512])
{
    const lm_slice *s = &m->slice[i];
    if (s->saved || s->of_adapter)
        return s->saved ? s->saved : s->name;
    snprintf(out, 512, "base_model.model.%s", s->name);
    return out;
}

/* The head of the language model from which a model of scores was made. */
static bool is_head(const lm_config *c, const char *name)
{
    char head[LM_TENSOR_NAME];
    return !strcmp(name, lm_arch_head(c->arch, head));
}

/* Of modules that are in the model, the copies alone. */
static bool passes_over(const lm_model *m, const char *name)
{
    const int64_t layer = lm_ahead_layer(&m->config, name);
    lm_part of;
    return layer >= 0 && lm_b_has_ahead(m, layer - m->config.layers)
               ? lm_ahead_is_copy(&m->config, name, &of)
               : lm_config_passes_over(&m->config, name);
}

bool lm_model_ignores(const lm_model *m, const char *name)
{
    const lm_config *c = &m->config;
    int64_t layer;
    return passes_over(m, name) || lm_arch_is_buffer(c->arch, name) || lm_config_ties(c, name) ||
           lm_arch_kv_scale(name, &layer) || (c->scores && is_head(c, name));
}
