/* SPDX-License-Identifier: Apache-2.0 */
/* protobuf.h -- protobuf's wire format, field by field, without a schema: for the few messages that
 * files of other tools contain.
 *
 * A message is fields one behind the other: a varint (number << 3 | wire type), then for type 0 a
 * varint, 1 eight bytes, 2 a length as a varint and that many bytes, 5 four bytes, little endian.
 * Groups (3 and 4) are refused.  Private to lib/text. */
#ifndef LM_TEXT_PROTOBUF_H
#define LM_TEXT_PROTOBUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

typedef enum {
    LM_PB_VARINT = 0,
    LM_PB_FIXED64 = 1,
    LM_PB_BYTES = 2,
    LM_PB_FIXED32 = 5,
} lm_pb_wire;

/* A walk over the fields of one message; everything is borrowed. */
typedef struct {
    const uint8_t *p, *end, *begin; /* begin: of the whole file, for offsets in messages */
    const char *where, *what;       /* the expected kind of file, for messages */
    lm_err *e;
} lm_pb;

typedef struct {
    uint32_t number;
    lm_pb_wire wire;
    uint64_t value;       /* the number; for BYTES their count */
    const uint8_t *bytes; /* BYTES only */
} lm_pb_field;

lm_pb lm_pb_begin(const char *data, size_t len, const char *where, const char *what, lm_err *e);
/* The next field; *more false at the end.  Fails: LM_EFORMAT with the place. */
lm_code lm_pb_next(lm_pb *r, lm_pb_field *f, bool *more);
/* A walk over the message in f.  Fails: LM_EFORMAT when f is a number. */
lm_code lm_pb_enter(const lm_pb *r, const lm_pb_field *f, lm_pb *inner);
/* LM_EFORMAT: "no WHAT: <why> at byte N". */
lm_code lm_pb_broken(const lm_pb *r, const char *why);

static inline bool lm_pb_is(const lm_pb_field *f, uint32_t number, lm_pb_wire wire)
{
    return f->number == number && f->wire == wire;
}

#endif
