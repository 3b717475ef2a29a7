/* SPDX-License-Identifier: Apache-2.0 */
/* read_experts.c -- keys of config.json that mixtures of experts have. */
#include <inttypes.h>
#include <string.h>

#include "base/mem.h"
#include "kernels/route.h"
#include "model/arch_read.h"

enum { LM_MOST_EXPERTS = 1 << 18 /* of all layers: Kimi K2 has 23,040 */ };

/* The number under either of its names, which must agree. */
static lm_code read_count(const json_t *o, const char *where, const lm_moe_defaults *d, int64_t *n,
                          lm_err *e)
{
    int64_t other;
    bool both = d->other_key && json_object_get(o, d->other_key);
    if (lm_json_i64_or(o, both ? d->other_key : d->experts_key, d->experts, 1,
                       LM_ROUTE_MOST_EXPERTS, &other, where, e) ||
        lm_json_i64_or(o, d->experts_key, other, 1, LM_ROUTE_MOST_EXPERTS, n, where, e))
        return e->code;
    if (*n != other)
        return lm_fail(e, LM_EUSAGE, where, NULL, "\"%s\" is %" PRId64 ", but \"%s\" is %" PRId64,
                       d->experts_key, *n, d->other_key, other);
    return LM_OK;
}

static lm_code read_layer(const json_t *o, const char *where, const lm_moe_defaults *d, lm_moe *m,
                          lm_err *e)
{
    bool asks = false;
    m->normalise = d->normalise;
    if (read_count(o, where, d, &m->experts, e) ||
        lm_json_i64_or(o, "num_experts_per_tok", d->chosen, 1, LM_ROUTE_MOST_EXPERTS, &m->chosen,
                       where, e) ||
        lm_json_i64_or(o, d->ffn_key, d->ffn, 1, LM_MOST_WIDTH, &m->ffn, where, e) ||
        lm_json_f64_or(o, "router_jitter_noise", 0, &m->jitter, where, e) ||
        lm_json_bool_or(o, "output_router_logits", false, &asks, where, e) ||
        lm_json_f64_or(o, "router_aux_loss_coef", 0.001, &m->aux_coef, where, e) ||
        (!d->normalise && lm_json_bool_or(o, "norm_topk_prob", false, &m->normalise, where, e)) ||
        (d->shared && lm_json_i64_or(o, "shared_expert_intermediate_size", d->shared, 1,
                                     LM_MOST_WIDTH, &m->shared, where, e)))
        return e->code;
    m->shared_gate = d->shared > 0;
    m->scale = m->groups = m->kept_groups = 1;
    if (!(m->aux_coef >= 0))
        return lm_read_bad(where, "router_aux_loss_coef", e, "is negative");
    if (!asks) /* as in transformers, which has the loss only when it returns the logits */
        m->aux_coef = 0;
    if (m->chosen > m->experts)
        return lm_fail(e, LM_EUSAGE, where, NULL,
                       "\"num_experts_per_tok\" is %" PRId64 ", but \"%s\" is %" PRId64, m->chosen,
                       d->experts_key, m->experts);
    if (!(m->jitter >= 0 && m->jitter < 1))
        return lm_read_bad(where, "router_jitter_noise", e, "is not in [0, 1)");
    return LM_OK;
}

/* Noise that the router learns, under the names of LLaMA-MoE. */
static lm_code read_noise(const json_t *o, const char *where, const lm_config *c, lm_moe *m,
                          lm_err *e)
{
    if (lm_json_bool_or(o, "gate_add_noise", false, &m->noisy, where, e) ||
        lm_json_f64_or(o, "gate_noise_epsilon", 0, &m->noise_least, where, e))
        return e->code;
    if (!(m->noise_least >= 0 && m->noise_least <= 1e6))
        return lm_read_bad(where, "gate_noise_epsilon", e, "is not in [0, 1e6]");
    if (m->noisy && !lm_arch_part(c->arch, LM_PART_ROUTER_NOISE))
        return lm_fail(e, LM_EUSAGE, where, "set it to false",
                       "\"gate_add_noise\": routers of a %s do not learn noise",
                       lm_arch_name(c->arch));
    return LM_OK;
}

