/* SPDX-License-Identifier: Apache-2.0 */
/* kv_header.h -- the checksum of a header of kv-cache(5), made anew from that page. */
#ifndef TESTS_KV_HEADER_H
#define TESTS_KV_HEADER_H

#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "format/safetensors.h"
#include "tests/unit/span_reader.h"

static inline void seal_number(lm_hash128 *h, uint64_t v)
{
    for (int i = 0; i < 8; i++)
        lm_hash128_add(h, &(uint8_t){ (uint8_t)(v >> 8 * i) }, 1);
}

/* The pair whose key follows `last` in order; false: there is none. */
static inline bool seal_next(const lm_st_stream *s, const char *last, const char **key,
                             const char **value)
{
    const char *k, *v;
    *key = NULL;
    for (size_t i = 0; lm_st_stream_meta_at(s, i, &k, &v); i++)
        if ((!last || strcmp(k, last) > 0) && (!*key || strcmp(k, *key) < 0))
            *key = k, *value = v;
    return *key;
}

/* Correct the checksum of the header of a file in memory, if it can be read that far. */
static inline void reseal(char *data, size_t len)
{
    span from = { data, len };
    lm_st_stream *s;
    lm_err e = { 0 };
    if (lm_st_stream_open(read_span, &from, "m", &s, &e))
        return;
    const char *old = lm_st_stream_meta(s, "header"), *key = NULL, *value;
    lm_hash128 h;
    uint64_t pairs = 0;
    uint8_t digest[16];
    char hex[33];
    lm_hash128_init(&h);
    while (seal_next(s, key, &key, &value))
        if (strcmp(key, "header")) {
            lm_hash128_add(&h, key, strlen(key) + 1);
            lm_hash128_add(&h, value, strlen(value) + 1);
            pairs++;
        }
    seal_number(&h, pairs);
    for (size_t i = 0; i < lm_st_stream_count(s); i++) {
        const lm_st_tensor *t = lm_st_stream_at(s, i);
        lm_hash128_add(&h, t->name, strlen(t->name) + 1);
        lm_hash128_add(&h, t->dtype_name, strlen(t->dtype_name) + 1);
        seal_number(&h, (uint64_t)t->ndim);
        for (int d = 0; d < t->ndim; d++)
            seal_number(&h, (uint64_t)t->dim[d]);
    }
    seal_number(&h, lm_st_stream_count(s));
    lm_hash128_end(&h, digest);
    lm_hash128_hex(digest, hex);
    char *at =
        old && strlen(old) == 32 ? memmem(data, (size_t)lm_st_stream_data_at(s), old, 32) : NULL;
    if (at)
        memcpy(at, hex, 32);
    lm_st_stream_close(s);
}

#endif
