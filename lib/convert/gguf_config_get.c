/* SPDX-License-Identifier: Apache-2.0 */
/* gguf_config_get.c -- a config.json from the keys of GGUF (gguf_meta.h). */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "convert/gguf_deepseek.h"
#include "convert/gguf_encoders.h"
#include "convert/gguf_keys.h"
#include "convert/names.h"

static lm_code real(lm_gguf_reader *r, const char *rest, double dflt, double *out, bool *given)
{
    return lm_gguf_f64_or(r->g, lm_gguf_key_of(r->key, r->arch, rest), dflt, out, given, r->e);
}

double lm_gguf_shortest(double v)
{
    char digits[40];
    double back = v;

    for (int n = 6; n <= 9; n++) {
        snprintf(digits, sizeof digits, "%.*g", n, v);
        if (sscanf(digits, "%lf", &back) == 1 && (float)back == (float)v)
            return back;
    }
    return v;
}

static void set_real(json_t *o, const char *key, double v)
{
    json_object_set_new(o, key, json_real(lm_gguf_shortest(v)));
}

static bool has(const lm_gguf_reader *r, const char *tensor)
{
    return lm_gguf_find(r->g, tensor) != NULL;
}

/* A weight outside the layers; NULL: absent. */
static const lm_gguf_tensor *weight_of(const lm_gguf *g, const lm_arch *a, lm_part part)
{
    char name[LM_TENSOR_NAME];
    return lm_gguf_find(g, lm_tensor_gguf_name(a, part, -1, false, name));
}

/* An id under `key`; -1: none. */
static lm_code get_id(lm_gguf_reader *r, const char *key, int64_t *id)
{
    return lm_gguf_i64_or(r->g, key, -1, 0, INT64_C(1) << 31, id, NULL, r->e);
}

static lm_code get_ids(lm_gguf_reader *r)
{
    static const char *const ends[] = { "tokenizer.ggml.eos_token_id",
                                        "tokenizer.ggml.eot_token_id",
                                        "tokenizer.ggml.eom_token_id" };
    json_t *list = json_array();
    int64_t bos, pad, first = -1, id;

    if (get_id(r, "tokenizer.ggml.bos_token_id", &bos) ||
        get_id(r, "tokenizer.ggml.padding_token_id", &pad))
        goto out;
    for (int i = 0; i < 3; i++) {
        if (get_id(r, ends[i], &id))
            goto out;
        bool again = id < 0;
        for (size_t k = 0; k < json_array_size(list); k++)
            again = again || json_integer_value(json_array_get(list, k)) == id;
        if (!again)
            json_array_append_new(list, json_integer(id));
        first = i ? first : id;
    }
    json_object_set_new(r->o, "bos_token_id", bos < 0 ? json_null() : json_integer(bos));
    if (json_array_size(list) > 1)
        json_object_set(r->o, "eos_token_id", list);
    else
        json_object_set_new(r->o, "eos_token_id", first < 0 ? json_null() : json_integer(first));
    if (pad >= 0)
        lm_gguf_set_int(r, "pad_token_id", pad);
out:
    json_decref(list);
    return r->e->code;
}

/* The divisors f of llama3's scaling, i of them 1 at first, the last ones the factor; between them
 * 1/f is linear in the frequency x in turns per token: (original x - low) / (high - low), where low
 * is assumed to be 1, as in all published models. */
typedef struct {
    double factor;     /* the largest divisor */
    double x[2], s[2]; /* first and last of those in between */
    int64_t between;
    double last_one, first_factor; /* x of the last 1 and of the first factor; 0: none */
} divisors;

static double divisor(const lm_gguf *g, const lm_gguf_tensor *t, int64_t i)
{
    float f;

    memcpy(&f, lm_gguf_data(g, t) + 4 * i, 4);
    return (double)f;
}

