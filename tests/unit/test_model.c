/* SPDX-License-Identifier: Apache-2.0 */
/* Whole models: gradients against finite differences, levels against double, documents, caches. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <unistd.h>

#include "base/rng.h"
#include "model/arch.h"
#include "model_run.h"

#define ALIKE                                                                                \
    "\"vocab_size\":23,\"hidden_size\":16,\"intermediate_size\":20,\"num_hidden_layers\":2," \
    "\"num_attention_heads\":4,\"max_position_embeddings\":32"
#define SMALL ALIKE ",\"num_key_value_heads\":2"

/* Values are smaller than keys; of LATENT no layer has experts. */
#define LATENT_SIZES                                                                             \
    ALIKE ",\"kv_lora_rank\":10,\"qk_nope_head_dim\":6,\"qk_rope_head_dim\":4,\"v_head_dim\":5," \
          "\"n_routed_experts\":4,\"num_experts_per_tok\":2,\"moe_intermediate_size\":8"
#define LATENT LATENT_SIZES ",\"n_group\":1,\"topk_group\":1,\"first_k_dense_replace\":9"

static const char *const models[] = {
    "{\"model_type\":\"gpt2\",\"vocab_size\":23,\"n_embd\":16,\"n_layer\":2,\"n_head\":4,"
    "\"n_positions\":16}",
    "{\"model_type\":\"gpt2\",\"vocab_size\":23,\"n_embd\":16,\"n_layer\":2,\"n_head\":2,"
    "\"n_positions\":16,\"tie_word_embeddings\":false,\"scale_attn_by_inverse_layer_idx\":true,"
    "\"activation_function\":\"gelu\",\"n_inner\":24}",
    "{\"model_type\":\"llama\"," SMALL ",\"attention_dropout\":0.2}",
    "{\"model_type\":\"llama\"," SMALL ",\"tie_word_embeddings\":true,\"attention_bias\":true,"
    "\"mlp_bias\":true}",
    "{\"model_type\":\"mistral\"," SMALL ",\"sliding_window\":3}",
    "{\"model_type\":\"qwen2\"," SMALL ",\"tie_word_embeddings\":true}",
    "{\"model_type\":\"qwen3\"," SMALL ",\"head_dim\":6,\"use_sliding_window\":true,"
    "\"sliding_window\":4,\"max_window_layers\":1}",
    "{\"model_type\":\"olmo2\"," SMALL "}",
    "{\"model_type\":\"gemma2\"," SMALL ",\"head_dim\":6,\"sliding_window\":3,"
    "\"query_pre_attn_scalar\":8,\"attn_logit_softcapping\":2,\"final_logit_softcapping\":3}",
    "{\"model_type\":\"gemma3_text\"," SMALL ",\"head_dim\":6,\"sliding_window\":3,"
    "\"sliding_window_pattern\":2,\"rope_local_base_freq\":100,\"query_pre_attn_scalar\":64}",
    "{\"model_type\":\"deepseek_v2\"," LATENT ",\"q_lora_rank\":null,\"attention_bias\":true}",
    "{\"model_type\":\"deepseek_v3\"," LATENT ",\"q_lora_rank\":6,\"rope_interleave\":false,"
    "\"attention_dropout\":0.2}",
    "{\"model_type\":\"bert\"," ALIKE ",\"type_vocab_size\":3}",
    "{\"model_type\":\"bloom\",\"vocab_size\":23,\"hidden_size\":24,\"n_layer\":2,\"n_head\":6,"
    "\"attention_dropout\":0.2,\"hidden_dropout\":0.1}",
    "{\"model_type\":\"lm_hybrid\"," SMALL ",\"layer_types\":[\"block_sparse_attention\","
    "\"full_attention\"],\"block_sparse_attention\":{\"block_size\":16,\"local_blocks\":1,"
    "\"global_blocks\":1,\"vert_stride\":3}}",
    "{\"model_type\":\"lm_hybrid\"," SMALL ",\"attention_bias\":true,"
    "\"layer_types\":[\"linear_attention\",\"full_attention\"]}",
    /* norms of heads whose first tokens have results near 0 would scale their roundings up */
    "{\"model_type\":\"lm_hybrid\"," SMALL ",\"head_dim\":6,"
    "\"layer_types\":[\"linear_attention\",\"linear_attention\"],\"rms_norm_eps\":0.1,"
    "\"linear_attention\":{\"feature\":\"identity\",\"decay\":true}}",
    "{\"model_type\":\"lm_hybrid\"," SMALL ",\"layer_types\":[\"gaussian_attention\","
    "\"gaussian_norm_attention\"],\"gaussian_window\":4}",
};
enum { N_MODELS = sizeof models / sizeof *models };

