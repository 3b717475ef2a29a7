/* SPDX-License-Identifier: Apache-2.0 */
/* test_align_teacher.c -- the loss of a student beside its teacher against the divergence in float64, computed from the last
 * states and the heads of both; and the mean over tokens. */
#include <math.h>
#include <stdio.h>

#include "train_case.h"

#include "text/answers.h"
#include "tune/align/gkd.h"

enum { B = 2, N = B * T };

static const char teacher_text[] =
    "{\"model_type\":\"llama\",\"vocab_size\":64,\"hidden_size\":48,\"intermediate_size\":64,"
    "\"num_hidden_layers\":3,\"num_attention_heads\":3,\"num_key_value_heads\":3,"
    "\"max_position_embeddings\":64,\"rms_norm_eps\":1e-5,\"hidden_act\":\"silu\","
    "\"tie_word_embeddings\":false,\"initializer_range\":0.3,\"rope_theta\":10000.0}";

static lm_backend *backend;
static tiny_model student, teacher;

static int begin(void **state)
{
    lm_err e = { 0 };
    char wide[sizeof llama_text + 8];
    (void)state;
    train_begin();
    ok(lm_backend_cpu(lm_cpu_detect(), par, &backend, &e), &e);
    snprintf(wide, sizeof wide, "%s", llama_text);
    memcpy(strstr(wide, "0.02"), "0.40", 4);
    tiny_model_make(&student, wide, "student");
    tiny_model_make(&teacher, teacher_text, "teacher");
    return 0;
}

static int end(void **state)
{
    (void)state;
    tiny_model_fini(&student);
    tiny_model_fini(&teacher);
    lm_backend_close(backend);
    return train_end();
}

/* A graph of the model, its weights, and an executor. */
typedef struct {
    lm_loaded weights;
    lm_model *m;
    lm_plan plan;
    lm_evaluator v;
} graph;

static void open_graph(graph *g, const char *name, const lm_build *how)
{
    lm_err e = { 0 };
    char *path = path_of(name);
    ok(lm_loaded_open(path, NULL, &g->weights, &e), &e);
    ok(lm_model_build(&g->weights.config, how, &g->m, &e), &e);
    const lm_vid out = how->states ? g->m->states : g->m->loss;
    ok(lm_plan_make(g->m->graph, backend, &out, 1, &g->plan, &e), &e);
    ok(lm_evaluator_of(g->m, &g->plan, backend, NULL, &g->v, &e), &e);
    ok(lm_loaded_weights(&g->weights, g->m, backend, &e), &e);
    lm_store_bind(g->weights.store, g->m, g->v.exec);
    lm_free(path);
}

static void close_graph(graph *g)
{
    lm_evaluator_fini(&g->v);
    lm_plan_fini(&g->plan);
    lm_model_free(g->m);
    lm_loaded_fini(&g->weights);
}

/* Documents of both windows; every third row has no target. */
static void fill(lm_batch *b)
{
    for (int i = 0; i < N; i++) {
        b->tokens[i] = (i * 7 + 3) % VOCAB;
        b->targets[i] = i % 3 ? (i * 5) % VOCAB : -1;
        b->lo[i] = i % T < 6 ? 0 : 6;
        b->pos[i] = i % T - b->lo[i];
    }
}

/* log softmax of the logits of a row, in double. */
static void log_softmax(const graph *g, int row, double temperature, double *out)
{
    const lm_tensor *w = &g->m->graph->value[g->m->head].t;
    const float *x = lm_exec_data(g->v.exec, g->m->states),
                *head = lm_exec_data(g->v.exec, g->m->head);
    const int64_t c = w->dim[1];
    double top = -INFINITY, sum = 0;
    for (int v = 0; v < VOCAB; v++) {
        out[v] = 0;
        for (int64_t i = 0; i < c; i++)
            out[v] += (double)x[row * c + i] * (double)head[v * c + i];
        out[v] /= temperature;
        top = fmax(top, out[v]);
    }
    for (int v = 0; v < VOCAB; v++)
        sum += exp(out[v] - top);
    for (int v = 0; v < VOCAB; v++)
        out[v] -= top + log(sum);
}

static double divergence(double beta, const double *s, const double *t)
{
    double sum = 0;
    for (int v = 0; v < VOCAB; v++) {
        const double p = exp(s[v]), q = exp(t[v]), m = log((1 - beta) * p + beta * q);
        sum += beta <= 0   ? q * (t[v] - s[v])
               : beta >= 1 ? p * (s[v] - t[v])
                           : beta * q * (t[v] - m) + (1 - beta) * p * (s[v] - m);
    }
    return sum;
}

