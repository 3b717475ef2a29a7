/* head.cu -- vocabulary head and cross-entropy (kernels/head.h).
 *
 * A chunk of rows at a time: logits by a matrix product, in F32; one block a row turns them into
 * the loss and, in place, into their gradient in the type of activations (so a row of 2-byte
 * gradients fills the first half of its row of logits); then the two products that take gradients
 * on.  A chunk holds at most BUDGET bytes of logits, so that the choice is one of shape alone. */
#include "kernels/cuda/gemm.cuh"

extern "C" {
#include "kernels/head.h"
}

static const int64_t BUDGET = (int64_t)256 << 20;

/* ---- one row of logits ---- */

/* Rows begin at 128 bytes, so that packs of 4 lie within them. */
static int64_t pitch_of(int64_t vocab)
{
    return (vocab + 31) / 32 * 32;
}

struct row_args {
    float *logits;
    int64_t pitch, vocab, rows;
    const int32_t *target;
    const float *scale;
    float *loss;
    bool grad;
};

/* Largest logit and sum of exp(logit - largest) in one reading, each thread about its own largest.
 * A NaN makes the sum NaN; -Inf adds nothing, unless there is nothing else: that is NaN again. */
static __device__ inline void top_and_sum(const float *row, int64_t vocab, float *top, float *sum)
{
    float m = -INFINITY, s = 0;
    for (int64_t v = (int64_t)threadIdx.x * 4; v < vocab; v += (int64_t)blockDim.x * 4) {
        pack<float, 4> z = *reinterpret_cast<const pack<float, 4> *>(row + v);
        float next = m;
        for (int j = 0; j < 4; j++)
            next = v + j < vocab ? fmaxf(next, z.v[j]) : next;
        if (next > m) {
            s *= expf(m - next);
            m = next;
        }
        for (int j = 0; j < 4; j++)
            s += v + j < vocab && z.v[j] != -INFINITY ? expf(z.v[j] - m) : 0;
    }
    *top = block_max(m);
    *sum = block_sum(m == *top ? s : s * expf(m - *top));
}

template <class T> static __global__ void __launch_bounds__(1024) loss_rows(row_args a)
{
    const int64_t stride = (int64_t)blockDim.x * 4;
    for (int64_t n = blockIdx.x; n < a.rows; n += gridDim.x) {
        float *row = a.logits + n * a.pitch, top = 0, sum = 1, scale = 0, chosen = 0;
        T *grad = reinterpret_cast<T *>(row);
        const int64_t t = a.target[n];
        if (t >= 0) {
            chosen = t < a.vocab ? row[t] : NAN;
            top_and_sum(row, a.vocab, &top, &sum);
            scale = *a.scale;
        }
        if (threadIdx.x == 0)
            a.loss[n] = t < 0 ? 0 : top - chosen + logf(sum);
        float share = 1 / sum;
        for (int64_t base = 0; a.grad && base < a.vocab; base += stride) {
            int64_t v = base + (int64_t)threadIdx.x * 4;
            pack<float, 4> z = { { 0, 0, 0, 0 } };
            pack<T, 4> g;
            if (t >= 0 && v < a.vocab)
                z = *reinterpret_cast<const pack<float, 4> *>(row + v);
            for (int j = 0; j < 4; j++) {
                float p = expf(z.v[j] - top) * share - (v + j == t ? 1 : 0);
                g.v[j] = from_float<T>(t < 0 ? 0 : scale * p);
            }
            if (sizeof(T) < sizeof(float))
                __syncthreads(); /* narrow gradients lie over logits of this stretch or before it */
            if (v < a.vocab)
                *reinterpret_cast<pack<T, 4> *>(grad + v) = g;
        }
    }
}

/* ---- chunks ---- */

static int64_t chunk_of(const lm_call *c)
{
    const lm_head_attr *a = (const lm_head_attr *)c->attr;
    int64_t rows = rows_of(&c->in[0]), quarter = (rows + 3) / 4;
    int64_t chunk = BUDGET / (pitch_of(a->vocab) * (int64_t)sizeof(float));
    int64_t most = quarter > 512 ? quarter : 512;
    chunk = chunk > 128 ? chunk / 128 * 128 : chunk > 1 ? chunk : 1;
    chunk = chunk < most ? chunk : most;
    chunk = a->chunk_rows > 0 && a->chunk_rows < chunk ? a->chunk_rows : chunk;
    return chunk < rows ? chunk : rows;
}

struct products {
    gemm_call logits, dx, dw;
};

