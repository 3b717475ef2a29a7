/* SPDX-License-Identifier: Apache-2.0 */
/* config.c -- reads config.json strictly. */
#include "model/config.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "kernels/gaussian.h"
#include "model/arch_read.h"

void lm_config_fini(lm_config *c)
{
    if (c->encoder)
        lm_config_fini(c->encoder);
    lm_free(c->encoder);
    lm_free(c->layer);
    lm_free(c->eos);
    memset(c, 0, sizeof *c);
}

int64_t lm_config_eos(const lm_config *c)
{
    return c->n_eos ? c->eos[0] : -1;
}

void lm_config_set_dropout(lm_config *c, double rate)
{
    c->drop_embed = c->drop_resid = c->drop_attn = rate;
    if (!c->encoder)
        return;
    c->drop_mlp = rate;
    lm_config_set_dropout(c->encoder, rate);
    c->encoder->drop_mlp = rate;
}

lm_code lm_config_check_dropout(const lm_config *c, const char *where, const char *what, lm_err *e)
{
    for (int64_t l = 0; l < lm_config_depth(c) && c->drop_attn > 0; l++)
        if (c->layer[l].attention == LM_ATTENTION_LINEAR)
            return lm_fail(e, LM_EUSAGE, where, "set it to 0",
                           "%s is %g, but layer %lld has linear attention, whose weights cannot be "
                           "dropped",
                           what, c->drop_attn, (long long)l);
    return LM_OK;
}

int64_t lm_config_all_layers(const lm_config *c)
{
    return lm_config_depth(c) + (c->encoder ? c->encoder->layers : 0);
}

int64_t lm_config_window(const lm_config *c)
{
    int64_t widest = 0;

    for (int64_t l = 0; l < c->layers; l++)
        widest = c->layer[l].window > widest ? c->layer[l].window : widest;
    return widest;
}

int lm_config_windows(const lm_config *c, int64_t window[LM_MOST_WINDOWS])
{
    int n = 0;

    for (int64_t l = 0; l < c->layers; l++) {
        const int64_t w = c->layer[l].window;
        int i = 0;
        while (i < n && window[i] != w)
            i++;
        if (w > 0 && i == n && n < LM_MOST_WINDOWS)
            window[n++] = w;
    }
    return n;
}

lm_code lm_config_check_context(const lm_config *c, int64_t context, lm_err *e)
{
    if (context > c->max_positions && !c->layer[0].alibi)
        return lm_fail(e, LM_EUSAGE, "context", "use a shorter one",
                       "%" PRId64 " position%s, but the model was made for %" PRId64, context,
                       lm_plural(context), c->max_positions);
    return LM_OK;
}

bool lm_config_learns_noise(const lm_config *c)
{
    bool any = false;
    for (int64_t l = 0; l < c->layers; l++)
        any |= c->layer[l].moe.noisy;
    return any;
}

bool lm_config_has_states(const lm_config *c)
{
    for (int64_t l = 0; l < c->layers; l++)
        if (lm_layer_has_state(&c->layer[l]))
            return true;
    return false;
}

bool lm_config_bidirectional(const lm_config *c)
{
    for (int64_t l = 0; l < c->layers; l++)
        if (c->layer[l].bidirectional)
            return true;
    return false;
}

lm_code lm_config_check_causal(const lm_config *c, const char *where, const char *todo, lm_err *e)
{
    if (!lm_config_bidirectional(c))
        return LM_OK;
    return lm_fail(e, LM_EUSAGE, where, todo,
                   "a %s model sees the tokens on both sides, and predicts no next one",
                   lm_arch_name(c->arch));
}

lm_code lm_config_check_alone(const lm_config *c, const char *where, const char *what, lm_err *e)
{
    if (!c->encoder)
        return LM_OK;
    return lm_fail(e, LM_EUSAGE, where, "use a model without an encoder",
                   "a %s model has an encoder and a decoder, which %s cannot have",
                   lm_arch_name(c->arch), what);
}

bool lm_config_all_heads(const lm_config *c)
{
    for (int64_t l = 0; l < c->layers; l++)
        if (c->layer[l].attention == LM_ATTENTION_LATENT || lm_layer_has_state(&c->layer[l]))
            return false;
    return true;
}

lm_code lm_config_check_heads(const lm_config *c, const char *where, lm_err *e)
{
    for (int64_t l = 0; l < c->layers; l++)
        if (c->layer[l].attention == LM_ATTENTION_LATENT)
            return lm_fail(e, LM_EUSAGE, where, NULL,
                           "layer %" PRId64
                           " of the model keeps a latent of each token, not keys and values",
                           l);
    return LM_OK;
}