/* Experts are listed one by one, and their numbers counted in 64 bits. */
static lm_code check_total(const lm_config *c, const lm_moe *m, const char *where, const char *key,
                           lm_err *e)
{
    const int64_t layers = lm_config_depth(c);
    int64_t numbers;
    if (m->experts * layers > LM_MOST_EXPERTS)
        return lm_fail(e, LM_EUSAGE, where, NULL,
                       "\"%s\" is %" PRId64 " in %" PRId64
                       " layers, but %d experts in all are supported",
                       key, m->experts, layers, LM_MOST_EXPERTS);
    if (!lm_mul_i64_ok(c->width, 3 * m->ffn, &numbers) ||
        !lm_mul_i64_ok(numbers, 2 * m->experts * layers, &numbers))
        return lm_fail(e, LM_EUSAGE, where, NULL,
                       "%" PRId64 " layers of %" PRId64 " experts of width %" PRId64
                       " are too large",
                       layers, m->experts, m->ffn);
    return LM_OK;
}

static bool listed(const json_t *list, int64_t layer)
{
    for (size_t i = 0; i < json_array_size(list); i++)
        if (json_integer_value(json_array_get(list, i)) == layer)
            return true;
    return false;
}

static lm_code check_list(const json_t *list, const char *where, int64_t layers, lm_err *e)
{
    if (list && !json_is_null(list) && !json_is_array(list))
        return lm_read_bad(where, "mlp_only_layers", e, "is not a list of layers");
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *v = json_array_get(list, i);
        if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) >= layers)
            return lm_read_bad(where, "mlp_only_layers", e, "names a layer that does not exist");
    }
    return LM_OK;
}

lm_code lm_read_experts(const json_t *o, const char *where, const lm_moe_defaults *d, lm_config *c,
                        lm_err *e)
{
    const json_t *dense = json_object_get(o, "mlp_only_layers");
    int64_t step = 1;
    lm_moe m = { 0 };
    if (read_layer(o, where, d, &m, e) || read_noise(o, where, c, &m, e) ||
        (d->some_dense &&
         (check_list(dense, where, c->layers, e) ||
          lm_json_i64_or(o, "decoder_sparse_step", 1, 1, LM_MOST_LAYERS, &step, where, e))))
        return e->code;
    if (check_total(c, &m, where, d->experts_key, e))
        return e->code;
    for (int64_t l = 0; l < c->layers; l++)
        if (!d->some_dense || (!listed(dense, l) && (l + 1) % step == 0))
            c->layer[l].moe = m;
    return LM_OK;
}

/* ---- DeepSeek's keys ---- */

static lm_code check_groups(const lm_moe *m, const char *where, lm_err *e)
{
    if (m->experts % m->groups || (!m->group_max && m->experts / m->groups < 2))
        return lm_fail(e, LM_EUSAGE, where, NULL,
                       "\"n_group\" is %" PRId64 ", but \"n_routed_experts\" is %" PRId64,
                       m->groups, m->experts);
    if (m->kept_groups > m->groups)
        return lm_fail(e, LM_EUSAGE, where, NULL,
                       "\"topk_group\" is %" PRId64 ", but \"n_group\" is %" PRId64, m->kept_groups,
                       m->groups);
    if (m->chosen > m->experts / m->groups * m->kept_groups)
        return lm_fail(e, LM_EUSAGE, where, NULL,
                       "\"num_experts_per_tok\" is %" PRId64
                       ", but \"topk_group\" groups have %" PRId64 " experts",
                       m->chosen, m->experts / m->groups * m->kept_groups);
    return LM_OK;
}

