/* SPDX-License-Identifier: Apache-2.0 */
/* attention_blocks.h -- blocks of keys that queries see (kernels/attention.h): of one pair, of a row, and of a tile.
 *
 * All functions but attn_open are for a mask with blocks. */
#ifndef LM_KERNELS_CPU_ATTENTION_BLOCKS_H
#define LM_KERNELS_CPU_ATTENTION_BLOCKS_H

#include "kernels/cpu/attention_plan.h"

/* The first key of the document of query i. */
static inline int64_t attn_origin(const attn_mask *m, int64_t i)
{
    return m->lo && m->lo[i] > 0 ? m->lo[i] : 0;
}

/* Block r for a query in block p. */
static inline bool attn_sees_block(const lm_attention_blocks *b, int64_t offset, int64_t p,
                                   int64_t r)
{
    return p - r < b->local || r < b->global || (b->stride > 0 && (r + offset) % b->stride == 0);
}

/* Key j of those from attn_start to attn_end. */
static inline bool attn_sees(const attn_mask *m, int64_t h, int64_t i, int64_t j)
{
    const int64_t origin = attn_origin(m, i), size = m->blocks->size;
    return attn_sees_block(m->blocks, lm_attention_offset(m->blocks, m->heads, h),
                           (m->off + i - origin) / size, (j - origin) / size);
}

/* Of keys [*from, *to), which query i would see, those from the first to the last that it sees. */
static inline void attn_narrow(const attn_mask *m, int64_t h, int64_t i, int64_t *from, int64_t *to)
{
    const int64_t origin = attn_origin(m, i), size = m->blocks->size;
    while (*from < *to && !attn_sees(m, h, i, *from)) {
        const int64_t next = origin + ((*from - origin) / size + 1) * size;
        *from = next < *to ? next : *to;
    }
    while (*from < *to && !attn_sees(m, h, i, *to - 1)) {
        const int64_t begin = origin + (*to - 1 - origin) / size * size;
        *to = begin > *from ? begin : *from;
    }
}

/* Numbers x[0 .. n-1] of query i and the keys from j0 on become `none` where it does not see the block.  Those of other
 * documents stay. */
static inline void attn_hide(const attn_mask *m, int64_t h, int64_t i, int64_t j0, int64_t n,
                             float none, float *x)
{
    const int64_t origin = attn_origin(m, i), size = m->blocks->size, end = j0 + n;
    for (int64_t j = j0 > origin ? j0 : origin, next; j < end; j = next) {
        next = origin + ((j - origin) / size + 1) * size;
        next = next < end ? next : end;
        if (!attn_sees(m, h, i, j))
            for (int64_t k = j; k < next; k++)
                x[k - j0] = none;
    }
}

typedef enum { ATTN_NONE, ATTN_SOME, ATTN_ALL } attn_share;

/* Bit q of seen[r], r < n: query i0 + q of head h, q < rows <= 32, sees the block of key j0 + r, a key of its document or
 * of one behind it.  How many pairs that are. */
static inline attn_share attn_seen(const attn_mask *m, int64_t h, int64_t i0, int64_t rows,
                                   int64_t j0, int64_t n, uint32_t *seen)
{
    const int64_t size = m->blocks->size, offset = lm_attention_offset(m->blocks, m->heads, h);
    int64_t open = 0;
    for (int64_t r = 0; r < n; r++)
        seen[r] = 0;
    for (int64_t i = i0, next; i < i0 + rows; i = next) {
        const int64_t origin = attn_origin(m, i), p = (m->off + i - origin) / size;
        for (next = i + 1; next < i0 + rows && attn_origin(m, next) == origin &&
                           m->off + next < origin + (p + 1) * size;)
            next++;
        const uint32_t bits = (uint32_t)((UINT64_C(1) << (next - i0)) - (UINT64_C(1) << (i - i0)));
        int64_t j = j0 > origin ? j0 : origin, r = (j - origin) / size;
        for (int64_t end; j < j0 + n; j = end, r++) {
            end = origin + (r + 1) * size;
            end = end < j0 + n ? end : j0 + n;
            if (!attn_sees_block(m->blocks, offset, p, r))
                continue;
            open += (end - j) * (next - i);
            for (int64_t k = j; k < end; k++)
                seen[k - j0] |= bits;
        }
    }
    return open == 0 ? ATTN_NONE : open == rows * n ? ATTN_ALL : ATTN_SOME;
}

/* Bit r, r < n <= 64: query i of head h sees the block of key j0 + r, a key of its document or of one behind it.  Queries
 * from i to *next - 1 see the same. */
static inline uint64_t attn_seen_row(const attn_mask *m, int64_t h, int64_t i, int64_t j0,
                                     int64_t n, int64_t *next)
{
    const int64_t size = m->blocks->size, offset = lm_attention_offset(m->blocks, m->heads, h);
    const int64_t origin = attn_origin(m, i), p = (m->off + i - origin) / size;
    int64_t j = j0 > origin ? j0 : origin, r = (j - origin) / size;
    uint64_t seen = 0;
    for (int64_t end; j < j0 + n; j = end, r++) {
        end = origin + (r + 1) * size;
        end = end < j0 + n ? end : j0 + n;
        if (attn_sees_block(m->blocks, offset, p, r))
            seen |= (UINT64_MAX >> (64 - (end - j))) << (j - j0);
    }
    *next = m->lo ? i + 1 : origin + (p + 1) * size - m->off;
    return seen;
}

/* True unless no query of [i0, i1) sees a key of [j0, j1).  Queries of one document and block see the same blocks. */
static inline bool attn_open(const attn_mask *m, int64_t h, int64_t i0, int64_t i1, int64_t j0,
                             int64_t j1)
{
    int64_t before = -1, until = 0;
    for (int64_t i = i0; m->blocks && i < i1; i++) {
        const int64_t origin = attn_origin(m, i), size = m->blocks->size;
        if (origin == before && m->off + i < until)
            continue;
        before = origin;
        until = origin + ((m->off + i - origin) / size + 1) * size;
        for (int64_t j = j0 > origin ? j0 : origin; j < j1 && j < until;
             j = origin + ((j - origin) / size + 1) * size)
            if (attn_sees(m, h, i, j))
                return true;
    }
    return !m->blocks;
}

#endif
