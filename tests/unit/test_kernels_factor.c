/* SPDX-License-Identifier: Apache-2.0 */
/* Bases of matrices: orthonormal, of the right space, in the right order, with fixed signs. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/factor.h"

enum { MOST = 48 };

static float x[MOST * MOST], out[MOST * MOST];

static lm_tensor matrix_of(float *data, int64_t rows, int64_t cols)
{
    return (lm_tensor){ .data = data, .dtype = LM_DTYPE_F32, .ndim = 2, .dim = { rows, cols } };
}

static void run(const char *op, const void *attr, int64_t rows, int64_t cols, int64_t r, int64_t c)
{
    static double work[8 * MOST * MOST];
    lm_tensor in = matrix_of(x, rows, cols), u = matrix_of(out, r, c);
    lm_call call = { .attr = attr, .in = &in, .n_in = 1, .out = &u, .n_out = 1, .work = work };
    const lm_kernel *k = lm_cpu_kernel(op, LM_DTYPE_F32, lm_cpu_detect());
    assert_true(k->work(&call, 1) <= sizeof work);
    k->run(&call);
}

static void draw(int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        x[i] = sinf((float)(i * i % 1009)) + 0.1f;
}

/* Entry i of vector k, of `out` as [n, k] columns. */
static double at(int64_t pitch, int64_t i, int64_t k)
{
    return out[i * pitch + k];
}

static void check_orthonormal(int64_t n, int64_t k)
{
    for (int64_t p = 0; p < k; p++)
        for (int64_t q = 0; q <= p; q++) {
            double dot = 0;
            for (int64_t i = 0; i < n; i++)
                dot += at(k, i, p) * at(k, i, q);
            assert_true(fabs(dot - (p == q)) < 1e-5);
        }
}

static void test_qr(void **state)
{
    (void)state;
    for (int64_t n = 1; n <= MOST; n += 13)
        for (int64_t k = 1; k <= n; k += 5) {
            draw(n * k);
            run("qr", NULL, n, k, n, k);
            check_orthonormal(n, k);
            for (int64_t p = 0; p < k; p++)
                for (int64_t q = 0; q <= p; q++) { /* r = q' x */
                    double r = 0;
                    for (int64_t i = 0; i < n; i++)
                        r += at(k, i, p) * x[i * k + q];
                    assert_true(p == q ? r > -1e-5 : fabs(r) < 1e-4);
                }
        }
}

static void check_sign(int64_t n, int64_t k)
{
    for (int64_t p = 0; p < k; p++) {
        double top = 0, low = 0;
        for (int64_t i = 0; i < n; i++) {
            top = fmax(top, at(k, i, p));
            low = fmin(low, at(k, i, p));
        }
        assert_true(top >= -low);
    }
}

static void test_eigh(void **state)
{
    (void)state;
    for (int64_t n = 1; n <= MOST; n += 9) {
        draw(n * n);
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j < i; j++)
                x[j * n + i] = x[i * n + j];
        run("eigh", NULL, n, n, n, n);
        check_orthonormal(n, n);
        check_sign(n, n);
        double before = INFINITY;
        for (int64_t k = 0; k < n; k++) {
            double value = 0, rest = 0, y[MOST];
            for (int64_t i = 0; i < n; i++) {
                y[i] = 0;
                for (int64_t j = 0; j < n; j++)
                    y[i] += x[i * n + j] * at(n, j, k);
                value += y[i] * at(n, i, k);
            }
            for (int64_t i = 0; i < n; i++)
                rest += pow(y[i] - value * at(n, i, k), 2);
            assert_true(rest < 1e-8 && value <= before + 1e-4);
            before = value;
        }
    }
}

/* x = sum of s_k u_k v_k' with known vectors: the first two of either side are found. */
static void test_svd(void **state)
{
    (void)state;
    for (int right = 0; right < 2; right++) {
        int64_t rows = right ? 40 : 9, cols = right ? 7 : 33, n = right ? cols : rows;
        lm_svd_attr a = { 2, right };
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < cols; j++)
                x[i * cols + j] =
                    5 * (i == 3) * (j == 4) - 2 * (i == 1) * (j == 2) + 0.5f * (i == 0) * (j == 0);
        run("svd", &a, rows, cols, right ? 2 : rows, right ? cols : 2);
        for (int k = 0; k < 2; k++)
            for (int64_t i = 0; i < n; i++) {
                int64_t hit = right ? (k ? 2 : 4) : (k ? 1 : 3);
                assert_true(fabs(out[right ? k * n + i : i * 2 + k] - (i == hit)) < 1e-6);
            }
    }
}

