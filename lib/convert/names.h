/* SPDX-License-Identifier: Apache-2.0 */
/* names.h -- the tensors of a model (model/arch.h) in Hugging Face's files and in GGUF's.
 *
 * GGUF names an architecture's parts, not its modules (blk.3.attn_q.weight for
 * model.layers.3.self_attn.q_proj.weight).  Two orders of elements differ (llama.cpp, conversion/):
 *   ROPE    rows of q and k of the architecture "llama" (Llama, Mistral): within each head, the row
 *           of a pair's first half at 2i and of its second at 2i + 1 there, at i and d/2 + i here
 *   QKV     rows of BLOOM's query_key_value: query, key and value of each head here, those of all heads in turn there
 *   TILED   rows of a layer with states (Qwen3.5) of which each key head has several value heads: these key head by key head
 *           here, and the first of all key heads, then the second and so on there; TILED_COLS: columns likewise
 *   CONV1D  GPT-2's linear weights: [in, out] here, [out, in] there
 * The experts' matrices of a layer are one tensor there (blk.3.ffn_gate_exps.weight), in the order of
 * their numbers; the gate of a shared expert is a vector there. */
#ifndef LM_CONVERT_NAMES_H
#define LM_CONVERT_NAMES_H

#include "model/arch.h"

/* All tensors of a model, in the order of its layers.  The caller frees *out (lm_free).  Fails:
 * LM_ELIMIT. */
lm_code lm_model_tensors_make(const lm_config *c, lm_model_tensor **out, size_t *n, lm_err *e);
/* The same, and behind them those of the modules that predict tokens further on. */
lm_code lm_model_tensors_make_all(const lm_config *c, lm_model_tensor **out, size_t *n, lm_err *e);
/* The config that counts the layers of a tensor: c, or that of its encoder. */
const lm_config *lm_model_tensor_config(const lm_config *c, const lm_model_tensor *s);
/* Rows and columns of a matrix in GGUF, of one expert. */
void lm_model_tensor_gguf_dim(const lm_model_tensor *s, int64_t dim[2]);
/* Shape of the tensor in GGUF that holds it: experts are stacked, [experts, rows, columns].  Returns the number of
 * dimensions. */
int lm_model_tensor_gguf_shape(const lm_model_tensor *s, int64_t dim[3]);
/* The name of one expert's matrix in files of 2023 and early 2024, which llama.cpp read until 2026:
 * "blk.3.ffn_gate.7.weight". */
const char *lm_model_tensor_gguf_split(const lm_model_tensor *s, char out[LM_TENSOR_NAME]);
/* Name k of the two tensors that GGUF has of one (s->gguf has a comma): "blk.3.attn_qkv,attn_gate.weight". */
const char *lm_model_tensor_gguf_piece(const lm_model_tensor *s, int k, char out[LM_TENSOR_NAME]);
/* True if rows stand in another order there: LM_ORDER_ROPE, LM_ORDER_QKV, LM_ORDER_TILED. */
bool lm_model_tensor_moves(const lm_model_tensor *s);
/* For these: the row of Hugging Face's tensor that is row `r` of GGUF's, and back. */
int64_t lm_model_tensor_hf_row(const lm_model_tensor *s, int64_t r);
int64_t lm_model_tensor_gguf_row(const lm_model_tensor *s, int64_t r);
/* LM_ORDER_TILED_COLS: the same of columns. */
int64_t lm_model_tensor_hf_col(const lm_model_tensor *s, int64_t k);
int64_t lm_model_tensor_gguf_col(const lm_model_tensor *s, int64_t k);

#endif
