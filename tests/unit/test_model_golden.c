/* SPDX-License-Identifier: Apache-2.0 */
/* Golden vectors of transformers: logits, loss and every gradient of small random models, at each
 * level of this machine.  tests/golden/models/README.md says how they were made. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <dirent.h>

#include "model/arch.h"
#include "model_run.h"

typedef struct {
    lm_st *file;
    const char *name;
    lm_config config;
    int64_t batch, seq, source_rows;
    int64_t *tokens, *targets;
    int64_t *source, *length; /* of an encoder, else NULL */
} golden;

static float *floats(const golden *g, const char *prefix, const char *name)
{
    lm_err e = { 0 };
    char full[300];
    snprintf(full, sizeof full, "%s%s", prefix, name);
    const lm_st_tensor *t = lm_st_find(g->file, full);
    if (!t)
        fail_msg("%s: no tensor %s", g->name, full);
    float *data = room((size_t)t->count, sizeof *data);
    must(lm_st_load(g->file, t, LM_DTYPE_F32, data, &e), &e);
    return data;
}

static int64_t *ids(golden *g, const char *name, int64_t *columns)
{
    lm_err e = { 0 };
    const lm_st_tensor *t = lm_st_find(g->file, name);
    assert_non_null(t);
    assert_int_equal(t->ndim, 2);
    g->batch = t->dim[0];
    *columns = t->dim[1];
    int64_t *data = room((size_t)t->count, sizeof *data);
    must(lm_st_load(g->file, t, LM_DTYPE_I64, data, &e), &e);
    return data;
}

static void feed(const golden *g, runner *r)
{
    int64_t n = g->batch * g->seq, valid = 0;
    if (g->source)
        runner_source(r, g->source, g->length);
    for (int64_t i = 0; i < n; i++) {
        ids_of(r, r->model->tokens)[i] = (int32_t)g->tokens[i];
        if (r->model->targets == LM_NONE)
            continue;
        ids_of(r, r->model->targets)[i] = (int32_t)g->targets[i];
        valid += g->targets[i] >= 0;
    }
    for (int64_t i = 0; r->model->scale != LM_NONE && i < n; i++)
        ((float *)r->mem[r->model->scale])[i] = 1.0f / (float)valid;
    runner_ahead(r, 1.0f / (float)valid);
}

/* Tensor i between its shape in files and a block. */
static void move(const lm_model *m, int i, float *file, float *block, bool in)
{
    const lm_slice *s = &m->slice[i];
    int64_t width = lm_slice_count(s) / s->rows, rows = s->rows / s->stack;
    float *at = block + m->param[s->param].offset + s->row * width;
    for (int64_t r = 0; r < s->rows; r++)
        for (int64_t c = 0; c < width; c++) {
            int64_t turned = r / rows * rows * width + c * rows + r % rows;
            float *x = &file[s->transposed ? turned : r * width + c];
            float *y = &at[r * width + c];
            *(in ? y : x) = *(in ? x : y);
        }
}

static float *weights(const golden *g, const lm_model *m)
{
    float *block = room((size_t)m->block, sizeof *block);
    for (int i = 0; i < m->n_slices; i++) {
        float *w = floats(g, "", m->slice[i].name);
        move(m, i, w, block, true);
        lm_free(w);
    }
    return block;
}

/* Relative L2 error that a run in `low` may have.  A norm behind a branch scales what the branch
 * adds to the residual up to the size of the norm's weight, and its rounding with it.  A state carries the roundings
 * of a row to all later ones: there transformers itself is up to 0.15 away in BF16, and 5e-5 in F32. */
static double allowed(const golden *g, lm_dtype low)
{
    if (lm_config_has_states(&g->config))
        return low == LM_DTYPE_F32 ? 3e-5 : 2e-1;
    return low == LM_DTYPE_F32                                            ? 1e-5
           : g->config.layer[0].norm_after || g->config.layer[0].norm_sum ? 8e-2
                                                                          : 6e-2;
}

/* The norm of the gradient of `name`, a tensor of keys, or of that of queries in its place. */
static double gradient_size(const golden *g, const char *name, const char *of, int64_t n)
{
    char other[300];
    const char *key = strstr(name, "key");
    double sum = 0;
    snprintf(other, sizeof other, "%.*s%s%s", (int)(key - name), name, of, key + strlen("key"));
    float *w = floats(g, "grad.", other);
    for (int64_t i = 0; i < n; i++)
        sum += (double)w[i] * (double)w[i];
    lm_free(w);
    return sqrt(sum);
}

static void check(const golden *g, const char *what, const float *got, const char *name, int64_t n,
                  lm_dtype low, int level)
{
    float *want = floats(g, what, name);
    double d = far_apart(got, want, n), most = allowed(g, low);
    /* Without rotation that gradient is 0 but for roundings, which are compared with that of queries. */
    if (strstr(name, "self.key.bias"))
        d *= gradient_size(g, name, "key", n) / gradient_size(g, name, "query", n);
    /* A bias of keys adds the same number to all scores of a row: its gradient is the remainder
     * when they cancel, and roundings do not cancel. */
    if (strstr(name, "k_proj.bias"))
        most *= 10;
    if (!(d <= most))
        fail_msg("%s %s %s: %s%s: relative error %.2g, allowed %.2g", g->name, lm_dtype_name(low),
                 lm_cpu_level_name((lm_cpu_level)level), what, name, d, most);
    lm_free(want);
}

