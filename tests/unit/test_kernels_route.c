/* SPDX-License-Identifier: Apache-2.0 */
/* Routing to experts: gates, capacities and losses against definitions written here, on every level
 * of the CPU.
 *
 * Definitions sort whole rows; kernels pick. Gradients by finite differences: test_op_registry. */
#include "kernel_case.h"

#include "kernels/route.h"

enum { MOST_E = 96, MOST_T = 10000 };

/* ---- a gate's result on each level ---- */

typedef struct {
    int64_t T, E;
    double *z, *bias; /* bias NULL: none */
    lm_route_attr a;
    double *weight;  /* [T,K], wanted */
    int32_t *expert; /* [T,K], wanted */
} gate;

static double *doubles(int64_t n)
{
    return take((size_t)n * sizeof(double));
}

/* Numbers that F32 holds, so that ties are ties in double. */
static void open_gate(gate *g, int64_t T, int64_t E, lm_route_attr a, uint64_t seed)
{
    *g = (gate){ .T = T, .E = E, .a = a };
    g->z = doubles(T * E);
    for (int64_t i = 0; i < T * E; i++)
        g->z[i] = (float)(1.5 * bell(lm_philox((uint64_t)i, 1, seed)));
    g->weight = doubles(T * a.k);
    g->expert = take((size_t)(T * a.k) * sizeof *g->expert);
}

static void add_bias(gate *g, double size)
{
    g->bias = doubles(g->E);
    for (int64_t e = 0; e < g->E; e++)
        g->bias[e] = (float)(size * bell(lm_philox((uint64_t)e, 2, 3)));
}

static void close_gate(gate *g)
{
    lm_free(g->z);
    lm_free(g->bias);
    lm_free(g->weight);
    lm_free(g->expert);
}

static kernel_case case_of(const gate *g)
{
    kernel_case k = { .op = "route_choose",
                      .attr = &g->a,
                      .in = { given(mat(F32, g->T, g->E), g->z) },
                      .out = { mat(F32, g->T, g->a.k), mat(I32, g->T, g->a.k) },
                      .step = { .seed = 7, .step = 3, .micro = 2 } };
    if (g->bias)
        k.in[1] = given(vec(F32, g->E), g->bias);
    return k;
}

/* Each level and number of threads gives the wanted experts, and the weights but for rounding. */
static void check_gate(const gate *g, const char *what)
{
    kernel_case k = case_of(g);
    for (int level = -1; level <= (int)lm_cpu_detect(); level++) /* -1: the reference in double */
        for (int threads = 1; threads <= (level > 0 ? 3 : 1); threads++) {
            lm_dtype act = level < 0 ? LM_DTYPE_F64 : LM_DTYPE_F32;
            const lm_kernel *kernel =
                lm_cpu_kernel(k.op, act, level < 0 ? LM_CPU_REF : (lm_cpu_level)level);
            instance x;
            if (level > 0 && kernel->level != level)
                continue;
            build(&k, act, act, &x);
            run(&x, kernel, pool_of(threads));
            for (int64_t i = 0; i < g->T * g->a.k; i++) {
                double w = lm_get(act, x.out[0].data, i), want = g->weight[i];
                int32_t e = ((int32_t *)x.out[1].data)[i];
                if (e != g->expert[i] ||
                    !(isnan(want) ? isnan(w) : fabs(w - want) <= 3e-6 * fabs(want)))
                    fail_msg("%s, level %d, token %lld, choice %lld: %d of %.9g, not %d of %.9g",
                             what, level, (long long)(i / g->a.k), (long long)(i % g->a.k), e, w,
                             g->expert[i], want);
            }
            drop(&k, &x);
        }
}

/* ---- definitions ---- */

static void scores_of(const gate *g, int64_t t, double *s)
{
    const double *z = g->z + t * g->E;
    double sum = 0;
    for (int64_t e = 0; e < g->E; e++)
        sum += exp(z[e]);
    for (int64_t e = 0; e < g->E; e++)
        s[e] = g->a.sigmoid ? 1 / (1 + exp(-z[e])) : exp(z[e]) / sum;
}

/* Indices 0 to n-1 by descending keys, equal ones in order: by insertion. */
static void sort_by(const double *key, int64_t n, int32_t *order)
{
    for (int64_t i = 0; i < n; i++) {
        int64_t at = i;
        for (; at > 0 && key[order[at - 1]] < key[i]; at--)
            order[at] = order[at - 1];
        order[at] = (int32_t)i;
    }
}

/* Set keys to -1e30 outside the best groups. */
static void best_groups(const gate *g, const double *s, double *key)
{
    double value[MOST_E], member[MOST_E];
    int32_t order[MOST_E], inside[MOST_E];
    int64_t n = g->E / g->a.groups;
    for (int64_t j = 0; j < g->a.groups; j++) {
        for (int64_t i = 0; i < n; i++)
            member[i] = s[j * n + i] + (g->bias ? g->bias[j * n + i] : 0);
        sort_by(member, n, inside);
        value[j] = member[inside[0]];
        if (!g->a.group_max && n > 1)
            value[j] += member[inside[1]];
    }
    sort_by(value, g->a.groups, order);
    for (int64_t j = g->a.kept_groups; j < g->a.groups; j++)
        for (int64_t i = 0; i < n; i++)
            key[order[j] * n + i] = -1e30;
}

