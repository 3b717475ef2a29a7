/* SPDX-License-Identifier: Apache-2.0 */
/* test_align_value.c -- the value of every loss of alignment on a small case, against its
 * definition in the paper.
 *
 * Differences of a loss confirm its derivatives, not that it is the right loss: a wrong constant or
 * sign has the derivatives of the wrong loss. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>

#include "tune/align/loss.h"

typedef struct {
    const char *text;
    double want;
} value;

static double s(double x)
{
    return 1 / (1 + exp(-x));
}

static double ls(double x)
{
    return -log1p(exp(-x));
}

static void check(const value *v, size_t n, lm_align_seq *seq, int n_seq)
{
    for (size_t i = 0; i < n; i++) {
        lm_align_spec spec;
        lm_err e = { 0 };
        lm_align_batch b = { .seq = seq, .n = n_seq };
        if (lm_align_parse(v[i].text, &spec, &e) || lm_align_run(&spec, &b, &e))
            fail_msg("%s: %s", v[i].text, e.what);
        if (!(fabs(b.loss - v[i].want) <= 1e-12 * (1 + fabs(v[i].want))))
            fail_msg("%s is %.15g, by its definition %.15g", v[i].text, b.loss, v[i].want);
    }
}
#define CHECK(v, seq, n) check((v), sizeof(v) / sizeof *(v), (seq), (n))

/* Every answer follows one token of a prompt, which only the likelihood of a whole text reads. */
static uint8_t mask[] = { 0, 1, 1, 1 };
static double junk[4];

/* Log-ratios 0.7 of 2 tokens and -0.4 of 3; log-probabilities -3 and -3.4. */
static double c_logp[] = { -4, -1, -2 }, c_ref[] = { -9, -1.5, -2.2 };
static double r_logp[] = { -4, -1, -1.4, -1 }, r_ref[] = { -9, -0.8, -1.1, -1.1 };
static const double dc = 0.7, dr = -0.4, lc = -3, lr = -3.4;

static lm_align_seq answer(double *logp, double *ref, int64_t n)
{
    return (lm_align_seq){ .n = n, .logp = logp, .ref = ref, .mask = mask, .dlogp = junk };
}

static void pairs_with_reference(void **state)
{
    const double b = 0.5, x = b * (dc - dr), w = s(x / 0.3), h = dc / 2 - dr / 3;
    const double fc = 1 - exp(-dc), fr = 1 - exp(-dr);                       /* forward KL */
    const double jc = dc - log1p(exp(dc)), jr = dr - log1p(exp(dr));         /* Jensen-Shannon */
    const double ac = expm1(-0.7 * dc) / -0.7, ar = expm1(-0.7 * dr) / -0.7; /* alpha 0.3 */
    const value v[] = {
        { "dpo:beta=0.5", -ls(x) },
        { "dpo:beta=0.5,label_smoothing=0.2", -0.8 * ls(x) - 0.2 * ls(-x) },
        { "dpo:beta=0.5,f_divergence_type=forward_kl", -ls(b * (fc - fr)) },
        { "dpo:beta=0.5,f_divergence_type=js_divergence", -ls(b * (jc - jr)) },
        { "dpo:beta=0.5,f_divergence_type=alpha_divergence,f_alpha_divergence_coef=0.3",
          -ls(b * (ac - ar)) },
        /* the third token of the rejected answer counts half */
        { "dpo:beta=0.5,ld_alpha=0.5", -ls(b * (dc - (-0.2 - 0.3 + 0.05))) },
        { "robust:beta=0.5,label_smoothing=0.2", (-0.8 * ls(x) + 0.2 * ls(-x)) / 0.6 },
        { "hinge:beta=0.5", 1 - x },
        { "hinge:beta=5", 0 },
        { "ipo:beta=0.5", (h - 1) * (h - 1) },
        { "ipo:beta=0.5,average=off", (dc - dr - 1) * (dc - dr - 1) },
        { "exo_pair:beta=0.5,label_smoothing=0.1",
          s(x) * (ls(x) - log(0.9)) + s(-x) * (ls(-x) - log(0.1)) },
        { "nca_pair:beta=0.5", -ls(b * dc) - 0.5 * ls(-b * dc) - 0.5 * ls(-b * dr) },
        { "bco_pair:beta=0.5", -ls(b * dc) - ls(-b * dr) },
        { "sppo_hard:beta=0.5", (dc - 1) * (dc - 1) + (dr + 1) * (dr + 1) },
        { "apo_zero:beta=0.5", 1 - s(b * dc) + s(b * dr) },
        { "apo_down:beta=0.5", s(b * dc) + 1 - s(x) },
        { "discopop:beta=0.5,discopop_tau=0.3", -ls(x) * (1 - w) + exp(-x) * w },
        { "sigmoid_norm:beta=0.5", -ls(b * h) },
        { "0.5*dpo:beta=0.5+2*sft", -0.5 * ls(x) + 2 * 1.5 },
    };
    lm_align_seq q[] = { answer(c_logp, c_ref, 3), answer(r_logp, r_ref, 4) };
    (void)state;
    CHECK(v, q, 2);
}

