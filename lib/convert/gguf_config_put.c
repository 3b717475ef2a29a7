/* SPDX-License-Identifier: Apache-2.0 */
/* gguf_config_put.c -- hyper-parameters of config.json as the keys of GGUF (gguf_meta.h). */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "convert/gguf_deepseek.h"
#include "convert/gguf_encoders.h"
#include "convert/gguf_keys.h"

/* n, if each n-th layer attends to all keys and the others have windows (none if n is beyond the
 * last layer); 0: no such n. */
static int64_t pattern_of(const lm_config *c)
{
    for (int64_t n = c->layers + 2; n > 0; n--) {
        /* the usual one first, as others may fit too */
        int64_t by = n == c->layers + 2 ? c->arch->gguf_pattern : n, l = 0;
        while (l < c->layers && (c->layer[l].window > 0) == ((l + 1) % by != 0))
            l++;
        if (l == c->layers)
            return by;
    }
    return 0;
}

/* The layers with a window: each but every n-th, or a list where no n fits, which llama.cpp reads
 * since 2026. */
static lm_code put_pattern(lm_gguf_plan *p, const char *key, const lm_config *c, lm_err *e)
{
    int64_t n = pattern_of(c);
    bool *slides = NULL;

    if (n && n != c->arch->gguf_pattern)
        lm_gguf_put_u32(p, key, (uint32_t)n);
    if (n || lm_alloc_n(&slides, (size_t)c->layers, 1, "a list of layers", e))
        return e->code;
    for (int64_t l = 0; l < c->layers; l++)
        slides[l] = c->layer[l].window > 0;
    lm_gguf_put_bools(p, key, slides, (size_t)c->layers);
    lm_free(slides);
    return LM_OK;
}

/* True if soft caps occur exactly where llama.cpp computes them. */
static bool caps_fit(const lm_config *c)
{
    /* a model with the first also has the second */
    bool attn = lm_gguf_has_key(c->arch, "attn_logit_softcapping");
    bool logits = lm_gguf_has_key(c->arch, "final_logit_softcapping");

    return (c->layer[0].soft_cap > 0) == attn && (c->logit_cap > 0 ? logits : !attn);
}

/* n, if each n-th layer has attention and the others states; 0: no such n. */
static int64_t interval_of(const lm_config *c)
{
    for (int64_t n = 1; n <= c->layers + 1; n++) {
        int64_t l = 0;
        while (l < c->layers && (c->layer[l].attention == LM_ATTENTION_DELTA) == ((l + 1) % n != 0))
            l++;
        if (l == c->layers)
            return n;
    }
    return 0;
}

/* Of a model with states: its layers differ in nothing else, and fit llama.cpp's words. */
static lm_code check_states(const lm_import *m, lm_err *e)
{
    const lm_config *c = &m->config;

    if (!interval_of(c))
        return lm_gguf_no_words(m, "such an order of layers with states and with attention", e);
    for (int64_t l = 0; l < c->layers; l++) {
        const lm_layer *y = &c->layer[l];
        if (!y->moe.experts && lm_gguf_has_key(c->arch, "expert_count"))
            return lm_gguf_no_words(m, "layers without experts", e);
        if (y->qkv_bias || y->out_bias)
            return lm_gguf_no_words(m, "bias of attention", e);
        if (y->attention == LM_ATTENTION_DELTA && y->delta.key_dim != y->delta.value_dim)
            return lm_gguf_no_words(m, "values of another width than keys in layers with states",
                                    e);
    }
    return LM_OK;
}

static bool is_latent(const lm_config *c)
{
    return c->layer[0].attention == LM_ATTENTION_LATENT;
}

/* Keys of DeepSeek's experts. */
static bool is_scored(const lm_config *c)
{
    return lm_gguf_has_key(c->arch, "expert_gating_func");
}

static lm_code check_experts(const lm_import *m, lm_err *e)
{
    const lm_config *c = &m->config;
    const lm_moe *x = &c->layer[0].moe;

    if (is_scored(c))
        return lm_gguf_check_scored(m, e);
    if (x->experts && x->normalise != c->arch->gguf_normalise)
        return lm_gguf_no_words(
            m,
            x->normalise ? "weights of a token's experts that add up to 1 (norm_topk_prob)"
                         : "weights of a token's experts as they are (norm_topk_prob false)",
            e);
    if (x->stacked && (fabs(x->limit - 7) > 1e-6 || fabs(x->alpha - 1.702) > 1e-6))
        return lm_gguf_no_words(m, "SwiGLU but with a limit of 7 and a slope of 1.702", e);
    return LM_OK;
}

