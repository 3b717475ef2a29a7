/* SPDX-License-Identifier: Apache-2.0 */
/* Verification: parts of a folder that are never read are reported with the reason. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/file.h"
#include "base/mem.h"
#include "convert/names.h"
#include "convert/verify.h"

static char dir[64];

static int make_dir(void **state)
{
    (void)state;
    strcpy(dir, "/tmp/lm-test-XXXXXX");
    return mkdtemp(dir) ? 0 : -1;
}

static int drop_dir(void **state)
{
    lm_err e = { 0 };
    (void)state;
    return lm_rm_rf(dir, &e);
}

static const char *in(const char *name)
{
    static char path[160];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return path;
}

/* A config of a tiny Llama with more keys. */
static void put_config(const char *more)
{
    FILE *f = fopen(in("config.json"), "w");
    assert_non_null(f);
    fprintf(f,
            "{\"model_type\":\"llama\",\"vocab_size\":8,\"hidden_size\":4,\"intermediate_size\":6,"
            "\"num_hidden_layers\":1,\"num_attention_heads\":2%s}",
            more);
    fclose(f);
}

/* Tensors of a file in addition to, or instead of, those of the model. */
typedef struct {
    const char *name;
    lm_dtype dtype;
    int64_t rows; /* of 4 columns; 0: the tensor of this name is left out */
} odd;

static const odd *odd_of(const odd *o, const char *name)
{
    for (; o && o->name; o++)
        if (!strcmp(o->name, name))
            return o;
    return NULL;
}

static void put_weights(const char *file, bool parts, const odd *o)
{
    lm_config c;
    lm_model_tensor *wanted = NULL;
    lm_st_plan *p = NULL;
    lm_st_writer *w = NULL;
    lm_err e = { 0 };
    json_t *config = NULL;
    size_t n = 0;
    static const uint8_t zeros[4096];

    assert_int_equal(lm_json_load(in("config.json"), 1 << 20, &config, &e), LM_OK);
    assert_int_equal(lm_config_read(config, "config", &c, &e), LM_OK);
    assert_int_equal(lm_model_tensors_make(&c, &wanted, &n, &e), LM_OK);
    assert_int_equal(lm_st_plan_new(&p, &e), LM_OK);
    for (size_t i = 0; parts && i < n; i++)
        if (!odd_of(o, wanted[i].hf))
            assert_int_equal(
                lm_st_plan_add(p, wanted[i].hf, LM_DTYPE_BF16, wanted[i].ndim, wanted[i].dim, &e),
                LM_OK);
    for (; o && o->name; o++)
        if (o->rows)
            assert_int_equal(lm_st_plan_add(p, o->name, o->dtype, 2, (int64_t[]){ o->rows, 4 }, &e),
                             LM_OK);
    assert_int_equal(lm_st_create(in(file), true, p, &w, &e), LM_OK);
    for (uint64_t left = lm_st_plan_data_bytes(p), k; left; left -= k) {
        k = left < sizeof zeros ? left : sizeof zeros;
        assert_int_equal(lm_st_write(w, zeros, k, &e), LM_OK);
    }
    assert_int_equal(lm_st_commit(w, &e), LM_OK);
    lm_st_plan_free(p);
    lm_free(wanted);
    lm_config_fini(&c);
    json_decref(config);
}

