/* SPDX-License-Identifier: Apache-2.0 */
/* safetensors_writer.h -- a file being written: shared by safetensors_write.c, which writes from front to back, and
 * safetensors_shared.c, where ranks write parts.  Private to lib/format. */
#ifndef LM_FORMAT_SAFETENSORS_WRITER_H
#define LM_FORMAT_SAFETENSORS_WRITER_H

#include "base/file.h"
#include "format/safetensors.h"

struct lm_st_writer {
    const lm_st_plan *plan;
    lm_out *out; /* NULL: a stream, or shared */
    lm_write_fn write;
    void *ctx;
    char *where;
    lm_st_share *share; /* NULL: it is the only writer */
    int fd;             /* of a shared file */
    uint64_t data_at;   /* bytes of the file before the data */
    uint64_t from,
        to; /* the bytes of the data that lm_st_write writes: all, or the part of this rank */
    uint64_t wrote; /* bytes of the data */
    uint64_t done;  /* bytes of data gone by so far */
    size_t cur;     /* first tensor whose end lies beyond `done` */
    uint64_t at;    /* byte of the file at which the buffer begins */
    size_t fill;
    uint8_t buf[131072]; /* small chunks gather here */
};

/* Bytes for byte `at` of the file on, through the buffer; only a shared file has gaps.  And what is in the buffer. */
lm_code lm_st_write_at(lm_st_writer *w, uint64_t at, const void *data, size_t bytes, lm_err *e);
lm_code lm_st_flush(lm_st_writer *w, lm_err *e);
/* Go on by so many bytes of the data, and skip all complete tensors; empty ones need no bytes. */
void lm_st_advance(lm_st_writer *w, uint64_t bytes);
/* The end of a rank's part: close the file. */
lm_code lm_st_leave(lm_st_writer *w, lm_err *e);

#endif
