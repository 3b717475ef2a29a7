/* SPDX-License-Identifier: Apache-2.0 */
/* A model with an encoder: its gradients are those of finite differences in double; a source's padding changes nothing;
 * decoding from caches gives the logits of the whole text, at every split of prompt and steps, whatever other slots do. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "loaded_case.h"
#include "model/generate.h"
#include "model_run.h"
#include "train/update.h"

enum { S = 11, T = 7, B = 2, V = 23 };
static const int32_t length[B] = { S, 5 };

static const char *const models[] = {
    "{\"model_type\":\"t5\",\"vocab_size\":23,\"d_model\":16,\"d_kv\":6,\"d_ff\":20,\"num_layers\":"
    "2,\"num_heads\":3,"
    "\"relative_attention_num_buckets\":8,\"relative_attention_max_distance\":6,\"dropout_rate\":"
    "0}",
    "{\"model_type\":\"t5\",\"vocab_size\":23,\"d_model\":16,\"d_kv\":4,\"d_ff\":20,\"num_layers\":"
    "1,"
    "\"num_decoder_layers\":2,\"num_heads\":2,\"feed_forward_proj\":\"gated-gelu\",\"tie_word_"
    "embeddings\":false,"
    "\"dropout_rate\":0}",
};
enum { MODELS = sizeof models / sizeof *models };

static void read_config(const char *text, lm_config *c)
{
    lm_err e = { 0 };
    json_t *o;
    must(lm_json_parse(text, strlen(text), "config", &o, &e), &e);
    must(lm_config_read(o, "config", c, &e), &e);
    json_decref(o);
}

static void read_model(int i, lm_config *c)
{
    read_config(models[i], c);
}

static lm_build build_of(lm_mode mode, lm_dtype low)
{
    return (lm_build){
        .mode = mode, .batch = B, .seq = T, .source = S, .cache = T, .precision = { .low = low }
    };
}

static float *random_block(const lm_model *m)
{
    float *block = room((size_t)m->block, sizeof *block);
    for (int i = 0; i < m->n_params; i++)
        for (int64_t k = 0; k < m->param[i].count; k++)
            block[m->param[i].offset + k] =
                (float)(0.4 * lm_rng_normal(lm_rng_make(9, "weights", (uint64_t)i), (uint64_t)k));
    return block;
}

static int32_t id_at(int kind, int64_t i)
{
    return (int32_t)lm_rng_below(lm_rng_make(4, "ids", (uint64_t)kind), (uint64_t)i, V);
}

/* `pad`: ids behind the real rows of a source. */
static void feed(runner *r, int32_t pad)
{
    const lm_model *m = r->model;
    const int64_t t = m->build.seq, all = S + t;
    for (int64_t b = 0; b < m->build.batch; b++) {
        for (int64_t i = 0; i < S; i++) {
            ids_of(r, m->source)[b * S + i] = i < length[b] ? id_at(0, b * S + i) : pad;
            ids_of(r, m->source_hi)[b * S + i] = length[b];
        }
        for (int64_t i = 0; i < all; i++)
            ids_of(r, m->cross_hi)[b * all + i] = i < S ? 0 : length[b];
        for (int64_t i = 0; i < t; i++) {
            ids_of(r, m->tokens)[b * t + i] = id_at(1, b * T + i);
            if (m->targets != LM_NONE)
                ids_of(r, m->targets)[b * t + i] = id_at(2, b * T + i);
        }
    }
}

static void test_gradients(void **state)
{
    (void)state;
    for (int k = 0; k < MODELS; k++) {
        lm_config c;
        runner r;
        read_model(k, &c);
        lm_build build = build_of(LM_MODE_TRAIN, LM_DTYPE_F64);
        runner_new(&r, &c, &build, LM_CPU_REF, 1);
        float *block = random_block(r.model);
        const double h = 1e-5;
        for (int p = 0; p < r.model->n_params; p++)
            for (int64_t n = 0; n < 3; n++) {
                int64_t at = (int64_t)lm_rng_below(lm_rng_make(1, "at", (uint64_t)p), (uint64_t)n,
                                                   (uint64_t)r.model->param[p].count);
                double side[2], want, got;
                runner_weights(&r, block);
                feed(&r, 0);
                runner_run(&r);
                got = grad_at(&r, p, at);
                double *w = r.mem[r.model->param[p].value], was = w[at];
                for (int i = 0; i < 2; i++) {
                    w[at] = was + (i ? h : -h);
                    runner_run(&r);
                    side[i] = loss_sum(&r);
                }
                want = (side[1] - side[0]) / (2 * h);
                if (fabs(got - want) > 1e-5 * (fabs(want) + 1e-2))
                    fail_msg("model %d, %s [%lld]: %g, differences give %g", k,
                             r.model->graph->value[r.model->param[p].value].name, (long long)at,
                             got, want);
            }
        lm_free(block);
        runner_free(&r);
        lm_config_fini(&c);
    }
}

