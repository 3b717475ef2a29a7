/* sample.cu -- the next token of each row of logits (kernels/sample.h).
 *
 * A block takes a row.  It makes weights exp((logit - largest) / temperature) in F64; finds a weight
 * below which nothing can be chosen, by counting and adding up what lies above eight of them at a
 * time; gathers what is left, ranks it by weight and id, and cuts the ranking where the limits say.
 * Without limits the draw goes along the ids and nothing is ranked.
 *
 * Against the host's kernel: ranks, counts and comparisons are the same, but sums are made of the
 * sums of stretches, in a fixed order, where the host adds one weight after the other, and exp of a
 * GPU may differ from that of the C library by a unit in the last place.  So a sum may differ in its last
 * bits, and a token where u, or top_p, falls between the two: about once in 10^12 draws. */
#include "kernels/cuda/device.cuh"

extern "C" {
#include "kernels/sample.h"
}

enum {
    FEW = 2048, /* candidates that are ranked in shared memory */
    PIVOTS = 8,
    MOST_THREADS = 1024,
    MOST_WARPS = MOST_THREADS / 32
};

struct sample_args {
    const float *logits;
    const int32_t *seen, *n_seen;
    const double *u;
    const int32_t *on;
    int32_t *token;
    double *logprob;
    int64_t rows, vocab, seen_pitch;
    lm_sample_attr o;
    unsigned char *work; /* of block i: from i * per_block */
    int64_t per_block;
};

/* Numbers of a thread that are on their way at once: a block alone must keep its memory busy. */
enum { BATCH = 4 };

/* x[i], x[i + threads], ...; `none` past the n-th. */
template <class X>
static __device__ inline void take_batch(X (&to)[BATCH], const X *x, int64_t i, int64_t n, X none)
{
#pragma unroll
    for (int u = 0; u < BATCH; u++, i += blockDim.x)
        to[u] = i < n ? x[i] : none;
}

/* ---- running sums ---- */

/* n numbers in order are cut in one stretch a warp, and those in tiles of 32. */
static __device__ inline int64_t stretch_of(int64_t n)
{
    int64_t warps = blockDim.x / 32, per = (n + warps - 1) / warps;
    return (per + 31) / 32 * 32;
}

/* The sum of w; what each stretch holds is left in `part` for first_past. */
static __device__ inline double total_of(const double *w, int64_t n, double *part)
{
    int64_t per = stretch_of(n), warp = threadIdx.x / 32, from = warp * per;
    int64_t past = from + per < n ? from + per : n;
    double sum = 0;
    for (int64_t i = from + threadIdx.x % 32; i < past; i += 32)
        sum += w[i];
    sum = warp_sum(sum);
    __syncthreads(); /* part may still be read */
    if (threadIdx.x % 32 == 0)
        part[warp] = sum;
    __syncthreads();
    sum = 0;
    for (unsigned k = 0; k < blockDim.x / 32; k++)
        sum += part[k];
    return sum;
}

/* The first index where the running sum exceeds `limit` (or reaches it); -1: none.  After total_of
 * of the same numbers. */
static __device__ inline int64_t first_past(const double *w, int64_t n, double limit, bool reach,
                                            const double *part)
{
    __shared__ int64_t found;
    int64_t per = stretch_of(n), warps = blockDim.x / 32, k = 0;
    double base = 0;
    for (; k < warps; k++) {
        double next = base + part[k];
        if (reach ? next >= limit : next > limit)
            break;
        base = next;
    }
    if (k == warps)
        return -1;
    if (threadIdx.x / 32 == k) {
        int lane = (int)(threadIdx.x % 32);
        int64_t past = k * per + per < n ? k * per + per : n, at = -1, last = k * per;
        for (int64_t i = k * per; i < past && at < 0; i += 32) {
            double own = i + lane < past ? w[i + lane] : 0, sum = own;
            for (int o = 1; o < 32; o <<= 1) {
                double before = __shfl_up_sync(0xffffffffu, sum, o);
                sum += lane >= o ? before : 0;
            }
            sum += base;
            /* rounding may lift the sum even where nothing is added */
            bool hit = own > 0 && (reach ? sum >= limit : sum > limit);
            unsigned hits = __ballot_sync(0xffffffffu, hit);
            unsigned some = __ballot_sync(0xffffffffu, own > 0);
            at = hits ? i + __ffs((int)hits) - 1 : -1;
            last = some ? i + 31 - __clz((int)some) : last;
            base = __shfl_sync(0xffffffffu, sum, 31);
        }
        if (lane == 0) /* in another order the stretch may add up to a last bit less */
            found = at < 0 ? last : at;
    }
    __syncthreads();
    int64_t at = found;
    __syncthreads();
    return at;
}

