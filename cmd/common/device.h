/* SPDX-License-Identifier: Apache-2.0 */
/* device.h -- opens the backend of --device. */
#ifndef LM_CMD_DEVICE_H
#define LM_CMD_DEVICE_H

#include "common/tool.h"
#include "graph/backend.h"

/* Open the device of a tool with LM_USE_DEVICE, log its description at level info, and warn if
 * kernels leave much of it idle unless they were chosen.  Host kernels run on `par` (borrowed).
 * Fails as lm_backend_open does; never opens another device. */
lm_code lm_open_backend(lm_tool *t, lm_par *par, bool deterministic, lm_backend **out, lm_err *e);

/* Report the shortfall of its kernels, if any, and close it; NULL is fine. */
void lm_close_backend(lm_tool *t, lm_backend *b);

#endif
