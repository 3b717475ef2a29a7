/* SPDX-License-Identifier: Apache-2.0 */
/* test_train_tensor.c -- ranks that share the weights of each layer (tp): losses, weights and states are those of one rank up to
 * rounding, and the same bits each time; meshes and optimisers that cannot be are refused. */
#include <math.h>
#include <stdio.h>

#include "train_case.h"

#include "numeric/portions.h"
#include "parallel/fit.h"
#include "train/trainer_impl.h"

static lm_backend *backend;
static lm_par *one_thread;

#define SIZES \
    "\"vocab_size\":64,\"hidden_size\":32,\"intermediate_size\":24,\"num_hidden_layers\":2,"
static const struct {
    const char *name, *text;
} models[] = {
    { "gpt2",
      "{\"model_type\":\"gpt2\",\"vocab_size\":64,\"n_embd\":32,\"n_head\":4,\"n_positions\":64,"
      "\"n_layer\":2,\"resid_pdrop\":0.2,\"embd_pdrop\":0.1,\"attn_pdrop\":0.3}" },
    { "untied",
      "{\"model_type\":\"llama\"," SIZES "\"num_attention_heads\":4,\"num_key_value_heads\":2,"
      "\"max_position_embeddings\":64,\"attention_bias\":true}" },
    /* one head of keys, which ranks share; norms of heads, whose gradients are addends */
    { "shared",
      "{\"model_type\":\"qwen3\"," SIZES "\"num_attention_heads\":4,\"num_key_value_heads\":1,"
      "\"head_dim\":8,\"max_position_embeddings\":64,\"tie_word_embeddings\":true}" },
    { "mixture",
      "{\"model_type\":\"mixtral\"," SIZES "\"num_attention_heads\":4,\"num_key_value_heads\":2,"
      "\"num_local_experts\":4,\"num_experts_per_tok\":2,\"output_router_logits\":true,"
      "\"max_position_embeddings\":64}" },
};
enum { MODELS = sizeof models / sizeof *models };
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

static lm_trainer_opts options(const char *optim, int dp, int tp, bool rows)
{
    lm_err e = { 0 };
    lm_trainer_opts o = { .batch = 2,
                          .seq = T,
                          .accumulate = 4,
                          .leaves = 2,
                          .mesh = lm_mesh_alone,
                          .rows = rows,
                          .steps = 4,
                          .precision = { .low = LM_DTYPE_F32 },
                          .documents = true,
                          .dropout = true,
                          .schedule = { .kind = LM_SCHED_CONSTANT, .lr = 1e-2 },
                          .clip_norm = 1,
                          .eval_every = 2,
                          .log_every = 1 };
    o.mesh.size[LM_AXIS_DP] = dp;
    o.mesh.size[LM_AXIS_TP] = tp;
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

/* ---- weights ---- */

static double worst; /* of compared numbers, in parts of the largest of their tensor */

/* Elements [rows, cols] of `part`, which are those of *cut of `whole`, rows of `width`. */
static void compare(const lm_cut *cut, const float *part, int64_t rows, int64_t cols,
                    const float *whole)
{
    const int64_t width = cut->ranks && cut->dim == 1 ? cut->whole : cols;
    double most = 0, far = 0;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++) {
            int64_t at[2] = { r, c }, left = cut->ranks ? at[cut->dim] : 0;
            lm_range run;
            for (int64_t k = 0; cut->ranks && lm_portions_at(&cut->pieces, cut->whole, cut->ranks,
                                                             cut->rank, k, &run);
                 left -= run.count, k++)
                if (left < run.count) {
                    at[cut->dim] = run.from + left;
                    break;
                }
            const double x = whole[at[0] * width + at[1]];
            most = fmax(most, fabs(x));
            far = fmax(far, fabs(part[r * cols + c] - x));
        }
    worst = fmax(worst, far / most);
}

static const float *at_slice(const lm_store *s, const lm_slice *t, int64_t *cols)
{
    const lm_param *p = &s->model->param[t->param];
    *cols = p->count / s->model->graph->value[p->value].t.dim[0];
    return (const float *)lm_store_flat(s, LM_KEPT_PARAM, 0) + p->offset + t->row * *cols;
}

static void compare_weights(const lm_store *part, const lm_store *whole)
{
    int cut = 0;
    assert_int_equal(part->model->n_slices, whole->model->n_slices);
    for (int i = 0; i < part->model->n_slices; i++) {
        const lm_slice *t = &part->model->slice[i];
        int64_t cols, all_cols;
        const float *x = at_slice(part, t, &cols),
                    *y = at_slice(whole, &whole->model->slice[i], &all_cols);
        compare(&t->cut, x, t->rows, cols, y);
        cut += t->cut.ranks > 0;
    }
    assert_true(cut > 0);
}

static void compare_states(const lm_store *part, const lm_store *whole)
{
    const lm_store_block *a, *b;
    for (int k = 0; (a = lm_store_find(part, LM_KEPT_OPT, k)); k++) {
        b = lm_store_find(whole, LM_KEPT_OPT, k);
        assert_int_equal(a->state->n_parts, b->state->n_parts);
        for (int i = 0; i < a->state->n_parts; i++) {
            const struct lm_state_part *p = &a->state->part[i], *q = &b->state->part[i];
            assert_int_equal(p->tensor, q->tensor);
            compare(&part->model->slice[p->tensor].cut, (const float *)a->data + p->at,
                    p->shape.dim[0], lm_tensor_count(&p->shape) / p->shape.dim[0],
                    (const float *)b->data + q->at);
        }
    }
}

