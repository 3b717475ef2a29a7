/* SPDX-License-Identifier: Apache-2.0 */
/* test_align_loss.c -- losses of alignment: derivatives against differences, sums over micro-batches, cases by hand,
 * texts. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/rng.h"
#include "tune/align/loss.h"

enum { SEQS = 6, MOST = 9 };

typedef struct {
    lm_align_seq seq[SEQS];
    double logp[SEQS][MOST], ref[SEQS][MOST], old[SEQS][MOST], correct[SEQS][MOST];
    double value[SEQS][MOST], old_value[SEQS][MOST], returns[SEQS][MOST], advantages[SEQS][MOST];
    double dlogp[SEQS][MOST], dvalue[SEQS][MOST];
    double entropy[SEQS][MOST], collision[SEQS][MOST], dentropy[SEQS][MOST];
    uint8_t mask[SEQS][MOST];
} set;

static double draw(lm_rng r, uint64_t *at)
{
    return lm_rng_uniform(r, (*at)++);
}

/* Sequences of different lengths, with prompts, of which one in three is mismatched if the loss reads such. */
static void make(set *s, uint64_t seed, const lm_align_spec *spec)
{
    lm_rng r = lm_rng_make(seed, "losses", 0);
    uint64_t at = 0;
    memset(s, 0, sizeof *s);
    for (int i = 0; i < SEQS; i++) {
        lm_align_seq *q = &s->seq[i];
        *q = (lm_align_seq){ .n = 4 + (i * 5 + (int)seed) % 6,
                             .logp = s->logp[i],
                             .ref = s->ref[i],
                             .old = s->old[i],
                             .correct = seed % 2 ? s->correct[i] : NULL,
                             .mask = s->mask[i],
                             .entropy = seed % 3 ? s->entropy[i] : NULL,
                             .collision = seed % 3 ? s->collision[i] : NULL,
                             .advantages = seed % 4 == 3 ? s->advantages[i] : NULL,
                             .advantage = draw(r, &at) * 2 - 1,
                             .good = i % 2 == 0,
                             .mismatched = lm_align_mismatches(spec) && i % 3 == 2,
                             .margin = draw(r, &at),
                             .score = draw(r, &at) * 4 - 2,
                             .value = s->value[i],
                             .old_value = s->old_value[i],
                             .returns = s->returns[i],
                             .dlogp = s->dlogp[i],
                             .dentropy = s->dentropy[i],
                             .dvalue = s->dvalue[i] };
        for (int t = 0; t < q->n; t++) {
            s->logp[i][t] = -3 * draw(r, &at) - 0.05;
            s->ref[i][t] = s->logp[i][t] + draw(r, &at) - 0.5;
            s->old[i][t] = s->logp[i][t] + 0.8 * (draw(r, &at) - 0.5);
            s->correct[i][t] = 0.5 + draw(r, &at);
            s->mask[i][t] = t >= 1 + i % 2 && t != 3;
            s->entropy[i][t] = 3 * draw(r, &at);
            s->collision[i][t] = 2 * s->entropy[i][t] / 3;
            s->value[i][t] = draw(r, &at) * 2 - 1;
            s->old_value[i][t] = s->value[i][t] + draw(r, &at) - 0.5;
            s->returns[i][t] = draw(r, &at) * 2 - 1;
            s->advantages[i][t] = draw(r, &at) * 2 - 1;
        }
    }
}

static double run(const lm_align_spec *spec, lm_align_seq *seq, int n, const lm_align_counts *c,
                  lm_align_metrics *m)
{
    lm_err e = { 0 };
    lm_align_batch b = { .seq = seq, .n = n, .counts = c, .metrics = m };
    assert_int_equal(lm_align_run(spec, &b, &e), LM_OK);
    return b.loss;
}

static lm_align_spec read(const char *text)
{
    lm_align_spec s;
    lm_err e = { 0 };
    if (lm_align_parse(text, &s, &e))
        fail_msg("%s: %s", text, e.what);
    return s;
}

/* The difference quotient at *x. */
static double slope(const lm_align_spec *spec, set *s, double *x)
{
    const double h = 1e-6;
    double at = *x, up, down;
    *x = at + h;
    up = run(spec, s->seq, SEQS, NULL, NULL);
    *x = at - h;
    down = run(spec, s->seq, SEQS, NULL, NULL);
    *x = at;
    return (up - down) / (2 * h);
}

