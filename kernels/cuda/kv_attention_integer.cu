/* SPDX-License-Identifier: Apache-2.0 */
/* kv_attention_integer.cu -- new tokens over codes as integers (kernels/kv.h): sides whose numbers are scales times whole
 * codes, symmetric or not, with second scales or without, of 1 to 8 bits.
 *
 * A block has a part of PART tokens and up to Q query heads of one key/value head, a thread for each token, then for each
 * channel.  Scales that run along the sum are multiplied into the other factor before it is quantised (kv_integer.cuh):
 * those of channels into queries, once for each section of tokens that share them; those of tokens into the weights, once for
 * each group of channels.  Tokens that are not coded are multiplied as floats.  The parts are joined as those of
 * kv_attention.cu. */
#include "kernels/cuda/kv_attention.cuh"
#include "kernels/cuda/kv_integer.cuh"

enum { WARPS = THREADS / 32, WORDS = PART / 4 };

/* each: tokens of a section, whose second scales or scales of channels are the same; sections: of a part; blocks: groups
 * of channels that are quantised with a factor of their own, of `wide` channels. */
struct kv_cut {
    int each, sections, blocks, wide;
};

struct kv_integers {
    kv_attending a;
    kv_cut cut[2];
};

/* Shared memory of a block, in words, one behind the other. */
template <int Q> struct integer_memory {
    float *query;     /* [Q][D] */
    float *score;     /* [Q][PART]; then weights */
    float *half;      /* [Q][64]: columns of the second half of the tokens, of small heads */
    uint32_t *row;    /* planes of queries [sections][Q][2][D/4] */
    float *by, *sum;  /* [sections][Q][blocks]: factors; sums that multiply minima */
    uint32_t *weight; /* planes of weights [blocks][Q][2][WORDS] */
    float *wby;       /* [blocks][Q] */
    float *wsum;      /* [sections][blocks][Q]: sums that multiply values' minima */
    int words;
};

template <int Q>
static __host__ __device__ inline integer_memory<Q> memory_at(const kv_integers &x, float *at)
{
    const kv_cut &k = x.cut[0], &v = x.cut[1];
    const int D = x.a.r.dim;
    integer_memory<Q> m;
    float *p = at;
    m.query = p;
    p += Q * D;
    m.score = p;
    p += Q * PART;
    m.half = p;
    p += Q * 64;
    m.row = (uint32_t *)p;
    p += k.sections * Q * 2 * (D / 4);
    m.weight = (uint32_t *)p;
    p += v.blocks * Q * 2 * WORDS;
    m.by = p;
    p += k.sections * Q * k.blocks;
    m.sum = p;
    p += k.sections * Q * k.blocks;
    m.wby = p;
    p += v.blocks * Q;
    m.wsum = p;
    p += v.sections * v.blocks * Q;
    m.words = (int)(p - at);
    return m;
}

/* The tokens of a part that a row sees, [first, end), and of these the coded ones of a side, [from, to). */
struct kv_part {
    int lo, first, end;
    int from[2], to[2];
};

/* The first coded token of [j, j + n) that is seen; -1: there is none. */
static __device__ inline int first_coded(const kv_part &p, int side, int j, int n)
{
    const int from = j > p.from[side] ? j : p.from[side];
    return from < j + n && from < p.to[side] ? from : -1;
}

static __device__ inline bool is_coded(const kv_part &p, int side, int j)
{
    return j >= p.from[side] && j < p.to[side];
}

template <class T>
static __device__ inline kv_part part_of(const kv_integers &x, const kv_reading<T> *of,
                                         const span &seen, int64_t lo)
{
    kv_part p;
    p.lo = (int)lo;
    p.first = (int)(seen.start > lo ? seen.start : lo);
    p.end = (int)(seen.end < lo + PART ? seen.end : lo + PART);
    for (int s = 0; s < 2; s++) {
        const int sinks = x.a.side[s].sinks, coded = of[s].coded;
        const int used = coded < of[s].plain.used ? coded : of[s].plain.used;
        p.from[s] = p.first > sinks ? p.first : sinks;
        p.to[s] = p.end < used ? p.end : used;
    }
    return p;
}

