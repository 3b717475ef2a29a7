/* SPDX-License-Identifier: Apache-2.0 */
/* model_run.h -- a model with all of its memory, ready to run; for tests and for the drivers of
 * tests/interop.
 *
 * Values other than activations have separate memory.  Parameters are read from a flat block of F32
 * with the layout of a store's master copy; for runs in F64 they are converted. */
#ifndef LM_TESTS_MODEL_RUN_H
#define LM_TESTS_MODEL_RUN_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "graph/exec.h"
#include "model/model.h"
#include "model/rotary.h"
#include "model/store.h"

/* For calls that are not under test: print the error and exit. */
static inline void must(lm_code rc, const lm_err *e)
{
    if (!rc)
        return;
    fprintf(stderr, "failed: %s: %s%s%s\n", e->where, e->what, e->todo[0] ? ": " : "", e->todo);
    exit(1);
}

static inline void *room(size_t n, size_t size)
{
    lm_err e = { 0 };
    void *p = NULL;
    must(lm_alloc_n(&p, n, size, "a test", &e), &e);
    return p;
}

typedef struct {
    lm_model *model;
    lm_backend *backend;
    lm_exec *exec;
    lm_par *par;
    uint16_t *low;
    float *rope[LM_MOST_ROPES], *alibi;
    void **mem; /* by value; NULL: not allocated here */
    size_t n_mem;
    lm_step step;
} runner;

static inline bool is_double(const runner *r)
{
    return r->model->build.precision.low == LM_DTYPE_F64;
}

static inline void bind_table(runner *r, lm_vid v, float *table)
{
    double *to = r->mem[v];
    for (int64_t k = 0; is_double(r) && k < lm_tensor_count(&r->model->graph->value[v].t); k++)
        to[k] = (double)table[k];
    lm_exec_bind(r->exec, v, is_double(r) ? (void *)to : table);
}

/* Tables of positions. */
static inline void runner_tables(runner *r)
{
    lm_model *m = r->model;
    for (int i = 0; i < m->config.ropes; i++) {
        lm_rope_table(&m->config, i, m->rope_rows, r->rope[i]);
        bind_table(r, m->rope[i], r->rope[i]);
    }
    if (m->alibi != LM_NONE) {
        const lm_tensor *t = &m->graph->value[m->alibi].t;
        lm_alibi_table(t->dim[0], t->dim[1], r->alibi);
        bind_table(r, m->alibi, r->alibi);
    }
}

/* In double, values that are F32 elsewhere need converted copies. */
static inline void bind_double(runner *r, const float *block)
{
    lm_model *m = r->model;
    for (int i = 0; i < m->n_params; i++) {
        const lm_param *p = &m->param[i];
        double *to = r->mem[p->value];
        if (m->graph->value[p->value].t.dtype != LM_DTYPE_F64)
            continue; /* nothing reads it */
        for (int64_t k = 0; k < p->count; k++)
            to[k] = (double)block[p->offset + k];
        lm_exec_bind(r->exec, p->value, to);
    }
}

/* (Re)bind all parameters to the numbers of `block`, which must stay where it is. */
static inline void runner_weights(runner *r, const float *block)
{
    runner_tables(r);
    if (is_double(r)) {
        bind_double(r, block);
        return;
    }
    lm_model *m = r->model;
    if (r->low)
        lm_round_bf16(block, r->low, m->block, r->par);
    for (int i = 0; i < m->n_params; i++) {
        const lm_param *p = &m->param[i];
        bool low = m->graph->value[p->value].t.dtype == LM_DTYPE_BF16;
        const void *data = low ? (const void *)(r->low + p->offset) : (block + p->offset);
        lm_exec_bind(r->exec, p->value, (void *)(uintptr_t)data);
    }
}

