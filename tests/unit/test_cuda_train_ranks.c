/* SPDX-License-Identifier: Apache-2.0 */
/* Trainings that several devices share: the bits of one device for the same leaves, and ranks that fail.  On emulated devices, or
 * with LM_TEST_CUDA=real on GPUs. */
#include "cuda_train_case.h"

#include "cuda_ranks.h"

enum { RUN = 4 };

/* With more gradients than one sum takes. */
static const char wide_text[] =
    "{\"model_type\":\"llama\",\"vocab_size\":64,\"hidden_size\":128,\"intermediate_size\":256,"
    "\"num_hidden_layers\":2,\"num_attention_heads\":2,\"num_key_value_heads\":1,"
    "\"max_position_embeddings\":64,\"rms_norm_eps\":1e-5,\"initializer_range\":0.02}";
static tiny_model wide;

static int begin_ranks(void **state)
{
    const int failed = begin(state);
    tiny_model_make(&wide, wide_text, "wide");
    return failed;
}

static int end_ranks(void **state)
{
    tiny_model_fini(&wide);
    return end(state);
}

/* What remains of a run: the weights of rank 0, its losses, and its trainer, which outlives the ranks. */
typedef struct {
    lm_trainer *t;
    lm_train_result r;
    watcher w;
} outcome;

static lm_trainer_opts shared(int64_t accumulate, int64_t leaves, int ranks)
{
    lm_trainer_opts o = options(LM_DTYPE_F32, accumulate, RUN);
    o.leaves = leaves;
    o.mesh = (lm_mesh){ .size = { ranks } };
    o.eval_every = 2;
    return o;
}

static lm_code try_train(const lm_trainer_opts *o, const tiny_model *m, outcome *x, lm_err *e)
{
    const lm_trainer_io io = { .config = &m->config,
                               .par = par,
                               .weights = m->source,
                               .train = tokens,
                               .val = tokens,
                               .sink = &x->w.sink };
    *x = (outcome){ .w.sink = { .log = listen } };
    return lm_trainer_train(o, &io, gpu, NULL, NULL, &x->t, &x->r, e);
}

static void check_same(const outcome *a, const outcome *b)
{
    assert_memory_equal(&a->r.loss, &b->r.loss, sizeof a->r.loss);
    assert_memory_equal(&a->r.val_loss, &b->r.val_loss, sizeof a->r.val_loss);
    assert_memory_equal(&a->t->last.norm, &b->t->last.norm, sizeof a->t->last.norm);
    must_be_equal(&a->t->s, &b->t->s);
}

/* Runs on the numbers of devices (0 at the end) have the bits of one. */
static void check_devices(const tiny_model *m, lm_trainer_opts o, const int *ranks)
{
    lm_err e = { 0 };
    outcome one, many;
    o.mesh.size[LM_AXIS_DP] = 1;
    ok(try_train(&o, m, &one, &e), &e);
    assert_true(isfinite(one.r.loss) && isfinite(one.r.val_loss));
    for (; *ranks && cuda_has(*ranks - 1); ranks++) {
        o.mesh.size[LM_AXIS_DP] = *ranks;
        ok(try_train(&o, m, &many, &e), &e);
        assert_int_equal(many.w.warnings, 0);
        check_same(&one, &many);
        lm_trainer_free(many.t);
    }
    lm_trainer_free(one.t);
}

static void devices_do_not_change_bits(void **state)
{
    lm_trainer_opts o = shared(4, 4, 1);
    (void)state;
    check_devices(&models[0], o, (int[]){ 4, 0 });
    check_devices(&models[1], o, (int[]){ 2, 0 });
    check_devices(&wide, shared(2, 2, 1),
                  (int[]){ 2, 0 }); /* several sums while the backward goes on */
    check_devices(&models[1], shared(6, 3, 1), (int[]){ 3, 0 }); /* two micro-batches a leaf */
    o.precision.low = LM_DTYPE_BF16;
    check_devices(&models[1], o, (int[]){ 4, 0 });
    o.timed = true; /* without recordings */
    check_devices(&models[1], o, (int[]){ 4, 0 });
}

/* Ranks along an inner axis agree to rounding with one processor, beside dp as well. */
static void check_inner(const tiny_model *m, lm_trainer_opts o, lm_axis axis, int dp, int n,
                        bool rows)
{
    lm_backend *real = gpu;
    lm_err e = { 0 };
    outcome want, got;
    if (!cuda_has(dp * n - 1))
        return;
    o.rows = rows;
    gpu = cpu;
    o.mesh.size[LM_AXIS_DP] = 1;
    ok(try_train(&o, m, &want, &e), &e);
    gpu = real;
    o.mesh.size[LM_AXIS_DP] = dp;
    o.mesh.size[axis] = n;
    ok(try_train(&o, m, &got, &e), &e);
    assert_int_equal(got.w.warnings, 0);
    assert_true(fabs(got.r.loss / want.r.loss - 1) < 1e-5);
    assert_true(fabs(got.r.val_loss / want.r.val_loss - 1) < 1e-5);
    assert_true(fabs(got.t->last.norm / want.t->last.norm - 1) < 1e-4);
    lm_trainer_free(want.t);
    lm_trainer_free(got.t);
}

