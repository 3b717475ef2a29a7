/* SPDX-License-Identifier: Apache-2.0 */
/* config.json: keys that are read, values that are refused, and counts derived from it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "model/arch.h"
#include "model_run.h"

static const char gpt2[] =
    "{\"model_type\":\"gpt2\",\"vocab_size\":50257,\"n_embd\":768,\"n_layer\":12,\"n_head\":12}";
static const char llama[] =
    "{\"model_type\":\"llama\",\"vocab_size\":128256,\"hidden_size\":4096,"
    "\"intermediate_size\":14336,\"num_hidden_layers\":32,\"num_attention_heads\":32,"
    "\"num_key_value_heads\":8,\"rope_theta\":500000.0,\"max_position_embeddings\":8192}";

/* The config `text` with the members of `change` put over it; a member that is null is removed. */
static json_t *changed(const char *text, const char *change)
{
    lm_err e = { 0 };
    json_t *o, *c, *v;
    const char *key;
    must(lm_json_parse(text, strlen(text), "config", &o, &e), &e);
    must(lm_json_parse(change, strlen(change), "change", &c, &e), &e);
    json_object_foreach(c, key, v)
    {
        if (json_is_null(v))
            json_object_del(o, key);
        else
            json_object_set(o, key, v);
    }
    json_decref(c);
    return o;
}

static void read_ok(const char *text, const char *change, lm_config *c)
{
    lm_err e = { 0 };
    json_t *o = changed(text, change);
    if (lm_config_read(o, "config.json", c, &e))
        fail_msg("%s: %s: %s", change, e.where, e.what);
    json_decref(o);
}

static void refused(const char *text, const char *change, const char *says)
{
    lm_err e = { 0 };
    lm_config c;
    json_t *o = changed(text, change);
    if (!lm_config_read(o, "config.json", &c, &e))
        fail_msg("%s was accepted", change);
    if (e.code != LM_EUSAGE ||
        !(strstr(e.what, says) || strstr(e.where, says) || strstr(e.todo, says)))
        fail_msg("%s: \"%s: %s\" does not name %s", change, e.where, e.what, says);
    json_decref(o);
}

static void test_missing(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        static const char *const keys[2][7] = {
            { "model_type", "vocab_size", "n_embd", "n_layer", "n_head" },
            { "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
              "num_attention_heads" },
        };
        for (const char *const *k = keys[i]; *k; k++) {
            char change[64];
            snprintf(change, sizeof change, "{\"%s\":null}", *k);
            refused(i ? llama : gpt2, change, *k);
            snprintf(change, sizeof change, "{\"%s\":{}}", *k);
            refused(i ? llama : gpt2, change, *k);
            snprintf(change, sizeof change, "{\"%s\":-1}", *k);
            refused(i ? llama : gpt2, change, *k);
        }
    }
}

static void test_contradictions(void **state)
{
    static const char *const bad[][3] = {
        { gpt2, "{\"n_head\":7}", "n_head" },
        { gpt2, "{\"activation_function\":\"relu\"}", "activation_function" },
        { gpt2, "{\"add_cross_attention\":true}", "add_cross_attention" },
        { gpt2, "{\"resid_pdrop\":1.0}", "dropout" },
        { gpt2, "{\"attn_pdrop\":-0.1}", "dropout" },
        { gpt2, "{\"layer_norm_epsilon\":0}", "psilon" },
        { gpt2, "{\"n_layer\":99999999}", "n_layer" },
        { gpt2, "{\"vocab_size\":5000000000}", "vocab_size" },
        { gpt2, "{\"bos_token_id\":\"a\"}", "bos_token_id" },
        { gpt2, "{\"tie_word_embeddings\":1}", "tie_word_embeddings" },
        { llama, "{\"model_type\":\"falcon\"}", "falcon" },
        { llama, "{\"model_type\":\"gemma3\",\"text_config\":{\"model_type\":\"gemma3_text\"}}",
          "save its text model alone" },
        { llama, "{\"model_type\":\"falcon\"}",
          "gpt2, llama, mistral, qwen2, qwen3, olmo2, olmo3, gemma2, gemma3_text, mixtral, "
          "qwen2_moe, qwen3_moe, dots1, qwen3_next, qwen3_5_text, gpt_oss, deepseek_v2, "
          "deepseek_v3, bert, bloom, t5 and lm_hybrid" },
        { llama,
          "{\"model_type\":\"bloom\",\"num_hidden_layers\":null,\"num_attention_heads\":null,"
          "\"n_layer\":2,\"n_head\":4,\"apply_residual_connection_post_layernorm\":true}",
          "apply_residual_connection_post_layernorm" },
        { llama, "{\"model_type\":\"bloom\",\"n_layer\":2}",
          "\"num_hidden_layers\" is 32, but \"n_layer\" is 2" },
        { llama, "{\"model_type\":\"bloom\",\"num_attention_heads\":null,\"n_head\":7}",
          "n_head 7 does not divide hidden_size" },
        { llama, "{\"model_type\":\"gemma2\",\"hidden_activation\":\"silu\"}",
          "hidden_activation" },
        { llama, "{\"model_type\":\"gemma2\",\"attn_logit_softcapping\":-1}", "attn_logit_soft" },
        { llama, "{\"model_type\":\"gemma2\",\"query_pre_attn_scalar\":0}",
          "query_pre_attn_scalar" },
        { llama, "{\"model_type\":\"gemma3_text\",\"use_bidirectional_attention\":true}",
          "use_bidirectional_attention" },
        { llama, "{\"model_type\":\"gemma3_text\",\"sliding_window_pattern\":0}", "pattern" },
        { llama, "{\"model_type\":\"gemma3_text\",\"rope_local_base_freq\":0}", "rope_theta" },
        { llama, "{\"model_type\":\"gemma3_text\",\"rope_parameters\":{\"full_attention\":[]}}",
          "rope_parameters" },
        { llama, "{\"model_type\":\"gemma3_text\",\"rope_parameters\":{\"rope_theta\":5}}",
          "no set for a kind of layer" },
        { llama,
          "{\"model_type\":\"gemma3_text\",\"rope_parameters\":{\"full_attention\":{}},"
          "\"rope_scaling\":{\"rope_type\":\"linear\",\"factor\":8}}",
          "are both given" },
        { llama, "{\"num_key_value_heads\":5}", "num_key_value_heads" },
        { llama, "{\"head_dim\":7}", "head_dim" },
        { llama, "{\"num_attention_heads\":24,\"num_key_value_heads\":8}", "head_dim" },
        { llama, "{\"hidden_act\":\"gelu\"}", "hidden_act" },
        { llama, "{\"rms_norm_eps\":0}", "psilon" },
        { llama, "{\"rope_theta\":0}", "rope_theta" },
        { llama, "{\"rope_theta\":\"big\"}", "rope_theta" },
        { llama, "{\"quantization_config\":{}}", "quantization_config" },
        { llama, "{\"rope_scaling\":[]}", "rope" },
        { llama, "{\"rope_scaling\":{\"type\":\"spiral\",\"factor\":2}}", "spiral" },
        { llama, "{\"rope_scaling\":{\"type\":\"linear\"}}", "factor" },
        { llama, "{\"rope_scaling\":{\"type\":\"linear\",\"factor\":0.5}}", "factor" },
        { llama, "{\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8}}", "original" },
        { llama, "{\"rope_scaling\":{\"factor\":8}}", "no \"rope_type\"" },
        { llama, "{\"rope_scaling\":{\"rope_type\":null,\"beta_fast\":8}}", "beta_fast" },
        { llama, "{\"rope_parameters\":{\"rope_theta\":1e4,\"factor\":2}}", "rope_parameters" },
        { llama,
          "{\"rope_parameters\":{\"rope_theta\":1e4},"
          "\"rope_scaling\":{\"type\":\"linear\",\"factor\":2}}",
          "differ" },
        { llama, "{\"rope_parameters\":{\"full_attention\":{\"rope_theta\":1e4}}}",
          "full_attention" },
        { llama,
          "{\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":4,"
          "\"high_freq_factor\":1,\"original_max_position_embeddings\":8192}}",
          "freq_factor" },
        { llama, "{\"rope_parameters\":{\"rope_theta\":1e4,\"partial_rotary_factor\":0.5}}",
          "partial_rotary_factor" },
        { llama, "{\"partial_rotary_factor\":0.5}", "partial_rotary_factor" },
        { llama, "{\"model_type\":\"mistral\",\"sliding_window\":8,\"layer_types\":[\"x\"]}",
          "layer_types" },
        { llama, "{\"model_type\":\"mistral\",\"sliding_window\":-4}", "sliding_window" },
        { llama, "{\"model_type\":\"qwen2\",\"num_hidden_layers\":1,\"layer_types\":[\"linear\"]}",
          "layer_types" },
        { llama,
          "{\"model_type\":\"qwen2\",\"num_hidden_layers\":1,"
          "\"layer_types\":[\"sliding_attention\"]}",
          "layer_types" },
    };
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        refused(bad[i][0], bad[i][1], bad[i][2]);
}

