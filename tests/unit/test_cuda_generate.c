/* SPDX-License-Identifier: Apache-2.0 */
/* Generation, evaluation and weights on the CUDA backend against the CPU backend: the same tokens
 * for the same draws, the same losses, the same bits of copied data. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>

#include "base/file.h"
#include "base/mem.h"
#include "generate_case.h"
#include "kernels/attention.h"
#include "model/cache_device.h"
#include "model/store.h"
#include "train/score.h"

enum { V = 61, S = 140, SLOTS = 3 };

static const char *const configs[] = {
    "{\"model_type\":\"gpt2\",\"vocab_size\":61,\"n_embd\":24,\"n_layer\":2,\"n_head\":3,"
    "\"n_positions\":150,\"initializer_range\":0.2}",
    "{\"model_type\":\"llama\",\"vocab_size\":61,\"hidden_size\":32,\"intermediate_size\":40,"
    "\"num_hidden_layers\":2,\"num_attention_heads\":4,\"num_key_value_heads\":2,"
    "\"max_position_embeddings\":150,\"initializer_range\":0.2}",
    "{\"model_type\":\"mistral\",\"vocab_size\":61,\"hidden_size\":32,\"intermediate_size\":40,"
    "\"num_hidden_layers\":1,\"num_attention_heads\":4,\"num_key_value_heads\":1,\"head_dim\":12,"
    "\"max_position_embeddings\":150,\"sliding_window\":9,\"initializer_range\":0.2}",
};
enum { N_CONFIGS = sizeof configs / sizeof *configs };

static lm_backend *tensor; /* the tensor-core kernels of the same device */

static int setup(void **state)
{
    open_both(state);
    ok(cuda_open("tensor", true, &tensor, &err));
    return 0;
}

static int teardown(void **state)
{
    lm_backend_close(tensor);
    return close_both(state);
}

/* A synchronous copy between host and device. */
static void move(void *to, const void *from, size_t bytes)
{
    ok(plain->copy(plain, to, from, bytes, plain->main, &err));
    ok(plain->sync(plain, plain->main, &err));
}

static void *take(size_t bytes)
{
    char *p;
    ok(lm_alloc_n(&p, bytes ? bytes : 1, 1, "a test", &err));
    return p;
}

/* ---- the kernel ---- */

typedef struct {
    int64_t batch, seq, heads, kv_heads, dim, room, window;
} shape;

/* Single heads, and groups up to more than a block computes in one pass; head sizes of every path,
 * and ragged ones; caches of one part and of many, full and nearly empty. */
static const shape shapes[] = {
    { 1, 1, 2, 2, 64, 300, 0 },   { 2, 1, 8, 2, 128, 140, 0 },  { 3, 1, 7, 1, 80, 270, 0 },
    { 2, 1, 9, 1, 32, 520, 0 },   { 2, 1, 4, 2, 96, 260, 7 },   { 2, 1, 3, 1, 33, 200, 0 },
    { 1, 1, 2, 1, 264, 150, 0 },  { 2, 1, 2, 1, 256, 129, 0 },  { 3, 1, 4, 4, 8, 60, 0 },
    { 2, 20, 4, 2, 64, 90, 0 },   { 1, 37, 3, 1, 80, 100, 11 }, { 2, 17, 2, 2, 192, 50, 0 },
    { 2, 33, 2, 1, 13, 70, 0 },   { 1, 3, 2, 1, 264, 290, 0 },  { 2, 5, 6, 2, 128, 300, 0 },
    { 1, 131, 2, 1, 64, 300, 0 }, { 1, 70, 1, 1, 16, 140, 33 },
};
enum { N_SHAPES = sizeof shapes / sizeof *shapes };

static lm_tensor shaped(lm_dtype d, int ndim, int64_t a, int64_t b, int64_t c, int64_t e)
{
    return (lm_tensor){ .dtype = d, .ndim = ndim, .dim = { a, b, c, e } };
}

static double distance(lm_dtype d, const void *a, const void *b, int64_t n)
{
    double sum = 0, all = 0;
    for (int64_t i = 0; i < n; i++) {
        double x = lm_get(d, a, i), y = lm_get(d, b, i);
        if (!isfinite(x))
            return INFINITY;
        sum += (x - y) * (x - y);
        all += y * y;
    }
    return sqrt(sum / all);
}

