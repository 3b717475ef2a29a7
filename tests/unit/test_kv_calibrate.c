/* SPDX-License-Identifier: Apache-2.0 */
/* test_kv_calibrate.c -- what is captured of a model: rotation, gradients by differences; and calibrations from it, against
 * the functions of kv/ on the same numbers. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/rng.h"
#include "compress/kv_calibrate.h"
#include "compress/kv_capture.h"
#include "cpu_case.h"
#include "kv/spec.h"
#include "kvquant_case.h"
#include "loaded_case.h"
#include "model/cache_plan.h"

enum { V = 96, T = 24, WINDOWS = 3, LAYERS = 2, H = 4, K = 2, D = 16, WIDTH = K * D };
enum { ALL = (H + 2 * K) * D };

static const char config[] =
    "{\"model_type\":\"llama\",\"vocab_size\":96,\"hidden_size\":64,\"intermediate_size\":96,"
    "\"num_hidden_layers\":2,\"num_attention_heads\":4,\"num_key_value_heads\":2,"
    "\"attention_bias\":true,\"max_position_embeddings\":64,\"initializer_range\":0.2}";
static const char learned[] =
    "{\"model_type\":\"gpt2\",\"vocab_size\":96,\"n_embd\":64,\"n_layer\":2,\"n_head\":4,"
    "\"n_positions\":64,\"initializer_range\":0.2}";

static lm_loaded model;
static lm_model *names; /* of the tensors in its store */
static uint32_t ids[WINDOWS * T];

static int setup(void **state)
{
    assert_int_equal(open_cpu(state), 0);
    const lm_build build = {
        .mode = LM_MODE_EVAL, .batch = 1, .seq = 1, .precision = { LM_DTYPE_F32 }
    };
    loaded_of(config, LM_DTYPE_F32, par, backend, &model);
    ok(lm_model_build(&model.config, &build, &names, &err));
    model.store->model = names;
    for (int i = 0; i < WINDOWS * T; i++)
        ids[i] = (uint32_t)lm_rng_below(lm_rng_make(3, "test", 0), (uint64_t)i, V);
    return 0;
}

static int teardown(void **state)
{
    lm_loaded_fini(&model);
    lm_model_free(names);
    return close_cpu(state);
}

static lm_kv_capture *open_capture(bool gradients)
{
    lm_kv_capture *c;
    ok(lm_kv_capture_new(&model, T, gradients, backend, &c, &err));
    return c;
}

/* ---- captured numbers ---- */

/* The model's own rotation of keys is that of lm_kv_capture_rotate; values are not rotated, and position 0 is
 * the same before and after. */
static void keys_are_those_before_and_after_the_rotation(void **state)
{
    static float k[T * WIDTH], want[T * WIDTH];
    lm_kv_capture *c = open_capture(false);
    (void)state;
    ok(lm_kv_capture_run(c, ids, NULL, &err));
    for (int64_t l = 0; l < LAYERS; l++) {
        lm_kv_captured r = lm_kv_capture_layer(c, l);
        double most = 0;
        assert_null(r.gradient);
        lm_kv_columns(r.before, ALL, H * D, WIDTH, T, k);
        lm_kv_columns(r.rotated, ALL, H * D, WIDTH, T, want);
        assert_memory_equal(k, want, WIDTH * sizeof *k);
        for (int i = 0; i < T * WIDTH; i++)
            most = fmax(most, fabs((double)k[i] - (double)want[i]));
        assert_true(most > 0.01);
        lm_kv_capture_rotate(c, l, T, k);
        for (int i = 0; i < T * WIDTH; i++)
            if (!(fabsf(k[i] - want[i]) <= 1e-5F * (1 + fabsf(want[i]))))
                fail_msg("layer %d, number %d: %g, not %g", (int)l, i, (double)k[i],
                         (double)want[i]);
        for (int t = 0; t < T; t++)
            assert_memory_equal(r.before + t * ALL + (H + K) * D, r.rotated + t * ALL + (H + K) * D,
                                WIDTH * sizeof *k);
    }
    lm_kv_capture_free(c);
}

