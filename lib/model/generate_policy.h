/* SPDX-License-Identifier: Apache-2.0 */
/* generate_policy.h -- a generator whose caches keep some tokens (kv/policy.h).
 *
 * A prompt runs through one plain cache of the whole context, which all slots share, and the masses of its tokens are
 * added up there.  Then each key/value head selects the tokens that stay, and their rows are stored in the slot's own
 * pages, which have room for these and for the new tokens.  While tokens are generated, the host chooses the rows that
 * are replaced between steps, by the masses up to the step before.  The host knows the position of each row; rows
 * of a head are in any order.  Layers with a window are left alone.
 * Ranked tokens (kv/policy.h) are read at their ranks, so that a text can be longer than the model has positions.  A
 * prompt that is longer runs in parts: of what precedes a part, the tokens that stay are read, at their ranks, and all of
 * the part.
 * Private to lib/model. */
#ifndef LM_MODEL_GENERATE_POLICY_H
#define LM_MODEL_GENERATE_POLICY_H

#include "graph/mirror.h"
#include "kv/image.h"
#include "model/generate.h"
#include "model/model.h"

typedef struct generator_keep generator_keep;

/* Inputs of a decoding graph: of each layer the tokens in the caches and the rows to write; NULL: none. */
typedef struct {
    lm_mirror inputs;
    int32_t **used, **row;
    int32_t *ranks; /* [rows][n_ranks]; NULL: tokens keep their positions */
    int64_t n_ranks;
} keep_inputs;

/* NULL in *out for a plan without a policy. */
lm_code generator_keep_new(const lm_generator_opts *o, const lm_config *c, generator_keep **out,
                           lm_err *e);
void generator_keep_free(lm_generator *g);
/* lm_build.kept; NULL without a policy. */
const int64_t *generator_kept(const generator_keep *k);
/* Count the bytes of the cache of prompts, when the graphs are built. */
lm_code generator_keep_count(lm_generator *g, lm_err *e);
/* Allocate the cache of prompts, and what selections need, behind the caches of slots. */
lm_code generator_keep_open(lm_generator *g, lm_err *e);
/* Bytes of the cache of prompts. */
size_t generator_keep_bytes(const generator_keep *k);

/* Bytes of masses, and of what selects and stores rows. */
size_t generator_keep_scratch(const generator_keep *k);

/* Inputs of a decoding graph. */
lm_code generator_keep_inputs(const lm_generator *g, lm_model *m, lm_exec *x, keep_inputs *out,
                              lm_err *e);
void generator_keep_inputs_fini(keep_inputs *in);
/* Bind a graph of prompts for slot `slot` to the caches of prompts; layers that are left alone to the slot's. */
void generator_keep_bind(const lm_generator *g, lm_model *m, lm_exec *x, int64_t slot);

/* Of the prompt that runs, how many of its tokens the cache of prompts does not hold any longer. */
int64_t generator_keep_dropped(const generator_keep *k);
/* Limit *rows to the room that the cache of prompts has for the slot's next ones.  If ranked tokens fill it, all but those
 * that stay are dropped first. */
lm_code generator_keep_room(lm_generator *g, int64_t slot, int64_t *rows, lm_err *e);
/* The position of the token that a slot reads next. */
int64_t generator_keep_rank(const lm_generator *g, int64_t slot);

/* A prompt of n tokens begins; it has run: select and store. */
lm_code generator_keep_begin(lm_generator *g, int64_t slot, int64_t n, lm_err *e);
lm_code generator_keep_prompt(lm_generator *g, int64_t slot, lm_err *e);
/* Write the inputs of a step in which next[slot] >= 0 is appended to a slot; `used` still counts the tokens before. */
lm_code generator_keep_step(lm_generator *g, keep_inputs *in, const int32_t *next, int64_t rows,
                            lm_err *e);
/* Count the last step's token among those of the layers. */
lm_code generator_keep_finish(lm_generator *g, int64_t slot, lm_err *e);
/* The slot's tokens as those of an image (kv/image.h), whose shapes are those of the slot: ids are not, and parts have
 * the order of the cache. */
lm_code generator_keep_describe(const lm_generator *g, int64_t slot, lm_kv_image *m, lm_err *e);
/* Check that an image can be continued by n tokens; take what it says of tokens. */
lm_code generator_keep_check(const lm_generator *g, const lm_kv_image *m, int64_t n, lm_err *e);
lm_code generator_keep_take(lm_generator *g, int64_t slot, const lm_kv_image *m, lm_err *e);
/* Copy the positions and masses of a slot's tokens to another slot. */
lm_code generator_keep_copy(lm_generator *g, int64_t from, int64_t to, lm_err *e);
/* Tokens of a slot's prompt. */
int64_t generator_keep_prompt_tokens(const lm_generator *g, int64_t slot);
/* Tokens of a slot that the caches of a layer hold. */
int64_t generator_keep_used(const lm_generator *g, int64_t slot, int64_t layer);
/* The position of each of them in a key/value head, the last step's not included; borrowed. */
const int32_t *generator_keep_positions(const lm_generator *g, int64_t slot, int64_t layer,
                                        int64_t head, int64_t *n);

#endif
