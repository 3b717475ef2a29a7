/* SPDX-License-Identifier: Apache-2.0 */
/* lmz_layout.c -- headers and records of an .lmz to bytes and back. */
#include "format/lmz_layout.h"

#include <string.h>

#include "base/hash.h"

enum { MARK0 = 0xf5, FILE_FIELDS = 16, PART_FIELDS = 40, CHUNK_FIELDS = 44, END_FIELDS = 32 };

uint64_t lmz_take(lmz_cursor *c, int bytes)
{
    const uint8_t *p = lmz_take_bytes(c, (size_t)bytes);
    return p ? lmz_fetch(p, bytes) : 0;
}

const uint8_t *lmz_take_bytes(lmz_cursor *c, size_t n)
{
    const uint8_t *p = c->p;

    if (c->bad || n > c->left) {
        c->bad = true;
        return NULL;
    }
    c->p += n;
    c->left -= n;
    return p;
}

lmz_str lmz_take_str(lmz_cursor *c, size_t n)
{
    lmz_str s = { (const char *)lmz_take_bytes(c, n), n };

    if (!s.p || memchr(s.p, 0, n)) { /* would end the string in C */
        c->bad = true;
        s = (lmz_str){ "", 0 };
    }
    return s;
}

lm_code lmz_add(lm_buf *out, uint64_t v, int bytes, lm_err *e)
{
    uint8_t field[8];

    lmz_store(field, v, bytes);
    return lm_buf_add(out, field, (size_t)bytes, e);
}

/* ---- The header ---- */

lm_code lmz_put_header(lm_buf *out, const lmz_header *h, lm_err *e)
{
    size_t n = h->base_name.n;
    lm_code rc = lm_buf_room(out, LMZ_HEADER + n, e);

    if (rc)
        return rc;
    uint8_t *p = (uint8_t *)out->data + out->len;
    memset(p, 0, LMZ_HEADER + n);
    memcpy(p, LM_LMZ_MAGIC, LM_LMZ_MAGIC_BYTES);
    lmz_store(p + 8, (uint64_t)(h->version ? h->version : LMZ_VERSION), 2);
    p[10] = h->delta;
    p[11] = (uint8_t)h->chain;
    lmz_store(p + 12, LM_LMZ_CHUNK, 4);
    memcpy(p + 16, h->base_digest, 16);
    lmz_store(p + 32, n, 4);
    if (n)
        memcpy(p + 40, h->base_name.p, n);
    lmz_store(p + 40 + n, lm_hash64(p, 40 + n, 0), 8);
    out->len += LMZ_HEADER + n;
    return LM_OK;
}

int lmz_header_version(const uint8_t *p)
{
    return memcmp(p, LM_LMZ_MAGIC, LM_LMZ_MAGIC_BYTES) ? 0 : (int)lmz_fetch(p + 8, 2);
}

size_t lmz_header_size(const uint8_t *p)
{
    uint64_t n = lmz_fetch(p + 32, 4);
    int version = lmz_header_version(p);
    return version >= 1 && version <= LMZ_VERSION && n <= LMZ_BASE_NAME ? LMZ_HEADER + (size_t)n
                                                                        : 0;
}

bool lmz_get_header(const uint8_t *p, size_t n, lmz_header *h)
{
    if (n < LMZ_HEADER || lmz_header_size(p) != n || lmz_fetch(p + 12, 4) != LM_LMZ_CHUNK ||
        lmz_fetch(p + 36, 4) || lmz_fetch(p + n - 8, 8) != lm_hash64(p, n - 8, 0))
        return false;
    *h = (lmz_header){ .version = lmz_header_version(p),
                       .delta = p[10],
                       .chain = p[11],
                       .base_name = { (const char *)p + 40, n - 48 } };
    memcpy(h->base_digest, p + 16, 16);
    if (p[10] > 1 || h->delta != (h->chain > 0) || h->chain > LM_LMZ_MAX_CHAIN ||
        h->delta != (n > LMZ_HEADER) || memchr(h->base_name.p, 0, h->base_name.n))
        return false;
    return true;
}

