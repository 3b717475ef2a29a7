/* SPDX-License-Identifier: Apache-2.0 */
/* loss_policy.c -- losses of policies from sampled completions with advantages: GRPO and its
 * relatives.
 *
 * Each gives a token a term p_t, of its ratio rho_t or of that of its sequence, and a weight w_t,
 * of which the mean consists.  As constants in the derivatives: advantages, corrections, cispo's
 * ratios, vespo's phi. */
#include "tune/align/loss_impl.h"

typedef enum { TERM_CLIP, TERM_CISPO, TERM_SAPO, TERM_VESPO } term;
typedef enum {
    MEAN_SEQUENCES, /* of each, then over sequences */
    MEAN_MICRO,     /* over the tokens of the micro-batch */
    MEAN_STEP,      /* over the tokens of the step */
    MEAN_LENGTH,    /* over sequences times max_completion_length */
    MEAN_SUMS,      /* sum of each, mean over sequences */
} mean;

/* A micro-batch and the options of its loss. */
typedef struct {
    const lm_align_use *u;
    lm_align_batch *b;
    term term;
    mean mean;
    bool by_sequence, correct_kl;
    double low, high, delta, beta, threshold;
    double certain; /* tokens with a lower entropy have only the KL */
    int kl;
} policy;

static double old_of(const lm_align_seq *q, int64_t t)
{
    return q->old ? q->old[t] : q->logp[t];
}

static double advantage_of(const lm_align_seq *q, int64_t t)
{
    return q->advantages ? q->advantages[t] : q->advantage;
}

static double sum_ratios(const lm_align_seq *q)
{
    double sum = 0;
    for (int64_t t = 0; t < q->n; t++)
        if (lm_align_counts_token(q, t))
            sum += q->logp[t] - old_of(q, t);
    return sum;
}

/* ---- entropy ---- */

/* The mean over the tokens of the step, `of` each micro-batch the share that its tokens have:
 * without those below the quantile it is that of the others. */
static void add_entropy(const policy *p, int64_t tokens)
{
    double coef = lm_align_get(p->u, "entropy_coef", 0), sum = 0, n = 0;
    if (coef == 0)
        return;
    for (int pass = 0; pass < 2; pass++)
        for (int64_t i = 0; i < p->b->n; i++) {
            lm_align_seq *q = &p->b->seq[i];
            for (int64_t t = 0; q->entropy && t < q->n; t++) {
                if (!lm_align_counts_token(q, t) || lm_align_is_certain(q, t, p->certain))
                    continue;
                if (!pass) {
                    n++;
                    sum += q->entropy[t];
                } else if (q->dentropy) {
                    q->dentropy[t] -= p->u->weight * coef * (double)tokens /
                                      (n * fmax((double)p->b->counts->tokens, 1));
                }
            }
        }
    if (n > 0)
        p->b->loss -= p->u->weight * coef * sum * (double)tokens /
                      (n * fmax((double)p->b->counts->tokens, 1));
}

/* ---- weights ---- */

static double token_share(const policy *p, const lm_align_seq *q, int64_t micro_tokens)
{
    const lm_align_counts *c = p->b->counts;
    double sequences = fmax((double)c->sequences, 1), tokens = fmax((double)c->tokens, 1);
    switch (p->mean) {
    case MEAN_SEQUENCES:
        return p->u->weight / (sequences * fmax((double)lm_align_length(q), 1));
    case MEAN_MICRO: /* the mean over micro-batches, by their sequences */
        return p->u->weight * (double)p->b->n / (sequences * fmax((double)micro_tokens, 1));
    case MEAN_STEP:
        return p->u->weight / tokens;
    case MEAN_LENGTH:
        return p->u->weight / (sequences * fmax(lm_align_get(p->u, LM_ALIGN_LENGTH, 0), 1));
    default:
        return p->u->weight / sequences;
    }
}

/* DeepSeek-V3.2's mask (arXiv:2512.02556): sequences with a negative advantage that the policy has
 * left no longer count.  0: off. */
static bool keeps_sequence(const policy *p, const lm_align_seq *q, int64_t t)
{
    double kl = 0;
    if (p->threshold <= 0 || advantage_of(q, t) >= 0)
        return true;
    for (int64_t k = 0; k < q->n; k++)
        if (lm_align_counts_token(q, k)) {
            double x = (q->sampled ? q->sampled[k] : old_of(q, k)) - q->logp[k];
            kl += isnan(x) ? 0 : x;
        }
    return kl / fmax((double)lm_align_length(q), 1) <= p->threshold;
}

