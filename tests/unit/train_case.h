/* SPDX-License-Identifier: Apache-2.0 */
/* train_case.h -- tiny models and data in a temporary folder, for tests that train. */
#ifndef LM_TESTS_TRAIN_CASE_H
#define LM_TESTS_TRAIN_CASE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/file.h"
#include "base/json.h"
#include "base/mem.h"
#include "model/store.h"
#include "train/run.h"
#include "train/trainer.h"

enum { T = 16, VOCAB = 64 };

static const char llama_text[] =
    "{\"model_type\":\"llama\",\"vocab_size\":64,\"hidden_size\":32,\"intermediate_size\":48,"
    "\"num_hidden_layers\":2,\"num_attention_heads\":2,\"num_key_value_heads\":1,"
    "\"max_position_embeddings\":64,\"rms_norm_eps\":1e-5,\"hidden_act\":\"silu\","
    "\"tie_word_embeddings\":true,\"initializer_range\":0.02,\"rope_theta\":10000.0}";

static const char folder_pattern[] = "/tmp/test_train.XXXXXX";
static char folder[sizeof folder_pattern];
static lm_par *par;
static lm_tokens *tokens;

/* A model with random weights on disk. */
typedef struct {
    json_t *json;
    lm_config config;
    lm_model_source *source;
} tiny_model;

static inline char *path_of(const char *name)
{
    lm_err e = { 0 };
    char *path = NULL;
    assert_int_equal(lm_path_join(&path, folder, name, &e), LM_OK);
    return path;
}

static inline void ok(lm_code rc, const lm_err *e)
{
    if (rc)
        fail_msg("%s: %s", e->where, e->what);
}

static inline void tiny_model_make(tiny_model *t, const char *config_text, const char *name)
{
    lm_err e = { 0 };
    lm_build b = {
        .mode = LM_MODE_TRAIN, .batch = 1, .seq = T, .precision = { .low = LM_DTYPE_F32 }
    };
    lm_model *m = NULL;
    lm_st_plan *plan = NULL;
    lm_folder *f = NULL;
    char *path = path_of(name);
    ok(lm_json_parse(config_text, strlen(config_text), "config", &t->json, &e), &e);
    ok(lm_config_read(t->json, "config", &t->config, &e), &e);
    ok(lm_model_build(&t->config, &b, &m, &e), &e);
    ok(lm_st_plan_new(&plan, &e), &e);
    ok(lm_model_plan(m, LM_TENSORS_ALL, LM_DTYPE_F32, plan, &e), &e);
    lm_folder_spec spec = { .config = t->json, .plan = plan };
    ok(lm_folder_create(path, false, NULL, &spec, &f, &e), &e);
    ok(lm_model_draw(m, 1, par, f, NULL, &e), &e);
    ok(lm_folder_commit(f, &e), &e);
    ok(lm_model_source_open(path, NULL, &t->source, &e), &e);
    lm_st_plan_free(plan);
    lm_model_free(m);
    lm_free(path);
}

static inline void tiny_model_fini(tiny_model *t)
{
    lm_model_source_close(t->source);
    lm_config_fini(&t->config);
    json_decref(t->json);
}

static inline void make_tokens(void)
{
    lm_err e = { 0 };
    lm_tokens_writer *w = NULL;
    char *path = path_of("train");
    ok(lm_tokens_create(path, &(lm_tokens_writer_opts){ .vocab = VOCAB }, &w, &e), &e);
    for (uint32_t d = 0; d < 40; d++) {
        uint32_t ids[40], n = 5 + d * 7 % 34;
        for (uint32_t i = 0; i < n; i++)
            ids[i] = (d + i * (1 + d % 3)) % VOCAB;
        ok(lm_tokens_put(w, ids, n, &e), &e);
        ok(lm_tokens_end_doc(w, &e), &e);
    }
    ok(lm_tokens_commit(w, &e), &e);
    ok(lm_tokens_open(path, LM_TOKENS_AUTO, -1, &tokens, &e), &e);
    ok(lm_tokens_index(tokens, NULL, &e), &e);
    lm_free(path);
}

/* The folder, a pool of two threads and the data. */
static inline void train_begin(void)
{
    lm_err e = { 0 };
    memcpy(folder, folder_pattern, sizeof folder);
    assert_non_null(mkdtemp(folder));
    ok(lm_par_new(&par, 2, &e), &e);
    make_tokens();
}

static inline int train_end(void)
{
    lm_err e = { 0 };
    lm_tokens_close(tokens);
    lm_par_free(par);
    return lm_rm_rf(folder, &e);
}

#endif
