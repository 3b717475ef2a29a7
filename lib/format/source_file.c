/* SPDX-License-Identifier: Apache-2.0 */
/* source_file.c -- the lower half of source.c: the bytes of a file, counted and hashed, and the decoder on them. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "base/stop.h"
#include "format/source_impl.h"

/* Bytes of fd, 0 at its end, -1 with errno.  A pipe may never deliver data, and a signal may be
 * handled in another thread: so it polls with a short timeout, and a request to stop ends the
 * file. */
static ssize_t read_some(int fd, void *dst, size_t cap)
{
    struct pollfd wait = { .fd = fd, .events = POLLIN };
    for (;;) {
        if (lm_stopping())
            return 0;
        int ready = poll(&wait, 1, 50);
        if (ready == 0 || (ready < 0 && errno == EINTR))
            continue;
        ssize_t n = ready < 0 ? -1 : read(fd, dst, cap);
        if (n >= 0 || errno != EINTR)
            return n;
    }
}

static lm_code raw_block(void *ctx, const void **p, size_t *n, lm_err *e)
{
    lm_source *s = ctx;
    ssize_t got = read_some(s->fd, s->block, LM_SOURCE_BLOCK);
    *n = 0;
    if (got < 0)
        return lm_fail(e, LM_EIO, lm_path_shown(s->files.path[s->at]), NULL, "cannot read");
    if (!s->seeked)
        XXH3_64bits_update(s->hash, s->block, (size_t)got);
    atomic_fetch_add_explicit(&s->bytes, (uint64_t)got, memory_order_relaxed);
    *p = s->block;
    *n = (size_t)got;
    return LM_OK;
}

static lm_code file_block(lm_source *s, const void **p, size_t *n, lm_err *e)
{
    return s->gz ? lm_gunzip_block(s->gz, p, n, e) : raw_block(s, p, n, e);
}

la_ssize_t lm_source_callback_failed(lm_source *s, struct archive *a, const lm_err *e)
{
    s->fail = *e;
    lm_la.set_error(a, EIO, "%s", e->what);
    return -1;
}

static la_ssize_t read_file(struct archive *a, void *ctx, const void **out)
{
    lm_source *s = ctx;
    lm_err e = { 0 };
    size_t n;
    if (file_block(s, out, &n, &e))
        return lm_source_callback_failed(s, a, &e);
    s->given += n;
    return (la_ssize_t)n;
}

static la_int64_t seek_file(struct archive *a, void *ctx, la_int64_t offset, int whence)
{
    lm_source *s = ctx;
    off_t to = lseek(s->fd, offset, whence);
    s->seeked = true;
    if (to < 0) {
        lm_la.set_error(a, errno, "%s", strerror(errno));
        return ARCHIVE_FATAL;
    }
    return to;
}

/* zip and 7zip keep their table at the end; the other formats are read once, front to back. */
static bool wants_seek(int fd)
{
    struct stat st;
    char magic[6] = { 0 };
    if (fstat(fd, &st) || !S_ISREG(st.st_mode) || lseek(fd, 0, SEEK_CUR) != 0)
        return false;
    if (pread(fd, magic, sizeof magic, 0) != sizeof magic)
        return false;
    return memcmp(magic, "PK\3\4", 4) == 0 || memcmp(magic, "7z\xBC\xAF\x27\x1C", 6) == 0;
}

lm_code lm_source_decoder_failed(lm_source *s, struct archive *a, lm_err *e)
{
    const char *why = lm_la.error_string(a);
    const char *where =
        s->in_member && s->name.len ? s->name.data : lm_path_shown(s->files.path[s->at]);
    if (!s->fail.code && s->gz)
        lm_gunzip_resume(s->gz, &s->fail);
    if (s->fail.code) {
        if (!e->code)
            *e = s->fail;
        return s->fail.code;
    }
    if (lm_la.error_number(a) == ENOMEM)
        return lm_fail(e, LM_ELIMIT, where, NULL, "out of memory while decoding");
    if (lm_la.error_number(a) == EIO || lm_la.error_number(a) == EISDIR) {
        errno = lm_la.error_number(a);
        return lm_fail(e, LM_EIO, where, NULL, "cannot read");
    }
    if (why && strcasestr(why, "passphrase"))
        return lm_fail(e, LM_EFORMAT, where, "decrypt it first",
                       "it is encrypted and needs a passphrase");
    return lm_fail(e, LM_EFORMAT, where, "fetch or compress it again",
                   "damaged or truncated: the decoder reports '%s'", why ? why : "no reason given");
}