/* ---- the row ---- */

struct best {
    double value;
    int64_t id;
};

/* The largest, of equal ones the first, over the block. */
static __device__ inline best block_best(best x)
{
    __shared__ best part[MOST_WARPS];
    for (int o = 16; o > 0; o >>= 1) {
        double value = __shfl_xor_sync(0xffffffffu, x.value, o);
        int64_t id = (int64_t)__shfl_xor_sync(0xffffffffu, (long long)x.id, o);
        if (value > x.value || (value == x.value && id < x.id))
            x = best{ value, id };
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = x;
    __syncthreads();
    for (unsigned k = 0; k < blockDim.x / 32; k++)
        if (part[k].value > x.value || (part[k].value == x.value && part[k].id < x.id))
            x = part[k];
    return x;
}

/* The logits to w, with the penalty.  False: one of them is NaN or +Inf.  *top: the largest without
 * the penalty. */
static __device__ inline bool take_logits(const sample_args *a, int64_t row, double *w, float *top)
{
    const float *x = a->logits + row * a->vocab;
    const double penalty = a->o.repetition_penalty;
    float most = -INFINITY;
    bool bad = false;
    for (int64_t i = threadIdx.x; i < a->vocab; i += BATCH * blockDim.x) {
        float some[BATCH];
        take_batch(some, x, i, a->vocab, -INFINITY);
#pragma unroll
        for (int u = 0; u < BATCH; u++) {
            bad |= !(some[u] < INFINITY);
            most = fmaxf(most, some[u]);
            if (i + u * (int64_t)blockDim.x < a->vocab)
                w[i + u * (int64_t)blockDim.x] = some[u];
        }
    }
    *top = block_max(most);
    if (block_max(bad ? 1.0f : 0.0f) > 0)
        return false;
    int64_t seen = penalty != 1 && a->seen ? a->n_seen[row] : 0;
    seen = seen < a->seen_pitch ? seen : a->seen_pitch;
    for (int64_t i = threadIdx.x; i < seen; i += blockDim.x) {
        int64_t id = (uint32_t)a->seen[row * a->seen_pitch + i];
        if (id < a->vocab) /* from the plain logit: an id that is there twice gets the same again */
            w[id] = (float)(x[id] > 0 ? x[id] / penalty : x[id] * penalty);
    }
    __syncthreads();
    return true;
}

/* ---- what may be chosen at all ---- */

struct cut {
    double low;  /* nothing below it can be chosen */
    double high; /* what is at or above it is not enough */
    int64_t n_low, n_high;
    double pivot[PIVOTS]; /* falling */
    bool done;
};

/* Eight weights from high down: by powers of four while low is 0, else evenly in their bits, the last
 * of them low itself. */
static __device__ inline void next_pivots(cut *c)
{
    uint64_t high, low;
    memcpy(&high, &c->high, sizeof high);
    memcpy(&low, &c->low, sizeof low);
    c->done =
        c->n_low <= FEW || c->n_low - c->n_high <= FEW / 4 || high <= low || c->high < 0x1p-64;
    for (int k = 0; k < PIVOTS; k++)
        if (low == 0) {
            c->pivot[k] = (k ? c->pivot[k - 1] : c->high) * 0.25;
        } else {
            uint64_t bits = high - (uint64_t)(k + 1) * ((high - low) / PIVOTS);
            bits = k == PIVOTS - 1 ? low : bits;
            memcpy(&c->pivot[k], &bits, sizeof bits);
        }
}

/* Raise c->low as far as some passes can: at least `count` weights, and such that add up to `mass`,
 * stay above it. */
static __device__ inline void narrow(const double *w, int64_t n, int64_t count, double mass, cut *c)
{
    __shared__ double part_mass[PIVOTS][MOST_WARPS];
    __shared__ int part_count[PIVOTS][MOST_WARPS];
    const int warp = (int)(threadIdx.x / 32), lane = (int)(threadIdx.x % 32);
    for (int pass = 0; pass < 12; pass++) {
        __syncthreads();
        if (threadIdx.x == 0)
            next_pivots(c);
        __syncthreads();
        if (c->done)
            return;
        double sum[PIVOTS] = { 0 }, pivot[PIVOTS];
        int many[PIVOTS] = { 0 };
        for (int k = 0; k < PIVOTS; k++)
            pivot[k] = c->pivot[k];
        for (int64_t i = threadIdx.x; i < n; i += BATCH * blockDim.x) {
            double x[BATCH];
            take_batch(x, w, i, n, 0.0);
#pragma unroll
            for (int u = 0; u < BATCH; u++) {
                if (x[u] < pivot[PIVOTS - 1]) /* the lowest: most weights, on most rows */
                    continue;
#pragma unroll
                for (int k = 0; k < PIVOTS; k++) {
                    sum[k] += x[u] >= pivot[k] ? x[u] : 0;
                    many[k] += x[u] >= pivot[k];
                }
            }
        }
        for (int k = 0; k < PIVOTS; k++) {
            double s = warp_sum(sum[k]);
            int m = warp_sum(many[k]);
            if (lane == 0) {
                part_mass[k][warp] = s;
                part_count[k][warp] = m;
            }
        }
        __syncthreads();
        if (threadIdx.x != 0)
            continue;
        for (int k = 0; k < PIVOTS; k++) {
            double s = 0;
            int64_t m = 0;
            for (unsigned v = 0; v < blockDim.x / 32; v++) {
                s += part_mass[k][v];
                m += part_count[k][v];
            }
            /* The running sum of the ranking may fall short of this one in its last bits. */
            if (m >= count && s >= mass * (1 + 1e-12)) {
                c->low = pivot[k];
                c->n_low = m;
                break;
            }
            c->high = pivot[k];
            c->n_high = m;
        }
    }
    __syncthreads(); /* all see the last c->low */
}

/* ---- ranking ---- */

/* By weight, the heaviest first; equal ones by id. */
static __device__ inline void rank_pair(double *w, int32_t *id, int64_t a, int64_t b)
{
    if (w[b] > w[a] || (w[b] == w[a] && id[b] < id[a])) {
        double x = w[a];
        int32_t i = id[a];
        w[a] = w[b];
        w[b] = x;
        id[a] = id[b];
        id[b] = i;
    }
}

/* A bitonic network in which every comparison puts the heavier one first, so that places past n need
 * not exist: they would hold what comes last. */
static __device__ inline void rank_all(double *w, int32_t *id, int64_t n)
{
    int64_t half = 1;
    while (2 * half < n)
        half *= 2; /* pairs */
    for (int64_t size = 2; size <= 2 * half; size *= 2)
        for (int64_t gap = size / 2; gap > 0; gap /= 2) {
            __syncthreads();
            for (int64_t p = threadIdx.x; p < half; p += blockDim.x) {
                int64_t off = p & (gap - 1), a = (p - off) * 2 + off;
                /* the first step of a merge folds the second half over the first */
                int64_t b = gap == size / 2 ? a - off + size - 1 - off : a + gap;
                if (b < n)
                    rank_pair(w, id, a, b);
            }
        }
    __syncthreads();
}

/* What is not lighter than `low`, ranked, in *rw and *rid: shared memory where it is few. */
static __device__ inline int64_t gather(const double *w, int64_t vocab, double low, double **rw,
                                        int32_t **rid)
{
    __shared__ double few_w[FEW];
    __shared__ int32_t few_id[FEW];
    __shared__ int n;
    __syncthreads();
    if (threadIdx.x == 0)
        n = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < vocab; i += BATCH * blockDim.x) {
        double x[BATCH];
        take_batch(x, w, i, vocab, -1.0);
#pragma unroll
        for (int u = 0; u < BATCH; u++)
            if (x[u] >= low) { /* in any order: ranks are of weights and ids alone */
                int at = atomicAdd(&n, 1);
                (*rw)[at] = x[u];
                (*rid)[at] = (int32_t)(i + u * (int64_t)blockDim.x);
            }
    }
    __syncthreads();
    const int64_t got = n;
    if (got <= FEW) {
        for (int64_t i = threadIdx.x; i < got; i += blockDim.x) {
            few_w[i] = (*rw)[i];
            few_id[i] = (*rid)[i];
        }
        *rw = few_w;
        *rid = few_id;
    }
    rank_all(*rw, *rid, got);
    return got;
}