static double rms(const float *rows, int column)
{
    double sum = 0;
    for (int t = 0; t < T; t++)
        sum += (double)rows[t * ALL + column] * (double)rows[t * ALL + column];
    return sqrt(sum / T);
}

/* Of a head's channels one half is not above the median, and the largest is the ratio above it. */
static double ratio_of(const float *rows, int head)
{
    double ratio = 0;
    for (int i = 0; i < D; i++) {
        double median = rms(rows, (H + head) * D + i), most = 0;
        int below = 0;
        for (int d = 0; d < D; d++) {
            double x = rms(rows, (H + head) * D + d);
            below += x < median;
            most = fmax(most, x);
        }
        if (below == D / 2)
            ratio = most / median;
    }
    return ratio;
}

/* Heads by themselves: the worst one is not the same in all layers and windows. */
static void outliers_are_those_of_the_worst_head(void **state)
{
    lm_kv_capture *c = open_capture(false);
    bool worst[K] = { false };
    (void)state;
    for (int i = 0; i < WINDOWS * LAYERS; i++) {
        const int layer = i % LAYERS;
        ok(lm_kv_capture_run(c, ids + i / LAYERS * T, NULL, &err));
        const float *rows = lm_kv_capture_layer(c, layer).rotated;
        double want = 0, got;
        int at = 0;
        for (int h = 0; h < K; h++)
            if (ratio_of(rows, h) > want)
                want = ratio_of(rows, at = h);
        worst[at] = true;
        ok(lm_kv_capture_outliers(c, layer, &got, &err));
        if (!(want > 1 && fabs(got - want) <= 1e-9 * want))
            fail_msg("layer %d: %.17g, not %.17g", layer, got, want);
    }
    for (int h = 0; h < K; h++)
        assert_true(worst[h]);
    lm_kv_capture_free(c);
}

static double loss_with(lm_kv_capture *c, int slice, float *bias, int at, float x)
{
    double nll = 0;
    float was = bias[at];
    bias[at] = x;
    ok(lm_store_put(model.store, slice, LM_DTYPE_F32, bias, &err));
    ok(lm_kv_capture_run(c, ids, &nll, &err));
    bias[at] = was;
    ok(lm_store_put(model.store, slice, LM_DTYPE_F32, bias, &err));
    return nll;
}

/* A bias is added to all tokens before the rotation: the sum of the gradients of its column is that of the loss. */
static void check_gradient(lm_kv_capture *c, int64_t layer, const char *tensor, int column, int at)
{
    static float bias[WIDTH];
    char name[96];
    double sum = 0, step = 1e-2;
    snprintf(name, sizeof name, "model.layers.%d.self_attn.%s.bias", (int)layer, tensor);
    int slice = lm_model_slice(names, name);
    assert_true(slice >= 0);
    ok(lm_kv_capture_run(c, ids, NULL, &err));
    const float *g = lm_kv_capture_layer(c, layer).gradient;
    for (int t = 0; t < T; t++)
        sum += (double)g[t * ALL + column + at];
    memset(bias, 0, sizeof bias);
    double high = loss_with(c, slice, bias, at, (float)step);
    double low = loss_with(c, slice, bias, at, -(float)step);
    double want = (high - low) / (2 * step);
    if (!(fabs(sum - want) <= 2e-3 + 2e-2 * fabs(want)))
        fail_msg("%s, column %d: %g, by differences %g", name, at, sum, want);
}

static void gradients_equal_differences(void **state)
{
    lm_kv_capture *c = open_capture(true);
    (void)state;
    for (int64_t l = 0; l < LAYERS; l++)
        for (int at = 3; at < WIDTH; at += 7) {
            check_gradient(c, l, "k_proj", H * D, at);
            check_gradient(c, l, "v_proj", (H + K) * D, at);
        }
    lm_kv_capture_free(c);
}

/* ---- calibrations ---- */

