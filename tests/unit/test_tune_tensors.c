/* SPDX-License-Identifier: Apache-2.0 */
/* test_tune_tensors.c -- the tensors that adapters declare: names of PEFT's files, first numbers, what
 * trains and decays, tensors of the base that train beside; and indices that a file brings. */
#include "attach_case.h"
#include "tune/folder.h"

#define LORA  "{\"peft_type\":\"LORA\",\"r\":3,\"lora_alpha\":5,\"target_modules\":"
#define LAYER "base_model.model.model.layers.1."

typedef struct {
    const char *name;
    lm_init init;
    double std;
    bool trains, decay;
} expected;

typedef struct {
    tiny t;
    json_t *config;
    lm_attach *a;
    lm_model *m;
} built;

static void begin(built *p, int model, const char *text, lm_build how)
{
    lm_err e = { 0 };
    *p = (built){ .config = adapter_of(text) };
    tiny_begin(&p->t, model);
    must(lm_attach_new(&p->t.bases, &p->t.config, p->config, "adapter", &p->a, &e), &e);
    lm_build b = build_of(how.mode, p->a);
    b.dropout = how.dropout;
    must(lm_model_build(&p->t.config, &b, &p->m, &e), &e);
}

static void end(built *p)
{
    lm_model_free(p->m);
    lm_attach_free(p->a);
    json_decref(p->config);
    tiny_end(&p->t);
}

static const lm_slice *slice_of(const lm_model *m, const char *name)
{
    int i = lm_model_slice(m, name);
    if (i < 0)
        fail_msg("no '%s'", name);
    return &m->slice[i];
}

/* The tensors of the list, which ends without a name. */
static void check_tensors(int model, const char *text, const expected *want)
{
    built p;
    begin(&p, model, text, (lm_build){ .mode = LM_MODE_TRAIN });
    for (; want->name; want++) {
        const lm_slice *s = slice_of(p.m, want->name);
        bool counts = s->init != LM_INIT_ZEROS && s->init != LM_INIT_ONES;
        if (s->init != want->init || (counts && fabs(s->std - want->std) > 1e-12))
            fail_msg("%s begins by rule %d of %g, not %d of %g", s->name, s->init, s->std,
                     want->init, want->std);
        if (s->trains != want->trains || !s->of_adapter)
            fail_msg("%s: trains %d, of the adapter %d", s->name, s->trains, s->of_adapter);
        if (p.m->param[s->param].decay != want->decay)
            fail_msg("%s: decay %d", s->name, p.m->param[s->param].decay);
    }
    end(&p);
}

static void test_low_rank(void **state)
{
    (void)state;
    check_tensors(
        LLAMA, LORA "[\"q_proj\",\"down_proj\",\"embed_tokens\"]}",
        (expected[]){
            { LAYER "self_attn.q_proj.lora_A.weight", LM_INIT_UNIFORM, 0.25, true, true },
            { LAYER "self_attn.q_proj.lora_B.weight", LM_INIT_ZEROS, 0, true, true },
            { LAYER "mlp.down_proj.lora_A.weight", LM_INIT_UNIFORM, 1 / sqrt(24), true, true },
            { "base_model.model.model.embed_tokens.lora_embedding_A", LM_INIT_ZEROS, 0, true,
              true },
            { "base_model.model.model.embed_tokens.lora_embedding_B", LM_INIT_NORMAL, 1, true,
              true },
            { NULL } });
    check_tensors(
        LLAMA, "{\"peft_type\":\"ADALORA\",\"init_r\":3,\"target_modules\":[\"q_proj\"]}",
        (expected[]){ { LAYER "self_attn.q_proj.lora_A", LM_INIT_NORMAL, 0.02, true, true },
                      { LAYER "self_attn.q_proj.lora_B", LM_INIT_NORMAL, 0.02, true, true },
                      { LAYER "self_attn.q_proj.lora_E", LM_INIT_ZEROS, 0, true, true },
                      { NULL } });
}

