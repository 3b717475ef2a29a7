/* SPDX-License-Identifier: Apache-2.0 */
/* attention_tensor.cu -- attention's forward by tensor cores. */
#include "kernels/cuda/attention_forward.cuh"

template void attention_forward<bf16, true>(const lm_call *);
template void attention_forward<f16, true>(const lm_call *);
