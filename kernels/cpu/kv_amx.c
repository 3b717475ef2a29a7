/* SPDX-License-Identifier: Apache-2.0 */
/* kv_amx.c -- attention over coded caches with the codes as they are as operands of tiles of 8-bit integers (kv_blocks.h).
 *
 * Of a query the numbers of a group of channels become whole numbers q of up to 16,256, in two planes of 8 bits,
 * q = 128 hi + lo; of the probabilities of a block, times the keys' scales, likewise.  Four or eight rows make the 8 or 16
 * rows of an A operand: those of hi, then those of lo.  Their products with the codes, added in 32 bits, are exact; the
 * offset of the codes is subtracted as offset * sum of q; minima are added in F32.  A group that is not as wide as a tile
 * has an A operand with zeros beside it.  Scales of channels are multiplied with queries, and with sums of values;
 * second scales with scores, and with sums of values.
 *
 * Tables whose levels are whole numbers go the same way, other tables and FP8 are multiplied as BF16 (kv_pairs.h).
 * Outliers and blocks with plain tokens go through floats (kv_wide.h). */
#undef LM_SIMD
#define LM_SIMD       amx
#define LM_SIMD_LEVEL LM_CPU_AMX
#define KV_TILES
#include "kernels/cpu/kv_simd.c"
