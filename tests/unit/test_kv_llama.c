/* SPDX-License-Identifier: Apache-2.0 */
/* llama.cpp's state of a sequence, written here by its layout: read with rows and with transposed values, in any order of
 * cells; every cut and damage is refused or gives finite numbers. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kv/file_llama.h"
#include "tests/unit/kv_file_case.h"

enum { TOKENS = 9 };

static void add(lm_buf *b, const void *p, size_t n)
{
    assert_int_equal(lm_buf_add(b, p, n, NULL), 0);
}

static void add32(lm_buf *b, uint32_t v)
{
    add(b, &v, 4);
}

static void add_number(lm_buf *b, lm_dtype d, const cache *c, int64_t part, int64_t token,
                       int64_t channel, bool pairs)
{
    int64_t D = width[part / 2], h = channel / D, i = channel % D;
    uint8_t out[4];
    if (pairs && part % 2 == 0) /* a pair is adjacent there, half a head apart here */
        i = i % 2 * (D / 2) + i / 2;
    double x =
        lm_get(c->about.act, c->content.part[part].data[LM_KV_PLAIN], (h * TOKENS + token) * D + i);
    lm_set(d, out, 0, x);
    add(b, out, lm_dtype_size(d));
}

/* The cells are in the order 3, 4, .., 8, 0, 1, 2; `more` tokens than cells. */
static lm_buf write_state(const cache *c, lm_dtype d, bool turned, bool pairs, int more)
{
    uint32_t type = d == LM_DTYPE_F32 ? 0 : d == LM_DTYPE_F16 ? 1 : 30;
    lm_buf b = { 0 };
    add32(&b, 0x67677371), add32(&b, 2), add32(&b, (uint32_t)(TOKENS + more));
    for (int i = 0; i < TOKENS + more; i++)
        add32(&b, i < TOKENS ? (uint32_t)c->content.ids[i] : 77);
    add32(&b, 2), add32(&b, 0), add32(&b, TOKENS);
    for (uint32_t i = 0; i < TOKENS; i++)
        add32(&b, (i + 3) % TOKENS), add32(&b, 1), add32(&b, 5);
    add32(&b, turned), add32(&b, LAYERS);
    for (int64_t side = 0; side < 2; side++)
        for (int64_t l = 0; l < LAYERS; l++) {
            int64_t C = heads[l] * width[l];
            uint64_t row = (uint64_t)C * lm_dtype_size(d);
            add32(&b, type);
            if (side && turned)
                add32(&b, (uint32_t)lm_dtype_size(d)), add32(&b, (uint32_t)C);
            else
                add(&b, &row, 8);
            for (int64_t i = 0; i < C * TOKENS; i++)
                add_number(&b, d, c, 2 * l + side,
                           (side && turned ? i % TOKENS + 3 : i / C + 3) % TOKENS,
                           side && turned ? i / TOKENS : i % C, pairs);
        }
    return b;
}

static lm_code read_state(const char *data, size_t len, lm_dtype act, bool pairs, lm_kv_image **out,
                          lm_err *e)
{
    lm_kv_llama *f = NULL;
    lm_kv_about a = about_all;
    a.act = act;
    *out = NULL;
    put_file(data, len);
    lm_code rc = lm_kv_llama_open(path, &f, e);
    rc = rc ? rc : lm_kv_llama_read(f, &a, pairs, VOCAB, out, e);
    lm_kv_llama_close(f);
    if (rc && !e->what[0])
        fail_msg("a failure without a message");
    return rc;
}

static void test_read(void **state)
{
    static const lm_dtype types[] = { LM_DTYPE_F32, LM_DTYPE_F16, LM_DTYPE_BF16 };
    (void)state;
    for (int i = 0; i < 24; i++) {
        lm_dtype d = types[i / 8];
        cache *c = make(d, TOKENS, true), *out;
        lm_err e = { 0 };
        for (int t = 0; t < TOKENS; t++)
            c->content.positions[t] = t;
        lm_buf b = write_state(c, d, i & 1, i & 2, !!(i & 4));
        if (read_state(b.data, b.len, d, i & 2, &out, &e))
            fail_msg("%s: %s", e.where, e.what);
        assert_true(same(c, out));
        assert_int_equal(out->about.has_next, !!(i & 4));
        assert_int_equal(out->about.next, i & 4 ? 77 : 0);
        assert_true(lm_kv_llama_is(path));
        lm_buf_fini(&b), drop(c), drop(out);
    }
}

