/* SPDX-License-Identifier: Apache-2.0 */
/* loaded.c -- weights for use, in one format. */
#include "model/loaded.h"

#include <string.h>

lm_code lm_loaded_take(lm_model_source *src, lm_loaded *l, lm_err *e)
{
    *l = (lm_loaded){ .src = src };
    const json_t *config = lm_model_source_config(l->src);
    if (!config)
        lm_fail(e, LM_EUSAGE, lm_model_source_path(l->src), "name the folder that holds the model",
                "a lone file has no config.json");
    else
        lm_config_read(config, lm_model_source_path(l->src), &l->config, e);
    if (e->code)
        lm_loaded_fini(l);
    return e->code;
}

lm_code lm_loaded_open(const char *path, const lm_bundle_opts *o, lm_loaded *l, lm_err *e)
{
    lm_model_source *src = NULL;
    memset(l, 0, sizeof *l);
    return lm_model_source_open(path, o, &src, e) ? e->code : lm_loaded_take(src, l, e);
}

lm_code lm_loaded_weights(lm_loaded *l, const lm_model *m, lm_backend *b, lm_err *e)
{
    const lm_store_opts o = { .par = l->par };
    if (lm_model_check(m, l->src, e) || lm_store_new(m, b, &o, &l->store, e))
        return e->code;
    return lm_store_load(l->store, l->src, e);
}

size_t lm_loaded_bytes(const lm_model *m)
{
    const lm_store_opts o = { 0 };
    lm_err unseen = { 0 };
    size_t bytes[LM_KEPT_ROLES];
    lm_store_outlook(m, &o, bytes, &unseen);
    return bytes[LM_KEPT_PARAM];
}

void lm_loaded_fini(lm_loaded *l)
{
    lm_store_free(l->store);
    lm_model_source_close(l->src);
    lm_config_fini(&l->config);
    memset(l, 0, sizeof *l);
}
