/* SPDX-License-Identifier: Apache-2.0 */
/* sample.cu -- the next token of each row of logits (kernels/sample.h).
 *
 * Several blocks share a row, and the row's last block combines their results.  Results are those of
 * tiles of 128 ids, so that they do not depend on the number of blocks.  The first launch applies the
 * penalty and finds the largest logits; at temperature 0 it is the only one.  The second computes
 * weights exp((logit - largest) / temperature) in F64, sums them and counts them in bins by size.
 * Its last blocks choose the token.  The bins give a weight below which no token can be chosen; the
 * tokens above it are gathered from the few tiles that have them, ranked by weight and id, and cut by
 * the limits.  Without limits the draw scans the ids: first the sums of tiles, then one tile.
 *
 * Weights are not stored: the few that are needed again are recomputed with the same bits.
 *
 * Compared with the host's kernel, ranks, counts and comparisons are the same.  But sums are sums of
 * the sums of tiles, in a fixed order, while the host adds the weights one by one; and exp of a GPU
 * may differ from that of the C library by a unit in the last place.  So a sum may differ in its last
 * bits, and with it a token if u, or top_p, is between the two: about once in 10^12 draws. */
#include "kernels/cuda/sample_row.cuh"

extern "C" {
#include "kernels/sample.h"
}

enum {
    EACH = 4,         /* numbers of a lane */
    TILE = 32 * EACH, /* of a warp: id of a lane's u-th number is first + u * 32 */
    AT_ONCE = 4,      /* reads in flight together: tiles of a warp, ids of a thread */
    ALIGN = 256
};

/* ---- data from one launch to the next, and to its last block ---- */

struct tile {
    best top;    /* after the penalty */
    float plain; /* the largest without it; +Inf: a logit is NaN or infinite */
    double sum;  /* of exp(logit - plain) */
};

/* The results of all tiles of a row. */
struct row_state {
    best top;
    float plain;
    double sum;   /* of exp(logit - plain) */
    int32_t open; /* a token is still to be drawn */
};

/* Scratch of a row. */
struct row_work {
    row_state *state;
    int *bins;        /* [BINS] */
    tile *tiles;      /* [tiles] */
    double *sum;      /* [tiles] weights */
    float *paid;      /* [vocab] logits after the penalty, if there is one */
    double *ranked_w; /* [vocab], for more than a few candidates */
    int32_t *ranked_id;
};

static __host__ __device__ inline int64_t tiles_of(int64_t vocab)
{
    return (vocab + TILE - 1) / TILE;
}

/* Offsets of a row's scratch; returns its bytes. */
static __host__ __device__ inline int64_t lay_out(int64_t vocab, unsigned char *at, row_work *w)
{
    const int64_t tiles = tiles_of(vocab);
    const int64_t bytes[] = { (int64_t)sizeof(row_state),      BINS * (int64_t)sizeof(int),
                              tiles * (int64_t)sizeof(tile),   tiles * (int64_t)sizeof(double),
                              vocab * (int64_t)sizeof(double), vocab * (int64_t)sizeof(float),
                              vocab * (int64_t)sizeof(int32_t) };
    int64_t from[7], all = 0;
    for (int i = 0; i < 7; i++) {
        from[i] = all;
        all += (bytes[i] + ALIGN - 1) / ALIGN * ALIGN;
    }
    if (w)
        *w = row_work{ (row_state *)(at + from[0]), (int *)(at + from[1]),
                       (tile *)(at + from[2]),      (double *)(at + from[3]),
                       (float *)(at + from[5]),     (double *)(at + from[4]),
                       (int32_t *)(at + from[6]) };
    return all;
}

struct sample_args {
    const float *logits;
    const int32_t *seen, *n_seen; /* NULL: no penalty */
    const double *u;
    const int32_t *on;
    int32_t *token;
    double *logprob; /* or NULL */
    unsigned *tickets;
    unsigned char *work;
    int64_t row_bytes, vocab, seen_pitch;
    lm_sample_attr o;
};

static __device__ inline row_work work_of(const sample_args *a, int64_t row)
{
    row_work w;
    lay_out(a->vocab, a->work + row * a->row_bytes, &w);
    return w;
}

static __device__ inline bool by_count(const sample_args *a)
{
    return a->o.top_k > 0 && a->o.top_k < a->vocab;
}

