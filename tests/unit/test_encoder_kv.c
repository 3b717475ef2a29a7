/* SPDX-License-Identifier: Apache-2.0 */
/* test_encoder_kv.c -- an encoder-decoder over coded caches, of its own tokens and of its source: logits are those of plain
 * caches in which keys and values are replaced by what the cache returns for them (kv/store.h), and do not depend on the slot,
 * the batch or a copy. */
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

enum { S = 430, SOURCE = 300, STEPS = 40, WIDE = 64 };

static const char t5[] =
    "{\"model_type\":\"t5\",\"vocab_size\":96,\"d_model\":64,\"d_kv\":32,\"d_ff\":96,"
    "\"num_layers\":1,\"num_decoder_layers\":2,\"num_heads\":2,\"dropout_rate\":0,"
    "\"relative_attention_num_buckets\":8,\"relative_attention_max_distance\":20,"
    "\"feed_forward_proj\":\"gated-gelu\",\"tie_word_embeddings\":false,"
    "\"initializer_factor\":1.5}";

/* most: of the relative difference of logits from those of plain caches. */
static const struct {
    const char *text;
    double most;
} specs[] = {
    { "int8", 0.08 },
    { "int4", 1 },
    { "int4:rotate=off", 1 },
    { "int8:sinks=4,residual=7", 0.08 },
    { "fp8", 0.6 },
    { "q4_0", 1 },
    { "kivi", 2 },
    { "kivi:bits=8,group=16,residual=64", 0.08 },
    { "k4v2", 2 },
    { "k=q8_0,v=int8:residual=20", 0.08 },
    { "k=auto,v=int4", 1 },
    { "layers.0=auto;*=int4", 1 },
};
enum { N_SPECS = sizeof specs / sizeof *specs };

static lm_generator *open_gen(lm_loaded *w, lm_dtype type, int64_t batch, const lm_cache_plan *p)
{
    lm_generator *g;
    ok(lm_generator_new(w,
                        &(lm_generator_opts){
                            .dtype = type, .batch = batch, .context = S, .kv = p ? p->plan : NULL },
                        backend, &g, &err));
    return g;
}

static void begin(lm_generator *g, int64_t slot, int from, int64_t n, const float **logits)
{
    static const uint32_t start = 0;
    ok(lm_generator_encode(g, slot, ids + from, n, &err));
    ok(lm_generator_prompt(g, slot, &start, 1, logits, &err));
}

/* ---- the definition ---- */

/* Rows of head h are `pitch` numbers apart from those of the next: what the cache returns for n of them. */
static void replace(const lm_cache_plan *p, int64_t layer, int side, float *at, float *kept,
                    int64_t from, int64_t n)
{
    static float y[S * WIDE];
    const int64_t K = p->site[layer].kv_heads, D = p->site[layer].head_dim;
    assert_true(K * D <= WIDE);
    for (int64_t t = from; t < n; t++)
        for (int64_t h = 0; h < K; h++)
            memcpy(kept + (t * K + h) * D, at + (h * S + t) * D, (size_t)D * sizeof *at);
    ok(lm_kv_store(&p->plan->side[2 * layer + side], p->plan->page, K, D, kept, n, y, &err));
    for (int64_t t = 0; t < n; t++)
        for (int64_t h = 0; h < K; h++)
            memcpy(at + (h * S + t) * D, y + (t * K + h) * D, (size_t)D * sizeof *at);
}

/* What the decoder keeps of its own tokens, of which `from` were replaced before. */
static void replace_own(lm_generator *g, const lm_cache_plan *p, float *kept[8], int64_t from)
{
    const lm_model *m = generator_model(g);
    for (int i = 0; i < m->n_caches; i++)
        replace(p, m->cache[i].layer, m->cache[i].kind == LM_CACHE_VALUES,
                (float *)(void *)(g->cache + g->caches[i].at), kept[i], from,
                lm_generator_used(g, 0));
}

static void replace_source(lm_generator *g, const lm_cache_plan *p, float *kept[8])
{
    const row_graph *r = &g->decode[0].s;
    for (int64_t i = 0; i < LM_MEMORY * r->m->config.layers; i++)
        if (i % LM_MEMORY < 2)
            replace(p, i / LM_MEMORY, i % LM_MEMORY, lm_exec_data(r->x, r->m->memory[i]), kept[0],
                    0, SOURCE);
}

static double difference(lm_loaded *w, const char *spec, float *kept[8])
{
    lm_cache_plan p;
    static const uint32_t start = 0;
    const float *got, *want;
    ok(lm_cache_plan_open(spec, &w->config, LM_DTYPE_F32, NULL, &p, &err));
    lm_generator *g = open_gen(w, LM_DTYPE_F32, 1, &p), *d = open_gen(w, LM_DTYPE_F32, 1, NULL);
    begin(g, 0, 0, SOURCE, &got);
    ok(lm_generator_encode(d, 0, ids, SOURCE, &err));
    replace_source(d, &p, kept);
    ok(lm_generator_prompt(d, 0, &start, 1, &want, &err));
    double worst = apart(got, want);
    replace_own(d, &p, kept, 0);
    for (int i = 0; i < STEPS; i++) {
        const int32_t next = (int32_t)ids[SOURCE + i];
        ok(lm_generator_decode(d, &next, &want, &err));
        replace_own(d, &p, kept, i + 1);
        ok(lm_generator_decode(g, &next, &got, &err));
        worst = fmax(worst, apart(got, want));
    }
    lm_generator_free(g);
    lm_generator_free(d);
    lm_cache_plan_fini(&p);
    return worst;
}

