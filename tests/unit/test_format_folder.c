/* SPDX-License-Identifier: Apache-2.0 */
/* Model folders: written and read back, sharded and not, and every way in which they are refused;
 * run folders. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/file.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/mem.h"
#include "format/folder.h"
#include "format/folder_json.h"
#include "format/folder_run.h"
#include "format/provenance.h"

static char dir[64], path[256];

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
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return path;
}

static void put_text(const char *name, const char *text)
{
    FILE *f = fopen(in(name), "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static lm_buf text_of(const char *name)
{
    lm_buf b = { 0 };
    lm_err e = { 0 };
    assert_int_equal(lm_file_read(in(name), 1 << 20, &b, &e), LM_OK);
    return b;
}

/* Tensors t0..t4 of 8 f32 each, element i of tensor k being 100 k + i. */
static void write_model(const char *name, uint64_t shard_bytes, const char *tokenizer)
{
    lm_err e = { 0 };
    lm_st_plan *p = NULL;
    lm_folder *f = NULL;
    char tensor[16], where[256];
    int64_t dim[] = { 2, 4 };
    json_t *config = json_pack("{s:s, s:i, s:f, s:[s]}", "model_type", "llama", "vocab_size", 7,
                               "rms_norm_eps", 1e-6, "architectures", "LlamaForCausalLM");

    snprintf(where, sizeof where, "%s", in(name));
    assert_int_equal(lm_st_plan_new(&p, &e), LM_OK);
    for (int k = 4; k >= 0; k--) {
        snprintf(tensor, sizeof tensor, "t%d", k);
        assert_int_equal(lm_st_plan_add(p, tensor, LM_DTYPE_F32, 2, dim, &e), LM_OK);
    }
    lm_folder_spec spec = {
        .config = config, .plan = p, .tokenizer = tokenizer, .max_shard_bytes = shard_bytes
    };
    assert_int_equal(lm_folder_create(where, false, NULL, &spec, &f, &e), LM_OK);
    const lm_st_tensor *t;
    while ((t = lm_folder_next(f))) {
        float x[8];
        for (int i = 0; i < 8; i++)
            x[i] = (float)(100 * (t->name[1] - '0') + i);
        assert_int_equal(lm_folder_write(f, x, 20, &e), LM_OK);
        assert_int_equal(lm_folder_write_as(f, LM_DTYPE_F32, x + 5, 3, &e), LM_OK);
    }
    assert_false(lm_path_exists(where));
    assert_int_equal(lm_folder_commit(f, &e), LM_OK);
    lm_st_plan_free(p);
    json_decref(config);
}

static void check_model(const char *name, size_t files)
{
    lm_err e = { 0 };
    lm_model_source *m = NULL;
    const lm_st_tensor *t;
    int seen = 0;

    if (lm_model_source_open(in(name), NULL, &m, &e))
        fail_msg("%s: %s", e.where, e.what);
    assert_int_equal(lm_model_source_files(m), files);
    assert_int_equal(lm_model_source_count(m), 5);
    assert_int_equal(lm_model_source_bytes(m), 160);
    assert_int_equal(lm_model_source_params(m), 40);
    assert_true(lm_model_source_random(m));
    assert_string_equal(lm_model_source_meta(m, "format"), "pt");
    assert_string_equal(json_string_value(json_object_get(lm_model_source_config(m), "model_type")),
                        "llama");
    for (;;) {
        double x[8];
        assert_int_equal(lm_model_source_next(m, &t, &e), LM_OK);
        if (!t)
            break;
        assert_ptr_equal(t, lm_model_source_find(m, t->name));
        assert_int_equal(lm_model_source_load(m, t, LM_DTYPE_F64, x, &e), LM_OK);
        for (int i = 0; i < 8; i++)
            assert_true(x[i] == 100 * (t->name[1] - '0') + i);
        assert_true(((const float *)lm_model_source_data(m, t))[3] == (float)x[3]);
        seen++;
    }
    assert_int_equal(seen, 5);
    assert_null(lm_model_source_find(m, "t5"));
    lm_model_source_close(m);
}

