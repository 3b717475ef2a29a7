/* SPDX-License-Identifier: Apache-2.0 */
/* Attention on the CUDA backend: fragments of the tensor cores' product in the layout of PTX; every
 * compiled head size, masks, documents and dropout over several tiles, on the plain path and on the
 * tensor-core path (whose instructions the emulation computes with ordinary arithmetic). */
#include "attention_case.h"
#include "cuda_case.h"
#include "graph/exec.h"
#include "op/ops.h"

static lm_backend *plain, *tensor;

/* Both directions of a case. */
static void check_both(const lm_attention_attr *a, lo_kind kind, lm_dtype act, int shift)
{
    kernel_case f = forward_of(a, kind);
    double tol = act == LM_DTYPE_F32 ? f.tol_f32 : f.tol_bf16;
    instance y;
    check_on_device(&f, act, tol, shift, true);
    run_forward(&f, LM_DTYPE_F64, &y);
    f.in[0] = given(f.in[0], y.in[0].data);
    kernel_case b = backward_of(&f, &y);
    check_on_device(&b, act, tol, shift, true);
    drop(&f, &y);
}

/* F32, BF16 or F16 on the plain path, BF16 or F16 on the tensor-core path. */
static lm_dtype path_of(int i)
{
    static const lm_dtype acts[] = { LM_DTYPE_F32, LM_DTYPE_BF16, LM_DTYPE_BF16, LM_DTYPE_F16,
                                     LM_DTYPE_F16 };
    device = i % 5 == 2 || i % 5 == 3 ? tensor : plain;
    return acts[i % 5];
}

/* ---- fragments ---- */

/* Small whole numbers, whose products and sums are exact in every type. */
static int whole(int i)
{
    return (i * 37 + i / 7 * 11) % 15 - 7;
}

static uint16_t bits_of(bool half, int v)
{
    uint16_t b;
    lm_set(half ? LM_DTYPE_F16 : LM_DTYPE_BF16, &b, 0, v);
    return b;
}

/* Element i of a lane's fragment, at the position defined by the PTX ISA. */
static void test_mma_layout(void **state)
{
    (void)state;
    void (*mma)(bool, const uint32_t *, const uint32_t *, float *) = NULL;
    *(void **)&mma = emu_symbol("lm_emu_mma");
    if (!mma)
        skip();
    for (int half = 0; half < 2; half++) {
        uint16_t a[32][8], b[32][4];
        float c[32][4];
        for (int lane = 0; lane < 32; lane++) {
            int group = lane >> 2, in_group = lane % 4;
            for (int i = 0; i < 8; i++) {
                int row = i < 2 || (i >= 4 && i < 6) ? group : group + 8;
                int col = in_group * 2 + (i & 1) + (i >= 4 ? 8 : 0);
                a[lane][i] = bits_of(half, whole(row * 16 + col));
            }
            for (int i = 0; i < 4; i++) {
                int row = in_group * 2 + (i & 1) + (i >= 2 ? 8 : 0);
                b[lane][i] = bits_of(half, whole(1000 + row * 8 + group));
                c[lane][i] =
                    (float)whole(2000 + (group + (i < 2 ? 0 : 8)) * 8 + in_group * 2 + (i & 1));
            }
        }
        uint32_t *da = device_twin(a, sizeof a, 0), *db = device_twin(b, sizeof b, 0);
        float *dc = device_twin(c, sizeof c, 0);
        mma(half, da, db, dc);
        device_copy(c, dc, sizeof c);
        for (int lane = 0; lane < 32; lane++) {
            for (int i = 0; i < 4; i++) {
                int row = (lane >> 2) + (i < 2 ? 0 : 8), col = lane % 4 * 2 + (i & 1);
                int sum = whole(2000 + row * 8 + col);
                for (int k = 0; k < 16; k++)
                    sum += whole(row * 16 + k) * whole(1000 + k * 8 + col);
                assert_int_equal((int)c[lane][i], sum);
            }
        }
        device_drop(da, sizeof a, 0);
        device_drop(db, sizeof b, 0);
        device_drop(dc, sizeof c, 0);
    }
}

