/* SPDX-License-Identifier: Apache-2.0 */
/* Whole models with joined operators: the joins that are made, and the same results as without
 * them. */
#include "fuse_case.h"
#include "mini_models.h"

static const char *refused = ""; /* by only_some */

static bool only_some(lm_backend *b, const char *op, lm_dtype act, const lm_call *c)
{
    return all(b, op, act, c) && strcmp(op, refused) != 0;
}

static bool plain_ones(lm_backend *b, const char *op, lm_dtype act, const lm_call *c)
{
    bool normed = !strcmp(op, "attention_step") && c->in[5].ndim > 0;
    bool more =
        !strcmp(op, "norm_linear") && ((const lm_norm_linear_attr *)c->attr)->act != LM_ACT_NONE;
    return all(b, op, act, c) && !normed && !more;
}

/* ---- the lists ---- */

static void check_list(int model, lm_mode mode, int64_t seq, joins j, const char *want)
{
    lm_config c;
    runner r;
    lm_build b = build_of(mode, LM_DTYPE_BF16, 2, seq);
    read_model(model, 1, &c);
    runner_new_joining(&r, &c, &b, LM_CPU_REF, 1, j);
    char *got = operators(r.model->graph);
    assert_string_equal(got, want);
    lm_free(got);
    runner_free(&r);
    lm_config_fini(&c);
}

static void models_of_one_layer(void **state)
{
    (void)state;
    check_list(TIED, LM_MODE_TRAIN, 6, all,
               "embed norm linear attention linear norm linear_act linear norm head_loss "
               "norm_dx_dw linear_dw linear_act_dx linear_dw linear_dx norm_dx_dw "
               "linear_dw linear_dx attention_dx linear_dw linear_dx norm_dx_dw embed_dw");
    check_list(LLAMA, LM_MODE_TRAIN, 6, all,
               "embed norm linear rope attention linear norm linear swiglu linear norm head_loss "
               "norm_dx_dw linear_dw linear_dx swiglu_dx linear_dw linear_dx norm_dx_dw "
               "linear_dw linear_dx attention_dx rope linear_dw linear_dx norm_dx_dw embed_dw");
    check_list(TIED, LM_MODE_EVAL, 6, all,
               "embed norm_linear attention linear norm_linear linear norm head_stats");
    check_list(TIED, LM_MODE_GENERATE, 1, all,
               "embed norm_linear attention_cached linear norm_linear linear norm_linear");
    check_list(LLAMA, LM_MODE_GENERATE, 1, all,
               "embed norm_linear attention_step linear norm_linear linear norm_linear");
    check_list(QWEN3, LM_MODE_GENERATE, 1, all,
               "embed norm_linear attention_step linear norm_linear linear norm_linear");
    check_list(QWEN3, LM_MODE_GENERATE, 4, all,
               "embed norm_linear head_norm rope attention_cached linear norm_linear linear "
               "norm rows linear");
    check_list(OLMO2, LM_MODE_GENERATE, 1, all,
               "embed linear qk_norm attention_step linear norm add linear swiglu linear norm "
               "norm_linear");
    check_list(GEMMA2, LM_MODE_GENERATE, 1, all,
               "embed norm_linear attention_step linear norm norm_linear linear norm "
               "norm_linear soft_cap");
    check_list(GEMMA3, LM_MODE_GENERATE, 1, all,
               "embed norm_linear attention_step linear norm norm_linear linear norm norm_linear");
    check_list(GEMMA2, LM_MODE_TRAIN, 6, all,
               "embed norm linear rope attention linear norm norm linear geglu linear norm norm "
               "head_loss norm_dx_dw norm_dx_dw linear_dw linear_dx geglu_dx linear_dw linear_dx "
               "norm_dx_dw norm_dx_dw linear_dw linear_dx attention_dx rope linear_dw linear_dx "
               "norm_dx_dw embed_dw");
    check_list(QWEN3, LM_MODE_GENERATE, 1, plain_ones,
               "embed norm_linear head_norm attention_step linear norm_linear swiglu linear "
               "norm_linear");
    refused = "norm_linear";
    check_list(TIED, LM_MODE_GENERATE, 1, only_some,
               "embed norm linear attention_cached linear norm linear_act linear norm linear");
}

