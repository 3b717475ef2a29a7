/* SPDX-License-Identifier: Apache-2.0 */
/* jacobi.cu -- eigenvectors of symmetric matrices by rotations of blocks, and singular vectors as those of x x' or x' x.
 *
 * The matrix, padded to an even number of blocks of rows, is walked in rounds that pair every block with another
 * (a tournament: after blocks - 1 rounds, a sweep, each pair has met).  For each pair a block of threads rotates the
 * square of its rows and columns in shared memory, by the same tournament of single rows, and leaves the product of the
 * rotations, U.  Then tile (P,Q) of the matrix becomes U_P' A U_Q, and that of the vectors V U_Q: products in double,
 * where nearly all the time goes.  Pairs with nothing to rotate leave no work; when a sweep had none, the kernels of
 * all later sweeps return at once.  The number of sweeps is bounded, so the launches are known beforehand. */
#include "kernels/cuda/factor.cuh"

static const int BLOCK = 32, PAIR = 2 * BLOCK, PITCH = PAIR + 1, INNER_SWEEPS = 2;

struct jacobi_job {
    factor_state *state;
    double *a, *v, *u; /* [size,size] twice; U of each pair, [2 block, 2 block] */
    int *still;        /* of each pair: it had nothing to rotate */
    int64_t n, size;   /* of the matrix, and padded */
    int block;         /* rows of a block */
};

/* ---- the tournament ---- */

/* Contestants of pair `p` in a round among `n` (even): the last one stays, the others go round. */
__device__ inline void pair_of(int64_t n, int64_t round, int64_t p, int64_t *a, int64_t *b)
{
    int64_t x = p == 0 ? n - 1 : (round + p) % (n - 1), y = (round + n - 1 - p) % (n - 1);
    *a = x < y ? x : y;
    *b = x < y ? y : x;
}

/* The pairs of a round, and the row of the matrix that row i of a pair is. */
struct round_of {
    int64_t blocks, round;
    int block;
};
__device__ inline int64_t row_of(round_of r, int64_t pair, int i)
{
    int64_t a, b;
    pair_of(r.blocks, r.round, pair, &a, &b);
    return i < r.block ? a * r.block + i : b * r.block + i - r.block;
}

__device__ inline bool is_over(const factor_state *s, int sweep)
{
    return s->stop || (sweep > 0 && !s->moved[sweep - 1]);
}

/* ---- the square of a pair ---- */

struct rotation {
    double c, s;
};

/* The rotation of rows p and q, [c s; -s c], that makes s[p][q] zero. */
__device__ inline rotation rotation_of(const double *s, int64_t p, int64_t q, double least)
{
    double off = s[p * PITCH + q];
    if (!(fabs(off) > least))
        return rotation{ 1, 0 };
    double theta = (s[q * PITCH + q] - s[p * PITCH + p]) / (2 * off);
    double t = copysign(1.0, theta) / (fabs(theta) + sqrt(theta * theta + 1));
    double c = 1 / sqrt(t * t + 1);
    return rotation{ c, t * c };
}

/* Pairs of rows and columns k and l: the 2 x 2 numbers where they meet. */
__device__ inline void rotate_square(double *s, const rotation *by, int width, int round)
{
    int half = width / 2;
    for (int i = (int)threadIdx.x; i < half * half; i += FACTOR_THREADS) {
        int64_t p, q, x, y;
        rotation r = by[i / half], t = by[i % half];
        if (r.s == 0 && t.s == 0)
            continue;
        pair_of(width, round, i / half, &p, &q);
        pair_of(width, round, i % half, &x, &y);
        double a = s[p * PITCH + x], b = s[p * PITCH + y];
        double c = s[q * PITCH + x], d = s[q * PITCH + y];
        double px = r.c * a - r.s * c, py = r.c * b - r.s * d;
        double qx = r.s * a + r.c * c, qy = r.s * b + r.c * d;
        bool same = i / half == i % half; /* what the rotation is for */
        s[p * PITCH + x] = t.c * px - t.s * py;
        s[p * PITCH + y] = same ? 0 : t.s * px + t.c * py;
        s[q * PITCH + x] = same ? 0 : t.c * qx - t.s * qy;
        s[q * PITCH + y] = t.s * qx + t.c * qy;
    }
}

