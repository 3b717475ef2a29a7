/* SPDX-License-Identifier: Apache-2.0 */
/* svd.c -- singular values of matrices, and factors from the largest. */
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "base/rng.h"
#include "numeric/lapack.h"
#include "tune/svd.h"

void lm_tune_svd_fini(lm_tune_svd *s)
{
    lm_free(s->block);
    *s = (lm_tune_svd){ 0 };
}

/* The library works in 4 n^2 + 7 n numbers, and blocks of 64 rows of either side. */
double lm_tune_svd_room(int64_t out, int64_t in)
{
    double n = out < in ? (double)out : (double)in, both = (double)out + (double)in;

    return ((double)out * (double)in + n * (both + 1) + 4 * n * n + 64 * both) * sizeof(double);
}

/* By columns, as PyTorch calls the library, so that signs of vectors are the same. */
lm_code lm_tune_svd_of(const double *w, int64_t out, int64_t in, lm_tune_svd *s, lm_err *e)
{
    int64_t n = out < in ? out : in, room;
    double *a = NULL, *work = NULL, ask = 0;
    int *iwork = NULL, info;
    const lm_lapack *la = NULL;
    lm_code rc = lm_lapack_load(&la, e);

    *s = (lm_tune_svd){ .n = n, .out = out, .in = in };
    if (!rc && (out > INT32_MAX || in > INT32_MAX || n > 32768))
        rc = lm_fail(e, LM_ELIMIT, "singular values", NULL, "a matrix [%lld,%lld] is too large",
                     (long long)out, (long long)in);
    rc = rc ? rc : lm_alloc_n(&a, (size_t)(out * in), sizeof *a, "singular values", e);
    rc = rc ? rc
            : lm_alloc_n(&s->block, (size_t)(n * (out + in + 1)), sizeof *s->block,
                         "singular values", e);
    rc = rc ? rc : lm_alloc_n(&iwork, (size_t)(8 * n), sizeof *iwork, "singular values", e);
    if (!rc) {
        s->value = s->block;
        s->left = s->value + n;
        s->right = s->left + out * n;
        info = la->dgesdd(LM_LAPACK_COLUMNS, 'S', (int)out, (int)in, a, (int)out, s->value, s->left,
                          (int)out, s->right, (int)n, &ask, -1, iwork);
        room = (int64_t)ask;
        rc = info ? lm_fail(e, LM_EBUG, "singular values", NULL, "dgesdd refuses its arguments")
                  : lm_alloc_n(&work, (size_t)room, sizeof *work, "singular values", e);
    }
    if (!rc) {
        for (int64_t i = 0; i < out; i++)
            for (int64_t j = 0; j < in; j++)
                a[j * out + i] = w[i * in + j];
        info = la->dgesdd(LM_LAPACK_COLUMNS, 'S', (int)out, (int)in, a, (int)out, s->value, s->left,
                          (int)out, s->right, (int)n, work, (int)room, iwork);
        if (info)
            rc = lm_fail(e, LM_ENUMERIC, "singular values", NULL,
                         info > 0 ? "they do not converge"
                                  : "the matrix has a number that is not "
                                    "finite");
    }
    lm_free(a);
    lm_free(work);
    lm_free(iwork);
    if (rc)
        lm_tune_svd_fini(s);
    return rc;
}

void lm_tune_orthonormalise(double *q, int64_t rows, int64_t k)
{
    for (int64_t c = 0; c < k; c++) {
        double norm = 0;

        for (int again = 0; again < 2; again++)
            for (int64_t p = 0; p < c; p++) {
                double dot = 0;

                for (int64_t i = 0; i < rows; i++)
                    dot += q[i * k + p] * q[i * k + c];
                for (int64_t i = 0; i < rows; i++)
                    q[i * k + c] -= dot * q[i * k + p];
            }
        for (int64_t i = 0; i < rows; i++)
            norm += q[i * k + c] * q[i * k + c];
        norm = norm > 0 ? 1 / sqrt(norm) : 0;
        for (int64_t i = 0; i < rows; i++)
            q[i * k + c] *= norm;
    }
}

enum { EXACT = 512, MORE = 16, ROUNDS = 4 };

