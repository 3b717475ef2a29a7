/* SPDX-License-Identifier: Apache-2.0 */
/* dispatch.h -- rules of lm_op.shard for rows at the ranks of their experts (kernels/dispatch.h).  Private to lib/op. */
#ifndef LM_OP_DISPATCH_H
#define LM_OP_DISPATCH_H

#include "op/append.h"

lm_code lm_route_rows_shard(lm_shard_call *s, lm_err *e);
lm_code lm_route_sum_shard(lm_shard_call *s, lm_err *e);
lm_code lm_route_dot_shard(lm_shard_call *s, lm_err *e);
/* True for a form in which each rank has a plan of its own tokens: its call is what the pass makes of it. */
bool lm_is_own(const lm_shard_call *s);
/* Operand i, the offsets of all experts, becomes that of this rank's. */
lm_code lm_own_experts(lm_shard_call *s, int i, lm_err *e);

#endif