__device__ inline void rotate_columns(double *u, const rotation *by, int width, int round)
{
    int half = width / 2;
    for (int i = (int)threadIdx.x; i < width * half; i += FACTOR_THREADS) {
        int64_t x, y;
        rotation t = by[i % half];
        if (t.s == 0)
            continue;
        pair_of(width, round, i % half, &x, &y);
        double *row = u + (i / half) * PITCH, a = row[x], b = row[y];
        row[x] = t.c * a - t.s * b;
        row[y] = t.s * a + t.c * b;
    }
}

/* Sweeps over s until nothing is left to rotate, INNER_SWEEPS at most; u: the product of the rotations. */
__device__ inline void rotate_pair(double *s, double *u, int width, double least)
{
    __shared__ rotation by[BLOCK];
    int t = (int)threadIdx.x;
#pragma unroll 1
    for (int sweep = 0; sweep < INNER_SWEEPS; sweep++) {
        int turned = 0;
#pragma unroll 1
        for (int round = 0; round < width - 1; round++) {
            if (t < width / 2) {
                int64_t p, q;
                pair_of(width, round, t, &p, &q);
                by[t] = rotation_of(s, p, q, least);
                turned |= by[t].s != 0;
            }
            __syncthreads();
            rotate_square(s, by, width, round);
            rotate_columns(u, by, width, round);
            __syncthreads();
        }
        if (!__syncthreads_or(turned))
            return;
    }
}

static __global__ void __launch_bounds__(FACTOR_THREADS)
    jacobi_pairs(jacobi_job j, int sweep, int64_t round)
{
    LM_DYNAMIC_SHARED(double, s);
    int width = 2 * j.block, t = (int)threadIdx.x;
    double *u = s + width * PITCH;
    round_of r = { j.size / j.block, round, j.block };
    if (is_over(j.state, sweep))
        return;
#pragma unroll 1
    for (int64_t pair = blockIdx.x; pair < r.blocks / 2; pair += gridDim.x) {
        double least = j.state->least;
        int large = 0;
        for (int i = t; i < width * width; i += FACTOR_THREADS) {
            int x = i / width, y = i % width;
            double a = j.a[row_of(r, pair, x) * j.size + row_of(r, pair, y)];
            s[x * PITCH + y] = a;
            u[x * PITCH + y] = x == y;
            large |= x != y && fabs(a) > least;
        }
        large = __syncthreads_or(large);
        if (t == 0)
            j.still[pair] = !large;
        if (!large)
            continue;
        if (t == 0)
            j.state->moved[sweep] = 1;
        rotate_pair(s, u, width, least);
        for (int i = t; i < width * width; i += FACTOR_THREADS) {
            int x = i / width, y = i % width;
            j.a[row_of(r, pair, x) * j.size + row_of(r, pair, y)] = s[x * PITCH + y];
            j.u[pair * width * width + i] = u[x * PITCH + y];
        }
        __syncthreads();
    }
}

/* ---- the whole matrix follows ---- */

/* sum[i][k] = number (y + 16 i, x + 16 k) of `tile` U, or of U' `tile` (left). */
__device__ inline void tile_product(const double *tile, const double *u, int width, bool left,
                                    double (*sum)[4])
{
    int y = (int)threadIdx.x / 16, x = (int)threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int k = 0; k < 4; k++)
            sum[i][k] = 0;
#pragma unroll 2
    for (int p = 0; p < width; p++) {
        double a[4], b[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int row = y + 16 * i, col = x + 16 * i;
            a[i] = row >= width ? 0 : left ? u[p * width + row] : tile[row * PITCH + p];
            b[i] = col >= width ? 0 : left ? tile[p * PITCH + col] : u[p * width + col];
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int k = 0; k < 4; k++)
                sum[i][k] += a[i] * b[k];
    }
}

__device__ inline void keep_tile(double *tile, int width, const double (*sum)[4])
{
    int y = (int)threadIdx.x / 16, x = (int)threadIdx.x % 16;
    __syncthreads(); /* the tile has been read */
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (y + 16 * i < width && x + 16 * k < width)
                tile[(y + 16 * i) * PITCH + x + 16 * k] = sum[i][k];
    __syncthreads();
}

