/* SPDX-License-Identifier: Apache-2.0 */
/* kv_write.cu -- new rows into coded caches (kernels/kv.h), with the host's bits.
 *
 * A block has a cell of a page of one head: tokens whose codes share no byte with those of other cells (32, or a multiple
 * of the tokens that are encoded together).  Warps find scales and codes, a byte each, in shared memory; then each
 * thread assembles bytes of the page.  So nothing is added by atomics, and no bit depends on the order of blocks.
 * Formats with a scale for each channel are cut into 32 channels as well, as many as lines of one bit share.
 * The rows of a cell are read before they are replaced in the tail: by another kernel.  Grids depend on shapes only. */
#include "kernels/cuda/kv_encode.cuh"
#include "kernels/cuda/kv_rows.cuh"

enum { THREADS = 256, WARPS = THREADS / 32, CHUNK = 32, SLAB = 32 };

/* ---- a cell of a page ---- */

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

/* ---- a scale for groups of channels of each token ---- */

/* The numbers of lanes d0 + lane, ... of a group, 32 at a time. */
template <class T>
static __device__ inline kv_extent extent_of(const kv_side &f, const kv_cell<T> &c, int t, int d0,
                                             int n)
{
    const int lane = (int)threadIdx.x % 32;
    kv_extent r = { INFINITY, -INFINITY, 0, true };
#pragma unroll 1
    for (int i = 0; i < n; i += 32) {
        const bool there = i + lane < n;
        const double x = there ? c.number(f, t, d0 + i + lane) : 0;
        if (there) {
            r.least = fmin(r.least, x);
            r.most = fmax(r.most, x);
            r.finite = r.finite && isfinite(x);
        }
        if (f.norm)
            r.squares = kv_sum_in_order(r.squares, there ? x * x : 0);
    }
    return kv_warp_extent(r);
}

/* A warp codes a group of n channels of token t; codes: of channel 0. */
template <class T>
static __device__ inline void code_token_group(const kv_side &f, const kv_cell<T> &c, int64_t kv,
                                               int t, int d0, int n, uint8_t *codes)
{
    const int lane = (int)threadIdx.x % 32, at = kv_scale_at(f, t, d0);
    kv_scale by = {}, stored;
    if (f.ggml) {
        const kv_coded_number x = kv_ggml_code(f, c.plain(t, d0 + (lane < n ? lane : n - 1)));
        if (lane < n)
            codes[d0 + lane] = (uint8_t)x.code;
        stored = { kv_ggml_scale(x.s), kv_ggml_scale(x.m) };
    } else {
        kv_extent r = { 0, 0, 0, true };
        if (f.scale != LM_DTYPE_NONE)
            r = extent_of(f, c, t, d0, n);
        if (c.range) {
            r.least = (double)c.range_of(t)[0];
            r.most = (double)c.range_of(t)[1];
        }
        if (f.second)
            by = kv_balanced_scale(f, r);
        else if (f.scale != LM_DTYPE_NONE)
            by = kv_group_scale(f, r, n);
        double levels = 0; /* the sum of squares */
#pragma unroll 1
        for (int i = 0; i < n; i += 32) {
            const int d = d0 + i + lane;
            double level = 0;
            if (i + lane < n) {
                const kv_scale own = f.scale != LM_DTYPE_NONE ? by : kv_fixed_scale(f, kv, d);
                const uint32_t code = kv_code_of(f, own, c.number(f, t, d));
                codes[d] = (uint8_t)code;
                level = kv_level(f, code);
            }
            if (f.renorm)
                levels = kv_sum_in_order(levels, level * level);
        }
        stored = by;
        if (f.renorm && r.finite && levels > 0)
            stored.s = kv_stored(f.scale, sqrt(r.squares / levels));
        if (f.second) {
            const double row = c.row[t - c.tile];
            stored = { kv_stored(f.scale, row * by.s), kv_stored(f.scale, row * by.m) };
        }
    }
    if (lane == 0 && f.scale != LM_DTYPE_NONE) {
        kv_put_scale(f.scale, c.page + f.at_scale, at, stored.s);
        if (f.minima)
            kv_put_scale(f.scale, c.page + f.at_min, at, stored.m);
    }
}

