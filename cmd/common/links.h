/* SPDX-License-Identifier: Apache-2.0 */
/* links.h -- the links between the processes of a tool: tried before work, and looked at by a doctor (--check-links). */
#ifndef LM_CMD_LINKS_H
#define LM_CMD_LINKS_H

#include "common/tool.h"

/* Before a run of several processes: each link is tried with a few messages, of more than 512 ranks those of the first 64
 * rounds, and slow ones between machines are named in a warning.  Collective. */
lm_code lm_links_try(lm_tool *t, lm_err *e);

/* The answer of --check-links: where ranks are, what their links reach, what is wrong and what cures it; rank 0 prints it, as
 * JSON where that is asked for.  Status 3 if something is wrong.  Collective.  Fails: LM_EUSAGE for one process. */
lm_code lm_links_check(lm_tool *t, lm_err *e);

#endif
