/* SPDX-License-Identifier: Apache-2.0 */
/* householder.cu -- orthonormal columns by reflections.
 *
 * Matrices lie column by column.  A panel of 32 columns is reduced by one block of threads, a warp for each column
 * that follows; its reflections together are I - V T V', and many blocks apply that to the columns behind the panel.
 * Q is made of the identity by the same product, from the last panel to the first. */
#include "kernels/cuda/factor.cuh"

static const int PANEL = 32, PANEL_THREADS = 512;
static const int GROUP = 4; /* columns that a block applies reflections to */

/* Factors of a [n,k]: reflections v below the diagonal, a triangle T [32,32] for each panel, the signs of R. */
struct reflections {
    double *a, *triangle, *sign;
    int64_t n, k;
};

/* ---- a panel ---- */

/* Column `at` becomes its reflection's v, scaled so that v[at] = 1, which is not kept: R's number takes its place.
 * Every thread gets tau. */
__device__ inline double reflect_column(const reflections *f, int64_t at)
{
    double *v = f->a + at * f->n, sum = 0, alpha = v[at];
    for (int64_t r = at + 1 + threadIdx.x; r < f->n; r += blockDim.x)
        sum += v[r] * v[r];
    sum = block_sum(sum);
    double beta = sum > 0 ? -copysign(sqrt(alpha * alpha + sum), alpha) : alpha;
    for (int64_t r = at + 1 + threadIdx.x; sum > 0 && r < f->n; r += blockDim.x)
        v[r] /= alpha - beta;
    __syncthreads(); /* every thread has read v[at] */
    if (threadIdx.x == 0) {
        v[at] = beta;
        f->sign[at] = beta < 0 ? -1 : 1;
    }
    __syncthreads();
    return sum > 0 ? (beta - alpha) / beta : 0;
}

/* Apply that to the panel's columns behind it, a warp to each. */
__device__ inline void reflect_others(const reflections *f, int64_t at, int64_t end, double tau)
{
    const double *v = f->a + at * f->n;
    int lane = (int)threadIdx.x % 32, warps = (int)blockDim.x / 32;
#pragma unroll 1
    for (int64_t j = at + 1 + threadIdx.x / 32; j < end; j += warps) {
        double *x = f->a + j * f->n, sum = 0;
        for (int64_t r = at + 1 + lane; r < f->n; r += 32)
            sum += v[r] * x[r];
        sum = tau * (warp_sum(sum) + x[at]);
        __syncwarp(); /* every lane has read x[at] */
        for (int64_t r = at + 1 + lane; r < f->n; r += 32)
            x[r] -= sum * v[r];
        if (lane == 0)
            x[at] -= sum;
    }
    __syncthreads();
}

/* v_p' v_q, p < q < width, to g[p][q]. */
__device__ inline void gram_of_panel(const reflections *f, int64_t at, int width,
                                     double (*g)[PANEL + 1])
{
    int lane = (int)threadIdx.x % 32, warps = (int)blockDim.x / 32;
#pragma unroll 1
    for (int pair = (int)threadIdx.x / 32; pair < width * width; pair += warps) {
        int p = pair / width, q = pair % width;
        const double *x = f->a + (at + p) * f->n, *y = f->a + (at + q) * f->n;
        double sum = 0;
        if (p >= q)
            continue;
        for (int64_t r = at + q + 1 + lane; r < f->n; r += 32)
            sum += x[r] * y[r];
        sum = warp_sum(sum) + x[at + q];
        if (lane == 0)
            g[p][q] = sum;
    }
    __syncthreads();
}

static __global__ void __launch_bounds__(PANEL_THREADS)
    reduce_panel(const factor_state *s, reflections f, int64_t at)
{
    __shared__ double g[PANEL][PANEL + 1], t[PANEL][PANEL + 1], tau[PANEL];
    int width = (int)(f.k - at < PANEL ? f.k - at : PANEL), p = (int)threadIdx.x;
    if (s->stop)
        return;
#pragma unroll 1
    for (int i = 0; i < width; i++) {
        double x = reflect_column(&f, at + i);
        if (threadIdx.x == 0)
            tau[i] = x;
        reflect_others(&f, at + i, at + width, x);
    }
    gram_of_panel(&f, at, width, g);
    /* Column i of T: -tau_i T (V' v_i), and tau_i on the diagonal; row p by thread p. */
#pragma unroll 1
    for (int i = 0; i < width; i++) {
        double sum = 0;
        for (int q = p; q < i; q++)
            sum += t[p][q] * g[q][i];
        if (p < width)
            t[p][i] = p < i ? -tau[i] * sum : p == i ? tau[i] : 0;
    }
    __syncthreads();
    for (int i = p; i < width * width; i += PANEL_THREADS)
        f.triangle[at * PANEL + i / width * PANEL + i % width] = t[i / width][i % width];
}

/* ---- the columns behind it ---- */

/* Number r of reflection p of the panel at `at`. */
__device__ inline double reflection(const reflections *f, int64_t at, int p, int64_t r)
{
    return r < at + p ? 0 : r == at + p ? 1 : f->a[(at + p) * f->n + r];
}