#define MOE SMALL ",\"num_experts\":5,\"num_experts_per_tok\":2,\"moe_intermediate_size\":8"
#define STATES                                                                                 \
    SMALL ",\"head_dim\":8,\"partial_rotary_factor\":0.5,\"full_attention_interval\":2,"       \
          "\"linear_num_key_heads\":2,\"linear_num_value_heads\":4,\"linear_key_head_dim\":6," \
          "\"linear_value_head_dim\":4"
#define EXPERTS ",\"first_k_dense_replace\":1,\"n_shared_experts\":1"

/* Of the architectures that have no model above, and of those with experts, whose choices are no functions that have
 * derivatives: only their caches are tested here. */
static const char *const others[] = {
    "{\"model_type\":\"olmo3\"," SMALL ",\"sliding_window\":3,"
    "\"layer_types\":[\"sliding_attention\",\"full_attention\"]}",
    "{\"model_type\":\"mixtral\"," SMALL ",\"num_local_experts\":5,\"sliding_window\":4}",
    "{\"model_type\":\"qwen2_moe\"," MOE ",\"shared_expert_intermediate_size\":12}",
    "{\"model_type\":\"qwen3_moe\"," MOE ",\"head_dim\":6,\"mlp_only_layers\":[0]}",
    "{\"model_type\":\"qwen3_next\"," STATES ",\"num_experts\":5,\"num_experts_per_tok\":2,"
    "\"moe_intermediate_size\":8,\"shared_expert_intermediate_size\":12}",
    "{\"model_type\":\"qwen3_5_text\"," STATES ",\"linear_conv_kernel_dim\":3}",
    "{\"model_type\":\"gpt_oss\"," SMALL ",\"head_dim\":6,\"sliding_window\":3,"
    "\"num_local_experts\":5,\"num_experts_per_tok\":2}",
    "{\"model_type\":\"dots1\"," SMALL EXPERTS ",\"sliding_window\":null,\"n_routed_experts\":8,"
    "\"num_experts_per_tok\":3,\"moe_intermediate_size\":8,\"n_group\":4,\"topk_group\":2}",
    "{\"model_type\":\"deepseek_v2\"," LATENT_SIZES EXPERTS ",\"q_lora_rank\":null,"
    "\"topk_method\":\"group_limited_greedy\",\"n_group\":2,\"topk_group\":1}",
    "{\"model_type\":\"deepseek_v3\"," LATENT_SIZES EXPERTS ",\"q_lora_rank\":6,\"n_group\":1,"
    "\"topk_group\":1}",
};
enum { N_OTHERS = sizeof others / sizeof *others };

/* The config of models[i], or of others[i - N_MODELS]. */
static const char *text_of(int i)
{
    return i < N_MODELS ? models[i] : others[i - N_MODELS];
}

static void read_model(int i, lm_config *c)
{
    const char *text = text_of(i);
    lm_err e = { 0 };
    json_t *o;
    must(lm_json_parse(text, strlen(text), "config", &o, &e), &e);
    must(lm_config_read(o, "config", c, &e), &e);
    for (int64_t l = 0; l < c->layers; l++)
        if (c->layer[l]
                .blocks.size) /* so small that the few tokens of these tests are in several */
            c->layer[l].blocks.size = 2;
    json_decref(o);
}

/* Random numbers everywhere: norms of 1 and biases of 0, as in a new model, would hide mistakes. */
static float *random_block(const lm_model *m)
{
    float *block = room((size_t)m->block, sizeof *block);
    for (int i = 0; i < m->n_params; i++) {
        const lm_param *p = &m->param[i];
        lm_rng r = lm_rng_make(9, "weights", (uint64_t)i);
        for (int64_t k = 0; k < p->count; k++)
            block[p->offset + k] = (float)(0.3 * lm_rng_normal(r, (uint64_t)k));
        if (strstr(m->graph->value[p->value].name, "n"))
            block[p->offset] += 1;
    }
    return block;
}

