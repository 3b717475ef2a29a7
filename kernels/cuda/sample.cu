/* sample.cu -- kernels of the sample family. */
#include "kernels/cuda/device.cuh"

extern "C" const lm_kernel lm_sample_cuda_kernels[] = { LM_CUDA_END };