static const lm_build plain = { .mode = LM_MODE_EVAL,
                                .batch = B,
                                .seq = T,
                                .precision = { .low = LM_DTYPE_F32 },
                                .documents = true };

/* Rows of the student's loss against those of both models' states. */
static void check(double beta, double temperature)
{
    lm_err e = { 0 };
    lm_build states = plain, taught = plain;
    graph s = { .m = NULL }, t = { .m = NULL }, l = { .m = NULL };
    lm_teacher own = { .made = false };
    lm_step step = { 0 };
    double a[VOCAB], b[VOCAB];
    char *path = path_of("teacher");
    states.backend = taught.backend = backend;
    states.states = true;
    open_graph(&s, "student", &states);
    open_graph(&t, "teacher", &states);
    ok(lm_loaded_open(path, NULL, &own.weights, &e), &e);
    ok(lm_teacher_check(&own, path, &student.config, NULL, &e), &e);
    ok(lm_teacher_build(&own, &taught, beta, temperature, &e), &e);
    taught.teacher = &own.as;
    open_graph(&l, "student", &taught);
    const lm_objective_site site = {
        .backend = backend, .par = par, .model = l.m, .exec = l.v.exec, .batch = B, .seq = T
    };
    ok(lm_teacher_load(&own, &site, &e), &e);
    fill(&s.v.batch), fill(&t.v.batch), fill(&l.v.batch);
    ok(lm_exec_run(s.v.exec, &step, &e), &e);
    ok(lm_exec_run(t.v.exec, &step, &e), &e);
    ok(lm_teacher_run(&own, &l.v.batch, &e), &e);
    ok(lm_exec_run(l.v.exec, &step, &e), &e);
    const float *loss = lm_exec_data(l.v.exec, l.m->loss);
    for (int i = 0; i < N; i++) {
        log_softmax(&s, i, temperature, a);
        log_softmax(&t, i, temperature, b);
        const double want = i % 3 ? divergence(beta, a, b) : 0;
        if (!(fabs((double)loss[i] - want) <= 2e-6 + 2e-5 * want))
            fail_msg("beta %g, row %d: %.9g, in float64 %.9g", beta, i, (double)loss[i], want);
    }
    close_graph(&l);
    lm_teacher_close(&own);
    close_graph(&s);
    close_graph(&t);
    lm_free(path);
}

static void losses_are_divergences(void **state)
{
    (void)state;
    check(0.5, 1);
    check(0, 1);
    check(1, 1);
    check(0.1, 2);
}

static void other_vocabularies_are_refused(void **state)
{
    lm_err e = { 0 };
    lm_teacher t = { .made = false };
    lm_config other = student.config;
    char *path = path_of("teacher");
    (void)state;
    other.vocab = 65;
    ok(lm_loaded_open(path, NULL, &t.weights, &e), &e);
    assert_int_equal(lm_teacher_check(&t, "t", &other, NULL, &e), LM_EUSAGE);
    assert_string_equal(e.what, "its vocabulary has 64 tokens, that of the model 65");
    lm_teacher_close(&t);
    lm_free(path);
}

/* The loss of a step is the mean over all of its tokens, in whatever micro-batches. */
static void losses_are_means_over_tokens(void **state)
{
    double a[3] = { -0.5, -1, -0.25 }, b[1] = { -2 }, da[3], db[1];
    lm_align_seq seq[2] = { { .n = 3, .logp = a, .dlogp = da },
                            { .n = 1, .logp = b, .dlogp = db } };
    const lm_align_counts all = { .sequences = 2, .tokens = 4 };
    lm_align_spec spec;
    lm_err e = { 0 };
    double sum = 0;
    (void)state;
    ok(lm_align_parse("gkd:lambda=0.3", &spec, &e), &e);
    assert_true(fabs(lm_align_hyper(&spec, "lambda", 0) - 0.3) < 1e-15);
    for (int i = 0; i < 2; i++) {
        lm_align_batch one = { .counts = &all, .seq = &seq[i], .n = 1 };
        ok(lm_align_run(&spec, &one, &e), &e);
        sum += one.loss;
    }
    assert_true(fabs(sum - 3.75 / 4) < 1e-15);
    assert_true(da[2] == -0.25 && db[0] == -0.25);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(losses_are_divergences),
        cmocka_unit_test(other_vocabularies_are_refused),
        cmocka_unit_test(losses_are_means_over_tokens),
    };
    return cmocka_run_group_tests(tests, begin, end);
}
