/* SPDX-License-Identifier: Apache-2.0 */
/* path.c -- paths, folders and their entries. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"

lm_code lm_path_join(char **out, const char *dir, const char *name, lm_err *e)
{
    size_t n = strlen(dir);

    if (name[0] == '/' || n == 0)
        return lm_strdup(out, name, e);
    return lm_asprintf(out, e, "%s%s%s", dir, dir[n - 1] == '/' ? "" : "/", name);
}

const char *lm_path_base(const char *path)
{
    const char *slash = strrchr(path, '/');

    return slash ? slash + 1 : path;
}

const char *lm_path_shown(const char *path)
{
    return strcmp(path, "-") ? path : "standard input";
}

lm_code lm_path_folder(const char *path, char *out, lm_err *e)
{
    const char *slash = path && strcmp(path, "-") ? strrchr(path, '/') : NULL;
    char *folder = NULL;
    lm_code rc = LM_OK;

    if (slash)
        rc = lm_asprintf(&folder, e, "%.*s", slash == path ? 1 : (int)(slash - path), path);
    if (!rc && !realpath(folder ? folder : ".", out))
        rc = lm_fail(e, LM_EIO, folder ? folder : ".", "create the folder first", "cannot find it");
    lm_free(folder);
    return rc;
}

bool lm_path_exists(const char *path)
{
    struct stat st;

    return stat(path, &st) == 0;
}

bool lm_path_is_dir(const char *path)
{
    struct stat st;

    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

bool lm_path_is_stdout(const char *path)
{
    return !strcmp(path, "-") || !strcmp(path, "/dev/stdout") || !strcmp(path, "/dev/fd/1") ||
           !strcmp(path, "/proc/self/fd/1");
}

bool lm_path_same(const char *a, const char *b)
{
    struct stat x, y;

    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

lm_code lm_mkdir_p(const char *path, lm_err *e)
{
    char *copy;
    lm_code rc = lm_strdup(&copy, path, e);

    if (rc)
        return rc;
    for (char *at = copy + (*copy == '/'); !rc; at++) {
        char c = *at;

        if (c && c != '/')
            continue;
        *at = 0;
        if (*copy && mkdir(copy, 0777) && (errno != EEXIST || !lm_path_is_dir(copy)))
            rc = errno == ENAMETOOLONG
                     ? lm_fail(e, LM_EUSAGE, copy, "choose a shorter name", "the name is too long")
                     : lm_fail(e, LM_EIO, copy, NULL, "cannot make this folder");
        *at = c;
        if (!c)
            break;
    }
    lm_free(copy);
    return rc;
}

static int remove_tree(int dirfd, const char *name);

/* One pass over the open folder; *gone counts the entries removed.  getdents64 instead of readdir,
 * which allocates: this also runs in signal handlers. */
static int empty_folder(int fd, long *gone)
{
    union {
        struct dirent64 align;
        char bytes[2048];
    } block;
    ssize_t got;

    *gone = 0;
    while ((got = getdents64(fd, block.bytes, sizeof block.bytes)) > 0) {
        for (ssize_t at = 0; at < got;) {
            const struct dirent64 *d = (const struct dirent64 *)(block.bytes + at);

            at += d->d_reclen;
            if (!strcmp(d->d_name, ".") || !strcmp(d->d_name, ".."))
                continue;
            if (remove_tree(fd, d->d_name))
                return -1;
            ++*gone;
        }
    }
    return got < 0 ? -1 : 0;
}

/* Removing entries may move others that were not listed yet: repeat until a pass removes
 * nothing. */
static int empty_wholly(int fd)
{
    long gone;
    int rc;

    do {
        rc = lseek(fd, 0, SEEK_SET) < 0 ? -1 : empty_folder(fd, &gone);
    } while (!rc && gone);
    return rc;
}

/* Remove `name` in the open folder `dirfd` and all below it.  Async-signal-safe. */
static int remove_tree(int dirfd, const char *name)
{
    int fd, rc, tries = 0;

    if (unlinkat(dirfd, name, 0) == 0)
        return 0;
    if (errno != EISDIR && errno != EPERM) /* POSIX says EPERM for a folder, Linux EISDIR */
        return -1;
    fd = openat(dirfd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return -1;
    do { /* in a handler, other threads may still create files here */
        rc = empty_wholly(fd);
        rc = rc ? rc : unlinkat(dirfd, name, AT_REMOVEDIR);
    } while (rc && (errno == ENOTEMPTY || errno == EEXIST) && tries++ < 1000);
    close(fd);
    return rc;
}

lm_code lm_rm_rf(const char *path, lm_err *e)
{
    if (remove_tree(AT_FDCWD, path) && errno != ENOENT)
        return lm_fail(e, LM_EIO, path, NULL, "cannot remove");
    return LM_OK;
}

static int by_bytes(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

lm_code lm_dir_list(const char *path, char ***names, size_t *n, lm_err *e)
{
    DIR *dir = opendir(path);
    struct dirent *d;
    size_t cap = 0;
    lm_code rc = LM_OK;

    *names = NULL;
    *n = 0;
    if (!dir)
        return lm_fail(e, LM_EIO, path, NULL, "cannot open this folder");
    while (!rc && (errno = 0, d = readdir(dir))) {
        if (!strcmp(d->d_name, ".") || !strcmp(d->d_name, ".."))
            continue;
        rc = lm_grow(names, &cap, *n + 1, sizeof **names, "names of files", e);
        rc = rc ? rc : lm_strdup(&(*names)[*n], d->d_name, e);
        *n += !rc;
    }
    if (!rc && errno)
        rc = lm_fail(e, LM_EIO, path, NULL, "cannot read this folder");
    closedir(dir);
    if (rc) {
        lm_names_free(*names, *n);
        *names = NULL;
        *n = 0;
    } else if (*n) {
        qsort(*names, *n, sizeof **names, by_bytes);
    }
    return rc;
}

void lm_names_free(char **names, size_t n)
{
    for (size_t i = 0; i < n; i++)
        lm_free(names[i]);
    lm_free(names);
}
