/* SPDX-License-Identifier: Apache-2.0 */
/* A layer of a mixture of experts as a graph: router, choices, plan, rows, grouped products, sum
 * and losses, against plain loops over tokens and experts; its gradients against finite
 * differences; its types in low precision. */
#include "op_trial.h"

#include "kernels/grouped.h"
#include "kernels/linear.h"
#include "kernels/route.h"

enum { T = 37, C = 6, E = 5, K = 2, M = 7 };

typedef struct {
    lm_graph *g;
    lm_vid x, router, in_w, out_w; /* [T,C], [E,C], [E,2M,C], [E,C,M] */
    lm_vid z, weight, expert, offsets, from, place, y, loss;
    lm_vid grad[4]; /* of the first four */
    lm_vid seed, loss_seed;
    size_t n_forward;
    void **mem;
} layer;

static lm_vid make(layer *l, lm_role role, lm_tensor t, const char *name)
{
    lm_err e = { 0 };
    lm_vid v = LM_NONE;
    must(lm_graph_value(l->g, role, t, name, &v, &e), &e);
    return v;
}

static lm_vid append(layer *l, const lm_op *op, const void *attr, const lm_vid in[4], lm_vid *more)
{
    lm_err e = { 0 };
    lm_vid out[4] = { LM_NONE, LM_NONE, LM_NONE, LM_NONE };
    must(lm_graph_append(l->g, op, attr, in, out, &e), &e);
    for (int i = 1; more && i < lm_op_outs(op); i++)
        more[i - 1] = out[i];
    return out[0];
}

static void build(layer *l, lm_route_attr route)
{
    lm_err e = { 0 };
    lm_linear_attr linear = { LM_ACC_FIRST };
    lm_grouped_attr in = { E, 2 * M, LM_ACC_FIRST }, out = { E, C, LM_ACC_FIRST };
    lm_route_plan_attr plan = { E, 0 };
    lm_route_aux_attr aux = { .sigmoid = route.sigmoid, .balance = 0.3, .z = 0.1 };
    lm_vid more[3], rows;
    *l = (layer){ .g = NULL };
    must(lm_graph_new(&l->g, &e), &e);
    l->x = make(l, LM_ROLE_INPUT, lm_shape2(LM_DTYPE_F32, T, C), "x");
    l->router = make(l, LM_ROLE_PARAM, lm_shape2(LM_DTYPE_F32, E, C), "router");
    l->in_w = make(l, LM_ROLE_PARAM, lm_shape2(LM_DTYPE_F32, E * 2 * M, C), "in");
    l->out_w = make(l, LM_ROLE_PARAM, lm_shape2(LM_DTYPE_F32, E * C, M), "out");
    l->z =
        append(l, &lm_op_linear, &linear, (lm_vid[4]){ l->x, l->router, LM_NONE, LM_NONE }, NULL);
    l->weight = append(l, &lm_op_route_choose, &route, (lm_vid[4]){ l->z, LM_NONE }, more);
    l->expert = more[0];
    l->offsets = append(l, &lm_op_route_plan, &plan, (lm_vid[4]){ l->expert }, more);
    l->from = more[0];
    l->place = more[1];
    rows = append(l, &lm_op_route_rows, NULL,
                  (lm_vid[5]){ l->x, l->from, l->place, LM_NONE, LM_NONE }, NULL);
    rows = append(l, &lm_op_grouped_linear, &in, (lm_vid[4]){ rows, l->in_w, l->offsets }, NULL);
    rows = append(l, &lm_op_swiglu, NULL, (lm_vid[4]){ rows }, NULL);
    rows = append(l, &lm_op_grouped_linear, &out, (lm_vid[4]){ rows, l->out_w, l->offsets }, NULL);
    l->y = append(l, &lm_op_route_sum, NULL,
                  (lm_vid[5]){ rows, l->from, l->place, l->weight, LM_NONE }, NULL);
    l->loss =
        append(l, &lm_op_route_aux, &aux, (lm_vid[4]){ l->z, l->expert, LM_NONE, LM_NONE }, more);
}

