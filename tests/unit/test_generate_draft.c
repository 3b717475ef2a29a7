/* SPDX-License-Identifier: Apache-2.0 */
/* test_generate_draft.c -- steps with drafts: the rule of acceptance, the same tokens without a temperature, and the model's
 * own distribution with one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "cpu_case.h"
#include "graph/op.h"
#include "kernels/sample.h"
#include "loaded_case.h"
#include "model/cache_plan.h"
#include "model/generate_impl.h"
#include "model_run.h"

enum { V = 12, S = 48 };

/* With so many modules. */
#define CONFIG(modules)                                                                         \
    "{\"model_type\":\"deepseek_v3\",\"vocab_size\":12,\"hidden_size\":32,"                     \
    "\"intermediate_size\":48,\"num_hidden_layers\":2,\"num_attention_heads\":4,"               \
    "\"num_key_value_heads\":4,\"q_lora_rank\":14,\"kv_lora_rank\":20,\"qk_nope_head_dim\":12," \
    "\"qk_rope_head_dim\":8,\"v_head_dim\":10,\"n_routed_experts\":8,\"n_shared_experts\":1,"   \
    "\"num_experts_per_tok\":2,\"moe_intermediate_size\":16,\"first_k_dense_replace\":1,"       \
    "\"n_group\":4,\"topk_group\":2,\"num_nextn_predict_layers\":" modules                      \
    ",\"max_position_embeddings\":64,\"initializer_range\":0.3}"

static const char config[] = CONFIG("1"), three[] = CONFIG("3");

/* Two of its layers have states of all tokens. */
static const char states[] =
    "{\"model_type\":\"qwen3_next\",\"vocab_size\":12,\"hidden_size\":32,\"intermediate_size\":48,"
    "\"num_hidden_layers\":3,\"num_attention_heads\":4,\"num_key_value_heads\":2,\"head_dim\":8,"
    "\"partial_rotary_factor\":0.5,\"num_experts\":4,\"num_experts_per_tok\":2,"
    "\"moe_intermediate_size\":16,\"shared_expert_intermediate_size\":16,"
    "\"full_attention_interval\":2,\"linear_num_key_heads\":2,\"linear_num_value_heads\":4,"
    "\"linear_key_head_dim\":6,\"linear_value_head_dim\":4,\"num_nextn_predict_layers\":1,"
    "\"max_position_embeddings\":64,\"initializer_range\":0.3}";

static void open_model(const char *text, lm_loaded *w)
{
    const lm_build build = { .mode = LM_MODE_GENERATE,
                             .batch = 1,
                             .seq = 1,
                             .cache = 1,
                             .precision = { .low = LM_DTYPE_F32 },
                             .ahead = LM_AHEAD_RUNS,
                             .module = LM_MOST_AHEAD - 1 };
    loaded_config(text, w);
    loaded_draw_for(w, &build, par, backend);
}

static lm_generator *open_generator(lm_loaded *w, int64_t batch, int64_t draft)
{
    const lm_generator_opts o = {
        .dtype = LM_DTYPE_F32, .batch = batch, .context = S, .draft = draft
    };
    lm_generator *g;
    ok(lm_generator_new(w, &o, backend, &g, &err));
    return g;
}

/* ---- the rule ---- */

