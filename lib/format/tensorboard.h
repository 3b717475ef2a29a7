/* SPDX-License-Identifier: Apache-2.0 */
/* tensorboard.h -- scalar curves in the event files that TensorBoard reads.
 *
 * A record (TFRecord): u64 length, u32 masked CRC-32C of those 8 bytes, the payload, u32 masked
 * CRC-32C of the payload; all little-endian; mask(c) = ((c >> 15) | (c << 17)) + 0xa282ead8. The
 * payload is a protobuf Event: 1 wall_time double, 2 step int64, 3 file_version string (first
 * record, "brain.Event:2"), 5 summary { 1 value { 1 tag string, 2 simple_value float } ... }. */
#ifndef LM_FORMAT_TENSORBOARD_H
#define LM_FORMAT_TENSORBOARD_H

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

typedef struct {
    const char *tag;
    double value; /* stored as float */
} lm_tb_scalar;

typedef struct lm_tb lm_tb;
/* Append to (or begin) `path`, usually events.out.tfevents.NAME.  An event file is a log: it grows
 * in place and each lm_tb_add is one write.  A record that a kill left incomplete is removed here.
 * wall_time: seconds since 1970, given by the caller.  Fails: LM_EIO, LM_EFORMAT for another
 * file. */
lm_code lm_tb_open(const char *path, double wall_time, lm_tb **out, lm_err *e);
lm_code lm_tb_add(lm_tb *t, int64_t step, double wall_time, const lm_tb_scalar *values, size_t n,
                  lm_err *e);
lm_code lm_tb_close(lm_tb *t, lm_err *e); /* fsync and close; frees t */

/* CRC-32C (Castagnoli, RFC 3720 appendix B.4) of data, continuing from `crc` (0 at the start). */
uint32_t lm_crc32c(uint32_t crc, const void *data, size_t len);

#endif