/* Tile (P,Q) of the matrix, or of the vectors, whose rows are not paired. */
static __global__ void __launch_bounds__(FACTOR_THREADS)
    jacobi_follow(jacobi_job j, int sweep, int64_t round)
{
    __shared__ double tile[PAIR * PITCH];
    int width = 2 * j.block;
    round_of r = { j.size / j.block, round, j.block };
    int64_t pairs = r.blocks / 2, tiles = pairs * pairs;
    double sum[4][4];
    if (is_over(j.state, sweep))
        return;
#pragma unroll 1
    for (int64_t at = blockIdx.x; at < 2 * tiles; at += gridDim.x) {
        bool vectors = at >= tiles;
        int64_t down = at % tiles / pairs, across = at % tiles % pairs;
        bool left = !vectors && !j.still[down], right = !j.still[across];
        double *m = vectors ? j.v : j.a;
        if ((!left && !right) || (!vectors && down == across))
            continue;
        for (int i = (int)threadIdx.x; i < width * width; i += FACTOR_THREADS) {
            int64_t row = vectors ? down * width + i / width : row_of(r, down, i / width);
            tile[i / width * PITCH + i % width] = m[row * j.size + row_of(r, across, i % width)];
        }
        __syncthreads();
        if (right) {
            tile_product(tile, j.u + across * width * width, width, false, sum);
            keep_tile(tile, width, sum);
        }
        if (left) {
            tile_product(tile, j.u + down * width * width, width, true, sum);
            keep_tile(tile, width, sum);
        }
        for (int i = (int)threadIdx.x; i < width * width; i += FACTOR_THREADS) {
            int64_t row = vectors ? down * width + i / width : row_of(r, down, i / width);
            m[row * j.size + row_of(r, across, i % width)] = tile[i / width * PITCH + i % width];
        }
        __syncthreads();
    }
}

/* ---- before and behind ---- */

/* x's lower triangle to both (x NULL: zeros, where a product is written then), zeros around it; V = I. */
static __global__ void __launch_bounds__(FACTOR_THREADS) jacobi_load(jacobi_job j, const float *x)
{
    for (int64_t i = global_thread(); i < j.size * j.size; i += global_threads()) {
        int64_t row = i / j.size, col = i % j.size, n = j.n;
        int64_t at = row >= col ? row * n + col : col * n + row;
        j.a[i] = x && row < n && col < n ? x[at] : 0;
        j.v[i] = row == col;
    }
}

/* Where vectors go: vector k is out[k], out[k + pitch], ... or, as rows, out[k n], out[k n + 1], ... */
struct vector_place {
    float *out, *first; /* first: vector 0 alone, or NULL */
    int64_t count;
    bool rows;
};

/* The sign that makes the largest number of v[0], v[pitch], ... positive; of equal ones the first counts. */
__device__ inline double sign_of(const double *v, int64_t n, int64_t pitch)
{
    __shared__ double size[FACTOR_THREADS];
    __shared__ int64_t at[FACTOR_THREADS];
    int t = (int)threadIdx.x;
    double top = -1;
    int64_t where = n;
    for (int64_t i = t; i < n; i += FACTOR_THREADS)
        if (fabs(v[i * pitch]) > top) {
            top = fabs(v[i * pitch]);
            where = i;
        }
    size[t] = top;
    at[t] = where;
    __syncthreads();
#pragma unroll 1
    for (int half = FACTOR_THREADS / 2; half > 0; half /= 2) {
        if (t < half &&
            (size[t + half] > size[t] || (size[t + half] == size[t] && at[t + half] < at[t]))) {
            size[t] = size[t + half];
            at[t] = at[t + half];
        }
        __syncthreads();
    }
    double sign = at[0] < n && v[at[0] * pitch] < 0 ? -1 : 1;
    __syncthreads(); /* at is written again */
    return sign;
}

/* The first vectors, by falling eigenvalues; zeros of a call that is not due, NaN of x that is not finite. */
static __global__ void __launch_bounds__(FACTOR_THREADS) jacobi_store(jacobi_job j, vector_place to)
{
    const factor_state *s = j.state;
#pragma unroll 1
    for (int64_t i = blockIdx.x; i < j.n; i += gridDim.x) {
        int64_t k = s->stop ? i : falling_place(j.a, j.n, j.size + 1, i);
        if (k >= to.count)
            continue;
        double sign = s->stop ? 1 : sign_of(j.v + i, j.n, j.size);
        for (int64_t row = threadIdx.x; row < j.n; row += FACTOR_THREADS) {
            float x = s->bad ? NAN : s->stop ? 0 : (float)(sign * j.v[row * j.size + i]);
            to.out[to.rows ? k * j.n + row : row * to.count + k] = x;
            if (to.first && k == 0)
                to.first[row] = x;
        }
    }
}

