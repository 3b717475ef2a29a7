/* SPDX-License-Identifier: Apache-2.0 */
/* test_kv_auto.c -- methods by a budget of bits: the choice, and specifications with a budget. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/rng.h"
#include "kv/choose.h"
#include "kv/spec.h"
#include "kv/store.h"

/* ---- the choice ---- */

static double sum_of(const lm_kv_choice *o, int n, int m, const int *at, bool bytes)
{
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += bytes ? o[i * m + at[i]].bytes : o[i * m + at[i]].error;
    return sum;
}

/* The least error within the limit, over all choices. */
static double try_all(const lm_kv_choice *o, int n, int m, double limit)
{
    double best = INFINITY;
    if (n == 0)
        return limit >= 0 ? 0 : INFINITY;
    for (int k = 0; k < m; k++)
        best = fmin(best, o[k].error + try_all(o + m, n - 1, m, limit - o[k].bytes));
    return best;
}

/* Equal steps of bytes and errors that fall less and less: then single exchanges find the best choice. */
static void best_of_convex_offers(void **state)
{
    lm_rng r = lm_rng_make(21, "kv choose", 0);
    uint64_t at = 0;
    (void)state;
    for (int trial = 0; trial < 300; trial++) {
        lm_kv_choice o[5 * 4];
        int out[5];
        lm_err e = { 0 };
        double limit = 10 + (double)lm_rng_below(r, at++, 16);
        for (int i = 0; i < 5; i++) {
            double step = 8 + lm_rng_uniform(r, at++), error = 40;
            for (int k = 0; k < 4; k++) {
                o[i * 4 + k] = (lm_kv_choice){ 2 + k, error };
                error -= step;
                step *= 0.2 + 0.7 * lm_rng_uniform(r, at++);
            }
        }
        assert_int_equal(lm_kv_choose(o, 5, 4, limit, out, &e), LM_OK);
        assert_true(sum_of(o, 5, 4, out, true) <= limit);
        assert_true(fabs(sum_of(o, 5, 4, out, false) - try_all(o, 5, 4, limit)) < 1e-9);
    }
}

/* Any offers: within the limit, and no single exchange that fits saves error. */
static void no_exchange_is_left(void **state)
{
    lm_rng r = lm_rng_make(22, "kv choose", 0);
    uint64_t at = 0;
    int refused = 0;
    (void)state;
    for (int trial = 0; trial < 2000; trial++) {
        lm_kv_choice o[6 * 5];
        int out[6], again[6];
        lm_err e = { 0 };
        double limit = (double)lm_rng_below(r, at++, 60), least = 0;
        for (int i = 0; i < 30; i++)
            o[i] = (lm_kv_choice){ lm_rng_below(r, at++, 9) ? (double)lm_rng_below(r, at++, 12)
                                                            : (double)INFINITY,
                                   (double)lm_rng_below(r, at++, 20) };
        for (int i = 0; i < 6; i++) {
            double most = INFINITY;
            for (int k = 0; k < 5; k++)
                most = fmin(most, o[i * 5 + k].bytes);
            least += most;
        }
        lm_code rc = lm_kv_choose(o, 6, 5, limit, out, &e);
        assert_int_equal(rc, least <= limit ? LM_OK : LM_EUSAGE);
        refused += rc != LM_OK;
        if (rc)
            continue;
        double used = sum_of(o, 6, 5, out, true);
        assert_true(used <= limit);
        for (int i = 0; i < 6; i++)
            for (int k = 0; k < 5; k++)
                assert_true(o[i * 5 + k].error >= o[i * 5 + out[i]].error ||
                            used - o[i * 5 + out[i]].bytes + o[i * 5 + k].bytes > limit);
        assert_int_equal(lm_kv_choose(o, 6, 5, limit, again, &e), LM_OK);
        assert_memory_equal(out, again, sizeof out);
    }
    assert_true(refused > 10 && refused < 1900);
}

/* ---- specifications ---- */

enum { LAYERS = 4, D = 64, HEADS = 2, CANDIDATES = 4 };

static const char candidates[] = "int8;int4;int2;kivi";
static float errors[2 * LAYERS][CANDIDATES];
static lm_kv_numbers numbers[2 * LAYERS];

