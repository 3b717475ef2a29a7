/* SPDX-License-Identifier: Apache-2.0 */
/* Merge plans: models that fit and that do not, layers, parameters, and every mismatch found before
 * anything is written. */
#include "tests/unit/merge_model.h"

#include "merge/plan_names.h"

static lm_merge_plan *plan(const lm_merge_recipe *r)
{
    lm_merge_plan *p = NULL;
    lm_err e = { 0 };

    if (lm_merge_plan_new(r, NULL, &p, &e))
        fail_msg("%s: %s: %s", e.where, e.what, e.todo);
    return p;
}

static const lm_merge_tensor *find(const lm_merge_plan *p, const char *name)
{
    for (int64_t i = 0; i < p->n; i++)
        if (!strcmp(p->tensor[i].name, name))
            return &p->tensor[i];
    return NULL;
}

static void by_name(void **state)
{
    lm_merge_recipe *r;
    lm_merge_plan *p;
    const lm_merge_tensor *t;

    (void)state;
    mm_model("b", 1, NULL);
    mm_model("x", 2, NULL);
    mm_model("y", 3, NULL);
    r = mm_recipe("ties", "b", OPERANDS("x:0.25", "y:weight=0,1,density=0.5"));
    p = plan(r);
    assert_int_equal(p->n, 9);
    assert_int_equal(p->lead, 0);
    t = find(p, "model.layers.1.mlp.up_proj.weight");
    assert_non_null(t);
    assert_int_equal(t->n_models, 2);
    assert_int_equal(t->base->input, 0);
    assert_int_equal(t->dtype, LM_DTYPE_F32);
    assert_true(t->model[0].param[LM_MERGE_WEIGHT] == 0.25);
    assert_true(t->model[0].param[LM_MERGE_DENSITY] == 1); /* the method's default */
    assert_true(t->model[1].param[LM_MERGE_WEIGHT] == 0.5);
    assert_true(find(p, "model.layers.2.mlp.up_proj.weight")->model[1].param[LM_MERGE_WEIGHT] == 1);
    assert_true(find(p, "lm_head.weight")->model[1].param[LM_MERGE_WEIGHT] == 0);
    assert_int_equal(p->largest, ROWS * COLS * 4);
    assert_int_equal(lm_merge_plan_bound(p), 2u * 3 * ROWS * COLS * 4 + (64u << 20));
    assert_true(p->model[0].digest && p->model[0].digest != p->model[1].digest);
    lm_merge_plan_free(p);
    lm_merge_recipe_free(r);
}

static void stacked(void **state)
{
    lm_merge_recipe *r =
        mm_yaml("merge_method: passthrough\n"
                "slices:\n"
                "  - sources: [{model: x, layer_range: [1, 3]}]\n"
                "  - sources: [{model: y, layer_range: [0, 2], parameters: {scale: 0.5}}]\n"
                "dtype: bfloat16\n");
    lm_merge_plan *p;
    const lm_merge_tensor *t;

    (void)state;
    mm_model("x", 2, NULL);
    mm_model("y", 3, NULL);
    p = plan(r);
    assert_int_equal(p->n, 11);
    assert_int_equal(json_integer_value(json_object_get(p->config, "num_hidden_layers")), 4);
    assert_string_equal(json_string_value(json_object_get(p->config, "torch_dtype")), "bfloat16");
    t = find(p, "model.layers.2.mlp.up_proj.weight");
    assert_string_equal(t->model[0].tensor->name, "model.layers.0.mlp.up_proj.weight");
    assert_int_equal(t->model[0].input, 1);
    assert_true(t->model[0].param[LM_MERGE_SCALE] == 0.5);
    assert_int_equal(find(p, "model.embed_tokens.weight")->model[0].input, 0);
    assert_int_equal(find(p, "lm_head.weight")->model[0].input, 1);
    assert_null(find(p, "model.layers.4.mlp.up_proj.weight"));
    lm_merge_plan_free(p);
    lm_merge_recipe_free(r);
}