static void feed(runner *r, uint64_t seed)
{
    const lm_model *m = r->model;
    lm_rng rng = lm_rng_make(seed, "tokens", 0);
    for (int64_t i = 0; i < m->build.batch * m->build.seq; i++) {
        ids_of(r, m->tokens)[i] = (int32_t)lm_rng_below(rng, (uint64_t)i * 2, 23);
        if (m->targets != LM_NONE)
            ids_of(r, m->targets)[i] =
                i % 5 == 3 ? -1 : (int32_t)lm_rng_below(rng, (uint64_t)i * 2 + 1, 23);
    }
}

static lm_build build_of(lm_mode mode, lm_dtype low, int64_t batch, int64_t seq)
{
    return (lm_build){
        .mode = mode, .batch = batch, .seq = seq, .cache = seq, .precision = { .low = low }
    };
}

/* ---- gradients ---- */

/* The values of a value head, each times its derivative. */
static double value_sum(const runner *r)
{
    const lm_model *m = r->model;
    double sum = 0;
    if (m->value == LM_NONE)
        return 0;
    const lm_tensor *t = &m->graph->value[m->value].t, *d = &m->graph->value[m->dvalue].t;
    for (int64_t i = 0; i < t->dim[0]; i++)
        sum += lm_get(t->dtype, lm_exec_data(r->exec, m->value), i) *
               lm_get(d->dtype, r->mem[m->dvalue], i);
    return sum;
}

static double loss_at(runner *r, double *w, const double *kept, const double *d, int64_t n,
                      double h)
{
    for (int64_t i = 0; i < n; i++)
        w[i] = kept[i] + h * d[i];
    runner_run(r);
    return loss_sum(r) + value_sum(r);
}

static void check_param(runner *r, int p, const char *what)
{
    const lm_param *param = &r->model->param[p];
    int64_t n = param->count;
    double *w = r->mem[param->value], *kept = room((size_t)n, sizeof *w),
           *d = room((size_t)n, sizeof *d);
    double got = 0, norm = 0, h = 1e-5;
    lm_rng rng = lm_rng_make(2, "direction", (uint64_t)p);
    runner_run(r);
    for (int64_t i = 0; i < n; i++) {
        kept[i] = w[i];
        d[i] = lm_rng_normal(rng, (uint64_t)i);
        got += grad_at(r, p, i) * d[i];
        norm += grad_at(r, p, i) * grad_at(r, p, i);
    }
    double want = (8 * (loss_at(r, w, kept, d, n, h) - loss_at(r, w, kept, d, n, -h)) -
                   (loss_at(r, w, kept, d, n, 2 * h) - loss_at(r, w, kept, d, n, -2 * h))) /
                  (12 * h);
    loss_at(r, w, kept, d, n, 0);
    if (!(fabs(got - want) <= 1e-6 * (fabs(want) + sqrt(norm)) + 1e-8))
        fail_msg("%s, %s: gradient %.12g, finite differences %.12g", what,
                 r->model->graph->value[param->value].name, got, want);
    lm_free(kept);
    lm_free(d);
}

static void test_gradients(void **state)
{
    (void)state;
    for (int i = 0; i < N_MODELS; i++)
        for (int dropout = 0; dropout < 2; dropout++) {
            lm_config c;
            runner r;
            lm_build b = build_of(LM_MODE_TRAIN, LM_DTYPE_F64, 2, 6);
            b.dropout = dropout;
            b.value = i % 2;
            read_model(i, &c);
            runner_new(&r, &c, &b, LM_CPU_REF, 1);
            assert_int_equal(r.model->value != LM_NONE, b.value);
            float *block = random_block(r.model);
            runner_weights(&r, block);
            feed(&r, 4);
            for (int64_t k = 0; b.value && k < b.batch * b.seq; k++)
                lm_set(LM_DTYPE_F64, r.mem[r.model->dvalue], k, (double)(k % 5) - 1.5);
            r.step.seed = 77;
            for (int p = 0; p < r.model->n_params; p++)
                check_param(&r, p, models[i]);
            lm_free(block);
            runner_free(&r);
            lm_config_fini(&c);
        }
}