static divisors look_at(const lm_gguf *g, const lm_gguf_tensor *t, double theta)
{
    divisors d = { .factor = 1 };
    int64_t n = t->count;

    for (int64_t i = 0; i < n; i++)
        d.factor = fmax(d.factor, divisor(g, t, i));
    for (int64_t i = 0; i < n; i++) {
        double f = divisor(g, t, i), x = pow(theta, -(double)i / (double)n) / (2 * acos(-1.0));
        if (!(f > 1.000001)) {
            d.last_one = x;
        } else if (f < d.factor * 0.999999) {
            int k = d.between++ ? 1 : 0;
            d.x[k] = x;
            d.s[k] = (1 / f - 1 / d.factor) / (1 - 1 / d.factor);
        } else if (!(d.first_factor > 0)) {
            d.first_factor = x;
        }
    }
    return d;
}

/* Two numbers between the ends determine both parameters; with fewer, all parameters that fit are
 * equivalent. */
static void solve(const divisors *d, double *high, double *original)
{
    *high = 4;
    if (d->between >= 2) {
        double slope = (d->s[0] - d->s[1]) / (d->x[0] - d->x[1]), cut = slope * d->x[0] - d->s[0];
        *high = rint((1 + 1 / cut) * 1000) / 1000;
        *original = rint(slope * (*high - 1));
    } else if (d->between) {
        *original = rint((d->s[0] * (*high - 1) + 1) / d->x[0]);
    } else {
        double least = d->last_one > 0 ? *high / d->last_one : 1;
        double most = d->first_factor > 0 ? 1 / d->first_factor : 2 * least + 1;
        *original = rint(sqrt(least * most));
    }
}

static lm_code get_llama3(lm_gguf_reader *r, json_t *scaling, double theta, int64_t dim)
{
    const lm_gguf_tensor *t = lm_gguf_find(r->g, LM_GGUF_ROPE_FREQS);
    lm_rope_config made;
    double high, original = 0;
    float *f = NULL;
    lm_code rc;

    if (t->type != LM_GGUF_TYPE_F32 || t->ndim != 1 || t->count != dim / 2)
        return lm_fail(r->e, LM_EFORMAT, lm_gguf_path(r->g), NULL,
                       "'%s' is not one F32 number for each of %" PRId64 " frequencies",
                       LM_GGUF_ROPE_FREQS, dim / 2);
    divisors d = look_at(r->g, t, theta);
    solve(&d, &high, &original);
    bool fits = high > 1 && original >= 1 && original < 1e12 && d.factor < 1e12;
    rc = lm_alloc_n(&f, (size_t)t->count, sizeof *f, "rotary factors", r->e);
    if (!rc && fits) {
        made = (lm_rope_config){ .type = LM_ROPE_LLAMA3,
                                 .dim = dim,
                                 .theta = theta,
                                 .factor = d.factor,
                                 .low_freq = 1,
                                 .high_freq = high,
                                 .original = (int64_t)original };
        lm_gguf_rope_factors(&made, f);
        for (int64_t i = 0; i < t->count; i++)
            fits = fits && fabs(divisor(r->g, t, i) - (double)f[i]) <= 1e-3 * (double)f[i];
    }
    if (!rc && !fits)
        rc = lm_fail(r->e, LM_EUSAGE, lm_gguf_path(r->g), NULL,
                     "'%s' is not a scaling of the kind llama3", LM_GGUF_ROPE_FREQS);
    lm_free(f);
    if (rc)
        return rc;
    json_object_set_new(scaling, "rope_type", json_string("llama3"));
    set_real(scaling, "factor", d.factor);
    set_real(scaling, "low_freq_factor", 1);
    set_real(scaling, "high_freq_factor", high);
    json_object_set_new(scaling, "original_max_position_embeddings",
                        json_integer((int64_t)original));
    return LM_OK;
}

