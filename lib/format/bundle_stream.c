/* SPDX-License-Identifier: Apache-2.0 */
/* bundle_stream.c -- bytes that can be read once: the raw descriptor, a lone .safetensors on it,
 * and the spool that copies the rest to a file. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"
#include "format/bundle_impl.h"
#include "format/safetensors_table.h"

enum { BLOCK = 1 << 20, PAGE = 4096 };

/* ---- The descriptor ---- */

/* A signal that arrives just before read() would not interrupt it, so it polls with a short
 * timeout. */
static lm_code read_some(const lm_bundle_raw *r, void *dst, size_t cap, size_t *got, lm_err *e)
{
    struct pollfd wait = { .fd = r->fd, .events = POLLIN };

    for (;;) {
        if (lm_stopping())
            return lm_fail(e, LM_EFORMAT, r->where, NULL, "interrupted before its end");
        int ready = poll(&wait, 1, 50);
        if (ready == 0 || (ready < 0 && errno == EINTR))
            continue;
        ssize_t n = ready < 0 ? -1 : read(r->fd, dst, cap);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return lm_fail(e, LM_EIO, r->where, NULL, "cannot read");
        *got = (size_t)n;
        return LM_OK;
    }
}

lm_code lm_bundle_raw_look(lm_bundle_raw *r, size_t want, const uint8_t **p, size_t *have,
                           lm_err *e)
{
    lm_code rc = LM_OK;

    for (size_t got = 1; !rc && got && r->head.len - r->head_at < want;) {
        size_t step =
            want - (r->head.len - r->head_at) < BLOCK ? want - (r->head.len - r->head_at) : BLOCK;
        got = 0;
        rc = lm_buf_room(&r->head, step, e);
        if (!rc)
            rc = read_some(r, r->head.data + r->head.len, step, &got, e);
        r->head.len += got;
    }
    *p = (const uint8_t *)r->head.data + r->head_at;
    *have = r->head.len - r->head_at;
    return rc;
}

/* The tail keeps byte i of the stream at i mod 512. */
static void keep_tail(lm_bundle_raw *r, const uint8_t *p, size_t n)
{
    size_t keep = n < sizeof r->tail ? n : sizeof r->tail;

    for (size_t i = n - keep; i < n; i++)
        r->tail[(r->total + i) % sizeof r->tail] = p[i];
    r->total += n;
}

lm_code lm_bundle_raw_read(void *raw, void *dst, size_t cap, size_t *got, lm_err *e)
{
    lm_bundle_raw *r = raw;
    size_t have = r->head.len - r->head_at;

    *got = 0;
    if (have) {
        *got = have < cap ? have : cap;
        memcpy(dst, r->head.data + r->head_at, *got);
        r->head_at += *got;
        if (r->head_at == r->head.len) {
            lm_buf_fini(&r->head);
            r->head_at = 0;
        }
    } else {
        lm_code rc = read_some(r, dst, cap, got, e);
        if (rc)
            return rc;
    }
    keep_tail(r, dst, *got);
    return LM_OK;
}

/* Archives are padded to a whole record of a few MiB at most: more means that the input never
 * ends. */
#define MOST_BEHIND ((uint64_t)1 << 30)

lm_code lm_bundle_raw_drain(lm_bundle_raw *r, bool *zeros, lm_err *e)
{
    uint8_t *buf = NULL;
    size_t got = 1;
    lm_code rc = lm_alloc_n(&buf, 65536, 1, "a buffer", e);

    for (uint64_t behind = 0; !rc && got; behind += got) {
        rc = lm_bundle_raw_read(r, buf, 65536, &got, e);
        if (!rc && behind > MOST_BEHIND)
            rc = lm_fail(e, LM_EFORMAT, r->where, "name a model",
                         "it does not end: more than 1 GiB follows the last file of the archive");
    }
    *zeros = r->total >= sizeof r->tail;
    for (size_t i = 0; i < sizeof r->tail; i++)
        *zeros = *zeros && !r->tail[i];
    lm_free(buf);
    return rc;
}

