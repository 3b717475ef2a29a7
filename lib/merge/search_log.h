/* SPDX-License-Identifier: Apache-2.0 */
/* search_log.h -- writes and reads the lines of a weight search.  Their keys are in
 * search_weights.h.  Private to lib/merge. */
#ifndef LM_MERGE_SEARCH_LOG_H
#define LM_MERGE_SEARCH_LOG_H

#include "base/buf.h"
#include "merge/search_weights.h"

/* The first line, without its newline: the description of a search. */
lm_code lm_search_log_head(const lm_merge_plan *p, const lm_merge_search_opts *o,
                           const lm_validator *v, lm_buf *out, lm_err *e);
lm_code lm_search_log_candidate(const lm_candidate *c, lm_buf *out, lm_err *e);
lm_code lm_search_log_best(int n, const double *weights, double objective, int64_t candidates,
                           double seconds, lm_buf *out, lm_err *e);

/* The candidates of the file `path`, whose first line must describe the same search as `head`
 * (algorithm, seeds and objective may differ).  The objective is not read: the caller computes it
 * from the losses.  An incomplete last line is skipped.  Fails: LM_EUSAGE for another search,
 * LM_EFORMAT, LM_EIO. */
lm_code lm_search_log_read(const char *path, const lm_buf *head, int n, int sets,
                           lm_candidates *out, lm_err *e);

#endif
