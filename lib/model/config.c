/* SPDX-License-Identifier: Apache-2.0 */
/* config.c -- config.json, read strictly. */
#include "model/config.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/mem.h"

static const char *const arch_names[LM_ARCH_COUNT] = { "gpt2", "llama", "mistral", "qwen2",
                                                       "qwen3" };

const char *lm_arch_name(lm_arch a)
{
    return arch_names[a];
}

bool lm_config_slides(const lm_config *c, int64_t layer)
{
    if (c->window <= 0)
        return false;
    return c->layer_window ? c->layer_window[layer] : layer >= c->window_from;
}

void lm_config_fini(lm_config *c)
{
    lm_free(c->layer_window);
    memset(c, 0, sizeof *c);
}

enum { MOST_WIDTH = 1 << 24, MOST_LAYERS = 1 << 16 };

static lm_code bad(const char *where, const char *key, lm_err *e, const char *what)
{
    return lm_fail(e, LM_EFORMAT, where, NULL, "\"%s\": %s", key, what);
}

static lm_code read_ids(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    const char *const keys[3] = { "bos_token_id", "eos_token_id", "pad_token_id" };
    int64_t *const to[3] = { &c->bos, &c->eos, &c->pad };
    for (int i = 0; i < 3; i++) {
        const json_t *v = json_object_get(o, keys[i]);
        *to[i] = -1;
        if (json_is_array(v))
            v = json_array_get(v, 0);
        if (!v || json_is_null(v))
            continue;
        if (!json_is_integer(v))
            return bad(where, keys[i], e, "is not a token id");
        *to[i] = json_integer_value(v) < c->vocab ? json_integer_value(v) : -1;
        if (*to[i] < 0)
            *to[i] = -1;
    }
    return LM_OK;
}

/* The object that says how positions are scaled, and its key.  Old files have rope_scaling, newer
 * ones rope_parameters, which holds rope_theta too.  NULL: none. */
static lm_code rope_object(const json_t *o, const char *where, const json_t **s, const char **key,
                           lm_err *e)
{
    static const char *const keys[2] = { "rope_parameters", "rope_scaling" };
    const json_t *found[2];
    const char *inner;
    json_t *v;

    *s = NULL;
    *key = keys[0];
    for (int i = 0; i < 2; i++) {
        found[i] = json_object_get(o, keys[i]);
        found[i] = json_is_null(found[i]) ? NULL : found[i];
        if (found[i] && !json_is_object(found[i]))
            return bad(where, keys[i], e, "is not an object");
        if (found[i] && !*s) {
            *s = found[i];
            *key = keys[i];
        }
    }
    if (found[0] && found[1] &&
        !json_equal((json_t *)(uintptr_t)found[0], (json_t *)(uintptr_t)found[1]))
        return lm_fail(e, LM_EFORMAT, where, "keep the one that is meant",
                       "\"rope_parameters\" and \"rope_scaling\" differ");
    json_object_foreach((json_t *)(uintptr_t)*s, inner, v)
    {
        if (json_is_object(v))
            return lm_fail(e, LM_EFORMAT, where, NULL,
                           "\"%s\": a set of its own for \"%s\" is not known", *key, inner);
    }
    return LM_OK;
}

/* Without a type, only what every type has may be there: numbers of a scaling are not guessed at. */
static lm_code check_untyped(const json_t *s, const char *where, const char *key, lm_err *e)
{
    static const char *const harmless[] = { "rope_theta", "partial_rotary_factor", "rope_type",
                                            "type" };
    const char *inner;
    json_t *v;

    json_object_foreach((json_t *)(uintptr_t)s, inner, v)
    {
        bool fine = json_is_null(v);
        for (size_t i = 0; !fine && i < sizeof harmless / sizeof *harmless; i++)
            fine = !strcmp(inner, harmless[i]);
        if (!fine)
            return lm_fail(e, LM_EFORMAT, where,
                           "add \"rope_type\": default, linear, dynamic, llama3 or yarn",
                           "\"%s\" has \"%s\", but no \"rope_type\"", key, inner);
    }
    return LM_OK;
}

