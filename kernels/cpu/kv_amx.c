/* SPDX-License-Identifier: Apache-2.0 */
/* kv_amx.c -- attention over coded caches with the codes as they are as operands of tiles of 8-bit integers.
 *
 * Of a query the numbers of a group of channels become whole numbers q of up to 16,256, in two planes of 8 bits,
 * q = 128 hi + lo; of the probabilities of 64 keys, times the keys' scales, likewise.  Eight rows make the 16 rows of an A
 * operand: eight of hi, eight of lo.  Their products with the codes, added in 32 bits, are exact; the offset of
 * the codes is subtracted as offset * sum of q; minima are added in F32.  A group that is not as wide as a tile has an A
 * operand with zeros beside it.
 *
 * Tables and FP8 are multiplied as BF16 (kv_pairs.h).  Second scales, outliers and blocks with plain tokens go through
 * floats (kv_wide.h). */
#undef LM_SIMD
#define LM_SIMD       amx
#define LM_SIMD_LEVEL LM_CPU_AMX
#define KV_TILES
#include "kernels/cpu/kv_simd.c"
