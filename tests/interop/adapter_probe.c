/* SPDX-License-Identifier: Apache-2.0 */
/* adapter_probe -- the driver of test_adapters.py: trains an adapter of a model folder on given tokens, in F32.
 *
 * adapter_probe MODEL CONFIG ADAPTER BATCH OUT LEVEL
 * CONFIG is an adapter_config.json, ADAPTER a safetensors file with its tensors, or a folder of PEFT, of which those that
 * its file lacks are computed; BATCH has I64 `tokens` and
 * `targets` [S,B,T] (targets below 0 are ignored) and F32 `adamw` (lr, beta1, beta2, eps).  OUT receives `losses` [S],
 * the gradients of the first step as grad.NAME, what trained after the last as NAME, and the rows that an encoder then
 * makes as `rows`. */
#include "base/json.h"
#include "model/rotary.h"
#include "tests/unit/model_run.h"
#include "tune/attach.h"
#include "tune/tuning.h"

typedef struct {
    int64_t steps, batch, seq;
    int64_t *tokens, *targets;
    float adamw[4];
} batches;

static int64_t *load_ids(const lm_st *f, const char *name, batches *b)
{
    lm_err e = { 0 };
    const lm_st_tensor *t = lm_st_find(f, name);
    if (!t || t->ndim != 3)
        must(lm_fail(&e, LM_EFORMAT, lm_st_path(f), NULL, "no %s [S,B,T]", name), &e);
    b->steps = t->dim[0];
    b->batch = t->dim[1];
    b->seq = t->dim[2];
    int64_t *ids = room((size_t)t->count, sizeof *ids);
    must(lm_st_load(f, t, LM_DTYPE_I64, ids, &e), &e);
    return ids;
}

static void load_batches(const char *path, batches *b)
{
    lm_err e = { 0 };
    lm_st *f;
    must(lm_st_open(path, &f, &e), &e);
    b->tokens = load_ids(f, "tokens", b);
    b->targets = load_ids(f, "targets", b);
    must(lm_st_load(f, lm_st_find(f, "adamw"), LM_DTYPE_F32, b->adamw, &e), &e);
    lm_st_close(f);
}

typedef struct {
    lm_model *m;
    lm_exec *x;
    lm_store *s;
    int32_t *tokens, *targets, *pos;
    float *scale;
} job;

static void make_job(job *j, const lm_config *c, const lm_attach *a, const batches *b,
                     lm_backend *backend)
{
    lm_err e = { 0 };
    int64_t n = b->batch * b->seq;
    static lm_rotary rope;
    lm_build build = { .mode = LM_MODE_TRAIN,
                       .batch = b->batch,
                       .seq = b->seq,
                       .precision = { .low = LM_DTYPE_F32 },
                       .backend = backend,
                       .adapt = lm_attach_adapt(a),
                       .trainable = lm_attach_trains,
                       .ctx = (void *)(uintptr_t)a };
    must(lm_model_build(c, &build, &j->m, &e), &e);
    must(lm_exec_new(j->m->graph, backend, &j->m->loss, 1, &j->x, &e), &e);
    must(lm_store_new(j->m, backend, &(lm_store_opts){ .master = true, .grads = true }, &j->s, &e),
         &e);
    must(lm_rotary_new(j->m, backend, &rope, &e), &e);
    lm_rotary_bind(&rope, j->m, j->x);
    lm_store_bind(j->s, j->m, j->x);
    lm_exec_bind(j->x, j->m->tokens, j->tokens = room((size_t)n, sizeof *j->tokens));
    lm_exec_bind(j->x, j->m->targets, j->targets = room((size_t)n, sizeof *j->targets));
    lm_exec_bind(j->x, j->m->pos, j->pos = room((size_t)n, sizeof *j->pos));
    lm_exec_bind(j->x, j->m->scale, j->scale = room((size_t)n, sizeof *j->scale));
    for (int64_t i = 0; i < n; i++)
        j->pos[i] = (int32_t)(i % b->seq);
}

/* The mean loss of step s, and its gradients. */
static float run_step(job *j, const batches *b, int64_t s)
{
    lm_err e = { 0 };
    int64_t n = b->batch * b->seq, valid = 0;
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        j->tokens[i] = (int32_t)b->tokens[s * n + i];
        j->targets[i] = (int32_t)b->targets[s * n + i];
        valid += j->targets[i] >= 0;
    }
    for (int64_t i = 0; i < n; i++)
        j->scale[i] = 1.0f / (float)valid;
    must(lm_exec_run(j->x, &(lm_step){ .step = s }, &e), &e);
    const float *loss = lm_exec_data(j->x, j->m->loss);
    for (int64_t i = 0; i < n; i++)
        sum += (double)loss[i];
    return (float)(sum / (double)valid);
}