/* ---- keys ---- */

/* The queries of all sections as planes, each warp some blocks of them. */
template <int Q>
static __device__ inline void quantize_queries(const kv_integers &x, const kv_part &p, int64_t b,
                                               int64_t kv, const integer_memory<Q> &m)
{
    const kv_side &f = x.a.side[0];
    const kv_cut &cut = x.cut[0];
    const int W = f.D / 4, lane = (int)threadIdx.x % 32;
    const bool channels = f.axis == LM_KV_CHANNEL;
#pragma unroll 1
    for (int i = (int)threadIdx.x / 32; i < cut.sections * Q * cut.blocks; i += WARPS) {
        const int block = i % cut.blocks, q = i / cut.blocks % Q, section = i / cut.blocks / Q;
        const int j = first_coded(p, 0, p.lo + section * cut.each, cut.each);
        if (j < 0)
            continue;
        const char *page = kv_page_of(x.a.r, f, b, kv, j);
        const int t = j % f.T, d0 = block * cut.wide;
        const int n = f.D - d0 < cut.wide ? f.D - d0 : cut.wide;
        const float *query = m.query + q * f.D + d0;
        uint32_t *row = m.row + (section * Q + q) * 2 * W + d0 / 4;
        const auto number = [&](int d) {
            return query[d] * (channels ? integer_scale(f, page, t, d0 + d).s
                                        : integer_second(f, page, t, d0 + d));
        };
        quantize_block(n / 4, number, row, row + W, m.by + i);
        float sum = 0;
        for (int d = lane; d < n; d += 32)
            sum += channels ? query[d] * integer_scale(f, page, t, d0 + d).m : number(d);
        sum = warp_sum(sum);
        if (lane == 0)
            m.sum[i] = sum;
    }
}

/* The scores of coded token j. */
template <int Q, int LOW>
static __device__ inline void coded_scores(const kv_integers &x, const kv_part &p, int64_t b,
                                           int64_t kv, int j, const integer_memory<Q> &m, float *s)
{
    const kv_side &f = x.a.side[0];
    const kv_cut &cut = x.cut[0];
    const char *page = kv_page_of(x.a.r, f, b, kv, j);
    const int t = j % f.T, W = f.D / 4, section = (j - p.lo) / cut.each;
    const char *tile = page + t / LM_KV_TILE * f.tile_bytes;
    const uint32_t *row = m.row + section * Q * 2 * W;
    const bool channels = f.axis == LM_KV_CHANNEL;
#pragma unroll 1
    for (int block = 0; block < cut.blocks; block++) {
        const int d0 = block * cut.wide, end = f.D - d0 < cut.wide ? f.D : d0 + cut.wide;
        kv_scale32 by = { 1, 1 };
        if (!channels)
            by = integer_scale(f, page, t, d0);
        plane_sums<Q> all = {};
#pragma unroll 2
        for (int d = d0; d < end; d += 16) {
            uint32_t codes[4];
            four_lines<LOW>(f, tile, d / 4, t % LM_KV_TILE, codes);
            all.add(codes, row + d / 4, W, 2 * W);
        }
#pragma unroll
        for (int q = 0; q < Q; q++) {
            const int at = (section * Q + q) * cut.blocks + block;
            s[q] = fmaf(by.s * m.by[at], all.sum(q), fmaf(by.m, m.sum[at], s[q]));
        }
    }
    if (channels && f.second) {
        const float second = integer_second(f, page, t, 0);
#pragma unroll
        for (int q = 0; q < Q; q++)
            s[q] *= second;
    }
}