/* Weights of the choices of g->expert, dropped or not. */
static void weigh(gate *g)
{
    double s[MOST_E];
    for (int64_t t = 0; t < g->T; t++) {
        double sum = 0;
        scores_of(g, t, s);
        for (int64_t i = t * g->a.k; i < (t + 1) * g->a.k; i++)
            sum += s[lm_route_expert(g->expert[i])];
        for (int64_t i = t * g->a.k; i < (t + 1) * g->a.k; i++) {
            double w = g->a.scale * s[lm_route_expert(g->expert[i])];
            g->weight[i] = g->expert[i] < 0 ? 0 : g->a.normalise ? w / sum : w;
        }
    }
}

static void define_gate(gate *g)
{
    double s[MOST_E], key[MOST_E];
    int32_t order[MOST_E];
    for (int64_t t = 0; t < g->T; t++) {
        scores_of(g, t, s);
        for (int64_t e = 0; e < g->E; e++)
            key[e] = g->bias ? s[e] + g->bias[e] : g->z[t * g->E + e];
        if (g->a.groups > 1)
            best_groups(g, s, key);
        sort_by(key, g->E, order);
        memcpy(g->expert + t * g->a.k, order, (size_t)g->a.k * sizeof *order);
    }
    weigh(g);
}

static void test_gates(void **state)
{
    static const struct {
        const char *name;
        int64_t T, E;
        double bias;
        lm_route_attr a;
    } gates[] = {
        { "Switch", 300, 8, 0, { .k = 1, .scale = 1 } },
        { "Mixtral", 300, 8, 0, { .k = 2, .scale = 1, .normalise = true } },
        { "Qwen", 300, 96, 0, { .k = 8, .scale = 1, .normalise = true } },
        { "plain top 8", 300, 60, 0, { .k = 8, .scale = 1.5 } },
        { "DeepSeek-V2",
          300,
          80,
          0,
          { .k = 6, .scale = 16, .groups = 8, .kept_groups = 3, .group_max = true } },
        { "DeepSeek-V3",
          300,
          64,
          0.2,
          { .k = 8,
            .scale = 2.5,
            .sigmoid = true,
            .normalise = true,
            .groups = 8,
            .kept_groups = 4 } },
        { "groups without a bias",
          300,
          24,
          0,
          { .k = 3, .scale = 1, .groups = 6, .kept_groups = 1 } },
        { "groups of one", 200, 12, 0, { .k = 3, .scale = 1, .groups = 12, .kept_groups = 3 } },
        { "softmax with a bias", 300, 31, 0.05, { .k = 4, .scale = 1 } },
        { "sigmoid without a bias", 300, 33, 0, { .k = 4, .scale = 1, .sigmoid = true } },
        { "all experts", 200, 17, 0, { .k = 17, .scale = 1 } },
        { "all experts, normalised",
          200,
          16,
          0.3,
          { .k = 16, .scale = 1, .sigmoid = true, .normalise = true } },
        { "one expert", 50, 1, 0, { .k = 1, .scale = 1, .normalise = true } },
    };
    (void)state;
    for (size_t i = 0; i < sizeof gates / sizeof *gates; i++) {
        gate g;
        open_gate(&g, gates[i].T, gates[i].E, gates[i].a, 40 + i);
        if (gates[i].bias > 0)
            add_bias(&g, gates[i].bias);
        define_gate(&g);
        check_gate(&g, gates[i].name);
        close_gate(&g);
    }
}

/* Logits of few values: nearly all of them are equal to others. */
static void test_ties(void **state)
{
    (void)state;
    for (int form = 0; form < 4; form++) {
        gate g;
        lm_route_attr a = { .k = 5, .scale = 1, .sigmoid = form % 2 };
        if (form > 1) {
            a.groups = 8;
            a.kept_groups = 2;
            a.group_max = form > 2;
        }
        open_gate(&g, 200, 40, a, 3);
        for (int64_t i = 0; i < g.T * g.E; i++)
            g.z[i] = (int)(g.z[i] * 0.6);
        define_gate(&g);
        check_gate(&g, "ties");
        close_gate(&g);
    }
}

/* Such rows have the first experts without weights, and other rows are as before. */
static void test_not_finite(void **state)
{
    static const double bad[] = { NAN, INFINITY, -INFINITY };
    (void)state;
    for (int biased = 0; biased < 2; biased++) {
        gate g;
        lm_route_attr a = { .k = 3, .scale = 1, .normalise = true, .groups = 4, .kept_groups = 2 };
        open_gate(&g, 40, 36, a, 5);
        if (biased)
            add_bias(&g, 0.1);
        define_gate(&g);
        for (int64_t t = 1; t < g.T; t += 4) {
            g.z[t * g.E + t % g.E] = bad[t / 4 % 3];
            for (int64_t s = 0; s < a.k; s++) {
                g.weight[t * a.k + s] = NAN;
                g.expert[t * a.k + s] = (int32_t)s;
            }
        }
        check_gate(&g, "rows that are not finite");
        close_gate(&g);
    }
}

