/* SPDX-License-Identifier: Apache-2.0 */
/* The trainer as a whole on a tiny model: no allocation inside steps; only the optimiser writes
 * weights and states, while a checkpoint may read them; a checkpoint has the state at its
 * beginning; a failed one leaves no files. */
#include <math.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "train_case.h"

#include "base/rng.h"
#include "train/monitor.h"
#include "train/trainer_impl.h"

static lm_backend *backend;
static tiny_model tiny;

static int begin(void **state)
{
    lm_err e = { 0 };
    (void)state;
    train_begin();
    ok(lm_backend_cpu(lm_cpu_detect(), par, &backend, &e), &e);
    tiny_model_make(&tiny, llama_text, "m0");
    return 0;
}

static int end(void **state)
{
    (void)state;
    tiny_model_fini(&tiny);
    lm_backend_close(backend);
    return train_end();
}

static lm_groups adamw(void)
{
    lm_optim_use u = lm_optim_default(lm_optim_find("adamw"));
    u.hyper[lm_optim_hyper(u.optim, "weight_decay")] = 0;
    return lm_groups_of(u);
}

static lm_trainer_opts options(int64_t steps)
{
    return (lm_trainer_opts){ .batch = 2,
                              .seq = T,
                              .accumulate = 2,
                              .steps = steps,
                              .precision = { .low = LM_DTYPE_BF16 },
                              .documents = true,
                              .dropout = true,
                              .groups = adamw(),
                              .schedule = { .kind = LM_SCHED_CONSTANT, .lr = 1e-2 },
                              .clip_norm = 1,
                              .eval_every = 3,
                              .eval_batches = 2,
                              .log_every = 1 };
}

/* A sink that receives every step, after the optimiser has updated the weights. */
typedef struct {
    lm_sink sink;
    const lm_trainer *trainer;
    int steps;
    uint64_t calls[64];
} watcher;

static void count_allocations(lm_sink *s, const char *what, double done, double total,
                              const char *unit, const char *note)
{
    watcher *w = (watcher *)s;
    (void)done, (void)total, (void)unit, (void)note;
    if (!strcmp(what, "train") && w->steps < 64)
        w->calls[w->steps++] = lm_alloc_count();
}

static lm_trainer_io io_of(watcher *w, const char *run)
{
    return (lm_trainer_io){ .config = &tiny.config,
                            .weights = tiny.source,
                            .train = tokens,
                            .val = tokens,
                            .checkpoint = { .run_dir = run, .config = tiny.json },
                            .sink = &w->sink };
}

static void a_step_allocates_nothing(void **state)
{
    (void)state;
    lm_err e = { 0 };
    watcher w = { .sink = { .progress = count_allocations } };
    lm_trainer_opts o = options(12);
    lm_trainer_io io = io_of(&w, NULL);
    lm_trainer *t = NULL;
    lm_train_result r;
    ok(lm_trainer_new(&o, &io, backend, &t, &e), &e);
    ok(lm_trainer_run(t, &r, &e), &e);
    assert_int_equal(w.steps, 12);
    for (int i = 2; i < 12; i++)
        assert_int_equal(w.calls[i], w.calls[1]); /* evaluations included */
    lm_trainer_free(t);
}

/* ---- weights and states are protected, except during the optimiser ---- */

static struct {
    lm_backend b;
    lm_backend *real;
    lm_kernel adamw;
    lm_kernel_fn run;
    const lm_train_state *s;
    int updates;
} guard;

static void bar(int how)
{
    const lm_train_state *s = guard.s;
    if (!s)
        return;
    for (int k = 0; k < s->store->n_blocks; k++) {
        const lm_store_block *b = &s->store->block[k];
        if (b->role != LM_KEPT_GRAD)
            assert_int_equal(mprotect(b->data, b->bytes, how), 0);
    }
}

static void run_unbarred(const lm_call *c)
{
    bar(PROT_READ | PROT_WRITE);
    guard.run(c);
    bar(PROT_READ);
    guard.updates += guard.s != NULL;
}

