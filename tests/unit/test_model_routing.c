/* SPDX-License-Identifier: Apache-2.0 */
/* Losses of routers in the graph of a model: their values against plain sums over tokens and experts, all
 * gradients against finite differences, and the same with recomputation. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "mini_models.h"
#include "model/arch.h"
#include "op/ops.h"

enum { LAYERS = 3, BATCH = 2, SEQ = 7, ROWS = BATCH * SEQ, MOST = 8 };

/* Layer 1 has no experts. */
static const char *const mixtures[] = {
    "{\"model_type\":\"qwen3_moe\",\"vocab_size\":23,\"hidden_size\":16,\"intermediate_size\":20,"
    "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"num_hidden_layers\":3,"
    "\"max_position_embeddings\":32,\"num_experts\":5,\"num_experts_per_tok\":2,"
    "\"moe_intermediate_size\":12,\"norm_topk_prob\":true,\"mlp_only_layers\":[1],"
    "\"output_router_logits\":true,\"router_aux_loss_coef\":0.25}",
    "{\"model_type\":\"mixtral\",\"vocab_size\":23,\"hidden_size\":16,\"intermediate_size\":12,"
    "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"num_hidden_layers\":3,"
    "\"max_position_embeddings\":32,\"num_local_experts\":4,\"num_experts_per_tok\":2}",
    "{\"model_type\":\"mixtral\",\"vocab_size\":23,\"hidden_size\":16,\"intermediate_size\":12,"
    "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"num_hidden_layers\":3,"
    "\"max_position_embeddings\":32,\"num_local_experts\":5,\"num_experts_per_tok\":2,"
    "\"gate_add_noise\":true,\"gate_noise_epsilon\":0.0625}",
};
enum { NOISY = 2 };

static void read_mixture(int i, lm_config *c)
{
    lm_err e = { 0 };
    json_t *o;
    must(lm_json_parse(mixtures[i], strlen(mixtures[i]), "config", &o, &e), &e);
    must(lm_config_read(o, "config", c, &e), &e);
    json_decref(o);
}

static void open_runner(runner *r, const lm_config *c, const lm_routing_losses *w, lm_dtype low,
                        bool recompute, float **block)
{
    lm_build b = build_of(LM_MODE_TRAIN, low, BATCH, SEQ);
    b.routing = *w;
    b.recompute = recompute;
    runner_new(r, c, &b, low == LM_DTYPE_F64 ? LM_CPU_REF : lm_cpu_detect(), 2);
    *block = random_block(r->model);
    runner_weights(r, *block);
    feed(r);
}

static double aux_of(const runner *r)
{
    const lm_model *m = r->model;
    return lm_get(m->graph->value[m->aux].t.dtype, lm_exec_data(r->exec, m->aux), 0);
}

/* ---- the values ---- */

/* Probabilities and choices of one layer, from its logits. */
typedef struct {
    int64_t E, K;
    double p[ROWS][MOST], lse[ROWS];
    int32_t expert[ROWS][MOST];
} routes;

static bool read_routes(const runner *r, int64_t l, routes *out)
{
    const lm_routed_layer *x = &r->model->routed[l];
    if (x->z == LM_NONE)
        return false;
    const double *z = lm_exec_data(r->exec, x->z);
    const int32_t *expert = lm_exec_data(r->exec, x->expert);
    out->E = r->model->config.layer[l].moe.experts;
    out->K = r->model->config.layer[l].moe.chosen;
    for (int t = 0; t < ROWS; t++) {
        double sum = 0;
        for (int64_t e = 0; e < out->E; e++)
            sum += exp(z[t * out->E + e]);
        out->lse[t] = log(sum);
        for (int64_t e = 0; e < out->E; e++)
            out->p[t][e] = exp(z[t * out->E + e]) / sum;
        for (int64_t k = 0; k < out->K; k++)
            out->expert[t][k] = expert[t * out->K + k];
    }
    return true;
}

static double load_of(const routes *x, int from, int n, int64_t e)
{
    double load = 0;
    for (int t = from; t < from + n; t++)
        for (int64_t k = 0; k < x->K; k++)
            load += x->expert[t][k] == e;
    return load;
}

