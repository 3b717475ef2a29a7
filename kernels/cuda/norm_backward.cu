/* SPDX-License-Identifier: Apache-2.0 */
/* norm_backward.cu -- gradients of RMSNorm and LayerNorm (kernels/norm.h): of the row, of the
 * weights, and of both in one reading of dy and s.
 *
 * One kernel serves all three.  A thread keeps its columns of a row, their weights, and the sums of
 * their weights' gradients over its rows; the sums of the blocks are stored in scratch and added in
 * order.  The rows of a block follow from the shape alone, so that sums have the same bits on any
 * card.
 *
 * Rows of more than PACKS * GROUP packs, and rows without packed access, are read again after their
 * sums (from the cache, by the threads that read them first), and the weights' sums lie in shared
 * memory: 4 or 8 bytes a column, which have to fit. norm_dx_dw does not serve wider rows. norm_dw
 * alone sums no row, and takes any width in stripes of columns.
 *
 * Products are fused by hand: every form of the kernel makes the same bits of a row. */
#include "kernels/cuda/norm.cuh"

enum { DX = 1, DW = 2, DB = 4 }; /* what an instance makes */

template <class T> struct back_args {
    const T *dy, *s, *dres;
    const float *w, *stat;
    T *ds;
    float *part; /* [blocks][c], with DB [blocks][2][c] */
    int64_t rows, c;
    float over;                 /* 1 / c */
    bool layer, plus_one, once; /* once: x*rstd was not rounded */
};

template <class T, int N> struct back_pack {
    held<T, N> dy, s, res;
};

/* Read the operands that WHAT needs, for the columns from i of row n; `again`: dres too, which sums
 * do not need. */
template <class T, int N, int WHAT>
static __device__ inline void fetch(const back_args<T> &a, int64_t n, int64_t i, bool again,
                                    back_pack<T, N> *p)
{
    int64_t at = n * a.c + i;
    p->dy = load<T, N>(a.dy + at);
    p->s = load<T, N>(a.s + at);
    if (again && (WHAT & DX) && a.dres)
        p->res = load<T, N>(a.dres + at);
}

/* With g = dy w, d = s - mean and h the normed row: g1 += g, g2 += g d, dw += dy h, db += dy. */
template <class T, int N, int WHAT>
static __device__ inline void add_up(const back_args<T> &a, const back_pack<T, N> &p, float mean,
                                     float rstd, const float (&w)[N], float *g1, float *g2,
                                     float (&dw)[N], float (&db)[N])
{
    float h[N];
    for (int j = 0; j < N; j++)
        h[j] = nth(p.s, j) - mean;
    for (int j = 0; (WHAT & DX) && j < N; j++) {
        float dy = nth(p.dy, j);
        *g1 = fmaf(dy, w[j], *g1);
        *g2 = fmaf(dy * w[j], h[j], *g2);
    }
    for (int j = 0; (WHAT & DW) && j < N; j++)
        h[j] *= rstd;
    if ((WHAT & DW) && !a.once) {
        held<T, N> x;
        hold(&x, h);
        for (int j = 0; j < N; j++)
            h[j] = nth(x, j);
    }
    for (int j = 0; (WHAT & DW) && j < N; j++)
        dw[j] = fmaf(nth(p.dy, j), h[j], dw[j]);
    for (int j = 0; (WHAT & DB) && j < N; j++)
        db[j] += nth(p.dy, j);
}

/* The contribution of the whole row to the gradient of each of its columns: rstd g - c1 - d c2. */
struct back_moments {
    float mean, rstd, c1, c2;
};

template <class T>
static __device__ inline back_moments measure(const back_args<T> &a, float mean, float rstd,
                                              float g1, float g2)
{
    float part = rstd * a.over;
    return back_moments{ mean, rstd, a.layer ? part * g1 : 0, part * (g2 * rstd) * rstd };
}

/* ds of one pack, with dres, at a.ds + at. */
template <class T, int N>
static __device__ inline void put(const back_args<T> &a, const back_pack<T, N> &p,
                                  const back_moments &m, const float (&w)[N], int64_t at)
{
    held<T, N> out;
    float ds[N];
    for (int j = 0; j < N; j++) {
        float d = nth(p.s, j) - m.mean, rest = fmaf(-d, m.c2, nth(p.res, j) - m.c1);
        ds[j] = fmaf(nth(p.dy, j) * w[j], m.rstd, rest);
    }
    hold(&out, ds);
    store<T, N>(a.ds + at, out);
}

/* ---- rows in registers ---- */

