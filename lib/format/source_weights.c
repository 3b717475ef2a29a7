/* SPDX-License-Identifier: Apache-2.0 */
/* source_weights.c -- a digest of all weights of a model, the same for every form of its files.
 *
 * The bytes of tensors are digested in blocks, each on any thread; the digest is that of the names, types and shapes
 * of tensors with the digests of their blocks. */
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "base/mem.h"
#include "format/folder_impl.h"

enum { BLOCK = 4 << 20, PIECE = 256 << 10 };

/* Part of a tensor, or of its codes. */
typedef struct {
    const lm_st_tensor *t;
    uint64_t from, bytes;
    uint8_t digest[16];
} weight_block;

typedef struct {
    const lm_model_source *m;
    const lm_st_tensor **t; /* in the order of their names */
    uint64_t *bytes;        /* of each */
    weight_block *block;
    size_t tensors, blocks;
    lm_err *failed; /* of each worker */
} weight_digest;

static int by_name(const void *a, const void *b)
{
    const lm_st_tensor *const *x = a, *const *y = b;
    return strcmp((*x)->name, (*y)->name);
}

static void add_number(lm_hash128 *h, uint64_t v)
{
    uint8_t b[8];
    for (int i = 0; i < 8; i++)
        b[i] = (uint8_t)(v >> 8 * i);
    lm_hash128_add(h, b, sizeof b);
}

/* ---- Blocks ---- */

/* Bytes of a tensor: those of its codes where the model is in another format. */
static lm_code size_of(const lm_model_source *m, const lm_st_tensor *t, uint64_t *out, lm_err *e)
{
    lm_tensor_size size;
    bool turned;
    const lm_format *f = lm_model_source_format(m, t, &turned);
    int64_t dim[2] = { t->dim[1], t->dim[0] };
    *out = t->bytes;
    if (!m->by)
        return LM_OK;
    lm_code rc = lm_tensor_bytes(f, t->ndim, turned ? dim : t->dim, &size, e);
    *out = rc ? 0 : size.all;
    return rc;
}

/* Codes that are not mapped can only be read as a whole, and numbers of a stream in their order. */
static bool in_blocks(const lm_model_source *m, const lm_st_tensor *t)
{
    return m->by ? lm_model_source_codes_in_file(m, t) != NULL : true;
}

static lm_code make_blocks(weight_digest *d, lm_err *e)
{
    size_t cap = 0;
    lm_code rc = LM_OK;
    for (size_t i = 0; i < d->tensors && !rc; i++) {
        rc = size_of(d->m, d->t[i], &d->bytes[i], e);
        uint64_t step = in_blocks(d->m, d->t[i]) ? BLOCK : d->bytes[i];
        for (uint64_t at = 0; at < d->bytes[i] && !rc; at += step) {
            uint64_t left = d->bytes[i] - at;
            rc = lm_grow(&d->block, &cap, d->blocks + 1, sizeof *d->block, "digesting weights", e);
            if (!rc)
                d->block[d->blocks++] =
                    (weight_block){ .t = d->t[i], .from = at, .bytes = left < step ? left : step };
        }
    }
    return rc;
}

/* All codes of a tensor, from a copy. */
static lm_code digest_codes(const lm_model_source *m, const weight_block *b, lm_hash128 *h,
                            lm_err *e)
{
    uint8_t *copy = NULL;
    lm_code rc = lm_alloc_n(&copy, b->bytes, 1, "the codes of a tensor", e);
    rc = rc ? rc : lm_model_source_codes(m, b->t, copy, e);
    if (!rc)
        lm_hash128_add(h, copy, b->bytes);
    lm_free(copy);
    return rc;
}

/* Numbers are read and not mapped, so that they take no memory of the process. */
static lm_code digest_numbers(const lm_model_source *m, const weight_block *b, lm_hash128 *h,
                              lm_err *e)
{
    uint8_t *room = NULL;
    lm_code rc = lm_alloc_n(&room, PIECE, 1, "digesting weights", e);
    for (uint64_t at = 0; at < b->bytes && !rc; at += PIECE) {
        size_t n = b->bytes - at < PIECE ? (size_t)(b->bytes - at) : PIECE;
        rc = lm_model_source_peek(m, b->t, b->from + at, room, n, e);
        if (!rc)
            lm_hash128_add(h, room, n);
    }
    lm_free(room);
    return rc;
}

