/* SPDX-License-Identifier: Apache-2.0 */
/* state_rows.h -- what operators with states of sequences have in common (delta_cached, conv_cached): five inputs in a
 * row, used, fresh, first, kind and slot, as kernels/delta.h describes them.  Private to lib/op. */
#ifndef LM_OP_STATE_ROWS_H
#define LM_OP_STATE_ROWS_H

#include "graph/op.h"

/* Checks of a call: the five begin at input `at`, input 0 has the rows, seq 0: they are ragged. */
lm_code lm_state_rows_shape(const lm_call *c, const char *op, int at, int64_t seq,
                            const lm_tensor *state, lm_err *e);
/* For examples: choose whether rows are ragged (then *seq becomes 0) and whether there are slots, of which there is then one
 * more than sequences, and shape the five.  Returns the number of rows. */
int64_t lm_state_rows_example(lm_rng r, int i, int64_t batch, int64_t *seq, lm_tensor *in);
void lm_state_rows_fill(lm_rng r, const lm_tensor *in, int64_t rows, int64_t batch, int64_t seq);

#endif