static void add_backward_of(layer *l)
{
    lm_err e = { 0 };
    lm_vid wrt[4] = { l->x, l->router, l->in_w, l->out_w }, *grads;
    l->n_forward = l->g->n_nodes;
    l->seed = make(l, LM_ROLE_INPUT, l->g->value[l->y].t, "seed");
    l->loss_seed = make(l, LM_ROLE_INPUT, l->g->value[l->loss].t, "loss seed");
    grads = take(l->g->n_values * sizeof *grads);
    lm_backward b = { .root = l->y,
                      .seed = l->seed,
                      .wrt = wrt,
                      .n_wrt = 4,
                      .grads = grads,
                      .more = &l->loss,
                      .more_seed = &l->loss_seed,
                      .n_more = 1 };
    must(lm_pass_backward(l->g, &b, &e), &e);
    for (int i = 0; i < 4; i++)
        l->grad[i] = grads[wrt[i]];
    lm_free(grads);
}

static void fill_layer(layer *l)
{
    l->mem = take(l->g->n_values * sizeof *l->mem);
    for (size_t v = 0; v < l->g->n_values; v++) {
        const lm_tensor *t = &l->g->value[v].t;
        lm_rng r = lm_rng_make(3, "layer", v);
        l->mem[v] = take(bytes_of(t));
        for (int64_t i = 0; lm_dtype_is_float(t->dtype) && i < lm_tensor_count(t); i++)
            lm_set(t->dtype, l->mem[v], i, lm_rng_normal(r, (uint64_t)i));
    }
}

static void close_layer(layer *l)
{
    for (size_t v = 0; l->mem && v < l->g->n_values; v++) {
        assert_true(guard_holds(l->mem[v], bytes_of(&l->g->value[v].t)));
        lm_free(l->mem[v]);
    }
    lm_free(l->mem);
    lm_graph_free(l->g);
}

/* All nodes up to n by the kernels of a level. */
static void run_layer(const layer *l, size_t n, lm_cpu_level level)
{
    static const lm_step step = { .seed = 1 };
    for (size_t k = 0; k < n; k++) {
        const lm_node *node = &l->g->node[k];
        operands o;
        o.call = lm_node_call(l->g, node, o.in, o.out);
        for (int i = 0; i < node->n_in; i++)
            o.in[i].data = node->in[i] >= 0 ? l->mem[node->in[i]] : NULL;
        for (int i = 0; i < node->n_out; i++)
            o.out[i].data = node->out[i] >= 0 ? l->mem[node->out[i]] : NULL;
        o.call.step = &step;
        run_kernel(lm_cpu_kernel(node->op->name, lm_node_act(l->g, node), level), &o, 2);
    }
}

/* y of one token from one expert, times w. */
static void add_expert(const layer *l, int64_t t, int64_t e, double w, double *y)
{
    const double *x = (const double *)l->mem[l->x] + t * C;
    const double *in = (const double *)l->mem[l->in_w] + e * 2 * M * C;
    const double *out = (const double *)l->mem[l->out_w] + e * C * M;
    for (int m = 0; m < M; m++) {
        double gate = 0, up = 0;
        for (int c = 0; c < C; c++) {
            gate += x[c] * in[m * C + c];
            up += x[c] * in[(M + m) * C + c];
        }
        for (int c = 0; c < C; c++)
            y[c] += w * gate / (1 + exp(-gate)) * up * out[c * M + m];
    }
}

static const lm_route_attr gates[] = {
    { .k = K, .scale = 1, .normalise = true },
    { .k = K, .scale = 1.5, .capacity = 11 },
    { .k = K,
      .scale = 1,
      .sigmoid = true,
      .normalise = true,
      .capacity = 9,
      .policy = LM_OVERFLOW_PROBABILITY },
    { .k = K, .scale = 1, .normalise = true, .capacity = 17, .policy = LM_OVERFLOW_REROUTE },
    { .k = E, .scale = 1, .by_expert = true, .capacity = 12 },
};
enum { GATES = sizeof gates / sizeof *gates };

static void in_double(layer *l, int gate)
{
    lm_err e = { 0 };
    build(l, gates[gate]);
    must(lm_pass_precision(l->g, &(lm_precision){ LM_DTYPE_F64, NULL }, &e), &e);
    add_backward_of(l);
    fill_layer(l);
}

