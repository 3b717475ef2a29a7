/* SPDX-License-Identifier: Apache-2.0 */
/* generate.h -- a model with key/value caches: prompts in, logits of the next token out.
 *
 * B slots hold a sequence each, of at most S tokens.  A prompt runs through its slot alone, in
 * chunks of 256, 64 or 8 rows, so its logits do not depend on the other slots; decoding takes all
 * slots that are in use one token further at once.  All graphs share weights, caches and one arena; nothing is
 * allocated after lm_generator_new.  All of them are in the backend's memory, logits too: tokens
 * are chosen there, and only ids come back. */
#ifndef LM_MODEL_GENERATE_H
#define LM_MODEL_GENERATE_H

#include "kernels/sample.h"
#include "model/loaded.h"

typedef struct lm_generator lm_generator;

/* Build for `w` in `dtype` (F32, BF16) with B = batch and S = context, and load its weights if it
 * has none yet.  w and b are borrowed.  Fails: LM_EUSAGE when S exceeds the positions that the
 * model was made for; as lm_loaded_weights. */
lm_code lm_generator_new(lm_loaded *w, lm_dtype dtype, int64_t batch, int64_t context,
                         lm_backend *b, lm_generator **out, lm_err *e);
void lm_generator_free(lm_generator *g);

/* Begin slot `slot` anew with ids[0..n), 1 <= n <= S.  *logits [V] (may be NULL) is borrowed until
 * the next call, in the backend's memory, and there after a sync. */
lm_code lm_generator_prompt(lm_generator *g, int64_t slot, const uint32_t *ids, int64_t n,
                            const float **logits, lm_err *e);
/* One more token for each slot: next[slot], negative for slots that rest.  Costs as many rows as reach
 * up to the last slot that takes part (rounded up above 8): callers keep these in the first slots.
 * *logits [rows,V] likewise; rows of resting slots mean nothing.  Fails: LM_EUSAGE when a slot is
 * full. */
lm_code lm_generator_decode(lm_generator *g, const int32_t *next, const float **logits, lm_err *e);
/* What comes next in the slots that took part in the last prompt or decode, by u[slot] in [0,1)
 * (kernels/sample.h; seen is all that the slot holds): (*ids)[slot], -1 where the logits are no
 * numbers, and with `logprob` (may be NULL) (*logprob)[slot].  Waits for the backend; both are
 * borrowed until the next call. */
lm_code lm_generator_choose(lm_generator *g, const lm_sample_attr *o, const double *u,
                            const int32_t **ids, const double **logprob, lm_err *e);

/* lm_generator_decode, then lm_generator_choose, in one: on a device that has recordings a token is
 * one, from its inputs to its answer; made in the second call of as many rows with the same *o, with
 * or without `logprob`, and replayed until one of these differs. */
lm_code lm_generator_next(lm_generator *g, const int32_t *next, const lm_sample_attr *o,
                          const double *u, const int32_t **ids, const double **logprob, lm_err *e);

/* Let slot `to` hold the sequence of slot `from`, which keeps it: to fill a gap in front of it, or to
 * go on from one prompt in several ways.  The choice of the last prompt stays that of `from`. */
lm_code lm_generator_copy(lm_generator *g, int64_t from, int64_t to, lm_err *e);

int64_t lm_generator_batch(const lm_generator *g);
int64_t lm_generator_context(const lm_generator *g);
int64_t lm_generator_vocab(const lm_generator *g);
int64_t lm_generator_used(const lm_generator *g, int64_t slot);
/* Bytes that one decoding step reads: every weight of a matrix product and norm once, and the
 * caches as they are filled now. */
double lm_generator_step_bytes(const lm_generator *g);
/* Why lm_generator_next does not replay a recording but puts kernel by kernel there, where the
 * backend has recordings and refused this one; NULL otherwise.  Lives as long as g. */
const char *lm_generator_unrecorded(const lm_generator *g);
/* What the last step replayed; NULL: it ran kernel by kernel. */
const lm_recording *lm_generator_recorded(const lm_generator *g);
size_t lm_generator_cache_bytes(const lm_generator *g);
/* Of decoding: seconds by operator, see lm_exec_times; on a device lm_exec_timing comes before the
 * first step. */
lm_exec *lm_generator_exec(lm_generator *g);

#endif
