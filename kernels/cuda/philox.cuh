/* SPDX-License-Identifier: Apache-2.0 */
/* philox.cuh -- the counted randomness of lib/base/rng.c on the device: the very same draws.
 *
 * A stream (lm_rng) is a key, made of the seed of the run, which is read on the device, and `hi`,
 * the hash of its purpose and sub-stream, which the launcher takes from rng_hi.  So each replay of
 * a recording has draws of its own. */
#ifndef LM_KERNELS_CUDA_PHILOX_CUH
#define LM_KERNELS_CUDA_PHILOX_CUH

#include "kernels/cuda/device.cuh"

extern "C" {
#include "base/rng.h"
#include "kernels/origin.h"
}

/* Four draws: those of indices 4 block to 4 block + 3. */
struct draws4 {
    uint32_t v[4];
};

inline uint64_t rng_hi(const char *purpose, uint64_t sub)
{
    return lm_rng_make(0, purpose, sub).hi;
}

/* The additions of the rounds to the key: equal for all blocks of a stream, so a kernel with many
 * blocks can keep them. */
enum { PHILOX_ROUNDS = 10 };
struct philox_keys {
    uint32_t v[PHILOX_ROUNDS][2];
};

__device__ inline void philox_key(philox_keys *k, int round, uint64_t key)
{
    k->v[round][0] = (uint32_t)key + 0x9E3779B9u * (uint32_t)round;
    k->v[round][1] = (uint32_t)(key >> 32) + 0xBB67AE85u * (uint32_t)round;
}

/* lm_philox: the words of a block, and lm_rng_u32 at 4 block + i is v[i]. */
__device__ inline draws4 philox(uint64_t block, uint64_t hi, const philox_keys &key)
{
    uint32_t c0 = (uint32_t)block, c1 = (uint32_t)(block >> 32);
    uint32_t c2 = (uint32_t)hi, c3 = (uint32_t)(hi >> 32);
#pragma unroll
    for (int round = 0; round < PHILOX_ROUNDS; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * c0, b = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ key.v[round][0];
        c1 = (uint32_t)b;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ key.v[round][1];
        c3 = (uint32_t)a;
    }
    return draws4{ { c0, c1, c2, c3 } };
}
__device__ inline draws4 philox(uint64_t block, uint64_t hi, uint64_t key)
{
    philox_keys keys;
#pragma unroll
    for (int round = 0; round < PHILOX_ROUNDS; round++)
        philox_key(&keys, round, key);
    return philox(block, hi, keys);
}

/* The finaliser of lm_rng_key: lm_rng_key(seed, 0, x) is seed ^ mixed(x). */
__device__ inline uint64_t mixed(uint64_t x)
{
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return x ^ x >> 31;
}

/* lm_rng_key of the present run of the graph: the key of streams whose indices count within a
 * micro-batch. */
__device__ inline uint64_t micro_key(const lm_step *step)
{
    return step->seed ^ mixed((uint64_t)step->step << 24 ^ (uint64_t)step->micro);
}

/* The high word of a * b. */
__device__ inline uint64_t product_high(uint64_t a, uint64_t b)
{
    uint64_t al = (uint32_t)a, ah = a >> 32, bl = (uint32_t)b, bh = b >> 32;
    uint64_t mid = ah * bl + (al * bl >> 32), low = al * bh + (uint32_t)mid;
    return ah * bh + (mid >> 32) + (low >> 32);
}

/* The index of a mask's first draw, of `count` in each run of the graph (kernels/elementwise.h), and what
 * lm_rng_first does to `hi` of its stream. */
__device__ inline uint64_t dropout_base(const lm_step *step, uint64_t count, uint64_t *hi)
{
    uint64_t run = (uint64_t)step->step * 65536 + (uint64_t)step->micro;
    *hi ^= mixed(product_high(run, count));
    return run * count;
}

/* f(i, draw) for each element i of a part of a whole: draws are where its elements are there.  A thread takes four elements, whose
 * draws are mostly those of one block or two. */
template <class F>
__device__ inline void over_part(int64_t count, const lm_origin &origin, uint64_t hi,
                                 const lm_step *run, F f)
{
    uint64_t base = dropout_base(run, (uint64_t)origin.count, &hi), key = run->seed;
#pragma unroll 1
    for (int64_t b = global_thread(); 4 * b < count; b += global_threads()) {
        uint64_t block = 0;
        int64_t left;
        draws4 d = {};
        for (int64_t i = 4 * b; i < 4 * b + 4 && i < count; i++) {
            uint64_t at = base + (uint64_t)lm_origin_index(&origin, i, &left);
            if (i == 4 * b || at / 4 != block)
                d = philox(block = at / 4, hi, key);
            f(i, d.v[at % 4]);
        }
    }
}

/* A draw at or above this keeps its element. */
inline uint64_t dropout_threshold(double p)
{
    return (uint64_t)floor(p * 4294967296.0);
}

#endif
