/* SPDX-License-Identifier: Apache-2.0 */
/* route_sort.h -- assignments in order of their experts: a counting sort over blocks of
 * assignments, each with its own counts.  Within an expert the order is that of the assignments,
 * for any number of threads. */
#ifndef LM_KERNELS_CPU_ROUTE_SORT_H
#define LM_KERNELS_CPU_ROUTE_SORT_H

#include <string.h>

#include "kernels/kernel.h"

typedef struct {
    const int32_t *expert; /* negative: of no expert */
    int64_t count, experts;
    int64_t pad; /* rows of an expert, others are left out; 0: as many as come */
    int64_t rows;
    int32_t *offsets, *from, *place; /* as in route.h; place may be NULL */
    int32_t *at;                     /* route_sort_ints() of scratch */
} route_sort;

enum { ROUTE_MOST_BLOCKS = 64, ROUTE_LEAST_BLOCK = 512 };

static inline int64_t route_sort_block(int64_t count)
{
    int64_t size = (count + ROUTE_MOST_BLOCKS - 1) / ROUTE_MOST_BLOCKS;
    return size > ROUTE_LEAST_BLOCK ? size : ROUTE_LEAST_BLOCK;
}

static inline int64_t route_sort_blocks(int64_t count)
{
    return (count + route_sort_block(count) - 1) / route_sort_block(count);
}

static inline size_t route_sort_ints(int64_t count, int64_t experts)
{
    return (size_t)(route_sort_blocks(count) * experts);
}

static inline int64_t route_sort_end(const route_sort *j, int64_t block)
{
    int64_t end = (block + 1) * route_sort_block(j->count);
    return end < j->count ? end : j->count;
}

static void route_sort_count(void *ctx, int64_t begin, int64_t end, int worker)
{
    const route_sort *j = ctx;
    (void)worker;
    for (int64_t b = begin; b < end; b++) {
        int32_t *at = j->at + b * j->experts;
        memset(at, 0, (size_t)j->experts * sizeof *at);
        for (int64_t i = b * route_sort_block(j->count); i < route_sort_end(j, b); i++)
            if (j->expert[i] >= 0)
                at[j->expert[i]]++;
    }
}

/* Counts become the first rows of each block; rows of the padding and those that are not used have
 * no assignment. */
static void route_sort_first(const route_sort *j)
{
    int64_t row = 0;
    for (int64_t e = 0; e < j->experts; e++) {
        row = j->pad ? e * j->pad : row;
        j->offsets[e] = (int32_t)row;
        for (int64_t b = 0; b < route_sort_blocks(j->count); b++) {
            int32_t *at = j->at + b * j->experts + e, n = *at;
            *at = (int32_t)row;
            row += n;
        }
        for (int64_t r = row; j->pad && r < (e + 1) * j->pad; r++)
            j->from[r] = -1;
    }
    j->offsets[j->experts] = (int32_t)(j->pad ? j->experts * j->pad : row);
    for (int64_t r = j->offsets[j->experts]; r < j->rows; r++)
        j->from[r] = -1;
}

static void route_sort_place(void *ctx, int64_t begin, int64_t end, int worker)
{
    const route_sort *j = ctx;
    (void)worker;
    for (int64_t b = begin; b < end; b++) {
        int32_t *at = j->at + b * j->experts;
        for (int64_t i = b * route_sort_block(j->count); i < route_sort_end(j, b); i++) {
            int32_t e = j->expert[i], row = e < 0 ? -1 : at[e]++;
            if (j->pad && row >= (e + 1) * j->pad)
                row = -1;
            if (j->place)
                j->place[i] = row;
            if (row >= 0)
                j->from[row] = (int32_t)i;
        }
    }
}

static inline void route_sort_run(route_sort *j, lm_par *par)
{
    lm_par_for(par, route_sort_blocks(j->count), 1, route_sort_count, j);
    route_sort_first(j);
    lm_par_for(par, route_sort_blocks(j->count), 1, route_sort_place, j);
}

#endif
