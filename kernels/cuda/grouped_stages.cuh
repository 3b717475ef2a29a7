/* SPDX-License-Identifier: Apache-2.0 */
/* grouped_stages.cuh -- one tile of a product by tensor cores: used by grouped_tensor.cu and grouped_codes.cu.
 *
 * A block of 8 warps makes 128 x 128 of the result, a warp 32 x 64 of it: 16 fragments of sums in registers.  32 steps
 * of the depth of both factors are one stage in shared memory; while one is multiplied, two more arrive.  Lines of a
 * stage are those of memory, with the depth along them or across them (TURNED): ldmatrix turns the latter.
 *
 * Numbers outside of a tile, and rows of other groups, are zeros in shared memory.  Warps whose rows or columns are all
 * outside multiply nothing, so that a group of few rows costs little more than reading its weights.  The order of each
 * sum follows from the depth alone: the bits of a row do not depend on its group's size or place. */
#ifndef LM_KERNELS_CUDA_GROUPED_STAGES_CUH
#define LM_KERNELS_CUDA_GROUPED_STAGES_CUH

#include "kernels/cuda/grouped.cuh"
#include "kernels/cuda/mma.cuh"

static const int side = 128, steps = 32, stages = 3;
static const int warp_rows = 32, warp_cols = 64;

/* One factor's part of a stage: 128 rows (or columns) of the result by 32 steps.  Lines lie 16 bytes more than their
 * length apart, so that 8 neighbours are in different banks. */
template <bool TURNED> struct stage_part {
    static const int across = TURNED ? side : steps, lines = TURNED ? steps : side;
    static const int pitch = across + 8, size = lines * pitch;
};

template <bool TA, bool TB> struct shared_part {
    static const int stage = stage_part<TA>::size + stage_part<TB>::size;
    static const int size = stages * stage * 2; /* bytes */
    /* Warps store their sums through shared memory, in rows of warp_cols + 8. */
    static_assert(size >= block_threads / 32 * warp_rows * (warp_cols + 8) * 2,
                  "room of all warps");
#ifdef LM_EMU
    static const int bytes = size + block_threads / 32 * MMA_BOX * 4;
#else
    static const int bytes = size;
#endif
};

__device__ inline int warp_row(void)
{
    return (int)threadIdx.x / 64 * warp_rows;
}
__device__ inline int warp_col(void)
{
    return (int)threadIdx.x / 32 % 2 * warp_cols;
}

/* ---- memory -> shared memory ---- */

/* Where this thread reads its first pack of the next stage. */
template <class T> struct reader {
    const T *at, *any; /* any: an address to name where nothing is read */
    int64_t pitch;
    int rows, left; /* rows of the tile that are inside, at most `side`; steps from here on */
};

/* The part of x that begins `from` numbers after it: so many rows and steps. */
template <class T, bool TURNED>
__device__ inline reader<T> reader_of(const T *x, int64_t from, int64_t pitch, int rows, int left)
{
    const int n = wide<T>::n, packs = stage_part<TURNED>::across / n;
    int inner = (int)threadIdx.x % packs * n, line = (int)threadIdx.x / packs;
    reader<T> r;

    r.at = x + from + line * pitch + inner;
    r.any = x;
    r.pitch = pitch;
    r.rows = rows;
    r.left = left;
    return r;
}

/* Begin to copy the next stage, and move on. */
template <class T, bool TURNED> __device__ inline void read_stage(T *to, reader<T> *r)
{
    typedef stage_part<TURNED> S;
    const int n = wide<T>::n, packs = S::across / n, down = block_threads / packs;
    int inner = (int)threadIdx.x % packs * n, line = (int)threadIdx.x / packs;

#pragma unroll
    for (int c = 0; c < S::lines / down; c++) {
        int at = line + c * down;
        bool there = TURNED ? at < r->left && inner < r->rows : at < r->rows && inner < r->left;
        copy_pack<true>(
            reinterpret_cast<pack<T, n> *>(to + at * S::pitch + inner),
            reinterpret_cast<const pack<T, n> *>(there ? r->at + c * down * r->pitch : r->any),
            there);
    }
    r->at += TURNED ? steps * r->pitch : steps;
    r->left -= steps;
}

/* ---- the product ---- */

/* Rows row to row + 15 and steps k to k + 15 of A. */
template <class T, bool TURNED>
__device__ inline mma_a rows_of_a(const T *a, int row, int k, uint32_t *box)
{
    const int pitch = stage_part<TURNED>::pitch, lane = (int)threadIdx.x % 32;
    if (TURNED)
        return ldmatrix<T, true, true>(
            a + (k + lane % 8 + lane / 16 * 8) * pitch + row + lane / 8 % 2 * 8, box);
    return ldmatrix<T, false, true>(a + (row + lane % 16) * pitch + k + lane / 16 * 8, box);
}