/* The report must have these lines (NULL-terminated), and as many faults and notes. */
static void expect(uint64_t faults, uint64_t notes, const char *const *lines)
{
    lm_model_source *m = NULL;
    lm_buf text = { 0 }, json = { 0 };
    lm_err e = { 0 };
    uint64_t got = 99;
    char end[80];

    assert_int_equal(lm_model_source_open(dir, NULL, &m, &e), LM_OK);
    assert_int_equal(lm_model_verify_report(m, false, &text, &got, &e), LM_OK);
    snprintf(end, sizeof end, ": %d fault%s, %d note%s\n", (int)faults, faults == 1 ? "" : "s",
             (int)notes, notes == 1 ? "" : "s");
    if (got != faults || !strstr(text.data, end))
        fail_msg("expected%s, got: %s", end, text.data);
    for (; lines && *lines; lines++)
        if (!strstr(text.data, *lines))
            fail_msg("no line '%s' in: %s", *lines, text.data);
    assert_int_equal(lm_model_verify_report(m, true, &json, &got, &e), LM_OK);
    assert_non_null(strstr(json.data, faults ? "\"ok\":false" : "\"ok\":true"));
    lm_buf_fini(&text);
    lm_buf_fini(&json);
    lm_model_source_close(m);
}
#define LINES(...)        \
    (const char *const[]) \
    {                     \
        __VA_ARGS__, NULL \
    }

static void test_whole(void **state)
{
    (void)state;
    put_config("");
    put_weights("model.safetensors", true, NULL);
    expect(0, 0, NULL);
}

static void test_tensors(void **state)
{
    static const odd o[] = { { "model.norm.weight", 0, 0 },
                             { "lm_head.weight", LM_DTYPE_BF16, 9 },
                             { "model.layers.0.mlp.gate_proj.bias", LM_DTYPE_BF16, 1 },
                             { "model.layers.0.self_attn.rotary_emb.inv_freq", LM_DTYPE_F32, 1 },
                             { "model.layers.1.mlp.up_proj.weight", LM_DTYPE_BF16, 6 },
                             { NULL } };
    (void)state;
    put_config("");
    put_weights("model.safetensors", true, o);
    expect(4, 1,
           LINES("fault  model.norm.weight: is missing",
                 "fault  model.safetensors: lm_head.weight: its shape is not the [8,4]",
                 "gate_proj.bias: is read by no part of a llama model",
                 "layers.1.mlp.up_proj.weight: is read by no part of a llama model",
                 "note   model.safetensors: model.layers.0.self_attn.rotary_emb.inv_freq"));
    put_config(",\"tie_word_embeddings\":true,\"mlp_bias\":false");
    put_weights("model.safetensors", true,
                (odd[]){ { "lm_head.weight", LM_DTYPE_BF16, 8 }, { NULL } });
    expect(0, 1, LINES("lm_head.weight: is not read: config.json ties"));
}

static void test_files(void **state)
{
    (void)state;
    put_config("");
    put_weights("model.safetensors", true, NULL);
    put_weights("model-00001-of-00002.safetensors", false, NULL);
    put_weights("optimizer.safetensors", false, NULL);
    put_weights("consolidated.safetensors", false, NULL);
    put_weights("pytorch_model-00001-of-00002.bin", false, NULL);
    expect(
        1, 3,
        LINES("fault  model-00001-of-00002.safetensors: is read by no loader: model.safetensors "
              "comes first",
              "note   optimizer.safetensors: is read by train alone",
              "consolidated.safetensors: is read by mistral-inference alone",
              "pytorch_model-00001-of-00002.bin: lies beside the weights that are read: a pickle"));
    assert_int_equal(remove(in("pytorch_model-00001-of-00002.bin")), 0);
    FILE *f = fopen(in("model.safetensors.index.json"), "w");
    fputs("{\"weight_map\":{\"w\":\"model-00001-of-00002.safetensors\"}}", f);
    fclose(f);
    assert_int_equal(remove(in("model.safetensors")), 0);
    put_weights("model-00001-of-00002.safetensors", false,
                (odd[]){ { "w", LM_DTYPE_BF16, 1 }, { NULL } });
    put_weights("model-00002-of-00002.safetensors", false, NULL);
    expect(14, 2,
           LINES("model-00002-of-00002.safetensors: is read by no loader: the index does not name",
                 "w: is read by no part"));
}

