/* SPDX-License-Identifier: Apache-2.0 */
/* loaded_case.h -- a micro model of fresh weights on any backend, from the text of its config. */
#ifndef LM_TESTS_LOADED_CASE_H
#define LM_TESTS_LOADED_CASE_H

#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "model/loaded.h"
#include "model/weights.h"

static inline void loaded_of(const char *text, lm_dtype type, lm_par *par, lm_backend *b,
                             lm_loaded *w)
{
    const lm_build build = { .mode = LM_MODE_EVAL, .batch = 1, .seq = 1, .precision = { type } };
    lm_err e = { 0 };
    lm_model *m = NULL;
    json_t *o = NULL;
    lm_config c;
    float *block = NULL;
    memset(w, 0, sizeof *w);
    if (!lm_json_parse(text, strlen(text), "config", &o, &e) &&
        !lm_config_read(o, "config", &c, &e) && !lm_model_build(&c, &build, &m, &e) &&
        !lm_alloc_n(&block, (size_t)m->block, sizeof *block, "weights", &e)) {
        lm_weights_init(m, 5, par, block);
        lm_loaded_take(w, m, block, b, &e);
    }
    if (e.code)
        fail_msg("%s: %s", e.where, e.what);
    lm_free(block);
    lm_model_free(m);
    json_decref(o);
}

#endif