/* Columns col to col + 15 and steps k to k + 15 of B: two fragments, of two registers each. */
template <class T, bool TURNED>
__device__ inline mma_a cols_of_b(const T *b, int col, int k, uint32_t *box)
{
    const int pitch = stage_part<TURNED>::pitch, lane = (int)threadIdx.x % 32;
    if (TURNED)
        return ldmatrix<T, true, true>(b + (k + lane % 16) * pitch + col + lane / 16 * 8, box);
    return ldmatrix<T, false, true>(
        b + (col + lane % 8 + lane / 16 * 8) * pitch + k + lane / 8 % 2 * 8, box);
}

/* The 32 x 64 sums of a warp: of rows 16 i and columns 8 n on. */
struct warp_sums {
    mma_c v[warp_rows / 16][warp_cols / 8];
};

template <class T, bool TA, bool TB>
__device__ inline void multiply_stage(warp_sums *sum, const T *a, const T *b, uint32_t *box)
{
#pragma unroll
    for (int k = 0; k < steps; k += 16) {
        mma_a x[warp_rows / 16];
#pragma unroll
        for (int i = 0; i < warp_rows / 16; i++)
            x[i] = rows_of_a<T, TA>(a, warp_row() + 16 * i, k, box);
#pragma unroll
        for (int n = 0; n < warp_cols / 8; n += 2) {
            mma_a y = cols_of_b<T, TB>(b, warp_col() + 8 * n, k, box);
#pragma unroll
            for (int i = 0; i < warp_rows / 16; i++) {
                mma<T, true>(sum->v[i][n], x[i], mma_b{ { y.r[0], y.r[1] } }, box);
                mma<T, true>(sum->v[i][n + 1], x[i], mma_b{ { y.r[2], y.r[3] } }, box);
            }
        }
    }
}

/* sum += the product of both factors' rows over their steps; B: a reader with a read_stage of its own.  All threads of the
 * block call it; afterwards the shared memory is free. */
template <class T, bool TA, bool TB, class B>
__device__ inline void sum_stages(warp_sums *sum, T *shared, reader<T> a, B b)
{
    const int stage = shared_part<TA, TB>::stage, of_a = stage_part<TA>::size;
    uint32_t *box = reinterpret_cast<uint32_t *>(shared + stages * stage) +
                    (int)threadIdx.x / 32 * MMA_BOX; /* only where the emulation needs it */
    const bool mine = warp_row() < a.rows && warp_col() < b.rows;
    const int count = (a.left + steps - 1) / steps;

    __syncthreads(); /* no warp stores sums of the previous tile any longer */
#pragma unroll
    for (int s = 0; s < stages - 1; s++) {
        if (s < count) {
            read_stage<T, TA>(shared + s * stage, &a);
            read_stage<T, TB>(shared + s * stage + of_a, &b);
        }
        copies_close<true>();
    }
    int now = 0, next = stages - 1;
#pragma unroll 1
    for (int i = 0; i < count; i++) {
        copies_wait<true, stages - 2>();
        __syncthreads(); /* stage i has arrived, and no warp reads the one before it any longer */
        if (i + stages - 1 < count) {
            read_stage<T, TA>(shared + next * stage, &a);
            read_stage<T, TB>(shared + next * stage + of_a, &b);
        }
        copies_close<true>();
        if (mine)
            multiply_stage<T, TA, TB>(sum, shared + now * stage, shared + now * stage + of_a, box);
        now = now + 1 < stages ? now + 1 : 0;
        next = next + 1 < stages ? next + 1 : 0;
    }
    __syncthreads();
}

/* ---- sums -> memory ---- */

/* Rounded to T, through rows of shared memory of this warp's own; c: the tile, of which `rows` by `cols` are inside. */
template <class T>
__device__ inline void store_rounded(T *c, int64_t pitch, const warp_sums &sum, T *shared, int rows,
                                     int cols)
{
    const int n = wide<T>::n, ld = warp_cols + 8, packs = warp_cols / n;
    const int lane = (int)threadIdx.x % 32;
    T *mine = shared + (int)threadIdx.x / 32 * warp_rows * ld;

#pragma unroll
    for (int i = 0; i < warp_rows / 8; i++)
#pragma unroll
        for (int j = 0; j < warp_cols / 8; j++) {
            const float *r = sum.v[i / 2][j].r + i % 2 * 2;
            *reinterpret_cast<uint32_t *>(mine + (8 * i + lane / 4) * ld + 8 * j + lane % 4 * 2) =
                round_pair<T>(r[0], r[1]);
        }
    __syncwarp();
#pragma unroll
    for (int p = lane; p < warp_rows * packs; p += 32) {
        int row = p / packs, col = p % packs * n;
        if (warp_row() + row < rows && warp_col() + col < cols)
            *reinterpret_cast<pack<T, n> *>(c + (warp_row() + row) * pitch + warp_col() + col) =
                *reinterpret_cast<const pack<T, n> *>(mine + row * ld + col);
    }
}

/* Of the numbers that are left, those in one tile. */
__device__ inline int inside(int64_t left)
{
    return (int)(left < side ? left : side);
}

#endif
