/* SPDX-License-Identifier: Apache-2.0 */
/* GGUF: written files are read back; every kind of damage is detected. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/base64.h"
#include "base/mem.h"
#include "format/gguf.h"

static lm_code to_buf(void *ctx, const void *data, size_t bytes, lm_err *e)
{
    return lm_buf_add(ctx, data, bytes, e);
}

/* A file of every kind of value and two tensors. */
static void make(lm_buf *out)
{
    static const lm_gguf_text words[] = { { "a", 1 }, { "", 0 }, { "b\0c", 3 } };
    static const int32_t ints[] = { 1, -2, 3 };
    static const float floats[] = { 0.5f, -1.5f };
    static const uint8_t data[102] = { 1, 2, 3, 4 };
    lm_gguf_writer *w = NULL;
    lm_gguf_plan *p = NULL;
    lm_err e = { 0 };

    assert_int_equal(lm_gguf_plan_new(&p, &e), LM_OK);
    lm_gguf_put_str(p, "general.architecture", "llama", 5);
    lm_gguf_put_u32(p, "a.whole", 7);
    lm_gguf_put_f32(p, "a.real", 0.25f);
    lm_gguf_put_bool(p, "a.yes", true);
    lm_gguf_put_strs(p, "a.words", words, 3);
    lm_gguf_put_i32s(p, "a.ints", ints, 3);
    lm_gguf_put_f32s(p, "a.floats", floats, 2);
    lm_gguf_put_tensor(p, "m.weight", 8, 2, (int64_t[]){ 3, 32 }); /* q8_0 */
    lm_gguf_put_tensor(p, "v.weight", LM_GGUF_TYPE_F32, 1, (int64_t[]){ 5 });
    assert_int_equal(lm_gguf_create_on(to_buf, out, p, &w, &e), LM_OK);
    assert_string_equal(lm_gguf_next(w)->name, "m.weight");
    assert_int_equal(lm_gguf_write(w, data, 2, &e), LM_OK);
    assert_int_equal(lm_gguf_write(w, data + 2, 100, &e), LM_OK);
    assert_string_equal(lm_gguf_next(w)->name, "v.weight");
    assert_int_equal(lm_gguf_write(w, data, 21, &e), LM_EBUG);
    e = (lm_err){ 0 };
    assert_int_equal(lm_gguf_write(w, data, 20, &e), LM_OK);
    assert_null(lm_gguf_next(w));
    assert_int_equal(lm_gguf_finish(w, &e), LM_OK);
    lm_gguf_plan_free(p);
}

static void written_is_read(void **state)
{
    (void)state;
    lm_buf b = { 0 };
    lm_gguf *g = NULL;
    lm_err e = { 0 };
    lm_gguf_text t;
    int64_t i;
    double d;
    bool yes, given;

    make(&b);
    assert_int_equal(lm_gguf_parse(b.data, b.len, "made", &g, &e), LM_OK);
    assert_int_equal(lm_gguf_pairs(g), 7);
    assert_int_equal(lm_gguf_str(g, "general.architecture", &t, &e), LM_OK);
    assert_int_equal(t.len, 5);
    assert_memory_equal(t.text, "llama", 5);
    assert_int_equal(lm_gguf_str(g, "no.such", &t, &e), LM_OK);
    assert_null(t.text);
    assert_int_equal(lm_gguf_i64_or(g, "a.whole", 1, 0, 9, &i, &given, &e), LM_OK);
    assert_true(given && i == 7);
    assert_int_equal(lm_gguf_f64_or(g, "a.real", 1, &d, NULL, &e), LM_OK);
    assert_true(d == 0.25);
    assert_int_equal(lm_gguf_bool_or(g, "a.yes", false, &yes, NULL, &e), LM_OK);
    assert_true(yes);
    lm_gguf_iter it = { .v = lm_gguf_value_of(g, "a.words") };
    size_t lens[3] = { 1, 0, 3 };
    for (int k = 0; k < 3; k++) {
        assert_true(lm_gguf_next_str(&it, &t));
        assert_int_equal(t.len, lens[k]);
    }
    assert_false(lm_gguf_next_str(&it, &t));
    assert_true(lm_gguf_number(lm_gguf_value_of(g, "a.ints"), 1) == -2);
    assert_true(lm_gguf_number(lm_gguf_value_of(g, "a.floats"), 1) == -1.5);

    const lm_gguf_tensor *m = lm_gguf_find(g, "m.weight"), *v = lm_gguf_find(g, "v.weight");
    assert_int_equal(lm_gguf_count(g), 2);
    assert_int_equal(m->ndim, 2);
    assert_int_equal(m->dim[0], 3); /* slowest first here, last in the file */
    assert_int_equal(m->dim[1], 32);
    assert_int_equal(m->bytes, 102);
    assert_int_equal(lm_gguf_data(g, m)[3], 4);
    assert_int_equal(v->offset, 128);
    assert_null(lm_gguf_find(g, "w.weight"));
    assert_int_equal(b.len % 32, 0);
    lm_gguf_close(g);
    lm_buf_fini(&b);
}

