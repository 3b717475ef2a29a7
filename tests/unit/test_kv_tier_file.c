/* SPDX-License-Identifier: Apache-2.0 */
/* The disk tier of a cache: pages in pieces; a disk that is full, fails, writes less than asked,
 * changes bytes.  pwritev and preadv below replace those of libc. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmocka.h>

#include "kv/tier_file.h"

enum { PIECES = 150, BYTES = PIECES * (PIECES - 1) / 2, PAGES = 8 };

static struct {
    int calls, fail_at, error; /* the fail_at-th call from now on fails */
    size_t most;               /* bytes that a call copies; 0: all */
    int interrupts;
    int last_fd;
} disk;

static ssize_t faulty(long number, int fd, const struct iovec *v, int n, off_t at)
{
    struct iovec one = *v;
    disk.last_fd = fd;
    if (disk.interrupts-- > 0) {
        errno = EINTR;
        return -1;
    }
    if (++disk.calls == disk.fail_at) {
        errno = disk.error;
        return disk.error ? -1 : 0;
    }
    if (disk.most) {
        one.iov_len = one.iov_len < disk.most ? one.iov_len : disk.most;
        v = &one;
        n = 1;
    }
    return syscall(number, fd, v, n, at & 0xffffffff, at >> 32);
}

ssize_t pwritev(int fd, const struct iovec *v, int n, off_t at)
{
    return faulty(SYS_pwritev, fd, v, n, at);
}

ssize_t preadv(int fd, const struct iovec *v, int n, off_t at)
{
    return faulty(SYS_preadv, fd, v, n, at);
}

/* A page as pieces of 0, 1, 2, ... bytes, each apart from the next in memory. */
typedef struct {
    uint8_t bytes[BYTES + PIECES];
    struct iovec piece[PIECES];
} page;

static void make_page(page *p, int seed)
{
    uint8_t *at = p->bytes;
    memset(p->bytes, 0xee, sizeof p->bytes);
    for (int i = 0; i < PIECES; i++) {
        p->piece[i] = (struct iovec){ at, (size_t)i };
        for (int j = 0; j < i; j++)
            at[j] = (uint8_t)(seed * 31 + i * 7 + j * (seed + 3));
        at += i + 1;
    }
}

static lm_tier_file *new_tier(void)
{
    const char *dir = getenv("TMPDIR");
    lm_tier_file *t = NULL;
    lm_err e = { 0 };
    memset(&disk, 0, sizeof disk);
    assert_int_equal(lm_tier_file_new(dir ? dir : "/tmp", BYTES, PAGES, &t, &e), LM_OK);
    return t;
}

static lm_code store(lm_tier_file *t, int64_t place, int seed, lm_err *e)
{
    page p;
    make_page(&p, seed);
    *e = (lm_err){ 0 };
    return lm_tier_file_write(t, place, p.piece, PIECES, e);
}

static lm_code load(lm_tier_file *t, int64_t place, int seed, lm_err *e)
{
    page want, got;
    make_page(&want, seed);
    make_page(&got, seed + 100);
    *e = (lm_err){ 0 };
    lm_code rc = lm_tier_file_read(t, place, got.piece, PIECES, e);
    if (!rc)
        assert_memory_equal(got.bytes, want.bytes, sizeof got.bytes);
    return rc;
}

static void pages_are_restored(void **state)
{
    (void)state;
    static const size_t most[] = { 0, 1, 7, 4096 };
    lm_err e;
    for (size_t m = 0; m < sizeof most / sizeof *most; m++) {
        lm_tier_file *t = new_tier();
        disk.most = most[m];
        disk.interrupts = 3;
        assert_int_equal(load(t, 3, 0, &e), LM_EFORMAT);
        assert_string_equal(e.what, "place 3 of the cache holds no page");
        for (int i = 0; i < 3 * PAGES; i++)
            assert_int_equal(store(t, i * 5 % PAGES, i, &e), LM_OK);
        for (int i = 2 * PAGES; i < 3 * PAGES; i++)
            assert_int_equal(load(t, i * 5 % PAGES, i, &e), LM_OK);
        assert_int_equal(lm_tier_file_closed(t)->code, LM_OK);
        lm_tier_file_free(t);
    }
}

