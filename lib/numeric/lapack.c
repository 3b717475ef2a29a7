/* SPDX-License-Identifier: Apache-2.0 */
/* lapack.c -- OpenBLAS and LAPACKE by dlopen. */
#include "numeric/lapack.h"

#include <cblas-openblas.h>
#include <dlfcn.h>
#include <errno.h>
#include <lapacke.h>
#include <pthread.h>
#include <stdio.h>

static struct {
    pthread_once_t once;
    lm_lapack table;
    char missing[200]; /* what the loader says; empty: all is there */
} loaded = { .once = PTHREAD_ONCE_INIT };

static void *open_library(const char *name)
{
    void *h = loaded.missing[0] ? NULL : dlopen(name, RTLD_NOW | RTLD_LOCAL); /* stays */
    const char *why = h || loaded.missing[0] ? NULL : dlerror();
    if (why)
        snprintf(loaded.missing, sizeof loaded.missing, "%s", why);
    return h;
}

static void find(void *library, const char *name, void *out)
{
    *(void **)out = library ? dlsym(library, name) : NULL;
    if (library && !*(void **)out)
        snprintf(loaded.missing, sizeof loaded.missing, "%s is not in it", name);
}

/* The table has the types of the library's own headers, with enumerations as int. */
_Static_assert(sizeof(lapack_int) == sizeof(int) && sizeof(CBLAS_ORDER) == sizeof(int) &&
                   (int)CblasRowMajor == LM_BLAS_ROWS && (int)CblasNoTrans == LM_BLAS_PLAIN &&
                   (int)CblasTrans == LM_BLAS_TRANSPOSED && LAPACK_COL_MAJOR == LM_LAPACK_COLUMNS &&
                   __builtin_types_compatible_p(__typeof__(LAPACKE_dpotrf_work) *,
                                                __typeof__(loaded.table.dpotrf)) &&
                   __builtin_types_compatible_p(__typeof__(LAPACKE_dpotrs_work) *,
                                                __typeof__(loaded.table.dpotrs)) &&
                   __builtin_types_compatible_p(__typeof__(LAPACKE_dgeqrf_work) *,
                                                __typeof__(loaded.table.dgeqrf)) &&
                   __builtin_types_compatible_p(__typeof__(LAPACKE_dlarft_work) *,
                                                __typeof__(loaded.table.dlarft)) &&
                   __builtin_types_compatible_p(__typeof__(LAPACKE_dlarfb_work) *,
                                                __typeof__(loaded.table.dlarfb)) &&
                   __builtin_types_compatible_p(__typeof__(LAPACKE_dsyevd_work) *,
                                                __typeof__(loaded.table.dsyevd)) &&
                   __builtin_types_compatible_p(__typeof__(LAPACKE_dgesdd_work) *,
                                                __typeof__(loaded.table.dgesdd)),
               "the calls of lapack.h are those of the library");

static void load(void)
{
    void (*set_threads)(int) = NULL;
    void *blas = open_library("libopenblas.so.0"), *lapack = open_library("liblapacke.so.3");
    find(blas, "openblas_set_num_threads", &set_threads);
    find(blas, "cblas_dgemm", &loaded.table.dgemm);
    find(lapack, "LAPACKE_dpotrf_work", &loaded.table.dpotrf);
    find(lapack, "LAPACKE_dpotrs_work", &loaded.table.dpotrs);
    find(lapack, "LAPACKE_dgeqrf_work", &loaded.table.dgeqrf);
    find(lapack, "LAPACKE_dlarft_work", &loaded.table.dlarft);
    find(lapack, "LAPACKE_dlarfb_work", &loaded.table.dlarfb);
    find(lapack, "LAPACKE_dsyevd_work", &loaded.table.dsyevd);
    find(lapack, "LAPACKE_dgesdd_work", &loaded.table.dgesdd);
    if (set_threads)
        set_threads(1);
}

lm_code lm_lapack_load(const lm_lapack **out, lm_err *e)
{
    pthread_once(&loaded.once, load);
    errno = 0;
    if (loaded.missing[0])
        return lm_fail(e, LM_EIO, "OpenBLAS", "install libopenblas0 and liblapacke", "%s",
                       loaded.missing);
    *out = &loaded.table;
    return LM_OK;
}
