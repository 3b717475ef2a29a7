/* gemm_plain.cu -- matrix products in plain CUDA, three ways by shape:
 *
 *  rows   (m <= 8, A as it is, B transposed: a token being decoded) one warp for some columns of
 *         C; lanes read 16 bytes of B's rows at a time, each byte of B once.
 *  tiles  a block of 256 threads makes 128x128 (or 64x64) of C: 16 steps of k of both factors lie
 *         in shared memory as floats, k outermost, while the next 16 are on their way in
 *         registers; a thread holds 8x8 (or 4x4) sums and reads 4 floats at a time.
 *  parts  few tiles and a long k (weight gradients of small layers): k is cut, each piece makes its
 *         own F32 product in scratch, and a second kernel adds the pieces in order.
 *
 * Which of them, and how k is cut, follows from the shape alone, and within each the order of the
 * sums is fixed: so are the bits, on any card.  Alignment only changes how memory is read.  A sum
 * into F32 over more than `flush` steps is folded into C every so often, which keeps its error
 * from growing with k as one long F32 sum's does. */
#include "kernels/cuda/gemm_plain.cuh"

static const int depth = 16; /* steps of k in shared memory */
static const int block_threads = 256;
static const int64_t flush = 1024; /* steps of k in one F32 sum; a multiple of depth */
static const int64_t band = 8;     /* tiles of m that blocks in a row share B's columns over (L2) */

/* What all kernels of tiles are given. */
struct tiling {
    int64_t m, n, k;
    int64_t lda, ldb, ldc;
    int64_t part_k;    /* steps of k that one part sums: k when there is one */
    int64_t part_size; /* floats from one part's C to the next */
    int64_t tiles_m, tiles_n, parts;
    const float *bias;
    /* Rows may be read 16 bytes at a time; written, 4 elements. */
    bool pack_a, pack_b, pack_c;
    bool wide_c; /* C is F32 */
    bool accumulate;
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

/* Where a thread reads its first pack of the round that comes next. */
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
__device__ inline void fetch(pack<T, wide<T>::n> *stage, cursor<T> *x, int steps, bool packed)
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
            stage[c] = *(const pack<T, S::P> *)at;
        } else {
#pragma unroll
            for (int e = 0; e < S::P; e++)
                stage[c].v[e] = e < left ? at[e] : from_float<T>(0);
        }
    }
    x->at += K_INSIDE ? depth : depth * x->pitch;
}

