/* SPDX-License-Identifier: Apache-2.0 */
/* test_base_file.c -- inputs, atomic outputs, folders, paths. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/writer.h"

static char home[64], start[4096];

static int enter(void **state)
{
    (void)state;
    strcpy(home, "/tmp/test_file.XXXXXX");
    return !getcwd(start, sizeof start) || !mkdtemp(home) || chdir(home);
}

static int leave(void **state)
{
    (void)state;
    return chdir(start) || lm_rm_rf(home, NULL);
}

static void put(const char *path, const char *text)
{
    FILE *f = fopen(path, "w");

    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static void holds(const char *path, const char *text)
{
    lm_buf b = { 0 };
    lm_err e = { 0 };

    assert_int_equal(lm_file_read(path, 1 << 20, &b, &e), LM_OK);
    assert_string_equal(b.data, text);
    lm_buf_fini(&b);
}

/* Number of files in a folder, temporaries included. */
static size_t files(const char *dir)
{
    char **names;
    size_t n;
    lm_err e = { 0 };

    assert_int_equal(lm_dir_list(dir, &names, &n, &e), LM_OK);
    lm_names_free(names, n);
    return n;
}

/* Files of the folder that may be replaced. */
static bool own(const void *ctx, const char *name)
{
    return !strcmp(name, ctx) || !strcmp(name, "sub");
}

static void maps(void **state)
{
    lm_map m;
    lm_err e = { 0 }, f = { 0 }, g = { 0 };

    (void)state;
    put("a", "hello");
    put("empty", "");
    assert_int_equal(lm_map_open("a", &m, &e), LM_OK);
    assert_int_equal(m.size, 5);
    assert_memory_equal(m.data, "hello", 5);
    lm_map_close(&m);
    lm_map_close(&m);
    assert_int_equal(lm_map_open("empty", &m, &e), LM_OK);
    assert_non_null(m.data);
    assert_int_equal(m.size, 0);
    lm_map_close(&m);
    assert_int_equal(lm_map_open("none", &m, &e), LM_EIO);
    assert_int_equal(e.sys, ENOENT);
    lm_map_close(&m);
    assert_int_equal(lm_map_open(".", &m, &f), LM_EFORMAT);
    assert_int_equal(lm_map_open("/dev/null", &m, &g), LM_EFORMAT);
}

/* Writing from the map fails with EFAULT, which must not be reported as an error of the output. */
static void a_map_that_shrinks(void **state)
{
    static char text[8192];
    char name[256], path[320];
    lm_map m;
    lm_out *o;
    lm_err e = { 0 };

    (void)state;
    memset(text, 'x', sizeof text - 1);
    put("in", text);
    assert_int_equal(lm_map_open("in", &m, &e), LM_OK);
    snprintf(path, sizeof path, "%s/in", home);
    assert_true(lm_map_name(m.data + 5000, name, sizeof name));
    assert_string_equal(name, path);
    assert_false(lm_map_name(&m, name, sizeof name));
    assert_int_equal(truncate("in", 10), 0);
    assert_int_equal(lm_out_open("out", false, &o, &e), LM_OK);
    assert_int_equal(lm_write_all(lm_out_fd(o), m.data, m.size, "out", &e), LM_EIO);
    assert_string_equal(e.where, path);
    assert_string_equal(e.what, "was truncated while it was read");
    assert_int_equal(e.sys, 0);
    lm_out_drop(o);
    lm_map_close(&m);
}

static void whole_files(void **state)
{
    lm_buf b = { 0 };
    lm_err e = { 0 }, f = { 0 };

    (void)state;
    put("a", "hello");
    assert_int_equal(lm_file_read("a", 5, &b, &e), LM_OK);
    assert_int_equal(lm_file_read("a", 5, &b, &e), LM_OK); /* appends */
    assert_string_equal(b.data, "hellohello");
    assert_int_equal(lm_file_read("a", 4, &b, &e), LM_EFORMAT);
    assert_int_equal(lm_file_read(".", 4, &b, &f), LM_EIO);
    assert_int_equal(f.sys, EISDIR);
    lm_buf_fini(&b);
}

