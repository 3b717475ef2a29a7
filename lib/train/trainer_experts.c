/* SPDX-License-Identifier: Apache-2.0 */
/* trainer_experts.c -- what the routers of mixtures did in a step: loads and probabilities of the experts of each layer,
 * summed over micro-batches by the graph; as records, and for the message about a router that is not finite. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "base/mem.h"
#include "model/arch.h"
#include "parallel/balance.h"
#include "train/trainer_impl.h"

/* Bytes of an array of a layer: of loads, of probabilities, of one number dropped, each on cache lines of its own. */
static size_t array_bytes(int64_t experts)
{
    return ((size_t)experts * sizeof(float) + 63) / 64 * 64;
}

static bool has_experts(const lm_trainer *t, int64_t layer)
{
    return t->program->routed && t->program->routed[layer].load != LM_NONE;
}

/* Bytes before the arrays of a layer; with layer = lm_config_depth, all bytes. */
static size_t bytes_before(const lm_trainer *t, int64_t layer)
{
    size_t sum = 0;
    for (int64_t l = 0; l < layer; l++)
        if (has_experts(t, l))
            sum += 2 * array_bytes(t->io.config->layer[l].moe.experts) + array_bytes(1);
    return sum;
}

lm_code trainer_experts_new(lm_trainer *t, lm_err *e)
{
    const lm_config *c = t->io.config;
    const size_t bytes = bytes_before(t, lm_config_depth(c));
    if (!bytes)
        return LM_OK;
    if (lm_mirror_new(t->b, bytes, "loads of experts", &t->routed, e) ||
        lm_alloc_n(&t->shares, LM_ROUTE_MOST_EXPERTS, sizeof *t->shares, "loads of experts", e) ||
        lm_alloc_n(&t->biases, LM_ROUTE_MOST_EXPERTS, sizeof *t->biases, "loads of experts", e))
        return e->code;
    for (int64_t l = 0; l < lm_config_depth(c); l++) {
        if (!has_experts(t, l))
            continue;
        char *at = (char *)t->routed.dev + bytes_before(t, l);
        const size_t array = array_bytes(c->layer[l].moe.experts);
        lm_exec_bind(t->program->exec, t->program->routed[l].load, at);
        lm_exec_bind(t->program->exec, t->program->routed[l].mean, at + array);
        lm_exec_bind(t->program->exec, t->program->routed[l].dropped, at + 2 * array);
    }
    return LM_OK;
}

void trainer_experts_fini(lm_trainer *t)
{
    if (t->routed.bytes)
        lm_mirror_fini(&t->routed);
    lm_free(t->shares);
    lm_free(t->biases);
}

lm_code trainer_experts_pull(lm_trainer *t, lm_err *e)
{
    return t->routed.bytes ? lm_mirror_pull(&t->routed, t->routed.bytes, NULL, e) : LM_OK;
}

/* ---- a layer ---- */

typedef struct {
    int64_t experts, dead;
    const float *load, *mean; /* sums over the micro-batches */
    double total, most;       /* of the loads */
    double entropy;           /* of the mean probabilities, in nats */
    double dropped;           /* share of the assignments */
} layer_view;

static bool view_layer(const lm_trainer *t, int64_t layer, int64_t micros, layer_view *v)
{
    if (!has_experts(t, layer))
        return false;
    const lm_moe *m = &t->io.config->layer[layer].moe;
    const float *at = (const float *)t->routed.host + bytes_before(t, layer) / sizeof(float);
    const size_t array = array_bytes(m->experts) / sizeof(float);
    *v = (layer_view){ .experts = m->experts, .load = at, .mean = at + array };
    for (int64_t e = 0; e < v->experts; e++) {
        const double n = (double)v->load[e], p = (double)v->mean[e] / (double)micros;
        v->total += n;
        v->most = n > v->most ? n : v->most;
        v->dead += !(n > 0);
        v->entropy -= p > 0 || isnan(p) ? p * log(p) : 0;
    }
    v->dropped = v->total > 0 ? (double)at[2 * array] / v->total : 0;
    return true;
}