/* A text that says what the architecture does anyway. */
static lm_code check_word(const json_t *o, const char *where, const char *key, const char *only,
                          lm_err *e)
{
    const char *word;
    if (lm_json_str_or(o, key, only, &word, where, e))
        return e->code;
    if (strcmp(word, only) != 0)
        return lm_fail(e, LM_EUSAGE, where, NULL, "\"%s\" is \"%s\", but the model has \"%s\"", key,
                       word, only);
    return LM_OK;
}

/* How experts are chosen.  Without groups by topk_method, their numbers mean nothing. */
static lm_code read_gate(const json_t *o, const char *where, const lm_scored_defaults *d, lm_moe *m,
                         lm_err *e)
{
    const char *method;
    if (lm_json_i64_or(o, "n_group", d->groups, 1, m->experts, &m->groups, where, e) ||
        lm_json_i64_or(o, "topk_group", d->kept_groups, 1, m->experts, &m->kept_groups, where, e) ||
        lm_json_bool_or(o, "norm_topk_prob", d->normalise, &m->normalise, where, e) ||
        check_word(o, where, "scoring_func", d->softmax ? "softmax" : "sigmoid", e))
        return e->code;
    m->sigmoid = m->score_bias = !d->softmax;
    m->group_max = d->softmax;
    if (!d->softmax)
        return check_word(o, where, "topk_method", "noaux_tc", e) ? e->code
                                                                  : check_groups(m, where, e);
    if (m->normalise)
        return lm_read_bad(where, "norm_topk_prob", e,
                           "only false is supported: programs differ in what the factor is then");
    if (lm_json_str_or(o, "topk_method", "greedy", &method, where, e))
        return e->code;
    if (!strcmp(method, "greedy"))
        m->groups = m->kept_groups = 1;
    else if (strcmp(method, "group_limited_greedy") != 0)
        return lm_fail(e, LM_EUSAGE, where, "greedy and group_limited_greedy are supported",
                       "unknown topk_method \"%s\"", method);
    return check_groups(m, where, e);
}

lm_code lm_read_scored_experts(const json_t *o, const char *where, const lm_scored_defaults *d,
                               lm_config *c, lm_err *e)
{
    lm_moe m = { .scale = 1 };
    int64_t dense = 0, shared = 0, step = 1;
    if (lm_json_i64(o, "n_routed_experts", 1, LM_ROUTE_MOST_EXPERTS, &m.experts, where, e) ||
        lm_json_i64(o, "num_experts_per_tok", 1, m.experts, &m.chosen, where, e) ||
        lm_json_i64(o, "moe_intermediate_size", 1, LM_MOST_WIDTH, &m.ffn, where, e) ||
        lm_json_i64_or(o, "n_shared_experts",
                       json_object_get(o, "n_shared_experts") ? 0 : d->shared, 0, 4096, &shared,
                       where, e) ||
        lm_json_i64_or(o, "first_k_dense_replace", d->dense, 0, LM_MOST_LAYERS, &dense, where, e) ||
        lm_json_i64_or(o, "moe_layer_freq", 1, 1, LM_MOST_LAYERS, &step, where, e) ||
        lm_json_f64_or(o, "routed_scaling_factor", d->scale, &m.scale, where, e) ||
        read_gate(o, where, d, &m, e))
        return e->code;
    if (!(m.scale > 0))
        return lm_read_bad(where, "routed_scaling_factor", e, "is not positive");
    m.shared = shared * m.ffn;
    if (m.shared > LM_MOST_WIDTH)
        return lm_read_bad(where, "n_shared_experts", e, "makes the shared expert too wide");
    if (check_total(c, &m, where, "n_routed_experts", e))
        return e->code;
    for (int64_t l = dense; l < lm_config_depth(c); l++)
        if (l % step == 0)
            c->layer[l].moe = m;
    return LM_OK;
}