/* Micro-batches add up; the first of a step begins anew. */
static void test_accumulation(void **state)
{
    lm_config c;
    runner r;
    lm_build b = build_of(LM_MODE_TRAIN, LM_DTYPE_F64, 1, 5);
    (void)state;
    for (int i = 0; i < N_MODELS; i++) {
        read_model(i, &c);
        runner_new(&r, &c, &b, LM_CPU_REF, 1);
        size_t n = (size_t)r.model->block;
        float *block = random_block(r.model), *g[3];
        runner_weights(&r, block);
        for (int k = 0; k < 3; k++) { /* batch 1 alone; batch 2 alone; both */
            g[k] = room(n, sizeof(float));
            for (int j = k == 1; j <= (k != 0); j++) {
                feed(&r, 10 + (uint64_t)j);
                r.step.micro = j;
                r.step.more = k == 2 && j;
                runner_run(&r);
            }
            grad_block(&r, g[k]);
        }
        for (size_t k = 0; k < n; k++)
            g[0][k] += g[1][k];
        assert_true(far_apart(g[0], g[2], (int64_t)n) < 1e-6);
        for (int k = 0; k < 3; k++)
            lm_free(g[k]);
        lm_free(block);
        runner_free(&r);
        lm_config_fini(&c);
    }
}

/* The parts that are trained, in turn; "!" means all except this part. */
static const char *const parts[] = { "norm", "ln_",    "bias",      "!bias",      "wpe",    "wte",
                                     "!wte", "q_norm", "ln_f.bias", "!ln_f.bias", "lm_head" };

static bool chosen(void *ctx, const char *name)
{
    const char *part = ctx;
    return part[0] == '!' ? !strstr(name, part + 1) : strstr(name, part) != NULL;
}

static void check_frozen(const lm_config *c, const char *part, const char *what)
{
    runner all, some;
    lm_build b = build_of(LM_MODE_TRAIN, LM_DTYPE_F64, 1, 7);
    runner_new(&all, c, &b, LM_CPU_REF, 1);
    b.trainable = chosen;
    b.ctx = (void *)(uintptr_t)part;
    runner_new(&some, c, &b, LM_CPU_REF, 1);
    float *block = random_block(all.model), *other = random_block(some.model);
    runner_weights(&all, block);
    runner_weights(&some, other); /* whose parameters have another order */
    feed(&all, 1);
    feed(&some, 1);
    runner_run(&all);
    runner_run(&some);
    for (int p = 0; p < all.model->n_params; p++) {
        const char *name = all.model->graph->value[all.model->param[p].value].name;
        bool trained = chosen(b.ctx, name);
        if ((some.model->grad[p] != LM_NONE) != trained)
            fail_msg("%s: training \"%s\", %s has %s gradient", what, part, name,
                     trained ? "no" : "a");
        for (int64_t k = 0; trained && k < all.model->param[p].count; k++)
            assert_true(grad_at(&all, p, k) == grad_at(&some, p, k));
    }
    lm_free(block);
    lm_free(other);
    runner_free(&all);
    runner_free(&some);
}

static void test_frozen(void **state)
{
    (void)state;
    for (int i = 0; i < N_MODELS; i++) {
        lm_config c;
        read_model(i, &c);
        for (size_t k = 0; k < sizeof parts / sizeof *parts; k++)
            check_frozen(&c, parts[k], models[i]);
        lm_config_fini(&c);
    }
}

/* ---- levels ---- */

static void run_level(const lm_config *c, lm_dtype low, int level, int threads, const float *block,
                      float *grads, double *loss)
{
    runner r;
    lm_build b = build_of(LM_MODE_TRAIN, low, 2, 13);
    runner_new(&r, c, &b, (lm_cpu_level)level, threads);
    runner_weights(&r, block);
    feed(&r, 6);
    runner_run(&r);
    *loss = loss_sum(&r);
    grad_block(&r, grads);
    runner_free(&r);
}