/* vespo's weight of a sequence: phi(W) = e^lambda W^k e^(-lambda W), 1 at W = 1. */
static double phi(const policy *p, const lm_align_seq *q, double advantage)
{
    const double least = log(1e-8);
    bool up = advantage >= 0;
    double w = 0, k = lm_align_get(p->u, up ? "vespo_k_pos" : "vespo_k_neg", 2);
    double lambda = lm_align_get(p->u, up ? "vespo_lambda_pos" : "vespo_lambda_neg", 3);
    for (int64_t t = 0; t < q->n; t++)
        if (lm_align_counts_token(q, t)) {
            w += lm_clamp(q->logp[t] - old_of(q, t), -20, 20);
            w += q->correct ? lm_clamp(log(q->correct[t]), least, 20) : 0;
        }
    w = lm_clamp(w, least, 20);
    return exp(lambda + k * w - lambda * exp(w));
}

/* ---- terms ---- */

/* The term of a token, its derivatives by rho and by l directly. */
typedef struct {
    double value, by_ratio, by_logp;
} token;

static token clip_term(const policy *p, double rho, double a)
{
    double bounded = p->delta > 0 ? fmin(rho, p->delta) : rho;
    double clipped = lm_clamp(rho, 1 - p->low, 1 + p->high);
    bool first = bounded * a <= clipped * a;
    bool inside = rho >= 1 - p->low && rho <= 1 + p->high;
    bool moves = first ? bounded == rho : inside;
    return (token){ -(first ? bounded : clipped) * a, moves ? -a : 0, 0 };
}

static token make_term(const policy *p, double rho, double a, double logp, double weight)
{
    double tau, s;
    switch (p->term) {
    case TERM_CISPO:
        s = fmin(rho, p->high) * a;
        return (token){ -s * logp, 0, -s };
    case TERM_SAPO:
        tau = lm_align_get(p->u, a > 0 ? "sapo_temperature_pos" : "sapo_temperature_neg", 1);
        s = lm_sigmoid(tau * (rho - 1));
        return (token){ -4 / tau * s * a, -4 * s * (1 - s) * a, 0 };
    case TERM_VESPO:
        return (token){ -weight * a * logp, 0, -weight * a };
    default:
        return clip_term(p, rho, a);
    }
}

/* The KL of a token by its estimator, with derivatives as above. */
static token kl_term(const policy *p, double logp, double ref, double rho)
{
    double x = logp - ref, r = exp(-x), value, slope;
    switch (p->kl) {
    case 0:
        value = x, slope = 1;
        break;
    case 1:
        value = x * x / 2, slope = x;
        break;
    default:
        value = r - 1 + x, slope = 1 - r;
    }
    return p->correct_kl ? (token){ value * rho, value, slope * rho } : (token){ value, 0, slope };
}

/* ---- a sequence ---- */

typedef struct {
    double length, ratio; /* of the sequence */
    double back;          /* the sum of derivatives by `ratio` */
    double low, high;     /* tokens clipped */
    double kl;
} sums;

static void note_clip(const policy *p, sums *s, double rho, double a)
{
    if (p->term == TERM_CLIP) {
        double bounded = p->delta > 0 ? fmin(rho, p->delta) : rho;
        s->low += bounded < 1 - p->low && a < 0;
        s->high += bounded > 1 + p->high && a > 0;
    } else if (p->term == TERM_CISPO) {
        s->high += rho > p->high && a > 0;
    }
}

static void run_token(const policy *p, lm_align_seq *q, int64_t t, double share, double weight,
                      sums *s)
{
    double logp = q->logp[t], a = advantage_of(q, t);
    double rho = p->by_sequence ? s->ratio : exp(logp - old_of(q, t));
    bool counts = !lm_align_is_certain(q, t, p->certain) && keeps_sequence(p, q, t);
    double by = counts ? q->correct && p->term != TERM_VESPO ? q->correct[t] : 1 : 0;
    token x = make_term(p, rho, a, logp, weight),
          sum = { x.value * by, x.by_ratio * by, x.by_logp * by };
    if (p->beta > 0) {
        token k = kl_term(p, logp, q->ref[t], rho);
        s->kl += k.value;
        sum.value += p->beta * k.value;
        sum.by_ratio += p->beta * k.by_ratio;
        sum.by_logp += p->beta * k.by_logp;
    }
    note_clip(p, s, rho, a);
    p->b->loss += share * sum.value;
    q->dlogp[t] += share * sum.by_logp;
    if (p->by_sequence)
        s->back += share * sum.by_ratio;
    else
        q->dlogp[t] += share * sum.by_ratio * rho;
}

