/* SPDX-License-Identifier: Apache-2.0 */
/* metrics_read.c -- the reader of metrics files: converts a growing file to series of numbers.
 *
 * Bytes go to a buffer; each whole line is parsed and its numbers are added to the series of
 * (event, key). Bytes after the last newline are kept for the next poll. */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/file.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/stop.h"
#include "format/metrics.h"

enum {
    READ_BYTES = 1 << 16,
    LINE_LIMIT = 1 << 20, /* a longer line is not a metrics record: skipped */
    ENDLESS = 1 << 30,    /* a line of this length without end is an error */
    SERIES_LIMIT = 4096,  /* different (event, key) pairs in one file */
};

struct lm_metrics_file {
    char *path;
    int fd;
    bool pipe, eof;
    bool overlong;  /* inside a line beyond LINE_LIMIT: drop up to its newline */
    size_t dropped; /* bytes of that line so far */
    dev_t dev;
    ino_t ino;
    off_t pos;
    lm_buf rest; /* bytes after the last newline */
    lm_series *series;
    size_t n, cap;
    lm_list_series *rows;
    size_t n_rows, cap_rows;
    char *status;
    int64_t lines, records, skipped, first_skipped;
};

static lm_code open_fd(lm_metrics_file *f, lm_err *e)
{
    struct stat st;

    f->fd = strcmp(f->path, "-") == 0 ? STDIN_FILENO : open(f->path, O_RDONLY | O_CLOEXEC);
    if (f->fd < 0 || fstat(f->fd, &st))
        return lm_fail(e, LM_EIO, f->path, NULL, "cannot open");
    if (S_ISDIR(st.st_mode))
        return lm_fail(e, LM_EFORMAT, f->path, "name the metrics file itself", "is a folder");
    f->pipe = !S_ISREG(st.st_mode);
    f->dev = st.st_dev;
    f->ino = st.st_ino;
    return LM_OK;
}

lm_code lm_metrics_file_open(const char *path, lm_metrics_file **out, lm_err *e)
{
    lm_metrics_file *f = NULL;
    lm_code rc = lm_alloc_n(&f, 1, sizeof *f, "metrics reader", e);

    *out = NULL;
    if (rc)
        return rc;
    f->fd = -1;
    rc = lm_strdup(&f->path, path, e);
    if (!rc)
        rc = open_fd(f, e);
    if (rc) {
        lm_metrics_file_close(f);
        return rc;
    }
    *out = f;
    return LM_OK;
}

static void clear_series(lm_metrics_file *f)
{
    for (size_t i = 0; i < f->n; i++) {
        lm_series *s = &f->series[i];
        lm_free(s->event);
        lm_free(s->key);
        lm_free(s->step);
        lm_free(s->tokens);
        lm_free(s->seconds);
        lm_free(s->value);
    }
    for (size_t i = 0; i < f->n_rows; i++) {
        lm_free(f->rows[i].event);
        lm_free(f->rows[i].key);
        lm_free(f->rows[i].step);
        lm_free(f->rows[i].value);
    }
    f->n = f->n_rows = 0;
    f->rest.len = 0;
    f->overlong = false;
    lm_free(f->status);
    f->status = NULL;
    f->lines = f->records = f->skipped = f->first_skipped = 0;
}

/* Index of (event, key), created if new; f->n when there are too many. */
static lm_code find_series(lm_metrics_file *f, const char *event, const char *key, size_t *at,
                           lm_err *e)
{
    lm_code rc;
    lm_series *s;

    for (*at = 0; *at < f->n; ++*at)
        if (!strcmp(f->series[*at].key, key) && !strcmp(f->series[*at].event, event))
            return LM_OK;
    if (f->n >= SERIES_LIMIT)
        return LM_OK;
    rc = lm_grow(&f->series, &f->cap, f->n + 1, sizeof *f->series, "metrics series", e);
    if (rc)
        return rc;
    s = &f->series[f->n];
    *s = (lm_series){ 0 };
    rc = lm_strdup(&s->event, event, e);
    if (!rc)
        rc = lm_strdup(&s->key, key, e);
    if (rc) {
        lm_free(s->event);
        return rc;
    }
    f->n++;
    return LM_OK;
}

