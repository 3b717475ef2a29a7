/* SPDX-License-Identifier: Apache-2.0 */
/* loss_pair.c -- the losses of pairs against a reference: DPO and its relatives.
 *
 * A pair gives four numbers: the log-ratios D of both sequences and their scores S = f'(exp D),
 * which an f-divergence makes of them (arXiv:2309.16240; the reverse KL's is D itself).  A loss is
 * a function of these four and of the lengths; its derivatives with respect to them are carried
 * back to the tokens here. */
#include <stdlib.h>

#include "base/mem.h"
#include "tune/align/loss_impl.h"

enum { REVERSE_KL, FORWARD_KL, JS_DIVERGENCE, ALPHA_DIVERGENCE };

#define F_DIVERGENCE                                                               \
    { "f_divergence_type",                                                         \
      0,                                                                           \
      0,                                                                           \
      3,                                                                           \
      "divergence to the reference",                                               \
      "reverse_kl forward_kl js_divergence alpha_divergence" },                    \
    {                                                                              \
        "f_alpha_divergence_coef", 0.5, -10, 10, "alpha of alpha_divergence", NULL \
    }
#define WEIGHTING                                                              \
    {                                                                          \
        "use_weighting", 0, 0, 1, "pairs by their probability (WPO)", "off on" \
    }
#define STRENGTH BETA(0.1, "strength of the ties to the reference")

/* Of the chosen [0] and the rejected [1] sequence. */
typedef struct {
    double d[2], s[2], n[2];
} pair;

/* Returns the loss of a pair; `to` receives its derivatives by d and s. */
typedef double (*pair_loss)(const lm_align_use *u, const pair *x, pair *to);

/* ---- sequences ---- */

/* The score of a log-ratio, and its derivative. */
static double score(const lm_align_use *u, double d, double *slope)
{
    double a = lm_align_get(u, "f_alpha_divergence_coef", 0.5) - 1, e;
    *slope = 1;
    switch ((int)lm_align_get(u, "f_divergence_type", REVERSE_KL)) {
    case FORWARD_KL:
        *slope = exp(-d);
        return 1 - *slope;
    case JS_DIVERGENCE:
        *slope = lm_sigmoid(-d);
        return log(2.0) + lm_log_sigmoid(d);
    case ALPHA_DIVERGENCE:
        if (fabs(a) < 1e-6)
            return d;
        /* TRL's bound, so that the exponential stays finite in F32. */
        e = exp(fmin(a * d, 80));
        *slope = a * d > 80 ? 0 : e;
        return (e - 1) / a;
    default:
        return d;
    }
}

/* The weight of the k-th token of a completion (from 0), LD-DPO (arXiv:2409.06411): tokens past the
 * length of the shorter one count less. */
static double token_weight(const lm_align_use *u, int64_t k, double shared)
{
    return (double)k < shared ? 1 : lm_align_get(u, "ld_alpha", 1);
}

static double weigh_sum(const lm_align_use *u, const lm_align_seq *q, const double *x,
                        double shared)
{
    double sum = 0;
    for (int64_t t = 0, k = 0; t < q->n; t++)
        if (lm_align_counts_token(q, t))
            sum += token_weight(u, k++, shared) * x[t];
    return sum;
}

static void weigh_spread(const lm_align_use *u, lm_align_seq *q, double d, double shared)
{
    for (int64_t t = 0, k = 0; t < q->n; t++)
        if (lm_align_counts_token(q, t))
            q->dlogp[t] += token_weight(u, k++, shared) * d;
}

typedef struct {
    pair x;
    double slope[2], shared, logp[2], ref[2];
} view;

static view see(const lm_align_use *u, const lm_align_seq q[2])
{
    view v;
    for (int k = 0; k < 2; k++)
        v.x.n[k] = (double)lm_align_length(&q[k]);
    v.shared = fmin(v.x.n[0], v.x.n[1]);
    for (int k = 0; k < 2; k++) {
        v.logp[k] = weigh_sum(u, &q[k], q[k].logp, v.shared);
        v.ref[k] = weigh_sum(u, &q[k], q[k].ref, v.shared);
        v.x.d[k] = v.logp[k] - v.ref[k];
        v.x.s[k] = score(u, v.x.d[k], &v.slope[k]);
        v.x.n[k] = fmax(v.x.n[k], 1);
    }
    return v;
}

