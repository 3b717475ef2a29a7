/* SPDX-License-Identifier: Apache-2.0 */
/* Training beside frozen weights: in codes as in the numbers that they stand for, to the bit; each stored once;
 * checkpoints hold what trains, and resume to the bit. */
#include <stdio.h>

#include "train_case.h"

#include "numeric/code_rows.h"
#include "train/trainer_impl.h"

/* Rows of 256 numbers, which all formats have blocks for. */
static const char model_text[] =
    "{\"model_type\":\"llama\",\"vocab_size\":64,\"hidden_size\":256,\"intermediate_size\":256,"
    "\"num_hidden_layers\":2,\"num_attention_heads\":4,\"num_key_value_heads\":2,"
    "\"max_position_embeddings\":64,\"rms_norm_eps\":1e-5,\"hidden_act\":\"silu\","
    "\"tie_word_embeddings\":true,\"initializer_range\":0.05,\"rope_theta\":10000.0}";
static const char *const formats[] = { "q8_0", "q4_k", "nf4", "nf4_dq" };
enum { N_FORMATS = sizeof formats / sizeof *formats };

static tiny_model tiny;

static int begin(void **state)
{
    (void)state;
    train_begin();
    tiny_model_make(&tiny, model_text, "m0");
    return 0;
}

static int end(void **state)
{
    (void)state;
    tiny_model_fini(&tiny);
    return train_end();
}

static bool is_norm(void *ctx, const char *tensor)
{
    (void)ctx;
    return strstr(tensor, "norm") != NULL;
}

static bool is_coded(const char *tensor)
{
    return strstr(tensor, "_proj") != NULL || strstr(tensor, "embed_tokens") != NULL;
}

static lm_trainer_opts options(lm_dtype low, const lm_format *f)
{
    return (lm_trainer_opts){ .batch = 2,
                              .seq = T,
                              .accumulate = 2,
                              .steps = 4,
                              .precision = { .low = low },
                              .documents = true,
                              .groups = lm_groups_of(lm_optim_default(lm_optim_find("adamw"))),
                              .schedule = { .kind = LM_SCHED_CONSTANT, .lr = 1e-2 },
                              .clip_norm = 1,
                              .eval_every = 2,
                              .eval_batches = 1,
                              .log_every = 1,
                              .build = {
                                  .trainable = is_norm, .frozen_format = f, .frozen_embed = f } };
}

/* The model whose matrices are the numbers that codes of f stand for. */
static void make_rounded(const lm_format *f, const char *name)
{
    lm_err e = { 0 };
    lm_st_plan *plan = NULL;
    lm_folder *out = NULL;
    char *path = path_of(name);
    ok(lm_st_plan_new(&plan, &e), &e);
    for (size_t i = 0; i < lm_model_source_count(tiny.source); i++)
        ok(lm_st_plan_add_like(plan, lm_model_source_at(tiny.source, i), &e), &e);
    lm_folder_spec spec = { .config = tiny.json, .plan = plan };
    ok(lm_folder_create(path, false, NULL, &spec, &out, &e), &e);
    for (const lm_st_tensor *t; (t = lm_folder_next(out));) {
        float *x = NULL;
        uint8_t *codes = NULL;
        lm_tensor_size size;
        int64_t cols = t->dim[t->ndim - 1], rows = t->count / cols, count = t->count;
        void *plane[LM_MAX_PLANES];
        ok(lm_alloc_n(&x, (size_t)count, sizeof *x, "test", &e), &e);
        ok(lm_model_source_load(tiny.source, lm_model_source_find(tiny.source, t->name),
                                LM_DTYPE_F32, x, &e),
           &e);
        if (is_coded(t->name)) {
            ok(lm_tensor_bytes(f, 2, (int64_t[]){ rows, cols }, &size, &e), &e);
            ok(lm_alloc_n(&codes, size.all, 1, "test", &e), &e);
            for (int p = 0, at = 0; p < f->n_planes; at += (int)size.plane[p++])
                plane[p] = codes + at;
            f->encode(f, x, rows, cols, cols, plane, NULL);
            f->decode(f, (const void *const *)plane, rows, cols, x, cols);
        }
        ok(lm_folder_write_as(out, LM_DTYPE_F32, x, count, &e), &e);
        lm_free(x);
        lm_free(codes);
    }
    ok(lm_folder_commit(out, &e), &e);
    lm_st_plan_free(plan);
    lm_free(path);
}