static double sum_of(const routes *x, int from, int n, int64_t e)
{
    double sum = 0;
    for (int t = from; t < from + n; t++)
        sum += x->p[t][e];
    return sum;
}

static double balance_of(const routes *x, int from, int n)
{
    double sum = 0;
    for (int64_t e = 0; e < x->E; e++)
        sum += load_of(x, from, n, e) * sum_of(x, from, n, e);
    return (double)x->E / (double)(x->K * n * n) * sum;
}

static double plain_losses(const runner *r, const lm_routing_losses *w)
{
    double sum = 0, loads[MOST] = { 0 }, shares[MOST] = { 0 }, layers = 0, both = 0;
    routes x = { 0 };
    for (int64_t l = 0; l < LAYERS; l++) {
        if (!read_routes(r, l, &x))
            continue;
        layers++;
        sum += w->layer * balance_of(&x, 0, ROWS);
        for (int s = 0; s < BATCH; s++)
            sum += w->sequence / BATCH * balance_of(&x, s * SEQ, SEQ);
        for (int t = 0; t < ROWS; t++)
            sum += w->z / ROWS * x.lse[t] * x.lse[t];
        for (int64_t e = 0; e < x.E; e++) {
            loads[e] += load_of(&x, 0, ROWS, e);
            shares[e] += sum_of(&x, 0, ROWS, e);
        }
    }
    for (int64_t e = 0; e < x.E; e++)
        both += loads[e] / (layers * ROWS) * shares[e] / (layers * ROWS);
    return sum + w->model * (double)x.E * both;
}

static const lm_routing_losses kinds[] = {
    { .layer = 0.5 },
    { .sequence = 0.75 },
    { .model = 0.25 },
    { .z = 0.125 },
    { .layer = 0.5, .sequence = 0.75, .model = 0.25, .z = 0.125 },
};
enum { KINDS = sizeof kinds / sizeof *kinds };

static void test_values(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < KINDS; k++) {
            lm_config c;
            runner r;
            float *block;
            read_mixture(i, &c);
            open_runner(&r, &c, &kinds[k], LM_DTYPE_F64, false, &block);
            runner_run(&r);
            double got = aux_of(&r), want = plain_losses(&r, &kinds[k]);
            if (!(fabs(got - want) < 1e-12 * want))
                fail_msg("model %d, losses %d: %.15g, plainly %.15g", i, k, got, want);
            lm_free(block);
            runner_free(&r);
            lm_config_fini(&c);
        }
}

/* The coefficient of the config, which a build can ask for; without a loss there is no root. */
static void test_of_config(void **state)
{
    const lm_routing_losses of_config = { .model = LM_ROUTING_OF_CONFIG }, none = { 0 };
    (void)state;
    for (int i = 0; i < 2; i++) {
        lm_config c;
        runner r;
        float *block;
        read_mixture(i, &c);
        open_runner(&r, &c, &of_config, LM_DTYPE_F64, false, &block);
        runner_run(&r);
        assert_int_equal(r.model->aux != LM_NONE, i == 0);
        if (i == 0)
            assert_true(fabs(aux_of(&r) - plain_losses(&r, &kinds[2])) < 1e-12);
        lm_free(block);
        runner_free(&r);
        open_runner(&r, &c, &none, LM_DTYPE_F64, false, &block);
        assert_int_equal(r.model->aux, LM_NONE);
        assert_int_equal(r.model->daux, LM_NONE);
        lm_free(block);
        runner_free(&r);
        lm_config_fini(&c);
    }
}

/* ---- gradients ---- */

static double loss_at(runner *r, double *w, const double *kept, const double *d, int64_t n,
                      double h)
{
    for (int64_t i = 0; i < n; i++)
        w[i] = kept[i] + h * d[i];
    runner_run(r);
    return loss_sum(r) + 0.5 * aux_of(r);
}