static void check_slope(const char *text, const char *what, double got, double want)
{
    if (!(fabs(got - want) <= 2e-7 + 1e-6 * fabs(want)))
        fail_msg("%s: derivative by %s is %.12g, by differences %.12g", text, what, got, want);
}

/* Constants of the derivatives are no functions of what is moved: these losses are moved where they have none. */
static bool has_constants(const char *text)
{
    return strstr(text, "cispo") || strstr(text, "vespo") || strstr(text, "kto");
}

static void check_derivatives(const char *text, uint64_t seed)
{
    static set s;
    double dlogp[SEQS][MOST], dvalue[SEQS][MOST], dentropy[SEQS][MOST], dscore[SEQS];
    lm_align_spec spec = read(text);
    make(&s, seed, &spec);
    run(&spec, s.seq, SEQS, NULL, NULL);
    memcpy(dlogp, s.dlogp, sizeof dlogp);
    memcpy(dvalue, s.dvalue, sizeof dvalue);
    memcpy(dentropy, s.dentropy, sizeof dentropy);
    for (int i = 0; i < SEQS; i++)
        dscore[i] = s.seq[i].dscore;
    for (int i = 0; i < SEQS; i++) {
        for (int t = 0; t < s.seq[i].n && !has_constants(text); t++) {
            check_slope(text, "logp", dlogp[i][t], slope(&spec, &s, &s.logp[i][t]));
            check_slope(text, "value", dvalue[i][t], slope(&spec, &s, &s.value[i][t]));
            check_slope(text, "entropy", dentropy[i][t], slope(&spec, &s, &s.entropy[i][t]));
        }
        check_slope(text, "score", dscore[i], slope(&spec, &s, &s.seq[i].score));
    }
}

static const char *const variants[] = {
    "dpo:label_smoothing=0.2",
    "dpo:f_divergence_type=forward_kl",
    "dpo:f_divergence_type=js_divergence,ld_alpha=0.5",
    "dpo:f_divergence_type=alpha_divergence",
    "robust:label_smoothing=0.3",
    "ipo:average=off,ld_alpha=0.3",
    "hinge:beta=2",
    "discopop:beta=0.5",
    "dpo+0.5*sft+0.25*bco_pair",
    "aot:label_smoothing=0.1,ld_alpha=0.7",
    "simpo:label_smoothing=0.1,cpo_alpha=0.5,alpha=0.25",
    "cpo:alpha=0.1",
    "reward:center_rewards_coefficient=0.1",
    "grpo:beta=0.1",
    "grpo:beta=0.1,kl_estimator=k1,use_bias_correction_kl=off",
    "grpo:beta=0.1,kl_estimator=k2",
    "grpo:importance_sampling_level=sequence,beta=0.2",
    "grpo:delta=1.1,epsilon=0.05,epsilon_high=0.1",
    "grpo:off_policy_mask_threshold=0.01",
    "grpo:top_entropy_quantile=0.4,beta=0.1",
    "luspo:top_entropy_quantile=0.7",
    "grpo:entropy_coef=0.3",
    "luspo:entropy_coef=0.2,top_entropy_quantile=0.6",
    "gmpo:top_entropy_quantile=0.5,beta=0.1",
    "sapo:beta=0.1,importance_sampling_level=sequence",
    "gmpo:beta=0.3,epsilon=0.1",
    "ppo:epsilon=0.1,vf_coef=0.7",
    "rloo:epsilon=0.05",
    "gspo",
};

static void derivatives_are_those_of_differences(void **state)
{
    int n;
    const lm_align_loss *const *loss = lm_align_losses(&n);
    (void)state;
    for (uint64_t seed = 0; seed < 12; seed++) {
        for (int i = 0; i < n; i++)
            check_derivatives(loss[i]->name, seed);
        for (size_t i = 0; i < sizeof variants / sizeof *variants; i++)
            check_derivatives(variants[i], seed);
    }
}