/* The first vector alone; zeros if the call is not due. */
static void test_svd_due(void **state)
{
    static double work[8 * MOST * MOST];
    (void)state;
    for (int right = 0; right < 2; right++) {
        float first[12], due = 1;
        lm_svd_attr a = { 3, right };
        int64_t n = right ? 12 : 8;
        lm_tensor in[2] = { matrix_of(x, 8, 12), matrix_of(&due, 1, 1) };
        lm_tensor made[2] = { matrix_of(out, right ? 3 : 8, right ? 12 : 3),
                              matrix_of(first, 1, n) };
        lm_call call = { .attr = &a, .in = in, .n_in = 2, .out = made, .n_out = 2, .work = work };
        const lm_kernel *k = lm_cpu_kernel("svd", LM_DTYPE_F32, lm_cpu_detect());
        draw(96);
        k->run(&call);
        for (int64_t i = 0; i < n; i++)
            assert_true(first[i] == out[right ? i : i * 3]);
        due = 0;
        x[5] = NAN;
        k->run(&call);
        for (int64_t i = 0; i < 3 * n; i++)
            assert_true(out[i] == 0 && first[i % n] == 0);
    }
}

static void test_not_finite(void **state)
{
    lm_svd_attr a = { 1, false };
    (void)state;
    for (int op = 0; op < 3; op++) {
        draw(36);
        x[7] = op ? NAN : INFINITY;
        run(op == 0 ? "qr" : op == 1 ? "eigh" : "svd", &a, 6, 6, 6, op == 2 ? 1 : 6);
        assert_true(isnan(out[0]) && isnan(out[5]));
    }
}

/* The same bits on any number of threads, of matrices of several panels and chunks; the columns are orthonormal. */
static void same_on_threads(const char *op, const lm_svd_attr *a, const lm_tensor *in, int n_in,
                            lm_tensor *made, int n_out)
{
    const lm_kernel *k = lm_cpu_kernel(op, LM_DTYPE_F32, lm_cpu_detect());
    size_t bytes = (size_t)lm_tensor_count(&made[0]) * sizeof(float);
    float *first = malloc(bytes);
    lm_err e = { 0 };
    for (int threads = 1; threads <= 5; threads += 2) {
        lm_par *par = NULL;
        lm_call call = { .attr = a, .in = in, .n_in = n_in, .out = made, .n_out = n_out };
        assert_int_equal(lm_par_new(&par, threads, &e), LM_OK);
        call.par = par;
        call.work = malloc(k->work(&call, threads));
        memset(made[0].data, 0xff, bytes);
        k->run(&call);
        if (threads == 1)
            memcpy(first, made[0].data, bytes);
        assert_memory_equal(first, made[0].data, bytes);
        free(call.work);
        lm_par_free(par);
    }
    free(first);
}

static void test_threads(void **state)
{
    enum { N = 210, C = 150 };
    float *big = malloc(2 * N * N * sizeof *big), *result = malloc(2 * N * N * sizeof *result);
    (void)state;
    for (int64_t i = 0; i < 2 * N * N; i++)
        big[i] = sinf((float)(i * i % 10007));
    lm_tensor in[2] = { matrix_of(big, N, C) }, made[2] = { matrix_of(result, N, C) };
    same_on_threads("qr", NULL, in, 1, made, 1);
    for (int64_t p = 0; p < C; p++)
        for (int64_t q = 0; q <= p; q++) {
            double dot = 0, r = 0;
            for (int64_t i = 0; i < N; i++) {
                dot += (double)result[i * C + p] * result[i * C + q];
                r += (double)result[i * C + p] * big[i * C + q];
            }
            assert_true(fabs(dot - (p == q)) < 1e-5 && (p == q ? r > 0 : fabs(r) < 1e-4));
        }
    for (int right = 0; right < 2; right++) {
        lm_svd_attr a = { 5, right };
        made[0] = right ? matrix_of(result, 5, C) : matrix_of(result, N, 5);
        same_on_threads("svd", &a, in, 1, made, 1);
    }
    for (int64_t i = 0; i < N; i++)
        for (int64_t j = 0; j < i; j++)
            big[j * N + i] = big[i * N + j];
    in[0] = matrix_of(big, N, N);
    in[1] = matrix_of(big + N * N, N, N);
    made[0] = matrix_of(result, N, N);
    made[1] = matrix_of(result + N * N, N, N);
    same_on_threads("eigh_next", NULL, in, 2, made, 2);
    free(big);
    free(result);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_qr),         cmocka_unit_test(test_eigh),
        cmocka_unit_test(test_svd),        cmocka_unit_test(test_svd_due),
        cmocka_unit_test(test_not_finite), cmocka_unit_test(test_threads),
    };
    return cmocka_run_group_tests_name("kernels_factor", tests, NULL, NULL);
}
