/* SPDX-License-Identifier: Apache-2.0 */
/* outdir.c -- a folder that appears whole or not at all. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/temps.h"

struct lm_outdir {
    lm_temp temp;
    lm_own_fn own;
    const void *ctx;
};

/* True if the folder is `/` or holds the current folder: swapping it would move this process's
 * folder away. */
static bool holds_cwd(const char *path)
{
    char up[4096] = ".";
    struct stat target, here, parent;

    if (stat(path, &target) || stat(up, &here))
        return false;
    while (strlen(up) + 4 < sizeof up) {
        if (here.st_dev == target.st_dev && here.st_ino == target.st_ino)
            return true;
        strcat(up, "/..");
        if (stat(up, &parent) || (parent.st_dev == here.st_dev && parent.st_ino == here.st_ino))
            return false;
        here = parent;
    }
    return true;
}

/* True also for a bind mount of the same file system, as the volumes of containers are. */
static bool is_mount(const char *path)
{
    struct statx st;

    return !statx(AT_FDCWD, path, 0, STATX_TYPE, &st) &&
           (st.stx_attributes & STATX_ATTR_MOUNT_ROOT) != 0;
}

static bool is_empty(const char *path)
{
    char **names;
    size_t n;

    if (lm_dir_list(path, &names, &n, NULL))
        return false;
    lm_names_free(names, n);
    return n == 0;
}

/* Subfolders are never replaced: outputs of tools contain none.  Allocates nothing, because a
 * failed allocation would look like a foreign file. */
static bool is_own(const char *path, const char *name, lm_own_fn own, const void *ctx)
{
    struct stat st;
    char file[8192];

    return own && own(ctx, name) &&
           snprintf(file, sizeof file, "%s/%s", path, name) < (int)sizeof file &&
           (lstat(file, &st) || !S_ISDIR(st.st_mode));
}

lm_code lm_dir_check_own(const char *path, lm_own_fn own, const void *ctx, lm_err *e)
{
    char **names;
    size_t n;
    lm_code rc = lm_dir_list(path, &names, &n, e);

    for (size_t i = 0; !rc && i < n; i++)
        if (!is_own(path, names[i], own, ctx))
            rc =
                lm_fail(e, LM_EUSAGE, path, "choose another folder, or move that file elsewhere",
                        "holds '%.100s', which does not belong to the new output and would be lost",
                        names[i]);
    lm_names_free(names, n);
    return rc;
}

static lm_code check_target(const char *path, bool force, lm_own_fn own, const void *ctx, lm_err *e)
{
    if (!lm_path_exists(path))
        return LM_OK;
    if (!lm_path_is_dir(path))
        return lm_fail(e, LM_EUSAGE, path, "name a folder", "exists and is not a folder");
    if (holds_cwd(path))
        return lm_fail(e, LM_EUSAGE, path, "name another folder",
                       "is or holds the current folder and cannot be replaced");
    if (is_mount(path))
        return lm_fail(e, LM_EUSAGE, path, "name a folder inside it",
                       "is a mount point and cannot be replaced");
    if (!force && !is_empty(path))
        return lm_fail(e, LM_EUSAGE, path, "allow replacing it", "exists already");
    return lm_dir_check_own(path, own, ctx, e);
}

/* Check that the parent folder can be written to. */
static bool can_exchange(const char *path)
{
    char *real = realpath(path, NULL), *slash = real ? strrchr(real, '/') : NULL;
    bool can = slash && slash > real;

    if (can) {
        *slash = 0;
        can = !access(real, W_OK | X_OK);
    }
    free(real);
    return can;
}

bool lm_outdir_fits(const char *path, bool force, lm_own_fn own, const void *ctx)
{
    return !check_target(path, force, own, ctx, NULL) &&
           (!lm_path_exists(path) || can_exchange(path));
}

