/* SPDX-License-Identifier: Apache-2.0 */
/* test_align_rollout.c -- completions sampled on the store of a training: the same for any number of sequences and any
 * memory, others for another step or other weights; their log-probabilities are those of the training's own graph. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "base/rng.h"
#include "base/stop.h"
#include "loaded_case.h"
#include "tune/align/rollout.h"
#include "tune/align/texts.h"

static lm_err err;
static lm_par *par;

static void ok(lm_code rc)
{
    if (rc)
        fail_msg("%s: %s: %s", err.where, err.what, err.todo);
}

#include "serve_case.h"

enum { SEQ = 96, N_PROMPTS = 7, GROUP = 5, NEW = 40, MOST_PROMPT = 30 };

static const char *const configs[] = {
    "{\"model_type\":\"llama\",\"vocab_size\":96,\"hidden_size\":64,\"intermediate_size\":96,"
    "\"num_hidden_layers\":2,\"num_attention_heads\":4,\"num_key_value_heads\":2,"
    "\"max_position_embeddings\":200,\"initializer_range\":0.2,\"tie_word_embeddings\":true}",
    "{\"model_type\":\"gpt2\",\"vocab_size\":96,\"n_embd\":64,\"n_layer\":2,\"n_head\":2,"
    "\"n_positions\":128,\"initializer_range\":0.2}",
    "{\"model_type\":\"qwen3\",\"vocab_size\":96,\"hidden_size\":128,\"intermediate_size\":128,"
    "\"num_hidden_layers\":2,\"num_attention_heads\":4,\"num_key_value_heads\":2,\"head_dim\":32,"
    "\"max_position_embeddings\":200,\"initializer_range\":0.2}",
};

/* A model that trains, with random weights. */
typedef struct {
    lm_loaded w; /* its config */
    lm_backend *b;
    lm_model *m;
    lm_store *store;
    lm_rollout_site site;
} trained;

static bool trains_some(void *ctx, const char *name)
{
    (void)ctx;
    return strstr(name, "attn") || strstr(name, "qkv");
}

static void open_trained(trained *t, const char *config, lm_dtype low, bool some)
{
    const lm_build build = { .mode = LM_MODE_TRAIN,
                             .batch = 2,
                             .seq = SEQ,
                             .precision = { low },
                             .documents = true,
                             .trainable = some ? trains_some : NULL };
    memset(t, 0, sizeof *t);
    loaded_config(config, &t->w);
    ok(lm_backend_cpu(lm_cpu_detect(), par, &t->b, &err));
    lm_build own = build;
    own.backend = t->b;
    ok(lm_model_build(&t->w.config, &own, &t->m, &err));
    ok(lm_store_new(t->m, t->b, &(lm_store_opts){ .master = true, .grads = true, .par = par },
                    &t->store, &err));
    ok(lm_store_draw(t->store, LM_TENSORS_ALL, 5, &err));
    t->site = (lm_rollout_site){ .backend = t->b,
                                 .par = par,
                                 .config = &t->w.config,
                                 .store = t->store,
                                 .model = t->m,
                                 .tokenizer = tok };
}

static void close_trained(trained *t)
{
    lm_store_free(t->store);
    lm_model_free(t->m);
    lm_backend_close(t->b);
    lm_config_fini(&t->w.config);
}

/* ---- runs ---- */

static const int64_t eos = 11;

static lm_rollout_opts opts_of(int64_t sequences, size_t memory)
{
    return (lm_rollout_opts){ .most_prompt = MOST_PROMPT,
                              .most_new = NEW,
                              .sequences = sequences,
                              .memory = memory,
                              .sample = { 1, 0, 1, 0, 1 },
                              .eos = &eos,
                              .n_eos = 1,
                              .seed = 9 };
}

static uint32_t prompt_ids[N_PROMPTS][MOST_PROMPT];
static lm_rollout_prompt prompts[N_PROMPTS];

static void make_prompts(void)
{
    for (int i = 0; i < N_PROMPTS; i++) {
        int64_t n = 1 + i * 29 / (N_PROMPTS - 1);
        for (int64_t k = 0; k < n; k++)
            prompt_ids[i][k] = token_at(i, k);
        prompts[i] = (lm_rollout_prompt){ prompt_ids[i], n };
    }
}

typedef struct {
    int64_t n[N_PROMPTS * GROUP];
    uint32_t ids[N_PROMPTS * GROUP][NEW];
    float logp[N_PROMPTS * GROUP][NEW];
    bool truncated[N_PROMPTS * GROUP];
} results;

