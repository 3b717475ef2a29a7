/* SPDX-License-Identifier: Apache-2.0 */
/* test_generate_cache.c -- caches of slots as images: a run that is saved to a file and continued from it, in another slot of
 * another generator, has the bits of the run that was not interrupted. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "cached_case.h"
#include "model/cache_about.h"
#include "model/cache_plan.h"
#include "model/generate_cache.h"
#include "tests/unit/span_reader.h"

enum { S = 600, STEPS = 6 };

static const int tried[] = { GPT2, LLAMA, GEMMA2 };
static const struct {
    const char *text; /* NULL: plain, without a plan */
    bool tail;
} specs[] = {
    { NULL, false },
    { "auto", false },
    { "int8", false },
    { "int4", false },
    { "fp8", false },
    { "k=auto,v=int4", false },
    { "layers.0=auto;*=int4", false },
    { "int2", true },
    { "kivi", true },
    { "int8:sinks=4,residual=7", true },
};
enum { TRIED = sizeof tried / sizeof *tried, SPECS = sizeof specs / sizeof *specs };

/* A model, and one generator whose runs are not interrupted, another that continues. */
typedef struct {
    lm_loaded w;
    lm_cache_plan p;
    lm_generator *whole, *other;
    lm_dtype type;
} pair;

static void open_pair(int config, lm_dtype type, const char *spec, pair *x)
{
    loaded_of(configs[config], type, par, backend, &x->w);
    x->p = (lm_cache_plan){ 0 };
    x->type = type;
    if (spec)
        ok(lm_cache_plan_open(spec, &x->w.config, type, NULL, &x->p, &err));
    ok(lm_generator_new(
        &x->w, &(lm_generator_opts){ .dtype = type, .batch = 1, .context = S, .kv = x->p.plan },
        backend, &x->whole, &err));
    ok(lm_generator_new(
        &x->w, &(lm_generator_opts){ .dtype = type, .batch = 3, .context = S, .kv = x->p.plan },
        backend, &x->other, &err));
}

static void close_pair(pair *x)
{
    lm_generator_free(x->whole);
    lm_generator_free(x->other);
    lm_cache_plan_fini(&x->p);
    lm_loaded_fini(&x->w);
}

static lm_code add_bytes(void *ctx, const void *data, size_t bytes, lm_err *e)
{
    return lm_buf_add(ctx, data, bytes, e);
}

/* The cache of slot 0 through a file; next: the token that follows, negative: none. */
static lm_kv_image *through_file(const pair *x, lm_generator *g, int32_t next)
{
    static const uint8_t digest[16] = { 1, 2, 3 };
    const lm_kv_reading r = { .vocab = V, .context = S, .level = LM_KV_FILE_BEST };
    lm_cache_about a;
    lm_kv_image *m;
    lm_kv_file *f;
    lm_buf b = { 0 };
    ok(lm_cache_about_model(&x->w.config, digest, S, x->type, &a, &err));
    a.about.has_next = next >= 0;
    a.about.next = next;
    ok(lm_generator_save(g, 0, &a.about, par, &m, &err));
    const lm_kv_out to = { .write = add_bytes, .ctx = &b, .where = "memory" };
    ok(lm_kv_file_write(&to, &m->about, &m->content, 0, lm_cpu_detect(), par, &err));
    lm_kv_image_free(m);
    span s = { b.data, b.len };
    ok(lm_kv_file_open_on(read_span, &s, "memory", &f, &err));
    ok(lm_kv_file_match(f, &a.about, S, &err));
    ok(lm_kv_image_read(f, &r, lm_cpu_detect(), par, &m, &err));
    lm_kv_file_close(f);
    lm_buf_fini(&b);
    lm_cache_about_fini(&a);
    return m;
}

/* The logits of a slot after steps with ids[from] and on. */
static void run_steps(lm_generator *g, int64_t slot, int from, int n, float *out)
{
    int32_t next[3] = { -1, -1, -1 };
    const float *logits = NULL;
    for (int i = from; i < from + n; i++) {
        next[slot] = (int32_t)ids[i];
        ok(lm_generator_decode(g, next, &logits, &err));
    }
    memcpy(out, logits + slot * V, V * sizeof *out);
}

/* A prompt of n tokens in one run, and cut behind `cut`; both continue with the same tokens. */
static void check_cut(pair *x, int n, int cut, const char *name)
{
    float a[V], b[V];
    ok(lm_generator_prompt(x->other, 2, ids + 40, 500, NULL, &err)); /* used before */
    ok(lm_generator_prompt(x->whole, 0, ids, cut, NULL, &err));
    lm_kv_image *m = through_file(x, x->whole, -1);
    ok(lm_generator_prompt(x->whole, 0, ids, n, NULL, &err));
    run_steps(x->whole, 0, n, STEPS, a);
    ok(lm_generator_resume(x->other, 2, m, ids + cut, n - cut, par, &err));
    assert_int_equal(lm_generator_used(x->other, 2), n);
    run_steps(x->other, 2, n, STEPS, b);
    if (memcmp(a, b, sizeof a))
        fail_msg("%s: %d tokens cut at %d: other bits", name, n, cut);
    lm_kv_image_free(m);
}

