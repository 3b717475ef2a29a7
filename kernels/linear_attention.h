/* SPDX-License-Identifier: Apache-2.0 */
/* linear_attention.h -- linear attention: causal attention without softmax, by a state of fixed size (arXiv:2006.16236,
 * equations 16 to 20; with a decay, arXiv:2307.08621, section 2.1).
 *
 * qkv rows hold H query heads, K key heads and K value heads, each of D numbers; query head h reads key and value head
 * h / (H/K).  For each of these, with S [D,D] and z [D] zeros before the first row of a document, and phi by element:
 *     S <- a S + phi(k_t) v_t^T,  z <- a z + phi(k_t)
 *     o_t = scale phi(q_t)^T S / (phi(q_t)^T z + eps)      LM_FEATURE_ELU: phi(x) = x + 1 where x > 0, otherwise exp(x)
 *     o_t = scale phi(q_t)^T S                             LM_FEATURE_IDENTITY: phi(x) = x; there is no z
 * a = 1, with `decay` a = 1 - 2^(-5-j) of key head j.
 *
 * linear_attention         in  qkv [B*T,(H+2K)D] act, lo [B*T] I32 (optional, 0: start of the row's document)
 *                          out o [B*T,HD] act
 * linear_attention_dx      in  do [B*T,HD] act, qkv, o (if and only if with LM_FEATURE_ELU), lo (optional)
 *                          out dqkv act
 * linear_attention_cached  (prefill and decoding; no gradient)
 *                          in  qkv [N,(H+2K)D] act, used [B] I32 (rows before these), fresh [B] I32,
 *                              first [B+1] I32 and kind [B] I32 (both or neither), slot [B] I32 (optional: b)
 *                          out o [N,HD] act, state [S,K,R,D] F32 (in place): S, then z where there is one (R: D + 1 or D);
 *                              that of sequence b is state[slot[b]]
 *                          all else is as with delta_cached (kernels/delta.h): what the state is on entry, tokens and
 *                          prompts, slots, the bits of a prompt that is cut at multiples of LM_LINEAR_CHUNK rows, and
 *                          rows without a sequence
 *
 * eps is positive.
 *
 * The kernels work by chunks of C rows.  Within one, with W_ij = a^(i-j) where i >= j are of one document, otherwise 0, M =
 * (Q K^T) W by element, e_i = a^(i+1) the decay from the chunk's beginning, 0 for rows of later documents, and d_j =
 * a^(n-1-j) that to its last row, 0 for rows of earlier ones:
 *     O = e Q S + M V,  the denominator e Q z + M 1,  S leaves as e_last S + (d K)^T V, and z as e_last z + (d K)^T 1
 * The backward keeps no states: it computes those before each chunk again.
 * With dot products of pairs or tiles, what enters the products of a chunk is rounded to BF16 where act is that and a head has
 * 16 numbers or more: features, M, A and N, and a copy of S.  S itself and all sums stay in F32, as does the denominator.
 * Results do not depend on the number of threads.  Tolerance: relative L2 1e-5 (F32), 1e-2 (BF16). */
#ifndef LM_KERNELS_LINEAR_ATTENTION_H
#define LM_KERNELS_LINEAR_ATTENTION_H

#include <math.h>

#include "kernels/device.h"
#include "kernels/kernel.h"

enum { LM_LINEAR_CHUNK = 64 };

typedef enum { LM_FEATURE_ELU, LM_FEATURE_IDENTITY } lm_feature;

typedef struct {
    int64_t batch, seq;
    int64_t heads, kv_heads, head_dim; /* H, K, D */
    int64_t state_rows;                /* R: lm_linear_state_rows */
    lm_feature feature;
    bool decay;
    double scale, eps;
} lm_linear_attention_attr;

LM_DEVICE_TOO static inline int64_t lm_linear_chunks(int64_t seq)
{
    return (seq + LM_LINEAR_CHUNK - 1) / LM_LINEAR_CHUNK;
}

static inline int64_t lm_linear_state_rows(lm_feature f, int64_t head_dim)
{
    return head_dim + (f == LM_FEATURE_ELU);
}

/* The logarithm of a of key head `head`. */
LM_DEVICE_TOO static inline double lm_linear_log_decay(bool decay, int64_t head)
{
    return decay ? log1p(-exp2(-5.0 - (double)head)) : 0;
}

#endif
