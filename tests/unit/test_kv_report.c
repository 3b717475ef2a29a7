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
#include "cpu_case.h"
#include "loaded_case.h"

enum { V = 96, T = 40, WINDOWS = 3, LAYERS = 2, H = 4, K = 2, D = 32, WIDTH = K * D };

static const char config[] =
    "{\"model_type\":\"llama\",\"vocab_size\":96,\"hidden_size\":64,\"intermediate_size\":96,"
    "\"num_hidden_layers\":2,\"num_attention_heads\":4,\"num_key_value_heads\":2,\"head_dim\":32,"
    "\"max_position_embeddings\":64,\"initializer_range\":0.2}";

static lm_loaded model, host;
static uint32_t ids[WINDOWS * T];

static int setup(void **state)
{
    assert_int_equal(open_cpu(state), 0);
    loaded_of(config, LM_DTYPE_BF16, par, backend, &model);
    loaded_of(config, LM_DTYPE_F32, par, backend, &host);
    for (int i = 0; i < WINDOWS * T; i++)
        ids[i] = (uint32_t)lm_rng_below(lm_rng_make(7, "test", 0), (uint64_t)i, V);
    return 0;
}

static int teardown(void **state)
{
    lm_loaded_fini(&model);
    lm_loaded_fini(&host);
    return close_cpu(state);
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
    assert_true(lm_kv_solved(all[1].solved, 0, 0) < 0);
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
    lm_kv_captured r = lm_kv_capture_layer(c, layer);
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

/* Bytes of a text count tokens that stay plain, and only those that a policy leaves. */
/* Plain tokens of n: the mean of keys and values. */
static double none_plain(int n)
{
    (void)n;
    return 0;
}

static double ends_plain(int n)
{
    (void)n;
    return 7;
}

/* Keys are coded in blocks of 32 tokens, of values all but the 32 newest. */
static double blocks_plain(int n)
{
    return (n % 32 + (n < 32 ? n : 32)) / 2.0;
}

/* In the mean over the last lengths, half of T because a page is longer; policies leave what they leave of T tokens. */
static void bytes_are_those_of_a_text(void **state)
{
    static const struct {
        const char *spec;
        double (*plain)(int n); /* NULL: a policy */
        int kept_plain, kept;   /* by a policy */
    } want[] = {
        { "int8", none_plain, 0, 0 },
        { "int4:sinks=3,residual=4,group=16", ends_plain, 0, 0 },
        { "kivi:bits=2,group=32,residual=32", blocks_plain, 0, 0 },
        { "streaming:sinks=2,window=10", NULL, 12, 12 },
        { "h2o:keep=0.5+int8", NULL, 0, T / 2 },
        { "snapkv:capacity=16,window=4+int4:residual=5", NULL, 5, 16 },
    };
    enum { N = sizeof want / sizeof *want };
    lm_kv_report r = settings();
    lm_kv_row row[1 + N] = { { .name = "plain" } };
    (void)state;
    r.speed_steps = 0;
    r.host_w = NULL;
    for (int i = 0; i < N; i++)
        row[1 + i] = (lm_kv_row){ .name = want[i].spec, .spec = want[i].spec };
    ok(lm_kv_report_run(&r, row, 1 + N, &err));
    assert_true(row[0].coded_bytes == row[0].token_bytes);
    for (int i = 0; i < N; i++) {
        const lm_kv_row *x = &row[1 + i];
        double coded = x->coded_bytes, extra = x->plain_bytes - coded, bytes = 0;
        if (!want[i].plain)
            bytes = (want[i].kept * coded + want[i].kept_plain * extra) / T;
        for (int n = T / 2 + 1; n <= T && want[i].plain; n++)
            bytes += (coded + want[i].plain(n) * extra / n) / (T / 2);
        if (!x->ran || !(fabs(x->token_bytes - bytes) <= 1e-9 * bytes))
            fail_msg("%s: %g bytes, not %g (%s)", want[i].spec, x->token_bytes, bytes, x->why.what);
    }
    free_rows(row, 1 + N);
}

/* Each row has the sums of the plain cache on its own tokens: those of a policy lie behind half a window. */
static void references_are_of_the_same_tokens(void **state)
{
    lm_kv_report r = settings();
    lm_kv_row row[4] = { { .name = "plain" },
                         { .name = "int4", .spec = "int4" },
                         { .name = "all", .spec = "snapkv:capacity=64" },
                         { .name = "few", .spec = "streaming:sinks=1,window=4" } };
    (void)state;
    r.speed_steps = 0;
    r.host_w = NULL;
    ok(lm_kv_report_run(&r, row, 4, &err));
    same_sums(&row[0].reference, &row[0].sum);
    same_sums(&row[1].reference, &row[0].sum);
    for (int i = 2; i < 4; i++) {
        assert_int_equal(row[i].sum.tokens, WINDOWS * (T - T / 2));
        assert_int_equal(row[i].reference.tokens, row[i].sum.tokens);
        assert_true(row[i].reference.nll == row[2].reference.nll && row[i].reference.kl == 0);
    }
    assert_true(row[2].reference.nll < row[0].reference.nll);
    assert_true(row[2].sum.kl < 1e-3 && row[3].sum.kl > 0.1);
    free_rows(row, 4);
}

enum { TASKS = 8, CONTEXT = 30, QUESTION = 4 };

/* The likeliest token behind a context that runs as a prompt and a question, the last `decoded` tokens of which are
 * decoded. */
static uint32_t answer_of(const lm_kv_plan *p, const uint32_t *text, int decoded)
{
    static const lm_sample_attr greedy = { 0, 0, 1, 0, 1 };
    const lm_generator_opts o = { .dtype = LM_DTYPE_BF16, .batch = 1, .context = 64, .kv = p };
    const double u = 0;
    const int32_t *id;
    lm_generator *g;
    int64_t at = CONTEXT + QUESTION - decoded;
    ok(lm_generator_new(&model, &o, backend, &g, &err));
    ok(lm_generator_prompt(g, 0, text, at, NULL, &err));
    for (; at < CONTEXT + QUESTION; at++) {
        int32_t next = (int32_t)text[at];
        ok(lm_generator_next(g, &next, &greedy, &u, &id, NULL, &err));
    }
    uint32_t answer = (uint32_t)*id;
    lm_generator_free(g);
    return answer;
}

/* The question is decoded; with a policy it is also asked in prompts that have it but its last token. */
static void policies_observe_the_question(void **state)
{
    static const char spec[] = "snapkv:capacity=8,window=4,kernel=1";
    static uint32_t text[TASKS][CONTEXT + QUESTION + 1];
    lm_kv_task task[TASKS];
    const lm_kv_passkeys passkeys = { task, TASKS, CONTEXT + QUESTION + 1, NULL };
    lm_kv_report r = settings();
    lm_cache_plan plan;
    int differ = 0;
    (void)state;
    r.speed_steps = 0;
    r.host_w = NULL;
    r.passkeys = &passkeys;
    r.cells = 1;
    ok(lm_cache_plan_open(spec, &model.config, LM_DTYPE_BF16, NULL, &plan, &err));
    for (int i = 0; i < TASKS; i++) {
        for (int k = 0; k < CONTEXT + QUESTION; k++)
            text[i][k] =
                (uint32_t)lm_rng_below(lm_rng_make(8, "task", (uint64_t)i), (uint64_t)k, V);
        task[i] = (lm_kv_task){ text[i], CONTEXT, QUESTION, 1, 0 };
        text[i][CONTEXT + QUESTION] = answer_of(plan.plan, text[i], 1);
        differ += text[i][CONTEXT + QUESTION] != answer_of(plan.plan, text[i], QUESTION);
    }
    assert_true(differ > 0);
    lm_kv_row row[2] = { { .name = "plain" }, { .name = "snapkv", .spec = spec } };
    ok(lm_kv_report_run(&r, row, 2, &err));
    assert_int_equal(row[1].observed[0], TASKS);
    assert_int_equal(row[1].solved[0], TASKS - differ);
    assert_null(row[0].observed);
    assert_true(lm_kv_solved(row[1].observed, 1, TASKS) == 1);
    free_rows(row, 2);
    for (int i = 0; i < TASKS; i++)
        text[i][CONTEXT + QUESTION] = answer_of(NULL, text[i], QUESTION);
    row[0] = (lm_kv_row){ .name = "plain" };
    ok(lm_kv_report_run(&r, row, 1, &err));
    assert_int_equal(row[0].solved[0], TASKS);
    free_rows(row, 1);
    lm_cache_plan_fini(&plan);
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
        cmocka_unit_test(bytes_are_those_of_a_text),
        cmocka_unit_test(references_are_of_the_same_tokens),
        cmocka_unit_test(policies_observe_the_question),
        cmocka_unit_test(a_row_says_why_it_cannot_run),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
