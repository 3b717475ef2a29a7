/* SPDX-License-Identifier: Apache-2.0 */
/* test_base_owner.c -- temporaries of running processes are kept, those of dead processes
 * removed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/file.h"
#include "base/lock.h"
#include "base/mem.h"
#include "base/owner.h"

static char home[64], start[4096];

static int enter(void **state)
{
    (void)state;
    strcpy(home, "/tmp/test_owner.XXXXXX");
    return !getcwd(start, sizeof start) || !mkdtemp(home) || chdir(home);
}

static int leave(void **state)
{
    (void)state;
    return chdir(start) || lm_rm_rf(home, NULL);
}

static void put(const char *path)
{
    int fd = open(path, O_WRONLY | O_CREAT, 0666);

    assert_true(fd >= 0);
    close(fd);
}

static bool is_there(const char *path)
{
    struct stat st;

    return lstat(path, &st) == 0;
}

static size_t count(void)
{
    char **names;
    size_t n;

    assert_int_equal(lm_dir_list(".", &names, &n, NULL), LM_OK);
    lm_names_free(names, n);
    return n;
}

/* Start a process that writes a file and a folder until it is killed. */
static pid_t begin(void)
{
    int ready[2];
    char byte;
    pid_t child;

    assert_int_equal(pipe(ready), 0);
    child = fork();
    if (child == 0) {
        lm_out *o;
        lm_outdir *d;
        lm_buf inside = { 0 };

        if (lm_out_open("x", false, &o, NULL) || lm_outdir_open("m", false, NULL, NULL, &d, NULL))
            _exit(1);
        lm_buf_addf(&inside, NULL, "%s/config", lm_outdir_path(d));
        put(inside.data);
        if (write(ready[1], "!", 1) == 1)
            pause();
        _exit(1);
    }
    assert_int_equal(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    close(ready[1]);
    return child;
}

static void the_dead_are_told_from_the_living(void **state)
{
    pid_t child = begin();

    (void)state;
    assert_int_equal(count(), 2);
    lm_owner_sweep(".", false);
    assert_int_equal(count(), 2);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    lm_owner_sweep(".", false);
    assert_int_equal(count(), 0);
}

/* Opening the next output in the folder removes them. */
static void an_output_sweeps(void **state)
{
    pid_t child = begin();
    lm_out *o;

    (void)state;
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    assert_int_equal(lm_out_open("y", false, &o, NULL), LM_OK);
    assert_int_equal(count(), 1);
    lm_out_drop(o);
    assert_int_equal(count(), 0);
}

/* PID 1 of a container has the same number as PID 1 of the previous container: the sweeping
 * process's own PID in a name does not show that the owner is alive. */
static void own_pid_is_not_alive(void **state)
{
    char tag[LM_OWNER_TAG], name[128];

    (void)state;
    snprintf(name, sizeof name, ".step-000030.tmp.%s", lm_owner_tag(tag));
    assert_int_equal(mkdir(name, 0777), 0);
    lm_owner_sweep(".", false);
    assert_false(is_there(name));
}

static void own_outputs_stay(void **state)
{
    lm_out *o;

    (void)state;
    assert_int_equal(lm_out_open("x", false, &o, NULL), LM_OK);
    lm_owner_sweep(".", false);
    assert_int_equal(count(), 1);
    assert_int_equal(lm_out_commit(o, NULL), LM_OK);
    assert_true(is_there("x"));
}

/* Temporaries without a lock, such as a link of another machine's process, are kept for a day. */
static void without_a_lock_kept_a_day(void **state)
{
    const char *name = ".latest.tmp.lm0123456789abcdef-1-234.5";
    struct timespec then[2] = { { .tv_sec = time(NULL) - 25 * 3600 } };

    (void)state;
    then[1] = then[0];
    assert_int_equal(symlink("step-000010", name), 0);
    lm_owner_sweep(".", false);
    assert_true(is_there(name));
    lm_owner_sweep(".", true); /* no other process writes here: at once */
    assert_false(is_there(name));
    assert_int_equal(symlink("step-000010", name), 0);
    assert_int_equal(utimensat(AT_FDCWD, name, then, AT_SYMLINK_NOFOLLOW), 0);
    lm_owner_sweep(".", false);
    assert_false(is_there(name));
}

/* A lock names its holder, ends with its process, and is removed when it is released. */
static void locks(void **state)
{
    int ready[2];
    char byte, who[64];
    bool sure;
    lm_lock *l;
    lm_err e = { 0 }, f = { 0 };
    pid_t child;

    (void)state;
    assert_int_equal(pipe(ready), 0);
    child = fork();
    if (child == 0) {
        if (!lm_lock_take("lock", "run", &l, &sure, NULL) && write(ready[1], "!", 1) == 1)
            pause();
        _exit(1);
    }
    assert_int_equal(read(ready[0], &byte, 1), 1);
    assert_int_equal(lm_lock_take("lock", "run", &l, &sure, &e), LM_EUSAGE);
    assert_string_equal(e.where, "run");
    snprintf(who, sizeof who, "is in use by process %ld on ", (long)child);
    assert_memory_equal(e.what, who, strlen(who));
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    close(ready[0]);
    close(ready[1]);
    assert_true(is_there("lock"));
    assert_int_equal(lm_lock_take("lock", "run", &l, &sure, &f), LM_OK);
    assert_true(sure);
    lm_lock_drop(l);
    lm_lock_drop(NULL);
    assert_false(is_there("lock"));
    assert_int_equal(symlink("elsewhere", "lock"), 0); /* not followed */
    assert_int_equal(lm_lock_take("lock", "run", &l, &sure, &f), LM_EIO);
    assert_false(is_there("elsewhere"));
}

static void names_of_others(void **state)
{
    static const char *const names[] = {
        ".notes",
        ".x.tmp.1234",
        ".x.tmp.lm",
        ".x.tmp.lm0123456789abcde-1-2",
        ".x.tmp.lm0123456789abcdeg-1-2",
        ".x.tmp.lm0123456789abcdef-1",
        ".x.tmp.lm0123456789abcdef-1-",
        ".x.tmp.lm0123456789abcdef-1-2x",
        ".x.tmp.lm0123456789abcdef-1-2.",
        ".x.tmp.lm0123456789abcdef-1-2.3.4",
        "x.tmp.lm0123456789abcdef-1-2",
    };

    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        put(names[i]);
    lm_owner_sweep(".", false);
    assert_int_equal(count(), sizeof names / sizeof *names);
    lm_owner_sweep("none", false); /* no folder: nothing to do */
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, enter, leave)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(the_dead_are_told_from_the_living),
        TEST(an_output_sweeps),
        TEST(own_pid_is_not_alive),
        TEST(own_outputs_stay),
        TEST(without_a_lock_kept_a_day),
        TEST(locks),
        TEST(names_of_others),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
