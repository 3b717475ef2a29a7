/* SPDX-License-Identifier: Apache-2.0 */
/* blend_simd.c -- the same loops, compiled for vectors. */
#include "kernels/cpu/blend_loops.h"

#include "kernels/cpu/simd.h"

#define PASTE(level) lm_blend_##level
#define TABLE(level) PASTE(level)

const lm_blend TABLE(LM_SIMD)[2] = BLEND_TABLE(LM_SIMD_LEVEL);
