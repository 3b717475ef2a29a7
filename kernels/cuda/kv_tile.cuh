/* SPDX-License-Identifier: Apache-2.0 */
/* kv_tile.cuh -- tokens of a coded cache in shared memory (kernels/kv.h), decoded tile by tile as floats, or as numbers S of
 * 16 bits: the cache itself is never expanded.  Tokens that are not in pages come from the tail, or from the new rows.
 *
 * A word of a line (numeric/kv_format.h) holds four channels of a token of keys, or four tokens of a channel of values.  16
 * threads read a line of 64 bytes. */
#ifndef LM_KERNELS_CUDA_KV_TILE_CUH
#define LM_KERNELS_CUDA_KV_TILE_CUH

#include "kernels/cuda/kv_encode.cuh"
#include "kernels/cuda/kv_rows.cuh"

/* A side of one key/value head of one sequence, as tiles read it. */
template <class T> struct kv_reading {
    kv_source<T> plain;
    int64_t b, kv;
    int coded; /* tokens [sinks, coded) are in pages */
    const float
        *table; /* in shared memory: levels; then scales and minima of channels with fixed ranges */
};

/* Numbers of shared memory of a side's tables. */
__host__ __device__ inline int kv_table_numbers(const kv_side &f)
{
    return (f.levels == LM_KV_TABLE ? LM_KV_MAX_TABLE : 0) + (f.fixed ? 2 * f.D : 0);
}

/* Fill them: all threads of the block, before a barrier. */
__device__ inline void kv_fill_tables(const kv_side &f, int64_t kv, float *table)
{
    if (f.levels == LM_KV_TABLE) {
        for (int i = (int)threadIdx.x; i < LM_KV_MAX_TABLE; i += (int)blockDim.x)
            table[i] = f.table[i];
        table += LM_KV_MAX_TABLE;
    }
    for (int d = (int)threadIdx.x; f.fixed && d < f.D; d += (int)blockDim.x) {
        const kv_scale by = kv_fixed_scale(f, kv, d);
        table[d] = (float)by.s;
        table[f.D + d] = (float)by.m;
    }
}

template <class T>
__device__ inline kv_reading<T> kv_reading_of(const kv_rows &r, const kv_side &f, const T *qkv,
                                              int64_t b, int64_t kv, int side, const float *table)
{
    kv_reading<T> x;
    x.plain = kv_source_of(r, f, qkv, b, kv, side);
    x.b = b;
    x.kv = kv;
    x.coded = kv_coded_end(f, x.plain.used);
    x.table = table;
    return x;
}

/* Four codes of word `word` (0 to 15) of a line of the tile at `tile`, a byte each. */
__device__ inline uint32_t kv_four_codes(const kv_side &f, const char *tile, int line, int word)
{
    const int low = f.low, high = f.bits - low;
    const int shift = low == 8 ? 0 : low == 4 ? 1 : low == 2 ? 2 : 3; /* log2 of lines in a unit */
    const uint32_t *at = (const uint32_t *)(tile + (line >> shift) * LM_KV_LINE);
    const uint32_t some = (1u << low) - 1;
    uint32_t x = at[word] >> (low * (line & ((1 << shift) - 1))) & some * 0x01010101u;
    if (high) {
        const int each = high == 1 ? 3 : 2;
        at = (const uint32_t *)(tile + f.high_plane + (line >> each) * LM_KV_LINE);
        x |= (at[word] >> (high * (line & ((1 << each) - 1))) & ((1u << high) - 1) * 0x01010101u)
             << low;
    }
    return x;
}

__device__ inline float kv_level_of(const kv_side &f, const float *table, uint32_t code)
{
    if (f.levels == LM_KV_TABLE)
        return table[code];
    if (f.levels == LM_KV_FLOAT8)
        return kv_float8(f.float8 == LM_DTYPE_F8E5M2, code);
    return f.levels == LM_KV_SYM ? (float)((int)code - (1 << (f.bits - 1))) : (float)code;
}

/* Scale and minimum of token t, channel d of a page. */
struct kv_scale32 {
    float s, m;
};

