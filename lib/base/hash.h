/* hash.h -- one home for hashing: XXH3 for tables and checksums of content. */
#ifndef LM_BASE_HASH_H
#define LM_BASE_HASH_H

#include <stddef.h>
#include <stdint.h>

uint64_t lm_hash64(const void *data, size_t len, uint64_t seed);
uint64_t lm_hash_str(const char *s);

#endif
