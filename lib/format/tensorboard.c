/* SPDX-License-Identifier: Apache-2.0 */
/* tensorboard.c -- Event records by hand: four protobuf fields do not need a library. */
#include "format/tensorboard.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/file.h"
#include "base/mem.h"

struct lm_tb {
    int fd;
    char *path;
    lm_buf event, record;
    bool regular; /* a file, not a pipe */
    int64_t size; /* of whole records */
};

uint32_t lm_crc32c(uint32_t crc, const void *data, size_t len)
{
    /* Nibble table of the reflected polynomial 0x82f63b78: records are small. */
    static const uint32_t table[16] = {
        0x00000000, 0x105ec76f, 0x20bd8ede, 0x30e349b1, 0x417b1dbc, 0x5125dad3,
        0x61c69362, 0x7198540d, 0x82f63b78, 0x92a8fc17, 0xa24bb5a6, 0xb21572c9,
        0xc38d26c4, 0xd3d3e1ab, 0xe330a81a, 0xf36e6f75,
    };
    const uint8_t *p = data;

    crc = ~crc;
    for (size_t i = 0; i < len; i++) {
        crc ^= p[i];
        crc = crc >> 4 ^ table[crc & 15];
        crc = crc >> 4 ^ table[crc & 15];
    }
    return ~crc;
}

static lm_code put_le(lm_buf *b, uint64_t v, int bytes, lm_err *e)
{
    uint8_t out[8];
    for (int i = 0; i < bytes; i++)
        out[i] = (uint8_t)(v >> 8 * i);
    return lm_buf_add(b, out, (size_t)bytes, e);
}

static size_t varint_size(uint64_t v)
{
    size_t n = 1;
    while (v >>= 7)
        n++;
    return n;
}

static lm_code put_varint(lm_buf *b, uint64_t v, lm_err *e)
{
    uint8_t out[10];
    size_t n = 0;

    for (; v > 127; v >>= 7)
        out[n++] = (uint8_t)(v & 127) | 128;
    out[n++] = (uint8_t)v;
    return lm_buf_add(b, out, n, e);
}

/* field << 3 | wire type: 0 varint, 1 eight bytes, 2 length and bytes, 5 four bytes. */
static lm_code put_tag(lm_buf *b, unsigned field, unsigned wire, lm_err *e)
{
    return put_varint(b, field << 3 | wire, e);
}

static lm_code put_time_step(lm_buf *b, double wall_time, int64_t step, lm_err *e)
{
    uint64_t bits;
    lm_code rc = put_tag(b, 1, 1, e);

    memcpy(&bits, &wall_time, 8);
    if (!rc)
        rc = put_le(b, bits, 8, e);
    if (!rc && step) {
        rc = put_tag(b, 2, 0, e);
        if (!rc)
            rc = put_varint(b, (uint64_t)step, e);
    }
    return rc;
}

static lm_code put_bytes(lm_buf *b, unsigned field, const char *s, size_t len, lm_err *e)
{
    lm_code rc = put_tag(b, field, 2, e);
    if (!rc)
        rc = put_varint(b, len, e);
    return rc ? rc : lm_buf_add(b, s, len, e);
}

