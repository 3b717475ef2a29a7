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

/* Biases of a head times `by`, one for each distance from `least` to `most`, so that those of any block of scores are read
 * from it: row r of a block, whose lanes follow each other by one, begins r numbers before row 0. */
typedef struct {
    float *x;      /* NULL: there are no biases */
    int64_t first; /* the distance of x[0] */
    bool turned;   /* distances fall along x (queries in lanes), or rise (keys in lanes) */
} attn_bias_lines;

/* Numbers of x, for blocks whose keys and queries are rounded up to 64. */
static inline int64_t attn_bias_numbers(int64_t keys, int64_t queries)
{
    return (keys + 63) / 64 * 64 + (queries + 63) / 64 * 64;
}

/* Row 0 of the block whose first key is at that distance from its first query. */
static inline const float *attn_bias_row(const attn_bias_lines *l, int64_t distance)
{
    if (!l->x)
        return NULL;
    return l->x + (l->turned ? l->first - distance : distance - l->first);
}

/* Fill x [n] for head h. */
static inline void attn_bias_fill(const attn_bias_lines *l, const attn_biases *b, int64_t h,
                                  float by, int64_t n)
{
    const float *row = b->table + h * b->columns;
    const int64_t step = l->turned ? -1 : 1, at = l->first + b->zero;
    for (int64_t i = 0; i < n; i++)
        l->x[i] = row[attn_bias_clamp(at + step * i, b->columns)] * by;
}

#endif