static void note_sequence(const policy *p, const lm_align_seq *q, const sums *s)
{
    lm_align_metrics *m = p->b->metrics;
    double n = s->length;
    if (p->beta > 0)
        lm_align_note(m, "kl", s->kl, n, LM_ALIGN_MEAN);
    lm_align_note(m, "ratio", p->by_sequence ? s->ratio * n : exp(sum_ratios(q) / fmax(n, 1)) * n,
                  n, LM_ALIGN_MEAN);
    if (p->term == TERM_CLIP) {
        lm_align_note(m, "clip_ratio/low_mean", s->low, n, LM_ALIGN_MEAN);
        lm_align_note(m, "clip_ratio/high_mean", s->high, n, LM_ALIGN_MEAN);
        lm_align_note(m, "clip_ratio/region_mean", s->low + s->high, n, LM_ALIGN_MEAN);
        lm_align_note(m, "clip_ratio/low_min", s->low / n, n > 0, LM_ALIGN_LEAST);
        lm_align_note(m, "clip_ratio/high_max", s->high / n, n > 0, LM_ALIGN_MOST);
    } else if (p->term == TERM_CISPO) {
        lm_align_note(m, "cispo_clip_ratio", s->high, n, LM_ALIGN_MEAN);
    }
}

static void run_sequence(const policy *p, lm_align_seq *q, int64_t micro_tokens)
{
    sums s = { .length = (double)lm_align_length(q) };
    double share = token_share(p, q, micro_tokens), weight = 1;
    s.ratio = exp(sum_ratios(q) / fmax(s.length, 1));
    if (p->term == TERM_VESPO && q->n) {
        weight = phi(p, q, advantage_of(q, q->n - 1));
        lm_align_note(p->b->metrics, "vespo/phi_seq_mean", weight, 1, LM_ALIGN_MEAN);
    }
    for (int64_t t = 0; t < q->n; t++)
        if (lm_align_counts_token(q, t))
            run_token(p, q, t, share, weight, &s);
    if (p->by_sequence)
        lm_align_spread(q, s.back * s.ratio / fmax(s.length, 1));
    note_sequence(p, q, &s);
}

static lm_code run_policy(const lm_align_use *u, lm_align_batch *b, term of, mean over)
{
    double low = lm_align_get(u, "epsilon", 0.2), high = lm_align_get(u, "epsilon_high", 0);
    if (lm_align_get(u, "mean", 1) == 0)
        over = MEAN_STEP;
    policy p = { .u = u,
                 .b = b,
                 .term = of,
                 .mean = over,
                 .by_sequence = lm_align_get(u, "importance_sampling_level", 0) != 0,
                 .correct_kl = lm_align_get(u, "use_bias_correction_kl", 1) != 0,
                 .low = low,
                 .high = high > 0 ? high : low,
                 .delta = lm_align_get(u, "delta", 0),
                 .beta = lm_align_get(u, "beta", 0),
                 .threshold = lm_align_get(u, "off_policy_mask_threshold", 0),
                 .certain = lm_align_certain_below(b, lm_align_get(u, "top_entropy_quantile", 1)),
                 .kl = (int)lm_align_get(u, "kl_estimator", 2) };
    int64_t tokens = 0;
    for (int64_t i = 0; i < b->n; i++)
        tokens += lm_align_length(&b->seq[i]);
    for (int64_t i = 0; i < b->n; i++)
        run_sequence(&p, &b->seq[i], tokens);
    add_entropy(&p, tokens);
    return LM_OK;
}

/* ---- the table ---- */

static bool reads_ref(const lm_align_use *u)
{
    return lm_align_get(u, "beta", 0) > 0;
}

#define BONUS                                                                     \
    {                                                                             \
        "entropy_coef", 0, -1e6, 1e6, "weight of the mean entropy, a bonus", NULL \
    }
#define KL                                                                \
    BETA(0, "weight of the KL to the reference"),                         \
        { "kl_estimator", 2, 0, 2, "estimator of the KL", "k1 k2 k3" },   \
    {                                                                     \
        "use_bias_correction_kl", 1, 0, 1, "KL times the ratio", "off on" \
    }
#define CLIP                                                                        \
    { "epsilon", 0.2, 0, 1e6, "lower and upper clip", NULL },                       \
        { "epsilon_high", 0, 0, 1e6, "upper clip; 0: that of epsilon", NULL },      \
    {                                                                               \
        "delta", 0, 0, 1e6, "bound of ratios at negative advantages; 0: none", NULL \
    }
