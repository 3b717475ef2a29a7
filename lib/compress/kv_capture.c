/* SPDX-License-Identifier: Apache-2.0 */
/* kv_capture.c -- a model's graph whose queries, keys and values are kept: each layer has one node that rotates, or none, and
 * one of attention, whose inputs these are. */
#include "compress/kv_capture.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "model/arch.h"
#include "model/rotary.h"
#include "numeric/code_rows.h"
#include "op/ops.h"
#include "train/batch.h"

/* Values of one layer that are kept. */
typedef struct {
    lm_vid before, rotated, gradient; /* gradient LM_NONE: not computed */
} kept;

struct lm_kv_capture {
    lm_loaded *w;
    lm_backend *b;
    int64_t seq;
    lm_model *model;
    lm_plan plan;
    lm_exec *exec;
    lm_batch batch;
    lm_rotary rope;
    kept *layer;
    lm_vid *keep; /* all of them and the loss */
    int n_keep;
    struct room {
        void *data;
        size_t bytes;
    } * grad; /* [n_params]: gradients of parameters, which are not read */
};

/* Gradients of activations are computed in front of parameters that train: those of the first layer, the fewest that
 * reach all layers. */
static bool is_first_layer(void *ctx, const char *name)
{
    const lm_arch *a = ctx;
    size_t n = strlen(a->layers);

    return strncmp(name, a->layers, n) == 0 && strncmp(name + n, "0.", 2) == 0;
}

/* ---- the values ---- */

static int find_node(const lm_graph *g, const lm_op *op, int64_t layer, lm_phase phase)
{
    for (size_t k = 0; k < g->n_nodes; k++)
        if (g->node[k].op == op && g->node[k].layer == layer && g->node[k].phase == phase)
            return (int)k;
    return -1;
}

static lm_code find_layer(lm_kv_capture *c, int64_t l, bool gradients, lm_err *e)
{
    const lm_graph *g = c->model->graph;
    int attend = find_node(g, &lm_op_attention, l, LM_PHASE_FORWARD);
    int rotate = find_node(g, &lm_op_rope, l, LM_PHASE_FORWARD);
    kept *k = &c->layer[l];

    if (attend < 0)
        return lm_fail(e, LM_EUSAGE, "layers", NULL, "layer %" PRId64 " has no keys and values", l);
    k->rotated = g->node[attend].in[0];
    k->before = rotate < 0 ? k->rotated : g->node[rotate].in[0];
    k->gradient = LM_NONE;
    if (!gradients)
        return LM_OK;
    int back = rotate < 0 ? find_node(g, &lm_op_attention_dx, l, LM_PHASE_BACKWARD_INPUT)
                          : find_node(g, &lm_op_rope, l, LM_PHASE_BACKWARD_INPUT);
    if (back < 0)
        return lm_fail(e, LM_EBUG, "layers", NULL, "layer %" PRId64 " has no gradient", l);
    k->gradient = g->node[back].out[0];
    return LM_OK;
}

static lm_code find_values(lm_kv_capture *c, bool gradients, lm_err *e)
{
    int64_t layers = c->w->config.layers;

    if (lm_alloc_n(&c->layer, (size_t)layers, sizeof *c->layer, "layers", e) ||
        lm_alloc_n(&c->keep, 3 * (size_t)layers + 1, sizeof *c->keep, "layers", e))
        return e->code;
    for (int64_t l = 0; l < layers; l++) {
        if (find_layer(c, l, gradients, e))
            return e->code;
        c->keep[c->n_keep++] = c->layer[l].before;
        if (c->layer[l].rotated != c->layer[l].before)
            c->keep[c->n_keep++] = c->layer[l].rotated;
        if (gradients)
            c->keep[c->n_keep++] = c->layer[l].gradient;
    }
    c->keep[c->n_keep++] = c->model->loss;
    return LM_OK;
}

/* ---- life ---- */

static lm_code bind_gradients(lm_kv_capture *c, lm_err *e)
{
    const lm_model *m = c->model;

    if (lm_alloc_n(&c->grad, (size_t)m->n_params, sizeof *c->grad, "gradients", e))
        return e->code;
    for (int i = 0; i < m->n_params; i++) {
        if (m->grad[i] == LM_NONE)
            continue;
        size_t bytes = lm_stored_bytes(&m->graph->value[m->grad[i]].t);
        if (c->b->alloc(c->b, bytes, "gradients", &c->grad[i].data, e))
            return e->code;
        c->grad[i].bytes = bytes;
        lm_exec_bind(c->exec, m->grad[i], c->grad[i].data);
    }
    return LM_OK;
}

