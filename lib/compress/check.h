/* SPDX-License-Identifier: Apache-2.0 */
/* check.h -- checks an .lmz and reports every fault of a file or a stream. */
#ifndef LM_COMPRESS_CHECK_H
#define LM_COMPRESS_CHECK_H

#include "base/buf.h"
#include "format/lmz.h"

/* Strings are borrowed for the call. */
typedef struct {
    const char *where;         /* the .lmz */
    const char *file, *tensor; /* NULL: the .lmz itself; a header or a plain file */
    uint64_t chunk;            /* the first damaged one; UINT64_MAX: none */
    const char *what;
} lm_check_fault;
typedef void (*lm_check_fn)(void *ctx, const lm_check_fault *f);

/* Decode everything at `path` ("-": standard input, up to its first fault) and call `each` for
 * every fault; *faults counts them.  Damage is not a failure here.  Fails: LM_EIO; LM_EUSAGE when
 * the base of a delta cannot be found. */
lm_code lm_check(const char *path, const lm_bundle_opts *o, lm_check_fn each, void *ctx,
                 uint64_t *faults, lm_err *e);
/* The same as one line of JSON, appended to `out`. */
lm_code lm_check_json(const char *path, const lm_bundle_opts *o, lm_buf *out, uint64_t *faults,
                      lm_err *e);

#endif
