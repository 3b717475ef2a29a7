/* SPDX-License-Identifier: Apache-2.0 */
/* gates.h -- the gates of layers that mix tokens (the published Qwen3-Next code): of softmax attention, whose queries stand
 * beside gates of its results, and of the delta rule (kernels/delta.h).
 *
 * gate_split      in  x [N,(2H+2K)D] act: for each of H heads D numbers of its query and D of its gate, then K keys
 *                     and K values
 *                 out qkv [N,(H+2K)D] act, gate [N,HD] act: the same numbers.  Its gradient is gate_join
 * gate_join       in  qkv, gate                    out x
 *
 * delta_gates     in  ba [N,2H] act: for each of K key heads H/K numbers b, then H/K numbers a, of its value heads;
 *                     a_log [H] F32, dt [H] F32
 *                 out g [N,H] F32 = -exp(a_log) softplus(a + dt), beta [N,H] F32 = sigmoid(b)
 * delta_gates_dx  in  dg [N,H] F32, dbeta [N,H] F32 (each optional: 0), ba, a_log, dt
 *                 out dba [N,2H] act
 * delta_gates_dw  in  dg, ba, a_log, dt
 *                 out da_log [H] F32 (acc), ddt [H] F32 (acc); each may be left out
 *
 * Moves are exact.  Tolerance: relative L2 1e-6 (F32), 4e-3 (BF16); of the weights' gradients 1e-5, 1e-2. */
#ifndef LM_KERNELS_GATES_H
#define LM_KERNELS_GATES_H

#include "kernels/kernel.h"

typedef struct {
    int64_t heads, kv_heads, head_dim; /* H, K, D */
} lm_gate_split_attr;

typedef struct {
    int64_t heads, key_heads; /* H, K */
    lm_acc acc;               /* delta_gates_dw only */
} lm_delta_gates_attr;

/* Where b of head h stands in a row of ba; a stands H/K behind it. */
static inline int64_t lm_delta_gates_at(const lm_delta_gates_attr *a, int64_t h)
{
    int64_t group = a->heads / a->key_heads;
    return h / group * 2 * group + h % group;
}

#endif
