/* SPDX-License-Identifier: Apache-2.0 */
/* cpu.h -- what this processor supports, and the level by which kernels are chosen. */
#ifndef LM_BASE_CPU_H
#define LM_BASE_CPU_H

#include <stdbool.h>

#include "base/err.h"

/* Each level includes those before it. */
typedef enum {
    LM_CPU_REF = 0,    /* plain C, the definition            */
    LM_CPU_AVX2 = 1,   /* AVX2 + FMA + F16C + BMI2 + LZCNT   */
    LM_CPU_AVX512 = 2, /* AVX-512 F BW VL DQ                 */
    LM_CPU_BF16 = 3,   /* + AVX512-BF16                      */
    LM_CPU_AMX = 4,    /* + VBMI and AMX-TILE/BF16/INT8, granted by the kernel */
} lm_cpu_level;

/* The highest level of this machine, by CPUID, XGETBV and, for AMX, the permission request: made
 * here, once in the process, before any worker thread starts, because threads inherit the
 * permission. */
lm_cpu_level lm_cpu_detect(void);
/* Of a machine of LM_CPU_AVX512 or more: AVX512-VNNI (dot products of bytes). */
bool lm_cpu_has_vnni(void);
const char *lm_cpu_level_name(lm_cpu_level l); /* "ref", "avx2", "avx512", "avx512bf16", "amx" */
/* Parse a name (LM_CPU=...) and bound it by lm_cpu_detect: asking for more is LM_EUSAGE. */
lm_code lm_cpu_level_parse(const char *name, lm_cpu_level *out, lm_err *e);
const char *lm_cpu_model(void); /* brand string, for facts lines */

#endif
