/* SPDX-License-Identifier: Apache-2.0 */
/* loss_ppo.c -- losses of policies whose terms are sequences (RLOO, GMPO), and PPO with its
 * values. */
#include "tune/align/loss_impl.h"

static double old_of(const lm_align_seq *q, int64_t t)
{
    return q->old ? q->old[t] : q->logp[t];
}

static double share_of(const lm_align_use *u, const lm_align_batch *b)
{
    return u->weight / (double)(b->counts->sequences > 0 ? b->counts->sequences : 1);
}

/* epsilon and epsilon_high. */
static void clips(const lm_align_use *u, double *low, double *high)
{
    double h = lm_align_get(u, "epsilon_high", 0);
    *low = lm_align_get(u, "epsilon", 0.2);
    *high = h > 0 ? h : *low;
}

static void note_clips(lm_align_batch *b, double low, double high, double n)
{
    lm_align_note(b->metrics, "clip_ratio/low_mean", low, n, LM_ALIGN_MEAN);
    lm_align_note(b->metrics, "clip_ratio/high_mean", high, n, LM_ALIGN_MEAN);
    lm_align_note(b->metrics, "clip_ratio/region_mean", low + high, n, LM_ALIGN_MEAN);
}

/* -min(rho A, clip(rho) A); its derivative by rho. */
static double clipped(double rho, double a, double low, double high, double *d)
{
    double c = lm_clamp(rho, 1 - low, 1 + high);
    *d = rho * a <= c * a || c == rho ? -a : 0;
    return -fmin(rho * a, c * a);
}

/* ---- RLOO ---- */

/* The correction for the sampler's numerics of a loss of whole sequences: the mean of those of
 * tokens. */
static double correction(const lm_align_seq *q)
{
    return q->correct ? lm_align_sum(q, q->correct) / fmax((double)lm_align_length(q), 1) : 1;
}

static lm_code run_rloo(const lm_align_use *u, lm_align_batch *b, lm_err *e)
{
    double low, high, d, share = share_of(u, b);
    (void)e;
    clips(u, &low, &high);
    for (int64_t i = 0; i < b->n; i++) {
        lm_align_seq *q = &b->seq[i];
        double x = 0, a = q->advantage, by = share * correction(q);
        for (int64_t t = 0; t < q->n; t++)
            x += lm_align_counts_token(q, t) ? q->logp[t] - old_of(q, t) : 0;
        double rho = exp(x);
        b->loss += by * clipped(rho, a, low, high, &d);
        lm_align_spread(q, by * d * rho);
        note_clips(b, rho < 1 - low && a<0, rho> 1 + high && a > 0, 1);
        lm_align_note(b->metrics, "ratio", rho, 1, LM_ALIGN_MEAN);
    }
    return LM_OK;
}

/* ---- GMPO ---- */

/* The clipped log-ratio of a token; false: at its bound. */
static bool clip_log(double *x, double a, double low, double high)
{
    double bound = a > 0 ? fmin(*x, high) : fmax(*x, -low);
    bool free = bound == *x;
    *x = bound;
    return free;
}

static bool chosen(const lm_align_seq *q, int64_t t, double certain)
{
    return lm_align_counts_token(q, t) && !lm_align_is_certain(q, t, certain);
}

static void run_gmpo_sequence(const lm_align_use *u, lm_align_batch *b, lm_align_seq *q,
                              double certain)
{
    double low, high, share = share_of(u, b), beta = lm_align_get(u, "beta", 0);
    double a = q->advantage, sum = 0, n = 0, length = fmax((double)lm_align_length(q), 1), kl = 0;
    clips(u, &low, &high);
    for (int64_t t = 0; t < q->n; t++)
        if (chosen(q, t, certain)) {
            double x = q->logp[t] - old_of(q, t);
            clip_log(&x, a, low, high);
            sum += x;
            n++;
        }
    double by = share * correction(q), w = exp(sum / fmax(n, 1)), back = -by * a * w / fmax(n, 1);
    b->loss -= by * a * w;
    for (int64_t t = 0; t < q->n; t++) {
        double x = q->logp[t] - old_of(q, t);
        if (chosen(q, t, certain) && clip_log(&x, a, low, high))
            q->dlogp[t] += back;
        if (beta > 0 && lm_align_counts_token(q, t)) {
            double r = exp(q->ref[t] - q->logp[t]);
            kl += r - 1 - (q->ref[t] - q->logp[t]);
            q->dlogp[t] += share * beta * (1 - r) / length;
        }
    }
    b->loss += share * beta * kl / length;
    if (beta > 0)
        lm_align_note(b->metrics, "kl", kl, length, LM_ALIGN_MEAN);
    lm_align_note(b->metrics, "ratio", w, 1, LM_ALIGN_MEAN);
}

static lm_code run_gmpo(const lm_align_use *u, lm_align_batch *b, lm_err *e)
{
    const double certain = lm_align_certain_below(b, lm_align_get(u, "top_entropy_quantile", 1));
    (void)e;
    for (int64_t i = 0; i < b->n; i++)
        run_gmpo_sequence(u, b, &b->seq[i], certain);
    return LM_OK;
}

