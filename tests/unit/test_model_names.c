/* SPDX-License-Identifier: Apache-2.0 */
/* test_model_names.c -- what follows from names of tensors without a config. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <string.h>

#include "model/arch.h"

static void parts_are_found_under_any_prefix(void **state)
{
    (void)state;
    assert_true(lm_arch_names(LM_PART_EMBED, "weight", "model.embed_tokens.weight"));
    assert_true(lm_arch_names(LM_PART_EMBED, "weight", "language_model.model.embed_tokens.weight"));
    assert_true(lm_arch_names(LM_PART_EMBED, "weight", "wte.weight"));
    assert_false(lm_arch_names(LM_PART_EMBED, "weight", "model.my_embed_tokens.weight"));
    assert_false(lm_arch_names(LM_PART_EMBED, "bias", "wte.weight"));
    assert_false(lm_arch_names(LM_PART_EMBED, "weight", ".weight"));
    assert_true(lm_arch_names(LM_PART_OUTPUT, "bias", "lm_head.bias"));
    assert_true(lm_arch_resembles(LM_PART_OUTPUT_NORM, "backbone.final_norm.weight"));
    assert_true(lm_arch_resembles(LM_PART_OUTPUT_NORM, "transformer.ln_f.bias"));
    assert_false(lm_arch_resembles(LM_PART_OUTPUT, "model.embed_tokens.weight"));
    assert_true(lm_arch_names(LM_PART_EXPERT_UP, "weight",
                              "model.layers.3.mlp.experts.127.up_proj.weight"));
    assert_true(lm_arch_names(LM_PART_EXPERT_UP, "weight", "block_sparse_moe.experts.0.w3.weight"));
    assert_false(lm_arch_names(LM_PART_EXPERT_UP, "weight", "mlp.experts..up_proj.weight"));
    assert_false(lm_arch_names(LM_PART_EXPERT_UP, "weight", "mlp.experts.x.up_proj.weight"));
    assert_false(lm_arch_names(LM_PART_EXPERT_UP, "weight", "mlp.shared_expert.up_proj.weight"));
}

static void conv1d_is_gpt2_only(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        const lm_arch *a = i ? &lm_arch_llama : &lm_arch_gpt2;
        assert_true(lm_arch_turns(a, "transformer.h.0.attn.c_attn.weight") == !i);
        assert_true(lm_arch_turns(a, "h.11.mlp.c_proj.weight") == !i);
        assert_true(lm_arch_turns(a, "h.0.crossattention.c_attn.weight") == !i);
        assert_false(lm_arch_turns(a, "h.0.attn.c_attn.bias"));
        assert_false(lm_arch_turns(a, "h.0.ln_1.weight"));
        assert_false(lm_arch_turns(a, "wte.weight"));
        assert_false(lm_arch_turns(a, "lm_head.weight"));
        assert_false(lm_arch_turns(NULL, "h.0.mlp.c_fc.weight"));
    }
}

static void roots_and_buffers(void **state)
{
    (void)state;
    assert_string_equal(lm_arch_rootless("model.norm.weight"), "norm.weight");
    assert_string_equal(lm_arch_rootless("transformer.h.0.ln_1.bias"), "h.0.ln_1.bias");
    assert_string_equal(lm_arch_rootless("lm_head.weight"), "lm_head.weight");
    assert_true(lm_arch_is_buffer(&lm_arch_gpt2, "h.0.attn.masked_bias"));
    assert_false(lm_arch_is_buffer(&lm_arch_llama, "h.0.attn.masked_bias"));
    assert_true(lm_arch_is_buffer(NULL, "h.0.attn.masked_bias"));
    assert_true(lm_arch_is_buffer(&lm_arch_llama, "model.layers.0.self_attn.rotary_emb.inv_freq"));
    assert_false(lm_arch_is_buffer(NULL, "h.0.attn.c_attn.bias"));
}

static void names_follow_from_the_tables(void **state)
{
    char out[LM_TENSOR_NAME];
    json_t *o = json_pack("{s:s}", "model_type", "gemma2");
    (void)state;
    assert_ptr_equal(lm_arch_of(o), &lm_arch_gemma2);
    json_object_set_new(o, "model_type", json_string("mamba"));
    assert_null(lm_arch_of(o));
    assert_null(lm_arch_of(NULL));
    json_decref(o);
    /* of decoders, so that it serves for an unknown one */
    for (int i = 0; lm_arch_at(i) && lm_arch_at(i) != &lm_arch_bert; i++)
        assert_string_equal(lm_arch_head(lm_arch_at(i), out), "lm_head.weight");
    assert_string_equal(lm_arch_head(NULL, out), "lm_head.weight");
    assert_string_equal(lm_tensor_gguf_name(&lm_arch_llama, LM_PART_EMBED, -1, false, out),
                        "token_embd.weight");
    assert_string_equal(lm_tensor_gguf_name(&lm_arch_gpt2, LM_PART_QKV, 7, true, out),
                        "blk.7.attn_qkv.bias");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parts_are_found_under_any_prefix),
        cmocka_unit_test(conv1d_is_gpt2_only),
        cmocka_unit_test(roots_and_buffers),
        cmocka_unit_test(names_follow_from_the_tables),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