/* `joins`: replaces the backend's answer to what it joins; NULL: the backend's own answer. */
static inline void runner_new_joining(runner *r, const lm_config *c, const lm_build *b,
                                      lm_cpu_level level, int threads,
                                      bool (*joins)(lm_backend *, const char *, lm_dtype,
                                                    const lm_call *))
{
    lm_err e = { 0 };
    lm_build build = *b;
    memset(r, 0, sizeof *r);
    must(lm_par_new(&r->par, threads, &e), &e);
    must(lm_backend_cpu(level, r->par, &r->backend, &e), &e);
    if (joins)
        r->backend->joins = joins;
    r->backend->panels = NULL; /* weights are bound as they are */
    build.backend = r->backend;
    must(lm_model_build(c, &build, &r->model, &e), &e);
    lm_vid keep[LM_MODEL_ROWS + LM_MOST_AHEAD + 65] = { r->model->logits };
    int kept = b->mode == LM_MODE_GENERATE ? 1 : lm_model_rows(r->model, keep);
    if (b->encode)
        kept = 0;
    for (int64_t l = 0; b->encode && l < LM_MEMORY * c->layers && kept < 32; l++)
        if (r->model->memory[l] >= 0)
            keep[kept++] = r->model->memory[l];
    if (r->model->aux != LM_NONE)
        keep[kept++] = r->model->aux;
    for (int64_t k = 0; k < lm_model_losses_ahead(r->model); k++)
        keep[kept++] = r->model->ahead_loss[k];
    for (int64_t l = 0; r->model->routed && l < c->layers && l < 16; l++) {
        const lm_routed_layer *x = &r->model->routed[l];
        const lm_vid all[] = { x->z, x->expert, x->load, x->mean };
        for (int i = 0; x->z != LM_NONE && i < 4; i++)
            keep[kept++] = all[i];
    }
    must(lm_exec_new(r->model->graph, r->backend, keep, kept, &r->exec, &e), &e);
    const lm_graph *g = r->model->graph;
    r->n_mem = g->n_values;
    r->mem = room(g->n_values, sizeof *r->mem);
    for (size_t v = 0; v < g->n_values; v++) {
        const lm_value *x = &g->value[v];
        bool given = x->role == LM_ROLE_PARAM || x->role == LM_ROLE_CONST;
        if (x->role == LM_ROLE_ACT || (given && b->precision.low != LM_DTYPE_F64))
            continue;
        r->mem[v] = room((size_t)lm_tensor_count(&x->t), lm_dtype_size(x->t.dtype));
        lm_exec_bind(r->exec, (lm_vid)v, r->mem[v]);
    }
    for (int i = 0; i < r->model->n_constants; i++) {
        const lm_model_const *k = &r->model->constant[i];
        const lm_tensor *t = &g->value[k->value].t;
        if (!r->mem[k->value])
            r->mem[k->value] = room((size_t)k->count, lm_dtype_size(t->dtype));
        for (int64_t n = 0; n < k->count; n++)
            if (k->id)
                ((int32_t *)r->mem[k->value])[n] = k->id[n];
            else
                lm_set(t->dtype, r->mem[k->value], n, k->number[n]);
        lm_exec_bind(r->exec, k->value, r->mem[k->value]);
    }
    if (b->precision.low == LM_DTYPE_BF16)
        r->low = room((size_t)r->model->block, sizeof *r->low);
    for (int i = 0; i < c->ropes; i++)
        r->rope[i] = room((size_t)(r->model->rope_rows * c->rope[i].dim), sizeof **r->rope);
    if (r->model->alibi != LM_NONE)
        r->alibi = room((size_t)lm_tensor_count(&g->value[r->model->alibi].t), sizeof *r->alibi);
    if (r->model->scale != LM_NONE) {
        const lm_tensor *t = &g->value[r->model->scale].t;
        for (int64_t i = 0; i < lm_tensor_count(t); i++)
            lm_set(t->dtype, r->mem[r->model->scale], i, 1);
    }
    if (r->model->daux != LM_NONE)
        lm_set(g->value[r->model->daux].t.dtype, r->mem[r->model->daux], 0, 1);
    for (int64_t i = 0; r->model->follows != LM_NONE && i < b->batch; i++)
        ((int32_t *)r->mem[r->model->follows])[i] = (int32_t)(i % 2);
    for (int64_t i = 0; r->model->types != LM_NONE && i < b->batch * b->seq; i++)
        ((int32_t *)r->mem[r->model->types])[i] = c->types > 1 && i % b->seq >= b->seq / 2;
    for (int64_t i = 0; r->model->hi != LM_NONE && i < b->batch * b->seq; i++)
        ((int32_t *)r->mem[r->model->hi])[i] = (int32_t)b->seq;
    if (r->model->pos != LM_NONE)
        for (int64_t i = 0; i < b->batch * b->seq; i++)
            ((int32_t *)r->mem[r->model->pos])[i] = (int32_t)(i % b->seq);
}