static void test_ldmatrix(void **state)
{
    (void)state;
    void (*ldmatrix)(bool, const uint16_t *, uint32_t *) = NULL;
    *(void **)&ldmatrix = emu_symbol("lm_emu_ldmatrix");
    if (!ldmatrix)
        skip();
    uint16_t rows[4][8][8], got[32][4][2];
    for (int i = 0; i < 256; i++)
        rows[i / 64][i / 8 % 8][i % 8] = (uint16_t)(i * 3 + 1);
    uint16_t *from = device_twin(rows, sizeof rows, 0);
    uint32_t *to = device_twin(got, sizeof got, 0);
    for (int turned = 0; turned < 2; turned++) {
        ldmatrix(turned, from, to);
        device_copy(got, to, sizeof got);
        for (int lane = 0; lane < 32; lane++) {
            for (int m = 0; m < 4; m++) {
                for (int e = 0; e < 2; e++) {
                    int i = lane / 4, j = lane % 4 * 2 + e;
                    assert_int_equal(got[lane][m][e], turned ? rows[m][j][i] : rows[m][i][j]);
                }
            }
        }
    }
    device_drop(from, sizeof rows, 0);
    device_drop(to, sizeof got, 0);
}

/* ---- attention ---- */

static void test_head_sizes(void **state)
{
    (void)state;
    static const int dims[] = { 1, 4, 7, 8, 16, 24, 32, 64, 80, 96, 100, 128, 192, 256 };
    for (int i = 0; i < 14; i++) {
        lm_attention_attr a = attr_of(1, dims[i] > 64 ? 37 : 70, 1, 1, dims[i]);
        for (int p = 0; p < 3; p++)
            check_both(&a, WHOLE, path_of(p), 0);
        if (dims[i] % 64 == 0)
            check_both(&a, WHOLE, path_of(3 + i % 2), 0);
    }
}

static void test_shapes(void **state)
{
    (void)state;
    static const int64_t shapes[][5] = {
        /* B, T, H, K, D */
        { 1, 1, 1, 1, 8 },   { 2, 1, 3, 1, 16 },  { 2, 3, 2, 1, 16 },  { 2, 33, 3, 3, 32 },
        { 3, 17, 4, 2, 24 }, { 1, 64, 1, 1, 16 }, { 1, 65, 4, 1, 16 }, { 1, 211, 1, 1, 16 },
    };
    for (int i = 0; i < 8 * 5; i++) {
        const int64_t *s = shapes[i / 5];
        lm_attention_attr a = attr_of(s[0], s[1], s[2], s[3], s[4]);
        a.causal = i % 2;
        check_both(&a, WHOLE, path_of(i), i % 3 == 1);
    }
}

static void test_masks(void **state)
{
    (void)state;
    static const int64_t windows[] = { 0, 1, 7, 64, 90, 1000 };
    for (int i = 0; i < 6 * 2 * 3; i++) {
        lm_attention_attr a = attr_of(1, 203 - 20 * (i % 6), 1, 1, i % 4 ? 16 : 40);
        a.window = windows[i % 6];
        a.causal = i / 6 % 2;
        check_both(&a, (lo_kind)(i / 12), path_of(i), 0);
    }
}

static void test_blocks(void **state)
{
    (void)state;
    for (int i = 0; i < 5 * BLOCKS; i++) {
        lm_attention_attr a = attr_of(1, 290 - i, i % 3 ? 3 : 2, i % 3 ? 1 : 2,
                                      i % 4   ? 16
                                      : i % 8 ? 40
                                              : 96);
        a.blocks = blocks_at(i);
        a.dropout = i % 5 == 4 ? 0.2 : 0;
        a.soft_cap = i % 6 == 5 ? 0.5 : 0;
        check_both(&a, (lo_kind)(i % 4), path_of(i), 0);
    }
}

static void test_dropout(void **state)
{
    (void)state;
    static const int dims[] = { 8, 32, 96, 160 };
    for (int i = 0; i < 4 * 3; i++) {
        lm_attention_attr a = attr_of(2, 75 - i % 4 * 10, 2, 1, dims[i % 4]);
        a.dropout = 0.3;
        a.site = 5;
        a.causal = i % 2;
        check_both(&a, (lo_kind)(i % 3), path_of(i), 0);
    }
}

