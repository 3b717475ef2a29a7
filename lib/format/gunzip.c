/* SPDX-License-Identifier: Apache-2.0 */
/* gunzip.c -- see gunzip.h.  zlib decodes and compares checksums.
 *
 * Input comes in borrowed blocks that may end anywhere, so the header of a member, which must be
 * checked as a whole, is first gathered in `head` and decoded from there. */
#include "format/gunzip.h"

#include <string.h>
#include <zlib.h>

#include "base/mem.h"

enum { OUT = 256 * 1024, MAGIC = 3, HEADER = 10 };

struct lm_gunzip {
    lm_block_fn next;
    void *ctx;
    char *where;
    bool skip, started, gzip, ended;
    bool in_member, damaged; /* a member was damaged: search for the next one */
    z_stream z;
    bool z_open;
    uint8_t head[HEADER]; /* [head_at, head_n) comes before [at, n) */
    size_t head_at, head_n;
    const uint8_t *in;
    size_t at, n;
    uint64_t before; /* input bytes before the block */
    int64_t member;  /* from 1 */
    uint64_t member_at;
    lm_err why;
    uint8_t *out;
};

/* Read more input when all of it is consumed; at == n afterwards means the end. */
static lm_code refill(lm_gunzip *g, lm_err *e)
{
    const void *p = NULL;
    size_t n = 0;
    if (g->at < g->n || g->ended)
        return LM_OK;
    lm_code rc = g->next(g->ctx, &p, &n, e);
    g->ended = !rc && n == 0;
    if (rc || g->ended) /* find_member may go back in the last block */
        return rc;
    g->before += g->n;
    g->in = p;
    g->at = 0;
    g->n = n;
    return LM_OK;
}

/* Gather up to `want` bytes in head. */
static lm_code gather(lm_gunzip *g, size_t want, lm_err *e)
{
    memmove(g->head, g->head + g->head_at, g->head_n - g->head_at);
    g->head_n -= g->head_at;
    g->head_at = 0;
    while (g->head_n < want) {
        lm_code rc = refill(g, e);
        if (rc || g->at == g->n)
            return rc;
        g->head[g->head_n++] = g->in[g->at++];
    }
    return LM_OK;
}

static uint64_t position(const lm_gunzip *g)
{
    return g->before + g->at - (g->head_n - g->head_at);
}

static bool is_magic(const uint8_t *p, size_t n)
{
    return n >= MAGIC && p[0] == 0x1f && p[1] == 0x8b && p[2] == 8;
}

/* Behind damage any bytes may look like a header by chance, so all fields must be ones that
 * programs write. */
static bool is_header(const uint8_t *p, size_t n)
{
    return n == HEADER && is_magic(p, n) && p[3] < 0x20 && (p[8] == 0 || p[8] == 2 || p[8] == 4) &&
           (p[9] <= 13 || p[9] == 255);
}

static lm_code damage(lm_gunzip *g, const char *what, lm_err *e)
{
    lm_err why = { 0 };
    lm_code rc = lm_fail(&why, LM_EFORMAT, g->where, "fetch or compress it again",
                         "damaged or truncated gzip: member %lld, which begins at byte %llu: %s",
                         (long long)g->member, (unsigned long long)g->member_at, what);
    g->in_member = false;
    if (!g->skip) {
        if (!e->code)
            *e = why;
        return rc;
    }
    g->damaged = true;
    g->why = why;
    return LM_OK;
}

/* Move to the next member (in_member) or to the end of the input. */
static lm_code begin_member(lm_gunzip *g, lm_err *e)
{
    lm_code rc;
    do { /* padding */
        rc = gather(g, 1, e);
    } while (!rc && g->head_n && g->head[0] == 0 && (g->head_at = 1));
    if (rc || !g->head_n)
        return rc;
    g->member++;
    g->member_at = position(g);
    if (inflateReset(&g->z) != Z_OK)
        return lm_fail(e, LM_EBUG, g->where, NULL, "zlib does not start again");
    g->in_member = true;
    return gather(g, MAGIC, e);
}

/* Skip to the next header, beginning after the first byte of the damaged member if that is still in
 * memory. */
static lm_code find_member(lm_gunzip *g, lm_err *e)
{
    g->damaged = false;
    g->head_at = g->head_n = 0;
    if (g->member_at >= g->before)
        g->at = (size_t)(g->member_at - g->before) + 1;
    else
        g->at = 0;
    lm_code rc = LM_OK;
    while (!(rc = gather(g, HEADER, e)) && g->head_n == HEADER && !is_header(g->head, g->head_n))
        g->head_at = 1;
    if (!rc && g->head_n < HEADER)
        g->head_at = g->head_n = 0;
    return rc;
}

