/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_tile.cuh -- one tile of a matrix product in plain CUDA: used by the kernels of
 * gemm_plain.cu, grouped.cu and fp8.cu.
 *
 * A block of 256 threads makes SIDE x SIDE of C: 16 steps of k of both factors lie in shared memory
 * as floats, k outermost, while the next 16 are being read into registers; a thread holds 8x8 (SIDE
 * 128) or 4x4 (SIDE 64) sums and reads 4 floats at a time.  Sums go over k in order. */
#ifndef LM_KERNELS_CUDA_GEMM_TILE_CUH
#define LM_KERNELS_CUDA_GEMM_TILE_CUH

#include "kernels/cuda/gelu.cuh"

static const int depth = 16; /* steps of k in shared memory */
static const int block_threads = 256;
static const int64_t flush = 1024; /* steps of k in one sum into F32; a multiple of depth */
static const int64_t band = 8; /* tiles of m for which successive blocks share B's columns in L2 */

/* The arguments of all kernels of tiles. */
struct tiling {
    int64_t m, n, k;
    int64_t lda, ldb, ldc;
    int64_t part_k;    /* steps of k that one part sums: k when there is one */
    int64_t part_size; /* floats from one part's C to the next */
    int64_t tiles_m, tiles_n, parts;
    const float *bias;
    /* Rows can be read 16 bytes at a time; rows of C can be written, and the bias read, 4 elements
     * at a time. */
    bool pack_a, pack_b, pack_c;
    bool wide_c; /* C is F32 */
    bool accumulate;
    int64_t stride_a, stride_b, stride_c; /* from one product of a batch to the next */
    int64_t batch0;                       /* the product of the first blocks */
    lm_activation act;                    /* as in gemm_call; a part of k has none */
    bool slope;
    void *z;
    float *a_sum; /* m floats to a part */
};

/* ---- a tile's factors: memory -> registers -> shared memory ---- */

/* A factor of R rows (of op(A), or columns of op(B)) by `depth` steps of k.  K_INSIDE: it is
 * stored with k contiguous, [row][k]; else [k][row].  Each thread carries `chunks` packs of P
 * elements along the contiguous dimension. */
template <class T, bool K_INSIDE, int R> struct part_of {
    static const int P = wide<T>::n;
    static const int line = K_INSIDE ? depth / P : R / P; /* packs in a stored line */
    static const int all = R * depth / P;
    static const int chunks = (all + block_threads - 1) / block_threads;
    static const int pitch = R + 4; /* floats of a step in shared memory; keeps 16-byte alignment */
    static const int floats = depth * pitch;
};

/* Where a thread reads its first pack of the next round. */
template <class T> struct cursor {
    const T *at;
    int64_t pitch;
    int rows; /* of the tile that are inside, at most R */
};

template <class T, bool K_INSIDE, int R>
__device__ inline cursor<T> cursor_at(const T *x, int64_t ld, int64_t row0, int64_t rows,
                                      int64_t k0)
{
    typedef part_of<T, K_INSIDE, R> S;
    int inner = (int)threadIdx.x % S::line * S::P, outer = (int)threadIdx.x / S::line;
    cursor<T> c;

    c.at = x + (K_INSIDE ? (row0 + outer) * ld + k0 + inner : (k0 + outer) * ld + row0 + inner);
    c.pitch = ld;
    c.rows = (int)(rows - row0 < R ? rows - row0 : R);
    return c;
}

/* Read the next `depth` steps, of which `steps` are inside, and move on; zeros for what is
 * outside. */
template <class T, bool K_INSIDE, int R>
__device__ inline void fetch(pack<T, wide<T>::n> *staged, cursor<T> *x, int steps, bool packed)
{
    typedef part_of<T, K_INSIDE, R> S;
    int inner = (int)threadIdx.x % S::line * S::P, outer = (int)threadIdx.x / S::line;
#pragma unroll
    for (int c = 0; c < S::chunks; c++) {
        const int down = block_threads / S::line; /* lines from one chunk to the next */
        int line = outer + c * down;
        const T *at = x->at + c * down * x->pitch;
        int left =
            K_INSIDE ? (line < x->rows ? steps - inner : 0) : (line < steps ? x->rows - inner : 0);

        if (S::all % block_threads && (int)threadIdx.x + c * block_threads >= S::all)
            left = 0;
        if (packed && left >= S::P) {
            staged[c] = *(const pack<T, S::P> *)at;
        } else {
#pragma unroll
            for (int e = 0; e < S::P; e++)
                staged[c].v[e] = e < left ? at[e] : T();
        }
    }
    x->at += K_INSIDE ? depth : depth * x->pitch;
}