lm_code lm_config_check_stored(const lm_config *c, const char *where, lm_err *e)
{
    if (lm_config_check_alone(c, where, "caches in files and codes", e))
        return e->code;
    for (int64_t l = 0; l < c->layers; l++)
        if (c->layer[l].weigh != LM_WEIGH_SOFTMAX)
            return lm_fail(e, LM_EUSAGE, where, NULL,
                           "layer %" PRId64
                           " of the model has Gaussian attention, whose keys are kept with norms",
                           l);
    return LM_OK;
}

lm_code lm_config_check_coded(const lm_config *c, const char *where, lm_err *e)
{
    if (lm_config_check_stored(c, where, e))
        return e->code;
    for (int64_t l = 0; l < c->layers; l++)
        if (c->layer[l].attention == LM_ATTENTION_LINEAR)
            return lm_fail(e, LM_EUSAGE, where, NULL,
                           "layer %" PRId64
                           " of the model has linear attention, whose states have no codes",
                           l);
    return LM_OK;
}

int64_t lm_layer_rotary(const lm_layer *y)
{
    int64_t own = y->rotary ? y->rotary : y->head_dim;
    return y->attention == LM_ATTENTION_LATENT ? y->latent.rope_dim : own;
}

static bool same_attention(const lm_layer *a, const lm_layer *b)
{
    const lm_delta_sizes *x = &a->delta, *y = &b->delta;
    return a->attention == b->attention && a->linear.feature == b->linear.feature &&
           a->linear.decay == b->linear.decay && a->out_gate == b->out_gate &&
           x->heads == y->heads && x->key_heads == y->key_heads && x->key_dim == y->key_dim &&
           x->value_dim == y->value_dim && x->taps == y->taps;
}

int64_t lm_layer_key_dim(const lm_layer *y)
{
    return y->head_dim + (y->weigh == LM_WEIGH_SOFTMAX ? 0 : LM_GAUSSIAN_MORE);
}

int64_t lm_layer_value_dim(const lm_layer *y)
{
    return y->attention == LM_ATTENTION_LATENT ? y->latent.value_dim : y->head_dim;
}

static bool same_latent(const lm_latent *a, const lm_latent *b)
{
    return a->q_rank == b->q_rank && a->kv_rank == b->kv_rank && a->nope_dim == b->nope_dim &&
           a->rope_dim == b->rope_dim && a->value_dim == b->value_dim && a->pairs == b->pairs;
}

static bool same_experts(const lm_moe *a, const lm_moe *b)
{
    return a->experts == b->experts && a->chosen == b->chosen && a->ffn == b->ffn &&
           a->shared == b->shared && a->shared_gate == b->shared_gate &&
           a->normalise == b->normalise;
}

bool lm_config_alike(const lm_config *c)
{
    for (int64_t l = 1; l < c->layers; l++) {
        const lm_layer *a = &c->layer[0], *b = &c->layer[l];
        if (a->heads != b->heads || a->kv_heads != b->kv_heads || a->head_dim != b->head_dim ||
            a->attention != b->attention || a->weigh != b->weigh ||
            !same_latent(&a->latent, &b->latent) || a->ffn != b->ffn || a->mlp != b->mlp ||
            a->mlp_bias != b->mlp_bias || !same_experts(&a->moe, &b->moe) ||
            a->qkv_bias != b->qkv_bias || a->out_bias != b->out_bias || a->qk_norm != b->qk_norm ||
            fabs(a->soft_cap - b->soft_cap) > 0 || a->bidirectional != b->bidirectional ||
            a->norm_before != b->norm_before || a->norm_after != b->norm_after ||
            a->norm_sum != b->norm_sum || !same_attention(a, b))
            return false;
    }
    return true;
}

/* ---- Special tokens ---- */

enum { MOST_EOS = 4096 };

/* An id of the vocabulary; -1: none, or beyond the vocabulary. */
static lm_code read_id(const json_t *v, const char *where, const char *key, int64_t vocab,
                       int64_t *out, lm_err *e)
{
    *out = -1;
    if (!v || json_is_null(v))
        return LM_OK;
    if (!json_is_integer(v))
        return lm_read_bad(where, key, e, "is not a token id");
    if (json_integer_value(v) >= 0 && json_integer_value(v) < vocab)
        *out = json_integer_value(v);
    return LM_OK;
}

