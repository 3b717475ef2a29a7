/* SPDX-License-Identifier: Apache-2.0 */
/* Learning rates against their closed forms. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "train/resume.h"
#include "train/schedule.h"

static void near(double a, double b)
{
    if (fabs(a - b) > 1e-12 * (1 + fabs(b)))
        fail_msg("%.17g is not %.17g", a, b);
}

static lm_schedule base(lm_sched_kind kind)
{
    return (lm_schedule){ .kind = kind,
                          .lr = 0.8,
                          .min_ratio = 0.25,
                          .warmup = 4,
                          .total = 24,
                          .decay = 5,
                          .step_size = 3,
                          .cycles = 1,
                          .gamma = 0.9 };
}

static void warmup_ends_at_the_peak(void **state)
{
    (void)state;
    for (int k = 0; k < LM_SCHED_COUNT; k++) {
        lm_schedule s = base((lm_sched_kind)k);
        for (int t = 0; t < 4; t++)
            near(lm_schedule_lr(&s, t), 0.8 * (t + 1) / 4);
        near(lm_schedule_lr(&s, 4), 0.8); /* the first step after it, too */
        s.warmup = 0;
        near(lm_schedule_lr(&s, 0), 0.8);
    }
}

static void constant(void **state)
{
    (void)state;
    lm_schedule s = base(LM_SCHED_CONSTANT);
    for (int t = 4; t < 40; t++)
        near(lm_schedule_lr(&s, t), 0.8);
}

static void linear_and_cosine_reach_the_floor(void **state)
{
    (void)state;
    lm_schedule l = base(LM_SCHED_LINEAR), c = base(LM_SCHED_COSINE);
    for (int t = 4; t <= 24; t++) {
        double u = (t - 4) / 20.0;
        near(lm_schedule_lr(&l, t), 0.8 * (1 - 0.75 * u));
        near(lm_schedule_lr(&c, t), 0.2 + 0.6 * (1 + cos(M_PI * u)) / 2);
    }
    near(lm_schedule_lr(&l, 1000), 0.2);
    near(lm_schedule_lr(&c, 1000), 0.2);
    near(lm_schedule_lr(&c, 14), 0.5); /* half way */
}

static void cosine_cycles_begin_at_the_peak(void **state)
{
    (void)state;
    lm_schedule s = base(LM_SCHED_COSINE);
    s.cycles = 4; /* of 5 steps each */
    for (int t = 4; t < 24; t++)
        near(lm_schedule_lr(&s, t), 0.2 + 0.6 * (1 + cos(M_PI * ((t - 4) % 5) / 5)) / 2);
    near(lm_schedule_lr(&s, 24), 0.2);
}

static void step_and_exponential(void **state)
{
    (void)state;
    lm_schedule s = base(LM_SCHED_STEP), x = base(LM_SCHED_EXPONENTIAL);
    for (int t = 4; t < 80; t++) {
        near(lm_schedule_lr(&s, t), 0.8 * fmax(0.25, pow(0.9, (t - 4) / 3)));
        near(lm_schedule_lr(&x, t), 0.8 * fmax(0.25, pow(0.9, t - 4)));
    }
    near(lm_schedule_lr(&s, 79), 0.2);
}

static void wsd_falls_at_the_end(void **state)
{
    (void)state;
    lm_schedule s = base(LM_SCHED_WSD);
    for (int t = 4; t < 19; t++)
        near(lm_schedule_lr(&s, t), 0.8);
    for (int t = 19; t <= 24; t++)
        near(lm_schedule_lr(&s, t), 0.2 + 0.6 * (1 - sqrt((t - 19) / 5.0)));
    near(lm_schedule_lr(&s, 50), 0.2);
    s.decay = 0;
    near(lm_schedule_lr(&s, 23), 0.8);
}

/* Schedules without steps for the decay: no division by 0. */
static void degenerate(void **state)
{
    (void)state;
    for (int k = 0; k < LM_SCHED_COUNT; k++) {
        lm_schedule s = base((lm_sched_kind)k);
        s.warmup = s.total = 1;
        near(lm_schedule_lr(&s, 0), 0.8);
        assert_true(isfinite(lm_schedule_lr(&s, 1)));
        assert_non_null(lm_sched_names[k]);
    }
    assert_null(lm_sched_names[LM_SCHED_COUNT]);
}