static void test_scales(void **state)
{
#define Q "model.layers.0.self_attn.q_proj"
#define K "model.layers.0.self_attn.k_proj"
#define V "model.layers.0.self_attn.v_proj"
    static const odd good[] = { { Q ".weight", LM_DTYPE_F8E4M3, 4 },
                                { Q ".weight_scale_inv", LM_DTYPE_F32, 1 },
                                { K ".weight", 0, 0 },
                                { K ".qweight", LM_DTYPE_I32, 1 },
                                { K ".scales", LM_DTYPE_F16, 1 },
                                { K ".qzeros", LM_DTYPE_I32, 1 },
                                { V ".weight", 0, 0 },
                                { V ".weight.codes", LM_DTYPE_U8, 4 },
                                { V ".weight.scales", LM_DTYPE_F32, 1 },
                                { NULL } };
    static const odd bad[] = { { Q ".weight", LM_DTYPE_F8E4M3, 4 },
                               { Q ".weight_scale_inv", LM_DTYPE_F32, 1 },
                               { K ".weight", LM_DTYPE_F8E4M3, 4 },
                               { V ".weight", LM_DTYPE_I8, 4 },
                               { "model.layers.0.mlp.up_proj.weight", 0, 0 },
                               { "model.layers.0.mlp.up_proj.qweight", LM_DTYPE_I32, 1 },
                               { "model.layers.7.mlp.up_proj.weight_scale", LM_DTYPE_F32, 1 },
                               { NULL } };
    (void)state;
    put_config("");
    put_weights("model.safetensors", true, good);
    put_config(",\"quantization_config\":{\"quant_method\":\"fp8\"}");
    expect(
        0, 1,
        LINES(
            "config.json: quantization_config: all tools that compute with the model refuse it\n"));
    put_config("");
    put_weights("model.safetensors", true, NULL);
    put_config(",\"quantization_config\":{\"quant_method\":\"fp8\"}");
    expect(0, 1, LINES("refuse it, and no weight is quantised: remove the key"));
    put_config("");
    put_weights("model.safetensors", true, bad);
    expect(4, 0,
           LINES(K ".weight: its scale is missing: it is F8_E4M3, and other such weights have one",
                 V ".weight: its scale is missing: it is I8, which is not a weight without it",
                 "up_proj.qweight: its scale is missing: no tensor "
                 "'model.layers.0.mlp.up_proj.scales'",
                 "weight_scale: its weight is missing: no tensor "
                 "'model.layers.7.mlp.up_proj.weight'"));
    put_weights("model.safetensors", true,
                (odd[]){ { Q ".weight", LM_DTYPE_F8E4M3, 4 }, { NULL } });
    expect(0, 0, NULL); /* rounded weights, without scales throughout */
}

static void test_keys(void **state)
{
    (void)state;
    put_config("");
    put_weights("model.safetensors", true, NULL);
    put_config(",\"rope_thetaa\":1e6,\"sliding_window\":16,\"use_cache\":true,\"xyzzy\":1,"
               "\"pad_token_id\":null,\"partial_rotary_factor\":1,\"rope_scaling\":{\"rope_type\":"
               "\"linear\",\"factor\":2,\"beta_fast\":3}");
    expect(0, 5,
           LINES("note   config.json: rope_thetaa: has no effect: unknown; did you mean "
                 "rope_theta?",
                 "sliding_window: has no effect: a llama model does not read it",
                 "use_cache: has no effect on the computation", "xyzzy: has no effect: unknown\n",
                 "rope_scaling.beta_fast: has no effect: linear does not read it"));
    put_config(",\"rope_scaling\":{\"factor\":2}");
    expect(1, 0,
           LINES("fault  config.json: is refused by all tools that compute with the model: "
                 "\"rope_scaling\" has \"factor\", but no \"rope_type\""));
    FILE *f = fopen(in("config.json"), "w");
    fputs("{\"model_type\":\"mamba\"}", f);
    fclose(f);
    expect(0, 1, LINES("the use of tensors and keys is not checked: unknown model_type \"mamba\""));
}

static void put_file(const char *name, const char *text, size_t len)
{
    FILE *f = fopen(in(name), "w");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, len, f), len);
    fclose(f);
}
static void put_text(const char *name, const char *text)
{
    put_file(name, text, strlen(text));
}

