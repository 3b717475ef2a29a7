/* SPDX-License-Identifier: Apache-2.0 */
/* cache_about.c -- a model as its cache files describe it. */
#include "model/cache_about.h"

#include "base/hash.h"
#include "base/mem.h"

static void write_table(lm_jw *w, const lm_config *c, const lm_rope_config *r, int64_t positions)
{
    static const char *const type[] = { [LM_ROPE_DEFAULT] = "default",
                                        [LM_ROPE_LINEAR] = "linear",
                                        [LM_ROPE_DYNAMIC] = "dynamic",
                                        [LM_ROPE_LLAMA3] = "llama3",
                                        [LM_ROPE_YARN] = "yarn" };
    bool yarn = r->type == LM_ROPE_YARN, llama3 = r->type == LM_ROPE_LLAMA3;
    lm_jw_obj(w, NULL);
    lm_jw_str(w, "type", type[r->type]);
    lm_jw_int(w, "dim", r->dim);
    lm_jw_f64(w, "theta", r->theta);
    if (r->type != LM_ROPE_DEFAULT)
        lm_jw_f64(w, "factor", r->factor);
    if (r->type == LM_ROPE_DYNAMIC) {
        lm_jw_int(w, "max_positions", c->max_positions);
        lm_jw_int(w, "positions", positions > c->max_positions ? positions : c->max_positions);
    }
    if (llama3) {
        lm_jw_f64(w, "low_freq", r->low_freq);
        lm_jw_f64(w, "high_freq", r->high_freq);
    }
    if (yarn) {
        lm_jw_f64(w, "beta_fast", r->beta_fast);
        lm_jw_f64(w, "beta_slow", r->beta_slow);
        lm_jw_f64(w, "attention", r->attention);
        lm_jw_f64(w, "mscale", r->mscale);
        lm_jw_f64(w, "mscale_all_dim", r->mscale_all_dim);
        lm_jw_bool(w, "truncate", r->truncate);
    }
    if (yarn || llama3)
        lm_jw_int(w, "original", r->original ? r->original : c->max_positions);
    lm_jw_close_obj(w);
}

lm_code lm_rope_text(const lm_config *c, int64_t positions, lm_buf *out, lm_err *e)
{
    lm_jw w;
    lm_jw_begin(&w, out, 0, e);
    lm_jw_obj(&w, NULL);
    if (c->ropes) {
        lm_jw_arr(&w, "tables");
        for (int i = 0; i < c->ropes; i++)
            write_table(&w, c, &c->rope[i], positions);
        lm_jw_close_arr(&w);
        lm_jw_arr(&w, "layers");
        for (int64_t i = 0; i < c->layers; i++)
            lm_jw_int(&w, NULL, c->layer[i].rope);
        lm_jw_close_arr(&w);
    }
    lm_jw_close_obj(&w);
    return lm_jw_end(&w);
}

/* ---- Other settings ---- */

/* Where they are not those of a plain softmax. */
static void write_scores(lm_jw *w, const lm_moe *m)
{
    if (!m->sigmoid && m->groups < 2 && !(m->scale > 1 || m->scale < 1))
        return;
    lm_jw_bool(w, "sigmoid", m->sigmoid);
    lm_jw_f64(w, "scale", m->scale);
    lm_jw_int(w, "groups", m->groups);
    lm_jw_int(w, "kept_groups", m->kept_groups);
    lm_jw_bool(w, "group_max", m->group_max);
}

static void write_layer(lm_jw *w, const lm_layer *y)
{
    lm_jw_obj(w, NULL);
    lm_jw_int(w, "heads", y->heads);
    lm_jw_int(w, "kv_heads", y->kv_heads);
    lm_jw_int(w, "head_dim", y->head_dim);
    if (y->attention == LM_ATTENTION_LATENT) {
        lm_jw_int(w, "kv_rank", y->latent.kv_rank);
        lm_jw_int(w, "rope_dim", y->latent.rope_dim);
        lm_jw_int(w, "value_dim", y->latent.value_dim);
        lm_jw_bool(w, "pairs", y->latent.pairs);
    }
    lm_jw_int(w, "window", y->window);
    if (y->blocks.size) {
        lm_jw_int(w, "block_size", y->blocks.size);
        lm_jw_int(w, "local_blocks", y->blocks.local);
        lm_jw_int(w, "global_blocks", y->blocks.global);
        lm_jw_int(w, "vert_stride", y->blocks.stride);
        lm_jw_bool(w, "homo_head", y->blocks.homogeneous);
    }
    lm_jw_f64(w, "scale", y->scale);
    if (y->weigh)
        lm_jw_int(w, "weigh", y->weigh);
    lm_jw_f64(w, "soft_cap", y->soft_cap);
    lm_jw_int(w, "rope", y->rope);
    lm_jw_int(w, "qk_norm", y->qk_norm);
    lm_jw_bool(w, "qkv_bias", y->qkv_bias);
    lm_jw_bool(w, "out_bias", y->out_bias);
    lm_jw_int(w, "mlp", y->mlp);
    lm_jw_int(w, "ffn", y->ffn);
    lm_jw_bool(w, "mlp_bias", y->mlp_bias);
    if (y->moe.experts) {
        lm_jw_int(w, "experts", y->moe.experts);
        lm_jw_int(w, "chosen", y->moe.chosen);
        lm_jw_int(w, "expert_ffn", y->moe.ffn);
        lm_jw_int(w, "shared", y->moe.shared);
        lm_jw_bool(w, "shared_gate", y->moe.shared_gate);
        lm_jw_bool(w, "normalise", y->moe.normalise);
        write_scores(w, &y->moe);
    }
    if (y->out_gate)
        lm_jw_bool(w, "out_gate", true);
    if (y->attention == LM_ATTENTION_DELTA) {
        lm_jw_int(w, "state_heads", y->delta.heads);
        lm_jw_int(w, "state_key_heads", y->delta.key_heads);
        lm_jw_int(w, "state_key_dim", y->delta.key_dim);
        lm_jw_int(w, "state_value_dim", y->delta.value_dim);
        lm_jw_int(w, "taps", y->delta.taps);
    }
    if (y->attention == LM_ATTENTION_LINEAR) {
        lm_jw_int(w, "feature", y->linear.feature);
        lm_jw_bool(w, "decay", y->linear.decay);
    }
    lm_jw_bool(w, "norm_before", y->norm_before);
    lm_jw_bool(w, "norm_after", y->norm_after);
    lm_jw_close_obj(w);
}