/* Store them in shared memory as floats, [step][row]. */
template <class T, bool K_INSIDE, int R>
__device__ inline void place(float *shared, const pack<T, wide<T>::n> *staged)
{
    typedef part_of<T, K_INSIDE, R> S;
#pragma unroll
    for (int c = 0; c < S::chunks; c++) {
        int i = (int)threadIdx.x + c * block_threads;
        int inner = i % S::line * S::P, outer = i / S::line;

        if (S::all % block_threads && i >= S::all)
            break;
#pragma unroll
        for (int e = 0; e < S::P; e += 4) {
            if (K_INSIDE) {
#pragma unroll
                for (int f = e; f < e + 4; f++)
                    shared[(inner + f) * S::pitch + outer] = to_float(staged[c].v[f]);
            } else {
                pack<float, 4> v = { { to_float(staged[c].v[e]), to_float(staged[c].v[e + 1]),
                                       to_float(staged[c].v[e + 2]),
                                       to_float(staged[c].v[e + 3]) } };
                *(pack<float, 4> *)(shared + outer * S::pitch + inner + e) = v;
            }
        }
    }
}

/* ---- its product ---- */

/* 8 warps as 4 x 2, their lanes as 4 x 8, each with 4 x 4 sums (SIDE / 64 times in both
 * directions): where this thread's first row and column lie in a tile of SIDE x SIDE. */
template <int SIDE> __device__ inline int first_row(void)
{
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    return warp / 2 * (SIDE / 4) + lane / 8 * 4;
}
template <int SIDE> __device__ inline int first_col(void)
{
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    return warp % 2 * (SIDE / 2) + lane % 8 * 4;
}

/* sum[SIDE/16][SIDE/16] += the product over `depth` steps. */
template <int SIDE>
__device__ inline void multiply(float (*sum)[SIDE / 16], const float *a, const float *b)
{
    const int pitch = SIDE + 4, per = SIDE / 16;
    const float *at = a + first_row<SIDE>(), *bt = b + first_col<SIDE>();

#pragma unroll
    for (int q = 0; q < depth; q++) {
        pack<float, 4> x[per / 4], y[per / 4];
#pragma unroll
        for (int h = 0; h < per / 4; h++) {
            x[h] = *(const pack<float, 4> *)(at + q * pitch + h * 16);
            y[h] = *(const pack<float, 4> *)(bt + q * pitch + h * 32);
        }
#pragma unroll
        for (int i = 0; i < per; i++) {
#pragma unroll
            for (int j = 0; j < per; j++)
                sum[i][j] = fmaf(x[i / 4].v[i % 4], y[j / 4].v[j % 4], sum[i][j]);
        }
    }
}

/* Shared memory of one factor of SIDE rows, twice: what is multiplied and what comes next. */
template <int SIDE> struct room {
    pack<float, 4> v[2 * depth * (SIDE + 4) / 4];
};

/* The sum of this thread's row of A over `depth` steps. */
template <int SIDE> __device__ inline float sum_row(const float *a)
{
    float s = 0;
#pragma unroll
    for (int q = 0; q < depth; q++)
        s += a[q * (SIDE + 4) + threadIdx.x];
    return s;
}

/* A factor of numbers in memory: a part of it in flight to shared memory. */
template <class T, bool K_INSIDE, int R> struct number_feed {
    typedef part_of<T, K_INSIDE, R> part;
    cursor<T> from;
    bool packed;
    pack<T, part::P> staged[part::chunks];
    __device__ inline void fetch_next(int steps)
    {
        fetch<T, K_INSIDE, R>(staged, &from, steps, packed);
    }
    __device__ inline void place_at(float *shared) const
    {
        place<T, K_INSIDE, R>(shared, staged);
    }
};

/* sum[SIDE/16][SIDE/16] += the steps k0 to k1 that the feeds of a tile of C bring, whose first column this is.  All threads
 * of the block call it.  SUMS: the tiles of C's first column add to row_sum what the steps of row `threadIdx.x` of A give,
 * for the first SIDE threads. */
