/* SPDX-License-Identifier: Apache-2.0 */
/* kv_report.h -- ways to store a cache beside each other, on one model and the same tokens: a row
 * of measures for each.
 *
 * The first row is the reference, the plain cache.  Rows are independent of each other: the sums of
 * the comparison do not depend on which others are compared.  A way that this model, or a
 * generator, cannot use is a row that says why. */
#ifndef LM_COMPRESS_KV_REPORT_H
#define LM_COMPRESS_KV_REPORT_H

#include "base/progress.h"
#include "compress/kv_evaluate.h"
#include "compress/kv_passkey.h"
#include "model/cache_plan.h"

/* One row.  Measures that were not made are negative (double), NULL, or 0 tasks. */
typedef struct {
    const char *name; /* for people; borrowed */
    const char *spec; /* kv/spec.h; borrowed; NULL: the plain cache */
    /* a calibration in memory, in place of the file that spec names; borrowed; NULL: there is none */
    const lm_kv_data *data;
    bool ran;
    lm_err why;         /* if it did not run */
    lm_cache_plan plan; /* plan.plan NULL: plain */
    /* Of a token in all layers: the mean of a text of `length` tokens, those that stay plain and those that are dropped
     * included, and over the lengths of the last page; of one that is coded; of the plain cache. */
    double token_bytes, coded_bytes, plain_bytes;
    double memory;  /* bytes of the caches of the largest batch */
    double first;   /* seconds to the first token behind `prompt` tokens */
    double rate[2]; /* tokens/s at batch[0], batch[1] */
    lm_kv_sums sum; /* from the first token on; with a policy, behind a prompt of half a window */
    lm_kv_sums reference; /* the plain cache's on the same tokens */
    int64_t *solved;      /* [depths, lengths] tasks, of `repeats` */
    /* With a policy: the same when the prompt has the question, too, without its last token, so that it is
     * observed when tokens are chosen. */
    int64_t *observed;
    double *error; /* [layers]: relative error of the attention's output */
} lm_kv_row;

typedef struct {
    lm_loaded *w;
    lm_dtype dtype;
    lm_backend *b;
    lm_par *par;
    const uint32_t *ids; /* [windows, length] */
    int64_t windows, length;
    const struct lm_kv_plan *state_codes; /* of all rows but the reference; NULL: F32 */
    int64_t speed_prompt, speed_steps;    /* of the measurement of times; 0 steps: not measured */
    int64_t batch[2];
    const lm_kv_passkeys *passkeys; /* NULL: none */
    int64_t cells;                  /* of their map */
    /* the same model on a backend with the memory of the host, for errors of attention; NULL: not measured (models with
     * latents or states have none that is defined) */
    lm_loaded *host_w;
    lm_backend *host;
    int64_t error_tokens; /* of one window */
    double *outliers;     /* [layers], receives lm_kv_capture_outliers of it; may be NULL */
    lm_sink *sink;        /* may be NULL */
} lm_kv_report;

/* Measure all rows, row[0] being the reference.  What rows hold is freed by lm_kv_row_fini.  Ends
 * early when lm_stopping().  Fails where the reference fails; other rows keep their failure in
 * `why`, except LM_ELIMIT and LM_EIO. */
lm_code lm_kv_report_run(const lm_kv_report *r, lm_kv_row *row, int n, lm_err *e);
void lm_kv_row_fini(lm_kv_row *row);

/* Share of all tasks of a map [cells] (solved, observed) that were solved, of n tasks; negative:
 * there are none. */
double lm_kv_solved(const int64_t *map, int64_t cells, int64_t n);
/* Mean of the relative errors of all layers; negative: not measured. */
double lm_kv_row_error(const lm_kv_row *row, int64_t layers);

#endif
