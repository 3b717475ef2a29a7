/* SPDX-License-Identifier: Apache-2.0 */
/* Tar streams: a model through one and back, names that are refused, truncation. */
#include <fcntl.h>
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
#include "base/mem.h"
#include "format/archive.h"
#include "format/safetensors.h"

static char dir[64], path[128], cmd[512];

static int make_dir(void **state)
{
    (void)state;
    strcpy(dir, "/tmp/lm-test-XXXXXX");
    if (!mkdtemp(dir))
        return -1;
    snprintf(path, sizeof path, "%s/m.tar", dir);
    return 0;
}

static int drop_dir(void **state)
{
    lm_err e = { 0 };
    (void)state;
    return lm_rm_rf(dir, &e);
}

/* config.json and a safetensors file of 300,000 floats. */
static void write_tar(const char *to)
{
    lm_tar *t = NULL;
    lm_st_plan *p = NULL;
    lm_st_writer *w = NULL;
    lm_buf header = { 0 };
    lm_err e = { 0 };
    int64_t dim[] = { 300000 };
    int fd = open(to, O_WRONLY | O_CREAT | O_TRUNC, 0666);

    assert_true(fd >= 0);
    assert_int_equal(lm_tar_open(fd, to, NULL, 0, &t, &e), LM_OK);
    assert_int_equal(lm_tar_member(t, "m/config.json", 2, &e), LM_OK);
    assert_int_equal(lm_tar_write(t, "{}", 2, &e), LM_OK);
    assert_int_equal(lm_st_plan_new(&p, &e), LM_OK);
    assert_int_equal(lm_st_plan_add(p, "w", LM_DTYPE_F32, 1, dim, &e), LM_OK);
    assert_int_equal(lm_st_plan_header(p, &header, &e), LM_OK);
    assert_int_equal(lm_tar_member(t, "m/model.safetensors", header.len + 1200000, &e), LM_OK);
    assert_int_equal(lm_st_create_on(lm_tar_write, t, to, p, &w, &e), LM_OK);
    for (int i = 0; i < 300000; i++) {
        float x = (float)i;
        assert_int_equal(lm_st_write(w, &x, 4, &e), LM_OK);
    }
    assert_int_equal(lm_st_commit(w, &e), LM_OK);
    assert_int_equal(lm_tar_close(t, &e), LM_OK);
    close(fd);
    lm_st_plan_free(p);
    lm_buf_fini(&header);
}

/* An lm_read_fn on a descriptor. */
static lm_code read_fd(void *ctx, void *dst, size_t cap, size_t *got, lm_err *e)
{
    ssize_t n = read(*(int *)ctx, dst, cap);
    *got = n > 0 ? (size_t)n : 0;
    return n < 0 ? lm_fail(e, LM_EIO, "test", NULL, "cannot read") : LM_OK;
}

static void read_tar(const char *from)
{
    int fd = open(from, O_RDONLY);
    lm_ar *a = NULL;
    lm_st_stream *s = NULL;
    const lm_st_tensor *t = NULL;
    lm_err e = { 0 };
    const char *name;
    uint64_t size;
    char text[8];
    size_t got;
    float *x = NULL;

    if (lm_ar_open(read_fd, &fd, from, &a, &e) || lm_ar_next(a, &name, &size, &e))
        fail_msg("%s: %s", e.where, e.what);
    assert_string_equal(name, "m/config.json");
    assert_string_equal(lm_ar_root(a), "m/");
    assert_int_equal(size, 2);
    assert_int_equal(lm_ar_read(a, text, 8, &got, &e), LM_OK);
    assert_int_equal(got, 2);
    assert_int_equal(lm_ar_next(a, &name, NULL, &e), LM_OK);
    assert_string_equal(name, "m/model.safetensors");
    assert_int_equal(lm_st_stream_open(lm_ar_read, a, "member", &s, &e), LM_OK);
    assert_int_equal(lm_st_stream_next(s, &t, &e), LM_OK);
    assert_int_equal(lm_alloc_n(&x, 300000, 4, "test", &e), LM_OK);
    assert_int_equal(lm_st_stream_read(s, x, 1200000, &e), LM_OK);
    for (int i = 0; i < 300000; i++)
        assert_true(x[i] == (float)i);
    assert_int_equal(lm_st_stream_next(s, &t, &e), LM_OK);
    assert_null(t);
    lm_st_stream_close(s);
    assert_int_equal(lm_ar_next(a, &name, NULL, &e), LM_OK);
    assert_null(name);
    lm_ar_close(a);
    lm_free(x);
    close(fd);
}

