/* SPDX-License-Identifier: Apache-2.0 */
/* attention_blocks.h -- checks and counts of blocks of keys (kernels/attention.h), for all operators with attributes of
 * attention. */
#ifndef LM_OP_ATTENTION_BLOCKS_H
#define LM_OP_ATTENTION_BLOCKS_H

#include "graph/op.h"
#include "kernels/attention.h"

/* Rows of a table of fields. */
#define LM_BLOCK_FIELDS(t, member)                                                           \
    { LM_ATTR_RARE_INT(t, member.size, 0, 0) }, { LM_ATTR_RARE_INT(t, member.local, 0, 0) }, \
        { LM_ATTR_RARE_INT(t, member.global, 0, 0) },                                        \
        { LM_ATTR_RARE_INT(t, member.stride, 0, 0) },                                        \
    {                                                                                        \
        LM_ATTR_RARE_FLAG(t, member.homogeneous)                                             \
    }

#define LM_ORIGIN_FIELDS(t, member)                                                              \
    { LM_ATTR_RARE_INT(t, member.seq, 0, 0) }, { LM_ATTR_RARE_INT(t, member.heads, 0, 0) },      \
        { LM_ATTR_RARE_INT(t, member.batch, 0, 0) }, { LM_ATTR_RARE_INT(t, member.head, 0, 0) }, \
        { LM_ATTR_RARE_INT(t, member.query, 0, 0) },                                             \
    {                                                                                            \
        LM_ATTR_RARE_INT(t, member.key, 0, 0)                                                    \
    }

/* Blocks are possible, and go with the other attributes. */
lm_code lm_attention_check_blocks(const char *op, const lm_attention_attr *a, lm_err *e);
/* Fails with blocks, which the operator does not know. */
lm_code lm_attention_check_no_blocks(const char *op, const lm_attention_attr *a, lm_err *e);
/* Pairs of a query and a key of a text of `seq` tokens that a head sees, the mean of all heads; b has blocks. */
double lm_attention_block_pairs(const lm_attention_blocks *b, int64_t heads, int64_t seq);
/* Of them, those of the last token: the keys that a step reads; seq: at least 1. */
double lm_attention_block_keys(const lm_attention_blocks *b, int64_t heads, int64_t seq);

#endif
