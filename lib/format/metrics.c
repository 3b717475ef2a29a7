/* SPDX-License-Identifier: Apache-2.0 */
/* metrics.c -- the writer of metrics lines.  See metrics.h and lm-metrics(5).
 *
 * A record is built in one buffer, which is reused for each line, and written by one write(2). */
#include "format/metrics.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/file.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/text.h"

/* Longer than any record of train, so that a step allocates nothing. */
enum { FIRST_ROOM = 8192 };

struct lm_metrics {
    int fd;
    bool ours;   /* close it at the end */
    off_t old;   /* bytes of records of an earlier run, which lm_metrics_settle removes */
    bool silent; /* the reader has closed its end */
    char *name;  /* for messages */
    lm_sink *sink;
    lm_buf line, text; /* text: a string converted to valid UTF-8 */
    lm_jw json;
    lm_err err;            /* the first failure inside a record, returned by lm_metrics_end */
    const char *nonfinite; /* kind of the first number of this record that JSON cannot hold */
};

/* "fd:N" -> N; false when dest is something else or N is not a number. */
static bool parse_fd(const char *dest, int *fd)
{
    int64_t n;

    if (strncmp(dest, "fd:", 3) != 0 || !lm_parse_count(dest + 3, &n) || n < 0 || n > 1 << 20)
        return false;
    *fd = (int)n;
    return true;
}

/* Names of the system for descriptors.  They are not opened again: a file opened anew would have
 * its own offset, unlike that of processes sharing the descriptor, and could be replaced. */
static const char *known_as(const char *dest, char name[32])
{
    static const char *const prefix[] = { "/dev/fd/", "/proc/self/fd/" };
    const char *number = !strcmp(dest, "/dev/stderr") ? "2" : NULL;
    int fd;

    if (lm_path_is_stdout(dest))
        return "-";
    for (int i = 0; i < 2; i++)
        if (!strncmp(dest, prefix[i], strlen(prefix[i])))
            number = dest + strlen(prefix[i]);
    if (!number)
        return dest;
    snprintf(name, 32, "fd:%.20s", number);
    return parse_fd(name, &fd) && fcntl(fd, F_GETFL) >= 0 ? name : dest;
}

/* A killed run may leave an incomplete line; end it, so that new lines start at a new one. */
static lm_code close_cut_line(int fd, const char *name, lm_err *e)
{
    struct stat st;
    char last = '\n';

    if (fstat(fd, &st) || !S_ISREG(st.st_mode) || st.st_size == 0)
        return LM_OK;
    if (pread(fd, &last, 1, st.st_size - 1) != 1) {
        return lm_fail(e, LM_EIO, name, NULL, "cannot read the end of the file");
    }
    return last == '\n' ? LM_OK : lm_write_all(fd, "\n", 1, name, e);
}

/* The size of a regular file, otherwise 0. */
static off_t size_of(int fd)
{
    struct stat st;
    return !fstat(fd, &st) && S_ISREG(st.st_mode) ? st.st_size : 0;
}

static lm_code open_file(const char *path, lm_metrics_mode mode, int *fd, lm_err *e)
{
    int flags = O_RDWR | O_CREAT | O_CLOEXEC | O_APPEND;
    struct stat st;

    /* Only a regular file is refused; a fifo or a device is meant to be written to. */
    if (mode == LM_METRICS_NEW && stat(path, &st) == 0 && S_ISREG(st.st_mode))
        return lm_fail(e, LM_EUSAGE, path, "choose another name, or force it", "exists already");
    if (stat(path, &st) == 0 && !S_ISREG(st.st_mode))
        flags = O_WRONLY | O_CLOEXEC;
    *fd = open(path, flags, 0666);
    if (*fd < 0)
        return lm_fail(e, LM_EIO, path, errno == ENOENT ? "create its folder first" : NULL,
                       "cannot open for writing");
    return LM_OK;
}

