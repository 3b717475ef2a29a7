/* SPDX-License-Identifier: Apache-2.0 */
/* Metrics: the lines of the writer, and the reader on complete, truncated, growing and bad
 * files. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "format/metrics.h"

static char dir[] = "/tmp/test_metrics.XXXXXX", path[64];

static int make_dir(void **state)
{
    (void)state;
    if (!mkdtemp(dir))
        return -1;
    snprintf(path, sizeof path, "%s/run.jsonl", dir);
    return 0;
}

static int drop_dir(void **state)
{
    (void)state;
    lm_err e = { 0 };
    return lm_rm_rf(dir, &e);
}

static int drop_file(void **state)
{
    (void)state;
    unlink(path);
    return 0;
}

static void put(const char *mode, const char *text)
{
    FILE *f = fopen(path, mode);

    assert_non_null(f);
    fputs(text, f);
    assert_int_equal(fclose(f), 0);
}

static void expect_file(const char *text)
{
    lm_err e = { 0 };
    lm_buf b = { 0 };

    assert_int_equal(lm_file_read(path, 1 << 20, &b, &e), 0);
    assert_string_equal(b.data, text);
    lm_buf_fini(&b);
}

static void writes_one_object_a_line(void **state)
{
    (void)state;
    char *argv[] = { "train", "m\xFFn", "a\"b" };
    lm_err e = { 0 };
    lm_metrics *m;

    assert_int_equal(lm_metrics_open(path, LM_METRICS_NEW, NULL, &m, &e), 0);
    lm_metrics_begin_run(m, "train", "0.1.0", 3, argv, 7);
    assert_int_equal(lm_metrics_end(m, &e), 0);
    lm_metrics_begin(m, "step");
    lm_metrics_int(m, "step", 1);
    lm_metrics_f32(m, "loss", 0.5);
    lm_metrics_f64(m, "lr", 1e-3);
    lm_metrics_str(m, "path", NULL);
    assert_int_equal(lm_metrics_end(m, &e), 0);
    lm_metrics_begin(m, "step");
    lm_metrics_f32(m, "loss", NAN);
    lm_metrics_f32(m, "grad_norm", INFINITY);
    assert_int_equal(lm_metrics_end(m, &e), 0);
    lm_metrics_begin(m, "step");
    lm_metrics_f32(m, "loss", -INFINITY);
    assert_int_equal(lm_metrics_end(m, &e), 0);
    lm_metrics_begin(m, "end");
    lm_metrics_str(m, "status", "done");
    assert_int_equal(lm_metrics_end(m, &e), 0);
    assert_int_equal(lm_metrics_close(m, &e), 0);
    expect_file("{\"event\":\"run\",\"tool\":\"train\",\"version\":\"0.1.0\","
                "\"argv\":[\"train\",\"m\xEF\xBF\xBDn\",\"a\\\"b\"],\"seed\":7}\n"
                "{\"event\":\"step\",\"step\":1,\"loss\":0.5,\"lr\":0.001,"
                "\"path\":null}\n"
                "{\"event\":\"step\",\"loss\":null,\"grad_norm\":null,\"nonfinite\":\"nan\"}\n"
                "{\"event\":\"step\",\"loss\":null,\"nonfinite\":\"-inf\"}\n"
                "{\"event\":\"end\",\"status\":\"done\"}\n");
}

static void null_writer_does_nothing(void **state)
{
    (void)state;
    lm_err e = { 0 };

    lm_metrics_begin_run(NULL, "train", "1", 0, NULL, 0);
    lm_metrics_begin(NULL, "step");
    lm_metrics_int(NULL, "step", 1);
    lm_metrics_f32(NULL, "a", 1);
    lm_metrics_f64(NULL, "a", 1);
    lm_metrics_str(NULL, "a", "b");
    assert_int_equal(lm_metrics_end(NULL, &e), 0);
    assert_int_equal(lm_metrics_close(NULL, &e), 0);
}

static void refuses_replaces_appends(void **state)
{
    (void)state;
    lm_err e = { 0 };
    lm_metrics *m;

    put("w", "{\"event\":\"run\"}\n{\"event\":\"st");
    assert_int_equal(lm_metrics_open(path, LM_METRICS_NEW, NULL, &m, &e), LM_EUSAGE);
    assert_null(m);
    e = (lm_err){ 0 };
    assert_int_equal(lm_metrics_open(path, LM_METRICS_APPEND, NULL, &m, &e), 0);
    lm_metrics_begin(m, "end");
    assert_int_equal(lm_metrics_end(m, &e), 0);
    assert_int_equal(lm_metrics_close(m, &e), 0);
    expect_file("{\"event\":\"run\"}\n{\"event\":\"st\n{\"event\":\"end\"}\n");
    /* the old records stay until the new ones take over */
    assert_int_equal(lm_metrics_open(path, LM_METRICS_REPLACE, NULL, &m, &e), 0);
    lm_metrics_begin(m, "run");
    assert_int_equal(lm_metrics_end(m, &e), 0);
    expect_file("{\"event\":\"run\"}\n{\"event\":\"st\n{\"event\":\"end\"}\n{\"event\":\"run\"}\n");
    lm_metrics_settle(m);
    expect_file("{\"event\":\"run\"}\n");
    lm_metrics_settle(m);
    lm_metrics_begin(m, "end");
    assert_int_equal(lm_metrics_end(m, &e), 0);
    assert_int_equal(lm_metrics_close(m, &e), 0);
    expect_file("{\"event\":\"run\"}\n{\"event\":\"end\"}\n");
}