/* What the loss of a pair is multiplied by: how likely the policy is to sample its answers, beside
 * others. */
static double weigh_pair(const lm_align_use *u, const lm_align_seq q[2])
{
    double sum = 0;
    if (lm_align_get(u, "use_weighting", 0) == 0)
        return 1;
    for (int k = 0; k < 2; k++)
        if (q[k].collision)
            sum += (lm_align_sum(&q[k], q[k].logp) + lm_align_sum(&q[k], q[k].collision)) /
                   fmax((double)lm_align_length(&q[k]), 1);
    return exp(sum);
}

/* The weight of a pair in the mean over those of the step. */
static double pair_share(const lm_align_batch *b)
{
    return 2.0 / (double)(b->counts->sequences > 0 ? b->counts->sequences : 1);
}

static void note(const lm_align_use *u, lm_align_batch *b, const view *v)
{
    double beta = lm_align_get(u, "beta", 1);
    const lm_align_pair_note x = { { beta * v->x.d[0], beta * v->x.d[1] },
                                   { v->logp[0], v->logp[1] } };
    lm_align_note_pair(b, &x);
}

static lm_code run_pairs(const lm_align_use *u, lm_align_batch *b, pair_loss loss)
{
    double share = u->weight * pair_share(b);
    for (int64_t i = 0; i < b->n; i += 2) {
        view v = see(u, &b->seq[i]);
        pair to = { 0 };
        const double by = share * weigh_pair(u, &b->seq[i]);
        b->loss += by * loss(u, &v.x, &to);
        for (int k = 0; k < 2; k++)
            weigh_spread(u, &b->seq[i + k], by * (to.d[k] + to.s[k] * v.slope[k]), v.shared);
        note(u, b, &v);
    }
    return LM_OK;
}

/* A loss of beta (S_c - S_r) alone: value and derivative d. */
static double of_margin(const lm_align_use *u, const pair *x, pair *to,
                        double (*f)(const lm_align_use *, double, double *))
{
    double beta = lm_align_get(u, "beta", 0.1), d;
    double loss = f(u, beta * (x->s[0] - x->s[1]), &d);
    to->s[0] = beta * d;
    to->s[1] = -beta * d;
    return loss;
}

/* ---- losses of the margin ---- */

static double smooth(double x, double e, double *d)
{
    *d = -(1 - e) * lm_sigmoid(-x) + e * lm_sigmoid(x);
    return -(1 - e) * lm_log_sigmoid(x) - e * lm_log_sigmoid(-x);
}

static double dpo_margin(const lm_align_use *u, double x, double *d)
{
    return smooth(x, lm_align_get(u, "label_smoothing", 0), d);
}

static double dpo(const lm_align_use *u, const pair *x, pair *to)
{
    return of_margin(u, x, to, dpo_margin);
}

static double robust_margin(const lm_align_use *u, double x, double *d)
{
    double e = lm_align_get(u, "label_smoothing", 0), scale = 1 / (1 - 2 * e);
    *d = (-(1 - e) * lm_sigmoid(-x) - e * lm_sigmoid(x)) * scale;
    return (-(1 - e) * lm_log_sigmoid(x) + e * lm_log_sigmoid(-x)) * scale;
}

static double robust(const lm_align_use *u, const pair *x, pair *to)
{
    return of_margin(u, x, to, robust_margin);
}

static double hinge_margin(const lm_align_use *u, double x, double *d)
{
    (void)u;
    *d = x < 1 ? -1 : 0;
    return x < 1 ? 1 - x : 0;
}

static double hinge(const lm_align_use *u, const pair *x, pair *to)
{
    return of_margin(u, x, to, hinge_margin);
}