static lm_kv_calibrate_opts options(void)
{
    return (lm_kv_calibrate_opts){ .levels = { .bits = 3, .outliers = 0.02, .moments = true },
                                   .scales = true,
                                   .candidates = "int8;int4",
                                   .ids = ids,
                                   .windows = WINDOWS,
                                   .seq = T,
                                   .par = par };
}

static void same(const char *what, const float *got, const float *want, int n)
{
    for (int i = 0; i < n; i++)
        if (memcmp(&got[i], &want[i], sizeof *got) != 0)
            fail_msg("%s %d: %.9g, not %.9g", what, i, (double)got[i], (double)want[i]);
}

/* All tokens of one side of a layer, their squared gradients, and the keys or values as they are stored. */
static void collect(int64_t layer, int side, float *x, float *w, float *stored)
{
    lm_kv_capture *c = open_capture(true);
    int from = (H + side * K) * D;
    for (int i = 0; i < WINDOWS; i++) {
        ok(lm_kv_capture_run(c, ids + i * T, NULL, &err));
        lm_kv_captured r = lm_kv_capture_layer(c, layer);
        for (int t = 0; t < T; t++)
            for (int j = 0; j < WIDTH; j++) {
                int at = (i * T + t) * WIDTH + j;
                x[at] = r.before[t * ALL + from + j];
                stored[at] = r.rotated[t * ALL + from + j];
                w[at] = r.gradient[t * ALL + from + j] * r.gradient[t * ALL + from + j];
            }
    }
    lm_kv_capture_free(c);
}

/* The share of outliers among the values x of each head. */
static void check_outliers(const lm_kv_numbers *n, double outliers, const float *x)
{
    float share[K] = { 0 }, work[WIDTH], range[2];
    for (int t = 0; t < WINDOWS * T; t++, x += WIDTH) {
        lm_kv_token_range(outliers, x, WIDTH, range, work);
        for (int i = 0; i < WIDTH; i++)
            share[i / D] += x[i] < range[0] || x[i] > range[1] ? 1.0f / (WINDOWS * T * D) : 0;
    }
    assert_int_equal(n->heads, K);
    assert_true(n->outside[0] + n->outside[1] > 0);
    for (int h = 0; h < K; h++)
        assert_true(fabsf(n->outside[h] - share[h]) < 1e-5f);
}

static void check_side(const lm_kv_data *d, int64_t layer, int side)
{
    static float x[WINDOWS * T * WIDTH], w[WINDOWS * T * WIDTH], stored[WINDOWS * T * WIDTH];
    float lower[WIDTH], upper[WIDTH], table[8], most = 0;
    const lm_kv_numbers *n = &d->side[2 * layer + side];
    const lm_kv_calibrate_opts o = options();
    collect(layer, side, x, w, stored);
    if (side == LM_KV_K)
        ok(kvquant_keys(&o.levels, x, w, WINDOWS * T, WIDTH, lower, upper, table, &err));
    else
        ok(kvquant_values(&o.levels, x, w, WINDOWS * T, WIDTH, table, &err));
    same("level", n->table, table, 8);
    if (side == LM_KV_K) {
        same("lower", n->lower, lower, WIDTH);
        same("upper", n->upper, upper, WIDTH);
    } else {
        assert_null(n->lower);
        check_outliers(n, o.levels.outliers, x);
    }
    for (int i = 0; i < WINDOWS * T * WIDTH; i++)
        most = fmaxf(most, fabsf(stored[i]));
    most /= (float)LM_KV_FP8_MOST;
    assert_int_equal(n->scales, 1);
    same("scale", n->scale, &most, 1);
}

static void calibrations_are_of_the_captured_numbers(void **state)
{
    lm_kv_calibrate_opts o = options();
    lm_kv_data *d;
    double nll;
    (void)state;
    ok(lm_kv_calibrate(&model, &o, "here", backend, &nll, &d, &err));
    assert_true(nll > 3 && nll < 8);
    assert_int_equal(d->layers, LAYERS);
    assert_string_equal(d->weights, "");
    assert_string_equal(d->candidates, "int8;int4");
    for (int64_t l = 0; l < LAYERS; l++)
        for (int side = 0; side < 2; side++)
            check_side(d, l, side);
    lm_kv_data_free(d);
}