static size_t tensor_bytes(const lm_tensor *t)
{
    return (size_t)lm_tensor_count(t) * lm_dtype_size(t->dtype);
}

static void check_shape(lm_backend *b, const shape *s, lm_dtype act, int k)
{
    int64_t width = (s->heads + 2 * s->kv_heads) * s->dim, rows = s->batch * s->seq;
    const lm_attention_attr a = { .batch = s->batch,
                                  .seq = s->seq,
                                  .heads = s->heads,
                                  .kv_heads = s->kv_heads,
                                  .head_dim = s->dim,
                                  .window = s->window,
                                  .causal = true,
                                  .scale = 0.4 };
    lm_tensor t[6] = { shaped(act, 2, rows, width, 0, 0),
                       shaped(LM_DTYPE_I32, 1, s->batch, 0, 0, 0),
                       shaped(LM_DTYPE_I32, 1, s->batch, 0, 0, 0),
                       shaped(act, 2, rows, s->heads * s->dim, 0, 0),
                       shaped(act, 4, s->batch, s->kv_heads, s->room, s->dim),
                       shaped(act, 4, s->batch, s->kv_heads, s->room, s->dim) };
    lm_tensor on[6];
    lm_rng r = lm_rng_make(9, "test", (uint64_t)k);
    for (int i = 0; i < 6; i++) {
        t[i].data = take(tensor_bytes(&t[i]));
        for (int64_t j = 0; i != 1 && i != 2 && j < lm_tensor_count(&t[i]); j++)
            lm_set(act, t[i].data, j,
                   i == 3 ? NAN : lm_rng_normal(r, (uint64_t)(i * 10000019 + j)));
    }
    for (int64_t i = 0; i < s->batch; i++) { /* full, empty, inactive */
        int32_t *used = t[1].data, *fresh = t[2].data;
        fresh[i] = (int32_t)(i == 2 ? 0 : i ? (s->seq + 1) / 2 : s->seq);
        used[i] = (int32_t)(i == 0 ? s->room - s->seq : i == 2 ? 5 : 0);
    }
    lm_call c = { .attr = &a, .in = t, .n_in = 3, .out = t + 3, .n_out = 3, .par = par };
    memcpy(on, t, sizeof on);
    lm_call d = { .attr = &a, .in = on, .n_in = 3, .out = on + 3, .n_out = 3, .stream = b->main };
    for (int i = 0; i < 6; i++) {
        ok(b->alloc(b, tensor_bytes(&t[i]), "a test", &on[i].data, &err));
        move(on[i].data, t[i].data, tensor_bytes(&t[i]));
    }
    const lm_kernel *want = lm_cpu_kernel("attention_cached", act, LM_CPU_REF);
    const lm_kernel *got = b->kernel(b, "attention_cached", act);
    size_t work = got->work(&d, b->threads);
    c.work = take(want->work(&c, 2));
    if (work)
        ok(b->alloc(b, work, "a test", &d.work, &err));
    want->run(&c);
    got->run(&d);
    ok(b->sync(b, b->main, &err));
    for (int i = 3; i < 6; i++) {
        size_t bytes = tensor_bytes(&t[i]);
        void *back = take(bytes);
        move(back, on[i].data, bytes);
        if (i > 3)
            assert_memory_equal(back, t[i].data, bytes);
        else if (!(distance(act, back, t[i].data, lm_tensor_count(&t[i])) <
                   (act == LM_DTYPE_F32   ? 2e-6
                    : act == LM_DTYPE_F16 ? 2e-3
                                          : 1e-2)))
            fail_msg("shape %d, %s: off by %g", k, lm_dtype_name(act),
                     distance(act, back, t[i].data, lm_tensor_count(&t[i])));
        lm_free(back);
    }
    if (work)
        b->free(b, d.work, work);
    lm_free(c.work);
    for (int i = 0; i < 6; i++) {
        b->free(b, on[i].data, tensor_bytes(&t[i]));
        lm_free(t[i].data);
    }
}

static void attention_in_every_shape(void **state)
{
    const lm_dtype types[3] = { LM_DTYPE_F32, LM_DTYPE_BF16, LM_DTYPE_F16 };
    (void)state;
    for (int k = 0; k < N_SHAPES; k++)
        for (int i = 0; i < 3; i++)
            check_shape(plain, &shapes[k], types[i], k);
}