/* The share of each id over an even grid of draws; NULL draft: of the plain kernel. */
static void spread(const lm_sample_attr *o, const float *x, const float *draft, double *share)
{
    enum { DRAWS = 300, ACCEPTS = 40 };
    static double room[4096];
    const int32_t seen[2] = { 1, 4 };
    const int32_t two = 2, on = 1;
    double q[V], drafted_share = 1;
    if (draft)
        spread(o, draft, NULL, q);
    memset(share, 0, V * sizeof *share);
    for (int32_t d = 0; d < (draft ? V : 1); d++)
        for (int a = 0; a < (draft ? ACCEPTS : 1); a++)
            for (int i = 0; i < DRAWS; i++) {
                const double u = (i + 0.5) / DRAWS, v = (a + 0.5) / ACCEPTS;
                int32_t token = -2;
                lm_tensor in[8] = { lm_shape2(LM_DTYPE_F32, 1, V), lm_shape2(LM_DTYPE_I32, 1, 2),
                                    lm_shape1(LM_DTYPE_I32, 1),    lm_shape1(LM_DTYPE_F64, 1),
                                    lm_shape1(LM_DTYPE_I32, 1),    lm_shape1(LM_DTYPE_I32, 1),
                                    lm_shape2(LM_DTYPE_F32, 1, V), lm_shape1(LM_DTYPE_F64, 1) };
                const void *data[8] = { x, seen, &two, &u, &on, &d, draft, &v };
                lm_tensor out[2] = { lm_shape1(LM_DTYPE_I32, 1), { 0 } };
                const lm_kernel *k =
                    lm_cpu_kernel(draft ? "sample_accept" : "sample", LM_DTYPE_F32, LM_CPU_REF);
                lm_call c = {
                    .attr = o, .in = in, .n_in = draft ? 8 : 5, .out = out, .n_out = 2, .work = room
                };
                for (int n = 0; n < 8; n++)
                    in[n].data = (void *)(uintptr_t)data[n];
                out[0].data = &token;
                assert_true(k->work(&c, 1) <= sizeof room);
                if (draft)
                    drafted_share = q[d] / ACCEPTS;
                if (!(drafted_share > 0))
                    continue;
                k->run(&c);
                assert_in_range(token, 0, V - 1);
                share[token] += drafted_share / DRAWS;
            }
}

static void accepted_tokens_have_the_distribution_of_the_model(void **state)
{
    static const lm_sample_attr how[] = {
        { .temperature = 1, .top_p = 1, .repetition_penalty = 1 },
        { .temperature = 0.6, .top_p = 1, .repetition_penalty = 1.4 },
        { .temperature = 1.5, .top_k = 4, .top_p = 1, .repetition_penalty = 1 },
        { .temperature = 1.2, .top_p = 0.8, .repetition_penalty = 1.1 },
        { .temperature = 2, .top_k = 7, .top_p = 0.9, .min_p = 0.1, .repetition_penalty = 1 },
        { .temperature = 0, .top_p = 1, .repetition_penalty = 1 },
    };
    float x[V], y[V];
    double want[V], got[V];
    (void)state;
    for (int i = 0; i < V; i++) {
        x[i] = (float)lm_rng_uniform(lm_rng_make(1, "test", 0), (uint64_t)i) * 4;
        y[i] = (float)lm_rng_uniform(lm_rng_make(1, "test", 1), (uint64_t)i) * 4;
    }
    for (size_t k = 0; k < sizeof how / sizeof *how; k++) {
        spread(&how[k], x, NULL, want);
        spread(&how[k], x, y, got);
        for (int i = 0; i < V; i++)
            if (!(fabs(got[i] - want[i]) < 8e-3))
                fail_msg("case %zu: id %d has the share %g, not %g", k, i, got[i], want[i]);
    }
}

/* ---- steps ---- */

static double draw(const char *purpose, uint64_t at)
{
    return lm_rng_uniform(lm_rng_make(3, purpose, 0), at);
}

/* One step of slots [first, batch), each with `most` drafts. */
static lm_draft_answer step(lm_generator *g, const int32_t *next, int64_t most_of,
                            const lm_sample_attr *o, uint64_t round)
{
    static double u[3][64 * 9];
    static int64_t most[64];
    const int64_t B = lm_generator_batch(g), N = lm_generator_drafts(g);
    lm_draft_answer a;
    for (int64_t i = 0; i < B * (N + 1); i++) {
        u[0][i] = draw("draft", round * 1000 + (uint64_t)i);
        u[1][i] = draw("accept", round * 1000 + (uint64_t)i);
        u[2][i] = draw("last", round * 1000 + (uint64_t)i);
    }
    for (int64_t i = 0; i < B; i++)
        most[i] = most_of;
    ok(lm_generator_speculate(g, &(lm_draft_ask){ next, most, u[0], u[1], u[2], true }, o, &a,
                              &err));
    return a;
}