static void check_param(runner *r, int p)
{
    const lm_param *param = &r->model->param[p];
    const int64_t n = param->count;
    double *w = r->mem[param->value], *kept = room((size_t)n, sizeof *w),
           *d = room((size_t)n, sizeof *d), got = 0, norm = 0, h = 1e-6;
    const lm_rng rng = lm_rng_make(2, "direction", (uint64_t)p);
    runner_run(r);
    for (int64_t i = 0; i < n; i++) {
        kept[i] = w[i];
        d[i] = lm_rng_normal(rng, (uint64_t)i);
        got += grad_at(r, p, i) * d[i];
        norm += grad_at(r, p, i) * grad_at(r, p, i);
    }
    double want = (loss_at(r, w, kept, d, n, h) - loss_at(r, w, kept, d, n, -h)) / (2 * h);
    loss_at(r, w, kept, d, n, 0);
    if (!(fabs(got - want) <= 1e-6 * (fabs(want) + sqrt(norm)) + 1e-7))
        fail_msg("%s: gradient %.12g, finite differences %.12g",
                 r->model->graph->value[param->value].name, got, want);
    lm_free(kept);
    lm_free(d);
}

static void test_gradients(void **state)
{
    (void)state;
    for (int k = 0; k < KINDS; k++) {
        lm_config c;
        runner r;
        float *block;
        read_mixture(0, &c);
        open_runner(&r, &c, &kinds[k], LM_DTYPE_F64, false, &block);
        for (int i = 0; i < ROWS; i++) /* so that routers train by their losses above all */
            lm_set(LM_DTYPE_F64, r.mem[r.model->scale], i, 0.01);
        for (int i = 0; i < ROWS; i++)
            ((int32_t *)r.mem[r.model->targets])[i] = -1;
        lm_set(LM_DTYPE_F64, r.mem[r.model->daux], 0, 0.5);
        for (int p = 0; p < r.model->n_params; p++)
            check_param(&r, p);
        lm_free(block);
        runner_free(&r);
        lm_config_fini(&c);
    }
}

/* With recomputation each loss is computed once, and all bits are the same. */
static void test_recompute(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        lm_config c;
        float *g[2], *block;
        double aux[2];
        read_mixture(i, &c);
        for (int again = 0; again < 2; again++) {
            runner r;
            int losses = 0;
            open_runner(&r, &c, &kinds[KINDS - 1], LM_DTYPE_F32, again, &block);
            runner_run(&r);
            aux[again] = aux_of(&r);
            g[again] = room((size_t)r.model->block, sizeof(float));
            grad_block(&r, g[again]);
            for (size_t k = 0; k < r.model->graph->n_nodes; k++)
                losses += r.model->graph->node[k].op == &lm_op_route_aux;
            assert_int_equal(losses, 2 * (i ? 3 : 2));
            if (again)
                assert_memory_equal(g[0], g[1], (size_t)r.model->block * sizeof(float));
            lm_free(block);
            runner_free(&r);
        }
        assert_true(aux[0] == aux[1]);
        lm_free(g[0]);
        lm_free(g[1]);
        lm_config_fini(&c);
    }
}

/* ---- noise that routers learn ---- */

/* The normal number with distribution function u, by bisection. */
static double quantile(double u)
{
    double a = -9, b = 9;
    for (int i = 0; i < 80; i++) {
        const double m = (a + b) / 2;
        *(0.5 * erfc(-m * M_SQRT1_2) < u ? &a : &b) = m;
    }
    return a;
}

/* Node number n of an operator. */
static const lm_node *node_of(const runner *r, const lm_op *op, int64_t n)
{
    const lm_graph *g = r->model->graph;
    for (size_t k = 0; k < g->n_nodes; k++)
        if (g->node[k].op == op && n-- == 0)
            return &g->node[k];
    fail_msg("no such node of %s", op->name);
    return NULL;
}

static double number(const runner *r, lm_vid v, int64_t i)
{
    return lm_get(r->model->graph->value[v].t.dtype, lm_exec_data(r->exec, v), i);
}

/* Of a layer: clean logits, deviations and noisy logits of each token and expert. */
typedef struct {
    double clean[ROWS][MOST], deviation[ROWS][MOST], noisy[ROWS][MOST];
} noise;

