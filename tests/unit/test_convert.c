/* SPDX-License-Identifier: Apache-2.0 */
/* Conversions: permutations are inverted, matrices are transposed and recast as by plain loops,
 * metadata have the values of config.json. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/mem.h"
#include "convert/convert_impl.h"
#include "convert/convert_rows.h"
#include "convert/convert_source.h"
#include "convert/convert_types.h"
#include "convert/gguf_meta.h"
#include "convert/names.h"

static void read_config(const char *text, lm_config *c)
{
    json_t *o = json_loads(text, 0, NULL);
    lm_err e = { 0 };

    assert_non_null(o);
    assert_int_equal(lm_config_read(o, "test", c, &e), LM_OK);
    json_decref(o);
}

static const char llama_text[] =
    "{\"model_type\":\"llama\",\"hidden_size\":32,\"intermediate_size\":48,\"num_hidden_layers\":2,"
    "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"vocab_size\":20,"
    "\"max_position_embeddings\":64,\"rms_norm_eps\":1e-5,\"rope_theta\":500000.0,"
    "\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8.0,\"low_freq_factor\":1.0,"
    "\"high_freq_factor\":4.0,\"original_max_position_embeddings\":16}}";
static const char gpt2_text[] =
    "{\"model_type\":\"gpt2\",\"n_embd\":32,\"n_layer\":1,\"n_head\":2,\"n_positions\":16,"
    "\"vocab_size\":20}";

static const lm_model_tensor *slot_of(const lm_model_tensor *s, size_t n, const char *gguf)
{
    for (size_t i = 0; i < n; i++)
        if (!strcmp(s[i].gguf, gguf))
            return &s[i];
    fail_msg("no %s", gguf);
    return NULL;
}

static void tensors_have_names_and_shapes(void **state)
{
    (void)state;
    lm_config c;
    lm_model_tensor *s = NULL;
    size_t n = 0;
    lm_err e = { 0 };
    int64_t dim[2];

    read_config(llama_text, &c);
    assert_int_equal(lm_model_tensors_make(&c, &s, &n, &e), LM_OK);
    assert_int_equal(n, 3 + 2 * 9);
    const lm_model_tensor *k = slot_of(s, n, "blk.1.attn_k.weight");
    assert_string_equal(k->hf, "model.layers.1.self_attn.k_proj.weight");
    assert_true(k->order == LM_ORDER_ROPE && k->heads == 2);
    assert_true(k->dim[0] == 16 && k->dim[1] == 32);
    assert_string_equal(slot_of(s, n, "output.weight")->hf, "lm_head.weight");
    lm_free(s);
    lm_config_fini(&c);

    read_config(gpt2_text, &c);
    assert_int_equal(lm_model_tensors_make(&c, &s, &n, &e), LM_OK);
    assert_int_equal(n, 2 + 12 + 2);
    const lm_model_tensor *up = slot_of(s, n, "blk.0.ffn_up.weight");
    assert_string_equal(up->hf, "transformer.h.0.mlp.c_fc.weight");
    lm_model_tensor_gguf_dim(up, dim);
    assert_true(up->dim[0] == 32 && dim[0] == 128 && dim[1] == 32);
    lm_free(s);
    lm_config_fini(&c);
}

/* In llama.cpp's conversion: view [heads, 2, d/2, in], axes 1 and 2 exchanged. */
static void rope_rows_are_llama_cpps(void **state)
{
    (void)state;
    const lm_model_tensor s = { .ndim = 2, .dim = { 24, 1 }, .order = LM_ORDER_ROPE, .heads = 3 };

    for (int64_t h = 0; h < 3; h++)
        for (int64_t i = 0; i < 4; i++)
            for (int64_t half = 0; half < 2; half++) {
                int64_t gguf = h * 8 + i * 2 + half, hf = h * 8 + half * 4 + i;
                assert_int_equal(lm_model_tensor_hf_row(&s, gguf), hf);
                assert_int_equal(lm_model_tensor_gguf_row(&s, hf), gguf);
            }

    const lm_format *f32 = lm_format_of_dtype(LM_DTYPE_F32);
    float hf[24], gguf[24], back[24];
    lm_rows r;
    lm_err e = { 0 };
    for (int i = 0; i < 24; i++)
        hf[i] = (float)i;
    assert_true(lm_rows_of_tensor(&s, true, f32, f32, &r));
    r.src = hf;
    r.dst = gguf;
    assert_int_equal(lm_rows_convert(&r, NULL, &e), LM_OK);
    assert_true(gguf[0] == 0 && gguf[1] == 4 && gguf[2] == 1 && gguf[8] == 8 && gguf[9] == 12);
    assert_true(lm_rows_of_tensor(&s, false, f32, f32, &r));
    r.src = gguf;
    r.dst = back;
    assert_int_equal(lm_rows_convert(&r, NULL, &e), LM_OK);
    assert_memory_equal(back, hf, sizeof hf);
}

/* Norms that multiply by 1 + w: GGUF has 1 + w, in F32. */
static void norms_are_llama_cpps(void **state)
{
    (void)state;
    const lm_model_tensor s = { .ndim = 1, .dim = { 4 }, .plus_one = true };
    const lm_format *f32 = lm_format_of_dtype(LM_DTYPE_F32),
                    *bf16 = lm_format_of_dtype(LM_DTYPE_BF16);
    const uint16_t hf[4] = { 0, 0x3f00, 0xbf80, 0x3a81 }; /* 0, 0.5, -1, 2^-10 (1 + 2^-7) */
    float gguf[4], same[4];
    uint16_t back[4];
    lm_rows r;
    lm_err e = { 0 };

    assert_true(lm_rows_of_tensor(&s, true, bf16, f32, &r));
    r.src = hf;
    r.dst = gguf;
    assert_int_equal(lm_rows_convert(&r, NULL, &e), LM_OK);
    assert_true(gguf[0] == 1 && gguf[1] == 1.5F && gguf[2] == 0 && gguf[3] == 1 + 0x1.02p-10F);
    assert_true(lm_rows_of_tensor(&s, false, f32, bf16, &r));
    r.src = gguf;
    r.dst = back;
    assert_int_equal(lm_rows_convert(&r, NULL, &e), LM_OK);
    assert_memory_equal(back, hf, sizeof hf);
    assert_true(lm_rows_of_tensor(&s, false, f32, f32,
                                  &r)); /* the same type on both sides, but other bytes */
    r.src = gguf;
    r.dst = same;
    assert_int_equal(lm_rows_convert(&r, NULL, &e), LM_OK);
    assert_true(same[0] == 0 && same[1] == 0.5F && same[2] == -1);
}

static uint16_t pattern(int64_t i)
{
    return (uint16_t)(i * 40503u >> 3);
}

