/* SPDX-License-Identifier: Apache-2.0 */
/* conv.h -- short causal convolutions along the rows of a sequence, each channel by itself, with SiLU: what mixes
 * neighbouring tokens in front of a layer that has a state (kernels/delta.h).
 *
 * conv     in  x [B*T,X] act, w [Y,W] F32, lo [B*T] I32 (optional, 0: start of the row's document)
 *          out y [B*T,Y] act = silu(sum over j < W of w[c,j] x[t - W + 1 + j, column of c]), without rows before
 *              the document's first,
 *              z [B*T,H*E] act (optional): numbers of x that pass by (attr.packed only)
 *          Columns: c itself (X = Y).  attr.packed (Qwen3-Next's in_proj_qkvz): x holds, for each of K key heads,
 *          D numbers of q, D of k, then H/K heads of E numbers of v and as many of z; y holds all q, all k, all
 *          v (Y = 2KD + HE, X = Y + HE), z the heads' z.
 * conv_dx  in  dy [B*T,Y] act, x, w, lo (optional), dz [B*T,H*E] act (optional)
 *          out dx [B*T,X] act; zeros in place of an absent dz
 * conv_dw  in  dy, x, w, lo (optional)
 *          out dw [Y,W] F32 (acc)
 *
 * conv_cached  (prefill and decoding; no gradient)
 *          in  x [N,X] act, w, used [B] I32, fresh [B] I32, first [B+1] I32 and kind [B] I32 (both or neither), slot
 *              [B] I32 (optional: b), as delta_cached has them (kernels/delta.h); W is at least 2
 *          out y [N,Y] act, tail [S,W-1,Y] act (in place): the newest W - 1 rows of x of sequence b, in the order of
 *              y's columns, are tail[slot[b]]; z [N,H*E] act (optional)
 *              In any number of calls it equals conv.  Other rows of y are zeros.
 *
 * Tolerance: relative L2 1e-6 (F32), 4e-3 (BF16); of dw 1e-5, 1e-2. */
#ifndef LM_KERNELS_CONV_H
#define LM_KERNELS_CONV_H

#include "kernels/kernel.h"

enum { LM_CONV_MOST = 8 /* of W */ };

typedef struct {
    int64_t batch, seq, columns, channels, taps; /* X, Y, W */
    bool packed;
    int64_t heads, key_heads, key_dim, value_dim; /* of packed columns: H, K, D, E */
    lm_acc acc;                                   /* conv_dw only */
} lm_conv_attr;

/* A run of channels whose columns lie side by side: `n` from `channel` on, or with channel < 0 of z from `z` on. */
typedef struct {
    int64_t column, channel, z, n;
} lm_conv_run;

/* Number of runs, and run i of a call: of packed columns q, k, v and z of each key head. */
static inline int64_t lm_conv_runs(const lm_conv_attr *a)
{
    return a->packed ? 4 * a->key_heads : 1;
}

static inline lm_conv_run lm_conv_run_at(const lm_conv_attr *a, int64_t i)
{
    if (!a->packed)
        return (lm_conv_run){ 0, 0, 0, a->channels };
    int64_t head = i / 4, keys = a->key_heads * a->key_dim;
    int64_t wide = a->heads / a->key_heads * a->value_dim, at = head * 2 * (a->key_dim + wide);
    switch (i % 4) {
    case 0:
        return (lm_conv_run){ at, head * a->key_dim, 0, a->key_dim };
    case 1:
        return (lm_conv_run){ at + a->key_dim, keys + head * a->key_dim, 0, a->key_dim };
    case 2:
        return (lm_conv_run){ at + 2 * a->key_dim, 2 * keys + head * wide, 0, wide };
    default:
        return (lm_conv_run){ at + 2 * a->key_dim + wide, -1, head * wide, wide };
    }
}

#endif