static const lm_kernel *find_guarded(lm_backend *b, const char *op, lm_dtype act)
{
    const lm_kernel *k = guard.real->kernel(guard.real, op, act);
    (void)b;
    if (!k || strcmp(op, "adamw"))
        return k;
    guard.adamw = *k;
    guard.run = k->run;
    guard.adamw.run = run_unbarred;
    return &guard.adamw;
}

static void watch_state(lm_sink *s, const char *what, double done, double total, const char *unit,
                        const char *note)
{
    watcher *w = (watcher *)s;
    (void)done, (void)total, (void)unit, (void)note;
    if (!strcmp(what, "train") && !guard.s) {
        guard.s = &w->trainer->s;
        bar(PROT_READ);
    }
}

static lm_code guarded_alloc(lm_backend *b, size_t n, const char *what, void **out, lm_err *e)
{
    (void)b;
    return guard.real->alloc(guard.real, n, what, out, e);
}

static void guarded_free(lm_backend *b, void *p, size_t n)
{
    (void)b;
    guard.real->free(guard.real, p, n);
}

/* A write to a protected page is a fault, which fails the test. */
static void only_the_optimiser_writes(void **state)
{
    (void)state;
    lm_err e = { 0 };
    watcher w = { .sink = { .progress = watch_state } };
    lm_trainer_opts o = options(7);
    char *run = path_of("guarded");
    lm_trainer_io io = io_of(&w, run);
    lm_trainer *t = NULL;
    lm_train_result r;
    o.save_every = 2;
    guard.b = *backend;
    guard.real = backend;
    guard.b.kernel = find_guarded;
    guard.b.alloc = guarded_alloc;
    guard.b.free = guarded_free;
    ok(lm_run_claim(run, -1, false, &e), &e);
    ok(lm_trainer_new(&o, &io, &guard.b, &t, &e), &e);
    w.trainer = t;
    ok(lm_trainer_run(t, &r, &e), &e);
    assert_int_equal(r.step, 7);
    assert_true(guard.updates >= 6);
    bar(PROT_READ | PROT_WRITE);
    lm_trainer_free(t);
    lm_free(run);
}

/* ---- checkpoints ---- */

static void fill(lm_train_state *s, const char *name)
{
    lm_rng r = lm_rng_make(3, name, 0);
    float *param = lm_store_flat(s->store, LM_KEPT_PARAM, 0), *state;
    for (int64_t i = 0; i < s->model->block; i++)
        param[i] = (float)lm_rng_normal(r, (uint64_t)i);
    for (int k = 0; (state = lm_store_flat(s->store, LM_KEPT_OPT, k)); k++)
        for (int64_t i = 0; i < s->model->block; i++)
            state[i] = param[i] + (float)k + 1;
}

static void new_state(lm_program **p, lm_train_state *s)
{
    lm_err e = { 0 };
    const lm_program_opts o = {
        .batch = 1, .seq = T, .precision = { .low = LM_DTYPE_F32 }, .groups = adamw()
    };
    ok(lm_program_new(&o, &tiny.config, false, backend, NULL, p, &e), &e);
    ok(lm_train_state_new(*p, NULL, s, &e), &e);
}

