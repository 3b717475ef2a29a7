/* SPDX-License-Identifier: Apache-2.0 */
/* read_latent.c -- keys of config.json that models with latent attention have (DeepSeek-V2,
 * arXiv:2405.04434, section 2.1). */
#include <inttypes.h>
#include <math.h>

#include "kernels/latent.h"
#include "model/arch_read.h"

static lm_code read_sizes(const json_t *o, const char *where, bool pairs, lm_latent *a, lm_err *e)
{
    if (lm_json_i64_or(o, "q_lora_rank", json_object_get(o, "q_lora_rank") ? 0 : 1536, 0,
                       LM_MOST_WIDTH, &a->q_rank, where, e) ||
        lm_json_i64_or(o, "kv_lora_rank", 512, 1, LM_MOST_WIDTH, &a->kv_rank, where, e) ||
        lm_json_i64_or(o, "qk_nope_head_dim", 128, 1, 4096, &a->nope_dim, where, e) ||
        lm_json_i64_or(o, "qk_rope_head_dim", 64, 2, LM_LATENT_MOST_ROTARY, &a->rope_dim, where,
                       e) ||
        lm_json_i64_or(o, "v_head_dim", 128, 1, 4096, &a->value_dim, where, e) ||
        lm_json_bool_or(o, "rope_interleave", pairs, &a->pairs, where, e))
        return e->code;
    if (a->rope_dim % 2)
        return lm_read_bad(where, "qk_rope_head_dim", e,
                           "is odd, which rotary positions do not allow");
    if (a->value_dim > a->nope_dim + a->rope_dim)
        return lm_read_bad(where, "v_head_dim", e, "is above the size of keys");
    return LM_OK;
}

/* Keys that newer files have, and that follow from others. */
static lm_code check_follows(const json_t *o, const char *where, const char *key, int64_t is,
                             lm_err *e)
{
    int64_t n;
    if (lm_json_i64_or(o, key, is, 1, LM_MOST_WIDTH, &n, where, e))
        return e->code;
    if (n != is)
        return lm_fail(e, LM_EUSAGE, where, NULL,
                       "\"%s\" is %" PRId64 ", but other keys make it %" PRId64, key, n, is);
    return LM_OK;
}

lm_code lm_read_latent_decoder(const json_t *o, const char *where, const lm_decoder_defaults *d,
                               bool pairs, lm_config *c, lm_err *e)
{
    lm_latent a = { 0 };
    lm_decoder_defaults own = *d;
    if (read_sizes(o, where, pairs, &a, e))
        return e->code;
    own.head_dim = a.rope_dim; /* what head_dim is in files of transformers */
    if (lm_read_decoder(o, where, &own, c, e) || lm_read_attention_bias(o, where, c, e) ||
        check_follows(o, where, "head_dim", a.rope_dim, e) ||
        check_follows(o, where, "qk_head_dim", a.nope_dim + a.rope_dim, e) ||
        check_follows(o, where, "num_key_value_heads", c->layer[0].heads, e) ||
        lm_read_rope(o, where, 10000, c, e))
        return e->code;
    const lm_rope_config *r = &c->rope[0];
    double factor = r->type != LM_ROPE_DEFAULT && r->mscale_all_dim > 0
                        ? lm_rope_mscale(r->factor, r->mscale_all_dim)
                        : 1;
    for (int64_t l = 0; l < lm_config_depth(c); l++) {
        lm_layer *y = &c->layer[l];
        y->attention = LM_ATTENTION_LATENT;
        y->latent = a;
        y->head_dim = a.nope_dim + a.rope_dim;
        y->scale = factor * factor / sqrt((double)y->head_dim);
    }
    return LM_OK;
}