static void prompts_continue(void **state)
{
    static const int cuts[][2] = { { 300, 256 }, { 300, 300 }, { 512, 512 }, { 300, 260 },
                                   { 264, 259 }, { 520, 100 }, { 77, 5 },    { 9, 8 },
                                   { 258, 256 }, { 270, 257 }, { 7, 7 } };
    (void)state;
    for (int k = 0; k < 2 * SPECS; k++) {
        pair x;
        open_pair(tried[k % TRIED], k % 2 ? LM_DTYPE_BF16 : LM_DTYPE_F32, specs[k / 2].text, &x);
        for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++)
            if (!specs[k / 2].tail || (cuts[i][1] % 256 == 0 && cuts[i][0] > cuts[i][1]))
                check_cut(&x, cuts[i][0], cuts[i][1], specs[k / 2].text ? specs[k / 2].text : "");
        close_pair(&x);
    }
}

/* States and latents, plain ones and beside or in codes, where prompts are cut at whole chunks. */
static void other_kinds_continue(void **state)
{
    static const int cuts[][2] = { { 300, 256 }, { 512, 256 }, { 520, 512 } };
    (void)state;
    for (int k = 0; k < 8; k++) {
        const int kind = k % 2 ? LATENTS : STATES;
        const char *spec = k / 2 % 2 ? kind_spec(kind) : NULL;
        pair x;
        open_pair(kind, k / 4 ? LM_DTYPE_BF16 : LM_DTYPE_F32, spec, &x);
        for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++)
            check_cut(&x, cuts[i][0], cuts[i][1], spec ? spec : "plain");
        close_pair(&x);
    }
}

/* Decoding stops behind a token that was chosen and not run, and goes on elsewhere. */
static void decoding_continues(void **state)
{
    (void)state;
    for (int k = 0; k < 2 * SPECS; k++) {
        float a[V], b[V];
        pair x;
        open_pair(tried[k % TRIED], k % 2 ? LM_DTYPE_BF16 : LM_DTYPE_F32, specs[k / 2].text, &x);
        ok(lm_generator_prompt(x.whole, 0, ids, 150, NULL, &err));
        run_steps(x.whole, 0, 150, 120, a);
        lm_kv_image *m = through_file(&x, x.whole, (int32_t)ids[270]);
        run_steps(x.whole, 0, 270, STEPS, a);
        ok(lm_generator_resume(x.other, 1, m, NULL, 0, par, &err));
        run_steps(x.other, 1, 271, STEPS - 1, b);
        assert_memory_equal(a, b, sizeof a);
        ok(lm_generator_resume(x.other, 1, m, ids + 271, 4, par, &err)); /* a prompt behind it */
        assert_int_equal(lm_generator_used(x.other, 1), 275);
        lm_kv_image_free(m);
        close_pair(&x);
    }
}

/* ---- with a policy ---- */

static const char *const policies[] = {
    "h2o:keep=0.4",
    "h2o:keep=0.3,budget=pyramid+int8",
    "random:keep=0.3",
    "streaming:sinks=3,window=50",
    "streaming:window=40+int8",
    "streaming:window=60,positions=text+int4:group=16",
    "snapkv:capacity=60,window=8",
    "snapkv:capacity=60,window=8+kivi:group=16,residual=32",
    "kvmerge:threshold=0.1",
};
enum { POLICIES = sizeof policies / sizeof *policies };

/* Caches from which tokens were dropped go on elsewhere, with the bits of the run that was not interrupted. */
static void policies_continue(void **state)
{
    (void)state;
    for (int k = 0; k < 2 * POLICIES; k++) {
        const char *spec = policies[k / 2];
        float a[V], b[V];
        pair x;
        open_pair(tried[k % TRIED], k % 2 ? LM_DTYPE_BF16 : LM_DTYPE_F32, spec, &x);
        ok(lm_generator_prompt(x.other, 1, ids + 40, 400, NULL, &err)); /* used before */
        ok(lm_generator_prompt(x.whole, 0, ids, 150, NULL, &err));
        run_steps(x.whole, 0, 150, 120, a);
        lm_kv_image *m = through_file(&x, x.whole, (int32_t)ids[270]);
        assert_string_equal(m->about.policy, spec);
        assert_int_equal(m->about.prompt, 150);
        run_steps(x.whole, 0, 270, 40, a);
        ok(lm_generator_resume(x.other, 1, m, ids + 271, 9, par, &err));
        run_steps(x.other, 1, 280, 30, b);
        if (memcmp(a, b, sizeof a))
            fail_msg("%s: other bits", spec);
        lm_kv_image_free(m);
        close_pair(&x);
    }
}

