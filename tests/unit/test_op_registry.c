/* SPDX-License-Identifier: Apache-2.0 */
/* Every operator of the registry: each of its kernels against the reference in double, and its
 * gradient rule against finite differences.
 *
 * The walk names no operator.  An example makes a graph of one node (or two that share
 * their parameters); its backward is appended by the operator's own rule, and every node of the
 * result is checked: so operators without examples are reached through those that have them.  In
 * the end each operator, and each kernel that this machine can run, must have been met. */
#include "op_trial.h"

enum { MOST_KERNELS = 1024 };

static bool kernel_met[MOST_KERNELS];

/* Run all kernels of one node from the same state; the results of the last one are kept. */
static void check_node(trial *t, const lm_node *n)
{
    lm_dtype act = lm_node_act(t->g, n);
    operands o, exact, shaken, alike, first;
    void *before[LM_MAX_OUT], *one[LM_MAX_OUT];
    bind(t, n, &o);
    by_reference(&o, n->op->name, act, true, 0, &exact);
    by_reference(&o, n->op->name, act, true, 0x1p-22, &shaken);
    by_reference(&o, n->op->name, act, false, 0, &alike);
    for (int i = 0; i < n->n_out; i++) {
        first.out[i] = copy_as(&o.out[i], o.out[i].dtype);
        before[i] = first.out[i].data;
        one[i] = o.out[i].data ? take(bytes_of(&o.out[i])) : NULL;
    }
    const lm_kernel *k;
    for (int j = 0; (k = lm_cpu_kernel_at(j)); j++) {
        if (strcmp(k->op, n->op->name) || k->level > (int)lm_cpu_detect() ||
            (k->act != act && k->act != LM_DTYPE_NONE))
            continue;
        kernel_met[j] = true;
        for (int threads = 1; threads <= 3; threads += 2) {
            for (int i = 0; i < n->n_out; i++)
                if (before[i])
                    memcpy(o.out[i].data, before[i], bytes_of(&o.out[i]));
            run_kernel(k, &o, threads);
            for (int i = 0; i < n->n_out; i++) {
                if (!one[i])
                    continue;
                if (threads == 1)
                    memcpy(one[i], o.out[i].data, bytes_of(&o.out[i]));
                else if (memcmp(one[i], o.out[i].data, bytes_of(&o.out[i])))
                    fail_msg("%s %s: other bits with three threads", n->op->name,
                             lm_cpu_level_name(k->level));
            }
            if (threads == 1)
                check_outputs(t, n, lm_cpu_level_name(k->level), k->level == LM_CPU_REF, &o, &exact,
                              &shaken, &alike);
        }
    }
    for (int i = 0; i < n->n_out; i++) {
        lm_free(before[i]);
        lm_free(one[i]);
    }
    drop_operands(&exact);
    drop_operands(&shaken);
    drop_operands(&alike);
}

/* True if more than the reference runs in F64. */
static bool has_double(const char *op)
{
    const lm_kernel *k;
    for (int j = 0; (k = lm_cpu_kernel_at(j)); j++)
        if (k->act == LM_DTYPE_F64 && !strcmp(k->op, op))
            return true;
    return false;
}

static void test_kernels(void **state)
{
    (void)state;
    const lm_op *op;
    for (int j = 0; (op = lm_op_at(j)); j++)
        for (int i = 0; op->example && i < 15; i++)
            for (int type = 0; type < 2 + has_double(op->name); type++) {
                static const lm_dtype types[] = { LM_DTYPE_F32, LM_DTYPE_BF16, LM_DTYPE_F64 };
                trial t;
                open_trial(&t, op, i, types[type]);
                for (int turn = 0; turn < 3; turn++) {
                    t.step.more =
                        turn >
                        0; /* weight gradients: replaced, then added to, then replaced again */
                    if (turn == 2)
                        make_fresh(&t);
                    for (size_t k = 0; k < t.g->n_nodes; k++)
                        check_node(&t, &t.g->node[k]);
                }
                close_trial(&t);
            }
}

/* ---- gradient rules ---- */

static void run_nodes(const trial *t, size_t n)
{
    for (size_t k = 0; k < n; k++) {
        operands o;
        bind(t, &t->g->node[k], &o);
        run_kernel(lm_cpu_kernel(t->g->node[k].op->name, LM_DTYPE_F64, LM_CPU_REF), &o, 1);
    }
}

