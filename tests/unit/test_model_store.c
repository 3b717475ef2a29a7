/* SPDX-License-Identifier: Apache-2.0 */
/* The store of a model: random weights, written to a folder, loaded again by any number of threads
 * in either format, refused; parts that do not train; parameters of rank 3. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <unistd.h>

#include "base/file.h"
#include "kernels/panels.h"
#include "model/build.h"
#include "model/loaded.h"
#include "model_run.h"
#include "numeric/code_rows.h"

static const char *const models[] = {
    "{\"model_type\":\"gpt2\",\"vocab_size\":23,\"n_embd\":16,\"n_layer\":2,\"n_head\":4,"
    "\"n_positions\":16}",
    "{\"model_type\":\"qwen2\",\"vocab_size\":23,\"hidden_size\":16,\"intermediate_size\":70,"
    "\"num_hidden_layers\":2,\"num_attention_heads\":4,\"num_key_value_heads\":2}",
    /* tensors that are fetched in more than one piece, transposed and not */
    "{\"model_type\":\"gpt2\",\"vocab_size\":700,\"n_embd\":400,\"n_layer\":1,\"n_head\":4,"
    "\"n_positions\":16}",
};
enum { MODELS = sizeof models / sizeof *models };

static char folder[] = "/tmp/test_store.XXXXXX";
static lm_par *three;
static lm_backend *backend[2]; /* of one thread, of three */

typedef struct {
    json_t *json;
    lm_config config;
    lm_model *model; /* for use in F32 */
    lm_store *store; /* its master copy, drawn from seed 3 */
} fixture;

static lm_model *build(const lm_config *c, lm_mode mode, lm_dtype low,
                       bool (*trainable)(void *, const char *))
{
    lm_err e = { 0 };
    lm_model *m;
    lm_build b = {
        .mode = mode, .batch = 1, .seq = 4, .precision = { low, NULL }, .trainable = trainable
    };
    must(lm_model_build(c, &b, &m, &e), &e);
    return m;
}

static lm_store *make(const lm_model *m, int b, const lm_store_opts *o)
{
    lm_err e = { 0 };
    lm_store *s;
    must(lm_store_new(m, backend[b], o, &s, &e), &e);
    return s;
}

static const lm_store_opts master = { .master = true }, use = { 0 };

static void open_fixture(fixture *f, int i)
{
    lm_err e = { 0 };
    must(lm_json_parse(models[i], strlen(models[i]), "config", &f->json, &e), &e);
    must(lm_config_read(f->json, "config", &f->config, &e), &e);
    f->model = build(&f->config, LM_MODE_EVAL, LM_DTYPE_F32, NULL);
    f->store = make(f->model, 0, &master);
    must(lm_store_draw(f->store, LM_TENSORS_ALL, 3, &e), &e);
}

static void close_fixture(fixture *f)
{
    lm_store_free(f->store);
    lm_model_free(f->model);
    lm_config_fini(&f->config);
    json_decref(f->json);
}

static float *tensor_of(const lm_store *s, const lm_store_block *k, int i)
{
    lm_err e = { 0 };
    float *x = room((size_t)lm_slice_count(&s->model->slice[i]), sizeof *x);
    must(lm_store_get(s, k, i, x, &e), &e);
    return x;
}

/* All blocks of one role; padding is zeros in each. */
static bool same(const lm_store *a, const lm_store *b, lm_kept role)
{
    bool equal = true;
    for (int k = 0; equal && lm_store_find(a, role, k); k++) {
        const lm_store_block *x = lm_store_find(a, role, k), *y = lm_store_find(b, role, k);
        equal = x->format == y->format && x->count == y->count && x->bytes == y->bytes &&
                !memcmp(x->data, y->data, x->bytes);
    }
    return equal;
}

/* ---- fresh numbers ---- */

static void check_numbers(const lm_slice *s, const float *x)
{
    double sum = 0, squares = 0, n = (double)lm_slice_count(s);
    for (int64_t k = 0; k < lm_slice_count(s); k++) {
        sum += (double)x[k];
        squares += (double)x[k] * (double)x[k];
    }
    if (s->init == LM_INIT_NORMAL) {
        assert_true(fabs(sum / n) < 5 * s->std / sqrt(n));
        assert_true(fabs(sqrt(squares / n) / s->std - 1) < 4 / sqrt(n));
    } else {
        assert_true(sum == (s->init == LM_INIT_ONES ? n : 0));
    }
}