/* Transposing and reordering keep every bit of 16-bit elements, NaN payloads too. */
static void bits_are_moved(void **state)
{
    (void)state;
    enum { ROWS = 70, COLS = 37 };
    static uint16_t src[ROWS * COLS], dst[ROWS * COLS], back[ROWS * COLS];
    const lm_format *f16 = lm_format_of_dtype(LM_DTYPE_F16);
    const lm_model_tensor matrix = { .ndim = 2, .dim = { ROWS, COLS }, .order = LM_ORDER_CONV1D };
    lm_rows r;
    lm_err e = { 0 };

    for (int64_t i = 0; i < ROWS * COLS; i++)
        src[i] = pattern(i);
    assert_true(lm_rows_of_tensor(&matrix, true, f16, f16, &r));
    r.src = src;
    r.dst = dst;
    assert_int_equal(lm_rows_convert(&r, NULL, &e), LM_OK);
    for (int64_t i = 0; i < ROWS; i++)
        for (int64_t k = 0; k < COLS; k++)
            assert_int_equal(dst[k * ROWS + i], src[i * COLS + k]);
    assert_true(lm_rows_of_tensor(&matrix, false, f16, f16, &r));
    r.src = dst;
    r.dst = back;
    assert_int_equal(lm_rows_convert(&r, NULL, &e), LM_OK);
    assert_memory_equal(back, src, sizeof src);
}

/* Transposing into blocks and out of them equals transposing, then coding, for any pool. */
static void blocks_are_transposed(void **state)
{
    (void)state;
    enum { IN = 96, OUT = 70 };
    static float src[IN * OUT], turned[IN * OUT], back[IN * OUT], want[IN * OUT];
    static uint8_t a[OUT * 34 * 3], b[OUT * 34 * 3];
    const lm_model_tensor matrix = { .ndim = 2, .dim = { IN, OUT }, .order = LM_ORDER_CONV1D };
    const lm_format *f32 = lm_format_of_dtype(LM_DTYPE_F32), *q8 = lm_format_of_gguf(8);
    lm_par *par = NULL;
    lm_err e = { 0 };
    lm_rows r;

    assert_int_equal(lm_par_new(&par, 3, &e), LM_OK);
    for (int i = 0; i < IN; i++)
        for (int k = 0; k < OUT; k++)
            turned[k * IN + i] = src[i * OUT + k] = sinf((float)(i * 131 + k * 7));
    q8->encode(q8, turned, OUT, IN, IN, &(void *){ a }, NULL);
    assert_true(lm_rows_of_tensor(&matrix, true, f32, q8, &r));
    r.src = src;
    r.dst = b;
    assert_int_equal(lm_rows_convert(&r, par, &e), LM_OK);
    assert_memory_equal(a, b, sizeof a);
    q8->decode(q8, &(const void *){ a }, OUT, IN, turned, IN);
    for (int i = 0; i < IN; i++)
        for (int k = 0; k < OUT; k++)
            want[i * OUT + k] = turned[k * IN + i];
    assert_true(lm_rows_of_tensor(&matrix, false, q8, f32, &r));
    r.src = b;
    r.dst = back;
    assert_int_equal(lm_rows_convert(&r, par, &e), LM_OK);
    assert_memory_equal(back, want, sizeof want);
    lm_par_free(par);
}

/* Importance belongs to the columns of the written matrix, transposed or not; elements that do not
 * fit are reported in the coordinates of the source. */
static void importance_goes_with_columns(void **state)
{
    (void)state;
    enum { IN = 96, OUT = 70 };
    static float src[IN * OUT], turned[IN * OUT], w[IN];
    static uint8_t a[OUT * 18 * 3], b[OUT * 18 * 3];
    const lm_model_tensor turns = { .ndim = 2, .dim = { IN, OUT }, .order = LM_ORDER_CONV1D };
    const lm_model_tensor stays = {
        .ndim = 2, .dim = { OUT, IN }, .order = LM_ORDER_SAME, .hf = "x.weight"
    };
    const lm_format *f32 = lm_format_of_dtype(LM_DTYPE_F32), *q4 = lm_format_of_gguf(2);
    const lm_format *f16 = lm_format_of_dtype(LM_DTYPE_F16);
    const lm_encode_mode weighted = { .importance = w };
    lm_err e = { 0 };
    lm_rows r;

    for (int i = 0; i < IN; i++) {
        w[i] = (float)(i % 7) * (float)(i % 3);
        for (int k = 0; k < OUT; k++)
            turned[k * IN + i] = src[i * OUT + k] = sinf((float)(i * 131 + k * 7));
    }
    q4->encode(q4, turned, OUT, IN, IN, &(void *){ a }, &weighted);
    for (int way = 0; way < 2; way++) {
        assert_true(lm_rows_of_tensor(way ? &stays : &turns, true, f32, q4, &r));
        r.src = way ? turned : src;
        r.dst = b;
        r.importance = w;
        memset(b, 0, sizeof b);
        assert_int_equal(lm_rows_convert(&r, NULL, &e), LM_OK);
        assert_memory_equal(a, b, sizeof a);
    }

    turned[3 * IN + 5] = 65520.0f; /* the smallest number that rounds to infinity */
    turned[3 * IN + 4] = 65519.0f;
    turned[2 * IN + 5] = INFINITY; /* was infinite before */
    assert_true(lm_rows_of_tensor(&stays, true, f32, f16, &r));
    r.src = turned;
    r.dst = src;
    assert_int_equal(lm_rows_convert(&r, NULL, &e), LM_ENUMERIC);
    assert_string_equal(e.where, "x.weight");
    assert_non_null(strstr(e.what, "element 293 is 65520, which f16"));
}

