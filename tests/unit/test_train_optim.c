/* SPDX-License-Identifier: Apache-2.0 */
/* Optimisers over several steps against the definition in double: states, bias correction, decay,
 * clipping, the BF16 copy. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/par.h"
#include "base/rng.h"
#include "train/optim.h"

enum { N = 1000, STEPS = 5 };

static lm_par *par;
static lm_backend *backend;

typedef struct {
    double p[N], a[N], b[N]; /* parameter, first and second state */
} reference;

static float grad[N];

static void draw_gradient(int t)
{
    for (int i = 0; i < N; i++)
        grad[i] = (float)lm_rng_normal(lm_rng_make(7, "gradient", (uint64_t)t), (uint64_t)i);
}

static double squares(void)
{
    double sum = 0;
    for (int i = 0; i < N; i++)
        sum += (double)grad[i] * grad[i];
    return sum;
}

static double clipped(int i, double norm, double bound)
{
    double g = grad[i] * (norm > 0 ? fmin(1, norm / (sqrt(squares()) + 1e-6)) : 1);
    return bound > 0 ? fmax(-bound, fmin(bound, g)) : g;
}

typedef void (*definition)(reference *r, const lm_optim_hyper *h, const lm_optim_run *o);

static void adamw(reference *r, const lm_optim_hyper *h, const lm_optim_run *o)
{
    double t = (double)o->t + 1;
    for (int i = 0; i < N; i++) {
        double g = clipped(i, o->clip_norm, o->clip_value);
        r->p[i] -= o->lr * (o->decay ? h->weight_decay : 0) * r->p[i];
        r->a[i] = h->beta1 * r->a[i] + (1 - h->beta1) * g;
        r->b[i] = h->beta2 * r->b[i] + (1 - h->beta2) * g * g;
        r->p[i] -= o->lr * (r->a[i] / (1 - pow(h->beta1, t))) /
                   (sqrt(r->b[i] / (1 - pow(h->beta2, t))) + h->eps);
    }
}

static void sgd(reference *r, const lm_optim_hyper *h, const lm_optim_run *o)
{
    for (int i = 0; i < N; i++) {
        double g = clipped(i, o->clip_norm, o->clip_value);
        g += (o->decay ? h->weight_decay : 0) * r->p[i];
        if (h->momentum > 0) {
            r->a[i] = o->t ? h->momentum * r->a[i] + (1 - h->dampening) * g : g;
            g = h->nesterov ? g + h->momentum * r->a[i] : r->a[i];
        }
        r->p[i] -= o->lr * g;
    }
}

static void check_near(const float *got, const double *want, const char *what, int t)
{
    for (int i = 0; i < N; i++)
        if (fabs(got[i] - want[i]) > 2e-6 * (1 + fabs(want[i])))
            fail_msg("%s of element %d after step %d: %.9g, not %.9g", what, i, t + 1, got[i],
                     want[i]);
}

static void check(const char *name, definition def, const lm_optim_hyper *h, int states, bool decay,
                  double norm, double bound)
{
    static reference r;
    static float p[N], state[2][N];
    static uint16_t low[N];
    const lm_optim_flat *o = lm_optim_flat_find(name);
    lm_err e = { 0 };
    assert_non_null(o);
    assert_int_equal(o->states(h), states);
    memset(&r, 0, sizeof r);
    memset(state, 0, sizeof state);
    for (int i = 0; i < N; i++)
        r.p[i] = p[i] = (float)lm_rng_normal(lm_rng_make(7, "weight", 0), (uint64_t)i);
    for (int t = 0; t < STEPS; t++) {
        draw_gradient(t);
        double sumsq = squares();
        lm_optim_run run = { .n = N,
                             .param = p,
                             .grad = grad,
                             .low = low,
                             .lr = 0.1 / (t + 1),
                             .clip_norm = norm,
                             .sumsq = &sumsq,
                             .clip_value = bound,
                             .decay = decay,
                             .t = t };
        for (int k = 0; k < states; k++)
            run.state[k] = state[k];
        lm_optim_run given = run;
        double now[LM_OPTIM_NOW];
        if (t % 2 == 0) { /* the numbers lie in memory every other time */
            o->now(h, run.lr, t, now);
            given.now = now;
            given.lr = NAN;
            given.t = -7;
        }
        assert_int_equal(o->run(backend, h, &given, &e), LM_OK);
        def(&r, h, &run);
        check_near(p, r.p, "the weight", t);
        check_near(state[0], states > 0 ? r.a : (double[N]){ 0 }, "the first state", t);
        check_near(state[1], states > 1 ? r.b : (double[N]){ 0 }, "the second state", t);
        for (int i = 0; i < N; i++)
            assert_int_equal(low[i], lm_f32_to_bf16(p[i]));
    }
}

