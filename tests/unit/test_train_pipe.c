/* SPDX-License-Identifier: Apache-2.0 */
/* test_train_pipe.c -- ranks that share the layers of a model (pp): losses, weights and states have the bits of one rank by
 * every schedule; stages, schedules and meshes that cannot be are refused. */
#include <math.h>
#include <stdio.h>
#include <sys/stat.h>

#include "train_case.h"

#include "train/pipe.h"
#include "train/trainer_impl.h"

static lm_backend *backend;
static lm_par *one_thread;

#define SIZES \
    "\"vocab_size\":64,\"hidden_size\":32,\"intermediate_size\":24,\"num_hidden_layers\":4,"
static const struct {
    const char *name, *text;
} models[] = {
    { "untied",
      "{\"model_type\":\"llama\"," SIZES "\"num_attention_heads\":4,\"num_key_value_heads\":2,"
      "\"max_position_embeddings\":64,\"attention_bias\":true}" },
    { "mixture",
      "{\"model_type\":\"mixtral\"," SIZES "\"num_attention_heads\":4,\"num_key_value_heads\":2,"
      "\"num_local_experts\":4,\"num_experts_per_tok\":2,\"output_router_logits\":true,"
      "\"max_position_embeddings\":64}" },
    { "gpt2",
      "{\"model_type\":\"gpt2\",\"vocab_size\":64,\"n_embd\":32,\"n_head\":4,\"n_positions\":64,"
      "\"n_layer\":4,\"resid_pdrop\":0.2,\"embd_pdrop\":0.1,\"attn_pdrop\":0.3,"
      "\"tie_word_embeddings\":false}" },
    /* experts in one tensor */
    { "stacked",
      "{\"model_type\":\"gpt_oss\"," SIZES
      "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"head_dim\":8,\"sliding_window\":8,"
      "\"num_local_experts\":4,\"num_experts_per_tok\":2,\"max_position_embeddings\":64,"
      "\"tie_word_embeddings\":false}" },
    { "tied", "{\"model_type\":\"gemma3_text\"," SIZES
              "\"num_attention_heads\":4,\"num_key_value_heads\":2,"
              "\"head_dim\":8,\"max_position_embeddings\":64,\"sliding_window\":8,\"tie_word_"
              "embeddings\":true}" },
};
enum { MODELS = sizeof models / sizeof *models, MIXTURE = 1, STACKED = 3, TIED };
static tiny_model tiny[MODELS];

static int begin(void **state)
{
    lm_err e = { 0 };
    (void)state;
    train_begin();
    ok(lm_par_new(&one_thread, 1, &e), &e);
    ok(lm_backend_cpu(lm_cpu_detect(), one_thread, &backend, &e), &e);
    for (int i = 0; i < MODELS; i++)
        tiny_model_make(&tiny[i], models[i].text, models[i].name);
    return 0;
}

static int end(void **state)
{
    (void)state;
    for (int i = 0; i < MODELS; i++)
        tiny_model_fini(&tiny[i]);
    lm_backend_close(backend);
    lm_par_free(one_thread);
    return train_end();
}

static lm_trainer_opts options(const char *optim)
{
    lm_err e = { 0 };
    lm_trainer_opts o = { .batch = 2,
                          .seq = T,
                          .accumulate = 4,
                          .leaves = 1,
                          .mesh = lm_mesh_alone,
                          .steps = 3,
                          .precision = { .low = LM_DTYPE_F32 },
                          .documents = true,
                          .dropout = true,
                          .build = { .apart = true }, /* as with stages */
                          .schedule = { .kind = LM_SCHED_CONSTANT, .lr = 1e-2 },
                          .clip_norm = 0.5,
                          .eval_every = 2,
                          .log_every = 1 };
    ok(lm_groups_parse(optim, NULL, 1e-2, &o.groups, &e), &e);
    return o;
}

static lm_code train(const lm_trainer_opts *o, tiny_model *m, lm_trainer **t, lm_train_result *r,
                     lm_err *e)
{
    const lm_trainer_io io = {
        .config = &m->config, .weights = m->source, .train = tokens, .val = tokens
    };
    return lm_trainer_train(o, &io, backend, NULL, NULL, t, r, e);
}

