/* SPDX-License-Identifier: Apache-2.0 */
/* safetensors_stream.c -- reads a safetensors file that can only be read forward. */
#include <inttypes.h>
#include <string.h>

#include "base/text.h"
#include "format/safetensors_table.h"

struct lm_st_stream {
    lm_read_fn read;
    void *ctx;
    char *where;
    lm_st_table table;
    uint64_t data_at;
    size_t next;   /* tensor that lm_st_stream_next will give */
    uint64_t left; /* bytes of the current tensor not yet read */
};

/* Exactly `bytes` bytes; `what` names them in the message about an early end. */
static lm_code read_full(lm_st_stream *s, void *dst, size_t bytes, const char *what, lm_err *e)
{
    uint8_t *to = dst;

    while (bytes) {
        size_t got = 0;
        char show[LM_ST_SHOWN];
        lm_code rc = s->read(s->ctx, to, bytes, &got, e);
        if (rc)
            return rc;
        if (!got)
            return lm_fail(e, LM_EFORMAT, s->where, "it is truncated: fetch or write it again",
                           "it ends %zu byte%s before the end of %s", bytes, lm_plural(bytes),
                           lm_st_show(what, show));
        to += got;
        bytes -= got;
    }
    return LM_OK;
}

/* The header is read in growing steps, so that a false length allocates no memory. */
static lm_code read_header(lm_st_stream *s, lm_buf *text, lm_err *e)
{
    uint8_t field[8];
    uint64_t header;
    lm_code rc = read_full(s, field, 8, "the length of its header", e);

    if (!rc)
        rc = lm_st_header_length(field, s->where, &header, e);
    while (!rc && text->len < header) {
        size_t step = header - text->len < (1u << 20) ? (size_t)(header - text->len) : 1u << 20;
        if ((rc = lm_buf_room(text, step, e)) ||
            (rc = read_full(s, text->data + text->len, step, "its header", e)))
            break;
        text->len += step;
    }
    return rc;
}

lm_code lm_st_stream_open(lm_read_fn read, void *ctx, const char *where, lm_st_stream **out,
                          lm_err *e)
{
    lm_st_stream *s = NULL;
    lm_buf text = { 0 };
    lm_code rc = lm_alloc_n(&s, 1, sizeof *s, "safetensors stream", e);

    *out = NULL;
    if (rc)
        return rc;
    s->read = read;
    s->ctx = ctx;
    rc = lm_strdup(&s->where, where, e);
    if (!rc)
        rc = read_header(s, &text, e);
    if (!rc)
        rc = lm_st_table_parse(&s->table, text.data, text.len, UINT64_MAX, s->where, e);
    s->data_at = 8 + (uint64_t)text.len;
    if (!rc && s->table.data_bytes > UINT64_MAX - s->data_at)
        rc = lm_fail(e, LM_EFORMAT, s->where, NULL, "its tensors have more than 2^64 bytes");
    lm_buf_fini(&text);
    if (rc) {
        lm_st_stream_close(s);
        return rc;
    }
    *out = s;
    return LM_OK;
}

void lm_st_stream_close(lm_st_stream *s)
{
    if (!s)
        return;
    lm_st_table_fini(&s->table);
    lm_free(s->where);
    lm_free(s);
}

size_t lm_st_stream_count(const lm_st_stream *s)
{
    return s->table.n;
}

const lm_st_tensor *lm_st_stream_at(const lm_st_stream *s, size_t i)
{
    return &s->table.tensor[i];
}

const lm_st_tensor *lm_st_stream_find(const lm_st_stream *s, const char *name)
{
    return lm_st_table_find(&s->table, name);
}

uint64_t lm_st_stream_data_at(const lm_st_stream *s)
{
    return s->data_at;
}

uint64_t lm_st_stream_bytes(const lm_st_stream *s)
{
    return s->data_at + s->table.data_bytes;
}

const char *lm_st_stream_meta(const lm_st_stream *s, const char *key)
{
    return lm_st_table_meta(&s->table, key);
}

bool lm_st_stream_meta_at(const lm_st_stream *s, size_t i, const char **key, const char **value)
{
    return lm_st_table_meta_at(&s->table, i, key, value);
}

lm_code lm_st_stream_read(lm_st_stream *s, void *dst, size_t bytes, lm_err *e)
{
    char show[LM_ST_SHOWN];

    if (bytes > s->left)
        return lm_fail(e, LM_EUSAGE, s->where, NULL,
                       "%zu byte%s requested from tensor '%s', which has %" PRIu64 " left", bytes,
                       lm_plural(bytes),
                       s->next ? lm_st_show(s->table.tensor[s->next - 1].name, show) : "", s->left);
    lm_code rc = read_full(s, dst, bytes, s->next ? s->table.tensor[s->next - 1].name : "", e);
    if (!rc)
        s->left -= bytes;
    return rc;
}

lm_code lm_st_stream_next(lm_st_stream *s, const lm_st_tensor **t, lm_err *e)
{
    uint8_t buf[16384];
    lm_code rc = LM_OK;

    *t = NULL;
    while (s->left && !rc)
        rc = lm_st_stream_read(s, buf, s->left < sizeof buf ? (size_t)s->left : sizeof buf, e);
    if (rc)
        return rc;
    if (s->next < s->table.n) {
        *t = &s->table.tensor[s->next++];
        s->left = (*t)->bytes;
        return LM_OK;
    }
    size_t got = 0;
    rc = s->read(s->ctx, buf, 1, &got, e);
    if (!rc && got)
        return lm_fail(e, LM_EFORMAT, s->where, NULL, "bytes follow the last tensor");
    return rc;
}
