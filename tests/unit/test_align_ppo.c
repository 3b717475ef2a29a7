/* SPDX-License-Identifier: Apache-2.0 */
/* test_align_ppo.c -- what a generation becomes, by hand: tokens of PPO with a reference, completions without a reward, the
 * coefficient of the KL, completions that rejection sampling keeps, and the file of samples. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <unistd.h>

#include "base/file.h"
#include "tune/align/on_policy_impl.h"

static void ok(lm_code rc, const lm_err *e)
{
    if (rc)
        fail_msg("%s: %s", e->where, e->what);
}

static void near(double got, double want)
{
    if (!(fabs(got - want) < 1e-12))
        fail_msg("%.17g, not %.17g", got, want);
}

static double noted(const lm_on_policy *p, const char *name)
{
    for (int i = 0; i < p->of_generation.n; i++)
        if (!strcmp(p->of_generation.item[i].name, name))
            return lm_align_value(&p->of_generation.item[i]);
    return NAN;
}

/* ---- PPO ---- */

static double old[3][2] = { { -1, -2 }, { -1, 0 }, { -3, -1 } },
              ref[3][2] = { { -2, -2 }, { -1, 0 }, { -1, -1 } },
              value[3][2] = { { 0.5, 1 }, { 0.25, 0 }, { 7, 7 } };

/* Two completions of two and one tokens, and one without a reward. */
static void fill(sampled s[3])
{
    const double reward[] = { 2, 1, NAN };
    for (int i = 0; i < 3; i++)
        s[i] = (sampled){ .n = i == 1 ? 1 : 2,
                          .old = old[i],
                          .ref = ref[i],
                          .value = value[i],
                          .reward = reward[i] };
}

static void tokens(void **state)
{
    lm_err e = { 0 };
    sampled s[3];
    lm_on_policy p = { .o = { .prompts = 3, .group = 1, .gamma = 0.5, .lambda = 0.5 },
                       .made = s,
                       .values = true,
                       .compares = true,
                       .kl = 0.1 };
    (void)state;
    fill(s);
    ok(lm_arena_new(&p.arena, 1 << 12, &e), &e);
    ok(on_policy_value(&p, &e), &e);
    /* first: rewards -0.1 and 2, deltas -0.1 + 0.5 - 0.5 and 2 - 1; second: 1 - 0.25 */
    const double a[] = { -0.1 + 0.25 * 1, 1, 0.75 }, mean = (0.15 + 1 + 0.75) / 3;
    double var = 0;
    for (int i = 0; i < 3; i++)
        var += (a[i] - mean) * (a[i] - mean) / 2;
    near(s[0].returns[0], a[0] + 0.5);
    near(s[0].returns[1], 2);
    near(s[1].returns[0], 1);
    near(s[0].advantages[0], (a[0] - mean) / sqrt(var + 1e-8));
    near(s[0].advantages[1], (a[1] - mean) / sqrt(var + 1e-8));
    near(s[1].advantages[0], (a[2] - mean) / sqrt(var + 1e-8));
    near(s[2].advantage, 0); /* and it changes no other */
    assert_true(is_silent(&p, &s[2]) && !is_silent(&p, &s[0]));
    near(noted(&p, "val/mean"), 1.75 / 3);
    near(noted(&p, "val/returns"), (0.65 + 2 + 1) / 3);
    const double r[] = { 0.65, 2, 1 }, rm = 3.65 / 3;
    double all = 0, missed = 0;
    for (int i = 0; i < 3; i++) {
        all += (r[i] - rm) * (r[i] - rm);
        missed += (a[i] - mean) * (a[i] - mean);
    }
    near(noted(&p, "val/explained_variance"), 1 - missed / all);
    /* rewards of tokens by their deviation, not their mean */
    p.o.whiten_rewards = true;
    p.o.gamma = 0;
    ok(on_policy_value(&p, &e), &e);
    const double w[] = { -0.1, 2, 1 }, wm = 2.9 / 3;
    var = 0;
    for (int i = 0; i < 3; i++)
        var += (w[i] - wm) * (w[i] - wm) / 2;
    near(s[0].returns[0], (w[0] - wm) / sqrt(var + 1e-8) + wm);
    near(s[0].returns[1], (w[1] - wm) / sqrt(var + 1e-8) + wm);
    lm_arena_free(p.arena);
}