lm_code lm_metrics_open(const char *dest, lm_metrics_mode mode, lm_sink *sink, lm_metrics **out,
                        lm_err *e)
{
    lm_metrics *m = NULL;
    char name[32];
    lm_code rc = lm_alloc_n(&m, 1, sizeof *m, "metrics writer", e);

    *out = NULL;
    dest = known_as(dest, name);
    if (rc)
        return rc;
    m->fd = -1;
    m->sink = sink;
    if (strcmp(dest, "-") == 0) {
        m->fd = STDOUT_FILENO;
        rc = lm_strdup(&m->name, "standard output", e);
    } else if (strncmp(dest, "fd:", 3) == 0) {
        if (!parse_fd(dest, &m->fd) || fcntl(m->fd, F_GETFL) < 0)
            rc = lm_fail(e, LM_EUSAGE, dest, "open it first, for example: 3>run.jsonl with fd:3",
                         "is not an open file descriptor");
        else
            rc = lm_strdup(&m->name, dest, e);
    } else {
        rc = open_file(dest, mode, &m->fd, e);
        m->ours = !rc;
        if (!rc && mode != LM_METRICS_NEW)
            rc = close_cut_line(m->fd, dest, e);
        if (!rc && mode == LM_METRICS_REPLACE)
            m->old = size_of(m->fd);
        if (!rc)
            rc = lm_strdup(&m->name, dest, e);
    }
    if (!rc)
        rc = lm_buf_room(&m->line, FIRST_ROOM, e);
    if (rc) {
        lm_metrics_close(m, e);
        return rc;
    }
    *out = m;
    return LM_OK;
}

void lm_metrics_begin(lm_metrics *m, const char *event)
{
    if (!m || m->silent)
        return;
    m->line.len = 0;
    m->nonfinite = NULL;
    m->err = (lm_err){ 0 };
    lm_jw_begin(&m->json, &m->line, 0, &m->err);
    lm_jw_obj(&m->json, NULL);
    lm_jw_str(&m->json, "event", event);
}

void lm_metrics_int(lm_metrics *m, const char *key, int64_t v)
{
    if (m && !m->silent)
        lm_jw_int(&m->json, key, v);
}

/* Record the kind of a number that becomes null. */
static void note_number(lm_metrics *m, double v)
{
    if (!isfinite(v) && !m->nonfinite)
        m->nonfinite = isnan(v) ? "nan" : v > 0 ? "inf" : "-inf";
}

void lm_metrics_f32(lm_metrics *m, const char *key, double v)
{
    if (!m || m->silent)
        return;
    note_number(m, v);
    lm_jw_f32(&m->json, key, v);
}

void lm_metrics_f64(lm_metrics *m, const char *key, double v)
{
    if (!m || m->silent)
        return;
    note_number(m, v);
    lm_jw_f64(&m->json, key, v);
}

/* File names are bytes; JSON strings are UTF-8: each invalid byte becomes U+FFFD. */
static void put_text(lm_metrics *m, const char *key, const char *s)
{
    size_t len = strlen(s), ok = lm_utf8_valid(s, len);

    if (ok == len) {
        lm_jw_str(&m->json, key, s);
        return;
    }
    m->text.len = 0;
    while (len > 0) {
        ok = lm_utf8_valid(s, len);
        if (lm_buf_add(&m->text, s, ok, &m->err) ||
            (ok < len && lm_buf_add(&m->text, "\xEF\xBF\xBD", 3, &m->err)))
            return;
        s += ok + (ok < len);
        len -= ok + (ok < len);
    }
    lm_jw_strn(&m->json, key, m->text.data, m->text.len);
}

void lm_metrics_str(lm_metrics *m, const char *key, const char *s)
{
    if (!m || m->silent)
        return;
    if (s)
        put_text(m, key, s);
    else
        lm_jw_str(&m->json, key, NULL);
}

void lm_metrics_begin_run(lm_metrics *m, const char *tool, const char *version, int argc,
                          char *const *argv, int64_t seed)
{
    if (!m || m->silent)
        return;
    lm_metrics_begin(m, "run");
    lm_metrics_str(m, "tool", tool);
    lm_metrics_str(m, "version", version);
    lm_jw_arr(&m->json, "argv");
    for (int i = 0; i < argc; i++)
        put_text(m, NULL, argv[i]);
    lm_jw_close_arr(&m->json);
    lm_metrics_int(m, "seed", seed);
}

