/* SPDX-License-Identifier: Apache-2.0 */
/* Recipes of merges: operands, parameters, mergekit's YAML; every key that is not known is an error
 * with its line, and hostile YAML ends early. */
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
#include "merge/recipe.h"
#include "merge/yaml.h"

/* ---- YAML ---- */

static lm_arena *arena;

static int open_arena(void **state)
{
    lm_err e = { 0 };
    (void)state;
    return lm_arena_new(&arena, 1 << 16, &e);
}

static int close_arena(void **state)
{
    (void)state;
    lm_arena_free(arena);
    return 0;
}

static const lm_yaml *yaml(const char *text)
{
    const lm_yaml *y = NULL;
    lm_err e = { 0 };

    if (lm_yaml_parse(text, strlen(text), "t.yaml", arena, &y, &e))
        fail_msg("%s: %s", e.where, e.what);
    return y;
}

static void no_yaml(const char *text, const char *what)
{
    const lm_yaml *y = NULL;
    lm_err e = { 0 };

    assert_int_equal(lm_yaml_parse(text, strlen(text), "t.yaml", arena, &y, &e), LM_EUSAGE);
    assert_null(y);
    assert_string_equal(e.where, "t.yaml");
    if (!strstr(e.what, what))
        fail_msg("'%s' is not in '%s'", what, e.what);
}

static void trees(void **state)
{
    const lm_yaml *y = yaml("a: 1\nb: [x, 'y z', {c: 2e-3}]\nd:\n  - ~\n  - yes\n  - '1'\n"), *d;
    double v = 0;
    int64_t n = 0;
    bool truth = false;

    (void)state;
    assert_int_equal(y->kind, LM_YAML_MAP);
    assert_int_equal(y->n, 3);
    assert_true(lm_yaml_integer(lm_yaml_get(y, "a"), &n));
    assert_int_equal(n, 1);
    assert_int_equal(lm_yaml_get(y, "b")->n, 3);
    assert_string_equal(lm_yaml_get(y, "b")->item[1]->text, "y z");
    assert_true(lm_yaml_number(lm_yaml_get(lm_yaml_get(y, "b")->item[2], "c"), &v));
    assert_true(v == 2e-3);
    d = lm_yaml_get(y, "d");
    assert_true(lm_yaml_is_null(d->item[0]));
    assert_true(lm_yaml_truth(d->item[1], &truth) && truth);
    assert_false(lm_yaml_truth(d->item[2], &truth));
    assert_int_equal(d->item[2]->line, 6);
    assert_int_equal(y->key_line[2], 3);
    assert_null(lm_yaml_get(y, "z"));
    assert_true(lm_yaml_is_null(yaml("")));
    y = yaml("a: &x {k: 1}\nb: *x\n");
    assert_ptr_equal(lm_yaml_get(y, "a"), lm_yaml_get(y, "b"));
}

static const char *text_at(const lm_yaml *map, const char *key)
{
    const lm_yaml *y = lm_yaml_get(map, key);

    assert_non_null(y);
    return y->text;
}

static void merge_keys(void **state)
{
    const lm_yaml *y = yaml("a: &a {k: 1, l: 2}\n"
                            "b: &b {l: 3, m: 4}\n"
                            "one: {<<: *a, k: 5}\n"
                            "two: {l: 6, <<: [*a, *b]}\n"
                            "own: {<<: {k: 7}}\n"
                            "more: &c\n"
                            "  <<: *b\n"
                            "  k: 8\n"
                            "last: {<<: *c}\n"
                            "text: {'<<': *a}\n"),
                  *of;

    (void)state;
    of = lm_yaml_get(y, "one");
    assert_int_equal(of->n, 2);
    assert_string_equal(text_at(of, "k"), "5");
    assert_string_equal(text_at(of, "l"), "2");
    of = lm_yaml_get(y, "two");
    assert_int_equal(of->n, 3);
    assert_string_equal(text_at(of, "k"), "1");
    assert_string_equal(text_at(of, "l"), "6");
    assert_string_equal(text_at(of, "m"), "4");
    assert_int_equal(of->key_line[2], 2);
    assert_string_equal(text_at(lm_yaml_get(y, "own"), "k"), "7");
    of = lm_yaml_get(y, "last");
    assert_int_equal(of->n, 3);
    assert_string_equal(text_at(of, "k"), "8");
    assert_string_equal(text_at(of, "l"), "3");
    assert_int_equal(lm_yaml_get(lm_yaml_get(y, "text"), "<<")->kind, LM_YAML_MAP); /* quoted */
}

