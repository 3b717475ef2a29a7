/* SPDX-License-Identifier: Apache-2.0 */
/* ring.h -- what the reference and the vector kernels of kernels/ring.h share. */
#ifndef LM_KERNELS_CPU_RING_H
#define LM_KERNELS_CPU_RING_H

#include <math.h>

#include "kernels/comm.h"
#include "kernels/ring.h"

static inline lm_links *ring_links(const lm_call *c)
{
    const lm_ring_attr *a = c->attr;
    return c->step && c->step->links ? c->step->links[a->axis] : NULL;
}

/* What operand i holds may still be on the ring. */
static inline void ring_wait(const lm_call *c, int i)
{
    lm_links *l = ring_links(c);
    if (l && l->arrive)
        l->arrive(l, c->in[i].data);
}

/* Of two sums with these logarithms: their factors in the whole, and its logarithm. */
static inline double ring_merge_lse(bool undivided, double la, double lb, double by[2])
{
    const double top = fmax(la, lb);
    by[0] = by[1] = 1;
    if (undivided || top == -INFINITY)
        return top;
    by[0] = exp(la - top);
    by[1] = exp(lb - top);
    const double sum = by[0] + by[1];
    by[0] /= sum;
    by[1] /= sum;
    return top + log(sum);
}

/* The place in lse [B,H,T] of head h of row i of [B*T,H*E]. */
static inline int64_t ring_merge_place(const lm_ring_merge_attr *a, int64_t i, int64_t h)
{
    return (i / a->seq * a->heads + h) * a->seq + i % a->seq;
}

#endif
