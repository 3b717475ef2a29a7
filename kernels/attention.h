/* SPDX-License-Identifier: Apache-2.0 */
/* attention.h -- softmax attention without a T x T matrix (FlashAttention-2, arXiv:2307.08691): tiled, online
 * softmax, log-sum-exp saved; the backward recomputes the probabilities.
 *
 * qkv rows hold H query heads and K key heads of D numbers, then K value heads of E numbers (value_dim; usually D);
 * query head h uses key/value head h / (H/K).  Key j is visible to query i of the same sequence iff j <= i (causal),
 * lo[i] <= j < hi[i] (its document), and with a window W > 0 i - j < W and, where not causal, j - i < W.  (In a
 * bidirectional window ModernBERT, arXiv:2412.13663, sees |i - j| <= local_attention / 2: W is one more.)  A row that
 * sees nothing gives zeros and lse = -inf.  Scores are scale * q.k in F32, and with soft_cap c > 0
 * c tanh(scale * q.k / c) (Gemma 2, arXiv:2408.00118, section 2); probabilities are rounded to act before the product
 * with v.
 *
 * Sinks (gpt-oss): each query head h may have one more logit, sinks[h], without a key and a value: exp(sinks[h]) is
 * added to the denominator of its rows, and to what lse is the logarithm of.  A row that sees nothing gives zeros and
 * lse = sinks[h] then; rows that are not real have lse -inf as without.
 *
 * Undivided sums: with `undivided` a row of o is the sum of exp(score) v over the keys that it sees, which the sum of
 * exp(score) does not divide (kernels/gaussian.h), and its lse is 0, the logarithm of what did divide it; still -inf
 * where it sees nothing.  There are no sinks then.  Weights are rounded to act as exp(score - greatest score of the
 * row), so a row whose weights are all small keeps its digits.  In the backward they are exp(score), rounded, and
 * <do, o> is not subtracted from dp.
 *
 * Bias by distance: with bias [H,Z] the score of the key at position j for the query at position i (both of a sequence)
 * gets bias[h, z] added to scale * q.k, before the soft cap, z being j - i + bias_zero, or the nearest of 0 to Z-1.  So
 * the table of T5 (arXiv:1910.10683, section 2.1; kernels/distance.h) has no more columns than distances that it
 * tells apart, and that of ALiBi (arXiv:2108.12409) has a column for each distance.
 *
 * Blocks (the local and strided pattern of Phi-3-small, arXiv:2404.14219, section 2, and the global tokens of BigBird's
 * internal construction, arXiv:2007.14062, section 2): with blocks.size > 0, which requires causal attention without a
 * window and a bias, positions are counted from the first key of the document, lo[i], and query i of head h at position p
 * sees, of the keys that it would see otherwise, those at positions r with one of
 *   p / size - r / size < local     r / size < global     (r / size + offset(h)) mod stride = 0, with stride > 0
 * where quotients are rounded down, and offset(h) is 1 + h max(1, stride / H rounded down), or 1 for all heads if they are
 * homogeneous.  So documents side by side see what each sees alone.
 *
 * attention     in  qkv [B*T,(H+K)D+K*E] act, lo [B*T] I32 (optional, 0), hi [B*T] I32 (optional, T),
 *                   sinks [H] F32 (optional), bias [H,Z] F32 (optional)
 *               out o [B*T,H*E] act, lse [B,H,T] F32
 * attention_dx  in  do [B*T,H*E] act, qkv, o, lse, lo (optional), hi (optional), bias (optional)
 *               out dqkv [B*T,(H+K)D+K*E] act.  Deterministic: the same bits for any number of threads.
 *               With o and lse of an attention with sinks it is its gradient.
 * attention_dsinks  in  do [B*T,W] act, o [B*T,W] act, lse [B,H,T] F32, sinks [H] F32     W: a multiple of H
 *               out dsinks [H] F32 (acc): minus the sum over rows i of exp(sinks[h] - lse) <do, o> of head h
 *               Deterministic as attention_dx.
 * attention_dbias   in  do, qkv, o, lse, lo (optional), hi (optional), bias [H,Z] F32, as attention_dx
 *               out dbias [H,Z] F32 (acc): sums over the pairs of each column of p (dp - <do, o>), times the slope of
 *                   the soft cap.  Deterministic as attention_dx.
 * attention_cached  (prefill and decoding; no gradient)
 *               in  qkv [N,(H+K)D+K*E] act, used [B] I32 (keys already in the cache), fresh [B] I32 (of the rows of
 *                   a sequence the first fresh[b] are real), first [B+1] I32 and kind [B] I32 (both or neither),
 *                   table [B,P] I32 (optional), sinks [H] F32 (optional), bias [H,Z] F32 (optional)
 *               out o [N,H*E] act, kcache [G,K,S,D] act, vcache [G,K,S,E] act (both in place; vcache optional),
 *                   lse [N,H] F32 (optional)
 *               appends the fresh keys and values at positions used[b].., then attends: row i of b is at position
 *               used[b]+i, so with used = 0 it equals attention.  Other rows of o are zeros, of lse -inf.
 *   rows        The rows of sequence b are T rows from b T on (N = B T).  Ragged (T = 0): rows first[b] to
 *               first[b+1], with first[0] = 0; rows from first[B] on belong to no sequence.  kind (lm_rows_kind)
 *               says what they are: a part of a prompt (any number), or a new token (at most one row).  The
 *               bits of a row depend on its kind, its position and the keys, not on the other rows, on where a
 *               prompt is cut, or on N and B.
 *   values      Without vcache the value of a key is its first E numbers (E <= D), and rows of qkv hold no values:
 *               [N,(H+K)D].  This is the compressed cache of multi-head latent attention (DeepSeek-V2,
 *               arXiv:2405.04434, section 2.1), where K = 1.
 *   reads       With attr.reads nothing is appended: rows of qkv hold queries alone, [N,HD], and the first fresh[b] rows
 *               of sequence b see all of its used[b] positions, in no order: a decoder's rows and their source (cross
 *               attention, arXiv:1706.03762, section 3.2.3).  There is a vcache, no causal order, no window and no bias.
 *   positions   Without a table sequence b has the room of S positions (G = B).  With one, caches are pages of S
 *               positions, a multiple of LM_PAGE_UNIT: position j of b is in page table[b][j / S], at j mod S.
 *               Only entries of positions below used[b]+fresh[b] are read.  Sequences may share pages, except
 *               those that are written.  The bits are those of a cache in one piece.
 *               used[b]+fresh[b] is at most the room: S, or P S.
 * attention_step    (decoding, T = 1, joined with the operators before it: lib/op/fuse.h)
 *               in  qkv [B,(H+2K)D] act, used [B] I32, fresh [B] I32, pos [B] I32, table [P,R] F32 (optional: no
 *                   rotation), wq [D] F32, wk [D] F32 (both or neither: no norm), sinks [H] F32 (optional)
 *               out o, kcache, vcache as attention_cached
 *               head_norm (kernels/norm.h) of the query and key heads, rope (kernels/rope.h) of the result, then
 *               attention_cached; between them numbers are rounded to act, as if they had been stored.  E is D, and
 *               there is a vcache.
 * Dropout (train only, rate p of attr): P~ = P * Z/(1-p), Z from Philox keyed (lm_rng_key(seed, step, micro),
 * "attention dropout", site) at index (b*H + h)*T*T + i*T + j, the same in both directions; kept iff uniform >= p
 * (a draw of lm_rng_u32 compared with the threshold floor(p * 2^32)).  The index is below B*H*T*T: it never wraps.
 * b, h, i, j, H and T are those of the whole attention of which the call is a part (lm_attention_origin).
 * Tolerance: relative L2 2e-6 (F32), 1e-2 (BF16). */