template <class T, int N> struct back_row {
    back_pack<T, N> p[PACKS];
    float mean, rstd;
};

template <class T, int N, int WHAT>
static __device__ inline void fetch_row(const back_args<T> &a, int64_t n, int64_t first,
                                        back_row<T, N> *r)
{
    const int64_t per = (int64_t)blockDim.x * N;
    if (n >= a.rows)
        return;
    for (int k = 0; k < PACKS; k++)
        if (first + k * per < a.c)
            fetch<T, N, WHAT>(a, n, first + k * per, !(WHAT & DB), &r->p[k]);
    r->mean = a.stat[2 * n];
    r->rstd = a.stat[2 * n + 1];
}

template <int N> static __device__ inline void add_floats(float (&sum)[N], const float *p)
{
    float x[N];
    load_floats<N>(x, p);
    for (int j = 0; j < N; j++)
        sum[j] += x[j];
}

/* Add the sums of a block's groups to its part, one group after the other.  A thread writes only
 * columns that it read itself, so one barrier for each group is enough. */
template <int N, int WHAT>
static __device__ inline void write_parts(float (&dw)[PACKS][N], float (&db)[PACKS][N],
                                          int64_t first, int64_t c, float *part)
{
    enum { SUMS = WHAT & DB ? 2 : 1, COLS = GROUP / 4 * N }; /* of two groups or more, at most */
    __shared__ __align__(16) float sum[SUMS][PACKS][COLS];
    const int64_t per = (int64_t)blockDim.x * N;
    const int at = (int)threadIdx.x * N;
    for (unsigned y = 0; y + 1 < blockDim.y; y++) {
        for (int k = 0; threadIdx.y == y && k < PACKS; k++) {
            store_floats<N>(sum[0][k] + at, dw[k]);
            if (WHAT & DB)
                store_floats<N>(sum[SUMS - 1][k] + at, db[k]);
        }
        __syncthreads();
        for (int k = 0; threadIdx.y == y + 1 && k < PACKS; k++) {
            add_floats<N>(dw[k], sum[0][k] + at);
            if (WHAT & DB)
                add_floats<N>(db[k], sum[SUMS - 1][k] + at);
        }
    }
    part += (int64_t)blockIdx.x * SUMS * c;
    for (int k = 0; threadIdx.y + 1 == blockDim.y && k < PACKS; k++)
        if (first + k * per < c) {
            store_floats<N>(part + first + k * per, dw[k]);
            if (WHAT & DB)
                store_floats<N>(part + c + first + k * per, db[k]);
        }
}

/* blockIdx.y: a stripe of columns, of which there are several only where no row is summed.
 * Columns past the last hold zeros all along. */
template <class T, int N, int WHAT>
static __global__ void __launch_bounds__(GROUP, 1) back_rows(back_args<T> a)
{
    const int64_t per = (int64_t)blockDim.x * N, step = (int64_t)gridDim.x * blockDim.y;
    const int64_t first = (int64_t)blockIdx.y * per * PACKS + (int64_t)threadIdx.x * N;
    float w[PACKS][N] = {}, dw[PACKS][N] = {}, db[PACKS][N] = {};
    back_row<T, N> r, next = {};
    int turn = 0;
    for (int k = 0; (WHAT & DX) && k < PACKS; k++)
        if (first + k * per < a.c)
            load_weights<N>(w[k], a.w + first + k * per, a.plus_one);
    int64_t base = (int64_t)blockIdx.x * blockDim.y, n = base + threadIdx.y;
    fetch_row<T, N, WHAT>(a, n, first, &next);
    for (; base < a.rows; base += step, n += step) {
        float g1 = 0, g2 = 0;
        r = next;
        fetch_row<T, N, WHAT>(a, n + step, first, &next);
        /* not read ahead: registers do not suffice */
        for (int k = 0; (WHAT & DX) && (WHAT & DB) && k < PACKS; k++)
            if (a.dres && n < a.rows && first + k * per < a.c)
                r.p[k].res = load<T, N>(a.dres + n * a.c + first + k * per);
        for (int k = 0; n < a.rows && k < PACKS; k++)
            add_up<T, N, WHAT>(a, r.p[k], r.mean, r.rstd, w[k], &g1, &g2, dw[k], db[k]);
        if (!(WHAT & DX))
            continue;
        row_sums(&g2, &g1, a.layer, &turn);
        back_moments m = measure(a, r.mean, r.rstd, g1, g2);
        for (int k = 0; n < a.rows && k < PACKS; k++)
            if (first + k * per < a.c)
                put<T, N>(a, r.p[k], m, w[k], n * a.c + first + k * per);
    }
    if (WHAT & DW)
        write_parts<N, WHAT>(dw, db, first, a.c, a.part);
}