static lm_kv_data sensitivities(void)
{
    /* Layer 0 suffers most, keys more than values. */
    for (int i = 0; i < 2 * LAYERS; i++) {
        float weight = (i < 2 ? 10.0F : 1.0F) * (i % 2 ? 1.0F : 3.0F) * (1 + 0.01F * (float)i);
        errors[i][0] = weight * 0.01F;
        errors[i][1] = weight * 0.1F;
        errors[i][2] = weight * 1.0F;
        errors[i][3] = weight * (i % 2 ? 2.0F : 0.5F);
        numbers[i] = (lm_kv_numbers){ .errors = errors[i], .candidates = CANDIDATES };
    }
    return (lm_kv_data){ .layers = LAYERS,
                         .side = numbers,
                         .weights = "",
                         .config = "",
                         .candidates = candidates,
                         .path = "s.safetensors" };
}

static lm_code bind_text(const char *text, const lm_kv_data *d, lm_kv_plan **out, lm_err *e)
{
    lm_kv_site site[LAYERS];
    const lm_kv_data *const data[2] = { d, d };
    lm_kv_spec *s;
    for (int l = 0; l < LAYERS; l++)
        site[l] = (lm_kv_site){ .layer = l,
                                .layers = LAYERS,
                                .kv_heads = HEADS,
                                .head_dim = D,
                                .max_positions = 512,
                                .act = LM_DTYPE_BF16,
                                .rope = true };
    if (lm_kv_spec_parse(text, &s, e))
        fail_msg("%s: %s", text, e->what);
    lm_code rc = lm_kv_spec_bind(s, site, LAYERS, d ? data : NULL, out, e);
    if (!rc) /* the mean bits that were asked for */
        assert_true(lm_kv_plan_bytes(*out, site) > 0);
    lm_kv_spec_free(s);
    return rc;
}

static double bits_of(const lm_kv_plan *p)
{
    double bytes = 0;
    for (int64_t i = 0; i < 2 * p->layers; i++)
        bytes += p->side[i].format
                     ? (double)lm_kv_page_bytes(p->side[i].format, p->page, D) / (double)p->page
                     : 2.0 * D;
    return bytes * 8 / (double)(2 * p->layers * D);
}

static void budgets(void **state)
{
    lm_kv_data d = sensitivities();
    double last = INFINITY;
    (void)state;
    for (int bits = 9; bits >= 3; bits--) {
        char text[64];
        lm_err e = { 0 };
        lm_kv_plan *p, *again;
        double error = 0;
        snprintf(text, sizeof text, "auto:bits=%d,file=s.safetensors", bits);
        if (bind_text(text, &d, &p, &e))
            fail_msg("%s: %s", text, e.what);
        assert_true(bits_of(p) <= bits);
        assert_true(bits_of(p) <= last);
        last = bits_of(p);
        for (int i = 0; i < 2 * LAYERS; i++) {
            const char *name = p->side[i].format->name;
            int k = !strcmp(name, "int8")   ? 0
                    : !strcmp(name, "int4") ? 1
                    : !strcmp(name, "int2") ? 2
                                            : 3;
            error += (double)errors[i][k];
        }
        assert_true(bits < 9 || error < 0.6); /* all int8 */
        /* The text of the plan gives the same plan without a calibration. */
        assert_int_equal(bind_text(p->text, NULL, &again, &e), LM_OK);
        assert_string_equal(again->text, p->text);
        for (int i = 0; i < 2 * LAYERS; i++)
            assert_string_equal(again->side[i].format->name, p->side[i].format->name);
        lm_kv_plan_free(again);
        lm_kv_plan_free(p);
    }
    /* By hand.  3 bits: the cheapest for all, of which keys have less error as kivi.  5 bits: what saves most, layer 0
     * first; its keys as int8 save more per byte than other keys as int4. */
    lm_err e = { 0 };
    lm_kv_plan *p;
    assert_int_equal(bind_text("auto:bits=5,file=s.safetensors", &d, &p, &e), LM_OK);
    assert_string_equal(p->text, "layers.0=k=int8,v=int4;layers.1-2=k=int4,v=int2;layers.3=int4");
    lm_kv_plan_free(p);
    assert_int_equal(bind_text("snapkv+k=int8,v=auto:bits=3,file=s.safetensors", &d, &p, &e),
                     LM_OK);
    assert_string_equal(p->text, "layers.0-3=k=int8,v=int2;snapkv");
    assert_int_equal(p->policy->kind, LM_KV_SNAPKV);
    lm_kv_plan_free(p);
    assert_int_equal(bind_text("auto:bits=3,file=s.safetensors", &d, &p, &e), LM_OK);
    assert_string_equal(p->text, "layers.0-3=k=kivi,v=int2");
    lm_kv_plan_free(p);
    /* Budgets of parts, each for itself. */
    assert_int_equal(bind_text("layers.0=auto:bits=9,file=s.safetensors;layers.2=bf16;"
                               "auto:bits=5,file=s.safetensors",
                               &d, &p, &e),
                     LM_OK);
    assert_string_equal(p->text, "layers.0=int8;layers.1=int4;layers.2=bf16;layers.3=int4");
    lm_kv_plan_free(p);
}