/* Tokens [t0, t1) of the page. */
template <class T>
static __device__ inline void code_tokens(const kv_side &f, const kv_cell<T> &c, int64_t kv, int t0,
                                          int t1, uint8_t *codes)
{
    const int group = f.axis == LM_KV_TOKEN ? f.group : f.D, groups = (f.D + group - 1) / group;
#pragma unroll 1
    for (int at = t0; at < t1;) {
        const int end = at / CHUNK * CHUNK + CHUNK < t1 ? at / CHUNK * CHUNK + CHUNK : t1;
#pragma unroll 1
        for (int i = (int)threadIdx.x / 32; i < (end - at) * groups; i += WARPS) {
            const int t = at + i / groups, d = i % groups * group;
            code_token_group(f, c, kv, t, d, f.D - d < group ? f.D - d : group,
                             codes + (t - at) * f.D);
        }
        put_codes(f, c.page, { codes, at, f.D, at, end, 0, f.D });
        at = end;
    }
}

/* ---- a scale for groups of tokens of each channel ---- */

/* The scales of 32 channels from d0 on: warps share the tokens, a lane has a channel.  All threads call it; the results are
 * those of the first warp. */
template <class T>
static __device__ inline kv_extent extent_of_channel(const kv_side &f, const kv_cell<T> &c, int t0,
                                                     int n, int d)
{
    __shared__ double least[WARPS][SLAB], most[WARPS][SLAB];
    __shared__ int finite[WARPS][SLAB];
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    kv_extent r = { INFINITY, -INFINITY, 0, true };
#pragma unroll 1
    for (int t = warp; t < n && d < f.D; t += WARPS) {
        const double x = c.number(f, t0 + t, d);
        r.least = fmin(r.least, x);
        r.most = fmax(r.most, x);
        r.finite = r.finite && isfinite(x);
    }
    least[warp][lane] = r.least;
    most[warp][lane] = r.most;
    finite[warp][lane] = r.finite;
    __syncthreads();
    if (warp == 0) {
        for (int w = 1; w < WARPS; w++) {
            r.least = fmin(r.least, least[w][lane]);
            r.most = fmax(r.most, most[w][lane]);
            r.finite = r.finite && finite[w][lane];
        }
        for (int t = 0; f.norm && t < n && d < f.D; t++) { /* in the host's order */
            const double x = c.number(f, t0 + t, d);
            r.squares += x * x;
        }
    }
    return r;
}

/* Tokens [t0, t0 + n) of the page, a group, of the channels [d0, d0 + 32). */
template <class T>
static __device__ inline void code_channels(const kv_side &f, const kv_cell<T> &c, int t0, int n,
                                            int d0, uint8_t *codes)
{
    __shared__ kv_scale scale[SLAB];
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, d = d0 + lane;
    const int d1 = d0 + SLAB < f.D ? d0 + SLAB : f.D, at = kv_scale_at(f, t0, d);
    kv_extent r = extent_of_channel(f, c, t0, n, d);
    kv_scale by = f.second ? kv_balanced_scale(f, r) : kv_group_scale(f, r, n);
    double levels = 0;
    if (warp == 0)
        scale[lane] = by;
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < n; i += CHUNK) {
        const int there = n - i < CHUNK ? n - i : CHUNK;
#pragma unroll 1
        for (int t = warp; t < there && d < f.D; t += WARPS)
            codes[t * SLAB + lane] =
                (uint8_t)kv_code_of(f, scale[lane], c.number(f, t0 + i + t, d));
        put_codes(f, c.page, { codes, t0 + i, SLAB, t0 + i, t0 + i + there, d0, d1 });
        for (int t = 0; f.renorm && warp == 0 && t < there && d < f.D; t++) {
            const double level = kv_level(f, codes[t * SLAB + lane]);
            levels += level * level;
        }
        __syncthreads();
    }
    if (warp == 0 && d < f.D) {
        if (f.renorm && r.finite && levels > 0)
            by.s = kv_stored(f.scale, sqrt(r.squares / levels));
        if (f.second)
            by = { kv_stored(f.scale, c.row[d] * by.s), kv_stored(f.scale, c.row[d] * by.m) };
        kv_put_scale(f.scale, c.page + f.at_scale, at, by.s);
        if (f.minima)
            kv_put_scale(f.scale, c.page + f.at_min, at, by.m);
    }
    __syncthreads();
}

/* ---- second scales (numeric/kv_balance.c) ---- */

/* Scales of rows and columns of a tile with their logarithms, and the best so far: 6 * (rows + cols) numbers. */
struct kv_balance {
    double *scale[2], *log_scale[2], *best[2]; /* of columns, of rows */
    int n[2];
};

static __host__ __device__ inline int64_t balance_numbers(const kv_side &f)
{
    return f.second ? 6 * (int64_t)(f.D + f.step) : 0;
}

