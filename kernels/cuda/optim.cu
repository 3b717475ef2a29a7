/* optim.cu -- kernels of the optim family. */
#include "kernels/cuda/device.cuh"

extern "C" const lm_kernel lm_optim_cuda_kernels[] = { LM_CUDA_END };
