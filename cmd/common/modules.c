/* SPDX-License-Identifier: Apache-2.0 */
/* modules.c -- see modules.h. */
#include "common/modules.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"

#ifndef LM_PREFIX
#define LM_PREFIX "/usr/local"
#endif

lm_code lm_modules_find(lm_modules *m, lm_err *e)
{
    const char *s = getenv("LM_MODULES");
    char exe[4096];
    ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 1);

    *m = (lm_modules){ 0 };
    for (size_t len; s && *s && m->n < LM_MODULE_FOLDERS - 2; s += len + (s[len] == ':')) {
        len = strcspn(s, ":");
        if (len && lm_asprintf(&m->dir[m->n++], e, "%.*s", (int)len, s))
            return e->code;
    }
    if (n > 0) {
        exe[n] = 0;
        *strrchr(exe, '/') = 0;
        if (lm_asprintf(&m->dir[m->n++], e, "%s/../lib/lmutils", exe))
            return e->code;
    }
    return lm_asprintf(&m->dir[m->n++], e, "%s/lib/lmutils", LM_PREFIX);
}

void lm_modules_fini(lm_modules *m)
{
    for (int i = 0; i < m->n; i++)
        lm_free(m->dir[i]);
    *m = (lm_modules){ 0 };
}
