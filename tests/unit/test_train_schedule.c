/* SPDX-License-Identifier: Apache-2.0 */
/* Learning rates against their closed forms. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

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

/* No span left to fall in: no division by nothing. */
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

int main(void)
{
    const struct CMUnitTest tests[] = {
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
