/* SPDX-License-Identifier: Apache-2.0 */
/* The block of parameters: fresh, written to a folder, loaded again, refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <unistd.h>

#include "model_run.h"

static const char *const models[2] = {
    "{\"model_type\":\"gpt2\",\"vocab_size\":23,\"n_embd\":16,\"n_layer\":2,\"n_head\":4,"
    "\"n_positions\":16}",
    "{\"model_type\":\"qwen2\",\"vocab_size\":23,\"hidden_size\":16,\"intermediate_size\":70,"
    "\"num_hidden_layers\":2,\"num_attention_heads\":4,\"num_key_value_heads\":2}",
};

typedef struct {
    json_t *json;
    lm_config config;
    lm_model *model;
    float *block;
} fixture;

static void open_fixture(fixture *f, int i)
{
    lm_err e = { 0 };
    lm_build b = {
        .mode = LM_MODE_EVAL, .batch = 1, .seq = 1, .precision = { LM_DTYPE_F32, NULL }
    };
    must(lm_json_parse(models[i], strlen(models[i]), "config", &f->json, &e), &e);
    must(lm_config_read(f->json, "config", &f->config, &e), &e);
    must(lm_model_build(&f->config, &b, &f->model, &e), &e);
    f->block = room((size_t)f->model->block, sizeof *f->block);
    lm_weights_init(f->model, 3, NULL, f->block);
}

static void close_fixture(fixture *f)
{
    lm_free(f->block);
    lm_model_free(f->model);
    lm_config_fini(&f->config);
    json_decref(f->json);
}

/* Only the numbers of parameters: what lies between them is padding. */
static bool same_weights(const lm_model *m, const float *a, const float *b)
{
    for (int i = 0; i < m->n_params; i++)
        if (memcmp(a + m->param[i].offset, b + m->param[i].offset,
                   (size_t)m->param[i].count * sizeof *a))
            return false;
    return true;
}

static void test_init(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        fixture f;
        lm_err e = { 0 };
        lm_par *par;
        open_fixture(&f, i);
        const lm_model *m = f.model;
        float *again = room((size_t)m->block, sizeof *again);
        must(lm_par_new(&par, 3, &e), &e);
        lm_weights_init(m, 3, par, again);
        assert_true(same_weights(m, f.block, again)); /* for any number of threads */
        lm_weights_init(m, 4, par, again);
        assert_false(same_weights(m, f.block, again));
        for (int s = 0; s < m->n_slices; s++) {
            const lm_slice *l = &m->slice[s];
            int64_t n = l->dim[0] * (l->ndim > 1 ? l->dim[1] : 1);
            float *x = room((size_t)n, sizeof *x);
            double sum = 0, squares = 0;
            lm_slice_get(m, s, f.block, x);
            for (int64_t k = 0; k < n; k++) {
                sum += (double)x[k];
                squares += (double)x[k] * (double)x[k];
            }
            if (l->init == LM_INIT_NORMAL) {
                assert_true(fabs(sum / (double)n) < 5 * l->std / sqrt((double)n));
                assert_true(fabs(sqrt(squares / (double)n) / l->std - 1) < 4 / sqrt((double)n));
            } else {
                assert_true(sum == (l->init == LM_INIT_ONES ? (double)n : 0));
            }
            lm_slice_put(m, s, x, again); /* get and put are inverse, transposed or not */
            lm_free(x);
        }
        assert_true(same_weights(m, f.block, again));
        lm_par_free(par);
        lm_free(again);
        close_fixture(&f);
    }
}

/* Write the model to `path`; tensor `drop` is left out, `odd` gets another shape, `ids` is I32, and
 * one of that name is added for `extra`. */
static void write_folder(const fixture *f, const char *path, const char *drop, const char *odd,
                         const char *ids, const char *extra)
{
    lm_err e = { 0 };
    lm_st_plan *plan;
    lm_folder *out;
    must(lm_st_plan_new(&plan, &e), &e);
    for (int i = 0; i < f->model->n_slices; i++) {
        const lm_slice *s = &f->model->slice[i];
        int64_t dim[2] = { s->dim[0], s->dim[1] };
        if (drop && !strcmp(s->name, drop))
            continue;
        dim[0] += odd && !strcmp(s->name, odd);
        must(lm_st_plan_add(plan, s->name,
                            ids && !strcmp(s->name, ids) ? LM_DTYPE_I32 : LM_DTYPE_F32, s->ndim,
                            dim, &e),
             &e);
    }
    if (extra)
        must(lm_st_plan_add(plan, extra, LM_DTYPE_F32, 1, (int64_t[]){ 2 }, &e), &e);
    lm_folder_spec spec = { .config = f->json, .plan = plan };
    must(lm_folder_create(path, true, NULL, &spec, &out, &e), &e);
    if (drop || odd || ids || extra) {
        static const char zeros[1 << 16];
        for (const lm_st_tensor *t; (t = lm_folder_next(out));)
            must(lm_folder_write(out, zeros, t->bytes, &e), &e);
    } else {
        must(lm_weights_write(f->model, f->block, out, &e), &e);
    }
    must(lm_folder_commit(out, &e), &e);
    lm_st_plan_free(plan);
}

static lm_code load(const fixture *f, const char *path, float *block, lm_err *e)
{
    lm_model_source *src;
    must(lm_model_source_open(path, NULL, &src, e), e);
    lm_code rc = lm_weights_load(f->model, src, NULL, block, e);
    lm_model_source_close(src);
    return rc;
}

static void test_folder(void **state)
{
    char path[4096];
    const char *tmp = getenv("TMPDIR");
    (void)state;
    snprintf(path, sizeof path, "%s/lm-weights-%d", tmp ? tmp : "/tmp", (int)getpid());
    for (int i = 0; i < 2; i++) {
        fixture f;
        lm_err e = { 0 };
        open_fixture(&f, i);
        float *again = room((size_t)f.model->block, sizeof *again);
        write_folder(&f, path, NULL, NULL, NULL, NULL);
        must(load(&f, path, again, &e), &e);
        assert_true(same_weights(f.model, f.block, again));

        const char *name = f.model->slice[3].name;
        for (int wrong = 0; wrong < 4; wrong++) {
            e = (lm_err){ 0 };
            write_folder(&f, path, wrong == 0 ? name : NULL, wrong == 1 ? name : NULL,
                         wrong == 2 ? name : NULL, wrong == 3 ? "adapter.weight" : NULL);
            assert_int_equal(load(&f, path, again, &e), LM_EFORMAT);
            assert_non_null(strstr(e.what, wrong == 3 ? "adapter.weight" : name));
        }
        e = (lm_err){ 0 }; /* what checkpoints may carry besides */
        write_folder(&f, path, NULL, NULL, NULL,
                     i ? "model.layers.0.self_attn.rotary_emb.inv_freq"
                       : "transformer.h.0.attn.bias");
        must(load(&f, path, again, &e), &e);
        lm_free(again);
        close_fixture(&f);
    }
    char command[5000];
    snprintf(command, sizeof command, "rm -rf '%s'", path);
    assert_int_equal(system(command), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_init),
                                        cmocka_unit_test(test_folder) };
    return cmocka_run_group_tests_name("model_weights", tests, NULL, NULL);
}
