/* SPDX-License-Identifier: Apache-2.0 */
/* embed.h -- token (and learned position) embeddings.
 *
 * embed     in  tok [N] I32, wte [V,C] act, pos [N] I32 (optional), wpe [P,C] act (optional)
 *           out x [N,C] act = scale wte[tok] (+ wpe[pos]), scale rounded to act (as the published
 *               Gemma code has it); an id of V or more is a virtual token (kernels/virtual.h): zeros
 *               in place of its row; wte may be in codes (numeric/code_rows.h), or in panels (kernels/panels.h)
 * embed_dw  in  dx [N,C] act, tok [N] I32, pos [N] I32 (optional)
 *           out dwte [V,C] F32 (acc) = scale times the sums of its rows, dwpe [P,C] F32 (optional,
 *           acc), without the rows of ids V.  Rows of one token are summed in row order (tokens are sorted first), so the bits
 *           do not depend on threads.  On a device the order is fixed only if its stream is deterministic.
 *
 * Other ids are within the tables: they were checked when the data were read. */
#ifndef LM_KERNELS_EMBED_H
#define LM_KERNELS_EMBED_H

#include "kernels/kernel.h"

typedef struct {
    lm_acc acc_tok, acc_pos; /* embed_dw only */
    double scale;            /* of wte; 0: 1 */
} lm_embed_attr;

#endif
