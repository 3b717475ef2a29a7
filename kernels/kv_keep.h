/* SPDX-License-Identifier: Apache-2.0 */
/* kv_keep.h -- caches that keep only some tokens: how much queries read each token, and rows of the tokens that stay.
 *
 * kv_mass       (no gradient)
 *               in  qkv [N,(H+2K)D] act, lse [N,H] F32, used [B] I32, fresh [B] I32, from [B] I32, first [B+1] I32
 *                   (optional), table [B,P] I32 (optional), keys [G,K,S,D] act, plain or with `kv`, slot [B] I32,
 *                   ktail [L,K,R,D] act (optional, R = sinks + residual)
 *               out mass [L,K,M] F32, in place
 *               With `latent` rows are those of latents (kernels/kv.h), [N,(H+1)D], and keys whole ones: K = 1, D numbers.
 *               Adds to mass[slot[b], k, j] the probabilities that the new rows of sequence b give to token j, summed
 *               over the rows at positions from[b] and above, and over the query heads of key head k: exp(s - lse), s
 *               the score of kernels/attention.h (scale, soft_cap, window), lse that of attention_cached or of
 *               kv_attention for the same rows.  Tokens below used[b] are in the cache, as these two operators
 *               read it (kernels/attention.h without coded pages, otherwise kernels/kv.h); the new rows are tokens
 *               used[b] and up, and are read from qkv.  used[b] + fresh[b] is at most M.
 * kv_gather     (no gradient)
 *               in  keys, values [B,K,S,D] act, at [B,K,M] I32, count [B] I32, run [B,K,M] I32 and weight [B,K,S] F32
 *                   (both or neither)
 *               out y [BM,(H+2K)D] act
 *               Row b M + i of y has, for key/value head k, the key and the value at row at[b,k,i] of the cache; with
 *               runs the sums of the run[b,k,i] rows from there on, each times its weight.  Rows from count[b] on, and the
 *               query heads, are zeros.
 * Tolerance: relative L2 2e-6 (F32), 1e-2 (BF16); kv_gather without runs the same bits, with runs 1e-6, 4e-3. */
#ifndef LM_KERNELS_KV_KEEP_H
#define LM_KERNELS_KV_KEEP_H

#include "kernels/kv.h"

typedef struct {
    lm_attention_attr attention; /* batch B; causal; no dropout, no bias; seq 0 with `first` */
    int64_t residual, sinks;     /* of the keys, as lm_kv_attr */
    bool latent;                 /* as lm_kv_attr, without value_dim */
} lm_kv_mass_attr;

/* Heads of a row of qkv. */
static inline int64_t lm_kv_mass_row(const lm_kv_mass_attr *a)
{
    return a->attention.heads + (a->latent ? 1 : 2 * a->attention.kv_heads);
}

typedef struct {
    int64_t batch, rows, heads, kv_heads, head_dim; /* B, M, H, K, D */
} lm_kv_gather_attr;

#endif