/* q log(q / p) summed over (sig(x), sig(-x)) and (1 - e, e): by x, q' = q_w q_l of the first. */
static double exo_margin(const lm_align_use *u, double x, double *d)
{
    double e = lm_align_get(u, "label_smoothing", 1e-3);
    double qw = lm_sigmoid(x), ql = lm_sigmoid(-x);
    double w = lm_log_sigmoid(x) - log1p(-e), l = lm_log_sigmoid(-x) - log(e);
    *d = qw * ql * (w - l);
    return qw * w + ql * l;
}

static double exo_pair(const lm_align_use *u, const pair *x, pair *to)
{
    return of_margin(u, x, to, exo_margin);
}

static double discopop_margin(const lm_align_use *u, double x, double *d)
{
    double tau = lm_align_get(u, "discopop_tau", 0.05), w = lm_sigmoid(x / tau);
    double dw = w * lm_sigmoid(-x / tau) / tau, logistic = -lm_log_sigmoid(x), grows = exp(-x);
    *d = -lm_sigmoid(-x) * (1 - w) - grows * w + (grows - logistic) * dw;
    return logistic * (1 - w) + grows * w;
}

static double discopop(const lm_align_use *u, const pair *x, pair *to)
{
    return of_margin(u, x, to, discopop_margin);
}

/* ---- losses of the mean over tokens ---- */

/* h of the scores for each token of a sequence, or of sums if `average` is off. */
static double token_margin(const lm_align_use *u, const pair *x, double n[2])
{
    bool average = lm_align_get(u, "average", 1) != 0;
    n[0] = average ? x->n[0] : 1;
    n[1] = average ? x->n[1] : 1;
    return x->s[0] / n[0] - x->s[1] / n[1];
}

static double ipo(const lm_align_use *u, const pair *x, pair *to)
{
    double n[2], off = token_margin(u, x, n) - 1 / (2 * lm_align_get(u, "beta", 0.1));
    to->s[0] = 2 * off / n[0];
    to->s[1] = -2 * off / n[1];
    return off * off;
}

static double sigmoid_norm(const lm_align_use *u, const pair *x, pair *to)
{
    double n[2], beta = lm_align_get(u, "beta", 0.1), d;
    double loss = smooth(beta * token_margin(u, x, n), 0, &d);
    to->s[0] = beta * d / n[0];
    to->s[1] = -beta * d / n[1];
    return loss;
}

/* ---- losses of each sequence ---- */

static double nca_pair(const lm_align_use *u, const pair *x, pair *to)
{
    double beta = lm_align_get(u, "beta", 0.1), c = beta * x->d[0], r = beta * x->d[1];
    to->d[0] = beta * (-lm_sigmoid(-c) + 0.5 * lm_sigmoid(c));
    to->d[1] = beta * 0.5 * lm_sigmoid(r);
    return -lm_log_sigmoid(c) - 0.5 * lm_log_sigmoid(-c) - 0.5 * lm_log_sigmoid(-r);
}

static double bco_pair(const lm_align_use *u, const pair *x, pair *to)
{
    double beta = lm_align_get(u, "beta", 0.1), c = beta * x->d[0], r = beta * x->d[1];
    to->d[0] = -beta * lm_sigmoid(-c);
    to->d[1] = beta * lm_sigmoid(r);
    return -lm_log_sigmoid(c) - lm_log_sigmoid(-r);
}

static double sppo_hard(const lm_align_use *u, const pair *x, pair *to)
{
    double half = 0.5 / lm_align_get(u, "beta", 0.1), c = x->d[0] - half, r = x->d[1] + half;
    to->d[0] = 2 * c;
    to->d[1] = 2 * r;
    return c * c + r * r;
}

static double apo_zero(const lm_align_use *u, const pair *x, pair *to)
{
    double beta = lm_align_get(u, "beta", 0.1), c = beta * x->d[0], r = beta * x->d[1];
    to->d[0] = -beta * lm_sigmoid(c) * lm_sigmoid(-c);
    to->d[1] = beta * lm_sigmoid(r) * lm_sigmoid(-r);
    return 1 - lm_sigmoid(c) + lm_sigmoid(r);
}

