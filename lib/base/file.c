/* SPDX-License-Identifier: Apache-2.0 */
/* file.c -- inputs, mapped or read whole, and a write(2) that continues after short writes. */
#include "base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/text.h"

lm_code lm_map_open(const char *path, lm_map *out, lm_err *e)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);

    *out = (lm_map){ .fd = -1 };
    if (fd < 0)
        return lm_fail(e, LM_EIO, path, NULL, "cannot open");
    return lm_map_fd(fd, path, out, e);
}

lm_code lm_map_fd(int fd, const char *path, lm_map *out, lm_err *e)
{
    static const uint8_t nothing[1];
    struct stat st;
    void *p;

    *out = (lm_map){ .fd = -1 };
    if (fstat(fd, &st)) {
        lm_fail(e, LM_EIO, path, NULL, "cannot examine");
        close(fd);
        return LM_EIO;
    }
    if (!S_ISREG(st.st_mode)) {
        close(fd);
        return lm_fail(e, LM_EFORMAT, path, NULL,
                       S_ISDIR(st.st_mode) ? "is a folder: a file is needed"
                                           : "is not a regular file and cannot be mapped");
    }
    if (st.st_size == 0) {
        *out = (lm_map){ nothing, 0, fd };
        return LM_OK;
    }
    p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (p == MAP_FAILED) {
        lm_fail(e, LM_EIO, path, NULL, "cannot map %lld byte%s", (long long)st.st_size,
                lm_plural(st.st_size));
        close(fd);
        return LM_EIO;
    }
    *out = (lm_map){ p, (size_t)st.st_size, fd };
    return LM_OK;
}

void lm_map_close(lm_map *m)
{
    if (!m->data)
        return;
    if (m->size)
        munmap((void *)m->data, m->size);
    close(m->fd);
    *m = (lm_map){ .fd = -1 };
}

lm_code lm_file_read(const char *path, size_t limit, lm_buf *out, lm_err *e)
{
    bool std = !strcmp(path, "-");
    const char *name = lm_path_shown(path);
    int fd = std ? STDIN_FILENO : open(path, O_RDONLY | O_CLOEXEC);
    size_t start = out->len;
    ssize_t got = 1;
    lm_code rc = LM_OK;

    if (fd < 0)
        return lm_fail(e, LM_EIO, path, NULL, "cannot open");
    while (!rc && got > 0) {
        rc = lm_buf_room(out, 65536, e);
        if (rc)
            break;
        do {
            got = read(fd, out->data + out->len, 65536);
        } while (got < 0 && errno == EINTR);
        if (got < 0)
            rc = lm_fail(e, LM_EIO, name, NULL, "cannot read");
        else if ((size_t)got > limit - (out->len - start))
            rc = lm_fail(e, LM_EFORMAT, name, NULL, "is larger than the limit of %zu bytes", limit);
        else
            out->len += (size_t)got;
    }
    if (out->data)
        out->data[out->len] = 0;
    if (!std)
        close(fd);
    return rc;
}

/* The same failure as the SIGBUS handler reports. */
int lm_file_unnamed(const char *dir)
{
    int fd = open(dir, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    lm_err e = { 0 };
    char *name = NULL;

    if (fd >= 0 || errno == ENOENT || errno == ENOTDIR || errno == EACCES)
        return fd;
    if (lm_asprintf(&name, &e, "%s/.lm-XXXXXX", dir)) { /* the file system has no unnamed files */
        errno = ENOMEM;
        return -1;
    }
    fd = mkostemp(name, O_CLOEXEC);
    if (fd >= 0)
        unlink(name);
    lm_free(name);
    return fd;
}

static lm_code fail_lost(const char *input, lm_err *e)
{
    lm_code rc =
        lm_fail(e, LM_EIO, input, "provide the complete file", "was truncated while it was read");

    if (e)
        e->sys = 0;
    return rc;
}

lm_code lm_fail_write(const char *where, lm_err *e)
{
    if (errno == EFAULT)
        return fail_lost("an input", e);
    bool full = errno == ENOSPC || errno == EDQUOT;

    return lm_fail(e, LM_EIO, where, full ? "free space on the disk" : NULL, "cannot write");
}

/* at: from this byte on; below 0: where the last write ended. */
static lm_code write_bytes(int fd, const void *data, size_t len, off_t at, const char *where,
                           lm_err *e)
{
    const char *p = data;

    while (len) {
        ssize_t put = at < 0 ? write(fd, p, len) : pwrite(fd, p, len, at);

        if (put < 0 && errno == EINTR)
            continue;
        if (put < 0) {
            int why = errno;
            char input[256];
            bool lost = why == EFAULT && lm_map_name(p, input, sizeof input);

            errno = why;
            return lost ? fail_lost(input, e) : lm_fail_write(where, e);
        }
        p += put;
        len -= (size_t)put;
        at += at < 0 ? 0 : put;
    }
    return LM_OK;
}

lm_code lm_write_all(int fd, const void *data, size_t len, const char *where, lm_err *e)
{
    return write_bytes(fd, data, len, -1, where, e);
}

lm_code lm_write_at(int fd, const void *data, size_t len, uint64_t at, const char *where, lm_err *e)
{
    return write_bytes(fd, data, len, (off_t)at, where, e);
}