/* Join the two halves of the head, as every backend does. */
static void join_head(lm_graph *g)
{
    size_t k = 0;
    while (g->node[k].op != &lm_op_head_stats)
        k++;
    lm_node *head = &g->node[k], *grad = head + 1;
    assert_ptr_equal(grad->op, &lm_op_head_grad);
    assert_int_equal(grad->in[3], head->out[1]);
    head->op = &lm_op_head_loss;
    head->attr = grad->attr;
    head->in[4] = head->in[3];
    head->in[3] = grad->in[4];
    head->out[3] = grad->out[2];
    head->n_in = 5;
    head->out[1] = grad->out[0];
    head->out[2] = grad->out[1];
    memmove(grad, grad + 1, (--g->n_nodes - k - 1) * sizeof *grad);
}

/* For a backend that joins nothing, the pass changes only the cast of the logits and the two halves
 * of the head. */
static void a_backend_that_joins_nothing(void **state)
{
    (void)state;
    for (int i = 0; i < N_MODELS * 3; i++) {
        lm_err e = { 0 };
        lm_config c;
        lm_model *bare;
        runner r;
        lm_mode mode = (lm_mode)(i % 3);
        lm_build b = build_of(mode, LM_DTYPE_BF16, 2, mode == LM_MODE_GENERATE ? 1 : 6);
        read_model(i / 3, 2, &c);
        if (lm_config_bidirectional(&c) && mode == LM_MODE_GENERATE) {
            lm_config_fini(&c);
            continue;
        }
        runner_new_joining(&r, &c, &b, LM_CPU_REF, 1, none);
        must(lm_model_build(&c, &b, &bare, &e), &e);
        if (mode == LM_MODE_GENERATE) {
            lm_graph *g = bare->graph;
            lm_node *last = &g->node[--g->n_nodes];
            lm_node *cast = last - (last->op == &lm_op_soft_cap);
            assert_ptr_equal(cast->op, &lm_op_cast);
            assert_int_equal(cast->in[0], cast[-1].out[0]);
            cast[-1].out[0] = cast->out[0];
            *cast = *last;
        }
        if (mode == LM_MODE_TRAIN)
            join_head(bare->graph);
        char *x = dump(bare->graph), *y = dump(r.model->graph);
        assert_string_equal(x, y);
        lm_free(x);
        lm_free(y);
        lm_model_free(bare);
        runner_free(&r);
        lm_config_fini(&c);
    }
}

/* ---- the same results ---- */

static double allowed(lm_dtype low)
{
    return low == LM_DTYPE_BF16 ? 2.5e-2 : low == LM_DTYPE_F32 ? 3e-6 : 1e-12;
}

