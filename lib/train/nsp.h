/* SPDX-License-Identifier: Apache-2.0 */
/* nsp.h -- pairs of texts for next-sentence prediction (BERT, arXiv:1810.04805, section 3.1 and appendix A.2).
 *
 * Documents are cut into stretches of T - 3 ids; the last one of a document is shorter, and left out below 4.  Each stretch
 * makes the window of a pair
 *     first  A  between  B  between  padding
 * with the type 1 for B and the id behind it, else 0.  A is the stretch up to a place that is drawn; B is the rest of it, or,
 * for one half of the pairs, as many ids from a place of another document, or all of a shorter one.  Ids `first` and
 * `between` at the ends of documents are those of the dataset, and belong to no text.
 *
 * Every number is a function of (seed, number of the window in the series): each epoch has other pairs, and a resumed run
 * has the same ones. */
#ifndef LM_TRAIN_NSP_H
#define LM_TRAIN_NSP_H

#include "format/tokens.h"
#include "text/tokenizer.h"

typedef struct {
    bool on;
    int32_t first, between; /* in front of a pair, and behind each text of it: [CLS], [SEP] */
    int32_t pad;
} lm_nsp_ids;

/* Those with which a tokenizer joins two texts.  Fails: LM_EUSAGE, at `where`, for one that joins them in another way. */
lm_code lm_nsp_ids_of(const lm_tokenizer *t, int64_t vocab, const char *where, lm_nsp_ids *out,
                      lm_err *e);

enum { LM_NSP_LEAST = 8 }; /* rows of a window */

typedef struct lm_nsp lm_nsp;

/* The dataset is borrowed and indexed; NULL: random ids below `vocab`.  seq: T.  Fails: LM_EUSAGE for windows below
 * LM_NSP_LEAST, for a dataset with loss marks, and for one without a document of 4 ids. */
lm_code lm_nsp_new(const lm_tokens *t, const lm_nsp_ids *ids, int64_t seq, int64_t vocab,
                   uint64_t seed, lm_nsp **out, lm_err *e);
void lm_nsp_free(lm_nsp *p);
int64_t lm_nsp_windows(const lm_nsp *p); /* stretches of all documents */

/* The pair of stretch w as window number `index` of the series: tokens and types [T], of which *rows are not padding, and
 * *follows, 0: B follows A; 1: it does not.  Fails: LM_EFORMAT for an id that is not below `vocab`. */
lm_code lm_nsp_fill(lm_nsp *p, int64_t w, int64_t index, int32_t *tokens, int32_t *types,
                    int64_t *rows, int32_t *follows, lm_err *e);

#endif
