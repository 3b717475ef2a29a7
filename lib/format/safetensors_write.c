/* SPDX-License-Identifier: Apache-2.0 */
/* safetensors_write.c -- writes a planned file from front to back through a small buffer. */
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/text.h"
#include "format/safetensors_table.h"
#include "format/safetensors_writer.h"

static lm_code write_fd(void *ctx, const void *data, size_t bytes, lm_err *e)
{
    lm_st_writer *w = ctx;
    return lm_write_all(lm_out_fd(w->out), data, bytes, w->where, e);
}

static lm_code emit(lm_st_writer *w, uint64_t at, const void *data, size_t bytes, lm_err *e)
{
    return w->share ? lm_write_at(w->fd, data, bytes, at, w->where, e)
                    : w->write(w->ctx, data, bytes, e);
}

lm_code lm_st_flush(lm_st_writer *w, lm_err *e)
{
    size_t n = w->fill;
    w->fill = 0;
    return n ? emit(w, w->at, w->buf, n, e) : LM_OK;
}

lm_code lm_st_write_at(lm_st_writer *w, uint64_t at, const void *data, size_t bytes, lm_err *e)
{
    lm_code rc;

    if ((bytes > sizeof w->buf - w->fill || at != w->at + w->fill) && (rc = lm_st_flush(w, e)))
        return rc;
    if (!w->fill)
        w->at = at;
    if (bytes >= sizeof w->buf / 2 && !w->fill)
        return emit(w, at, data, bytes, e);
    if (bytes)
        memcpy(w->buf + w->fill, data, bytes);
    w->fill += bytes;
    return LM_OK;
}

void lm_st_advance(lm_st_writer *w, uint64_t bytes)
{
    w->done += bytes;
    while (w->cur < lm_st_plan_count(w->plan)) {
        const lm_st_tensor *t = lm_st_plan_at(w->plan, w->cur);
        if (w->done < t->offset + t->bytes)
            break;
        w->cur++;
    }
}

static lm_code start(lm_st_writer *w, const char *where, const lm_st_plan *plan, lm_err *e)
{
    lm_buf header = { 0 };
    lm_code rc = lm_strdup(&w->where, where, e);

    w->plan = plan;
    if (!rc)
        rc = lm_st_plan_header(plan, &header, e);
    if (!rc)
        rc = lm_st_write_at(w, 0, header.data, header.len, e);
    w->data_at = header.len;
    w->to = UINT64_MAX;
    lm_buf_fini(&header);
    lm_st_advance(w, 0);
    return rc;
}

lm_code lm_st_create_on(lm_write_fn write, void *ctx, const char *where, const lm_st_plan *plan,
                        lm_st_writer **out, lm_err *e)
{
    lm_st_writer *w = NULL;
    lm_code rc = lm_alloc_n(&w, 1, sizeof *w, "safetensors writer", e);

    *out = NULL;
    if (rc)
        return rc;
    w->write = write;
    w->ctx = ctx;
    if ((rc = start(w, where, plan, e))) {
        lm_st_drop(w);
        return rc;
    }
    *out = w;
    return LM_OK;
}

lm_code lm_st_check_room(const struct statvfs *fs, uint64_t need, const char *where, lm_err *e)
{
    double room = (double)fs->f_bavail * (double)fs->f_frsize;
    char a[32], b[32];

    if ((double)need <= room)
        return LM_OK;
    return lm_fail(e, LM_ELIMIT, where, "free space on the disk or write elsewhere",
                   "needs %s, the file system has %s free", lm_show_bytes((double)need, a),
                   lm_show_bytes(room, b));
}

/* A disk that is too small is reported before the work, not after it. */
static lm_code check_room(const lm_st_writer *w, uint64_t need, lm_err *e)
{
    struct statvfs fs;
    struct stat st;

    if (fstat(lm_out_fd(w->out), &st) || !S_ISREG(st.st_mode) || fstatvfs(lm_out_fd(w->out), &fs))
        return LM_OK;
    return lm_st_check_room(&fs, need, w->where, e);
}