lm_code lm_source_reader(const char *where, struct archive **out, lm_err *e)
{
    if (lm_reader_new(where, out, e))
        return e->code;
    lm_reader_filters(*out);
    lm_la.read_support_format_raw(*out);
    lm_la.read_support_format_empty(*out);
    return LM_OK;
}

/* Open a reader on the rest of the file. */
lm_code lm_source_new_outer(lm_source *s, lm_err *e)
{
    s->given = 0;
    if (lm_source_reader(lm_path_shown(s->files.path[s->at]), &s->outer, e))
        return e->code;
    lm_la.read_support_format_tar(s->outer);
    lm_la.read_support_format_zip(s->outer);
    lm_la.read_support_format_7zip(s->outer);
    lm_la.read_support_format_rar(s->outer);
    lm_la.read_support_format_rar5(s->outer);
    lm_la.read_support_format_cab(s->outer);
    lm_la.read_support_format_xar(s->outer);
    lm_la.read_support_format_iso9660(s->outer);
    lm_la.read_set_read_callback(s->outer, read_file);
    if (!s->gz)
        lm_la.read_set_seek_callback(s->outer, seek_file);
    lm_la.read_set_callback_data(s->outer, s);
    if (lm_la.read_open1(s->outer) != ARCHIVE_OK)
        return lm_source_decoder_failed(s, s->outer, e);
    return LM_OK;
}

lm_code lm_source_open_outer(lm_source *s, lm_err *e)
{
    const char *path = s->files.path[s->at];
    s->fd = strcmp(path, "-") == 0 ? STDIN_FILENO : open(path, O_RDONLY | O_CLOEXEC);
    if (s->fd < 0)
        return lm_fail(e, LM_EIO, path, "check the path", "cannot open");
    s->seeked = s->resumed = s->is_archive = false;
    XXH3_64bits_reset(s->hash);
    lm_code rc = wants_seek(s->fd)
                     ? LM_OK
                     : lm_gunzip_new(raw_block, s, lm_path_shown(path), s->skip_bad, &s->gz, e);
    return rc ? rc : lm_source_new_outer(s, e);
}

bool lm_source_note_bad(lm_source *s, lm_code rc, lm_err *e)
{
    if (rc != LM_EFORMAT || (!s->skip_bad && !lm_stopping()))
        return false;
    if (!lm_stopping() && !s->bad++) /* a request to stop may end the file anywhere */
        s->first_bad = *e;
    *e = s->fail = (lm_err){ 0 };
    return true;
}

/* Read to the end of the file, so that the digest is that of the whole file and gzip's last
 * checksum is compared.  For a pipe the number of bytes is bounded, because it may never end. */
static lm_code drain(lm_source *s, lm_err *e)
{
    struct stat st;
    const void *p;
    size_t n = 1;
    uint64_t sum = 0;
    lm_err why = { 0 };
    bool bounded = fstat(s->fd, &st) || !S_ISREG(st.st_mode);
    lm_code rc = LM_OK;
    while (!rc && n) {
        rc = file_block(s, &p, &n, e);
        if (!rc && !n && s->gz && lm_gunzip_resume(s->gz, &why)) {
            lm_source_note_bad(s, LM_EFORMAT, &why);
            n = 1;
        }
        sum += n;
        if (!rc && bounded && sum > s->most)
            rc = lm_fail(e, LM_ELIMIT, lm_path_shown(s->files.path[s->at]), "check its content",
                         "more than %zu bytes follow the end of its data", s->most);
    }
    return rc;
}

lm_code lm_source_close_outer(lm_source *s, lm_err *e)
{
    lm_reader_free(s->outer);
    s->outer = NULL;
    if (s->seeked) {
        s->seeked = false;
        XXH3_64bits_reset(s->hash);
        if (lseek(s->fd, 0, SEEK_SET) < 0)
            return lm_fail(e, LM_EIO, s->files.path[s->at], NULL, "cannot go back to its start");
    }
    lm_code rc = drain(s, e);
    lm_gunzip_free(s->gz);
    s->gz = NULL;
    s->digests[s->at] = XXH3_64bits_digest(s->hash);
    if (s->fd > STDIN_FILENO)
        close(s->fd);
    s->fd = -1;
    return rc;
}