/* num_key_value_heads: absent, the default of the published class; null, one for each head. */
static void test_kv_heads(void **state)
{
    static const struct {
        const char *type;
        int64_t kv_heads;
    } known[] = { { "llama", 64 }, { "mistral", 8 }, { "qwen2", 32 }, { "qwen3", 32 },
                  { "olmo2", 64 }, { "olmo3", 64 },  { "gemma2", 4 }, { "gemma3_text", 4 } };
    lm_err e = { 0 };
    lm_config c;
    (void)state;
    for (size_t i = 0; i < 2 * sizeof known / sizeof *known; i++) {
        json_t *o = changed(llama, "{\"num_attention_heads\":64,\"num_key_value_heads\":null}");
        json_object_set_new(o, "model_type", json_string(known[i / 2].type));
        if (i % 2)
            json_object_set_new(o, "num_key_value_heads", json_null());
        must(lm_config_read(o, "config.json", &c, &e), &e);
        assert_int_equal(c.layer[0].kv_heads, i % 2 ? 64 : known[i / 2].kv_heads);
        lm_config_fini(&c);
        json_decref(o);
    }
}

/* Old and new spellings of the rotary keys are equivalent. */
static void test_rope_spellings(void **state)
{
    static const char *const same[3] = {
        "{\"rope_theta\":5e4,\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4,"
        "\"original_max_position_embeddings\":2048}}",
        "{\"rope_theta\":5e4,\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":4.0,"
        "\"original_max_position_embeddings\":2048}}",
        "{\"rope_theta\":null,\"rope_parameters\":{\"rope_theta\":5e4,\"rope_type\":\"yarn\","
        "\"factor\":4.0,\"original_max_position_embeddings\":2048}}",
    };
    lm_config c[3];
    (void)state;
    for (int i = 0; i < 3; i++) {
        read_ok(llama, same[i], &c[i]);
        assert_int_equal(c[i].rope[0].type, LM_ROPE_YARN);
        assert_memory_equal(&c[i].rope, &c[0].rope, sizeof c[0].rope);
        if (i)
            lm_config_fini(&c[i]);
    }
    lm_config_fini(&c[0]);
    read_ok(llama, "{\"rope_theta\":null}", &c[0]);
    assert_true(c[0].rope[0].theta == 10000);
    lm_config_fini(&c[0]);
    /* Without a type only the base of the frequencies is read. */
    read_ok(llama, "{\"rope_theta\":null,\"rope_parameters\":{\"rope_theta\":5e4}}", &c[0]);
    assert_true(c[0].rope[0].type == LM_ROPE_DEFAULT && c[0].rope[0].theta == 5e4);
    lm_config_fini(&c[0]);
    read_ok(llama, "{\"rope_scaling\":{\"rope_type\":\"default\",\"type\":\"default\"}}", &c[0]);
    assert_true(c[0].rope[0].type == LM_ROPE_DEFAULT && c[0].rope[0].theta == 5e5);
    lm_config_fini(&c[0]);
}