/* The second choice follows the scores: each is drawn about as often as is probable. */
static void test_random_second(void **state)
{
    enum { T = 10000, E = 5 };
    static const double z[E] = { 2, 0.5, 1, -1, -0.5 };
    double s[E], left = 0, most = 0;
    int64_t drawn[E] = { 0 };
    gate g;
    instance x;
    (void)state;
    open_gate(&g, T, E, (lm_route_attr){ .k = 2, .scale = 1, .second_random = true, .site = 4 }, 1);
    for (int64_t i = 0; i < T * E; i++)
        g.z[i] = z[i % E];
    kernel_case k = case_of(&g);
    build(&k, LM_DTYPE_F64, LM_DTYPE_F64, &x);
    run(&x, lm_cpu_kernel(k.op, LM_DTYPE_F64, LM_CPU_REF), NULL);
    memcpy(g.expert, x.out[1].data, (size_t)(T * 2) * sizeof *g.expert);
    drop(&k, &x);
    for (int64_t t = 0; t < T; t++) {
        assert_int_equal(g.expert[2 * t], 0);
        drawn[g.expert[2 * t + 1]]++;
    }
    scores_of(&g, 0, s);
    for (int e = 1; e < E; e++)
        left += s[e];
    assert_int_equal(drawn[0], 0);
    for (int e = 1; e < E; e++) { /* four standard deviations */
        double p = s[e] / left, off = fabs((double)drawn[e] - T * p) / sqrt(T * p * (1 - p));
        most = off > most ? off : most;
    }
    if (most > 4)
        fail_msg("draws are %.1f standard deviations from their probabilities", most);
    weigh(&g);
    check_gate(&g, "a random second choice"); /* the levels draw what the reference draws */
    close_gate(&g);
}

/* Of 10,000 random tokens each expert has its share, and equal logits go to the first experts
 * alone. */
static void test_statistics(void **state)
{
    enum { T = 10000, E = 16, K = 4 };
    int64_t load[E] = { 0 };
    gate g;
    (void)state;
    open_gate(&g, T, E, (lm_route_attr){ .k = K, .scale = 1, .normalise = true }, 8);
    define_gate(&g);
    check_gate(&g, "10,000 tokens");
    for (int64_t i = 0; i < T * K; i++)
        load[g.expert[i]]++;
    for (int e = 0; e < E; e++) /* five standard deviations */
        assert_true(llabs(load[e] - T * K / E) < 5 * sqrt(T * 0.25 * 0.75));
    for (int64_t i = 0; i < T * E; i++)
        g.z[i] = -0.25;
    for (int64_t i = 0; i < T * K; i++) {
        g.expert[i] = (int32_t)(i % K);
        g.weight[i] = 1.0 / K;
    }
    check_gate(&g, "equal logits");
    close_gate(&g);
}

/* ---- capacity ---- */

/* Six tokens, three experts, two choices each, and room for three assignments of an expert. */
static const double six[6 * 3] = {
    3, 2, 0, /* 0 1 */
    4, 0, 1, /* 0 2 */
    3, 2, 0, /* 0 1, as token 0 */
    9, 4, 0, /* 0 1 */
    0, 3, 1, /* 1 2 */
    1, 6, 0, /* 1 0 */
};

static void check_six(lm_overflow policy, const int32_t *expert)
{
    gate g;
    lm_route_attr a = { .k = 2, .scale = 1, .normalise = true, .capacity = 3, .policy = policy };
    open_gate(&g, 6, 3, a, 1);
    memcpy(g.z, six, sizeof six);
    memcpy(g.expert, expert, 12 * sizeof *expert);
    weigh(&g);
    check_gate(&g, "six tokens");
    close_gate(&g);
}

/* First choices: expert 0 of tokens 0 1 2 (3 finds it full), expert 1 of 4 5.  Second choices: 1 of
 * token 0, which is then full, 2 of 1; 1 of 2 and of 3 too many; 2 of 4; 0 of 5 too many. */
static void test_by_position(void **state)
{
    static const int32_t expert[12] = { 0, 1, 0, 2, 0, -2, -1, -2, 1, 2, 1, -1 };
    (void)state;
    check_six(LM_OVERFLOW_POSITION, expert);
}

/* Expert 0 has the weights 0.731 0.953 0.731 0.993 0.007 of tokens 0 1 2 3 5, expert 1 0.269 0.269
 * 0.007 0.881 0.993 of tokens 0 2 3 4 5: of tokens 0 and 2, which are equal, the first stays. */
static void test_by_probability(void **state)
{
    static const int32_t expert[12] = { 0, 1, 0, 2, -1, -2, 0, -2, 1, 2, 1, -1 };
    (void)state;
    check_six(LM_OVERFLOW_PROBABILITY, expert);
}

/* As by position.  Then the first choice of token 3 goes to expert 2, the only one with room, which
 * is full after that: the second choices of tokens 2, 3 and 5 remain dropped. */
static void test_reroute(void **state)
{
    static const int32_t expert[12] = { 0, 1, 0, 2, 0, -2, 2, -2, 1, 2, 1, -1 };
    (void)state;
    check_six(LM_OVERFLOW_REROUTE, expert);
}

