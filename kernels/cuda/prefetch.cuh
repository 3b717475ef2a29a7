/* SPDX-License-Identifier: Apache-2.0 */
/* prefetch.cuh -- prefetches memory to the L2 cache: no thread waits for it, and it occupies no
 * register. */
#ifndef LM_KERNELS_CUDA_PREFETCH_CUH
#define LM_KERNELS_CUDA_PREFETCH_CUH

#include "kernels/cuda/device.cuh"

enum { CACHE_LINE = 128 };

/* Bytes that a kernel prefetches on each multiprocessor: enough to hide the work before the reads,
 * and few compared with the cache. */
static const int64_t most_ahead = 128 << 10;

/* Prefetch the line of device memory that contains p. */
static __device__ inline void ask_line(const void *p)
{
#ifndef LM_EMU
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#else
    (void)p;
#endif
}

#endif
