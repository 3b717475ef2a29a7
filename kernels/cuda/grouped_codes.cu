/* SPDX-License-Identifier: Apache-2.0 */
/* grouped_codes.cu -- grouped linear layers whose weights are in codes, y = x w^T: of few rows by code_few.cu, otherwise a
 * tile at a time as grouped.cu and grouped_tensor.cu have it.  The tile's part of w becomes numbers before it reaches shared
 * memory: codes of the next steps are read while those before them are multiplied.
 *
 * A launch makes the columns of y whose rows of w are in one stretch of codes (code_rows.cuh); the weights of all experts are
 * one, where a file has them in one format. */
#include "kernels/cuda/code_few.cuh"
#include "kernels/cuda/grouped_stages.cuh"

/* Up to this many rows, each group's codes are read once for four of its rows. */
static const int64_t few_grouped_rows = 32;

/* Columns [from, to) of y for the rows of group g: those in the stretch. */
struct code_window {
    int64_t from, to;
};
__device__ inline code_window window_of(const code_stretch &w, int64_t g, int64_t groups, int64_t n)
{
    const int64_t first = g < groups ? g * n : 0; /* rows of no group are zeros once */
    const int64_t from = w.row - first, to = w.row + w.rows - first;
    return { from > 0 ? from : 0, to < n ? to : n };
}

/* ---- plain ---- */

static const int plain_side = 64;

/* 64 rows of w in codes: an eight of each of two threads to 16 steps. */
template <class T> struct code_feed {
    lm_code_kind kind;
    const uint8_t *row; /* null: outside */
    int64_t eight;
    code_words w;
    __device__ inline void fetch_next(int)
    {
        if (row)
            w = load_eight(kind, row, eight);
        eight += depth / 8;
    }
    __device__ inline void place_at(float *shared) const
    {
        const int pitch = part_of<T, true, plain_side>::pitch, line = (int)threadIdx.x / 2;
        float v[8] = {};
        if (line >= plain_side)
            return;
        if (row)
            eight_numbers(kind, w, eight - depth / 8, v);
#pragma unroll
        for (int i = 0; i < 8; i++)
            shared[((int)threadIdx.x % 2 * 8 + i) * pitch + line] = rounded<T>(v[i]);
    }
};

template <class T>
__global__ void __launch_bounds__(256, 3)
    grouped_codes_kernel(const T *a, code_stretch w, T *c, const int32_t *offsets, int64_t groups,
                         tiling t)
{
    __shared__ room<plain_side> room_a, room_b;

    for (int64_t i = blockIdx.x; i < t.tiles_m * t.tiles_n; i += gridDim.x) {
        int64_t strip, col;
        tile_at(t, i, &strip, &col);
        group_rows r = rows_of_strip<plain_side>(offsets, groups, t.m, strip);
        code_window in = window_of(w, r.g, groups, t.ldc);
        col = in.from + col * plain_side;
        if (r.row >= r.end || col >= in.to) /* the whole block */
            continue;
        float sum[plain_side / 16][plain_side / 16] = {};
        if (r.g < groups) {
            const int64_t line = col + (int)threadIdx.x / 2;
            number_feed<T, true, plain_side> x;
            code_feed<T> y = {};
            x.from = cursor_at<T, true, plain_side>(a, t.lda, r.row, r.end, 0);
            x.packed = t.pack_a;
            y.kind = w.kind;
            y.row = line < in.to && threadIdx.x < 2 * plain_side
                        ? code_row(w, r.g * t.ldc + line - w.row)
                        : nullptr;
            y.eight = threadIdx.x % 2;
            sum_fed<plain_side, false>(sum, &room_a, &room_b, &x, &y, col, 0, t.k);
        }
        t.n = in.to;
        put_tile<T, plain_side>(c, sum, t, r.row, r.end, col, nullptr, false);
    }
}

/* ---- by tensor cores ---- */

/* 128 rows of w in codes, of which two neighbouring eights a stage are this thread's. */
template <class T> struct code_reader {
    lm_code_kind kind;
    const uint8_t *row; /* null: outside */
    int64_t eight;      /* the first of those in w */
    int rows, left;     /* as a reader's */
    code_words w[2];
};

template <class T> __device__ inline void load_stage(code_reader<T> *r)
{
#pragma unroll
    for (int j = 0; j < 2; j++)
        if (r->row && r->left > 0)
            r->w[j] = load_eight(r->kind, r->row, r->eight + j);
}

template <class T>
__device__ inline code_reader<T> reader_of_codes(const code_stretch &w, int64_t first, int rows,
                                                 int64_t k)
{
    const int line = (int)threadIdx.x / 2;
    code_reader<T> r = {};
    r.kind = w.kind;
    r.row = line < rows ? code_row(w, first + line) : nullptr;
    r.eight = threadIdx.x % 2 * 2;
    r.rows = rows;
    r.left = (int)k;
    load_stage(&r);
    return r;
}