/* The largest load over the mean load. */
static double peak_of(const layer_view *v)
{
    return v->total > 0 ? v->most * (double)v->experts / v->total : NAN;
}

/* What the load of the fullest rank over the mean would be with `each` slots for experts on every rank, dealt by this step's
 * loads. */
static lm_code report_dealt(lm_trainer *t, const layer_view *v, int64_t ranks, int64_t each,
                            const char *name, lm_err *e)
{
    const lm_balance_ask ask = {
        .experts = v->experts, .slots = each * ranks, .groups = 1, .nodes = 1, .ranks = ranks
    };
    int32_t *dealt = NULL;
    if (!lm_alloc_n(&dealt, (size_t)(ask.slots + v->experts), sizeof *dealt, "loads of experts",
                    e) &&
        !lm_balance_experts(t->shares, &ask, dealt, dealt + ask.slots, e))
        lm_metrics_f32(t->io.metrics, name,
                       lm_balance_peak(t->shares, &ask, dealt, dealt + ask.slots));
    lm_free(dealt);
    return e->code;
}

/* Of ranks along ep: the load of the fullest one over the mean, and what it would be if each rank had as many experts, or one
 * slot more for copies of hot experts. */
static lm_code report_ranks(lm_trainer *t, const layer_view *v, lm_err *e)
{
    const int64_t ranks = lm_mesh_along(&t->o.mesh, LM_AXIS_EP), each = v->experts / ranks;
    double most = 0;
    if (ranks == 1 || !(v->total > 0))
        return LM_OK;
    for (int64_t r = 0; r < ranks; r++) {
        double sum = 0;
        for (int64_t k = v->experts * r / ranks; k < v->experts * (r + 1) / ranks; k++)
            sum += t->shares[k];
        most = sum > most ? sum : most;
    }
    lm_metrics_f32(t->io.metrics, "rank_max_over_mean", most * (double)ranks / v->total);
    if (v->experts % ranks == 0 && report_dealt(t, v, ranks, each, "dealt_max_over_mean", e))
        return e->code;
    return report_dealt(t, v, ranks, each + 1, "copied_max_over_mean", e);
}

const char *trainer_experts_note(const lm_trainer *t, const step_info *i, char out[80])
{
    double worst = 0;
    int64_t layer = -1;
    layer_view v;
    *out = 0;
    for (int64_t l = 0; i->micros && l < lm_config_depth(t->io.config); l++)
        if (view_layer(t, l, i->micros, &v) && peak_of(&v) > worst) {
            worst = peak_of(&v);
            layer = l;
        }
    if (layer >= 0)
        snprintf(out, 80, ", fullest expert %.2f x the mean (layer %" PRId64 ")", worst, layer);
    return out;
}

/* The bias of a layer's router in t->biases, and the number of its tensor; -1: it has none, or codes hold it. */
static lm_code read_bias(const lm_trainer *t, int64_t layer, int *tensor, lm_err *e)
{
    const lm_config *c = t->io.config;
    const lm_store *s = t->s.store;
    char name[LM_TENSOR_NAME];
    const lm_store_block *k;
    *tensor = -1;
    if (!c->layer[layer].moe.score_bias)
        return LM_OK;
    const int i = lm_model_slice(
        s->model, lm_tensor_hf_name(c->arch, LM_PART_ROUTER_BIAS, layer, false, name));
    for (int n = 0;
         i >= 0 && !s->model->slice[i].cut.none && (k = lm_store_find(s, LM_KEPT_FROZEN, n)); n++)
        if (k->format->element == LM_DTYPE_F32 && lm_store_has(s, k, i)) {
            *tensor = i;
            return lm_store_get(s, k, i, t->biases, e);
        }
    return LM_OK;
}