static void refusals(void **state)
{
    static const struct {
        const char *text, *candidates, *what;
        bool none, few;
    } cases[] = {
        { "auto:bits=3", NULL, "auto with bits needs a calibration", true, false },
        { "auto:bits=3,file=s", NULL, "auto with bits needs a calibration", true, false },
        { "auto:file=s", NULL, "no calibration is read", false, false },
        { "auto:bits=2,file=s", NULL, "the cheapest forms have 3 bits a number, not 2", false,
          false },
        { "auto:bits=3,file=s", "", "there are no candidates for auto", false, false },
        { "auto:bits=3,file=s", "int9", "there is no method 'int9'", false, false },
        { "auto:bits=3,file=s", "int8;;int4", "there is no method ''", false, false },
        { "auto:bits=3,file=s", "k=int8;int4;int2;int3", "the candidate 'k=int8' is not one method",
          false, false },
        { "auto:bits=3,file=s", "auto:bits=2;int4;int2;int3",
          "the candidate 'auto:bits=2' is not one method", false, false },
        { "auto:bits=3,file=s", "fp8:scale=head,file=x",
          "the candidate 'fp8:scale=head,file=x' is not one method", false, false },
        { "auto:bits=3,file=s", "int8;int4",
          "s.safetensors has 4 errors for the keys of layer 0, not 2", false, false },
        { "auto:bits=3,file=s", NULL, "s.safetensors has 0 errors for the keys of layer 3, not 4",
          false, true },
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        lm_kv_data d = sensitivities();
        lm_err e = { 0 };
        lm_kv_plan *p;
        d.candidates = cases[i].candidates ? cases[i].candidates : candidates;
        d.layers = cases[i].few ? LAYERS - 1 : LAYERS;
        lm_code rc = bind_text(cases[i].text, cases[i].none ? NULL : &d, &p, &e);
        assert_string_equal(e.what, cases[i].what);
        assert_true(rc == LM_EUSAGE || rc == LM_EFORMAT);
        assert_null(p);
    }
}

/* ---- errors from numbers ---- */

enum { N = 200, QUERIES = 4 };
static float q[N * QUERIES * 80], k[N * HEADS * 80], v[N * HEADS * 80], stored[N * HEADS * 80];

static void draw_layer(uint64_t seed, int64_t head_dim)
{
    lm_rng r = lm_rng_make(seed, "kv sensitivity", 0);
    for (int64_t i = 0; i < N * QUERIES * head_dim; i++)
        q[i] = (float)lm_rng_normal(r, (uint64_t)i);
    for (int64_t i = 0; i < N * HEADS * head_dim; i++) {
        k[i] = (float)(lm_rng_normal(r, 1000000 + (uint64_t)i) * (i % 16 == 3 ? 5 : 1));
        v[i] = (float)lm_rng_normal(r, 2000000 + (uint64_t)i);
    }
}