/* The file has A^T of an embedding turned; modules that lost all ranks are as in the base. */
static void test_turned_and_gone(void **state)
{
    built p;
    (void)state;
    begin(&p, LLAMA, LORA "[\"embed_tokens\"]}", (lm_build){ .mode = LM_MODE_TRAIN });
    const lm_slice *s = slice_of(p.m, "base_model.model.model.embed_tokens.lora_embedding_A");
    assert_true(s->transposed && s->dim[0] == 3 && s->dim[1] == 23);
    end(&p);
    begin(
        &p, LLAMA,
        "{\"peft_type\":\"ADALORA\",\"init_r\":2,\"target_modules\":[\"q_proj\"],\"rank_pattern\":"
        "{\"model.layers.0.self_attn.q_proj.lora_E\":[false,false],"
        "\"model.layers.1.self_attn.q_proj.lora_E\":[true,false]}}",
        (lm_build){ .mode = LM_MODE_TRAIN });
    assert_int_equal(lm_attach_modules(p.a), 1);
    assert_int_equal(slice_of(p.m, LAYER "self_attn.q_proj.lora_E")->dim[0], 1);
    end(&p);
}

/* By lists of tensors of their methods: within 1/sqrt(in), in full, ones, shared and frozen; vectors do not decay. */
static void test_listed(void **state)
{
    (void)state;
    check_tensors(
        LLAMA, "{\"peft_type\":\"LOHA\",\"r\":4,\"alpha\":4,\"target_modules\":[\"q_proj\"]}",
        (expected[]){ { LAYER "self_attn.q_proj.hada_w1_a", LM_INIT_UNIFORM, 0.5, true, true },
                      { LAYER "self_attn.q_proj.hada_w1_b", LM_INIT_UNIFORM, 0.25, true, true },
                      { LAYER "self_attn.q_proj.hada_w2_b", LM_INIT_ZEROS, 0, true, true },
                      { NULL } });
    check_tensors(
        LLAMA,
        "{\"peft_type\":\"VERA\",\"r\":3,\"d_initial\":0.3,\"target_modules\":"
        "[\"q_proj\",\"v_proj\"]}",
        (expected[]){ { LAYER "self_attn.v_proj.vera_lambda_d", LM_INIT_FULL, 0.3, true, false },
                      { LAYER "self_attn.v_proj.vera_lambda_b", LM_INIT_ZEROS, 0, true, false },
                      { NULL } });
    check_tensors(
        LLAMA, "{\"peft_type\":\"IA3\",\"target_modules\":[\"k_proj\"],\"feedforward_modules\":[]}",
        (expected[]){ { LAYER "self_attn.k_proj.ia3_l", LM_INIT_ONES, 0, true, true }, { NULL } });
    check_tensors(
        LLAMA,
        "{\"peft_type\":\"VBLORA\",\"r\":2,\"num_vectors\":5,\"vector_length\":4,"
        "\"topk\":2,\"init_logits_std\":0.2,\"target_modules\":[\"q_proj\"]}",
        (expected[]){ { LAYER "self_attn.q_proj.vblora_logits_A", LM_INIT_NORMAL, 0.2, true, true },
                      { NULL } });
}

/* Uniform within 1 / sqrt(columns), or as PEFT's own code draws them: of q_proj [16,16], of down_proj [16,24]. */
static void test_bounds(void **state)
{
    static const struct {
        const char *config, *tensor;
        lm_init init;
        double std;
    } cases[] = {
        { "\"DELORA\",\"r\":4", "delora_A", LM_INIT_UNIFORM, 0 },
        { "\"GLORA\",\"r\":4", "glora_A.Xu", LM_INIT_UNIFORM, 0 },
        { "\"HIRA\",\"r\":4", "hira_A", LM_INIT_UNIFORM, 0 },
        { "\"LOHA\",\"r\":4", "hada_w2_a", LM_INIT_UNIFORM, 0.5 },
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        built p;
        char text[200], name[200];
        snprintf(text, sizeof text, "{\"peft_type\":%s,\"target_modules\":[\"down_proj\"]}",
                 cases[i].config);
        snprintf(name, sizeof name, LAYER "mlp.down_proj.%s", cases[i].tensor);
        begin(&p, LLAMA, text, (lm_build){ .mode = LM_MODE_TRAIN });
        const lm_slice *s = slice_of(p.m, name);
        double want = cases[i].std > 0 ? cases[i].std : 1 / sqrt(24);
        if (s->init != cases[i].init || fabs(s->std - want) > 1e-12)
            fail_msg("%s begins by rule %d of %g, not %g", name, s->init, s->std, want);
        end(&p);
    }
}

