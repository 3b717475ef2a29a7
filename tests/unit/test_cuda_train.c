/* SPDX-License-Identifier: Apache-2.0 */
/* Training on the CUDA backend against the CPU's: losses, gradients, resumes, steps that must be
 * skipped, traces, memory.  On the emulated device, or with LM_TEST_CUDA=real on a GPU. */
#include "cuda_train_case.h"

/* ---- against the CPU ---- */

static double distance_of(const float *a, const float *b, int64_t n)
{
    double diff = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        diff += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        norm += (double)b[i] * b[i];
    }
    return sqrt(diff / norm);
}

/* Relative distance of all gradients together after one step. */
static double gradients_apart(const job *whole)
{
    watcher a, b;
    job j = *whole;
    j.o.steps = 1;
    train_all(&j, cpu, &a);
    train_all(&j, gpu, &b);
    float *x = fetched(&a.t->s, LM_KEPT_GRAD, 0), *y = fetched(&b.t->s, LM_KEPT_GRAD, 0);
    double d = distance_of(y, x, a.t->s.model->block);
    lm_free(x);
    lm_free(y);
    lm_trainer_free(a.t);
    lm_trainer_free(b.t);
    return d;
}

static void compare(int model, lm_dtype dtype, int64_t accumulate, double loss_tol, double grad_tol)
{
    job j = { .model = &models[model],
              .o = options(dtype, accumulate, accumulate > 1 ? 12 : STEPS) };
    int steps = (int)j.o.steps;
    watcher a, b;
    double worst = 0, grad = gradients_apart(&j);
    train_all(&j, cpu, &a);
    train_all(&j, gpu, &b);
    assert_int_equal(a.steps, steps);
    assert_int_equal(b.steps, steps);
    for (int i = 0; i < steps; i++)
        worst = fmax(worst, fabs(b.loss[i] / a.loss[i] - 1));
    print_message("# %s %s, accumulation %d: loss %.4f to %.4f, apart %.2g; gradients %.2g\n",
                  model ? "llama" : "gpt2", lm_dtype_name(dtype), (int)accumulate, a.loss[0],
                  a.loss[steps - 1], worst, grad);
    assert_true(a.loss[steps - 1] < a.loss[0]); /* the loss falls */
    assert_true(worst < loss_tol);
    assert_true(grad < grad_tol);
    lm_trainer_free(a.t);
    lm_trainer_free(b.t);
}

static void losses_and_gradients_equal_the_cpus_in_f32(void **state)
{
    (void)state;
    for (int m = 0; m < 2; m++)
        for (int64_t accumulate = 1; accumulate <= 2; accumulate++)
            compare(m, LM_DTYPE_F32, accumulate, 1e-4, 1e-5);
}

static void losses_and_gradients_equal_the_cpus_in_bf16(void **state)
{
    (void)state;
    for (int m = 0; m < 2; m++)
        for (int64_t accumulate = 1; accumulate <= 2; accumulate++)
            compare(m, LM_DTYPE_BF16, accumulate, 1e-2, 3e-2);
}

/* ---- steps ---- */

/* Batches are drawn ahead, but only batches that were trained on are counted. */
static void steps_allocate_nothing_and_count_what_they_used(void **state)
{
    (void)state;
    watcher w;
    job j = { .model = &models[1], .o = options(LM_DTYPE_BF16, 2, 6), .validate = true };
    size_t before = unused_of(gpu);
    j.o.eval_every = 3;
    j.o.eval_batches = 2;
    lm_train_result r = train_all(&j, gpu, &w);
    for (int i = 2; i < 6; i++) {
        assert_int_equal(w.calls[i], w.calls[1]);
        must_take_nothing(&w, i, 1);
    }
    assert_int_equal(w.t->s.sample, 6 * 2 * BATCH);
    assert_true(isfinite(r.val_loss));
    assert_false(r.timed);
    assert_true(r.tokens_per_second > 0 && r.seconds_steps > 0);
    must_be_as_planned(&r);
    lm_trainer_free(w.t);
    all_is_back(before);
}

