/* SPDX-License-Identifier: Apache-2.0 */
/* head.cu -- vocabulary head and cross-entropy (kernels/head.h).
 *
 * A chunk of rows at a time: logits by a matrix product, in F32; one block a row turns them into
 * the loss and, in place, into their gradient in the type of activations (a row of 2-byte gradients
 * fills the second half of its row of logits); then the two products that propagate the gradients.
 *
 * Each chunk reads and writes all of dw once, so chunks are large: at 4096 rows that takes about a
 * twentieth of the time of the products where a byte takes the time of 140 FLOPs.  The choice is
 * one of shape alone. */
#include <float.h>

#include "kernels/cuda/gemm.cuh"
#include "kernels/cuda/pair.cuh"

extern "C" {
#include "kernels/head.h"
}

static const int64_t most_rows = 4096; /* of a chunk whose size the kernel chooses */

/* ---- one row of logits ----
 *
 * The row is read twice: up, for its largest logit and the sum, and down, for the gradient.  Its
 * beginning stays in shared memory, and its end was the last data in the second-level cache, so
 * that memory is read once.  On the way down, gradients of 2 bytes are stored behind all logits
 * that are not read yet: that of column v at (pitch + v) / 2 >= v. */

/* Rows begin at 128 bytes, so that packs of 4 lie within them. */
static int64_t pitch_of(int64_t vocab)
{
    return (vocab + 31) / 32 * 32;
}

/* Elements of `size` bytes in a row of logits before its gradients. */
static __host__ __device__ inline int64_t before_gradient(int64_t pitch, size_t size)
{
    return size < sizeof(float) ? pitch : 0;
}

struct row_args {
    float *logits;
    int64_t pitch, vocab, rows;
    int64_t kept; /* columns in shared memory: a multiple of 4 */
    const int32_t *target;
    const float *lse_in, *scale;        /* of the gradient; lse_in null: of the row's own sum */
    const float *entropy_in, *dentropy; /* likewise; null: the entropy has none */
    float *loss, *lse, *logit, *entropy, *collision; /* null: not wanted */
    bool grad;
    float cap; /* of the logits, which cap_rows has put on them; 0: none */
};

/* The forms of the head differ in the places of their operands; -1: none. */
struct head_form {
    int lse_in, scale, entropy_in, dentropy, bias;
    int loss, lse, logit, entropy, collision, dx, dw, dbias;
};
static const head_form stats_form = { -1, -1, -1, -1, 3, 0, 1, 2, 3, 4, -1, -1, -1 };
static const head_form grad_form = { 3, 4, 5, 6, 7, -1, -1, -1, -1, -1, 0, 1, 2 };
static const head_form loss_form = { -1, 3, -1, -1, 4, 0, -1, -1, -1, -1, 1, 2, 3 };

static const float *input(const lm_call *c, int i, int64_t first)
{
    return i < 0 || i >= c->n_in || !c->in[i].ndim ? nullptr : in_ptr<float>(c, i) + first;
}
template <class T> static T *output(const lm_call *c, int i)
{
    return i < 0 ? nullptr : out_ptr<T>(c, i);
}
static float *output_from(const lm_call *c, int i, int64_t first)
{
    float *y = output<float>(c, i);
    return y ? y + first : y;
}

typedef pack<float, 4> four;
static const int at_once = 4; /* packs of a thread in flight */

/* This thread's packs of the stretch of columns from `base`: pack u is at column_of(base, u). */
static __device__ inline int64_t column_of(int64_t base, int u)
{
    return base + ((int64_t)u * blockDim.x + threadIdx.x) * 4;
}
static __device__ inline int64_t stretch(void)
{
    return (int64_t)blockDim.x * 4 * at_once;
}

/* Read all packs at once, those of the first columns from `kept` (may be null).  Beyond the end of
 * the row (a stretch that is not WHOLE) they are -Inf, which adds nothing to a sum of
 * exponentials. */
template <bool WHOLE>
static __device__ inline void load(four *z, const row_args &a, const float *row, const float *kept,
                                   int64_t base)
{
#pragma unroll
    for (int u = 0; u < at_once; u++) {
        int64_t v = column_of(base, u);
        if (WHOLE || v < a.vocab)
            z[u] = *reinterpret_cast<const four *>((kept && v < a.kept ? kept : row) + v);
        for (int j = 0; j < 4 && !WHOLE; j++)
            z[u].v[j] = v + j < a.vocab ? z[u].v[j] : -INFINITY;
    }
}

