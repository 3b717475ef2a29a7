/* SPDX-License-Identifier: Apache-2.0 */
/* elastic.h -- ranks that are processes of this one: when some are lost, the others begin again at the newest checkpoint.
 *
 * A rank is lost when a signal ends it that this process has not been sent itself (kill -9, a crash, too little memory), or when
 * it does not end although the others have.  A rank that ends with an error ends the run.  The processes are this program with
 * the same arguments, as ranks of shared memory (open.h), and do not outlive this one. */
#ifndef LM_CMD_ELASTIC_H
#define LM_CMD_ELASTIC_H

#include "common/tool.h"

/* True in such a process. */
bool lm_elastic_is_rank(void);
/* There, after a loss: the run that goes on; NULL: there was no loss, or no checkpoint yet. */
const char *lm_elastic_run(void);

/* Start `ranks` processes and wait for their end; sets the exit status of the tool.  run: the folder of their run; force: what
 * is in it now is not theirs.  Fails: LM_ELIMIT if a process cannot be started; LM_EIO when the last rank is lost. */
lm_code lm_elastic_start(lm_tool *t, int ranks, const char *run, bool force, lm_err *e);

#endif
