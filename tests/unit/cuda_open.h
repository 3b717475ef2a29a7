/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_open.h -- the device that tests of the CUDA backend run on: the emulated one, or with
 * LM_TEST_CUDA=real in the environment the first GPU of this machine (make check-cuda). */
#ifndef LM_TESTS_CUDA_OPEN_H
#define LM_TESTS_CUDA_OPEN_H

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "graph/backend.h"

static inline bool cuda_is_real(void)
{
    const char *want = getenv("LM_TEST_CUDA");
    return want && !strcmp(want, "real");
}

/* The folder of the module. */
static inline void cuda_modules(char path[4096])
{
    const char *build = getenv("LM_TEST_BUILD");
    snprintf(path, 4096, "%s/%s", build ? build : "build", cuda_is_real() ? "lib/lmutils" : "emu");
}

static inline lm_code cuda_open_at(int index, const char *kernels, bool deterministic,
                                   lm_backend **b, lm_err *e)
{
    char name[24], path[4096]; /* threads open devices beside each other */
    const char *const modules[] = { path, NULL };
    cuda_modules(path);
    snprintf(name, sizeof name, "cuda:%d", index);
    const lm_backend_opts o = { .device = name,
                                .cpu = lm_cpu_detect(),
                                .kernels = kernels,
                                .deterministic = deterministic,
                                .modules = modules };
    return lm_backend_open(&o, b, e);
}

static inline lm_code cuda_open(const char *kernels, bool deterministic, lm_backend **b, lm_err *e)
{
    return cuda_open_at(0, kernels, deterministic, b, e);
}

/* A device on the plain path.  It is open between open_device and close_device, the group setup
 * and teardown functions of cmocka_run_group_tests. */
static lm_backend *device;

static inline int open_device(void **state)
{
    lm_err e = { 0 };
    (void)state;
    if (cuda_open("plain", true, &device, &e))
        fprintf(stderr, "%s: %s\n", e.where, e.what);
    return e.code;
}

static inline int close_device(void **state)
{
    (void)state;
    lm_backend_close(device);
    return 0;
}

/* A function of the module; NULL if the module lacks it, or is not open. */
static inline void *module_symbol(const char *name)
{
    char path[4200];
    char from[4096];
    cuda_modules(from);
    snprintf(path, sizeof path, "%s/libcore-cuda.so", from);
    void *m = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    return m ? dlsym(m, name) : NULL;
}

/* A function of the emulation; NULL on a real device. */
static inline void *emu_symbol(const char *name)
{
    return cuda_is_real() ? NULL : module_symbol(name);
}

/* Under the emulation: run threads and blocks forward (0), backward (1) or shuffled (2) from now
 * on. Returns the number of orders: 3, or 1 on a real device. */
static inline int emu_order(int order)
{
    void (*set)(int, uint64_t) = NULL;
    *(void **)&set = emu_symbol("lm_emu_order");
    if (set)
        set(order, 7);
    return set ? 3 : 1;
}

#endif
