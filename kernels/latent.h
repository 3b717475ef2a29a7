/* SPDX-License-Identifier: Apache-2.0 */
/* latent.h -- multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): the rows
 * that attention reads, made from the products of its projections.
 *
 * H heads.  A query is A numbers of content and R that are rotated; a key likewise, with one
 * rotated part for all heads; a value is E numbers.  A token has a latent c of L numbers; for each
 * head the A + E rows of w [H(A+E),L] make from it the content of a key, then a value.
 *
 * latent_rows     in  q [N,H(A+R)] act, kv [N,H(A+E)] act = c w', k [N,R] act, pos [N] I32,
 *                     table [P,R] F32
 *                 out y [N,2H(A+R)+HE] act: queries, keys and values of H heads, as attention
 *                     reads them (attention.h, head_dim A + R, value_dim E)
 * latent_rows_dx  in  dy [N,2H(A+R)+HE] act, pos, table
 *                 out dq, dkv, dk (each optional), as q, kv and k.  dk: sums over heads, in order
 *                     and in F32
 *     The expanded form, for training and whole texts.
 * latent_queries  in  q [N,H(A+R)] act, c [N,L] act, k [N,R] act, w [H(A+E),L], pos [N] I32,
 *                     table [P,R] F32
 *                 out y [N,(H+1)(L+R)] act: for each head the content of its query times those A
 *                     rows of w, and the rotated part; then c and the rotated key, which are the
 *                     key of all heads and what caches keep
 * latent_values   in  z [N,HL] act, w [H(A+E),L]
 *                 out o [N,HE] act: the E rows of w times each head's sum of latents
 *     The absorbed form, for caches: q' (W c) = (W' q)' c, and the sum over tokens of p (W c) is W
 *     times that of p c.  No gradient.  Sums in F32 (reference: in double).
 *
 * Rotation: that of kernels/rope.h, of R numbers.  attr.pairs: pairs are (x[2j], x[2j+1]), as in
 * the published files, otherwise (x[j], x[j+R/2]).  Results stay at their places.  pos is in [0,P).
 * Tolerance: relative L2 2e-6 (F32), 4e-3 (BF16). */
#ifndef LM_KERNELS_LATENT_H
#define LM_KERNELS_LATENT_H

#include "kernels/kernel.h"

enum { LM_LATENT_MOST_ROTARY = 512 };

typedef struct {
    int64_t heads, content_dim, rotary_dim, value_dim;
    int64_t latent_dim; /* of the absorbed form */
    bool pairs;
} lm_latent_attr;

#endif
