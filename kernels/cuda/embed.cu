/* embed.cu -- kernels of the embed family. */
#include "kernels/cuda/device.cuh"

extern "C" const lm_kernel lm_embed_cuda_kernels[] = { LM_CUDA_END };