static void pairs_without_reference(void **state)
{
    const double b = 0.5, mc = lc / 2, mr = lr / 3, nll = 1.5;
    const double odds = mc - log1p(-exp(mc)) - (mr - log1p(-exp(mr)));
    const double pc = -expm1(-0.25 * mc) / 0.25, pr = -expm1(-0.25 * mr) / 0.25; /* AlphaPO */
    const value v[] = {
        { "sft", nll },
        { "orpo:beta=0.5", 7.0 / 3 - b * ls(odds) }, /* the likelihood of prompts too */
        { "cpo:beta=0.5", -ls(b * (lc - lr)) + nll },
        { "cpo:beta=0.5,cpo_alpha=0,label_smoothing=0.2",
          -0.8 * ls(b * (lc - lr)) - 0.2 * ls(-b * (lc - lr)) },
        { "cpo_hinge:beta=0.5", 1 - b * (lc - lr) + nll },
        { "cpo_ipo:beta=0.5,cpo_alpha=0", (mc - mr - 1) * (mc - mr - 1) },
        { "simpo:beta=0.5,simpo_gamma=0.3", -ls(b * (mc - mr) - 0.3) },
        { "simpo:beta=0.5,simpo_gamma=0.3,alpha=0.25", -ls(b * (pc - pr) - 0.3) },
    };
    lm_align_seq q[] = { answer(c_logp, c_ref, 3), answer(r_logp, r_ref, 4) };
    (void)state;
    CHECK(v, q, 2);
}

/* Margins of the policy 0.4 and 2.8, of the reference -0.7 and -1.5; log-ratios 0.7, 0.8 and -0.4,
 * -3.5: sorted, the first of one meets the second of the other. */
static void sorted_pairs(void **state)
{
    static double c2[] = { -4, -0.5, -0.7 }, rc2[] = { -9, -1, -1 };
    static double r2[] = { -4, -2, -2 }, rr2[] = { -9, -0.2, -0.3 };
    const value v[] = {
        { "aot:beta=0.5", (-ls(0.5 * (0.4 + 1.5)) - ls(0.5 * (2.8 + 0.7))) / 2 },
        { "aot_unpaired:beta=0.5", (-ls(0.5 * (0.7 + 3.5)) - ls(0.5 * (0.8 + 0.4))) / 2 },
        { "dpo:beta=0.5", (-ls(0.5 * 1.1) - ls(0.5 * 4.3)) / 2 },
    };
    lm_align_seq q[] = { answer(c_logp, c_ref, 3), answer(r_logp, r_ref, 4), answer(c2, rc2, 3),
                         answer(r2, rr2, 3) };
    (void)state;
    CHECK(v, q, 4);
}

