/* SPDX-License-Identifier: Apache-2.0 */
/* temps.c -- temporaries beside their targets, and the list of those that are still open. */
#include "base/temps.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/owner.h"
#include "base/text.h"

static atomic_flag lock = ATOMIC_FLAG_INIT;
static lm_temp *open_temps;

/* The holder cannot be interrupted and makes only a few system calls, so waiting is short.  A spin
 * lock is allowed in a signal handler; a mutex is not. */
static void lock_list(sigset_t *before)
{
    sigset_t all;

    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, before);
    while (atomic_flag_test_and_set_explicit(&lock, memory_order_acquire))
        sched_yield();
}

static void unlock_list(const sigset_t *before)
{
    atomic_flag_clear_explicit(&lock, memory_order_release);
    pthread_sigmask(SIG_SETMASK, before, NULL);
}

/* Called with the list locked. */
static void enter(lm_temp *t)
{
    t->owner = getpid();
    t->next = open_temps;
    t->link = &open_temps;
    if (open_temps)
        open_temps->link = &t->next;
    open_temps = t;
}

/* Remove t from the list and return its path, which the caller then owns. */
static char *withdraw(lm_temp *t)
{
    sigset_t before;
    char *path;

    lock_list(&before);
    if (t->link) {
        *t->link = t->next;
        if (t->next)
            t->next->link = t->link;
        t->link = NULL;
    }
    path = t->path;
    t->path = NULL;
    unlock_list(&before);
    return path;
}

static void remove_all(void)
{
    for (lm_temp *t = open_temps; t; t = t->next) {
        if (t->path && t->owner == getpid())
            lm_rm_rf(t->path, NULL);
    }
}

void lm_out_drop_all(void)
{
    sigset_t before;

    lock_list(&before);
    remove_all();
    unlock_list(&before);
}

void lm_out_drop_last(void)
{
    sigset_t before;

    lock_list(&before);
    remove_all();
    pthread_sigmask(SIG_SETMASK, &before, NULL); /* the lock is not released */
}

/* "a/b/" -> "a/b", links followed, so that a link to a file stays and its file is replaced. */
static lm_code resolve(const char *path, char **out, lm_err *e)
{
    char *real = realpath(path, NULL);
    size_t n = strlen(path);
    lm_code rc;

    if (real) {
        rc = lm_strdup(out, real, e);
        free(real);
        return rc;
    }
    rc = lm_strdup(out, path, e);
    while (!rc && n > 1 && (*out)[n - 1] == '/')
        (*out)[--n] = 0;
    return rc;
}

/* Checked here, so that the error does not come only when the finished output is renamed. */
static lm_code check_length(const lm_temp *t, const char *path, lm_err *e)
{
    size_t n = strlen(lm_path_base(t->target));
    long most = pathconf(t->folder, _PC_NAME_MAX);

    if (most > 0 && n > (size_t)most)
        return lm_fail(e, LM_EUSAGE, path, "choose a shorter name",
                       "the name has %zu byte%s, the file system's limit is %ld", n, lm_plural(n),
                       most);
    return LM_OK;
}

lm_code lm_temp_init(lm_temp *t, const char *path, bool force, lm_err *e)
{
    struct stat st;
    const char *base;
    size_t n;
    lm_code rc;

    *t = (lm_temp){ .force = force };
    if (!*path)
        return lm_fail(e, LM_EUSAGE, "output", "give a name", "the name is empty");
    if (lstat(path, &st) == 0 && !force && !S_ISDIR(st.st_mode))
        return lm_fail(e, LM_EUSAGE, path, "allow overwriting it", "exists already");
    rc = resolve(path, &t->target, e);
    if (rc)
        return rc;
    base = lm_path_base(t->target);
    n = (size_t)(base - t->target);
    rc = lm_strdup(&t->folder, n ? t->target : ".", e);
    if (!rc && n)
        t->folder[n > 1 ? n - 1 : 1] = 0;
    if (!rc && (errno = 0, !lm_path_is_dir(t->folder))) {
        char todo[256];

        errno = errno ? errno : ENOTDIR;
        snprintf(todo, sizeof todo, "create the folder '%.200s' first", t->folder);
        rc = lm_fail(e, LM_EIO, path, errno == ENOENT ? todo : NULL, "cannot create");
    }
    if (!rc)
        rc = check_length(t, path, e);
    if (rc)
        lm_temp_fini(t);
    return rc;
}

/* The name for attempt 0, 1, ..., as earlier ones may exist.  It holds the target's name, shortened
 * if the file system's limit requires that. */
static lm_code name_temp(const lm_temp *t, int attempt, char **out, lm_err *e)
{
    char tag[LM_OWNER_TAG], end[LM_OWNER_TAG + 32];
    const char *base = lm_path_base(t->target);
    long most = pathconf(t->folder, _PC_NAME_MAX);
    int n = snprintf(end, sizeof end, ".tmp.%s", lm_owner_tag(tag)), room;

    if (attempt)
        n += snprintf(end + n, sizeof end - (size_t)n, ".%d", attempt);
    room = (most > 0 && most < 255 ? (int)most : 255) - n - 1;
    room = room < 0 ? 0 : room;
    while (room > 0 && (int)strlen(base) > room && ((unsigned char)base[room] & 0xc0) == 0x80)
        room--; /* do not cut inside a UTF-8 character */
    return lm_asprintf(out, e, "%s/.%.*s%s", t->folder, room, base, end);
}

/* Take over group and permissions of the target.  Where the group cannot be kept, its members get
 * only the permissions of all others. */
