/* SPDX-License-Identifier: Apache-2.0 */
/* joint_amx.c -- pairs and rests of BF16 with the permutations of bytes (VBMI) that every processor
 * with AMX has. */
#undef LM_SIMD
#define LM_SIMD amx
#include "kernels/cpu/joint_body.h"
