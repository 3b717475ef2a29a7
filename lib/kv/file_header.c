/* SPDX-License-Identifier: Apache-2.0 */
/* file_header.c -- the checksum over the header of kv-cache(5).
 *
 * It is of what the header says, not of its text, which another JSON writer may space and order differently: the pairs of
 * __metadata__ but the checksum itself, in the order of the bytes of their keys, then the tensors in the order of
 * their data.  Offsets follow from that order, types and shapes. */
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "base/mem.h"
#include "kv/file_impl.h"

typedef struct {
    const char *key, *value;
} header_pair;

static int by_key(const void *a, const void *b)
{
    return strcmp(((const header_pair *)a)->key, ((const header_pair *)b)->key);
}

static void add_u64(lm_hash128 *h, uint64_t v)
{
    uint8_t b[8];
    for (int i = 0; i < 8; i++)
        b[i] = (uint8_t)(v >> 8 * i);
    lm_hash128_add(h, b, sizeof b);
}

/* A text with the NUL behind it, which no text contains. */
static void add_text(lm_hash128 *h, const char *text)
{
    lm_hash128_add(h, text, strlen(text) + 1);
}

static void add_tensor(lm_hash128 *h, const lm_st_tensor *t)
{
    add_text(h, t->name);
    add_text(h, t->dtype_name);
    add_u64(h, (uint64_t)t->ndim);
    for (int i = 0; i < t->ndim; i++)
        add_u64(h, (uint64_t)t->dim[i]);
}

/* The pairs of a header in the order of their keys. */
static lm_code sorted_pairs(const kv_header *from, header_pair **out, size_t *n, lm_err *e)
{
    size_t cap = 0;
    header_pair p;
    *out = NULL;
    for (*n = 0; from->meta_at(from->of, *n, &p.key, &p.value); (*out)[(*n)++] = p)
        if (lm_grow(out, &cap, *n + 1, sizeof **out, "the header of a cache", e))
            return e->code;
    if (*n)
        qsort(*out, *n, sizeof **out, by_key);
    return LM_OK;
}

lm_code kv_header_digest(const kv_header *from, char hex[33], lm_err *e)
{
    header_pair *pair;
    uint8_t digest[16];
    size_t n, counted = 0;
    lm_hash128 h;
    lm_code rc = sorted_pairs(from, &pair, &n, e);
    lm_hash128_init(&h);
    for (size_t i = 0; i < n && !rc; i++)
        if (strcmp(pair[i].key, KV_HEADER_KEY)) {
            add_text(&h, pair[i].key);
            add_text(&h, pair[i].value);
            counted++;
        }
    add_u64(&h, counted);
    for (size_t i = 0; i < from->tensors && !rc; i++)
        add_tensor(&h, from->tensor_at(from->of, i));
    add_u64(&h, from->tensors);
    lm_hash128_end(&h, digest);
    lm_hash128_hex(digest, hex);
    lm_free(pair);
    return rc;
}
