/* SPDX-License-Identifier: Apache-2.0 */
/* model_probe -- the driver of test_models.py: runs a model folder on given tokens.
 *
 * model_probe run MODEL BATCH OUT f32|bf16 LEVEL    loss, logits (of a bidirectional model log-probabilities) and all
 *                                                   gradients
 * model_probe train MODEL BATCH OUT f32|bf16 LEVEL  losses of one AdamW step for each batch
 * model_probe copy MODEL OUT                        load, and write the folder again
 * model_probe masks MODEL DATA OUT STEPS BATCH SEQ  tokens and targets that train --objective mlm gives an encoder
 * model_probe pairs MODEL DATA OUT STEPS BATCH SEQ  the same of mlm:next_sentence=on, and types, ends of what rows see, and
 *                                                   labels of pairs [S,B,T], each at the first row
 *
 * BATCH is a safetensors file with I64 `tokens` and `targets` [S,B,T]; targets below 0 are ignored; with an encoder
 * also `source` [S,B,R] and `length` [S,B,1], how many of its rows are real;
 * train: also F32 `adamw` (lr, beta1, beta2, eps, weight_decay).  Modules that predict tokens further on train with
 * the weight 0.3, and the loss holds theirs. */
#include "kernels/optim.h"
#include "model/arch.h"
#include "tests/unit/model_run.h"
#include "text/tokenizer_source.h"
#include "train/feed.h"

typedef struct {
    int64_t steps, batch, seq, source_rows;
    int64_t *tokens, *targets, *source, *length; /* the latter two NULL without an encoder */
    float adamw[5];
} batches;

static int64_t *load_ids(const lm_st *f, const char *name, batches *b, int64_t *rows)
{
    lm_err e = { 0 };
    const lm_st_tensor *t = lm_st_find(f, name);
    if (!t || t->ndim != 3)
        must(lm_fail(&e, LM_EFORMAT, lm_st_path(f), NULL, "no %s [S,B,T]", name), &e);
    b->steps = t->dim[0];
    b->batch = t->dim[1];
    *rows = t->dim[2];
    int64_t *ids = room((size_t)t->count, sizeof *ids);
    must(lm_st_load(f, t, LM_DTYPE_I64, ids, &e), &e);
    return ids;
}

static void load_batches(const char *path, batches *b)
{
    lm_err e = { 0 };
    lm_st *f;
    must(lm_st_open(path, &f, &e), &e);
    int64_t one;
    if (lm_st_find(f, "source")) {
        b->source = load_ids(f, "source", b, &b->source_rows);
        b->length = load_ids(f, "length", b, &one);
    }
    b->tokens = load_ids(f, "tokens", b, &b->seq);
    b->targets = load_ids(f, "targets", b, &b->seq);
    if (lm_st_find(f, "adamw"))
        must(lm_st_load(f, lm_st_find(f, "adamw"), LM_DTYPE_F32, b->adamw, &e), &e);
    lm_st_close(f);
}

