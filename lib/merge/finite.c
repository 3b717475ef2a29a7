/* SPDX-License-Identifier: Apache-2.0 */
/* finite.c -- checks numbers by their bits: an exponent of all ones is a NaN or an infinity. */
#include "merge/finite.h"

#include <math.h>
#include <string.h>

enum { BLOCK = 1024, CHUNK = 64 * BLOCK };

/* The exponent's bits; for F8E4M3, whose largest exponent also has finite numbers, the bits of its
 * NaN. */
static const uint64_t exponent[LM_DTYPE_COUNT] = {
    [LM_DTYPE_F64] = UINT64_C(0x7ff0000000000000),
    [LM_DTYPE_F32] = 0x7f800000,
    [LM_DTYPE_F16] = 0x7c00,
    [LM_DTYPE_BF16] = 0x7f80,
    [LM_DTYPE_F8E4M3] = 0x7f,
    [LM_DTYPE_F8E5M2] = 0x7c,
};

/* True if a block, at any address, has a bad number: a loop without early exit, so that the
 * compiler can vectorise it. */
#define BLOCK_IS_BAD(name, type)                                   \
    typedef type __attribute__((aligned(1), may_alias)) name##_at; \
    static bool name(const char *x, uint64_t mask)                 \
    {                                                              \
        const name##_at *v = (const name##_at *)x;                 \
        type m = (type)mask, bad = 0;                              \
                                                                   \
        for (int i = 0; i < BLOCK; i++)                            \
            bad |= (type)((v[i] & m) == m);                        \
        return bad;                                                \
    }
BLOCK_IS_BAD(bad8, uint64_t)
BLOCK_IS_BAD(bad4, uint32_t)
BLOCK_IS_BAD(bad2, uint16_t)
BLOCK_IS_BAD(bad1, uint8_t)

typedef struct {
    lm_dtype d;
    const char *x;
    bool negative;
    int64_t first; /* atomic; n: no such number so far */
} search;

static bool block_is_bad(const search *s, int64_t at)
{
    const char *x = s->x + (size_t)at * lm_dtype_size(s->d);

    switch (lm_dtype_size(s->d)) {
    case 8:
        return bad8(x, exponent[s->d]);
    case 4:
        return bad4(x, exponent[s->d]);
    case 2:
        return bad2(x, exponent[s->d]);
    default:
        return bad1(x, exponent[s->d]);
    }
}

static void scan_range(void *ctx, int64_t begin, int64_t end, int worker)
{
    search *s = ctx;

    (void)worker;
    for (int64_t at = begin; at < end; at += BLOCK) {
        int64_t n = end - at < BLOCK ? end - at : BLOCK;
        int64_t first = __atomic_load_n(&s->first, __ATOMIC_RELAXED);

        if (first < at)
            return;
        if (n == BLOCK && !s->negative && !block_is_bad(s, at))
            continue;
        for (int64_t i = at; i < at + n; i++) {
            double v = lm_get(s->d, s->x, i);

            if (isfinite(v) && !(s->negative && v < 0))
                continue;
            while (i < first && !__atomic_compare_exchange_n(&s->first, &first, i, false,
                                                             __ATOMIC_RELAXED, __ATOMIC_RELAXED))
                ;
            return;
        }
    }
}

int64_t lm_merge_first_bad(lm_dtype d, const void *x, int64_t n, bool negative, lm_par *par)
{
    search s = { .d = d, .x = x, .negative = negative, .first = n };

    if (!lm_dtype_is_float(d))
        return -1;
    lm_par_for(par, n, CHUNK, scan_range, &s);
    return s.first < n ? s.first : -1;
}
