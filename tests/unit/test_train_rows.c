/* SPDX-License-Identifier: Apache-2.0 */
/* test_train_rows.c -- ranks that share the rows of a micro-batch: windows of it with the experts of each layer (ep), or
 * positions of each window (cp).  Losses, weights and states are those of one rank up to rounding. */
#include "share_case.h"

#include "parallel/fit.h"

#define SIZES                                                                                \
    "\"vocab_size\":64,\"hidden_size\":32,\"intermediate_size\":24,\"num_hidden_layers\":2," \
    "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"max_position_embeddings\":64"
#define EXPERTS ",\"num_experts\":4,\"num_experts_per_tok\":2,\"moe_intermediate_size\":16"
enum {
    LLAMA,
    GPT2,
    GEMMA2,
    BLOOM,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    GPT_OSS,
    QWEN3_NEXT,
    DEEPSEEK,
    MODELS
};
static const struct {
    const char *name, *text;
} models[] = {
    [LLAMA] = { "llama", "{\"model_type\":\"llama\"," SIZES ",\"attention_bias\":true}" },
    [GPT2] = { "gpt2", "{\"model_type\":\"gpt2\",\"vocab_size\":64,\"n_embd\":32,\"n_head\":4,"
                       "\"n_positions\":64,\"n_layer\":2,\"resid_pdrop\":0.2,\"embd_pdrop\":0.1,"
                       "\"attn_pdrop\":0.3}" },
    /* scores that are capped, and windows */
    [GEMMA2] = { "gemma2",
                 "{\"model_type\":\"gemma2\"," SIZES ",\"head_dim\":8,\"sliding_window\":5,"
                 "\"query_pre_attn_scalar\":8}" },
    /* biases by distance */
    [BLOOM] = { "bloom", "{\"model_type\":\"bloom\",\"vocab_size\":64,\"hidden_size\":32,"
                         "\"n_layer\":2,\"n_head\":4,\"seq_length\":64}" },
    [MIXTRAL] = { "mixtral", "{\"model_type\":\"mixtral\"," SIZES ",\"num_local_experts\":4,"
                             "\"num_experts_per_tok\":2,\"output_router_logits\":true}" },
    /* a shared expert; five experts, of which ranks have two and three */
    [QWEN2_MOE] = { "qwen2-moe", "{\"model_type\":\"qwen2_moe\"," SIZES ",\"num_experts\":5,"
                                 "\"num_experts_per_tok\":2,\"moe_intermediate_size\":16,"
                                 "\"shared_expert_intermediate_size\":24}" },
    [QWEN3_MOE] = { "qwen3-moe", "{\"model_type\":\"qwen3_moe\"," SIZES EXPERTS
                                 ",\"head_dim\":8,\"mlp_only_layers\":[0]}" },
    /* experts in one tensor, which files turn; sinks; biases of experts */
    [GPT_OSS] = { "gpt-oss",
                  "{\"model_type\":\"gpt_oss\"," SIZES ",\"head_dim\":8,\"sliding_window\":3,"
                  "\"num_local_experts\":4,\"num_experts_per_tok\":2}" },
    [QWEN3_NEXT] = { "qwen3-next", "{\"model_type\":\"qwen3_next\"," SIZES EXPERTS
                                   ",\"shared_expert_intermediate_size\":24,\"head_dim\":8,"
                                   "\"partial_rotary_factor\":0.5,\"full_attention_interval\":2,"
                                   "\"linear_num_key_heads\":2,\"linear_num_value_heads\":4,"
                                   "\"linear_key_head_dim\":8,\"linear_value_head_dim\":8}" },
    [DEEPSEEK] = { "deepseek-v3",
                   "{\"model_type\":\"deepseek_v3\",\"vocab_size\":64,\"hidden_size\":32,"
                   "\"intermediate_size\":24,\"num_hidden_layers\":2,\"num_attention_heads\":4,"
                   "\"num_key_value_heads\":4,\"max_position_embeddings\":64,\"q_lora_rank\":12,"
                   "\"kv_lora_rank\":8,\"qk_nope_head_dim\":8,\"qk_rope_head_dim\":4,"
                   "\"v_head_dim\":8,\"first_k_dense_replace\":1,\"n_shared_experts\":1,"
                   "\"n_routed_experts\":4,\"num_experts_per_tok\":2,\"n_group\":1,"
                   "\"topk_group\":1,\"moe_intermediate_size\":16}" },
};
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

static void check_in(int i, const char *mesh, lm_context context, bool documents)
{
    lm_err e = { 0 };
    lm_trainer_opts one = share_options("sgd:momentum=0.9", false);
    one.documents = documents;
    lm_trainer_opts many = one;
    ok(lm_mesh_read(mesh, &many.mesh, &e), &e);
    many.mesh.context = context;
    const int cut = share_check(&tiny[i], models[i].name, &one, &many, 2e-5);
    assert_true((cut > 0) == (strstr(mesh, "ep=") || strstr(mesh, "tp=")));
}

