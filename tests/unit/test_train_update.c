/* SPDX-License-Identifier: Apache-2.0 */
/* The graph of an update: AdamW and SGD over several steps against their definitions in double, on
 * tensors of odd shapes; runs over blocks; groups, states and conditions of rules. */
#include "update_trial.h"

#include <math.h>

#include "base/par.h"
#include "base/rng.h"
#include "kernels/panels.h"
#include "op/ops.h"

enum { STEPS = 5, MOST = 400 };

static lm_par *par;
static lm_backend *backend;

static void add_tensors(update_trial *r)
{
    trial_add(r, "embed", 7, 5);
    trial_add(r, "q", 8, 24); /* 192 elements: the next tensor follows without padding */
    trial_add(r, "k", 3, 24);
    trial_add(r, "bias", 33, 0);
    trial_add(r, "norm", 24, 0);
}

static void draw(float *x, int64_t n, const char *what, int t)
{
    for (int64_t i = 0; i < n; i++)
        x[i] = (float)lm_rng_normal(lm_rng_make(7, what, (uint64_t)t), (uint64_t)i);
}

static void draw_all(update_trial *r, bool param, int t)
{
    for (int i = 0; i < r->n; i++)
        draw(param ? trial_param(r, i) : trial_grad(r, i), lm_tensor_count(&r->t[i].shape),
             r->t[i].name, t);
}

/* ---- definitions ---- */

typedef struct {
    double p[MOST], a[MOST], b[MOST];
} reference;

typedef struct {
    double lr, scale, bound, t;
    bool decay;
} moment;

typedef void (*definition)(reference *r, const lm_optim_use *u, const moment *m, const float *g,
                           int64_t n);

static double value(const lm_optim_use *u, const char *name)
{
    return u->hyper[lm_optim_hyper(u->optim, name)];
}

static double clipped(double g, const moment *m)
{
    g *= m->scale;
    return m->bound > 0 ? fmax(-m->bound, fmin(m->bound, g)) : g;
}

static void adamw(reference *r, const lm_optim_use *u, const moment *m, const float *grad,
                  int64_t n)
{
    double b1 = value(u, "beta1"), b2 = value(u, "beta2");
    for (int64_t i = 0; i < n; i++) {
        double g = clipped(grad[i], m);
        r->p[i] -= m->lr * (m->decay ? value(u, "weight_decay") : 0) * r->p[i];
        r->a[i] = b1 * r->a[i] + (1 - b1) * g;
        r->b[i] = b2 * r->b[i] + (1 - b2) * g * g;
        r->p[i] -= m->lr * (r->a[i] / (1 - pow(b1, m->t + 1))) /
                   (sqrt(r->b[i] / (1 - pow(b2, m->t + 1))) + value(u, "eps"));
    }
}

static void sgd(reference *r, const lm_optim_use *u, const moment *m, const float *grad, int64_t n)
{
    double momentum = value(u, "momentum");
    for (int64_t i = 0; i < n; i++) {
        double g = clipped(grad[i], m);
        g += (m->decay ? value(u, "weight_decay") : 0) * r->p[i];
        if (momentum > 0) {
            r->a[i] = m->t > 0 ? momentum * r->a[i] + (1 - value(u, "dampening")) * g : g;
            g = value(u, "nesterov") > 0 ? g + momentum * r->a[i] : r->a[i];
        }
        r->p[i] -= m->lr * g;
    }
}

static void near(const float *got, const double *want, int64_t n, const char *what, int t)
{
    for (int64_t i = 0; i < n; i++)
        if (fabs(got[i] - want[i]) > 2e-6 * (1 + fabs(want[i])))
            fail_msg("%s, element %d after step %d: %.9g, not %.9g", what, (int)i, t + 1, got[i],
                     want[i]);
}