static lm_code get_rope(lm_gguf_reader *r, int64_t dim)
{
    json_t *s = json_object();
    lm_gguf_text type;
    double theta, factor, v;
    int64_t original;
    bool given;
    lm_code rc;

    if ((rc = real(r, "rope.freq_base", 10000, &theta, NULL)) ||
        (rc = real(r, "rope.scaling.factor", 1, &factor, NULL)) ||
        (rc = lm_gguf_whole(r, "rope.scaling.original_context_length", 0, &original, NULL)) ||
        (rc = lm_gguf_str(r->g, lm_gguf_key_of(r->key, r->arch, "rope.scaling.type"), &type, r->e)))
        goto out;
    set_real(r->o, "rope_theta", theta);
    if (has(r, LM_GGUF_ROPE_FREQS)) {
        rc = get_llama3(r, s, theta, dim);
    } else if (type.text && type.len == 6 && !memcmp(type.text, "linear", 6)) {
        json_object_set_new(s, "rope_type", json_string("linear"));
        set_real(s, "factor", factor);
    } else if (type.text && type.len == 4 && !memcmp(type.text, "yarn", 4)) {
        static const char *const names[][2] = { { "yarn_attn_factor", "attention_factor" },
                                                { "yarn_beta_fast", "beta_fast" },
                                                { "yarn_beta_slow", "beta_slow" } };
        char rest[64];
        json_object_set_new(s, "rope_type", json_string("yarn"));
        set_real(s, "factor", factor);
        if (original)
            json_object_set_new(s, "original_max_position_embeddings", json_integer(original));
        for (int i = 0; i < 3 && !rc; i++) {
            snprintf(rest, sizeof rest, "rope.scaling.%s", names[i][0]);
            rc = real(r, rest, 0, &v, &given);
            if (given && v > 0)
                set_real(s, names[i][1], v);
        }
        if (!rc)
            rc = real(r, "rope.scaling.attn_factor", 0, &v, &given);
        if (!rc && given && v > 0)
            set_real(s, "attention_factor", v * lm_rope_mscale(factor, 1));
        if (!rc)
            rc = real(r, "rope.scaling.yarn_log_multiplier", 0, &v, &given);
        if (!rc && given && v > 0) { /* both are taken to be equal there */
            set_real(s, "mscale", lm_gguf_shortest(v) * 10);
            set_real(s, "mscale_all_dim", lm_gguf_shortest(v) * 10);
        }
        if (!rc && r->untruncated)
            json_object_set_new(s, "truncate", json_false());
    } else if (type.text && !(type.len == 4 && !memcmp(type.text, "none", 4))) {
        rc = lm_fail(r->e, LM_EUSAGE, lm_gguf_path(r->g), "linear, yarn and llama3 are supported",
                     "unknown rotary scaling '%.*s'", (int)(type.len < 40 ? type.len : 40),
                     type.text);
    }
    if (!rc && json_object_size(s))
        json_object_set(r->o, "rope_scaling", s);
out:
    json_decref(s);
    return rc;
}

lm_code lm_gguf_get_rope(const lm_gguf *g, const lm_arch *a, int64_t dim, json_t *out, lm_err *e)
{
    lm_gguf_reader r = {
        .g = g, .arch = a->gguf, .o = out, .untruncated = a->gguf_untruncated, .e = e
    };

    return get_rope(&r, dim);
}

static bool rotates_part(const lm_arch *a)
{
    for (const lm_gguf_key *k = a->gguf_keys; k->hf; k++)
        if (k->kind == LM_KEY_PARTIAL_ROPE)
            return true;
    return false;
}

/* The width of a head.  In supported models, keys and values have this width, and their rotated part, unless a key of its
 * own says how wide it is. */
static lm_code get_head_dim(lm_gguf_reader *r, const lm_arch *a, int64_t dflt, int64_t *dim)
{
    static const char *const others[2] = { "attention.value_length", "rope.dimension_count" };
    bool part = rotates_part(a);
    int64_t n;

    *dim = dflt;
    if ((!part && lm_gguf_whole(r, "rope.dimension_count", dflt, dim, NULL)) ||
        lm_gguf_whole(r, "attention.key_length", *dim, dim, NULL))
        return r->e->code;
    for (int i = 0; i < 2 - part; i++) {
        if (lm_gguf_whole(r, others[i], *dim, &n, NULL))
            return r->e->code;
        if (n != *dim)
            return lm_fail(r->e, LM_EUSAGE, lm_gguf_path(r->g), NULL,
                           "'%s' is %" PRId64 ", the heads are %" PRId64
                           " wide: only models in which they are equal are supported",
                           r->key, n, *dim);
    }
    return LM_OK;
}