/* As of test_generate_kv.c: a number almost between two codes may get the other one. */
static void logits_are_those_of_the_definition(void **state)
{
    lm_loaded w;
    float *kept[8];
    int equal = 0;
    (void)state;
    for (int i = 0; i < 8; i++)
        ok(lm_alloc_n(&kept[i], S * WIDE, sizeof **kept, "rows", &err));
    loaded_of(t5, LM_DTYPE_F32, par, backend, &w);
    for (int s = 0; s < N_SPECS; s++) {
        const double worst = difference(&w, specs[s].text, kept);
        if (!(worst < 0.05))
            fail_msg("%s: %g from the definition", specs[s].text, worst);
        equal += worst < 1e-3;
    }
    assert_true(equal > N_SPECS * 3 / 4);
    for (int i = 0; i < 8; i++)
        lm_free(kept[i]);
    lm_loaded_fini(&w);
}

/* ---- the same bits ---- */

static void run_steps(lm_generator *g, int64_t at, int from, int n, float *out)
{
    int32_t next[5];
    const float *logits = NULL;
    for (int i = from; i < from + n; i++) {
        for (int64_t s = 0; s < lm_generator_batch(g); s++)
            next[s] = s == at                       ? (int32_t)ids[SOURCE + i]
                      : lm_generator_used(g, s) > 0 ? (int32_t)s
                                                    : -1;
        ok(lm_generator_decode(g, next, &logits, &err));
    }
    memcpy(out, logits + at * V, V * sizeof *out);
}

/* In slot 3 of 5 that held another text before, in a copy of it, and alone; near plain caches. */
static void bits_depend_on_the_text_alone(void **state)
{
    static const lm_dtype types[] = { LM_DTYPE_F32, LM_DTYPE_BF16 };
    float one[V], other[V], plain[V];
    (void)state;
    for (int k = 0; k < 2; k++) {
        lm_loaded w;
        loaded_of(t5, types[k], par, backend, &w);
        lm_generator *g = open_gen(&w, types[k], 1, NULL);
        begin(g, 0, 0, SOURCE, NULL);
        run_steps(g, 0, 0, 12, plain);
        lm_generator_free(g);
        for (int s = 0; s < N_SPECS; s++) {
            lm_cache_plan p;
            ok(lm_cache_plan_open(specs[s].text, &w.config, types[k], NULL, &p, &err));
            g = open_gen(&w, types[k], 1, &p);
            begin(g, 0, 0, SOURCE, NULL);
            run_steps(g, 0, 0, 12, one);
            assert_true(generator_source_bytes_read(g) > 0);
            lm_generator_free(g);
            g = open_gen(&w, types[k], 5, &p);
            begin(g, 0, 7, 77, NULL);
            begin(g, 3, 3, 420, NULL);
            begin(g, 3, 0, SOURCE, NULL);
            run_steps(g, 3, 0, 6, other);
            ok(lm_generator_copy(g, 3, 1, &err));
            begin(g, 3, 20, 5, NULL);
            run_steps(g, 1, 6, 6, other);
            if (memcmp(one, other, sizeof other))
                fail_msg("%s: other bits", specs[s].text);
            const double d = apart(one, plain);
            if (!(d > 0 && d < specs[s].most))
                fail_msg("%s: codes move logits by %g", specs[s].text, d);
            lm_generator_free(g);
            lm_cache_plan_fini(&p);
        }
        lm_loaded_fini(&w);
    }
}

/* Of the bytes that sources take and steps read: codes of 8 bits and their scales against 32. */
static void sources_are_smaller(void **state)
{
    lm_loaded w;
    lm_cache_plan p;
    size_t bytes[2];
    double read[2];
    (void)state;
    loaded_of(t5, LM_DTYPE_F32, par, backend, &w);
    ok(lm_cache_plan_open("int8", &w.config, LM_DTYPE_F32, NULL, &p, &err));
    for (int i = 0; i < 2; i++) {
        lm_generator *g = open_gen(&w, LM_DTYPE_F32, 2, i ? &p : NULL);
        begin(g, 0, 0, SOURCE, NULL);
        bytes[i] = generator_source_bytes(g);
        read[i] = generator_source_bytes_read(g);
        lm_generator_free(g);
    }
    assert_true(read[0] == 2.0 * 2 * SOURCE * 64 * sizeof(float));
    assert_true(read[1] < 0.27 * read[0] && read[1] > 0.25 * read[0]);
    assert_true(bytes[1] < 3 * bytes[0] / 10); /* pages are whole */
    lm_cache_plan_fini(&p);
    lm_loaded_fini(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(logits_are_those_of_the_definition),
        cmocka_unit_test(bits_depend_on_the_text_alone),
        cmocka_unit_test(sources_are_smaller),
    };
    return cmocka_run_group_tests(tests, open_cached, close_cpu);
}