/* Losses with constants: the derivative by logp is -weight A of the constants at this point. */
static void constants_are_not_derived(void **state)
{
    double logp[2] = { -1, -2 }, old[2] = { -1.5, -1.5 }, ref[2] = { -1, -1 }, d[2];
    lm_align_seq q = { .n = 2, .logp = logp, .old = old, .ref = ref, .advantage = 2, .dlogp = d };
    lm_align_spec cispo = read("cispo:epsilon_high=1.2"), vespo = read("vespo"), kto = read("kto");
    (void)state;
    assert_float_equal(run(&cispo, &q, 1, NULL, NULL), (1.2 * 2 * 1 + exp(-0.5) * 2 * 2) / 2,
                       1e-12);
    assert_float_equal(d[0], -1.2 * 2 / 2, 1e-12);
    assert_float_equal(d[1], -exp(-0.5) * 2 / 2, 1e-12);
    /* W = exp(0.5 - 0.5) = 1, so phi = 1 */
    assert_float_equal(run(&vespo, &q, 1, NULL, NULL), (2 * 1 + 2 * 2) / 2.0, 1e-12);
    assert_float_equal(d[0], -1, 1e-12);
    /* kto: D = -1; the mismatched one has D = 2, so z = 2 */
    double other[2] = { 0, 0 }, none[2];
    lm_align_seq both[2] = { q, q };
    both[0].good = true;
    both[1].mismatched = true;
    both[1].logp = other;
    both[1].dlogp = none;
    double x = 0.1 * (-1 - 2), sig = 1 / (1 + exp(-x));
    assert_float_equal(run(&kto, both, 2, NULL, NULL), 1 - sig, 1e-12);
    assert_float_equal(d[0], -0.1 * sig * (1 - sig), 1e-12);
    assert_float_equal(none[0], 0, 0);
}

/* WPO: loss and derivatives of a pair times the product of exp(mean (l + C)), which no derivative sees. */
static void pairs_are_weighed(void **state)
{
    static set s;
    double d[SEQS][MOST], plain;
    lm_align_spec dpo = read("dpo:ld_alpha=0.5"), wpo = read("dpo:ld_alpha=0.5,use_weighting=on");
    (void)state;
    make(&s, 4, &dpo);
    for (int i = 0; i < SEQS; i += 2) { /* one pair at a time */
        double by = 1;
        plain = run(&dpo, s.seq + i, 2, NULL, NULL);
        memcpy(d, s.dlogp, sizeof d);
        for (int k = i; k < i + 2; k++) {
            double sum = 0, n = 0;
            for (int t = 0; t < s.seq[k].n; t++)
                if (s.mask[k][t]) {
                    sum += s.logp[k][t] + s.collision[k][t];
                    n++;
                }
            by *= exp(sum / n);
        }
        assert_float_equal(run(&wpo, s.seq + i, 2, NULL, NULL), by * plain, 1e-12);
        for (int k = i; k < i + 2; k++)
            for (int t = 0; t < s.seq[k].n; t++)
                assert_float_equal(s.dlogp[k][t], by * d[k][t], 1e-12);
        s.seq[i].collision = s.seq[i + 1].collision = NULL; /* unknown */
        assert_float_equal(run(&wpo, s.seq + i, 2, NULL, NULL), plain, 0);
    }
}

/* The bonus is the mean entropy of the tokens of the step, whatever the loss's mean is. */
static void entropy_is_a_bonus(void **state)
{
    static const char *const losses[] = { "grpo:mean=sequences", "dapo", "dr_grpo", "sapo" };
    static set s;
    char text[96];
    (void)state;
    for (size_t i = 0; i < sizeof losses / sizeof *losses; i++) {
        lm_align_spec plain = read(losses[i]), more;
        double sum = 0, n = 0, loss;
        snprintf(text, sizeof text, "2*%s%sentropy_coef=0.5", losses[i],
                 strchr(losses[i], ':') ? "," : ":");
        more = read(text);
        make(&s, 5, &plain);
        for (int k = 0; k < SEQS; k++)
            for (int t = 0; t < s.seq[k].n; t++)
                if (s.mask[k][t]) {
                    sum += s.entropy[k][t];
                    n++;
                }
        loss = run(&plain, s.seq, SEQS, NULL, NULL);
        assert_float_equal(run(&more, s.seq, SEQS, NULL, NULL), 2 * (loss - 0.5 * sum / n), 1e-12);
        for (int k = 0; k < SEQS; k++)
            for (int t = 0; t < s.seq[k].n; t++)
                assert_float_equal(s.dentropy[k][t], s.mask[k][t] ? -1 / n : 0, 1e-12);
    }
    assert_int_equal(lm_align_entropy(&(lm_align_spec){ 0 }), LM_ENTROPY_READ);
    lm_align_spec wpo = read("sft+dpo:use_weighting=on"), bonus = read("cispo:entropy_coef=-1");
    assert_int_equal(lm_align_entropy(&wpo), LM_ENTROPY_COLLISION);
    assert_int_equal(lm_align_entropy(&bonus), LM_ENTROPY_TRAINS);
}

