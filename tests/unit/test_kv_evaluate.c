/* SPDX-License-Identifier: Apache-2.0 */
/* test_kv_evaluate.c -- comparison of generators: against a plain one that keeps whole logits, with
 * equal caches, and with caches of another type. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdio.h>

#include "base/rng.h"
#include "compress/kv_evaluate.h"
#include "cpu_case.h"
#include "loaded_case.h"

enum { V = 96, T = 40, WINDOWS = 5 };

static const char config[] =
    "{\"model_type\":\"llama\",\"vocab_size\":96,\"hidden_size\":64,\"intermediate_size\":96,"
    "\"num_hidden_layers\":2,\"num_attention_heads\":4,\"num_key_value_heads\":2,"
    "\"max_position_embeddings\":400,\"initializer_range\":0.2}";

static lm_loaded full, half; /* the same weights in F32 and in BF16 */
static uint32_t ids[WINDOWS * T];

static int setup(void **state)
{
    assert_int_equal(open_cpu(state), 0);
    loaded_of(config, LM_DTYPE_F32, par, backend, &full);
    loaded_of(config, LM_DTYPE_BF16, par, backend, &half);
    for (int i = 0; i < WINDOWS * T; i++)
        ids[i] = (uint32_t)lm_rng_below(lm_rng_make(1, "test", 0), (uint64_t)i, V);
    return 0;
}

static int teardown(void **state)
{
    lm_loaded_fini(&full);
    lm_loaded_fini(&half);
    return close_cpu(state);
}

static lm_generator *open_as(lm_loaded *w, lm_dtype type, int64_t batch, int64_t context)
{
    lm_generator *g;
    ok(lm_generator_new(w,
                        &(lm_generator_opts){ .dtype = type, .batch = batch, .context = context },
                        backend, &g, &err));
    return g;
}

static lm_kv_text text(int64_t windows, int64_t prompt)
{
    return (lm_kv_text){
        .ids = ids, .windows = windows, .length = T, .prompt = prompt, .b = backend, .par = par
    };
}

/* Logits behind each position of a window, one token at a time. */
static void all_logits(lm_generator *g, const uint32_t *window, float (*out)[V])
{
    const float *got;
    ok(lm_generator_prompt(g, 0, window, 1, &got, &err));
    memcpy(out[0], got, sizeof *out);
    for (int t = 1; t + 1 < T; t++) {
        int32_t next = (int32_t)window[t];
        ok(lm_generator_decode(g, &next, &got, &err));
        memcpy(out[t], got, sizeof *out);
    }
}

static double probability(const float *x, int k)
{
    double sum = 0;
    for (int i = 0; i < V; i++)
        sum += exp((double)x[i]);
    return exp((double)x[k]) / sum;
}

static int likeliest(const float *x)
{
    int top = 0;
    for (int k = 1; k < V; k++)
        top = x[k] > x[top] ? k : top;
    return top;
}

static void same(double a, double b)
{
    if (!(fabs(a - b) <= 1e-9 * (1 + fabs(b))))
        fail_msg("%.17g, not %.17g", a, b);
}

