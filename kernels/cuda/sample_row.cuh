/* SPDX-License-Identifier: Apache-2.0 */
/* sample_row.cuh -- operations of one block on one row of weights (sample.cu): running sums, the
 * weight below which no id can be chosen, and ranking. */
#ifndef LM_KERNELS_CUDA_SAMPLE_ROW_CUH
#define LM_KERNELS_CUDA_SAMPLE_ROW_CUH

#include "kernels/cuda/device.cuh"

enum {
    MOST_THREADS = 512,
    MOST_WARPS = MOST_THREADS / 32,
    BINS = 512, /* of weights, 8 to a power of two at first */
    BINS_SHIFT = 49,
    BINS_FINER = 9, /* bits: each bin in so many finer ones */
    FEW = 2048      /* candidates that are ranked in shared memory */
};

static __device__ inline uint64_t bits_of(double x)
{
    return (uint64_t)__double_as_longlong(x);
}

static __device__ inline double from_bits(uint64_t bits)
{
    return __longlong_as_double((long long)bits);
}

/* ---- running sums ---- */

/* n numbers, in order, are divided into one stretch for each warp, and stretches into groups of
 * 32. */
static __device__ inline int64_t stretch_of(int64_t n)
{
    int64_t warps = blockDim.x / 32, per = (n + warps - 1) / warps;
    return (per + 31) / 32 * 32;
}

/* The sum of w; leaves the sum of each stretch in `part`, for first_past. */
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

/* By one warp: the first index of w[from, past) where *base plus the running sum exceeds `limit`
 * (or reaches it); *base becomes the sum before it.  If there is none, the last index whose number
 * is not 0: the same numbers, added in another order, may have a sum that is larger in the last
 * bit. */
static __device__ inline int64_t warp_first_past(const double *w, int64_t from, int64_t past,
                                                 double *base, double limit, bool reach)
{
    const int lane = (int)(threadIdx.x % 32);
    double sum_before = *base;
    int64_t last = from;
    for (int64_t i = from; i < past; i += 32) {
        double own = i + lane < past ? w[i + lane] : 0, sum = own;
        for (int o = 1; o < 32; o <<= 1) {
            double left = __shfl_up_sync(0xffffffffu, sum, o);
            sum += lane >= o ? left : 0;
        }
        sum += sum_before;
        double left = __shfl_up_sync(0xffffffffu, sum, 1);
        left = lane ? left : sum_before;
        /* rounding may lift the sum even where nothing is added */
        bool hit = own > 0 && (reach ? sum >= limit : sum > limit);
        unsigned hits = __ballot_sync(0xffffffffu, hit);
        unsigned some = __ballot_sync(0xffffffffu, own > 0);
        if (hits) {
            int at = __ffs((int)hits) - 1;
            *base = __shfl_sync(0xffffffffu, left, at);
            return i + at;
        }
        last = some ? i + 31 - __clz((int)some) : last;
        sum_before = __shfl_sync(0xffffffffu, sum, 31);
    }
    return last;
}

/* The first index where the running sum exceeds `limit` (or reaches it), with *before the sum before
 * it; -1: none.  After total_of of the same numbers. */
static __device__ inline int64_t first_past(const double *w, int64_t n, double limit, bool reach,
                                            const double *part, double *before)
{
    __shared__ int64_t found;
    __shared__ double found_before;
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
        int64_t past = k * per + per < n ? k * per + per : n;
        int64_t at = warp_first_past(w, k * per, past, &base, limit, reach);
        if (threadIdx.x % 32 == 0) {
            found = at;
            found_before = base;
        }
    }
    __syncthreads();
    int64_t at = found;
    *before = found_before;
    __syncthreads();
    return at;
}

/* ---- the largest ---- */

struct best {
    float value;
    int32_t id;
};

static __device__ inline best better(best a, best b)
{
    return b.value > a.value || (b.value == a.value && b.id < a.id) ? b : a;
}

/* The largest, of equal ones the first, over the warp. */
static __device__ inline best warp_best(best x)
{
    for (int o = 16; o > 0; o >>= 1) {
        best y = { __shfl_xor_sync(0xffffffffu, x.value, o),
                   __shfl_xor_sync(0xffffffffu, x.id, o) };
        x = better(x, y);
    }
    return x;
}