static void test_draw(void **state)
{
    (void)state;
    for (int i = 0; i < MODELS; i++) {
        fixture f;
        lm_err e = { 0 };
        open_fixture(&f, i);
        lm_store *again = make(f.model, 1, &master);
        must(lm_store_draw(again, LM_TENSORS_ALL, 3, &e), &e); /* for any number of threads */
        assert_true(same(f.store, again, LM_KEPT_PARAM));
        must(lm_store_draw(again, LM_TENSORS_ALL, 4, &e), &e);
        assert_false(same(f.store, again, LM_KEPT_PARAM));
        for (int s = 0; s < f.model->n_slices; s++) {
            float *x = tensor_of(f.store, &f.store->block[0], s);
            check_numbers(&f.model->slice[s], x);
            float *part = room((size_t)lm_slice_count(&f.model->slice[s]), sizeof *part);
            lm_slice_draw(f.model, s, 3, three, 3, 5, part);
            assert_memory_equal(part, x + 3, 5 * sizeof *x); /* in the file's order */
            must(lm_store_put(again, s, LM_DTYPE_F32, x, &e), &e);
            lm_free(part);
            lm_free(x);
        }
        assert_true(same(f.store, again, LM_KEPT_PARAM));
        lm_store_free(again);
        close_fixture(&f);
    }
}

/* ---- folders ---- */

/* Write the model to `path`; tensor `drop` is left out, `odd` gets another shape, `ids` is I32, and
 * one of that name is added for `extra`. */
static void write_folder(const fixture *f, lm_dtype dtype, const char *path, const char *drop,
                         const char *odd, const char *ids, const char *extra)
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
        must(lm_st_plan_add(plan, s->name, ids && !strcmp(s->name, ids) ? LM_DTYPE_I32 : dtype,
                            s->ndim, dim, &e),
             &e);
    }
    const int again = extra ? lm_model_slice(f->model, extra) : -1;
    if (again >= 0) /* a tensor of the model, under its other name */
        must(lm_st_plan_add(plan, extra, dtype, f->model->slice[again].ndim,
                            f->model->slice[again].dim, &e),
             &e);
    else if (extra)
        must(lm_st_plan_add(plan, extra, dtype, 1, (int64_t[]){ 2 }, &e), &e);
    lm_folder_spec spec = { .config = f->json, .plan = plan };
    must(lm_folder_create(path, true, NULL, &spec, &out, &e), &e);
    if (drop || odd || ids || extra) {
        static const char zeros[1 << 16];
        for (const lm_st_tensor *t; (t = lm_folder_next(out));)
            must(lm_folder_write(out, zeros, t->bytes, &e), &e);
    } else {
        must(lm_store_write(f->store, out, &e), &e);
    }
    must(lm_folder_commit(out, &e), &e);
    lm_st_plan_free(plan);
}

static lm_code load(lm_store *s, const char *path, lm_err *e)
{
    lm_model_source *src;
    must(lm_model_source_open(path, NULL, &src, e), e);
    lm_code rc = lm_store_load(s, src, e);
    lm_model_source_close(src);
    return rc;
}

/* The elements of each tensor that is kept are those of the file, transposed as the model requires, in a
 * block of their format. */
static void check_kept(const lm_store *s, const lm_model *m, const lm_model_source *src,
                       lm_dtype dtype)
{
    for (int i = 0; i < m->n_slices; i++) {
        const lm_slice *t = &m->slice[i];
        const lm_store_block *k = &s->block[s->place[i].block];
        const lm_tensor *v = &m->graph->value[m->param[t->param].value].t;
        size_t size = lm_dtype_size(dtype), bytes = (size_t)lm_slice_count(t) * size;
        lm_err e = { 0 };
        assert_int_equal(k->format->element, v->codes ? dtype : v->dtype);
        if (!v->codes)
            continue;
        uint8_t *file = malloc(bytes), *got = malloc(bytes);
        must(lm_model_source_read(src, lm_model_source_find(src, t->name), 0, file, bytes, &e), &e);
        must(lm_store_get(s, k, i, got, &e), &e);
        assert_memory_equal(got, file, bytes);
        const uint8_t *kept = (const uint8_t *)k->data + s->place[i].at;
        assert_memory_equal(kept, file, size);
        if (t->transposed)
            assert_memory_equal(kept + size, file + (size_t)t->dim[1] * size, size);
        free(file);
        free(got);
    }
}

/* Matrices of a folder in fewer bytes than F32 stay as they are, for use on a backend that reads codes, also
 * those that are transposed; vectors and all other tensors are converted. */
