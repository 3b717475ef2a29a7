/* SPDX-License-Identifier: Apache-2.0 */
/* route.cu -- choices of experts: a warp a token, its keys in shared memory; each choice is the
 * largest key, which then becomes -Inf.  What an expert may take is found on the device: ranks by a
 * counting sort, the least weight that stays digit by digit in keys that are all different, and
 * other experts for those that find no room by one warp, in order. */
#include "kernels/cuda/philox.cuh"
#include "kernels/cuda/route_sort.cuh"

extern "C" {
#include "kernels/route.h"
}

struct choose_args {
    lm_route_attr a;
    int64_t tokens, experts;
    const float *z, *bias;
    float *weight;
    int32_t *expert;
    row_stats *stats; /* [T] */
    uint64_t hi;      /* of the draws */
    const lm_step *step;
};

/* lm_route_expert, on the device. */
__device__ inline int32_t expert_of(int32_t expert)
{
    return expert < 0 ? -1 - expert : expert;
}

/* ---- choices ---- */

__device__ inline float key_of(const choose_args &x, int64_t t, int64_t e, row_stats r)
{
    float z = x.z[t * x.experts + e];
    if (r.inv != r.inv)
        return 0;
    return x.bias ? score(x.a.sigmoid, z, r) + x.bias[e] : z;
}

__device__ inline float group_value(const choose_args &x, const float *key, int64_t n, row_stats r)
{
    float first = key[0], second = -INFINITY;
    for (int64_t e = 1; e < n; e++) {
        float v = key[e];
        second = v > first ? first : v > second ? v : second;
        first = v > first ? v : first;
    }
    if (x.a.group_max)
        return first;
    if (!x.bias) {
        first = score(x.a.sigmoid, first, r);
        second = n > 1 ? score(x.a.sigmoid, second, r) : 0;
    }
    return n > 1 ? first + second : first;
}

__device__ inline void keep_groups(const choose_args &x, float *key, float *value, row_stats r)
{
    int64_t n = x.experts / x.a.groups;
    for (int64_t g = lane_of(); g < x.a.groups; g += 32)
        value[g] = group_value(x, key + g * n, n, r);
    __syncwarp();
    for (int64_t i = 0; i < x.a.kept_groups; i++)
        pick(value, x.a.groups);
    for (int64_t e = lane_of(); e < x.experts; e += 32)
        if (value[e / n] > -INFINITY)
            key[e] = -INFINITY;
    __syncwarp();
}

/* s over an exponential variate, for experts that can still be chosen. */
__device__ inline void draw_keys(const choose_args &x, int64_t t, float *key, row_stats r)
{
    uint64_t hi = x.hi, first = dropout_base(x.step, (uint64_t)(x.tokens * x.experts), &hi);
    for (int64_t e = lane_of(); e < x.experts; e += 32) {
        uint64_t at = first + (uint64_t)(t * x.experts + e);
        uint32_t draw = philox(at / 4, hi, x.step->seed).v[at % 4];
        float u = ((float)(draw >> 9) + 0.5f) * 0x1p-23f;
        if (key[e] > -INFINITY)
            key[e] = score(x.a.sigmoid, x.z[t * x.experts + e], r) / -logf(u);
    }
    __syncwarp();
}

__device__ inline void choose_token(const choose_args &x, int64_t t, row_stats r, float *key)
{
    int32_t *expert = x.expert + t * x.a.k;
    bool good = r.inv == r.inv;
    for (int64_t e = lane_of(); e < x.experts; e += 32)
        key[e] = key_of(x, t, e, r);
    __syncwarp();
    if (x.a.groups > 1 && good)
        keep_groups(x, key, key + x.experts, r);
    for (int64_t s = 0; s < x.a.k; s++) {
        if (s == 1 && x.a.second_random && good)
            draw_keys(x, t, key, r);
        int best = pick(key, x.experts);
        if (lane_of() == 0)
            expert[s] = best;
    }
}