static __device__ inline kv_balance balance_at(const kv_side &f, double *work)
{
    kv_balance m;
    m.n[0] = f.axis == LM_KV_CHANNEL ? f.step : f.D;
    m.n[1] = f.axis == LM_KV_CHANNEL ? f.D : f.step;
    for (int side = 0; side < 2; side++) {
        m.scale[side] = work;
        m.log_scale[side] = work + m.n[side];
        m.best[side] = work + 2 * m.n[side];
        work += 3 * m.n[side];
    }
    return m;
}

/* The sample standard deviation of a row or column of the balanced tile, in the host's order. */
template <class T>
static __device__ inline double deviation(const kv_side &f, const kv_cell<T> &c,
                                          const kv_balance &m, int i, int by_row)
{
    const int n = m.n[!by_row];
    const bool tokens = (f.axis == LM_KV_CHANNEL) == (by_row == 0); /* i counts tokens */
    double sum = 0, squares = 0;
#pragma unroll 4
    for (int k = 0; k < n; k++)
        sum += c.number(f, c.tile + (tokens ? i : k), tokens ? k : i);
    const double mean = sum / (double)n;
#pragma unroll 4
    for (int k = 0; k < n; k++) {
        const double y = c.number(f, c.tile + (tokens ? i : k), tokens ? k : i) - mean;
        squares = __dadd_rn(squares, __dmul_rn(y, y));
    }
    return n > 1 ? sqrt(squares / (double)(n - 1)) : 1;
}

/* The largest over the least deviation; all threads get it. */
template <class T>
static __device__ inline double spread(const kv_side &f, const kv_cell<T> &c, const kv_balance &m,
                                       int by_row)
{
    __shared__ double low[WARPS], high[WARPS];
    double least = INFINITY, most = 0;
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < m.n[by_row]; i += THREADS) {
        const double s = deviation(f, c, m, i, by_row);
        least = fmin(least, s);
        most = fmax(most, s);
    }
    const kv_extent r = kv_warp_extent({ least, most, 0, true });
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        low[threadIdx.x / 32] = r.least;
        high[threadIdx.x / 32] = r.most;
    }
    __syncthreads();
    for (int w = 0; w < WARPS; w++) {
        least = w ? fmin(least, low[w]) : low[0];
        most = w ? fmax(most, high[w]) : high[0];
    }
    return most / fmax(least, 1e-8);
}

template <class T>
static __device__ inline void divide(const kv_side &f, const kv_cell<T> &c, const kv_balance &m,
                                     int by_row)
{
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < m.n[by_row]; i += THREADS)
        m.log_scale[by_row][i] += log(kv_limited(deviation(f, c, m, i, by_row), 1e-3, 1e3));
    __syncthreads();
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < m.n[by_row]; i += THREADS) {
        const double x = kv_limited(m.log_scale[by_row][i], -0.3, 10);
        m.log_scale[by_row][i] = x;
        m.scale[by_row][i] = exp(x);
    }
    __syncthreads();
}

/* Set the scales of the tile at c.tile to those of the best round. */
template <class T>
static __device__ inline void balance(const kv_side &f, kv_cell<T> &c, double *work)
{
    enum { ROUNDS = 8 };
    const kv_balance m = balance_at(f, work);
    double best = INFINITY;
    c.col = m.scale[0];
    c.row = m.scale[1];
    for (int side = 0; side < 2; side++)
        for (int i = (int)threadIdx.x; i < m.n[side]; i += THREADS) {
            m.scale[side][i] = m.best[side][i] = 1;
            m.log_scale[side][i] = 0;
        }
    __syncthreads();
#pragma unroll 1
    for (int round = 0; round <= ROUNDS; round++) {
        const double now = spread(f, c, m, 0) + spread(f, c, m, 1);
        if (now <= best) {
            best = now;
            for (int side = 0; side < 2; side++)
                for (int i = (int)threadIdx.x; i < m.n[side]; i += THREADS)
                    m.best[side][i] = m.scale[side][i];
        }
        if (round == ROUNDS)
            break;
        divide(f, c, m, 0);
        divide(f, c, m, 1);
    }
    __syncthreads();
    c.col = m.best[0];
    c.row = m.best[1];
}

template <class T> static __device__ inline void put_seconds(const kv_side &f, const kv_cell<T> &c)
{
    const bool by_channel = f.axis == LM_KV_CHANNEL;
    const int n = by_channel ? f.step : f.D;
    for (int i = (int)threadIdx.x; i < n; i += THREADS)
        kv_put_scale(f.scale, c.page + f.at_second,
                     kv_second_at(f, c.tile + (by_channel ? i : 0), by_channel ? 0 : i),
                     kv_stored(f.scale, c.col[i]));
    __syncthreads();
}

