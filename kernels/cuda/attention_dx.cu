/* SPDX-License-Identifier: Apache-2.0 */
/* attention_dx.cu -- attention's backward on the plain path, in F32. */
#include "kernels/cuda/attention_backward.cuh"

template void attention_backward<float, false>(const lm_call *);
