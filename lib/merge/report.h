/* SPDX-License-Identifier: Apache-2.0 */
/* report.h -- reports the plan of a merge as text or JSON. */
#ifndef LM_MERGE_REPORT_H
#define LM_MERGE_REPORT_H

#include "base/buf.h"
#include "merge/plan.h"

typedef struct {
    bool json;    /* one object on one line; otherwise text */
    bool tensors; /* each tensor with its models and parameters */
    /* Of a finished merge; otherwise 0. */
    double seconds;
    size_t peak_rss;
    const char *output; /* NULL: not written */
} lm_merge_report_opts;

/* Append the report to `out`. */
lm_code lm_merge_report(const lm_merge_plan *p, const lm_merge_report_opts *o, lm_buf *out,
                        lm_err *e);
/* A method for lists in JSON: method, about, source, base, parameters, on one line. */
lm_code lm_merge_method_json(const lm_merge_method *m, lm_buf *out, lm_err *e);

#endif