static void test_round_trip(void **state)
{
    lm_buf a = { 0 }, b = { 0 };
    lm_err e = { 0 };
    (void)state;

    write_tar(path);
    read_tar(path);
    assert_int_equal(lm_file_read(path, 1 << 24, &a, &e), LM_OK);
    sleep(1); /* no clock in the bytes */
    write_tar(path);
    assert_int_equal(lm_file_read(path, 1 << 24, &b, &e), LM_OK);
    assert_int_equal(a.len, b.len);
    assert_memory_equal(a.data, b.data, a.len);
    lm_buf_fini(&a);
    lm_buf_fini(&b);
    snprintf(cmd, sizeof cmd, "gzip -k %s && tar -C %s -xf %s", path, dir, path);
    assert_int_equal(system(cmd), 0);
    snprintf(cmd, sizeof cmd, "%s.gz", path);
    read_tar(cmd);
    lm_st *s = NULL;
    snprintf(cmd, sizeof cmd, "%s/m/model.safetensors", dir);
    assert_int_equal(lm_st_open(cmd, &s, &e), LM_OK);
    lm_st_close(s);
}

static void test_names(void **state)
{
    static const char *const bad[] = { "",     "/a",  "..",    "../a", "a/..", "a/../b",
                                       "a//b", "./a", "a/./b", "a\\b", "a\nb", "a/" };
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        if (lm_ar_name_safe(bad[i]))
            fail_msg("'%s' passed", bad[i]);
    assert_true(lm_ar_name_safe("a"));
    assert_true(lm_ar_name_safe("m/..a/b.c"));
}

static void expect(const char *make, lm_code code, const char *message)
{
    lm_ar *a = NULL;
    lm_err e = { 0 };
    const char *name = "";
    char buf[4096];
    size_t got;

    assert_int_equal(system(make), 0);
    int fd = open(path, O_RDONLY);
    lm_code rc = lm_ar_open(read_fd, &fd, path, &a, &e);
    while (!rc && name) {
        rc = lm_ar_next(a, &name, NULL, &e);
        do
            got = 0;
        while (!rc && name && !(rc = lm_ar_read(a, buf, sizeof buf, &got, &e)) && got);
    }
    assert_int_equal(rc, code);
    if (message)
        assert_non_null(strstr(e.what, message));
    lm_ar_close(a);
    close(fd);
}

static void test_refused(void **state)
{
    (void)state;
    snprintf(cmd, sizeof cmd, "cd %s && echo x > f && tar -cf m.tar --transform='s,f,../f,' -P f",
             dir);
    expect(cmd, LM_EFORMAT, "has an unsafe");
    snprintf(cmd, sizeof cmd, "cd %s && tar -cPf m.tar %s/f", dir, dir);
    expect(cmd, LM_EFORMAT, "has an unsafe");
    snprintf(cmd, sizeof cmd,
             "cd %s && rm -rf s && mkdir s && ln -s /etc/passwd s/l && ln f s/h1 && ln f s/h2 && "
             "tar -cf m.tar ./s",
             dir);
    expect(cmd, LM_EFORMAT, "link or a device");
    snprintf(cmd, sizeof cmd, "cd %s && mkfifo s/p && tar -cf m.tar ./s/p", dir);
    expect(cmd, LM_EFORMAT, "link or a device");
    snprintf(cmd, sizeof cmd,
             "cd %s && head -c 100000 /dev/zero > f && tar -cf - f | head -c 50000 > m.tar", dir);
    expect(cmd, LM_EFORMAT, "Truncated");
    snprintf(cmd, sizeof cmd, "cd %s && echo this is no archive at all > m.tar", dir);
    expect(cmd, LM_EFORMAT, "Unrecognized");
    snprintf(cmd, sizeof cmd, "cd %s && truncate -s 1000000 f && tar --sparse -cf m.tar f", dir);
    expect(cmd, LM_EFORMAT, "sparse");
    snprintf(cmd, sizeof cmd, "rm %s", path);
    expect(cmd, LM_EIO, "cannot read"); /* the error of the reader */
}

static void test_writer_guards(void **state)
{
    lm_tar *t = NULL;
    lm_err e = { 0 };
    int fd = open("/dev/null", O_WRONLY);
    (void)state;

    assert_int_equal(lm_tar_open(fd, "null", NULL, 0, &t, &e), LM_OK);
    assert_int_equal(lm_tar_member(t, "../a", 2, &e), LM_EUSAGE);
    e = (lm_err){ 0 };
    assert_int_equal(lm_tar_member(t, "a", 2, &e), LM_OK);
    assert_int_equal(lm_tar_write(t, "abc", 3, &e), LM_EBUG);
    e = (lm_err){ 0 };
    assert_int_equal(lm_tar_member(t, "b", 2, &e), LM_EBUG);
    e = (lm_err){ 0 };
    assert_int_equal(lm_tar_close(t, &e), LM_EBUG);
    close(fd);

    e = (lm_err){ 0 };
    fd = open("/dev/full", O_WRONLY);
    if (fd < 0)
        skip();
    assert_int_equal(lm_tar_open(fd, "full", NULL, 0, &t, &e), LM_OK);
    assert_int_equal(lm_tar_member(t, "a", 0, &e), LM_OK);
    assert_int_equal(lm_tar_close(t, &e), LM_EIO);
    assert_true(e.sys != 0);
    close(fd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_round_trip, make_dir, drop_dir),
        cmocka_unit_test(test_names),
        cmocka_unit_test_setup_teardown(test_refused, make_dir, drop_dir),
        cmocka_unit_test(test_writer_guards),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
