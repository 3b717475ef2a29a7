/* SPDX-License-Identifier: Apache-2.0 */
/* test_merge_vocab.c -- different vocabularies: comparison, union, and each row of the result. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/par.h"
#include "merge/vocab.h"

/* Ids: a 0, b 1, c 2, ab 3, <s> 4 (added). */
static const char json_a[] =
    "{\"version\":\"1.0\",\"truncation\":null,\"padding\":null,\"added_tokens\":[{\"id\":4,"
    "\"content\":\"<s>\",\"single_word\":false,\"lstrip\":false,\"rstrip\":false,\"normalized\":"
    "false,\"special\":true}],\"normalizer\":null,\"pre_tokenizer\":null,\"post_processor\":null,"
    "\"decoder\":null,\"model\":{\"type\":\"BPE\",\"dropout\":null,\"unk_token\":null,"
    "\"continuing_subword_prefix\":null,\"end_of_word_suffix\":null,\"fuse_unk\":false,"
    "\"byte_fallback\":false,\"vocab\":{\"a\":0,\"b\":1,\"c\":2,\"ab\":3},\"merges\":[\"a b\"]}}";
/* Ids: b 0, a 1, d 2, bd 3, abd 4 (from ab, which it has at 5), <t> 6 (added). */
static const char json_b[] =
    "{\"version\":\"1.0\",\"added_tokens\":[{\"id\":6,\"content\":\"<t>\",\"special\":true}],"
    "\"normalizer\":null,\"pre_tokenizer\":null,\"post_processor\":null,\"decoder\":null,\"model\":"
    "{\"type\":\"BPE\",\"vocab\":{\"b\":0,\"a\":1,\"d\":2,\"bd\":3,\"abd\":4,\"ab\":5},\"merges\":"
    "[[\"b\",\"d\"],[\"a\",\"b\"],[\"ab\",\"d\"]]}}";
static const char config_a[] = "{\"bos_token\":\"<s>\",\"added_tokens_decoder\":{\"4\":{"
                               "\"content\":\"<s>\",\"special\":true}}}";

static lm_tokenizer *load(const char *json, const char *config)
{
    lm_tokenizer *t = NULL;
    lm_err e = { 0 };
    lm_code rc = lm_tokenizer_from_json(json, strlen(json), config, config ? strlen(config) : 0,
                                        "test", &t, &e);
    if (rc)
        print_error("%s: %s\n", e.where, e.what);
    assert_int_equal(rc, 0);
    return t;
}

typedef struct {
    lm_tokenizer *a, *b;
    lm_vocab_model model[3]; /* base/ with a, math/ with b, code/ with a */
} fixture;

static void begin(fixture *f)
{
    f->a = load(json_a, config_a);
    f->b = load(json_b, NULL);
    f->model[0] = (lm_vocab_model){ "base/", f->a, 5 };
    f->model[1] = (lm_vocab_model){ "math/", f->b, 8 }; /* a row more than ids */
    f->model[2] = (lm_vocab_model){ "code/", f->a, 5 };
}

static void end(fixture *f)
{
    lm_tokenizer_free(f->a);
    lm_tokenizer_free(f->b);
}

static int64_t id(const lm_vocab *v, const char *token)
{
    return lm_tokenizer_id(lm_vocab_tokenizer(v), token, strlen(token));
}

static void test_same(void **state)
{
    fixture f;
    lm_vocab *v = NULL;
    lm_err e = { 0 };
    lm_vocab_spec spec = { 0 };
    (void)state;
    begin(&f);
    f.model[1] = (lm_vocab_model){ "math/", f.a, 5 };
    assert_int_equal(lm_vocab_new(&spec, f.model, 3, 0, NULL, &v, &e), 0);
    assert_true(lm_vocab_same(v));
    assert_int_equal(lm_vocab_rows(v), 5);
    assert_int_equal(lm_vocab_owner(v), 0);
    lm_vocab_free(v);
    f.model[1].tok = NULL; /* a model without a tokenizer is accepted if its rows fit */
    assert_int_equal(lm_vocab_new(&spec, f.model, 3, -1, NULL, &v, &e), 0);
    assert_true(lm_vocab_same(v));
    lm_vocab_free(v);
    spec = (lm_vocab_spec){ .policy = LM_VOCAB_MODEL, .model = "code/" };
    assert_int_equal(lm_vocab_new(&spec, f.model, 3, 0, NULL, &v, &e), 0);
    assert_true(lm_vocab_same(v));
    assert_int_equal(lm_vocab_owner(v), 2);
    lm_vocab_free(v);
    end(&f);
}