static void tied(void **state)
{
    lm_merge_recipe *r = mm_recipe("linear", NULL, OPERANDS("x", "y"));
    mm_shape s = { .tied = true };
    lm_merge_plan *p = NULL;

    (void)state;
    mm_model("x", 2, NULL);
    mm_model("y", 3, &s);
    p = plan(r);
    assert_string_equal(find(p, "lm_head.weight")->model[1].tensor->name,
                        "model.embed_tokens.weight");
    lm_merge_plan_free(p);
    lm_merge_recipe_free(r);
    r = mm_recipe("linear", NULL, OPERANDS("y", "x")); /* the first ties: the result does not */
    p = plan(r);
    assert_string_equal(find(p, "lm_head.weight")->model[0].tensor->name,
                        "model.embed_tokens.weight");
    assert_string_equal(find(p, "lm_head.weight")->model[1].tensor->name, "lm_head.weight");
    assert_true(json_is_false(json_object_get(p->config, "tie_word_embeddings")));
    lm_merge_plan_free(p);
    lm_merge_recipe_free(r);
    mm_model("z", 4, &s);
    r = mm_recipe("linear", NULL, OPERANDS("y", "z")); /* both tie: so does the result */
    p = plan(r);
    assert_null(find(p, "lm_head.weight"));
    assert_true(json_is_true(json_object_get(p->config, "tie_word_embeddings")));
    lm_merge_plan_free(p);
    lm_merge_recipe_free(r);
}

/* Embedding of one model, head of another. */
static void tied_in_slices(void **state)
{
    static const char yaml[] = "merge_method: passthrough\n"
                               "slices:\n"
                               "  - sources: [{model: %s, layer_range: [0, 1]}]\n"
                               "  - sources: [{model: %s, layer_range: [1, 3]}]\n";
    static const char *const pairs[][3] = { { "x", "y", "model.embed_tokens.weight" },
                                            { "y", "x", "lm_head.weight" },
                                            { "y", "z", "model.embed_tokens.weight" },
                                            { "y", "y", NULL } };
    mm_shape s = { .tied = true };

    (void)state;
    mm_model("x", 2, NULL);
    mm_model("y", 3, &s);
    mm_model("z", 4, &s);
    for (int i = 0; i < 4; i++) {
        char text[300];
        lm_merge_recipe *r;
        lm_merge_plan *p;
        const lm_merge_tensor *head;

        snprintf(text, sizeof text, yaml, pairs[i][0], pairs[i][1]);
        r = mm_yaml(text);
        p = plan(r);
        head = find(p, "lm_head.weight");
        assert_int_equal(!head, !pairs[i][2]);
        if (head) {
            assert_string_equal(head->model[0].tensor->name, pairs[i][2]);
            assert_string_equal(r->input[head->model[0].input].name, pairs[i][1]);
        }
        assert_int_equal(json_is_true(json_object_get(p->config, "tie_word_embeddings")), !head);
        lm_merge_plan_free(p);
        lm_merge_recipe_free(r);
    }
}

static void names_of_modules(void **state)
{
    static const struct {
        const char *tensor, *module;
        size_t prefix;
    } cases[] = {
        { "model.language_model.layers.0.mlp.up_proj.weight", "text_decoder", 21 },
        { "language_model.lm_head.weight", "text_decoder", 15 },
        { "model.layers.0.mlp.up_proj.weight", "text_decoder", 0 },
        { "visual.blocks.3.attn.qkv.weight", "vision_tower", 7 },
        { "visual.merger.mlp.0.weight", "vision_tower", 7 },
        { "visual.merger.mlp.0.weight", "multi_modal_projector", 14 },
        { "decoder.block.2.layer.0.SelfAttention.q.weight", "decoder", 8 },
        { "decoder.block.2.layer.0.SelfAttention.q.weight", "encoder", 0 },
        { "transformer.h.1.ln_1.weight", "transformer.h", 13 },
        { "transformer.h.1.ln_1.weight", "transformer.h.", 14 },
        { "transformer.hidden", "transformer.h", 0 },
    };

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_int_equal(lm_name_fits_module(cases[i].tensor, cases[i].module), cases[i].prefix);
}