/* Sizes that follow from all modules: the widest of them, and which share a vector. */
static void test_of_all_modules(void **state)
{
    built p;
    (void)state;
    begin(&p, LLAMA,
          "{\"peft_type\":\"VERA\",\"r\":3,\"target_modules\":[\"down_proj\",\"v_proj\"]}",
          (lm_build){ .mode = LM_MODE_TRAIN });
    assert_true(slice_of(p.m, "base_model.vera_A")->dim[0] == 3 &&
                slice_of(p.m, "base_model.vera_A")->dim[1] == 24);
    assert_true(slice_of(p.m, "base_model.vera_B")->dim[0] == 16 &&
                slice_of(p.m, "base_model.vera_B")->dim[1] == 3);
    end(&p);
    /* four modules in two groups */
    begin(&p, LLAMA,
          "{\"peft_type\":\"TINYLORA\",\"r\":2,\"weight_tying\":0.5,\"target_modules\":"
          "[\"q_proj\",\"v_proj\"]}",
          (lm_build){ .mode = LM_MODE_TRAIN });
    assert_true(lm_attach_module(p.a, 0)->place == 0 && lm_attach_module(p.a, 3)->place == 3);
    assert_true(lm_attach_module(p.a, 2)->places == 4);
    end(&p);
}

/* Products of one matrix for several modules remain one, unless a method changes the weight or its lengths. */
static void test_packed(void **state)
{
    static const struct {
        const char *text;
        bool packed;
    } cases[] = { { LORA "[\"q_proj\",\"v_proj\"]}", true },
                  { LORA "[\"q_proj\",\"v_proj\"],\"use_dora\":true}", false },
                  { "{\"peft_type\":\"BEFT\",\"target_modules\":[\"q_proj\"]}", true },
                  { "{\"peft_type\":\"LOHA\",\"r\":2,\"target_modules\":[\"q_proj\"]}", false } };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        built p;
        begin(&p, LLAMA, cases[i].text, (lm_build){ .mode = LM_MODE_TRAIN });
        const lm_slice *q = slice_of(p.m, "model.layers.1.self_attn.q_proj.weight"),
                       *v = slice_of(p.m, "model.layers.1.self_attn.v_proj.weight");
        if ((q->param == v->param) != cases[i].packed)
            fail_msg("%s: packed: %d", cases[i].text, q->param == v->param);
        end(&p);
    }
    check_tensors(LLAMA, LORA "[\"q_proj\"],\"use_dora\":true}",
                  (expected[]){ { LAYER "self_attn.q_proj.lora_magnitude_vector", LM_INIT_ZEROS, 0,
                                  true, false },
                                { NULL } });
    /* a bias of the base has parts of its own */
    check_tensors(GPT2, "{\"peft_type\":\"GLORA\",\"r\":2,\"target_modules\":[\"c_fc\"]}",
                  (expected[]){ { "base_model.model.transformer.h.1.mlp.c_fc.glora_C.Xd",
                                  LM_INIT_ZEROS, 0, true, true },
                                { NULL } });
}

static void test_bottleneck(void **state)
{
    (void)state;
    check_tensors(
        LLAMA,
        "{\"name\":\"a\",\"config\":{\"mh_adapter\":true,\"output_adapter\":false,"
        "\"reduction_factor\":4,\"non_linearity\":\"relu\"}}",
        (expected[]){ { "model.layers.1.attention_adapters.adapters.a.adapter_down.0.weight",
                        LM_INIT_NORMAL, 0.02, true, true },
                      { "model.layers.1.attention_adapters.adapters.a.adapter_down.0.bias",
                        LM_INIT_ZEROS, 0, true, false },
                      { "model.layers.1.attention_adapters.adapters.a.adapter_up.weight",
                        LM_INIT_ZEROS, 0, true, true },
                      { "model.layers.1.attention_adapters.adapters.a.adapter_up.bias",
                        LM_INIT_ZEROS, 0, true, false },
                      { NULL } });
    check_tensors(T5,
                  "{\"name\":\"a\",\"config\":{\"mh_adapter\":true,\"output_adapter\":true,"
                  "\"cross_adapter\":true,\"reduction_factor\":4,\"non_linearity\":\"relu\"}}",
                  (expected[]){ { "encoder.block.0.layer.0.adapters.a.adapter_down.0.weight",
                                  LM_INIT_NORMAL, 0.02, true, true },
                                { "encoder.block.0.layer.1.adapters.a.adapter_up.weight",
                                  LM_INIT_ZEROS, 0, true, true },
                                { "decoder.block.1.layer.0.adapters.a.adapter_up.bias",
                                  LM_INIT_ZEROS, 0, true, false },
                                { "decoder.block.1.layer.1.adapters.a.adapter_down.0.bias",
                                  LM_INIT_ZEROS, 0, true, false },
                                { "decoder.block.0.layer.2.adapters.a.adapter_up.weight",
                                  LM_INIT_ZEROS, 0, true, true },
                                { NULL } });
}