static void test_strict(void **state)
{
    fixture f;
    lm_vocab *v = NULL;
    lm_err e = { 0 };
    const lm_vocab_spec spec = { 0 };
    (void)state;
    begin(&f);
    assert_int_equal(lm_vocab_new(&spec, f.model, 3, 0, NULL, &v, &e), LM_EUSAGE);
    assert_null(v);
    assert_string_equal(e.where, "math/");
    assert_non_null(strstr(e.what, "has 4 (\"d\", \"bd\", \"abd\", ...) that base/ lacks"));
    assert_non_null(strstr(e.what, "lacks 2 (\"c\", \"<s>\")"));
    assert_non_null(strstr(e.what, "has other ids for 3 (\"b\", \"a\", \"ab\")"));
    assert_non_null(strstr(e.todo, "union"));
    memset(&e, 0, sizeof e);
    f.model[1] = (lm_vocab_model){ "math/", f.a, 8 };
    assert_int_equal(lm_vocab_new(&spec, f.model, 3, 0, NULL, &v, &e), LM_EUSAGE);
    assert_non_null(strstr(e.what, "8 rows, that of base/ 5"));
    end(&f);
}

/* A table whose value at (row, col) of model m is 100 m + row + col / 4. */
static void fill(float *t, int m, int64_t rows)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < 2; c++)
            t[2 * r + c] = (float)(100 * m) + (float)r + (float)c / 4;
}

typedef struct {
    float data[3][16], out[3][32];
    lm_vocab_table t[3];
} tables;

static void run_operands(const lm_vocab *v, const fixture *f, tables *x)
{
    lm_err e = { 0 };
    for (int m = 0; m < 3; m++) {
        fill(x->data[m], m, f->model[m].rows);
        x->t[m] = (lm_vocab_table){ x->data[m], LM_DTYPE_F32, f->model[m].rows };
    }
    for (int m = 0; m < 3; m++)
        assert_int_equal(lm_vocab_operand(v, m, x->t, 2, "model.embed_tokens.weight", LM_DTYPE_F32,
                                          x->out[m], NULL, &e),
                         0);
}

static void test_union(void **state)
{
    fixture f;
    lm_vocab *v = NULL;
    lm_err e = { 0 };
    tables x;
    const lm_vocab_spec spec = { .policy = LM_VOCAB_UNION };
    (void)state;
    begin(&f);
    assert_int_equal(lm_vocab_new(&spec, f.model, 3, 0, NULL, &v, &e), 0);
    assert_false(lm_vocab_same(v));
    assert_int_equal(lm_vocab_owner(v), -1);
    assert_int_equal(lm_vocab_rows(v), 9);
    const char *const order[] = { "a", "b", "c", "ab", "<s>", "d", "bd", "abd", "<t>" };
    for (int i = 0; i < 9; i++)
        assert_int_equal(id(v, order[i]), i);
    assert_true(lm_tokenizer_is_special(lm_vocab_tokenizer(v), 8));

    run_operands(v, &f, &x);
    const float base[] = { 0, 1, 2, 3, 4, 102, 103, 104, 106 };
    const float math[] = { 101, 100, 2, 105, 4, 102, 103, 104, 106 };
    const float code[] = { 200, 201, 202, 203, 204, 102, 103, 104, 106 };
    for (int i = 0; i < 9; i++) {
        assert_true(x.out[0][2 * i] == base[i] && x.out[0][2 * i + 1] == base[i] + 0.25f);
        assert_true(x.out[1][2 * i] == math[i]);
        assert_true(x.out[2][2 * i] == code[i]);
    }
    lm_vocab_free(v);

    /* without a base: c and <s> are the mean of two, a and b each model's own */
    assert_int_equal(lm_vocab_new(&spec, f.model, 3, -1, NULL, &v, &e), 0);
    run_operands(v, &f, &x);
    assert_true(x.out[1][2 * 2] == 102.0f && x.out[1][2 * 4] == 104.0f);
    assert_true(x.out[0][2 * 2] == 2 && x.out[2][2 * 2] == 202);
    lm_vocab_free(v);
    end(&f);
}

