/* SPDX-License-Identifier: Apache-2.0 */
/* rows.cuh -- the product of few rows (a token being decoded) with a matrix whose rows lie along k:
 * a warp makes some columns, its lanes read 16 bytes of the matrix's rows at a time, each byte
 * once.  Used by gemm_plain.cu and norm_linear.cu.
 *
 * A lane sums the packs lane, lane+32, ... of k in order, and a butterfly adds the lanes: the bits
 * of a sum depend on k and the type alone, not on how many rows or columns are made beside it. */
#ifndef LM_KERNELS_CUDA_ROWS_CUH
#define LM_KERNELS_CUDA_ROWS_CUH

#include "kernels/cuda/device.cuh"

/* The most rows of a product of this kind: in general, and where cuBLASLt is the alternative. */
static const int64_t most_few_rows = 8, lt_few_rows = 4;

/* A pack of a row, of which `left` elements are inside. */
template <class T> __device__ inline pack<T, wide<T>::n> lane_pack(const T *at, int64_t left)
{
    const int P = wide<T>::n;
    pack<T, P> v;
#pragma unroll
    for (int e = 0; e < P; e++)
        v.v[e] = e < left ? at[e] : from_float<T>(0);
    return v;
}

/* m rows (at most M) of A and COLS rows of B. */
template <class T, int COLS> struct few_factors {
    const T *a, *b[COLS];
    int64_t lda, m, k;
};

/* Add the products of U packs of each row, 32 packs apart, from element q on, to the sums: rows of
 * B are read first, so that many reads are in flight at once.  WHOLE: packs are aligned, and k ends
 * with a pack. */
template <class T, int M, int COLS, int U, bool WHOLE>
__device__ inline void add_packs(float (*sum)[COLS], const few_factors<T, COLS> &f, int64_t q)
{
    const int P = wide<T>::n;
    typedef pack<T, P> part;
    part w[U][COLS];
#pragma unroll
    for (int u = 0; u < U; u++) {
#pragma unroll
        for (int j = 0; j < COLS; j++) {
            int64_t k = q + u * 32 * P;
            w[u][j] = part{};
            if (k < f.k)
                w[u][j] = WHOLE ? *(const part *)(f.b[j] + k) : lane_pack(f.b[j] + k, f.k - k);
        }
    }
#pragma unroll
    for (int u = 0; u < U; u++) {
#pragma unroll
        for (int i = 0; i < M; i++) {
            int64_t k = q + u * 32 * P;
            const T *at = f.a + (i < f.m ? i : f.m - 1) * f.lda + k;
            part x = {};
            if (k < f.k)
                x = WHOLE ? *(const part *)at : lane_pack(at, f.k - k);
#pragma unroll
            for (int j = 0; j < COLS; j++) {
#pragma unroll
                for (int e = 0; e < P; e++)
                    sum[i][j] = fmaf(to_float(x.v[e]), to_float(w[u][j].v[e]), sum[i][j]);
            }
        }
    }
}

/* A lane's part of the sums of rows i of A times rows j of B, U packs of each at once, as registers
 * allow; sum begins as zeros.  whole: see WHOLE. */
template <class T, int M, int COLS, int U>
__device__ inline void few_sums(float (*sum)[COLS], const few_factors<T, COLS> &f, bool whole)
{
    const int P = wide<T>::n;
    int64_t q = (int64_t)(threadIdx.x % 32) * P;
#pragma unroll 1
    for (; whole && q < f.k; q += U * 32 * P)
        add_packs<T, M, COLS, U, true>(sum, f, q);
#pragma unroll 1
    for (; q < f.k; q += 32 * P)
        add_packs<T, M, COLS, 1, false>(sum, f, q);
}

/* Sum V numbers (1, 2, 4, ... 32) over the 32 lanes of a warp: lane i gets the sum of number i /
 * (32 / V).  A step between lanes O apart halves the count of numbers, until one is left; the order
 * of additions is that of warp_sum. */
template <int V, int O = 16> __device__ inline float shared_sums(float *v)
{
    if constexpr (O == 0) {
        return v[0];
    } else {
        const int LEFT = V > 1 ? V / 2 : 1;
        bool high = V > 1 && (threadIdx.x & O);
#pragma unroll
        for (int i = 0; i < LEFT; i++) {
            float low = v[i], other = v[V > 1 ? i + LEFT : i];
            v[i] = (high ? other : low) + __shfl_xor_sync(0xffffffffu, high ? low : other, O);
        }
        return shared_sums<LEFT, O / 2>(v);
    }
}

#endif