/* Decode a piece; *n = 0: the member has ended or is damaged. */
static lm_code inflate_some(lm_gunzip *g, size_t *n, lm_err *e)
{
    g->z.next_out = g->out;
    g->z.avail_out = OUT;
    int r = Z_OK;
    while (r == Z_OK && g->z.avail_out == OUT) {
        bool head = g->head_at < g->head_n;
        lm_code rc = head ? LM_OK : refill(g, e);
        if (rc)
            return rc;
        if (!head && g->at == g->n) {
            *n = 0;
            return damage(g, "it is truncated", e);
        }
        size_t have = head ? g->head_n - g->head_at : g->n - g->at;
        uInt take = have > UINT32_MAX ? UINT32_MAX : (uInt)have;
        g->z.next_in = head ? g->head + g->head_at : (uint8_t *)g->in + g->at;
        g->z.avail_in = take;
        r = inflate(&g->z, Z_NO_FLUSH);
        *(head ? &g->head_at : &g->at) += take - g->z.avail_in;
    }
    *n = OUT - g->z.avail_out;
    if (r == Z_STREAM_END)
        g->in_member = false;
    else if (r == Z_MEM_ERROR)
        return lm_fail(e, LM_ELIMIT, g->where, NULL, "out of memory while decoding");
    else if (r != Z_OK)
        return damage(g, g->z.msg ? g->z.msg : "it cannot be decoded", e);
    return LM_OK;
}

static lm_code start(lm_gunzip *g, lm_err *e)
{
    lm_code rc = gather(g, MAGIC, e);
    g->started = true;
    g->gzip = !rc && is_magic(g->head, g->head_n);
    if (rc || !g->gzip)
        return rc;
    g->z_open = inflateInit2(&g->z, 15 + 16) == Z_OK; /* + 16: gzip and nothing else */
    return g->z_open ? lm_alloc_n(&g->out, OUT, 1, "a block of input", e)
                     : lm_fail(e, LM_ELIMIT, g->where, NULL, "out of memory for a decoder");
}

/* Input that is not gzip: the gathered bytes, then block by block. */
static lm_code pass(lm_gunzip *g, const void **p, size_t *n, lm_err *e)
{
    if (g->head_at < g->head_n) {
        *p = g->head + g->head_at;
        *n = g->head_n - g->head_at;
        g->head_at = g->head_n;
        return LM_OK;
    }
    lm_code rc = refill(g, e);
    *p = g->in + g->at;
    *n = g->n - g->at;
    g->at = g->n;
    return rc;
}

lm_code lm_gunzip_block(void *ctx, const void **p, size_t *n, lm_err *e)
{
    lm_gunzip *g = ctx;
    lm_code rc = g->started ? LM_OK : start(g, e);
    *n = 0;
    if (!rc && !g->gzip)
        return pass(g, p, n, e);
    if (!rc && g->damaged)
        rc = find_member(g, e);
    *p = g->out;
    while (!rc && !*n && !g->damaged) {
        if (!g->in_member)
            rc = begin_member(g, e);
        if (rc || !g->in_member)
            break;
        rc = inflate_some(g, n, e);
        if (g->damaged)
            *n = 0;
    }
    return rc;
}

bool lm_gunzip_is_gzip(const lm_gunzip *g)
{
    return g->gzip;
}

bool lm_gunzip_resume(lm_gunzip *g, lm_err *why)
{
    if (g->damaged && why)
        *why = g->why;
    return g->damaged;
}

lm_code lm_gunzip_new(lm_block_fn next, void *ctx, const char *where, bool skip, lm_gunzip **out,
                      lm_err *e)
{
    lm_gunzip *g;
    lm_code rc = lm_alloc_n(&g, 1, sizeof *g, "a decoder", e);
    if (rc)
        return rc;
    g->next = next;
    g->ctx = ctx;
    g->skip = skip;
    rc = lm_strdup(&g->where, where, e);
    if (rc) {
        lm_gunzip_free(g);
        return rc;
    }
    *out = g;
    return LM_OK;
}

void lm_gunzip_free(lm_gunzip *g)
{
    if (!g)
        return;
    if (g->z_open)
        inflateEnd(&g->z);
    lm_free(g->out);
    lm_free(g->where);
    lm_free(g);
}