/* After wait_copied the blocks may change without an effect on the checkpoint. */
static void a_checkpoint_has_the_state_at_its_start(void **state)
{
    (void)state;
    lm_err e = { 0 };
    lm_program *m, *m2;
    lm_train_state s, back;
    lm_ckpt *c = NULL;
    lm_model_source *src = NULL;
    char *run = path_of("moment"), *dir = path_of("moment/step-000005");
    lm_ckpt_opts o = { .run_dir = run, .config = tiny.json };
    new_state(&m, &s);
    new_state(&m2, &back);
    fill(&s, "first");
    s.step = 5, s.tokens = 1234, s.sample = 77, s.seconds = 1.25, s.best_loss = 2.5;
    s.bad_evals = 2, s.evaluated = 4;
    ok(lm_mkdir_p(run, &e), &e);
    ok(lm_ckpt_new(&o, &s, &c, &e), &e);
    assert_null(lm_ckpt_last(c));
    ok(lm_ckpt_begin(c, &s, &e), &e);
    ok(lm_ckpt_wait_copied(c, &e), &e);
    fill(&s, "second");
    s.step = 6;
    ok(lm_ckpt_wait(c, &e), &e);
    assert_false(lm_ckpt_busy(c));
    assert_string_equal(lm_ckpt_last(c), dir);
    ok(lm_model_source_open(dir, NULL, &src, &e), &e);
    ok(lm_store_load(back.store, src, &e), &e);
    ok(lm_ckpt_load(dir, &back, &e), &e);
    fill(&s, "first");
    for (int i = 0; i < m->train->n_params; i++) { /* between them lies padding */
        int64_t at = m->train->param[i].offset;
        size_t n = (size_t)m->train->param[i].count * sizeof(float);
        assert_int_equal(s.store->n_blocks, 4);
        for (int k = 0; k < 4; k++) {
            const lm_store_block *x = &back.store->block[k], *y = &s.store->block[k];
            if (x->role != LM_KEPT_GRAD)
                assert_memory_equal((float *)x->data + at, (float *)y->data + at, n);
        }
    }
    assert_int_equal(back.step, 5);
    assert_int_equal(back.tokens, 1234);
    assert_int_equal(back.sample, 77);
    assert_true(back.seconds == 1.25 && back.best_loss == 2.5);
    assert_int_equal(back.bad_evals, 2);
    assert_int_equal(back.evaluated, 4);
    lm_model_source_close(src);
    lm_ckpt_free(c);
    lm_train_state_fini(&s);
    lm_train_state_fini(&back);
    lm_program_free(m);
    lm_program_free(m2);
    lm_free(run);
    lm_free(dir);
}

/* A path that cannot be written: the waits report the failure, once. */
static void a_failed_checkpoint_is_reported(void **state)
{
    (void)state;
    lm_err e = { 0 };
    lm_program *m;
    lm_train_state s;
    lm_ckpt *c = NULL;
    char *run = path_of("train.bin/run"); /* below a file */
    lm_ckpt_opts o = { .run_dir = run, .config = tiny.json };
    new_state(&m, &s);
    ok(lm_ckpt_new(&o, &s, &c, &e), &e);
    ok(lm_ckpt_begin(c, &s, &e), &e);
    lm_code first = lm_ckpt_wait_copied(c, &e), second = lm_ckpt_wait(c, &e);
    assert_true(first == LM_EIO || second == LM_EIO);
    assert_int_equal(e.code, LM_EIO);
    memset(&e, 0, sizeof e);
    assert_int_equal(lm_ckpt_wait(c, &e), LM_OK);
    assert_null(lm_ckpt_last(c));
    lm_ckpt_free(c);
    lm_train_state_fini(&s);
    lm_program_free(m);
    lm_free(run);
}

/* ---- of several ranks ---- */

/* Two writers, as of two ranks that hold the same state. */
typedef struct {
    lm_program *p;
    lm_train_state s;
    lm_ckpt *c[2];
    char *run;
} pair;

static void pair_begin(pair *x, const char *name)
{
    lm_err e = { 0 };
    x->run = path_of(name);
    new_state(&x->p, &x->s);
    fill(&x->s, "first");
    x->s.step = 5;
    ok(lm_mkdir_p(x->run, &e), &e);
    for (int r = 0; r < 2; r++) {
        const lm_ckpt_opts o = { .run_dir = x->run, .config = tiny.json, .rank = r, .ranks = 2 };
        ok(lm_ckpt_new(&o, &x->s, &x->c[r], &e), &e);
    }
    ok(lm_ckpt_begin(x->c[0], &x->s, &e), &e);
    ok(lm_ckpt_wait_part(x->c[0], &e), &e);
}

/* files: that must be in the run. */
static void pair_end(pair *x, size_t files)
{
    lm_err e = { 0 };
    char **names;
    size_t n;
    for (int r = 0; r < 2; r++)
        lm_ckpt_free(x->c[r]);
    ok(lm_dir_list(x->run, &names, &n, &e), &e);
    assert_int_equal(n, files);
    lm_names_free(names, n);
    lm_train_state_fini(&x->s);
    lm_program_free(x->p);
    lm_free(x->run);
}

