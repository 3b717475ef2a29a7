/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_config -- any bytes as config.json and as the index of a sharded model.
 *
 * A config that parses must give the same tree when its printed form is parsed; one that describes a model must have a layer
 * and countable parameters, and names for them; a folder with that index must open or fail with a message, whatever files it
 * names. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/json.h"
#include "format/folder.h"
#include "format/folder_json.h"
#include "model/arch.h"

static char dir[] = "/tmp/lm-fuzz-XXXXXX";
static char index_path[64];

static void put(const char *name, const void *data, size_t size)
{
    char path[64];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(data, 1, size, f) != size || fclose(f))
        abort();
}

static void remove_all(void)
{
    static const char *const names[] = { "config.json", "a.safetensors", "b.safetensors",
                                         "model.safetensors.index.json" };
    char path[64];
    for (int i = 0; i < 4; i++) {
        snprintf(path, sizeof path, "%s/%s", dir, names[i]);
        unlink(path);
    }
    rmdir(dir);
}

static void prepare(void)
{
    static const char a[] = "\x38\0\0\0\0\0\0\0"
                            "{\"x\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}   "
                            "!";
    static const char b[] = "\x38\0\0\0\0\0\0\0"
                            "{\"y\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}   "
                            "!";
    if (!mkdtemp(dir))
        abort();
    atexit(remove_all);
    snprintf(index_path, sizeof index_path, "%s/model.safetensors.index.json", dir);
    put("config.json", "{}", 2);
    put("a.safetensors", a, sizeof a - 1);
    put("b.safetensors", b, sizeof b - 1);
}

static void check_pretty(const json_t *tree)
{
    lm_buf text = { 0 };
    lm_err e = { 0 };
    json_t *again = NULL;

    if (lm_json_pretty(tree, &text, &e) ||
        lm_json_parse(text.data, text.len, "again", &again, &e) ||
        !json_equal((json_t *)(uintptr_t)tree, again))
        abort();
    json_decref(again);
    lm_buf_fini(&text);
}

static void check_layer(const lm_config *c, int64_t l)
{
    const lm_layer *y = &c->layer[l];

    if (y->heads < 1 || y->kv_heads < 1 || y->head_dim < 1 || y->heads % y->kv_heads ||
        y->rope >= c->ropes || y->window < 0 || !(y->scale > 0))
        abort();
    if (y->moe.experts &&
        (y->moe.chosen < 1 || y->moe.chosen > y->moe.experts || y->moe.ffn < 1 ||
         y->moe.groups < 1 || y->moe.experts % y->moe.groups || y->moe.kept_groups > y->moe.groups))
        abort();
    if (y->attention == LM_ATTENTION_DELTA &&
        (y->delta.key_heads < 1 || y->delta.heads % y->delta.key_heads))
        abort();
    if (y->attention == LM_ATTENTION_LATENT &&
        (y->latent.kv_rank < 1 || y->latent.rope_dim % 2 || y->latent.value_dim > y->head_dim))
        abort();
}

/* A config.json that describes a model. */
static void check_model(const json_t *tree)
{
    lm_config c;
    lm_err e = { 0 };
    char name[LM_TENSOR_NAME];

    if (lm_config_read(tree, "config.json", &c, &e)) {
        if (!e.what[0])
            abort();
        return;
    }
    if (c.layers < 1 || lm_config_params(&c) < 1 ||
        lm_config_active_params(&c) > lm_config_params(&c) || !(lm_config_train_flops(&c, 64) > 0))
        abort();
    for (int64_t l = 0; l < lm_config_depth(&c); l += 1 + l / 64) {
        check_layer(&c, l);
        for (const lm_tensor_name *t = c.arch->tensors; t->part; t++)
            lm_expert_hf_name(c.arch, t->part, l, c.layer[l].moe.experts, false, name);
    }
    lm_config_fini(&c);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    lm_model_source *m = NULL;
    json_t *tree = NULL;
    lm_err e = { 0 };

    if (!index_path[0])
        prepare();
    if (!lm_json_parse((const char *)data, size, "config.json", &tree, &e)) {
        check_pretty(tree);
        check_model(tree);
    }
    json_decref(tree);
    put("model.safetensors.index.json", data, size);
    e = (lm_err){ 0 };
    if (lm_model_source_open(dir, NULL, &m, &e) ? !e.what[0] : lm_model_source_count(m) > 2)
        abort();
    lm_model_source_close(m);
    return 0;
}