/* The scores of the part of row i from head h on, a thread's of its token. */
template <class T, int Q>
static __device__ inline void part_scores(const kv_integers &x, const kv_part &p,
                                          const kv_reading<T> &keys, int64_t i, int64_t h,
                                          const integer_memory<Q> &m)
{
    const kv_rows &r = x.a.r;
    const kv_side &f = x.a.side[0];
    const int j = p.lo + (int)threadIdx.x;
    float s[Q] = {};
    if (is_coded(p, 0, j)) {
#define SCORES(LOW) coded_scores<Q, LOW>(x, p, keys.b, keys.kv, j, m, s)
        LM_KV_FOR_LOW(f.low, SCORES);
#undef SCORES
    } else if (j >= p.first && j < p.end) {
        const T *row = keys.plain.row(j);
#pragma unroll 4
        for (int d = 0; d < f.D; d++) {
            const float k = to_float(row[d]);
#pragma unroll
            for (int q = 0; q < Q; q++)
                s[q] = fmaf(k, m.query[q * f.D + d], s[q]);
        }
    }
#pragma unroll
    for (int q = 0; q < Q; q++)
        m.score[q * PART + threadIdx.x] = j >= p.first && j < p.end && h + q < r.heads
                                              ? capped(r, s[q] * r.scale, keys.b, i, h + q, j)
                                              : -INFINITY;
}

/* Scores to weights, a warp for a query; the maximum and the sum of query q go to max[q * step] and sum[q * step]. */
template <int Q>
static __device__ inline void part_weights(float *score, int n, float *max, float *sum,
                                           int64_t step)
{
    const int lane = (int)threadIdx.x % 32;
#pragma unroll 1
    for (int q = (int)threadIdx.x / 32; q < Q; q += WARPS) {
        pack<float, 4> v = *(pack<float, 4> *)(score + q * PART + 4 * lane);
        float top = -INFINITY, all = 0;
        for (int e = 0; e < 4; e++)
            top = fmaxf(top, v.v[e]);
        top = warp_max(top);
        for (int e = 0; e < 4; e++) {
            v.v[e] = expf(v.v[e] - base_of(top));
            all += v.v[e];
        }
        all = warp_sum(all);
        *(pack<float, 4> *)(score + q * PART + 4 * lane) = v;
        if (lane == 0 && q < n) {
            max[q * step] = top;
            sum[q * step] = all;
        }
    }
}

/* ---- values ---- */

/* Weights times scales of tokens as planes; a warp has a block of channels of a query, a lane four tokens. */
template <int Q>
static __device__ inline void quantize_weights(const kv_integers &x, const kv_part &p, int64_t b,
                                               int64_t kv, const integer_memory<Q> &m)
{
    const kv_side &f = x.a.side[1];
    const kv_cut &cut = x.cut[1];
    const bool channels = f.axis == LM_KV_CHANNEL;
    const int lane = (int)threadIdx.x % 32;
#pragma unroll 1
    for (int i = (int)threadIdx.x / 32; i < cut.blocks * Q; i += WARPS) {
        const int block = i / Q, q = i % Q;
        float number[4], sum = 0;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int j = p.lo + 4 * lane + e;
            number[e] = 0;
            if (!is_coded(p, 1, j))
                continue;
            const char *page = kv_page_of(x.a.r, f, b, kv, j);
            const float w = m.score[q * PART + 4 * lane + e];
            kv_scale32 by = { 1, 1 };
            if (channels)
                by.s = by.m = integer_second(f, page, j % f.T, 0);
            else
                by = integer_scale(f, page, j % f.T, block * cut.wide);
            number[e] = w * by.s;
            sum = fmaf(w, by.m, sum);
        }
        quantize_block(
            WORDS, [&](int k) { return number[k % 4]; }, m.weight + i * 2 * WORDS,
            m.weight + i * 2 * WORDS + WORDS, m.wby + i);
#pragma unroll 1
        for (int section = 0; section < cut.sections; section++) {
            const float own = warp_sum(4 * lane / cut.each == section ? sum : 0.0f);
            if (lane == 0)
                m.wsum[section * cut.blocks * Q + i] = own;
        }
    }
}