static void bad_yaml(void **state)
{
    char deep[200] = "", *p = deep;

    (void)state;
    no_yaml("a: [1, 2\nb: 3", "not YAML");
    no_yaml("a: 1\nb: 2\na: 3", "line 3: key 'a' exists already, in line 1");
    no_yaml("a: *nobody", "alias 'nobody' has no anchor");
    no_yaml("a: &x [*x]", "alias 'x' has no anchor");
    no_yaml("<<: 1", "the value of '<<' is a mapping");
    no_yaml("a: {b: 1}\nc: {<<: [x]}", "line 2: the value of '<<' is a mapping");
    no_yaml("<<: {a: 1}\n<<: {b: 1}", "'<<' occurs twice");
    no_yaml("a: &a {<<: *a}", "alias 'a' has no anchor");
    no_yaml("a: !!python/object:os.system x", "tags");
    no_yaml("[a]: 1", "a key must be");
    no_yaml("a: 1\n---\nb: 2", "a second document");
    no_yaml("a: \"x\\0y\"", "NUL");
    for (int i = 0; i < 64; i++)
        *p++ = '[';
    *p = 0;
    no_yaml(deep, "nested too deeply");
}

static void bomb(void **state)
{
    char text[4096];
    int n = snprintf(text, sizeof text, "a0: &a0 [x,x,x,x,x,x,x,x,x]\n");

    (void)state;
    for (int i = 1; i < 12; i++)
        n += snprintf(text + n, sizeof text - (size_t)n,
                      "a%d: &a%d [*a%d,*a%d,*a%d,*a%d,*a%d,*a%d,*a%d,*a%d,*a%d]\n", i, i, i - 1,
                      i - 1, i - 1, i - 1, i - 1, i - 1, i - 1, i - 1, i - 1);
    no_yaml(text, "more than 100000 nodes");
    n = snprintf(text, sizeof text, "a0: &a0 [x]\n"); /* deep by aliases alone */
    for (int i = 1; i < 60; i++)
        n += snprintf(text + n, sizeof text - (size_t)n, "a%d: &a%d [*a%d]\n", i, i, i - 1);
    no_yaml(text, "nested too deeply");
    n = snprintf(text, sizeof text, "a0: &a0 {k: [x,x,x,x,x,x,x,x,x]}\n"); /* by merge keys */
    for (int i = 1; i < 20; i++)
        n += snprintf(text + n, sizeof text - (size_t)n,
                      "a%d: &a%d {<<: *a%d, l%d: *a%d, m%d: *a%d, n%d: *a%d}\n", i, i, i - 1, i,
                      i - 1, i, i - 1, i, i - 1);
    no_yaml(text, "more than 100000 nodes");
}

/* ---- Operands ---- */

static lm_merge_recipe *begin(const char *method)
{
    lm_merge_recipe *r = NULL;
    lm_err e = { 0 };

    assert_int_equal(lm_merge_recipe_new(method, &r, &e), LM_OK);
    return r;
}

static double at(const lm_merge_recipe *r, int source, lm_merge_param p, const char *name, double u)
{
    return lm_merge_value_at(&r->slice[0].source[source].set.param[p], p, name, u);
}