static void test_codes(void **state)
{
    static const lm_dtype dtypes[] = { LM_DTYPE_F8E4M3, LM_DTYPE_F16, LM_DTYPE_BF16 };
    char path[64];
    (void)state;
    for (int round = 0; round < 6; round++) {
        int i = round % 2;
        lm_dtype dtype = dtypes[round / 2];
        size_t size = lm_dtype_size(dtype);
        snprintf(path, sizeof path, "%s/codes%d", folder, round);
        fixture f;
        lm_err e = { 0 };
        lm_model_source *src;
        lm_model *m;
        size_t want = 0, numbers = 0, bytes[LM_KEPT_ROLES];
        open_fixture(&f, i);
        write_folder(&f, dtype, path, NULL, NULL, NULL, NULL);
        must(lm_model_source_open(path, NULL, &src, &e), &e);
        const lm_build b = { .mode = LM_MODE_EVAL,
                             .batch = 1,
                             .seq = 4,
                             .precision = { LM_DTYPE_F32, NULL },
                             .backend = backend[0],
                             .codes = src };
        must(lm_model_build(&f.config, &b, &m, &e), &e);
        for (int p = 0; p < m->n_params; p++) {
            const lm_tensor *t = &m->graph->value[m->param[p].value].t;
            size_t n = (size_t)m->param[p].count, room = 0;
            int slices = 0;
            bool kept = t->ndim == 2;
            for (int k = 0; k < m->n_slices; k++)
                if (m->slice[k].param == p) {
                    kept = kept && !strstr(m->slice[k].name, "wpe"); /* looked up beside tokens */
                    room += ((size_t)lm_slice_count(&m->slice[k]) + 63) / 64 * 64 * size;
                    slices++;
                }
            assert_int_equal(t->codes != NULL, kept);
            assert_true(!kept || t->codes->n == slices);
            want += kept ? room : (n + 63) / 64 * 64 * sizeof(float);
            numbers += (n + 63) / 64 * 64 * sizeof(float);
        }
        must(lm_store_outlook(m, &use, bytes, &e), &e);
        assert_int_equal(bytes[LM_KEPT_PARAM], want);
        assert_true(want < numbers);
        lm_store *s = make(m, 0, &use);
        must(lm_store_load(s, src, &e), &e);
        check_kept(s, m, src, dtype);
        lm_store_free(s);
        lm_model_free(m);
        lm_model_source_close(src);
        close_fixture(&f);
    }
}

static void open_loaded(const fixture *f, const char *path, lm_loaded *l)
{
    lm_err e = { 0 };
    *l = (lm_loaded){ .config = f->config }; /* the folder has no config.json */
    must(lm_model_source_open(path, NULL, &l->src, &e), &e);
}

/* After loading: tensors in codes are those of the mapped file, all others are numbers in the store. */
static void check_in_file(const lm_model *m, lm_model_source *src)
{
    lm_err e = { 0 };
    lm_store *s = make(m, 0, &use);
    must(lm_store_load(s, src, &e), &e);
    for (int i = 0; i < m->n_slices; i++) {
        const lm_slice *t = &m->slice[i];
        const lm_st_tensor *file = lm_model_source_find(src, t->name);
        const lm_code_rows *c = m->graph->value[m->param[t->param].value].t.codes;
        bool mapped = false;
        for (int k = 0; c && k < c->n; k++)
            mapped = mapped || c->run[k].data == lm_model_source_data(src, file);
        assert_int_equal(mapped, c != NULL);
        assert_int_equal(s->place[i].block < 0, c != NULL);
        if (c)
            continue;
        float *got = tensor_of(s, &s->block[s->place[i].block], i);
        float *want = room((size_t)file->count, sizeof *want);
        lm_convert(file->dtype, lm_model_source_data(src, file), LM_DTYPE_F32, want, file->count);
        assert_memory_equal(got, want, (size_t)file->count * sizeof *want);
        lm_free(want);
        lm_free(got);
    }
    lm_store_free(s);
}