static void wrong_kinds_are_named(void **state)
{
    (void)state;
    lm_buf b = { 0 };
    lm_gguf *g = NULL;
    lm_err e = { 0 };
    lm_gguf_text t;
    int64_t i;
    bool yes;

    make(&b);
    assert_int_equal(lm_gguf_parse(b.data, b.len, "made", &g, &e), LM_OK);
    assert_int_equal(lm_gguf_i64_or(g, "a.real", 1, 0, 9, &i, NULL, &e), LM_EFORMAT);
    assert_non_null(strstr(e.what, "a.real"));
    e = (lm_err){ 0 };
    assert_int_equal(lm_gguf_i64_or(g, "a.whole", 1, 0, 6, &i, NULL, &e), LM_EFORMAT);
    assert_non_null(strstr(e.what, "is 7, it must be from 0 to 6"));
    e = (lm_err){ 0 };
    assert_int_equal(lm_gguf_bool_or(g, "a.whole", 1, &yes, NULL, &e), LM_EFORMAT);
    e = (lm_err){ 0 };
    assert_int_equal(lm_gguf_str(g, "a.words", &t, &e), LM_EFORMAT);
    lm_gguf_close(g);
    lm_buf_fini(&b);
}

/* Every shorter file is refused, and is not read past its end (checked by the sanitizers). */
static void every_length_is_checked(void **state)
{
    (void)state;
    lm_buf b = { 0 };
    size_t last = 0;

    make(&b);
    for (size_t n = 0; n < b.len; n++) {
        lm_gguf *g = NULL;
        lm_err e = { 0 };
        char *copy = NULL;
        assert_int_equal(lm_alloc_n(&copy, n, 1, "test", &e), LM_OK);
        memcpy(copy, b.data, n);
        if (!lm_gguf_parse(copy, n, "cut", &g, &e))
            last = last ? last : n;
        else
            assert_true(e.code == LM_EFORMAT && e.what[0]);
        lm_gguf_close(g);
        lm_free(copy);
    }
    assert_int_equal(last, b.len - 12); /* only the zeros at the end may be missing */
    lm_buf_fini(&b);
}

/* Any byte changed: refused with a reason, or read. */
static void every_byte_may_change(void **state)
{
    (void)state;
    lm_buf b = { 0 };

    make(&b);
    for (size_t i = 0; i < b.len; i++)
        for (int k = 0; k < 4; k++) {
            static const uint8_t masks[4] = { 1, 0x80, 0xff, 0x10 };
            lm_gguf *g = NULL;
            lm_err e = { 0 };
            b.data[i] = (char)(b.data[i] ^ masks[k]);
            if (lm_gguf_parse(b.data, b.len, "bent", &g, &e))
                assert_true(e.code == LM_EFORMAT && e.what[0]);
            lm_gguf_close(g);
            b.data[i] = (char)(b.data[i] ^ masks[k]);
        }
    lm_buf_fini(&b);
}

static size_t find(const lm_buf *b, const char *text)
{
    return (size_t)((char *)memmem(b->data, b->len, text, strlen(text)) - b->data);
}

static void expect(lm_buf *b, const char *what)
{
    lm_gguf *g = NULL;
    lm_err e = { 0 };

    assert_int_equal(lm_gguf_parse(b->data, b->len, "bad", &g, &e), LM_EFORMAT);
    if (!strstr(e.what, what))
        fail_msg("'%s' does not say '%s'", e.what, what);
    assert_null(g);
}

static void damage_is_named(void **state)
{
    (void)state;
    lm_buf b = { 0 };

    make(&b);
    memcpy(b.data + find(&b, "v.weight"), "m", 1);
    expect(&b, "this tensor occurs twice");
    b.len = 0;
    make(&b);
    memcpy(b.data + find(&b, "a.words"), "a.whole", 7);
    expect(&b, "this key occurs twice");
    b.len = 0;
    make(&b);
    size_t t = find(&b, "m.weight") + 8;
    b.data[t + 4] = 31; /* row length: 31 is not a multiple of 32 */
    expect(&b, "rows of 31 numbers, q8_0 needs a multiple of 32");
    b.data[t + 4] = 32;
    memcpy(b.data + t + 12, "\377\377\377\377\377\377\377\177", 8);
    expect(&b, "too large");
    memcpy(b.data + t + 12, "\0\0\0\0\0\0\0\0", 8);
    expect(&b, "a dimension is 0");
    memcpy(b.data + t + 12, "\3\0\0\0\0\0\0\0", 8);
    b.data[t + 20] = 99;
    expect(&b, "type 99, which is unknown");
    b.data[t + 20] = 8;
    b.data[t + 24] = 8;
    expect(&b, "begins at 8");
    b.data[t + 24] = 0;
    b.data[t] = 5;
    expect(&b, "5 dimensions");
    b.data[t] = 2;
    b.data[find(&b, "a.yes") + 9] = 2;
    expect(&b, "neither 0 nor 1");
    lm_buf_fini(&b);
}

