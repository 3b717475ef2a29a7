/* SPDX-License-Identifier: Apache-2.0 */
/* random_model.h -- a model with random weights in BF16, from the text of its config. */
#ifndef LM_BENCH_RANDOM_MODEL_H
#define LM_BENCH_RANDOM_MODEL_H

#include <string.h>

#include "base/json.h"
#include "model/loaded.h"

/* Fill *w, which the caller has zeroed, and releases with lm_loaded_fini, also after a failure.  panels: for model/paged.h
 * alone. */
static inline lm_code random_model(const char *config, lm_backend *b, bool panels, lm_loaded *w,
                                   lm_err *e)
{
    const lm_build build = { .mode = LM_MODE_GENERATE,
                             .batch = 1,
                             .seq = 1,
                             .cache = 1,
                             .precision = { LM_DTYPE_BF16 },
                             .backend = b,
                             .panels = panels };
    lm_model *m = NULL;
    json_t *o = NULL;
    lm_code rc = lm_json_parse(config, strlen(config), "config", &o, e);
    rc = rc ? rc : lm_config_read(o, "config", &w->config, e);
    rc = rc ? rc : lm_model_build(&w->config, &build, &m, e);
    rc = rc ? rc : lm_store_new(m, b, &(lm_store_opts){ 0 }, &w->store, e);
    rc = rc ? rc : lm_store_draw(w->store, LM_TENSORS_ALL, 1, e);
    lm_model_free(m);
    json_decref(o);
    return rc;
}

#endif
