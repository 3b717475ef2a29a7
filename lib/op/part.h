/* SPDX-License-Identifier: Apache-2.0 */
/* part.h -- calls of a rank that has a part of a whole, by operators with draws for each element (kernels/origin.h).
 * Private to lib/op. */
#ifndef LM_OP_PART_H
#define LM_OP_PART_H

#include "graph/passes.h"
#include "kernels/origin.h"

#define LM_LEVEL_FIELDS(t, member)                                                                 \
    { LM_ATTR_RARE_INT(t, member.period, 0, 0) }, { LM_ATTR_RARE_INT(t, member.from0, 0, 0) },     \
        { LM_ATTR_RARE_INT(t, member.count0, 0, 0) }, { LM_ATTR_RARE_INT(t, member.from1, 0, 0) }, \
    {                                                                                              \
        LM_ATTR_RARE_INT(t, member.count1, 0, 0)                                                   \
    }
/* Rows of a table of fields; `member` is an lm_origin. */
#define LM_PART_FIELDS(t, member)                                                     \
    { LM_ATTR_RARE_INT(t, member.count, 0, 0) }, LM_LEVEL_FIELDS(t, member.level[0]), \
        LM_LEVEL_FIELDS(t, member.level[1]), LM_LEVEL_FIELDS(t, member.level[2])

/* For lm_op.shard of operators with split and ranges "*": append the call, whose *o, in its attributes, gets one more level. */
lm_code lm_part_append(lm_shard_call *s, lm_origin *o, lm_err *e);

#endif
