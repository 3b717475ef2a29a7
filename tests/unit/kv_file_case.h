/* SPDX-License-Identifier: Apache-2.0 */
/* kv_file_case.h -- caches of three layers, their files, and damage to files. */
#ifndef TESTS_KV_FILE_CASE_H
#define TESTS_KV_FILE_CASE_H

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/hash.h"
#include "base/rng.h"
#include "kv/image.h"
#include "tests/unit/kv_header.h"

enum { LAYERS = 3, PARTS = 2 * LAYERS, VOCAB = 500, CONTEXT = 4096 };

#ifndef KV_CASE_WIDTH
#define KV_CASE_WIDTH 8
#endif

static const int64_t heads[LAYERS] = { 2, 1, 2 },
                     width[LAYERS] = { KV_CASE_WIDTH, 20, KV_CASE_WIDTH };
static char path[] = "/tmp/lm-kv-XXXXXX";

typedef lm_kv_image cache;

static const lm_kv_about about_all = { .model_type = "llama",
                                       .weights = "0123456789abcdef0123456789abcdef",
                                       .config = "fedcba9876543210fedcba9876543210",
                                       .rope = "{\"theta\":1e4}",
                                       .layers = LAYERS,
                                       .kv_heads = heads,
                                       .head_dim = width,
                                       .act = LM_DTYPE_BF16 };

static inline void fill_positions(int32_t *p, int64_t n_heads, int64_t n)
{
    for (int64_t i = 0; i < n_heads * n; i++)
        p[i] = (int32_t)(2 * (i % n) + 1 + i / n);
}

/* Without `filled` the bytes are all 0xff. */
static inline cache *make_of(const lm_kv_about *a, bool filled)
{
    lm_rng g = lm_rng_make(4, "cache", 0);
    cache *c;
    lm_err e = { 0 };
    if (lm_kv_image_new(a, &c, &e))
        fail_msg("%s: %s", e.where, e.what);
    memset(c->content.ids, 0xff, 4 * (size_t)a->tokens);
    for (int64_t t = 0; t < a->tokens && filled; t++)
        c->content.ids[t] = (int32_t)(lm_rng_u64(g, (uint64_t)t) % VOCAB);
    if (!a->rows && filled)
        fill_positions(c->content.positions, 1, a->tokens);
    for (int64_t i = 0; i < LAYERS && a->rows && filled; i++)
        fill_positions(c->content.at[i], heads[i], a->rows[i]);
    for (int64_t p = 0; p < PARTS && !a->form; p++) {
        size_t n = lm_kv_about_bytes(a, p);
        void *data = c->content.part[p].data[LM_KV_PLAIN];
        memset(data, 0xff, n);
        for (size_t i = 0; i < n / lm_dtype_size(a->act) && filled; i++)
            lm_set(a->act, data, (int64_t)i,
                   lm_rng_normal(g, i + 1000000 * (uint64_t)p) + (double)(i % 5));
    }
    return c;
}

static inline cache *make(lm_dtype act, int64_t tokens, bool filled)
{
    lm_kv_about a = about_all;
    a.act = act;
    a.tokens = tokens;
    return make_of(&a, filled);
}

static inline void drop(cache *c)
{
    lm_kv_image_free(c);
}

/* ---- Files in memory ---- */

static inline lm_code add_bytes(void *ctx, const void *data, size_t bytes, lm_err *e)
{
    return lm_buf_add(ctx, data, bytes, e);
}

static inline lm_buf write_cache(const cache *c, unsigned levels)
{
    lm_buf b = { 0 };
    lm_err e = { 0 };
    const lm_kv_out to = { .write = add_bytes, .ctx = &b, .where = "memory" };
    if (lm_kv_file_write(&to, &c->about, &c->content, levels, lm_cpu_detect(), NULL, &e))
        fail_msg("%s: %s", e.where, e.what);
    return b;
}

static inline void put_file(const char *data, size_t len)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, len, f), len);
    fclose(f);
}

static inline lm_kv_reading reading(int level)
{
    return (lm_kv_reading){ .vocab = VOCAB, .context = CONTEXT, .level = level };
}

/* Open, compare with the model of `model` and read to `out`, all of which may fail; from the file at
 * `path` or from a stream. */
static inline lm_code load(const char *data, size_t len, bool stream, const lm_kv_about *model,
                           const lm_kv_reading *r, cache *out, lm_err *e)
{
    lm_kv_file *f = NULL;
    span s = { data, len };
    if (!stream)
        put_file(data, len);
    lm_code rc =
        stream ? lm_kv_file_open_on(read_span, &s, "memory", &f, e) : lm_kv_file_open(path, &f, e);
    rc = rc ? rc : lm_kv_file_match(f, model, CONTEXT, e);
    if (!rc && lm_kv_file_about(f)->tokens != out->about.tokens)
        rc = lm_fail(e, LM_EFORMAT, "", NULL, "other tokens");
    rc = rc ? rc : lm_kv_file_read(f, r, &out->content, lm_cpu_detect(), NULL, e);
    lm_kv_file_close(f);
    if (rc && !e->what[0])
        fail_msg("a failure without a message");
    return rc;
}