/* ---- Records ---- */

/* Append room for a record with n bytes of fields; *fields: their address. */
static lm_code begin(lm_buf *out, char type, size_t n, uint8_t **fields, lm_err *e)
{
    lm_code rc = lm_buf_room(out, LMZ_AROUND + n, e);

    if (rc)
        return rc;
    uint8_t *p = (uint8_t *)out->data + out->len;
    memset(p, 0, LMZ_AROUND + n);
    memcpy(p, (uint8_t[]){ MARK0, 'L', 'Z', (uint8_t)type }, 4);
    lmz_store(p + 4, n, 4);
    *fields = p + LMZ_HEAD;
    return LM_OK;
}

static lm_code end(lm_buf *out, size_t n)
{
    uint8_t *p = (uint8_t *)out->data + out->len;

    lmz_store(p + LMZ_HEAD + n, lm_hash64(p, LMZ_HEAD + n, 0), 8);
    out->len += LMZ_AROUND + n;
    return LM_OK;
}

static uint8_t *put_str(uint8_t *p, lmz_str s)
{
    if (s.n)
        memcpy(p, s.p, s.n);
    return p + s.n;
}

size_t lmz_file_size(size_t name)
{
    return LMZ_AROUND + FILE_FIELDS + name;
}

size_t lmz_part_size(const lmz_part_rec *r)
{
    return LMZ_AROUND + PART_FIELDS + r->dtype.n + r->name.n + r->base_file.n;
}

size_t lmz_end_size(size_t name)
{
    return LMZ_AROUND + END_FIELDS + name;
}

lm_code lmz_put_file(lm_buf *out, const lmz_file_rec *r, lm_err *e)
{
    size_t n = FILE_FIELDS + r->name.n;
    uint8_t *f;
    lm_code rc = begin(out, 'F', n, &f, e);

    if (rc)
        return rc;
    lmz_store(f, r->file, 4);
    f[4] = (uint8_t)r->type;
    lmz_store(f + 8, r->bytes, 8);
    put_str(f + 16, r->name);
    return end(out, n);
}

lm_code lmz_put_part(lm_buf *out, const lmz_part_rec *r, lm_err *e)
{
    size_t n = lmz_part_size(r) - LMZ_AROUND;
    uint8_t *f;
    lm_code rc = begin(out, 'P', n, &f, e);

    if (rc)
        return rc;
    lmz_store(f, r->file, 4);
    lmz_store(f + 4, r->part, 4);
    f[8] = (uint8_t)r->kind;
    f[9] = (uint8_t)r->flags;
    f[10] = (uint8_t)r->dtype.n;
    lmz_store(f + 12, r->name.n, 2);
    lmz_store(f + 14, r->base_file.n, 2);
    lmz_store(f + 16, r->offset, 8);
    lmz_store(f + 24, r->raw, 8);
    lmz_store(f + 32, r->base_from, 8);
    put_str(put_str(put_str(f + PART_FIELDS, r->dtype), r->name), r->base_file);
    return end(out, n);
}

lm_code lmz_put_end(lm_buf *out, const lmz_end_rec *r, lm_err *e)
{
    size_t n = END_FIELDS + r->name.n;
    uint8_t *f;
    lm_code rc = begin(out, 'E', n, &f, e);

    if (rc)
        return rc;
    lmz_store(f, r->file, 4);
    lmz_store(f + 8, r->bytes, 8);
    memcpy(f + 16, r->digest, 16);
    put_str(f + END_FIELDS, r->name);
    return end(out, n);
}

lm_code lmz_put_index(lm_buf *out, const lmz_index_rec *r, lm_err *e)
{
    uint8_t *f;
    lm_code rc = begin(out, 'I', 24, &f, e);

    if (rc)
        return rc;
    lmz_store(f, r->raw, 8);
    lmz_store(f + 8, r->coded, 8);
    lmz_store(f + 16, r->coded_check, 8);
    return end(out, 24);
}