/* Windows one after another by whole logits and plain sums. */
static void sums_equal_a_plain_computation(void **state)
{
    static float p[T][V], q[T][V];
    lm_kv_sums want[2] = { 0 }, got[2] = { 0 };
    lm_generator *a = open_as(&full, LM_DTYPE_F32, 1, T), *b = open_as(&half, LM_DTYPE_BF16, 1, T);
    const lm_kv_candidate c[2] = { { "f32", a }, { "bf16", b } };

    (void)state;
    for (int w = 0; w < 2; w++) {
        all_logits(a, ids + w * T, p);
        all_logits(b, ids + w * T, q);
        for (int t = 0; t + 1 < T; t++) {
            double kl = 0;
            int next = (int)ids[w * T + t + 1];
            for (int k = 0; k < V; k++)
                kl += probability(p[t], k) * log(probability(p[t], k) / probability(q[t], k));
            want[0].nll -= log(probability(p[t], next));
            want[1].nll -= log(probability(q[t], next));
            want[1].kl += kl;
            want[1].kl_most = fmax(want[1].kl_most, kl);
            want[1].top1 += likeliest(p[t]) == likeliest(q[t]);
        }
    }
    const lm_kv_text t = text(2, 1);
    ok(lm_kv_compare(c, 2, &t, got, &err));
    for (int i = 0; i < 2; i++) {
        assert_int_equal(got[i].tokens, 2 * (T - 1));
        same(got[i].nll, want[i].nll);
        same(got[i].kl, want[i].kl);
        same(got[i].kl_most, want[i].kl_most);
    }
    assert_int_equal(got[0].top1, 2 * (T - 1));
    assert_int_equal(got[1].top1, want[1].top1);
    /* the case shows differences: of weights and caches, neither zero nor large */
    assert_true(got[1].kl / (double)got[1].tokens > 1e-7 && got[1].kl / (double)got[1].tokens < 1);
    lm_generator_free(a);
    lm_generator_free(b);
}

/* Equal generators: no divergence; perplexity as without a candidate; any prompt length counts the
 * tokens behind it. */
static void equal_caches_do_not_differ(void **state)
{
    static const int64_t prompts[] = { 1, 2, 9, T - 1 };

    (void)state;
    for (int k = 0; k < 4; k++) {
        lm_kv_sums s[3] = { 0 }, alone[1] = { 0 };
        const lm_kv_text t = text(WINDOWS, prompts[k]);
        lm_kv_candidate c[3];
        for (int i = 0; i < 3; i++)
            c[i] = (lm_kv_candidate){ "half", open_as(&half, LM_DTYPE_BF16, 2, T) };
        ok(lm_kv_compare(c, 3, &t, s, &err));
        ok(lm_kv_compare(c, 1, &t, alone, &err));
        for (int i = 0; i < 3; i++) {
            assert_int_equal(s[i].tokens, WINDOWS * (T - prompts[k]));
            assert_int_equal(s[i].top1, s[i].tokens);
            assert_true(s[i].kl == 0 && s[i].kl_most == 0);
            assert_true(s[i].nll == alone->nll);
            lm_generator_free(c[i].g);
        }
    }
}

/* The sums are those of the windows, whatever the slots: 1, 2, 3 (a last round with fewer), more
 * than windows, and different numbers in the two generators. */
static void sums_do_not_depend_on_slots(void **state)
{
    static const int64_t batch[][2] = { { 1, 1 }, { 2, 2 }, { 3, 3 }, { 8, 8 }, { 5, 2 } };
    lm_kv_sums first[2] = { 0 };

    (void)state;
    for (int k = 0; k < 5; k++) {
        lm_kv_sums s[2] = { 0 };
        const lm_kv_text t = text(WINDOWS, 3);
        const lm_kv_candidate c[2] = { { "f32", open_as(&full, LM_DTYPE_F32, batch[k][0], T + 9) },
                                       { "bf16", open_as(&half, LM_DTYPE_BF16, batch[k][1], T) } };
        ok(lm_kv_compare(c, 2, &t, s, &err));
        for (int i = 0; i < 2; i++) {
            if (k == 0)
                first[i] = s[i];
            assert_int_equal(s[i].tokens, first[i].tokens);
            /* products of several rows may sum in another order */
            assert_true(fabs(s[i].nll - first[i].nll) < 1e-3 * first[i].nll);
            assert_true(fabs(s[i].kl - first[i].kl) <= 0.05 * first[i].kl);
            lm_generator_free(c[i].g);
        }
    }
}

static void count_tokens(void *ctx, int64_t tokens)
{
    int64_t *last = ctx;
    assert_true(tokens > *last);
    *last = tokens;
}

