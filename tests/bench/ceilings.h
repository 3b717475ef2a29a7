/* SPDX-License-Identifier: Apache-2.0 */
/* ceilings.h -- what this machine can do at most, measured where a bench needs it, so that every
 * figure is a share of a ceiling of the same run.  Random normal data throughout: zeros over-report
 * AMX.
 *
 * Each call takes some tens of milliseconds on all threads of `par` at once and gives FLOP/s or
 * bytes/s; 0 when the machine lacks the instructions. */
#ifndef LM_BENCH_CEILINGS_H
#define LM_BENCH_CEILINGS_H

#include "base/err.h"
#include "base/par.h"

typedef struct lm_ceilings lm_ceilings;

lm_code lm_ceilings_new(lm_ceilings **out, lm_par *par, lm_err *e);
void lm_ceilings_free(lm_ceilings *c);

double lm_ceiling_amx_registers(lm_ceilings *c); /* multiplications only */
double
lm_ceiling_amx_l1(lm_ceilings *c); /* one tile load from L1 for each: what a product can reach */
double lm_ceiling_fma_f32(lm_ceilings *c); /* widest vectors there are */
double lm_ceiling_read(lm_ceilings *c);    /* loads from memory, 256 MiB in all */
double lm_ceiling_copy(lm_ceilings *c);    /* memcpy, read and written bytes counted */

/* The median of n values; sorts them. */
double lm_median(double *v, int n);

#endif
