/* SPDX-License-Identifier: Apache-2.0 */
/* gunzip.h: members in blocks of any size, and damage at every bit of them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>
#include <zlib.h>

#include "format/gunzip.h"

enum { MEMBERS = 3, TEXT = 400 };

/* Input in blocks of `step` bytes. */
typedef struct {
    const uint8_t *data;
    size_t len, at, step;
} feed;

static lm_code next_block(void *ctx, const void **p, size_t *n, lm_err *e)
{
    feed *f = ctx;
    (void)e;
    *n = f->len - f->at < f->step ? f->len - f->at : f->step;
    *p = f->data + f->at;
    f->at += *n;
    return LM_OK;
}

/* Decode all; the number of damaged members that were passed over is added to *bad. */
static lm_code decode(const uint8_t *data, size_t len, size_t step, bool skip, uint8_t *out,
                      size_t cap, size_t *got, int *bad, lm_err *e)
{
    feed f = { data, len, 0, step };
    lm_gunzip *g = NULL;
    const void *p;
    size_t n;
    *got = 0;
    assert_int_equal(lm_gunzip_new(next_block, &f, "x.gz", skip, &g, e), LM_OK);
    lm_code rc;
    while (!(rc = lm_gunzip_block(g, &p, &n, e))) {
        if (!n && !lm_gunzip_resume(g, NULL))
            break;
        *bad += !n;
        assert_true(*bad < 100 && *got + n <= cap);
        memcpy(out + *got, p, n);
        *got += n;
    }
    lm_gunzip_free(g);
    return rc;
}

static uint8_t text[MEMBERS][TEXT], file[4096];
static size_t begin[MEMBERS + 1];

static int setup(void **st)
{
    (void)st;
    for (int m = 0; m < MEMBERS; m++) {
        for (int i = 0; i < TEXT; i++)
            text[m][i] = (uint8_t)("abcdefgh"[(i * (m + 7) / 3) % 8] + m);
        z_stream z = { .next_in = text[m],
                       .avail_in = TEXT,
                       .next_out = file + begin[m],
                       .avail_out = (uInt)(sizeof file - begin[m]) };
        if (deflateInit2(&z, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY) != Z_OK ||
            deflate(&z, Z_FINISH) != Z_STREAM_END)
            return -1;
        begin[m + 1] = begin[m] + z.total_out;
        deflateEnd(&z);
    }
    return 0;
}

static void blocks_of_any_size(void **st)
{
    (void)st;
    uint8_t out[4096];
    for (size_t step = 1; step <= begin[MEMBERS]; step++) {
        lm_err e = { 0 };
        size_t got;
        int bad = 0;
        assert_int_equal(decode(file, begin[MEMBERS], step, false, out, sizeof out, &got, &bad, &e),
                         LM_OK);
        assert_int_equal(got, sizeof text);
        assert_memory_equal(out, text, got);
        assert_int_equal(decode((const uint8_t *)"plain", 5, step, false, out, 99, &got, &bad, &e),
                         LM_OK);
        assert_int_equal(got, 5);
        assert_memory_equal(out, "plain", 5);
    }
}

/* A changed bit is reported unless it changes no text, which is so in a header and in the padding
 * of the last byte of the data. */
static void every_bit(void **st)
{
    (void)st;
    uint8_t out[65536], copy[sizeof file];
    for (size_t bit = 24; bit < 8 * begin[MEMBERS]; bit++) {
        size_t m = bit / 8 < begin[1] ? 0 : bit / 8 < begin[2] ? 1 : 2, got;
        lm_err e = { 0 };
        int bad = 0;
        memcpy(copy, file, sizeof file);
        copy[bit / 8] ^= (uint8_t)(1u << bit % 8);
        if (!decode(copy, begin[MEMBERS], 7, false, out, sizeof out, &got, &bad, &e)) {
            assert_int_equal(got, sizeof text);
            assert_memory_equal(out, text, got);
            continue;
        }
        assert_int_equal(e.code, LM_EFORMAT);
        assert_non_null(strstr(e.what, "member"));
        e = (lm_err){ 0 };
        assert_int_equal(
            decode(copy, begin[MEMBERS], sizeof copy, true, out, sizeof out, &got, &bad, &e),
            LM_OK);
        assert_true(bad >= 1);
        assert_true(got >=
                    TEXT); /* of the others one is whole at least: that before, or the last */
        assert_memory_equal(m ? out : out + got - TEXT, m ? text[0] : text[2], TEXT);
    }
}

static void every_length(void **st)
{
    (void)st;
    uint8_t out[4096];
    for (size_t len = 3; len < begin[MEMBERS]; len++) {
        bool whole = len == begin[1] || len == begin[2];
        lm_err e = { 0 };
        size_t got;
        int bad = 0;
        assert_int_equal(decode(file, len, 11, false, out, sizeof out, &got, &bad, &e),
                         whole ? LM_OK : LM_EFORMAT);
        assert_true(got <= sizeof text);
        assert_memory_equal(out, text, got);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_of_any_size),
        cmocka_unit_test(every_bit),
        cmocka_unit_test(every_length),
    };
    return cmocka_run_group_tests(tests, setup, NULL);
}
