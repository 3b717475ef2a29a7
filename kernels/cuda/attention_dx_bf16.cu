/* SPDX-License-Identifier: Apache-2.0 */
/* attention_dx_bf16.cu -- attention's backward on the plain path, in BF16. */
#include "kernels/cuda/attention_backward.cuh"

template void attention_backward<bf16, false>(const lm_call *);
