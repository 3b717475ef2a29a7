/* SPDX-License-Identifier: Apache-2.0 */
/* generate.h -- a model with key/value caches: runs prompts and decodes tokens.
 *
 * B slots hold a sequence each, of at most S tokens.  A prompt runs through its slot alone, in
 * chunks of 256, 64 or 8 rows, so its logits do not depend on the other slots; decoding adds one
 * token to all used slots at once.  All graphs share weights, caches and one arena; nothing is
 * allocated after lm_generator_new.  All of them are in the backend's memory, logits too: tokens
 * are chosen there, and only ids are copied to the host. */
#ifndef LM_MODEL_GENERATE_H
#define LM_MODEL_GENERATE_H

#include "kernels/sample.h"
#include "model/loaded.h"

typedef struct lm_generator lm_generator;

typedef struct {
    lm_dtype dtype;              /* F32, BF16 */
    int64_t batch, context;      /* B, S */
    const struct lm_kv_plan *kv; /* how caches are stored (lm_build.kv), borrowed; NULL: plain */
    const struct lm_kv_plan *state_codes; /* lm_build.state_codes, borrowed; NULL: F32 */
    /* With a policy in kv: the most tokens that follow a prompt, for which caches of the tokens that stay have
     * room; 0: the rest of the context. */
    int64_t most_new;
    /* Tokens that the modules of the model for tokens further on (lm_config.ahead) draft for each step, one each and those
     * behind them the last one, which are then checked together; 0: none.  Not with kv. */
    int64_t draft;
} lm_generator_opts;

/* Build for `w`, and load its weights if it has none yet.  w and b are borrowed.  Fails: LM_EUSAGE when
 * S exceeds the positions of the model, or caches cannot be stored so; as lm_loaded_weights. */
lm_code lm_generator_new(lm_loaded *w, const lm_generator_opts *o, lm_backend *b,
                         lm_generator **out, lm_err *e);
void lm_generator_free(lm_generator *g);

/* With an encoder: the source of the slot, 1 <= n <= S ids, which the prompts and steps of the slot read from then on.  A
 * prompt is what the decoder begins with, in front of what it makes of the source.  Fails: LM_EUSAGE for other models. */
lm_code lm_generator_encode(lm_generator *g, int64_t slot, const uint32_t *ids, int64_t n,
                            lm_err *e);
/* Restart slot `slot` with ids[0..n), 1 <= n <= S.  *logits [V] (may be NULL) is borrowed until the
 * next call, in the backend's memory, and valid after a sync. */
lm_code lm_generator_prompt(lm_generator *g, int64_t slot, const uint32_t *ids, int64_t n,
                            const float **logits, lm_err *e);
/* Append ids[0..n) to the sequence of the slot, n >= 1, used + n <= S; otherwise as lm_generator_prompt.  Chunks end
 * at multiples of LM_KV_CHUNK positions, so a prompt in parts that do so, too, gives the same bits at once. */
lm_code lm_generator_extend(lm_generator *g, int64_t slot, const uint32_t *ids, int64_t n,
                            const float **logits, lm_err *e);
/* Append a token to each slot: next[slot], negative for idle slots.  The cost is that of rows up to
 * the last active slot (rounded up above 8), so callers keep these in the first slots.  *logits
 * [rows,V] as above; rows of idle slots are undefined.  Fails: LM_EUSAGE when a slot is full. */
lm_code lm_generator_decode(lm_generator *g, const int32_t *next, const float **logits, lm_err *e);
/* Choose the next token of the slots that were active in the last prompt or decode, by u[slot] in
 * [0,1) (kernels/sample.h; `seen` is the whole sequence of the slot): (*ids)[slot], -1 if the
 * logits are not numbers, and with `logprob` (may be NULL) (*logprob)[slot].  Waits for the
 * backend; both are borrowed until the next call. */
lm_code lm_generator_choose(lm_generator *g, const lm_sample_attr *o, const double *u,
                            const int32_t **ids, const double **logprob, lm_err *e);

