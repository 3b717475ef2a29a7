/* Operators that are joined: which ones, where not, and that a joined graph computes what its parts do.
 *
 * The backend is the CPU's reference, which has all joined operators, made to say that it joins them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/rng.h"
#include "kernels/attention.h"
#include "kernels/elementwise.h"
#include "kernels/linear.h"
#include "kernels/norm.h"
#include "kernels/rope.h"
#include "model_run.h"
#include "op/fuse.h"
#include "op/ops.h"

/* ---- what a backend says ---- */

static const char *refused = ""; /* by only_some */

static bool all(lm_backend *b, const char *op, lm_dtype act, const lm_call *c)
{
    const lm_kernel *k = b->kernel(b, op, act);
    return k && (!k->work || k->work(c, b->threads) != SIZE_MAX);
}

static bool none(lm_backend *b, const char *op, lm_dtype act, const lm_call *c)
{
    (void)b, (void)op, (void)act, (void)c;
    return false;
}

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

typedef bool (*joins)(lm_backend *, const char *, lm_dtype, const lm_call *);

/* ---- models ---- */

#define SMALL                                                                      \
    "\"vocab_size\":23,\"hidden_size\":16,\"intermediate_size\":20,"               \
    "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"num_hidden_layers\":%d" \
    ",\"max_position_embeddings\":32"
#define GPT2 "\"vocab_size\":23,\"n_embd\":16,\"n_head\":4,\"n_positions\":16,\"n_layer\":%d"

enum { TIED, EXACT, LLAMA, LLAMA_BIAS, MISTRAL, QWEN3, N_MODELS };
static const char *const models[N_MODELS] = {
    "{\"model_type\":\"gpt2\"," GPT2 "}",
    "{\"model_type\":\"gpt2\"," GPT2 ",\"tie_word_embeddings\":false,"
    "\"activation_function\":\"gelu\",\"n_inner\":24}",
    "{\"model_type\":\"llama\"," SMALL "}",
    "{\"model_type\":\"llama\"," SMALL ",\"tie_word_embeddings\":true,\"attention_bias\":true,"
    "\"mlp_bias\":true}",
    "{\"model_type\":\"mistral\"," SMALL ",\"sliding_window\":3}",
    "{\"model_type\":\"qwen3\"," SMALL ",\"head_dim\":6,\"tie_word_embeddings\":true}",
};

static void read_model(int i, int layers, lm_config *c)
{
    lm_err e = { 0 };
    json_t *o;
    char text[512];
    int n = snprintf(text, sizeof text, models[i], layers);
    must(lm_json_parse(text, (size_t)n, "config", &o, &e), &e);
    must(lm_config_read(o, "config", c, &e), &e);
    json_decref(o);
}

static lm_build build_of(lm_mode mode, lm_dtype low, int64_t batch, int64_t seq)
{
    return (lm_build){
        .mode = mode, .batch = batch, .seq = seq, .cache = 14, .precision = { .low = low }
    };
}

/* Random numbers everywhere: fresh norms and biases would hide mistakes. */
static float *random_block(const lm_model *m)
{
    float *block = room((size_t)m->block, sizeof *block);
    for (int i = 0; i < m->n_params; i++) {
        const lm_param *p = &m->param[i];
        lm_rng r = lm_rng_make(9, "weights", (uint64_t)i);
        for (int64_t k = 0; k < p->count; k++)
            block[p->offset + k] = (float)(0.3 * lm_rng_normal(r, (uint64_t)k));
    }
    return block;
}

static char *dump(const lm_graph *g)
{
    lm_err e = { 0 };
    lm_buf b = { 0 };
    must(lm_graph_dump(g, &b, &e), &e);
    must(lm_buf_addf(&b, &e, "%c", 0), &e);
    return (char *)b.data;
}

/* ---- the lists ---- */