/* A generator that keeps what is there, and appends. */
static lm_generator *open_staying(pair *x, const lm_kv_image *m, lm_kv_plan *plan, lm_kv_policy *p)
{
    lm_generator *g;
    *p = (lm_kv_policy){ .kind = LM_KV_STAY, .capacity = m->about.rows[0], .window = 1 };
    *plan = *x->p.plan;
    plan->policy = p;
    ok(lm_generator_new(
        &x->w,
        &(lm_generator_opts){
            .dtype = x->type, .batch = 2, .context = S, .kv = plan, .most_new = 60 },
        backend, &g, &err));
    return g;
}

/* Without the policy nothing more is dropped: the next step reads the same rows, later ones more. */
static void dropped_rows_stay(void **state)
{
    static const char *const tried_specs[] = { "snapkv:capacity=60,window=8+int8", "h2o:keep=0.4" };
    (void)state;
    for (int k = 0; k < 2; k++) {
        float a[V], b[V];
        pair x;
        lm_kv_plan plan;
        lm_kv_policy p;
        open_pair(LLAMA, LM_DTYPE_F32, tried_specs[k], &x);
        ok(lm_generator_prompt(x.whole, 0, ids, 150, NULL, &err));
        run_steps(x.whole, 0, 150, 20, a);
        lm_kv_image *m = through_file(&x, x.whole, -1);
        lm_generator *g = open_staying(&x, m, &plan, &p);
        run_steps(x.whole, 0, 170, 1, a);
        ok(lm_generator_resume(g, 1, m, ids + 170, 1, par, &err));
        int64_t held = lm_generator_held(g, 1, 0);
        assert_int_equal(held, m->about.rows[0] + 1);
        assert_int_equal(lm_generator_prompt(g, 0, ids, 9, NULL, &err), LM_EUSAGE);
        err = (lm_err){ 0 };
        run_steps(x.whole, 0, 171, 10, a);
        run_steps(g, 1, 171, 10, b);
        assert_int_equal(lm_generator_held(g, 1, 0), held + 10);
        if (k == 0 ? apart(a, b) > 1e-5 : apart(a, b) < 1e-4) /* h2o has dropped ten */
            fail_msg("%s: apart by %g", tried_specs[k], apart(a, b));
        lm_generator_free(g);
        lm_kv_image_free(m);
        close_pair(&x);
    }
}

/* What a policy cannot have left, and another policy. */
static void dropped_rows_that_do_not_fit(void **state)
{
    pair x, y, z;
    (void)state;
    open_pair(LLAMA, LM_DTYPE_F32, "streaming:sinks=3,window=50", &x);
    open_pair(LLAMA, LM_DTYPE_F32, "streaming:sinks=3,window=49", &y);
    open_pair(LLAMA, LM_DTYPE_F32, NULL, &z);
    ok(lm_generator_prompt(x.whole, 0, ids, 150, NULL, &err));
    lm_kv_image *m = through_file(&x, x.whole, 1);
    assert_int_equal(lm_generator_resume(y.other, 0, m, NULL, 0, par, &err), LM_EUSAGE);
    assert_non_null(strstr(err.what, "by another one"));
    err = (lm_err){ 0 };
    assert_int_equal(lm_generator_resume(z.other, 0, m, NULL, 0, par, &err), LM_EUSAGE);
    err = (lm_err){ 0 };
    m->content.at[1][60]--; /* two tokens at one rank */
    assert_int_equal(lm_generator_resume(x.other, 0, m, NULL, 0, par, &err), LM_EFORMAT);
    assert_non_null(strstr(err.what, "layer 1 has tokens that its policy does not leave"));
    err = (lm_err){ 0 };
    m->content.at[1][60]++;
    ok(lm_generator_resume(x.other, 0, m, NULL, 0, par, &err));
    lm_kv_image_free(m);
    close_pair(&x), close_pair(&y), close_pair(&z);
}