/* Plain operators without joins, so that the input and the output of each rotation are values. */
static lm_code make_graph(lm_kv_capture *c, bool gradients, lm_err *e)
{
    const lm_build build = { .mode = gradients ? LM_MODE_TRAIN : LM_MODE_EVAL,
                             .batch = 1,
                             .seq = c->seq,
                             .precision = { .low = LM_DTYPE_F32 },
                             .trainable = is_first_layer,
                             .ctx = (void *)c->w->config.arch };

    if (lm_model_build(&c->w->config, &build, &c->model, e) || find_values(c, gradients, e) ||
        lm_plan_make(c->model->graph, c->b, c->keep, c->n_keep, &c->plan, e))
        return e->code;
    return LM_OK;
}

static lm_code open_graph(lm_kv_capture *c, bool gradients, lm_err *e)
{
    lm_code rc = make_graph(c, gradients, e);

    if (!rc)
        rc = lm_exec_new_planned(c->model->graph, c->b, &c->plan, NULL, &c->exec, e);
    if (!rc)
        rc = lm_batch_new(&c->batch, c->b, 1, c->seq, 0, e);
    if (!rc)
        rc = lm_rotary_new(c->model, c->b, &c->rope, e);
    if (!rc && !c->w->store)
        rc = lm_loaded_weights(c->w, c->model, c->b, e);
    if (rc)
        return rc;
    lm_batch_bind(&c->batch, c->model, c->exec);
    lm_rotary_bind(&c->rope, c->model, c->exec);
    lm_store_bind(c->w->store, c->model, c->exec);
    return gradients ? bind_gradients(c, e) : LM_OK;
}

static lm_code new_capture(lm_loaded *w, int64_t seq, lm_backend *b, lm_kv_capture **out, lm_err *e)
{
    *out = NULL;
    if (!b->host_memory)
        return lm_fail(e, LM_EUSAGE, b->name, "use the CPU", "keys and values are read there");
    if (seq < 2 || seq > w->config.max_positions)
        return lm_fail(e, LM_EUSAGE, "windows", NULL,
                       "%" PRId64 " tokens: at least 2, at most the model's %" PRId64 " positions",
                       seq, w->config.max_positions);
    if (lm_config_check_causal(&w->config, "kv cache", "use a causal language model", e) ||
        lm_config_check_heads(&w->config, "kv cache", e) ||
        lm_config_check_coded(&w->config, "kv cache", e) ||
        lm_alloc_n(out, 1, sizeof **out, "a model", e))
        return e->code;
    **out = (lm_kv_capture){ .w = w, .b = b, .seq = seq };
    return LM_OK;
}

lm_code lm_kv_capture_new(lm_loaded *w, int64_t seq, bool gradients, lm_backend *b,
                          lm_kv_capture **out, lm_err *e)
{
    if (new_capture(w, seq, b, out, e))
        return e->code;
    if (open_graph(*out, gradients, e)) {
        lm_kv_capture_free(*out);
        *out = NULL;
    }
    return e->code;
}

lm_code lm_kv_capture_bytes(lm_loaded *w, int64_t seq, bool gradients, lm_backend *b,
                            double *weights, double *window, lm_err *e)
{
    size_t bytes[LM_KEPT_ROLES] = { 0 };
    lm_kv_capture *c;

    if (new_capture(w, seq, b, &c, e))
        return e->code;
    lm_code rc = make_graph(c, gradients, e);
    if (!rc && w->store)
        lm_store_bytes(w->store, bytes);
    else if (!rc)
        rc = lm_store_outlook(c->model, &(lm_store_opts){ 0 }, bytes, e);
    *weights = 0;
    for (int i = 0; i < LM_KEPT_ROLES; i++)
        *weights += (double)bytes[i];
    *window = (double)c->plan.bytes;
    for (int i = 0; !rc && gradients && i < c->model->n_params; i++)
        if (c->model->grad[i] != LM_NONE)
            *window += (double)lm_stored_bytes(&c->model->graph->value[c->model->grad[i]].t);
    lm_kv_capture_free(c);
    return rc;
}

void lm_kv_capture_free(lm_kv_capture *c)
{
    if (!c)
        return;
    for (int i = 0; c->grad && i < c->model->n_params; i++)
        if (c->grad[i].data)
            c->b->free(c->b, c->grad[i].data, c->grad[i].bytes);
    lm_free(c->grad);
    lm_exec_free(c->exec);
    lm_plan_fini(&c->plan);
    lm_model_free(c->model);
    lm_batch_fini(&c->batch);
    lm_rotary_fini(&c->rope);
    lm_free(c->layer);
    lm_free(c->keep);
    lm_free(c);
}

