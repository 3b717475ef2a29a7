/* SPDX-License-Identifier: Apache-2.0 */
/* cache_plan.c -- a specification of caches, and the model for which it is. */
#include "model/cache_plan.h"

#include <string.h>

#include "base/file.h"
#include "base/hash.h"
#include "base/mem.h"
#include "model/cache_about.h"

lm_kv_site lm_cache_site(const lm_config *c, lm_dtype act, int64_t l)
{
    const lm_layer *y = &c->layer[l];
    const lm_cache_shape s = lm_cache_shape_of(y);
    return (lm_kv_site){ .layer = l,
                         .layers = c->layers,
                         .kv_heads = s.kv_heads,
                         .head_dim = s.head_dim,
                         .rotary = s.rotary,
                         .window = y->window,
                         .max_positions = c->max_positions,
                         .act = act,
                         .rope = y->rope >= 0 };
}

lm_code lm_cache_sites(const lm_config *c, lm_dtype act, lm_kv_site **out, lm_err *e)
{
    *out = NULL;
    if (lm_alloc_n(out, (size_t)c->layers, sizeof **out, "layers of a cache", e))
        return e->code;
    for (int64_t l = 0; l < c->layers; l++)
        (*out)[l] = lm_cache_site(c, act, l);
    return LM_OK;
}

/* A calibration of another model suits neither its ranges nor its errors. */
static lm_code check_model(const lm_kv_data *d, const lm_config *c, lm_model_source *src, lm_err *e)
{
    uint8_t digest[16];
    char hex[33] = "", config[33];
    if (!src || !*d->weights)
        return LM_OK;
    if (lm_config_digest(c, config, e) || lm_model_source_weights_digest(src, digest, e))
        return e->code;
    lm_hash128_hex(digest, hex);
    return lm_kv_data_check(d, hex, config, e);
}

static lm_code read_data(const lm_kv_spec *s, const lm_config *c, lm_model_source *src,
                         lm_cache_plan *p, lm_err *e)
{
    for (int i = 0; lm_kv_spec_file(s, i); i++)
        if (lm_kv_data_read(lm_kv_spec_file(s, i), &p->data[i], e) ||
            check_model(p->data[i], c, src, e))
            return e->code;
    return LM_OK;
}

/* The calibration in the folder that was named (that of a training run has its models in folders inside), or else in the
 * model's own, for methods that name none. */
static lm_code add_default(lm_kv_spec *s, lm_model_source *src, lm_err *e)
{
    const char *dir = src ? lm_model_source_dir(src) : NULL, *method = lm_kv_spec_uncalibrated(s);
    char *path[2] = { 0 };
    bool any = false;
    if (!method || !dir)
        return LM_OK; /* the method says what it needs */
    lm_code rc = lm_path_join(&path[0], lm_model_source_path(src), LM_CACHE_CALIBRATION, e);
    rc = rc ? rc : lm_path_join(&path[1], dir, LM_CACHE_CALIBRATION, e);
    for (int i = 0; i < 2 && !rc && !any; i++)
        if (lm_path_exists(path[i]))
            rc = lm_kv_spec_default_file(s, path[i], &any, e);
    if (!rc && !any)
        rc = lm_fail(e, LM_EUSAGE, "kv cache", "measure it, or set file",
                     "%s reads a calibration, and there is no %s", method, path[0]);
    lm_free(path[0]);
    lm_free(path[1]);
    return rc;
}

lm_code lm_cache_plan_open(const char *spec, const lm_config *c, lm_dtype act, lm_model_source *src,
                           lm_cache_plan *out, lm_err *e)
{
    lm_kv_spec *s = NULL;
    *out = (lm_cache_plan){ 0 };
    lm_code rc = lm_kv_spec_parse(spec, &s, e);
    rc = rc ? rc : add_default(s, src, e);
    rc = rc ? rc : read_data(s, c, src, out, e);
    rc = rc ? rc : lm_cache_sites(c, act, &out->site, e);
    rc = rc ? rc
            : lm_kv_spec_bind(s, out->site, c->layers, (const lm_kv_data *const *)out->data,
                              &out->plan, e);
    lm_kv_spec_free(s);
    return rc;
}

lm_code lm_cache_states_open(const char *spec, const lm_config *c, lm_cache_plan *out, lm_err *e)
{
    static const char where[] = "states";
    lm_kv_spec *s = NULL;
    *out = (lm_cache_plan){ 0 };
    if (!lm_config_has_states(c))
        return lm_fail(e, LM_EUSAGE, where, "leave it out", "no layer of a %s model has a state",
                       lm_arch_name(c->arch));
    if (lm_config_check_coded(c, where, e))
        return e->code;
    lm_code rc = lm_kv_spec_parse(spec, &s, e);
    if (!rc && (lm_kv_spec_uncalibrated(s) || lm_kv_spec_file(s, 0)))
        rc = lm_fail(e, LM_EUSAGE, where, "choose int8, or fp8:scale=token",
                     "calibrations are of keys and values");
    rc = rc ? rc : lm_cache_sites(c, LM_DTYPE_F32, &out->site, e);
    for (int64_t l = 0; l < c->layers && !rc; l++) {
        const bool is = c->layer[l].attention == LM_ATTENTION_DELTA;
        out->site[l].kv_heads = is ? c->layer[l].delta.heads : 0;
        out->site[l].head_dim = is ? c->layer[l].delta.value_dim : 0;
        out->site[l].rotary = 0;
    }
    rc = rc ? rc : lm_kv_spec_bind(s, out->site, c->layers, NULL, &out->plan, e);
    if (!rc && out->plan->policy)
        rc = lm_fail(e, LM_EUSAGE, where, "leave the policy out", "a state has no tokens to drop");
    if (!rc && (strstr(out->plan->text, "k=") || strstr(out->plan->text, "v=")))
        rc = lm_fail(e, LM_EUSAGE, where,
                     "give one method, without k= and v=", "a state has no keys and values");
    lm_kv_spec_free(s);
    return rc;
}

void lm_cache_plan_fini(lm_cache_plan *p)
{
    lm_kv_plan_free(p->plan);
    lm_free(p->site);
    for (int i = 0; i < LM_KV_FILES; i++)
        lm_kv_data_free(p->data[i]);
    *p = (lm_cache_plan){ 0 };
}
