/* SPDX-License-Identifier: Apache-2.0 */
/* ranks.h -- processes that a launcher (mpirun, srun) has started as the ranks of one work.
 *
 * lm_begin opens them for tools with LM_USE_RANKS: t->comm is then there, and rank 0 speaks for all.  A failure of one rank
 * is that of all (lm_complain), and one rank of each machine prints it. */
#ifndef LM_CMD_RANKS_H
#define LM_CMD_RANKS_H

#include "common/tool.h"

/* How this process was started: t->rank, t->ranks.  Before options are read. */
void lm_ranks_look(lm_tool *t);
/* Find the others.  Nothing for a process that was started alone.  Fails: LM_EUSAGE for a tool without LM_USE_RANKS, and when
 * ranks have other versions or kernels; as lm_comm_open. */
lm_code lm_ranks_open(lm_tool *t, lm_err *e);
/* Make all ranks fail with the first failure, which replaces *e unless it is the same misuse; false: another rank prints
 * it. */
bool lm_ranks_fail(lm_tool *t, lm_err *e);
/* Check that all ranks do the same: "a run", "a plan", ... */
lm_code lm_ranks_same_work(const lm_tool *t, const char *work, lm_err *e);
/* Go on with the first n ranks: t->comm is theirs from here on, and t->rests is set on the others, which do nothing but wait
 * for the end.  Collective. */
lm_code lm_ranks_keep(lm_tool *t, int n, lm_err *e);
/* Wait for the others, unless this rank has failed; true: another one has. */
bool lm_ranks_close(lm_tool *t);

#endif
