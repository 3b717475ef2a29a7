/* SPDX-License-Identifier: Apache-2.0 */
/* attention_dx_amx.h -- the entry of attention_dx_amx.c, for the table in attention_amx.c. */
#ifndef LM_KERNELS_CPU_ATTENTION_DX_AMX_H
#define LM_KERNELS_CPU_ATTENTION_DX_AMX_H

#include "kernels/kernel.h"

void lm_attention_dx_amx(const lm_call *c);
size_t lm_attention_dx_amx_work(const lm_call *c, int threads);

#endif
