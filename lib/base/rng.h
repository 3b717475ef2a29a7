/* SPDX-License-Identifier: Apache-2.0 */
/* rng.h -- counted randomness: Philox 4x32-10 (Salmon et al., SC'11, Random123).
 *
 * Every random number is a pure function of (seed, purpose, index).  There is no state, so results
 * do not depend on threads, ranks or the order of work. */
#ifndef LM_BASE_RNG_H
#define LM_BASE_RNG_H

#include <stdint.h>

typedef struct {
    uint32_t v[4];
} lm_u32x4;

/* The raw block function: 128-bit counter, 64-bit key. */
lm_u32x4 lm_philox(uint64_t ctr_lo, uint64_t ctr_hi, uint64_t key);

/* A stream: the seed and a purpose ("init", "dropout", ...; hashed), plus a sub-stream number such
 * as a tensor's name hash or a layer.  Cheap to make. */
typedef struct {
    uint64_t key, hi;
} lm_rng;
lm_rng lm_rng_make(uint64_t seed, const char *purpose, uint64_t sub);

/* The seed for one micro-batch of one step, for streams whose indices count within a micro-batch,
 * so that the index never wraps, however many steps are made.  For each seed a bijection of (step,
 * micro) while step < 2^40 and micro < 2^24: no two micro-batches of a run share a key. */
uint64_t lm_rng_key(uint64_t seed, uint64_t step, uint64_t micro);

/* The first index of run number `run`, of `count` numbers each: run * count.  The part beyond 2^64
 * is mixed into the stream (which stays unchanged below 2^64), so that a long training never
 * repeats numbers. */
uint64_t lm_rng_first(lm_rng *r, uint64_t run, uint64_t count);

uint32_t lm_rng_u32(lm_rng r, uint64_t index);
uint64_t lm_rng_u64(lm_rng r, uint64_t index);
double lm_rng_uniform(lm_rng r, uint64_t index); /* [0,1), 53 bits */
/* Standard normal by Box-Muller over the pair of draws that holds `index`. */
double lm_rng_normal(lm_rng r, uint64_t index);
uint64_t lm_rng_below(lm_rng r, uint64_t index, uint64_t n); /* 0..n-1, n > 0; bias below 2^-64*n */

/* A bijection of [0, n) drawn by (r): a 6-round Feistel network with cycle walking; random access.
 */
uint64_t lm_rng_permute(lm_rng r, uint64_t i, uint64_t n);

#endif
