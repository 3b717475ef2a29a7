/* SPDX-License-Identifier: Apache-2.0 */
/* test_train_tensor.c -- ranks that share the weights of each layer (tp): losses, weights and states are those of one rank up
 * to rounding, and the same bits each time; meshes and optimisers that cannot be are refused. */
#include <math.h>
#include <stdio.h>

#include "share_case.h"

#include "parallel/fit.h"

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
    (void)state;
    share_begin();
    for (int i = 0; i < MODELS; i++)
        tiny_model_make(&tiny[i], models[i].text, models[i].name);
    return 0;
}

static int end(void **state)
{
    (void)state;
    for (int i = 0; i < MODELS; i++)
        tiny_model_fini(&tiny[i]);
    return share_end();
}

static lm_trainer_opts options(const char *optim, int dp, int tp, bool rows)
{
    lm_trainer_opts o = share_options(optim, rows);
    o.mesh.size[LM_AXIS_DP] = dp;
    o.mesh.size[LM_AXIS_TP] = tp;
    return o;
}

/* tolerance: of weights and states; Adam divides small numbers by small ones. */
static void check(int i, const char *optim, int dp, int tp, bool rows, double tolerance)
{
    const lm_trainer_opts one = options(optim, 1, 1, false), many = options(optim, dp, tp, rows);
    assert_true(share_check(&tiny[i], models[i].name, &one, &many, tolerance) > 0);
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

/* Each tensor whose rule reads it whole has an owner, with its states: rows, columns, blocks of codes. */
static void optimisers_of_matrices(void **state)
{
    static const char *const optims[] = {
        "muon:bf16=off", "lamb", "adafactor", "sm3", "adam-mini", "adamw8bit:min-8bit-size=1"
    };
    (void)state;
    for (size_t k = 0; k < sizeof optims / sizeof *optims; k++)
        for (int i = 1; i < 3; i++) /* gradients of GPT-2's biases of keys are rounding alone */
            check(i, optims[k], 1 + (k + i) % 2, 2 * i, i % 2, 1e-3);
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
            ok(share_train(&o, &tiny[i], &t, &r[k], &e), &e);
            lm_trainer_free(t);
        }
        assert_true(fabs(r[0].loss - r[1].loss) <= 5e-3 * r[0].loss);
        assert_true(fabs(r[0].val_loss - r[1].val_loss) <= 5e-3 * r[0].loss);
    }
}

/* ---- refusals ---- */

/* ZeRO would have to share out what an owner has. */
static void matrices_beside_zero(void **state)
{
    lm_err e = { 0 };
    lm_trainer *t = NULL;
    lm_train_result r;
    lm_trainer_opts o = options("lamb", 2, 2, true);
    (void)state;
    o.zero = 1;
    assert_int_equal(share_train(&o, &tiny[1], &t, &r, &e), LM_EUSAGE);
    assert_non_null(strstr(e.what, "as a whole, and each rank along tp has a part of it"));
    lm_trainer_free(t);
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
        assert_int_equal(lm_fit_mesh(&tiny[cases[k].model].config, &mesh, 1, T, &e), LM_EUSAGE);
        assert_string_equal(e.what, cases[k].what);
        assert_string_equal(e.todo, cases[k].todo);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_agree_with_one),   cmocka_unit_test(optimisers_of_single_numbers),
        cmocka_unit_test(optimisers_of_matrices), cmocka_unit_test(in_bf16),
        cmocka_unit_test(matrices_beside_zero),   cmocka_unit_test(meshes_that_do_not_fit),
    };
    return cmocka_run_group_tests(tests, begin, end);
}