/* config.json is restored, including llama3's scaling, which GGUF has only as divisors. */
static void config_is_restored(void **state)
{
    (void)state;
    static const int64_t originals[] = { 16, 8192, 100000 };
    lm_err e = { 0 };

    for (int k = 0; k < 3; k++) {
        lm_import m = { .path = (char *)(uintptr_t) "test" };
        lm_gguf_plan *p = NULL;
        lm_gguf *g = NULL;
        lm_buf b = { 0 };
        json_t *tree = NULL;
        lm_config again;
        float factors[64];
        int64_t dim[2] = { 20, 32 };
        read_config(llama_text, &m.config);
        m.config.rope[0].original = originals[k];
        m.config.rope[0].dim = 128;
        for (int64_t l = 0; l < m.config.layers; l++) {
            lm_layer *y = &m.config.layer[l];
            y->head_dim = 128;
            y->heads = 2;
            y->scale = 1 / sqrt(128);
        }
        assert_int_equal(lm_gguf_plan_new(&p, &e), LM_OK);
        lm_gguf_put_str(p, "general.architecture", "llama", 5);
        assert_int_equal(lm_gguf_put_config(p, &m, &e), LM_OK);
        lm_gguf_put_tensor(p, LM_GGUF_ROPE_FREQS, LM_GGUF_TYPE_F32, 1, (int64_t[]){ 64 });
        lm_gguf_put_tensor(p, "token_embd.weight", LM_GGUF_TYPE_F32, 2, dim);
        assert_int_equal(lm_gguf_plan_header(p, &b, &e), LM_OK);
        lm_gguf_rope_factors(m.config.rope, factors);
        assert_int_equal(lm_buf_add(&b, factors, sizeof factors, &e), LM_OK);
        for (int i = 0; i < 20; i++)
            assert_int_equal(lm_buf_add(&b, factors, 128, &e), LM_OK);
        assert_int_equal(lm_gguf_parse(b.data, b.len, "test", &g, &e), LM_OK);
        assert_int_equal(lm_gguf_get_config(g, &tree, &e), LM_OK);
        assert_int_equal(lm_config_read(tree, "again", &again, &e), LM_OK);
        assert_int_equal(again.rope[0].type, LM_ROPE_LLAMA3);
        assert_int_equal(again.rope[0].original, originals[k]);
        assert_true(again.rope[0].factor == 8 && again.rope[0].low_freq == 1 &&
                    again.rope[0].high_freq == 4);
        assert_true(again.norm_eps == 1e-5 && again.rope[0].theta == 500000);
        assert_true(again.layer[0].kv_heads == 2 && again.layer[0].head_dim == 128 && again.tied);
        json_decref(tree);
        lm_gguf_close(g);
        lm_gguf_plan_free(p);
        lm_buf_fini(&b);
        lm_config_fini(&again);
        lm_config_fini(&m.config);
    }
}

/* The kinds of layers are restored from the metadata alone. */
static void layers_are_restored(void **state)
{
    (void)state;
#define SIZES                                                                                \
    "\"hidden_size\":32,\"intermediate_size\":48,\"num_hidden_layers\":5,\"vocab_size\":20," \
    "\"num_attention_heads\":4,\"max_position_embeddings\":64,\"tie_word_embeddings\":true," \
    "\"head_dim\":8,"
    static const char *const texts[] = {
        "{\"model_type\":\"mistral\"," SIZES "\"sliding_window\":16,\"num_key_value_heads\":4}",
        "{\"model_type\":\"qwen3\"," SIZES "\"rope_theta\":1e6,\"num_key_value_heads\":4}",
        "{\"model_type\":\"olmo2\"," SIZES "\"rope_theta\":5e5}",
        "{\"model_type\":\"olmo3\"," SIZES "\"sliding_window\":9,\"rope_theta\":3e5,"
        "\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":8,\"original_max_position_"
        "embeddings\":32}}",
        "{\"model_type\":\"gemma2\"," SIZES "\"sliding_window\":9,\"query_pre_attn_scalar\":8,"
        "\"num_key_value_heads\":2,\"attn_logit_softcapping\":7.5}",
        "{\"model_type\":\"gemma3_text\"," SIZES "\"sliding_window\":9,\"query_pre_attn_scalar\":8,"
        "\"rope_scaling\":{\"rope_type\":\"linear\",\"factor\":8},\"rope_local_base_freq\":500,"
        "\"num_key_value_heads\":4}",
        "{\"model_type\":\"gemma3_text\"," SIZES "\"sliding_window\":9,\"query_pre_attn_scalar\":8,"
        "\"num_key_value_heads\":4,\"sliding_window_pattern\":3,\"final_logit_softcapping\":4,"
        "\"eos_token_id\":[1,16,7]}",
    };
#undef SIZES
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        lm_import m = { .path = (char *)(uintptr_t) "test" };
        lm_gguf_plan *p = NULL;
        lm_gguf *g = NULL;
        lm_buf b = { 0 };
        json_t *tree = NULL;
        lm_config again;
        lm_err e = { 0 };
        read_config(texts[i], &m.config);
        const lm_config *c = &m.config;
        assert_int_equal(lm_gguf_plan_new(&p, &e), LM_OK);
        lm_gguf_put_str(p, "general.architecture", c->arch->gguf, strlen(c->arch->gguf));
        assert_int_equal(lm_gguf_put_config(p, &m, &e), LM_OK);
        assert_int_equal(lm_gguf_put_vocab(p, &m, &e), LM_OK); /* no tokens, but ids */
        lm_gguf_put_tensor(p, "token_embd.weight", LM_GGUF_TYPE_F32, 2, (int64_t[]){ 20, 32 });
        assert_int_equal(lm_gguf_plan_header(p, &b, &e), LM_OK);
        for (int k = 0; k < 80; k++)
            assert_int_equal(lm_buf_add(&b, "0123456789012345678901234567890", 32, &e), LM_OK);
        assert_int_equal(lm_gguf_parse(b.data, b.len, "test", &g, &e), LM_OK);
        assert_int_equal(lm_gguf_get_config(g, &tree, &e), LM_OK);
        assert_int_equal(lm_config_read(tree, "again", &again, &e), LM_OK);
        assert_ptr_equal(again.arch, c->arch);
        assert_int_equal(again.ropes, c->ropes);
        for (int k = 0; k < c->ropes; k++) {
            const lm_rope_config *a = &again.rope[k], *r = &c->rope[k];
            assert_true(a->type == r->type && a->dim == r->dim && a->theta == r->theta);
            if (r->type != LM_ROPE_DEFAULT) /* whose other numbers are without meaning */
                assert_memory_equal(a, r, sizeof *r);
        }
        for (int64_t l = 0; l < c->layers; l++)
            assert_memory_equal(&again.layer[l], &c->layer[l], sizeof *c->layer);
        assert_true(again.logit_cap == c->logit_cap && again.tied && again.norm_eps == c->norm_eps);
        /* transformers 5 reads a base other than 500000 for both tables of OLMo 3 only there */
        assert_int_equal(json_object_get(tree, "rope_parameters") != NULL,
                         !strcmp(lm_arch_name(c->arch), "olmo3"));
        assert_int_equal(again.n_eos, c->n_eos);
        assert_memory_equal(again.eos, c->eos, (size_t)c->n_eos * sizeof *c->eos);
        json_decref(tree);
        lm_gguf_close(g);
        lm_gguf_plan_free(p);
        lm_buf_fini(&b);
        lm_config_fini(&again);
        lm_config_fini(&m.config);
    }
}

