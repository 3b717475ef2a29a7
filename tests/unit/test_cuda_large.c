/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors of more than 2^31 elements on the CUDA backend: elements after the 2^31st are addressed
 * correctly.
 *
 * Under the emulation untouched memory is not committed, so only operators that access little of a
 * large operand are tested: look-ups, strides, a window at the end of a long cache. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>

#include "cuda_open.h"
#include "kernels/attention.h"
#include "kernels/elementwise.h"
#include "kernels/embed.h"
#include "kernels/optim.h"

static void must(lm_code rc, const lm_err *e)
{
    if (rc)
        fail_msg("%s: %s", e->where, e->what);
}

static lm_tensor on_device(lm_dtype d, int ndim, const int64_t *dim)
{
    lm_err e = { 0 };
    lm_tensor t = { .dtype = d, .ndim = ndim };
    for (int i = 0; i < ndim; i++)
        t.dim[i] = dim[i];
    must(device->alloc(device, (size_t)lm_tensor_count(&t) * lm_dtype_size(d), "a test operand",
                       &t.data, &e),
         &e);
    return t;
}

static void let_go(lm_tensor *t)
{
    device->free(device, t->data, (size_t)lm_tensor_count(t) * lm_dtype_size(t->dtype));
}

/* Elements [at, at + n) of t, to the device or back. */
static void put(lm_tensor *t, int64_t at, const void *src, int64_t n)
{
    lm_err e = { 0 };
    size_t size = lm_dtype_size(t->dtype);
    must(device->copy(device, (char *)t->data + (size_t)at * size, src, (size_t)n * size,
                      device->main, &e),
         &e);
    must(device->sync(device, NULL, &e), &e);
}

static void get(const lm_tensor *t, void *dst, int64_t n)
{
    lm_err e = { 0 };
    must(device->copy(device, dst, t->data, (size_t)n * lm_dtype_size(t->dtype), device->main, &e),
         &e);
    must(device->sync(device, NULL, &e), &e);
}

static void run(const char *op, lm_dtype act, const void *attr, lm_tensor *in, int n_in,
                lm_tensor *out, int n_out)
{
    lm_err e = { 0 };
    const lm_step step = { 0 };
    const lm_kernel *k = device->kernel(device, op, act);
    void *work = NULL;
    assert_non_null(k);
    lm_call c = { .attr = attr,
                  .in = in,
                  .n_in = n_in,
                  .out = out,
                  .n_out = n_out,
                  .stream = device->main,
                  .step = &step };
    size_t bytes = k->work ? k->work(&c, device->threads) : 0;
    if (bytes)
        must(device->alloc(device, bytes, "scratch", &work, &e), &e);
    c.work = work;
    must(device->step(device, &step, device->main, &e), &e);
    k->run(&c);
    must(device->sync(device, NULL, &e), &e);
    if (work)
        device->free(device, work, bytes);
}

enum { C = 2048, V = 1 << 20 | 1 << 16 }; /* a table of 2.3e9 elements */

/* Rows of a table after element 2^31. */
static void test_lookups(void **state)
{
    static const char *const ops[] = { "embed", "rows" };
    lm_tensor table = on_device(LM_DTYPE_BF16, 2, (int64_t[]){ V, C });
    lm_tensor ids = on_device(LM_DTYPE_I32, 1, (int64_t[]){ 3 });
    lm_tensor x = on_device(LM_DTYPE_BF16, 2, (int64_t[]){ 3, C });
    const int32_t id[3] = { V - 1, 7, V - 2 };
    uint16_t row[C], got[3 * C];
    (void)state;
    assert_true(lm_tensor_count(&table) > INT32_MAX);
    put(&ids, 0, id, 3);
    for (int r = 0; r < 3; r++) {
        for (int i = 0; i < C; i++)
            row[i] = lm_f32_to_bf16((float)(r + 1) + (float)(i % 64) / 64);
        put(&table, (int64_t)id[r] * C, row, C);
    }
    for (int k = 0; k < 2; k++) {
        lm_tensor in[4] = { k ? table : ids, k ? ids : table };
        const lm_embed_attr attr = { 0 };
        run(ops[k], LM_DTYPE_BF16, &attr, in, k ? 2 : 4, &x, 1);
        get(&x, got, 3 * C);
        for (int i = 0; i < 3 * C; i++)
            if (got[i] != lm_f32_to_bf16((float)(i / C + 1) + (float)(i % C % 64) / 64))
                fail_msg("%s: element %d is another one's", ops[k], i);
    }
    let_go(&x);
    let_go(&ids);
    let_go(&table);
}