/* True if the file has the modules that predict tokens further on; its config may count some without. */
static bool has_modules(const golden *g)
{
    bool any = false;
    for (size_t i = 0; i < lm_st_count(g->file) && !any; i++)
        any = lm_ahead_layer(&g->config, lm_st_at(g->file, i)->name) >= 0;
    return any;
}

static void check_training(const golden *g, lm_dtype low, int level)
{
    lm_build b = { .mode = LM_MODE_TRAIN,
                   .batch = g->batch,
                   .seq = g->seq,
                   .source = g->source_rows,
                   .precision = { .low = low },
                   .ahead = has_modules(g) ? LM_AHEAD_RUNS : LM_AHEAD_NONE,
                   .pairs = LM_PAIRS_LOSS };
    runner r;
    runner_new(&r, &g->config, &b, (lm_cpu_level)level, 2);
    const lm_model *m = r.model;
    float *block = weights(g, m), *grads = room((size_t)m->block, sizeof *grads);
    runner_weights(&r, block);
    feed(g, &r);
    runner_run(&r);
    float loss = (float)(loss_sum(&r) + ahead_sum(&r)) * *(float *)r.mem[m->scale];
    if (m->config.pairs)
        loss += *(const float *)lm_exec_data(r.exec, m->aux);
    check(g, "", &loss, "loss", 1, low, level);
    grad_block(&r, grads);
    for (int i = 0; i < m->n_slices; i++) {
        const lm_slice *s = &m->slice[i];
        int64_t n = lm_slice_count(s);
        if (s->by_load)
            continue;
        float *copy = room((size_t)n, sizeof *copy);
        move(m, i, copy, grads, false);
        check(g, "grad.", copy, s->name, n, low, level);
        lm_free(copy);
    }
    lm_free(block);
    lm_free(grads);
    runner_free(&r);
}

static void check_logits(const golden *g, lm_dtype low, int level)
{
    lm_build b = { .mode = prediction_mode(&g->config),
                   .batch = g->batch,
                   .seq = g->seq,
                   .source = g->source_rows,
                   .cache = g->seq,
                   .precision = { .low = low } };
    runner r;
    int64_t n = g->batch * g->seq * g->config.vocab;
    runner_new(&r, &g->config, &b, (lm_cpu_level)level, 2);
    float *block = weights(g, r.model), *logits = room((size_t)n, sizeof *logits);
    runner_weights(&r, block);
    feed(g, &r);
    if (g->source)
        runner_encode(&r, (lm_cpu_level)level, block, g->source, g->length);
    all_predictions(&r, logits);
    check(g, "", logits, "logits", n, low, level);
    lm_free(block);
    lm_free(logits);
    runner_free(&r);
}

static void check_model(const char *path, const char *name)
{
    golden g = { .name = name };
    lm_err e = { 0 };
    json_t *config;
    must(lm_st_open(path, &g.file, &e), &e);
    const char *text = lm_st_meta(g.file, "config");
    assert_non_null(text);
    must(lm_json_parse(text, strlen(text), name, &config, &e), &e);
    must(lm_config_read(config, name, &g.config, &e), &e);
    if (g.config.encoder) {
        int64_t one;
        g.source = ids(&g, "source", &g.source_rows);
        g.length = ids(&g, "length", &one);
        assert_int_equal(one, 1);
    }
    g.tokens = ids(&g, "tokens", &g.seq);
    g.targets = ids(&g, "targets", &g.seq);
    for (int level = 0; level <= (int)lm_cpu_detect(); level++)
        for (int bf16 = 0; bf16 < 2; bf16++) {
            check_training(&g, bf16 ? LM_DTYPE_BF16 : LM_DTYPE_F32, level);
            check_logits(&g, bf16 ? LM_DTYPE_BF16 : LM_DTYPE_F32, level);
        }
    lm_free(g.source);
    lm_free(g.length);
    lm_free(g.tokens);
    lm_free(g.targets);
    lm_config_fini(&g.config);
    json_decref(config);
    lm_st_close(g.file);
}

static void test_all(void **state)
{
    const char *root = getenv("LM_TEST_ROOT");
    char folder[4096], path[8192];
    int n = 0;
    (void)state;
    snprintf(folder, sizeof folder, "%s/tests/golden/models", root ? root : ".");
    DIR *d = opendir(folder);
    assert_non_null(d);
    for (struct dirent *f; (f = readdir(d));) {
        if (!strstr(f->d_name, ".safetensors"))
            continue;
        snprintf(path, sizeof path, "%s/%s", folder, f->d_name);
        check_model(path, f->d_name);
        n++;
    }
    closedir(d);
    assert_true(n >= 32);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_all) };
    return cmocka_run_group_tests_name("model_golden", tests, NULL, NULL);
}
