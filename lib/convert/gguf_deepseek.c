/* SPDX-License-Identifier: Apache-2.0 */
/* gguf_deepseek.c -- see gguf_deepseek.h. */
#include "convert/gguf_deepseek.h"

#include <inttypes.h>
#include <math.h>

#include "convert/gguf_keys.h"

enum { SOFTMAX = 1, SIGMOID = 2 }; /* expert_gating_func */

/* ---- writing ---- */

static void put(lm_gguf_plan *p, const lm_config *c, const char *rest, int64_t n)
{
    char key[LM_GGUF_KEY];
    lm_gguf_put_u32(p, lm_gguf_key_of(key, c->arch->gguf, rest), (uint32_t)n);
}

void lm_gguf_put_latent(lm_gguf_plan *p, const lm_config *c)
{
    const lm_latent *a = &c->layer[0].latent;
    const lm_rope_config *r = &c->rope[0];
    char key[LM_GGUF_KEY];

    put(p, c, "attention.head_count_kv", 1);
    put(p, c, "attention.q_lora_rank", a->q_rank); /* 0: queries are not compressed */
    put(p, c, "attention.kv_lora_rank", a->kv_rank);
    put(p, c, "attention.key_length", a->kv_rank + a->rope_dim);
    put(p, c, "attention.value_length", a->kv_rank);
    put(p, c, "attention.key_length_mla", a->nope_dim + a->rope_dim);
    put(p, c, "attention.value_length_mla", a->value_dim);
    if (r->type == LM_ROPE_YARN)
        lm_gguf_put_f32(p, lm_gguf_key_of(key, c->arch->gguf, "rope.scaling.yarn_log_multiplier"),
                        (float)(0.1 * r->mscale_all_dim));
}

/* The first layer with experts; NULL: none. */
static const lm_moe *experts_of(const lm_config *c, int64_t *dense)
{
    for (*dense = 0; *dense < c->layers; ++*dense)
        if (c->layer[*dense].moe.experts)
            return &c->layer[*dense].moe;
    return NULL;
}

void lm_gguf_put_scored(lm_gguf_plan *p, const lm_config *c)
{
    int64_t dense;
    const lm_moe *m = experts_of(c, &dense);
    char key[LM_GGUF_KEY];

    if (!m)
        return;
    put(p, c, "leading_dense_block_count", dense);
    put(p, c, "expert_count", m->experts);
    put(p, c, "expert_used_count", m->chosen);
    put(p, c, "expert_feed_forward_length", m->ffn);
    put(p, c, "expert_shared_count", m->shared / m->ffn);
    put(p, c, "expert_gating_func", m->sigmoid ? SIGMOID : SOFTMAX);
    put(p, c, "expert_group_count", m->groups);
    put(p, c, "expert_group_used_count", m->kept_groups);
    lm_gguf_put_f32(p, lm_gguf_key_of(key, c->arch->gguf, "expert_weights_scale"), (float)m->scale);
    lm_gguf_put_bool(p, lm_gguf_key_of(key, c->arch->gguf, "expert_weights_norm"), m->normalise);
}

lm_code lm_gguf_check_latent(const lm_import *m, lm_err *e)
{
    const lm_config *c = &m->config;
    const lm_rope_config *r = &c->rope[0];

    if (c->layer[0].qkv_bias || c->layer[0].out_bias)
        return lm_gguf_no_words(m, "bias of attention", e);
    if (!c->layer[0].latent.pairs)
        return lm_gguf_no_words(m, "rotation of halves (rope_interleave false)", e);
    if (r->type != LM_ROPE_DEFAULT && r->type != LM_ROPE_YARN)
        return lm_gguf_no_words(m, "scaling of positions but YaRN's", e);
    if (r->type == LM_ROPE_YARN && (r->attention > 0 || !(r->mscale_all_dim > 0) ||
                                    fabs(r->mscale - r->mscale_all_dim) > 1e-9))
        return lm_gguf_no_words(m, "YaRN whose mscale is not its mscale_all_dim", e);
    if (c->norm_eps < 0.999e-6 || c->norm_eps > 1.001e-6)
        lm_log(m->sink, LM_LOG_WARN,
               "%s: llama.cpp's %s has rms_norm_eps %g in the norms of latents, too, not 1e-6",
               m->path, c->arch->gguf, c->norm_eps);
    return LM_OK;
}

lm_code lm_gguf_check_scored(const lm_import *m, lm_err *e)
{
    const lm_config *c = &m->config;
    int64_t dense;
    const lm_moe *x = experts_of(c, &dense);

    if (!x)
        return lm_gguf_no_words(m, "models without experts", e);
    for (int64_t l = dense; l < c->layers; l++)
        if (!c->layer[l].moe.experts)
            return lm_gguf_no_words(m, "layers without experts behind those with them", e);
    if (!x->shared)
        return lm_gguf_no_words(m, "mixtures without a shared expert", e);
    if (x->group_max && x->kept_groups < x->groups)
        lm_log(m->sink, LM_LOG_WARN,
               "%s: llama.cpp's %s chooses groups of experts by their two best, not by their best",
               m->path, c->arch->gguf);
    return LM_OK;
}

/* ---- reading ---- */

