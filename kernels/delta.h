/* SPDX-License-Identifier: Apache-2.0 */
/* delta.h -- the gated delta rule (Gated DeltaNet, arXiv:2412.06464): attention without softmax through a
 * state of fixed size, which decays and of which each token corrects what it recalls at its key.
 *
 * qkv rows hold K query heads, then K key heads, each of D numbers, then H value heads of E numbers; value
 * head h uses query and key head h / (H/K).  Each query and key is first divided by its length,
 * sqrt(sum of squares + eps).  For a value head, with S [D,E] zero before the first row of a document:
 *     S <- exp(g_t) S,  S <- S + beta_t k_t (v_t - S^T k_t)^T,  o_t = scale S^T q_t     (equation 10)
 *
 * delta         in  qkv [B*T,2KD+HE] act, g [B*T,H] F32 (at most 0: the logarithm of the decay),
 *                   beta [B*T,H] F32, lo [B*T] I32 (optional, 0: start of the row's document)
 *               out o [B*T,HE] act, states [B*M,H,D,E] F32 (optional): S behind row m C - 1, the last one before chunk m;
 *                   chunks have C = LM_DELTA_CHUNK rows, M = ceil(T / C), and chunk 0 begins with zeros
 * delta_dx      in  do [B*T,HE] act, qkv, g, beta, states, lo (optional)
 *               out dqkv act, dg [B*T,H] F32, dbeta [B*T,H] F32
 * delta_cached  (prefill and decoding; no gradient)
 *               in  qkv [N,2KD+HE] act, g [N,H] F32, beta [N,H] F32, used [B] I32 (rows before these), fresh [B] I32,
 *                   first [B+1] I32 and kind [B] I32 (both or neither), slot [B] I32 (optional: b)
 *               out o [N,HE] act, state [S,H,D,E] F32 (in place): that of sequence b is state[slot[b]]
 *               With `kv` (numeric/kv_format.h) states are codes, those of a value head in a page of D tokens of E numbers:
 *               S is decoded before the rows, and encoded behind them.  The format codes single tokens, in the order of
 *               keys, without outliers; E is a multiple of 16.
 *               rows, fresh, first and kind are those of attention_cached (kernels/attention.h).  S begins with
 *               zeros where used[b] is 0, otherwise with the state, and leaves as the state; so in any number of
 *               calls it equals delta, up to rounding.  A new token is one step of the recurrence, rows of a prompt
 *               are chunks from their first one on: kernels but the reference give the same bits wherever a prompt is
 *               cut at multiples of LM_DELTA_CHUNK.  Sequences with rows have slots of their own.  Other rows of o
 *               are zeros.
 *
 * g = -inf forgets all; g is not positive, and NaN gives NaN.  eps is positive.
 *
 * The kernels work by chunks: within one, with G_ij = exp(g_{j+1} + .. + g_i) where i >= j are of one document,
 * otherwise 0, and L_ij = beta_i G_ij <k_i,k_j> below the diagonal, the corrections are V' = (I + L)^-1 (beta (V -
 * e K S)), where e_i is the decay from the chunk's beginning, 0 for rows of later documents; o = scale (e Q S +
 * (Q K^T G) V') and S leaves as e_C S + (d K)^T V', d_j the decay from row j to the last (section 3.3 and the
 * UT transform of arXiv:2406.06484).
 * Results do not depend on the number of threads.  Tolerance: relative L2 1e-5 (F32), 1e-2 (BF16). */
#ifndef LM_KERNELS_DELTA_H
#define LM_KERNELS_DELTA_H

#include "kernels/kernel.h"

enum { LM_DELTA_CHUNK = 64 };

typedef struct {
    int64_t batch, seq, chunks;                   /* chunks of a sequence */
    int64_t heads, key_heads, key_dim, value_dim; /* H, K, D, E */
    double scale, eps;
} lm_delta_attr;

static inline int64_t lm_delta_chunks(int64_t seq)
{
    return (seq + LM_DELTA_CHUNK - 1) / LM_DELTA_CHUNK;
}

#endif