lm_code lm_gguf_check_head_dim(const lm_gguf *g, const lm_arch *a, int64_t dim, lm_err *e)
{
    lm_gguf_reader r = { .g = g, .arch = a->gguf, .e = e };

    return get_head_dim(&r, a, dim, &dim);
}

/* A number, or its default if it is absent. */
static lm_code get_number(lm_gguf_reader *r, const lm_gguf_key *k)
{
    double like = k->like ? (double)json_integer_value(json_object_get(r->o, k->like)) : 1;
    int64_t n;
    double v;

    if (k->kind == LM_KEY_REAL) {
        if (real(r, k->gguf, like * k->times, &v, NULL))
            return r->e->code;
        if (!k->unless_like || v > like * k->times || v < like * k->times)
            set_real(r->o, k->hf, v);
        return LM_OK;
    }
    if (lm_gguf_whole(r, k->gguf, k->optional ? (int64_t)(like * k->times) : -1, &n, NULL))
        return r->e->code;
    if (!k->unless_like || n != (int64_t)(like * k->times))
        lm_gguf_set_int(r, k->hf, n);
    return LM_OK;
}

static lm_code get_expert_ffn(lm_gguf_reader *r, const lm_gguf_key *k)
{
    int64_t all = json_integer_value(json_object_get(r->o, "intermediate_size")), n;
    int64_t chosen = json_integer_value(json_object_get(r->o, "num_experts_per_tok"));

    if (lm_gguf_whole(r, k->gguf, chosen ? all / chosen : 0, &n, NULL))
        return r->e->code;
    lm_gguf_set_int(r, k->hf, n);
    return LM_OK;
}

static lm_code get_share(lm_gguf_reader *r, const lm_gguf_key *k)
{
    int64_t of = json_integer_value(json_object_get(r->o, k->like)), n;

    if (lm_gguf_whole(r, k->gguf, -1, &n, NULL))
        return r->e->code;
    if (of <= 0 || n % of)
        return lm_fail(r->e, LM_EFORMAT, lm_gguf_path(r->g), NULL,
                       "'%s' is %" PRId64 ", which %" PRId64 " does not divide", r->key, n, of);
    lm_gguf_set_int(r, k->hf, n / of);
    return LM_OK;
}

static lm_code get_partial(lm_gguf_reader *r, const lm_gguf_key *k, int64_t dim)
{
    int64_t n;

    if (lm_gguf_whole(r, "rope.dimension_count", dim, &n, NULL))
        return r->e->code;
    set_real(r->o, k->hf, (double)n / (double)(dim ? dim : 1));
    return LM_OK;
}

static lm_code get_head(lm_gguf_reader *r, const lm_arch *a, const char *key, int64_t *dim)
{
    int64_t width = json_integer_value(json_object_get(r->o, "hidden_size")), all;
    int64_t heads = json_integer_value(json_object_get(r->o, "num_attention_heads"));

    if (get_head_dim(r, a, heads ? width / heads : 0, dim))
        return r->e->code;
    if (a->gguf_head_dim || !lm_mul_i64_ok(*dim, heads, &all) || all != width)
        lm_gguf_set_int(r, key, *dim);
    return LM_OK;
}

/* k NULL: config.json has no key for it. */
static lm_code get_window(lm_gguf_reader *r, const lm_gguf_key *k)
{
    int64_t window;

    if (lm_gguf_whole(r, "attention.sliding_window", k ? (int64_t)k->times : 0, &window, NULL))
        return r->e->code;
    if (window && !k)
        return lm_fail(r->e, LM_EUSAGE, lm_gguf_path(r->g), NULL,
                       "a sliding window in '%s' cannot be written in config.json", r->arch);
    if (window)
        lm_gguf_set_int(r, k->hf, window);
    return LM_OK;
}