lm_code lm_outdir_open(const char *path, bool force, lm_own_fn own, const void *ctx,
                       lm_outdir **out, lm_err *e)
{
    lm_outdir *d = NULL;
    lm_code rc = check_target(path, force, own, ctx, e);

    rc = rc ? rc : lm_alloc_n(&d, 1, sizeof *d, "an output folder", e);
    rc = rc ? rc : lm_temp_init(&d->temp, path, force, e);
    rc = rc ? rc : lm_temp_create(&d->temp, path, NULL, e);
    if (rc) {
        if (d)
            lm_temp_fini(&d->temp);
        lm_free(d);
        return rc;
    }
    d->own = own;
    d->ctx = ctx;
    *out = d;
    return LM_OK;
}

const char *lm_outdir_path(const lm_outdir *d)
{
    return d->temp.path;
}

/* fsync each file and folder below the open folder `dirfd`/`name`, the leaves first. */
static int sync_tree(int dirfd, const char *name)
{
    struct dirent *d;
    struct stat st;
    DIR *dir = NULL;
    int rc, fd = openat(dirfd, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);

    if (fd < 0)
        return errno == ELOOP ? 0 : -1; /* a link has no content of its own */
    rc = fstat(fd, &st);
    if (!rc && S_ISDIR(st.st_mode)) {
        dir = fdopendir(fd);
        rc = dir ? 0 : -1;
        while (!rc && (d = readdir(dir))) {
            if (strcmp(d->d_name, ".") && strcmp(d->d_name, ".."))
                rc = sync_tree(fd, d->d_name);
        }
    }
    if (!rc && (S_ISDIR(st.st_mode) || S_ISREG(st.st_mode)))
        rc = fsync(fd);
    if (dir)
        closedir(dir);
    else
        close(fd);
    return rc;
}

/* For a file system without an exchange: two renames, then the old folder is removed.  The old
 * folder's name in between is that of a temporary of this process, so that a sweep finds it after a
 * kill. */
static lm_code move_aside(lm_temp *t, lm_err *e)
{
    char *aside = NULL;
    lm_code rc = lm_asprintf(&aside, e, "%s.999", t->path);

    if (!rc && rename(t->target, aside))
        rc = lm_fail(e, LM_EIO, t->target, NULL, "cannot replace this folder");
    if (!rc && (rc = lm_temp_publish(t, e)))
        rename(aside, t->target);
    else if (!rc)
        rc = lm_rm_rf(aside, e);
    lm_free(aside);
    return rc;
}

lm_code lm_outdir_commit(lm_outdir *d, lm_err *e)
{
    lm_temp *t = &d->temp;
    lm_code rc = LM_OK;

    if (sync_tree(AT_FDCWD, t->path))
        rc = lm_fail(e, LM_EIO, t->target, NULL, "cannot sync to disk");
    if (!rc)
        lm_temp_keep_modes(t);
    if (!rc && is_empty(t->target) && rmdir(t->target))
        rc = lm_fail(e, LM_EIO, t->target, NULL, "cannot replace the empty folder");
    if (!rc && t->force && lm_path_is_dir(t->target))
        rc = lm_dir_check_own(t->target, d->own, d->ctx, e);
    if (!rc && t->force && lm_path_is_dir(t->target)) {
        /* One system call: the target exists at all times.  The old folder gets the temporary's
         * name and is removed. */
        if (renameat2(AT_FDCWD, t->path, AT_FDCWD, t->target, RENAME_EXCHANGE) == 0)
            rc = lm_rm_rf(t->path, e);
        else if (errno == EINVAL || errno == ENOSYS)
            rc = move_aside(t, e);
        else
            rc = lm_fail(e, LM_EIO, t->target, NULL, "cannot replace this folder");
    }
    if (!rc && t->path && lm_path_exists(t->path))
        rc = lm_temp_publish(t, e);
    else if (!rc)
        rc = lm_temp_sync(t, e);
    lm_outdir_drop(d);
    return rc;
}

void lm_outdir_blame(const lm_outdir *d, lm_err *e)
{
    size_t n = strlen(d->temp.path);
    char rest[sizeof e->where];

    if (!e || strncmp(e->where, d->temp.path, n) != 0)
        return;
    snprintf(rest, sizeof rest, "%s", e->where + n);
    snprintf(e->where, sizeof e->where, "%.120s%.130s", d->temp.target, rest);
}

void lm_outdir_drop(lm_outdir *d)
{
    if (!d)
        return;
    lm_temp_fini(&d->temp);
    lm_free(d);
}