static double number_or_nan(const json_t *rec, const char *key)
{
    const json_t *v = json_object_get(rec, key);

    return json_is_number(v) ? json_number_value(v) : NAN;
}

/* Reserve one more point in all four columns. */
static lm_code grow_series(lm_series *s, lm_err *e)
{
    double **col[4] = { &s->step, &s->tokens, &s->seconds, &s->value };
    size_t cap = s->cap ? 2 * s->cap : 64;

    if (s->n < s->cap)
        return LM_OK;
    for (int i = 0; i < 4; i++) {
        lm_code rc = lm_realloc_n(col[i], cap, sizeof(double), "metrics points", e);
        if (rc)
            return rc;
    }
    s->cap = cap;
    return LM_OK;
}

static lm_code add_point(lm_series *s, const json_t *rec, double value, lm_err *e)
{
    double step = number_or_nan(rec, "step");
    lm_code rc;

    while (s->n > 0 && s->step[s->n - 1] >= step) /* false for NAN */
        s->n--;
    rc = grow_series(s, e);
    if (rc)
        return rc;
    s->step[s->n] = step;
    s->tokens[s->n] = number_or_nan(rec, "tokens");
    s->seconds[s->n] = number_or_nan(rec, "seconds");
    s->value[s->n++] = value;
    return LM_OK;
}

/* ---- lists ---- */

/* Those of (event, key), made if they are new; NULL when there are too many. */
static lm_code find_rows(lm_metrics_file *f, const char *event, const char *key,
                         lm_list_series **out, lm_err *e)
{
    *out = NULL;
    for (size_t i = 0; i < f->n_rows; i++)
        if (!strcmp(f->rows[i].key, key) && !strcmp(f->rows[i].event, event))
            *out = &f->rows[i];
    if (*out || f->n_rows >= SERIES_LIMIT)
        return LM_OK;
    if (lm_grow(&f->rows, &f->cap_rows, f->n_rows + 1, sizeof *f->rows, "metrics lists", e))
        return e->code;
    lm_list_series *r = &f->rows[f->n_rows];
    *r = (lm_list_series){ 0 };
    if (lm_strdup(&r->event, event, e))
        return e->code;
    if (lm_strdup(&r->key, key, e)) {
        lm_free(r->event);
        return e->code;
    }
    f->n_rows++;
    *out = r;
    return LM_OK;
}

static lm_code add_list(lm_metrics_file *f, const char *event, const char *key, const json_t *rec,
                        const json_t *list, lm_err *e)
{
    const double step = number_or_nan(rec, "step");
    const size_t width = json_array_size(list);
    lm_list_series *r;
    if (!width || find_rows(f, event, key, &r, e) || !r)
        return e->code;
    if (r->width != width)
        r->n = r->cap = 0;
    r->width = width;
    while (r->n > 0 && r->step[r->n - 1] >= step)
        r->n--;
    if (r->n == r->cap) {
        const size_t cap = r->cap ? 2 * r->cap : 64;
        if (lm_realloc_n(&r->step, cap, sizeof(double), "metrics points", e) ||
            lm_realloc_n(&r->value, cap, width * sizeof(double), "metrics points", e))
            return e->code;
        r->cap = cap;
    }
    r->step[r->n] = step;
    for (size_t i = 0; i < width; i++) {
        const json_t *v = json_array_get(list, i);
        r->value[r->n * width + i] = json_is_number(v) ? json_number_value(v) : NAN;
    }
    r->n++;
    return LM_OK;
}