/* ---- trainings ---- */

/* tolerance: of weights and states; Adam divides small numbers by small ones. */
static void check(int i, const char *optim, int dp, int tp, bool rows, double tolerance)
{
    lm_err e = { 0 };
    lm_trainer *one = NULL, *many = NULL, *again = NULL;
    lm_train_result r, q, s;
    lm_trainer_opts o = options(optim, 1, 1, false);
    ok(train(&o, &tiny[i], &one, &r, &e), &e);
    o = options(optim, dp, tp, rows);
    ok(train(&o, &tiny[i], &many, &q, &e), &e);
    ok(train(&o, &tiny[i], &again, &s, &e), &e);
    if (!(fabs(r.loss - q.loss) <= 1e-6 * r.loss && fabs(r.val_loss - q.val_loss) <= 1e-6 * r.loss))
        fail_msg("%s, %s, dp=%d tp=%d: losses %.9g and %.9g, validation %.9g and %.9g",
                 models[i].name, optim, dp, tp, r.loss, q.loss, r.val_loss, q.val_loss);
    assert_true(q.loss == s.loss && q.val_loss == s.val_loss);
    assert_int_equal(r.tokens, q.tokens);
    worst = 0;
    compare_weights(many->s.store, one->s.store);
    compare_states(many->s.store, one->s.store);
    if (!(worst <= tolerance))
        fail_msg("%s, %s, dp=%d tp=%d: weights or states differ by %.3g", models[i].name, optim, dp,
                 tp, worst);
    lm_trainer_free(one);
    lm_trainer_free(many);
    lm_trainer_free(again);
}

static void ranks_agree_with_one(void **state)
{
    (void)state;
    for (int i = 0; i < MODELS; i++)
        for (int rows = 0; rows < 2; rows++) {
            check(i, "sgd:momentum=0.9", 1, 2, rows, 2e-5);
            check(i, "sgd:momentum=0.9", 2, 2, rows, 2e-5);
            check(i, "sgd:momentum=0.9", 1, 4, rows, 2e-5);
        }
}

static void optimisers_of_single_numbers(void **state)
{
    static const char *const optims[] = { "adamw", "adam:weight_decay=0.1", "adagrad",
                                          "schedule-free" };
    (void)state;
    for (size_t k = 0; k < sizeof optims / sizeof *optims; k++)
        check(1, optims[k], 1, 2, true, 1e-3);
}

/* Of values in BF16 sums are rounded once more. */
static void in_bf16(void **state)
{
    lm_err e = { 0 };
    (void)state;
    for (int i = 0; i < MODELS; i++) {
        lm_trainer *t = NULL;
        lm_train_result r[2];
        for (int k = 0; k < 2; k++) {
            lm_trainer_opts o = options("adamw", 1, k ? 2 : 1, true);
            o.precision.low = LM_DTYPE_BF16;
            ok(train(&o, &tiny[i], &t, &r[k], &e), &e);
            lm_trainer_free(t);
        }
        assert_true(fabs(r[0].loss - r[1].loss) <= 5e-3 * r[0].loss);
        assert_true(fabs(r[0].val_loss - r[1].val_loss) <= 5e-3 * r[0].loss);
    }
}

/* ---- refusals ---- */

static void matrices_need_one_rank(void **state)
{
    static const char *const optims[] = { "muon", "adafactor", "adamw8bit:min-8bit-size=1",
                                          "soap" };
    (void)state;
    for (size_t k = 0; k < sizeof optims / sizeof *optims; k++) {
        lm_err e = { 0 };
        lm_trainer *t = NULL;
        lm_train_result r;
        lm_trainer_opts o = options(optims[k], 1, 2, true);
        assert_int_equal(train(&o, &tiny[1], &t, &r, &e), LM_EUSAGE);
        assert_non_null(strstr(e.what, "as a whole, and each rank has a part of it"));
        lm_trainer_free(t);
    }
}

static void meshes_that_do_not_fit(void **state)
{
    static const struct {
        int model, tp;
        const char *what, *todo;
    } cases[] = {
        { 0, 3, "tp=3 does not divide 4 heads", "choose tp=2 or tp=4" },
        { 1, 8, "tp=8 does not divide 4 heads", "choose tp=4" },
        { 2, 5, "tp=5 does not divide 4 heads", "choose tp=4" },
    };
    (void)state;
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        lm_err e = { 0 };
        lm_mesh mesh = lm_mesh_alone;
        mesh.size[LM_AXIS_TP] = cases[k].tp;
        assert_int_equal(lm_fit_mesh(&tiny[cases[k].model].config, &mesh, &e), LM_EUSAGE);
        assert_string_equal(e.what, cases[k].what);
        assert_string_equal(e.todo, cases[k].todo);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_agree_with_one),
        cmocka_unit_test(optimisers_of_single_numbers),
        cmocka_unit_test(in_bf16),
        cmocka_unit_test(matrices_need_one_rank),
        cmocka_unit_test(meshes_that_do_not_fit),
    };
    return cmocka_run_group_tests(tests, begin, end);
}
