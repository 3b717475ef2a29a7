/* SPDX-License-Identifier: Apache-2.0 */
/* Training steps as recordings: the same bits as steps with separate launches, and hardly any work
 * for the host.  On the emulated device, or with LM_TEST_CUDA=real on a GPU. */
#include "cuda_train_case.h"

/* ---- a spy between trainer and backend ---- */

/* Numbers of the host's calls so far. */
typedef struct {
    int begun, replays, ranges, kernels, copies, syncs, steps, follows;
} tally;

static struct {
    lm_backend real; /* the original functions */
    tally now, at[STEPS + 1];
    int refuse_begin, refuse_end; /* the n-th of them; 0: none */
    int ended, freed;
} spy;

static lm_code refuse(lm_err *e)
{
    return lm_fail(e, LM_EIO, "spy", NULL, "no recordings today");
}

static lm_code spied_begin(lm_backend *b, lm_stream *s, lm_err *e)
{
    return ++spy.now.begun == spy.refuse_begin ? refuse(e) : spy.real.record_begin(b, s, e);
}

static lm_code spied_end(lm_backend *b, lm_stream *s, lm_recording **out, lm_err *e)
{
    lm_code rc = spy.real.record_end(b, s, out, e);
    if (++spy.ended != spy.refuse_end)
        return rc;
    b->recording_free(b, *out);
    *out = NULL;
    return refuse(e);
}

static void spied_free(lm_backend *b, lm_recording *r)
{
    spy.freed++;
    spy.real.recording_free(b, r);
}

static lm_code spied_replay(lm_backend *b, lm_recording *r, lm_stream *s, lm_err *e)
{
    spy.now.replays++;
    return spy.real.replay(b, r, s, e);
}

static void spied_range(lm_backend *b, const char *name)
{
    spy.now.ranges += name != NULL;
    spy.real.range(b, name);
}

/* Kernels outside of graphs are looked up for each call. */
static const lm_kernel *spied_kernel(lm_backend *b, const char *op, lm_dtype act)
{
    spy.now.kernels++;
    return spy.real.kernel(b, op, act);
}

static lm_code spied_copy(lm_backend *b, void *dst, const void *src, size_t bytes, lm_stream *s,
                          lm_err *e)
{
    spy.now.copies++;
    return spy.real.copy(b, dst, src, bytes, s, e);
}

static lm_code spied_sync(lm_backend *b, lm_stream *s, lm_err *e)
{
    spy.now.syncs++;
    return spy.real.sync(b, s, e);
}

static lm_code spied_step(lm_backend *b, const lm_step *step, lm_stream *s, lm_err *e)
{
    spy.now.steps++;
    return spy.real.step(b, step, s, e);
}

static lm_code spied_follow(lm_backend *b, lm_stream *s, lm_stream *first, lm_err *e)
{
    spy.now.follows++;
    return spy.real.follow(b, s, first, e);
}

static void after(int step)
{
    spy.at[step] = spy.now;
}

static void watch_device(lm_backend *b)
{
    memset(&spy, 0, sizeof spy);
    spy.real = *b;
    b->record_begin = spied_begin;
    b->record_end = spied_end;
    b->replay = spied_replay;
    b->range = spied_range;
    b->kernel = spied_kernel;
    b->copy = spied_copy;
    b->sync = spied_sync;
    b->step = spied_step;
    b->follow = spied_follow;
}

/* A run whose trainer stays open; the original functions are restored. */
static lm_train_result spied_run(const job *j, lm_backend *b, watcher *w, int begin, int end)
{
    watch_device(b);
    spy.refuse_begin = begin;
    spy.refuse_end = end;
    lm_train_result r = train_all(j, b, w);
    *b = spy.real;
    return r;
}

/* The same run with separate launches. */
static void eager_run(const job *j, lm_backend *b, watcher *w)
{
    lm_backend was = *b;
    b->record_begin = NULL;
    train_all(j, b, w);
    *b = was;
}

static void must_be_equal_runs(const watcher *a, const watcher *b)
{
    assert_int_equal(a->steps, b->steps);
    assert_memory_equal(a->loss, b->loss, (size_t)a->steps * sizeof *a->loss);
    must_be_equal(&a->t->s, &b->t->s);
}

