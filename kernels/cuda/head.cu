/* head.cu -- kernels of the head family. */
#include "kernels/cuda/device.cuh"

extern "C" const lm_kernel lm_head_cuda_kernels[] = { LM_CUDA_END };
