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

lm_code lm_cache_about_model(const lm_config *c, const uint8_t weights[16], int64_t positions,
                             lm_dtype act, lm_cache_about *out, lm_err *e)
{
    size_t n = (size_t)c->layers;
    lm_code rc;
    *out = (lm_cache_about){ .about = { .layers = c->layers, .act = act } };
    rc = lm_alloc_n(&out->kv_heads, n, sizeof *out->kv_heads, "layers of a cache", e);
    rc = rc ? rc : lm_alloc_n(&out->head_dim, n, sizeof *out->head_dim, "layers of a cache", e);
    rc = rc ? rc : lm_rope_text(c, positions, &out->rope, e);
    if (rc)
        return rc;
    for (int64_t i = 0; i < c->layers; i++) {
        out->kv_heads[i] = c->layer[i].kv_heads;
        out->head_dim[i] = c->layer[i].head_dim;
    }
    lm_hash128_hex(weights, out->weights);
    out->about.model_type = lm_arch_name(c->arch);
    out->about.weights = out->weights;
    out->about.rope = out->rope.data;
    out->about.kv_heads = out->kv_heads;
    out->about.head_dim = out->head_dim;
    return LM_OK;
}

void lm_cache_about_fini(lm_cache_about *a)
{
    lm_free(a->kv_heads);
    lm_free(a->head_dim);
    lm_buf_fini(&a->rope);
}