/* lm_generator_decode and lm_generator_choose in one call.  On a device with recordings, a step is
 * one recording from its inputs to its results.  It is made in the second call with the same number
 * of rows, *o and presence of `logprob`, and replayed until one of these differs. */
lm_code lm_generator_next(lm_generator *g, const int32_t *next, const lm_sample_attr *o,
                          const double *u, const int32_t **ids, const double **logprob, lm_err *e);

/* A step with drafts (arXiv:2211.17192; lm_generator_opts.draft, N): append the token next[s] of each slot (negative: idle),
 * and of most[s] <= N tokens that are drafted behind it those that are accepted.  The tokens that follow, the accepted ones
 * and one more, have the distribution of the model alone.  draft, accept [B,N] and last [B,N+1] are draws of the tokens that
 * follow, in order, each of its own stream.  *ids [B,N+1]: these tokens, count[s] of them, the last one not yet appended; -1
 * where logits are not numbers.  drafted[s] <= most[s]: drafts end where the logits of the module are not numbers.  Waits
 * for the backend. */
typedef struct {
    const int32_t *next;
    const int64_t *most;
    const double *draft, *accept, *last;
    bool logprobs;
} lm_draft_ask;
typedef struct {
    const int32_t *ids;
    const double *logprob;          /* [B,N+1], if asked for */
    const int32_t *count, *drafted; /* [B] */
} lm_draft_answer;
lm_code lm_generator_speculate(lm_generator *g, const lm_draft_ask *ask, const lm_sample_attr *o,
                               lm_draft_answer *out, lm_err *e);
/* N; 0: steps have no drafts. */
int64_t lm_generator_drafts(const lm_generator *g);

/* Copy the sequence of slot `from` to slot `to`: to fill a gap before it, or to continue one prompt
 * in several ways.  The choice of the last prompt remains that of `from`. */
lm_code lm_generator_copy(lm_generator *g, int64_t from, int64_t to, lm_err *e);

int64_t lm_generator_batch(const lm_generator *g);
int64_t lm_generator_context(const lm_generator *g);
int64_t lm_generator_vocab(const lm_generator *g);
int64_t lm_generator_used(const lm_generator *g, int64_t slot);
/* Of these the tokens that the caches of a layer hold: with a policy, those that stay. */
int64_t lm_generator_held(const lm_generator *g, int64_t slot, int64_t layer);
/* Bytes that one decoding step reads: every weight of a matrix product and norm once, and the
 * filled part of the caches, as stored, in layers with a window at most as many rows as that; with an encoder, the
 * decoder's weights and what the caches hold of sources. */
double lm_generator_step_bytes(const lm_generator *g);
/* Why lm_generator_next starts each kernel separately although the backend has recordings: the
 * reason of its refusal; NULL otherwise.  Valid as long as g. */
const char *lm_generator_unrecorded(const lm_generator *g);
/* The recording that the last step replayed; NULL: kernels were started separately. */
const lm_recording *lm_generator_recorded(const lm_generator *g);
size_t lm_generator_cache_bytes(const lm_generator *g);
/* Bytes of the caches that grow with the sequence, for each position, and all others of a slot. */
double lm_generator_token_bytes(const lm_generator *g);
size_t lm_generator_tail_bytes(const lm_generator *g);
/* The most tokens of a text that a layer keeps, without those with a window, and in *bytes those of the cache that
 * prompts share; 0 without a policy. */
int64_t lm_generator_kept(const lm_generator *g, size_t *bytes);
/* Bytes that a generator allocates beside the weights: caches of slots, the cache that prompts share, activations and
 * scratch of kernels, and what a policy needs besides. */
typedef struct {
    size_t caches, prompts, activations, policy;
} lm_generator_memory;
void lm_generator_plan(const lm_generator *g, lm_generator_memory *out);
/* Seconds of decoding by operator, see lm_exec_times; on a device call lm_exec_timing before the
 * first step. */
lm_exec *lm_generator_exec(lm_generator *g);

#endif