static lm_code read_eos(const json_t *v, const char *where, lm_config *c, lm_err *e)
{
    static const char key[] = "eos_token_id";
    size_t n = json_is_array(v) ? json_array_size(v) : 1;
    int64_t id;

    if (n > MOST_EOS)
        return lm_read_bad(where, key, e, "is a list of more than 4096 ids");
    if (lm_alloc_n(&c->eos, n + 1, sizeof *c->eos, "end tokens", e))
        return e->code;
    for (size_t i = 0; i < n; i++) {
        bool again = false;
        if (read_id(json_is_array(v) ? json_array_get(v, i) : v, where, key, c->vocab, &id, e))
            return e->code;
        for (int k = 0; k < c->n_eos; k++)
            again = again || c->eos[k] == id;
        if (id >= 0 && !again)
            c->eos[c->n_eos++] = id;
    }
    return LM_OK;
}

static lm_code read_ids(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    const json_t *bos = json_object_get(o, "bos_token_id"),
                 *pad = json_object_get(o, "pad_token_id");

    bos = json_is_array(bos) ? json_array_get(bos, 0) : bos;
    pad = json_is_array(pad) ? json_array_get(pad, 0) : pad;
    return read_id(bos, where, "bos_token_id", c->vocab, &c->bos, e) ||
                   read_eos(json_object_get(o, "eos_token_id"), where, c, e) ||
                   read_id(pad, where, "pad_token_id", c->vocab, &c->pad, e)
               ? e->code
               : LM_OK;
}

/* ---- The whole ---- */

static lm_code check_layer(const lm_config *c, const lm_layer *y, const char *where, lm_err *e)
{
    int64_t n;

    if (!lm_mul_i64_ok(2 * y->heads + 2 * y->kv_heads, y->head_dim, &n) ||
        n > 8 * (int64_t)LM_MOST_WIDTH || !lm_mul_i64_ok(c->vocab, c->width, &n))
        return lm_fail(e, LM_EUSAGE, where, NULL, "the product of the dimensions is too large");
    return LM_OK;
}

static lm_code check_ranges(const lm_config *c, const char *where, lm_err *e)
{
    const double rates[3] = { c->drop_embed, c->drop_resid, c->drop_attn };

    for (int i = 0; i < 3; i++)
        if (!(rates[i] >= 0 && rates[i] < 1))
            return lm_fail(e, LM_EUSAGE, where, NULL, "a dropout rate is %g, not in [0,1)",
                           rates[i]);
    if (lm_config_check_dropout(c, where, "\"attention_dropout\"", e))
        return e->code;
    if (!(c->norm_eps > 0) || !(c->init_std >= 0))
        return lm_fail(e, LM_EUSAGE, where, NULL, "epsilon or initializer_range is not positive");
    for (int i = 0; i < c->ropes; i++)
        if (!(c->rope[i].theta > 0))
            return lm_read_bad(where, "rope_theta", e, "is not positive");
    for (int64_t l = 0; l < lm_config_depth(c); l++)
        if (check_layer(c, &c->layer[l], where, e))
            return e->code;
    return LM_OK;
}

bool lm_config_has_positions(const lm_config *c)
{
    return !c->ropes && !c->layer[0].alibi && !c->layer[0].buckets;
}

/* For an unknown model_type: a mixture of experts has one of these keys. */
static lm_code unknown_type(const json_t *o, const char *where, const char *type, lm_err *e)
{
    static const char *const keys[] = { "num_experts", "num_local_experts", "n_routed_experts" };
    const json_t *text = json_object_get(o, "text_config"); /* also of models with image input */
    char list[LM_ARCH_LIST];

    for (size_t i = 0; i < 2 * sizeof keys / sizeof *keys; i++) {
        int64_t n = json_integer_value(json_object_get(i % 2 ? text : o, keys[i / 2]));
        if (n > 0)
            return lm_fail(e, LM_EUSAGE, where,
                           "inspect-model, merge-models and compress-ckpt accept its tensors",
                           "model_type \"%s\" is a mixture of %" PRId64
                           " experts of a kind that is not known",
                           type, n);
    }
    const char *inner = json_string_value(json_object_get(text, "model_type"));
    if (inner && lm_arch_find(inner))
        return lm_fail(e, LM_EUSAGE, where,
                       "save its text model alone; inspect-model and merge-models accept the whole",
                       "model_type \"%s\" has a %s model in text_config, and other parts", type,
                       inner);
    return lm_fail(e, LM_EUSAGE, where, lm_arch_list(false, list), "unknown model_type \"%s\"",
                   type);
}