static inline bool same_part(const cache *a, const cache *b, int64_t p)
{
    const lm_kv_shape s = lm_kv_about_shape(&a->about, p);
    const lm_kv_part *x = &a->content.part[p], *y = &b->content.part[p];
    bool good = lm_kv_part_outliers(&s, x) == lm_kv_part_outliers(&s, y);
    for (int i = 0; i < LM_KV_SECTIONS && good; i++) {
        lm_kv_section_size z;
        assert_int_equal(lm_kv_section_size_of(&s, (lm_kv_section)i, &z, NULL), 0);
        if (i == LM_KV_SP_INDEX || i == LM_KV_SP_VALUE)
            z.bytes = 2 * (size_t)lm_kv_part_outliers(&s, x);
        good = !z.bytes || !memcmp(x->data[i], y->data[i], z.bytes);
    }
    return good;
}

static inline bool same(const cache *a, const cache *b)
{
    size_t n = 4 * (size_t)a->about.tokens;
    bool good = !memcmp(a->content.ids, b->content.ids, n);
    good = good && (a->about.rows || !memcmp(a->content.positions, b->content.positions, n));
    for (int64_t i = 0; i < LAYERS && a->about.rows; i++)
        good = good && !memcmp(a->content.at[i], b->content.at[i],
                               4 * (size_t)(heads[i] * a->about.rows[i]));
    for (int64_t p = 0; p < PARTS && good; p++)
        good = same_part(a, b, p);
    return good;
}

/* Change `n` bytes of a tensor, and its checksum and that of the header with them. */
static inline void patch(lm_buf *b, const char *tensor, size_t at, const void *bytes, size_t n)
{
    lm_st *st;
    lm_err e = { 0 };
    char old[17], new[17];
    put_file(b->data, b->len);
    assert_int_equal(lm_st_open(path, &st, &e), 0);
    const lm_st_tensor *t = lm_st_find(st, tensor);
    uint64_t header;
    memcpy(&header, b->data, 8);
    char *data = b->data + 8 + header + t->offset;
    snprintf(old, sizeof old, "%016" PRIx64, lm_hash64(data, (size_t)t->bytes, 0));
    memcpy(data + at, bytes, n);
    snprintf(new, sizeof new, "%016" PRIx64, lm_hash64(data, (size_t)t->bytes, 0));
    char *where = memmem(b->data, 8 + header, old, 16);
    assert_non_null(where);
    memcpy(where, new, 16);
    lm_st_close(st);
    reseal(b->data, b->len);
}

static inline bool same_text(const char *a, const char *b)
{
    return !a == !b && (!a || !strcmp(a, b));
}

/* True if two descriptions say the same in all that they have. */
static inline bool same_about(const lm_kv_about *a, const lm_kv_about *b)
{
    size_t n = sizeof(int64_t) * LAYERS;
    bool good = a->layers == LAYERS && b->layers == LAYERS && a->tokens == b->tokens &&
                a->act == b->act && a->has_next == b->has_next && a->page == b->page &&
                (!a->has_next || a->next == b->next) && same_text(a->model_type, b->model_type) &&
                same_text(a->weights, b->weights) && same_text(a->config, b->config) &&
                same_text(a->rope, b->rope) && same_text(a->history, b->history) &&
                same_text(a->spec, b->spec) && !memcmp(a->kv_heads, b->kv_heads, n) &&
                !memcmp(a->head_dim, b->head_dim, n) && !a->rows == !b->rows &&
                (!a->rows || !memcmp(a->rows, b->rows, n)) && !a->form == !b->form;
    for (int i = 0; i < PARTS && good && a->form; i++)
        good = lm_kv_same_form(&a->form[i], &b->form[i], heads[i / 2], width[i / 2]);
    return good;
}

/* Every bit of a header flipped, in a stream and a file: refused with a message. */
static inline void check_header_flips(const cache *c)
{
    lm_buf b = write_cache(c, 0);
    uint64_t header;
    memcpy(&header, b.data, 8);
    for (size_t i = 0; i < 8 * (8 + header); i++) {
        lm_kv_file *f = NULL;
        span s = { b.data, b.len };
        lm_err e = { 0 };
        b.data[i / 8] ^= (char)(1 << i % 8);
        if (i % 64 == 0)
            put_file(b.data, b.len);
        lm_code rc = i % 64 == 0 ? lm_kv_file_open(path, &f, &e)
                                 : lm_kv_file_open_on(read_span, &s, "m", &f, &e);
        if (!rc || !e.what[0])
            fail_msg("bit %zu of byte %zu is accepted, or has no message", i % 8, i / 8);
        b.data[i / 8] ^= (char)(1 << i % 8);
    }
    lm_kv_file *f;
    span s = { b.data, b.len };
    lm_err e = { 0 };
    assert_int_equal(lm_kv_file_open_on(read_span, &s, "m", &f, &e), 0);
    assert_true(same_about(&c->about, lm_kv_file_about(f)));
    lm_kv_file_close(f);
    lm_buf_fini(&b);
}

static inline int make_path(void **state)
{
    (void)state;
    close(mkstemp(path));
    return 0;
}

static inline int drop_path(void **state)
{
    (void)state;
    return unlink(path);
}

#endif