/* What remains of a run: its losses, and the parameters that trained. */
typedef struct {
    lm_train_result r;
    float *param;
    size_t bytes;
} outcome;

static outcome train(lm_cpu_level level, const lm_trainer_opts *o, lm_trainer_io *io)
{
    lm_err e = { 0 };
    lm_backend *b = NULL;
    lm_trainer *t = NULL;
    outcome x = { 0 };
    io->config = &tiny.config;
    io->train = io->val = tokens;
    ok(lm_backend_cpu(level, par, &b, &e), &e);
    ok(lm_trainer_new(o, io, b, &t, &e), &e);
    ok(lm_trainer_run(t, &x.r, &e), &e);
    const lm_store_block *k = lm_store_find(t->s.store, LM_KEPT_PARAM, 0);
    x.bytes = k->bytes;
    ok(lm_alloc_n(&x.param, x.bytes, 1, "test", &e), &e);
    memcpy(x.param, k->data, x.bytes);
    lm_trainer_free(t);
    lm_backend_close(b);
    return x;
}

static void check_same(outcome *a, outcome *b, const char *what)
{
    if (a->r.loss != b->r.loss || a->r.val_loss != b->r.val_loss || a->bytes != b->bytes ||
        memcmp(a->param, b->param, a->bytes) != 0)
        fail_msg("%s: losses %.9g and %.9g, of validation %.9g and %.9g", what, a->r.loss,
                 b->r.loss, a->r.val_loss, b->r.val_loss);
    lm_free(a->param);
    lm_free(b->param);
}

static void codes_train_as_their_numbers(void **state)
{
    static const lm_dtype types[] = { LM_DTYPE_F32, LM_DTYPE_BF16 };
    (void)state;
    for (int i = 0; i < N_FORMATS; i++) {
        lm_err e = { 0 };
        const lm_format *f = NULL;
        lm_model_source *rounded = NULL;
        char *path = path_of(formats[i]);
        ok(lm_format_find(formats[i], NULL, &f, &e), &e);
        make_rounded(f, formats[i]);
        ok(lm_model_source_open(path, NULL, &rounded, &e), &e);
        for (int k = 0; k < 2; k++)
            for (int level = 0; level <= (int)lm_cpu_detect(); level++) {
                if (level == LM_CPU_REF && (k || i)) /* slow */
                    continue;
                lm_trainer_opts o = options(types[k], f), plain = options(types[k], NULL);
                outcome x =
                    train((lm_cpu_level)level, &o, &(lm_trainer_io){ .weights = tiny.source });
                outcome y =
                    train((lm_cpu_level)level, &plain, &(lm_trainer_io){ .weights = rounded });
                check_same(&x, &y, formats[i]);
            }
        lm_model_source_close(rounded);
        lm_free(path);
    }
}

/* Each frozen weight once, in the format that it is read in: no master copy, gradient or state. */
static void frozen_weights_are_kept_once(void **state)
{
    lm_err e = { 0 };
    const lm_format *nf4 = NULL;
    (void)state;
    ok(lm_format_find("nf4_dq", NULL, &nf4, &e), &e);
    for (int k = 0; k < 2; k++) {
        lm_backend *b = NULL;
        lm_program *p = NULL;
        lm_train_state s;
        const lm_trainer_opts o = options(LM_DTYPE_BF16, k ? nf4 : NULL);
        double want = 0, codes = 0;
        size_t kept[LM_KEPT_ROLES];
        ok(lm_backend_cpu(lm_cpu_detect(), par, &b, &e), &e);
        ok(lm_trainer_program(&o, &tiny.config, true, b, &p, &e), &e);
        ok(lm_train_state_new(p, NULL, &s, &e), &e);
        lm_store_bytes(s.store, kept);
        assert_int_equal(kept[LM_KEPT_PARAM], 5 * 256 * 4);
        assert_int_equal(kept[LM_KEPT_GRAD], 5 * 256 * 4);
        assert_int_equal(kept[LM_KEPT_OPT], 2 * 5 * 256 * 4);
        for (int i = 0; i < p->train->n_slices; i++) {
            const lm_slice *t = &p->train->slice[i];
            double count = (double)lm_slice_count(t);
            if (k && is_coded(t->name))
                codes += count * (0.5 + 1.0 / 64) + (double)t->rows * 8;
            else if (!t->trains)
                want += 2 * count;
        }
        assert_true((double)kept[LM_KEPT_FROZEN] == want + codes);
        lm_train_state_fini(&s);
        lm_program_free(p);
        lm_backend_close(b);
    }
}

