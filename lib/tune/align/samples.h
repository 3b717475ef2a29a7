/* SPDX-License-Identifier: Apache-2.0 */
/* samples.h -- completions that were kept, as JSONL records that a fine-tuning reads:
 *
 *   {"prompt":"2+2=","completion":"4","reward":1,"step":1}
 *   {"prompt":[{"role":"user",...}],"completion":[{"role":"assistant","content":"4"}],"reward":1,"step":1}
 *
 * step: the first step that learns from it.  The file grows with each generation; a resumed run
 * removes what is behind its checkpoint and goes on. */
#ifndef LM_TUNE_ALIGN_SAMPLES_H
#define LM_TUNE_ALIGN_SAMPLES_H

#include "base/json.h"

typedef struct {
    int64_t step;
    const json_t *prompt; /* a string or messages; NULL: text [text_len] */
    const char *text, *completion;
    size_t text_len, len;
    double reward;
} lm_sample;

typedef struct lm_samples lm_samples;

/* from: records of later steps are removed, and more are appended; -1: a new file, which may
 * replace an old one if `force`, with its first record.  Fails: LM_EUSAGE (exists), LM_EIO,
 * LM_EFORMAT for a file to be resumed that has other lines. */
lm_code lm_samples_open(const char *path, int64_t from, bool force, lm_samples **out, lm_err *e);
/* Records are written by flush, which returns when they are on the disk: the checkpoint behind them
 * must not be alone there.  Fails: LM_ELIMIT, LM_EIO. */
lm_code lm_samples_add(lm_samples *s, const lm_sample *x, lm_err *e);
lm_code lm_samples_flush(lm_samples *s, lm_err *e);
/* A new file without a record is removed. */
void lm_samples_close(lm_samples *s);

/* Remove the lines behind the first one whose "step" is later than `from`, it included, from a
 * JSONL file; does nothing if there is no such file.  Fails: LM_EIO, LM_EFORMAT for a line without
 * a step. */
lm_code lm_samples_cut(const char *path, int64_t from, lm_err *e);

#endif