static void operands(void **state)
{
    lm_merge_recipe *r = begin("ties");
    lm_err e = { 0 };
    char dir[] = "/tmp/lm:0.5-XXXXXX";

    (void)state;
    assert_non_null(mkdtemp(dir));
    assert_int_equal(lm_merge_recipe_base(r, "b", &e), LM_OK);
    assert_int_equal(lm_merge_recipe_model(r, "m1", &e), LM_OK);
    assert_int_equal(lm_merge_recipe_model(r, "m2:0.4", &e), LM_OK);
    assert_int_equal(lm_merge_recipe_model(r, "s3:c:d:weight=-1e-1,density=0,0.5,1", &e), LM_OK);
    assert_int_equal(lm_merge_recipe_model(r, dir, &e), LM_OK);
    assert_int_equal(lm_merge_recipe_model(r, "m5+lora:weight=2", &e), LM_OK);
    assert_int_equal(lm_merge_recipe_check(r, &e), LM_OK);
    assert_int_equal(r->n_inputs, 6);
    assert_int_equal(lm_merge_recipe_models(r), 5);
    assert_string_equal(r->input[3].path, "s3:c:d");
    assert_string_equal(r->input[4].path, dir);
    assert_string_equal(r->input[5].path, "m5");
    assert_string_equal(r->input[5].lora, "lora");
    assert_true(isnan(at(r, 0, LM_MERGE_WEIGHT, "x", 0)));
    assert_true(lm_merge_recipe_default(r, LM_MERGE_WEIGHT) == 1);
    assert_true(at(r, 1, LM_MERGE_WEIGHT, "x", 0) == 0.4);
    assert_true(at(r, 2, LM_MERGE_WEIGHT, "x", 0) == -0.1);
    assert_true(at(r, 2, LM_MERGE_DENSITY, "x", 0.25) == 0.25);
    assert_true(at(r, 2, LM_MERGE_DENSITY, "x", 1) == 1);
    assert_int_equal(lm_merge_recipe_weight(r, 2, 7, &e), LM_OK);
    assert_true(at(r, 1, LM_MERGE_WEIGHT, "x", 0) == 7);
    rmdir(dir);
    lm_merge_recipe_free(r);
}

static void no_operand(const char *method, const char *operand, const char *what)
{
    lm_merge_recipe *r = begin(method);
    lm_err e = { 0 };

    assert_int_equal(lm_merge_recipe_model(r, operand, &e), LM_EUSAGE);
    assert_string_equal(e.where, operand);
    if (!strstr(e.what, what))
        fail_msg("'%s' is not in '%s'", what, e.what);
    lm_merge_recipe_free(r);
}

static void bad_operands(void **state)
{
    lm_merge_recipe *r;
    lm_err e = { 0 };

    (void)state;
    no_operand("ties", "a:wieght=1", "unknown parameter 'wieght'");
    no_operand("ties", "a:weight=x", "'x' is not a number");
    no_operand("ties", "a:density=1.5", "1.5 is out of range");
    no_operand("ties", "a:weight=", "a value is missing");
    no_operand("ties", "a:lambda=1", "lambda is not a parameter of a single model");
    no_operand("linear", "a:density=0.5", "method linear has no parameter 'density'");
    no_operand("slerp", "a:0.4", "method slerp has no parameter 'weight'");
    assert_int_equal(lm_merge_recipe_new("tis", &r, &e), LM_EUSAGE);
    assert_null(r);
}

static void no_check(const char *method, const char *base, int models, const char *what)
{
    static const char *const names[] = { "a", "b", "c" };
    lm_merge_recipe *r = begin(method);
    lm_err e = { 0 };

    if (base)
        assert_int_equal(lm_merge_recipe_base(r, base, &e), LM_OK);
    for (int i = 0; i < models; i++)
        assert_int_equal(lm_merge_recipe_model(r, names[i], &e), LM_OK);
    assert_int_equal(lm_merge_recipe_check(r, &e), LM_EUSAGE);
    if (!strstr(e.what, what))
        fail_msg("'%s' is not in '%s'", what, e.what);
    lm_merge_recipe_free(r);
}

static void checks(void **state)
{
    (void)state;
    no_check("ties", NULL, 2, "method ties needs a base model");
    no_check("linear", "z", 2, "method linear has no base");
    no_check("passthrough", NULL, 2, "method passthrough merges 1 model, 2 given");
    no_check("linear", NULL, 0, "method linear needs at least 1 model, 0 given");
    no_check("slerp", "z", 1, "method slerp needs a value for t");
}

/* ---- mergekit's YAML ---- */

static const char slices[] = "merge_method: slerp\n"
                             "base_model: a\n"
                             "slices:\n"
                             "  - sources:\n"
                             "      - {model: a, layer_range: [0, 4]}\n"
                             "      - {model: b, layer_range: [0, 4]}\n"
                             "  - sources:\n"
                             "      - {model: a, layer_range: [4, 6]}\n"
                             "      - {model: b, layer_range: [2, 4]}\n"
                             "    parameters: {t: 0.9}\n"
                             "parameters:\n"
                             "  t:\n"
                             "    - filter: self_attn\n"
                             "      value: [0, 0.5, 1]\n"
                             "    - value: 0.25\n"
                             "dtype: bfloat16\n";