static double apo_down(const lm_align_use *u, const pair *x, pair *to)
{
    double beta = lm_align_get(u, "beta", 0.1), c = beta * x->d[0], h = c - beta * x->d[1];
    double dh = beta * lm_sigmoid(h) * lm_sigmoid(-h);
    to->d[0] = beta * lm_sigmoid(c) * lm_sigmoid(-c) - dh;
    to->d[1] = dh;
    return lm_sigmoid(c) + 1 - lm_sigmoid(h);
}

/* ---- losses of sorted numbers (optimal transport in one dimension) ---- */

typedef struct {
    double x;
    int64_t pair;
} ranked;

static int by_value(const void *a, const void *b)
{
    const ranked *p = a, *q = b;
    if (p->x != q->x)
        return p->x < q->x ? -1 : 1;
    return p->pair < q->pair ? -1 : p->pair > q->pair;
}

/* What is sorted: of aot the margins of the policy [0] and of the reference [1], of aot_unpaired
 * the log-ratios of chosen and rejected ones. */
static void rank_pairs(const lm_align_use *u, lm_align_batch *b, bool paired, ranked *of[2])
{
    for (int64_t i = 0; i < b->n; i += 2) {
        view v = see(u, &b->seq[i]);
        of[0][i / 2] = (ranked){ paired ? v.logp[0] - v.logp[1] : v.x.d[0], i };
        of[1][i / 2] = (ranked){ paired ? v.ref[0] - v.ref[1] : v.x.d[1], i };
        note(u, b, &v);
    }
    for (int k = 0; k < 2; k++)
        qsort(of[k], (size_t)b->n / 2, sizeof *of[k], by_value);
}

static lm_code run_sorted(const lm_align_use *u, lm_align_batch *b, bool paired, lm_err *e)
{
    double beta = lm_align_get(u, "beta", 0.1), off = lm_align_get(u, "label_smoothing", 0);
    double share = u->weight * pair_share(b), d;
    ranked *of[2] = { NULL };
    if (lm_alloc_n(&of[0], (size_t)b->n, sizeof *of[0], "pairs to be sorted", e))
        return e->code;
    of[1] = of[0] + b->n / 2;
    rank_pairs(u, b, paired, of);
    for (int64_t k = 0; k < b->n / 2; k++) {
        b->loss += share * smooth(beta * (of[0][k].x - of[1][k].x), off, &d);
        d *= share * beta;
        lm_align_seq *q = &b->seq[of[0][k].pair], *r = &b->seq[of[1][k].pair];
        double shared = fmin((double)lm_align_length(q), (double)lm_align_length(q + 1));
        double other = fmin((double)lm_align_length(r), (double)lm_align_length(r + 1));
        weigh_spread(u, q, d, shared);
        weigh_spread(u, paired ? q + 1 : r + 1, -d, paired ? shared : other);
    }
    lm_free(of[0]);
    return LM_OK;
}

/* ---- the table ---- */

static bool always(const lm_align_use *u)
{
    (void)u;
    return true;
}

static lm_code check_exo(const lm_align_use *u, lm_err *e)
{
    return lm_align_get(u, "label_smoothing", 0) > 0
               ? LM_OK
               : lm_fail(e, LM_EUSAGE, "exo_pair", "use 1e-3",
                         "label_smoothing 0 gives the rejected answers probability 0");
}

#define PAIR_LOSS(loss, published, text, ...)                                      \
    static const lm_hyper hyper_##loss[] = { __VA_ARGS__, { 0 } };                 \
    static lm_code run_##loss(const lm_align_use *u, lm_align_batch *b, lm_err *e) \
    {                                                                              \
        (void)e;                                                                   \
        return run_pairs(u, b, loss);                                              \
    }                                                                              \
    const lm_align_loss lm_loss_##loss = { .name = #loss,                          \
                                           .about = text,                          \
                                           .paper = "arXiv:" published,            \
                                           .kind = LM_ALIGN_PAIRS,                 \
                                           .rate = 1e-6,                           \
                                           .hyper = hyper_##loss,                  \
                                           .reads_ref = always,                    \
                                           .run = run_##loss }

