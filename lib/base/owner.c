/* SPDX-License-Identifier: Apache-2.0 */
/* owner.c -- see owner.h. */
#include "base/owner.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#include "base/file.h"
#include "base/process.h"

enum { IDLE_SECONDS = 24 * 3600, BOOT_DIGITS = 16 };

#define XFS_MAGIC 0x58465342 /* not in magic.h */
#define ZFS_MAGIC 0x2fc12fc1

char *lm_owner_tag(char tag[LM_OWNER_TAG])
{
    snprintf(tag, LM_OWNER_TAG, "lm%016llx-%ld-%llu", (unsigned long long)lm_boot_hash(),
             (long)getpid(), (unsigned long long)lm_process_start(getpid()));
    return tag;
}

bool lm_owner_lock(int fd)
{
    return flock(fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK;
}

/* ---- Temporaries of other processes ---- */

static const char *skip_digits(const char *s)
{
    const char *from = s;

    while (isdigit((unsigned char)*s))
        s++;
    return s > from ? s : NULL;
}

/* Parse a name of the form above; *boot: the owner's machine. */
static bool parse_name(const char *name, unsigned long long *boot)
{
    const char *tag = NULL;

    for (const char *at = name; (at = strstr(at, ".tmp.lm")); at++)
        tag = at + 7;
    if (name[0] != '.' || !tag || strspn(tag, "0123456789abcdef") != BOOT_DIGITS)
        return false;
    *boot = strtoull(tag, NULL, 16);
    tag += BOOT_DIGITS;
    for (int i = 0; i < 2; i++)
        if (*tag != '-' || !(tag = skip_digits(tag + 1)))
            return false;
    return !*tag || (*tag == '.' && (tag = skip_digits(tag + 1)) && !*tag);
}

/* File systems to which no other kernel writes. */
static bool is_local(int fd)
{
    static const unsigned long local[] = { EXT4_SUPER_MAGIC,     XFS_MAGIC,
                                           BTRFS_SUPER_MAGIC,    TMPFS_MAGIC,
                                           F2FS_SUPER_MAGIC,     ZFS_MAGIC,
                                           OVERLAYFS_SUPER_MAGIC };
    struct statfs fs;

    if (fstatfs(fd, &fs))
        return false;
    for (size_t i = 0; i < sizeof local / sizeof *local; i++)
        if ((unsigned long)fs.f_type == local[i])
            return true;
    return false;
}

static bool is_old(const struct stat *st, time_t now)
{
    return now - st->st_mtime > IDLE_SECONDS;
}

/* True if it has not changed for a day.  For a folder, its direct members are checked too. */
static bool is_idle(int dirfd, const char *name)
{
    time_t now = time(NULL);
    struct stat st;
    struct dirent *d;
    DIR *dir;
    bool idle;

    if (fstatat(dirfd, name, &st, AT_SYMLINK_NOFOLLOW) || !is_old(&st, now))
        return false;
    if (!S_ISDIR(st.st_mode))
        return true;
    int fd = openat(dirfd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    dir = fd < 0 ? NULL : fdopendir(fd);
    idle = dir != NULL;
    while (idle && (d = readdir(dir)))
        idle = !strcmp(d->d_name, "..") ||
               (!fstatat(fd, d->d_name, &st, AT_SYMLINK_NOFOLLOW) && is_old(&st, now));
    if (dir)
        closedir(dir);
    else if (fd >= 0)
        close(fd);
    return idle;
}

/* True if its process is dead.  Then *fd holds the lock until the temporary is removed; -1: the
 * file system has no locks. */
static bool is_dead(int dirfd, const char *name, unsigned long long boot, bool alone, int *fd)
{
    struct stat st;

    *fd = -1;
    if (fstatat(dirfd, name, &st, AT_SYMLINK_NOFOLLOW))
        return false;
    if (S_ISREG(st.st_mode) || S_ISDIR(st.st_mode)) {
        int how = O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
        /* NFS locks need a descriptor that may write */
        *fd = S_ISREG(st.st_mode) ? openat(dirfd, name, O_RDWR | how) : -1;
        if (*fd < 0 && (*fd = openat(dirfd, name, O_RDONLY | how)) < 0)
            return false;
        if (flock(*fd, LOCK_EX | LOCK_NB) == 0) {
            if (boot == lm_boot_hash() || is_local(*fd))
                return true;
        } else if (errno == EWOULDBLOCK) {
            return false;
        }
    }
    return (alone && S_ISLNK(st.st_mode)) || is_idle(dirfd, name);
}

void lm_owner_sweep(const char *dir, bool alone)
{
    DIR *d = opendir(dir);
    struct dirent *entry;
    unsigned long long boot;
    char path[8192];
    int fd;

    while (d && (entry = readdir(d))) {
        if (!parse_name(entry->d_name, &boot))
            continue;
        if (is_dead(dirfd(d), entry->d_name, boot, alone, &fd) &&
            snprintf(path, sizeof path, "%s/%s", dir, entry->d_name) < (int)sizeof path)
            lm_rm_rf(path, NULL);
        if (fd >= 0)
            close(fd);
    }
    if (d)
        closedir(d);
}