#define ENCODER "base_model.prompt_encoder."

static void test_virtual(void **state)
{
    (void)state;
    check_tensors(LLAMA, "{\"peft_type\":\"PROMPT_TUNING\",\"num_virtual_tokens\":2}",
                  (expected[]){ { "prompt_embeddings", LM_INIT_NORMAL, 1, true, true }, { NULL } });
    check_tensors(
        LLAMA, "{\"peft_type\":\"P_TUNING\",\"num_virtual_tokens\":3,\"encoder_hidden_size\":9}",
        (expected[]){ { "prompt_embeddings", LM_INIT_ZEROS, 0, false, true },
                      { ENCODER "embedding.weight", LM_INIT_NORMAL, 1, true, true },
                      { ENCODER "mlp_head.0.weight", LM_INIT_UNIFORM, 0.25, true, true },
                      { ENCODER "mlp_head.0.bias", LM_INIT_UNIFORM, 0.25, true, false },
                      { ENCODER "mlp_head.2.weight", LM_INIT_UNIFORM, 1.0 / 3, true, true },
                      { ENCODER "mlp_head.4.bias", LM_INIT_UNIFORM, 1.0 / 3, true, false },
                      { NULL } });
    /* by default the encoder is as wide as the model, and the LSTM has two layers */
    check_tensors(
        LLAMA,
        "{\"peft_type\":\"P_TUNING\",\"num_virtual_tokens\":3,\"encoder_reparameterization_"
        "type\":\"LSTM\",\"encoder_hidden_size\":4}",
        (expected[]){
            { ENCODER "lstm_head.weight_ih_l0", LM_INIT_UNIFORM, 0.5, true, true },
            { ENCODER "lstm_head.weight_hh_l1_reverse", LM_INIT_UNIFORM, 0.5, true, true },
            { ENCODER "lstm_head.bias_hh_l1", LM_INIT_UNIFORM, 0.5, true, false },
            { ENCODER "mlp_head.2.weight", LM_INIT_UNIFORM, 1 / sqrt(8), true, true },
            { NULL } });
    check_tensors(LLAMA, "{\"peft_type\":\"P_TUNING\",\"num_virtual_tokens\":3}",
                  (expected[]){ { ENCODER "mlp_head.2.weight", LM_INIT_UNIFORM, 0.25, true, true },
                                { NULL } });
    built p; /* in use the encoder is gone */
    begin(&p, LLAMA,
          "{\"peft_type\":\"P_TUNING\",\"num_virtual_tokens\":3,\"inference_mode\":true}",
          (lm_build){ .mode = LM_MODE_TRAIN });
    assert_true(lm_model_slice(p.m, ENCODER "embedding.weight") < 0);
    assert_true(slice_of(p.m, "prompt_embeddings")->trains);
    assert_true(lm_attach_virtual(p.a) == 3 && lm_attach_predicts(p.a));
    end(&p);
    begin(&p, LLAMA, "{\"peft_type\":\"PREFIX_TUNING\",\"num_virtual_tokens\":3}",
          (lm_build){ .mode = LM_MODE_TRAIN });
    assert_true(lm_attach_virtual(p.a) == 3 && !lm_attach_predicts(p.a));
    end(&p);
}