/* What the router of layer l reads, by which the definition makes all of them; and the graph has the same. */
static void define_noise(const runner *r, int64_t l, noise *out)
{
    const lm_model *m = r->model;
    const lm_node *products[2] = { node_of(r, &lm_op_matmul, 2 * l),
                                   node_of(r, &lm_op_matmul, 2 * l + 1) };
    const int64_t E = m->config.layer[l].moe.experts, C = m->config.width;
    lm_rng rng = lm_rng_make(r->step.seed, "noise", (uint64_t)(2 * l));
    const uint64_t first = lm_rng_first(
        &rng, (uint64_t)r->step.step * 65536 + (uint64_t)r->step.micro, (uint64_t)(ROWS * E));
    for (int64_t i = 0; i < ROWS * E; i++) {
        double sum[2] = { 0, 0 };
        for (int k = 0; k < 2; k++)
            for (int64_t j = 0; j < C; j++)
                sum[k] += number(r, products[k]->in[0], i / E * C + j) *
                          number(r, products[k]->in[1], i % E * C + j);
        const uint32_t draw = lm_rng_u32(rng, first + (uint64_t)i);
        const double u = ((draw >> 8) + 0.5) / 16777216, s = log1p(exp(sum[1])) + 0.0625;
        out->clean[i / E][i % E] = sum[0];
        out->deviation[i / E][i % E] = s;
        out->noisy[i / E][i % E] = sum[0] + s * quantile(u);
        const double got = number(r, m->routed[l].z, i), want = out->noisy[i / E][i % E];
        if (!(fabs(got - want) < 1e-10 * (1 + fabs(want))))
            fail_msg("layer %d, number %d: %.15g, plainly %.15g", (int)l, (int)i, got, want);
    }
}

/* True if expert e is one of the k with the largest numbers y, if its own were v. */
static int better(const double *y, int64_t E, int64_t e, double v)
{
    int n = 0;
    for (int64_t i = 0; i < E; i++)
        n += i != e && y[i] > v;
    return n;
}

static double variation_of(const double *x, int64_t n)
{
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < n; i++)
        sum += x[i] / (double)n;
    for (int64_t i = 0; i < n; i++)
        squares += (x[i] - sum) * (x[i] - sum) / (double)n;
    return squares / (sum * sum);
}

/* Probability that a number with this mean and deviation is among the k largest: the bar is found by moving v. */
static double chance(const double *y, int64_t E, int64_t k, int64_t e, double mean, double s)
{
    double bar = -INFINITY;
    for (int64_t i = 0; i < E; i++)
        if (i != e && better(y, E, e, y[i]) < k && (!isfinite(bar) || y[i] < bar))
            bar = y[i];
    return 0.5 * erfc(-(mean - bar) / s * M_SQRT1_2);
}

static double plain_loads(const runner *r, const lm_routing_losses *w)
{
    double all = 0;
    for (int64_t l = 0; l < LAYERS; l++) {
        const lm_moe *m = &r->model->config.layer[l].moe;
        double importance[MOST] = { 0 }, load[MOST] = { 0 };
        noise n;
        define_noise(r, l, &n);
        for (int t = 0; t < ROWS; t++) {
            const double *y = n.noisy[t];
            double sum = 0;
            for (int64_t e = 0; e < m->experts; e++)
                sum += better(y, m->experts, e, y[e]) < m->chosen ? exp(y[e]) : 0;
            for (int64_t e = 0; e < m->experts; e++) {
                if (better(y, m->experts, e, y[e]) < m->chosen)
                    importance[e] += exp(y[e]) / sum;
                load[e] += chance(y, m->experts, m->chosen, e, n.clean[t][e], n.deviation[t][e]);
            }
        }
        all += w->importance * variation_of(importance, m->experts) +
               w->load * variation_of(load, m->experts);
    }
    return all;
}

static const lm_routing_losses of_loads[] = {
    { .importance = 0.75 },
    { .load = 1.5 },
    { .importance = 0.5, .load = 0.25 },
};

