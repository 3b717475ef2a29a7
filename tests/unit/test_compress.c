/* SPDX-License-Identifier: Apache-2.0 */
/* lib/compress without the container: bounds hold and are checked, reduced streams are restored in
 * their own dtype, wrong descriptions are refused, single tensors are extracted. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/rng.h"
#include "compress/coded.h"
#include "compress/pick.h"

enum { ROWS = 70, COLS = 300, N = ROWS * COLS };

static const lm_format *format(const char *name)
{
    const lm_format *c = NULL;
    lm_err e = { 0 };
    assert_int_equal(lm_format_find(name, NULL, &c, &e), LM_OK);
    return c;
}

static void fill(float *x, int64_t n, uint64_t seed, bool positive)
{
    lm_rng r = lm_rng_make(seed, "compress test", 0);
    for (int64_t i = 0; i < n; i++) {
        double v = lm_rng_normal(r, (uint64_t)i) * (1 + (double)(i % 7));
        x[i] = (float)(positive ? v * v : v);
    }
}

/* The error statistics of an encoding equal sums computed here in double. */
static void account_is_right(void **state)
{
    (void)state;
    static const char *const names[] = { "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "dynamic8" };
    static float x[N], y[N];
    static uint8_t codes[4 * N], scales[4 * N];
    void *plane[] = { codes, scales };
    for (size_t k = 0; k < sizeof names / sizeof *names; k++) {
        const lm_format *c = format(names[k]);
        lm_lossy_error one, four;
        lm_par *par = NULL;
        lm_err e = { 0 };
        double d2 = 0, x2 = 0, most = 0;
        fill(x, N, k, k % 2);
        assert_int_equal(lm_lossy_encode(c, "t", LM_DTYPE_F32, x, N, plane, NULL, &one, &e), LM_OK);
        assert_int_equal(
            lm_lossy_decode(c, (const void *const *)plane, N, LM_DTYPE_F32, y, NULL, &e), LM_OK);
        for (int i = 0; i < N; i++) {
            double d = fabs((double)x[i] - y[i]);
            d2 += d * d;
            x2 += (double)x[i] * x[i];
            most = fmax(most, d);
        }
        assert_true(most > 0 && one.max_abs == most && one.max_abs <= one.bound);
        assert_true(fabs(one.rel_l2 - sqrt(d2 / x2)) < 1e-12);
        assert_int_equal(lm_par_new(&par, 4, &e), LM_OK);
        assert_int_equal(lm_lossy_encode(c, "t", LM_DTYPE_F32, x, N, plane, par, &four, &e), LM_OK);
        lm_par_free(par);
        assert_memory_equal(&one, &four, sizeof one);
    }
}

static void unrepresentable_numbers_are_refused(void **state)
{
    (void)state;
    static float x[N];
    static uint8_t codes[4 * N], scales[4 * N];
    void *plane[] = { codes, scales };
    lm_lossy_error err;
    lm_err e = { 0 };
    fill(x, N, 1, false);
    x[20000] = 70000;
    assert_int_equal(
        lm_lossy_encode(format("fp16"), "layer.w", LM_DTYPE_F32, x, N, plane, NULL, &err, &e),
        LM_ENUMERIC);
    assert_string_equal(e.where, "layer.w");
    assert_non_null(strstr(e.what, "element 20000 is 70000"));
    e = (lm_err){ 0 };
    assert_int_equal(
        lm_lossy_encode(format("bf16"), "t", LM_DTYPE_F32, x, N, plane, NULL, &err, &e), LM_OK);
    x[7] = INFINITY; /* bf16 can represent it, a block cannot */
    x[8] = NAN;
    assert_int_equal(
        lm_lossy_encode(format("bf16"), "t", LM_DTYPE_F32, x, N, plane, NULL, &err, &e), LM_OK);
    assert_true(isfinite(err.rel_l2) && isfinite(err.bound));
    assert_int_equal(
        lm_lossy_encode(format("dynamic8"), "t", LM_DTYPE_F32, x, N, plane, NULL, &err, &e),
        LM_ENUMERIC);
    assert_non_null(strstr(e.what, "element 7 is inf")); /* it makes its whole block invalid */
    for (int64_t at = 8; at < N; at += 7919) { /* in any block, and any piece of the tensor */
        x[7] = 1;
        x[8] = 1;
        x[at] = NAN;
        char want[40];
        snprintf(want, sizeof want, "element %d is nan", (int)at);
        e = (lm_err){ 0 };
        assert_int_equal(
            lm_lossy_encode(format("dynamic8"), "t", LM_DTYPE_F32, x, N, plane, NULL, &err, &e),
            LM_ENUMERIC);
        assert_non_null(strstr(e.what, want));
        x[at] = 1;
    }
    assert_false(lm_lossy_can(format("fp32"), LM_DTYPE_F32));
    assert_false(lm_lossy_can(format("bf16"), LM_DTYPE_F16));
    assert_false(lm_lossy_can(format("bf16"), LM_DTYPE_F64));
    assert_true(lm_lossy_can(format("dynamic8"), LM_DTYPE_BF16));
}

static void nothing_at_all(void **state)
{
    (void)state;
    lm_lossy_error err;
    lm_err e = { 0 };
    float x[1], y[1];
    void *plane[] = { y, y };
    assert_int_equal(
        lm_lossy_encode(format("dynamic8"), "t", LM_DTYPE_F32, x, 0, plane, NULL, &err, &e), LM_OK);
    assert_true(err.max_abs == 0 && err.rel_l2 == 0);
    assert_int_equal(lm_lossy_decode(format("dynamic8"), (const void *const *)plane, 0,
                                     LM_DTYPE_F32, x, NULL, &e),
                     LM_OK);
}

/* ---- streams in memory ---- */

typedef struct {
    lm_buf bytes;
    size_t at;
} mem;

static lm_code mem_read(void *ctx, void *dst, size_t cap, size_t *got, lm_err *e)
{
    mem *m = ctx;
    (void)e;
    *got = m->bytes.len - m->at < cap ? m->bytes.len - m->at : cap;
    *got = *got > 1000 ? 1000 : *got;
    memcpy(dst, m->bytes.data + m->at, *got);
    m->at += *got;
    return LM_OK;
}

static lm_code mem_write(void *ctx, const void *data, size_t bytes, lm_err *e)
{
    return lm_buf_add(&((mem *)ctx)->bytes, data, bytes, e);
}

static float moment[N], second[N], small[100];

static void make_states(mem *m)
{
    lm_st_plan *p = NULL;
    lm_st_writer *w = NULL;
    lm_err e = { 0 };
    int64_t d2[2] = { ROWS, COLS }, d1[1] = { 100 }, count[1] = { 3 }, step[3] = { 1, 2, 3 };
    fill(moment, N, 5, false);
    fill(second, N, 6, true);
    fill(small, 100, 7, false);
    lm_st_plan_new(&p, &e);
    lm_st_plan_add(p, "exp_avg.w", LM_DTYPE_F32, 2, d2, &e);
    lm_st_plan_add(p, "exp_avg.norm", LM_DTYPE_F32, 1, d1, &e);
    lm_st_plan_add(p, "steps", LM_DTYPE_I64, 1, count, &e);
    lm_st_plan_add(p, "exp_avg_sq.w", LM_DTYPE_F32, 2, d2, &e);
    lm_st_plan_meta(p, "format", "pt", &e);
    lm_st_create_on(mem_write, m, "states", p, &w, &e);
    lm_st_write(w, moment, sizeof moment, &e);
    lm_st_write(w, small, sizeof small, &e);
    lm_st_write(w, step, sizeof step, &e);
    lm_st_write(w, second, sizeof second, &e);
    assert_int_equal(lm_st_commit(w, &e), LM_OK);
    lm_st_plan_free(p);
}

static void reduce(mem *in, mem *out, const char *file, const lm_coded_policy *p, size_t n_coded)
{
    lm_st_stream *s = NULL;
    lm_coded *c = NULL;
    lm_err e = { 0 };
    size_t coded = 0;
    in->at = 0;
    assert_int_equal(lm_st_stream_open(mem_read, in, file, &s, &e), LM_OK);
    assert_int_equal(lm_coded_reduce(s, file, p, NULL, &c, &e), LM_OK);
    assert_int_equal(lm_coded_run(c, mem_write, out, NULL, &e), LM_OK);
    assert_int_equal(lm_coded_bytes(c), out->bytes.len);
    for (size_t i = 0; i < lm_coded_count(c); i++) {
        const lm_coded_item *it = lm_coded_at(c, i);
        coded += it->format != NULL;
        assert_true(!it->format || (it->err.bound > 0 && it->err.max_abs <= it->err.bound));
    }
    assert_int_equal(coded, n_coded);
    lm_coded_free(c);
    lm_st_stream_close(s);
}

static lm_code expand(mem *in, mem *out, lm_err *e)
{
    lm_st_stream *s = NULL;
    lm_coded *c = NULL;
    in->at = 0;
    lm_code rc = lm_st_stream_open(mem_read, in, "f", &s, e);
    if (!rc)
        rc = lm_coded_expand(s, "f", &c, e);
    if (!rc && !c)
        rc = lm_buf_add(&out->bytes, in->bytes.data, in->bytes.len, e);
    else if (!rc)
        rc = lm_coded_run(c, mem_write, out, NULL, e);
    if (!rc && c)
        assert_int_equal(lm_coded_bytes(c), out->bytes.len);
    lm_coded_free(c);
    lm_st_stream_close(s);
    return rc;
}

/* Header and small tensors are restored byte for byte, states within the bound and never as 0. */
static void states_are_restored(void **state)
{
    (void)state;
    static const char *const forms[] = { "bf16", "dynamic8" };
    for (int k = 0; k < 2; k++) {
        mem in = { 0 }, coded = { 0 }, back = { 0 };
        lm_err e = { 0 };
        make_states(&in);
        lm_coded_policy p = { .states = format(forms[k]) };
        reduce(&in, &coded, "optimizer.safetensors", &p, k ? 2 : 3);
        assert_true(coded.bytes.len < in.bytes.len * (k ? 0.27 : 0.52));
        assert_int_equal(expand(&coded, &back, &e), LM_OK);
        assert_int_equal(back.bytes.len, in.bytes.len);
        size_t head = in.bytes.len - 2 * sizeof moment - sizeof small - 24;
        assert_memory_equal(back.bytes.data, in.bytes.data, head);
        float *m = NULL, *v = NULL;
        lm_alloc_n(&m, N, 4, "test", &e);
        lm_alloc_n(&v, N, 4, "test", &e);
        memcpy(m, back.bytes.data + head, sizeof moment);
        memcpy(v, back.bytes.data + head + sizeof moment + sizeof small + 24, sizeof second);
        for (int i = 0; i < N; i++) {
            assert_true(fabs((double)m[i] - moment[i]) <= (k ? 0.5 : fabs(moment[i]) / 256));
            assert_true(v[i] > 0 || second[i] == 0);
        }
        if (k) /* small tensors are not coded */
            assert_memory_equal(back.bytes.data + head + sizeof moment, small, sizeof small);
        lm_free(m);
        lm_free(v);
        lm_buf_fini(&in.bytes);
        lm_buf_fini(&coded.bytes);
        lm_buf_fini(&back.bytes);
    }
}

/* Weights in plain elements: an ordinary file of that dtype, nothing to expand. */
static void weights_become_plain(void **state)
{
    (void)state;
    mem in = { 0 }, coded = { 0 };
    lm_st_stream *s = NULL;
    const lm_st_tensor *t;
    lm_err e = { 0 };
    make_states(&in);
    lm_coded_policy p = { .weights = format("fp8_e5m2") };
    reduce(&in, &coded, "model.safetensors", &p, 2);
    assert_int_equal(lm_st_stream_open(mem_read, &coded, "f", &s, &e), LM_OK);
    assert_null(lm_st_stream_meta(s, LM_CODED_KEY));
    t = lm_st_stream_at(s, 0);
    assert_string_equal(t->name, "exp_avg.w");
    assert_int_equal(t->dtype, LM_DTYPE_F8E5M2);
    assert_int_equal(lm_st_stream_at(s, 1)->dtype, LM_DTYPE_F32); /* of one dimension */
    lm_st_stream_close(s);
    lm_buf_fini(&in.bytes);
    lm_buf_fini(&coded.bytes);
}

/* Every description that does not match the tensors is refused. */
static void wrong_descriptions(void **state)
{
    (void)state;
    static const struct {
        const char *from, *to;
    } lies[] = {
        { "dynamic8", "dynamic9" }, { "dynamic8", "fp8_e5m2" },
        { "F32\\\"", "I64\\\"" },   { "[70,300]", "[70,301]" },
        { "[70,300]", "[-7,300]" }, { "[70,300]", "[70,3.0]" },
        { "[70,300]", "[7e9,30]" }, { "{\\\"exp_avg.w", "{\\\"exp_avg.v" },
    };
    mem in = { 0 }, coded = { 0 };
    make_states(&in);
    lm_coded_policy p = { .states = format("dynamic8") };
    reduce(&in, &coded, "optimizer.safetensors", &p, 2);
    for (size_t k = 0; k < sizeof lies / sizeof *lies; k++) {
        mem bad = { 0 }, out = { 0 };
        lm_err e = { 0 };
        assert_int_equal(strlen(lies[k].from), strlen(lies[k].to));
        lm_buf_add(&bad.bytes, coded.bytes.data, coded.bytes.len, &e);
        char *at = memmem(bad.bytes.data, bad.bytes.len, lies[k].from, strlen(lies[k].from));
        assert_non_null(at);
        memcpy(at, lies[k].to, strlen(lies[k].to));
        assert_int_equal(expand(&bad, &out, &e), LM_EFORMAT);
        lm_buf_fini(&bad.bytes);
        lm_buf_fini(&out.bytes);
    }
    lm_buf_fini(&in.bytes);
    lm_buf_fini(&coded.bytes);
}

/* A coded tensor is extracted by its original name, with its description. */
static void picking(void **state)
{
    (void)state;
    char dir[] = "/tmp/lm-test-XXXXXX", path[64];
    mem in = { 0 }, coded = { 0 }, some = { 0 }, back = { 0 };
    lm_st *st = NULL;
    lm_pick *p = NULL;
    json_t *described = NULL;
    uint64_t bytes = 0;
    bool found;
    lm_err e = { 0 };
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/optimizer.safetensors", dir);
    make_states(&in);
    lm_coded_policy policy = { .states = format("dynamic8") };
    reduce(&in, &coded, "optimizer.safetensors", &policy, 2);
    FILE *f = fopen(path, "wb");
    fwrite(coded.bytes.data, 1, coded.bytes.len, f);
    fclose(f);
    assert_int_equal(lm_st_open(path, &st, &e), LM_OK);
    assert_int_equal(lm_pick_described(st, &described, &e), LM_OK);
    assert_int_equal(lm_pick_new(&p, &e), LM_OK);
    assert_int_equal(lm_pick_add(p, st, described, "steps", &found, &e), LM_OK);
    assert_true(found);
    assert_int_equal(lm_pick_add(p, st, described, "exp_avg_sq.w", &found, &e), LM_OK);
    assert_true(found);
    assert_int_equal(lm_pick_add(p, st, described, "exp_avg_sq", &found, &e), LM_OK);
    assert_false(found);
    assert_int_equal(lm_pick_ready(p, &bytes, &e), LM_OK);
    for (size_t got = 1; got;) {
        char piece[777];
        assert_int_equal(lm_pick_read(p, piece, sizeof piece, &got, &e), LM_OK);
        lm_buf_add(&some.bytes, piece, got, &e);
    }
    assert_int_equal(some.bytes.len, bytes);
    assert_int_equal(expand(&some, &back, &e), LM_OK);
    const float *v =
        (const float *)(const void *)(back.bytes.data + back.bytes.len - sizeof second);
    assert_true(fabsf(v[3] - second[3]) <= 1);
    assert_int_equal(back.bytes.len % 8, 0);
    lm_pick_free(p);
    json_decref(described);
    lm_st_close(st);
    lm_rm_rf(dir, &e);
    lm_buf_fini(&in.bytes);
    lm_buf_fini(&coded.bytes);
    lm_buf_fini(&some.bytes);
    lm_buf_fini(&back.bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(account_is_right),
        cmocka_unit_test(unrepresentable_numbers_are_refused),
        cmocka_unit_test(nothing_at_all),
        cmocka_unit_test(states_are_restored),
        cmocka_unit_test(weights_become_plain),
        cmocka_unit_test(wrong_descriptions),
        cmocka_unit_test(picking),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