/* ---- rows that are read again ---- */

/* The weights' sums of column i lie at sum[i] and sum[c + i] of the group's own: its thread alone
 * touches them until the end. */
template <class T, int N, int WHAT>
static __device__ inline void sum_wide(const back_args<T> &a, int64_t n, float *sum, float *g1,
                                       float *g2)
{
    const int64_t per = (int64_t)blockDim.x * N;
    const float mean = a.stat[2 * n], rstd = a.stat[2 * n + 1];
    for (int64_t i0 = (int64_t)threadIdx.x * N; i0 < a.c; i0 += FLIGHT * per) {
        back_pack<T, N> p[FLIGHT];
        for (int k = 0; k < FLIGHT; k++)
            if (i0 + k * per < a.c)
                fetch<T, N, WHAT>(a, n, i0 + k * per, false, &p[k]);
        for (int k = 0; k < FLIGHT; k++) {
            int64_t i = i0 + k * per;
            float w[N], dw[N], db[N];
            if (i >= a.c)
                break;
            load_weights<N>(w, a.w + i, a.plus_one);
            if (WHAT & DW)
                load_floats<N>(dw, sum + i);
            if (WHAT & DB)
                load_floats<N>(db, sum + a.c + i);
            add_up<T, N, WHAT>(a, p[k], mean, rstd, w, g1, g2, dw, db);
            if (WHAT & DW)
                store_floats<N>(sum + i, dw);
            if (WHAT & DB)
                store_floats<N>(sum + a.c + i, db);
        }
    }
}

template <class T, int N>
static __device__ inline void put_wide(const back_args<T> &a, int64_t n, float g1, float g2)
{
    const int64_t per = (int64_t)blockDim.x * N;
    const back_moments m = measure(a, a.stat[2 * n], a.stat[2 * n + 1], g1, g2);
    for (int64_t i0 = (int64_t)threadIdx.x * N; i0 < a.c; i0 += FLIGHT * per) {
        back_pack<T, N> p[FLIGHT] = {};
        for (int k = 0; k < FLIGHT; k++)
            if (i0 + k * per < a.c)
                fetch<T, N, DX>(a, n, i0 + k * per, true, &p[k]);
        for (int k = 0; k < FLIGHT; k++) {
            int64_t i = i0 + k * per;
            float w[N];
            if (i >= a.c)
                break;
            load_weights<N>(w, a.w + i, a.plus_one);
            put<T, N>(a, p[k], m, w, n * a.c + i);
        }
    }
}

template <class T, int N, int WHAT>
static __global__ void __launch_bounds__(GROUP, 1) back_wide(back_args<T> a)
{
    const int64_t step = (int64_t)gridDim.x * blockDim.y, sums = (WHAT & DB ? 2 : 1) * a.c;
    const int64_t tid = (int64_t)threadIdx.y * blockDim.x + threadIdx.x;
    LM_DYNAMIC_SHARED(float, sum); /* [groups][sums], with DW */
    float *mine = sum + threadIdx.y * sums;
    int turn = 0;
    for (int64_t i = tid; (WHAT & DW) && i < blockDim.y * sums; i += blockDim.x * blockDim.y)
        sum[i] = 0;
    __syncthreads();
    for (int64_t base = (int64_t)blockIdx.x * blockDim.y; base < a.rows; base += step) {
        int64_t n = base + threadIdx.y;
        float g1 = 0, g2 = 0;
        if (n < a.rows)
            sum_wide<T, N, WHAT>(a, n, mine, &g1, &g2);
        row_sums(&g2, &g1, a.layer, &turn);
        if (n < a.rows)
            put_wide<T, N>(a, n, g1, g2);
    }
    __syncthreads();
    for (int64_t i = tid; (WHAT & DW) && i < sums; i += blockDim.x * blockDim.y) {
        float x = 0;
        for (unsigned y = 0; y < blockDim.y; y++)
            x += sum[y * sums + i];
        a.part[(int64_t)blockIdx.x * sums + i] = x;
    }
}

/* ---- the parts in order ---- */

/* Threads: 32 columns in x, FOLD in y over parts. */
enum { FOLD = 32 };