static lm_code read_rope_numbers(const json_t *s, const char *where, lm_rope_config *r, lm_err *e)
{
    if (lm_json_f64_or(s, "rope_theta", r->theta, &r->theta, where, e) ||
        lm_json_f64_or(s, "factor", 0, &r->factor, where, e) ||
        lm_json_f64_or(s, "low_freq_factor", 1, &r->low_freq, where, e) ||
        lm_json_f64_or(s, "high_freq_factor", 4, &r->high_freq, where, e) ||
        lm_json_f64_or(s, "beta_fast", 32, &r->beta_fast, where, e) ||
        lm_json_f64_or(s, "beta_slow", 1, &r->beta_slow, where, e) ||
        lm_json_f64_or(s, "attention_factor", 0, &r->attention, where, e) ||
        lm_json_f64_or(s, "mscale", 0, &r->mscale, where, e) ||
        lm_json_f64_or(s, "mscale_all_dim", 0, &r->mscale_all_dim, where, e) ||
        lm_json_bool_or(s, "truncate", true, &r->truncate, where, e))
        return e->code;
    return lm_json_i64_or(s, "original_max_position_embeddings", 0, 0, INT64_C(1) << 40,
                          &r->original, where, e);
}

/* Old files say "type", newer "rope_type". */
static lm_code read_rope_type(const json_t *s, const char *where, const char *key,
                              lm_rope_config *r, lm_err *e)
{
    static const struct {
        const char *name;
        lm_rope_type type;
    } types[] = { { "default", LM_ROPE_DEFAULT },
                  { "linear", LM_ROPE_LINEAR },
                  { "dynamic", LM_ROPE_DYNAMIC },
                  { "llama3", LM_ROPE_LLAMA3 },
                  { "yarn", LM_ROPE_YARN } };
    const char *type = NULL, *old = NULL;

    if (lm_json_str_or(s, "type", NULL, &old, where, e) ||
        lm_json_str_or(s, "rope_type", old, &type, where, e))
        return e->code;
    if (!type)
        return check_untyped(s, where, key, e);
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        if (strcmp(type, types[i].name) != 0)
            continue;
        r->type = types[i].type;
        if (r->type != LM_ROPE_DEFAULT && !(r->factor >= 1))
            return lm_fail(e, LM_EFORMAT, where, NULL, "\"%s.factor\": is missing or below 1", key);
        if (r->type == LM_ROPE_LLAMA3 && (!(r->high_freq > r->low_freq) || !r->original))
            return bad(where, key, e,
                       "llama3 needs original_max_position_embeddings and "
                       "high_freq_factor > low_freq_factor");
        return LM_OK;
    }
    return lm_fail(e, LM_EFORMAT, where, "default, linear, dynamic, llama3 and yarn are known",
                   "rope_type \"%s\" is not known", type);
}

static lm_code read_rope(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    const json_t *s = NULL;
    const char *key;
    double partial;

    c->rope.type = LM_ROPE_DEFAULT;
    if (rope_object(o, where, &s, &key, e) ||
        lm_json_f64_or(o, "partial_rotary_factor", 1, &partial, where, e) ||
        (s && lm_json_f64_or(s, "partial_rotary_factor", partial, &partial, where, e)))
        return e->code;
    if (partial < 1 || partial > 1)
        return bad(where, "partial_rotary_factor", e, "only 1 is known");
    if (lm_json_f64_or(o, "rope_theta", 10000, &c->rope.theta, where, e))
        return e->code;
    if (!s)
        return LM_OK;
    if (read_rope_numbers(s, where, &c->rope, e))
        return e->code;
    return read_rope_type(s, where, key, &c->rope, e);
}