template <int SIDE, bool SUMS, class FA, class FB>
__device__ inline void sum_fed(float (*sum)[SIDE / 16], room<SIDE> *room_a, room<SIDE> *room_b,
                               FA *a, FB *b, int64_t col, int64_t k0, int64_t k1,
                               float *row_sum = nullptr)
{
    const int floats = part_of<float, true, SIDE>::floats;
    float *at = (float *)room_a->v, *bt = (float *)room_b->v;
    int turn = 0;

    /* Pipelined: data fetched in one round are multiplied in the next. */
    for (int64_t q = k0 - depth; q < k1; q += depth, turn ^= 1) {
        int64_t left = k1 - q - depth;
        if (left > 0) {
            int steps = left < depth ? (int)left : depth;
            a->fetch_next(steps);
            b->fetch_next(steps);
        }
        if (q >= k0)
            multiply<SIDE>(sum, at + turn * floats, bt + turn * floats);
        if (SUMS && q >= k0 && col == 0 && threadIdx.x < SIDE)
            *row_sum += sum_row<SIDE>(at + turn * floats);
        if (left > 0) {
            a->place_at(at + (turn ^ 1) * floats);
            b->place_at(bt + (turn ^ 1) * floats);
        }
        __syncthreads();
    }
}

/* The same of numbers in memory, for the tile whose first row and column these are; X, Y: types of A and B. */
template <class X, class Y, bool TA, bool TB, int SIDE, bool SUMS = false>
__device__ inline void sum_tile(float (*sum)[SIDE / 16], room<SIDE> *room_a, room<SIDE> *room_b,
                                const X *a, const Y *b, const tiling &t, int64_t row, int64_t m,
                                int64_t col, int64_t k0, int64_t k1, float *row_sum = nullptr)
{
    number_feed<X, !TA, SIDE> from_a;
    number_feed<Y, TB, SIDE> from_b;

    from_a.from = cursor_at<X, !TA, SIDE>(a, t.lda, row, m, k0);
    from_a.packed = t.pack_a;
    from_b.from = cursor_at<Y, TB, SIDE>(b, t.ldb, col, t.n, k0);
    from_b.packed = t.pack_b;
    sum_fed<SIDE, SUMS>(sum, room_a, room_b, &from_a, &from_b, col, k0, k1, row_sum);
}

/* Load four neighbours, or as many of them as are inside. */
template <class C> __device__ inline pack<C, 4> get4(const C *from, bool whole, int64_t left)
{
    pack<C, 4> v = {};

    if (whole)
        return *(const pack<C, 4> *)from;
#pragma unroll
    for (int j = 0; j < 4; j++)
        if (j < left)
            v.v[j] = from[j];
    return v;
}
template <class C>
__device__ inline void give4(C *to, const pack<C, 4> &v, bool whole, int64_t left)
{
    if (whole) {
        *(pack<C, 4> *)to = v;
        return;
    }
#pragma unroll
    for (int j = 0; j < 4; j++)
        if (j < left)
            to[j] = v.v[j];
}

/* Four neighbours of a row of C, of which `left` are inside; whole: all, and they are a pack. */
template <class C>
__device__ inline void put4(C *c, const float *sum, const float *bias, int64_t left, bool whole,
                            bool accumulate)
{
    pack<float, 4> add = {};
    pack<C, 4> v = {};

    if (bias)
        add = get4(bias, whole, left);
    if (accumulate)
        v = get4(c, whole, left);
#pragma unroll
    for (int j = 0; j < 4; j++)
        v.v[j] = from_float<C>(to_float(v.v[j]) + (sum[j] + add.v[j]));
    give4(c, v, whole, left);
}

/* The place in C of this thread's g-th four sums. */
template <int SIDE> __device__ inline int row_of(int g)
{
    int i = g / (SIDE / 64);
    return first_row<SIDE>() + i / 4 * 16 + i % 4;
}
template <int SIDE> __device__ inline int col_of(int g)
{
    return first_col<SIDE>() + g % (SIDE / 64) * 32;
}

/* Move the other sums up by four, so that a loop finds the next ones in the same registers, and its
 * code exists only once. */