/* Greedy texts of three prompts at a time, plain (draft 0) or with drafts. */
static void continue_greedily(lm_loaded *w, int64_t draft, int64_t batch, uint32_t *out)
{
    enum { NEW = 30 };
    static const lm_sample_attr greedy = { .top_p = 1, .repetition_penalty = 1 };
    lm_generator *g = open_generator(w, batch, draft);
    double u[8] = { 0 };
    int32_t next[8];
    int64_t made[8] = { 0 };
    for (int64_t s = 0; s < batch; s++) {
        uint32_t ids[16];
        const int32_t *first;
        const int64_t n = 1 + 5 * s;
        for (int64_t i = 0; i < n; i++)
            ids[i] = (uint32_t)((i * 7 + s * 3) % V);
        ok(lm_generator_prompt(g, s, ids, n, NULL, &err));
        ok(lm_generator_choose(g, &greedy, u, &first, NULL, &err));
        next[s] = first[s];
        out[s * NEW + made[s]++] = (uint32_t)next[s];
    }
    for (bool any = true; any;) {
        any = false;
        if (draft) {
            const lm_draft_answer a = step(g, next, draft, &greedy, 0);
            for (int64_t s = 0; s < batch; s++)
                for (int32_t j = 0; next[s] >= 0 && j < a.count[s]; j++) {
                    const int32_t id = a.ids[s * (draft + 1) + j];
                    if (made[s] < NEW)
                        out[s * NEW + made[s]++] = (uint32_t)id;
                    if (j == a.count[s] - 1)
                        next[s] = made[s] < NEW ? id : -1;
                }
        } else {
            const int32_t *ids;
            ok(lm_generator_next(g, next, &greedy, u, &ids, NULL, &err));
            for (int64_t s = 0; s < batch; s++) {
                if (next[s] >= 0 && made[s] < NEW)
                    out[s * NEW + made[s]++] = (uint32_t)ids[s];
                next[s] = next[s] >= 0 && made[s] < NEW ? ids[s] : -1;
            }
        }
        for (int64_t s = 0; s < batch; s++)
            any |= next[s] >= 0;
    }
    lm_generator_free(g);
}

static void greedy_texts_are_those_without_drafts(void **state)
{
    enum { NEW = 30 };
    uint32_t want[3 * NEW], got[3 * NEW];
    lm_loaded w;
    (void)state;
    for (int model = 0; model < 3; model++) {
        open_model(model == 2 ? states : model ? three : config, &w);
        for (int64_t batch = 1; batch <= 3; batch++) {
            continue_greedily(&w, 0, batch, want);
            for (int64_t draft = 1; draft <= 5; draft++) {
                continue_greedily(&w, draft, batch, got);
                assert_memory_equal(want, got, (size_t)batch * NEW * sizeof *got);
            }
        }
        lm_loaded_fini(&w);
    }
}

/* ---- what the modules draft ---- */

/* -log of the share that draft j of a slot has by the logits of which it was drawn. */
static double drafted_loss(const lm_generator *g, int64_t slot, int64_t j, int32_t id)
{
    const float *q = g->draft->q + (j * g->batch + slot) * V;
    double sum = 0;
    for (int i = 0; i < V; i++)
        sum += exp((double)q[i]);
    return log(sum) - (double)q[id];
}

/* The same by the graph that trains, of a text whose drafts are behind its first n tokens and one more. */
static double trained_loss(runner *r, const int32_t *text, int64_t n, int64_t j)
{
    for (int i = 0; i < S; i++) {
        ids_of(r, r->model->tokens)[i] = i <= n ? text[i] : 0;
        ids_of(r, r->model->targets)[i] = -1;
        for (int64_t k = 0; k < r->model->config.ahead; k++) {
            ids_of(r, r->model->ahead_tokens[k])[i] = i + k + 1 <= n + j ? text[i + k + 1] : 0;
            ids_of(r, r->model->ahead_targets[k])[i] = k == j && i == n - 1 ? text[n + 1 + k] : -1;
        }
    }
    runner_run(r);
    return lm_get(LM_DTYPE_F32, lm_exec_data(r->exec, r->model->ahead_loss[j]), n - 1);
}