/* The united tokenizer applies the merges of both, those of the base first. */
static void test_union_encodes(void **state)
{
    fixture f;
    lm_vocab *v = NULL;
    lm_err e = { 0 };
    lm_tok_scratch *s = NULL;
    lm_ids ids = { 0 };
    const lm_vocab_spec spec = { .policy = LM_VOCAB_UNION };
    (void)state;
    begin(&f);
    assert_int_equal(lm_vocab_new(&spec, f.model, 3, 0, NULL, &v, &e), 0);
    assert_int_equal(lm_tok_scratch_new(lm_vocab_tokenizer(v), &s, &e), 0);
    assert_int_equal(lm_tokenizer_encode(lm_vocab_tokenizer(v), s, "abd<t>bdc", 9, false, &ids, &e),
                     0);
    const uint32_t want[] = { 7, 8, 6, 2 };
    assert_int_equal(ids.n, 4);
    assert_memory_equal(ids.v, want, sizeof want);
    lm_tok_scratch_free(s);
    lm_ids_fini(&ids);

    size_t len;
    const char *config = lm_vocab_config_json(v, &len);
    assert_non_null(strstr(config, "\"8\":{\"content\":\"<t>\""));
    assert_int_equal(lm_tokenizer_bos(lm_vocab_tokenizer(v)), 4);
    lm_vocab_free(v);
    end(&f);
}

static void test_base_and_model(void **state)
{
    fixture f;
    lm_vocab *v = NULL;
    lm_err e = { 0 };
    tables x;
    lm_vocab_spec spec = { .policy = LM_VOCAB_BASE };
    (void)state;
    begin(&f);
    assert_int_equal(lm_vocab_new(&spec, f.model, 3, 0, NULL, &v, &e), 0);
    assert_int_equal(lm_vocab_owner(v), 0);
    assert_int_equal(lm_vocab_rows(v), 5);
    run_operands(v, &f, &x);
    const float math[] = { 101, 100, 2, 105, 4 };
    for (int i = 0; i < 5; i++)
        assert_true(x.out[1][2 * i] == math[i]);
    lm_vocab_free(v);

    spec = (lm_vocab_spec){ .policy = LM_VOCAB_MODEL, .model = "math/", .pad_to = 4 };
    assert_int_equal(lm_vocab_new(&spec, f.model, 3, 0, NULL, &v, &e), 0);
    assert_int_equal(lm_vocab_owner(v), 1);
    assert_int_equal(lm_vocab_rows(v), 8);
    run_operands(v, &f, &x);
    /* b a d bd abd ab <t>, and a row of padding: the mean of the seven */
    const float base[] = { 1, 0, 102, 103, 104, 3, 106 };
    float mean = 0;
    for (int i = 0; i < 7; i++) {
        assert_true(x.out[0][2 * i] == base[i]);
        mean += base[i];
    }
    assert_true(x.out[0][14] - mean / 7 < 1e-5f && mean / 7 - x.out[0][14] < 1e-5f);

    json_t *config = json_pack("{s:i, s:i, s:[i,i], s:n, s:i}", "vocab_size", 5, "bos_token_id", 4,
                               "eos_token_id", 1, 2, "pad_token_id", "hidden_size", 7);
    assert_int_equal(lm_vocab_fix_config(v, 0, config, &e), 0);
    char *text = json_dumps(config, JSON_COMPACT);
    assert_string_equal(text, "{\"vocab_size\":8,\"bos_token_id\":null,\"eos_token_id\":[0],"
                              "\"pad_token_id\":null,\"hidden_size\":7}");
    json_decref(config);
    lm_free(text);
    lm_vocab_free(v);
    end(&f);
}