static __global__ void __launch_bounds__(32 * FOLD)
    fold_parts(const float *part, int64_t parts, int64_t n, int64_t c, float *out0, float *out1,
               bool first)
{
    __shared__ float sum[FOLD][32];
    int64_t col = (int64_t)blockIdx.x * 32 + threadIdx.x;
    float x = 0;
#pragma unroll 8
    for (int64_t k = threadIdx.y; k < (col < n ? parts : 0); k += FOLD)
        x += part[k * n + col];
    sum[threadIdx.y][threadIdx.x] = x;
    __syncthreads();
    if (threadIdx.y != 0 || col >= n)
        return;
    for (int k = 1; k < FOLD; k++)
        x += sum[k][threadIdx.x];
    float *out = col < c ? out0 + col : out1 + (col - c);
    *out = first ? x : *out + x;
}

void lm_cuda_fold(const lm_call *c, int64_t parts, int64_t width, float *out0, float *out1,
                  lm_acc acc)
{
    lm_cuda_fold_unlike(c, parts, width, out1 ? width : 0, out0, out1, acc);
}

void lm_cuda_fold_unlike(const lm_call *c, int64_t parts, int64_t width, int64_t more, float *out0,
                         float *out1, lm_acc acc)
{
    int64_t n = width + more;
    LM_LAUNCH(fold_parts, (unsigned)((n + 31) / 32), dim3(32, FOLD), 0, c->stream,
              (const float *)c->work, parts, n, width, out0, out1, overwrites(c, acc));
}

/* ---- launches ---- */

/* Blocks that sum over rows: enough for SMS multiprocessors, whatever the card has; each group with
 * two rows at least. */
enum { SMS = 128 };

static int64_t parts_of(const row_split *l, int64_t rows, int64_t stripes)
{
    int64_t parts = SMS * l->there / stripes, most = (rows + 2 * l->block.y - 1) / (2 * l->block.y);
    parts = parts < 1 ? 1 : parts;
    return parts < most ? parts : most;
}

/* For rows in packs of n; rows in single numbers (n = 1) are read again. */
static row_split lay_back(int64_t c, int n)
{
    return lay_rows(c / n, n > 1);
}

/* Shared memory of back_wide; `sums`: 0, 1 or 2. */
static size_t wide_bytes(const row_split *l, int64_t c, int sums)
{
    return (size_t)l->block.y * (size_t)c * (size_t)sums * sizeof(float);
}

template <class T, int N, int WHAT>
static void launch_wide(const back_args<T> &a, const row_split *l, dim3 grid, const lm_stream *s)
{
    size_t bytes = wide_bytes(l, a.c, (WHAT & DW ? 1 : 0) + (WHAT & DB ? 1 : 0));
    if (bytes)
        LM_ALLOW_SHARED((back_wide<T, N, WHAT>), (int)bytes);
    LM_LAUNCH((back_wide<T, N, WHAT>), grid, l->block, bytes, s, a);
}

/* norm_dx, with sums or without; returns how many parts the sums have. */
template <class T, int WHAT> static int64_t run_back(const lm_call *c, back_args<T> a)
{
    const int N = wide<T>::n;
    const lm_stream *s = c->stream;
    a.dy = in_ptr<T>(c, 0);
    a.s = in_ptr<T>(c, 1);
    a.w = in_ptr<float>(c, 2);
    a.stat = in_ptr<float>(c, 3);
    a.dres = in_ptr<T>(c, 4);
    a.ds = out_ptr<T>(c, 0);
    bool packed = packs<T>(N, a.c, a.dy, a.s, a.dres, a.ds) && packs<float>(4, a.c, a.w, a.part);
    row_split l = lay_back(a.c, packed ? N : 1);
    int64_t parts = WHAT & DW ? parts_of(&l, a.rows, 1) : (int64_t)rows_grid(&l, a.rows, s);
    dim3 grid((unsigned)parts);
    if (parts == 0)
        return 0;
    if (!packed)
        launch_wide<T, 1, WHAT>(a, &l, grid, s);
    else if (l.kept)
        LM_LAUNCH((back_rows<T, N, WHAT>), grid, l.block, 0, s, a);
    else
        launch_wide<T, N, WHAT>(a, &l, grid, s);
    return parts;
}

/* The arguments that follow from the row operand and the attributes. */
template <class T> static back_args<T> back_of(const lm_call *c)
{
    const lm_norm_attr *at = (const lm_norm_attr *)c->attr;
    back_args<T> a = {};
    a.rows = rows_of(&c->in[1]);
    a.c = width_of(&c->in[1]);
    a.over = 1 / (float)a.c;
    a.layer = at->kind == LM_NORM_LAYER;
    a.plus_one = at->plus_one;
    a.once = at->kind != LM_NORM_RMS || at->plus_one;
    a.part = (float *)c->work;
    return a;
}

