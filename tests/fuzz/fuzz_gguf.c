/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_gguf -- any bytes as a GGUF file: its tables, and its metadata for config.json and
 * tokenizer.json.  Accepted tensors must be inside the file, and a config made from it must be
 * readable. */
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "convert/gguf_meta.h"
#include "convert/names.h"
#include "format/gguf.h"
#include "model/config.h"

static void walk_values(const lm_gguf *g)
{
    double sum = 0;

    for (size_t i = 0; i < lm_gguf_pairs(g); i++) {
        const lm_gguf_value *v = lm_gguf_pair(g, i);
        lm_gguf_iter it = { .v = v };
        lm_gguf_text t;
        if (lm_gguf_value_of(g, v->key) != v)
            abort();
        while (lm_gguf_next_str(&it, &t))
            sum += t.len ? t.text[t.len - 1] : 0;
        if (v->kind != LM_GGUF_STRING && v->kind != LM_GGUF_ARRAY)
            for (uint64_t k = 0; k < v->count; k += 1 + v->count / 16)
                sum += lm_gguf_number(v, k);
    }
    (void)sum;
}

static void walk_tensors(const lm_gguf *g, const uint8_t *data, size_t size)
{
    for (size_t i = 0; i < lm_gguf_count(g); i++) {
        const lm_gguf_tensor *t = lm_gguf_at(g, i);
        const uint8_t *p = lm_gguf_data(g, t);
        if (p < data || t->bytes > size || p + t->bytes > data + size ||
            lm_gguf_find(g, t->name) != t)
            abort();
    }
}

static void make_files(const lm_gguf *g)
{
    lm_buf json = { 0 }, config = { 0 };
    lm_config c = { .vocab = 1 << 20, .max_positions = 1024 };
    json_t *tree = NULL;
    lm_err e = { 0 };
    bool found;

    if (!lm_gguf_get_config(g, &tree, &e)) {
        lm_config read = { 0 };
        lm_err again = { 0 };
        if (!lm_config_read(tree, "fuzz", &read, &again))
            lm_config_fini(&read);
        json_decref(tree);
    } else if (!e.what[0])
        abort();
    e = (lm_err){ 0 };
    if (lm_gguf_get_vocab(g, &c, &json, &config, &found, &e) && !e.what[0])
        abort();
    lm_buf_fini(&json);
    lm_buf_fini(&config);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    lm_gguf *g = NULL;
    lm_err e = { 0 };

    if (lm_gguf_parse(data, size, "fuzz", &g, &e)) {
        if (!e.what[0] || g)
            abort();
        return 0;
    }
    walk_values(g);
    walk_tensors(g, data, size);
    make_files(g);
    lm_gguf_close(g);
    return 0;
}