/* ---- A lone .safetensors ---- */

typedef struct {
    uint64_t bytes, left;
    bool begun;
} lone;

/* Its size follows from its header. */
static lm_code lone_bytes(lm_bundle *b, uint64_t *bytes, lm_err *e)
{
    lm_st_table table = { 0 };
    const uint8_t *p;
    size_t have = 0;
    uint64_t header = 0;
    lm_code rc = lm_bundle_raw_look(&b->raw, 8, &p, &have, e);

    if (!rc && have >= 8)
        rc = lm_st_header_length(p, b->path, &header, e);
    if (!rc)
        rc = lm_bundle_raw_look(&b->raw, 8 + (size_t)header, &p, &have, e);
    if (!rc && have < 8 + header)
        rc = lm_fail(e, LM_EFORMAT, b->path, "it is truncated: fetch or write it again",
                     "header says it has %" PRIu64 " byte%s, the stream ends after %zu", header,
                     lm_plural(header), have);
    if (!rc)
        rc = lm_st_table_parse(&table, (const char *)p + 8, (size_t)header, UINT64_MAX, b->path, e);
    if (!rc && __builtin_add_overflow(8 + header, table.data_bytes, bytes))
        rc = lm_fail(e, LM_EFORMAT, b->path, NULL, "its tensors have more than 2^64 bytes");
    lm_st_table_fini(&table);
    return rc;
}

static lm_code lone_read(lm_bundle *b, void *dst, size_t cap, size_t *got, lm_err *e)
{
    lone *s = b->state;
    lm_code rc = lm_bundle_raw_read(&b->raw, dst, cap < s->left ? cap : (size_t)s->left, got, e);

    s->left -= *got;
    return rc;
}

static lm_code lone_next(lm_bundle *b, const char **name, uint64_t *bytes, lm_err *e)
{
    lone *s = b->state;
    uint8_t buf[16384];
    size_t got = 1;
    lm_code rc = LM_OK;

    *name = s->begun ? NULL : "model.safetensors";
    *bytes = s->bytes;
    if (!s->begun) {
        s->begun = true;
        return LM_OK;
    }
    while (!rc && s->left && got)
        rc = lone_read(b, buf, sizeof buf, &got, e);
    if (!rc && s->left)
        return lm_fail(e, LM_EFORMAT, b->path, "it is truncated: fetch or write it again",
                       "it ends %" PRIu64 " byte%s early", s->left, lm_plural(s->left));
    if (!rc)
        rc = lm_bundle_raw_read(&b->raw, buf, 1, &got, e);
    if (!rc && got)
        rc = lm_fail(e, LM_EFORMAT, b->path, NULL, "bytes follow the last tensor");
    return rc;
}

static void lone_close(lm_bundle *b)
{
    lm_free(b->state);
    b->state = NULL;
}

lm_code lm_bundle_st_stream(lm_bundle *b, lm_err *e)
{
    static const lm_bundle_ops ops = { lone_next, lone_read, NULL, lone_close };
    lone *s = NULL;
    lm_code rc = lm_alloc_n(&s, 1, sizeof *s, "a stream", e);

    b->kind = LM_BUNDLE_FILE;
    if (rc)
        return rc;
    b->state = s;
    b->ops = &ops;
    rc = lone_bytes(b, &s->bytes, e);
    s->left = s->bytes;
    return rc;
}

/* ---- Spooling ---- */

lm_code lm_bundle_spool_open(const char *dir, int *fd, lm_err *e)
{
    *fd = lm_file_unnamed(dir);
    if (*fd >= 0)
        return LM_OK;
    return lm_fail(e, LM_EIO, dir, "set LM_TMPDIR to a folder with room for the model",
                   "cannot make a temporary file");
}

