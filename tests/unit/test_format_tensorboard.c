/* SPDX-License-Identifier: Apache-2.0 */
/* TensorBoard event files: checksums and the bytes of records. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/file.h"
#include "format/tensorboard.h"

/* RFC 3720 appendix B.4. */
static void test_crc(void **state)
{
    uint8_t b[32];
    (void)state;
    memset(b, 0, 32);
    assert_int_equal(lm_crc32c(0, b, 32), 0x8a9136aa);
    memset(b, 0xff, 32);
    assert_int_equal(lm_crc32c(0, b, 32), 0x62a8ab43);
    for (int i = 0; i < 32; i++)
        b[i] = (uint8_t)i;
    assert_int_equal(lm_crc32c(0, b, 32), 0x46dd794e);
    assert_int_equal(lm_crc32c(lm_crc32c(0, b, 5), b + 5, 27), 0x46dd794e);
    assert_int_equal(lm_crc32c(0, "123456789", 9), 0xe3069283);
}

static uint32_t le32(const uint8_t *p)
{
    return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

/* Check a record's frame; returns its payload. */
static const uint8_t *frame(const uint8_t *p, size_t *len)
{
    uint32_t c = lm_crc32c(0, p, 8);
    *len = p[0];
    for (int i = 1; i < 8; i++)
        assert_int_equal(p[i], 0);
    assert_int_equal(le32(p + 8), (uint32_t)((c >> 15 | c << 17) + 0xa282ead8u));
    c = lm_crc32c(0, p + 12, *len);
    assert_int_equal(le32(p + 12 + *len), (uint32_t)((c >> 15 | c << 17) + 0xa282ead8u));
    return p + 12;
}

static void test_file(void **state)
{
    /* wall_time 1.5, file_version; then wall_time 2.0, step 300, two values. */
    static const uint8_t first[] = "\x09\0\0\0\0\0\0\xf8\x3f\x1a\x0d"
                                   "brain.Event:2";
    static const uint8_t second[] = "\x09\0\0\0\0\0\0\0\x40\x10\xac\x02\x2a\x15"
                                    "\x0a\x0b\x0a\x04loss\x15\0\0\x80\x3f"
                                    "\x0a\x06\x0a\x02lr"; /* cut before the value */
    char path[] = "/tmp/lm-test-XXXXXX";
    lm_tb *t = NULL;
    lm_err e = { 0 };
    lm_buf all = { 0 };
    size_t len;
    (void)state;
    close(mkstemp(path));

    assert_int_equal(lm_tb_open(path, 1.5, &t, &e), LM_OK);
    lm_tb_scalar v[] = { { "loss", 1.0 }, { "x", 0.5 } };
    assert_int_equal(lm_tb_add(t, 300, 2.0, v, 2, &e), LM_OK);
    assert_int_equal(lm_tb_close(t, &e), LM_OK);
    assert_int_equal(lm_tb_open(path, 9, &t, &e), LM_OK); /* goes on, no second version record */
    assert_int_equal(lm_tb_add(t, 301, 3.0, v, 1, &e), LM_OK);
    assert_int_equal(lm_tb_close(t, &e), LM_OK);
    assert_int_equal(lm_file_read(path, 4096, &all, &e), LM_OK);
    const uint8_t *p = frame((const uint8_t *)all.data, &len);
    assert_int_equal(len, sizeof first - 1);
    assert_memory_equal(p, first, len);
    p = frame(p + len + 4, &len);
    assert_memory_equal(p, second, 12);
    assert_int_equal(p[13], len - 14); /* length of the summary */
    assert_memory_equal(p + 14, second + 14, 13);
    assert_memory_equal(p + 27, "\x0a\x08\x0a\x01x\x15\0\0\0\x3f", 10);
    assert_int_equal(len, 37);
    p = frame(p + len + 4, &len);
    assert_int_equal((const char *)p + len + 4 - all.data, all.len);
    lm_buf_fini(&all);
    unlink(path);
}

/* After a kill in the middle of a write the file goes on behind its last whole record. */
static void test_torn(void **state)
{
    char path[] = "/tmp/lm-test-XXXXXX";
    lm_tb *t = NULL;
    lm_err e = { 0 };
    lm_tb_scalar v = { "loss", 2 };
    lm_buf want = { 0 }, got = { 0 };
    (void)state;
    close(mkstemp(path));

    for (int cut = 0; cut < 40; cut += 3) {
        assert_int_equal(truncate(path, 0), 0);
        assert_int_equal(lm_tb_open(path, 1, &t, &e), LM_OK);
        assert_int_equal(lm_tb_add(t, 1, 2, &v, 1, &e), LM_OK);
        assert_int_equal(lm_tb_close(t, &e), LM_OK);
        want.len = got.len = 0;
        assert_int_equal(lm_file_read(path, 4096, &want, &e), LM_OK);
        if (cut) {
            assert_int_equal(truncate(path, (off_t)want.len - cut), 0);
            assert_int_equal(lm_tb_open(path, 9, &t, &e), LM_OK);
            assert_int_equal(lm_tb_add(t, 1, 2, &v, 1, &e), LM_OK);
            assert_int_equal(lm_tb_close(t, &e), LM_OK);
        }
        assert_int_equal(lm_file_read(path, 4096, &got, &e), LM_OK);
        assert_int_equal(want.len, got.len);
        assert_memory_equal(want.data, got.data, want.len);
    }
    lm_buf_fini(&want);
    lm_buf_fini(&got);

    FILE *f = fopen(path, "w");
    fputs("these are notes, not events", f);
    fclose(f);
    assert_int_equal(lm_tb_open(path, 1, &t, &e), LM_EFORMAT);
    assert_int_equal(lm_file_read(path, 4096, &got, &(lm_err){ 0 }), LM_OK);
    assert_int_equal(got.len, 27); /* untouched */
    lm_buf_fini(&got);
    unlink(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_crc), cmocka_unit_test(test_file),
                                        cmocka_unit_test(test_torn) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
