/* SPDX-License-Identifier: Apache-2.0 */
/* expcode_ref.c -- the coder's loops, one symbol at a time: the definition. */
#include <string.h>

#include "kernels/expcode.h"

static size_t end_of(size_t n, int stream)
{
    size_t end = lm_exp_share(n) * ((size_t)stream + 1);
    return end < n ? end : n;
}

static void count(lm_exp_work *w, const uint8_t *src, size_t n)
{
    bool sample = n >= LM_EXP_SAMPLE;
    memset(w->weight, 0, sizeof w->weight);
    for (size_t i = 0; i < n; i++)
        if (!sample || i % 1024 < 256)
            w->weight[src[i]] += sample ? 4 : 1;
    for (size_t i = 0; i < n; i++)
        if (!w->weight[src[i]])
            w->weight[src[i]] = 1;
}

static void put(lm_exp_work *w, const uint8_t *src, size_t n)
{
    size_t at = 0;
    for (int i = 0; i < lm_exp_streams(n); i++) {
        uint8_t *begin = w->out + lm_exp_room(n) * (size_t)i, *dst = begin;
        uint32_t bits = 0;
        int held = 0;
        for (; at < end_of(n, i); at++) {
            bits |= (uint32_t)w->code[src[at]] << held;
            for (held += w->length[src[at]]; held >= 8; held -= 8, bits >>= 8)
                *dst++ = (uint8_t)bits;
        }
        if (held)
            *dst++ = (uint8_t)bits;
        w->bytes[i] = (uint32_t)(dst - begin);
    }
}

/* The symbol and the length that each LM_EXP_BITS bits begin with. */
static void fill(const lm_exp_work *w, uint16_t table[1 << LM_EXP_BITS])
{
    for (int u = 0; u < w->n_used; u++) {
        int s = w->used[u];
        for (unsigned c = w->code[s]; c < 1u << LM_EXP_BITS; c += 1u << w->length[s])
            table[c] = (uint16_t)(s << 8 | w->length[s]);
    }
}

static bool get(lm_exp_work *w, const uint8_t *src, uint8_t *dst, size_t n)
{
    uint16_t table[1 << LM_EXP_BITS];
    size_t out = 0;
    fill(w, table);
    for (int i = 0; i < lm_exp_streams(n); i++) {
        const uint8_t *end = src + w->bytes[i];
        uint32_t bits = 0;
        int held = 0;
        for (; out < end_of(n, i); out++) {
            for (; held < LM_EXP_BITS && src < end; held += 8)
                bits |= (uint32_t)*src++ << held;
            unsigned e = table[bits & ((1u << LM_EXP_BITS) - 1)];
            int length = (int)(e & 255);
            if (length > held)
                return false;
            dst[out] = (uint8_t)(e >> 8);
            bits >>= length;
            held -= length;
        }
        if (src != end || held >= 8 || bits)
            return false;
    }
    return true;
}

const lm_exp_kernels lm_exp_ref = { count, put, get };