static void check(int i, const char *mesh)
{
    check_in(i, mesh, LM_CONTEXT_HEADS, true);
}

static void windows_and_experts(void **state)
{
    (void)state;
    for (int i = MIXTRAL; i < MODELS; i++) {
        check(i, "ep=2");
        check(i, i % 2 ? "dp=2,ep=2" : "tp=2,ep=2");
    }
}

static void positions(void **state)
{
    (void)state;
    for (int i = 0; i < MODELS; i++) {
        check(i, "cp=2");
        check(i, i == GPT2 || i == DEEPSEEK ? "tp=2,cp=2" : "dp=2,cp=2");
    }
    check(MIXTRAL, "ep=2,cp=2");
    /* several ranks have the same heads of keys */
    for (int i = 0; i < MODELS; i++)
        check(i, "cp=4");
    check(LLAMA, "tp=2,cp=2");
}

/* More ranks than heads of keys, too. */
static void around_a_ring(void **state)
{
    (void)state;
    for (int i = 0; i < MODELS; i++) {
        check_in(i, "cp=2", LM_CONTEXT_RING, true);
        check_in(i, "cp=4", LM_CONTEXT_RING, false);
        check_in(i, i % 2 ? "cp=2" : "cp=4", LM_CONTEXT_ENDS, i % 3);
    }
    check_in(GEMMA2, "cp=4", LM_CONTEXT_ENDS, true);
    check_in(GPT_OSS, "tp=2,cp=2", LM_CONTEXT_ENDS, true);
    check_in(MIXTRAL, "ep=2,cp=2", LM_CONTEXT_ENDS, true);
    check_in(GPT_OSS, "tp=2,cp=2", LM_CONTEXT_RING, true);
    check_in(DEEPSEEK, "dp=2,cp=4", LM_CONTEXT_RING, true);
    check_in(MIXTRAL, "ep=2,cp=2", LM_CONTEXT_RING, true);
}

/* Of values in BF16 sums are rounded once more. */
static void in_bf16(void **state)
{
    static const char *const meshes[] = { "dp=1", "ep=2", "cp=2", "cp=4" };
    (void)state;
    for (int i = MIXTRAL; i < MODELS; i++) {
        lm_train_result r[4];
        for (int k = 0; k < 4; k++) {
            lm_err e = { 0 };
            lm_trainer *t = NULL;
            lm_trainer_opts o = share_options("sgd", false);
            o.precision.low = LM_DTYPE_BF16;
            ok(lm_mesh_read(meshes[k], &o.mesh, &e), &e);
            o.mesh.context = k == 3 ? LM_CONTEXT_RING : LM_CONTEXT_HEADS;
            ok(share_train(&o, &tiny[i], &t, &r[k], &e), &e);
            lm_trainer_free(t);
            assert_true(fabs(r[0].loss - r[k].loss) <= 5e-3 * r[0].loss);
        }
    }
}

/* ---- refusals ---- */

static void meshes_that_do_not_fit(void **state)
{
    static const struct {
        int model;
        const char *mesh, *what, *todo;
    } cases[] = {
        { LLAMA, "ep=2", "ep=2 shares experts, of which this model has 0", "choose dp=2" },
        { MIXTRAL, "ep=8", "ep=8 does not divide 4 experts", "choose ep=4" },
        { LLAMA, "cp=8", "cp=8 does not divide 4 heads", "choose cp=4, or blocks around a ring" },
        { LLAMA, "tp=2,cp=4", "cp=4 does not divide 2 heads of a rank along tp",
          "choose cp=2, or blocks around a ring" },
        { DEEPSEEK, "cp=3", "cp=3 does not divide 4 heads", "choose cp=2 or cp=4" },
        { LLAMA, "cp=16", "cp=16 does not divide 4 heads", "choose cp=4, or blocks around a ring" },
        { MIXTRAL, "ep=3", "ep=3 does not divide 8 windows of a micro-batch",
          "choose ep=2 or ep=4" },
    };
    (void)state;
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        lm_err e = { 0 };
        lm_mesh mesh;
        ok(lm_mesh_read(cases[k].mesh, &mesh, &e), &e);
        assert_int_equal(lm_fit_mesh(&tiny[cases[k].model].config, &mesh, 8, T, &e), LM_EUSAGE);
        assert_string_equal(e.what, cases[k].what);
        assert_string_equal(e.todo, cases[k].todo);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(windows_and_experts),    cmocka_unit_test(positions),
        cmocka_unit_test(around_a_ring),          cmocka_unit_test(in_bf16),
        cmocka_unit_test(meshes_that_do_not_fit),
    };
    return cmocka_run_group_tests(tests, begin, end);
}
