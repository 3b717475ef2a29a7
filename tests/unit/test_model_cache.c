/* SPDX-License-Identifier: Apache-2.0 */
/* What cache files say about a model: rotary settings as text that is equal for equal angles. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "model/cache_about.h"
#include "model/cache_rope.h"

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

/* Keys of a cache rotated by the settings that it names, against the model's own tables; and back. */
static void test_rotation(void **state)
{
    enum { T = 5, K = 2, D = 16, N = K * T * D };
    static const int64_t heads[3] = { K, K, K }, width[3] = { D, D, D };
    static const int32_t at[T] = { 0, 1, 700, 701, 2900 };
    static float table[MOST];
    static lm_kv_format code = {
        .name = "f", .bits = 8, .levels = LM_KV_ASYM, .scale = LM_DTYPE_F32, .group = 16
    };
    (void)state;
    for (int i = 0; i < SETTINGS; i++) {
        lm_config c;
        lm_err e = { 0 };
        lm_kv_image *m, *before, *after;
        lm_kv_side side[6] = { { .plain = LM_DTYPE_F32, .outliers = -1 } };
        read_config("llama", settings[i], &c);
        char *text = text_of(&c, POSITIONS);
        for (int p = 0; p < 6; p++)
            side[p] = (lm_kv_side){ .plain = LM_DTYPE_F32, .outliers = -1 };
        side[2] = (lm_kv_side){ .format = &code, .pre_rope = true, .outliers = -1, .sinks = T };
        const lm_kv_about a = { .model_type = "llama",
                                .weights = "",
                                .config = "",
                                .rope = text,
                                .layers = 3,
                                .tokens = T,
                                .kv_heads = heads,
                                .head_dim = width,
                                .act = LM_DTYPE_F32 };
        const lm_kv_plan plan = { .layers = 3, .page = 64, .side = side, .text = "f" };
        assert_int_equal(lm_kv_image_new(&a, &m, &e), LM_OK);
        memcpy(m->content.positions, at, sizeof at);
        float *x = m->content.part[2].data[LM_KV_PLAIN];
        for (int k = 0; k < N; k++)
            x[k] = (float)((k * 37 + 11) % 101) / 50 - 1;
        if (lm_cache_convert(m, &plan, lm_cpu_detect(), NULL, &before, &e) ||
            lm_cache_convert(before, NULL, lm_cpu_detect(), NULL, &after, &e))
            fail_msg("%s: %s: %s", settings[i], e.where, e.what);
        lm_rope_table(&c, 0, POSITIONS, table);
        const float *y = before->content.part[2].data[LM_KV_FIRST];
        const float *z = after->content.part[2].data[LM_KV_PLAIN];
        for (int k = 0; k < N; k++) { /* the rotation of y is x */
            const float *row = table + at[k / D % T] * D;
            int d = k % D, j = d % (D / 2), o = k - d + j;
            double u = (double)y[o], v = (double)y[o + D / 2], cs = (double)row[j],
                   sn = (double)row[D / 2 + j];
            double want = d < D / 2 ? cs * u - sn * v : sn * u + cs * v;
            assert_true(fabs(want - (double)x[k]) < 1e-6);
            assert_true(fabs((double)z[k] - (double)x[k]) < 1e-6);
        }
        assert_true(memcmp(y, x, N * sizeof *x) != 0);
        lm_kv_image_free(m), lm_kv_image_free(before), lm_kv_image_free(after);
        lm_free(text);
        lm_config_fini(&c);
    }
}

/* Settings of a file that cannot be used. */
static void test_bad_rotation(void **state)
{
    static const char *const bad[] = {
        "[",
        "{\"tables\":[{}],\"layers\":[0]}",
        "{\"tables\":[{\"type\":\"default\",\"dim\":32,\"theta\":10}],\"layers\":[0]}",
        "{\"tables\":[{\"type\":\"default\",\"dim\":8,\"theta\":10}],\"layers\":[1]}",
        "{\"tables\":[{\"type\":\"default\",\"dim\":8,\"theta\":10}],\"layers\":[]}",
        "{\"tables\":[{\"type\":\"default\",\"dim\":7,\"theta\":10}],\"layers\":[0]}",
        "{\"tables\":[{\"type\":\"default\",\"dim\":8,\"theta\":0}],\"layers\":[0]}",
        "{\"tables\":[{\"type\":\"none\",\"dim\":8,\"theta\":10}],\"layers\":[0]}",
        "{\"tables\":[{\"type\":\"dynamic\",\"dim\":8,\"theta\":10}],\"layers\":[0]}",
        "{\"tables\":[{\"type\":\"dynamic\",\"dim\":8,\"theta\":10,\"factor\":2,"
        "\"max_positions\":4,\"positions\":9}],\"layers\":[0]}",
        "[]", /* these have rows for all positions */
        "{\"tables\":[{\"type\":\"default\",\"dim\":8,\"theta\":1e-300}],\"layers\":[0]}",
        "{\"tables\":[{\"type\":\"linear\",\"dim\":8,\"theta\":10,\"factor\":0}],\"layers\":[0]}",
        "{\"tables\":[{\"type\":\"yarn\",\"dim\":8,\"theta\":10,\"factor\":2,\"original\":4,"
        "\"beta_fast\":32,\"beta_slow\":1,\"attention\":1e-300}],\"layers\":[0]}",
        /* A table that no layer has is not wider than heads. */
        "{\"tables\":[{\"type\":\"default\",\"dim\":8,\"theta\":10},"
        "{\"type\":\"default\",\"dim\":18,\"theta\":10}],\"layers\":[0]}",
    };
    static const int64_t one[1] = { 1 }, width[1] = { 16 };
    static lm_kv_format code = {
        .name = "f", .bits = 8, .levels = LM_KV_ASYM, .scale = LM_DTYPE_F32, .group = 16
    };
    static const lm_kv_side side[2] = {
        { .format = &code, .pre_rope = true, .outliers = -1 },
        { .plain = LM_DTYPE_F32, .outliers = -1 },
    };
    const lm_kv_plan plan = { .layers = 1, .page = 64, .side = side, .text = "f" };
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const lm_kv_about a = { .model_type = "llama",
                                .weights = "",
                                .config = "",
                                .rope = bad[i],
                                .layers = 1,
                                .tokens = 1,
                                .kv_heads = one,
                                .head_dim = width,
                                .act = LM_DTYPE_F32 };
        lm_kv_image *m, *out;
        lm_err e = { 0 };
        assert_int_equal(lm_kv_image_new(&a, &m, &e), LM_OK);
        m->content.positions[0] = 10;
        if (lm_cache_convert(m, &plan, lm_cpu_detect(), NULL, &out, &e) != LM_EFORMAT)
            fail_msg("%s: %s", bad[i], e.what);
        assert_null(out);
        lm_kv_image_free(m);
    }
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
        cmocka_unit_test(test_rope_text), cmocka_unit_test(test_dynamic),
        cmocka_unit_test(test_about),     cmocka_unit_test(test_config_digest),
        cmocka_unit_test(test_rotation),  cmocka_unit_test(test_bad_rotation),
    };
    return cmocka_run_group_tests_name("model_cache", tests, NULL, NULL);
}
