/* SPDX-License-Identifier: Apache-2.0 */
/* lock.c -- see lock.h. */
#include "base/lock.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"

struct lm_lock {
    int fd;
    char *path;
};

enum { HOLDER = 160, TRIES = 100 };

/* "process 1234 on host since 2026-11-22 13:40:10 UTC" */
static void describe(char text[HOLDER])
{
    char host[65] = "", when[32];
    time_t now = time(NULL);
    struct tm utc;

    if (gethostname(host, sizeof host - 1))
        host[0] = 0;
    strftime(when, sizeof when, "%Y-%m-%d %H:%M:%S UTC", gmtime_r(&now, &utc));
    snprintf(text, HOLDER - 1, "process %ld on %s since %s", (long)getpid(), host, when);
}

static lm_code refuse(int fd, const char *what, lm_err *e)
{
    char holder[HOLDER];
    ssize_t n = pread(fd, holder, sizeof holder - 1, 0);

    holder[n > 0 ? n : 0] = 0;
    holder[strcspn(holder, "\n")] = 0;
    for (char *c = holder; *c; c++)
        if (*c < ' ' || *c > '~')
            *c = '?';
    return lm_fail(e, LM_EUSAGE, what, "wait until it ends, or choose another folder",
                   "is in use by %s", holder[0] ? holder : "another process");
}

/* True if the name still refers to the opened file: its last holder may have removed it. */
static bool is_current(int fd, const char *path)
{
    struct stat a, b;

    return !fstat(fd, &a) && !lstat(path, &b) && a.st_ino == b.st_ino && a.st_dev == b.st_dev;
}

static lm_code take_lock(const char *path, const char *what, int *fd, bool *sure, lm_err *e)
{
    for (int i = 0; i < TRIES; i++) {
        *fd = open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
        if (*fd < 0)
            break;
        *sure = flock(*fd, LOCK_EX | LOCK_NB) == 0;
        if (!*sure && errno == EWOULDBLOCK) {
            lm_code rc = refuse(*fd, what, e);
            close(*fd);
            return rc;
        }
        if (is_current(*fd, path))
            return LM_OK;
        close(*fd);
    }
    return lm_fail(e, LM_EIO, what, NULL, "cannot be locked");
}

lm_code lm_lock_take(const char *path, const char *what, lm_lock **out, bool *sure, lm_err *e)
{
    char holder[HOLDER];
    lm_lock *l = NULL;
    lm_code rc = lm_alloc_n(&l, 1, sizeof *l, "a lock", e);

    *out = NULL;
    *sure = false;
    if (rc)
        return rc;
    l->fd = -1;
    rc = take_lock(path, what, &l->fd, sure, e);
    if (rc) {
        lm_free(l);
        return rc;
    }
    rc = lm_strdup(&l->path, path, e);
    describe(holder);
    strcat(holder, "\n");
    if (!rc && ftruncate(l->fd, 0))
        rc = lm_fail(e, LM_EIO, path, NULL, "cannot be emptied");
    if (!rc)
        rc = lm_write_all(l->fd, holder, strlen(holder), path, e);
    if (rc) {
        lm_lock_drop(l);
        return rc;
    }
    *out = l;
    return LM_OK;
}

lm_code lm_lock_check(const char *path, const char *what, lm_err *e)
{
    lm_code rc = LM_OK;
    int fd = open(path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);

    if (fd < 0)
        return LM_OK;
    if (flock(fd, LOCK_SH | LOCK_NB) && errno == EWOULDBLOCK)
        rc = refuse(fd, what, e);
    close(fd);
    return rc;
}

/* Removed while the lock is held: a process that opened the file before then finds in is_current
 * that the name is gone. */
void lm_lock_drop(lm_lock *l)
{
    if (!l)
        return;
    if (l->path && is_current(l->fd, l->path))
        unlink(l->path);
    close(l->fd);
    lm_free(l->path);
    lm_free(l);
}