static void set_mesh(lm_trainer_opts *o, const tiny_model *m, const char *schedule, int pp,
                     lm_train_pipe **pipe)
{
    lm_err e = { 0 };
    const lm_train_pipe_ask ask = { .schedule = schedule,
                                    .ranks = pp,
                                    .micros = o->accumulate / o->leaves,
                                    .batch = o->batch,
                                    .seq = o->seq };
    *pipe = NULL;
    if (pp > 1)
        ok(lm_train_pipe_new(&ask, &m->config, pipe, &e), &e);
    o->mesh.size[LM_AXIS_PP] = pp;
    o->pipe = *pipe;
}

/* ---- weights ---- */

/* The numbers of tensor i in the block; NULL: the rank has none. */
static const float *at_slice(const lm_store *s, int i, int64_t *count)
{
    const lm_slice *t = &s->model->slice[i];
    const lm_param *p = &s->model->param[t->param];
    if (t->cut.none)
        return NULL;
    const int64_t cols = p->count / s->model->graph->value[p->value].t.dim[0];
    *count = t->rows * cols;
    return (const float *)lm_store_flat(s, LM_KEPT_PARAM, 0) + p->offset + t->row * cols;
}

/* True if the rank has a part of the tensors.  Of a rank that shares what trains its own rows. */
static bool compare(const lm_store *part, const lm_store *whole, const char *what)
{
    int held = 0;
    for (int i = 0; i < part->model->n_slices; i++) {
        int64_t n, all;
        const float *x = at_slice(part, i, &n), *y = at_slice(whole, i, &all);
        if (!x)
            continue;
        held++;
        assert_int_equal(n, all);
        const int64_t rows = part->model->slice[i].rows, width = rows ? n / rows : 0;
        const lm_store_own every = { 0, rows }, own = part->own ? part->own[i] : every;
        for (int64_t k = own.row * width; k < (own.row + own.rows) * width; k++)
            if (memcmp(&x[k], &y[k], sizeof *x))
                fail_msg("%s: %s[%ld] is %.9g, not %.9g", what, part->model->slice[i].name, (long)k,
                         (double)x[k], (double)y[k]);
    }
    assert_true(held > 0);
    return held < part->model->n_slices;
}

static void check(int i, lm_trainer_opts o, const char *schedule, const char *stages, int dp,
                  int pp)
{
    lm_err e = { 0 };
    lm_trainer *one = NULL, *many = NULL;
    lm_train_result r, q;
    lm_train_pipe *pipe = NULL;
    char what[128];
    snprintf(what, sizeof what, "%s, %s, dp=%d, pp=%d", models[i].name, schedule, dp, pp);
    ok(train(&o, &tiny[i], &one, &r, &e), &e);
    const lm_train_pipe_ask ask = { .schedule = schedule,
                                    .stages = stages,
                                    .ranks = pp,
                                    .micros = o.accumulate / o.leaves,
                                    .batch = o.batch,
                                    .seq = o.seq };
    ok(lm_train_pipe_new(&ask, &tiny[i].config, &pipe, &e), &e);
    o.mesh.size[LM_AXIS_DP] = dp;
    o.mesh.size[LM_AXIS_PP] = pp;
    o.pipe = pipe;
    ok(train(&o, &tiny[i], &many, &q, &e), &e);
    const bool is_part = compare(many->s.store, one->s.store, what);
    assert_true(is_part == (pp / pipe->ways > 1));
    if (r.loss != q.loss || r.val_loss != q.val_loss)
        fail_msg("%s: losses %.17g and %.17g, validation %.17g and %.17g", what, r.loss, q.loss,
                 r.val_loss, q.val_loss);
    lm_trainer_free(one);
    lm_trainer_free(many);
    lm_train_pipe_free(pipe);
}