/* The list of the layers with a window, as some files have it instead of a number; NULL: none. */
static lm_code get_pattern_list(lm_gguf_reader *r, int64_t layers, const lm_gguf_value **out)
{
    const lm_gguf_value *v =
        lm_gguf_value_of(r->g, lm_gguf_key_of(r->key, r->arch, "attention.sliding_window_pattern"));

    *out = v && v->array ? v : NULL;
    if (*out &&
        (v->kind == LM_GGUF_STRING || v->kind == LM_GGUF_ARRAY || (int64_t)v->count < layers))
        return lm_fail(r->e, LM_EFORMAT, lm_gguf_path(r->g), NULL,
                       "'%s' is not a list with an entry for each of %" PRId64 " layers", r->key,
                       layers);
    return LM_OK;
}

/* Without a window, llama.cpp lets every layer attend to all keys, whatever the pattern.  Pattern 0: each layer
 * has one. */
static lm_code get_types(lm_gguf_reader *r, const lm_arch *a, int64_t layers, bool window,
                         json_t **types, bool *usual)
{
    int64_t pattern = 0;
    const lm_gguf_value *list;

    if (get_pattern_list(r, layers, &list) ||
        (!list &&
         lm_gguf_whole(r, "attention.sliding_window_pattern", a->gguf_pattern, &pattern, NULL)))
        return r->e->code;
    if (!window) {
        pattern = 1;
        list = NULL;
    }
    *usual = !list && pattern == a->gguf_pattern;
    *types = json_array();
    for (int64_t l = 0; l < layers; l++) {
        bool slides = list      ? lm_gguf_number(list, (uint64_t)l) > 0
                      : pattern ? (l + 1) % pattern != 0
                                : true;
        json_array_append_new(*types, json_string(slides ? "sliding_attention" : "full_attention"));
    }
    return LM_OK;
}

lm_code lm_gguf_get_types(const lm_gguf *g, const lm_config *c, json_t **types, bool *usual,
                          lm_err *e)
{
    lm_gguf_reader r = { .g = g, .arch = c->arch->gguf, .e = e };

    *types = NULL;
    return get_types(&r, c->arch, c->layers, lm_config_window(c) > 0, types, usual);
}

/* layer_types, if GGUF has another pattern than the usual one, or no window, for which the default of config.json
 * is a number. */
static lm_code get_pattern(lm_gguf_reader *r, const lm_arch *a, const char *window)
{
    int64_t layers = json_integer_value(json_object_get(r->o, "num_hidden_layers"));
    json_t *types = NULL;
    bool usual;

    if (!a->gguf_pattern || layers > 65536)
        return LM_OK;
    if (get_types(r, a, layers, json_object_get(r->o, window), &types, &usual))
        return r->e->code;
    if (usual)
        json_decref(types);
    else
        json_object_set_new(r->o, "layer_types", types);
    return LM_OK;
}

/* The value of query_pre_attn_scalar that gives the scale of llama.cpp. */
static void get_scalar(lm_gguf_reader *r, const lm_arch *a, const char *key, int64_t dim)
{
    int64_t layers = json_integer_value(json_object_get(r->o, "num_hidden_layers"));
    int64_t heads = json_integer_value(json_object_get(r->o, "num_attention_heads"));
    int64_t width = json_integer_value(json_object_get(r->o, "hidden_size"));
    double scale = lm_arch_gguf_scale(a, layers, width, heads ? heads : 1, dim ? dim : 1);

    lm_gguf_set_int(r, key, (int64_t)rint(1 / (scale * scale)));
}

/* Where both rotary tables have one base, transformers 5 reads a base other than its default, `usual`, only from
 * an object for each table. */
static void split_rope(json_t *o, double usual)
{
    json_t *theta = json_object_get(o, "rope_theta"), *far, *near, *both;

    if (fabs(json_number_value(theta) - usual) <= 0)
        return;
    far = json_object_get(o, "rope_scaling");
    far = far ? json_incref(far) : json_pack("{ss}", "rope_type", "default");
    near = json_pack("{ss}", "rope_type", "default");
    json_object_set(far, "rope_theta", theta);
    json_object_set(near, "rope_theta", theta);
    both = json_pack("{soso}", "full_attention", far, "sliding_attention", near);
    json_object_del(o, "rope_theta");
    json_object_del(o, "rope_scaling");
    json_object_set_new(o, "rope_parameters", both);
}

