/* SPDX-License-Identifier: Apache-2.0 */
/* Importance matrices: round trips of both formats, and files that are refused. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/buf.h"
#include "base/file.h"
#include "base/mem.h"
#include "format/gguf.h"
#include "format/imatrix.h"

static void put_i32(lm_buf *b, int32_t v)
{
    lm_err e = { 0 };
    assert_int_equal(lm_buf_add(b, &v, 4, &e), LM_OK);
}

static void put_entry(lm_buf *b, const char *name, int32_t calls, int32_t n, const float *v)
{
    lm_err e = { 0 };
    put_i32(b, (int32_t)strlen(name));
    assert_int_equal(lm_buf_add(b, name, strlen(name), &e), LM_OK);
    put_i32(b, calls);
    put_i32(b, n);
    assert_int_equal(lm_buf_add(b, v, 4 * (size_t)n, &e), LM_OK);
}

static const float some[3] = { 4.0f, 0.0f, 10.0f };

static void legacy_file(lm_buf *b)
{
    lm_err e = { 0 };
    put_i32(b, 2);
    put_entry(b, "blk.1.ffn_up.weight", 2, 3, some);
    put_entry(b, "blk.0.attn_q.weight", 0, 3, some);
    put_i32(b, 7);
    put_i32(b, 8);
    assert_int_equal(lm_buf_add(b, "calib.tx", 8, &e), LM_OK);
}

static void legacy_is_read(void **state)
{
    (void)state;
    lm_buf b = { 0 };
    lm_imatrix *m = NULL;
    lm_err e = { 0 };
    size_t n = 0;

    legacy_file(&b);
    assert_int_equal(lm_imatrix_parse(b.data, b.len, "test", &m, &e), LM_OK);
    assert_int_equal(lm_imatrix_count(m), 2);
    const float *v = lm_imatrix_find(m, "blk.1.ffn_up.weight", &n);
    assert_true(n == 3 && v[0] == 2.0f && v[1] == 0.0f && v[2] == 5.0f);
    v = lm_imatrix_find(m, "blk.0.attn_q.weight", &n);
    assert_true(v[0] == 4.0f && v[2] == 10.0f); /* no calls: as it stands */
    assert_null(lm_imatrix_find(m, "blk.0.attn_k.weight", &n));
    assert_int_equal(lm_imatrix_chunks(m), 7);
    assert_string_equal(lm_imatrix_dataset(m), "calib.tx");
    lm_imatrix_free(m);
    lm_buf_fini(&b);
}

/* Every truncation, and a value that is no mean of squares, is an error or a shorter file: never a
 * crash. */
static void broken_is_refused(void **state)
{
    (void)state;
    lm_buf b = { 0 };
    lm_imatrix *m = NULL;
    lm_err e = { 0 };
    const float bad[2] = { -1.0f, NAN };

    legacy_file(&b);
    for (size_t n = 0; n < b.len - 16; n++) { /* the end is optional */
        uint8_t *copy = malloc(n + 1);        /* for the sanitizer to see its end */
        memcpy(copy, b.data, n);
        e = (lm_err){ 0 };
        assert_int_equal(lm_imatrix_parse(copy, n, "test", &m, &e), LM_EFORMAT);
        assert_null(m);
        free(copy);
    }
    for (int i = 0; i < 2; i++) {
        b.len = 0;
        e = (lm_err){ 0 };
        put_i32(&b, 1);
        put_entry(&b, "blk.0.ffn_up.weight", 1, 1, &bad[i]);
        assert_int_equal(lm_imatrix_parse(b.data, b.len, "test", &m, &e), LM_EFORMAT);
        assert_non_null(strstr(e.what, "blk.0.ffn_up.weight"));
    }
    b.len = 0;
    e = (lm_err){ 0 };
    put_i32(&b, 2);
    put_entry(&b, "a.weight", 1, 3, some);
    put_entry(&b, "a.weight", 1, 3, some);
    assert_int_equal(lm_imatrix_parse(b.data, b.len, "test", &m, &e), LM_EFORMAT);
    assert_non_null(strstr(e.what, "twice"));
    lm_buf_fini(&b);
}

static void written_is_restored(void **state)
{
    (void)state;
    static const double sums[2] = { 3.0, 1.0 / 3 };
    char path[] = "/tmp/lm-imatrix-XXXXXX", name[64];
    lm_imatrix *m = NULL, *back = NULL;
    lm_err e = { 0 };
    size_t n = 0;

    close(mkstemp(path));
    assert_int_equal(lm_imatrix_new("corpus.txt", 512, &m, &e), LM_OK);
    for (int i = 2; i >= 0; i--) { /* any order */
        snprintf(name, sizeof name, "blk.%d.attn_q.weight", i);
        assert_int_equal(lm_imatrix_add(m, name, sums, 2, 7 + i, &e), LM_OK);
    }
    lm_imatrix_set_chunks(m, 3);
    assert_int_equal(lm_imatrix_write(m, path, true, &e), LM_OK);
    assert_true(lm_imatrix_is(path));
    assert_int_equal(lm_imatrix_open(path, &back, &e), LM_OK);
    assert_int_equal(lm_imatrix_count(back), 3);
    for (int i = 0; i < 3; i++) {
        snprintf(name, sizeof name, "blk.%d.attn_q.weight", i);
        const float *a = lm_imatrix_find(m, name, &n), *b = lm_imatrix_find(back, name, &n);
        assert_int_equal(n, 2);
        assert_memory_equal(a, b, 2 * sizeof *a);
        assert_true(fabsf(a[0] - 3.0f / (float)(7 + i)) < 1e-7f);
    }
    assert_int_equal(lm_imatrix_chunks(back), 3);
    assert_string_equal(lm_imatrix_dataset(back), "corpus.txt");
    lm_imatrix_free(m);
    lm_imatrix_free(back);
    unlink(path);
}

/* A GGUF file of tensors that make no entries. */
static void other_gguf_is_refused(void **state)
{
    (void)state;
    static const int64_t dim[2] = { 2, 2 };
    static const char *const names[4] = { "blk.0.attn_q.weight.in_sum2",
                                          "blk.0.attn_q.weight.counts", "output.weight",
                                          "x.in_sum2" };
    for (int i = 0; i < 4; i++) { /* the last: with counts of two experts */
        lm_gguf_plan *p = NULL;
        lm_imatrix *m = NULL;
        lm_buf b = { 0 };
        lm_err e = { 0 };
        assert_int_equal(lm_gguf_plan_new(&p, &e), LM_OK);
        lm_gguf_put_tensor(p, names[i], LM_GGUF_TYPE_F32, 2, dim);
        if (i == 3)
            lm_gguf_put_tensor(p, "x.counts", LM_GGUF_TYPE_F32, 1, dim);
        assert_int_equal(lm_gguf_plan_header(p, &b, &e), LM_OK);
        assert_int_equal(lm_buf_add(&b, (char[64]){ 0 }, 64, &e), LM_OK);
        assert_true(lm_imatrix_parse(b.data, b.len, "test", &m, &e) != LM_OK);
        assert_null(m);
        lm_gguf_plan_free(p);
        lm_buf_fini(&b);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(legacy_is_read),
        cmocka_unit_test(broken_is_refused),
        cmocka_unit_test(written_is_restored),
        cmocka_unit_test(other_gguf_is_refused),
    };
    return cmocka_run_group_tests_name("imatrix", tests, NULL, NULL);
}