/* Scores determine the order of merges; a space is added to a text only if the metadata say so. */
static void merges_follow_from_scores(void **state)
{
    (void)state;
    static const lm_gguf_text words[] = { { "<unk>", 5 }, { "<s>", 3 }, { "</s>", 4 },
                                          { "a", 1 },     { "b", 1 },   { "c", 1 },
                                          { "bc", 2 },    { "ab", 2 },  { "abc", 3 } };
    static const int32_t types[] = { 2, 3, 3, 1, 1, 1, 1, 1, 1 };
    static const float scores[] = { 0, 0, 0, -9, -9, -9, -1, 0, -2 };
    lm_config c = { .vocab = 9, .max_positions = 8 };
    lm_buf b = { 0 }, json = { 0 }, config = { 0 };
    lm_gguf_plan *p = NULL;
    lm_gguf *g = NULL;
    lm_err e = { 0 };
    bool found;

    assert_int_equal(lm_gguf_plan_new(&p, &e), LM_OK);
    lm_gguf_put_str(p, "tokenizer.ggml.model", "llama", 5);
    lm_gguf_put_strs(p, "tokenizer.ggml.tokens", words, 9);
    lm_gguf_put_i32s(p, "tokenizer.ggml.token_type", types, 9);
    lm_gguf_put_f32s(p, "tokenizer.ggml.scores", scores, 9);
    lm_gguf_put_bool(p, "tokenizer.ggml.add_space_prefix", false);
    assert_int_equal(lm_gguf_plan_header(p, &b, &e), LM_OK);
    assert_int_equal(lm_gguf_parse(b.data, b.len, "test", &g, &e), LM_OK);
    assert_int_equal(lm_gguf_get_vocab(g, &c, &json, &config, &found, &e), LM_OK);
    assert_true(found);
    assert_non_null(strstr(
        json.data, "\"merges\":[[\"a\",\"b\"],[\"b\",\"c\"],[\"a\",\"bc\"],[\"ab\",\"c\"]]"));
    assert_null(strstr(json.data, "Prepend"));
    assert_non_null(strstr(config.data, "\"bos_token\": \"<s>\""));
    c.vocab = 8;
    assert_int_equal(lm_gguf_get_vocab(g, &c, &json, &config, &found, &e), LM_EFORMAT);
    assert_non_null(strstr(e.what, "9 tokens"));
    lm_gguf_close(g);
    lm_gguf_plan_free(p);
    lm_buf_fini(&b);
    lm_buf_fini(&json);
    lm_buf_fini(&config);
}

/* Metadata of a model with experts, as config.json. */
static lm_code experts_of(const char *arch, int64_t experts, int64_t chosen, json_t **o, lm_err *e)
{
    lm_buf b = { 0 };
    lm_gguf_plan *p = NULL;
    lm_gguf *g = NULL;
    char key[64];
    static const struct {
        const char *key;
        uint32_t v;
    } sizes[] = { { "block_count", 2 },          { "context_length", 64 },
                  { "embedding_length", 32 },    { "feed_forward_length", 96 },
                  { "attention.head_count", 4 }, { "attention.head_count_kv", 2 } };
    assert_int_equal(lm_gguf_plan_new(&p, e), LM_OK);
    lm_gguf_put_str(p, "general.architecture", arch, strlen(arch));
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        snprintf(key, sizeof key, "%s.%s", arch, sizes[i].key);
        lm_gguf_put_u32(p, key, sizes[i].v);
    }
    snprintf(key, sizeof key, "%s.expert_count", arch);
    lm_gguf_put_u32(p, key, (uint32_t)experts);
    snprintf(key, sizeof key, "%s.expert_used_count", arch);
    lm_gguf_put_u32(p, key, (uint32_t)chosen);
    lm_gguf_put_tensor(p, "token_embd.weight", LM_GGUF_TYPE_F32, 2, (int64_t[]){ 20, 32 });
    assert_int_equal(lm_gguf_plan_header(p, &b, e), LM_OK);
    for (int i = 0; i < 20 * 32; i++)
        assert_int_equal(lm_buf_add(&b, "\0\0\0\0", 4, e), LM_OK);
    assert_int_equal(lm_gguf_parse(b.data, b.len, "test", &g, e), LM_OK);
    *o = NULL;
    lm_code rc = lm_gguf_get_config(g, o, e);
    lm_gguf_close(g);
    lm_gguf_plan_free(p);
    lm_buf_fini(&b);
    return rc;
}

/* An architecture's name in GGUF with experts is the mixture's; widths that llama.cpp takes from other keys where
 * theirs are absent; more experts of a token than there are, and mixtures of other architectures. */
static void experts_are_read(void **state)
{
    (void)state;
    static const struct {
        const char *gguf, *type;
        int64_t ffn, shared;
        bool normalise;
    } want[] = { { "llama", "mixtral", 96, 0, true },
                 { "qwen2moe", "qwen2_moe", 32, 96, false },
                 { "qwen3moe", "qwen3_moe", 32, 0, true } };
    json_t *o;
    lm_err e = { 0 };
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        lm_config c;
        if (experts_of(want[i].gguf, 6, 3, &o, &e) || lm_config_read(o, "test", &c, &e))
            fail_msg("%s: %s", e.where, e.what);
        assert_string_equal(c.arch->name, want[i].type);
        const lm_moe *m = &c.layer[1].moe;
        assert_true(m->experts == 6 && m->chosen == 3 && m->ffn == want[i].ffn &&
                    m->shared == want[i].shared && m->normalise == want[i].normalise);
        lm_config_fini(&c);
        json_decref(o);
    }
    assert_int_equal(experts_of("qwen3moe", 8, 9, &o, &e), LM_EUSAGE);
    assert_string_equal(e.what,
                        "'qwen3moe.expert_used_count' is 9, but 'qwen3moe.expert_count' is 8");
    e = (lm_err){ 0 };
    assert_int_equal(experts_of("grok", 128, 4, &o, &e), LM_EUSAGE);
    assert_non_null(strstr(e.what, "128 experts"));
    e = (lm_err){ 0 };
    assert_int_equal(experts_of("qwen2", 8, 2, &o, &e), LM_EUSAGE);
}

