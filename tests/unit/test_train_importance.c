/* SPDX-License-Identifier: Apache-2.0 */
/* Computed importance: the inputs of the first layer against plain loops, and tensors that share an
 * entry. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/mem.h"
#include "base/rng.h"
#include "convert/convert_impl.h"
#include "model_run.h"
#include "train/importance.h"

enum { WIDTH = 8, VOCAB = 20, IDS = 41 };

static const char text[] =
    "{\"model_type\":\"llama\",\"hidden_size\":8,\"intermediate_size\":24,\"num_hidden_layers\":2,"
    "\"num_attention_heads\":2,\"num_key_value_heads\":1,\"vocab_size\":20,"
    "\"max_position_embeddings\":16,\"rms_norm_eps\":1e-5}";

/* Tensor i of the model: numbers of the seed. */
static lm_code load(lm_import *m, const lm_st_tensor *t, const void **data, lm_err *e)
{
    static float x[1024];
    size_t i = (size_t)(t - lm_st_plan_at(m->plan, 0));
    (void)e;
    for (int64_t k = 0; k < t->count; k++)
        x[k] = (float)(0.5 * lm_rng_normal(lm_rng_make(9, "importance test", i), (uint64_t)k));
    *data = x;
    return LM_OK;
}

static void open_model(lm_import *m)
{
    lm_err e = { 0 };
    lm_model_tensor *s = NULL;
    size_t n = 0;
    json_t *o = NULL;

    memset(m, 0, sizeof *m);
    must(lm_strdup(&m->path, "test", &e), &e);
    must(lm_json_parse(text, strlen(text), "config", &o, &e), &e);
    must(lm_config_read(o, "config", &m->config, &e), &e);
    json_decref(o);
    must(lm_st_plan_new(&m->plan, &e), &e);
    must(lm_model_tensors_make(&m->config, &s, &n, &e), &e);
    for (size_t i = 0; i < n; i++)
        must(lm_st_plan_add(m->plan, s[i].hf, LM_DTYPE_F32, s[i].ndim, s[i].dim, &e), &e);
    lm_free(s);
    m->load = load;
}

/* Ids 0..VOCAB-1 in some order, as nanoGPT has them. */
static void write_ids(char *path, uint16_t *ids)
{
    int fd = mkstemps(path, 4);
    for (int i = 0; i < IDS; i++)
        ids[i] = (uint16_t)(i * 7 % VOCAB);
    assert_int_equal(write(fd, ids, IDS * sizeof *ids), IDS * sizeof *ids);
    close(fd);
}

/* Mean squares of RMSNorm(embedding) * weight over ids[0..n). */
static void first_inputs(lm_import *m, const uint16_t *ids, int n, double out[WIDTH])
{
    float embed[VOCAB * WIDTH], norm[WIDTH];
    const void *data;
    lm_err e = { 0 };

    for (size_t i = 0; i < lm_st_plan_count(m->plan); i++) {
        const lm_st_tensor *t = lm_st_plan_at(m->plan, i);
        load(m, t, &data, &e);
        if (!strcmp(t->name, "model.embed_tokens.weight"))
            memcpy(embed, data, sizeof embed);
        if (!strcmp(t->name, "model.layers.0.input_layernorm.weight"))
            memcpy(norm, data, sizeof norm);
    }
    memset(out, 0, WIDTH * sizeof *out);
    for (int i = 0; i < n; i++) {
        const float *x = embed + ids[i] * WIDTH;
        double square = 0;
        for (int k = 0; k < WIDTH; k++)
            square += (double)x[k] * (double)x[k] / WIDTH;
        for (int k = 0; k < WIDTH; k++)
            out[k] += pow((double)x[k] * (double)norm[k], 2) / (square + 1e-5) / n;
    }
}

static void sums_are_those_of_the_inputs(void **state)
{
    (void)state;
    char path[] = "/tmp/lm-ids-XXXXXX.bin";
    uint16_t ids[IDS];
    lm_backend *b = NULL;
    lm_import m;
    lm_err e = { 0 };
    static const struct {
        int64_t seq, chunks;
        int rows;
    } cases[] = { { 0, 0, 32 }, { 16, 1, 16 }, { 8, 0, 40 }, { 8, 2, 16 } };

    write_ids(path, ids);
    must(lm_backend_cpu(LM_CPU_REF, NULL, &b, &e), &e);
    open_model(&m);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const lm_importance_opts o = { .seq = cases[i].seq, .chunks = cases[i].chunks };
        lm_imatrix *im = NULL;
        double want[WIDTH];
        size_t n = 0;
        must(lm_importance_make(&m, path, &o, b, &im, &e), &e);
        first_inputs(&m, ids, cases[i].rows, want);
        const float *q = lm_imatrix_find(im, "blk.0.attn_q.weight", &n);
        assert_int_equal(n, WIDTH);
        for (int k = 0; k < WIDTH; k++)
            assert_true(fabs((double)q[k] - want[k]) <= 1e-5 * want[k]);
        const float *k = lm_imatrix_find(im, "blk.0.attn_k.weight", &n);
        assert_memory_equal(q, k, WIDTH * sizeof *q);
        assert_non_null(lm_imatrix_find(im, "blk.1.ffn_down.weight", &n));
        assert_int_equal(n, 24);
        assert_int_equal(lm_imatrix_count(im), 14);
        assert_null(lm_imatrix_find(im, "output.weight", &n));
        assert_int_equal(lm_imatrix_chunks(im), cases[i].rows / (cases[i].seq ? cases[i].seq : 16));
        lm_imatrix_free(im);
    }
    lm_import_close(&m);
    lm_backend_close(b);
    unlink(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sums_are_those_of_the_inputs),
    };
    return cmocka_run_group_tests_name("importance", tests, NULL, NULL);
}
