/* SPDX-License-Identifier: Apache-2.0 */
/* attention_dx_tensor_f16.cu -- attention's backward by tensor cores, in F16. */
#include "kernels/cuda/attention_backward.cuh"

template void attention_backward<f16, true>(const lm_call *);