/* Each token's result is the sum over its experts, and 0 where all were dropped. */
static void test_results(void **state)
{
    (void)state;
    for (int gate = 0; gate < GATES; gate++) {
        layer l;
        in_double(&l, gate);
        run_layer(&l, l.n_forward, LM_CPU_REF);
        const int32_t *expert = l.mem[l.expert];
        const double *w = l.mem[l.weight], *y = l.mem[l.y];
        int dropped = 0;
        for (int64_t t = 0; t < T; t++) {
            double want[C] = { 0 };
            for (int64_t i = t * gates[gate].k; i < (t + 1) * gates[gate].k; i++) {
                dropped += expert[i] < 0;
                if (expert[i] >= 0)
                    add_expert(&l, t, expert[i], w[i], want);
            }
            for (int c = 0; c < C; c++)
                assert_true(fabs(y[t * C + c] - want[c]) <= 1e-12 * (1 + fabs(want[c])));
        }
        assert_true((dropped > 0) == (gate == 1 || gate == 2 || gate == 4));
        close_layer(&l);
    }
}

static double objective_of(const layer *l)
{
    const double *y = l->mem[l->y], *seed = l->mem[l->seed];
    double sum = *(double *)l->mem[l->loss] * *(double *)l->mem[l->loss_seed];
    for (int i = 0; i < T * C; i++)
        sum += y[i] * seed[i];
    return sum;
}

static void test_gradients(void **state)
{
    const double h = 1e-6;
    (void)state;
    for (int gate = 0; gate < GATES; gate++) {
        layer l;
        in_double(&l, gate);
        lm_vid wrt[4] = { l.x, l.router, l.in_w, l.out_w };
        run_layer(&l, l.g->n_nodes, LM_CPU_REF);
        for (int i = 0; i < 4; i++) {
            int64_t n = lm_tensor_count(&l.g->value[wrt[i]].t);
            double *x = l.mem[wrt[i]], *grad = l.mem[l.grad[i]], got = 0, norm = 0, side[2];
            lm_rng r = lm_rng_make(4, "direction", (uint64_t)i);
            for (int64_t q = 0; q < n; q++) {
                got += grad[q] * lm_rng_normal(r, (uint64_t)q);
                norm += grad[q] * grad[q];
            }
            for (int s = 0; s < 2; s++) {
                for (int64_t q = 0; q < n; q++)
                    x[q] += (s ? h : -h) * lm_rng_normal(r, (uint64_t)q);
                run_layer(&l, l.n_forward, LM_CPU_REF);
                side[s] = objective_of(&l);
                for (int64_t q = 0; q < n; q++)
                    x[q] -= (s ? h : -h) * lm_rng_normal(r, (uint64_t)q);
            }
            double want = (side[1] - side[0]) / (2 * h);
            if (!(fabs(got - want) <= 1e-7 * sqrt(norm) + 1e-8))
                fail_msg("gate %d, gradient %d: %.12g, finite differences %.12g", gate, i, got,
                         want);
        }
        close_layer(&l);
    }
}

/* In BF16 the logits become F32 before they are compared, weights and losses are F32, and every
 * level runs the layer. */
static void test_low_precision(void **state)
{
    (void)state;
    for (int gate = 0; gate < GATES; gate++) {
        layer l;
        lm_err e = { 0 };
        build(&l, gates[gate]);
        must(lm_pass_precision(l.g, &(lm_precision){ LM_DTYPE_BF16, NULL }, &e), &e);
        add_backward_of(&l);
        fill_layer(&l);
        for (size_t k = 0; k < l.g->n_nodes; k++) {
            const lm_node *n = &l.g->node[k];
            if (n->op == &lm_op_route_choose || n->op == &lm_op_route_aux)
                assert_int_equal(l.g->value[n->in[0]].t.dtype, LM_DTYPE_F32);
        }
        assert_int_equal(l.g->value[l.z].t.dtype, LM_DTYPE_BF16);
        assert_int_equal(l.g->value[l.weight].t.dtype, LM_DTYPE_F32);
        assert_int_equal(l.g->value[l.expert].t.dtype, LM_DTYPE_I32);
        assert_int_equal(l.g->value[l.loss].t.dtype, LM_DTYPE_F32);
        assert_int_equal(l.g->value[l.y].t.dtype, LM_DTYPE_BF16);
        for (int level = 0; level <= (int)lm_cpu_detect(); level++) {
            run_layer(&l, l.g->n_nodes, (lm_cpu_level)level);
            for (int i = 0; i < 4; i++) {
                const lm_tensor *t = &l.g->value[l.grad[i]].t;
                for (int64_t q = 0; q < lm_tensor_count(t); q++)
                    assert_true(isfinite(lm_get(t->dtype, l.mem[l.grad[i]], q)));
            }
        }
        close_layer(&l);
    }
}

