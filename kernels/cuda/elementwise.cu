/* elementwise.cu -- kernels of the elementwise family. */
#include "kernels/cuda/device.cuh"

extern "C" const lm_kernel lm_elementwise_cuda_kernels[] = { LM_CUDA_END };
