/* SPDX-License-Identifier: Apache-2.0 */
/* test_align_advantage.c -- advantages of groups and of tokens, against numbers computed by hand. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tune/align/advantage.h"

static void near(double got, double want)
{
    if (!(fabs(got - want) <= 1e-12 + 1e-12 * fabs(want)))
        fail_msg("%.17g, not %.17g", got, want);
}

/* Two groups of four: {1,0,0,1} has mean 1/2 and deviation sqrt(1/3); {2,2,2,2} has none. */
static const double two[] = { 1, 0, 0, 1, 2, 2, 2, 2 };

static void groups(void **state)
{
    const lm_advantage_opts o = { .eps = 1e-4 };
    lm_advantage_stats s;
    double a[8];
    (void)state;
    lm_advantage(&o, two, 2, 4, a, &s);
    for (int i = 0; i < 8; i++)
        near(a[i], i >= 4 ? 0 : (two[i] - 0.5) / (sqrt(1.0 / 3) + 1e-4));
    near(s.mean, 1.25);
    near(s.std, sqrt((2 * 0.0625 + 2 * 1.5625 + 4 * 0.5625) / 7));
    near(s.zero_std, 0.5);
    assert_int_equal(s.unscored, 0);
}

static void scales(void **state)
{
    lm_advantage_opts o = { .scale = LM_ADVANTAGE_SCALE_NONE, .eps = 1e-4 };
    const double all = sqrt((2 * 0.0625 + 2 * 1.5625 + 4 * 0.5625) / 7);
    double a[8];
    (void)state;
    lm_advantage(&o, two, 2, 4, a, NULL);
    near(a[0], 0.5);
    near(a[1], -0.5);
    o.scale = LM_ADVANTAGE_SCALE_BATCH;
    lm_advantage(&o, two, 2, 4, a, NULL);
    near(a[0], 0.5 / (all + 1e-4));
    near(a[7], 0);
}

/* Of {1,0,0,1} the others of the first have the mean 1/3. */
static void leave_one_out(void **state)
{
    lm_advantage_opts o = { .kind = LM_ADVANTAGE_LEAVE_ONE_OUT, .eps = 1e-4 };
    double a[8];
    (void)state;
    lm_advantage(&o, two, 2, 4, a, NULL);
    near(a[0], 2.0 / 3);
    near(a[1], -2.0 / 3);
    near(a[4], 0);
    o.normalise = true;
    lm_advantage(&o, two, 2, 4, a, NULL);
    near(a[0], (2.0 / 3) / (sqrt(4 * 4.0 / 9 / 7) + 1e-4));
}

static void baselines(void **state)
{
    lm_advantage_opts o = { .kind = LM_ADVANTAGE_GLOBAL, .eps = 1e-4 };
    double a[8];
    (void)state;
    lm_advantage(&o, two, 2, 4, a, NULL);
    near(a[0], -0.25);
    near(a[4], 0.75);
    o.kind = LM_ADVANTAGE_BATCH;
    lm_advantage(&o, two, 2, 4, a, NULL);
    near(a[0], 0.5 / (sqrt(4 * 0.25 / 7) + 1e-4));
    near(a[4], 0);
}

/* Without the third, {1,0,_,1} has the mean 2/3; a lone reward of a group teaches nothing. */
static void unscored(void **state)
{
    lm_advantage_opts o = { .scale = LM_ADVANTAGE_SCALE_NONE, .eps = 1e-4 };
    const double r[] = { 1, 0, NAN, 1, NAN, NAN, 3, NAN };
    lm_advantage_stats s;
    double a[8];
    (void)state;
    lm_advantage(&o, r, 2, 4, a, &s);
    near(a[0], 1.0 / 3);
    near(a[2], 0);
    near(a[6], 0);
    near(s.mean, 1.25);
    assert_int_equal(s.unscored, 4);
    o.kind = LM_ADVANTAGE_LEAVE_ONE_OUT;
    lm_advantage(&o, r, 2, 4, a, NULL);
    near(a[0], 0.5);
    near(a[1], -1);
    near(a[2], 0);
    near(a[6], 0);
    o = (lm_advantage_opts){ .eps = 1e-4 };
    lm_advantage(&o, r, 2, 4, a, NULL);
    near(a[6], 0);
}

static void several(void **state)
{
    const double each[] = { 1, 10, 0, 20, 0, NAN, 1, 30 }, weight[] = { 1, 0.5 };
    double a[4], x[4], mean, std, sd = sqrt(1.0 / 3) + 1e-4;
    lm_advantage_stats s;
    (void)state;
    lm_advantage_each(each, weight, 2, 1, 4, 1e-4, a, &s);
    x[0] = 0.5 / sd + 0.5 * -10 / (10 + 1e-4);
    x[1] = -0.5 / sd;
    x[2] = -0.5 / sd;
    x[3] = 0.5 / sd + 0.5 * 10 / (10 + 1e-4);
    lm_moments(x, 4, &mean, &std);
    for (int i = 0; i < 4; i++)
        near(a[i], (x[i] - mean) / (std + 1e-4));
    near(s.mean, (6 + 10 + 0 + 16) / 4.0);
    /* a completion to which no reward applies has no advantage, and is not in the last mean */
    const double some[] = { 1, 10, NAN, NAN, 0, 30 };
    lm_advantage_each(some, weight, 2, 1, 3, 1e-4, a, &s);
    sd = sqrt(1.0 / 2) + 1e-4;
    x[0] = 0.5 / sd + 0.5 * -10 / (sqrt(200) + 1e-4);
    x[1] = -x[0];
    lm_moments(x, 2, &mean, &std);
    near(a[0], x[0] / (std + 1e-4));
    near(a[1], 0);
    near(a[2], -a[0]);
    assert_int_equal(s.unscored, 1);
}

/* ---- tokens ---- */

static void tokens(void **state)
{
    const double logp[] = { -1, -2, -3 }, ref[] = { -1.5, -1, -3 }, v[] = { 0.5, 0.25, 1 };
    double r[3], a[3], ret[3];
    (void)state;
    lm_token_rewards(logp, ref, 3, 0.1, 2, r);
    near(r[0], -0.05);
    near(r[1], 0.1);
    near(r[2], 2);
    lm_gae(r, v, 3, 0.9, 0.5, a, ret);
    near(a[2], 1);
    near(a[1], 0.1 + 0.9 * 1 - 0.25 + 0.45 * 1);
    near(a[0], -0.05 + 0.9 * 0.25 - 0.5 + 0.45 * a[1]);
    for (int i = 0; i < 3; i++)
        near(ret[i], a[i] + v[i]);
    lm_token_rewards(logp, ref, 0, 0.1, 2, r);
}

static void whitened(void **state)
{
    double x[] = { 1, 100, 3, 5 };
    const bool mask[] = { true, false, true, true };
    (void)state;
    lm_whiten(x, mask, 4, true);
    near(x[0], -2 / sqrt(4 + 1e-8) + 3);
    near(x[1], 100);
    lm_whiten(x, mask, 4, false);
    near(x[2], 0);
    double one = 7;
    lm_whiten(&one, NULL, 1, false);
    near(one, 7);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(groups),    cmocka_unit_test(scales),   cmocka_unit_test(leave_one_out),
        cmocka_unit_test(baselines), cmocka_unit_test(unscored), cmocka_unit_test(several),
        cmocka_unit_test(tokens),    cmocka_unit_test(whitened),
    };
    return cmocka_run_group_tests_name("align_advantage", tests, NULL, NULL);
}