static void modules(void **state)
{
    lm_merge_recipe *r = mm_yaml("merge_method: passthrough\n"
                                 "modules:\n"
                                 "  default: {models: [{model: y}], parameters: {scale: 2}}\n"
                                 "  model.layers:\n"
                                 "    slices:\n"
                                 "      - sources: [{model: x, layer_range: [0, 2]}]\n"
                                 "      - sources: [{model: y, layer_range: [1, 3]}]\n"
                                 "parameters: {scale: 3}\n");
    lm_merge_plan *p = plan(r);
    const lm_merge_tensor *t;
    lm_err e = { 0 };

    (void)state;
    assert_int_equal(json_integer_value(json_object_get(p->config, "num_hidden_layers")), 4);
    t = find(p, "model.embed_tokens.weight");
    assert_string_equal(r->input[t->model[0].input].name, "y");
    assert_true(t->model[0].param[LM_MERGE_SCALE] == 2);
    t = find(p, "model.layers.3.mlp.up_proj.weight");
    assert_string_equal(r->input[t->model[0].input].name, "y");
    assert_string_equal(t->model[0].tensor->name, "model.layers.2.mlp.up_proj.weight");
    assert_true(t->model[0].param[LM_MERGE_SCALE] == 3);
    assert_string_equal(r->input[find(p, "lm_head.weight")->model[0].input].name, "y");
    lm_merge_plan_free(p);
    lm_merge_recipe_free(r);

    r = mm_yaml("merge_method: passthrough\nmodules: {model.layers: {models: [{model: x}]}}\n");
    assert_int_equal(lm_merge_plan_new(r, NULL, &p, &e), LM_EUSAGE);
    assert_non_null(strstr(e.what, "does not belong to any of the modules"));
    lm_merge_recipe_free(r);
    e = (lm_err){ 0 };
    r = mm_yaml(
        "merge_method: passthrough\n"
        "modules: {default: {models: [{model: x}]}, vision_tower: {models: [{model: x}]}}\n");
    assert_int_equal(lm_merge_plan_new(r, NULL, &p, &e), LM_EUSAGE);
    assert_non_null(strstr(e.what, "it has no tensors of module 'vision_tower'"));
    lm_merge_recipe_free(r);
}

static int enter_with_models(void **state)
{
    if (mm_enter(state))
        return -1;
    mm_model("x", 2, NULL);
    mm_model("y", 3, NULL);
    return 0;
}

static void refuse_these(const char *where, const char *what)
{
    lm_merge_recipe *r = mm_recipe("linear", NULL, OPERANDS("x", "y"));
    lm_merge_plan *p = NULL;
    lm_err e = { 0 };

    assert_int_equal(lm_merge_plan_new(r, NULL, &p, &e), LM_EUSAGE);
    assert_null(p);
    assert_string_equal(e.where, where);
    if (!strstr(e.what, what))
        fail_msg("'%s' is not in '%s'", what, e.what);
    lm_merge_recipe_free(r);
}

static void refuse(const mm_shape *s, const char *where, const char *what)
{
    mm_model("x", 2, NULL);
    mm_model("y", 3, s);
    refuse_these(where, what);
}

static void mismatches(void **state)
{
    (void)state;
    refuse(&(mm_shape){ .without = "model.layers.1.mlp.up_proj.weight" }, "y",
           "it has no tensor 'model.layers.1.mlp.up_proj.weight', which x has");
    refuse(&(mm_shape){ .extra = "model.more" }, "x", "it has no tensor 'model.more', which y has");
    refuse(&(mm_shape){ .cols = COLS + 1 }, "y", "is F32 [12,9], but F32 [12,8] in x");
    refuse(&(mm_shape){ .whole = true }, "y", "is I32 [12,8], but F32 [12,8] in x");
    refuse(&(mm_shape){ .type = "qwen2" }, "y", "model_type is qwen2, but llama in x");
    refuse(&(mm_shape){ .vocab = ROWS + 2 }, "y", "[14,8], but F32 [12,8] in x");
    refuse(&(mm_shape){ .layers = 4 }, "x", "model.layers.3.");
    mm_model("x", 2, &(mm_shape){ .whole = true });
    mm_model("y", 3, &(mm_shape){ .whole = true });
    refuse_these("y", "is I32, and not that of x"); /* codes of a quantiser */
    mm_model("y", 2, &(mm_shape){ .whole = true });
    lm_merge_recipe *same = mm_recipe("linear", NULL, OPERANDS("x", "y"));
    lm_merge_plan *carried = plan(same);
    assert_true(find(carried, "model.layers.0.mlp.up_proj.weight")->copy);
    lm_merge_plan_free(carried);
    lm_merge_recipe_free(same);
    mm_model("x", 2, NULL);
    mm_model("y", 3, &(mm_shape){ .extra = "model.layers.0.self_attn.rotary_emb.inv_freq" });
    lm_merge_recipe *r = mm_recipe("linear", NULL, OPERANDS("x", "y")); /* a buffer is no loss */
    lm_merge_plan *p = plan(r);
    assert_int_equal(p->n, 9);
    lm_merge_plan_free(p);
    lm_merge_recipe_free(r);
}