static void attention_by_tensor_cores(void **state)
{
    const lm_dtype types[2] = { LM_DTYPE_BF16, LM_DTYPE_F16 };
    (void)state;
    for (int k = 0; k < N_SHAPES; k++)
        for (int i = 0; i < 2; i++)
            if (shapes[k].seq > 1)
                check_shape(tensor, &shapes[k], types[i], k);
}

/* ---- models ---- */

static void make(const char *text, lm_dtype type, lm_backend *b, lm_loaded *w)
{
    loaded_of(text, type, par, b, w);
}

/* Compares the results of both backends for the same prompts. */
static void check_tokens(const char *config, const lm_sample_attr *o, int steps)
{
    lm_backend *on[2] = { host, plain };
    const int64_t prompts[SLOTS] = { 100, 9, 1 }; /* in chunks of 64 and 64, 64, and 8 */
    uint32_t ids[S];
    lm_loaded w[2];
    lm_generator *g[2];
    double u[SLOTS];
    const int32_t *next[2];
    const double *logprob[2];
    for (int i = 0; i < S; i++)
        ids[i] = (uint32_t)lm_rng_below(lm_rng_make(1, "test", 0), (uint64_t)i, V);
    for (int k = 0; k < 2; k++) {
        make(config, LM_DTYPE_F32, on[k], &w[k]);
        ok(lm_generator_new(
            &w[k], &(lm_generator_opts){ .dtype = LM_DTYPE_F32, .batch = SLOTS, .context = S },
            on[k], &g[k], &err));
    }
    int32_t now[SLOTS];
    for (int s = 0; s < SLOTS; s++) {
        u[s] = lm_sample_draw(3, s, 0, 0);
        for (int k = 0; k < 2; k++) {
            ok(lm_generator_prompt(g[k], s, ids, prompts[s], NULL, &err));
            ok(lm_generator_choose(g[k], o, u, &next[k], &logprob[k], &err));
        }
        assert_int_equal(next[0][s], next[1][s]);
        assert_true(fabs(logprob[0][s] - logprob[1][s]) < 1e-4);
        now[s] = next[0][s];
    }
    for (int i = 1; i < steps; i++) {
        if (i == 3)
            now[1] = -1; /* inactive from now on */
        for (int s = 0; s < SLOTS; s++)
            u[s] = lm_sample_draw(3, s, 0, i);
        for (int k = 0; k < 2; k++) {
            if (k) { /* the device in one piece, recorded from the second step on */
                ok(lm_generator_next(g[k], now, o, u, &next[k], &logprob[k], &err));
                continue;
            }
            ok(lm_generator_decode(g[k], now, NULL, &err));
            ok(lm_generator_choose(g[k], o, u, &next[k], &logprob[k], &err));
        }
        for (int s = 0; s < SLOTS; s++) {
            if (now[s] < 0)
                continue;
            assert_int_equal(next[0][s], next[1][s]);
            assert_true(fabs(logprob[0][s] - logprob[1][s]) < 1e-4);
            now[s] = next[0][s];
        }
    }
    for (int k = 0; k < 2; k++) {
        assert_int_equal(lm_generator_used(g[k], 0), prompts[0] + steps - 1);
        lm_generator_free(g[k]);
        lm_loaded_fini(&w[k]);
    }
}

static void the_likeliest_tokens_are_the_same(void **state)
{
    const lm_sample_attr o = { 0, 0, 1, 0, 1 };
    (void)state;
    for (int k = 0; k < N_CONFIGS; k++)
        check_tokens(configs[k], &o, 12);
}

static void drawn_tokens_are_the_same(void **state)
{
    const lm_sample_attr o[3] = { { 0.9, 0, 1, 0, 1 },
                                  { 0.8, 12, 0.9, 0, 1.2 },
                                  { 1.1, 0, 0.95, 0.02, 0.9 } };
    (void)state;
    for (int i = 0; i < 3; i++)
        check_tokens(configs[i], &o[i], 8);
}