/* ---- the kernels ---- */

struct kv_writing {
    kv_rows r;
    kv_side side[2];
    int cell[2], slabs[2]; /* tokens of a cell; parts of it along the channels */
    int64_t items[2];      /* blocks' work of a sequence and head */
    int64_t balance;       /* numbers of scratch of a block */
    float *range;          /* of values, by row of qkv; null: none */
    double share;          /* of a token's numbers that its range is without */
    const int32_t *row;    /* tokens that new rows replace, by row of qkv and head; null: none */
};

/* Tokens [t0, t1) of the page of c are encoded: whole steps. */
template <class T>
static __device__ inline void code_cell(const kv_side &f, kv_cell<T> &c, int64_t kv, int t0, int t1,
                                        int slab, uint8_t *codes, double *work)
{
    const bool channels = f.axis == LM_KV_CHANNEL && !f.fixed;
    if (!channels && !f.second) {
        code_tokens(f, c, kv, t0, t1, codes);
        return;
    }
#pragma unroll 1
    for (int t = t0; t < t1; t += f.step) {
        c.tile = t;
        if (f.second)
            balance(f, c, work);
        if (!channels)
            code_tokens(f, c, kv, t, t + f.step, codes);
        else if (!f.second)
            code_channels(f, c, t, f.step, slab * SLAB, codes);
        else
            for (int d = 0; d < f.D; d += SLAB)
                code_channels(f, c, t, f.step, d, codes);
        if (f.second)
            put_seconds(f, c);
        c.row = c.col = nullptr;
    }
}

/* The cell without its place; it is at the first of the tokens [begin, end) that are encoded. */
template <class T>
static __device__ inline kv_cell<T> cell_at(const kv_writing &w, const T *qkv, int64_t b,
                                            int64_t kv, int side, int begin)
{
    kv_cell<T> c = {};
    c.from = kv_source_of(w.r, w.side[side], qkv, b, kv, side);
    c.range = side && w.range ? w.range + 2 * first_of<true>(w.r, b) : nullptr;
    c.ranges = begin;
    return c;
}

template <class T>
static __global__ void __launch_bounds__(THREADS)
    kv_encode_kernel(const __grid_constant__ kv_writing w, const T *qkv, double *work)
{
    LM_DYNAMIC_SHARED(uint8_t, codes);
    const int64_t each = w.items[0] + w.items[1], all = w.r.batch * w.r.kv_heads * each;
#pragma unroll 1
    for (int64_t item = blockIdx.x; item < all; item += gridDim.x) {
        const int64_t bk = item / each, b = bk / w.r.kv_heads, kv = bk % w.r.kv_heads;
        int64_t i = item % each;
        const int side = i >= w.items[0];
        const kv_side &f = w.side[side];
        i -= side ? w.items[0] : 0;
        const int slab = (int)(i % w.slabs[side]), cell = (int)(i / w.slabs[side]) * w.cell[side];
        const int begin = kv_coded_end(f, w.r.used[b]),
                  end = kv_coded_end(f, w.r.used[b] + w.r.fresh[b]);
        kv_cell<T> c = cell_at(w, qkv, b, kv, side, begin);
        const int j = begin / w.cell[side] * w.cell[side] + cell;
        const int from = j > begin ? j : begin,
                  to = j + w.cell[side] < end ? j + w.cell[side] : end;
        if (from >= to)
            continue;
        c.base = j / f.T * f.T;
        c.page = kv_page_of(w.r, f, b, kv, j);
        code_cell(f, c, kv, from - c.base, to - c.base, slab, codes,
                  work ? work + blockIdx.x * w.balance : nullptr);
    }
}

/* New rows in the place of tokens: a block has a side of a head of a sequence, its rows one behind the other. */
template <class T>
static __global__ void __launch_bounds__(THREADS)
    kv_replace_kernel(const __grid_constant__ kv_writing w, const T *qkv)
{
    LM_DYNAMIC_SHARED(uint8_t, codes);
#pragma unroll 1
    for (int64_t item = blockIdx.x; item < 2 * w.r.batch * w.r.kv_heads; item += gridDim.x) {
        const int side = (int)(item % 2);
        const int64_t kv = item / 2 % w.r.kv_heads, b = item / 2 / w.r.kv_heads,
                      first = first_of<true>(w.r, b);
        const kv_side &f = w.side[side];
        if (f.plain)
            continue;
#pragma unroll 1
        for (int i = 0; i < w.r.fresh[b]; i++) {
            const int j = w.row[(first + i) * w.r.kv_heads + kv];
            kv_cell<T> c = cell_at(w, qkv, b, kv, side, j - i);
            c.from.used = j;
            c.from.fresh += i * c.from.pitch;
            c.base = j / f.T * f.T;
            c.page = kv_page_of(w.r, f, b, kv, j);
            code_tokens(f, c, kv, j - c.base, j - c.base + 1, codes);
        }
    }
}

