/* SPDX-License-Identifier: Apache-2.0 */
/* test_generate_kv.c -- generation over coded caches, for each architecture and many methods: logits are those of plain
 * caches in which keys and values are replaced by what the cache returns for them (kv/store.h); they do not depend on the
 * slot, the batch, the parts of a prompt or a copy; keys may be stored before their rotation; methods of 8 bits are close to
 * plain caches. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "cached_case.h"
#include "kv/store.h"
#include "model/cache_plan.h"
#include "model/generate_impl.h"

enum { S = 430, PROMPT = 290, STEPS = 36 };

/* most: of the relative difference of logits from those of plain caches. */
static const struct {
    const char *text;
    double most;
} specs[] = {
    { "int8", 0.08 },
    { "int4", 1 },
    { "int4:rotate=off", 1 },
    { "int2", 2 },
    { "int3:axis=channel,group=16", 2 },
    { "int8:sinks=4,residual=7", 0.08 },
    { "fp8", 0.6 },
    { "fp8_e5m2:scale=token", 0.6 },
    { "q8_0", 0.08 },
    { "q4_0", 1 },
    { "kivi", 2 },
    { "kivi:bits=8,group=16,residual=64", 0.08 },
    { "k4v4", 1 },
    { "k3v3", 2 },
    { "k4v2", 2 },
    { "k=q8_0,v=int8:residual=20", 0.08 },
    { "k=auto,v=int4", 1 },
    { "k=kivi,v=auto", 2 },
    { "layers.0=auto;*=int4", 1 },
    { "layers.-1=kivi:bits=4;*=k8v4", 1 },
};
enum { N_SPECS = sizeof specs / sizeof *specs };

static void open_plan(const lm_loaded *w, lm_dtype type, const char *text, lm_cache_plan *p)
{
    ok(lm_cache_plan_open(text, &w->config, type, NULL, p, &err));
}

static lm_generator *open_gen(lm_loaded *w, lm_dtype type, int64_t batch, const lm_cache_plan *p)
{
    lm_generator *g;
    ok(lm_generator_new(w,
                        &(lm_generator_opts){
                            .dtype = type, .batch = batch, .context = S, .kv = p ? p->plan : NULL },
                        backend, &g, &err));
    return g;
}

/* ---- the definition ---- */

/* A generator with plain caches, and the keys and values as they were put there: [cache][token][heads, width]. */
typedef struct {
    lm_generator *g;
    float *kept[8];
    int64_t rows; /* kept so far */
} definition;

static void open_definition(lm_loaded *w, definition *d)
{
    *d = (definition){ .g = open_gen(w, LM_DTYPE_F32, 1, NULL) };
    for (int i = 0; i < generator_model(d->g)->n_caches; i++)
        ok(lm_alloc_n(&d->kept[i], S * 256, sizeof(float), "rows", &err));
}

static void close_definition(definition *d)
{
    for (int i = 0; i < 8; i++)
        lm_free(d->kept[i]);
    lm_generator_free(d->g);
}

static float *row_of(const definition *d, int cache, int64_t head, int64_t token)
{
    const slot_cache *y = &d->g->caches[cache];
    int64_t width = (int64_t)(y->row_bytes / sizeof(float));
    return (float *)(void *)(d->g->cache + y->at) + (head * S + token) * width;
}

/* Keep the new rows, and replace all rows by what the cache returns. */
static void store_rows(definition *d, const lm_cache_plan *p)
{
    static float y[S * 256];
    int64_t n = lm_generator_used(d->g, 0);
    for (int i = 0; i < generator_model(d->g)->n_caches; i++) {
        const lm_kv_site *at = &p->site[generator_model(d->g)->cache[i].layer];
        int64_t K = at->kv_heads, D = at->head_dim;
        for (int64_t t = d->rows; t < n; t++)
            for (int64_t h = 0; h < K; h++)
                memcpy(d->kept[i] + (t * K + h) * D, row_of(d, i, h, t), (size_t)D * sizeof(float));
        ok(lm_kv_store(&p->plan->side[i], p->plan->page, K, D, d->kept[i], n, y, &err));
        for (int64_t t = 0; t < n; t++)
            for (int64_t h = 0; h < K; h++)
                memcpy(row_of(d, i, h, t), y + (t * K + h) * D, (size_t)D * sizeof(float));
    }
    d->rows = n;
}

