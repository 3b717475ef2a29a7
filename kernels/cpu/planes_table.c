/* SPDX-License-Identifier: Apache-2.0 */
/* planes_table.c -- the loops for each processor: byte planes, their entropy coder, and BF16's
 * pairs. */
#include "kernels/expcode.h"
#include "kernels/joint.h"
#include "kernels/planes.h"

const lm_planes_kernels *lm_planes_at(lm_cpu_level max)
{
    return max >= LM_CPU_AVX512 ? &lm_planes_avx512
           : max >= LM_CPU_AVX2 ? &lm_planes_avx2
                                : &lm_planes_ref;
}

const lm_exp_kernels *lm_exp_at(lm_cpu_level max)
{
    return max >= LM_CPU_AVX512 ? &lm_exp_avx512 : max >= LM_CPU_AVX2 ? &lm_exp_avx2 : &lm_exp_ref;
}

const lm_joint_kernels *lm_joint_at(lm_cpu_level max)
{
    return max >= LM_CPU_AMX      ? &lm_joint_amx
           : max >= LM_CPU_AVX512 ? &lm_joint_avx512
           : max >= LM_CPU_AVX2   ? &lm_joint_avx2
                                  : &lm_joint_ref;
}