static inline void runner_new(runner *r, const lm_config *c, const lm_build *b, lm_cpu_level level,
                              int threads)
{
    runner_new_joining(r, c, b, level, threads, NULL);
}

static inline void runner_free(runner *r)
{
    lm_exec_free(r->exec);
    lm_backend_close(r->backend);
    lm_par_free(r->par);
    for (size_t v = 0; v < r->n_mem; v++)
        lm_free(r->mem[v]);
    lm_free(r->mem);
    lm_free(r->alibi);
    lm_free(r->low);
    for (int i = 0; i < LM_MOST_ROPES; i++)
        lm_free(r->rope[i]);
    lm_model_free(r->model);
}

static inline int32_t *ids_of(const runner *r, lm_vid v)
{
    return r->mem[v];
}

static inline void runner_run(runner *r)
{
    lm_err e = { 0 };
    must(lm_exec_run(r->exec, &r->step, &e), &e);
}

/* The rows of an encoder [batch, build.source], of which `length` of each are real, and what sees them. */
static inline void runner_source(runner *r, const int64_t *source, const int64_t *length)
{
    const lm_model *m = r->model;
    const int64_t rows = m->build.source, all = rows + m->build.seq;
    for (int64_t i = 0; i < m->build.batch * rows; i++) {
        ids_of(r, m->source)[i] = (int32_t)source[i];
        ids_of(r, m->source_hi)[i] = (int32_t)length[i / rows];
    }
    for (int64_t i = 0; i < m->build.batch * all; i++)
        ids_of(r, m->cross_hi)[i] = i % all < rows ? 0 : (int32_t)length[i / all];
}

/* What a graph that generates reads of an encoder, by a graph of the same sizes that encodes; `block`: the weights. */
static inline void runner_encode(runner *speak, lm_cpu_level level, const float *block,
                                 const int64_t *source, const int64_t *length)
{
    const lm_config *c = &speak->model->config;
    lm_build build = speak->model->build;
    runner r;
    build.mode = LM_MODE_EVAL;
    build.encode = true;
    runner_new(&r, c, &build, level, 2);
    runner_weights(&r, block);
    runner_source(&r, source, length);
    runner_run(&r);
    for (int64_t b = 0; b < build.batch; b++)
        ids_of(speak, speak->model->source_used)[b] = (int32_t)length[b];
    for (int64_t l = 0; l < LM_MEMORY * c->layers; l++) {
        if (r.model->memory[l] < 0)
            continue;
        const lm_tensor *t = &r.model->graph->value[r.model->memory[l]].t;
        memcpy(speak->mem[speak->model->memory[l]], lm_exec_data(r.exec, r.model->memory[l]),
               (size_t)lm_tensor_count(t) * lm_dtype_size(t->dtype));
    }
    runner_free(&r);
}

/* Sum of the losses of all rows. */
static inline double loss_sum(const runner *r)
{
    const lm_tensor *t = &r->model->graph->value[r->model->loss].t;
    double sum = 0;
    for (int64_t i = 0; i < t->dim[0]; i++)
        sum += lm_get(t->dtype, lm_exec_data(r->exec, r->model->loss), i);
    return sum;
}

/* The weight of the losses of modules that predict tokens further on. */
static const float ahead_weight = 0.3f;

/* Their share of the loss, as loss_sum. */
static inline double ahead_sum(const runner *r)
{
    const int64_t n = lm_model_losses_ahead(r->model);
    double sum = 0;
    for (int64_t k = 0; k < n; k++) {
        const lm_vid v = r->model->ahead_loss[k];
        const lm_tensor *t = &r->model->graph->value[v].t;
        for (int64_t i = 0; i < t->dim[0]; i++)
            sum += lm_get(t->dtype, lm_exec_data(r->exec, v), i);
    }
    return n ? sum * (double)ahead_weight / (double)n : 0;
}