lm_code lm_st_create(const char *path, bool force, const lm_st_plan *plan, lm_st_writer **out,
                     lm_err *e)
{
    lm_st_writer *w = NULL;
    lm_code rc = lm_alloc_n(&w, 1, sizeof *w, "safetensors writer", e);

    *out = NULL;
    if (rc)
        return rc;
    w->write = write_fd;
    w->ctx = w;
    if ((rc = lm_out_open(path, force, &w->out, e)))
        w->out = NULL;
    if (!rc)
        rc = start(w, lm_out_path(w->out), plan, e);
    if (!rc)
        rc = check_room(w, lm_st_plan_data_bytes(plan), e);
    if (rc) {
        lm_st_drop(w);
        return rc;
    }
    *out = w;
    return LM_OK;
}

const lm_st_tensor *lm_st_next(const lm_st_writer *w)
{
    return w->cur < lm_st_plan_count(w->plan) ? lm_st_plan_at(w->plan, w->cur) : NULL;
}

/* Of a shared file only what lies in this rank's part. */
lm_code lm_st_write(lm_st_writer *w, const void *data, size_t bytes, lm_err *e)
{
    const uint8_t *from = data;

    if (bytes > lm_st_plan_data_bytes(w->plan) - w->done)
        return lm_fail(e, LM_EBUG, w->where, NULL,
                       "%zu byte%s written where %" PRIu64 " are planned", bytes, lm_plural(bytes),
                       lm_st_plan_data_bytes(w->plan) - w->done);
    const uint64_t begin = w->done > w->from ? w->done : w->from,
                   end = w->done + bytes < w->to ? w->done + bytes : w->to;
    if (begin < end) {
        lm_code rc = lm_st_write_at(w, w->data_at + begin, from + (begin - w->done),
                                    (size_t)(end - begin), e);
        if (rc)
            return rc;
        w->wrote += end - begin;
    }
    lm_st_advance(w, bytes);
    return LM_OK;
}

lm_code lm_st_write_as(lm_st_writer *w, lm_dtype from, const void *data, int64_t count, lm_err *e)
{
    _Alignas(64) uint8_t buf[65536];
    const lm_st_tensor *t = lm_st_next(w);
    const uint8_t *src = data;

    if (!count)
        return LM_OK;
    if (!t || t->dtype == LM_DTYPE_NONE)
        return lm_fail(e, LM_EBUG, w->where, NULL,
                       "elements written behind the last planned tensor");
    size_t size = lm_dtype_size(t->dtype), in_size = lm_dtype_size(from);
    if ((uint64_t)count > (t->offset + t->bytes - w->done) / size)
        return lm_fail(e, LM_EBUG, w->where, NULL, "%" PRId64 " element%s go beyond tensor '%s'",
                       count, lm_plural(count), t->name);
    if (t->dtype == from)
        return lm_st_write(w, data, (size_t)count * size, e);
    int64_t step = (int64_t)(sizeof buf / size);
    for (int64_t i = 0; i < count; i += step) {
        int64_t n = count - i < step ? count - i : step;
        if (w->done < w->to && w->done + (size_t)n * size > w->from)
            lm_convert(from, src + (size_t)i * in_size, t->dtype, buf, n);
        lm_code rc = lm_st_write(w, buf, (size_t)n * size, e);
        if (rc)
            return rc;
    }
    return LM_OK;
}

lm_code lm_st_commit(lm_st_writer *w, lm_err *e)
{
    const lm_st_tensor *t = lm_st_next(w);
    lm_code rc = LM_OK;

    if (t)
        rc = lm_fail(e, LM_EBUG, w->where, NULL, "the bytes of tensor '%s' were not written",
                     t->name);
    if (!rc)
        rc = lm_st_flush(w, e);
    if (!rc && w->share)
        rc = lm_st_leave(w, e);
    if (!rc && w->out) {
        lm_out *out = w->out;
        w->out = NULL;
        rc = lm_out_commit(out, e);
    }
    lm_st_drop(w);
    return rc;
}

void lm_st_drop(lm_st_writer *w)
{
    if (!w)
        return;
    if (w->out)
        lm_out_drop(w->out);
    if (w->share && w->fd >= 0)
        close(w->fd);
    lm_free(w->where);
    lm_free(w);
}