/* ---- the choice ---- */

/* Along the ids; `part`: of total_of, which gave `all`. */
static __device__ inline int64_t draw_plain(const double *w, int64_t n, double all, double u,
                                            const double *part)
{
    int64_t at = first_past(w, n, u * all, false, part);
    if (at < 0) /* u * all was rounded up to all */
        for (at = n - 1; at > 0 && !(w[at] > 0);)
            at--;
    return at;
}

/* Of the ranking [n], how many top-k, top-p and min-p leave.  all: the weight of the whole row. */
static __device__ inline int64_t limit_ranked(const double *w, int64_t n, int64_t vocab, double all,
                                              const lm_sample_attr *o, double *part)
{
    if (o->top_k > 0 && o->top_k < vocab)
        n = n < o->top_k ? n : o->top_k;
    if (o->top_p < 1) { /* a share of what top-k left */
        double left = total_of(w, n, part);
        double whole = o->top_k > 0 && o->top_k < vocab ? left : all;
        int64_t at = first_past(w, n, o->top_p * whole, true, part);
        n = at < 0 ? n : at + 1;
    }
    if (o->min_p > 0) {
        int many = 0;
        for (int64_t i = threadIdx.x; i < n; i += blockDim.x)
            many += w[i] >= o->min_p;
        many = block_sum(many);
        n = many > 1 ? many : 1;
    }
    return n;
}

