/* SPDX-License-Identifier: Apache-2.0 */
/* test_kv_report.c -- rows of ways to store a cache: against single comparisons, and errors of attention against the
 * definition. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdio.h>

#include "base/rng.h"
#include "compress/kv_calibrate.h"
#include "compress/kv_capture.h"
#include "compress/kv_report.h"
#include "loaded_case.h"

enum { V = 96, T = 40, WINDOWS = 3, LAYERS = 2, H = 4, K = 2, D = 32, WIDTH = K * D };

static const char config[] =
    "{\"model_type\":\"llama\",\"vocab_size\":96,\"hidden_size\":64,\"intermediate_size\":96,"
    "\"num_hidden_layers\":2,\"num_attention_heads\":4,\"num_key_value_heads\":2,\"head_dim\":32,"
    "\"max_position_embeddings\":64,\"initializer_range\":0.2}";

static lm_err err;
static lm_par *par;
static lm_backend *backend;
static lm_loaded model, host;
static uint32_t ids[WINDOWS * T];

static void ok(lm_code rc)
{
    if (rc)
        fail_msg("%s: %s", err.where, err.what);
}

static int setup(void **state)
{
    (void)state;
    ok(lm_par_new(&par, 2, &err));
    ok(lm_backend_cpu(lm_cpu_detect(), par, &backend, &err));
    loaded_of(config, LM_DTYPE_BF16, par, backend, &model);
    loaded_of(config, LM_DTYPE_F32, par, backend, &host);
    for (int i = 0; i < WINDOWS * T; i++)
        ids[i] = (uint32_t)lm_rng_below(lm_rng_make(7, "test", 0), (uint64_t)i, V);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    lm_loaded_fini(&model);
    lm_loaded_fini(&host);
    lm_backend_close(backend);
    lm_par_free(par);
    return 0;
}

static lm_kv_report settings(void)
{
    return (lm_kv_report){ .w = &model,
                           .dtype = LM_DTYPE_BF16,
                           .b = backend,
                           .par = par,
                           .ids = ids,
                           .windows = WINDOWS,
                           .length = T,
                           .speed_prompt = 16,
                           .speed_steps = 4,
                           .batch = { 1, 3 },
                           .host_w = &host,
                           .host = backend,
                           .error_tokens = 32 };
}

static void free_rows(lm_kv_row *row, int n)
{
    for (int i = 0; i < n; i++)
        lm_kv_row_fini(&row[i]);
}

static void same_sums(const lm_kv_sums *a, const lm_kv_sums *b)
{
    assert_int_equal(a->tokens, b->tokens);
    assert_int_equal(a->top1, b->top1);
    assert_memory_equal(&a->kl, &b->kl, sizeof a->kl);
    assert_memory_equal(&a->nll, &b->nll, sizeof a->nll);
}

/* Rows do not depend on the others, nor on their order; the reference differs from nothing. */
static void rows_are_independent(void **state)
{
    const lm_kv_report r = settings();
    lm_kv_row all[4] = { { .name = "plain" },
                         { .name = "a", .spec = "int8" },
                         { .name = "b", .spec = "int4:group=16" },
                         { .name = "c", .spec = "k=int8,v=int4" } };
    lm_kv_row two[3] = { { .name = "plain" },
                         { .name = "c", .spec = "k=int8,v=int4" },
                         { .name = "a", .spec = "int8" } };
    (void)state;
    ok(lm_kv_report_run(&r, all, 4, &err));
    ok(lm_kv_report_run(&r, two, 3, &err));
    for (int i = 0; i < 4; i++) {
        assert_true(all[i].ran);
        assert_int_equal(all[i].sum.tokens, WINDOWS * (T - 1));
        assert_true(all[i].rate[0] > 0 && all[i].rate[1] > 0 && all[i].first > 0);
        assert_true(all[i].memory > 0);
    }
    assert_true(all[0].sum.kl == 0 && all[0].sum.top1 == WINDOWS * (T - 1));
    assert_true(all[1].sum.kl > 0 && all[2].sum.kl > 4 * all[1].sum.kl);
    assert_true(all[0].token_bytes == LAYERS * 2 * WIDTH * 2);
    assert_true(all[1].token_bytes < all[0].token_bytes && all[2].token_bytes < all[1].token_bytes);
    assert_true(all[3].token_bytes < all[1].token_bytes);
    same_sums(&two[1].sum, &all[3].sum);
    same_sums(&two[2].sum, &all[1].sum);
    assert_null(all[0].error);
    for (int l = 0; l < LAYERS; l++) {
        assert_memory_equal(&two[2].error[l], &all[1].error[l], sizeof *all[1].error);
        if (!(all[1].error[l] > 0 && all[2].error[l] > 4 * all[1].error[l]))
            fail_msg("layer %d: %g, %g", l, all[1].error[l], all[2].error[l]);
    }
    assert_true(lm_kv_row_error(&all[1], LAYERS) >= fmin(all[1].error[0], all[1].error[1]));
    assert_true(lm_kv_row_error(&all[0], LAYERS) < 0);
    assert_true(lm_kv_row_solved(&all[1], 0, 0) < 0);
    free_rows(all, 4);
    free_rows(two, 3);
}