/* What each policy leaves of choices that are all made, by loops over single assignments. */
static void define_capacity(gate *g)
{
    int64_t K = g->a.k, count = g->T * K;
    int32_t taken[MOST_E] = { 0 }, *order = take((size_t)count * sizeof *order);
    double *key = doubles(count);
    for (int64_t e = 0; e < g->E && g->a.policy == LM_OVERFLOW_PROBABILITY; e++) {
        for (int64_t i = 0; i < count; i++)
            key[i] = g->expert[i] == e ? g->weight[i] : -1;
        sort_by(key, count, order);
        for (int64_t i = g->a.capacity; i < count && key[order[i]] >= 0; i++)
            g->expert[order[i]] = (int32_t)(-1 - e);
    }
    for (int64_t i = 0; i < count && g->a.policy != LM_OVERFLOW_PROBABILITY; i++) {
        int32_t *e = &g->expert[i % g->T * K + i / g->T];
        *e = taken[*e]++ < g->a.capacity ? *e : -1 - *e;
    }
    for (int64_t i = 0; i < count && g->a.policy == LM_OVERFLOW_REROUTE; i++) {
        int64_t t = i % g->T, best = -1;
        int32_t *own = g->expert + t * K;
        for (int64_t e = 0; e < g->E && own[i / g->T] < 0; e++) {
            bool open = taken[e] < g->a.capacity;
            for (int64_t s = 0; s < K; s++)
                open &= own[s] != e && own[s] != -1 - e;
            if (open && (best < 0 || g->z[t * g->E + e] > g->z[t * g->E + best]))
                best = e;
        }
        if (best >= 0) {
            own[i / g->T] = (int32_t)best;
            taken[best]++;
        }
    }
    lm_free(order);
    lm_free(key);
    weigh(g);
}

static void test_capacities(void **state)
{
    (void)state;
    for (int policy = 0; policy < 3; policy++)
        for (int form = 0; form < 4; form++) {
            int64_t T = form == 3 ? 1900 : 300, E = form == 3 ? 4 : 24;
            gate g;
            lm_route_attr a = { .k = form == 0 ? 1 : 3, .scale = 1, .policy = (lm_overflow)policy };
            a.normalise = form == 2;
            a.capacity = form == 1 ? 1 : T * a.k / E;
            open_gate(&g, T, E, a, 70 + (uint64_t)form);
            for (int64_t i = 0; i < T * E; i += E) /* a favourite, whose room is too small */
                g.z[i] += 1;
            define_gate(&g);
            define_capacity(&g);
            check_gate(&g, "a capacity");
            close_gate(&g);
        }
}

/* Each expert has its best tokens, each token any number of experts. */
static void test_expert_choice(void **state)
{
    (void)state;
    for (int form = 0; form < 3; form++) {
        int64_t T = form ? 300 : 7, E = form ? 21 : 3;
        gate g;
        double s[MOST_E], *key = doubles(T);
        int32_t *order = take((size_t)T * sizeof *order);
        lm_route_attr a = { .k = E, .scale = 1.5, .sigmoid = form == 2, .by_expert = true };
        a.capacity = form ? 2 * T / E : T + 1;
        open_gate(&g, T, E, a, 90 + (uint64_t)form);
        for (int64_t t = 5; t < T; t += 5) /* some tokens are equal, so that ties occur */
            memcpy(g.z + t * E, g.z, (size_t)E * sizeof *g.z);
        for (int64_t e = 0; e < E; e++) {
            for (int64_t t = 0; t < T; t++) {
                scores_of(&g, t, s);
                key[t] = s[e];
            }
            sort_by(key, T, order);
            for (int64_t i = 0; i < T; i++)
                g.expert[order[i] * E + e] = (int32_t)(i < a.capacity ? e : -1 - e);
        }
        weigh(&g);
        check_gate(&g, "experts that choose");
        lm_free(key);
        lm_free(order);
        close_gate(&g);
    }
}

/* ---- the order of rows ---- */

typedef struct {
    int64_t T, K, E, R;
    double *expert; /* [T,K], as operands are given */
    double *offsets, *from, *place;
} plan;

static void open_plan(plan *p, int64_t T, int64_t K, int64_t E, int64_t pad)
{
    *p = (plan){ .T = T, .K = K, .E = E, .R = pad ? E * pad : T * K };
    p->expert = doubles(T * K);
    p->offsets = doubles(E + 1);
    p->from = doubles(p->R);
    p->place = doubles(T * K);
}

static void close_plan(plan *p)
{
    lm_free(p->expert);
    lm_free(p->offsets);
    lm_free(p->from);
    lm_free(p->place);
}

static void define_plan(plan *p, int64_t pad)
{
    int64_t row = 0, used = 0;
    for (int64_t r = 0; r < p->R; r++)
        p->from[r] = -1;
    for (int64_t e = 0; e < p->E; e++) {
        p->offsets[e] = (double)row;
        used = row;
        for (int64_t a = 0; a < p->T * p->K; a++) {
            if (p->expert[a] != (double)e)
                continue;
            bool fits = !pad || used < (e + 1) * pad;
            p->place[a] = fits ? (double)used : -1;
            if (fits)
                p->from[used++] = (double)a;
        }
        row = pad ? row + pad : used;
    }
    p->offsets[p->E] = (double)row;
    for (int64_t a = 0; a < p->T * p->K; a++)
        p->place[a] = p->expert[a] < 0 ? -1 : p->place[a];
}

static int32_t *ids_of(const double *v, int64_t n)
{
    int32_t *id = take((size_t)n * sizeof *id);
    for (int64_t i = 0; i < n; i++)
        id[i] = (int32_t)v[i];
    return id;
}