/* A descriptor that other processes write to: nothing in its file is removed or overwritten. */
static void shared_descriptors(void **state)
{
    lm_metrics *m;
    char name[64];
    lm_err e = { 0 };

    (void)state;
    for (int i = 0; i < 3; i++) {
        put("w", "before\n");
        int fd = open(path, O_WRONLY);
        assert_true(fd >= 0 && lseek(fd, 0, SEEK_END) == 7);
        snprintf(name, sizeof name,
                 i == 0   ? "/dev/fd/%d"
                 : i == 1 ? "/proc/self/fd/%d"
                          : "fd:%d",
                 fd);
        assert_int_equal(lm_metrics_open(name, LM_METRICS_REPLACE, NULL, &m, &e), 0);
        lm_metrics_begin(m, "run");
        assert_int_equal(lm_metrics_end(m, &e), 0);
        lm_metrics_settle(m);
        assert_int_equal(lm_metrics_close(m, &e), 0);
        assert_int_equal(write(fd, "after\n", 6), 6);
        assert_int_equal(close(fd), 0);
        expect_file("before\n{\"event\":\"run\"}\nafter\n");
    }
    assert_int_equal(unlink(path), 0);
}

static void bad_destinations(void **state)
{
    (void)state;
    lm_err e = { 0 };
    lm_metrics *m;

    assert_int_equal(lm_metrics_open("fd:777", LM_METRICS_NEW, NULL, &m, &e), LM_EUSAGE);
    e = (lm_err){ 0 };
    assert_int_equal(lm_metrics_open("fd:x", LM_METRICS_NEW, NULL, &m, &e), LM_EUSAGE);
    e = (lm_err){ 0 };
    assert_int_equal(lm_metrics_open("/nonexistent/run.jsonl", LM_METRICS_NEW, NULL, &m, &e),
                     LM_EIO);
    assert_int_equal(e.sys, ENOENT);
}

static void full_disk_is_reported(void **state)
{
    (void)state;
    lm_err e = { 0 };
    lm_metrics *m;

    assert_int_equal(lm_metrics_open("/dev/full", LM_METRICS_NEW, NULL, &m, &e), 0);
    lm_metrics_begin(m, "step");
    assert_int_equal(lm_metrics_end(m, &e), LM_EIO);
    assert_int_equal(e.sys, ENOSPC);
    lm_metrics_close(m, &e);
}