/* True if top-p limits the whole row; top-p after top-k is applied by the ranking. */
static __device__ inline bool by_mass(const sample_args *a)
{
    return !by_count(a) && a->o.top_p < 1;
}

/* A block processes a stretch, one tile for each warp, then the stretch gridDim.x further on. */
static __device__ inline int64_t stretches_of(int64_t vocab)
{
    const int64_t warps = blockDim.x / 32;
    return (tiles_of(vocab) + warps - 1) / warps;
}

static __device__ inline int64_t own_tile(int64_t stretch)
{
    return stretch * (blockDim.x / 32) + threadIdx.x / 32;
}

/* The id of this lane's first number. */
static __device__ inline int64_t first_of(int64_t stretch)
{
    return own_tile(stretch) * TILE + threadIdx.x % 32;
}

static __device__ inline void take_tile(float (&to)[EACH], const float *x, int64_t first, int64_t n)
{
#pragma unroll
    for (int u = 0; u < EACH; u++)
        to[u] = first + u * 32 < n ? x[first + u * 32] : -INFINITY;
}

/* True in the last block of its row that calls this: it can read what the others wrote. */
static __device__ inline bool last_of_row(const sample_args *a)
{
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicInc(&a->tickets[blockIdx.y], gridDim.x - 1) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    return last;
}

static __device__ inline void answer(const sample_args *a, int64_t row, const row_state *s,
                                     int64_t token)
{
    a->token[row] = (int32_t)token;
    if (token >= 0 && a->logprob) /* the sum is at least 1 */
        a->logprob[row] = a->logits[row * a->vocab + token] - (double)s->plain - log1p(s->sum - 1);
}

/* ---- the largest ---- */

/* Apply the penalty to those of a lane's numbers that are in `seen`, once to each. */
static __device__ inline void pay(const sample_args *a, int64_t row, int64_t stretch,
                                  float (&x)[EACH])
{
    __shared__ unsigned named[MOST_WARPS * EACH]; /* a bit for each id of the stretch */
    const int64_t width = blockDim.x * EACH, from = stretch * width;
    const int64_t n = a->n_seen[row] < a->seen_pitch ? a->n_seen[row] : a->seen_pitch;
    const double penalty = a->o.repetition_penalty;
    __syncthreads(); /* named may still be read */
    if (threadIdx.x < width / 32)
        named[threadIdx.x] = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < n; i += (int64_t)AT_ONCE * blockDim.x) {
        int64_t id[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            int64_t at = i + k * (int64_t)blockDim.x;
            id[k] = at < n ? (int64_t)(uint32_t)a->seen[row * a->seen_pitch + at] : a->vocab;
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            int64_t bit = id[k] - from;
            if (id[k] < a->vocab && bit >= 0 && bit < width)
                atomicOr(&named[bit / 32], 1u << bit % 32);
        }
    }
    __syncthreads();
#pragma unroll
    for (int u = 0; u < EACH; u++)
        if (named[threadIdx.x / 32 * EACH + u] >> threadIdx.x % 32 & 1)
            x[u] = (float)(x[u] > 0 ? x[u] / penalty : x[u] * penalty);
}

/* Join the results of all tiles. */
static __device__ inline void finish_maxima(const sample_args *a, int64_t row, const row_work *w)
{
    const int64_t tiles = tiles_of(a->vocab);
    row_state s = { { -INFINITY, INT32_MAX }, -INFINITY, 0, 0 };
    for (int64_t t = threadIdx.x; t < tiles; t += blockDim.x) {
        s.top = better(s.top, w->tiles[t].top);
        s.plain = fmaxf(s.plain, w->tiles[t].plain);
    }
    s.top = block_best(s.top);
    s.plain = block_max(s.plain);
    const bool usable = s.plain < INFINITY && s.top.value > -INFINITY;
    if (usable && a->logprob) {
        for (int64_t t = threadIdx.x; t < tiles; t += blockDim.x)
            if (w->tiles[t].plain > -INFINITY)
                s.sum += w->tiles[t].sum * exp((double)w->tiles[t].plain - s.plain);
        s.sum = block_sum(s.sum);
    }
    s.open = usable && a->o.temperature > 0;
    if (s.open)
        for (int b = (int)threadIdx.x; b < BINS; b += (int)blockDim.x)
            w->bins[b] = 0;
    if (threadIdx.x != 0)
        return;
    *w->state = s;
    if (!s.open)
        answer(a, row, &s, usable ? s.top.id : -1);
}

