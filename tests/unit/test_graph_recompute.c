/* SPDX-License-Identifier: Apache-2.0 */
/* Layers whose activations are computed again: the same bits, and less memory. */
#include "fuse_case.h"
#include "mini_models.h"

enum { BATCH = 2, SEQ = 6, MICROS = 3 };

static runner with(const lm_config *c, lm_build b, bool recompute, joins j)
{
    runner r;
    b.recompute = recompute;
    runner_new_joining(&r, c, &b, j ? LM_CPU_REF : lm_cpu_detect(), 1, j);
    return r;
}

static bool same(const runner *a, const runner *b, lm_vid v)
{
    const lm_tensor *t = &a->model->graph->value[v].t;
    return !memcmp(lm_exec_data(a->exec, v), lm_exec_data(b->exec, v),
                   lm_plain_bytes(t->dtype, lm_tensor_count(t)));
}

/* Each node reads what earlier ones have made. */
static void check_order(const lm_graph *g)
{
    bool *made = room(g->n_values, sizeof *made);
    for (size_t k = 0; k < g->n_nodes; k++) {
        const lm_node *n = &g->node[k];
        for (int i = 0; i < n->n_in; i++)
            assert_true(n->in[i] < 0 || g->value[n->in[i]].role != LM_ROLE_ACT || made[n->in[i]]);
        for (int i = 0; i < n->n_out; i++)
            if (n->out[i] >= 0)
                made[n->out[i]] = true;
    }
    lm_free(made);
}

/* Losses and gradients of some micro-batches, bit for bit. */
static void compare(const lm_config *c, const lm_build *b, joins j, const char *what)
{
    runner r[2] = { with(c, *b, false, j), with(c, *b, true, j) };
    lm_model *m = r[0].model;
    float *block = random_block(m);
    check_order(r[1].model->graph);
    for (int k = 0; k < 2; k++) {
        runner_weights(&r[k], block);
        feed(&r[k]);
        for (r[k].step.micro = 0; r[k].step.micro < MICROS; r[k].step.micro++) {
            r[k].step.more = r[k].step.micro > 0;
            runner_run(&r[k]);
        }
    }
    assert_int_equal(m->loss, r[1].model->loss);
    if (!same(&r[0], &r[1], m->loss))
        fail_msg("%s: other losses", what);
    for (int i = 0; i < m->n_params; i++) {
        assert_int_equal(m->grad[i], r[1].model->grad[i]);
        if (m->grad[i] >= 0 && !same(&r[0], &r[1], m->grad[i]))
            fail_msg("%s, %s: another gradient of %s", what, lm_dtype_name(b->precision.low),
                     m->graph->value[m->param[i].value].name);
    }
    lm_free(block);
    for (int k = 0; k < 2; k++)
        runner_free(&r[k]);
}

static void bits_are_the_same(void **state)
{
    (void)state;
    for (int i = 0; i < N_MODELS; i++) {
        lm_config c;
        read_model(i, 3, &c);
        for (int t = 0; t < 3; t++)
            for (int k = 0; k < N_TRAINABLE; k++) {
                lm_build b = build_of(LM_MODE_TRAIN, types[t], BATCH, SEQ);
                b.trainable = trainable[k];
                b.dropout = k == 0;
                b.halves = k == 1;
                b.value = k == 2;
                b.entropy = k == 2 ? LM_ENTROPY_READ : LM_ENTROPY_NONE;
                compare(&c, &b, all, models[i]);
                compare(&c, &b, NULL, models[i]);
            }
        lm_config_fini(&c);
    }
}

/* The operators that run again, layer by layer. */
static void check_again(int model, int layers, bool (*what)(void *, const char *), const char *want)
{
    lm_err e = { 0 };
    lm_config c;
    lm_buf text = { 0 };
    lm_build b = build_of(LM_MODE_TRAIN, LM_DTYPE_BF16, BATCH, SEQ);
    b.trainable = what;
    read_model(model, layers, &c);
    runner r = with(&c, b, true, all);
    const lm_graph *g = r.model->graph;
    int layer = -1;
    for (size_t k = 0; k < g->n_nodes; k++) {
        const lm_node *n = &g->node[k];
        if (n->phase != LM_PHASE_RECOMPUTE)
            continue;
        if (n->layer != layer)
            must(lm_buf_addf(&text, &e, "L%d ", n->layer), &e);
        must(lm_buf_addf(&text, &e, "%s ", n->op->name), &e);
        layer = n->layer;
    }
    must(lm_buf_addf(&text, &e, "%c", 0), &e);
    assert_string_equal(text.data, want);
    lm_buf_fini(&text);
    runner_free(&r);
    lm_config_fini(&c);
}

static void what_runs_again(void **state)
{
    (void)state;
    check_again(TIED, 2, whole_model,
                "L1 norm linear attention linear norm linear_act "
                "L0 norm linear attention linear norm linear_act ");
    check_again(LLAMA, 1, whole_model, "L0 norm linear rope attention linear norm linear swiglu ");
    /* nothing of a layer without backward */
    check_again(LLAMA, 2, second_layer, "L1 norm linear rope attention linear norm linear swiglu ");
    check_again(
        GEMMA3, 1, no_vectors,
        "L0 norm linear head_norm rope attention linear norm norm linear geglu linear norm ");
}

/* Of each layer only its two inputs are kept, the residual stream and the branch to be added to it. */
static void memory_of_a_layer(void **state)
{
    enum { WIDTH = 16, FEW = 3, MANY = 7 };
    const size_t stream = (BATCH * SEQ * WIDTH * sizeof(float) + 127) / 128 * 128;
    (void)state;
    for (int again = 0; again < 2; again++) {
        size_t bound[2], bytes[2];
        for (int k = 0; k < 2; k++) {
            lm_err e = { 0 };
            lm_config c;
            lm_plan plan = { 0 };
            read_model(LLAMA, k ? MANY : FEW, &c);
            runner r = with(&c, build_of(LM_MODE_TRAIN, LM_DTYPE_F32, BATCH, SEQ), again, NULL);
            must(lm_plan_make(r.model->graph, r.backend, NULL, 0, &plan, &e), &e);
            bound[k] = plan.lower_bound;
            bytes[k] = plan.bytes;
            lm_plan_fini(&plan);
            runner_free(&r);
            lm_config_fini(&c);
        }
        if (again)
            assert_int_equal(bound[1] - bound[0], (MANY - FEW) * 2 * stream);
        else
            assert_true(bound[1] - bound[0] > (MANY - FEW) * 5 * stream);
        assert_true(bytes[0] <= bound[0] + bound[0] / 20 && bytes[1] <= bound[1] + bound[1] / 20);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bits_are_the_same),
        cmocka_unit_test(what_runs_again),
        cmocka_unit_test(memory_of_a_layer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