/* Sizes in a stream may be false, but one that cannot fit is refused before the disk is full. */
lm_code lm_bundle_spool_room(int fd, uint64_t bytes, const char *where, lm_err *e)
{
    struct statvfs fs;
    lm_code rc = fstatvfs(fd, &fs) ? LM_OK : lm_st_check_room(&fs, bytes, where, e);

    if (rc)
        snprintf(e->todo, sizeof e->todo, "set LM_TMPDIR to a folder with room for the model");
    return rc;
}

typedef struct {
    lm_bundle *b;
    int fd;
    const char *dir;
    uint8_t *buf;
    uint64_t end, bytes; /* of the file; copied so far */
} spool;

/* Copy the current file from cur_done on and all later ones, each at a page boundary. */
static lm_code spool_current(spool *s, lm_err *e)
{
    lm_bundle *b = s->b;
    lm_bundle_entry *x = b->cur;
    size_t got = 1;
    lm_code rc = lm_bundle_spool_room(s->fd, x->f.bytes - b->cur_done, s->dir, e);

    x->at = s->end;
    x->from = b->cur_done;
    if (!rc && (s->end > INT64_MAX - x->f.bytes ||
                lseek(s->fd, (off_t)(s->end + b->cur_done), SEEK_SET) < 0))
        rc = lm_fail(e, LM_EIO, s->dir, NULL, "cannot reserve %" PRIu64 " byte%s", x->f.bytes,
                     lm_plural(x->f.bytes));
    while (!rc && b->cur_done < x->f.bytes) {
        rc = lm_bundle_read(b, s->buf, BLOCK, &got, e);
        if (!rc)
            rc = lm_write_all(s->fd, s->buf, got, s->dir, e);
        s->bytes += got;
        lm_progress(b->o.sink, "spool", (double)s->bytes, 0, "bytes", NULL);
    }
    s->end += (x->f.bytes + PAGE - 1) / PAGE * PAGE;
    return rc;
}

static lm_code spool_all(spool *s, lm_err *e)
{
    lm_bundle *b = s->b;
    const lm_bundle_file *f = NULL;
    lm_bundle_entry *first = b->cur;
    uint64_t done = b->cur_done;
    lm_code rc = lm_alloc_n(&s->buf, BLOCK, 1, "a buffer", e);

    if (!rc && b->cur)
        rc = spool_current(s, e);
    if (b->cur)
        b->cur = NULL; /* it is kept, so it can be read again */
    while (!rc && !(rc = lm_bundle_next(b, &f, e)) && f) {
        rc = spool_current(s, e);
        b->cur = NULL;
    }
    b->cur = first;
    b->cur_done = done;
    lm_free(s->buf);
    return rc;
}

lm_code lm_bundle_spool(lm_bundle *b, lm_err *e)
{
    spool s = { .b = b, .fd = -1, .dir = b->o.tmpdir ? b->o.tmpdir : "/var/tmp" };
    char shown[32];
    size_t first = 0;
    lm_code rc;

    if (b->random)
        return LM_OK;
    rc = lm_bundle_spool_open(s.dir, &s.fd, e);
    if (!rc)
        lm_log(b->o.sink, LM_LOG_INFO, "%s: spooled to %s: it is not read in order", b->path,
               s.dir);
    if (!rc)
        rc = spool_all(&s, e);
    if (!rc && s.end && ftruncate(s.fd, (off_t)s.end))
        rc = lm_fail_write(s.dir, e);
    if (rc) {
        if (s.fd >= 0)
            close(s.fd);
        return rc;
    }
    rc = lm_map_fd(s.fd, s.dir, &b->map, e); /* takes ownership of s.fd */
    if (rc)
        return rc;
    if (b->ops)
        b->ops->close(b);
    b->ops = NULL;
    b->random = true;
    for (first = 0; first < b->n && b->entry[first]->gone; first++)
        ;
    b->next = b->cur ? first + 1 : first;
    lm_log(b->o.sink, LM_LOG_INFO, "%s: %s spooled", b->path,
           lm_show_bytes((double)s.bytes, shown));
    return LM_OK;
}
