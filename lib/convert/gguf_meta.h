/* SPDX-License-Identifier: Apache-2.0 */
/* gguf_meta.h -- the metadata of a model in GGUF: config.json and tokenizer.json converted to the
 * keys that llama.cpp reads, and back.
 *
 * The keys are those that llama.cpp's conversion writes for the same model (docs/gguf.md;
 * conversion/ and gguf-py of ggml-org/llama.cpp).  Private to lib/convert. */
#ifndef LM_CONVERT_GGUF_META_H
#define LM_CONVERT_GGUF_META_H

#include "convert/convert.h"
#include "format/gguf.h"

/* A tensor of divisors of the rotary frequencies, [head_dim / 2], which llama3's scaling needs in
 * GGUF; Hugging Face models do not have it. */
#define LM_GGUF_ROPE_FREQS "rope_freqs.weight"

/* The rotary base of layers with a window; architectures without the key have one base for all. */
#define LM_GGUF_NEAR_BASE "rope.freq_base_swa"

/* Our own keys. */
#define LM_GGUF_FILE    "lmutils.file."   /* + name: its text */
#define LM_GGUF_FILE64  "lmutils.file64." /* + name: its bytes in base 64, when they are not UTF-8 */
#define LM_GGUF_TENSORS "lmutils.tensors" /* "TYPE NAME" of each original tensor */

/* ---- Writing ---- */

/* Hyper-parameters of the architecture.  Fails: LM_EUSAGE for properties without a GGUF key that
 * change every result; those that change only some results cause a warning. */
lm_code lm_gguf_put_config(lm_gguf_plan *p, const lm_import *m, lm_err *e);
/* The same without the checks. */
lm_code lm_gguf_put_numbers(lm_gguf_plan *p, const lm_config *c, lm_err *e);
/* Divisors of llama3's scaling; r->dim / 2 numbers. */
void lm_gguf_rope_factors(const lm_rope_config *r, float *out);
/* tokenizer.*: "none" when the model has no tokenizer.  Fails: LM_EFORMAT for a tokenizer.json that
 * is not supported, LM_EUSAGE when it has more tokens than the model. */
lm_code lm_gguf_put_vocab(lm_gguf_plan *p, const lm_import *m, lm_err *e);

/* ---- Reading ---- */

/* Build a config.json from the metadata and the shapes of some tensors.  The caller frees *out.
 * Fails: LM_EUSAGE for another architecture, and for a key that is missing or cannot be obeyed (named). */
lm_code lm_gguf_get_config(const lm_gguf *g, json_t **out, lm_err *e);
/* Only "rope_theta" and, where positions are scaled, "rope_scaling", added to `out`; dim: the width
 * of a head.  Fails: LM_EUSAGE for an unknown scaling, LM_EFORMAT. */
lm_code lm_gguf_get_rope(const lm_gguf *g, const lm_arch *a, int64_t dim, json_t *out, lm_err *e);
/* layer_types of a model of c's sizes; the caller frees *types.  usual: they are those of a config.json without
 * layer_types.  Fails: LM_EFORMAT. */
lm_code lm_gguf_get_types(const lm_gguf *g, const lm_config *c, json_t **types, bool *usual,
                          lm_err *e);
/* Fails with LM_EUSAGE if keys, values and rotated parts of a head differ in width.  dim: the width where the file
 * has none. */
lm_code lm_gguf_check_head_dim(const lm_gguf *g, const lm_arch *a, int64_t dim, lm_err *e);
/* A float's value with the fewest digits that identify it: 1e-05, not 9.99999974737875e-06. */
double lm_gguf_shortest(double v);
/* Metadata that were changed after our conversion, which kept config.json and the other files: the
 * change is applied to the kept files of m, to m->tree and m->config, with a warning.  It covers
 * the hyper-parameters, the ids of the special tokens and the chat template (`tokenizer` false: not
 * these two); a second warning names other keys that were edited.  Fails: LM_EUSAGE for a change that config.json cannot
 * represent, LM_EFORMAT. */
lm_code lm_gguf_take_edits(lm_import *m, const lm_gguf *g, bool tokenizer, lm_err *e);
/* tokenizer.json and tokenizer_config.json, appended to the buffers; *found false when the file has
 * no tokenizer.  Fails: LM_EUSAGE for a kind of tokenizer that our tokenizer.json cannot
 * represent. */
lm_code lm_gguf_get_vocab(const lm_gguf *g, const lm_config *c, lm_buf *json, lm_buf *config,
                          bool *found, lm_err *e);

#endif
