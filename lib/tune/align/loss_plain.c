/* SPDX-License-Identifier: Apache-2.0 */
/* loss_plain.c -- the losses of pairs that need no reference: sft, ORPO, CPO and SimPO. */
#include "tune/align/loss_impl.h"

/* ---- sft ---- */

static lm_code run_sft(const lm_align_use *u, lm_align_batch *b, lm_err *e)
{
    (void)e;
    b->loss += lm_align_sft(b, false, u->weight);
    return LM_OK;
}

static const lm_hyper hyper_none[] = { { 0 } };

const lm_align_loss lm_loss_sft = { .name = "sft",
                                    .about = "likelihood of the chosen answers",
                                    .paper = "arXiv:2203.02155",
                                    .kind = LM_ALIGN_PAIRS,
                                    .rate = 1e-6,
                                    .hyper = hyper_none,
                                    .run = run_sft };

/* ---- ORPO ---- */

static double share_of(const lm_align_use *u, const lm_align_batch *b)
{
    return u->weight * 2.0 / (double)(b->counts->sequences > 0 ? b->counts->sequences : 1);
}

/* log(1 - e^a) of a mean log-probability; the certain answer (a = 0) is held off by one part in
 * 2^40. */
static double log_other(double a, double *slope)
{
    double other = -expm1(fmin(a, -0x1p-40));
    *slope = 1 - 1 / other; /* -e^a / (1 - e^a) */
    return log(other);
}

static lm_code run_orpo(const lm_align_use *u, lm_align_batch *b, lm_err *e)
{
    double beta = lm_align_get(u, "beta", 0.1), share = share_of(u, b);
    double nll = lm_align_sft(b, true, u->weight);
    (void)e;
    b->loss += nll;
    lm_align_note(b->metrics, "nll_loss", nll / u->weight * (double)b->counts->sft_whole,
                  (double)b->counts->sft_whole, LM_ALIGN_MEAN);
    for (int64_t i = 0; i < b->n; i += 2) {
        double a[2], n[2], slope[2], odds = 0;
        for (int k = 0; k < 2; k++) {
            lm_align_seq *q = &b->seq[i + k];
            n[k] = fmax((double)lm_align_length(q), 1);
            a[k] = lm_align_sum(q, q->logp) / n[k];
            odds += (k ? -1 : 1) * (a[k] - log_other(a[k], &slope[k]));
        }
        double d = -share * beta * lm_sigmoid(-odds);
        b->loss -= share * beta * lm_log_sigmoid(odds);
        lm_align_spread(&b->seq[i], d * (1 - slope[0]) / n[0]);
        lm_align_spread(&b->seq[i + 1], -d * (1 - slope[1]) / n[1]);
        lm_align_note(b->metrics, "log_odds_ratio", lm_log_sigmoid(odds), 1, LM_ALIGN_MEAN);
        lm_align_note(b->metrics, "log_odds_chosen", odds, 1, LM_ALIGN_MEAN);
        lm_align_note_pair(b,
                           &(lm_align_pair_note){ { beta * a[0], beta * a[1] }, { a[0], a[1] } });
    }
    return LM_OK;
}

static const lm_hyper hyper_orpo[] = { BETA(0.1, "weight of the odds ratio"), { 0 } };

const lm_align_loss lm_loss_orpo = { .name = "orpo",
                                     .about = "likelihood and odds ratio, no reference",
                                     .paper = "arXiv:2403.07691",
                                     .kind = LM_ALIGN_PAIRS,
                                     .rate = 1e-6,
                                     .hyper = hyper_orpo,
                                     .whole = true,
                                     .run = run_orpo };

/* ---- CPO and SimPO ---- */

/* AlphaPO's reward of a log-probability (arXiv:2501.03884): (1 - p^-alpha) / alpha, log p for alpha
 * 0. */
static double shape_reward(double x, double alpha, double *slope)
{
    *slope = alpha != 0 ? exp(-alpha * x) : 1;
    return alpha != 0 ? (1 - *slope) / alpha : x;
}

/* Value and derivative by the difference of rewards. */
typedef double (*plain_loss)(const lm_align_use *u, double h, double *d);

static double sigmoid_loss(const lm_align_use *u, double h, double *d)
{
    double beta = lm_align_get(u, "beta", 0.1), e = lm_align_get(u, "label_smoothing", 0);
    double x = beta * h - lm_align_get(u, "simpo_gamma", 0);
    *d = beta * (-(1 - e) * lm_sigmoid(-x) + e * lm_sigmoid(x));
    return -(1 - e) * lm_log_sigmoid(x) - e * lm_log_sigmoid(-x);
}

static double hinge_loss(const lm_align_use *u, double h, double *d)
{
    double beta = lm_align_get(u, "beta", 0.1), x = 1 - beta * h;
    *d = x > 0 ? -beta : 0;
    return x > 0 ? x : 0;
}