static __device__ inline best block_best(best x)
{
    __shared__ best part[MOST_WARPS];
    x = warp_best(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = x;
    __syncthreads();
    for (unsigned k = 0; k < blockDim.x / 32; k++)
        x = better(x, part[k]);
    return x;
}

/* ---- the ids that can be chosen ---- */

/* Bins of weights, the heaviest first, of equal width in the bits of the numbers.  They hold only
 * counts: the weight of a bin lies between its count times its lightest and its count times its
 * heaviest weight, which is accurate enough for the light weights that are to be left out. */
struct cut {
    uint64_t top;    /* the heaviest weight of the bins, in bits */
    int shift;       /* a bin is 1 << shift of them */
    int64_t n_above; /* weights that are heavier than all bins */
    double above;    /* the sum of those, at least */
    double below;    /* the sum of the weights that are lighter than all bins, at most */
    double low;      /* found: no weight below it can be chosen */
    int64_t n_low;   /* number of weights that are not below it */
    bool last;       /* finer bins would find nothing */
};

static __device__ inline void first_bins(cut *c, int64_t n)
{
    *c = cut{ bits_of(1.0), BINS_SHIFT, 0, 0, 0, 0, n, false };
}

/* The bin of a weight that is not above c->top; BINS or more: below all bins. */
static __device__ inline uint64_t bin_of(double w, uint64_t top, int shift)
{
    return (top - bits_of(w)) >> shift;
}

/* At least `count` weights, or weights that add up to `mass` of `all`, are kept: find the bin in
 * which that is reached, and make it the range of finer bins. */
static __device__ inline void find_cut(const int *bins, int64_t count, double mass, double all,
                                       cut *c)
{
    const int each = BINS / 32, lane = (int)(threadIdx.x % 32);
    __syncthreads(); /* c and bins are complete */
    if (threadIdx.x < 32) {
        const cut was = *c;
        const int *mine = bins + lane * each;
        const uint64_t top = was.top - ((uint64_t)(lane * each) << was.shift);
        double least = 0, most = 0, own_least, own_most;
        int64_t n = 0, own_n;
        for (int b = 0; b < each; b++) {
            uint64_t heaviest = top - ((uint64_t)b << was.shift);
            n += mine[b];
            most += mine[b] * from_bits(heaviest);
            least += mine[b] * from_bits(heaviest - ((uint64_t)1 << was.shift) + 1);
        }
        own_n = n, own_least = least, own_most = most;
        for (int o = 1; o < 32; o <<= 1) {
            int64_t left_n = (int64_t)__shfl_up_sync(0xffffffffu, (long long)n, o);
            double left_least = __shfl_up_sync(0xffffffffu, least, o);
            double left_most = __shfl_up_sync(0xffffffffu, most, o);
            n += lane >= o ? left_n : 0;
            least += lane >= o ? left_least : 0;
            most += lane >= o ? left_most : 0;
        }
        const double most_of_all = __shfl_sync(0xffffffffu, most, 31);
        n += was.n_above - own_n;
        least += was.above - own_least;
        most -= own_most;
        cut found = was;
        bool hit = false;
        for (int b = 0; b < each && !hit; b++) {
            uint64_t heaviest = top - ((uint64_t)b << was.shift);
            uint64_t lightest = heaviest - ((uint64_t)1 << was.shift) + 1;
            found.top = heaviest;
            found.n_above = n;
            found.above = least;
            n += mine[b];
            least += mine[b] * from_bits(lightest);
            most += mine[b] * from_bits(heaviest);
            found.below = was.below + (most_of_all - most);
            /* The running sum of the ranking may fall short of these in its last bits. */
            hit = n >= count && (least >= mass + 1e-12 * all ||
                                 all - found.below >= mass + 1e-12 * all || mass <= 0);
            found.low = from_bits(lightest);
        }
        unsigned hits = __ballot_sync(0xffffffffu, hit);
        if (hits && lane == __ffs((int)hits) - 1) {
            found.n_low = n;
            found.last = was.shift == 0 || found.n_above >= FEW;
            found.shift = was.shift > BINS_FINER ? was.shift - BINS_FINER : 0;
            /* the last of the first bins also holds all lighter weights */
            if (was.shift == BINS_SHIFT && was.top - found.top == (BINS - 1ull) << BINS_SHIFT) {
                found.low = 0;
                found.last = true;
            }
            *c = found;
        }
        if (!hits && lane == 0)
            c->last = true;
    }
    __syncthreads();
}

/* ---- ranking ---- */

/* Candidates: the first FEW of them in shared memory, unless there are more. */
struct ranking {
    double *few_w, *w;
    int32_t *few_id, *id;
    int64_t n;
};

static __device__ inline void add_candidate(ranking *r, int *n, double w, int32_t id)
{
    int at = atomicAdd(n, 1); /* in any order: ranks are of weights and ids alone */
    (at < FEW ? r->few_w : r->w)[at] = w;
    (at < FEW ? r->few_id : r->id)[at] = id;
}

/* All candidates in one place, r->w and r->id. */
static __device__ inline void join_candidates(ranking *r, int64_t n)
{
    r->n = n;
    if (n <= FEW) {
        r->w = r->few_w;
        r->id = r->few_id;
        return;
    }
    for (int64_t i = threadIdx.x; i < FEW; i += blockDim.x) {
        r->w[i] = r->few_w[i];
        r->id[i] = r->few_id[i];
    }
    __syncthreads();
}

/* If there are more than FEW candidates, perhaps not all needed: use finer bins, until few are
 * left. */
static __device__ inline void thin_out(ranking *r, int64_t count, double mass, double all, cut *c)
{
    __shared__ int bins[BINS], n;
    while (r->n > FEW && !c->last) {
        __syncthreads();
        for (int b = (int)threadIdx.x; b < BINS; b += (int)blockDim.x)
            bins[b] = 0;
        if (threadIdx.x == 0)
            n = 0;
        __syncthreads();
        const uint64_t top = c->top;
        const int shift = c->shift;
        for (int64_t i = threadIdx.x; i < r->n; i += blockDim.x) {
            uint64_t b = bits_of(r->w[i]) <= top ? bin_of(r->w[i], top, shift) : (uint64_t)BINS;
            if (b < BINS)
                atomicAdd(&bins[b], 1);
        }
        find_cut(bins, count, mass, all, c);
        if (c->n_low > FEW)
            continue;
        for (int64_t i = threadIdx.x; i < r->n; i += blockDim.x)
            if (r->w[i] >= c->low)
                add_candidate(r, &n, r->w[i], r->id[i]);
        __syncthreads();
        join_candidates(r, n);
    }
}

/* Sort by weight, the heaviest first; equal ones by id. */
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

#endif