lm_code lm_gguf_get_further(const lm_gguf *g, const lm_arch *a, int64_t *layers, lm_err *e)
{
    lm_gguf_reader r = { .g = g, .arch = a->gguf, .e = e };
    *layers = 0;
    return lm_gguf_has_key(a, "attention.kv_lora_rank") || lm_gguf_has_key(a, LM_GGUF_SECTIONS)
               ? lm_gguf_whole(&r, "nextn_predict_layers", 0, layers, NULL)
               : LM_OK;
}

lm_code lm_gguf_get_latent(const lm_gguf *g, const lm_arch *a, json_t *out, lm_err *e)
{
    lm_gguf_reader r = { .g = g, .arch = a->gguf, .o = out, .e = e };
    const int64_t layers = json_integer_value(json_object_get(out, "num_hidden_layers"));
    int64_t q, kv, rope, key, value, further;

    if (lm_gguf_whole(&r, "attention.q_lora_rank", 0, &q, NULL) ||
        lm_gguf_whole(&r, "attention.kv_lora_rank", -1, &kv, NULL) ||
        lm_gguf_whole(&r, "rope.dimension_count", -1, &rope, NULL) ||
        lm_gguf_whole(&r, "attention.key_length", -1, &key, NULL) ||
        lm_gguf_whole(&r, "attention.value_length", -1, &value, NULL) ||
        lm_gguf_whole(&r, "attention.value_length_mla", value, &value, NULL) ||
        lm_gguf_get_further(g, a, &further, e) ||
        lm_gguf_whole(&r, "attention.key_length_mla", key, &key, NULL))
        return e->code;
    if (key <= rope)
        return lm_fail(e, LM_EFORMAT, lm_gguf_path(g), NULL,
                       "'%s' is %" PRId64 ", but %" PRId64 " numbers of a head are rotated", r.key,
                       key, rope);
    if (further)
        lm_gguf_set_int(&r, "num_hidden_layers", layers > further ? layers - further : 0);
    json_object_set(out, "num_key_value_heads", json_object_get(out, "num_attention_heads"));
    json_object_set_new(out, "q_lora_rank", q ? json_integer(q) : json_null());
    lm_gguf_set_int(&r, "kv_lora_rank", kv);
    lm_gguf_set_int(&r, "qk_nope_head_dim", key - rope);
    lm_gguf_set_int(&r, "qk_rope_head_dim", rope);
    lm_gguf_set_int(&r, "v_head_dim", value);
    return LM_OK;
}

lm_code lm_gguf_scores_sigmoid(const lm_gguf *g, const char *arch, bool *sigmoid, lm_err *e)
{
    lm_gguf_reader r = { .g = g, .arch = arch, .e = e };
    int64_t gate;
    if (lm_gguf_whole(&r, "expert_gating_func", SOFTMAX, &gate,
                      NULL)) /* as llama.cpp has it for older files */
        return e->code;
    *sigmoid = gate == SIGMOID;
    return gate == SOFTMAX || gate == SIGMOID
               ? LM_OK
               : lm_fail(e, LM_EUSAGE, lm_gguf_path(g), NULL,
                         "'%s' is %" PRId64 ": only 1 (softmax) and 2 (sigmoid) are known", r.key,
                         gate);
}

/* How experts are chosen: keys that dots1 has not. */
static void set_choice(lm_gguf_reader *r, bool sigmoid, int64_t groups)
{
    json_object_set_new(r->o, "scoring_func", json_string(sigmoid ? "sigmoid" : "softmax"));
    json_object_set_new(r->o, "topk_method",
                        json_string(sigmoid      ? "noaux_tc"
                                    : groups > 1 ? "group_limited_greedy"
                                                 : "greedy"));
}

lm_code lm_gguf_get_scored(const lm_gguf *g, const lm_arch *a, json_t *out, lm_err *e)
{
    static const struct {
        const char *gguf, *hf;
        int64_t dflt;
    } keys[] = { { "expert_count", "n_routed_experts", -1 },
                 { "expert_used_count", "num_experts_per_tok", -1 },
                 { "expert_feed_forward_length", "moe_intermediate_size", -1 },
                 { "expert_shared_count", "n_shared_experts", 0 },
                 { "leading_dense_block_count", "first_k_dense_replace", 0 },
                 { "expert_group_count", "n_group", 1 },
                 { "expert_group_used_count", "topk_group", 1 } };
    lm_gguf_reader r = { .g = g, .arch = a->gguf, .o = out, .e = e };
    bool sigmoid, norm = false;
    double scale;
    int64_t n;

    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        if (lm_gguf_whole(&r, keys[i].gguf, keys[i].dflt, &n, NULL))
            return e->code;
        lm_gguf_set_int(&r, keys[i].hf, n > 0 || keys[i].dflt < 1 ? n : 1);
    }
    if (lm_gguf_scores_sigmoid(g, a->gguf, &sigmoid, e) ||
        lm_gguf_f64_or(g, lm_gguf_key_of(r.key, a->gguf, "expert_weights_scale"), 1, &scale, NULL,
                       e) ||
        lm_gguf_bool_or(g, lm_gguf_key_of(r.key, a->gguf, "expert_weights_norm"), false, &norm,
                        NULL, e))
        return e->code;
    json_object_set_new(out, "norm_topk_prob", json_boolean(norm));
    json_object_set_new(out, "routed_scaling_factor", json_real(lm_gguf_shortest(scale)));
    if (lm_gguf_has_key(a, "attention.kv_lora_rank"))
        set_choice(&r, sigmoid, json_integer_value(json_object_get(out, "n_group")));
    return LM_OK;
}