static char *operators(const lm_graph *g)
{
    lm_err e = { 0 };
    lm_buf b = { 0 };
    for (size_t k = 0; k < g->n_nodes; k++)
        must(lm_buf_addf(&b, &e, k ? " %s" : "%s", g->node[k].op->name), &e);
    must(lm_buf_addf(&b, &e, "%c", 0), &e);
    return (char *)b.data;
}

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
               "embed norm_linear attention linear norm_linear linear norm head_loss");
    check_list(TIED, LM_MODE_GENERATE, 1, all,
               "embed norm_linear attention_cached linear norm_linear linear norm_linear");
    check_list(LLAMA, LM_MODE_GENERATE, 1, all,
               "embed norm_linear attention_step linear norm_linear linear norm_linear");
    check_list(QWEN3, LM_MODE_GENERATE, 1, all,
               "embed norm_linear attention_step linear norm_linear linear norm_linear");
    check_list(QWEN3, LM_MODE_GENERATE, 4, all,
               "embed norm_linear head_norm rope attention_cached linear norm_linear linear "
               "norm rows linear");
    check_list(QWEN3, LM_MODE_GENERATE, 1, plain_ones,
               "embed norm_linear head_norm attention_step linear norm_linear swiglu linear "
               "norm_linear");
    refused = "norm_linear";
    check_list(TIED, LM_MODE_GENERATE, 1, only_some,
               "embed norm linear attention_cached linear norm linear_act linear norm linear");
}

/* Nothing but the cast of the logits goes where a backend joins nothing. */
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
        runner_new_joining(&r, &c, &b, LM_CPU_REF, 1, none);
        must(lm_model_build(&c, &b, &bare, &e), &e);
        if (mode == LM_MODE_GENERATE) {
            lm_graph *g = bare->graph;
            lm_node *cast = &g->node[--g->n_nodes];
            assert_ptr_equal(cast->op, &lm_op_cast);
            assert_int_equal(cast->in[0], cast[-1].out[0]);
            cast[-1].out[0] = cast->out[0];
        }
        char *x = dump(bare->graph), *y = dump(r.model->graph);
        assert_string_equal(x, y);
        lm_free(x);
        lm_free(y);
        lm_model_free(bare);
        runner_free(&r);
        lm_config_fini(&c);
    }
}

/* What the pass has made could have been appended. */
static void check_rules(const lm_graph *g)
{
    lm_tensor in[LM_MAX_IN], out[LM_MAX_OUT], have[LM_MAX_OUT];
    for (size_t k = 0; k < g->n_nodes; k++) {
        const lm_node *n = &g->node[k];
        lm_err e = { 0 };
        unsigned want = 0;
        lm_call c = lm_node_call(g, n, in, out);
        memcpy(have, out, sizeof have);
        assert_true(n->op != &lm_op_norm_dx_dw || n->phase == LM_PHASE_BACKWARD_INPUT);
        assert_true(!k || n->phase != LM_PHASE_FORWARD || n[-1].phase == LM_PHASE_FORWARD);
        for (int i = 0; i < n->n_in; i++)
            assert_true(n->in[i] >= 0 || (n->op->optional_in >> i & 1));
        for (int i = 0; i < n->n_out; i++)
            want |= (unsigned)(n->out[i] >= 0) << i;
        must(n->op->shape(&c, want, &e), &e);
        for (int i = 0; i < n->n_out; i++) {
            bool sums = i == 0 && have[i].dtype == LM_DTYPE_F32 &&
                        (n->op == &lm_op_linear || n->op == &lm_op_norm_linear);
            if (n->out[i] < 0)
                continue;
            assert_true(lm_same_shape(&have[i], &out[i]));
            assert_true(sums || have[i].dtype == out[i].dtype);
        }
    }
}

/* ---- the same results ---- */

static double allowed(lm_dtype low)
{
    return low == LM_DTYPE_BF16 ? 2.5e-2 : low == LM_DTYPE_F32 ? 3e-6 : 1e-12;
}

static void feed(runner *r)
{
    const lm_model *m = r->model;
    lm_rng rng = lm_rng_make(5, "tokens", 0);
    for (int64_t i = 0; i < m->build.batch * m->build.seq; i++) {
        ids_of(r, m->tokens)[i] = (int32_t)lm_rng_below(rng, (uint64_t)i * 2, 23);
        ids_of(r, m->targets)[i] =
            i % 5 == 3 ? -1 : (int32_t)lm_rng_below(rng, (uint64_t)i * 2 + 1, 23);
    }
}

static bool whole_model(void *ctx, const char *name)
{
    (void)ctx, (void)name;
    return true;
}

static bool no_vectors(void *ctx, const char *name)
{
    (void)ctx;
    return !strstr(name, "norm") && !strstr(name, "ln_") && !strstr(name, "bias");
}