/* Add the coded tokens [lo + t0, lo + t1) of a section to y, for channel d. */
template <int Q, int LOW>
static __device__ inline void coded_values(const kv_integers &x, const kv_part &p, int64_t b,
                                           int64_t kv, int t0, int t1, int d,
                                           const integer_memory<Q> &m, float *y)
{
    const kv_side &f = x.a.side[1];
    const kv_cut &cut = x.cut[1];
    const bool channels = f.axis == LM_KV_CHANNEL;
    const int block = d / cut.wide, section = t0 / cut.each, of_tile = f.tile / 4;
    const int any = first_coded(p, 1, p.lo + section * cut.each, cut.each);
    if (any < 0)
        return;
    plane_sums<Q> all = {};
#pragma unroll 2
    for (int t = t0; t < t1; t += LM_KV_TILE) {
        const int j = p.lo + t, in = j % f.T;
        if (first_coded(p, 1, j, LM_KV_TILE) < 0)
            continue;
        uint32_t codes[4];
        four_lines<LOW>(f, kv_page_of(x.a.r, f, b, kv, j) + in / f.tile * f.tile_bytes,
                        d / 16 * of_tile + in % f.tile / 4, d % 16, codes);
        all.add(codes, m.weight + block * Q * 2 * WORDS + t / 4, WORDS, 2 * WORDS);
    }
    const char *page = kv_page_of(x.a.r, f, b, kv, any);
    kv_scale32 by;
    if (channels)
        by = integer_scale(f, page, any % f.T, d);
    else
        by.s = by.m = integer_second(f, page, any % f.T, d);
    const float once = t0 % cut.each ? 0.0f : by.m; /* the section's sum is of all its tokens */
#pragma unroll
    for (int q = 0; q < Q; q++) {
        y[q] = fmaf(by.s * m.wby[block * Q + q], all.sum(q), y[q]);
        if (once != 0)
            y[q] = fmaf(once, m.wsum[(section * cut.blocks + block) * Q + q], y[q]);
    }
}

/* The part's values: column d of tokens [t0, t1). */
template <class T, int Q>
static __device__ inline void part_values(const kv_integers &x, const kv_part &p,
                                          const kv_reading<T> &values, int t0, int t1, int d,
                                          const integer_memory<Q> &m, float *y)
{
    const kv_side &f = x.a.side[1];
    const int each = x.cut[1].each < t1 - t0 ? x.cut[1].each : t1 - t0;
#pragma unroll 1
    for (int t = t0; t < t1; t += each) {
#define VALUES_OF(LOW) coded_values<Q, LOW>(x, p, values.b, values.kv, t, t + each, d, m, y)
        LM_KV_FOR_LOW(f.low, VALUES_OF);
#undef VALUES_OF
    }
    const int lo = p.lo + t0 > p.first ? p.lo + t0 : p.first,
              hi = p.lo + t1 < p.end ? p.lo + t1 : p.end;
#pragma unroll 1
    for (int j = lo; j < hi; j++) {
        if (is_coded(p, 1, j)) {
            j = p.to[1] - 1;
            continue;
        }
        const float v = to_float(values.plain.row(j)[d]);
#pragma unroll
        for (int q = 0; q < Q; q++)
            y[q] = fmaf(m.score[q * PART + j - p.lo], v, y[q]);
    }
}

/* All columns, to out[q * step + d] of n queries.  Heads of up to 64 numbers: half of the threads have half of the tokens. */
template <class T, int Q>
static __device__ inline void store_values(const kv_integers &x, const kv_part &p,
                                           const kv_reading<T> &values, const integer_memory<Q> &m,
                                           int n, float *out, int64_t step)
{
    const int D = x.a.r.dim, wide = D <= 64 ? 64 : THREADS, halves = THREADS / wide;
    const int half = (int)threadIdx.x / wide, lane = (int)threadIdx.x % wide;
#pragma unroll 1
    for (int base = 0; base < D; base += wide) {
        const int d = base + lane;
        float y[Q] = {};
        if (d < D)
            part_values(x, p, values, half * (PART / halves), (half + 1) * (PART / halves), d, m,
                        y);
        if (halves > 1) {
#pragma unroll
            for (int q = 0; half && q < Q; q++)
                m.half[q * 64 + lane] = y[q];
            __syncthreads();
#pragma unroll
            for (int q = 0; !half && q < Q; q++)
                y[q] += m.half[q * 64 + lane];
        }
#pragma unroll
        for (int q = 0; q < Q; q++)
            if (!half && d < D && q < n)
                out[q * step + d] = y[q];
    }
}

/* ---- the kernel ---- */