/* The same along cp, by heads. */
static void devices_share_windows(void **state)
{
    const lm_trainer_opts o = shared(2, 2, 1);
    (void)state;
    check_inner(&models[0], o, LM_AXIS_CP, 1, 2, false);
    check_inner(&models[0], o, LM_AXIS_CP, 2, 2, false);
}

static void devices_share_weights(void **state)
{
    const lm_trainer_opts o = shared(2, 2, 1);
    (void)state;
    check_inner(&models[0], o, LM_AXIS_TP, 1, 2, true);
    check_inner(&models[1], o, LM_AXIS_TP, 1, 2, true);
    check_inner(&models[1], o, LM_AXIS_TP, 1, 2, false);
    check_inner(&models[1], o, LM_AXIS_TP, 2, 2, true);
}

/* Stages have the bits of one device; rank 0 has the first. */
static void devices_share_layers(void **state)
{
    static const int sizes[][2] = { { 1, 2 }, { 2, 2 } };
    lm_trainer_opts o = shared(4, 2, 1);
    const lm_train_pipe_ask ask = {
        .ranks = 2, .micros = o.accumulate / o.leaves, .batch = o.batch, .seq = o.seq
    };
    lm_train_pipe *pipe = NULL;
    lm_err e = { 0 };
    outcome one, many;
    (void)state;
    ok(lm_train_pipe_new(&ask, &wide.config, &pipe, &e), &e);
    ok(try_train(&o, &wide, &one, &e), &e);
    for (int i = 0; i < 2 && cuda_has(sizes[i][0] * sizes[i][1] - 1); i++) {
        o.mesh.size[LM_AXIS_DP] = sizes[i][0];
        o.mesh.size[LM_AXIS_PP] = sizes[i][1];
        o.pipe = pipe;
        ok(try_train(&o, &wide, &many, &e), &e);
        assert_int_equal(many.w.warnings, 0);
        assert_memory_equal(&one.r.loss, &many.r.loss, sizeof one.r.loss);
        assert_memory_equal(&one.r.val_loss, &many.r.val_loss, sizeof one.r.val_loss);
        assert_memory_equal(&one.t->last.norm, &many.t->last.norm, sizeof one.t->last.norm);
        lm_trainer_free(many.t);
    }
    lm_trainer_free(one.t);
    lm_train_pipe_free(pipe);
}

/* The order of sums follows from the leaves: otherwise the test above could see nothing. */
static void leaves_change_bits(void **state)
{
    lm_trainer_opts o = shared(4, 1, 1);
    lm_err e = { 0 };
    outcome a, b;
    (void)state;
    ok(try_train(&o, &models[1], &a, &e), &e);
    o.leaves = 4;
    ok(try_train(&o, &models[1], &b, &e), &e);
    float *x = fetched(&a.t->s, LM_KEPT_PARAM, 0), *y = fetched(&b.t->s, LM_KEPT_PARAM, 0);
    assert_memory_not_equal(x, y, bytes_of(lm_store_find(a.t->s.store, LM_KEPT_PARAM, 0)));
    lm_free(x);
    lm_free(y);
    lm_trainer_free(a.t);
    lm_trainer_free(b.t);
}

/* ---- failures ---- */

static void too_few_devices(void **state)
{
    lm_trainer_opts o = shared(2 * CUDA_RANKS, 2 * CUDA_RANKS, 2 * CUDA_RANKS);
    lm_err e = { 0 };
    outcome x;
    (void)state;
    if (cuda_is_real())
        skip();
    assert_int_equal(try_train(&o, &models[1], &x, &e), LM_EIO);
    assert_non_null(strstr(e.what, "this machine has 4 CUDA devices"));
    lm_trainer_free(x.t);
}

static void a_failure_of_the_library_ends_all(void **state)
{
    lm_trainer_opts o = shared(2, 2, 2);
    lm_err e = { 0 };
    outcome x;
    void (*fail_at)(uint64_t) = NULL;
    (void)state;
    *(void **)&fail_at = emu_symbol("lm_emu_nccl_fail");
    if (!fail_at)
        skip();
    fail_at(12);
    assert_int_equal(try_train(&o, &models[1], &x, &e), LM_EIO);
    fail_at(0);
    assert_non_null(strstr(e.what, "remote process exited"));
    lm_trainer_free(x.t);
    lm_backend_close(gpu); /* what has failed stays so */
    memset(&e, 0, sizeof e);
    ok(cuda_open(NULL, true, &gpu, &e), &e);
}

static void what_devices_do_not_share_is_refused(void **state)
{
    lm_trainer_opts o = shared(2, 1, 1);
    lm_err e = { 0 };
    outcome x;
    (void)state;
    o.mesh.size[LM_AXIS_CP] = 2;
    o.mesh.context = LM_CONTEXT_RING;
    assert_int_equal(try_train(&o, &models[0], &x, &e), LM_EUSAGE);
    assert_non_null(strstr(e.what, "not on cuda:"));
    lm_trainer_free(x.t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(devices_do_not_change_bits),
        cmocka_unit_test(devices_share_weights),
        cmocka_unit_test(devices_share_windows),
        cmocka_unit_test(devices_share_layers),
        cmocka_unit_test(leaves_change_bits),
        cmocka_unit_test(too_few_devices),
        cmocka_unit_test(a_failure_of_the_library_ends_all),
        cmocka_unit_test(what_devices_do_not_share_is_refused),
    };
    cuda_ranks_set();
    return cmocka_run_group_tests(tests, begin_ranks, end_ranks);
}
