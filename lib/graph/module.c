/* SPDX-License-Identifier: Apache-2.0 */
/* module.c -- backends by name: the CPU's, and those in modules that are loaded on request. */
#include "base/module.h"

#include <string.h>

#include "graph/backend.h"

static lm_code load(const lm_backend_opts *o, const lm_module **out, lm_err *e)
{
    const lm_module_search s = { .file = "libcore-cuda.so",
                                 .symbol = LM_MODULE_SYMBOL,
                                 .todo = "'make cuda' builds it where nvcc is",
                                 .folders = o->modules,
                                 .want = { .size = sizeof(lm_backend),
                                           .contracts = LM_CONTRACTS } };
    const void *found = NULL;
    lm_code rc = lm_module_open(&s, o->device, &found, e);

    *out = found;
    return rc;
}

lm_code lm_backend_open(const lm_backend_opts *o, lm_backend **out, lm_err *e)
{
    const lm_module *m = NULL;
    lm_code rc;

    *out = NULL;
    if (!strcmp(o->device, "cpu"))
        return lm_backend_cpu(o->cpu, o->par, out, e);
    if (!lm_device_named(o->device))
        return lm_fail(e, LM_EUSAGE, o->device, "choose from cpu, cuda, cuda:0, cuda:1, ...",
                       "no such device");
    rc = load(o, &m, e);
    rc = rc ? rc : m->open(o, out, e);
    if (!rc)
        (*out)->cpu = o->cpu;
    return rc;
}
