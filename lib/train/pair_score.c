/* SPDX-License-Identifier: Apache-2.0 */
/* pair_score.c -- pairs in batches. */
#include "train/pair_score.h"

#include "base/stop.h"

lm_code lm_pairs_score(lm_evaluator *v, const lm_packed *pairs, int64_t virtuals, lm_sink *sink,
                       lm_score *to, lm_err *e)
{
    lm_batch *b = &v->batch;
    lm_feed *f = NULL;
    const lm_feed_opts o = { .seq = b->seq,
                             .vocab = v->model->config.vocab + virtuals,
                             .source = b->source_rows,
                             .start = v->model->config.start };
    lm_code rc = lm_feed_new_packed(pairs, &o, &f, e);
    const int64_t n = rc ? 0 : lm_feed_windows(f);
    for (int64_t at = 0; !rc && at < n && !lm_stop_here(); at += b->batch) {
        lm_eval_sum sum = { 0 };
        rc = lm_batch_fill(b, f, at, n, e);
        rc = rc ? rc : lm_evaluator_run(v, &sum, NULL, e);
        to->nll += sum.nll;
        to->tokens += sum.tokens;
        lm_progress(sink, "evaluate", (double)(at < n ? at : n), (double)n, "pairs", NULL);
    }
    lm_feed_free(f);
    return rc;
}