static void schedules_keep_bits(void **state)
{
    static const char *const schedules[] = { "gpipe", "1f1b", "zb-h1", "zb-h2" },
                             *const chunks[] = { "interleaved:2", "breadth-first:2", "zb-v",
                                                 "dualpipev" };
    (void)state;
    for (int i = 0; i < MODELS; i++) {
        for (size_t k = 0; k < sizeof schedules / sizeof *schedules; k++)
            for (int pp = 2; pp <= 4; pp += 2)
                check(i, options("sgd:momentum=0.9"), schedules[k], NULL, 1, pp);
        for (size_t k = 0; k < sizeof chunks / sizeof *chunks; k++)
            check(i, options("sgd:momentum=0.9"), chunks[k], NULL, 1, 2);
    }
}

/* Each rank's sums are of one leaf, or of two, or ranks share them. */
static void leaves_keep_bits(void **state)
{
    lm_trainer_opts o = options("adamw");
    (void)state;
    o.leaves = 2;
    for (int i = 0; i < MODELS; i++) {
        check(i, o, "1f1b", NULL, 1, 2);
        check(i, o, "zb-v", NULL, 1, 2);
        check(i, o, "1f1b", "1,3", 2, 2);
        check(i, o, "dualpipe", "3,1", 1, 2);
    }
}

/* Each stage has two ranks, whose sums are of different leaves. */
static void copies_keep_bits(void **state)
{
    lm_trainer_opts o = options("adamw");
    (void)state;
    for (int i = 0; i < MODELS; i++) {
        o.accumulate = 8;
        o.leaves = 2;
        check(i, o, "dualpipe", NULL, 1, 4);
        o.leaves = 4;
        check(i, o, "dualpipe", NULL, 1, 2);
        check(i, o, "dualpipe", NULL, 2, 2);
    }
}

/* Gradients, too, are shared by the ranks that have a stage: as it completes them, and behind two leaves of each rank; and
 * weights, gathered in each section. */
static void shared_gradients_keep_bits(void **state)
{
    lm_trainer_opts o = options("adamw");
    (void)state;
    for (o.zero = 2; o.zero <= 3; o.zero++) {
        o.gather_ahead = 1;
        o.precision.low = LM_DTYPE_F32;
        o.build.recompute = false;
        for (int i = 0; i < MODELS; i++) {
            o.leaves = 2;
            check(i, o, i % 2 ? "zb-h1" : "1f1b", NULL, 2, 2);
            o.leaves = 4;
            check(i, o, "1f1b", NULL, 2, 2);
        }
        o.leaves = 2;
        o.precision.low = LM_DTYPE_BF16;
        o.build.recompute = true;
        check(TIED, o, "interleaved:2", NULL, 2, 2);
    }
}

/* Activations in BF16, weights in panels, activations computed again. */
static void other_forms_keep_bits(void **state)
{
    lm_trainer_opts o = options("adamw");
    (void)state;
    o.precision.low = LM_DTYPE_BF16;
    o.build.recompute = true;
    check(1, o, "zb-h1", NULL, 1, 2);
    check(TIED, o, "interleaved:2", NULL, 1, 2);
}

/* Losses of three steps, and of the validation. */
static void losses(int i, int dp, int pp, int tp, int ep, double out[2])
{
    lm_err e = { 0 };
    lm_trainer_opts o = options("sgd:momentum=0.9");
    lm_trainer *t = NULL;
    lm_train_result r;
    lm_train_pipe *pipe;
    o.leaves = 2;
    set_mesh(&o, &tiny[i], "zb-h1", pp, &pipe);
    o.mesh.size[LM_AXIS_DP] = dp;
    o.mesh.size[LM_AXIS_TP] = tp;
    o.mesh.size[LM_AXIS_EP] = ep;
    o.rows = tp > 1;
    ok(train(&o, &tiny[i], &t, &r, &e), &e);
    out[0] = r.loss;
    out[1] = r.val_loss;
    lm_trainer_free(t);
    lm_train_pipe_free(pipe);
}

