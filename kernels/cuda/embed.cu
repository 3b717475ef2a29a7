/* SPDX-License-Identifier: Apache-2.0 */
/* embed.cu -- token and position embeddings, and their gradients.
 *
 * A table's gradient is computed from the positions of its rows: (id, row) pairs are sorted by id,
 * stably, by a radix sort of 8 bits a pass; each id then has the range of its rows in that order,
 * and one block sums them and writes (or clears) the id's row of the table.  If bits may differ
 * from run to run, rows are added by atomics instead. */
#include "kernels/cuda/code_rows.cuh"
#include "kernels/cuda/grid2d.cuh"

extern "C" {
#include "kernels/embed.h"
}

/* ---- lookup ---- */

/* The factor of wte's rows, rounded to the activation type `act`. */
static float scale_of(const lm_call *c, lm_dtype act)
{
    const lm_embed_attr *a = (const lm_embed_attr *)c->attr;
    float cell = 0;
    lm_set(act, &cell, 0, a->scale != 0 ? a->scale : 1);
    return (float)lm_get(act, &cell, 0);
}

template <class T, int N>
__global__ void embed_kernel(int64_t rows, int64_t width, int64_t ids, const int32_t *tok,
                             const T *wte, const int32_t *pos, const T *wpe, float scale, T *x)
{
    typedef pack<T, N> part;
    int64_t r = grid2d_row(), id = r < rows ? tok[r] : 0, at = wpe && r < rows ? pos[r] : 0;
#pragma unroll 1
    for (; r < rows; r += grid2d_rows()) {
        bool known = id < ids; /* or virtual */
        const T *from = wte + (known ? id : 0) * width, *place = wpe ? wpe + at * width : nullptr;
        if (r + grid2d_rows() < rows) { /* read ahead for the next row */
            id = tok[r + grid2d_rows()];
            at = wpe ? pos[r + grid2d_rows()] : 0;
        }
#pragma unroll 1
        for (int64_t i = grid2d_col() * N; i < width; i += grid2d_cols() * N) {
            part v = {};
            if (known)
                v = *(const part *)(from + i);
            if (place || scale != 1) {
                part w = {};
                if (place)
                    w = *(const part *)(place + i);
#pragma unroll
                for (int j = 0; j < N; j++)
                    v.v[j] = from_float<T>(to_float(v.v[j]) * scale + to_float(w.v[j]));
            }
            *(part *)(x + r * width + i) = v;
        }
    }
}

/* The same for ids whose rows of wte are in the stretch of codes; rows of virtual ones belong to the stretch that begins the
 * table. */
template <class T>
__global__ void embed_codes_kernel(int64_t rows, int64_t width, int64_t ids, const int32_t *tok,
                                   code_stretch wte, const int32_t *pos, const T *wpe, float scale,
                                   bool packed, T *x)
{
#pragma unroll 1
    for (int64_t r = grid2d_row(); r < rows; r += grid2d_rows()) {
        const int64_t id = tok[r], at = id - wte.row;
        const bool known = id < ids;
        if (known ? at < 0 || at >= wte.rows : wte.row > 0)
            continue;
        const uint8_t *from = code_row(wte, known ? at : 0);
        const T *place = wpe ? wpe + pos[r] * width : nullptr;
#pragma unroll 1
        for (int64_t i = grid2d_col(); i < width / 8; i += grid2d_cols()) {
            T v[8], w[8] = {};
            rounded_eight(wte.kind, load_eight(wte.kind, from, i), i, v);
            if (place)
                get_eight(place + i * 8, packed, w);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                v[j] = known ? v[j] : T();
                if (place || scale != 1)
                    v[j] = from_float<T>(to_float(v[j]) * scale + to_float(w[j]));
            }
            put_eight(x + r * width + i * 8, packed, v);
        }
    }
}

template <class T> static void embed_codes(const lm_call *c)
{
    int64_t rows = rows_of(&c->out[0]), width = width_of(&c->out[0]), ids = c->in[1].dim[0];
    const int32_t *tok = in_ptr<const int32_t>(c, 0), *pos = in_ptr<const int32_t>(c, 2);
    const T *wpe = in_ptr<const T>(c, 3);
    T *x = out_ptr<T>(c, 0);
    bool packed = packs<T>(wide<T>::n, width, wpe, x);
    grid2d over = grid2d_for(rows, width / 8, c->stream);
    code_stretch w;
    for (int i = 0; code_next(c->in[1].codes, width, &i, &w);)
        LM_LAUNCH((embed_codes_kernel<T>), over.grid, over.block, 0, c->stream, rows, width, ids,
                  tok, w, pos, wpe, scale_of(c, c->out[0].dtype), packed, x);
}