/* The event of a record, with its layer if it is of one. */
static const char *event_of(const json_t *rec, char out[64])
{
    const char *event = json_string_value(json_object_get(rec, "event"));
    const json_t *layer = json_object_get(rec, "layer");
    if (!event) /* files of other programs: plain objects of numbers */
        return "step";
    if (!json_is_integer(layer))
        return event;
    snprintf(out, 64, "%.32s.%lld", event, (long long)json_integer_value(layer));
    return out;
}

/* The value of a null in this record. */
static double nonfinite_value(const json_t *rec)
{
    const char *kind = json_string_value(json_object_get(rec, "nonfinite"));

    if (kind && !strcmp(kind, "inf"))
        return INFINITY;
    if (kind && !strcmp(kind, "-inf"))
        return -INFINITY;
    return NAN;
}

static lm_code add_record(lm_metrics_file *f, json_t *rec, lm_err *e)
{
    char layered[64];
    const char *event = event_of(rec, layered), *key;
    double missing = nonfinite_value(rec);
    bool has_missing = json_object_get(rec, "nonfinite") != NULL;
    json_t *v;

    f->records++;
    if (!strcmp(event, "run")) {
        lm_free(f->status); /* a run resumed into the same file */
        f->status = NULL;
        return LM_OK;
    }
    if (!strcmp(event, "end")) {
        const char *status = json_string_value(json_object_get(rec, "status"));
        lm_free(f->status);
        f->status = NULL;
        return lm_strdup(&f->status, status ? status : "done", e);
    }
    json_object_foreach(rec, key, v)
    {
        size_t at;
        lm_code rc;

        if (json_is_array(v) && add_list(f, event, key, rec, v, e))
            return e->code;
        if (!json_is_number(v) && !(json_is_null(v) && has_missing))
            continue;
        rc = find_series(f, event, key, &at, e);
        if (!rc && at < f->n)
            rc =
                add_point(&f->series[at], rec, json_is_null(v) ? missing : json_number_value(v), e);
        if (rc)
            return rc;
    }
    return LM_OK;
}

/* One line without its newline.  `cut_ok`: the last line of the file, dropped without an error if
 * incomplete. */
static lm_code take_line(lm_metrics_file *f, const char *line, size_t len, bool cut_ok, lm_err *e)
{
    lm_err bad = { 0 };
    json_t *rec = NULL;
    lm_code rc;

    f->lines++;
    while (len > 0 && (line[len - 1] == '\r' || line[len - 1] == ' ' || line[len - 1] == '\t'))
        len--;
    if (len == 0 && !f->overlong)
        return LM_OK;
    if (!f->overlong && !lm_json_parse(line, len, f->path, &rec, &bad) && json_is_object(rec)) {
        rc = add_record(f, rec, e);
        json_decref(rec);
        return rc;
    }
    json_decref(rec);
    if (bad.code == LM_ELIMIT)
        return lm_fail(e, bad.code, f->path, bad.todo, "%s", bad.what);
    if (cut_ok)
        return LM_OK;
    if (f->skipped++ == 0)
        f->first_skipped = f->lines;
    return LM_OK;
}

/* Parse the complete lines in f->rest. */
static lm_code take_lines(lm_metrics_file *f, lm_err *e)
{
    size_t done = 0;
    char *nl;

    while (f->rest.len > done &&
           (nl = memchr(f->rest.data + done, '\n', f->rest.len - done)) != NULL) {
        size_t len = (size_t)(nl - f->rest.data) - done;
        lm_code rc = take_line(f, f->rest.data + done, len, false, e);

        f->overlong = false;
        if (rc)
            return rc;
        done += len + 1;
    }
    if (done > 0) {
        memmove(f->rest.data, f->rest.data + done, f->rest.len - done);
        f->rest.len -= done;
    }
    if (f->rest.len > LINE_LIMIT) {
        f->dropped = (f->overlong ? f->dropped : 0) + f->rest.len;
        f->overlong = true;
        f->rest.len = 0;
        if (f->dropped > ENDLESS)
            return lm_fail(e, LM_EFORMAT, f->path, "give the metrics that train wrote",
                           "a line of more than 1 GiB");
    }
    return LM_OK;
}