/* Layers with a window keep all tokens beside a policy: one with fewer, or one twice, is refused. */
static void windows_that_lack_tokens(void **state)
{
    int64_t rows[8], layer = 0;
    pair x;
    (void)state;
    open_pair(GEMMA2, LM_DTYPE_F32, "snapkv:capacity=60,window=8", &x);
    ok(lm_generator_prompt(x.whole, 0, ids, 150, NULL, &err));
    lm_kv_image *m = through_file(&x, x.whole, 1);
    while (layer < m->about.layers && !x.w.config.layer[layer].window)
        layer++;
    assert_true(m->about.layers <= 8 && layer < m->about.layers);
    assert_int_equal(m->about.rows[layer], 150);
    for (int k = 0; k < 2; k++) {
        const int64_t *kept = m->about.rows;
        memcpy(rows, kept, sizeof *rows * (size_t)m->about.layers);
        rows[layer] -= k;
        m->about.rows = rows;
        m->content.at[layer][70] -= 1 - k;
        assert_int_equal(lm_generator_resume(x.other, 0, m, NULL, 0, par, &err), LM_EFORMAT);
        assert_non_null(strstr(err.what, "lacks tokens of its window"));
        err = (lm_err){ 0 };
        m->content.at[layer][70] += 1 - k;
        m->about.rows = kept;
    }
    ok(lm_generator_resume(x.other, 0, m, NULL, 0, par, &err));
    lm_kv_image_free(m);
    close_pair(&x);
}

/* Orders that are no permutation, and masses that are no numbers, are refused when they are read. */
static void orders_and_masses_that_are_wrong(void **state)
{
    const lm_kv_reading r = { .vocab = V, .context = S, .level = LM_KV_FILE_BEST };
    pair x;
    (void)state;
    open_pair(LLAMA, LM_DTYPE_F32, "h2o:keep=0.4", &x);
    ok(lm_generator_prompt(x.whole, 0, ids, 150, NULL, &err));
    for (int k = 0; k < 4; k++) {
        lm_kv_image *m = through_file(&x, x.whole, 1), *again = NULL;
        lm_buf b = { 0 };
        lm_kv_file *f;
        const lm_kv_out to = { .write = add_bytes, .ctx = &b, .where = "memory" };
        int64_t n = m->about.rows[1];
        if (k == 0)
            m->content.order[1][n] = m->content.order[1][n + 1];
        else if (k == 1)
            m->content.order[1][3] = (int32_t)n;
        else if (k == 2)
            m->content.order[1][3] = -1;
        else
            m->content.mass[2][5] = NAN;
        ok(lm_kv_file_write(&to, &m->about, &m->content, 0, lm_cpu_detect(), par, &err));
        span s = { b.data, b.len };
        ok(lm_kv_file_open_on(read_span, &s, "memory", &f, &err));
        assert_int_equal(lm_kv_image_read(f, &r, lm_cpu_detect(), par, &again, &err), LM_EFORMAT);
        assert_non_null(strstr(err.what, k < 3 ? "not a permutation" : "NaN"));
        assert_non_null(strstr(err.where, k < 3 ? "layers.1.order" : "layers.2.mass"));
        err = (lm_err){ 0 };
        lm_kv_file_close(f);
        lm_kv_image_free(m);
        lm_buf_fini(&b);
    }
    close_pair(&x);
}

static void images_that_do_not_fit(void **state)
{
    pair x, y;
    (void)state;
    open_pair(LLAMA, LM_DTYPE_F32, "kivi", &x);
    open_pair(LLAMA, LM_DTYPE_F32, "int4", &y);
    ok(lm_generator_prompt(x.whole, 0, ids, 300, NULL, &err));
    lm_kv_image *m = through_file(&x, x.whole, -1);
    assert_int_equal(lm_generator_resume(y.other, 0, m, ids, 4, par, &err), LM_EUSAGE);
    assert_non_null(strstr(err.what, "forms"));
    err = (lm_err){ 0 };
    assert_int_equal(lm_generator_resume(x.other, 0, m, NULL, 0, par, &err), LM_EUSAGE);
    assert_non_null(strstr(err.what, "newest rows"));
    err = (lm_err){ 0 };
    assert_int_equal(lm_generator_resume(x.other, 0, m, ids, 301, par, &err), LM_EUSAGE);
    assert_non_null(strstr(err.what, "the context holds 600"));
    err = (lm_err){ 0 };
    m->content.positions[7] = 9;
    assert_int_equal(lm_generator_resume(x.other, 0, m, ids, 4, par, &err), LM_EUSAGE);
    assert_non_null(strstr(err.what, "dropped"));
    err = (lm_err){ 0 };
    lm_kv_image_free(m);
    close_pair(&x), close_pair(&y);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(prompts_continue),
        cmocka_unit_test(other_kinds_continue),
        cmocka_unit_test(decoding_continues),
        cmocka_unit_test(images_that_do_not_fit),
        cmocka_unit_test(policies_continue),
        cmocka_unit_test(dropped_rows_stay),
        cmocka_unit_test(dropped_rows_that_do_not_fit),
        cmocka_unit_test(windows_that_lack_tokens),
        cmocka_unit_test(orders_and_masses_that_are_wrong),
    };
    return cmocka_run_group_tests_name("generate_cache", tests, open_cached, close_cpu);
}