static void refuse(const char *name, lm_code code, const char *message)
{
    lm_err e = { 0 };
    lm_model_source *m = NULL;
    char all[600];

    assert_int_equal(lm_model_source_open(in(name), NULL, &m, &e), code);
    assert_null(m);
    snprintf(all, sizeof all, "%s: %s", e.where, e.what);
    if (!strstr(all, message))
        fail_msg("'%s' should contain '%s'", all, message);
}

static void test_one_file(void **state)
{
    (void)state;
    mkdir(in("tok"), 0777);
    put_text("tok/tokenizer.json", "{\"a\": 1}\n");
    put_text("tok/other.txt", "no");
    char tok[256];
    snprintf(tok, sizeof tok, "%s", in("tok"));
    write_model("m", 0, tok);
    check_model("m", 1);
    lm_buf b = text_of("m/tokenizer.json");
    assert_string_equal(b.data, "{\"a\": 1}\n");
    lm_buf_fini(&b);
    assert_false(lm_path_exists(in("m/other.txt")));
    assert_false(lm_path_exists(in("m/model.safetensors.index.json")));
    b = text_of("m/config.json");
    assert_string_equal(b.data, "{\n  \"model_type\": \"llama\",\n  \"vocab_size\": 7,\n"
                                "  \"rms_norm_eps\": 1e-06,\n  \"architectures\": [\n"
                                "    \"LlamaForCausalLM\"\n  ]\n}\n");
    lm_buf_fini(&b);
}

static void test_shards(void **state)
{
    (void)state;
    write_model("m", 64, NULL);
    check_model("m", 3);
    lm_buf b = text_of("m/model.safetensors.index.json");
    assert_non_null(strstr(b.data, "\"total_size\": 160"));
    assert_non_null(strstr(b.data, "\"t0\": \"model-00003-of-00003.safetensors\",\n    \"t1\": "
                                   "\"model-00002-of-00003.safetensors\""));
    lm_buf_fini(&b);
    write_model("each", 1, NULL); /* every tensor larger than a shard */
    check_model("each", 5);
}

static void test_shards_refused(void **state)
{
    (void)state;
    write_model("m", 64, NULL);
    lm_buf index = text_of("m/model.safetensors.index.json");
    char second[256];
    snprintf(second, sizeof second, "%s", in("m/model-00002-of-00003.safetensors"));

    assert_int_equal(truncate(second, 200), 0);
    refuse("m", LM_EFORMAT, "model-00002-of-00003.safetensors: header says");
    assert_int_equal(unlink(second), 0);
    refuse("m", LM_EUSAGE, "model-00002-of-00003.safetensors: shard 2 of 3");

    put_text("m/model.safetensors.index.json", "{\"weight_map\": {\"t0\": \"../x.safetensors\"}}");
    refuse("m", LM_EFORMAT, "an invalid file name");
    put_text("m/model.safetensors.index.json", "{\"weight_map\": []}");
    refuse("m", LM_EFORMAT, "weight_map");
    lm_buf_fini(&index);
}

static void test_index_lies(void **state)
{
    (void)state;
    write_model("m", 64, NULL);
    put_text("m/model.safetensors.index.json",
             "{\"weight_map\": {\"t9\": \"model-00001-of-00003.safetensors\"}}");
    refuse("m", LM_EUSAGE,
           "'t9' should be in model-00001-of-00003.safetensors, but is missing there");
    put_text("m/model.safetensors.index.json",
             "{\"weight_map\": {\"t3\": \"model-00001-of-00003.safetensors\"}}");
    refuse("m", LM_EUSAGE,
           "tensor 't4' is in model-00001-of-00003.safetensors, but not in the index");
    put_text("m/model.safetensors.index.json",
             "{\"weight_map\": {\"t3\": \"model-00001-of-00003.safetensors\", \"t4\": "
             "\"model-00002-of-00003.safetensors\"}}");
    refuse("m", LM_EUSAGE, "'t4' should be in model-00002");
    char cmd[600];
    snprintf(cmd, sizeof cmd, "cp %s/m/model-00001-of-00003.safetensors %s/m/b.safetensors", dir,
             dir);
    assert_int_equal(system(cmd), 0);
    put_text("m/model.safetensors.index.json",
             "{\"weight_map\": {\"t3\": \"model-00001-of-00003.safetensors\", \"t4\": "
             "\"b.safetensors\"}}");
    refuse("m", LM_EUSAGE, "is also in b.safetensors");
}

