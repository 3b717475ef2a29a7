/* SPDX-License-Identifier: Apache-2.0 */
/* mma_probe.cpp -- one warp of the functions of kernels/cuda/mma.cuh on registers that a test filled. */
#include "kernels/cuda/mma.cuh"

template <class T> static void multiply(const uint32_t *a, const uint32_t *b, float *c)
{
    __shared__ __align__(16) uint32_t box[MMA_BOX];
    int lane = (int)threadIdx.x;
    mma_c x;
    mma_a y;
    mma_b z;
    memcpy(&x, c + 4 * lane, sizeof x);
    memcpy(&y, a + 4 * lane, sizeof y);
    memcpy(&z, b + 2 * lane, sizeof z);
    mma<T, true>(x, y, z, box);
    memcpy(c + 4 * lane, &x, sizeof x);
}

template <bool TURNED> static void gather(const bf16 *rows, uint32_t *x)
{
    __shared__ __align__(16) uint32_t box[MMA_BOX];
    __shared__ __align__(16) bf16 tile[32 * 8];
    int lane = (int)threadIdx.x;
    memcpy(tile + 8 * lane, rows + 8 * lane, 16);
    __syncwarp();
    mma_a y = ldmatrix<bf16, TURNED, true>(tile + 8 * lane, box);
    memcpy(x + 4 * lane, &y, sizeof y);
}

/* Registers a [32][4], b [32][2], c [32][4] by lane; c += a b. */
extern "C" LM_EMU_PUBLIC void lm_emu_mma(bool half, const uint32_t *a, const uint32_t *b, float *c)
{
    lm_stream s = {};
    if (half)
        LM_LAUNCH(multiply<f16>, 1, 32, 0, &s, a, b, c);
    else
        LM_LAUNCH(multiply<bf16>, 1, 32, 0, &s, a, b, c);
    cudaDeviceSynchronize();
}

/* Row i of matrix m is at rows[8m + i][8]; registers x [32][4] by lane. */
extern "C" LM_EMU_PUBLIC void lm_emu_ldmatrix(bool turned, const uint16_t *rows, uint32_t *x)
{
    lm_stream s = {};
    const bf16 *from = reinterpret_cast<const bf16 *>(rows);
    if (turned)
        LM_LAUNCH(gather<true>, 1, 32, 0, &s, from, x);
    else
        LM_LAUNCH(gather<false>, 1, 32, 0, &s, from, x);
    cudaDeviceSynchronize();
}
