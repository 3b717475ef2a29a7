/* SPDX-License-Identifier: Apache-2.0 */
/* test_generate.c -- decoding through caches gives the losses and the choices of a whole forward
 * pass; scoring by strides; completions do not depend on the batch. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "cpu_case.h"
#include "loaded_case.h"
#include "model/complete.h"
#include "model/preset.h"
#include "model/sample.h"
#include "model/store.h"
#include "train/score.h"

enum { V = 96, S = 340 };

#define SIZES                                                        \
    "\"vocab_size\":96,\"hidden_size\":64,\"intermediate_size\":96," \
    "\"num_hidden_layers\":2,\"num_attention_heads\":4,"             \
    "\"max_position_embeddings\":400,\"initializer_range\":0.2,"
#define SMALL SIZES "\"num_key_value_heads\":2,"
#define SCORED                                                   \
    SIZES "\"n_routed_experts\":8,\"num_experts_per_tok\":2,"    \
          "\"moe_intermediate_size\":32,\"n_shared_experts\":1," \
          "\"first_k_dense_replace\":1,\"n_group\":4,\"topk_group\":2,"
#define LATENT                                                                      \
    SCORED "\"num_key_value_heads\":4,\"kv_lora_rank\":40,\"qk_nope_head_dim\":24," \
           "\"qk_rope_head_dim\":16,\"v_head_dim\":20"
#define EXPERTS "\"num_experts\":6,\"num_experts_per_tok\":2,\"moe_intermediate_size\":32"
static const char *const configs[] = {
    "{\"model_type\":\"gpt2\",\"vocab_size\":96,\"n_embd\":64,\"n_layer\":2,\"n_head\":4,"
    "\"n_positions\":400,\"initializer_range\":0.2}",
    "{\"model_type\":\"llama\"," SMALL "\"rms_norm_eps\":1e-6}",
    "{\"model_type\":\"mistral\"," SMALL "\"sliding_window\":9}",
    "{\"model_type\":\"qwen2\"," SMALL "\"tie_word_embeddings\":true}",
    "{\"model_type\":\"qwen3\"," SMALL "\"head_dim\":32}",
    "{\"model_type\":\"qwen3_next\",\"vocab_size\":96,\"hidden_size\":64,\"intermediate_size\":96,"
    "\"num_hidden_layers\":4,\"num_attention_heads\":4,\"num_key_value_heads\":2,\"head_dim\":32,"
    "\"full_attention_interval\":2,\"linear_num_key_heads\":2,\"linear_num_value_heads\":4,"
    "\"linear_key_head_dim\":16,\"linear_value_head_dim\":24,\"num_experts\":4,"
    "\"num_experts_per_tok\":2,\"moe_intermediate_size\":32,\"shared_expert_intermediate_size\":48,"
    "\"max_position_embeddings\":400,\"initializer_range\":0.2}",
    "{\"model_type\":\"lm_hybrid\"," SMALL
    "\"layer_types\":[\"linear_attention\",\"linear_attention\"]}",
    "{\"model_type\":\"lm_hybrid\"," SMALL "\"layer_types\":[\"linear_attention\","
    "\"full_attention\"],\"linear_attention\":{\"feature\":\"identity\",\"decay\":true}}",
    "{\"model_type\":\"lm_hybrid\"," SMALL "\"gaussian_window\":70,"
    "\"layer_types\":[\"gaussian_attention\",\"gaussian_norm_attention\"]}",
    "{\"model_type\":\"lm_hybrid\"," SMALL "\"block_sparse_attention\":{\"block_size\":16,"
    "\"local_blocks\":2,\"vert_stride\":4},"
    "\"layer_types\":[\"block_sparse_attention\",\"full_attention\"]}",
    "{\"model_type\":\"gemma2\"," SMALL "\"head_dim\":32,\"sliding_window\":9}",
    "{\"model_type\":\"gemma3_text\"," SMALL "\"head_dim\":32,\"sliding_window\":9,"
    "\"sliding_window_pattern\":2}",
    "{\"model_type\":\"olmo2\"," SMALL "\"rms_norm_eps\":1e-6}",
    "{\"model_type\":\"olmo3\"," SMALL "\"sliding_window\":9,"
    "\"layer_types\":[\"sliding_attention\",\"full_attention\"]}",
    "{\"model_type\":\"bloom\",\"vocab_size\":96,\"hidden_size\":96,\"n_layer\":2,\"n_head\":6,"
    "\"initializer_range\":0.2}",
    "{\"model_type\":\"mixtral\"," SMALL "\"num_local_experts\":4,\"sliding_window\":9}",
    "{\"model_type\":\"qwen2_moe\"," SMALL EXPERTS ",\"shared_expert_intermediate_size\":48}",
    "{\"model_type\":\"qwen3_moe\"," SMALL EXPERTS ",\"head_dim\":32,\"norm_topk_prob\":true}",
    "{\"model_type\":\"dots1\"," SCORED "\"num_key_value_heads\":2,\"sliding_window\":null}",
    "{\"model_type\":\"gpt_oss\"," SMALL "\"head_dim\":32,\"sliding_window\":9,"
    "\"num_local_experts\":6,\"num_experts_per_tok\":2}",
    "{\"model_type\":\"deepseek_v2\"," LATENT ",\"q_lora_rank\":null,"
    "\"topk_method\":\"group_limited_greedy\"}",
    "{\"model_type\":\"deepseek_v3\"," LATENT ",\"q_lora_rank\":28}",
    "{\"model_type\":\"qwen3_5_text\"," SMALL "\"head_dim\":32,\"full_attention_interval\":2,"
    "\"linear_num_key_heads\":2,\"linear_num_value_heads\":4,\"linear_key_head_dim\":16,"
    "\"linear_value_head_dim\":24}",
    "", /* layers of different sizes */
};
enum { N_CONFIGS = sizeof configs / sizeof *configs };

