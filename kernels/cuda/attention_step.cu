/* SPDX-License-Identifier: Apache-2.0 */
/* attention_step.cu -- attention row by row over key/value caches: decoding, with the preceding
 * norm and rotation where they are joined with it (kernels/attention.h), and prompts whose heads
 * are too wide for tiles.
 *
 * The cache is cut into parts of fixed length; a block has one part of one key/value head and all
 * query heads that share it, so that keys and values are read once.  It computes its query heads
 * with the bits that the operators before attention would have stored; the block whose part ends
 * with the new position also computes and appends the new key.  Among the blocks of neighbouring
 * parts the last one to finish joins their results in order, and so on up to the whole row: no
 * block waits for another.  Grids depend on shapes only, never on how full the caches are: a part
 * without visible keys costs a block that returns at once. */
#include <type_traits>

#include "kernels/cuda/attention_join.cuh"
#include "kernels/cuda/prefetch.cuh"

/* Bytes of shared memory that every block may have, less those of fixed size. */
enum { MOST_SHARED = (48 << 10) - 256 };

/* ---- the operators before attention ---- */

/* Lanes that share a key: enough for its packs, a power of two. */
static __device__ inline int lanes_for(int packs)
{
    int lanes = 1;
    while (lanes < packs && lanes < 32)
        lanes *= 2;
    return lanes;
}

/* heads[i*dim..]: the n query heads from h0 of a group, then, unless `key` is null, the new key,
 * which is also stored at `key`, its place in the cache.  The bits equal those of the kernels of
 * head_norm and rope: the same lanes add the same squares in the same order, and numbers are
 * rounded where those kernels store them. */
template <class T, int N>
static __device__ inline void make_heads(const step_args<T> &a, int64_t row, int64_t kv, int h0,
                                         int n, T *key, T *heads)
{
    const cached &c = a.c;
    const row_front &f = a.front;
    const int packs = c.dim / N, lanes = lanes_for(packs), side = 32 / lanes;
    const int lane = (int)threadIdx.x % 32, mine = lane % lanes, half = f.rotary / 2;
    const int all = n + (key ? 1 : 0);
    const float *angle = f.table ? f.table + (int64_t)f.pos[row] * f.rotary : nullptr;
    const T *from = a.qkv + row * qkv_pitch(c);
#pragma unroll 1
    for (int base = (int)threadIdx.x / 32 * side; base < all; base += WARPS * side) {
        const int i = base + lane / lanes, end = i < all ? packs : 0;
        const T *x = from + (i < n ? kv * c.group + h0 + i : c.heads + kv) * c.dim;
        const float *w = i < n ? f.wq : f.wk;
        T *y = heads + i * c.dim;
        float sq = 0;
#pragma unroll 1
        for (int p = mine; w && p < end; p += lanes) {
            pack<T, N> v = load<T, N>(x + p * N);
            float part = 0;
#pragma unroll
            for (int e = 0; e < N; e++)
                part = fmaf(to_float(v.v[e]), to_float(v.v[e]), part);
            sq += part;
        }
        for (int o = lanes / 2; f.wq && o > 0; o /= 2)
            sq += __shfl_xor_sync(0xffffffffu, sq, o);
        const float rstd = 1 / sqrtf(sq / (float)c.dim + f.eps);
#pragma unroll 1
        for (int p = mine; p < end; p += lanes) {
            pack<T, N> v = load<T, N>(x + p * N);
#pragma unroll
            for (int e = 0; w && e < N; e++) {
                float y1 = to_float(v.v[e]) * rstd;
                v.v[e] = from_float<T>(f.plus_one ? (1 + w[p * N + e]) * y1
                                                  : w[p * N + e] * rounded<T>(y1));
            }
            store<T, N>(y + p * N, v);
        }
        __syncwarp();
#pragma unroll 1
        for (int j = mine; angle && end && j < half; j += lanes) {
            float u = to_float(y[j]), v = to_float(y[half + j]);
            float cosine = angle[j], sine = angle[half + j];
            y[j] = from_float<T>(u * cosine - v * sine);
            y[half + j] = from_float<T>(v * cosine + u * sine);
        }
        __syncwarp();
#pragma unroll 1
        for (int p = mine; i == n && p < end; p += lanes)
            store<T, N>(key + p * N, load<T, N>(y + p * N));
    }
}