/* Draft j is that of module j in the graph that trains, for each text that drafts and draws have made. */
static void check_modules(const char *of)
{
    enum { SLOTS = 2, DRAFTS = 5, STEPS = 11 };
    static const lm_sample_attr plain = { .temperature = 1, .top_p = 1, .repetition_penalty = 1 };
    const lm_build build = { .mode = LM_MODE_TRAIN,
                             .batch = 1,
                             .seq = S,
                             .precision = { .low = LM_DTYPE_F32 },
                             .ahead = LM_AHEAD_RUNS };
    int32_t next[SLOTS];
    int64_t compared[DRAFTS + 2] = { 0 };
    lm_loaded w;
    runner r;
    open_model(of, &w);
    runner_new(&r, &w.config, &build, lm_cpu_detect(), 2);
    lm_generator *g = open_generator(&w, SLOTS, DRAFTS);
    lm_store_bind(w.store, r.model, r.exec);
    runner_tables(&r);
    for (int s = 0; s < SLOTS; s++) {
        const uint32_t ids[9] = { 3, 1, 4, 1, 5, 9, 2, 6, 5 };
        ok(lm_generator_prompt(g, s, ids, s ? 9 : 4, NULL, &err));
        next[s] = 7;
    }
    for (int round = 0; round < STEPS; round++) {
        const int64_t used[SLOTS] = { g->used[0], g->used[1] };
        const lm_draft_answer a = step(g, next, DRAFTS, &plain, 100 + (uint64_t)round);
        for (int s = 0; s < SLOTS; s++) {
            const int32_t *text = (const int32_t *)g->choice.seen.host + s * S;
            for (int64_t j = 0; j < a.drafted[s] && j < w.config.ahead; j++) {
                const double got = drafted_loss(g, s, j, text[used[s] + 1 + j]),
                             want = trained_loss(&r, text, used[s], j);
                if (!(fabs(got - want) < 1e-3))
                    fail_msg("round %d, slot %d, draft %d: %g, in training %g", round, s, (int)j,
                             got, want);
            }
            compared[a.drafted[s]]++;
            compared[DRAFTS + 1] += a.count[s] > 1;
            next[s] = g->used[s] + DRAFTS + 1 < S ? a.ids[s * (DRAFTS + 1) + a.count[s] - 1] : -1;
        }
    }
    assert_true(compared[DRAFTS] > STEPS && compared[DRAFTS + 1] > 2);
    runner_free(&r);
    lm_generator_free(g);
    lm_loaded_fini(&w);
}

static void each_module_drafts_its_token(void **state)
{
    (void)state;
    check_modules(config);
    check_modules(three);
    check_modules(states);
}

/* ---- the distribution ---- */

/* Probabilities of the token behind ids. */
static void model_shares(lm_generator *g, const uint32_t *ids, int64_t n, double *p)
{
    const float *x;
    double sum = 0;
    ok(lm_generator_prompt(g, 0, ids, n, &x, &err));
    for (int i = 0; i < V; i++)
        sum += p[i] = exp((double)x[i]);
    for (int i = 0; i < V; i++)
        p[i] /= sum;
}

/* Pairs of tokens behind a prompt and one token, against what the model says of them: the chi-square of cells that expect 5 or
 * more, of others together; its mean is the number of cells - 1, its variance twice that. */
static void check_distribution(const char *of, int64_t drafts)
{
    enum { SLOTS = 9, ROUNDS = 1000, PROMPT = 6 };
    static const lm_sample_attr plain = { .temperature = 1, .top_p = 1, .repetition_penalty = 1 };
    const uint32_t ids[PROMPT + 3] = { 3, 1, 4, 1, 5, 9, 2 };
    double p[V], p2[V][V], chi = 0, pooled = 0, pooled_want = 0;
    int64_t count[V][V] = { { 0 } }, cells = 0, accepted = 0;
    lm_loaded w;
    open_model(of, &w);
    lm_generator *g = open_generator(&w, SLOTS, drafts);
    model_shares(g, ids, PROMPT + 1, p);
    for (int i = 0; i < V; i++) {
        uint32_t more[PROMPT + 2];
        memcpy(more, ids, sizeof more);
        more[PROMPT + 1] = (uint32_t)i;
        model_shares(g, more, PROMPT + 2, p2[i]);
    }
    ok(lm_generator_prompt(g, 0, ids, PROMPT, NULL, &err));
    for (int round = 0; round < ROUNDS; round++) {
        int32_t next[SLOTS] = { -1 }, got[SLOTS][4];
        int64_t n[SLOTS] = { 0 };
        for (int s = 1; s < SLOTS; s++) {
            ok(lm_generator_copy(g, 0, s, &err));
            next[s] = (int32_t)ids[PROMPT];
        }
        for (int part = 0; part < 2; part++) {
            const lm_draft_answer a = step(g, next, drafts, &plain, (uint64_t)(2 * round + part));
            for (int s = 1; s < SLOTS; s++) {
                accepted += next[s] >= 0 ? a.count[s] - 1 : 0;
                for (int32_t j = 0; next[s] >= 0 && j < a.count[s] && n[s] < 4; j++)
                    got[s][n[s]++] = a.ids[s * (drafts + 1) + j];
                next[s] = n[s] < 2 ? got[s][n[s] - 1] : -1;
            }
        }
        for (int s = 1; s < SLOTS; s++)
            count[got[s][0]][got[s][1]]++;
    }
    for (int i = 0; i < V; i++)
        for (int k = 0; k < V; k++) {
            const double want = p[i] * p2[i][k] * ROUNDS * (SLOTS - 1);
            const double d = (double)count[i][k] - want;
            if (want < 5) {
                pooled += (double)count[i][k];
                pooled_want += want;
                continue;
            }
            chi += d * d / want;
            cells++;
        }
    if (pooled_want > 0)
        chi += (pooled - pooled_want) * (pooled - pooled_want) / pooled_want;
    assert_true(cells > 50 && accepted > ROUNDS);
    if (!(chi < (double)cells + 4 * sqrt(2.0 * (double)cells)))
        fail_msg("chi-square %g of %lld cells", chi, (long long)cells);
    lm_generator_free(g);
    lm_loaded_fini(&w);
}