/* Feed step s; returns the number of targets that are not ignored. */
static int64_t feed(runner *r, const batches *b, int64_t s)
{
    const lm_model *m = r->model;
    int64_t n = b->batch * b->seq, valid = 0;
    if (b->source)
        runner_source(r, b->source + s * b->batch * b->source_rows, b->length + s * b->batch);
    for (int64_t i = 0; i < n; i++) {
        ids_of(r, m->tokens)[i] = (int32_t)b->tokens[s * n + i];
        if (m->targets == LM_NONE)
            continue;
        ids_of(r, m->targets)[i] = (int32_t)b->targets[s * n + i];
        valid += b->targets[s * n + i] >= 0;
    }
    for (int64_t i = 0; m->scale != LM_NONE && i < n; i++)
        ((float *)r->mem[m->scale])[i] = 1.0f / (float)valid;
    runner_ahead(r, 1.0f / (float)valid);
    return valid;
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

static void save(product *p, const char *path)
{
    lm_err e = { 0 };
    lm_st_writer *w;
    must(lm_st_create(path, true, p->plan, &w, &e), &e);
    for (int i = 0; i < p->n; i++)
        must(lm_st_write(w, p->data[i], (size_t)lm_st_plan_at(p->plan, (size_t)i)->bytes, &e), &e);
    must(lm_st_commit(w, &e), &e);
}

/* The weights of a model folder as the master copy of a store. */
static lm_store *load(const lm_model *m, lm_model_source *src, lm_backend *b)
{
    lm_err e = { 0 };
    lm_store *s;
    must(lm_store_new(m, b, &(lm_store_opts){ .master = true }, &s, &e), &e);
    must(lm_store_load(s, src, &e), &e);
    return s;
}

/* All parameters at their offsets, those without a gradient, too. */
static float *whole_block(const lm_model *m, const lm_store *s)
{
    lm_err e = { 0 };
    float *block = room((size_t)m->block, sizeof *block);
    for (int k = 0; k < s->n_blocks; k++)
        for (int i = 0; s->block[k].role != LM_KEPT_DERIVED && i < m->n_slices; i++)
            if (m->slice[i].by_load && lm_store_has(s, &s->block[k], i))
                must(lm_store_get(s, &s->block[k], i, block + m->param[m->slice[i].param].offset,
                                  &e),
                     &e);
    memcpy(block, lm_store_flat(s, LM_KEPT_PARAM, 0), (size_t)m->train_end * sizeof *block);
    return block;
}

static void run_model(const lm_config *c, lm_model_source *src, lm_build build, lm_cpu_level level,
                      const batches *b, const char *out)
{
    lm_err e = { 0 };
    runner train, speak;
    product p = { 0 };
    build.mode = LM_MODE_TRAIN;
    build.ahead = LM_AHEAD_RUNS;
    build.pairs = LM_PAIRS_LOSS;
    runner_new(&train, c, &build, level, 2);
    build.mode = prediction_mode(c);
    build.ahead = LM_AHEAD_NONE;
    build.pairs = LM_PAIRS_NONE;
    build.cache = build.seq;
    runner_new(&speak, c, &build, level, 2);

    lm_model *m = train.model;
    lm_store *weights = load(m, src, train.backend);
    lm_store *grads;
    must(lm_store_new(m, train.backend, &(lm_store_opts){ .master = true }, &grads, &e), &e);
    float *block = whole_block(m, weights);
    float *g = room((size_t)m->block, sizeof *g);
    float *logits = room((size_t)(b->batch * b->seq * c->vocab), sizeof *logits), loss;
    runner_weights(&train, block);
    /* its parameters are fewer where modules train */
    runner_weights(&speak, whole_block(speak.model, load(speak.model, src, speak.backend)));
    int64_t valid = feed(&train, b, 0);
    feed(&speak, b, 0);
    if (b->source)
        runner_encode(&speak, level, block, b->source, b->length);
    runner_run(&train);
    all_predictions(&speak, logits);
    loss = (float)((loss_sum(&train) + ahead_sum(&train)) / (double)valid);
    if (m->aux != LM_NONE)
        loss += *(const float *)lm_exec_data(train.exec, m->aux);
    grad_block(&train, g);
    memcpy(lm_store_flat(grads, LM_KEPT_PARAM, 0), g, (size_t)m->train_end * sizeof *g);

    must(lm_st_plan_new(&p.plan, &e), &e);
    put(&p, "loss", 1, (int64_t[]){ 1 }, &loss);
    put(&p, "logits", 3, (int64_t[]){ b->batch, b->seq, c->vocab }, logits);
    for (int i = 0; i < m->n_slices; i++) {
        if (!m->slice[i].trains)
            continue;
        float *copy = room((size_t)lm_slice_count(&m->slice[i]), sizeof *copy);
        must(lm_store_get(grads, &grads->block[0], i, copy, &e), &e);
        char name[300];
        snprintf(name, sizeof name, "grad.%s", m->slice[i].name);
        put(&p, name, m->slice[i].ndim, m->slice[i].dim, copy);
    }
    save(&p, out);
}

static void adamw(const runner *r, const lm_adamw_attr *a, int64_t from, int64_t to, float *p,
                  const float *g, float *m1, float *m2)
{
    int64_t n = to - from;
    if (!n)
        return;
    lm_tensor t = { .dtype = LM_DTYPE_F32, .ndim = 1, .dim = { n } }, in = t, o[4] = { t, t, t };
    in.data = (void *)(uintptr_t)(g + from);
    o[0].data = p + from;
    o[1].data = m1 + from;
    o[2].data = m2 + from;
    lm_call c = { .attr = a, .in = &in, .n_in = 1, .out = o, .n_out = 4, .par = r->par };
    const lm_kernel *k = lm_cpu_kernel("adamw", LM_DTYPE_F32, lm_cpu_detect());
    if (k->work)
        c.work = room(k->work(&c, lm_par_threads(r->par)), 1);
    k->run(&c);
    lm_free(c.work);
}

static void train_model(const lm_config *c, lm_model_source *src, lm_build build,
                        lm_cpu_level level, const batches *b, const char *out)
{
    lm_err e = { 0 };
    runner r;
    product p = { 0 };
    build.mode = LM_MODE_TRAIN;
    runner_new(&r, c, &build, level, 2);
    size_t n = (size_t)r.model->block;
    float *block = whole_block(r.model, load(r.model, src, r.backend));
    float *g = room(n, 4), *m1 = room(n, 4), *m2 = room(n, 4);
    float *losses = room((size_t)b->steps, 4);
    lm_adamw_attr a = { .lr = (double)b->adamw[0],
                        .beta1 = (double)b->adamw[1],
                        .beta2 = (double)b->adamw[2],
                        .eps = (double)b->adamw[3] };
    for (int64_t s = 0; s < b->steps; s++) {
        runner_weights(&r, block);
        int64_t valid = feed(&r, b, s);
        r.step.step = s;
        runner_run(&r);
        losses[s] = (float)(loss_sum(&r) / (double)valid);
        grad_block(&r, g);
        a.bc1 = 1 - pow(a.beta1, (double)s + 1);
        a.bc2 = 1 - pow(a.beta2, (double)s + 1);
        a.weight_decay = (double)b->adamw[4];
        adamw(&r, &a, 0, r.model->decay_end, block, g, m1, m2);
        a.weight_decay = 0;
        adamw(&r, &a, r.model->decay_end, r.model->block, block, g, m1, m2);
    }
    must(lm_st_plan_new(&p.plan, &e), &e);
    put(&p, "losses", 1, (int64_t[]){ b->steps }, losses);
    save(&p, out);
}

static void copy_model(const lm_config *c, lm_model_source *src, const char *out)
{
    lm_err e = { 0 };
    lm_build build = {
        .mode = LM_MODE_EVAL,
        .batch = 1,
        .seq = 1,
        .precision = { .low = LM_DTYPE_F32 },
        .ahead = LM_AHEAD_KEPT,
        .pairs = LM_PAIRS_KEPT,
    };
    lm_model *m;
    lm_st_plan *plan;
    lm_folder *f;
    must(lm_model_build(c, &build, &m, &e), &e);
    lm_backend *b;
    must(lm_backend_cpu(lm_cpu_detect(), NULL, &b, &e), &e);
    lm_store *weights = load(m, src, b);
    must(lm_st_plan_new(&plan, &e), &e);
    must(lm_model_plan(m, LM_TENSORS_ALL, LM_DTYPE_F32, plan, &e), &e);
    lm_folder_spec spec = { .config = lm_model_source_config(src), .plan = plan };
    must(lm_folder_create(out, true, NULL, &spec, &f, &e), &e);
    must(lm_store_write(weights, f, &e), &e);
    must(lm_folder_commit(f, &e), &e);
}

static void mask_windows(const lm_config *c, lm_model_source *src, const char *data, bool pairs,
                         const char *out, const int64_t dim[3])
{
    static const char *const name[] = { "tokens", "targets", "types", "ends", "follows" };
    lm_err e = { 0 };
    lm_tokenizer *tok;
    lm_tokens *t;
    lm_feed *f;
    lm_mlm m = { .share = 0.15 };
    const int64_t seq = dim[2], windows = dim[0] * dim[1];
    int64_t *ids[5], valid;
    lm_nsp_ids joins = { 0 };
    int32_t *row = room((size_t)seq * 7, sizeof *row), *types = row + 5 * seq,
            *label = row + 6 * seq;
    must(lm_tokenizer_of(src, &tok, &e), &e);
    must(lm_mlm_init(&m, tok, c->vocab, "masks", &e), &e);
    if (pairs)
        must(lm_nsp_ids_of(tok, c->vocab, "pairs", &joins, &e), &e);
    must(lm_tokens_open(data, LM_TOKENS_AUTO, -1, &t, &e), &e);
    must(lm_tokens_index(t, NULL, &e), &e);
    lm_feed_opts o = { .seq = seq,
                       .documents = true,
                       .shuffle = true,
                       .vocab = c->vocab,
                       .mlm = &m,
                       .nsp = pairs ? &joins : NULL };
    must(lm_feed_new(t, &o, &f, &e), &e);
    for (int k = 0; k < 5; k++)
        ids[k] = room((size_t)(windows * seq), sizeof **ids);
    for (int64_t w = 0; w < windows; w++) {
        int32_t *pos = row + 2 * seq, *lo = row + 3 * seq, *hi = row + 4 * seq;
        if (pairs)
            must(lm_feed_sentences(f, w, row, row + seq, pos, lo, hi, types, label, &valid, &e),
                 &e);
        else
            must(lm_feed_window(f, w, row, row + seq, pos, lo, hi, &valid, &e), &e);
        const int32_t *const of[5] = { row, row + seq, types, hi, label };
        for (int64_t i = 0; i < 5 * seq; i++)
            ids[i / seq][w * seq + i % seq] = of[i / seq][i % seq];
    }
    product p = { 0 };
    must(lm_st_plan_new(&p.plan, &e), &e);
    for (int k = 0; k < (pairs ? 5 : 2); k++) {
        must(lm_st_plan_add(p.plan, name[k], LM_DTYPE_I64, 3, dim, &e), &e);
        p.data[p.n++] = ids[k];
    }
    save(&p, out);
}

int main(int argc, char **argv)
{
    lm_err e = { 0 };
    lm_model_source *src;
    lm_config c;
    batches b = { 0 };
    lm_cpu_level level;
    if (argc < 4)
        return 2;
    must(lm_model_source_open(argv[2], NULL, &src, &e), &e);
    must(lm_config_read(lm_model_source_config(src), "config.json", &c, &e), &e);
    lm_config_see(&c, src);
    if (!strcmp(argv[1], "copy")) {
        copy_model(&c, src, argv[3]);
        return 0;
    }
    const bool pairs = !strcmp(argv[1], "pairs");
    if ((pairs || !strcmp(argv[1], "masks")) && argc == 8) {
        const int64_t dim[3] = { atoll(argv[5]), atoll(argv[6]), atoll(argv[7]) };
        mask_windows(&c, src, argv[3], pairs, argv[4], dim);
        return 0;
    }
    if (argc != 7)
        return 2;
    load_batches(argv[3], &b);
    must(lm_cpu_level_parse(argv[6], &level, &e), &e);
    lm_build build = { .batch = b.batch,
                       .seq = b.seq,
                       .source = b.source_rows,
                       .precision = { .low = lm_dtype_parse(argv[5]) },
                       .routing = { .model = LM_ROUTING_OF_CONFIG } };
    (strcmp(argv[1], "train") ? run_model : train_model)(&c, src, build, level, &b, argv[4]);
    return 0;
}
