/* SPDX-License-Identifier: Apache-2.0 */
/* nccl.c -- see nccl.h. */
#include "graph/cuda/nccl.h"

#ifdef LM_NCCL
#include <errno.h>
#include <pthread.h>

#ifndef LM_EMU
#include <dlfcn.h>
#endif

static lm_nccl calls;
static lm_err failure;
static pthread_once_t once = PTHREAD_ONCE_INIT;

#ifdef LM_EMU
static void open_library(void)
{
#define FILL(name) calls.name = name;
    LM_NCCL_CALLS(FILL)
#undef FILL
}
#else
#define LIBRARY "libnccl.so.2"

static const char advice[] = "install NCCL (libnccl2), or name its folder in LD_LIBRARY_PATH";

static void open_library(void)
{
    void *library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL); /* stays */
    const char *lacks = NULL;

    errno = 0; /* the loader's message names the path */
    if (!library) {
        lm_fail(&failure, LM_EIO, LIBRARY, advice, "cannot be loaded: %s", dlerror());
        return;
    }
#define FILL(name)                                 \
    *(void **)&calls.name = dlsym(library, #name); \
    lacks = lacks || calls.name ? lacks : #name;
    LM_NCCL_CALLS(FILL)
#undef FILL
    if (lacks)
        lm_fail(&failure, LM_EIO, LIBRARY, advice, "this version lacks %s", lacks);
}
#endif

lm_code lm_nccl_open(const lm_nccl **out, lm_err *e)
{
    pthread_once(&once, open_library);
    *out = &calls;
    if (failure.code)
        *e = failure;
    return failure.code;
}
#endif