static void keep_mode(const char *from, const char *path, mode_t more)
{
    struct stat old, now;
    mode_t mode;

    if (stat(from, &old) || lstat(path, &now) || (old.st_mode & S_IFMT) != (now.st_mode & S_IFMT) ||
        !(S_ISDIR(old.st_mode) || S_ISREG(old.st_mode)))
        return;
    mode = old.st_mode & (S_ISDIR(old.st_mode) ? 07777 : 0777);
    if (now.st_gid != old.st_gid && lchown(path, (uid_t)-1, old.st_gid))
        mode &= ~(mode_t)070 | (mode & 07) << 3;
    chmod(path, mode | more);
}

void lm_temp_keep_modes(const lm_temp *t)
{
    char **names = NULL;
    size_t n = 0;
    lm_code rc = lm_dir_list(t->path, &names, &n, NULL);

    for (size_t i = 0; !rc && i < n; i++) {
        char *old = NULL, *now = NULL;

        if (!lm_path_join(&old, t->target, names[i], NULL) &&
            !lm_path_join(&now, t->path, names[i], NULL))
            keep_mode(old, now, 0);
        lm_free(old);
        lm_free(now);
    }
    lm_names_free(names, n);
    keep_mode(t->target, t->path, 0);
}

/* Once for each folder, not for each output: the folder may hold many other files. */
static void sweep_once(const char *folder)
{
    static _Atomic uint64_t last;
    struct stat st;

    if (stat(folder, &st))
        return;
    uint64_t now = (uint64_t)st.st_ino ^ (uint64_t)st.st_dev << 40;
    if (atomic_exchange(&last, now) != now)
        lm_owner_sweep(folder, false);
}

static void let_go(lm_temp *t)
{
    if (t->held)
        close(t->hold);
    t->held = false;
}

/* Lock the new file.  Returns 0 or an errno; EEXIST: another process is removing it, because it saw
 * it before the lock was taken. */
static int lock_new(lm_temp *t, int fd)
{
    struct stat a, b;

    if (fd < 0) {
        fd = t->hold = open(t->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (fd < 0)
            return errno;
        t->held = true;
    }
    if (lm_owner_lock(fd) && !fstat(fd, &a) && !lstat(t->path, &b) && a.st_ino == b.st_ino &&
        a.st_dev == b.st_dev)
        return 0;
    let_go(t);
    return EEXIST;
}

/* One attempt.  The temporary is created and registered under the lock, so that a signal handler
 * never misses it.  On success `path` belongs to t; otherwise errno gives the reason. */
static bool try_create(lm_temp *t, char *path, int *fd)
{
    sigset_t before;
    int made, why;

    lock_list(&before);
    made = fd ? open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666) : mkdir(path, 0777);
    why = errno;
    if (made >= 0) {
        t->path = path;
        enter(t);
    }
    unlock_list(&before);
    if (made >= 0 && !(why = lock_new(t, fd ? made : -1))) {
        keep_mode(t->target, path, fd ? 0 : 0700);
        if (fd)
            *fd = made;
        return true;
    }
    if (made >= 0) {
        if (fd)
            close(made);
        withdraw(t);
        lm_rm_rf(path, NULL);
    }
    errno = why;
    return false;
}

lm_code lm_temp_create(lm_temp *t, const char *name, int *fd, lm_err *e)
{
    sweep_once(t->folder);
    for (int i = 0;; i++) {
        char *path;
        lm_code rc = name_temp(t, i, &path, e);

        if (rc || try_create(t, path, fd))
            return rc;
        if (errno != EEXIST || i == 99)
            rc = lm_fail(e, LM_EIO, name, NULL, "cannot create");
        lm_free(path);
        if (rc)
            return rc;
    }
}

lm_code lm_temp_hold(lm_temp *t, int fd, lm_err *e)
{
    t->hold = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    t->held = t->hold >= 0;
    return t->held ? LM_OK : lm_fail(e, LM_EIO, t->target, NULL, "cannot keep the lock on it");
}

lm_code lm_temp_sync(const lm_temp *t, lm_err *e)
{
    int fd = open(t->folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC), rc;

    if (fd < 0)
        return LM_OK; /* a folder that may be written but not read */
    rc = fsync(fd);
    if (rc && errno != EINVAL && errno != EROFS) {
        lm_fail(e, LM_EIO, t->folder, NULL, "cannot sync this folder");
        close(fd);
        return LM_EIO;
    }
    close(fd);
    return LM_OK;
}

lm_code lm_temp_publish(lm_temp *t, lm_err *e)
{
    int rc;

    if (t->force) {
        rc = rename(t->path, t->target);
    } else {
        rc = renameat2(AT_FDCWD, t->path, AT_FDCWD, t->target, RENAME_NOREPLACE);
        if (rc && (errno == EINVAL || errno == ENOSYS)) /* no RENAME_NOREPLACE here */
            rc = access(t->target, F_OK) == 0 ? (errno = EEXIST, -1) : rename(t->path, t->target);
    }
    if (rc && errno == EEXIST)
        return lm_fail(e, LM_EUSAGE, t->target, "allow overwriting it",
                       "was created by another process in the meantime");
    if (rc)
        return lm_fail(e, LM_EIO, t->target, NULL,
                       "cannot rename the finished output to its final name");
    lm_free(withdraw(t));
    let_go(t);
    return lm_temp_sync(t, e);
}

void lm_temp_fini(lm_temp *t)
{
    char *path;

    if (t->path)
        lm_rm_rf(t->path, NULL);
    path = withdraw(t);
    let_go(t);
    lm_free(path);
    lm_free(t->target);
    lm_free(t->folder);
    t->target = t->folder = NULL;
}