/* Codes that are read in the mapped file take no memory; automatically only if memory is too small. */
static void test_codes_in_file(void **state)
{
    char path[64];
    fixture f;
    lm_err e = { 0 };
    lm_loaded l;
    lm_model *m;
    bool moved;
    size_t bytes[LM_KEPT_ROLES], numbers = 0, all = 0;
    (void)state;
    snprintf(path, sizeof path, "%s/in-file", folder);
    open_fixture(&f, 1);
    write_folder(&f, LM_DTYPE_F8E4M3, path, NULL, NULL, NULL, NULL);
    open_loaded(&f, path, &l);
    for (size_t k = 0; k < lm_model_source_count(l.src); k++)
        all += lm_model_source_at(l.src, k)->bytes;
    must(lm_loaded_place(&l, LM_PLACE_AUTO, LM_DTYPE_F32, backend[0], all, &moved, &e), &e);
    assert_true(!moved && l.codes_space == LM_SPACE_HOST);
    must(lm_loaded_place(&l, LM_PLACE_MEMORY, LM_DTYPE_F32, backend[0], all - 1, &moved, &e), &e);
    assert_true(!moved && l.codes_space == LM_SPACE_HOST);
    must(lm_loaded_place(&l, LM_PLACE_AUTO, LM_DTYPE_F32, backend[0], all - 1, &moved, &e), &e);
    assert_true(moved && l.codes_space == LM_SPACE_FILE);
    const lm_build b = { .mode = LM_MODE_EVAL,
                         .batch = 1,
                         .seq = 4,
                         .precision = { LM_DTYPE_F32, NULL },
                         .backend = backend[0],
                         .codes = l.src,
                         .codes_space = l.codes_space };
    must(lm_model_build(&f.config, &b, &m, &e), &e);
    for (int p = 0; p < m->n_params; p++) {
        const lm_value *v = &m->graph->value[m->param[p].value];
        assert_int_equal(v->space, v->t.codes ? LM_SPACE_FILE : LM_SPACE_HOST);
        numbers += v->t.codes ? 0 : ((size_t)m->param[p].count + 63) / 64 * 64 * sizeof(float);
        for (int i = 0; v->t.codes && i < v->t.codes->n; i++)
            assert_non_null(v->t.codes->run[i].data); /* before anything is loaded */
    }
    must(lm_store_outlook(m, &use, bytes, &e), &e);
    assert_int_equal(bytes[LM_KEPT_PARAM], numbers);
    check_in_file(m, l.src);
    lm_model_free(m);
    lm_model_source_close(l.src);

    write_folder(&f, LM_DTYPE_BF16, path, NULL, NULL, NULL, NULL);
    open_loaded(&f, path, &l);
    assert_int_equal(lm_loaded_place(&l, LM_PLACE_FILE, LM_DTYPE_BF16, backend[0], 0, &moved, &e),
                     LM_EUSAGE);
    e = (lm_err){ 0 };
    must(lm_loaded_place(&l, LM_PLACE_AUTO, LM_DTYPE_BF16, backend[0], 0, &moved, &e), &e);
    assert_true(!moved && l.codes_space == LM_SPACE_HOST);
    must(lm_loaded_place(&l, LM_PLACE_AUTO, LM_DTYPE_F32, backend[0], 0, &moved, &e), &e);
    assert_true(moved && l.codes_space == LM_SPACE_FILE);
    lm_model_source_close(l.src);
    close_fixture(&f);
}

static void test_refused(void **state)
{
    char path[64];
    (void)state;
    snprintf(path, sizeof path, "%s/refused", folder);
    for (int i = 0; i < 2; i++) {
        fixture f;
        lm_err e = { 0 };
        open_fixture(&f, i);
        lm_store *again = make(f.model, 0, &use);
        const char *name = f.model->slice[3].name;
        for (int wrong = 0; wrong < 4; wrong++) {
            e = (lm_err){ 0 };
            write_folder(&f, LM_DTYPE_F32, path, wrong == 0 ? name : NULL, wrong == 1 ? name : NULL,
                         wrong == 2 ? name : NULL, wrong == 3 ? "adapter.weight" : NULL);
            assert_int_equal(load(again, path, &e), LM_EUSAGE);
            assert_non_null(strstr(e.what, wrong == 3 ? "adapter.weight" : name));
        }
        if (i == 0) { /* GPT-2: a tensor with and without its prefix */
            const char *bare = strncmp(name, "transformer.", 12) ? name : name + 12;
            char other[128];
            snprintf(other, sizeof other, "%s%s", bare == name ? "transformer." : "", bare);
            e = (lm_err){ 0 };
            write_folder(&f, LM_DTYPE_F32, path, NULL, NULL, NULL, other);
            assert_int_equal(load(again, path, &e), LM_EUSAGE);
            assert_non_null(strstr(e.what, "occurs twice"));
        }
        e = (lm_err){ 0 }; /* other tensors that checkpoints may contain */
        write_folder(&f, LM_DTYPE_F32, path, NULL, NULL, NULL,
                     i ? "model.layers.0.self_attn.rotary_emb.inv_freq"
                       : "transformer.h.0.attn.bias");
        must(load(again, path, &e), &e);
        lm_store_free(again);
        close_fixture(&f);
    }
}

/* In F32 and BF16, as a folder and as an .lmz, for training and for use, by one thread and by
 * three. */