static void follow(lm_optim_use use, definition def, const char *const state[2], double norm,
                   double bound)
{
    static reference ref[TRIAL_TENSORS];
    update_trial r = { 0 };
    memset(ref, 0, sizeof ref);
    add_tensors(&r);
    trial_open(&r, backend, &use, 1, norm, bound, true);
    draw_all(&r, true, 0);
    for (int i = 0; i < r.n; i++)
        for (int64_t k = 0; k < lm_tensor_count(&r.t[i].shape); k++)
            ref[i].p[k] = trial_param(&r, i)[k];
    for (int t = 0; t < STEPS; t++) {
        moment m = { .lr = 0.1 / (t + 1), .bound = bound, .t = t };
        draw_all(&r, false, t + 1);
        trial_step(&r, m.lr);
        m.scale = norm > 0 ? fmin(1, norm / (sqrt(r.sumsq) + 1e-6)) : 1;
        for (int i = 0; i < r.n; i++) {
            int64_t n = lm_tensor_count(&r.t[i].shape);
            m.decay = r.t[i].decay;
            def(&ref[i], &use, &m, trial_grad(&r, i), n);
            near(trial_param(&r, i), ref[i].p, n, r.t[i].name, t);
            if (state[0])
                near(trial_state(&r, state[0], i, NULL), ref[i].a, n, state[0], t);
            if (state[1])
                near(trial_state(&r, state[1], i, NULL), ref[i].b, n, state[1], t);
            for (int64_t k = 0; k < n; k++)
                assert_int_equal(r.low[r.t[i].offset + k], lm_f32_to_bf16(trial_param(&r, i)[k]));
        }
    }
    trial_close(&r);
}

static lm_optim_use with(const char *name, const char *hyper, double x)
{
    lm_optim_use u = lm_optim_default(lm_optim_find(name));
    if (hyper)
        u.hyper[lm_optim_hyper(u.optim, hyper)] = x;
    return u;
}

static void adamw_is_its_formula(void **state)
{
    static const char *const states[2] = { "exp_avg", "exp_avg_sq" };
    (void)state;
    follow(with("adamw", NULL, 0), adamw, states, 0, 0);
    follow(with("adamw", "beta1", 0.8), adamw, states, 1e9, 0);
    follow(with("adamw", "weight_decay", 0), adamw, states, 10, 0.2);
}

static void sgd_is_its_formula(void **state)
{
    static const char *const none[2] = { NULL, NULL }, *const buffer[2] = { "momentum_buffer",
                                                                            NULL };
    (void)state;
    follow(with("sgd", "momentum", 0), sgd, none, 0, 0);
    follow(with("sgd", "momentum", 0), sgd, none, 10, 0.2);
    follow(with("sgd", "dampening", 0.3), sgd, buffer, 0, 0);
    follow(with("sgd", "nesterov", 1), sgd, buffer, 10, 0.2);
}

/* ---- copies in panels ---- */

enum { WIDE = 96, HIGH = 64 };

static void three_steps(update_trial *r, lm_backend *b, const lm_optim_use *use, bool panels)
{
    trial_add(r, "embed", HIGH, WIDE)->part = LM_PART_EMBED;
    trial_add(r, "model.layers.0.mlp.up_proj.weight", HIGH, WIDE)->panels = panels;
    trial_add(r, "model.layers.0.mlp.down_proj.weight", HIGH, WIDE)->panels = panels;
    trial_add(r, "norm", WIDE, 0);
    trial_open(r, b, use, 1, 1, 0, true);
    draw_all(r, true, 0);
    for (int t = 1; t <= 3; t++) {
        draw_all(r, false, t);
        if (t == 2) /* nothing is written */
            r->grad[3] = INFINITY;
        trial_step(r, 0.01);
    }
    if (lm_update_shows(r->u))
        trial_run(r, LM_UPDATE_SHOW);
}