void lm_metrics_list(lm_metrics *m, const char *key, const double *v, size_t n)
{
    if (!m || m->silent)
        return;
    lm_jw_arr(&m->json, key);
    for (size_t i = 0; i < n; i++) {
        note_number(m, v[i]);
        lm_jw_f32(&m->json, NULL, v[i]);
    }
    lm_jw_close_arr(&m->json);
}

/* One write(2) for the line; after a short write (a full pipe) the rest follows. */
static lm_code write_line(lm_metrics *m, lm_err *e)
{
    const char *p = m->line.data;
    size_t left = m->line.len;

    while (left > 0) {
        ssize_t n = write(m->fd, p, left);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EPIPE) {
            m->silent = true;
            lm_log(m->sink, LM_LOG_WARN, "%s: the reader of the metrics has gone; they are dropped",
                   m->name);
            return LM_OK;
        }
        if (n < 0)
            return lm_fail(e, LM_EIO, m->name, "free space, or write the metrics elsewhere",
                           "cannot write metrics");
        p += n;
        left -= (size_t)n;
    }
    return LM_OK;
}

lm_code lm_metrics_end(lm_metrics *m, lm_err *e)
{
    lm_code rc;

    if (!m || m->silent)
        return LM_OK;
    if (m->nonfinite)
        lm_jw_str(&m->json, "nonfinite", m->nonfinite);
    lm_jw_close_obj(&m->json);
    rc = lm_jw_end(&m->json);
    if (!rc && m->err.code)
        rc = m->err.code;
    if (rc)
        return lm_fail(e, rc, m->name, m->err.todo, "%s", m->err.what);
    if (m->line.len > 0 && m->line.data[m->line.len - 1] != '\n') {
        rc = lm_buf_add(&m->line, "\n", 1, e);
        if (rc)
            return rc;
    }
    return write_line(m, e);
}

static lm_code copy_from(int fd, off_t at, int to, const char *name, lm_err *e)
{
    char buf[65536];
    ssize_t n;

    while ((n = pread(fd, buf, sizeof buf, at)) > 0) {
        if (lm_write_all(to, buf, (size_t)n, name, e))
            return e->code;
        at += n;
    }
    return n < 0 ? lm_fail(e, LM_EIO, name, NULL, "cannot read it back") : LM_OK;
}

/* Copy the new records to a new file that replaces the old one; later records are appended to
 * it. */
static lm_code take_over(lm_metrics *m, lm_err *e)
{
    lm_out *out = NULL;
    int fd = -1;
    lm_code rc = lm_out_open(m->name, true, &out, e);

    if (!rc)
        rc = copy_from(m->fd, m->old, lm_out_fd(out), m->name, e);
    if (!rc && (fd = fcntl(lm_out_fd(out), F_DUPFD_CLOEXEC, 3)) < 0)
        rc = lm_fail(e, LM_EIO, m->name, NULL, "cannot continue in it");
    if (rc)
        lm_out_drop(out);
    else
        rc = lm_out_commit(out, e);
    if (rc && fd >= 0)
        close(fd);
    if (rc)
        return rc;
    close(m->fd);
    m->fd = fd;
    return LM_OK;
}

void lm_metrics_settle(lm_metrics *m)
{
    lm_err e = { 0 };

    if (!m || !m->old)
        return;
    if (take_over(m, &e))
        lm_log(m->sink, LM_LOG_WARN, "%s: %s: the records of the previous run remain in it",
               e.where, e.what);
    m->old = 0;
}

lm_code lm_metrics_close(lm_metrics *m, lm_err *e)
{
    lm_code rc = LM_OK;

    if (!m)
        return LM_OK;
    if (m->ours && m->fd >= 0 && close(m->fd))
        rc = lm_fail(e, LM_EIO, m->name ? m->name : "metrics", NULL, "cannot close");
    lm_buf_fini(&m->line);
    lm_buf_fini(&m->text);
    lm_free(m->name);
    lm_free(m);
    return rc;
}