static __device__ inline void load_stretch(four *z, const row_args &a, const float *row,
                                           const float *kept, int64_t base)
{
    if (base + stretch() <= a.vocab)
        load<true>(z, a, row, kept, base);
    else
        load<false>(z, a, row, kept, base);
}

/* The largest logit and the sum of exp(logit - largest) in one pass, each thread relative to its
 * own largest.  A NaN makes the sum NaN; if all logits are -Inf, the sum is 0 and the loss NaN. */
static __device__ inline void top_and_sum(const row_args &a, const float *row, float *kept,
                                          float *top, float *sum)
{
    float m = -FLT_MAX, s = 0;
    for (int64_t base = 0; base < a.vocab; base += stretch()) {
        four z[at_once] = {};
        float next = m;
        load_stretch(z, a, row, nullptr, base);
#pragma unroll
        for (int u = 0; u < at_once; u++) {
            if (column_of(base, u) < a.kept)
                *reinterpret_cast<four *>(kept + column_of(base, u)) = z[u];
            for (int j = 0; j < 4; j++)
                next = fmaxf(next, z[u].v[j]);
        }
        if (next > m) {
            s *= expf(m - next);
            m = next;
        }
#pragma unroll
        for (int u = 0; u < at_once; u++)
            for (int j = 0; j < 4; j++)
                s += expf(z[u].v[j] - m);
    }
    *top = block_max(m);
    *sum = block_sum(m == *top ? s : s * expf(m - *top));
}

/* log(sum) - (sum of exp(logit - top) (logit - top)) / sum, on a way through the row of its own. */
static __device__ inline float entropy_of(const row_args &a, const float *row, const float *kept,
                                          float top, float sum)
{
    float below = 0;
    for (int64_t base = 0; base < a.vocab; base += stretch()) {
        four z[at_once] = {};
        load_stretch(z, a, row, kept, base);
#pragma unroll
        for (int u = 0; u < at_once; u++)
            for (int j = 0; j < 4; j++) {
                float e = expf(z[u].v[j] - top);
                below += e > 0 ? e * (z[u].v[j] - top) : e;
            }
    }
    return logf(sum) - block_sum(below) / sum;
}

/* 2 log(sum) - log of the sum of squares of exp(logit - top), likewise; those that are 1 apart, so that little is lost where
 * the distribution is almost certain. */
static __device__ inline float collision_of(const row_args &a, const float *row, const float *kept,
                                            float top)
{
    float ones = 0, rest = 0, squares = 0;
    for (int64_t base = 0; base < a.vocab; base += stretch()) {
        four z[at_once] = {};
        load_stretch(z, a, row, kept, base);
#pragma unroll
        for (int u = 0; u < at_once; u++)
            for (int j = 0; j < 4; j++) {
                float e = expf(z[u].v[j] - top);
                ones += e < 1 ? 0 : 1;
                rest += e < 1 ? e : 0;
                squares += e < 1 ? e * e : 0;
            }
    }
    ones = block_sum(ones);
    rest = block_sum(rest);
    squares = block_sum(squares);
    return logf(ones) + 2 * log1pf(rest / ones) - log1pf(squares / ones);
}

static __device__ inline void put4(float *to, const float *x)
{
    *reinterpret_cast<four *>(to) = four{ { x[0], x[1], x[2], x[3] } };
}
template <class T> static __device__ inline void put4(T *to, const float *x)
{
    typedef pack<uint32_t, 2> two;
    *reinterpret_cast<two *>(to) = two{ { round_pair<T>(x[0], x[1]), round_pair<T>(x[2], x[3]) } };
}

template <class T> static __device__ inline void no_gradient(const row_args &a, T *grad)
{
    const float none[4] = {};
    for (int64_t v = column_of(0, 0); v < a.vocab; v += (int64_t)blockDim.x * 4)
        put4(grad + v, none);
}

/* scale * (softmax - onehot) - by * softmax (log softmax + entropy), from the end of the row to its beginning; with by != 0,
 * top is the log of the sum, and share 1. */