/* ---- a part of the cache ---- */

/* Sum V numbers (a power of two) over 2 * o lanes, at least V: each of V equal groups of lanes gets
 * the sum of one number.  A step between lanes o apart halves the count of numbers, until one is
 * left. */
template <int V> static __device__ inline float lanes_sums(float *v, int o)
{
    if constexpr (V == 1) {
        for (; o > 0; o /= 2)
            v[0] += __shfl_xor_sync(0xffffffffu, v[0], o);
        return v[0];
    } else {
        const bool high = threadIdx.x & o;
#pragma unroll
        for (int i = 0; i < V / 2; i++) {
            float low = v[i], other = v[i + V / 2];
            v[i] = (high ? other : low) + __shfl_xor_sync(0xffffffffu, high ? low : other, o);
        }
        return lanes_sums<V / 2>(v, o / 2);
    }
}

/* score[g*PART + j] = scale * q_g . key_j for n heads and m keys.  A lane keeps its pack of the
 * queries in registers; the further packs of a key are added by the same lanes.  U keys are in
 * flight at once. */
template <class T, int N, int G, class LINES>
static __device__ inline void part_scores(const cached &c, const T *q, const LINES &keys, int n,
                                          int m, float *score)
{
    const int U = G == 1 ? 4 : 2;
    const int packs = c.dim / N, lanes = lanes_for(packs < G ? G : packs), side = 32 / lanes;
    const int lane = (int)threadIdx.x % 32, mine = lane % lanes;
    const int each = lanes / G,
              head = mine % each ? G : mine / each; /* the sum that a lane stores */
    const int first = (int)threadIdx.x / 32 * side + lane / lanes;
#pragma unroll 1
    for (int p0 = 0; p0 < packs; p0 += lanes) {
        const int p = p0 + mine;
        float x[G][N];
#pragma unroll
        for (int g = 0; g < G; g++) {
            pack<T, N> v = {};
            if (g < n && p < packs)
                v = load<T, N>(q + g * c.dim + p * N);
#pragma unroll
            for (int e = 0; e < N; e++)
                x[g][e] = to_float(v.v[e]);
        }
#pragma unroll 1
        for (int j0 = 0; j0 < m; j0 += U * WARPS * side) {
            pack<T, N> k[U] = {};
#pragma unroll
            for (int u = 0; u < U; u++) {
                const int j = j0 + u * WARPS * side + first;
                if (j < m && p < packs)
                    k[u] = load<T, N>(keys.at(c, j) + p * N);
            }
#pragma unroll
            for (int u = 0; u < U; u++) {
                const int j = j0 + u * WARPS * side + first;
                float sum[G] = {};
#pragma unroll
                for (int e = 0; e < N; e++) {
                    float y = to_float(k[u].v[e]);
#pragma unroll
                    for (int g = 0; g < G; g++)
                        sum[g] = fmaf(x[g][e], y, sum[g]);
                }
                const float all = lanes_sums<G>(sum, lanes / 2);
                if (head < n && j < m)
                    score[head * PART + j] = fmaf(all, c.scale, p0 ? score[head * PART + j] : 0.0f);
            }
        }
    }
}

/* Replace scores by exp(score - max), the probabilities times their sum, rounded to T: a warp for
 * each head. max and sum: of each head.  The scores are of row i of sequence b and heads from h on, with keys from
 * position lo on. */
template <class T>
static __device__ inline void part_softmax(const cached &c, int64_t b, int64_t i, int64_t h,
                                           int64_t lo, int n, int m, float *score, float *max,
                                           float *sum)
{
    const int lane = (int)threadIdx.x % 32;
    for (int g = (int)threadIdx.x / 32; g < n; g += WARPS) {
        float *s = score + g * PART, top = -INFINITY, all = 0;
        for (int j = lane; (c.soft_cap > 0 || c.bias.table || c.blocks.size) && j < m; j += 32)
            s[j] = capped(c, s[j], b, i, h + g, (int)lo + j);
        for (int j = lane; j < m; j += 32)
            top = fmaxf(top, s[j]);
        top = warp_max(top);
        for (int j = lane; j < m; j += 32) {
            float e = expf(s[j] - base_of(top));
            all += e;
            s[j] = rounded<T>(e);
        }
        all = warp_sum(all);
        if (lane == 0) {
            max[g] = top;
            sum[g] = all;
        }
    }
}

