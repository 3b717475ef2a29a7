/* SPDX-License-Identifier: Apache-2.0 */
/* kv_cell.cuh -- the cell of a page that a block of kv_write encodes: its numbers, and its codes into the bits of the page.
 *
 * A cell has tokens whose codes share no byte with those of other cells.  Codes are found first, a byte each; then each
 * thread assembles bytes of the page. */
#ifndef LM_KERNELS_CUDA_KV_CELL_CUH
#define LM_KERNELS_CUDA_KV_CELL_CUH

#include "kernels/cuda/kv_encode.cuh"
#include "kernels/cuda/kv_rows.cuh"

enum { THREADS = 256, WARPS = THREADS / 32, CHUNK = 32, SLAB = 32 };

/* Where the tokens of a key/value head of a sequence come from, and the cell's place. */
template <class T> struct kv_cell {
    kv_source<T> from;
    char *page;
    int base; /* token 0 of the page */
    /* balanced formats: scales of rows and columns of the tile of tokens [tile, ...), else null */
    const double *row, *col;
    int tile;
    const float
        *range; /* least and most of tokens from `ranges` on; null: each group has its own */
    int ranges;
    __device__ inline float plain(int t, int d) const
    {
        return to_float(from.row(base + t)[d]);
    }
    __device__ inline const float *range_of(int t) const
    {
        return range + 2 * (base + t - ranges);
    }
    /* The number of token t, channel d, in the units of the group's scale. */
    __device__ inline double number(const kv_side &f, int t, int d) const
    {
        const double x = (double)plain(t, d);
        if (!row)
            return x;
        const bool by_channel = f.axis == LM_KV_CHANNEL;
        return x / col[by_channel ? t - tile : d] / row[by_channel ? d : t - tile];
    }
};

/* Bits of a plane: codes of tokens [t0, t1) and channels [d0, d1), of which codes[(t - from) * pitch + d - d0] are known. */
struct kv_patch {
    const uint8_t *codes;
    int from, pitch, t0, t1, d0, d1;
};

/* The codes of a patch, shifted down by `down`, into the plane of `bits` bits of each of its tiles. */
static __device__ inline void put_plane(const kv_side &f, char *page, const kv_patch &p, int plane,
                                        int bits, int down)
{
    const int each = 8 / bits, of_tile = f.values ? f.tile / 4 : 1, across = f.values ? 16 : 4;
    const int first = p.d0 / across * of_tile / each;
    const int end = ((p.d1 + across - 1) / across * of_tile + each - 1) / each, units = end - first;
#pragma unroll 1
    for (int tile = p.t0 / f.tile; tile * f.tile < p.t1; tile++) {
        uint8_t *to = (uint8_t *)page + tile * f.tile_bytes + plane + first * LM_KV_LINE;
#pragma unroll 1
        for (int i = (int)threadIdx.x; i < units * LM_KV_LINE; i += THREADS) {
            uint32_t value = 0, mask = 0;
#pragma unroll 1
            for (int k = 0; k < each; k++) {
                const int line = (first + i / LM_KV_LINE) * each + k, byte = i % LM_KV_LINE;
                int t = tile * f.tile + byte / 4, d = line * 4 + byte % 4;
                if (f.values) {
                    t = tile * f.tile + line % of_tile * 4 + byte % 4;
                    d = line / of_tile * 16 + byte / 4;
                }
                if (t < p.t0 || t >= p.t1 || d < p.d0 || d >= p.d1)
                    continue;
                const uint32_t code = p.codes[(t - p.from) * p.pitch + d - p.d0] >> down,
                               some = (1u << bits) - 1;
                mask |= some << (bits * k);
                value |= (code & some) << (bits * k);
            }
            if (mask == 255)
                to[i] = (uint8_t)value;
            else if (mask)
                to[i] = (uint8_t)((to[i] & ~mask) | value);
        }
    }
}

static __device__ inline void put_codes(const kv_side &f, char *page, const kv_patch &p)
{
    __syncthreads();
    put_plane(f, page, p, 0, f.low, 0);
    if (f.bits > f.low)
        put_plane(f, page, p, f.high_plane, f.bits - f.low, f.low);
    __syncthreads();
}

#endif