/* Experts are stacked in GGUF, the gate of the shared expert is a vector. */
static void experts_are_stacked(void **state)
{
    (void)state;
    lm_config c;
    lm_model_tensor *s = NULL;
    size_t n = 0, seen = 0;
    char split[LM_TENSOR_NAME];
    lm_err e = { 0 };
    read_config("{\"model_type\":\"qwen2_moe\",\"hidden_size\":32,\"intermediate_size\":64,"
                "\"num_hidden_layers\":1,\"num_attention_heads\":2,\"num_key_value_heads\":2,"
                "\"vocab_size\":4,"
                "\"num_experts\":5,\"num_experts_per_tok\":2,\"moe_intermediate_size\":24,"
                "\"shared_expert_intermediate_size\":40,\"max_position_embeddings\":8}",
                &c);
    assert_int_equal(lm_model_tensors_make(&c, &s, &n, &e), LM_OK);
    for (size_t i = 0; i < n; i++) {
        int64_t dim[3] = { 0 };
        int ndim = lm_model_tensor_gguf_shape(&s[i], dim);
        if (s[i].part == LM_PART_EXPERT_DOWN && s[i].expert == 3) {
            assert_string_equal(s[i].gguf, "blk.0.ffn_down_exps.weight");
            assert_string_equal(lm_model_tensor_gguf_split(&s[i], split),
                                "blk.0.ffn_down.3.weight");
            assert_true(ndim == 3 && dim[0] == 5 && dim[1] == 32 && dim[2] == 24);
            seen++;
        } else if (s[i].part == LM_PART_SHARED_SWITCH) {
            assert_true(ndim == 1 && dim[0] == 32);
            seen++;
        } else if (s[i].part == LM_PART_SHARED_UP) {
            assert_true(ndim == 2 && dim[0] == 40 && dim[1] == 32);
            seen++;
        }
    }
    assert_int_equal(seen, 3);
    lm_free(s);
    lm_config_fini(&c);
}

/* ---- Types of tensors ---- */

static bool is_offered(const char *name)
{
    for (int i = 0; lm_gguf_types[i]; i++)
        if (!strcmp(lm_gguf_types[i], name))
            return true;
    return false;
}

/* Each GGUF format that can be written is a type of the option, formats that can only be read are
 * not; Q3_K exists in mixtures only. */
static void types_are_formats(void **state)
{
    (void)state;
    for (int i = 0; lm_format_at(i); i++) {
        const lm_format *f = lm_format_at(i);
        bool written = f->gguf != LM_NO_GGUF && f->encode && f->element != LM_DTYPE_F64;
        const char *name = strcmp(f->name, "q3_k") ? lm_format_show(f) : "q3_k_s";
        assert_int_equal(is_offered(name), written);
        assert_int_equal(written && lm_gguf_type_weighs(name), lm_format_weighs(f));
    }
}

/* The digit of a K-quant: '2' to '6'; '8' for Q8_0, 'o' for Q4_0, 'a' and 'b' for Q5_0 and Q5_1,
 * 'n' and 'x' for IQ4_NL and IQ4_XS. */
static char letter(uint32_t type)
{
    static const char letters[] = "01o...ab8.23456.....n..x";

    return type == LM_GGUF_TYPE_BF16 ? 'w' : type < sizeof letters - 1 ? letters[type] : '?';
}

enum { MOST = 128 }; /* tensors of one part: two norms a layer */

/* The types of one part in all layers, or outside them. */
static void types_by(const lm_config *c, lm_gguf_rule r, const char *name, lm_part part, bool bias,
                     char out[MOST])
{
    lm_model_tensor *s = NULL;
    size_t n = 0, k = 0;
    bool fell_back;
    lm_err e = { 0 };

    assert_int_equal(lm_gguf_recipe_find(name, &r.recipe, &e), LM_OK);
    assert_int_equal(lm_model_tensors_make(c, &s, &n, &e), LM_OK);
    for (size_t i = 0; i < n; i++)
        if (s[i].part == part && s[i].bias == bias && k < MOST - 1)
            out[k++] = letter(lm_gguf_recipe_type(&r, c, &s[i], LM_DTYPE_BF16, &fell_back));
    out[k] = 0;
    lm_free(s);
}

static void types_of(const lm_config *c, const char *name, lm_part part, bool bias, char out[MOST])
{
    types_by(c, (lm_gguf_rule){ 0 }, name, part, bias, out);
}

static void config_of(lm_config *c, const char *type, int layers, int width, bool tied)
{
    char text[400];

    snprintf(text, sizeof text,
             strcmp(type, "gpt2")
                 ? "{\"model_type\":\"%s\",\"num_hidden_layers\":%d,\"hidden_size\":%d,"
                   "\"tie_word_embeddings\":%s,\"num_attention_heads\":4,"
                   "\"num_key_value_heads\":4,\"intermediate_size\":256,\"vocab_size\":20,"
                   "\"max_position_embeddings\":64}"
                 : "{\"model_type\":\"%s\",\"n_layer\":%d,\"n_embd\":%d,"
                   "\"tie_word_embeddings\":%s,\"n_head\":4,\"vocab_size\":20,"
                   "\"n_positions\":16}",
             type, layers, width, tied ? "true" : "false");
    read_config(text, c);
}

/* The types that llama-quantize (llama.cpp of 2026) chose for the same shapes. */
static void mixtures_are_llama_cpps(void **state)
{
    (void)state;
    static const struct {
        const char *type;
        int layers;
        const char *value, *down;
    } want[] = {
        { "q4_k_s", 2, "55", "44" },
        { "q4_k_m", 2, "46", "46" },
        { "q5_k_s", 2, "55", "55" },
        { "q5_k_m", 2, "56", "56" },
        { "q4_k_s", 12, "555544444444", "544444444444" },
        { "q4_k_m", 12, "644644644666", "644644644666" },
        { "q5_k_s", 12, "555555555555", "555555555555" },
        { "q5_k_m", 12, "655655655666", "655655655666" },
        { "q4_k_s", 32, "55554444444444444444444444444444", "55554444444444444444444444444444" },
        { "q4_k_m", 32, "66664464464464464464464464466666", "66664464464464464464464464466666" },
        { "q5_k_s", 32, "55555555555555555555555555555555", "55555555555555555555555555555555" },
        { "q5_k_m", 32, "66665565565565565565565565566666", "66665565565565565565565565566666" },
    };
    char got[MOST];

    for (size_t i = 0; i < 2 * sizeof want / sizeof *want; i++) {
        bool gpt2 = i % 2;
        size_t k = i / 2;
        const char base[2] = { want[k].type[1], 0 };
        lm_config c;
        config_of(&c, gpt2 ? "gpt2" : "llama", want[k].layers, 256, gpt2);
        types_of(&c, want[k].type, gpt2 ? LM_PART_QKV : LM_PART_V, false, got);
        assert_string_equal(got, want[k].value);
        types_of(&c, want[k].type, LM_PART_DOWN, false, got);
        assert_string_equal(got, want[k].down);
        types_of(&c, want[k].type, LM_PART_UP, false, got);
        assert_int_equal(strspn(got, base), want[k].layers);
        types_of(&c, want[k].type, LM_PART_EMBED, false, got);
        assert_string_equal(got, gpt2 ? "6" : base); /* tied: the embedding is also the head */
        types_of(&c, want[k].type, LM_PART_OUTPUT, false, got);
        assert_string_equal(got, gpt2 ? "" : "6");
        types_of(&c, want[k].type, LM_PART_ATTN_NORM, false, got);
        assert_int_equal(strspn(got, "0"), strlen(got));
        types_of(&c, want[k].type, LM_PART_QKV, true, got);
        assert_int_equal(strspn(got, "0"), strlen(got));
        lm_config_fini(&c);
    }
}