/* out[(warp*G + g)*vdim + d]: the contribution of each warp's keys to head g. */
template <class T, int N, int G, class LINES>
static __device__ inline void part_values(const cached &c, const LINES &values, int n, int m,
                                          const float *score, float *out)
{
    const int packs = c.vdim / N, lanes = lanes_for(packs), side = 32 / lanes;
    const int lane = (int)threadIdx.x % 32, mine = lane % lanes, warp = (int)threadIdx.x / 32;
#pragma unroll 1
    for (int p0 = 0; p0 < packs; p0 += lanes) {
        const int p = p0 + mine;
        float x[G][N] = {};
#pragma unroll(G == 1 ? 4 : 2)
        for (int j = warp * side + lane / lanes; j < m && p < packs; j += WARPS * side) {
            pack<T, N> v = load<T, N>(values.at(c, j) + p * N);
#pragma unroll
            for (int g = 0; g < G; g++) {
                float w = g < n ? score[g * PART + j] : 0.0f;
#pragma unroll
                for (int e = 0; e < N; e++)
                    x[g][e] = fmaf(w, to_float(v.v[e]), x[g][e]);
            }
        }
        for (int o = lanes; o < 32; o *= 2) {
#pragma unroll
            for (int i = 0; i < G * N; i++)
                x[i / N][i % N] += __shfl_xor_sync(0xffffffffu, x[i / N][i % N], o);
        }
#pragma unroll
        for (int i = 0; i < G * N; i++)
            if (i / N < n && lane < lanes && p < packs)
                out[(warp * G + i / N) * c.vdim + p * N + i % N] = x[i / N][i % N];
    }
}

/* Prefetch n numbers of keys or of values to the L2 cache, while heads are computed. */
template <class T> static __device__ inline void ask_for_part(const T *side, int64_t n)
{
    const int LINE = CACHE_LINE / (int)sizeof(T);
    for (int64_t i = (int64_t)threadIdx.x * LINE; i < n; i += THREADS * LINE)
        ask_line(side + i);
}

/* The same of m lines of pages, `dim` numbers of each. */
template <class LINES>
static __device__ inline void ask_for_lines(const cached &c, const LINES &side, int dim, int m)
{
    const int LINE = CACHE_LINE / (int)sizeof(*side.x), each = (dim + LINE - 1) / LINE;
    for (int i = (int)threadIdx.x; i < m * each; i += THREADS)
        ask_line(side.at(c, i / each) + i % each * LINE);
}

template <class T, int N> static __device__ inline void copy_row(T *to, const T *from, int dim)
{
#pragma unroll 1
    for (int t = (int)threadIdx.x; t < dim / N; t += THREADS)
        store<T, N>(to + t * N, load<T, N>(from + t * N));
}

/* Add the sums of the warps for n heads from `head`, counted over all rows, and store them: as part
 * k of several, or with k = -1 as the result. */
template <class T, int G, bool SERVED>
static __device__ inline void store_part(const step_args<T> &a, int64_t head, int n, int64_t k,
                                         const float *max, const float *sum, const float *sums)
{
    const int dim = a.c.vdim;
#pragma unroll 1
    for (int t = (int)threadIdx.x; t < n * dim; t += THREADS) {
        int g = t / dim, d = t % dim;
        float x = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            x += sums[(w * G + g) * dim + d];
        if (k < 0) {
            float top = max[g], all = sum[g];
            const float fade = add_sink(a.c.sinks, (head + g) % a.c.heads, top, all);
            a.o[(head + g) * dim + d] =
                from_float<T>(x * row_factor(a.c.undivided, fade, top, all));
        } else
            a.r.out[((head + g) * a.parts + k) * dim + d] = x;
    }
    if (SERVED && k < 0 && a.c.lse && (int)threadIdx.x < n) {
        float top = max[threadIdx.x], all = sum[threadIdx.x];
        add_sink(a.c.sinks, (head + threadIdx.x) % a.c.heads, top, all);
        a.c.lse[head + threadIdx.x] = row_lse(a.c.undivided, top, all);
    }
    if (k >= 0 && (int)threadIdx.x < n) {
        a.r.max[(head + threadIdx.x) * a.parts + k] = max[threadIdx.x];
        a.r.sum[(head + threadIdx.x) * a.parts + k] = sum[threadIdx.x];
    }
}

