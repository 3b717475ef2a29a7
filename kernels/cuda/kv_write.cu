/* SPDX-License-Identifier: Apache-2.0 */
/* kv_write.cu -- new rows into coded caches (kernels/kv.h), with the host's bits.
 *
 * A block has a cell of a page of one head: tokens whose codes share no byte with those of other cells (32, or a multiple
 * of the tokens that are encoded together).  Warps find scales and codes, a byte each, in shared memory; then each
 * thread assembles bytes of the page.  So nothing is added by atomics, and no bit depends on the order of blocks.
 * Formats with a scale for each channel are cut into 32 channels as well, as many as lines of one bit share.
 * The rows of a cell are read before they are replaced in the tail: by another kernel.  Grids depend on shapes only. */
#include "kernels/cuda/kv_balance.cuh"
#include "kernels/cuda/kv_codes.cuh"
#include "kernels/cuda/kv_outliers.cuh"
#include "kernels/cuda/kv_range.cuh"

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

/* ---- outliers, and ranges of tokens ---- */

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

/* ---- rows into plain pages and tails ---- */

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
    const int64_t K = w.r.kv_heads, keys = K * w.side[0].D, width = keys + K * w.side[1].D,
                  all = w.r.rows * width;
#pragma unroll 1
    for (int64_t i = global_thread(); i < all; i += global_threads()) {
        const int64_t row = i / width, x = i % width, b = sequence_of<true>(w.r, row);
        const int side = x >= keys;
        const kv_side &f = w.side[side];
        const int64_t D = f.D, kv = (side ? x - keys : x) / D, d = (side ? x - keys : x) % D;
        if (b == w.r.batch || row - first_of<true>(w.r, b) >= w.r.fresh[b])
            continue;
        const int end = w.r.used[b] + w.r.fresh[b], j = place_of(w, b, kv, row);
        const T v = qkv[row * qkv_pitch(w.r) + w.r.heads * w.r.dim + x];
        if (f.plain && j >= 0)
            ((T *)kv_page_of(w.r, f, b, kv, j))[j % f.T * D + d] = v;
        else if (f.rows && (j < f.sinks || j >= end - f.residual))
            ((T *)
                 f.tail)[((w.r.slot[b] * w.r.kv_heads + kv) * f.rows + kv_tail_row(f, j)) * D + d] =
                v;
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
    w.r = kv_rows_of(call, &a->attention, a->latent, &call->out[0], 3, -1, 4, 5);
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
    const int D = w.side[0].D > w.side[1].D ? w.side[0].D : w.side[1].D;
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