/* configs[1] with another number and width of heads, a rotary table and a window of its own in
 * layer 1. */
static void make_uneven(lm_dtype type, lm_loaded *w)
{
    lm_config *c = &w->config;
    json_t *o = NULL;
    memset(w, 0, sizeof *w);
    ok(lm_json_parse(configs[1], strlen(configs[1]), "config", &o, &err));
    ok(lm_config_read(o, "config", c, &err));
    json_decref(o);
    assert_true(lm_config_alike(c));
    c->rope[1] = c->rope[0];
    c->rope[1].dim = 24;
    c->ropes = 2;
    c->layer[1].rope = 1;
    c->layer[1].window = 9;
    assert_true(lm_config_alike(c));
    c->layer[1].head_dim = 24;
    c->layer[1].kv_heads = 4;
    assert_false(lm_config_alike(c));
    loaded_draw(w, type, par, backend);
}

static void make(const char *text, lm_dtype type, lm_loaded *w)
{
    if (*text)
        loaded_of(text, type, par, backend, w);
    else
        make_uneven(type, w);
}

static void open_eval(const lm_loaded *w, lm_dtype type, int64_t batch, int64_t seq,
                      lm_evaluator *v)
{
    const lm_build build = { .batch = batch, .seq = seq, .documents = true, .precision = { type } };
    ok(lm_evaluator_new(&w->config, &build, backend, v, &err));
    lm_store_bind(w->store, v->model, v->exec);
}

static double log_softmax(const float *x, int64_t i)
{
    double sum = 0;
    for (int64_t k = 0; k < V; k++)
        sum += exp(x[k]);
    return x[i] - log(sum);
}

static void caches_equal_a_whole_forward(void **state)
{
    uint32_t ids[S];
    (void)state;
    for (int i = 0; i < S; i++)
        ids[i] = (uint32_t)lm_rng_below(lm_rng_make(1, "test", 0), (uint64_t)i, V);
    for (int k = 0; k < N_CONFIGS; k++) {
        lm_loaded w;
        lm_evaluator v;
        lm_generator *g;
        const float *loss, *logits;
        lm_eval_sum sum = { 0 };
        make(configs[k], LM_DTYPE_F32, &w);
        open_eval(&w, LM_DTYPE_F32, 1, S - 1, &v);
        for (int i = 0; i + 1 < S; i++) {
            v.batch.tokens[i] = (int32_t)ids[i];
            v.batch.targets[i] = (int32_t)ids[i + 1];
            v.batch.pos[i] = i;
            v.batch.lo[i] = 0;
        }
        ok(lm_evaluator_run(&v, &sum, &loss, &err));
        ok(lm_generator_new(&w,
                            &(lm_generator_opts){ .dtype = LM_DTYPE_F32, .batch = 3, .context = S },
                            backend, &g, &err));
        /* a prompt of 300 takes two chunks, one of 20 a chunk of 64, one of 1 a chunk of 8 */
        const int64_t prompts[3] = { 300, 20, 1 };
        int32_t next[3];
        for (int s = 0; s < 3; s++) {
            int64_t n = prompts[s];
            ok(lm_generator_prompt(g, s, ids, n, &logits, &err));
            assert_true(fabs(-log_softmax(logits, ids[n]) - loss[n - 1]) < 1e-4);
            next[s] = (int32_t)ids[n];
        }
        for (int64_t i = 0; i < 25; i++) { /* the middle slot is inactive for some steps */
            next[1] = i < 5 || i >= 10 ? (int32_t)ids[lm_generator_used(g, 1)] : -1;
            ok(lm_generator_decode(g, next, &logits, &err));
            for (int s = 0; s < 3; s++) {
                int64_t n = lm_generator_used(g, s);
                if (next[s] >= 0)
                    assert_true(fabs(-log_softmax(logits + s * V, ids[n]) - loss[n - 1]) < 1e-4);
                next[s] = (int32_t)ids[n];
            }
        }
        lm_generator_free(g);
        lm_evaluator_fini(&v);
        lm_loaded_fini(&w);
    }
}

