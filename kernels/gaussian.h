/* SPDX-License-Identifier: Apache-2.0 */
/* gaussian.h -- attention with a Gaussian kernel: the weight of key j for query i is
 * P_ij = exp(-|q_i - k_j|^2 / (2 sqrt D)), D being the numbers of a head.
 *
 * Source: Skyformer (arXiv:2111.00035), which has this kernel in place of softmax's exp(q.k / sqrt D) and does not divide the
 * weights of a row by their sum; its authors' program (github.com/pkuzengqi/Skyformer, attention_skyformer.py) scales q and k
 * by D^(-1/4) and takes exp(q.k - |q|^2/2 - |k|^2/2), which is the same.  That gradient descent trains a layer with a
 * Gaussian kernel where it may end in a local solution with softmax is arXiv:2411.07538.  Rows can be divided by their sums,
 * too: then |q|^2 cancels, and what is left is softmax with a bias of each key, -|k|^2 / (2 sqrt D).
 *
 * Since -|q - k|^2 / 2 = q.k - |q|^2/2 - |k|^2/2, the scores are products of longer rows.  gaussian_rows makes these, and
 * the operators of attention.h do the rest, with head_dim D + LM_GAUSSIAN_MORE, value_dim D and scale 1/sqrt D: with
 * `undivided`, O = P V of rows made with `queries`; without, the divided form.  So masks, documents, windows, groups of
 * heads, dropout and caches are those of attention, and no score is above 0 by more than rounding.
 *
 * gaussian_rows     in  qkv [N,(H+2K)D] act
 *                   out y [N,(H+K)(D+8)+KD] act
 *     Behind the D numbers of a head come 8 columns:
 *         queries  16, 1, 1, then a, b, c of the query with attr.queries, otherwise zeros; two zeros
 *         keys     a, b, c of the key, then 16, 1, 1 with attr.queries, otherwise zeros; two zeros
 *     where a = round(-n/16), b = round(-n - 16 a), c = round(-n - 16 a - b), n = |x|^2 / 2 of the head x as stored, sums in
 *     F32 (reference: in double), and round is to act: 16 a + b + c is -n to the digits of F32 also in BF16, and a is finite
 *     in F16 up to |x| = 1448.  Where a is not finite, b = c = 0.  Values are copied.
 * gaussian_rows_dx  in  dy [N,(H+K)(D+8)+KD] act, y as above
 *                   out dqkv [N,(H+2K)D] act: of a head x the first D numbers of dy, less x times the gradient of its a
 *                       divided by 16, where it has one; of values those of dy
 *     The gradients of b and c are not read: with dy of attention they say what that of a says.
 *
 * Tolerance: relative L2 2e-6 (F32), 4e-3 (BF16). */
#ifndef LM_KERNELS_GAUSSIAN_H
#define LM_KERNELS_GAUSSIAN_H

#include "kernels/device.h"
#include "kernels/kernel.h"

enum { LM_GAUSSIAN_MORE = 8 /* columns */, LM_GAUSSIAN_UNIT = 16 /* the factor of a */ };

typedef struct {
    int64_t heads, kv_heads, head_dim;
    bool queries; /* norms of queries, too */
} lm_gaussian_attr;

/* Numbers of a row of y. */
static inline int64_t lm_gaussian_row(const lm_gaussian_attr *a)
{
    return (a->heads + a->kv_heads) * (a->head_dim + LM_GAUSSIAN_MORE) + a->kv_heads * a->head_dim;
}

/* The first of the columns of a query's or a key's own norm, and of those that the norms of the other side meet; -1: they
 * are zeros. */
LM_DEVICE_TOO static inline int lm_gaussian_own(const lm_gaussian_attr *a, bool key)
{
    return key ? 0 : a->queries ? 3 : -1;
}
LM_DEVICE_TOO static inline int lm_gaussian_units(const lm_gaussian_attr *a, bool key)
{
    return !key ? 0 : a->queries ? 3 : -1;
}

#endif