/* block_count counts modules that predict tokens further on, which are behind the layers. */
static lm_code get_trunk(lm_gguf_reader *r, const lm_arch *a)
{
    const int64_t layers = json_integer_value(json_object_get(r->o, "num_hidden_layers"));
    int64_t further;
    if (lm_gguf_get_further(r->g, a, &further, r->e))
        return r->e->code;
    if (further)
        lm_gguf_set_int(r, "num_hidden_layers", layers > further ? layers - further : 0);
    return LM_OK;
}

/* All keys of the entry of the architecture, in its order. */
static lm_code get_keys(lm_gguf_reader *r, const lm_arch *a)
{
    bool windows = false;
    int64_t dim = 0;
    lm_code rc = LM_OK;

    for (const lm_gguf_key *k = a->gguf_keys; !rc && k->hf; k++) {
        switch (k->kind) {
        case LM_KEY_INT:
        case LM_KEY_REAL:
            rc = get_number(r, k);
            break;
        case LM_KEY_EXPERT_FFN:
            rc = get_expert_ffn(r, k);
            break;
        case LM_KEY_SHARE:
            rc = get_share(r, k);
            break;
        case LM_KEY_PARTIAL_ROPE:
            rc = get_partial(r, k, dim);
            break;
        case LM_KEY_LATENT:
            rc = lm_gguf_get_latent(r->g, a, r->o, r->e);
            break;
        case LM_KEY_SCORED:
            rc = lm_gguf_get_scored(r->g, a, r->o, r->e);
            break;
        case LM_KEY_STACKS:
            rc = lm_gguf_get_stacks(r->g, a, r->o, r->e);
            break;
        case LM_KEY_SECTIONS:
            rc = get_trunk(r, a);
            break;
        case LM_KEY_MASKED:
            rc = lm_gguf_get_masked(r->g, a, r->o, r->e);
            break;
        case LM_KEY_TRUE:
            json_object_set_new(r->o, k->hf, json_true());
            break;
        case LM_KEY_TEXT:
            json_object_set_new(r->o, k->hf, json_string(k->gguf));
            break;
        case LM_KEY_HAS:
            json_object_set_new(r->o, k->hf, json_boolean(has(r, k->gguf)));
            break;
        case LM_KEY_HEAD_DIM:
            rc = get_head(r, a, k->hf, &dim);
            break;
        case LM_KEY_WINDOW:
            windows = true;
            rc = get_window(r, k) ? r->e->code : get_pattern(r, a, k->hf);
            break;
        case LM_KEY_SCALAR:
            get_scalar(r, a, k->hf, dim);
            break;
        case LM_KEY_ROPE:
            rc = get_rope(r, dim);
            if (!rc && k->times > 0)
                split_rope(r->o, k->times);
            break;
        }
    }
    return rc || windows ? rc : get_window(r, NULL);
}

/* The number of experts and of those that a token goes to; 0: the model is dense. */
static lm_code get_experts(const lm_gguf *g, const lm_gguf_text *arch, int64_t *experts, lm_err *e)
{
    static const char *const names[2] = { "expert_count", "expert_used_count" };
    int64_t n[2] = { 0, 0 };
    char key[2][96];

    for (int i = 0; i < 2; i++) {
        snprintf(key[i], sizeof key[i], "%.*s.%s", (int)(arch->len < 60 ? arch->len : 60),
                 arch->text, names[i]);
        if (lm_gguf_i64_or(g, key[i], 0, 0, 1 << 20, &n[i], NULL, e))
            return e->code;
    }
    *experts = n[0];
    return n[1] > n[0]
               ? lm_fail(e, LM_EFORMAT, lm_gguf_path(g), NULL,
                         "'%s' is %" PRId64 ", but '%s' is %" PRId64, key[1], n[1], key[0], n[0])
               : LM_OK;
}