static const float *define_prompt(definition *d, const lm_cache_plan *p, int64_t n)
{
    const float *logits = NULL;
    d->g->used[0] = d->rows = 0;
    for (int64_t at = 0; at < n; at += LM_KV_CHUNK) {
        ok(lm_generator_extend(d->g, 0, ids + at, n - at < LM_KV_CHUNK ? n - at : LM_KV_CHUNK,
                               &logits, &err));
        store_rows(d, p);
    }
    return logits;
}

/* The largest difference from the definition, over a prompt and the steps behind it. */
static double difference(definition *d, lm_loaded *w, const char *spec)
{
    lm_cache_plan p;
    open_plan(w, LM_DTYPE_F32, spec, &p);
    lm_generator *g = open_gen(w, LM_DTYPE_F32, 1, &p);
    const float *got, *want = define_prompt(d, &p, PROMPT);
    ok(lm_generator_prompt(g, 0, ids, PROMPT, &got, &err));
    double worst = apart(got, want);
    for (int i = PROMPT; i < PROMPT + STEPS; i++) {
        int32_t next = (int32_t)ids[i];
        ok(lm_generator_decode(d->g, &next, &want, &err));
        store_rows(d, &p);
        ok(lm_generator_decode(g, &next, &got, &err));
        worst = fmax(worst, apart(got, want));
    }
    lm_generator_free(g);
    lm_cache_plan_fini(&p);
    return worst;
}

/* A number that lies almost between two codes may get the other one, as sums and rotations are rounded otherwise:
 * this is rare, and changes logits by a part of what codes change them. */
static void logits_are_those_of_the_definition(void **state)
{
    int equal = 0;
    (void)state;
    for (int k = 0; k < MODELS; k++) {
        lm_loaded w;
        definition d;
        loaded_of(configs[k], LM_DTYPE_F32, par, backend, &w);
        open_definition(&w, &d);
        for (int s = 0; s < N_SPECS; s++) {
            if ((s + k) % 2) /* half of the combinations */
                continue;
            double worst = difference(&d, &w, specs[s].text);
            if (!(worst < 0.05))
                fail_msg("config %d, %s: %g from the definition", k, specs[s].text, worst);
            equal += worst < 1e-3;
        }
        close_definition(&d);
        lm_loaded_fini(&w);
    }
    assert_true(equal > MODELS * N_SPECS * 3 / 8);
}

/* ---- the same bits ---- */

/* The logits of slot `at`, of g as it is, after the steps in which it gets ids[from] and on. */
static void run_steps(lm_generator *g, int64_t at, int from, int n, float *out)
{
    int32_t next[12];
    const float *logits = NULL;
    for (int i = from; i < from + n; i++) {
        for (int64_t s = 0; s < lm_generator_batch(g); s++)
            next[s] = s == at ? (int32_t)ids[i] : lm_generator_used(g, s) > 0 ? (int32_t)s : -1;
        ok(lm_generator_decode(g, next, &logits, &err));
    }
    memcpy(out, logits + at * V, V * sizeof *out);
}

/* A sequence in slot 3 of 5, another one in slot 0, and copies of it; prompts in parts; against it alone, whose last logits
 * are `one`. */
static void check_bits(int config, lm_dtype type, const char *spec, float one[V])
{
    lm_loaded w;
    lm_cache_plan p;
    float other[V];
    loaded_of(configs[config], type, par, backend, &w);
    open_plan(&w, type, spec, &p);
    lm_generator *alone = open_gen(&w, type, 5, &p), *g = open_gen(&w, type, 5, &p);
    ok(lm_generator_prompt(alone, 0, ids, PROMPT, NULL, &err));
    run_steps(alone, 0, PROMPT, STEPS, one);
    ok(lm_generator_prompt(g, 0, ids + 9, 77, NULL, &err));
    ok(lm_generator_prompt(g, 3, ids + 3, 300, NULL, &err)); /* used before */
    ok(lm_generator_prompt(g, 3, ids, LM_KV_CHUNK, NULL, &err));
    ok(lm_generator_extend(g, 3, ids + LM_KV_CHUNK, PROMPT - LM_KV_CHUNK, NULL, &err));
    run_steps(g, 3, PROMPT, STEPS / 2, other);
    ok(lm_generator_copy(g, 3, 1, &err));
    ok(lm_generator_prompt(g, 3, ids + 20, 3, NULL, &err));
    run_steps(g, 1, PROMPT + STEPS / 2, STEPS / 2, other);
    if (memcmp(one, other, sizeof other))
        fail_msg("config %d, %s: other bits", config, spec);
    lm_generator_free(alone);
    lm_generator_free(g);
    lm_cache_plan_fini(&p);
    lm_loaded_fini(&w);
}

