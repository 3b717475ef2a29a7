/* SPDX-License-Identifier: Apache-2.0 */
/* append.h -- nodes that gradient rules append: the same in several families.  Private to lib/op. */
#ifndef LM_OP_APPEND_H
#define LM_OP_APPEND_H

#include "graph/passes.h"
#include "kernels/map.h"

/* One node with one new result; *out may be one of the inputs. */
lm_code lm_append_node(lm_graph *g, const lm_op *op, const void *attr, const lm_vid *in,
                       lm_vid *out, lm_err *e);
/* The numbers of v in the shape of `shape` and of its type; v itself where it is so already. */
lm_code lm_append_as(lm_graph *g, lm_vid v, const lm_tensor *shape, lm_vid *out, lm_err *e);
/* v [B,..] summed over its first dimension, in the shape of `shape` and of its type. */
lm_code lm_append_batch_sum(lm_graph *g, lm_vid v, const lm_tensor *shape, lm_vid *out, lm_err *e);

/* For shard rules: the bit of a letter; and operand i, ids of rows of a table that is split, becomes those of this rank's part
 * (part_ids of kernels/comm.h).  *real (may be NULL): 1 where an id is not negative, else 0. */
#define LM_LETTER(letter) (1U << ((letter) - 'A'))
lm_code lm_shard_ids(lm_shard_call *s, int i, lm_vid *real, lm_err *e);

/* Gradient rules of map.c: in map_gradient.c. */
lm_code lm_map_grad(struct lm_grad *s, const lm_node *n, lm_err *e);
lm_code lm_reduce_grad(struct lm_grad *s, const lm_node *n, lm_err *e);

#endif