static void test_levels(void **state)
{
    (void)state;
    for (int i = 0; i < N_MODELS; i++) {
        lm_config c;
        lm_err e = { 0 };
        lm_model *m;
        lm_build b = build_of(LM_MODE_TRAIN, LM_DTYPE_F32, 1, 1);
        double want, loss, again;
        read_model(i, &c);
        /* A norm after a branch scales the rounding errors of the branch up to the size of its
         * result.  Queries through a low rank are rounded three times, not once. */
        double rough = c.layer[0].norm_after ? 8e-2 : c.layer[0].latent.q_rank ? 5e-2 : 3e-2;
        must(lm_model_build(&c, &b, &m, &e), &e);
        size_t n = (size_t)m->block;
        float *block = random_block(m), *exact = room(n, 4), *g = room(n, 4), *h = room(n, 4);
        run_level(&c, LM_DTYPE_F64, LM_CPU_REF, 1, block, exact, &want);
        for (int level = 0; level <= (int)lm_cpu_detect(); level++)
            for (int bf16 = 0; bf16 < 2; bf16++) {
                lm_dtype low = bf16 ? LM_DTYPE_BF16 : LM_DTYPE_F32;
                run_level(&c, low, level, 1, block, g, &loss);
                run_level(&c, low, level, 3, block, h, &again);
                assert_memory_equal(g, h, n * 4);
                assert_true(loss == again);
                assert_true(fabs(loss / want - 1) < (bf16 ? 1e-2 : 1e-6));
                double d = far_apart(g, exact, (int64_t)n);
                if (!(d < (bf16 ? rough : 2e-6)))
                    fail_msg("%s, %s at %s: gradients differ from those in double by %.2g",
                             models[i], lm_dtype_name(low), lm_cpu_level_name((lm_cpu_level)level),
                             d);
            }
        lm_free(block);
        lm_free(exact);
        lm_free(g);
        lm_free(h);
        lm_model_free(m);
        lm_config_fini(&c);
    }
}

/* ---- documents ---- */

/* Gradients and loss of tokens [from, from + n) of one row, alone. */
static double alone(const lm_config *c, const float *block, const int32_t *tokens,
                    const int32_t *targets, int64_t n, float *grads)
{
    runner r;
    lm_build b = build_of(LM_MODE_TRAIN, LM_DTYPE_F64, 1, n);
    runner_new(&r, c, &b, LM_CPU_REF, 1);
    runner_weights(&r, block);
    memcpy(ids_of(&r, r.model->tokens), tokens, (size_t)n * 4);
    memcpy(ids_of(&r, r.model->targets), targets, (size_t)n * 4);
    runner_run(&r);
    double loss = loss_sum(&r);
    grad_block(&r, grads);
    runner_free(&r);
    return loss;
}

static void test_documents(void **state)
{
    enum { T = 12, CUT = 5 };
    (void)state;
    for (int i = 0; i < N_MODELS; i++) {
        lm_config c;
        runner r;
        lm_build b = build_of(LM_MODE_TRAIN, LM_DTYPE_F64, 1, T);
        b.documents = true;
        read_model(i, &c);
        runner_new(&r, &c, &b, LM_CPU_REF, 1);
        size_t n = (size_t)r.model->block;
        float *block = random_block(r.model), *g = room(n, 4), *x = room(n, 4), *y = room(n, 4);
        runner_weights(&r, block);
        feed(&r, 3);
        for (int t = 0; t < T; t++) {
            ids_of(&r, r.model->lo)[t] = t < CUT ? 0 : CUT;
            ids_of(&r, r.model->pos)[t] = t < CUT ? t : t - CUT;
            if (r.model->hi == LM_NONE)
                continue;
            ids_of(&r, r.model->hi)[t] = t < CUT ? CUT : T;
            ids_of(&r, r.model->types)[t] = t < CUT ? t >= CUT / 2 : t - CUT >= (T - CUT) / 2;
        }
        runner_run(&r);
        grad_block(&r, g);
        const int32_t *tok = ids_of(&r, r.model->tokens), *tar = ids_of(&r, r.model->targets);
        double first = alone(&c, block, tok, tar, CUT, x);
        double second = alone(&c, block, tok + CUT, tar + CUT, T - CUT, y);
        assert_true(fabs(loss_sum(&r) - first - second) < 1e-9);
        for (size_t k = 0; k < n; k++)
            x[k] += y[k];
        assert_true(far_apart(g, x, (int64_t)n) < 1e-6);
        lm_free(block);
        lm_free(g);
        lm_free(x);
        lm_free(y);
        runner_free(&r);
        lm_config_fini(&c);
    }
}