static void test_learned_noise(void **state)
{
    (void)state;
    for (int k = 0; k < 3; k++) {
        lm_config c;
        runner r;
        float *block;
        read_mixture(NOISY, &c);
        open_runner(&r, &c, &of_loads[k], LM_DTYPE_F64, false, &block);
        r.step = (lm_step){ .seed = 11, .step = 3, .micro = 2 };
        runner_run(&r);
        const double got = aux_of(&r), want = plain_loads(&r, &of_loads[k]);
        if (!(fabs(got - want) < 1e-9 * want))
            fail_msg("losses %d: %.15g, plainly %.15g", k, got, want);
        for (int i = 0; i < ROWS; i++)
            lm_set(LM_DTYPE_F64, r.mem[r.model->scale], i, 0.01);
        lm_set(LM_DTYPE_F64, r.mem[r.model->daux], 0, 0.5);
        for (int i = 0; i < ROWS; i++)
            ((int32_t *)r.mem[r.model->targets])[i] = -1;
        for (int p = 0; p < r.model->n_params; p++)
            check_param(&r, p);
        lm_free(block);
        runner_free(&r);
        lm_config_fini(&c);
    }
}

/* A new router's noise has a gradient, although its matrix is zeros; evaluation has none of it. */
static void test_fresh_noise(void **state)
{
    (void)state;
    lm_config c;
    runner r;
    float *block;
    read_mixture(NOISY, &c);
    open_runner(&r, &c, &of_loads[2], LM_DTYPE_F64, false, &block);
    lm_set(LM_DTYPE_F64, r.mem[r.model->daux], 0, 0.5);
    const int at =
        lm_model_slice(r.model, "model.layers.1.block_sparse_moe.gate.weight_noise.weight");
    const int p = r.model->slice[at].param;
    assert_int_equal(r.model->slice[at].init, LM_INIT_ZEROS);
    const int64_t n = r.model->param[p].count;
    for (int64_t i = 0; i < n; i++)
        ((double *)r.mem[r.model->param[p].value])[i] = 0;
    for (int i = 0; i < ROWS; i++)
        lm_set(LM_DTYPE_F64, r.mem[r.model->scale], i, 1);
    check_param(&r, p);
    double most = 0;
    for (int64_t i = 0; i < n; i++)
        most = fmax(most, fabs(grad_at(&r, p, i)));
    assert_true(most > 1e-6);
    lm_free(block);
    runner_free(&r);
    const lm_build b = build_of(LM_MODE_EVAL, LM_DTYPE_F64, BATCH, SEQ);
    runner_new(&r, &c, &b, LM_CPU_REF, 1);
    for (size_t k = 0; k < r.model->graph->n_nodes; k++)
        assert_ptr_not_equal(r.model->graph->node[k].op, &lm_op_noise);
    runner_free(&r);
    lm_config_fini(&c);
}

/* ---- types ---- */

#define SIZES                                                                           \
    "\"vocab_size\":23,\"hidden_size\":16,\"intermediate_size\":12,"                    \
    "\"num_attention_heads\":4,\"num_hidden_layers\":2,\"max_position_embeddings\":32," \
    "\"num_experts_per_tok\":2,\"moe_intermediate_size\":8,"                            \
    "\"first_k_dense_replace\":1,\"n_group\":1,\"topk_group\":1,"
#define EXPERTS "\"num_experts\":4,\"num_key_value_heads\":2"

/* One of each architecture with experts. */
static const char *const architectures[] = {
    "{\"model_type\":\"mixtral\"," SIZES
    "\"num_local_experts\":4,\"num_key_value_heads\":2,\"gate_add_noise\":true}",
    "{\"model_type\":\"qwen2_moe\"," SIZES EXPERTS "}",
    "{\"model_type\":\"qwen3_moe\"," SIZES EXPERTS "}",
    "{\"model_type\":\"qwen3_next\"," SIZES EXPERTS ",\"num_nextn_predict_layers\":1}",
    "{\"model_type\":\"gpt_oss\"," SIZES
    "\"num_local_experts\":4,\"num_key_value_heads\":2,\"head_dim\":8}",
    "{\"model_type\":\"dots1\"," SIZES "\"n_routed_experts\":4}",
    "{\"model_type\":\"deepseek_v2\"," SIZES "\"n_routed_experts\":4,\"q_lora_rank\":null}",
    "{\"model_type\":\"deepseek_v3\"," SIZES
    "\"n_routed_experts\":4,\"num_nextn_predict_layers\":2}",
};
enum { N_ARCHITECTURES = sizeof architectures / sizeof *architectures };

