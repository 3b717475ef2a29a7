/* SPDX-License-Identifier: Apache-2.0 */
/* presets.c -- folders of presets. */
#include "common/presets.h"

#include <string.h>
#include <unistd.h>

#include "base/mem.h"

#ifndef LM_PREFIX
#define LM_PREFIX "/usr/local"
#endif

lm_code lm_presets_find(lm_presets *p, lm_err *e)
{
    static const char *const beside[] = { "/../../share/models", "/../share/lmutils/models" };
    char exe[4096];
    ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 1);
    int k = 0;
    memset(p, 0, sizeof *p);
    if (n > 0) {
        exe[n] = 0;
        *strrchr(exe, '/') = 0;
        for (int i = 0; i < 2; i++)
            if (lm_asprintf(&p->dir[k++], e, "%s%s", exe, beside[i]))
                return e->code;
    }
#ifdef LM_SHARE
    if (lm_asprintf(&p->dir[k++], e, "%s/models", LM_SHARE))
        return e->code;
#endif
    return lm_asprintf(&p->dir[k], e, "%s/share/lmutils/models", LM_PREFIX);
}

void lm_presets_fini(lm_presets *p)
{
    for (int i = 0; i < LM_PRESET_DIRS; i++)
        lm_free(p->dir[i]);
    memset(p, 0, sizeof *p);
}