/* Process this warp's tile of a stretch; its numbers are in x, which has them after the penalty on
 * return. */
static __device__ inline tile look_at(const sample_args *a, int64_t row, int64_t stretch,
                                      float (&x)[EACH])
{
    const int64_t first = first_of(stretch);
    tile t = { { -INFINITY, INT32_MAX }, -INFINITY, 0 };
    bool bad = false;
#pragma unroll
    for (int u = 0; u < EACH; u++) {
        bad |= !(x[u] < INFINITY);
        t.plain = fmaxf(t.plain, x[u]);
    }
    t.plain = __any_sync(0xffffffffu, bad) ? INFINITY : warp_max(t.plain);
    if (a->logprob && t.plain > -INFINITY) {
#pragma unroll
        for (int u = 0; u < EACH; u++)
            t.sum += exp((double)x[u] - t.plain);
        t.sum = warp_sum(t.sum);
    }
    if (a->seen)
        pay(a, row, stretch, x);
#pragma unroll
    for (int u = 0; u < EACH; u++)
        if (x[u] > t.top.value)
            t.top = best{ x[u], (int32_t)(first + u * 32) };
    t.top = warp_best(t.top);
    return t;
}

/* Blocks: x along the row, y over rows. */
static __global__ void __launch_bounds__(MOST_THREADS, 1) sample_maxima(sample_args a)
{
    const int64_t row = blockIdx.y;
    if (!a.on[row])
        return;
    const row_work w = work_of(&a, row);
    const float *logits = a.logits + row * a.vocab;
    float x[EACH], next[EACH];
    take_tile(next, logits, first_of(blockIdx.x), a.vocab);
#pragma unroll 1
    for (int64_t s = blockIdx.x; s < stretches_of(a.vocab); s += gridDim.x) {
        const int64_t at = own_tile(s), first = first_of(s);
#pragma unroll
        for (int u = 0; u < EACH; u++)
            x[u] = next[u];
        take_tile(next, logits, first_of(s + gridDim.x), a.vocab);
        tile mine = look_at(&a, row, s, x);
        if (threadIdx.x % 32 == 0 && at < tiles_of(a.vocab))
            w.tiles[at] = mine;
#pragma unroll
        for (int u = 0; u < EACH; u++)
            if (a.seen && first + u * 32 < a.vocab)
                w.paid[first + u * 32] = x[u];
    }
    if (last_of_row(&a))
        finish_maxima(&a, row, &w);
}

/* ---- weights ---- */

/* A row whose token is being drawn. */
struct drawing {
    const sample_args *a;
    row_work w;
    row_state s;
    const float *y; /* logits after the penalty */
    int64_t row;
};

static __device__ inline double weight(const drawing *d, float y)
{
    return exp((y - (double)d->s.top.value) / d->a->o.temperature);
}

/* Draw along the ids. part: from total_of, whose result is `all`. */
static __device__ inline int64_t draw_plain(const drawing *d, double all, const double *part)
{
    __shared__ double own[TILE];
    const int64_t tiles = tiles_of(d->a->vocab);
    double base, limit = d->a->u[d->row] * all;
    int64_t at = first_past(d->w.sum, tiles, limit, false, part, &base);
    if (at < 0) { /* u * all was rounded up to all: the last tile with a weight */
        base = 0;
        limit = INFINITY;
        for (at = tiles - 1; at > 0 && !(d->w.sum[at] > 0);)
            at--;
    }
    for (int64_t i = threadIdx.x; i < TILE; i += blockDim.x)
        own[i] = at * TILE + i < d->a->vocab ? weight(d, d->y[at * TILE + i]) : 0;
    __syncthreads();
    return at * TILE + warp_first_past(own, 0, TILE, &base, limit, false);
}

/* A logit below which no weight reaches `low`. */
static __device__ inline float logit_of(const drawing *d, double low)
{
    double top = d->s.top.value, y = top + d->a->o.temperature * (log(low) - 1e-6);
    return (float)(y - 1e-6 * fabs(y));
}

/* Gather the ids whose weight is at least `low`, and perhaps some slightly below.  Weights are
 * computed after all are found, by whole warps. */
