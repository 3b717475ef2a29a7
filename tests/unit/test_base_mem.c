/* SPDX-License-Identifier: Apache-2.0 */
/* test_base_mem.c -- errors, checked memory, arenas, growing text, CPU level, flags. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/clock.h"
#include "base/cpu.h"
#include "base/mem.h"
#include "base/progress.h"
#include "base/stop.h"

static void first_failure_wins(void **state)
{
    lm_err e = { 0 };

    (void)state;
    lm_err_in(&e, "layer %d", 1);
    assert_int_equal(e.code, LM_OK);
    assert_string_equal(e.where, "");
    errno = ENOENT;
    assert_int_equal(lm_fail(&e, LM_EIO, "a", "do", "bad %d", 3), LM_EIO);
    assert_int_equal(errno, ENOENT);
    assert_int_equal(lm_fail(&e, LM_EFORMAT, "b", NULL, "other"), LM_EFORMAT);
    assert_int_equal(e.code, LM_EIO);
    assert_int_equal(e.sys, ENOENT);
    assert_string_equal(e.what, "bad 3");
    assert_string_equal(e.todo, "do");
    lm_err_in(&e, "layer %d", 12);
    assert_string_equal(e.where, "layer 12: a");
    assert_int_equal(lm_fail(NULL, LM_EIO, "a", NULL, "x"), LM_EIO);
    lm_err_in(NULL, "x");
}

static void errors_cut_long_texts(void **state)
{
    char text[2000];
    lm_err e = { 0 };

    (void)state;
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = 0;
    errno = EIO;
    lm_fail(&e, LM_EFORMAT, text, text, "%s", text);
    assert_int_equal(strlen(e.where), 255);
    assert_int_equal(strlen(e.what), 255);
    assert_int_equal(e.sys, 0); /* not a failure of the system */
    lm_err_in(&e, "%s", text);
    assert_int_equal(strlen(e.where), 255);
}

static void allocations(void **state)
{
    int64_t *p = NULL;
    char *s = NULL;
    lm_err e = { 0 };
    uint64_t before = lm_alloc_count();

    (void)state;
    assert_int_equal(lm_alloc_n(&p, 1000, sizeof *p, "numbers", &e), LM_OK);
    assert_int_equal((uintptr_t)p % 64, 0);
    for (int i = 0; i < 1000; i++)
        assert_int_equal(p[i], 0);
    p[999] = 7;
    assert_int_equal(lm_realloc_n(&p, 2000, sizeof *p, "numbers", &e), LM_OK);
    assert_int_equal(p[999], 7);
    assert_int_equal(lm_alloc_count(), before + 2);
    lm_free(p);
    assert_int_equal(lm_alloc_n(&p, 0, 8, "nothing", &e), LM_OK);
    assert_non_null(p);
    lm_free(p);
    lm_free(NULL);
    assert_int_equal(lm_asprintf(&s, &e, "%s-%d", "a", 5), LM_OK);
    assert_string_equal(s, "a-5");
    lm_free(s);
    assert_int_equal(lm_strdup(&s, "", &e), LM_OK);
    assert_string_equal(s, "");
    lm_free(s);
}

static void impossible_allocations(void **state)
{
    void *p = (void *)1;
    lm_err e = { 0 }, f = { 0 }, g = { 0 };

    (void)state;
    assert_int_equal(lm_alloc_n(&p, SIZE_MAX / 4, 8, "tokens", &e), LM_ELIMIT);
    assert_non_null(strstr(e.what, "tokens"));
    assert_int_equal(lm_realloc_n(&p, SIZE_MAX, 2, "tokens", &f), LM_ELIMIT);
    assert_ptr_equal(p, (void *)1);
    assert_int_equal(lm_block_alloc(&p, (size_t)1 << 50, "activations", &g), LM_ELIMIT);
    assert_non_null(strstr(g.what, "1.00 PiB needed for activations"));
    assert_non_null(strstr(g.what, "free"));
}

static void growing(void **state)
{
    int *v = NULL;
    size_t cap = 0;
    lm_err e = { 0 };

    (void)state;
    for (size_t i = 0; i < 1000; i++) {
        assert_int_equal(lm_grow(&v, &cap, i + 1, sizeof *v, "numbers", &e), LM_OK);
        assert_true(cap > i);
        v[i] = (int)i;
    }
    assert_int_equal(v[999], 999);
    assert_int_equal(lm_grow(&v, &cap, SIZE_MAX / 2, sizeof *v, "numbers", &e), LM_ELIMIT);
    assert_int_equal(cap, 1024);
    lm_free(v);
}

static void blocks(void **state)
{
    static const size_t sizes[] = { 0, 1, 4096, 4097, (2 << 20) - 1, 2 << 20, (5 << 20) + 3 };
    lm_err e = { 0 };

    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        void *p;

        assert_int_equal(lm_block_alloc(&p, sizes[i], "test", &e), LM_OK);
        assert_int_equal((uintptr_t)p % 4096, 0);
        for (size_t k = 0; k < sizes[i]; k += 511)
            assert_int_equal(((char *)p)[k], 0);
        if (sizes[i])
            memset(p, 1, sizes[i]);
        lm_block_free(p, sizes[i]);
    }
    lm_block_free(NULL, 5);
    assert_true(lm_rss_now() > 0 && lm_rss_peak() >= lm_rss_now() / 2);
    assert_true(lm_mem_available() > 0);
}