static void steps_are_reported(void **state)
{
    lm_kv_sums s = { 0 };
    lm_kv_text t = text(3, 1);
    const lm_kv_candidate c = { "f32", open_as(&full, LM_DTYPE_F32, 2, T) };
    int64_t last = 0;

    (void)state;
    t.done = count_tokens;
    t.ctx = &last;
    ok(lm_kv_compare(&c, 1, &t, &s, &err));
    assert_int_equal(last, 3 * (T - 1));
    lm_generator_free(c.g);
}

static void rows_by_hand(void **state)
{
    const float p[4] = { 0, logf(2), -INFINITY, 0 }, q[4] = { 0, 0, 0, 0 };
    const float masked[4] = { 0, 0, -INFINITY, 0 };
    const float bad[][4] = { { 0, NAN, 0, 0 },
                             { 0, INFINITY, 0, 0 },
                             { -INFINITY, -INFINITY, -INFINITY, -INFINITY } };
    lm_kv_sums s = { 0 };

    (void)state;
    assert_true(lm_kv_compare_row(p, q, 4, 1, &s));
    assert_int_equal(s.tokens, 1);
    assert_int_equal(s.top1, 0);
    same(s.nll, log(4));
    assert_true(fabs(s.kl - (0.5 * log(1.0) + 0.5 * log(2.0))) < 1e-7);
    s = (lm_kv_sums){ 0 };
    assert_true(lm_kv_compare_row(p, masked, 4, 0, &s)); /* 0 log 0 = 0 */
    assert_true(isfinite(s.kl) && s.kl > 0);
    for (int i = 0; i < 3; i++) {
        s = (lm_kv_sums){ 0 };
        assert_false(lm_kv_compare_row(q, bad[i], 4, 1, &s));
        assert_false(lm_kv_compare_row(bad[i], q, 4, 1, &s));
        assert_int_equal(s.tokens, 0);
    }
}

static void refusals(void **state)
{
    static const char other[] =
        "{\"model_type\":\"llama\",\"vocab_size\":80,\"hidden_size\":64,\"intermediate_size\":96,"
        "\"num_hidden_layers\":1,\"num_attention_heads\":4,\"num_key_value_heads\":2,"
        "\"max_position_embeddings\":400}";
    lm_loaded w;
    lm_kv_sums s[2] = { 0 };
    lm_kv_candidate c[2] = { { "f32", open_as(&full, LM_DTYPE_F32, 1, T) }, { "b", NULL } };
    lm_kv_text t = text(1, 1);

    (void)state;
    loaded_of(other, LM_DTYPE_F32, par, backend, &w);
    c[1].g = open_as(&w, LM_DTYPE_F32, 1, T);
    assert_int_equal(lm_kv_compare(c, 2, &t, s, &err), LM_EUSAGE);
    lm_generator_free(c[1].g);
    err = (lm_err){ 0 };
    c[1].g = open_as(&full, LM_DTYPE_F32, 1, T - 1);
    assert_int_equal(lm_kv_compare(c, 2, &t, s, &err), LM_EUSAGE);
    lm_generator_free(c[1].g);
    for (int k = 0; k < 4; k++) {
        static const int64_t bad[4][3] = { { 0, T, 1 }, { 1, 1, 1 }, { 1, T, 0 }, { 1, T, T } };
        t.windows = bad[k][0], t.length = bad[k][1], t.prompt = bad[k][2];
        err = (lm_err){ 0 };
        assert_int_equal(lm_kv_compare(c, 1, &t, s, &err), LM_EUSAGE);
    }
    err = (lm_err){ 0 };
    lm_generator_free(c[0].g);
    lm_loaded_fini(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sums_equal_a_plain_computation),
        cmocka_unit_test(equal_caches_do_not_differ),
        cmocka_unit_test(sums_do_not_depend_on_slots),
        cmocka_unit_test(steps_are_reported),
        cmocka_unit_test(rows_by_hand),
        cmocka_unit_test(refusals),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