/* Those of one rank up to rounding, and of the same ranks along the other axes to the bit. */
static void check_beside(int i, int tp, int ep)
{
    double one[2], beside[2], staged[2], both[2];
    losses(i, 1, 1, 1, 1, one);
    losses(i, 1, 1, tp, ep, beside);
    losses(i, 1, 2, tp, ep, staged);
    losses(i, 2, 2, tp, ep, both);
    for (int k = 0; k < 2; k++) {
        assert_true(fabs(one[k] - beside[k]) <= 1e-6 * one[k]);
        if (beside[k] != staged[k] || staged[k] != both[k])
            fail_msg("%s, tp=%d, ep=%d: losses %.17g, %.17g, %.17g", models[i].name, tp, ep,
                     beside[k], staged[k], both[k]);
    }
}

static void beside_other_axes(void **state)
{
    (void)state;
    for (int i = 0; i < MODELS;
         i++) /* biases behind split columns are read on one rank of a stage alone */
        check_beside(i, 2, 1);
    check_beside(MIXTURE, 1, 2);
    check_beside(STACKED, 1, 2);
}

/* ---- stages ---- */

static void stages_are_even(void **state)
{
    static const struct {
        double work[6];
        int layers, stages;
        int64_t first[4];
    } cases[] = {
        { { 1, 1, 1, 1 }, 4, 2, { 0, 2 } },          { { 1, 1, 1, 3 }, 4, 2, { 0, 3 } },
        { { 4, 1, 1, 1, 1, 1 }, 6, 3, { 0, 1, 5 } }, { { 1, 1, 1, 1, 1, 1 }, 6, 4, { 0, 2, 4, 5 } },
        { { 0, 0, 0 }, 3, 3, { 0, 1, 2 } },
    };
    (void)state;
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        lm_err e = { 0 };
        int64_t first[4];
        ok(lm_train_pipe_balance(cases[k].work, cases[k].layers, cases[k].stages, first, &e), &e);
        for (int i = 0; i < cases[k].stages; i++)
            if (first[i] != cases[k].first[i])
                fail_msg("case %zu: stage %d begins with layer %ld, not %ld", k, i, (long)first[i],
                         (long)cases[k].first[i]);
    }
}

static void refusals(void **state)
{
    static const struct {
        const char *schedule, *stages;
        int ranks, micros;
        const char *what, *todo;
    } cases[] = {
        { "1f1b", NULL, 5, 8, "5 stages, and the model has 4 layers", "use pp=4 or less" },
        { "interleaved:4", NULL, 2, 8, "8 stages, and the model has 4 layers", "use dp or tp" },
        { "interleaved:2", NULL, 2, 3,
          "3 micro-batches do not divide by 2 ranks: interleaved "
          "takes 2 or 4",
          "" },
        { "1f1b", "1,2", 2, 4, "'1,2' has 3 layers, and the model has 4", "" },
        { "1f1b", "1,1,2", 2, 4, "'1,1,2' has 3 stages, and the schedule has 2", "" },
        { "1f1b", "4,0", 2, 4, "'4,0' is not a list of 2 numbers of layers, at least 1 each",
          "write the layers of each stage: 3,4,4,3" },
        { "dualpipe", NULL, 3, 4, "dualpipe has micro-batches from both ends, not 8 on 3 ranks",
          "use even numbers of both" },
        { "dualpipe", NULL, 4, 3, "dualpipe needs at least 8 micro-batches on 4 ranks, not 6", "" },
    };
    (void)state;
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        lm_err e = { 0 };
        lm_train_pipe *pipe;
        const lm_train_pipe_ask ask = { .schedule = cases[k].schedule,
                                        .stages = cases[k].stages,
                                        .ranks = cases[k].ranks,
                                        .micros = cases[k].micros,
                                        .batch = 2,
                                        .seq = T };
        assert_int_equal(lm_train_pipe_new(&ask, &tiny[0].config, &pipe, &e), LM_EUSAGE);
        assert_null(pipe);
        assert_string_equal(e.what, cases[k].what);
        assert_string_equal(e.todo, cases[k].todo);
    }
}

/* ---- checkpoints ---- */