#ifndef LM_KERNELS_ATTENTION_H
#define LM_KERNELS_ATTENTION_H

#include "kernels/device.h"
#include "kernels/kernel.h"

/* The positions of a page are a multiple of this. */
enum { LM_PAGE_UNIT = 16 };

/* What the rows of a sequence are (ragged rows). */
typedef enum { LM_ROWS_PROMPT, LM_ROWS_TOKEN } lm_rows_kind;

/* size 0: all are seen. */
typedef struct {
    int64_t size, local, global, stride;
    bool homogeneous;
} lm_attention_blocks;

/* Where in the whole a call is whose sequences, heads, queries or keys are a part of it, for draws of dropout: its positions and
 * query heads, and the first of the call.  seq 0: the call is the whole. */
typedef struct {
    int64_t seq, heads;
    int64_t batch, head, query, key;
} lm_attention_origin;

/* The index of the draw of key 0 for query i of head h of sequence b; those of further keys follow, and those of query i + 1
 * begin `seq` further on.  o: with seq (lm_attention_origin_of). */
LM_DEVICE_TOO static inline uint64_t lm_attention_draw(const lm_attention_origin *o, int64_t b,
                                                       int64_t h, int64_t i)
{
    const uint64_t of = (uint64_t)(o->batch + b) * (uint64_t)o->heads + (uint64_t)(o->head + h);
    return (of * (uint64_t)o->seq + (uint64_t)(o->query + i)) * (uint64_t)o->seq + (uint64_t)o->key;
}

