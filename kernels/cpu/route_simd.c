/* SPDX-License-Identifier: Apache-2.0 */
/* route_simd.c -- scores and choices of tokens, on vectors over the experts; what an expert may
 * take, by counts over blocks of tokens.
 *
 * A choice is the largest of a row of keys, which then becomes -Inf: K passes over E.  The weights
 * that an expert with a capacity keeps are those above a bound, which is found digit by digit, in
 * keys that are all different: the bits of the weight, then the index. */
#include "kernels/route.h"

#include "base/rng.h"
#include "kernels/cpu/route_scores.h"
#include "kernels/cpu/route_sort.h"
#include "kernels/cpu/tables.h"
#include "kernels/cpu/vrng.h"

/* ---- scores ---- */

/* inv: 1 / sum of exp(z - top), or 1 of sigmoids; NaN: a logit is not finite. */
typedef struct {
    float top, inv;
} row_stats;

static row_stats stats_of(const lm_route_attr *a, const float *z, int64_t experts)
{
    bool finite;
    row_stats r = { top_of(z, experts, &finite), 1 };
    if (!finite)
        r.inv = NAN;
    else if (!a->sigmoid)
        r.inv = 1 / exp_row(z, r.top, experts, NULL);
    return r;
}

LM_INLINE vf scores(const lm_route_attr *a, vf z, row_stats r)
{
    vf s = a->sigmoid ? vf_sigmoid(z) : vf_exp(z - vf_set(r.top));
    return s * vf_set(r.inv);
}

/* Scores of n choices, at most VF_LANES; the others' are 0. */
static vf scores_at(const lm_route_attr *a, const float *z, row_stats r, const int32_t *expert,
                    int64_t n)
{
    float v[VF_LANES] = { 0 };
    for (int64_t i = 0; i < n; i++)
        v[i] = z[lm_route_expert(expert[i])];
    return vf_keep_n(scores(a, vf_load(v), r), n, vf_zero());
}

/* ---- choices ---- */

typedef struct {
    const lm_call *c;
    const lm_route_attr *a;
    int64_t tokens, experts, room; /* room: floats of a row of keys, whole vectors */
    float *keys;                   /* [threads,2,room]: keys, values of groups */
    row_stats *stats;              /* [T] */
    int32_t *ints;                 /* counts of blocks, or a sort's */
    int32_t *taken;                /* [E], or a sort's offsets [E+1] */
    int32_t *from;                 /* [T K] of a sort */
    uint32_t *bits;                /* [T K] of weights */
    uint64_t *cut;                 /* [E] */
} choose_job;

static void keys_of(const choose_job *j, int64_t t, row_stats r, float *key)
{
    const float *z = (const float *)j->c->in[0].data + t * j->experts;
    const float *bias = opt_data(j->c->in, j->c->n_in, 1);
    if (isnan(r.inv))
        memset(key, 0, (size_t)j->experts * sizeof *key);
    else if (!bias)
        memcpy(key, z, (size_t)j->experts * sizeof *key);
    else
        VF_FOR(i, n, j->experts, {
            vf s = scores(j->a, vf_get_any(LM_DTYPE_F32, z, i, n), r);
            vf_put_any(LM_DTYPE_F32, key, i, s + vf_get_any(LM_DTYPE_F32, bias, i, n), n);
        });
    end_row(key, j->experts);
}

static float group_value(const choose_job *j, row_stats r, const float *key, int64_t n)
{
    float two[VF_LANES] = { key[0], -INFINITY };
    for (int64_t e = 1; e < n; e++) {
        float v = key[e];
        two[1] = v > two[0] ? two[0] : v > two[1] ? v : two[1];
        two[0] = v > two[0] ? v : two[0];
    }
    if (j->a->group_max)
        return two[0];
    if (!opt_data(j->c->in, j->c->n_in, 1))
        vf_store(two, scores(j->a, vf_load(two), r));
    return n > 1 ? two[0] + two[1] : two[0];
}

static void keep_groups(const choose_job *j, row_stats r, float *key, float *value)
{
    int64_t n = j->experts / j->a->groups;
    for (int64_t g = 0; g < j->a->groups; g++)
        value[g] = group_value(j, r, key + g * n, n);
    end_row(value, j->a->groups);
    for (int64_t i = 0; i < j->a->kept_groups; i++)
        pick(value, j->a->groups);
    for (int64_t g = 0; g < j->a->groups; g++)
        for (int64_t e = g * n; e < g * n + n && value[g] > -INFINITY; e++)
            key[e] = -INFINITY;
}