#define LEVEL                                                                                   \
    {                                                                                           \
        "importance_sampling_level", 0, 0, 1, "ratios of tokens or sequences", "token sequence" \
    }
#define SEQUENCE_LEVEL                                                                          \
    {                                                                                           \
        "importance_sampling_level", 1, 0, 1, "ratios of tokens or sequences", "token sequence" \
    }
#define LEFT_OUT                                                         \
    BONUS, ENTROPY,                                                      \
    {                                                                    \
        "off_policy_mask_threshold", 0, 0, 1e6,                          \
            "KL beyond which bad sequences are left out; 0: never", NULL \
    }

static const lm_hyper hyper_clip[] = { CLIP, LEVEL, LEFT_OUT, KL, { 0 } };
static const lm_hyper hyper_grpo[] = {
    CLIP,
    LEVEL,
    { "mean", 0, 0, 1, "over the tokens of the step (dapo), or of each sequence as published",
      "tokens sequences" },
    LEFT_OUT,
    KL,
    { 0 },
};
static const lm_hyper hyper_luspo[] = { CLIP, SEQUENCE_LEVEL, LEFT_OUT, KL, { 0 } };
static const lm_hyper hyper_length[] = {
    CLIP,     LEVEL,
    LEFT_OUT, { LM_ALIGN_LENGTH, 0, 0, 1e9, "divisor; 0: the most new tokens", LM_WHOLE },
    KL,       { 0 },
};
static const lm_hyper hyper_cispo[] = {
    { "epsilon_high", 5, 0, 1e6, "bound of ratios", NULL }, LEVEL, LEFT_OUT, KL, { 0 },
};
static const lm_hyper hyper_sapo[] = {
    { "sapo_temperature_pos", 1, 1e-3, 1e6, "steepness at positive advantages", NULL },
    { "sapo_temperature_neg", 1.05, 1e-3, 1e6, "steepness at negative advantages", NULL },
    LEVEL,
    LEFT_OUT,
    KL,
    { 0 },
};
static const lm_hyper hyper_vespo[] = {
    { "vespo_k_pos", 2, 0, 1e6, "power at positive advantages", NULL },
    { "vespo_lambda_pos", 3, 1e-4, 1e6, "decay at positive advantages", NULL },
    { "vespo_k_neg", 3, 0, 1e6, "power at negative advantages", NULL },
    { "vespo_lambda_neg", 2, 1e-4, 1e6, "decay at negative advantages", NULL },
    LEFT_OUT,
    KL,
    { 0 },
};

#define POLICY_LOSS(loss, published, text, table, term, mean)                      \
    static lm_code run_##loss(const lm_align_use *u, lm_align_batch *b, lm_err *e) \
    {                                                                              \
        (void)e;                                                                   \
        return run_policy(u, b, term, mean);                                       \
    }                                                                              \
    const lm_align_loss lm_loss_##loss = { .name = #loss,                          \
                                           .about = text,                          \
                                           .paper = "arXiv:" published,            \
                                           .kind = LM_ALIGN_POLICY,                \
                                           .rate = 1e-6,                           \
                                           .hyper = table,                         \
                                           .reads_ref = reads_ref,                 \
                                           .run = run_##loss }

POLICY_LOSS(grpo, "2402.03300", "clipped ratios; mean over tokens of the step", hyper_grpo,
            TERM_CLIP, MEAN_SEQUENCES);
POLICY_LOSS(bnpo, "2506.02710", "grpo, mean over tokens of the micro-batch", hyper_clip, TERM_CLIP,
            MEAN_MICRO);
POLICY_LOSS(dapo, "2503.14476", "grpo with mean=tokens", hyper_clip, TERM_CLIP, MEAN_STEP);
POLICY_LOSS(dr_grpo, "2503.20783", "grpo, divided by a constant length", hyper_length, TERM_CLIP,
            MEAN_LENGTH);
POLICY_LOSS(luspo, "2602.05261", "sums of sequences, ratios of sequences", hyper_luspo, TERM_CLIP,
            MEAN_SUMS);
POLICY_LOSS(cispo, "2506.13585", "bounded ratios as weights", hyper_cispo, TERM_CISPO, MEAN_STEP);
POLICY_LOSS(sapo, "2511.20347", "soft gates instead of clips", hyper_sapo, TERM_SAPO,
            MEAN_SEQUENCES);
POLICY_LOSS(vespo, "2602.10693", "gamma weights of sequences", hyper_vespo, TERM_VESPO, MEAN_STEP);
