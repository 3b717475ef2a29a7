/* SPDX-License-Identifier: Apache-2.0 */
/* norms.h -- what the two norms of queries and keys (norm.c: of each head; qk_norm.c: of all heads at
 * once) have in common.  Private to lib/op. */
#ifndef LM_OP_NORMS_H
#define LM_OP_NORMS_H

#include "graph/passes.h"

/* The gradient rule of a node (qkv, wq, wk -> y, statistics) with the backward operators dw and dx, whose
 * attributes are *attr; `acc` is that member of them which says how dw adds up.  dw is appended before dx,
 * and only where a weight trains. */
lm_code lm_qk_norms_grad(lm_grad *s, const lm_node *n, const lm_op *dw, const lm_op *dx, void *attr,
                         lm_acc *acc, lm_err *e);

#endif
