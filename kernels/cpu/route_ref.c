/* SPDX-License-Identifier: Apache-2.0 */
/* route_ref.c -- the definition of the route family (kernels/route.h). */
#include "kernels/route.h"

#include <math.h>

#include "base/rng.h"
#include "kernels/cpu/ref.h"
#include "kernels/cpu/tables.h"

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

/* ---- a token's scores ---- */

typedef struct {
    double top, sum; /* the largest logit, the sum of exp(z - top) */
    bool bad;        /* a logit is not finite */
} row_stats;

static row_stats stats_of(const lm_tensor *z, int64_t t)
{
    int64_t experts = z->dim[1];
    row_stats r = { -INFINITY, 0, false };
    for (int64_t e = 0; e < experts; e++) {
        double v = get(z, t * experts + e);
        r.bad |= !isfinite(v);
        r.top = v > r.top ? v : r.top;
    }
    for (int64_t e = 0; e < experts; e++)
        r.sum += exp(get(z, t * experts + e) - r.top);
    return r;
}

static double score(const lm_route_attr *a, const lm_tensor *z, int64_t t, int64_t e, row_stats r)
{
    double v = get(z, t * z->dim[1] + e);
    return a->sigmoid ? sigmoid(v) : exp(v - r.top) / r.sum;
}

/* What choices are ordered by. */
static void keys_of(const lm_call *c, int64_t t, row_stats r, double *key)
{
    const lm_tensor *z = &c->in[0], *bias = opt_in(c, 1);
    int64_t experts = z->dim[1];
    for (int64_t e = 0; e < experts; e++)
        key[e] = r.bad  ? 0
                 : bias ? score(c->attr, z, t, e, r) + get(bias, e)
                        : get(z, t * experts + e);
}

/* ---- choices ---- */

/* The largest number, of the lowest index; it is replaced by -Inf. */
static int64_t pick(double *v, int64_t n)
{
    int64_t best = 0;
    for (int64_t i = 1; i < n; i++)
        best = v[i] > v[best] ? i : best;
    v[best] = -INFINITY;
    return best;
}

static double group_value(const lm_call *c, int64_t t, row_stats r, const double *key, int64_t from,
                          int64_t n)
{
    const lm_route_attr *a = c->attr;
    int64_t first = from, second = -1;
    for (int64_t e = from + 1; e < from + n; e++)
        if (key[e] > key[first]) {
            second = first;
            first = e;
        } else if (second < 0 || key[e] > key[second]) {
            second = e;
        }
    if (a->group_max)
        return key[first];
    if (opt_in(c, 1))
        return key[first] + (second < 0 ? 0 : key[second]);
    return score(a, &c->in[0], t, first, r) + (second < 0 ? 0 : score(a, &c->in[0], t, second, r));
}

/* Keys of experts of the other groups become -Inf. */
static void keep_groups(const lm_call *c, int64_t t, row_stats r, double *key, double *value)
{
    const lm_route_attr *a = c->attr;
    int64_t n = c->in[0].dim[1] / a->groups;
    for (int64_t g = 0; g < a->groups; g++)
        value[g] = group_value(c, t, r, key, g * n, n);
    for (int64_t i = 0; i < a->kept_groups; i++)
        pick(value, a->groups);
    for (int64_t g = 0; g < a->groups; g++)
        for (int64_t e = g * n; e < g * n + n && value[g] > -INFINITY; e++)
            key[e] = -INFINITY;
}

/* s over an exponential variate, for experts that can still be chosen. */
static void draw_keys(const lm_call *c, int64_t t, row_stats r, double *key)
{
    const lm_route_attr *a = c->attr;
    int64_t experts = c->in[0].dim[1];
    lm_rng rng = lm_rng_make(c->step->seed, "route", (uint64_t)a->site);
    uint64_t base = lm_rng_first(&rng, (uint64_t)c->step->step * 65536 + (uint64_t)c->step->micro,
                                 (uint64_t)(c->in[0].dim[0] * experts));
    for (int64_t e = 0; e < experts; e++) {
        uint32_t draw = lm_rng_u32(rng, base + (uint64_t)(t * experts + e));
        double u = ((double)(draw >> 9) + 0.5) * 0x1p-23;
        if (key[e] > -INFINITY)
            key[e] = score(a, &c->in[0], t, e, r) / -log(u);
    }
}