/* Layers differ in what GGUF has words for: states, windows, experts behind the first layers. */
static bool may_differ(const lm_config *c)
{
    return lm_config_has_states(c) || is_scored(c);
}

/* Report properties that llama.cpp would compute differently. */
static lm_code check_words(const lm_import *m, lm_err *e)
{
    const lm_config *c = &m->config;
    const lm_rope_config *r = &c->rope[0];
    const char *arch = c->arch->gguf;
    int64_t window = lm_config_window(c);

    if (lm_gguf_has_key(c->arch, "ssm.state_size") && check_states(m, e))
        return e->code;
    if (is_latent(c) && lm_gguf_check_latent(m, e))
        return e->code;
    if (!may_differ(c) && !lm_config_alike(c))
        return lm_gguf_no_words(m, "layers of different sizes", e);
    if (c->head_transform)
        lm_gguf_check_masked(m);
    else if (c->layer[0].mlp == LM_MLP_GELU_EXACT)
        return lm_gguf_no_words(m, "exact GELU (activation_function gelu)", e);
    for (int64_t l = 0; l < c->layers; l++) {
        const lm_layer *y = &c->layer[l];
        double scale = lm_arch_gguf_scale(c->arch, c->layers, c->width, y->heads, y->head_dim);
        if (!is_latent(c) && fabs(y->scale / scale - 1) > 1e-6)
            return lm_gguf_no_words(m, "scaling of attention other than 1/sqrt(d)", e);
    }
    if (check_experts(m, e))
        return e->code;
    if (!caps_fit(c))
        return lm_gguf_no_words(
            m, c->layer[0].soft_cap > 0 ? "such soft caps" : "scores or logits without soft caps",
            e);
    if (c->ropes > 1 && c->rope[1].type != LM_ROPE_DEFAULT)
        return lm_gguf_no_words(m, "scaling of positions in layers with a window", e);
    if (c->ropes > 1 && !lm_gguf_has_key(c->arch, LM_GGUF_NEAR_BASE) &&
        fabs(c->rope[1].theta - r->theta) > 0)
        return lm_gguf_no_words(m, "rotary base of its own for layers with a window", e);
    if (c->ropes && r->type == LM_ROPE_DYNAMIC)
        lm_log(m->sink, LM_LOG_WARN,
               "%s: GGUF has no dynamic rotary scaling: llama.cpp will not exceed %" PRId64
               " position%s",
               m->path, c->max_positions, lm_plural(c->max_positions));
    if (c->ropes && r->type == LM_ROPE_YARN && !r->truncate && !c->arch->gguf_untruncated)
        lm_log(m->sink, LM_LOG_WARN,
               "%s: GGUF's yarn rounds the bounds of its ramp (\"truncate\": false is lost)",
               m->path);
    if (c->ropes && r->type == LM_ROPE_YARN && r->truncate && c->arch->gguf_untruncated)
        lm_log(
            m->sink, LM_LOG_WARN,
            "%s: GGUF's %s does not round the bounds of yarn's ramp (\"truncate\": true is lost)",
            m->path, arch);
    if (!c->arch->gguf_windows && window > 0 && window < c->max_positions)
        lm_log(m->sink, LM_LOG_WARN,
               "%s: llama.cpp's %s has no sliding window: texts of more than %" PRId64
               " tokens are attended to as a whole",
               m->path, arch, window);
    if (c->arch->gguf_out_bias && !c->layer[0].out_bias)
        lm_log(m->sink, LM_LOG_WARN,
               "%s: llama.cpp's %s requires biases of attention and refuses this file", m->path,
               arch);
    if (c->ropes && !c->arch->gguf_pairs && !c->arch->gguf_out_bias && c->layer[0].out_bias)
        lm_log(m->sink, LM_LOG_WARN,
               "%s: llama.cpp's %s has no bias on attn_output and refuses this file", m->path,
               arch);
    if (c->arch->gguf_square && c->layer[0].heads * c->layer[0].head_dim != c->width)
        lm_log(m->sink, LM_LOG_WARN,
               "%s: llama.cpp's %s requires heads that are together as wide as the model and "
               "refuses this file",
               m->path, arch);
    if (c->arch->gguf_head && c->tied)
        lm_log(m->sink, LM_LOG_WARN,
               "%s: llama.cpp's %s requires a head beside the embedding and refuses this file",
               m->path, arch);
    if (c->arch->gguf_tied && !c->tied)
        lm_log(m->sink, LM_LOG_WARN,
               "%s: llama.cpp's %s has no head beside the embedding and refuses this file", m->path,
               arch);
    return LM_OK;
}

/* llama.cpp uses lm_rope_mscale(factor, 1) times rope.scaling.attn_factor, and ignores rope.scaling.yarn_attn_factor,
 * which its own conversion writes. */