/* A table of a TiB costs what is written of it. */
static void lazy_tables(void **state)
{
    const size_t n = (size_t)1 << 37;
    lm_err e = { 0 };
    int64_t *v;

    (void)state;
    size_t before = lm_rss_now();
    uint64_t calls = lm_alloc_count();
    assert_int_equal(lm_lazy_alloc(&v, n, sizeof *v, "numbers", &e), LM_OK);
    assert_int_equal(lm_alloc_count(), calls + 1);
    for (size_t i = 0; i < n; i += n / 64) {
        assert_int_equal(v[i], 0);
        v[i] = 5;
    }
    v[n - 1] = 6;
    assert_true(lm_rss_now() < before + (16 << 20));
    lm_lazy_free(v, n, sizeof *v);
    lm_lazy_free(NULL, 5, 5);
    assert_int_equal(lm_lazy_alloc(&v, SIZE_MAX / 2, sizeof *v, "numbers", &e), LM_ELIMIT);
}

static void arenas(void **state)
{
    lm_arena *a;
    lm_err e = { 0 };
    char *s;
    void *p;

    (void)state;
    assert_int_equal(lm_arena_new(&a, 0, &e), LM_OK);
    for (size_t n = 0; n < 3000; n += 7) {
        assert_int_equal(lm_arena_alloc(a, &p, n, 1, &e), LM_OK);
        assert_int_equal((uintptr_t)p % (n >= 64 ? 64 : 16), 0);
        for (size_t i = 0; i < n; i++)
            assert_int_equal(((char *)p)[i], 0);
        memset(p, 0xAA, n);
    }
    assert_int_equal(lm_arena_strdup(a, &s, "hello world", 5, &e), LM_OK);
    assert_string_equal(s, "hello");
    assert_int_equal(lm_arena_alloc(a, &p, SIZE_MAX / 2, 3, &e), LM_ELIMIT);
    lm_arena_free(a);
    lm_arena_free(NULL);
}

static void texts(void **state)
{
    lm_buf b = { 0 };
    lm_err e = { 0 };

    (void)state;
    assert_int_equal(lm_buf_add(&b, "", 0, &e), LM_OK);
    assert_string_equal(b.data, "");
    for (int i = 0; i < 1000; i++)
        assert_int_equal(lm_buf_addf(&b, &e, "%d,", i), LM_OK);
    assert_int_equal(b.len, 3890);
    assert_int_equal(strlen(b.data), b.len);
    assert_int_equal(lm_buf_room(&b, SIZE_MAX - 10, &e), LM_ELIMIT);
    assert_int_equal(b.len, 3890);
    lm_buf_fini(&b);
    lm_buf_fini(&b);
}

static void cpu_levels(void **state)
{
    lm_cpu_level l = LM_CPU_AMX;
    lm_err e = { 0 };

    (void)state;
    assert_int_equal(lm_cpu_level_parse("ref", &l, &e), LM_OK);
    assert_int_equal(l, LM_CPU_REF);
    assert_int_equal(lm_cpu_level_parse(lm_cpu_level_name(lm_cpu_detect()), &l, &e), LM_OK);
    assert_int_equal(l, lm_cpu_detect());
    assert_int_equal(lm_cpu_level_parse("sse", &l, &e), LM_EUSAGE);
    assert_string_equal(lm_cpu_level_name((lm_cpu_level)9), "unknown");
    assert_true(strlen(lm_cpu_model()) > 0);
}

static void flags(void **state)
{
    (void)state;
    assert_false(lm_stopping());
    assert_false(lm_poked());
    lm_poke();
    assert_true(lm_poked());
    assert_false(lm_poked());
    lm_stop_request(SIGTERM);
    assert_true(lm_stopping());
    assert_int_equal(lm_stop_signal(), SIGTERM);
    lm_stop_request(0);
    assert_false(lm_stopping());
    double t = lm_now();
    assert_true(lm_now() >= t);
}

static char got[64];

static void take_log(lm_sink *s, lm_log_level level, const char *text)
{
    (void)s;
    snprintf(got, sizeof got, "%d %s", (int)level, text);
}

static void sinks(void **state)
{
    lm_sink s = { .log = take_log };

    (void)state;
    lm_log(NULL, LM_LOG_WARN, "x");
    lm_progress(NULL, "x", 1, 2, "u", NULL);
    lm_progress(&s, "x", 1, 2, "u", NULL);
    lm_log(&s, LM_LOG_WARN, "a %d", 5);
    assert_string_equal(got, "2 a 5");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(first_failure_wins),
        cmocka_unit_test(errors_cut_long_texts),
        cmocka_unit_test(allocations),
        cmocka_unit_test(impossible_allocations),
        cmocka_unit_test(growing),
        cmocka_unit_test(blocks),
        cmocka_unit_test(lazy_tables),
        cmocka_unit_test(arenas),
        cmocka_unit_test(texts),
        cmocka_unit_test(cpu_levels),
        cmocka_unit_test(flags),
        cmocka_unit_test(sinks),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
