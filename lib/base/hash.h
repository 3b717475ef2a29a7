/* SPDX-License-Identifier: Apache-2.0 */
/* hash.h -- all hashing: XXH3 for tables and checksums of content. */
#ifndef LM_BASE_HASH_H
#define LM_BASE_HASH_H

#include <stddef.h>
#include <stdint.h>

uint64_t lm_hash64(const void *data, size_t len, uint64_t seed);
uint64_t lm_hash_str(const char *s);

/* XXH3-128 over pieces, as xxh128sum prints it: the digest is in canonical order (big-endian). */
typedef struct {
    __attribute__((aligned(64))) unsigned char state[576];
} lm_hash128;
void lm_hash128_init(lm_hash128 *h);
void lm_hash128_add(lm_hash128 *h, const void *data, size_t len);
void lm_hash128_end(const lm_hash128 *h, uint8_t digest[16]); /* of the bytes added so far */
uint64_t lm_hash128_end64(const lm_hash128 *h); /* lm_hash64 of the same bytes, seed 0 */
void lm_hash128_hex(const uint8_t digest[16], char hex[33]);

#endif