/* Results of llama_tensor_get_type in the same source (src/llama-quant.cpp). */
static void low_mixtures_are_llama_cpps(void **state)
{
    (void)state;
    static const struct {
        const char *arch;
        int layers, kv_heads;
        const char *type;
        bool importance;
        const char *value, *down;
        char out;
    } want[] = {
        { "llama", 12, 4, "q2_k", false, "333333333333", "333333333333", '3' },
        { "llama", 12, 4, "q2_k_s", false, "222222222222", "422222222222", '2' },
        { "llama", 12, 4, "q3_k_s", false, "333333333333", "333333333333", '3' },
        { "llama", 12, 4, "q3_k_m", false, "554444444444", "444444444444", '4' },
        { "llama", 12, 4, "q3_k_l", false, "555555555555", "555555555555", '5' },
        { "llama", 12, 4, "iq4_nl", false, "nnnnnnnnnnnn", "5nnnnnnnnnnn", 'n' },
        { "llama", 12, 4, "iq4_nl", true, "nnnnnnnnnnnn", "nnnnnnnnnnnn", 'n' },
        { "llama", 12, 4, "iq4_xs", false, "xxxxxxxxxxxx", "5xxxxxxxxxxx", 'x' },
        { "llama", 12, 4, "iq4_xs", true, "xxxxxxxxxxxx", "xxxxxxxxxxxx", 'x' },
        { "llama", 12, 1, "q2_k", false, "444444444444", "333333333333", '3' },
        { "llama", 12, 1, "q2_k_s", false, "444444444444", "422222222222", '2' },
        { "llama", 12, 1, "q3_k_m", false, "554444444444", "444444444444", '4' },
        { "llama", 12, 1, "iq4_nl", false, "555555555555", "5nnnnnnnnnnn", 'n' },
        { "llama", 12, 1, "iq4_nl", true, "555555555555", "nnnnnnnnnnnn", 'n' },
        { "llama", 12, 1, "iq4_xs", false, "555555555555", "5xxxxxxxxxxx", 'x' },
        { "llama", 12, 1, "iq4_xs", true, "555555555555", "xxxxxxxxxxxx", 'x' },
        { "llama", 32, 4, "q2_k_s", false, "22222222222222222222222222222222",
          "44442222222222222222222222222222", '2' },
        { "llama", 32, 4, "q3_k_m", false, "55444444444444444444444444444444",
          "55444444444444444444444444444444", '4' },
        { "llama", 32, 4, "iq4_xs", false, "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
          "5555xxxxxxxxxxxxxxxxxxxxxxxxxxxx", 'x' },
        { "llama", 32, 4, "iq4_xs", true, "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
          "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx", 'x' },
        { "gpt2", 12, 4, "q2_k", false, "333333333333", "333333333333", '3' },
        { "gpt2", 12, 4, "q2_k_s", false, "222222222222", "422222222222", '2' },
        { "gpt2", 12, 4, "q3_k_s", false, "333333333333", "333333333333", '3' },
        { "gpt2", 12, 4, "q3_k_m", false, "554444444444", "444444444444", '4' },
        { "gpt2", 12, 4, "q3_k_l", false, "555555555555", "555555555555", '5' },
        { "gpt2", 12, 4, "iq4_nl", false, "nnnnnnnnnnnn", "5nnnnnnnnnnn", 'n' },
        { "gpt2", 12, 4, "iq4_nl", true, "nnnnnnnnnnnn", "nnnnnnnnnnnn", 'n' },
        { "gpt2", 12, 4, "iq4_xs", false, "xxxxxxxxxxxx", "5xxxxxxxxxxx", 'x' },
        { "gpt2", 12, 4, "iq4_xs", true, "xxxxxxxxxxxx", "xxxxxxxxxxxx", 'x' },
    };
    char got[MOST];

    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        bool gpt2 = want[i].arch[0] == 'g';
        lm_config c;
        lm_gguf_rule r = { .importance = want[i].importance };
        config_of(&c, want[i].arch, want[i].layers, 256, false);
        for (int64_t l = 0; l < c.layers; l++)
            c.layer[l].kv_heads = want[i].kv_heads;
        types_by(&c, r, want[i].type, gpt2 ? LM_PART_QKV : LM_PART_V, false, got);
        assert_string_equal(got, want[i].value);
        types_by(&c, r, want[i].type, LM_PART_DOWN, false, got);
        assert_string_equal(got, want[i].down);
        types_by(&c, r, want[i].type, LM_PART_ATTN_OUT, false, got);
        assert_int_equal(got[0], want[i].out);
        types_by(&c, r, want[i].type, LM_PART_OUTPUT, false, got);
        assert_string_equal(got, "6");
        r.pure = true;
        const char base[2] = { want[i].type[0] == 'q' ? want[i].type[1] : want[i].type[4], 0 };
        types_by(&c, r, want[i].type, LM_PART_DOWN, false, got);
        assert_int_equal(strspn(got, base), want[i].layers);
        lm_config_fini(&c);
    }
}

/* Value matrices shared by many heads; llama.cpp recognises 70B models by the number of layers. */
static void values_of_70b_have_more_bits(void **state)
{
    (void)state;
    static const char *const types[] = { "q2_k", "q3_k_s", "q3_k_m", "q4_k_s" };
    char got[MOST];

    for (size_t i = 0; i < 8; i++) {
        lm_config c;
        config_of(&c, i % 2 ? "qwen2" : "llama", 80, 256, false);
        for (int64_t l = 0; l < c.layers; l++)
            c.layer[l].kv_heads = 1;
        types_of(&c, types[i / 2], LM_PART_V, false, got);
        assert_int_equal(strspn(got, "5"), 80);
        lm_config_fini(&c);
    }
}

