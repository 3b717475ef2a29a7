/* SPDX-License-Identifier: Apache-2.0 */
/* test_serve_models.c -- continuous batching of every architecture that generates, over plain and coded caches and such with
 * tails: the same answers, to the bit, for little memory and for one text at a time, where no sample is forked and nothing
 * is shared; and, but for rounding, those of slots without pages. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "cached_case.h"
#include "model/cache_plan.h"
#include "serve_case.h"

static const char *const specs[] = { "f32", "k=int8,v=int4", "kivi:bits=4,residual=64" };
enum { SPECS = sizeof specs / sizeof *specs, TEXTS = 12 };

/* Pages for all texts and states of shared beginnings; for few of them; one text at a time. */
static setting setting_of(const lm_kv_plan *plan, int which)
{
    const int64_t pages[] = { 160, 26, 11 }, texts[] = { TEXTS, TEXTS, 1 };
    const bool tails = plan->side[0].residual > 0;
    return (setting){ .pages = { .rows = 256 + texts[which],
                                 .sequences = texts[which],
                                 .context = LONG,
                                 .page = plan->page,
                                 .pages = pages[which] * 64 / plan->page,
                                 .kv = plan,
                                 .snapshots = tails && which < 2 ? 6 : 0 } };
}

/* Answers of 8 slots with caches of their own. */
static void unserved(lm_loaded *w, const lm_kv_plan *plan, answers *out)
{
    const lm_generator_opts o = { .dtype = LM_DTYPE_F32, .batch = 8, .context = LONG, .kv = plan };
    const lm_complete_opts how = serve_how(SAMPLES, false);
    const lm_complete_hooks h = { .next = next_prompt, .done = take_answer, .ctx = out };
    lm_complete_stats st = { 0 };
    lm_generator *g = NULL;
    *out = (answers){ .samples = SAMPLES, .last = -1 };
    ok(lm_generator_new(w, &o, backend, &g, &err));
    ok(lm_complete_run(g, tok, &how, &h, &st, &err));
    lm_generator_free(g);
}

/* Answers with the same tokens. */
static int count_same(const answers *x, const answers *y)
{
    int same = 0;
    for (int i = 0; i < PROMPTS; i++)
        for (int k = 0; k < SAMPLES; k++)
            same += x->n[i][k] == y->n[i][k] &&
                    !memcmp(x->ids[i][k], y->ids[i][k], x->n[i][k] * sizeof **x->ids[i]);
    return same;
}

/* In so many settings; what was shared and dropped is added to *sum. */
static void check_model(int model, const char *spec, int settings, lm_sched_stats *sum)
{
    static answers want, got;
    lm_loaded w;
    lm_cache_plan plan;
    loaded_of(configs[model], LM_DTYPE_F32, par, backend, &w);
    ok(lm_cache_plan_open(spec, &w.config, LM_DTYPE_F32, NULL, &plan, &err));
    for (int k = 0; k < settings; k++) {
        const setting o = setting_of(plan.plan, k);
        lm_serve_stats kv;
        serve(&w, LM_DTYPE_F32, backend, &o, SAMPLES, k ? &got : &want, &kv);
        if (k)
            check_same(&got, &want);
        sum->hits += kv.sched.hits;
        sum->dropped += kv.sched.dropped;
    }
    unserved(&w, plan.plan, &got);
    int same = count_same(&want, &got);
    if (same < PROMPTS * SAMPLES * 9 / 10)
        fail_msg("model %d, %s: %d of %d answers have the same tokens", model, spec, same,
                 PROMPTS * SAMPLES);
    lm_cache_plan_fini(&plan);
    lm_loaded_fini(&w);
}

static void every_model(void **state)
{
    lm_sched_stats sum[SPECS] = { { 0 } };
    (void)state;
    stretch = 6;
    longest = 30;
    for (int model = 0; model < MODELS; model++)
        for (int i = 0; i < SPECS; i++)
            if (model <= GPT_OSS || i == model % SPECS) /* the attention of others is theirs */
                check_model(model, specs[i], i < 2 ? 2 : 3, &sum[i]);
    for (int i = 0; i < SPECS; i++)
        assert_true(sum[i].hits > 0 && sum[i].dropped > 0);
}

static void other_kinds_of_caches(void **state)
{
    lm_sched_stats sum = { 0 };
    (void)state;
    stretch = 6;
    longest = 30;
    for (int kind = MODELS; kind < KINDS; kind++)
        check_model(kind, kind_spec(kind), 2, &sum);
    assert_true(sum.dropped > 0);
}

static int open_all(void **state)
{
    int rc = open_cached(state);
    tok = rc ? NULL : letters();
    return rc;
}

static int close_all(void **state)
{
    lm_tokenizer_free(tok);
    return close_cpu(state);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_model),
        cmocka_unit_test(other_kinds_of_caches),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}