static int warnings;

static void count_warnings(lm_sink *s, lm_log_level level, const char *text)
{
    (void)s;
    warnings += level == LM_LOG_WARN && strstr(text, "metrics") != NULL;
}

static void broken_pipe_is_dropped_with_one_warning(void **state)
{
    (void)state;
    lm_sink sink = { .log = count_warnings };
    lm_err e = { 0 };
    lm_metrics *m;
    char dest[16];
    int p[2];

    signal(SIGPIPE, SIG_IGN);
    assert_int_equal(pipe(p), 0);
    snprintf(dest, sizeof dest, "fd:%d", p[1]);
    assert_int_equal(lm_metrics_open(dest, LM_METRICS_NEW, &sink, &m, &e), 0);
    close(p[0]);
    for (int i = 0; i < 3; i++) {
        lm_metrics_begin(m, "step");
        lm_metrics_int(m, "step", i);
        assert_int_equal(lm_metrics_end(m, &e), 0);
    }
    assert_int_equal(warnings, 1);
    assert_int_equal(lm_metrics_close(m, &e), 0);
    assert_int_equal(fcntl(p[1], F_GETFL) >= 0, 1); /* the descriptor stays its owner's */
    close(p[1]);
}

static void a_step_allocates_nothing(void **state)
{
    (void)state;
    lm_err e = { 0 };
    lm_metrics *m;
    uint64_t before;

    assert_int_equal(lm_metrics_open(path, LM_METRICS_NEW, NULL, &m, &e), 0);
    before = lm_alloc_count();
    for (int i = 0; i < 5; i++) {
        lm_metrics_begin(m, "step");
        for (int k = 0; k < 40; k++)
            lm_metrics_f64(m, "some_rather_long_key", k / 3.0);
        assert_int_equal(lm_metrics_end(m, &e), 0);
    }
    assert_int_equal(lm_alloc_count(), before);
    assert_int_equal(lm_metrics_close(m, &e), 0);
}

static void reads_series_by_event_and_key(void **state)
{
    (void)state;
    lm_err e = { 0 };
    lm_metrics_file *f;
    const lm_series *s;
    bool grew;

    put("w",
        "{\"event\":\"run\",\"seed\":1}\n"
        "{\"event\":\"step\",\"step\":1,\"tokens\":10,\"seconds\":0.5,\"loss\":4,\"note\":\"x\"}\n"
        "\n"
        "{\"event\":\"eval\",\"step\":1,\"loss\":5}\r\n"
        "{\"event\":\"step\",\"step\":2,\"loss\":null,\"nonfinite\":\"inf\"}\n"
        "{\"event\":\"end\",\"status\":\"stopped\"}\n");
    assert_int_equal(lm_metrics_file_open(path, &f, &e), 0);
    assert_int_equal(lm_metrics_file_poll(f, true, &grew, &e), 0);
    assert_true(grew);
    s = lm_metrics_file_series(f, "step", "loss");
    assert_non_null(s);
    assert_int_equal(s->n, 2);
    assert_true(s->value[0] == 4 && s->step[0] == 1 && s->tokens[0] == 10 && s->seconds[0] == 0.5);
    assert_true(isinf(s->value[1]) && s->step[1] == 2 && isnan(s->tokens[1]));
    s = lm_metrics_file_series(f, "eval", "loss");
    assert_non_null(s);
    assert_true(s->n == 1 && s->value[0] == 5);
    assert_null(lm_metrics_file_series(f, "step", "note"));
    assert_null(lm_metrics_file_series(f, "run", "seed"));
    assert_string_equal(lm_metrics_file_status(f), "stopped");
    assert_int_equal(lm_metrics_file_skipped(f), 0);
    lm_metrics_file_close(f);
}