/* A good answer, a bad one, and one to another prompt whose log-ratio is 0.3. */
static void single_answers(void **state)
{
    static double m[] = { -4, -0.5, -0.7 }, mr[] = { -9, -0.6, -0.9 };
    const double b = 0.5;
    const value v[] = {
        { "kto:beta=0.5", (1 - s(b * (dc - 0.3)) + 1 - s(b * (0.3 - dr))) / 2 },
        { "kto:beta=0.5,desirable_weight=2,undesirable_weight=0.25",
          (2 * (1 - s(b * (dc - 0.3))) + 0.25 * (1 - s(b * (0.3 - dr)))) / 2 },
    };
    const value below[] = { { "kto:beta=0.5", (1 - s(b * dc) + 1 - s(-b * dr)) / 2 } };
    const value apo[] = { { "apo_zero_unpaired:beta=0.5", (1 - s(b * dc) + 1 - s(-b * dr)) / 2 } };
    lm_align_seq q[] = { answer(c_logp, c_ref, 3), answer(r_logp, r_ref, 4), answer(m, mr, 3) };
    (void)state;
    q[0].good = q[2].good = true;
    q[2].mismatched = true;
    CHECK(v, q, 3);
    CHECK(apo, q, 2);
    q[2].logp = mr;
    q[2].ref = m; /* -0.3: the estimate is not below 0 */
    CHECK(below, q, 3);
}

static void scores(void **state)
{
    const value v[] = {
        { "reward", -ls(1.2 - 0.3 - 0.4) },
        { "reward:center_rewards_coefficient=0.1", -ls(0.5) + 0.1 * 1.5 * 1.5 },
    };
    lm_align_seq q[] = { { .score = 1.2, .margin = 0.4 }, { .score = 0.3 } };
    (void)state;
    CHECK(v, q, 2);
}

/* Two completions: ratios e^0.5, e^-0.1 at the advantage 1, and e^-0.4 at -2. */
static double p_logp[] = { -4, -1, -2 }, p_old[] = { -9, -1.5, -1.9 }, p_ref[] = { -9, -0.8, -2.5 };
static double n_logp[] = { -4, -1 }, n_old[] = { -9, -0.6 }, n_ref[] = { -9, -1 };

static lm_align_seq completion(double *logp, double *old, double *ref, int64_t n, double advantage)
{
    lm_align_seq q = answer(logp, ref, n);
    q.old = old;
    q.advantage = advantage;
    return q;
}

static double k3(double x)
{
    return exp(-x) - 1 + x;
}