static void test_soft_cap(void **state)
{
    (void)state;
    static const int dims[] = { 8, 32, 96, 160 };
    for (int i = 0; i < 4 * 3; i++) {
        lm_attention_attr a = attr_of(2, 75 - i % 4 * 10, 2, 1, dims[i % 4]);
        a.soft_cap = i % 2 ? 0.5 : 50;
        a.dropout = i > 8 ? 0.3 : 0;
        check_both(&a, (lo_kind)(i % 3), path_of(i), 0);
    }
}

/* Scores far apart: one key has nearly all the weight, those of the others underflow. */
static void test_sharp_scores(void **state)
{
    (void)state;
    lm_attention_attr a = attr_of(1, 90, 1, 1, 32);
    a.scale = 40;
    kernel_case k = forward_of(&a, WHOLE);
    device = plain;
    check_on_device(&k, LM_DTYPE_F32, 1e-4, 0, true);
}

/* A NaN in a query makes only its own row NaN; a NaN in a value, all rows that attend to it. */
static void test_nan(void **state)
{
    (void)state;
    enum { T = 70, D = 16, AT = 20 };
    lm_attention_attr a = attr_of(1, T, 1, 1, D);
    kernel_case k = forward_of(&a, WHOLE);
    for (int i = 0; i < 5 * 3; i++) {
        lm_dtype act = path_of(i);
        instance x;
        build(&k, act, act, &x);
        lm_set(act, x.in[0].data, (AT * 3 + i / 5) * D + 3, NAN);
        run_on_device(&x, device_kernel("attention", act), 0);
        for (int row = 0; row < T; row++) {
            bool nan = isnan(lm_get(act, x.out[0].data, row * D + 3));
            bool lse_nan = isnan(((float *)x.out[1].data)[row]);
            bool sees = i / 5 == 0 ? row == AT : row >= AT;
            if (i / 5 == 2)
                assert_true(nan || !sees); /* others of the tile multiply it by zero */
            else
                assert_int_equal(nan, sees);
            assert_int_equal(lse_nan, sees && i / 5 < 2);
        }
        drop(&k, &x);
    }
}

/* Heads wider than any tile are refused when the graph is built. */
static void test_wide_heads(void **state)
{
    (void)state;
    for (int i = 0; i < 4; i++) {
        lm_err e = { 0 };
        lm_attention_attr a = attr_of(1, 3, 1, 1, i % 2 ? 257 : 256);
        lm_graph *g = NULL;
        lm_exec *x = NULL;
        lm_vid in[5] = { LM_NONE, LM_NONE, LM_NONE, LM_NONE, LM_NONE },
               out[2] = { LM_NONE, LM_NONE };
        lm_dtype act = i / 2 ? LM_DTYPE_BF16 : LM_DTYPE_F32;
        device = i / 2 ? tensor : plain;
        device_must(lm_graph_new(&g, &e), &e);
        device_must(
            lm_graph_value(g, LM_ROLE_INPUT, lm_shape2(act, 3, 3 * a.head_dim), "qkv", &in[0], &e),
            &e);
        device_must(lm_graph_append(g, &lm_op_attention, &a, in, out, &e), &e);
        lm_code rc = lm_exec_new(g, device, out, 1, &x, &e);
        assert_int_equal(rc, i % 2 ? LM_EUSAGE : LM_OK);
        if (rc)
            assert_non_null(strstr(e.what, "does not serve these sizes"));
        lm_exec_free(x);
        lm_graph_free(g);
    }
}

static int open_devices(void **state)
{
    (void)state;
    lm_err e = { 0 };
    device_must(cuda_open("plain", true, &plain, &e), &e);
    device_must(cuda_open("tensor", true, &tensor, &e), &e);
    device = plain;
    return 0;
}

static int close_devices(void **state)
{
    (void)state;
    lm_backend_close(tensor);
    lm_backend_close(plain);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mma_layout),   cmocka_unit_test(test_ldmatrix),
        cmocka_unit_test(test_head_sizes),   cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_masks),        cmocka_unit_test(test_blocks),
        cmocka_unit_test(test_dropout),      cmocka_unit_test(test_soft_cap),
        cmocka_unit_test(test_sharp_scores), cmocka_unit_test(test_nan),
        cmocka_unit_test(test_wide_heads),
    };
    return cmocka_run_group_tests(tests, open_devices, close_devices);
}