static void rows_that_fit_no_block_fall_back(void **state)
{
    (void)state;
    static const struct {
        const char *type;
        int width;
        char want;
        bool falls;
    } cases[] = {
        { "q4_k", 256, '4', false }, { "q4_k", 96, 'a', true },   { "q5_k", 96, 'b', true },
        { "q6_k", 96, '8', true },   { "q8_0", 96, '8', false },  { "q4_k", 40, 'w', true },
        { "q6_k", 40, 'w', true },   { "q8_0", 40, 'w', true },   { "keep", 40, 'w', false },
        { "f32", 40, '0', false },   { "f16", 96, '1', false },   { "q2_k", 96, 'o', true },
        { "q3_k_m", 96, 'o', true }, { "iq4_xs", 96, 'n', true }, { "iq4_nl", 96, 'n', false },
        { "iq4_nl", 40, 'w', true },
    };

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        lm_gguf_rule r = { 0 };
        lm_config c;
        lm_model_tensor *s = NULL;
        size_t n = 0;
        bool fell_back;
        lm_err e = { 0 };
        config_of(&c, "llama", 1, cases[i].width, false);
        assert_int_equal(lm_gguf_recipe_find(cases[i].type, &r.recipe, &e), LM_OK);
        assert_int_equal(lm_model_tensors_make(&c, &s, &n, &e), LM_OK);
        const lm_model_tensor *q = slot_of(s, n, "blk.0.attn_q.weight");
        assert_int_equal(letter(lm_gguf_recipe_type(&r, &c, q, LM_DTYPE_BF16, &fell_back)),
                         cases[i].want);
        assert_int_equal(fell_back, cases[i].falls);
        lm_free(s);
        lm_config_fini(&c);
    }
}

/* With eight experts, attention has more bits (llama_tensor_get_type in the same source); with another number it is
 * as in a dense model, and routers are F32. */
static void eight_experts_are_llama_cpps(void **state)
{
    (void)state;
    static const struct {
        const char *type;
        char output, other; /* of eight experts, of five */
    } want[] = {
        { "q2_k", '5', '3' },   { "q2_k_s", '2', '2' }, { "q3_k_s", '5', '3' },
        { "q3_k_m", '5', '4' }, { "q3_k_l", '3', '5' }, { "q4_k_s", '5', '4' },
        { "q4_k_m", '5', '4' }, { "q5_k_s", '5', '5' }, { "q5_k_m", '5', '5' },
        { "iq4_xs", '5', 'x' },
    };
    char got[MOST], down[MOST], dense[MOST], text[400];
    for (size_t i = 0; i < 2 * sizeof want / sizeof *want; i++) {
        bool eight = i % 2;
        const size_t k = i / 2;
        lm_config c, d;
        snprintf(text, sizeof text,
                 "{\"model_type\":\"mixtral\",\"num_hidden_layers\":12,\"hidden_size\":256,"
                 "\"num_attention_heads\":4,\"num_key_value_heads\":4,\"intermediate_size\":256,"
                 "\"vocab_size\":20,\"num_local_experts\":%d,\"max_position_embeddings\":64}",
                 eight ? 8 : 5);
        read_config(text, &c);
        config_of(&d, "llama", 12, 256, false);
        types_of(&c, want[k].type, LM_PART_ATTN_OUT, false, got);
        assert_int_equal(got[0], eight ? want[k].output : want[k].other);
        types_of(&c, want[k].type, LM_PART_K, false, got);
        types_of(&d, want[k].type, LM_PART_K, false, dense);
        assert_int_equal(got[3], eight ? '8' : dense[3]);
        types_of(&c, want[k].type, LM_PART_V, false, got);
        types_of(&d, want[k].type, LM_PART_V, false, dense);
        assert_int_equal(got[3], eight ? '8' : dense[3]);
        types_of(&c, want[k].type, LM_PART_ROUTER, false, got);
        assert_int_equal(got[0], '0');
        types_of(&c, want[k].type, LM_PART_EXPERT_DOWN, false, down);
        types_of(&d, want[k].type, LM_PART_DOWN, false, dense);
        for (size_t l = 0; l < 12; l++)
            assert_int_equal(down[l * (eight ? 8 : 5)], dense[l]);
        lm_config_fini(&c);
        lm_config_fini(&d);
    }
}

/* ---- A whole file ---- */

/* Bytes of a tensor: every scale is 1.0 in the format of its type, every code is `code`. */
static void fill(const lm_gguf_tensor *t, uint8_t code, lm_buf *out)
{
    static const uint8_t f16_one[2] = { 0x00, 0x3c }, e4m3_one[4] = { 0x38, 0x38, 0x38, 0x38 };
    const lm_format *type = lm_format_of_gguf(t->type);
    lm_err e = { 0 };
    uint8_t block[64];

    memset(block, type->element == LM_DTYPE_F32 ? 0 : code, sizeof block);
    if (t->type == 39)
        block[0] = 127;
    else if (t->type == 40)
        memcpy(block, e4m3_one, 4);
    else if (type->element != LM_DTYPE_F32)
        memcpy(block, f16_one, 2);
    for (int64_t i = 0; i < t->count / lm_format_group(type); i++)
        assert_int_equal(lm_buf_add(out, block, (size_t)type->plane[0].bits / 8, &e), LM_OK);
    while (out->len % 32)
        assert_int_equal(lm_buf_add(out, "", 1, &e), LM_OK);
}

/* A llama of one layer whose MLP is in blocks of `type`, written to `path`. */
static void write_gguf(const char *path, uint32_t type, uint8_t code)
{
    lm_config c;
    lm_gguf_plan *p = NULL;
    lm_model_tensor *s = NULL;
    lm_buf b = { 0 }, data = { 0 };
    size_t n = 0;
    lm_err e = { 0 };

    read_config("{\"model_type\":\"llama\",\"hidden_size\":128,\"intermediate_size\":128,"
                "\"num_hidden_layers\":1,\"num_attention_heads\":2,\"vocab_size\":4,"
                "\"max_position_embeddings\":8}",
                &c);
    assert_int_equal(lm_gguf_plan_new(&p, &e), LM_OK);
    assert_int_equal(lm_model_tensors_make(&c, &s, &n, &e), LM_OK);
    lm_gguf_put_str(p, "general.architecture", "llama", 5);
    assert_int_equal(lm_gguf_put_numbers(p, &c, &e), LM_OK);
    for (size_t i = 0; i < n; i++)
        lm_gguf_put_tensor(p, s[i].gguf, strstr(s[i].gguf, "ffn_up") ? type : LM_GGUF_TYPE_F32,
                           s[i].ndim, s[i].dim);
    assert_int_equal(lm_gguf_plan_header(p, &b, &e), LM_OK);
    for (size_t i = 0; i < n; i++)
        fill(lm_gguf_plan_at(p, i), code, &data);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(b.data, 1, b.len, f), b.len);
    assert_int_equal(fwrite(data.data, 1, data.len, f), data.len);
    fclose(f);
    lm_gguf_plan_free(p);
    lm_free(s);
    lm_buf_fini(&b);
    lm_config_fini(&c);
    lm_buf_fini(&data);
}