/* ---- generating ---- */

enum { ALL = 12 }; /* tokens of a text */

/* The logits of each row, as [T,V], of one sequence in one run; they are those of the loss too. */
static float *whole(const lm_config *c, lm_dtype low, int level, const float *block,
                    const int32_t *tokens, int64_t n)
{
    runner r, e;
    lm_build b = build_of(LM_MODE_GENERATE, low, 1, n);
    float *logits = room((size_t)(n * c->vocab), sizeof *logits);
    runner_new(&r, c, &b, (lm_cpu_level)level, 1);
    runner_weights(&r, block);
    memcpy(ids_of(&r, r.model->tokens), tokens, (size_t)n * 4);
    all_logits(&r, logits);
    b.mode = LM_MODE_EVAL;
    runner_new(&e, c, &b, (lm_cpu_level)level, 1);
    runner_weights(&e, block);
    memcpy(ids_of(&e, e.model->tokens), tokens, (size_t)n * 4);
    memcpy(ids_of(&e, e.model->targets), tokens, (size_t)n * 4);
    runner_run(&e);
    for (int64_t t = 0; t < n; t++) {
        double sum = 0;
        for (int64_t v = 0; v < c->vocab; v++)
            sum += exp((double)logits[t * c->vocab + v]);
        double want = log(sum) - (double)logits[t * c->vocab + tokens[t]];
        double got = lm_get(e.model->graph->value[e.model->loss].t.dtype,
                            lm_exec_data(e.exec, e.model->loss), t);
        assert_true(fabs(got - want) < (low == LM_DTYPE_BF16 ? 0.1 : 1e-4));
    }
    runner_free(&r);
    runner_free(&e);
    return logits;
}

/* The caches of a layer, in their order, both of graphs that read and write the same. */
static int share_caches(const lm_config *c, int64_t layer, int i, const runner *pre, runner *dec)
{
    static const lm_cache_kind heads[] = { LM_CACHE_KEYS, LM_CACHE_VALUES },
                               delta[] = { LM_CACHE_CONV_TAIL, LM_CACHE_STATE };
    const lm_attention_kind a = c->layer[layer].attention;
    const int n = a == LM_ATTENTION_HEADS || a == LM_ATTENTION_DELTA ? 2 : 1;
    for (int k = 0; k < n; k++, i++) {
        const lm_cache_state *to = &dec->model->cache[i];
        assert_int_equal(to->layer, layer);
        assert_int_equal(to->kind, a == LM_ATTENTION_DELTA    ? delta[k]
                                   : a == LM_ATTENTION_LINEAR ? LM_CACHE_STATE
                                                              : heads[k]);
        lm_exec_bind(dec->exec, to->value, pre->mem[pre->model->cache[i].value]);
    }
    return i;
}

/* Two sequences of different lengths: prompts of so many tokens (the second no longer than the first) in one run, then one
 * token a run. */
