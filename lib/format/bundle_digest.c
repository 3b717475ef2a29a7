/* SPDX-License-Identifier: Apache-2.0 */
/* bundle_digest.c -- the digest of a bundle's content, independent of the form in which its files
 * are stored. */
#include <string.h>

#include "base/hash.h"
#include "format/lmz_table.h"

enum { PIECE = 1 << 20 };

typedef struct {
    lmz_named_digest *d;
    size_t n, cap;
    lm_arena *names;
    uint8_t *room; /* PIECE bytes */
    lm_sink *sink;
    uint64_t done, total;
} digests;

static lm_code add(digests *s, const char *name, const lm_hash128 *h, lm_err *e)
{
    char *copy;
    lm_code rc = lm_grow(&s->d, &s->cap, s->n + 1, sizeof *s->d, "digests of files", e);

    if (!rc)
        rc = lm_arena_strdup(s->names, &copy, name, strlen(name), e);
    if (rc)
        return rc;
    s->d[s->n].name = copy;
    lm_hash128_end(h, s->d[s->n++].digest);
    return LM_OK;
}

static void report_bytes(digests *s, size_t bytes)
{
    s->done += bytes;
    lm_progress(s->sink, "reading for its digest", (double)s->done, (double)s->total, "bytes",
                NULL);
}

static lm_code add_random(digests *s, const lm_bundle *b, const lm_bundle_file *f, lm_err *e)
{
    const uint8_t *map = lm_bundle_map(b, f);
    lm_hash128 h;
    lm_code rc = LM_OK;

    lm_hash128_init(&h);
    for (uint64_t at = 0; at < f->bytes && !rc; at += PIECE) {
        size_t n = f->bytes - at < PIECE ? (size_t)(f->bytes - at) : PIECE;
        if (!map)
            rc = lm_bundle_pread(b, f, at, s->room, n, e);
        if (rc)
            break;
        lm_hash128_add(&h, map ? map + at : s->room, n);
        if (map)
            lm_bundle_forget(b, f, at, n);
        report_bytes(s, n);
    }
    return rc ? rc : add(s, f->name, &h, e);
}

static lm_code add_forward(digests *s, lm_bundle *b, lm_err *e)
{
    const lm_bundle_file *f = NULL;
    lm_code rc;

    while (!(rc = lm_bundle_next(b, &f, e)) && f) {
        lm_hash128 h;
        size_t got = 1;

        lm_hash128_init(&h);
        while (!rc && got) {
            rc = lm_bundle_read(b, s->room, PIECE, &got, e);
            if (!rc)
                lm_hash128_add(&h, s->room, got);
            report_bytes(s, got);
        }
        rc = rc ? rc : add(s, f->name, &h, e);
        if (rc)
            break;
    }
    return rc;
}

lm_code lm_bundle_digest(lm_bundle *b, char out[33], lm_sink *sink, lm_err *e)
{
    const lm_lmz *z = lm_bundle_lmz(b);
    digests s = { .sink = sink };
    uint8_t digest[16];
    lm_code rc;

    if (z && lm_lmz_about(z)->digest[0]) { /* a stream has it at its end */
        memcpy(out, lm_lmz_about(z)->digest, 33);
        return LM_OK;
    }
    rc = lm_alloc_n(&s.room, PIECE, 1, "digesting", e);
    rc = rc ? rc : lm_arena_new(&s.names, 4096, e);
    if (!rc && lm_bundle_random(b)) {
        for (size_t i = 0; i < lm_bundle_count(b); i++)
            s.total += lm_bundle_at(b, i)->bytes;
        for (size_t i = 0; i < lm_bundle_count(b) && !rc; i++)
            rc = add_random(&s, b, lm_bundle_at(b, i), e);
    } else if (!rc) {
        rc = add_forward(&s, b, e);
    }
    if (!rc) {
        lmz_content_digest(s.d, s.n, digest);
        lm_hash128_hex(digest, out);
    }
    lm_free(s.d);
    lm_free(s.room);
    lm_arena_free(s.names);
    return rc;
}