/* s over an exponential variate, for experts that can still be chosen. */
static void draw_keys(const choose_job *j, int64_t t, row_stats r, float *key)
{
    const float *z = (const float *)j->c->in[0].data + t * j->experts;
    const lm_step *step = j->c->step;
    lm_rng rng = lm_rng_make(step->seed, "route", (uint64_t)j->a->site);
    uint64_t first = lm_rng_first(&rng, (uint64_t)step->step * 65536 + (uint64_t)step->micro,
                                  (uint64_t)(j->tokens * j->experts));
    uint32_t draw[VRNG_DRAWS];
    first += (uint64_t)(t * j->experts);
    for (int64_t e = 0, d = VRNG_DRAWS; e < j->experts; e++, d++) {
        if (d == VRNG_DRAWS) {
            vrng_u32 v[4];
            uint64_t at = first + (uint64_t)e;
            lm_philox_vectors(rng, at / 4, v);
            memcpy(draw, v, sizeof draw);
            d = (int64_t)(at % 4);
        }
        if (key[e] > -INFINITY)
            key[e] = 1 / -logf(((float)(draw[d] >> 9) + 0.5f) * 0x1p-23f);
    }
    VF_FOR(i, n, j->experts, {
        vf s = scores(j->a, vf_get_any(LM_DTYPE_F32, z, i, n), r);
        vf k = vf_get_any(LM_DTYPE_F32, key, i, n);
        vf_put_any(LM_DTYPE_F32, key, i, vf_if_lt(vf_set(-INFINITY), k, s * k, k), n);
    });
}

static void choose_row(const choose_job *j, int64_t t, row_stats r, float *key)
{
    const lm_route_attr *a = j->a;
    int32_t *expert = (int32_t *)j->c->out[1].data + t * a->k;
    if (a->by_expert) {
        for (int64_t s = 0; s < a->k; s++)
            expert[s] = (int32_t)s;
        return;
    }
    keys_of(j, t, r, key);
    if (a->groups > 1 && !isnan(r.inv))
        keep_groups(j, r, key, key + j->room);
    for (int64_t s = 0; s < a->k; s++) {
        if (s == 1 && a->second_random && !isnan(r.inv))
            draw_keys(j, t, r, key);
        expert[s] = (int32_t)pick(key, j->experts);
    }
}

static void weigh_row(const choose_job *j, int64_t t, row_stats r)
{
    const lm_route_attr *a = j->a;
    const float *z = (const float *)j->c->in[0].data + t * j->experts;
    const int32_t *expert = (const int32_t *)j->c->out[1].data + t * a->k;
    float *weight = (float *)j->c->out[0].data + t * a->k, scale = (float)a->scale, sum = 1e-20f;
    for (int64_t s = 0; a->normalise && s < a->k; s += VF_LANES)
        sum += vf_sum(scores_at(a, z, r, expert + s, least(VF_LANES, a->k - s)));
    scale = a->normalise ? scale / sum : scale;
    for (int64_t s = 0; s < a->k; s += VF_LANES) {
        int64_t n = least(VF_LANES, a->k - s);
        vf_store_n(weight + s, scores_at(a, z, r, expert + s, n) * vf_set(scale), n);
    }
    for (int64_t s = 0; s < a->k; s++)
        weight[s] = expert[s] < 0 ? 0 : weight[s];
}

static void choose_rows(void *ctx, int64_t begin, int64_t end, int worker)
{
    const choose_job *j = ctx;
    for (int64_t t = begin; t < end; t++) {
        j->stats[t] = stats_of(j->a, (const float *)j->c->in[0].data + t * j->experts, j->experts);
        choose_row(j, t, j->stats[t], j->keys + worker * 2 * j->room);
        weigh_row(j, t, j->stats[t]);
    }
}

static void weigh_rows(void *ctx, int64_t begin, int64_t end, int worker)
{
    const choose_job *j = ctx;
    (void)worker;
    for (int64_t t = begin; t < end; t++)
        weigh_row(j, t, j->stats[t]);
}

/* ---- capacity by position ---- */

static void drop(const choose_job *j, int64_t i)
{
    int32_t *expert = j->c->out[1].data;
    expert[i] = -1 - expert[i];
    ((float *)j->c->out[0].data)[i] = 0;
}

/* Tokens of a block with counts of its own; no fewer than experts, so that counts are fewer than
 * choices. */