static lm_merge_recipe *parse(const char *text)
{
    lm_merge_recipe *r = NULL;
    lm_err e = { 0 };

    if (lm_merge_recipe_parse(text, strlen(text), "m.yaml", &r, &e))
        fail_msg("%s: %s", e.where, e.what);
    return r;
}

static void yaml_slices(void **state)
{
    lm_merge_recipe *r = parse(slices);
    const lm_merge_value *t = &r->set.param[LM_MERGE_T];

    (void)state;
    assert_true(r->sliced && r->mergekit);
    assert_int_equal(r->n_slices, 2);
    assert_int_equal(r->n_inputs, 2);
    assert_int_equal(r->base, 0);
    assert_int_equal(r->dtype, LM_DTYPE_BF16);
    assert_int_equal(r->slice[1].source[1].from, 2);
    assert_int_equal(r->slice[1].source[1].to, 4);
    assert_true(lm_merge_value_at(t, LM_MERGE_T, "model.layers.0.self_attn.q", 0.25) == 0.25);
    assert_true(lm_merge_value_at(t, LM_MERGE_T, "model.layers.0.self_attn.q", 0.5) == 0.5);
    assert_true(lm_merge_value_at(t, LM_MERGE_T, "model.layers.0.mlp.up", 0.5) == 0.25);
    assert_true(lm_merge_value_at(&r->slice[1].set.param[LM_MERGE_T], LM_MERGE_T, "x", 0) == 0.9);
    lm_merge_recipe_free(r);
}

static void yaml_models(void **state)
{
    lm_merge_recipe *r = parse("merge_method: dare_ties\n"
                               "base_model: base\n"
                               "models:\n"
                               "  - model: base\n"
                               "  - model: a+lora\n"
                               "    parameters: {weight: [0, 1], density: 0.5}\n"
                               "  - model: {model: {path: b}, lora: {path: l}}\n"
                               "    parameters: {weight: 0.3}\n"
                               "parameters: {density: 0.7, int8_mask: true, normalize: yes}\n"
                               "tokenizer:\n"
                               "  source: union\n"
                               "  pad_to_multiple_of: 64\n"
                               "  tokens:\n"
                               "    <x>: {source: a+lora, force: true}\n"
                               "    <y>: {source: {kind: zero}}\n"
                               "    <z>: {source: {kind: model_token, model: base, token_id: 7}}\n"
                               "chat_template: chatml\n"
                               "out_dtype: float16\n");
    lm_buf text = { 0 };
    lm_err e = { 0 };

    (void)state;
    assert_int_equal(r->n_inputs, 3);
    assert_int_equal(lm_merge_recipe_models(r), 2);
    assert_int_equal(lm_merge_recipe_nth(r, 1), 2);
    assert_string_equal(r->input[1].lora, "lora");
    assert_string_equal(r->input[2].path, "b");
    assert_string_equal(r->input[2].lora, "l");
    assert_true(lm_merge_recipe_default(r, LM_MERGE_RESCALE) == LM_RESCALE_L1);
    assert_true(isnan(lm_merge_recipe_default(r, LM_MERGE_WEIGHT)));
    assert_int_equal(r->out_dtype, LM_DTYPE_F16);
    assert_int_equal(r->vocab.policy, LM_VOCAB_UNION);
    assert_int_equal(r->vocab.pad_to, 64);
    assert_int_equal(r->vocab.n_rules, 3);
    assert_int_equal(r->vocab.rules[0].from, LM_VOCAB_FROM_MODEL);
    assert_true(r->vocab.rules[0].force);
    assert_int_equal(r->vocab.rules[0].source_id, -1);
    assert_int_equal(r->vocab.rules[1].from, LM_VOCAB_FROM_ZERO);
    assert_int_equal(r->vocab.rules[2].source_id, 7);
    assert_string_equal(r->chat_template, "chatml");
    assert_int_equal(lm_merge_recipe_json(r, false, &text, &e), LM_OK);
    assert_non_null(strstr(text.data, "\"method\":\"dare_ties\",\"base\":\"base\""));
    assert_non_null(strstr(text.data, "\"weight\":[0,1]"));
    assert_non_null(strstr(text.data, "\"rescale\":\"l1\""));
    lm_buf_fini(&text);
    lm_merge_recipe_free(r);
}