typedef struct {
    int64_t batch, seq, heads, kv_heads, head_dim; /* seq 0: ragged rows */
    int64_t window;                                /* 0: none */
    bool causal;
    double scale;
    double dropout;
    int64_t site;      /* distinguishes layers for dropout */
    double soft_cap;   /* of the scores; 0: none */
    int64_t value_dim; /* E; 0: head_dim */
    int64_t bias_zero; /* the column of distance 0, with a bias */
    lm_attention_blocks blocks;
    bool undivided; /* sums of exp(score) v */
    bool reads;     /* attention_cached: nothing is appended */
    /* A block of a greater attention (kernels/ring.h): the pairs of a sequence and head that see each other, without documents,
     * for costs; distance 0 may lie outside of the table of biases.  0: it is none. */
    double pairs;
    lm_attention_origin origin;
} lm_attention_attr;

static inline lm_attention_origin lm_attention_origin_of(const lm_attention_attr *a)
{
    lm_attention_origin o = a->origin;
    if (!o.seq) {
        o.seq = a->seq;
        o.heads = a->heads;
    }
    return o;
}

/* offset(h). */
static inline int64_t lm_attention_offset(const lm_attention_blocks *b, int64_t heads, int64_t h)
{
    const int64_t step = b->stride / heads;
    return b->homogeneous ? 1 : 1 + h * (step > 1 ? step : 1);
}

/* E. */
static inline int64_t lm_attention_value_dim(const lm_attention_attr *a)
{
    return a->value_dim ? a->value_dim : a->head_dim;
}

/* Numbers of a row of qkv, with or without value heads. */
static inline int64_t lm_attention_row(const lm_attention_attr *a, bool values)
{
    if (a->reads)
        return a->heads * a->head_dim;
    return (a->heads + a->kv_heads) * a->head_dim +
           (values ? a->kv_heads * lm_attention_value_dim(a) : 0);
}

typedef struct {
    int64_t batch, seq, heads;
    lm_acc acc;
} lm_attention_dsinks_attr;

typedef struct {
    lm_attention_attr attention;
    lm_acc acc;
} lm_attention_dbias_attr;

typedef struct {
    lm_attention_attr attention; /* seq 1 */
    int64_t rotary_dim;          /* R, with a table */
    double eps;                  /* of the norms */
    bool plus_one;               /* of the norms (kernels/norm.h) */
} lm_attention_step_attr;

#endif
