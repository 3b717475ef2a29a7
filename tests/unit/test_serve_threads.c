/* SPDX-License-Identifier: Apache-2.0 */
/* test_serve_threads.c -- the thread that moves pages beside the rows of a step (model/tiers.h): plain caches, with codes
 * on the way down, and samples of caches with tails, in a memory that makes them move.  Small enough for
 * ThreadSanitizer: make check-tsan. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "generate_case.h"
#include "model/cache_plan.h"
#include "serve_case.h"

enum { CONTEXT = 200, PAGE = 16 };

static const char config[] =
    "{\"model_type\":\"llama\",\"vocab_size\":96,\"hidden_size\":128,\"intermediate_size\":96,"
    "\"num_hidden_layers\":2,\"num_attention_heads\":2,\"num_key_value_heads\":1,"
    "\"max_position_embeddings\":700,\"initializer_range\":0.2}";

static void run(const char *kv, const char *down, int64_t samples, bool same)
{
    static answers want, got;
    lm_cache_plan stored = { 0 }, below = { 0 };
    lm_serve_stats stats;
    lm_loaded w;
    setting o = {
        .pages = { .rows = 64 + 12, .sequences = 12, .context = CONTEXT, .page = PAGE, .pages = 80 }
    };
    loaded_of(config, LM_DTYPE_BF16, par, host, &w);
    if (kv) {
        ok(lm_cache_plan_open(kv, &w.config, LM_DTYPE_BF16, NULL, &stored, &err));
        o.pages = (lm_paged_opts){ .rows = 256 + 6, .sequences = 6, .context = CONTEXT };
        o.pages.kv = stored.plan;
        o.pages.page = stored.plan->page;
        o.pages.pages = 40;
    }
    if (down)
        ok(lm_cache_plan_open(down, &w.config, LM_DTYPE_BF16, NULL, &below, &err));
    serve(&w, LM_DTYPE_BF16, host, &o, samples, &want, &stats);
    assert_int_equal(stats.tiers.down + stats.tiers.out, 0);
    o.host = 10;
    o.disk = 90;
    o.pages.down = below.plan;
    o.pages.pages = kv ? 5 : 14;
    o.pages.slots = kv ? 12 : 0;
    serve(&w, LM_DTYPE_BF16, host, &o, samples, &got, &stats);
    assert_true(stats.tiers.up + stats.tiers.in > 5);
    if (same)
        check_same(&got, &want);
    lm_cache_plan_fini(&stored);
    lm_cache_plan_fini(&below);
    lm_loaded_fini(&w);
}

static void plain_pages(void **state)
{
    (void)state;
    run(NULL, NULL, 1, true);
}

static void samples_with_tails(void **state)
{
    (void)state;
    run("kivi:bits=2,residual=64", NULL, SAMPLES, true);
}

static void codes_on_the_way_down(void **state)
{
    (void)state;
    run(NULL, "int8", 1, false);
}

static int open_host(void **state)
{
    (void)state;
    ok(lm_par_new(&par, 2, &err));
    ok(lm_backend_cpu(lm_cpu_detect(), par, &host, &err));
    tok = letters();
    return 0;
}

static int close_host(void **state)
{
    (void)state;
    lm_tokenizer_free(tok);
    lm_backend_close(host);
    lm_par_free(par);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plain_pages),
        cmocka_unit_test(samples_with_tails),
        cmocka_unit_test(codes_on_the_way_down),
    };
    return cmocka_run_group_tests(tests, open_host, close_host);
}