/* Each layer has caches of its own size, and one with a window reads no more than that. */
static void caches_are_counted_by_layer(void **state)
{
    lm_loaded w;
    lm_generator *g;
    uint32_t ids[20] = { 1, 2, 3 };
    (void)state;
    make_uneven(LM_DTYPE_F32, &w);
    ok(lm_generator_new(&w,
                        &(lm_generator_opts){ .dtype = LM_DTYPE_F32, .batch = 3, .context = 64 },
                        backend, &g, &err));
    assert_int_equal(lm_generator_cache_bytes(g), 2 * 3 * 64 * (2 * 16 + 4 * 24) * 4);
    double weights = lm_generator_step_bytes(g);
    ok(lm_generator_prompt(g, 1, ids, 20, NULL, &err));
    assert_true(lm_generator_step_bytes(g) - weights == 2 * (20 * 2 * 16 + 9 * 4 * 24) * 4);
    lm_generator_free(g);
    lm_loaded_fini(&w);
}

static void a_full_slot_is_refused(void **state)
{
    lm_loaded w;
    lm_generator *g;
    const float *logits;
    uint32_t ids[9] = { 1, 2, 3 };
    int32_t next = 4;
    (void)state;
    make(configs[1], LM_DTYPE_F32, &w);
    assert_int_equal(
        lm_generator_new(&w,
                         &(lm_generator_opts){ .dtype = LM_DTYPE_F32, .batch = 1, .context = 401 },
                         backend, &g, &err),
        LM_EUSAGE);
    err = (lm_err){ 0 };
    ok(lm_generator_new(&w, &(lm_generator_opts){ .dtype = LM_DTYPE_F32, .batch = 1, .context = 8 },
                        backend, &g, &err));
    assert_int_equal(lm_generator_prompt(g, 0, ids, 9, &logits, &err), LM_EUSAGE);
    err = (lm_err){ 0 };
    ok(lm_generator_prompt(g, 0, ids, 7, &logits, &err));
    ok(lm_generator_decode(g, &next, &logits, &err));
    assert_int_equal(lm_generator_decode(g, &next, &logits, &err), LM_EUSAGE);
    err = (lm_err){ 0 };
    ok(lm_generator_prompt(g, 0, ids, 8, &logits, &err)); /* the slot is reset */
    lm_generator_free(g);
    lm_loaded_fini(&w);
}

static void decoding_allocates_nothing(void **state)
{
    lm_loaded w;
    lm_generator *g;
    const lm_sample_attr o = { 0.8, 20, 0.9, 0.01, 1.1 };
    const uint32_t ids[3] = { 1, 2, 3 };
    const int32_t *next;
    const double *logprob;
    double u = 0.5;
    (void)state;
    make(configs[1], LM_DTYPE_BF16, &w);
    ok(lm_generator_new(&w,
                        &(lm_generator_opts){ .dtype = LM_DTYPE_BF16, .batch = 1, .context = S },
                        backend, &g, &err));
    ok(lm_generator_prompt(g, 0, ids, 3, NULL, &err));
    uint64_t before = lm_alloc_count();
    for (int n = 3; n < S; n++) {
        u = lm_sample_draw(1, 0, 0, n);
        ok(lm_generator_choose(g, &o, &u, &next, &logprob, &err));
        assert_true(*next >= 0 && *logprob <= 0);
        ok(lm_generator_decode(g, next, NULL, &err));
    }
    assert_int_equal(lm_alloc_count(), before);
    lm_generator_free(g);
    lm_loaded_fini(&w);
}