static void resumed_steps_replace_what_was_lost(void **state)
{
    (void)state;
    lm_err e = { 0 };
    lm_metrics_file *f;
    const lm_series *s;

    put("w",
        "{\"event\":\"step\",\"step\":1,\"loss\":4}\n{\"event\":\"step\",\"step\":2,\"loss\":3}\n"
        "{\"event\":\"step\",\"step\":3,\"loss\":9}\n{\"event\":\"end\",\"status\":\"failed\"}\n"
        "{\"event\":\"run\"}\n{\"event\":\"step\",\"step\":2,\"loss\":2}\n");
    assert_int_equal(lm_metrics_file_open(path, &f, &e), 0);
    assert_int_equal(lm_metrics_file_poll(f, true, NULL, &e), 0);
    s = lm_metrics_file_series(f, "step", "loss");
    assert_int_equal(s->n, 2);
    assert_true(s->value[0] == 4 && s->value[1] == 2);
    assert_null(lm_metrics_file_status(f));
    lm_metrics_file_close(f);
}

static void bad_lines_are_counted_and_a_cut_one_is_not(void **state)
{
    (void)state;
    lm_err e = { 0 };
    lm_metrics_file *f;

    put("w", "{\"event\":\"step\",\"step\":1,\"loss\":4}\nnot json\n[1]\n"
             "{\"event\":\"step\",\"step\":2,\"loss\":3}\n{\"event\":\"step\",\"st");
    assert_int_equal(lm_metrics_file_open(path, &f, &e), 0);
    assert_int_equal(lm_metrics_file_poll(f, true, NULL, &e), 0);
    assert_int_equal(lm_metrics_file_series(f, "step", "loss")->n, 2);
    assert_int_equal(lm_metrics_file_skipped(f), 2);
    assert_int_equal(lm_metrics_file_first_skipped(f), 2);
    lm_metrics_file_close(f);
}

static void a_growing_file_is_followed(void **state)
{
    (void)state;
    lm_err e = { 0 };
    lm_metrics_file *f;
    bool grew;

    put("w", "{\"event\":\"step\",\"step\":1,\"loss\":4}\n{\"event\":\"step\",\"st");
    assert_int_equal(lm_metrics_file_open(path, &f, &e), 0);
    assert_int_equal(lm_metrics_file_poll(f, false, &grew, &e), 0);
    assert_true(grew);
    assert_int_equal(lm_metrics_file_poll(f, false, &grew, &e), 0);
    assert_false(grew);
    put("a", "ep\":2,\"loss\":3}\n");
    assert_int_equal(lm_metrics_file_poll(f, false, &grew, &e), 0);
    assert_true(grew);
    assert_int_equal(lm_metrics_file_series(f, "step", "loss")->n, 2);
    put("w", "{\"event\":\"step\",\"step\":7,\"loss\":1}\n"); /* emptied and begun anew */
    assert_int_equal(lm_metrics_file_poll(f, false, &grew, &e), 0);
    assert_true(grew);
    assert_int_equal(lm_metrics_file_series(f, "step", "loss")->n, 1);
    assert_int_equal(lm_metrics_file_skipped(f), 0);
    unlink(path);
    put("w",
        "{\"event\":\"step\",\"step\":8,\"loss\":1}\n{\"event\":\"step\",\"step\":9,\"loss\":1}\n");
    assert_int_equal(lm_metrics_file_poll(f, false, &grew, &e), 0);
    assert_int_equal(lm_metrics_file_series(f, "step", "loss")->n, 2);
    lm_metrics_file_close(f);
}

static void a_giant_line_costs_no_memory(void **state)
{
    (void)state;
    lm_err e = { 0 };
    lm_metrics_file *f;
    FILE *out = fopen(path, "w");

    assert_non_null(out);
    for (int i = 0; i < 5 << 20; i++)
        putc('x', out);
    fputs("\n{\"event\":\"step\",\"step\":1,\"loss\":4}\n", out);
    fclose(out);
    assert_int_equal(lm_metrics_file_open(path, &f, &e), 0);
    assert_int_equal(lm_metrics_file_poll(f, true, NULL, &e), 0);
    assert_int_equal(lm_metrics_file_skipped(f), 1);
    assert_int_equal(lm_metrics_file_series(f, "step", "loss")->n, 1);
    lm_metrics_file_close(f);
}