/* key: room for E and for groups. */
static void choose_row(const lm_call *c, int64_t t, double *key)
{
    const lm_route_attr *a = c->attr;
    int64_t experts = c->in[0].dim[1];
    int32_t *expert = (int32_t *)c->out[1].data + t * a->k;
    row_stats r = stats_of(&c->in[0], t);
    keys_of(c, t, r, key);
    if (a->groups > 1 && !r.bad)
        keep_groups(c, t, r, key, key + experts);
    for (int64_t s = 0; s < a->k; s++) {
        if (s == 1 && a->second_random && !r.bad)
            draw_keys(c, t, r, key);
        expert[s] = a->by_expert ? (int32_t)s : (int32_t)pick(key, experts);
    }
}

static void weigh_row(const lm_call *c, int64_t t)
{
    const lm_route_attr *a = c->attr;
    const int32_t *expert = (const int32_t *)c->out[1].data + t * a->k;
    row_stats r = stats_of(&c->in[0], t);
    double sum = 1e-20;
    for (int64_t s = 0; s < a->k; s++)
        sum += score(a, &c->in[0], t, lm_route_expert(expert[s]), r);
    for (int64_t s = 0; s < a->k; s++) {
        double w = score(a, &c->in[0], t, lm_route_expert(expert[s]), r);
        w *= a->normalise ? a->scale / sum : a->scale;
        set(&c->out[0], t * a->k + s, expert[s] < 0 ? 0 : r.bad ? NAN : w);
    }
}

/* ---- capacity ---- */

static void drop(const lm_call *c, int64_t a)
{
    int32_t *expert = c->out[1].data;
    expert[a] = -1 - expert[a];
    set(&c->out[0], a, 0);
}

/* taken [E]: assignments of each expert so far. */
static void drop_by_position(const lm_call *c, int32_t *taken)
{
    const lm_route_attr *a = c->attr;
    const int32_t *expert = c->out[1].data;
    for (int64_t e = 0; e < c->in[0].dim[1]; e++)
        taken[e] = 0;
    for (int64_t s = 0; s < a->k; s++)
        for (int64_t t = 0; t < c->in[0].dim[0]; t++) {
            int32_t e = expert[t * a->k + s];
            if (taken[e] < a->capacity)
                taken[e]++;
            else
                drop(c, t * a->k + s);
        }
}

/* The best expert with room that the token has not chosen; -1: all others are full. */
static int64_t best_with_room(const lm_call *c, int64_t t, const double *key, const int32_t *taken)
{
    const lm_route_attr *a = c->attr;
    const int32_t *expert = (const int32_t *)c->out[1].data + t * a->k;
    int64_t best = -1;
    for (int64_t e = 0; e < c->in[0].dim[1]; e++) {
        bool open = taken[e] < a->capacity;
        for (int64_t s = 0; s < a->k; s++)
            open &= lm_route_expert(expert[s]) != e;
        if (open && (best < 0 || key[e] > key[best]))
            best = e;
    }
    return best;
}

static void reroute(const lm_call *c, int32_t *taken, double *key)
{
    const lm_route_attr *a = c->attr;
    int32_t *expert = c->out[1].data;
    for (int64_t s = 0; s < a->k; s++)
        for (int64_t t = 0; t < c->in[0].dim[0]; t++) {
            int64_t e;
            if (expert[t * a->k + s] >= 0)
                continue;
            keys_of(c, t, stats_of(&c->in[0], t), key);
            e = best_with_room(c, t, key, taken);
            if (e < 0)
                continue;
            expert[t * a->k + s] = (int32_t)e;
            taken[e]++;
        }
    for (int64_t t = 0; t < c->in[0].dim[0]; t++)
        weigh_row(c, t);
}

/* Weights v and w are of assignments in this order. */
static bool comes_first(double v, double w)
{
    return isnan(v) || (!isnan(w) && v >= w);
}

/* Drop all but the `capacity` largest weights of each expert. */
static void drop_by_weight(const lm_call *c)
{
    const lm_route_attr *a = c->attr;
    const int32_t *expert = c->out[1].data;
    int64_t count = c->in[0].dim[0] * a->k;
    bool *gone = c->work; /* weights are compared before any becomes 0 */
    for (int64_t i = 0; i < count; i++) {
        int64_t before = 0;
        for (int64_t j = 0; j < count && before < a->capacity; j++) {
            if (expert[j] != expert[i] || j == i)
                continue;
            double v = get(&c->out[0], j), w = get(&c->out[0], i);
            before += j < i ? comes_first(v, w) : !comes_first(w, v);
        }
        gone[i] = before >= a->capacity;
    }
    for (int64_t i = 0; i < count; i++)
        if (gone[i])
            drop(c, i);
}

