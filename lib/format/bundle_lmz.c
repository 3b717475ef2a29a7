/* SPDX-License-Identifier: Apache-2.0 */
/* bundle_lmz.c -- the files of an .lmz (lmz.h): by its index, decoded on request, or forward from a
 * stream. */
#include <string.h>

#include "base/mem.h"
#include "format/bundle_impl.h"
#include "format/lmz.h"

bool lm_bundle_is_lmz(const uint8_t *p, size_t n)
{
    return n >= LM_LMZ_MAGIC_BYTES && !memcmp(p, LM_LMZ_MAGIC, LM_LMZ_MAGIC_BYTES);
}

static lm_code lmz_next(lm_bundle *b, const char **name, uint64_t *bytes, lm_err *e)
{
    const lm_bundle_file *f = NULL;
    bool zeros;
    lm_code rc = lm_lmz_next(b->state, &f, e);

    *name = !rc && f ? f->name : NULL;
    *bytes = !rc && f ? f->bytes : 0;
    return rc || f ? rc : lm_bundle_raw_drain(&b->raw, &zeros, e);
}

static lm_code lmz_read(lm_bundle *b, void *dst, size_t cap, size_t *got, lm_err *e)
{
    return lm_lmz_read(b->state, dst, cap, got, e);
}

static lm_code lmz_pread(const lm_bundle *b, const lm_bundle_entry *x, uint64_t from, void *dst,
                         size_t bytes, lm_err *e)
{
    return lm_lmz_pread(b->state, x->number, from, dst, bytes, e);
}

static void lmz_close(lm_bundle *b)
{
    lm_lmz_free(b->state);
    b->state = NULL;
}

lm_code lm_bundle_lmz_open(lm_bundle *b, lm_err *e)
{
    static const lm_bundle_ops ops = { NULL, NULL, lmz_pread, lmz_close };
    lm_bundle_entry *x;
    lm_lmz *z = NULL;
    lm_code rc = lm_lmz_open(b->path, &b->o, &z, e);

    b->kind = LM_BUNDLE_LMZ;
    b->random = true;
    if (rc)
        return rc;
    b->state = z;
    b->ops = &ops;
    for (size_t i = 0; !rc && i < lm_lmz_files(z); i++)
        rc = lm_bundle_add(b, lm_lmz_file(z, i)->name, lm_lmz_file(z, i)->bytes, &x, e);
    return rc;
}

lm_code lm_bundle_lmz_stream(lm_bundle *b, lm_err *e)
{
    static const lm_bundle_ops ops = { lmz_next, lmz_read, NULL, lmz_close };
    lm_lmz *z = NULL;
    lm_code rc = lm_lmz_stream_open(lm_bundle_raw_read, &b->raw, b->path, &b->o, &z, e);

    b->kind = LM_BUNDLE_LMZ;
    if (rc)
        return rc;
    b->state = z;
    b->ops = &ops;
    return LM_OK;
}

const lm_lmz *lm_bundle_lmz(const lm_bundle *b)
{
    return b->kind == LM_BUNDLE_LMZ && b->random && b->ops ? b->state : NULL;
}

/* ---- Writing ---- */

static lm_code open_base(const lm_bundle_opts *o, const char *where, lm_bundle **base, char **name,
                         lm_err *e)
{
    lm_bundle_opts how = *o;
    lm_code rc = lm_lmz_base_name(where, o->base, name, e);

    how.base = NULL; /* opened with the base that it names */
    rc = rc ? rc : lm_bundle_open(o->base, &how, base, e);
    return rc ? rc : lm_bundle_spool(*base, e);
}

lm_code lm_bundle_lmz_create(const lm_bundle_opts *o, lm_write_fn write, void *ctx,
                             const char *where, lm_bundle_lmz_out *out, lm_err *e)
{
    lm_lmz_opts how = { .level = o->level, .par = o->par, .sink = o->sink };
    lm_code rc = o->base ? open_base(o, where, &out->base, &out->base_name, e) : LM_OK;

    how.base = out->base;
    how.base_name = out->base_name;
    return rc ? rc : lm_lmz_create_on(write, ctx, where, &how, &out->w, e);
}

lm_code lm_bundle_lmz_commit(lm_bundle_lmz_out *out, lm_err *e)
{
    lm_lmz_writer *w = out->w;

    out->w = NULL;
    return lm_lmz_close(w, e);
}

void lm_bundle_lmz_drop(lm_bundle_lmz_out *out)
{
    lm_lmz_drop(out->w);
    lm_bundle_close(out->base);
    lm_free(out->base_name);
    *out = (lm_bundle_lmz_out){ 0 };
}