/* A config of transformers 5: "dtype", rope_parameters, every default written. */
static void test_transformers_5(void **state)
{
    static const char llama3[] =
        "{\"attention_bias\":false,\"bos_token_id\":1,\"dtype\":\"bfloat16\",\"eos_token_id\":2,"
        "\"head_dim\":64,\"hidden_act\":\"silu\",\"hidden_size\":256,\"initializer_range\":0.02,"
        "\"intermediate_size\":512,\"max_position_embeddings\":131072,\"mlp_bias\":false,"
        "\"model_type\":\"llama\",\"num_attention_heads\":4,\"num_hidden_layers\":2,"
        "\"num_key_value_heads\":4,\"pad_token_id\":null,\"pretraining_tp\":1,\"rms_norm_eps\":1e-"
        "06,"
        "\"rope_parameters\":{\"factor\":8.0,\"high_freq_factor\":4.0,\"low_freq_factor\":1.0,"
        "\"original_max_position_embeddings\":8192,\"rope_theta\":500000.0,\"rope_type\":"
        "\"llama3\"},"
        "\"tie_word_embeddings\":false,\"transformers_version\":\"5.23.0\",\"use_cache\":true,"
        "\"vocab_size\":32000}";
    static const char sliding[] =
        "{\"dtype\":\"bfloat16\",\"bos_token_id\":null,\"hidden_size\":256,\"intermediate_size\":"
        "512,"
        "\"layer_types\":[\"full_attention\",\"sliding_attention\"],\"max_window_layers\":1,"
        "\"model_type\":\"qwen2\",\"num_attention_heads\":4,\"num_hidden_layers\":2,"
        "\"num_key_value_heads\":4,\"rope_parameters\":{\"rope_theta\":1e6,\"rope_type\":"
        "\"default\"},"
        "\"sliding_window\":64,\"use_sliding_window\":true,\"vocab_size\":32000}";
    lm_config c;
    (void)state;
    read_ok(llama3, "{}", &c);
    assert_true(c.rope[0].type == LM_ROPE_LLAMA3 && c.rope[0].theta == 5e5 &&
                c.rope[0].factor == 8);
    assert_true(c.pad == -1 && c.bos == 1);
    lm_config_fini(&c);
    read_ok(sliding, "{}", &c);
    assert_true(c.rope[0].type == LM_ROPE_DEFAULT && c.rope[0].theta == 1e6);
    assert_true(!c.layer[0].window && c.layer[1].window);
    lm_config_fini(&c);
    refused(llama3, "{\"model_type\":\"dbrx\",\"num_experts\":16}", "mixture of 16 experts");
    refused(llama3, "{\"model_type\":\"phimoe\",\"num_local_experts\":32}",
            "mixture of 32 experts");
    refused(llama3, "{\"model_type\":\"kimi\",\"text_config\":{\"n_routed_experts\":384}}",
            "mixture of 384 experts");
}

/* All ids that end a text, each once, below the vocabulary. */
static void test_eos(void **state)
{
    static const struct {
        const char *change;
        int n;
        int64_t first, last;
    } cases[] = { { "{}", 0, -1, -1 },
                  { "{\"eos_token_id\":7}", 1, 7, 7 },
                  { "{\"eos_token_id\":-1}", 0, -1, -1 },
                  { "{\"eos_token_id\":[128001,128008,128001,128009,999999]}", 3, 128001,
                    128009 } };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        lm_config c;
        read_ok(llama, cases[i].change, &c);
        assert_int_equal(c.n_eos, cases[i].n);
        assert_int_equal(lm_config_eos(&c), cases[i].first);
        if (c.n_eos)
            assert_int_equal(c.eos[c.n_eos - 1], cases[i].last);
        lm_config_fini(&c);
    }
    refused(llama, "{\"eos_token_id\":[1,\"b\"]}", "eos_token_id");
}

static void test_windows(void **state)
{
    lm_config c;
    (void)state;
    read_ok(llama, "{\"model_type\":\"mistral\"}", &c); /* the class's window */
    assert_true(c.layer[0].window == 4096);
    lm_config_fini(&c);
    read_ok(llama, "{\"model_type\":\"mistral\",\"sliding_window\":64}", &c);
    assert_true(c.layer[0].window == 64);
    lm_config_fini(&c);
    read_ok(llama, "{\"model_type\":\"qwen2\",\"sliding_window\":64,\"max_window_layers\":20}", &c);
    assert_false(c.layer[31].window); /* use_sliding_window is false when absent */
    lm_config_fini(&c);
    read_ok(llama,
            "{\"model_type\":\"qwen2\",\"sliding_window\":64,\"max_window_layers\":20,"
            "\"use_sliding_window\":true}",
            &c);
    assert_true(!c.layer[19].window && c.layer[20].window);
    lm_config_fini(&c);
    json_t *o = changed(llama, "{\"model_type\":\"mistral\"}");
    lm_err e = { 0 };
    json_object_set_new(o, "sliding_window", json_null());
    must(lm_config_read(o, "config.json", &c, &e), &e);
    assert_int_equal(c.layer[0].window, 0);
    lm_config_fini(&c);
    json_decref(o);
}

/* The result of lm_config_params, which counts tensors, by a closed formula for a decoder with
 * equal layers. */
static int64_t by_formula(const lm_config *c)
{
    const lm_layer *y = &c->layer[0];
    int64_t q = y->heads * y->head_dim, kv = y->kv_heads * y->head_dim, w = c->width;
    int64_t norm = c->norm == LM_NORM_LAYER ? 2 * w : w, gates = lm_mlp_gated(y->mlp) ? 2 : 1;
    int64_t qk = y->qk_norm == LM_QK_NORM_ROW ? q + kv : y->qk_norm ? 2 * y->head_dim : 0;
    int64_t layer = w * (2 * q + 2 * kv) + (gates + 1) * w * y->ffn + qk +
                    (y->norm_before ? 2 * norm : 0) + (y->norm_after ? 2 * norm : 0);
    layer += (y->qkv_bias ? q + 2 * kv : 0) + (y->out_bias ? w : 0) +
             (y->mlp_bias ? gates * y->ffn + w : 0);
    return c->vocab * w * (c->tied ? 1 : 2) + c->layers * layer + norm +
           (c->ropes ? 0 : c->max_positions * w);
}

