/* SPDX-License-Identifier: Apache-2.0 */
/* norm.h -- RMSNorm and LayerNorm over the last dimension, fused with the residual addition before
 * them, and the per-head norm of queries and keys (Qwen3).
 *
 * norm      in  x [N,C] act, w [C] F32, b [C] F32 (optional, LayerNorm), r [N,C] act (optional)
 *           out y [N,C] act, stat [N,2] F32 (mean, reciprocal deviation),
 *               s [N,C] act (present iff r is)
 *           s = x + r (rounded to act), may alias x or r; without r, s is x.
 *           LayerNorm: xh = (s-mean)*rstd, y = w xh + b (arXiv:1607.06450 eq. 3).
 *           RMSNorm: xh = round_act(s*rstd), y = w xh (arXiv:1910.07467 eq. 4; the rounding is
 *           that of the published Llama code); mean = 0.  eps is added inside the root.
 *           RMSNorm with plus_one: y = (1 + w) s*rstd, rounded once (the published Gemma code): w is
 *           the distance from 1, on which weight decay acts.
 * norm_dx   in  dy [N,C] act, s [N,C] act, w [C] F32, stat [N,2] F32, dres [N,C] act (optional)
 *           out ds [N,C] act: gradient of s, plus dres when given; may alias dy or dres
 * norm_dw   in  dy [N,C] act, s [N,C] act, stat [N,2] F32
 *           out dw [C] F32 (acc), db [C] F32 (optional, acc)
 * norm_dx_dw  both at once, which reads dy and s once (a joined form: lib/op/fuse.h)
 *           in  as norm_dx
 *           out ds (may alias dy or dres), dw, db (optional)
 *
 * head_norm     in  qkv [N,(H+2K)D] act, wq [D] F32, wk [D] F32
 *               out y [N,(H+2K)D] act (values copied), stat [N,H+K] F32 (reciprocal deviations);
 *               y may alias qkv only when no gradient is wanted
 * head_norm_dx  in  dy, qkv, wq, wk, stat
 *               out dqkv (value part copied); may alias dy
 *               plus_one as in norm
 * head_norm_dw  in  dy, qkv, stat
 *               out dwq [D] F32 (acc), dwk [D] F32 (acc)
 *
 * qk_norm       the norm of all queries of a row at once, and of all its keys (OLMo 2)
 *               in  qkv [N,(H+2K)D] act, wq [HD] F32, wk [KD] F32
 *               out y [N,(H+2K)D] act (values copied), stat [N,2] F32 (reciprocal deviations);
 *               y = w s*rstd, rounded once (the published code)
 * qk_norm_dx    in  dy, qkv, wq, wk, stat
 *               out dqkv (value part copied); may alias dy
 * qk_norm_dw    in  dy, qkv, stat
 *               out dwq [HD] F32 (acc), dwk [KD] F32 (acc)
 *
 * Tolerance: relative L2 1e-6 (F32), 8e-3 (BF16). */
#ifndef LM_KERNELS_NORM_H
#define LM_KERNELS_NORM_H

#include "kernels/kernel.h"

/* RMS_ONCE: RMSNorm whose product with the weights is rounded once, as with plus_one (the published OLMo 2 code). */
typedef enum { LM_NORM_RMS = 0, LM_NORM_LAYER = 1, LM_NORM_RMS_ONCE = 2 } lm_norm_kind;

typedef struct {
    lm_norm_kind kind;
    double eps;
    lm_acc acc;    /* norm_dw and norm_dx_dw only */
    bool plus_one; /* RMS only: weights are 1 + w */
} lm_norm_attr;

typedef struct {
    int64_t heads, kv_heads, head_dim;
    double eps;
    lm_acc acc;    /* head_norm_dw only */
    bool plus_one; /* weights are 1 + w */
} lm_head_norm_attr;

typedef struct {
    int64_t heads, kv_heads, head_dim;
    double eps;
    lm_acc acc; /* qk_norm_dw only */
} lm_qk_norm_attr;

#endif