/* Number of runs of the graph of all slots: 0 while a smaller graph covers the last active slot. */
static int64_t widest_calls(lm_generator *g)
{
    const lm_exec_time *times;
    assert_true(lm_exec_times(lm_generator_exec(g), &times) > 0);
    return (int64_t)times[0].calls;
}

/* A step computes the rows in use; a slot that was moved or copied continues as if it had not
 * been. */
static void rows_are_those_in_use(void **state)
{
    enum { B = 11 };
    uint32_t ids[40];
    (void)state;
    for (int i = 0; i < 40; i++)
        ids[i] = (uint32_t)lm_rng_below(lm_rng_make(3, "test", 0), (uint64_t)i, V);
    for (int k = 0; k < N_CONFIGS; k++) {
        lm_loaded w;
        lm_generator *g, *one;
        const float *logits, *expect;
        int32_t next[B], alone = (int32_t)ids[20];
        make(configs[k], LM_DTYPE_F32, &w);
        ok(lm_generator_new(
            &w, &(lm_generator_opts){ .dtype = LM_DTYPE_F32, .batch = B, .context = 64 }, backend,
            &g, &err));
        ok(lm_generator_new(
            &w, &(lm_generator_opts){ .dtype = LM_DTYPE_F32, .batch = 1, .context = 64 }, backend,
            &one, &err));
        for (int s = 0; s < B; s++)
            next[s] = -1;
        ok(lm_generator_prompt(one, 0, ids, 20, NULL, &err));
        ok(lm_generator_prompt(g, 9, ids, 20, NULL, &err));
        ok(lm_generator_prompt(g, 1, ids + 5, 3, NULL, &err));
        next[9] = alone, next[1] = 7;
        ok(lm_generator_decode(g, next, NULL, &err)); /* 10 rows: the graph of 11 rows is used */
        ok(lm_generator_decode(one, &alone, NULL, &err));
        int64_t wide = widest_calls(g);
        assert_true(wide > 0);
        ok(lm_generator_copy(g, 9, 0, &err));
        ok(lm_generator_copy(g, 9, 2, &err));
        assert_int_equal(lm_generator_used(g, 0), 21);
        next[9] = -1;
        for (int i = 21; i < 30; i++) {
            alone = next[0] = next[2] = (int32_t)ids[i];
            next[1] = (int32_t)ids[i - 13];
            ok(lm_generator_decode(one, &alone, &expect, &err));
            ok(lm_generator_decode(g, next, &logits, &err));
            for (int v = 0; v < V; v++) { /* products of one row are summed in another order */
                assert_true(fabsf(logits[v] - expect[v]) < 1e-4f);
                assert_true(fabsf(logits[2 * V + v] - expect[v]) < 1e-4f);
            }
        }
        assert_int_equal(widest_calls(g), wide);
        lm_generator_free(one);
        lm_generator_free(g);
        lm_loaded_fini(&w);
    }
}

/* Every target is scored once, with the context that the stride gives, whatever else is in its
 * batch. */