static void check_plan(plan *p, int64_t pad)
{
    lm_route_plan_attr a = { p->E, pad };
    int32_t *expert = ids_of(p->expert, p->T * p->K);
    const double *want[3] = { p->offsets, p->from, p->place };
    define_plan(p, pad);
    kernel_case k = { .op = "route_plan",
                      .attr = &a,
                      .in = { given(mat(I32, p->T, p->K), expert) },
                      .out = { vec(I32, p->E + 1), vec(I32, p->R), mat(I32, p->T, p->K) } };
    check_case(&k);
    for (int level = 0; level <= (int)lm_cpu_detect(); level++) {
        instance x;
        build(&k, LM_DTYPE_F32, LM_DTYPE_F32, &x);
        run(&x, lm_cpu_kernel(k.op, LM_DTYPE_F32, (lm_cpu_level)level), pool_of(2));
        for (int o = 0; o < 3; o++)
            for (int64_t i = 0; i < lm_tensor_count(&x.out[o]); i++)
                if (((int32_t *)x.out[o].data)[i] != (int32_t)want[o][i])
                    fail_msg("plan, level %d, result %d: number %lld is %d, not %g", level, o,
                             (long long)i, ((int32_t *)x.out[o].data)[i], want[o][i]);
        drop(&k, &x);
    }
    lm_free(expert);
}

/* kind 0: random experts; 1: those of odd numbers have none; 2: all are dropped; 3: all to the
 * last. */
static void fill_plan(plan *p, int kind)
{
    for (int64_t a = 0; a < p->T * p->K; a++) {
        lm_u32x4 x = lm_philox((uint64_t)a, 4, 5);
        int64_t e = x.v[0] % (uint32_t)p->E;
        e = kind == 1 ? e / 2 * 2 : kind == 3 ? p->E - 1 : e;
        p->expert[a] = (double)(kind == 2 || x.v[1] % 5 == 0 ? -1 - e : e);
    }
}

static void test_plans(void **state)
{
    static const int64_t sizes[][3] = { { 1, 1, 1 }, { 300, 2, 8 }, { 7, 5, 70 }, { 5000, 8, 33 } };
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int kind = 0; kind < 4; kind++)
            for (int padded = 0; padded < 2; padded++) {
                plan p;
                int64_t T = sizes[i][0], K = sizes[i][1], E = sizes[i][2];
                int64_t pad = padded ? 1 + T * K / E : 0;
                open_plan(&p, T, K, E, pad);
                fill_plan(&p, kind);
                check_plan(&p, pad);
                close_plan(&p);
            }
}

/* ---- rows, sums, products ---- */

static void check_moves(plan *p, int64_t C, bool weighted)
{
    int32_t *from = ids_of(p->from, p->R), *place = ids_of(p->place, p->T * p->K);
    operand o_from = given(vec(I32, p->R), from), o_place = given(mat(I32, p->T, p->K), place);
    operand weight = weighted ? mat(F32, p->T, p->K) : vec(ABSENT, 0);
    kernel_case rows = { .op = "route_rows",
                         .in = { mat(ACT, p->T, C), o_from, o_place, weight },
                         .out = { mat(ACT, p->R, C) },
                         .tol_f32 = weighted ? 1e-6 : 0,
                         .tol_bf16 = weighted ? 4e-3 : 0 };
    kernel_case sum = { .op = "route_sum",
                        .in = { mat(ACT, p->R, C), o_from, o_place, weight },
                        .out = { mat(ACT, p->T, C) },
                        .tol_f32 = 2e-6,
                        .tol_bf16 = 4e-3 };
    kernel_case dot = { .op = "route_dot",
                        .in = { mat(ACT, p->T, C), mat(ACT, p->R, C), o_from, o_place },
                        .out = { mat(F32, p->T, p->K) },
                        .tol_f32 = 2e-6,
                        .tol_bf16 = 2e-6 };
    check_case(&rows);
    check_case(&sum);
    check_case(&dot);
    lm_free(from);
    lm_free(place);
}

/* More rows of a token than a kernel sums at once, too. */
static void test_moves(void **state)
{
    static const int64_t sizes[][4] = {
        { 1, 1, 1, 1 }, { 65, 2, 8, 33 }, { 7, 5, 70, 127 }, { 9, 150, 151, 48 }, { 700, 4, 6, 512 }
    };
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int kind = 0; kind < 3; kind++) {
            plan p;
            open_plan(&p, sizes[i][0], sizes[i][1], sizes[i][2], 0);
            fill_plan(&p, kind);
            define_plan(&p, 0);
            check_moves(&p, sizes[i][3], kind != 1);
            close_plan(&p);
        }
}