static int64_t block_tokens(int64_t tokens, int64_t experts)
{
    return most(most(256, experts), (tokens + 63) / 64);
}

static int64_t blocks_of(int64_t tokens, int64_t experts)
{
    int64_t size = block_tokens(tokens, experts);
    return (tokens + size - 1) / size;
}

static void count_choices(void *ctx, int64_t begin, int64_t end, int worker)
{
    const choose_job *j = ctx;
    const int32_t *expert = j->c->out[1].data;
    int64_t k = j->a->k, size = block_tokens(j->tokens, j->experts);
    (void)worker;
    for (int64_t b = begin; b < end; b++) {
        int32_t *count = j->ints + b * k * j->experts;
        memset(count, 0, (size_t)(k * j->experts) * sizeof *count);
        for (int64_t t = b * size; t < least(j->tokens, (b + 1) * size); t++)
            for (int64_t s = 0; s < k; s++)
                count[s * j->experts + expert[t * k + s]]++;
    }
}

/* Counts become the number of assignments of the expert before the block's. */
static void sum_counts(void *ctx, int64_t begin, int64_t end, int worker)
{
    const choose_job *j = ctx;
    int64_t pitch = j->a->k * j->experts, blocks = blocks_of(j->tokens, j->experts);
    (void)worker;
    for (int64_t e = begin; e < end; e++) {
        int32_t sum = 0;
        for (int64_t s = 0; s < j->a->k; s++)
            for (int64_t b = 0; b < blocks; b++) {
                int32_t *at = j->ints + b * pitch + s * j->experts + e, n = *at;
                *at = sum;
                sum += n;
            }
        j->taken[e] = (int32_t)least(sum, j->a->capacity);
    }
}

static void drop_choices(void *ctx, int64_t begin, int64_t end, int worker)
{
    const choose_job *j = ctx;
    const int32_t *expert = j->c->out[1].data;
    int64_t k = j->a->k, size = block_tokens(j->tokens, j->experts);
    (void)worker;
    for (int64_t b = begin; b < end; b++) {
        int32_t *count = j->ints + b * k * j->experts;
        for (int64_t t = b * size; t < least(j->tokens, (b + 1) * size); t++)
            for (int64_t s = 0; s < k; s++)
                if (count[s * j->experts + expert[t * k + s]]++ >= j->a->capacity)
                    drop(j, t * k + s);
    }
}

/* -1: no expert with room that the token has not chosen. */
static int64_t best_with_room(const choose_job *j, int64_t t, float *key)
{
    const int32_t *expert = (const int32_t *)j->c->out[1].data + t * j->a->k;
    int64_t best = -1;
    keys_of(j, t, j->stats[t], key);
    for (int64_t s = 0; s < j->a->k; s++)
        key[lm_route_expert(expert[s])] = -INFINITY;
    for (int64_t e = 0; e < j->experts; e++)
        if (j->taken[e] < j->a->capacity && key[e] > (best < 0 ? -INFINITY : key[best]))
            best = e;
    return best;
}

static void reroute(const choose_job *j)
{
    int32_t *expert = j->c->out[1].data;
    for (int64_t s = 0; s < j->a->k; s++)
        for (int64_t t = 0; t < j->tokens; t++) {
            int64_t i = t * j->a->k + s, e = expert[i] < 0 ? best_with_room(j, t, j->keys) : -1;
            if (e < 0)
                continue;
            expert[i] = (int32_t)e;
            j->taken[e]++;
        }
}

/* ---- capacity by weight ---- */

static uint64_t key_of(const uint32_t *bits, int64_t i)
{
    return (uint64_t)bits[i] << 32 | (0xffffffffu - (uint32_t)i);
}

/* The least of the `kept` largest keys of n; 0: all are kept. */
static uint64_t cut_of(const uint32_t *bits, int64_t n, int64_t kept)
{
    uint64_t cut = 0, mask = 0;
    if (n <= kept)
        return 0;
    for (int shift = 56; shift >= 0; shift -= 8) {
        int64_t count[256] = { 0 };
        int digit = 255;
        for (int64_t i = 0; i < n; i++)
            count[key_of(bits, i) >> shift & 255] += (key_of(bits, i) & mask) == cut;
        for (; count[digit] < kept; digit--)
            kept -= count[digit];
        cut |= (uint64_t)digit << shift;
        mask |= (uint64_t)255 << shift;
        if (count[digit] == kept)
            break;
    }
    return cut;
}