/* The same numbers as copies in the order of rows, and the same parameters. */
static void check_panels(lm_backend *b, const lm_optim_use *use)
{
    update_trial rows = { 0 }, panels = { 0 };
    three_steps(&rows, b, use, false);
    three_steps(&panels, b, use, true);
    assert_memory_equal(rows.param, panels.param, (size_t)trial_block(&rows) * sizeof(float));
    for (int i = 0; i < rows.n; i++)
        for (int64_t k = 0, n = lm_tensor_count(&rows.t[i].shape); k < n; k++) {
            int64_t at = rows.t[i].offset;
            int64_t to = panels.t[i].panels ? lm_panel_at(k / WIDE, k % WIDE, WIDE) : k;
            assert_int_equal(rows.low[at + k], panels.low[at + to]);
        }
    trial_close(&rows);
    trial_close(&panels);
}

/* Every optimiser, with and without an average that is shown; AdamW in the reference, too.  (Formulas there
 * round copies from double.) */
static void copies_are_in_panels(void **state)
{
    lm_optim_use adamw_use = lm_optim_default(lm_optim_find("adamw"));
    lm_backend *plain;
    lm_err e = { 0 };
    (void)state;
    trial_must(lm_backend_cpu(LM_CPU_REF, par, &plain, &e), &e);
    check_panels(plain, &adamw_use);
    lm_backend_close(plain);
    if (!backend->panels(backend, "linear", 1, LM_DTYPE_BF16))
        return;
    for (int o = 0; lm_optim_at(o); o++)
        for (int v = 0; v < 2; v++) {
            lm_optim_use use = lm_optim_default(lm_optim_at(o));
            use.ema = v ? 0.9 : 0;
            check_panels(backend, &use);
        }
}

/* ---- nothing is written if a number is not finite ---- */

/* Every optimiser: parameters, states and copies are unchanged. */
static void a_step_that_is_not_finite_changes_nothing(void **state)
{
    (void)state;
    for (int o = 0; lm_optim_at(o); o++)
        for (int bad = 0; bad < 4; bad++) {
            update_trial r = { 0 };
            lm_optim_use use = lm_optim_default(lm_optim_at(o));
            const lm_store_state *s;
            const lm_vid *v;
            trial_add(&r, "model.layers.0.mlp.up_proj.weight", 16, 24);
            trial_open(&r, backend, &use, 1, 1, 0, true);
            draw_all(&r, true, 0);
            draw_all(&r, false, 1);
            trial_step(&r, 0.01);
            int n = lm_update_states(r.u, &s, &v);
            size_t bytes = (size_t)trial_block(&r) * 4, low = bytes / 2;
            char *before = trial_room(backend, 16 * bytes), *at = before;
            memcpy(at, r.param, bytes), at += bytes;
            memcpy(at, r.low, low), at += low;
            for (int k = 0; k < n; k++) {
                size_t b = (size_t)s[k].count * lm_dtype_size(s[k].format);
                memcpy(at, r.state[k], b), at += b;
            }
            draw_all(&r, false, 2);
            if (bad < 2)
                r.grad[3] = bad ? NAN : INFINITY;
            else
                r.loss = bad == 2 ? NAN : INFINITY;
            trial_step(&r, 0.01);
            at = before;
            assert_memory_equal(at, r.param, bytes), at += bytes;
            assert_memory_equal(at, r.low, low), at += low;
            for (int k = 0; k < n; k++) {
                size_t b = (size_t)s[k].count * lm_dtype_size(s[k].format);
                assert_memory_equal(at, r.state[k], b), at += b;
            }
            backend->free(backend, before, 16 * bytes);
            trial_close(&r);
        }
}

/* ---- the list ---- */

static int count_nodes(const update_trial *r, const char *op)
{
    const lm_graph *g = lm_update_graph(r->u);
    int n = 0;
    for (size_t k = 0; k < g->n_nodes; k++)
        n += !strcmp(g->node[k].op->name, op);
    return n;
}

/* Matrices with decay, vectors without: two passes over memory. */
static void neighbours_are_one_run(void **state)
{
    update_trial r = { 0 };
    lm_optim_use use = with("adamw", NULL, 0);
    (void)state;
    add_tensors(&r);
    trial_open(&r, backend, &use, 1, 1, 0, true);
    assert_int_equal(count_nodes(&r, "adamw"), 2);
    assert_int_equal(count_nodes(&r, "clip"), 0);
    assert_int_equal(count_nodes(&r, "cast"), 0);
    trial_close(&r);
}