/* Files with the types 39 to 42 are opened and decoded. */
static void newest_types_are_read(void **state)
{
    (void)state;
    static const struct {
        uint32_t type;
        uint8_t code;
        float want;
    } cases[] = {
        { 39, 0x55, 3.0f },  { 40, 0xdd, -3.0f }, { 41, 0xff, 1.0f },
        { 41, 0x00, -1.0f }, { 42, 0xff, 2.0f },  { 42, 0x00, -1.0f },
    };
    char path[] = "/tmp/lm-gguf-XXXXXX";

    close(mkstemp(path));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const lm_import_opts o = { .dtype = LM_DTYPE_F32 };
        lm_import m = { 0 };
        lm_err e = { 0 };
        bool found = false;
        write_gguf(path, cases[i].type, cases[i].code);
        if (lm_import_open(path, LM_FORMAT_AUTO, &o, &m, &e))
            fail_msg("%s: %s", e.where, e.what);
        assert_true(m.quantised);
        for (size_t k = 0; k < lm_st_plan_count(m.plan); k++) {
            const lm_st_tensor *t = lm_st_plan_at(m.plan, k);
            const void *data;
            if (!strstr(t->name, "up_proj"))
                continue;
            assert_int_equal(m.load(&m, t, &data, &e), LM_OK);
            for (int64_t x = 0; x < t->count; x++)
                assert_true(((const float *)data)[x] == cases[i].want);
            found = true;
        }
        assert_true(found);
        lm_import_close(&m);
    }
    unlink(path);
}

/* The digest of weights reads codes: those of another type or value give another one. */
static void codes_have_a_digest(void **state)
{
    static const uint8_t code[4] = { 0xff, 0xff, 0x00, 0xff };
    uint8_t digest[4][16];
    char path[] = "/tmp/lm-gguf-XXXXXX";
    (void)state;

    close(mkstemp(path));
    for (int i = 0; i < 4; i++) {
        lm_model_source *m = NULL;
        lm_err e = { 0 };
        write_gguf(path, i == 3 ? 42 : 41, code[i]);
        if (lm_gguf_source_open(path, false, &(lm_bundle_opts){ 0 }, &m, &e) ||
            lm_model_source_weights_digest(m, digest[i], &e))
            fail_msg("%s: %s", e.where, e.what);
        lm_model_source_close(m);
    }
    assert_memory_equal(digest[0], digest[1], 16);
    assert_memory_not_equal(digest[0], digest[2], 16);
    assert_memory_not_equal(digest[0], digest[3], 16);
    unlink(path);
}

/* ---- llama2.c's tokenizer.bin ---- */

static size_t put_token(uint8_t *at, float score, const char *text)
{
    uint32_t len = (uint32_t)strlen(text);

    memcpy(at, &score, 4);
    memcpy(at + 4, &len, 4);
    memcpy(at + 8, text, len);
    return 8 + len;
}

static lm_code read_tokenizer_bin(const void *data, size_t n, int64_t vocab, lm_import *m,
                                  lm_err *e)
{
    char path[] = "/tmp/lm-test-XXXXXX";
    int fd = mkstemp(path);
    lm_code rc;

    assert_true(fd >= 0 && write(fd, data, n) == (ssize_t)n);
    close(fd);
    *m = (lm_import){ .config.vocab = vocab };
    rc = lm_import_tokenizer_bin(m, path, e);
    unlink(path);
    return rc;
}

static void tokenizer_bin_is_read(void **state)
{
    (void)state;
    static const char *const words[] = { "<unk>", "\n<s>\n", "\n</s>\n" };
    static const char *const last[] = { "a", "b", " ", "ab", " ab" };
    uint8_t file[6000] = { 14 };
    size_t n = 4;
    lm_import m;
    lm_err e = { 0 };

    for (int i = 0; i < 3; i++)
        n += put_token(file + n, 0, words[i]);
    for (int i = 0; i < 256; i++) {
        char byte[8];
        snprintf(byte, sizeof byte, "<0x%02X>", (unsigned)i & 255);
        n += put_token(file + n, 0, byte);
    }
    for (int i = 0; i < 5; i++)
        n += put_token(file + n, i < 3 ? -9 : -(float)i, last[i]);

    assert_int_equal(read_tokenizer_bin(file, n, 264, &m, &e), LM_OK);
    const lm_side_file *json = lm_import_side(&m, "tokenizer.json");
    assert_non_null(json);
    assert_non_null(strstr(json->data.data, "\"<s>\":1"));
    assert_non_null(
        strstr(json->data.data, "\"merges\":[[\"a\",\"b\"],[\"\xe2\x96\x81\",\"ab\"]]"));
    assert_non_null(strstr(json->data.data, "\"byte_fallback\":true"));
    assert_non_null(lm_import_side(&m, "tokenizer_config.json"));
    lm_import_close(&m);

    assert_int_equal(read_tokenizer_bin(file, n, 263, &m, &e), LM_EFORMAT);
    assert_non_null(strstr(e.what, "more tokens than the model's 263"));
    lm_import_close(&m);
    e = (lm_err){ 0 };
    assert_int_equal(read_tokenizer_bin(file, n, 265, &m, &e), LM_EFORMAT);
    assert_non_null(strstr(e.what, "within token 264 of the 265"));
    lm_import_close(&m);
    for (size_t cut = 0; cut < n; cut += 37) {
        e = (lm_err){ 0 };
        assert_int_equal(read_tokenizer_bin(file, cut, 264, &m, &e), LM_EFORMAT);
        lm_import_close(&m);
    }
    memset(file + 8, 0xff, 4); /* a length of -1 */
    e = (lm_err){ 0 };
    assert_int_equal(read_tokenizer_bin(file, n, 264, &m, &e), LM_EFORMAT);
    lm_import_close(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tokenizer_bin_is_read),
        cmocka_unit_test(mixtures_are_llama_cpps),
        cmocka_unit_test(experts_are_read),
        cmocka_unit_test(experts_are_stacked),
        cmocka_unit_test(eight_experts_are_llama_cpps),
        cmocka_unit_test(newest_types_are_read),
        cmocka_unit_test(codes_have_a_digest),
        cmocka_unit_test(low_mixtures_are_llama_cpps),
        cmocka_unit_test(values_of_70b_have_more_bits),
        cmocka_unit_test(rows_that_fit_no_block_fall_back),
        cmocka_unit_test(tensors_have_names_and_shapes),
        cmocka_unit_test(rope_rows_are_llama_cpps),
        cmocka_unit_test(bits_are_moved),
        cmocka_unit_test(types_are_formats),
        cmocka_unit_test(blocks_are_transposed),
        cmocka_unit_test(importance_goes_with_columns),
        cmocka_unit_test(config_is_restored),
        cmocka_unit_test(layers_are_restored),
        cmocka_unit_test(norms_are_llama_cpps),
        cmocka_unit_test(merges_follow_from_scores),
    };
    return cmocka_run_group_tests_name("convert", tests, NULL, NULL);
}
