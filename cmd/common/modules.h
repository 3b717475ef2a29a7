/* SPDX-License-Identifier: Apache-2.0 */
/* modules.h -- the folders in which modules of the library are searched. */
#ifndef LM_CMD_MODULES_H
#define LM_CMD_MODULES_H

#include "base/err.h"

enum { LM_MODULE_FOLDERS = 16 };

typedef struct {
    char *dir[LM_MODULE_FOLDERS + 1]; /* NULL: past the last */
    int n;
} lm_modules;

/* Those named in LM_MODULES, then that beside the executable in a build folder or an installation, then that of the PREFIX
 * of the build.  lm_modules_fini in any case. */
lm_code lm_modules_find(lm_modules *m, lm_err *e);
void lm_modules_fini(lm_modules *m);

#endif
