/* SPDX-License-Identifier: Apache-2.0 */
/* peak.h -- the arithmetic ceiling of this processor, measured: the upper bound of a matrix
 * product.
 *
 * Random data (zeros over-report AMX by a tenth and more), operands in the first-level cache. */
#ifndef LM_KERNELS_PEAK_H
#define LM_KERNELS_PEAK_H

#include "kernels/kernel.h"

/* FLOP/s on all threads of `par` for products in `act` at `level`.  BF16: AMX with one tile load from L1 for each tile
 * product, or dot products of pairs; otherwise F32 fused multiply-adds on the widest vectors.  Takes about 30 ms.  0: no
 * known vector units. */
double lm_cpu_peak(lm_dtype act, lm_cpu_level level, lm_par *par);

/* The loops behind it: `rounds` rounds on the calling thread; returns the FLOPs done.  data:
 * LM_PEAK_DATA random BF16 numbers, 64-byte aligned (the loops of F32 do not read them). */
enum { LM_PEAK_DATA = 8192 };
double lm_peak_fma_avx2(int64_t rounds, const uint16_t *data);
double lm_peak_fma_avx512(int64_t rounds, const uint16_t *data);
double lm_peak_bf16(int64_t rounds, const uint16_t *data);
double lm_peak_amx(int64_t rounds, const uint16_t *data);

#endif