/* A rule for tests: it counts at some steps, and publishes the negative of the parameter. */
static lm_code counting(lm_update *u, const lm_update_tensor *t, lm_err *e)
{
    lm_graph *g = lm_update_graph(u);
    lm_vid start, seen, in[2], sum = LM_NONE;
    if (lm_update_state(u, t, "start", t->shape, &start, e) ||
        lm_update_state(u, t, "seen", lm_shape1(LM_DTYPE_F32, t->shape.dim[0]), &seen, e))
        return e->code;
    lm_update_at_start(u);
    if (lm_graph_append(g, &lm_op_cast, NULL, &t->param, &start, e) ||
        lm_update_every(u, 3, 1, true, e))
        return e->code;
    in[0] = t->param;
    in[1] = t->param;
    if (lm_graph_append(g, &lm_op_add, NULL, in, &sum, e) ||
        lm_graph_append(g, &lm_op_cast, NULL, &sum, (lm_vid[]){ t->param }, e))
        return e->code;
    lm_update_to_show(u);
    return lm_graph_append(g, &lm_op_cast, NULL, &start, (lm_vid[]){ t->param }, e);
}

static void conditions_hold(void **state)
{
    static const lm_hyper none[] = { { 0 } };
    static const lm_optim optim = { .name = "counting", .hyper = none, .update = counting };
    lm_optim_use use = lm_optim_default(&optim);
    update_trial r = { 0 };
    (void)state;
    trial_add(&r, "a", 4, 3);
    trial_open(&r, backend, &use, 1, 0, 0, true);
    assert_false(lm_update_is_steady(r.u));
    assert_null(trial_state(&r, "absent", 0, NULL));
    r.param[5] = 1.5f;
    for (int t = 0; t < 8; t++)
        trial_step(&r, 1); /* doubled at steps 0, 1, 4 and 7 */
    assert_true(r.param[5] == 1.5f * 16 && lm_bf16_to_f32(r.low[5]) == 1.5f * 16);
    assert_true(((float *)trial_state(&r, "start", 0, NULL))[5] == 1.5f);
    trial_run(&r, LM_UPDATE_SHOW);
    assert_true(r.param[5] == 1.5f && lm_bf16_to_f32(r.low[5]) == 1.5f);
    trial_run(&r, LM_UPDATE_CHECK);
    assert_true(r.weights == 2.25);
    trial_close(&r);
}

/* Two optimisers: each has its own hyper-parameters, and states only for its tensors. */
static void groups_are_apart(void **state)
{
    lm_optim_use use[2] = { with("adamw", NULL, 0), with("sgd", NULL, 0) };
    update_trial r = { 0 };
    (void)state;
    use[1].rate = 0.5;
    add_tensors(&r);
    r.t[1].use = r.t[4].use = 1;
    trial_open(&r, backend, use, 2, 0, 0, false);
    assert_non_null(trial_state(&r, "exp_avg", 0, NULL));
    assert_null(trial_state(&r, "exp_avg", 1, NULL));
    assert_non_null(trial_state(&r, "momentum_buffer", 4, NULL));
    assert_null(trial_state(&r, "momentum_buffer", 3, NULL));
    r.grad[r.t[4].offset] = 1;
    trial_step(&r, 0.1);
    assert_true(r.numbers[0] == 0.1 && r.numbers[3] == 0.05);
    assert_true(fabs(trial_param(&r, 4)[0] + 0.05) < 1e-7);
    trial_close(&r);
}

/* ---- tables ---- */

