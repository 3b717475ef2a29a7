/* SPDX-License-Identifier: Apache-2.0 */
/* feed.h -- token datasets and examples as training batches.
 *
 * A dataset is one stream of ids cut into windows of T+1 (stride T); packed examples (pack.h) fill
 * windows of T whole.  Window w of epoch e is drawn in the order of a counted permutation (seed,
 * "shuffle", e), so any position is reached without reading earlier ones, and a run resumes exactly.
 * With documents on, positions restart at each document or example, `lo` holds each row's first
 * visible key and `hi` the end of its document, and the token before a boundary predicts nothing
 * (target -1), because the next token belongs to another text.  Targets that the loss marks of a
 * dataset or example exclude are -1 too.
 *
 * For masked language modelling (mlm.h) windows hold T ids (stride T), and the target of a chosen row is the token that
 * stood there; other rows have none.
 *
 * Rows behind the last example of a window see only themselves and predict nothing.
 *
 * Pairs (text/example.h) are windows of their own: a source and a target, each with padding behind it. */
#ifndef LM_TRAIN_FEED_H
#define LM_TRAIN_FEED_H

#include <stdbool.h>
#include <stdint.h>

#include "base/rng.h"
#include "format/tokens.h"
#include "text/examples.h"
#include "train/mlm.h"
#include "train/nsp.h"
#include "train/pack.h"
#include "train/span.h"

typedef struct lm_feed lm_feed;

typedef struct {
    int64_t seq; /* T */
    bool documents, shuffle;
    uint64_t seed;
    int64_t vocab;     /* ids are below it */
    const lm_mlm *mlm; /* borrowed; NULL: rows predict the next token.  Not with examples */
    /* With mlm: windows are pairs of texts (nsp.h), whose padding predicts nothing and sees itself alone; with `documents`.
     * Borrowed; NULL: they are not. */
    const lm_nsp_ids *nsp;
    /* Windows of span->window ids each become a source and a target (span.h), of which T is the length, by numbers of (seed,
     * "span", number of the window in the series); without `documents`.  Borrowed; NULL: ids predict the next. */
    const lm_span *span;
    /* Examples are pairs, of sources of so many rows; T is the length of targets, and a window holds one, without `documents`.
     * 0: they are not. */
    int64_t source;
    int64_t start; /* what the decoder reads in front of a target */
} lm_feed_opts;

/* Check that the dataset has the T+1 ids of a window.  Fails: LM_EUSAGE (with their number). */
lm_code lm_feed_enough(const lm_tokens *t, int64_t seq, lm_err *e);

/* The dataset is borrowed and already indexed (lm_tokens_index); NULL: random ids, one document per
 * window, for measurements.  Fails as lm_feed_enough. */
lm_code lm_feed_new(const lm_tokens *t, const lm_feed_opts *o, lm_feed **out, lm_err *e);
/* Examples and their windows, borrowed. */
typedef struct {
    const lm_text_examples *examples;
    const lm_packing *pack;
} lm_packed;
/* Windows of T = o->seq packed with examples.  Without `documents` each window must hold one example
 * (lm_pack_make without joining). */
lm_code lm_feed_new_packed(const lm_packed *p, const lm_feed_opts *o, lm_feed **out, lm_err *e);
void lm_feed_free(lm_feed *f);
int64_t lm_feed_windows(const lm_feed *f); /* windows in one epoch */

/* Window number `index` of the endless series (epoch = index / windows) into rows of T numbers.
 * tokens, targets, pos: [T]; lo and hi may be NULL.  Returns the number of valid targets through *valid.
 * Fails: LM_EFORMAT when an id of the dataset is not below `vocab`. */
lm_code lm_feed_window(lm_feed *f, int64_t index, int32_t *tokens, int32_t *targets, int32_t *pos,
                       int32_t *lo, int32_t *hi, int64_t *valid, lm_err *e);
/* With pairs; types: [T], *follows: its label.  The arrays of the others must not be NULL. */
lm_code lm_feed_sentences(lm_feed *f, int64_t index, int32_t *tokens, int32_t *targets,
                          int32_t *pos, int32_t *lo, int32_t *hi, int32_t *types, int32_t *follows,
                          int64_t *valid, lm_err *e);
/* True if windows are pairs of texts. */
bool lm_feed_has_sentences(const lm_feed *f);
/* With a span or pairs the source, [span->source] or [source], too, and how many of its rows are of text. */
lm_code lm_feed_pair(lm_feed *f, int64_t index, int32_t *source, int64_t *length, int32_t *tokens,
                     int32_t *targets, int32_t *pos, int64_t *valid, lm_err *e);
/* The same from the borders of documents and the marks, without checking ids (which are read for masked language
 * modelling): targets 0 or -1, pos, lo, hi, *valid. */
void lm_feed_marks(lm_feed *f, int64_t index, int32_t *targets, int32_t *pos, int32_t *lo,
                   int32_t *hi, int64_t *valid);

#endif