static uint32_t mask(uint32_t crc)
{
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

/* Frame t->event and append it in one write. */
static lm_code put_record(lm_tb *t, lm_err *e)
{
    lm_buf *r = &t->record;
    lm_code rc;

    r->len = 0;
    rc = put_le(r, t->event.len, 8, e);
    if (!rc)
        rc = put_le(r, mask(lm_crc32c(0, r->data, 8)), 4, e);
    if (!rc)
        rc = lm_buf_add(r, t->event.data, t->event.len, e);
    if (!rc)
        rc = put_le(r, mask(lm_crc32c(0, t->event.data, t->event.len)), 4, e);
    if (!rc)
        rc = lm_write_all(t->fd, r->data, r->len, t->path, e);
    if (!rc)
        t->size += (int64_t)r->len;
    else if (t->regular && ftruncate(t->fd, (off_t)t->size)) /* try not to leave a partial record */
        return rc;
    return rc;
}

/* The end of the complete records in the file; a record truncated by a kill or a full disk is not
 * counted. */
static lm_code whole_end(lm_tb *t, int64_t size, int64_t *end, lm_err *e)
{
    uint8_t head[12];

    for (*end = 0; *end + 12 <= size;) {
        uint64_t len = 0;
        uint32_t crc = 0;
        if (pread(t->fd, head, 12, (off_t)*end) != 12)
            return lm_fail(e, LM_EIO, t->path, NULL, "cannot read");
        for (int i = 7; i >= 0; i--)
            len = len << 8 | head[i];
        for (int i = 11; i >= 8; i--)
            crc = crc << 8 | head[i];
        if (crc != mask(lm_crc32c(0, head, 8)))
            return lm_fail(e, LM_EFORMAT, t->path, "name a new file",
                           "it is not a TensorBoard event file, or is damaged at byte %lld",
                           (long long)*end);
        if (len > (uint64_t)(size - *end))
            break;
        if (*end + 16 + (int64_t)len > size)
            break;
        *end += 16 + (int64_t)len;
    }
    return LM_OK;
}

static lm_code begin_file(lm_tb *t, double wall_time, lm_err *e)
{
    static const char version[] = "brain.Event:2";
    struct stat st;
    lm_code rc;

    if (fstat(t->fd, &st))
        return lm_fail(e, LM_EIO, t->path, NULL, "cannot examine");
    t->regular = S_ISREG(st.st_mode);
    if (t->regular && (rc = whole_end(t, st.st_size, &t->size, e)))
        return rc;
    if (t->regular && t->size < st.st_size && ftruncate(t->fd, (off_t)t->size))
        return lm_fail(e, LM_EIO, t->path, NULL, "cannot remove a partial record");
    if (t->size)
        return LM_OK; /* a resumed run continues in its file */
    rc = put_time_step(&t->event, wall_time, 0, e);
    if (!rc)
        rc = put_bytes(&t->event, 3, version, sizeof version - 1, e);
    return rc ? rc : put_record(t, e);
}

lm_code lm_tb_open(const char *path, double wall_time, lm_tb **out, lm_err *e)
{
    lm_tb *t = NULL;
    lm_code rc = lm_alloc_n(&t, 1, sizeof *t, "TensorBoard writer", e);

    *out = NULL;
    if (rc)
        return rc;
    t->fd = -1;
    rc = lm_strdup(&t->path, path, e);
    if (!rc && (t->fd = open(path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666)) < 0)
        rc = lm_fail(e, LM_EIO, path, NULL, "cannot open for appending");
    if (!rc)
        rc = begin_file(t, wall_time, e);
    if (rc) {
        lm_err ignored = { 0 };
        (void)lm_tb_close(t, &ignored);
        return rc;
    }
    *out = t;
    return LM_OK;
}

static size_t value_size(const lm_tb_scalar *v)
{
    size_t len = strlen(v->tag);
    return 1 + varint_size(len) + len + 1 + 4;
}

lm_code lm_tb_add(lm_tb *t, int64_t step, double wall_time, const lm_tb_scalar *values, size_t n,
                  lm_err *e)
{
    lm_buf *b = &t->event;
    size_t summary = 0;
    lm_code rc;

    for (size_t i = 0; i < n; i++)
        summary += 1 + varint_size(value_size(&values[i])) + value_size(&values[i]);
    b->len = 0;
    rc = put_time_step(b, wall_time, step, e);
    if (!rc)
        rc = put_tag(b, 5, 2, e);
    if (!rc)
        rc = put_varint(b, summary, e);
    for (size_t i = 0; !rc && i < n; i++) {
        float f = (float)values[i].value;
        uint32_t bits;
        memcpy(&bits, &f, 4);
        if ((rc = put_tag(b, 1, 2, e)) || (rc = put_varint(b, value_size(&values[i]), e)) ||
            (rc = put_bytes(b, 1, values[i].tag, strlen(values[i].tag), e)) ||
            (rc = put_tag(b, 2, 5, e)) || (rc = put_le(b, bits, 4, e)))
            break;
    }
    return rc ? rc : put_record(t, e);
}

lm_code lm_tb_close(lm_tb *t, lm_err *e)
{
    lm_code rc = LM_OK;

    if (!t)
        return LM_OK;
    if (t->fd >= 0) {
        if (fsync(t->fd) && errno != EINVAL && errno != EROFS)
            rc = lm_fail(e, LM_EIO, t->path, NULL, "cannot sync");
        if (close(t->fd) && !rc)
            rc = lm_fail(e, LM_EIO, t->path, NULL, "cannot close");
    }
    lm_buf_fini(&t->event);
    lm_buf_fini(&t->record);
    lm_free(t->path);
    lm_free(t);
    return rc;
}