static void tables_are_sound(void **state)
{
    const lm_optim *o;
    (void)state;
    for (int i = 0; (o = lm_optim_at(i)); i++) {
        assert_ptr_equal(lm_optim_find(o->name), o);
        assert_non_null(o->about);
        assert_true(lm_optim_numbers(o) >= 1 && lm_optim_numbers(o) <= LM_OPTIM_NUMBERS);
        int n = 0;
        for (; o->hyper[n].name; n++) {
            assert_int_equal(lm_optim_hyper(o, o->hyper[n].name), n);
            assert_true(o->hyper[n].value >= o->hyper[n].least);
            assert_true(o->hyper[n].value <= o->hyper[n].most);
            assert_non_null(o->hyper[n].help);
        }
        assert_true(n <= LM_OPTIM_HYPERS);
    }
    assert_null(lm_optim_find("lion-tamer"));
}

/* Sums of squares are added in the order of the model's blocks, not of the memory: 1 and three times 2^-54 are 1 in this
 * order, and more in the other. */
static void norms_have_the_order_of_the_model(void **state)
{
    lm_optim_use use = lm_optim_default(lm_optim_find("sgd"));
    (void)state;
    use.hyper[lm_optim_hyper(use.optim, "momentum")] = 0;
    for (int turned = 0; turned < 2; turned++) {
        lm_update_tensor t[4];
        float grad[4 * LM_BLOCK_ALIGN] = { 1 }, unread[4 * LM_BLOCK_ALIGN];
        double sumsq = 0, numbers[LM_OPTIM_NUMBERS];
        const lm_update_constant *c;
        lm_step step = { 0 };
        lm_update *u;
        lm_exec *x;
        lm_err e = { 0 };
        size_t first, last;
        for (int i = 0; i < 4; i++) {
            t[i] = (lm_update_tensor){ .name = "w",
                                       .shape = lm_shape1(LM_DTYPE_F32, 3),
                                       .whole = 3,
                                       .offset = i * LM_BLOCK_ALIGN,
                                       .norm_at = turned ? 3 - i : i,
                                       .index = i };
            grad[i * LM_BLOCK_ALIGN] = i ? 0x1p-27F : 1;
        }
        const lm_update_opts o = {
            .use = &use, .n_use = 1, .block = 256, .trained = 256, .norm_blocks = 4
        };
        trial_must(lm_update_build(&o, t, 4, &u, &e), &e);
        trial_must(lm_exec_new(lm_update_graph(u), backend, NULL, 0, &x, &e), &e);
        const lm_update_values *v = lm_update_value(u);
        for (int i = lm_update_constants(u, &c); i-- > 0;)
            lm_exec_bind(x, c[i].value, c[i].number);
        lm_exec_bind(x, v->grad, grad);
        lm_exec_bind(x, v->param, unread);
        lm_exec_bind(x, v->numbers, numbers);
        lm_exec_bind(x, v->loss, numbers);
        lm_exec_bind(x, v->sumsq, &sumsq);
        lm_exec_bind(x, v->weights, numbers);
        lm_update_part_at(u, LM_UPDATE_NORM, &first, &last);
        trial_must(lm_exec_run_part(x, first, last, NULL, &step, &e), &e);
        assert_true(sumsq == (turned ? 1 + 0x1p-52 : 1));
        lm_exec_free(x);
        lm_update_free(u);
    }
}

static int begin(void **state)
{
    lm_err e = { 0 };
    (void)state;
    return lm_par_new(&par, 2, &e) || lm_backend_cpu(lm_cpu_detect(), par, &backend, &e);
}

static int end(void **state)
{
    (void)state;
    lm_backend_close(backend);
    lm_par_free(par);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(adamw_is_its_formula),
        cmocka_unit_test(sgd_is_its_formula),
        cmocka_unit_test(neighbours_are_one_run),
        cmocka_unit_test(copies_are_in_panels),
        cmocka_unit_test(conditions_hold),
        cmocka_unit_test(groups_are_apart),
        cmocka_unit_test(a_step_that_is_not_finite_changes_nothing),
        cmocka_unit_test(tables_are_sound),
        cmocka_unit_test(norms_have_the_order_of_the_model),
    };
    return cmocka_run_group_tests(tests, begin, end);
}