static void adamw(const job *j, const batches *b, int64_t s, double *m1, double *m2)
{
    float *p = lm_store_flat(j->s, LM_KEPT_PARAM, 0);
    const float *g = lm_store_flat(j->s, LM_KEPT_GRAD, 0);
    double b1 = (double)b->adamw[1], b2 = (double)b->adamw[2];
    double c1 = 1 - pow(b1, (double)s + 1), c2 = 1 - pow(b2, (double)s + 1);
    for (int64_t i = 0; i < j->m->train_end; i++) {
        m1[i] = b1 * m1[i] + (1 - b1) * (double)g[i];
        m2[i] = b2 * m2[i] + (1 - b2) * (double)g[i] * (double)g[i];
        p[i] -=
            (float)((double)b->adamw[0] * m1[i] / c1 / (sqrt(m2[i] / c2) + (double)b->adamw[3]));
    }
}

typedef struct {
    lm_st_plan *plan;
    const void *data[4096];
    int n;
} product;

static void put(product *p, const char *name, int ndim, const int64_t *dim, const void *data)
{
    lm_err e = { 0 };
    must(lm_st_plan_add(p->plan, name, LM_DTYPE_F32, ndim, dim, &e), &e);
    p->data[p->n++] = data;
}

/* Numbers of all that trains in a block. */
static void put_block(product *p, const job *j, lm_kept role, const char *before)
{
    lm_err e = { 0 };
    const lm_store_block *k = lm_store_find(j->s, role, 0);
    for (int i = 0; i < j->m->n_slices; i++) {
        const lm_slice *s = &j->m->slice[i];
        char saved[512], name[600];
        if (!s->trains)
            continue;
        float *copy = room((size_t)lm_slice_count(s), sizeof *copy);
        must(lm_store_get(j->s, k, i, copy, &e), &e);
        snprintf(name, sizeof name, "%s%s", before, lm_model_saved(j->m, i, saved));
        put(p, name, s->ndim, s->dim, copy);
    }
}

/* What the encoder of virtual tokens makes, if there is one. */
static void put_rows(product *p, const job *j)
{
    lm_err e = { 0 };
    int i = lm_model_slice(j->m, "prompt_embeddings");
    const lm_slice *s = &j->m->slice[i < 0 ? 0 : i];
    if (i < 0 || s->trains)
        return;
    float *copy = room((size_t)lm_slice_count(s), sizeof *copy);
    must(lm_store_get(j->s, lm_store_find(j->s, LM_KEPT_FROZEN, 0), i, copy, &e), &e);
    put(p, "rows", s->ndim, s->dim, copy);
}

static void save(product *p, const char *path)
{
    lm_err e = { 0 };
    lm_st_writer *w;
    must(lm_st_create(path, true, p->plan, &w, &e), &e);
    for (int i = 0; i < p->n; i++)
        must(lm_st_write(w, p->data[i], (size_t)lm_st_plan_at(p->plan, (size_t)i)->bytes, &e), &e);
    must(lm_st_commit(w, &e), &e);
}

int main(int argc, char **argv)
{
    lm_err e = { 0 };
    lm_model_source *src;
    lm_config c;
    lm_tuning t;
    lm_bundle *files = NULL;
    lm_par *par;
    lm_backend *backend;
    lm_cpu_level level;
    lm_st *adapter;
    json_t *config;
    batches b = { 0 };
    job j;
    product p = { 0 };
    if (argc != 7)
        return 2;
    must(lm_model_source_open(argv[1], NULL, &src, &e), &e);
    must(lm_config_read(lm_model_source_config(src), "config.json", &c, &e), &e);
    if (lm_path_is_dir(argv[3])) {
        must(lm_tuning_open(argv[3], &(lm_bundle_opts){ 0 }, &files, &adapter, &config, &e), &e);
        json_decref(config);
    } else {
        must(lm_st_open(argv[3], &adapter, &e), &e);
    }
    must(lm_json_load(argv[2], 1 << 20, &config, &e), &e);
    must(lm_tuning_new(config, argv[2], false, src, &c, &t, &e), &e);
    t.base = src;
    t.first = adapter;
    must(lm_tuning_ids(&t, adapter, &e), &e);
    if (files)
        must(lm_tuning_complete(&t, argv[3], &(lm_bundle_opts){ 0 }, src, &e), &e);
    load_batches(argv[4], &b);
    must(lm_cpu_level_parse(argv[6], &level, &e), &e);
    must(lm_par_new(&par, 2, &e), &e);
    must(lm_backend_cpu(level, par, &backend, &e), &e);
    make_job(&j, &c, t.attach, &b, backend);
    must(lm_store_load(j.s, src, &e), &e);
    must(lm_tuning_start(&t, j.s, &e), &e);

    must(lm_st_plan_new(&p.plan, &e), &e);
    float *losses = room((size_t)b.steps, sizeof *losses);
    double *m1 = room((size_t)j.m->train_end, sizeof *m1);
    double *m2 = room((size_t)j.m->train_end, sizeof *m2);
    for (int64_t s = 0; s < b.steps; s++) {
        losses[s] = run_step(&j, &b, s);
        if (s == 0)
            put_block(&p, &j, LM_KEPT_GRAD, "grad.");
        adamw(&j, &b, s, m1, m2);
    }
    put(&p, "losses", 1, &b.steps, losses);
    put_block(&p, &j, LM_KEPT_PARAM, "");
    must(lm_attach_fold(t.attach, j.s, &e), &e);
    put_rows(&p, &j);
    save(&p, argv[5]);
    return 0;
}