/* A tied head reads the rows, and PEFT's file has them by both names. */
static void test_rows(void **state)
{
    static const struct {
        int model, asides;
        const char *text;
    } cases[] = { { GPT2, 1, "{\"peft_type\":\"TRAINABLE_TOKENS\",\"token_indices\":[3,0]}" },
                  { LLAMA, 0, "{\"peft_type\":\"TRAINABLE_TOKENS\",\"token_indices\":[3,0]}" },
                  { GPT2, 0, LORA "[\"c_fc\"],\"trainable_token_indices\":[3]}" } };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        built p;
        begin(&p, cases[i].model, cases[i].text, (lm_build){ .mode = LM_MODE_TRAIN });
        assert_int_equal(p.m->n_aside, cases[i].asides);
        if (cases[i].asides) {
            assert_string_equal(p.m->aside[0].name,
                                "base_model.model.lm_head.trainable_tokens_delta");
            assert_string_equal(p.m->slice[p.m->aside[0].slice].name,
                                "base_model.model.transformer.wte.trainable_tokens_delta");
        }
        end(&p);
    }
}

/* ---- tensors of the base ---- */

/* `tensor` trains, and has that name in the adapter's file; NULL: by rule; "": it does not train. */
static void check_beside(int model, const char *text, const char *tensor, const char *saved)
{
    built p;
    begin(&p, model, text, (lm_build){ .mode = LM_MODE_TRAIN });
    const lm_slice *s = slice_of(p.m, tensor);
    bool trains = !saved || *saved;
    if (s->trains != trains || lm_attach_trains(p.a, tensor) != trains)
        fail_msg("%s: '%s' trains: %d", text, tensor, s->trains);
    if (trains && (saved ? !s->saved || strcmp(s->saved, saved) != 0 : s->saved != NULL))
        fail_msg("%s: '%s' is saved as '%s'", text, tensor, s->saved ? s->saved : "(rule)");
    end(&p);
}

static void test_beside(void **state)
{
    static const char fc[] = "transformer.h.0.mlp.c_fc.bias",
                      attn[] = "transformer.h.0.attn.c_attn.bias",
                      wrapped[] = "base_model.model.transformer.h.0.mlp.c_fc.base_layer.bias";
    (void)state;
    check_beside(GPT2, LORA "[\"c_fc\"]}", fc, "");
    check_beside(GPT2, LORA "[\"c_fc\"],\"bias\":\"lora_only\"}", fc, wrapped);
    check_beside(GPT2, LORA "[\"c_fc\"],\"bias\":\"lora_only\"}", attn, "");
    check_beside(GPT2, LORA "[\"c_fc\"],\"bias\":\"all\"}", fc, wrapped);
    check_beside(GPT2, LORA "[\"c_fc\"],\"bias\":\"all\"}", attn, NULL);
    check_beside(GPT2, LORA "[\"c_fc\"],\"bias\":\"all\"}", "transformer.h.0.mlp.c_fc.weight", "");
    check_beside(GPT2, LORA "[\"c_fc\"],\"modules_to_save\":[\"n_f\"]}", "transformer.ln_f.weight",
                 NULL);
    check_beside(GPT2, LORA "[\"c_fc\"],\"modules_to_save\":[\"ln_f\"]}",
                 "transformer.h.0.ln_1.weight", "");
    check_beside(LLAMA, "{\"peft_type\":\"LN_TUNING\",\"target_modules\":[\"norm\"]}",
                 "model.norm.weight", "base_model.model.model.norm.ln_tuning_layers.weight");
    check_beside(LLAMA, "{\"peft_type\":\"LN_TUNING\",\"target_modules\":[\"norm\"]}",
                 "model.layers.0.input_layernorm.weight", "");
}

/* ---- dropout ---- */

static int count_dropouts(int model, const char *text, bool drops)
{
    built p;
    int n = 0;
    begin(&p, model, text, (lm_build){ .mode = LM_MODE_TRAIN, .dropout = drops });
    for (size_t i = 0; i < p.m->graph->n_nodes; i++)
        n += p.m->graph->node[i].phase == LM_PHASE_FORWARD &&
             !strcmp(p.m->graph->node[i].op->name, "dropout");
    end(&p);
    return n;
}

/* Each module drops inputs of its own; rates of 0 and runs without dropout append nothing. */
static void test_dropouts(void **state)
{
    static const char drops[] = LORA "[\"q_proj\",\"k_proj\",\"up_proj\"],\"lora_dropout\":0.5}";
    (void)state;
    assert_int_equal(count_dropouts(LLAMA, drops, true), 2 * 3);
    assert_int_equal(count_dropouts(LLAMA, drops, false), 0);
    assert_int_equal(count_dropouts(LLAMA, LORA "[\"q_proj\",\"k_proj\"]}", true), 0);
    /* no rule drops, and where nothing would be dropped no rule is refused */
    assert_int_equal(
        count_dropouts(LLAMA,
                       "{\"peft_type\":\"VERA\",\"target_modules\":[\"q_proj\"],\"r\":2,"
                       "\"vera_dropout\":0.1}",
                       false),
        0);
}

