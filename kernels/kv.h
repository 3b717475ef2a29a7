/* SPDX-License-Identifier: Apache-2.0 */
/* kv.h -- attention over coded caches, and what is put into them.
 *
 * Sequences and rows are those of attention_cached (kernels/attention.h): sequence b has used[b] tokens in the cache
 * and fresh[b] new rows in qkv, from row first[b] on (without `first`: from row b * seq on); its new row i is at
 * position used[b] + i.  kind[b] (lm_rows_kind) says whether the rows are a part of a prompt or a new token; without it
 * they are new tokens if seq is at most 4.  Kernels choose their way by it, not by the number of rows.
 *
 * keys and values are caches of pages of T tokens: cached token j of sequence b lies in page table[b, j / T], at
 * place j % T there.  Each of the two sides is coded (numeric/kv_format.h), its numbers being those that lm_kv_decode
 * gives, or plain: without `kv`, pages [G,K,T,D] of act numbers.  Entries of the table for tokens that neither side has
 * in pages are not read.
 * Some cached tokens of a coded side are not coded: the first `sinks`, and the newest, which are counted by lm_kv_coded.
 * Their rows lie in the tail of the side (ktail, vtail) at slot[b]: token j at row j if j < sinks, else at
 * row sinks + j % residual.  residual and sinks are those of the side; a side with neither has no tail.
 *
 * With a rope table (kernels/rope.h) the keys of the cache, in pages and tails, are stored without rotary embedding:
 * kv_attention rotates cached key j of sequence b, decoded, by the table's row place[b,j], or row j without `place`.
 * New rows have their rotated queries and keys in the qkv of kv_attention; kv_write takes the qkv from before the
 * rotation.  So positions can change while tokens stay: `place` may be the rank of a token among those that are kept.
 *
 * Latents (attr.latent, K = 1): the row of a token, [D] behind the H queries in qkv [N,(H+1)D], is the key of all heads, and
 * its first E = value_dim numbers are the value, too.  `keys` are then pages [G,1,T,E] of these, `values` pages [G,1,T,D-E]
 * of the others, both in the order of keys, with tails accordingly; o is [N,HE].  E is a multiple of 4.  There is no rope
 * table, and no token_range.
 *
 * With attention.reads no row is new to the cache: rows of qkv hold queries alone, [N,HD], and the first fresh[b] rows of
 * sequence b see all of its used[b] tokens, as of attention_cached.  There is no causal order, window, bias or rope table, and
 * no latent.
 *
 * kv_attention  (no gradient)
 *               in  qkv [N,(H+2K)D] act, used [B] I32, fresh [B] I32, first [B+1] I32, kind [B] I32 (optional, both
 *                   or neither), table [B,P] I32, keys, values [pages,K,T,D] act, slot [B] I32 (if a side has a
 *                   tail), ktail, vtail [slots,K,sinks+residual,D] act (each if its side has a tail),
 *                   rope [X,R] F32 (optional), place [B,M] I32 (optional, with rope; entries below used[b] are read),
 *                   sinks [H] F32 (optional; logits as of kernels/attention.h, not the first tokens),
 *                   bias [H,Z] F32 (optional, as of kernels/attention.h; the distance of tokens is that of their numbers)
 *               out o [N,HD] act, lse [N,H] F32 (optional)
 *               Each new row attends to the cached tokens as they are stored, and to the new rows of its
 *               sequence up to itself as they are in qkv (kernels/attention.h: heads, window, scale, soft_cap).  So it
 *               runs before the new rows are put into the cache.  Rows that are not fresh give zeros, lse -inf.
 * kv_write      (no gradient)
 *               in  qkv, used, fresh, first (optional), table, slot (optional) as kv_attention, row [N,K] I32
 *                   (optional)
 *               out keys, values, ktail, vtail as kv_attention, in place
 *               Appends the new rows, behind kv_attention of the same rows; used is the same, the next call's is
 *               used + fresh.  A plain side takes copies of the rows.  Of a coded side, tokens that are then counted by
 *               lm_kv_coded, and were not, are encoded as lm_kv_encode does; those that were plain come out of the tail.
 *               Then the tail takes the new rows: the first `sinks` tokens, and the newest `residual` of the others.  So the
 *               bits of pages and tails do not depend on the cuts between calls.  The first token that is encoded into a
 *               page clears its outliers.  A page that is written belongs to one sequence; used + fresh is at most P T.
 *               Formats with outliers have fixed ranges of channels (`lower`), or the values token_range: then the
 *               range of lm_kv_encode is that of all K heads of the token, without the share `outliers` of numbers
 *               (lm_kv_token_range).
 *               With `row` new rows replace tokens instead: qkv's row n becomes token row[n,kv] of its sequence in
 *               head kv, whatever `used` is; of equal ones the last counts.  All other tokens keep their bits.
 *               Sides are then plain, or of a format of single tokens without tails and outliers.
 * head_rotate   in  x [N,(H+2K)D] act
 *               out y [N,(H+2K)D] act: the query, key and value heads of the flags q, k and v times the orthonormal
 *                   Hadamard matrix in blocks of B, the largest power of two that divides D (Sylvester's order:
 *                   entry i,j is B^-1/2, negative if i & j has an odd number of bits); the rest copied; may
 *                   alias x.  It is its own inverse and its own gradient.  K = 0: x has H heads alone.
 *                   With `part` the first `part` numbers of a head are rotated, as a head of so many; the rest copied.
 * Tolerance: relative L2 2e-6 (F32), 1e-2 (BF16); head_rotate 1e-6, 4e-3; kv_write the same bits. */