static void run(lm_rollout *r, int64_t step, results *out)
{
    const lm_rollout_text *x = NULL;
    lm_rollout_stats st;
    bool whole = false;
    int64_t truncated = 0;
    memset(out, 0, sizeof *out);
    ok(lm_rollout_run(r, step, prompts, N_PROMPTS, GROUP, &x, &whole, &st, &err));
    assert_true(whole);
    for (int i = 0; i < N_PROMPTS * GROUP; i++) {
        out->n[i] = x[i].n;
        memcpy(out->ids[i], x[i].ids, (size_t)x[i].n * sizeof *x[i].ids);
        memcpy(out->logp[i], x[i].logp, (size_t)x[i].n * sizeof *x[i].logp);
        out->truncated[i] = x[i].truncated;
        assert_true(x[i].n >= 1 && x[i].n <= NEW);
        /* all tokens are words, but the last one if it ends the text */
        bool ends = x[i].ids[x[i].n - 1] == eos;
        assert_true(x[i].truncated == !ends);
        truncated += !ends;
        assert_true(x[i].len > 0 || x[i].n == 1);
    }
    assert_int_equal(st.truncated, truncated);
}

/* The largest distance between a sampler's log-probability and that of the training's weights. */
static double distance(const trained *t, const results *x)
{
    static uint32_t ids[N_PROMPTS * GROUP][MOST_PROMPT + NEW];
    static double logp[N_PROMPTS * GROUP][NEW];
    lm_align_text text[N_PROMPTS * GROUP];
    double *to[N_PROMPTS * GROUP], worst = 0;
    lm_build build = t->m->build;
    lm_evaluator v;
    bool whole;
    ok(lm_evaluator_new(&t->w.config, &build, t->b, &v, &err));
    lm_store_bind(t->store, v.model, v.exec);
    for (int i = 0; i < N_PROMPTS * GROUP; i++) {
        const lm_rollout_prompt *p = &prompts[i / GROUP];
        memcpy(ids[i], p->ids, (size_t)p->n * sizeof *p->ids);
        memcpy(ids[i] + p->n, x->ids[i], (size_t)x->n[i] * sizeof *x->ids[i]);
        text[i] = (lm_align_text){ ids[i], p->n + x->n[i], p->n };
        to[i] = logp[i];
    }
    ok(lm_texts_score(&v, NULL, text, N_PROMPTS * GROUP, to, &whole, &err));
    for (int i = 0; i < N_PROMPTS * GROUP; i++)
        for (int64_t k = 0; k < x->n[i]; k++)
            worst = fmax(worst, fabs(logp[i][k] - (double)x->logp[i][k]));
    lm_evaluator_fini(&v);
    return worst;
}

static results one, other;

/* F32 and BF16, with all or some of the parameters training. */
static void equals_training(void **state)
{
    (void)state;
    for (size_t c = 0; c < sizeof configs / sizeof *configs; c++)
        for (int k = 0; k < 4; k++) {
            const lm_rollout_opts o = opts_of(16, 0);
            lm_rollout *r = NULL;
            trained t;
            open_trained(&t, configs[c], k & 1 ? LM_DTYPE_BF16 : LM_DTYPE_F32, k & 2);
            ok(lm_rollout_new(&t.site, &o, &r, &err));
            run(r, 0, &one);
            double d = distance(&t, &one);
            if (!(d < (k & 1 ? 0.3 : 2e-5)))
                fail_msg("config %zu, way %d: log-probabilities differ by %g", c, k, d);
            lm_rollout_free(r);
            close_trained(&t);
        }
}

static void repeats(void **state)
{
    size_t bytes = 0;
    trained t;
    (void)state;
    open_trained(&t, configs[0], LM_DTYPE_F32, false);
    for (int k = 0; k < 4; k++) {
        const lm_rollout_opts o = opts_of(k == 1 ? 1 : k == 2 ? 3 : 40, k == 3 ? 300000 : 0);
        lm_rollout *r = NULL;
        ok(lm_rollout_new(&t.site, &o, &r, &err));
        ok(lm_rollout_outlook(&t.site, &o, &bytes, &err));
        assert_int_equal(bytes, lm_rollout_bytes(r));
        if (k == 0) {
            run(r, 4, &other);
            run(r, 3, &one);
            assert_memory_not_equal(&one, &other, sizeof one);
        }
        run(r, 3, &other);
        assert_memory_equal(&one, &other, sizeof one);
        lm_rollout_free(r);
    }
    close_trained(&t);
}

/* An update is seen by the next run of the same rollout. */
static void sees_updates(void **state)
{
    (void)state;
    for (int k = 0; k < 2; k++) {
        const lm_rollout_opts o = opts_of(40, 0);
        lm_rollout *r = NULL;
        trained t;
        open_trained(&t, configs[0], k ? LM_DTYPE_BF16 : LM_DTYPE_F32, false);
        ok(lm_rollout_new(&t.site, &o, &r, &err));
        run(r, 0, &one);
        float *w = lm_store_flat(t.store, LM_KEPT_PARAM, 0);
        for (int64_t i = 0; i < lm_store_find(t.store, LM_KEPT_PARAM, 0)->count; i++)
            w[i] *= 1.5f;
        lm_store_derive(t.store);
        run(r, 0, &other);
        assert_memory_not_equal(&one, &other, sizeof one);
        assert_true(distance(&t, &other) < (k ? 0.5 : 2e-4));
        lm_rollout_free(r);
        close_trained(&t);
    }
}

