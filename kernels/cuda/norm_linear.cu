/* norm_linear.cu -- norm and linear layer of a few rows in one kernel (kernels/linear.h). */
#include "kernels/cuda/device.cuh"

extern "C" const lm_kernel lm_norm_linear_cuda_kernels[] = { LM_CUDA_END };
