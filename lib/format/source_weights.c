/* SPDX-License-Identifier: Apache-2.0 */
/* source_weights.c -- a digest of the weights of a model, the same for every form of its files. */
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "base/mem.h"
#include "format/folder_impl.h"

enum { PIECES = 18, PIECE = 4096 };

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

/* Where piece i of n bytes begins: the first at the beginning, the last at the end. */
static uint64_t piece_at(uint64_t n, int i)
{
    uint64_t span = n - PIECE;
    return span / (PIECES - 1) * (uint64_t)i + span % (PIECES - 1) * (uint64_t)i / (PIECES - 1);
}

static void add_bytes(lm_hash128 *h, const uint8_t *p, uint64_t n)
{
    if (n <= PIECES * PIECE) {
        lm_hash128_add(h, p, (size_t)n);
        return;
    }
    for (int i = 0; i < PIECES; i++)
        lm_hash128_add(h, p + piece_at(n, i), PIECE);
}

/* The codes of a model in another format: those of the file if it is mapped, or a copy of all. */
static lm_code add_codes(lm_hash128 *h, const lm_model_source *m, const lm_st_tensor *t, lm_err *e)
{
    const uint8_t *map = lm_model_source_codes_in_file(m, t);
    uint8_t *copy = NULL;
    lm_tensor_size size;
    bool turned;
    const lm_format *f = lm_model_source_format(m, t, &turned);
    int64_t dim[2] = { t->dim[1], t->dim[0] };
    lm_code rc = lm_tensor_bytes(f, t->ndim, turned ? dim : t->dim, &size, e);

    lm_hash128_add(h, f->name, strlen(f->name) + 1);
    add_number(h, turned);
    if (!rc && !map)
        rc = lm_alloc_n(&copy, size.all, 1, "the codes of a tensor", e);
    if (!rc && !map)
        rc = lm_model_source_codes(m, t, copy, e);
    if (!rc)
        add_bytes(h, map ? map : copy, size.all);
    lm_free(copy);
    return rc;
}

static lm_code add_numbers(lm_hash128 *h, const lm_model_source *m, const lm_st_tensor *t,
                           lm_err *e)
{
    uint8_t buf[PIECE];
    bool all = t->bytes <= PIECES * PIECE;
    uint64_t pieces = all ? (t->bytes + PIECE - 1) / PIECE : PIECES;
    lm_code rc = LM_OK;

    lm_hash128_add(h, t->dtype_name, strlen(t->dtype_name) + 1);
    for (uint64_t i = 0; i < pieces && !rc; i++) {
        uint64_t at = all ? i * PIECE : piece_at(t->bytes, (int)i);
        size_t n = t->bytes - at < PIECE ? (size_t)(t->bytes - at) : PIECE;
        rc = lm_model_source_peek(m, t, at, buf, n, e);
        if (!rc)
            lm_hash128_add(h, buf, n);
    }
    return rc;
}

lm_code lm_model_source_weights_digest(lm_model_source *m, uint8_t digest[16], lm_err *e)
{
    const lm_st_tensor **t = NULL;
    size_t n = lm_model_source_count(m);
    lm_hash128 h;
    lm_code rc = lm_model_source_spool(m, e);

    rc = rc ? rc : lm_alloc_n(&t, n, sizeof(const lm_st_tensor *), "digesting weights", e);
    for (size_t i = 0; i < n && !rc; i++)
        t[i] = lm_model_source_at(m, i);
    if (!rc && n)
        qsort(t, n, sizeof(const lm_st_tensor *), by_name);
    lm_hash128_init(&h);
    for (size_t i = 0; i < n && !rc; i++) {
        lm_hash128_add(&h, t[i]->name, strlen(t[i]->name) + 1);
        add_number(&h, (uint64_t)t[i]->ndim);
        for (int d = 0; d < t[i]->ndim; d++)
            add_number(&h, (uint64_t)t[i]->dim[d]);
        rc = m->by ? add_codes(&h, m, t[i], e) : add_numbers(&h, m, t[i], e);
    }
    if (!rc)
        lm_hash128_end(&h, digest);
    lm_free(t);
    return rc;
}
