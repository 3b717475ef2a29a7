/* SPDX-License-Identifier: Apache-2.0 */
/* dedup.h -- duplicates of earlier documents: exact ones, and near ones by MinHash with banded LSH.
 *
 * The text is simplified (lower case, digits to 0, punctuation and white space to one space, marks
 * off: NFD without Mn); its word n-grams are hashed to x < 2^61 - 1; signature value i is the
 * minimum of (a_i x + b_i) mod (2^61 - 1) over them.  Values are cut into bands of `rows`; two
 * documents are candidates when a whole band is equal, which happens with probability 1 - (1 -
 * s^rows)^bands at Jaccard similarity s (14 x 8: one half at 0.68).  A candidate is a duplicate
 * when the fraction of equal values, which estimates s, reaches the threshold.
 *
 * Streaming: documents come in order; each is compared with those kept before it, so the first of a
 * cluster is kept.  (Batch implementations join clusters transitively; here a document that is
 * similar only to a dropped one is kept.)
 *
 * Memory for each kept document: 16 bytes exact; with MinHash another 2 bytes per value and about
 * 20 bytes per band, 0.5 KiB with 14 x 8.  Source: Broder 1997; Leskovec, Rajaraman, Ullman,
 * "Mining of Massive Datasets", chapter 3. */
#ifndef LM_TEXT_DEDUP_H
#define LM_TEXT_DEDUP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

typedef struct {
    bool near;        /* MinHash as well as exact */
    int ngram;        /* words, 1 to 64; 0 = 5 */
    int bands, rows;  /* 1 to 1024 values in all; 0 = 14, 8 */
    double threshold; /* 0 to 1: 0 = one equal band is enough */
    uint64_t seed;    /* of the hash functions */
} lm_dedup_opts;

typedef struct lm_dedup lm_dedup;
/* Fails: LM_EUSAGE for numbers outside the ranges; LM_ELIMIT. */
lm_code lm_dedup_new(const lm_dedup_opts *o, lm_dedup **out, lm_err *e);
void lm_dedup_free(lm_dedup *d);

/* The signature of a text.  Zero-initialise, reuse for many, release with lm_dedup_sig_fini. */
typedef struct {
    uint64_t exact[2];
    uint64_t *value; /* bands * rows */
    bool empty;      /* no words: only the exact comparison applies */
    char *plain;     /* scratch: the simplified text */
    size_t cap_plain;
    uint64_t *gram; /* scratch: hashes of the n-grams */
    size_t cap_gram;
} lm_dedup_sig;
/* Any thread. */
lm_code lm_dedup_sign(const lm_dedup *d, const char *text, size_t len, lm_dedup_sig *sig,
                      lm_err *e);
void lm_dedup_sig_fini(lm_dedup_sig *sig);

typedef enum { LM_DEDUP_NEW, LM_DEDUP_EXACT, LM_DEDUP_NEAR } lm_dedup_verdict;
/* Compare with the earlier documents.  One thread, in order; LM_DEDUP_NEW also stores the
 * signature. */
lm_code lm_dedup_add(lm_dedup *d, const lm_dedup_sig *sig, lm_dedup_verdict *v, lm_err *e);

#endif