static void refused(int model, const char *text, const char *where, const char *part)
{
    lm_err e = { 0 };
    tiny t;
    lm_attach *a = NULL;
    lm_model *m = NULL;
    json_t *o = adapter_of(text);
    tiny_begin(&t, model);
    lm_code rc = lm_attach_new(&t.bases, &t.config, o, "adapter", &a, &e);
    if (!rc) {
        lm_build b = build_of(LM_MODE_TRAIN, a);
        b.dropout = true;
        rc = lm_model_build(&t.config, &b, &m, &e);
    }
    assert_int_equal(rc, LM_EUSAGE);
    if (strcmp(e.where, where) != 0 || !strstr(e.what, part))
        fail_msg("%s: %s: %s", text, e.where, e.what);
    lm_attach_free(a);
    json_decref(o);
    tiny_end(&t);
}

static void test_refused(void **state)
{
    (void)state;
    refused(LLAMA, LORA "[\"lm_head\"],\"lora_dropout\":0.1}", "lora_dropout",
            "trains the head without dropout");
    refused(LLAMA,
            "{\"peft_type\":\"VERA\",\"target_modules\":[\"q_proj\"],\"r\":2,"
            "\"vera_dropout\":0.1}",
            "vera_dropout", "trains without dropout");
    refused(GPT2, LORA "[\"lm_head\"]}", "adapter", "is the embedding");
    refused(LLAMA, "{\"peft_type\":\"PREFIX_TUNING\",\"num_virtual_tokens\":2,\"num_layers\":3}",
            "adapter", "num_layers is 3, but the base has 2");
}

/* Keys of layers of several widths have no rows in one table. */
static void test_uneven_prefix(void **state)
{
    lm_err e = { 0 };
    tiny t;
    lm_attach *a = NULL;
    json_t *o = adapter_of("{\"peft_type\":\"PREFIX_TUNING\",\"num_virtual_tokens\":2}");
    (void)state;
    tiny_begin(&t, LLAMA);
    t.config.layer[1].kv_heads = 4;
    assert_int_equal(lm_attach_new(&t.bases, &t.config, o, "adapter", &a, &e), LM_EUSAGE);
    assert_non_null(strstr(e.what, "keys of different widths"));
    t.config.layer[1].kv_heads = 2;
    json_decref(o);
    tiny_end(&t);
}

/* ---- indices ---- */

typedef struct {
    lm_buf file;
    lm_st *st;
} id_file;

/* Of SHIRA [2,n]: rows, then columns. */
static int64_t index_at(int64_t j, int64_t count)
{
    return j < count / 2 ? j / 8 : (j - count / 2) % 8;
}

/* Every tensor of indices of the adapter in `dtype`, with `more` columns too many; or of the first module alone. */
static void make_file(const lm_attach *a, lm_dtype dtype, int64_t more, bool leave_out,
                      id_file *out)
{
    static lm_tune_tensor t[LM_TUNE_TENSORS];
    lm_tune_saved saved[16];
    size_t n = 0;
    lm_err e = { 0 };
    *out = (id_file){ .st = NULL };
    for (size_t i = 0; i < lm_attach_modules(a); i++) {
        const lm_tune_module *m = lm_attach_module(a, i);
        int tensors = 0;
        must(lm_attach_method(a)->tensors(m, t, &tensors, &e), &e);
        for (int k = 0; k < tensors; k++) {
            if (!t[k].ids || (leave_out && i))
                continue;
            lm_tune_saved *s = &saved[n++];
            char *name = NULL;
            *s = (lm_tune_saved){ .dtype = dtype, .ndim = t[k].ndim };
            must(lm_tune_tensor_name(m, &t[k], &name, &e), &e);
            s->name = name;
            memcpy(s->dim, t[k].dim, sizeof s->dim);
            s->dim[t[k].ndim - 1] += more;
            int64_t count = s->dim[0] * (s->ndim > 1 ? s->dim[1] : 1);
            void *data = room((size_t)count, 8);
            for (int64_t j = 0; j < count; j++)
                if (dtype == LM_DTYPE_I64)
                    ((int64_t *)data)[j] = index_at(j, count);
                else
                    ((int32_t *)data)[j] = (int32_t)index_at(j, count);
            s->data = data;
        }
    }
    must(lm_tune_tensors_bytes(saved, n, &out->file, &e), &e);
    must(lm_tune_tensors_open(&out->file, "a.safetensors", &out->st, &e), &e);
    while (n-- > 0) {
        lm_free((void *)(uintptr_t)saved[n].name);
        lm_free((void *)(uintptr_t)saved[n].data);
    }
}