static void strides_score_each_target_once(void **state)
{
    enum { N = 75, T = 16 };
    uint32_t ids[N], bytes[V];
    lm_loaded w;
    lm_evaluator one, v;
    double expect[2] = { 0, 0 };
    (void)state;
    for (int i = 0; i < N; i++)
        ids[i] = (uint32_t)lm_rng_below(lm_rng_make(2, "test", 0), (uint64_t)i, V);
    for (uint32_t i = 0; i < V; i++)
        bytes[i] = i;
    make(configs[1], LM_DTYPE_F32, &w);
    open_eval(&w, LM_DTYPE_F32, 1, T, &one);
    for (int64_t begin = 0, done = 0; done + 1 < N;
         begin += 6) { /* by the definition, one run per window */
        lm_eval_sum sum = { 0 };
        int64_t end = begin + T < N - 1 ? begin + T : N - 1;
        for (int64_t r = 0; r < T; r++) {
            bool in = begin + r < end;
            one.batch.tokens[r] = in ? (int32_t)ids[begin + r] : 0;
            one.batch.targets[r] = in && begin + r >= done ? (int32_t)ids[begin + r + 1] : -1;
            one.batch.pos[r] = (int32_t)r;
            one.batch.lo[r] = 0;
        }
        ok(lm_evaluator_run(&one, &sum, NULL, &err));
        expect[0] += sum.nll;
        done = end;
    }
    open_eval(&w, LM_DTYPE_F32, 3, T, &v);
    lm_scorer *s;
    lm_score got = { 0 }, other = { 0 }, tail = { 0 };
    ok(lm_scorer_new(&v, 6, bytes, &s, &err));
    for (int i = 0; i < 7; i++) /* short ones in between */
        ok(lm_scorer_add(s, ids, 3 + i, 1, &other, &err));
    ok(lm_scorer_add(s, ids, N, 1, &got, &err));
    ok(lm_scorer_add(s, ids, 1, 1, &other, &err));
    ok(lm_scorer_add(s, ids, 12, 9, &tail, &err));
    ok(lm_scorer_flush(s, &err));
    for (int i = 1; i < N; i++)
        expect[1] += ids[i];
    assert_int_equal(got.tokens, N - 1);
    assert_int_equal(got.bytes, (int64_t)expect[1]);
    assert_true(fabs(got.nll - expect[0]) < 1e-3);
    assert_int_equal(other.tokens, 2 + 3 + 4 + 5 + 6 + 7 + 8);
    assert_int_equal(tail.tokens, 3);
    lm_score alone = { 0 };
    for (int i = 0; i < 7; i++) {
        ok(lm_scorer_add(s, ids, 3 + i, 1, &alone, &err));
        ok(lm_scorer_flush(s, &err));
    }
    assert_true(fabs(alone.nll - other.nll) < 1e-3);
    ids[5] = V;
    assert_int_equal(lm_scorer_add(s, ids, N, 1, &got, &err), LM_EFORMAT);
    err = (lm_err){ 0 };
    lm_scorer_free(s);
    lm_evaluator_fini(&one);
    lm_evaluator_fini(&v);
    lm_loaded_fini(&w);
}

/* Virtual tokens begin each window and are never scored; behind prompts, the first id of a sequence is. */
static void virtual_tokens_begin_each_window(void **state)
{
    enum { N = 40, T = 16, P = 3, STRIDE = 5, ROOM = T - P };
    uint32_t ids[N];
    lm_loaded w;
    lm_evaluator one, v;
    lm_scorer *s;
    double first_loss = 0, rest = 0;
    const float *loss;
    (void)state;
    for (int i = 0; i < N; i++)
        ids[i] = (uint32_t)lm_rng_below(lm_rng_make(4, "test", 0), (uint64_t)i, V);
    make(configs[1], LM_DTYPE_F32, &w);
    open_eval(&w, LM_DTYPE_F32, 1, T, &one);
    for (int64_t begin = 0, done = 0; done + 1 < N; begin += STRIDE) { /* one run per window */
        lm_eval_sum sum = { 0 };
        int64_t end = begin + ROOM < N - 1 ? begin + ROOM : N - 1;
        for (int64_t r = 0; r < T; r++) {
            int64_t at = begin + r - P; /* of the row's id */
            bool in = r >= P && at < end;
            one.batch.tokens[r] = r < P ? V + (int32_t)r : in ? (int32_t)ids[at] : 0;
            one.batch.targets[r] = r == P - 1 && !begin ? (int32_t)ids[0]
                                   : in && at >= done   ? (int32_t)ids[at + 1]
                                                        : -1;
            one.batch.pos[r] = (int32_t)r;
            one.batch.lo[r] = 0;
        }
        ok(lm_evaluator_run(&one, &sum, &loss, &err));
        if (!begin)
            first_loss = (double)loss[P - 1];
        rest += sum.nll - (begin ? 0 : first_loss);
        done = end;
    }
    open_eval(&w, LM_DTYPE_F32, 2, T, &v);
    for (int first = 0; first < 2; first++) {
        lm_score got = { 0 }, single = { 0 }, tail = { 0 };
        ok(lm_scorer_new(&v, STRIDE, NULL, &s, &err));
        assert_int_equal(lm_scorer_virtual(s, T - STRIDE + 1, first, &err), LM_EUSAGE);
        err = (lm_err){ 0 };
        ok(lm_scorer_virtual(s, P, first, &err));
        ok(lm_scorer_add(s, ids, 1, 0, &single, &err));
        ok(lm_scorer_add(s, ids, N, 0, &got, &err));
        ok(lm_scorer_add(s, ids, 9, 6, &tail, &err));
        ok(lm_scorer_flush(s, &err));
        assert_int_equal(got.tokens, N - 1 + first);
        assert_int_equal(single.tokens, first);
        assert_int_equal(tail.tokens, 3);
        assert_true(fabs(got.nll - rest - (first ? first_loss : 0)) < 1e-3);
        assert_true(fabs(single.nll - (first ? first_loss : 0)) < 1e-3);
        lm_scorer_free(s);
    }
    lm_evaluator_fini(&one);
    lm_evaluator_fini(&v);
    lm_loaded_fini(&w);
}