static void policies(void **state)
{
    const double up = exp(0.5), down = exp(-0.1), low = exp(-0.4), of_sequence = exp(0.2);
    /* min(ratio A, clipped ratio A) with bounds 0.8 and 1.2 or 1.3 */
    const double first = -(1.2 + down), higher = -(1.3 + down), second = 1.6;
    const double soft =
        -4 * (s(up - 1) + s(down - 1)) / 2 + 2 * 4 / 1.05 * s(1.05 * (low - 1)); /* of sapo */
    const double phi_p = exp(3 + 2 * 0.4 - 3 * exp(0.4)),
                 phi_n = exp(2 - 3 * 0.4 - 2 * exp(-0.4)); /* of vespo */
    const double kl = k3(-0.2) * up + k3(0.5) * down;
    const value v[] = {
        { "grpo", (first + second) / 3 },
        { "grpo:mean=sequences", (first / 2 + second) / 2 },
        { "grpo:mean=sequences,epsilon_high=0.3", (higher / 2 + second) / 2 },
        { "grpo:mean=sequences,importance_sampling_level=sequence", (-1.2 + second) / 2 },
        { "grpo:mean=sequences,importance_sampling_level=sequence,epsilon_high=0.3",
          (-of_sequence + 1.6) / 2 },
        { "gspo:epsilon=0.2,epsilon_high=0.3", (-of_sequence + 1.6) / 2 },
        { "bnpo", (first + second) / 3 },
        { "dapo", (first + second) / 3 },
        { "dapo:off_policy_mask_threshold=0.5", (first + second) / 3 },
        { "dapo:off_policy_mask_threshold=0.3", first / 3 },
        { "dapo:beta=0.1", (first + second + 0.1 * kl) / 3 },
        { "dapo:beta=0.1,use_bias_correction_kl=off",
          (first + second + 0.1 * (k3(-0.2) + k3(0.5))) / 3 },
        { "dapo:beta=0.1,kl_estimator=k1,use_bias_correction_kl=off",
          (first + second + 0.1 * (-0.2 + 0.5)) / 3 },
        { "dapo:beta=0.1,kl_estimator=k2,use_bias_correction_kl=off",
          (first + second + 0.1 * (0.04 + 0.25) / 2) / 3 },
        { "dr_grpo:max_completion_length=10", (first + second) / 20 },
        { "luspo:epsilon_high=0.3", (-2 * of_sequence + second) / 2 },
        { "cispo:epsilon_high=1.4", (1.4 * 1 + down * 2 - low * 2 * 1) / 3 },
        { "sapo", soft / 2 },
        { "vespo", (phi_p * 3 - phi_n * 2) / 3 },
        { "rloo:epsilon=0.5,epsilon_high=0.4", (-1.4 + 2 * low) / 2 },
    };
    lm_align_seq q[] = { completion(p_logp, p_old, p_ref, 3, 1),
                         completion(n_logp, n_old, n_ref, 2, -2) };
    (void)state;
    CHECK(v, q, 2);
    /* the first token of the first completion has a low entropy; the reference counts everywhere.  Of 0.5, 2 and 3 the
     * median is 2, and the quantile 0.4 is 0.5 + 0.8 * 1.5 = 1.7; the prompt's do not count */
    static double sure[] = { 0, 0.5, 2 }, unsure[] = { 0, 3 };
    const value all[] = { { "dapo:top_entropy_quantile=0.5", (first + second) / 3 } };
    q[0].entropy = sure;
    CHECK(all, q, 2); /* not all are known */
    q[1].entropy = unsure;
    const value few[] = {
        { "dapo", (first + second) / 3 },
        { "dapo:top_entropy_quantile=0.6", (-down + second) / 3 },
        { "dapo:top_entropy_quantile=0.5", (-down + second) / 3 },
        { "dapo:top_entropy_quantile=0.49", second / 3 },
        { "dapo:beta=0.1,top_entropy_quantile=0.6", (-down + second + 0.1 * kl) / 3 },
        { "grpo:top_entropy_quantile=0.6,mean=sequences", (-down / 2 + second) / 2 },
        { "gmpo:top_entropy_quantile=0.6", (-down + 2 * low) / 2 },
    };
    CHECK(few, q, 2);
    /* weights against the sampler's numbers */
    static double correct[] = { 1, 0.5, 2 };
    q[0].correct = correct;
    const value weighed[] = {
        { "dapo", (-0.5 * 1.2 - 2 * down + second) / 3 },
        { "rloo:epsilon=0.5,epsilon_high=0.4", (-1.4 * 1.25 + 2 * low) / 2 },
        { "gmpo:epsilon=0.6,epsilon_high=0.6", (-of_sequence * 1.25 + 2 * low) / 2 },
    };
    CHECK(weighed, q, 2);
}

/* Values 0.5 and 1, before 0 and 1.1, returns -1 and 2: the clip only makes the loss larger. */
static void values(void **state)
{
    static double now[] = { 0, 0.5, 1 }, old[] = { 0, 0, 1.1 }, returns[] = { 0, -1, 2 },
                  up[] = { 0, 1, 1 }, dvalue[3];
    const double first = 0.5 * 1.5 * 1.5, second = 0.5 * 1 * 1, clipped = 0.5 * 2.2 * 2.2;
    const double policy = -(1.2 + exp(-0.1));
    const value v[] = { { "ppo", (policy + 0.1 * (first + second)) / 2 },
                        { "ppo:vf_coef=0.5", (policy + 0.5 * (first + second)) / 2 } };
    const value far[] = { { "ppo", (policy + 0.1 * (clipped + second)) / 2 } };
    lm_align_seq q = completion(p_logp, p_old, p_ref, 3, 9);
    (void)state;
    q.advantages = up;
    q.value = now;
    q.old_value = old;
    q.returns = returns;
    q.dvalue = dvalue;
    CHECK(v, &q, 1);
    returns[1] = 2.4; /* 0.2 is farther from it than 0.5 */
    CHECK(far, &q, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pairs_with_reference),
        cmocka_unit_test(pairs_without_reference),
        cmocka_unit_test(sorted_pairs),
        cmocka_unit_test(single_answers),
        cmocka_unit_test(scores),
        cmocka_unit_test(policies),
        cmocka_unit_test(values),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
