/* SPDX-License-Identifier: Apache-2.0 */
/* unpack_impl.h -- shared by unpack.c and salvage.c: the destination, and writing one file to it,
 * expanded if it is coded.  Private to lib/compress. */
#ifndef LM_COMPRESS_UNPACK_IMPL_H
#define LM_COMPRESS_UNPACK_IMPL_H

#include "base/file.h"
#include "compress/unpack.h"

typedef struct {
    const lm_unpack_opts *o;
    lm_unpack_report *r;
    lm_bundle_out *out; /* NULL: `lone` */
    lm_out *lone;
    void *copy; /* LM_UNPACK_COPY bytes */
    uint64_t total;
    /* The files of `like`, or of `like_lmz`, and those of a checkpoint may be replaced in a folder.
     * Both NULL: those of a checkpoint only. */
    const lm_bundle *like;
    const struct lm_lmz *like_lmz;
} lm_unpack_to;

#define LM_UNPACK_COPY (16 << 20)

/* Open `to`; lone: as one .safetensors file. */
lm_code lm_unpack_to_open(lm_unpack_to *t, const char *to, bool lone, lm_err *e);
/* Write the file `name` of `bytes` bytes, which `read` delivers. */
lm_code lm_unpack_file(lm_unpack_to *t, const char *name, uint64_t bytes, lm_read_fn read,
                       void *ctx, lm_err *e);
/* Publish if `rc` is LM_OK and the program is not stopping, otherwise remove. */
lm_code lm_unpack_to_close(lm_unpack_to *t, lm_code rc, lm_err *e);
bool lm_unpack_is_st(const char *name);

#endif
