/* SPDX-License-Identifier: Apache-2.0 */
/* attention_bias.h -- biases by distance (kernels/attention.h): of one pair, and of keys that follow each other. */
#ifndef LM_KERNELS_CPU_ATTENTION_BIAS_H
#define LM_KERNELS_CPU_ATTENTION_BIAS_H

#include "kernels/attention.h"

static inline int64_t attn_bias_clamp(int64_t column, int64_t columns)
{
    return column < 0 ? 0 : column < columns ? column : columns - 1;
}

static inline int64_t attn_bias_column(const lm_attention_attr *a, const lm_tensor *bias,
                                       int64_t distance)
{
    return attn_bias_clamp(distance + a->bias_zero, bias->dim[1]);
}

/* The bias of head h; bias NULL: 0. */
static inline double attn_bias(const lm_attention_attr *a, const lm_tensor *bias, int64_t h,
                               int64_t distance)
{
    if (!bias)
        return 0;
    return lm_get(bias->dtype, bias->data, h * bias->dim[1] + attn_bias_column(a, bias, distance));
}

/* A bias of all heads, for kernels in F32; table NULL: none. */
typedef struct {
    const float *table;
    int64_t columns, zero;
} attn_biases;

/* Operand i of a call, which may be absent. */
static inline attn_biases attn_biases_of(const lm_call *c, int i, const lm_attention_attr *a)
{
    if (i >= c->n_in || !c->in[i].data)
        return (attn_biases){ 0 };
    return (attn_biases){ c->in[i].data, c->in[i].dim[1], a->bias_zero };
}

/* Biases of head h for n keys, the first of which has that distance: in the table, or in room [n]. */
static inline const float *attn_bias_line(const attn_biases *b, int64_t h, int64_t distance,
                                          int64_t n, float *room)
{
    const float *row = b->table + h * b->columns;
    int64_t at = distance + b->zero;
    if (at >= 0 && at + n <= b->columns)
        return row + at;
    for (int64_t x = 0; x < n; x++)
        room[x] = row[attn_bias_clamp(at + x, b->columns)];
    return room;
}

/* The same from the last of n keys to the first, times `by`, into to [n]: so that queries are in lanes. */
static inline void attn_bias_turned(const attn_biases *b, int64_t h, int64_t distance, int64_t n,
                                    float by, float *to)
{
    const float *row = b->table + h * b->columns;
    for (int64_t x = 0; x < n; x++)
        to[n - 1 - x] = row[attn_bias_clamp(distance + b->zero + x, b->columns)] * by;
}

#endif