static void a_resumed_run_has_the_bits_of_an_uninterrupted_one(void **state)
{
    (void)state;
    watcher whole, first, second;
    lm_err e = { 0 };
    char *run = path_of("resumed"), *step = path_of("resumed/step-000003");
    job j = { .model = &models[0], .o = options(LM_DTYPE_BF16, 2, 6) };
    train_all(&j, gpu, &whole);
    j.run = run;
    j.o.steps = 3;
    train_all(&j, gpu, &first);
    lm_trainer_free(first.t);
    j.run = NULL;
    j.resume = step;
    j.o.steps = 6;
    ok(lm_model_source_open(step, NULL, &j.weights, &e), &e);
    train_all(&j, gpu, &second);
    assert_int_equal(second.steps, 3);
    assert_int_equal(second.t->s.sample, whole.t->s.sample);
    must_be_equal(&second.t->s, &whole.t->s);
    /* The same checkpoint resumed on the CPU. */
    watcher other;
    train_all(&j, cpu, &other);
    for (int i = 0; i < 3; i++)
        assert_true(fabs(other.loss[i] / second.loss[i] - 1) < 1e-2);
    lm_trainer_free(other.t);
    lm_trainer_free(second.t);
    lm_trainer_free(whole.t);
    lm_model_source_close(j.weights);
    lm_free(run);
    lm_free(step);
}

/* A checkpoint has the state at its beginning, although steps continue while it is written. */
/* The weights with which a measured run (--measure) begins. */
static void initial_weights_equal_the_cpus(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        lm_train_state here, there;
        lm_program *on_cpu = NULL, *on_gpu = NULL;
        lm_err e = { 0 };
        job j = { .o = options(LM_DTYPE_F32, 1, 1) };
        const lm_program_opts o = {
            .batch = 1, .seq = T, .precision = j.o.precision, .groups = j.o.groups
        };
        ok(lm_program_new(&o, &models[i].config, false, cpu, NULL, &on_cpu, &e), &e);
        ok(lm_program_new(&o, &models[i].config, false, gpu, NULL, &on_gpu, &e), &e);
        ok(lm_train_state_new(on_cpu, par, &here, &e), &e);
        ok(lm_train_state_new(on_gpu, par, &there, &e), &e);
        ok(lm_store_draw(here.store, LM_TENSORS_ALL, 7, &e), &e);
        ok(lm_store_draw(there.store, LM_TENSORS_ALL, 7, &e), &e);
        float *x = fetched(&there, LM_KEPT_PARAM, 0);
        assert_memory_equal(x, here.store->block[0].data, bytes_of(&here.store->block[0]));
        assert_true(x[0] != 0);
        lm_free(x);
        lm_train_state_fini(&here);
        lm_train_state_fini(&there);
        lm_program_free(on_cpu);
        lm_program_free(on_gpu);
    }
}

static void a_snapshot_has_the_state_at_its_start(void **state)
{
    (void)state;
    watcher w, until;
    lm_err e = { 0 };
    lm_train_state s;
    lm_model_source *src = NULL;
    char *run = path_of("moments"), *step = path_of("moments/step-000002");
    job j = { .model = &models[1], .o = options(LM_DTYPE_F32, 1, 5), .run = run };
    j.o.save_every = 2;
    train_all(&j, gpu, &w);
    j.run = NULL;
    j.o.steps = 2;
    train_all(&j, gpu, &until);
    ok(lm_train_state_new(w.t->program, par, &s, &e), &e);
    ok(lm_model_source_open(step, NULL, &src, &e), &e);
    ok(lm_store_load(s.store, src, &e), &e);
    ok(lm_ckpt_load(step, &s, &e), &e);
    must_be_equal(&s, &until.t->s);
    assert_int_equal(s.step, 2);
    assert_int_equal(s.sample, 2 * BATCH);
    lm_train_state_fini(&s);
    lm_model_source_close(src);
    lm_trainer_free(w.t);
    lm_trainer_free(until.t);
    lm_free(run);
    lm_free(step);
}