static void sensitivity_of_arrays(void **state)
{
    static const char *const names[] = { "int8", "int4:group=16", "int2:residual=0",
                                         "kivi", "q4_0",          "bf16" };
    static const int64_t dims[] = { 64, 80 };
    (void)state;
    for (int s = 0; s < 2; s++) {
        int64_t dim = dims[s];
        lm_kv_site site[1] = { { .layers = 1,
                                 .kv_heads = HEADS,
                                 .head_dim = dim,
                                 .max_positions = 512,
                                 .act = LM_DTYPE_F32,
                                 .rope = true } };
        lm_kv_attention a = { QUERIES, HEADS, dim, 0, 0.1, 0 };
        float error[2][LM_KV_MAX_CANDIDATES];
        lm_err e = { 0 };
        int m;
        draw_layer((uint64_t)s, dim);
        assert_int_equal(lm_kv_sensitivity("int8;int4:group=16;int2:residual=0;kivi;q4_0;bf16",
                                           site, &a, N, 0, q, k, v, error, &m, &e),
                         LM_OK);
        assert_int_equal(m, 6);
        for (int c = 0; c < m; c++)
            for (int side = 0; side < 2; side++) {
                lm_kv_spec *spec;
                lm_kv_plan *p;
                double want, norm;
                lm_err none = { 0 };
                assert_int_equal(lm_kv_spec_parse(names[c], &spec, &e), LM_OK);
                lm_code rc = lm_kv_spec_bind(spec, site, 1, NULL, &p, &none);
                assert_int_equal(rc, c == 4 && dim == 80 ? LM_EUSAGE : LM_OK);
                lm_kv_spec_free(spec);
                if (!rc)
                    assert_int_equal(lm_kv_store(&p->side[side], p->page, HEADS, dim, side ? v : k,
                                                 N, stored, &e),
                                     LM_OK);
                assert_int_equal(lm_kv_attention_error(&a, N, q, k, v, side || rc ? k : stored,
                                                       side && !rc ? stored : v, &want, &norm, &e),
                                 LM_OK);
                want = rc ? norm : want;
                if (!(fabs((double)error[side][c] - want) <= 1e-4 * want))
                    fail_msg("%s: %g, not %g", names[c], (double)error[side][c], want);
                lm_kv_plan_free(p);
            }
        for (int side = 0; side < 2; side++) /* fewer bits, larger errors */
            assert_true(error[side][0] < error[side][1] && error[side][1] < error[side][2]);
    }
}

/* Errors of some queries stand for those of all; n of them are all. */
static void sensitivity_of_some_queries(void **state)
{
    lm_kv_site site[1] = { { .layers = 1,
                             .kv_heads = HEADS,
                             .head_dim = 80,
                             .max_positions = 512,
                             .act = LM_DTYPE_F32,
                             .rope = true } };
    lm_kv_attention a = { QUERIES, HEADS, 80, 50, 0.1, 20 };
    float all[2][LM_KV_MAX_CANDIDATES], same[2][LM_KV_MAX_CANDIDATES],
        some[2][LM_KV_MAX_CANDIDATES];
    lm_err e = { 0 };
    int m;
    (void)state;
    draw_layer(3, 80);
    static const char list[] = "int8;int4:group=16;int2:residual=0;q4_0";
    assert_int_equal(lm_kv_sensitivity(list, site, &a, N, 0, q, k, v, all, &m, &e), LM_OK);
    assert_int_equal(lm_kv_sensitivity(list, site, &a, N, N + 9, q, k, v, same, &m, &e), LM_OK);
    assert_int_equal(lm_kv_sensitivity(list, site, &a, N, 40, q, k, v, some, &m, &e), LM_OK);
    for (int side = 0; side < 2; side++)
        for (int c = 0; c < 4; c++) {
            assert_true(same[side][c] == all[side][c]);
            assert_true(some[side][c] > 0.7F * all[side][c] && some[side][c] < 1.4F * all[side][c]);
            assert_true(some[side][c] != all[side][c]);
        }
}

static void refused_candidates(void **state)
{
    float error[2][LM_KV_MAX_CANDIDATES];
    lm_kv_site site[1] = { { .layers = 1, .kv_heads = HEADS, .head_dim = 64 } };
    lm_kv_attention a = { QUERIES, HEADS, 64, 0, 0.1, 0 };
    lm_err e = { 0 };
    int m;
    (void)state;
    assert_int_equal(lm_kv_sensitivity("h2o", site, &a, N, 0, q, k, v, error, &m, &e), LM_EUSAGE);
    assert_string_equal(e.what, "the candidate 'h2o' is not one method");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(best_of_convex_offers),
        cmocka_unit_test(no_exchange_is_left),
        cmocka_unit_test(budgets),
        cmocka_unit_test(refusals),
        cmocka_unit_test(sensitivity_of_arrays),
        cmocka_unit_test(sensitivity_of_some_queries),
        cmocka_unit_test(refused_candidates),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
