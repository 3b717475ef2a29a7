/* SPDX-License-Identifier: Apache-2.0 */
/* presets.h -- finds the presets of models (model/preset.h). */
#ifndef LM_CMD_PRESETS_H
#define LM_CMD_PRESETS_H

#include "base/err.h"

enum { LM_PRESET_DIRS = 4 };

typedef struct {
    char *dir[LM_PRESET_DIRS + 1]; /* NULL-terminated */
} lm_presets;

/* The folder relative to the executable, in a build folder (build/bin) or an installation (bin),
 * otherwise that under the PREFIX of the build. */
lm_code lm_presets_find(lm_presets *p, lm_err *e);
void lm_presets_fini(lm_presets *p);

#endif