/* Micro-batches of a step add up to the whole, except where they couple sequences. */
static void parts_add_up(void **state)
{
    static set s;
    int n;
    const lm_align_loss *const *loss = lm_align_losses(&n);
    (void)state;
    for (int i = 0; i < n; i++) {
        char text[64];
        bool policy =
            loss[i]->kind == LM_ALIGN_POLICY && lm_hyper_find(loss[i]->hyper, "entropy_coef") >= 0;
        snprintf(text, sizeof text, "%s%s", loss[i]->name, policy ? ":entropy_coef=0.2" : "");
        lm_align_spec spec = read(text);
        double whole, parts = 0, d[SEQS][MOST];
        lm_align_counts c = { 0 };
        if (strstr("aot aot_unpaired bnpo kto", loss[i]->name))
            continue;
        make(&s, 7, &spec);
        whole = run(&spec, s.seq, SEQS, NULL, NULL);
        memcpy(d, s.dlogp, sizeof d);
        memset(s.dlogp, 0, sizeof s.dlogp);
        lm_align_count(s.seq, SEQS, &c);
        for (int k = 0; k < SEQS; k += 2)
            parts += run(&spec, s.seq + k, 2, &c, NULL);
        assert_float_equal(whole, parts, 1e-12);
        for (int k = 0; k < SEQS; k++)
            for (int t = 0; t < MOST; t++)
                assert_float_equal(s.dlogp[k][t], d[k][t], 1e-12);
    }
}

static void prompts_count_only_for_whole(void **state)
{
    static set s;
    int n;
    const lm_align_loss *const *loss = lm_align_losses(&n);
    (void)state;
    for (int i = 0; i < n; i++) {
        lm_align_spec spec = read(loss[i]->name);
        bool any = false;
        make(&s, 3, &spec);
        run(&spec, s.seq, SEQS, NULL, NULL);
        for (int k = 0; k < SEQS; k++)
            for (int t = 0; t < s.seq[k].n; t++)
                any |= !s.mask[k][t] && s.dlogp[k][t] != 0;
        assert_int_equal(any, loss[i]->whole);
    }
}

static double metric(const lm_align_metrics *m, const char *name)
{
    for (int i = 0; i < m->n; i++)
        if (strcmp(m->item[i].name, name) == 0)
            return lm_align_value(&m->item[i]);
    fail_msg("no metric %s", name);
    return NAN;
}

/* Two pairs by hand. */
static void metrics_of_pairs(void **state)
{
    double c[2] = { -1, -1 }, r[2] = { -2, -2 }, rc[2] = { -1.5, -1.5 }, rr[2] = { -1, -1 }, d[2];
    lm_align_seq q[4] = {
        { .n = 2, .logp = c, .ref = rc, .dlogp = d },
        { .n = 2, .logp = r, .ref = rr, .dlogp = d },
        { .n = 2, .logp = r, .ref = rr, .dlogp = d },
        { .n = 2, .logp = c, .ref = rc, .dlogp = d },
    };
    lm_align_metrics m = { .n = 0 };
    lm_align_spec dpo = read("dpo:beta=0.5");
    (void)state;
    /* D = 1 and -2: h = 3 and -3 */
    double want = (log1p(exp(-1.5)) + log1p(exp(1.5))) / 2;
    assert_float_equal(run(&dpo, q, 4, NULL, &m), want, 1e-12);
    assert_float_equal(metric(&m, "rewards/chosen"), (0.5 - 1) / 2, 1e-12);
    assert_float_equal(metric(&m, "rewards/rejected"), (-1 + 0.5) / 2, 1e-12);
    assert_float_equal(metric(&m, "rewards/accuracies"), 0.5, 0);
    assert_float_equal(metric(&m, "rewards/margins"), 0, 1e-12);
    assert_float_equal(metric(&m, "logps/chosen"), -3, 1e-12);
}

