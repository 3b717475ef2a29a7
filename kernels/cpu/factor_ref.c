/* SPDX-License-Identifier: Apache-2.0 */
/* factor_ref.c -- orthonormal bases by LAPACK.  Matrices go to it column by column, in double. */
#include "kernels/factor.h"

#include <math.h>

#include "kernels/cpu/ref.h"
#include "kernels/cpu/tables.h"
#include "numeric/lapack.h"

/* ---- scratch ---- */

enum { QR_PANEL = 64 };

static size_t doubles(int64_t n)
{
    return (size_t)n * sizeof(double);
}

static size_t qr_work(const lm_call *c, int threads)
{
    int64_t n = c->in[0].dim[0], k = c->in[0].dim[1];
    (void)threads;
    return n > INT32_MAX / QR_PANEL ? SIZE_MAX : doubles(n * k + 2 * k + k * QR_PANEL);
}

/* Numbers that the eigenvectors of [n, n] take beside the matrix; as many integers at most. */
static int64_t eigen_room(int64_t n)
{
    return 1 + 6 * n + 2 * n * n;
}

static size_t eigen_work(int64_t n, int64_t before)
{
    if (n > 16384) /* 2 n n is an int */
        return SIZE_MAX;
    return doubles(before + n * n + n + eigen_room(n)) + (size_t)(3 + 5 * n) * sizeof(int);
}

static size_t eigh_work(const lm_call *c, int threads)
{
    (void)threads;
    return eigen_work(c->in[0].dim[0], 0);
}

static size_t svd_work(const lm_call *c, int threads)
{
    const lm_svd_attr *a = c->attr;
    (void)threads;
    return eigen_work(c->in[0].dim[a->right], lm_tensor_count(&c->in[0]));
}

/* ---- common ---- */

static bool all_finite(const double *x, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += x[i] - x[i];
    return sum == 0;
}

static void fill_nan(lm_tensor *t)
{
    for (int64_t i = 0; i < lm_tensor_count(t); i++)
        set(t, i, NAN);
}

/* Eigenvectors of the symmetric matrix at `work`, column by column, rising; NULL when there are none. */
static const double *eigenvectors(double *work, int64_t n)
{
    const lm_lapack *la;
    double *w = work + n * n, *room = w + n;
    lm_err e = { 0 };
    if (!all_finite(work, n * n) || lm_lapack_load(&la, &e))
        return NULL;
    int info = la->dsyevd(LM_LAPACK_COLUMNS, 'V', 'L', (int)n, work, (int)n, w, room,
                          (int)eigen_room(n), (int *)(room + eigen_room(n)), (int)(3 + 5 * n));
    return info ? NULL : work;
}

/* Vector k becomes t[at + i * pitch], with its largest number positive. */
static void put_vector(lm_tensor *t, int64_t at, int64_t pitch, const double *v, int64_t n)
{
    int64_t top = 0;
    for (int64_t i = 1; i < n; i++)
        top = fabs(v[i]) > fabs(v[top]) ? i : top;
    for (int64_t i = 0; i < n; i++)
        set(t, at + i * pitch, v[top] < 0 ? -v[i] : v[i]);
}

/* ---- kernels ---- */

static void qr(const lm_call *c)
{
    const lm_tensor *x = &c->in[0];
    int64_t n = x->dim[0], k = x->dim[1];
    double *a = c->work, *tau = a + n * k, *sign = tau + k, *room = sign + k;
    const lm_lapack *la;
    lm_err e = { 0 };
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < k; j++)
            a[j * n + i] = get(x, i * k + j);
    if (!all_finite(a, n * k) || lm_lapack_load(&la, &e) ||
        la->dgeqrf(LM_LAPACK_COLUMNS, (int)n, (int)k, a, (int)n, tau, room, (int)k * QR_PANEL)) {
        fill_nan(&c->out[0]);
        return;
    }
    for (int64_t j = 0; j < k; j++)
        sign[j] = a[j * n + j] < 0 ? -1 : 1; /* of r's diagonal, which q takes the place of */
    if (la->dorgqr(LM_LAPACK_COLUMNS, (int)n, (int)k, (int)k, a, (int)n, tau, room,
                   (int)k * QR_PANEL)) {
        fill_nan(&c->out[0]);
        return;
    }
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < k; j++)
            set(&c->out[0], i * k + j, sign[j] * a[j * n + i]);
}

static void eigh(const lm_call *c)
{
    const lm_tensor *x = &c->in[0];
    int64_t n = x->dim[0];
    double *a = c->work;
    for (int64_t i = 0; i < n * n; i++)
        a[i] = get(x, i / n >= i % n ? i : i % n * n + i / n);
    const double *v = eigenvectors(a, n);
    if (!v)
        fill_nan(&c->out[0]);
    for (int64_t k = 0; v && k < n; k++)
        put_vector(&c->out[0], k, n, v + (n - 1 - k) * n, n);
}

static void svd(const lm_call *c)
{
    const lm_svd_attr *attr = c->attr;
    const lm_tensor *x = &c->in[0];
    int64_t rows = x->dim[0], cols = x->dim[1], n = attr->right ? cols : rows;
    double *a = c->work, *gram = a + rows * cols;
    const lm_lapack *la;
    const double *v = NULL;
    lm_err e = { 0 };
    for (int64_t i = 0; i < rows * cols; i++)
        a[i] = get(x, i);
    if (all_finite(a, rows * cols) && !lm_lapack_load(&la, &e)) {
        la->dgemm(LM_BLAS_ROWS, attr->right ? LM_BLAS_TRANSPOSED : LM_BLAS_PLAIN,
                  attr->right ? LM_BLAS_PLAIN : LM_BLAS_TRANSPOSED, (int)n, (int)n,
                  (int)(attr->right ? rows : cols), 1, a, (int)cols, a, (int)cols, 0, gram, (int)n);
        v = eigenvectors(gram, n);
    }
    if (!v)
        fill_nan(&c->out[0]);
    for (int64_t k = 0; v && k < attr->rank; k++)
        put_vector(&c->out[0], attr->right ? k * n : k, attr->right ? 1 : attr->rank,
                   v + (n - 1 - k) * n, n);
}

const lm_kernel lm_factor_ref_kernels[] = {
    { "qr", LM_DTYPE_NONE, LM_CPU_REF, qr, qr_work },
    { "eigh", LM_DTYPE_NONE, LM_CPU_REF, eigh, eigh_work },
    { "svd", LM_DTYPE_NONE, LM_CPU_REF, svd, svd_work },
    { NULL, LM_DTYPE_NONE, LM_CPU_REF, NULL, NULL },
};