/* Each call of the system fails once, in three ways: the tier closes, complete pages remain. */
static void failing_writes(void **state)
{
    (void)state;
    static const int errors[] = { ENOSPC, EIO, 0 };
    lm_err e, after;
    for (size_t k = 0; k < 3; k++)
        for (int n = 1; n <= 3; n++) { /* a page is three calls */
            lm_tier_file *t = new_tier();
            assert_int_equal(store(t, 0, 1, &e), LM_OK);
            assert_int_equal(disk.calls, 3);
            assert_int_equal(store(t, 1, 2, &e), LM_OK);
            disk.calls = 0;
            disk.fail_at = n;
            disk.error = errors[k];
            assert_int_equal(store(t, 1, 3, &e), LM_EIO);
            assert_int_equal(e.sys, errors[k] ? errors[k] : ENOSPC);
            assert_int_equal(lm_tier_file_closed(t)->code, LM_EIO);
            assert_string_equal(lm_tier_file_closed(t)->what, e.what);
            disk.fail_at = 0;
            assert_int_equal(store(t, 2, 4, &after), LM_ELIMIT);
            assert_int_equal(lm_tier_file_closed(t)->code, LM_EIO);
            assert_int_equal(load(t, 0, 1, &after), LM_OK);
            assert_int_equal(load(t, 1, 2, &after), LM_EFORMAT);
            disk.calls = 0;
            disk.fail_at = 1;
            assert_true(load(t, 0, 1, &after) != LM_OK); /* the first failure stays */
            assert_string_equal(lm_tier_file_closed(t)->what, e.what);
            lm_tier_file_free(t);
        }
}

static void failing_reads(void **state)
{
    (void)state;
    lm_err e;
    for (int n = 1; n <= 3; n++) {
        lm_tier_file *t = new_tier();
        assert_int_equal(store(t, 0, 1, &e), LM_OK);
        disk.calls = 0;
        disk.fail_at = n;
        disk.error = EIO;
        assert_int_equal(load(t, 0, 1, &e), LM_EIO);
        assert_int_equal(lm_tier_file_closed(t)->code, LM_EIO);
        assert_int_equal(load(t, 0, 1, &e), LM_EFORMAT);
        lm_tier_file_free(t);
    }
}

/* Any changed bit is noticed, and a file that became shorter. */
static void damaged_pages(void **state)
{
    (void)state;
    lm_err e;
    for (int i = 0; i < 200; i++) {
        lm_tier_file *t = new_tier();
        for (int j = 0; j < PAGES; j++)
            assert_int_equal(store(t, j, j, &e), LM_OK);
        off_t at = (off_t)5 * BYTES + (i * 911) % BYTES;
        uint8_t byte;
        assert_int_equal(pread(disk.last_fd, &byte, 1, at), 1);
        byte ^= (uint8_t)(1 << i % 8);
        assert_int_equal(pwrite(disk.last_fd, &byte, 1, at), 1);
        if (i % 50 == 49)
            assert_int_equal(ftruncate(disk.last_fd, at), 0);
        assert_int_equal(load(t, 4, 4, &e), LM_OK);
        assert_int_equal(load(t, 5, 5, &e), LM_EFORMAT);
        assert_string_equal(e.what, "a page of the cache differs from what was written");
        assert_int_equal(lm_tier_file_closed(t)->code, LM_EFORMAT);
        lm_tier_file_free(t);
    }
}

static void refused(void **state)
{
    (void)state;
    lm_tier_file *t = NULL;
    lm_err e = { 0 };
    page p;
    assert_int_equal(lm_tier_file_new("/nonexistent/folder", 10, 1, &t, &e), LM_EIO);
    assert_null(t);
    e = (lm_err){ 0 };
    assert_int_equal(lm_tier_file_new("/tmp", 0, 1, &t, &e), LM_EUSAGE);
    e = (lm_err){ 0 };
    assert_int_equal(lm_tier_file_new("/tmp", (size_t)1 << 40, (int64_t)1 << 40, &t, &e),
                     LM_EUSAGE);
    t = new_tier();
    make_page(&p, 1);
    assert_int_equal(store(t, PAGES, 1, &e), LM_EBUG);
    assert_int_equal(store(t, -1, 1, &e), LM_EBUG);
    e = (lm_err){ 0 };
    assert_int_equal(lm_tier_file_write(t, 0, p.piece, PIECES - 1, &e), LM_EBUG);
    assert_int_equal(disk.calls, 0);
    lm_tier_file_free(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pages_are_restored),
        cmocka_unit_test(failing_writes),
        cmocka_unit_test(failing_reads),
        cmocka_unit_test(damaged_pages),
        cmocka_unit_test(refused),
    };
    return cmocka_run_group_tests_name("kv_tier_file", tests, NULL, NULL);
}
