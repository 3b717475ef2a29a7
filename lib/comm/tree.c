/* SPDX-License-Identifier: Apache-2.0 */
/* tree.c -- sums, maxima and minima over ranks in a fixed order.
 *
 * Blocks of elements go through the tree one after the other, so that what a node holds stays in the cache.  Types narrower than
 * 32 bits are widened at the leaves. */
#include <math.h>
#include <string.h>

#include "comm/comm_impl.h"

enum { BLOCK = 512 };

typedef struct {
    const void *const *part;
    size_t first, n; /* of this block */
    lm_dtype type;
    lm_comm_op op;
} block;

/* The type that a node adds in. */
static lm_dtype wide_type(lm_dtype d)
{
    return d == LM_DTYPE_F16 || d == LM_DTYPE_BF16 ? LM_DTYPE_F32 : d;
}

/* a[i] = a[i] op b[i]: both are what nodes below have made, or b is a leaf. */
#define COMBINE(T, MAX, MIN, SUM)                     \
    do {                                              \
        T *x = a;                                     \
        const T *y = b;                               \
        if (k->op == LM_COMM_SUM)                     \
            for (size_t i = 0; i < k->n; i++)         \
                x[i] = SUM(x[i], y[i]);               \
        else if (k->op == LM_COMM_MAX)                \
            for (size_t i = 0; i < k->n; i++)         \
                x[i] = MAX(x[i], y[i]) ? x[i] : y[i]; \
        else                                          \
            for (size_t i = 0; i < k->n; i++)         \
                x[i] = MIN(x[i], y[i]) ? x[i] : y[i]; \
    } while (0)

#define ADD(p, q)     ((p) + (q))
#define ADD_I64(p, q) ((int64_t)((uint64_t)(p) + (uint64_t)(q)))
#define ADD_I32(p, q) ((int32_t)((uint32_t)(p) + (uint32_t)(q)))
/* True if the first is the result; a NaN is one on either side. */
#define FIRST_MAX(p, q)   ((p) >= (q) || (p) != (p))
#define FIRST_MIN(p, q)   ((p) <= (q) || (p) != (p))
#define FIRST_MAX_I(p, q) ((p) >= (q))
#define FIRST_MIN_I(p, q) ((p) <= (q))

static void combine(const block *k, void *a, const void *b)
{
    switch (wide_type(k->type)) {
    case LM_DTYPE_F64:
        COMBINE(double, FIRST_MAX, FIRST_MIN, ADD);
        break;
    case LM_DTYPE_I64:
        COMBINE(int64_t, FIRST_MAX_I, FIRST_MIN_I, ADD_I64);
        break;
    case LM_DTYPE_I32:
        COMBINE(int32_t, FIRST_MAX_I, FIRST_MIN_I, ADD_I32);
        break;
    default:
        COMBINE(float, FIRST_MAX, FIRST_MIN, ADD);
    }
}

static void load(const block *k, int part, void *out)
{
    const char *from = (const char *)k->part[part] + k->first * lm_dtype_size(k->type);
    lm_convert(k->type, from, wide_type(k->type), out, (int64_t)k->n);
}

/* The largest power of two below n > 1. */
static int below(int n)
{
    int half = 1;

    while (2 * half < n)
        half *= 2;
    return half;
}

/* Parts lo..hi-1 into out. */
static void reduce(const block *k, int lo, int hi, void *out)
{
    double right[BLOCK]; /* of any type */
    int half;

    if (hi - lo == 1) {
        load(k, lo, out);
        return;
    }
    half = below(hi - lo);
    reduce(k, lo, lo + half, out);
    reduce(k, lo + half, hi, right);
    combine(k, out, right);
}

void lm_comm_tree(const void *const *part, int parts, size_t first, size_t n, lm_dtype d,
                  lm_comm_op op, void *out)
{
    size_t size = lm_dtype_size(d);
    double result[BLOCK];

    for (size_t at = 0; at < n; at += BLOCK) {
        block k = { .part = part,
                    .first = first + at,
                    .n = n - at < BLOCK ? n - at : BLOCK,
                    .type = d,
                    .op = op };

        reduce(&k, 0, parts, result);
        lm_convert(wide_type(d), result, d, (char *)out + at * size, (int64_t)k.n);
    }
}
