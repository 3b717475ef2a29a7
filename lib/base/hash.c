/* hash.c -- XXH3 of libxxhash (its output is frozen since 0.8.0). */
#include "base/hash.h"

#include <string.h>
#include <xxhash.h>

uint64_t lm_hash64(const void *data, size_t len, uint64_t seed)
{
    return XXH3_64bits_withSeed(data, len, seed);
}

uint64_t lm_hash_str(const char *s)
{
    return XXH3_64bits(s, strlen(s));
}