static void test_load(void **state)
{
    (void)state;
    for (int i = 0; i < MODELS * 4; i++) {
        fixture f;
        lm_err e = { 0 };
        char path[64];
        bool low = i / MODELS % 2;
        open_fixture(&f, i % MODELS);
        snprintf(path, sizeof path, "%s/m%d%s", folder, i, i / MODELS / 2 ? ".lmz" : "");
        write_folder(&f, low ? LM_DTYPE_BF16 : LM_DTYPE_F32, path, NULL, NULL, NULL, NULL);
        lm_model *m = build(&f.config, LM_MODE_TRAIN, LM_DTYPE_BF16, NULL);
        lm_store *a = make(m, 0, &master), *b = make(m, 1, &master);
        lm_store *c = make(m, 0, &use), *d = make(m, 1, &use);
        lm_store *const all[] = { a, b, c, d };
        for (int k = 0; k < 4; k++)
            must(load(all[k], path, &e), &e);
        lm_store_derive(a);
        lm_store_derive(b);
        assert_true(same(a, b, LM_KEPT_PARAM) && same(a, b, LM_KEPT_DERIVED));
        assert_true(same(c, d, LM_KEPT_PARAM));
        assert_true(low || same(a, f.store, LM_KEPT_PARAM));
        for (int p = 0; p < m->n_params; p++) { /* derived values equal those loaded for use */
            const lm_tensor *t = &m->graph->value[m->param[p].value].t;
            int first = 0;
            while (m->slice[first].param != p || m->slice[first].row != 0)
                first++;
            const lm_store_block *x = &c->block[c->place[first].block];
            const lm_store_block *y =
                lm_store_find(a, t->dtype == LM_DTYPE_BF16 ? LM_KEPT_DERIVED : LM_KEPT_PARAM, 0);
            size_t size = lm_dtype_size(t->dtype);
            assert_int_equal(x->format->element, t->dtype);
            assert_ptr_equal(x->format, y->format);
            assert_memory_equal((char *)x->data + c->place[first].at,
                                (char *)y->data + (size_t)m->param[p].offset * size,
                                (size_t)m->param[p].count * size);
        }
        for (int k = 0; k < 4; k++)
            lm_store_free(all[k]);
        lm_model_free(m);
        close_fixture(&f);
    }
}

/* ---- panels ---- */

static const char square[] =
    "{\"model_type\":\"gpt2\",\"vocab_size\":23,\"n_embd\":64,\"n_layer\":1,"
    "\"n_head\":2,\"n_positions\":16}";
static const char experts[] =
    "{\"model_type\":\"qwen3_moe\",\"vocab_size\":23,\"hidden_size\":64,\"num_hidden_layers\":1,"
    "\"num_attention_heads\":2,\"num_key_value_heads\":1,\"head_dim\":32,\"intermediate_size\":64,"
    "\"moe_intermediate_size\":32,\"num_experts\":3,\"num_experts_per_tok\":2,"
    "\"max_position_embeddings\":16}";

/* A store for use or, with `o` of a master copy, its derived values. */
static lm_store *loaded(const lm_config *c, lm_mode mode, lm_backend *b, const lm_store_opts *o,
                        const char *path, lm_model **m)
{
    lm_err e = { 0 };
    lm_build how = {
        .mode = mode, .batch = 1, .seq = 4, .precision = { LM_DTYPE_BF16, NULL }, .backend = b
    };
    must(lm_model_build(c, &how, m, &e), &e);
    lm_store *s = make(*m, 1, o);
    must(load(s, path, &e), &e);
    lm_store_derive(s);
    return s;
}

/* Panels are not bound to models without panels; a copy of a tensor is in the order of files, as one of `plain`. */
static void check_apart(lm_store *s, const lm_store *plain, const lm_model *generate)
{
    lm_exec *x;
    lm_err e = { 0 };
    must(lm_exec_new(generate->graph, backend[1], NULL, 0, &x, &e), &e);
    lm_store_bind(s, generate, x);
    for (int i = 0; i < s->model->n_slices; i++) {
        const lm_store_block *k = &s->block[s->place[i].block];
        size_t n = (size_t)lm_store_count(s, k, i);
        void *copy = room(n, sizeof(float)), *want = room(n, sizeof(float));
        must(lm_store_get(s, k, i, copy, &e), &e);
        must(lm_store_get(plain, &plain->block[plain->place[i].block], i, want, &e), &e);
        assert_memory_equal(copy, want, n * lm_dtype_size(k->format->element));
        lm_vid v = generate->param[generate->slice[i].param].value;
        assert_int_equal(lm_exec_data(x, v) == NULL, s->place[i].panels);
        lm_free(copy);
        lm_free(want);
    }
    lm_exec_free(x);
}

/* Embeddings and heads, which other operators read. */
static bool is_table(const char *name)
{
    return strstr(name, "wte") || strstr(name, "wpe") || strstr(name, "embed") ||
           strstr(name, "lm_head");
}