template <class T>
__device__ inline kv_scale32 kv_scale_of(const kv_side &f, const kv_reading<T> &x, const char *page,
                                         int t, int d)
{
    const float *fixed = x.table + (f.levels == LM_KV_TABLE ? LM_KV_MAX_TABLE : 0);
    if (f.fixed)
        return { fixed[d], fixed[f.D + d] };
    if (f.scale == LM_DTYPE_NONE)
        return { f.head ? f.head[x.kv] : (float)f.constant, 0 };
    const int at = kv_scale_at(f, t, d);
    return { kv_get_scale(f.scale, page + f.at_scale, at),
             f.minima ? kv_get_scale(f.scale, page + f.at_min, at) : 0.0f };
}

template <class T>
__device__ inline float kv_number(const kv_side &f, const kv_reading<T> &x, const char *page,
                                  kv_scale32 by, uint32_t code, int t, int d)
{
    float y = fmaf(by.s, kv_level_of(f, x.table, code), by.m);
    if (f.second)
        y *= kv_get_scale(f.scale, page + f.at_second, kv_second_at(f, t, d));
    return y;
}

/* Tokens [j0, j0 + n) of keys, n a multiple of 16 as is j0, to rows of `ld` numbers; channels beyond the head, to a
 * multiple of four, are zeros. */
template <class T, class S, int THREADS>
__device__ inline void kv_decode_keys(const kv_rows &r, const kv_side &f, const kv_reading<T> &x,
                                      int j0, int n, S *to, int ld)
{
    const int lines = (f.D + 3) / 4;
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < n * lines; i += THREADS) {
        const int row = i / (16 * lines) * 16 + i % 16, line = i / 16 % lines, j = j0 + row,
                  t = j % f.T, d = 4 * line;
        if (j < f.sinks || j >= x.coded)
            continue;
        const char *page = kv_page_of(r, f, x.b, x.kv, j);
        const uint32_t codes =
            kv_four_codes(f, page + t / LM_KV_TILE * f.tile_bytes, line, t % LM_KV_TILE);
        kv_scale32 by = kv_scale_of(f, x, page, t, d);
        pack<S, 4> v;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const bool there = d + e < f.D;
            if (e && there && f.axis == LM_KV_CHANNEL)
                by = kv_scale_of(f, x, page, t, d + e);
            v.v[e] = from_float<S>(
                there ? kv_number(f, x, page, by, codes >> (8 * e) & 255, t, d + e) : 0.0f);
        }
        *(pack<S, 4> *)(to + row * ld + d) = v;
    }
}

template <class T, class S, int THREADS>
__device__ inline void kv_decode_values(const kv_rows &r, const kv_side &f, const kv_reading<T> &x,
                                        int j0, int n, S *to, int ld)
{
    const int slabs = (f.D + 15) / 16, of_tile = f.tile / 4;
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < n / 4 * slabs * 16; i += THREADS) {
        const int row = i / (16 * slabs) * 4, d = i % (16 * slabs), j = j0 + row, t = j % f.T;
        if (d >= f.D || j + 3 < f.sinks || j >= x.coded)
            continue;
        const char *page = kv_page_of(r, f, x.b, x.kv, j);
        const int line = d / 16 * of_tile + t % f.tile / 4;
        const uint32_t codes = kv_four_codes(f, page + t / f.tile * f.tile_bytes, line, d % 16);
        kv_scale32 by = kv_scale_of(f, x, page, t, d);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            if (e && f.axis == LM_KV_TOKEN && !f.fixed)
                by = kv_scale_of(f, x, page, t + e, d);
            if (j + e >= f.sinks && j + e < x.coded)
                to[(row + e) * ld + d] =
                    from_float<S>(kv_number(f, x, page, by, codes >> (8 * e) & 255, t + e, d));
        }
    }
}