static bool no_matrices(void *ctx, const char *name)
{
    return !no_vectors(ctx, name);
}

static bool second_layer(void *ctx, const char *name)
{
    (void)ctx;
    return strstr(name, ".1.") != NULL;
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
    for (int i = 0; b->mode == LM_MODE_TRAIN && i < r[0].model->n_params; i++) {
        const lm_param *p = &r[0].model->param[i];
        double far = far_apart(g[1] + p->offset, g[0] + p->offset, p->count);
        assert_true((r[0].model->grad[i] < 0) == (r[1].model->grad[i] < 0));
        if (!(far <= 2 * allowed(b->precision.low)))
            fail_msg("%s, %s: the gradient of %s is %.2g off", what,
                     lm_dtype_name(b->precision.low), r[0].model->graph->value[p->value].name, far);
    }
    lm_free(block);
    for (int k = 0; k < 2; k++) {
        lm_free(g[k]);
        runner_free(&r[k]);
    }
}

static const lm_dtype types[3] = { LM_DTYPE_F64, LM_DTYPE_F32, LM_DTYPE_BF16 };

static void training_is_the_same(void **state)
{
    static bool (*const trainable[])(void *, const char *) = { whole_model, no_vectors, no_matrices,
                                                               second_layer };
    (void)state;
    for (int i = 0; i < N_MODELS; i++) {
        lm_config c;
        read_model(i, 2, &c);
        for (int t = 0; t < 3; t++)
            for (int k = 0; k < 4; k++) {
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

/* Activations that stay in F32 between products in BF16: what is joined is of one type. */
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

/* Each joined operator left out in its turn. */
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

/* Of a prompt and of tokens behind it, [STEPS, B, V]; one sequence rests now and then. */
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
        for (int64_t l = 0; k && l < c->layers; l++) { /* both read and write the same caches */
            lm_exec_bind(r[1].exec, r[1].model->kcache[l], r[0].mem[r[0].model->kcache[l]]);
            lm_exec_bind(r[1].exec, r[1].model->vcache[l], r[0].mem[r[0].model->vcache[l]]);
        }
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
        for (int t = 0; t < 9; t++) {
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

/* Sums of BF16 products, not rounded to BF16 on their way, at every level of the CPU. */
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

/* ---- what is left alone ---- */

enum { N = 4, C = 8 };

typedef struct {
    lm_graph *g;
    lm_backend *b;
    lm_vid x, x2, w, w2, stat, table, pos, used, fresh, q, kc, vc;
} hand;

static lm_vid value(lm_graph *g, lm_role role, lm_tensor t)
{
    lm_err e = { 0 };
    lm_vid v;
    must(lm_graph_value(g, role, t, NULL, &v, &e), &e);
    return v;
}

static hand hand_new(void)
{
    lm_err e = { 0 };
    hand h;
    lm_tensor cache = { .dtype = LM_DTYPE_F32, .ndim = 4, .dim = { N, 1, 9, 4 } };
    lm_tensor ids = lm_shape1(LM_DTYPE_I32, N), wide = lm_shape2(LM_DTYPE_F32, N, 12);
    must(lm_graph_new(&h.g, &e), &e);
    must(lm_backend_cpu(LM_CPU_REF, NULL, &h.b, &e), &e);
    h.b->joins = all;
    h.x = value(h.g, LM_ROLE_INPUT, lm_shape2(LM_DTYPE_F32, N, C));
    h.x2 = value(h.g, LM_ROLE_INPUT, lm_shape2(LM_DTYPE_F32, N, C));
    h.w = value(h.g, LM_ROLE_PARAM, lm_shape2(LM_DTYPE_F32, C, C));
    h.w2 = value(h.g, LM_ROLE_PARAM, lm_shape1(LM_DTYPE_F32, C));
    h.stat = value(h.g, LM_ROLE_INPUT, lm_shape2(LM_DTYPE_F32, N, 2));
    h.table = value(h.g, LM_ROLE_CONST, lm_shape2(LM_DTYPE_F32, 9, 4));
    h.pos = value(h.g, LM_ROLE_INPUT, ids);
    h.used = value(h.g, LM_ROLE_INPUT, ids);
    h.fresh = value(h.g, LM_ROLE_INPUT, ids);
    h.q = value(h.g, LM_ROLE_STATE, wide);
    h.kc = value(h.g, LM_ROLE_STATE, cache);
    h.vc = value(h.g, LM_ROLE_STATE, cache);
    return h;
}

/* op(a, b, c, d, e) -> first output; others in more[1..2] (in: what to write to). */
static lm_vid put(hand *h, const lm_op *op, const void *attr, const lm_vid *in, lm_vid *more)
{
    lm_err e = { 0 };
    lm_vid none_given[LM_MAX_OUT] = { LM_NONE, LM_NONE, LM_NONE, LM_NONE };
    lm_vid *out = more ? more : none_given;
    must(lm_graph_append(h->g, op, attr, in, out, &e), &e);
    return out[0];
}

static const lm_linear_attr first = { LM_ACC_FIRST };
static const lm_gelu_attr tanh_form = { false };
static const lm_norm_attr rms = { LM_NORM_RMS, 1e-5, LM_ACC_FIRST };

#define IN(...) ((const lm_vid[LM_MAX_IN]){ __VA_ARGS__ })

static lm_vid put_linear(hand *h, lm_vid x)
{
    return put(h, &lm_op_linear, &first, IN(x, h->w, LM_NONE), NULL);
}

static lm_vid put_gelu(hand *h, lm_vid x)
{
    return put(h, &lm_op_gelu, &tanh_form, IN(x), NULL);
}

static lm_vid put_cast(hand *h, lm_vid x, lm_dtype to)
{
    lm_tensor t = h->g->value[x].t;
    t.dtype = to;
    lm_vid out[LM_MAX_OUT] = { value(h->g, LM_ROLE_ACT, t) };
    return put(h, &lm_op_cast, NULL, IN(x), out);
}

/* Run the pass; the operators must be `want` then, or with NULL the whole list what it was. */
static void expect(hand *h, const lm_vid *keep, int n_keep, const char *want)
{
    lm_err e = { 0 };
    char *was = dump(h->g);
    must(lm_fuse(h->g, h->b, keep, n_keep, &e), &e);
    char *is = want ? operators(h->g) : dump(h->g);
    assert_string_equal(is, want ? want : was);
    lm_free(was);
    lm_free(is);
    check_rules(h->g);
    lm_backend_close(h->b);
    lm_graph_free(h->g);
}

static void linear_and_gelu(void **state)
{
    (void)state;
    hand h = hand_new();
    lm_vid z = put_linear(&h, h.x), y = put_gelu(&h, z);
    put(&h, &lm_op_add, NULL, IN(z, y), NULL); /* z is read once more, and stays */
    const lm_node *n = h.g->node;
    lm_err e = { 0 };
    must(lm_fuse(h.g, h.b, NULL, 0, &e), &e);
    assert_int_equal(h.g->n_nodes, 2);
    assert_ptr_equal(n[0].op, &lm_op_linear_act);
    assert_true(n[0].out[0] == y && n[0].out[1] == z);
    expect(&h, NULL, 0, NULL); /* the pass again: nothing more to do */

    h = hand_new();
    z = put_linear(&h, h.x), y = put_gelu(&h, z);
    n = h.g->node;
    must(lm_fuse(h.g, h.b, &y, 1, &e), &e);
    assert_true(h.g->n_nodes == 1 && n->out[0] == y && n->out[1] == LM_NONE);
    assert_int_equal(((const lm_linear_act_attr *)n->attr)->act, LM_ACT_GELU);
    expect(&h, NULL, 0, NULL);

    h = hand_new();
    z = put_linear(&h, h.x), y = put_gelu(&h, z);
    n = h.g->node;
    must(lm_fuse(h.g, h.b, &z, 1, &e), &e); /* kept */
    assert_true(h.g->n_nodes == 1 && n->out[0] == y && n->out[1] == z);
    expect(&h, NULL, 0, NULL);

    h = hand_new(); /* the sums are wanted before GELU's place in the list */
    z = put_linear(&h, h.x);
    put(&h, &lm_op_add, NULL, IN(z, h.x2), NULL);
    put_gelu(&h, z);
    expect(&h, NULL, 0, "linear_act add");

    h = hand_new(); /* a product that is no activation of this run */
    lm_vid state_out[LM_MAX_OUT] = { value(h.g, LM_ROLE_STATE, h.g->value[h.x].t) };
    put(&h, &lm_op_linear, &first, IN(h.x, h.w, LM_NONE), state_out);
    put_gelu(&h, state_out[0]);
    must(lm_fuse(h.g, h.b, NULL, 0, &e), &e);
    assert_int_equal(h.g->node->out[1], state_out[0]);
    expect(&h, NULL, 0, "linear_act");

    h = hand_new(); /* what gelu_dx reads is read elsewhere, too; or by its other operand */
    lm_vid dx = put(&h, &lm_op_linear_dx, &first, IN(h.x, h.w), NULL);
    put(&h, &lm_op_gelu_dx, &tanh_form, IN(dx, h.x2), NULL);
    put(&h, &lm_op_add, NULL, IN(dx, h.x), NULL);
    expect(&h, NULL, 0, NULL);
    h = hand_new();
    dx = put(&h, &lm_op_linear_dx, &first, IN(h.x, h.w), NULL);
    put(&h, &lm_op_gelu_dx, &tanh_form, IN(h.x2, dx), NULL);
    expect(&h, NULL, 0, NULL);
    h = hand_new();
    dx = put(&h, &lm_op_linear_dx, &first, IN(h.x, h.w), NULL);
    put(&h, &lm_op_gelu_dx, &tanh_form, IN(dx, h.x2), NULL);
    expect(&h, &dx, 1, NULL);
    h = hand_new();
    dx = put(&h, &lm_op_linear_dx, &first, IN(h.x, h.w), NULL);
    put(&h, &lm_op_gelu_dx, &tanh_form, IN(dx, dx), NULL);
    expect(&h, NULL, 0, NULL);
}

static void linear_and_cast(void **state)
{
    (void)state;
    for (int k = 0; k < 5; k++) {
        hand h = hand_new();
        h.b->joins = none;
        lm_vid z = put_linear(&h, h.x);
        lm_vid y = put_cast(&h, z, k == 1 ? LM_DTYPE_BF16 : LM_DTYPE_F32);
        if (k == 2)
            put(&h, &lm_op_add, NULL, IN(z, z), NULL);
        if (k == 3)
            put_cast(&h, z, LM_DTYPE_F32);
        expect(&h, k == 4 ? &z : &y, 1, k ? NULL : "linear");
    }
}

static void norm_and_linear(void **state)
{
    (void)state;
    for (int k = 0; k < 8; k++) {
        hand h = hand_new();
        lm_vid out[LM_MAX_OUT] = { LM_NONE, LM_NONE, LM_NONE };
        put(&h, &lm_op_norm, &rms, IN(h.x, h.w2, LM_NONE, h.x2), out);
        lm_vid y = put_linear(&h, out[k == 7 ? 2 : 0]), z = LM_NONE; /* 7: of the sum */
        if (k == 1)
            put_linear(&h, out[0]);
        if (k == 2)
            z = out[0];
        if (k == 3)
            z = out[1];
        if (k == 4) /* its backward */
            put(&h, &lm_op_norm_dw, &rms, IN(h.x, out[2], out[1]), NULL);
        if (k == 5) /* anybody may read the sum */
            put(&h, &lm_op_add, NULL, IN(out[2], y), NULL);
        if (k == 6) {
            put_gelu(&h, y);
            put(&h, &lm_op_add, NULL, IN(y, y), NULL); /* the sums: not of norm_linear with GELU */
        }
        static const char *const want[] = {
            "norm_linear", NULL, NULL, NULL, NULL, "norm_linear add", "norm_linear gelu add", NULL
        };
        expect(&h, &z, z >= 0, want[k]);
    }
}

static void norm_dx_and_dw(void **state)
{
    (void)state;
    for (int k = 0; k < 4; k++) {
        hand h = hand_new();
        lm_norm_attr add = { LM_NORM_RMS, 1e-5, LM_ACC_ADD };
        lm_err e = { 0 };
        lm_vid dw[LM_MAX_OUT] = { value(h.g, LM_ROLE_GRAD, lm_shape1(LM_DTYPE_F32, C)), LM_SKIP };
        lm_vid again[LM_MAX_OUT] = { dw[0], LM_SKIP };
        lm_vid dx_in[LM_MAX_IN] = { h.x, h.x2, h.w2, h.stat, LM_NONE };
        h.g->phase = LM_PHASE_BACKWARD_WEIGHT;
        put(&h, &lm_op_norm_dw, &rms, IN(k == 1 ? h.x2 : h.x, h.x2, h.stat), dw);
        if (k == 2) /* the second addition to dw must stay the second */
            put(&h, &lm_op_norm_dw, &add, IN(h.x2, h.x, h.stat), again);
        if (k == 3) /* a residual that is not there before: only the later place will do */
            dx_in[4] = put_gelu(&h, h.x);
        h.g->phase = LM_PHASE_BACKWARD_INPUT;
        put(&h, &lm_op_norm_dx, &add, dx_in, NULL); /* which adds nothing up */
        if (k == 1) {
            expect(&h, NULL, 0, NULL);
            continue;
        }
        must(lm_fuse(h.g, h.b, NULL, 0, &e), &e);
        const lm_node *n = &h.g->node[k == 3];
        assert_true(n->op == &lm_op_norm_dx_dw);
        assert_int_equal(((const lm_norm_attr *)n->attr)->acc, LM_ACC_FIRST);
        expect(&h, NULL, 0,
               k == 0   ? "norm_dx_dw"
               : k == 2 ? "norm_dx_dw norm_dw"
                        : "gelu norm_dx_dw");
    }
}

static void attention_of_one_row(void **state)
{
    lm_head_norm_attr norm = { 1, 1, 4, 1e-6, LM_ACC_FIRST };
    lm_rope_attr rope = { 1, 1, 4, 4, false };
    (void)state;
    for (int k = 0; k < 6; k++) {
        hand h = hand_new();
        lm_attention_attr a = { .batch = N,
                                .seq = 1,
                                .heads = 1,
                                .kv_heads = 1,
                                .head_dim = 4,
                                .causal = true,
                                .scale = 1 };
        lm_vid wd = value(h.g, LM_ROLE_PARAM, lm_shape1(LM_DTYPE_F32, 4)), kept = LM_NONE;
        lm_vid normed[LM_MAX_OUT] = { LM_NONE, LM_NONE };
        lm_vid out[LM_MAX_OUT] = { LM_NONE, h.kc, h.vc },
               other[LM_MAX_OUT] = { LM_NONE, h.kc, h.vc };
        lm_vid to_q[LM_MAX_OUT] = { h.q };
        put(&h, &lm_op_head_norm, &norm, IN(h.q, wd, wd), normed);
        rope.inverse = k == 3;
        lm_vid qkv =
            put(&h, &lm_op_rope, &rope, IN(k == 5 ? h.q : normed[0], h.pos, h.table), NULL);
        if (k == 1) /* statistics for a backward */
            kept = normed[1];
        if (k == 2)
            kept = qkv;
        if (k == 4) /* two sequences of two rows */
            a.batch = 2, a.seq = 2;
        if (k == 4)
            h.g->value[h.kc].t.dim[0] = h.g->value[h.vc].t.dim[0] = 2,
            h.g->value[h.used].t.dim[0] = h.g->value[h.fresh].t.dim[0] = 2;
        if (k == 5) { /* neither can the caches be written before, nor q be read behind */
            put(&h, &lm_op_attention_cached, &a, IN(h.q, h.used, h.fresh), other);
            put(&h, &lm_op_rope, &rope, IN(normed[0], h.pos, h.table), to_q);
        }
        put(&h, &lm_op_attention_cached, &a, IN(qkv, h.used, h.fresh), out);
        static const char *const want[] = { "attention_step", "head_norm attention_step" };
        expect(&h, &kept, kept >= 0, k < 2 ? want[k] : NULL);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(models_of_one_layer),
        cmocka_unit_test(a_backend_that_joins_nothing),
        cmocka_unit_test(training_is_the_same),
        cmocka_unit_test(some_are_refused),
        cmocka_unit_test(two_types),
        cmocka_unit_test(speech_is_the_same),
        cmocka_unit_test(logits_are_f32),
        cmocka_unit_test(linear_and_gelu),
        cmocka_unit_test(linear_and_cast),
        cmocka_unit_test(norm_and_linear),
        cmocka_unit_test(norm_dx_and_dw),
        cmocka_unit_test(attention_of_one_row),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
