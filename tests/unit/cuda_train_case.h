/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_train_case.h -- trainings of tiny models on a device, with measurements at each step. */
#ifndef LM_TESTS_CUDA_TRAIN_CASE_H
#define LM_TESTS_CUDA_TRAIN_CASE_H

#include <math.h>
#include <stdio.h>

#include "train_case.h"

#include "cuda_open.h"
#include "train/trainer_impl.h"

enum { STEPS = 50, BATCH = 2, SEQ = 8 };

static const char gpt2_text[] =
    "{\"model_type\":\"gpt2\",\"vocab_size\":64,\"n_embd\":32,\"n_layer\":2,\"n_head\":2,"
    "\"n_positions\":64,\"embd_pdrop\":0.1,\"attn_pdrop\":0.1,\"resid_pdrop\":0.1}";

static lm_backend *cpu, *gpu;
static tiny_model models[2]; /* GPT-2, Llama */

static inline lm_trainer_opts options(lm_dtype dtype, int64_t accumulate, int64_t steps)
{
    return (lm_trainer_opts){ .batch = BATCH,
                              .seq = SEQ,
                              .accumulate = accumulate,
                              .steps = steps,
                              .precision = { .low = dtype },
                              .documents = true,
                              .dropout = true,
                              .seed = 5,
                              .groups = lm_groups_of(lm_optim_default(lm_optim_find("adamw"))),
                              .schedule = { .kind = LM_SCHED_COSINE,
                                            .lr = 3e-3,
                                            .warmup = 5,
                                            .total = STEPS,
                                            .cycles = 1 },
                              .clip_norm = 1,
                              .log_every = 1 };
}

/* ---- one run with measurements ---- */

typedef struct {
    lm_sink sink; /* first: the sink is cast to this */
    lm_trainer *t;
    void (*after)(int step); /* called after each step; may be NULL */
    int steps, warnings;
    char said[256]; /* the last warning */
    double loss[STEPS + 1];
    uint64_t calls[STEPS + 1]; /* allocations up to each step */
    size_t unused[STEPS + 1];  /* free device memory in bytes */
} watcher;

static inline size_t unused_of(lm_backend *b)
{
    size_t unused, total;
    lm_err e = { 0 };
    ok(b->memory(b, &unused, &total, &e), &e);
    return unused;
}

/* A real driver reserves memory and allocates whole blocks; the emulation does neither. */
static inline void all_is_back(size_t before)
{
    if (!cuda_is_real())
        assert_int_equal(unused_of(gpu), before);
}

static inline void watch(lm_sink *s, const char *what, double done, double total, const char *unit,
                         const char *note)
{
    watcher *w = (watcher *)s;
    (void)done, (void)total, (void)unit, (void)note;
    if (strcmp(what, "train") || w->steps > STEPS)
        return;
    w->loss[w->steps] = w->t->r.loss;
    w->calls[w->steps] = lm_alloc_count();
    w->unused[w->steps] = w->t->b->host_memory ? 0 : unused_of(w->t->b);
    if (w->after)
        w->after(w->steps);
    w->steps++;
}

static inline void listen(lm_sink *s, lm_log_level level, const char *text)
{
    watcher *w = (watcher *)s;
    if (level > LM_LOG_WARN)
        return;
    w->warnings++;
    snprintf(w->said, sizeof w->said, "%s", text);
}

typedef struct {
    const tiny_model *model;
    lm_trainer_opts o;
    lm_model_source *weights; /* NULL: the weights of the tiny model */
    const char *run, *resume, *trace;
    bool validate;
    void (*after)(int step);
} job;

static inline lm_code open_trainer(const job *j, lm_backend *b, watcher *w, lm_err *e)
{
    lm_trainer_io io = { .config = &j->model->config,
                         .par = par,
                         .weights = j->weights ? j->weights : j->model->source,
                         .resume = j->resume,
                         .train = tokens,
                         .val = j->validate ? tokens : NULL,
                         .checkpoint = { .run_dir = j->run, .config = j->model->json },
                         .trace = j->trace,
                         .sink = &w->sink };
    *w = (watcher){ .sink = { .log = listen, .progress = watch }, .after = j->after };
    if (j->run)
        ok(lm_run_claim(j->run, -1, false, e), e);
    return lm_trainer_new(&j->o, &io, b, &w->t, e);
}

static inline lm_train_result train_all(const job *j, lm_backend *b, watcher *w)
{
    lm_err e = { 0 };
    lm_train_result r;
    ok(open_trainer(j, b, w, &e), &e);
    ok(lm_trainer_run(w->t, &r, &e), &e);
    return r;
}

/* Step i allocated no more device memory than step k.  A GPU loads each kernel at its first
 * launch. */
static inline void must_take_nothing(const watcher *w, int i, int k)
{
    if (!cuda_is_real())
        assert_int_equal(w->unused[i], w->unused[k]);
}

static inline void must_be_as_planned(const lm_train_result *r)
{
    if (cuda_is_real())
        return;
    assert_true(r->device_used >= r->device_planned - 1);
    assert_true(r->device_used < r->device_planned + 65536); /* allocations are rounded up */
}

static inline size_t bytes_of(const lm_store_block *k)
{
    return k->bytes;
}

/* A copy of the k-th block of a role on the host; the caller frees it. */
static inline float *fetched(const lm_train_state *s, lm_kept role, int k)
{
    lm_err e = { 0 };
    float *out = NULL;
    lm_backend *b = s->backend;
    const lm_store_block *from = lm_store_find(s->store, role, k);
    ok(lm_alloc_n(&out, bytes_of(from), 1, "a test", &e), &e);
    ok(b->copy(b, out, from->data, bytes_of(from), b->main, &e), &e);
    ok(b->sync(b, NULL, &e), &e);
    return out;
}

/* Compares weights and states. */
static inline void must_be_equal(const lm_train_state *s, const lm_train_state *t)
{
    for (int role = LM_KEPT_PARAM; role <= LM_KEPT_OPT; role += LM_KEPT_OPT - LM_KEPT_PARAM)
        for (int k = 0; lm_store_find(s->store, (lm_kept)role, k); k++) {
            float *a = fetched(s, (lm_kept)role, k), *b = fetched(t, (lm_kept)role, k);
            assert_memory_equal(a, b, bytes_of(lm_store_find(s->store, (lm_kept)role, k)));
            lm_free(a);
            lm_free(b);
        }
}

/* ---- devices and models ---- */

static inline int begin(void **state)
{
    lm_err e = { 0 };
    (void)state;
    train_begin();
    ok(lm_backend_cpu(lm_cpu_detect(), par, &cpu, &e), &e);
    ok(cuda_open(NULL, true, &gpu, &e), &e);
    tiny_model_make(&models[0], gpt2_text, "gpt2");
    tiny_model_make(&models[1], llama_text, "llama");
    return 0;
}

static inline int end(void **state)
{
    (void)state;
    tiny_model_fini(&models[0]);
    tiny_model_fini(&models[1]);
    lm_backend_close(cpu);
    lm_backend_close(gpu);
    return train_end();
}

#endif