/* Mixtures of experts: sizes as published, and keys that contradict each other. */
static void test_experts(void **state)
{
    static const char mixtral[] =
        "{\"model_type\":\"mixtral\",\"vocab_size\":32000,\"num_local_experts\":8,"
        "\"num_experts_per_tok\":2,\"router_aux_loss_coef\":0.02}";
    static const char qwen2[] = "{\"model_type\":\"qwen2_moe\",\"vocab_size\":151936,\"hidden_"
                                "size\":2048,\"intermediate_size\":5632,"
                                "\"num_hidden_layers\":24,\"num_attention_heads\":16,\"num_key_"
                                "value_heads\":16,\"num_experts\":60,"
                                "\"num_experts_per_tok\":4,\"moe_intermediate_size\":1408,\"shared_"
                                "expert_intermediate_size\":5632}";
    static const char qwen3[] =
        "{\"model_type\":\"qwen3_moe\",\"vocab_size\":151936,\"hidden_size\":2048,\"intermediate_"
        "size\":6144,"
        "\"num_hidden_layers\":48,\"num_attention_heads\":32,\"num_key_value_heads\":4,\"head_"
        "dim\":128,\"num_experts\":128,"
        "\"num_experts_per_tok\":8,\"moe_intermediate_size\":768,\"norm_topk_prob\":true}";
    static const char dots[] =
        "{\"model_type\":\"dots1\",\"vocab_size\":152064,\"hidden_size\":4096,\"intermediate_"
        "size\":10944,\"num_hidden_layers\":62,\"num_attention_heads\":32,\"num_key_value_heads\":"
        "32,"
        "\"n_routed_experts\":128,\"n_shared_experts\":2,\"num_experts_per_tok\":6,\"moe_"
        "intermediate_size\":1408,\"first_k_dense_replace\":1,\"norm_topk_prob\":true,\"routed_"
        "scaling_factor\":2.5,\"sliding_window\":null}";
    static const char *const bad[][3] = {
        { mixtral, "{\"num_experts_per_tok\":9}",
          "\"num_experts_per_tok\" is 9, but \"num_local_experts\" is 8" },
        { mixtral, "{\"num_local_experts\":0}", "num_local_experts" },
        { mixtral, "{\"router_jitter_noise\":1.5}", "router_jitter_noise" },
        { mixtral, "{\"gate_noise_epsilon\":-1}", "gate_noise_epsilon" },
        { mixtral, "{\"gate_add_noise\":2}", "gate_add_noise" },
        { qwen2, "{\"mlp_only_layers\":[24]}", "mlp_only_layers" },
        { qwen2, "{\"mlp_only_layers\":3}", "mlp_only_layers" },
        { qwen2, "{\"decoder_sparse_step\":0}", "decoder_sparse_step" },
        { qwen3, "{\"num_local_experts\":64}",
          "\"num_experts\" is 128, but \"num_local_experts\" is 64" },
    };
    lm_config c;
    (void)state;
    read_ok(llama, mixtral, &c);
    assert_true(c.layer[31].moe.experts == 8 && c.layer[0].moe.normalise && !c.layer[0].moe.shared);
    assert_int_equal(lm_config_params(&c), 46702792704);
    assert_int_equal(lm_config_active_params(&c), 12879925248);
    lm_config_fini(&c);
    read_ok(llama, qwen2, &c);
    assert_true(!c.layer[0].moe.normalise && c.layer[0].moe.shared == 5632 && c.layer[0].qkv_bias);
    assert_int_equal(lm_config_params(&c), 14315784192);
    lm_config_fini(&c);
    read_ok(llama, qwen3, &c);
    assert_int_equal(lm_config_params(&c), 30532122624);
    assert_true(lm_config_alike(&c));
    lm_config_fini(&c);
    read_ok(llama, dots, &c);
    assert_true(!c.layer[0].moe.experts && c.layer[1].moe.sigmoid && c.layer[1].moe.score_bias);
    assert_true(c.layer[1].moe.shared == 2816 && c.layer[1].moe.scale > 2.4);
    assert_int_equal(lm_config_params(&c) / 1000000000, 142); /* 142B-A14B, as its card says */
    assert_int_equal(lm_config_active_params(&c) / 1000000000, 14);
    lm_config_fini(&c);
    read_ok(qwen3, "{\"num_experts\":null,\"num_local_experts\":16}", &c);
    assert_int_equal(c.layer[5].moe.experts, 16);
    lm_config_fini(&c);
    read_ok(qwen3, "{\"mlp_only_layers\":[1],\"decoder_sparse_step\":2}", &c);
    assert_true(!c.layer[0].moe.experts && !c.layer[1].moe.experts && c.layer[3].moe.experts);
    assert_false(lm_config_alike(&c));
    lm_config_fini(&c);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        json_t *o = changed(llama, bad[i][0]);
        char *text = json_dumps(o, 0);
        refused(text, bad[i][1], bad[i][2]);
        free(text);
        json_decref(o);
    }
}