template <class T> static void embed(const lm_call *c)
{
    if (c->in[1].codes) {
        embed_codes<T>(c);
        return;
    }
    const int n = wide<T>::n;
    int64_t rows = rows_of(&c->out[0]), width = width_of(&c->out[0]), ids = c->in[1].dim[0];
    const int32_t *tok = in_ptr<const int32_t>(c, 0), *pos = in_ptr<const int32_t>(c, 2);
    const T *wte = in_ptr<const T>(c, 1), *wpe = in_ptr<const T>(c, 3);
    T *x = out_ptr<T>(c, 0);
    float scale = scale_of(c, c->out[0].dtype);
    bool packed = packs<T>(n, width, wte, wpe, x);
    grid2d over = grid2d_for(rows, packed ? width / n : width, c->stream);
    if (packed)
        LM_LAUNCH((embed_kernel<T, n>), over.grid, over.block, 0, c->stream, rows, width, ids, tok,
                  wte, pos, wpe, scale, x);
    else
        LM_LAUNCH((embed_kernel<T, 1>), over.grid, over.block, 0, c->stream, rows, width, ids, tok,
                  wte, pos, wpe, scale, x);
}

/* ---- sorting rows by id ---- */

enum {
    SORT_THREADS = 256, /* as many as digits: thread d also handles digit d */
    SORT_WARPS = SORT_THREADS / 32,
    SORT_EACH = 8, /* elements of a thread */
    SORT_TILE = SORT_THREADS * SORT_EACH,
    DIGITS = 256,
};

static int64_t tiles_of(int64_t rows)
{
    return (rows + SORT_TILE - 1) / SORT_TILE;
}

__device__ inline unsigned digit_of(uint32_t id, int shift)
{
    return id >> shift & (DIGITS - 1);
}

/* The sum over this lane and those before it. */
__device__ inline uint32_t up_to_me(uint32_t x)
{
    for (unsigned o = 1; o < 32; o *= 2) {
        uint32_t left = __shfl_up_sync(0xffffffffu, x, o);
        x += threadIdx.x % 32 >= o ? left : 0;
    }
    return x;
}

/* count[d * tiles + t]: elements of tile t with digit d. */
__global__ void __launch_bounds__(SORT_THREADS)
    sort_count(int64_t rows, int64_t tiles, int shift, const uint32_t *id, uint32_t *count)
{
    __shared__ uint32_t seen[DIGITS];
#pragma unroll 1
    for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
        seen[threadIdx.x] = 0;
        __syncthreads();
#pragma unroll
        for (int k = 0; k < SORT_EACH; k++) {
            int64_t i = t * SORT_TILE + k * SORT_THREADS + threadIdx.x;
            if (i < rows)
                atomicAdd(&seen[digit_of(id[i], shift)], 1u);
        }
        __syncthreads();
        count[threadIdx.x * tiles + t] = seen[threadIdx.x];
        __syncthreads();
    }
}

/* A warp for each digit: its counts become the number in earlier tiles, all[d] the number in
 * all. */
__global__ void __launch_bounds__(SORT_THREADS)
    sort_scan(int64_t tiles, uint32_t *count, uint32_t *all)
{
    const unsigned lane = threadIdx.x % 32, digit = blockIdx.x * SORT_WARPS + threadIdx.x / 32;
    uint32_t *mine = count + digit * tiles, carry = 0;
    for (int64_t t = 0; t < tiles; t += 32) {
        uint32_t x = t + lane < tiles ? mine[t + lane] : 0, sum = up_to_me(x);
        if (t + lane < tiles)
            mine[t + lane] = carry + sum - x;
        carry += __shfl_sync(0xffffffffu, sum, 31);
    }
    if (lane == 0)
        all[digit] = carry;
}

/* The number of elements with smaller digits than the thread's own. */
__device__ inline uint32_t before_digit(const uint32_t *all)
{
    __shared__ uint32_t warp_all[SORT_WARPS];
    uint32_t mine = all[threadIdx.x], sum = up_to_me(mine), base = sum - mine;
    if (threadIdx.x % 32 == 31)
        warp_all[threadIdx.x / 32] = sum;
    __syncthreads();
    for (unsigned w = 0; w < threadIdx.x / 32; w++)
        base += warp_all[w];
    return base;
}