static void test_no_model(void **state)
{
    lm_err e = { 0 };
    lm_model_source *m = NULL;
    (void)state;
    assert_int_equal(lm_model_source_open(in("none"), NULL, &m, &e), LM_EIO);
    mkdir(in("m"), 0777);
    refuse("m", LM_EUSAGE, "no config.json");
    put_text("m/config.json", "[]");
    refuse("m", LM_EFORMAT, "not a JSON object");
    put_text("m/config.json", "{\"a\": 1,}");
    refuse("m", LM_EFORMAT, "config.json");
    put_text("m/config.json", "{}");
    refuse("m", LM_EUSAGE, "neither model.safetensors");
    put_text("m/model.safetensors", "short");
    refuse("m", LM_EFORMAT, "fewer than the 8");
}

static void test_lone_file(void **state)
{
    lm_err e = { 0 };
    lm_model_source *m = NULL;
    (void)state;
    write_model("m", 0, NULL);
    assert_int_equal(lm_model_source_open(in("m/model.safetensors"), NULL, &m, &e), LM_OK);
    assert_null(lm_model_source_config(m));
    assert_null(lm_model_source_dir(m));
    assert_int_equal(lm_model_source_count(m), 5);
    assert_string_equal(lm_model_source_file_of(m, lm_model_source_at(m, 2)), "model.safetensors");
    lm_model_source_close(m);
}

/* More bytes than any disk has: refused before anything is written, and the message names the
 * target. */
static void test_no_room(void **state)
{
    lm_err e = { 0 };
    lm_st_plan *p = NULL;
    lm_folder *f = NULL;
    lm_st_writer *w = NULL;
    int64_t dim[] = { INT64_C(1) << 57 };
    json_t *config = json_object();
    char **names = NULL;
    size_t n = 0;
    (void)state;

    assert_int_equal(lm_st_plan_new(&p, &e), LM_OK);
    assert_int_equal(lm_st_plan_add(p, "a", LM_DTYPE_F32, 1, dim, &e), LM_OK);
    lm_folder_spec spec = { .config = config, .plan = p };
    assert_int_equal(lm_folder_create(in("m/"), false, NULL, &spec, &f, &e), LM_ELIMIT);
    assert_string_equal(e.where, in("m/"));
    e = (lm_err){ 0 };
    assert_int_equal(lm_st_create(in("a.safetensors"), false, p, &w, &e), LM_ELIMIT);
    e = (lm_err){ 0 };
    assert_int_equal(lm_dir_list(dir, &names, &n, &e), LM_OK);
    assert_int_equal(n, 0);
    lm_names_free(names, n);
    lm_st_plan_free(p);
    json_decref(config);
}

static void test_names(void **state)
{
    static const char *const bad[] = { "", ".", "..", "a/b", "/a", "a\\b", "a\nb", "\x7f" };
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_false(lm_name_ok(bad[i]));
    assert_true(lm_name_ok("model-00001-of-00002.safetensors"));
    assert_true(lm_name_ok("..a"));
}

static void test_incomplete_folder(void **state)
{
    lm_err e = { 0 };
    lm_st_plan *p = NULL;
    lm_folder *f = NULL;
    int64_t dim[] = { 4 };
    float x[4] = { 0 };
    char **names = NULL;
    size_t n = 0;
    json_t *config = json_object();
    (void)state;

    assert_int_equal(lm_st_plan_new(&p, &e), LM_OK);
    assert_int_equal(lm_st_plan_add(p, "a", LM_DTYPE_F32, 1, dim, &e), LM_OK);
    assert_int_equal(lm_st_plan_add(p, "b", LM_DTYPE_F32, 1, dim, &e), LM_OK);
    for (int shards = 0; shards < 2; shards++) {
        lm_folder_spec spec = { .config = config, .plan = p, .max_shard_bytes = shards ? 16 : 0 };
        assert_int_equal(lm_folder_create(in("m"), false, NULL, &spec, &f, &e), LM_OK);
        assert_int_equal(lm_folder_put(f, "../x", "", 0, &e), LM_EUSAGE);
        e = (lm_err){ 0 };
        assert_int_equal(lm_folder_put(f, "state.json", "{}", 2, &e), LM_OK);
        assert_int_equal(lm_folder_write(f, x, 16, &e), LM_OK);
        assert_int_equal(lm_folder_commit(f, &e), LM_EBUG);
        e = (lm_err){ 0 };
        assert_int_equal(lm_dir_list(dir, &names, &n, &e), LM_OK);
        assert_int_equal(n, 0);
        lm_names_free(names, n);
    }
    lm_st_plan_free(p);
    json_decref(config);
}