static void appears_at_commit(void **state)
{
    lm_out *o;
    lm_err e = { 0 };
    struct stat st;

    (void)state;
    umask(022);
    assert_int_equal(lm_out_open("x", false, &o, &e), LM_OK);
    assert_string_equal(lm_out_path(o), "x");
    fputs("abc", lm_out_file(o));
    assert_false(lm_path_exists("x"));
    assert_int_equal(files("."), 1);
    assert_int_equal(lm_out_commit(o, &e), LM_OK);
    holds("x", "abc");
    assert_int_equal(files("."), 1);
    assert_int_equal(stat("x", &st), 0);
    assert_int_equal(st.st_mode & 0777, 0644);
}

static void drop_leaves_nothing(void **state)
{
    lm_out *o;
    lm_err e = { 0 };

    (void)state;
    put("x", "old");
    assert_int_equal(lm_out_open("x", true, &o, &e), LM_OK);
    fputs("new", lm_out_file(o));
    lm_out_drop(o);
    lm_out_drop(NULL);
    holds("x", "old");
    assert_int_equal(files("."), 1);
}

static void existing_targets(void **state)
{
    lm_out *o;
    lm_err e = { 0 }, f = { 0 }, g = { 0 };

    (void)state;
    put("x", "old");
    assert_int_equal(lm_out_open("x", false, &o, &e), LM_EUSAGE);
    assert_non_null(strstr(e.todo, "allow overwriting it"));
    assert_int_equal(lm_out_open("x", true, &o, &f), LM_OK);
    fputs("new", lm_out_file(o));
    assert_int_equal(lm_out_commit(o, &f), LM_OK);
    holds("x", "new");
    /* appears while we write */
    assert_int_equal(lm_out_open("y", false, &o, &f), LM_OK);
    put("y", "theirs");
    assert_int_equal(lm_out_commit(o, &g), LM_EUSAGE);
    holds("y", "theirs");
    assert_int_equal(files("."), 2);
}

static void impossible_targets(void **state)
{
    lm_out *o;
    lm_err a = { 0 }, b = { 0 }, c = { 0 }, d = { 0 };

    (void)state;
    assert_int_equal(lm_out_open("none/x", false, &o, &a), LM_EIO);
    assert_int_equal(a.sys, ENOENT);
    assert_string_equal(a.todo, "create the folder 'none' first");
    assert_int_equal(lm_out_open(".", true, &o, &b), LM_EUSAGE);
    assert_int_equal(lm_out_open("", true, &o, &c), LM_EUSAGE);
    put("file", "");
    assert_int_equal(lm_out_open("file/x", true, &o, &d), LM_EIO);
    assert_int_equal(files("."), 1);
}

static void links_stay(void **state)
{
    lm_out *o;
    lm_err e = { 0 };
    struct stat st;

    (void)state;
    assert_int_equal(mkdir("d", 0777), 0);
    put("d/real", "old");
    assert_int_equal(symlink("d/real", "link"), 0);
    assert_int_equal(lm_out_open("link", true, &o, &e), LM_OK);
    fputs("new", lm_out_file(o));
    assert_int_equal(lm_out_commit(o, &e), LM_OK);
    assert_int_equal(lstat("link", &st), 0);
    assert_true(S_ISLNK(st.st_mode));
    holds("d/real", "new");
}

static void long_names(void **state)
{
    char name[256];
    lm_out *o;
    lm_err e = { 0 };

    (void)state;
    memset(name, 'n', 255);
    name[255] = 0;
    assert_int_equal(lm_out_open(name, false, &o, &e), LM_OK);
    assert_int_equal(lm_out_commit(o, &e), LM_OK);
    assert_true(lm_path_exists(name));
}