/* V' x of each column of the group, a warp for each reflection, to w. */
__device__ inline void project_group(const reflections *f, int64_t at, int width, const double *x,
                                     int columns, double (*w)[GROUP])
{
    int lane = (int)threadIdx.x % 32;
#pragma unroll 1
    for (int p = (int)threadIdx.x / 32; p < width; p += FACTOR_THREADS / 32) {
        double sum[GROUP] = {};
        for (int64_t r = at + p + lane; r < f->n; r += 32) {
            double v = reflection(f, at, p, r);
#pragma unroll
            for (int c = 0; c < GROUP; c++)
                sum[c] += c < columns ? v * x[c * f->n + r] : 0;
        }
#pragma unroll
        for (int c = 0; c < GROUP; c++) {
            sum[c] = warp_sum(sum[c]);
            if (lane == 0)
                w[p][c] = sum[c];
        }
    }
    __syncthreads();
}

/* x -= V T V' x (T' when transposed) of the panel at `at`, for columns [first, first + count) of x. */
static __global__ void __launch_bounds__(FACTOR_THREADS)
    apply_panel(const factor_state *s, reflections f, int64_t at, bool transposed, double *x,
                int64_t first, int64_t count)
{
    __shared__ double w[PANEL][GROUP], y[PANEL][GROUP];
    int width = (int)(f.k - at < PANEL ? f.k - at : PANEL);
    const double *t = f.triangle + at * PANEL;
    if (s->stop)
        return;
#pragma unroll 1
    for (int64_t g = blockIdx.x; g * GROUP < count; g += gridDim.x) {
        double *group = x + (first + g * GROUP) * f.n;
        int columns = (int)(count - g * GROUP < GROUP ? count - g * GROUP : GROUP);
        int p = (int)threadIdx.x / GROUP, c = (int)threadIdx.x % GROUP;
        project_group(&f, at, width, group, columns, w);
        if (p < width) {
            double sum = 0;
            for (int q = 0; q < width; q++)
                sum += (transposed ? t[q * PANEL + p] : t[p * PANEL + q]) * w[q][c];
            y[p][c] = sum;
        }
        __syncthreads();
        for (int64_t r = at + threadIdx.x; r < f.n; r += FACTOR_THREADS) {
            double sum[GROUP] = {};
#pragma unroll 1
            for (int q = 0; q < width; q++) {
                double v = reflection(&f, at, q, r);
#pragma unroll
                for (int j = 0; j < GROUP; j++)
                    sum[j] += v * y[q][j];
            }
#pragma unroll
            for (int j = 0; j < GROUP; j++)
                if (j < columns)
                    group[j * f.n + r] -= sum[j];
        }
        __syncthreads(); /* w and y are written again */
    }
}

/* ---- the whole ---- */

/* q [n,k] as columns: the first k of the identity. */
static __global__ void __launch_bounds__(FACTOR_THREADS)
    fill_identity(double *q, int64_t n, int64_t k)
{
    for (int64_t i = global_thread(); i < n * k; i += global_threads())
        q[i] = i / n == i % n;
}

/* out [n,k] as rows; NaN of what is not finite. */
static __global__ void __launch_bounds__(FACTOR_THREADS)
    store_columns(const factor_state *s, const double *q, const double *sign, int64_t n, int64_t k,
                  float *out)
{
    for (int64_t i = global_thread(); i < n * k; i += global_threads())
        out[i] = s->bad ? NAN : (float)(q[i % k * n + i / k] * sign[i % k]);
}

static reflections take_reflections(factor_room *r, int64_t n, int64_t k)
{
    reflections f = {};
    f.a = take_room<double>(r, n * k);
    f.triangle = take_room<double>(r, (k + PANEL - 1) / PANEL * PANEL * PANEL);
    f.sign = take_room<double>(r, k);
    f.n = n;
    f.k = k;
    return f;
}

/* The columns of f.a become orthonormal, in q, and then the rows of out. */
static void orthonormalise(const lm_stream *s, factor_state *state, reflections f, double *q,
                           float *out)
{
    int64_t last = (f.k - 1) / PANEL * PANEL;
    LM_LAUNCH(factor_measure, 1, 1024, 0, s, state, (const double *)f.a, f.n * f.k, 1.0);
    for (int64_t at = 0; at < f.k; at += PANEL) {
        int64_t rest = f.k - at - PANEL;
        LM_LAUNCH(reduce_panel, 1, PANEL_THREADS, 0, s, state, f, at);
        if (rest > 0)
            LM_LAUNCH(apply_panel, grid_for(rest, GROUP, s), FACTOR_THREADS, 0, s, state, f, at,
                      true, f.a, at + PANEL, rest);
    }
    LM_LAUNCH(fill_identity, grid_for(f.n * f.k, FACTOR_THREADS, s), FACTOR_THREADS, 0, s, q, f.n,
              f.k);
    for (int64_t at = last; at >= 0; at -= PANEL)
        LM_LAUNCH(apply_panel, grid_for(f.k - at, GROUP, s), FACTOR_THREADS, 0, s, state, f, at,
                  false, q, at, f.k - at);
    LM_LAUNCH(store_columns, grid_for(f.n * f.k, FACTOR_THREADS, s), FACTOR_THREADS, 0, s,
              (const factor_state *)state, (const double *)q, (const double *)f.sign, f.n, f.k,
              out);
}

