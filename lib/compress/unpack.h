/* SPDX-License-Identifier: Apache-2.0 */
/* unpack.h -- what an .lmz holds, back as files: all of it, single tensors, or what a damaged one
 * still gives.  Tensors that were coded with loss (coded.h) are expanded to their own dtype. */
#ifndef LM_COMPRESS_UNPACK_H
#define LM_COMPRESS_UNPACK_H

#include "base/par.h"
#include "base/progress.h"
#include "format/lmz.h"

/* All borrowed.  Zero-initialise. */
typedef struct {
    const char *base; /* of a delta; NULL: where the .lmz says */
    bool force;
    lm_par *par;
    lm_sink *sink;
    const char *tmpdir;
} lm_unpack_opts;

typedef struct {
    uint64_t files, bytes; /* written */
    uint64_t expanded;     /* tensors that were expanded */
    bool lone;             /* one .safetensors, written as such */
} lm_unpack_report;

/* Take the .lmz at `from` ("-": standard input) apart into `to`, as lm_bundle_create understands it;
 * one that holds a single .safetensors gives just this file when `to` is "-" or ends in
 * ".safetensors".  Every checksum is compared on the way.
 * Fails: LM_EUSAGE if `from` is no .lmz or its base is not to be had; LM_EFORMAT naming what is
 * damaged; nothing is left at `to` then. */
lm_code lm_unpack(const char *from, const char *to, const lm_unpack_opts *o, lm_unpack_report *r,
                  lm_err *e);

/* Hold what lm_unpack has written to the file, folder or archive `to` against the .lmz again, byte for
 * byte.  Fails: LM_EFORMAT naming the first file that differs. */
lm_code lm_unpack_compare(const char *from, const char *to, const lm_unpack_opts *o, lm_err *e);

/* Does the .lmz at `path` hold one .safetensors and nothing else? */
lm_code lm_unpack_is_lone(const char *path, bool *lone, lm_err *e);

/* Tensors by name, in this order, to the .safetensors file `to` ("-": standard output).  Fails:
 * LM_EUSAGE naming a tensor that is not there. */
lm_code lm_unpack_tensors(const char *from, const char *to, const char *const *names, int n,
                          const lm_unpack_opts *o, lm_unpack_report *r, lm_err *e);

/* What could not be saved.  Strings are borrowed for the call. */
typedef void (*lm_unpack_lost_fn)(void *ctx, const char *file, const char *tensor, uint64_t chunk,
                                  const char *what);
/* As lm_unpack from a damaged file: whole files and, of a .safetensors with a whole header, the
 * tensors that are intact; `lost` (may be NULL) is told of each that is not.  *n_lost counts them.
 * Fails: LM_EFORMAT when nothing is left; LM_EUSAGE for "-". */
lm_code lm_unpack_salvage(const char *from, const char *to, const lm_unpack_opts *o,
                          lm_unpack_lost_fn lost, void *ctx, uint64_t *n_lost, lm_unpack_report *r,
                          lm_err *e);
/* One JSON object and a newline: input, output, files, bytes, lost. */
lm_code lm_unpack_report_json(const lm_unpack_report *r, const char *input, const char *output,
                              uint64_t lost, lm_buf *out, lm_err *e);

#endif
