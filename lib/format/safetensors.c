/* SPDX-License-Identifier: Apache-2.0 */
/* safetensors.c -- one file, random access: the header is checked at open; the data are mapped, at
 * any alignment. */
#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/file.h"
#include "base/text.h"
#include "format/safetensors_table.h"

struct lm_st {
    char *path;
    lm_map map;       /* its own file; unused with io.pread */
    lm_st_io io;      /* bytes and map are set for both */
    uint64_t data_at; /* offset of the data in the file */
    lm_st_table table;
};

static lm_code read_at(const lm_st *s, uint64_t from, void *dst, size_t bytes, lm_err *e);

/* The header's text: mapped, or a copy in *own. */
static lm_code header_text(const lm_st *s, uint64_t header, lm_buf *own, const char **text,
                           lm_err *e)
{
    if (s->io.map) {
        *text = (const char *)s->io.map + 8;
        return LM_OK;
    }
    lm_code rc = lm_buf_room(own, (size_t)header, e);
    if (!rc)
        rc = read_at(s, 8, own->data, (size_t)header, e);
    *text = own->data;
    return rc;
}

static lm_code open_table(lm_st *s, lm_err *e)
{
    uint64_t header = 0;
    uint8_t field[8];
    const char *text;
    lm_buf own = { 0 };
    lm_code rc;

    if (s->io.bytes < 8)
        return lm_fail(e, LM_EFORMAT, s->path, "check that it is a safetensors file",
                       "it has %" PRIu64 " byte%s, fewer than the 8 of the length of its header",
                       s->io.bytes, lm_plural(s->io.bytes));
    if ((rc = read_at(s, 0, field, 8, e)) || (rc = lm_st_header_length(field, s->path, &header, e)))
        return rc;
    if (header > s->io.bytes - 8)
        return lm_fail(e, LM_EFORMAT, s->path, "it is truncated: fetch or write it again",
                       "header says it has %" PRIu64 " byte%s, file has %" PRIu64, header,
                       lm_plural(header), s->io.bytes);
    s->data_at = 8 + header;
    rc = header_text(s, header, &own, &text, e);
    if (!rc)
        rc = lm_st_table_parse(&s->table, text, (size_t)header, s->io.bytes - s->data_at, s->path,
                               e);
    lm_buf_fini(&own);
    return rc;
}

/* Open the file `path`, or io. */
static lm_code open_either(const char *path, const lm_st_io *io, lm_st **out, lm_err *e)
{
    lm_st *s = NULL;
    lm_code rc = lm_alloc_n(&s, 1, sizeof *s, "safetensors file", e);

    *out = NULL;
    if (rc)
        return rc;
    s->map.fd = -1;
    rc = lm_strdup(&s->path, path, e);
    if (io)
        s->io = *io;
    else if (!rc && (rc = lm_map_open(path, &s->map, e)))
        s->map = (lm_map){ .fd = -1 };
    else if (!rc)
        s->io = (lm_st_io){ .bytes = s->map.size, .map = s->map.data };
    if (!rc)
        rc = open_table(s, e);
    if (rc) {
        lm_st_close(s);
        return rc;
    }
    *out = s;
    return LM_OK;
}

lm_code lm_st_open(const char *path, lm_st **out, lm_err *e)
{
    return open_either(path, NULL, out, e);
}

lm_code lm_st_open_on(const lm_st_io *io, const char *where, lm_st **out, lm_err *e)
{
    return open_either(where, io, out, e);
}

void lm_st_close(lm_st *s)
{
    if (!s)
        return;
    if (s->map.fd >= 0 || s->map.data)
        lm_map_close(&s->map);
    lm_st_table_fini(&s->table);
    lm_free(s->path);
    lm_free(s);
}

const char *lm_st_path(const lm_st *s)
{
    return s->path;
}

uint64_t lm_st_file_bytes(const lm_st *s)
{
    return s->io.bytes;
}

size_t lm_st_count(const lm_st *s)
{
    return s->table.n;
}

const lm_st_tensor *lm_st_at(const lm_st *s, size_t i)
{
    return &s->table.tensor[i];
}

const lm_st_tensor *lm_st_find(const lm_st *s, const char *name)
{
    return lm_st_table_find(&s->table, name);
}

const char *lm_st_meta(const lm_st *s, const char *key)
{
    return lm_st_table_meta(&s->table, key);
}

bool lm_st_meta_at(const lm_st *s, size_t i, const char **key, const char **value)
{
    return lm_st_table_meta_at(&s->table, i, key, value);
}

const void *lm_st_data(const lm_st *s, const lm_st_tensor *t)
{
    return s->io.map ? s->io.map + s->data_at + t->offset : NULL;
}

void lm_st_forget(const lm_st *s, const lm_st_tensor *t)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), lo = (uintptr_t)lm_st_data(s, t), hi;

    if (!lo)
        return;
    hi = (lo + t->bytes) / page * page; /* whole pages inside the tensor */
    lo = (lo + page - 1) / page * page;
    if (hi > lo)
        madvise((void *)lo, hi - lo, MADV_DONTNEED);
}

static lm_code read_at(const lm_st *s, uint64_t from, void *dst, size_t bytes, lm_err *e)
{
    uint8_t *to = dst;

    if (s->io.pread)
        return s->io.pread(s->io.ctx, from, dst, bytes, e);
    while (bytes) {
        ssize_t n = pread(s->map.fd, to, bytes, (off_t)from);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return lm_fail(e, LM_EIO, s->path, NULL, "cannot read");
        if (n == 0)
            return lm_fail(e, LM_EFORMAT, s->path, NULL, "it was truncated while it was read");
        to += n;
        from += (uint64_t)n;
        bytes -= (size_t)n;
    }
    return LM_OK;
}

lm_code lm_st_read(const lm_st *s, const lm_st_tensor *t, uint64_t from, void *dst, size_t bytes,
                   lm_err *e)
{
    char show[LM_ST_SHOWN];

    if (from > t->bytes || bytes > t->bytes - from)
        return lm_fail(e, LM_EUSAGE, s->path, NULL,
                       "bytes %" PRIu64 " to %" PRIu64
                       " requested from tensor '%s', which has %" PRIu64,
                       from, from + bytes, lm_st_show(t->name, show), t->bytes);
    return read_at(s, s->data_at + t->offset + from, dst, bytes, e);
}

lm_code lm_st_load(const lm_st *s, const lm_st_tensor *t, lm_dtype to, void *dst, lm_err *e)
{
    _Alignas(64) uint8_t buf[65536];
    char show[LM_ST_SHOWN];
    uint8_t *out = dst;

    if (t->dtype == LM_DTYPE_NONE)
        return lm_fail(e, LM_EUSAGE, s->path, NULL,
                       "tensor '%s' has dtype %s, which has no values here",
                       lm_st_show(t->name, show), t->dtype_name);
    if (t->dtype == to)
        return lm_st_read(s, t, 0, dst, t->bytes, e);
    size_t size = lm_dtype_size(t->dtype), out_size = lm_dtype_size(to);
    int64_t step = (int64_t)(sizeof buf / size);
    for (int64_t i = 0; i < t->count; i += step) {
        int64_t n = t->count - i < step ? t->count - i : step;
        lm_code rc = lm_st_read(s, t, (uint64_t)i * size, buf, (size_t)n * size, e);
        if (rc)
            return rc;
        lm_convert(t->dtype, buf, to, out + (size_t)i * out_size, n);
    }
    return LM_OK;
}
