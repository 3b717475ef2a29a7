/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_case.h -- the CPU's kernels with two threads, for groups of tests that share a backend: cmocka_run_group_tests(tests,
 * open_cpu, close_cpu). */
#ifndef LM_TESTS_CPU_CASE_H
#define LM_TESTS_CPU_CASE_H

#include "graph/backend.h"

static lm_err err;
static lm_par *par;
static lm_backend *backend;

static inline void ok(lm_code rc)
{
    if (rc)
        fail_msg("%s: %s", err.where, err.what);
}

static inline int open_cpu(void **state)
{
    (void)state;
    return lm_par_new(&par, 2, &err) || lm_backend_cpu(lm_cpu_detect(), par, &backend, &err);
}

static inline int close_cpu(void **state)
{
    (void)state;
    lm_backend_close(backend);
    lm_par_free(par);
    return 0;
}

#endif