/* The definitions themselves: x to rows and summed again is x times the number of its rows. */
static void test_there_and_back(void **state)
{
    enum { T = 40, K = 3, C = 5 };
    plan p;
    (void)state;
    open_plan(&p, T, K, 7, 20);
    fill_plan(&p, 0);
    define_plan(&p, 20);
    int32_t *from = ids_of(p.from, p.R), *place = ids_of(p.place, T * K);
    operand o_from = given(vec(I32, p.R), from), o_place = given(mat(I32, T, K), place);
    kernel_case rows = { .op = "route_rows",
                         .in = { mat(ACT, T, C), o_from, o_place },
                         .out = { mat(ACT, p.R, C) } };
    instance x, y;
    build(&rows, LM_DTYPE_F64, LM_DTYPE_F32, &x);
    run(&x, lm_cpu_kernel("route_rows", LM_DTYPE_F64, LM_CPU_REF), NULL);
    kernel_case sum = { .op = "route_sum",
                        .in = { given(mat(ACT, p.R, C), x.out[0].data), o_from, o_place },
                        .out = { mat(ACT, T, C) } };
    build(&sum, LM_DTYPE_F64, LM_DTYPE_F32, &y);
    run(&y, lm_cpu_kernel("route_sum", LM_DTYPE_F64, LM_CPU_REF), NULL);
    for (int64_t r = 0; r < p.R; r++)
        for (int64_t j = 0; j < C; j++)
            assert_true(((double *)x.out[0].data)[r * C + j] ==
                        (from[r] < 0 ? 0 : ((double *)x.in[0].data)[from[r] / K * C + j]));
    for (int64_t t = 0; t < T; t++)
        for (int64_t j = 0; j < C; j++) {
            int n = (place[t * K] >= 0) + (place[t * K + 1] >= 0) + (place[t * K + 2] >= 0);
            double want = n * ((double *)x.in[0].data)[t * C + j];
            assert_true(fabs(((double *)y.out[0].data)[t * C + j] - want) <= 1e-12 * fabs(want));
        }
    drop(&rows, &x);
    drop(&sum, &y);
    lm_free(from);
    lm_free(place);
    close_plan(&p);
}

/* ---- losses ---- */

/* Tokens [first, first + n) of a balance, by its formula. */
static double balance(const gate *g, bool by_expert, int64_t first, int64_t n, double *load,
                      double *mean)
{
    double s[MOST_E], sum[MOST_E] = { 0 }, total = 0;
    memset(load, 0, (size_t)g->E * sizeof *load);
    for (int64_t t = first; t < first + n; t++) {
        double all = 0;
        scores_of(g, t, s);
        for (int64_t e = 0; e < g->E; e++)
            all += s[e];
        for (int64_t e = 0; e < g->E; e++)
            sum[e] += s[e] / all;
        for (int64_t k = 0; k < g->a.k; k++) {
            int32_t e = (int32_t)g->expert[t * g->a.k + k];
            load[lm_route_expert(e)] += e >= 0 || !by_expert;
        }
    }
    for (int64_t e = 0; e < g->E; e++) {
        total += load[e] * sum[e];
        mean[e] = sum[e] / (double)n;
    }
    return (double)g->E / (double)(g->a.k * n * n) * total;
}

/* The mean over tokens of 1 - the sum of squared shares of the nodes. */
static double spread(const gate *g, int64_t nodes)
{
    double s[MOST_E], sum = 0;
    for (int64_t t = 0; nodes && t < g->T; t++) {
        double q[MOST_E] = { 0 }, all = 0;
        scores_of(g, t, s);
        for (int64_t e = 0; e < g->E; e++) {
            all += s[e];
            q[e * nodes / g->E] += s[e];
        }
        sum += 1;
        for (int64_t n = 0; n < nodes; n++)
            sum -= q[n] * q[n] / (all * all);
    }
    return sum / (double)g->T;
}

static kernel_case aux_case(const gate *g, const lm_route_aux_attr *a)
{
    return (kernel_case){ .op = "route_aux",
                          .attr = a,
                          .in = { given(mat(F32, g->T, g->E), g->z),
                                  given(mat(I32, g->T, g->a.k), g->expert) },
                          .out = { vec(F32, 1), vec(F32, g->E), vec(F32, g->E), vec(F32, 1) },
                          .tol_f32 = 2e-6,
                          .tol_bf16 = 2e-6 };
}

static void check_aux(const gate *g, lm_route_aux_attr a)
{
    double load[MOST_E], mean[MOST_E], want, square = 0;
    int64_t seq = a.seq ? a.seq : g->T;
    kernel_case k = aux_case(g, &a);
    instance x;
    want = 0;
    for (int64_t t = 0; t < g->T; t += seq)
        want +=
            a.sequence * balance(g, a.by_expert, t, seq, load, mean) * (double)seq / (double)g->T;
    want += a.balance * balance(g, a.by_expert, 0, g->T, load, mean);
    for (int64_t t = 0; t < g->T; t++) {
        double sum = 0;
        for (int64_t e = 0; e < g->E; e++)
            sum += exp(g->z[t * g->E + e]);
        square += log(sum) * log(sum);
    }
    want += a.z * square / (double)g->T + a.affinity * spread(g, a.nodes);
    build(&k, LM_DTYPE_F64, LM_DTYPE_F64, &x);
    run(&x, lm_cpu_kernel(k.op, LM_DTYPE_F64, LM_CPU_REF), NULL);
    if (fabs(*(double *)x.out[0].data - want) > 1e-12 * want)
        fail_msg("loss %.15g, by its formula %.15g", *(double *)x.out[0].data, want);
    for (int64_t e = 0; e < g->E; e++) {
        assert_true(fabs(((double *)x.out[1].data)[e] - mean[e]) < 1e-13);
        assert_true(((double *)x.out[2].data)[e] == load[e]);
    }
    double dropped = 0;
    for (int64_t i = 0; i < g->T * g->a.k; i++)
        dropped += g->expert[i] < 0 && !a.by_expert;
    assert_true((dropped > 0) != a.by_expert && *(double *)x.out[3].data == dropped);
    drop(&k, &x);
    check_case(&k);
    k.op = "route_aux_dz";
    k.in[2] = vec(F32, 1);
    k.out[0] = mat(F32, g->T, g->E);
    k.out[1] = k.out[2] = k.out[3] = vec(ABSENT, 0);
    k.tol_f32 = k.tol_bf16 = 1e-5;
    check_case(&k);
    k.in[3] = vec(F32, g->E);
    check_case(&k);
}