static void check_panels(const char *config, int expected)
{
    lm_backend *b = backend[1];
    lm_model *rows, *train, *eval, *generate;
    fixture f = { 0 };
    lm_err e = { 0 };
    char path[64];
    must(lm_json_parse(config, strlen(config), "config", &f.json, &e), &e);
    must(lm_config_read(f.json, "config", &f.config, &e), &e);
    f.model = build(&f.config, LM_MODE_EVAL, LM_DTYPE_F32, NULL);
    f.store = make(f.model, 0, &master);
    must(lm_store_draw(f.store, LM_TENSORS_ALL, 3, &e), &e);
    snprintf(path, sizeof path, "%s/panels-%d", folder, expected);
    write_folder(&f, LM_DTYPE_F32, path, NULL, NULL, NULL, NULL);
    lm_store *plain = loaded(&f.config, LM_MODE_EVAL, NULL, &use, path, &rows);
    lm_store *a = loaded(&f.config, LM_MODE_TRAIN, b, &master, path, &train);
    lm_store *c = loaded(&f.config, LM_MODE_EVAL, b, &use, path, &eval);
    lm_build how = { .mode = LM_MODE_GENERATE,
                     .batch = 1,
                     .seq = 1,
                     .cache = 8,
                     .precision = { LM_DTYPE_BF16, NULL },
                     .backend = b };
    must(lm_model_build(&f.config, &how, &generate, &e), &e);
    int in_panels = 0;
    for (int i = 0; i < rows->n_slices; i++) {
        const lm_tensor *t = &train->graph->value[train->param[train->slice[i].param].value].t;
        const lm_tensor *u = &eval->graph->value[eval->param[eval->slice[i].param].value].t;
        assert_int_equal(t->panels, u->panels);
        assert_false(
            generate->graph->value[generate->param[generate->slice[i].param].value].t.panels);
        if (t->dtype != LM_DTYPE_BF16)
            continue;
        assert_int_equal(t->panels, !is_table(train->slice[i].name));
        const uint16_t *x = (const void *)((const char *)plain->block[plain->place[i].block].data +
                                           plain->place[i].at);
        const uint16_t *y =
            (const void *)((const char *)c->block[c->place[i].block].data + c->place[i].at);
        const uint16_t *z =
            (const uint16_t *)lm_store_flat(a, LM_KEPT_DERIVED, 0) + a->place[i].at / sizeof(float);
        in_panels += t->panels;
        const int64_t count = lm_store_count(c, &c->block[c->place[i].block], i);
        for (int64_t k = 0; k < count; k++) {
            int64_t at = t->panels ? lm_panel_at(k / t->dim[1], k % t->dim[1], t->dim[1]) : k;
            assert_int_equal(x[k], y[at]);
            assert_int_equal(x[k], z[at]);
        }
    }
    assert_int_equal(in_panels, expected);
    check_apart(c, plain, generate);
    lm_store_free(plain), lm_store_free(a), lm_store_free(c);
    lm_model_free(rows), lm_model_free(train), lm_model_free(eval), lm_model_free(generate);
    close_fixture(&f);
}

/* Weights of linear layers, transposed in files or not, and of experts are in panels for training and evaluation; all
 * others, and those for generation, are in the order of rows. */
static void test_panels(void **state)
{
    (void)state;
    if (!backend[1]->panels(backend[1], "linear", 1, LM_DTYPE_BF16))
        skip();
    check_panels(square, 4);
    check_panels(experts, 4 + 3 * 3);
}

/* ---- trained parts ---- */

static bool is_norm(void *ctx, const char *name)
{
    (void)ctx;
    return strstr(name, "ln_") || strstr(name, "norm") || strstr(name, "mlp");
}

static void fill(lm_store *s, lm_kept role, int k)
{
    float *x = lm_store_flat(s, role, k);
    for (int i = 0; i < s->model->n_params; i++)
        for (int64_t n = 0; n < s->model->param[i].count; n++)
            if (s->model->param[i].trains)
                x[s->model->param[i].offset + n] = (float)(i * 1000 + n % 1000 + k);
}

/* A state beside every tensor that trains, in the layout of the parameters. */
static lm_store_state beside(const lm_model *m, const char *name, struct lm_state_part *part)
{
    lm_store_state s = {
        .name = name, .format = LM_DTYPE_F32, .count = m->train_end, .part = part
    };
    for (int i = 0; i < m->n_slices; i++) {
        const lm_slice *t = &m->slice[i];
        const lm_param *p = &m->param[t->param];
        lm_tensor shape = m->graph->value[p->value].t;
        int64_t width = p->count / shape.dim[0];
        shape.dim[0] = t->rows;
        if (p->trains)
            part[s.n_parts++] = (struct lm_state_part){ .tensor = i,
                                                        .at = p->offset + t->row * width,
                                                        .shape = shape,
                                                        .turned = t->transposed };
    }
    return s;
}

