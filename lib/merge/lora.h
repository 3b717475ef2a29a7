/* SPDX-License-Identifier: Apache-2.0 */
/* lora.h -- a PEFT folder with low-rank adapters (or the same in a tar or an .lmz), merged into the
 * tensors of its base as they are read.
 *
 * W' = W + s B A, s = lora_alpha / r, with use_rslora lora_alpha / sqrt(r); r and alpha of a module
 * by rank_pattern and alpha_pattern.  A [r,in], B [out,r]; transposed where fan_in_fan_out says
 * that W is [in,out] (in GPT-2 the module decides), and for embeddings (lora_embedding_A [r,V], _B [H,r], W [V,H]).  A module's
 * bias gets s times lora_B.bias; modules_to_save and trained biases replace the base's tensors; a saved
 * head of a tied base stands beside its embedding (lm_lora_unties).
 * Parameters of experts, which target_parameters names, are in tune/experts.h.
 * With use_dora (arXiv:2402.09353) each output o of W' is brought to its magnitude: m_o W'_o / |W'_o|,
 * the norm over the inputs (over the tokens in an embedding).  Source: huggingface/peft tuners/lora.
 * Other kinds of adapters and tensors that belong to no module of the base are errors.
 *
 * The sum is made in FP64.  Into a 16-bit W it gives F32 rounded to odd, so that the rounding of
 * the result to 16 bits is the only one; into an F32 W it gives F32, one rounding. */
#ifndef LM_MERGE_LORA_H
#define LM_MERGE_LORA_H

#include <stdbool.h>

#include "base/err.h"
#include "base/par.h"
#include "format/folder.h"

typedef struct lm_lora lm_lora;

/* True if `path` is a folder or an archive with adapter_config.json; false for streams. */
bool lm_lora_is(const char *path, const lm_bundle_opts *o);
/* Read configuration and headers; `o` may be NULL.  Fails: LM_EUSAGE for a kind that cannot be merged, LM_EFORMAT,
 * LM_EIO. */
lm_code lm_lora_open(const char *path, const lm_bundle_opts *o, lm_lora **out, lm_err *e);
void lm_lora_close(lm_lora *l);
const char *lm_lora_base(const lm_lora *l); /* base_model_name_or_path; NULL if absent */
/* Find the tensors of `base` that the adapter changes and check every shape.  `tied`: the embedding
 * that is also the base's head; NULL: the head is not tied.  Fails: LM_EFORMAT naming adapter and
 * tensor. */
lm_code lm_lora_bind(lm_lora *l, const lm_model_source *base, const lm_st_tensor *tied, lm_err *e);
/* After bind: true if the adapter unties the head.  As in PEFT, a head or an embedding in
 * modules_to_save becomes a separate module, while the other remains that of the base; unless both
 * are saved with the same numbers, as with ensure_weight_tying.  So does an embedding to which something is added:
 * beside the base it changes what goes in, not the head.  Rows of chosen tokens are those of both. */
bool lm_lora_unties(const lm_lora *l);
/* The adapter's separate tensor for `name` of the result, which lm_lora_effect_on reports as
 * REPLACED, or as ADDED: an adapted embedding, whose numbers in the base remain those of the head.
 * NULL: none. */
const lm_st_tensor *lm_lora_own(const lm_lora *l, const char *name);

/* The tensor of the base with the bytes of t, which lm_lora_own may have given; t itself if it is the base's. */
const lm_st_tensor *lm_lora_stored(const lm_lora *l, const lm_st_tensor *t);

/* After bind: how lora_A and lora_B were given to parameters of experts, in a line; false: there are none. */
bool lm_lora_experts_line(const lm_lora *l, char *out, size_t size);

/* A file beside the adapter, at most `limit` bytes, appended to `out`; *found = false: no such
 * file. */
lm_code lm_lora_file(const lm_lora *l, const char *name, size_t limit, lm_buf *out, bool *found,
                     lm_err *e);

typedef enum { LM_LORA_UNTOUCHED, LM_LORA_ADDED, LM_LORA_REPLACED } lm_lora_effect;
lm_lora_effect lm_lora_effect_on(const lm_lora *l, const lm_st_tensor *t);
/* REPLACED: the tensor that replaces t, and its bytes. */
const lm_st_tensor *lm_lora_replacement(const lm_lora *l, const lm_st_tensor *t, const void **data);
/* ADDED: the dtype of the sum for a t of this dtype, and the sum of w (t->count elements of
 * t->dtype) and the adapter, at out. */
lm_dtype lm_lora_dtype(lm_dtype of);
/* Bytes of memory that lm_lora_add uses, including the sum; 0 for a tensor that is not ADDED. */
uint64_t lm_lora_bytes(const lm_lora *l, const lm_st_tensor *t);
lm_code lm_lora_add(const lm_lora *l, const lm_st_tensor *t, const void *w, void *out, lm_par *par,
                    lm_err *e);

#endif
