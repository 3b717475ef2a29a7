/* SPDX-License-Identifier: Apache-2.0 */
/* lapack.h -- dense linear algebra of BLAS and LAPACK, loaded when it is first asked for.
 *
 * The library takes 2 ms to load, more than all else that a tool does before its work, so no tool links it.
 * Calls have the arguments of CBLAS and LAPACKE with 32-bit integers; those that end in _work take their
 * scratch from the caller or need none.  Each call runs on the thread that makes it, so its bits do not
 * depend on the number of threads. */
#ifndef LM_NUMERIC_LAPACK_H
#define LM_NUMERIC_LAPACK_H

#include "base/err.h"

enum { LM_BLAS_ROWS = 101, LM_LAPACK_COLUMNS = 102 };   /* storage order: row major, column major */
enum { LM_BLAS_PLAIN = 111, LM_BLAS_TRANSPOSED = 112 }; /* an operand as it lies, or transposed */

typedef struct {
    /* C = alpha A B + beta C, [m, k] by [k, n]. */
    void (*dgemm)(int order, int a_as, int b_as, int m, int n, int k, double alpha, const double *a,
                  int lda, const double *b, int ldb, double beta, double *c, int ldc);
    /* The Cholesky factor of a [n, n]; 0, or the number of the pivot that is not positive. */
    int (*dpotrf)(int order, char triangle, int n, double *a, int lda);
    /* Solve for `count` right-hand sides b with that factor. */
    int (*dpotrs)(int order, char triangle, int n, int count, const double *a, int lda, double *b,
                  int ldb);
    /* A [m, n] = Q R: reflections below the diagonal and in tau [n], R above.  room: numbers of work. */
    int (*dgeqrf)(int order, int m, int n, double *a, int lda, double *tau, double *work, int room);
    /* The triangle T [k, k] of k of them, V [n, k], so that their product is H = 1 - V T V'. */
    int (*dlarft)(int order, char direct, char stored, int n, int k, const double *v, int ldv,
                  const double *tau, double *t, int ldt);
    /* H C or ('T') H' C in the place of C [m, n]; work [ldwork, k], ldwork >= n. */
    int (*dlarfb)(int order, char side, char trans, char direct, char stored, int m, int n, int k,
                  const double *v, int ldv, const double *t, int ldt, double *c, int ldc,
                  double *work, int ldwork);
    /* Eigenvalues w [n], rising, of a symmetric matrix, and (job 'V') eigenvectors in its place. */
    int (*dsyevd)(int order, char job, char triangle, int n, double *a, int lda, double *w,
                  double *work, int room, int *iwork, int iroom);
    /* A [m, n] = U diag(s) V': the lesser side of columns of U and rows of V' with job 'S'; iwork: 8 times that. */
    int (*dgesdd)(int order, char job, int m, int n, double *a, int lda, double *s, double *u,
                  int ldu, double *vt, int ldvt, double *work, int room, int *iwork);
} lm_lapack;

/* Load it, once for the process.  Fails: LM_EIO naming the library that is missing. */
lm_code lm_lapack_load(const lm_lapack **out, lm_err *e);

#endif