/* Refused at once, not when the finished output is renamed. */
static void too_long_names(void **state)
{
    char name[257];
    lm_out *o;
    lm_outdir *d;
    lm_err e = { 0 }, f = { 0 };

    (void)state;
    memset(name, 'n', 256);
    name[256] = 0;
    assert_int_equal(lm_out_open(name, false, &o, &e), LM_EUSAGE);
    assert_string_equal(e.what, "the name has 256 bytes, the file system's limit is 255");
    assert_int_equal(lm_outdir_open(name, false, own, "config", &d, &f), LM_EUSAGE);
    assert_int_equal(files("."), 0);
}

static void fill(const lm_outdir *d, const char *name, const char *text)
{
    char *path;
    lm_err e = { 0 };

    assert_int_equal(lm_path_join(&path, lm_outdir_path(d), name, &e), LM_OK);
    put(path, text);
    lm_free(path);
}

static unsigned mode_of(const char *path)
{
    struct stat st;

    assert_int_equal(stat(path, &st), 0);
    return st.st_mode & 07777;
}

/* The replaced file may be private, or shared with a group; the new file has its mode and group
 * from the first byte on. */
static void modes_are_kept(void **state)
{
    lm_out *o;
    lm_outdir *d;
    lm_err e = { 0 };
    struct stat st;

    (void)state;
    umask(022);
    put("x", "old");
    assert_int_equal(chmod("x", 0640), 0);
    assert_int_equal(lm_out_open("x", true, &o, &e), LM_OK);
    assert_int_equal(fstat(lm_out_fd(o), &st), 0);
    assert_int_equal(st.st_mode & 0777, 0640);
    assert_int_equal(lm_out_commit(o, &e), LM_OK);
    assert_int_equal(mode_of("x"), 0640);

    assert_int_equal(mkdir("m", 0777), 0);
    assert_int_equal(chmod("m", 0500), 0); /* an empty folder may be replaced without force */
    assert_int_equal(lm_outdir_open("m", false, own, "config", &d, &e), LM_OK);
    assert_int_equal(mode_of(lm_outdir_path(d)), 0700);
    fill(d, "config", "1");
    assert_int_equal(lm_outdir_commit(d, &e), LM_OK);
    assert_int_equal(mode_of("m"), 0500);

    assert_int_equal(chmod("m", 0755), 0);
    assert_int_equal(chmod("m/config", 0600), 0); /* a private file in a public folder */
    assert_int_equal(lm_outdir_open("m", true, own, "config", &d, &e), LM_OK);
    fill(d, "config", "2");
    assert_int_equal(lm_outdir_commit(d, &e), LM_OK);
    assert_int_equal(mode_of("m/config"), 0600);
}

static void same_target_twice(void **state)
{
    lm_out *a, *b;
    lm_err e = { 0 };

    (void)state;
    assert_int_equal(lm_out_open("x", true, &a, &e), LM_OK);
    assert_int_equal(lm_out_open("x", true, &b, &e), LM_OK);
    fputs("a", lm_out_file(a));
    fputs("b", lm_out_file(b));
    assert_int_equal(lm_out_commit(b, &e), LM_OK);
    assert_int_equal(lm_out_commit(a, &e), LM_OK);
    holds("x", "a");
    assert_int_equal(files("."), 1);
}

static void full_disk(void **state)
{
    lm_out *o;
    lm_err e = { 0 }, f = { 0 };
    int fd;

    (void)state;
    assert_int_equal(lm_out_open("/dev/full", false, &o, &e), LM_OK);
    fputs("abc", lm_out_file(o));
    assert_int_equal(lm_out_commit(o, &e), LM_EIO);
    assert_int_equal(e.sys, ENOSPC);
    assert_int_equal(lm_out_open("/dev/full", false, &o, &f), LM_OK);
    fd = lm_out_fd(o);
    assert_int_equal(lm_write_all(fd, "abc", 3, "full", &f), LM_EIO);
    lm_out_drop(o);
    assert_true(lm_path_exists("/dev/full"));
}