/* Errors are added over the windows, and fewer bits make more of them. */
static void errors_of_candidates_add_up(void **state)
{
    lm_kv_calibrate_opts o = options();
    lm_kv_data *one, *two;
    (void)state;
    o.windows = 1;
    ok(lm_kv_calibrate(&model, &o, "one", backend, NULL, &one, &err));
    o.windows = 2;
    ok(lm_kv_calibrate(&model, &o, "two", backend, NULL, &two, &err));
    for (int i = 0; i < 2 * LAYERS; i++) {
        assert_int_equal(one->side[i].candidates, 2);
        assert_true(one->side[i].errors[0] > 0);
        assert_true(one->side[i].errors[1] > 20 * one->side[i].errors[0]);
        assert_true(two->side[i].errors[1] > 1.2F * one->side[i].errors[1]);
        assert_true(two->side[i].errors[1] < 5 * one->side[i].errors[1]);
    }
    lm_kv_data_free(one);
    lm_kv_data_free(two);
}

/* Only what is asked for is there, and each part has the numbers that it has beside the others. */
static void parts_of_a_calibration(void **state)
{
    lm_kv_calibrate_opts o = options(), part[3];
    lm_kv_data *all, *d[3];
    (void)state;
    ok(lm_kv_calibrate(&model, &o, "all", backend, NULL, &all, &err));
    for (int i = 0; i < 3; i++) {
        part[i] = o;
        if (i != 0)
            part[i].levels.bits = 0;
        if (i != 1)
            part[i].candidates = NULL;
        part[i].scales = i == 2;
        ok(lm_kv_calibrate(&model, &part[i], "part", backend, NULL, &d[i], &err));
        for (int s = 0; s < 2 * LAYERS; s++) {
            const lm_kv_numbers *x = &d[i]->side[s], *want = &all->side[s];
            assert_true(!x->table == (i != 0) && !x->lower == (i != 0 || s % 2));
            assert_true(!x->errors == (i != 1) && !x->scale == (i != 2));
            if (i == 0)
                same("level", x->table, want->table, 8);
            if (i == 1)
                same("error", x->errors, want->errors, 2);
            if (i == 2)
                same("scale", x->scale, want->scale, 1);
        }
        lm_kv_data_free(d[i]);
    }
    lm_kv_data_free(all);
}

/* The memory that is reported before the runs: of weights in F32, and with gradients more. */
static void memory_is_known_before(void **state)
{
    double weights, window[2];
    (void)state;
    for (int i = 0; i < 2; i++)
        ok(lm_kv_capture_bytes(&model, T, i, backend, &weights, &window[i], &err));
    assert_true(weights >= 4.0 * (96 * 64) && weights < 1e6);
    assert_true(window[0] >= 4.0 * 2 * LAYERS * T * ALL && window[1] > 1.3 * window[0]);
}

/* With a scale for each head the largest is that of the layer; all of it is read from a file again, and its methods
 * bind. */