/* What is behind the real rows of a source is not read. */
static void test_padding(void **state)
{
    (void)state;
    for (int k = 0; k < MODELS; k++) {
        lm_config c;
        runner r;
        double sum[2];
        read_model(k, &c);
        lm_build build = build_of(LM_MODE_EVAL, LM_DTYPE_F32);
        runner_new(&r, &c, &build, lm_cpu_detect(), 2);
        float *block = random_block(r.model);
        runner_weights(&r, block);
        for (int i = 0; i < 2; i++) {
            feed(&r, i ? 19 : 0);
            runner_run(&r);
            sum[i] = loss_sum(&r);
        }
        assert_true(sum[0] == sum[1]);
        lm_free(block);
        runner_free(&r);
        lm_config_fini(&c);
    }
}

/* -log p of each target from logits. */
static double loss_of(const float *logits, int32_t target)
{
    double sum = 0;
    for (int i = 0; i < V; i++)
        sum += exp((double)logits[i]);
    return log(sum) - (double)logits[target];
}

static void test_splits(void **state)
{
    lm_err e = { 0 };
    (void)state;
    for (int k = 0; k < MODELS; k++) {
        lm_loaded w = { 0 };
        lm_generator *g;
        lm_par *par;
        lm_backend *b;
        runner r;
        must(lm_par_new(&par, 2, &e), &e);
        must(lm_backend_cpu(lm_cpu_detect(), par, &b, &e), &e);
        loaded_of(models[k], LM_DTYPE_F32, par, b, &w);
        const lm_generator_opts o = { .dtype = LM_DTYPE_F32, .batch = B + 1, .context = 16 };
        must(lm_generator_new(&w, &o, b, &g, &e), &e);
        lm_build build = build_of(LM_MODE_EVAL, LM_DTYPE_F32);
        runner_new(&r, &w.config, &build, lm_cpu_detect(), 2);
        lm_store_bind(w.store, r.model, r.exec);
        feed(&r, 0);
        runner_run(&r);
        const float *want = lm_exec_data(r.exec, r.model->loss);
        if (!k) /* two layers of the decoder, without products of the source; table, norm and embedding */
            assert_true(lm_generator_step_bytes(g) ==
                        4.0 * (2 * (6 * 16 * 18 + 2 * 16 * 20 + 3 * 16) + 8 * 3 + 16 + V * 16));
        for (int64_t split = 1; split <= T; split++) {
            const float *logits;
            uint32_t ids[S], text[T];
            for (int64_t s = 0; s < B; s++) {
                for (int64_t i = 0; i < length[s]; i++)
                    ids[i] = (uint32_t)id_at(0, s * S + i);
                for (int64_t i = 0; i < T; i++)
                    text[i] = (uint32_t)id_at(1, s * T + i);
                double before = lm_generator_step_bytes(g);
                must(lm_generator_encode(g, B, ids, length[s], &e), &e); /* moved to its slot */
                if (!s && split == 1)
                    assert_true(lm_generator_step_bytes(g) - before ==
                                4.0 * S * 2 * (k ? 2 * 2 * 4 : 2 * 3 * 6));
                must(lm_generator_prompt(g, B, text, split, &logits, &e), &e);
                must(lm_generator_copy(g, B, s, &e), &e);
                double far =
                    loss_of(logits, id_at(2, s * T + split - 1)) - (double)want[s * T + split - 1];
                assert_true(fabs(far) < 2e-5);
            }
            for (int64_t t = split; t < T; t++) {
                int32_t next[B + 1] = { id_at(1, t), id_at(1, T + t), -1 };
                must(lm_generator_decode(g, next, &logits, &e), &e);
                for (int64_t s = 0; s < B; s++) {
                    double far =
                        loss_of(logits + s * V, id_at(2, s * T + t)) - (double)want[s * T + t];
                    assert_true(fabs(far) < 2e-5);
                }
            }
        }
        lm_generator_free(g);
        runner_free(&r);
        lm_loaded_fini(&w);
        lm_backend_close(b);
        lm_par_free(par);
    }
}

/* An optimiser sees the heads of the encoder's layers, of which there are more than the decoder has. */
static void test_heads(void **state)
{
    static const char *const deep =
        "{\"model_type\":\"t5\",\"vocab_size\":23,\"d_model\":16,\"d_kv\":6,\"d_ff\":20,\"num_"
        "layers\":9,\"num_decoder_layers\":1,\"num_heads\":3,\"dropout_rate\":0}";
    const lm_build build = build_of(LM_MODE_TRAIN, LM_DTYPE_F32);
    lm_update_tensor *t;
    lm_err e = { 0 };
    lm_config c;
    lm_model *m;
    int64_t blocks;
    int n, met = 0;
    (void)state;
    read_config(deep, &c);
    must(lm_model_build(&c, &build, &m, &e), &e);
    must(lm_update_tensors(m, &t, &n, &blocks, &e), &e);
    for (int i = 0; i < n; i++)
        if (t[i].part == LM_PART_Q || t[i].part == LM_PART_K || t[i].part == LM_PART_V) {
            assert_int_equal(t[i].heads, 3);
            assert_int_equal(t[i].head_dim, 6);
            met++;
        }
    assert_int_equal(met, 3 * 10);
    assert_int_equal(blocks, n); /* of tensors smaller than one */
    lm_free(t);
    lm_model_free(m);
    lm_config_fini(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_gradients),
                                        cmocka_unit_test(test_padding),
                                        cmocka_unit_test(test_splits),
                                        cmocka_unit_test(test_heads) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