template <class T>
static __device__ inline void gradient(const row_args &a, const float *row, const float *kept,
                                       T *grad, float top, float share, float scale, int64_t t,
                                       float by, float entropy)
{
    for (int64_t base = (a.vocab - 1) / stretch() * stretch(); base >= 0; base -= stretch()) {
        four z[at_once] = {};
        load_stretch(z, a, row, kept, base);
        if (sizeof(T) < sizeof(float))
            __syncthreads(); /* this stretch is read before gradients are written over it */
#pragma unroll
        for (int u = 0; u < at_once; u++) {
            int64_t v = column_of(base, u);
            float slope[4] = { 1, 1, 1, 1 };
            for (int j = 0; a.cap > 0 && j < 4; j++) {
                float y = fmaxf(z[u].v[j], -a.cap) / a.cap; /* behind the row's end: -1 */
                slope[j] = fmaf(-y, y, 1.0f);
            }
            float of_entropy[4] = {};
            for (int j = 0; by != 0 && j < 4; j++) {
                float d = z[u].v[j] - top, e = expf(d);
                of_entropy[j] = e > 0 ? by * e * (d + entropy) : 0;
            }
            for (int j = 0; j < 4; j++)
                z[u].v[j] = expf(z[u].v[j] - top) * share;
            if (v <= t && t < v + 4)
                for (int j = 0; j < 4; j++)
                    z[u].v[j] -= v + j == t ? 1 : 0;
            for (int j = 0; j < 4; j++)
                z[u].v[j] = z[u].v[j] * (scale * slope[j]) - of_entropy[j] * slope[j];
            if (v < a.vocab)
                put4(grad + v, z[u].v);
        }
    }
}

static __device__ inline void put_number(float *to, int64_t n, float v)
{
    if (to && threadIdx.x == 0)
        to[n] = v;
}

template <class T> static __global__ void __launch_bounds__(1024) loss_rows(row_args a)
{
    LM_DYNAMIC_SHARED(float, kept);
    for (int64_t n = blockIdx.x; n < a.rows; n += gridDim.x) {
        float *row = a.logits + n * a.pitch, top, sum;
        T *grad = reinterpret_cast<T *>(row) + before_gradient(a.pitch, sizeof(T));
        const int64_t t = a.target[n];
        if (t < 0) {
            put_number(a.loss, n, 0);
            put_number(a.lse, n, 0);
            put_number(a.logit, n, 0);
            put_number(a.entropy, n, 0);
            put_number(a.collision, n, 0);
            if (a.grad)
                no_gradient(a, grad);
            continue;
        }
        if (a.lse_in) {
            gradient(a, row, nullptr, grad, a.lse_in[n], 1, a.scale[n], t,
                     a.dentropy ? a.dentropy[n] : 0, a.dentropy ? a.entropy_in[n] : 0);
            continue;
        }
        const float chosen = t < a.vocab ? row[t] : 0;
        top_and_sum(a, row, kept, &top, &sum);
        put_number(a.loss, n, top - chosen + logf(sum));
        put_number(a.lse, n, top + logf(sum));
        put_number(a.logit, n, chosen);
        if (a.entropy)
            put_number(a.entropy, n, entropy_of(a, row, kept, top, sum));
        if (a.collision)
            put_number(a.collision, n, collision_of(a, row, kept, top));
        if (a.grad)
            gradient(a, row, kept, grad, top, 1 / sum, a.scale[n], t, 0, 0);
    }
}

/* Soft caps of the logits, in place. */
static __global__ void __launch_bounds__(1024) cap_rows(row_args a)
{
    for (int64_t n = blockIdx.x; n < a.rows; n += gridDim.x)
        for (int64_t v = threadIdx.x; v < a.vocab; v += blockDim.x)
            a.logits[n * a.pitch + v] = a.cap * tanhf(a.logits[n * a.pitch + v] / a.cap);
}

/* Shared memory for as much of a row as fits.  Two blocks share a multiprocessor if at least half
 * of a row fits then: one reads while the other waits. */
