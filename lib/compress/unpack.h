/* SPDX-License-Identifier: Apache-2.0 */
/* unpack.h -- restores the files of an .lmz: all of them, single tensors, or the intact parts of a
 * damaged one.  Tensors that were coded with loss (coded.h) are expanded to their own dtype. */
#ifndef LM_COMPRESS_UNPACK_H
#define LM_COMPRESS_UNPACK_H

#include "base/par.h"
#include "base/progress.h"
#include "format/lmz.h"

/* All borrowed.  Zero-initialise. */
typedef struct {
    const char *base; /* base of a delta; NULL: at the path that the .lmz stores */
    bool force;
    lm_par *par;
    lm_sink *sink;
    const char *tmpdir;
} lm_unpack_opts;

typedef struct {
    uint64_t files, bytes; /* written */
    uint64_t expanded;     /* tensors that were expanded */
    bool lone;             /* the output is one .safetensors file */
} lm_unpack_report;

/* Write the files of the .lmz at `from` ("-": standard input) to `to`, a destination as for
 * lm_bundle_create; if it holds a single .safetensors and `to` is "-" or ends in ".safetensors",
 * just this file is written.  Every checksum is compared.  Fails: LM_EUSAGE if `from` is not an
 * .lmz or its base cannot be found; LM_EFORMAT naming the damaged part.  After a failure nothing is
 * left at `to`. */
lm_code lm_unpack(const char *from, const char *to, const lm_unpack_opts *o, lm_unpack_report *r,
                  lm_err *e);

/* Compare the file, folder or archive `to` that lm_unpack wrote with the .lmz, byte for byte.
 * Fails: LM_EFORMAT naming the first file that differs. */
lm_code lm_unpack_compare(const char *from, const char *to, const lm_unpack_opts *o, lm_err *e);

/* Write tensors by name, in this order, to the .safetensors file `to` ("-": standard output).
 * Fails: LM_EUSAGE naming a missing tensor. */
lm_code lm_unpack_tensors(const char *from, const char *to, const char *const *names, int n,
                          const lm_unpack_opts *o, lm_unpack_report *r, lm_err *e);

/* A part that could not be restored.  Strings are borrowed for the call. */
typedef void (*lm_unpack_lost_fn)(void *ctx, const char *file, const char *tensor, uint64_t chunk,
                                  const char *what);
/* As lm_unpack for a damaged file: writes intact files and, for a .safetensors with an intact
 * header, its intact tensors; `lost` (may be NULL) is called for each part that is not restored.
 * *n_lost counts them.  Fails: LM_EFORMAT when nothing is intact; LM_EUSAGE for "-". */
lm_code lm_unpack_salvage(const char *from, const char *to, const lm_unpack_opts *o,
                          lm_unpack_lost_fn lost, void *ctx, uint64_t *n_lost, lm_unpack_report *r,
                          lm_err *e);
/* One JSON object and a newline: input, output, files, bytes, lost. */
lm_code lm_unpack_report_json(const lm_unpack_report *r, const char *input, const char *output,
                              uint64_t lost, lm_buf *out, lm_err *e);

#endif
