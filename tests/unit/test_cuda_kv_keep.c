/* SPDX-License-Identifier: Apache-2.0 */
/* Masses of cached tokens and rows that stay on the CUDA backend: against the definition, and with the same bits for any
 * order of threads and blocks. */
#include "kv_keep_case.h"

#include "cuda_open.h"

static void must(lm_code rc, const lm_err *e)
{
    if (rc)
        fail_msg("%s: %s", e->where, e->what);
}

static void copy(void *dst, const void *src, size_t bytes)
{
    lm_err e = { 0 };
    must(device->copy(device, dst, src, bytes, device->main, &e), &e);
    must(device->sync(device, NULL, &e), &e);
}

static lm_tensor twin(const lm_tensor *t)
{
    lm_tensor d = *t;
    lm_err e = { 0 };
    if (!t->data)
        return d;
    must(device->alloc(device, lm_stored_bytes(t), "a test operand", &d.data, &e), &e);
    copy(d.data, t->data, lm_stored_bytes(t));
    return d;
}

/* Run a call with one output, whose operands the host has, on the device. */
static void run_there(const char *op, lm_call *c, lm_dtype act)
{
    const lm_kernel *k = device->kernel(device, op, act);
    lm_tensor in[10], out = twin(c->out);
    lm_call there = *c;
    assert_non_null(k);
    assert_null(k->work);
    for (int i = 0; i < c->n_in; i++)
        in[i] = twin(&c->in[i]);
    there.in = in;
    there.out = &out;
    there.stream = device->main;
    k->run(&there);
    copy(c->out->data, out.data, lm_stored_bytes(&out));
    device->free(device, out.data, lm_stored_bytes(&out));
    for (int i = 0; i < c->n_in; i++)
        if (in[i].data)
            device->free(device, in[i].data, lm_stored_bytes(&in[i]));
}

static void mass_there(lm_call *c, lm_dtype act)
{
    run_there("kv_mass", c, act);
}

static void masses(void **state)
{
    (void)state;
    mass_runner = mass_there;
    for (int order = 0; order < emu_order(order); order++) {
        for (int i = 0; i < DEFINED; i++)
            check_defined(defined_ways[i]);
        for (int i = 0; i < CODED; i++)
            check_sums(coded_ways[i]);
    }
    emu_order(0);
    mass_runner = NULL;
}

/* Of two sequences with 9 and 5 rows that stay, of a cache of 40; with runs of rows, or without. */
static void check_gather(lm_dtype act, bool runs)
{
    enum { B = 2, S = 40, M = 9 };
    const lm_kv_gather_attr a = { B, M, H, K, D };
    const int64_t cache[] = { B, K, S, D }, rows[] = { B, K, M }, weights[] = { B, K, S };
    int32_t count[B] = { 9, 5 };
    double diff = 0, norm = 0;
    lm_rng r = lm_rng_make(5, "gather", 0);
    lm_tensor in[6] = {
        tensor(act, 4, cache, NULL),         tensor(act, 4, cache, NULL),
        tensor(LM_DTYPE_I32, 3, rows, NULL), integers(B, count),
        tensor(LM_DTYPE_I32, 3, rows, NULL), tensor(LM_DTYPE_F32, 3, weights, NULL)
    };
    lm_tensor want = tensor(act, 2, (int64_t[]){ B * M, WIDTH }, NULL), got = want;
    got.data = take(lm_stored_bytes(&got));
    memset(got.data, 0x3f, lm_stored_bytes(&got));
    for (int64_t i = 0; i < B * K * S * D; i++) {
        lm_set(act, in[0].data, i, lm_rng_normal(r, (uint64_t)(2 * i)));
        lm_set(act, in[1].data, i, lm_rng_normal(r, (uint64_t)(2 * i + 1)));
    }
    for (int64_t i = 0; i < B * K * M; i++) {
        ((int32_t *)in[2].data)[i] = (int32_t)(i * 7 % (S - 4));
        ((int32_t *)in[4].data)[i] = (int32_t)(1 + i % 4);
    }
    for (int64_t i = 0; i < B * K * S; i++)
        ((float *)in[5].data)[i] = (float)(1 + i % 7) / 8;
    lm_step step = { 0 };
    lm_call c = {
        .attr = &a, .in = in, .n_in = runs ? 6 : 4, .out = &want, .n_out = 1, .step = &step
    };
    lm_cpu_kernel("kv_gather", act, LM_CPU_REF)->run(&c);
    c.out = &got;
    run_there("kv_gather", &c, act);
    if (!runs)
        assert_memory_equal(got.data, want.data, lm_stored_bytes(&want));
    for (int64_t i = 0; i < B * M * WIDTH; i++) {
        double x = lm_get(act, want.data, i), d = lm_get(act, got.data, i) - x;
        diff += d * d;
        norm += x * x;
    }
    if (!(sqrt(diff / norm) < (act == LM_DTYPE_BF16 ? 4e-3 : 1e-6)))
        fail_msg("%s, runs %d: %g", lm_dtype_name(act), runs, sqrt(diff / norm));
    for (int i = 0; i < 6; i++)
        if (i != 3)
            lm_free(in[i].data);
    lm_free(want.data);
    lm_free(got.data);
}

static void rows_that_stay(void **state)
{
    (void)state;
    for (int order = 0; order < emu_order(order); order++)
        for (int i = 0; i < 4; i++)
            check_gather(i % 2 ? LM_DTYPE_BF16 : LM_DTYPE_F32, i / 2);
    emu_order(0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(masses),
        cmocka_unit_test(rows_that_stay),
    };
    lm_err e = { 0 };
    if (lm_par_new(&pool, 2, &e))
        return 1;
    int failed = cmocka_run_group_tests_name("cuda_kv_keep", tests, open_device, close_device);
    lm_par_free(pool);
    return failed;
}