static void refused(void **state)
{
    lm_rollout_opts o = opts_of(4, 0);
    const lm_rollout_text *x;
    lm_rollout_prompt p = { prompt_ids[0], 0 };
    lm_rollout *r = NULL;
    trained t;
    bool whole;
    (void)state;
    open_trained(&t, configs[1], LM_DTYPE_F32, false);
    o.most_new = 120; /* 150 of 128 positions */
    assert_int_equal(lm_rollout_new(&t.site, &o, &r, &err), LM_EUSAGE);
    err = (lm_err){ 0 };
    o = opts_of(4, 1000);
    assert_int_equal(lm_rollout_new(&t.site, &o, &r, &err), LM_EUSAGE);
    assert_string_equal(err.where, "rollout memory");
    err = (lm_err){ 0 };
    o = opts_of(4, 0);
    ok(lm_rollout_new(&t.site, &o, &r, &err));
    assert_int_equal(lm_rollout_run(r, 0, &p, 1, GROUP, &x, &whole, NULL, &err), LM_EUSAGE);
    err = (lm_err){ 0 };
    p.n = MOST_PROMPT + 1;
    assert_int_equal(lm_rollout_run(r, 0, &p, 1, GROUP, &x, &whole, NULL, &err), LM_EUSAGE);
    err = (lm_err){ 0 };
    lm_stop_request(2);
    ok(lm_rollout_run(r, 0, prompts, N_PROMPTS, GROUP, &x, &whole, NULL, &err));
    lm_stop_request(0);
    assert_false(whole);
    run(r, 0, &one);
    lm_rollout_free(r);
    close_trained(&t);
}

/* ---- places ---- */

static void places(void **state)
{
    enum { N = 200 };
    lm_align_text x[N];
    bool used[N][64] = { { false } };
    uint32_t ids[65] = { 0 };
    lm_texts t = { 0 };
    int64_t rows = 0, seen = 0;
    (void)state;
    for (int i = 0; i < N; i++) {
        x[i] = (lm_align_text){ ids, 2 + (i * 31) % 64, 1 };
        rows += x[i].n - 1;
    }
    ok(lm_texts_place(x, N, 1, 64, &t, &err));
    for (int i = 0; i < N; i++)
        for (int64_t k = 0; k < x[i].n - 1; k++) {
            bool *u = &used[t.window[i]][t.row[i] + k];
            assert_true(t.row[i] + k < 64 && !*u);
            *u = true;
        }
    assert_true((double)rows / (double)(t.windows * 64) > 0.95);
    for (int64_t w = 0; w < t.windows; w++)
        for (int64_t j = t.first[w]; j < t.first[w + 1]; j++, seen++)
            assert_int_equal(t.window[t.order[j]], w);
    assert_int_equal(seen, N);
    lm_texts_fini(&t);
    x[3].n = 66;
    assert_int_equal(lm_texts_place(x, N, 1, 64, &t, &err), LM_EUSAGE);
    err = (lm_err){ 0 };
    x[3].n = x[3].from = 9;
    assert_int_equal(lm_texts_place(x, N, 1, 64, &t, &err), LM_EUSAGE);
    err = (lm_err){ 0 };
    lm_texts_fini(&t);
    ok(lm_texts_place(x, 0, 1, 64, &t, &err));
    assert_int_equal(t.windows, 0);
    lm_texts_fini(&t);
}

/* Both texts of a pair are in one window, the second behind the first. */
static void pairs(void **state)
{
    enum { N = 40 };
    lm_align_text x[N];
    uint32_t ids[65] = { 0 };
    lm_texts t = { 0 };
    (void)state;
    for (int i = 0; i < N; i++)
        x[i] = (lm_align_text){ ids, 2 + (i * 7) % 31, 1 };
    ok(lm_texts_place(x, N, 2, 64, &t, &err));
    for (int i = 0; i < N; i += 2) {
        assert_int_equal(t.window[i], t.window[i + 1]);
        assert_int_equal(t.row[i] + x[i].n - 1, t.row[i + 1]);
        assert_true(t.row[i + 1] + x[i + 1].n - 1 <= 64);
    }
    for (int64_t k = 0; k < N; k += 2) {
        assert_int_equal(t.order[k] % 2, 0);
        assert_int_equal(t.order[k] + 1, t.order[k + 1]);
    }
    x[5].n = 64;
    assert_int_equal(lm_texts_place(x, N, 2, 64, &t, &err), LM_EUSAGE);
    err = (lm_err){ 0 };
    lm_texts_fini(&t);
}

static int setup(void **state)
{
    (void)state;
    tok = letters();
    make_prompts();
    return lm_par_new(&par, 2, &err);
}

static int teardown(void **state)
{
    (void)state;
    lm_tokenizer_free(tok);
    lm_par_free(par);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(places),          cmocka_unit_test(pairs),
        cmocka_unit_test(equals_training), cmocka_unit_test(repeats),
        cmocka_unit_test(sees_updates),    cmocka_unit_test(refused),
    };
    return cmocka_run_group_tests_name("align_rollout", tests, setup, teardown);
}