static void bits_depend_on_the_sequence_alone(void **state)
{
    static const lm_dtype types[] = { LM_DTYPE_F32, LM_DTYPE_BF16 };
    float one[V];
    (void)state;
    for (int k = 0; k < N_SPECS; k++)
        check_bits(k % MODELS, types[k / MODELS % 2], specs[k].text, one);
}

/* Layers that keep something else than keys and values beside coded ones; what can be coded is, and stays near. */
static void other_kinds_of_caches(void **state)
{
    float plain[V], coded[V];
    (void)state;
    for (int kind = MODELS; kind < KINDS; kind++) {
        check_bits(kind, LM_DTYPE_BF16, kind_spec(kind), coded);
        check_bits(kind, LM_DTYPE_F32, "auto", plain);
        check_bits(kind, LM_DTYPE_F32, kind_spec(kind), coded);
        const double d = apart(coded, plain);
        if (!(d > 0 && d < 0.2))
            fail_msg("config %d: codes move logits by %g", kind, d);
    }
}

/* Logits stay near those of plain caches, by what the format keeps; plain methods have those of plain caches to the
 * bit. */
static void logits_are_near_those_of_plain_caches(void **state)
{
    (void)state;
    for (int k = 0; k < MODELS; k++) {
        /* int8 and the rounding of BF16 together move gpt-oss by 0.093 */
        const lm_dtype type = k % 2 && k != GPT_OSS ? LM_DTYPE_BF16 : LM_DTYPE_F32;
        lm_loaded w;
        lm_cache_plan p;
        float plain[V], got[V];
        loaded_of(configs[k], type, par, backend, &w);
        for (int s = -2; s < N_SPECS; s++) {
            if (s >= 0 && (s + k) % 2 == 0) /* the other half */
                continue;
            open_plan(&w, type, s < 0 ? "auto" : specs[s].text, &p);
            lm_generator *g = open_gen(&w, type, 2, s == -2 ? NULL : &p);
            ok(lm_generator_prompt(g, 0, ids, PROMPT, NULL, &err));
            run_steps(g, 0, PROMPT, 4, s == -2 ? plain : got);
            if (s == -1)
                assert_memory_equal(got, plain, sizeof got);
            if (s >= 0 && !(apart(got, plain) < specs[s].most))
                fail_msg("config %d, %s: %g from plain caches", k, specs[s].text,
                         apart(got, plain));
            lm_generator_free(g);
            lm_cache_plan_fini(&p);
        }
        lm_loaded_fini(&w);
    }
}

/* ---- keys that are stored before their rotation ---- */

/* Keep keys before their rotation where layers have one; returns how many layers have. */
static int rotate_late(lm_cache_plan *p)
{
    lm_kv_side *side = (lm_kv_side *)(uintptr_t)p->plan->side;
    int n = 0;
    for (int64_t l = 0; l < p->plan->layers; l++) {
        side[2 * l + LM_KV_K].pre_rope = p->site[l].rope;
        n += p->site[l].rope;
    }
    return n;
}

static void rotation_can_be_late(void **state)
{
    int layers = 0;
    (void)state;
    for (int c = 0; c < MODELS; c++) {
        lm_loaded w;
        lm_cache_plan p[2];
        lm_generator *g[2];
        const float *y[2];
        loaded_of(configs[c], LM_DTYPE_F32, par, backend, &w);
        for (int i = 0; i < 2; i++) {
            open_plan(&w, LM_DTYPE_F32, "k=auto,v=int8", &p[i]);
            layers += i ? rotate_late(&p[i]) : 0;
            g[i] = open_gen(&w, LM_DTYPE_F32, 1, &p[i]);
            ok(lm_generator_prompt(g[i], 0, ids, PROMPT, &y[i], &err));
        }
        for (int i = PROMPT; i < PROMPT + 12; i++) {
            int32_t next = (int32_t)ids[i];
            double d = apart(y[1], y[0]);
            if (!(d < 5e-3)) /* codes of values can differ by one */
                fail_msg("%s: token %d: %g", configs[c], i, d);
            ok(lm_generator_decode(g[0], &next, &y[0], &err));
            ok(lm_generator_decode(g[1], &next, &y[1], &err));
        }
        for (int i = 0; i < 2; i++) {
            lm_generator_free(g[i]);
            lm_cache_plan_fini(&p[i]);
        }
        lm_loaded_fini(&w);
    }
    assert_true(layers > 10);
}

