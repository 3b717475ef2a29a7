/* attention.cu -- kernels of the attention family. */
#include "kernels/cuda/device.cuh"

extern "C" const lm_kernel lm_attention_cuda_kernels[] = { LM_CUDA_END };