/* Weights are not negative, so that their bits are in their order; NaN is above all. */
static uint32_t bits_of(float weight)
{
    uint32_t u;
    memcpy(&u, &weight, sizeof u);
    return isnan(weight) ? 0xffffffffu : u;
}

/* The assignments of an expert, which are side by side in `from`. */
static void drop_light(void *ctx, int64_t begin, int64_t end, int worker)
{
    const choose_job *j = ctx;
    const float *weight = j->c->out[0].data;
    (void)worker;
    for (int64_t e = begin; e < end; e++) {
        int64_t first = j->taken[e], n = j->taken[e + 1] - first;
        for (int64_t r = 0; r < n; r++)
            j->bits[first + r] = bits_of(weight[j->from[first + r]]);
        uint64_t cut = cut_of(j->bits + first, n, j->a->capacity);
        for (int64_t r = 0; r < n; r++)
            if (key_of(j->bits + first, r) < cut)
                drop(j, j->from[first + r]);
    }
}

static void drop_by_weight(choose_job *j, lm_par *par)
{
    route_sort sort = { .expert = j->c->out[1].data,
                        .count = j->tokens * j->a->k,
                        .rows = j->tokens * j->a->k,
                        .experts = j->experts,
                        .offsets = j->taken,
                        .from = j->from,
                        .at = j->ints };
    route_sort_run(&sort, par);
    lm_par_for(par, j->experts, 1, drop_light, j);
}

/* Bits of weights by expert [E,T]. */
static void transpose_weights(void *ctx, int64_t begin, int64_t end, int worker)
{
    const choose_job *j = ctx;
    const float *weight = j->c->out[0].data;
    (void)worker;
    for (int64_t t = begin; t < end; t++)
        for (int64_t e = 0; e < j->experts; e++)
            j->bits[e * j->tokens + t] = bits_of(weight[t * j->experts + e]);
}

static void cut_experts(void *ctx, int64_t begin, int64_t end, int worker)
{
    const choose_job *j = ctx;
    (void)worker;
    for (int64_t e = begin; e < end; e++)
        j->cut[e] = cut_of(j->bits + e * j->tokens, j->tokens, j->a->capacity);
}

static void drop_tokens(void *ctx, int64_t begin, int64_t end, int worker)
{
    const choose_job *j = ctx;
    (void)worker;
    for (int64_t t = begin; t < end; t++)
        for (int64_t e = 0; e < j->experts; e++)
            if (key_of(j->bits + e * j->tokens, t) < j->cut[e])
                drop(j, t * j->experts + e);
}

static void choose_tokens(choose_job *j, lm_par *par)
{
    int64_t grain = most(16, grain_tokens(j->experts));
    lm_par_for(par, j->tokens, grain, transpose_weights, j);
    lm_par_for(par, j->experts, 1, cut_experts, j);
    lm_par_for(par, j->tokens, grain, drop_tokens, j);
}

/* Divide the scratch; the bytes of it. */
static size_t divide_work(choose_job *j, const lm_call *c, int threads)
{
    const lm_route_attr *a = c->attr;
    int64_t T = c->in[0].dim[0], E = c->in[0].dim[1];
    bool by_weight = a->by_expert || a->policy == LM_OVERFLOW_PROBABILITY;
    char *base = c->work;
    size_t at = 0;
    *j = (choose_job){ .c = c, .a = a, .tokens = T, .experts = E, .room = room_of(E) };
    ROUTE_PART(j, keys, base, at, threads * 2 * j->room);
    ROUTE_PART(j, stats, base, at, T);
    if (a->capacity > 0 && a->by_expert) {
        ROUTE_PART(j, cut, base, at, E);
        ROUTE_PART(j, bits, base, at, T * E);
    } else if (a->capacity > 0) {
        ROUTE_PART(j, taken, base, at, E + 1);
        ROUTE_PART(j, ints, base, at,
                   by_weight ? (int64_t)route_sort_ints(T * a->k, E) : blocks_of(T, E) * a->k * E);
        ROUTE_PART(j, from, base, at, by_weight ? T * a->k : 0);
        ROUTE_PART(j, bits, base, at, by_weight ? T * a->k : 0);
    }
    return at;
}

static size_t route_choose_work(const lm_call *c, int threads)
{
    choose_job j;
    return divide_work(&j, c, threads);
}