/* ---- a window ---- */

lm_code lm_kv_capture_run(lm_kv_capture *c, const uint32_t *ids, double *nll, lm_err *e)
{
    lm_step step = { 0 };
    double sum = 0;

    for (int64_t t = 0; t < c->seq; t++) {
        if (ids[t] >= (uint64_t)c->w->config.vocab)
            return lm_fail(e, LM_EFORMAT, "windows", "give the model's own tokens",
                           "token %" PRIu32 " is not in the vocabulary of %" PRId64, ids[t],
                           c->w->config.vocab);
        c->batch.tokens[t] = (int32_t)ids[t];
        c->batch.targets[t] = t + 1 < c->seq ? (int32_t)ids[t + 1] : -1;
        c->batch.pos[t] = (int32_t)t;
        c->batch.lo[t] = 0;
        c->batch.scale[t] = t + 1 < c->seq ? 1 : 0;
    }
    if (lm_batch_push(&c->batch, NULL, e) || lm_exec_run(c->exec, &step, e) ||
        c->b->sync(c->b, c->b->main, e))
        return e->code;
    const float *loss = lm_exec_data(c->exec, c->model->loss);
    for (int64_t t = 0; t + 1 < c->seq; t++)
        sum += (double)loss[t];
    if (!isfinite(sum))
        return lm_fail(e, LM_ENUMERIC, "loss", "find the weights that are not finite",
                       "not a finite number");
    if (nll)
        *nll += sum;
    return LM_OK;
}

lm_kv_captured lm_kv_capture_layer(const lm_kv_capture *c, int64_t layer)
{
    const kept *k = &c->layer[layer];

    return (lm_kv_captured){ lm_exec_data(c->exec, k->before), lm_exec_data(c->exec, k->rotated),
                             k->gradient == LM_NONE ? NULL : lm_exec_data(c->exec, k->gradient) };
}

void lm_kv_columns(const float *rows, int64_t row_width, int64_t from, int64_t width, int64_t n,
                   float *out)
{
    for (int64_t t = 0; t < n; t++)
        memcpy(out + t * width, rows + t * row_width + from, (size_t)width * sizeof *out);
}

void lm_kv_capture_rotate(const lm_kv_capture *c, int64_t layer, int64_t n, float *k)
{
    const lm_layer *y = &c->w->config.layer[layer];
    const float *table = y->rope < 0 ? NULL : lm_exec_data(c->exec, c->model->rope[y->rope]);
    int64_t R = table ? c->w->config.rope[y->rope].dim : 0;

    for (int64_t t = 0; t < n; t++)
        for (int64_t h = 0; h < y->kv_heads; h++) {
            const float *cosine = table + t * R, *sine = cosine + R / 2;
            float *x = k + (t * y->kv_heads + h) * y->head_dim;
            for (int64_t j = 0; j < R / 2; j++) {
                float a = x[j], b = x[j + R / 2];
                x[j] = a * cosine[j] - b * sine[j];
                x[j + R / 2] = b * cosine[j] + a * sine[j];
            }
        }
}

/* ---- layers ---- */

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

lm_code lm_kv_capture_outliers(const lm_kv_capture *c, int64_t layer, double *out, lm_err *e)
{
    const lm_layer *y = &c->w->config.layer[layer];
    int64_t D = y->head_dim, all = (y->heads + 2 * y->kv_heads) * D;
    const float *rows = lm_kv_capture_layer(c, layer).rotated;
    double *sum;

    if (lm_alloc_n(&sum, (size_t)D, sizeof *sum, "channels", e))
        return e->code;
    *out = 0;
    for (int64_t h = 0; h < y->kv_heads; h++) {
        for (int64_t d = 0; d < D; d++) {
            sum[d] = 0;
            for (int64_t t = 0; t < c->seq; t++) {
                double x = (double)rows[t * all + (y->heads + h) * D + d];
                sum[d] += x * x;
            }
        }
        qsort(sum, (size_t)D, sizeof *sum, by_value);
        *out = fmax(*out, sqrt(sum[D - 1] / sum[D / 2]));
    }
    lm_free(sum);
    return LM_OK;
}

lm_kv_attention lm_kv_attention_of(const lm_config *config, int64_t layer)
{
    const lm_layer *y = &config->layer[layer];

    return (
        lm_kv_attention){ y->heads, y->kv_heads, y->head_dim, y->window, y->scale, y->soft_cap };
}
