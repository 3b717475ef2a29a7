/* SPDX-License-Identifier: Apache-2.0 */
/* code_few.cu -- products of few rows with weights in codes: by type, and those of F32. */
#include "kernels/cuda/code_few_kernel.cuh"

template void code_few_as<float>(const code_few *f, const lm_stream *s);
extern template void code_few_as<bf16>(const code_few *f, const lm_stream *s);
extern template void code_few_as<f16>(const code_few *f, const lm_stream *s);

void code_few_run(const code_few *f, const lm_stream *s)
{
    if (f->act == LM_DTYPE_F32)
        code_few_as<float>(f, s);
    else if (f->act == LM_DTYPE_BF16)
        code_few_as<bf16>(f, s);
    else
        code_few_as<f16>(f, s);
}