static lm_schedule resumed(const char *options, lm_schedule s, lm_resume_ask ask, char note[256])
{
    lm_err e = { 0 };
    json_t *o = NULL;
    assert_int_equal(lm_json_parse(options, strlen(options), "options", &o, &e), LM_OK);
    assert_int_equal(lm_resume_schedule(o, "state.json", &ask, &s, note, &e), LM_OK);
    json_decref(o);
    return s;
}

/* A run of 24 steps that is continued to 44. */
static void schedules_continue(void **state)
{
    (void)state;
    static const char options[] =
        "{\"steps\":24,\"lr-schedule\":\"wsd\",\"lr\":0.8,\"min-lr-ratio\":0.25,\"warmup\":4}";
    lm_schedule s = base(LM_SCHED_WSD), r;
    lm_resume_ask ask = { .step = 24, .steps = 44, .decay = -1 };
    char note[256];
    s.total = 44;
    r = resumed(options, s, ask, note);
    assert_int_equal(r.total, 44);
    assert_int_equal(r.decay, 4);
    near(lm_schedule_lr(&r, 24), 0.8);
    assert_non_null(strstr(note, "extend"));
    ask.how = "keep";
    r = resumed(options, s, ask, note);
    assert_int_equal(r.total, 24);
    assert_int_equal(r.decay, 2);
    near(lm_schedule_lr(&r, 24), 0.2);
    near(lm_schedule_lr(&r, 43), 0.2);
    ask.how = "rewarm";
    r = resumed(options, s, ask, note);
    double reached = 0.2 + 0.6 * (1 - sqrt(0.5)); /* at step 23, the second of two that decay */
    for (int t = 0; t < 4; t++)
        near(lm_schedule_lr(&r, 24 + t), reached + (0.8 - reached) * (t + 1) / 4);
    near(lm_schedule_lr(&r, 30), 0.8);
    assert_true(lm_schedule_lr(&r, 43) < 0.8);
    /* no warm-up of the run's: a hundredth of the steps that are left */
    ask = (lm_resume_ask){
        .how = "rewarm", .step = 24, .steps = 424, .decay = -1, .warmup_given = true
    };
    s.warmup = 0;
    r = resumed(options, s, ask, note);
    assert_int_equal(r.warmup, 4);
    /* the same number of steps: the position of the state, without a message */
    ask = (lm_resume_ask){ .step = 30, .steps = 44, .decay = -1 };
    r = resumed("{\"steps\":44,\"schedule\":{\"from\":24,\"steps\":20,\"warmup\":6,\"start\":0.5}}",
                base(LM_SCHED_COSINE), ask, note);
    assert_string_equal(note, "");
    near(lm_schedule_lr(&r, 26), 0.5 + 0.3 * 3 / 6);
    near(lm_schedule_lr(&r, 44), 0.2);
}

static void invalid_schedules_are_refused(void **state)
{
    (void)state;
    static const char *const bad[] = { "{\"schedule\":{\"from\":-1,\"steps\":20,\"warmup\":6}}",
                                       "{\"schedule\":{}}", "{\"lr-schedule\":\"slow\"}",
                                       "{\"steps\":\"many\"}",
                                       "{\"schedule\":{\"from\":0,\"steps\":1e300,\"warmup\":6}}" };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        lm_err e = { 0 };
        json_t *o = NULL;
        lm_schedule s = base(LM_SCHED_COSINE);
        char note[256];
        assert_int_equal(lm_json_parse(bad[i], strlen(bad[i]), "options", &o, &e), LM_OK);
        lm_resume_ask ask = { .step = 2, .steps = 9, .decay = -1 };
        assert_int_equal(lm_resume_schedule(o, "state.json", &ask, &s, note, &e), LM_EFORMAT);
        json_decref(o);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(schedules_continue),
        cmocka_unit_test(invalid_schedules_are_refused),
        cmocka_unit_test(warmup_ends_at_the_peak),
        cmocka_unit_test(constant),
        cmocka_unit_test(linear_and_cosine_reach_the_floor),
        cmocka_unit_test(cosine_cycles_begin_at_the_peak),
        cmocka_unit_test(step_and_exponential),
        cmocka_unit_test(wsd_falls_at_the_end),
        cmocka_unit_test(degenerate),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