static jacobi_job take_jacobi(factor_room *r, int64_t n)
{
    jacobi_job j = {};
    j.n = n;
    j.block = (int)(n > PAIR ? BLOCK : (n + 1) / 2);
    int64_t width = 2 * j.block, pairs = (n + width - 1) / width;
    j.size = pairs * width;
    j.state = take_room<factor_state>(r, 1);
    j.still = take_room<int>(r, pairs);
    j.a = take_room<double>(r, j.size * j.size);
    j.v = take_room<double>(r, j.size * j.size);
    j.u = take_room<double>(r, pairs * width * width);
    return j;
}

/* The matrix of j.a becomes diagonal. */
static void diagonalise(const lm_stream *s, jacobi_job j, vector_place to)
{
    int64_t blocks = j.size / j.block, pairs = blocks / 2;
    size_t bytes = (size_t)4 * (size_t)j.block * PITCH * sizeof(double);
    LM_ALLOW_SHARED(jacobi_pairs, (int)bytes);
    LM_LAUNCH(factor_measure, 1, 1024, 0, s, j.state, (const double *)j.a, j.size * j.size,
              sqrt((double)j.n));
    for (int sweep = 0; sweep < FACTOR_SWEEPS; sweep++)
        for (int64_t round = 0; round < blocks - 1; round++) {
            LM_LAUNCH(jacobi_pairs, grid_for(pairs, 1, s), FACTOR_THREADS, bytes, s, j, sweep,
                      round);
            LM_LAUNCH(jacobi_follow, grid_for(2 * pairs * pairs, 1, s), FACTOR_THREADS, 0, s, j,
                      sweep, round);
        }
    LM_LAUNCH(jacobi_store, grid_for(j.n, 1, s), FACTOR_THREADS, 0, s, j, to);
}

/* ---- eigh, svd ---- */

static size_t eigh_work(const lm_call *c, int)
{
    factor_room r = {};
    take_jacobi(&r, c->in[0].dim[0]);
    return r.used;
}

static void load(const lm_call *c, jacobi_job j, const float *x, const float *due)
{
    LM_LAUNCH(factor_begin, 1, 1, 0, c->stream, j.state, due);
    LM_LAUNCH(jacobi_load, grid_for(j.size * j.size, FACTOR_THREADS, c->stream), FACTOR_THREADS, 0,
              c->stream, j, x);
}

static void eigh(const lm_call *c)
{
    factor_room r = { (char *)c->work, 0 };
    jacobi_job j = take_jacobi(&r, c->in[0].dim[0]);
    load(c, j, in_ptr<const float>(c, 0), nullptr);
    diagonalise(c->stream, j, vector_place{ out_ptr<float>(c, 0), nullptr, j.n, false });
}

static size_t svd_work(const lm_call *c, int)
{
    factor_room r = {};
    take_jacobi(&r, c->in[0].dim[((const lm_svd_attr *)c->attr)->right]);
    return r.used;
}

static void svd(const lm_call *c)
{
    const lm_svd_attr *a = (const lm_svd_attr *)c->attr;
    factor_room r = { (char *)c->work, 0 };
    int64_t n = c->in[0].dim[a->right], terms = c->in[0].dim[!a->right], cols = c->in[0].dim[1];
    jacobi_job j = take_jacobi(&r, n);
    const float *x = in_ptr<const float>(c, 0);
    factor_matrix plain = { x, cols, 1 }, turned = { x, 1, cols };
    load(c, j, nullptr, in_ptr<const float>(c, 1));
    LM_LAUNCH(factor_product, product_grid(n, n, c->stream), FACTOR_THREADS, 0, c->stream, j.state,
              a->right ? turned : plain, a->right ? plain : turned, n, n, terms, j.a, j.size,
              (int64_t)1);
    diagonalise(c->stream, j,
                vector_place{ out_ptr<float>(c, 0), out_ptr<float>(c, 1), a->rank, a->right });
}

extern "C" const lm_kernel lm_jacobi_cuda_kernels[] = {
    { "eigh", LM_DTYPE_F32, LM_CUDA_PLAIN, eigh, eigh_work },
    { "svd", LM_DTYPE_F32, LM_CUDA_PLAIN, svd, svd_work },
    LM_CUDA_END
};