static void test_rules(void **state)
{
    fixture f;
    lm_vocab *v = NULL;
    lm_err e = { 0 };
    tables x;
    const lm_vocab_rule rules[] = {
        { .token = "c", .from = LM_VOCAB_FROM_ZERO },
        { .token = "a",
          .from = LM_VOCAB_FROM_MODEL,
          .model = "code/",
          .source_id = -1,
          .force = true },
        { .token = "<t>", .from = LM_VOCAB_FROM_MODEL, .model = "base/", .source = "<s>" },
        { .token = "d", .from = LM_VOCAB_FROM_MODEL, .model = "base/", .source_id = 2 },
        { .token = "<new>", .from = LM_VOCAB_FROM_MODEL, .model = "math/", .source_id = 7 },
        { .token = "<zero>" },
    };
    lm_vocab_spec spec = { .policy = LM_VOCAB_UNION, .rules = rules, .n_rules = 6 };
    (void)state;
    begin(&f);
    assert_int_equal(lm_vocab_new(&spec, f.model, 3, 0, NULL, &v, &e), 0);
    assert_int_equal(lm_vocab_rows(v), 11);
    assert_int_equal(id(v, "<new>"), 9);
    run_operands(v, &f, &x);
    const float base[] = { 200, 1, 2, 3, 4, 2, 103, 104, 4, 107, 0 };
    const float math[] = { 200, 100, 0, 105, 4, 102, 103, 104, 106, 107, 0 };
    for (int i = 0; i < 11; i++) {
        assert_true(x.out[0][2 * i] == base[i]);
        assert_true(x.out[1][2 * i] == math[i]);
    }
    lm_vocab_free(v);

    const lm_vocab_rule bad[] = {
        { .token = "a", .from = LM_VOCAB_FROM_MODEL, .model = "other/", .source_id = -1 },
        { .token = "a", .from = LM_VOCAB_FROM_MODEL, .model = "math/", .source = "c" },
        { .token = "a", .from = LM_VOCAB_FROM_MODEL, .model = "math/", .source_id = 8 },
    };
    for (int i = 0; i < 3; i++) {
        memset(&e, 0, sizeof e);
        spec = (lm_vocab_spec){ .policy = LM_VOCAB_UNION, .rules = &bad[i], .n_rules = 1 };
        assert_int_equal(lm_vocab_new(&spec, f.model, 3, 0, NULL, &v, &e), LM_EUSAGE);
        assert_null(v);
    }
    end(&f);
}

static void test_refused(void **state)
{
    fixture f;
    lm_vocab *v = NULL;
    lm_err e = { 0 };
    lm_vocab_spec spec = { .policy = LM_VOCAB_BASE };
    (void)state;
    begin(&f);
    assert_int_equal(lm_vocab_new(&spec, f.model, 3, -1, NULL, &v, &e), LM_EUSAGE);
    memset(&e, 0, sizeof e);
    spec = (lm_vocab_spec){ .policy = LM_VOCAB_MODEL, .model = "physics/" };
    assert_int_equal(lm_vocab_new(&spec, f.model, 3, 0, NULL, &v, &e), LM_EUSAGE);
    memset(&e, 0, sizeof e);
    spec = (lm_vocab_spec){ .policy = LM_VOCAB_UNION };
    f.model[2].tok = NULL;
    assert_int_equal(lm_vocab_new(&spec, f.model, 3, 0, NULL, &v, &e), LM_EUSAGE);
    assert_string_equal(e.where, "code/");
    memset(&e, 0, sizeof e);
    f.model[2].tok = f.a;
    f.model[1].rows = 6; /* fewer than ids */
    assert_int_equal(lm_vocab_new(&spec, f.model, 3, 0, NULL, &v, &e), LM_EFORMAT);
    assert_string_equal(e.where, "math/");

    /* another kind of tokenizer */
    memset(&e, 0, sizeof e);
    char text[sizeof json_b + 40];
    const char *cut = strstr(json_b, "\"vocab\"");
    snprintf(text, sizeof text, "%.*s\"byte_fallback\":true,%s", (int)(cut - json_b), json_b, cut);
    lm_tokenizer *other = load(text, NULL);
    f.model[1] = (lm_vocab_model){ "math/", other, 8 };
    assert_int_equal(lm_vocab_new(&spec, f.model, 3, 0, NULL, &v, &e), LM_EUSAGE);
    assert_non_null(strstr(e.what, "byte-fallback"));
    lm_tokenizer_free(other);
    end(&f);
}

