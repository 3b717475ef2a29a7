/* SPDX-License-Identifier: Apache-2.0 */
/* arch_read.c -- keys of config.json that several architectures have. */
#include "model/arch_read.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/mem.h"

lm_code lm_read_bad(const char *where, const char *key, lm_err *e, const char *what)
{
    return lm_fail(e, LM_EUSAGE, where, NULL, "\"%s\": %s", key, what);
}

lm_code lm_read_layers(lm_config *c, const lm_layer *all, lm_err *e)
{
    if (lm_alloc_n(&c->layer, (size_t)lm_config_depth(c), sizeof *c->layer, "layers of a model", e))
        return e->code;
    for (int64_t l = 0; l < lm_config_depth(c); l++)
        c->layer[l] = *all;
    return LM_OK;
}

static lm_code read_sizes(const json_t *o, const char *where, const lm_decoder_defaults *d,
                          lm_config *c, lm_layer *y, lm_err *e)
{
    const json_t *kv = json_object_get(o, "num_key_value_heads");
    int64_t dim;

    if (lm_json_i64(o, "hidden_size", 1, LM_MOST_WIDTH, &c->width, where, e) ||
        lm_json_i64(o, "intermediate_size", 1, LM_MOST_WIDTH, &y->ffn, where, e) ||
        lm_json_i64(o, "num_hidden_layers", 1, LM_MOST_LAYERS, &c->layers, where, e) ||
        lm_json_i64(o, "num_attention_heads", 1, LM_MOST_WIDTH, &y->heads, where, e) ||
        lm_json_i64_or(o, "num_key_value_heads", kv || !d->kv_heads ? y->heads : d->kv_heads, 1,
                       LM_MOST_WIDTH, &y->kv_heads, where, e) ||
        lm_json_i64_or(o, "head_dim", d->head_dim, 1, 4096, &dim, where, e))
        return e->code;
    if (!dim && c->width % y->heads)
        return lm_fail(e, LM_EUSAGE, where, "give head_dim",
                       "num_attention_heads %" PRId64 " does not divide hidden_size %" PRId64
                       ", and there is no head_dim",
                       y->heads, c->width);
    y->head_dim = dim ? dim : c->width / y->heads;
    y->scale = 1.0 / sqrt((double)y->head_dim);
    return LM_OK;
}

static lm_code read_act(const json_t *o, const char *where, const lm_decoder_defaults *d,
                        lm_layer *y, lm_err *e)
{
    const char *key = d->act_key ? d->act_key : "hidden_act", *act;

    if (lm_json_str_or(o, key, d->act ? d->act : "silu", &act, where, e))
        return e->code;
    bool silu = !strcmp(act, "silu") || !strcmp(act, "swish");
    y->mlp = d->act ? LM_MLP_GEGLU : LM_MLP_SWIGLU;
    if (d->act ? strcmp(act, d->act) != 0 : !silu)
        return lm_fail(e, LM_EUSAGE, where, NULL, "\"%s\": only %s is supported", key,
                       d->act ? d->act : "silu");
    return LM_OK;
}

lm_code lm_read_decoder(const json_t *o, const char *where, const lm_decoder_defaults *d,
                        lm_config *c, lm_err *e)
{
    lm_layer y = { .norm_before = true };

    c->norm = LM_NORM_RMS;
    if (read_sizes(o, where, d, c, &y, e) ||
        lm_json_i64_or(o, "max_position_embeddings", d->positions, 1, INT64_C(1) << 31,
                       &c->max_positions, where, e) ||
        lm_json_f64_or(o, "rms_norm_eps", d->norm_eps > 0 ? d->norm_eps : 1e-6, &c->norm_eps, where,
                       e) ||
        lm_json_bool_or(o, "tie_word_embeddings", c->arch->tied, &c->tied, where, e) ||
        lm_json_f64_or(o, "attention_dropout", 0, &c->drop_attn, where, e) ||
        read_act(o, where, d, &y, e))
        return e->code;
    if (y.heads % y.kv_heads)
        return lm_fail(e, LM_EUSAGE, where,
                       json_object_get(o, "num_key_value_heads") ? NULL : "give the first",
                       "num_key_value_heads %" PRId64
                       " does not divide num_attention_heads %" PRId64,
                       y.kv_heads, y.heads);
    if (y.head_dim % 2)
        return lm_read_bad(where, "head_dim", e, "is odd, which rotary positions do not allow");
    return lm_read_layers(c, &y, e);
}

lm_code lm_read_ahead(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    return lm_json_i64_or(o, "num_nextn_predict_layers", 0, 0, LM_MOST_AHEAD, &c->ahead, where, e);
}

lm_code lm_read_attention_bias(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    bool bias = false;

    if (lm_json_bool_or(o, "attention_bias", false, &bias, where, e))
        return e->code;
    for (int64_t l = 0; l < lm_config_depth(c); l++)
        c->layer[l].qkv_bias = c->layer[l].out_bias = bias;
    return LM_OK;
}

/* ---- Windows ---- */

lm_code lm_read_window(const json_t *o, const char *where, int64_t absent, int64_t *window,
                       lm_err *e)
{
    return lm_json_i64_or(o, "sliding_window", json_object_get(o, "sliding_window") ? 0 : absent, 0,
                          INT64_C(1) << 40, window, where, e);
}

lm_code lm_read_layer_types(const json_t *o, const char *where, lm_config *c, int64_t window,
                            bool (*slides)(const lm_config *c, int64_t layer, int64_t by),
                            int64_t by, lm_err *e)
{
    const json_t *types = json_object_get(o, "layer_types");

    types = json_is_null(types) ? NULL : types;
    if (types && (!json_is_array(types) || (int64_t)json_array_size(types) != c->layers))
        return lm_read_bad(where, "layer_types", e, "is not a list with one entry for each layer");
    for (int64_t l = 0; l < c->layers; l++) {
        const char *t = json_string_value(json_array_get(types, (size_t)l));
        bool near = types ? t && !strcmp(t, "sliding_attention") : slides(c, l, by);
        if (types && !near && (!t || strcmp(t, "full_attention") != 0))
            return lm_read_bad(where, "layer_types", e, "holds an unknown type of layer");
        if (types && near && window <= 0)
            return lm_read_bad(where, "layer_types", e,
                               "requires sliding attention, but there is no window");
        c->layer[l].window = near ? window : 0;
    }
    return LM_OK;
}

bool lm_slides_always(const lm_config *c, int64_t layer, int64_t by)
{
    (void)c, (void)layer, (void)by;
    return true;
}

bool lm_slides_by_pattern(const lm_config *c, int64_t layer, int64_t pattern)
{
    (void)c;
    return (layer + 1) % pattern != 0;
}

static bool slides_from(const lm_config *c, int64_t layer, int64_t first)
{
    (void)c;
    return layer >= first;
}

lm_code lm_read_window_from(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    int64_t window = 0, first = 0;
    bool use;

    if (lm_json_bool_or(o, "use_sliding_window", false, &use, where, e) ||
        (use && lm_read_window(o, where, 4096, &window, e)) ||
        (use && lm_json_i64_or(o, "max_window_layers", 28, 0, LM_MOST_LAYERS, &first, where, e)))
        return e->code;
    return lm_read_layer_types(o, where, c, window, slides_from, first, e);
}
