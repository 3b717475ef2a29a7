/* SPDX-License-Identifier: Apache-2.0 */
/* test_generate_policy.c -- generation with caches that keep some tokens: against a simulation with plain caches, sorting and
 * masses in double; room for all tokens changes nothing; slots, batches and copies do not matter. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/rng.h"
#include "loaded_case.h"
#include "model/cache_plan.h"
#include "model/generate_keep.h"

enum { V = 96, S = 520, PROMPT = 300, STEPS = 200 };

#define SIZES "\"vocab_size\":96,\"initializer_range\":0.3,\"max_position_embeddings\":600,"
#define LAYERS                                           \
    SIZES "\"hidden_size\":64,\"intermediate_size\":96," \
          "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"head_dim\":32,"
static const char *const configs[] = {
    "{\"model_type\":\"llama\"," LAYERS "\"num_hidden_layers\":3}",
    "{\"model_type\":\"gpt2\"," SIZES
    "\"n_embd\":64,\"n_layer\":2,\"n_head\":2,\"n_positions\":600}",
    "{\"model_type\":\"mistral\"," LAYERS "\"num_hidden_layers\":2,\"sliding_window\":150}",
    "{\"model_type\":\"qwen2\"," SIZES
    "\"hidden_size\":64,\"intermediate_size\":96,\"num_attention_heads\":2,"
    "\"num_key_value_heads\":1,\"num_hidden_layers\":2,\"tie_word_embeddings\":true}",
    "{\"model_type\":\"qwen3\"," LAYERS "\"num_hidden_layers\":2}",
    "{\"model_type\":\"gemma2\"," LAYERS "\"num_hidden_layers\":2,\"sliding_window\":140,"
    "\"query_pre_attn_scalar\":32}",
    "{\"model_type\":\"gemma3_text\"," LAYERS "\"num_hidden_layers\":2,\"sliding_window\":140,"
    "\"sliding_window_pattern\":2,\"query_pre_attn_scalar\":32}",
    "{\"model_type\":\"olmo2\"," SIZES
    "\"hidden_size\":64,\"intermediate_size\":96,\"num_attention_heads\":2,"
    "\"num_key_value_heads\":2,\"num_hidden_layers\":2}",
    "{\"model_type\":\"olmo3\"," SIZES
    "\"hidden_size\":64,\"intermediate_size\":96,\"num_attention_heads\":2,"
    "\"num_key_value_heads\":2,\"num_hidden_layers\":2,\"sliding_window\":150}",
};
enum { N_CONFIGS = sizeof configs / sizeof *configs };

static lm_err err;
static lm_par *par;
static lm_backend *backend;
static uint32_t ids[S];

static void ok(lm_code rc)
{
    if (rc)
        fail_msg("%s: %s", err.where, err.what);
}

static int setup(void **state)
{
    (void)state;
    for (int i = 0; i < S; i++)
        ids[i] = (uint32_t)lm_rng_below(lm_rng_make(7, "test", 0), (uint64_t)i, V);
    return lm_par_new(&par, 2, &err) || lm_backend_cpu(lm_cpu_detect(), par, &backend, &err);
}

static int teardown(void **state)
{
    (void)state;
    lm_backend_close(backend);
    lm_par_free(par);
    return 0;
}

static double apart(const float *x, const float *y)
{
    double d = 0, n = 0;
    for (int i = 0; i < V; i++) {
        d += (double)(x[i] - y[i]) * (double)(x[i] - y[i]);
        n += (double)y[i] * (double)y[i];
    }
    return sqrt(d / n);
}

/* A generator with a specification of caches; NULL: plain. */
typedef struct {
    lm_cache_plan plan;
    lm_generator *g;
} keeper;

static void open_keeper(keeper *k, lm_loaded *w, lm_dtype type, int64_t batch, const char *spec)
{
    *k = (keeper){ 0 };
    if (spec)
        ok(lm_cache_plan_open(spec, &w->config, type, NULL, &k->plan, &err));
    ok(lm_generator_new(w, &(lm_generator_opts){ type, batch, S, k->plan.plan, STEPS }, backend,
                        &k->g, &err));
}

static void close_keeper(keeper *k)
{
    lm_generator_free(k->g);
    lm_cache_plan_fini(&k->plan);
}

static const float *prompt(keeper *k, int64_t slot, int64_t n)
{
    const float *logits;
    ok(lm_generator_prompt(k->g, slot, ids, n, &logits, &err));
    return logits;
}