/* The sums of a row are those of one comparison of two generators. */
static void sums_are_those_of_a_comparison(void **state)
{
    lm_kv_report r = settings();
    lm_kv_row row[2] = { { .name = "plain" }, { .name = "int4", .spec = "int4" } };
    lm_kv_sums want[2] = { 0 };
    lm_kv_candidate c[2] = { { "plain", NULL }, { "int4", NULL } };
    const lm_kv_text text = {
        .ids = ids, .windows = WINDOWS, .length = T, .prompt = 1, .b = backend, .par = par
    };
    (void)state;
    r.speed_steps = 0;
    r.host_w = NULL;
    ok(lm_kv_report_run(&r, row, 2, &err));
    assert_true(row[1].rate[0] < 0 && row[1].memory < 0);
    assert_null(row[1].error);
    for (int i = 0; i < 2; i++) {
        lm_generator_opts o = { .dtype = LM_DTYPE_BF16, .batch = WINDOWS, .context = T };
        o.kv = row[i].plan.plan;
        ok(lm_generator_new(&model, &o, backend, &c[i].g, &err));
    }
    ok(lm_kv_compare(c, 2, &text, want, &err));
    for (int i = 0; i < 2; i++) {
        same_sums(&row[i].sum, &want[i]);
        lm_generator_free(c[i].g);
    }
    free_rows(row, 2);
}

/* The error of one layer by lm_kv_store on captured numbers. */
static double error_of(const lm_kv_plan *p, int64_t layer, int64_t n)
{
    static float q[T * H * D], kv[2][T * WIDTH], x[T * WIDTH], y[2][T * WIDTH];
    const lm_kv_attention a = lm_kv_attention_of(&host.config, layer);
    lm_kv_capture *c;
    double error, norm;
    ok(lm_kv_capture_new(&host, n, false, backend, &c, &err));
    ok(lm_kv_capture_run(c, ids, NULL, &err));
    lm_kv_rows r = lm_kv_capture_layer(c, layer);
    lm_kv_columns(r.rotated, (H + 2 * K) * D, 0, H * D, n, q);
    for (int side = 0; side < 2; side++) {
        const lm_kv_side *s = &p->side[2 * layer + side];
        const float *from = s->pre_rope ? r.before : r.rotated;
        lm_kv_columns(r.rotated, (H + 2 * K) * D, (H + side * K) * D, WIDTH, n, kv[side]);
        lm_kv_columns(from, (H + 2 * K) * D, (H + side * K) * D, WIDTH, n, x);
        ok(lm_kv_store(s, p->page, K, D, x, n, y[side], &err));
        if (s->pre_rope)
            lm_kv_capture_rotate(c, layer, n, y[side]);
    }
    ok(lm_kv_attention_error(&a, n, q, kv[0], kv[1], y[0], y[1], &error, &norm, &err));
    lm_kv_capture_free(c);
    return sqrt(error / norm);
}

/* Also for keys that are stored before their rotation: with more bits, the error falls. */
static void errors_of_attention_are_those_of_the_definition(void **state)
{
    lm_kv_report r = settings();
    lm_kv_calibrate_opts o = { .ids = ids, .windows = WINDOWS, .seq = T, .par = par };
    lm_kv_data *d[2];
    lm_kv_row row[4] = { { .name = "plain" }, { .name = "int4", .spec = "int4" } };
    (void)state;
    for (int i = 0; i < 2; i++) {
        o.levels = (lm_kvquant_opts){ .bits = i ? 4 : 2 };
        ok(lm_kv_calibrate(&host, &o, "here", backend, NULL, &d[i], &err));
        row[2 + i] = (lm_kv_row){ .name = "kvquant", .spec = "kvquant:file=here", .data = d[i] };
    }
    r.speed_steps = 0;
    ok(lm_kv_report_run(&r, row, 4, &err));
    for (int i = 1; i < 4; i++)
        for (int l = 0; l < LAYERS; l++) {
            double want = error_of(row[i].plan.plan, l, r.error_tokens);
            if (!(fabs(row[i].error[l] - want) <= 1e-12))
                fail_msg("row %d, layer %d: %.17g, not %.17g", i, l, row[i].error[l], want);
        }
    for (int l = 0; l < LAYERS; l++)
        assert_true(row[3].error[l] > 0 && row[3].error[l] < 0.6 * row[2].error[l]);
    free_rows(row, 4);
    lm_kv_data_free(d[0]);
    lm_kv_data_free(d[1]);
}

/* A specification that is none, or that this model cannot use: the row says why, and the others are measured. */
static void a_row_says_why_it_cannot_run(void **state)
{
    lm_kv_report r = settings();
    lm_kv_row row[4] = { { .name = "plain" },
                         { .name = "x", .spec = "int9" },
                         { .name = "y", .spec = "layers.7=int4" },
                         { .name = "int4", .spec = "int4" } };
    (void)state;
    r.speed_steps = 0;
    ok(lm_kv_report_run(&r, row, 4, &err));
    assert_false(row[1].ran);
    assert_non_null(strstr(row[1].why.what, "int9"));
    assert_false(row[2].ran);
    assert_int_equal(row[2].sum.tokens, 0);
    assert_true(row[0].ran && row[3].ran && row[3].sum.tokens > 0);
    free_rows(row, 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_are_independent),
        cmocka_unit_test(sums_are_those_of_a_comparison),
        cmocka_unit_test(errors_of_attention_are_those_of_the_definition),
        cmocka_unit_test(a_row_says_why_it_cannot_run),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
