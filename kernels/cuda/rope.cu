/* rope.cu -- kernels of the rope family. */
#include "kernels/cuda/device.cuh"

extern "C" const lm_kernel lm_rope_cuda_kernels[] = { LM_CUDA_END };
