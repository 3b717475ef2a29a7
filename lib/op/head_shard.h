/* SPDX-License-Identifier: Apache-2.0 */
/* head_shard.h -- the vocabulary head when its words are split over ranks.  Private to lib/op. */
#ifndef LM_OP_HEAD_SHARD_H
#define LM_OP_HEAD_SHARD_H

#include "op/append.h"

/* Rules for lm_op.splits and lm_op.shard of head_stats and head_grad. */
bool lm_head_splits(const lm_call *c, char letter);
bool lm_head_stats_splits(const lm_call *c, char letter);
lm_code lm_head_stats_shard(lm_shard_call *s, lm_err *e);
lm_code lm_head_grad_shard(lm_shard_call *s, lm_err *e);

#endif