/* Versions that are not read; in the last one the bytes are reversed. */
static void versions_are_told_apart(void **state)
{
    (void)state;
    static const struct {
        const char *bytes, *what, *todo;
    } bad[] = {
        { "GGUF\0\0\0\0", "GGUF version 0", "versions 2 and 3 are supported" },
        { "GGUF\1\0\0\0", "GGUF version 1", "versions 2 and 3 are supported" },
        { "GGUF\4\0\0\0", "GGUF version 4", "versions 2 and 3 are supported" },
        { "GGUF\0\0\0\3", "GGUF version 50331648", "big-endian files are not read" },
    };

    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        lm_err e = { 0 };
        lm_gguf *g = NULL;
        assert_int_equal(lm_gguf_parse(bad[i].bytes, 8, "old", &g, &e), LM_EFORMAT);
        assert_string_equal(e.what, bad[i].what);
        assert_string_equal(e.todo, bad[i].todo);
    }
}

/* Arrays in arrays, deeper than the limit. */
static void nesting_ends(void **state)
{
    (void)state;
    lm_buf b = { 0 };
    lm_err e = { 0 };
    lm_gguf *g = NULL;

    lm_buf_add(&b, "GGUF\3\0\0\0\0\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0k\t\0\0\0", 37, &e);
    for (int i = 0; i < 1000; i++)
        lm_buf_add(&b, "\t\0\0\0\1\0\0\0\0\0\0\0", 12, &e);
    lm_buf_add(&b, "\0\0\0\0\0\0\0\0\0\0\0\0", 12, &e);
    assert_int_equal(lm_gguf_parse(b.data, b.len, "deep", &g, &e), LM_EFORMAT);
    assert_non_null(strstr(e.what, "nested too deeply"));
    lm_buf_fini(&b);
}

static void plans_are_checked(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        uint32_t type;
        int ndim;
        int64_t dim[4];
    } bad[] = {
        { "t", 8, 1, { 33 } },
        { "t", 77, 1, { 32 } },
        { "t", 0, 0, { 1 } },
        { "t", 0, 2, { 1, 0 } },
        { "t", 0, 2, { INT64_MAX, 3 } },
        { "0123456789012345678901234567890123456789012345678901234567890123", 0, 1, { 1 } },
    };

    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        lm_gguf_plan *p = NULL;
        lm_buf b = { 0 };
        lm_err e = { 0 };
        assert_int_equal(lm_gguf_plan_new(&p, &e), LM_OK);
        lm_gguf_put_tensor(p, bad[i].name, bad[i].type, bad[i].ndim, bad[i].dim);
        assert_int_not_equal(lm_gguf_plan_header(p, &b, &e), LM_OK);
        assert_true(e.what[0] != 0);
        assert_int_equal(b.len, 0);
        lm_gguf_plan_free(p);
        lm_buf_fini(&b);
    }
}

static void base64_goes_both_ways(void **state)
{
    (void)state;
    uint8_t data[64];
    lm_err e = { 0 };

    for (int i = 0; i < 64; i++)
        data[i] = (uint8_t)(i * 37 + 11);
    for (size_t n = 0; n <= sizeof data; n++) {
        lm_buf text = { 0 }, back = { 0 };
        assert_int_equal(lm_base64_encode(data, n, &text, &e), LM_OK);
        assert_int_equal(text.len, (n + 2) / 3 * 4);
        assert_int_equal(lm_base64_decode(text.data, text.len, "t", &back, &e), LM_OK);
        assert_int_equal(back.len, n);
        if (n)
            assert_memory_equal(back.data, data, n);
        lm_buf_fini(&text);
        lm_buf_fini(&back);
    }
    lm_buf back = { 0 };
    assert_int_equal(lm_base64_decode("TWFu", 4, "t", &back, &e), LM_OK);
    assert_string_equal(back.data, "Man");
    static const char *const bad[] = { "TWF", "TW=u", "T===", "TWF!", "=WFu", "TQ==TQ==" };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        e = (lm_err){ 0 };
        assert_int_equal(lm_base64_decode(bad[i], strlen(bad[i]), "t", &back, &e), LM_EFORMAT);
    }
    lm_buf_fini(&back);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(written_is_read),         cmocka_unit_test(wrong_kinds_are_named),
        cmocka_unit_test(every_length_is_checked), cmocka_unit_test(every_byte_may_change),
        cmocka_unit_test(damage_is_named),         cmocka_unit_test(nesting_ends),
        cmocka_unit_test(versions_are_told_apart), cmocka_unit_test(plans_are_checked),
        cmocka_unit_test(base64_goes_both_ways),
    };
    return cmocka_run_group_tests_name("gguf", tests, NULL, NULL);
}
