/* SPDX-License-Identifier: Apache-2.0 */
/* device.c -- from --device to an open backend. */
#include "common/device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/modules.h"

/* Of ranks that are processes each of a machine has a device of its own: the first one that named. */
static const char *device_of(const lm_tool *t, char name[32])
{
    const char *colon = strchr(t->device, ':');
    if (!t->comm || t->ranks < 2 || !strcmp(t->device, "cpu"))
        return t->device;
    snprintf(name, 32, "cuda:%d", (colon ? atoi(colon + 1) : 0) + t->rank_here);
    return name;
}

lm_code lm_open_backend(lm_tool *t, lm_par *par, bool deterministic, lm_backend **out, lm_err *e)
{
    const char *kernels = getenv("LM_CUDA");
    lm_modules modules;
    char name[32];
    lm_code rc = lm_modules_find(&modules, e);

    *out = NULL;
    if (!rc)
        rc = lm_backend_open(&(lm_backend_opts){ .device = device_of(t, name),
                                                 .cpu = t->cpu,
                                                 .par = par,
                                                 .kernels = kernels && *kernels ? kernels : NULL,
                                                 .deterministic = deterministic,
                                                 .modules = (const char *const *)modules.dir },
                             out, e);
    if (rc == LM_EUSAGE) /* the name of the device was valid */
        lm_err_in(e, "LM_CUDA");
    lm_modules_fini(&modules);
    if (!rc)
        lm_say(t, LM_LOG_INFO, "device %s: %s; kernels %s", (*out)->name, (*out)->device,
               (*out)->detail);
    const char *advice = rc ? NULL : (*out)->advice(*out);
    if (advice)
        lm_say(t, LM_LOG_WARN, "device %s: %s", (*out)->name, advice);
    return rc;
}

void lm_close_backend(lm_tool *t, lm_backend *b)
{
    const char *fell_short = b ? b->shortfall(b) : NULL;

    if (fell_short)
        lm_say(t, LM_LOG_WARN, "device %s: %s", b->name, fell_short);
    lm_backend_close(b);
}