/* The reason of a failed write is reported, also for standard output, and when fflush has nothing left to write. */
static void reasons_are_kept(void **state)
{
    int terminal = dup(STDOUT_FILENO), full = open("/dev/full", O_WRONLY);
    FILE *before = stdout;
    (void)state;
    assert_true(terminal >= 0 && full >= 0);
    static const char block[1 << 16];
    for (size_t bytes = 1; bytes <= sizeof block; bytes *= 256)
        for (int std = 0; std < 2; std++) {
            lm_err e = { 0 };
            lm_out *o;
            lm_writer_stdout()->error = 0;
            fflush(stdout);
            stdout = lm_writer_open(lm_writer_stdout());
            dup2(full, STDOUT_FILENO);
            lm_code rc = lm_out_open(std ? "-" : "/dev/full", false, &o, &e);
            if (!rc)
                fwrite(block, 1, bytes, lm_out_file(o));
            rc = rc ? rc : lm_out_commit(o, &e);
            fclose(stdout);
            dup2(terminal, STDOUT_FILENO);
            stdout = before;
            assert_int_equal(rc, LM_EIO);
            assert_int_equal(e.sys, ENOSPC);
            assert_string_equal(e.where, std ? "standard output" : "/dev/full");
        }
    close(full);
    close(terminal);
}

/* Killed between opening and committing: the target is unchanged. */
static void killed_halfway(void **state)
{
    int status;
    pid_t child;

    (void)state;
    put("x", "old");
    child = fork();
    if (child == 0) {
        lm_out *o;

        if (lm_out_open("x", true, &o, NULL))
            _exit(1);
        fputs("new", lm_out_file(o));
        fflush(lm_out_file(o));
        raise(SIGKILL);
    }
    waitpid(child, &status, 0);
    assert_true(WIFSIGNALED(status));
    holds("x", "old");
}

static void drop_all(void **state)
{
    lm_out *a, *b;
    lm_outdir *d;
    lm_err e = { 0 };
    int status;
    pid_t child;

    (void)state;
    assert_int_equal(lm_out_open("x", false, &a, &e), LM_OK);
    assert_int_equal(lm_out_open("y", false, &b, &e), LM_OK);
    assert_int_equal(lm_outdir_open("z", false, own, "config", &d, &e), LM_OK);
    child = fork();
    if (child == 0) { /* the child must not remove the parent's file */
        lm_out_drop_all();
        _exit(0);
    }
    waitpid(child, &status, 0);
    assert_int_equal(files("."), 3);
    lm_out_drop(a);
    assert_int_equal(files("."), 2);
    lm_out_drop_all();
    assert_int_equal(files("."), 0);
    lm_out_drop(b);
    lm_outdir_drop(d);
}

static void folders(void **state)
{
    lm_outdir *d;
    char *sub;
    lm_err e = { 0 }, f = { 0 };

    (void)state;
    assert_int_equal(lm_outdir_open("m/", false, own, "config", &d, &e), LM_OK);
    fill(d, "config", "1");
    assert_int_equal(lm_path_join(&sub, lm_outdir_path(d), "sub/deep", &e), LM_OK);
    assert_int_equal(lm_mkdir_p(sub, &e), LM_OK);
    lm_free(sub);
    assert_int_equal(symlink("nowhere", "m-link"), 0);
    fill(d, "sub/deep/file", "2");
    assert_false(lm_path_exists("m"));
    assert_int_equal(lm_outdir_commit(d, &e), LM_OK);
    holds("m/config", "1");
    holds("m/sub/deep/file", "2");
    assert_int_equal(files("."), 2);

    assert_int_equal(lm_outdir_open("m", false, own, "config", &d, &f), LM_EUSAGE);
    assert_int_equal(lm_rm_rf("m/sub", &e), LM_OK);
    assert_int_equal(lm_outdir_open("m", true, own, "config", &d, &e), LM_OK);
    fill(d, "config", "3");
    assert_int_equal(lm_outdir_commit(d, &e), LM_OK);
    holds("m/config", "3");
    assert_int_equal(files("."), 2);

    assert_int_equal(lm_outdir_open("m", true, own, "config", &d, &e), LM_OK);
    lm_outdir_drop(d);
    lm_outdir_drop(NULL);
    holds("m/config", "3");
    assert_int_equal(files("."), 2);
}