/* Put them into shared memory as floats, [step][row]. */
template <class T, bool K_INSIDE, int R>
__device__ inline void place(float *shared, const pack<T, wide<T>::n> *stage)
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
                    shared[(inner + f) * S::pitch + outer] = to_float(stage[c].v[f]);
            } else {
                pack<float, 4> v = { { to_float(stage[c].v[e]), to_float(stage[c].v[e + 1]),
                                       to_float(stage[c].v[e + 2]), to_float(stage[c].v[e + 3]) } };
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

/* Four neighbours of a row of C, of which `left` are inside. */
template <class C>
__device__ inline void put4(C *c, const float *sum, const float *bias, int64_t left, bool packed,
                            bool accumulate)
{
    pack<C, 4> v = {};

    if (packed && left >= 4) {
        if (accumulate)
            v = *(const pack<C, 4> *)c;
#pragma unroll
        for (int j = 0; j < 4; j++)
            v.v[j] = from_float<C>(to_float(v.v[j]) + (sum[j] + bias[j]));
        *(pack<C, 4> *)c = v;
        return;
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (j < left)
            c[j] = from_float<C>((accumulate ? to_float(c[j]) : 0.0f) + (sum[j] + bias[j]));
    }
}

template <class C, int SIDE>
__device__ inline void put_tile(C *c, float (*sum)[SIDE / 16], const tiling &t, int64_t row0,
                                int64_t col0, const float *bias, bool accumulate)
{
    const int per = SIDE / 16;
    int64_t row = row0 + first_row<SIDE>(), col = col0 + first_col<SIDE>();
    float add[per];

#pragma unroll
    for (int j = 0; j < per; j++) {
        int64_t at = col + j / 4 * 32 + j % 4;
        add[j] = bias && at < t.n ? bias[at] : 0.0f;
    }
#pragma unroll
    for (int h = 0; h < per / 4; h++) {
        C *to = c + row * t.ldc + col + h * 32;
        int64_t left = t.n - col - h * 32;
#pragma unroll
        for (int i = 0; i < per; i++) {
            if (left > 0 && row + i / 4 * 16 + i % 4 < t.m)
                put4(to + (i / 4 * 16 + i % 4) * t.ldc, sum[i] + h * 4, add + h * 4, left, t.pack_c,
                     accumulate);
        }
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

/* T: type of A and B; SIDE x SIDE of C a block.  part: of k, blockIdx.y. */
template <class T, bool TA, bool TB, int SIDE>
__global__ void __launch_bounds__(256, SIDE == 128 ? 2 : 3)
    tiles_kernel(const T *a, const T *b, void *c, tiling t)
{
    typedef part_of<T, !TA, SIDE> A;
    typedef part_of<T, TB, SIDE> B;
    __shared__ pack<float, 4> shared_a[2 * A::floats / 4], shared_b[2 * B::floats / 4];
    float *at = (float *)shared_a, *bt = (float *)shared_b;
    pack<T, A::P> stage_a[A::chunks];
    pack<T, B::P> stage_b[B::chunks];
    int64_t part_begin = (int64_t)blockIdx.y * t.part_k;
    int64_t part_end = part_begin + t.part_k < t.k ? part_begin + t.part_k : t.k;
    int64_t stretch = t.wide_c ? flush : t.part_k;

    for (int64_t i = blockIdx.x; i < t.tiles_m * t.tiles_n; i += gridDim.x) {
        int64_t row, col;
        tile_at(t, i, &row, &col);
        row *= SIDE, col *= SIDE;
        for (int64_t k0 = part_begin; k0 < part_end; k0 += stretch) {
            int64_t k1 = k0 + stretch < part_end ? k0 + stretch : part_end;
            float sum[SIDE / 16][SIDE / 16] = {};
            int turn = 0;

            cursor<T> from_a = cursor_at<T, !TA, SIDE>(a, t.lda, row, t.m, k0);
            cursor<T> from_b = cursor_at<T, TB, SIDE>(b, t.ldb, col, t.n, k0);
            /* One round late: what is fetched in a round is multiplied in the next. */
            for (int64_t q = k0 - depth; q < k1; q += depth, turn ^= 1) {
                int64_t left = k1 - q - depth;
                if (left > 0) {
                    int steps = left < depth ? (int)left : depth;
                    fetch<T, !TA, SIDE>(stage_a, &from_a, steps, t.pack_a);
                    fetch<T, TB, SIDE>(stage_b, &from_b, steps, t.pack_b);
                }
                if (q >= k0)
                    multiply<SIDE>(sum, at + turn * A::floats, bt + turn * B::floats);
                if (left > 0) {
                    place<T, !TA, SIDE>(at + (turn ^ 1) * A::floats, stage_a);
                    place<T, TB, SIDE>(bt + (turn ^ 1) * B::floats, stage_b);
                }
                __syncthreads();
            }
            const float *bias = k0 == part_begin ? t.bias : nullptr;
            bool accumulate = t.accumulate || k0 > part_begin;
            if (sizeof(T) == 4 || t.wide_c)
                put_tile<float, SIDE>((float *)c + (int64_t)blockIdx.y * t.part_size, sum, t, row,
                                      col, bias, accumulate);
            else
                put_tile<T, SIDE>((T *)c, sum, t, row, col, bias, accumulate);
        }
    }
}

/* ---- parts of k, added ---- */

template <class C>
__global__ void add_parts_kernel(const float *part, int64_t parts, int64_t m, int64_t n, C *c,
                                 int64_t ldc, const float *bias, bool accumulate)
{
    for (int64_t i = global_thread(); i < m * n; i += global_threads()) {
        float s = part[i];
        for (int64_t p = 1; p < parts; p++)
            s += part[p * m * n + i];
        int64_t row = i / n, col = i % n;
        C *to = c + row * ldc + col;
        *to = from_float<C>((accumulate ? to_float(*to) : 0.0f) + (s + (bias ? bias[col] : 0.0f)));
    }
}

/* ---- few rows ---- */

/* A pack of a row as floats, of which `left` elements are inside. */
template <class T> __device__ inline void lane_pack(float *x, const T *at, int64_t left, bool whole)
{
    const int P = wide<T>::n;
    pack<T, P> v;

    if (whole) {
        v = *(const pack<T, P> *)at;
    } else {
#pragma unroll
        for (int e = 0; e < P; e++)
            v.v[e] = e < left ? at[e] : from_float<T>(0);
    }
#pragma unroll
    for (int e = 0; e < P; e++)
        x[e] = to_float(v.v[e]);
}

/* C [m,n] = A [m,k] B^T, m <= M: a warp makes COLS columns.  A lane sums the packs lane, lane+32,
 * ... of k; the lanes' sums are added by a butterfly. */
template <class T, int M, int COLS>
__global__ void __launch_bounds__(256, 2) rows_kernel(const T *a, const T *b, void *c, tiling t)
{
    const int P = wide<T>::n;
    int lane = (int)threadIdx.x % 32;
    bool packed = t.pack_a && t.pack_b;
    int64_t groups = (t.n + COLS - 1) / COLS, warps = global_threads() / 32;

    for (int64_t group = global_thread() / 32; group < groups; group += warps) {
        int64_t col0 = group * COLS;
        float sum[M][COLS] = {};

        for (int64_t q = (int64_t)lane * P; q < t.k; q += 32 * P) {
            bool whole = packed && q + P <= t.k;
            float w[COLS][P];
#pragma unroll
            for (int j = 0; j < COLS; j++)
                lane_pack(w[j], b + (col0 + j < t.n ? col0 + j : t.n - 1) * t.ldb + q, t.k - q,
                          whole);
#pragma unroll
            for (int i = 0; i < M; i++) {
                float x[P];
                lane_pack(x, a + (i < t.m ? i : t.m - 1) * t.lda + q, t.k - q, whole);
#pragma unroll
                for (int j = 0; j < COLS; j++) {
#pragma unroll
                    for (int e = 0; e < P; e++)
                        sum[i][j] = fmaf(x[e], w[j][e], sum[i][j]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < M; i++) {
#pragma unroll
            for (int j = 0; j < COLS; j++) {
                float s = warp_sum(sum[i][j]);
                int64_t col = col0 + j, at = i * t.ldc + col;
                if (lane != 0 || i >= t.m || col >= t.n)
                    continue;
                s += t.bias ? t.bias[col] : 0.0f;
                if (sizeof(T) == 4 || t.wide_c)
                    ((float *)c)[at] = s + (t.accumulate ? ((float *)c)[at] : 0.0f);
                else
                    ((T *)c)[at] =
                        from_float<T>(s + (t.accumulate ? to_float(((T *)c)[at]) : 0.0f));
            }
        }
    }
}

/* ---- launches ---- */

static int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

static bool few_rows(const gemm_call *g)
{
    return g->m <= 8 && !g->ta && g->tb;
}

/* Tiles that should be in flight: more than fill the largest card.  A constant, so that the bits
 * of a product do not depend on the card. */
static const int64_t enough_tiles = 256;

static int64_t count_tiles(const gemm_call *g, int64_t side)
{
    return ceil_div(g->m, side) * ceil_div(g->n, side);
}
/* Both factors transposed is what no operator asks for: small tiles do. */
static int side_for(const gemm_call *g)
{
    bool both = g->ta && g->tb;
    return !both && count_tiles(g, 128) >= enough_tiles / 2 ? 128 : 64;
}
/* Steps of k that one part sums. */
static int64_t part_steps(const gemm_call *g)
{
    int64_t tiles = count_tiles(g, side_for(g));
    int64_t parts = ceil_div(enough_tiles, tiles), most = g->k / 256;

    if (few_rows(g) || tiles * 2 > enough_tiles || most < 2)
        return g->k;
    parts = parts < most ? parts : most;
    parts = parts < 32 ? parts : 32;
    return ceil_div(ceil_div(g->k, parts), depth) * depth;
}

size_t gemm_plain_work(const gemm_call *g)
{
    int64_t parts = ceil_div(g->k, part_steps(g));
    return parts > 1 ? (size_t)(parts * g->m * g->n) * sizeof(float) : 0;
}

template <class T, int SIDE>
static void launch_tiles(const gemm_call *g, const lm_stream *s, const tiling &t, void *c)
{
    const T *a = (const T *)g->a, *b = (const T *)g->b;
    int64_t tiles = t.tiles_m * t.tiles_n, most = INT32_MAX;
    dim3 grid((unsigned)(tiles < most ? tiles : most), (unsigned)t.parts);

    if (g->ta && g->tb)
        LM_LAUNCH((tiles_kernel<T, true, true, 64>), grid, block_threads, 0, s, a, b, c, t);
    else if (g->ta)
        LM_LAUNCH((tiles_kernel<T, true, false, SIDE>), grid, block_threads, 0, s, a, b, c, t);
    else if (g->tb)
        LM_LAUNCH((tiles_kernel<T, false, true, SIDE>), grid, block_threads, 0, s, a, b, c, t);
    else
        LM_LAUNCH((tiles_kernel<T, false, false, SIDE>), grid, block_threads, 0, s, a, b, c, t);
}

template <class T> static void run_tiles(const gemm_call *g, const lm_stream *s, tiling t)
{
    int side = side_for(g);
    void *c = g->c;

    t.tiles_m = ceil_div(g->m, side);
    t.tiles_n = ceil_div(g->n, side);
    t.part_k = part_steps(g);
    t.parts = ceil_div(g->k, t.part_k);
    if (t.parts > 1) {
        c = g->work;
        t.ldc = g->n;
        t.part_size = g->m * g->n;
        t.bias = nullptr;
        t.accumulate = false;
        t.wide_c = true;
        t.pack_c = packs<float>(4, g->n, c);
    }
    if (side == 128)
        launch_tiles<T, 128>(g, s, t, c);
    else
        launch_tiles<T, 64>(g, s, t, c);
    if (t.parts == 1)
        return;
    unsigned grid = grid_for(g->m * g->n, block_threads, s);
    if (g->cd == LM_DTYPE_F32)
        LM_LAUNCH((add_parts_kernel<float>), grid, block_threads, 0, s, (const float *)c, t.parts,
                  g->m, g->n, (float *)g->c, g->ldc, g->bias, g->accumulate);
    else
        LM_LAUNCH((add_parts_kernel<T>), grid, block_threads, 0, s, (const float *)c, t.parts, g->m,
                  g->n, (T *)g->c, g->ldc, g->bias, g->accumulate);
}

template <class T, int COLS>
static void launch_rows(const gemm_call *g, const lm_stream *s, const tiling &t)
{
    const T *a = (const T *)g->a, *b = (const T *)g->b;
    unsigned grid = grid_for(ceil_div(g->n, COLS), block_threads / 32, s);

    if (g->m == 1)
        LM_LAUNCH((rows_kernel<T, 1, COLS>), grid, block_threads, 0, s, a, b, g->c, t);
    else if (g->m == 2)
        LM_LAUNCH((rows_kernel<T, 2, COLS>), grid, block_threads, 0, s, a, b, g->c, t);
    else if (g->m <= 4)
        LM_LAUNCH((rows_kernel<T, 4, COLS>), grid, block_threads, 0, s, a, b, g->c, t);
    else
        LM_LAUNCH((rows_kernel<T, 8, COLS>), grid, block_threads, 0, s, a, b, g->c, t);
}

template <class T> static void run_as(const gemm_call *g, const lm_stream *s)
{
    tiling t = {};

    t.m = g->m, t.n = g->n, t.k = g->k;
    t.lda = g->lda, t.ldb = g->ldb, t.ldc = g->ldc;
    t.bias = g->bias;
    t.accumulate = g->accumulate;
    t.wide_c = g->cd == LM_DTYPE_F32;
    t.pack_a = packs<T>(wide<T>::n, g->lda, g->a);
    t.pack_b = packs<T>(wide<T>::n, g->ldb, g->b);
    t.pack_c = t.wide_c ? packs<float>(4, g->ldc, g->c) : packs<T>(4, g->ldc, g->c);
    if (!few_rows(g))
        run_tiles<T>(g, s, t);
    else if (g->n >= 4096) /* enough columns to fill the card four to a warp */
        launch_rows<T, 4>(g, s, t);
    else
        launch_rows<T, 1>(g, s, t);
}

void gemm_plain_run(const gemm_call *g, const lm_stream *s)
{
    if (g->ab == LM_DTYPE_F32)
        run_as<float>(g, s);
    else if (g->ab == LM_DTYPE_BF16)
        run_as<bf16>(g, s);
    else
        run_as<f16>(g, s);
}