static void test_strides(void **state)
{
    enum { STRIDE = 150000001 };
    const lm_strided_attr attr = { STRIDE };
    lm_tensor x = on_device(LM_DTYPE_F32, 1, (int64_t[]){ 16 * (int64_t)STRIDE });
    lm_tensor y = on_device(LM_DTYPE_F32, 1, (int64_t[]){ 16 });
    float got[16];
    (void)state;
    for (int i = 0; i < 16; i++)
        put(&x, i * (int64_t)STRIDE, &(float){ (float)(i + 1) }, 1);
    run("strided", LM_DTYPE_F32, &attr, &x, 1, &y, 1);
    get(&y, got, 16);
    for (int i = 0; i < 16; i++)
        assert_true(got[i] == (float)(i + 1));
    let_go(&x);
    let_go(&y);
}

/* One token with a window of 4 at the end of a cache of more than 2^31 elements: with equal keys
 * the result is the mean of the values in the window. */
static void test_cache(void **state)
{
    enum { S = 1 << 21 | 1 << 12, D = 128, K = 8, SEEN = 4 };
    const lm_attention_attr attr = { .batch = 1,
                                     .seq = 1,
                                     .heads = K,
                                     .kv_heads = K,
                                     .head_dim = D,
                                     .window = SEEN,
                                     .causal = true,
                                     .scale = 0.1 };
    const int64_t shape[4] = { 1, K, S, D };
    lm_tensor out[3] = { on_device(LM_DTYPE_BF16, 2, (int64_t[]){ 1, K * D }),
                         on_device(LM_DTYPE_BF16, 4, shape), on_device(LM_DTYPE_BF16, 4, shape) };
    lm_tensor in[3] = { on_device(LM_DTYPE_BF16, 2, (int64_t[]){ 1, 3 * K * D }),
                        on_device(LM_DTYPE_I32, 1, (int64_t[]){ 1 }),
                        on_device(LM_DTYPE_I32, 1, (int64_t[]){ 1 }) };
    uint16_t row[3 * K * D], got[K * D];
    (void)state;
    assert_true(lm_tensor_count(&out[1]) > INT32_MAX);
    for (int h = 0; h < K; h++) /* cached values: 1, 2, 3 */
        for (int i = 1; i < SEEN; i++) {
            for (int d = 0; d < D; d++)
                row[d] = lm_f32_to_bf16((float)(i + 10 * h));
            put(&out[2], ((int64_t)h * S + S - 1 - SEEN + i) * D, row, D);
        }
    for (int i = 0; i < 3 * K * D; i++) /* the value of the new token is 0 */
        row[i] = i < 2 * K * D ? 0 : lm_f32_to_bf16((float)(10 * ((i - 2 * K * D) / D)));
    put(&in[0], 0, row, 3 * K * D);
    put(&in[1], 0, &(int32_t){ S - 1 }, 1);
    put(&in[2], 0, &(int32_t){ 1 }, 1);
    run("attention_cached", LM_DTYPE_BF16, &attr, in, 3, out, 3);
    get(&out[0], got, K * D);
    for (int i = 0; i < K * D; i++)
        if (fabs((double)lm_bf16_to_f32(got[i]) - (1.5 + 10 * (i / D))) > 0.05 * (1 + i / D))
            fail_msg("head %d: %g instead of %g", i / D, (double)lm_bf16_to_f32(got[i]),
                     1.5 + 10 * (i / D));
    for (int i = 0; i < 3; i++) {
        let_go(&in[i]);
        let_go(&out[i]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lookups),
        cmocka_unit_test(test_strides),
        cmocka_unit_test(test_cache),
    };
    setenv("LM_EMU_MEMORY", "16G", 1);
    return cmocka_run_group_tests(tests, open_device, close_device);
}