static void nonfinite_numbers_change_no_weight(void **state)
{
    (void)state;
    watcher w;
    lm_err e = { 0 };
    lm_train_result r;
    float nan = NAN;
    size_t before = unused_of(gpu);
    job j = { .model = &models[1], .o = options(LM_DTYPE_F32, 2, 5) };
    ok(open_trainer(&j, gpu, &w, &e), &e);
    lm_train_state *s = &w.t->s;
    const lm_slice *norm = &s->model->slice[lm_model_slice(s->model, "model.norm.weight")];
    float *param = lm_store_flat(s->store, LM_KEPT_PARAM, 0);
    int64_t at = s->model->param[norm->param].offset;
    ok(gpu->copy(gpu, param + at, &nan, sizeof nan, gpu->main, &e), &e);
    float *was = fetched(s, LM_KEPT_PARAM, 0);
    assert_int_equal(lm_trainer_run(w.t, &r, &e), LM_ENUMERIC);
    /* the weights had them before the first step, so the model is named */
    assert_string_equal(e.where, lm_model_source_path(models[1].source));
    assert_string_equal(e.what, "tensor \"model.norm.weight\" holds a NaN");
    float *is = fetched(s, LM_KEPT_PARAM, 0), *m = fetched(s, LM_KEPT_OPT, 0);
    assert_memory_equal(is, was, bytes_of(&s->store->block[0]));
    for (int64_t i = 0; i < s->model->block; i++)
        assert_true(m[i] == 0);
    assert_int_equal(s->step, 0);
    assert_int_equal(s->sample, 0);
    lm_free(was);
    lm_free(is);
    lm_free(m);
    lm_trainer_free(w.t);
    all_is_back(before);
}

/* ---- traces ---- */

/* Events of the graph come node by node, once for each micro-batch, then those of the update. */
static void check_trace(const char *path, const lm_trainer *t)
{
    lm_err e = { 0 };
    json_t *o = NULL, *v;
    size_t i, n = t->program->train->graph->n_nodes, seen = 0, updated = 0;
    int norms = 0, draws = 0, updates = 0;
    double last = -1;
    ok(lm_json_load(path, 64 << 20, &o, &e), &e);
    json_array_foreach(json_object_get(o, "traceEvents"), i, v)
    {
        const json_t *args = json_object_get(v, "args");
        const char *name = json_string_value(json_object_get(v, "name"));
        double ts = json_number_value(json_object_get(v, "ts"));
        double dur = json_number_value(json_object_get(v, "dur"));
        if (strcmp(json_string_value(json_object_get(v, "ph")), "X"))
            continue;
        assert_true(ts >= -1 && dur >= 0);
        norms += !strcmp(name, "gradient norm");
        updates += !args && !strcmp(name, "adamw");
        draws += !strcmp(name, "draw");
        if (!args)
            continue;
        bool micro = json_object_get(args, "micro_batch") != NULL;
        const lm_node *node = micro ? &t->program->train->graph->node[seen % n]
                                    : &lm_update_graph(t->program->update)->node[updated++];
        assert_string_equal(name, node->op->name);
        assert_string_equal(json_string_value(json_object_get(args, "phase")),
                            lm_phase_name(node->phase));
        assert_int_equal(json_integer_value(json_object_get(args, "layer")), node->layer);
        assert_int_equal(json_integer_value(json_object_get(args, "micro_batch")),
                         micro ? seen / n : 0);
        assert_true(ts >= last);
        last = ts;
        seen += micro;
    }
    assert_int_equal(seen, n * (size_t)t->o.accumulate);
    assert_true(updated >= 3 && updated <= lm_update_graph(t->program->update)->n_nodes);
    assert_true(norms == 1 && updates == 1);
    assert_int_equal(draws, t->b->host_memory ? 1 + t->o.accumulate : 1); /* one by one there */
    json_decref(o);
}

static void a_trace_has_every_node(void **state)
{
    (void)state;
    char *path[2] = { path_of("cpu.json"), path_of("gpu.json") };
    for (int k = 0; k < 2; k++) {
        watcher w;
        job j = { .model = &models[0], .o = options(LM_DTYPE_F32, 2, 4), .trace = path[k] };
        lm_train_result r = train_all(&j, k ? gpu : cpu, &w);
        check_trace(path[k], w.t);
        assert_int_equal(r.timed, k == 0); /* one timed step does not make a report */
        lm_trainer_free(w.t);
        lm_free(path[k]);
    }
}

static void times_are_measured_on_request(void **state)
{
    (void)state;
    watcher w;
    job j = { .model = &models[0], .o = options(LM_DTYPE_F32, 1, 3) };
    const lm_exec_time *line;
    j.o.timed = true;
    lm_train_result r = train_all(&j, gpu, &w);
    assert_true(r.timed && r.seconds_forward > 0 && r.seconds_backward > 0);
    assert_true(r.seconds_optimizer > 0);
    assert_true(lm_trainer_times(w.t, &line) > 5);
    assert_int_equal(line[0].calls % 3, 0);
    lm_trainer_free(w.t);
}