static void put_rope(lm_gguf_plan *p, const char *arch, const lm_config *c)
{
    const lm_rope_config *r = &c->rope[0];
    char key[LM_GGUF_KEY];

    lm_gguf_put_f32(p, lm_gguf_key_of(key, arch, "rope.freq_base"), (float)r->theta);
    if (r->type == LM_ROPE_LINEAR || r->type == LM_ROPE_YARN) {
        const char *name = r->type == LM_ROPE_LINEAR ? "linear" : "yarn";
        lm_gguf_put_str(p, lm_gguf_key_of(key, arch, "rope.scaling.type"), name, strlen(name));
        lm_gguf_put_f32(p, lm_gguf_key_of(key, arch, "rope.scaling.factor"), (float)r->factor);
    }
    if (r->type != LM_ROPE_YARN)
        return;
    lm_gguf_put_u32(p, lm_gguf_key_of(key, arch, "rope.scaling.original_context_length"),
                    (uint32_t)(r->original ? r->original : c->max_positions));
    if (r->attention > 0)
        lm_gguf_put_f32(p, lm_gguf_key_of(key, arch, "rope.scaling.yarn_attn_factor"),
                        (float)r->attention);
    if (!is_latent(c) && fabs(lm_rope_yarn_factor(r) - lm_rope_mscale(r->factor, 1)) > 1e-6)
        lm_gguf_put_f32(p, lm_gguf_key_of(key, arch, "rope.scaling.attn_factor"),
                        (float)(lm_rope_yarn_factor(r) / lm_rope_mscale(r->factor, 1)));
    if (r->beta_fast < 32 || r->beta_fast > 32)
        lm_gguf_put_f32(p, lm_gguf_key_of(key, arch, "rope.scaling.yarn_beta_fast"),
                        (float)r->beta_fast);
    if (r->beta_slow < 1 || r->beta_slow > 1)
        lm_gguf_put_f32(p, lm_gguf_key_of(key, arch, "rope.scaling.yarn_beta_slow"),
                        (float)r->beta_slow);
}

/* Sizes of layers with states, those of the first; in a model without one, of none. */
static void put_states(lm_gguf_plan *p, const lm_config *c)
{
    /* pairs of each axis, as published; those of text have one position */
    static const int32_t sections[] = { 11, 11, 10, 0 };
    const char *arch = c->arch->gguf;
    const lm_delta_sizes *d = &c->layer[0].delta;
    char key[LM_GGUF_KEY];

    for (int64_t l = 0; l < c->layers && !d->heads; l++)
        d = &c->layer[l].delta;
    lm_gguf_put_u32(p, lm_gguf_key_of(key, arch, "ssm.conv_kernel"), (uint32_t)d->taps);
    lm_gguf_put_u32(p, lm_gguf_key_of(key, arch, "ssm.state_size"), (uint32_t)d->key_dim);
    lm_gguf_put_u32(p, lm_gguf_key_of(key, arch, "ssm.group_count"), (uint32_t)d->key_heads);
    lm_gguf_put_u32(p, lm_gguf_key_of(key, arch, "ssm.time_step_rank"), (uint32_t)d->heads);
    lm_gguf_put_u32(p, lm_gguf_key_of(key, arch, "ssm.inner_size"),
                    (uint32_t)(d->heads * d->value_dim));
    lm_gguf_put_u32(p, lm_gguf_key_of(key, arch, "full_attention_interval"),
                    (uint32_t)interval_of(c));
    if (lm_gguf_has_key(c->arch, LM_GGUF_SECTIONS))
        lm_gguf_put_i32s(p, lm_gguf_key_of(key, arch, LM_GGUF_SECTIONS), sections,
                         sizeof sections / sizeof *sections);
}

lm_code lm_gguf_put_config(lm_gguf_plan *p, const lm_import *m, lm_err *e)
{
    lm_code rc = m->config.encoder ? lm_gguf_check_stacks(m, e) : check_words(m, e);

    return rc ? rc : lm_gguf_put_numbers(p, &m->config, e);
}

static void put_heads(lm_gguf_plan *p, const char *arch, const lm_layer *y)
{
    char key[LM_GGUF_KEY];

    lm_gguf_put_u32(p, lm_gguf_key_of(key, arch, "attention.head_count_kv"), (uint32_t)y->kv_heads);
    lm_gguf_put_u32(p, lm_gguf_key_of(key, arch, "attention.key_length"), (uint32_t)y->head_dim);
    lm_gguf_put_u32(p, lm_gguf_key_of(key, arch, "attention.value_length"), (uint32_t)y->head_dim);
}