/* The router is one stage's: of ranks along pp the others have no bias of it, and ask. */
static lm_code report_bias(lm_trainer *t, int64_t layer, int64_t experts, lm_err *e)
{
    float least = INFINITY, most = -INFINITY;
    int tensor;
    if (!t->io.config->layer[layer].moe.score_bias)
        return LM_OK;
    if (read_bias(t, layer, &tensor, e))
        return e->code;
    for (int64_t k = 0; tensor >= 0 && k < experts; k++) {
        least = fminf(least, t->biases[k]);
        most = fmaxf(most, t->biases[k]);
    }
    lm_comm *stages = t->pipe ? t->along[LM_AXIS_PP] : NULL;
    if (stages && (lm_comm_all_reduce(stages, &least, &least, 1, LM_DTYPE_F32, LM_COMM_MIN, e) ||
                   lm_comm_all_reduce(stages, &most, &most, 1, LM_DTYPE_F32, LM_COMM_MAX, e)))
        return e->code;
    if (least > most)
        return LM_OK;
    lm_metrics_f32(t->io.metrics, "bias_min", (double)least);
    lm_metrics_f32(t->io.metrics, "bias_max", (double)most);
    return LM_OK;
}

lm_code trainer_experts_report(lm_trainer *t, const step_info *i, bool meet, lm_err *e)
{
    lm_metrics *m = t->io.metrics;
    layer_view v;
    /* Ranks along pp exchange their biases, also those that write no records. */
    for (int64_t l = 0; (m || t->pipe) && i->micros && l < lm_config_depth(t->io.config); l++) {
        if (!view_layer(t, l, i->micros, &v))
            continue;
        for (int64_t k = 0; k < v.experts; k++)
            t->shares[k] = (double)v.load[k];
        lm_metrics_begin(m, "experts");
        lm_metrics_int(m, "step", t->s.step);
        lm_metrics_int(m, "tokens", t->s.tokens);
        lm_metrics_f32(m, "seconds", t->s.seconds);
        lm_metrics_int(m, "layer", l);
        lm_metrics_f32(m, "max_over_mean", peak_of(&v));
        lm_metrics_f32(m, "entropy", v.entropy);
        lm_metrics_f32(m, "dropped", v.dropped);
        lm_metrics_int(m, "dead", v.dead);
        if (report_ranks(t, &v, e) || ((meet || !t->pipe) && report_bias(t, l, v.experts, e)))
            return e->code;
        lm_metrics_list(m, "load", t->shares, (size_t)v.experts);
        if (lm_metrics_end(m, e))
            return e->code;
    }
    return LM_OK;
}

/* ---- biases ---- */

lm_code trainer_experts_balance(lm_trainer *t, lm_err *e)
{
    layer_view v;
    int tensor;
    for (int64_t l = 0; t->o.bias_rate > 0 && l < lm_config_depth(t->io.config); l++) {
        if (!view_layer(t, l, 1, &v))
            continue;
        if (read_bias(t, l, &tensor, e))
            return e->code;
        for (int64_t k = 0; tensor >= 0 && k < v.experts; k++) {
            const double short_of = v.total - (double)v.load[k] * (double)v.experts;
            t->biases[k] += (float)(t->o.bias_rate * ((short_of > 0) - (short_of < 0)));
        }
        if (tensor >= 0 && lm_store_put(t->s.store, tensor, LM_DTYPE_F32, t->biases, e))
            return e->code;
    }
    return LM_OK;
}

/* ---- not finite ---- */

/* The mean probability of an expert is NaN where one of its logits is not finite (kernels/route.h). */
int64_t trainer_experts_bad(const lm_trainer *t, int64_t *expert)
{
    layer_view v;
    for (int64_t l = 0; t->routed.bytes && l < lm_config_depth(t->io.config); l++) {
        if (!view_layer(t, l, 1, &v))
            continue;
        int64_t bad = 0;
        for (int64_t k = 0; k < v.experts; k++)
            if (!isfinite(v.mean[k]) && !bad++)
                *expert = k;
        *expert = bad < v.experts ? *expert : -1;
        if (bad)
            return l;
    }
    return -1;
}