/* Counts of more tokens in place of the loads: the balance of `a` with them, and their gradient's formula. */
static void check_counts(const gate *g, lm_route_aux_attr a)
{
    double load[MOST_E], mean[MOST_E], count[MOST_E], want = 0;
    kernel_case k = aux_case(g, &a);
    instance x;
    balance(g, a.by_expert, 0, g->T, load, mean);
    for (int64_t e = 0; e < g->E; e++) {
        count[e] = (double)(e * e % 17) + load[e];
        want += count[e] * mean[e];
    }
    want *= a.balance * (double)g->E / (double)(g->a.k * g->T);
    k.in[2] = given(vec(F32, g->E), count);
    build(&k, LM_DTYPE_F64, LM_DTYPE_F64, &x);
    run(&x, lm_cpu_kernel(k.op, LM_DTYPE_F64, LM_CPU_REF), NULL);
    if (fabs(*(double *)x.out[0].data - want) > 1e-12 * want)
        fail_msg("loss %.15g, by its formula %.15g", *(double *)x.out[0].data, want);
    for (int64_t e = 0; e < g->E; e++)
        assert_true(((double *)x.out[2].data)[e] == load[e]);
    drop(&k, &x);
    check_case(&k);
}

static void test_losses(void **state)
{
    (void)state;
    for (int form = 0; form < 6; form++) {
        gate g;
        lm_route_attr a = { .k = 1 + form % 3 * 2, .scale = 1, .sigmoid = form % 2 };
        open_gate(&g, form < 3 ? 300 : 1024, form == 5 ? 96 : 13, a, 20 + (uint64_t)form);
        define_gate(&g);
        for (int64_t i = 0; i < g.T * a.k; i += 9) /* some are dropped */
            g.expert[i] = -1 - g.expert[i];
        lm_route_aux_attr x = { .sigmoid = a.sigmoid, .balance = 1 };
        check_aux(&g, x);
        x = (lm_route_aux_attr){ .sigmoid = a.sigmoid, .sequence = 1, .seq = g.T / 4 };
        check_aux(&g, x);
        check_counts(&g, (lm_route_aux_attr){ .sigmoid = a.sigmoid, .balance = 0.5 });
        x = (lm_route_aux_attr){ .z = 0.5 };
        g.a.sigmoid = false;
        check_aux(&g, x);
        g.a.sigmoid = a.sigmoid;
        x = (lm_route_aux_attr){
            .sigmoid = a.sigmoid, .balance = 0.3, .sequence = 0.2, .z = 0.1, .seq = g.T / 2
        };
        check_aux(&g, x);
        x.by_expert = true;
        check_aux(&g, x);
        x.affinity = 0.7;
        for (x.nodes = 1; x.nodes <= g.E; x.nodes++)
            if (g.E % x.nodes == 0)
                check_aux(&g, x);
        close_gate(&g);
    }
}

/* The mean probability is NaN for the experts alone whose logits are not finite. */
static void test_losses_not_finite(void **state)
{
    static const double bad[] = { NAN, INFINITY, -INFINITY };
    (void)state;
    for (int i = 0; i < 6; i++) {
        const lm_route_aux_attr a = { .sigmoid = i % 2, .balance = 0.5 };
        gate g;
        instance x;
        open_gate(&g, 100, 37, (lm_route_attr){ .k = 2, .scale = 1 }, 1);
        for (int64_t k = 0; k < g.T * g.a.k; k++)
            g.expert[k] = (int32_t)(k % g.E);
        g.z[70 * g.E + 5] = g.z[9 * g.E + 36] = bad[i / 2];
        kernel_case k = aux_case(&g, &a);
        build(&k, LM_DTYPE_F64, LM_DTYPE_F64, &x);
        run(&x, lm_cpu_kernel(k.op, LM_DTYPE_F64, LM_CPU_REF), NULL);
        assert_true(isnan(*(double *)x.out[0].data));
        for (int64_t e = 0; e < g.E; e++)
            assert_true(isnan(((double *)x.out[1].data)[e]) == (e == 5 || e == 36));
        drop(&k, &x);
        check_case(&k);
        close_gate(&g);
    }
}

/* Equal logits and equal loads: each balance is its coefficient, whatever K is. */
static void test_balanced(void **state)
{
    (void)state;
    for (int64_t K = 1; K <= 8; K *= 2) {
        gate g;
        instance x;
        lm_route_aux_attr a = { .balance = 0.25, .sequence = 0.5, .seq = 16 };
        open_gate(&g, 64, 8, (lm_route_attr){ .k = K, .scale = 1 }, 1);
        for (int64_t i = 0; i < g.T * g.E; i++)
            g.z[i] = 2;
        for (int64_t i = 0; i < g.T * K; i++)
            g.expert[i] = (int32_t)(i % g.E);
        kernel_case k = aux_case(&g, &a);
        build(&k, LM_DTYPE_F64, LM_DTYPE_F64, &x);
        run(&x, lm_cpu_kernel(k.op, LM_DTYPE_F64, LM_CPU_REF), NULL);
        assert_true(fabs(*(double *)x.out[0].data - 0.75) < 1e-12);
        drop(&k, &x);
        close_gate(&g);
    }
}