/* A run to step `steps`, from a checkpoint unless `from` is NULL. */
static void run(lm_trainer_opts o, int i, const char *schedule, int pp, int64_t steps,
                const char *dir, const char *from, lm_train_result *r)
{
    lm_err e = { 0 };
    lm_trainer *t = NULL;
    lm_train_pipe *pipe;
    lm_model_source *source = tiny[i].source;
    o.steps = steps;
    set_mesh(&o, &tiny[i], schedule, pp, &pipe);
    if (from)
        ok(lm_model_source_open(from, NULL, &source, &e), &e);
    const lm_trainer_io io = { .config = &tiny[i].config,
                               .weights = source,
                               .train = tokens,
                               .val = tokens,
                               .resume = from,
                               .checkpoint = { .run_dir = dir, .config = tiny[i].json } };
    ok(lm_trainer_train(&o, &io, backend, NULL, NULL, &t, r, &e), &e);
    lm_trainer_free(t);
    if (from)
        lm_model_source_close(source);
    lm_train_pipe_free(pipe);
}

static void same_file(const char *a, const char *b, const char *name, const char *what)
{
    lm_err e = { 0 };
    lm_buf x = { 0 }, y = { 0 };
    char path[512];
    snprintf(path, sizeof path, "%s/%s", a, name);
    ok(lm_file_read(path, 1 << 24, &x, &e), &e);
    snprintf(path, sizeof path, "%s/%s", b, name);
    ok(lm_file_read(path, 1 << 24, &y, &e), &e);
    if (x.len != y.len || memcmp(x.data, y.data, x.len))
        fail_msg("%s: %s differs: %zu and %zu bytes", what, name, x.len, y.len);
    lm_buf_fini(&x);
    lm_buf_fini(&y);
}

/* Two steps on one mesh and two on another leave the files of four steps on one rank. */
static void resume(int i, const char *optim, const char *schedule, int pp, const char *then,
                   int then_pp)
{
    static int number;
    const lm_trainer_opts o = options(optim);
    char one[128], many[128], from[256], a[256], b[256], what[256];
    lm_train_result r, q;
    snprintf(what, sizeof what, "%s, %s, %s of %d then %d", models[i].name, optim, schedule, pp,
             then_pp);
    snprintf(one, sizeof one, "%s/one%d", folder, number);
    snprintf(many, sizeof many, "%s/many%d", folder, number++);
    assert_int_equal(mkdir(one, 0777) | mkdir(many, 0777), 0);
    run(o, i, NULL, 1, 4, one, NULL, &r);
    run(o, i, schedule, pp, 2, many, NULL, &q);
    snprintf(from, sizeof from, "%s/step-000002", many);
    run(o, i, then, then_pp, 4, many, from, &q);
    snprintf(a, sizeof a, "%s/step-000004", one);
    snprintf(b, sizeof b, "%s/step-000004", many);
    if (r.loss != q.loss)
        fail_msg("%s: losses %.17g and %.17g", what, r.loss, q.loss);
    same_file(a, b, "model.safetensors", what);
    same_file(a, b, "optimizer.safetensors", what);
}

static void any_mesh_resumes_from_any(void **state)
{
    (void)state;
    resume(0, "adamw", "1f1b", 2, NULL, 1);
    resume(1, "adamw", "zb-v", 2, "gpipe", 4);
    resume(2, "adamw", "zb-h1", 4, "interleaved:2", 2);
}

/* States of vectors, of matrices, of codes, and of the whole training. */
static void every_optimiser(void **state)
{
    char name[64];
    (void)state;
    for (int k = 0; lm_optim_at(k); k++) {
        snprintf(name, sizeof name, "%s", lm_optim_at(k)->name);
        resume(2, name, "1f1b", 2, "zb-h1", 4);
    }
    resume(0, "adamw8bit:min-8bit-size=1", "1f1b", 2, "zb-h1", 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(schedules_keep_bits),       cmocka_unit_test(leaves_keep_bits),
        cmocka_unit_test(copies_keep_bits),          cmocka_unit_test(shared_gradients_keep_bits),
        cmocka_unit_test(other_forms_keep_bits),     cmocka_unit_test(beside_other_axes),
        cmocka_unit_test(stages_are_even),           cmocka_unit_test(refusals),
        cmocka_unit_test(any_mesh_resumes_from_any), cmocka_unit_test(every_optimiser),
    };
    return cmocka_run_group_tests(tests, begin, end);
}
