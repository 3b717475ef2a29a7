/* SPDX-License-Identifier: Apache-2.0 */
/* verify.h -- checks that everything in a model's folder is read by a loader; reads only headers
 * and small files.
 *
 * Five checks:
 *   files    each .safetensors is opened by a loader: named by the index, or the one file
 *   tensors  each is a part of the architecture in its shape, and none of its parts is missing; a weight may have a
 *            quantised form (qweight, weight_packed, codes, _blocks)
 *   scales   each scale or zero point has its weight, and each quantised weight its scale
 *   keys     of config.json: those with and without effect on this model
 *   tokens   each file of the tokenizer, and generation_config.json, is read as a tool reads it; a violation of its format
 *            is a fault, an intact tokenizer of an unsupported kind a note
 * The tensors of an unknown architecture are not checked, which a note reports. */
#ifndef LM_CONVERT_VERIFY_H
#define LM_CONVERT_VERIFY_H

#include "base/buf.h"
#include "format/folder.h"

typedef struct {
    bool fault;       /* otherwise a note: nothing is lost */
    const char *file; /* plain name; "" for the model as a whole */
    const char *name; /* tensor or key; NULL: the file */
    const char *what;
} lm_finding;
typedef struct {
    void (*say)(void *ctx, const lm_finding *f); /* strings are borrowed for the call */
    void *ctx;
    uint64_t faults, notes;
} lm_findings;

/* Make all checks; a stream is spooled.  A fault found is not a failure.  Fails: LM_EIO,
 * LM_ELIMIT. */
lm_code lm_model_verify(lm_model_source *m, lm_findings *f, lm_err *e);

/* The same as text or one line of JSON, appended to `out`: inspect-model(1). */
lm_code lm_model_verify_report(lm_model_source *m, bool json, lm_buf *out, uint64_t *faults,
                               lm_err *e);

/* The parts, for verify.c. */
void lm_verify_scales(const lm_model_source *m, lm_findings *f);
void lm_verify_keys(const json_t *config, lm_findings *f);
/* `vocab`: vocab_size of config.json, 0 if unknown. */
lm_code lm_verify_tokenizer(lm_model_source *m, int64_t vocab, lm_findings *f, lm_err *e);
/* True for the name of a scale, zero point or similar; and of a weight in a quantised form, with
 * the weight's name in `plain`. */
bool lm_verify_is_scale(const char *name);
bool lm_verify_is_packed(const char *name, char *plain, size_t cap);
/* A weight in FP8 whose scale is another tensor: its numbers alone are not the weight.  NULL: there
 * is none. */
const lm_st_tensor *lm_verify_scaled_fp8(const lm_model_source *m);
void lm_verify_say(lm_findings *f, bool fault, const char *file, const char *name, const char *fmt,
                   ...) LM_PRINTF(5, 6);

#endif