template <class T> static void put_loss_rows(row_args *a, const lm_stream *s)
{
    const int64_t row = a->pitch * (int64_t)sizeof(float),
                  own = 1024; /* for block_sum and the system */
    const int64_t room = (int64_t)s->shared_max - own, half = (int64_t)s->shared_max / 2 - own;
    const bool two = !a->grad || row <= (int64_t)s->shared_max;
    const unsigned threads = a->vocab < 1024 ? 64 : a->vocab < 8192 ? 256 : two ? 512 : 1024;
    int64_t bytes = !a->grad || a->lse_in ? 0 : two ? half : room;

    bytes = bytes < row ? bytes / 16 * 16 : row;
    a->kept = bytes / (int64_t)sizeof(float);
    if (a->cap > 0)
        LM_LAUNCH(cap_rows, grid_for(a->rows, 1, s), dim3(threads), 0, s, *a);
    LM_ALLOW_SHARED(loss_rows<T>, (int)bytes);
    LM_LAUNCH(loss_rows<T>, grid_for(a->rows, 1, s), dim3(threads), (size_t)bytes, s, *a);
}

/* ---- chunks ---- */

static int64_t chunk_of(const lm_call *c)
{
    const lm_head_attr *a = (const lm_head_attr *)c->attr;
    const int64_t rows = rows_of(&c->in[0]), quarter = (rows + 3) / 4;
    const int64_t most = quarter > 512 ? quarter : 512;
    int64_t chunk = most < most_rows ? most / 128 * 128 : most_rows;
    if (a->chunk_rows > 0)
        chunk = a->chunk_rows < most ? a->chunk_rows : most;
    return chunk < rows ? chunk : rows;
}

struct products {
    gemm_call logits, dx, dw;
};

/* The products of m rows from row `first`; operands may have no data yet. */
static products products_of(const lm_call *c, const head_form *f, int64_t first, int64_t m, void *z,
                            void *work)
{
    const lm_head_attr *a = (const lm_head_attr *)c->attr;
    const lm_dtype act = c->in[0].dtype;
    const int64_t size = (int64_t)lm_dtype_size(act), width = width_of(&c->in[0]);
    const int64_t pitch = pitch_of(a->vocab), narrow = pitch * (int64_t)sizeof(float) / size;
    const char *x = in_ptr<const char>(c, 0), *w = in_ptr<const char>(c, 1);
    char *dx = output<char>(c, f->dx);
    const char *grad = (const char *)z;
    products p = {};
    if (z)
        grad += size * before_gradient(pitch, (size_t)size);
    x = x ? x + first * width * size : x;
    dx = dx ? dx + first * width * size : dx;

    p.logits.m = m, p.logits.n = a->vocab, p.logits.k = width;
    p.logits.a = x, p.logits.lda = width;
    p.logits.b = w, p.logits.ldb = width, p.logits.tb = true;
    p.logits.c = z, p.logits.ldc = pitch;
    p.logits.ab = act, p.logits.cd = LM_DTYPE_F32;
    p.logits.bias = input(c, f->bias, 0);
    p.logits.b_codes = p.dx.b_codes = c->in[1].codes;

    p.dx.m = m, p.dx.n = width, p.dx.k = a->vocab;
    p.dx.a = grad, p.dx.lda = narrow;
    p.dx.b = w, p.dx.ldb = width;
    p.dx.c = dx, p.dx.ldc = width;
    p.dx.ab = p.dx.cd = act;

    p.dw.m = a->vocab, p.dw.n = width, p.dw.k = m;
    p.dw.a = grad, p.dw.lda = narrow, p.dw.ta = true;
    p.dw.b = x, p.dw.ldb = width;
    p.dw.c = output<void>(c, f->dw), p.dw.ldc = width;
    p.dw.ab = act, p.dw.cd = LM_DTYPE_F32;
    p.dw.accumulate = first > 0 || !overwrites(c, a->acc);
    p.dw.a_sum = output<float>(c, f->dbias);
    p.logits.work = p.dx.work = p.dw.work = work;
    return p;
}

static size_t align_up(size_t n)
{
    return (n + 255) & ~(size_t)255;
}

static size_t logits_bytes(const lm_call *c)
{
    const lm_head_attr *a = (const lm_head_attr *)c->attr;
    return align_up((size_t)chunk_of(c) * (size_t)pitch_of(a->vocab) * sizeof(float));
}