template <class T, int Q>
static __global__ void __launch_bounds__(THREADS)
    kv_integer_kernel(const __grid_constant__ kv_integers x, const T *qkv)
{
    LM_DYNAMIC_SHARED(float, shared);
    const kv_attending &a = x.a;
    const kv_rows &r = a.r;
    const integer_memory<Q> m = memory_at<Q>(x, shared);
    const int64_t chunks = (r.group + Q - 1) / Q,
                  items = r.batch * a.seq * r.kv_heads * chunks * a.parts;
#pragma unroll 1
    for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
        const int64_t part = item % a.parts, chunk = item / a.parts % chunks,
                      at = item / a.parts / chunks, kv = at % r.kv_heads, i = at / r.kv_heads,
                      h = kv * r.group + chunk * Q;
        const kv_token t = token_at(a, i);
        const span seen = keys_of(r, t.b, t.i);
        if (!t.real || part * PART >= seen.end || (part + 1) * PART <= seen.start)
            continue;
        const int left = r.group - (int)chunk * Q, n = left < Q ? left : Q;
        const kv_reading<T> of[2] = { kv_reading_of(r, a.side[0], qkv, t.b, kv, 0, nullptr),
                                      kv_reading_of(r, a.side[1], qkv, t.b, kv, 1, nullptr) };
        const kv_part p = part_of(x, of, seen, part * PART);
        const int64_t to = (i * r.heads + h) * a.parts + part;
        __syncthreads(); /* shared memory may still be read for other queries */
        kv_load_queries<T, THREADS>(r, qkv, t.row, h, n, 0, n, Q, m.query, r.dim);
        __syncthreads();
        quantize_queries(x, p, t.b, kv, m);
        __syncthreads();
        part_scores(x, p, of[0], t.i, h, m);
        __syncthreads();
        part_weights<Q>(m.score, n, a.max + to, a.sum + to, a.parts);
        __syncthreads();
        quantize_weights(x, p, t.b, kv, m);
        __syncthreads();
        store_values(x, p, of[1], m, n, a.out + to * r.dim, a.parts * r.dim);
    }
}

/* ---- the launcher ---- */

/* The largest power of two that divides n, at most PART. */
static int even_part(int n)
{
    int x = n & -n;
    return x > PART ? (int)PART : x;
}

static kv_cut cut_of(const kv_side &f)
{
    const bool channels = f.axis == LM_KV_CHANNEL;
    kv_cut c = { PART, 1, channels ? 1 : f.groups, channels ? f.D : f.group };
    if (channels)
        c.each = even_part(f.group);
    else if (f.second)
        c.each = even_part(f.span);
    c.sections = PART / c.each;
    return c;
}

template <class T, int Q> static bool launch(const lm_call *call, const kv_attending &a)
{
    lm_stream *s = call->stream;
    const kv_integers x = { a, { cut_of(a.side[0]), cut_of(a.side[1]) } };
    const size_t bytes = (size_t)memory_at<Q>(x, nullptr).words * sizeof(float);
    if (bytes > s->shared_max)
        return false;
    const int64_t items = a.r.batch * a.seq * a.r.kv_heads * ((a.r.group + Q - 1) / Q) * a.parts;
    LM_ALLOW_SHARED((kv_integer_kernel<T, Q>), (int)s->shared_max);
    LM_LAUNCH((kv_integer_kernel<T, Q>), grid_for(items, 1, s), THREADS, bytes, s, x,
              in_ptr<const T>(call, QKV));
    return true;
}

template <class T> bool kv_integer_parts(const lm_call *call, const kv_attending &a)
{
    if (!is_integer(a.side[0]) || !is_integer(a.side[1]) || a.rope || a.r.dim % 16 ||
        a.r.dim > 256 || a.r.latent)
        return false;
    if (a.r.group == 1)
        return launch<T, 1>(call, a);
    return a.r.group <= 4 ? launch<T, 4>(call, a) : launch<T, 8>(call, a);
}

template bool kv_integer_parts<bf16>(const lm_call *call, const kv_attending &a);
template bool kv_integer_parts<f16>(const lm_call *call, const kv_attending &a);
