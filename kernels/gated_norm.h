/* SPDX-License-Identifier: Apache-2.0 */
/* gated_norm.h -- RMSNorm of each head of a row, times SiLU of a gate (the published Qwen3-Next code): what follows the
 * delta rule (kernels/delta.h).
 *
 * gated_norm     in  x [N,H*E] act, z [N,H*E] act, w [E] F32
 *                out y [N,H*E] act = w xh silu(z), xh = round_act(x rstd),
 *                    stat [N,H] F32: rstd = 1/sqrt(mean of squares of the head + eps)
 * gated_norm_dx  in  dy [N,H*E] act, x, z, w, stat
 *                out dx [N,H*E] act, dz [N,H*E] act; each may be left out
 * gated_norm_dw  in  dy, x, z, stat
 *                out dw [E] F32 (acc)
 *
 * Tolerance: relative L2 1e-6 (F32), 8e-3 (BF16). */
#ifndef LM_KERNELS_GATED_NORM_H
#define LM_KERNELS_GATED_NORM_H

#include "kernels/kernel.h"

typedef struct {
    int64_t heads, head_dim;
    double eps;
    lm_acc acc; /* gated_norm_dw only */
} lm_gated_norm_attr;

#endif