static void metrics_of_policies(void **state)
{
    double logp[4] = { -1, -1, -1, -1 }, old[4] = { -1.5, -0.5, -1, -1 }, d[4];
    lm_align_seq q = { .n = 4, .logp = logp, .old = old, .ref = old, .advantage = 1, .dlogp = d };
    lm_align_metrics m = { .n = 0 };
    lm_align_spec grpo = read("grpo:beta=0.1");
    (void)state;
    double up = exp(0.5), down = exp(-0.5);
    double kl = (exp(-0.5) - 1 + 0.5) * up + (exp(0.5) - 1 - 0.5) * down;
    assert_float_equal(run(&grpo, &q, 1, NULL, &m), (-1.2 - down - 2 + 0.1 * kl) / 4, 1e-12);
    assert_float_equal(metric(&m, "clip_ratio/high_mean"), 0.25, 0);
    assert_float_equal(metric(&m, "clip_ratio/low_mean"), 0, 0);
    q.advantage = -1;
    m.n = 0;
    run(&grpo, &q, 1, NULL, &m);
    assert_float_equal(metric(&m, "clip_ratio/high_mean"), 0, 0);
    assert_float_equal(metric(&m, "clip_ratio/low_mean"), 0.25, 0);
}

/* A weight in front of a loss scales it and all of its derivatives. */
static void weights_scale(void **state)
{
    int n;
    const lm_align_loss *const *loss = lm_align_losses(&n);
    static set a, b;
    (void)state;
    for (int i = 0; i < n; i++) {
        char text[64];
        snprintf(text, sizeof text, "2*%s", loss[i]->name);
        lm_align_spec one = read(loss[i]->name), two = read(text);
        make(&a, 3, &one);
        make(&b, 3, &two);
        double want = 2 * run(&one, a.seq, SEQS, NULL, NULL),
               got = run(&two, b.seq, SEQS, NULL, NULL);
        if (fabs(got - want) > 1e-12 * (1 + fabs(want)))
            fail_msg("%s: %.17g, not %.17g", text, got, want);
        for (int k = 0; k < SEQS; k++)
            for (int t = 0; t < a.seq[k].n; t++) {
                assert_float_equal(b.dlogp[k][t], 2 * a.dlogp[k][t], 1e-12);
                assert_float_equal(b.dvalue[k][t], 2 * a.dvalue[k][t], 1e-12);
            }
    }
}

/* GMPO: log-ratios are clipped where the advantage would carry them further, from above for a good
 * completion, from below for a bad one. */
static void means_of_clipped_ratios(void **state)
{
    const double x[3] = { -0.75, 0.875, 0.125 };
    double logp[3], old[3] = { -1, -1, -1 }, d[3];
    lm_align_seq q = { .n = 3, .logp = logp, .old = old, .advantage = 2, .dlogp = d };
    lm_align_spec gmpo = read("gmpo:epsilon=0.5");
    (void)state;
    for (int t = 0; t < 3; t++)
        logp[t] = old[t] + x[t];
    double w = exp((-0.75 + 0.5 + 0.125) / 3);
    assert_float_equal(run(&gmpo, &q, 1, NULL, NULL), -2 * w, 1e-12);
    assert_float_equal(d[0], -2 * w / 3, 1e-12);
    assert_float_equal(d[1], 0, 0);
    q.advantage = -2;
    w = exp((-0.5 + 0.875 + 0.125) / 3);
    assert_float_equal(run(&gmpo, &q, 1, NULL, NULL), 2 * w, 1e-12);
    assert_float_equal(d[0], 0, 0);
    assert_float_equal(d[1], 2 * w / 3, 1e-12);
}

