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
#include "cached_case.h"
#include "kv/merge.h"
#include "model/cache_plan.h"
#include "model/generate_cache.h"
#include "model/generate_keep.h"

enum { S = 520, PROMPT = 300, STEPS = 200 };

/* A generator with a specification of caches; NULL: plain. */
typedef struct {
    lm_cache_plan plan;
    lm_generator *g;
} keeper;

static void open_keeper(keeper *k, lm_loaded *w, lm_dtype type, int64_t batch, const char *spec)
{
    *k = (keeper){ 0 };
    if (lm_store_find(w->store, LM_KEPT_PARAM, 0)->format->element != type) { /* of another test */
        lm_store_free(w->store);
        loaded_draw(w, type, par, backend);
    }
    if (spec)
        ok(lm_cache_plan_open(spec, &w->config, type, NULL, &k->plan, &err));
    ok(lm_generator_new(
        w,
        &(lm_generator_opts){
            .dtype = type, .batch = batch, .context = S, .kv = k->plan.plan, .most_new = STEPS },
        backend, &k->g, &err));
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
    int32_t turned[LAYERS_MOST][HEADS_MOST][S]; /* the position by which each key is rotated */
    int64_t n;                                  /* tokens in the caches */
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

/* Rotate a key of plain rotary embedding from its position to another one. */
static void turn(simulation *s, int64_t layer, int64_t head, int64_t row, int32_t to)
{
    const lm_rope_config *r = &s->m->config.rope[0];
    float *k = row_of(s, layer, 0, head, row);
    int32_t *from = &s->turned[layer][head][row];
    for (int64_t j = 0; j < r->dim / 2 && *from != to; j++) {
        float f = (float)(1.0 / (float)pow(r->theta, 2.0 * (double)j / (double)r->dim));
        double angle = (double)((float)to * f) - (double)((float)*from * f);
        double x = (double)k[j], y = (double)k[j + r->dim / 2];
        k[j] = (float)(x * cos(angle) - y * sin(angle));
        k[j + r->dim / 2] = (float)(y * cos(angle) + x * sin(angle));
    }
    *from = to;
}

/* Each token to its rank. */
static void turn_all(simulation *s)
{
    for (int64_t l = 0; l < s->m->config.layers; l++)
        for (int64_t h = 0; h < s->m->config.layer[l].kv_heads; h++)
            for (int64_t i = 0; i < s->n; i++) {
                int32_t rank = 0;
                for (int64_t j = 0; j < s->n; j++)
                    rank += s->at[l][h][j] < s->at[l][h][i];
                turn(s, l, h, i, rank);
            }
}

/* Run a token at `pos` behind the s->n in the caches. */
static const float *simulate(simulation *s, uint32_t id, int64_t pos, bool counts)
{
    const lm_step none = { 0 };
    if (s->p->ranked)
        turn_all(s);
    s->token = (int32_t)id;
    s->pos = (int32_t)(s->p->ranked ? s->n : pos);
    s->used = (int32_t)s->n;
    ok(lm_exec_run(s->x, &none, &err));
    for (int64_t l = 0; l < s->m->config.layers; l++) {
        const lm_layer *y = &s->m->config.layer[l];
        for (int64_t h = 0; h < y->kv_heads; h++) {
            s->at[l][h][s->n] = (int32_t)pos;
            s->turned[l][h][s->n] = s->pos;
        }
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
    s->turned[layer][head][to] = s->turned[layer][head][from];
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
    for (int64_t i = 0; i < PROMPT; i++) {
        if (s->n == w.config.max_positions) /* the next part of a long prompt */
            keep(s, s->p->sinks + s->p->window);
        want = simulate(s, ids[i], i, i >= from);
    }
    double worst = apart(got, want);
    assert_true(worst < 2e-4);
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
                                         "streaming:sinks=4,window=60,positions=text",
                                         "random:keep=0.4,seed=3", "snapkv:capacity=80,window=16" };
    (void)state;
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++) {
        as_simulated(configs[LLAMA], specs[i]);
        as_simulated(configs[GPT2], specs[i]);
    }
}

/* Tokens at their ranks: a text of more tokens than the model has positions, of which prompts are read in parts; parts of
 * as many tokens as stay, of fewer and of more; keys with a norm and without. */