static void parts_make_a_checkpoint_when_all_are_there(void **state)
{
    (void)state;
    lm_err e = { 0 };
    pair x;
    bool done = false;
    pair_begin(&x, "parts");
    ok(lm_ckpt_join(x.c[1], &x.s, lm_ckpt_made(x.c[0]), &e), &e);
    while (!done)
        ok(lm_ckpt_part(x.c[1], &done, &e), &e);
    assert_true(lm_ckpt_busy(x.c[0])); /* it waits */
    const uint64_t first = lm_ckpt_wrote(x.c[0]), second = lm_ckpt_wrote(x.c[1]);
    assert_true(first > second / 2 && second > first / 2);
    ok(lm_ckpt_all_done(x.c[0], first + second, &e), &e);
    ok(lm_ckpt_wait(x.c[0], &e), &e);
    assert_non_null(lm_ckpt_last(x.c[0]));
    pair_end(&x, 4); /* step-000005, latest, and the links to its two files of the model */
}

static void parts_that_are_missing_make_none(void **state)
{
    (void)state;
    lm_err e = { 0 };
    pair x;
    pair_begin(&x, "missing");
    assert_int_equal(lm_ckpt_all_done(x.c[0], lm_ckpt_wrote(x.c[0]), &e), LM_EBUG);
    memset(&e, 0, sizeof e);
    ok(lm_ckpt_wait(x.c[0], &e), &e);
    assert_null(lm_ckpt_last(x.c[0]));
    pair_end(&x, 0);
    pair_begin(&x, "unknown"); /* a wait without the others is the end of it */
    ok(lm_ckpt_wait(x.c[0], &e), &e);
    assert_null(lm_ckpt_last(x.c[0]));
    ok(lm_ckpt_join(x.c[1], &x.s, lm_ckpt_made(x.c[0]), &e), &e);
    assert_int_equal(lm_ckpt_wait_part(x.c[1], &e), LM_EIO);
    pair_end(&x, 0);
}

static void one_stream_of_parts_is_refused(void **state)
{
    (void)state;
    lm_err e = { 0 };
    lm_program *p;
    lm_train_state s;
    lm_ckpt *c = NULL;
    const lm_ckpt_opts o = { .run_dir = "unused", .lmz = true, .rank = 0, .ranks = 2 };
    new_state(&p, &s);
    p->train->slice[1].cut.ranks = 2;
    assert_int_equal(lm_ckpt_new(&o, &s, &c, &e), LM_EUSAGE);
    assert_null(c);
    lm_train_state_fini(&s);
    lm_program_free(p);
}

/* The nodes of an update that take samples of n parameters and gradients. */
typedef struct {
    lm_update *u;
    lm_exec *x;
    double number[LM_OPTIM_NUMBERS];
} sampler;

static void open_sampler(sampler *s, const lm_monitor *m, float *p, float *g, int64_t n)
{
    lm_optim_use use = lm_optim_default(lm_optim_find("sgd"));
    use.hyper[lm_optim_hyper(use.optim, "momentum")] = 0;
    const lm_update_opts o = { .use = &use,
                               .n_use = 1,
                               .block = n,
                               .trained = n,
                               .sample_stride = lm_monitor_stride(n),
                               .samples = lm_monitor_count(n) };
    const lm_update_tensor t = { .name = "w",
                                 .shape = { .dtype = LM_DTYPE_F32, .ndim = 1, .dim = { n } } };
    lm_err e = { 0 };
    ok(lm_update_build(&o, &t, 1, &s->u, &e), &e);
    ok(lm_exec_new(lm_update_graph(s->u), backend, NULL, 0, &s->x, &e), &e);
    const lm_update_values *v = lm_update_value(s->u);
    lm_exec_bind(s->x, v->param, p);
    lm_exec_bind(s->x, v->grad, g);
    const lm_vid numbers[] = { v->numbers, v->loss, v->sumsq, v->weights };
    for (int i = 0; i < 4; i++)
        lm_exec_bind(s->x, numbers[i], s->number);
    const lm_update_constant *c;
    for (int i = lm_update_constants(s->u, &c); i-- > 0;)
        lm_exec_bind(s->x, c[i].value, c[i].number);
    lm_monitor_bind(m, v, s->x);
}

