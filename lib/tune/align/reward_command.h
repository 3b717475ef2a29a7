/* SPDX-License-Identifier: Apache-2.0 */
/* reward_command.h -- a program that rewards completions, started once.
 *
 * It reads a line of JSON for each completion, {"prompt", "completion", "truncated", then the
 * columns of the record}, and writes one line for each, in the same order: a number, or an object
 * with "reward": a number, or null (the reward does not apply). It must write each line out as it
 * answers: python3 -u, print(..., flush=True), stdbuf -oL.  Its standard error is ours.
 *
 * Lines are written and read at the same time, so neither side waits for the other's pipe.  It runs
 * in a process group of its own: Ctrl-C reaches only us, and its children end with it.  Private to
 * lib/tune. */
#ifndef LM_TUNE_ALIGN_REWARD_COMMAND_H
#define LM_TUNE_ALIGN_REWARD_COMMAND_H

#include "tune/align/reward.h"

typedef struct lm_reward_command lm_reward_command;

/* Start /bin/sh -c `line`.  timeout: seconds without an answer while one is due.  Fails: LM_EIO. */
lm_code lm_reward_command_open(const char *line, double timeout, lm_reward_command **out,
                               lm_err *e);
/* NULL is fine.  Closes its input, waits up to two seconds, then kills the group; no zombie is
 * left. */
void lm_reward_command_close(lm_reward_command *c);
/* out[i] for each item.  Returns early when lm_stopping(); the command is then killed, and gives
 * NAN from then on.  Fails as lm_reward_score. */
lm_code lm_reward_command_score(lm_reward_command *c, const lm_reward_item *item, int64_t n,
                                double *out, lm_err *e);

#endif
