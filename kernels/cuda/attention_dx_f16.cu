/* SPDX-License-Identifier: Apache-2.0 */
/* attention_dx_f16.cu -- attention's backward on the plain path, in F16. */
#include "kernels/cuda/attention_backward.cuh"

template void attention_backward<f16, false>(const lm_call *);