/* A folder that is written in chunks has the weights that a store draws, in either type. */
static void a_folder_has_the_weights_of_a_store(void **state)
{
    char dir[] = "/tmp/lm-test-XXXXXX", path[64];
    (void)state;
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/m", dir);
    for (int k = 0; *configs[k]; k++)
        for (int low = 0; low < 2; low++) {
            lm_dtype type = low ? LM_DTYPE_BF16 : LM_DTYPE_F32;
            const lm_build build = {
                .mode = LM_MODE_EVAL, .batch = 1, .seq = 1, .precision = { type }
            };
            lm_loaded made, read;
            lm_model *m;
            lm_st_plan *plan;
            lm_folder *f;
            json_t *o;
            make(configs[k], type, &made);
            ok(lm_model_build(&made.config, &build, &m, &err));
            ok(lm_json_parse(configs[k], strlen(configs[k]), "config", &o, &err));
            ok(lm_st_plan_new(&plan, &err));
            ok(lm_model_plan(m, LM_TENSORS_ALL, LM_DTYPE_F32, plan, &err));
            const lm_folder_spec spec = { .config = o, .plan = plan, .max_shard_bytes = 50000 };
            ok(lm_folder_create(path, true, NULL, &spec, &f, &err));
            ok(lm_model_draw(m, 5, par, f, NULL, &err));
            ok(lm_folder_commit(f, &err));
            ok(lm_loaded_open(path, NULL, &read, &err));
            ok(lm_loaded_weights(&read, m, backend, &err));
            float whole[100], part[60];
            lm_slice_draw(m, 0, 5, par, 0, 100, whole);
            lm_slice_draw(m, 0, 5, NULL, 40, 60, part);
            assert_memory_equal(part, whole + 40, sizeof part);
            assert_int_equal(read.store->n_blocks, 1 + low);
            for (int b = 0; b <= low; b++) {
                const lm_store_block *x = &read.store->block[b], *y = &made.store->block[b];
                assert_true(x->format == y->format && x->count == y->count);
                assert_memory_equal(x->data, y->data, x->bytes);
            }
            lm_loaded_fini(&read);
            lm_loaded_fini(&made);
            lm_st_plan_free(plan);
            lm_model_free(m);
            json_decref(o);
        }
    ok(lm_rm_rf(dir, &err));
}

static void set_knows_the_keys(void **state)
{
    json_t *o;
    (void)state;
    ok(lm_json_parse(configs[1], strlen(configs[1]), "config", &o, &err));
    ok(lm_config_set(o, "hidden_size=32", &err));
    ok(lm_config_set(o, "rope_scaling.rope_type=linear", &err));
    ok(lm_config_set(o, "rope_scaling.factor=2.5", &err));
    assert_int_equal(json_integer_value(json_object_get(o, "hidden_size")), 32);
    json_t *rope = json_object_get(o, "rope_scaling");
    assert_string_equal(json_string_value(json_object_get(rope, "rope_type")), "linear");
    assert_true(json_real_value(json_object_get(rope, "factor")) == 2.5);
    const char *const wrong[] = { "n_embd=3",         "hidden_size",     "=3",
                                  "rope_scaling.x=1", "hidden_size.x=1", "model_type=gpt2" };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        assert_int_equal(lm_config_set(o, wrong[i], &err), LM_EUSAGE);
        err = (lm_err){ 0 };
    }
    json_decref(o);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(caches_equal_a_whole_forward),
        cmocka_unit_test(caches_are_counted_by_layer),
        cmocka_unit_test(a_full_slot_is_refused),
        cmocka_unit_test(decoding_allocates_nothing),
        cmocka_unit_test(rows_are_those_in_use),
        cmocka_unit_test(strides_score_each_target_once),
        cmocka_unit_test(virtual_tokens_begin_each_window),
        cmocka_unit_test(a_folder_has_the_weights_of_a_store),
        cmocka_unit_test(set_knows_the_keys),
    };
    return cmocka_run_group_tests(tests, open_cpu, close_cpu);
}