template <class T> static void norm_dx(const lm_call *c)
{
    back_args<T> a = back_of<T>(c);
    a.part = nullptr;
    run_back<T, DX>(c, a);
}

template <class T> static void norm_dx_dw(const lm_call *c)
{
    back_args<T> a = back_of<T>(c);
    float *dw = out_ptr<float>(c, 1), *db = out_ptr<float>(c, 2);
    int64_t parts = db ? run_back<T, DX | DW | DB>(c, a) : run_back<T, DX | DW>(c, a);
    lm_cuda_fold(c, parts, a.c, dw, db, ((const lm_norm_attr *)c->attr)->acc);
}

/* A block's stripe has as many columns as a group takes. */
static row_split lay_stripes(int64_t units, int64_t *stripes)
{
    *stripes = units > PACKS * GROUP ? (units + PACKS * GROUP - 1) / (PACKS * GROUP) : 1;
    return lay_rows((units + *stripes - 1) / *stripes, true);
}

template <class T, int WHAT> static int64_t run_sums(const lm_call *c, back_args<T> a)
{
    const int N = wide<T>::n;
    a.dy = in_ptr<T>(c, 0);
    a.s = in_ptr<T>(c, 1);
    a.stat = in_ptr<float>(c, 2);
    bool packed = packs<T>(N, a.c, a.dy, a.s) && packs<float>(4, a.c, a.part);
    int64_t stripes, units = packed ? a.c / N : a.c;
    row_split l = lay_stripes(units, &stripes);
    int64_t parts = parts_of(&l, a.rows, stripes);
    dim3 grid((unsigned)parts, (unsigned)stripes);
    if (parts && packed)
        LM_LAUNCH((back_rows<T, N, WHAT>), grid, l.block, 0, c->stream, a);
    else if (parts)
        LM_LAUNCH((back_rows<T, 1, WHAT>), grid, l.block, 0, c->stream, a);
    return parts;
}

template <class T> static void norm_dw(const lm_call *c)
{
    back_args<T> a = back_of<T>(c);
    float *dw = out_ptr<float>(c, 0), *db = out_ptr<float>(c, 1);
    int64_t parts = db ? run_sums<T, DW | DB>(c, a) : run_sums<T, DW>(c, a);
    lm_cuda_fold(c, parts, a.c, dw, db, ((const lm_norm_attr *)c->attr)->acc);
}

/* The larger of the needs of packs and of single numbers: the addresses of the operands are not
 * known yet. */
static size_t parts_bytes(const lm_call *c, int64_t packed, int64_t single, int out)
{
    int64_t parts = packed > single ? packed : single;
    int sums = c->n_out > out && c->out[out].ndim ? 2 : 1;
    return (size_t)parts * (size_t)width_of(&c->in[1]) * (size_t)sums * sizeof(float);
}

static size_t norm_dw_work(const lm_call *c, int threads)
{
    int64_t rows = rows_of(&c->in[1]), width = width_of(&c->in[1]), stripes;
    int64_t n = 16 / (int64_t)lm_dtype_size(c->in[1].dtype);
    row_split l = lay_stripes(width / n, &stripes);
    int64_t packed = parts_of(&l, rows, stripes);
    (void)threads;
    l = lay_stripes(width, &stripes);
    return parts_bytes(c, packed, parts_of(&l, rows, stripes), 1);
}

static size_t norm_dx_dw_work(const lm_call *c, int threads)
{
    int64_t rows = rows_of(&c->in[1]), width = width_of(&c->in[1]);
    row_split packed = lay_back(width, 16 / (int)lm_dtype_size(c->in[1].dtype));
    row_split single = lay_back(width, 1);
    int sums = c->n_out > 2 && c->out[2].ndim ? 2 : 1;
    (void)threads;
    if (c->stream && wide_bytes(&single, width, sums) + 1024 > c->stream->shared_max)
        return SIZE_MAX;
    return parts_bytes(c, parts_of(&packed, rows, 1), parts_of(&single, rows, 1), 2);
}

extern "C" const lm_kernel lm_norm_backward_cuda_kernels[] = {
    LM_CUDA_ROWS("norm_dx", norm_dx, nullptr), LM_CUDA_ROWS("norm_dw", norm_dw, norm_dw_work),
    LM_CUDA_ROWS("norm_dx_dw", norm_dx_dw, norm_dx_dw_work), LM_CUDA_END
};
