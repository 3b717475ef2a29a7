/* SPDX-License-Identifier: Apache-2.0 */
/* tier_file.c -- pages in an unnamed file, with a checksum each. */
#include "kv/tier_file.h"

#include <errno.h>
#include <unistd.h>

#include "base/file.h"
#include "base/hash.h"
#include "base/mem.h"

enum { AT_ONCE = 64 }; /* pieces in one call of the system */

typedef struct {
    uint64_t hash;
    bool full;
} slot_state;

struct lm_tier_file {
    char *dir;
    int fd;
    size_t bytes;
    int64_t pages;
    slot_state *slot;
    lm_err closed;
};

static uint64_t hash_of(const struct iovec *piece, int n)
{
    lm_hash128 h;
    lm_hash128_init(&h);
    for (int i = 0; i < n; i++)
        lm_hash128_add(&h, piece[i].iov_base, piece[i].iov_len);
    return lm_hash128_end64(&h);
}

/* LM_EBUG unless the pieces are a page and there is such a place. */
static lm_code check_page(const lm_tier_file *t, int64_t place, const struct iovec *piece, int n,
                          lm_err *e)
{
    size_t bytes = 0;
    for (int i = 0; i < n; i++)
        bytes += piece[i].iov_len;
    if (place < 0 || place >= t->pages || bytes != t->bytes)
        return lm_fail(e, LM_EBUG, t->dir, NULL, "a page of %zu bytes at place %lld", bytes,
                       (long long)place);
    return LM_OK;
}

static lm_code close_tier(lm_tier_file *t, const lm_err *e)
{
    if (!t->closed.code)
        t->closed = *e;
    return e->code;
}

/* Pieces from byte `from` of a page on, at most AT_ONCE. */
static int pieces_from(const struct iovec *piece, int n, size_t from, struct iovec out[AT_ONCE])
{
    int k = 0;
    for (int i = 0; i < n && k < AT_ONCE; i++) {
        size_t skip = from < piece[i].iov_len ? from : piece[i].iov_len;
        from -= skip;
        if (skip < piece[i].iov_len)
            out[k++] = (struct iovec){ (char *)piece[i].iov_base + skip, piece[i].iov_len - skip };
    }
    return k;
}

/* Copy a page; false with errno, 0 at the end of the file. */
static bool transfer(const lm_tier_file *t, int64_t place, const struct iovec *piece, int n,
                     bool write)
{
    struct iovec some[AT_ONCE];
    for (size_t done = 0; done < t->bytes;) {
        off_t at = (off_t)place * (off_t)t->bytes + (off_t)done;
        int k = pieces_from(piece, n, done, some);
        errno = 0;
        ssize_t now = write ? pwritev(t->fd, some, k, at) : preadv(t->fd, some, k, at);
        if (now < 0 && errno == EINTR)
            continue;
        if (now <= 0)
            return false;
        done += (size_t)now;
    }
    return true;
}

lm_code lm_tier_file_write(lm_tier_file *t, int64_t place, const struct iovec *piece, int n,
                           lm_err *e)
{
    if (check_page(t, place, piece, n, e))
        return e->code;
    t->slot[place].full = false;
    if (t->closed.code)
        return lm_fail(e, LM_ELIMIT, t->dir, NULL, "the disk tier of the cache is closed");
    uint64_t hash = hash_of(piece, n);
    if (!transfer(t, place, piece, n, true)) {
        errno = errno ? errno : ENOSPC;
        lm_fail_write(t->dir, e);
        return close_tier(t, e);
    }
    t->slot[place] = (slot_state){ hash, true };
    return LM_OK;
}

lm_code lm_tier_file_read(lm_tier_file *t, int64_t place, const struct iovec *piece, int n,
                          lm_err *e)
{
    if (check_page(t, place, piece, n, e))
        return e->code;
    if (!t->slot[place].full)
        return lm_fail(e, LM_EFORMAT, t->dir, NULL, "place %lld of the cache holds no page",
                       (long long)place);
    bool got = transfer(t, place, piece, n, false);
    if (got && hash_of(piece, n) == t->slot[place].hash)
        return LM_OK;
    t->slot[place].full = false;
    if (got || !errno)
        lm_fail(e, LM_EFORMAT, t->dir, NULL, "a page of the cache differs from what was written");
    else
        lm_fail(e, LM_EIO, t->dir, NULL, "cannot read a page of the cache");
    return close_tier(t, e);
}

const lm_err *lm_tier_file_closed(const lm_tier_file *t)
{
    return &t->closed;
}

size_t lm_tier_file_page_cost(void)
{
    return sizeof(slot_state);
}

lm_code lm_tier_file_new(const char *dir, size_t page_bytes, int64_t pages, lm_tier_file **out,
                         lm_err *e)
{
    lm_tier_file *t = NULL;
    int64_t bytes;

    *out = NULL;
    if (page_bytes < 1 || page_bytes > INT64_MAX || pages < 1 ||
        !lm_mul_i64_ok((int64_t)page_bytes, pages, &bytes))
        return lm_fail(e, LM_EUSAGE, dir, NULL, "cannot hold %lld pages of %zu bytes",
                       (long long)pages, page_bytes);
    if (lm_alloc_n(&t, 1, sizeof *t, "the disk tier", e))
        return e->code;
    t->fd = -1;
    t->bytes = page_bytes;
    t->pages = pages;
    if (lm_strdup(&t->dir, dir, e) ||
        lm_lazy_alloc(&t->slot, (size_t)pages, sizeof *t->slot, "the disk tier", e))
        goto fail;
    t->fd = lm_file_unnamed(dir);
    if (t->fd < 0) {
        lm_fail(e, LM_EIO, dir, "name another folder", "cannot make a file for pages of the cache");
        goto fail;
    }
    *out = t;
    return LM_OK;
fail:
    lm_tier_file_free(t);
    return e->code;
}

void lm_tier_file_free(lm_tier_file *t)
{
    if (!t)
        return;
    if (t->fd >= 0)
        close(t->fd);
    lm_free(t->dir);
    lm_lazy_free(t->slot, (size_t)t->pages, sizeof *t->slot);
    lm_free(t);
}