/* Qwen3-Next's kinds of layers, in both spellings, and the part of heads that it rotates. */
static void states_and_attention(void **state)
{
    static const char next[] =
        "{\"model_type\":\"qwen3_next\",\"vocab_size\":151936,\"hidden_size\":2048,\"intermediate_"
        "size\":5120,\"num_hidden_layers\":48,\"num_attention_heads\":16,\"num_key_value_heads\":2,"
        "\"head_dim\":256}";
    static const char two[] = "{\"num_hidden_layers\":2,\"layer_types\":[\"linear_attention\","
                              "\"full_attention\"]}";
    static const char *const bad[][2] = {
        { "{\"layer_types\":[\"full_attention\"]}", "layer_types" },
        { "{\"num_hidden_layers\":1,\"layer_types\":[\"sliding_attention\"]}", "layer_types" },
        { "{\"full_attention_interval\":0}", "full_attention_interval" },
        { "{\"linear_num_key_heads\":5}", "does not divide linear_num_value_heads 32" },
        { "{\"linear_conv_kernel_dim\":1}", "linear_conv_kernel_dim" },
        { "{\"linear_conv_kernel_dim\":9}", "linear_conv_kernel_dim" },
        { "{\"partial_rotary_factor\":1.5}", "partial_rotary_factor" },
        { "{\"partial_rotary_factor\":0}", "partial_rotary_factor" },
        { "{\"partial_rotary_factor\":4e18}", "partial_rotary_factor" },
        { "{\"rope_parameters\":{\"rope_type\":\"default\",\"partial_rotary_factor\":0.012}}",
          "partial_rotary_factor" },
    };
    lm_config c;
    (void)state;
    read_ok(llama, next, &c);
    assert_int_equal(lm_config_params(&c), 79674391296);
    assert_int_equal(c.layer[2].attention, LM_ATTENTION_DELTA);
    assert_int_equal(c.layer[3].attention, LM_ATTENTION_HEADS);
    assert_true(c.layer[3].out_gate && !c.layer[2].out_gate && c.layer[0].moe.normalise);
    assert_int_equal(c.rope[0].dim, 64);
    assert_true(lm_config_passes_over(&c, "mtp.layers.0.mlp.gate.weight"));
    assert_false(lm_config_passes_over(&c, "model.layers.0.mlp.gate.weight"));
    assert_false(lm_config_alike(&c));
    lm_config_fini(&c);
    json_t *o = changed(llama, next);
    char *text = json_dumps(o, 0);
    read_ok(text, two, &c);
    assert_true(c.layer[0].attention == LM_ATTENTION_DELTA && c.layer[1].out_gate);
    lm_config_fini(&c);
    read_ok(text, "{\"rope_parameters\":{\"rope_type\":\"default\",\"partial_rotary_factor\":1}}",
            &c);
    assert_int_equal(c.rope[0].dim, 256);
    lm_config_fini(&c);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        refused(text, bad[i][0], bad[i][1]);
    free(text);
    json_decref(o);
}

/* Published configs of DeepSeek-V2-Lite and V3, as far as they matter. */
static const char v2_lite[] =
    "{\"model_type\":\"deepseek_v2\",\"vocab_size\":102400,\"hidden_size\":2048,\"intermediate_"
    "size\":10944,"
    "\"num_hidden_layers\":27,\"num_attention_heads\":16,\"num_key_value_heads\":16,\"q_lora_"
    "rank\":null,"
    "\"kv_lora_rank\":512,\"qk_nope_head_dim\":128,\"qk_rope_head_dim\":64,\"v_head_dim\":128,"
    "\"n_routed_experts\":64,\"n_shared_experts\":2,\"num_experts_per_tok\":6,\"moe_intermediate_"
    "size\":1408,"
    "\"first_k_dense_replace\":1,\"moe_layer_freq\":1,\"n_group\":1,\"topk_group\":1,\"topk_"
    "method\":\"greedy\","
    "\"scoring_func\":\"softmax\",\"norm_topk_prob\":false,\"routed_scaling_factor\":1.0,"
    "\"rope_scaling\":{\"type\":\"yarn\",\"factor\":40,\"beta_fast\":32,\"beta_slow\":1,\"mscale\":"
    "0.707,"
    "\"mscale_all_dim\":0.707,\"original_max_position_embeddings\":4096}}";
static const char v3[] =
    "{\"model_type\":\"deepseek_v3\",\"vocab_size\":129280,\"hidden_size\":7168,\"intermediate_"
    "size\":18432,"
    "\"num_hidden_layers\":61,\"num_attention_heads\":128,\"num_key_value_heads\":128,\"q_lora_"
    "rank\":1536,"
    "\"kv_lora_rank\":512,\"qk_nope_head_dim\":128,\"qk_rope_head_dim\":64,\"v_head_dim\":128,"
    "\"n_routed_experts\":256,\"n_shared_experts\":1,\"num_experts_per_tok\":8,\"moe_intermediate_"
    "size\":2048,"
    "\"first_k_dense_replace\":3,\"moe_layer_freq\":1,\"n_group\":8,\"topk_group\":4,\"topk_"
    "method\":\"noaux_tc\","
    "\"scoring_func\":\"sigmoid\",\"norm_topk_prob\":true,\"routed_scaling_factor\":2.5,"
    "\"num_nextn_predict_layers\":1,"
    "\"rope_scaling\":{\"type\":\"yarn\",\"factor\":40,\"beta_fast\":32,\"beta_slow\":1,\"mscale\":"
    "1.0,"
    "\"mscale_all_dim\":1.0,\"original_max_position_embeddings\":4096}}";

static const char bert_base[] =
    "{\"model_type\":\"bert\",\"vocab_size\":30522,\"hidden_size\":768,\"num_hidden_layers\":12,"
    "\"num_attention_heads\":12,\"intermediate_size\":3072,\"architectures\":[\"BertForMaskedLM\"]"
    "}";