static void coefficient(void **state)
{
    sampled s[3];
    lm_on_policy p = { .o = { .prompts = 3, .group = 1, .kl_reward = 0.1, .kl_horizon = 30 },
                       .made = s,
                       .compares = true,
                       .kl = 0.1 };
    const double kl = (1 + 0 - 2) / 3.0;
    (void)state;
    fill(s);
    on_policy_control(&p);
    near(noted(&p, "objective/kl"), kl);
    near(noted(&p, "objective/non_score_reward"), -0.1 * kl);
    near(p.kl, 0.1); /* without a target */
    p.o.kl_target = 0.5;
    on_policy_control(&p); /* far below it */
    near(p.kl, 0.1 * (1 - 0.2 * 3 / 30));
    s[2].ref = s[0].ref; /* -2 + 1 = -1 in place of -2: 1/3 - ... */
    s[2].n = 1;          /* -3 + 2 = -1: all are 0 */
    s[0].n = 2;
    s[1].ref = ref[0]; /* -1 + 2 = 1: a mean of 1/3 */
    p.kl = 0.1;
    p.o.kl_target = 0.3;
    on_policy_control(&p);
    near(p.kl, 0.1 * (1 + (1 / 0.9 - 1) * 3 / 30));
}

/* ---- rejection sampling ---- */

static void kept(void **state)
{
    uint32_t ids[5][3] = { { 9, 1, 2 }, { 9, 1, 3 }, { 9, 1, 2 }, { 9, 4, 4 }, { 9, 5, 5 } };
    const double reward[] = { 1, 3, 1, NAN, 3 };
    sampled s[5];
    lm_on_policy p = { .o = { .prompts = 1, .group = 5, .best = 3, .least = -INFINITY },
                       .made = s,
                       .keeps = true };
    int64_t out[5];
    (void)state;
    for (int i = 0; i < 5; i++)
        s[i] = (sampled){ .text = { ids[i], 3, 1 }, .n = 2, .reward = reward[i] };
    assert_int_equal(on_policy_kept(&p, 0, out), 3);
    assert_int_equal(out[0], 1);
    assert_int_equal(out[1], 4);
    assert_int_equal(out[2], 0); /* the third is equal to it */
    p.o.best = 5;
    assert_int_equal(on_policy_kept(&p, 0, out), 3); /* no other has a reward */
    p.o.least = 3;
    assert_int_equal(on_policy_kept(&p, 0, out), 2);
    p.o.least = 3.5;
    assert_int_equal(on_policy_kept(&p, 0, out), 0);
    p.o.least = 0;
    p.o.mask_truncated = s[1].truncated = true;
    assert_int_equal(on_policy_kept(&p, 0, out), 2);
    assert_int_equal(out[0], 4);
}

static void put(lm_samples *s, int64_t step, const json_t *prompt)
{
    lm_err e = { 0 };
    const lm_sample x = { .step = step,
                          .prompt = prompt,
                          .text = "2+2=",
                          .text_len = 4,
                          .completion = "4\n",
                          .len = 2,
                          .reward = 0.5 };
    ok(lm_samples_add(s, &x, &e), &e);
    ok(lm_samples_flush(s, &e), &e);
}

static void samples(void **state)
{
    static const char text[] =
        "{\"prompt\":\"2+2=\",\"completion\":\"4\\n\",\"reward\":0.5,\"step\":1}\n"
        "{\"prompt\":[{\"role\":\"user\",\"content\":\"?\"}],\"completion\":[{\"role\":"
        "\"assistant\","
        "\"content\":\"4\\n\"}],\"reward\":0.5,\"step\":2}\n";
    char path[] = "/tmp/test_samples.XXXXXX";
    lm_err e = { 0 };
    lm_samples *s = NULL;
    lm_buf got = { 0 };
    json_t *asked = json_pack("[{ssss}]", "role", "user", "content", "?");
    (void)state;
    close(mkstemp(path));
    assert_int_equal(lm_samples_open(path, -1, false, &s, &e), LM_EUSAGE);
    e = (lm_err){ 0 };
    ok(lm_samples_open(path, -1, true, &s, &e), &e);
    put(s, 1, NULL);
    put(s, 2, asked);
    put(s, 3, NULL);
    lm_samples_close(s);
    ok(lm_samples_open(path, 2, false, &s, &e), &e); /* the third is gone */
    ok(lm_file_read(path, 1 << 20, &got, &e), &e);
    assert_string_equal(got.data, text);
    lm_samples_close(s);
    FILE *f = fopen(path, "w");
    fputs("no record\n", f);
    fclose(f);
    assert_int_equal(lm_samples_open(path, 2, false, &s, &e), LM_EFORMAT);
    lm_buf_fini(&got);
    json_decref(asked);
    unlink(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tokens),
        cmocka_unit_test(coefficient),
        cmocka_unit_test(kept),
        cmocka_unit_test(samples),
    };
    return cmocka_run_group_tests_name("align_ppo", tests, NULL, NULL);
}
