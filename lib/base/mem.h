/* SPDX-License-Identifier: Apache-2.0 */
/* mem.h -- all memory of the library comes from here: checked heap blocks and arenas.
 *
 * malloc, calloc and realloc appear in mem.c only.  A failure is LM_ELIMIT with the number of bytes
 * and the purpose.  The caller owns a returned pointer and frees it with lm_free (NULL is fine). */
#ifndef LM_BASE_MEM_H
#define LM_BASE_MEM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

/* a*b (or a+b) into *out; false when it does not fit.  Every product of sizes read from outside,
 * and every product of dimensions, goes through these. */
static inline bool lm_mul_ok(size_t a, size_t b, size_t *out)
{
    return !__builtin_mul_overflow(a, b, out);
}
static inline bool lm_add_ok(size_t a, size_t b, size_t *out)
{
    return !__builtin_add_overflow(a, b, out);
}
static inline bool lm_mul_i64_ok(int64_t a, int64_t b, int64_t *out)
{
    return !__builtin_mul_overflow(a, b, out);
}

/* n objects of `size` bytes, zeroed, 64-byte aligned when at least 64 bytes in all.  `purpose` is a
 * short phrase for the message ("tokens of a shard").  n = 0 gives a unique non-NULL pointer. */
lm_code lm_alloc_n(void *out_ptr, size_t n, size_t size, const char *purpose, lm_err *e);
/* Resize *inout_ptr (a pointer to a pointer from lm_alloc_n, or to NULL) to n objects; new bytes
 * are not zeroed.  On failure the old block is untouched. */
lm_code lm_realloc_n(void *inout_ptr, size_t n, size_t size, const char *purpose, lm_err *e);
/* Grow a dynamic array: make room for `need` elements, doubling *cap.  *inout_ptr and *cap change
 * together or not at all. */
lm_code lm_grow(void *inout_ptr, size_t *cap, size_t need, size_t size, const char *purpose,
                lm_err *e);
lm_code lm_strdup(char **out, const char *s, lm_err *e);
/* printf into a fresh string that the caller owns. */
lm_code lm_asprintf(char **out, lm_err *e, const char *fmt, ...) LM_PRINTF(3, 4);
void lm_free(void *p);

/* A large block for planned memory (parameters, activations, states): page-aligned, zeroed, huge
 * pages requested.  Release with lm_block_free and the same size. */
lm_code lm_block_alloc(void **out, size_t bytes, const char *purpose, lm_err *e);
void lm_block_free(void *p, size_t bytes);

/* A table of n objects of `size` bytes, zeroed, for sizes that are rarely needed: memory is taken page by page as it is
 * written, and only address space for the rest.  Release with lm_lazy_free and the same sizes (NULL is fine). */
lm_code lm_lazy_alloc(void *out_ptr, size_t n, size_t size, const char *purpose, lm_err *e);
void lm_lazy_free(void *p, size_t n, size_t size);

/* Give back to the system what lm_free has released, after work that took much for a short time:
 * freed blocks below one that stays, and those that the library would keep for the next call. */
void lm_mem_trim(void);

/* Number of calls to lm_alloc_n, lm_realloc_n, lm_block_alloc and lm_lazy_alloc so far in this process; a training
 * step must leave it flat. */
uint64_t lm_alloc_count(void);
/* Resident set of this process, now and at its peak, in bytes (0 if unknown). */
size_t lm_rss_now(void);
size_t lm_rss_peak(void);
/* Bytes of memory that this process may still use (free and reclaimable, bounded by the cgroup). */
size_t lm_mem_available(void);

/* An arena for what lives and dies together.  Zero-initialise it; blocks grow as needed. */
typedef struct lm_arena lm_arena;
lm_code lm_arena_new(lm_arena **out, size_t block_bytes, lm_err *e);
/* Zeroed, 64-byte aligned when at least 64 bytes, else 16; valid until lm_arena_free. */
lm_code lm_arena_alloc(lm_arena *a, void *out_ptr, size_t n, size_t size, lm_err *e);
lm_code lm_arena_strdup(lm_arena *a, char **out, const char *s, size_t len, lm_err *e);
void lm_arena_free(lm_arena *a);

#endif
