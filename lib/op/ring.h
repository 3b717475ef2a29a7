/* SPDX-License-Identifier: Apache-2.0 */
/* ring.h -- rules of lm_op.shard for attention whose positions are split (kernels/ring.h).  Private to lib/op. */
#ifndef LM_OP_RING_H
#define LM_OP_RING_H

#include "kernels/attention.h"
#include "kernels/ring.h"
#include "op/append.h"

/* attention, attention_dx and attention_dbias: along T by blocks, along other letters the call with local sizes. */
lm_code lm_attention_shard(lm_shard_call *s, lm_err *e);
lm_code lm_attention_dx_shard(lm_shard_call *s, lm_err *e);
lm_code lm_attention_dbias_shard(lm_shard_call *s, lm_err *e);

/* The pairs of a sequence and head of a block of `seq` queries and as many keys; 0: it has none. */
double lm_ring_pairs(const lm_ring_block *b, int64_t seq);

#endif