/* Losses and gradients of three micro-batches. */
static void compare_training(const lm_config *c, const lm_build *b, joins j, const char *what)
{
    runner r[2];
    float *g[2], *block = NULL;
    double loss[2];
    runner_new_joining(&r[0], c, b, LM_CPU_REF, 1, none);
    runner_new_joining(&r[1], c, b, LM_CPU_REF, 1, j);
    check_rules(r[1].model->graph);
    for (int k = 0; k < 2; k++) {
        lm_model *m = r[k].model;
        block = k ? block : random_block(m);
        g[k] = room((size_t)m->block, sizeof **g);
        runner_weights(&r[k], block);
        feed(&r[k]);
        for (r[k].step.micro = 0; r[k].step.micro < 3; r[k].step.micro++) {
            r[k].step.more = r[k].step.micro > 0;
            ids_of(&r[k], m->tokens)[r[k].step.micro] = 7;
            runner_run(&r[k]);
        }
        loss[k] = loss_sum(&r[k]);
        for (int i = 0; b->mode == LM_MODE_TRAIN && i < m->n_params; i++)
            for (int64_t n = 0; m->grad[i] >= 0 && n < m->param[i].count; n++)
                g[k][m->param[i].offset + n] = (float)grad_at(&r[k], i, n);
    }
    if (!(fabs(loss[0] - loss[1]) <= 0.2 * allowed(b->precision.low) * loss[0]))
        fail_msg("%s: loss %.9g, joined %.9g", what, loss[0], loss[1]);
    /* A norm of the sum scales the roundings of all layers before it. */
    double times = c->layer[0].norm_sum ? 4 : 2;
    for (int i = 0; b->mode == LM_MODE_TRAIN && i < r[0].model->n_params; i++) {
        const lm_param *p = &r[0].model->param[i];
        double far = far_apart(g[1] + p->offset, g[0] + p->offset, p->count);
        assert_true((r[0].model->grad[i] < 0) == (r[1].model->grad[i] < 0));
        if (!(far <= times * allowed(b->precision.low)))
            fail_msg("%s, %s: the gradient of %s is %.2g off", what,
                     lm_dtype_name(b->precision.low), r[0].model->graph->value[p->value].name, far);
    }
    lm_free(block);
    for (int k = 0; k < 2; k++) {
        lm_free(g[k]);
        runner_free(&r[k]);
    }
}

static void training_is_the_same(void **state)
{
    (void)state;
    for (int i = 0; i < N_MODELS; i++) {
        lm_config c;
        read_model(i, 2, &c);
        for (int t = 0; t < 3; t++)
            for (int k = 0; k < N_TRAINABLE; k++) {
                lm_build b = build_of(LM_MODE_TRAIN, types[t], 2, 6);
                b.trainable = trainable[k];
                b.dropout = k == 0;
                compare_training(&c, &b, all, models[i]);
                b.mode = LM_MODE_EVAL;
                compare_training(&c, &b, all, models[i]);
            }
        lm_config_fini(&c);
    }
}

/* Activations in F32 between products in BF16: only operators of one type are joined. */
static void two_types(void **state)
{
    static const char *const keep[] = { "gelu", "swiglu", NULL };
    (void)state;
    for (int i = 0; i < N_MODELS; i++) {
        lm_config c;
        lm_build b = build_of(LM_MODE_TRAIN, LM_DTYPE_BF16, 2, 6);
        b.precision.keep = keep;
        read_model(i, 2, &c);
        compare_training(&c, &b, all, models[i]);
        b.mode = LM_MODE_EVAL;
        compare_training(&c, &b, all, models[i]);
        lm_config_fini(&c);
    }
}

/* Each joined operator is refused in turn. */
static void some_are_refused(void **state)
{
    static const char *const ops[] = { "linear_act", "linear_act_dx", "norm_linear", "norm_dx_dw" };
    (void)state;
    for (size_t k = 0; k < sizeof ops / sizeof *ops; k++) {
        lm_config c;
        lm_build b = build_of(LM_MODE_TRAIN, LM_DTYPE_F64, 2, 6);
        read_model(EXACT, 2, &c);
        refused = ops[k];
        compare_training(&c, &b, only_some, ops[k]);
        b.mode = LM_MODE_EVAL;
        compare_training(&c, &b, only_some, ops[k]);
        lm_config_fini(&c);
    }
}

/* Logits of a prompt and of the tokens after it, [STEPS, B, V]; one sequence is inactive at some
 * steps. */
