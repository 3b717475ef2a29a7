/* SPDX-License-Identifier: Apache-2.0 */
/* test_kv_code_level.c -- the kernels of codes outside of a model have at most the level that the caller selects.  Their bits
 * are the same at every level, so the test watches the choice: it is linked with --wrap=lm_kv_code_at. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "cached_case.h"
#include "kernels/kv_code.h"
#include "model/cache_about.h"
#include "model/cache_plan.h"
#include "model/cache_rope.h"
#include "model/generate_cache.h"
#include "model/paged.h"

enum { CONTEXT = 256, PROMPT = 100 };

static int choices; /* since watch() */
static lm_cpu_level widest;

const lm_kv_code_kernels *__real_lm_kv_code_at(lm_cpu_level max);
const lm_kv_code_kernels *__wrap_lm_kv_code_at(lm_cpu_level max);

const lm_kv_code_kernels *__wrap_lm_kv_code_at(lm_cpu_level max)
{
    choices++;
    widest = max > widest ? max : widest;
    return __real_lm_kv_code_at(max);
}

static void watch(void)
{
    choices = 0;
    widest = LM_CPU_REF;
}

static void check(const char *what, lm_cpu_level level)
{
    if (!choices || widest != level)
        fail_msg("%s: %d choices, level %s instead of %s", what, choices, lm_cpu_level_name(widest),
                 lm_cpu_level_name(level));
    watch();
}

/* A coded cache out of a generator, to plain rows, to codes again, into a generator. */
static void run_image(lm_cpu_level level, lm_backend *b)
{
    static const uint8_t digest[16] = { 1 };
    lm_generator_opts o = { .dtype = LM_DTYPE_F32, .batch = 2, .context = CONTEXT };
    lm_loaded w;
    lm_cache_plan p = { 0 };
    lm_generator *g;
    lm_cache_about a;
    lm_kv_image *m, *plain, *coded;

    loaded_of(configs[LLAMA], LM_DTYPE_F32, par, b, &w);
    ok(lm_cache_plan_open("int8", &w.config, LM_DTYPE_F32, NULL, &p, &err));
    o.kv = p.plan;
    ok(lm_generator_new(&w, &o, b, &g, &err));
    ok(lm_generator_prompt(g, 0, ids, PROMPT, NULL, &err));
    ok(lm_cache_about_model(&w.config, digest, CONTEXT, LM_DTYPE_F32, &a, &err));
    a.about.has_next = true; /* so that all rows stay when a text follows */
    a.about.next = 5;
    watch();
    ok(lm_generator_save(g, 0, &a.about, par, &m, &err));
    check("save", level);
    ok(lm_cache_convert(m, NULL, level, par, &plain, &err));
    check("to plain rows", level);
    ok(lm_cache_convert(plain, p.plan, level, par, &coded, &err));
    check("to codes", level);
    ok(lm_generator_resume(g, 1, coded, ids, 3, par, &err));
    check("resume", level);
    lm_kv_image_free(m);
    lm_kv_image_free(plain);
    lm_kv_image_free(coded);
    lm_cache_about_fini(&a);
    lm_generator_free(g);
    lm_cache_plan_fini(&p);
    lm_loaded_fini(&w);
}

/* Plain pages that are coded below the device. */
static void run_pages(lm_cpu_level level, lm_backend *b)
{
    lm_paged_opts o = { .rows = 64, .sequences = 2, .context = CONTEXT, .page = 64, .pages = 4 };
    lm_paged_sizes sizes;
    lm_loaded w;
    lm_cache_plan p = { 0 };
    lm_paged *g;

    loaded_config(configs[LLAMA], &w);
    loaded_draw_panels(&w, LM_DTYPE_F32, par, b);
    ok(lm_cache_plan_open("int8", &w.config, LM_DTYPE_F32, NULL, &p, &err));
    o.down = p.plan;
    watch();
    ok(lm_paged_measure(&w, LM_DTYPE_F32, &o, b, &sizes, &err));
    check("sizes of pages", level);
    ok(lm_paged_new(&w, LM_DTYPE_F32, &o, b, &g, &err));
    check("pages", level);
    lm_paged_free(g);
    lm_cache_plan_fini(&p);
    lm_loaded_fini(&w);
}

static void is_what_was_selected(void **state)
{
    (void)state;
    for (lm_cpu_level level = LM_CPU_REF; level <= lm_cpu_detect(); level++) {
        lm_backend *b;
        ok(lm_backend_cpu(level, par, &b, &err));
        assert_int_equal(b->cpu, level);
        run_image(level, b);
        run_pages(level, b);
        lm_backend_close(b);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(is_what_was_selected),
    };
    return cmocka_run_group_tests_name("kv_code_level", tests, open_cached, close_cpu);
}
