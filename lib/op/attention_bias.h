/* SPDX-License-Identifier: Apache-2.0 */
/* attention_bias.h -- biases by distance (kernels/attention.h) of the operators that have scores.  Private to lib/op. */
#ifndef LM_OP_ATTENTION_BIAS_H
#define LM_OP_ATTENTION_BIAS_H

#include "kernels/attention.h"
#include "op/example.h"

/* Distance 0 has one of the columns of `bias`, which may be absent. */
lm_code lm_attention_check_bias(const char *op, const lm_attention_attr *a, const lm_tensor *bias,
                                lm_err *e);
/* Of one example in three a bias, whose columns are fewer than `distances`, or more. */
void lm_attention_example_bias(lm_rng r, int i, int64_t distances, lm_attention_attr *a,
                               lm_tensor *bias);

#endif
