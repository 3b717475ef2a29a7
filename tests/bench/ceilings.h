/* SPDX-License-Identifier: Apache-2.0 */
/* ceilings.h -- peak rates of this machine, measured in the run of a bench, so that every figure is
 * a share of a ceiling of the same run.  All data are random normal numbers, because AMX is faster
 * on zeros.
 *
 * Each call takes some tens of milliseconds on all threads of `par` at once and returns FLOP/s or
 * bytes/s; 0 if the machine lacks the instructions. */
#ifndef LM_BENCH_CEILINGS_H
#define LM_BENCH_CEILINGS_H

#include "base/err.h"
#include "base/par.h"

typedef struct lm_ceilings lm_ceilings;

lm_code lm_ceilings_new(lm_ceilings **out, lm_par *par, lm_err *e);
void lm_ceilings_free(lm_ceilings *c);

double lm_ceiling_amx_registers(lm_ceilings *c); /* multiplications only */
double
lm_ceiling_amx_l1(lm_ceilings *c); /* one tile load from L1 for each: the limit of a product */
double lm_ceiling_fma_f32(lm_ceilings *c); /* widest vectors of the machine */
double lm_ceiling_read(lm_ceilings *c);    /* loads from memory, 256 MiB in all */
double lm_ceiling_copy(lm_ceilings *c);    /* memcpy, read and written bytes counted */

/* The median of n values; sorts them. */
double lm_median(double *v, int n);

#endif