PAIR_LOSS(dpo, "2305.18290", "direct preference optimisation", STRENGTH, SMOOTHING(0, 0.5),
          F_DIVERGENCE, LD_ALPHA, WEIGHTING);
PAIR_LOSS(robust, "2403.00409", "DPO corrected for wrong labels", STRENGTH, SMOOTHING(0, 0.499),
          F_DIVERGENCE, LD_ALPHA, WEIGHTING);
PAIR_LOSS(hinge, "2305.10425", "margin of at least 1 (SLiC)", STRENGTH, F_DIVERGENCE, LD_ALPHA,
          WEIGHTING);
PAIR_LOSS(ipo, "2310.12036", "squared distance to a fixed margin", STRENGTH,
          { "average", 1, 0, 1, "log-ratios for each token", "off on" }, F_DIVERGENCE, LD_ALPHA,
          WEIGHTING);
PAIR_LOSS(nca_pair, "2402.05369", "noise contrastive alignment", STRENGTH, LD_ALPHA, WEIGHTING);
PAIR_LOSS(bco_pair, "2404.04656", "binary classifier of answers", STRENGTH, LD_ALPHA, WEIGHTING);
PAIR_LOSS(sppo_hard, "2405.00675", "self-play, labels as probabilities 1 and 0", STRENGTH, LD_ALPHA,
          WEIGHTING);
PAIR_LOSS(apo_zero, "2408.06266", "anchored: chosen up, rejected down", STRENGTH, LD_ALPHA,
          WEIGHTING);
PAIR_LOSS(apo_down, "2408.06266", "anchored: both down, rejected more", STRENGTH, LD_ALPHA,
          WEIGHTING);
PAIR_LOSS(discopop, "2406.08414", "blend of logistic and exponential loss", STRENGTH,
          { "discopop_tau", 0.05, 1e-6, 1e6, "temperature of the blend", NULL }, F_DIVERGENCE,
          LD_ALPHA, WEIGHTING);
PAIR_LOSS(sigmoid_norm, "2411.15124", "DPO of log-ratios for each token", STRENGTH, F_DIVERGENCE,
          LD_ALPHA, WEIGHTING);

static const lm_hyper hyper_exo[] = { STRENGTH,     SMOOTHING(1e-3, 0.5),
                                      F_DIVERGENCE, LD_ALPHA,
                                      WEIGHTING,    { 0 } };

static lm_code run_exo(const lm_align_use *u, lm_align_batch *b, lm_err *e)
{
    (void)e;
    return run_pairs(u, b, exo_pair);
}

const lm_align_loss lm_loss_exo_pair = { .name = "exo_pair",
                                         .about = "reverse KL to the labels",
                                         .paper = "arXiv:2402.00856",
                                         .kind = LM_ALIGN_PAIRS,
                                         .rate = 1e-6,
                                         .hyper = hyper_exo,
                                         .reads_ref = always,
                                         .check = check_exo,
                                         .run = run_exo };

static const lm_hyper hyper_aot[] = { STRENGTH, SMOOTHING(0, 0.5), LD_ALPHA, { 0 } };

static lm_code run_aot(const lm_align_use *u, lm_align_batch *b, lm_err *e)
{
    return run_sorted(u, b, true, e);
}

static lm_code run_aot_unpaired(const lm_align_use *u, lm_align_batch *b, lm_err *e)
{
    return run_sorted(u, b, false, e);
}

const lm_align_loss lm_loss_aot = { .name = "aot",
                                    .about = "DPO of margins sorted in the micro-batch",
                                    .paper = "arXiv:2406.05882",
                                    .kind = LM_ALIGN_PAIRS,
                                    .rate = 1e-6,
                                    .hyper = hyper_aot,
                                    .reads_ref = always,
                                    .run = run_aot };
const lm_align_loss lm_loss_aot_unpaired = { .name = "aot_unpaired",
                                             .about = "DPO of rewards sorted in the micro-batch",
                                             .paper = "arXiv:2406.05882",
                                             .kind = LM_ALIGN_PAIRS,
                                             .rate = 1e-6,
                                             .hyper = hyper_aot,
                                             .reads_ref = always,
                                             .run = run_aot_unpaired };