static void check_cached(const lm_config *c, lm_dtype low, int level, const int32_t prompt[2],
                         const char *what)
{
    enum { B = 2, PROMPT = ALL - 1, S = ALL + 2 };
    runner pre, dec;
    lm_build b = build_of(LM_MODE_GENERATE, low, B, PROMPT);
    /* a state carries the roundings of a row to all later ones */
    const double most = low == LM_DTYPE_BF16 ? 3e-2 : lm_config_has_states(c) ? 3e-5 : 1e-5;
    int32_t tokens[B][ALL];
    float *want[B];
    b.cache = S;
    runner_new(&pre, c, &b, (lm_cpu_level)level, 1);
    b.seq = 1;
    runner_new(&dec, c, &b, (lm_cpu_level)level, 1);
    float *block = random_block(pre.model);
    runner_weights(&pre, block);
    runner_weights(&dec, block);
    int caches = 0;
    for (int64_t l = 0; l < c->layers; l++)
        caches = share_caches(c, l, caches, &pre, &dec);
    assert_int_equal(dec.model->n_caches, caches);
    for (int s = 0; s < B; s++) {
        for (int t = 0; t < ALL; t++)
            tokens[s][t] = (int32_t)lm_rng_below(lm_rng_make(8, "t", (uint64_t)s), (uint64_t)t, 23);
        want[s] = whole(c, low, level, block, tokens[s], ALL);
        for (int t = 0; t < PROMPT; t++)
            ids_of(&pre, pre.model->tokens)[s * PROMPT + t] = t < prompt[s] ? tokens[s][t] : 0;
        ids_of(&pre, pre.model->fresh)[s] = prompt[s];
        ids_of(&pre, pre.model->rows)[s] = s * PROMPT + prompt[s] - 1;
    }
    for (int step = 0; step <= ALL - prompt[0]; step++) {
        runner *r = step ? &dec : &pre;
        for (int s = 0; step && s < B; s++) {
            int32_t at = prompt[s] + step - 1;
            ids_of(r, r->model->tokens)[s] = tokens[s][at];
            ids_of(r, r->model->pos)[s] = ids_of(r, r->model->used)[s] = at;
            ids_of(r, r->model->fresh)[s] = 1;
            ids_of(r, r->model->rows)[s] = s;
        }
        runner_run(r);
        lm_dtype d = r->model->graph->value[r->model->logits].t.dtype;
        for (int s = 0; s < B; s++) {
            float got[23];
            for (int v = 0; v < 23; v++)
                got[v] = (float)lm_get(d, lm_exec_data(r->exec, r->model->logits), s * 23 + v);
            double far = far_apart(got, want[s] + (prompt[s] + step - 1) * 23, 23);
            if (!(far < most))
                fail_msg("%s, %s at %s: logits of step %d differ by %.2g from a full run", what,
                         lm_dtype_name(low), lm_cpu_level_name((lm_cpu_level)level), step, far);
        }
    }
    lm_free(block);
    lm_free(want[0]);
    lm_free(want[1]);
    runner_free(&pre);
    runner_free(&dec);
}

/* At every split of prompt and steps. */
static void test_generate(void **state)
{
    (void)state;
    for (int i = 0; i < N_MODELS + N_OTHERS; i++) {
        lm_config c;
        read_model(i, &c);
        if (lm_config_bidirectional(&c)) { /* it has nothing to generate */
            lm_err e = { 0 };
            lm_model *m;
            lm_build b = build_of(LM_MODE_GENERATE, LM_DTYPE_F32, 1, 4);
            assert_int_equal(lm_model_build(&c, &b, &m, &e), LM_EUSAGE);
            lm_config_fini(&c);
            continue;
        }
        for (int32_t n = 1; n < ALL; n++)
            check_cached(&c, LM_DTYPE_F64, LM_CPU_REF, (int32_t[]){ n, (n + 1) / 2 }, text_of(i));
        for (int level = 0; level <= (int)lm_cpu_detect(); level++) {
            check_cached(&c, LM_DTYPE_F32, level, (int32_t[]){ 5, 3 }, text_of(i));
            if (i < N_MODELS) /* roundings of BF16 would change choices of experts */
                check_cached(&c, LM_DTYPE_BF16, level, (int32_t[]){ 5, 3 }, text_of(i));
        }
        lm_config_fini(&c);
    }
}

/* Every architecture is in the lists; that of T5, which reads another text, is in test_encoder.c. */
static void every_architecture(void **state)
{
    (void)state;
    for (int a = 0; lm_arch_at(a); a++) {
        bool found = !strcmp(lm_arch_at(a)->name, "t5");
        for (int i = 0; i < N_MODELS + N_OTHERS && !found; i++) {
            lm_config c;
            read_model(i, &c);
            found = c.arch == lm_arch_at(a);
            lm_config_fini(&c);
        }
        if (!found)
            fail_msg("no model of %s", lm_arch_at(a)->name);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gradients),     cmocka_unit_test(test_accumulation),
        cmocka_unit_test(test_frozen),        cmocka_unit_test(test_levels),
        cmocka_unit_test(test_documents),     cmocka_unit_test(test_generate),
        cmocka_unit_test(every_architecture),
    };
    return cmocka_run_group_tests_name("model", tests, NULL, NULL);
}