/* Scratch of the products of m rows beside the logits. */
static size_t products_work(const lm_call *c, const head_form *f, int64_t m)
{
    static float wanted; /* operands have no memory yet */
    products p = products_of(c, f, 0, m, nullptr, nullptr);
    p.dw.a_sum = f->dbias >= 0 && f->dbias < c->n_out && c->out[f->dbias].ndim ? &wanted : nullptr;
    size_t most = gemm_work(&p.logits, c->stream), dx = gemm_work(&p.dx, c->stream);
    size_t dw = gemm_work(&p.dw, c->stream);
    most = dx > most ? dx : most;
    return dw > most ? dw : most;
}

static size_t work_of(const lm_call *c, const head_form *f)
{
    int64_t rows = rows_of(&c->in[0]), chunk = chunk_of(c);
    if (!rows)
        return 0;
    size_t whole = products_work(c, f, chunk);
    size_t last = rows % chunk ? products_work(c, f, rows % chunk) : 0;
    return 256 + logits_bytes(c) +
           (last > whole ? last : whole); /* 256: scratch is aligned to 64 */
}

/* Rows of dw [V,width] or dbias that no product writes: those of padding, or all of them if there are no rows. */
static void clear_rest(const lm_call *c, float *dw, int64_t width, int64_t from)
{
    int64_t past = c->in[1].dim[0];
    if (past > from)
        cudaMemsetAsync(dw + from * width, 0, (size_t)((past - from) * width) * sizeof(float),
                        c->stream->handle);
}

template <class T> static void run_head(const lm_call *c, const head_form *f)
{
    const lm_head_attr *a = (const lm_head_attr *)c->attr;
    const bool want_dx = output<void>(c, f->dx), want_dw = output<void>(c, f->dw);
    const int64_t rows = rows_of(&c->in[0]), chunk = chunk_of(c);
    char *z = (char *)align_up((size_t)c->work), *work = z + logits_bytes(c);

    if (want_dw && overwrites(c, a->acc))
        clear_rest(c, output<float>(c, f->dw), width_of(&c->in[1]), rows ? a->vocab : 0);
    if (output<float>(c, f->dbias) && overwrites(c, a->acc))
        clear_rest(c, output<float>(c, f->dbias), 1, rows ? a->vocab : 0);
    for (int64_t first = 0; first < rows; first += chunk) {
        int64_t m = rows - first < chunk ? rows - first : chunk;
        products p = products_of(c, f, first, m, z, work);
        row_args r = {};
        r.logits = (float *)z;
        r.pitch = pitch_of(a->vocab), r.vocab = a->vocab, r.rows = m;
        r.target = in_ptr<int32_t>(c, 2) + first;
        r.lse_in = input(c, f->lse_in, first), r.scale = input(c, f->scale, first);
        r.entropy_in = input(c, f->entropy_in, first);
        r.dentropy = input(c, f->dentropy, first);
        r.loss = output_from(c, f->loss, first);
        r.lse = output_from(c, f->lse, first);
        r.logit = output_from(c, f->logit, first);
        r.entropy = output_from(c, f->entropy, first);
        r.collision = output_from(c, f->collision, first);
        r.grad = want_dx || want_dw;
        r.cap = (float)a->soft_cap;
        gemm_run(&p.logits, c->stream);
        put_loss_rows<T>(&r, c->stream);
        if (want_dx)
            gemm_run(&p.dx, c->stream);
        if (want_dw)
            gemm_run(&p.dw, c->stream);
    }
}

static size_t stats_work(const lm_call *c, int threads)
{
    (void)threads;
    return work_of(c, &stats_form);
}
static size_t grad_work(const lm_call *c, int threads)
{
    (void)threads;
    return work_of(c, &grad_form);
}
static size_t loss_work(const lm_call *c, int threads)
{
    (void)threads;
    return work_of(c, &loss_form);
}

template <class T> static void head_stats(const lm_call *c)
{
    run_head<T>(c, &stats_form);
}
template <class T> static void head_grad(const lm_call *c)
{
    run_head<T>(c, &grad_form);
}
template <class T> static void head_loss(const lm_call *c)
{
    run_head<T>(c, &loss_form);
}

extern "C" const lm_kernel lm_head_cuda_kernels[] = {
    LM_CUDA_ROWS("head_stats", head_stats, stats_work),
    LM_CUDA_ROWS("head_grad", head_grad, grad_work),
    LM_CUDA_ROWS("head_loss", head_loss, loss_work), LM_CUDA_END
};
