/* norm.cu -- kernels of the norm family. */
#include "kernels/cuda/device.cuh"

extern "C" const lm_kernel lm_norm_cuda_kernels[] = { LM_CUDA_END };