static void digest_blocks(void *ctx, int64_t begin, int64_t end, int worker)
{
    weight_digest *d = ctx;
    lm_err *e = &d->failed[worker];
    for (int64_t i = begin; i < end && !e->code; i++) {
        weight_block *b = &d->block[i];
        const uint8_t *map = d->m->by ? lm_model_source_codes_in_file(d->m, b->t) : NULL;
        lm_hash128 h;
        lm_hash128_init(&h);
        if (map)
            lm_hash128_add(&h, map + b->from, b->bytes);
        else if (d->m->by)
            digest_codes(d->m, b, &h, e);
        else
            digest_numbers(d->m, b, &h, e);
        lm_hash128_end(&h, b->digest);
    }
}

/* ---- The whole ---- */

static lm_code prepare(weight_digest *d, lm_par *par, lm_err *e)
{
    size_t n = d->tensors = lm_model_source_count(d->m);
    if (lm_alloc_n(&d->t, n, sizeof(const lm_st_tensor *), "digesting weights", e) ||
        lm_alloc_n(&d->bytes, n, sizeof *d->bytes, "digesting weights", e) ||
        lm_alloc_n(&d->failed, (size_t)lm_par_threads(par), sizeof *d->failed, "digesting weights",
                   e))
        return e->code;
    for (size_t i = 0; i < n; i++)
        d->t[i] = lm_model_source_at(d->m, i);
    if (n)
        qsort(d->t, n, sizeof(const lm_st_tensor *), by_name);
    return make_blocks(d, e);
}

static void add_tensor(const weight_digest *d, size_t i, lm_hash128 *h)
{
    const lm_st_tensor *t = d->t[i];
    bool turned = false;
    const char *type = d->m->by ? lm_model_source_format(d->m, t, &turned)->name : t->dtype_name;
    lm_hash128_add(h, t->name, strlen(t->name) + 1);
    lm_hash128_add(h, type, strlen(type) + 1);
    add_number(h, turned);
    add_number(h, (uint64_t)t->ndim);
    for (int k = 0; k < t->ndim; k++)
        add_number(h, (uint64_t)t->dim[k]);
}

static void digest_all(const weight_digest *d, uint8_t digest[16])
{
    lm_hash128 h;
    size_t b = 0;
    lm_hash128_init(&h);
    for (size_t i = 0; i < d->tensors; i++) {
        add_tensor(d, i, &h);
        for (; b < d->blocks && d->block[b].t == d->t[i]; b++)
            lm_hash128_add(&h, d->block[b].digest, sizeof d->block[b].digest);
    }
    lm_hash128_end(&h, digest);
}

static lm_code digest_weights(lm_model_source *m, lm_par *par, uint8_t digest[16], lm_err *e)
{
    weight_digest d = { .m = m };
    lm_code rc = prepare(&d, par, e);
    if (!rc)
        lm_par_for(par, (int64_t)d.blocks, 1, digest_blocks, &d);
    for (int i = 0; i < lm_par_threads(par) && !rc; i++)
        if (d.failed[i].code) {
            *e = d.failed[i];
            rc = e->code;
        }
    if (!rc)
        digest_all(&d, digest);
    lm_free(d.t);
    lm_free(d.bytes);
    lm_free(d.block);
    lm_free(d.failed);
    return rc;
}

lm_code lm_model_source_weights_digest(lm_model_source *m, uint8_t digest[16], lm_err *e)
{
    if (!m->has_digest) {
        if (lm_model_source_spool(m, e) ||
            digest_weights(m, m->stream ? NULL : m->par, m->digest, e))
            return e->code;
        m->has_digest = true;
    }
    memcpy(digest, m->digest, sizeof m->digest);
    return LM_OK;
}

void lm_model_source_set_par(lm_model_source *m, lm_par *par)
{
    m->par = par;
}
