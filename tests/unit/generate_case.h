/* SPDX-License-Identifier: Apache-2.0 */
/* generate_case.h -- the same models on the CPU and on the device, for tests of generation. */
#ifndef LM_TESTS_GENERATE_CASE_H
#define LM_TESTS_GENERATE_CASE_H

#include "cuda_open.h"
#include "loaded_case.h"
#include "model/generate.h"
#include "model/sample.h"

static lm_err err;
static lm_par *par;
static lm_backend *host, *plain; /* the device's plain kernels */

static inline void ok(lm_code rc)
{
    if (rc)
        fail_msg("%s: %s", err.where, err.what);
}

static inline int open_both(void **state)
{
    (void)state;
    ok(lm_par_new(&par, 2, &err));
    ok(lm_backend_cpu(lm_cpu_detect(), par, &host, &err));
    ok(cuda_open("plain", true, &plain, &err));
    return 0;
}

static inline int close_both(void **state)
{
    (void)state;
    lm_backend_close(plain);
    lm_backend_close(host);
    lm_par_free(par);
    return 0;
}

#endif