/* Foreign files are kept, whether they exist at the beginning or appear later; a folder with the
 * name of a replaceable file is foreign. */
static void foreign_files_stay(void **state)
{
    lm_outdir *d;
    lm_err e = { 0 }, a = { 0 }, b = { 0 }, c = { 0 }, g = { 0 };

    (void)state;
    assert_int_equal(mkdir("m", 0777), 0);
    put("m/config", "1");
    put("m/notes", "mine");
    assert_int_equal(lm_outdir_open("m", true, own, "config", &d, &a), LM_EUSAGE);
    assert_string_equal(a.what,
                        "holds 'notes', which does not belong to the new output and would be lost");
    assert_int_equal(unlink("m/notes"), 0);
    assert_int_equal(lm_outdir_open("m", true, own, "config", &d, &e), LM_OK);
    fill(d, "config", "2");
    put("m/notes", "mine");
    assert_int_equal(lm_outdir_commit(d, &b), LM_EUSAGE);
    holds("m/config", "1");
    holds("m/notes", "mine");
    assert_int_equal(files("."), 1);
    assert_int_equal(unlink("m/notes"), 0);
    assert_int_equal(mkdir("m/sub", 0777), 0);
    assert_int_equal(lm_outdir_open("m", true, own, "config", &d, &c), LM_EUSAGE);
    assert_int_equal(rmdir("m/sub"), 0);
    assert_int_equal(lm_outdir_open("m", true, NULL, NULL, &d, &g), LM_EUSAGE);
}

static void folders_refused(void **state)
{
    lm_outdir *d;
    lm_err a = { 0 }, b = { 0 }, c = { 0 }, f = { 0 };

    (void)state;
    put("file", "");
    assert_int_equal(mkdir("empty", 0777), 0);
    assert_int_equal(lm_outdir_open("file", true, own, "config", &d, &a), LM_EUSAGE);
    assert_int_equal(lm_outdir_open(".", true, own, "config", &d, &b), LM_EUSAGE);
    assert_int_equal(lm_outdir_open("/tmp", true, own, "config", &d, &c),
                     LM_EUSAGE); /* it contains the current folder */
    assert_int_equal(lm_outdir_open("none/m", true, own, "config", &d, &f), LM_EIO);
    f = (lm_err){ 0 };
    assert_int_equal(lm_outdir_open("empty", false, own, "config", &d, &f),
                     LM_OK); /* an empty folder may be replaced */
    fill(d, "x", "1");
    assert_int_equal(lm_outdir_commit(d, &f), LM_OK);
    holds("empty/x", "1");
}

static void paths(void **state)
{
    char *p, **names;
    size_t n;
    lm_err e = { 0 }, f = { 0 };

    (void)state;
    assert_int_equal(lm_path_join(&p, "a/", "b", &e), LM_OK);
    assert_string_equal(p, "a/b");
    lm_free(p);
    assert_int_equal(lm_path_join(&p, "a", "/b", &e), LM_OK);
    assert_string_equal(p, "/b");
    lm_free(p);
    assert_string_equal(lm_path_base("a/b"), "b");
    assert_string_equal(lm_path_base("b"), "b");
    assert_int_equal(lm_mkdir_p("p/q/r", &e), LM_OK);
    assert_int_equal(lm_mkdir_p("p/q/r/", &e), LM_OK);
    put("p/B", "");
    put("p/a", "");
    assert_int_equal(lm_mkdir_p("p/a/b", &e), LM_EIO);
    assert_int_equal(lm_dir_list("p", &names, &n, &f), LM_OK);
    assert_int_equal(n, 3);
    assert_string_equal(names[0], "B");
    assert_string_equal(names[1], "a");
    assert_string_equal(names[2], "q");
    lm_names_free(names, n);
    assert_int_equal(lm_dir_list("none", &names, &n, &f), LM_EIO);
    assert_true(lm_path_same("p/a", "./p/../p/a"));
    assert_false(lm_path_same("p/a", "p/B"));
    assert_false(lm_path_same("none", "none"));
    assert_true(lm_path_is_dir("p"));
    assert_false(lm_path_is_dir("p/a"));
}

