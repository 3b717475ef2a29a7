/* SPDX-License-Identifier: Apache-2.0 */
/* unpack_impl.h -- what unpack.c and salvage.c share: a place to write to, and one file written to
 * it, expanded if need be.  Private to lib/compress. */
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
    const lm_bundle
        *like; /* its files, and those of a checkpoint, may be replaced in a folder; or */
    const struct lm_lmz *like_lmz; /* of this; NULL: a checkpoint's */
} lm_unpack_to;

#define LM_UNPACK_COPY (16 << 20)

/* Open `to`; lone: one .safetensors file, as it is. */
lm_code lm_unpack_to_open(lm_unpack_to *t, const char *to, bool lone, lm_err *e);
/* The file `name` of `bytes` bytes, which `read` gives. */
lm_code lm_unpack_file(lm_unpack_to *t, const char *name, uint64_t bytes, lm_read_fn read,
                       void *ctx, lm_err *e);
/* Publish if `rc` is fine and nothing was stopped, else remove. */
lm_code lm_unpack_to_close(lm_unpack_to *t, lm_code rc, lm_err *e);
bool lm_unpack_is_st(const char *name);

#endif
