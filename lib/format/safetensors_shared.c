/* SPDX-License-Identifier: Apache-2.0 */
/* safetensors_shared.c -- one file that several ranks write at once, each its part.
 *
 * The plan says where every byte lies.  One rank makes the file at its full size, with its header; then all of them, that one
 * too, join it and go through the tensors as the only writer of a file does.  What all ranks have is dealt by the bytes of the
 * file: each writes a contiguous part, whose borders are those of pages, so that no two ranks write to one.  Of a tensor of
 * which each rank has other elements, each writes its own. */
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/text.h"
#include "format/safetensors_writer.h"

enum { PAGE = 4096 };

lm_code lm_st_reserve(const char *path, const char *where, const lm_st_plan *plan, lm_err *e)
{
    lm_buf header = { 0 };
    uint64_t bytes = lm_st_plan_data_bytes(plan);
    lm_code rc = lm_st_plan_header(plan, &header, e);
    int fd = rc ? -1 : open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);

    if (!rc && fd < 0)
        rc = lm_fail(e, LM_EIO, where, NULL, "cannot create");
    if (!rc)
        rc = lm_write_at(fd, header.data, header.len, 0, where, e);
    if (!rc && ftruncate(fd, (off_t)(header.len + bytes)))
        rc = lm_fail_write(where, e);
    if (fd >= 0 && close(fd) && !rc)
        rc = lm_fail_write(where, e);
    lm_buf_fini(&header);
    return rc;
}

/* The file must be that of this rank's plan; what is noted beside the tensors is the other rank's matter. */
static lm_code check_header(lm_st_writer *w, const char *path, lm_err *e)
{
    lm_st *st = NULL;
    lm_code rc = lm_st_open(path, &st, e);
    size_t n = lm_st_plan_count(w->plan);
    bool same = !rc && lm_st_count(st) == n;

    for (size_t i = 0; same && i < n; i++) {
        const lm_st_tensor *a = lm_st_at(st, i), *b = lm_st_plan_at(w->plan, i);
        same = !strcmp(a->name, b->name) && !strcmp(a->dtype_name, b->dtype_name) &&
               a->offset == b->offset && a->bytes == b->bytes;
    }
    if (rc)
        snprintf(e->where, sizeof e->where, "%s", w->where);
    else if (same)
        w->data_at = lm_st_file_bytes(st) - lm_st_plan_data_bytes(w->plan);
    else
        rc =
            lm_fail(e, LM_EBUG, w->where, NULL,
                    "rank %d plans other tensors than the rank that made the file", w->share->rank);
    lm_st_close(st);
    return rc;
}

/* The first byte of the data that rank r writes. */
static uint64_t border(const lm_st_writer *w, int r)
{
    const uint64_t data = lm_st_plan_data_bytes(w->plan), ranks = (uint64_t)w->share->ranks;

    if (r <= 0 || r >= w->share->ranks)
        return r <= 0 ? 0 : data;
    const uint64_t at = (w->data_at + data) / ranks * (uint64_t)r / PAGE * PAGE;
    return at > w->data_at ? at - w->data_at : 0;
}

lm_code lm_st_join(const char *path, const char *where, const lm_st_plan *plan, lm_st_share *share,
                   lm_st_writer **out, lm_err *e)
{
    lm_st_writer *w = NULL;
    lm_code rc = lm_alloc_n(&w, 1, sizeof *w, "safetensors writer", e);

    *out = NULL;
    if (rc)
        return rc;
    w->plan = plan;
    w->share = share;
    w->fd = open(path, O_WRONLY | O_CLOEXEC);
    if (w->fd < 0)
        rc = lm_fail(e, LM_EIO, where, "write to a folder that all ranks reach", "cannot open");
    if (!rc)
        rc = lm_strdup(&w->where, where, e);
    if (!rc)
        rc = check_header(w, path, e);
    if (rc) {
        lm_st_drop(w);
        return rc;
    }
    w->from = border(w, share->rank);
    w->to = border(w, share->rank + 1);
    lm_st_advance(w, 0);
    *out = w;
    return LM_OK;
}

static void go_behind(lm_st_writer *w, const lm_st_tensor *t)
{
    lm_st_advance(w, t->offset + t->bytes - w->done);
}

bool lm_st_pass(lm_st_writer *w)
{
    const lm_st_tensor *t = lm_st_next(w);

    if (!w->share || !t || (w->done < w->to && w->from < t->offset + t->bytes))
        return false;
    go_behind(w, t);
    return true;
}

lm_code lm_st_write_own(lm_st_writer *w, lm_dtype from, const void *data, int64_t count, int64_t at,
                        lm_err *e)
{
    const lm_st_tensor *t = lm_st_next(w);
    const size_t cur = w->cur;
    const uint64_t dealt_from = w->from, dealt_to = w->to;

    if (!w->share || !t || t->dtype == LM_DTYPE_NONE || w->done != t->offset)
        return lm_fail(e, LM_EBUG, w->where, NULL, "elements of one rank out of turn");
    if (at < 0 || at > t->count)
        return lm_fail(e, LM_EBUG, w->where, NULL, "tensor '%s' has no element %" PRId64, t->name,
                       at);
    w->done += (uint64_t)at * lm_dtype_size(t->dtype);
    w->from = 0;
    w->to = UINT64_MAX;
    lm_code rc = lm_st_write_as(w, from, data, count, e);
    w->done = t->offset;
    w->cur = cur;
    w->from = dealt_from;
    w->to = dealt_to;
    return rc;
}

void lm_st_end_own(lm_st_writer *w)
{
    const lm_st_tensor *t = lm_st_next(w);

    if (t)
        go_behind(w, t);
}

lm_code lm_st_leave(lm_st_writer *w, lm_err *e)
{
    const int fd = w->fd;

    w->fd = -1;
    w->share->wrote += w->wrote;
    return close(fd) ? lm_fail_write(w->where, e) : LM_OK;
}