/* True if one of the query heads that share key/value head kv sees one of m keys from position lo on. */
static __device__ inline bool is_open(const cached &c, int64_t b, int64_t i, int64_t kv, int64_t lo,
                                      int m)
{
    const int at = c.used[b] + (int)i;
    bool open = !c.blocks.size;
    for (int g = 0; g < c.group && !open; g++)
        open = sees_tile(c.blocks, (int)kv * c.group + g, at, at + 1, (int)lo, (int)lo + m);
    return open;
}

/* Part k without a key that one of n heads from `head` sees. */
template <class T>
static __device__ inline void store_nothing(const step_args<T> &a, int64_t head, int n, int64_t k)
{
    const int dim = a.c.vdim;
#pragma unroll 1
    for (int t = (int)threadIdx.x; t < n * dim; t += THREADS)
        a.r.out[((head + t / dim) * a.parts + k) * dim + t % dim] = 0;
#pragma unroll 1
    for (int g = (int)threadIdx.x; g < n; g += THREADS) {
        a.r.max[(head + g) * a.parts + k] = -INFINITY;
        a.r.sum[(head + g) * a.parts + k] = 0;
    }
}

/* ---- kernels ---- */

/* Numbers in a packed access to partial results. */
template <int N> struct join_width {
    static const int n = N < 4 ? 1 : 4;
};

/* Blocks on a multiprocessor at a time, by the count of numbers that a thread keeps: registers for
 * computing heads and for joining must not reduce the number of blocks that read keys. */
template <int N, int G> struct resident {
    static const int n = G == 8 ? (N == 8 ? 4 : 6) : G == 4 ? (N == 8 ? 7 : 9) : N == 1 ? 7 : 9;
};

/* Results of row `row` of qkv go where those of row number i of the scratch would; these are the same, unless rows are
 * ragged: then scratch counts sequences. */
template <bool SERVED, class T>
static __device__ inline std::conditional_t<SERVED, step_args<T>, const step_args<T> &>
args_of_row(const step_args<T> &a, int64_t row, int64_t i)
{
    if constexpr (SERVED) {
        step_args<T> x = a;
        x.o += (row - i) * a.c.heads * a.c.vdim;
        x.c.lse += a.c.lse ? (row - i) * a.c.heads : 0;
        return x;
    } else {
        return a;
    }
}

/* A sequence without a new token. */
template <bool SERVED> static __device__ inline bool is_absent(const cached &c, int64_t b)
{
    return SERVED && c.first && (c.kind[b] == LM_ROWS_PROMPT || !c.fresh[b]);
}

/* Shared memory: scores [G][PART], then sums over values [WARPS][G][vdim], whose memory first holds
 * the heads [G+1][dim].  With one row a sequence this kernel appends the new key; with more rows, and SERVED,
 * the cache has it already. */