static lm_code read_layer_types(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    const json_t *types = json_object_get(o, "layer_types");
    if (!types || json_is_null(types))
        return LM_OK;
    if (!json_is_array(types) || (int64_t)json_array_size(types) != c->layers)
        return bad(where, "layer_types", e, "is not a list with one entry for each layer");
    if (lm_alloc_n(&c->layer_window, (size_t)c->layers, 1, "layer types", e))
        return e->code;
    for (int64_t i = 0; i < c->layers; i++) {
        const char *t = json_string_value(json_array_get(types, (size_t)i));
        if (t && !strcmp(t, "sliding_attention"))
            c->layer_window[i] = 1;
        else if (!t || strcmp(t, "full_attention"))
            return bad(where, "layer_types", e, "holds a type of layer that is not known");
        if (c->layer_window[i] && c->window <= 0)
            return bad(where, "layer_types", e,
                       "asks for sliding attention, but there is no window");
    }
    return LM_OK;
}

static lm_code read_gpt2(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    const char *act;
    bool cross, upcast;
    if (lm_json_i64(o, "n_embd", 1, MOST_WIDTH, &c->width, where, e) ||
        lm_json_i64(o, "n_layer", 1, MOST_LAYERS, &c->layers, where, e) ||
        lm_json_i64(o, "n_head", 1, MOST_WIDTH, &c->heads, where, e) ||
        lm_json_i64_or(o, "n_positions", 1024, 1, INT64_C(1) << 31, &c->max_positions, where, e) ||
        lm_json_i64_or(o, "n_inner", 4 * c->width, 1, MOST_WIDTH, &c->ffn, where, e) ||
        lm_json_f64_or(o, "layer_norm_epsilon", 1e-5, &c->norm_eps, where, e) ||
        lm_json_f64_or(o, "embd_pdrop", 0.1, &c->drop_embed, where, e) ||
        lm_json_f64_or(o, "resid_pdrop", 0.1, &c->drop_resid, where, e) ||
        lm_json_f64_or(o, "attn_pdrop", 0.1, &c->drop_attn, where, e) ||
        lm_json_bool_or(o, "tie_word_embeddings", true, &c->tied, where, e) ||
        lm_json_bool_or(o, "scale_attn_by_inverse_layer_idx", false, &c->scale_by_layer, where,
                        e) ||
        lm_json_bool_or(o, "scale_attn_weights", true, &c->scale_attention, where, e) ||
        lm_json_bool_or(o, "reorder_and_upcast_attn", false, &upcast, where, e) ||
        lm_json_bool_or(o, "add_cross_attention", false, &cross, where, e) ||
        lm_json_str_or(o, "activation_function", "gelu_new", &act, where, e))
        return e->code;
    c->gelu_exact = !strcmp(act, "gelu");
    if (!c->gelu_exact && strcmp(act, "gelu_new") && strcmp(act, "gelu_pytorch_tanh"))
        return bad(where, "activation_function", e, "only gelu_new and gelu are known");
    if (cross)
        return bad(where, "add_cross_attention", e, "is not supported");
    if (c->width % c->heads)
        return lm_fail(e, LM_EFORMAT, where, NULL,
                       "n_head %" PRId64 " does not divide n_embd %" PRId64, c->heads, c->width);
    c->kv_heads = c->heads;
    c->head_dim = c->width / c->heads;
    return LM_OK;
}

static lm_code read_window(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    bool use = true;
    if (c->arch == LM_ARCH_LLAMA)
        return LM_OK;
    if (c->arch != LM_ARCH_MISTRAL &&
        lm_json_bool_or(o, "use_sliding_window", false, &use, where, e))
        return e->code;
    if (!use)
        return read_layer_types(o, where, c, e);
    /* Absent, the published classes have windows of 4096; null means none. */
    if (lm_json_i64_or(o, "sliding_window", json_object_get(o, "sliding_window") ? 0 : 4096, 0,
                       INT64_C(1) << 40, &c->window, where, e))
        return e->code;
    if (c->arch != LM_ARCH_MISTRAL &&
        lm_json_i64_or(o, "max_window_layers", 28, 0, MOST_LAYERS, &c->window_from, where, e))
        return e->code;
    return read_layer_types(o, where, c, e);
}