/* rw, rid: scratch for a ranking of the whole row.  likeliest: where numbers are so broken that
 * nothing can be ranked. */
static __device__ inline int64_t draw_ranked(const sample_args *a, const double *w, double *rw,
                                             int32_t *rid, double all, double u, int64_t likeliest,
                                             double *part)
{
    __shared__ cut c;
    const lm_sample_attr *o = &a->o;
    const bool by_count = o->top_k > 0 && o->top_k < a->vocab;
    const bool by_mass = !by_count && o->top_p < 1;
    __syncthreads();
    if (threadIdx.x == 0) {
        /* min-p comes last: what it drops still counts for a top-p of top-k */
        double low = by_count && o->top_p < 1 ? 0 : o->min_p;
        c.low = low < 0 ? 0 : low < 1 ? low : 1;
        c.high = 2; /* the heaviest weighs 1 */
        c.n_low = a->vocab;
        c.n_high = 0;
    }
    __syncthreads();
    if (by_count || by_mass)
        narrow(w, a->vocab, by_count ? o->top_k : 0, by_mass ? o->top_p * all : 0, &c);
    int64_t n = gather(w, a->vocab, c.low, &rw, &rid);
    if (n == 0)
        return likeliest;
    n = limit_ranked(rw, n, a->vocab, all, o, part);
    double left = total_of(rw, n, part);
    int64_t at = first_past(rw, n, u * left, false, part);
    return rid[at < 0 ? n - 1 : at];
}

/* The sum of exp(logit - top) over the row. */
static __device__ inline double softmax_sum(const float *x, int64_t n, double top)
{
    double sum = 0;
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x)
        sum += exp(x[i] - top);
    return block_sum(sum);
}