template <class T, int N, int G, bool SERVED>
static __global__ void __launch_bounds__(THREADS, (resident<N, G>::n))
    attend_parts(step_args<T> all_args)
{
    LM_DYNAMIC_SHARED(float, score);
    __shared__ float max[G], sum[G];
    const cached &c = all_args.c;
    float *sums = score + G * PART;
    T *heads = reinterpret_cast<T *>(sums);
    const int64_t items = c.batch * c.seq * c.kv_heads * all_args.parts;
#pragma unroll 1
    for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
        int64_t k = item % all_args.parts, at = item / all_args.parts, kv = at % c.kv_heads,
                i = at / c.kv_heads;
        if (is_absent<SERVED>(c, i / c.seq))
            continue;
        const int64_t b = i / c.seq, row = SERVED ? first_of<SERVED>(c, b) + i % c.seq : i;
        const step_args<T> &a = args_of_row<SERVED>(all_args, row, i);
        span s = keys_of(c, b, i % c.seq);
        seen_parts seen = parts_of(s);
        int64_t head = i * c.heads + kv * c.group; /* counted over all rows */
        if (k == 0 && !seen.count)
            for (int t = (int)threadIdx.x; t < c.group * c.vdim; t += THREADS) {
                a.o[head * c.vdim + t] = T{};
                if (SERVED && a.c.lse && t < c.group)
                    a.c.lse[head + t] = -INFINITY;
            }
        if (k < seen.first || k >= seen.first + seen.count)
            continue;
        int64_t lo = s.start > k * PART ? s.start : k * PART;
        int m = (int)((s.end < (k + 1) * PART ? s.end : (k + 1) * PART) - lo);
        const auto key = lines_of<SERVED, OF_KEYS>(c, a.keys, b, kv, lo);
        const auto value = lines_of<SERVED, OF_VALUES>(c, a.values, b, kv, lo);
        T *fresh = nullptr;
        /* The part of the row's own key is open: a query sees its block. */
        const bool open = is_open(c, b, i % c.seq, kv, lo, m);
        if (!open)
            store_nothing(a, head, c.group, k);
        /* Short rows have too few blocks to keep memory busy with their reads alone, so they
         * prefetch; all rows that do so have at most `few` parts. */
        if (open && c.batch * c.seq * c.kv_heads * seen.count <= a.few) {
            if constexpr (SERVED) {
                ask_for_lines(c, key, c.dim, m);
                ask_for_lines(c, value, c.shared ? 0 : c.vdim, m);
            } else {
                ask_for_part(key.x, (int64_t)m * c.dim);
                ask_for_part(value.x, c.shared ? 0 : (int64_t)m * c.vdim);
            }
        }
        if (!SERVED && !c.reads && c.seq == 1 && k == seen.first + seen.count - 1) {
            fresh = key.at(c, m - 1);
            if (!c.shared)
                copy_row<T, N>(value.at(c, m - 1),
                               a.qkv + row * qkv_pitch(c) + (c.heads + c.kv_heads) * c.dim +
                                   kv * c.vdim,
                               c.vdim);
        }
#pragma unroll 1
        for (int h0 = 0; open && h0 < c.group; h0 += G, head += G) {
            int n = c.group - h0 < G ? c.group - h0 : G;
            make_heads<T, N>(a, row, kv, h0, n, h0 ? nullptr : fresh, heads);
            __syncthreads();
            part_scores<T, N, G>(c, heads, key, n, m, score);
            __syncthreads();
            part_softmax<T>(c, b, i % c.seq, kv * c.group + h0, lo, n, m, score, max, sum);
            __syncthreads();
            part_values<T, N, G>(c, value, n, m, score, sums);
            __syncthreads();
            store_part<T, G, SERVED>(a, head, n, seen.count > 1 ? k : -1, max, sum, sums);
            __syncthreads(); /* the next heads overwrite the shared memory */
        }
        if (seen.count > 1 && a.tickets)
            join_up<T, join_width<N>::n, G, SERVED>(a, i * c.heads + kv * c.group, k, seen,
                                                    a.tickets + at * a.tickets_each, score, sum);
    }
}