static lm_dtype type_of(const lm_model *m, const char *name)
{
    const int at = lm_model_slice(m, name);
    if (at < 0)
        fail_msg("no tensor %s", name);
    return m->graph->value[m->param[m->slice[at].param].value].t.dtype;
}

/* Of all layers with experts, those of modules for the tokens further on included; returns how many there are. */
static int check_types(const lm_config *c, const lm_build *b)
{
    const lm_dtype want = b->choice.low ? LM_DTYPE_BF16 : LM_DTYPE_F32;
    const bool train = b->mode == LM_MODE_TRAIN;
    char name[LM_TENSOR_NAME];
    lm_err e = { 0 };
    lm_model *m;
    int n = 0;
    must(lm_model_build(c, b, &m, &e), &e);
    for (int64_t l = 0; l < (train ? lm_config_depth(c) : c->layers); l++) {
        const lm_moe *y = &c->layer[l].moe;
        if (!y->experts)
            continue;
        const int64_t named = lm_config_named_layer(c, l);
        lm_tensor_hf_name(c->arch, LM_PART_ROUTER, named, false, name);
        if (type_of(m, name) != want)
            fail_msg("mode %d: %s is %s", (int)b->mode, name, lm_dtype_name(type_of(m, name)));
        if (y->router_bias)
            assert_int_equal(
                type_of(m, lm_tensor_hf_name(c->arch, LM_PART_ROUTER, named, true, name)),
                LM_DTYPE_F32);
        lm_expert_hf_name(c->arch, y->stacked ? LM_PART_STACK_IN : LM_PART_EXPERT_DOWN, named,
                          y->stacked ? -1 : 1, false, name);
        if (type_of(m, name) != LM_DTYPE_BF16)
            fail_msg("mode %d: %s is %s", (int)b->mode, name, lm_dtype_name(type_of(m, name)));
        if (!b->choice.low && m->routed && m->routed[l].z != LM_NONE)
            assert_int_equal(m->graph->value[m->routed[l].z].t.dtype, LM_DTYPE_F32);
        n++;
    }
    lm_model_free(m);
    return n;
}

/* Routers are F32 beside experts in BF16, in each mode, unless a model is asked for with the low type of all. */
static void routers_stay_wide(void **state)
{
    (void)state;
    for (int k = 0; k < N_ARCHITECTURES; k++) {
        lm_config c;
        lm_err e = { 0 };
        json_t *o;
        must(lm_json_parse(architectures[k], strlen(architectures[k]), "config", &o, &e), &e);
        must(lm_config_read(o, "config", &c, &e), &e);
        for (int mode = 0; mode < 6; mode++) {
            static const lm_mode modes[] = { LM_MODE_TRAIN, LM_MODE_EVAL, LM_MODE_GENERATE };
            lm_build b = build_of(modes[mode / 2], LM_DTYPE_BF16, BATCH, SEQ);
            b.choice.low = mode % 2;
            b.ahead = mode / 2 ? LM_AHEAD_NONE : LM_AHEAD_RUNS;
            if (!check_types(&c, &b))
                fail_msg("%s: no experts", architectures[k]);
        }
        lm_config_fini(&c);
        json_decref(o);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(routers_stay_wide), cmocka_unit_test(test_values),
        cmocka_unit_test(test_of_config),    cmocka_unit_test(test_gradients),
        cmocka_unit_test(test_recompute),    cmocka_unit_test(test_learned_noise),
        cmocka_unit_test(test_fresh_noise),
    };
    return cmocka_run_group_tests_name("model_routing", tests, NULL, NULL);
}
