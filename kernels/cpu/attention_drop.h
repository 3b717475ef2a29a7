/* SPDX-License-Identifier: Apache-2.0 */
/* attention_drop.h -- the draws of attention dropout for 64 keys of a row at a time, on vectors: those of
 * attn_drop_fill (attention_plan.h), many times as fast. */
#ifndef LM_KERNELS_CPU_ATTENTION_DROP_H
#define LM_KERNELS_CPU_ATTENTION_DROP_H

#include "kernels/cpu/attention_plan.h"
#include "kernels/cpu/vrng.h"

enum { ATTN_DROP_KEYS = 64 };

/* Draws `at` to at + 63, and a few more.  If its length is not a multiple of 4, a row begins inside
 * a Philox block: its last keys then need one more vector block.  Returns where the first one
 * is. */
static inline const uint32_t *attn_draws(const attn_drop *d, uint64_t at,
                                         vrng_u32 v[4 * (ATTN_DROP_KEYS / VRNG_DRAWS + 1)])
{
    int blocks = ATTN_DROP_KEYS / VRNG_DRAWS + (at % 4 != 0);
    for (int i = 0; i < blocks; i++)
        lm_philox_vectors(d->rng, at / 4 + (uint64_t)i * VRNG_LANES, v + 4 * i);
    return (const uint32_t *)v + at % 4;
}

#ifdef __AVX512F__
/* Bit j: the probability with the draw at + j is kept. */
static inline uint64_t attn_kept(const attn_drop *d, uint64_t at)
{
    vrng_u32 v[4 * (ATTN_DROP_KEYS / VRNG_DRAWS + 1)];
    const uint32_t *draws = attn_draws(d, at, v);
    __m512i least = _mm512_set1_epi32((int)d->threshold);
    uint64_t kept = 0;
    for (int i = 0; i < ATTN_DROP_KEYS; i += 16)
        kept |= (uint64_t)_mm512_cmpge_epu32_mask(_mm512_loadu_si512(draws + i), least) << i;
    return kept;
}

/* The same of two rows, whose draws begin `row` apart: bits[0] and bits[1].  Out of line: its text is
 * long, and callers unroll their loops. */
static __attribute__((noinline, unused)) void attn_kept_two(const attn_drop *d, uint64_t at,
                                                            uint64_t row, uint64_t bits[2])
{
    const uint64_t first[2] = { at / 4, (at + row) / 4 }, last = UINT32_MAX - 15;
    if (at % 4 || row % 4 || (uint32_t)first[0] > last || (uint32_t)first[1] > last) {
        bits[0] = attn_kept(d, at);
        bits[1] = attn_kept(d, at + row);
        return;
    }
    lm_philox_at_least(d->rng.hi, first, d->keys, d->threshold, bits);
}

/* The same of n queries (an even number) whose draws begin `row` apart: bit j of first[i] and of
 * second[i]: key j, key 32 + j is kept for query i. */
static inline void attn_kept_queries(const attn_drop *d, uint64_t at, uint64_t row, int n,
                                     uint32_t *first, uint32_t *second)
{
    for (int q = 0; q < n; q += 2) {
        uint64_t kept[2];
        attn_kept_two(d, at + (uint64_t)q * row, row, kept);
        for (int i = 0; i < 2; i++) {
            first[q + i] = (uint32_t)kept[i];
            second[q + i] = (uint32_t)(kept[i] >> 32);
        }
    }
}
#endif

/* Z/(1-p) of 64 keys, the first with the draw `at`. */
static inline void attn_drop_fill64(const attn_drop *d, uint64_t at, float z[ATTN_DROP_KEYS])
{
#ifdef __AVX512F__
    uint64_t kept = attn_kept(d, at);
    __m512 keep = _mm512_set1_ps(d->keep);
    for (int i = 0; i < ATTN_DROP_KEYS; i += 16)
        _mm512_storeu_ps(z + i, _mm512_maskz_mov_ps((__mmask16)(kept >> i), keep));
#else
    vrng_u32 v[4 * (ATTN_DROP_KEYS / VRNG_DRAWS + 1)];
    const uint32_t *draws = attn_draws(d, at, v);
    __m256i least = _mm256_set1_epi32((int)d->threshold);
    __m256 keep = _mm256_set1_ps(d->keep);
    for (int i = 0; i < ATTN_DROP_KEYS; i += 8) {
        __m256i x = _mm256_loadu_si256((const __m256i *)(draws + i));
        __m256i kept = _mm256_cmpeq_epi32(_mm256_max_epu32(x, least), x);
        _mm256_storeu_ps(z + i, _mm256_and_ps(_mm256_castsi256_ps(kept), keep));
    }
#endif
}

#endif