lm_code lmz_put_footer(lm_buf *out, const lmz_footer *r, lm_err *e)
{
    uint8_t *f;
    lm_code rc = begin(out, 'Z', LMZ_FOOTER - LMZ_AROUND, &f, e);

    if (rc)
        return rc;
    lmz_store(f, r->index_at, 8);
    lmz_store(f + 8, r->index_bytes, 8);
    lmz_store(f + 16, r->raw, 8);
    lmz_store(f + 24, r->bytes, 8);
    lmz_store(f + 32, r->files, 4);
    memcpy(f + 40, r->content, 16);
    memcpy(f + 56, r->records, 16);
    return end(out, LMZ_FOOTER - LMZ_AROUND);
}

void lmz_put_chunk(uint8_t out[LMZ_CHUNK_RECORD], const lmz_chunk_rec *r)
{
    uint8_t *f = out + LMZ_HEAD;

    memset(out, 0, LMZ_CHUNK_RECORD);
    memcpy(out, (uint8_t[]){ MARK0, 'L', 'Z', 'C' }, 4);
    lmz_store(out + 4, CHUNK_FIELDS, 4);
    lmz_store(f, r->file, 4);
    lmz_store(f + 4, r->part, 4);
    lmz_store(f + 8, r->offset, 8);
    lmz_store(f + 16, r->raw, 4);
    lmz_store(f + 20, r->coded, 4);
    f[24] = (uint8_t)r->kind;
    f[25] = (uint8_t)r->flags;
    lmz_store(f + 28, r->raw_check, 8);
    lmz_store(f + 36, r->coded_check, 8);
    lmz_store(f + CHUNK_FIELDS, lm_hash64(out, LMZ_HEAD + CHUNK_FIELDS, 0), 8);
}

char lmz_record_type(const uint8_t *p)
{
    return (char)p[3];
}

size_t lmz_record_size(const uint8_t *p)
{
    uint64_t n = lmz_fetch(p + 4, 4);
    bool fits = false;

    if (p[0] != MARK0 || p[1] != 'L' || p[2] != 'Z')
        return 0;
    switch (p[3]) {
    case 'F':
        fits = n >= FILE_FIELDS && n <= FILE_FIELDS + 255;
        break;
    case 'P':
        fits = n >= PART_FIELDS && n <= LMZ_FIELDS;
        break;
    case 'C':
        fits = n == CHUNK_FIELDS;
        break;
    case 'E':
        fits = n >= END_FIELDS && n <= END_FIELDS + 255;
        break;
    case 'I':
        fits = n == LMZ_INDEX_RECORD - LMZ_AROUND;
        break;
    case 'Z':
        fits = n == LMZ_FOOTER - LMZ_AROUND;
    }
    return fits ? LMZ_AROUND + (size_t)n : 0;
}

static uint64_t check_field(const uint8_t *p, size_t n)
{
    return lmz_fetch(p + n - 8, 8);
}

bool lmz_record_ok(const uint8_t *p, size_t n)
{
    return n >= LMZ_AROUND && lmz_record_size(p) == n &&
           check_field(p, n) == lm_hash64(p, n - 8, 0);
}

static bool open_record(const uint8_t *p, size_t n, char type, lmz_cursor *c)
{
    if (n < LMZ_AROUND || lmz_record_type(p) != type || !lmz_record_ok(p, n))
        return false;
    *c = (lmz_cursor){ p + LMZ_HEAD, n - LMZ_AROUND, false };
    return true;
}

bool lmz_get_file(const uint8_t *p, size_t n, lmz_file_rec *r)
{
    lmz_cursor c;

    if (!open_record(p, n, 'F', &c))
        return false;
    r->file = (uint32_t)lmz_take(&c, 4);
    uint64_t type = lmz_take(&c, 4);
    r->type = (lmz_file_type)type;
    r->bytes = lmz_take(&c, 8);
    r->name = lmz_take_str(&c, c.left);
    return !c.bad && type <= LMZ_FILE_SAFETENSORS && r->bytes <= INT64_MAX;
}