static const float *step(keeper *k, uint32_t id)
{
    const float *logits;
    int32_t next = (int32_t)id;
    ok(lm_generator_decode(k->g, &next, &logits, &err));
    return logits;
}

/* ---- a simulation ---- */

enum { LAYERS_MOST = 3, HEADS_MOST = 2 };

/* A model that runs a token at a time, whose caches and masses the test changes as it likes; every head keeps as many
 * tokens. */
typedef struct {
    const lm_kv_policy *p;
    lm_model *m;
    lm_exec *x;
    lm_rotary rope;
    int32_t token, pos, used, fresh, rows;
    lm_vid kept[1 + LAYERS_MOST]; /* logits, and qkv of each layer */
    float *cache[2 * LAYERS_MOST];
    double *mass[LAYERS_MOST][HEADS_MOST];
    int32_t at[LAYERS_MOST][HEADS_MOST][S];
    int64_t n; /* tokens in the caches */
} simulation;

static void open_simulation(simulation *s, lm_loaded *w, const lm_kv_policy *p)
{
    const lm_build build = { .mode = LM_MODE_GENERATE,
                             .batch = 1,
                             .seq = 1,
                             .cache = S,
                             .precision = { .low = LM_DTYPE_F32 } };
    int n = 1;
    *s = (simulation){ .p = p, .fresh = 1 };
    ok(lm_model_build(&w->config, &build, &s->m, &err));
    s->kept[0] = s->m->logits;
    for (size_t i = 0; i < s->m->graph->n_nodes; i++)
        if (!strcmp(s->m->graph->node[i].op->name, "attention_cached"))
            s->kept[n++] = s->m->graph->node[i].in[0];
    ok(lm_exec_new(s->m->graph, backend, s->kept, n, &s->x, &err));
    ok(lm_rotary_new(s->m, backend, &s->rope, &err));
    lm_store_bind(w->store, s->m, s->x);
    lm_rotary_bind(&s->rope, s->m, s->x);
    lm_exec_bind(s->x, s->m->tokens, &s->token);
    lm_exec_bind(s->x, s->m->pos, &s->pos);
    lm_exec_bind(s->x, s->m->used, &s->used);
    lm_exec_bind(s->x, s->m->fresh, &s->fresh);
    lm_exec_bind(s->x, s->m->rows, &s->rows);
    for (int i = 0; i < s->m->n_caches; i++) {
        ok(lm_alloc_n(&s->cache[i], HEADS_MOST * S * 64, sizeof(float), "a cache", &err));
        lm_exec_bind(s->x, s->m->cache[i].value, s->cache[i]);
    }
    for (int l = 0; l < w->config.layers; l++)
        for (int h = 0; h < HEADS_MOST; h++)
            ok(lm_alloc_n(&s->mass[l][h], S, sizeof(double), "masses", &err));
}

static void close_simulation(simulation *s)
{
    lm_exec_free(s->x);
    lm_rotary_fini(&s->rope);
    lm_model_free(s->m);
    for (int i = 0; i < 2 * LAYERS_MOST; i++)
        lm_free(s->cache[i]);
    for (int l = 0; l < LAYERS_MOST; l++)
        for (int h = 0; h < HEADS_MOST; h++)
            lm_free(s->mass[l][h]);
}

static float *row_of(simulation *s, int64_t layer, int side, int64_t head, int64_t row)
{
    int64_t D = s->m->config.layer[layer].head_dim;
    return s->cache[2 * layer + side] + (head * S + row) * D;
}

/* Add the probabilities of query head h of the last token. */
static void weigh(simulation *s, int64_t layer, int64_t h)
{
    const lm_layer *y = &s->m->config.layer[layer];
    const float *q = (const float *)lm_exec_data(s->x, s->kept[1 + layer]) + h * y->head_dim;
    int64_t kv = h / (y->heads / y->kv_heads);
    double p[S], most = -1e30, sum = 0;
    for (int64_t j = 0; j <= s->used; j++) {
        const float *k = row_of(s, layer, 0, kv, j);
        p[j] = 0;
        for (int64_t d = 0; d < y->head_dim; d++)
            p[j] += (double)q[d] * (double)k[d];
        p[j] *= y->scale;
        most = fmax(most, p[j]);
    }
    for (int64_t j = 0; j <= s->used; j++)
        sum += p[j] = exp(p[j] - most);
    for (int64_t j = 0; j <= s->used; j++)
        s->mass[layer][kv][j] += p[j] / sum;
}