/* ---- bits ---- */

static job job_of(int model, lm_dtype dtype, int64_t accumulate, bool sgd)
{
    job j = { .model = &models[model], .o = options(dtype, accumulate, 5), .after = after };
    if (sgd) {
        lm_optim_use use = lm_optim_default(lm_optim_find("sgd"));
        use.hyper[lm_optim_hyper(use.optim, "nesterov")] = 1;
        j.o.groups = lm_groups_of(use);
        j.o.schedule.lr = 0.1;
    }
    return j;
}

static void compare(const job *j, lm_backend *b)
{
    watcher eager, replayed;
    eager_run(j, b, &eager);
    spied_run(j, b, &replayed, 0, 0);
    assert_true(spy.now.replays > 0);
    assert_int_equal(replayed.warnings, 0);
    must_be_equal_runs(&replayed, &eager);
    assert_true(eager.loss[0] != eager.loss[4]);
    lm_trainer_free(eager.t);
    lm_trainer_free(replayed.t);
}

static void replayed_steps_have_the_bits_of_others(void **state)
{
    (void)state;
    for (int v = 0; v < 8; v++) {
        job j =
            job_of(v & 1, v & 2 ? LM_DTYPE_BF16 : LM_DTYPE_F32, v & 4 ? 3 : 1, (v >> 1 ^ v) & 1);
        compare(&j, gpu);
    }
}

static void products_of_a_library_are_recorded_too(void **state)
{
    (void)state;
    lm_backend *tensor = NULL;
    lm_err e = { 0 };
    ok(cuda_open("tensor", true, &tensor, &e), &e);
    for (int accumulate = 1; accumulate <= 3; accumulate += 2) {
        job j = job_of(1, LM_DTYPE_BF16, accumulate, false);
        compare(&j, tensor);
    }
    lm_backend_close(tensor);
}

static void a_resumed_run_has_the_same_bits(void **state)
{
    (void)state;
    lm_err e = { 0 };
    char *run = path_of("recorded"), *step = path_of("recorded/step-000003");
    for (int sgd = 0; sgd < 2; sgd++) {
        watcher whole, first, second;
        job j = job_of(0, LM_DTYPE_BF16, 3, sgd);
        j.o.steps = 6;
        eager_run(&j, gpu, &whole);
        j.run = run;
        j.o.steps = 3;
        train_all(&j, gpu, &first);
        lm_trainer_free(first.t);
        j.run = NULL;
        j.resume = step;
        j.o.steps = 6;
        ok(lm_model_source_open(step, NULL, &j.weights, &e), &e);
        spied_run(&j, gpu, &second, 0, 0);
        assert_true(spy.now.replays > 0);
        assert_int_equal(second.steps, 3);
        must_be_equal(&second.t->s, &whole.t->s);
        lm_trainer_free(second.t);
        lm_trainer_free(whole.t);
        lm_model_source_close(j.weights);
        ok(lm_rm_rf(run, &e), &e);
    }
    lm_free(run);
    lm_free(step);
}

/* ---- between steps ---- */

/* Evaluations use the arena between steps; samples of weights and checkpoints come between the
 * parts of a step. */
static void evaluations_and_checkpoints_between_replays(void **state)
{
    (void)state;
    char *run = path_of("between");
    watcher plain, full;
    job j = job_of(0, LM_DTYPE_BF16, 3, false);
    j.o.steps = 8;
    j.o.log_every = 0;
    eager_run(&j, gpu, &plain);
    j.run = run;
    j.validate = true;
    j.o.log_every = 2;
    j.o.save_every = 3;
    j.o.eval_every = 2;
    j.o.eval_batches = 2;
    train_all(&j, gpu, &full);
    for (int i = 5; i < 8; i++)
        must_take_nothing(&full, i, 4);
    must_be_equal_runs(&full, &plain);
    lm_trainer_free(full.t);
    lm_trainer_free(plain.t);
    lm_free(run);
}

