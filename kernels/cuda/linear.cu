/* linear.cu -- kernels of the linear family. */
#include "kernels/cuda/device.cuh"

extern "C" const lm_kernel lm_linear_cuda_kernels[] = { LM_CUDA_END };
