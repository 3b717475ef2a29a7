/* SPDX-License-Identifier: Apache-2.0 */
/* attention_blocks.c -- counts of what queries see with blocks of keys. */
#include "op/attention_blocks.h"

/* Of the numbers from .. to-1, those that are -offset modulo `stride`. */
static int64_t strided(int64_t from, int64_t to, int64_t offset, int64_t stride)
{
    if (from >= to || stride <= 0)
        return 0;
    return (to - 1 + offset) / stride - (from - 1 + offset) / stride;
}

/* Blocks before block p that its queries see, of head h. */
static int64_t blocks_before(const lm_attention_blocks *b, int64_t heads, int64_t h, int64_t p)
{
    const int64_t local = p + 1 < b->local ? p + 1 : b->local, far = p + 1 - local;
    const int64_t global = far < b->global ? far : b->global;
    return local - 1 + global + strided(global, far, lm_attention_offset(b, heads, h), b->stride);
}

double lm_attention_block_pairs(const lm_attention_blocks *b, int64_t heads, int64_t seq)
{
    double sum = 0;
    for (int64_t h = 0; h < heads; h++)
        for (int64_t p = 0; p * b->size < seq; p++) {
            const int64_t left = seq - p * b->size, rows = left < b->size ? left : b->size;
            sum += (double)rows *
                   ((double)(blocks_before(b, heads, h, p) * b->size) + (double)(rows + 1) / 2);
        }
    return sum / (double)heads;
}

double lm_attention_block_keys(const lm_attention_blocks *b, int64_t heads, int64_t seq)
{
    const int64_t p = (seq - 1) / b->size;
    double before = 0;
    for (int64_t h = 0; h < heads; h++)
        before += (double)blocks_before(b, heads, h, p);
    return before * (double)b->size / (double)heads + (double)(seq - p * b->size);
}
