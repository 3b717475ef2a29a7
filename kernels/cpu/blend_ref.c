/* SPDX-License-Identifier: Apache-2.0 */
/* blend_ref.c -- the loops of merging in plain C, and the choice among the levels. */
#include "kernels/cpu/blend_loops.h"

const lm_blend lm_blend_ref[2] = BLEND_TABLE(LM_CPU_REF);

const lm_blend *lm_blend_at(lm_cpu_level max, bool wide)
{
    const lm_blend *t = max >= LM_CPU_AVX512 ? lm_blend_avx512
                        : max >= LM_CPU_AVX2 ? lm_blend_avx2
                                             : lm_blend_ref;
    return t + wide;
}
