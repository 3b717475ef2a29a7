/* SPDX-License-Identifier: Apache-2.0 */
/* arena.c -- a chain of blocks; allocation increments a pointer.
 *
 * Under AddressSanitizer the unused part of each block is poisoned, with a gap behind every
 * allocation. */
#include <string.h>

#include "base/mem.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer) && !defined(__SANITIZE_ADDRESS__)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
enum { GAP = 16 };
#else
#define ASAN_POISON_MEMORY_REGION(p, n)   ((void)(p), (void)(n))
#define ASAN_UNPOISON_MEMORY_REGION(p, n) ((void)(p), (void)(n))
enum { GAP = 0 };
#endif

typedef struct block {
    struct block *next;
    size_t size; /* bytes of data */
    size_t used;
    char *data; /* 64-byte aligned, follows the header */
} block;

enum { HEADER = 64 };

struct lm_arena {
    block *first, *current;
    size_t block_bytes;
};

static lm_code add_block(lm_arena *a, size_t bytes, lm_err *e)
{
    size_t whole;
    block *b;
    lm_code rc;

    if (bytes < a->block_bytes)
        bytes = a->block_bytes;
    if (!lm_add_ok(bytes, HEADER, &whole))
        return lm_fail(e, LM_ELIMIT, "memory", NULL, "an arena block of %zu bytes", bytes);
    rc = lm_alloc_n(&b, whole, 1, "an arena", e);
    if (rc)
        return rc;
    b->size = bytes;
    b->data = (char *)b + HEADER;
    ASAN_POISON_MEMORY_REGION(b->data, b->size);
    if (a->current) {
        b->next = a->current->next;
        a->current->next = b;
    } else {
        a->first = b;
    }
    a->current = b;
    return LM_OK;
}

lm_code lm_arena_new(lm_arena **out, size_t block_bytes, lm_err *e)
{
    lm_code rc = lm_alloc_n(out, 1, sizeof **out, "an arena", e);

    if (!rc)
        (*out)->block_bytes = block_bytes < 1024 ? 1024 : block_bytes;
    return rc;
}

/* Set *at to the offset at which the next object of this alignment would start in b; false if it
 * does not fit. */
static bool fits(const block *b, size_t bytes, size_t align, size_t *at)
{
    size_t end;

    *at = (b->used + align - 1) & ~(align - 1);
    return lm_add_ok(*at, bytes, &end) && end <= b->size;
}

lm_code lm_arena_alloc(lm_arena *a, void *out_ptr, size_t n, size_t size, lm_err *e)
{
    size_t bytes, align, at = 0;
    void *p;
    lm_code rc;

    if (!lm_mul_ok(n, size, &bytes) || bytes > PTRDIFF_MAX)
        return lm_fail(e, LM_ELIMIT, "memory", NULL, "%zu times %zu bytes do not fit 64 bits", n,
                       size);
    align = bytes >= 64 ? 64 : 16;
    while (!a->current || !fits(a->current, bytes + GAP, align, &at)) {
        if (a->current && a->current->next) {
            a->current = a->current->next;
            a->current->used = 0;
            continue;
        }
        rc = add_block(a, bytes + GAP, e);
        if (rc)
            return rc;
    }
    p = a->current->data + at;
    ASAN_UNPOISON_MEMORY_REGION(p, bytes);
    memset(p, 0, bytes);
    a->current->used = at + bytes + GAP;
    memcpy(out_ptr, &p, sizeof p);
    return LM_OK;
}

lm_code lm_arena_strdup(lm_arena *a, char **out, const char *s, size_t len, lm_err *e)
{
    size_t bytes;
    lm_code rc;

    if (!lm_add_ok(len, 1, &bytes))
        return lm_fail(e, LM_ELIMIT, "memory", NULL, "a string of %zu bytes", len);
    rc = lm_arena_alloc(a, out, bytes, 1, e);
    if (!rc && len)
        memcpy(*out, s, len);
    return rc;
}

void lm_arena_free(lm_arena *a)
{
    if (!a)
        return;
    for (block *b = a->first, *next; b; b = next) {
        next = b->next;
        ASAN_UNPOISON_MEMORY_REGION(b->data, b->size);
        lm_free(b);
    }
    lm_free(a);
}