lm_code lm_gguf_put_numbers(lm_gguf_plan *p, const lm_config *c, lm_err *e)
{
    const char *arch = c->arch->gguf;
    const lm_layer *y = &c->layer[0];
    int64_t window = lm_config_window(c);
    char key[LM_GGUF_KEY];

    if (c->encoder) {
        lm_gguf_put_stacks(p, c);
        return LM_OK;
    }
    lm_gguf_put_u32(p, lm_gguf_key_of(key, arch, "block_count"), (uint32_t)c->layers);
    lm_gguf_put_u32(p, lm_gguf_key_of(key, arch, "context_length"), (uint32_t)c->max_positions);
    lm_gguf_put_u32(p, lm_gguf_key_of(key, arch, "embedding_length"), (uint32_t)c->width);
    lm_gguf_put_u32(p, lm_gguf_key_of(key, arch, "feed_forward_length"), (uint32_t)y->ffn);
    if (is_scored(c)) {
        lm_gguf_put_scored(p, c);
    } else if (y->moe.experts) {
        lm_gguf_put_u32(p, lm_gguf_key_of(key, arch, "expert_count"), (uint32_t)y->moe.experts);
        lm_gguf_put_u32(p, lm_gguf_key_of(key, arch, "expert_used_count"), (uint32_t)y->moe.chosen);
        if (lm_gguf_has_key(c->arch, "expert_feed_forward_length"))
            lm_gguf_put_u32(p, lm_gguf_key_of(key, arch, "expert_feed_forward_length"),
                            (uint32_t)y->moe.ffn);
        if (y->moe.shared)
            lm_gguf_put_u32(p, lm_gguf_key_of(key, arch, "expert_shared_feed_forward_length"),
                            (uint32_t)y->moe.shared);
    }
    lm_gguf_put_u32(p, lm_gguf_key_of(key, arch, "attention.head_count"), (uint32_t)y->heads);
    if (c->norm == LM_NORM_LAYER)
        lm_gguf_put_f32(p, lm_gguf_key_of(key, arch, "attention.layer_norm_epsilon"),
                        (float)c->norm_eps);
    if (c->head_transform)
        lm_gguf_put_bool(p, lm_gguf_key_of(key, arch, "attention.causal"), false);
    if (c->ropes) {
        lm_gguf_put_f32(p, lm_gguf_key_of(key, arch, "attention.layer_norm_rms_epsilon"),
                        (float)c->norm_eps);
        if (is_latent(c))
            lm_gguf_put_latent(p, c);
        else
            put_heads(p, arch, y);
        lm_gguf_put_u32(p, lm_gguf_key_of(key, arch, "rope.dimension_count"),
                        (uint32_t)c->rope[0].dim);
        put_rope(p, arch, c);
    }
    if (lm_gguf_has_key(c->arch, "ssm.state_size"))
        put_states(p, c);
    if (window > 0)
        lm_gguf_put_u32(p, lm_gguf_key_of(key, arch, "attention.sliding_window"), (uint32_t)window);
    if (c->arch->gguf_pattern &&
        put_pattern(p, lm_gguf_key_of(key, arch, "attention.sliding_window_pattern"), c, e))
        return e->code;
    if (c->ropes > 1 && lm_gguf_has_key(c->arch, LM_GGUF_NEAR_BASE))
        lm_gguf_put_f32(p, lm_gguf_key_of(key, arch, LM_GGUF_NEAR_BASE), (float)c->rope[1].theta);
    if (y->soft_cap > 0)
        lm_gguf_put_f32(p, lm_gguf_key_of(key, arch, "attn_logit_softcapping"), (float)y->soft_cap);
    if (c->logit_cap > 0)
        lm_gguf_put_f32(p, lm_gguf_key_of(key, arch, "final_logit_softcapping"),
                        (float)c->logit_cap);
    lm_gguf_put_u32(p, lm_gguf_key_of(key, arch, "vocab_size"), (uint32_t)c->vocab);
    return LM_OK;
}

void lm_gguf_rope_factors(const lm_rope_config *r, float *out)
{
    double longest = (double)r->original / r->low_freq,
           shortest = (double)r->original / r->high_freq;

    for (int64_t i = 0; i < r->dim / 2; i++) {
        double wave = 2 * acos(-1.0) * pow(r->theta, (double)(2 * i) / (double)r->dim);
        double smooth = ((double)r->original / wave - r->low_freq) / (r->high_freq - r->low_freq);
        out[i] = wave < shortest  ? 1.0f
                 : wave > longest ? (float)r->factor
                                  : (float)(1 / ((1 - smooth) / r->factor + smooth));
    }
}