#ifndef LM_KERNELS_KV_H
#define LM_KERNELS_KV_H

#include "kernels/attention.h"
#include "numeric/kv_format.h"

typedef struct {
    lm_attention_attr attention; /* batch B; causal, or reads; no dropout; seq 0 with `first` */
    /* Of keys [0] and of values [1], multiples of lm_kv_step; 0 of a plain side: */
    int64_t residual[2]; /* newest tokens that are not coded: at most so many */
    int64_t sinks[2];    /* first tokens that are not coded */
    /* of kv_write: the codes of values (LM_KV_TOKEN with `zero`) share a token's range, which is without the share
     * `outliers` of its numbers */
    bool token_range;
    double outliers;
    bool latent; /* see above */
} lm_kv_attr;

typedef struct {
    int64_t heads, kv_heads, head_dim; /* head_dim at most LM_KV_MAX_DIM */
    bool q, k, v;
    int64_t part; /* 0: the head */
} lm_head_rotate_attr;

/* Numbers of a head that are rotated. */
static inline int64_t lm_head_rotate_part(const lm_head_rotate_attr *a)
{
    return a->part ? a->part : a->head_dim;
}

/* Numbers of a row of qkv. */
static inline int64_t lm_kv_row_heads(const lm_kv_attr *a)
{
    return lm_attention_row(&a->attention, !a->latent);
}
/* Numbers of a row of keys [0] or values [1] of a head, and where those of head `kv` begin in a row of qkv. */
static inline int64_t lm_kv_side_dim(const lm_kv_attr *a, int side)
{
    const lm_attention_attr *x = &a->attention;
    if (!a->latent)
        return x->head_dim;
    return side ? x->head_dim - x->value_dim : x->value_dim;
}
static inline int64_t lm_kv_side_at(const lm_kv_attr *a, int side, int64_t kv)
{
    const lm_attention_attr *x = &a->attention;
    if (a->latent)
        return x->heads * x->head_dim + (side ? x->value_dim : 0);
    return (x->heads + (side ? x->kv_heads : 0) + kv) * x->head_dim;
}

/* Of `used` tokens in the cache those in [sinks, this) are read as codes.  Formats of single tokens keep the newest
 * `residual` plain; others code `residual` tokens at once when as many are there.  A plain side (f NULL) has all
 * tokens in its pages. */
static inline int64_t lm_kv_coded(const lm_kv_format *f, int64_t T, int64_t residual, int64_t used)
{
    if (residual == 0)
        return used;
    if (lm_kv_step(f, T) > 1)
        return used - used % residual;
    return used > residual ? used - residual : 0;
}

#endif