static void adamw_is_its_formula(void **state)
{
    (void)state;
    lm_optim_hyper h = { .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1 };
    check("adamw", adamw, &h, 2, true, 0, 0);
    check("adamw", adamw, &h, 2, false, 1e9, 0);
    check("adamw", adamw, &h, 2, true, 10, 0.2);
}

static void sgd_is_its_formula(void **state)
{
    (void)state;
    lm_optim_hyper plain = { .weight_decay = 0.1 };
    lm_optim_hyper heavy = { .weight_decay = 0.1, .momentum = 0.9, .dampening = 0.3 };
    lm_optim_hyper ahead = { .weight_decay = 0.1, .momentum = 0.9, .nesterov = true };
    check("sgd", sgd, &plain, 0, true, 0, 0);
    check("sgd", sgd, &plain, 0, false, 10, 0.2);
    check("sgd", sgd, &heavy, 1, true, 0, 0);
    check("sgd", sgd, &heavy, 1, false, 10, 0.2);
    check("sgd", sgd, &ahead, 1, true, 0, 0);
}

/* A number that is not finite among those given: everything stays as it was. */
static void refuses(const char *name, int states, double sumsq, double watch, bool takes)
{
    static float p[N], state[2][N];
    static uint16_t low[N];
    lm_optim_hyper h = { .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .momentum = 0.9 };
    lm_optim_run run = { .n = N,
                         .param = p,
                         .grad = grad,
                         .state = { state[0], states > 1 ? state[1] : NULL },
                         .low = low,
                         .lr = 0.1,
                         .sumsq = &sumsq,
                         .watch = &watch };
    lm_err e = { 0 };
    draw_gradient(0);
    for (int i = 0; i < N; i++)
        p[i] = state[0][i] = state[1][i] = 2, low[i] = 7;
    assert_int_equal(lm_optim_flat_find(name)->run(backend, &h, &run, &e), LM_OK);
    for (int i = 0; i < N; i++)
        assert_true((p[i] == 2 && low[i] == 7 && state[0][i] == 2 && state[1][i] == 2) == !takes);
}

static void a_step_that_is_not_finite_is_none(void **state)
{
    (void)state;
    for (int k = 0; lm_optim_names[k]; k++) {
        int states = lm_optim_flat_find(lm_optim_names[k])->n_states;
        refuses(lm_optim_names[k], states, 4, 1, true);
        refuses(lm_optim_names[k], states, NAN, 1, false);
        refuses(lm_optim_names[k], states, INFINITY, 1, false);
        refuses(lm_optim_names[k], states, 4, NAN, false);
        refuses(lm_optim_names[k], states, 4, INFINITY, false);
    }
}

static void names(void **state)
{
    (void)state;
    for (int i = 0; lm_optim_names[i]; i++) {
        const lm_optim_flat *o = lm_optim_flat_find(lm_optim_names[i]);
        assert_non_null(o);
        assert_true(o->n_states <= LM_OPTIM_MAX_STATES);
        for (int k = 0; k < o->n_states; k++)
            assert_non_null(o->state[k]);
    }
    assert_null(lm_optim_flat_find("lion-tamer"));
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
        cmocka_unit_test(a_step_that_is_not_finite_is_none),
        cmocka_unit_test(names),
    };
    return cmocka_run_group_tests(tests, begin, end);
}