static void test_pretty_reals(void **state)
{
    static const double in_[] = { 1e-6, 0.1,  10000.0, 1e6,        500000.0, 1e16,
                                  1.0,  -0.5, 1e-5,    123456.789, 0 };
    static const char *const out[] = { "1e-06",    "0.1",        "10000.0", "1000000.0",
                                       "500000.0", "1e+16",      "1.0",     "-0.5",
                                       "1e-05",    "123456.789", "0.0" };
    (void)state;
    for (size_t i = 0; i < sizeof in_ / sizeof *in_; i++) {
        lm_buf b = { 0 };
        lm_err e = { 0 };
        json_t *v = json_real(in_[i]);
        assert_int_equal(lm_json_pretty(v, &b, &e), LM_OK);
        b.data[b.len - 1] = '\0';
        assert_string_equal(b.data, out[i]);
        json_decref(v);
        lm_buf_fini(&b);
    }
}

static void checkpoint(int64_t step)
{
    char name[32], file[64];
    write_model("tmp", 0, NULL);
    put_text("tmp/state.json", "{}");
    put_text("tmp/optimizer.safetensors", "");
    lm_run_step_name(step, name);
    char from[256], to[256];
    snprintf(from, sizeof from, "%s", in("tmp"));
    snprintf(file, sizeof file, "run/%s", name);
    snprintf(to, sizeof to, "%s", in(file));
    assert_int_equal(rename(from, to), 0);
}

static void expect_latest(const char *name)
{
    char *got = NULL;
    lm_err e = { 0 };
    assert_int_equal(lm_run_latest(in("run"), &got, &e), LM_OK);
    if (!name)
        assert_null(got);
    else
        assert_string_equal(got, name);
    lm_free(got);
}

static void test_run(void **state)
{
    lm_err e = { 0 };
    char link[64] = { 0 };
    struct stat st;
    (void)state;

    mkdir(in("run"), 0777);
    expect_latest(NULL);
    refuse("run", LM_EUSAGE, "no config.json");
    checkpoint(100);
    expect_latest("step-000100"); /* whole, not yet published */
    check_model("run", 1);
    assert_int_equal(lm_run_publish(in("run"), "step-000100", &e), LM_OK);
    check_model("run", 1);
    checkpoint(200);
    expect_latest("step-000100");
    put_text("run/step-000200/generation_config.json", "{}");
    assert_int_equal(lm_run_publish(in("run"), "step-000200", &e), LM_OK);
    expect_latest("step-000200");
    assert_true(readlink(in("run/config.json"), link, 63) > 0);
    assert_string_equal(link, "latest/config.json");
    lm_model_source *m = NULL;
    assert_int_equal(lm_model_source_open(in("run"), NULL, &m, &e), LM_OK);
    assert_string_equal(lm_path_base(lm_model_source_dir(m)),
                        "step-000200"); /* not through latest */
    lm_model_source_close(m);
    assert_true(lm_path_exists(in("run/generation_config.json")));
    assert_true(lstat(in("run/state.json"), &st) != 0);
    assert_true(lstat(in("run/optimizer.safetensors"), &st) != 0);
    assert_int_equal(lm_run_publish(in("run"), "step-000200", &e),
                     LM_OK); /* again: nothing to do */
    checkpoint(1000000);
    assert_int_equal(lm_run_publish(in("run"), "step-1000000", &e), LM_OK);
    assert_true(lstat(in("run/generation_config.json"), &st) != 0); /* no dangling link stays */
    assert_int_equal(lm_run_prune(in("run"), 2, &e), LM_OK);
    assert_false(lm_path_exists(in("run/step-000100")));
    assert_true(lm_path_exists(in("run/step-000200")));
    unlink(in("run/latest"));
    check_model("run", 1); /* the links dangle, the newest checkpoint is found */
    expect_latest("step-1000000");
    assert_int_equal(lm_run_prune(in("run"), 1, &e), LM_OK);
    assert_false(lm_path_exists(in("run/step-000200")));
    assert_true(lm_path_exists(in("run/step-1000000")));
}