/* A checkpoint of two steps, and the rest from there, end as the run of four. */
static void checkpoints_hold_what_trains(void **state)
{
    lm_err e = { 0 };
    const lm_format *f = NULL;
    lm_st *st = NULL;
    char *run = path_of("run"), *at = path_of("run/step-000002");
    char *file = path_of("run/step-000002/adapter_model.safetensors");
    (void)state;
    ok(lm_format_find("nf4", NULL, &f, &e), &e);
    lm_trainer_opts o = options(LM_DTYPE_BF16, f), first = o;
    lm_trainer_io io = { .weights = tiny.source,
                         .checkpoint = { .run_dir = run, .adapter_config = "{}" } };
    first.steps = 2;
    ok(lm_run_claim(run, -1, false, &e), &e);
    lm_free(train(lm_cpu_detect(), &first, &io).param);
    ok(lm_st_open(file, &st, &e), &e);
    assert_int_equal(lm_st_count(st), 5);
    assert_non_null(lm_st_find(st, "base_model.model.model.norm.weight"));
    lm_st_close(st);
    io.resume = at;
    outcome rest = train(lm_cpu_detect(), &o, &io);
    outcome whole = train(lm_cpu_detect(), &o, &(lm_trainer_io){ .weights = tiny.source });
    check_same(&rest, &whole, "resumed");
    lm_free(run);
    lm_free(at);
    lm_free(file);
}

/* States in a mapped file give the same bits, and no memory of the backend is asked for them; a folder that cannot hold
 * them is named. */
static void states_may_be_paged(void **state)
{
    lm_err e = { 0 };
    lm_trainer_opts o = options(LM_DTYPE_BF16, NULL), near = o;
    lm_program *p = NULL;
    lm_backend *b = NULL;
    lm_train_state s;
    (void)state;
    o.states_in = LM_STATES_FILE;
    o.states_dir = folder;
    outcome x = train(lm_cpu_detect(), &o, &(lm_trainer_io){ .weights = tiny.source });
    outcome y = train(lm_cpu_detect(), &near, &(lm_trainer_io){ .weights = tiny.source });
    check_same(&x, &y, "states in a file");
    ok(lm_backend_cpu(lm_cpu_detect(), par, &b, &e), &e);
    ok(lm_trainer_program(&o, &tiny.config, true, b, &p, &e), &e);
    ok(lm_train_state_new(p, NULL, &s, &e), &e);
    assert_int_equal(lm_store_find(s.store, LM_KEPT_OPT, 0)->space, LM_SPACE_FILE);
    assert_int_equal(lm_store_find(s.store, LM_KEPT_GRAD, 0)->space, LM_SPACE_HOST);
    lm_train_state_fini(&s);
    lm_program_free(p);
    o.states_dir = "/nowhere/at/all";
    ok(lm_trainer_program(&o, &tiny.config, true, b, &p, &e), &e);
    assert_int_equal(lm_train_state_new(p, NULL, &s, &e), LM_EIO);
    assert_string_equal(e.where, "/nowhere/at/all");
    lm_train_state_fini(&s);
    lm_program_free(p);
    lm_backend_close(b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(codes_train_as_their_numbers),
        cmocka_unit_test(frozen_weights_are_kept_once),
        cmocka_unit_test(checkpoints_hold_what_trains),
        cmocka_unit_test(states_may_be_paged),
    };
    return cmocka_run_group_tests(tests, begin, end);
}