/* Draw a model and write it to a new folder at `path`. */
static void draw_folder(const char *text, lm_dtype type, const char *path)
{
    const lm_build build = { .mode = LM_MODE_EVAL, .batch = 1, .seq = 1, .precision = { type } };
    lm_config c;
    lm_model *m;
    lm_st_plan *plan;
    lm_folder *f;
    json_t *o;
    ok(lm_json_parse(text, strlen(text), "config", &o, &err));
    ok(lm_config_read(o, "config", &c, &err));
    ok(lm_model_build(&c, &build, &m, &err));
    ok(lm_st_plan_new(&plan, &err));
    ok(lm_model_plan(m, LM_TENSORS_ALL, LM_DTYPE_F32, plan, &err));
    const lm_folder_spec spec = { .config = o, .plan = plan, .max_shard_bytes = 9000 };
    ok(lm_folder_create(path, true, NULL, &spec, &f, &err));
    ok(lm_model_draw(m, 5, par, f, NULL, &err));
    ok(lm_folder_commit(f, &err));
    lm_st_plan_free(plan);
    lm_model_free(m);
    json_decref(o);
}

/* Losses of eval-model, and of a batch that consists mostly of padding. */
static void losses_are_the_same(void **state)
{
    enum { T = 24, N = 61 };
    lm_backend *on[2] = { host, plain };
    char dir[] = "/tmp/lm-test-XXXXXX", path[64];
    uint32_t ids[N];
    (void)state;
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/m", dir);
    for (int i = 0; i < N; i++)
        ids[i] = (uint32_t)lm_rng_below(lm_rng_make(2, "test", 0), (uint64_t)i, V);
    for (int i = 0; i < N_CONFIGS * 2; i++) {
        lm_dtype type = i % 2 ? LM_DTYPE_BF16 : LM_DTYPE_F32;
        lm_score got[2] = { { 0 } };
        draw_folder(configs[i / 2], type, path);
        for (int k = 0; k < 2; k++) {
            const lm_build build = {
                .batch = 2, .seq = T, .documents = true, .precision = { type }
            };
            lm_loaded w;
            lm_evaluator v;
            lm_scorer *s;
            ok(lm_loaded_open(path, NULL, &w, &err));
            ok(lm_evaluator_new(&w.config, &build, on[k], &v, &err));
            ok(lm_loaded_weights(&w, v.model, on[k], &err));
            lm_store_bind(w.store, v.model, v.exec);
            ok(lm_scorer_new(&v, 9, NULL, &s, &err));
            ok(lm_scorer_add(s, ids, N, 1, &got[k], &err));
            ok(lm_scorer_add(s, ids, 7, 1, &got[k], &err));
            ok(lm_scorer_flush(s, &err));
            lm_scorer_free(s);
            lm_evaluator_fini(&v);
            lm_loaded_fini(&w);
        }
        assert_int_equal(got[0].tokens, got[1].tokens);
        assert_true(fabs(got[0].nll - got[1].nll) < (i % 2 ? 5e-3 : 1e-5) * got[0].nll);
    }
    ok(lm_rm_rf(dir, &err));
}

/* ---- weights ---- */

/* All blocks of both stores are equal. */
static void same_store(const lm_store *there, const lm_store *here)
{
    assert_int_equal(there->n_blocks, here->n_blocks);
    for (int k = 0; k < here->n_blocks; k++) {
        const lm_store_block *x = &there->block[k], *y = &here->block[k];
        assert_true(x->role == y->role && x->format == y->format && x->count == y->count);
        assert_true(x->space == LM_SPACE_DEVICE && y->space == LM_SPACE_HOST);
        void *back = take(x->bytes);
        assert_int_equal(x->bytes, y->bytes);
        move(back, x->data, x->bytes);
        assert_memory_equal(back, y->data, x->bytes);
        lm_free(back);
    }
}

static lm_store *store_of(const lm_model *m, lm_backend *b, bool master)
{
    lm_store *s = NULL;
    ok(lm_store_new(m, b, &(lm_store_opts){ .master = master, .par = par }, &s, &err));
    return s;
}