/* Pages and tails are counted, and what a step reads of them. */
static void caches_are_counted_as_stored(void **state)
{
    lm_loaded w;
    lm_cache_plan p;
    (void)state;
    loaded_of(configs[LLAMA], LM_DTYPE_F32, par, backend,
              &w); /* 3 layers of 2 heads of 32 numbers */
    open_plan(&w, LM_DTYPE_F32, "layers.0=auto;*=k=int4:rotate=off,v=int8:sinks=4,residual=7", &p);
    lm_generator *g = open_gen(&w, LM_DTYPE_F32, 3, &p);
    const double token = 2 * 32 * 4 * 2 + 2 * 2 * (16 + 4 + 32 + 2);
    assert_true(lm_generator_token_bytes(g) == token);
    assert_true(lm_kv_plan_bytes(p.plan, p.site) == token);
    assert_int_equal(lm_generator_tail_bytes(g), 2 * 2 * 11 * 32 * 4);
    /* 430 positions are 7 pages of 64 */
    assert_int_equal(lm_generator_cache_bytes(g),
                     3 * (430 * 512 + 7 * 64 * 216 + 2 * 2 * 11 * 32 * 4));
    double weights = lm_generator_step_bytes(g);
    ok(lm_generator_prompt(g, 1, ids, 100, NULL, &err));
    assert_true(lm_generator_step_bytes(g) - weights == 100 * token + 2 * 2 * 11 * 32 * 4);
    lm_generator_free(g);
    lm_cache_plan_fini(&p);
    lm_loaded_fini(&w);
}

/* The text of an error of a plan or a generator with it. */
static void refuse(lm_loaded *w, lm_dtype type, const char *spec, const char *want)
{
    lm_cache_plan p;
    lm_generator *g = NULL;
    lm_code rc = lm_cache_plan_open(spec, &w->config, type, NULL, &p, &err);
    if (!rc)
        rc = lm_generator_new(
            w, &(lm_generator_opts){ .dtype = type, .batch = 1, .context = S, .kv = p.plan },
            backend, &g, &err);
    assert_int_equal(rc, LM_EUSAGE);
    if (!strstr(err.what, want))
        fail_msg("%s: '%s', not '%s'", spec, err.what, want);
    assert_memory_equal(err.where, "kv cache", 8);
    err = (lm_err){ 0 };
    lm_cache_plan_fini(&p);
}

static void what_no_kernel_has_is_refused(void **state)
{
    lm_loaded w;
    (void)state;
    loaded_of(configs[MISTRAL], LM_DTYPE_F32, par, backend, &w); /* a window of 150 tokens */
    refuse(&w, LM_DTYPE_F32, "v=f16", "values of layer 0 would be f16, but activations are f32");
    refuse(&w, LM_DTYPE_F32, "kivi:group=256,residual=256",
           "a query sees 150 tokens, and groups of 256 are coded");
    lm_loaded_fini(&w);
    loaded_of(configs[GEMMA2], LM_DTYPE_F32, par, backend, &w); /* layer 0 has a window */
    lm_cache_plan p;
    open_plan(&w, LM_DTYPE_F32, "kivi:group=256,residual=256,skip=window", &p);
    assert_null(p.plan->side[0].format);
    assert_non_null(p.plan->side[2].format);
    lm_generator_free(open_gen(&w, LM_DTYPE_F32, 1, &p));
    lm_cache_plan_fini(&p);
    lm_loaded_fini(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(logits_are_those_of_the_definition),
        cmocka_unit_test(bits_depend_on_the_sequence_alone),
        cmocka_unit_test(other_kinds_of_caches),
        cmocka_unit_test(logits_are_near_those_of_plain_caches),
        cmocka_unit_test(rotation_can_be_late),
        cmocka_unit_test(caches_are_counted_as_stored),
        cmocka_unit_test(what_no_kernel_has_is_refused),
    };
    return cmocka_run_group_tests(tests, open_cached, close_cpu);
}