static __device__ inline void gather(const drawing *d, double low, ranking *r)
{
    __shared__ int n;
    const float least = logit_of(d, low);
    const int64_t vocab = d->a->vocab, tiles = tiles_of(vocab), step = blockDim.x / 32 * 32;
    __syncthreads();
    if (threadIdx.x == 0)
        n = 0;
    __syncthreads();
    for (int64_t from = threadIdx.x / 32 * 32; from < tiles; from += step) {
        int64_t own = from + threadIdx.x % 32;
        bool some = own < tiles && d->w.tiles[own].top.value >= least;
        for (unsigned left = __ballot_sync(0xffffffffu, some); left;) {
            int64_t first[AT_ONCE];
            float y[AT_ONCE][EACH];
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++, left &= left - 1) {
                first[k] = left ? (from + __ffs((int)left) - 1) * TILE + threadIdx.x % 32 : vocab;
                take_tile(y[k], d->y, first[k], vocab);
            }
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++)
#pragma unroll
                for (int u = 0; u < EACH; u++)
                    if (y[k][u] >= least && first[k] + u * 32 < vocab)
                        add_candidate(r, &n, y[k][u], (int32_t)(first[k] + u * 32));
        }
    }
    __syncthreads();
    join_candidates(r, n);
    for (int64_t i = threadIdx.x; i < r->n; i += blockDim.x)
        r->w[i] = weight(d, (float)r->w[i]);
}

/* The number of ids of the ranking [n] that top-k, top-p and min-p leave. all: the weight of the
 * whole row. */
static __device__ inline int64_t limit_ranked(const sample_args *a, const ranking *r, double all,
                                              double *part)
{
    const lm_sample_attr *o = &a->o;
    int64_t n = r->n;
    if (by_count(a))
        n = n < o->top_k ? n : o->top_k;
    if (o->top_p < 1) { /* a share of what top-k left */
        double left = total_of(r->w, n, part), before;
        int64_t at =
            first_past(r->w, n, o->top_p * (by_count(a) ? left : all), true, part, &before);
        n = at < 0 ? n : at + 1;
    }
    if (o->min_p > 0) {
        int many = 0;
        for (int64_t i = threadIdx.x; i < n; i += blockDim.x)
            many += r->w[i] >= o->min_p;
        many = block_sum(many);
        n = many > 1 ? many : 1;
    }
    return n;
}

static __device__ inline int64_t draw_ranked(const drawing *d, double all, double *part)
{
    __shared__ double few_w[FEW];
    __shared__ int32_t few_id[FEW];
    __shared__ cut c;
    const lm_sample_attr *o = &d->a->o;
    const bool counted = by_count(d->a), weighed = by_mass(d->a);
    const int64_t count = counted ? o->top_k : 1;
    const double mass = weighed ? o->top_p * all : 0;
    /* min-p comes last: what it drops still counts for a top-p of top-k */
    double low = counted && o->top_p < 1 ? 0 : o->min_p;
    low = low < 0 ? 0 : low < 1 ? low : 1;
    if (counted || weighed) {
        if (threadIdx.x == 0)
            first_bins(&c, d->a->vocab);
        find_cut(d->w.bins, count, mass, all, &c);
        low = c.low > low ? c.low : low;
    }
    ranking r = { few_w, d->w.ranked_w, few_id, d->w.ranked_id, 0 };
    gather(d, low, &r);
    if (counted || weighed)
        thin_out(&r, count, mass, all, &c);
    if (r.n == 0) /* no weight could be ranked */
        return d->s.top.id;
    rank_all(r.w, r.id, r.n);
    int64_t n = limit_ranked(d->a, &r, all, part);
    double left = total_of(r.w, n, part), before;
    int64_t at = first_past(r.w, n, d->a->u[d->row] * left, false, part, &before);
    return r.id[at < 0 ? n - 1 : at];
}

/* Store the sums of this block's tiles, and add the number of its weights in each bin to the row's
 * counts. */
static __device__ inline void weigh(const drawing *d, bool count)
{
    __shared__ int bins[BINS];
    const int64_t vocab = d->a->vocab;
    float y[EACH], next[EACH];
    take_tile(next, d->y, first_of(blockIdx.x), vocab);
    for (int b = (int)threadIdx.x; b < BINS; b += (int)blockDim.x)
        bins[b] = 0;
    __syncthreads();
#pragma unroll 1
    for (int64_t s = blockIdx.x; s < stretches_of(vocab); s += gridDim.x) {
        const int64_t at = own_tile(s), first = first_of(s);
        double sum = 0;
#pragma unroll
        for (int u = 0; u < EACH; u++)
            y[u] = next[u];
        take_tile(next, d->y, first_of(s + gridDim.x), vocab);
#pragma unroll
        for (int u = 0; u < EACH; u++) {
            double w = weight(d, y[u]);
            uint64_t b = w <= 1 ? bin_of(w, bits_of(1.0), BINS_SHIFT) : (uint64_t)BINS;
            sum += w;
            if (count && first + u * 32 < vocab)
                atomicAdd(&bins[b < BINS ? b : BINS - 1], 1);
        }
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0 && at < tiles_of(vocab))
            d->w.sum[at] = sum;
    }
    __syncthreads();
    for (int b = (int)threadIdx.x; b < BINS && count; b += (int)blockDim.x)
        if (bins[b])
            atomicAdd(&d->w.bins[b], bins[b]);
}