template <int SIDE> __device__ inline void move_up(float (*sum)[SIDE / 16])
{
    const int per = SIDE / 16;
#pragma unroll
    for (int e = 0; e + 4 < per * per; e++)
        sum[e / per][e % per] = sum[(e + 4) / per][(e + 4) % per];
}

/* C (+)= sum (+ bias), within m rows and t.n columns.  Destroys the sums. */
template <class C, int SIDE>
__device__ inline void put_tile(C *c, float (*sum)[SIDE / 16], const tiling &t, int64_t row0,
                                int64_t m, int64_t col0, const float *bias, bool accumulate)
{
    const int per = SIDE / 16, fours = per * per / 4;

    if (t.pack_c && row0 + SIDE <= m && col0 + SIDE <= t.n) {
        C *to = c + row0 * t.ldc + col0;
        const float *add = bias ? bias + col0 : nullptr;
#pragma unroll
        for (int g = 0; g < fours; g++)
            put4(to + row_of<SIDE>(g) * t.ldc + col_of<SIDE>(g),
                 sum[g / (per / 4)] + g % (per / 4) * 4, add ? add + col_of<SIDE>(g) : nullptr, 4,
                 true, accumulate);
        return;
    }
#pragma unroll 1
    for (int g = 0; g < fours; g++) {
        int64_t row = row0 + row_of<SIDE>(g), col = col0 + col_of<SIDE>(g), left = t.n - col;
        if (row < m && left > 0)
            put4(c + row * t.ldc + col, sum[0], bias ? bias + col : nullptr, left,
                 t.pack_c && left >= 4, accumulate);
        move_up<SIDE>(sum);
    }
}

/* ---- functions of the sums ---- */

/* The function of a sum with its bias, for the element `at` of C; z receives, or provides, the
 * argument of the function or of its slope. */
template <class C> __device__ inline float shaped(const tiling &t, float x, int64_t at)
{
    C *z = (C *)t.z + at;

    if (t.slope)
        return x * gelu_slope_of<C>(t.act, to_float(*z));
    if (t.z)
        *z = from_float<C>(x);
    return gelu_of<C>(t.act, x);
}

/* Four neighbours of a row of C, of which `left` are inside. */
template <class C>
__device__ inline void put4_shaped(C *c, const tiling &t, int64_t at, const float *sum,
                                   const float *bias, bool accumulate, int64_t left)
{
    bool whole = t.pack_c && left >= 4;
    C *z = (C *)t.z + at;
    pack<C, 4> v = {}, kept = {};
    pack<float, 4> add = {};

    if (bias)
        add = get4(bias, whole, left);
    if (accumulate)
        v = get4(c + at, whole, left);
    if (t.slope)
        kept = get4(z, whole, left);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float x = to_float(v.v[j]) + (sum[j] + add.v[j]);
        if (t.slope) {
            v.v[j] = from_float<C>(x * gelu_slope_of<C>(t.act, to_float(kept.v[j])));
        } else {
            kept.v[j] = from_float<C>(x);
            v.v[j] = from_float<C>(gelu_of<C>(t.act, x));
        }
    }
    give4(c + at, v, whole, left);
    if (t.z && !t.slope)
        give4(z, kept, whole, left);
}

/* put_tile with a function; m: all rows. */
template <class C, int SIDE>
__device__ inline void put_shaped(C *c, float (*sum)[SIDE / 16], const tiling &t, int64_t row0,
                                  int64_t col0, const float *bias, bool accumulate)
{
#pragma unroll 1
    for (int g = 0; g < SIDE * SIDE / 1024; g++) {
        int64_t row = row0 + row_of<SIDE>(g), col = col0 + col_of<SIDE>(g), left = t.n - col;
        if (row < t.m && left > 0)
            put4_shaped(c, t, row * t.ldc + col, sum[0], bias ? bias + col : nullptr, accumulate,
                        left);
        move_up<SIDE>(sum);
    }
}

/* Tiles in bands of `band` rows of tiles, so that blocks that run together share lines of both
 * factors. */
__device__ inline void tile_at(const tiling &t, int64_t i, int64_t *row, int64_t *col)
{
    int64_t first = i / (band * t.tiles_n) * band, in_band = i % (band * t.tiles_n);
    int64_t high = t.tiles_m - first < band ? t.tiles_m - first : band;

    *row = first + in_band % high;
    *col = in_band / high;
}

static inline int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

#endif