/* The token at which a new row is put: of rows that replace the same token the last counts; -1: the others. */
static __device__ inline int place_of(const kv_writing &w, int64_t b, int64_t kv, int64_t row)
{
    const int64_t i = row - first_of<true>(w.r, b);
    if (!w.row)
        return w.r.used[b] + (int)i;
    const int j = w.row[row * w.r.kv_heads + kv];
    for (int64_t other = 1; i + other < w.r.fresh[b]; other++)
        if (w.row[(row + other) * w.r.kv_heads + kv] == j)
            return -1;
    return j;
}

/* Rows of plain sides into pages, and the newest and first ones into tails. */
template <class T>
static __global__ void kv_place_kernel(const __grid_constant__ kv_writing w, const T *qkv)
{
    const int64_t D = w.side[0].D, heads = 2 * w.r.kv_heads, all = w.r.rows * heads * D;
#pragma unroll 1
    for (int64_t i = global_thread(); i < all; i += global_threads()) {
        const int64_t d = i % D, x = i / D % heads, row = i / D / heads, kv = x % w.r.kv_heads;
        const int64_t b = sequence_of<true>(w.r, row);
        const int side = x >= w.r.kv_heads;
        const kv_side &f = w.side[side];
        if (b == w.r.batch || row - first_of<true>(w.r, b) >= w.r.fresh[b])
            continue;
        const int end = w.r.used[b] + w.r.fresh[b], j = place_of(w, b, kv, row);
        const T v = qkv[(row * (w.r.heads + heads) + w.r.heads + x) * D + d];
        if (f.plain && j >= 0)
            ((T *)kv_page_of(w.r, f, b, kv, j))[j % f.T * D + d] = v;
        else if (f.rows && (j < f.sinks || j >= end - f.residual))
            ((T *)
                 f.tail)[((w.r.slot[b] * w.r.kv_heads + kv) * f.rows + kv_tail_row(f, j)) * D + d] =
                v;
    }
}

/* ---- outliers: a list by rising index; a warp has a page of a head ---- */

struct kv_list {
    uint16_t *count, *index, *value;
    int n, most;
    const char *page;
};

/* How far beyond the range of its channel or group a number of the list is. */
static __device__ inline double excess(const kv_side &f, int64_t kv, const kv_list &o,
                                       uint32_t index, uint16_t value)
{
    const int t = (int)index / f.D, d = (int)index % f.D, at = kv_scale_at(f, t, d);
    kv_scale by;
    if (f.fixed)
        by = kv_fixed_scale(f, kv, d);
    else
        by = { (double)kv_get_scale(f.scale, o.page + f.at_scale, at),
               (double)kv_get_scale(f.scale, o.page + f.at_min, at) };
    const double x = (double)to_float(f16{ value });
    return by.s > 0 ? fabs((x - by.m) / by.s) : fabs(x - by.m) > 0 ? (double)INFINITY : 0;
}

/* Remove entries [i, i + n). */
static __device__ inline void drop_entries(kv_list &o, int i, int n)
{
    const int lane = (int)threadIdx.x % 32;
#pragma unroll 1
    for (int at = i; n && at < o.n - n; at += 32) {
        const bool there = at + lane < o.n - n;
        const uint16_t index = there ? o.index[at + lane + n] : 0,
                       value = there ? o.value[at + lane + n] : 0;
        __syncwarp();
        if (there) {
            o.index[at + lane] = index;
            o.value[at + lane] = value;
        }
        __syncwarp();
    }
    o.n -= n;
}

