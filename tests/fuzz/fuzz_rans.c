/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_rans.c -- streams of the entropy coder of caches: for any bytes, decoding stays inside its
 * buffers and every processor level gives the same result; encoded symbols are restored.
 *
 * Byte 0: columns - 1 (modulo 64); byte 1: symbols of a table - 1; byte 2: rows (modulo 24); byte 3: bytes of counts that
 * follow, of which the tables of both sets are made.  The rest is a stream to decode and symbols to encode. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/rans.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void decode(const lm_rans_shape *f, const uint8_t *src, size_t len, const uint8_t *want)
{
    size_t n = (size_t)(f->rows * f->cols);
    uint8_t *copy = malloc(len + !len), *first = calloc(n + !n, 1), *other = malloc(n + !n);
    bool good = false;
    memcpy(copy, src, len);
    for (lm_cpu_level l = LM_CPU_REF; l <= lm_cpu_detect(); l++) {
        bool g = lm_rans_at(l)->get(f, copy, len, l ? other : first);
        if (l == LM_CPU_REF)
            good = g;
        if (g != good || (g && l && memcmp(first, other, n)))
            abort();
    }
    if (want && (!good || memcmp(first, want, n)))
        abort();
    free(copy), free(first), free(other);
}

static void encode(const lm_rans_shape *f, const uint8_t *symbols)
{
    size_t room = lm_rans_room(f->rows, f->cols), first = 0;
    uint8_t *out = malloc(room);
    for (lm_cpu_level l = LM_CPU_REF; l <= lm_cpu_detect(); l++) {
        size_t len = lm_rans_at(l)->put(f, symbols, out);
        if (l == LM_CPU_REF)
            first = len;
        if (len != first)
            abort();
        if (len)
            decode(f, out + room - len, len, symbols);
    }
    free(out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 4 || size - 4 < data[3])
        return 0;
    int64_t cols = data[0] % 64 + 1, rows = data[2] % 24;
    int symbols = data[1] < LM_RANS_SYMBOLS ? data[1] + 1 : LM_RANS_SYMBOLS;
    int width = lm_rans_width(symbols);
    uint32_t count[2][LM_RANS_SYMBOLS] = { { 0 } }, at[256];
    uint16_t start[512];
    uint8_t kind[256];
    for (int i = 0; i < data[3]; i++)
        count[i % 2][i / 2 % symbols] += data[4 + i];
    for (int k = 0; k < 2; k++)
        lm_rans_fit(count[k], symbols, start + k * width);
    for (int i = 0; i < 256; i++)
        at[i] = (uint32_t)(i % 3 == 1 ? width : 0), kind[i] = i % 10 == 1;
    lm_rans_shape f = { rows, cols, kind, { { width, start, at }, { width, start, at } } };
    size_t head = 4 + (size_t)data[3], n = (size_t)(rows * cols);
    decode(&f, data + head, size - head, NULL);
    uint8_t *symbol = calloc(n + 1, 1);
    for (size_t i = 0; i < n && head < size; i++)
        symbol[i] = (uint8_t)(data[head + i % (size - head)] % symbols);
    encode(&f, symbol);
    free(symbol);
    return 0;
}