static void route_choose(const lm_call *c)
{
    const lm_route_attr *a = c->attr;
    double *key = c->work;
    int32_t *taken = (int32_t *)(key + 2 * c->in[0].dim[1]);
    for (int64_t t = 0; t < c->in[0].dim[0]; t++) {
        choose_row(c, t, key);
        weigh_row(c, t);
    }
    if (a->capacity < 1)
        return;
    if (a->by_expert || a->policy == LM_OVERFLOW_PROBABILITY) {
        drop_by_weight(c);
        return;
    }
    drop_by_position(c, taken);
    if (a->policy == LM_OVERFLOW_REROUTE)
        reroute(c, taken, key);
}

static size_t route_choose_work(const lm_call *c, int threads)
{
    const lm_route_attr *a = c->attr;
    size_t rows = (size_t)c->in[0].dim[1] * (2 * sizeof(double) + sizeof(int32_t));
    size_t flags = (size_t)(c->in[0].dim[0] * a->k) * sizeof(bool);
    (void)threads;
    return rows > flags ? rows : flags;
}

static void route_choose_dz(const lm_call *c)
{
    const lm_route_attr *a = c->attr;
    const lm_tensor *z = &c->in[0], *dw = &c->in[2];
    const int32_t *expert = c->in[1].data;
    int64_t experts = z->dim[1];
    double *ds = c->work; /* of each expert's score */
    for (int64_t t = 0; t < z->dim[0]; t++) {
        row_stats r = stats_of(z, t);
        double sum = 1e-20, both = 0, dot = 0;
        for (int64_t e = 0; e < experts; e++)
            ds[e] = 0;
        for (int64_t i = t * a->k; i < t * a->k + a->k; i++) {
            double s = score(a, z, t, lm_route_expert(expert[i]), r);
            sum += s;
            both += expert[i] < 0 ? 0 : get(dw, i) * s;
        }
        for (int64_t i = t * a->k; i < t * a->k + a->k; i++) {
            double d = expert[i] < 0 ? 0 : get(dw, i);
            ds[lm_route_expert(expert[i])] +=
                a->scale * (a->normalise ? (d - both / sum) / sum : d);
        }
        for (int64_t e = 0; e < experts; e++)
            dot += ds[e] * score(a, z, t, e, r);
        for (int64_t e = 0; e < experts; e++) {
            double s = score(a, z, t, e, r), d = ds[e];
            set(&c->out[0], t * experts + e,
                r.bad        ? NAN
                : a->sigmoid ? d * s * (1 - s)
                             : s * (d - dot));
        }
    }
}

static size_t two_rows(const lm_call *c, int threads)
{
    (void)threads;
    return (size_t)c->in[0].dim[1] * 2 * sizeof(double);
}

/* ---- plan ---- */

static void route_plan(const lm_call *c)
{
    const lm_route_plan_attr *a = c->attr;
    const int32_t *expert = c->in[0].data;
    int32_t *offsets = c->out[0].data, *from = c->out[1].data, *place = c->out[2].data;
    int64_t count = lm_tensor_count(&c->in[0]);
    int32_t row = 0;
    for (int64_t r = 0; r < c->out[1].dim[0]; r++)
        from[r] = -1;
    for (int64_t i = 0; i < count; i++)
        place[i] = -1;
    for (int64_t e = 0; e < a->experts; e++) {
        row = a->pad ? (int32_t)(e * a->pad) : row;
        offsets[e] = row;
        for (int64_t i = 0; i < count; i++) {
            if (expert[i] != e || (a->pad && row == offsets[e] + a->pad))
                continue;
            from[row] = (int32_t)i;
            place[i] = row++;
        }
    }
    offsets[a->experts] = a->pad ? (int32_t)(a->experts * a->pad) : row;
}

/* ---- rows and sums ---- */

static double weight_of(const lm_call *c, int64_t a)
{
    return opt_in(c, 3) ? get(&c->in[3], a) : 1;
}

static void route_rows(const lm_call *c)
{
    const int32_t *from = c->in[1].data;
    int64_t k = c->in[2].dim[1], cols = c->in[0].dim[1];
    for (int64_t r = 0; r < c->out[0].dim[0]; r++)
        for (int64_t j = 0; j < cols; j++) {
            int64_t a = from[r];
            set(&c->out[0], r * cols + j,
                a < 0 ? 0 : weight_of(c, a) * get(&c->in[0], a / k * cols + j));
        }
}