static void test_step_names(void **state)
{
    static const char *const bad[] = { "step-",  "step-12",     "step-00000x",
                                       "latest", "step--00001", "step-9999999999999999999" };
    char buf[32];
    (void)state;
    assert_string_equal(lm_run_step_name(300, buf), "step-000300");
    assert_int_equal(lm_run_step_of("step-000300"), 300);
    assert_int_equal(lm_run_step_of(lm_run_step_name(123456789, buf)), 123456789);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(lm_run_step_of(bad[i]), -1);
}

static void test_history(void **state)
{
    char *argv[] = { "/usr/bin/train",       "/home/me/m0/", "-o",       "out/run",
                     "--config=/etc/x.json", "3e-4",         "-o/tmp/z", "plain" };
    lm_history_input input = { .name = "/data/train", .digest = 0xabcdef };
    lm_history_step step = { "train", "0.1.0", argv, 8, &input, 1, false, false };
    lm_buf a = { 0 }, b = { 0 };
    lm_err e = { 0 };
    (void)state;

    assert_int_equal(lm_history_add(NULL, &step, &a, &e), LM_OK);
    assert_string_equal(a.data,
                        "[{\"tool\":\"train\",\"version\":\"0.1.0\",\"argv\":[\"train\","
                        "\"/home/me/m0/\",\"-o\",\"out/run\",\"--config=/etc/x.json\",\"3e-4\","
                        "\"-o/tmp/z\",\"plain\"],\"inputs\":[{\"name\":\"/data/train\",\"xxh3\":"
                        "\"0000000000abcdef\"}]}]");
    step.hide_paths = true;
    assert_int_equal(lm_history_add(a.data, &step, &b, &e), LM_OK);
    assert_memory_equal(a.data, b.data, a.len - 1);
    assert_string_equal(
        b.data + a.len - 1,
        ",{\"tool\":\"train\",\"version\":\"0.1.0\",\"argv\":[\"train\",\"m0\",\"-o\","
        "\"run\",\"--config=x.json\",\"3e-4\",\"-oz\",\"plain\"],\"inputs\":[{\"name\":"
        "\"train\",\"xxh3\":\"0000000000abcdef\"}]}]");
    b.len = 0;
    assert_int_equal(lm_history_add("not json", &step, &b, &e), LM_OK);
    assert_int_equal(b.data[1], '{');
    lm_buf_fini(&a);
    lm_buf_fini(&b);
}

static void test_digest(void **state)
{
    uint64_t a = 0, b = 0, c = 0;
    lm_err e = { 0 };
    (void)state;
    mkdir(in("d"), 0777);
    put_text("d/x", "one");
    assert_int_equal(lm_digest_path(in("d"), &a, &e), LM_OK);
    assert_int_equal(lm_digest_path(in("d/x"), &b, &e), LM_OK);
    assert_true(a && b && a != b);
    put_text("d/x", "two");
    assert_int_equal(lm_digest_path(in("d"), &c, &e), LM_OK);
    assert_true(a != c);
    assert_int_equal(lm_digest_path(in("none"), &c, &e), LM_EIO);
}

/* ---- The digest of weights ---- */

enum { LARGE = 300000 }; /* bytes of a tensor of which only pieces are read */

/* A model of two tensors in `name` (any kind of output), tensor `large` with `flip` added to byte `at`. */
static void write_weights(const char *name, const char *large, size_t at, int flip, uint64_t shard,
                          bool turn)
{
    static uint8_t data[LARGE];
    lm_err e = { 0 };
    lm_st_plan *p = NULL;
    lm_folder *f = NULL;
    int64_t dim[] = { LARGE / 4, 2 }, small[] = { turn ? 3 : 5, turn ? 5 : 3 };
    json_t *config = json_pack("{s:s}", "model_type", "llama");

    assert_int_equal(lm_st_plan_new(&p, &e), LM_OK);
    assert_int_equal(lm_st_plan_add(p, large, LM_DTYPE_BF16, 2, dim, &e), LM_OK);
    assert_int_equal(lm_st_plan_add(p, "a", LM_DTYPE_F32, 2, small, &e), LM_OK);
    lm_folder_spec spec = { .config = config, .plan = p, .max_shard_bytes = shard };
    if (lm_folder_create(in(name), false, NULL, &spec, &f, &e))
        fail_msg("%s: %s", e.where, e.what);
    for (const lm_st_tensor *t; (t = lm_folder_next(f));) {
        for (size_t i = 0; i < t->bytes; i++)
            data[i] = (uint8_t)(i * 7 + i / 251);
        data[at % t->bytes] = (uint8_t)(data[at % t->bytes] + (t->bytes == LARGE ? flip : 0));
        assert_int_equal(lm_folder_write(f, data, t->bytes, &e), LM_OK);
    }
    if (lm_folder_commit(f, &e))
        fail_msg("%s: %s", e.where, e.what);
    lm_st_plan_free(p);
    json_decref(config);
}