/* Only the joining: a block for each head of each row. */
template <class T, int M, bool SERVED>
static __global__ void __launch_bounds__(THREADS) join_parts(step_args<T> all_args)
{
    __shared__ float weight[FAN], sum;
    const cached &c = all_args.c;
    const int64_t heads = c.batch * c.seq * c.heads;
#pragma unroll 1
    for (int64_t head = blockIdx.x; head < heads; head += gridDim.x) {
        int64_t i = head / c.heads, b = i / c.seq;
        if (is_absent<SERVED>(c, b))
            continue;
        const int64_t row = SERVED ? first_of<SERVED>(c, b) + i % c.seq : i;
        const step_args<T> &a = args_of_row<SERVED>(all_args, row, i);
        seen_parts seen = parts_of(keys_of(c, b, i % c.seq));
        bool whole = seen.count < 2;
#pragma unroll 1
        for (int64_t unit = 1; !whole; unit *= FAN) {
            int64_t k = seen.first;
#pragma unroll 1
            for (; k < seen.first + seen.count; k = (k / (unit * FAN) + 1) * unit * FAN) {
                const run r = run_around(seen, k, unit);
                whole = r.whole;
                if (r.count > 1)
                    join_run<T, M, SERVED>(a, head, 1, seen, r, weight, &sum);
            }
        }
    }
}

/* ---- launchers ---- */

static int64_t parts_of(const cached &c)
{
    return (c.room + PART - 1) / PART;
}

template <int G> static size_t shared_of(const cached &c)
{
    return (size_t)(G * PART + WARPS * G * widest(c)) * sizeof(float);
}

size_t attend_rows_work(const cached &c)
{
    int64_t parts = parts_of(c);
    if (shared_of<1>(c) > MOST_SHARED)
        return SIZE_MAX;
    return parts == 1 ? 0
                      : (size_t)(c.batch * c.seq * c.heads * parts * (c.vdim + 2)) * sizeof(float);
}

template <class T, int N, int G, bool SERVED>
static void run_parts(const lm_stream *s, step_args<T> a)
{
    const int64_t at = a.c.batch * a.c.seq * a.c.kv_heads;
    a.tickets_each = tickets_for(a.parts);
    a.few = s->sms * most_ahead / (PART * (a.c.dim + a.c.vdim) * (int64_t)sizeof(T));
    a.tickets = at * a.tickets_each > LM_CUDA_TICKETS ? nullptr : s->tickets;
    LM_LAUNCH((attend_parts<T, N, G, SERVED>), grid_for(at * a.parts, 1, s), THREADS,
              shared_of<G>(a.c), s, a);
    if (a.parts > 1 && !a.tickets)
        LM_LAUNCH((join_parts<T, join_width<N>::n, SERVED>),
                  grid_for(a.c.batch * a.c.seq * a.c.heads, 1, s), THREADS, 0, s, a);
}

template <class T, bool SERVED>
static void run_rows(const lm_call *call, const cached &c, const row_front &front, bool packed)
{
    const int N = wide<T>::n;
    step_args<T> a = { c,
                       front,
                       in_ptr<const T>(call, 0),
                       out_ptr<T>(call, 0),
                       out_ptr<T>(call, 1),
                       cached_values<T>(call),
                       {},
                       parts_of(c),
                       0,
                       0,
                       nullptr };
    a.r = partial_of(c, a.parts, call->work);
    const bool wide_heads = widest(c) > MOST_TILED; /* of latent attention, say */
    if (!packed)
        run_parts<T, 1, 1, SERVED>(call->stream, a);
    else if (c.group == 1 || (wide_heads && shared_of<4>(c) > MOST_SHARED))
        run_parts<T, N, 1, SERVED>(call->stream, a);
    else if (c.group <= 4 || wide_heads)
        run_parts<T, N, 4, SERVED>(call->stream, a);
    else
        run_parts<T, N, 8, SERVED>(call->stream, a);
}

template <class T>
void attend_rows(const lm_call *call, const cached &c, const row_front &front, bool packed)
{
    run_rows<T, false>(call, c, front, packed);
}

template <class T> void attend_served_rows(const lm_call *call, const cached &c, bool packed)
{
    cached one = c;
    if (c.first) /* at most one new token a sequence */
        one.seq = 1;
    run_rows<T, true>(call, one, row_front{}, packed);
}

#define FOR_TYPE(T)                                                                         \
    template void attend_rows<T>(const lm_call *, const cached &, const row_front &, bool); \
    template void attend_served_rows<T>(const lm_call *, const cached &, bool);
FOR_TYPE(float)
FOR_TYPE(bf16)
FOR_TYPE(f16)