/* room: floats of shared memory for a warp. */
static __global__ void choose_kernel(choose_args x, int64_t room)
{
    LM_DYNAMIC_SHARED(float, keys);
    for (int64_t t = first_row(); t < x.tokens; t += next_row()) {
        row_stats r = stats_of(x.z + t * x.experts, x.experts, x.a.sigmoid);
        if (lane_of() == 0)
            x.stats[t] = r;
        if (x.a.by_expert)
            for (int64_t s = lane_of(); s < x.a.k; s += 32)
                x.expert[t * x.a.k + s] = (int32_t)s;
        else
            choose_token(x, t, r, keys + threadIdx.x / 32 * room);
    }
}

static __global__ void weigh_kernel(choose_args x)
{
    for (int64_t t = first_row(); t < x.tokens; t += next_row()) {
        const float *z = x.z + t * x.experts;
        const int32_t *expert = x.expert + t * x.a.k;
        row_stats r = x.stats[t];
        float sum = 0, scale = (float)x.a.scale;
        for (int64_t s = lane_of(); x.a.normalise && s < x.a.k; s += 32)
            sum += score(x.a.sigmoid, z[expert_of(expert[s])], r);
        if (x.a.normalise)
            scale /= warp_sum(sum) + 1e-20f;
        for (int64_t s = lane_of(); s < x.a.k; s += 32) {
            float w = scale * score(x.a.sigmoid, z[expert_of(expert[s])], r);
            x.weight[t * x.a.k + s] = expert[s] < 0 ? 0 : w;
        }
    }
}

/* ---- capacity ---- */

__device__ inline void drop(float *weight, int32_t *expert, int64_t a)
{
    expert[a] = -1 - expert[a];
    weight[a] = 0;
}

struct drop_late {
    int64_t capacity;
    float *weight;
    int32_t *expert;
    __device__ void operator()(int64_t a, int32_t, int rank) const
    {
        if (rank >= capacity)
            drop(weight, expert, a);
    }
};

/* The best expert with room that the token has not chosen; E: all others are full. */
__device__ inline int best_with_room(const choose_args &x, int64_t t, const int32_t *taken)
{
    const int32_t *expert = x.expert + t * x.a.k;
    float top = -INFINITY;
    int best = (int)x.experts;
    for (int64_t e = lane_of(); e < x.experts; e += 32) {
        bool open = taken[e] < x.a.capacity;
        for (int64_t s = 0; s < x.a.k && open; s++)
            open = expert_of(expert[s]) != e;
        float v = open ? key_of(x, t, e, x.stats[t]) : 0;
        if (open && (best == x.experts || v > top)) {
            top = v;
            best = (int)e;
        }
    }
    return warp_best(top, best);
}

/* One warp, because an expert's room depends on all that came before. */
static __global__ void reroute_kernel(choose_args x, int32_t *taken)
{
    int64_t count = x.tokens * x.a.k;
    for (int64_t first = 0; first < count; first += 32) {
        int64_t i = first + lane_of(), a = i % x.tokens * x.a.k + i / x.tokens;
        unsigned left = __ballot_sync(full_warp, i < count && x.expert[a] < 0);
        for (; left; left &= left - 1) {
            int64_t own = first + __ffs((int)left) - 1, t = own % x.tokens;
            int best = best_with_room(x, t, taken);
            __syncwarp();
            if (lane_of() == 0 && best < x.experts) {
                x.expert[t * x.a.k + own / x.tokens] = best;
                taken[best]++;
            }
            __syncwarp();
        }
    }
}

/* Assignments of one expert in a list (of a sort), or with by_expert in a column. */
struct cut_args {
    choose_args x;
    const int32_t *offsets, *from;
    unsigned *bits; /* [T K] */
};

__device__ inline int64_t listed(const cut_args &c, int64_t e, int64_t r)
{
    return c.x.a.by_expert ? r * c.x.experts + e : c.from[c.offsets[e] + r];
}

__device__ inline uint64_t full_key(const unsigned *bits, int64_t i)
{
    return (uint64_t)bits[i] << 32 | (0xffffffffu - (unsigned)i);
}

/* A digit of the bound: its value and what is still to be kept below it. */
struct cut_state {
    uint64_t cut, mask;
    int64_t kept;
    bool done;
};

