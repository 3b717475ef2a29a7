/* SPDX-License-Identifier: Apache-2.0 */
/* rans_ref.c -- the coder's loops, one symbol at a time: the definition. */
#include <string.h>

#include "kernels/rans.h"

enum { BITS = LM_RANS_BITS, SLOTS = 1 << BITS, STATES = LM_RANS_STATES };

static const uint16_t *table_of(const lm_rans_shape *f, int64_t row, int64_t col)
{
    const lm_rans_set *set = &f->set[f->kind[row]];
    return set->start + set->at[col];
}

/* The first symbol is decoded first, so it is encoded last, and words are written backwards. */
static size_t put(const lm_rans_shape *f, const uint8_t *symbols, uint8_t *out)
{
    uint8_t *end = out + lm_rans_room(f->rows, f->cols), *p = end;
    uint32_t x[STATES];
    for (int i = 0; i < STATES; i++)
        x[i] = LM_RANS_LEAST;
    for (int64_t r = f->rows - 1; r >= 0; r--) {
        for (int64_t c = f->cols - 1; c >= 0; c--) {
            const uint16_t *t = table_of(f, r, c) + symbols[r * f->cols + c];
            uint32_t *s = &x[c % STATES], freq = (uint32_t)t[1] - t[0];
            if (!freq)
                return 0;
            if (*s >> (32 - BITS) >= freq) {
                *--p = (uint8_t)(*s >> 8);
                *--p = (uint8_t)*s;
                *s >>= 16;
            }
            *s = *s / freq * SLOTS + *s % freq + t[0];
        }
    }
    p -= 4 * STATES;
    for (int i = 0; i < 4 * STATES; i++)
        p[i] = (uint8_t)(x[i / 4] >> 8 * (i % 4));
    return (size_t)(end - p);
}

static bool get(const lm_rans_shape *f, const uint8_t *src, size_t len, uint8_t *symbols)
{
    const uint8_t *end = src + len;
    uint32_t x[STATES] = { 0 };
    if (len < 4 * STATES)
        return false;
    for (int i = 0; i < 4 * STATES; i++)
        x[i / 4] |= (uint32_t)*src++ << 8 * (i % 4);
    for (int i = 0; i < STATES; i++)
        if (x[i] < LM_RANS_LEAST)
            return false;
    for (int64_t r = 0; r < f->rows; r++) {
        for (int64_t c = 0; c < f->cols; c++) {
            const uint16_t *t = table_of(f, r, c);
            uint32_t *s = &x[c % STATES], slot = *s % SLOTS;
            int symbol = f->set[f->kind[r]].width - 1;
            while (t[symbol] > slot)
                symbol--;
            symbols[r * f->cols + c] = (uint8_t)symbol;
            *s = (uint32_t)(t[symbol + 1] - t[symbol]) * (*s / SLOTS) + slot - t[symbol];
            if (*s < LM_RANS_LEAST) {
                if (end - src < 2)
                    return false;
                *s = *s << 16 | src[0] | (uint32_t)src[1] << 8;
                src += 2;
            }
        }
    }
    for (int i = 0; i < STATES; i++)
        if (x[i] != LM_RANS_LEAST)
            return false;
    return src == end;
}

const lm_rans_kernels lm_rans_ref = { put, get };