static void beyond_the_positions(void **state)
{
#define LONG(type, positions)                                                   \
    "{\"model_type\":\"" type "\",\"vocab_size\":96,\"initializer_range\":0.3," \
    "\"max_position_embeddings\":" positions "," CACHED_WIDTHS                  \
    "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"head_dim\":32,\"num_hidden_layers\":2}"
    lm_loaded w;
    keeper k = { 0 };
    (void)state;
    as_simulated(LONG("llama", "128"), "streaming:sinks=4,window=60");
    as_simulated(LONG("llama", "120"), "streaming:sinks=3,window=90");
    as_simulated(LONG("qwen3", "150"), "streaming:sinks=0,window=40");
    loaded_of(LONG("llama", "128"), LM_DTYPE_F32, par, backend, &w);
    ok(lm_cache_plan_open("streaming:sinks=4,window=124", &w.config, LM_DTYPE_F32, NULL, &k.plan,
                          &err));
    assert_int_equal(
        lm_generator_new(&w,
                         &(lm_generator_opts){
                             .dtype = LM_DTYPE_F32, .batch = 1, .context = S, .kv = k.plan.plan },
                         backend, &k.g, &err),
        LM_EUSAGE);
    assert_non_null(strstr(err.what, "128 tokens stay, and the model has 128 positions"));
    err = (lm_err){ 0 };
    close_keeper(&k);
    lm_loaded_fini(&w);
}

/* Learned positions and windows cannot change while a token stays. */
static void positions_of_the_text(void **state)
{
    static const int other[] = { GPT2, GEMMA3, MISTRAL };
    (void)state;
    for (size_t i = 0; i < 4; i++) {
        lm_loaded w;
        lm_cache_plan p;
        bool last = i == 3;
        loaded_of(configs[last ? LLAMA : other[i]], LM_DTYPE_F32, par, backend, &w);
        ok(lm_cache_plan_open("streaming+int4", &w.config, LM_DTYPE_F32, NULL, &p, &err));
        assert_int_equal(p.plan->policy->ranked, last);
        assert_int_equal(p.plan->side[LM_KV_K].pre_rope, last);
        assert_int_equal(p.plan->side[LM_KV_K].rotate, !last);
        assert_true(p.plan->side[LM_KV_V].rotate);
        lm_cache_plan_fini(&p);
        assert_int_equal(lm_cache_plan_open("streaming:positions=cache", &w.config, LM_DTYPE_F32,
                                            NULL, &p, &err),
                         last ? LM_OK : LM_EUSAGE);
        if (!last)
            assert_string_equal(err.todo, "choose positions=text");
        err = (lm_err){ 0 };
        lm_cache_plan_fini(&p);
        lm_loaded_fini(&w);
    }
}

/* ---- merging ---- */

/* Merge the tokens of all heads, by the functions of kv/merge.h; positions are those of pivots. */
static void merge(simulation *s)
{
    static float key[S * 64], mass[S], row[64];
    static int32_t run[HEADS_MOST][S];
    static bool mark[S];
    static double work[2 * S], weight[S];
    static lm_kv_joint joint[S];
    int64_t n = s->n, D = s->m->config.layer[0].head_dim, left = 0;
    for (int64_t l = 0; l < s->m->config.layers; l++) {
        lm_kv_policy p = *s->p;
        for (int pass = 0; pass < 2; pass++) { /* all heads keep as many */
            for (int64_t h = 0; h < s->m->config.layer[l].kv_heads; h++) {
                for (int64_t i = 0; i < n; i++)
                    mass[i] = (float)s->mass[l][h][i];
                memcpy(key, row_of(s, l, 0, h, 0), (size_t)(n * D) * sizeof *key);
                int64_t runs = lm_kv_merge_runs(&p, n, D, key, D, mass, run[h], joint, mark, work);
                left = pass == 0 && h == 0 ? runs : runs > left ? runs : left;
            }
            p.keep = ((double)left + 0.5) / (double)n;
        }
        for (int64_t h = 0; h < s->m->config.layer[l].kv_heads; h++)
            for (int64_t i = 0, end, to = 0; i < n; i = end, to++) {
                for (end = i + 1; end < n && run[h][end] == i; end++)
                    ;
                for (int64_t j = i; j < end; j++)
                    mass[j] = (float)s->mass[l][h][j];
                int64_t pivot = lm_kv_merge_weights(s->p, end - i, D, row_of(s, l, 0, h, i), D,
                                                    mass + i, weight);
                for (int side = 0; side < 2; side++) {
                    lm_kv_merge_rows(end - i, D, row_of(s, l, side, h, i), D, weight, row);
                    memcpy(row_of(s, l, side, h, to), row, (size_t)D * sizeof *row);
                }
                s->at[l][h][to] = (int32_t)(i + pivot);
            }
    }
    s->n = left;
}

