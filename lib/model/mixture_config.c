/* SPDX-License-Identifier: Apache-2.0 */
/* mixture_config.c -- the config.json of a mixture of dense models. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "model/mixture.h"

static bool has_key(const lm_arch *a, const char *key)
{
    for (const char *const *k = a->keys; *k; k++)
        if (!strcmp(*k, key))
            return true;
    return false;
}

/* The key of the number of experts. */
static const char *experts_key(const lm_arch *a)
{
    const lm_gguf_key *k = a->gguf_keys;
    while (strcmp(k->gguf, "expert_count") != 0)
        k++;
    return k->hf;
}

static void put_int(json_t *o, const char *key, int64_t v)
{
    json_object_set_new(o, key, json_integer(v));
}

/* Windows: of all layers, of none, or, where the architecture has layer_types, of some. */
static void put_windows(json_t *o, const lm_config *c, const lm_arch *a)
{
    const int64_t window = lm_config_window(c);
    json_t *types = json_array();
    bool all = true;

    for (int64_t l = 0; l < c->layers; l++) {
        const bool near = c->layer[l].window > 0;
        json_array_append_new(types, json_string(near ? "sliding_attention" : "full_attention"));
        all = all && near;
    }
    json_object_del(o, "max_window_layers");
    json_object_del(o, "layer_types");
    json_object_set_new(o, "sliding_window", window ? json_integer(window) : json_null());
    if (has_key(a, "use_sliding_window"))
        json_object_set_new(o, "use_sliding_window", json_boolean(window > 0));
    if (window && has_key(a, "layer_types"))
        json_object_set(o, "layer_types", types);
    json_decref(types);
}

/* What the two architectures have different defaults for. */
static void put_explicit(json_t *o, const lm_config *c)
{
    const lm_layer *y = &c->layer[0];
    json_t *both = json_object_get(o, "rope_parameters");

    put_int(o, "num_key_value_heads", y->kv_heads);
    if (json_object_get(o, "head_dim") || y->heads * y->head_dim != c->width)
        put_int(o, "head_dim", y->head_dim);
    put_int(o, "max_position_embeddings", c->max_positions);
    json_object_set_new(o, "rms_norm_eps", json_real(c->norm_eps));
    json_object_set_new(o, "tie_word_embeddings", json_boolean(c->tied));
    json_object_set_new(json_is_object(both) ? both : o, "rope_theta", json_real(c->rope[0].theta));
}

static void put_experts(json_t *o, const lm_config *c, const lm_arch *a, int64_t experts,
                        int64_t chosen)
{
    put_int(o, experts_key(a), experts);
    put_int(o, "num_experts_per_tok", chosen);
    if (has_key(a, "moe_intermediate_size"))
        put_int(o, "moe_intermediate_size", c->layer[0].ffn);
    if (has_key(a, "shared_expert_intermediate_size"))
        put_int(o, "shared_expert_intermediate_size", c->layer[0].ffn);
    if (has_key(a, "norm_topk_prob"))
        json_object_set_new(o, "norm_topk_prob", json_true());
    if (has_key(a, "decoder_sparse_step"))
        put_int(o, "decoder_sparse_step", 1);
    if (has_key(a, "mlp_only_layers"))
        json_object_set_new(o, "mlp_only_layers", json_array());
}

/* Keys that the architecture of the mixture does not have, and that say what it has anyway. */
static void remove_others(json_t *o, const lm_arch *a)
{
    static const char *const keys[] = { "attention_bias", "mlp_bias", "use_sliding_window",
                                        "pretraining_tp" };
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (!has_key(a, keys[i]))
            json_object_del(o, keys[i]);
}

static bool same(double a, double b)
{
    return fabs(a - b) <= 1e-12 * fabs(a);
}

static const char *rope_differs(const lm_rope_config *a, const lm_rope_config *b)
{
    return a->type == b->type && same(a->theta, b->theta) && same(a->factor, b->factor) &&
                   same(a->low_freq, b->low_freq) && same(a->high_freq, b->high_freq) &&
                   same(a->attention, b->attention) && a->original == b->original
               ? NULL
               : "its rotary positions";
}

/* What the config of the mixture cannot say of the dense model; NULL: nothing. */
static const char *differs(const lm_config *a, const lm_config *b)
{
    if (a->tied != b->tied || a->max_positions != b->max_positions ||
        !same(a->norm_eps, b->norm_eps) || a->vocab != b->vocab)
        return "its sizes";
    for (int64_t l = 0; l < a->layers; l++) {
        const lm_layer *x = &a->layer[l], *y = &b->layer[l];
        if (x->heads != y->heads || x->kv_heads != y->kv_heads || x->head_dim != y->head_dim ||
            !same(x->scale, y->scale))
            return "its heads";
        if (x->window != y->window)
            return "windows of some of its layers";
        if (x->qkv_bias != y->qkv_bias || x->out_bias != y->out_bias)
            return "biases of its attention";
        if (x->mlp_bias)
            return "biases of its MLP";
        if (x->ffn != a->layer[0].ffn || y->moe.ffn != x->ffn || x->mlp != y->mlp)
            return "the width of its MLP";
    }
    return rope_differs(&a->rope[0], &b->rope[0]);
}

/* A config.json that was read, as that of the mixture. */
static lm_code make(const json_t *tree, const lm_config *c, const char *where, int64_t experts,
                    int64_t chosen, json_t **out, lm_err *e)
{
    const lm_arch *a = c->arch->mixture;
    lm_config made = { 0 };
    json_t *o = json_deep_copy(tree);

    if (!o)
        return lm_fail(e, LM_ELIMIT, where, NULL, "no memory for a config.json");
    json_object_set_new(o, "architectures", json_pack("[s]", a->class_name));
    json_object_set_new(o, "model_type", json_string(a->name));
    put_windows(o, c, a);
    put_explicit(o, c);
    put_experts(o, c, a, experts, chosen);
    remove_others(o, a);
    const char *lost = NULL;
    if (!lm_config_read(o, where, &made, e))
        lost = differs(c, &made);
    lm_config_fini(&made);
    if (lost)
        lm_fail(e, LM_EUSAGE, where, NULL, "a %s cannot have %s", a->name, lost);
    if (e->code)
        json_decref(o);
    else
        *out = o;
    return e->code;
}

lm_code lm_mixture_config(const json_t *dense, const char *where, int64_t experts, int64_t chosen,
                          json_t **out, lm_err *e)
{
    lm_config c = { 0 };
    lm_code rc = lm_config_read(dense, where, &c, e);

    *out = NULL;
    if (!rc && !c.arch->mixture)
        rc = lm_fail(e, LM_EUSAGE, where, "give a llama, mistral, qwen2 or qwen3",
                     "a %s does not become a mixture of experts", lm_arch_name(c.arch));
    if (!rc && chosen > experts)
        rc = lm_fail(e, LM_EUSAGE, where, NULL,
                     "%" PRId64 " experts of a token are more than the %" PRId64 " that there are",
                     chosen, experts);
    if (!rc)
        rc = make(dense, &c, where, experts, chosen, out, e);
    lm_config_fini(&c);
    return rc;
}
