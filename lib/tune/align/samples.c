/* SPDX-License-Identifier: Apache-2.0 */
/* samples.c -- kept completions, appended to a file. */
#include "tune/align/samples.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"

struct lm_samples {
    char *path;
    int fd;
    bool made;    /* the file is new, and has no record */
    bool replace; /* the old records are still there */
    lm_buf text;  /* not written yet */
};

static lm_code fail_io(const char *path, const char *what, lm_err *e)
{
    return lm_fail(e, LM_EIO, path, NULL, "%s: %s", what, strerror(errno));
}

/* ---- resuming ---- */

/* Bytes of the lines before the first one of a later step; a last line without its end is
 * dropped. */
static lm_code find_end(const char *path, const lm_map *m, int64_t from, size_t *end, lm_err *e)
{
    const char *text = (const char *)m->data, *stop;
    int64_t line = 1, step = 0;
    for (*end = 0; *end < m->size; *end = (size_t)(stop - text) + 1, line++) {
        const char *at = text + *end;
        json_t *o = NULL;
        stop = memchr(at, '\n', m->size - *end);
        if (!stop)
            return LM_OK;
        if (lm_json_parse(at, (size_t)(stop - at), path, &o, e) ||
            lm_json_i64(o, "step", 0, INT64_C(1) << 50, &step, path, e)) {
            json_decref(o);
            return lm_fail(e, LM_EFORMAT, path, "name the file of the run, or another one",
                           "line %" PRId64 " has no step", line);
        }
        json_decref(o);
        if (step > from)
            return LM_OK;
    }
    return LM_OK;
}

lm_code lm_samples_cut(const char *path, int64_t from, lm_err *e)
{
    lm_map m;
    size_t end = 0;
    if (access(path, F_OK) && errno == ENOENT)
        return LM_OK;
    if (lm_map_open(path, &m, e))
        return e->code;
    find_end(path, &m, from, &end, e);
    lm_map_close(&m);
    if (!e->code && truncate(path, (off_t)end))
        return fail_io(path, "cannot be cut", e);
    return e->code;
}

/* ---- life ---- */

lm_code lm_samples_open(const char *path, int64_t from, bool force, lm_samples **out, lm_err *e)
{
    const int flags = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC;
    lm_samples *s = NULL;
    *out = NULL;
    if ((from >= 0 && lm_samples_cut(path, from, e)) || lm_alloc_n(&s, 1, sizeof *s, "samples", e))
        return e->code;
    s->fd = -1;
    if (!lm_strdup(&s->path, path, e)) {
        s->fd = open(path, flags | O_EXCL, 0666);
        s->made = s->fd >= 0;
        if (s->fd < 0 && errno == EEXIST && (from >= 0 || force)) {
            s->replace = from < 0;
            s->fd = open(path, flags, 0666);
        }
        if (s->fd < 0 && errno == EEXIST)
            lm_fail(e, LM_EUSAGE, path, "allow replacing it", "exists already");
        else if (s->fd < 0)
            fail_io(path, "cannot be written", e);
    }
    if (e->code) {
        lm_samples_close(s);
        return e->code;
    }
    *out = s;
    return LM_OK;
}

void lm_samples_close(lm_samples *s)
{
    if (!s)
        return;
    if (s->fd >= 0)
        close(s->fd);
    if (s->made)
        unlink(s->path);
    lm_buf_fini(&s->text);
    lm_free(s->path);
    lm_free(s);
}

/* ---- records ---- */

static void put_prompt(lm_jw *w, const lm_sample *x)
{
    if (x->prompt)
        lm_jw_json(w, "prompt", x->prompt);
    else
        lm_jw_strn(w, "prompt", x->text, x->text_len);
}

static void put_completion(lm_jw *w, const lm_sample *x)
{
    if (!json_is_array(x->prompt)) {
        lm_jw_strn(w, "completion", x->completion, x->len);
        return;
    }
    lm_jw_arr(w, "completion");
    lm_jw_obj(w, NULL);
    lm_jw_str(w, "role", "assistant");
    lm_jw_strn(w, "content", x->completion, x->len);
    lm_jw_close_obj(w);
    lm_jw_close_arr(w);
}

lm_code lm_samples_add(lm_samples *s, const lm_sample *x, lm_err *e)
{
    lm_jw w;
    lm_jw_begin(&w, &s->text, 0, e);
    lm_jw_obj(&w, NULL);
    put_prompt(&w, x);
    put_completion(&w, x);
    lm_jw_f64(&w, "reward", x->reward);
    lm_jw_int(&w, "step", x->step);
    lm_jw_close_obj(&w);
    return lm_jw_end(&w) ? e->code : lm_buf_add(&s->text, "\n", 1, e);
}

lm_code lm_samples_flush(lm_samples *s, lm_err *e)
{
    if (!s->text.len)
        return LM_OK;
    if (s->replace && ftruncate(s->fd, 0) && errno != EINVAL) /* of a device */
        return fail_io(s->path, "cannot be cut", e);
    s->made = s->replace = false;
    for (size_t at = 0; at < s->text.len;) {
        ssize_t n = write(s->fd, s->text.data + at, s->text.len - at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return fail_io(s->path, "cannot be written", e);
        at += (size_t)n;
    }
    s->text.len = 0;
    if (fsync(s->fd) && errno != EINVAL && errno != EROFS) /* of a pipe or a device */
        return fail_io(s->path, "cannot be written", e);
    return LM_OK;
}