/* Every cut is refused; flipped bits are refused, or change nothing but numbers. */
static void test_damage(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        cache *c = make(LM_DTYPE_F16, TOKENS, true), *out;
        lm_buf b = write_state(c, LM_DTYPE_F16, i, true, 0);
        for (size_t len = 0; len < b.len; len += 1 + len / 200) {
            lm_err e = { 0 };
            assert_int_equal(read_state(b.data, len, LM_DTYPE_F16, true, &out, &e), LM_EFORMAT);
        }
        for (size_t k = 0; k < 8 * b.len; k += 1 + k / 100) {
            lm_err e = { 0 };
            b.data[k / 8] ^= (char)(1 << k % 8);
            if (!read_state(b.data, b.len, LM_DTYPE_F16, true, &out, &e))
                assert_int_equal(out->about.tokens, TOKENS);
            drop(out);
            b.data[k / 8] ^= (char)(1 << k % 8);
        }
        lm_buf_fini(&b), drop(c);
    }
}

static void test_refused(void **state)
{
    static const struct {
        size_t at; /* of a u32 */
        uint32_t value;
        const char *want;
    } cases[] = {
        { 0, 1, "not the state" },
        { 4, 5, "not the state" },
        { 8, 3, "" },
        { 12, VOCAB, "vocabulary" },
        { 12 + 4 * TOKENS, 5000, "streams" },
        { 12 + 4 * TOKENS + 12, 4, "positions" }, /* twice */
        { 12 + 4 * TOKENS + 16, 2, "several sequences" },
        { 12 + 4 * TOKENS + 12 + 12 * TOKENS + 4, 4, "4 layers, the model 3" },
        { 12 + 4 * TOKENS + 12 + 12 * TOKENS + 8, 2, "blocks of q4_0" },
        { 12 + 4 * TOKENS + 12 + 12 * TOKENS + 8, 99, "an unknown type" },
        { 12 + 4 * TOKENS + 12 + 12 * TOKENS + 12, 34, "rows of 17 numbers" },
        { 12 + 4 * TOKENS + 12 + 12 * TOKENS + 12, 33, "whole numbers" },
        { 12 + 4 * TOKENS + 12 + 12 * TOKENS + 20, 0x7c00, "NaN" },
    };
    cache *c = make(LM_DTYPE_F16, TOKENS, true), *out;
    lm_buf b = write_state(c, LM_DTYPE_F16, false, false, 0);
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint32_t old;
        lm_err e = { 0 };
        memcpy(&old, b.data + cases[i].at, 4);
        memcpy(b.data + cases[i].at, &cases[i].value, 4);
        assert_int_equal(read_state(b.data, b.len, LM_DTYPE_F16, false, &out, &e), LM_EFORMAT);
        if (!strstr(e.what, cases[i].want))
            fail_msg("%zu: %s, not %s", i, e.what, cases[i].want);
        memcpy(b.data + cases[i].at, &old, 4);
    }
    lm_buf_fini(&b), drop(c);
}

static void expect(const lm_buf *b, const char *want)
{
    cache *out;
    lm_err e = { 0 };
    lm_code rc = read_state(b->data, b->len, LM_DTYPE_F16, false, &out, &e);
    if (want ? rc != LM_EFORMAT || !strstr(e.what, want) || !*e.todo : rc != LM_OK)
        fail_msg("%s: %s, not %s", e.where, e.what, want ? want : "read");
    drop(out);
}

/* As many tokens as cells, or one more; nothing behind the rows but streams without cells. */
static void test_lengths(void **state)
{
    static const char *const want[] = { "it has 8 tokens, and 9 of them stored", NULL, NULL,
                                        "it has 11 tokens, and 9 of them stored" };
    cache *c = make(LM_DTYPE_F16, TOKENS, true);
    (void)state;
    for (int more = -1; more <= 2; more++) {
        lm_buf b = write_state(c, LM_DTYPE_F16, false, false, more);
        expect(&b, want[more + 1]);
        lm_buf_fini(&b);
    }
    lm_buf b = write_state(c, LM_DTYPE_F16, false, false, 0);
    size_t streams = 12 + 4 * TOKENS;
    add(&b, "", 1);
    expect(&b, "1 byte behind its rows");
    add(&b, "\0\0", 3);
    expect(&b, "4 bytes behind its rows");
    b.data[streams] = 3; /* a stream without cells */
    expect(&b, NULL);
    b.data[b.len - 4] = 2;
    expect(&b, "several streams");
    lm_buf_fini(&b), drop(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_read),
        cmocka_unit_test(test_damage),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_lengths),
    };
    return cmocka_run_group_tests_name("kv_llama", tests, make_path, drop_path);
}