/* ---- failures ---- */

static lm_memory_plan planned(const job *j)
{
    lm_program *p = NULL;
    lm_memory_plan plan;
    lm_err e = { 0 };
    ok(lm_trainer_program(&j->o, &j->model->config, false, gpu, &p, &e), &e);
    lm_trainer_plan(&j->o, p, false, &plan);
    lm_program_free(p);
    return plan;
}

static void more_than_the_device_has(void **state)
{
    (void)state;
    void (*set_memory)(size_t) = NULL;
    *(void **)&set_memory = emu_symbol("lm_emu_memory");
    if (!set_memory)
        skip();
    watcher w;
    job j = { .model = &models[1], .o = options(LM_DTYPE_F32, 1, 3) };
    lm_memory_plan p, half;
    lm_err e = { 0 };
    size_t unused, total;
    j.o.batch = 8;
    p = planned(&j);
    j.o.batch = 4, j.o.accumulate = 2;
    half = planned(&j);
    j.o.batch = 8, j.o.accumulate = 1;
    assert_true(half.device < p.device);
    ok(gpu->memory(gpu, &unused, &total, &e), &e);
    set_memory(total - unused + (size_t)(half.device + p.device) / 2);
    assert_int_equal(open_trainer(&j, gpu, &w, &e), LM_ELIMIT);
    assert_null(w.t);
    assert_string_equal(e.where, gpu->name);
    assert_non_null(strstr(e.what, "the run needs "));
    const char cure[] = "a batch size of 4 and a gradient accumulation of 2 would need ";
    assert_int_equal(strncmp(e.todo, cure, strlen(cure)), 0);
    set_memory(total - unused + 100000);
    e = (lm_err){ 0 };
    assert_int_equal(open_trainer(&j, gpu, &w, &e), LM_ELIMIT);
    assert_non_null(strstr(
        e.todo,
        "no smaller batch size, nor computing in BF16, nor a shorter sequence length would do"));
    set_memory(total);
}

static void a_lost_device(void **state)
{
    (void)state;
    void (*fail_at)(uint64_t) = NULL;
    void (*reset)(void) = NULL;
    *(void **)&fail_at = emu_symbol("lm_emu_fail");
    *(void **)&reset = emu_symbol("lm_emu_reset");
    if (!fail_at || !reset)
        skip();
    static const uint64_t when[] = { 1, 90, 200 };
    size_t before = unused_of(gpu);
    for (size_t i = 0; i < sizeof when / sizeof *when; i++) {
        watcher w;
        lm_err e = { 0 };
        lm_train_result r;
        lm_backend *own = NULL; /* a lost backend stays lost */
        job j = { .model = &models[1], .o = options(LM_DTYPE_F32, 1, 20) };
        ok(cuda_open("plain", true, &own, &e), &e);
        ok(open_trainer(&j, own, &w, &e), &e);
        fail_at(when[i]);
        assert_int_equal(lm_trainer_run(w.t, &r, &e), LM_EIO);
        assert_string_equal(e.where, own->name);
        lm_trainer_free(w.t);
        fail_at(0);
        reset();
        lm_backend_close(own);
        all_is_back(before);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(losses_and_gradients_equal_the_cpus_in_f32),
        cmocka_unit_test(losses_and_gradients_equal_the_cpus_in_bf16),
        cmocka_unit_test(steps_allocate_nothing_and_count_what_they_used),
        cmocka_unit_test(a_resumed_run_has_the_bits_of_an_uninterrupted_one),
        cmocka_unit_test(initial_weights_equal_the_cpus),
        cmocka_unit_test(a_snapshot_has_the_state_at_its_start),
        cmocka_unit_test(nonfinite_numbers_change_no_weight),
        cmocka_unit_test(a_trace_has_every_node),
        cmocka_unit_test(times_are_measured_on_request),
        cmocka_unit_test(more_than_the_device_has),
        cmocka_unit_test(a_lost_device),
    };
    return cmocka_run_group_tests(tests, begin, end);
}