/* ---- PPO ---- */

static double value_term(const lm_align_use *u, const lm_align_seq *q, int64_t t, double *d,
                         bool *held)
{
    double range = lm_align_get(u, "cliprange_value", 0.2), v = q->value[t];
    double old = q->old_value ? q->old_value[t] : v, c = lm_clamp(v, old - range, old + range);
    double plain = v - q->returns[t], bound = c - q->returns[t];
    *held = bound * bound > plain * plain;
    *d = *held ? 0 : plain; /* where the clipped one is larger, it is a constant */
    return 0.5 * fmax(plain * plain, bound * bound);
}

typedef struct {
    double policy, value, kl, ratio, low, high, held, n;
} ppo_sums;

static void run_ppo_token(const lm_align_use *u, lm_align_seq *q, int64_t t, double share,
                          ppo_sums *s)
{
    double low, high, d, x = q->logp[t] - old_of(q, t), rho = exp(x);
    double a = q->advantages ? q->advantages[t] : q->advantage;
    double correct = q->correct ? q->correct[t] : 1, c = lm_align_get(u, "vf_coef", 0.1);
    bool held = false;
    clips(u, &low, &high);
    s->policy += correct * clipped(rho, a, low, high, &d);
    q->dlogp[t] += share * correct * d * rho;
    s->low += rho < 1 - low && a < 0;
    s->high += rho > 1 + high && a > 0;
    s->kl += x * x / 2;
    s->ratio += rho;
    if (q->value) {
        s->value += value_term(u, q, t, &d, &held);
        q->dvalue[t] += share * c * d;
        s->held += held;
    }
    s->n++;
}

static lm_code run_ppo(const lm_align_use *u, lm_align_batch *b, lm_err *e)
{
    ppo_sums s = { 0 };
    double share = u->weight / (double)(b->counts->tokens > 0 ? b->counts->tokens : 1);
    (void)e;
    for (int64_t i = 0; i < b->n; i++)
        for (int64_t t = 0; t < b->seq[i].n; t++)
            if (lm_align_counts_token(&b->seq[i], t))
                run_ppo_token(u, &b->seq[i], t, share, &s);
    b->loss += share * (s.policy + lm_align_get(u, "vf_coef", 0.1) * s.value);
    note_clips(b, s.low, s.high, s.n);
    lm_align_note(b->metrics, "ratio", s.ratio, s.n, LM_ALIGN_MEAN);
    lm_align_note(b->metrics, "policy/approxkl_avg", s.kl, s.n, LM_ALIGN_MEAN);
    lm_align_note(b->metrics, "loss/policy_avg", s.policy, s.n, LM_ALIGN_MEAN);
    if (b->n && b->seq[0].value) {
        lm_align_note(b->metrics, "loss/value_avg", s.value, s.n, LM_ALIGN_MEAN);
        lm_align_note(b->metrics, "val/clipfrac_avg", s.held, s.n, LM_ALIGN_MEAN);
    }
    return LM_OK;
}

/* ---- the table ---- */

static bool reads_ref(const lm_align_use *u)
{
    return lm_align_get(u, "beta", 0) > 0;
}

#define CLIP(value)                                                       \
    { "epsilon", value, 0, 1e6, "lower and upper clip", NULL },           \
    {                                                                     \
        "epsilon_high", 0, 0, 1e6, "upper clip; 0: that of epsilon", NULL \
    }

static const lm_hyper hyper_rloo[] = { CLIP(0.2), { 0 } };
static const lm_hyper hyper_gmpo[] = {
    CLIP(0.4), BETA(0, "weight of the KL to the reference"), ENTROPY, { 0 }
};
static const lm_hyper hyper_ppo[] = {
    CLIP(0.2),
    { "vf_coef", 0.1, 0, 1e6, "weight of the values' loss", NULL },
    { "cliprange_value", 0.2, 0, 1e6, "bound of a value's change", NULL },
    { 0 },
};

const lm_align_loss lm_loss_rloo = { .name = "rloo",
                                     .about = "clipped ratios of whole sequences",
                                     .paper = "arXiv:2402.14740",
                                     .kind = LM_ALIGN_POLICY,
                                     .rate = 1e-6,
                                     .hyper = hyper_rloo,
                                     .run = run_rloo };
const lm_align_loss lm_loss_gmpo = { .name = "gmpo",
                                     .about = "geometric mean of clipped ratios",
                                     .paper = "arXiv:2507.20673",
                                     .kind = LM_ALIGN_POLICY,
                                     .rate = 1e-6,
                                     .hyper = hyper_gmpo,
                                     .reads_ref = reads_ref,
                                     .run = run_gmpo };
const lm_align_loss lm_loss_ppo = { .name = "ppo",
                                    .about = "clipped ratios, and values of tokens",
                                    .paper = "arXiv:1707.06347",
                                    .kind = LM_ALIGN_POLICY,
                                    .rate = 3e-6,
                                    .hyper = hyper_ppo,
                                    .values = true,
                                    .run = run_ppo };