/* The products of m rows from row `first`; operands may have no data yet. */
static products products_of(const lm_call *c, int64_t first, int64_t m, void *z, void *work)
{
    const lm_head_attr *a = (const lm_head_attr *)c->attr;
    const lm_dtype act = c->in[0].dtype;
    const int64_t size = (int64_t)lm_dtype_size(act), width = width_of(&c->in[0]);
    const int64_t pitch = pitch_of(a->vocab), narrow = pitch * (int64_t)sizeof(float) / size;
    const char *x = in_ptr<const char>(c, 0), *w = in_ptr<const char>(c, 1);
    char *dx = out_ptr<char>(c, 1);
    products p = {};
    x = x ? x + first * width * size : x;
    dx = dx ? dx + first * width * size : dx;

    p.logits.m = m, p.logits.n = a->vocab, p.logits.k = width;
    p.logits.a = x, p.logits.lda = width;
    p.logits.b = w, p.logits.ldb = width, p.logits.tb = true;
    p.logits.c = z, p.logits.ldc = pitch;
    p.logits.ab = act, p.logits.cd = LM_DTYPE_F32;

    p.dx.m = m, p.dx.n = width, p.dx.k = a->vocab;
    p.dx.a = z, p.dx.lda = narrow;
    p.dx.b = w, p.dx.ldb = width;
    p.dx.c = dx, p.dx.ldc = width;
    p.dx.ab = p.dx.cd = act;

    p.dw.m = a->vocab, p.dw.n = width, p.dw.k = m;
    p.dw.a = z, p.dw.lda = narrow, p.dw.ta = true;
    p.dw.b = x, p.dw.ldb = width;
    p.dw.c = out_ptr<void>(c, 2), p.dw.ldc = width;
    p.dw.ab = act, p.dw.cd = LM_DTYPE_F32;
    p.dw.accumulate = first > 0 || !overwrites(c, a->acc);
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

/* What the products of m rows need beside the logits. */
static size_t products_work(const lm_call *c, int64_t m)
{
    products p = products_of(c, 0, m, nullptr, nullptr);
    size_t most = gemm_work(&p.logits, c->stream), dx = gemm_work(&p.dx, c->stream);
    size_t dw = gemm_work(&p.dw, c->stream);
    most = dx > most ? dx : most;
    return dw > most ? dw : most;
}

static size_t head_work(const lm_call *c, int threads)
{
    int64_t rows = rows_of(&c->in[0]), chunk = chunk_of(c);
    (void)threads;
    if (!rows)
        return 0;
    size_t whole = products_work(c, chunk);
    size_t last = rows % chunk ? products_work(c, rows % chunk) : 0;
    return 256 + logits_bytes(c) +
           (last > whole ? last : whole); /* 256: scratch is aligned to 64 */
}

/* Rows of dw that no product writes: those of padding, or all of them where there are no rows. */
static void clear_rest(const lm_call *c, int64_t from)
{
    float *dw = out_ptr<float>(c, 2);
    int64_t width = width_of(&c->in[1]), past = c->in[1].dim[0];
    if (past > from)
        cudaMemsetAsync(dw + from * width, 0, (size_t)((past - from) * width) * sizeof(float),
                        c->stream->handle);
}

template <class T> static void head_loss(const lm_call *c)
{
    const lm_head_attr *a = (const lm_head_attr *)c->attr;
    const bool want_dx = out_ptr<void>(c, 1), want_dw = out_ptr<void>(c, 2);
    const int64_t rows = rows_of(&c->in[0]), chunk = chunk_of(c);
    char *z = (char *)align_up((size_t)c->work), *work = z + logits_bytes(c);
    const unsigned threads = a->vocab >= 8192 ? 1024 : a->vocab >= 1024 ? 256 : 64;

    if (want_dw && overwrites(c, a->acc))
        clear_rest(c, rows ? a->vocab : 0);
    for (int64_t first = 0; first < rows; first += chunk) {
        int64_t m = rows - first < chunk ? rows - first : chunk;
        products p = products_of(c, first, m, z, work);
        row_args r = { (float *)z,
                       pitch_of(a->vocab),
                       a->vocab,
                       m,
                       in_ptr<int32_t>(c, 2) + first,
                       in_ptr<float>(c, 3),
                       out_ptr<float>(c, 0) + first,
                       want_dx || want_dw };
        gemm_run(&p.logits, c->stream);
        LM_LAUNCH(loss_rows<T>, grid_for(m, 1, c->stream), dim3(threads), 0, c->stream, r);
        if (want_dx)
            gemm_run(&p.dx, c->stream);
        if (want_dw)
            gemm_run(&p.dw, c->stream);
    }
}

extern "C" const lm_kernel lm_head_cuda_kernels[] = {
    LM_CUDA_ROWS("head_loss", head_loss, head_work), LM_CUDA_END
};
