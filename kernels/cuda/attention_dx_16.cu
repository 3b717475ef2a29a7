/* attention_dx_16.cu -- attention's backward on the plain path, in 16 bits. */
#include "kernels/cuda/attention_backward.cuh"

template void attention_backward<bf16, false>(const lm_call *);
template void attention_backward<f16, false>(const lm_call *);