enum { B = 2, PROMPT = 5, STEPS = 7 };
static float *speak(const lm_config *c, lm_dtype low, joins j)
{
    static const int32_t prompt[B] = { 5, 3 };
    runner r[2];
    int64_t v = c->vocab;
    float *logits = room((size_t)(STEPS * B * v), sizeof *logits), *block = NULL;
    int32_t used[B] = { 0 };
    for (int k = 0; k < 2; k++) {
        lm_build b = build_of(LM_MODE_GENERATE, low, B, k ? 1 : PROMPT);
        runner_new_joining(&r[k], c, &b, LM_CPU_REF, 1, j);
        check_rules(r[k].model->graph);
        block = k ? block : random_block(r[k].model);
        runner_weights(&r[k], block);
        for (int i = 0; k && i < r[1].model->n_caches;
             i++) /* both read and write the same caches */
            lm_exec_bind(r[1].exec, r[1].model->cache[i].value,
                         r[0].mem[r[0].model->cache[i].value]);
    }
    for (int step = 0; step < STEPS; step++) {
        runner *now = &r[step > 0];
        const lm_model *m = now->model;
        int64_t seq = m->build.seq;
        for (int s = 0; s < B; s++) {
            int32_t fresh = step ? !(s && step % 3 == 2) : prompt[s];
            for (int64_t t = 0; t < seq; t++) {
                ids_of(now, m->tokens)[s * seq + t] = (int32_t)(step * 7 + s * 3 + t * 5) % 23;
                ids_of(now, m->pos)[s * seq + t] = used[s] + (int32_t)t;
            }
            ids_of(now, m->used)[s] = used[s];
            ids_of(now, m->fresh)[s] = fresh;
            ids_of(now, m->rows)[s] = (int32_t)(s * seq) + (fresh ? fresh - 1 : 0);
            used[s] += fresh;
        }
        runner_run(now);
        memcpy(logits + step * B * v, lm_exec_data(now->exec, m->logits), (size_t)(B * v) * 4);
    }
    lm_free(block);
    runner_free(&r[1]);
    runner_free(&r[0]);
    return logits;
}

static void speech_is_the_same(void **state)
{
    static const joins how[] = { all, plain_ones, only_some };
    (void)state;
    refused = "norm_linear";
    for (int i = 0; i < N_MODELS; i++) {
        lm_config c;
        read_model(i, 2, &c);
        for (int t = 0; t < 9 && !lm_config_bidirectional(&c); t++) {
            float *want = speak(&c, types[t % 3], none);
            float *got = speak(&c, types[t % 3], how[t / 3]);
            for (int step = 0; step < STEPS; step++) {
                double far = far_apart(got + step * B * 23, want + step * B * 23, B * 23);
                if (!(far <= allowed(types[t % 3])))
                    fail_msg("%s, %s: logits of step %d are %.2g off", models[i],
                             lm_dtype_name(types[t % 3]), step, far);
            }
            lm_free(want);
            lm_free(got);
        }
        lm_config_fini(&c);
    }
}

/* Logits are sums of BF16 products that are not rounded to BF16, at every level of the CPU. */
static void logits_are_f32(void **state)
{
    (void)state;
    for (int level = 0; level <= (int)lm_cpu_detect(); level++)
        for (int seq = 1; seq < 40; seq += 19) {
            lm_config c;
            runner r;
            lm_build b = build_of(LM_MODE_GENERATE, LM_DTYPE_BF16, 2, seq);
            b.cache = 64;
            read_model(LLAMA, 2, &c);
            c.max_positions = 64;
            runner_new(&r, &c, &b, (lm_cpu_level)level, 1);
            float *block = random_block(r.model);
            runner_weights(&r, block);
            for (int s = 0; s < 2; s++) {
                ids_of(&r, r.model->fresh)[s] = seq;
                ids_of(&r, r.model->rows)[s] = s * seq;
            }
            runner_run(&r);
            const uint32_t *bits = lm_exec_data(r.exec, r.model->logits);
            int finer = 0;
            for (int i = 0; i < 2 * 23; i++)
                finer += (bits[i] & 0xffff) != 0;
            assert_true(finer > 23);
            assert_ptr_equal(r.model->graph->node[r.model->graph->n_nodes - 1].op, &lm_op_linear);
            lm_free(block);
            runner_free(&r);
            lm_config_fini(&c);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(models_of_one_layer),  cmocka_unit_test(a_backend_that_joins_nothing),
        cmocka_unit_test(training_is_the_same), cmocka_unit_test(two_types),
        cmocka_unit_test(some_are_refused),     cmocka_unit_test(speech_is_the_same),
        cmocka_unit_test(logits_are_f32),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
