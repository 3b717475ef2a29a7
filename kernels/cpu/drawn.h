/* SPDX-License-Identifier: Apache-2.0 */
/* drawn.h -- maps over elements of which each has a random draw of its own, on vectors. */
#ifndef LM_KERNELS_CPU_DRAWN_H
#define LM_KERNELS_CPU_DRAWN_H

#include <string.h>

#include "kernels/cpu/simd.h"
#include "kernels/cpu/vrng.h"
#include "kernels/origin.h"

/* What becomes of a vector of elements by their draws; `how` is the map's own. */
typedef vf (*drawn_fn)(vf x, vrng_u32 draws, const void *how);

/* y = f(x) of elements begin to end of a call's first operand: element i has draw number base + i of the stream.  Draws come
 * VRNG_DRAWS at a time from the Philox block that covers the next element; `skip` words of its first block may belong to
 * elements before. */
LM_INLINE void drawn_run(lm_dtype t, const lm_call *c, lm_rng rng, uint64_t base, int64_t begin,
                         int64_t end, drawn_fn f, const void *how)
{
    const void *x = c->in[0].data;
    void *y = c->out[0].data;
    for (int64_t i = begin; i < end;) {
        uint64_t index = base + (uint64_t)i, skip = index % 4;
        vrng_u32 v[5] = { 0 }; /* one more than drawn: with skip, a load may reach past the draws */
        int64_t m = VRNG_DRAWS - (int64_t)skip;
        m = m < end - i ? m : end - i;
        lm_philox_vectors(rng, index / 4, v);
        if (m == VRNG_DRAWS) {
            for (int k = 0; k < 4; k++)
                vf_put(t, y, i + k * VF_LANES, f(vf_get(t, x, i + k * VF_LANES), v[k], how));
        } else {
            VF_FOR(k, n, m, {
                vrng_u32 draws;
                memcpy(&draws, (uint32_t *)v + skip + k, sizeof draws);
                vf_put_any(t, y, i + k, f(vf_get_any(t, x, i + k, n), draws, how), n);
            });
        }
        i += m;
    }
}

/* The same for a part of a whole of `count` elements (kernels/origin.h): an element that is number i there has draw number
 * run * count + i of the stream, run = step*2^16 + micro. */
LM_INLINE void drawn_map(lm_dtype t, const lm_call *c, lm_rng rng, const lm_origin *o,
                         int64_t begin, int64_t end, drawn_fn f, const void *how)
{
    const int64_t count = lm_origin_count(o, lm_tensor_count(&c->in[0]));
    const uint64_t base = lm_rng_first(
        &rng, (uint64_t)c->step->step * 65536 + (uint64_t)c->step->micro, (uint64_t)count);
    for (int64_t i = begin, run; i < end; i += run) {
        const uint64_t at = (uint64_t)lm_origin_index(o, i, &run);
        run = run < end - i ? run : end - i;
        drawn_run(t, c, rng, base + at - (uint64_t)i, i, i + run, f, how);
    }
}

#endif