static lm_code read_file(lm_attach *a, lm_dtype dtype, int64_t more, bool leave_out, lm_err *e)
{
    id_file f;
    make_file(a, dtype, more, leave_out, &f);
    lm_code rc = lm_attach_read_ids(a, f.st, e);
    lm_st_close(f.st);
    lm_buf_fini(&f.file);
    return rc;
}

static void test_indices(void **state)
{
    static const lm_dtype types[] = { LM_DTYPE_I64, LM_DTYPE_I32 };
    lm_err e = { 0 };
    tiny t;
    lm_attach *a = NULL;
    lm_model *m = NULL;
    json_t *o =
        adapter_of("{\"peft_type\":\"SHIRA\",\"target_modules\":[\"q_proj\",\"v_proj\"],\"r\":2}");
    (void)state;
    tiny_begin(&t, LLAMA);
    must(lm_attach_new(&t.bases, &t.config, o, "adapter", &a, &e), &e);
    assert_true(lm_attach_has_ids(a));
    for (int i = 0; i < 2; i++) {
        must(read_file(a, types[i], 0, false, &e), &e);
        for (size_t k = 0; k < lm_attach_modules(a); k++) {
            const lm_tune_module *of = lm_attach_module(a, k);
            static lm_tune_tensor list[LM_TUNE_TENSORS];
            int n = 0, seen = 0;
            must(lm_attach_method(a)->tensors(of, list, &n, &e), &e);
            for (int q = 0; q < n; q++) {
                int64_t count = list[q].dim[0] * list[q].dim[1];
                for (int64_t j = 0; list[q].ids && j < count; j++, seen++)
                    assert_int_equal(of->ids[q][j], index_at(j, count));
            }
            assert_true(seen > 8);
        }
    }
    lm_build b = build_of(LM_MODE_TRAIN, a);
    must(lm_model_build(&t.config, &b, &m, &e), &e);
    assert_int_equal(m->n_aside, lm_attach_modules(a)); /* the file has them again, as they are */
    assert_non_null(strstr(m->aside[0].name, "base_model.model.model.layers.0.self_attn."));
    assert_int_equal(m->aside[0].dtype, LM_DTYPE_I32); /* as PEFT saves SHIRA's */
    lm_model_free(m);
    assert_int_equal(read_file(a, LM_DTYPE_F32, 0, false, &e), LM_EFORMAT);
    assert_non_null(strstr(e.what, "not I32 or I64"));
    e = (lm_err){ 0 };
    assert_int_equal(read_file(a, LM_DTYPE_I64, 1, false, &e), LM_EUSAGE);
    assert_non_null(strstr(e.what, "in another shape"));
    e = (lm_err){ 0 };
    assert_int_equal(read_file(a, LM_DTYPE_I64, 0, true, &e), LM_EFORMAT);
    assert_non_null(strstr(e.what, "has no "));
    lm_attach_free(a);
    json_decref(o);
    tiny_end(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_low_rank),       cmocka_unit_test(test_turned_and_gone),
        cmocka_unit_test(test_listed),         cmocka_unit_test(test_bounds),
        cmocka_unit_test(test_of_all_modules), cmocka_unit_test(test_packed),
        cmocka_unit_test(test_bottleneck),     cmocka_unit_test(test_virtual),
        cmocka_unit_test(test_rows),           cmocka_unit_test(test_beside),
        cmocka_unit_test(test_dropouts),       cmocka_unit_test(test_refused),
        cmocka_unit_test(test_uneven_prefix),  cmocka_unit_test(test_indices),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