static void removal_does_not_follow_links(void **state)
{
    lm_err e = { 0 };

    (void)state;
    assert_int_equal(lm_mkdir_p("keep", &e), LM_OK);
    assert_int_equal(lm_mkdir_p("gone/sub", &e), LM_OK);
    put("keep/file", "1");
    assert_int_equal(symlink("../../keep", "gone/sub/link"), 0);
    assert_int_equal(symlink("keep", "top"), 0);
    assert_int_equal(lm_rm_rf("gone", &e), LM_OK);
    assert_int_equal(lm_rm_rf("gone", &e), LM_OK);
    assert_int_equal(lm_rm_rf("top", &e), LM_OK);
    assert_false(lm_path_exists("gone"));
    holds("keep/file", "1");
}

static void *churn(void *arg)
{
    for (;;) {
        lm_out *o = NULL;

        if (lm_out_open(arg, true, &o, NULL))
            _exit(1);
        lm_out_drop(o);
    }
    return NULL;
}

static void drop_and_die(int sig)
{
    lm_out_drop_last();
    signal(sig, SIG_DFL);
    raise(sig);
}

/* A signal handler removes files and deep folders while other threads open and close theirs; it may
 * interrupt any function. */
static void dropped_by_a_signal(void **state)
{
    (void)state;
    for (int round = 0; round < 50; round++) {
        int status, ready[2];
        char byte;
        pid_t child;

        assert_int_equal(pipe(ready), 0);
        child = fork();
        if (child == 0) {
            lm_outdir *d;
            lm_buf path = { 0 };
            pthread_t other;

            signal(SIGTERM, drop_and_die);
            alarm(20); /* ends the test if there is a deadlock */
            if (lm_outdir_open("z", false, own, "config", &d, NULL))
                _exit(1);
            lm_buf_addf(&path, NULL, "%s/a/b/c", lm_outdir_path(d));
            lm_mkdir_p(path.data, NULL);
            for (int i = 0; i < 100; i++) {
                path.len = 0;
                lm_buf_addf(&path, NULL, "%s/a/b/file-with-a-name-of-some-length-%d",
                            lm_outdir_path(d), i);
                put(path.data, "1");
            }
            pthread_create(&other, NULL, churn, "x");
            if (write(ready[1], "!", 1) == 1)
                churn("y");
            _exit(1);
        }
        assert_int_equal(read(ready[0], &byte, 1), 1);
        usleep((unsigned)round * 37);
        kill(child, SIGTERM);
        waitpid(child, &status, 0);
        close(ready[0]);
        close(ready[1]);
        assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM);
        assert_int_equal(files("."), 0);
    }
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, enter, leave)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(maps),
        TEST(a_map_that_shrinks),
        TEST(whole_files),
        TEST(appears_at_commit),
        TEST(drop_leaves_nothing),
        TEST(existing_targets),
        TEST(impossible_targets),
        TEST(links_stay),
        TEST(long_names),
        TEST(too_long_names),
        TEST(modes_are_kept),
        TEST(same_target_twice),
        TEST(full_disk),
        TEST(reasons_are_kept),
        TEST(killed_halfway),
        TEST(drop_all),
        TEST(dropped_by_a_signal),
        TEST(folders),
        TEST(foreign_files_stay),
        TEST(folders_refused),
        TEST(paths),
        TEST(removal_does_not_follow_links),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