/* Lanes of the warp that are in use and have the same digit as this one. */
__device__ inline unsigned peers_of(unsigned digit, bool used)
{
    unsigned peers = __ballot_sync(0xffffffffu, used);
    for (int bit = 0; bit < 8; bit++) {
        unsigned set = __ballot_sync(0xffffffffu, digit >> bit & 1);
        peers &= digit >> bit & 1 ? set : ~set;
    }
    return peers;
}

/* Elements go to their places: those of smaller digits first, then those of earlier tiles, of
 * earlier warps of the tile, of earlier lanes.  row_in null: an element's row is its index. */
__global__ void __launch_bounds__(SORT_THREADS)
    sort_move(int64_t rows, int64_t tiles, int shift, const uint32_t *id_in, const uint32_t *row_in,
              const uint32_t *count, const uint32_t *all, uint32_t *id_out, uint32_t *row_out)
{
    __shared__ uint32_t place[SORT_WARPS][DIGITS];
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t digit_base = before_digit(all);
#pragma unroll 1
    for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
        uint32_t id[SORT_EACH], rank[SORT_EACH];
        int64_t first = t * SORT_TILE + warp * (SORT_TILE / SORT_WARPS) + lane;
#pragma unroll
        for (int w = 0; w < SORT_WARPS; w++)
            place[w][threadIdx.x] = 0;
        __syncthreads();
#pragma unroll
        for (int k = 0; k < SORT_EACH; k++) {
            bool used = first + k * 32 < rows;
            id[k] = used ? id_in[first + k * 32] : 0;
            unsigned d = digit_of(id[k], shift), peers = peers_of(d, used);
            unsigned earlier = __popc(peers & ((1u << lane) - 1));
            rank[k] = place[warp][d] + earlier;
            __syncwarp();
            if (used && earlier == 0)
                place[warp][d] += __popc(peers);
            __syncwarp();
        }
        __syncthreads();
        uint32_t next = digit_base + count[threadIdx.x * tiles + t];
#pragma unroll
        for (int w = 0; w < SORT_WARPS; w++) {
            uint32_t n = place[w][threadIdx.x];
            place[w][threadIdx.x] = next;
            next += n;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < SORT_EACH; k++) {
            int64_t i = first + k * 32;
            if (i < rows) {
                uint32_t at = place[warp][digit_of(id[k], shift)] + rank[k];
                id_out[at] = id[k];
                row_out[at] = row_in ? row_in[i] : (uint32_t)i;
            }
        }
        __syncthreads();
    }
}

/* start[v]: the beginning of the rows of id v in the sorted order, v = 0 .. ids. */
__global__ void run_starts(int64_t rows, int64_t ids, const uint32_t *sorted, uint32_t *start)
{
#pragma unroll 1
    for (int64_t v = global_thread(); v <= ids; v += global_threads()) {
        int64_t low = 0, high = rows;
        while (low < high) {
            int64_t mid = (low + high) / 2;
            if (sorted[mid] < v)
                low = mid + 1;
            else
                high = mid;
        }
        start[v] = (uint32_t)low;
    }
}

/* Scratch of the sort of `rows` ids below `ids`: rows are counted in 32 bits. */
struct sorter {
    uint32_t *id[2], *row[2], *count, *all, *start;
};

static size_t sorter_words(int64_t rows, int64_t ids)
{
    return (size_t)(4 * rows + DIGITS * tiles_of(rows) + DIGITS + ids + 1);
}

static sorter sorter_at(void *work, int64_t rows)
{
    uint32_t *p = (uint32_t *)work;
    sorter s;
    for (int i = 0; i < 2; i++) {
        s.id[i] = p + i * rows;
        s.row[i] = p + (2 + i) * rows;
    }
    s.count = p + 4 * rows;
    s.all = s.count + DIGITS * tiles_of(rows);
    s.start = s.all + DIGITS;
    return s;
}

/* Rows in the order of their ids, from 0 to `ids` (rows of one id as they were); s->start says where each begins. */
static const uint32_t *sort_rows(const sorter *s, int64_t rows, int64_t ids, const int32_t *id,
                                 const lm_stream *stream)
{
    int64_t tiles = tiles_of(rows);
    unsigned grid = grid_for(tiles, 1, stream);
    const uint32_t *key = (const uint32_t *)id, *row = nullptr;
    int to = 0;
    for (int shift = 0; shift == 0 || (shift < 32 && ids >> shift); shift += 8) {
        LM_LAUNCH(sort_count, grid, SORT_THREADS, 0, stream, rows, tiles, shift, key, s->count);
        LM_LAUNCH(sort_scan, DIGITS / SORT_WARPS, SORT_THREADS, 0, stream, tiles, s->count, s->all);
        LM_LAUNCH(sort_move, grid, SORT_THREADS, 0, stream, rows, tiles, shift, key, row,
                  (const uint32_t *)s->count, (const uint32_t *)s->all, s->id[to], s->row[to]);
        key = s->id[to];
        row = s->row[to];
        to = 1 - to;
    }
    LM_LAUNCH(run_starts, grid_for(ids + 1, 256, stream), 256, 0, stream, rows, ids, key, s->start);
    return row;
}

