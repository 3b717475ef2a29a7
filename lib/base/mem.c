/* SPDX-License-Identifier: Apache-2.0 */
/* mem.c -- the only place that calls malloc and its relatives. */
#include "base/mem.h"

#include <errno.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/text.h"

enum { CACHE_LINE = 64, HUGE_PAGE = 2 << 20 };

static atomic_uint_least64_t calls;

uint64_t lm_alloc_count(void)
{
    return atomic_load_explicit(&calls, memory_order_relaxed);
}

static void count_call(void)
{
    atomic_fetch_add_explicit(&calls, 1, memory_order_relaxed);
}

static lm_code no_memory(size_t bytes, const char *purpose, lm_err *e)
{
    char need[32], have[32];

    return lm_fail(e, LM_ELIMIT, "memory", NULL, "%s needed for %s, %s free",
                   lm_show_bytes((double)bytes, need), purpose,
                   lm_show_bytes((double)lm_mem_available(), have));
}

static lm_code too_many(size_t n, size_t size, const char *purpose, lm_err *e)
{
    return lm_fail(e, LM_ELIMIT, "memory", NULL, "%zu times %zu byte%s for %s do not fit 64 bits",
                   n, size, lm_plural(size), purpose);
}

/* The pointer travels as void * and is stored bytewise: out_ptr points at a pointer of any type. */
static void store(void *out_ptr, void *p)
{
    memcpy(out_ptr, &p, sizeof p);
}

lm_code lm_alloc_n(void *out_ptr, size_t n, size_t size, const char *purpose, lm_err *e)
{
    size_t bytes;
    void *p = NULL;

    if (!lm_mul_ok(n, size, &bytes) || bytes > PTRDIFF_MAX)
        return too_many(n, size, purpose, e);
    count_call();
    if (bytes < CACHE_LINE) {
        p = calloc(1, bytes ? bytes : 1);
    } else if (posix_memalign(&p, CACHE_LINE, bytes)) {
        p = NULL;
    } else {
        memset(p, 0, bytes);
    }
    if (!p)
        return no_memory(bytes, purpose, e);
    store(out_ptr, p);
    return LM_OK;
}

lm_code lm_realloc_n(void *inout_ptr, size_t n, size_t size, const char *purpose, lm_err *e)
{
    size_t bytes;
    void *p;

    if (!lm_mul_ok(n, size, &bytes) || bytes > PTRDIFF_MAX)
        return too_many(n, size, purpose, e);
    memcpy(&p, inout_ptr, sizeof p);
    count_call();
    p = realloc(p, bytes ? bytes : 1);
    if (!p)
        return no_memory(bytes, purpose, e);
    store(inout_ptr, p);
    return LM_OK;
}

lm_code lm_grow(void *inout_ptr, size_t *cap, size_t need, size_t size, const char *purpose,
                lm_err *e)
{
    size_t n = *cap;
    lm_code rc;

    if (need <= n)
        return LM_OK;
    n = n < 16 ? 16 : n;
    while (n < need) {
        if (!lm_mul_ok(n, 2, &n))
            return too_many(need, size, purpose, e);
    }
    rc = lm_realloc_n(inout_ptr, n, size, purpose, e);
    if (!rc)
        *cap = n;
    return rc;
}

lm_code lm_strdup(char **out, const char *s, lm_err *e)
{
    size_t n = strlen(s) + 1;
    lm_code rc = lm_alloc_n(out, n, 1, "a string", e);

    if (!rc)
        memcpy(*out, s, n);
    return rc;
}

lm_code lm_asprintf(char **out, lm_err *e, const char *fmt, ...)
{
    va_list ap, again;
    int n;
    lm_code rc;

    va_start(ap, fmt);
    va_copy(again, ap);
    n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    if (n < 0)
        rc = lm_fail(e, LM_EBUG, "lm_asprintf", NULL, "bad format '%s'", fmt);
    else
        rc = lm_alloc_n(out, (size_t)n + 1, 1, "a string", e);
    if (!rc)
        vsnprintf(*out, (size_t)n + 1, fmt, again);
    va_end(again);
    return rc;
}

void lm_free(void *p)
{
    free(p);
}

void lm_mem_trim(void)
{
#ifdef __GLIBC__
    malloc_trim(0);
#endif
}

/* Blocks of at least a huge page start on one: map one page more and unmap both ends. */
static void *map_aligned(size_t bytes)
{
    size_t total, head;
    char *p;

    if (bytes < HUGE_PAGE) {
        p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        return p == MAP_FAILED ? NULL : p;
    }
    if (!lm_add_ok(bytes, HUGE_PAGE, &total))
        return NULL;
    p = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return NULL;
    head = (HUGE_PAGE - (uintptr_t)p % HUGE_PAGE) % HUGE_PAGE;
    if (head)
        munmap(p, head);
    if (HUGE_PAGE - head)
        munmap(p + head + bytes, HUGE_PAGE - head);
    madvise(p + head, bytes, MADV_HUGEPAGE);
    return p + head;
}

static bool round_up(size_t bytes, size_t *out)
{
    if (!lm_add_ok(bytes ? bytes : 1, 4095, out))
        return false;
    *out &= ~(size_t)4095;
    return true;
}

lm_code lm_block_alloc(void **out, size_t bytes, const char *purpose, lm_err *e)
{
    size_t whole;

    count_call();
    if (!round_up(bytes, &whole))
        return no_memory(bytes, purpose, e);
    /* The kernel overcommits and kills the process later.  All of a planned block will be written,
     * so refuse a block larger than the free memory here, where an error can still give the
     * reason. */
    if (whole > ((size_t)64 << 20) && whole > lm_mem_available())
        return no_memory(bytes, purpose, e);
    *out = map_aligned(whole);
    return *out ? LM_OK : no_memory(bytes, purpose, e);
}

void lm_block_free(void *p, size_t bytes)
{
    size_t whole;

    if (p && round_up(bytes, &whole))
        munmap(p, whole);
}

lm_code lm_lazy_alloc(void *out_ptr, size_t n, size_t size, const char *purpose, lm_err *e)
{
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    size_t bytes, whole;
    void *p;

    if (!lm_mul_ok(n, size, &bytes) || !round_up(bytes, &whole) || whole > PTRDIFF_MAX)
        return too_many(n, size, purpose, e);
    count_call();
    p = mmap(NULL, whole, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (p == MAP_FAILED)
        return no_memory(bytes, purpose, e);
    if (whole >= HUGE_PAGE) /* a huge page for each few bytes would be the memory that is saved */
        madvise(p, whole, MADV_NOHUGEPAGE);
    store(out_ptr, p);
    return LM_OK;
}

void lm_lazy_free(void *p, size_t n, size_t size)
{
    lm_block_free(p, n * size);
}