/* A regular file that shrank, or whose name now leads to another file, starts again. */
static lm_code notice_replacement(lm_metrics_file *f, bool *grew, lm_err *e)
{
    struct stat now, named;

    if (f->pipe || fstat(f->fd, &now))
        return LM_OK;
    if (strcmp(f->path, "-") != 0 && stat(f->path, &named) == 0 &&
        (named.st_dev != f->dev || named.st_ino != f->ino)) {
        int old = f->fd;
        lm_code rc = open_fd(f, e);

        if (rc) {
            f->fd = old;
            return rc;
        }
        close(old);
    } else if (now.st_size >= f->pos) {
        return LM_OK;
    } else if (lseek(f->fd, 0, SEEK_SET) < 0) {
        return lm_fail(e, LM_EIO, f->path, NULL, "cannot go back to the start");
    }
    f->pos = 0;
    clear_series(f);
    *grew = true;
    return LM_OK;
}

lm_code lm_metrics_file_poll(lm_metrics_file *f, bool last, bool *grew, lm_err *e)
{
    int64_t before = f->records;
    bool anew = false;
    lm_code rc = notice_replacement(f, &anew, e);

    while (!rc && !f->eof && !lm_stopping()) {
        struct pollfd p = { .fd = f->fd, .events = POLLIN };
        ssize_t n;

        if (f->pipe && !last && poll(&p, 1, 0) <= 0)
            break;
        rc = lm_buf_room(&f->rest, READ_BYTES, e);
        if (rc)
            break;
        n = read(f->fd, f->rest.data + f->rest.len, READ_BYTES);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0) {
            rc = lm_fail(e, LM_EIO, f->path, NULL, "cannot read");
            break;
        }
        if (n == 0) {
            f->eof = f->pipe;
            break;
        }
        f->pos += n;
        f->rest.len += (size_t)n;
        rc = take_lines(f, e);
    }
    if (!rc && (last || f->eof) && f->rest.len > 0) {
        rc = take_line(f, f->rest.data, f->rest.len, true, e);
        f->rest.len = 0;
    }
    if (grew)
        *grew = anew || f->records != before;
    return rc;
}

const lm_series *lm_metrics_file_series(const lm_metrics_file *f, const char *event,
                                        const char *key)
{
    for (size_t i = 0; i < f->n; i++)
        if (!strcmp(f->series[i].event, event) && !strcmp(f->series[i].key, key))
            return &f->series[i];
    return NULL;
}

const lm_series *lm_metrics_file_nth(const lm_metrics_file *f, size_t i)
{
    return i < f->n ? &f->series[i] : NULL;
}

const lm_list_series *lm_metrics_file_rows(const lm_metrics_file *f, size_t i)
{
    return i < f->n_rows ? &f->rows[i] : NULL;
}

const char *lm_metrics_file_path(const lm_metrics_file *f)
{
    return f->path;
}

const char *lm_metrics_file_status(const lm_metrics_file *f)
{
    return f->status;
}

bool lm_metrics_file_eof(const lm_metrics_file *f)
{
    return f->eof;
}

int64_t lm_metrics_file_skipped(const lm_metrics_file *f)
{
    return f->skipped;
}

int64_t lm_metrics_file_first_skipped(const lm_metrics_file *f)
{
    return f->first_skipped;
}

void lm_metrics_file_close(lm_metrics_file *f)
{
    if (!f)
        return;
    clear_series(f);
    lm_free(f->series);
    lm_free(f->rows);
    lm_buf_fini(&f->rest);
    if (f->fd > STDIN_FILENO)
        close(f->fd);
    lm_free(f->path);
    lm_free(f);
}