/* W about Q (Q^T W), Q [out,k]: the SVD of the small matrix gives W's. */
static lm_code project(const double *w, int64_t out, int64_t in, int64_t k, uint64_t seed,
                       lm_tune_svd *s, lm_err *e)
{
    const lm_lapack *la = NULL;
    lm_rng rng = lm_rng_make(seed, "singular values", 0);
    double *q = NULL, *z = NULL, *left = NULL;
    lm_tune_svd small = { 0 };
    lm_code rc = lm_lapack_load(&la, e);

    rc = rc ? rc : lm_alloc_n(&q, (size_t)(out * k), sizeof *q, "singular values", e);
    rc = rc ? rc : lm_alloc_n(&z, (size_t)(in * k), sizeof *z, "singular values", e);
    for (int64_t i = 0; !rc && i < in * k; i++)
        z[i] = lm_rng_normal(rng, (uint64_t)i);
    for (int r = 0; !rc && r <= ROUNDS; r++) {
        la->dgemm(LM_BLAS_ROWS, LM_BLAS_PLAIN, LM_BLAS_PLAIN, (int)out, (int)k, (int)in, 1, w,
                  (int)in, z, (int)k, 0, q, (int)k);
        lm_tune_orthonormalise(q, out, k);
        if (r == ROUNDS)
            break;
        la->dgemm(LM_BLAS_ROWS, LM_BLAS_TRANSPOSED, LM_BLAS_PLAIN, (int)in, (int)k, (int)out, 1, w,
                  (int)in, q, (int)k, 0, z, (int)k);
        lm_tune_orthonormalise(z, in, k);
    }
    if (!rc) { /* z = Q^T W [k,in] */
        la->dgemm(LM_BLAS_ROWS, LM_BLAS_TRANSPOSED, LM_BLAS_PLAIN, (int)k, (int)in, (int)out, 1, q,
                  (int)k, w, (int)in, 0, z, (int)in);
        rc = lm_tune_svd_of(z, k, in, &small, e);
    }
    rc = rc ? rc
            : lm_alloc_n(&s->block, (size_t)(k * (out + in + 1)), sizeof *left, "singular values",
                         e);
    if (!rc) {
        s->n = k;
        s->out = out;
        s->in = in;
        s->value = s->block;
        s->left = s->value + k;
        s->right = s->left + out * k;
        memcpy(s->value, small.value, (size_t)k * sizeof *q);
        memcpy(s->right, small.right, (size_t)(in * k) * sizeof *q);
        for (int64_t c = 0; c < k; c++)
            for (int64_t i = 0; i < out; i++) {
                double sum = 0;

                for (int64_t p = 0; p < k; p++)
                    sum += q[i * k + p] * small.left[c * k + p];
                s->left[c * out + i] = sum;
            }
    }
    lm_free(q);
    lm_free(z);
    lm_tune_svd_fini(&small);
    return rc;
}

lm_code lm_tune_svd_most(const double *w, int64_t out, int64_t in, int64_t most, uint64_t seed,
                         lm_tune_svd *s, lm_err *e)
{
    int64_t n = out < in ? out : in;

    *s = (lm_tune_svd){ 0 };
    return n <= EXACT || 4 * (most + MORE) > n ? lm_tune_svd_of(w, out, in, s, e)
                                               : project(w, out, in, most + MORE, seed, s, e);
}

int64_t lm_tune_svd_rank(const lm_tune_svd *s, int64_t most, double share, double all)
{
    double sum = 0;
    int64_t r = 0;

    while (r < s->n && r < most && (share >= 1 || sum < share * all)) {
        sum += s->value[r] * s->value[r];
        r++;
    }
    return r > 0 ? r : 1;
}

void lm_tune_svd_factors(const lm_tune_svd *s, int64_t rank, double share, double *left,
                         double *right)
{
    for (int64_t k = 0; k < rank; k++) {
        double v = k < s->n ? s->value[k] : 0;

        for (int64_t i = 0; i < s->out; i++)
            left[i * rank + k] = k < s->n ? s->left[k * s->out + i] * pow(v, 1 - share) : 0;
        for (int64_t j = 0; j < s->in; j++)
            right[k * s->in + j] = k < s->n ? s->right[j * s->n + k] * pow(v, share) : 0;
    }
}

lm_code lm_tune_largest(const double *w, int64_t out, int64_t in, int64_t r, double share,
                        double *left, double *right, lm_err *e)
{
    lm_tune_svd s;
    lm_code rc = lm_tune_svd_of(w, out, in, &s, e);

    if (!rc)
        lm_tune_svd_factors(&s, r, share, left, right);
    lm_tune_svd_fini(&s);
    return rc;
}