static double objective(const trial *t)
{
    int64_t n = lm_tensor_count(&t->g->value[t->root].t);
    const double *root = t->mem[t->root], *seed = t->mem[t->seed];
    double sum = 0;
    run_nodes(t, t->n_forward);
    for (int64_t i = 0; i < n; i++)
        sum += root[i] * seed[i];
    return sum;
}

/* d objective / d (input v along direction d), by a five-point rule: h^4 leaves rounding alone. */
static double slope(trial *t, lm_vid v, const double *d, int64_t n)
{
    static const double at[4] = { 1, -1, 2, -2 };
    static const double weight[4] = { 8, -8, -1, 1 };
    const double h = 1e-5;
    double *x = t->mem[v], *kept = take((size_t)n * sizeof *kept), sum = 0;
    memcpy(kept, x, (size_t)n * sizeof *x);
    for (int s = 0; s < 4; s++) {
        for (int64_t i = 0; i < n; i++)
            x[i] = kept[i] + at[s] * h * d[i];
        sum += weight[s] * objective(t);
    }
    memcpy(x, kept, (size_t)n * sizeof *x);
    lm_free(kept);
    return sum / (12 * h);
}

static void check_gradient(trial *t, lm_vid v, const double *grad, const char *what)
{
    int64_t n = lm_tensor_count(&t->g->value[v].t);
    double *d = take((size_t)n * sizeof *d);
    for (uint64_t dir = 0; dir < 3; dir++) {
        lm_rng r = lm_rng_make(dir, "direction", (uint64_t)v);
        double got = 0, norm = 0;
        for (int64_t i = 0; i < n; i++) {
            d[i] = lm_rng_normal(r, (uint64_t)i);
            got += grad[i] * d[i];
            norm += grad[i] * grad[i];
        }
        double want = slope(t, v, d, n);
        if (!(fabs(got - want) <= 1e-6 * (fabs(want) + sqrt(norm)) + 1e-8))
            fail_msg("%s example %d, gradient of %s %d: %.12g, finite differences %.12g",
                     t->op->name, t->example, what, (int)v, got, want);
    }
    lm_free(d);
}

static void test_gradients(void **state)
{
    (void)state;
    const lm_op *op;
    for (int j = 0; (op = lm_op_at(j)); j++)
        for (int i = 0; op->example && op->grad && i < 9; i++) {
            trial t;
            open_trial(&t, op, i, LM_DTYPE_F64);
            int met = 0;
            for (int k = 0; k < t.uses; k++)
                for (int in = 0; in < lm_op_ins(op); in++) {
                    lm_vid v = t.g->node[k].in[in];
                    if (v < 0 || t.g->value[v].t.dtype != LM_DTYPE_F64 ||
                        (op->in[in].is & LM_FIXED))
                        continue;
                    int64_t n = lm_tensor_count(&t.g->value[v].t);
                    double *grad = take((size_t)n * sizeof *grad);
                    run_nodes(&t, t.g->n_nodes);
                    memcpy(grad, t.mem[t.grads[v]], (size_t)n * sizeof *grad);
                    check_gradient(&t, v, grad, "operand");
                    lm_free(grad);
                    met++;
                }
            assert_true(met > 0);
            close_trial(&t);
        }
}

/* ---- nothing left out ---- */

static void test_all_met(void **state)
{
    const lm_kernel *k;
    const lm_op *op;
    (void)state;
    for (int i = 0; (op = lm_op_at(i)); i++) {
        bool met = false;
        for (int j = 0; (k = lm_cpu_kernel_at(j)); j++)
            met |= kernel_met[j] && !strcmp(k->op, op->name);
        if (!met)
            fail_msg("operator %s was never run: give it an example", op->name);
        assert_ptr_equal(lm_op_find(op->name), op);
    }
    for (int j = 0; (k = lm_cpu_kernel_at(j)); j++) {
        assert_true(j < MOST_KERNELS);
        if (lm_op_find(k->op) && k->level <= (int)lm_cpu_detect() && !kernel_met[j])
            fail_msg("kernel %s %s %s was never run", k->op, lm_dtype_name(k->act),
                     lm_cpu_level_name(k->level));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kernels),
        cmocka_unit_test(test_gradients),
        cmocka_unit_test(test_all_met),
    };
    return cmocka_run_group_tests_name("op_registry", tests, NULL, NULL);
}