/* ---- gradients of weights, at more sizes than the registry's ---- */

static void test_weight_gradients(void **state)
{
    static const int64_t sizes[][3] = { { 50, 8, 2 }, { 30, 96, 8 }, { 20, 31, 31 }, { 9, 1, 1 } };
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int form = 0; form < 4; form++) {
            gate g;
            instance x;
            lm_route_attr a = { .k = sizes[i][2], .scale = 2.5 };
            a.sigmoid = form % 2;
            a.normalise = form > 1;
            a.capacity = 2 * sizes[i][0] * a.k / sizes[i][1] / 3 + 1;
            open_gate(&g, sizes[i][0], sizes[i][1], a, 50 + (uint64_t)form);
            define_gate(&g);
            define_capacity(&g);
            kernel_case k = { .op = "route_choose_dz",
                              .attr = &a,
                              .in = { given(mat(F32, g.T, g.E), g.z),
                                      given(mat(I32, g.T, a.k), g.expert), mat(F32, g.T, a.k) },
                              .out = { mat(F32, g.T, g.E) },
                              .tol_f32 = 1e-5,
                              .tol_bf16 = 1e-5 };
            kernel_case forward = case_of(&g);
            check_case(&k);
            build(&k, LM_DTYPE_F64, LM_DTYPE_F64, &x);
            run(&x, lm_cpu_kernel(k.op, LM_DTYPE_F64, LM_CPU_REF), NULL);
            check_slope(&forward, 0, 0, &x.in[2], &x.out[0]);
            drop(&k, &x);
            close_gate(&g);
        }
}

/* ---- bars and sums of weights ---- */

static int descending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x < y) - (x > y);
}

/* The K-th largest number of a row without number e, by sorting the others. */
static double bar_of(const double *row, int64_t E, int64_t K, int64_t e)
{
    double others[MOST_E];
    int64_t n = 0;
    for (int64_t i = 0; i < E; i++)
        if (i != e)
            others[n++] = row[i];
    qsort(others, (size_t)n, sizeof *others, descending);
    return others[K - 1];
}

/* Few different numbers, so that many are equal. */
static void test_bars(void **state)
{
    enum { T = 71 };
    static double y[T * MOST_E];
    (void)state;
    for (int64_t E = 2; E <= MOST_E; E += E < 20 ? 1 : 19)
        for (int64_t K = 1; K < E && K < 10; K += 4) {
            const lm_route_bar_attr a = { K };
            for (int64_t i = 0; i < T * E; i++)
                y[i] = (double)(lm_philox((uint64_t)i, 4, 5).v[0] % 23) / 4 - 2;
            kernel_case k = { .op = "route_bar",
                              .attr = &a,
                              .in = { given(mat(F32, T, E), y) },
                              .out = { mat(F32, T, E), mat(I32, T, 2) } };
            check_case(&k);
            for (int level = 0; level <= (int)lm_cpu_detect(); level++) {
                instance x;
                build(&k, LM_DTYPE_F32, LM_DTYPE_F32, &x);
                run(&x, lm_cpu_kernel(k.op, LM_DTYPE_F32, (lm_cpu_level)level), NULL);
                for (int64_t i = 0; i < T * E; i++) {
                    const double want = bar_of(y + i / E * E, E, K, i % E);
                    const double got = lm_get(LM_DTYPE_F32, x.out[0].data, i);
                    if (got < want || got > want)
                        fail_msg("level %d, %d of %d, row %d, number %d: %g, not %g", level, (int)K,
                                 (int)E, (int)(i / E), (int)(i % E), got, want);
                }
                drop(&k, &x);
            }
        }
}

static void test_importance(void **state)
{
    (void)state;
    for (int64_t T = 1; T < 1000; T = 3 * T + 1) {
        const lm_route_importance_attr a = { 37 };
        kernel_case k = { .op = "route_importance",
                          .attr = &a,
                          .tol_f32 = 2e-6,
                          .tol_bf16 = 2e-6,
                          .in = { mat(F32, T, 3), filled(mat(I32, T, 3), IDS, -37) },
                          .out = { vec(F32, 37) } };
        check_case(&k);
        kernel_case dw = { .op = "route_importance_dw",
                           .attr = &a,
                           .in = { filled(mat(I32, T, 3), IDS, -37), vec(F32, 37) },
                           .out = { mat(F32, T, 3) } };
        check_case(&dw);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gates),
        cmocka_unit_test(test_ties),
        cmocka_unit_test(test_not_finite),
        cmocka_unit_test(test_random_second),
        cmocka_unit_test(test_statistics),
        cmocka_unit_test(test_by_position),
        cmocka_unit_test(test_by_probability),
        cmocka_unit_test(test_reroute),
        cmocka_unit_test(test_capacities),
        cmocka_unit_test(test_expert_choice),
        cmocka_unit_test(test_plans),
        cmocka_unit_test(test_moves),
        cmocka_unit_test(test_there_and_back),
        cmocka_unit_test(test_losses),
        cmocka_unit_test(test_balanced),
        cmocka_unit_test(test_weight_gradients),
        cmocka_unit_test(test_losses_not_finite),
        cmocka_unit_test(test_bars),
        cmocka_unit_test(test_importance),
    };
    return cmocka_run_group_tests_name("kernels_route", tests, NULL, NULL);
}
