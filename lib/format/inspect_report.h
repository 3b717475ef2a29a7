/* SPDX-License-Identifier: Apache-2.0 */
/* inspect_report.h -- the reports of inspect-model, as text or as JSON. */
#ifndef LM_FORMAT_INSPECT_REPORT_H
#define LM_FORMAT_INSPECT_REPORT_H

#include "base/buf.h"
#include "format/inspect.h"

typedef struct {
    bool json;
    bool list;               /* a line (an object) for each tensor */
    bool stats;              /* with statistics: reads all data */
    const char *const *only; /* globs of the names to list; n_only 0: all */
    int n_only;
    int64_t active; /* parameters that a token meets, of a mixture of experts; 0: not shown */
    /* of modules that predict tokens further on, without what they share with the model, and with the copies that
     * files hold of that; 0: not shown */
    int64_t ahead, ahead_stored;
} lm_inspect_opts;

/* Summary and list of one model (a stream is read in order), appended to `out`.  JSON: one object, described in
 * inspect-model(1). */
lm_code lm_inspect_report(lm_model_source *m, const lm_inspect_opts *opts, lm_par *par,
                          lm_sink *sink, lm_buf *out, lm_err *e);
/* The differences of two models: in text only the tensors that differ, and a closing line. */
lm_code lm_compare_report(const lm_model_source *a, const lm_model_source *b,
                          const lm_model_diff *d, bool json, lm_buf *out, lm_err *e);

#endif