/* ---- qr ---- */

/* a [n,k] as columns, of x as rows. */
static __global__ void __launch_bounds__(FACTOR_THREADS)
    load_columns(const float *x, int64_t n, int64_t k, double *a)
{
    for (int64_t i = global_thread(); i < n * k; i += global_threads())
        a[i] = x[i % n * k + i / n];
}

struct qr_parts {
    factor_state *state;
    reflections f;
    double *q;
};

static qr_parts qr_parts_of(const lm_call *c, factor_room *r)
{
    int64_t n = c->in[0].dim[0], k = c->in[0].dim[1];
    qr_parts p = {};
    p.state = take_room<factor_state>(r, 1);
    p.f = take_reflections(r, n, k);
    p.q = take_room<double>(r, n * k);
    return p;
}

static size_t qr_work(const lm_call *c, int)
{
    factor_room r = {};
    qr_parts_of(c, &r);
    return r.used;
}

static void qr(const lm_call *c)
{
    factor_room r = { (char *)c->work, 0 };
    qr_parts p = qr_parts_of(c, &r);
    LM_LAUNCH(factor_begin, 1, 1, 0, c->stream, p.state, (const float *)nullptr);
    LM_LAUNCH(load_columns, grid_for(p.f.n * p.f.k, FACTOR_THREADS, c->stream), FACTOR_THREADS, 0,
              c->stream, in_ptr<const float>(c, 0), p.f.n, p.f.k, p.f.a);
    orthonormalise(c->stream, p.state, p.f, p.q, out_ptr<float>(c, 0));
}

/* ---- eigh_next ---- */

/* value[j] = q_j' (x q)_j, a block of threads for each; q [n,n] as rows, xq as columns. */
static __global__ void __launch_bounds__(FACTOR_THREADS)
    eigenvalues_of(const float *q, const double *xq, int64_t n, double *value)
{
#pragma unroll 1
    for (int64_t j = blockIdx.x; j < n; j += gridDim.x) {
        double sum = 0;
        for (int64_t i = threadIdx.x; i < n; i += FACTOR_THREADS)
            sum += q[i * n + j] * xq[j * n + i];
        sum = block_sum(sum);
        if (threadIdx.x == 0)
            value[j] = sum;
    }
}

/* Columns of xq to their places in a; order [n,n]. */
static __global__ void __launch_bounds__(FACTOR_THREADS)
    sort_columns(const double *value, const double *xq, int64_t n, double *a, float *order)
{
#pragma unroll 1
    for (int64_t j = blockIdx.x; j < n; j += gridDim.x) {
        int64_t place = falling_place(value, n, 1, j);
        for (int64_t i = threadIdx.x; i < n; i += FACTOR_THREADS) {
            a[place * n + i] = xq[j * n + i];
            if (order)
                order[j * n + i] = i == place;
        }
    }
}

struct next_parts {
    qr_parts qr;
    double *value; /* x q lies where Q will */
};

static next_parts next_parts_of(const lm_call *c, factor_room *r)
{
    next_parts p = {};
    p.qr = qr_parts_of(c, r);
    p.value = take_room<double>(r, p.qr.f.n);
    return p;
}

static size_t next_work(const lm_call *c, int)
{
    factor_room r = {};
    next_parts_of(c, &r);
    return r.used;
}

static void eigh_next(const lm_call *c)
{
    factor_room r = { (char *)c->work, 0 };
    next_parts p = next_parts_of(c, &r);
    int64_t n = p.qr.f.n;
    double *xq = p.qr.q;
    factor_matrix x = { in_ptr<const float>(c, 0), n, 1 }, q = { in_ptr<const float>(c, 1), n, 1 };
    LM_LAUNCH(factor_begin, 1, 1, 0, c->stream, p.qr.state, (const float *)nullptr);
    LM_LAUNCH(factor_product, product_grid(n, n, c->stream), FACTOR_THREADS, 0, c->stream,
              p.qr.state, x, q, n, n, n, xq, (int64_t)1, n);
    LM_LAUNCH(eigenvalues_of, grid_for(n, 1, c->stream), FACTOR_THREADS, 0, c->stream, q.x,
              (const double *)xq, n, p.value);
    LM_LAUNCH(sort_columns, grid_for(n, 1, c->stream), FACTOR_THREADS, 0, c->stream,
              (const double *)p.value, (const double *)xq, n, p.qr.f.a, out_ptr<float>(c, 1));
    orthonormalise(c->stream, p.qr.state, p.qr.f, p.qr.q, out_ptr<float>(c, 0));
}

extern "C" const lm_kernel lm_householder_cuda_kernels[] = {
    { "qr", LM_DTYPE_F32, LM_CUDA_PLAIN, qr, qr_work },
    { "eigh_next", LM_DTYPE_F32, LM_CUDA_PLAIN, eigh_next, next_work },
    LM_CUDA_END
};