__device__ inline void next_digit(const unsigned *count, int shift, cut_state *s)
{
    int digit = 255;
    for (; count[digit] < s->kept; digit--)
        s->kept -= count[digit];
    s->cut |= (uint64_t)digit << shift;
    s->mask |= (uint64_t)255 << shift;
    s->done = count[digit] == s->kept;
}

/* A block an expert. */
static __global__ void cut_kernel(cut_args c)
{
    __shared__ unsigned count[256];
    __shared__ cut_state s;
    int64_t e = blockIdx.x, first = c.x.a.by_expert ? e * c.x.tokens : c.offsets[e];
    int64_t n = c.x.a.by_expert ? c.x.tokens : c.offsets[e + 1] - first;
    unsigned *bits = c.bits + first;
    if (n <= c.x.a.capacity)
        return;
    for (int64_t r = threadIdx.x; r < n; r += blockDim.x) {
        float w = c.x.weight[listed(c, e, r)];
        bits[r] = w == w ? __float_as_uint(w) : 0xffffffffu; /* weights are not negative */
    }
    if (threadIdx.x == 0)
        s = cut_state{ 0, 0, c.x.a.capacity, false };
    __syncthreads();
    for (int shift = 56; shift >= 0 && !s.done; shift -= 8) {
        count[threadIdx.x] = 0;
        __syncthreads();
        for (int64_t r = threadIdx.x; r < n; r += blockDim.x)
            if ((full_key(bits, r) & s.mask) == s.cut)
                atomicAdd(&count[full_key(bits, r) >> shift & 255], 1u);
        __syncthreads();
        if (threadIdx.x == 0)
            next_digit(count, shift, &s);
        __syncthreads();
    }
    for (int64_t r = threadIdx.x; r < n; r += blockDim.x)
        if (full_key(bits, r) < s.cut)
            drop(c.x.weight, c.x.expert, listed(c, e, r));
}

/* ---- launches ---- */

struct choose_parts {
    row_stats *stats;
    int32_t *offsets, *from;
    unsigned *bits;
    route_sort sort;
    size_t bytes;
};

static choose_parts parts_of(const lm_call *c)
{
    const lm_route_attr *a = (const lm_route_attr *)c->attr;
    int64_t tokens = c->in[0].dim[0], experts = c->in[0].dim[1], count = tokens * a->k;
    bool by_weight = a->policy == LM_OVERFLOW_PROBABILITY;
    choose_parts p = {};
    p.stats = part_of<row_stats>(c->work, &p.bytes, tokens);
    p.sort = route_sort_of(out_ptr<int32_t>(c, 1), tokens, a->k, experts, !by_weight);
    if (a->capacity > 0 && (a->by_expert || by_weight))
        p.bits = part_of<unsigned>(c->work, &p.bytes, count);
    if (a->capacity > 0 && !a->by_expert) {
        p.offsets = part_of<int32_t>(c->work, &p.bytes, experts + 1);
        p.sort.at = part_of<int32_t>(c->work, &p.bytes, p.sort.chunks * experts);
        p.from = by_weight ? part_of<int32_t>(c->work, &p.bytes, count) : nullptr;
    }
    return p;
}

static size_t choose_work(const lm_call *c, int)
{
    return parts_of(c).bytes;
}

static void weigh(const lm_call *c, const choose_args &x)
{
    LM_LAUNCH(weigh_kernel, grid_for(x.tokens, row_warps, c->stream), row_threads, 0, c->stream, x);
}

static void drop_by_weight(const lm_call *c, const choose_args &x, const choose_parts &p)
{
    if (!x.a.by_expert)
        route_sort_run(c, p.sort, 0, x.tokens * x.a.k, p.offsets, p.from, nullptr);
    cut_args cut = { x, p.offsets, p.from, p.bits };
    LM_LAUNCH(cut_kernel, (unsigned)x.experts, 256, 0, c->stream, cut);
}