static void yaml_rescale(void **state)
{
    lm_merge_recipe *r = parse("merge_method: dare_linear\nbase_model: z\n"
                               "models: [{model: a, parameters: {weight: 1}}]\n"
                               "parameters: {rescale: false}\n");

    (void)state;
    assert_true(lm_merge_value_at(&r->set.param[LM_MERGE_RESCALE], LM_MERGE_RESCALE, "x", 0) ==
                LM_RESCALE_NONE);
    lm_merge_recipe_free(r);
}

static void no_recipe(const char *text, const char *message)
{
    lm_merge_recipe *r = NULL;
    lm_err e = { 0 };
    char all[sizeof e];

    assert_int_equal(lm_merge_recipe_parse(text, strlen(text), "m.yaml", &r, &e), LM_EUSAGE);
    assert_null(r);
    snprintf(all, sizeof all, "%s: %s: %s", e.where, e.what, e.todo);
    if (strncmp(all, "m.yaml", 6) != 0 || !strstr(all, message))
        fail_msg("'%s' is not in '%s'", message, all);
}

#define TWO "models: [{model: a, parameters: {weight: 1}}, {model: b, parameters: {weight: 1}}]\n"

static void bad_recipes(void **state)
{
    (void)state;
    no_recipe("", "a mapping of keys to values");
    no_recipe("[1, 2]", "a mapping of keys to values");
    no_recipe(TWO, "merge_method: the name of a method");
    no_recipe("merge_method: tis\n" TWO, "no such merge method");
    no_recipe("merge_method: linear\nbase_modle: a\n" TWO,
              "line 2: unknown key 'base_modle' in the file: did you mean 'base_model'?");
    no_recipe("merge_method: linear\n",
              "exactly one of models:, slices: and modules: is needed, 0 are given");
    no_recipe("merge_method: linear\nmodules: {x: 1}\n",
              "x: a mapping of keys to values is needed");
    no_recipe("merge_method: linear\nmodels:\n  - model: a\n    paramters: {weight: 1}\n",
              "line 4: unknown key 'paramters' in models");
    no_recipe("merge_method: linear\nmodels:\n  - model: a\n    parameters: {wieght: 1}\n",
              "line 4: unknown parameter 'wieght'");
    no_recipe("merge_method: linear\nmodels: [{model: a}]\n", "needs a value for weight");
    no_recipe("merge_method: linear\nmodels: [{model: a, parameters: {weight: [1, x]}}]\n",
              "'x' is not a number");
    no_recipe("merge_method: linear\nmodels: [{model: a, parameters: {weight: []}}]\n",
              "a list of 1 to 4096 numbers");
    no_recipe("merge_method: linear\n" TWO "parameters: {normalize: 3}\n", "'3' is neither");
    no_recipe("merge_method: linear\n" TWO "parameters: {weight: [{fitler: x, value: 1}]}\n",
              "unknown key 'fitler'");
    no_recipe("merge_method: linear\n" TWO "dtype: float33\n", "line 3: dtype: float32");
    no_recipe("merge_method: linear\n" TWO "tokenizer: {source: union}\ntokenizer_source: base\n",
              "only one of it and tokenizer");
    no_recipe("merge_method: linear\n" TWO "tokenizer: {tokens: {x: {source: {kind: one}}}}\n",
              "zero or model_token");
    no_recipe(
        "merge_method: passthrough\nslices:\n  - sources: [{model: a, layer_range: [3, 3]}]\n",
        "[3, 3] is not a range of layers");
    no_recipe("merge_method: passthrough\nslices:\n  - sources: [{model: a}]\n",
              "layer_range: a range of layers");
    no_recipe(
        "merge_method: linear\nslices:\n  - sources: [{model: a, layer_range: [0, 3], "
        "parameters: {weight: 1}}, {model: b, layer_range: [0, 2], parameters: {weight: 1}}]\n",
        "2 layers, but 3 of a in the same slice");
    no_recipe("merge_method: ties\n" TWO, "method ties needs a base model");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(trees),        cmocka_unit_test(bad_yaml),
        cmocka_unit_test(merge_keys),   cmocka_unit_test(bad_yaml),
        cmocka_unit_test(bomb),         cmocka_unit_test(operands),
        cmocka_unit_test(bad_operands), cmocka_unit_test(checks),
        cmocka_unit_test(yaml_slices),  cmocka_unit_test(yaml_models),
        cmocka_unit_test(yaml_rescale), cmocka_unit_test(bad_recipes),
    };
    return cmocka_run_group_tests(tests, open_arena, close_arena);
}