/* Run a token at `pos` behind the s->n in the caches. */
static const float *simulate(simulation *s, uint32_t id, int64_t pos, bool counts)
{
    const lm_step none = { 0 };
    s->token = (int32_t)id;
    s->pos = (int32_t)pos;
    s->used = (int32_t)s->n;
    ok(lm_exec_run(s->x, &none, &err));
    for (int64_t l = 0; l < s->m->config.layers; l++) {
        const lm_layer *y = &s->m->config.layer[l];
        for (int64_t h = 0; h < y->kv_heads; h++)
            s->at[l][h][s->n] = (int32_t)pos;
        for (int64_t h = 0; counts && h < y->heads; h++)
            weigh(s, l, h);
    }
    s->n++;
    return lm_exec_data(s->x, s->m->logits);
}

typedef struct {
    double score;
    int64_t at;
} entry;

static int by_score(const void *a, const void *b)
{
    const entry *x = a, *y = b;
    return x->score != y->score ? (x->score < y->score) - (x->score > y->score)
                                : (x->at > y->at) - (x->at < y->at);
}

/* The score of token i of a prompt of n: what the policy keeps has the largest. */
static double score_of(simulation *s, int64_t layer, int64_t head, int64_t n, int64_t i)
{
    const lm_kv_policy *p = s->p;
    double sum = 0;
    float random;
    int64_t recent = p->kind == LM_KV_H2O || p->kind == LM_KV_RANDOM
                         ? (int64_t)(p->keep / 2 * (double)n)
                         : p->window;
    if (i >= n - recent)
        return 1e9;
    switch (p->kind) {
    case LM_KV_STREAMING:
        return i < p->sinks ? 1e9 : 0;
    case LM_KV_SNAPKV:
        for (int64_t j = i - p->kernel / 2; j <= i + p->kernel / 2; j++)
            sum += j >= 0 && j < n - recent ? s->mass[layer][head][j] : 0;
        return sum / (double)p->kernel;
    case LM_KV_RANDOM:
        lm_kv_random_masses(p->seed, layer, head, i, 1, &random);
        return (double)random;
    default:
        return s->mass[layer][head][i];
    }
}

static void move(simulation *s, int64_t layer, int64_t head, int64_t from, int64_t to)
{
    size_t row = (size_t)s->m->config.layer[layer].head_dim * sizeof(float);
    for (int side = 0; side < 2; side++)
        memmove(row_of(s, layer, side, head, to), row_of(s, layer, side, head, from), row);
    s->at[layer][head][to] = s->at[layer][head][from];
    s->mass[layer][head][to] = s->mass[layer][head][from];
}

/* Keep `budget` of the tokens of each head. */
static void keep(simulation *s, int64_t budget)
{
    entry sorted[S];
    int64_t n = s->n;
    for (int64_t l = 0; l < s->m->config.layers; l++)
        for (int64_t h = 0; h < s->m->config.layer[l].kv_heads; h++) {
            bool stays[S] = { false };
            for (int64_t i = 0; i < n; i++)
                sorted[i] = (entry){ score_of(s, l, h, n, i), i };
            qsort(sorted, (size_t)n, sizeof *sorted, by_score);
            for (int64_t i = 0; i < budget; i++)
                stays[sorted[i].at] = true;
            for (int64_t i = 0, to = 0; i < n; i++)
                if (stays[i])
                    move(s, l, h, i, to++);
            if (s->p->kind == LM_KV_RANDOM)
                for (int64_t i = 0; i < budget; i++) {
                    float mass;
                    lm_kv_random_masses(s->p->seed, l, h, s->at[l][h][i], 1, &mass);
                    s->mass[l][h][i] = (double)mass;
                }
            for (int64_t i = budget; i < S; i++)
                s->mass[l][h][i] = 0;
        }
    s->n = budget;
}

/* The row that leaves before a token at `next` comes: an old one of the least mass. */
static int64_t victim(simulation *s, int64_t layer, int64_t head, int64_t next)
{
    const lm_kv_policy *p = s->p;
    int64_t recent = p->kind == LM_KV_STREAMING ? p->window : (int64_t)(p->keep / 2 * PROMPT);
    int64_t worst = -1;
    double bar = 1e30;
    for (int64_t i = 0; i < s->n; i++) {
        int32_t at = s->at[layer][head][i];
        double x = p->kind == LM_KV_STREAMING ? at : s->mass[layer][head][i];
        if (at > next - recent || (p->kind == LM_KV_STREAMING && at < p->sinks))
            continue;
        if (x < bar || (x == bar && at > s->at[layer][head][worst])) {
            bar = x;
            worst = i;
        }
    }
    return worst;
}