static double square_loss(const lm_align_use *u, double h, double *d)
{
    double x = h - 1 / (2 * lm_align_get(u, "beta", 0.1));
    *d = 2 * x;
    return x * x;
}

static lm_code run_plain(const lm_align_use *u, lm_align_batch *b, bool average, plain_loss loss)
{
    double share = share_of(u, b), beta = lm_align_get(u, "beta", 0.1);
    double alpha = lm_align_get(u, "alpha", 0), sft = lm_align_get(u, "cpo_alpha", 0), d;
    if (sft != 0) {
        double nll = lm_align_sft(b, false, u->weight * sft);
        b->loss += nll;
        lm_align_note(b->metrics, "nll_loss", nll / (u->weight * sft) * (double)b->counts->sft,
                      (double)b->counts->sft, LM_ALIGN_MEAN);
    }
    for (int64_t i = 0; i < b->n; i += 2) {
        double x[2], n[2], r[2], slope[2];
        for (int k = 0; k < 2; k++) {
            lm_align_seq *q = &b->seq[i + k];
            n[k] = average ? fmax((double)lm_align_length(q), 1) : 1;
            x[k] = lm_align_sum(q, q->logp) / n[k];
            r[k] = shape_reward(x[k], alpha, &slope[k]);
        }
        b->loss += share * loss(u, r[0] - r[1], &d);
        lm_align_spread(&b->seq[i], share * d * slope[0] / n[0]);
        lm_align_spread(&b->seq[i + 1], -share * d * slope[1] / n[1]);
        lm_align_note_pair(b,
                           &(lm_align_pair_note){ { beta * r[0], beta * r[1] }, { x[0], x[1] } });
    }
    return LM_OK;
}

#define STEEPNESS BETA(0.1, "steepness of the margin")
#define SFT(value)                                                                   \
    {                                                                                \
        "cpo_alpha", value, 0, 1e6, "weight of the chosen answers' likelihood", NULL \
    }
#define ALPHA                                                                         \
    {                                                                                 \
        "alpha", 0, -10, 10, "shape of rewards (AlphaPO); 0: log-probabilities", NULL \
    }

static const lm_hyper hyper_cpo[] = { STEEPNESS, SMOOTHING(0, 0.5), SFT(1), ALPHA, { 0 } };
static const lm_hyper hyper_plain[] = { STEEPNESS, SFT(1), ALPHA, { 0 } };
static const lm_hyper hyper_simpo[] = {
    STEEPNESS,
    { "simpo_gamma", 0.5, 0, 1e6, "margin wanted", NULL },
    SMOOTHING(0, 0.5),
    SFT(0),
    ALPHA,
    { 0 },
};

static lm_code run_cpo(const lm_align_use *u, lm_align_batch *b, lm_err *e)
{
    (void)e;
    return run_plain(u, b, false, sigmoid_loss);
}

static lm_code run_cpo_hinge(const lm_align_use *u, lm_align_batch *b, lm_err *e)
{
    (void)e;
    return run_plain(u, b, false, hinge_loss);
}

static lm_code run_cpo_ipo(const lm_align_use *u, lm_align_batch *b, lm_err *e)
{
    (void)e;
    return run_plain(u, b, true, square_loss);
}

static lm_code run_simpo(const lm_align_use *u, lm_align_batch *b, lm_err *e)
{
    (void)e;
    return run_plain(u, b, true, sigmoid_loss);
}

const lm_align_loss lm_loss_cpo = { .name = "cpo",
                                    .about = "contrastive, no reference",
                                    .paper = "arXiv:2401.08417",
                                    .kind = LM_ALIGN_PAIRS,
                                    .rate = 1e-6,
                                    .hyper = hyper_cpo,
                                    .run = run_cpo };
const lm_align_loss lm_loss_cpo_hinge = { .name = "cpo_hinge",
                                          .about = "CPO with a margin of at least 1",
                                          .paper = "arXiv:2401.08417",
                                          .kind = LM_ALIGN_PAIRS,
                                          .rate = 1e-6,
                                          .hyper = hyper_plain,
                                          .run = run_cpo_hinge };
const lm_align_loss lm_loss_cpo_ipo = { .name = "cpo_ipo",
                                        .about = "CPO with IPO's squared distance",
                                        .paper = "arXiv:2401.08417",
                                        .kind = LM_ALIGN_PAIRS,
                                        .rate = 1e-6,
                                        .hyper = hyper_plain,
                                        .run = run_cpo_ipo };
const lm_align_loss lm_loss_simpo = { .name = "simpo",
                                      .about = "mean log-probabilities and a margin, no reference",
                                      .paper = "arXiv:2405.14734",
                                      .kind = LM_ALIGN_PAIRS,
                                      .rate = 1e-6,
                                      .hyper = hyper_simpo,
                                      .run = run_simpo };
