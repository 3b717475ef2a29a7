/* SPDX-License-Identifier: Apache-2.0 */
/* hash.c -- XXH3 of libxxhash (its output is frozen since 0.8.0). */
#include "base/hash.h"

#include <string.h>
#define XXH_STATIC_LINKING_ONLY /* for sizeof(XXH3_state_t) */
#if defined(__x86_64__) && __has_include(<xxh_x86dispatch.h>)
#include <xxh_x86dispatch.h> /* chooses AVX2 or AVX-512 at run time: twice as fast */
#else
#include <xxhash.h>
#endif

_Static_assert(sizeof(XXH3_state_t) <= sizeof(lm_hash128), "lm_hash128 holds the state");

uint64_t lm_hash64(const void *data, size_t len, uint64_t seed)
{
    return XXH3_64bits_withSeed(data, len, seed);
}

uint64_t lm_hash_str(const char *s)
{
    return XXH3_64bits(s, strlen(s));
}

static XXH3_state_t *state_of(const lm_hash128 *h)
{
    return (XXH3_state_t *)(uintptr_t)h->state;
}

void lm_hash128_init(lm_hash128 *h)
{
    XXH3_INITSTATE(state_of(h));
    XXH3_128bits_reset(state_of(h));
}

void lm_hash128_add(lm_hash128 *h, const void *data, size_t len)
{
    if (len)
        XXH3_128bits_update(state_of(h), data, len);
}

void lm_hash128_end(const lm_hash128 *h, uint8_t digest[16])
{
    XXH128_canonical_t c;

    XXH128_canonicalFromHash(&c, XXH3_128bits_digest(state_of(h)));
    memcpy(digest, c.digest, 16);
}

uint64_t lm_hash128_end64(const lm_hash128 *h)
{
    return XXH3_64bits_digest(state_of(h));
}

void lm_hash128_hex(const uint8_t digest[16], char hex[33])
{
    for (int i = 0; i < 16; i++) {
        hex[2 * i] = "0123456789abcdef"[digest[i] >> 4];
        hex[2 * i + 1] = "0123456789abcdef"[digest[i] & 15];
    }
    hex[32] = '\0';
}
