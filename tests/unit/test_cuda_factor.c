/* SPDX-License-Identifier: Apache-2.0 */
/* Bases of matrices on the CUDA backend against the definition: matrices of many panels and blocks,
 * which the walk over the registry has not, numbers that are not finite, calls that are not due. */
#include "cuda_case.h"

#include "kernels/factor.h"

/* Number (i,j) of a matrix with signs and sizes without a pattern; symmetric if i and j may be
 * exchanged. */
static double number(int64_t i, int64_t j)
{
    lm_rng r = lm_rng_make(9, "matrix", 0);
    return lm_rng_normal(r, (uint64_t)(i * 1000 + j));
}

static double *matrix(int64_t rows, int64_t cols, bool symmetric)
{
    double *x = take((size_t)(rows * cols) * sizeof *x);
    for (int64_t i = 0; i < rows * cols; i++) {
        int64_t r = i / cols, c = i % cols;
        x[i] = (float)number(symmetric && r < c ? c : r, symmetric && r < c ? r : c);
    }
    return x;
}

static void qr_of_panels(void **state)
{
    static const int64_t sizes[][2] = { { 96, 96 }, { 150, 65 }, { 700, 16 }, { 33, 33 } };
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        kernel_case k = { .op = "qr" };
        k.in[0] = k.out[0] = mat(F32, sizes[i][0], sizes[i][1]);
        check_on_device(&k, LM_DTYPE_F32, 1e-6, 0, true);
    }
}

/* Linearly dependent columns: the columns of Q in their place are arbitrary, but orthonormal. */
static void qr_without_full_rank(void **state)
{
    enum { N = 70, K = 40 };
    kernel_case k = { .op = "qr" };
    instance x;
    double *m = matrix(N, K, false);
    (void)state;
    for (int64_t i = 0; i < N; i++) {
        m[i * K + 7] = m[i * K + 3];
        m[i * K + 20] = 0;
    }
    k.in[0] = k.out[0] = given(mat(F32, N, K), m);
    build(&k, LM_DTYPE_F32, LM_DTYPE_F32, &x);
    run_on_device(&x, device_kernel("qr", LM_DTYPE_F32), 0);
    const float *q = x.out[0].data;
    for (int64_t a = 0; a < K; a++)
        for (int64_t b = 0; b <= a; b++) {
            double dot = 0;
            for (int64_t i = 0; i < N; i++)
                dot += (double)q[i * K + a] * q[i * K + b];
            assert_true(fabs(dot - (a == b)) < 1e-6);
        }
    drop(&k, &x);
    lm_free(m);
}

static void eigh_of_blocks(void **state)
{
    static const int64_t sizes[] = { 1, 2, 64, 65, 130 };
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        kernel_case k = { .op = "eigh" };
        double *x = matrix(sizes[i], sizes[i], true);
        k.in[0] = given(mat(F32, sizes[i], sizes[i]), x);
        k.out[0] = mat(F32, sizes[i], sizes[i]);
        check_on_device(&k, LM_DTYPE_F32, 1e-5, 0, true);
        lm_free(x);
    }
}

/* A diagonal matrix has nothing to rotate; the identity's vectors stay in order. */
static void eigh_of_diagonals(void **state)
{
    enum { N = 100 };
    kernel_case k = { .op = "eigh" };
    double *x = take(sizeof(double) * N * N);
    (void)state;
    for (int kind = 0; kind < 2; kind++) {
        instance y;
        for (int64_t i = 0; i < N * N; i++)
            x[i] = i / N != i % N ? 0 : kind ? (double)(i % N) : 1;
        k.in[0] = k.out[0] = given(mat(F32, N, N), x);
        build(&k, LM_DTYPE_F32, LM_DTYPE_F32, &y);
        run_on_device(&y, device_kernel("eigh", LM_DTYPE_F32), 0);
        for (int64_t i = 0; i < N * N; i++) {
            int64_t column = kind ? N - 1 - i % N : i % N;
            assert_true(((float *)y.out[0].data)[i] == (i / N == column));
        }
        drop(&k, &y);
    }
    lm_free(x);
}

static void next_of_panels(void **state)
{
    enum { N = 100 };
    kernel_case k = { .op = "eigh_next" };
    double *x = matrix(N, N, true);
    (void)state;
    k.in[0] = given(mat(F32, N, N), x);
    k.in[1] = k.out[0] = k.out[1] = mat(F32, N, N);
    check_on_device(&k, LM_DTYPE_F32, 1e-5, 0, true);
    lm_free(x);
}

static kernel_case svd_case(const lm_svd_attr *a, int64_t rows, int64_t cols)
{
    kernel_case k = { .op = "svd", .attr = a };
    k.in[0] = mat(F32, rows, cols);
    k.out[0] = mat(F32, a->right ? a->rank : rows, a->right ? cols : a->rank);
    k.out[1] = vec(F32, a->right ? cols : rows);
    return k;
}

static void svd_of_blocks(void **state)
{
    static const double due = 1;
    (void)state;
    for (int right = 0; right < 2; right++) {
        lm_svd_attr a = { 5, right };
        kernel_case k = svd_case(&a, right ? 170 : 70, right ? 70 : 170);
        k.in[1] = given(vec(F32, 1), &due);
        check_on_device(&k, LM_DTYPE_F32, 1e-5, 0, true);
    }
}

static void svd_is_not_due(void **state)
{
    static const double never = 0;
    lm_svd_attr a = { 3, true };
    kernel_case k = svd_case(&a, 9, 7);
    double *x = matrix(9, 7, false);
    (void)state;
    x[4] = NAN; /* not read, because the call is not due */
    k.in[0] = given(mat(F32, 9, 7), x);
    k.in[1] = given(vec(F32, 1), &never);
    check_on_device(&k, LM_DTYPE_F32, 0, 0, true);
    lm_free(x);
}

static void not_finite(void **state)
{
    static const char *const ops[] = { "qr", "eigh", "eigh_next", "svd" };
    static const double bad[] = { NAN, INFINITY, -INFINITY };
    enum { N = 40 };
    (void)state;
    for (int op = 0; op < 4; op++)
        for (int b = 0; b < 3; b++) {
            lm_svd_attr a = { N, false };
            kernel_case k = { .op = ops[op], .attr = op == 3 ? &a : NULL };
            double *x = matrix(N, N, true);
            instance y;
            x[5] = x[5 * N] = bad[b];
            k.in[0] = k.out[0] = given(mat(F32, N, N), x);
            if (op == 2)
                k.in[1] = k.out[1] = mat(F32, N, N);
            build(&k, LM_DTYPE_F32, LM_DTYPE_F32, &y);
            run_on_device(&y, device_kernel(ops[op], LM_DTYPE_F32), 0);
            for (int64_t i = 0; i < N * N; i++)
                assert_true(isnan(((float *)y.out[0].data)[i]));
            drop(&k, &y);
            lm_free(x);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(qr_of_panels),   cmocka_unit_test(qr_without_full_rank),
        cmocka_unit_test(eigh_of_blocks), cmocka_unit_test(eigh_of_diagonals),
        cmocka_unit_test(next_of_panels), cmocka_unit_test(svd_of_blocks),
        cmocka_unit_test(svd_is_not_due), cmocka_unit_test(not_finite),
    };
    return cmocka_run_group_tests_name("cuda_factor", tests, open_device, close_device);
}
