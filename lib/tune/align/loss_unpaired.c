/* SPDX-License-Identifier: Apache-2.0 */
/* loss_unpaired.c -- losses of single answers that are good or bad (KTO), and of scores (reward
 * models). */
#include "tune/align/loss_impl.h"

/* ---- KTO ---- */

static double log_ratio(const lm_align_seq *q)
{
    return lm_align_sum(q, q->logp) - lm_align_sum(q, q->ref);
}

/* The estimate of KL(policy || reference) from answers to the prompts of other records, at least 0.
 * Derivatives treat it as a constant. */
static double reference_point(const lm_align_batch *b)
{
    double sum = 0;
    int64_t n = 0;
    for (int64_t i = 0; i < b->n; i++)
        if (b->seq[i].mismatched) {
            sum += log_ratio(&b->seq[i]);
            n++;
        }
    return n && sum > 0 ? sum / (double)n : 0;
}

static void note_answer(const lm_align_use *u, lm_align_batch *b, const lm_align_seq *q, double d)
{
    double beta = lm_align_get(u, "beta", 0.1), logp = lm_align_sum(q, q->logp);
    lm_align_note(b->metrics, q->good ? "rewards/chosen" : "rewards/rejected", beta * d, 1,
                  LM_ALIGN_MEAN);
    lm_align_note(b->metrics, q->good ? "logps/chosen" : "logps/rejected", logp, 1, LM_ALIGN_MEAN);
}

/* Good: w (1 - sig(beta (D - z))); bad: w (1 - sig(beta (z - D))). */
static lm_code run_unpaired(const lm_align_use *u, lm_align_batch *b, double z)
{
    double beta = lm_align_get(u, "beta", 0.1);
    double share = u->weight / (double)(b->counts->sequences > 0 ? b->counts->sequences : 1);
    for (int64_t i = 0; i < b->n; i++) {
        lm_align_seq *q = &b->seq[i];
        if (q->mismatched)
            continue;
        double w = lm_align_get(u, q->good ? "desirable_weight" : "undesirable_weight", 1);
        double d = log_ratio(q), sign = q->good ? 1 : -1, x = sign * beta * (d - z);
        b->loss += share * w * lm_sigmoid(-x);
        lm_align_spread(q, -share * w * sign * beta * lm_sigmoid(x) * lm_sigmoid(-x));
        note_answer(u, b, q, d);
    }
    return LM_OK;
}

static lm_code run_kto(const lm_align_use *u, lm_align_batch *b, lm_err *e)
{
    double z = reference_point(b);
    (void)e;
    lm_align_note(b->metrics, "kl", z, 1, LM_ALIGN_MEAN);
    return run_unpaired(u, b, z);
}

static lm_code run_apo(const lm_align_use *u, lm_align_batch *b, lm_err *e)
{
    (void)e;
    return run_unpaired(u, b, 0);
}

static bool always(const lm_align_use *u)
{
    (void)u;
    return true;
}

static const lm_hyper hyper_kto[] = {
    BETA(0.1, "strength of the ties to the reference"),
    { "desirable_weight", 1, 0, 1e6, "weight of good answers", NULL },
    { "undesirable_weight", 1, 0, 1e6, "weight of bad answers", NULL },
    { 0 },
};

const lm_align_loss lm_loss_kto = { .name = "kto",
                                    .about = "good and bad answers, not in pairs",
                                    .paper = "arXiv:2402.01306",
                                    .kind = LM_ALIGN_UNPAIRED,
                                    .rate = 1e-6,
                                    .hyper = hyper_kto,
                                    .reads_ref = always,
                                    .mismatches = true,
                                    .run = run_kto };
const lm_align_loss lm_loss_apo_zero_unpaired = { .name = "apo_zero_unpaired",
                                                  .about = "apo_zero, not in pairs",
                                                  .paper = "arXiv:2408.06266",
                                                  .kind = LM_ALIGN_UNPAIRED,
                                                  .rate = 1e-6,
                                                  .hyper = hyper_kto,
                                                  .reads_ref = always,
                                                  .run = run_apo };

/* ---- reward models ---- */

static void note_scores(lm_align_batch *b, double chosen, double rejected)
{
    lm_align_metrics *m = b->metrics;
    lm_align_note(m, "min_reward", fmin(chosen, rejected), 1, LM_ALIGN_LEAST);
    lm_align_note(m, "mean_reward", chosen + rejected, 2, LM_ALIGN_MEAN);
    lm_align_note(m, "max_reward", fmax(chosen, rejected), 1, LM_ALIGN_MOST);
    lm_align_note(m, "accuracy", chosen > rejected, 1, LM_ALIGN_MEAN);
    lm_align_note(m, "margin", chosen - rejected, 1, LM_ALIGN_MEAN);
}

static lm_code run_reward(const lm_align_use *u, lm_align_batch *b, lm_err *e)
{
    double center = lm_align_get(u, "center_rewards_coefficient", 0);
    double share = 2 * u->weight / (double)(b->counts->sequences > 0 ? b->counts->sequences : 1);
    (void)e;
    for (int64_t i = 0; i < b->n; i += 2) {
        lm_align_seq *c = &b->seq[i], *r = &b->seq[i + 1];
        double x = c->score - r->score - c->margin, sum = c->score + r->score;
        double d = -lm_sigmoid(-x);
        b->loss += share * (center * sum * sum - lm_log_sigmoid(x));
        c->dscore += share * (d + 2 * center * sum);
        r->dscore += share * (-d + 2 * center * sum);
        note_scores(b, c->score, r->score);
    }
    return LM_OK;
}

static const lm_hyper hyper_reward[] = {
    { "center_rewards_coefficient", 0, 0, 1e6, "pull of the sums of scores to 0", NULL },
    { 0 },
};

const lm_align_loss lm_loss_reward = { .name = "reward",
                                       .about = "scores of answers (Bradley and Terry)",
                                       .paper = "arXiv:2203.02155",
                                       .kind = LM_ALIGN_SCORES,
                                       .rate = 1e-4,
                                       .hyper = hyper_reward,
                                       .run = run_reward };