static void test_frozen(void **state)
{
    static struct lm_state_part parts[256];
    lm_store_state states[2];
    const lm_store_opts o = { .master = true, .grads = true, .state = states, .n_states = 2 };
    (void)state;
    for (int i = 0; i < 2; i++) {
        fixture f;
        lm_err e = { 0 };
        lm_exec *x;
        lm_bundle *b;
        lm_st *st;
        lm_st_plan *plan;
        lm_folder *out;
        char path[64];
        size_t kept[LM_KEPT_ROLES];
        int64_t trained = 0;
        open_fixture(&f, i);
        lm_model *m = build(&f.config, LM_MODE_TRAIN, LM_DTYPE_BF16, is_norm);
        assert_true(m->n_slices <= 256);
        states[0] = beside(m, "exp_avg", parts);
        states[1] = beside(m, "exp_avg_sq", parts);
        lm_store *s = make(m, 0, &o), *back = make(m, 1, &o);
        for (int p = 0; p < m->n_params; p++) {
            assert_true(m->param[p].trains == (m->grad[p] != LM_NONE));
            assert_true(m->param[p].trains == (m->param[p].offset < m->train_end));
            trained += m->param[p].trains ? (m->param[p].count + 63) / 64 * 64 : 0;
        }
        lm_store_bytes(s, kept);
        assert_int_equal(m->train_end, trained);
        assert_int_equal(kept[LM_KEPT_GRAD], trained * 4);
        assert_int_equal(kept[LM_KEPT_OPT], trained * 8);
        assert_int_equal(kept[LM_KEPT_PARAM], kept[LM_KEPT_GRAD]);
        for (int t = 0; t < m->n_slices; t++) { /* each once */
            bool trains = m->slice[t].trains;
            assert_true(trains == m->param[m->slice[t].param].trains);
            assert_true(trains == lm_store_has(s, lm_store_find(s, LM_KEPT_PARAM, 0), t));
            bool frozen = false;
            for (int k = 0; lm_store_find(s, LM_KEPT_FROZEN, k); k++)
                frozen |= lm_store_has(s, lm_store_find(s, LM_KEPT_FROZEN, k), t);
            assert_true(frozen != trains);
        }
        must(lm_exec_new(m->graph, backend[0], &m->loss, 1, &x, &e), &e);
        lm_store_bind(s, m, x);
        const float *grad = lm_store_flat(s, LM_KEPT_GRAD, 0);
        for (int p = 0; p < m->n_params; p++)
            if (m->param[p].trains)
                assert_ptr_equal(lm_exec_data(x, m->grad[p]), grad + m->param[p].offset);

        fill(s, LM_KEPT_OPT, 0);
        fill(s, LM_KEPT_OPT, 1);
        snprintf(path, sizeof path, "%s/frozen%d", folder, i);
        must(lm_st_plan_new(&plan, &e), &e);
        must(lm_model_plan(m, LM_TENSORS_ALL, LM_DTYPE_F32, plan, &e), &e);
        lm_folder_spec spec = { .config = f.json, .plan = plan };
        must(lm_folder_create(path, false, NULL, &spec, &out, &e), &e);
        must(lm_store_write(s, out, &e), &e);
        must(lm_store_write_states(s, out, &e), &e);
        must(lm_folder_commit(out, &e), &e);
        must(lm_bundle_open(path, NULL, &b, &e), &e);
        must(lm_bundle_st(b, "optimizer.safetensors", &st, &e), &e);
        for (int t = 0; t < m->n_slices; t++) { /* states of trained tensors, and no others */
            char name[200];
            snprintf(name, sizeof name, "exp_avg.%s", m->slice[t].name);
            assert_true(m->param[m->slice[t].param].trains == (lm_st_find(st, name) != NULL));
        }
        must(lm_store_load_states(back, st, &e), &e);
        assert_true(same(s, back, LM_KEPT_OPT));
        lm_st_close(st);
        lm_bundle_close(b);
        lm_st_plan_free(plan);
        lm_exec_free(x);
        lm_store_free(s);
        lm_store_free(back);
        lm_model_free(m);
        close_fixture(&f);
    }
}

/* ---- rank 3 ---- */

