/* attention_cached.cu -- kernels of the attention_cached family. */
#include "kernels/cuda/device.cuh"

extern "C" const lm_kernel lm_attention_cached_cuda_kernels[] = { LM_CUDA_END };
