/* SPDX-License-Identifier: Apache-2.0 */
/* panels.h -- weights in the order in which matrix products of BF16 on AMX tiles or with AVX512-BF16
 * read them.
 *
 * panels  in  x [M,K] F32 or BF16
 *         out y [M,K] BF16 in panels: x rounded to BF16, in another order (lm_tensor.panels)
 *
 * M and K are multiples of 32.  32 rows are a panel of 32 K numbers, at the place that the rows have in
 * row-major order; so a run of rows from a multiple of 32 on is in panels by itself.  A panel is blocks of 32
 * columns; a block is two tiles of 16 rows of the matrix; a tile is 16 pairs of columns, for each pair its two
 * numbers of each row.
 *
 * linear reads panels as they are (lm_gemm.b_packed); linear_dx packs its own panels from them
 * (lm_gemm.b_turned).  The bits of the products are those with row-major weights. */
#ifndef LM_KERNELS_PANELS_H
#define LM_KERNELS_PANELS_H

#include "kernels/kernel.h"

enum { LM_PANEL = 32 }; /* rows of a panel, and the unit of its depth */

/* Where the number in row r and column k of a matrix of `width` columns is. */
static inline int64_t lm_panel_at(int64_t r, int64_t k, int64_t width)
{
    int64_t block = (r / LM_PANEL * width + k / LM_PANEL * LM_PANEL) * LM_PANEL;
    return block + r % LM_PANEL / 16 * 512 + k % LM_PANEL / 2 * 32 + r % 16 * 2 + k % 2;
}

#endif