static void methods_bind_to_a_file(void **state)
{
    char path[] = "/tmp/lm-calibrate-XXXXXX";
    lm_kv_calibrate_opts o = options();
    lm_kv_data *d, *back;
    lm_kv_site site[LAYERS];
    lm_kv_spec *s;
    lm_kv_plan *p;
    char text[128];
    (void)state;
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    o.heads = true;
    ok(lm_kv_calibrate(&model, &o, path, backend, NULL, &d, &err));
    ok(lm_kv_data_write(d, path, true, &err));
    ok(lm_kv_data_read(path, &back, &err));
    for (int i = 0; i < 2 * LAYERS; i++) {
        assert_int_equal(back->side[i].scales, K);
        same("scale", back->side[i].scale, d->side[i].scale, K);
        same("level", back->side[i].table, d->side[i].table, 8);
    }
    for (int l = 0; l < LAYERS; l++)
        site[l] = lm_cache_site(&model.config, LM_DTYPE_F32, l);
    for (int i = 0; i < 4; i++) {
        static const char *const specs[] = { "kvquant:sinks=1", "fp8:scale=head", "auto:bits=6",
                                             "fp8:scale=layer" };
        snprintf(text, sizeof text, "%s,file=%s", specs[i], path);
        ok(lm_kv_spec_parse(text, &s, &err));
        ok(lm_kv_spec_bind(s, site, LAYERS, (const lm_kv_data *const[]){ back }, &p, &err));
        for (int k = 0; k < 2 * LAYERS && i == 3; k++) /* the largest of the heads */
            assert_true(p->side[k].format->constant ==
                        (double)fmaxf(d->side[k].scale[0], d->side[k].scale[1]));
        lm_kv_plan_free(p);
        lm_kv_spec_free(s);
    }
    lm_kv_data_free(d);
    lm_kv_data_free(back);
    remove(path);
}

/* Learned positions: nothing is rotated, and keys have gradients, too. */
static void models_without_rotation(void **state)
{
    lm_loaded other;
    lm_kv_calibrate_opts o = options();
    lm_kv_capture *c;
    lm_kv_data *d;
    (void)state;
    loaded_of(learned, LM_DTYPE_F32, par, backend, &other);
    ok(lm_kv_capture_new(&other, T, true, backend, &c, &err));
    ok(lm_kv_capture_run(c, ids, NULL, &err));
    lm_kv_captured r = lm_kv_capture_layer(c, 1);
    double sum = 0;
    assert_ptr_equal(r.before, r.rotated);
    for (int i = 0; i < T * 3 * 64; i++)
        sum += fabs((double)r.gradient[i]);
    assert_true(sum > 1e-3);
    lm_kv_capture_free(c);
    ok(lm_kv_calibrate(&other, &o, "here", backend, NULL, &d, &err));
    assert_int_equal(d->side[0].kv_heads, 4);
    lm_kv_data_free(d);
    lm_loaded_fini(&other);
}

static void refusals(void **state)
{
    lm_kv_calibrate_opts o = options();
    uint32_t bad[T] = { 0, V };
    lm_kv_capture *c;
    lm_kv_data *d;
    lm_err e = { 0 };
    (void)state;
    assert_int_equal(lm_kv_capture_new(&model, 65, false, backend, &c, &e), LM_EUSAGE);
    assert_null(c);
    memset(&e, 0, sizeof e);
    c = open_capture(false);
    assert_int_equal(lm_kv_capture_run(c, bad, NULL, &e), LM_EFORMAT);
    lm_kv_capture_free(c);
    memset(&e, 0, sizeof e);
    o.candidates = "int8;k=int4,v=int8";
    assert_int_equal(lm_kv_calibrate(&model, &o, "here", backend, NULL, &d, &e), LM_EUSAGE);
    assert_null(d);
    memset(&e, 0, sizeof e);
    o = options();
    o.levels.bits = 6;
    assert_int_equal(lm_kv_calibrate(&model, &o, "here", backend, NULL, &d, &e), LM_EUSAGE);
    memset(&e, 0, sizeof e);
    o = options();
    o.windows = 0;
    assert_int_equal(lm_kv_calibrate(&model, &o, "here", backend, NULL, &d, &e), LM_EUSAGE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(keys_are_those_before_and_after_the_rotation),
        cmocka_unit_test(outliers_are_those_of_the_worst_head),
        cmocka_unit_test(gradients_equal_differences),
        cmocka_unit_test(calibrations_are_of_the_captured_numbers),
        cmocka_unit_test(errors_of_candidates_add_up),
        cmocka_unit_test(parts_of_a_calibration),
        cmocka_unit_test(memory_is_known_before),
        cmocka_unit_test(methods_bind_to_a_file),
        cmocka_unit_test(models_without_rotation),
        cmocka_unit_test(refusals),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
