/* SPDX-License-Identifier: Apache-2.0 */
/* selftest.h -- kernels that tests/unit/test_emu.c tries the emulation with. */
#ifndef LM_EMU_SELFTEST_H
#define LM_EMU_SELFTEST_H

#include <stdint.h>

#include "cuda_runtime_api.h"

#ifdef __cplusplus
extern "C" {
#endif

/* y[i] = value for i < n; one thread for each. */
void emu_try_fill(float *y, float value, int64_t n, cudaStream_t s);
/* y[i] = x[i] + 1 */
void emu_try_next(const float *x, float *y, int64_t n, cudaStream_t s);
/* y[block] = the sum of the block's part of x: shuffles, static shared memory, barriers. */
void emu_try_sum(const float *x, float *y, int64_t n, int blocks, int threads, cudaStream_t s);
/* Values go round the block `rounds` times through dynamic shared memory; without the second
 * barrier when racy. */
void emu_try_rotate(float *y, int threads, int rounds, int racy, cudaStream_t s);
/* One warp: 8 results for each lane, see selftest.cpp. */
void emu_try_warp(uint32_t *y, cudaStream_t s);
/* y[0..2]: number of threads with an odd index, whether any has index 5, whether all are within. */
void emu_try_votes(int *y, int threads, cudaStream_t s);
/* Sums by atomics over `blocks` blocks of 64 threads; y has 4 numbers. */
void emu_try_atomics(unsigned *y, int blocks, cudaStream_t s);
/* The number of each thread of a 3-D grid of 3-D blocks, at its place: 2*3*2 blocks of 4*2*3. */
void emu_try_places(int *y, cudaStream_t s);
/* The blocks' order: y[k] = which block came k-th, by an atomic counter at y[blocks]; and at
 * y[blocks + 1] the thread of 32 that came last. */
void emu_try_order(int *y, int blocks, cudaStream_t s);

/* Errors that must be detected. */
void emu_try_diverge(int threads, int at_barrier, cudaStream_t s);
void emu_try_half_warp(int barrier, cudaStream_t s);
void emu_try_mixed_warp(cudaStream_t s);
void emu_try_shared(size_t asked, size_t written, cudaStream_t s);
void emu_try_shared_allowed(size_t bytes, cudaStream_t s);
void emu_try_write(float *y, int64_t at, cudaStream_t s);
void emu_try_shape(unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   cudaStream_t s);

#ifdef __cplusplus
}
#endif
#endif