static void route_choose(const lm_call *c)
{
    choose_job j;
    divide_work(&j, c, lm_par_threads(c->par));
    lm_par_for(c->par, j.tokens, grain_tokens(j.experts), choose_rows, &j);
    if (j.a->capacity < 1)
        return;
    if (j.a->by_expert) {
        choose_tokens(&j, c->par);
        return;
    }
    if (j.a->policy == LM_OVERFLOW_PROBABILITY) {
        drop_by_weight(&j, c->par);
        return;
    }
    lm_par_for(c->par, blocks_of(j.tokens, j.experts), 1, count_choices, &j);
    lm_par_for(c->par, j.experts, 16, sum_counts, &j);
    lm_par_for(c->par, blocks_of(j.tokens, j.experts), 1, drop_choices, &j);
    if (j.a->policy != LM_OVERFLOW_REROUTE)
        return;
    reroute(&j);
    lm_par_for(c->par, j.tokens, grain_tokens(j.experts), weigh_rows, &j);
}

/* ---- the gradient of weights ---- */

/* Sums over the choices of a token: of s, and of d s, where d is 0 of dropped ones. */
static void choice_sums(const lm_route_attr *a, const float *z, row_stats r, const int32_t *expert,
                        const float *dw, float *sum, float *both)
{
    vf s = vf_zero(), b = vf_zero();
    for (int64_t i = 0; i < a->k; i += VF_LANES) {
        int64_t n = least(VF_LANES, a->k - i);
        vf v = scores_at(a, z, r, expert + i, n);
        float d[VF_LANES] = { 0 };
        for (int64_t q = 0; q < n; q++)
            d[q] = expert[i + q] < 0 ? 0 : dw[i + q];
        s += v;
        b = vf_fma(v, vf_load(d), b);
    }
    *sum = vf_sum(s);
    *both = vf_sum(b);
}

/* dz = p (ds - <p, ds>), where <p, ds> is 0 except for the 1e-20 if weights are normalised; of
 * sigmoids ds s (1 - s). */
static void dz_row(const lm_route_attr *a, const float *z, int64_t experts, const int32_t *expert,
                   const float *dw, float *dz)
{
    row_stats r = stats_of(a, z, experts);
    float scale = (float)a->scale, sum, both, inv = 1, mean = 0, dot;
    choice_sums(a, z, r, expert, dw, &sum, &both);
    dot = scale * both;
    if (a->normalise) {
        sum += 1e-20f;
        inv = 1 / sum;
        mean = both / sum;
        dot = scale * mean * (1e-20f / sum);
    }
    VF_FOR(i, n, experts, {
        vf p = scores(a, vf_get_any(LM_DTYPE_F32, z, i, n), r);
        /* a row that is not finite: NaN */
        p *= a->sigmoid ? vf_set(r.inv - r.inv) : vf_set(-dot);
        vf_put_any(LM_DTYPE_F32, dz, i, p, n);
    });
    for (int64_t k = 0; k < a->k; k += VF_LANES) {
        int64_t n = least(VF_LANES, a->k - k);
        float d[VF_LANES] = { 0 }, v[VF_LANES] = { 0 };
        for (int64_t q = 0; q < n; q++) {
            d[q] = expert[k + q] < 0 ? 0 : dw[k + q];
            v[q] = z[lm_route_expert(expert[k + q])];
        }
        vf s = scores(a, vf_load(v), r), ds = (vf_load(d) - vf_set(mean)) * vf_set(scale * inv);
        if (a->sigmoid)
            ds *= scores(a, -vf_load(v), r); /* 1 - s */
        else
            ds -= vf_set(dot);
        vf_store(v, s * ds);
        for (int64_t q = 0; q < n; q++)
            dz[lm_route_expert(expert[k + q])] = v[q];
    }
}

static void dz_rows(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_call *c = ctx;
    const lm_route_attr *a = c->attr;
    int64_t experts = c->in[0].dim[1];
    (void)worker;
    for (int64_t t = begin; t < end; t++)
        dz_row(a, (const float *)c->in[0].data + t * experts, experts,
               (const int32_t *)c->in[1].data + t * a->k, (const float *)c->in[2].data + t * a->k,
               (float *)c->out[0].data + t * experts);
}

static void route_choose_dz(const lm_call *c)
{
    lm_par_for(c->par, c->in[0].dim[0], grain_tokens(c->in[0].dim[1]), dz_rows, (void *)c);
}

const lm_kernel LM_TABLE_NAME(route, LM_SIMD)[] = {
    VF_KERNEL_F32("route_choose", route_choose, route_choose_work),
    VF_KERNEL_F32("route_choose_dz", route_choose_dz, NULL),
    VF_KERNEL_END,
};