bool lmz_get_part(const uint8_t *p, size_t n, lmz_part_rec *r)
{
    lmz_cursor c;

    if (!open_record(p, n, 'P', &c))
        return false;
    r->file = (uint32_t)lmz_take(&c, 4);
    r->part = (uint32_t)lmz_take(&c, 4);
    r->kind = (lm_lmz_kind)lmz_take(&c, 1);
    r->flags = (unsigned)lmz_take(&c, 1);
    r->dtype.n = lmz_take(&c, 1);
    bool zero = !lmz_take(&c, 1);
    r->name.n = lmz_take(&c, 2);
    r->base_file.n = lmz_take(&c, 2);
    r->offset = lmz_take(&c, 8);
    r->raw = lmz_take(&c, 8);
    r->base_from = lmz_take(&c, 8);
    r->dtype = lmz_take_str(&c, r->dtype.n);
    r->name = lmz_take_str(&c, r->name.n);
    r->base_file = lmz_take_str(&c, r->base_file.n);
    return !c.bad && !c.left && zero;
}

bool lmz_get_chunk(const uint8_t *p, size_t n, lmz_chunk_rec *r)
{
    lmz_cursor c;

    if (!open_record(p, n, 'C', &c))
        return false;
    r->file = (uint32_t)lmz_take(&c, 4);
    r->part = (uint32_t)lmz_take(&c, 4);
    r->offset = lmz_take(&c, 8);
    r->raw = (uint32_t)lmz_take(&c, 4);
    r->coded = (uint32_t)lmz_take(&c, 4);
    r->kind = (lm_lmz_kind)lmz_take(&c, 1);
    r->flags = (unsigned)lmz_take(&c, 1);
    bool zero = !lmz_take(&c, 2);
    r->raw_check = lmz_take(&c, 8);
    r->coded_check = lmz_take(&c, 8);
    return !c.bad && zero && r->kind < LM_LMZ_KINDS && r->raw && r->raw <= LM_LMZ_CHUNK &&
           r->raw % lm_lmz_kind_size(r->kind) == 0 && r->coded <= lm_lmz_chunk_bound(r->raw) &&
           r->flags <= (LMZ_PART_NAMED | LMZ_PART_DELTA);
}

bool lmz_get_end(const uint8_t *p, size_t n, lmz_end_rec *r)
{
    lmz_cursor c;

    if (!open_record(p, n, 'E', &c))
        return false;
    r->file = (uint32_t)lmz_take(&c, 4);
    bool zero = !lmz_take(&c, 4);
    r->bytes = lmz_take(&c, 8);
    const uint8_t *digest = lmz_take_bytes(&c, 16);
    r->name = lmz_take_str(&c, c.left);
    if (c.bad || !zero || r->bytes > INT64_MAX)
        return false;
    memcpy(r->digest, digest, 16);
    return true;
}

bool lmz_get_index(const uint8_t *p, size_t n, lmz_index_rec *r)
{
    lmz_cursor c;

    if (!open_record(p, n, 'I', &c))
        return false;
    r->raw = lmz_take(&c, 8);
    r->coded = lmz_take(&c, 8);
    r->coded_check = lmz_take(&c, 8);
    return !c.bad;
}

bool lmz_get_footer(const uint8_t *p, size_t n, lmz_footer *r)
{
    lmz_cursor c;

    if (!open_record(p, n, 'Z', &c))
        return false;
    r->index_at = lmz_take(&c, 8);
    r->index_bytes = lmz_take(&c, 8);
    r->raw = lmz_take(&c, 8);
    r->bytes = lmz_take(&c, 8);
    r->files = (uint32_t)lmz_take(&c, 4);
    bool zero = !lmz_take(&c, 4);
    memcpy(r->content, lmz_take_bytes(&c, 16), 16);
    memcpy(r->records, lmz_take_bytes(&c, 16), 16);
    return zero;
}