static void encoders(void **state)
{
    static const char *const bad[][2] = {
        { "{\"num_attention_heads\":7}", "num_attention_heads" },
        { "{\"hidden_act\":\"relu\"}", "hidden_act" },
        { "{\"position_embedding_type\":\"relative_key\"}", "position_embedding_type" },
        { "{\"is_decoder\":true}", "is_decoder" },
        { "{\"add_cross_attention\":true}", "add_cross_attention" },
        { "{\"tie_word_embeddings\":false}", "tie_word_embeddings" },
        { "{\"pruned_heads\":{\"1\":[0]}}", "pruned_heads" },
        { "{\"type_vocab_size\":0}", "type_vocab_size" },
        { "{\"layer_norm_eps\":0}", "psilon" },
        { "{\"hidden_dropout_prob\":1.0}", "dropout" },
        { "{\"architectures\":[\"BertForSequenceClassification\"]}", "architectures" },
        { "{\"intermediate_size\":null}", "intermediate_size" },
    };
    lm_config c;
    lm_err e = { 0 };
    char name[LM_TENSOR_NAME];
    (void)state;
    read_ok(bert_base, "{\"hidden_act\":\"gelu_new\",\"attention_probs_dropout_prob\":0.2}", &c);
    assert_int_equal(lm_config_params(&c), 109514298); /* BertForMaskedLM(BertConfig()) */
    assert_true(lm_config_bidirectional(&c) && c.layer[0].mlp == LM_MLP_GELU && c.tied);
    assert_true(c.types == 2 && c.max_positions == 512 && fabs(c.norm_eps - 1e-12) < 1e-20);
    assert_true(fabs(c.drop_attn - 0.2) < 1e-9 && fabs(c.drop_resid - 0.1) < 1e-9);
    assert_int_equal(lm_config_check_causal(&c, "m", "try", &e), LM_EUSAGE);
    assert_true(lm_config_passes_over(&c, "bert.pooler.dense.weight"));
    assert_true(lm_config_passes_over(&c, "cls.seq_relationship.bias"));
    assert_true(lm_config_ties(&c, "cls.predictions.decoder.weight") &&
                lm_config_ties(&c, "cls.predictions.decoder.bias"));
    assert_false(lm_config_passes_over(&c, "cls.predictions.bias"));
    assert_string_equal(lm_arch_present_name(c.arch, "bert.embeddings.LayerNorm.gamma", name),
                        "bert.embeddings.LayerNorm.weight");
    assert_string_equal(
        lm_arch_present_name(c.arch, "cls.predictions.transform.LayerNorm.beta", name),
        "cls.predictions.transform.LayerNorm.bias");
    assert_string_equal(lm_arch_present_name(&lm_arch_gpt2, "ln.beta", name), "ln.beta");
    lm_config_fini(&c);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        refused(bert_base, bad[i][0], bad[i][1]);
}

static void test_latent(void **state)
{
    static const char *const bad[][3] = {
        { v3, "{\"scoring_func\":\"softmax\"}",
          "\"scoring_func\" is \"softmax\", but the model has \"sigmoid\"" },
        { v3, "{\"topk_method\":\"greedy\"}", "topk_method" },
        { v3, "{\"n_group\":7}", "\"n_group\" is 7, but \"n_routed_experts\" is 256" },
        { v3, "{\"num_key_value_heads\":64}", "\"num_key_value_heads\" is 64" },
        { v3, "{\"head_dim\":128}", "\"head_dim\" is 128, but other keys make it 64" },
        { v3, "{\"qk_head_dim\":128}", "\"qk_head_dim\" is 128, but other keys make it 192" },
        { v3, "{\"qk_rope_head_dim\":63}", "qk_rope_head_dim" },
        { v3, "{\"v_head_dim\":193}", "v_head_dim" },
        { v3, "{\"moe_layer_freq\":0}", "moe_layer_freq" },
        { v3, "{\"num_nextn_predict_layers\":9}", "num_nextn_predict_layers" },
        { v3, "{\"num_nextn_predict_layers\":-1}", "num_nextn_predict_layers" },
        { v3, "{\"routed_scaling_factor\":0}", "routed_scaling_factor" },
        { v2_lite, "{\"topk_method\":\"noaux_tc\"}", "unknown topk_method \"noaux_tc\"" },
        { v2_lite, "{\"scoring_func\":\"sigmoid\"}", "scoring_func" },
        { v2_lite, "{\"norm_topk_prob\":true}", "norm_topk_prob" },
        { v2_lite, "{\"topk_method\":\"group_limited_greedy\",\"topk_group\":2}", "topk_group" },
        { v2_lite, "{\"mlp_bias\":true}", "mlp_bias" },
    };
    lm_config c;
    (void)state;
    read_ok(v2_lite, "{}", &c);
    double m = 0.1 * 0.707 * log(40) + 1;
    assert_true(fabs(c.layer[3].scale * sqrt(192) / (m * m) - 1) < 1e-12);
    assert_true(!c.layer[0].moe.experts && c.layer[1].moe.experts == 64 && !c.layer[1].moe.sigmoid);
    assert_true(c.layer[1].moe.groups == 1 && c.layer[1].moe.group_max && c.layer[1].latent.pairs);
    assert_true(c.rope[0].dim == 64 && c.layer[1].head_dim == 192 && !c.layer[1].latent.q_rank);
    assert_int_equal(lm_config_params(&c), INT64_C(15706484224));
    lm_config_fini(&c);
    read_ok(v3, "{}", &c);
    assert_int_equal(lm_config_params(&c), INT64_C(671026419200)); /* 671B-A37B, as its card says */
    assert_int_equal(lm_config_active_params(&c) / 1000000000, 37);
    assert_true(c.layer[3].moe.groups == 8 && c.layer[3].moe.score_bias && !c.layer[2].moe.experts);
    assert_true(lm_config_passes_over(&c, "model.layers.61.eh_proj.weight") &&
                !lm_config_passes_over(&c, "model.layers.62.eh_proj.weight") &&
                !lm_config_passes_over(&c, "model.layers.60.self_attn.o_proj.weight"));
    /* a whole layer, two norms, the norm of the head, and the product of both halves */
    const int64_t own = c.width * (3 + 2 * c.width);
    lm_part of = 0;
    assert_int_equal(c.ahead, 1);
    assert_int_equal(c.layer[61].moe.experts, 256);
    assert_int_equal(lm_config_ahead_params(&c) - own, INT64_C(11507286272));
    assert_true(lm_ahead_is_copy(&c, "model.layers.61.shared_head.head.weight", &of) &&
                of == LM_PART_OUTPUT);
    assert_true(lm_ahead_is_copy(&c, "model.layers.61.embed_tokens.weight", &of) &&
                of == LM_PART_EMBED);
    assert_false(lm_ahead_is_copy(&c, "model.layers.61.shared_head.norm.weight", &of));
    lm_config_fini(&c);
    read_ok(v3, "{\"num_nextn_predict_layers\":null}", &c);
    assert_int_equal(c.ahead, 0);
    assert_false(lm_config_passes_over(&c, "model.layers.61.eh_proj.weight"));
    lm_config_fini(&c);
    read_ok(v3, "{\"moe_layer_freq\":2,\"rope_interleave\":false,\"rope_scaling\":null}", &c);
    assert_true(!c.layer[3].moe.experts && c.layer[4].moe.experts && !c.layer[4].latent.pairs);
    assert_true(fabs(c.layer[4].scale * sqrt(192) - 1) < 1e-12);
    lm_config_fini(&c);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        refused(bad[i][0], bad[i][1], bad[i][2]);
}