static void test_tokenizer(void **state)
{
#define JSON(type, id)                                               \
    "{\"model\":{\"type\":\"" type                                   \
    "\",\"vocab\":{\"a\":0,\"b\":1,\"c\":2,\"d\":3,\"e\":4,\"f\":5," \
    "\"ab\":" id "},\"merges\":[\"a b\"]}}"
    static const char whole[] = JSON("BPE", "6");
    (void)state;
    put_config("");
    put_weights("model.safetensors", true, NULL);
    put_text("tokenizer.json", whole);
    put_text("tokenizer_config.json", "{}");
    expect(0, 0, NULL);
    put_file("tokenizer.json", whole, sizeof whole - 9);
    put_text("tokenizer_config.json", "{\"a\":");
    put_text("generation_config.json", "[1]");
    expect(3, 0,
           LINES("fault  tokenizer.json: is damaged", "fault  tokenizer_config.json: is damaged",
                 "fault  generation_config.json: is damaged or unsupported: it is "
                 "not a JSON object"));
    assert_int_equal(remove(in("tokenizer_config.json")), 0);
    assert_int_equal(remove(in("generation_config.json")), 0);
    put_text("tokenizer.json", "{\"model\":{\"vocab\":{\"a\":0},\"merges\":[\"a b\"]}}");
    expect(1, 0, LINES("fault  tokenizer.json: merge 0: is damaged"));
    put_text("tokenizer.json", JSON("BPE", "8"));
    expect(1, 0, LINES("tokenizer.json: has 9 ids, and vocab_size of config.json is 8"));
    put_text("tokenizer.json", JSON("WordLevel", "6"));
    expect(0, 1, LINES("note   tokenizer.json: is not read: model type \"WordLevel\""));
    assert_int_equal(remove(in("tokenizer.json")), 0);
    put_text("vocab.json", "{\"a\":0,\"b\":1,\"c\":2,\"d\":3,\"e\":4,\"f\":5,\"ab\":6}");
    expect(1, 0, LINES("fault  vocab.json: its merges.txt is missing"));
    put_text("merges.txt", "#version: 0.2\na b\n");
    expect(0, 0, NULL);
    put_text("merges.txt", "#version: 0.2\nab\n");
    expect(1, 0, LINES("fault  merges.txt: is damaged or unsupported: line 2 is"));
    put_text("merges.txt", "a x\n");
    expect(1, 0, LINES("fault  vocab.json: merge 0: is damaged"));
    put_text("vocab.json", "{\"a\":0,");
    expect(1, 0, LINES("fault  vocab.json: is damaged"));
#undef JSON
}

/* A SentencePiece model truncated at any byte is reported as damaged. */
static void test_sentencepiece(void **state)
{
    static const char words[] = "\x0a\x05\x0a\x03<u>\x12\x02\x18\x03";
    const char *root = getenv("LM_TEST_ROOT");
    char path[512];
    lm_buf text = { 0 };
    lm_err e = { 0 };
    static const size_t less[] = { 1, 40, 200, 1000, 2000 };

    (void)state;
    put_config("");
    put_weights("model.safetensors", true, NULL);
    put_file("tokenizer.model", words, sizeof words - 1);
    expect(0, 1, LINES("note   tokenizer.model: is not read: a word SentencePiece model"));
    snprintf(path, sizeof path, "%s/tests/golden/sentencepiece/llama.model", root ? root : ".");
    assert_int_equal(lm_file_read(path, 1 << 20, &text, &e), LM_OK);
    for (size_t i = 0; i < sizeof less / sizeof *less; i++) {
        assert_true(text.len > less[i]);
        put_file("tokenizer.model", text.data, text.len - less[i]);
        expect(1, 0, LINES("fault  tokenizer.model: is damaged"));
    }
    lm_buf_fini(&text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_whole, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_tensors, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_files, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_scales, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_keys, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_tokenizer, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_sentencepiece, make_dir, drop_dir),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