static void sample(const sampler *s, lm_update_part part)
{
    lm_step step = { 0 };
    size_t first, last;
    lm_err e = { 0 };
    lm_update_part_at(s->u, part, &first, &last);
    ok(lm_exec_run_part(s->x, first, last, NULL, &step, &e), &e);
}

static void close_sampler(sampler *s)
{
    lm_exec_free(s->x);
    lm_update_free(s->u);
}

static void monitors(void **state)
{
    (void)state;
    enum { N = 1001 };
    static float p[N], g[N];
    lm_err e = { 0 };
    lm_monitor *m = NULL;
    lm_monitor_reading r;
    sampler s;
    for (int i = 0; i < N; i++) {
        p[i] = 2;
        g[i] = (float)(i % 2 ? -i : i) * 7 + 0; /* sizes 0, 7, 14 ... in any sign */
    }
    ok(lm_monitor_new(backend, N, &m, &e), &e);
    open_sampler(&s, m, p, g, N);
    sample(&s, LM_UPDATE_BEFORE);
    ok(lm_monitor_before(m, &e), &e);
    for (int i = 0; i < N; i++)
        p[i] += i % 2 ? 0.5f : -0.5f;
    sample(&s, LM_UPDATE_AFTER);
    ok(lm_monitor_after(m, &e), &e);
    close_sampler(&s);
    lm_monitor_read(m, &r);
    assert_true(r.p50 == 3500 && r.p90 == 6300 && r.p99 == 6930 && r.max == 7000);
    assert_true(fabs(r.update_ratio - 0.25) < 1e-12);
    lm_monitor_free(m);
}

/* The sample of a large block is spread over all of it. */
static void monitors_sample(void **state)
{
    (void)state;
    enum { N = 1 << 20 };
    lm_err e = { 0 };
    lm_monitor *m = NULL;
    lm_monitor_reading r;
    sampler s;
    float *p = NULL, *g = NULL;
    ok(lm_alloc_n(&p, N, sizeof *p, "a test", &e), &e);
    ok(lm_alloc_n(&g, N, sizeof *g, "a test", &e), &e);
    for (int i = 0; i < N; i++) {
        p[i] = 1;
        g[i] = (float)((i * INT64_C(7919)) % N); /* every value once, in no order */
    }
    ok(lm_monitor_new(backend, N, &m, &e), &e);
    open_sampler(&s, m, p, g, N);
    sample(&s, LM_UPDATE_BEFORE);
    ok(lm_monitor_before(m, &e), &e);
    sample(&s, LM_UPDATE_AFTER);
    ok(lm_monitor_after(m, &e), &e);
    close_sampler(&s);
    lm_monitor_read(m, &r);
    assert_true(fabs(r.p50 / N - 0.5) < 0.02 && fabs(r.p90 / N - 0.9) < 0.02);
    assert_true(fabs(r.p99 / N - 0.99) < 0.005 && r.max > 0.995 * N);
    assert_true(r.update_ratio == 0);
    lm_monitor_free(m);
    lm_free(p);
    lm_free(g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_step_allocates_nothing),
        cmocka_unit_test(only_the_optimiser_writes),
        cmocka_unit_test(a_checkpoint_has_the_state_at_its_start),
        cmocka_unit_test(a_failed_checkpoint_is_reported),
        cmocka_unit_test(parts_make_a_checkpoint_when_all_are_there),
        cmocka_unit_test(parts_that_are_missing_make_none),
        cmocka_unit_test(one_stream_of_parts_is_refused),
        cmocka_unit_test(monitors),
        cmocka_unit_test(monitors_sample),
    };
    return cmocka_run_group_tests(tests, begin, end);
}
