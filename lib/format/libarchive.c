/* SPDX-License-Identifier: Apache-2.0 */
/* libarchive.c -- libarchive by dlopen. */
#include "format/libarchive.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>

#define LIBRARY "libarchive.so.13"

lm_libarchive lm_la;

static char missing[200]; /* what the loader says; empty: all is there */

static void find_symbol(void *library, const char *name, void *out)
{
    if (!(*(void **)out = dlsym(library, name)) && !missing[0])
        snprintf(missing, sizeof missing, LIBRARY " has no %s", name);
}

static void load(void)
{
    void *library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL); /* stays until the process ends */
    if (!library) {
        snprintf(missing, sizeof missing, "%s", dlerror());
        return;
    }
#define FIND(f) find_symbol(library, "archive_" #f, &lm_la.f);
    LM_LIBARCHIVE(FIND)
#undef FIND
    find_symbol(library, "archive_errno", &lm_la.error_number);
}

static lm_code loaded(const char *where, lm_err *e)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, load);
    errno = 0;
    return missing[0] ? lm_fail(e, LM_EIO, where, "install libarchive13", "%s", missing) : LM_OK;
}

lm_code lm_reader_new(const char *where, struct archive **out, lm_err *e)
{
    *out = NULL;
    if (loaded(where, e))
        return e->code;
    if (!(*out = lm_la.read_new()))
        return lm_fail(e, LM_ELIMIT, where, NULL, "no memory for a decoder");
    return LM_OK;
}

void lm_reader_filters(struct archive *a)
{
    lm_la.read_support_filter_gzip(a);
    lm_la.read_support_filter_bzip2(a);
    lm_la.read_support_filter_compress(a);
    lm_la.read_support_filter_xz(a);
    lm_la.read_support_filter_lzma(a);
    lm_la.read_support_filter_lzip(a);
    lm_la.read_support_filter_zstd(a);
    lm_la.read_support_filter_lz4(a);
}

void lm_reader_free(struct archive *a)
{
    if (a)
        lm_la.read_free(a);
}

lm_code lm_writer_new(const char *where, struct archive **out, lm_err *e)
{
    *out = NULL;
    if (loaded(where, e))
        return e->code;
    if (!(*out = lm_la.write_new()))
        return lm_fail(e, LM_ELIMIT, where, NULL, "no memory for an encoder");
    return LM_OK;
}