static void route_sum(const lm_call *c)
{
    const int32_t *place = c->in[2].data;
    int64_t k = c->in[2].dim[1], cols = c->in[0].dim[1];
    for (int64_t t = 0; t < c->out[0].dim[0]; t++)
        for (int64_t j = 0; j < cols; j++) {
            double sum = 0;
            for (int64_t a = t * k; a < t * k + k; a++)
                if (place[a] >= 0)
                    sum += weight_of(c, a) * get(&c->in[0], place[a] * cols + j);
            set(&c->out[0], t * cols + j, sum);
        }
}

static void route_dot(const lm_call *c)
{
    const int32_t *place = c->in[3].data;
    int64_t k = c->in[3].dim[1], cols = c->in[0].dim[1];
    for (int64_t a = 0; a < lm_tensor_count(&c->in[3]); a++) {
        double sum = 0;
        for (int64_t j = 0; place[a] >= 0 && j < cols; j++)
            sum += get(&c->in[0], a / k * cols + j) * get(&c->in[1], place[a] * cols + j);
        set(&c->out[0], a, sum);
    }
}

/* ---- losses ---- */

/* p [E] of a token, and the sum of its sigmoids. */
static double shares_of(const lm_call *c, int64_t t, row_stats r, double *p)
{
    const lm_route_aux_attr *a = c->attr;
    const lm_tensor *z = &c->in[0];
    double total = 0;
    for (int64_t e = 0; e < z->dim[1]; e++) {
        double v = get(z, t * z->dim[1] + e);
        total += sigmoid(v);
        p[e] = r.bad ? (isfinite(v) ? 0 : NAN) : a->sigmoid ? sigmoid(v) : exp(v - r.top) / r.sum;
    }
    for (int64_t e = 0; a->sigmoid && !r.bad && e < z->dim[1]; e++)
        p[e] /= total;
    return total;
}

/* n_e of tokens [first, first + n). */
static double load_of(const lm_call *c, int64_t first, int64_t n, int64_t e)
{
    const lm_tensor *expert = &c->in[1];
    const int32_t *id = expert->data;
    int64_t k = expert->dim[1], load = 0;
    for (int64_t i = first * k; i < (first + n) * k; i++)
        load += lm_route_counted(c->attr, id[i]) == e;
    return (double)load;
}

static double dropped_of(const lm_call *c)
{
    const lm_tensor *expert = &c->in[1];
    const int32_t *id = expert->data;
    int64_t n = 0;
    for (int64_t i = 0; i < expert->dim[0] * expert->dim[1]; i++)
        n += id[i] < 0;
    return ((const lm_route_aux_attr *)c->attr)->by_expert ? 0 : (double)n;
}

/* The balance of tokens [first, first + n) with their loads or those of `count`; sum [E]: of their p. */
static double balance_of(const lm_call *c, int64_t first, int64_t n, const lm_tensor *count,
                         double *sum)
{
    int64_t experts = c->in[0].dim[1];
    double *p = sum + experts, all = 0, tokens = (double)n;
    for (int64_t e = 0; e < experts; e++)
        sum[e] = 0;
    for (int64_t t = first; t < first + n; t++) {
        shares_of(c, t, stats_of(&c->in[0], t), p);
        for (int64_t e = 0; e < experts; e++)
            sum[e] += p[e];
    }
    for (int64_t e = 0; e < experts; e++)
        all += (count ? get(count, e) : load_of(c, first, n, e)) * sum[e];
    return (double)experts / ((double)c->in[1].dim[1] * tokens * tokens) * all;
}

/* The share of node n among the p of a token. */
static double node_share(const lm_call *c, const double *p, int64_t n)
{
    const int64_t each = c->in[0].dim[1] / ((const lm_route_aux_attr *)c->attr)->nodes;
    double q = 0;
    for (int64_t e = n * each; e < (n + 1) * each; e++)
        q += p[e];
    return q;
}

/* The mean over tokens of 1 - the sum of squares of shares. */
static double spread_of(const lm_call *c, double *p)
{
    const lm_route_aux_attr *a = c->attr;
    const int64_t tokens = c->in[0].dim[0];
    double sum = 0;
    for (int64_t t = 0; t < tokens; t++) {
        shares_of(c, t, stats_of(&c->in[0], t), p);
        sum += 1;
        for (int64_t n = 0; n < a->nodes; n++)
            sum -= pow(node_share(c, p, n), 2);
    }
    return sum / (double)tokens;
}