/* Gemma's kinds of layers, and its two rotary tables in both spellings. */
static void test_gemma(void **state)
{
    static const char *const same[] = {
        "{\"model_type\":\"gemma3_text\",\"rope_theta\":1e6,\"rope_local_base_freq\":500,"
        "\"rope_scaling\":{\"rope_type\":\"linear\",\"factor\":8}}",
        "{\"model_type\":\"gemma3_text\",\"rope_theta\":null,\"rope_parameters\":{"
        "\"sliding_attention\":{\"rope_type\":\"default\",\"rope_theta\":500},"
        "\"full_attention\":{\"rope_type\":\"linear\",\"factor\":8,\"rope_theta\":1e6}}}",
    };
    lm_config c;
    (void)state;
    read_ok(llama, "{\"model_type\":\"gemma2\"}", &c);
    assert_true(c.layer[0].window == 4096 && c.layer[1].window == 0 && c.layer[2].window == 4096);
    assert_true(c.layer[0].soft_cap == 50 && c.logit_cap == 30 && c.embed_scale == 64);
    assert_true(c.norm_plus_one && c.tied && c.layer[0].norm_before && c.layer[0].norm_after);
    assert_true(c.layer[0].mlp == LM_MLP_GEGLU && c.layer[0].scale == 0.0625 && c.ropes == 1);
    lm_config_fini(&c);
    for (int i = 0; i < 2; i++) {
        read_ok(llama, same[i], &c);
        for (int64_t l = 0; l < c.layers; l++) {
            bool full = l % 6 == 5;
            assert_int_equal(c.layer[l].window, full ? 0 : 4096);
            assert_int_equal(c.layer[l].rope, full ? 0 : 1);
        }
        assert_true(c.layer[0].soft_cap == 0 && c.logit_cap == 0);
        assert_true(c.layer[0].qk_norm == LM_QK_NORM_HEAD && c.ropes == 2);
        assert_true(c.rope[0].type == LM_ROPE_LINEAR && c.rope[0].factor == 8);
        assert_true(c.rope[0].theta == 1e6 && c.rope[0].dim == 256 && c.rope[1].dim == 256);
        assert_true(c.rope[1].type == LM_ROPE_DEFAULT && c.rope[1].theta == 500);
        lm_config_fini(&c);
    }
    /* Gemma 3 has norms of queries and keys in place of the cap; its published class ignores the key */
    read_ok(llama, "{\"model_type\":\"gemma3_text\",\"attn_logit_softcapping\":50}", &c);
    assert_float_equal(c.layer[0].soft_cap, 0, 0);
    lm_config_fini(&c);
}

/* Parameter counts of the published files of the models. */
static void test_counts(void **state)
{
    static const struct {
        const char *base, *change;
        int64_t params;
    } known[] = {
        { gpt2, "{}", 124439808 },
        { gpt2, "{\"n_embd\":1600,\"n_layer\":48,\"n_head\":25}", 1557611200 },
        { llama, "{}", 8030261248 },
        { llama, "{\"vocab_size\":32000,\"intermediate_size\":11008,\"num_key_value_heads\":null}",
          6738415616 },
        { llama,
          "{\"hidden_size\":2048,\"intermediate_size\":8192,\"num_hidden_layers\":16,"
          "\"tie_word_embeddings\":true}",
          1235814400 },
        { llama, "{\"model_type\":\"mistral\",\"vocab_size\":32000}", 7241732096 },
        { llama,
          "{\"model_type\":\"qwen2\",\"vocab_size\":151936,\"hidden_size\":896,"
          "\"intermediate_size\":4864,\"num_hidden_layers\":24,\"num_attention_heads\":14,"
          "\"num_key_value_heads\":2,\"tie_word_embeddings\":true}",
          494032768 },
        { llama,
          "{\"model_type\":\"qwen3\",\"vocab_size\":151936,\"hidden_size\":1024,"
          "\"intermediate_size\":3072,\"num_hidden_layers\":28,\"num_attention_heads\":16,"
          "\"head_dim\":128,\"tie_word_embeddings\":true}",
          596049920 },
        { llama,
          "{\"model_type\":\"olmo2\",\"vocab_size\":100352,\"hidden_size\":2048,"
          "\"intermediate_size\":8192,\"num_hidden_layers\":16,\"num_attention_heads\":16,"
          "\"num_key_value_heads\":16}",
          1484916736 },
        { llama,
          "{\"model_type\":\"gemma2\",\"vocab_size\":256000,\"hidden_size\":2304,"
          "\"intermediate_size\":9216,\"num_hidden_layers\":26,\"num_attention_heads\":8,"
          "\"num_key_value_heads\":4}",
          2614341888 },
        { llama,
          "{\"model_type\":\"gemma3_text\",\"vocab_size\":262144,\"hidden_size\":1152,"
          "\"intermediate_size\":6912,\"num_hidden_layers\":26,\"num_attention_heads\":4,"
          "\"num_key_value_heads\":1}",
          999885952 },
    };
    (void)state;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        lm_config c;
        lm_err e = { 0 };
        lm_model *m;
        lm_build b = {
            .mode = LM_MODE_EVAL, .batch = 1, .seq = 8, .precision = { LM_DTYPE_F32, NULL }
        };
        int64_t sum = 0;
        read_ok(known[i].base, known[i].change, &c);
        if (lm_config_params(&c) != known[i].params)
            fail_msg("%s: %lld parameters, expected %lld", known[i].change,
                     (long long)lm_config_params(&c), (long long)known[i].params);
        assert_int_equal(by_formula(&c), known[i].params);
        assert_true(lm_config_train_flops(&c, 100) ==
                    6.0 * (double)lm_config_matmul_params(&c) +
                        1200.0 * (double)(c.layers * c.layer[0].heads * c.layer[0].head_dim));
        must(lm_model_build(&c, &b, &m, &e), &e);
        for (int s = 0; s < m->n_slices; s++)
            sum += m->slice[s].dim[0] * (m->slice[s].ndim > 1 ? m->slice[s].dim[1] : 1);
        assert_int_equal(sum, known[i].params);
        lm_model_free(m);
        lm_config_fini(&c);
    }
}

