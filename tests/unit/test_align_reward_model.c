/* SPDX-License-Identifier: Apache-2.0 */
/* test_align_reward_model.c -- scores of completions by a reward model: many texts in windows against each by itself; what is
 * refused. */
#include <math.h>
#include <stdio.h>

#include "train_case.h"

#include "model/loaded.h"
#include "tune/align/reward_model.h"

enum { ITEMS = 9, PAD = 7 };

static const char judge_text[] =
    "{\"architectures\":[\"LlamaForSequenceClassification\"],\"num_labels\":1,\"pad_token_id\":7,"
    "\"model_type\":\"llama\",\"vocab_size\":64,\"hidden_size\":32,\"intermediate_size\":48,"
    "\"num_hidden_layers\":2,\"num_attention_heads\":2,\"num_key_value_heads\":1,"
    "\"max_position_embeddings\":64,\"rms_norm_eps\":1e-5,\"hidden_act\":\"silu\","
    "\"tie_word_embeddings\":false,\"initializer_range\":0.3,\"rope_theta\":10000.0}";

static lm_backend *backend;
static tiny_model judge, plain;
static lm_tokenizer *tok;

static int begin(void **state)
{
    static const char json[] = "{\"model\":{\"type\":\"BPE\",\"merges\":[],\"vocab\":{\"a\":0}},"
                               "\"decoder\":{\"type\":\"ByteLevel\"}}";
    lm_err e = { 0 };
    (void)state;
    train_begin();
    ok(lm_backend_cpu(lm_cpu_detect(), par, &backend, &e), &e);
    tiny_model_make(&judge, judge_text, "judge");
    tiny_model_make(&plain, llama_text, "plain");
    ok(lm_tokenizer_from_json(json, sizeof json - 1, NULL, 0, "test", &tok, &e), &e);
    return 0;
}

static int end(void **state)
{
    (void)state;
    tiny_model_fini(&judge);
    tiny_model_fini(&plain);
    lm_tokenizer_free(tok);
    lm_backend_close(backend);
    return train_end();
}

/* The score of a text that is alone in its window, at the last token that is not padding. */
static double score_alone(const lm_reward_item *x)
{
    const lm_build how = { .mode = LM_MODE_EVAL,
                           .batch = 1,
                           .seq = T,
                           .precision = { .low = LM_DTYPE_F32 },
                           .backend = backend };
    lm_err e = { 0 };
    lm_loaded l = { .src = NULL };
    lm_model *m = NULL;
    lm_plan plan = { 0 };
    lm_evaluator v = { .own = false };
    const lm_step step = { 0 };
    char *path = path_of("judge");
    int64_t row = x->n_whole - 1;
    ok(lm_loaded_open(path, NULL, &l, &e), &e);
    ok(lm_model_build(&l.config, &how, &m, &e), &e);
    ok(lm_plan_make(m->graph, backend, &m->loss, 1, &plan, &e), &e);
    ok(lm_evaluator_of(m, &plan, backend, NULL, &v, &e), &e);
    ok(lm_loaded_weights(&l, m, backend, &e), &e);
    lm_store_bind(l.store, m, v.exec);
    for (int i = 0; i < T; i++) {
        v.batch.tokens[i] = i < x->n_whole ? (int32_t)x->whole[i] : 0;
        v.batch.pos[i] = i;
        v.batch.targets[i] = -1;
    }
    ok(lm_exec_run(v.exec, &step, &e), &e);
    while (row > 0 && x->whole[row] == PAD)
        row--;
    const double score = (double)((const float *)lm_exec_data(v.exec, m->loss))[row];
    lm_evaluator_fini(&v);
    lm_plan_fini(&plan);
    lm_model_free(m);
    lm_loaded_fini(&l);
    lm_free(path);
    return score;
}

static void scores_are_those_of_texts_alone(void **state)
{
    const lm_build how = { .mode = LM_MODE_EVAL,
                           .batch = 2,
                           .seq = T,
                           .precision = { .low = LM_DTYPE_F32 },
                           .documents = true,
                           .backend = backend };
    uint32_t ids[ITEMS][T];
    lm_reward_item item[ITEMS];
    double got[ITEMS];
    lm_err e = { 0 };
    lm_reward_model *r = NULL;
    lm_model *m = NULL;
    lm_exec *x = NULL;
    size_t bytes = 0;
    char *path = path_of("judge");
    (void)state;
    for (int i = 0; i < ITEMS; i++) {
        const int n = 1 + i * 15 / (ITEMS - 1);
        for (int t = 0; t < n; t++)
            ids[i][t] = (uint32_t)(8 + (i * 11 + t * 5) % 50);
        if (i % 3 == 2)
            ids[i][n - 1] = ids[i][n - 2] = PAD;
        item[i] = (lm_reward_item){ .whole = ids[i], .n_whole = n };
    }
    ok(lm_reward_model_open(path, tok, &r, &e), &e);
    ok(lm_model_build(&plain.config, &how, &m, &e), &e);
    ok(lm_exec_new(m->graph, backend, &m->loss, 1, &x, &e), &e);
    const lm_objective_site site = { .backend = backend, .par = par, .model = m, .exec = x };
    ok(lm_reward_model_bytes(r, m, SIZE_MAX, &bytes, &e), &e);
    assert_true(bytes > 0);
    ok(lm_reward_model_load(r, &site, &e), &e);
    ok(lm_reward_model_score(r, item, ITEMS, got, &e), &e);
    for (int i = 0; i < ITEMS; i++) {
        const double want = score_alone(&item[i]);
        if (!(fabs(got[i] - want) <= 1e-5))
            fail_msg("text %d of %d tokens: %.9g, alone %.9g", i, (int)item[i].n_whole, got[i],
                     want);
    }
    lm_reward_model_close(r);
    lm_exec_free(x);
    lm_model_free(m);
    lm_free(path);
}

static void what_has_no_head_is_refused(void **state)
{
    lm_err e = { 0 };
    lm_reward_model *r = NULL;
    char *path = path_of("plain");
    (void)state;
    assert_int_equal(lm_reward_model_open(path, tok, &r, &e), LM_EUSAGE);
    assert_string_equal(e.what, "gives no scores to texts: it is no reward model");
    assert_null(r);
    lm_free(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scores_are_those_of_texts_alone),
        cmocka_unit_test(what_has_no_head_is_refused),
    };
    return cmocka_run_group_tests(tests, begin, end);
}
