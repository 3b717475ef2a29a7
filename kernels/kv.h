/* SPDX-License-Identifier: Apache-2.0 */
/* kv.h -- attention over coded caches.
 *
 * The rows of N new tokens come from B sequences: rows first[b] .. first[b+1] of qkv are those of sequence b (first[0] = 0,
 * first[B] <= N; the rest is padding, and gives zeros).  Sequence b has used[b] tokens in the cache; its row i has the
 * position used[b] + i.  Token j of it lies in page table[b, j / T], at place j % T there.  keys and values are coded
 * caches [pages,K,T,D] (numeric/kv_format.h): their numbers are those that lm_kv_decode gives.
 * The newest residual tokens of the cached ones, counted in the way of kv_write, and the first `sinks` are not coded: their rows
 * lie in ktail and vtail [slots,K,sinks+R,D] at slot[b]: token j < sinks at row j, another at row sinks + j % R.
 *
 * kv_attention  (no gradient)
 *               in  qkv [N,(H+2K)D] act, first [B+1] I32, used [B] I32, kind [B] I32, table [B,P] I32,
 *                   keys, values [pages,K,T,D] act with `kv`, slot [B] I32, ktail, vtail [slots,K,R',D] act
 *                   (slot, ktail, vtail: all or none)
 *               out o [N,HD] act, lse [N,H] F32 (optional)
 *               Each new row attends to the cached tokens as they are stored, and to the new rows of its
 *               sequence up to itself as they are in qkv (kernels/attention.h: heads, scale, window, soft_cap).
 *               It is run before kv_write has put the new rows into the cache.  kind[b] 0: the rows are
 *               a part of a prompt, 1: they are newly generated tokens; both give the same numbers within tolerance, and
 *               kernels choose their way by it, so that bits do not depend on the number of rows of a sequence.
 *
 * Where act is F32, keys and values are expanded tile by tile and multiplied in F32.  Under BF16 and F16 formats of
 * LM_KV_SYM and LM_KV_ASYM may be multiplied as integers: of a query (times the scale of each channel, where channels have
 * scales) the numbers of a group of channels become whole numbers to 16,256 of their largest magnitude, in two
 * planes of 8 bits, q = 128 hi + lo; their products with the codes are added exactly in 32 bits.  Probabilities times the
 * scales of tokens are treated alike in blocks of 256 keys.
 * Tolerance: relative L2 2e-6 (F32), 1e-2 (BF16). */
#ifndef LM_KERNELS_KV_H
#define LM_KERNELS_KV_H

#include "kernels/attention.h"

typedef struct {
    lm_attention_attr attention; /* batch B; seq is not read: rows are ragged */
    int64_t residual;            /* R: newest tokens that are not coded; 0: none */
    int64_t sinks;               /* first tokens that are not coded */
} lm_kv_attr;

#endif