/* A table is as wide as the heads of the layers that read it. */
static lm_code size_tables(lm_config *c, const char *where, lm_err *e)
{
    for (int i = 0; i < c->ropes; i++)
        c->rope[i].dim = 0;
    for (int64_t l = 0; l < lm_config_depth(c); l++) {
        const lm_layer *y = &c->layer[l];
        int64_t *dim = y->rope >= 0 ? &c->rope[y->rope].dim : NULL, wide = lm_layer_rotary(y);
        if (dim && *dim && *dim != wide)
            return lm_fail(e, LM_EUSAGE, where, NULL,
                           "layers with one rotary table have heads of %" PRId64 " and %" PRId64
                           " numbers",
                           *dim, wide);
        if (dim)
            *dim = wide;
    }
    for (int i = 0; i < c->ropes; i++) /* one that no layer reads */
        c->rope[i].dim = c->rope[i].dim ? c->rope[i].dim : lm_layer_rotary(&c->layer[0]);
    return LM_OK;
}

/* ---- Scores ---- */

static const char scores_class[] = "ForSequenceClassification";

/* Labels of a ...ForSequenceClassification; 0: another class. */
static int64_t count_scores(const json_t *o)
{
    const char *name = json_string_value(json_array_get(json_object_get(o, "architectures"), 0));
    const json_t *labels = json_object_get(o, "num_labels"), *ids = json_object_get(o, "id2label");
    size_t n = name ? strlen(name) : 0, k = sizeof scores_class - 1;
    if (n < k || strcmp(name + n - k, scores_class) != 0)
        return 0;
    if (json_is_integer(labels) && json_integer_value(labels) > 0)
        return json_integer_value(labels);
    return json_object_size(ids) ? (int64_t)json_object_size(ids) : 2; /* transformers' default */
}

/* "LlamaForCausalLM" -> "Llama", "GPT2LMHeadModel" -> "GPT2" */
static int family_length(const char *class_name)
{
    const char *end = strstr(class_name, "ForCausalLM");
    end = end ? end : strstr(class_name, "LMHeadModel");
    return end ? (int)(end - class_name) : (int)strlen(class_name);
}

lm_code lm_config_make_scores(lm_config *c, json_t *o, lm_err *e)
{
    char name[128];
    int64_t pad = c->pad >= 0 ? c->pad : lm_config_eos(c) >= 0 ? lm_config_eos(c) : 0;
    if (c->scores)
        return LM_OK;
    snprintf(name, sizeof name, "%.*s%s", family_length(c->arch->class_name), c->arch->class_name,
             scores_class);
    if (json_object_set_new(o, "architectures", json_pack("[s]", name)) ||
        json_object_set_new(o, "num_labels", json_integer(1)) ||
        json_object_set_new(o, "id2label", json_pack("{s:s}", "0", "LABEL_0")) ||
        json_object_set_new(o, "label2id", json_pack("{s:i}", "LABEL_0", 0)) ||
        json_object_set_new(o, "pad_token_id", json_integer(pad)))
        return lm_fail(e, LM_ELIMIT, "config.json", NULL, "no memory");
    c->pad = pad;
    c->scores = 1;
    return LM_OK;
}

lm_code lm_config_set_pairs(lm_config *c, json_t *o, bool pairs, const char *where, lm_err *e)
{
    const char *name = pairs ? c->arch->pairs_class : c->arch->class_name;
    if (!name)
        return lm_fail(e, LM_EUSAGE, where, "use a BERT",
                       "a %s model has no head for pairs of texts", lm_arch_name(c->arch));
    c->pairs = pairs;
    return json_object_set_new(o, "architectures", json_pack("[s]", name))
               ? lm_fail(e, LM_ELIMIT, "config.json", NULL, "no memory")
               : LM_OK;
}

/* ---- The whole, read ---- */

static lm_code read_config(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    const char *type = NULL;
    memset(c, 0, sizeof *c);
    c->bos = c->pad = -1;
    if (lm_json_str_or(o, "model_type", NULL, &type, where, e))
        return e->code;
    if (!type)
        return lm_read_bad(where, "model_type", e, "is missing");
    c->arch = lm_arch_find(type);
    if (!c->arch)
        return unknown_type(o, where, type, e);
    const json_t *q = json_object_get(o, "quantization_config");
    if (q && !json_is_null(q))
        return lm_read_bad(where, "quantization_config", e, "quantised models cannot be read");
    if (lm_json_i64(o, "vocab_size", 1, INT64_C(1) << 27, &c->vocab, where, e) ||
        lm_json_f64_or(o, "initializer_range", 0.02, &c->init_std, where, e) ||
        c->arch->read(o, where, c, e) || size_tables(c, where, e) || read_ids(o, where, c, e) ||
        check_ranges(c, where, e))
        return e->code;
    c->scores = count_scores(o);
    return LM_OK;
}

lm_code lm_config_read(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    if (!read_config(o, where, c, e))
        return LM_OK;
    lm_config_fini(c);
    return lm_err_disobeyed(e);
}