static void sampled_texts_have_the_distribution_of_the_model(void **state)
{
    (void)state;
    check_distribution(config, 2);
    check_distribution(three, 2);
    check_distribution(three, 4);
    check_distribution(states, 2);
}

static void what_cannot_draft_is_refused(void **state)
{
    static const char plain[] =
        "{\"model_type\":\"llama\",\"vocab_size\":12,\"hidden_size\":32,\"intermediate_size\":48,"
        "\"num_hidden_layers\":1,\"num_attention_heads\":4,\"max_position_embeddings\":64}";
    lm_generator_opts o = { .dtype = LM_DTYPE_F32, .batch = 1, .context = S, .draft = 1 };
    lm_loaded w;
    lm_generator *g;
    (void)state;
    loaded_of(plain, LM_DTYPE_F32, par, backend, &w);
    assert_int_equal(lm_generator_new(&w, &o, backend, &g, &err), LM_EUSAGE);
    assert_non_null(strstr(err.what, "no modules that predict tokens further on"));
    err = (lm_err){ 0 };
    lm_loaded_fini(&w);
    open_model(config, &w);
    o.draft = S;
    assert_int_equal(lm_generator_new(&w, &o, backend, &g, &err), LM_EUSAGE);
    err = (lm_err){ 0 };
    lm_loaded_fini(&w);
    /* A step of several rows codes a state once, which is not the model that codes it behind each token. */
    lm_cache_plan codes = { 0 };
    open_model(states, &w);
    assert_int_equal(lm_cache_states_open("int8", &w.config, &codes, &err), LM_OK);
    o.draft = 2;
    o.state_codes = codes.plan;
    assert_int_equal(lm_generator_new(&w, &o, backend, &g, &err), LM_EUSAGE);
    assert_non_null(strstr(err.what, "states are coded"));
    err = (lm_err){ 0 };
    lm_cache_plan_fini(&codes);
    lm_loaded_fini(&w);
}

/* Each further draft has a row of logits of the module, and one of the model. */
static void memory_of_drafts_is_stated(void **state)
{
    enum { VOCAB = 4096, FEW = 1, MANY = 9 };
    const size_t row = VOCAB * sizeof(float);
    lm_generator_memory m[2];
    lm_loaded w;
    const char *size = strstr(config, "12,");
    char text[1024];
    (void)state;
    snprintf(text, sizeof text, "%.*s%d%s", (int)(size - config), config, VOCAB, size + 2);
    open_model(text, &w);
    for (int i = 0; i < 2; i++) {
        lm_generator *g = open_generator(&w, 1, i ? MANY : FEW);
        lm_generator_plan(g, &m[i]);
        lm_generator_free(g);
    }
    assert_true(m[1].activations - m[0].activations >= 2 * (MANY - FEW) * row);
    assert_true(m[1].activations - m[0].activations < 3 * (MANY - FEW) * row);
    lm_loaded_fini(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(accepted_tokens_have_the_distribution_of_the_model),
        cmocka_unit_test(greedy_texts_are_those_without_drafts),
        cmocka_unit_test(each_module_drafts_its_token),
        cmocka_unit_test(sampled_texts_have_the_distribution_of_the_model),
        cmocka_unit_test(what_cannot_draft_is_refused),
        cmocka_unit_test(memory_of_drafts_is_stated),
    };
    return cmocka_run_group_tests_name("generate_draft", tests, open_cpu, close_cpu);
}