/* A step of a policy that replaces. */
static const float *replace(simulation *s, uint32_t id, int64_t next)
{
    int64_t out[LAYERS_MOST][HEADS_MOST], n = s->n;
    for (int64_t l = 0; l < s->m->config.layers; l++)
        for (int64_t h = 0; h < s->m->config.layer[l].kv_heads; h++)
            out[l][h] = victim(s, l, h, next);
    const float *logits = simulate(s, id, next, s->p->kind == LM_KV_H2O);
    for (int64_t l = 0; l < s->m->config.layers; l++)
        for (int64_t h = 0; h < s->m->config.layer[l].kv_heads; h++) {
            float mass;
            lm_kv_random_masses(s->p->seed, l, h, next, 1, &mass);
            if (s->p->kind == LM_KV_RANDOM)
                s->mass[l][h][n] = (double)mass;
            move(s, l, h, n, out[l][h]);
            s->mass[l][h][n] = 0;
        }
    s->n = n;
    return logits;
}

static int by_position(const void *a, const void *b)
{
    return *(const int32_t *)a - *(const int32_t *)b;
}

/* The generator's heads hold the tokens of the simulation; `new`: one of these is not counted yet. */
static void same_tokens(keeper *k, simulation *s, const char *spec, int64_t step)
{
    for (int64_t l = 0; l < s->m->config.layers; l++)
        for (int64_t h = 0; h < s->m->config.layer[l].kv_heads; h++) {
            int32_t got[S], want[S];
            int64_t n;
            memcpy(got, generator_keep_positions(k->g, 0, l, h, &n), sizeof *got * (size_t)s->n);
            memcpy(want, s->at[l][h], sizeof *want * (size_t)s->n);
            qsort(got, (size_t)n, sizeof *got, by_position);
            qsort(want, (size_t)n, sizeof *want, by_position);
            if (n != s->n || memcmp(got, want, (size_t)n * sizeof *got))
                fail_msg("%s, step %d: other tokens in layer %d, head %d", spec, (int)step, (int)l,
                         (int)h);
        }
}

static void as_simulated(const char *config, const char *spec)
{
    lm_loaded w;
    keeper k;
    simulation *s;
    int64_t from = 0;
    loaded_of(config, LM_DTYPE_F32, par, backend, &w);
    open_keeper(&k, &w, LM_DTYPE_F32, 1, spec);
    ok(lm_alloc_n(&s, 1, sizeof *s, "a simulation", &err));
    open_simulation(s, &w, k.plan.plan->policy);
    if (s->p->kind == LM_KV_SNAPKV)
        from = PROMPT - s->p->window;
    const float *want = NULL, *got = prompt(&k, 0, PROMPT);
    for (int64_t i = 0; i < PROMPT; i++)
        want = simulate(s, ids[i], i, i >= from);
    double worst = apart(got, want);
    keep(s, lm_kv_policy_budget(s->p, PROMPT, 0, 1));
    same_tokens(&k, s, spec, -1);
    for (int64_t i = PROMPT; i < PROMPT + STEPS; i++) {
        got = step(&k, ids[i]);
        if (i > PROMPT && lm_kv_policy_replaces(s->p)) /* up to the step before */
            same_tokens(&k, s, spec, i - PROMPT);
        want = lm_kv_policy_replaces(s->p) ? replace(s, ids[i], i) : simulate(s, ids[i], i, false);
        double d = apart(got, want);
        worst = d > worst ? d : worst;
        if (d > 2e-4)
            fail_msg("%s, step %d: logits are apart by %g", spec, (int)(i - PROMPT), d);
    }
    close_simulation(s);
    lm_free(s);
    close_keeper(&k);
    lm_loaded_fini(&w);
}

static void policies(void **state)
{
    static const char *const specs[] = { "h2o:keep=0.3", "streaming:sinks=4,window=60",
                                         "random:keep=0.4,seed=3", "snapkv:capacity=80,window=16" };
    (void)state;
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++) {
        as_simulated(configs[0], specs[i]);
        as_simulated(configs[1], specs[i]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(policies),
    };
    return cmocka_run_group_tests_name("generate_policy", tests, setup, teardown);
}
