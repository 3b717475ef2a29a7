/* SPDX-License-Identifier: Apache-2.0 */
/* tree.c -- sums, maxima and minima over ranks in a fixed order.
 *
 * Blocks of elements go through the tree one after the other, so that what a node holds stays in the cache.  Types narrower than
 * 32 bits are widened at the leaves. */
#ifdef __SSE2__
#include <emmintrin.h>
#endif
#include <stdint.h>

#include "comm/comm_impl.h"

enum { BLOCK = 512 };

typedef struct {
    const void *const *part;
    size_t first, n; /* of this block */
    lm_dtype type;
    lm_comm_op op;
    bool past; /* the cache */
} block;

/* The type that a node adds in. */
static lm_dtype wide_type(lm_dtype d)
{
    return d == LM_DTYPE_F16 || d == LM_DTYPE_BF16 ? LM_DTYPE_F32 : d;
}

/* x[i] = p[i] op q[i]; x may be p or q, so one element never depends on another. */
#define LOOP(EXPRESSION) _Pragma("GCC ivdep") for (size_t i = 0; i < k->n; i++) x[i] = (EXPRESSION)

#define COMBINE(T, MAX, MIN, SUM)                \
    do {                                         \
        T *x = out;                              \
        const T *p = a, *q = b;                  \
        if (k->op == LM_COMM_SUM)                \
            LOOP(SUM(p[i], q[i]));               \
        else if (k->op == LM_COMM_MAX)           \
            LOOP(MAX(p[i], q[i]) ? p[i] : q[i]); \
        else                                     \
            LOOP(MIN(p[i], q[i]) ? p[i] : q[i]); \
    } while (0)

#define ADD(p, q)     ((p) + (q))
#define ADD_I64(p, q) ((int64_t)((uint64_t)(p) + (uint64_t)(q)))
#define ADD_I32(p, q) ((int32_t)((uint32_t)(p) + (uint32_t)(q)))
/* True if the first is the result; a NaN is one on either side. */
#define FIRST_MAX(p, q)   ((p) >= (q) || (p) != (p))
#define FIRST_MIN(p, q)   ((p) <= (q) || (p) != (p))
#define FIRST_MAX_I(p, q) ((p) >= (q))
#define FIRST_MIN_I(p, q) ((p) <= (q))

static void combine(const block *k, const void *a, const void *b, void *out)
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

/* A leaf in the type of nodes: where it lies, or converted into `room`. */
static const void *load(const block *k, int part, void *room)
{
    lm_dtype wide = wide_type(k->type);
    const char *from = (const char *)k->part[part] + k->first * lm_dtype_size(k->type);

    if (k->type == wide && (uintptr_t)from % lm_dtype_size(wide) == 0)
        return from;
    lm_convert(k->type, from, wide, room, (int64_t)k->n);
    return room;
}

#ifdef __SSE2__
/* Sums of F32 past the cache; out is aligned to 16 bytes.  Loads, sums and stores of a line follow each other, so that reading
 * does not wait until a block is written; what is read next is asked for early, because blocks are short. */
static void sum_past(const float *a, const float *b, float *out, size_t n)
{
    enum { LINE = 16, AHEAD = 512 };
    size_t i = 0;

    for (; i + LINE <= n; i += LINE) {
        __builtin_prefetch(a + i + AHEAD);
        __builtin_prefetch(b + i + AHEAD);
        for (size_t q = i; q < i + LINE; q += 4)
            _mm_stream_ps(out + q, _mm_add_ps(_mm_loadu_ps(a + q), _mm_loadu_ps(b + q)));
    }
    for (; i < n; i++)
        out[i] = a[i] + b[i];
}
#endif

/* The largest power of two below n > 1. */
static int below(int n)
{
    int half = 1;

    while (2 * half < n)
        half *= 2;
    return half;
}

/* Parts lo..hi-1: where their result lies, `room` or a leaf. */
static const void *reduce(const block *k, int lo, int hi, void *room)
{
    double other[BLOCK]; /* of any type */
    int half;

    if (hi - lo == 1)
        return load(k, lo, room);
    half = below(hi - lo);
    combine(k, reduce(k, lo, lo + half, room), reduce(k, lo + half, hi, other), room);
    return room;
}

/* out may be a part, whose elements are read until the last node, so only that one writes there. */
static void reduce_block(const block *k, int parts, void *out)
{
    lm_dtype wide = wide_type(k->type);
    double left[BLOCK], right[BLOCK];

    if (parts > 1 && k->type == wide && (uintptr_t)out % lm_dtype_size(wide) == 0) {
        int half = below(parts);

        const void *a = reduce(k, 0, half, left), *b = reduce(k, half, parts, right);
#ifdef __SSE2__
        if (k->past && k->type == LM_DTYPE_F32 && k->op == LM_COMM_SUM &&
            (uintptr_t)out % 16 == 0) {
            sum_past(a, b, out, k->n);
            return;
        }
#endif
        combine(k, a, b, out);
        return;
    }
    const void *result = reduce(k, 0, parts, left);
    if (result != out)
        lm_convert(wide, result, k->type, out, (int64_t)k->n);
}

static void reduce_blocks(const void *const *part, int parts, size_t first, size_t n, lm_dtype d,
                          lm_comm_op op, bool past, void *out)
{
    size_t size = lm_dtype_size(d);

    for (size_t at = 0; at < n; at += BLOCK) {
        block k = { .part = part,
                    .first = first + at,
                    .n = n - at < BLOCK ? n - at : BLOCK,
                    .type = d,
                    .op = op,
                    .past = past };

        reduce_block(&k, parts, (char *)out + at * size);
    }
#ifdef __SSE2__
    if (past)
        _mm_sfence();
#endif
}

void lm_comm_tree(const void *const *part, int parts, size_t first, size_t n, lm_dtype d,
                  lm_comm_op op, void *out)
{
    reduce_blocks(part, parts, first, n, d, op, false, out);
}

void lm_comm_tree_past(const void *const *part, int parts, size_t first, size_t n, lm_dtype d,
                       lm_comm_op op, void *out)
{
    reduce_blocks(part, parts, first, n, d, op, true, out);
}