static lm_code read_llama(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    /* What the published classes have when the key is absent. */
    static const int64_t positions[LM_ARCH_COUNT] = { 0, 2048, 131072, 32768, 32768 };
    const char *act;
    bool bias = false;
    int64_t dim;
    if (lm_json_i64(o, "hidden_size", 1, MOST_WIDTH, &c->width, where, e) ||
        lm_json_i64(o, "intermediate_size", 1, MOST_WIDTH, &c->ffn, where, e) ||
        lm_json_i64(o, "num_hidden_layers", 1, MOST_LAYERS, &c->layers, where, e) ||
        lm_json_i64(o, "num_attention_heads", 1, MOST_WIDTH, &c->heads, where, e) ||
        lm_json_i64_or(o, "num_key_value_heads", c->heads, 1, MOST_WIDTH, &c->kv_heads, where, e) ||
        lm_json_i64_or(o, "head_dim", 0, 1, 4096, &dim, where, e) ||
        lm_json_i64_or(o, "max_position_embeddings", positions[c->arch], 1, INT64_C(1) << 31,
                       &c->max_positions, where, e) ||
        lm_json_f64_or(o, "rms_norm_eps", 1e-6, &c->norm_eps, where, e) ||
        lm_json_bool_or(o, "tie_word_embeddings", false, &c->tied, where, e) ||
        lm_json_f64_or(o, "attention_dropout", 0, &c->drop_attn, where, e) ||
        lm_json_bool_or(o, "attention_bias", false, &bias, where, e) ||
        lm_json_bool_or(o, "mlp_bias", false, &c->mlp_bias, where, e) ||
        lm_json_str_or(o, "hidden_act", "silu", &act, where, e))
        return e->code;
    if (c->arch == LM_ARCH_QWEN3 && !dim)
        dim = 128;
    if (!dim && c->width % c->heads)
        return lm_fail(e, LM_EFORMAT, where, "give head_dim",
                       "num_attention_heads %" PRId64 " does not divide hidden_size %" PRId64
                       ", and there is no head_dim",
                       c->heads, c->width);
    c->head_dim = dim ? dim : c->width / c->heads;
    bias &= c->arch == LM_ARCH_LLAMA || c->arch == LM_ARCH_QWEN3; /* the others do not look at it */
    c->mlp_bias &= c->arch == LM_ARCH_LLAMA;
    c->qkv_bias = bias || c->arch == LM_ARCH_QWEN2;
    c->out_bias = bias;
    c->qk_norm = c->arch == LM_ARCH_QWEN3;
    if (strcmp(act, "silu") && strcmp(act, "swish"))
        return bad(where, "hidden_act", e, "only silu is known");
    if (c->heads % c->kv_heads)
        return lm_fail(e, LM_EFORMAT, where, NULL,
                       "num_key_value_heads %" PRId64
                       " does not divide num_attention_heads %" PRId64,
                       c->kv_heads, c->heads);
    if (c->head_dim % 2)
        return bad(where, "head_dim", e, "is odd, which rotary positions cannot serve");
    if (read_window(o, where, c, e))
        return e->code;
    return read_rope(o, where, c, e);
}

static lm_code check_ranges(const lm_config *c, const char *where, lm_err *e)
{
    const double rates[3] = { c->drop_embed, c->drop_resid, c->drop_attn };
    int64_t n;
    for (int i = 0; i < 3; i++)
        if (!(rates[i] >= 0 && rates[i] < 1))
            return lm_fail(e, LM_EFORMAT, where, NULL, "a dropout rate is %g, not in [0,1)",
                           rates[i]);
    if (!(c->norm_eps > 0) || !(c->init_std >= 0))
        return lm_fail(e, LM_EFORMAT, where, NULL, "epsilon or initializer_range is not positive");
    if (c->rope.type != LM_ROPE_NONE && !(c->rope.theta > 0))
        return bad(where, "rope_theta", e, "is not positive");
    if (!lm_mul_i64_ok(c->heads + 2 * c->kv_heads, c->head_dim, &n) ||
        n > 8 * (int64_t)MOST_WIDTH || !lm_mul_i64_ok(c->vocab, c->width, &n))
        return lm_fail(e, LM_EFORMAT, where, NULL, "the dimensions multiply to an absurd size");
    return LM_OK;
}

