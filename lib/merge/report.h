/* SPDX-License-Identifier: Apache-2.0 */
/* report.h -- a plan of a merge shown to people, or as JSON. */
#ifndef LM_MERGE_REPORT_H
#define LM_MERGE_REPORT_H

#include "base/buf.h"
#include "merge/plan.h"

typedef struct {
    bool json;    /* one object on one line; else text */
    bool tensors; /* each tensor with its models and parameters */
    /* Of a merge that was done: 0 when it was not. */
    double seconds;
    size_t peak_rss;
    const char *output; /* NULL: not written */
} lm_merge_report_opts;

/* Appended to `out`. */
lm_code lm_merge_report(const lm_merge_plan *p, const lm_merge_report_opts *o, lm_buf *out,
                        lm_err *e);
/* A method as --list --json prints it: method, about, source, base, parameters, on one line. */
lm_code lm_merge_method_json(const lm_merge_method *m, lm_buf *out, lm_err *e);

#endif