/* Own rows are carried bit for bit in every type, on any number of threads. */
static void test_types(void **state)
{
    fixture f;
    lm_vocab *v = NULL;
    lm_err e = { 0 };
    lm_par *par = NULL;
    const lm_vocab_spec spec = { .policy = LM_VOCAB_UNION, .pad_to = 64 };
    uint16_t half[3][8], one[64], four[64];
    (void)state;
    begin(&f);
    assert_int_equal(lm_par_new(&par, 4, &e), 0);
    assert_int_equal(lm_vocab_new(&spec, f.model, 3, -1, NULL, &v, &e), 0);
    assert_int_equal(lm_vocab_rows(v), 64);
    lm_vocab_table t[3];
    for (int m = 0; m < 3; m++) {
        for (int r = 0; r < 8; r++)
            half[m][r] = lm_f32_to_bf16((float)(m * 10 + r) * 0.37f);
        t[m] = (lm_vocab_table){ half[m], LM_DTYPE_BF16, f.model[m].rows };
    }
    assert_int_equal(lm_vocab_operand(v, 1, t, 1, "lm_head.bias", LM_DTYPE_BF16, one, NULL, &e), 0);
    assert_int_equal(lm_vocab_operand(v, 1, t, 1, "lm_head.bias", LM_DTYPE_BF16, four, par, &e), 0);
    assert_memory_equal(one, four, sizeof one);
    assert_int_equal(one[0], half[1][1]);
    assert_int_equal(one[1], half[1][0]);
    assert_int_equal(
        one[2],
        lm_f64_to_bf16((lm_bf16_to_f32(half[0][2]) + (double)lm_bf16_to_f32(half[2][2])) / 2));
    t[1].rows = 7;
    assert_int_equal(lm_vocab_operand(v, 1, t, 1, "lm_head.bias", LM_DTYPE_BF16, one, NULL, &e),
                     LM_EFORMAT);
    lm_vocab_free(v);
    lm_par_free(par);
    end(&f);
}

static void test_tables(void **state)
{
    (void)state;
    assert_true(lm_vocab_is_table("model.embed_tokens.weight"));
    assert_true(lm_vocab_is_table("lm_head.weight"));
    assert_true(lm_vocab_is_table("transformer.wte.weight"));
    assert_true(lm_vocab_is_table("wte.weight"));
    assert_true(lm_vocab_is_table("cls.predictions.bias"));
    assert_false(lm_vocab_is_table("cls.predictions.transform.dense.bias"));
    assert_false(lm_vocab_is_table("transformer.wpe.weight"));
    assert_false(lm_vocab_is_table("my_lm_head.weight"));
    assert_false(lm_vocab_is_table("model.norm.weight"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same),           cmocka_unit_test(test_strict),
        cmocka_unit_test(test_union),          cmocka_unit_test(test_union_encodes),
        cmocka_unit_test(test_base_and_model), cmocka_unit_test(test_rules),
        cmocka_unit_test(test_refused),        cmocka_unit_test(test_types),
        cmocka_unit_test(test_tables),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