/* Layers merge differently many, so the model has one. */
static void merging(void **state)
{
    static const char config[] =
        "{\"model_type\":\"llama\"," CACHED_LAYERS "\"num_hidden_layers\":1}";
    static const char *const specs[] = { "kvmerge:keep=0.6,threshold=0",
                                         "kvmerge:keep=0.1,threshold=-0.2,rule=pivot" };
    (void)state;
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++) {
        lm_loaded w;
        keeper k;
        simulation *s;
        loaded_of(config, LM_DTYPE_F32, par, backend, &w);
        open_keeper(&k, &w, LM_DTYPE_F32, 1, specs[i]);
        ok(lm_alloc_n(&s, 1, sizeof *s, "a simulation", &err));
        open_simulation(s, &w, k.plan.plan->policy);
        const float *want, *got = prompt(&k, 0, PROMPT);
        for (int64_t j = 0; j < PROMPT; j++)
            simulate(s, ids[j], j, true);
        merge(s);
        assert_true(s->n < PROMPT - 20);
        same_tokens(&k, s, specs[i], -1);
        for (int64_t j = PROMPT; j < PROMPT + 20; j++) {
            got = step(&k, ids[j]);
            want = simulate(s, ids[j], j, false);
            if (apart(got, want) > 2e-4)
                fail_msg("%s: logits are apart by %g", specs[i], apart(got, want));
        }
        close_simulation(s);
        lm_free(s);
        close_keeper(&k);
        lm_loaded_fini(&w);
    }
}

/* ---- what must not matter ---- */

/* The largest difference from plain caches over a prompt and steps behind it. */
static double apart_from_plain(lm_loaded *w, lm_dtype type, const char *spec, int64_t steps)
{
    keeper plain, k;
    open_keeper(&plain, w, type, 1, NULL);
    open_keeper(&k, w, type, 1, spec);
    double worst = apart(prompt(&k, 0, PROMPT), prompt(&plain, 0, PROMPT));
    for (int64_t i = PROMPT; i < PROMPT + steps; i++) {
        double d = apart(step(&k, ids[i]), step(&plain, ids[i]));
        worst = d > worst ? d : worst;
    }
    close_keeper(&k);
    close_keeper(&plain);
    return worst;
}

/* With room for all tokens the bits of logits are those of plain caches.  Streaming keeps keys without the rotary
 * embedding, which the kernel applies in its own order of sums, in BF16 without rounding keys behind it. */
static void room_for_all(void **state)
{
    static const struct {
        const char *spec;
        double most[2]; /* in F32, BF16 */
    } kept[] = {
        { "snapkv:capacity=500", { 0, 0 } },
        { "streaming:sinks=4,window=500", { 1e-4, 0.2 } },
        { "snapkv:capacity=400,budget=pyramid", { 0, 0 } },
        { "kvmerge:threshold=1,keep=0.9", { 0, 0 } },
    };
    (void)state;
    for (size_t c = 0; c < MODELS; c++)
        for (int low = 0; low < 2; low++) {
            lm_loaded w;
            loaded_of(configs[c], low ? LM_DTYPE_BF16 : LM_DTYPE_F32, par, backend, &w);
            for (size_t i = 0; i < sizeof kept / sizeof *kept; i++) {
                double d =
                    apart_from_plain(&w, low ? LM_DTYPE_BF16 : LM_DTYPE_F32, kept[i].spec, 40);
                if (d > kept[i].most[low])
                    fail_msg("config %zu, %s: apart by %g", c, kept[i].spec, d);
            }
            lm_loaded_fini(&w);
        }
}

