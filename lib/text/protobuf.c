/* SPDX-License-Identifier: Apache-2.0 */
/* protobuf.c -- see protobuf.h. */
#include "text/protobuf.h"

lm_pb lm_pb_begin(const char *data, size_t len, const char *where, const char *what, lm_err *e)
{
    const uint8_t *p = (const uint8_t *)data;
    return (lm_pb){ p, p + len, p, where, what, e };
}

lm_code lm_pb_broken(const lm_pb *r, const char *why)
{
    return lm_fail(r->e, LM_EFORMAT, r->where, "fetch the file again", "no %s: %s at byte %zu",
                   r->what, why, (size_t)(r->p - r->begin));
}

static lm_code read_varint(lm_pb *r, uint64_t *out)
{
    *out = 0;
    for (int shift = 0; shift < 64; shift += 7) {
        if (r->p == r->end)
            return lm_pb_broken(r, "a number is truncated");
        uint8_t b = *r->p++;
        *out |= (uint64_t)(b & 0x7F) << shift;
        if (!(b & 0x80))
            return LM_OK;
    }
    return lm_pb_broken(r, "a number of more than 64 bits");
}

lm_code lm_pb_next(lm_pb *r, lm_pb_field *f, bool *more)
{
    uint64_t tag;
    size_t n;

    *more = r->p < r->end;
    if (!*more)
        return LM_OK;
    lm_code rc = read_varint(r, &tag);
    if (rc)
        return rc;
    if (!(tag >> 3) || tag >> 3 > 0x1FFFFFFF)
        return lm_pb_broken(r, "a field without a number");
    *f = (lm_pb_field){ .number = (uint32_t)(tag >> 3), .wire = (lm_pb_wire)(tag & 7) };
    switch (f->wire) {
    case LM_PB_VARINT:
        return read_varint(r, &f->value);
    case LM_PB_BYTES:
        rc = read_varint(r, &f->value);
        if (!rc && f->value > (uint64_t)(r->end - r->p))
            rc = lm_pb_broken(r, "a field is longer than the rest of the file");
        f->bytes = r->p;
        if (!rc)
            r->p += f->value;
        return rc;
    case LM_PB_FIXED32:
    case LM_PB_FIXED64:
        n = f->wire == LM_PB_FIXED32 ? 4 : 8;
        if ((size_t)(r->end - r->p) < n)
            return lm_pb_broken(r, "a number is truncated");
        for (size_t i = 0; i < n; i++)
            f->value |= (uint64_t)r->p[i] << (8 * i);
        r->p += n;
        return LM_OK;
    default:
        return lm_pb_broken(r, "a field of unknown type");
    }
}

lm_code lm_pb_enter(const lm_pb *r, const lm_pb_field *f, lm_pb *inner)
{
    if (f->wire != LM_PB_BYTES)
        return lm_pb_broken(r, "a number in place of a message");
    *inner = *r;
    inner->p = f->bytes;
    inner->end = f->bytes + f->value;
    return LM_OK;
}
