/* SPDX-License-Identifier: Apache-2.0 */
/* arrange.h -- numbers moved, not computed: other orders and shapes, parts, constant indices, other types.  What rules of
 * adapters (lib/tune) are made of, beside kernels/map.h and kernels/matmul.h.
 *
 * All are exact but `scatter` and `accumulate`, which add.  x and y have the type of activations.
 *
 * permute    in  x of any shape                  out y of attr.to
 *            x is seen as attr.dim (its number of elements), its dimensions are put in the order attr.perm (dimension
 *            i of the result is dimension perm[i] of x), and the result is seen as attr.to.  perm = 0, 1, ...: a
 *            copy in another shape
 * window     in  x [R,C]                         out y [attr.rows,attr.cols]
 *            y[i,j] = x[attr.row + i, attr.col + j], 0 where x has no such element: a part, or with negative
 *            offsets x among zeros.  Its gradient is the window that leads back
 * join       in  x0 .. x7 [R,Ci], or with attr.rows [Ri,C]     out y [R,sum Ci] or [sum Ri,C]: side by side
 * gather     in  x of any shape, ids I32 of any shape           out y of the shape of ids
 *            y[i] = x[ids[i]], 0 where ids[i] is negative: indices count over all of x, and are below its number
 *            of elements
 * scatter    in  x of any shape, ids I32 of the shape of x     out y of attr.dim
 *            y[ids[i]] += x[i] over y = 0; negative indices are skipped.  Terms of one element are added in double, in
 *            order of i (on a device: as multiples of 2^-61 of the sum of magnitudes' bound, n times the
 *            largest magnitude, which have no order; one number that is not finite makes all of y NaN).
 *            attr.unique: no index occurs twice
 * widen      in  w of any type, or in codes      out y F32 of its shape: numbers of a weight for operators of F32
 * stop       in  x of any float type             out y = x of its type: no gradient flows into x
 * accumulate in  d of any float type             out dw F32 of its shape: dw = d or dw + d (attr.acc): the gradient of
 *            a parameter, from an operator that makes it as a value of its own
 *
 * Indices are checked where they are made, not here.  Tolerance of the sums: relative L2 1e-6 (F32), 4e-3 (BF16). */
#ifndef LM_KERNELS_ARRANGE_H
#define LM_KERNELS_ARRANGE_H

#include "kernels/kernel.h"

enum { LM_PERMUTE_DIMS = 6, LM_JOIN_PARTS = 8 };

typedef struct {
    int64_t dim[LM_PERMUTE_DIMS];
    int32_t perm[LM_PERMUTE_DIMS];
    int32_t ndim, to_ndim;
    int64_t to[LM_MAX_DIMS];
} lm_permute_attr;

typedef struct {
    int64_t row, col, rows, cols;
} lm_window_attr;

typedef struct {
    bool rows; /* one below the other */
} lm_join_attr;

typedef struct {
    int32_t ndim;
    bool unique;
    int64_t dim[LM_MAX_DIMS];
} lm_scatter_attr;

typedef struct {
    lm_acc acc;
} lm_accumulate_attr;

/* A permutation without dimensions of 1, and with those that stay side by side as one.  pitch: elements of x from
 * one element of the result to the next along each dimension. */
typedef struct {
    int n;
    int64_t dim[LM_PERMUTE_DIMS], pitch[LM_PERMUTE_DIMS]; /* of the result */
} lm_permute_plan;

static inline lm_permute_plan lm_permute_plan_of(const lm_permute_attr *a)
{
    lm_permute_plan p;
    int64_t pitch[LM_PERMUTE_DIMS], step = 1;
    p.n = 0;
    for (int i = a->ndim - 1; i >= 0; i--) {
        pitch[i] = step;
        step *= a->dim[i];
    }
    for (int i = 0; i < a->ndim; i++) {
        int64_t dim = a->dim[a->perm[i]], at = pitch[a->perm[i]];
        if (dim == 1)
            continue;
        if (p.n && p.pitch[p.n - 1] == at * dim) { /* behind its neighbour in x, too */
            p.dim[p.n - 1] *= dim;
            p.pitch[p.n - 1] = at;
            continue;
        }
        p.dim[p.n] = dim;
        p.pitch[p.n++] = at;
    }
    if (!p.n) {
        p.dim[0] = p.pitch[0] = 1;
        p.n = 1;
    }
    return p;
}

#endif
