/* SPDX-License-Identifier: Apache-2.0 */
/* What cache files say about a model: rotary settings as text that is equal for equal angles. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "model/cache_about.h"

enum { POSITIONS = 3000, MOST = POSITIONS * 16 };

/* A small model with members added. */
static void read_config(const char *base, const char *more, lm_config *c)
{
    char text[1000];
    lm_err e = { 0 };
    json_t *o;
    snprintf(
        text, sizeof text,
        "{\"model_type\":\"%s\",\"vocab_size\":100,\"hidden_size\":64,\"intermediate_size\":96,"
        "\"num_hidden_layers\":3,\"num_attention_heads\":4,\"num_key_value_heads\":2,"
        "\"max_position_embeddings\":2048%s}",
        base, more);
    assert_int_equal(lm_json_parse(text, strlen(text), "config", &o, &e), LM_OK);
    if (lm_config_read(o, "config.json", c, &e))
        fail_msg("%s: %s: %s", more, e.where, e.what);
    json_decref(o);
}

static char *text_of(const lm_config *c, int64_t positions)
{
    lm_buf b = { 0 };
    lm_err e = { 0 };
    json_t *tree;
    assert_int_equal(lm_rope_text(c, positions, &b, &e), LM_OK);
    assert_int_equal(lm_json_parse(b.data, b.len, "rope", &tree, &e), LM_OK);
    json_decref(tree);
    return b.data;
}

static const char *const settings[] = {
    "",
    ",\"rope_theta\":500000.0",
    ",\"rope_scaling\":{\"rope_type\":\"linear\",\"factor\":2.0}",
    ",\"rope_scaling\":{\"rope_type\":\"linear\",\"factor\":4.0}",
    ",\"rope_scaling\":{\"rope_type\":\"dynamic\",\"factor\":2.0}",
    ",\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8.0,\"low_freq_factor\":1.0,"
    "\"high_freq_factor\":4.0,\"original_max_position_embeddings\":1024}",
    ",\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8.0,\"low_freq_factor\":1.0,"
    "\"high_freq_factor\":4.0,\"original_max_position_embeddings\":512}",
    ",\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":4.0,\"original_max_position_embeddings\":"
    "512}",
    ",\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":4.0,\"original_max_position_embeddings\":"
    "512,"
    "\"attention_factor\":1.5}",
    ",\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":4.0,\"original_max_position_embeddings\":"
    "512,"
    "\"beta_fast\":16}",
};
enum { SETTINGS = sizeof settings / sizeof *settings };

/* Texts are equal exactly if all angles are. */
static void test_rope_text(void **state)
{
    static float table[SETTINGS][MOST];
    char *text[SETTINGS];
    (void)state;
    for (int i = 0; i < SETTINGS; i++) {
        lm_config c;
        read_config("llama", settings[i], &c);
        assert_int_equal(c.rope[0].dim, 16);
        text[i] = text_of(&c, POSITIONS);
        lm_rope_table(&c, 0, POSITIONS, table[i]);
        lm_config_fini(&c);
    }
    for (int i = 0; i < SETTINGS; i++)
        for (int j = 0; j < SETTINGS; j++)
            assert_int_equal(!strcmp(text[i], text[j]),
                             !memcmp(table[i], table[j], sizeof table[i]));
    for (int i = 0; i < SETTINGS; i++)
        lm_free(text[i]);
}

/* The dynamic type: the context counts beyond the trained positions, and only there. */
static void test_dynamic(void **state)
{
    lm_config c;
    (void)state;
    read_config("llama", settings[4], &c);
    char *a = text_of(&c, 100), *b = text_of(&c, 2048), *d = text_of(&c, 4096);
    assert_string_equal(a, b);
    assert_string_not_equal(b, d);
    lm_free(a), lm_free(b), lm_free(d);
    lm_config_fini(&c);
    read_config("llama", "", &c);
    a = text_of(&c, 100), b = text_of(&c, 4096);
    assert_string_equal(a, b);
    assert_string_equal(a, "{\"tables\":[{\"type\":\"default\",\"dim\":16,\"theta\":10000}],"
                           "\"layers\":[0,0,0]}");
    lm_free(a), lm_free(b);
    lm_config_fini(&c);
}

static void test_about(void **state)
{
    static const uint8_t weights[16] = { 1, 2, 0xab };
    lm_cache_about a;
    lm_config c;
    lm_err e = { 0 };
    (void)state;
    read_config("llama", "", &c);
    assert_int_equal(lm_cache_about_model(&c, weights, 2048, LM_DTYPE_BF16, &a, &e), LM_OK);
    assert_string_equal(a.about.model_type, "llama");
    assert_string_equal(a.about.weights, "0102ab00000000000000000000000000");
    assert_int_equal(a.about.layers, 3);
    assert_int_equal(a.about.kv_heads[2], 2);
    assert_int_equal(a.about.head_dim[2], 16);
    assert_int_equal(a.about.act, LM_DTYPE_BF16);
    assert_non_null(strstr(a.about.rope, "\"theta\":10000"));
    lm_cache_about_fini(&a);
    lm_config_fini(&c);
}

/* Each setting that determines what is computed changes the digest; the others do not. */
static void test_config_digest(void **state)
{
    char digest[24][33];
    int n = 0;
    lm_config c;
    lm_err e = { 0 };
    (void)state;
    read_config("gemma2", ",\"head_dim\":16", &c);
    assert_int_equal(lm_config_digest(&c, digest[n++], &e), 0);
#define CHANGED(member, value)                                          \
    do {                                                                \
        const lm_config kept = c;                                       \
        const lm_layer layer = c.layer[1];                              \
        c.member = (value);                                             \
        assert_int_equal(lm_config_digest(&c, digest[n++], &e), LM_OK); \
        c = kept, c.layer[1] = layer;                                   \
    } while (0)
    CHANGED(norm_eps, 0.5);
    CHANGED(norm_plus_one, !c.norm_plus_one);
    CHANGED(norm, (lm_norm_kind)!c.norm);
    CHANGED(vocab, 101);
    CHANGED(width, 128);
    CHANGED(embed_scale, 3);
    CHANGED(logit_cap, 10);
    CHANGED(rope[0].theta, 5e5);
    CHANGED(rope[0].dim, 8);
    CHANGED(layer[1].heads, 8);
    CHANGED(layer[1].kv_heads, 1);
    CHANGED(layer[1].head_dim, 32);
    CHANGED(layer[1].window, 32);
    CHANGED(layer[1].scale, 0.25);
    CHANGED(layer[1].soft_cap, 20);
    CHANGED(layer[1].rope, -1);
    CHANGED(layer[1].qk_norm, LM_QK_NORM_HEAD);
    CHANGED(layer[1].qkv_bias, true);
    CHANGED(layer[1].mlp, LM_MLP_SWIGLU);
    CHANGED(layer[1].norm_after, !c.layer[1].norm_after);
    for (int i = 0; i < n; i++)
        for (int j = 0; j < i; j++)
            if (!strcmp(digest[i], digest[j]))
                fail_msg("changes %d and %d have one digest", i, j);
    CHANGED(max_positions, 9000);
    CHANGED(bos, 3);
    CHANGED(init_std, 1);
    for (int i = n - 3; i < n; i++)
        assert_string_equal(digest[0], digest[i]);
    lm_config_fini(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rope_text),
        cmocka_unit_test(test_dynamic),
        cmocka_unit_test(test_about),
        cmocka_unit_test(test_config_digest),
    };
    return cmocka_run_group_tests_name("model_cache", tests, NULL, NULL);
}