/* ---- what is refused ---- */

static const char *complaint(const lm_op *op, const void *attr, lm_tensor a, lm_tensor b)
{
    static lm_err e;
    layer l = { .g = NULL };
    lm_vid in[4] = { LM_NONE, LM_NONE, LM_NONE, LM_NONE },
           out[4] = { LM_NONE, LM_NONE, LM_NONE, LM_NONE };
    e = (lm_err){ 0 };
    must(lm_graph_new(&l.g, &e), &e);
    in[0] = make(&l, LM_ROLE_INPUT, a, "a");
    if (!lm_absent(&b))
        in[1] = make(&l, LM_ROLE_INPUT, b, "b");
    lm_graph_append(l.g, op, attr, in, out, &e);
    lm_graph_free(l.g);
    return e.code ? e.what : "";
}

static void test_refused(void **state)
{
    lm_tensor z = lm_shape2(LM_DTYPE_F32, 12, 8), none = { 0 };
    lm_tensor ids = lm_shape2(LM_DTYPE_I32, 12, 2), bias = lm_shape1(LM_DTYPE_F32, 8);
    (void)state;
    const struct {
        lm_route_attr a;
        lm_tensor bias;
        const char *what;
    } choices[] = {
        { { .k = 2, .scale = 1 }, bias, "" },
        { { .k = 9, .scale = 1 }, none, "9 choices among 8 experts, of at most 4096" },
        { { .k = 2 }, none, "capacity 0 and scale 0 are not positive" },
        { { .k = 2, .scale = 1, .groups = 3, .kept_groups = 1 },
          none,
          "2 choices are not in 1 of 3 groups of 8 experts" },
        { { .k = 3, .scale = 1, .groups = 4, .kept_groups = 1 },
          none,
          "3 choices are not in 1 of 4 groups of 8 experts" },
        { { .k = 3, .scale = 1, .second_random = true },
          none,
          "a random second choice goes with 2" },
        { { .k = 8, .scale = 1, .by_expert = true, .capacity = 3 }, none, "" },
        { { .k = 8, .scale = 1, .by_expert = true },
          none,
          "choices by experts are all, with a capacity, without bias and groups" },
        { { .k = 8, .scale = 1, .by_expert = true, .capacity = 3 },
          bias,
          "choices by experts are all, with a capacity, without bias and groups" },
    };
    for (size_t i = 0; i < sizeof choices / sizeof *choices; i++)
        assert_string_equal(complaint(&lm_op_route_choose, &choices[i].a, z, choices[i].bias),
                            choices[i].what);
    assert_string_equal(complaint(&lm_op_route_plan, &(lm_route_plan_attr){ 8, 4 }, ids, none), "");
    assert_string_equal(complaint(&lm_op_route_plan, &(lm_route_plan_attr){ 8, -1 }, ids, none),
                        "pad is -1");
    assert_string_equal(
        complaint(&lm_op_route_plan, &(lm_route_plan_attr){ 8, 1 << 29 }, ids, none),
        "12 tokens of 2 choices and 4294967296 rows are too many for indices of 32 "
        "bits");
    assert_string_equal(complaint(&lm_op_route_aux, &(lm_route_aux_attr){ .seq = 5 }, z, ids),
                        "12 tokens are not a multiple of 5 in a sequence");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_results),
        cmocka_unit_test(test_gradients),
        cmocka_unit_test(test_low_precision),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests_name("mixture", tests, NULL, NULL);
}