/* ---- sums over rows of one id ---- */

enum { SUM_LANES = 32, SUM_IDS = 8 };

/* Adds rows first, first + step, ... of a run of n; several are in flight at once. */
template <int STEP, class T, int N>
__device__ inline void add_run(float *sum, uint32_t first, uint32_t n, const uint32_t *row,
                               const T *dx, int64_t width)
{
    typedef pack<T, N> part;
    const int U = 4;
#pragma unroll 1
    for (uint32_t r = first; r < n; r += U * STEP) {
        part p[U] = {};
#pragma unroll
        for (int u = 0; u < U; u++)
            if (r + u * STEP < n)
                p[u] = *(const part *)(dx + (int64_t)row[r + u * STEP] * width);
#pragma unroll
        for (int u = 0; u < U; u++)
#pragma unroll
            for (int j = 0; j < N; j++)
                sum[j] += to_float(p[u].v[j]);
    }
}

template <int N>
__device__ inline void put_sum(float *to, const float *sum, float scale, bool replace)
{
    const int M = N < 4 ? N : 4;
    typedef pack<float, M> part;
#pragma unroll
    for (int j = 0; j < N; j += M) {
        part x = {};
        if (!replace)
            x = *(const part *)(to + j);
#pragma unroll
        for (int k = 0; k < M; k++)
            x.v[k] = replace ? sum[j + k] * scale : x.v[k] + sum[j + k] * scale;
        *(part *)(to + j) = x;
    }
}

/* A block of SUM_LANES x SUM_IDS threads takes SUM_LANES packs of columns of SUM_IDS neighbouring
 * ids, a warp to each.  A warp adds the rows of its id in order, when these are SUM_IDS or fewer;
 * those of the others are dealt to all warps in turn, whose sums are added in order. */
template <class T, int N>
__global__ void __launch_bounds__(SUM_LANES *SUM_IDS, 4)
    sum_runs(int64_t ids, int64_t width, bool replace, const uint32_t *start, const uint32_t *row,
             const T *dx, float scale, float *dw)
{
    const int cols = SUM_LANES * N, lane = (int)threadIdx.x, warp = (int)threadIdx.y;
    __shared__ __align__(16) float sums[SUM_IDS][SUM_LANES * N];
    int64_t left = (int64_t)blockIdx.y * cols, mine = left + lane * N;
    int64_t step = (int64_t)gridDim.x * SUM_IDS, v = (int64_t)blockIdx.x * SUM_IDS;
    uint32_t next = start[v + lane < ids ? v + lane : ids];
#pragma unroll 1
    for (; v < ids; v += step) {
        uint32_t begin = next, n = __shfl_down_sync(0xffffffffu, begin, 1) - begin;
        next = start[v + step + lane < ids ? v + step + lane : ids];
        unsigned many = __ballot_sync(0xffffffffu, lane < SUM_IDS && n > SUM_IDS);
        uint32_t my_begin = __shfl_sync(0xffffffffu, begin, warp);
        uint32_t my_n = __shfl_sync(0xffffffffu, n, warp);
        if (v + warp < ids && mine < width && my_n <= SUM_IDS && (replace || my_n)) {
            float sum[N] = {};
            add_run<1, T, N>(sum, 0, my_n, row + my_begin, dx + mine, width);
            put_sum<N>(dw + (v + warp) * width + mine, sum, scale, replace);
        }
#pragma unroll 1
        for (; many; many &= many - 1) {
            int id = __ffs((int)many) - 1;
            uint32_t its_begin = __shfl_sync(0xffffffffu, begin, id);
            uint32_t its_n = __shfl_sync(0xffffffffu, n, id);
            float sum[N] = {};
            if (mine < width)
                add_run<SUM_IDS, T, N>(sum, (uint32_t)warp, its_n, row + its_begin, dx + mine,
                                       width);
            put_sum<N>(sums[warp] + lane * N, sum, scale, true);
            __syncthreads();
            float *to = dw + (v + id) * width + left;
            for (int i = warp * SUM_LANES + lane; i < cols && left + i < width;
                 i += SUM_LANES * SUM_IDS) {
                float x = sums[0][i];
                for (int y = 1; y < SUM_IDS; y++)
                    x += sums[y][i];
                to[i] = replace ? x : to[i] + x;
            }
            __syncthreads();
        }
    }
}