/* Beside codes the same tokens stay: the error is that of the codes.  In BF16 policies run. */
static void other_forms(void **state)
{
    static const struct {
        const char *spec, *alike;
        lm_dtype type;
        double most;
    } forms[] = {
        { "snapkv:capacity=80,window=16+int8", "snapkv:capacity=80,window=16", LM_DTYPE_F32, 0.12 },
        { "snapkv:capacity=80,window=16+kivi:bits=8,residual=64,group=16",
          "snapkv:capacity=80,window=16", LM_DTYPE_F32, 0.12 },
        { "streaming:window=60+int6", "streaming:window=60", LM_DTYPE_F32, 0.4 },
        { "streaming:window=60+q8_0", "streaming:window=60", LM_DTYPE_F32, 0.12 },
        { "streaming:window=60+k=auto,v=int8", "streaming:window=60", LM_DTYPE_F32, 0.12 },
        { "h2o:keep=0.4,protect=prompt+int8", "h2o:keep=0.4,protect=prompt", LM_DTYPE_F32, 0.3 },
        { "random:keep=0.4,budget=pyramid+int8", "random:keep=0.4,budget=pyramid", LM_DTYPE_F32,
          0.12 },
        { "h2o:keep=0.4,budget=pyramid", NULL, LM_DTYPE_BF16, 2 },
        { "kvmerge:threshold=0.2+int8", "kvmerge:threshold=0.2", LM_DTYPE_F32, 0.12 },
    };
    (void)state;
    for (size_t c = 0; c < MODELS; c++)
        for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
            lm_loaded w;
            keeper a, b;
            double mean = 0;
            loaded_of(configs[c], forms[i].type, par, backend, &w);
            open_keeper(&a, &w, forms[i].type, 1, forms[i].spec);
            open_keeper(&b, &w, forms[i].type, 1, forms[i].alike);
            prompt(&a, 0, PROMPT);
            prompt(&b, 0, PROMPT);
            for (int64_t j = PROMPT; j < PROMPT + 30; j++)
                mean += apart(step(&a, ids[j]), step(&b, ids[j])) / 30;
            if (mean > forms[i].most)
                fail_msg("config %zu, %s: apart by %g", c, forms[i].spec, mean);
            close_keeper(&a);
            close_keeper(&b);
            lm_loaded_fini(&w);
        }
}

/* Slots side by side, prompts of other lengths, copies within a sequence: each continues as one alone. */
static void slots_alone(void **state)
{
    static const char *const specs[] = { "h2o:keep=0.3", "snapkv:capacity=80,window=16+int8",
                                         "streaming:window=50", "random:keep=0.2",
                                         "kvmerge:threshold=0.2" };
    static const int64_t length[3] = { 300, 40, 171 };
    (void)state;
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++) {
        lm_loaded w;
        keeper all, one;
        float want[3][40][V];
        loaded_of(configs[i % 2 ? GEMMA3 : LLAMA], LM_DTYPE_F32, par, backend, &w);
        open_keeper(&all, &w, LM_DTYPE_F32, 4, specs[i]);
        open_keeper(&one, &w, LM_DTYPE_F32, 1, specs[i]);
        for (int s = 0; s < 3; s++) {
            prompt(&one, 0, length[s]);
            for (int64_t j = 0; j < 40; j++)
                memcpy(want[s][j], step(&one, ids[length[s] + j]), sizeof want[s][j]);
        }
        for (int s = 0; s < 3; s++)
            prompt(&all, s + 1, length[s]);
        for (int64_t j = 0; j < 40; j++) {
            const float *logits;
            int32_t next[4] = { -1 };
            if (j == 7) { /* the last moves to the gap */
                ok(lm_generator_copy(all.g, 3, 0, &err));
                prompt(&all, 3, 33);
            }
            for (int s = 0; s < 3; s++) {
                int slot = s == 2 && j >= 7 ? 0 : s + 1;
                next[slot] = (int32_t)ids[length[s] + j];
            }
            if (j >= 7)
                next[3] = -1;
            ok(lm_generator_decode(all.g, next, &logits, &err));
            for (int s = 0; s < 3; s++) {
                int slot = s == 2 && j >= 7 ? 0 : s + 1;
                double d = apart(logits + slot * V, want[s][j]);
                if (d > 1e-4)
                    fail_msg("%s: sequence %d, step %d: apart by %g", specs[i], s, (int)j, d);
            }
        }
        close_keeper(&all);
        close_keeper(&one);
        lm_loaded_fini(&w);
    }
}