/* Entries before the first with an index of at least `index`. */
static __device__ inline int entries_before(const kv_list &o, uint32_t index)
{
    int lo = 0, hi = o.n;
    while (lo < hi) {
        const int mid = (lo + hi) / 2;
        if (o.index[mid] < index)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

static __device__ inline void insert_entry(kv_list &o, uint32_t index, uint16_t value)
{
    const int lane = (int)threadIdx.x % 32, to = entries_before(o, index);
#pragma unroll 1
    for (int end = o.n; end > to; end -= 32) { /* [end - 32, end) up by one */
        const int i = end - 1 - lane;
        const bool there = i >= to;
        const uint16_t x = there ? o.index[i] : 0, v = there ? o.value[i] : 0;
        __syncwarp();
        if (there) {
            o.index[i + 1] = x;
            o.value[i + 1] = v;
        }
        __syncwarp();
    }
    if (lane == 0) {
        o.index[to] = (uint16_t)index;
        o.value[to] = value;
    }
    __syncwarp();
    o.n++;
}

/* Into the list, or in the place of the smallest (the last of several) if it is larger than that. */
static __device__ inline void add_entry(const kv_side &f, int64_t kv, kv_list &o, uint32_t index,
                                        uint16_t value)
{
    if (o.n == o.most) {
        double least = INFINITY;
        int at = -1;
#pragma unroll 1
        for (int i = (int)threadIdx.x % 32; i < o.n; i += 32) {
            const double x = excess(f, kv, o, o.index[i], o.value[i]);
            if (at < 0 || x <= least) {
                least = x;
                at = i;
            }
        }
#pragma unroll
        for (int s = 16; s > 0; s >>= 1) {
            const double x = __shfl_xor_sync(every_lane, least, s);
            const int i = __shfl_xor_sync(every_lane, at, s);
            if (i >= 0 && (at < 0 || x < least || (x == least && i > at))) {
                least = x;
                at = i;
            }
        }
        const double mine = excess(f, kv, o, index, value);
        if (mine < least || (mine == least && index > o.index[at]))
            return;
        __syncwarp();
        drop_entries(o, at, 1);
    }
    insert_entry(o, index, value);
}

/* The outliers of tokens [t0, t1) of a page. */
template <class T>
static __device__ inline void list_outliers(const kv_side &f, const kv_cell<T> &c, int64_t kv,
                                            int t0, int t1, bool begins)
{
    uint16_t *at = (uint16_t *)(c.page + f.at_outliers);
    kv_list o = { at, at + 1, at + 1 + f.outliers, begins ? 0 : *at, f.outliers, c.page };
    const int lane = (int)threadIdx.x % 32, before = entries_before(o, (uint32_t)(t0 * f.D));
    __syncwarp();
    drop_entries(o, before, entries_before(o, (uint32_t)(t1 * f.D)) - before);
#pragma unroll 1
    for (int i = 0; i < (t1 - t0) * f.D; i += 32) {
        const int t = t0 + (i + lane) / f.D, d = (i + lane) % f.D;
        float x = 0;
        bool out = false;
        if (t < t1) {
            x = c.plain(t, d);
            const float lo = c.range ? c.range_of(t)[0] : f.lower[kv * f.D + d];
            const float hi = c.range ? c.range_of(t)[1] : f.upper[kv * f.D + d];
            out = x < lo || x > hi;
        }
        const uint16_t value =
            (uint16_t)kv_encode_float(kv_limited((double)x, -65504, 65504), 5, 10, 0x7bff, true);
        for (unsigned left = __ballot_sync(every_lane, out); left; left &= left - 1) {
            const int k = __ffs((int)left) - 1;
            add_entry(f, kv, o, (uint32_t)(t0 * f.D + i + k),
                      (uint16_t)__shfl_sync(every_lane, (int)value, k));
        }
    }
    if (lane == 0)
        *o.count = (uint16_t)o.n;
}

template <class T>
static __global__ void __launch_bounds__(32)
    kv_outliers_kernel(const __grid_constant__ kv_writing w, int64_t pages, const T *qkv)
{
    const int64_t all = w.r.batch * w.r.kv_heads * 2 * pages;
#pragma unroll 1
    for (int64_t item = blockIdx.x; item < all; item += gridDim.x) {
        const int64_t bk = item / pages / 2, b = bk / w.r.kv_heads, kv = bk % w.r.kv_heads;
        const int side = (int)(item / pages % 2);
        const kv_side &f = w.side[side];
        if (!f.outliers)
            continue;
        const int begin = kv_coded_end(f, w.r.used[b]),
                  end = kv_coded_end(f, w.r.used[b] + w.r.fresh[b]);
        kv_cell<T> c = cell_at(w, qkv, b, kv, side, begin);
        c.base = (begin / f.T + (int)(item % pages)) * f.T;
        const int from = c.base > begin ? c.base : begin,
                  to = c.base + f.T < end ? c.base + f.T : end;
        if (from >= to)
            continue;
        c.page = kv_page_of(w.r, f, b, kv, c.base);
        list_outliers(f, c, kv, from - c.base, to - c.base,
                      from == (c.base > f.sinks ? c.base : f.sinks));
    }
}

/* ---- ranges of tokens (numeric/kv_range.c): a block has a new row of values ---- */

/* Numbers in the order of floats, zeros apart. */
static __device__ inline uint32_t rank_key(float x)
{
    const uint32_t bits = __float_as_uint(x);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* The numbers of a token of all heads, 0 to n. */
template <class T> struct kv_token_numbers {
    const T *from;
    int64_t step; /* from head to head */
    int dim, n;
    __device__ inline float at(int i) const
    {
        return to_float(from[i / dim * step + i % dim]);
    }
};

/* The number that sorting puts at k among the finite ones: a byte of its key is found at a time, by counts. */
template <class T> static __device__ inline float number_at(const kv_token_numbers<T> &x, int k)
{
    __shared__ unsigned count[256];
    __shared__ unsigned chosen[2];
    uint32_t key = 0;
#pragma unroll 1
    for (int shift = 24; shift >= 0; shift -= 8) {
        __syncthreads();
        count[threadIdx.x] = 0;
        __syncthreads();
#pragma unroll 1
        for (int i = (int)threadIdx.x; i < x.n; i += THREADS) {
            const float v = x.at(i);
            const uint32_t own = rank_key(v);
            if (isfinite(v) && (shift == 24 || own >> (shift + 8) == key >> (shift + 8)))
                atomicAdd(&count[own >> shift & 255], 1u);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            unsigned before = 0, i = 0;
            while (i < 255 && before + count[i] <= (unsigned)k)
                before += count[i++];
            chosen[0] = i;
            chosen[1] = before;
        }
        __syncthreads();
        key |= chosen[0] << shift;
        k -= (int)chosen[1];
    }
    return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

template <class T>
static __device__ inline double quantile(const kv_token_numbers<T> &x, int m, double q)
{
    const double at = __dmul_rn(q, (double)(m - 1));
    const int i = (int)at;
    const double low = (double)number_at(x, i),
                 high = i + 1 < m ? (double)number_at(x, i + 1) : low;
    return __dadd_rn(low, __dmul_rn(high - low, at - (double)i));
}

template <class T>
static __device__ inline void token_range(const kv_token_numbers<T> &x, double share, float *range)
{
    double finite = 0, low = -INFINITY, high = INFINITY;
    float least = INFINITY, most = -INFINITY;
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < x.n; i += THREADS)
        finite += isfinite(x.at(i));
    const int m = (int)block_sum(finite);
    if (m && share > 0) {
        high = quantile(x, m, 1 - share / 2);
        low = quantile(x, m, share / 2);
    }
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < x.n; i += THREADS) {
        const float v = x.at(i);
        if (isfinite(v) && (double)v > low && (double)v < high) {
            least = fminf(least, v);
            most = fmaxf(most, v);
        }
    }
    least = -block_max(-least);
    most = block_max(most);
    if (m && least > most) /* all are outliers */
        least = most = number_at(x, (m - 1) / 2);
    if (threadIdx.x == 0) {
        range[0] = m ? least : 0;
        range[1] = m ? most : 0;
    }
}

/* The range of the i-th value that is encoded lies at the number of the sequence's row i in qkv. */
template <class T>
static __global__ void __launch_bounds__(THREADS)
    kv_range_kernel(const __grid_constant__ kv_writing w, const T *qkv)
{
    const kv_side &f = w.side[1];
#pragma unroll 1
    for (int64_t row = blockIdx.x; row < w.r.rows; row += gridDim.x) {
        const int64_t b = sequence_of<true>(w.r, row),
                      i = b < w.r.batch ? row - first_of<true>(w.r, b) : 0;
        if (b == w.r.batch || i >= w.r.fresh[b])
            continue;
        const kv_source<T> from = kv_source_of(w.r, f, qkv, b, 0, 1);
        const int j = kv_coded_end(f, from.used) + (int)i;
        if (j >= kv_coded_end(f, from.end))
            continue;
        const kv_token_numbers<T> x = { from.row(j), j < from.used ? (int64_t)f.rows * f.D : f.D,
                                        f.D, (int)(w.r.kv_heads * f.D) };
        token_range(x, w.share, w.range + 2 * row);
    }
}

/* ---- launcher ---- */

/* Cells of `cell` tokens in which n tokens may lie. */
static int64_t cells_of(int64_t n, int64_t cell)
{
    return (n + cell - 2) / cell + 1;
}

/* Tokens of a cell: the least number that holds whole chunks, or a short page, and whole steps. */
static int cell_of(const kv_side &f)
{
    const int chunk = f.T < CHUNK ? f.T : CHUNK;
    int cell = f.step;
    while (cell % chunk)
        cell += f.step;
    return cell;
}

static bool has_ranges(const lm_call *call)
{
    return ((const lm_kv_attr *)call->attr)->token_range && call->out[1].kv;
}

static kv_writing writing_of(const lm_call *call)
{
    const lm_kv_attr *a = (const lm_kv_attr *)call->attr;
    kv_writing w = {};
    w.r = kv_rows_of(call, &a->attention, &call->out[0], 3, -1, 4, 5);
    w.row = in_ptr<const int32_t>(call, 6);
    w.share = a->outliers;
    for (int x = 0; x < 2; x++) {
        kv_side &f = w.side[x];
        f = kv_side_of(&call->out[x], call->n_out > 2 + x ? &call->out[2 + x] : nullptr,
                       a->residual[x], a->sinks[x]);
        const bool channels = f.axis == LM_KV_CHANNEL && !f.fixed, slabs = channels && !f.second;
        w.cell[x] = cell_of(f);
        w.slabs[x] = slabs ? (f.D + SLAB - 1) / SLAB : 1;
        if (!f.plain)
            w.items[x] =
                cells_of(w.r.most_rows + (f.step > 1 ? f.residual : 0), w.cell[x]) * w.slabs[x];
        w.balance = balance_numbers(f) > w.balance ? balance_numbers(f) : w.balance;
    }
    if (has_ranges(call))
        w.range = (float *)call->work;
    return w;
}

/* Ranges, a multiple of 16 bytes; then the scratch of blocks with balanced tiles. */
static size_t range_bytes(const lm_call *call)
{
    return has_ranges(call) ? ((size_t)call->in[0].dim[0] * 2 * sizeof(float) + 15) / 16 * 16 : 0;
}

static int64_t items_of(const kv_writing &w)
{
    return w.r.batch * w.r.kv_heads * (w.items[0] + w.items[1]);
}

/* Balanced tiles take long: as many blocks as run at once, each with its scratch. */
static int64_t balance_blocks(const kv_writing &w, int64_t sms)
{
    return items_of(w) < 4 * sms ? items_of(w) : 4 * sms;
}

static size_t work(const lm_call *call, int sms)
{
    const kv_writing w = writing_of(call);
    return range_bytes(call) +
           (size_t)(w.balance ? w.balance * balance_blocks(w, sms) : 0) * sizeof(double);
}

template <class T> static void kv_write(const lm_call *call)
{
    lm_stream *s = call->stream;
    const kv_writing w = writing_of(call);
    const T *qkv = in_ptr<const T>(call, 0);
    const int D = w.side[0].D;
    const size_t codes = (size_t)CHUNK * (size_t)(D > SLAB ? D : SLAB);
    if (w.range)
        LM_LAUNCH((kv_range_kernel<T>), grid_for(w.r.rows, 1, s), THREADS, 0, s, w, qkv);
    if (items_of(w) > 0 && w.row) {
        LM_LAUNCH((kv_replace_kernel<T>), grid_for(2 * w.r.batch * w.r.kv_heads, 1, s), THREADS,
                  codes, s, w, qkv);
    } else if (items_of(w) > 0) {
        const unsigned grid =
            w.balance ? (unsigned)balance_blocks(w, s->sms) : grid_for(items_of(w), 1, s);
        double *scratch = w.balance ? (double *)((char *)call->work + range_bytes(call)) : nullptr;
        LM_LAUNCH((kv_encode_kernel<T>), grid, THREADS, codes, s, w, qkv, scratch);
    }
    if (w.side[0].outliers || w.side[1].outliers) {
        const int64_t pages = cells_of(w.r.most_rows, w.side[0].T);
        LM_LAUNCH((kv_outliers_kernel<T>), grid_for(w.r.batch * w.r.kv_heads * 2 * pages, 1, s), 32,
                  0, s, w, pages, qkv);
    }
    if (w.side[0].plain || w.side[1].plain || w.side[0].rows || w.side[1].rows)
        LM_LAUNCH((kv_place_kernel<T>), grid_for(w.r.rows * 2 * w.r.kv_heads * D, 256, s), 256, 0,
                  s, w, qkv);
}

extern "C" const lm_kernel lm_kv_write_cuda_kernels[] = { LM_CUDA_ROWS("kv_write", kv_write, work),
                                                          LM_CUDA_END };