template <class T, int N>
static void run_sums(const lm_call *c, bool replace, const sorter *s, const uint32_t *row,
                     float scale, const lm_tensor *dw)
{
    int64_t ids = dw->dim[0], width = dw->dim[1], cols = SUM_LANES * N;
    unsigned across = (unsigned)((width + cols - 1) / cols);
    dim3 grid(grid_for(ids, SUM_IDS, c->stream), across);
    LM_LAUNCH((sum_runs<T, N>), grid, dim3(SUM_LANES, SUM_IDS), 0, c->stream, ids, width, replace,
              (const uint32_t *)s->start, row, in_ptr<const T>(c, 0), scale, (float *)dw->data);
}

/* ---- the fast form, by atomics ---- */

/* One number at a time: the lanes of a warp add to neighbouring addresses, which memory combines.
 * Several reads come first, because no read passes a pending addition. */
static const int ahead = 4;

template <class T>
__global__ void add_rows(int64_t rows, int64_t width, int64_t ids, const int32_t *id, const T *dx,
                         float scale, float *dw)
{
    int64_t r = grid2d_row(), step = grid2d_cols(), at = r < rows ? id[r] : 0;
#pragma unroll 1
    for (; r < rows; r += grid2d_rows()) {
        const bool known = at >= 0 && at < ids; /* or virtual, or another rank's */
        const T *from = dx + r * width;
        float *to = dw + at * width;
        if (r + grid2d_rows() < rows)
            at = id[r + grid2d_rows()];
#pragma unroll 1
        for (int64_t i = grid2d_col(); known && i < width; i += ahead * step) {
            float x[ahead];
#pragma unroll
            for (int k = 0; k < ahead; k++)
                x[k] = i + k * step < width ? to_float(from[i + k * step]) : 0;
#pragma unroll
            for (int k = 0; k < ahead; k++)
                if (i + k * step < width)
                    atomicAdd(to + i + k * step, x[k] * scale);
        }
    }
}

/* ---- embed_dw ---- */

template <class T>
static void scatter(const lm_call *c, const int32_t *id, const lm_tensor *dw, lm_acc acc,
                    float scale)
{
    const int n = wide<T>::n;
    const T *dx = in_ptr<const T>(c, 0);
    int64_t rows = rows_of(&c->in[0]), width = width_of(&c->in[0]), ids = dw->dim[0];
    bool replace = overwrites(c, acc);
    if (c->stream->deterministic) {
        sorter s = sorter_at(c->work, rows);
        const uint32_t *row = sort_rows(&s, rows, ids, id, c->stream);
        if (packs<T>(n, width, dx) && packs<float>(4, width, dw->data))
            run_sums<T, n>(c, replace, &s, row, scale, dw);
        else
            run_sums<T, 1>(c, replace, &s, row, scale, dw);
        return;
    }
    if (replace)
        cudaMemsetAsync(dw->data, 0, (size_t)lm_tensor_count(dw) * sizeof(float),
                        c->stream->handle);
    grid2d over = grid2d_for(rows, (width + ahead - 1) / ahead, c->stream);
    LM_LAUNCH((add_rows<T>), over.grid, over.block, 0, c->stream, rows, width, dw->dim[0], id, dx,
              scale, (float *)dw->data);
}

static size_t embed_dw_work(const lm_call *c, int)
{
    int64_t rows = rows_of(&c->in[0]), ids = c->out[0].dim[0];
    if (c->n_out > 1 && c->out[1].ndim && c->out[1].dim[0] > ids)
        ids = c->out[1].dim[0];
    return sorter_words(rows, ids) * sizeof(uint32_t);
}

template <class T> static void embed_dw(const lm_call *c)
{
    const lm_embed_attr *a = (const lm_embed_attr *)c->attr;
    scatter<T>(c, in_ptr<const int32_t>(c, 1), &c->out[0], a->acc_tok, scale_of(c, c->in[0].dtype));
    if (out_ptr<float>(c, 1))
        scatter<T>(c, in_ptr<const int32_t>(c, 2), &c->out[1], a->acc_pos, 1);
}

extern "C" const lm_kernel lm_embed_cuda_kernels[] = {
    LM_CUDA_ROWS("embed", embed, nullptr), LM_CUDA_ROWS("embed_dw", embed_dw, embed_dw_work),
    LM_CUDA_END
};
