/* SPDX-License-Identifier: Apache-2.0 */
/* generate_cache.h -- caches of a generator's slots as images (kv/image.h): to a file, and to continue from it. */
#ifndef LM_MODEL_GENERATE_CACHE_H
#define LM_MODEL_GENERATE_CACHE_H

#include "kv/image.h"
#include "model/generate.h"

/* Copy the sequence of a slot to a new image.  `about` describes the model (lm_cache_about_model), and the token that
 * follows, if it was chosen.  With a policy, the image has the tokens that stay, with what the policy goes by; about->policy is
 * read for LM_KV_STAY only.  Fails: LM_ELIMIT; as the backend. */
lm_code lm_generator_save(lm_generator *g, int64_t slot, const lm_kv_about *about, lm_par *par,
                          lm_kv_image **out, lm_err *e);

/* Restart a slot with the cache of an image, whose forms are those of the generator's caches
 * (lm_kv_image_convert), and run ids[0..n) behind it as a prompt; with n = 0 the next token of the image, or its last
 * one again.  Some of the image's rows may be computed again from its ids, so that the whole has the bits that it would
 * have in one run:
 *   n = 0 with a next token: the run that chose it
 *   plain caches, and coded ones without plain newest tokens: a prompt, for any cut
 *   others: a prompt, for a cut at a multiple of LM_KV_CHUNK
 * An image from which tokens were dropped needs a generator with the same policy, or one that keeps what is there
 * (LM_KV_STAY, or a policy that does not replace tokens).  Then ids are run one by one, as tokens that are generated.
 * Fails: LM_EUSAGE for other forms or shapes, another policy, more tokens than the context, and n = 0 for a prompt's
 * cache with plain newest tokens; as lm_generator_extend. */
lm_code lm_generator_resume(lm_generator *g, int64_t slot, const lm_kv_image *m,
                            const uint32_t *ids, int64_t n, lm_par *par, lm_err *e);

/* Rows that lm_generator_resume computes for such an image and n tokens behind it, as eights. */
int64_t lm_generator_rows_behind(const lm_generator *g, const lm_kv_about *a, int64_t n);

/* ---- Computing rows of an image instead of loading them (kv/stream.h) ---- */

/* True for plain caches that keep all tokens: others have no place for numbers of an image. */
bool lm_generator_computes(const lm_generator *g);
/* The seconds that a row of a prompt takes, by running 8 of them, and then 64 if these are expected to take at most
 * `most` seconds.  The slot is empty then. */
lm_code lm_generator_row_seconds(lm_generator *g, int64_t slot, double most, double *seconds,
                                 lm_err *e);
/* Compute rows [first, first + n) of a plain image, first a multiple of LM_KV_CHUNK, n at most that, from its ids and
 * its rows before them.  The first lm_generator_used of the slot are those of the image already. */
lm_code lm_generator_compute(lm_generator *g, int64_t slot, const lm_kv_image *m, int64_t first,
                             int64_t n, lm_err *e);

#endif