/* Replace the outliers among tokens [j0, j0 + n); behind a barrier. */
template <class T, class S, int THREADS>
__device__ inline void kv_patch_outliers(const kv_rows &r, const kv_side &f, const kv_reading<T> &x,
                                         int j0, int n, S *to, int ld)
{
#pragma unroll 1
    for (int j = j0; j < j0 + n; j += 16) {
        if (j + 15 < f.sinks || j >= x.coded)
            continue;
        const int first = j % f.T * f.D;
        const uint16_t *list = (const uint16_t *)(kv_page_of(r, f, x.b, x.kv, j) + f.at_outliers);
        const uint16_t *index = list + 1, *value = index + f.outliers;
        int lo = 0, hi = *list;
        while (lo < hi) {
            const int mid = (lo + hi) / 2;
            if (index[mid] < first)
                lo = mid + 1;
            else
                hi = mid;
        }
#pragma unroll 1
        for (lo += (int)threadIdx.x; lo < *list && index[lo] < first + 16 * f.D; lo += THREADS) {
            const int i = index[lo] - first, k = j + i / f.D;
            if (k >= f.sinks && k < x.coded)
                to[(k - j0) * ld + i % f.D] = from_float<S>(to_float(f16{ value[lo] }));
        }
    }
}

/* Rows of plain numbers: of plain sides, of the tail, of new rows.  N: numbers of a read. */
template <class T, class S, int N, int THREADS>
__device__ inline void kv_copy_plain(const kv_rows &r, const kv_side &f, const kv_reading<T> &x,
                                     int j0, int n, S *to, int ld)
{
    const int packs = (f.D + N - 1) / N, all = (f.D + 3) / 4 * 4;
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < n * packs; i += THREADS) {
        const int row = i / packs, d = i % packs * N, j = j0 + row;
        const bool in_page = j >= f.sinks && j < x.coded;
        if (j >= x.plain.end || (in_page && !f.plain))
            continue;
        const T *from =
            in_page ? (const T *)kv_page_of(r, f, x.b, x.kv, j) + j % f.T * f.D : x.plain.row(j);
        const pack<T, N> v = *(const pack<T, N> *)(from + d);
#pragma unroll
        for (int e = 0; e < N; e++)
            to[row * ld + d + e] = from_float<S>(to_float(v.v[e]));
        for (int z = f.D; N == 1 && d == f.D - 1 && z < all; z++) /* behind the last one */
            to[row * ld + z] = S{};
    }
}

/* Queries [k0, k0 + count) of n as floats, in rows of `ld` numbers; zeros beyond them and, to a multiple of four, beyond the
 * head.  Query k is row row + k / heads of qkv, head h + k % heads. */
template <class T, int THREADS>
__device__ inline void kv_load_queries(const kv_rows &r, const T *qkv, int64_t row, int64_t h,
                                       int heads, int k0, int n, int count, float *to, int ld)
{
    const int width = (r.dim + 3) / 4 * 4;
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < count * width; i += THREADS) {
        const int at = i / width, d = i % width, k = k0 + at;
        float v = 0;
        if (k < n && d < r.dim)
            v = to_float(qkv[(row + k / heads) * qkv_pitch(r) + (h + k % heads) * r.dim + d]);
        to[at * ld + d] = v;
    }
}

/* Tokens [j0, j0 + n) as they are seen: those beyond the new rows are left out.  A function of its own: a call costs little
 * beside a tile, and every kernel with a copy of it would take minutes to compile.  All threads call it, between barriers; j0 and
 * n are multiples of 16.  packed: rows of plain numbers allow reads of 16 bytes. */
template <class T, class S, int THREADS>
static __device__ __noinline__ void kv_load_tile(const kv_rows &r, const kv_side &f,
                                                 const kv_reading<T> &x, int j0, int n, S *to,
                                                 int ld, bool packed)
{
    const bool coded = !f.plain && j0 < x.coded && j0 + n > f.sinks;
    if (coded && f.values)
        kv_decode_values<T, S, THREADS>(r, f, x, j0, n, to, ld);
    else if (coded)
        kv_decode_keys<T, S, THREADS>(r, f, x, j0, n, to, ld);
    if (f.plain || j0 < f.sinks || j0 + n > x.coded) {
        if (packed)
            kv_copy_plain<T, S, wide<T>::n, THREADS>(r, f, x, j0, n, to, ld);
        else
            kv_copy_plain<T, S, 1, THREADS>(r, f, x, j0, n, to, ld);
    }
    if (coded && f.outliers) {
        __syncthreads();
        kv_patch_outliers<T, S, THREADS>(r, f, x, j0, n, to, ld);
    }
}

#endif