static const char *weights_of(const char *name)
{
    static char hex[16][33];
    static int next;
    uint8_t digest[16];
    lm_model_source *m = NULL;
    lm_err e = { 0 };

    next = (next + 1) % 16;
    if (lm_model_source_open(in(name), NULL, &m, &e) ||
        lm_model_source_weights_digest(m, digest, &e))
        fail_msg("%s: %s", e.where, e.what);
    lm_model_source_close(m);
    lm_hash128_hex(digest, hex[next]);
    return hex[next];
}

/* One digest for every form of the same weights. */
static void test_weights_digest(void **state)
{
    const char *first;
    (void)state;
    write_weights("m", "w", 0, 0, LM_MAX_SHARD_BYTES, false);
    write_weights("shards", "w", 0, 0, 1000, false);
    write_weights("m.tar", "w", 0, 0, LM_MAX_SHARD_BYTES, false);
    write_weights("m.lmz", "w", 0, 0, LM_MAX_SHARD_BYTES, false);
    write_weights("m.tar.gz", "w", 0, 0, LM_MAX_SHARD_BYTES, false); /* read as a stream */
    first = weights_of("m");
    assert_string_equal(first, "ab11ffd79c90fc3c3acbd16c701f8ba9");
    assert_string_equal(first, weights_of("shards"));
    assert_string_equal(first, weights_of("m.tar"));
    assert_string_equal(first, weights_of("m.lmz"));
    assert_string_equal(first, weights_of("m.tar.gz"));
    assert_string_equal(first, weights_of("m/model.safetensors"));
}

/* Every byte counts, and names and shapes. */
static void test_weights_differ(void **state)
{
    static const size_t seen[] = { 0, 4095, LARGE - 4096, LARGE - 1, 4096 + 1000 };
    const char *first;
    char name[16];
    (void)state;
    write_weights("m", "w", 0, 0, LM_MAX_SHARD_BYTES, false);
    first = weights_of("m");
    for (int i = 0; i < 5; i++) {
        snprintf(name, sizeof name, "m%d", i);
        write_weights(name, "w", seen[i], 1, LM_MAX_SHARD_BYTES, false);
        assert_string_not_equal(first, weights_of(name));
    }
    write_weights("renamed", "v", 0, 0, LM_MAX_SHARD_BYTES, false);
    assert_string_not_equal(first, weights_of("renamed"));
    write_weights("turned", "w", 0, 0, LM_MAX_SHARD_BYTES, true);
    assert_string_not_equal(first, weights_of("turned"));
}

int main(void)
{
#define WITH_DIR(f) cmocka_unit_test_setup_teardown(f, make_dir, drop_dir)
    const struct CMUnitTest tests[] = {
        WITH_DIR(test_one_file),
        WITH_DIR(test_shards),
        WITH_DIR(test_shards_refused),
        WITH_DIR(test_index_lies),
        WITH_DIR(test_no_model),
        WITH_DIR(test_lone_file),
        WITH_DIR(test_no_room),
        cmocka_unit_test_setup_teardown(test_weights_digest, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_weights_differ, make_dir, drop_dir),
        cmocka_unit_test(test_names),
        WITH_DIR(test_incomplete_folder),
        cmocka_unit_test(test_pretty_reals),
        WITH_DIR(test_run),
        cmocka_unit_test(test_step_names),
        cmocka_unit_test(test_history),
        WITH_DIR(test_digest),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