/* What they read and predict, of windows of one text each, whose rows' losses have that scale. */
static inline void runner_ahead(runner *r, float scale)
{
    const lm_model *m = r->model;
    const int64_t n = m->build.batch * m->build.seq, T = m->build.seq, D = lm_model_losses_ahead(m);
    for (int64_t k = 0; k < D; k++)
        for (int64_t i = 0; i < n; i++) {
            const bool inside = i % T + k + 1 < T;
            ids_of(r, m->ahead_tokens[k])[i] = inside ? ids_of(r, m->tokens)[i + k + 1] : 0;
            ids_of(r, m->ahead_targets[k])[i] = inside ? ids_of(r, m->targets)[i + k + 1] : -1;
        }
    for (int64_t i = 0; D && i < n; i++)
        lm_set(m->graph->value[m->dahead].t.dtype, r->mem[m->dahead], i,
               (double)(scale * ahead_weight / (float)D));
}

/* Element k of the gradient of parameter i. */
static inline double grad_at(const runner *r, int i, int64_t k)
{
    lm_vid v = r->model->grad[i];
    return lm_get(r->model->graph->value[v].t.dtype, r->mem[v], k);
}

/* All gradients as a block of F32 with the layout of the parameters. */
static inline void grad_block(const runner *r, float *out)
{
    memset(out, 0, (size_t)r->model->block * sizeof *out);
    for (int i = 0; i < r->model->n_params; i++)
        for (int64_t k = 0; r->model->grad[i] != LM_NONE && k < r->model->param[i].count; k++)
            out[r->model->param[i].offset + k] = (float)grad_at(r, i, k);
}

/* Logits of every row [B*T, V] by a model that generates; each run computes one position of all
 * sequences. */
static inline void all_logits(runner *r, float *out)
{
    const lm_model *m = r->model;
    int64_t b_n = m->build.batch, t_n = m->build.seq, v = m->config.vocab;
    lm_dtype d = m->graph->value[m->logits].t.dtype;
    for (int64_t t = 0; t < t_n; t++) {
        for (int64_t b = 0; b < b_n; b++) {
            ids_of(r, m->used)[b] = 0;
            ids_of(r, m->fresh)[b] = (int32_t)t_n;
            ids_of(r, m->rows)[b] = (int32_t)(b * t_n + t);
        }
        runner_run(r);
        for (int64_t b = 0; b < b_n; b++)
            for (int64_t i = 0; i < v; i++)
                out[(b * t_n + t) * v + i] =
                    (float)lm_get(d, lm_exec_data(r->exec, m->logits), b * v + i);
    }
}

/* The log-probabilities of all tokens in each row [B,T,V], by an EVAL model: from its losses with each of them as the
 * target.  The targets are changed. */
static inline void all_log_probabilities(runner *r, float *out)
{
    const lm_model *m = r->model;
    int64_t n = m->build.batch * m->build.seq, v = m->config.vocab;
    const lm_dtype d = m->graph->value[m->loss].t.dtype;
    for (int64_t k = 0; k < v; k++) {
        for (int64_t i = 0; i < n; i++)
            ids_of(r, m->targets)[i] = (int32_t)k;
        runner_run(r);
        for (int64_t i = 0; i < n; i++)
            out[i * v + k] = -(float)lm_get(d, lm_exec_data(r->exec, m->loss), i);
    }
}

/* The mode of the graph that predicts, and the predictions of all rows: logits, or log-probabilities of a bidirectional
 * model. */
static inline lm_mode prediction_mode(const lm_config *c)
{
    return lm_config_bidirectional(c) ? LM_MODE_EVAL : LM_MODE_GENERATE;
}

static inline void all_predictions(runner *r, float *out)
{
    (lm_config_bidirectional(&r->model->config) ? all_log_probabilities : all_logits)(r, out);
}

/* ||a - b|| / ||b||. */
static inline double far_apart(const float *a, const float *b, int64_t n)
{
    double diff = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        diff += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        norm += (double)b[i] * (double)b[i];
    }
    return diff == 0 ? 0 : sqrt(diff / (norm > 0 ? norm : 1));
}

#endif
