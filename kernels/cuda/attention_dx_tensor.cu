/* attention_dx_tensor.cu -- attention's backward by tensor cores. */
#include "kernels/cuda/attention_backward.cuh"

template void attention_backward<bf16, true>(const lm_call *);
template void attention_backward<f16, true>(const lm_call *);