/* The weights of 5 experts [5,3,4], stored as two tensors, and a vector after it. */
static void test_rank(void **state)
{
    lm_err e = { 0 };
    lm_model m = { .build = { .mode = LM_MODE_EVAL } };
    lm_builder b = { .m = &m, .e = &e };
    float some[24], others[36], got[36];
    (void)state;
    must(lm_graph_new(&m.graph, &e), &e);
    b.arena = m.graph->arena;
    lm_vid v = lm_b_param(&b, 3, (int64_t[]){ 5, 3, 4 }, "experts");
    lm_b_slice(&b, 2, false, LM_INIT_NORMAL, 0.1, "experts.first");
    lm_b_slice(&b, 3, true, LM_INIT_NORMAL, 0.1, "experts.rest");
    lm_b_param(&b, 1, (int64_t[]){ 6 }, "bias");
    lm_b_slice(&b, 6, false, LM_INIT_ZEROS, 0, "bias");
    must(lm_b_place(&b), &e);
    assert_int_equal(m.graph->value[v].t.ndim, 3);
    assert_int_equal(m.param[0].count, 60);
    assert_true(m.param[0].decay && m.param[1].offset == 64);
    assert_int_equal(lm_model_slice(&m, "experts.rest"), 1);
    assert_int_equal(lm_model_slice(&m, "experts"), -1);
    assert_true(m.slice[1].ndim == 3 && m.slice[1].dim[0] == 3 && m.slice[1].dim[2] == 4);
    for (int i = 0; i < 36; i++) {
        some[i % 24] = (float)(i % 24);
        others[i] = (float)(100 + i);
    }
    lm_store *s = make(&m, 0, &master);
    must(lm_store_put(s, 0, LM_DTYPE_F32, some, &e), &e);
    must(lm_store_put(s, 1, LM_DTYPE_F32, others, &e), &e);
    const float *flat = lm_store_flat(s, LM_KEPT_PARAM, 0);
    assert_memory_equal(flat, some, sizeof some);
    assert_memory_equal(flat + 24, others, sizeof others);
    must(lm_store_get(s, &s->block[0], 1, got, &e), &e);
    assert_memory_equal(got, others, sizeof others);
    lm_store_free(s);
    lm_graph_free(m.graph);
    lm_free(m.param);
    lm_free(m.slice);
    lm_free(m.index);
}

static int begin(void **state)
{
    lm_err e = { 0 };
    (void)state;
    assert_non_null(mkdtemp(folder));
    must(lm_par_new(&three, 3, &e), &e);
    must(lm_backend_cpu(lm_cpu_detect(), NULL, &backend[0], &e), &e);
    must(lm_backend_cpu(lm_cpu_detect(), three, &backend[1], &e), &e);
    return 0;
}

static int end(void **state)
{
    lm_err e = { 0 };
    (void)state;
    lm_backend_close(backend[0]);
    lm_backend_close(backend[1]);
    lm_par_free(three);
    return lm_rm_rf(folder, &e);
}

/* A store on another one has no memory of its own for what both keep likewise, and the same numbers are bound. */
static void test_base(void **state)
{
    (void)state;
    for (int i = 0; i < MODELS; i++) {
        fixture f;
        lm_err e = { 0 };
        lm_exec *x, *y;
        open_fixture(&f, i);
        lm_model *other = build(&f.config, LM_MODE_EVAL, LM_DTYPE_BF16, NULL);
        lm_store *base = make(f.model, 0, &use);
        lm_store *on = make(f.model, 0, &(lm_store_opts){ .base = base });
        lm_store *low = make(other, 0, &(lm_store_opts){ .base = base });
        assert_true(lm_store_borrows(on));
        assert_false(lm_store_borrows(base));
        assert_false(lm_store_borrows(low)); /* matrices are in BF16 there */
        assert_int_equal(on->n_blocks, base->n_blocks);
        must(lm_exec_new(f.model->graph, backend[0], &f.model->loss, 1, &x, &e), &e);
        must(lm_exec_new(f.model->graph, backend[0], &f.model->loss, 1, &y, &e), &e);
        lm_store_bind(base, f.model, x);
        lm_store_bind(on, f.model, y);
        for (int p = 0; p < f.model->n_params; p++)
            assert_ptr_equal(lm_exec_data(x, f.model->param[p].value),
                             lm_exec_data(y, f.model->param[p].value));
        lm_exec_free(x);
        lm_exec_free(y);
        lm_store_free(on);
        lm_store_free(low);
        lm_store_free(base);
        lm_model_free(other);
        close_fixture(&f);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_draw),          cmocka_unit_test(test_codes),
        cmocka_unit_test(test_codes_in_file), cmocka_unit_test(test_refused),
        cmocka_unit_test(test_load),          cmocka_unit_test(test_frozen),
        cmocka_unit_test(test_base),          cmocka_unit_test(test_rank),
        cmocka_unit_test(test_panels),
    };
    return cmocka_run_group_tests_name("model_store", tests, begin, end);
}