/* Layers with a window keep all tokens, and are none of the pyramid's: the others keep `capacity` on average. */
static void pyramids_over_layers_that_drop(void **state)
{
    static const char config[] = "{\"model_type\":\"gemma3_text\"," CACHED_LAYERS
                                 "\"num_hidden_layers\":6,\"sliding_window\":140,"
                                 "\"sliding_window_pattern\":2,\"query_pre_attn_scalar\":32}";
    lm_loaded w;
    keeper k;
    int64_t sum = 0, first = 0, last = 0;
    (void)state;
    loaded_of(config, LM_DTYPE_F32, par, backend, &w);
    open_keeper(&k, &w, LM_DTYPE_F32, 1, "snapkv:capacity=60,window=10,budget=pyramid");
    prompt(&k, 0, PROMPT);
    for (int64_t l = 0; l < 6; l++) {
        int64_t held = lm_generator_held(k.g, 0, l);
        if (w.config.layer[l].window) {
            assert_int_equal(held, PROMPT);
            continue;
        }
        first = first ? first : held;
        last = held;
        sum += held;
    }
    assert_int_equal(sum, 3 * 60);
    assert_true(first > 100 && last < 20);
    close_keeper(&k);
    lm_loaded_fini(&w);
}

/* A slot has room for as many new tokens as were announced, rounded up to pages; then steps are refused. */
static void room_for_new_tokens(void **state)
{
    lm_loaded w;
    keeper k = { 0 };
    int32_t next = 1;
    (void)state;
    loaded_of(configs[LLAMA], LM_DTYPE_F32, par, backend, &w);
    ok(lm_cache_plan_open("snapkv:capacity=60,window=8", &w.config, LM_DTYPE_F32, NULL, &k.plan,
                          &err));
    ok(lm_generator_new(
        &w,
        &(lm_generator_opts){
            .dtype = LM_DTYPE_F32, .batch = 1, .context = S, .kv = k.plan.plan, .most_new = 4 },
        backend, &k.g, &err));
    prompt(&k, 0, PROMPT);
    for (int i = 0; i < 4; i++)
        ok(lm_generator_decode(k.g, &next, NULL, &err));
    assert_int_equal(lm_generator_decode(k.g, &next, NULL, &err), LM_EUSAGE);
    assert_string_equal(err.what, "64 tokens are the capacity of layer 0");
    err = (lm_err){ 0 };
    close_keeper(&k);
    lm_loaded_fini(&w);
}

/* Slots have room for the tokens that stay and new ones, and prompts for one context. */
static void room(void **state)
{
    lm_loaded w;
    keeper plain, k;
    const float *logits;
    int32_t next[8] = { 0, -1, -1, -1, -1, -1, -1, -1 };
    (void)state;
    loaded_of(configs[LLAMA], LM_DTYPE_F32, par, backend, &w);
    open_keeper(&plain, &w, LM_DTYPE_F32, 8, NULL);
    open_keeper(&k, &w, LM_DTYPE_F32, 8, "streaming:sinks=4,window=59,positions=text");
    size_t whole = lm_generator_cache_bytes(plain.g), one = whole / 8;
    assert_int_equal(lm_generator_cache_bytes(k.g), one + 8 * (one / S * 64));
    prompt(&k, 0, PROMPT);
    assert_int_equal(generator_keep_used(k.g, 0, 1), 63);
    assert_int_equal(lm_generator_extend(k.g, 0, ids, 3, NULL, &err), LM_EUSAGE);
    assert_non_null(strstr(err.what, "dropped tokens"));
    err = (lm_err){ 0 };
    const lm_kv_image image = { 0 };
    assert_int_equal(lm_generator_resume(k.g, 0, &image, ids, 3, par, &err), LM_EUSAGE);
    assert_non_null(strstr(err.what, "drop tokens"));
    err = (lm_err){ 0 };
    for (int64_t i = 0; i < 100; i++)
        ok(lm_generator_decode(k.g, next, &logits, &err));
    int64_t n, sinks = 0, newest = 0;
    const int32_t *at = generator_keep_positions(k.g, 0, 2, 1, &n);
    for (int64_t i = 0; i < n; i++) {
        sinks += at[i] < 4;
        newest +=
            at[i] >= PROMPT + 99 - 59; /* of the last token the row is chosen, but not counted */
    }
    assert_int_equal(n, 63);
    assert_int_equal(sinks, 4);
    assert_int_equal(newest, 59);
    close_keeper(&k);
    close_keeper(&plain);
    lm_loaded_fini(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(policies),
        cmocka_unit_test(merging),
        cmocka_unit_test(room_for_all),
        cmocka_unit_test(other_forms),
        cmocka_unit_test(slots_alone),
        cmocka_unit_test(room),
        cmocka_unit_test(beyond_the_positions),
        cmocka_unit_test(positions_of_the_text),
        cmocka_unit_test(pyramids_over_layers_that_drop),
        cmocka_unit_test(room_for_new_tokens),
    };
    return cmocka_run_group_tests_name("generate_policy", tests, open_cached, close_cpu);
}
