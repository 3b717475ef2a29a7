/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_lmz_chunk.c -- chunks of .lmz files: for any bytes, decoding stays inside its buffers and
 * every processor level gives the same result; encoded data are restored.
 *
 * Byte 0 is the kind of elements and the mode: even, the rest is a chunk to decode; odd, the rest
 * is data to encode, to decode, and to decode once more with one bit flipped.  Bytes 1 and 2: the
 * number of elements of a chunk to decode, or the position of that bit. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "format/lmz_chunk.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static lm_lmz_coder *coder(lm_cpu_level cpu)
{
    static lm_lmz_coder *made[LM_CPU_AMX + 1];
    lm_err e = { 0 };
    if (!made[cpu] && lm_lmz_coder_new(3, cpu, &made[cpu], &e))
        abort();
    return made[cpu];
}

/* Decode on every level; true on success, with the bytes in *back. */
static int decode(lm_lmz_kind kind, const uint8_t *src, size_t len, size_t raw, uint8_t *back)
{
    uint8_t *copy = malloc(len + !len), *other = malloc(raw + !raw), *base = calloc(raw + 1, 1);
    int first = 0;
    memcpy(copy, src, len);
    memset(back, 0, raw);
    for (lm_cpu_level l = LM_CPU_REF; l <= lm_cpu_detect(); l++) {
        lm_err e = { 0 };
        memset(other, 0, raw);
        int code = lm_lmz_decode(coder(l), kind, copy, len, base, l ? other : back, raw, &e);
        if (l == LM_CPU_REF)
            first = code;
        else if (code != first || (!code && memcmp(other, back, raw)))
            abort();
        if (code && !e.what[0])
            abort();
    }
    free(copy), free(other), free(base);
    return !first;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 3)
        return 0;
    lm_lmz_kind kind = (lm_lmz_kind)(data[0] / 2 % LM_LMZ_KINDS);
    size_t place = data[1] | (size_t)data[2] << 8, element = lm_lmz_kind_size(kind), len = 0;
    lm_err e = { 0 };
    if (!(data[0] & 1)) {
        uint8_t *back = malloc(place * element + 1);
        lm_lmz_chunk_info info;
        int taken = decode(kind, data + 3, size - 3, place * element, back);
        if (taken && lm_lmz_chunk_look(kind, data + 3, size - 3, place * element, &info, &e))
            abort();
        free(back);
        return 0;
    }
    size_t raw = (size - 3) / element * element;
    uint8_t *out = malloc(lm_lmz_chunk_bound(raw)), *back = malloc(raw + 1);
    if (lm_lmz_encode(coder(lm_cpu_detect()), kind, data + 3, raw, NULL, out,
                      lm_lmz_chunk_bound(raw), &len, &e) ||
        len > raw + 1 || !decode(kind, out, len, raw, back) || memcmp(back, data + 3, raw))
        abort();
    out[place / 8 % len] ^= (uint8_t)(1 << place % 8);
    decode(kind, out, len, raw, back);
    free(out), free(back);
    return 0;
}