static void lists_are_rows_by_layer(void **state)
{
    (void)state;
    lm_err e = { 0 };
    lm_metrics *m;
    lm_metrics_file *f;

    assert_int_equal(lm_metrics_open(path, LM_METRICS_NEW, NULL, &m, &e), 0);
    for (int step = 1; step < 4; step++)
        for (int layer = 0; layer < 2; layer++) {
            lm_metrics_begin(m, "experts");
            lm_metrics_int(m, "step", step);
            lm_metrics_int(m, "layer", layer);
            lm_metrics_int(m, "dead", layer);
            lm_metrics_list(m, "load", (double[]){ step, layer, NAN }, 3);
            assert_int_equal(lm_metrics_end(m, &e), 0);
        }
    assert_int_equal(lm_metrics_close(m, &e), 0);
    put("a", "{\"event\":\"experts\",\"step\":3,\"layer\":1,\"load\":[7,8,9]}\n");
    assert_int_equal(lm_metrics_file_open(path, &f, &e), 0);
    assert_int_equal(lm_metrics_file_poll(f, true, NULL, &e), 0);
    for (size_t i = 0; i < 2; i++) {
        const lm_list_series *r = lm_metrics_file_rows(f, i);
        assert_string_equal(r->event, i ? "experts.1" : "experts.0");
        assert_string_equal(r->key, "load");
        assert_int_equal(r->n, 3);
        assert_int_equal(r->width, 3);
        assert_true(r->step[2] == 3 && r->value[3] == 2 && r->value[4] == (double)i);
        assert_true(isnan(r->value[2]));
        assert_true(r->value[8] == 9 || i == 0); /* a resumed step replaces the one before */
    }
    assert_null(lm_metrics_file_rows(f, 2));
    assert_int_equal(lm_metrics_file_series(f, "experts.1", "dead")->n, 3);
    lm_metrics_file_close(f);
}

static void missing_file_and_folder(void **state)
{
    (void)state;
    lm_err e = { 0 };
    lm_metrics_file *f;

    assert_int_equal(lm_metrics_file_open(path, &f, &e), LM_EIO);
    assert_int_equal(e.sys, ENOENT);
    e = (lm_err){ 0 };
    assert_int_equal(lm_metrics_file_open(dir, &f, &e), LM_EFORMAT);
    assert_null(f);
    lm_metrics_file_close(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(writes_one_object_a_line, drop_file),
        cmocka_unit_test(null_writer_does_nothing),
        cmocka_unit_test_teardown(refuses_replaces_appends, drop_file),
        cmocka_unit_test(shared_descriptors),
        cmocka_unit_test(bad_destinations),
        cmocka_unit_test(full_disk_is_reported),
        cmocka_unit_test(broken_pipe_is_dropped_with_one_warning),
        cmocka_unit_test_teardown(a_step_allocates_nothing, drop_file),
        cmocka_unit_test_teardown(reads_series_by_event_and_key, drop_file),
        cmocka_unit_test_teardown(resumed_steps_replace_what_was_lost, drop_file),
        cmocka_unit_test_teardown(bad_lines_are_counted_and_a_cut_one_is_not, drop_file),
        cmocka_unit_test_teardown(a_growing_file_is_followed, drop_file),
        cmocka_unit_test_teardown(a_giant_line_costs_no_memory, drop_file),
        cmocka_unit_test_teardown(lists_are_rows_by_layer, drop_file),
        cmocka_unit_test(missing_file_and_folder),
    };
    return cmocka_run_group_tests(tests, make_dir, drop_dir);
}