static void route_aux(const lm_call *c)
{
    const lm_route_aux_attr *a = c->attr;
    int64_t tokens = c->in[0].dim[0], seq = a->seq ? a->seq : tokens;
    double *sum = c->work, z = 0;
    double loss = a->balance * balance_of(c, 0, tokens, opt_in(c, 2), sum);
    for (int64_t e = 0; e < c->in[0].dim[1]; e++) {
        if (opt_out(c, 1))
            set(&c->out[1], e, sum[e] / (double)tokens);
        if (opt_out(c, 2))
            set(&c->out[2], e, load_of(c, 0, tokens, e));
    }
    if (opt_out(c, 3))
        set(&c->out[3], 0, dropped_of(c));
    for (int64_t t = 0; t < tokens; t += seq)
        loss += a->sequence * balance_of(c, t, seq, NULL, sum) * (double)seq / (double)tokens;
    for (int64_t t = 0; t < tokens; t++) {
        row_stats r = stats_of(&c->in[0], t);
        z += r.bad ? NAN : pow(r.top + log(r.sum), 2);
    }
    if (a->affinity > 0)
        loss += a->affinity * spread_of(c, sum);
    set(&c->out[0], 0, loss + a->z * z / (double)tokens);
}

/* The gradient of p_te by the share of its node. */
static double dp_of_spread(const lm_call *c, const double *p, int64_t e, double dloss)
{
    const lm_route_aux_attr *a = c->attr;
    if (!(a->affinity > 0))
        return 0;
    const int64_t node = e / (c->in[0].dim[1] / a->nodes);
    return -2 * a->affinity * dloss / (double)c->in[0].dim[0] * node_share(c, p, node);
}

static void route_aux_dz(const lm_call *c)
{
    const lm_route_aux_attr *a = c->attr;
    const lm_tensor *z = &c->in[0], *ids = &c->in[1], *count = opt_in(c, 3);
    int64_t tokens = z->dim[0], experts = z->dim[1], seq = a->seq ? a->seq : tokens;
    double dloss = get(&c->in[2], 0), *dp = c->work, *p = dp + experts;
    double each = (double)experts / (double)(ids->dim[1] * tokens) * dloss;
    for (int64_t t = 0; t < tokens; t++) {
        row_stats r = stats_of(z, t);
        double dot = 0, total = shares_of(c, t, r, p), lse = r.top + log(r.sum);
        for (int64_t e = 0; e < experts && t % seq == 0; e++) /* the same for a whole sequence */
        {
            double all = count ? get(count, e) : load_of(c, 0, tokens, e);
            dp[e] = each * (a->balance * all / (double)tokens +
                            a->sequence * load_of(c, t, seq, e) / (double)seq);
        }
        for (int64_t e = 0; e < experts; e++)
            dot += (dp[e] + dp_of_spread(c, p, e, dloss)) * p[e];
        for (int64_t e = 0; e < experts; e++) {
            double v = get(z, t * experts + e), s = sigmoid(v);
            double d = dp[e] + dp_of_spread(c, p, e, dloss) - dot;
            d *= a->sigmoid ? s * (1 - s) / total : p[e];
            set(&c->out[0], t * experts + e,
                d + dloss * a->z * 2 * lse * exp(v - lse) / (double)tokens);
        }
    }
}

const lm_kernel lm_route_ref_kernels[] = {
    { "route_choose", LM_DTYPE_NONE, LM_CPU_REF, route_choose, route_choose_work },
    { "route_choose_dz", LM_DTYPE_NONE, LM_CPU_REF, route_choose_dz, two_rows },
    { "route_plan", LM_DTYPE_NONE, LM_CPU_REF, route_plan, NULL },
    { "route_rows", LM_DTYPE_NONE, LM_CPU_REF, route_rows, NULL },
    { "route_sum", LM_DTYPE_NONE, LM_CPU_REF, route_sum, NULL },
    { "route_dot", LM_DTYPE_NONE, LM_CPU_REF, route_dot, NULL },
    { "route_aux", LM_DTYPE_NONE, LM_CPU_REF, route_aux, two_rows },
    { "route_aux_dz", LM_DTYPE_NONE, LM_CPU_REF, route_aux_dz, two_rows },
    { NULL, LM_DTYPE_NONE, LM_CPU_REF, NULL, NULL },
};
