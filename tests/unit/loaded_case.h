/* SPDX-License-Identifier: Apache-2.0 */
/* loaded_case.h -- a tiny model with random weights on any backend, from the text of its config. */
#ifndef LM_TESTS_LOADED_CASE_H
#define LM_TESTS_LOADED_CASE_H

#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "model/loaded.h"

/* Draw the weights of w->config as a model of `build` keeps them. */
static inline void loaded_draw_for(lm_loaded *w, const lm_build *build, lm_par *threads,
                                   lm_backend *b)
{
    lm_err e = { 0 };
    lm_model *m = NULL;
    if (!lm_model_build(&w->config, build, &m, &e) &&
        !lm_store_new(m, b, &(lm_store_opts){ .par = threads }, &w->store, &e))
        lm_store_draw(w->store, LM_TENSORS_ALL, 5, &e);
    if (e.code)
        fail_msg("%s: %s", e.where, e.what);
    lm_model_free(m);
}

/* In the order of rows; and in panels, for model/paged.h alone. */
static inline void loaded_draw(lm_loaded *w, lm_dtype type, lm_par *threads, lm_backend *b)
{
    const lm_build build = { .mode = LM_MODE_EVAL, .batch = 1, .seq = 1, .precision = { type } };
    loaded_draw_for(w, &build, threads, b);
}

static inline void loaded_draw_panels(lm_loaded *w, lm_dtype type, lm_par *threads, lm_backend *b)
{
    const lm_build build = { .mode = LM_MODE_GENERATE,
                             .batch = 1,
                             .seq = 1,
                             .cache = 1,
                             .precision = { type },
                             .backend = b,
                             .panels = true };
    loaded_draw_for(w, &build, threads, b);
}

static inline void loaded_config(const char *text, lm_loaded *w)
{
    lm_err e = { 0 };
    json_t *o = NULL;
    memset(w, 0, sizeof *w);
    if (lm_json_parse(text, strlen(text), "config", &o, &e) ||
        lm_config_read(o, "config", &w->config, &e))
        fail_msg("%s: %s", e.where, e.what);
    json_decref(o);
}

static inline void loaded_of(const char *text, lm_dtype type, lm_par *threads, lm_backend *b,
                             lm_loaded *w)
{
    loaded_config(text, w);
    loaded_draw(w, type, threads, b);
}

#endif
