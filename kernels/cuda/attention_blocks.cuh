/* SPDX-License-Identifier: Apache-2.0 */
/* attention_blocks.cuh -- blocks of keys that queries see (kernels/attention.h) on a device.
 *
 * Positions are those in a document.  Kernels skip the tiles of which no query sees a key, and hide the other blocks of a
 * tile in its scores. */
#ifndef LM_KERNELS_CUDA_ATTENTION_BLOCKS_CUH
#define LM_KERNELS_CUDA_ATTENTION_BLOCKS_CUH

#include "kernels/cuda/mma.cuh"

extern "C" {
#include "kernels/attention.h"
}

/* size 0: all keys are seen.  step: between the offsets of heads. */
struct block_mask {
    int size, local, global, stride, step;
};

inline block_mask blocks_of(const lm_attention_attr *a)
{
    const lm_attention_blocks *b = &a->blocks;
    block_mask m = {};
    m.size = (int)b->size;
    m.local = (int)b->local;
    m.global = (int)b->global;
    m.stride = (int)b->stride;
    m.step = (int)(lm_attention_offset(b, a->heads, 1) - lm_attention_offset(b, a->heads, 0));
    return m;
}

/* Block r for queries of block p of head h. */
__device__ inline bool sees_block(const block_mask &m, int h, int p, int r)
{
    return p - r < m.local || r < m.global || (m.stride && (r + 1 + h * m.step) % m.stride == 0);
}

/* The key at position j for the query at position i, which is not before it. */
__device__ inline bool sees_key(const block_mask &m, int h, int i, int j)
{
    return sees_block(m, h, i / m.size, j / m.size);
}

/* False if no query of positions [i0, i1) sees a key of [j0, j1), which may begin before position 0. */
__device__ inline LM_NOINLINE bool sees_tile(block_mask m, int h, int i0, int i1, int j0, int j1)
{
    j0 = j0 > 0 ? j0 : 0;
    j1 = j1 < i1 ? j1 : i1;
    for (int p = i0 / m.size; p <= (i1 - 1) / m.size; p++)
        for (int r = j0 / m.size; j0 < j1 && r <= (j1 - 1) / m.size && r <= p; r++)
            if (sees_block(m, h, p, r))
                return true;
    return false;
}

/* A tile of queries of one head: keys are counted from i - position. */
struct query_tile {
    int h, i0, i1; /* positions */
    int origin;    /* of the document */
    bool one;      /* all queries are of one document; otherwise no tile of keys is skipped */
};

/* Of the tiles of `keys` keys from j on, before `end`, the first that a query sees. */
__device__ inline int next_tile(const block_mask &m, const query_tile &q, int j, int end, int keys)
{
    while (m.size && q.one && j < end &&
           !sees_tile(m, q.h, q.i0, q.i1, j - q.origin, j - q.origin + keys))
        j += keys;
    return j;
}

/* Bits 4n + 2 row + e, n < N <= 8, for a lane's sums of a row of scores (mma.cuh): set where the query at position i sees
 * the key, of which the first of the tile is at position j, or before the document. */
__device__ inline LM_NOINLINE unsigned seen_keys(block_mask m, int h, int i, int j, int N, int row)
{
    const int first = (int)(threadIdx.x % 4) * 2, p = i / m.size;
    unsigned bits = 0;
#pragma unroll 1
    for (int at = j < 0 ? -j : 0, next; at < 8 * N; at = next) {
        const int r = (j + at) / m.size;
        next = (r + 1) * m.size - j;
        if (!sees_block(m, h, p, r))
            continue;
#pragma unroll 1
        for (int k = 0; k < 2 * N; k++) {
            const int c = k / 2 * 8 + first + k % 2;
            bits |= (unsigned)(c >= at && c < next) << (4 * (k / 2) + 2 * row + k % 2);
        }
    }
    return bits;
}

/* The same of both rows: of queries at positions i[0] and i[1], each in a document of its own. */
__device__ inline unsigned seen_by_rows(const block_mask &m, int h, const int *i, const int *j,
                                        int N)
{
    return seen_keys(m, h, i[0], j[0], N, 0) | seen_keys(m, h, i[1], j[1], N, 1);
}

/* Where keys are in rows and queries in columns: query i0 + c, of a document that begins at first[c], and the lane's
 * keys from j on. */
__device__ inline LM_NOINLINE unsigned seen_by_columns(block_mask m, int h, int i0,
                                                       const int *first, int j, int N)
{
    const int lane = (int)(threadIdx.x % 32), last = 8 * N - 1, origin = first[0];
    const bool same =
        origin == first[last] && (i0 - origin) / m.size == (i0 + last - origin) / m.size;
    const int key = j + lane / 4;
    unsigned bits = 0;
#pragma unroll 1
    for (int k = 0; k < 2 * N && !same; k++) {
        const int c = k / 2 * 8 + lane % 4 * 2 + k % 2, from = first[c],
                  p = (i0 + c - from) / m.size;
#pragma unroll 1
        for (int x = 0; x < 2; x++) /* keys before the document are hidden anyway */
            bits |= (unsigned)sees_block(m, h, p, (key + 8 * x - from) / m.size)
                    << (4 * (k / 2) + 2 * x + k % 2);
    }
    for (int x = 0; x < 2 && same; x++)
        if (sees_block(m, h, (i0 - origin) / m.size, (key + 8 * x - origin) / m.size))
            bits |= 0x33333333u << 2 * x;
    return bits;
}

/* Scores of keys that are hidden. */
__device__ inline LM_NOINLINE mma_c hidden(mma_c c, unsigned seen, float none)
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        c.r[i] = seen >> i & 1 ? c.r[i] : none;
    return c;
}

/* N fragments of scores. */
template <int N> __device__ inline void hide_keys(mma_c *c, unsigned seen, float none)
{
#pragma unroll
    for (int n = 0; n < N; n++)
        c[n] = hidden(c[n], seen >> 4 * n, none);
}

/* Of a gradient: p becomes 0, and the slope of a soft cap stays finite. */
#define LM_HIDDEN_SCORE (-1e15f)

#endif
