/* SPDX-License-Identifier: Apache-2.0 */
/* elementwise.h -- activations, sums, dropout, casts, row selection.
 *
 * gelu       in x [N,C] act                 out y [N,C] act   tanh form ("gelu_new") or exact (erf)
 * gelu_dx    in dy, x                       out dx (may alias dy)
 * swiglu     in gu [N,2I] act (gate | up)   out h [N,I] act   h = silu(gate) * up
 *                                                             (arXiv:2002.05202)
 * swiglu_dx  in dh [N,I], gu [N,2I]         out dgu [N,2I]
 * geglu, geglu_dx   as swiglu               h = gelu(gate) * up, the tanh form
 * soft_cap     in x [N,C] act               out y act = cap tanh(x / cap), cap > 0
 * soft_cap_dx  in dy, x                     out dx (may alias dy)
 * add        in a, b (same shape) act       out y act (may alias a or b)
 * dropout    in x act                       out y act = x * Z/(1-p) (may alias x); the gradient is
 *                                               itself
 *            Z from Philox (seed, "dropout", site) at index (step*2^16 + micro)*count + i; kept iff
 *            lm_rng_u32 >= floor(p * 2^32); 0 <= p < 1; the high word of an index beyond 2^64 is mixed into the stream
 *            (lm_rng_first); count and i are those of the whole of which the call has a part (kernels/origin.h)
 * cast       in x of any float dtype        out y of any float dtype, same shape; exact rounding
 * rows       in x [N,C] act, idx [M] I32    out y [M,C] act: row i is x[idx[i]]
 *
 * Tolerance: relative L2 1e-6 (F32), 4e-3 (BF16). */
#ifndef LM_KERNELS_ELEMENTWISE_H
#define LM_KERNELS_ELEMENTWISE_H

#include "kernels/kernel.h"
#include "kernels/origin.h"

typedef struct {
    bool exact;
} lm_gelu_attr;

typedef struct {
    double cap;
} lm_soft_cap_attr;

typedef struct {
    double p;
    int64_t site;
    lm_origin origin;
} lm_dropout_attr;

#endif
