/* SPDX-License-Identifier: Apache-2.0 */
/* pieces.h -- tensors of Hugging Face's files that GGUF has with other axes, or as two tensors.
 *
 *   self_attn.kv_b_proj [heads (A + E), L] (kernels/latent.h)
 *       attn_k_b [heads, L, A]: of each head the transpose of its A rows for keys; attn_v_b [heads, E, L]
 *   mlp.experts.gate_up_proj [experts, in, 2 ffn], gates and ups by turns
 *       ffn_gate_exps, ffn_up_exps [experts, ffn, in]; their biases [experts, 2 ffn] likewise
 *   mlp.experts.down_proj [experts, ffn, out]
 *       ffn_down_exps [experts, out, ffn]
 *   linear_attn.in_proj_qkvz, rows of queries, keys, values and gates of each key head in turn
 *       attn_qkv, those of all heads' queries, then keys, then values; attn_gate
 * A table of an architecture (model/arch.h) names both with a comma between them.  Private to lib/convert. */
#ifndef LM_CONVERT_PIECES_H
#define LM_CONVERT_PIECES_H

#include "convert/names.h"
#include "numeric/format.h"

/* Rows of each of some groups, from row `at` of the group on. */
typedef struct {
    int64_t at, rows;
} lm_piece_run;
enum { LM_PIECE_RUNS = 3 };

/* Row (o, i) of a tensor [outer, inner, cols] of GGUF, in their order; its element k is element
 * base + o outer_step + i inner_step + k step of Hugging Face's.  With runs, outer is 1, and the rows are those of each run
 * for all groups of `pitch` rows, one run behind the other. */
typedef struct {
    char name[LM_TENSOR_NAME];
    int ndim; /* 2: [outer, cols], inner is 1 */
    int64_t outer, inner, cols;
    int64_t base, outer_step, inner_step, step;
    int runs;
    lm_piece_run run[LM_PIECE_RUNS];
    int64_t groups, pitch;
} lm_gguf_piece;

/* The number of such tensors of s; 0: it is one, as names.h says. */
int lm_pieces(const lm_config *c, const lm_model_tensor *s);
lm_gguf_piece lm_piece_of(const lm_config *c, const lm_model_tensor *s, int k);
/* Its shape; returns the number of dimensions. */
int lm_piece_shape(const lm_gguf_piece *p, int64_t dim[3]);

/* The elements of a piece, of `size` bytes each, from Hugging Face's tensor (out) or into it. */
typedef struct {
    const lm_gguf_piece *piece;
    size_t size;
    void *whole, *part; /* of Hugging Face's shape, and of the piece's */
    bool out;
} lm_piece_job;
void lm_piece_move(const lm_piece_job *j, lm_par *par);

/* True if codes of the rows of the transposes that s holds can be moved between both (s is of experts). */
bool lm_piece_has_codes(const lm_model_tensor *s);
/* The same as lm_piece_move for these codes, rows of `row` bytes. */
void lm_piece_move_codes(const lm_piece_job *j, size_t row);

#endif
