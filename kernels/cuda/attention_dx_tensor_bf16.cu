/* SPDX-License-Identifier: Apache-2.0 */
/* attention_dx_tensor_bf16.cu -- attention's backward by tensor cores, in BF16. */
#include "kernels/cuda/attention_backward.cuh"

template void attention_backward<bf16, true>(const lm_call *);
