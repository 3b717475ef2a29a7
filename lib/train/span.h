/* SPDX-License-Identifier: Apache-2.0 */
/* span.h -- span corruption: text with gaps for an encoder, and what was in them for its decoder.
 *
 * T5 (arXiv:1910.10683, section 3.1.4 and 3.3.4).  Of a window of ids a part, the noise density, is cut out in spans of random
 * length.  In the source each span is one sentinel, the first <extra_id_0>, then <extra_id_1> and so on; the target has each
 * sentinel followed by the ids of its span.  Both end with the end token:
 *
 *   ids      a b c d e f g h        source  a b <0> e f <1> </s>        target  <0> c d <1> g h </s>
 *
 * Lengths of spans and of what is between them are two random segmentations into as many parts, each of one id or more; text
 * is first, then noise by turns (random_spans_noise_mask of the published code).  So windows of one length give sources and
 * targets of one length each. */
#ifndef LM_TRAIN_SPAN_H
#define LM_TRAIN_SPAN_H

#include <stdint.h>

#include "base/err.h"
#include "base/rng.h"
#include "format/folder.h"
#include "model/config.h"

typedef struct {
    int64_t window;         /* ids that are read */
    int64_t noise, spans;   /* of a window: ids that are cut out, and in how many spans */
    int64_t source, target; /* length of either, the end token included */
    int32_t *sentinel;      /* [spans] ids of sentinels */
    int64_t eos;
    int64_t start; /* what the decoder reads in front of the target */
} lm_span;

/* The longest windows whose sources have at most `source` ids: window, noise, spans, source and target of *out.
 * 0 < density < 1; mean: length of a span, at least 1.  Fails: LM_EUSAGE when no window is so short. */
lm_code lm_span_fit(int64_t source, double density, double mean, lm_span *out, lm_err *e);

/* Its ids, for a model with an encoder: the end token, the token that the decoder begins with, and of <extra_id_0> and so on
 * those of the tokenizer; if it has none, or m is NULL (of a plan), ids from the end of the vocabulary down.  The caller frees
 * them.  Fails: LM_EUSAGE for a model without encoder, end token or tokenizer, and for more spans than sentinels. */
lm_code lm_span_ids(const lm_config *c, lm_model_source *m, lm_span *s, lm_err *e);
void lm_span_fini(lm_span *s);

/* From ids [window]: source [s->source]; target [s->target], and what the decoder reads to predict it, tokens: start, then the
 * target without its end. */
void lm_span_cut(const lm_span *s, lm_rng r, const uint32_t *ids, int32_t *source, int32_t *tokens,
                 int32_t *target);

#endif