/* The token of one row, or -1; writes its logprob. */
static __device__ inline int64_t sample_row(const sample_args *a, int64_t row)
{
    __shared__ double part[MOST_WARPS];
    const int64_t n = a->vocab;
    const lm_sample_attr *o = &a->o;
    const float *x = a->logits + row * n;
    double *w = (double *)(a->work + blockIdx.x * a->per_block), *rw = w + n, sum = 0;
    int32_t *rid = (int32_t *)(rw + n);
    float plain_top;
    if (!take_logits(a, row, w, &plain_top))
        return -1;
    best top = { -INFINITY, INT64_MAX };
    for (int64_t i = threadIdx.x; i < n; i += BATCH * blockDim.x) {
        double some[BATCH];
        take_batch(some, w, i, n, -(double)INFINITY);
#pragma unroll
        for (int u = 0; u < BATCH; u++)
            if (some[u] > top.value)
                top = best{ some[u], i + u * (int64_t)blockDim.x };
    }
    top = block_best(top);
    if (top.value == -INFINITY)
        return -1;
    int64_t got = top.id;
    if (o->temperature > 0) {
        for (int64_t i = threadIdx.x; i < n; i += blockDim.x)
            w[i] = exp((w[i] - top.value) / o->temperature);
        __syncthreads();
        sum = total_of(w, n, part);
        if (o->top_k > 0 || o->top_p < 1 || o->min_p > 0)
            got = draw_ranked(a, w, rw, rid, sum, a->u[row], got, part);
        else
            got = draw_plain(w, n, sum, a->u[row], part);
    }
    if (a->logprob && (o->temperature != 1 || o->repetition_penalty != 1))
        sum = softmax_sum(x, n, plain_top);
    if (a->logprob && threadIdx.x == 0) /* the sum is at least 1 */
        a->logprob[row] = x[got] - (double)plain_top - log1p(sum - 1);
    return got;
}

static __global__ void __launch_bounds__(MOST_THREADS) sample_rows(sample_args a)
{
    for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
        if (!a.on[row])
            continue;
        __syncthreads(); /* the block's scratch may still be read */
        int64_t token = sample_row(&a, row);
        if (threadIdx.x == 0)
            a.token[row] = (int32_t)token;
    }
}

/* ---- the operator ---- */

static int64_t bytes_per_block(int64_t vocab)
{
    return (vocab * (int64_t)(2 * sizeof(double) + sizeof(int32_t)) + 255) / 256 * 256;
}

static int64_t blocks_of(const lm_call *c, int64_t most)
{
    int64_t rows = rows_of(&c->in[0]);
    return rows < most ? rows : most;
}

static size_t sample_work(const lm_call *c, int threads)
{
    return (size_t)(blocks_of(c, threads) * bytes_per_block(width_of(&c->in[0])));
}

static void sample(const lm_call *c)
{
    const int64_t vocab = width_of(&c->in[0]), blocks = blocks_of(c, c->stream->sms);
    const unsigned threads = vocab >= 16384 ? MOST_THREADS : vocab >= 2048 ? 256 : 64;
    sample_args a = { in_ptr<float>(c, 0),
                      in_ptr<int32_t>(c, 1),
                      in_ptr<int32_t>(c, 2),
                      in_ptr<double>(c, 3),
                      in_ptr<int32_t>(c, 4),
                      out_ptr<int32_t>(c, 0),
                      out_ptr<double>(c, 1),
                      rows_of(&c->in[0]),
                      vocab,
                      width_of(&c->in[1]),
                      *(const lm_sample_attr *)c->attr,
                      (unsigned char *)c->work,
                      bytes_per_block(vocab) };
    if (blocks > 0)
        LM_LAUNCH(sample_rows, (unsigned)blocks, threads, 0, c->stream, a);
}

extern "C" const lm_kernel lm_sample_cuda_kernels[] = {
    { "sample", LM_DTYPE_F32, LM_CUDA_PLAIN, sample, sample_work }, LM_CUDA_END
};
