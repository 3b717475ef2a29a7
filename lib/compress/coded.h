/* SPDX-License-Identifier: Apache-2.0 */
/* coded.h -- a safetensors file, as a stream, with some tensors converted to a number format, and
 * back.
 *
 * A tensor NAME becomes
 *   in plain elements (bf16)              NAME with that dtype
 *   in a format with scales (dynamic8)    NAME.scales and, right behind it, NAME.codes
 * Tensors that can be expanded again are described in __metadata__ under "lmutils.coded", a JSON object
 *   {"NAME": {"codec": "dynamic8", "dtype": "F32", "shape": [64, 64]}, ...}
 * Weights in plain elements are not described: the file is then an ordinary one of that dtype.
 * Planes of bits are U8; all are 1-D, except codes of one byte each, which have the shape of NAME.  The planes have the
 * reverse of their order in the format: codes last.  All other tensors, their order and the metadata are unchanged.
 *
 * Memory is bounded by the largest coded tensor and its planes. */
#ifndef LM_COMPRESS_CODED_H
#define LM_COMPRESS_CODED_H

#include "compress/lossy.h"
#include "format/provenance.h"
#include "format/safetensors.h"

#define LM_CODED_KEY "lmutils.coded"
#define LM_CODED_MIN_STATE \
    4096 /* states of fewer elements are not converted to 8 bits, as in 8-bit Adam */

/* The formats of lossy coding; all NULL: none. */
typedef struct {
    const lm_format *weights; /* model files */
    /* optimizer*.safetensors; always described, so that they are expanded to their own dtype */
    const lm_format *states;
} lm_coded_policy;

/* The format for tensor t of file `file`; NULL: unchanged.  Weights of one dimension (norms,
 * biases) and states of fewer than LM_CODED_MIN_STATE elements are not converted to formats of 8
 * bits or fewer; of states, weights (param, ema, z) and single numbers are never converted. */
const lm_format *lm_coded_choice(const lm_coded_policy *p, const char *file, const lm_st_tensor *t);
/* True if the tensors of this file belong to the optimiser. */
bool lm_coded_is_state(const char *file);

/* One tensor of the file being read. */
typedef struct {
    const char *name;        /* of the decoded tensor */
    const char *dtype;       /* of the decoded tensor: "F32" */
    int64_t count;           /* its elements */
    const lm_format *format; /* NULL: copied */
    uint64_t coded;          /* bytes of all planes, or of the copy */
    lm_lossy_error err;      /* set by lm_coded_run when reducing */
} lm_coded_item;

typedef struct lm_coded lm_coded;
/* Plan the reduction of the file that `in` has just opened; `step` (may be NULL) is added to its
 * history. */
lm_code lm_coded_reduce(lm_st_stream *in, const char *file, const lm_coded_policy *p,
                        const lm_history_step *step, lm_coded **out, lm_err *e);
/* *out = NULL for a file that needs no expansion.  Fails: LM_EFORMAT for a description that does
 * not match the tensors. */
lm_code lm_coded_expand(lm_st_stream *in, const char *file, lm_coded **out, lm_err *e);
void lm_coded_free(lm_coded *c);

uint64_t lm_coded_bytes(const lm_coded *c); /* of the file to write */
size_t lm_coded_count(const lm_coded *c);
const lm_coded_item *lm_coded_at(const lm_coded *c, size_t i);
/* Read `in` to its end and write the reduced or expanded file. */
lm_code lm_coded_run(lm_coded *c, lm_write_fn write, void *ctx, lm_par *par, lm_err *e);

#endif