/* The first entry of that name, with experts or without, or the one for a GGUF with a window: OLMo 3 beside OLMo 2,
 * Mistral beside Llama, where llama.cpp's conversion drops the window. */
static lm_code find_arch(const lm_gguf *g, const lm_arch **out, lm_err *e)
{
    lm_gguf_text name;
    int64_t window, experts = 0;
    bool sigmoid;
    char list[LM_ARCH_LIST], key[96];
    lm_code rc = lm_gguf_str(g, "general.architecture", &name, e);

    *out = NULL;
    if (!rc && !name.text)
        rc = lm_fail(e, LM_EFORMAT, lm_gguf_path(g), NULL, "'general.architecture' is missing");
    if (!rc)
        rc = get_experts(g, &name, &experts, e);
    for (int i = 0; !rc && !*out && lm_arch_at(i); i++) {
        const char *known = lm_arch_at(i)->gguf;
        if (*known && strlen(known) == name.len && !memcmp(known, name.text, name.len) &&
            (!experts || lm_gguf_has_key(lm_arch_at(i), "expert_count")))
            *out = lm_arch_at(i);
    }
    if (!rc && !*out && experts)
        rc = lm_fail(e, LM_EUSAGE, lm_gguf_path(g), NULL,
                     "a model of %" PRId64 " experts; of '%.*s' only dense models are supported",
                     experts, (int)(name.len < 60 ? name.len : 60), name.text);
    if (!rc && !*out)
        rc = lm_fail(e, LM_EUSAGE, lm_gguf_path(g), lm_arch_list(true, list), "architecture '%.*s'",
                     (int)(name.len < 60 ? name.len : 60), name.text);
    if (!rc && *out == &lm_arch_deepseek_v2) { /* one name there for both */
        rc = lm_gguf_scores_sigmoid(g, (*out)->gguf, &sigmoid, e);
        *out = !rc && sigmoid ? &lm_arch_deepseek_v3 : *out;
    }
    if (rc || !(*out)->gguf_windowed)
        return rc;
    rc = lm_gguf_i64_or(g, lm_gguf_key_of(key, (*out)->gguf, "attention.sliding_window"), 0, 0,
                        INT64_C(1) << 40, &window, NULL, e);
    if (!rc && window)
        *out = (*out)->gguf_windowed;
    return rc;
}

static lm_code get_config(const lm_gguf *g, json_t **out, lm_err *e)
{
    const lm_gguf_tensor *embed;
    lm_gguf_reader r = { .g = g, .e = e };
    const lm_arch *a;
    lm_code rc = find_arch(g, &a, e);

    *out = NULL;
    if (rc)
        return rc;
    embed = weight_of(g, a, LM_PART_EMBED);
    if (!embed || embed->ndim != 2)
        return lm_fail(e, LM_EFORMAT, lm_gguf_path(g), NULL,
                       "it has no tensor '%s.weight' of two dimensions: the vocabulary alone is "
                       "not a model",
                       lm_arch_part(a, LM_PART_EMBED)->gguf);
    r.arch = a->gguf;
    r.untruncated = a->gguf_untruncated;
    r.o = json_object();
    json_object_set_new(r.o, "architectures", json_pack("[s]", a->class_name));
    json_object_set_new(r.o, "model_type", json_string(a->name));
    rc = get_keys(&r, a);
    if (!rc)
        rc = get_ids(&r);
    lm_gguf_set_int(&r, "vocab_size", embed->dim[0]);
    json_object_set_new(r.o, "tie_word_embeddings", json_boolean(!weight_of(g, a, LM_PART_OUTPUT)));
    if (rc)
        json_decref(r.o);
    else
        *out = r.o;
    return rc;
}

lm_code lm_gguf_get_config(const lm_gguf *g, json_t **out, lm_err *e)
{
    return get_config(g, out, e) ? lm_err_disobeyed(e) : LM_OK;
}