/* Weights read from a folder equal those that the host reads, also when set one by one. */
static void weights_are_loaded(void **state)
{
    char dir[] = "/tmp/lm-test-XXXXXX", path[64];
    (void)state;
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/m", dir);
    for (int k = 0; k < N_CONFIGS; k++) {
        lm_model *m;
        lm_loaded here, there;
        const lm_build build = { .mode = LM_MODE_EVAL,
                                 .batch = 1,
                                 .seq = 1,
                                 .precision = { k ? LM_DTYPE_BF16 : LM_DTYPE_F32 } };
        draw_folder(configs[k], LM_DTYPE_F32, path);
        ok(lm_loaded_open(path, NULL, &here, &err));
        ok(lm_model_build(&here.config, &build, &m, &err));
        ok(lm_loaded_weights(&here, m, host, &err));
        ok(lm_loaded_open(path, NULL, &there, &err));
        ok(lm_loaded_weights(&there, m, plain, &err));
        same_store(there.store, here.store);
        lm_store *put = store_of(m, plain, false), *drawn = store_of(m, plain, false);
        for (int i = 0; i < m->n_slices; i++) {
            float *one = take((size_t)lm_slice_count(&m->slice[i]) * sizeof *one);
            lm_slice_draw(m, i, 5, par, 0, lm_slice_count(&m->slice[i]), one);
            ok(lm_store_put(put, i, LM_DTYPE_F32, one, &err));
            lm_free(one);
        }
        same_store(put, here.store);
        ok(lm_store_draw(drawn, LM_TENSORS_ALL, 5, &err));
        same_store(drawn, here.store);

        lm_store *master = store_of(m, plain, true), *mine = store_of(m, host, true);
        ok(lm_store_load(master, there.src, &err));
        ok(lm_store_draw(mine, LM_TENSORS_ALL, 5, &err));
        lm_store_derive(master);
        lm_store_derive(mine);
        same_store(master, mine);
        for (int i = 0; i < m->n_slices; i++) { /* and copied back in the file's shape */
            size_t bytes = (size_t)lm_slice_count(&m->slice[i]) * sizeof(float);
            float *a = take(bytes), *b = take(bytes);
            ok(lm_store_get(master, &master->block[0], i, a, &err));
            lm_slice_draw(m, i, 5, par, 0, lm_slice_count(&m->slice[i]), b);
            assert_memory_equal(a, b, bytes);
            lm_free(a);
            lm_free(b);
        }
        lm_store_free(put);
        lm_store_free(drawn);
        lm_store_free(master);
        lm_store_free(mine);
        lm_loaded_fini(&there);
        lm_loaded_fini(&here);
        lm_model_free(m);
    }
    ok(lm_rm_rf(dir, &err));
}

/* ---- formats of caches ---- */

/* The arrays of formats are copied to the device; plans without any are taken as they are. */
static void arrays_of_formats(void **state)
{
    float lower[8] = { -1, -2, -3, -4, -5, -6, -7, -8 }, upper[8] = { 1, 2, 3, 4, 5, 6, 7, 8 },
          head[2] = { 0.5f, 2 };
    float got[8];
    lm_kv_format keys = { .name = "ranges", .lower = lower, .upper = upper },
                 values = { .name = "heads", .head = head };
    lm_kv_side side[4] = {
        { .format = &keys, .residual = 64 }, { 0 }, { 0 }, { .format = &values }
    };
    const lm_kv_plan p = { .layers = 2, .page = 64, .side = side };
    lm_layer layer[2] = { { .kv_heads = 2, .head_dim = 4 }, { .kv_heads = 2, .head_dim = 4 } };
    const lm_config c = { .layers = 2, .layer = layer };
    lm_cache_formats f;
    (void)state;
    ok(lm_cache_formats_on(&p, &c, plain, &f, &err));
    const lm_kv_format *k = f.plan->side[0].format, *v = f.plan->side[3].format;
    assert_true(f.plan != &p && k != &keys && k->lower != lower && k->upper != upper &&
                v->head != head);
    assert_true(f.plan->page == 64 && f.plan->side[0].residual == 64 && !f.plan->side[1].format);
    move(got, k->lower, sizeof lower);
    assert_memory_equal(got, lower, sizeof lower);
    move(got, k->upper, sizeof upper);
    assert_memory_equal(got, upper, sizeof upper);
    move(got, v->head, sizeof head);
    assert_memory_equal(got, head, sizeof head);
    lm_cache_formats_fini(&f);
    side[0].format = side[3].format = NULL;
    ok(lm_cache_formats_on(&p, &c, plain, &f, &err));
    assert_ptr_equal(f.plan, &p);
    lm_cache_formats_fini(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(attention_in_every_shape),
        cmocka_unit_test(attention_by_tensor_cores),
        cmocka_unit_test(the_likeliest_tokens_are_the_same),
        cmocka_unit_test(drawn_tokens_are_the_same),
        cmocka_unit_test(losses_are_the_same),
        cmocka_unit_test(weights_are_loaded),
        cmocka_unit_test(arrays_of_formats),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
