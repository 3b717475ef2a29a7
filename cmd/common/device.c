/* SPDX-License-Identifier: Apache-2.0 */
/* device.c -- from --device to an open backend. */
#include "common/device.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/text.h"

#ifndef LM_PREFIX
#define LM_PREFIX "/usr/local"
#endif

enum { MOST_FOLDERS = 16 };

typedef struct {
    char *v[MOST_FOLDERS + 1];
    int n;
} folder_list;

/* The folders named in LM_MODULES, then that beside the executable in a build folder or an
 * installation, then that of the PREFIX of the build. */
static lm_code list_modules(folder_list *l, lm_err *e)
{
    const char *s = getenv("LM_MODULES");
    char exe[4096];
    ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 1);

    for (size_t len; s && *s && l->n < MOST_FOLDERS - 2; s += len + (s[len] == ':')) {
        len = strcspn(s, ":");
        if (len && lm_asprintf(&l->v[l->n++], e, "%.*s", (int)len, s))
            return e->code;
    }
    if (n > 0) {
        exe[n] = 0;
        *strrchr(exe, '/') = 0;
        if (lm_asprintf(&l->v[l->n++], e, "%s/../lib/lmutils", exe))
            return e->code;
    }
    return lm_asprintf(&l->v[l->n++], e, "%s/lib/lmutils", LM_PREFIX);
}

lm_code lm_open_backend(lm_tool *t, lm_par *par, bool deterministic, lm_backend **out, lm_err *e)
{
    const char *kernels = getenv("LM_CUDA");
    folder_list modules = { 0 };
    lm_code rc = list_modules(&modules, e);

    *out = NULL;
    if (!rc)
        rc = lm_backend_open(&(lm_backend_opts){ .device = t->device,
                                                 .cpu = t->cpu,
                                                 .par = par,
                                                 .kernels = kernels && *kernels ? kernels : NULL,
                                                 .deterministic = deterministic,
                                                 .modules = (const char *const *)modules.v },
                             out, e);
    if (rc == LM_EUSAGE) /* the name of the device was valid */
        lm_err_in(e, "LM_CUDA");
    for (int i = 0; i < modules.n; i++)
        lm_free(modules.v[i]);
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