/* A step whose nodes are timed is not replayed; the steps before and after it are. */
static void timed_steps_are_not_replayed(void **state)
{
    (void)state;
    char *path = path_of("recorded.json");
    watcher traced, timed, eager;
    job j = job_of(0, LM_DTYPE_F32, 3, false);
    eager_run(&j, gpu, &eager);
    j.trace = path;
    spied_run(&j, gpu, &traced, 0, 0);
    assert_int_equal(spy.at[1].replays - spy.at[0].replays, 5);
    assert_int_equal(spy.at[2].replays - spy.at[1].replays, 0);
    assert_int_equal(spy.at[3].replays - spy.at[2].replays, 5);
    must_be_equal_runs(&traced, &eager);
    j.trace = NULL;
    j.o.timed = true;
    spied_run(&j, gpu, &timed, 0, 0);
    assert_int_equal(spy.now.begun, 0);
    must_be_equal_runs(&timed, &eager);
    lm_trainer_free(traced.t);
    lm_trainer_free(timed.t);
    lm_trainer_free(eager.t);
    lm_free(path);
}

/* ---- calls of the host ---- */

static void the_host_has_little_to_do(void **state)
{
    (void)state;
    for (int64_t accumulate = 1; accumulate <= 3; accumulate += 2) {
        watcher w;
        job j = job_of(1, LM_DTYPE_BF16, accumulate, false);
        int micro = (int)accumulate;
        j.o.steps = 6;
        j.o.log_every = 0;
        lm_train_result r = spied_run(&j, gpu, &w, 0, 0);
        assert_true(spy.at[0].ranges > 20 && spy.at[0].kernels > 5); /* the spy sees them */
        assert_int_equal(spy.now.begun, accumulate > 1 ? 4 : 3);
        for (int i = 2; i < 6; i++) {
            const tally *a = &spy.at[i - 1], *b = &spy.at[i];
            assert_int_equal(b->begun, a->begun);
            assert_int_equal(b->ranges - a->ranges, micro + 2); /* no node's */
            assert_int_equal(b->kernels, a->kernels);
            assert_int_equal(b->replays - a->replays, micro + 2);
            assert_int_equal(b->steps - a->steps, micro);
            /* each micro-batch in place, and to the device except in the last step; the numbers */
            assert_int_equal(b->copies - a->copies, micro * (i < 5 ? 2 : 1) + 1);
            assert_int_equal(b->syncs - a->syncs, 1);
            assert_int_equal(b->follows - a->follows, 2);
            assert_int_equal(w.calls[i], w.calls[1]);
            must_take_nothing(&w, i, 1);
        }
        must_be_as_planned(&r);
        gpu->recording_free = spied_free;
        lm_trainer_free(w.t);
        *gpu = spy.real;
        assert_int_equal(spy.freed, spy.now.begun);
    }
}

/* ---- refusals ---- */

/* A refused recording gives separate launches, a warning with the reason, and the same bits; it is
 * not tried again. */
static void refused_recordings_are_replaced_by_launches(void **state)
{
    (void)state;
    for (int v = 0; v < 4; v++) {
        watcher eager, refused;
        job j = job_of(0, LM_DTYPE_BF16, 3, false);
        int nth = v < 2 ? 1 : 3;
        size_t before = unused_of(gpu);
        eager_run(&j, gpu, &eager);
        spied_run(&j, gpu, &refused, v & 1 ? nth : 0, v & 1 ? 0 : nth);
        assert_int_equal(refused.warnings, 1);
        assert_non_null(strstr(refused.said, "no recordings today"));
        assert_non_null(strstr(refused.said, gpu->name));
        assert_int_equal(spy.now.begun, nth);
        must_be_equal_runs(&refused, &eager);
        lm_trainer_free(eager.t);
        lm_trainer_free(refused.t);
        all_is_back(before);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(replayed_steps_have_the_bits_of_others),
        cmocka_unit_test(products_of_a_library_are_recorded_too),
        cmocka_unit_test(a_resumed_run_has_the_same_bits),
        cmocka_unit_test(evaluations_and_checkpoints_between_replays),
        cmocka_unit_test(timed_steps_are_not_replayed),
        cmocka_unit_test(the_host_has_little_to_do),
        cmocka_unit_test(refused_recordings_are_replaced_by_launches),
    };
    return cmocka_run_group_tests(tests, begin, end);
}