static void ranges(void **state)
{
    lm_merge_recipe *r = mm_yaml("merge_method: passthrough\n"
                                 "slices: [{sources: [{model: x, layer_range: [1, 4]}]}]\n");
    lm_merge_plan *p = NULL;
    lm_err e = { 0 };

    (void)state;
    mm_model("x", 2, NULL);
    assert_int_equal(lm_merge_plan_new(r, NULL, &p, &e), LM_EUSAGE);
    assert_string_equal(e.what, "layers up to 4 are requested, it has 3");
    lm_merge_recipe_free(r);
    r = mm_yaml("merge_method: linear\n"
                "models: [{model: x, parameters: {weight: [{filter: mlp, value: 1}]}}]\n");
    e = (lm_err){ 0 };
    assert_int_equal(lm_merge_plan_new(r, NULL, &p, &e), LM_EUSAGE); /* a filter leaves a gap */
    assert_non_null(strstr(e.what, "no value of weight for tensor 'model.embed_tokens.weight'"));
    lm_merge_recipe_free(r);
}

static void quantised(void **state)
{
    lm_merge_recipe *r = mm_recipe("linear", NULL, OPERANDS("x"));
    lm_merge_plan *p = NULL;
    lm_err e = { 0 };

    (void)state;
    mm_model("x", 2, NULL);
    mm_put("x/config.json", "{\"model_type\": \"llama\", \"quantization_config\": {\"bits\": 4}}");
    assert_int_equal(lm_merge_plan_new(r, NULL, &p, &e), LM_EUSAGE);
    assert_string_equal(e.what, "its weights are quantised");
    /* a config that does not say so */
    e = (lm_err){ 0 };
    mm_model("y", 2,
             &(mm_shape){ .dtype = LM_DTYPE_F8E4M3,
                          .extra = "model.layers.1.mlp.up_proj.weight_scale" });
    lm_merge_recipe_free(r);
    r = mm_recipe("linear", NULL, OPERANDS("y"));
    assert_int_equal(lm_merge_plan_new(r, NULL, &p, &e), LM_EUSAGE);
    assert_string_equal(e.what, "tensor 'model.layers.1.mlp.up_proj.weight' is F8_E4M3 with a "
                                "scale of its own");
    lm_merge_recipe_free(r);
}

/* A missing key has the default of the model type; for an unknown type, the weights decide. */
static void ties_of_types(void **state)
{
    (void)state;
    for (int stored = 0; stored < 2; stored++) {
        assert_true(lm_type_ties("gpt2", stored));
        assert_true(lm_type_ties("gemma2", stored));
        assert_true(lm_type_ties("gemma3_text", stored));
        assert_false(lm_type_ties("olmo2", stored));
        assert_false(lm_type_ties("mixtral", stored));
        assert_true(lm_type_ties("mamba", stored) == !stored);
        assert_true(lm_type_ties(NULL, stored) == !stored);
    }
}

/* Tensors outside the layers that come behind them. */
static void last_names(void **state)
{
    (void)state;
    assert_true(lm_name_is_last("lm_head.weight") && lm_name_is_last("model.norm.weight"));
    assert_true(lm_name_is_last("transformer.ln_f.bias") && lm_name_is_last("score.weight"));
    assert_true(lm_name_is_last("backbone.norm_f.weight"));
    assert_false(lm_name_is_last("model.embed_tokens.weight") || lm_name_is_last("wpe.weight"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(by_name, mm_enter, mm_leave),
        cmocka_unit_test_setup_teardown(stacked, mm_enter, mm_leave),
        cmocka_unit_test_setup_teardown(tied, mm_enter, mm_leave),
        cmocka_unit_test(names_of_modules),
        cmocka_unit_test(ties_of_types),
        cmocka_unit_test(last_names),
        cmocka_unit_test_setup_teardown(modules, enter_with_models, mm_leave),
        cmocka_unit_test_setup_teardown(tied_in_slices, mm_enter, mm_leave),
        cmocka_unit_test_setup_teardown(mismatches, mm_enter, mm_leave),
        cmocka_unit_test_setup_teardown(ranges, mm_enter, mm_leave),
        cmocka_unit_test_setup_teardown(quantised, mm_enter, mm_leave),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