/* Store the stage whose codes were read before, and read those of the next. */
template <class T, bool TURNED> __device__ inline void read_stage(T *to, code_reader<T> *r)
{
    T *line = to + (int)threadIdx.x / 2 * stage_part<false>::pitch + threadIdx.x % 2 * 16;
    static_assert(!TURNED, "codes lie along the depth");
#pragma unroll
    for (int j = 0; j < 2; j++) {
        T v[8] = {};
        if (r->row)
            rounded_eight(r->kind, r->w[j], r->eight + j, v);
        put_eight(line + 8 * j, true, v);
    }
    r->eight += steps / 8;
    r->left -= steps;
    load_stage(r);
}

template <class T>
static __global__ void __launch_bounds__(256, 2)
    grouped_codes_tensor_kernel(const T *a, code_stretch w, T *c, const int32_t *offsets,
                                int64_t groups, tiling t)
{
    LM_DYNAMIC_SHARED(T, shared);

    for (int64_t i = blockIdx.x; i < t.tiles_m * t.tiles_n; i += gridDim.x) {
        int64_t strip, col;
        tile_at(t, i, &strip, &col);
        group_rows r = rows_of_strip<side>(offsets, groups, t.m, strip);
        code_window in = window_of(w, r.g, groups, t.n);
        col = in.from + col * side;
        if (r.row >= r.end || col >= in.to) /* the whole block */
            continue;
        int rows = inside(r.end - r.row), cols = inside(in.to - col);
        warp_sums sum = {};
        if (r.g < groups)
            sum_stages<T, false, false>(
                &sum, shared, reader_of<T, false>(a, r.row * t.lda, t.lda, rows, (int)t.k),
                reader_of_codes<T>(w, r.g * t.n + col - w.row, cols, t.k));
        store_rounded<T>(c + r.row * t.ldc + col, t.ldc, sum, shared, rows, cols);
    }
}

/* Whether x and y can be moved 16 bytes at a time in the columns of this stretch. */
template <class T> static bool serves(const lm_call *c, const code_stretch &w, const tiling &t)
{
    const int n = wide<T>::n;
    return t.lda % n == 0 && t.ldc % n == 0 && w.row % n == 0 && w.rows % n == 0 &&
           packs<T>(n, 0, c->in[0].data, c->out[0].data);
}

template <class T> static bool by_tensor_cores(const lm_call *c, const code_stretch &w)
{
    const int bytes = shared_part<false, false>::bytes;
    tiling t = rows_tiling<T, side>(c, false);
    if (!serves<T>(c, w, t))
        return false;
    LM_ALLOW_SHARED((grouped_codes_tensor_kernel<T>), bytes);
    LM_LAUNCH((grouped_codes_tensor_kernel<T>), tile_blocks(t.tiles_m * t.tiles_n), block_threads,
              bytes, c->stream, in_ptr<T>(c, 0), w, out_ptr<T>(c, 0), in_ptr<int32_t>(c, 2),
              groups_of(c), t);
    return true;
}
template <> bool by_tensor_cores<float>(const lm_call *, const code_stretch &)
{
    return false;
}

/* ---- launches ---- */

template <class T> static void by_few(const lm_call *c)
{
    code_few f = {};
    f.w = c->in[1].codes;
    f.act = c->in[0].dtype;
    f.m = c->in[0].dim[0], f.n = c->out[0].dim[1], f.k = c->in[0].dim[1];
    f.x = c->in[0].data, f.ldx = f.k;
    f.y = c->out[0].data, f.ldy = f.n;
    f.offsets = in_ptr<int32_t>(c, 2), f.groups = groups_of(c);
    code_few_run(&f, c->stream);
}

template <class T> void grouped_codes(const lm_call *c, bool tensor)
{
    code_stretch w;
    if (c->in[0].dim[0] <= few_grouped_rows) {
        by_few<T>(c);
        return;
    }
    for (int i = 0; code_next(c->in[1].codes, c->in[0].dim[1], &i, &w);) {
        if (tensor && by_tensor_cores<T>(c, w))
            continue;
        tiling t = rows_tiling<T, plain_side>(c, false);
        t.pack_c = t.pack_c && w.row % 4 == 0 && w.rows % 4 == 0;
        LM_LAUNCH((grouped_codes_kernel<T>), tile_blocks(t.tiles_m * t.tiles_n), block_threads, 0,
                  c->stream, in_ptr<T>(c, 0), w, out_ptr<T>(c, 0), in_ptr<int32_t>(c, 2),
                  groups_of(c), t);
    }
}

template void grouped_codes<float>(const lm_call *c, bool tensor);
template void grouped_codes<bf16>(const lm_call *c, bool tensor);
template void grouped_codes<f16>(const lm_call *c, bool tensor);