/* PPO's shares of clipped tokens count those that the advantage would carry further. */
static void metrics_of_ppo(void **state)
{
    double logp[4] = { -1, -1, -1, -1 }, old[4] = { -1.5, -0.5, -1.25, -1 }, d[4],
           a[4] = { 1, 1, -1, -1 };
    lm_align_seq q = { .n = 4, .logp = logp, .old = old, .advantages = a, .dlogp = d };
    lm_align_metrics m = { .n = 0 };
    lm_align_spec ppo = read("ppo");
    (void)state;
    run(&ppo, &q, 1, NULL, &m);
    assert_float_equal(metric(&m, "clip_ratio/high_mean"), 0.25, 0); /* the first */
    assert_float_equal(metric(&m, "clip_ratio/low_mean"), 0, 0);
    assert_float_equal(metric(&m, "policy/approxkl_avg"), (0.25 + 0.25 + 0.0625) / 8, 1e-15);
    a[0] = a[1] = -1;
    m.n = 0;
    run(&ppo, &q, 1, NULL, &m);
    assert_float_equal(metric(&m, "clip_ratio/high_mean"), 0, 0);
    assert_float_equal(metric(&m, "clip_ratio/low_mean"), 0.25, 0); /* the second */
}

static void texts(void **state)
{
    lm_buf shown = { 0 };
    lm_err e = { 0 };
    lm_align_spec s = read("dpo:beta=0.25+0.5*sft"), again;
    (void)state;
    assert_int_equal(s.n, 2);
    assert_float_equal(lm_align_hyper(&s, "beta", 0), 0.25, 0);
    assert_float_equal(s.use[1].weight, 0.5, 0);
    assert_true(lm_align_reads_ref(&s));
    assert_int_equal(lm_align_set(&s, "beta", "0.3", &e), LM_OK);
    assert_int_equal(lm_align_show(&s, &shown, &e), LM_OK);
    assert_int_equal(lm_align_parse(shown.data, &again, &e), LM_OK);
    assert_int_equal(memcmp(&s, &again, sizeof s), 0);
    lm_buf_fini(&shown);
    s = read("cdpo");
    assert_float_equal(lm_align_hyper(&s, "label_smoothing", 0), 0.1, 0);
    s = read("grpo");
    assert_false(lm_align_reads_ref(&s));
    assert_int_equal(lm_align_set(&s, "beta", "0.04", &e), LM_OK);
    assert_true(lm_align_reads_ref(&s));
}

static void refusals(void **state)
{
    static const char *const bad[][2] = {
        { "dpoo", "unknown loss 'dpoo'" },
        { "dpo+kto", "dpo and kto need different data" },
        { "dpo:temperature=1", "has no 'temperature'" },
        { "dpo:beta=x", "x" },
        { "0*dpo", "a weight of 0" },
        { "-1*dpo", "a weight of -1" },
        { "", "unknown loss ''" },
        { "dpo+", "unknown loss ''" },
        { "exo_pair:label_smoothing=0", "label_smoothing 0" },
        { "sft+sft+sft+sft+sft", "more than 4" },
    };
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        lm_err e = { 0 };
        lm_align_spec s;
        assert_int_equal(lm_align_parse(bad[i][0], &s, &e), LM_EUSAGE);
        if (!strstr(e.what, bad[i][1]))
            fail_msg("'%s': %s: %s", bad[i][0], e.what, e.todo);
    }
    lm_err e = { 0 };
    lm_align_spec s = read("dpo");
    double x[1] = { -1 }, d[1];
    lm_align_seq q = { .n = 1, .logp = x, .ref = x, .dlogp = d };
    lm_align_batch b = { .seq = &q, .n = 1 };
    assert_int_equal(lm_align_run(&s, &b, &e), LM_EUSAGE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(derivatives_are_those_of_differences),
        cmocka_unit_test(constants_are_not_derived),
        cmocka_unit_test(pairs_are_weighed),
        cmocka_unit_test(entropy_is_a_bonus),
        cmocka_unit_test(parts_add_up),
        cmocka_unit_test(prompts_count_only_for_whole),
        cmocka_unit_test(metrics_of_pairs),
        cmocka_unit_test(metrics_of_policies),
        cmocka_unit_test(weights_scale),
        cmocka_unit_test(means_of_clipped_ratios),
        cmocka_unit_test(metrics_of_ppo),
        cmocka_unit_test(texts),
        cmocka_unit_test(refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