/* A model_type that is none of ours: a mixture of experts says so under one of these keys. */
static lm_code unknown_type(const json_t *o, const char *where, const char *type, lm_err *e)
{
    static const char *const keys[] = { "num_experts", "num_local_experts", "n_routed_experts" };
    const json_t *text = json_object_get(o, "text_config"); /* of models that see images, too */

    for (size_t i = 0; i < 2 * sizeof keys / sizeof *keys; i++) {
        int64_t n = json_integer_value(json_object_get(i % 2 ? text : o, keys[i / 2]));
        if (n > 0)
            return lm_fail(
                e, LM_EFORMAT, where,
                "inspect-model, merge-models and compress-ckpt take its tensors as they are",
                "model_type \"%s\" is a mixture of %" PRId64
                " experts; only dense models are computed with",
                type, n);
    }
    return lm_fail(e, LM_EFORMAT, where, "gpt2, llama, mistral, qwen2 and qwen3 are known",
                   "model_type \"%s\" is not known", type);
}

lm_code lm_config_read(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    const char *type = NULL;
    memset(c, 0, sizeof *c);
    if (lm_json_str_or(o, "model_type", NULL, &type, where, e))
        return e->code;
    if (!type)
        return bad(where, "model_type", e, "is missing");
    for (c->arch = 0; c->arch < LM_ARCH_COUNT && strcmp(type, arch_names[c->arch]); c->arch++)
        ;
    if (c->arch == LM_ARCH_COUNT)
        return unknown_type(o, where, type, e);
    const json_t *q = json_object_get(o, "quantization_config");
    if (q && !json_is_null(q))
        return bad(where, "quantization_config", e, "quantised models cannot be read");
    if (lm_json_i64(o, "vocab_size", 1, INT64_C(1) << 27, &c->vocab, where, e) ||
        lm_json_f64_or(o, "initializer_range", 0.02, &c->init_std, where, e))
        return e->code;
    lm_code rc = c->arch == LM_ARCH_GPT2 ? read_gpt2(o, where, c, e) : read_llama(o, where, c, e);
    if (!rc)
        rc = read_ids(o, where, c, e);
    if (!rc)
        rc = check_ranges(c, where, e);
    if (rc)
        lm_config_fini(c);
    return rc;
}

/* Parameters of one layer that are matrices, and those that are vectors. */
static void count_layer(const lm_config *c, int64_t *matrices, int64_t *vectors)
{
    int64_t q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim, gates;
    gates = c->arch == LM_ARCH_GPT2 ? 2 : 3;
    *matrices = c->width * (2 * q + 2 * kv) + gates * c->width * c->ffn;
    if (c->arch == LM_ARCH_GPT2) {
        *vectors = 4 * c->width + q + 2 * kv + c->width + c->ffn + c->width;
        return;
    }
    *vectors = 2 * c->width + (c->qkv_bias ? q + 2 * kv : 0) + (c->out_bias ? c->width : 0) +
               (c->mlp_bias ? 2 * c->ffn + c->width : 0) + (c->qk_norm ? 2 * c->head_dim : 0);
}

int64_t lm_config_params(const lm_config *c)
{
    int64_t m, v;
    count_layer(c, &m, &v);
    int64_t n = c->vocab * c->width * (c->tied ? 1 : 2) + c->layers * (m + v) + c->width;
    if (c->arch == LM_ARCH_GPT2)
        n += c->max_positions * c->width + c->width;
    return n;
}

int64_t lm_config_matmul_params(const lm_config *c)
{
    int64_t m, v;
    count_layer(c, &m, &v);
    return c->layers * m + c->vocab * c->width;
}

double lm_config_train_flops(const lm_config *c, int64_t seq)
{
    return 6.0 * (double)lm_config_matmul_params(c) +
           12.0 * (double)c->layers * (double)(c->heads * c->head_dim) * (double)seq;
}

double lm_config_pair_flops(const lm_config *c, double tokens, double pairs, double near)
{
    double all = 0;
    for (int64_t l = 0; l < c->layers; l++)
        all += lm_config_slides(c, l) ? near : pairs;
    return 6.0 * (double)lm_config_matmul_params(c) * tokens +
           12.0 * (double)(c->heads * c->head_dim) * all;
}