static __global__ void __launch_bounds__(MOST_THREADS, 1) sample_weights(sample_args a)
{
    __shared__ double part[MOST_WARPS];
    const int64_t row = blockIdx.y;
    if (!a.on[row])
        return;
    drawing d = { &a, work_of(&a, row), {}, nullptr, row };
    d.s = *d.w.state;
    if (!d.s.open)
        return;
    d.y = a.seen ? d.w.paid : a.logits + row * a.vocab;
    weigh(&d, by_count(&a) || by_mass(&a));
    if (!last_of_row(&a))
        return;
    const bool limits = a.o.top_k > 0 || a.o.top_p < 1 || a.o.min_p > 0;
    double all = total_of(d.w.sum, tiles_of(a.vocab), part);
    int64_t token = limits ? draw_ranked(&d, all, part) : draw_plain(&d, all, part);
    if (threadIdx.x == 0)
        answer(&a, row, &d.s, token);
}

/* ---- the operator ---- */

/* The rows that have scratch and a ticket at a time: one block for each is enough for the
 * device. */
static int64_t rows_at_once(const lm_call *c, int64_t sms)
{
    int64_t rows = rows_of(&c->in[0]), most = LM_CUDA_TICKETS;
    most = sms < most ? sms : most;
    return rows < most ? rows : most;
}

static size_t sample_work(const lm_call *c, int threads)
{
    return (size_t)(rows_at_once(c, threads) * lay_out(width_of(&c->in[0]), nullptr, nullptr));
}

static void sample(const lm_call *c)
{
    const int64_t vocab = width_of(&c->in[0]), tiles = tiles_of(vocab), rows = rows_of(&c->in[0]);
    const int64_t warps = tiles < MOST_WARPS ? tiles : (int64_t)MOST_WARPS;
    const int64_t seen_pitch = width_of(&c->in[1]), step = rows_at_once(c, c->stream->sms);
    const lm_sample_attr *o = (const lm_sample_attr *)c->attr;
    if (rows < 1)
        return;
    const bool pays = in_ptr<int32_t>(c, 1) && o->repetition_penalty != 1;
    /* With many rows a block processes several stretches of each: fewer blocks are started. */
    const int64_t stretches = (tiles + warps - 1) / warps, most = 4 * c->stream->sms / step;
    const unsigned blocks = (unsigned)(most < 1 ? 1 : stretches < most ? stretches : most);
    for (int64_t from = 0; from < rows; from += step) {
        sample_args a = { in_ptr<float>(c, 0) + from * vocab,
                          pays ? in_ptr<int32_t>(c, 1) + from * seen_pitch : nullptr,
                          pays ? in_ptr<int32_t>(c, 2) + from : nullptr,
                          in_ptr<double>(c, 3) + from,
                          in_ptr<int32_t>(c, 4) + from,
                          out_ptr<int32_t>(c, 0) + from,
                          out_ptr<double>(c, 1) ? out_ptr<double>(c, 1) + from : nullptr,
                          c->stream->tickets,
                          (unsigned char *)c->work,
                          lay_out(vocab, nullptr, nullptr),
                          vocab,
                          seen_pitch,
                          *o };
        const dim3 grid(blocks, (unsigned)(rows - from < step ? rows - from : step));
        LM_LAUNCH(sample_maxima, grid, (unsigned)(warps * 32), 0, c->stream, a);
        if (o->temperature > 0)
            LM_LAUNCH(sample_weights, grid, (unsigned)(warps * 32), 0, c->stream, a);
    }
}

extern "C" const lm_kernel lm_sample_cuda_kernels[] = {
    { "sample", LM_DTYPE_F32, LM_CUDA_PLAIN, sample, sample_work }, LM_CUDA_END
};
