/* SPDX-License-Identifier: Apache-2.0 */
/* planes_table.c -- the loops for each processor: byte planes, their entropy coder, BF16's pairs, and
 * the entropy coder and the codes of key-value caches. */
#include "kernels/expcode.h"
#include "kernels/joint.h"
#include "kernels/kv_code.h"
#include "kernels/planes.h"
#include "kernels/rans.h"

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

const lm_rans_kernels *lm_rans_at(lm_cpu_level max)
{
    return max >= LM_CPU_AVX512 ? &lm_rans_avx512
           : max >= LM_CPU_AVX2 ? &lm_rans_avx2
                                : &lm_rans_ref;
}

const lm_kv_code_kernels *lm_kv_code_at(lm_cpu_level max)
{
    return max >= LM_CPU_AVX512 ? &lm_kv_code_avx512
           : max >= LM_CPU_AVX2 ? &lm_kv_code_avx2
                                : &lm_kv_code_ref;
}