/* The graph's own count of FLOPs against 6 N + 12 L H D T (which has no causal discount). */
static void test_flops(void **state)
{
    static const double none[LM_MOST_WINDOWS] = { 0 };
    static const char *const bases[2] = { gpt2, llama };
    (void)state;
    for (int i = 0; i < 2; i++) {
        enum { B = 2, T = 1024 };
        lm_config c;
        lm_err e = { 0 };
        lm_model *m;
        lm_graph_cost_sum sum;
        lm_build b = {
            .mode = LM_MODE_TRAIN, .batch = B, .seq = T, .precision = { LM_DTYPE_F32, NULL }
        };
        must(lm_backend_cpu(LM_CPU_REF, NULL, &b.backend, &e), &e); /* joins the head */
        read_ok(bases[i], "{}", &c);
        must(lm_model_build(&c, &b, &m, &e), &e);
        lm_graph_cost(m->graph, &sum);
        /* Causal attention does half of the pairs; backward 5 products for 2 instead of 4 for 2. */
        double pairs = 12.0 * (double)(c.layers * c.layer[0].heads * c.layer[0].head_dim) * T;
        double want = B * T * (lm_config_train_flops(&c, T) - pairs + pairs / 3 * 3.5 / 2);
        double all = 0;
        for (int p = 0; p < LM_PHASE_UPDATE; p++)
            all += sum.phase[p].flops;
        assert_true(fabs(sum.all.flops / want - 1) < 0.02);
        /* By pairs: the formula with all T^2 of a sequence, half of its attention with the causal
         * ones. */
        double every = lm_config_pair_flops(&c, B * T, (double)B * T * T, none);
        assert_true(fabs(every / (B * T * lm_config_train_flops(&c, T)) - 1) < 1e-12);
        double causal = lm_config_pair_flops(&c, B * T, (double)B * T * T / 2, none);
        assert_true(fabs((every - causal) / (B * T * pairs / 2) - 1) < 1e-9);
        for (int64_t l = 0; l < c.layers; l++)
            c.layer[l].window = 16;
        assert_true(lm_config_pair_flops(&c, B * T, 1e9, none) < causal);
        assert_true(lm_config_pair_flops(&c, B * T, 0, (double[]){ (double)B * T * T, 0 }) ==
                    every);
        /* two windows: the pairs of each count in its own layers */
        c.layer[1].window = 64;
        const double products = 12.0 * (double)(c.layer[0].heads * c.layer[0].head_dim),
                     plain = lm_config_pair_flops(&c, B * T, 1e9, none);
        double both = lm_config_pair_flops(&c, B * T, 1e9, (double[]){ 1e6, 3e6 });
        assert_true(fabs((both - plain) / (products * (1e6 * (double)(c.layers - 1) + 3e6)) - 1) <
                    1e-6);
        assert_true(fabs(all / sum.all.flops - 1) < 1e-12);
        assert_true(sum.phase[LM_PHASE_BACKWARD_WEIGHT].flops > 0);
        lm_model_free(m);
        lm_backend_close(b.backend);
        lm_config_fini(&c);
    }
}

static void test_limits(void **state)
{
    lm_config c;
    lm_err e = { 0 };
    lm_model *m;
    lm_build b = {
        .mode = LM_MODE_EVAL, .batch = 1, .seq = 1025, .precision = { LM_DTYPE_F32, NULL }
    };
    (void)state;
    read_ok(gpt2, "{}", &c);
    assert_int_equal(lm_model_build(&c, &b, &m, &e), LM_EUSAGE);
    assert_non_null(strstr(e.what, "1025"));
    e = (lm_err){ 0 };
    b.seq = INT64_C(1) << 40;
    b.batch = INT64_C(1) << 40;
    assert_int_equal(lm_model_build(&c, &b, &m, &e), LM_EUSAGE);
    e = (lm_err){ 0 };
    b.seq = b.batch = 1;
    b.precision.low = LM_DTYPE_F16; /* kernels have it, weights and masters do not */
    assert_int_equal(lm_model_build(&c, &b, &m, &e), LM_EUSAGE);
    assert_string_equal(e.what, "models do not compute in f16");
    lm_config_fini(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_missing),
        cmocka_unit_test(test_contradictions),
        cmocka_unit_test(test_kv_heads),
        cmocka_unit_test(test_rope_spellings),
        cmocka_unit_test(test_transformers_5),
        cmocka_unit_test(test_eos),
        cmocka_unit_test(test_windows),
        cmocka_unit_test(test_counts),
        cmocka_unit_test(test_experts),
        cmocka_unit_test(test_gemma),
        cmocka_unit_test(states_and_attention),
        cmocka_unit_test(test_latent),
        cmocka_unit_test(encoders),
        cmocka_unit_test(test_flops),
        cmocka_unit_test(test_limits),
    };
    return cmocka_run_group_tests_name("model_config", tests, NULL, NULL);
}