static void route_choose(const lm_call *c)
{
    const lm_route_attr *a = (const lm_route_attr *)c->attr;
    choose_parts p = parts_of(c);
    choose_args x = { *a,
                      c->in[0].dim[0],
                      c->in[0].dim[1],
                      in_ptr<float>(c, 0),
                      in_ptr<float>(c, 1),
                      out_ptr<float>(c, 0),
                      out_ptr<int32_t>(c, 1),
                      p.stats,
                      rng_hi("route", (uint64_t)a->site),
                      c->stream->step };
    int64_t room = x.experts + (a->groups > 1 ? a->groups : 0);
    int warps = room <= 1024 ? 8 : 1;
    LM_LAUNCH(choose_kernel, grid_for(x.tokens, warps, c->stream), warps * 32,
              (size_t)(warps * room) * sizeof(float), c->stream, x, room);
    weigh(c, x);
    if (a->capacity < 1)
        return;
    if (a->by_expert || a->policy == LM_OVERFLOW_PROBABILITY) {
        drop_by_weight(c, x, p);
        return;
    }
    drop_late then = { a->capacity, x.weight, x.expert };
    route_sort_offsets(c, p.sort, false, 0, a->capacity, p.offsets);
    LM_LAUNCH((route_sort_rows<drop_late>), (unsigned)p.sort.chunks, 32,
              (size_t)x.experts * sizeof(int), c->stream, p.sort, then);
    if (a->policy != LM_OVERFLOW_REROUTE)
        return;
    LM_LAUNCH(reroute_kernel, 1, 32, 0, c->stream, x, p.offsets);
    weigh(c, x);
}

/* ---- the gradient of weights ---- */

struct dz_args {
    lm_route_attr a;
    int64_t tokens, experts;
    const float *z, *dw;
    const int32_t *expert;
    float *dz;
};

/* dz = p (ds - <p, ds>), where <p, ds> is 0 except for the 1e-20 if weights are normalised; of
 * sigmoids ds s (1 - s). */
static __global__ void dz_kernel(dz_args x)
{
    for (int64_t t = first_row(); t < x.tokens; t += next_row()) {
        const float *z = x.z + t * x.experts, *dw = x.dw + t * x.a.k;
        const int32_t *expert = x.expert + t * x.a.k;
        float *dz = x.dz + t * x.experts, scale = (float)x.a.scale, sum = 0, both = 0, mean = 0;
        row_stats r = stats_of(z, x.experts, x.a.sigmoid);
        for (int64_t s = lane_of(); s < x.a.k; s += 32) {
            float v = score(x.a.sigmoid, z[expert_of(expert[s])], r);
            sum += v;
            both += expert[s] < 0 ? 0 : dw[s] * v;
        }
        sum = warp_sum(sum) + 1e-20f;
        both = warp_sum(both);
        float dot = scale * both, inv = 1;
        if (x.a.normalise) {
            mean = both / sum;
            dot = scale * mean * (1e-20f / sum);
            inv = 1 / sum;
        }
        /* A row that is not finite: NaN. */
        for (int64_t e = lane_of(); e < x.experts; e += 32)
            dz[e] = x.a.sigmoid ? r.inv - r.inv : -dot * score(false, z[e], r);
        __syncwarp();
        for (int64_t s = lane_of(); s < x.a.k; s += 32) {
            float v = z[expert_of(expert[s])];
            float ds = ((expert[s] < 0 ? 0 : dw[s]) - mean) * (scale * inv);
            ds = x.a.sigmoid ? ds * score(true, -v, r) : ds - dot;
            dz[expert_of(expert[s])] = score(x.a.sigmoid, v, r) * ds;
        }
    }
}

static void route_choose_dz(const lm_call *c)
{
    dz_args x = { *(const lm_route_attr *)c->attr,
                  c->in[0].dim[0],
                  c->in[0].dim[1],
                  in_ptr<float>(c, 0),
                  in_ptr<float>(c, 2),
                  in_ptr<int32_t>(c, 1),
                  out_ptr<float>(c, 0) };
    LM_LAUNCH(dz_kernel, grid_for(x.tokens, row_warps, c->stream), row_threads, 0, c->stream, x);
}

extern "C" const lm_kernel lm_route_cuda_kernels[] = {
    { "route_choose", LM_DTYPE_F32, LM_CUDA_PLAIN, route_choose, choose_work },
    { "route_choose_dz", LM_DTYPE_F32, LM_CUDA_PLAIN, route_choose_dz, nullptr },
    LM_CUDA_END,
};