static lm_code write_config(const lm_config *c, lm_buf *out, lm_err *e)
{
    lm_jw w;
    lm_jw_begin(&w, out, 0, e);
    lm_jw_obj(&w, NULL);
    lm_jw_str(&w, "model_type", lm_arch_name(c->arch));
    lm_jw_int(&w, "vocab", c->vocab);
    lm_jw_int(&w, "width", c->width);
    lm_jw_int(&w, "norm", c->norm);
    lm_jw_f64(&w, "norm_eps", c->norm_eps);
    lm_jw_bool(&w, "norm_plus_one", c->norm_plus_one);
    lm_jw_f64(&w, "embed_scale", c->embed_scale);
    lm_jw_f64(&w, "logit_cap", c->logit_cap);
    lm_jw_bool(&w, "tied", c->tied);
    lm_jw_arr(&w, "layers");
    for (int64_t i = 0; i < c->layers; i++)
        write_layer(&w, &c->layer[i]);
    lm_jw_close_arr(&w);
    lm_jw_close_obj(&w);
    return lm_jw_end(&w);
}

lm_code lm_config_digest(const lm_config *c, char hex[33], lm_err *e)
{
    lm_buf text = { 0 };
    uint8_t digest[16];
    lm_hash128 h;
    lm_code rc = lm_rope_text(c, c->max_positions, &text, e);
    rc = rc ? rc : write_config(c, &text, e);
    if (!rc) {
        lm_hash128_init(&h);
        lm_hash128_add(&h, text.data, text.len);
        lm_hash128_end(&h, digest);
        lm_hash128_hex(digest, hex);
    }
    lm_buf_fini(&text);
    return rc;
}

/* ---- The description ---- */

static lm_code make_lists(lm_cache_about *a, size_t n, lm_err *e)
{
    int64_t **list[] = { &a->kv_heads, &a->head_dim, &a->latent, &a->state, &a->conv };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++)
        if (lm_alloc_n(list[i], n, sizeof **list[i], "layers of a cache", e))
            return e->code;
    return LM_OK;
}

lm_code lm_cache_about_model(const lm_config *c, const uint8_t weights[16], int64_t positions,
                             lm_dtype act, lm_cache_about *out, lm_err *e)
{
    size_t n = (size_t)c->layers;
    lm_code rc = lm_config_check_stored(c, "cache", e);
    *out = (lm_cache_about){ .about = { .layers = c->layers, .act = act } };
    rc = rc ? rc : make_lists(out, n, e);
    rc = rc ? rc : lm_rope_text(c, positions, &out->rope, e);
    rc = rc ? rc : lm_config_digest(c, out->config, e);
    if (rc)
        return rc;
    bool latents = false, states = false;
    for (int64_t i = 0; i < c->layers; i++) {
        const lm_cache_shape s = lm_cache_shape_of(&c->layer[i]);
        out->kv_heads[i] = s.kv_heads;
        out->head_dim[i] = s.head_dim;
        out->latent[i] = s.rotary;
        out->state[i] = s.state;
        out->conv[i] = s.conv;
        latents |= s.rotary > 0;
        states |= s.state > 0;
    }
    out->about.latent = latents ? out->latent : NULL;
    out->about.state = states ? out->state : NULL;
    out->about.conv = states ? out->conv : NULL;
    lm_hash128_hex(weights, out->weights);
    out->about.model_type = lm_arch_name(c->arch);
    out->about.weights = out->weights;
    out->about.config = out->config;
    out->about.rope = out->rope.data;
    out->about.kv_heads = out->kv_heads;
    out->about.head_dim = out->head_dim;
    return LM_OK;
}

void lm_cache_about_fini(lm_cache_about *a)
{
    lm_free(a->kv_heads);
    lm_free(a->head_dim);
    lm_free(a->latent);
    lm_free(a->state);
    lm_free(a->conv);
    lm_buf_fini(&a->rope);
}
